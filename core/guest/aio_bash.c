/* aio_bash.c -- /v1/bash: each command is a process of its own, with stdout and stderr apart.
 *
 * A session keeps a directory (the last exec_dir), the output of its last command, and an order: one command at a time. It
 * costs no process. Its commands are read by offset (bytes of a stream), while they run and afterwards.
 */
#include "aio_session.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SESSIONS_MAX 256   /* they cost only memory; the one idle longest makes room */
#define QUEUE_MAX 100      /* commands that wait for one session */
#define OUTPUT_DEFAULT 50000

typedef struct session session;

typedef struct job {
    struct job *next;      /* in its session's queue */
    session *owner;
    guest_req *req;        /* NULL = answered, or its client is gone */
    bool wants_input, kill_asked, oom;
    char id[40], *command, *dir;
    char **env;
    double hard;
    uint64_t token;
    size_t max_output;
    guest_timer answer;
    guest_cmd *cmd;        /* while it runs */
    const char *status;    /* pending, running, completed, timed_out, killed */
    bool has_exit;
    int exit_code;
    aio_buf out, err;
} job;

typedef struct waiter { /* an output request that waits for something new */
    aio_waiter base;
    char command[40];      /* the job's id; it may still be in the queue */
    uint64_t from, err_from;
} waiter;

struct session {
    aio_session base;
    json_int_t commands;
    job *last;             /* the running one, or the last that ran; NULL = none ever */
    job *queue;
};

static bool idle(const aio_session *s);
static void session_end(aio_session *s);
static aio_plane plane = { .name = "bash", .size = sizeof(session), .idle = idle, .end = session_end };

static void pump(session *s);

/* ---- jobs ---- */

static void env_free(char **env)
{
    for (char **e = env; e != NULL && *e != NULL; e++) free(*e);
    free(env);
}

static void job_free(job *j)
{
    if (j == NULL) return;
    guest_timer_stop(&j->answer);
    if (j->req != NULL) j->req->on_close = NULL;
    free(j->command);
    free(j->dir);
    env_free(j->env);
    aio_buf_free(&j->out);
    aio_buf_free(&j->err);
    free(j);
}

static bool running(const session *s)
{
    return s->last != NULL && s->last->cmd != NULL;
}

static bool was_cut(const aio_buf *b, size_t max)
{
    return b->total > b->head_len + b->tail_len || (max > 0 && b->total > max);
}

static json_t *job_json(const job *j)
{
    json_t *data = json_pack("{s:s, s:s, s:o, s:s, s:o, s:o, s:I, s:I}", "session_id", j->owner->base.id, "command_id", j->id,
                             "command", aio_text(j->command, strlen(j->command)), "status", j->status, "stdout",
                             aio_buf_json(&j->out, 0, j->max_output), "stderr", aio_buf_json(&j->err, 0, j->max_output),
                             "offset", (json_int_t)j->out.total, "stderr_offset", (json_int_t)j->err.total);
    if (data != NULL && j->has_exit) json_object_set_new(data, "exit_code", json_integer(j->exit_code));
    if (data != NULL && (was_cut(&j->out, j->max_output) || was_cut(&j->err, j->max_output)))
        json_object_set_new(data, "truncated", json_true());
    if (data != NULL && j->oom) json_object_set_new(data, "oom", json_true());
    return data;
}

static guest_req *take_request(job *j)
{
    guest_req *req = j->req;
    guest_timer_stop(&j->answer);
    j->req = NULL;
    if (req != NULL) req->on_close = NULL;
    return req;
}

static void job_answer(job *j)
{
    guest_req *req = take_request(j);
    if (req != NULL) aio_reply_ok(req, job_json(j), NULL);
}

static void on_answer_due(guest_timer *t)
{
    job_answer(t->ctx);
}

static void on_exec_closed(guest_req *req)
{
    job *j = req->ctx;
    j->req = NULL;
    guest_timer_stop(&j->answer);
    for (job **link = &j->owner->queue; *link != NULL; link = &(*link)->next) {
        if (*link != j) continue;
        *link = j->next; /* it never started, and nobody waits for it */
        job_free(j);
        return;
    }
}

/* ---- waiters ---- */

