/* bounded.c -- string, table, utf8 and math for policies.
 *
 * Three kinds of functions: those that take time in proportion to their strings are Lua's own behind a charge; those
 * whose time depends on numbers in their arguments (rep, concat, move, unpack, insert, remove) are Lua's own behind
 * a check; those that can take any time (patterns, sort) are written anew. What they allocate is bounded by the
 * allocator already. */
#include "bounded.h"

#include "script_internal.h"
#include <lauxlib.h>
#include <lualib.h>
#include <string.h>

#define BYTES_PER_UNIT 64 /* what copying or looking at a byte costs, in instructions */
#define MOST_ITEMS     (1 << 20)

/* Upvalue 1 of each wrapper is Lua's own function, which has no upvalues itself, so it can run in the wrapper's frame. */
static int original(lua_State *L)
{
    return lua_tocfunction(L, lua_upvalueindex(1))(L);
}

int pdk_charged(lua_State *L)
{
    size_t bytes = 0;
    for (int i = lua_gettop(L); i >= 1; i--)
        if (lua_type(L, i) == LUA_TSTRING)
            bytes += lua_rawlen(L, i);
    pdk_charge(L, bytes / BYTES_PER_UNIT + 1);
    return original(L);
}

/* ---- string ---- */

static int string_rep(lua_State *L)
{
    size_t len, sep_len;
    luaL_checklstring(L, 1, &len);
    lua_Integer n = luaL_checkinteger(L, 2);
    luaL_optlstring(L, 3, "", &sep_len);
    size_t each = len + sep_len;
    if (n <= 0 || each == 0) { /* Lua's own would count to n even when there is nothing to repeat */
        lua_pushliteral(L, "");
        return 1;
    }
    pdk_budget *b = pdk_budget_of(L);
    size_t most = b == NULL ? PDK_PACK_MAX : b->allowed->largest;
    if ((lua_Unsigned)n > most / each)
        pdk_budget_too_large(L);
    pdk_charge(L, each * (size_t)n / BYTES_PER_UNIT + (size_t)n / 8 + 1);
    return original(L);
}

/* ---- table ---- */

static lua_Unsigned span(lua_Integer from, lua_Integer to)
{
    return to < from ? 0 : (lua_Unsigned)to - (lua_Unsigned)from + 1;
}

static void charge_items(lua_State *L, lua_Unsigned n)
{
    if (n > MOST_ITEMS)
        luaL_error(L, "too many items (more than %d)", MOST_ITEMS);
    pdk_charge(L, (size_t)n + 1);
}

static int table_concat(lua_State *L)
{
    lua_Integer from = luaL_optinteger(L, 3, 1);
    lua_Integer to = luaL_opt(L, luaL_checkinteger, 4, luaL_len(L, 1));
    charge_items(L, span(from, to));
    return original(L);
}

static int table_unpack(lua_State *L)
{
    lua_Integer from = luaL_optinteger(L, 2, 1);
    lua_Integer to = luaL_opt(L, luaL_checkinteger, 3, luaL_len(L, 1));
    charge_items(L, span(from, to));
    return original(L);
}

static int table_move(lua_State *L)
{
    charge_items(L, span(luaL_checkinteger(L, 2), luaL_checkinteger(L, 3)));
    return original(L);
}

/* insert and remove move what stands behind the position. */
static int table_shift(lua_State *L)
{
    lua_Integer n = luaL_len(L, 1);
    lua_Integer at = lua_isinteger(L, 2) ? lua_tointeger(L, 2) : n;
    charge_items(L, at >= 1 && at <= n ? span(at, n) : 1);
    return original(L);
}

/* Whether the item at `a` sorts before the one at `b` (both stack indexes). */
static bool before(lua_State *L, int a, int b)
{
    a = lua_absindex(L, a);
    b = lua_absindex(L, b);
    size_t bytes = 0;
    if (lua_type(L, a) == LUA_TSTRING && lua_type(L, b) == LUA_TSTRING)
        bytes = lua_rawlen(L, a) < lua_rawlen(L, b) ? lua_rawlen(L, a) : lua_rawlen(L, b);
    pdk_charge(L, 4 + bytes / BYTES_PER_UNIT);
    if (lua_isnoneornil(L, 2))
        return lua_compare(L, a, b, LUA_OPLT);
    lua_pushvalue(L, 2);
    lua_pushvalue(L, a);
    lua_pushvalue(L, b);
    lua_call(L, 2, 1);
    bool is = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return is;
}

/* Puts the value at the top of the stack (popped) where it belongs in the heap of n items whose root `at` is free. */
static void sift(lua_State *L, lua_Integer at, lua_Integer n)
{
    int value = lua_gettop(L);
    for (lua_Integer child; (child = 2 * at) <= n; at = child) {
        lua_geti(L, 1, child);
        if (child < n) {
            lua_geti(L, 1, child + 1);
            if (before(L, -2, -1)) {
                child++;
                lua_remove(L, -2);
            } else
                lua_pop(L, 1);
        }
        if (!before(L, value, -1)) {
            lua_pop(L, 1);
            break;
        }
        lua_seti(L, 1, at);
    }
    lua_seti(L, 1, at);
}

