/* pattern.c -- Lua's patterns for policies: the meaning is Lua's (manual, section 6.4.1), but each step is charged to
 * the budget, since one pattern can take years on a hundred bytes.
 *
 * Matching is plain backtracking: `here` matches one item after the other and calls itself only where it may have to
 * come back. What it holds lies on the C stack or in a userdata, so that a raise from anywhere loses nothing. */
#include "bounded.h"

#include "budget.h"
#include <ctype.h>
#include <lauxlib.h>
#include <string.h>

#define MAX_CAPTURES 32
#define MAX_DEPTH    200 /* calls of `here` inside each other */
#define STEPS        64  /* charged at once */

enum { OPEN = -1, POSITION = -2 }; /* in place of a capture's length */

typedef struct matcher {
    lua_State *L;
    const char *begin, *end; /* the subject */
    const char *p_end;       /* the pattern's end, where a NUL stands */
    int depth, captures;
    unsigned steps;
    struct {
        const char *at;
        ptrdiff_t len;
    } capture[MAX_CAPTURES];
} matcher;

static void step(matcher *m)
{
    if (++m->steps >= STEPS) {
        m->steps = 0;
        pdk_charge(m->L, STEPS);
    }
}

/* ---- one character ---- */

static bool in_class(int c, int class)
{
    bool is;
    switch (tolower(class)) {
    case 'a': is = isalpha(c); break;
    case 'c': is = iscntrl(c); break;
    case 'd': is = isdigit(c); break;
    case 'g': is = isgraph(c); break;
    case 'l': is = islower(c); break;
    case 'p': is = ispunct(c); break;
    case 's': is = isspace(c); break;
    case 'u': is = isupper(c); break;
    case 'w': is = isalnum(c); break;
    case 'x': is = isxdigit(c); break;
    default: return class == c;
    }
    return isupper(class) ? !is : is;
}

/* `p` is behind the '[', `last` on the closing ']'. */
static bool in_set(matcher *m, int c, const char *p, const char *last)
{
    bool found = true;
    if (*p == '^') {
        found = false;
        p++;
    }
    for (; p < last; p++) {
        step(m);
        if (*p == '%') {
            p++;
            if (in_class(c, (unsigned char)*p))
                return found;
        } else if (p[1] == '-' && p + 2 < last) {
            if ((unsigned char)p[0] <= c && c <= (unsigned char)p[2])
                return found;
            p += 2;
        } else if ((unsigned char)*p == c)
            return found;
    }
    return !found;
}

/* The end of the one-character item at p. */
static const char *item_end(matcher *m, const char *p)
{
    if (*p == '%') {
        if (p + 1 == m->p_end)
            luaL_error(m->L, "malformed pattern (ends with '%%')");
        return p + 2;
    }
    if (*p != '[')
        return p + 1;
    p++;
    if (*p == '^')
        p++;
    for (bool first = true; first || *p != ']'; first = false) { /* a ']' in the first place stands for itself */
        step(m);
        if (p >= m->p_end)
            luaL_error(m->L, "malformed pattern (missing ']')");
        p += *p == '%' && p + 1 < m->p_end ? 2 : 1;
    }
    return p + 1;
}

static bool one(matcher *m, const char *s, const char *p, const char *p_next)
{
    step(m);
    if (s >= m->end)
        return false;
    int c = (unsigned char)*s;
    switch (*p) {
    case '.': return true;
    case '%': return in_class(c, (unsigned char)p[1]);
    case '[': return in_set(m, c, p + 1, p_next - 1);
    default: return (unsigned char)*p == c;
    }
}

/* ---- items ---- */

static const char *here(matcher *m, const char *s, const char *p);

static const char *longest(matcher *m, const char *s, const char *p, const char *p_next)
{
    ptrdiff_t n = 0;
    while (one(m, s + n, p, p_next))
        n++;
    for (; n >= 0; n--) {
        const char *end = here(m, s + n, p_next + 1);
        if (end != NULL)
            return end;
    }
    return NULL;
}

static const char *shortest(matcher *m, const char *s, const char *p, const char *p_next)
{
    for (;; s++) {
        const char *end = here(m, s, p_next + 1);
        if (end != NULL || !one(m, s, p, p_next))
            return end;
    }
}

