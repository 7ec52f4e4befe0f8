/* exec.c -- commands: their pipes, limits and ends. The processes themselves are keeper.c's work.
 * A command's life: STARTING (the keeper is forking), RUNNING, ENDING (the direct child has ended and pipes are read, or it is
 * being killed), then its owner has got on_end and it is BACKGROUND while descendants live on: their output is read
 * and dropped, so that a background server neither blocks nor dies of a closed pipe.
 * True at all times: a command is on `commands` until its keeper is reaped and its owner was told, whichever is later. */
#include "priv.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHUNK       65536
#define STDIN_QUEUE 65536
#define GRACE       0.05 /* seconds that output of a finished command may still take, e.g. from >(filters) */
#define STUCK_AFTER 10   /* seconds after which a killed process that stays is reported, not waited for */

typedef enum cmd_phase { STARTING, RUNNING, ENDING, BACKGROUND } cmd_phase;

struct guest_cmd {
    guest_cmd *next;
    cmd_phase phase;
    pid_t keeper; /* 0 once it is reaped */
    pid_t child;
    guest_watch control;
    guest_watch out[2]; /* [0] stdout or the terminal, [1] stderr */
    bool paused[2];
    guest_watch in;
    char *queue; /* standard input not yet written */
    size_t queued, queue_at;
    bool in_close, in_full;
    bool pty, background, abandoned, child_ended;
    uint64_t token, oom_before;
    int64_t started;
    int status; /* of the direct child, as waitpid */
    guest_kill killed;
    bool leftover;
    guest_timer limit, grace, stuck;
    guest_fault fault; /* code != NULL: it never ran */
    void *ctx;
    void (*on_output)(guest_cmd *, void *, int, const char *, size_t);
    void (*on_stdin_room)(guest_cmd *, void *);
    void (*on_start)(guest_cmd *, void *);
    void (*on_end)(guest_cmd *, void *, const guest_cmd_end *);
};

static guest_cmd *commands;
static guest_timer kill_timer, sweep_timer;
static int kill_rounds;   /* since the last new victim: later rounds come more slowly */
static bool strays;       /* a keeper died before its time: its processes are ours now */
static char chunk[CHUNK]; /* for reading; only the pages that output fills are ever touched */

static void cmd_try_end(guest_cmd *c);
static void kill_soon(void);

/* ---- evidence of an out-of-memory kill ---- */

uint64_t guest_oom_kills(void)
{
    static int fd = -2;
    if (fd == -2) {
        fd = guest_conf.memory_events_fd;
        if (fd < 0)
            fd = open("/sys/fs/cgroup/memory.events", O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            fd = open("/sys/fs/cgroup/memory/memory.oom_control", O_RDONLY | O_CLOEXEC);
    }
    char text[512];
    ssize_t n = fd >= 0 ? pread(fd, text, sizeof text - 1, 0) : -1;
    if (n <= 0)
        return 0;
    text[n] = '\0';
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, "oom_kill ", 9) == 0)
            return strtoull(line + 9, NULL, 10);
    }
    return 0;
}

/* ---- start ---- */

const char *guest_shell(void)
{
    if (access("/bin/bash", X_OK) == 0)
        return "/bin/bash";
    return access("/bin/sh", X_OK) == 0 ? "/bin/sh" : NULL;
}

static size_t env_count(const char *const *env)
{
    size_t n = 0;
    while (env != NULL && env[n] != NULL)
        n++;
    return n;
}

static void env_put(char **env, size_t *n, const char *assignment)
{
    size_t name = strcspn(assignment, "=") + 1;
    for (size_t i = 0; i < *n; i++)
        if (strncmp(env[i], assignment, name) == 0) {
            env[i] = (char *)(uintptr_t)assignment;
            return;
        }
    env[(*n)++] = (char *)(uintptr_t)assignment;
}

