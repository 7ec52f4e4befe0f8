/* proc.c -- children that the host does not notice.
 *
 * A fork would copy the page tables of a host that may be large; clone(CLONE_VM) runs the child in this process's memory
 * until it has called execve, while its maker stands still. And execve gives a child SIGCHLD as its exit signal, whatever
 * it was cloned with, so that the host's wait() would see it. Therefore a process in between is cloned, without an exit
 * signal, which never calls execve and which makes the real child:
 *   detached  (pdk_spawn_start) it ends at once, and init inherits and reaps the child, however long that lives;
 *   attached  (pdk_run) it stays until the child has ended, since only a parent learns the exit status.
 *
 * Code that runs in a clone shares this process's memory, therefore:
 *   - it uses raw system calls only (glibc's setuid would tell the host's other threads to follow it; a sanitizer's
 *     interceptor would note the child's signal dispositions as the host's),
 *   - it reports a failure through child_job, no pipe needed,
 *   - changing its ids makes the shared memory non-dumpable, which it undoes at once (the host keeps its core dumps).
 * The child's descriptor table, signal table, working directory and mount namespace are its own.
 *
 * No locks: nothing here is shared between calls.
 */
#include "proc.h"
#include "fd.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define MAX_FDS 64
#define CHILD_STACK (96u << 10)
#define KERNEL_SIGSET 8 /* bytes of a signal set as the kernel counts */

/* What runs between clone and execve must not be instrumented: it shares this process's memory, not its bookkeeping. */
#define UNINSTRUMENTED __attribute__((no_sanitize("address", "thread", "undefined"), noinline))

/* ---- the child's side ------------------------------------------------------------------------------------ */

/* glibc's own name: a sanitizer's wrapper of clone would do its bookkeeping in memory that two processes share. */
extern int __clone(int (*fn)(void *), void *stack, int flags, void *arg, ...);

typedef struct child_job { /* lives until the process in between is gone */
    const pdk_spawn *spec;
    pdk_fd_map map[MAX_FDS + 3]; /* sorted by `to`; `from` is moved out of the way first */
    size_t count;
    int above;                   /* a number above every target */
    int dumpable;                /* the host's, to put back */
    const char *failed;          /* what did, or NULL */
    int sys;

    bool attached;               /* the process in between stays */
    char *stacks;                /* two of CHILD_STACK: the process in between, the child */
    pid_t middle, pid;           /* the process in between; the child, or -1 */
    int pidfd;                   /* of the child, in this process's table */
    unsigned started;            /* attached: a futex; 1 = pid, pidfd and failed are set */
    bool kill_rest;              /* attached: what the child leaves in its session is killed when it ends */
    int status;                  /* attached: the child's, once the process in between is gone */
} child_job;

UNINSTRUMENTED static bool child_failed(child_job *job, const char *what)
{
    job->failed = what;
    job->sys = errno;
    return false;
}

UNINSTRUMENTED static bool child_stage(child_job *job)
{
    const char *failed = NULL;
    return pdk_stage_run(job->spec->stage, job->spec->stage_count, &failed) || child_failed(job, failed);
}

UNINSTRUMENTED static bool child_close_range(child_job *job, unsigned from, unsigned to)
{
    if (from > to || syscall(SYS_close_range, from, to, 0) == 0) return true;
    if (errno != ENOSYS) return child_failed(job, "close descriptors");
    struct rlimit r = { 0, 0 };
    syscall(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &r);
    for (unsigned fd = from; fd <= to && fd < r.rlim_cur && fd < 1u << 20; fd++) syscall(SYS_close, fd);
    return true;
}

UNINSTRUMENTED static bool child_descriptors(child_job *job)
{
    for (size_t i = 0; i < job->count; i++) { /* out of the way of the targets */
        long moved = syscall(SYS_fcntl, job->map[i].from, F_DUPFD_CLOEXEC, job->above);
        if (moved < 0) return child_failed(job, "duplicate a descriptor");
        job->map[i].from = (int)moved;
    }
    unsigned next = 0;
    for (size_t i = 0; i < job->count; i++) {
        unsigned to = (unsigned)job->map[i].to;
        if (syscall(SYS_dup3, job->map[i].from, to, 0) < 0) return child_failed(job, "place a descriptor");
        if (to > 0 && !child_close_range(job, next, to - 1)) return false;
        next = to + 1;
    }
    return child_close_range(job, next, ~0u);
}

