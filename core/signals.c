/* signals.c -- see signals.h.
 * Locks, in this order:
 *   life  one add or remove at a time, the start and the end of the thread included
 *   lock  the list of runtimes and the installed handlers. It is held across a shutdown or a reload that a signal asked for, so that
 *         no runtime goes away under it: it is taken by add, remove and the signal's own work only, never by a call that a shutdown
 *         waits for. It is not held while the handler from before ours runs, which may do anything, a pdk_free included. */
#include "signals.h"
#include "sync.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const int taken[] = { SIGTERM, SIGINT, SIGHUP };
#define TAKEN (sizeof taken / sizeof *taken)

typedef struct member {
    struct member *next;
    pdk_runtime *rt;
} member;

static struct {
    pdk_mutex life, lock;
    member *members;                 /* lock */
    bool installed[TAKEN];           /* lock */
    struct sigaction before[TAKEN];  /* lock */
    bool thread_runs;                /* lock; until it is joined: nobody else reads the pipe meanwhile */
    pdk_thread thread;               /* life */
    uint64_t thread_self;            /* lock; pdk_thread_self() of it */
    atomic_bool handled_elsewhere;
    atomic_int write_end, read_end;  /* of the pipe; made once, kept for the process's life: a handler may be on its way */
} all = { .life = { PTHREAD_MUTEX_INITIALIZER }, .lock = { PTHREAD_MUTEX_INITIALIZER }, .write_end = -1, .read_end = -1 };

void pdk_signals_are_handled(void)
{
    atomic_store(&all.handled_elsewhere, true);
}

static void on_signal(int number)
{
    int saved = errno;
    unsigned char byte = (unsigned char)number;
    ssize_t ignored = write(atomic_load(&all.write_end), &byte, 1); /* full: enough of them wait already */
    (void)ignored;
    errno = saved;
}

static int index_of(int number)
{
    for (size_t i = 0; i < TAKEN; i++)
        if (taken[i] == number)
            return (int)i;
    return -1;
}

/* The handler from before ours, when it is a function; a default disposition is put back and raised again here, and so is a signal
 * that came as our handlers went. */
static struct sigaction former(int number) PDK_REQUIRES(all.lock)
{
    struct sigaction none = { .sa_handler = SIG_IGN };
    int i = index_of(number); /* only what was installed gets into the pipe */
    if (i >= 0 && !all.installed[i])
        kill(getpid(), number);
    if (i < 0 || !all.installed[i])
        return none;
    struct sigaction before = all.before[i];
    if ((before.sa_flags & SA_SIGINFO) != 0 || before.sa_handler != SIG_DFL)
        return before;
    sigaction(number, &before, NULL);
    all.installed[i] = false;
    kill(getpid(), number);
    return none;
}

static void pass_on(int number, const struct sigaction *before)
{
    if (before->sa_flags & SA_SIGINFO) {
        siginfo_t info;
        memset(&info, 0, sizeof info);
        info.si_signo = number;
        info.si_code = SI_USER;
        before->sa_sigaction(number, &info, NULL);
    } else if (before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    }
}

static void act(int number)
{
    struct sigaction before = { .sa_handler = SIG_IGN };
    {
        PDK_GUARD(all.lock);
        for (member *m = all.members; m != NULL; m = m->next) {
            PDK_AUTO_ERROR err = PDK_NO_ERROR;
            if (number == SIGHUP)
                pdk_runtime_reload(m->rt, &err); /* both say in the log what went wrong */
            else
                pdk_runtime_shutdown(m->rt, &err);
        }
        if (number != SIGHUP || all.members == NULL)
            before = former(number);
    }
    pass_on(number, &before);
}

/* The next signal for a caller without a thread of ours, 0 = none. */
static int waiting_signal(void)
{
    unsigned char byte = 0;
    int fd = atomic_load(&all.read_end);
    PDK_GUARD(all.lock);
    return fd < 0 || all.thread_runs || read(fd, &byte, 1) != 1 ? 0 : byte;
}

void pdk_signals_poll(void)
{
    for (int number; (number = waiting_signal()) != 0;)
        act(number);
}

static void *signal_main(void *arg)
{
    (void)arg;
    struct pollfd p = { .fd = atomic_load(&all.read_end), .events = POLLIN };
    {
        PDK_GUARD(all.lock);
        all.thread_self = pdk_thread_self();
    }
    for (;;) {
        unsigned char byte;
        if (poll(&p, 1, -1) < 0 || read(p.fd, &byte, 1) != 1)
            continue; /* EINTR, EAGAIN: both ends stay open for the process's life */
        if (byte == 0)
            return NULL;
        act(byte);
    }
}

