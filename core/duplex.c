/* duplex.c -- a request whose peer switches to a stream of bytes in both directions (an engine's attached exec).
 *
 * libcurl cannot: it sends a body before it reads an answer. So it only connects here (unix socket, TCP or TLS; CONNECT_ONLY), and
 * the little that is needed of HTTP/1.1 is written and read by hand: one request, one head of an answer, and then either bytes
 * until the end or, when the peer did not switch, a body with a length.
 * As in http.c: libcurl runs inside a pdk_quiet and never waits there; nothing is ever sent twice; the thread's limit is obeyed.
 * Locks: none. */
#include "conn.h"
#include "descriptors.h"
#include "http.h"
#include "quiet.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#define CONNECT_TIMEOUT 5.0
#define HEAD_MAX        ((size_t)64 << 10)
#define BODY_MAX        ((size_t)64 << 20)
#define CHUNK           ((size_t)64 << 10)
#define SLICE           (40 * 1000 * 1000) /* ns: how late a cancel may be noticed */

typedef struct bytes {
    char *data;
    size_t len, cap;
} bytes;

typedef struct duplex { /* the calling thread's */
    const pdk_http_request *req;
    pdk_conn *conn; /* owned */
    curl_socket_t socket;
    bytes head;     /* owned; of the request first, then of the answer */
    bytes body;     /* owned */
    size_t sent, input_sent;
    bool budgeted; /* its descriptors were taken from the budget */
    bool begun, switched, ended_input, at_end, stopped, tls;
    long long length; /* of an answer that is no stream; -1 = until the end */
    int status;
    pdk_ns deadline, connect_deadline;
    bool own_deadline;
    char target[220];
    char error[CURL_ERROR_SIZE]; /* libcurl's own words; the handle points here until duplex_free */
} duplex;

static void duplex_free(duplex *d)
{
    if (d->conn != NULL) /* the handle goes on without us */
        curl_easy_setopt(d->conn->easy, CURLOPT_ERRORBUFFER, NULL);
    if (d->conn != NULL && d->conn->attached) { /* libcurl closes a connection that nobody can use any more */
        pdk_quiet q;
        pdk_quiet_enter(&q);
        d->conn->attached = curl_multi_remove_handle(d->conn->multi, d->conn->easy) != CURLM_OK;
        pdk_quiet_leave(&q);
    }
    if (d->conn != NULL)
        pdk_conn_give(d->conn, false);
    if (d->budgeted)
        pdk_descriptors_give(PDK_CONN_DESCRIPTORS);
    free(d->head.data);
    free(d->body.data);
}
#define AUTO_DUPLEX __attribute__((cleanup(duplex_free))) duplex

static int fail(pdk_error *err, const duplex *d, const char *reason, int sys, const char *what)
{
    pdk_fail(err, PDK_E_BACKEND_ERROR, sys, "%s: %s", d->target, what);
    if (err != NULL)
        snprintf(err->reason, sizeof err->reason, "%s", reason);
    return -1;
}

/* What libcurl says of it. */
static int fail_code(pdk_error *err, const duplex *d, const char *reason, CURLcode code)
{
    bool tls = d->tls && pdk_conn_distrusted(code, d->error);
    return fail(err, d, tls ? "tls" : reason, 0, d->error[0] != '\0' ? d->error : curl_easy_strerror(code));
}

static bool add(bytes *b, const char *data, size_t len)
{
    if (b->cap - b->len <= len) {
        size_t cap = b->cap == 0 ? 4096 : b->cap;
        while (cap - b->len <= len)
            cap *= 2;
        char *grown = realloc(b->data, cap);
        if (grown == NULL)
            return false;
        b->data = grown;
        b->cap = cap;
    }
    memcpy(b->data + b->len, data, len);
    b->len += len;
    b->data[b->len] = '\0';
    return true;
}

static bool add_text(bytes *b, const char *text)
{
    return add(b, text, strlen(text));
}

/* ---- the request ---------------------------------------------------------------------------------------- */

static void take_text(CURLU *u, CURLUPart part, char *out, size_t size)
{
    char *text = NULL;
    out[0] = '\0';
    if (curl_url_get(u, part, &text, 0) == CURLUE_OK && strlen(text) < size)
        strcpy(out, text);
    curl_free(text);
}