/* The session's command of that id, "" = the current one. NULL = there is none (any more). */
static const job *find(const session *s, const char *id)
{
    if (id[0] == 0 || (s->last != NULL && strcmp(s->last->id, id) == 0)) return s->last;
    const job *j = s->queue;
    while (j != NULL && strcmp(j->id, id) != 0) j = j->next;
    return j;
}

static json_t *output_json(const session *s, const job *j, uint64_t from, uint64_t err_from)
{
    if (j == NULL)
        return json_pack("{s:s, s:s, s:s, s:i, s:i, s:n}", "session_id", s->base.id, "stdout", "", "stderr", "", "offset", 0,
                         "stderr_offset", 0, "command");
    json_t *command = json_pack("{s:s, s:o, s:s}", "command_id", j->id, "command", aio_text(j->command, strlen(j->command)),
                                "status", j->status);
    if (command != NULL && j->has_exit) json_object_set_new(command, "exit_code", json_integer(j->exit_code));
    return json_pack("{s:s, s:o, s:o, s:I, s:I, s:o}", "session_id", s->base.id, "stdout", aio_buf_json(&j->out, from, 0),
                     "stderr", aio_buf_json(&j->err, err_from, 0), "offset", (json_int_t)j->out.total, "stderr_offset",
                     (json_int_t)j->err.total, "command", command);
}

static json_t *waiter_json(const aio_waiter *base)
{
    const waiter *w = (const waiter *)base;
    const session *s = (const session *)base->owner;
    return output_json(s, find(s, w->command), w->from, w->err_from);
}

/* Who waits for `j`: all of them when it has ended, otherwise those to whom its output is new. */
static void waiters_answer(const job *j, bool ended)
{
    for (aio_waiter *base = j->owner->base.waiters, *next; base != NULL; base = next) {
        const waiter *w = (const waiter *)base;
        next = base->next;
        if (strcmp(w->command, j->id) == 0 && (ended || j->out.total > w->from || j->err.total > w->err_from))
            aio_wait_answer(base);
    }
}

/* ---- running ---- */

static void on_output(guest_cmd *cmd, void *ctx, int stream, const char *data, size_t len)
{
    job *j = ctx;
    (void)cmd;
    aio_buf_add(stream == 1 ? &j->out : &j->err, data, len);
    waiters_answer(j, false);
}

/* It certainly never ran. Who was already answered finds the reason in its output. */
static void job_failed(job *j, const guest_fault *f)
{
    j->status = "killed";
    j->has_exit = true;
    j->exit_code = 126;
    aio_buf_add(&j->err, f->message, strlen(f->message));
    guest_req *req = take_request(j);
    if (req != NULL) aio_reply_fault(req, f);
}

static void on_end(guest_cmd *cmd, void *ctx, const guest_cmd_end *end)
{
    job *j = ctx;
    session *s = j->owner;
    (void)cmd;
    j->cmd = NULL;
    j->has_exit = true;
    j->exit_code = end->exit_code;
    j->oom = end->oom;
    aio_session_touch(&s->base);
    if (end->failed) {
        job_failed(j, &end->fault);
    } else if (end->killed == GUEST_KILL_TIMEOUT) {
        j->status = "timed_out";
    } else if (end->killed != GUEST_KILL_NONE || (j->kill_asked && end->signal != 0)) {
        j->status = "killed";
    } else {
        j->status = "completed";
    }
    job_answer(j);
    waiters_answer(j, true);
    pump(s);
}

static bool job_start(session *s, job *j, guest_fault *f)
{
    guest_cmd_spec spec = {
        .text = j->command, .cwd = access(s->base.dir, X_OK) == 0 ? s->base.dir : NULL, .env = (const char *const *)j->env,
        .want_stdin = j->wants_input, .limit = j->hard, .token = j->token, .ctx = j, .on_output = on_output, .on_end = on_end,
    };
    j->status = "running";
    s->commands++;
    aio_session_touch(&s->base);
    return guest_token_allows(j->token, f) && (j->cmd = guest_cmd_start(&spec, f)) != NULL;
}

