/* bind_rt.c -- the runtime in Lua: opening, and its methods (DESIGN, section 7).
 *
 * Each method of one step is a job: a function of runtime.h with its arguments in a struct on the method's own stack.
 * What only reads memory is called at once, also inside a backend's function. */
#include "bind_op.h"
#include "open.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- opening -------------------------------------------------------------------------------------------- */

typedef struct opening {
    pdk_open_spec spec;
    pdk_runtime *rt;
} opening;

static void open_job(void *arg)
{
    pdk_ljob *job = arg;
    opening *o = job->arg;
    o->rt = pdk_runtime_open(&o->spec, &job->err);
    job->rc = o->rt != NULL ? 0 : -1;
}

/* Makes the userdata with its empty grip.  stack: +1, raises */
static pdk_grip *push_runtime(lua_State *L)
{
    pdk_lruntime *rt = lua_newuserdatauv(L, sizeof *rt, 3);
    rt->grip = NULL;
    luaL_setmetatable(L, PDK_RUNTIME_TYPE);
    lua_newtable(L);
    lua_setiuservalue(L, -2, 1);
    lua_newtable(L);
    lua_setiuservalue(L, -2, 3);
    rt->grip = pdk_grip_new(pdk_keeper_of(L));
    if (rt->grip == NULL)
        luaL_error(L, "not enough memory");
    return rt->grip;
}

/* Checks the options at stack index 2; the normalized ones are in scratch->pack.  stack: raises */
static void read_options(lua_State *L, pdk_grip *g, pdk_scratch *scratch)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_scratch *plain = pdk_scratch_new(L);
    pdk_script *shared = pdk_script_of(L);
    g->script = shared != NULL ? pdk_script_retain(shared) : pdk_script_new(&err);
    if (g->script == NULL || pdk_pack_from_lua(L, 2, &plain->pack, &err) < 0 ||
        pdk_options_normalize(g->script, pdk_view_of(&plain->pack), &scratch->pack, &err) < 0)
        pdk_raise(L, &err);
    pdk_scratch_clear(plain);
    lua_pop(L, 1);
    g->threads = pdk_view_bool(pdk_view_get(pdk_view_of(&scratch->pack), "threads"), true);
    if (shared == NULL) {
        g->host = pdk_host_new(L, g->threads);
        if (g->host == NULL)
            luaL_error(L, "not enough memory");
        pdk_host_push_anchor(L, g->host);
        lua_setiuservalue(L, 1, 2);
        pdk_events_set_wake(g->events, pdk_host_wake, g->host);
    }
}

/* The table of functions at `index` as an iface; false = no memory.  stack: balanced, never raises */
static bool take_table(lua_State *L, int index, pdk_grip *g, const char *what, pdk_iface **out)
{
    if (!lua_istable(L, index))
        return true;
    lua_pushvalue(L, index);
    *out = g->host != NULL ? pdk_iface_of_host(L, g->host, what) : pdk_iface_of_script(L, g->script, what);
    return *out != NULL;
}

/* A runtime weighs more than its userdata shows. Without this a host that opens and closes them keeps the universes of dozens that
 * are closed, half a megabyte each, until its collector thinks that it is time.  stack: balanced, never raises */
static void weigh(lua_State *L)
{
    enum { KIB = 512 }; /* what a universe has allocated once it is open */
    if (lua_gc(L, LUA_GCISRUNNING))
        lua_gc(L, LUA_GCSTEP, KIB);
}

