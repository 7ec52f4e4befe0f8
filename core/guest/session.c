/* session.c -- shell sessions of paddock's own plane: one long-lived shell each, one command at a time.
 * The shell reads a script from a private pipe on its descriptor 0 and reports on descriptor 3; both are hidden while a
 * command's text is evaluated. Each command gets fresh fifos for its streams: a background process of an earlier command
 * keeps its own, so its output never shows up in a later result. The fifos lose their names as soon as the shell says "b"
 * (begun); "s N STATUS" ends a turn. A shell that ends (exit, exec, kill, time limit) ends its turn with its own status, and
 * the next turn gets a new shell and says session_reset.
 * True at all times: a session that is closing takes no runs; `current` is set exactly while turn.out may be open. */
#include "priv.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define GRACE  0.05
#define ID_MAX 128

typedef struct turn {
    guest_run *run;
    unsigned n;
    bool begun, ended, in_close, reset;
    guest_cmd_end end;
    guest_watch out[2], in;
    int64_t started;
    uint64_t oom_before;
    guest_timer grace;
} turn;

typedef struct guest_session {
    struct guest_session *next;
    char id[ID_MAX + 1];
    bool closing, had_shell, busy;
    guest_cmd *shell;
    guest_run *queue;
    turn t; /* t.run != NULL: a command is running */
    unsigned count;
    guest_watch status;
    char line[64]; /* of the status pipe, incomplete */
    size_t line_len;
    char *script; /* not yet taken by the shell's input */
    size_t script_at, script_len;
    char dir[64]; /* of the fifos; "" = none */
} guest_session;

typedef struct drain { /* the output of what a finished command left behind */
    guest_watch w;
} drain;

static guest_session *sessions;
static char sink[4096];
static char chunk[65536];

static void session_next(guest_session *s);
static void turn_try_end(guest_session *s);

/* ---- fifos ---- */

static void fifo_path(const guest_session *s, char kind, char path[96])
{
    snprintf(path, 96, "%s/%c%u", s->dir, kind, s->t.n);
}

static void fifo_unlink_all(guest_session *s)
{
    char path[96];
    for (const char *kind = "oei"; *kind != '\0' && s->dir[0] != '\0'; kind++) {
        fifo_path(s, *kind, path);
        unlink(path);
    }
}

static int dir_make(guest_session *s, guest_fault *f)
{
    static const char *const PLACES[] = { "/tmp", "/dev/shm", "/var/tmp", "/run" };
    for (size_t i = 0; i < sizeof PLACES / sizeof PLACES[0]; i++) {
        snprintf(s->dir, sizeof s->dir, "%s/.paddock-XXXXXX", PLACES[i]);
        if (mkdtemp(s->dir) != NULL)
            return 0;
    }
    s->dir[0] = '\0';
    return guest_fail(f, 507, "no_space", errno, "no place for a session's pipes: %s", strerror(errno));
}

static void dir_drop(guest_session *s)
{
    if (s->dir[0] == '\0')
        return;
    fifo_unlink_all(s);
    rmdir(s->dir);
    s->dir[0] = '\0';
}

static void on_drain_readable(guest_watch *w, uint32_t events)
{
    (void)events;
    ssize_t n = read(w->fd, sink, sizeof sink);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    guest_watch_close(w);
    free(w->ctx);
}

/* A background process writes on: its output is dropped, but its pipe neither fills nor breaks. */
static void drain_take(guest_watch *w)
{
    int fd = w->fd;
    guest_watch_drop(w);
    w->fd = -1;
    drain *d = fd >= 0 ? calloc(1, sizeof *d) : NULL;
    if (d == NULL) {
        if (fd >= 0)
            close(fd);
        return;
    }
    d->w = (guest_watch){ .fd = fd, .fn = on_drain_readable, .ctx = d };
    if (guest_watch_set(&d->w, EPOLLIN) < 0)
        on_drain_readable(&d->w, 0);
}

