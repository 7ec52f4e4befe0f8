/* policy_ctx.c -- ctx: a read-only look at packed bytes.
 *
 * Why no Lua table: a call reads a few of its fields, and copying all of them costs more than the call. And a table that
 * a script keeps would carry one identity's data into the next call, where a view that is kept is dead: it knows
 * the serial number of its call, and looks at the bytes only while that call runs.
 *
 * A script sees tables: type() says so, and pairs, ipairs, next, #, table.concat and table.unpack work. */
#include "policy_internal.h"

#include <lauxlib.h>
#include <string.h>
#include <stdio.h>
#include <time.h>

static const char view_key = 0;       /* its address is the registry's key for the metatable, */
static const char view_mark = 0;      /* and this one's says that a userdata is a view: cheaper than comparing metatables */
#define MOST_ANSWER ((size_t)1 << 20) /* bytes */
#define SCAN_BYTES  512               /* of packed data skipped over for one unit of the budget */

typedef struct view {
    const void *mark; /* &view_mark */
    uint64_t serial;  /* of the call */
    pdk_view v;
    bool root;      /* has config, now and differs besides */
    lua_Integer at; /* list: the item that was read last, */
    size_t cursor;  /* and where the one behind it begins: reading on is cheap */
} view;

static void push_view(lua_State *L, uint64_t serial, pdk_view v, bool root)
{
    view *u = lua_newuserdatauv(L, sizeof *u, 0);
    *u = (view){ .mark = &view_mark, .serial = serial, .v = v, .root = root };
    lua_rawgetp(L, LUA_REGISTRYINDEX, &view_key);
    lua_setmetatable(L, -2);
}

static void push_value(lua_State *L, const view *from, pdk_view v)
{
    char tag = pdk_view_tag(v);
    if (tag == '[' || tag == '{')
        push_view(L, from->serial, v, false);
    else
        pdk_view_to_lua(L, v);
}

void pdk_policy_ctx_push(lua_State *L, pdk_policy_call *c)
{
    push_view(L, c->budget.serial, c->ask->ctx, !c->ask->plain);
}

static view *test_view(lua_State *L, int index)
{
    view *u = lua_type(L, index) == LUA_TUSERDATA && lua_rawlen(L, index) == sizeof *u ? lua_touserdata(L, index) : NULL;
    return u != NULL && u->mark == &view_mark ? u : NULL;
}

static bool is_view(lua_State *L, int index)
{
    return test_view(L, index) != NULL;
}

static void check_live(lua_State *L, const view *u)
{
    pdk_budget *b = pdk_budget_of(L);
    if (u == NULL || b == NULL || b->serial != u->serial)
        luaL_error(L, "ctx is dead: it may not be kept after the call");
}

/* The view at `index`, whose call is running; raises otherwise. */
static view *live(lua_State *L, int index)
{
    view *u = test_view(L, index);
    check_live(L, u);
    return u;
}

/* Which fields of ctx a pure function looks at: its answer is kept under these. */
static void note_look(lua_State *L, const view *u, const char *key, size_t len)
{
    pdk_policy_call *c = u->root ? pdk_budget_of(L)->call : NULL;
    if (c != NULL && c->pure)
        c->fields |= key == NULL ? PDK_FIELDS_ALL : pdk_field_of(key, len);
}

static pdk_view now_view(pdk_policy_call *c)
{
    if (c->now.len == 0) {
        pdk_ns wall = pdk_clock_wall(c->p->clock);
        time_t t = (time_t)(wall / PDK_NS_PER_S);
        struct tm tm = { 0 };
        localtime_r(&t, &tm);
        pdk_mark m = pdk_begin_map(&c->now);
        pdk_kv_int(&c->now, &m, "unix", t);
        pdk_kv_int(&c->now, &m, "hour", tm.tm_hour);
        pdk_kv_int(&c->now, &m, "minute", tm.tm_min);
        pdk_kv_int(&c->now, &m, "weekday", tm.tm_wday == 0 ? 7 : tm.tm_wday); /* 1 = Monday */
        pdk_end(&c->now, &m);
    }
    return pdk_view_of(&c->now);
}

