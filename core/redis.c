/* redis.c -- see redis.h.
 * hiredis writes and reads the protocol; the sockets are ours, since its blocking calls bound each read, not the whole answer.
 * True whenever the pool's lock is free: `open` counts the connections that idle, that somebody has taken, and that somebody is
 * making; after a failure nothing idles, and at most one call (the prober) talks to the server until an answer has come. */
#include "redis.h"
#include "limit.h"
#include "redis_addr.h"

#include <errno.h>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ANSWER_MAX  65536 /* bytes; all answers that we ask for are short, but for lists */
#define BACKOFF     (PDK_NS_PER_S / 20)
#define BACKOFF_MAX (2 * PDK_NS_PER_S)

#if HIREDIS_MAJOR >= 1
typedef size_t elements;
#else
typedef int elements;
#endif
typedef void *make_array(const redisReadTask *, elements);

struct pdk_redis_conn { /* the taker's; while it idles, the pool's lock's */
    pdk_redis *redis;   /* fixed at birth, as is the era */
    uint64_t era;       /* how many failures the pool had seen then */
    int fd;
    redisReader *reader;
    redisReplyObjectFunctions fn; /* the reader's, with create_array among them */
    make_array *usual;            /* hiredis' own */
    bool list;                    /* the answer may be a list */
    pdk_ns deadline;
    bool cut; /* the deadline is the caller's own: that it passed says nothing about the server */
    bool prober;
    bool answered, broken;
    bool spared;   /* of broken: the server is not to blame */
    char why[200]; /* of broken */
};

struct pdk_redis {
    pdk_redis_dialer dialer;
    pdk_mutex lock;
    pdk_cond changed;
    pdk_redis_conn *idle[PDK_REDIS_CONNS]; /* lock, as is all that follows; the freshest last */
    int idle_count, open;
    bool closed, probing;
    uint64_t era;    /* grows with each failure, so that one failure counts once, however many calls it hits */
    int failures;    /* since the last answer */
    pdk_ns retry_at; /* of failures > 0 */
    char why[200];   /* of the last one */
};

/* ---- one connection ---- */

static void conn_free(pdk_redis_conn *c)
{
    if (c == NULL)
        return;
    if (c->fd >= 0)
        close(c->fd);
    if (c->reader != NULL)
        redisReaderFree(c->reader);
    free(c);
}

static int broken(pdk_redis_conn *c, int sys, const char *what, pdk_error *err)
{
    c->broken = true;
    pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, sys, "redis at %s %s", pdk_redis_place(c->redis), what);
    snprintf(c->why, sizeof c->why, "%s", what);
    return -1;
}

static int too_late(pdk_redis_conn *c, pdk_error *err)
{
    c->spared = c->cut;
    return broken(c, ETIMEDOUT, c->cut ? "had not answered when the operation's own time was over" : "does not answer", err);
}

static int send_all(pdk_redis_conn *c, const char *text, size_t len, pdk_error *err)
{
    while (len > 0) {
        ssize_t n = send(c->fd, text, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n >= 0) {
            text += n;
            len -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (!pdk_redis_wait(c->fd, POLLOUT, c->deadline))
                return too_late(c, err);
        } else if (errno != EINTR) {
            return broken(c, errno, "has closed the connection", err);
        }
    }
    return 0;
}

/* A list's length would be believed, and memory made for it, before its elements have come: so it is refused where none is asked
 * for, when it is too long, and inside another one. */
static void *create_array(const redisReadTask *task, elements n)
{
    pdk_redis_conn *c = task->privdata;
    return c->list && task->parent == NULL && n <= PDK_REDIS_LIST ? c->usual(task, n) : NULL;
}

static bool reader_init(pdk_redis_conn *c)
{
    c->reader = redisReaderCreate();
    if (c->reader == NULL)
        return false;
    c->fn = *c->reader->fn;
    c->usual = c->fn.createArray;
    c->fn.createArray = create_array;
    c->reader->fn = &c->fn;
    c->reader->privdata = c;
    return true;
}

