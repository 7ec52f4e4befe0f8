/* guest_client.h -- for the tests of the guest: starts the real static binary as the process backend does (settings on 3,
 * socket on 4, record on 5, start pipe on 6) and speaks to it. Plain code: no part of paddock is used, so that a mistake on
 * one side is not repeated on the other. */
#ifndef GUEST_CLIENT_H
#define GUEST_CLIENT_H

#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <http_parser.h>
#include <jansson.h>
#include <libgen.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

typedef struct guest {
    pid_t pid;
    char dir[100], work[120], sock[120], record[120];
    int start_pipe; /* our end; -1 = closed */
    uint64_t token;
    bool namespaced; /* in bwrap, as pid 1 */
} guest;

typedef struct reply {
    int status;
    char *body; /* NUL-terminated */
    size_t len;
    bool complete, keep;
} reply;

static const char *guest_binary(void)
{
    static char path[600];
    char exe[500];
    if (getenv("PADDOCK_GUEST") != NULL)
        return getenv("PADDOCK_GUEST");
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = '\0';
    char *dir = dirname(exe);
    snprintf(path, sizeof path, "%s/../bin/paddock-guest", dir); /* build/asan/tests and build/asan/bin */
    if (access(path, X_OK) != 0)
        snprintf(path, sizeof path, "%s/../../bin/paddock-guest", dir);
    return path;
}

/* `text` with our pid for each @: suites run side by side, and must not count each other's processes. */
static char *marked(const char *text)
{
    size_t n = 0, len = strlen(text) * 8 + 1;
    char *to = malloc(len);
    for (const char *p = text; *p != '\0'; p++)
        n += *p == '@' ? (size_t)snprintf(to + n, len - n, "%d", (int)getpid()) : (to[n] = *p, (size_t)1);
    to[n] = '\0';
    return to;
}

/* How many processes have a command line that contains `text` (marked). */
__attribute__((unused)) static int alive_with(const char *marker)
{
    int count = 0;
    char *text = marked(marker);
    DIR *d = opendir("/proc");
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        char path[300], line[4096];
        snprintf(path, sizeof path, "/proc/%s/cmdline", e->d_name);
        int fd = e->d_name[0] >= '1' && e->d_name[0] <= '9' ? open(path, O_RDONLY) : -1;
        ssize_t n = fd >= 0 ? read(fd, line, sizeof line - 1) : 0;
        if (fd >= 0)
            close(fd);
        for (ssize_t i = 0; i < n; i++)
            if (line[i] == '\0')
                line[i] = ' ';
        line[n > 0 ? n : 0] = '\0';
        if (n > 0 && strstr(line, text) != NULL && atoi(e->d_name) != getpid())
            count++;
    }
    if (d != NULL)
        closedir(d);
    free(text);
    return count;
}

/* Waits until no such process is left, a few seconds at most. */
__attribute__((unused)) static bool gone(const char *text)
{
    for (int i = 0; i < 300; i++) {
        if (alive_with(text) == 0)
            return true;
        usleep(10000);
    }
    return false;
}

static void guest_child(const guest *g, const int fds[4], const char *prefix)
{
    int high[4];
    for (int i = 0; i < 4; i++)
        high[i] = fcntl(fds[i], F_DUPFD, 100);
    for (int i = 0; i < 4; i++)
        dup2(high[i], 3 + i);
    for (int i = 7; i < 1024; i++)
        close(i);
    int null = open("/dev/null", O_RDWR);
    dup2(null, 0);
    dup2(null, 1);
    if (null > 6)
        close(null);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGPIPE, SIG_DFL);
    if (g->namespaced)
        execlp("bwrap", "bwrap", "--unshare-all", "--as-pid-1", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--proc", "/proc",
               "--dev", "/dev", "--bind", g->work, "/tmp/work", "--ro-bind", guest_binary(), "/tmp/guest", "--chdir", "/",
               "--cap-drop", "ALL", "--clearenv", "/tmp/guest", NULL);
    else if (prefix != NULL)
        execl("/bin/sh", "sh", "-c", prefix, guest_binary(), NULL);
    else
        execl(guest_binary(), "paddock-guest", NULL);
    _exit(99);
}

