/* aio_shell.c -- /v1/shell: sessions on terminals, one merged output.
 *
 * A session is a name, a directory and, from its first command on, a shell (aio_pty). Commands of one session run one after
 * the other, in the order in which they came. What ends a shell (`exit`, a time limit, a kill, a fence) does not end its
 * session: the next command gets a fresh shell, and its answer says session_reset.
 * Two fields are beside the API's own, as on /v1/bash: `truncated`, and `oom` when the kernel killed for memory.
 * A job is one command. It lives on after its end as its session's last one, for view; its request may be gone long before.
 */
#include "aio_pty.h"
#include "aio_session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define NO_CHANGE 120.0     /* seconds without output, of a session that does not say */
#define TRUNCATE 30000      /* characters of an answer, unless truncate is false */
#define QUEUE_MAX 100       /* commands that wait for one session */
#define ACTIVE_WITHIN 300.0 /* seconds: what stats call active */
#define ENDED_HINT "The shell ended with this command. The next command with this session id runs in a fresh shell."

typedef struct session session;

typedef struct job {
    struct job *next;       /* in its session's queue */
    session *owner;
    guest_req *req;         /* NULL = answered, or its client is gone */
    char *command, *dir;    /* dir: NULL = where the shell is */
    bool logical, truncate, fresh_shell, oom;
    double hard, no_change; /* seconds; 0 = none */
    uint64_t token;
    guest_timer answer, quiet;
    const char *status;
    bool has_exit;
    int exit_code;
    const char *hint;
    aio_buf output;
} job;

typedef struct waiter { /* a wait or kill request that asks for the end of a job */
    aio_waiter base;
    bool kill;
} waiter;

struct session {
    aio_session base;
    aio_pty *shell;         /* NULL = none yet, or it ended */
    bool lost;              /* a shell ended, and no command has been told yet */
    double no_change;
    job *last;              /* the running one, or the last that ran; NULL = none ever */
    bool running;
    job *queue;
};

static bool idle(const aio_session *s);
static void session_end(aio_session *s);
static aio_plane plane = { .name = "shell", .size = sizeof(session), .idle = idle, .end = session_end };

static void pump(session *s);

/* ---- jobs ---- */

static void job_free(job *j)
{
    if (j == NULL) return;
    guest_timer_stop(&j->answer);
    guest_timer_stop(&j->quiet);
    if (j->req != NULL) j->req->on_close = NULL;
    free(j->command);
    free(j->dir);
    aio_buf_free(&j->output);
    free(j);
}

static void set_exit(json_t *data, const job *j)
{
    if (data != NULL && j->has_exit) json_object_set_new(data, "exit_code", json_integer(j->exit_code));
}

static json_t *job_json(const job *j, size_t max)
{
    json_t *output = aio_buf_json(&j->output, 0, max);
    json_t *data = json_pack("{s:s, s:o, s:s, s:O, s:[{s:s, s:o, s:o}]}", "session_id", j->owner->base.id, "command",
                             aio_text(j->command, strlen(j->command)), "status", j->status, "output", output, "console", "ps1",
                             "$ ", "command", aio_text(j->command, strlen(j->command)), "output", output);
    set_exit(data, j);
    if (data != NULL && j->fresh_shell) json_object_set_new(data, "session_reset", json_true());
    if (data != NULL && j->output.total > j->output.head_len + j->output.tail_len)
        json_object_set_new(data, "truncated", json_true());
    if (data != NULL && j->oom) json_object_set_new(data, "oom", json_true());
    return data;
}

/* Ends the request, if it is still there. */
static void job_answer(job *j)
{
    guest_timer_stop(&j->answer);
    guest_timer_stop(&j->quiet);
    if (j->req == NULL) return;
    guest_req *req = j->req;
    json_t *data = job_json(j, j->truncate ? TRUNCATE : 0);
    if (data != NULL && j->truncate && j->output.total > TRUNCATE) json_object_set_new(data, "truncated", json_true());
    j->req = NULL;
    req->on_close = NULL;
    aio_reply_ok(req, data, j->hint);
}

static void on_answer_due(guest_timer *t)
{
    job_answer(t->ctx);
}

