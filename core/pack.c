/* pack.c -- plain data as bytes; see pack.h for the format. Readers check every length against the end of what they
 * were given, so that a damaged pack reads as nil and never beyond its memory. */
#include "pack.h"

#include <lauxlib.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TABLE_HEAD 9 /* tag, count, length in bytes of what follows */

/* ---- writing ---- */

void pdk_pack_free(pdk_pack *p)
{
    if (!p->lent)
        free(p->data);
    *p = PDK_NO_PACK;
}

void pdk_pack_reset(pdk_pack *p)
{
    p->len = 0;
    p->failed = false;
}

static unsigned char *grow_block(pdk_pack *p, size_t more)
{
    if (p->failed)
        return NULL;
    if (more > PDK_PACK_MAX || p->len + more > PDK_PACK_MAX) {
        p->failed = true;
        return NULL;
    }
    if (p->len + more > p->cap) {
        size_t cap = p->cap == 0 ? 64 : p->cap;
        while (cap < p->len + more)
            cap *= 2;
        unsigned char *data = realloc(p->lent ? NULL : p->data, cap);
        if (data == NULL) {
            p->failed = true;
            return NULL;
        }
        if (p->lent)
            memcpy(data, p->data, p->len);
        p->lent = false;
        p->data = data;
        p->cap = cap;
    }
    unsigned char *at = p->data + p->len;
    p->len += more;
    return at;
}

static inline unsigned char *grow(pdk_pack *p, size_t more)
{
    if (p->failed || more > p->cap - p->len)
        return grow_block(p, more);
    unsigned char *at = p->data + p->len;
    p->len += more;
    return at;
}

static void put_tag(pdk_pack *p, char tag)
{
    unsigned char *at = grow(p, 1);
    if (at != NULL)
        *at = (unsigned char)tag;
}

static void put_fixed(pdk_pack *p, char tag, const void *bytes, size_t n)
{
    unsigned char *at = grow(p, 1 + n);
    if (at == NULL)
        return;
    *at = (unsigned char)tag;
    memcpy(at + 1, bytes, n);
}

void pdk_put_nil(pdk_pack *p)
{
    put_tag(p, 'n');
}
void pdk_put_bool(pdk_pack *p, bool b)
{
    put_tag(p, b ? 't' : 'f');
}
void pdk_put_int(pdk_pack *p, int64_t i)
{
    put_fixed(p, 'i', &i, sizeof i);
}
void pdk_put_num(pdk_pack *p, double d)
{
    put_fixed(p, 'd', &d, sizeof d);
}

/* A NUL follows each string, so that a reader has a C string in place. */
void pdk_put_str(pdk_pack *p, const char *s, size_t len)
{
    if (len > PDK_PACK_MAX) {
        p->failed = true;
        return;
    }
    unsigned char *at = grow(p, 1 + 4 + len + 1);
    if (at == NULL)
        return;
    uint32_t n = (uint32_t)len;
    at[0] = 's';
    memcpy(at + 1, &n, 4);
    if (len > 0)
        memcpy(at + 5, s, len);
    at[5 + len] = 0;
}

void pdk_put_cstr(pdk_pack *p, const char *s)
{
    if (s == NULL)
        pdk_put_nil(p);
    else
        pdk_put_str(p, s, strlen(s));
}

void pdk_put_view(pdk_pack *p, pdk_view v)
{
    if (v.len == 0) {
        pdk_put_nil(p);
        return;
    }
    unsigned char *at = grow(p, v.len);
    if (at != NULL)
        memcpy(at, v.p, v.len);
}

/* Mostly kept for long: one block, without slack. */
bool pdk_pack_copy(pdk_pack *to, pdk_view from)
{
    static const unsigned char nil = 'n';
    pdk_view v = from.len == 0 ? (pdk_view){ &nil, 1 } : from;
    unsigned char *data = v.len > PDK_PACK_MAX ? NULL : malloc(v.len);
    if (data == NULL)
        return false;
    memcpy(data, v.p, v.len);
    pdk_pack_free(to);
    *to = (pdk_pack){ .data = data, .len = v.len, .cap = v.len };
    return true;
}

static pdk_mark begin(pdk_pack *p, char tag)
{
    pdk_mark m = { p->len + 1, 0 };
    uint32_t header[2] = { 0, 0 };
    put_fixed(p, tag, header, sizeof header);
    return m;
}
pdk_mark pdk_begin_map(pdk_pack *p)
{
    return begin(p, '{');
}
pdk_mark pdk_begin_list(pdk_pack *p)
{
    return begin(p, '[');
}
void pdk_end(pdk_pack *p, pdk_mark *m)
{
    if (p->failed)
        return;
    uint32_t header[2] = { m->count, (uint32_t)(p->len - m->at - sizeof header) };
    memcpy(p->data + m->at, header, sizeof header);
}

