/* http.c -- one HTTP request at a time per connection, and never one that the peer could see twice.
 *
 * libcurl sends a request again by itself when a reused connection dies before the first byte of an answer. It cannot be
 * told not to, so it is stopped where it would begin: it asks before each sending (the pre-request function) and before
 * each new socket, and is refused there once a byte of the request may have left (tried with 7.88, tests/c/test_http.c).
 * The same knowledge, "may a byte have left", decides whether a failure is NOT_SENT or AMBIGUOUS.
 *
 * libcurl runs inside a pdk_quiet and never waits there; the waiting is done by curl_multi_poll, in slices while somebody
 * may cancel. The full backlog of a unix socket answers EAGAIN, which libcurl takes for a failure or, by version, for a
 * connection in progress: both are seen before anything is sent, and tried again here.
 * Locks: none (see conn.c). The thread-local limit is read on the calling thread only.
 */
#include "http.h"

#include "conn.h"
#include "descriptors.h"
#include "quiet.h"
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define CONNECT_TIMEOUT 5.0
#define MAX_BODY        ((size_t)64 << 20)
#define MAX_HEADERS     ((size_t)256 << 10)
#define CANCEL_SLICE    (40 * 1000 * 1000) /* ns: how late a cancel may be noticed */
#define SAFE_IDLE       PDK_CONN_AGE       /* a request that changes nothing may use a connection that waited this long */
#define UNSAFE_IDLE \
    (PDK_NS_PER_S * 3 / 2) /* others must not meet a server that closes it at that moment; the shortest
                                            * keep-alive times in use are 2 s and 5 s */

typedef struct buffer {
    char *data;
    size_t len, cap;
} buffer;

typedef struct transfer { /* one request; the calling thread's */
    const pdk_http_request *req;
    CURL *easy;
    struct curl_slist *headers; /* owned */
    buffer body, head;          /* owned */
    size_t max_body;
    char unix_path[108]; /* what is connected to: unix_socket, or a way to it that is short enough */
    int dir_fd;          /* the folder of a long one, or -1; owned */
    int opened;          /* the socket that libcurl connects, or -1; libcurl's */
    int pooled;          /* that of a connection which has served before, or -1; libcurl's */
    bool tls;
    bool direct;
    pdk_quiet quiet;   /* around libcurl; let go while on_body runs */
    bool begun;        /* libcurl was allowed to send */
    bool backlog_full; /* of a unix socket: not connected, although libcurl thinks so */
    bool reused;       /* over a connection that has served before */
    bool replay;       /* it wanted to send again and was refused */
    bool stopped;      /* on_body said so */
    bool announced;    /* on_body was told of the head */
    bool impostor;     /* another process listens than the request wants */
    int peer;          /* who listens, when it could be seen */
    bool too_long;     /* body beyond max_body */
    bool head_long;    /* headers beyond MAX_HEADERS */
    bool no_memory;
    pdk_ns deadline; /* the smaller of the request's own and the limit's */
    bool own_deadline;
    pdk_ns connect_deadline;
    char error[CURL_ERROR_SIZE];
    char target[220]; /* for messages: no query, no password */
} transfer;

typedef enum ending { END_DONE, END_DEADLINE, END_CANCELLED } ending;

static bool buffer_add(buffer *b, const char *data, size_t len)
{
    if (b->cap - b->len <= len) { /* one more for the NUL */
        size_t cap = b->cap == 0 ? 1024 : b->cap;
        while (cap - b->len <= len)
            cap *= 2;
        char *grown = realloc(b->data, cap);
        if (grown == NULL)
            return false;
        b->data = grown;
        b->cap = cap;
    }
    if (len > 0)
        memcpy(b->data + b->len, data, len);
    b->len += len;
    b->data[b->len] = '\0';
    return true;
}

static void transfer_free(transfer *t)
{
    curl_slist_free_all(t->headers);
    free(t->body.data);
    free(t->head.data);
    if (t->dir_fd >= 0)
        close(t->dir_fd);
}
#define AUTO_TRANSFER __attribute__((cleanup(transfer_free))) transfer

static void url_free(CURLU **u)
{
    curl_url_cleanup(*u);
}
static void text_free(char **text)
{
    curl_free(*text);
}
#define AUTO_URL  __attribute__((cleanup(url_free))) CURLU
#define AUTO_TEXT __attribute__((cleanup(text_free))) char