/* In a forked child nothing of this is left: a signal that the child gets is the child's, not its parent's. */
static void forget_parent(void)
{
    for (size_t i = 0; i < TAKEN; i++) {
        struct sigaction now;
        if (all.installed[i] && sigaction(taken[i], NULL, &now) == 0 && now.sa_handler == on_signal)
            sigaction(taken[i], &all.before[i], NULL);
        all.installed[i] = false;
    }
    if (atomic_load(&all.read_end) >= 0) {
        close(atomic_load(&all.read_end));
        close(atomic_load(&all.write_end));
    }
    atomic_store(&all.read_end, -1);
    atomic_store(&all.write_end, -1);
    all.members = NULL;
    all.thread_runs = false;
    all.thread_self = 0;
    pdk_mutex_init(&all.life); /* a thread that the fork left behind may have held them */
    pdk_mutex_init(&all.lock);
}

static int open_pipe(pdk_error *err)
{
    static bool told; /* lock */
    int fds[2];
    int rc = told ? 0 : pthread_atfork(NULL, NULL, forget_parent);
    if (rc != 0)
        return pdk_fail(err, PDK_E_NO_MEMORY, rc, "no memory to handle signals");
    told = true;
    if (atomic_load(&all.read_end) >= 0)
        return 0;
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot make a pipe for signals");
    atomic_store(&all.write_end, fds[1]);
    atomic_store(&all.read_end, fds[0]);
    return 0;
}

static int install(bool threads, pdk_error *err) PDK_REQUIRES(all.life) PDK_REQUIRES(all.lock)
{
    if (open_pipe(err) < 0)
        return -1;
    if (threads && !all.thread_runs) {
        int rc = pdk_thread_start(&all.thread, "pdk-signals", signal_main, NULL);
        if (rc != 0)
            return pdk_fail(err, PDK_E_NO_MEMORY, rc, "cannot start the thread for signals");
        all.thread_runs = true;
    }
    struct sigaction ours = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    sigfillset(&ours.sa_mask);
    for (size_t i = 0; i < TAKEN; i++) {
        if (all.installed[i] || sigaction(taken[i], NULL, &all.before[i]) < 0)
            continue;
        bool ignored = !(all.before[i].sa_flags & SA_SIGINFO) && all.before[i].sa_handler == SIG_IGN;
        all.installed[i] = !ignored && sigaction(taken[i], &ours, NULL) == 0;
    }
    return 0;
}

int pdk_signals_add(pdk_runtime *rt, bool threads, pdk_error *err)
{
    if (atomic_load(&all.handled_elsewhere))
        return 0;
    member *m = calloc(1, sizeof *m);
    if (m == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to handle signals");
    m->rt = rt;
    PDK_GUARD(all.life);
    PDK_GUARD(all.lock);
    if (install(threads, err) < 0) {
        free(m);
        return -1;
    }
    m->next = all.members;
    all.members = m;
    return 0;
}

/* Takes the runtime off the list. Whether it was the last one: then its handlers are gone, and the thread, if one runs, shall end. */
static bool take_off(pdk_runtime *rt, bool *thread)
{
    PDK_GUARD(all.lock);
    bool found = false;
    for (member **at = &all.members; *at != NULL && !found;) {
        member *m = *at;
        found = m->rt == rt;
        if (found) {
            *at = m->next;
            free(m);
        } else {
            at = &m->next;
        }
    }
    if (!found || all.members != NULL)
        return false;
    for (size_t i = 0; i < TAKEN; i++) {
        struct sigaction now;
        /* somebody who put a handler over ours since keeps it */
        if (all.installed[i] && sigaction(taken[i], NULL, &now) == 0 && now.sa_handler == on_signal)
            sigaction(taken[i], &all.before[i], NULL);
        all.installed[i] = false;
    }
    unsigned char byte;
    while (!all.thread_runs && read(atomic_load(&all.read_end), &byte, 1) == 1 && byte != 0)
        kill(getpid(), byte); /* nobody has looked at it yet */
    /* a handler that frees the runtime runs on that thread: it goes on, for the next runtime */
    *thread = all.thread_runs && all.thread_self != pdk_thread_self();
    return true;
}

void pdk_signals_remove(pdk_runtime *rt)
{
    bool thread = false;
    unsigned char zero = 0;
    PDK_GUARD(all.life);
    if (!take_off(rt, &thread) || !thread)
        return;
    /* a full pipe: the signals in it are worked off first, which with no runtime left is soon done */
    while (write(atomic_load(&all.write_end), &zero, 1) != 1)
        pdk_sleep_ns(PDK_NS_PER_S / 1000);
    pdk_thread_join(&all.thread);
    PDK_GUARD(all.lock);
    all.thread_runs = false;
    all.thread_self = 0;
}
