/* test_http.c -- requests against a small server of our own: what it sees is what counts, most of all how often. */
#include "http.h"
#include "conn.h"
#include "descriptors.h"
#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

/* ---- the server ---------------------------------------------------------------------------------------- */

static struct {
    int fd, port;
    char url[64];
    char path[108]; /* when it listens on a unix socket */
    atomic_int requests, connections, open;
    atomic_bool ending;
    pthread_t thread;
} tcp, un;

typedef struct served {
    int fd;
    char head[8192];
    size_t head_len;
    char *body;
    size_t body_len;
} served;

static bool say(int fd, const char *text, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, text, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        text += n;
        len -= (size_t)n;
    }
    return true;
}
static bool says(int fd, const char *text)
{
    return say(fd, text, strlen(text));
}

static bool read_request(served *s)
{
    s->head_len = 0;
    char *end = NULL;
    while (end == NULL) {
        if (s->head_len + 1 >= sizeof s->head)
            return false;
        ssize_t n = recv(s->fd, s->head + s->head_len, 1, 0);
        if (n <= 0)
            return false;
        s->head_len += (size_t)n;
        s->head[s->head_len] = '\0';
        end = strstr(s->head, "\r\n\r\n");
    }
    const char *cl = strstr(s->head, "Content-Length: ");
    s->body_len = cl == NULL ? 0 : (size_t)atol(cl + 16);
    s->body = realloc(s->body, s->body_len + 1);
    for (size_t at = 0; at < s->body_len;) {
        ssize_t n = recv(s->fd, s->body + at, s->body_len - at, 0);
        if (n <= 0)
            return false;
        at += (size_t)n;
    }
    s->body[s->body_len] = '\0';
    return true;
}

static bool answer(served *s, const char *body, size_t len)
{
    char head[200];
    snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nX-Test: One\r\nContent-Length: %zu\r\n\r\n", len);
    return says(s->fd, head) && say(s->fd, body, len);
}

/* Waits until the client has gone. */
static void wait_gone(int fd)
{
    char c;
    while (recv(fd, &c, 1, 0) > 0)
        ;
}