static bool same_value(pdk_view a, pdk_view b)
{
    double x, y;
    return pdk_view_num(a, &x) && pdk_view_num(b, &y) ? x == y : pdk_view_equal(a, b);
}

/* What is required against what is there. { at_least = n } takes any number from n on. */
static bool meets(pdk_view wanted, pdk_view found)
{
    double least, have;
    if (pdk_view_num(pdk_view_get(wanted, "at_least"), &least))
        return pdk_view_num(found, &have) && have >= least;
    return same_value(wanted, found);
}

/* Notes one difference. The map begins with the first: mostly there is none, and then no memory is needed. */
static void note(pdk_pack *out, pdk_mark *m, const char *key, size_t len, const char *how)
{
    if (out->len == 0)
        *m = pdk_begin_map(out);
    pdk_put_str(out, key, len);
    pdk_put_cstr(out, how);
    m->count++;
}

static bool key_is(pdk_view k, const char *name, size_t len)
{
    return k.len == len + 6 && memcmp(k.p + 5, name, len) == 0; /* a string of that many bytes */
}

void pdk_reuse_differences(pdk_view want, pdk_view have, pdk_view capability, pdk_pack *out)
{
    static const char *const plain[] = { "image", "network" };
    pdk_mark m = { 0 };
    pdk_view wants[2] = { PDK_NO_VIEW, PDK_NO_VIEW }, require = PDK_NO_VIEW, k, wanted;
    for (size_t cursor = 0; pdk_view_next(want, &cursor, &k, &wanted);) { /* once over it, as this is part of every acquire */
        if (key_is(k, "image", 5))
            wants[0] = wanted;
        else if (key_is(k, "network", 7))
            wants[1] = wanted;
        else if (key_is(k, "require", 7))
            require = wanted;
    }
    for (size_t i = 0; pdk_view_count(have) > 0 && i < sizeof plain / sizeof plain[0]; i++) {
        pdk_view found = pdk_view_is_nil(wants[i]) ? wants[i] : pdk_view_get(have, plain[i]);
        if (!pdk_view_is_nil(found) && !same_value(wants[i], found))
            note(out, &m, plain[i], strlen(plain[i]), "differs");
    }
    size_t cursor = 0, len;
    while (pdk_view_next(require, &cursor, &k, &wanted)) {
        const char *key = pdk_view_str(k, &len);
        if (key == NULL)
            continue; /* resolve's answers have none */
        pdk_view found = pdk_view_get_n(have, key, len);
        if (pdk_view_is_nil(found))
            found = pdk_view_get_n(capability, key, len);
        if (pdk_view_is_nil(found) || !meets(wanted, found))
            note(out, &m, key, len, pdk_view_is_nil(found) ? "unattested" : "differs");
    }
    if (out->len > 0)
        pdk_end(out, &m);
}

/* ctx.differs of reuse.decide: nil, or a map from what is required and not known to hold to "differs" or "unattested".
 * In C because nearly every decision begins with it, at each acquire, and by hand it takes a script five times as long.
 * An image or a network that a sandbox does not attest is taken to be right; `require` wants evidence. */
static pdk_view differs_view(lua_State *L, pdk_policy_call *c)
{
    pdk_view ctx = c->ask->ctx;
    if (!c->differs_known)
        pdk_reuse_differences(pdk_view_get(ctx, "requirements"), pdk_view_get(ctx, "attestation"), pdk_view_get(ctx, "capability"),
                              &c->differs);
    c->differs_known = true;
    if (c->differs.failed)
        luaL_error(L, "not enough memory to compare"); /* and not: no difference */
    return pdk_view_of(&c->differs);
}