static const char *balanced(matcher *m, const char *s, const char *p)
{
    if (p + 1 >= m->p_end)
        luaL_error(m->L, "malformed pattern (missing arguments to '%%b')");
    if (s >= m->end || *s != p[0])
        return NULL;
    for (int open = 1; ++s < m->end;) {
        step(m);
        if (*s == p[1]) {
            if (--open == 0)
                return s + 1;
        } else if (*s == p[0])
            open++;
    }
    return NULL;
}

static bool at_frontier(matcher *m, const char *s, const char *p, const char *p_next)
{
    int before = s == m->begin ? 0 : (unsigned char)s[-1];
    int after = s == m->end ? 0 : (unsigned char)*s;
    return !in_set(m, before, p + 1, p_next - 1) && in_set(m, after, p + 1, p_next - 1);
}

static const char *repeated(matcher *m, const char *s, int digit)
{
    int i = digit - '1';
    if (i < 0 || i >= m->captures || m->capture[i].len == OPEN)
        luaL_error(m->L, "invalid capture index %%%d", i + 1);
    size_t len = m->capture[i].len == POSITION ? (size_t)-1 : (size_t)m->capture[i].len;
    if ((size_t)(m->end - s) < len || memcmp(m->capture[i].at, s, len) != 0)
        return NULL;
    pdk_charge(m->L, len / STEPS);
    return s + len;
}

static const char *open_capture(matcher *m, const char *s, const char *p, ptrdiff_t kind)
{
    if (m->captures >= MAX_CAPTURES)
        luaL_error(m->L, "too many captures");
    m->capture[m->captures].at = s;
    m->capture[m->captures].len = kind;
    m->captures++;
    const char *end = here(m, s, p);
    if (end == NULL)
        m->captures--;
    return end;
}

static const char *close_capture(matcher *m, const char *s, const char *p)
{
    int i = m->captures - 1;
    while (i >= 0 && m->capture[i].len != OPEN)
        i--;
    if (i < 0)
        luaL_error(m->L, "invalid pattern capture");
    m->capture[i].len = s - m->capture[i].at;
    const char *end = here(m, s, p);
    if (end == NULL)
        m->capture[i].len = OPEN;
    return end;
}

/* The items that are no single character: true when p is at one, and then its match (or NULL) is in *end. An item that
 * needs no way back moves *s and *p on instead, and leaves *end alone. */
static bool special(matcher *m, const char **s, const char **p, const char **end, bool *moved)
{
    const char *at = *p;
    *moved = false;
    switch (*at) {
    case '(': *end = at[1] == ')' ? open_capture(m, *s, at + 2, POSITION) : open_capture(m, *s, at + 1, OPEN); return true;
    case ')': *end = close_capture(m, *s, at + 1); return true;
    case '$':
        if (at + 1 != m->p_end)
            return false;
        *end = *s == m->end ? *s : NULL;
        return true;
    case '%': break;
    default: return false;
    }
    const char *next = NULL;
    if (at[1] == 'b') {
        next = balanced(m, *s, at + 2);
        at += 4;
    } else if (at[1] == 'f') {
        if (at[2] != '[')
            luaL_error(m->L, "missing '[' after '%%f' in pattern");
        const char *p_next = item_end(m, at + 2);
        next = at_frontier(m, *s, at + 2, p_next) ? *s : NULL;
        at = p_next;
    } else if (isdigit((unsigned char)at[1])) {
        next = repeated(m, *s, at[1]);
        at += 2;
    } else
        return false;
    *end = NULL;
    if (next != NULL) {
        *s = next;
        *p = at;
        *moved = true;
    }
    return true;
}

/* The end of the match of the pattern from p on, at s; NULL = none. */
static const char *here(matcher *m, const char *s, const char *p)
{
    const char *end = NULL;
    if (++m->depth > MAX_DEPTH)
        luaL_error(m->L, "pattern too complex");
    for (;;) {
        bool moved;
        step(m);
        if (p == m->p_end) {
            end = s;
            break;
        }
        if (special(m, &s, &p, &end, &moved)) {
            if (moved)
                continue;
            break;
        }
        const char *p_next = item_end(m, p);
        char times = *p_next; /* the NUL at the pattern's end is none of them */
        if (times == '*') {
            end = longest(m, s, p, p_next);
            break;
        }
        if (times == '-') {
            end = shortest(m, s, p, p_next);
            break;
        }
        bool matches = one(m, s, p, p_next);
        if (times == '?') {
            if (matches && (end = here(m, s + 1, p_next + 1)) != NULL)
                break;
            p = p_next + 1;
            continue;
        }
        if (!matches)
            break;
        if (times == '+') {
            end = longest(m, s + 1, p, p_next);
            break;
        }
        s++;
        p = p_next;
    }
    m->depth--;
    return end;
}

