/* main.c -- paddock-guest: its start, its end, and what it enforces: the token, fence, doom, the orphan clock.
 * Everything is decided in one thread, so an orphan's end and a fence cannot pass each other: a fence that was answered
 * has moved the clock, and a guest that has decided to end answers nothing more. */
#include "priv.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { FD_SETTINGS = 3, FD_LISTEN = 4, FD_RECORD = 5, FD_START = 6 };

#define FENCE_SECONDS 10 /* for the commands of smaller tokens to end; then the fence is refused, never half done */

typedef struct fence_wait {
    struct fence_wait *next;
    guest_req *req;
    uint64_t token;
    guest_timer limit;
} fence_wait;

static struct {
    uint64_t token; /* the largest that a fence brought */
    bool doomed, has_record, record_watched;
    uint64_t doom_expected, doom_token;
    int64_t contact; /* when the orphan clock was last wound up */
    fence_wait *fences;
    guest_watch start, record;
    guest_timer orphan, record_check;
} state;

/* ---- tokens ---- */

uint64_t guest_token(void)
{
    return state.token;
}

bool guest_doomed(void)
{
    return state.doomed;
}

bool guest_token_allows(uint64_t token, guest_fault *f)
{
    if (state.doomed)
        guest_fail(f, 409, "doomed", 0, "this sandbox is being destroyed");
    else if (token < state.token)
        guest_fail(f, 409, "stale_token", 0, "another owner has taken this sandbox: token %llu is below %llu",
                   (unsigned long long)token, (unsigned long long)state.token);
    return !state.doomed && token >= state.token;
}

json_t *guest_state_json(void)
{
    char token[24];
    snprintf(token, sizeof token, "%llu", (unsigned long long)state.token);
    unsigned running = guest_cmd_foreground();
    bool stopped = running > 0 || guest_http_contacts() > 0;
    double idle = stopped ? 0 : (double)(guest_now() - state.contact) / 1e9;
    return json_pack("{s:s, s:s, s:b, s:i, s:i, s:f, s:I, s:s}", "generation", guest_conf.generation, "token", token,
                     "doomed", state.doomed, "commands", (int)running, "trees", (int)guest_cmd_trees(), "idle_seconds", idle,
                     "oom_kills", (json_int_t)guest_oom_kills(), "version", GUEST_VERSION);
}

/* ---- the orphan clock, the record, the start pipe ---- */

void guest_exit(int status)
{
    if (getpid() != 1) /* of pid 1 the kernel ends the whole namespace */
        guest_cmd_kill_wait(5);
    _exit(status);
}

void guest_contact(void)
{
    state.contact = guest_now();
}

/* Looks only when the time would be up: what stops the clock is checked then, and every end of it winds the clock up. */
static void on_orphan(guest_timer *t)
{
    if (guest_http_contacts() > 0 || guest_cmd_foreground() > 0)
        guest_contact();
    double left = guest_conf.orphan_ttl - (double)(guest_now() - state.contact) / 1e9;
    if (left <= 0)
        guest_exit(0);
    guest_timer_in(t, left, on_orphan, NULL);
}

static void record_check(void)
{
    struct stat st;
    if (fstat(FD_RECORD, &st) == 0 && st.st_nlink == 0)
        guest_exit(0); /* its record is gone: nobody can find this sandbox any more */
}

static void on_record_timer(guest_timer *t)
{
    record_check();
    guest_timer_in(t, state.record_watched ? 60 : 1, on_record_timer, NULL);
}

static void on_record_event(guest_watch *w, uint32_t events)
{
    (void)events;
    char buf[512];
    while (read(w->fd, buf, sizeof buf) > 0)
        ;
    record_check();
}

/* An unlink is an event where inotify works; its instances are few per user, so a look now and then does as well. */
static void record_watch(void)
{
    struct stat st;
    state.has_record = fstat(FD_RECORD, &st) == 0;
    if (!state.has_record)
        return;
    fcntl(FD_RECORD, F_SETFD, FD_CLOEXEC);
    state.record = (guest_watch){ .fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK), .fn = on_record_event };
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", FD_RECORD);
    if (state.record.fd >= 0 && inotify_add_watch(state.record.fd, path, IN_ATTRIB | IN_DELETE_SELF) >= 0 &&
        guest_watch_set(&state.record, EPOLLIN) == 0)
        state.record_watched = true;
    else
        guest_watch_close(&state.record);
    on_record_timer(&state.record_check);
}