/* One answer; false = close. */
static bool serve_one(served *s)
{
    char path[64] = "";
    sscanf(s->head, "%*s %63s", path);
    if (strcmp(path, "/ok") == 0)
        return answer(s, "ok", 2);
    if (strcmp(path, "/echo") == 0)
        return answer(s, s->body, s->body_len);
    if (strcmp(path, "/head") == 0)
        return answer(s, s->head, s->head_len);
    if (strcmp(path, "/404") == 0)
        return says(s->fd, "HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone");
    if (strcmp(path, "/redirect") == 0)
        return says(s->fd, "HTTP/1.1 302 Found\r\nLocation: /ok\r\nContent-Length: 0\r\n\r\n");
    if (strcmp(path, "/continue") == 0)
        return says(s->fd, "HTTP/1.1 100 Continue\r\nX-Not: this\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nc");
    if (strcmp(path, "/ok-then-close") == 0) {
        answer(s, "ok", 2);
        return false;
    }
    if (strcmp(path, "/until-close") == 0) {
        says(s->fd, "HTTP/1.1 200 OK\r\n\r\nuntil the end");
        return false;
    }
    if (strcmp(path, "/half") == 0) {
        says(s->fd, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf");
        return false;
    }
    if (strcmp(path, "/garbage") == 0) {
        says(s->fd, "banana\r\n\r\n");
        return false;
    }
    if (strcmp(path, "/long-headers") == 0) {
        says(s->fd, "HTTP/1.1 200 OK\r\n");
        char line[1024];
        memset(line, 'a', sizeof line);
        memcpy(line, "X-Long: ", 8);
        memcpy(line + sizeof line - 2, "\r\n", 2);
        for (int i = 0; i < 400; i++)
            if (!say(s->fd, line, sizeof line))
                return false;
        return says(s->fd, "Content-Length: 0\r\n\r\n");
    }
    if (strcmp(path, "/chunks") == 0) {
        says(s->fd, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        for (int i = 0; i < 5; i++) {
            if (!says(s->fd, "4\r\nabcd\r\n"))
                return false;
            usleep(10000);
        }
        return says(s->fd, "0\r\n\r\n");
    }
    if (strcmp(path, "/slow") == 0)
        wait_gone(s->fd);
    return false; /* "/close": the request was read, no byte of an answer */
}

static void *serve(void *arg)
{
    served *s = arg;
    bool is_unix = s->head[0] == 'u';
    while (read_request(s)) {
        atomic_fetch_add(is_unix ? &un.requests : &tcp.requests, 1);
        if (!serve_one(s))
            break;
    }
    close(s->fd);
    atomic_fetch_sub(is_unix ? &un.open : &tcp.open, 1);
    free(s->body);
    free(s);
    return NULL;
}

static void *accept_all(void *arg)
{
    int listening = (int)(intptr_t)arg;
    bool is_unix = listening != tcp.fd;
    for (;;) {
        int fd = accept(listening, NULL, NULL);
        if (fd < 0)
            return NULL;
        served *s = calloc(1, sizeof *s);
        s->fd = fd;
        s->head[0] = is_unix ? 'u' : 't';
        atomic_fetch_add(is_unix ? &un.connections : &tcp.connections, 1);
        atomic_fetch_add(is_unix ? &un.open : &tcp.open, 1);
        pthread_t t;
        pthread_create(&t, NULL, serve, s);
        pthread_detach(t);
    }
}

static int listen_unix(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    return bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 64) == 0 ? fd : -1;
}

static void start_servers(void)
{
    if (tcp.fd > 0)
        return;
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof a;
    tcp.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool up = bind(tcp.fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(tcp.fd, 64) == 0 &&
              getsockname(tcp.fd, (struct sockaddr *)&a, &len) == 0;
    tcp.port = ntohs(a.sin_port);
    snprintf(tcp.url, sizeof tcp.url, "http://127.0.0.1:%d", tcp.port);
    snprintf(un.path, sizeof un.path, "%s/http.sock", test_tmpdir());
    snprintf(un.url, sizeof un.url, "http://sandbox");
    un.fd = listen_unix(un.path);
    CHECK(up && un.fd >= 0);
    pthread_create(&tcp.thread, NULL, accept_all, (void *)(intptr_t)tcp.fd);
    pthread_create(&un.thread, NULL, accept_all, (void *)(intptr_t)un.fd);
}

/* ---- the client ---------------------------------------------------------------------------------------- */

typedef struct outcome {
    int rc;
    pdk_http_response res;
    pdk_http_failure failure;
    pdk_error err;
} outcome;

static void outcome_free(outcome *o)
{
    pdk_http_response_free(&o->res);
    pdk_error_clear(&o->err);
}
#define AUTO_OUTCOME __attribute__((cleanup(outcome_free))) outcome

static outcome ask(pdk_http_request r, const char *base, const char *path)
{
    char url[256];
    outcome o = { .err = PDK_NO_ERROR };
    start_servers();
    snprintf(url, sizeof url, "%s%s", base, path);
    r.url = url;
    if (r.method == NULL)
        r.method = "GET";
    if (base == un.url)
        r.unix_socket = un.path;
    o.rc = pdk_http_do(&r, &o.res, &o.failure, &o.err);
    return o;
}
#define ASK(base, path, ...) ask((pdk_http_request){ __VA_ARGS__ }, base, path)

static void *cancel_soon(void *flag)
{
    usleep(100000);
    atomic_store((atomic_bool *)flag, true);
    return NULL;
}

TEST("a request over TCP and over a unix socket is answered, with status, headers and body")
{
    start_servers();
    const char *bases[] = { tcp.url, un.url };
    for (int i = 0; i < 2; i++) {
        AUTO_OUTCOME a = ASK(bases[i], "/ok");
        CHECK_INT(a.rc, 0);
        CHECK_INT(a.res.status, 200);
        CHECK_MEM(a.res.body, a.res.body_len, "ok", 2);
        CHECK_STR(a.res.headers, "X-Test: One\nContent-Length: 2\n");
        CHECK_INT(a.failure, PDK_HTTP_NONE);
        AUTO_OUTCOME b = ASK(bases[i], "/echo", .method = "POST", .body = "a\0b", .body_len = 3);
        CHECK_MEM(b.res.body, b.res.body_len, "a\0b", 3);
    }
}

TEST("a status of 400 and more, and a redirect, are answers and not errors")
{
    AUTO_OUTCOME a = ASK(tcp.url, "/404");
    CHECK_INT(a.rc, 0);
    CHECK_INT(a.res.status, 404);
    CHECK_STR(a.res.body, "none");
    AUTO_OUTCOME b = ASK(tcp.url, "/redirect");
    CHECK_INT(b.res.status, 302);
    CHECK_HAS(b.res.headers, "Location: /ok\n");
}

TEST("only the final answer's headers are kept, and a body without a length ends with the connection")
{
    AUTO_OUTCOME a = ASK(tcp.url, "/continue");
    CHECK_INT(a.res.status, 200);
    CHECK_STR(a.res.headers, "Content-Length: 1\n");
    AUTO_OUTCOME b = ASK(un.url, "/until-close");
    CHECK_STR(b.res.body, "until the end");
}

TEST("what is sent is what was asked for: headers, an empty one, no form type, no Expect, a length of 0")
{
    const char *headers[] = { "X-Token: 12", "X-Empty:", "Accept: text/x", NULL };
    AUTO_OUTCOME a = ASK(tcp.url, "/head", .method = "POST", .headers = headers);
    CHECK_HAS(a.res.body, "POST /head HTTP/1.1\r\n");
    CHECK_HAS(a.res.body, "X-Token: 12\r\n");
    CHECK_HAS(a.res.body, "X-Empty:\r\n");
    CHECK_HAS(a.res.body, "Accept: text/x\r\n");
    CHECK_HAS(a.res.body, "Content-Length: 0\r\n");
    CHECK(strstr(a.res.body, "Content-Type") == NULL);
    CHECK(strstr(a.res.body, "Expect") == NULL);
    AUTO_OUTCOME b = ASK(un.url, "/head", .method = "DELETE");
    CHECK_HAS(b.res.body, "DELETE /head HTTP/1.1\r\nHost: sandbox\r\n");
    size_t len = 3u << 20;
    char *big = malloc(len);
    memset(big, 'x', len);
    AUTO_OUTCOME c = ASK(tcp.url, "/echo", .method = "PUT", .body = big, .body_len = len);
    CHECK_MEM(c.res.body, c.res.body_len, big, len);
    AUTO_OUTCOME d = ASK(tcp.url, "/head", .method = "PUT", .body = big, .body_len = len);
    CHECK_HAS(d.res.body, "PUT /head HTTP/1.1\r\n");
    CHECK(d.res.body != NULL && strstr(d.res.body, "Expect") == NULL); /* nobody waits a second for a "100 Continue" */
    free(big);
}

TEST("bad requests are refused before anything is opened")
{
    start_servers();
    const char *split[] = { "X-A: 1\r\nX-B: 2", NULL }, *no_colon[] = { "X-A", NULL },
               *length[] = { "content-length: 5", NULL };
    pdk_http_request bad[] = {
        { .url = "http://a/", .method = "GE T" },
        { .url = "http://a/", .method = "" },
        { .url = "ftp://a/", .method = "GET" },
        { .url = "a", .method = "GET" },
        { .url = "http://", .method = "GET" },
        { .url = "http://a b/", .method = "GET" },
        { .method = "GET" },
        { .url = tcp.url, .method = "GET", .headers = split },
        { .url = tcp.url, .method = "GET", .headers = no_colon },
        { .url = tcp.url, .method = "GET", .headers = length },
        { .url = tcp.url, .method = "GET", .timeout = -1 },
        { .url = tcp.url, .method = "GET", .timeout = NAN },
        { .url = tcp.url, .method = "HEAD", .body = "x", .body_len = 1 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        AUTO_OUTCOME o = { .err = PDK_NO_ERROR };
        o.rc = pdk_http_do(&bad[i], &o.res, &o.failure, &o.err);
        CHECK_INT(o.rc, -1);
        CHECK_KIND(o.err, PDK_E_INVALID_ARGUMENT);
        CHECK_INT(o.failure, PDK_HTTP_NOT_SENT);
    }
}

TEST("10,000 requests grow no descriptors and use one connection [B117]")
{
    AUTO_OUTCOME warm = ASK(un.url, "/ok");
    int before = test_fds(), connections = atomic_load(&un.connections), bad = 0;
    for (int i = 0; i < 10000; i++) {
        AUTO_OUTCOME o = i % 2 ? ASK(un.url, "/ok") : ASK(un.url, "/echo", .method = "POST", .body = "x", .body_len = 1);
        bad += o.rc != 0 || o.res.status != 200;
    }
    CHECK_INT(bad, 0);
    CHECK(test_fds() <= before); /* less where a server's ends of earlier tests were still open */
    CHECK_INT(atomic_load(&un.connections), connections);
}

/* The connections that the servers still have when no client has any. */
static int servers_ends(void)
{
    pdk_http_close_idle();
    for (int i = 0; i < 1000 && atomic_load(&un.open) + atomic_load(&tcp.open) > 0; i++)
        usleep(10000);
    return atomic_load(&un.open) + atomic_load(&tcp.open);
}

TEST("a thousand fresh, failing and unanswered requests leave no descriptor behind [B117]")
{
    CHECK_INT(servers_ends(), 0);
    int before = test_fds();
    for (int i = 0; i < 250; i++) {
        AUTO_OUTCOME a = ASK(un.url, "/ok", .fresh = true);
        AUTO_OUTCOME b = ASK(tcp.url, "/close", .fresh = true);
        AUTO_OUTCOME c = ASK("http://127.0.0.1:1", "/", .timeout = 1);
        AUTO_OUTCOME d = ASK(un.url, "/half");
        CHECK_INT(a.rc, 0);
        CHECK(b.rc < 0 && c.rc < 0 && d.rc < 0);
    }
    CHECK_INT(servers_ends(), 0); /* they are of this process too */
    CHECK_INT(test_fds(), before);
}

TEST("what could not connect was not sent, and says why")
{
    AUTO_OUTCOME a = ASK("http://127.0.0.1:1", "/x?key=secret");
    CHECK_KIND(a.err, PDK_E_BACKEND_ERROR);
    CHECK_STR(a.err.reason, "connect");
    CHECK_INT(a.err.sys, ECONNREFUSED);
    CHECK_INT(a.failure, PDK_HTTP_NOT_SENT);
    CHECK(strstr(a.err.message, "secret") == NULL);
    AUTO_OUTCOME b = ASK("http://127.0.0.1", "/x", .unix_socket = "/nowhere/paddock.sock");
    CHECK_STR(b.err.reason, "connect");
    CHECK_INT(b.err.sys, ENOENT);
    CHECK_HAS(b.err.message, "/nowhere/paddock.sock");
    CHECK_INT(b.failure, PDK_HTTP_NOT_SENT);
    AUTO_OUTCOME c = ASK("http://name.invalid", "/", .timeout = 5, .direct = true);
    CHECK_STR(c.err.reason, "connect");
    CHECK_INT(c.failure, PDK_HTTP_NOT_SENT);
}

TEST("a TLS handshake that fails was not sent")
{
    char url[64];
    start_servers();
    snprintf(url, sizeof url, "https://127.0.0.1:%d", tcp.port);
    AUTO_OUTCOME a = ASK(url, "/ok", .timeout = 2, .method = "POST"); /* the server waits for HTTP and says nothing */
    CHECK_INT(a.rc, -1);
    CHECK_INT(a.failure, PDK_HTTP_NOT_SENT);
}

TEST("a request whose answer never came is ambiguous, and is seen exactly once, also on a reused connection")
{
    start_servers();
    const char *bases[] = { tcp.url, un.url };
    const char *methods[] = { "POST", "GET", "DELETE" };
    for (int b = 0; b < 2; b++)
        for (int reused = 0; reused < 2; reused++)
            for (int body = 0; body < 2; body++)
                for (int m = 0; m < 3; m++) {
                    atomic_int *seen = b == 0 ? &tcp.requests : &un.requests;
                    if (reused) {
                        AUTO_OUTCOME warm = ASK(bases[b], "/ok");
                    } else {
                        pdk_http_close_idle();
                    }
                    int before = atomic_load(seen), conns = atomic_load(b == 0 ? &tcp.connections : &un.connections);
                    AUTO_OUTCOME o = ASK(bases[b], "/close", .method = methods[m], .body = "x", .body_len = (size_t)body,
                                         .timeout = 2);
                    usleep(2000);
                    CHECK_INT(o.rc, -1);
                    CHECK_KIND(o.err, PDK_E_BACKEND_ERROR);
                    CHECK_STR(o.err.reason, "read");
                    CHECK_INT(o.failure, PDK_HTTP_AMBIGUOUS);
                    CHECK_INT(atomic_load(seen) - before, 1);
                    CHECK_INT(atomic_load(b == 0 ? &tcp.connections : &un.connections) - conns, reused ? 0 : 1);
                }
}

TEST("a connection that the server closed while it was idle is not used again")
{
    start_servers();
    const char *bases[] = { tcp.url, un.url };
    CHECK_INT(servers_ends(), 0);
    for (int i = 0; i < 40; i++) {
        atomic_int *open = i % 2 ? &un.open : &tcp.open;
        AUTO_OUTCOME a = ASK(bases[i % 2], "/ok-then-close");
        CHECK_INT(a.rc, 0);
        for (int n = 0; i % 4 < 2 && atomic_load(open) > 0 && n < 5000; n++)
            usleep(1000); /* else the end may arrive before or after the answer was taken */
        int before = atomic_load(i % 2 ? &un.requests : &tcp.requests);
        AUTO_OUTCOME b = ASK(bases[i % 2], "/echo", .method = "POST", .body = "x", .body_len = 1);
        if (i % 4 < 2)
            CHECK_INT(b.rc, 0);
        else /* in that race it may be ambiguous, never twice */
            CHECK(b.rc == 0 || b.failure != PDK_HTTP_NONE);
        CHECK(atomic_load(i % 2 ? &un.requests : &tcp.requests) - before <= 1);
    }
}

TEST("a request that changes something does not use a connection that idled for long, which is closed then")
{
    pdk_http_close_idle();
    AUTO_OUTCOME a = ASK(un.url, "/echo", .method = "POST", .body = "x", .body_len = 1);
    usleep(1600000);
    int connections = atomic_load(&un.connections), open = atomic_load(&un.open);
    AUTO_OUTCOME b = ASK(un.url, "/ok");
    CHECK_INT(atomic_load(&un.connections), connections);
    usleep(1600000);
    AUTO_OUTCOME c = ASK(un.url, "/echo", .method = "POST", .body = "x", .body_len = 1);
    CHECK(a.rc == 0 && b.rc == 0 && c.rc == 0);
    CHECK_INT(atomic_load(&un.connections), connections + 1);
    for (int i = 0; i < 100 && atomic_load(&un.open) > open; i++)
        usleep(10000);
    CHECK_INT(atomic_load(&un.open), open);
    CHECK_INT(pdk_conn_idle_count(), 1);
}

TEST("a new server behind an old socket path is reached over a new connection")
{
    AUTO_OUTCOME a = ASK(un.url, "/ok");
    CHECK_INT(a.rc, 0);
    int old = un.fd, connections = atomic_load(&un.connections);
    un.fd = listen_unix(un.path); /* the old connection is still open and answers */
    pthread_t t;
    pthread_create(&t, NULL, accept_all, (void *)(intptr_t)un.fd);
    AUTO_OUTCOME b = ASK(un.url, "/ok");
    CHECK_INT(b.rc, 0);
    CHECK_INT(atomic_load(&un.connections), connections + 1);
    shutdown(old, SHUT_RDWR);
    pthread_join(un.thread, NULL);
    close(old);
    un.thread = t;
}

TEST("a socket path longer than an address may be is reached all the same")
{
    char dir[400], path[500];
    start_servers();
    snprintf(dir, sizeof dir, "%s/", test_tmpdir());
    for (int i = 0; i < 5; i++) {
        strcat(dir, "0123456789012345678901234567890123456789/");
        REQUIRE(mkdir(dir, 0700) == 0);
    }
    snprintf(path, sizeof path, "%sguest.sock", dir);
    REQUIRE(symlink(un.path, path) == 0);
    AUTO_OUTCOME a = ASK("http://x", "/ok", .unix_socket = path);
    CHECK_INT(a.rc, 0);
    CHECK_STR(a.res.body, "ok");
}

TEST("a full backlog is waited for, within the connect timeout")
{
    char path[100];
    snprintf(path, sizeof path, "%s/full.sock", test_tmpdir());
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), fill[8];
    REQUIRE(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 0) == 0);
    for (int i = 0; i < 8; i++) {
        fill[i] = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)!connect(fill[i], (struct sockaddr *)&a, sizeof a);
    }
    double before = test_now();
    AUTO_OUTCOME o = ASK("http://x", "/", .unix_socket = path, .connect_timeout = 0.2);
    CHECK_INT(o.rc, -1);
    CHECK_STR(o.err.reason, "connect");
    CHECK_INT(o.failure, PDK_HTTP_NOT_SENT);
    CHECK_TOOK(before, 0.2);
    for (int i = 0; i < 8; i++)
        close(fill[i]);
    close(fd);
}

