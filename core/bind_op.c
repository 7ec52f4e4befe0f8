/* bind_op.c -- see bind_op.h.
 *
 * The functions that an operation calls (its callback, on_output) run where Lua of that state may run: the C callbacks of an
 * operation hand over to the host's thread (pdk_host_do) or enter the universe. While they are yet to be called, a table of the
 * runtime's userdata keeps them and the operation's. So an operation with functions is freed only after its end was told, and a C
 * callback never finds it gone; or with its runtime, which nobody dispatches any more then. */
#include "bind_op.h"

#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>

static const char ANCHORS = 0; /* its address: registry key of lightuserdata(lop) -> { lop, callback, on_output }; weak */
static const char FAILED = 0;  /* of lightuserdata(grip) -> what a callback raised */
static const char SINKS = 0;   /* of lightuserdata(lsink) -> lsink; weak */
static const char WAKE = 0;    /* of what the scheduler wants to be told of its operations' ends */

static _Thread_local lua_State *task; /* the coroutine that a scheduler runs on this thread; only compared */

/* stack: +1, raises */
static void push_registry_table(lua_State *L, const void *key)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, key) == LUA_TTABLE)
        return;
    lua_pop(L, 1);
    lua_newtable(L);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, key);
}

/* stack: +1, raises */
static void push_weak_table(lua_State *L, const void *key)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, key) == LUA_TTABLE)
        return;
    lua_pop(L, 1);
    push_registry_table(L, key);
    lua_createtable(L, 0, 1);
    lua_pushliteral(L, "v");
    lua_setfield(L, -2, "__mode");
    lua_setmetatable(L, -2);
}

/* ---- the functions of an operation --------------------------------------------------------------------- */

typedef struct happening { /* on the stack of a C callback */
    pdk_lop *lop;
    int stream;            /* of output; 0 = it is over */
    const void *bytes;
    size_t len;
} happening;

static void keep_failure(lua_State *L, pdk_grip *g)
{
    push_registry_table(L, &FAILED);
    if (lua_rawgetp(L, -1, g) != LUA_TNIL)
        return; /* the first one is the one that is raised */
    lua_pop(L, 1);
    lua_pushvalue(L, -2);
    lua_rawsetp(L, -2, g);
}

/* Frees the operation: one that is not over is cancelled, and a result that nobody took is given back. Waits for nothing. */
static void close_lop(pdk_lop *lop)
{
    pdk_op *op = lop->op;
    pdk_grip *g = lop->grip;
    lop->op = NULL;
    lop->grip = NULL;
    if (g == NULL)
        return;
    if (!pdk_grip_forked(g))
        pdk_op_let_go(op);
    pdk_grip_unref(g, false);
}

/* Nobody wants it any more. While a C callback of it may be on its way on another thread, that one frees it. */
static void close_or_leave(pdk_lop *lop)
{
    if (!lop->anchored) {
        close_lop(lop);
        return;
    }
    lop->closed = true;
    pdk_cancel(lop->op);
}

/* The operation at index `at` and its functions are no longer kept.  stack: balanced, never raises */
static void let_loose(lua_State *L, int at, pdk_lop *lop)
{
    int top = lua_gettop(L);
    lua_getiuservalue(L, at, 1);
    if (lua_getiuservalue(L, -1, 3) == LUA_TTABLE) {
        lua_pushnil(L);
        lua_rawsetp(L, -2, lop); /* of a key that is there: no memory is wanted */
    }
    lua_settop(L, top);
    lop->anchored = false;
}

/* [1] the happening.  stack: raises on lack of memory only */
static int call_functions(lua_State *L)
{
    happening *h = lua_touserdata(L, 1);
    pdk_lop *lop = h->lop;
    push_weak_table(L, &ANCHORS); /* [2] */
    if (lua_rawgetp(L, 2, lop) != LUA_TTABLE)
        return 0;
    lua_rawgeti(L, 3, 1); /* [4] the userdata: kept by this stack from here on */
    pdk_grip *g = lop->grip;
    if (h->stream == 0) {
        let_loose(L, 4, lop);
        lua_rawgeti(L, 3, 2);
        lua_pushvalue(L, 4);
    } else {
        lua_rawgeti(L, 3, 3);
        lua_pushstring(L, h->stream == 1 ? "stdout" : "stderr");
        lua_pushlstring(L, h->bytes, h->len);
    }
    int args = h->stream == 0 ? 1 : 2;
    if (!lop->closed && lua_isfunction(L, -1 - args) && lua_pcall(L, args, 0, 0) != LUA_OK)
        keep_failure(L, g);
    if (h->stream == 0 && lop->closed)
        close_lop(lop);
    return 0;
}