static void on_start_pipe(guest_watch *w, uint32_t events)
{
    (void)events;
    char byte = 0;
    ssize_t n = read(w->fd, &byte, 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n != 1 || byte != 'g')
        guest_exit(0); /* whoever started this died before the record was durable: nobody would ever find it */
    guest_watch_close(w);
}

static void start_watch(void)
{
    if (fcntl(FD_START, F_GETFD) < 0)
        return;
    fcntl(FD_START, F_SETFD, FD_CLOEXEC);
    fcntl(FD_START, F_SETFL, O_NONBLOCK);
    state.start = (guest_watch){ .fd = FD_START, .fn = on_start_pipe };
    guest_watch_set(&state.start, EPOLLIN);
}

/* ---- fence and doom ---- */

static void reply_token(guest_req *req, uint64_t token)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)token);
    guest_reply_json(req, 200, json_pack("{s:s}", "token", text));
}

static void fence_drop(fence_wait *w)
{
    for (fence_wait **at = &state.fences; *at != NULL; at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            break;
        }
    guest_timer_stop(&w->limit);
    free(w);
}

/* Ends the wait with an answer: done, refused by what happened meanwhile, or out of time. */
static void fence_answer(fence_wait *w, bool late)
{
    guest_req *req = w->req;
    uint64_t token = w->token;
    guest_fault f;
    fence_drop(w);
    if (!guest_token_allows(token, &f))
        guest_reply_fault(req, &f);
    else if (late) {
        guest_fail(&f, 503, "busy", 0, "commands of the owner before do not end; try again");
        guest_reply_fault(req, &f);
    } else {
        reply_token(req, token);
    }
}

static void on_fence_late(guest_timer *t)
{
    fence_answer(t->ctx, true);
}

static void on_fence_close(guest_req *req)
{
    fence_drop(req->ctx);
}

void guest_cmds_changed(void)
{
    for (fence_wait *w = state.fences, *next; w != NULL; w = next) {
        next = w->next;
        if (state.doomed || w->token < state.token || !guest_cmd_below(w->token))
            fence_answer(w, false);
    }
}

static void route_fence(guest_req *req)
{
    if (req->token > state.token)
        state.token = req->token; /* from here on the smaller ones are refused, also while their commands end */
    guest_cmd_kill_below(req->token);
    fence_wait *w = calloc(1, sizeof *w);
    if (w == NULL) {
        guest_fault f;
        guest_fail(&f, 503, "no_memory", ENOMEM, "no memory for a fence");
        guest_reply_fault(req, &f);
        return;
    }
    w->req = req;
    w->token = req->token;
    w->next = state.fences;
    state.fences = w;
    req->ctx = w;
    req->on_close = on_fence_close;
    guest_timer_in(&w->limit, FENCE_SECONDS, on_fence_late, w);
    guest_cmds_changed(); /* at once, when there is nothing to wait for */
}

static void route_doom(guest_req *req)
{
    guest_fault f;
    uint64_t expected;
    const char *text = guest_header(req, "X-Paddock-Expected");
    if (text == NULL || !guest_parse_u64(text, &expected)) {
        guest_fail(&f, 400, "invalid_token", 0, "X-Paddock-Expected is not a decimal 64-bit number");
        guest_reply_fault(req, &f);
        return;
    }
    if (state.doomed && (expected != state.doom_expected || req->token != state.doom_token)) {
        guest_fail(&f, 409, "doomed", 0, "this sandbox is being destroyed by another decision");
        guest_reply_fault(req, &f);
        return;
    }
    if (!state.doomed && (expected != state.token || !guest_token_allows(req->token, &f))) {
        guest_fail(&f, 409, "token_mismatch", 0, "the largest token here is %llu, not %llu", (unsigned long long)state.token,
                   (unsigned long long)expected);
        guest_reply_fault(req, &f);
        return;
    }
    bool again = state.doomed;
    state.doomed = true;
    state.doom_expected = expected;
    state.doom_token = req->token;
    reply_token(req, state.token);
    if (!again) {
        guest_cmd_kill_all(GUEST_KILL_CANCELLED);
        guest_cmds_changed();
    }
}

