/* conn.c -- the pool of idle connections, and of handles without one.
 * True whenever the pool's lock is free: idle[0..idle_count) are detached handles whose connection was alive when they
 * were put there, the longest waiting first; blank[0..blank_count) are detached handles to be used for any destination;
 * none of them is known to anybody else.
 * Why blanks: curl_multi_cleanup sets SIGPIPE to "ignore" and back for the whole process, whatever it is told (7.88), so
 * handles are freed rarely, and one at a time: two at once could leave the host's SIGPIPE ignored.
 * Locks: the pool's, a leaf, and nothing is called under it but memory; the cleaning lock, around curl's clean-up alone.
 * In a forked child the parent's connections are the parent's: not used, not closed, not even looked at. */
#include "conn.h"

#include "quiet.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ROOTS_FOR 60L                /* seconds for which the system's authorities are kept in mind */
#define BLANK_MAX 16

static pdk_mutex cleaning = { .m = PTHREAD_MUTEX_INITIALIZER };
static pdk_mutex pool_lock = { .m = PTHREAD_MUTEX_INITIALIZER };
static pdk_conn *idle[PDK_CONN_IDLE_MAX]; /* pool_lock */
static size_t idle_count;                 /* pool_lock */
static pdk_conn *blank[BLANK_MAX];        /* pool_lock */
static size_t blank_count;                /* pool_lock */
static bool started;                      /* pool_lock */
static pid_t owner;                       /* pool_lock; read freely once started */

/* The process that set libcurl up is this one, or nobody has yet. */
static bool owned_here(void)
{
    pid_t who = __atomic_load_n(&owner, __ATOMIC_ACQUIRE);
    return who == 0 || who == pdk_process_id();
}

