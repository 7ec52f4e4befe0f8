/* keeper.c -- the process between the guest and a command, and the killing of whole trees.
 * Why a process of its own per command: whatever the command starts and leaves (setsid, double fork) is reparented to its
 * keeper, the nearest subreaper, so a tree can be found, and its end is the keeper's end. A command may kill its keeper
 * (same uid): then its processes come to the guest and are killed as strays.
 * Why stop first, then kill: a stopped process forks no more, so the rounds of a fork bomb converge. Why all at once where
 * there are many: hundreds of busy processes leave the guest too little of the processor to read /proc while they run, and
 * kill(-1) reaches, in one step of the kernel, also what is just being forked. */
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
#include <time.h>
#include <unistd.h>

#define FD_SAFE     8  /* numbers from here on are free of the targets 0 to 7; RLIMIT_NOFILE may be as low as 64 */
#define MANY        64 /* processes in /proc, from which on everything is stopped at once */
#define MANY_MS     10 /* or looking at them takes this long */
#define FREEZE_GAP  (200 * INT64_C(1000000)) /* between two such stops, since they hit the innocent too */

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
    int control = fcntl(job.control, F_DUPFD_CLOEXEC, FD_SAFE);
    bool moved = control >= 0;
    for (int i = 0; moved && i < job.fd_count; i++)
        moved = (job.fds[i] = fcntl(job.fds[i], F_DUPFD_CLOEXEC, FD_SAFE)) >= 0;
    if (!moved) {
        report(job.control, KEEPER_FAILED, errno, STAGE_SETUP);
        _exit(1);
    }
    job.control = control;
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

static int64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Reads all processes; or, when `brief`, gives up as soon as there are many: false. What was read until then is in `t`. */
static bool proc_scan(proc_table *t, bool brief)
{
    t->n = 0;
    DIR *dir = opendir("/proc");
    if (dir == NULL)
        return true;
    int64_t until = clock_ns() + MANY_MS * INT64_C(1000000);
    bool whole = true;
    for (struct dirent *d; whole && (d = readdir(dir)) != NULL;) {
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
        whole = !brief || (t->n < MANY && clock_ns() < until);
    }
    closedir(dir);
    qsort(t->v, t->n, sizeof *t->v, by_pid);
    return whole;
}

static const proc_entry *proc_find(const proc_table *t, pid_t pid)
{
    proc_entry key = { .pid = pid };
    return t->n ? bsearch(&key, t->v, t->n, sizeof *t->v, by_pid) : NULL;
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
        const proc_entry *up = proc_find(t, at);
        if (up == NULL || up->ppid == at)
            return false;
        at = up->ppid;
    }
    return false;
}

static bool stopped_or_dead(const proc_entry *e)
{
    return strchr("TtZX", e->state) != NULL;
}

/* Stops what is in scope, as often as that finds something that runs. */
static void stop_scope(proc_table *t, const kill_scope *s)
{
    for (int pass = 0; pass < 8; pass++) {
        bool running = false;
        if (pass > 0)
            proc_scan(t, false);
        for (size_t i = 0; i < t->n; i++)
            if (in_scope(t, &t->v[i], s) && !stopped_or_dead(&t->v[i])) {
                kill(t->v[i].pid, SIGSTOP);
                running = true;
            }
        if (!running)
            return;
    }
}

/* Stops every process, reads them, and has those go on that are not in scope, but for what was seen stopped in `t`. */
static void stop_all(proc_table *t, const kill_scope *s)
{
    proc_table before = *t;
    *t = (proc_table){ 0 };
    kill(-1, SIGSTOP);
    proc_scan(t, false);
    for (size_t i = 0; i < t->n; i++) {
        const proc_entry *was = proc_find(&before, t->v[i].pid);
        if (t->v[i].pid != s->self && !in_scope(t, &t->v[i], s) && (was == NULL || !stopped_or_dead(was)))
            kill(t->v[i].pid, SIGCONT);
    }
    free(before.v);
}

int guest_kill_round(const pid_t *keepers, int n, const pid_t *all_keepers, int all_n, bool strays)
{
    static int64_t last_freeze = -FREEZE_GAP;
    kill_scope scope = { keepers, all_keepers, n, all_n, strays, getpid() };
    proc_table t = { 0 };
    int alive = 0;
    bool may_freeze = scope.self == 1 && clock_ns() - last_freeze > FREEZE_GAP; /* -1 is this namespace only as pid 1 */
    if (proc_scan(&t, may_freeze)) {
        stop_scope(&t, &scope);
    } else {
        stop_all(&t, &scope);
        last_freeze = clock_ns();
    }
    /* Zombies are signalled too: the first thread of a process can be one while others run on. */
    for (size_t i = 0; i < t.n; i++)
        if (in_scope(&t, &t.v[i], &scope)) {
            kill(t.v[i].pid, SIGKILL);
            alive += strchr("ZX", t.v[i].state) == NULL;
        }
    for (int i = 0; i < all_n; i++)
        kill(all_keepers[i], SIGCONT); /* a stopped keeper reaps nobody */
    free(t.v);
    return alive;
}

bool guest_kill_everything(void)
{
    return kill(-1, SIGKILL) == 0 || errno != ESRCH;
}