static int fail_with(pdk_error *err, const char *reason, int sys, const transfer *t, const char *what)
{
    pdk_fail(err, PDK_E_BACKEND_ERROR, sys, "%s: %s", t->target, what);
    if (err != NULL)
        snprintf(err->reason, sizeof err->reason, "%s", reason);
    return -1;
}

/* ---- what is asked for, checked ------------------------------------------------------------------------ */

static bool is_token(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)s[i]) && strchr("!#$%&'*+-.^_`|~", s[i]) == NULL)
            return false;
    return len > 0;
}

static bool name_is(const char *header, size_t len, const char *name)
{
    return strlen(name) == len && strncasecmp(header, name, len) == 0;
}

static int add_header(transfer *t, const char *line, pdk_error *err)
{
    struct curl_slist *more = curl_slist_append(t->headers, line);
    if (more == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request header");
    t->headers = more;
    return 0;
}

static int take_headers(transfer *t, pdk_error *err)
{
    bool has_type = false;
    for (const char *const *h = t->req->headers; h != NULL && *h != NULL; h++) {
        const char *colon = strchr(*h, ':');
        size_t len = colon == NULL ? 0 : (size_t)(colon - *h);
        if (!is_token(*h, len) || strpbrk(*h, "\r\n") != NULL)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "a request header must be one line, \"Name: value\" (%.40s)",
                            *h);
        if (name_is(*h, len, "Content-Length") || name_is(*h, len, "Transfer-Encoding") || name_is(*h, len, "Expect"))
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "the header %.*s follows from the body; leave it out", (int)len,
                            *h);
        has_type = has_type || name_is(*h, len, "Content-Type");
        if (colon[1 + strspn(colon + 1, " \t")] != '\0') {
            if (add_header(t, *h, err) < 0)
                return -1;
            continue;
        }
        char empty[256]; /* libcurl's way to send a header without a value */
        if (len + 2 > sizeof empty)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "the name of a request header is too long (%.40s)", *h);
        snprintf(empty, sizeof empty, "%.*s;", (int)len, *h);
        if (add_header(t, empty, err) < 0)
            return -1;
    }
    if (!has_type && add_header(t, "Content-Type:", err) < 0) /* else libcurl claims that a body is a form */
        return -1;
    return add_header(t, "Expect:", err); /* else a large body waits a second for a "100 Continue" that never comes */
}

static bool private_v4(uint32_t a)
{
    return a >> 24 == 127 || a >> 24 == 10 || a >> 20 == 0xac1 || a >> 16 == 0xc0a8 || a >> 16 == 0xa9fe || a == 0;
}

/* Reached without the environment's proxy: loopback, private, link-local, and names of one label. [E14] */
static bool is_near(const char *host)
{
    char name[256];
    size_t len = strlen(host);
    if (len >= sizeof name)
        return false;
    bool v6 = len > 2 && host[0] == '[';
    snprintf(name, sizeof name, "%.*s", v6 ? (int)strcspn(host + 1, "]%") : (int)len, v6 ? host + 1 : host);
    struct in6_addr a6;
    if (v6 && inet_pton(AF_INET6, name, &a6) == 1) {
        const uint8_t *b = a6.s6_addr;
        if (IN6_IS_ADDR_V4MAPPED(&a6))
            return private_v4((uint32_t)b[12] << 24 | (uint32_t)b[13] << 16 | (uint32_t)b[14] << 8 | b[15]);
        return IN6_IS_ADDR_LOOPBACK(&a6) || IN6_IS_ADDR_UNSPECIFIED(&a6) || (b[0] & 0xfe) == 0xfc ||
               (b[0] == 0xfe && (b[1] & 0xc0) == 0x80);
    }
    struct in_addr a4;
    if (inet_pton(AF_INET, name, &a4) == 1)
        return private_v4(ntohl(a4.s_addr));
    len = strlen(name);
    if (len > 1 && name[len - 1] == '.')
        name[--len] = '\0';
    const char *last = strrchr(name, '.');
    return last == NULL || strcasecmp(last, ".localhost") == 0;
}

/* Where the connection leads to, as one string: requests with the same one may share a connection. A unix socket counts
 * as the file that it is now, so that a new server behind an old path is never spoken to over the old connection. */