TEST("an answer that breaks off, is not HTTP, or is too long is an error with its own reason")
{
    struct {
        const char *path, *reason;
        size_t max;
    } rows[] = {
        { "/half", "read", 0 },
        { "/garbage", "protocol", 0 },
        { "/long-headers", "protocol", 0 },
        { "/chunks", "too_large", 10 },
    };
    for (int i = 0; i < 4; i++) {
        AUTO_OUTCOME o = ASK(tcp.url, rows[i].path, .max_body = rows[i].max);
        CHECK_INT(o.rc, -1);
        CHECK_STR(o.err.reason, rows[i].reason);
        CHECK_INT(o.failure, PDK_HTTP_AMBIGUOUS);
        CHECK(o.res.body == NULL);
    }
    AUTO_OUTCOME exact = ASK(tcp.url, "/chunks", .max_body = 20);
    CHECK_INT(exact.rc, 0);
    CHECK_INT(exact.res.body_len, 20);
}

typedef struct pieces {
    char text[64];
    size_t len, stop_at;
} pieces;
static bool take_piece(void *ctx, const char *data, size_t len)
{
    pieces *p = ctx;
    if (p->len + len < sizeof p->text) {
        memcpy(p->text + p->len, data, len);
        p->len += len;
    }
    return p->stop_at == 0 || p->len < p->stop_at;
}