/* Writes the head of the request into d->head. */
static int write_request(duplex *d, pdk_error *err)
{
    const pdk_http_request *req = d->req;
    char scheme[16], host[256], port[16], path[3000], query[3000], line[64];
    CURLU *u = curl_url();
    if (u == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request");
    bool fine = req->url != NULL && curl_url_set(u, CURLUPART_URL, req->url, 0) == CURLUE_OK;
    take_text(u, CURLUPART_SCHEME, scheme, sizeof scheme);
    take_text(u, CURLUPART_HOST, host, sizeof host);
    take_text(u, CURLUPART_PORT, port, sizeof port);
    take_text(u, CURLUPART_PATH, path, sizeof path);
    take_text(u, CURLUPART_QUERY, query, sizeof query);
    curl_url_cleanup(u);
    if (!fine || path[0] != '/' || host[0] == '\0' || (strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0))
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "not a URL that begins with http:// or https://, or too long a one");
    d->tls = strcmp(scheme, "https") == 0;
    snprintf(d->target, sizeof d->target, "%.20s %.100s on %.90s", req->method, path, req->unix_socket != NULL ? req->unix_socket : host);
    bytes *h = &d->head;
    bool ok = add_text(h, req->method) && add_text(h, " ") && add_text(h, path) && (query[0] == '\0' || (add_text(h, "?") &&
              add_text(h, query))) && add_text(h, " HTTP/1.1\r\nHost: ") && add_text(h, host) && (port[0] == '\0' ||
              (add_text(h, ":") && add_text(h, port))) && add_text(h, "\r\nUser-Agent: paddock/" PDK_VERSION
              "\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n");
    for (const char *const *one = req->headers; ok && one != NULL && *one != NULL; one++) {
        if (strpbrk(*one, "\r\n") != NULL || strchr(*one, ':') == NULL)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "a request header must be one line, \"Name: value\" (%.40s)", *one);
        ok = add_text(h, *one) && add_text(h, "\r\n");
    }
    snprintf(line, sizeof line, "Content-Length: %zu\r\n\r\n", req->body_len);
    ok = ok && add_text(h, line) && (req->body_len == 0 || add(h, req->body, req->body_len));
    return ok ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request");
}

/* ---- waiting -------------------------------------------------------------------------------------------- */

static int check_limit(const duplex *d, const pdk_limit *limit, pdk_error *err)
{
    if (pdk_limit_cancelled(limit))
        return pdk_fail(err, PDK_E_CANCELLED, 0, "%s was cancelled", d->target);
    if (pdk_now_monotonic() < d->deadline)
        return 0;
    if (!d->own_deadline)
        return pdk_fail(err, PDK_E_TIMEOUT, 0, "%s: no end within the operation's time limit", d->target);
    return fail(err, d, d->begun ? "read_timeout" : "connect", 0, d->begun ? "no end within its limit" : "no connection within its limit");
}

/* Waits for libcurl's own events, or for the socket (events: CURL_WAIT_POLLIN, _POLLOUT). */
static int wait_for(duplex *d, const pdk_limit *limit, short events, pdk_error *err)
{
    if (check_limit(d, limit, err) < 0)
        return -1;
    pdk_ns left = d->deadline == PDK_NEVER ? PDK_NS_PER_S : d->deadline - pdk_now_monotonic();
    if (left > PDK_NS_PER_S)
        left = PDK_NS_PER_S;
    if (pdk_limit_can_cancel(limit) && left > SLICE)
        left = SLICE;
    struct curl_waitfd fd = { .fd = d->socket, .events = events };
    curl_multi_poll(d->conn->multi, events != 0 ? &fd : NULL, events != 0 ? 1 : 0, (int)((left + 999999) / 1000000), NULL);
    return 0;
}

/* ---- connecting ----------------------------------------------------------------------------------------- */

static CURLcode set_options(duplex *d)
{
    const pdk_http_request *req = d->req;
    CURL *e = d->conn->easy;
    curl_easy_reset(e);
    CURLcode rc = curl_easy_setopt(e, CURLOPT_URL, req->url);
    if (rc == CURLE_OK && req->unix_socket != NULL)
        rc = curl_easy_setopt(e, CURLOPT_UNIX_SOCKET_PATH, req->unix_socket);
    if (rc == CURLE_OK)
        rc = curl_easy_setopt(e, CURLOPT_PROXY, "");
    if (rc == CURLE_OK && d->tls)
        rc = pdk_conn_set_tls(e, req);
    d->error[0] = '\0';
    curl_easy_setopt(e, CURLOPT_ERRORBUFFER, d->error);
    long wait_ms = (long)((d->connect_deadline - pdk_now_monotonic()) / 1000000);
    curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L);
    curl_easy_setopt(e, CURLOPT_CONNECT_ONLY, 1L);
    curl_easy_setopt(e, CURLOPT_FRESH_CONNECT, 1L);
    curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, wait_ms < 1 ? 1L : wait_ms);
    return rc;
}