/* stack: balanced, never raises */
static void perform(lua_State *L, void *arg)
{
    if (!lua_checkstack(L, 10))
        return;
    pdk_callback_begin();
    lua_pushcfunction(L, call_functions);
    lua_pushlightuserdata(L, arg);
    if (lua_pcall(L, 1, 0, 0) != LUA_OK)
        lua_pop(L, 1); /* no memory: the host's next call will say so */
    pdk_callback_end();
}

static int perform_entry(lua_State *L, void *arg)
{
    perform(L, arg);
    return 0;
}

static void happens(happening *h)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_grip *g = h->lop->grip;
    if (g->host != NULL)
        pdk_host_do(g->host, perform, h);
    else
        pdk_script_enter(g->script, perform_entry, h, &err);
}

static void on_end(void *ctx, pdk_op *op)
{
    (void)op;
    happens(&(happening){ .lop = ctx });
}

static void on_output(void *ctx, int stream, const void *bytes, size_t len)
{
    happens(&(happening){ .lop = ctx, .stream = stream, .bytes = bytes, .len = len });
}

/* ---- making one ---------------------------------------------------------------------------------------- */

bool pdk_task_is(lua_State *L)
{
    return L == task;
}

pdk_call_form pdk_form_here(lua_State *L, bool async)
{
    if (async)
        return PDK_FORM_ASYNC;
    return L == task && lua_isyieldable(L) ? PDK_FORM_TASK : PDK_FORM_BLOCK;
}

int pdk_take_callback(lua_State *L, int first, int count)
{
    int at = first + count;
    if (lua_gettop(L) > at)
        pdk_bad_argument(L, "callback", "must be the last argument");
    lua_settop(L, at);
    for (int i = first; i < at && lua_isnil(L, at); i++) {
        if (!lua_isfunction(L, i))
            continue;
        for (int behind = i + 1; behind < at; behind++)
            if (!lua_isnil(L, behind))
                pdk_bad_argument(L, "callback", "must be the last argument");
        lua_pushvalue(L, i);
        lua_replace(L, at);
        lua_pushnil(L);
        lua_replace(L, i);
    }
    if (lua_isnil(L, at))
        return 0;
    if (!lua_isfunction(L, at))
        pdk_bad_argument(L, "callback", "must be a function, not a %s", luaL_typename(L, at));
    return at;
}

/* Keeps the operation at the top of the stack with its functions.  stack: +0, raises */
static void anchor(lua_State *L, pdk_lop *lop, int callback, int output)
{
    int at = lua_gettop(L);
    lua_createtable(L, 3, 0);
    lua_pushvalue(L, at);
    lua_rawseti(L, -2, 1);
    if (callback != 0) {
        lua_pushvalue(L, callback);
        lua_rawseti(L, -2, 2);
    }
    if (output != 0) {
        lua_pushvalue(L, output);
        lua_rawseti(L, -2, 3);
    }
    push_weak_table(L, &ANCHORS);
    lua_pushvalue(L, at + 1);
    lua_rawsetp(L, -2, lop);
    lua_getiuservalue(L, at, 1);
    lua_getiuservalue(L, -1, 3);
    lua_pushvalue(L, at + 1);
    lua_rawsetp(L, -2, lop);
    lop->anchored = true;
    lop->streams = output != 0;
    lua_settop(L, at);
}

pdk_lop *pdk_lop_push(lua_State *L, pdk_grip *g, pdk_lop_type type, pdk_call_form form, int callback, int output)
{
    luaL_checkstack(L, 10, "operation");
    if (form == PDK_FORM_TASK) {
        lua_rawgetp(L, LUA_REGISTRYINDEX, &WAKE);
        callback = lua_gettop(L);
    }
    pdk_lop *lop = lua_newuserdatauv(L, sizeof *lop, 3);
    *lop = (pdk_lop){ .type = type };
    luaL_setmetatable(L, PDK_OP_TYPE);
    lua_pushvalue(L, 1);
    if (luaL_testudata(L, 1, PDK_BOX_TYPE) != NULL) {
        lua_setiuservalue(L, -2, 2);
        lua_getiuservalue(L, 1, 1);
    }
    lua_setiuservalue(L, -2, 1);
    lop->grip = pdk_grip_ref(g);
    if (callback != 0 || output != 0)
        anchor(L, lop, callback, output);
    return lop;
}

