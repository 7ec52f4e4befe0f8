/* run.c -- POST /v1/paddock/exec: frames in, a command (or a session's turn), frames out.
 * Who owns a run: its request until the command starts, then the command (or the session), which ends it by guest_run_finish
 * or guest_run_fail. A client that goes away takes its command with it: nobody would ever read its outcome. */
#include "priv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEAD_LIMIT (4u << 20) /* all frames before standard input */
#define ENV_LIMIT  1000
#define FRAME_MAX  65536

static char frame[8 + FRAME_MAX]; /* one output frame; only the pages that output fills are ever touched */

static guest_run *named; /* the newest run that has a name */

static void run_name(guest_run *run, const char *name)
{
    if (name == NULL || strlen(name) >= sizeof run->name)
        return;
    memcpy(run->name, name, strlen(name) + 1);
    run->older = named;
    if (named != NULL)
        named->newer = run;
    named = run;
}

static void run_free(guest_run *run)
{
    if (run->newer != NULL)
        run->newer->older = run->older;
    else if (named == run)
        named = run->older;
    if (run->older != NULL)
        run->older->newer = run->newer;
    for (size_t i = 0; i < run->env_n; i++)
        free(run->env[i]);
    free(run->env);
    free(run->head);
    free(run->text);
    free(run->cwd);
    free(run->session);
    free(run->early);
    free(run);
}

/* ---- output ---- */

static bool frame_send(guest_run *run, int stream, const void *data, size_t len)
{
    memset(frame, 0, 4);
    frame[0] = (char)stream;
    for (int i = 0; i < 4; i++)
        frame[4 + i] = (char)(len >> (24 - 8 * i));
    memcpy(frame + 8, data, len);
    return guest_send(run->req, frame, 8 + len);
}

bool guest_run_output(guest_run *run, int stream, const char *data, size_t len)
{
    uint64_t *kept = &run->kept[stream - 1];
    if (run->req == NULL)
        return true;
    guest_run_started(run);
    if (len > run->max - *kept) {
        run->truncated = true;
        len = (size_t)(run->max - *kept);
    }
    *kept += len;
    bool room = true;
    for (size_t n; len > 0; data += n, len -= n) {
        n = len < FRAME_MAX ? len : FRAME_MAX;
        room = frame_send(run, stream, data, n);
    }
    return room;
}

void guest_run_started(guest_run *run)
{
    if (run->started)
        return;
    run->started = true;
    if (run->req != NULL)
        guest_reply_begin(run->req, 200, "application/vnd.docker.raw-stream");
}

static const char *outcome_of(const guest_cmd_end *end)
{
    if (end->killed == GUEST_KILL_TIMEOUT)
        return "hard_timeout";
    if (end->killed != GUEST_KILL_NONE)
        return "cancelled";
    if (end->oom)
        return "oom";
    return end->signal != 0 ? "signalled" : "completed";
}

void guest_run_finish(guest_run *run, const guest_cmd_end *end, bool session_reset)
{
    if (end->failed && !run->started) {
        guest_run_fail(run, &end->fault);
        return;
    }
    guest_run_started(run);
    if (run->req != NULL) {
        json_t *last = json_pack("{s:s, s:i, s:i, s:b, s:f, s:b}", "outcome", outcome_of(end), "exit_code", end->exit_code,
                                 "signal", end->signal, "truncated", run->truncated, "duration", end->duration,
                                 "session_reset", session_reset);
        const char *error = end->leftover ? "leftover_processes" : end->killed == GUEST_KILL_FENCED ? "stale_token" : NULL;
        if (last != NULL && error != NULL)
            json_object_set_new(last, "error", json_string(error));
        char *text = last != NULL ? json_dumps(last, JSON_COMPACT) : NULL;
        json_decref(last);
        if (text != NULL) /* without it the stream just ends, which a client reads as unknown */
            frame_send(run, 3, text, strlen(text));
        free(text);
        run->req->ctx = NULL;
        guest_reply_end(run->req);
    }
    run_free(run);
}