static void on_quiet(guest_timer *t)
{
    job *j = t->ctx;
    const char *status = j->status;
    j->status = "no_change_timeout"; /* for this answer only: it still runs */
    job_answer(j);
    j->status = status;
}

static void on_exec_closed(guest_req *req)
{
    job *j = req->ctx;
    j->req = NULL;
    guest_timer_stop(&j->answer);
    if (j->owner->last == j) return; /* it runs, and nobody may take it for one that did not */
    for (job **link = &j->owner->queue; *link != NULL; link = &(*link)->next) {
        if (*link != j) continue;
        *link = j->next;
        job_free(j);
        return;
    }
}

/* ---- waiters ---- */

static json_t *waiter_json(const aio_waiter *w)
{
    const job *j = ((const session *)w->owner)->last;
    json_t *data = json_pack("{s:s}", "status", j ? j->status : "completed");
    if (((const waiter *)w)->kill && j != NULL) {
        set_exit(data, j);
        if (data != NULL && j->has_exit) json_object_set_new(data, "returncode", json_integer(j->exit_code));
    }
    return data;
}

static void wait_for_end(session *s, guest_req *req, bool kill, double seconds)
{
    waiter *w = (waiter *)aio_wait(req, &s->base, sizeof *w, waiter_json);
    if (w == NULL) return;
    w->kill = kill;
    if (!s->running) aio_wait_answer(&w->base);
    else if (seconds >= 0) aio_wait_limit(&w->base, seconds);
}

/* ---- running ---- */

static void job_end(session *s, const char *status, int exit_code)
{
    job *j = s->last;
    s->running = false;
    aio_session_touch(&s->base);
    j->status = status;
    j->has_exit = true;
    j->exit_code = exit_code;
    job_answer(j);
    aio_wait_answer_all(&s->base);
    pump(s);
}

static void on_output(void *ctx, const char *data, size_t len)
{
    session *s = ctx;
    job *j = s->last;
    if (j == NULL) return;
    aio_buf_add(&j->output, data, len);
    if (s->running && j->req != NULL && j->no_change > 0) guest_timer_in(&j->quiet, j->no_change, on_quiet, j);
}

static void on_done(void *ctx, int exit_code, const char *cwd)
{
    session *s = ctx;
    if (cwd[0] == '/') aio_session_go(&s->base, cwd);
    job_end(s, "completed", exit_code);
}

static void on_gone(void *ctx, const guest_cmd_end *end)
{
    session *s = ctx;
    s->shell = NULL;
    s->lost = s->lost || !end->failed || (s->running && s->last->fresh_shell);
    if (!s->running) return;
    job *j = s->last;
    if (end->failed && j->req != NULL) { /* no shell could be had: the command has certainly not run */
        guest_req *req = j->req;
        j->req = NULL;
        req->on_close = NULL;
        aio_reply_fault(req, &end->fault);
    }
    j->hint = ENDED_HINT;
    j->oom = end->oom;
    if (end->killed == GUEST_KILL_TIMEOUT) job_end(s, "hard_timeout", 124);
    else if (end->killed != GUEST_KILL_NONE || end->signal != 0 || end->failed) job_end(s, "terminated", end->exit_code);
    else job_end(s, "completed", end->exit_code);
}

/* Gives `j` to the session's shell; false = the request was answered with what went wrong. */
static bool job_start(session *s, job *j)
{
    guest_fault f = { 0 };
    bool ok = guest_token_allows(j->token, &f);
    if (ok && s->shell == NULL) {
        aio_pty_owner owner = { .ctx = s, .output = on_output, .done = on_done, .gone = on_gone };
        s->shell = aio_pty_open(access(s->base.dir, X_OK) == 0 ? s->base.dir : NULL, j->token, &owner, &f);
        j->fresh_shell = s->shell != NULL && s->lost;
        s->lost = s->lost && s->shell == NULL;
        ok = s->shell != NULL;
    }
    if (ok && !aio_pty_run(s->shell, j->command, j->dir, j->logical, j->hard)) {
        guest_fail(&f, 500, "no_memory", 0, "no memory for a command");
        ok = false;
    }
    if (ok) return true;
    guest_req *req = j->req;
    j->req = NULL;
    if (req != NULL) {
        req->on_close = NULL;
        aio_reply_fault(req, &f);
    }
    return false;
}

