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
