/* signals.c -- see signals.h.
 * Lock: `all.lock` guards the list of runtimes and the installed handlers. It is held across a shutdown or a reload that a signal
 * asked for, so that no runtime goes away under it: it is taken by add, remove and the signal's own work only, never by a call
 * that a shutdown waits for. */
#include "signals.h"
#include "sync.h"

#include <errno.h>
#include <fcntl.h>
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
    pdk_mutex lock;
    member *members;                 /* lock */
    bool installed[TAKEN];           /* lock */
    struct sigaction before[TAKEN];  /* lock */
    bool thread_runs;                /* lock */
    pdk_thread thread;               /* lock */
    atomic_bool handled_elsewhere;
    atomic_int write_end, read_end;  /* of the pipe; made once, kept for the process's life: a handler may be on its way */
} all = { .lock = { PTHREAD_MUTEX_INITIALIZER }, .write_end = -1, .read_end = -1 };

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

/* Gives the signal to whoever had it before us. */
static void pass_on(int number) PDK_REQUIRES(all.lock)
{
    int i = index_of(number);
    if (i < 0 || !all.installed[i])
        return;
    struct sigaction before = all.before[i];
    if (before.sa_flags & SA_SIGINFO) {
        siginfo_t info;
        memset(&info, 0, sizeof info);
        info.si_signo = number;
        info.si_code = SI_USER;
        before.sa_sigaction(number, &info, NULL);
    } else if (before.sa_handler == SIG_DFL) {
        sigaction(number, &before, NULL);
        all.installed[i] = false;
        kill(getpid(), number);
    } else if (before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    }
}

static void act(int number)
{
    PDK_GUARD(all.lock);
    for (member *m = all.members; m != NULL; m = m->next) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (number == SIGHUP)
            pdk_runtime_reload(m->rt, &err); /* both say in the log what went wrong */
        else
            pdk_runtime_shutdown(m->rt, &err);
    }
    if (number != SIGHUP)
        pass_on(number);
}

void pdk_signals_poll(void)
{
    unsigned char byte;
    int fd = atomic_load(&all.read_end);
    bool own_thread;
    {
        PDK_GUARD(all.lock);
        own_thread = all.thread_runs;
    }
    if (own_thread || fd < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
        return;
    while (read(fd, &byte, 1) == 1 && byte != 0)
        act(byte);
}

static void *signal_main(void *arg)
{
    (void)arg;
    unsigned char byte;
    for (;;) {
        ssize_t n = read(atomic_load(&all.read_end), &byte, 1);
        if (n == 1 && byte != 0)
            act(byte);
        else if (n == 1 || (n < 0 && errno != EINTR)) /* 0 = end */
            return NULL;
    }
}

static int open_pipe(pdk_error *err)
{
    int fds[2];
    if (atomic_load(&all.read_end) >= 0)
        return 0;
    if (pipe2(fds, O_CLOEXEC) < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot make a pipe for signals");
    fcntl(fds[1], F_SETFL, O_NONBLOCK);
    atomic_store(&all.write_end, fds[1]);
    atomic_store(&all.read_end, fds[0]);
    return 0;
}

static int install(bool threads, pdk_error *err) PDK_REQUIRES(all.lock)
{
    if (open_pipe(err) < 0)
        return -1;
    if (threads && !all.thread_runs) {
        fcntl(atomic_load(&all.read_end), F_SETFL, 0);
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
    PDK_GUARD(all.lock);
    if (install(threads, err) < 0) {
        free(m);
        return -1;
    }
    m->next = all.members;
    all.members = m;
    return 0;
}

void pdk_signals_remove(pdk_runtime *rt)
{
    bool stop_thread = false;
    {
        PDK_GUARD(all.lock);
        for (member **at = &all.members; *at != NULL; at = &(*at)->next)
            if ((*at)->rt == rt) {
                member *gone = *at;
                *at = gone->next;
                free(gone);
                break;
            }
        if (all.members != NULL)
            return;
        for (size_t i = 0; i < TAKEN; i++) {
            struct sigaction now;
            /* somebody who put a handler over ours since keeps it */
            if (all.installed[i] && sigaction(taken[i], NULL, &now) == 0 && now.sa_handler == on_signal)
                sigaction(taken[i], &all.before[i], NULL);
            all.installed[i] = false;
        }
        stop_thread = all.thread_runs;
        all.thread_runs = false;
    }
    unsigned char zero = 0;
    if (stop_thread && write(atomic_load(&all.write_end), &zero, 1) == 1)
        pdk_thread_join(&all.thread);
}