pdk_op_how pdk_lop_how(const pdk_lop *lop, double timeout)
{
    return (pdk_op_how){ .timeout = timeout, .ctx = (void *)lop, .callback = lop->anchored ? on_end : NULL,
                         .on_output = lop->streams ? on_output : NULL };
}

/* ---- its results --------------------------------------------------------------------------------------- */

/* Raises what the callbacks that were called for the host have raised.  stack: balanced, raises */
void pdk_raise_failure(lua_State *L, pdk_grip *g)
{
    int top = lua_gettop(L);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &FAILED) == LUA_TTABLE && lua_rawgetp(L, -1, g) != LUA_TNIL) {
        lua_pushnil(L);
        lua_rawsetp(L, -3, g);
        lua_error(L);
    }
    lua_settop(L, top);
}

void pdk_drop_failure(lua_State *L, pdk_grip *g)
{
    int top = lua_gettop(L);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &FAILED) == LUA_TTABLE && lua_rawgetp(L, -1, g) != LUA_TNIL) {
        atomic_fetch_add(&g->failed_functions, 1);
        lua_pushnil(L);
        lua_rawsetp(L, -3, g); /* of a key that is there: no memory is wanted */
    }
    lua_settop(L, top);
}

/* Takes the result of the operation at index `at`.                            stack: +1, raises on lack of memory */
static void take(lua_State *L, int at, pdk_lop *lop)
{
    pdk_scratch *scratch;
    pdk_lop_work *work;
    size_t len = 0;
    switch (lop->type) {
    case PDK_LOP_ACQUIRE:
        lua_getiuservalue(L, at, 1);
        pdk_lbox_push(L, lop->grip, lua_gettop(L))->box = pdk_op_box(lop->op);
        lua_remove(L, -2);
        return;
    case PDK_LOP_EXEC:
        scratch = pdk_scratch_new(L);
        pdk_op_result(lop->op, &scratch->result);
        pdk_push_result(L, &scratch->result);
        break;
    case PDK_LOP_READ:
        scratch = pdk_scratch_new(L);
        pdk_op_bytes(lop->op, &scratch->bytes, &len);
        lua_pushlstring(L, scratch->bytes != NULL ? scratch->bytes : "", len);
        break;
    case PDK_LOP_LIST:
        scratch = pdk_scratch_new(L);
        pdk_op_pack(lop->op, &scratch->pack);
        pdk_view_to_lua(L, pdk_view_of(&scratch->pack));
        break;
    case PDK_LOP_PACK:
        work = pdk_op_arg(lop->op);
        if (work == NULL)
            lua_pushnil(L);
        else
            pdk_view_to_lua(L, pdk_view_of(&work->out));
        return;
    case PDK_LOP_WHETHER:
        lua_pushboolean(L, pdk_op_answer(lop->op) == 1);
        return;
    default:
        lua_pushnil(L);
        return;
    }
    pdk_scratch_clear(scratch);
    lua_remove(L, -2);
}

/* What follows on a good end of the operation at index `at`.  stack: balanced, raises */
static void had_effect(lua_State *L, int at, pdk_lop *lop)
{
    int top = lua_gettop(L);
    if (lop->type == PDK_LOP_RELEASE && lua_getiuservalue(L, at, 2) == LUA_TUSERDATA)
        pdk_check_box(L, -1)->released = true;
    else if (lop->type == PDK_LOP_SHUTDOWN && lua_getiuservalue(L, at, 1) == LUA_TUSERDATA)
        pdk_shut_down(L, -1);
    lua_settop(L, top);
}

/* The results of one that has ended well. How many were pushed.  stack: raises */
static int push_results(lua_State *L, int at, pdk_lop *lop)
{
    luaL_checkstack(L, 10, "results");
    if (lop->type == PDK_LOP_DESTROY) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR; /* without a cause: nothing is lost to a raise */
        bool done = pdk_op_answer(lop->op) == 1;
        lua_pushboolean(L, done);
        if (done)
            return 1;
        pdk_op_poll(lop->op, &err);
        lua_pushstring(L, err.reason[0] != '\0' ? err.reason : "deferred");
        lua_pushstring(L, err.message);
        return 3;
    }
    if (!lop->taken) {
        had_effect(L, at, lop);
        take(L, at, lop);
        lua_setiuservalue(L, at, 3);
        lop->taken = true;
    }
    bool nothing = lop->type == PDK_LOP_NOTHING || lop->type == PDK_LOP_RELEASE || lop->type == PDK_LOP_SHUTDOWN;
    if (nothing)
        return 0;
    lua_getiuservalue(L, at, 3);
    return 1;
}