void guest_run_fail(guest_run *run, const guest_fault *f)
{
    if (run->req != NULL) {
        run->req->ctx = NULL;
        guest_reply_fault(run->req, f);
    }
    run_free(run);
}

/* ---- a command of its own (no session) ---- */

static void on_output(guest_cmd *cmd, void *ctx, int stream, const char *data, size_t len)
{
    if (!guest_run_output(ctx, stream, data, len)) {
        guest_cmd_pause(cmd, 1, true);
        guest_cmd_pause(cmd, 2, true);
    }
}

static void on_start(guest_cmd *cmd, void *ctx)
{
    (void)cmd;
    guest_run_started(ctx);
}

static void on_cmd_end(guest_cmd *cmd, void *ctx, const guest_cmd_end *end)
{
    (void)cmd;
    guest_run_finish(ctx, end, false);
}

static void on_stdin_room(guest_cmd *cmd, void *ctx)
{
    (void)cmd;
    guest_run_stdin_room(ctx);
}

static int run_command(guest_run *run, guest_fault *f)
{
    guest_cmd_spec spec = {
        .text = run->text,
        .cwd = run->cwd,
        .env = (const char *const *)run->env,
        .want_stdin = run->in_stdin,
        .limit = run->limit,
        .token = run->token,
        .ctx = run,
        .on_output = on_output,
        .on_start = on_start,
        .on_end = on_cmd_end,
        .on_stdin_room = on_stdin_room,
    };
    run->cmd = guest_cmd_start(&spec, f);
    return run->cmd != NULL ? 0 : -1;
}

/* ---- standard input ---- */

static size_t stdin_give(guest_run *run, const char *data, size_t len)
{
    if (run->cmd != NULL)
        return guest_cmd_write(run->cmd, data, len);
    return run->on != NULL ? guest_session_stdin(run, data, len) : 0;
}

static void stdin_end(guest_run *run)
{
    if (run->cmd != NULL)
        guest_cmd_close_stdin(run->cmd);
    else if (run->on != NULL)
        guest_session_stdin_end(run);
}

static void stdin_take(guest_run *run, const char *data, size_t len)
{
    size_t n = run->early_len == 0 ? stdin_give(run, data, len) : 0;
    if (n == len)
        return;
    size_t need = run->early_len + len - n;
    char *grown = need > run->early_cap ? realloc(run->early, need) : run->early;
    if (grown == NULL)
        return; /* cannot be: at most one read's worth waits; the command then sees a shorter input */
    run->early = grown;
    run->early_cap = need > run->early_cap ? need : run->early_cap;
    memcpy(run->early + run->early_len, data + n, len - n);
    run->early_len = need;
    guest_body_pause(run->req, true);
}

void guest_run_stdin_room(guest_run *run)
{
    if (run->early_len > 0) {
        size_t n = stdin_give(run, run->early, run->early_len);
        run->early_len -= n;
        memmove(run->early, run->early + n, run->early_len);
    }
    if (run->early_len > 0)
        return;
    if (run->body_done)
        stdin_end(run);
    else if (run->req != NULL)
        guest_body_pause(run->req, false);
}

/* ---- the request ---- */

static char *text_dup(const char *data, size_t len, const char *what, guest_fault *f)
{
    char *copy = memchr(data, '\0', len) == NULL ? malloc(len + 1) : NULL;
    if (copy == NULL) {
        guest_fail(f, 422, "invalid_argument", 0, "the %s holds a NUL byte, or there is no memory for it", what);
        return NULL;
    }
    memcpy(copy, data, len);
    copy[len] = '\0';
    return copy;
}

static int text_set(char **out, const char *data, size_t len, const char *what, guest_fault *f)
{
    if (*out != NULL)
        return guest_fail(f, 422, "invalid_argument", 0, "the %s is given twice", what);
    return (*out = text_dup(data, len, what, f)) != NULL ? 0 : -1;
}

