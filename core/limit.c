/* limit.c -- the limit that this thread's I/O is under. It is a pointer to what the operation owns, not a copy, so that
 * a cancel is seen by whoever works for the operation at that moment. */
#include "limit.h"

static const pdk_limit unlimited = { .deadline = PDK_NEVER };
static _Thread_local const pdk_limit *current;

const pdk_limit *pdk_limit_current(void)
{
    return current == NULL ? &unlimited : current;
}

const pdk_limit *pdk_limit_enter(const pdk_limit *limit)
{
    const pdk_limit *former = pdk_limit_current();
    current = limit;
    return former;
}

static pdk_ns never(void *ctx)
{
    (void)ctx;
    return PDK_NEVER;
}

pdk_ns pdk_upkeep_before(const pdk_limit *limit, pdk_ns until)
{
    pdk_ns due = limit->upkeep == NULL ? PDK_NEVER : limit->upkeep->due(limit->upkeep->ctx);
    return due < until ? due : until;
}

void pdk_upkeep_run(const pdk_limit *limit)
{
    static const pdk_upkeep none = { .due = never };
    const pdk_upkeep *u = limit->upkeep;
    if (u == NULL || u->due(u->ctx) > pdk_now_monotonic())
        return;
    const pdk_limit inside = { .deadline = PDK_NEVER, .upkeep = &none };
    const pdk_limit *outer = pdk_limit_enter(&inside);
    u->run(u->ctx);
    pdk_limit_enter(outer);
}