static pdk_lop *check_lop(lua_State *L, int index)
{
    pdk_lop *lop = luaL_testudata(L, index, PDK_OP_TYPE);
    if (lop == NULL)
        pdk_bad_argument(L, "self", "must be an operation: call methods with a colon, op:method(...)");
    pdk_error err = PDK_NO_ERROR;
    if (lop->grip == NULL || lop->closed)
        pdk_fail(&err, PDK_E_CLOSED, 0, "the operation is closed");
    else if (pdk_grip_forked(lop->grip))
        pdk_fail(&err, PDK_E_CLOSED, 0, "this process was forked off the one that submitted the operation");
    else
        return lop;
    pdk_raise(L, &err);
    return NULL;
}

/* The error or the results of one that may be over: how many, or -1 = it is not.  stack: raises */
static int results(lua_State *L, int at, pdk_lop *lop)
{
    pdk_ljob job = { .grip = lop->grip, .err = PDK_NO_ERROR };
    job.rc = pdk_op_poll(lop->op, &job.err);
    pdk_check_rc(L, &job);
    pdk_error_clear(&job.err);
    return job.rc == 0 ? -1 : push_results(L, at, lop);
}

/* ---- the three ends of a method ------------------------------------------------------------------------ */

/* The task goes on: behind the operation, at index `ctx`, lies whether it was cancelled. */
static int task_goes_on(lua_State *L, int status, lua_KContext ctx)
{
    (void)status;
    int at = (int)ctx;
    pdk_lop *lop = lua_touserdata(L, at);
    if (lua_toboolean(L, at + 1)) {
        if (lop->type == PDK_LOP_RELEASE && pdk_op_poll(lop->op, NULL) == 1)
            had_effect(L, at, lop);
        close_or_leave(lop); /* a result that came in spite of it is given back */
        pdk_error err = PDK_NO_ERROR;
        pdk_fail(&err, PDK_E_CANCELLED, 0, "the task was cancelled");
        return pdk_raise(L, &err);
    }
    lua_settop(L, at);
    int n = results(L, at, check_lop(L, at));
    if (n >= 0)
        return n;
    lua_pushvalue(L, at); /* somebody else has resumed the coroutine: it goes on waiting */
    return lua_yieldk(L, 1, ctx, task_goes_on);
}

typedef struct waiting {
    pdk_op *op;
    pdk_scratch *hold;  /* keeps it although it is closed meanwhile, by a callback or by another thread of the universe */
    double seconds;
    bool own;           /* the operation is this very call's: who interrupts the call cancels it */
} waiting;

static const double LOOK_S = 0.05; /* how soon a wait sees that its caller was interrupted */

/* As pdk_op_wait, but looks now and then whether this thread's caller was interrupted (Ctrl-C in the prompt). */
static void wait_watchfully(pdk_ljob *job, waiting *w)
{
    const pdk_limit *limit = pdk_limit_current();
    double left = w->seconds;
    if (!pdk_limit_can_cancel(limit)) {
        job->rc = pdk_op_wait(w->op, left, &job->err);
        return;
    }
    while ((job->rc = pdk_op_wait(w->op, left >= 0 && left < LOOK_S ? left : LOOK_S, &job->err)) == 0) {
        if (left >= 0 && (left -= LOOK_S) <= 0)
            return;
        if (!pdk_limit_cancelled(limit))
            continue;
        if (w->own) {
            pdk_cancel(w->op);
            job->rc = pdk_op_wait(w->op, -1, &job->err); /* what has begun is drained */
        } else {
            job->rc = pdk_fail(&job->err, PDK_E_CANCELLED, 0, "the wait was interrupted; the operation goes on");
        }
        return;
    }
}

static void wait_job(void *arg)
{
    pdk_ljob *job = arg;
    waiting *w = job->arg;
    wait_watchfully(job, w);
    pdk_scratch_clear(w->hold);
}