UNINSTRUMENTED static bool child_identity(child_job *job)
{
    const pdk_spawn *spec = job->spec;
    for (size_t i = 0; spec->limits != NULL && i < spec->limits->n; i++) {
        struct rlimit r = { spec->limits->v[i].soft, spec->limits->v[i].hard };
        if (syscall(SYS_prlimit64, 0, spec->limits->v[i].resource, &r, NULL) < 0) return child_failed(job, "set a resource limit");
    }
    if (spec->drop_ids) {
        bool done = syscall(SYS_setgroups, 0, NULL) == 0 && syscall(SYS_setresgid, spec->gid, spec->gid, spec->gid) == 0 &&
                    syscall(SYS_setresuid, spec->uid, spec->uid, spec->uid) == 0;
        int sys = errno;
        if (job->dumpable == 1) syscall(SYS_prctl, PR_SET_DUMPABLE, 1, 0, 0, 0);
        errno = sys;
        if (!done) return child_failed(job, "switch to the unprivileged user");
    }
    if (syscall(SYS_chdir, spec->cwd != NULL ? spec->cwd : "/") < 0) return child_failed(job, "change to the working directory");
    syscall(SYS_umask, 022);
    return true;
}

UNINSTRUMENTED static void child_signals(void)
{
    struct { /* the kernel's layout; a handler of 0 is SIG_DFL */
        unsigned long handler, flags, restorer, mask;
    } dfl = { 0, 0, 0, 0 };
    for (int sig = 1; sig <= 64; sig++)
        if (sig != SIGKILL && sig != SIGSTOP) syscall(SYS_rt_sigaction, sig, &dfl, NULL, KERNEL_SIGSET);
    unsigned long none = 0;
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &none, NULL, KERNEL_SIGSET);
}

UNINSTRUMENTED static int child_main(void *arg)
{
    child_job *job = arg;
    const pdk_spawn *spec = job->spec;
    syscall(SYS_setsid);
    if ((spec->stage_count == 0 || child_stage(job)) && child_descriptors(job) && child_identity(job)) {
        static const char *const no_env[] = { NULL };
        child_signals();
        syscall(SYS_execve, spec->argv[0], spec->argv, spec->env != NULL ? spec->env : no_env);
        child_failed(job, "execute it");
    }
    syscall(SYS_exit, 127);
    __builtin_unreachable();
}

/* While the child is not reaped, its number is its own: only now can its session be killed by it. */
UNINSTRUMENTED static void middle_wait(child_job *job)
{
    char info[128];
    int status = 0;
    syscall(SYS_waitid, P_PID, job->pid, info, WEXITED | WNOWAIT, NULL);
    if (__atomic_load_n(&job->kill_rest, __ATOMIC_ACQUIRE)) syscall(SYS_kill, -job->pid, SIGKILL);
    if (syscall(SYS_wait4, job->pid, &status, 0, NULL) == job->pid) job->status = status;
}

/* The process in between. It shares this process's descriptors, so that the child's pidfd appears here. */
UNINSTRUMENTED static int middle_main(void *arg)
{
    child_job *job = arg;
    int flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD;
    job->pid = __clone(child_main, job->stacks + 2 * CHILD_STACK, flags, job, &job->pidfd);
    if (job->pid < 0) child_failed(job, "make a process");
    if (job->attached) {
        /* Its own table, empty: the host's connections must not stay open for as long as this child runs. */
        syscall(SYS_close_range, 0u, ~0u, 1u << 1 /* CLOSE_RANGE_UNSHARE */);
        __atomic_store_n(&job->started, 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &job->started, FUTEX_WAKE, 1, NULL, NULL, 0); /* not private: the waiter is another process */
        if (job->pid > 0) middle_wait(job);
    }
    syscall(SYS_exit, 0);
    __builtin_unreachable();
}

