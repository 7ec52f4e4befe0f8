/* http.c -- connections and requests: HTTP/1.1 in, bounded in every direction.
 * A connection works on one request at a time: what is pipelined behind it waits. Output collects in `out` and is written
 * once per loop round; a route that is told "full" waits for on_drain, so a slow reader costs OUT_HIGH bytes and never
 * anybody else's time. reply.c makes the answers.
 * A connection is freed by conn_settle alone, at the end of a round: never inside a callback of a route or of the parser.
 * A client that ends its sending half before its reply has come counts as gone: HTTP clients do not, dead ones look so. */
#include "conn.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define HEAD_SECONDS    10  /* from the first byte of a request to the end of its headers */
#define BODY_SECONDS    60  /* between two bytes of a body that is kept or stored */
#define DISCARD_SECONDS 5   /* for the rest of a body that nobody wants */
#define WRITE_SECONDS   60  /* without any progress of a complete reply */
#define IDLE_SECONDS    300 /* of a connection that never showed a valid token */
#define HEAD_MAX        (64u << 10)
#define HEADERS_MAX     100
#define KEPT_MAX        (64u << 20)

static guest_watch listener;
static guest_timer accept_retry;
static guest_conn *conns, *dirty;
static size_t kept_bytes; /* of bodies in memory, over all connections */
static http_parser_settings callbacks;
static char inbuf[16384];

unsigned guest_http_contacts(void)
{
    unsigned n = 0;
    for (const guest_conn *c = conns; c != NULL; c = c->next)
        n += c->contact && !guest_doomed() && c->token >= guest_token(); /* an owner of before counts no more */
    return n;
}

void guest_http_mark_contact(guest_req *req)
{
    conn_of(req)->contact = true;
    conn_of(req)->token = req->token;
}

void guest_conn_touch(guest_conn *c)
{
    if (c->dirty)
        return;
    c->dirty = true;
    c->next_dirty = dirty;
    dirty = c;
}

void guest_body_pause(guest_req *req, bool paused)
{
    conn_of(req)->paused = paused;
    guest_conn_touch(conn_of(req));
}

/* ---- the head of a request ---- */

static bool head_add(guest_conn *c, const char *data, size_t len)
{
    size_t need = c->head_len + len + 2;
    if (need > HEAD_MAX || memchr(data, '\0', len) != NULL)
        return false;
    if (need > c->head_cap) {
        size_t cap = c->head_cap ? c->head_cap : 1024;
        while (cap < need)
            cap *= 2;
        char *grown = realloc(c->head, cap);
        if (grown == NULL)
            return false;
        c->head = grown;
        c->head_cap = cap;
    }
    memcpy(c->head + c->head_len, data, len);
    c->head_len += len;
    c->head[c->head_len] = '\0';
    return true;
}

static int on_url(http_parser *p, const char *data, size_t len)
{
    return head_add(p->data, data, len) ? 0 : 1;
}

static int on_field(http_parser *p, const char *data, size_t len)
{
    guest_conn *c = p->data;
    if (c->phase != CONN_HEAD)
        return 0; /* a trailer: nobody wants it, and routes hold pointers into the head */
    if (c->last != PART_NAME) {
        if (++c->header_count > HEADERS_MAX)
            return 1;
        c->head_len++; /* keeps the NUL of the part before */
        c->last = PART_NAME;
    }
    return head_add(c, data, len) ? 0 : 1;
}

static int on_value(http_parser *p, const char *data, size_t len)
{
    guest_conn *c = p->data;
    if (c->phase != CONN_HEAD)
        return 0;
    if (c->last != PART_VALUE) {
        c->head_len++;
        c->last = PART_VALUE;
    }
    return head_add(c, data, len) ? 0 : 1;
}