static pdk_view extra(lua_State *L, const view *u, const char *key)
{
    pdk_policy_call *c = pdk_budget_of(L)->call;
    if (!u->root)
        return PDK_NO_VIEW;
    if (strcmp(key, "config") == 0)
        return pdk_view_of(&c->p->config);
    if (strcmp(key, "now") == 0)
        return now_view(c);
    if (c->ask->hook == PDK_HOOK_DECIDE && strcmp(key, "differs") == 0)
        return differs_view(L, c);
    return PDK_NO_VIEW;
}

static pdk_view item(lua_State *L, view *u, lua_Integer i)
{
    pdk_view k, v = PDK_NO_VIEW;
    if (i < 1 || (lua_Unsigned)i > pdk_view_count(u->v))
        return v;
    if (i <= u->at) {
        u->at = 0;
        u->cursor = 0;
    }
    while (u->at < i) {
        if (!pdk_view_next(u->v, &u->cursor, &k, &v))
            return PDK_NO_VIEW;
        u->at++;
        pdk_charge(L, v.len / SCAN_BYTES);
    }
    return v;
}

/* A key that is no string, in a map: only looked for when the map was made of a Lua table with such keys. */
static pdk_view numbered(lua_State *L, const view *u, lua_Integer i)
{
    pdk_view k, v;
    int64_t n;
    size_t cursor = 0;
    while (pdk_view_next(u->v, &cursor, &k, &v)) {
        pdk_charge(L, 1);
        if (pdk_view_tag(k) != 's' && pdk_view_int(k, &n) && n == i)
            return v;
    }
    return PDK_NO_VIEW;
}

/* __index(view, key). Scripts cannot reach it but by indexing, so the first argument is a view. */
static int view_index(lua_State *L)
{
    view *u = lua_touserdata(L, 1);
    pdk_view v = PDK_NO_VIEW;
    check_live(L, u);
    if (lua_type(L, 2) == LUA_TSTRING) {
        size_t len;
        const char *key = lua_tolstring(L, 2, &len);
        note_look(L, u, key, len);
        v = pdk_view_get_n(u->v, key, len);
        if (pdk_view_is_nil(v))
            v = extra(L, u, key);
        if (u->v.len > SCAN_BYTES)
            pdk_charge(L, u->v.len / SCAN_BYTES);
    } else if (lua_type(L, 2) == LUA_TNUMBER) {
        int whole;
        lua_Integer i = lua_tointegerx(L, 2, &whole);
        if (whole)
            v = pdk_view_tag(u->v) == '[' ? item(L, u, i) : numbered(L, u, i);
    }
    push_value(L, u, v);
    return 1;
}

static int view_newindex(lua_State *L)
{
    return luaL_error(L, "ctx is read-only: copy what you want to change");
}

static int view_len(lua_State *L)
{
    view *u = live(L, 1);
    lua_pushinteger(L, pdk_view_tag(u->v) == '[' ? (lua_Integer)pdk_view_count(u->v) : 0);
    return 1;
}

static int view_eq(lua_State *L)
{
    view *a = test_view(L, 1), *b = test_view(L, 2);
    lua_pushboolean(L, a != NULL && b != NULL && a->serial == b->serial && a->v.p == b->v.p);
    return 1;
}

static int view_tostring(lua_State *L)
{
    lua_pushliteral(L, "table (ctx)");
    return 1;
}

/* ---- going through ---- */

typedef struct walk {
    size_t cursor;
    lua_Integer i; /* list: the last index */
    int extras;    /* root: how many of config, now and differs have been given */
} walk;

