/* aio_pty.c -- see aio_pty.h.
 *
 * The shell reads its script from a pipe, one line for each command: eval '...'. So it keeps its directory, variables and
 * functions, and there is no loop of ours around it that a `break` could leave. Three descriptors of ours stay in it, at
 * numbers that scripts do not use, and closed while a command runs:
 *   the terminal   every command gets it afresh as 0, 1 and 2: `exec >&-` in one does not silence the next one
 *   the status     a pipe: after each command "exit status NUL directory NUL"
 * The status says that a command has ended, not that its output has arrived: a terminal delivers later. So a mark follows
 * through the terminal too, and the command is done once both are here. Who prints such a mark himself only cuts his own
 * command's output short.
 */
#include "aio_pty.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define MARK_WAIT 1.0 /* seconds for which the mark may lag behind the status (a command may have stopped its terminal) */

typedef struct dialect {
    const char *name, *start, *run, *after;
} dialect;

/* bash takes any descriptor number; a plain sh only one digit. */
static const dialect BASH = {
    "bash",
    "exec 252>&4 253>&1 3<&- 4>&- </dev/null >/dev/null 2>&1; BASH_ARGV0=bash; shopt -s expand_aliases\n",
    " <&253 >&253 2>&253 252>&- 253>&-\n",
    "\\builtin printf '%d\\0%s\\0' \"$?\" \"${PWD-}\" >&252; \\builtin printf '\\036",
};
static const dialect SH = {
    "sh",
    "exec 8>&4 9>&1 3<&- 4>&- </dev/null >/dev/null 2>&1\n",
    " <&9 >&9 2>&9 8>&- 9>&-\n",
    "\\command printf '%d\\0%s\\0' \"$?\" \"${PWD-}\" >&8; \\command printf '\\036",
};

struct aio_pty {
    aio_pty_owner owner;
    guest_cmd *cmd;
    const dialect *sh;
    guest_watch script, status; /* our ends of the two pipes; fd -1 = closed */
    char *queue;                /* script text that the pipe has not taken yet */
    size_t queued, sent;
    char word[4200];            /* of the status pipe, so far */
    size_t word_len;
    bool busy, ended, marked;   /* a command runs; its status is here; its mark is here */
    int exit_code;
    char cwd[4096];
    guest_timer lag;            /* since `ended`, while the mark is missing */
    char mark[24];              /* \036, 16 digits, a colon; then the command's number and \036 */
    char held[64];              /* bytes that may become a mark; [0, held_len) */
    size_t held_len;
    unsigned long seq;
    bool cr;                    /* a \r is held back */
};

guest_cmd *aio_pty_cmd(aio_pty *p)
{
    return p->cmd;
}

/* ---- the end of a command ---- */

static void finish_when_complete(aio_pty *p)
{
    if (!p->busy || !p->ended || !p->marked) return;
    guest_timer_stop(&p->lag);
    guest_cmd_limit(p->cmd, 0);
    guest_cmd_set_background(p->cmd, true);
    p->busy = false;
    p->owner.done(p->owner.ctx, p->exit_code, p->cwd);
}

static void on_lag(guest_timer *t)
{
    aio_pty *p = t->ctx;
    p->marked = true;
    finish_when_complete(p);
}

/* ---- the terminal's output ---- */

/* Undoes the terminal's own \n -> \r\n: exactly one \r stands before each \n. */
static void emit(aio_pty *p, const char *data, size_t len)
{
    size_t plain = 0;
    if (len > 0 && p->cr) {
        if (data[0] != '\n') p->owner.output(p->owner.ctx, "\r", 1);
        p->cr = false;
    }
    for (size_t i = 0; i < len; i++) {
        if (data[i] != '\r') continue;
        bool last = i + 1 == len;
        if (!last && data[i + 1] != '\n') continue;
        if (i > plain) p->owner.output(p->owner.ctx, data + plain, i - plain);
        plain = i + 1;
        p->cr = last;
    }
    if (len > plain) p->owner.output(p->owner.ctx, data + plain, len - plain);
}

/* Whether the held bytes may still become a mark: 1, already are one: 2, or cannot: 0. */
static int held_state(const aio_pty *p)
{
    size_t fixed = strlen(p->mark), n = p->held_len;
    if (memcmp(p->held, p->mark, n < fixed ? n : fixed) != 0) return 0;
    for (size_t i = fixed; i < n; i++) {
        if (p->held[i] == '\036' && i > fixed) return i + 1 == n ? 2 : 0;
        if (p->held[i] < '0' || p->held[i] > '9') return 0;
    }
    return n < sizeof p->held ? 1 : 0;
}

