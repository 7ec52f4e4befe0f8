/* iojson.c -- io.json: decode is lua-cjson's, encode is ours.
 *
 * Why: cjson 2.1 writes numbers with 14 digits, so that a 64-bit integer changes, has no empty list, and writes keys in the
 * order of a hash table; and it reads every number as a float, so that 5 prints as "5.0". Here integers stay integers both
 * ways (up to 2^53 when read: what needs more digits travels as a string), io.json.array marks a list, keys are sorted.
 */
#include "iolib.h"

#include "jsontext.h"
#include "script.h"
#include <lauxlib.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARRAY "paddock.json.array" /* the metatable of marked lists */
#define DEPTH 128
#define EXACT 9007199254740992.0 /* 2^53 */

/* ---- decode -------------------------------------------------------------------------------------------- */

/* The float at the top becomes the integer that it is. Returns whether it changed. */
static bool whole(lua_State *L)
{
    double d = lua_tonumber(L, -1);
    if (lua_isinteger(L, -1) || d != floor(d) || fabs(d) > EXACT)
        return false;
    lua_pop(L, 1);
    lua_pushinteger(L, (lua_Integer)d);
    return true;
}

/* All numbers in the table at the top. cjson has bounded the depth. */
static void whole_numbers(lua_State *L)
{
    luaL_checkstack(L, 4, "JSON");
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (lua_type(L, -1) == LUA_TTABLE) {
            whole_numbers(L);
        } else if (lua_type(L, -1) == LUA_TNUMBER && whole(L)) {
            lua_pushvalue(L, -2);
            lua_pushvalue(L, -2);
            lua_rawset(L, -5); /* of a key that exists: allowed in a traversal */
        }
    }
}

/* decode(text) -> value, or nil and a message */
static int l_decode(lua_State *L)
{
    if (lua_type(L, 1) != LUA_TSTRING)
        pdk_io_bad(L, "json.decode: a string is expected, not %s", luaL_typename(L, 1));
    lua_settop(L, 1);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    if (lua_pcall(L, 1, 1, 0) != LUA_OK) {
        lua_pushnil(L);
        lua_insert(L, 1);
        return 2;
    }
    if (lua_type(L, -1) == LUA_TNUMBER)
        whole(L);
    else if (lua_type(L, -1) == LUA_TTABLE)
        whole_numbers(L);
    return 1;
}

/* ---- encode -------------------------------------------------------------------------------------------- */

typedef struct text { /* a held block: freed however the call ends */
    char *data;
    size_t len, cap;
} text;

static void release_text(void *block)
{
    free(((text *)block)->data);
    free(block);
}

static void add(lua_State *L, text *t, const char *s, size_t len)
{
    if (t->cap - t->len < len) {
        size_t cap = t->cap * 2 > t->len + len ? t->cap * 2 : t->len + len + 256;
        char *grown = realloc(t->data, cap);
        if (grown == NULL)
            luaL_error(L, "json.encode: not enough memory");
        t->data = grown;
        t->cap = cap;
    }
    memcpy(t->data + t->len, s, len);
    t->len += len;
}

static void add_string(lua_State *L, text *t, const char *s, size_t len)
{
    add(L, t, "\"", 1);
    while (len > 0) {
        size_t used = pdk_json_plain(s, len);
        add(L, t, s, used);
        if (used == 0) {
            char out[PDK_JSON_CHAR];
            add(L, t, out, pdk_json_char(s, len, false, out, &used));
        }
        s += used;
        len -= used;
    }
    add(L, t, "\"", 1);
}

static void add_number(lua_State *L, text *t)
{
    char out[PDK_JSON_NUMBER];
    if (lua_isinteger(L, -1))
        snprintf(out, sizeof out, "%lld", (long long)lua_tointeger(L, -1));
    else if (!pdk_json_number(lua_tonumber(L, -1), out))
        pdk_io_bad(L, "json.encode: NaN and infinity are not JSON");
    add(L, t, out, strlen(out));
}

static void add_value(lua_State *L, text *t, int depth);

static void add_list(lua_State *L, text *t, lua_Unsigned n, int depth)
{
    add(L, t, "[", 1);
    for (lua_Unsigned i = 1; i <= n; i++) {
        if (i > 1)
            add(L, t, ",", 1);
        lua_rawgeti(L, -1, (lua_Integer)i);
        add_value(L, t, depth + 1);
        lua_pop(L, 1);
    }
    add(L, t, "]", 1);
}

typedef struct key {
    const char *s; /* the table keeps it */
    size_t len;
} key;

static int by_bytes(const void *a, const void *b)
{
    const key *x = a, *y = b;
    int order = memcmp(x->s, y->s, x->len < y->len ? x->len : y->len);
    return order != 0 ? order : (x->len > y->len) - (x->len < y->len);
}