static void key(pdk_pack *p, pdk_mark *m, const char *k)
{
    pdk_put_str(p, k, strlen(k));
    m->count++;
}
void pdk_kv_str(pdk_pack *p, pdk_mark *m, const char *k, const char *s, size_t len)
{
    if (s == NULL)
        return;
    key(p, m, k);
    pdk_put_str(p, s, len);
}
void pdk_kv_cstr(pdk_pack *p, pdk_mark *m, const char *k, const char *s)
{
    if (s != NULL)
        pdk_kv_str(p, m, k, s, strlen(s));
}
void pdk_kv_int(pdk_pack *p, pdk_mark *m, const char *k, int64_t i)
{
    key(p, m, k);
    pdk_put_int(p, i);
}
void pdk_kv_num(pdk_pack *p, pdk_mark *m, const char *k, double d)
{
    key(p, m, k);
    pdk_put_num(p, d);
}
void pdk_kv_bool(pdk_pack *p, pdk_mark *m, const char *k, bool b)
{
    key(p, m, k);
    pdk_put_bool(p, b);
}
void pdk_kv_view(pdk_pack *p, pdk_mark *m, const char *k, pdk_view v)
{
    if (pdk_view_is_nil(v))
        return;
    key(p, m, k);
    pdk_put_view(p, v);
}

/* ---- reading ---- */

/* Length of the value that begins at p, or 0 when it is damaged. A table's own length is believed as far as there is
 * room: what is inside is looked at when it is read, within that room. */
static inline size_t value_len(const unsigned char *p, size_t room)
{
    uint32_t n;
    if (room == 0)
        return 0;
    switch (p[0]) {
    case 'n': case 't': case 'f':
        return 1;
    case 'i': case 'd':
        return room >= 9 ? 9 : 0;
    case 's':
        if (room < 6)
            return 0;
        memcpy(&n, p + 1, 4);
        return room - 6 >= n ? (size_t)n + 6 : 0;
    case '[': case '{':
        if (room < TABLE_HEAD)
            return 0;
        memcpy(&n, p + 5, 4);
        return room - TABLE_HEAD >= n ? (size_t)n + TABLE_HEAD : 0;
    default:
        return 0;
    }
}

pdk_view pdk_view_nth(const pdk_pack *p, size_t n)
{
    size_t at = 0;
    for (;; n--) {
        size_t one = p->failed ? 0 : value_len(p->data + at, p->len - at);
        if (one == 0)
            return PDK_NO_VIEW;
        if (n == 0)
            return (pdk_view){ p->data + at, one };
        at += one;
    }
}
pdk_view pdk_view_of(const pdk_pack *p)
{
    return pdk_view_nth(p, 0);
}
char pdk_view_tag(pdk_view v)
{
    return v.len == 0 ? 'n' : (char)v.p[0];
}
bool pdk_view_is_nil(pdk_view v)
{
    return pdk_view_tag(v) == 'n';
}

size_t pdk_view_count(pdk_view v)
{
    uint32_t n;
    if ((pdk_view_tag(v) != '[' && pdk_view_tag(v) != '{') || v.len < TABLE_HEAD)
        return 0;
    memcpy(&n, v.p + 1, 4);
    return n;
}

bool pdk_view_next(pdk_view t, size_t *cursor, pdk_view *k, pdk_view *value)
{
    char tag = pdk_view_tag(t);
    if (tag != '[' && tag != '{')
        return false;
    size_t at = *cursor == 0 ? TABLE_HEAD : *cursor;
    if (at >= t.len)
        return false;
    *k = PDK_NO_VIEW;
    if (tag == '{') {
        size_t one = value_len(t.p + at, t.len - at);
        if (one == 0)
            return false;
        *k = (pdk_view){ t.p + at, one };
        at += one;
    }
    size_t one = value_len(t.p + at, t.len - at);
    if (one == 0)
        return false;
    *value = (pdk_view){ t.p + at, one };
    *cursor = at + one;
    return true;
}