/* The whole environment in one array; `own` receives the strings made here. */
static char **env_build(const char *const *extra, const char *cwd, char *own[3])
{
    const char *const *set = (const char *const *)guest_conf.env;
    char **env = calloc(6 + env_count(set) + env_count(extra) + 1, sizeof *env);
    if (env == NULL || asprintf(&own[0], "HOME=%s", guest_conf.home) < 0 ||
        asprintf(&own[1], "USER=%s", guest_conf.user) < 0 || asprintf(&own[2], "PWD=%s", cwd) < 0) {
        free(env);
        return NULL;
    }
    size_t n = 0;
    env_put(env, &n, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    env_put(env, &n, "LANG=C.UTF-8");
    env_put(env, &n, "TERM=dumb");
    for (int i = 0; i < 3; i++)
        env_put(env, &n, own[i]);
    for (size_t i = 0, count = env_count(set); i < count; i++)
        env_put(env, &n, set[i]);
    for (size_t i = 0, count = env_count(extra); i < count; i++)
        env_put(env, &n, extra[i]);
    return env;
}

typedef struct pipes {
    int in[2], out[2], err[2], control[2]; /* [0] read end, [1] write end; -1 = none or given away */
} pipes;

static void pipes_close(pipes *p)
{
    int *all = &p->in[0];
    for (size_t i = 0; i < sizeof *p / sizeof(int); i++)
        if (all[i] >= 0)
            close(all[i]);
}

static int pipes_pty(pipes *p)
{
    struct winsize size = { .ws_row = 24, .ws_col = 80 };
    int unlock = 0;
    p->out[0] = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (p->out[0] < 0 || ioctl(p->out[0], TIOCSPTLCK, &unlock) < 0 || ioctl(p->out[0], TIOCSWINSZ, &size) < 0)
        return -1;
    p->out[1] = ioctl(p->out[0], TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
    p->in[1] = fcntl(p->out[0], F_DUPFD_CLOEXEC, 0); /* one descriptor for keys, one for output: two watches */
    return p->out[1] < 0 || p->in[1] < 0 ? -1 : 0;
}

static int pipes_open(pipes *p, const guest_cmd_spec *spec)
{
    *p = (pipes){ { -1, -1 }, { -1, -1 }, { -1, -1 }, { -1, -1 } };
    if (pipe2(p->control, O_CLOEXEC) < 0)
        return -1;
    if (spec->pty)
        return pipes_pty(p);
    if (pipe2(p->out, O_CLOEXEC) < 0 || pipe2(p->err, O_CLOEXEC) < 0)
        return -1;
    if (spec->want_stdin)
        return pipe2(p->in, O_CLOEXEC);
    p->in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return p->in[0] < 0 ? -1 : 0;
}

static pid_t cmd_fork(const guest_cmd_spec *spec, const pipes *p, guest_fault *f)
{
    const char *shell = spec->text != NULL ? guest_shell() : NULL;
    const char *shell_argv[] = { shell, "-c", spec->text, NULL };
    const char *cwd = spec->cwd != NULL ? spec->cwd : guest_conf.workspace;
    if (spec->text != NULL && shell == NULL)
        return guest_fail(f, 422, "no_shell", 0, "the sandbox has neither /bin/bash nor /bin/sh");
    char *own[3] = { NULL, NULL, NULL };
    char **env = env_build(spec->env, cwd, own);
    keeper_job job = {
        .fds = { spec->pty ? p->out[1] : p->in[0], p->out[1], spec->pty ? p->out[1] : p->err[1] },
        .fd_count = 3,
        .control = p->control[1],
        .pty = spec->pty,
        .cwd = cwd,
        .env = env,
        .argv = spec->text != NULL ? shell_argv : spec->argv,
    };
    for (int i = 0; spec->has_extra_fds && i < 4 && spec->extra_fds[i] >= 0; i++)
        job.fds[job.fd_count++] = spec->extra_fds[i];
    errno = ENOMEM;
    pid_t keeper = env != NULL ? guest_keeper_start(&job) : -1;
    if (keeper < 0 && errno == EAGAIN)
        guest_fail(f, 503, "process_limit", errno, "process limit: the sandbox may not start another process");
    else if (keeper < 0)
        guest_fail(f, 503, "no_memory", errno, "cannot start a process: %s", strerror(errno));
    for (int i = 0; i < 3; i++)
        free(own[i]);
    free(env);
    return keeper;
}

static void on_control(guest_watch *w, uint32_t events);
static void on_readable(guest_watch *w, uint32_t events);
static void on_writable(guest_watch *w, uint32_t events);
static void on_limit(guest_timer *t);

static void watch_take(guest_watch *w, int *fd, void (*fn)(guest_watch *, uint32_t), void *ctx, uint32_t events)
{
    *w = (guest_watch){ .fd = *fd, .fn = fn, .ctx = ctx };
    *fd = -1;
    if (w->fd < 0)
        return;
    fcntl(w->fd, F_SETFL, fcntl(w->fd, F_GETFL) | O_NONBLOCK);
    guest_watch_set(w, events);
}

static void cmd_adopt(guest_cmd *c, const guest_cmd_spec *spec, pipes *p)
{
    watch_take(&c->control, &p->control[0], on_control, c, EPOLLIN);
    watch_take(&c->out[0], &p->out[0], on_readable, c, EPOLLIN);
    watch_take(&c->out[1], &p->err[0], on_readable, c, EPOLLIN);
    watch_take(&c->in, &p->in[1], on_writable, c, 0);
    c->pty = spec->pty;
    c->background = spec->background;
    c->token = spec->token;
    c->ctx = spec->ctx;
    c->on_output = spec->on_output;
    c->on_stdin_room = spec->on_stdin_room;
    c->on_start = spec->on_start;
    c->on_end = spec->on_end;
    c->started = guest_now();
    if (spec->limit > 0)
        guest_timer_in(&c->limit, spec->limit, on_limit, c);
    c->next = commands;
    commands = c;
}

guest_cmd *guest_cmd_start(const guest_cmd_spec *spec, guest_fault *f)
{
    if (!guest_token_allows(spec->token, f))
        return NULL;
    guest_cmd *c = calloc(1, sizeof *c);
    if (c == NULL) {
        guest_fail(f, 503, "no_memory", ENOMEM, "no memory for a command");
        return NULL;
    }
    c->oom_before = guest_oom_kills();
    pipes p;
    if (pipes_open(&p, spec) < 0)
        guest_fail(f, 503, spec->pty ? "no_terminal" : "no_descriptors", errno, "cannot open a command's %s: %s",
                   spec->pty ? "terminal" : "pipes", strerror(errno));
    else
        c->keeper = cmd_fork(spec, &p, f);
    if (c->keeper <= 0) {
        pipes_close(&p);
        free(c);
        return NULL;
    }
    cmd_adopt(c, spec, &p);
    pipes_close(&p);
    return c;
}

/* ---- output ---- */

/* Reads at most `max` bytes of stream `i` and hands them out, or drops them when nobody listens any more. Returns how
 * many; 0 when there are none now, or no more ever (then the stream is closed). */
static size_t stream_read(guest_cmd *c, int i, size_t max)
{
    guest_watch *w = &c->out[i];
    ssize_t n = read(w->fd, chunk, max < CHUNK ? max : CHUNK);
    if (n > 0) {
        if (c->on_output != NULL && c->phase != BACKGROUND)
            c->on_output(c, c->ctx, i + 1, chunk, (size_t)n);
        return (size_t)n;
    }
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        guest_watch_close(w); /* end of file; EIO is a terminal's */
    return 0;
}

/* What is in the pipes now, whatever the client's pace: at most a pipe's capacity each. What background processes write
 * meanwhile is not the command's. */
static void streams_drain(guest_cmd *c)
{
    for (int i = 0; i < 2; i++) {
        int left = 0;
        if (c->out[i].fd < 0 || ioctl(c->out[i].fd, FIONREAD, &left) < 0)
            continue;
        for (size_t n = 1; left > 0 && n > 0; left -= (int)n)
            n = stream_read(c, i, (size_t)left);
        if (c->out[i].fd >= 0)
            stream_read(c, i, 1); /* sees the end of file at once, when there is no background process */
    }
}

static void on_readable(guest_watch *w, uint32_t events)
{
    (void)events;
    guest_cmd *c = w->ctx;
    stream_read(c, w == &c->out[1], CHUNK);
    if (w->fd < 0)
        cmd_try_end(c);
}

void guest_cmd_pause(guest_cmd *c, int stream, bool paused)
{
    guest_watch *w = &c->out[stream - 1];
    c->paused[stream - 1] = paused;
    if (w->fd < 0 || c->phase == BACKGROUND)
        return;
    if (paused)
        guest_watch_drop(w); /* a silent watch would still report the hang-up, over and over */
    else
        guest_watch_set(w, EPOLLIN);
}

/* ---- input ---- */

static void in_flush(guest_cmd *c)
{
    while (c->queued > 0 && c->in.fd >= 0) {
        ssize_t n = write(c->in.fd, c->queue + c->queue_at, c->queued);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && errno == EAGAIN)
            break;
        if (n < 0) { /* nobody reads it any more */
            c->queued = 0;
            guest_watch_close(&c->in);
            break;
        }
        c->queue_at += (size_t)n;
        c->queued -= (size_t)n;
    }
    if (c->queued == 0) {
        free(c->queue);
        c->queue = NULL;
        c->queue_at = 0;
        if (c->in_close && c->in.fd >= 0 && !c->pty)
            guest_watch_close(&c->in);
    }
    if (c->in.fd >= 0 && c->queued > 0)
        guest_watch_set(&c->in, EPOLLOUT);
    else
        guest_watch_drop(&c->in);
}

static void on_writable(guest_watch *w, uint32_t events)
{
    (void)events;
    guest_cmd *c = w->ctx;
    in_flush(c);
    if (c->in_full && c->queued == 0) {
        c->in_full = false;
        if (c->on_stdin_room != NULL && c->phase != BACKGROUND)
            c->on_stdin_room(c, c->ctx);
    }
}

bool guest_cmd_killed(const guest_cmd *c)
{
    return c->killed != GUEST_KILL_NONE || c->keeper == 0;
}

size_t guest_cmd_write(guest_cmd *c, const void *data, size_t len)
{
    if (c->in.fd < 0 || c->in_close)
        return len; /* the command has closed it: the rest goes nowhere, as in a pipe */
    size_t n = 0;
    do {
        if (c->queue == NULL && (c->queue = malloc(STDIN_QUEUE)) == NULL)
            break;
        if (c->queue_at > 0) {
            memmove(c->queue, c->queue + c->queue_at, c->queued);
            c->queue_at = 0;
        }
        size_t room = STDIN_QUEUE - c->queued, piece = len - n < room ? len - n : room;
        memcpy(c->queue + c->queued, (const char *)data + n, piece);
        c->queued += piece;
        n += piece;
        in_flush(c);
        if (c->in.fd < 0)
            return len;
        /* A reader as quick as we are has taken all of it: then nothing would say later that there is room. */
    } while (n < len && c->queued == 0);
    if (n < len)
        c->in_full = true;
    return n;
}

void guest_cmd_close_stdin(guest_cmd *c)
{
    if (c->pty) {
        guest_cmd_write(c, "\x04", 1); /* a terminal's end of file is a key */
        return;
    }
    c->in_close = true;
    in_flush(c);
}

/* ---- ends ---- */

static void cmd_free(guest_cmd *c)
{
    for (guest_cmd **at = &commands; *at != NULL; at = &(*at)->next)
        if (*at == c) {
            *at = c->next;
            break;
        }
    guest_watch_close(&c->control);
    guest_watch_close(&c->out[0]);
    guest_watch_close(&c->out[1]);
    guest_watch_close(&c->in);
    guest_timer_stop(&c->limit);
    guest_timer_stop(&c->grace);
    guest_timer_stop(&c->stuck);
    free(c->queue);
    free(c);
    guest_cmds_changed();
}

/* A callback may look at the list but frees nothing: what is done is collected afterwards, by the sweep. */
static void on_sweep(guest_timer *t)
{
    (void)t;
    for (guest_cmd *c = commands, *next; c != NULL; c = next) {
        next = c->next;
        if (c->phase == BACKGROUND && c->keeper == 0)
            cmd_free(c);
    }
}

static void end_fill(const guest_cmd *c, guest_cmd_end *end)
{
    *end = (guest_cmd_end){
        .killed = c->killed, .leftover = c->leftover, .failed = c->fault.code != NULL, .fault = c->fault
    };
    end->duration = (double)(guest_now() - c->started) / 1e9;
    if (WIFSIGNALED(c->status)) {
        end->signal = WTERMSIG(c->status);
        end->exit_code = 128 + end->signal;
    } else {
        end->exit_code = WEXITSTATUS(c->status);
    }
    if (c->killed == GUEST_KILL_TIMEOUT)
        end->exit_code = 124;
    if (c->killed == GUEST_KILL_NONE && end->exit_code == 128 + SIGKILL)
        end->oom = guest_oom_kills() > c->oom_before;
}

/* Tells the owner; from now on the command is only a tree that may still live. */
static void cmd_end(guest_cmd *c)
{
    guest_cmd_end end;
    end_fill(c, &end);
    c->phase = BACKGROUND;
    guest_timer_stop(&c->limit);
    guest_timer_stop(&c->grace);
    if (c->keeper == 0)
        guest_timer_stop(&c->stuck);
    guest_watch_close(&c->in);
    for (int i = 0; i < 2; i++)
        if (c->out[i].fd >= 0)
            guest_watch_set(&c->out[i], EPOLLIN); /* dropped by stream_read from now on */
    if (!c->background)
        guest_contact();
    if (c->on_end != NULL && !c->abandoned)
        c->on_end(c, c->ctx, &end);
    c->on_end = NULL;
    c->on_output = NULL;
    if (c->keeper == 0)
        guest_timer_in(&sweep_timer, 0, on_sweep, NULL);
}

static void on_grace(guest_timer *t)
{
    guest_cmd *c = t->ctx;
    if (c->killed == GUEST_KILL_NONE && c->phase == ENDING)
        cmd_end(c);
}

static void cmd_try_end(guest_cmd *c)
{
    if (c->phase == BACKGROUND || !c->child_ended)
        return;
    if (c->killed != GUEST_KILL_NONE && (c->keeper != 0 || strays) && !c->leftover)
        return; /* only when no descendant is left; a keeper that was killed with it has left some to us */
    if ((c->out[0].fd < 0 && c->out[1].fd < 0) || c->killed != GUEST_KILL_NONE)
        cmd_end(c);
}

/* The direct child has ended, or can no longer be told of. */
static void cmd_child_ended(guest_cmd *c, int status)
{
    if (c->child_ended)
        return;
    c->child_ended = true;
    c->status = status;
    if (c->phase != BACKGROUND)
        c->phase = ENDING;
    guest_timer_stop(&c->limit);
    streams_drain(c);
    guest_timer_in(&c->grace, GRACE, on_grace, c);
    cmd_try_end(c);
}

static void cmd_failed(guest_cmd *c, const keeper_msg *m)
{
    if (m->stage == STAGE_FORK && m->value == EAGAIN)
        guest_fail(&c->fault, 503, "process_limit", m->value, "process limit: the sandbox may not start another process");
    else if (m->stage == STAGE_CWD)
        guest_fail(&c->fault, 422, "invalid_cwd", m->value, "cannot change to the working directory: %s",
                   strerror(m->value));
    else if (m->stage == STAGE_EXEC && m->value == E2BIG)
        guest_fail(&c->fault, 413, "too_large", m->value, "command or environment is longer than the kernel takes");
    else if (m->stage == STAGE_EXEC)
        guest_fail(&c->fault, 422, "exec_failed", m->value, "cannot run the program: %s", strerror(m->value));
    else
        guest_fail(&c->fault, 503, "no_memory", m->value, "cannot start a process: %s", strerror(m->value));
}

static bool control_read(guest_cmd *c)
{
    keeper_msg m;
    if (c->control.fd < 0 || read(c->control.fd, &m, sizeof m) != (ssize_t)sizeof m)
        return false;
    if (m.kind == KEEPER_STARTED) {
        c->child = m.value;
        if (c->phase == STARTING)
            c->phase = RUNNING;
        if (c->on_start != NULL && !c->abandoned)
            c->on_start(c, c->ctx);
    } else if (m.kind == KEEPER_FAILED) {
        cmd_failed(c, &m);
        cmd_child_ended(c, 127 << 8);
    } else {
        cmd_child_ended(c, m.value);
    }
    return true;
}

static void on_control(guest_watch *w, uint32_t events)
{
    guest_cmd *c = w->ctx;
    bool any = false;
    while (control_read(c))
        any = true;
    if (!any && (events & (EPOLLHUP | EPOLLERR)))
        guest_watch_close(w); /* the keeper is gone: SIGCHLD tells the rest */
}

static void keeper_gone(guest_cmd *c, int status)
{
    while (control_read(c))
        ;
    guest_watch_close(&c->control);
    c->keeper = 0;
    if (!c->child_ended || !WIFEXITED(status)) {
        strays = true; /* the command killed its keeper: what it left is ours and goes the same way */
        kill_soon();
    }
    if (c->phase == BACKGROUND) {
        guest_timer_in(&sweep_timer, 0, on_sweep, NULL);
        return;
    }
    if (!c->child_ended)
        cmd_child_ended(c, SIGKILL);
    else if (c->killed != GUEST_KILL_NONE)
        streams_drain(c);
    cmd_try_end(c);
}

void guest_reap(void)
{
    int status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;)
        for (guest_cmd *c = commands; c != NULL; c = c->next)
            if (c->keeper == pid) {
                if (WIFSTOPPED(status))
                    kill(pid, SIGCONT); /* somebody inside stopped it: it could not tell us that its command has ended */
                else
                    keeper_gone(c, status);
                break;
            }
}