TEST("a streamed body comes in pieces and can be stopped; a stopped connection is not used again")
{
    pieces all = { .stop_at = 0 }, some = { .stop_at = 8 };
    AUTO_OUTCOME a = ASK(tcp.url, "/chunks", .on_body = take_piece, .on_body_ctx = &all, .max_body = 3);
    CHECK_INT(a.rc, 0);
    CHECK_STR(all.text, "abcdabcdabcdabcdabcd");
    CHECK_INT(a.res.body_len, 0);
    pdk_http_close_idle();
    AUTO_OUTCOME b = ASK(tcp.url, "/chunks", .on_body = take_piece, .on_body_ctx = &some);
    CHECK_INT(b.rc, 0);
    CHECK_INT(b.res.status, 200);
    CHECK_STR(some.text, "abcdabcd");
    CHECK_INT(pdk_conn_idle_count(), 0);
}

TEST("a request's own time limit is exact, and says whether it was sent")
{
    double before = test_now();
    AUTO_OUTCOME o = ASK(tcp.url, "/slow", .timeout = 0.2);
    CHECK_TOOK(before, 0.2);
    CHECK_KIND(o.err, PDK_E_BACKEND_ERROR);
    CHECK_STR(o.err.reason, "read_timeout");
    CHECK_INT(o.failure, PDK_HTTP_AMBIGUOUS);
}