/* core.open(plain, backend, ownership, journal, log) -> runtime.              stack: +1, raises */
int pdk_bind_open(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 5);
    if (pdk_inside_callback()) {
        pdk_error err = PDK_NO_ERROR;
        pdk_fail(&err, PDK_E_UNSUPPORTED, 0, "a runtime cannot be opened inside a function of a backend or for an event");
        return pdk_raise(L, &err);
    }
    weigh(L);
    pdk_keeper_drain(pdk_keeper_of(L));
    pdk_grip *g = push_runtime(L); /* [6] */
    lua_insert(L, 1);              /* [1] runtime, [2] plain, [3] backend, [4] ownership, [5] journal, [6] log */
    pdk_scratch *scratch = pdk_scratch_new(L);
    read_options(L, g, scratch);
    bool logs = lua_isfunction(L, 6);
    if (logs) {
        lua_getiuservalue(L, 1, 1);
        lua_pushvalue(L, 6);
        lua_setfield(L, -2, "log");
        lua_pop(L, 1);
    }
    luaL_checkstack(L, 8, "paddock.open");
    opening o = { .spec = { .script = g->script, .options = pdk_view_of(&scratch->pack),
                            .log_sink = logs ? pdk_events_sink_log : NULL, .log_ctx = g->events } };
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = &o };
    /* From here to the open nothing may raise: the tables belong to nobody yet. */
    if (!take_table(L, 3, g, "backend", &o.spec.backend) || !take_table(L, 4, g, "ownership", &o.spec.ownership) ||
        !take_table(L, 5, g, "journal", &o.spec.journal)) {
        pdk_iface_free(o.spec.backend);
        pdk_iface_free(o.spec.ownership);
        return luaL_error(L, "not enough memory");
    }
    pdk_run_blocking(L, &job, open_job);
    g->rt = o.rt;
    pdk_scratch_clear(scratch);
    lua_settop(L, 1);
    return 1;
}

/* ---- the life of the userdata --------------------------------------------------------------------------- */

static void let_go(pdk_lruntime *rt, bool here)
{
    pdk_grip *g = rt->grip;
    rt->grip = NULL;
    if (g != NULL)
        pdk_grip_unref(g, here);
}

static int rt_gc(lua_State *L)
{
    pdk_lruntime *rt = luaL_checkudata(L, 1, PDK_RUNTIME_TYPE);
    if (rt->grip == NULL || pdk_grip_forked(rt->grip))
        return 0;
    if (rt->grip->host != NULL)
        pdk_host_close(rt->grip->host); /* its functions may go away with it */
    let_go(rt, false);
    return 0;
}

static int rt_tostring(lua_State *L)
{
    pdk_lruntime *rt = luaL_checkudata(L, 1, PDK_RUNTIME_TYPE);
    lua_pushfstring(L, "paddock runtime (%s)", rt->grip != NULL && rt->grip->rt != NULL ? "open" : "shut down");
    return 1;
}

/* ---- sandboxes ------------------------------------------------------------------------------------------ */

typedef struct acquiring {
    pdk_acquire_spec spec;
    pdk_lbox *box;
} acquiring;

static void acquire_job(void *arg)
{
    pdk_ljob *job = arg;
    acquiring *a = job->arg;
    job->rc = pdk_runtime_acquire(job->grip->rt, &a->spec, &a->box->box, &job->err);
}

/* holder: nil = fresh, a name, false = none.  stack: +1, raises */
static void read_holder(lua_State *L, int index, pdk_acquire_spec *spec)
{
    if (lua_getfield(L, index, "holder") == LUA_TBOOLEAN) {
        if (lua_toboolean(L, -1))
            pdk_bad_argument(L, "holder", "must be a name, or false for none; leave it out for a fresh one");
        spec->no_holder = true;
        return;
    }
    spec->holder = pdk_field_name(L, index, "holder", PDK_MAX_HOLDER);
}

static void read_request(lua_State *L, pdk_acquire_spec *spec)
{
    static const char *const keys[] = { "user", "thread", "holder", "requirements", "timeout", NULL };
    if (!pdk_check_keys(L, 2, "request", keys))
        return;
    pdk_identity who = pdk_arg_identity(L, 2);
    *spec = (pdk_acquire_spec){ .user = who.user, .user_len = who.user_len, .thread = who.thread, .thread_len = who.thread_len };
    read_holder(L, 2, spec);
    spec->timeout = pdk_field_seconds(L, 2, "timeout");
    if (lua_getfield(L, 2, "requirements") != LUA_TNIL) {
        pdk_scratch *scratch = pdk_scratch_new(L);
        spec->requirements = pdk_field_plain(L, 2, "requirements", &scratch->pack);
    }
}