/* ---- killing ---- */

/* One round over all trees that are to die. Returns whether any is left. */
static bool kill_round(void)
{
    int n = 0, all_n = 0, count = 0;
    for (guest_cmd *c = commands; c != NULL; c = c->next)
        count++;
    pid_t *pids = calloc((size_t)count * 2 + 1, sizeof *pids);
    if (pids == NULL)
        return true; /* the timer tries again */
    for (guest_cmd *c = commands; c != NULL; c = c->next) {
        if (c->keeper == 0)
            continue;
        pids[count + all_n++] = c->keeper;
        if (c->killed != GUEST_KILL_NONE)
            pids[n++] = c->keeper;
    }
    int alive = 0;
    if ((n > 0 || strays) && n == all_n && getpid() == 1)
        alive = guest_kill_everything();
    else if (n > 0 || strays)
        alive = guest_kill_round(pids, n, pids + count, all_n, strays);
    free(pids);
    if (strays && n == 0 && alive == 0)
        strays = false;
    return n > 0 || strays;
}

static void on_kill(guest_timer *t)
{
    bool had_strays = strays, left = kill_round();
    if (had_strays && !strays)
        for (guest_cmd *c = commands; c != NULL; c = c->next)
            cmd_try_end(c);
    guest_reap();
    kill_rounds++;
    if (left)
        guest_timer_in(t, kill_rounds < 20 ? 0.002 : kill_rounds < 100 ? 0.02 : 0.5, on_kill, NULL);
    else
        guest_cmds_changed(); /* also the strays are gone */
}