static void start(matcher *m, lua_State *L, const char *s, size_t s_len, const char *p, size_t p_len)
{
    m->L = L;
    m->begin = s;
    m->end = s + s_len;
    m->p_end = p + p_len;
    m->steps = 0;
}

static const char *try_at(matcher *m, const char *s, const char *p)
{
    m->captures = 0;
    m->depth = 0;
    return here(m, s, p);
}

/* ---- results ---- */

/* Pushes capture i of the match [s, end); capture 0 of a pattern without any is the whole match. */
static void push_capture(matcher *m, int i, const char *s, const char *end)
{
    if (i >= m->captures) {
        if (i != 0)
            luaL_error(m->L, "invalid capture index %%%d", i + 1);
        lua_pushlstring(m->L, s, (size_t)(end - s));
    } else if (m->capture[i].len == POSITION)
        lua_pushinteger(m->L, m->capture[i].at - m->begin + 1);
    else if (m->capture[i].len == OPEN)
        luaL_error(m->L, "unfinished capture");
    else
        lua_pushlstring(m->L, m->capture[i].at, (size_t)m->capture[i].len);
}

static int push_captures(matcher *m, const char *s, const char *end, bool whole_if_none)
{
    int n = m->captures == 0 && whole_if_none ? 1 : m->captures;
    luaL_checkstack(m->L, n + 1, "too many captures");
    for (int i = 0; i < n; i++)
        push_capture(m, i, s, end);
    return n;
}

/* Where to begin: the argument `init`, counted from the end when negative. More than len = beyond the end. */
static size_t initial(lua_State *L, int arg, size_t len)
{
    lua_Integer i = luaL_optinteger(L, arg, 1);
    if (i > 0)
        return (lua_Unsigned)i - 1 > len ? len + 1 : (size_t)i - 1;
    if (i == 0 || i < -(lua_Integer)len)
        return 0;
    return len - (size_t)-i;
}

static int find(lua_State *L, bool positions)
{
    size_t s_len, p_len;
    const char *s = luaL_checklstring(L, 1, &s_len), *p = luaL_checklstring(L, 2, &p_len);
    size_t from = initial(L, 3, s_len);
    if (from > s_len) {
        luaL_pushfail(L);
        return 1;
    }
    if (positions && (lua_toboolean(L, 4) || (strlen(p) == p_len && strpbrk(p, "^$*+?.([%-") == NULL))) {
        pdk_charge(L, (s_len - from + p_len) / STEPS + 1); /* memmem takes linear time */
        const char *at = memmem(s + from, s_len - from, p, p_len);
        if (at == NULL) {
            luaL_pushfail(L);
            return 1;
        }
        lua_pushinteger(L, at - s + 1);
        lua_pushinteger(L, at - s + (lua_Integer)p_len);
        return 2;
    }
    matcher m;
    start(&m, L, s, s_len, p, p_len);
    bool anchored = *p == '^';
    p += anchored;
    for (const char *at = s + from; at <= m.end; at++) {
        const char *end = try_at(&m, at, p);
        if (end != NULL && positions) {
            lua_pushinteger(L, at - s + 1);
            lua_pushinteger(L, end - s);
            return 2 + push_captures(&m, at, end, false);
        }
        if (end != NULL)
            return push_captures(&m, at, end, true);
        if (anchored)
            break;
    }
    luaL_pushfail(L);
    return 1;
}

int pdk_pattern_find(lua_State *L)
{
    return find(L, true);
}
int pdk_pattern_match(lua_State *L)
{
    return find(L, false);
}

/* ---- gmatch ---- */

typedef struct gmatch_state {
    const char *at, *last; /* where to go on; the end of the last match */
} gmatch_state;