static int make_key(const transfer *t, const char *scheme, const char *host, const char *port, char *key, size_t size)
{
    const char *path = t->req->unix_socket;
    struct stat st = { 0 };
    if (path != NULL && stat(path, &st) < 0)
        st = (struct stat){ 0 };
    /* one authority's word for a server is not another's */
    int n = path == NULL ? snprintf(key, size, "%s://%s:%s %s %s", scheme, host, port, t->direct ? "direct" : "proxy",
                                    t->tls && t->req->ca_file != NULL ? t->req->ca_file : "")
                         : snprintf(key, size, "%s://%s:%s unix %llx:%llx:%llx.%lx %d %s", scheme, host, port,
                                    (unsigned long long)st.st_dev, (unsigned long long)st.st_ino,
                                    (unsigned long long)st.st_ctim.tv_sec, (unsigned long)st.st_ctim.tv_nsec, t->req->peer, path);
    if (n > 0 && (size_t)n < size && path == NULL && t->tls && t->req->cert_file != NULL) /* nor are two clients one */
        n += snprintf(key + n, size - (size_t)n, " %s %s", t->req->cert_file, t->req->key_file);
    return n > 0 && (size_t)n < size ? 0 : -1;
}

/* Reads the URL: fills target, tls, direct, and the pool's key. */
static int take_url(transfer *t, char *key, size_t key_size, pdk_error *err)
{
    const pdk_http_request *req = t->req;
    AUTO_URL *u = curl_url();
    AUTO_TEXT *scheme = NULL, *host = NULL, *port = NULL, *path = NULL;
    if (u == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request");
    CURLUcode rc = curl_url_set(u, CURLUPART_URL, req->url, 0);
    if (rc == CURLUE_OUT_OF_MEMORY)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a request");
    if (rc != CURLUE_OK || curl_url_get(u, CURLUPART_SCHEME, &scheme, 0) != CURLUE_OK ||
        curl_url_get(u, CURLUPART_HOST, &host, 0) != CURLUE_OK ||
        curl_url_get(u, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) != CURLUE_OK ||
        curl_url_get(u, CURLUPART_PATH, &path, 0) != CURLUE_OK ||
        (strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0))
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "not a URL that begins with http:// or https:// (%.60s)",
                        strcspn(req->url, "?@") == strlen(req->url) ? req->url : "not shown, it may hold a secret");
    if (req->unix_socket != NULL)
        snprintf(t->target, sizeof t->target, "%s %.100s on %.90s", req->method, path, req->unix_socket);
    else
        snprintf(t->target, sizeof t->target, "%s %s://%.90s:%s%.90s", req->method, scheme, host, port, path);
    t->tls = strcmp(scheme, "https") == 0;
    t->direct = req->direct || req->unix_socket != NULL || is_near(host);
    if (make_key(t, scheme, host, port, key, key_size) < 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "%.100s: the address is too long", t->target);
    return 0;
}

/* A socket address holds 107 bytes of path; a longer one is reached by way of its folder. */
static int take_unix_path(transfer *t, const char *path, pdk_error *err)
{
    size_t len = strlen(path);
    if (len > 0 && len < sizeof t->unix_path) {
        memcpy(t->unix_path, path, len + 1);
        return 0;
    }
    const char *slash = strrchr(path, '/');
    char dir[4096];
    if (slash == NULL || strlen(slash) > 80 || (size_t)(slash - path) >= sizeof dir)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "not the path of a socket (%.100s)", path);
    memcpy(dir, path, (size_t)(slash - path));
    dir[slash - path] = '\0';
    t->dir_fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (t->dir_fd < 0)
        return fail_with(err, "connect", errno, t, "cannot connect");
    snprintf(t->unix_path, sizeof t->unix_path, "/proc/self/fd/%d%.80s", t->dir_fd, slash);
    return 0;
}

static bool bad_seconds(double s)
{
    return isnan(s) || s < 0;
}

static int take_request(transfer *t, const pdk_http_request *req, char *key, size_t key_size, pdk_error *err)
{
    *t = (transfer){ .req = req, .dir_fd = -1, .opened = -1, .pooled = -1, .max_body = req->max_body == 0 ? MAX_BODY : req->max_body };
    if (req->method == NULL || !is_token(req->method, strlen(req->method)) || strlen(req->method) > 20)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "not an HTTP method (%.40s)", req->method ? req->method : "none");
    if (req->url == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "an HTTP request needs a URL");
    if (bad_seconds(req->timeout) || bad_seconds(req->connect_timeout))
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "a timeout must be 0 or more seconds");
    if (req->body_len > 0 && strcmp(req->method, "HEAD") == 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "a HEAD request has no body");
    if (take_url(t, key, key_size, err) < 0)
        return -1;
    if (req->unix_socket != NULL && take_unix_path(t, req->unix_socket, err) < 0)
        return -1;
    return take_headers(t, err);
}