/* Waits for the operation at index `at` and pushes its results; -1 = it is not over.  stack: raises */
static int wait_here(lua_State *L, int at, pdk_lop *lop, double seconds, bool own)
{
    waiting w = { lop->op, pdk_scratch_new(L), seconds, own };
    w.hold->op = pdk_op_retain(lop->op);
    pdk_ljob job = { .grip = lop->grip, .err = PDK_NO_ERROR, .arg = &w };
    pdk_run_blocking(L, &job, wait_job);
    pdk_error_clear(&job.err);
    lua_pop(L, 1);
    if (job.rc != 0)
        check_lop(L, at); /* closed meanwhile: by its own callback, say */
    pdk_raise_failure(L, lop->grip);
    return job.rc == 0 ? -1 : push_results(L, at, lop);
}

int pdk_lop_end(lua_State *L, pdk_lop *lop, pdk_call_form form, pdk_op *op, pdk_error *err)
{
    int at = lua_gettop(L);
    if (op == NULL) {
        if (lop->anchored)
            let_loose(L, at, lop);
        return pdk_raise(L, err);
    }
    lop->op = op;
    if (form == PDK_FORM_ASYNC)
        return 1;
    if (form == PDK_FORM_BLOCK)
        return wait_here(L, at, lop, -1, true);
    lua_pushvalue(L, at);
    return lua_yieldk(L, 1, at, task_goes_on);
}

/* ---- methods ------------------------------------------------------------------------------------------- */

/* op:poll() -> nil, or true and the results; raises the operation's error.       stack: raises */
static int op_poll(lua_State *L)
{
    pdk_lop *lop = check_lop(L, 1);
    lua_settop(L, 1);
    lua_pushboolean(L, true);
    int n = results(L, 1, lop);
    if (n >= 0)
        return n + 1;
    lua_pushnil(L);
    return 1;
}

/* op:wait([seconds]) -> as poll, after waiting so long at most.                  stack: raises */
static int op_wait(lua_State *L)
{
    pdk_lop *lop = check_lop(L, 1);
    lua_settop(L, 2);
    double seconds = lua_isnil(L, 2) ? -1 : lua_type(L, 2) == LUA_TNUMBER ? lua_tonumber(L, 2) : NAN;
    if (!lua_isnil(L, 2) && !(seconds >= 0))
        return pdk_bad_argument(L, "seconds", "must be a number, 0 or more");
    lua_settop(L, 1);
    lua_pushboolean(L, true);
    int n = wait_here(L, 1, lop, isinf(seconds) ? -1 : seconds, false);
    if (n >= 0)
        return n + 1;
    lua_pushnil(L);
    return 1;
}

/* op:cancel() -> whether there was something to cancel.                          stack: +1, raises */
static int op_cancel(lua_State *L)
{
    lua_pushboolean(L, pdk_cancel(check_lop(L, 1)->op) == 0);
    return 1;
}

/* op:runtime() -> the runtime's userdata.                                        stack: +1, raises */
static int op_runtime(lua_State *L)
{
    check_lop(L, 1);
    lua_getiuservalue(L, 1, 1);
    return 1;
}

/* op:kind() -> "acquire", "exec", ...                                            stack: +1, raises */
static int op_kind(lua_State *L)
{
    lua_pushstring(L, pdk_op_name(check_lop(L, 1)->op));
    return 1;
}

/* Also __close: nobody wants it any more. One that is not over is cancelled and drained; a result that was not taken is given
 * back; its functions are not called.                                            stack: +0, raises */
static int op_close(lua_State *L)
{
    pdk_lop *lop = luaL_checkudata(L, 1, PDK_OP_TYPE);
    if (lop->grip == NULL || pdk_grip_forked(lop->grip))
        return 0;
    close_or_leave(lop);
    return 0;
}

static int op_gc(lua_State *L)
{
    close_lop(luaL_checkudata(L, 1, PDK_OP_TYPE));
    return 0;
}

static int op_tostring(lua_State *L)
{
    pdk_lop *lop = luaL_checkudata(L, 1, PDK_OP_TYPE);
    const char *state = "closed", *name = "none";
    if (lop->grip != NULL && !lop->closed && !pdk_grip_forked(lop->grip)) {
        int rc = pdk_op_poll(lop->op, NULL);
        name = pdk_op_name(lop->op);
        state = rc == 0 ? "under way" : rc > 0 ? "done" : "failed";
    }
    lua_pushfstring(L, "paddock operation (%s, %s)", name, state);
    return 1;
}