/* ---- output of the turn ---- */

static size_t out_read(guest_session *s, int i, size_t max)
{
    guest_watch *w = &s->t.out[i];
    ssize_t n = read(w->fd, chunk, max < sizeof chunk ? max : sizeof chunk);
    if (n > 0) {
        if (!guest_run_output(s->t.run, i + 1, chunk, (size_t)n))
            guest_session_paused(s->t.run, true);
        return (size_t)n;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        guest_watch_close(w);
    return 0;
}

static void out_drain(guest_session *s)
{
    for (int i = 0; i < 2; i++) {
        int left = 0;
        if (s->t.out[i].fd < 0 || ioctl(s->t.out[i].fd, FIONREAD, &left) < 0)
            continue;
        for (size_t n = 1; left > 0 && n > 0; left -= (int)n)
            n = out_read(s, i, (size_t)left);
        if (s->t.out[i].fd >= 0)
            out_read(s, i, 1);
    }
}

static void on_out(guest_watch *w, uint32_t events)
{
    (void)events;
    guest_session *s = w->ctx;
    out_read(s, w == &s->t.out[1], sizeof chunk);
    turn_try_end(s);
}

void guest_session_paused(guest_run *run, bool paused)
{
    guest_session *s = run->on;
    if (s->t.run != run)
        return;
    for (int i = 0; i < 2; i++) {
        if (s->t.out[i].fd >= 0 && paused)
            guest_watch_drop(&s->t.out[i]);
        else if (s->t.out[i].fd >= 0)
            guest_watch_set(&s->t.out[i], EPOLLIN);
    }
}

/* ---- input of the turn ---- */

static void on_in(guest_watch *w, uint32_t events)
{
    (void)events;
    guest_session *s = w->ctx;
    guest_watch_drop(w);
    guest_run_stdin_room(s->t.run);
}

size_t guest_session_stdin(guest_run *run, const char *data, size_t len)
{
    guest_session *s = run->on;
    if (s->t.run != run)
        return 0; /* it waits for its turn */
    if (s->t.in.fd < 0)
        return len;
    ssize_t n = write(s->t.in.fd, data, len);
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
        guest_watch_close(&s->t.in); /* nobody reads it any more */
        return len;
    }
    if (n < (ssize_t)len)
        guest_watch_set(&s->t.in, EPOLLOUT);
    return n > 0 ? (size_t)n : 0;
}

void guest_session_stdin_end(guest_run *run)
{
    guest_session *s = run->on;
    if (s->t.run != run)
        return;
    s->t.in_close = true;
    if (s->t.begun)
        guest_watch_close(&s->t.in);
}

/* The shell has the fifo open: our side becomes a pure writer, so that a command that stops reading is noticed. */
static void in_begun(guest_session *s)
{
    char path[96];
    fifo_path(s, 'i', path);
    if (s->t.in.fd < 0)
        return;
    int fd = s->t.in_close ? -1 : open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    guest_watch_close(&s->t.in);
    s->t.in.fd = fd;
    guest_run_stdin_room(s->t.run);
}

/* ---- the end of a turn ---- */

static void turn_finish(guest_session *s)
{
    guest_run *run = s->t.run;
    fifo_unlink_all(s);
    guest_timer_stop(&s->t.grace);
    guest_watch_close(&s->t.in);
    drain_take(&s->t.out[0]);
    drain_take(&s->t.out[1]);
    s->t.run = NULL;
    s->t.end.duration = (double)(guest_now() - s->t.started) / 1e9;
    if (s->shell != NULL)
        guest_cmd_set_background(s->shell, true);
    else if (!s->busy)
        dir_drop(s);
    guest_run_finish(run, &s->t.end, s->t.reset);
    session_next(s);
}

static void turn_try_end(guest_session *s)
{
    if (s->t.run != NULL && s->t.ended && s->t.out[0].fd < 0 && s->t.out[1].fd < 0)
        turn_finish(s);
}