/* The next answer; NULL = broken. */
static redisReply *receive(pdk_redis_conn *c, pdk_error *err)
{
    char text[4096];
    size_t total = 0, most = c->list ? PDK_REDIS_LIST_BYTES : ANSWER_MAX;
    for (;;) {
        ssize_t n = recv(c->fd, text, sizeof text, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!pdk_redis_wait(c->fd, POLLIN, c->deadline))
                return too_late(c, err), NULL;
            continue;
        }
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return broken(c, n < 0 ? errno : 0, "has closed the connection before it answered", err), NULL;
        void *reply = NULL;
        if ((total += (size_t)n) > most || redisReaderFeed(c->reader, text, (size_t)n) != REDIS_OK ||
            redisReaderGetReply(c->reader, &reply) != REDIS_OK)
            return broken(c, EPROTO, "does not answer as redis does", err), NULL;
        if (reply != NULL)
            return reply;
    }
}

static void read_reply(const redisReply *r, pdk_redis_reply *out)
{
    memset(out, 0, sizeof *out);
    out->kind = r->type == REDIS_REPLY_NIL       ? PDK_REDIS_NIL
                : r->type == REDIS_REPLY_INTEGER ? PDK_REDIS_NUMBER
                : r->type == REDIS_REPLY_ERROR   ? PDK_REDIS_ERROR
                : r->type == REDIS_REPLY_ARRAY   ? PDK_REDIS_STRINGS
                                                 : PDK_REDIS_TEXT;
    out->number = r->type == REDIS_REPLY_INTEGER ? r->integer : 0;
    if (r->str == NULL)
        return;
    size_t n = r->len < sizeof out->text - 1 ? r->len : sizeof out->text - 1;
    for (size_t i = 0; i < n; i++) /* it goes into messages, which are one line */
        out->text[i] = (unsigned char)r->str[i] < 0x20 || r->str[i] == 0x7f ? '?' : r->str[i];
}

/* An answer that is a list goes to `list`. */
static int read_list(pdk_redis_conn *c, const redisReply *r, pdk_pack *list, pdk_error *err)
{
    if (r->type != REDIS_REPLY_ARRAY)
        return 0;
    pdk_mark m = pdk_begin_list(list);
    for (size_t i = 0; i < r->elements; i++, m.count++) {
        if (r->element[i]->type != REDIS_REPLY_STRING)
            return broken(c, EPROTO, "does not answer as redis does", err);
        pdk_put_str(list, r->element[i]->str, (size_t)r->element[i]->len);
    }
    pdk_end(list, &m);
    return list->failed ? pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "no memory for the answer of redis at %s",
                                   pdk_redis_place(c->redis))
                        : 0;
}

static bool has_word(const char *text, const char *word)
{
    size_t n = strlen(word);
    return strncmp(text, word, n) == 0 && (text[n] == ' ' || text[n] == '\0');
}

/* After these the same connection would go on saying so when another one need not: a failover, a login that was withdrawn. */
static bool ends_connection(const char *text)
{
    return has_word(text, "READONLY") || has_word(text, "MASTERDOWN") || has_word(text, "NOAUTH") ||
           has_word(text, "LOADING");
}

/* `list` NULL: the answer must be none. */
static int ask(pdk_redis_conn *c, const char *const *args, int n, pdk_pack *list, pdk_redis_reply *out, pdk_error *err)
{
    if (c->broken) /* an answer on it could be another request's */
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s %s", pdk_redis_place(c->redis), c->why);
    if (pdk_now_monotonic() >= c->deadline) /* nothing was sent: the connection is as good as before */
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, ETIMEDOUT, "no time is left to ask redis at %s",
                        pdk_redis_place(c->redis));
    char *text = NULL;
    int len = redisFormatCommandArgv(&text, n, (const char **)args, NULL);
    if (len < 0)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "no memory to ask redis at %s", pdk_redis_place(c->redis));
    c->list = list != NULL;
    int rc = send_all(c, text, (size_t)len, err);
    redisFreeCommand(text);
    redisReply *reply = rc < 0 ? NULL : receive(c, err);
    if (reply == NULL)
        return -1;
    read_reply(reply, out);
    rc = read_list(c, reply, list, err);
    freeReplyObject(reply);
    if (rc < 0)
        return -1;
    c->answered = true;
    if (c->reader->pos != c->reader->len || (out->kind == PDK_REDIS_ERROR && ends_connection(out->text))) {
        c->broken = true; /* this answer counts; there is no next one */
        snprintf(c->why, sizeof c->why, "answered: %.150s", out->text);
    }
    return 0;
}