static void kill_soon(void)
{
    kill_rounds = 0;
    guest_timer_in(&kill_timer, 0, on_kill, NULL);
}

static void on_stuck(guest_timer *t)
{
    guest_cmd *c = t->ctx;
    c->leftover = true;
    if (!c->child_ended)
        cmd_child_ended(c, SIGKILL);
    cmd_try_end(c);
}

void guest_cmd_kill(guest_cmd *c, guest_kill why)
{
    if (c->killed != GUEST_KILL_NONE || c->keeper == 0)
        return;
    c->killed = why;
    guest_timer_stop(&c->limit);
    guest_timer_stop(&c->grace);
    guest_timer_in(&c->stuck, STUCK_AFTER, on_stuck, c);
    kill_soon();
}

static void on_limit(guest_timer *t)
{
    guest_cmd_kill(t->ctx, GUEST_KILL_TIMEOUT);
}

void guest_cmd_limit(guest_cmd *c, double seconds)
{
    guest_timer_stop(&c->limit);
    if (seconds > 0 && !c->child_ended)
        guest_timer_in(&c->limit, seconds, on_limit, c);
}

int guest_cmd_signal(guest_cmd *c, int sig)
{
    if (c->child_ended || c->child <= 0) {
        errno = ESRCH;
        return -1;
    }
    pid_t group = c->child;
    if (c->pty && c->out[0].fd >= 0 && ioctl(c->out[0].fd, TIOCGPGRP, &group) < 0)
        group = c->child;
    return kill(group > 1 ? -group : -c->child, sig);
}