/* Starts the next command, unless one runs. */
static void pump(session *s)
{
    while (!running(s) && s->queue != NULL) {
        guest_fault f = { 0 };
        job *j = s->queue;
        s->queue = j->next;
        j->next = NULL;
        if (j->dir != NULL) {
            free(s->base.dir);
            s->base.dir = j->dir;
            j->dir = NULL;
        }
        job_free(s->last);
        s->last = j;
        if (job_start(s, j, &f)) continue;
        job_failed(j, &f);
        waiters_answer(j, true);
    }
}

/* ---- sessions ---- */

/* The session of that id, or NULL after a 404. */
static session *need(guest_req *req, const char *id)
{
    return (session *)aio_session_need(req, &plane, id);
}

static void session_end(aio_session *base)
{
    session *s = (session *)base;
    if (running(s)) {
        guest_cmd_abandon(s->last->cmd);
        s->last->cmd = NULL;
        s->last->status = "killed";
        job_answer(s->last);
    }
    for (job *j = s->queue; j != NULL; j = j->next) j->status = "killed"; /* it will never run */
    aio_wait_answer_all(&s->base);
    while (s->queue != NULL) {
        job *j = s->queue;
        s->queue = j->next;
        guest_req *req = take_request(j);
        if (req != NULL) aio_reply_fail(req, 404, "Session not found", NULL);
        job_free(j);
    }
    job_free(s->last);
}

static bool idle(const aio_session *base)
{
    const session *s = (const session *)base;
    return !running(s) && s->queue == NULL && s->base.waiters == NULL;
}

static json_t *session_json(const session *s)
{
    json_t *one = json_pack("{s:s, s:s, s:o, s:o, s:o, s:I}", "session_id", s->base.id, "status", "ready", "working_dir",
                            aio_text(s->base.dir, strlen(s->base.dir)), "created_at", aio_time(s->base.created), "last_used_at",
                            aio_time(s->base.used), "command_count", s->commands);
    if (one != NULL && running(s))
        json_object_set_new(one, "current_command", aio_text(s->last->command, strlen(s->last->command)));
    return one;
}

/* ---- routes ---- */

typedef struct args {
    const char *session, *command, *command_id, *dir, *input, *signal;
    json_t *env;
    bool async, wait;
    double timeout, hard, wait_timeout;
    int64_t max_output, offset, err_offset;
} args;

static const aio_field EXEC[] = {
    { "command", AIO_TEXT, true, offsetof(args, command) },
    { "session_id", AIO_TEXT, false, offsetof(args, session) },
    { "exec_dir", AIO_TEXT, false, offsetof(args, dir) },
    { "env", AIO_MAP, false, offsetof(args, env) },
    { "async_mode", AIO_BOOL, false, offsetof(args, async) },
    { "timeout", AIO_SECONDS, false, offsetof(args, timeout) },
    { "hard_timeout", AIO_SECONDS, false, offsetof(args, hard) },
    { "max_output_length", AIO_COUNT, false, offsetof(args, max_output) },
    AIO_END,
};

/* NAME=value strings; NULL and `wrong` set when a name is none. */
static char **env_of(const json_t *map, const char **wrong)
{
    size_t n = 0;
    const char *name;
    json_t *value;
    char **env = calloc(json_object_size(map) + 1, sizeof *env);
    *wrong = env == NULL ? "no memory" : NULL;
    json_object_foreach((json_t *)(uintptr_t)map, name, value)
    {
        if (*wrong != NULL) break;
        if (asprintf(&env[n], "%s=%s", name, json_string_value(value)) < 0) {
            env[n] = NULL;
            *wrong = "no memory";
        } else if (strchr(name, '=') != NULL || !guest_env_name_ok(env[n++])) {
            *wrong = "holds a name that is no variable name";
        }
    }
    if (*wrong == NULL) return env;
    env_free(env);
    return NULL;
}