/* Starts the next command, unless one runs. */
static void pump(session *s)
{
    while (!s->running && s->queue != NULL) {
        job *j = s->queue;
        s->queue = j->next;
        j->next = NULL;
        job *former = s->last;
        s->last = j;
        s->running = true;
        if (job_start(s, j)) {
            job_free(former);
            aio_session_touch(&s->base);
            if (j->req != NULL && j->no_change > 0) guest_timer_in(&j->quiet, j->no_change, on_quiet, j);
        } else {
            s->last = former;
            s->running = false;
            job_free(j);
        }
    }
}

/* ---- sessions ---- */

static void session_end(aio_session *base)
{
    session *s = (session *)base;
    aio_pty_close(s->shell);
    s->shell = NULL;
    if (s->running) {
        s->running = false;
        s->last->status = "terminated";
        job_answer(s->last);
    }
    aio_wait_answer_all(&s->base);
    while (s->queue != NULL) {
        job *j = s->queue;
        s->queue = j->next;
        guest_req *req = j->req;
        j->req = NULL;
        if (req != NULL) {
            req->on_close = NULL;
            aio_reply_fail(req, 404, "Session not found", NULL);
        }
        job_free(j);
    }
    job_free(s->last);
}

static bool idle(const aio_session *base)
{
    const session *s = (const session *)base;
    return !s->running && s->queue == NULL && s->base.waiters == NULL;
}

/* NULL = the request was answered. */
static session *session_new(guest_req *req, const char *id, const char *dir)
{
    session *s = (session *)aio_session_new(req, &plane, guest_conf.max_sessions, id, dir);
    if (s != NULL) s->no_change = NO_CHANGE;
    return s;
}

/* The session of that id, or NULL after a 404. */
static session *need(guest_req *req, const char *id)
{
    return (session *)aio_session_need(req, &plane, id);
}

static bool is_dir(const char *path)
{
    struct stat st;
    return path[0] == '/' && stat(path, &st) == 0 && S_ISDIR(st.st_mode) && access(path, X_OK) == 0;
}

/* ---- routes ---- */

typedef struct exec_args {
    const char *command, *id, *dir;
    bool async, strict, links, truncate;
    double timeout, no_change, hard;
} exec_args;

static const aio_field EXEC[] = {
    { "command", AIO_TEXT, true, offsetof(exec_args, command) },
    { "id", AIO_TEXT, false, offsetof(exec_args, id) },
    { "exec_dir", AIO_TEXT, false, offsetof(exec_args, dir) },
    { "async_mode", AIO_BOOL, false, offsetof(exec_args, async) },
    { "timeout", AIO_SECONDS, false, offsetof(exec_args, timeout) },
    { "strict", AIO_BOOL, false, offsetof(exec_args, strict) },
    { "no_change_timeout", AIO_SECONDS, false, offsetof(exec_args, no_change) },
    { "hard_timeout", AIO_SECONDS, false, offsetof(exec_args, hard) },
    { "preserve_symlinks", AIO_BOOL, false, offsetof(exec_args, links) },
    { "truncate", AIO_BOOL, false, offsetof(exec_args, truncate) },
    AIO_END,
};

static job *job_new(const exec_args *a, session *s)
{
    job *j = calloc(1, sizeof *j);
    if (j == NULL) return NULL;
    aio_buf_init(&j->output, (size_t)guest_conf.max_output);
    j->owner = s;
    j->command = strdup(a->command);
    j->dir = a->dir ? strdup(a->dir) : NULL;
    if (j->command == NULL || (a->dir != NULL && j->dir == NULL)) {
        job_free(j);
        return NULL;
    }
    j->logical = a->links;
    j->truncate = a->truncate;
    j->hard = a->hard > 0 ? a->hard : 0;
    j->no_change = a->no_change >= 0 ? a->no_change : s->no_change;
    j->status = "running";
    return j;
}

