/* script_internal.h -- what script*.c and budget.c share of a universe. */
#ifndef PDK_SCRIPT_INTERNAL_H
#define PDK_SCRIPT_INTERNAL_H

#include "budget.h"
#include <stdatomic.h>

typedef struct pdk_lua_thread { /* one lua thread for entries; kept and used again */
    lua_State *L;
    int ref; /* in the registry, which keeps it alive */
    struct pdk_lua_thread *next;
} pdk_lua_thread;

struct pdk_script {
    atomic_int refs;
    pdk_mutex lock;                    /* the Lua mutex */
    lua_State *main;                   /* lock; builds the universe, and is idle afterwards */
    lua_State *maker;                  /* lock; where new lua threads are made, as that may raise */
    pdk_budget *budget;                /* lock; of the policy call that runs now, or NULL */
    uint64_t armings;                  /* lock; of budgets, so far */
    pdk_lua_thread *idle;              /* lock */
    int idle_count;                    /* lock */
    atomic_size_t bytes;               /* written under lock, read by anyone */
    pdk_mutex drop_lock;               /* never held while another lock is taken */
    int *dropped;                      /* drop_lock; references to give back at the next entry */
    size_t dropped_count, dropped_cap; /* drop_lock */
    atomic_bool any_dropped;
};

/* Every lua_State of a universe has its universe in the extra space, which Lua copies to new threads. Only for states
 * that are certainly of a universe: a host's state has its own use for that space. */
static inline pdk_script *pdk_script_fast(lua_State *L)
{
    return *(pdk_script **)lua_getextraspace(L);
}

/* pdk_script_enter for a function that never raises, since all it does that may is in protected calls of its own: a
 * policy's call then has one instead of two. Returns what fn returned, or -1 and err. */
int pdk_script_enter_bare(pdk_script *s, int (*fn)(lua_State *L, void *arg), void *arg, pdk_error *err);

/* script_lib.c: fills a new universe. Raises. */
void pdk_script_open_libs(lua_State *L);

#endif