static int submit_acquire(lua_State *L, pdk_grip *g, pdk_call_form form, int callback, const pdk_acquire_spec *spec)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_ACQUIRE, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, spec->timeout);
    pdk_op *op = pdk_async_acquire(g->rt, spec, NULL, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* rt:acquire(request) -> box.                                                 stack: +1, raises */
static int rt_acquire(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    acquiring a = { 0 };
    lua_settop(L, 2);
    read_request(L, &a.spec);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK)
        return submit_acquire(L, g, form, 0, &a.spec);
    a.box = pdk_lbox_push(L, g, 1);
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = &a };
    int at = lua_gettop(L);
    pdk_run_blocking(L, &job, acquire_job);
    lua_pushvalue(L, at);
    return 1;
}

/* rt:acquire_async(request [, callback]) -> operation.                        stack: +1, raises */
static int rt_acquire_async(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    pdk_acquire_spec spec = { 0 };
    int callback = pdk_take_callback(L, 2, 1);
    read_request(L, &spec);
    return submit_acquire(L, g, PDK_FORM_ASYNC, callback, &spec);
}

/* rt:get(id [, { user =, thread = }]) -> box or nil; memory only.             stack: +1, raises */
static int rt_get(lua_State *L)
{
    static const char *const keys[] = { "user", "thread", NULL };
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 3);
    const char *id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL);
    pdk_identity who = { 0 };
    bool scoped = pdk_check_keys(L, 3, "identity", keys);
    if (scoped)
        who = pdk_arg_identity(L, 3);
    pdk_lbox *box = pdk_lbox_push(L, g, 1);
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_get(g->rt, id, scoped ? &who : NULL, &box->box, &job.err);
    pdk_check_rc(L, &job);
    if (box->box == NULL)
        lua_pushnil(L);
    return 1;
}

/* rt:retain(id, { holder =, user =, thread =, release_on_last = true }).      stack: +0, raises */
static int rt_retain(lua_State *L)
{
    static const char *const keys[] = { "holder", "user", "thread", "release_on_last", NULL };
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 3);
    const char *id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL);
    if (!pdk_check_keys(L, 3, "options", keys))
        return pdk_bad_argument(L, "holder", "is missing");
    const char *holder = pdk_field_name(L, 3, "holder", PDK_MAX_HOLDER);
    if (holder == NULL)
        return pdk_bad_argument(L, "holder", "is missing");
    pdk_identity who = pdk_arg_identity(L, 3);
    bool scoped = who.user != NULL || who.thread != NULL;
    bool last = pdk_field_bool(L, 3, "release_on_last", true);
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_retain(g->rt, id, holder, scoped ? &who : NULL, last, &job.err);
    pdk_check_rc(L, &job);
    return 0;
}

/* rt:binding(holder) -> id or nil.                                            stack: +1, raises */
static int rt_binding(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    const char *holder = pdk_arg_name(L, 2, "holder", PDK_MAX_HOLDER, NULL);
    char id[64] = "";
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_binding(g->rt, holder, id, &job.err);
    pdk_check_rc(L, &job);
    if (job.rc == 1)
        lua_pushstring(L, id);
    else
        lua_pushnil(L);
    return 1;
}

typedef struct named { /* a function of runtime.h that takes a name */
    int (*fn)(pdk_runtime *rt, const char *name, pdk_error *err);
    const char *name;
} named;

static void named_job(void *arg)
{
    pdk_ljob *job = arg;
    named *n = job->arg;
    job->rc = n->fn(job->grip->rt, n->name, &job->err);
}

static void run_named(lua_State *L, const char *what, int (*fn)(pdk_runtime *rt, const char *name, pdk_error *err),
                      pdk_ljob *job)
{
    job->grip = pdk_check_runtime(L, 1);
    job->err = PDK_NO_ERROR;
    named n = { fn, pdk_arg_name(L, 2, what, PDK_MAX_HOLDER, NULL) };
    job->arg = &n;
    pdk_run_blocking(L, job, named_job);
}

static int submit_release(lua_State *L, pdk_call_form form, int callback)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_grip *g = pdk_check_runtime(L, 1);
    const char *holder = pdk_arg_name(L, 2, "holder", PDK_MAX_HOLDER, NULL);
    pdk_op_how how = { .timeout = pdk_arg_timeout(L, 3) };
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_RELEASE, form, callback, 0);
    how = pdk_lop_how(lop, how.timeout);
    pdk_op *op = pdk_async_release_holder(g->rt, holder, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* rt:release(holder [, { timeout = }]); an unknown one does nothing.         stack: +0, raises */
static int rt_release(lua_State *L)
{
    lua_settop(L, 3);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || !lua_isnil(L, 3))
        return submit_release(L, form, 0);
    pdk_ljob job;
    run_named(L, "holder", pdk_runtime_release, &job);
    return 0;
}