/* ---- what libcurl calls -------------------------------------------------------------------------------- */

/* Whether the peer may have seen something of the request. TLS hides whether a record was complete when a write failed,
 * so there the attempt counts. */
static bool may_have_left(const transfer *t)
{
    long sent = 0;
    if (!t->begun)
        return false;
    return t->tls || curl_easy_getinfo(t->easy, CURLINFO_REQUEST_SIZE, &sent) != CURLE_OK || sent > 0;
}

/* Who listened when the connection was made, a pooled one too: an answer must not be without it because somebody else, who did not
 * care, had asked over that connection before. False: not who should. */
static bool see_peer(transfer *t)
{
    struct ucred who = { 0 };
    socklen_t len = sizeof who;
    int fd = t->opened >= 0 ? t->opened : t->pooled;
    if (t->req->unix_socket == NULL || fd < 0 || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &len) < 0)
        return true;
    t->peer = who.pid;
    t->impostor = t->req->peer > 0 && who.pid > 0 && who.pid != t->req->peer;
    return !t->impostor;
}

static int on_request(void *ctx, char *remote, char *local, int remote_port, int local_port)
{
    (void)remote, (void)local, (void)remote_port, (void)local_port;
    transfer *t = ctx;
    if (may_have_left(t)) {
        t->replay = true;
        return CURL_PREREQFUNC_ABORT;
    }
    struct sockaddr_un peer;
    socklen_t len = sizeof peer;
    t->backlog_full = t->req->unix_socket != NULL && t->opened >= 0 &&
                      getpeername(t->opened, (struct sockaddr *)&peer, &len) < 0 && errno == ENOTCONN;
    if (t->backlog_full || !see_peer(t))
        return CURL_PREREQFUNC_ABORT;
    t->begun = true;
    return CURL_PREREQFUNC_OK;
}

static curl_socket_t on_open_socket(void *ctx, curlsocktype purpose, struct curl_sockaddr *a)
{
    (void)purpose;
    transfer *t = ctx;
    if (may_have_left(t)) {
        t->replay = true;
        return CURL_SOCKET_BAD;
    }
    t->opened = socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
    return t->opened;
}

/* The head is complete: says so where that was asked for. False = stop. */
static bool announce(transfer *t)
{
    long status = 0;
    if (!t->req->announce || t->announced || t->req->on_body == NULL || curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status) != CURLE_OK ||
        status != 200)
        return true;
    t->announced = true;
    pdk_quiet_leave(&t->quiet);
    t->stopped = !t->req->on_body(t->req->on_body_ctx, "", 0);
    pdk_quiet_enter(&t->quiet);
    return !t->stopped;
}

static size_t on_header(char *data, size_t size, size_t count, void *ctx)
{
    transfer *t = ctx;
    size_t len = size * count, n = len;
    if (len > 5 && memcmp(data, "HTTP/", 5) == 0) { /* a new answer: what came before was a 100 or a proxy's */
        t->head.len = 0;
        return len;
    }
    while (n > 0 && (data[n - 1] == '\r' || data[n - 1] == '\n'))
        n--;
    if (n == 0)
        return announce(t) ? len : 0;
    if (t->head.len + n > MAX_HEADERS) {
        t->head_long = true;
        return 0;
    }
    if (!buffer_add(&t->head, data, n) || !buffer_add(&t->head, "\n", 1)) {
        t->no_memory = true;
        return 0;
    }
    return len;
}

static size_t on_body(char *data, size_t size, size_t count, void *ctx)
{
    transfer *t = ctx;
    size_t len = size * count;
    if (t->req->on_body != NULL) {
        pdk_quiet_leave(&t->quiet); /* it may take its time, and wait for locks */
        t->stopped = len > 0 && !t->req->on_body(t->req->on_body_ctx, data, len);
        pdk_quiet_enter(&t->quiet);
        return t->stopped ? CURL_WRITEFUNC_ERROR : len;
    }
    t->too_long = len > t->max_body - t->body.len;
    if (t->too_long)
        return CURL_WRITEFUNC_ERROR;
    t->no_memory = !buffer_add(&t->body, data, len);
    return t->no_memory ? CURL_WRITEFUNC_ERROR : len;
}

