/* call.h -- one call of a method on a Lua table: what iface.c and host.c share, and bind.c needs of a host beside
 * iface.h.
 *
 * A call is filled by the thread that wants it (iface.c), and carried out by whichever thread may run that Lua state:
 * in the universe the same one, in a host the host's own. Until it is done the caller waits, so that everything that it
 * points to stays valid. */
#ifndef PDK_CALL_H
#define PDK_CALL_H

#include "iface.h"

typedef struct pdk_call { /* on the caller's stack; written by one thread at a time */
    pdk_iface *iface;
    const char *method;
    const pdk_pack *args;    /* or NULL */
    pdk_pack *results;       /* or NULL */
    pdk_iface **object;      /* not NULL: the first result must be an object */
    const pdk_limit *limit;  /* or NULL: the thread's own */
    pdk_error_kind otherwise;
    pdk_error *err;
    int rc;
    void (*plain)(lua_State *L, void *arg); /* not NULL: this is done instead; must not raise */
    void *arg;
    /* host.c: */
    int state;               /* the host's lock */
    struct pdk_call *next;   /* the host's lock */
} pdk_call;

/* Carries it out on L (of the state that the table lives in). Raises nothing; call->rc and call->err say how it went.
 * stack: balanced */
void pdk_call_perform(lua_State *L, pdk_call *call);

/* Has a host's thread carry the call out; call->rc and call->err say how it went. */
void pdk_host_call(pdk_host *h, pdk_call *call);

/* Has a host's thread do fn(L, arg): at once when this is that thread inside a paddock call. Waits for it; false = the host is
 * closed. fn must not raise. */
bool pdk_host_do(pdk_host *h, void (*fn)(lua_State *L, void *arg), void *arg);

/* While a Lua function of a backend or for an event runs on this thread: pdk_inside_callback is true. */
void pdk_callback_begin(void);
void pdk_callback_end(void);

/* ---- a host, for bind.c ---- */

/* The table that keeps the host's objects alive: whoever pushes it must anchor it, or they are collected. +1 */
void pdk_host_push_anchor(lua_State *L, pdk_host *h);
/* Keeps the table at the top of the stack (popped) for an iface and gives its key, 0 when it cannot. May raise. */
int pdk_host_keep(lua_State *L, pdk_host *h);
void pdk_host_push_kept(lua_State *L, pdk_host *h, int key);
/* Any thread: the object is let go when the host's thread comes by next. */
void pdk_host_drop(pdk_host *h, int key);
pdk_host *pdk_host_retain(pdk_host *h);
/* The state is going away: what is queued and every later call fails with `closed`. */
void pdk_host_close(pdk_host *h);
/* Makes a pump look at `hook` again. Any thread; a pdk_events wake function with the host as ctx. */
void pdk_host_wake(void *h);
/* A descriptor that is readable while calls are queued or the hook has something: pdk_host_pump resets it. -1 on error. */
int pdk_host_fd(pdk_host *h);
/* Called by pdk_host_run on the host's thread, between queued calls; true when it did something. Must not raise. */
typedef bool (*pdk_host_hook)(lua_State *L, void *ctx);
void pdk_host_set_hook(pdk_host *h, pdk_host_hook hook, void *ctx);

#endif
