/* limit.h -- what bounds one operation: a deadline and a cancel flag, handed down to every blocking primitive. */
#ifndef PDK_LIMIT_H
#define PDK_LIMIT_H

#include "clock.h"
#include <stdatomic.h>

/* What whoever waits does meanwhile, where no thread in the background does it: the renewals of a runtime without threads. */
typedef struct pdk_upkeep {
    pdk_ns (*due)(void *ctx); /* on the REAL monotonic clock; PDK_NEVER = nothing is */
    void (*run)(void *ctx);   /* does what is due */
    void *ctx;
} pdk_upkeep;

typedef struct pdk_limit {  /* owned by the operation; read by whoever works for it */
    pdk_ns deadline;        /* on the REAL monotonic clock (pdk_now_monotonic); PDK_NEVER = none */
    atomic_bool *cancelled; /* or NULL */
    atomic_bool *unwanted;  /* or NULL: somebody else wants it ended; to whoever waits it is the same */
    const pdk_upkeep *upkeep; /* or NULL */
} pdk_limit;
#define PDK_NO_LIMIT ((pdk_limit){ PDK_NEVER, NULL, NULL, NULL })

static inline bool pdk_limit_cancelled(const pdk_limit *l)
{
    return (l->cancelled != NULL && atomic_load(l->cancelled)) || (l->unwanted != NULL && atomic_load(l->unwanted));
}
/* Whether it may be cancelled at all: who waits must look now and then. */
static inline bool pdk_limit_can_cancel(const pdk_limit *l)
{
    return l->cancelled != NULL || l->unwanted != NULL;
}

/* The limit that I/O on this thread is under now; never NULL. Primitives take the smaller of it and their own. */
const pdk_limit *pdk_limit_current(void);
/* Sets it for this thread and returns the former one, which must be set again. */
const pdk_limit *pdk_limit_enter(const pdk_limit *limit);

/* For primitives that wait: the earlier of `until` and the moment when the limit's upkeep is due; and, after the wait, without any
 * lock and without the Lua mutex: does it, if it is due. What it waits for itself has no upkeep. */
pdk_ns pdk_upkeep_before(const pdk_limit *limit, pdk_ns until);
void pdk_upkeep_run(const pdk_limit *limit);

#endif