static int gmatch_next(lua_State *L)
{
    size_t s_len, p_len;
    const char *s = lua_tolstring(L, lua_upvalueindex(1), &s_len);
    const char *p = lua_tolstring(L, lua_upvalueindex(2), &p_len);
    gmatch_state *g = lua_touserdata(L, lua_upvalueindex(3));
    matcher m;
    start(&m, L, s, s_len, p, p_len);
    for (; g->at <= m.end; g->at++) {
        const char *from = g->at, *end = try_at(&m, from, p);
        if (end != NULL && end != g->last) {
            g->at = g->last = end;
            return push_captures(&m, from, end, true);
        }
    }
    return 0;
}

int pdk_pattern_gmatch(lua_State *L)
{
    size_t len;
    const char *s = luaL_checklstring(L, 1, &len);
    luaL_checkstring(L, 2);
    size_t from = initial(L, 3, len);
    lua_settop(L, 2);
    gmatch_state *g = lua_newuserdatauv(L, sizeof *g, 0);
    g->at = s + from;
    g->last = NULL;
    lua_pushcclosure(L, gmatch_next, 3);
    return 1;
}

/* ---- gsub ---- */

typedef struct gsub_state { /* in a userdata: a replacement function may call gsub again, 200 deep */
    matcher m;
    luaL_Buffer out;
} gsub_state;

static void add_template(gsub_state *g, const char *s, const char *end)
{
    lua_State *L = g->m.L;
    size_t len;
    const char *t = lua_tolstring(L, 3, &len), *t_end = t + len;
    pdk_charge(L, len / STEPS + 1);
    for (; t < t_end; t++) {
        if (*t != '%') {
            luaL_addchar(&g->out, *t);
            continue;
        }
        t++;
        if (t < t_end && *t == '%')
            luaL_addchar(&g->out, '%');
        else if (t < t_end && *t == '0')
            luaL_addlstring(&g->out, s, (size_t)(end - s));
        else if (t < t_end && isdigit((unsigned char)*t)) {
            push_capture(&g->m, *t - '1', s, end);
            luaL_tolstring(L, -1, NULL);
            lua_remove(L, -2);
            luaL_addvalue(&g->out);
        } else
            luaL_error(L, "invalid use of '%%' in replacement string");
    }
}

static void add_replacement(gsub_state *g, const char *s, const char *end, int type)
{
    lua_State *L = g->m.L;
    if (type == LUA_TSTRING || type == LUA_TNUMBER) {
        add_template(g, s, end);
        return;
    }
    if (type == LUA_TFUNCTION) {
        lua_pushvalue(L, 3);
        int n = push_captures(&g->m, s, end, true);
        lua_call(L, n, 1);
    } else {
        push_capture(&g->m, 0, s, end);
        lua_gettable(L, 3);
    }
    if (!lua_toboolean(L, -1)) {
        lua_pop(L, 1);
        luaL_addlstring(&g->out, s, (size_t)(end - s));
    } else if (!lua_isstring(L, -1))
        luaL_error(L, "invalid replacement value (a %s)", luaL_typename(L, -1));
    else
        luaL_addvalue(&g->out);
}

int pdk_pattern_gsub(lua_State *L)
{
    size_t s_len, p_len;
    const char *s = luaL_checklstring(L, 1, &s_len), *p = luaL_checklstring(L, 2, &p_len);
    int type = lua_type(L, 3);
    luaL_argexpected(L,
                     type == LUA_TNUMBER || type == LUA_TSTRING || type == LUA_TFUNCTION || type == LUA_TTABLE ||
                         type == LUA_TUSERDATA,
                     3, "string/function/table");
    lua_Integer most = luaL_optinteger(L, 4, (lua_Integer)s_len + 1), n = 0;
    lua_settop(L, 3);
    if (type == LUA_TNUMBER)
        lua_tostring(L, 3);
    gsub_state *g = lua_newuserdatauv(L, sizeof *g, 0);
    start(&g->m, L, s, s_len, p, p_len);
    luaL_buffinit(L, &g->out);
    bool anchored = *p == '^';
    p += anchored;
    const char *last = NULL;
    while (n < most) {
        const char *end = try_at(&g->m, s, p);
        if (end != NULL && end != last) {
            n++;
            add_replacement(g, s, end, type);
            s = last = end;
        } else if (s < g->m.end)
            luaL_addchar(&g->out, *s++);
        else
            break;
        if (anchored)
            break;
    }
    luaL_addlstring(&g->out, s, (size_t)(g->m.end - s));
    luaL_pushresult(&g->out);
    lua_pushinteger(L, n);
    return 2;
}