/* ---- routes ---- */

static void reply_no_route(guest_req *req, int status)
{
    guest_fault f;
    guest_fail(&f, status, status == 405 ? "no_method" : "no_route", 0, "there is no %s %.150s here", req->method,
               req->path);
    guest_reply_fault(req, &f);
}

static void route_cancel(guest_req *req)
{
    bool found = guest_run_cancel(req->path + strlen("/v1/paddock/cancel/"));
    guest_reply_json(req, 200, json_pack("{s:b}", "cancelled", found));
}

static void route_session(guest_req *req)
{
    guest_session_route(req, req->path + strlen("/v1/paddock/sessions/"));
}

static const struct route {
    const char *method, *path;
    bool prefix;
    void (*begin)(guest_req *); /* at the headers: for those that stream their body */
    void (*run)(guest_req *);   /* with the body */
} ROUTES[] = {
    { "POST", "/v1/paddock/exec", false, guest_run_begin, NULL },
    { "PUT", "/v1/paddock/file", false, guest_file_put_begin, NULL },
    { "GET", "/v1/paddock/file", false, NULL, guest_file_get },
    { "GET", "/v1/paddock/list", false, NULL, guest_file_list },
    { "POST", "/v1/paddock/fence", false, NULL, route_fence },
    { "POST", "/v1/paddock/doom", false, NULL, route_doom },
    { "POST", "/v1/paddock/cancel/", true, NULL, route_cancel },
    { "POST", "/v1/paddock/sessions/", true, NULL, route_session },
    { "DELETE", "/v1/paddock/sessions/", true, NULL, route_session },
};

static bool is_ours(const guest_req *req)
{
    return strncmp(req->path, "/v1/paddock/", 12) == 0;
}

/* The route, or NULL with the status that says why not. */
static const struct route *route_find(const guest_req *req, int *status)
{
    *status = 404;
    for (size_t i = 0; i < sizeof ROUTES / sizeof ROUTES[0]; i++) {
        const struct route *r = &ROUTES[i];
        if (r->prefix ? strncmp(req->path, r->path, strlen(r->path)) != 0 : strcmp(req->path, r->path) != 0)
            continue;
        if (strcmp(req->method, r->method) == 0)
            return r;
        *status = 405;
    }
    return NULL;
}

/* The token on arrival. False: refused, and answered. */
static bool token_arrives(guest_req *req)
{
    guest_fault f;
    const char *text = guest_header(req, "X-Paddock-Token");
    bool open = strcmp(req->method, "GET") == 0 && strcmp(req->path, "/v1/sandbox") == 0;
    bool doom = strcmp(req->path, "/v1/paddock/doom") == 0 && strcmp(req->method, "POST") == 0;
    if (!guest_secret_ok(guest_header(req, "X-Paddock-Secret"))) {
        guest_fail(&f, 401, "unauthorized", 0, "X-Paddock-Secret is missing or wrong");
        guest_reply_fault(req, &f);
        return false;
    }
    if (text == NULL && open)
        return true;
    if (text == NULL)
        guest_fail(&f, 401, "missing_token", 0, "X-Paddock-Token is missing");
    else if (!guest_parse_u64(text, &req->token))
        guest_fail(&f, 400, "invalid_token", 0, "X-Paddock-Token is not a decimal 64-bit number");
    else if (guest_token_allows(req->token, &f)) {
        guest_http_mark_contact(req);
        guest_contact();
        return true;
    } else if (open || (doom && state.doomed)) {
        return true; /* says what is; a repeated doom is compared by its route */
    }
    guest_reply_fault(req, &f);
    return false;
}