int pdk_redis_ask(pdk_redis_conn *c, const char *const *args, int n, pdk_redis_reply *out, pdk_error *err)
{
    return ask(c, args, n, NULL, out, err);
}
int pdk_redis_ask_list(pdk_redis_conn *c, const char *const *args, int n, pdk_pack *list, pdk_redis_reply *out,
                       pdk_error *err)
{
    return ask(c, args, n, list, out, err);
}

/* ---- making one ---- */

/* The command, which must be answered by OK. */
static int must(pdk_redis_conn *c, const char *const *args, int n, const char *what, pdk_error *err)
{
    pdk_redis_reply reply;
    if (pdk_redis_ask(c, args, n, &reply, err) < 0)
        return -1;
    if (reply.kind == PDK_REDIS_TEXT)
        return 0;
    char text[200];
    snprintf(text, sizeof text, "refused %s: %.100s", what, reply.text);
    return broken(c, 0, text, err);
}

static int log_in(pdk_redis_conn *c, pdk_error *err)
{
    const pdk_redis_addr *a = &c->redis->dialer.addr;
    char db[16];
    snprintf(db, sizeof db, "%d", a->db);
    const char *auth[] = { "AUTH", a->user[0] != '\0' ? a->user : a->password, a->password };
    const char *select[] = { "SELECT", db };
    if (a->password[0] != '\0' && must(c, auth, a->user[0] != '\0' ? 3 : 2, "the password of ownership.url", err) < 0)
        return -1;
    return a->db == 0 ? 0 : must(c, select, 2, "the database of ownership.url", err);
}

/* Fills a new one. -1: broken, or no memory. */
static int conn_open(pdk_redis_conn *c, pdk_error *err)
{
    pdk_ns whole = c->deadline, first = pdk_now_monotonic() + PDK_REDIS_CONNECT;
    bool cut = c->cut;
    if (first < whole) {
        c->deadline = first;
        c->cut = false;
    }
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    bool ready = reader_init(c);
    c->fd = !ready ? -1 : pdk_redis_dial(&c->redis->dialer, c->deadline, &why);
    if (!ready)
        broken(c, ENOMEM, "cannot be asked", &why);
    if (c->fd < 0) {
        c->broken = true;
        c->spared = c->cut && why.sys == ETIMEDOUT;
        snprintf(c->why, sizeof c->why, "cannot be connected to");
        pdk_error_move(err, &why);
        return -1;
    }
    int rc = log_in(c, err);
    if (rc < 0 && !c->broken) /* not asked at all: but nobody else may find it half logged in */
        c->broken = c->spared = true;
    c->deadline = whole;
    c->cut = cut;
    return rc;
}

/* Nothing to read, and no end: anything else on an idle connection means that the server has restarted, or is none. */
static bool quiet(const pdk_redis_conn *c)
{
    char byte;
    return recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
}

/* ---- the pool ---- */

pdk_redis *pdk_redis_new(const char *url, pdk_error *err)
{
    pdk_redis *r = calloc(1, sizeof *r);
    if (r == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a redis client");
        return NULL;
    }
    if (pdk_redis_addr_parse(url, &r->dialer.addr, err) < 0) {
        free(r);
        return NULL;
    }
    pdk_redis_dialer_init(&r->dialer);
    pdk_mutex_init(&r->lock);
    pdk_cond_init(&r->changed);
    return r;
}

const char *pdk_redis_prefix(const pdk_redis *r)
{
    return r->dialer.addr.prefix;
}
const char *pdk_redis_place(const pdk_redis *r)
{
    return r->dialer.addr.place;
}

/* What idles, out of the pool, into `out`. */
static int take_idle(pdk_redis *r, pdk_redis_conn **out) PDK_REQUIRES(r->lock)
{
    int n = r->idle_count;
    memcpy(out, r->idle, (size_t)n * sizeof *out);
    r->idle_count = 0;
    r->open -= n;
    pdk_cond_broadcast(&r->changed);
    return n;
}

void pdk_redis_close(pdk_redis *r)
{
    pdk_redis_conn *old[PDK_REDIS_CONNS];
    int n;
    {
        PDK_GUARD(r->lock);
        r->closed = true;
        n = take_idle(r, old);
    }
    while (n > 0)
        conn_free(old[--n]);
}

void pdk_redis_free(pdk_redis *r)
{
    if (r == NULL)
        return;
    pdk_redis_close(r);
    pdk_redis_dialer_clear(&r->dialer);
    pdk_cond_destroy(&r->changed);
    pdk_mutex_destroy(&r->lock);
    explicit_bzero(&r->dialer.addr, sizeof r->dialer.addr);
    free(r);
}