static job *job_new(const args *a, session *s, char **env)
{
    job *j = calloc(1, sizeof *j);
    if (j == NULL) return NULL;
    j->owner = s;
    j->command = strdup(a->command);
    j->dir = a->dir ? strdup(a->dir) : NULL;
    if (j->command == NULL || (a->dir != NULL && j->dir == NULL)) {
        job_free(j);
        return NULL;
    }
    aio_buf_init(&j->out, (size_t)guest_conf.max_output);
    aio_buf_init(&j->err, (size_t)guest_conf.max_output);
    aio_new_id(j->id);
    j->env = env;
    j->hard = a->hard > 0 ? a->hard : 0;
    j->max_output = (size_t)a->max_output;
    /* Only who can still reach the command while it runs can write to it; for all others its input ends at once. */
    j->wants_input = a->async || a->timeout >= 0;
    j->status = "pending";
    return j;
}

/* Puts j at the end of its session's queue; false = that is too long. */
static bool enqueue(session *s, job *j)
{
    size_t waiting = 0;
    job **end = &s->queue;
    for (; *end != NULL; end = &(*end)->next) waiting++;
    if (waiting >= QUEUE_MAX) return false;
    *end = j;
    return true;
}

void aio_bash_exec(guest_req *req, const char *id)
{
    args a = { .timeout = -1, .hard = -1, .max_output = OUTPUT_DEFAULT };
    json_auto_t *body = aio_fields(req, EXEC, &a);
    const char *wrong = NULL;
    (void)id;
    if (body == NULL) return;
    char **env = a.env ? env_of(a.env, &wrong) : NULL;
    if (wrong != NULL) {
        aio_reply_invalid(req, "env", wrong);
        return;
    }
    struct stat st;
    if (a.dir != NULL && (a.dir[0] != '/' || stat(a.dir, &st) < 0 || !S_ISDIR(st.st_mode))) {
        env_free(env);
        aio_reply_fail(req, 400, "exec_dir is no directory", NULL);
        return;
    }
    session *s = a.session ? need(req, a.session) : (session *)aio_session_new(req, &plane, SESSIONS_MAX, NULL, NULL);
    job *j = s ? job_new(&a, s, env) : NULL;
    if (j == NULL || !enqueue(s, j)) {
        if (j == NULL) env_free(env);
        job_free(j);
        if (s != NULL) aio_reply_fail(req, j ? 429 : 500, j ? "too many commands wait for this session" : "no memory", NULL);
        return;
    }
    j->token = req->token;
    j->req = req;
    req->ctx = j;
    req->on_close = on_exec_closed;
    if (a.async) {
        j->status = "running";
        job_answer(j);
    } else if (a.timeout >= 0) {
        guest_timer_in(&j->answer, a.timeout, on_answer_due, j);
    }
    pump(s);
}

void aio_bash_output(guest_req *req, const char *id)
{
    static const aio_field OUTPUT[] = {
        { "session_id", AIO_TEXT, true, offsetof(args, session) },
        { "command_id", AIO_TEXT, false, offsetof(args, command_id) },
        { "offset", AIO_COUNT, false, offsetof(args, offset) },
        { "stderr_offset", AIO_COUNT, false, offsetof(args, err_offset) },
        { "wait", AIO_BOOL, false, offsetof(args, wait) },
        { "wait_timeout", AIO_SECONDS, false, offsetof(args, wait_timeout) },
        AIO_END,
    };
    args a = { .wait_timeout = 30 };
    json_auto_t *body = aio_fields(req, OUTPUT, &a);
    session *s = body ? need(req, a.session) : NULL;
    (void)id;
    if (s == NULL) return;
    const job *j = find(s, a.command_id ? a.command_id : "");
    if (a.command_id != NULL && j == NULL) {
        aio_reply_fail(req, 404, "Command not found", NULL);
        return;
    }
    bool news = j != NULL && (j->out.total > (uint64_t)a.offset || j->err.total > (uint64_t)a.err_offset);
    bool to_come = j != NULL && (j != s->last || running(s)); /* one in the queue is waited for like one that runs */
    if (!a.wait || news || !to_come) {
        aio_reply_ok(req, output_json(s, j, (uint64_t)a.offset, (uint64_t)a.err_offset), NULL);
        return;
    }
    waiter *w = (waiter *)aio_wait(req, &s->base, sizeof *w, waiter_json);
    if (w == NULL) return;
    snprintf(w->command, sizeof w->command, "%s", j->id);
    w->from = (uint64_t)a.offset;
    w->err_from = (uint64_t)a.err_offset;
    aio_wait_limit(&w->base, a.wait_timeout);
}