void guest_route_begin(guest_req *req)
{
    if (!token_arrives(req))
        return;
    if (!is_ours(req)) {
        aio_begin(req);
        return;
    }
    int status;
    const struct route *r = route_find(req, &status);
    if (r == NULL)
        reply_no_route(req, status);
    else if (r->begin != NULL)
        r->begin(req);
}

void guest_route_end(guest_req *req)
{
    guest_fault f;
    int status;
    bool settled = strcmp(req->path, "/v1/sandbox") == 0 || strcmp(req->path, "/v1/paddock/doom") == 0;
    if (!settled && !guest_token_allows(req->token, &f)) { /* the body took its time: somebody may have fenced */
        guest_reply_fault(req, &f);
        return;
    }
    if (!is_ours(req)) {
        aio_route(req);
        return;
    }
    const struct route *r = route_find(req, &status);
    if (r != NULL && r->run != NULL)
        r->run(req);
    else
        reply_no_route(req, status);
}

/* ---- start ---- */

static int settings_read(guest_fault *f)
{
    size_t len = 0, cap = 1 << 20;
    char *bytes = malloc(cap);
    ssize_t n = -1;
    while (bytes != NULL && len < cap && (n = read(FD_SETTINGS, bytes + len, cap - len)) != 0) {
        if (n < 0 && errno != EINTR)
            break;
        len += n > 0 ? (size_t)n : 0;
    }
    int rc = n == 0 ? guest_settings_parse(bytes, len, f)
                    : guest_fail(f, 500, "invalid_setting", errno, "cannot read the settings, or they exceed 1 MiB");
    free(bytes);
    close(FD_SETTINGS);
    return rc;
}

/* What whoever started this kept for itself: a copy here would live as long as the guest. */
static void close_unknown(void)
{
    int last = guest_conf.memory_events_fd > FD_START ? guest_conf.memory_events_fd : FD_START;
    if (syscall(SYS_close_range, (unsigned)last + 1, ~0u, 0u) < 0)
        for (int fd = last + 1; fd < 1024; fd++)
            close(fd);
    for (int fd = FD_START + 1; fd < last; fd++)
        close(fd);
}

static int die(const char *what)
{
    fprintf(stderr, "paddock-guest: %s\n", what);
    return 70;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        puts(GUEST_VERSION);
        return 0;
    }
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0); /* nothing inside may read its memory or take its descriptors, whatever its uid */
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* where it is not pid 1, what a dead keeper leaves still comes here */
    mallopt(M_MMAP_THRESHOLD, 128 << 10);      /* fixed: a large body once is no reason to stay large */
    mallopt(M_TRIM_THRESHOLD, 128 << 10);
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            return die("cannot open /dev/null for a standard stream");
    guest_fault f;
    const char *file = argc == 3 && strcmp(argv[1], "--settings") == 0 ? argv[2] : NULL;
    if (file == NULL && fcntl(FD_LISTEN, F_GETFD) < 0)
        return die("descriptor 4 is not a listening socket; the paddock runtime starts this program");
    if (file != NULL && guest_container_settings(file, FD_SETTINGS, &f) < 0)
        return die(f.message);
    if (settings_read(&f) < 0)
        return die(f.message);
    if (file != NULL && (guest_container_hide(file, &f) < 0 || guest_container_env(&f) < 0 || guest_container_listen(FD_LISTEN, &f) < 0))
        return die(f.message);
    close_unknown();
    fcntl(FD_LISTEN, F_SETFD, FD_CLOEXEC);
    fcntl(FD_LISTEN, F_SETFL, O_NONBLOCK);
    if (guest_conf.memory_events_fd >= 0)
        fcntl(guest_conf.memory_events_fd, F_SETFD, FD_CLOEXEC);
    if (guest_loop_init() < 0 || guest_http_listen(FD_LISTEN) < 0)
        return die("cannot make the event loop");
    state.token = guest_conf.token;
    guest_contact();
    record_watch();
    start_watch();
    if (guest_conf.orphan_ttl > 0)
        guest_timer_in(&state.orphan, guest_conf.orphan_ttl, on_orphan, NULL);
    aio_init();
    guest_loop_run();
}
