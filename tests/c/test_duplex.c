/* test_duplex.c -- a request whose peer switches to a stream: what arrives, what ends it, and what is known when it fails. */
#include "http.h"
#include "test.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* ---- a server that answers one connection ---------------------------------------------------------------- */

typedef enum how { ECHO, COUNT, REFUSE, NO_SWITCH, CUT_HEAD, SILENT, EARLY } how;

static struct {
    int fd;
    how how;
    char path[64];
    char head[4096]; /* of the last request, with its body */
    pthread_t thread;
} server;

static void say(int fd, const char *data, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
        if (n <= 0)
            return;
        data += n;
        len -= (size_t)n;
    }
}

static void says(int fd, const char *text)
{
    say(fd, text, strlen(text));
}

static void read_request(int fd)
{
    size_t at = 0;
    while (at + 1 < sizeof server.head) {
        if (recv(fd, server.head + at, 1, 0) <= 0)
            break;
        server.head[++at] = '\0';
        if (at > 2 && strstr(server.head, "\r\n\r\n{}") != NULL)
            break;
    }
}

static void stream(int fd)
{
    char data[65536], text[64];
    size_t count = 0;
    for (;;) {
        ssize_t n = recv(fd, data, sizeof data, 0);
        if (n <= 0)
            break;
        count += (size_t)n;
        if (server.how == ECHO)
            say(fd, data, (size_t)n);
    }
    if (server.how == COUNT) {
        snprintf(text, sizeof text, "%zu", count);
        says(fd, text);
    }
}

static void *serve(void *arg)
{
    static const char switched[] = "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nX-Test: One\r\n\r\n";
    (void)arg;
    int fd = accept(server.fd, NULL, NULL);
    read_request(fd);
    switch (server.how) {
    case ECHO:
    case COUNT:
        says(fd, switched);
        stream(fd);
        break;
    case REFUSE:
        says(fd, "HTTP/1.1 409 Conflict\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\n{\"a\"}");
        recv(fd, server.head, 1, 0); /* the client ends it */
        break;
    case NO_SWITCH:
        says(fd, "HTTP/1.1 200 OK\r\nContent-Type: x\r\n\r\nbytes until the end");
        break;
    case CUT_HEAD:
        says(fd, "HTTP/1.1 101 UPG");
        break;
    case EARLY: { /* takes nothing, says something, and goes */
        says(fd, switched);
        says(fd, "gone");
        break;
    }
    case SILENT:
        recv(fd, server.head, 1, 0);
        break;
    }
    close(fd);
    return NULL;
}

static void start(how how)
{
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    snprintf(server.path, sizeof server.path, "/tmp/pdk-duplex-%d", (int)getpid());
    snprintf(name.sun_path, sizeof name.sun_path, "%s", server.path);
    unlink(server.path);
    server.how = how;
    server.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(server.fd, (struct sockaddr *)&name, sizeof name) == 0 && listen(server.fd, 1) == 0);
    pthread_create(&server.thread, NULL, serve, NULL);
}

static void stop(void)
{
    pthread_join(server.thread, NULL);
    close(server.fd);
    unlink(server.path);
}

static pdk_http_request request(const char *input, size_t len)
{
    return (pdk_http_request){ .method = "POST", .url = "http://engine/exec/1/start?a=b", .unix_socket = server.path, .body = "{}",
                               .body_len = 2, .input = input, .input_len = len, .timeout = 20 };
}

/* ---- tests ----------------------------------------------------------------------------------------------- */

TEST("input goes out, its end is seen, and what comes back is kept")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_http_response res;
    start(ECHO);
    pdk_http_request req = request("hello", 5);
    REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
    stop();
    CHECK(res.status == 101 && res.body_len == 5 && memcmp(res.body, "hello", 5) == 0);
    CHECK(strstr(res.headers, "X-Test: One\n") != NULL);
    CHECK(strstr(server.head, "POST /exec/1/start?a=b HTTP/1.1\r\n") != NULL && strstr(server.head, "Upgrade: tcp\r\n") != NULL);
    pdk_http_response_free(&res);
}

TEST("much goes both ways at once, and no input ends at once")
{
    for (size_t len = 0; len <= 4u << 20; len = len == 0 ? 4u << 20 : len + 1) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_http_response res;
        char *data = calloc(1, len + 1);
        start(ECHO);
        pdk_http_request req = request(data, len);
        REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
        stop();
        CHECK(res.body_len == len && memcmp(res.body, data, len) == 0);
        pdk_http_response_free(&res);
        free(data);
        start(COUNT);
        data = calloc(1, len + 1);
        req = request(data, len);
        REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
        stop();
        CHECK((size_t)atol(res.body) == len);
        pdk_http_response_free(&res);
        free(data);
    }
}

TEST("a peer that refuses has answered, and got no input")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_http_response res;
    start(REFUSE);
    pdk_http_request req = request("hello", 5);
    REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
    stop();
    CHECK(res.status == 409 && res.body_len == 5 && strcmp(res.body, "{\"a\"}") == 0);
    pdk_http_response_free(&res);
}

TEST("a stream without a switch is one too, and one whose peer says something and goes is read to its end")
{
    static const struct {
        how how;
        const char *text;
    } cases[] = { { NO_SWITCH, "bytes until the end" }, { EARLY, "gone" } };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_http_response res;
        start(cases[i].how);
        pdk_http_request req = request("", 0);
        REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
        stop();
        CHECK(strcmp(res.body, cases[i].text) == 0);
        pdk_http_response_free(&res);
    }
}

TEST("an answer that is cut, or never comes, may have had an effect; a socket where nobody listens has not")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_http_failure failure;
    pdk_http_response res;
    start(CUT_HEAD);
    pdk_http_request req = request("x", 1);
    CHECK(pdk_http_duplex(&req, &res, &failure, &err) < 0);
    stop();
    CHECK(failure == PDK_HTTP_AMBIGUOUS && strcmp(err.reason, "read") == 0);
    pdk_error_clear(&err);
    start(SILENT);
    req = request("x", 1);
    req.timeout = 0.2;
    CHECK(pdk_http_duplex(&req, &res, &failure, &err) < 0);
    CHECK(failure == PDK_HTTP_AMBIGUOUS && strcmp(err.reason, "read_timeout") == 0);
    stop();
    pdk_error_clear(&err);
    CHECK(pdk_http_duplex(&req, &res, &failure, &err) < 0);
    CHECK(failure == PDK_HTTP_NOT_SENT && strcmp(err.reason, "connect") == 0);
}

static bool first_piece(void *ctx, const char *data, size_t len)
{
    (void)data;
    *(size_t *)ctx += len;
    return false;
}

TEST("whoever reads may stop, and a header may not smuggle a line")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_http_response res;
    size_t seen = 0;
    start(ECHO);
    pdk_http_request req = request("hello", 5);
    req.on_body = first_piece;
    req.on_body_ctx = &seen;
    REQUIRE(pdk_http_duplex(&req, &res, NULL, &err) == 0);
    stop();
    CHECK(seen > 0 && res.body_len == 0);
    pdk_http_response_free(&res);
    const char *const headers[] = { "A: b\r\nC: d", NULL };
    req.headers = headers;
    CHECK(pdk_http_duplex(&req, &res, NULL, &err) < 0 && err.kind == PDK_E_INVALID_ARGUMENT);
}

TEST_MAIN
