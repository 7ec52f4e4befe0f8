/* iface.c -- tables of Lua functions as C handles.
 *
 * Why one struct for both kinds: whoever calls a backend must not know where it lives. The two differ in two places only:
 * how the table is kept alive, and which thread may enter its state.
 *
 * An iface is fixed at birth: every field may be read without a lock. */
#include "call.h"

#include <assert.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CLASS_DEPTH = 8 }; /* how many __index tables a method may stand behind */

struct pdk_iface {
    pdk_script *script; /* where the table lives: either this one */
    pdk_host *host;     /* or that one */
    int ref;            /* in the universe's registry, or the host's key */
    char what[48];
    bool object;        /* what a method has made: of it the core asks for the optional methods alone */
    unsigned optional;  /* of an object: one bit for each of OPTIONAL that it has */
    pdk_pack methods;   /* else: map name -> true */
    pdk_pack fields;    /* map key -> plain value */
};

/* What the core wants to know of an object when it is made, which it is at every hand-out. */
static const char *const OPTIONAL[] = { "close", "cancel" };

static _Thread_local int callbacks;

bool pdk_inside_callback(void)
{
    return callbacks > 0;
}

void pdk_callback_begin(void)
{
    callbacks++;
}

void pdk_callback_end(void)
{
    callbacks--;
}

/* ---- making one ---------------------------------------------------------------------------------------- */

/* Notes the functions and plain fields of the table at `index`, those that are noted already (in a table nearer by)
 * excepted.  stack: balanced, raises on lack of memory */
static void note_table(lua_State *L, int index, pdk_iface *f, pdk_mark *methods, pdk_mark *fields, int seen)
{
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR; /* nothing below raises while it holds a cause: pack errors have none */
    for (lua_pushnil(L); lua_next(L, index) != 0; lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            continue;
        lua_pushvalue(L, -2);
        if (lua_rawget(L, seen) != LUA_TNIL) {
            lua_pop(L, 1);
            continue;
        }
        lua_pop(L, 1);
        lua_pushvalue(L, -2);
        lua_pushboolean(L, true);
        lua_rawset(L, seen);
        size_t len;
        const char *key = lua_tolstring(L, -2, &len);
        if (lua_isfunction(L, -1)) {
            pdk_put_str(&f->methods, key, len);
            pdk_put_bool(&f->methods, true);
            methods->count++;
            continue;
        }
        size_t before = f->fields.len;
        pdk_put_str(&f->fields, key, len);
        if (pdk_pack_from_lua(L, -1, &f->fields, &ignored) < 0)
            f->fields.len = before; /* an object's own business, such as a socket */
        else
            fields->count++;
    }
}

/* [1] the table, [2] the iface.  stack: -, +0, raises */
static int adopt(lua_State *L)
{
    pdk_iface *f = lua_touserdata(L, 2);
    lua_settop(L, 1);
    lua_newtable(L); /* [2] keys that were seen */
    pdk_mark methods = pdk_begin_map(&f->methods), fields = pdk_begin_map(&f->fields);
    lua_pushvalue(L, 1); /* [3] the table at hand: the object, its class, the class's class */
    for (int depth = 0; depth < CLASS_DEPTH && lua_istable(L, 3); depth++) {
        note_table(L, 3, f, &methods, &fields, 2);
        if (!lua_getmetatable(L, 3))
            break;
        lua_pushliteral(L, "__index");
        lua_rawget(L, -2);
        lua_replace(L, 3);
        lua_settop(L, 3);
    }
    pdk_end(&f->methods, &methods);
    pdk_end(&f->fields, &fields);
    if (f->methods.failed || f->fields.failed)
        return luaL_error(L, "not enough memory");
    lua_pushvalue(L, 1);
    f->ref = f->host != NULL ? pdk_host_keep(L, f->host) : pdk_script_ref(L);
    return 0;
}

/* Whether the table at `index`, or its class, or the class's class, has a function of that name.  stack: balanced */
static bool has_function(lua_State *L, int index, const char *name)
{
    int top = lua_gettop(L);
    bool is = false;
    lua_pushvalue(L, index);
    for (int depth = 0; depth < CLASS_DEPTH && lua_istable(L, -1); depth++) {
        lua_pushstring(L, name);
        if (lua_rawget(L, -2) != LUA_TNIL) {
            is = lua_isfunction(L, -1);
            break;
        }
        if (!lua_getmetatable(L, -2))
            break;
        lua_pushliteral(L, "__index");
        lua_rawget(L, -2);
    }
    lua_settop(L, top);
    return is;
}