void pdk_bind_op(lua_State *L)
{
    static const luaL_Reg methods[] = {
        { "poll", op_poll },       { "wait", op_wait }, { "cancel", op_cancel },
        { "runtime", op_runtime }, { "kind", op_kind }, { "close", op_close }, { NULL, NULL },
    };
    static const luaL_Reg meta[] = {
        { "__gc", op_gc }, { "__close", op_close }, { "__tostring", op_tostring }, { NULL, NULL },
    };
    luaL_newmetatable(L, PDK_OP_TYPE);
    luaL_setfuncs(L, meta, 0);
    luaL_newlib(L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushliteral(L, PDK_OP_TYPE);
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
}

/* ---- any function as an operation ---------------------------------------------------------------------- */

static int run_work(void *arg, pdk_error *err)
{
    pdk_lop_work *w = arg;
    return w->fn(w, err);
}

static void drop_work(void *arg)
{
    pdk_lop_work *w = arg;
    pdk_pack_free(&w->args);
    pdk_pack_free(&w->out);
    free(w);
}

pdk_lop_work *pdk_lop_work_new(pdk_runtime *rt, int (*fn)(pdk_lop_work *w, pdk_error *err), const char *id, const char *text)
{
    size_t id_len = id != NULL ? strlen(id) + 1 : 0, text_len = text != NULL ? strlen(text) + 1 : 0;
    pdk_lop_work *w = calloc(1, sizeof *w + id_len + text_len);
    if (w == NULL)
        return NULL;
    w->fn = fn;
    w->rt = rt;
    char *at = (char *)(w + 1);
    if (id != NULL)
        w->id = memcpy(at, id, id_len);
    if (text != NULL)
        w->text = memcpy(at + id_len, text, text_len);
    return w;
}

int pdk_lop_call(lua_State *L, pdk_lop *lop, pdk_call_form form, pdk_work_class work_class, double timeout, pdk_lop_work *w)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_op *op = NULL;
    if (w == NULL || w->args.failed)
        pdk_fail(&err, PDK_E_NO_MEMORY, 0, "no memory for the operation");
    else
        op = pdk_op_call(lop->grip->rt, work_class, timeout, run_work, drop_work, w, lop->anchored ? on_end : NULL, lop, &err);
    if (op == NULL && w != NULL)
        drop_work(w);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* ---- on_output of a blocking exec ---------------------------------------------------------------------- */

typedef struct piece { /* on the stack of a sink's put */
    pdk_lsink *sink;
    int stream;
    const void *bytes;
    size_t len;
} piece;

/* [1] the piece.  stack: raises on lack of memory only */
static int give_piece(lua_State *L)
{
    piece *p = lua_touserdata(L, 1);
    push_weak_table(L, &SINKS);
    if (lua_rawgetp(L, 2, p->sink) != LUA_TUSERDATA)
        return 0;
    lua_getiuservalue(L, 3, 1);
    lua_pushstring(L, p->stream == 1 ? "stdout" : "stderr");
    lua_pushlstring(L, p->bytes, p->len);
    if (lua_pcall(L, 2, 0, 0) != LUA_OK)
        keep_failure(L, p->sink->grip);
    return 0;
}

/* stack: balanced, never raises */
static void perform_piece(lua_State *L, void *arg)
{
    if (!lua_checkstack(L, 10))
        return;
    pdk_callback_begin();
    lua_pushcfunction(L, give_piece);
    lua_pushlightuserdata(L, arg);
    if (lua_pcall(L, 1, 0, 0) != LUA_OK)
        lua_pop(L, 1);
    pdk_callback_end();
}

static int perform_piece_entry(lua_State *L, void *arg)
{
    perform_piece(L, arg);
    return 0;
}

static void sink_put(void *ctx, int stream, const void *bytes, size_t len)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    piece p = { ctx, stream, bytes, len };
    atomic_store(&p.sink->streamed, true);
    if (p.sink->grip->host != NULL)
        pdk_host_do(p.sink->grip->host, perform_piece, &p);
    else
        pdk_script_enter(p.sink->grip->script, perform_piece_entry, &p, &err);
}

pdk_lsink *pdk_lsink_push(lua_State *L, pdk_grip *g, int fn)
{
    pdk_lsink *sink = lua_newuserdatauv(L, sizeof *sink, 1);
    *sink = (pdk_lsink){ .sink = { sink_put, sink }, .grip = g };
    lua_pushvalue(L, fn);
    lua_setiuservalue(L, -2, 1);
    push_weak_table(L, &SINKS);
    lua_pushvalue(L, -2);
    lua_rawsetp(L, -2, sink);
    lua_pop(L, 1);
    return sink;
}

