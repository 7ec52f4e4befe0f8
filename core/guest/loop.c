/* loop.c -- the one thread: epoll, timers on CLOCK_BOOTTIME, signals.
 * Why a timerfd and not epoll's timeout: epoll counts CLOCK_MONOTONIC, which stands still while the machine sleeps, and the
 * orphan clock must not. Nothing here wakes up unless something is due: an idle sandbox costs no cpu.
 * Always true: a dropped watch is never called again, also not for an event of the batch being worked on. */
#include "priv.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define BATCH 64

static int epoll_fd = -1;
static int64_t now_ns;
static guest_timer *timers; /* sorted: the earliest first */
static int64_t timer_set;   /* what timer_watch is set to; 0 = not set */
static guest_watch timer_watch, signal_watch;
static struct epoll_event batch[BATCH];
static int batch_at, batch_n; /* events of the batch not yet delivered: batch[batch_at .. batch_n) */

int64_t guest_now(void)
{
    return now_ns;
}

void guest_now_update(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_BOOTTIME, &ts);
    now_ns = (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int guest_watch_set(guest_watch *w, uint32_t events)
{
    struct epoll_event ev = { .events = events, .data.ptr = w };
    if (w->armed && w->events == events)
        return 0;
    if (epoll_ctl(epoll_fd, w->armed ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, w->fd, &ev) < 0)
        return -1;
    w->armed = true;
    w->events = events;
    return 0;
}

void guest_watch_drop(guest_watch *w)
{
    if (!w->armed)
        return;
    epoll_ctl(epoll_fd, EPOLL_CTL_DEL, w->fd, NULL);
    w->armed = false;
    for (int i = batch_at; i < batch_n; i++)
        if (batch[i].data.ptr == w)
            batch[i].data.ptr = NULL;
}

void guest_watch_close(guest_watch *w)
{
    guest_watch_drop(w);
    if (w->fd >= 0)
        close(w->fd);
    w->fd = -1;
}

void guest_timer_stop(guest_timer *t)
{
    if (t->link == NULL)
        return;
    *t->link = t->next;
    if (t->next != NULL)
        t->next->link = t->link;
    t->next = NULL;
    t->link = NULL;
}

void guest_timer_in(guest_timer *t, double seconds, void (*fn)(guest_timer *), void *ctx)
{
    guest_timer_stop(t);
    t->fn = fn;
    t->ctx = ctx;
    t->due = now_ns + (int64_t)((seconds < 4e9 ? seconds : 4e9) * 1e9);
    guest_timer **at = &timers;
    while (*at != NULL && (*at)->due <= t->due)
        at = &(*at)->next;
    t->next = *at;
    t->link = at;
    if (t->next != NULL)
        t->next->link = &t->next;
    *at = t;
}

/* Fires what is due now. A timer armed by a callback waits for the next round, so that this ends. */
static void timers_run(void)
{
    int64_t until = now_ns;
    for (int guard = 0; timers != NULL && timers->due <= until && guard < 10000; guard++) {
        guest_timer *t = timers;
        guest_timer_stop(t);
        t->fn(t);
    }
}

static void timers_program(void)
{
    int64_t due = timers != NULL ? timers->due : 0;
    if (due == timer_set)
        return;
    struct itimerspec spec = { { 0, 0 }, { due / 1000000000, due % 1000000000 } };
    timerfd_settime(timer_watch.fd, TFD_TIMER_ABSTIME, &spec, NULL);
    timer_set = due;
}

static void on_timer(guest_watch *w, uint32_t events)
{
    (void)events;
    uint64_t count;
    ssize_t n = read(w->fd, &count, sizeof count);
    (void)n;
    timer_set = 0;
}

static void on_signal(guest_watch *w, uint32_t events)
{
    (void)events;
    struct signalfd_siginfo si;
    while (read(w->fd, &si, sizeof si) == (ssize_t)sizeof si) {
        if (si.ssi_signo == SIGCHLD)
            continue;
        /* Pid 1's own sandbox must not be able to end it: a sender inside has a pid here, one outside has none. */
        if (getpid() != 1 || si.ssi_pid == 0)
            guest_exit(0);
    }
    guest_reap();
}

int guest_loop_init(void)
{
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    sigaddset(&mask, SIGTERM);
    sigaddset(&mask, SIGINT);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal_watch = (guest_watch){ .fd = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK), .fn = on_signal };
    timer_watch = (guest_watch){ .fd = timerfd_create(CLOCK_BOOTTIME, TFD_CLOEXEC | TFD_NONBLOCK), .fn = on_timer };
    guest_now_update();
    if (epoll_fd < 0 || guest_watch_set(&signal_watch, EPOLLIN) < 0 || guest_watch_set(&timer_watch, EPOLLIN) < 0)
        return -1;
    return 0;
}

void guest_loop_run(void)
{
    for (;;) {
        timers_program();
        int n = epoll_wait(epoll_fd, batch, BATCH, -1);
        guest_now_update();
        batch_n = n > 0 ? n : 0;
        for (batch_at = 0; batch_at < batch_n;) {
            struct epoll_event ev = batch[batch_at++];
            guest_watch *w = ev.data.ptr;
            if (w != NULL)
                w->fn(w, ev.events);
        }
        batch_n = batch_at = 0;
        timers_run();
        guest_http_flush();
    }
}