/* ---- spawning --------------------------------------------------------------------------------------------- */

static int map_order(const void *a, const void *b)
{
    return ((const pdk_fd_map *)a)->to - ((const pdk_fd_map *)b)->to;
}

static int job_init(child_job *job, const pdk_spawn *spec, int null_fd, pdk_error *err)
{
    if (spec->fd_count > MAX_FDS || spec->stage_count > PDK_STAGE_MAX)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "cannot start %s: more than %d descriptors or %d mounts", spec->argv[0],
                        MAX_FDS, PDK_STAGE_MAX);
    *job = (child_job){ .spec = spec, .above = 3 };
    for (size_t i = 0; i < spec->fd_count; i++) job->map[job->count++] = spec->fds[i];
    for (int std = 0; std < 3; std++) {
        bool given = false;
        for (size_t i = 0; i < spec->fd_count; i++) given = given || spec->fds[i].to == std;
        if (!given) job->map[job->count++] = (pdk_fd_map){ null_fd, std };
    }
    qsort(job->map, job->count, sizeof job->map[0], map_order);
    for (size_t i = 0; i < job->count; i++) {
        if (job->map[i].to < 0 || (i > 0 && job->map[i].to == job->map[i - 1].to))
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "cannot start %s: descriptor %d is mapped twice or negative",
                            spec->argv[0], job->map[i].to);
        if (job->map[i].to >= job->above) job->above = job->map[i].to + 1;
    }
    job->dumpable = spec->drop_ids ? prctl(PR_GET_DUMPABLE) : 0;
    return 0;
}

static void job_free(child_job *job)
{
    if (job->stacks != NULL) munmap(job->stacks, 2 * CHILD_STACK);
    job->stacks = NULL;
}

/* Waits until the process in between is gone; nothing runs on its stack then. */
static void job_join(child_job *job)
{
    if (job->middle > 0)
        while (waitpid(job->middle, NULL, __WALL) < 0 && errno == EINTR) continue;
    job->middle = -1;
}

/* Waits until the child runs, or the process in between has died of something else (the kernel's memory killer). */
static void job_await(child_job *job)
{
    const struct timespec slice = { 0, 50 * 1000 * 1000 };
    while (__atomic_load_n(&job->started, __ATOMIC_ACQUIRE) == 0) {
        syscall(SYS_futex, &job->started, FUTEX_WAIT, 0, &slice, NULL, 0);
        if (__atomic_load_n(&job->started, __ATOMIC_ACQUIRE) != 0 || waitpid(job->middle, NULL, __WALL | WNOHANG) == 0) continue;
        job->middle = -1;
        if (job->failed == NULL) job->failed = "make a process", job->sys = ECHILD;
        return;
    }
}