pdk_view pdk_view_get_n(pdk_view map, const char *name, size_t len)
{
    if (pdk_view_tag(map) != '{')
        return PDK_NO_VIEW;
    for (size_t at = TABLE_HEAD; at < map.len;) { /* pdk_view_next by hand: policies look up a lot */
        size_t k = value_len(map.p + at, map.len - at);
        size_t v = k == 0 ? 0 : value_len(map.p + at + k, map.len - at - k);
        if (v == 0)
            break;
        if (k == len + 6 && map.p[at] == 's' && memcmp(map.p + at + 5, name, len) == 0)
            return (pdk_view){ map.p + at + k, v };
        at += k + v;
    }
    return PDK_NO_VIEW;
}
pdk_view pdk_view_get(pdk_view map, const char *name)
{
    return pdk_view_get_n(map, name, strlen(name));
}

const char *pdk_view_str(pdk_view v, size_t *len)
{
    uint32_t n;
    if (pdk_view_tag(v) != 's' || v.len < 6)
        return NULL;
    memcpy(&n, v.p + 1, 4);
    if (len != NULL)
        *len = n;
    return (const char *)v.p + 5;
}
char *pdk_view_dup(pdk_view v)
{
    size_t n;
    const char *s = pdk_view_str(v, &n);
    char *copy = s == NULL ? NULL : malloc(n + 1);
    if (copy != NULL)
        memcpy(copy, s, n + 1);
    return copy;
}
bool pdk_view_int(pdk_view v, int64_t *out)
{
    double d;
    if (pdk_view_tag(v) == 'i' && v.len >= 9) {
        memcpy(out, v.p + 1, 8);
        return true;
    }
    if (pdk_view_tag(v) != 'd' || v.len < 9)
        return false;
    memcpy(&d, v.p + 1, 8);
    if (!(d >= -9.2e18 && d <= 9.2e18) || d != floor(d))
        return false;
    *out = (int64_t)d;
    return true;
}
bool pdk_view_num(pdk_view v, double *out)
{
    int64_t i;
    if (pdk_view_tag(v) == 'd' && v.len >= 9) {
        memcpy(out, v.p + 1, 8);
        return true;
    }
    if (pdk_view_tag(v) != 'i' || !pdk_view_int(v, &i))
        return false;
    *out = (double)i;
    return true;
}
bool pdk_view_bool(pdk_view v, bool dflt)
{
    char tag = pdk_view_tag(v);
    return tag == 't' ? true : tag == 'f' ? false : dflt;
}
bool pdk_view_equal(pdk_view a, pdk_view b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.p, b.p, a.len) == 0);
}

/* ---- Lua ---- */

typedef struct packer { /* one walk over a Lua value */
    pdk_pack *out;
    pdk_error *err;
    char path[120]; /* of the value at hand, for messages */
} packer;

static int pack_value(lua_State *L, int index, packer *p, int depth);

static int refuse(packer *p, const char *why)
{
    return pdk_fail(p->err, PDK_E_INVALID_ARGUMENT, 0, "%s %s", p->path[0] ? p->path : "the value", why);
}

/* Whether the table at index has keys 1..n only, n at least 1. Stack-neutral, no metamethods. */
static bool is_list(lua_State *L, int index, lua_Integer *n)
{
    lua_Integer len = (lua_Integer)lua_rawlen(L, index), seen = 0;
    *n = len;
    if (len == 0)
        return false;
    lua_pushnil(L);
    while (lua_next(L, index) != 0) {
        lua_pop(L, 1);
        if (!lua_isinteger(L, -1) || lua_tointeger(L, -1) < 1 || lua_tointeger(L, -1) > len) {
            lua_pop(L, 1);
            return false;
        }
        seen++;
    }
    return seen == len;
}

static int pack_list(lua_State *L, int index, packer *p, int depth, lua_Integer n)
{
    pdk_mark m = pdk_begin_list(p->out);
    size_t base = strlen(p->path);
    for (lua_Integer i = 1; i <= n; i++) {
        lua_rawgeti(L, index, i);
        snprintf(p->path + base, sizeof p->path - base, "[%lld]", (long long)i);
        int rc = pack_value(L, lua_gettop(L), p, depth + 1);
        p->path[base] = '\0';
        lua_pop(L, 1);
        if (rc < 0)
            return -1;
        m.count++;
    }
    pdk_end(p->out, &m);
    return 0;
}