/* ---- one transfer -------------------------------------------------------------------------------------- */

static void set_method(transfer *t)
{
    const pdk_http_request *req = t->req;
    CURL *e = t->easy;
    bool get = strcmp(req->method, "GET") == 0, head = strcmp(req->method, "HEAD") == 0;
    bool wants_length = strcmp(req->method, "POST") == 0 || strcmp(req->method, "PUT") == 0 ||
                        strcmp(req->method, "PATCH") == 0;
    if (head) {
        curl_easy_setopt(e, CURLOPT_NOBODY, 1L);
        return;
    }
    if (req->body_len > 0 || wants_length) {
        curl_easy_setopt(e, CURLOPT_POST, 1L);
        curl_easy_setopt(e, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)req->body_len);
        curl_easy_setopt(e, CURLOPT_POSTFIELDS, req->body_len > 0 ? req->body : "");
    } else {
        curl_easy_setopt(e, CURLOPT_HTTPGET, 1L);
    }
    if (!get || req->body_len > 0)
        curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, req->method);
}

static CURLcode set_options(transfer *t, pdk_ns now)
{
    const pdk_http_request *req = t->req;
    CURL *e = t->easy;
    curl_easy_reset(e);
    CURLcode rc = curl_easy_setopt(e, CURLOPT_URL, req->url); /* the ones that copy can run out of memory */
    if (rc == CURLE_OK && req->unix_socket != NULL)
        rc = curl_easy_setopt(e, CURLOPT_UNIX_SOCKET_PATH, t->unix_path);
    if (rc == CURLE_OK && t->direct)
        rc = curl_easy_setopt(e, CURLOPT_PROXY, "");
    if (rc == CURLE_OK && t->tls)
        rc = pdk_conn_set_tls(e, req);
    if (rc == CURLE_OK)
        rc = curl_easy_setopt(e, CURLOPT_USERAGENT, "paddock/" PDK_VERSION);
    if (rc != CURLE_OK)
        return rc;
    long wait_ms = (long)((t->connect_deadline - now) / 1000000);
    curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(e, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1); /* HTTP/2 may refuse and repeat a stream */
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L); /* a name lookup that hangs must not hold up who has given up */
    curl_easy_setopt(e, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(e, CURLOPT_FRESH_CONNECT, t->reused ? 0L : 1L);
    curl_easy_setopt(e, CURLOPT_FORBID_REUSE, req->fresh ? 1L : 0L);
    curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, wait_ms < 1 ? 1L : wait_ms);
    curl_easy_setopt(e, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(e, CURLOPT_HTTPHEADER, t->headers);
    curl_easy_setopt(e, CURLOPT_ERRORBUFFER, t->error);
    curl_easy_setopt(e, CURLOPT_PREREQFUNCTION, on_request);
    curl_easy_setopt(e, CURLOPT_PREREQDATA, t);
    curl_easy_setopt(e, CURLOPT_OPENSOCKETFUNCTION, on_open_socket);
    curl_easy_setopt(e, CURLOPT_OPENSOCKETDATA, t);
    curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, on_header);
    curl_easy_setopt(e, CURLOPT_HEADERDATA, t);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, t);
    set_method(t);
    return CURLE_OK;
}

/* How long to wait for events now, in ns: not beyond the deadline or what is to be done meanwhile, and in slices while somebody may
 * cancel. */
static pdk_ns slice(const transfer *t, const pdk_limit *limit, pdk_ns now)
{
    pdk_ns until = pdk_upkeep_before(limit, t->deadline), left = until <= now ? 0 : until - now;
    if (left > PDK_NS_PER_S)
        left = PDK_NS_PER_S;
    return pdk_limit_can_cancel(limit) && left > CANCEL_SLICE ? CANCEL_SLICE : left;
}

static ending state_now(const transfer *t, const pdk_limit *limit, pdk_ns now)
{
    if (pdk_limit_cancelled(limit))
        return END_CANCELLED;
    return now >= t->deadline ? END_DEADLINE : END_DONE;
}

