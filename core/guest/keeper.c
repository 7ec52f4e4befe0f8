/* keeper.c -- the process between the guest and a command, and the killing of whole trees.
 * Why a process of its own per command: whatever the command starts and leaves (setsid, double fork) is reparented to its
 * keeper, the nearest subreaper, so a tree can be found, and its end is the keeper's end. A command may kill its keeper
 * (same uid): then its processes come to the guest and are killed as strays.
 * Why stop first, then kill: a stopped process forks no more, so the rounds of a fork bomb converge. */
#include "priv.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FD_SAFE 64 /* numbers from here on are free of the targets 0 to 7 */

typedef struct job_result { /* shared with the vforked child, which has our memory */
    volatile int stage, sys;
} job_result;

static void signals_default(void)
{
    /* All zeroes is SIG_DFL whatever the kernel's layout; the C library's sigaction refuses the two signals that it keeps
     * for itself, which the program above us may have set to be ignored. */
    static const unsigned long dfl[8];
    for (int sig = 1; sig < NSIG; sig++)
        syscall(SYS_rt_sigaction, sig, dfl, NULL, (size_t)8);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* In the vforked child, as far as exec: the stage that failed, with errno set. */
static int command_setup(const keeper_job *job)
{
    setsid();
    for (int i = 0; i < job->fd_count; i++)
        if (dup2(job->fds[i], i) < 0)
            return STAGE_SETUP;
    if (job->pty && ioctl(0, TIOCSCTTY, 0) < 0)
        return STAGE_SETUP;
    /* All descriptors are close-on-exec already; this also catches one that a library forgot. */
    syscall(SYS_close_range, (unsigned)job->fd_count, ~0u, 4u /* CLOSE_RANGE_CLOEXEC */);
    if (chdir(job->cwd) < 0)
        return STAGE_CWD;
    signals_default();
    execve(job->argv[0], (char *const *)(uintptr_t)job->argv, job->env);
    return STAGE_EXEC;
}

__attribute__((noreturn, noinline)) static void command_exec(const keeper_job *job, job_result *result)
{
    result->stage = command_setup(job);
    result->sys = errno;
    _exit(127);
}

static void report(int control, int kind, int value, int stage)
{
    keeper_msg m = { .kind = (unsigned)kind, .value = value, .stage = (unsigned)stage };
    while (write(control, &m, sizeof m) < 0 && errno == EINTR)
        ;
}

/* The keeper's whole life. It has the guest's memory (copied, non-dumpable) and lets go of all its descriptors. */
__attribute__((noreturn)) static void keeper_main(keeper_job job)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL); /* a command's stray signals must not end its keeper */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    prctl(PR_SET_NAME, "keeper", 0, 0, 0);
    job.control = fcntl(job.control, F_DUPFD_CLOEXEC, FD_SAFE);
    for (int i = 0; i < job.fd_count; i++)
        job.fds[i] = fcntl(job.fds[i], F_DUPFD_CLOEXEC, FD_SAFE);
    job_result result = { STAGE_NONE, 0 };
    pid_t child = vfork();
    if (child == 0)
        command_exec(&job, &result);
    if (child < 0) {
        report(job.control, KEEPER_FAILED, errno, STAGE_FORK);
        _exit(1);
    }
    if (result.stage != STAGE_NONE)
        report(job.control, KEEPER_FAILED, result.sys, result.stage);
    else
        report(job.control, KEEPER_STARTED, child, STAGE_NONE);
    /* Its copies of the pipes would keep the command's output open for as long as a background process lives. */
    dup2(job.control, 3);
    fcntl(3, F_SETFD, FD_CLOEXEC);
    syscall(SYS_close_range, 4u, ~0u, 0u);
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, __WALL);
        if (pid == child && result.stage == STAGE_NONE)
            report(3, KEEPER_ENDED, status, STAGE_NONE);
        if (pid < 0 && errno != EINTR)
            _exit(0); /* nobody is left */
    }
}

