/* descriptors.c -- see descriptors.h.
 * Lock: `lock`, a leaf, held for moments; when the budget is full, also while the open descriptors are counted (at most ten times a
 * second). */
#include "descriptors.h"
#include "op.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#define RESERVE     64                      /* for the host, and for what nobody takes: records, locks, logs */
#define COUNT_AGAIN (PDK_NS_PER_S / 10)
#define SLICE       (20 * 1000 * 1000)      /* ns: how late a cancel may be noticed */

static pdk_mutex lock = { PTHREAD_MUTEX_INITIALIZER };
static pdk_cond given = { PTHREAD_COND_INITIALIZER };
static bool clocked;        /* lock; `given` has been made anew, on the monotonic clock */
static int taken;           /* lock */
static int elsewhere;       /* lock; open, and taken by nobody, when they were counted last */
static pdk_ns counted_at;   /* lock; 0 = never */
static int pretended;       /* lock */

static _Thread_local int covered; /* how many of its takers stand around this thread's own */

void pdk_descriptors_cover(bool on)
{
    covered += on ? 1 : -1;
}

static int open_now(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n - 3; /* ".", ".." and d's own */
}

static int limit_now(void)
{
    struct rlimit r;
    if (pretended > 0)
        return pretended;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0 || r.rlim_cur > 1 << 24)
        return 1 << 24;
    return (int)r.rlim_cur;
}

/* How much of it the calling thread's kind of work may use. */
static int share_of(int budget)
{
    switch (pdk_op_class()) {
    case PDK_WORK_ACQUIRE: return budget / 4 * 3;
    case PDK_WORK_EXEC: return budget / 8 * 7;
    default: return budget;
    }
}

static bool fits(int n) PDK_REQUIRES(lock)
{
    int budget = limit_now() - RESERVE - elsewhere;
    return taken == 0 || taken + n <= share_of(budget);
}

static void count(pdk_ns now) PDK_REQUIRES(lock)
{
    if (counted_at != 0 && now - counted_at < COUNT_AGAIN)
        return;
    counted_at = now;
    elsewhere = open_now() - taken; /* what is taken may not be open yet, or kept open in a pool: then a little more is left */
    if (elsewhere < 0)
        elsewhere = 0;
}

int pdk_descriptors_take(int n, const pdk_limit *limit, pdk_ns deadline, pdk_error *err)
{
    if (covered > 0)
        return 0;
    PDK_GUARD(lock);
    if (!clocked) {
        pdk_cond_init(&given);
        clocked = true;
    }
    for (;;) {
        pdk_ns now = pdk_now_monotonic();
        if (counted_at == 0 || !fits(n))
            count(now);
        if (fits(n)) {
            taken += n;
            return 0;
        }
        if (pdk_limit_cancelled(limit))
            return pdk_fail(err, PDK_E_CANCELLED, 0, "cancelled while it waited for descriptors");
        if (now >= limit->deadline)
            return pdk_fail(err, PDK_E_TIMEOUT, 0, "the operation's time limit passed while it waited for descriptors (%d are taken)", taken);
        if (now >= deadline)
            return pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "no_descriptors",
                                   "no descriptors were free in time (%d are taken): raise the limit of open files (ulimit -n)", taken);
        pdk_ns until = limit->deadline < deadline ? limit->deadline : deadline;
        pdk_cond_wait_until(&given, &lock, until - now > SLICE ? now + SLICE : until);
    }
}

void pdk_descriptors_give(int n)
{
    if (covered > 0)
        return;
    PDK_GUARD(lock);
    taken -= n;
    pdk_cond_broadcast(&given);
}

void pdk_descriptors_pretend(int limit)
{
    PDK_GUARD(lock);
    pretended = limit;
    counted_at = 0;
}

int pdk_descriptors_taken(void)
{
    PDK_GUARD(lock);
    return taken;
}
