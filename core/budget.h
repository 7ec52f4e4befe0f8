/* budget.h -- what one call of a policy may use: instructions, time, memory.
 *
 * Instructions are counted by a hook. It fires neither in C functions nor in the allocator, so these charge what they
 * do by themselves (pdk_charge; bytes asked for). The first overrun is remembered, and from then on every further
 * instruction raises: a script's pcall cannot swallow it.
 *
 * A budget is armed in a universe for the length of one call, during which the Lua mutex is not given up: so the Lua
 * mutex guards all of it, and "armed" means "a policy is running".
 */
#ifndef PDK_BUDGET_H
#define PDK_BUDGET_H

#include "script.h"

typedef enum pdk_over { PDK_WITHIN, PDK_OVER_INSTRUCTIONS, PDK_OVER_TIME, PDK_OVER_MEMORY } pdk_over;

typedef struct pdk_allowance { /* what a budget begins with */
    int64_t units;             /* instructions, and their like in C functions */
    pdk_ns cpu;                /* processor time of this thread: a loaded machine is no fault of the script */
    pdk_ns wall;               /* a ceiling for machines whose processor clock stands still */
    size_t memory;             /* bytes by which the universe may grow */
    size_t largest;            /* bytes of one block: also bounds what one instruction can take (comparing two strings) */
} pdk_allowance;

#ifdef PDK_CHECKS /* sanitizers make code some ten times as slow */
#define PDK_BUDGET_MS INT64_C(10000000)
#else
#define PDK_BUDGET_MS INT64_C(1000000)
#endif

typedef struct pdk_place { /* where in a script */
    char source[200];      /* the chunk's name, without the @; empty = unknown */
    char short_source[64]; /* as Lua writes it into messages */
    int line;
} pdk_place;

typedef struct pdk_budget {
    const pdk_allowance *allowed;
    lua_State *L;
    uint64_t serial;     /* of this arming, in this universe */
    int64_t units;       /* left */
    int64_t until_clock; /* units until the clock is read again */
    pdk_ns wall_from;    /* 0 = not read yet: short calls never read a clock, */
    pdk_ns cpu_from;     /* and this one, which costs a system call, only those that took half of the limit */
    size_t ceiling;      /* bytes of the universe */
    size_t asked;        /* bytes since the clock was read */
    size_t refused;      /* the size that was refused last, or 0 */
    int refusals;
    pdk_over over;
    pdk_place place; /* of the overrun */
    void *call;      /* whatever the caller of arm wants to find again */
} pdk_budget;

/* Arms `b` in L's universe, for what runs on L. Both under the Lua mutex, both never raise. */
void pdk_budget_arm(lua_State *L, pdk_budget *b, const pdk_allowance *allowed, void *call);
void pdk_budget_disarm(lua_State *L);
/* The one that is armed in L's universe, or NULL. L must be of a universe. */
pdk_budget *pdk_budget_of(lua_State *L);

/* Takes `units`; raises when the budget is over. Does nothing when none is armed. */
void pdk_charge(lua_State *L, size_t units);
/* Raises when the budget is over: for whoever catches errors. */
void pdk_budget_check(lua_State *L);
/* Raises the end of the memory budget, for a result that is known to be too large. */
void pdk_budget_too_large(lua_State *L);
/* For the allocator: whether a block may grow from `held` bytes (0 = a new one) to `size` when the universe would then
 * have `total` bytes. */
bool pdk_budget_allows(pdk_budget *b, size_t held, size_t size, size_t total);

/* The innermost Lua function on L's stack, from `level` on. false when there is none. */
bool pdk_place_of(lua_State *L, int level, pdk_place *out);
const char *pdk_over_text(const pdk_budget *b); /* such as "used more than 10 ms of processor time" */

#endif