pid_t guest_keeper_start(const keeper_job *job)
{
    pid_t pid = fork();
    if (pid == 0)
        keeper_main(*job);
    return pid;
}

/* ---- killing ---- */

typedef struct proc_entry {
    pid_t pid, ppid;
    char state;
} proc_entry;
typedef struct proc_table {
    proc_entry *v;
    size_t n, cap;
} proc_table;

static bool proc_read(int proc, const char *name, proc_entry *out)
{
    char path[300], text[512];
    snprintf(path, sizeof path, "%s/stat", name);
    int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = '\0';
    const char *after = strrchr(text, ')'); /* the name before it may hold anything */
    int ppid;
    if (after == NULL || sscanf(after + 1, " %c %d", &out->state, &ppid) != 2)
        return false;
    out->pid = (pid_t)atoi(name);
    out->ppid = ppid;
    return true;
}

static int by_pid(const void *a, const void *b)
{
    pid_t x = ((const proc_entry *)a)->pid, y = ((const proc_entry *)b)->pid;
    return x < y ? -1 : x > y ? 1 : 0;
}

static void proc_scan(proc_table *t)
{
    t->n = 0;
    DIR *dir = opendir("/proc");
    if (dir == NULL)
        return;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (d->d_name[0] < '1' || d->d_name[0] > '9')
            continue;
        if (t->n == t->cap) {
            size_t cap = t->cap ? t->cap * 2 : 128;
            proc_entry *grown = realloc(t->v, cap * sizeof *grown);
            if (grown == NULL)
                break; /* kill what is known; the next round finds the rest */
            t->v = grown;
            t->cap = cap;
        }
        if (proc_read(dirfd(dir), d->d_name, &t->v[t->n]))
            t->n++;
    }
    closedir(dir);
    qsort(t->v, t->n, sizeof *t->v, by_pid);
}

static bool listed(const pid_t *pids, int n, pid_t pid)
{
    for (int i = 0; i < n; i++)
        if (pids[i] == pid)
            return true;
    return false;
}

typedef struct kill_scope {
    const pid_t *keepers, *all;
    int n, all_n;
    bool strays;
    pid_t self;
} kill_scope;

static bool in_scope(const proc_table *t, const proc_entry *e, const kill_scope *s)
{
    if (e->pid == s->self || listed(s->all, s->all_n, e->pid))
        return false;
    pid_t at = e->ppid;
    for (int depth = 0; depth < 100000; depth++) {
        if (listed(s->all, s->all_n, at))
            return listed(s->keepers, s->n, at);
        if (at == s->self)
            return s->strays;
        proc_entry key = { .pid = at };
        const proc_entry *up = t->n ? bsearch(&key, t->v, t->n, sizeof *t->v, by_pid) : NULL;
        if (up == NULL || up->ppid == at)
            return false;
        at = up->ppid;
    }
    return false;
}

int guest_kill_round(const pid_t *keepers, int n, const pid_t *all_keepers, int all_n, bool strays)
{
    kill_scope scope = { keepers, all_keepers, n, all_n, strays, getpid() };
    proc_table t = { 0 };
    int alive = 0;
    for (int pass = 0; pass < 8; pass++) {
        proc_scan(&t);
        bool running = false;
        for (size_t i = 0; i < t.n; i++)
            if (in_scope(&t, &t.v[i], &scope) && strchr("TtZX", t.v[i].state) == NULL) {
                kill(t.v[i].pid, SIGSTOP);
                running = true;
            }
        if (!running)
            break;
    }
    /* Zombies are signalled too: the first thread of a process can be one while others run on. */
    for (size_t i = 0; i < t.n; i++)
        if (in_scope(&t, &t.v[i], &scope)) {
            kill(t.v[i].pid, SIGKILL);
            alive += strchr("ZX", t.v[i].state) == NULL;
        }
    for (int i = 0; i < n; i++)
        kill(keepers[i], SIGCONT); /* a stopped keeper reaps nobody */
    free(t.v);
    return alive;
}