void aio_shell_exec(guest_req *req, const char *id)
{
    exec_args a = { .truncate = true, .timeout = -1, .no_change = -1, .hard = -1 };
    json_auto_t *body = aio_fields(req, EXEC, &a);
    (void)id;
    if (body == NULL || !aio_session_id_ok(req, "id", a.id)) return;
    if (a.dir != NULL && !is_dir(a.dir)) {
        if (a.strict) {
            aio_reply_fail(req, 400, "exec_dir is no directory that can be entered", NULL);
            return;
        }
        a.dir = NULL; /* the API's own rule: silently the session's directory */
    }
    session *s = a.id ? need(req, a.id) : session_new(req, NULL, a.dir);
    if (s == NULL) return;
    job *j = job_new(&a, s);
    if (j == NULL) {
        aio_reply_fail(req, 500, "no memory for a command", NULL);
        return;
    }
    size_t waiting = 0;
    job **end = &s->queue;
    for (; *end != NULL; end = &(*end)->next) waiting++;
    if (waiting >= QUEUE_MAX) {
        job_free(j);
        aio_reply_fail(req, 429, "too many commands wait for this session", NULL);
        return;
    }
    *end = j;
    j->token = req->token;
    j->req = req;
    req->ctx = j;
    req->on_close = on_exec_closed;
    if (a.async) {
        job_answer(j);
    } else if (a.timeout >= 0) {
        guest_timer_in(&j->answer, a.timeout, on_answer_due, j);
    }
    pump(s);
}

typedef struct session_args {
    const char *id, *dir, *input;
    bool links, enter;
    double no_change, seconds, max_wait;
} session_args;

static const aio_field BY_ID[] = { { "id", AIO_TEXT, true, offsetof(session_args, id) }, AIO_END };

void aio_shell_view(guest_req *req, const char *id)
{
    session_args a = { 0 };
    json_auto_t *body = aio_fields(req, BY_ID, &a);
    session *s = body ? need(req, a.id) : NULL;
    (void)id;
    if (s == NULL) return;
    json_t *none = json_pack("{s:s, s:s, s:s, s:[]}", "output", "", "session_id", s->base.id, "status", "completed", "console");
    if (s->last != NULL) {
        json_decref(none);
        none = job_json(s->last, TRUNCATE);
    }
    aio_reply_ok(req, none, NULL);
}

void aio_shell_wait(guest_req *req, const char *id)
{
    static const aio_field WAIT[] = {
        { "id", AIO_TEXT, true, offsetof(session_args, id) },
        { "seconds", AIO_SECONDS, false, offsetof(session_args, seconds) },
        { "max_wait_seconds", AIO_SECONDS, false, offsetof(session_args, max_wait) },
        AIO_END,
    };
    session_args a = { .seconds = -1, .max_wait = -1 };
    json_auto_t *body = aio_fields(req, WAIT, &a);
    session *s = body ? need(req, a.id) : NULL;
    (void)id;
    if (s == NULL) return;
    double seconds = a.seconds;
    if (a.max_wait >= 0 && (seconds < 0 || a.max_wait < seconds)) seconds = a.max_wait;
    wait_for_end(s, req, false, seconds);
}

void aio_shell_write(guest_req *req, const char *id)
{
    static const aio_field WRITE[] = {
        { "id", AIO_TEXT, true, offsetof(session_args, id) },
        { "input", AIO_TEXT, true, offsetof(session_args, input) },
        { "press_enter", AIO_BOOL, true, offsetof(session_args, enter) },
        AIO_END,
    };
    session_args a = { 0 };
    json_auto_t *body = aio_fields(req, WRITE, &a);
    session *s = body ? need(req, a.id) : NULL;
    (void)id;
    if (s == NULL) return;
    if (!s->running || s->shell == NULL) {
        aio_reply_fail(req, 200, "no command runs in this session", NULL);
        return;
    }
    size_t len = strlen(a.input);
    bool all = guest_cmd_write(aio_pty_cmd(s->shell), a.input, len) == len;
    if (all && a.enter) all = guest_cmd_write(aio_pty_cmd(s->shell), "\n", 1) == 1;
    if (!all) {
        aio_reply_fail(req, 200, "the command does not read its input: not all of it was taken", NULL);
        return;
    }
    aio_session_touch(&s->base);
    aio_reply_ok(req, json_pack("{s:s}", "status", "running"), NULL);
}