static int connect_to(duplex *d, const pdk_limit *limit, pdk_error *err)
{
    CURLcode code = set_options(d);
    if (code != CURLE_OK || curl_multi_add_handle(d->conn->multi, d->conn->easy) != CURLM_OK)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory to connect", d->target);
    d->conn->attached = true;
    for (int running = 1, left = 0; running > 0;) {
        pdk_quiet q;
        pdk_quiet_enter(&q);
        CURLMcode rc = curl_multi_perform(d->conn->multi, &running);
        pdk_quiet_leave(&q);
        const CURLMsg *msg = running == 0 ? curl_multi_info_read(d->conn->multi, &left) : NULL;
        code = msg != NULL ? msg->data.result : rc == CURLM_OK ? CURLE_OK : CURLE_COULDNT_CONNECT;
        if (running > 0 && wait_for(d, limit, 0, err) < 0)
            return -1;
    }
    if (code == CURLE_OK)
        code = curl_easy_getinfo(d->conn->easy, CURLINFO_ACTIVESOCKET, &d->socket);
    if (code == CURLE_OK && d->socket != CURL_SOCKET_BAD)
        return 0;
    return code != CURLE_OK ? fail_code(err, d, "connect", code) : fail(err, d, "connect", 0, "no connection");
}

/* ---- both directions ------------------------------------------------------------------------------------ */

/* Sends what it can of `data` from *at on. 1 = something went, 0 = not now, -1 = error. */
static int send_some(duplex *d, const char *data, size_t len, size_t *at, pdk_error *err)
{
    size_t n = 0, want = len - *at < CHUNK ? len - *at : CHUNK;
    pdk_quiet q;
    pdk_quiet_enter(&q);
    d->begun = true;
    CURLcode code = curl_easy_send(d->conn->easy, data + *at, want, &n);
    pdk_quiet_leave(&q);
    if (code == CURLE_AGAIN)
        return 0;
    if (code != CURLE_OK)
        return fail_code(err, d, "write", code);
    *at += n;
    return 1;
}

/* The input, as far as it goes. A peer that takes no more has ended its side of it, and may still have something to say. */
static bool send_input(duplex *d)
{
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
    if (d->ended_input)
        return false;
    int rc = d->input_sent < d->req->input_len ? send_some(d, d->req->input, d->req->input_len, &d->input_sent, &ignored) : 1;
    if (rc < 0 || (rc > 0 && d->input_sent == d->req->input_len)) {
        d->ended_input = true;
        if (!d->tls && rc > 0)
            shutdown(d->socket, SHUT_WR);
    }
    return rc != 0;
}

static int deliver(duplex *d, const char *data, size_t len, pdk_error *err)
{
    if (len == 0 || d->stopped)
        return 0;
    if (d->switched && d->req->on_body != NULL) {
        d->stopped = !d->req->on_body(d->req->on_body_ctx, data, len);
        return 0;
    }
    size_t max = d->req->max_body != 0 ? d->req->max_body : BODY_MAX;
    if (len > max - d->body.len)
        return fail(err, d, "too_large", 0, "the answer is too long");
    return add(&d->body, data, len) ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", d->target);
}

/* Turns "HTTP/1.1 101 UPGRADED\r\nName: value\r\n..." into status, length and "Name: value\n..." lines. */
static int read_head(duplex *d, size_t len, pdk_error *err)
{
    int minor = 0;
    d->head.data[len] = '\0';
    if (sscanf(d->head.data, "HTTP/1.%1d %3d", &minor, &d->status) != 2)
        return fail(err, d, "protocol", 0, "the answer is not HTTP/1");
    d->length = -1;
    bool chunked = false;
    char *to = d->head.data;
    for (char *line = strstr(d->head.data, "\r\n"); line != NULL && line[2] != '\0';) {
        line += 2;
        size_t n = strcspn(line, "\r\n");
        if (strncasecmp(line, "content-length:", 15) == 0)
            d->length = strtoll(line + 15, NULL, 10);
        chunked |= strncasecmp(line, "transfer-encoding:", 18) == 0 && strcasestr(line + 18, "chunked") != NULL;
        char *next = line[n] != '\0' ? line + n : NULL;
        memmove(to, line, n);
        to += n;
        *to++ = '\n';
        line = next;
    }
    *to = '\0';
    d->switched = d->status == 101 || (d->status == 200 && d->length < 0 && !chunked);
    if (chunked && d->status == 200)
        return fail(err, d, "protocol", 0, "the engine did not switch to a stream");
    return 0;
}

