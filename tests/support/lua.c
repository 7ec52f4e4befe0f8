/* lua.c -- a Lua interpreter that is built with a sanitizer: `lua FILE ARGS...`.
 * A sanitizer's runtime must be in the program from its start, which Debian's lua5.4 does not have, and preloading it
 * would follow every child that a test starts. */
#include <lauxlib.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>

static int traceback(lua_State *L)
{
    luaL_traceback(L, L, luaL_tolstring(L, 1, NULL), 1);
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: lua FILE ARGS...\n");
        return 64;
    }
    lua_State *L = luaL_newstate();
    if (L == NULL) return 70;
    luaL_openlibs(L);
    lua_createtable(L, argc, 1);
    for (int i = 0; i < argc; i++) {
        lua_pushstring(L, argv[i]);
        lua_rawseti(L, -2, i - 1);
    }
    lua_setglobal(L, "arg");
    lua_pushcfunction(L, traceback);
    int failed = luaL_loadfile(L, argv[1]) != LUA_OK;
    if (!failed) {
        for (int i = 2; i < argc; i++) lua_pushstring(L, argv[i]);
        failed = lua_pcall(L, argc - 2, 0, 1) != LUA_OK;
    }
    if (failed) fprintf(stderr, "lua: %s\n", lua_tostring(L, -1));
    lua_close(L);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
