/* policy_env.c -- what a policy sees of the world.
 *
 * Each file gets an environment of its own: an empty table whose __index is the table of what is allowed, and whose
 * __newindex refuses, so that a global that is written by mistake is an error and not a state that stays behind. No
 * function here hands out a metatable, loads code, or reaches what another file has. */
#include "policy_internal.h"

#include "bounded.h"
#include <ctype.h>
#include <lauxlib.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <string.h>

static const char fail_key = 0; /* its address is the registry's key for the metatable of policy.fail's errors */
#define LOG_LINES 16            /* of one call */
#define LOG_BYTES 1000          /* of one line */
#define LOG_UNITS 2000

static pdk_policy_call *call_of(lua_State *L)
{
    pdk_budget *b = pdk_budget_of(L);
    if (b == NULL)
        luaL_error(L, "only a policy may call this");
    return b->call;
}

/* ---- pcall: the end of a budget goes through ---- */

static int safe_pcall(lua_State *L)
{
    luaL_checkany(L, 1);
    int status = lua_pcall(L, lua_gettop(L) - 1, LUA_MULTRET, 0);
    pdk_budget_check(L);
    lua_pushboolean(L, status == LUA_OK);
    lua_insert(L, 1);
    return lua_gettop(L);
}

/* xpcall whose handler runs after the stack is unwound: there is no debug library to look at it anyway. */
static int safe_xpcall(lua_State *L)
{
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_pushvalue(L, 1);
    lua_copy(L, 2, 1);
    lua_replace(L, 2); /* now 1 = handler, 2 = function, then its arguments */
    int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
    pdk_budget_check(L);
    if (status == LUA_OK) {
        lua_pushboolean(L, 1);
        lua_replace(L, 1);
        return lua_gettop(L);
    }
    lua_pushvalue(L, 1);
    lua_insert(L, -2);
    status = lua_pcall(L, 1, LUA_MULTRET, 0);
    pdk_budget_check(L);
    lua_pushboolean(L, 0);
    lua_replace(L, 1);
    return lua_gettop(L);
}

/* ---- policy.* ---- */

static int fail_tostring(lua_State *L)
{
    lua_getiuservalue(L, 1, 1);
    return 1;
}

const char *pdk_policy_failure(lua_State *L, int index)
{
    index = lua_absindex(L, index);
    if (lua_type(L, index) != LUA_TUSERDATA || !lua_getmetatable(L, index))
        return NULL;
    lua_rawgetp(L, LUA_REGISTRYINDEX, &fail_key);
    bool same = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    if (!same)
        return NULL;
    lua_getiuservalue(L, index, 1); /* the userdata keeps the string alive */
    const char *text = lua_tostring(L, -1);
    lua_pop(L, 1);
    return text;
}

/* policy.fail("invalid_argument", message): the operation fails with it, and not with policy_error */
static int policy_fail(lua_State *L)
{
    const char *kind = luaL_checkstring(L, 1);
    if (strcmp(kind, "invalid_argument") != 0)
        return luaL_error(L, "policy.fail: the kind must be \"invalid_argument\", not \"%s\"", kind);
    luaL_checkstring(L, 2);
    lua_newuserdatauv(L, 0, 1);
    lua_pushvalue(L, 2);
    lua_setiuservalue(L, -2, 1);
    lua_rawgetp(L, LUA_REGISTRYINDEX, &fail_key);
    lua_setmetatable(L, -2);
    return lua_error(L);
}

/* policy.log(message [, "warn"]): a line of the runtime's log; never waits */
static int policy_log(lua_State *L)
{
    static const char *const levels[] = { "info", "warn", NULL };
    size_t len;
    const char *text = luaL_checklstring(L, 1, &len);
    pdk_policy_call *c = call_of(L);
    pdk_log_level level = luaL_checkoption(L, 2, "info", levels) == 0 ? PDK_INFO : PDK_WARN;
    pdk_charge(L, LOG_UNITS + len / 64);
    if (++c->log_lines > LOG_LINES)
        return luaL_error(L, "policy.log: more than %d lines in one call", LOG_LINES);
    if (c->p->log == NULL)
        return 0;
    char line[LOG_BYTES + 1];
    len = len < LOG_BYTES ? len : LOG_BYTES;
    memcpy(line, text, len);
    line[len] = '\0';
    pdk_log_event(c->p->log, level, "policy", PDK_STR("file", c->path), PDK_STR("function", c->what),
                  PDK_STR("message", line));
    return 0;
}

/* policy.sha256hex(bytes) -> 64 hexadecimal characters */
static int policy_sha256hex(lua_State *L)
{
    size_t len;
    const char *text = luaL_checklstring(L, 1, &len);
    pdk_charge(L, len / 16 + 20);
    unsigned char hash[SHA256_DIGEST_LENGTH];
    char hex[2 * SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)text, len, hash);
    for (size_t i = 0; i < sizeof hash; i++) {
        hex[2 * i] = "0123456789abcdef"[hash[i] >> 4];
        hex[2 * i + 1] = "0123456789abcdef"[hash[i] & 15];
    }
    lua_pushlstring(L, hex, sizeof hex);
    return 1;
}

static const pdk_policy_text *find_text(const pdk_policy_folder *folder, const char *name)
{
    for (size_t i = 0; folder != NULL && i < folder->count; i++)
        if (strcmp(folder->texts[i].name, name) == 0)
            return &folder->texts[i];
    return NULL;
}

static bool plain_name(const char *name, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)name[i]) && name[i] != '_' && name[i] != '-')
            return false;
    return len > 0 && len < 100;
}

