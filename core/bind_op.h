/* bind_op.h -- asynchronous operations in Lua, for the other files of the binding.
 *
 * A method that can wait comes in three forms that share everything but their end: blocking (bind.h), asynchronous (it
 * returns the operation), and inside a scheduler's task (it yields the operation, and goes on with its results). The last
 * two make the userdata first, so that nothing is lost to a raise, then submit, then end with pdk_lop_end.
 */
#ifndef PDK_BIND_OP_H
#define PDK_BIND_OP_H

#include "bind.h"
#include "async.h"

#define PDK_OP_TYPE "paddock.op"

typedef enum pdk_lop_type { /* what its results are in Lua */
    PDK_LOP_ACQUIRE, PDK_LOP_EXEC, PDK_LOP_READ, PDK_LOP_LIST,
    PDK_LOP_NOTHING,  /* of a write, a sync */
    PDK_LOP_RELEASE,  /* nothing either; never cancelled by a scheduler */
    PDK_LOP_SHUTDOWN, /* nothing either; the runtime's handle is given up with it */
    PDK_LOP_DESTROY,  /* true, or false, reason, message */
    PDK_LOP_WHETHER,  /* the answer as a boolean */
    PDK_LOP_PACK      /* what pdk_op_arg, a pdk_lop_work, has packed */
} pdk_lop_type;

typedef struct pdk_lop { /* the userdata. User values: 1 = the runtime, 2 = the box or nil, 3 = the results, once taken */
    pdk_grip *grip;      /* a reference; NULL = closed */
    pdk_op *op;          /* NULL = closed, or not submitted */
    pdk_lop_type type;
    bool taken;          /* user value 3 is set */
    bool anchored;       /* the state keeps it: its functions are yet to be called */
    bool streams;        /* one of them is on_output */
    bool closed;         /* anchored, but nobody wants it any more: freed when its end is told */
} pdk_lop;

/* How a call is to end. Fills it from the call's stack: `async` = the method's name ends with _async. */
typedef enum pdk_call_form { PDK_FORM_BLOCK, PDK_FORM_ASYNC, PDK_FORM_TASK } pdk_call_form;
pdk_call_form pdk_form_here(lua_State *L, bool async);
/* Whether this coroutine is the one that a scheduler runs on this thread; yieldable or not. */
bool pdk_task_is(lua_State *L);

/* The arguments from `first` on are `count` ordinary ones, of which the last may be left out, then a callback or none: sorts
 * them, so that the callback stands at first + count. That index, or 0 = there is none.                   stack: raises */
int pdk_take_callback(lua_State *L, int first, int count);

/* Pushes the operation (+1, raises). `self`: the runtime or box at stack index 1 is meant. callback, on_output: stack indices of
 * functions, or 0. */
pdk_lop *pdk_lop_push(lua_State *L, pdk_grip *g, pdk_lop_type type, pdk_call_form form, int callback, int on_output);
pdk_op_how pdk_lop_how(const pdk_lop *lop, double timeout);
/* The end of a method: `op` is what was submitted, NULL = `err` says why not. The userdata is at the top of the stack. Returns
 * it, yields it, or waits for it and returns the results, by the form.                                     stack: raises */
int pdk_lop_end(lua_State *L, pdk_lop *lop, pdk_call_form form, pdk_op *op, pdk_error *err);

/* ---- on_output of a blocking exec ---- */

typedef struct pdk_lsink { /* a userdata; user value 1: the function */
    pdk_output_sink sink;  /* for pdk_exec_spec */
    pdk_grip *grip;        /* of the call that it is made for */
    atomic_bool streamed;
} pdk_lsink;
/* Pushes it (+1, raises), with the function at index `fn`; in force for as long as it stays on the stack. */
pdk_lsink *pdk_lsink_push(lua_State *L, pdk_grip *g, int fn);
/* After a result: gives out what an engine that cannot stream told only now, and raises what the function raised.  stack: raises */
void pdk_lsink_end(lua_State *L, pdk_lsink *sink, const pdk_result *result);

/* ---- any function of runtime.h as an operation (pdk_op_call) ---- */

typedef struct pdk_lop_work { /* malloc'd in one piece; freed by the operation */
    int (*fn)(struct pdk_lop_work *w, pdk_error *err);
    pdk_runtime *rt;
    pdk_pack args, out;
    int number;             /* what else fn wants */
    char *id, *text;        /* behind the struct */
} pdk_lop_work;
/* Copies; NULL = no memory. */
pdk_lop_work *pdk_lop_work_new(pdk_runtime *rt, int (*fn)(pdk_lop_work *w, pdk_error *err), const char *id, const char *text);

/* As pdk_lop_end, with w (NULL = no memory) submitted. */
int pdk_lop_call(lua_State *L, pdk_lop *lop, pdk_call_form form, pdk_work_class work_class, double timeout, pdk_lop_work *w);

/* Raises what the callbacks that dispatch or a wait has called have raised: the first of it.  stack: balanced, raises */
void pdk_raise_failure(lua_State *L, pdk_grip *g);
/* Counts it instead, where nobody is left to be told.  stack: balanced, never raises */
void pdk_drop_failure(lua_State *L, pdk_grip *g);

void pdk_bind_op(lua_State *L); /* registers the metatable; +0, raises */
/* What scheduler.lua needs of paddock.core: on_wake, set_task, is_op, threads, wait. */
extern const luaL_Reg pdk_op_functions[];

#endif