static int job_start(child_job *job, pdk_error *err)
{
    void *stacks = mmap(NULL, 2 * CHILD_STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (stacks == MAP_FAILED) return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot start %s: no memory", job->spec->argv[0]);
    job->stacks = stacks;
    job->pid = job->pidfd = -1;
    job->status = -1;
    /* A handler of the host must not run in a clone, where it would see the host's memory. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int flags = CLONE_VM | CLONE_FILES | (job->attached ? 0 : CLONE_VFORK);
    job->middle = __clone(middle_main, job->stacks + CHILD_STACK, flags, job);
    int sys = errno;
    if (job->middle > 0 && job->attached) job_await(job);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (job->middle < 0 && job->failed == NULL)
        return pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot start %s: no new process", job->spec->argv[0]);
    if (!job->attached || job->failed != NULL) job_join(job);
    if (job->failed == NULL) return 0;
    if (job->pidfd >= 0) close(pdk_fd_take(&job->pidfd));
    return pdk_fail(err, PDK_E_IO_ERROR, job->sys, "cannot start %s: cannot %s", job->spec->argv[0], job->failed);
}

int pdk_spawn_start(const pdk_spawn *spec, pdk_child *out, pdk_error *err)
{
    *out = (pdk_child){ .pidfd = -1 };
    PDK_AUTO_FD null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null_fd < 0) return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot start %s: cannot open /dev/null", spec->argv[0]);
    child_job job;
    if (job_init(&job, spec, null_fd, err) < 0) return -1;
    int rc = job_start(&job, err);
    job_free(&job);
    if (rc == 0) *out = (pdk_child){ .pidfd = job.pidfd, .pid = job.pid };
    return rc;
}

/* ---- waiting ---------------------------------------------------------------------------------------------- */

int pdk_poll_limited(struct pollfd *fds, size_t n, pdk_ns deadline, pdk_error *err, const char *what)
{
    const pdk_limit *limit = pdk_limit_current();
    for (;;) {
        pdk_ns now = pdk_now_monotonic();
        if (pdk_limit_cancelled(limit))
            return pdk_fail(err, PDK_E_CANCELLED, 0, "%s: cancelled", what);
        if (now >= limit->deadline) return pdk_fail(err, PDK_E_TIMEOUT, 0, "%s: the time limit passed", what);
        pdk_ns until = deadline < limit->deadline ? deadline : limit->deadline;
        until = pdk_upkeep_before(limit, until);
        pdk_ns left = until <= now ? 0 : until - now;
        if (pdk_limit_can_cancel(limit) && left > PDK_NS_PER_S / 20) left = PDK_NS_PER_S / 20; /* look at the flag 20 times a second */
        struct timespec t = { (time_t)(left / PDK_NS_PER_S), (long)(left % PDK_NS_PER_S) };
        int ready = ppoll(fds, n, until == PDK_NEVER && !pdk_limit_can_cancel(limit) ? NULL : &t, NULL);
        if (ready > 0) return 1;
        if (ready < 0 && errno != EINTR) return pdk_fail(err, PDK_E_IO_ERROR, errno, "%s: cannot wait", what);
        if (ready == 0 && pdk_now_monotonic() >= deadline) return 0;
        pdk_upkeep_run(limit);
    }
}

int pdk_child_wait(pdk_child *c, double seconds, pdk_error *err)
{
    if (c->pidfd < 0) return 1;
    struct pollfd p = { .fd = c->pidfd, .events = POLLIN };
    int ready = pdk_poll_limited(&p, 1, pdk_after(pdk_now_monotonic(), pdk_seconds(seconds)), err, "waiting for a process");
    if (ready == 1) pdk_child_close(c);
    return ready;
}

void pdk_child_close(pdk_child *c)
{
    if (c->pidfd >= 0) close(pdk_fd_take(&c->pidfd));
}

/* ---- running to the end ------------------------------------------------------------------------------------ */

typedef struct capture { /* one output of a child */
    char *data;
    size_t len, cap;
    int fd; /* owned; -1 = at its end */
} capture;

void pdk_run_result_free(pdk_run_result *r)
{
    free(r->out);
    free(r->err);
    *r = (pdk_run_result){ 0 };
}

/* Reads what is there. What is beyond `max` is dropped, so that the child never blocks on us. */
static int capture_read(capture *c, size_t max, bool *truncated, pdk_error *err)
{
    char buf[16384];
    ssize_t n = read(c->fd, buf, sizeof buf);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) {
        close(pdk_fd_take(&c->fd));
        return 0;
    }
    size_t keep = (size_t)n < max - c->len ? (size_t)n : max - c->len;
    if (keep < (size_t)n) *truncated = true;
    if (c->len + keep + 1 > c->cap) {
        size_t cap = c->cap == 0 ? 4096 : c->cap * 2;
        while (cap < c->len + keep + 1) cap *= 2;
        char *grown = realloc(c->data, cap);
        if (grown == NULL) return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %zu bytes of output", cap);
        c->data = grown;
        c->cap = cap;
    }
    memcpy(c->data + c->len, buf, keep);
    c->len += keep;
    return 0;
}

typedef struct run { /* the parent's side of one pdk_run */
    child_job *job; /* owned; left behind when the child is stuck in the kernel: its parent still looks at it */
    bool running;   /* the process in between is not joined */
    capture out, err;
    int in; /* owned; -1 = closed */
    const char *data;
    size_t left;
} run;

static void run_leave(run *r)
{
    bool gone = true;
    if (r->running) {
        struct pollfd p = { .fd = r->job->pidfd, .events = POLLIN };
        __atomic_store_n(&r->job->kill_rest, true, __ATOMIC_RELEASE);
        syscall(SYS_pidfd_send_signal, r->job->pidfd, SIGKILL, NULL, 0);
        gone = poll(&p, 1, 5000) == 1;
        if (gone) job_join(r->job);
    }
    if (r->job != NULL && r->job->pidfd >= 0) close(r->job->pidfd);
    if (r->job != NULL && gone) {
        job_free(r->job);
        free(r->job);
    }
    if (r->out.fd >= 0) close(r->out.fd);
    if (r->err.fd >= 0) close(r->err.fd);
    if (r->in >= 0) close(r->in);
    free(r->out.data);
    free(r->err.data);
}

static void run_feed(run *r)
{
    ssize_t n = r->left > 0 ? write(r->in, r->data, r->left) : 0;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
        r->data += n;
        r->left -= (size_t)n;
    }
    if (n < 0 || r->left == 0) close(pdk_fd_take(&r->in)); /* a child that reads no more is no error */
}