static void on_grace(guest_timer *t)
{
    turn_finish(t->ctx);
}

static void turn_ended(guest_session *s, const guest_cmd_end *end)
{
    if (s->t.run == NULL || s->t.ended)
        return;
    s->t.ended = true;
    s->t.end = *end;
    out_drain(s);
    guest_timer_in(&s->t.grace, GRACE, on_grace, s);
    turn_try_end(s);
}

static void on_status_line(guest_session *s, const char *line)
{
    unsigned n;
    int code;
    if (s->t.run == NULL || s->t.ended)
        return;
    if (sscanf(line, "b%u", &n) == 1 && n == s->t.n && !s->t.begun) {
        s->t.begun = true;
        guest_run_started(s->t.run);
        in_begun(s);
        fifo_unlink_all(s);
    } else if (sscanf(line, "s%u %d", &n, &code) == 2 && n == s->t.n) {
        guest_cmd_end end = { .exit_code = code };
        if (code == 137)
            end.oom = guest_oom_kills() > s->t.oom_before;
        if (!s->t.begun) { /* its pipes' names were taken away: it cannot go on like that */
            end.failed = true;
            guest_fail(&end.fault, 503, "session_broken", 0, "the session's pipes were removed; it starts afresh");
            if (s->shell != NULL)
                guest_cmd_kill(s->shell, GUEST_KILL_CANCELLED);
        } else if (s->shell != NULL) {
            guest_cmd_limit(s->shell, 0);
        }
        turn_ended(s, &end);
    }
}

static void status_read(guest_session *s)
{
    for (char ch; s->status.fd >= 0;) {
        ssize_t n = read(s->status.fd, &ch, 1);
        if (n == 0)
            guest_watch_close(&s->status);
        if (n != 1)
            return;
        if (ch != '\n') {
            if (s->line_len < sizeof s->line - 1)
                s->line[s->line_len++] = ch;
            continue;
        }
        s->line[s->line_len] = '\0';
        s->line_len = 0;
        on_status_line(s, s->line);
    }
}

static void on_status(guest_watch *w, uint32_t events)
{
    (void)events;
    status_read(w->ctx);
}

/* ---- the shell ---- */

static void session_free(guest_session *s)
{
    for (guest_session **at = &sessions; *at != NULL; at = &(*at)->next)
        if (*at == s) {
            *at = s->next;
            break;
        }
    dir_drop(s);
    free(s);
}

static void script_pump(guest_session *s)
{
    if (s->script == NULL || s->shell == NULL)
        return;
    s->script_at += guest_cmd_write(s->shell, s->script + s->script_at, s->script_len - s->script_at);
    if (s->script_at < s->script_len)
        return;
    free(s->script);
    s->script = NULL;
}

static void on_shell_room(guest_cmd *cmd, void *ctx)
{
    (void)cmd;
    script_pump(ctx);
}

static void turn_streams_close(guest_session *s)
{
    guest_watch_close(&s->t.out[0]);
    guest_watch_close(&s->t.out[1]);
    guest_watch_close(&s->t.in);
}

static void on_shell_end(guest_cmd *cmd, void *ctx, const guest_cmd_end *end)
{
    (void)cmd;
    guest_session *s = ctx;
    s->busy = true; /* nothing below may start the next turn before the old shell's traces are gone */
    s->shell = NULL;
    status_read(s); /* a turn may have ended just before */
    guest_watch_close(&s->status);
    s->line_len = 0;
    free(s->script);
    s->script = NULL;
    guest_run *run = s->t.run;
    if (run != NULL && !s->t.begun && !run->retried && end->killed == GUEST_KILL_NONE && !end->failed) {
        /* It died idle, a moment ago: the command has not begun, so a fresh shell may have it. */
        turn_streams_close(s);
        s->t.run = NULL;
        run->retried = true;
        run->next = s->queue;
        s->queue = run;
    } else {
        turn_ended(s, end);
    }
    s->busy = false;
    if (s->t.run == NULL) {
        dir_drop(s);
        session_next(s);
    }
}

