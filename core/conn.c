/* conn.c -- the pool of idle connections.
 * True whenever the pool's lock is free: idle[0..idle_count) are detached handles whose connection was alive when they
 * were put there, the longest waiting first; none of them is known to anybody else.
 * Locks: the pool's alone, and nothing is called under it but memory: handles are closed outside (a TLS farewell writes).
 * In a forked child the parent's connections are the parent's: not used, not closed, not even looked at. */
#include "conn.h"

#include "quiet.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static pdk_mutex pool_lock = { .m = PTHREAD_MUTEX_INITIALIZER };
static pdk_conn *idle[PDK_CONN_IDLE_MAX]; /* pool_lock */
static size_t idle_count;                 /* pool_lock */
static bool started;                      /* pool_lock */
static pid_t owner;                       /* pool_lock; read freely once started */

/* The process that set libcurl up is this one, or nobody has yet. */
static bool owned_here(void)
{
    pid_t who = __atomic_load_n(&owner, __ATOMIC_ACQUIRE);
    return who == 0 || who == getpid();
}

static void conn_free(pdk_conn *c)
{
    if (c == NULL)
        return;
    pdk_quiet q;
    pdk_quiet_enter(&q);
    if (c->attached)
        curl_multi_remove_handle(c->multi, c->easy);
    if (c->easy != NULL)
        curl_easy_cleanup(c->easy);
    if (c->multi != NULL)
        curl_multi_cleanup(c->multi);
    pdk_quiet_leave(&q);
    free(c->key);
    free(c);
}

static pdk_conn *conn_new(const char *key)
{
    pdk_conn *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->key = strdup(key);
    c->easy = curl_easy_init();
    c->multi = curl_multi_init();
    if (c->key == NULL || c->easy == NULL || c->multi == NULL) {
        conn_free(c);
        return NULL;
    }
    curl_multi_setopt(c->multi, CURLMOPT_MAXCONNECTS, 1L);
    curl_multi_setopt(c->multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
    return c;
}

/* Nothing to read and no end: anything else on an idle connection means that it must not be used again. Checked here as
 * libcurl 7.88 does not see a mere end-of-file on TCP before it sends. */
static bool alive(curl_socket_t s)
{
    char byte;
    return s != CURL_SOCKET_BAD && recv(s, &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 &&
           (errno == EAGAIN || errno == EWOULDBLOCK);
}

static bool start_libcurl(void) PDK_REQUIRES(pool_lock)
{
    if (started)
        return true;
    pdk_quiet q;
    pdk_quiet_enter(&q);
    started = curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK;
    pdk_quiet_leave(&q);
    if (started)
        __atomic_store_n(&owner, getpid(), __ATOMIC_RELEASE);
    return started;
}

static pdk_conn *take_at(size_t i) PDK_REQUIRES(pool_lock)
{
    pdk_conn *c = idle[i];
    idle_count--;
    memmove(&idle[i], &idle[i + 1], (idle_count - i) * sizeof idle[0]);
    idle[idle_count] = NULL;
    return c;
}

/* The longest waiting ones that are too old, at most `max` of them: into `old`. */
static size_t take_aged(pdk_ns now, pdk_conn **old, size_t max) PDK_REQUIRES(pool_lock)
{
    size_t n = 0;
    while (n < max && idle_count > 0 && now - idle[0]->idle_since > PDK_CONN_AGE)
        old[n++] = take_at(0);
    return n;
}

pdk_conn *pdk_conn_take(const char *key, pdk_ns max_idle, pdk_error *err)
{
    if (!owned_here()) {
        pdk_fail(err, PDK_E_CLOSED, 0, "no HTTP in a forked child: its connections belong to the parent");
        return NULL;
    }
    pdk_conn *found = NULL, *old[4];
    size_t n = 0;
    bool ready = false;
    {
        PDK_GUARD(pool_lock);
        ready = start_libcurl();
        pdk_ns now = pdk_now_monotonic();
        n = take_aged(now, old, sizeof old / sizeof old[0]);
        for (size_t i = idle_count; found == NULL && max_idle > 0 && i > 0; i--) /* the freshest first */
            if (now - idle[i - 1]->idle_since <= max_idle && strcmp(idle[i - 1]->key, key) == 0)
                found = take_at(i - 1);
    }
    while (n > 0)
        conn_free(old[--n]);
    if (found != NULL && !alive(found->socket)) {
        conn_free(found);
        found = NULL;
    }
    if (found != NULL)
        found->reused = true;
    else if (ready)
        found = conn_new(key);
    if (found == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an HTTP connection");
    return found;
}

void pdk_conn_give(pdk_conn *c, bool keep)
{
    if (c == NULL || !owned_here())
        return;
    curl_easy_reset(c->easy); /* it must not keep pointers into the request that is over */
    pdk_conn *drop[2] = { NULL, NULL };
    if (!keep || c->attached || !alive(c->socket)) {
        drop[0] = c;
    } else {
        c->reused = false;
        PDK_GUARD(pool_lock);
        c->idle_since = pdk_now_monotonic();
        if (idle_count == PDK_CONN_IDLE_MAX)
            drop[0] = take_at(0);
        take_aged(c->idle_since, &drop[1], 1);
        idle[idle_count++] = c;
    }
    conn_free(drop[0]);
    conn_free(drop[1]);
}

void pdk_conn_close_idle(void)
{
    if (!owned_here())
        return;
    for (;;) {
        pdk_conn *c = NULL;
        {
            PDK_GUARD(pool_lock);
            if (idle_count > 0)
                c = take_at(idle_count - 1);
        }
        if (c == NULL)
            return;
        conn_free(c);
    }
}

size_t pdk_conn_idle_count(void)
{
    PDK_GUARD(pool_lock);
    return idle_count;
}