TEST("the thread's limit ends a request as timeout, a cancel within 50 ms as cancelled")
{
    pdk_limit limit = { .deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(0.2)) };
    const pdk_limit *former = pdk_limit_enter(&limit);
    double before = test_now();
    AUTO_OUTCOME a = ASK(un.url, "/slow", .timeout = 30);
    CHECK_TOOK(before, 0.2);
    CHECK_KIND(a.err, PDK_E_TIMEOUT);
    CHECK_INT(a.failure, PDK_HTTP_AMBIGUOUS);
    AUTO_OUTCOME b = ASK(un.url, "/ok");
    CHECK_KIND(b.err, PDK_E_TIMEOUT);
    CHECK_INT(b.failure, PDK_HTTP_NOT_SENT);
    atomic_bool flag = false;
    pdk_limit cancellable = { .deadline = PDK_NEVER, .cancelled = &flag };
    pdk_limit_enter(&cancellable);
    pthread_t t;
    pthread_create(&t, NULL, cancel_soon, &flag);
    before = test_now();
    AUTO_OUTCOME c = ASK(tcp.url, "/slow");
    CHECK_WITHIN(before, 0.15);
    CHECK_KIND(c.err, PDK_E_CANCELLED);
    CHECK_INT(c.failure, PDK_HTTP_AMBIGUOUS);
    pthread_join(t, NULL);
    pdk_limit_enter(former);
    CHECK(pdk_limit_current()->deadline == PDK_NEVER);
}