void pdk_lsink_end(lua_State *L, pdk_lsink *sink, const pdk_result *result)
{
    if (!atomic_load(&sink->streamed)) {
        if (result->out_len > 0)
            perform_piece(L, &(piece){ sink, 1, result->out, result->out_len });
        if (result->err_len > 0)
            perform_piece(L, &(piece){ sink, 2, result->err, result->err_len });
    }
    pdk_raise_failure(L, sink->grip);
}

/* ---- what scheduler.lua needs -------------------------------------------------------------------------- */

/* core.on_wake(fn): fn(op) is called, by dispatch, when an operation that a task has yielded is over.  stack: +0, raises */
static int l_on_wake(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &WAKE);
    return 0;
}

/* core.set_task(coroutine | nil): whose calls yield on this thread.              stack: +0, raises */
static int l_set_task(lua_State *L)
{
    task = lua_isnoneornil(L, 1) ? NULL : lua_tothread(L, 1);
    return 0;
}

/* core.is_op(value) -> boolean.                                                  stack: +1, raises */
static int l_is_op(lua_State *L)
{
    lua_pushboolean(L, luaL_testudata(L, 1, PDK_OP_TYPE) != NULL);
    return 1;
}

/* core.threads(rt) -> whether it has threads of its own.                         stack: +1, raises */
static int l_threads(lua_State *L)
{
    lua_pushboolean(L, pdk_check_runtime(L, 1)->threads);
    return 1;
}

enum { MOST_WAITED = 64 }; /* more runtimes than that are looked at in turns */
static const pdk_ns LOOK = PDK_NS_PER_S / 20; /* how soon a wait sees that its own operation was cancelled */

static void wait_for_any(lua_State *L, struct pollfd *fds, int n, pdk_ns until)
{
    const pdk_limit *limit = pdk_limit_current();
    pdk_script_block(L);
    for (pdk_ns now; (now = pdk_now_monotonic()) < until;) {
        pdk_ns left = until - now;
        if (pdk_limit_can_cancel(limit) && left > LOOK)
            left = LOOK;
        int ms = left / 1000000 < INT32_MAX ? (int)((left + 999999) / 1000000) : INT32_MAX;
        if (poll(fds, (nfds_t)n, ms) != 0 || pdk_limit_cancelled(limit))
            break;
    }
    pdk_script_unblock(L);
}

/* core.wait({ rt, ... }, when): until one of them has something for dispatch, or core.now() is `when`.   stack: +0, raises */
static int l_wait(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    double when = luaL_checknumber(L, 2);
    lua_settop(L, 2);
    struct pollfd fds[MOST_WAITED];
    int n = 0;
    if (pdk_inside_callback()) {
        pdk_error err = PDK_NO_ERROR;
        pdk_fail(&err, PDK_E_UNSUPPORTED, 0, "a scheduler cannot wait inside a function of a backend or for an event");
        return pdk_raise(L, &err);
    }
    for (lua_Integer i = 1; n < MOST_WAITED && lua_rawgeti(L, 1, i) != LUA_TNIL; i++, lua_settop(L, 2)) {
        pdk_grip *g = pdk_check_runtime(L, 3);
        pdk_error err = PDK_NO_ERROR;
        int fd = pdk_grip_fd(g, &err);
        if (fd < 0)
            return pdk_raise(L, &err);
        fds[n++] = (struct pollfd){ .fd = fd, .events = POLLIN };
    }
    pdk_ns until = when * 1e9 < 9e18 ? (pdk_ns)(when * 1e9) : PDK_NEVER;
    wait_for_any(L, fds, n, until);
    const pdk_limit *limit = pdk_limit_current();
    if (pdk_limit_cancelled(limit)) {
        pdk_error err = PDK_NO_ERROR;
        pdk_fail(&err, PDK_E_CANCELLED, 0, "the wait was interrupted");
        return pdk_raise(L, &err);
    }
    return 0;
}

const luaL_Reg pdk_op_functions[] = {
    { "on_wake", l_on_wake }, { "set_task", l_set_task }, { "is_op", l_is_op },
    { "threads", l_threads }, { "wait", l_wait },         { NULL, NULL },
};