/* The same of an object. */
static int adopt_object(lua_State *L)
{
    pdk_iface *f = lua_touserdata(L, 2);
    luaL_checkstack(L, 3 * CLASS_DEPTH, "an object");
    for (size_t i = 0; i < sizeof OPTIONAL / sizeof OPTIONAL[0]; i++)
        f->optional |= has_function(L, 1, OPTIONAL[i]) ? 1u << i : 0;
    lua_settop(L, 1);
    f->ref = f->host != NULL ? pdk_host_keep(L, f->host) : pdk_script_ref(L);
    return 0;
}

/* stack: -1 */
static pdk_iface *iface_new(lua_State *L, pdk_script *s, pdk_host *h, const char *what, const char *method)
{
    pdk_iface *f = lua_checkstack(L, 8) ? calloc(1, sizeof *f) : NULL;
    if (f == NULL) {
        lua_pop(L, 1);
        return NULL;
    }
    f->script = s != NULL ? pdk_script_retain(s) : NULL;
    f->host = h != NULL ? pdk_host_retain(h) : NULL;
    f->ref = LUA_NOREF;
    f->object = method != NULL;
    size_t len = strnlen(what, sizeof f->what - 1);
    memcpy(f->what, what, len);
    if (f->object && len + 1 < sizeof f->what) {
        f->what[len] = '.'; /* the rest is zero */
        memcpy(f->what + len + 1, method, strnlen(method, sizeof f->what - len - 2));
    }
    lua_pushcfunction(L, f->object ? adopt_object : adopt);
    lua_insert(L, -2);
    lua_pushlightuserdata(L, f);
    if (lua_pcall(L, 2, 0, 0) != LUA_OK) {
        lua_pop(L, 1);
        pdk_iface_free(f);
        return NULL;
    }
    return f;
}

pdk_iface *pdk_iface_of_script(lua_State *L, pdk_script *s, const char *what)
{
    return iface_new(L, s, NULL, what, NULL);
}

pdk_iface *pdk_iface_of_host(lua_State *L, pdk_host *h, const char *what)
{
    return iface_new(L, NULL, h, what, NULL);
}

void pdk_iface_free(pdk_iface *f)
{
    if (f == NULL)
        return;
    if (f->ref != LUA_NOREF) {
        if (f->host != NULL)
            pdk_host_drop(f->host, f->ref);
        else
            pdk_script_drop_ref(f->script, f->ref);
    }
    if (f->host != NULL)
        pdk_host_release(f->host);
    if (f->script != NULL)
        pdk_script_release(f->script);
    pdk_pack_free(&f->methods);
    pdk_pack_free(&f->fields);
    free(f);
}

bool pdk_iface_has(const pdk_iface *f, const char *method)
{
    for (size_t i = 0; f->object && i < sizeof OPTIONAL / sizeof OPTIONAL[0]; i++)
        if (strcmp(OPTIONAL[i], method) == 0)
            return (f->optional & 1u << i) != 0;
    assert(!f->object); /* whoever asks for another one adds it to OPTIONAL */
    return !pdk_view_is_nil(pdk_view_get(pdk_view_of(&f->methods), method));
}

pdk_view pdk_iface_field(const pdk_iface *f, const char *key)
{
    return pdk_view_get(pdk_view_of(&f->fields), key);
}

/* Pushes the table of the iface.  stack: +1, raises on lack of memory only */
static void iface_push(lua_State *L, const pdk_iface *f)
{
    if (f->host != NULL)
        pdk_host_push_kept(L, f->host, f->ref);
    else
        pdk_script_push_ref(L, f->ref);
}

/* ---- calling ------------------------------------------------------------------------------------------- */

/* The results from `first` to the top, as the call wants them. 0 or -1 with call->err.  stack: +0, raises nothing
 * but what packing may (nothing) */