/* A heap sort: n log n whatever the items and the order function do. Like Lua's, it is not stable. */
static int table_sort(lua_State *L)
{
    lua_Integer n = luaL_len(L, 1);
    if (!lua_isnoneornil(L, 2))
        luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    if (n < 2)
        return 0;
    charge_items(L, (lua_Unsigned)n);
    for (lua_Integer root = n / 2; root >= 1; root--) {
        lua_geti(L, 1, root);
        sift(L, root, n);
    }
    for (lua_Integer last = n; last > 1; last--) {
        lua_geti(L, 1, 1);
        lua_geti(L, 1, last);
        lua_insert(L, -2);
        lua_seti(L, 1, last); /* the largest goes behind the heap */
        sift(L, 1, last - 1);
    }
    return 0;
}

/* ---- the tables ---- */

static const pdk_bounded_function string_functions[] = {
    { "byte", pdk_charged },
    { "char", pdk_charged },
    { "find", pdk_pattern_find },
    { "format", pdk_charged },
    { "len", NULL },
    { "gmatch", pdk_pattern_gmatch },
    { "gsub", pdk_pattern_gsub },
    { "lower", pdk_charged },
    { "match", pdk_pattern_match },
    { "pack", pdk_charged },
    { "packsize", pdk_charged },
    { "rep", string_rep },
    { "reverse", pdk_charged },
    { "sub", NULL },
    { "unpack", pdk_charged },
    { "upper", pdk_charged },
    { NULL, NULL },
};
static const pdk_bounded_function table_functions[] = {
    { "concat", table_concat }, { "insert", table_shift }, { "move", table_move },     { "pack", NULL },
    { "remove", table_shift },  { "sort", table_sort },    { "unpack", table_unpack }, { NULL, NULL },
};
static const pdk_bounded_function utf8_functions[] = {
    { "char", pdk_charged },  { "charpattern", NULL }, { "codepoint", pdk_charged },
    { "codes", pdk_charged }, { "len", pdk_charged },  { "offset", pdk_charged },
    { NULL, NULL },
};
static const pdk_bounded_function math_functions[] = {
    { "abs", NULL },        { "ceil", NULL }, { "cos", NULL },        { "deg", NULL },  { "exp", NULL },
    { "floor", NULL },      { "fmod", NULL }, { "huge", NULL },       { "log", NULL },  { "max", NULL },
    { "maxinteger", NULL }, { "min", NULL },  { "mininteger", NULL }, { "modf", NULL }, { "pi", NULL },
    { "rad", NULL },        { "sin", NULL },  { "sqrt", NULL },       { "tan", NULL },  { "tointeger", NULL },
    { "type", NULL },       { "ult", NULL },  { "acos", NULL },       { "asin", NULL }, { "atan", NULL },
    { NULL, NULL },
};

/* Copies made before any other code ran: what the host's side later does to its `string` table stays out of policies. */
static const char pristine_key = 0;
static const char *const kept[] = { LUA_GNAME, LUA_STRLIBNAME, LUA_TABLIBNAME, LUA_UTF8LIBNAME, LUA_MATHLIBNAME };

static void keep_pristine(lua_State *L)
{
    lua_newtable(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        lua_newtable(L);
        lua_getfield(L, -2, kept[i]);
        lua_pushnil(L);
        while (lua_next(L, -2) != 0) {
            lua_pushvalue(L, -2);
            lua_insert(L, -2);
            lua_rawset(L, -5);
        }
        lua_pop(L, 1);
        lua_setfield(L, -3, kept[i]);
    }
    lua_pop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &pristine_key);
}

void pdk_bounded_fill(lua_State *L, const char *library, const pdk_bounded_function *f)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &pristine_key);
    lua_getfield(L, -1, library);
    for (; f->name != NULL; f++) {
        lua_getfield(L, -1, f->name);
        if (f->fn != NULL)
            lua_pushcclosure(L, f->fn, 1);
        lua_setfield(L, -4, f->name);
    }
    lua_pop(L, 2);
}

static void push_table(lua_State *L, const char *library, const pdk_bounded_function *f)
{
    lua_newtable(L);
    pdk_bounded_fill(L, library, f);
}

void pdk_bounded_string(lua_State *L)
{
    push_table(L, LUA_STRLIBNAME, string_functions);
}
void pdk_bounded_table(lua_State *L)
{
    push_table(L, LUA_TABLIBNAME, table_functions);
}
void pdk_bounded_utf8(lua_State *L)
{
    push_table(L, LUA_UTF8LIBNAME, utf8_functions);
}
void pdk_bounded_math(lua_State *L)
{
    push_table(L, LUA_MATHLIBNAME, math_functions);
}

/* __index of string values. Upvalues: the bounded table, which no script can reach, and Lua's own. */
static int string_index(lua_State *L)
{
    lua_settop(L, 2);
    if (pdk_budget_of(L) != NULL)
        lua_rawget(L, lua_upvalueindex(1));
    else
        lua_gettable(L, lua_upvalueindex(2));
    return 1;
}

void pdk_bounded_install(lua_State *L)
{
    keep_pristine(L);
    lua_pushliteral(L, "");
    lua_getmetatable(L, -1);
    pdk_bounded_string(L);
    lua_getglobal(L, LUA_STRLIBNAME);
    lua_pushcclosure(L, string_index, 2);
    lua_setfield(L, -2, "__index");
    lua_pop(L, 2);
}