/* `extra`: more settings, each ended by a newline; they come last. `prefix`: shell text that ends in exec "$0", or NULL. */
static bool guest_launch(guest *g, const char *extra, const char *prefix)
{
    static int number;
    bool namespaced = g->namespaced;
    *g = (guest){ .start_pipe = -1, .token = 10, .namespaced = namespaced };
    snprintf(g->dir, sizeof g->dir, "%s/g%d", test_tmpdir(), number++);
    snprintf(g->work, sizeof g->work, "%s/work", g->dir);
    snprintf(g->sock, sizeof g->sock, "%s/sock", g->dir);
    snprintf(g->record, sizeof g->record, "%s/record", g->dir);
    mkdir(g->dir, 0755);
    mkdir(g->work, 0755);
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, g->sock, strlen(g->sock) + 1);
    int settings[2], start[2], listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&a, sizeof a) < 0 || listen(listener, 64) < 0)
        return false;
    if (pipe2(settings, O_CLOEXEC) < 0 || pipe2(start, O_CLOEXEC) < 0)
        return false;
    int record = open(g->record, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    char text[4096];
    int n = snprintf(text, sizeof text, "generation=gen1\ntoken=10\norphan_ttl=0\nworkspace=%s\n%s",
                     g->namespaced ? "/tmp/work" : g->work, extra != NULL ? extra : "");
    for (int i = 0; i < n; i++)
        if (text[i] == '\n')
            text[i] = '\0';
    if (write(settings[1], text, (size_t)n) != n)
        return false;
    close(settings[1]);
    int fds[4] = { settings[0], listener, record, start[0] };
    g->pid = fork();
    if (g->pid == 0)
        guest_child(g, fds, prefix);
    for (int i = 0; i < 4; i++)
        close(fds[i]);
    g->start_pipe = start[1];
    signal(SIGPIPE, SIG_IGN);
    ssize_t told = write(g->start_pipe, "g", 1); /* fails when it has ended already, as bad settings make it */
    return g->pid > 0 && (told == 1 || errno == EPIPE);
}

/* Whether the guest has ended, waiting for up to `seconds`; *status as waitpid. */
static bool guest_ended(guest *g, double seconds, int *status)
{
    for (double until = test_now() + seconds;;) {
        if (waitpid(g->pid, status, WNOHANG) == g->pid) {
            g->pid = 0;
            return true;
        }
        if (test_now() > until)
            return false;
        usleep(2000);
    }
}

static void guest_end(guest *g)
{
    int status;
    if (g->pid > 0) {
        if (g->namespaced)
            unlink(g->record); /* bwrap's outer process passes no signals on */
        else
            kill(g->pid, SIGTERM);
        if (!guest_ended(g, 10, &status)) {
            kill(g->pid, SIGKILL);
            waitpid(g->pid, &status, 0);
            test_fail(__FILE__, __LINE__, "the guest did not end when it was told to");
        }
    }
    if (g->start_pipe >= 0)
        close(g->start_pipe);
    g->start_pipe = -1;
}

/* The guest of the tests that leave it as it was, with these settings more (or NULL). */
static guest shared;
__attribute__((unused)) static guest *shared_guest(const char *extra)
{
    if (shared.pid == 0 && !guest_launch(&shared, extra, NULL)) {
        fprintf(stderr, "cannot start %s\n", guest_binary());
        exit(1);
    }
    return &shared;
}

/* ---- http ---- */

static int client_connect(const guest *g)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, g->sock, strlen(g->sock) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval limit = { 30, 0 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    close(fd);
    return -1;
}

