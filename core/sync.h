/* sync.h -- every blocking or nondeterministic primitive that the core uses: mutex, condition, thread, sleep,
 * clock reading, random bytes.
 *
 * Why one file: a test build can then run the same core on fibers under a seeded scheduler. Nothing else in
 * core/ (the guest apart) may call pthread_*, clock_gettime, nanosleep or getrandom.
 *
 * Guards: PDK_GUARD(m) locks `m` until the end of the scope, on every way out but a longjmp: never raise a Lua
 * error inside one. With clang, -Wthread-safety checks PDK_REQUIRES and the guards.
 */
#ifndef PDK_SYNC_H
#define PDK_SYNC_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#if defined(__clang__)
#define PDK_TSA(x) __attribute__((x))
#else
#define PDK_TSA(x)
#endif
#define PDK_CAPABILITY(name) PDK_TSA(capability(name))
#define PDK_ACQUIRES(...) PDK_TSA(acquire_capability(__VA_ARGS__))
#define PDK_RELEASES(...) PDK_TSA(release_capability(__VA_ARGS__))
#define PDK_REQUIRES(...) PDK_TSA(requires_capability(__VA_ARGS__))
#define PDK_ASSERTS(...) PDK_TSA(assert_capability(__VA_ARGS__))
#define PDK_NO_TSA PDK_TSA(no_thread_safety_analysis)

typedef int64_t pdk_ns; /* nanoseconds; a duration or a point on some clock */
#define PDK_NS_PER_S INT64_C(1000000000)
#define PDK_NEVER INT64_MAX

typedef struct PDK_CAPABILITY("mutex") pdk_mutex {
    pthread_mutex_t m;
} pdk_mutex;

typedef struct pdk_cond {
    pthread_cond_t c; /* timed on CLOCK_MONOTONIC */
} pdk_cond;

void pdk_mutex_init(pdk_mutex *m);
void pdk_mutex_destroy(pdk_mutex *m);
void pdk_lock(pdk_mutex *m) PDK_ACQUIRES(*m);
void pdk_unlock(pdk_mutex *m) PDK_RELEASES(*m);

void pdk_cond_init(pdk_cond *c);
void pdk_cond_destroy(pdk_cond *c);
void pdk_cond_wait(pdk_cond *c, pdk_mutex *m) PDK_REQUIRES(*m);
/* Until signalled or `deadline` on the real monotonic clock (PDK_NEVER = no limit); false when it passed.
 * Wakes up without cause now and then: always wait in a loop. */
bool pdk_cond_wait_until(pdk_cond *c, pdk_mutex *m, pdk_ns deadline) PDK_REQUIRES(*m);
void pdk_cond_signal(pdk_cond *c);
void pdk_cond_broadcast(pdk_cond *c);

static inline void pdk_guard_leave(pdk_mutex **m) PDK_NO_TSA
{
    pdk_unlock(*m);
}
static inline void pdk_guard_held(pdk_mutex *m) PDK_ASSERTS(*m) PDK_NO_TSA
{
    (void)m;
}
static inline pdk_mutex *pdk_guard_enter(pdk_mutex *m) PDK_NO_TSA
{
    pdk_lock(m);
    return m;
}
#define PDK_CAT2(a, b) a##b
#define PDK_CAT(a, b) PDK_CAT2(a, b)
#define PDK_GUARD(mutex)                                                                                     \
    __attribute__((cleanup(pdk_guard_leave), unused)) pdk_mutex *PDK_CAT(pdk_guard_, __LINE__) =             \
        pdk_guard_enter(&(mutex));                                                                           \
    pdk_guard_held(&(mutex))

/* Threads have 1 MiB of stack and all signals blocked. 0 or errno. */
typedef struct pdk_thread {
    pthread_t t;
} pdk_thread;
int pdk_thread_start(pdk_thread *t, const char *name, void *(*fn)(void *), void *arg);
int pdk_thread_start_detached(const char *name, void *(*fn)(void *), void *arg);
void pdk_thread_join(pdk_thread *t);
/* For a thread that nobody can join: itself. */
void pdk_thread_detach(pdk_thread *t);
uint64_t pdk_thread_self(void); /* a number of this thread; never 0 */
/* getpid() without a system call (140 ns where it was measured): for every "is this still the process that made it?". */
pid_t pdk_process_id(void);
/* Bytes of stack left below the caller's frame. */
size_t pdk_stack_left(void);

pdk_ns pdk_now_monotonic(void);
pdk_ns pdk_now_boottime(void);
pdk_ns pdk_now_wall(void); /* since 1970; for records only, never for a duration */
pdk_ns pdk_now_cpu(void);  /* processor time that the calling thread has used */
void pdk_sleep_ns(pdk_ns duration);
/* Fills `buf` from the kernel's random source; aborts if there is none. */
void pdk_random(void *buf, size_t len);

#endif