static int take_results(lua_State *L, int first, pdk_call *call)
{
    if (call->object != NULL) {
        lua_settop(L, first);
        if (!lua_istable(L, first))
            return pdk_fail(call->err, call->otherwise, 0, "%s.%s must answer with a table of functions, not %s",
                            call->iface->what, call->method, luaL_typename(L, first));
        *call->object = iface_new(L, call->iface->script, call->iface->host, call->iface->what, call->method);
        return *call->object != NULL ? 0 : pdk_fail(call->err, PDK_E_NO_MEMORY, 0, "no memory for %s.%s", call->iface->what,
                                                    call->method);
    }
    for (int i = first; call->results != NULL && i <= lua_gettop(L); i++)
        if (pdk_pack_from_lua(L, i, call->results, call->err) < 0)
            return pdk_error_become(call->err, call->otherwise, NULL, "%s.%s answered something that is no plain data",
                                    call->iface->what, call->method);
    return 0;
}

/* [1] the call.  stack: raises what the method raises */
static int body(lua_State *L)
{
    pdk_call *call = lua_touserdata(L, 1);
    iface_push(L, call->iface); /* [2] */
    if (lua_isnil(L, 2)) {
        call->rc = pdk_fail(call->err, PDK_E_CLOSED, 0, "%s is gone: its Lua state was closed", call->iface->what);
        return 0;
    }
    lua_getfield(L, 2, call->method); /* [3]; not raw: methods may stand in a class */
    if (lua_isnil(L, 3)) {
        call->rc = pdk_fail(call->err, call->otherwise, 0, "%s has no function `%s`", call->iface->what, call->method);
        return 0;
    }
    lua_pushvalue(L, 2);
    int n = 1;
    for (size_t i = 0; call->args != NULL; i++) {
        pdk_view v = pdk_view_nth(call->args, i);
        if (v.len == 0)
            break;
        luaL_checkstack(L, 2, "too many arguments");
        pdk_view_to_lua(L, v);
        n++;
    }
    lua_call(L, n, LUA_MULTRET);
    call->rc = take_results(L, 3, call);
    return 0;
}

void pdk_call_perform(lua_State *L, pdk_call *call)
{
    call->rc = -1;
    if (!lua_checkstack(L, 8)) {
        pdk_fail(call->err, PDK_E_NO_MEMORY, 0, "no Lua stack for %s.%s", call->iface->what, call->method);
        return;
    }
    const pdk_limit *former = pdk_limit_current();
    if (call->limit != NULL)
        pdk_limit_enter(call->limit);
    pdk_callback_begin();
    size_t before = call->results != NULL ? call->results->len : 0;
    lua_pushcfunction(L, body);
    lua_pushlightuserdata(L, call);
    if (lua_pcall(L, 1, 0, 0) != LUA_OK) {
        call->rc = -1;
        pdk_error_from_lua(L, -1, call->otherwise, call->err);
        lua_pop(L, 1);
    }
    if (call->rc < 0 && call->results != NULL && !call->results->failed)
        call->results->len = before;
    pdk_callback_end();
    pdk_limit_enter(former);
}

/* stack: balanced, never raises */
static int enter(lua_State *L, void *arg)
{
    pdk_call_perform(L, arg);
    return 0;
}

static int run(pdk_call *call)
{
    PDK_AUTO_ERROR own; /* whoever carries it out may not find err == NULL */
    pdk_error_begin(&own);
    pdk_error *err = call->err;
    call->err = &own;
    call->rc = -1;
    if (call->iface->host != NULL)
        pdk_host_call(call->iface->host, call);
    else if (pdk_script_enter(call->iface->script, enter, call, &own) < 0)
        call->rc = -1;
    if (call->rc < 0)
        pdk_error_move(err, &own);
    return call->rc;
}

int pdk_iface_call(pdk_iface *f, const char *method, const pdk_pack *args, pdk_pack *results, const pdk_limit *limit,
                   pdk_error_kind otherwise, pdk_error *err)
{
    pdk_call call = { .iface = f, .method = method, .args = args, .results = results, .limit = limit,
                      .otherwise = otherwise, .err = err };
    return run(&call);
}

int pdk_iface_make(pdk_iface *f, const char *method, const pdk_pack *args, pdk_iface **object, const pdk_limit *limit,
                   pdk_error_kind otherwise, pdk_error *err)
{
    *object = NULL;
    pdk_call call = { .iface = f, .method = method, .args = args, .object = object, .limit = limit,
                      .otherwise = otherwise, .err = err };
    return run(&call);
}