TEST("near hosts are reached past the environment's proxy, others through it [E14]")
{
    char url[64];
    start_servers();
    setenv("http_proxy", "http://127.0.0.1:1", 1);
    snprintf(url, sizeof url, "http://localhost:%d", tcp.port);
    AUTO_OUTCOME a = ASK(tcp.url, "/ok");
    AUTO_OUTCOME b = ASK(url, "/ok");
    AUTO_OUTCOME c = ASK(un.url, "/ok");
    CHECK(a.rc == 0 && b.rc == 0 && c.rc == 0);
    char proxy[64];
    snprintf(proxy, sizeof proxy, "http://127.0.0.1:%d", tcp.port);
    setenv("http_proxy", proxy, 1);
    int before = atomic_load(&tcp.requests);
    AUTO_OUTCOME d = ASK("http://sandbox.example.com", "/x", .timeout = 2); /* the proxy sees it and closes */
    CHECK_INT(d.rc, -1);
    CHECK_INT(atomic_load(&tcp.requests), before + 1);
    const char *near[] = { "http://10.1.2.3:1",          "http://172.31.0.1:1", "http://192.168.9.9:1",
                           "http://169.254.0.9:1",       "http://[fe80::1]:1",  "http://[fd00::1]:1",
                           "http://[::ffff:10.0.0.1]:1", "http://engine:1",     "http://a.localhost:1" };
    for (size_t i = 0; i < sizeof near / sizeof near[0]; i++) {
        AUTO_OUTCOME o = ASK(near[i], "/", .timeout = 0.05); /* whatever it finds there: the proxy is not asked */
    }
    CHECK_INT(atomic_load(&tcp.requests), before + 1);
    unsetenv("http_proxy");
}