static void take_mark(aio_pty *p)
{
    unsigned long seq = strtoul(p->held + strlen(p->mark), NULL, 10);
    p->held_len = 0;
    if (!p->busy || seq != p->seq) return; /* one that came too late */
    if (p->cr) emit(p, "", 0), p->owner.output(p->owner.ctx, "\r", 1), p->cr = false;
    p->marked = true;
}

static void on_output(guest_cmd *cmd, void *ctx, int stream, const char *data, size_t len)
{
    aio_pty *p = ctx;
    (void)cmd, (void)stream;
    size_t plain = 0;
    for (size_t i = 0; i < len; i++) {
        if (p->held_len == 0 && data[i] != '\036') continue;
        if (p->held_len == 0) {
            emit(p, data + plain, i - plain);
        } else if (data[i] == '\036' && p->held_len < strlen(p->mark)) {
            emit(p, p->held, p->held_len); /* no mark after all, but this may begin one */
            p->held_len = 0;
        }
        p->held[p->held_len++] = data[i];
        plain = i + 1;
        int state = held_state(p);
        if (state == 2) {
            take_mark(p);
        } else if (state == 0) {
            emit(p, p->held, p->held_len);
            p->held_len = 0;
        }
    }
    emit(p, data + plain, len - plain);
    finish_when_complete(p);
}

/* ---- the two pipes ---- */

static void drop(guest_watch *w)
{
    if (w->fd < 0) return;
    guest_watch_drop(w);
    close(w->fd);
    w->fd = -1;
}

static void on_status(guest_watch *w, uint32_t events)
{
    aio_pty *p = w->ctx;
    (void)events;
    ssize_t n = read(w->fd, p->word + p->word_len, sizeof p->word - p->word_len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) { /* end of file: the shell is going; full: a directory name that cannot be */
        drop(w);
        return;
    }
    p->word_len += (size_t)n;
    char *cwd = memchr(p->word, 0, p->word_len);
    char *end = cwd ? memchr(cwd + 1, 0, p->word_len - (size_t)(cwd + 1 - p->word)) : NULL;
    if (end == NULL) return;
    p->exit_code = atoi(p->word);
    snprintf(p->cwd, sizeof p->cwd, "%s", cwd + 1);
    p->word_len = 0;
    if (!p->busy) return;
    p->ended = true;
    if (!p->marked) guest_timer_in(&p->lag, MARK_WAIT, on_lag, p);
    finish_when_complete(p);
}

static void on_script(guest_watch *w, uint32_t events)
{
    aio_pty *p = w->ctx;
    (void)events;
    while (p->sent < p->queued) {
        ssize_t n = write(w->fd, p->queue + p->sent, p->queued - p->sent);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) {
            guest_watch_set(w, EPOLLOUT);
            return;
        }
        if (n < 0) { /* EPIPE: the shell is going; on_end tells the rest */
            drop(w);
            return;
        }
        p->sent += (size_t)n;
    }
    p->queued = p->sent = 0;
    guest_watch_drop(w); /* a silent watch would report a closed pipe over and over */
}

/* ---- life ---- */

static void release(aio_pty *p)
{
    guest_timer_stop(&p->lag);
    drop(&p->script);
    drop(&p->status);
    free(p->queue);
    free(p);
}

static void on_end(guest_cmd *cmd, void *ctx, const guest_cmd_end *end)
{
    aio_pty *p = ctx;
    (void)cmd;
    aio_pty_owner owner = p->owner;
    if (p->held_len > 0) emit(p, p->held, p->held_len);
    release(p);
    owner.gone(owner.ctx, end);
}

void aio_pty_close(aio_pty *p)
{
    if (p == NULL) return;
    guest_cmd_abandon(p->cmd);
    release(p);
}

static bool append(aio_pty *p, const char *text, size_t len)
{
    if (p->queue != NULL && p->queued + len <= GUEST_BODY_MAX * 5ul) {
        char *queue = realloc(p->queue, p->queued + len);
        if (queue == NULL) return false;
        p->queue = queue;
        memcpy(p->queue + p->queued, text, len);
        p->queued += len;
        return true;
    }
    return false;
}