static int run_pump(run *r, size_t max, pdk_ns deadline, const char *what, bool *truncated, pdk_error *err)
{
    while (r->out.fd >= 0 || r->err.fd >= 0 || r->in >= 0) {
        /* The direct child's end is the end, even if something that it left behind keeps the pipes open. */
        struct pollfd p[4] = { { r->out.fd, POLLIN, 0 }, { r->err.fd, POLLIN, 0 }, { r->in, POLLOUT, 0 },
                               { r->job->pidfd, POLLIN, 0 } };
        int ready = pdk_poll_limited(p, 4, deadline, err, what);
        if (ready < 0) return -1;
        if (ready == 0) return pdk_fail(err, PDK_E_TIMEOUT, 0, "%s: did not end within its limit and was killed", what);
        if (p[2].revents != 0) run_feed(r);
        if (p[0].revents != 0 && capture_read(&r->out, max, truncated, err) < 0) return -1;
        if (p[1].revents != 0 && capture_read(&r->err, max, truncated, err) < 0) return -1;
        if (p[3].revents != 0 && p[0].revents == 0 && p[1].revents == 0) return 0;
    }
    return 0;
}

/* SIGPIPE must not reach the host when a child closes its input early: on a socket, MSG_NOSIGNAL would do; a pipe needs
 * the signal blocked on this thread, and taken back if it came. */