void aio_bash_write(guest_req *req, const char *id)
{
    static const aio_field WRITE[] = {
        { "session_id", AIO_TEXT, true, offsetof(args, session) },
        { "command_id", AIO_TEXT, false, offsetof(args, command_id) },
        { "input", AIO_TEXT, true, offsetof(args, input) },
        AIO_END,
    };
    args a = { 0 };
    json_auto_t *body = aio_fields(req, WRITE, &a);
    session *s = body ? need(req, a.session) : NULL;
    (void)id;
    if (s == NULL) return;
    const char *problem = NULL;
    if (!running(s) || (a.command_id != NULL && strcmp(a.command_id, s->last->id) != 0)) problem = "the command does not run";
    else if (!s->last->wants_input) problem = "this command was started without an input (async_mode or timeout give it one)";
    else if (guest_cmd_write(s->last->cmd, a.input, strlen(a.input)) != strlen(a.input))
        problem = "the command does not read its input: not all of it was taken";
    if (problem != NULL) aio_reply_fail(req, 200, problem, NULL);
    else aio_reply_ok(req, NULL, NULL);
}

void aio_bash_kill(guest_req *req, const char *id)
{
    static const aio_field KILL[] = {
        { "session_id", AIO_TEXT, true, offsetof(args, session) },
        { "signal", AIO_TEXT, false, offsetof(args, signal) },
        AIO_END,
    };
    static const struct { const char *name; int sig; } SIGNALS[] = { { "SIGTERM", SIGTERM }, { "SIGKILL", SIGKILL },
                                                                     { "SIGINT", SIGINT } };
    args a = { .signal = "SIGTERM" };
    json_auto_t *body = aio_fields(req, KILL, &a);
    session *s = body ? need(req, a.session) : NULL;
    int sig = 0;
    (void)id;
    if (s == NULL) return;
    for (size_t i = 0; i < sizeof SIGNALS / sizeof *SIGNALS; i++)
        if (strcmp(a.signal, SIGNALS[i].name) == 0) sig = SIGNALS[i].sig;
    if (sig == 0) {
        aio_reply_invalid(req, "signal", "must be SIGTERM, SIGKILL or SIGINT");
        return;
    }
    if (running(s)) {
        s->last->kill_asked = true;
        if (sig == SIGKILL) guest_cmd_kill(s->last->cmd, GUEST_KILL_CANCELLED);
        else guest_cmd_signal(s->last->cmd, sig);
    }
    aio_reply_ok(req, NULL, NULL);
}

void aio_bash_list(guest_req *req, const char *id)
{
    json_t *all = json_array();
    (void)id;
    for (const aio_session *s = plane.first; s != NULL; s = s->next) json_array_append_new(all, session_json((const session *)s));
    aio_reply_ok(req, all, NULL);
}

void aio_bash_create(guest_req *req, const char *id)
{
    static const aio_field CREATE[] = {
        { "session_id", AIO_TEXT, false, offsetof(args, session) },
        { "exec_dir", AIO_TEXT, false, offsetof(args, dir) },
        AIO_END,
    };
    args a = { 0 };
    json_auto_t *body = aio_fields(req, CREATE, &a);
    guest_fault f = { 0 };
    (void)id;
    if (body == NULL || !aio_session_id_ok(req, "session_id", a.session)) return;
    if (!guest_token_allows(req->token, &f)) {
        aio_reply_fault(req, &f);
        return;
    }
    aio_session *s = a.session ? aio_session_find(&plane, a.session) : NULL;
    if (s == NULL) s = aio_session_new(req, &plane, SESSIONS_MAX, a.session, NULL);
    if (s == NULL) return;
    if (a.dir != NULL && a.dir[0] == '/' && access(a.dir, X_OK) == 0) aio_session_go(s, a.dir);
    aio_reply_ok(req, session_json((const session *)s), NULL);
}

void aio_bash_close(guest_req *req, const char *id)
{
    session *s = need(req, id);
    if (s == NULL) return;
    aio_session_free(&plane, &s->base);
    aio_reply_ok(req, NULL, NULL);
}
