/* sync.c -- the real implementation of sync.h, on pthreads. */
#include "sync.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define STACK_SIZE ((size_t)8 << 20) /* a sanitizer takes three quarters of 1 MiB for itself, and its frames are larger */
#else
#define STACK_SIZE ((size_t)1 << 20)
#endif

static void must(int rc, const char *what)
{
    if (rc != 0) { /* a misused lock: going on would corrupt what it guards */
        fprintf(stderr, "paddock: %s failed (%d)\n", what, rc);
        abort();
    }
}

void pdk_mutex_init(pdk_mutex *m)
{
    must(pthread_mutex_init(&m->m, NULL), "mutex_init");
}
void pdk_mutex_destroy(pdk_mutex *m)
{
    pthread_mutex_destroy(&m->m);
}
void pdk_lock(pdk_mutex *m) PDK_NO_TSA
{
    must(pthread_mutex_lock(&m->m), "mutex_lock");
}
void pdk_unlock(pdk_mutex *m) PDK_NO_TSA
{
    must(pthread_mutex_unlock(&m->m), "mutex_unlock");
}

void pdk_cond_init(pdk_cond *c)
{
    pthread_condattr_t attr;
    must(pthread_condattr_init(&attr), "condattr_init");
    must(pthread_condattr_setclock(&attr, CLOCK_MONOTONIC), "condattr_setclock");
    must(pthread_cond_init(&c->c, &attr), "cond_init");
    pthread_condattr_destroy(&attr);
}
void pdk_cond_destroy(pdk_cond *c)
{
    pthread_cond_destroy(&c->c);
}
void pdk_cond_wait(pdk_cond *c, pdk_mutex *m) PDK_NO_TSA
{
    must(pthread_cond_wait(&c->c, &m->m), "cond_wait");
}

static struct timespec timespec_of(pdk_ns t)
{
    if (t < 0)
        t = 0;
    return (struct timespec){ .tv_sec = t / PDK_NS_PER_S, .tv_nsec = (long)(t % PDK_NS_PER_S) };
}

bool pdk_cond_wait_until(pdk_cond *c, pdk_mutex *m, pdk_ns deadline) PDK_NO_TSA
{
    if (deadline == PDK_NEVER) {
        pdk_cond_wait(c, m);
        return true;
    }
    struct timespec ts = timespec_of(deadline);
    int rc = pthread_cond_timedwait(&c->c, &m->m, &ts);
    if (rc == ETIMEDOUT)
        return false;
    must(rc, "cond_timedwait");
    return true;
}
void pdk_cond_signal(pdk_cond *c)
{
    must(pthread_cond_signal(&c->c), "cond_signal");
}
void pdk_cond_broadcast(pdk_cond *c)
{
    must(pthread_cond_broadcast(&c->c), "cond_broadcast");
}

int pdk_thread_start(pdk_thread *t, const char *name, void *(*fn)(void *), void *arg)
{
    pthread_attr_t attr;
    int rc = pthread_attr_init(&attr);
    if (rc != 0)
        return rc;
    pthread_attr_setstacksize(&attr, STACK_SIZE);
    sigset_t all, before; /* the host's signals are the host's: none of our threads may take one */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&t->t, &attr, fn, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (rc == 0)
        pthread_setname_np(t->t, name);
    return rc;
}
int pdk_thread_start_detached(const char *name, void *(*fn)(void *), void *arg)
{
    pdk_thread t;
    int rc = pdk_thread_start(&t, name, fn, arg);
    if (rc == 0)
        pdk_thread_detach(&t);
    return rc;
}
void pdk_thread_join(pdk_thread *t)
{
    must(pthread_join(t->t, NULL), "thread_join");
}
void pdk_thread_detach(pdk_thread *t)
{
    must(pthread_detach(t->t), "thread_detach");
}

static _Thread_local char self_mark;
uint64_t pdk_thread_self(void)
{
    return (uint64_t)(uintptr_t)&self_mark;
}

/* A page that the kernel empties in a forked child, however it was forked; 0 there = not asked yet. NULL = no such page. */
static _Atomic(atomic_int *) process_page;

static atomic_int *make_process_page(void)
{
    size_t size = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return NULL;
    atomic_int *none = NULL;
    if (madvise(page, size, MADV_WIPEONFORK) == 0 && atomic_compare_exchange_strong(&process_page, &none, (atomic_int *)page))
        return page;
    munmap(page, size);
    return none; /* another thread's, or none */
}

pid_t pdk_process_id(void)
{
    atomic_int *page = atomic_load_explicit(&process_page, memory_order_acquire);
    pid_t pid = page == NULL ? 0 : atomic_load_explicit(page, memory_order_relaxed);
    if (pid != 0)
        return pid;
    pid = getpid();
    if (page == NULL)
        page = make_process_page();
    if (page != NULL)
        atomic_store_explicit(page, pid, memory_order_relaxed);
    return pid;
}

size_t pdk_stack_left(void)
{
    static _Thread_local char *lowest; /* asking costs a file read on the main thread: once per thread */
    if (lowest == NULL) {
        pthread_attr_t attr;
        void *base = NULL;
        size_t size = 0;
        if (pthread_getattr_np(pthread_self(), &attr) != 0)
            return 0;
        pthread_attr_getstack(&attr, &base, &size);
        pthread_attr_destroy(&attr);
        lowest = base;
    }
    /* not a local's address: AddressSanitizer may keep locals elsewhere */
    uintptr_t at = (uintptr_t)__builtin_frame_address(0), low = (uintptr_t)lowest;
    return at > low ? at - low : 0;
}

static pdk_ns read_clock(clockid_t id)
{
    struct timespec ts;
    if (clock_gettime(id, &ts) != 0)
        must(errno, "clock_gettime");
    return (pdk_ns)ts.tv_sec * PDK_NS_PER_S + ts.tv_nsec;
}
pdk_ns pdk_now_monotonic(void)
{
    return read_clock(CLOCK_MONOTONIC);
}
pdk_ns pdk_now_boottime(void)
{
    return read_clock(CLOCK_BOOTTIME);
}
pdk_ns pdk_now_wall(void)
{
    return read_clock(CLOCK_REALTIME);
}
pdk_ns pdk_now_cpu(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

void pdk_sleep_ns(pdk_ns duration)
{
    struct timespec ts = timespec_of(duration);
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &ts, &ts) == EINTR)
        ;
}

void pdk_random(void *buf, size_t len)
{
    unsigned char *p = buf;
    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            must(errno, "getrandom");
        p += n;
        len -= (size_t)n;
    }
}