static int env_add(guest_run *run, const char *data, size_t len, guest_fault *f)
{
    char *entry = text_dup(data, len, "environment", f);
    if (entry == NULL)
        return -1;
    char **grown = run->env_n < ENV_LIMIT ? realloc(run->env, (run->env_n + 2) * sizeof *grown) : NULL;
    if (grown == NULL || !guest_env_name_ok(entry)) {
        run->env = grown != NULL ? grown : run->env;
        free(entry);
        return guest_fail(f, 422, "invalid_argument", 0, "an environment entry has no valid name, or there are too many");
    }
    run->env = grown;
    run->env[run->env_n++] = entry;
    run->env[run->env_n] = NULL;
    return 0;
}

static int number(const char *data, size_t len, char text[32], guest_fault *f)
{
    if (len < 1 || len > 31)
        return guest_fail(f, 422, "invalid_argument", 0, "a number is empty or too long");
    memcpy(text, data, len);
    text[len] = '\0';
    return 0;
}

static int frame_take(guest_run *run, char type, const char *data, size_t len, guest_fault *f)
{
    char text[32], *end;
    switch (type) {
    case 'c': return text_set(&run->text, data, len, "command", f);
    case 'd':
        if (len == 0 || data[0] != '/')
            return guest_fail(f, 422, "invalid_cwd", 0, "the working directory is no absolute path");
        return text_set(&run->cwd, data, len, "working directory", f);
    case 's': return text_set(&run->session, data, len, "session", f);
    case 'e': return env_add(run, data, len, f);
    case 't':
        if (number(data, len, text, f) < 0)
            return -1;
        run->limit = strtod(text, &end);
        if (*end != '\0' || strspn(text, "0123456789.") != len || !(run->limit > 0 && run->limit <= 1e9))
            return guest_fail(f, 422, "invalid_argument", 0, "the time limit %s is no number of seconds above 0", text);
        return 0;
    case 'm':
        if (number(data, len, text, f) < 0)
            return -1;
        if (!guest_parse_u64(text, &run->max))
            return guest_fail(f, 422, "invalid_argument", 0, "the output limit %s is no number", text);
        return 0;
    default: return guest_fail(f, 422, "invalid_argument", 0, "unknown frame type %d", (unsigned char)type);
    }
}

/* Works through the complete frames at the start of `head`; the rest stays. 0, or -1. */
static int head_parse(guest_run *run, guest_fault *f)
{
    size_t at = 0;
    while (!run->in_stdin && run->head_len - at >= 5) {
        const unsigned char *h = (const unsigned char *)run->head + at;
        size_t len = (size_t)h[1] << 24 | (size_t)h[2] << 16 | (size_t)h[3] << 8 | h[4];
        if (len > HEAD_LIMIT)
            return guest_fail(f, 413, "too_large", 0, "a frame of %zu bytes is larger than this call takes", len);
        if (h[0] == '0' && len == 0) {
            run->in_stdin = true;
        } else {
            if (run->head_len - at < 5 + len)
                break;
            if (frame_take(run, (char)h[0], run->head + at + 5, len, f) < 0)
                return -1;
        }
        at += 5 + len;
    }
    run->head_len -= at;
    memmove(run->head, run->head + at, run->head_len);
    return 0;
}

static void refuse(guest_req *req, const guest_fault *f)
{
    guest_run_fail(req->ctx, f); /* ends the request too: later body bytes come to nobody */
}

static void kill_run(guest_run *run)
{
    if (run->cmd != NULL) {
        guest_cmd_pause(run->cmd, 1, false);
        guest_cmd_pause(run->cmd, 2, false);
        guest_cmd_kill(run->cmd, GUEST_KILL_CANCELLED);
    } else {
        guest_session_cancel(run);
    }
}