/* What came: first the head, then the stream or a body. */
static int take(duplex *d, const char *data, size_t len, pdk_error *err)
{
    if (d->status != 0)
        return deliver(d, data, len, err);
    if (d->head.len + len > HEAD_MAX)
        return fail(err, d, "protocol", 0, "the answer's headers are too long");
    if (!add(&d->head, data, len))
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", d->target);
    char *end = memmem(d->head.data, d->head.len, "\r\n\r\n", 4);
    if (end == NULL)
        return 0;
    size_t head = (size_t)(end - d->head.data), rest = d->head.len - head - 4;
    char *more = rest > 0 ? malloc(rest) : NULL; /* read_head writes over it */
    if (rest > 0 && more == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", d->target);
    if (rest > 0)
        memcpy(more, end + 4, rest);
    int rc = read_head(d, head, err);
    if (rc == 0)
        rc = deliver(d, more, rest, err);
    free(more);
    return rc;
}

/* 1 = something came, 0 = not now, -1 = error. */
static int receive(duplex *d, char *buffer, pdk_error *err)
{
    size_t n = 0;
    pdk_quiet q;
    pdk_quiet_enter(&q);
    CURLcode code = curl_easy_recv(d->conn->easy, buffer, CHUNK, &n);
    pdk_quiet_leave(&q);
    if (code == CURLE_AGAIN)
        return 0;
    if (code != CURLE_OK)
        return fail_code(err, d, "read", code);
    d->at_end = n == 0;
    return take(d, buffer, n, err) < 0 ? -1 : 1;
}

static bool is_over(const duplex *d)
{
    bool whole = d->status != 0 && !d->switched && d->length >= 0 && (long long)d->body.len >= d->length;
    return d->at_end || d->stopped || whole;
}

static int exchange(duplex *d, const pdk_limit *limit, char *buffer, pdk_error *err)
{
    while (d->sent < d->head.len) {
        int rc = send_some(d, d->head.data, d->head.len, &d->sent, err);
        if (rc < 0 || (rc == 0 && wait_for(d, limit, CURL_WAIT_POLLOUT, err) < 0))
            return -1;
    }
    d->head.len = 0;
    while (!is_over(d)) {
        bool moved = d->switched && send_input(d);
        int rc = receive(d, buffer, err);
        if (rc < 0)
            return -1;
        bool more = d->switched && !d->ended_input;
        if (rc == 0 && !moved && wait_for(d, limit, more ? CURL_WAIT_POLLIN | CURL_WAIT_POLLOUT : CURL_WAIT_POLLIN, err) < 0)
            return -1;
        if ((rc > 0 || moved) && check_limit(d, limit, err) < 0)
            return -1;
    }
    return d->status != 0 ? 0 : fail(err, d, "read", 0, "the connection was closed before an answer came");
}

int pdk_http_duplex(const pdk_http_request *req, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err)
{
    pdk_http_failure unused;
    failure = failure == NULL ? &unused : failure;
    *failure = PDK_HTTP_NOT_SENT;
    *out = (pdk_http_response){ 0 };
    AUTO_DUPLEX d = { .req = req, .socket = CURL_SOCKET_BAD, .length = -1 };
    if (write_request(&d, err) < 0)
        return -1;
    const pdk_limit *limit = pdk_limit_current();
    pdk_ns now = pdk_now_monotonic(), own = req->timeout > 0 ? pdk_after(now, pdk_seconds(req->timeout)) : PDK_NEVER;
    d.own_deadline = own < limit->deadline;
    d.deadline = d.own_deadline ? own : limit->deadline;
    d.connect_deadline = pdk_after(now, pdk_seconds(req->connect_timeout > 0 && req->connect_timeout < 86400 ? req->connect_timeout
                                                                                                             : CONNECT_TIMEOUT));
    char *buffer = malloc(CHUNK);
    int rc = buffer == NULL ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request")
                            : pdk_descriptors_take(PDK_CONN_DESCRIPTORS, limit, d.deadline, err);
    d.budgeted = rc == 0;
    if (rc == 0 && (d.conn = pdk_conn_take("duplex", 0, err)) == NULL)
        rc = -1;
    if (rc == 0)
        rc = connect_to(&d, limit, err);
    if (rc == 0)
        rc = exchange(&d, limit, buffer, err);
    free(buffer);
    *failure = rc == 0 ? PDK_HTTP_NONE : d.begun ? PDK_HTTP_AMBIGUOUS : PDK_HTTP_NOT_SENT;
    if (rc < 0)
        return -1;
    if (!add(&d.body, "", 0))
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", d.target);
    *out = (pdk_http_response){ .status = d.status, .body = d.body.data, .body_len = d.body.len, .headers = d.head.data };
    d.body.data = d.head.data = NULL;
    return 0;
}