const char *guest_header(const guest_req *req, const char *name)
{
    const guest_conn *c = conn_of_const(req);
    if (c->header_count == 0)
        return NULL;
    const char *end = c->head + c->head_len;
    for (const char *at = c->head + strlen(c->head) + 1; at < end;) {
        const char *value = at + strlen(at) + 1;
        if (value > end)
            return NULL;
        if (strcasecmp(at, name) == 0)
            return value;
        at = value + strlen(value) + 1;
    }
    return NULL;
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Percent-decodes `len` bytes of `text` to `to` (which may be the same) with a NUL; false when malformed or a NUL is in it. */
static bool decode(char *to, const char *text, size_t len, bool plus)
{
    for (size_t i = 0; i < len; i++) {
        char ch = text[i];
        if (ch == '%') {
            int hi = len - i > 2 ? hex(text[i + 1]) : -1, lo = hi >= 0 ? hex(text[i + 2]) : -1;
            if (lo < 0 || hi + lo == 0)
                return false;
            ch = (char)(hi * 16 + lo);
            i += 2;
        } else if (plus && ch == '+') {
            ch = ' ';
        }
        *to++ = ch;
    }
    *to = '\0';
    return true;
}

/* Splits and decodes the target. */
static bool target_split(guest_conn *c)
{
    const char *target = c->head;
    size_t path_len = target != NULL ? strcspn(target, "?#") : 0;
    if (path_len == 0 || target[0] != '/')
        return false;
    const char *q = target[path_len] == '?' ? target + path_len + 1 : "";
    size_t query_len = strcspn(q, "#");
    c->path = malloc(path_len + 1);
    c->query = calloc(1, query_len * 2 + 4);
    if (c->path == NULL || c->query == NULL || !decode(c->path, target, path_len, false))
        return false;
    char *to = c->query;
    for (const char *end = q + query_len; q < end;) {
        size_t pair = strcspn(q, "&#");
        const char *eq = memchr(q, '=', pair);
        size_t name = eq != NULL ? (size_t)(eq - q) : pair;
        if (name > 0) {
            if (!decode(to, q, name, true))
                return false;
            to += strlen(to) + 1;
            if (!decode(to, eq != NULL ? eq + 1 : "", eq != NULL ? pair - name - 1 : 0, true))
                return false;
            to += strlen(to) + 1;
        }
        q += pair + (q + pair < end);
    }
    *to = '\0';
    return true;
}

const char *guest_query(const guest_req *req, const char *name)
{
    const char *at = conn_of_const(req)->query;
    while (at != NULL && *at != '\0') {
        const char *value = at + strlen(at) + 1;
        if (strcmp(at, name) == 0)
            return value;
        at = value + strlen(value) + 1;
    }
    return NULL;
}

/* ---- a request's course ---- */

static void refuse(guest_conn *c, int status, const char *code, const char *message)
{
    if (c->req.on_close != NULL)
        c->req.on_close(&c->req); /* the route was at work: it must forget the request first */
    if (c->begun) {
        c->broken = true; /* half an answer is out: only the cut is left */
        guest_conn_touch(c);
        return;
    }
    guest_fault f;
    guest_fail(&f, status, code, 0, "%s", message);
    if (c->req.method == NULL)
        c->req.method = "GET";
    c->keep = false;
    guest_reply_fault(&c->req, &f);
}

static int on_headers(http_parser *p)
{
    guest_conn *c = p->data;
    c->phase = CONN_BODY;
    c->keep = http_should_keep_alive(p) && !p->upgrade;
    c->req.method = http_method_str((enum http_method)p->method);
    c->req.body = "";
    c->req.body_max = GUEST_BODY_MAX;
    if (!target_split(c)) {
        refuse(c, 400, "invalid_target", "the request's target is malformed");
        return 0;
    }
    c->req.path = c->path;
    const char *expect = guest_header(&c->req, "Expect");
    c->expects_100 = expect != NULL && strcasecmp(expect, "100-continue") == 0;
    guest_route_begin(&c->req);
    if (!c->replied && p->content_length != UINT64_MAX && p->content_length > c->req.body_max)
        refuse(c, 413, "too_large", "the body is larger than this call takes");
    if (c->expects_100 && !c->replied) {
        c->expects_100 = false;
        guest_conn_continue(c);
    }
    return 0;
}

static int on_body(http_parser *p, const char *data, size_t len)
{
    guest_conn *c = p->data;
    if (c->replied)
        return 0;
    c->body_seen += len;
    if (c->body_seen > c->req.body_max) {
        refuse(c, 413, "too_large", "the body is larger than this call takes");
        return 0;
    }
    if (c->req.on_body != NULL) {
        c->req.on_body(&c->req, data, len);
        return 0;
    }
    size_t need = c->req.body_len + len + 1;
    if (need > c->body_cap) {
        size_t cap = c->body_cap ? c->body_cap : 512;
        while (cap < need)
            cap *= 2;
        char *grown = kept_bytes + cap - c->body_cap <= KEPT_MAX ? realloc(c->body, cap) : NULL;
        if (grown == NULL) {
            refuse(c, 503, "no_memory", "no memory for the body");
            return 0;
        }
        kept_bytes += cap - c->body_cap;
        c->body = grown;
        c->body_cap = cap;
    }
    memcpy(c->body + c->req.body_len, data, len);
    c->req.body_len += len;
    c->body[c->req.body_len] = '\0';
    c->req.body = c->body;
    return 0;
}

static int on_complete(http_parser *p)
{
    guest_conn *c = p->data;
    c->phase = CONN_WAIT;
    http_parser_pause(p, 1); /* the next request is parsed when this one is answered */
    if (c->replied)
        return 0;
    if (c->req.on_end != NULL)
        c->req.on_end(&c->req);
    else if (c->req.on_body == NULL)
        guest_route_end(&c->req);
    return 0;
}

static void request_clear(guest_conn *c)
{
    kept_bytes -= c->body_cap;
    free(c->head);
    free(c->path);
    free(c->query);
    free(c->body);
    c->head = c->path = c->query = c->body = NULL;
    c->head_len = c->head_cap = c->body_cap = 0;
    c->body_seen = 0;
    c->header_count = 0;
    c->last = PART_TARGET;
    c->req = (guest_req){ 0 };
    c->replied = c->begun = c->chunked = c->paused = c->full = c->expects_100 = false;
    c->phase = CONN_IDLE;
}

/* Keeps what cannot be parsed yet. */
static void rest_keep(guest_conn *c, const char *data, size_t len)
{
    char *copy = len > 0 ? malloc(len) : NULL;
    if (copy != NULL)
        memcpy(copy, data, len);
    else if (len > 0)
        c->broken = true;
    free(c->rest);
    c->rest = copy;
    c->rest_len = copy != NULL ? len : 0;
}

static void parse(guest_conn *c, const char *data, size_t len)
{
    while (len > 0 && !c->broken) {
        if (c->phase == CONN_WAIT)
            break;
        if (c->phase == CONN_IDLE)
            c->phase = CONN_HEAD;
        size_t n = http_parser_execute(&c->parser, &callbacks, data, len);
        enum http_errno e = HTTP_PARSER_ERRNO(&c->parser);
        data += n;
        len -= n;
        if (e == HPE_PAUSED) {
            http_parser_pause(&c->parser, 0);
        } else if (e != HPE_OK) {
            c->phase = CONN_WAIT; /* whatever follows is not read */
            if (!c->replied)
                refuse(c, e == HPE_HEADER_OVERFLOW || e == HPE_CB_header_field || e == HPE_CB_header_value ? 431 : 400,
                       "bad_request", "not a request that HTTP/1.1 allows, or its head is too long");
            c->keep = false;
            len = 0;
        } else if (c->parser.upgrade) {
            len = 0; /* no upgrades here: the reply ends the connection */
        }
    }
    if (len > 0 && !c->broken)
        rest_keep(c, data, len);
}

static void parse_rest(guest_conn *c)
{
    char *data = c->rest;
    size_t len = c->rest_len;
    c->rest = NULL;
    c->rest_len = 0;
    parse(c, data, len);
    free(data);
}

/* ---- a connection's course ---- */

static void conn_free(guest_conn *c)
{
    for (guest_conn **at = &conns; *at != NULL; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    if (c->req.on_close != NULL && !c->replied)
        c->req.on_close(&c->req);
    guest_timer_stop(&c->deadline);
    guest_watch_close(&c->w);
    if (c->file >= 0)
        close(c->file);
    bool contact = c->contact && c->token >= guest_token();
    request_clear(c);
    guest_conn_out_free(c);
    free(c->rest);
    free(c);
    if (contact)
        guest_contact(); /* an open connection had stopped the orphan clock */
}

enum { DUE_NONE, DUE_IDLE, DUE_HEAD, DUE_BODY, DUE_DISCARD, DUE_WRITE };

static void on_deadline(guest_timer *t)
{
    guest_conn *c = t->ctx;
    if ((c->deadline_kind == DUE_HEAD || c->deadline_kind == DUE_BODY) && !c->replied) {
        refuse(c, 408, "request_timeout", "the request came too slowly");
        c->phase = CONN_WAIT;
    } else {
        c->broken = true;
    }
    c->deadline_kind = DUE_NONE;
    guest_conn_touch(c);
}

static int due_kind(const guest_conn *c)
{
    bool all_read = c->phase == CONN_WAIT || c->phase == CONN_IDLE;
    if (c->out_len > 0 && (c->replied || all_read))
        return c->replied || c->phase == CONN_IDLE ? DUE_WRITE : DUE_NONE;
    if (c->phase == CONN_IDLE)
        return c->contact ? DUE_NONE : DUE_IDLE;
    if (c->phase == CONN_HEAD)
        return DUE_HEAD;
    if (c->phase == CONN_BODY && c->replied)
        return DUE_DISCARD;
    return c->phase == CONN_BODY && !c->paused && c->req.body_max != UINT64_MAX ? DUE_BODY : DUE_NONE;
}

/* Sets what the connection waits for: events and deadline. */
static void conn_arm(guest_conn *c)
{
    static const double SECONDS[] = { 0, IDLE_SECONDS, HEAD_SECONDS, BODY_SECONDS, DISCARD_SECONDS, WRITE_SECONDS };
    int kind = due_kind(c);
    bool renew = c->progress && (kind == DUE_BODY || kind == DUE_WRITE);
    if (kind == DUE_NONE)
        guest_timer_stop(&c->deadline);
    else if (kind != c->deadline_kind || renew)
        guest_timer_in(&c->deadline, SECONDS[kind], on_deadline, c);
    c->deadline_kind = kind;
    c->progress = false;
    uint32_t events = c->out_len > 0 || c->file >= 0 ? EPOLLOUT : 0;
    if (c->phase != CONN_WAIT && !c->paused && !c->eof)
        events |= EPOLLIN;
    if (!c->replied && !c->eof)
        events |= EPOLLRDHUP;
    if (guest_watch_set(&c->w, events) < 0)
        c->broken = true;
}

static void conn_settle(guest_conn *c)
{
    for (;;) {
        guest_conn_write(c);
        if (c->broken)
            break;
        bool sent = c->out_len == 0 && c->file < 0;
        if (!c->replied) {
            if (c->rest_len == 0 || c->paused || c->phase == CONN_WAIT)
                break;
            parse_rest(c); /* a body that was paused */
            continue;
        }
        if (c->phase != CONN_WAIT) { /* the rest of the body is read and dropped, unless it may never come */
            if ((c->expects_100 || c->eof) && sent)
                c->broken = true;
            if (c->rest_len == 0)
                break;
            parse_rest(c);
            continue;
        }
        if (!c->keep || c->eof) {
            c->broken = sent;
            break;
        }
        if (!sent)
            break;
        request_clear(c);
        if (c->rest_len == 0)
            break;
        parse_rest(c);
    }
    if (!c->broken)
        conn_arm(c);
    if (c->broken)
        conn_free(c);
    else
        c->dirty = false;
}

void guest_http_flush(void)
{
    for (int guard = 0; dirty != NULL && guard < 100000; guard++) {
        guest_conn *c = dirty;
        dirty = c->next_dirty;
        conn_settle(c); /* it stays marked meanwhile: its callbacks must not put it on the list again */
    }
}

static void on_conn(guest_watch *w, uint32_t events)
{
    guest_conn *c = w->ctx;
    guest_conn_touch(c);
    if (events & (EPOLLHUP | EPOLLERR)) {
        c->broken = true;
        return;
    }
    bool reading = c->phase != CONN_WAIT && !c->paused;
    if ((events & EPOLLRDHUP) && !reading && !c->replied) {
        c->broken = true;
        return;
    }
    if (!(events & (EPOLLIN | EPOLLRDHUP)) || !reading)
        return;
    ssize_t n = recv(w->fd, inbuf, sizeof inbuf, MSG_DONTWAIT);
    if (n < 0 && errno != EAGAIN && errno != EINTR)
        c->broken = true;
    if (n == 0) {
        c->eof = true;
        c->broken = c->broken || !c->replied;
    }
    if (n > 0) {
        c->progress = true;
        parse(c, inbuf, (size_t)n);
    }
}

/* ---- accepting ---- */

static void on_accept_retry(guest_timer *t)
{
    (void)t;
    guest_watch_set(&listener, EPOLLIN);
}

static unsigned live_count(void)
{
    unsigned n = 0;
    for (const guest_conn *c = conns; c != NULL; c = c->next)
        n += !c->broken;
    return n;
}

/* The connection that makes room when there are too many: the oldest without a request at work (the list has the newest
 * first). NULL when all are at work. */
static guest_conn *evictable(void)
{
    guest_conn *victim = NULL;
    for (guest_conn *c = conns; c != NULL; c = c->next)
        if (!c->broken && (c->phase == CONN_IDLE || c->phase == CONN_HEAD))
            victim = c;
    return victim;
}

static void accept_later(void)
{
    guest_watch_drop(&listener);
    guest_timer_in(&accept_retry, 0.1, on_accept_retry, NULL);
}

static void conn_new(int fd)
{
    guest_conn *c = calloc(1, sizeof *c);
    if (c == NULL) {
        close(fd);
        return;
    }
    c->w = (guest_watch){ .fd = fd, .fn = on_conn, .ctx = c };
    c->file = -1;
    http_parser_init(&c->parser, HTTP_REQUEST);
    c->parser.data = c;
    c->next = conns;
    conns = c;
    conn_arm(c);
}

static void on_accept(guest_watch *w, uint32_t events)
{
    (void)events;
    for (int i = 0; i < 16; i++) {
        guest_conn *victim = live_count() >= guest_conf.max_connections ? evictable() : NULL;
        if (victim == NULL && live_count() >= guest_conf.max_connections) {
            accept_later();
            return;
        }
        int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS))
            accept_later();
        if (fd < 0)
            return;
        if (victim != NULL) {
            victim->broken = true;
            guest_conn_touch(victim);
        }
        conn_new(fd);
    }
}

int guest_http_listen(int fd)
{
    http_parser_settings_init(&callbacks);
    callbacks.on_url = on_url;
    callbacks.on_header_field = on_field;
    callbacks.on_header_value = on_value;
    callbacks.on_headers_complete = on_headers;
    callbacks.on_body = on_body;
    callbacks.on_message_complete = on_complete;
    listener = (guest_watch){ .fd = fd, .fn = on_accept };
    return guest_watch_set(&listener, EPOLLIN);
}