bool guest_run_cancel(const char *name)
{
    for (guest_run *run = named; run != NULL; run = run->older)
        if (strcmp(run->name, name) == 0) {
            if (run->cmd != NULL || run->on != NULL)
                kill_run(run); /* frees it, when it still waits for its session */
            else
                run->cancelled = true;
            return true;
        }
    return false;
}

/* The head is complete. From here on the run belongs to what runs it. */
static void launch(guest_req *req)
{
    guest_run *run = req->ctx;
    guest_fault f;
    if (run->cancelled) {
        guest_fail(&f, 409, "cancelled", 0, "it was cancelled before it began");
        refuse(req, &f);
        return;
    }
    if (run->text == NULL) {
        guest_fail(&f, 422, "invalid_argument", 0, "there is no command");
        refuse(req, &f);
        return;
    }
    if ((run->session != NULL ? guest_session_submit(run, &f) : run_command(run, &f)) < 0)
        refuse(req, &f);
}

static void on_body(guest_req *req, const char *data, size_t len)
{
    guest_run *run = req->ctx;
    guest_fault f;
    if (run->in_stdin) {
        stdin_take(run, data, len);
        return;
    }
    size_t need = run->head_len + len;
    if (need > run->head_cap) {
        size_t cap = need < 512 ? 512 : need * 2;
        char *grown = need <= HEAD_LIMIT ? realloc(run->head, cap) : NULL;
        if (grown == NULL) {
            guest_fail(&f, 413, "too_large", 0, "command and environment are larger than this call takes");
            refuse(req, &f);
            return;
        }
        run->head = grown;
        run->head_cap = cap;
    }
    memcpy(run->head + run->head_len, data, len);
    run->head_len = need;
    if (head_parse(run, &f) < 0) {
        refuse(req, &f);
        return;
    }
    if (!run->in_stdin)
        return;
    char *rest = run->head; /* standard input has begun in this very piece */
    size_t rest_len = run->head_len;
    run->head = NULL;
    run->head_len = run->head_cap = 0;
    launch(req);
    if (req->ctx != NULL && rest_len > 0)
        stdin_take(req->ctx, rest, rest_len);
    free(rest);
}

static void on_body_end(guest_req *req)
{
    guest_run *run = req->ctx;
    guest_fault f;
    if (run->head_len > 0) {
        guest_fail(&f, 422, "invalid_argument", 0, "the body ends inside a frame");
        refuse(req, &f);
        return;
    }
    run->body_done = true;
    if (!run->in_stdin)
        launch(req);
    else if (run->early_len == 0)
        stdin_end(run);
}

static void on_close(guest_req *req)
{
    guest_run *run = req->ctx;
    run->req = NULL;
    run->early_len = 0;
    if (run->cmd != NULL || run->on != NULL)
        kill_run(run);
    else
        run_free(run); /* it had not started */
}

static void on_drain(guest_req *req)
{
    guest_run *run = req->ctx;
    if (run->cmd != NULL) {
        guest_cmd_pause(run->cmd, 1, false);
        guest_cmd_pause(run->cmd, 2, false);
    } else if (run->on != NULL) {
        guest_session_paused(run, false);
    }
}

void guest_run_begin(guest_req *req)
{
    guest_run *run = calloc(1, sizeof *run);
    if (run == NULL) {
        guest_fault f;
        guest_fail(&f, 503, "no_memory", ENOMEM, "no memory for a command");
        guest_reply_fault(req, &f);
        return;
    }
    run->req = req;
    run_name(run, guest_header(req, "X-Paddock-Command"));
    run->token = req->token;
    run->limit = GUEST_COMMAND_LIMIT;
    run->max = guest_conf.max_output;
    req->ctx = run;
    req->body_max = UINT64_MAX;
    req->on_body = on_body;
    req->on_end = on_body_end;
    req->on_close = on_close;
    req->on_drain = on_drain;
}