static bool client_send(int fd, const void *data, size_t len)
{
    for (const char *p = data; len > 0;) {
        ssize_t n = send(fd, p, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        p += n;
        len -= (size_t)n;
    }
    return true;
}

static int reply_body(http_parser *p, const char *data, size_t len)
{
    reply *r = p->data;
    r->body = realloc(r->body, r->len + len + 1);
    memcpy(r->body + r->len, data, len);
    r->len += len;
    r->body[r->len] = '\0';
    return 0;
}

static int reply_complete(http_parser *p)
{
    reply *r = p->data;
    if (p->status_code == 100)
        return 0;
    r->complete = true;
    r->status = (int)p->status_code;
    r->keep = http_should_keep_alive(p);
    http_parser_pause(p, 1);
    return 0;
}

/* Reads one reply; byte by byte at its end, so that the next one stays in the socket. */
static reply client_read(int fd)
{
    reply r = { 0 };
    http_parser p;
    http_parser_settings cb;
    http_parser_settings_init(&cb);
    cb.on_body = reply_body;
    cb.on_message_complete = reply_complete;
    http_parser_init(&p, HTTP_RESPONSE);
    p.data = &r;
    char buf[65536]; /* several threads of a test may be clients at once */
    while (!r.complete) {
        ssize_t n = recv(fd, buf, sizeof buf, 0);
        if (n < 0)
            break;
        http_parser_execute(&p, &cb, buf, (size_t)n);
        if (n == 0)
            break;
    }
    if (r.body == NULL)
        r.body = calloc(1, 1);
    return r;
}

/* One request on an open connection: sends it, and the body. `headers`: more lines, each with \r\n. */
static bool client_request(int fd, const guest *g, const char *method, const char *path, const char *headers,
                           const void *body, size_t len)
{
    char head[8192];
    int n = snprintf(head, sizeof head,
                     "%s %s HTTP/1.1\r\nHost: x\r\nX-Paddock-Token: %llu\r\nContent-Length: %zu\r\n%s\r\n", method, path,
                     (unsigned long long)g->token, len, headers != NULL ? headers : "");
    return client_send(fd, head, (size_t)n) && client_send(fd, body, len);
}

static reply client_call(const guest *g, const char *method, const char *path, const char *headers, const void *body,
                         size_t len)
{
    int fd = client_connect(g);
    if (fd < 0)
        return (reply){ .body = calloc(1, 1) };
    pid_t sender = 0;
    if (len < 65536)
        client_request(fd, g, method, path, headers, body, len);
    else if ((sender = fork()) == 0) /* so that we can read meanwhile, as every real client does */
        _exit(!client_request(fd, g, method, path, headers, body, len));
    reply r = client_read(fd);
    close(fd);
    if (sender > 0) {
        kill(sender, SIGKILL); /* when it still has something to send, nobody wants it */
        waitpid(sender, NULL, 0);
    }
    return r;
}

static void reply_free(reply *r)
{
    free(r->body);
    r->body = NULL;
}

__attribute__((unused)) static reply simple(const guest *g, const char *method, const char *path)
{
    return client_call(g, method, path, NULL, "", 0);
}

/* ---- exec ---- */

typedef struct command {
    const char *text, *session, *cwd, *limit, *max, *env, *in;
    size_t in_len; /* of `in`, when it is set; 0 = strlen */
} command;

typedef struct outcome {
    int status;              /* of HTTP */
    char *out, *err, *error; /* error: of a refusal */
    size_t out_len, err_len;
    char name[32]; /* the outcome */
    int exit_code, sig;
    bool truncated, reset, ended;
    double duration, took;
} outcome;

static size_t frame_put(char *to, char type, const char *data, size_t len)
{
    to[0] = type;
    for (int i = 0; i < 4; i++)
        to[1 + i] = (char)(len >> (24 - 8 * i));
    memcpy(to + 5, data, len);
    return 5 + len;
}

static char *command_body(const command *c, size_t *len)
{
    char *command = c->text != NULL ? marked(c->text) : NULL;
    const char *text[] = { command, c->session, c->cwd, c->limit, c->max, c->env };
    size_t need = 100, in_len = c->in != NULL ? (c->in_len ? c->in_len : strlen(c->in)) : 0;
    for (int i = 0; i < 6; i++)
        need += text[i] != NULL ? strlen(text[i]) + 5 : 0;
    char *body = malloc(need + in_len), *to = body;
    for (int i = 0; i < 6; i++)
        if (text[i] != NULL)
            to += frame_put(to, "csdtme"[i], text[i], strlen(text[i]));
    if (c->in != NULL) {
        to += frame_put(to, '0', "", 0);
        memcpy(to, c->in, in_len);
        to += in_len;
    }
    *len = (size_t)(to - body);
    free(command);
    return body;
}

static void outcome_json(outcome *o, const char *text, size_t len)
{
    json_t *j = json_loadb(text, len, 0, NULL);
    const char *name = json_string_value(json_object_get(j, "outcome"));
    snprintf(o->name, sizeof o->name, "%s", name != NULL ? name : "?");
    o->exit_code = (int)json_integer_value(json_object_get(j, "exit_code"));
    o->sig = (int)json_integer_value(json_object_get(j, "signal"));
    o->truncated = json_is_true(json_object_get(j, "truncated"));
    o->reset = json_is_true(json_object_get(j, "session_reset"));
    o->duration = json_real_value(json_object_get(j, "duration"));
    const char *error = json_string_value(json_object_get(j, "error"));
    if (error != NULL)
        o->error = strdup(error);
    o->ended = true;
    json_decref(j);
}

static void text_add(char **text, size_t *len, const char *data, size_t n)
{
    *text = realloc(*text, *len + n + 1);
    memcpy(*text + *len, data, n);
    *len += n;
    (*text)[*len] = '\0';
}

static outcome outcome_of(reply *r, double since)
{
    outcome o = { .status = r->status, .took = test_now() - since, .out = calloc(1, 1), .err = calloc(1, 1) };
    if (r->status != 200) {
        json_t *j = json_loadb(r->body, r->len, 0, NULL);
        const char *error = json_string_value(json_object_get(j, "error"));
        o.error = strdup(error != NULL ? error : "?");
        json_decref(j);
    }
    for (size_t at = 0; r->status == 200 && at + 8 <= r->len;) {
        const unsigned char *h = (const unsigned char *)r->body + at;
        size_t n = (size_t)h[4] << 24 | (size_t)h[5] << 16 | (size_t)h[6] << 8 | h[7];
        if (at + 8 + n > r->len)
            break;
        if (h[0] == 1)
            text_add(&o.out, &o.out_len, r->body + at + 8, n);
        if (h[0] == 2)
            text_add(&o.err, &o.err_len, r->body + at + 8, n);
        if (h[0] == 3)
            outcome_json(&o, r->body + at + 8, n);
        at += 8 + n;
    }
    reply_free(r);
    return o;
}

static outcome exec_command(const guest *g, command c)
{
    double since = test_now();
    size_t len;
    char *body = command_body(&c, &len);
    reply r = client_call(g, "POST", "/v1/paddock/exec", NULL, body, len);
    free(body);
    return outcome_of(&r, since);
}

static void outcome_free(outcome *o)
{
    free(o->out);
    free(o->err);
    free(o->error);
}

#define EXEC(g, ...) exec_command(g, (command){ __VA_ARGS__ })

/* A field of GET /v1/sandbox's "paddock" object, as text or number. */
__attribute__((unused)) static double state_number(const guest *g, const char *field)
{
    int fd = client_connect(g);
    client_send(fd, "GET /v1/sandbox HTTP/1.1\r\n\r\n", 29 - 1);
    reply r = client_read(fd);
    close(fd);
    json_t *j = json_loadb(r.body, r.len, 0, NULL);
    json_t *v = json_object_get(json_object_get(j, "paddock"), field);
    double n = json_is_string(v) ? atof(json_string_value(v)) : json_is_boolean(v) ? json_is_true(v) : json_number_value(v);
    json_decref(j);
    reply_free(&r);
    return n;
}

#endif