/* Runs it to its end. END_DONE: *code has libcurl's verdict. */
static ending drive(transfer *t, CURLM *multi, const pdk_limit *limit, CURLcode *code)
{
    for (;;) {
        int running = 0, left = 0;
        pdk_quiet_enter(&t->quiet);
        CURLMcode rc = curl_multi_perform(multi, &running);
        pdk_quiet_leave(&t->quiet);
        const CURLMsg *msg = running == 0 ? curl_multi_info_read(multi, &left) : NULL;
        if (rc != CURLM_OK || running == 0) {
            *code = rc == CURLM_OUT_OF_MEMORY ? CURLE_OUT_OF_MEMORY : msg == NULL ? CURLE_RECV_ERROR : msg->data.result;
            return END_DONE;
        }
        pdk_ns now = pdk_now_monotonic();
        ending end = state_now(t, limit, now);
        if (end != END_DONE)
            return end;
        curl_multi_poll(multi, NULL, 0, (int)((slice(t, limit, now) + 999999) / 1000000), NULL);
        pdk_upkeep_run(limit);
    }
}

/* ---- what became of it --------------------------------------------------------------------------------- */

static const char *reason_of(const transfer *t, CURLcode code)
{
    if (t->tls && pdk_conn_distrusted(code, t->error))
        return "tls";
    switch (code) {
    case CURLE_SEND_ERROR:
    case CURLE_SEND_FAIL_REWIND: return "write";
    case CURLE_WEIRD_SERVER_REPLY:
    case CURLE_UNSUPPORTED_PROTOCOL: /* an answer that is not HTTP/1 */
    case CURLE_BAD_CONTENT_ENCODING:
    case CURLE_HTTP2:
    case CURLE_FILESIZE_EXCEEDED:
    case CURLE_WRITE_ERROR: return t->begun ? "protocol" : "connect";
    default: return t->begun ? "read" : "connect";
    }
}

static int fail_ended(const transfer *t, ending end, pdk_error *err)
{
    if (end == END_CANCELLED)
        return pdk_fail(err, PDK_E_CANCELLED, 0, "%s was cancelled", t->target);
    if (!t->own_deadline)
        return pdk_fail(err, PDK_E_TIMEOUT, 0, "%s: no answer within the operation's time limit", t->target);
    char what[80];
    snprintf(what, sizeof what, "no %s within %g s", t->begun ? "answer" : "connection", t->req->timeout);
    return fail_with(err, t->begun ? "read_timeout" : "connect", 0, t, what);
}

static int fail_code(const transfer *t, CURLcode code, pdk_error *err)
{
    char what[160];
    if (t->no_memory || code == CURLE_OUT_OF_MEMORY)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", t->target);
    if (t->replay)
        return fail_with(err, "read", 0, t, "the connection was closed before an answer came; the request is not repeated");
    if (t->impostor)
        return fail_with(err, "peer", 0, t, "another process than the sandbox's own listens there");
    if (t->head_long)
        return fail_with(err, "protocol", 0, t, "the answer's headers are longer than 256 KiB");
    if (t->too_long) {
        snprintf(what, sizeof what, "the answer is longer than %zu bytes", t->max_body);
        return fail_with(err, "too_large", 0, t, what);
    }
    long sys = 0;
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &sys);
    const char *reason = reason_of(t, code);
    bool os = sys != 0 && (strcmp(reason, "connect") == 0 || code == CURLE_SEND_ERROR || code == CURLE_RECV_ERROR);
    if (os && code == CURLE_COULDNT_CONNECT && t->req->unix_socket != NULL) /* libcurl speaks of a host and a port that are none */
        return fail_with(err, reason, (int)sys, t, "cannot connect");
    return fail_with(err, reason, os ? (int)sys : 0, t, t->error[0] != '\0' ? t->error : curl_easy_strerror(code));
}

static int deliver(transfer *t, pdk_http_response *out, pdk_error *err)
{
    long status = 0;
    curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    if (!buffer_add(&t->body, "", 0) || !buffer_add(&t->head, "", 0))
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "%s: no memory for the answer", t->target);
    *out = (pdk_http_response){
        .status = (int)status, .body = t->body.data, .body_len = t->body.len, .headers = t->head.data, .peer = t->peer
    };
    t->body = t->head = (buffer){ 0 };
    return 0;
}

/* ---- the call ------------------------------------------------------------------------------------------ */

static void set_deadlines(transfer *t, const pdk_limit *limit, pdk_ns now)
{
    pdk_ns own = t->req->timeout > 0 ? pdk_after(now, pdk_seconds(t->req->timeout)) : PDK_NEVER;
    double connect = t->req->connect_timeout > 0 ? t->req->connect_timeout : CONNECT_TIMEOUT;
    t->own_deadline = own < limit->deadline;
    t->deadline = t->own_deadline ? own : limit->deadline;
    t->connect_deadline = pdk_after(now, pdk_seconds(connect < 86400 ? connect : 86400));
}

