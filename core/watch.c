/* watch.c -- a backend that hears of deaths tells them at once (its optional function `watch`), so that nobody has to ask.
 *
 * One thread of the runtime's own sits in that function: it answers with what has died, or with nothing when its time is over or
 * its stream is lost. A death is a hint, never a verdict: the sandbox's health is no longer trusted, and an unheld one is torn
 * down as any other dead one, behind its fences. What is held is left to its holders, whose next command says `lost`.
 * Locks: the life lock for the thread's own state, the registry for moments. */
#include "core.h"

#include <string.h>

#define TURN      300.0 /* seconds for one call, at most: a connection that died without a word is noticed by then */
#define TURN_WAIT 0.1  /* seconds for the id's turn */
#define BACK_OFF  5.0   /* seconds between calls that find nobody to listen to, at most */

static bool still_warm(const pdk_entry *e, void *ctx)
{
    (void)ctx;
    return e->state == PDK_WARM;
}

/* The incarnation of an unheld one that died, or 0. */
static uint64_t doubt(pdk_runtime *rt, const char *id, const char *generation)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    if (e == NULL || e->generation == NULL || strcmp(e->generation, generation) != 0)
        return 0;
    e->health_ok_at = 0;
    return e->state == PDK_WARM && e->reserved == 0 && e->intents == 0 ? e->incarnation : 0;
}

static void died(pdk_runtime *rt, pdk_view one)
{
    const char *id = pdk_info_str(one, "sandbox_id"), *generation = pdk_info_str(one, "generation");
    if (id == NULL || generation == NULL)
        return;
    uint64_t incarnation = doubt(rt, id, generation);
    pdk_emit(rt, PDK_INFO, "died", id, generation, pdk_info_str(one, "reason"), NULL);
    if (incarnation == 0)
        return;
    PDK_AUTO_ERROR err = PDK_NO_ERROR; /* what goes wrong is logged where it does, and tried again at the next acquire */
    PDK_AUTO_TURN turn = PDK_NO_TURN;  /* so that an acquire waits for it, and does not fail because of it */
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), TURN_WAIT);
    if (pdk_turn_enter_id(rt->serial, id, &turn, &limit, &err) < 0)
        return; /* whoever has it is at work on it, and sees that it is dead */
    pdk_teardown td = { .id = id, .reason = "died", .ignore_holders = true, .incarnation = incarnation, .still = still_warm };
    pdk_fence_teardown(rt, &td, &err);
}

static bool pause_for(pdk_runtime *rt, double seconds)
{
    PDK_GUARD(rt->lock);
    pdk_ns deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(seconds));
    while (!rt->stop_threads && pdk_cond_wait_until(&rt->wake, &rt->lock, deadline))
        ;
    return !rt->stop_threads;
}

static bool goes_on(pdk_runtime *rt)
{
    PDK_GUARD(rt->lock);
    return !rt->stop_threads;
}

static void *watch_main(void *arg)
{
    pdk_runtime *rt = arg;
    double back_off = 0.05;
    pdk_limit limit = PDK_NO_LIMIT;
    limit.cancelled = &rt->watch_ends;
    while (goes_on(rt)) {
        PDK_AUTO_PACK deaths = PDK_NO_PACK;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_view key, one;
        size_t cursor = 0;
        pdk_ns began = pdk_now_monotonic();
        const pdk_limit *outer = pdk_limit_enter(&limit);
        int rc = pdk_engine_watch(rt, TURN, &deaths, &err);
        pdk_limit_enter(outer);
        if (rc < 0 && !atomic_load(&rt->watch_ends))
            pdk_emit(rt, PDK_WARN, "watch_failed", NULL, NULL, NULL, &err);
        while (rc == 0 && goes_on(rt) && pdk_view_next(pdk_view_of(&deaths), &cursor, &key, &one))
            died(rt, one);
        bool useful = rc == 0 && (cursor > 0 || pdk_now_monotonic() - began > PDK_NS_PER_S);
        back_off = useful ? 0.05 : back_off * 2 < BACK_OFF ? back_off * 2 : BACK_OFF;
        if (!pause_for(rt, useful ? 0 : back_off))
            break;
    }
    PDK_GUARD(rt->lock);
    rt->watcher_runs = false;
    pdk_cond_broadcast(&rt->wake);
    return NULL;
}

int pdk_watch_start(pdk_runtime *rt)
{
    if (!rt->watches || rt->watcher_runs)
        return 0;
    atomic_store(&rt->watch_ends, false);
    rt->watcher_runs = true;
    int rc = pdk_thread_start(&rt->watcher, "pdk-watch", watch_main, rt);
    rt->watcher_runs = rt->watcher_started = rc == 0;
    return rc;
}

void pdk_watch_end(pdk_runtime *rt)
{
    atomic_store(&rt->watch_ends, true);
}