static int pack_map(lua_State *L, int index, packer *p, int depth)
{
    pdk_mark m = pdk_begin_map(p->out);
    size_t base = strlen(p->path);
    lua_pushnil(L);
    while (lua_next(L, index) != 0) {
        int k = lua_gettop(L) - 1;
        if (lua_type(L, k) == LUA_TSTRING) /* lua_tostring on a number key would confuse lua_next */
            snprintf(p->path + base, sizeof p->path - base, "%s%s", base > 0 ? "." : "", lua_tostring(L, k));
        else
            snprintf(p->path + base, sizeof p->path - base, "[?]");
        int rc = pack_value(L, k, p, depth + 1);
        if (rc == 0)
            rc = pack_value(L, k + 1, p, depth + 1);
        p->path[base] = '\0';
        if (rc < 0) {
            lua_pop(L, 2);
            return -1;
        }
        m.count++;
        lua_pop(L, 1);
    }
    pdk_end(p->out, &m);
    return 0;
}

static int pack_value(lua_State *L, int index, packer *p, int depth)
{
    if (depth > PDK_PACK_DEPTH)
        return refuse(p, "is nested too deeply (or contains itself)");
    switch (lua_type(L, index)) {
    case LUA_TNIL: case LUA_TNONE:
        pdk_put_nil(p->out);
        break;
    case LUA_TBOOLEAN:
        pdk_put_bool(p->out, lua_toboolean(L, index));
        break;
    case LUA_TNUMBER:
        if (lua_isinteger(L, index))
            pdk_put_int(p->out, lua_tointeger(L, index));
        else
            pdk_put_num(p->out, lua_tonumber(L, index));
        break;
    case LUA_TSTRING: {
        size_t len;
        const char *s = lua_tolstring(L, index, &len);
        pdk_put_str(p->out, s, len);
        break;
    }
    case LUA_TTABLE: {
        if (!lua_checkstack(L, 6))
            return pdk_fail(p->err, PDK_E_NO_MEMORY, 0, "no memory to copy a Lua value");
        lua_Integer n;
        if ((is_list(L, index, &n) ? pack_list(L, index, p, depth, n) : pack_map(L, index, p, depth)) < 0)
            return -1;
        break;
    }
    case LUA_TLIGHTUSERDATA:
        if (lua_touserdata(L, index) == NULL) { /* cjson's null */
            pdk_put_nil(p->out);
            break;
        }
        return refuse(p, "is a userdata; only plain data can be passed");
    default:
        return refuse(p, lua_type(L, index) == LUA_TFUNCTION
                             ? "is a function; only plain data can be passed"
                             : "is no plain data (nil, boolean, number, string, table)");
    }
    if (p->out->failed)
        return pdk_fail(p->err, PDK_E_INVALID_ARGUMENT, 0, "%s is too large", p->path[0] ? p->path : "the value");
    return 0;
}

int pdk_pack_from_lua(lua_State *L, int index, pdk_pack *out, pdk_error *err)
{
    packer p = { .out = out, .err = err };
    int top = lua_gettop(L);
    index = lua_absindex(L, index);
    size_t before = out->len;
    int rc = pack_value(L, index, &p, 0);
    lua_settop(L, top);
    if (rc < 0) {
        out->len = before;
        out->failed = false;
    }
    return rc;
}

void pdk_view_to_lua(lua_State *L, pdk_view v)
{
    size_t n;
    int64_t i;
    double d;
    luaL_checkstack(L, 4, "packed data");
    switch (pdk_view_tag(v)) {
    case 't': case 'f':
        lua_pushboolean(L, v.p[0] == 't');
        return;
    case 'i':
        if (pdk_view_int(v, &i)) {
            lua_pushinteger(L, i);
            return;
        }
        break;
    case 'd':
        if (pdk_view_num(v, &d)) {
            lua_pushnumber(L, d);
            return;
        }
        break;
    case 's': {
        const char *s = pdk_view_str(v, &n);
        if (s != NULL) {
            lua_pushlstring(L, s, n);
            return;
        }
        break;
    }
    case '[': case '{': {
        pdk_view k, value;
        size_t cursor = 0, count = pdk_view_count(v);
        bool list = pdk_view_tag(v) == '[';
        lua_createtable(L, list ? (int)count : 0, list ? 0 : (int)count);
        for (lua_Integer at = 1; pdk_view_next(v, &cursor, &k, &value); at++) {
            if (!list)
                pdk_view_to_lua(L, k);
            pdk_view_to_lua(L, value);
            if (list)
                lua_rawseti(L, -2, at);
            else if (lua_isnil(L, -2) || (lua_type(L, -2) == LUA_TNUMBER && lua_tonumber(L, -2) != lua_tonumber(L, -2)))
                lua_pop(L, 2); /* a key that Lua cannot hold: only in a damaged pack */
            else
                lua_rawset(L, -3);
        }
        return;
    }
    default:
        break;
    }
    lua_pushnil(L);
}