/* rt:release_async(holder [, { timeout = }] [, callback]) -> operation.       stack: +1, raises */
static int rt_release_async(lua_State *L)
{
    int callback = pdk_take_callback(L, 2, 2);
    return submit_release(L, PDK_FORM_ASYNC, callback);
}

/* rt:park(id); does nothing while it is held.                                 stack: +0, raises */
static int rt_park(lua_State *L)
{
    pdk_ljob job;
    run_named(L, "id", pdk_runtime_park, &job);
    return 0;
}

/* What destroy and retire answer.                                             stack: +1 or +3, raises */
static int done_or_not(lua_State *L, int (*fn)(pdk_runtime *rt, const char *name, pdk_error *err))
{
    pdk_ljob job;
    run_named(L, "id", fn, &job);
    lua_pushboolean(L, job.rc == 1);
    if (job.rc == 1)
        return 1;
    lua_pushstring(L, job.err.reason[0] != '\0' ? job.err.reason : "deferred");
    lua_pushstring(L, job.err.message);
    pdk_error_clear(&job.err);
    return 3;
}

static int submit_destroy(lua_State *L, pdk_call_form form, int callback)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_grip *g = pdk_check_runtime(L, 1);
    const char *id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL);
    double timeout = pdk_arg_timeout(L, 3);
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_DESTROY, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, timeout);
    pdk_op *op = pdk_async_destroy(g->rt, id, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* rt:destroy(id [, { timeout = }]) -> true, or false, "deferred" or "replaced", and what stands in the way.
 * stack: +1 or +3, raises */
static int rt_destroy(lua_State *L)
{
    lua_settop(L, 3);
    pdk_call_form form = pdk_form_here(L, false);
    if (form == PDK_FORM_BLOCK && lua_isnil(L, 3))
        return done_or_not(L, pdk_runtime_destroy);
    return submit_destroy(L, form, 0);
}

/* rt:destroy_async(id [, { timeout = }] [, callback]) -> operation.            stack: +1, raises */
static int rt_destroy_async(lua_State *L)
{
    int callback = pdk_take_callback(L, 2, 2);
    return submit_destroy(L, PDK_FORM_ASYNC, callback);
}

/* rt:retire(id) -> true, or as destroy.                                        stack: +1 or +3, raises */
static int rt_retire(lua_State *L)
{
    return done_or_not(L, pdk_runtime_retire);
}

typedef struct asking { /* a function of runtime.h that asks a store and packs the answer */
    int (*of)(pdk_runtime *rt, const char *id, pdk_pack *out, pdk_error *err); /* or, without an id: */
    int (*all)(pdk_runtime *rt, pdk_pack *out, pdk_error *err);
    const char *id;
    pdk_pack *out;
} asking;

static void ask_job(void *arg)
{
    pdk_ljob *job = arg;
    asking *a = job->arg;
    job->rc = a->of != NULL ? a->of(job->grip->rt, a->id, a->out, &job->err) : a->all(job->grip->rt, a->out, &job->err);
}

static int ask_store(lua_State *L, asking a)
{
    pdk_ljob job = { .grip = pdk_check_runtime(L, 1), .err = PDK_NO_ERROR, .arg = &a };
    pdk_scratch *scratch = pdk_scratch_new(L);
    a.out = &scratch->pack;
    pdk_run_blocking(L, &job, ask_job);
    return pdk_push_answer(L, scratch);
}

/* rt:lease(id) -> { state, owner, ours, token }, or nil when nobody has it.   stack: +1, raises */
static int rt_lease(lua_State *L)
{
    pdk_check_runtime(L, 1);
    return ask_store(L, (asking){ .of = pdk_runtime_lease, .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) });
}

/* rt:quarantine() -> list of { sandbox_id, generation, why }.                 stack: +1, raises */
static int rt_quarantine(lua_State *L)
{
    return ask_store(L, (asking){ .all = pdk_runtime_quarantine });
}