/* Pushes the next key and value; false and nothing at the end. */
static bool walk_on(lua_State *L, const view *u, walk *w)
{
    pdk_view k, v;
    note_look(L, u, NULL, 0);
    while (pdk_view_next(u->v, &w->cursor, &k, &v)) {
        pdk_charge(L, 1 + v.len / SCAN_BYTES);
        w->i++;
        if (pdk_view_is_nil(v))
            continue; /* a table has no such key */
        if (pdk_view_tag(u->v) == '[')
            lua_pushinteger(L, w->i);
        else
            push_value(L, u, k);
        push_value(L, u, v);
        return true;
    }
    static const char *const names[] = { "config", "now", "differs" };
    while (u->root && w->extras < 3) {
        const char *name = names[w->extras++];
        if (!pdk_view_is_nil(pdk_view_get(u->v, name)))
            continue;
        v = extra(L, u, name);
        if (pdk_view_is_nil(v))
            continue;
        lua_pushstring(L, name);
        push_value(L, u, v);
        return true;
    }
    return false;
}

static int pairs_next(lua_State *L)
{
    view *u = live(L, lua_upvalueindex(1));
    return walk_on(L, u, lua_touserdata(L, lua_upvalueindex(2))) ? 2 : 0;
}

static int push_pairs(lua_State *L)
{
    live(L, 1);
    lua_pushvalue(L, 1);
    walk *w = lua_newuserdatauv(L, sizeof *w, 0);
    *w = (walk){ 0 };
    lua_pushcclosure(L, pairs_next, 2);
    lua_pushvalue(L, 1);
    lua_pushnil(L);
    return 3;
}

int pdk_policy_next(lua_State *L)
{
    if (!is_view(L, 1)) {
        luaL_checktype(L, 1, LUA_TTABLE);
        lua_settop(L, 2);
        if (lua_next(L, 1) != 0)
            return 2;
        lua_pushnil(L);
        return 1;
    }
    view *u = live(L, 1);
    lua_settop(L, 2);
    walk w = { 0 };
    bool found = lua_isnil(L, 2);
    while (walk_on(L, u, &w)) {
        if (found)
            return 2;
        found = lua_rawequal(L, -2, 2);
        lua_pop(L, 2);
    }
    if (!found)
        return luaL_error(L, "invalid key to 'next'");
    lua_pushnil(L);
    return 1;
}

int pdk_policy_pairs(lua_State *L)
{
    luaL_checkany(L, 1);
    if (is_view(L, 1))
        return push_pairs(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_pushcfunction(L, pdk_policy_next);
    lua_pushvalue(L, 1);
    lua_pushnil(L);
    return 3;
}

int pdk_policy_type(lua_State *L)
{
    luaL_checkany(L, 1);
    if (is_view(L, 1))
        lua_pushliteral(L, "table");
    else
        lua_pushstring(L, luaL_typename(L, 1));
    return 1;
}

void pdk_policy_ctx_open(lua_State *L)
{
    static const luaL_Reg methods[] = {
        { "__index", view_index }, { "__newindex", view_newindex }, { "__len", view_len }, { "__eq", view_eq },
        { "__pairs", push_pairs }, { "__tostring", view_tostring }, { NULL, NULL },
    };
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &view_key) == LUA_TNIL) {
        lua_pop(L, 1);
        lua_newtable(L);
        lua_pushvalue(L, -1);
        lua_rawsetp(L, LUA_REGISTRYINDEX, &view_key);
        luaL_setfuncs(L, methods, 0);
        lua_pushliteral(L, "table"); /* as messages call it */
        lua_setfield(L, -2, "__name");
        lua_pushboolean(L, 0);
        lua_setfield(L, -2, "__metatable");
    }
    lua_pop(L, 1);
}

/* ---- answers ---- */

typedef struct answer {
    pdk_policy_call *c;
    pdk_pack *out;
    char path[100]; /* of the value at hand */
} answer;

static int pack_value(lua_State *L, int index, answer *a, int depth);

static int refuse(answer *a, const char *why)
{
    snprintf(a->c->wrong, sizeof a->c->wrong, "the answer%s%s %s", a->path[0] == '\0' || a->path[0] == '[' ? "" : ".",
             a->path, why);
    return -1;
}