static void add_object(lua_State *L, text *t, size_t n, int depth)
{
    key *keys = lua_newuserdatauv(L, (n + 1) * sizeof *keys, 0);
    size_t i = 0;
    for (lua_pushnil(L); lua_next(L, -3); lua_pop(L, 1), i++)
        keys[i].s = lua_tolstring(L, -2, &keys[i].len); /* a string already: no conversion that would confuse next */
    qsort(keys, n, sizeof *keys, by_bytes);
    add(L, t, "{", 1);
    for (i = 0; i < n; i++) {
        if (i > 0)
            add(L, t, ",", 1);
        add_string(L, t, keys[i].s, keys[i].len);
        add(L, t, ":", 1);
        lua_pushlstring(L, keys[i].s, keys[i].len);
        lua_rawget(L, -3);
        add_value(L, t, depth + 1);
        lua_pop(L, 1);
    }
    add(L, t, "}", 1);
    lua_pop(L, 1);
}

static bool is_marked(lua_State *L)
{
    if (!lua_getmetatable(L, -1))
        return false;
    luaL_getmetatable(L, ARRAY);
    bool marked = lua_rawequal(L, -1, -2);
    lua_pop(L, 2);
    return marked;
}

static void add_table(lua_State *L, text *t, int depth)
{
    if (depth > DEPTH)
        pdk_io_bad(L, "json.encode: tables nested deeper than %d, or in a circle", DEPTH);
    luaL_checkstack(L, 8, "JSON");
    size_t strings = 0, others = 0;
    lua_Unsigned n = lua_rawlen(L, -1);
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (lua_type(L, -2) == LUA_TSTRING)
            strings++;
        else if (lua_isinteger(L, -2) && lua_tointeger(L, -2) >= 1 && (lua_Unsigned)lua_tointeger(L, -2) <= n)
            others++;
        else
            pdk_io_bad(L, "json.encode: a table's keys must be strings, or 1 to n without holes (json.null fills one)");
    }
    if (others != n || (n > 0 && strings > 0) || (strings > 0 && is_marked(L)))
        pdk_io_bad(L, "json.encode: a table must be a list or an object, not both, and a list has no holes");
    if (n > 0 || (strings == 0 && is_marked(L)))
        add_list(L, t, n, depth);
    else
        add_object(L, t, strings, depth);
}

/* The value at the top; it stays there. */
static void add_value(lua_State *L, text *t, int depth)
{
    size_t len;
    const char *s;
    switch (lua_type(L, -1)) {
    case LUA_TNIL: add(L, t, "null", 4); return;
    case LUA_TBOOLEAN:
        s = lua_toboolean(L, -1) ? "true" : "false";
        add(L, t, s, strlen(s));
        return;
    case LUA_TNUMBER: add_number(L, t); return;
    case LUA_TSTRING:
        s = lua_tolstring(L, -1, &len);
        add_string(L, t, s, len);
        return;
    case LUA_TTABLE: add_table(L, t, depth); return;
    case LUA_TLIGHTUSERDATA:
        if (lua_touserdata(L, -1) == NULL) {
            add(L, t, "null", 4);
            return;
        }
        break;
    default: break;
    }
    pdk_io_bad(L, "json.encode: a %s cannot be JSON", luaL_typename(L, -1));
}

/* encode(value) -> text; raises invalid_argument. Strings are written byte by byte, also those that are no UTF-8. */
static int l_encode(lua_State *L)
{
    luaL_checkany(L, 1);
    lua_settop(L, 1);
    pdk_held *h = pdk_io_hold(L);
    h->release = release_text;
    text *t = h->block = calloc(1, sizeof *t);
    if (t == NULL)
        return luaL_error(L, "json.encode: not enough memory");
    lua_pushvalue(L, 1);
    add_value(L, t, 1);
    lua_pushlstring(L, t->data, t->len);
    pdk_io_release(h);
    return 1;
}

/* array([t]) -> t, marked as a list, so that an empty one is [] */
static int l_array(lua_State *L)
{
    lua_settop(L, 1);
    if (lua_isnil(L, 1)) {
        lua_newtable(L);
        lua_replace(L, 1);
    }
    if (!lua_istable(L, 1))
        pdk_io_bad(L, "json.array: a table is expected, not %s", luaL_typename(L, 1));
    luaL_getmetatable(L, ARRAY);
    lua_setmetatable(L, 1);
    return 1;
}

void pdk_iojson_open(lua_State *L)
{
    luaL_newmetatable(L, ARRAY);
    lua_pop(L, 1);
    lua_createtable(L, 0, 4);
    luaL_requiref(L, "cjson", luaopen_cjson, 0);
    lua_getfield(L, -1, "null");
    lua_setfield(L, -3, "null");
    lua_getfield(L, -1, "new"); /* settings of our own: the host's cjson keeps its */
    lua_call(L, 0, 1);
    lua_getfield(L, -1, "decode_invalid_numbers");
    lua_pushboolean(L, false);
    lua_call(L, 1, 0);
    lua_getfield(L, -1, "decode_max_depth");
    lua_pushinteger(L, DEPTH);
    lua_call(L, 1, 0);
    lua_getfield(L, -1, "decode");
    lua_pushcclosure(L, l_decode, 1);
    lua_setfield(L, -4, "decode");
    lua_pop(L, 2);
    lua_pushcfunction(L, l_encode);
    lua_setfield(L, -2, "encode");
    lua_pushcfunction(L, l_array);
    lua_setfield(L, -2, "array");
}