static void conn_free(pdk_conn *c)
{
    if (c == NULL)
        return;
    PDK_GUARD(cleaning);
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

static pdk_conn *conn_new(void)
{
    pdk_conn *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->easy = curl_easy_init();
    c->multi = curl_multi_init();
    if (c->easy == NULL || c->multi == NULL) {
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
        __atomic_store_n(&owner, pdk_process_id(), __ATOMIC_RELEASE);
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

/* The freshest one to `key`, out of the pool. One that has waited too long for this request is `stale`: its handles get a
 * new connection, and when that is kept, libcurl closes the old one (CURLMOPT_MAXCONNECTS) without the clean-up above. */
static pdk_conn *find(const char *key, pdk_ns now, pdk_ns max_idle) PDK_REQUIRES(pool_lock)
{
    for (size_t i = idle_count; max_idle > 0 && i > 0; i--)
        if (strcmp(idle[i - 1]->key, key) == 0) {
            pdk_conn *c = take_at(i - 1);
            c->stale = now - c->idle_since > max_idle;
            return c;
        }
    return NULL;
}

/* One whose peer has gone, for another destination: as a stale one. Without it the pool would hold the descriptors of
 * servers that were taken down until it is full of them. */
static pdk_conn *find_dead(void) PDK_REQUIRES(pool_lock)
{
    for (size_t i = 0; i < idle_count; i++)
        if (!alive(idle[i]->socket)) {
            pdk_conn *c = take_at(i);
            c->stale = true;
            return c;
        }
    return NULL;
}

/* For `key` from here on; NULL = no memory. */
static pdk_conn *name_it(pdk_conn *c, const char *key)
{
    if (c == NULL)
        return NULL;
    free(c->key);
    c->key = strdup(key);
    c->reused = false;
    c->socket = CURL_SOCKET_BAD;
    if (c->key != NULL)
        return c;
    conn_free(c);
    return NULL;
}

pdk_conn *pdk_conn_take(const char *key, pdk_ns max_idle, pdk_error *err)
{
    if (!owned_here()) {
        pdk_fail(err, PDK_E_CLOSED, 0, "no HTTP in a forked child: its connections belong to the parent");
        return NULL;
    }
    pdk_conn *found = NULL, *old[5];
    size_t n = 0;
    bool ready = false;
    {
        PDK_GUARD(pool_lock);
        ready = start_libcurl();
        pdk_ns now = pdk_now_monotonic();
        n = take_aged(now, old, 4);
        found = find(key, now, max_idle);
        if (found != NULL && !found->stale && !alive(found->socket)) {
            old[n++] = found;
            found = NULL;
        }
        if (found != NULL)
            found->reused = !found->stale;
        else if ((found = find_dead()) == NULL && blank_count > 0)
            found = blank[--blank_count];
    }
    while (n > 0)
        conn_free(old[--n]);
    if (found == NULL && ready)
        found = conn_new();
    if (found != NULL && !found->reused)
        found = name_it(found, key);
    if (found == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an HTTP connection");
    return found;
}

void pdk_conn_give(pdk_conn *c, bool keep)
{
    if (c == NULL || !owned_here())
        return;
    curl_easy_reset(c->easy); /* it must not keep pointers into the request that is over */
    curl_easy_setopt(c->easy, CURLOPT_NOSIGNAL, 1L);
    keep = keep && !c->attached && alive(c->socket);
    bool empty = !c->attached && !c->stale && c->socket == CURL_SOCKET_BAD; /* no connection in it */
    pdk_conn *drop[2] = { NULL, NULL };
    c->reused = c->stale = false;
    {
        PDK_GUARD(pool_lock);
        c->idle_since = pdk_now_monotonic();
        take_aged(c->idle_since, &drop[0], 1);
        if (keep && idle_count == PDK_CONN_IDLE_MAX)
            drop[1] = take_at(0);
        if (keep)
            idle[idle_count++] = c;
        else if (empty && blank_count < BLANK_MAX)
            blank[blank_count++] = c;
        else
            drop[1] = c;
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
            else if (blank_count > 0)
                c = blank[--blank_count];
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

CURLcode pdk_conn_set_tls(CURL *easy, const pdk_http_request *req)
{
    const char *roots = req->ca_file != NULL ? req->ca_file : getenv("SSL_CERT_FILE"); /* as curl and Python do */
    CURLcode rc = curl_easy_setopt(easy, CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    if (rc == CURLE_OK && roots != NULL && *roots != '\0')
        rc = curl_easy_setopt(easy, CURLOPT_CAINFO, roots);
    if (rc == CURLE_OK && req->ca_file != NULL) /* that file's word alone: libcurl would look into the system's folder, too */
        rc = curl_easy_setopt(easy, CURLOPT_CAPATH, NULL);
    /* Who is met again by a session of before shows no certificate: it would be believed by what the files said then. */
    if (rc == CURLE_OK && (req->ca_file != NULL || req->cert_file != NULL))
        rc = curl_easy_setopt(easy, CURLOPT_SSL_SESSIONID_CACHE, 0L);
#if LIBCURL_VERSION_NUM >= 0x075700
    /* From then on libcurl would believe for a day what a file has said once, also after it was replaced. The system's is large (some
     * milliseconds), and hardly ever replaced in a hurry. */
    if (rc == CURLE_OK)
        rc = curl_easy_setopt(easy, CURLOPT_CA_CACHE_TIMEOUT, req->ca_file != NULL ? 0L : ROOTS_FOR);
#endif
    if (rc == CURLE_OK && req->cert_file != NULL)
        rc = curl_easy_setopt(easy, CURLOPT_SSLCERT, req->cert_file);
    if (rc == CURLE_OK && req->cert_file != NULL)
        rc = curl_easy_setopt(easy, CURLOPT_SSLKEY, req->key_file);
    if (rc == CURLE_OK && req->cert_file != NULL) /* without it an encrypted key's password is asked for on the terminal */
        rc = curl_easy_setopt(easy, CURLOPT_KEYPASSWD, "");
    return rc;
}

bool pdk_conn_distrusted(CURLcode code, const char *text)
{
    switch (code) {
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CIPHER:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_SSL_CRL_BADFILE:
    case CURLE_SSL_ENGINE_NOTFOUND:
    case CURLE_SSL_ENGINE_INITFAILED:
    case CURLE_SSL_ENGINE_SETFAILED:
    case CURLE_SSL_INVALIDCERTSTATUS:
    case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
    case CURLE_USE_SSL_FAILED: return true;
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR: return strstr(text, " alert ") != NULL && strstr(text, "SSL routines") != NULL;
    default: return false;
    }
}