static int no_turn(pdk_redis *r, int sys, const char *what, pdk_error *err)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, sys, "redis at %s %s", r->dialer.addr.place, what);
}

/* Waits for a place: 1 = *out has an idle connection, 0 = make one (`open` counts it), -1 = error. */
static int find_place(pdk_redis *r, pdk_ns deadline, bool *prober, pdk_redis_conn **out, pdk_error *err)
    PDK_REQUIRES(r->lock)
{
    for (;;) {
        pdk_ns now = pdk_now_monotonic();
        if (r->closed)
            return no_turn(r, 0, "is no longer asked: the store was closed", err);
        if (r->failures > 0 && (r->probing || now < r->retry_at))
            return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s %.150s; it is tried again %s",
                            r->dialer.addr.place, r->why, r->probing ? "by another call just now" : "within 2 s");
        *prober = r->failures > 0;
        if (r->idle_count > 0) {
            *out = r->idle[--r->idle_count];
            r->probing |= *prober;
            return 1;
        }
        if (r->open < PDK_REDIS_CONNS) {
            r->open++;
            r->probing |= *prober;
            return 0;
        }
        if (!pdk_cond_wait_until(&r->changed, &r->lock, deadline) && pdk_now_monotonic() >= deadline)
            return no_turn(r, ETIMEDOUT, "is slow: all connections were busy for the whole time that was left", err);
    }
}

pdk_redis_conn *pdk_redis_take(pdk_redis *r, pdk_error *err)
{
    pdk_ns limit = pdk_limit_current()->deadline, deadline = pdk_now_monotonic() + PDK_REDIS_WAIT;
    bool cut = limit < deadline, prober = false;
    pdk_redis_conn *c = NULL;
    uint64_t era;
    {
        PDK_GUARD(r->lock);
        if (find_place(r, cut ? limit : deadline, &prober, &c, err) < 0)
            return NULL;
        era = r->era;
    }
    if (c != NULL && !quiet(c)) { /* its place is ours now */
        conn_free(c);
        c = NULL;
    }
    bool fresh = c == NULL;
    if (fresh && (c = calloc(1, sizeof *c)) == NULL) {
        PDK_GUARD(r->lock);
        r->open--;
        r->probing &= !prober;
        pdk_cond_signal(&r->changed);
        no_turn(r, ENOMEM, "cannot be asked", err);
        return NULL;
    }
    c->deadline = cut ? limit : deadline;
    c->cut = cut;
    c->prober = prober;
    if (!fresh)
        return c;
    c->redis = r;
    c->era = era;
    c->fd = -1;
    if (conn_open(c, err) == 0)
        return c;
    pdk_redis_give(r, c);
    return NULL;
}

/* Called with a connection that has failed for the server's own reasons. */
static void note_failure(pdk_redis *r, const pdk_redis_conn *c) PDK_REQUIRES(r->lock)
{
    if (c->era != r->era)
        return; /* it belongs to a failure that was counted */
    uint32_t random;
    pdk_random(&random, sizeof random);
    pdk_ns wait = r->failures > 5 ? BACKOFF_MAX : BACKOFF << r->failures;
    wait -= wait / 2 * (random % 1024) / 1024; /* many runtimes do not come back in step */
    r->failures++;
    r->era++;
    r->retry_at = pdk_now_monotonic() + wait;
    snprintf(r->why, sizeof r->why, "%s", c->why);
}

void pdk_redis_give(pdk_redis *r, pdk_redis_conn *c)
{
    if (c == NULL)
        return;
    pdk_redis_conn *old[PDK_REDIS_CONNS + 1];
    int n = 0;
    {
        PDK_GUARD(r->lock);
        if (c->prober)
            r->probing = false;
        if (c->answered && !c->broken && c->era == r->era)
            r->failures = 0;
        if (c->broken && !c->spared) {
            note_failure(r, c);
            n = take_idle(r, old); /* the others lead to the same server */
        }
        if (c->broken || r->closed || c->era != r->era) {
            r->open--;
            old[n++] = c;
        } else {
            c->answered = c->prober = false;
            r->idle[r->idle_count++] = c;
        }
        pdk_cond_broadcast(&r->changed);
    }
    while (n > 0)
        conn_free(old[--n]);
}

pdk_ns pdk_redis_deadline(const pdk_redis_conn *c)
{
    return c->deadline;
}