/* One go at it, with a connection in hand. END_DONE: *code says how it went. */
static ending attempt(transfer *t, pdk_conn *c, const pdk_limit *limit, CURLcode *code)
{
    t->opened = -1;
    t->pooled = c->reused ? c->socket : -1;
    t->backlog_full = false;
    *code = set_options(t, pdk_now_monotonic());
    if (*code == CURLE_OK && curl_multi_add_handle(c->multi, c->easy) != CURLM_OK)
        *code = CURLE_OUT_OF_MEMORY;
    if (*code != CURLE_OK)
        return END_DONE;
    c->attached = true;
    ending end = drive(t, c->multi, limit, code);
    c->socket = CURL_SOCKET_BAD; /* libcurl closes what failed or is taken from it half done */
    if (end == END_DONE && *code == CURLE_OK)
        curl_easy_getinfo(c->easy, CURLINFO_ACTIVESOCKET, &c->socket);
    long sys = 0;
    curl_easy_getinfo(c->easy, CURLINFO_OS_ERRNO, &sys);
    if (end == END_DONE && *code == CURLE_COULDNT_CONNECT && t->req->unix_socket != NULL && t->opened >= 0 && !t->begun)
        t->backlog_full = sys == EAGAIN || sys == 0; /* 7.88 says 0 */
    pdk_quiet q;
    pdk_quiet_enter(&q);
    c->attached = curl_multi_remove_handle(c->multi, c->easy) != CURLM_OK;
    pdk_quiet_leave(&q);
    return end;
}

/* *keep: whether the connection may serve another request. */
static int perform(transfer *t, pdk_conn *c, const pdk_limit *limit, pdk_http_response *out, bool *keep, pdk_error *err)
{
    CURLcode code = CURLE_OK;
    t->easy = c->easy;
    t->reused = c->reused;
    ending end = attempt(t, c, limit, &code);
    for (pdk_ns pause = 1000000; end == END_DONE && t->backlog_full; pause = pause < 16000000 ? pause * 2 : pause) {
        pdk_ns now = pdk_now_monotonic(), until = t->deadline < t->connect_deadline ? t->deadline : t->connect_deadline;
        end = state_now(t, limit, now);
        if (end != END_DONE)
            break;
        if (now >= t->connect_deadline)
            return fail_with(err, "connect", EAGAIN, t, "the server does not take connections");
        pdk_sleep_ns(pause < until - now ? pause : until - now);
        end = attempt(t, c, limit, &code);
    }
    if (end != END_DONE)
        return fail_ended(t, end, err);
    if (code != CURLE_OK && !t->stopped)
        return fail_code(t, code, err);
    *keep = code == CURLE_OK && !t->req->fresh;
    return deliver(t, out, err);
}

static bool only_reads(const pdk_http_request *req)
{
    return strcmp(req->method, "GET") == 0 || strcmp(req->method, "HEAD") == 0;
}

static int one_request(const pdk_http_request *req, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err)
{
    *failure = PDK_HTTP_NOT_SENT;
    *out = (pdk_http_response){ 0 };
    char key[4600];
    AUTO_TRANSFER t;
    if (take_request(&t, req, key, sizeof key, err) < 0)
        return -1;
    const pdk_limit *limit = pdk_limit_current();
    pdk_ns now = pdk_now_monotonic();
    set_deadlines(&t, limit, now);
    ending end = state_now(&t, limit, now);
    if (end != END_DONE)
        return fail_ended(&t, end, err);
    if (pdk_descriptors_take(PDK_CONN_DESCRIPTORS, limit, t.deadline, err) < 0)
        return -1;
    pdk_conn *c = pdk_conn_take(key, req->fresh ? 0 : only_reads(req) ? SAFE_IDLE : UNSAFE_IDLE, err);
    if (c == NULL) {
        pdk_descriptors_give(PDK_CONN_DESCRIPTORS);
        return -1;
    }
    bool keep = false;
    int rc = perform(&t, c, limit, out, &keep, err);
    *failure = rc == 0 ? PDK_HTTP_NONE : may_have_left(&t) ? PDK_HTTP_AMBIGUOUS : PDK_HTTP_NOT_SENT;
    pdk_conn_give(c, keep);
    pdk_descriptors_give(PDK_CONN_DESCRIPTORS);
    return rc;
}