static void *many(void *bad)
{
    for (int i = 0; i < 200; i++) {
        AUTO_OUTCOME o = i % 3 ? ASK(un.url, "/echo", .method = "POST", .body = "abc", .body_len = 3) : ASK(tcp.url, "/ok");
        if (o.rc != 0 || o.res.status != 200)
            atomic_fetch_add((atomic_int *)bad, 1);
    }
    return NULL;
}

TEST("the budget of descriptors is what it was after answers, errors, time-outs, cancels, refusals and streams that were stopped [B117]")
{
    pieces all = { .stop_at = 0 }, some = { .stop_at = 8 };
    int before = pdk_descriptors_taken();
    for (int i = 0; i < 3; i++) {
        AUTO_OUTCOME a = ASK(un.url, "/ok");
        AUTO_OUTCOME b = ASK(tcp.url, "/close", .fresh = true);
        AUTO_OUTCOME c = ASK("http://127.0.0.1:1", "/", .timeout = 1);
        AUTO_OUTCOME d = ASK(un.url, "/half");
        AUTO_OUTCOME e = ASK(tcp.url, "/slow", .timeout = 0.05);
        AUTO_OUTCOME f = ASK(tcp.url, "/chunks", .on_body = take_piece, .on_body_ctx = &all);
        AUTO_OUTCOME g = ASK(tcp.url, "/chunks", .on_body = take_piece, .on_body_ctx = &some);
        AUTO_OUTCOME h = ASK("no url", "");
        CHECK(a.rc == 0 && b.rc < 0 && c.rc < 0 && d.rc < 0 && e.rc < 0 && f.rc == 0 && g.rc == 0 && h.rc < 0);
        CHECK_INT(pdk_descriptors_taken(), before);
    }
    pdk_limit limit = { .deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(0.05)) };
    const pdk_limit *former = pdk_limit_enter(&limit);
    AUTO_OUTCOME late = ASK(un.url, "/slow", .timeout = 5);
    AUTO_OUTCOME later = ASK(un.url, "/ok"); /* over before it begins */
    atomic_bool flag = false;
    pdk_limit cancellable = { .deadline = PDK_NEVER, .cancelled = &flag };
    pdk_limit_enter(&cancellable);
    pthread_t t;
    pthread_create(&t, NULL, cancel_soon, &flag);
    AUTO_OUTCOME cancelled = ASK(tcp.url, "/slow");
    pthread_join(t, NULL);
    pdk_limit_enter(former);
    CHECK(late.rc < 0 && later.rc < 0);
    CHECK_KIND(cancelled.err, PDK_E_CANCELLED);
    CHECK_INT(pdk_descriptors_taken(), before);
    pdk_descriptors_pretend(1); /* none is free: what cannot take any gives none back */
    CHECK_INT(pdk_descriptors_take(1, &PDK_NO_LIMIT, PDK_NEVER, &(pdk_error){ 0 }), 0);
    AUTO_OUTCOME none = ASK(un.url, "/ok", .timeout = 0.05);
    CHECK(none.rc < 0);
    CHECK_INT(pdk_descriptors_taken(), before + 1);
    pdk_descriptors_give(1);
    pdk_descriptors_pretend(0);
}

