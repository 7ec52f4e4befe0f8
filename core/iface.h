/* iface.h -- a table of Lua functions that the core calls: a backend, an ownership store, a journal, a client.
 *
 * The table lives in the universe (a file, the CLI, a C host's configuration) or in a Lua host's own state. Arguments
 * and results cross as packs. In the universe a call is a pdk_script_enter. In a host's state it runs on the host's
 * thread only: at once when the caller is that thread inside a paddock call, else it is queued for that thread, which
 * takes it while it waits inside a paddock call or calls dispatch; a queued call past its deadline is withdrawn
 * (`timeout`). A method that returns a table with functions (connect) gives an object: it stays in its state, and
 * the core holds a handle.
 *
 * Threads: any.  Locks: none may be held but an identity's turn.
 */
#ifndef PDK_IFACE_H
#define PDK_IFACE_H

#include "limit.h"
#include "pack.h"
#include "script.h"

typedef struct pdk_iface pdk_iface;

/* In the universe: the table at the top of L's stack (popped). `what` names it in errors. NULL = no memory. */
pdk_iface *pdk_iface_of_script(lua_State *L, pdk_script *s, const char *what);
void pdk_iface_free(pdk_iface *f); /* any thread; drops queued */

/* Whether the table has a function of that name (read once, when the iface was made). Of an object (pdk_iface_make) only `close` and
 * `cancel` can be asked for, and no field. */
bool pdk_iface_has(const pdk_iface *f, const char *method);
/* A plain field of the table, packed when the iface was made, e.g. "capabilities"; empty when absent. */
pdk_view pdk_iface_field(const pdk_iface *f, const char *key);

/* table:method(args...). `args` is a pack with one value per argument. `results` gets one value per result.
 * An error that Lua raises keeps its kind when it is one of paddock's, else it is `otherwise`.
 * The limit is in force inside. A host's function may not make a blocking paddock call (`unsupported`). */
int pdk_iface_call(pdk_iface *f, const char *method, const pdk_pack *args, pdk_pack *results, const pdk_limit *limit,
                   pdk_error_kind otherwise, pdk_error *err);
/* As call, for a method that answers with an object: *object is a new iface (the caller's). */
int pdk_iface_make(pdk_iface *f, const char *method, const pdk_pack *args, pdk_iface **object, const pdk_limit *limit,
                   pdk_error_kind otherwise, pdk_error *err);

/* ---- a Lua host's state (host.c) ---- */

typedef struct pdk_host pdk_host; /* the queue of calls into one Lua host state */
/* `threads` as the runtime's option. L must be the host's main thread or one that outlives the host object. */
pdk_host *pdk_host_new(lua_State *L, bool threads);
void pdk_host_release(pdk_host *h);
/* The table at the top of L's stack (popped), in the host's state. */
pdk_iface *pdk_iface_of_host(lua_State *L, pdk_host *h, const char *what);
/* Brackets a paddock call made by Lua code of that host: makes `L` the stack on which queued calls run. */
void pdk_host_enter(pdk_host *h, lua_State *L);
void pdk_host_leave(pdk_host *h);
/* Runs what is queued, on the calling thread (which must be the host's). Returns how many. */
int pdk_host_pump(pdk_host *h, lua_State *L);
/* Runs fn(arg) on a worker thread while this one pumps; returns when it is done. With threads = false, or when no table of
 * this host exists, runs it here. */
void pdk_host_run(pdk_host *h, lua_State *L, void (*fn)(void *arg), void *arg);
/* Whether this thread is inside a host's or a backend's function (a blocking paddock call is refused there). */
bool pdk_inside_callback(void);

#endif
