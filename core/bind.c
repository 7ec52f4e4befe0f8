/* bind.c -- the Lua module paddock.core: what every method shares, and the arguments.
 *
 * The same code serves a plain Lua host and the universe: pdk_script_block does nothing in a host's state, and in the
 * universe a grip has no host. */
#include "bind_op.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- memory of one call --------------------------------------------------------------------------------- */

void pdk_scratch_clear(pdk_scratch *s)
{
    pdk_pack_free(&s->pack);
    pdk_result_free(&s->result);
    free(s->bytes);
    s->bytes = NULL;
    if (s->op != NULL)
        pdk_op_release(s->op);
    s->op = NULL;
}

int pdk_push_answer(lua_State *L, pdk_scratch *s)
{
    pdk_view_to_lua(L, pdk_view_of(&s->pack));
    pdk_scratch_clear(s);
    return 1;
}

static int scratch_gc(lua_State *L)
{
    pdk_scratch_clear(lua_touserdata(L, 1));
    return 0;
}

pdk_scratch *pdk_scratch_new(lua_State *L)
{
    pdk_scratch *s = lua_newuserdatauv(L, sizeof *s, 0);
    *s = (pdk_scratch){ 0 };
    if (luaL_newmetatable(L, "paddock.scratch")) {
        lua_pushcfunction(L, scratch_gc);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    return s;
}

/* ---- arguments ------------------------------------------------------------------------------------------ */

int pdk_bad_argument(lua_State *L, const char *name, const char *fmt, ...)
{
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    pdk_error err = PDK_NO_ERROR;
    pdk_fail(&err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` %s", name, text);
    return pdk_raise(L, &err);
}

/* The key at stack index -2 as it may stand in a message. */
static void show_key(lua_State *L, char *to, size_t size)
{
    if (lua_type(L, -2) != LUA_TSTRING) {
        snprintf(to, size, "a %s", luaL_typename(L, -2));
        return;
    }
    snprintf(to, size, "\"%.60s\"", lua_tostring(L, -2));
    for (char *c = to; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || (unsigned char)*c >= 0x7f)
            *c = '?';
}

static bool is_known(const char *key, const char *const *known)
{
    for (; *known != NULL; known++)
        if (strcmp(key, *known) == 0)
            return true;
    return false;
}

static int unknown_key(lua_State *L, const char *name, const char *const *known)
{
    char key[80], list[200] = "";
    show_key(L, key, sizeof key);
    for (size_t n = 0; *known != NULL && n < sizeof list; known++)
        n += (size_t)snprintf(list + n, sizeof list - n, "%s%s", n > 0 ? ", " : "", *known);
    return pdk_bad_argument(L, name, "has no field %s; its fields are %s", key, list);
}

bool pdk_check_keys(lua_State *L, int index, const char *name, const char *const *known)
{
    if (lua_isnoneornil(L, index))
        return false;
    if (!lua_istable(L, index))
        pdk_bad_argument(L, name, "must be a table, not a %s", luaL_typename(L, index));
    for (lua_pushnil(L); lua_next(L, index) != 0; lua_pop(L, 1)) {
        size_t len;
        const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tolstring(L, -2, &len) : NULL;
        if (key == NULL || strlen(key) != len || !is_known(key, known))
            unknown_key(L, name, known);
    }
    return true;
}

const char *pdk_field_bytes(lua_State *L, int index, const char *key, size_t most, size_t *len)
{
    *len = 0;
    if (lua_getfield(L, index, key) == LUA_TNIL)
        return NULL;
    if (lua_type(L, -1) != LUA_TSTRING)
        pdk_bad_argument(L, key, "must be a string, not a %s", luaL_typename(L, -1));
    const char *s = lua_tolstring(L, -1, len);
    if (*len > most)
        pdk_bad_argument(L, key, "must be at most %zu bytes, not %zu", most, *len);
    return s;
}

static void check_name(lua_State *L, const char *name, const char *s, size_t len)
{
    if (len == 0)
        pdk_bad_argument(L, name, "must not be empty");
    if (memchr(s, '\0', len) != NULL)
        pdk_bad_argument(L, name, "must not contain a NUL byte");
}

const char *pdk_field_name(lua_State *L, int index, const char *key, size_t most)
{
    size_t len;
    const char *s = pdk_field_bytes(L, index, key, most, &len);
    if (s != NULL)
        check_name(L, key, s, len);
    return s;
}

double pdk_field_seconds(lua_State *L, int index, const char *key)
{
    if (lua_getfield(L, index, key) == LUA_TNIL)
        return 0;
    if (lua_type(L, -1) != LUA_TNUMBER)
        pdk_bad_argument(L, key, "must be a number of seconds, not a %s", luaL_typename(L, -1));
    double s = lua_tonumber(L, -1);
    if (!isfinite(s) || s <= 0)
        pdk_bad_argument(L, key, "must be positive and finite, not %g", s);
    return s;
}

bool pdk_field_bool(lua_State *L, int index, const char *key, bool otherwise)
{
    if (lua_getfield(L, index, key) == LUA_TNIL)
        return otherwise;
    if (!lua_isboolean(L, -1))
        pdk_bad_argument(L, key, "must be true or false, not a %s", luaL_typename(L, -1));
    return lua_toboolean(L, -1);
}

pdk_view pdk_field_plain(lua_State *L, int index, const char *key, pdk_pack *out)
{
    if (lua_getfield(L, index, key) == LUA_TNIL)
        return PDK_NO_VIEW;
    if (!lua_istable(L, -1))
        pdk_bad_argument(L, key, "must be a table, not a %s", luaL_typename(L, -1));
    pdk_error err = PDK_NO_ERROR;
    pdk_pack_reset(out);
    if (pdk_pack_from_lua(L, -1, out, &err) < 0) {
        pdk_error_wrap(&err, "argument `%s`", key);
        pdk_raise(L, &err);
    }
    return pdk_view_of(out);
}

const char *pdk_arg_name(lua_State *L, int index, const char *name, size_t most, size_t *len)
{
    if (lua_type(L, index) != LUA_TSTRING)
        pdk_bad_argument(L, name, "must be a string, not %s%s", lua_isnil(L, index) ? "" : "a ",
                         luaL_typename(L, index));
    size_t n;
    const char *s = lua_tolstring(L, index, &n);
    if (n > most)
        pdk_bad_argument(L, name, "must be at most %zu bytes, not %zu", most, n);
    check_name(L, name, s, n);
    if (len != NULL)
        *len = n;
    return s;
}

double pdk_arg_timeout(lua_State *L, int index)
{
    static const char *const keys[] = { "timeout", NULL };
    if (!pdk_check_keys(L, index, "options", keys))
        return 0;
    double seconds = pdk_field_seconds(L, index, "timeout");
    lua_pop(L, 1);
    return seconds;
}

pdk_identity pdk_arg_identity(lua_State *L, int index)
{
    pdk_identity who = { 0 };
    who.user = pdk_field_bytes(L, index, "user", PDK_MAX_NAME, &who.user_len);
    who.thread = pdk_field_bytes(L, index, "thread", PDK_MAX_NAME, &who.thread_len);
    return who;
}

/* ---- userdata ------------------------------------------------------------------------------------------- */

static int raise_closed(lua_State *L, const char *why)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_fail(&err, PDK_E_CLOSED, 0, "%s", why);
    return pdk_raise(L, &err);
}

static void check_fork(lua_State *L, pdk_grip *g)
{
    if (pdk_grip_forked(g))
        raise_closed(L, "this process was forked off the one that opened the runtime; open a new one here");
}

pdk_grip *pdk_check_runtime(lua_State *L, int index)
{
    pdk_lruntime *rt = luaL_testudata(L, index, PDK_RUNTIME_TYPE);
    if (rt == NULL)
        pdk_bad_argument(L, "self", "must be a runtime: call methods with a colon, rt:method(...)");
    if (rt->grip == NULL || rt->grip->rt == NULL)
        raise_closed(L, "the runtime is shut down");
    check_fork(L, rt->grip);
    return rt->grip;
}

pdk_lbox *pdk_check_box(lua_State *L, int index)
{
    pdk_lbox **box = luaL_testudata(L, index, PDK_BOX_TYPE);
    if (box == NULL || *box == NULL || (*box)->box == NULL)
        pdk_bad_argument(L, "self", "must be a box: call methods with a colon, box:method(...)");
    check_fork(L, (*box)->grip);
    return *box;
}

/* ---- events --------------------------------------------------------------------------------------------- */

/* Pushes the runtime's table of event functions, found from the runtime or the box at stack index 1. +1, never raises */
static void push_functions(lua_State *L)
{
    if (luaL_testudata(L, 1, PDK_BOX_TYPE) != NULL) {
        lua_getiuservalue(L, 1, 1);
        lua_getiuservalue(L, -1, 1);
        lua_remove(L, -2);
    } else {
        lua_getiuservalue(L, 1, 1);
    }
}

typedef struct delivery {
    pdk_grip *grip;
    pdk_pack record;
    pdk_record_type type;
    bool failed;
} delivery;

/* Calls one function with a copy of the record of its own.  stack: -1 (the function), raises on lack of memory only */
static void call_function(lua_State *L, delivery *d)
{
    pdk_view_to_lua(L, pdk_view_of(&d->record));
    uint64_t dropped = pdk_events_dropped(d->grip->events);
    if (dropped != d->grip->told_dropped && lua_istable(L, -1)) {
        lua_pushinteger(L, (lua_Integer)(dropped - d->grip->told_dropped));
        lua_setfield(L, -2, "dropped");
        d->grip->told_dropped = dropped;
    }
    if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
        d->failed = true;
        lua_pop(L, 1);
    }
}

/* [1] functions: { log = fn, { name, fn }, ... }; [2] the delivery.  stack: raises on lack of memory only */
static int deliver_one(lua_State *L)
{
    delivery *d = lua_touserdata(L, 2);
    if (d->type == PDK_RECORD_LOG) {
        if (lua_getfield(L, 1, "log") == LUA_TFUNCTION)
            call_function(L, d);
        return 0;
    }
    size_t len = 0;
    const char *event = pdk_view_str(pdk_view_get(pdk_view_of(&d->record), "event"), &len);
    lua_Integer n = luaL_len(L, 1);
    for (lua_Integer i = 1; i <= n; i++, lua_settop(L, 2)) {
        lua_rawgeti(L, 1, i);
        lua_rawgeti(L, 3, 1);
        const char *wanted = lua_tostring(L, 4);
        if (strcmp(wanted, "*") != 0 && (event == NULL || strcmp(wanted, event) != 0))
            continue;
        lua_rawgeti(L, 3, 2);
        call_function(L, d);
    }
    return 0;
}

int pdk_deliver(lua_State *L, pdk_grip *g)
{
    if (pdk_events_count(g->events) == 0 || pdk_inside_callback() || !lua_checkstack(L, 8) ||
        atomic_exchange(&g->delivering, true))
        return 0;
    delivery d = { .grip = g };
    int n = 0;
    /* As many as wait now: functions that cause events themselves must not keep this going. */
    for (size_t left = pdk_events_count(g->events); left > 0; left--, n++) {
        if (!pdk_events_take(g->events, &d.record, &d.type))
            break;
        d.failed = false;
        lua_pushcfunction(L, deliver_one);
        push_functions(L);
        lua_pushlightuserdata(L, &d);
        pdk_callback_begin();
        if (lua_pcall(L, 2, 0, 0) != LUA_OK) {
            d.failed = true;
            lua_pop(L, 1);
        }
        pdk_callback_end();
        if (d.failed)
            atomic_fetch_add(&g->failed_functions, 1); /* not logged: the log function may be the one that fails */
    }
    pdk_pack_free(&d.record);
    atomic_store(&g->delivering, false);
    return n;
}

static bool deliver_hook(lua_State *L, void *grip)
{
    return pdk_deliver(L, grip) > 0;
}

/* ---- one call ------------------------------------------------------------------------------------------- */

void pdk_check_rc(lua_State *L, pdk_ljob *job)
{
    if (job->rc < 0)
        pdk_raise(L, &job->err);
}

void pdk_run_blocking(lua_State *L, pdk_ljob *job, void (*fn)(void *job))
{
    pdk_grip *g = job->grip;
    if (pdk_inside_callback()) {
        pdk_fail(&job->err, PDK_E_UNSUPPORTED, 0, "a call that may wait is refused inside a function of a backend, for an event "
                 "or of an operation; get, inspect, list, stats, retain, binding, the calls that end in _async, poll and cancel "
                 "are allowed there");
        pdk_raise(L, &job->err);
    }
    pdk_grip_ref(g);
    job->rc = -1;
    if (g->host != NULL) {
        pdk_host_enter(g->host, L);
        pdk_grip_sweep(g);
        pdk_host_set_hook(g->host, deliver_hook, g);
        pdk_host_run(g->host, L, fn, job);
        pdk_host_leave(g->host);
    } else {
        pdk_script_block(L);
        pdk_grip_sweep(g);
        fn(job);
        pdk_script_unblock(L);
    }
    pdk_deliver(L, g);
    pdk_grip_unref(g, false);
    pdk_check_rc(L, job);
}

/* ---- the module ----------------------------------------------------------------------------------------- */

/* core.version() -> string.                                                  stack: +1, raises */
static int l_version(lua_State *L)
{
    lua_pushstring(L, pdk_version());
    return 1;
}

/* core.error_kinds() -> list of names.                                       stack: +1, raises */
static int l_error_kinds(lua_State *L)
{
    lua_createtable(L, PDK_ERROR_KIND_COUNT, 0);
    for (int kind = 1; kind < PDK_ERROR_KIND_COUNT; kind++) {
        lua_pushstring(L, pdk_error_kind_name((pdk_error_kind)kind));
        lua_rawseti(L, -2, kind);
    }
    return 1;
}

/* core.error_metatable() -> the metatable of every error of paddock.         stack: +1, raises */
static int l_error_metatable(lua_State *L)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_fail(&err, PDK_E_CLOSED, 0, "an error to take the metatable from");
    pdk_error_to_lua(L, &err);
    if (!lua_getmetatable(L, -1))
        return luaL_error(L, "not enough memory");
    return 1;
}

/* core.now() -> seconds on a monotonic clock: Lua has none of its own.  stack: +1, never raises */
static int l_now(lua_State *L)
{
    lua_pushnumber(L, (lua_Number)pdk_now_monotonic() / PDK_NS_PER_S);
    return 1;
}

/* core.collect(): frees the runtimes that finalizers have queued, as `open` does. May wait.  stack: +0, never raises */
static int l_collect(lua_State *L)
{
    pdk_keeper *k = pdk_keeper_of(L);
    pdk_script_block(L);
    pdk_keeper_drain(k);
    pdk_script_unblock(L);
    return 0;
}

/* A closing Lua state unloads the C modules that it loaded, while a thread of paddock may still be on its last
 * instructions; so this one stays. */
static void stay_loaded(void)
{
    Dl_info self;
    if (dladdr((void *)(uintptr_t)stay_loaded, &self) == 0 || self.dli_fname == NULL)
        return;
    void *handle = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    if (handle != NULL)
        dlclose(handle);
}

PDK_API int luaopen_paddock_core(lua_State *L)
{
    static const luaL_Reg functions[] = {
        { "open", pdk_bind_open },
        { "version", l_version },
        { "now", l_now },
        { "collect", l_collect },
        { "error_kinds", l_error_kinds },
        { "error_metatable", l_error_metatable },
        { NULL, NULL },
    };
    if (pdk_script_of(L) == NULL)
        stay_loaded();
    pdk_keeper_of(L); /* before any runtime, so that it is finalized after all of them */
    pdk_bind_runtime(L);
    pdk_bind_box(L);
    pdk_bind_op(L);
    luaL_newlib(L, functions);
    luaL_setfuncs(L, pdk_op_functions, 0);
    return 1;
}