void aio_shell_kill(guest_req *req, const char *id)
{
    session_args a = { 0 };
    json_auto_t *body = aio_fields(req, BY_ID, &a);
    session *s = body ? need(req, a.id) : NULL;
    (void)id;
    if (s == NULL) return;
    if (s->running && s->shell != NULL) guest_cmd_kill(aio_pty_cmd(s->shell), GUEST_KILL_CANCELLED);
    wait_for_end(s, req, true, -1);
}

static const aio_field CREATE[] = {
    { "id", AIO_TEXT, false, offsetof(session_args, id) },
    { "exec_dir", AIO_TEXT, false, offsetof(session_args, dir) },
    { "no_change_timeout", AIO_SECONDS, false, offsetof(session_args, no_change) },
    { "preserve_symlinks", AIO_BOOL, false, offsetof(session_args, links) },
    AIO_END,
};

void aio_shell_create(guest_req *req, const char *id)
{
    session_args a = { .no_change = -1 };
    json_auto_t *body = aio_fields(req, CREATE, &a);
    guest_fault f = { 0 };
    (void)id;
    if (body == NULL || !aio_session_id_ok(req, "id", a.id)) return;
    if (!guest_token_allows(req->token, &f)) {
        aio_reply_fault(req, &f);
        return;
    }
    session *s = a.id ? (session *)aio_session_find(&plane, a.id) : NULL;
    if (s == NULL) s = session_new(req, a.id, a.dir != NULL && is_dir(a.dir) ? a.dir : NULL);
    if (s == NULL) return;
    if (a.no_change >= 0) s->no_change = a.no_change;
    aio_reply_ok(req, json_pack("{s:s, s:o}", "session_id", s->base.id, "working_dir", aio_text(s->base.dir, strlen(s->base.dir))), NULL);
}

void aio_shell_update(guest_req *req, const char *id)
{
    session_args a = { .no_change = -1 };
    json_auto_t *body = aio_fields(req, CREATE, &a);
    (void)id;
    if (body == NULL) return;
    if (a.id == NULL) {
        aio_reply_invalid(req, "id", "Field required");
        return;
    }
    session *s = need(req, a.id);
    if (s == NULL) return;
    if (a.no_change >= 0) s->no_change = a.no_change;
    aio_reply_ok(req, NULL, NULL);
}

void aio_shell_list(guest_req *req, const char *id)
{
    json_t *all = json_object();
    (void)id;
    for (const aio_session *s = plane.first; s != NULL; s = s->next) {
        const session *own = (const session *)s;
        json_t *one = json_pack("{s:o, s:o, s:o, s:f, s:s}", "working_dir", aio_text(s->dir, strlen(s->dir)), "created_at",
                                aio_time(s->created), "last_used_at", aio_time(s->used), "age_seconds", aio_wall() - s->created,
                                "status", idle(s) ? "ready" : "running");
        if (one != NULL && own->running)
            json_object_set_new(one, "current_command", aio_text(own->last->command, strlen(own->last->command)));
        json_object_set_new(all, s->id, one);
    }
    aio_reply_ok(req, json_pack("{s:o}", "sessions", all), NULL);
}

void aio_shell_stats(guest_req *req, const char *id)
{
    json_int_t total = 0, active = 0;
    (void)id;
    for (const aio_session *s = plane.first; s != NULL; s = s->next, total++)
        if (!idle(s) || (double)(guest_now() - s->used_at) < ACTIVE_WITHIN * 1e9) active++;
    json_int_t max = guest_conf.max_sessions;
    aio_reply_ok(req, json_pack("{s:I, s:I, s:I, s:I, s:n, s:f}", "total_sessions", total, "active_sessions", active,
                                "idle_sessions", total - active, "max_sessions", max, "session_timeout", "usage_ratio",
                                max > 0 ? (double)total / (double)max : 1.0), NULL);
}

void aio_shell_delete(guest_req *req, const char *id)
{
    session *s = need(req, id);
    if (s == NULL) return;
    aio_session_free(&plane, &s->base);
    aio_reply_ok(req, NULL, NULL);
}

void aio_shell_delete_all(guest_req *req, const char *id)
{
    (void)id;
    while (plane.first != NULL) aio_session_free(&plane, plane.first);
    aio_reply_ok(req, NULL, NULL);
}