/* ---- upkeep --------------------------------------------------------------------------------------------- */

static void plain_job(void *arg)
{
    pdk_ljob *job = arg;
    int (**fn)(pdk_runtime *, pdk_error *) = job->arg;
    job->rc = (*fn)(job->grip->rt, &job->err);
}

static int run_plain(lua_State *L, int (*fn)(pdk_runtime *, pdk_error *))
{
    pdk_ljob job = { .grip = pdk_check_runtime(L, 1), .err = PDK_NO_ERROR, .arg = &fn };
    pdk_run_blocking(L, &job, plain_job);
    return 0;
}

static int rt_tick(lua_State *L)
{
    return run_plain(L, pdk_runtime_tick);
}

static int rt_reconcile(lua_State *L)
{
    return run_plain(L, pdk_runtime_reconcile);
}

static int rt_reload(lua_State *L)
{
    return run_plain(L, pdk_runtime_reload);
}

enum { MOST_CALLBACKS = 4096 }; /* callbacks that submit more must not keep this going */

/* stack: balanced, never raises */
static int run_callbacks(lua_State *L, pdk_grip *g)
{
    if (g->host == NULL)
        return pdk_dispatch(g->rt, MOST_CALLBACKS);
    pdk_host_enter(g->host, L);
    int n = pdk_dispatch(g->rt, MOST_CALLBACKS);
    pdk_host_leave(g->host);
    return n;
}

/* Ends the userdata's part in the runtime, which is freed here unless boxes, operations or calls still refer to it. */
void pdk_shut_down(lua_State *L, int index)
{
    pdk_lruntime *rt = lua_touserdata(L, index);
    if (rt->grip == NULL)
        return; /* another thread's shutdown was quicker */
    pdk_grip *g = pdk_grip_ref(rt->grip); /* a callback may come here, too */
    pdk_script_block(L);
    /* What the shutdown has drained may be a moment from saying so; whose worker hangs (a time limit has let go of it) is not. */
    for (int i = 0; i < 100 && pdk_async_running(g->rt) > 0; i++)
        pdk_sleep_ns(PDK_NS_PER_S / 1000);
    pdk_script_unblock(L);
    run_callbacks(L, g); /* the last chance to tell of it */
    pdk_drop_failure(L, g);
    pdk_script_block(L);
    let_go(rt, true);
    pdk_grip_unref(g, true);
    pdk_script_unblock(L);
}

static int submit_shutdown(lua_State *L, pdk_call_form form, int callback)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_grip *g = pdk_check_runtime(L, 1);
    double timeout = pdk_arg_timeout(L, 2);
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_SHUTDOWN, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, timeout);
    pdk_op *op = pdk_async_shutdown(g->rt, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* rt:shutdown([{ timeout = }]); raises while something could not be stopped, and can be called again.   stack: +0, raises */
static int rt_shutdown(lua_State *L)
{
    pdk_lruntime *rt = luaL_testudata(L, 1, PDK_RUNTIME_TYPE);
    if (rt != NULL && rt->grip == NULL)
        return 0; /* done before */
    lua_settop(L, 2);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || !lua_isnil(L, 2))
        return submit_shutdown(L, form, 0);
    run_plain(L, pdk_runtime_shutdown);
    pdk_shut_down(L, 1);
    return 0;
}

/* rt:shutdown_async([{ timeout = }] [, callback]) -> operation.                stack: +1, raises */
static int rt_shutdown_async(lua_State *L)
{
    int callback = pdk_take_callback(L, 2, 1);
    return submit_shutdown(L, PDK_FORM_ASYNC, callback);
}

/* rt:reset(): forgets everything without stopping it; the runtime is closed then.        stack: +0, raises */
static int rt_reset(lua_State *L)
{
    return run_plain(L, pdk_runtime_reset);
}

/* rt:dispatch() -> how many calls, callbacks and events were taken; never waits for I/O. Raises what a callback of an operation
 * has raised, after all of them have run.                                                stack: +1, raises */
