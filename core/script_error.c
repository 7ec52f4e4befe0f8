/* script_error.c -- errors across the border between C and Lua, in a universe and in a Lua host's own state alike. */
#include "script.h"

#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>

#define ERROR_TYPE "paddock.error" /* the metatable's name in each state's registry */
#define CAUSES     8               /* causes that cross; more would be a cycle */

static int error_tostring(lua_State *L)
{
    lua_getfield(L, 1, "kind");
    const char *kind = luaL_tolstring(L, -1, NULL);
    lua_getfield(L, 1, "message");
    const char *message = lua_isnil(L, -1) ? "(no message)" : luaL_tolstring(L, -1, NULL);
    lua_pushfstring(L, "%s: %s", kind, message);
    return 1;
}

static void push_metatable(lua_State *L)
{
    if (luaL_newmetatable(L, ERROR_TYPE)) {
        lua_pushcfunction(L, error_tostring);
        lua_setfield(L, -2, "__tostring");
    }
}

static void set_text(lua_State *L, const char *key, const char *text)
{
    if (text[0] == '\0')
        return;
    lua_pushstring(L, text);
    lua_setfield(L, -2, key);
}

static void push_error(lua_State *L, const pdk_error *err, int depth)
{
    luaL_checkstack(L, 6, "an error");
    lua_createtable(L, 0, 6);
    set_text(L, "kind", pdk_error_kind_name(err->kind));
    set_text(L, "reason", err->reason);
    set_text(L, "message", err->message);
    set_text(L, "sandbox_id", err->sandbox_id);
    set_text(L, "stage", err->stage);
    if (err->attempt > 0) {
        lua_pushinteger(L, err->attempt);
        lua_setfield(L, -2, "attempt");
    }
    if (err->cause != NULL && depth < CAUSES) {
        push_error(L, err->cause, depth + 1);
        lua_setfield(L, -2, "cause");
    }
    push_metatable(L);
    lua_setmetatable(L, -2);
}

static int build_error(lua_State *L)
{
    push_error(L, lua_touserdata(L, 1), 0);
    return 1;
}

void pdk_error_to_lua(lua_State *L, pdk_error *err)
{
    luaL_checkstack(L, 3, "an error");
    lua_pushcfunction(L, build_error);
    lua_pushlightuserdata(L, err);
    /* Protected, so that `err` and its causes are freed also when there is no memory for the table: then what stands on
     * the stack is Lua's own message about that. */
    lua_pcall(L, 1, 1, 0);
    pdk_error_clear(err);
}

int pdk_raise(lua_State *L, pdk_error *err)
{
    pdk_error_to_lua(L, err);
    return lua_error(L);
}

/* ---- from Lua ---- */

typedef struct reading {
    pdk_error *out;
    pdk_error_kind otherwise;
} reading;

static void get_text(lua_State *L, int table, const char *key, char *to, size_t size)
{
    lua_pushstring(L, key);
    lua_rawget(L, table);
    if (lua_type(L, -1) == LUA_TSTRING)
        snprintf(to, size, "%s", lua_tostring(L, -1));
    lua_pop(L, 1);
}

static bool is_error(lua_State *L, int index)
{
    if (lua_type(L, index) != LUA_TTABLE || !lua_getmetatable(L, index))
        return false;
    luaL_getmetatable(L, ERROR_TYPE);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    return same;
}

/* The table at `index` becomes `out` (without the cause). */
static void read_table(lua_State *L, int index, pdk_error_kind otherwise, pdk_error *out)
{
    char kind[40] = "", message[sizeof out->message] = "", reason[sizeof out->reason] = "";
    get_text(L, index, "kind", kind, sizeof kind);
    get_text(L, index, "message", message, sizeof message);
    get_text(L, index, "reason", reason, sizeof reason);
    pdk_error_kind k = pdk_error_kind_of(kind);
    pdk_fail_reason(out, k == PDK_OK ? otherwise : k, reason, "%s", message);
    get_text(L, index, "sandbox_id", out->sandbox_id, sizeof out->sandbox_id);
    get_text(L, index, "stage", out->stage, sizeof out->stage);
    lua_pushstring(L, "attempt");
    lua_rawget(L, index);
    if (lua_isinteger(L, -1))
        out->attempt = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
}

/* Builds the chain from the root up: the innermost cause first, each error around it on top. */
static int read_error(lua_State *L)
{
    reading *r = lua_touserdata(L, 1);
    if (!is_error(L, 2)) {
        pdk_fail(r->out, r->otherwise, 0, "%s", luaL_tolstring(L, 2, NULL));
        return 0;
    }
    luaL_checkstack(L, CAUSES + 6, "an error");
    int depth = 2;
    for (; depth < 2 + CAUSES; depth++) {
        lua_pushstring(L, "cause");
        lua_rawget(L, depth);
        if (!is_error(L, -1)) {
            lua_pop(L, 1);
            break;
        }
    }
    for (int i = lua_gettop(L); i >= 2; i--) {
        pdk_error one = PDK_NO_ERROR;
        read_table(L, i, r->otherwise, &one);
        if (r->out->kind != PDK_OK) {
            one.cause = malloc(sizeof *one.cause);
            if (one.cause != NULL) /* else the message has to do: it names its cause as well */
                *one.cause = *r->out;
            else
                pdk_error_clear(r->out);
        }
        *r->out = one;
    }
    return 0;
}

void pdk_error_from_lua(lua_State *L, int index, pdk_error_kind otherwise, pdk_error *err)
{
    pdk_error out = PDK_NO_ERROR;
    reading r = { &out, otherwise };
    int top = lua_gettop(L);
    index = lua_absindex(L, index);
    if (lua_checkstack(L, 4)) {
        lua_pushcfunction(L, read_error);
        lua_pushlightuserdata(L, &r);
        lua_pushvalue(L, index);
        if (lua_pcall(L, 2, 0, 0) != LUA_OK && out.kind == PDK_OK)
            pdk_fail(&out, otherwise, 0, "an error whose text cannot be made");
    } else
        pdk_fail(&out, PDK_E_NO_MEMORY, 0, "Lua has no memory left");
    lua_settop(L, top);
    pdk_error_move(err, &out);
}
