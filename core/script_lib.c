/* script_lib.c -- what Lua code in the universe finds: the standard libraries, `require` for the files that are built
 * into the library, and text chunks only, wherever one can enter: precompiled code is not checked by Lua, and can read
 * and write any memory. */
#include "script_internal.h"

#include "bounded.h"
#include <ctype.h>
#include <lauxlib.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const pdk_embedded *pdk_embedded_find(const char *name)
{
    for (const pdk_embedded *f = pdk_embedded_files; f->name != NULL; f++)
        if (strcmp(f->name, name) == 0)
            return f;
    return NULL;
}

/* ---- require ---- */

/* "paddock.backend.docker" -> "paddock/backend/docker.lua"; false when the name is none of paddock's. */
static bool module_path(const char *module, char *path, size_t size)
{
    if (strcmp(module, "paddock") == 0) {
        snprintf(path, size, "paddock/init.lua");
        return true;
    }
    if (strncmp(module, "paddock.", 8) != 0 || strlen(module) + 8 > size)
        return false;
    size_t n = 0;
    for (const char *c = module; *c != '\0'; c++) {
        if (*c == '.' && c[1] != '.' && c[1] != '\0')
            path[n++] = '/';
        else if (isalnum((unsigned char)*c) || *c == '_')
            path[n++] = *c;
        else
            return false;
    }
    strcpy(path + n, ".lua");
    return true;
}

static int load_failed(lua_State *L, const char *module)
{
    return luaL_error(L, "error loading module '%s': %s", module, lua_tostring(L, -1));
}

/* A searcher: the file of a module of paddock, in $PADDOCK_LUA_PATH, else in the library. stack: +1 or +2, raises */
static int search_paddock(lua_State *L)
{
    const char *module = luaL_checkstring(L, 1);
    char path[256];
    if (!module_path(module, path, sizeof path))
        return 0;
    const char *folder = getenv("PADDOCK_LUA_PATH");
    if (folder != NULL && folder[0] != '\0') {
        const char *file = lua_pushfstring(L, "%s/%s", folder, path);
        FILE *there = fopen(file, "re");
        if (there != NULL) {
            fclose(there);
            if (luaL_loadfilex(L, file, "t") != LUA_OK)
                return load_failed(L, module);
            lua_pushvalue(L, -2);
            return 2;
        }
    }
    const char *name = lua_pushfstring(L, "lua/%s", path);
    const pdk_embedded *f = pdk_embedded_find(name);
    if (f == NULL) {
        lua_pushfstring(L, "no file '%s' in the library", name);
        return 1;
    }
    if (luaL_loadbufferx(L, (const char *)f->data, f->len, lua_pushfstring(L, "@%s", name), "t") != LUA_OK)
        return load_failed(L, module);
    lua_pushvalue(L, -3);
    return 2;
}

/* A searcher: package.path, as Lua's own, but text only. stack: +1 or +2, raises */
static int search_path(lua_State *L)
{
    const char *module = luaL_checkstring(L, 1);
    lua_getfield(L, lua_upvalueindex(1), "searchpath");
    lua_pushvalue(L, 1);
    if (lua_getfield(L, lua_upvalueindex(1), "path") != LUA_TSTRING)
        return luaL_error(L, "package.path must be a string");
    lua_call(L, 2, 2);
    if (lua_isnil(L, -2))
        return 1; /* where it was looked for */
    const char *file = lua_tostring(L, -2);
    if (luaL_loadfilex(L, file, "t") != LUA_OK)
        return load_failed(L, module);
    lua_pushstring(L, file);
    return 2;
}

static void preload(lua_State *L, const char *name, lua_CFunction open)
{
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, open);
    lua_setfield(L, -2, name);
    lua_pop(L, 1);
}

static void set_searchers(lua_State *L)
{
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "searchers");
    lua_rawgeti(L, -1, 1); /* Lua's own for package.preload */
    lua_createtable(L, 3, 0);
    lua_insert(L, -2);
    lua_rawseti(L, -2, 1);
    lua_pushcfunction(L, search_paddock);
    lua_rawseti(L, -2, 2);
    lua_pushvalue(L, -3);
    lua_pushcclosure(L, search_path, 1);
    lua_rawseti(L, -2, 3);
    lua_setfield(L, -3, "searchers");
    lua_pop(L, 1);
    /* A module in C would wait without giving the mutex up, and may be built for another Lua. */
    lua_pushnil(L);
    lua_setfield(L, -2, "loadlib");
    lua_pushliteral(L, "");
    lua_setfield(L, -2, "cpath");
    lua_pop(L, 1);
}

/* ---- text only ---- */

/* load and loadfile with the mode fixed to "t"; upvalue 1 is Lua's own. */
static int text_only(lua_State *L, int mode_at)
{
    if (lua_gettop(L) < mode_at)
        lua_settop(L, mode_at);
    lua_pushliteral(L, "t");
    lua_replace(L, mode_at);
    int n = lua_gettop(L);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, n, LUA_MULTRET);
    return lua_gettop(L);
}
static int text_load(lua_State *L)
{
    luaL_checkany(L, 1);
    return text_only(L, 3);
}
static int text_loadfile(lua_State *L)
{
    return text_only(L, 2);
}

static int text_dofile(lua_State *L)
{
    const char *file = luaL_optstring(L, 1, NULL);
    lua_settop(L, 1);
    if (luaL_loadfilex(L, file, "t") != LUA_OK)
        return lua_error(L);
    lua_call(L, 0, LUA_MULTRET);
    return lua_gettop(L) - 1;
}

/* collectgarbage without "generational": with it, Lua 5.4.4 has faults that a collection during a policy would meet. */
static int incremental_only(lua_State *L)
{
    if (strcmp(luaL_optstring(L, 1, "collect"), "generational") == 0)
        return luaL_error(L, "the universe collects incrementally only");
    int n = lua_gettop(L);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, n, LUA_MULTRET);
    return lua_gettop(L);
}

static void wrap_global(lua_State *L, const char *name, lua_CFunction wrapper)
{
    lua_getglobal(L, name);
    lua_pushcclosure(L, wrapper, 1);
    lua_setglobal(L, name);
}

void pdk_script_open_libs(lua_State *L)
{
    luaL_openlibs(L);
    set_searchers(L);
    preload(L, "cjson", luaopen_cjson);
    preload(L, "paddock.core", luaopen_paddock_core);
    preload(L, "paddock.io", luaopen_paddock_io);
    wrap_global(L, "load", text_load);
    wrap_global(L, "loadfile", text_loadfile);
    wrap_global(L, "dofile", text_dofile);
    wrap_global(L, "collectgarbage", incremental_only);
    /* Policies make a few short-lived views per call: with Lua's usual pause of 200 a small universe is marked anew for
     * every thousand of them, which costs as much as making them. */
    lua_gc(L, LUA_GCINC, 400, 0, 0);
    pdk_bounded_install(L);
}
