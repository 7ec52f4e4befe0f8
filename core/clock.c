/* clock.c -- a runtime's clock. A manual one is a number that only grows; its waits look at it in short slices of real
 * time, since it moves by calls from any thread. */
#include "clock.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#define MANUAL_START (1000 * PDK_NS_PER_S)
#define MANUAL_SLICE (2 * 1000 * 1000) /* ns: how late a waiter may notice an advance */

struct pdk_clock {
    pdk_clock_type type; /* fixed at birth */
    bool threads;        /* fixed at birth */
    atomic_int_least64_t now, wall; /* manual only */
};

pdk_clock *pdk_clock_new(pdk_clock_type type, bool threads)
{
    pdk_clock *c = calloc(1, sizeof *c);
    if (c == NULL)
        return NULL;
    c->type = type;
    c->threads = threads;
    atomic_init(&c->now, MANUAL_START);
    atomic_init(&c->wall, pdk_now_wall());
    return c;
}

void pdk_clock_free(pdk_clock *c)
{
    free(c);
}

bool pdk_clock_is_manual(const pdk_clock *c)
{
    return c->type == PDK_CLOCK_MANUAL;
}

pdk_ns pdk_clock_now(pdk_clock *c)
{
    switch (c->type) {
    case PDK_CLOCK_MONOTONIC: return pdk_now_monotonic();
    case PDK_CLOCK_BOOTTIME: return pdk_now_boottime();
    case PDK_CLOCK_MANUAL: break;
    }
    return atomic_load(&c->now);
}

pdk_ns pdk_clock_wall(pdk_clock *c)
{
    return c->type == PDK_CLOCK_MANUAL ? atomic_load(&c->wall) : pdk_now_wall();
}

static void move_to(pdk_clock *c, pdk_ns target)
{
    int_least64_t now = atomic_load(&c->now);
    while (target > now && !atomic_compare_exchange_weak(&c->now, &now, target))
        ;
}

void pdk_clock_advance(pdk_clock *c, double s, double wall_s)
{
    if (c->type != PDK_CLOCK_MANUAL)
        return;
    move_to(c, pdk_after(atomic_load(&c->now), pdk_seconds(s)));
    if (isfinite(wall_s) && fabs(wall_s) < 1e9)
        atomic_fetch_add(&c->wall, (int_least64_t)(wall_s * 1e9));
}

bool pdk_clock_wait(pdk_clock *c, pdk_cond *cond, pdk_mutex *m, pdk_ns deadline)
{
    switch (c->type) {
    case PDK_CLOCK_MONOTONIC:
        return pdk_cond_wait_until(cond, m, deadline);
    case PDK_CLOCK_BOOTTIME: {
        if (deadline == PDK_NEVER)
            return pdk_cond_wait_until(cond, m, PDK_NEVER);
        /* a condition cannot wait on the boot clock: wait for what is left, and look again after a suspend */
        pdk_ns left = deadline - pdk_now_boottime();
        if (left <= 0)
            return false;
        pdk_ns slice = left < PDK_NS_PER_S ? left : PDK_NS_PER_S;
        return pdk_cond_wait_until(cond, m, pdk_now_monotonic() + slice) || slice < left;
    }
    case PDK_CLOCK_MANUAL:
        break;
    }
    if (atomic_load(&c->now) >= deadline)
        return false;
    if (!c->threads && deadline != PDK_NEVER) {
        move_to(c, deadline);
        return false;
    }
    pdk_cond_wait_until(cond, m, pdk_now_monotonic() + MANUAL_SLICE);
    return true; /* the caller looks again */
}

pdk_ns pdk_seconds(double s)
{
    if (isnan(s) || s <= 0)
        return 0;
    return s >= 9e9 ? PDK_NEVER : (pdk_ns)(s * 1e9);
}

double pdk_to_seconds(pdk_ns ns)
{
    return (double)ns / 1e9;
}

pdk_ns pdk_after(pdk_ns now, pdk_ns duration)
{
    return duration >= PDK_NEVER - (now > 0 ? now : 0) ? PDK_NEVER : now + duration;
}