static int rt_dispatch(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    if (pdk_inside_callback()) {
        pdk_error err = PDK_NO_ERROR;
        pdk_fail(&err, PDK_E_UNSUPPORTED, 0, "dispatch is refused inside a function of a backend, for an event or of an operation");
        return pdk_raise(L, &err);
    }
    lua_settop(L, 1);
    int n = g->host != NULL ? pdk_host_pump(g->host, L) : 0;
    n += run_callbacks(L, g);
    n += pdk_deliver(L, g);
    pdk_raise_failure(L, g);
    lua_pushinteger(L, n);
    return 1;
}

/* rt:fd() -> a descriptor that is readable while dispatch has something to do.           stack: +1, raises */
static int rt_fd(lua_State *L)
{
    pdk_error err = PDK_NO_ERROR;
    int fd = pdk_grip_fd(pdk_check_runtime(L, 1), &err);
    if (fd < 0)
        return pdk_raise(L, &err);
    lua_pushinteger(L, fd);
    return 1;
}

/* rt:advance(s [, wall_s]): moves a manual clock.                                        stack: +0, raises */
static int rt_advance(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 3);
    double s = lua_type(L, 2) == LUA_TNUMBER ? lua_tonumber(L, 2) : NAN;
    double wall = lua_isnil(L, 3) ? s : lua_type(L, 3) == LUA_TNUMBER ? lua_tonumber(L, 3) : NAN;
    if (!isfinite(s) || s < 0)
        return pdk_bad_argument(L, "seconds", "must be a finite number, 0 or more");
    if (!isfinite(wall))
        return pdk_bad_argument(L, "wall_seconds", "must be a finite number");
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_advance(g->rt, s, wall, &job.err);
    pdk_check_rc(L, &job);
    return 0;
}

/* ---- looking inside ------------------------------------------------------------------------------------- */

/* Calls a function that only reads memory and pushes what it packed.  stack: +1, raises */
static int push_packed(lua_State *L, int (*fn)(pdk_runtime *, pdk_pack *, pdk_error *))
{
    pdk_ljob job = { .grip = pdk_check_runtime(L, 1), .err = PDK_NO_ERROR };
    pdk_scratch *scratch = pdk_scratch_new(L);
    job.rc = fn(job.grip->rt, &scratch->pack, &job.err);
    pdk_check_rc(L, &job);
    return pdk_push_answer(L, scratch);
}

static int rt_list(lua_State *L)
{
    return push_packed(L, pdk_runtime_list);
}

static int rt_capabilities(lua_State *L)
{
    return push_packed(L, pdk_runtime_capabilities);
}

/* rt:stats(): the runtime's, and what this binding knows of its queue.        stack: +1, raises */
static int rt_stats(lua_State *L)
{
    push_packed(L, pdk_runtime_stats);
    pdk_grip *g = pdk_check_runtime(L, 1);
    if (!lua_istable(L, -1))
        return 1;
    lua_pushinteger(L, (lua_Integer)pdk_events_count(g->events));
    lua_setfield(L, -2, "events_waiting");
    lua_pushinteger(L, (lua_Integer)pdk_events_dropped(g->events));
    lua_setfield(L, -2, "events_dropped");
    lua_pushinteger(L, (lua_Integer)atomic_load(&g->failed_functions));
    lua_setfield(L, -2, "event_functions_failed");
    return 1;
}

/* rt:inspect(id | { user =, thread = }) -> record or nil; memory only.        stack: +1, raises */
static int rt_inspect(lua_State *L)
{
    static const char *const keys[] = { "user", "thread", NULL };
    pdk_ljob job = { .grip = pdk_check_runtime(L, 1), .err = PDK_NO_ERROR };
    lua_settop(L, 2);
    const char *id = NULL;
    pdk_identity who = { 0 };
    if (lua_istable(L, 2)) {
        pdk_check_keys(L, 2, "identity", keys);
        who = pdk_arg_identity(L, 2);
    } else {
        id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL);
    }
    pdk_scratch *scratch = pdk_scratch_new(L);
    job.rc = pdk_runtime_inspect(job.grip->rt, id, id == NULL ? &who : NULL, &scratch->pack, &job.err);
    pdk_check_rc(L, &job);
    return pdk_push_answer(L, scratch);
}

typedef struct explaining {
    pdk_explain_spec spec;
    pdk_pack *out;
} explaining;