/* ---- redirects ----------------------------------------------------------------------------------------- */

static bool is_redirect(int status)
{
    return status == 301 || status == 302 || status == 303 || status == 307 || status == 308;
}

/* The value of the answer's Location, copied; NULL = none, or no memory. */
static char *location_of(const pdk_http_response *r)
{
    for (const char *line = r->headers; *line != '\0'; line += strcspn(line, "\n"), line += *line == '\n')
        if (name_is(line, strcspn(line, ":\n"), "Location") && line[8] == ':') {
            const char *value = line + 9 + strspn(line + 9, " \t");
            return strndup(value, strcspn(value, "\n"));
        }
    return NULL;
}

static bool same_part(CURLU *a, CURLU *b, CURLUPart part, unsigned flags)
{
    AUTO_TEXT *x = NULL, *y = NULL;
    return curl_url_get(a, part, &x, flags) == CURLUE_OK && curl_url_get(b, part, &y, flags) == CURLUE_OK && strcasecmp(x, y) == 0;
}

/* Where `location` leads to, seen from `url`: *next is the caller's (curl_free). */
static int resolve(const char *url, const char *location, char **next, pdk_error *err)
{
    AUTO_URL *from = curl_url(), *to = curl_url();
    AUTO_TEXT *user = NULL, *host = NULL;
    if (from == NULL || to == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a redirect");
    if (curl_url_set(from, CURLUPART_URL, url, 0) != CURLUE_OK || curl_url_set(to, CURLUPART_URL, url, 0) != CURLUE_OK ||
        curl_url_set(to, CURLUPART_URL, location, 0) != CURLUE_OK)
        return pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "redirect", "the server redirects to something that is no URL");
    bool same = same_part(from, to, CURLUPART_SCHEME, 0) && same_part(from, to, CURLUPART_HOST, 0) &&
                same_part(from, to, CURLUPART_PORT, CURLU_DEFAULT_PORT);
    if (!same || curl_url_get(to, CURLUPART_USER, &user, 0) != CURLUE_NO_USER) {
        curl_url_get(to, CURLUPART_HOST, &host, 0);
        return pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "redirect",
                               "the server redirects to another place (host %.80s), which is not followed: give the address itself",
                               host != NULL ? host : "unknown");
    }
    return curl_url_get(to, CURLUPART_URL, next, 0) == CURLUE_OK ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a redirect");
}

/* *out is a redirect: replaces it by what is found in the end. */
static int follow(const pdk_http_request *req, pdk_ns began, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err)
{
    pdk_http_request next = *req;
    AUTO_TEXT *url = NULL;
    for (int left = req->redirects; is_redirect(out->status); left--) {
        char *location = location_of(out), *to = NULL;
        if (location == NULL) /* such an answer is all that there is */
            return 0;
        pdk_http_response_free(out);
        *failure = PDK_HTTP_AMBIGUOUS; /* that is: it was sent */
        int rc = left == 0 ? pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "redirect", "the server redirects again and again")
                           : resolve(next.url, location, &to, err);
        free(location);
        if (rc < 0)
            return -1;
        curl_free(url);
        next.url = url = to;
        if (req->timeout > 0) {
            double rest = req->timeout - pdk_to_seconds(pdk_now_monotonic() - began);
            next.timeout = rest > 0.001 ? rest : 0.001;
        }
        if (one_request(&next, out, failure, err) < 0)
            return -1;
    }
    return 0;
}

int pdk_http_do(const pdk_http_request *req, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err)
{
    pdk_http_failure unused;
    failure = failure == NULL ? &unused : failure;
    pdk_ns began = pdk_now_monotonic();
    int rc = one_request(req, out, failure, err);
    if (rc < 0 || req->redirects <= 0 || req->on_body != NULL || !only_reads(req) || !is_redirect(out->status))
        return rc;
    rc = follow(req, began, out, failure, err);
    if (rc < 0)
        pdk_http_response_free(out);
    return rc;
}

void pdk_http_response_free(pdk_http_response *r)
{
    if (r == NULL)
        return;
    free(r->body);
    free(r->headers);
    *r = (pdk_http_response){ 0 };
}

void pdk_http_close_idle(void)
{
    pdk_conn_close_idle();
}