/* Starts the shell with the other ends of the pipes; the caller closes those. */
static bool start(aio_pty *p, const char *cwd, uint64_t token, int script, int status, guest_fault *f)
{
    const char *path = guest_shell();
    if (path == NULL) {
        guest_fail(f, 500, "no_shell", 0, "there is neither /bin/bash nor /bin/sh in this sandbox");
        return false;
    }
    bool bash = strcmp(strrchr(path, '/') + 1, "bash") == 0;
    const char *plain[] = { path, "/dev/fd/3", NULL }, *quiet[] = { path, "--noprofile", "--norc", "/dev/fd/3", NULL };
    p->sh = bash ? &BASH : &SH;
    guest_cmd_spec spec = {
        .argv = bash ? quiet : plain, .cwd = cwd, .pty = true, .extra_fds = { script, status, -1, -1 }, .has_extra_fds = true,
        .token = token, .background = true, .ctx = p, .on_output = on_output, .on_end = on_end,
    };
    p->cmd = guest_cmd_start(&spec, f);
    return p->cmd != NULL;
}

aio_pty *aio_pty_open(const char *cwd, uint64_t token, const aio_pty_owner *owner, guest_fault *f)
{
    int script[2] = { -1, -1 }, status[2] = { -1, -1 };
    char id[40];
    aio_pty *p = calloc(1, sizeof *p);
    bool ok = p != NULL && (p->queue = malloc(1)) != NULL;
    if (!ok) {
        guest_fail(f, 500, "no_memory", 0, "no memory for a shell session");
    } else if (pipe2(script, O_CLOEXEC) < 0 || pipe2(status, O_CLOEXEC) < 0) {
        guest_fail(f, 500, "io_error", errno, "no pipe for a shell session");
        ok = false;
    }
    if (ok) {
        p->owner = *owner;
        p->script.fn = on_script;
        p->status.fn = on_status;
        p->script.ctx = p->status.ctx = p;
        aio_new_id(id);
        snprintf(p->mark, sizeof p->mark, "\036%.16s:", id);
        fcntl(script[1], F_SETFL, O_NONBLOCK);
        fcntl(status[0], F_SETFL, O_NONBLOCK);
        ok = start(p, cwd, token, script[0], status[1], f);
    }
    if (script[0] >= 0) close(script[0]);
    if (status[1] >= 0) close(status[1]);
    if (ok) {
        p->script.fd = script[1];
        p->status.fd = status[0];
        guest_watch_set(&p->status, EPOLLIN);
        if (append(p, p->sh->start, strlen(p->sh->start))) return p;
        aio_pty_close(p);
        guest_fail(f, 500, "no_memory", 0, "no memory for a shell session");
        return NULL;
    }
    if (script[1] >= 0) close(script[1]);
    if (status[0] >= 0) close(status[0]);
    if (p != NULL) free(p->queue);
    free(p);
    return NULL;
}

/* 'text' in single quotes for the shell. */
static bool append_quoted(aio_pty *p, const char *text)
{
    bool ok = append(p, "'", 1);
    for (const char *quote; ok && (quote = strchr(text, '\'')) != NULL; text = quote + 1)
        ok = append(p, text, (size_t)(quote - text)) && append(p, "'\\''", 4);
    return ok && append(p, text, strlen(text)) && append(p, "'", 1);
}

bool aio_pty_run(aio_pty *p, const char *text, const char *dir, bool logical, double limit)
{
    const char *call = p->sh == &BASH ? "\\builtin " : "\\command ";
    char mark[64];
    bool ok = true;
    size_t before = p->queued;
    if (dir != NULL) {
        ok = append(p, call, strlen(call)) && append(p, logical ? "cd -L -- " : "cd -P -- ", 9) && append_quoted(p, dir) &&
             append(p, " || :\n", 6);
    }
    /* After the `cd`, so that $? of the command is what the status line sees. */
    ok = ok && append(p, p->sh == &BASH ? "\\builtin eval " : "eval ", p->sh == &BASH ? 14 : 5) && append_quoted(p, text) &&
         append(p, p->sh->run, strlen(p->sh->run));
    int n = snprintf(mark, sizeof mark, "%s%lu\\036' >&%s\n", p->mark + 1, ++p->seq, p->sh == &BASH ? "253" : "9");
    ok = ok && append(p, p->sh->after, strlen(p->sh->after)) && append(p, mark, (size_t)n);
    if (!ok) {
        p->queued = before;
        return false;
    }
    p->busy = true;
    p->ended = p->marked = false;
    guest_cmd_set_background(p->cmd, false);
    guest_cmd_limit(p->cmd, limit);
    if (p->script.fd >= 0) on_script(&p->script, 0);
    return true;
}