static void explain_job(void *arg)
{
    pdk_ljob *job = arg;
    explaining *e = job->arg;
    job->rc = pdk_runtime_explain(job->grip->rt, &e->spec, e->out, &job->err);
}

/* rt:explain { user =, thread =, requirements =, candidate =, trial = } -> what would be decided, and why.  stack: +1, raises */
static int rt_explain(lua_State *L)
{
    static const char *const keys[] = { "user", "thread", "requirements", "candidate", "trial", NULL };
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    pdk_scratch *request = pdk_scratch_new(L), *candidate = pdk_scratch_new(L), *answer = pdk_scratch_new(L);
    explaining e = { .out = &answer->pack };
    if (pdk_check_keys(L, 2, "request", keys)) {
        e.spec.who = pdk_arg_identity(L, 2);
        e.spec.requirements = pdk_field_plain(L, 2, "requirements", &request->pack);
        e.spec.candidate = pdk_field_plain(L, 2, "candidate", &candidate->pack);
        e.spec.trial = pdk_field_bool(L, 2, "trial", false);
    }
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = &e };
    pdk_run_blocking(L, &job, explain_job);
    return pdk_push_answer(L, answer);
}

/* rt:on(name | "*", fn).                                                      stack: +0, raises */
static int rt_on(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 3);
    pdk_arg_name(L, 2, "name", PDK_MAX_HOLDER, NULL);
    if (!lua_isfunction(L, 3))
        return pdk_bad_argument(L, "fn", "must be a function that takes a record, not a %s", luaL_typename(L, 3));
    lua_createtable(L, 2, 0);
    lua_insert(L, 2); /* [2] the entry, [3] name, [4] fn */
    lua_rawseti(L, 2, 2);
    lua_rawseti(L, 2, 1);
    lua_getiuservalue(L, 1, 1);
    lua_pushvalue(L, 2);
    if (!g->listening) {
        pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
        job.rc = pdk_runtime_on(g->rt, pdk_events_sink_event, g->events, &job.err);
        pdk_check_rc(L, &job);
        g->listening = true;
    }
    lua_rawseti(L, -2, luaL_len(L, -2) + 1);
    return 0;
}

void pdk_bind_runtime(lua_State *L)
{
    static const luaL_Reg methods[] = {
        { "acquire", rt_acquire },     { "get", rt_get },           { "retain", rt_retain },
        { "release", rt_release },     { "binding", rt_binding },   { "park", rt_park },
        { "destroy", rt_destroy },     { "tick", rt_tick },         { "dispatch", rt_dispatch },
        { "reconcile", rt_reconcile }, { "reload", rt_reload },     { "capabilities", rt_capabilities },
        { "advance", rt_advance },     { "list", rt_list },         { "stats", rt_stats },
        { "explain", rt_explain },     { "inspect", rt_inspect },   { "on", rt_on },
        { "reset", rt_reset },         { "shutdown", rt_shutdown }, { "lease", rt_lease },
        { "quarantine", rt_quarantine }, { "retire", rt_retire },   { "sync_skills", pdk_rt_sync_skills },
        { "network_events", pdk_rt_network_events }, { "deny_pending", pdk_rt_deny_pending },
        { "decide", pdk_rt_decide },   { "discard_holders", pdk_rt_discard_holders }, { "fd", rt_fd },
        { "acquire_async", rt_acquire_async }, { "destroy_async", rt_destroy_async }, { "shutdown_async", rt_shutdown_async },
        { "release_async", rt_release_async },
        { "sync_skills_async", pdk_rt_sync_skills_async }, { "network_events_async", pdk_rt_network_events_async },
        { "deny_pending_async", pdk_rt_deny_pending_async }, { "decide_async", pdk_rt_decide_async },
        { NULL, NULL },
    };
    static const luaL_Reg meta[] = { { "__gc", rt_gc }, { "__tostring", rt_tostring }, { NULL, NULL } };
    luaL_newmetatable(L, PDK_RUNTIME_TYPE);
    luaL_setfuncs(L, meta, 0);
    luaL_newlib(L, methods);
    lua_setfield(L, -2, "__index");
    lua_pushliteral(L, PDK_RUNTIME_TYPE);
    lua_setfield(L, -2, "__metatable"); /* scripts get no way at __gc */
    lua_pop(L, 1);
}
