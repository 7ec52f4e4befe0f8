/* bind.h -- what the files of the Lua binding (bind*.c) share.
 *
 * Every method of a runtime or a box goes the same way: check the arguments while nothing is held, make the userdata
 * that will own the answer, run one function of runtime.h (the mutex of the universe given up, or the host's queue
 * pumped), deliver the events that came up, push the answer or raise. A Lua error is a longjmp, so what has to be given
 * back always hangs on a userdata with __gc before anything may raise.
 */
#ifndef PDK_BIND_H
#define PDK_BIND_H

#include "grip.h"

#include <lauxlib.h>

#define PDK_RUNTIME_TYPE "paddock.runtime"
#define PDK_BOX_TYPE "paddock.box"
#define PDK_RESULT_TYPE "paddock.result"

enum { PDK_MAX_NAME = 4096, PDK_MAX_HOLDER = 199, PDK_MAX_PATH = 4096 };

/* ---- userdata ------------------------------------------------------------------------------------------ */

typedef struct pdk_lruntime { /* user values: 1 = event functions, 2 = the anchor of a host's objects,
                                 3 = operations whose functions are yet to be called (bind_op.c) */
    pdk_grip *grip;           /* NULL once it is shut down */
} pdk_lruntime;

/* Memory of one call that a raise must not lose; freed by __gc, or at once by pdk_scratch_clear. */
typedef struct pdk_scratch {
    pdk_pack pack;
    pdk_result result;
    char *bytes;
    pdk_op *op; /* a reference */
} pdk_scratch;
pdk_scratch *pdk_scratch_new(lua_State *L); /* +1, raises */
void pdk_scratch_clear(pdk_scratch *s);
/* Pushes what was packed into it and clears it: 1, for a method to return.                            stack: +1, raises */
int pdk_push_answer(lua_State *L, pdk_scratch *s);

/* A new box userdata (+1, raises), whose box is yet to be acquired; it refers to the runtime at `rt_index`. */
pdk_lbox *pdk_lbox_push(lua_State *L, pdk_grip *g, int rt_index);

/* stack: +1, raises on lack of memory; `r` is owned by a scratch */
void pdk_push_result(lua_State *L, const pdk_result *r);

/* The runtime's userdata at `index` is shut down: it gives its part of the runtime up. May wait. */
void pdk_shut_down(lua_State *L, int index);

/* ---- one call ------------------------------------------------------------------------------------------- */

typedef struct pdk_ljob { /* on the stack of a method */
    pdk_grip *grip;
    pdk_error err;
    int rc;
    void *arg;
} pdk_ljob;

/* The open runtime at `index`: raises `closed` after shutdown and in a forked child. */
pdk_grip *pdk_check_runtime(lua_State *L, int index);
pdk_lbox *pdk_check_box(lua_State *L, int index);

/* Runs fn(job), which may block, and delivers events. Raises `unsupported` inside a callback, before anything else; and
 * the job's error when job->rc < 0. Stack index 1 is the runtime or the box. */
void pdk_run_blocking(lua_State *L, pdk_ljob *job, void (*fn)(void *job));
/* Raises the job's error when rc < 0. */
void pdk_check_rc(lua_State *L, pdk_ljob *job);
/* Delivers events and log lines to the functions of the runtime (or box) at stack index 1. How many. Never raises. */
int pdk_deliver(lua_State *L, pdk_grip *g);

/* ---- arguments: all raise invalid_argument, naming the argument --------------------------------------------- */

int pdk_bad_argument(lua_State *L, const char *name, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The table at `index` (nil = none: false) with keys out of `known` only. */
bool pdk_check_keys(lua_State *L, int index, const char *name, const char *const *known);
/* Field `key` of the table at `index` is pushed (+1) and checked. A string of at most `most` bytes with anything in it;
 * NULL when nil. */
const char *pdk_field_bytes(lua_State *L, int index, const char *key, size_t most, size_t *len);
/* The same without NUL bytes and not empty. */
const char *pdk_field_name(lua_State *L, int index, const char *key, size_t most);
/* Positive and finite; 0 when nil. */
double pdk_field_seconds(lua_State *L, int index, const char *key);
bool pdk_field_bool(lua_State *L, int index, const char *key, bool otherwise);
/* Field `key`, a table of plain data, packed into `out`; an empty view when nil. */
pdk_view pdk_field_plain(lua_State *L, int index, const char *key, pdk_pack *out);
/* The argument at `index`: a string without NUL bytes and not empty. */
const char *pdk_arg_name(lua_State *L, int index, const char *name, size_t most, size_t *len);
/* { timeout = seconds } at `index`, or nil: 0. */
double pdk_arg_timeout(lua_State *L, int index);
/* { user =, thread = } at `index`: pushes both (+2). */
pdk_identity pdk_arg_identity(lua_State *L, int index);

/* ---- modules -------------------------------------------------------------------------------------------- */

/* Methods of a runtime in bind_managed.c.                                                              stack: +1 or 0, raise */
int pdk_rt_sync_skills(lua_State *L);     /* rt:sync_skills { sandbox_id =, user =, thread =, projection = } */
int pdk_rt_network_events(lua_State *L);  /* rt:network_events(id) -> list of { request_id, host, port, method } */
int pdk_rt_deny_pending(lua_State *L);    /* rt:deny_pending(id) -> whether anything was denied */
int pdk_rt_decide(lua_State *L);          /* rt:decide(id, request_id, "deny" | "allow_once" | "allow") -> whether it did */
int pdk_rt_sync_skills_async(lua_State *L); /* these four: the same arguments [, callback] -> operation */
int pdk_rt_network_events_async(lua_State *L);
int pdk_rt_deny_pending_async(lua_State *L);
int pdk_rt_decide_async(lua_State *L);
int pdk_rt_discard_holders(lua_State *L); /* rt:discard_holders(); memory only */

void pdk_bind_runtime(lua_State *L); /* registers the metatables; +0, raises */
void pdk_bind_box(lua_State *L);
int pdk_bind_open(lua_State *L);     /* core.open(plain, backend, ownership, journal, log) */

#endif