void guest_cmd_set_background(guest_cmd *c, bool background)
{
    c->background = background;
    guest_contact();
}

void guest_cmd_abandon(guest_cmd *c)
{
    c->abandoned = true;
    c->on_output = NULL;
    c->on_stdin_room = NULL;
    c->on_start = NULL;
    guest_cmd_pause(c, 1, false);
    guest_cmd_pause(c, 2, false);
    guest_cmd_kill(c, GUEST_KILL_CANCELLED);
}

/* ---- all of them ---- */

unsigned guest_cmd_foreground(void)
{
    unsigned n = 0;
    for (const guest_cmd *c = commands; c != NULL; c = c->next)
        n += c->phase != BACKGROUND && !c->background;
    return n;
}

unsigned guest_cmd_trees(void)
{
    unsigned n = 0;
    for (const guest_cmd *c = commands; c != NULL; c = c->next)
        n += c->keeper != 0;
    return n;
}

bool guest_cmd_below(uint64_t token)
{
    for (const guest_cmd *c = commands; c != NULL; c = c->next)
        if (c->token < token && (c->keeper != 0 || c->phase != BACKGROUND))
            return true;
    return strays;
}

void guest_cmd_kill_below(uint64_t token)
{
    for (guest_cmd *c = commands; c != NULL; c = c->next)
        if (c->token < token)
            guest_cmd_kill(c, GUEST_KILL_FENCED);
}

void guest_cmd_kill_all(guest_kill why)
{
    strays = true;
    for (guest_cmd *c = commands; c != NULL; c = c->next)
        guest_cmd_kill(c, why);
    kill_soon();
}

void guest_cmd_kill_wait(double seconds)
{
    guest_cmd_kill_all(GUEST_KILL_CANCELLED);
    struct timespec nap = { 0, 2000000 };
    for (guest_now_update(); seconds > 0 && kill_round(); seconds -= 0.002) {
        nanosleep(&nap, NULL);
        for (guest_cmd *c = commands; c != NULL; c = c->next)
            if (c->keeper != 0 && waitpid(c->keeper, NULL, WNOHANG) == c->keeper)
                c->keeper = 0;
        while (waitpid(-1, NULL, WNOHANG) > 0)
            ;
    }
}