/* Runs NAME.lua of this policy's folder, or the built-in file of that name; pushes what it returned. */
static void run_required(lua_State *L, const pdk_policy_call *c, const char *name, const char *file)
{
    const pdk_policy_text *t = find_text(c->folder, file);
    if (t != NULL && t->text == NULL)
        luaL_error(L, "policy.require: '%s' %s", file, t->why);
    if (t != NULL) {
        pdk_policy_run_text(L, t->path, t->text, t->len);
        return;
    }
    const char *path = lua_pushfstring(L, "policies/%s.lua", name);
    const pdk_embedded *e = pdk_embedded_find(path);
    if (e == NULL)
        luaL_error(L, "policy.require: there is no file '%s' beside this one, and none is built in", file);
    else
        pdk_policy_run_text(L, path, (const char *)e->data, e->len);
}

/* policy.require(name) -> what NAME.lua beside this file returned, or the built-in one (policies/paths.lua); each policy has
 * its own instance of it */
static int policy_require(lua_State *L)
{
    size_t len;
    const char *name = luaL_checklstring(L, 1, &len);
    pdk_policy_call *c = call_of(L);
    lua_settop(L, 1);
    if (c->loaded_ref == LUA_NOREF)
        return luaL_error(L, "policy.require works while a file is loaded: call it outside of functions");
    if (!plain_name(name, len))
        return luaL_error(L, "policy.require: '%s' is no name of a file beside this one, without .lua", name);
    lua_rawgeti(L, LUA_REGISTRYINDEX, c->loaded_ref);
    lua_pushvalue(L, 1);
    lua_rawget(L, 2);
    if (lua_islightuserdata(L, -1))
        return luaL_error(L, "policy.require: '%s' is being loaded already (a cycle)", name);
    if (!lua_isnil(L, -1))
        return 1;
    const char *file = lua_pushfstring(L, "%s.lua", name);
    lua_pushvalue(L, 1);
    lua_pushlightuserdata(L, c); /* the mark of a cycle */
    lua_rawset(L, 2);
    run_required(L, c, name, file);
    if (lua_isnil(L, -1))
        return luaL_error(L, "policy.require: '%s' returned nothing", file);
    lua_pushvalue(L, 1);
    lua_pushvalue(L, -2);
    lua_rawset(L, 2);
    return 1;
}

/* ---- the environment ---- */

static const pdk_bounded_function base_functions[] = {
    { "assert", NULL },
    { "error", NULL },
    { "ipairs", NULL },
    { "next", pdk_policy_next },
    { "pairs", pdk_policy_pairs },
    { "pcall", safe_pcall },
    { "select", NULL },
    { "tonumber", pdk_charged },
    { "tostring", pdk_charged },
    { "type", pdk_policy_type },
    { "xpcall", safe_xpcall },
    { NULL, NULL },
};
static const luaL_Reg policy_functions[] = {
    { "fail", policy_fail },           { "log", policy_log }, { "require", policy_require },
    { "sha256hex", policy_sha256hex }, { NULL, NULL },
};

static int refuse_global(lua_State *L)
{
    return luaL_error(L, "global '%s' is assigned: declare it local", luaL_tolstring(L, 2, NULL));
}

/* Pushes a fresh sealed environment.  stack: +1, raises */
static void env_push(lua_State *L)
{
    luaL_checkstack(L, 8, "an environment");
    lua_newtable(L); /* the environment */
    lua_newtable(L); /* its metatable */
    lua_newtable(L); /* what is allowed */
    pdk_bounded_fill(L, LUA_GNAME, base_functions);
    pdk_bounded_string(L);
    lua_setfield(L, -2, "string");
    pdk_bounded_table(L);
    lua_setfield(L, -2, "table");
    pdk_bounded_utf8(L);
    lua_setfield(L, -2, "utf8");
    pdk_bounded_math(L);
    lua_setfield(L, -2, "math");
    luaL_newlib(L, policy_functions);
    lua_setfield(L, -2, "policy");
    lua_setfield(L, -2, "__index");
    lua_pushcfunction(L, refuse_global);
    lua_setfield(L, -2, "__newindex");
    lua_setmetatable(L, -2);
}

void pdk_policy_env_open(lua_State *L)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &fail_key) == LUA_TNIL) {
        lua_newtable(L);
        lua_pushvalue(L, -1);
        lua_rawsetp(L, LUA_REGISTRYINDEX, &fail_key);
        lua_pushcfunction(L, fail_tostring);
        lua_setfield(L, -2, "__tostring");
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, "__metatable");
        lua_pop(L, 1);
    }
    lua_pop(L, 1);
    pdk_policy_ctx_open(L);
}

void pdk_policy_run_text(lua_State *L, const char *path, const char *text, size_t len)
{
    if (len >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) { /* a byte order mark */
        text += 3;
        len -= 3;
    }
    if (len > 0 && text[0] == '#') { /* "#!...": the line end stays, for the numbers of lines */
        const char *end = memchr(text, '\n', len);
        len -= end == NULL ? len : (size_t)(end - text);
        text = end == NULL ? "" : end;
    }
    if (len > 0 && text[0] == LUA_SIGNATURE[0])
        luaL_error(L, "%s:1: precompiled Lua is refused: give the source text", path);
    luaL_checkstack(L, 4, path);
    if (luaL_loadbufferx(L, text, len, lua_pushfstring(L, "@%s", path), "t") != LUA_OK)
        lua_error(L);
    lua_remove(L, -2);
    env_push(L);
    lua_setupvalue(L, -2, 1);
    lua_call(L, 0, 1);
}