/* Whether the keys of the table at index are 1..n, n at least 1. */
static bool is_list(lua_State *L, int index, lua_Integer *n)
{
    lua_Integer keys = 0;
    *n = (lua_Integer)lua_rawlen(L, index);
    for (lua_pushnil(L); lua_next(L, index) != 0; keys++) {
        lua_pop(L, 1);
        if (!lua_isinteger(L, -1) || lua_tointeger(L, -1) < 1 || lua_tointeger(L, -1) > *n) {
            lua_pop(L, 1);
            return false;
        }
    }
    return keys == *n && keys > 0;
}

static int pack_list(lua_State *L, int index, answer *a, int depth, lua_Integer n)
{
    size_t base = strlen(a->path);
    pdk_mark m = pdk_begin_list(a->out);
    for (lua_Integer i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        snprintf(a->path + base, sizeof a->path - base, "[%lld]", (long long)i);
        if (pack_value(L, lua_gettop(L), a, depth + 1) < 0)
            return -1;
        a->path[base] = '\0';
        lua_pop(L, 1);
        m.count++;
    }
    pdk_end(a->out, &m);
    return 0;
}

static int pack_map(lua_State *L, int index, answer *a, int depth)
{
    size_t base = strlen(a->path);
    pdk_mark m = pdk_begin_map(a->out);
    for (lua_pushnil(L); lua_next(L, index) != 0; lua_pop(L, 1)) {
        int k = lua_gettop(L) - 1;
        if (lua_type(L, k) != LUA_TSTRING)
            return refuse(a, "has a key that is no string");
        snprintf(a->path + base, sizeof a->path - base, "%s%s", base > 0 ? "." : "", lua_tostring(L, k));
        if (pack_value(L, k, a, depth + 1) < 0 || pack_value(L, k + 1, a, depth + 1) < 0)
            return -1;
        a->path[base] = '\0';
        m.count++;
    }
    pdk_end(a->out, &m);
    return 0;
}

static int pack_value(lua_State *L, int index, answer *a, int depth)
{
    size_t len = 0;
    lua_Integer n;
    pdk_charge(L, 1);
    switch (lua_type(L, index)) {
    case LUA_TNIL:
    case LUA_TNONE: pdk_put_nil(a->out); break;
    case LUA_TBOOLEAN: pdk_put_bool(a->out, lua_toboolean(L, index)); break;
    case LUA_TNUMBER:
        if (lua_isinteger(L, index))
            pdk_put_int(a->out, lua_tointeger(L, index));
        else
            pdk_put_num(a->out, lua_tonumber(L, index));
        break;
    case LUA_TSTRING: {
        const char *s = lua_tolstring(L, index, &len);
        pdk_put_str(a->out, s, len);
        break;
    }
    case LUA_TTABLE:
        if (depth >= PDK_PACK_DEPTH)
            return refuse(a, "is nested too deeply (or contains itself)");
        luaL_checkstack(L, 6, "an answer");
        if ((is_list(L, index, &n) ? pack_list(L, index, a, depth, n) : pack_map(L, index, a, depth)) < 0)
            return -1;
        break;
    default:
        if (!is_view(L, index)) {
            char why[60];
            snprintf(why, sizeof why, "is a %s; only plain data can be an answer", luaL_typename(L, index));
            return refuse(a, why);
        }
        len = live(L, index)->v.len;
        note_look(L, live(L, index), NULL, 0);
        pdk_put_view(a->out, live(L, index)->v);
        break;
    }
    pdk_charge(L, len / 64);
    return a->out->failed || a->out->len > MOST_ANSWER ? refuse(a, "is too large") : 0;
}

int pdk_policy_pack_answer(lua_State *L, int index, pdk_policy_call *c, pdk_pack *out)
{
    answer a = { .c = c, .out = out };
    int top = lua_gettop(L);
    int rc = pack_value(L, lua_absindex(L, index), &a, 0);
    lua_settop(L, top);
    return rc;
}