static int shell_start(guest_session *s, uint64_t token, guest_fault *f)
{
    const char *shell = guest_shell();
    const char *bash[] = { "/bin/bash", "--noprofile", "--norc", "-s", NULL };
    const char *sh[] = { "/bin/sh", "-s", NULL };
    int status[2];
    if (shell == NULL)
        return guest_fail(f, 422, "no_shell", 0, "the sandbox has neither /bin/bash nor /bin/sh");
    if (dir_make(s, f) < 0)
        return -1;
    if (pipe2(status, O_CLOEXEC | O_NONBLOCK) < 0) {
        dir_drop(s);
        return guest_fail(f, 503, "no_descriptors", errno, "cannot open a session's pipes: %s", strerror(errno));
    }
    fcntl(status[1], F_SETFL, 0); /* the shell's end waits as usual */
    guest_cmd_spec spec = { .argv = strcmp(shell, "/bin/bash") == 0 ? bash : sh,
                            .want_stdin = true,
                            .background = true,
                            .extra_fds = { status[1], -1, -1, -1 },
                            .has_extra_fds = true,
                            .token = token,
                            .ctx = s,
                            .on_stdin_room = on_shell_room,
                            .on_end = on_shell_end };
    s->shell = guest_cmd_start(&spec, f);
    close(status[1]);
    if (s->shell == NULL) {
        close(status[0]);
        dir_drop(s);
        return -1;
    }
    s->status = (guest_watch){ .fd = status[0], .fn = on_status, .ctx = s };
    guest_watch_set(&s->status, EPOLLIN);
    return 0;
}

/* ---- a turn's script ---- */

static void put_quoted(FILE *out, const char *text)
{
    for (putc('\'', out); *text != '\0'; text++)
        if (*text == '\'')
            fputs("'\\''", out);
        else
            putc(*text, out);
    putc('\'', out);
}

/* The text is evaluated with descriptor 3 closed; a per-command variable is put back afterwards. The space keeps a text
 * that begins with a dash from being an option. */
static void put_script(FILE *out, const guest_session *s, const guest_run *run)
{
    fprintf(out, "{ command printf 'b%u\\n' >&3; ", s->t.n);
    for (size_t i = 0; i < run->env_n; i++) {
        int name = (int)strcspn(run->env[i], "=");
        fprintf(out, "__pdk_s_%.*s=${%.*s+x} __pdk_v_%.*s=${%.*s-}; export %.*s=", name, run->env[i], name, run->env[i],
                name, run->env[i], name, run->env[i], name, run->env[i]);
        put_quoted(out, run->env[i] + name + 1);
        fputs("; ", out);
    }
    if (run->cwd != NULL) {
        fputs("cd -- ", out);
        put_quoted(out, run->cwd);
        fputs(" && ", out);
    }
    fputs("eval ' '", out);
    put_quoted(out, run->text);
    fprintf(out, " 3>&-; } >%s/o%u 2>%s/e%u <", s->dir, s->t.n, s->dir, s->t.n);
    if (run->in_stdin)
        fprintf(out, "%s/i%u; ", s->dir, s->t.n);
    else
        fputs("/dev/null; ", out);
    if (run->env_n > 0)
        fputs("__pdk_r=$?; ", out);
    for (size_t i = 0; i < run->env_n; i++) {
        int name = (int)strcspn(run->env[i], "=");
        const char *e = run->env[i];
        fprintf(
            out,
            "if [ -n \"$__pdk_s_%.*s\" ]; then %.*s=$__pdk_v_%.*s; else unset %.*s; fi; unset __pdk_s_%.*s __pdk_v_%.*s; ",
            name, e, name, e, name, e, name, e, name, e, name, e);
    }
    fprintf(out, "command printf 's%u %%s\\n' \"%s\" >&3\n", s->t.n, run->env_n > 0 ? "$__pdk_r" : "$?");
}