TEST("sixteen threads share the pool, which stays within its bound")
{
    pthread_t t[16];
    atomic_int bad = 0;
    start_servers();
    for (int i = 0; i < 16; i++)
        pthread_create(&t[i], NULL, many, &bad);
    for (int i = 0; i < 16; i++)
        pthread_join(t[i], NULL);
    CHECK_INT(bad, 0);
    CHECK(pdk_conn_idle_count() <= PDK_CONN_IDLE_MAX);
    pdk_http_close_idle();
    CHECK_INT(pdk_conn_idle_count(), 0);
}

TEST("the calling thread's signal mask is left as it was, and no SIGPIPE stays behind")
{
    sigset_t before, after, pending;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    AUTO_OUTCOME a = ASK(un.url, "/ok");
    AUTO_OUTCOME b = ASK(un.url, "/close", .method = "POST");
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    sigpending(&pending);
    for (int sig = 1; sig < 64; sig++)
        CHECK_INT(sigismember(&before, sig), sigismember(&after, sig));
    CHECK(!sigismember(&pending, SIGPIPE));
}

static void host_handler(int sig)
{
    (void)sig;
}

static void *fresh_ones(void *unused)
{
    (void)unused;
    for (int i = 0; i < 100; i++) {
        AUTO_OUTCOME o = ASK(un.url, i % 2 ? "/ok" : "/half", .fresh = i % 4 == 1);
        if (i % 10 == 0)
            pdk_http_close_idle();
    }
    return NULL;
}

TEST("the host's SIGPIPE stays what it was, also when many connections are closed at once")
{
    struct sigaction mine = { .sa_handler = host_handler }, former, now;
    sigaction(SIGPIPE, &mine, &former);
    pthread_t t[8];
    start_servers();
    for (int i = 0; i < 8; i++)
        pthread_create(&t[i], NULL, fresh_ones, NULL);
    for (int i = 0; i < 8; i++)
        pthread_join(t[i], NULL);
    sigaction(SIGPIPE, &former, &now);
    CHECK(now.sa_handler == host_handler);
}

TEST("in a forked child every request answers closed and touches nothing")
{
    AUTO_OUTCOME a = ASK(un.url, "/ok");
    CHECK_INT(a.rc, 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        pdk_http_request r = { .method = "GET", .url = "http://x/ok", .unix_socket = un.path };
        pdk_http_response res;
        pdk_error err = PDK_NO_ERROR;
        int rc = pdk_http_do(&r, &res, NULL, &err);
        pdk_http_close_idle();
        _exit(rc < 0 && err.kind == PDK_E_CLOSED ? 0 : 1);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_INT(status, 0);
    AUTO_OUTCOME b = ASK(un.url, "/ok");
    CHECK_INT(b.rc, 0);
}

TEST_MAIN