static int run_pump_quiet(run *r, size_t max, pdk_ns deadline, const char *what, bool *truncated, pdk_error *err)
{
    sigset_t broken, old, waiting;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    sigpending(&waiting);
    bool before = sigismember(&waiting, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &broken, &old);
    int rc = run_pump(r, max, deadline, what, truncated, err);
    struct timespec none = { 0, 0 };
    if (!before)
        while (sigtimedwait(&broken, NULL, &none) < 0 && errno == EINTR) continue;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

static int run_pipes(run *r, bool feed, int theirs[3], pdk_error *err)
{
    int in[2] = { -1, -1 }, out[2] = { -1, -1 }, errs[2] = { -1, -1 };
    int rc = (feed && pipe2(in, O_CLOEXEC) < 0) || pipe2(out, O_CLOEXEC) < 0 || pipe2(errs, O_CLOEXEC) < 0 ? -1 : 0;
    int sys = errno;
    theirs[0] = in[0], theirs[1] = out[1], theirs[2] = errs[1];
    r->in = in[1], r->out.fd = out[0], r->err.fd = errs[0];
    const int ours[] = { r->in, r->out.fd, r->err.fd };
    for (size_t i = 0; i < 3; i++)
        if (ours[i] >= 0) fcntl(ours[i], F_SETFL, O_NONBLOCK);
    return rc < 0 ? pdk_fail(err, PDK_E_IO_ERROR, sys, "no pipe for a child's output") : 0;
}

static int run_start(run *r, const pdk_spawn *spec, bool feed, pdk_error *err)
{
    int theirs[3];
    int rc = run_pipes(r, feed, theirs, err);
    pdk_fd_map map[MAX_FDS];
    size_t n = 0;
    for (int i = feed ? 0 : 1; i < 3; i++) map[n++] = (pdk_fd_map){ theirs[i], i };
    for (size_t i = 0; i < spec->fd_count && n < MAX_FDS; i++) map[n++] = spec->fds[i];
    pdk_spawn mapped = *spec;
    mapped.fds = map;
    mapped.fd_count = n;
    PDK_AUTO_FD null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    r->job = calloc(1, sizeof *r->job);
    if (rc == 0 && r->job == NULL) rc = pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to start %s", spec->argv[0]);
    if (rc == 0) rc = job_init(r->job, &mapped, null_fd, err);
    if (r->job != NULL) r->job->attached = true;
    if (rc == 0) rc = job_start(r->job, err);
    else if (r->job != NULL) r->job->pidfd = -1;
    r->running = rc == 0;
    for (size_t i = 0; i < 3; i++)
        if (theirs[i] >= 0) close(theirs[i]);
    return rc;
}

/* Waits for the child's end; its status is known once the process in between has ended too, which is at once. */
static int run_end(run *r, pdk_ns deadline, const char *what, int *status, pdk_error *err)
{
    struct pollfd p = { .fd = r->job->pidfd, .events = POLLIN };
    int ended = pdk_poll_limited(&p, 1, deadline, err, what);
    if (ended < 0) return -1;
    if (ended == 0) return pdk_fail(err, PDK_E_TIMEOUT, 0, "%s: did not end within its limit and was killed", what);
    job_join(r->job);
    r->running = false;
    *status = r->job->status;
    return 0;
}

int pdk_run(const pdk_spawn *spec, const void *in, size_t in_len, size_t max, double seconds, pdk_run_result *out,
            pdk_error *err)
{
    *out = (pdk_run_result){ .status = -1 };
    pdk_ns deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(seconds));
    __attribute__((cleanup(run_leave))) run r = { .out = { .fd = -1 }, .err = { .fd = -1 }, .in = -1, .data = in, .left = in_len };
    if (run_start(&r, spec, in_len > 0, err) < 0) return -1;
    bool truncated = false;
    if (run_pump_quiet(&r, max, deadline, spec->argv[0], &truncated, err) < 0) return -1;
    if (run_end(&r, deadline, spec->argv[0], &out->status, err) < 0) return -1;
    out->out_len = r.out.len, out->err_len = r.err.len, out->truncated = truncated;
    capture *both[] = { &r.out, &r.err };
    char **to[] = { &out->out, &out->err };
    for (size_t i = 0; i < 2; i++) {
        *to[i] = both[i]->data != NULL ? both[i]->data : calloc(1, 1);
        both[i]->data = NULL;
        if (*to[i] == NULL) {
            pdk_run_result_free(out);
            return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the output of %s", spec->argv[0]);
        }
        (*to[i])[both[i]->len] = 0;
    }
    return 0;
}

/* ---- locks -------------------------------------------------------------------------------------------------- */

int pdk_lock_range(int fd, short type, int64_t start, int64_t len, pdk_error *err)
{
    struct flock l = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len };
    while (fcntl(fd, F_OFD_SETLK, &l) < 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EACCES) return 0;
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot lock byte %lld of descriptor %d", (long long)start, fd);
    }
    return 1;
}

int pdk_lock_test(int fd, short type, int64_t start, int64_t len, pdk_error *err)
{
    struct flock l = { .l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = len };
    if (fcntl(fd, F_OFD_GETLK, &l) < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot ask for the lock on byte %lld of descriptor %d", (long long)start, fd);
    return l.l_type != F_UNLCK;
}