static int fifo_open(guest_session *s, char kind, int flags, guest_watch *w, void (*fn)(guest_watch *, uint32_t),
                     guest_fault *f)
{
    char path[96];
    fifo_path(s, kind, path);
    *w = (guest_watch){ .fd = -1, .fn = fn, .ctx = s };
    int rc = mkfifo(path, 0600);
    if (rc < 0 && errno == ENOENT && mkdir(s->dir, 0700) == 0) /* a command has cleaned up /tmp */
        rc = mkfifo(path, 0600);
    if (rc == 0)
        w->fd = open(path, flags | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (w->fd >= 0)
        return 0;
    bool full = errno == ENOSPC || errno == EDQUOT;
    return guest_fail(f, full ? 507 : 503, full ? "no_space" : "session_broken", errno,
                      "cannot make a session's pipe %s: %s", path, strerror(errno));
}

static int turn_script(guest_session *s, guest_run *run, guest_fault *f)
{
    size_t len = 0;
    char *text = NULL;
    FILE *out = open_memstream(&text, &len);
    if (out != NULL) {
        put_script(out, s, run);
        if (fclose(out) == 0) {
            s->script = text;
            s->script_len = len;
            s->script_at = 0;
            return 0;
        }
    }
    free(text);
    return guest_fail(f, 503, "no_memory", ENOMEM, "no memory for a command's text");
}

/* The shell is there and idle: hands it the command. */
static int turn_begin(guest_session *s, guest_run *run, guest_fault *f)
{
    bool reset = s->t.reset;
    s->t = (turn){ .n = ++s->count, .reset = reset, .in.fd = -1, .out[0].fd = -1, .out[1].fd = -1 };
    if (fifo_open(s, 'o', O_RDONLY, &s->t.out[0], on_out, f) < 0 ||
        fifo_open(s, 'e', O_RDONLY, &s->t.out[1], on_out, f) < 0 ||
        (run->in_stdin && fifo_open(s, 'i', O_RDWR, &s->t.in, on_in, f) < 0) || turn_script(s, run, f) < 0) {
        turn_streams_close(s);
        fifo_unlink_all(s);
        return -1;
    }
    s->t.run = run;
    s->t.started = guest_now();
    s->t.oom_before = guest_oom_kills();
    guest_watch_set(&s->t.out[0], EPOLLIN);
    guest_watch_set(&s->t.out[1], EPOLLIN);
    guest_cmd_set_background(s->shell, false);
    guest_cmd_limit(s->shell, run->limit);
    script_pump(s);
    if (run->in_stdin)
        guest_run_stdin_room(run);
    return 0;
}

/* Starts the next command, if the session is free. One that cannot start is refused, and the one behind it has its try. */
static void session_next(guest_session *s)
{
    while (s->queue != NULL && s->t.run == NULL && !s->closing && !s->busy) {
        guest_fault f;
        if (s->shell != NULL && guest_cmd_killed(s->shell))
            return; /* its end starts the next turn */
        guest_run *run = s->queue;
        s->queue = run->next;
        run->next = NULL;
        bool ok = guest_token_allows(run->token, &f);
        if (ok && s->shell == NULL) {
            ok = shell_start(s, run->token, &f) == 0;
            s->t.reset = s->had_shell;
            s->had_shell = s->had_shell || ok;
        } else {
            s->t.reset = false;
        }
        if (!ok || turn_begin(s, run, &f) < 0)
            guest_run_fail(run, &f);
    }
    if (s->closing && s->shell == NULL && s->t.run == NULL && !s->busy)
        session_free(s);
}

/* ---- calls ---- */

static guest_session *session_find(const char *id)
{
    for (guest_session *s = sessions; s != NULL; s = s->next)
        if (!s->closing && strcmp(s->id, id) == 0)
            return s;
    return NULL;
}

int guest_session_submit(guest_run *run, guest_fault *f)
{
    guest_session *s = session_find(run->session);
    struct stat st;
    if (s == NULL)
        return guest_fail(f, 404, "no_session", 0, "there is no session %.64s", run->session);
    if (run->cwd != NULL && (stat(run->cwd, &st) < 0 || !S_ISDIR(st.st_mode)))
        return guest_fail(f, 422, "invalid_cwd", ENOENT, "%.150s is not a directory", run->cwd);
    run->on = s;
    guest_run **at = &s->queue;
    while (*at != NULL)
        at = &(*at)->next;
    *at = run;
    session_next(s);
    return 0;
}

void guest_session_cancel(guest_run *run)
{
    guest_session *s = run->on;
    if (s->t.run == run) {
        guest_session_paused(run, false);
        if (s->shell != NULL && !s->t.ended)
            guest_cmd_kill(s->shell, GUEST_KILL_CANCELLED);
        return;
    }
    guest_fault f;
    guest_fail(&f, 409, "cancelled", 0, "it was cancelled before its turn in the session came");
    for (guest_run **at = &s->queue; *at != NULL; at = &(*at)->next)
        if (*at == run) {
            *at = run->next;
            break;
        }
    guest_run_fail(run, &f);
}

static void session_close(guest_session *s)
{
    guest_fault f;
    guest_fail(&f, 404, "no_session", 0, "the session was deleted");
    s->closing = true;
    for (guest_run *run; (run = s->queue) != NULL;) {
        s->queue = run->next;
        guest_run_fail(run, &f);
    }
    if (s->shell != NULL)
        guest_cmd_kill(s->shell, GUEST_KILL_CANCELLED);
    else if (s->t.run == NULL)
        session_free(s);
}

static guest_session *session_make(const char *id, guest_fault *f)
{
    unsigned n = 0;
    for (guest_session *s = sessions; s != NULL; s = s->next)
        n += !s->closing;
    size_t len = strlen(id);
    json_t *text = json_stringn(id, len); /* NULL when it is no UTF-8: then it could not be named in an answer */
    bool good = text != NULL && len >= 1 && len <= ID_MAX;
    for (const char *p = id; *p != '\0'; p++)
        good = good && (unsigned char)*p >= ' ' && *p != 127;
    json_decref(text);
    if (!good)
        guest_fail(f, 422, "invalid_argument", 0, "a session id is 1 to %d bytes of UTF-8 without control characters",
                   ID_MAX);
    else if (n >= guest_conf.max_sessions)
        guest_fail(f, 429, "session_limit", 0, "there are %u sessions, and no more are allowed", n);
    else {
        guest_session *s = calloc(1, sizeof *s);
        if (s != NULL) {
            memcpy(s->id, id, len + 1);
            s->status.fd = s->t.in.fd = s->t.out[0].fd = s->t.out[1].fd = -1;
            s->next = sessions;
            sessions = s;
            return s;
        }
        guest_fail(f, 503, "no_memory", ENOMEM, "no memory for a session");
    }
    return NULL;
}

void guest_session_route(guest_req *req, const char *id)
{
    guest_fault f;
    guest_session *s = session_find(id);
    bool make = strcmp(req->method, "POST") == 0;
    bool created = make && s == NULL;
    if (created)
        s = session_make(id, &f);
    else if (s == NULL)
        guest_fail(&f, 404, "no_session", 0, "there is no session %.64s", id);
    if (s == NULL) {
        guest_reply_fault(req, &f);
        return;
    }
    guest_reply_json(req, 200, json_pack("{s:s, s:b}", "session", id, make ? "created" : "deleted", make ? created : 1));
    if (!make)
        session_close(s);
}
