/* io.c -- the module `paddock.io`: what a backend written in Lua may do to the world outside.
 *
 * Whatever may wait gives the Lua mutex up meanwhile (pdk_script_block), obeys the thread's limit, and holds its C
 * resources in a pdk_held, since a Lua error jumps over C frames. In a Lua host's own state the same functions simply block.
 * A wrong argument raises invalid_argument; what the world refuses is nil and an error.
 */
#include "iolib.h"

#include "descriptors.h"
#include "limit.h"
#include "log.h"
#include "output.h"
#include "procio.h"
#include "script.h"
#include <lauxlib.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HELD       "paddock.io.held"
#define SLICE      (40 * 1000 * 1000) /* ns: how late a cancel may be noticed */
#define LOG_FIELDS 32

/* ---- shared -------------------------------------------------------------------------------------------- */

void pdk_io_release(pdk_held *h)
{
    if (h->block != NULL)
        h->release(h->block);
    h->block = NULL;
    pdk_error_clear(&h->err);
}

static int held_gc(lua_State *L)
{
    pdk_io_release(lua_touserdata(L, 1));
    return 0;
}

pdk_held *pdk_io_hold(lua_State *L)
{
    luaL_checkstack(L, 8, "an I/O call");
    pdk_held *h = lua_newuserdatauv(L, sizeof *h, 0);
    *h = (pdk_held){ .release = free };
    luaL_setmetatable(L, HELD);
    return h;
}

int pdk_io_failed(lua_State *L, pdk_held *h)
{
    lua_pushnil(L);
    pdk_error_to_lua(L, &h->err);
    return 2;
}

void pdk_io_bad(lua_State *L, const char *fmt, ...)
{
    pdk_error err = PDK_NO_ERROR;
    char text[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    pdk_fail(&err, PDK_E_INVALID_ARGUMENT, 0, "%s", text);
    pdk_raise(L, &err);
    abort(); /* pdk_raise does not return */
}

const char *pdk_io_check_text(lua_State *L, int index, const char *what)
{
    size_t len;
    if (lua_type(L, index) != LUA_TSTRING)
        pdk_io_bad(L, "%s must be a string, not %s", what, luaL_typename(L, index));
    const char *s = lua_tolstring(L, index, &len);
    if (strlen(s) != len)
        pdk_io_bad(L, "%s must not contain a NUL byte", what);
    return s;
}

double pdk_io_check_seconds(lua_State *L, int index, const char *what)
{
    double s = lua_type(L, index) == LUA_TNUMBER ? lua_tonumber(L, index) : -1;
    if (!(s >= 0))
        pdk_io_bad(L, "%s must be a number of seconds, 0 or more", what);
    return isinf(s) ? 0 : s;
}

/* ---- time ---------------------------------------------------------------------------------------------- */

/* now() -> seconds on the monotonic clock */
static int l_now(lua_State *L)
{
    lua_pushnumber(L, pdk_to_seconds(pdk_now_monotonic()));
    return 1;
}

/* wall() -> seconds since 1970; for records, never for a duration */
static int l_wall(lua_State *L)
{
    lua_pushnumber(L, pdk_to_seconds(pdk_now_wall()));
    return 1;
}

/* deadline() -> seconds left for this operation, 0 when they are over; nil = no limit */
static int l_deadline(lua_State *L)
{
    pdk_ns deadline = pdk_limit_current()->deadline, now = pdk_now_monotonic();
    if (deadline == PDK_NEVER)
        return 0;
    lua_pushnumber(L, deadline > now ? pdk_to_seconds(deadline - now) : 0);
    return 1;
}

/* Sleeps until `target` or the thread's limit. */
static int sleep_until(pdk_ns target, pdk_error *err)
{
    const pdk_limit *limit = pdk_limit_current();
    for (;;) {
        pdk_ns now = pdk_now_monotonic();
        if (pdk_limit_cancelled(limit))
            return pdk_fail(err, PDK_E_CANCELLED, 0, "cancelled while it slept");
        if (now >= target)
            return 0;
        if (now >= limit->deadline)
            return pdk_fail(err, PDK_E_TIMEOUT, 0, "the operation's time limit passed while it slept");
        pdk_ns until = pdk_upkeep_before(limit, target < limit->deadline ? target : limit->deadline);
        if (until > now)
            pdk_sleep_ns(pdk_limit_can_cancel(limit) && until - now > SLICE ? SLICE : until - now);
        pdk_upkeep_run(limit);
    }
}

/* sleep(seconds); raises timeout or cancelled when the thread's limit ends it */
static int l_sleep(lua_State *L)
{
    double s = lua_type(L, 1) == LUA_TNUMBER ? lua_tonumber(L, 1) : -1;
    if (!(s >= 0))
        pdk_io_bad(L, "sleep: a number of seconds, 0 or more, is expected");
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = sleep_until(pdk_after(pdk_now_monotonic(), pdk_seconds(s)), &h->err);
    pdk_script_unblock(L);
    return rc < 0 ? pdk_raise(L, &h->err) : 0;
}

/* shield(seconds, fn, ...) -> what fn answers. Inside, the operation's own limit does not count, only this one: for taking back
 * what was begun when that limit is what ended it. */
static int l_shield(lua_State *L)
{
    double s = lua_type(L, 1) == LUA_TNUMBER ? lua_tonumber(L, 1) : -1;
    if (!(s > 0 && s <= 3600))
        pdk_io_bad(L, "shield: a number of seconds from 0 to 3600 is expected");
    luaL_checktype(L, 2, LUA_TFUNCTION);
    pdk_limit limit = PDK_NO_LIMIT;
    limit.deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(s));
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
    pdk_limit_enter(outer);
    return rc == LUA_OK ? lua_gettop(L) - 1 : lua_error(L);
}

/* ---- bytes --------------------------------------------------------------------------------------------- */

/* random(n) -> n bytes of the kernel's */
static int l_random(lua_State *L)
{
    lua_Integer n = lua_isinteger(L, 1) ? lua_tointeger(L, 1) : -1;
    if (n < 0 || n > 1 << 20)
        pdk_io_bad(L, "random: a number of bytes from 0 to 1048576 is expected");
    luaL_Buffer b;
    char *to = luaL_buffinitsize(L, &b, (size_t)n);
    pdk_random(to, (size_t)n);
    luaL_pushresultsize(&b, (size_t)n);
    return 1;
}

static int push_hex(lua_State *L, const unsigned char *s, size_t len)
{
    luaL_Buffer b;
    char *to = luaL_buffinitsize(L, &b, len * 2);
    for (size_t i = 0; i < len; i++) {
        to[2 * i] = "0123456789abcdef"[s[i] >> 4];
        to[2 * i + 1] = "0123456789abcdef"[s[i] & 15];
    }
    luaL_pushresultsize(&b, len * 2);
    return 1;
}

static const char *check_bytes(lua_State *L, const char *what, size_t *len)
{
    if (lua_type(L, 1) != LUA_TSTRING)
        pdk_io_bad(L, "%s: a string is expected, not %s", what, luaL_typename(L, 1));
    return lua_tolstring(L, 1, len);
}

/* hex(bytes) -> lower-case digits */
static int l_hex(lua_State *L)
{
    size_t len;
    const char *s = check_bytes(L, "hex", &len);
    return push_hex(L, (const unsigned char *)s, len);
}

/* sha256hex(bytes) -> 64 digits */
static int l_sha256hex(lua_State *L)
{
    size_t len;
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    const char *s = check_bytes(L, "sha256hex", &len);
    if (EVP_Digest(s, len, digest, &size, EVP_sha256(), NULL) != 1)
        return luaL_error(L, "sha256hex: not enough memory");
    return push_hex(L, digest, size);
}

/* base64(bytes) -> text, padded, on one line */
static int l_base64(lua_State *L)
{
    size_t len;
    const unsigned char *s = (const unsigned char *)check_bytes(L, "base64", &len);
    if (len > (size_t)1 << 30)
        pdk_io_bad(L, "base64: too long");
    luaL_Buffer b;
    size_t size = (len + 2) / 3 * 4;
    unsigned char *to = (unsigned char *)luaL_buffinitsize(L, &b, size + 1);
    EVP_EncodeBlock(to, s, (int)len);
    luaL_pushresultsize(&b, size);
    return 1;
}

/* env(name) -> the value in paddock's own environment, or nil */
static int l_env(lua_State *L)
{
    const char *value = getenv(pdk_io_check_text(L, 1, "env: a name"));
    lua_pushstring(L, value); /* NULL = nil */
    return 1;
}

/* ---- log ----------------------------------------------------------------------------------------------- */

static int by_key(const void *a, const void *b)
{
    return strcmp(((const pdk_field *)a)->key, ((const pdk_field *)b)->key);
}

/* The value at the top of the stack; its string lives as long as the table it is in. */
static pdk_field check_field(lua_State *L, const char *key)
{
    switch (lua_type(L, -1)) {
    case LUA_TSTRING: return PDK_STR(key, lua_tostring(L, -1));
    case LUA_TBOOLEAN: return PDK_STR(key, lua_toboolean(L, -1) ? "true" : "false");
    case LUA_TNUMBER: return lua_isinteger(L, -1) ? PDK_INT(key, lua_tointeger(L, -1)) : PDK_NUM(key, lua_tonumber(L, -1));
    default:
        pdk_io_bad(L, "log: the field %.60s must be a string, a number or a boolean, not %s", key, luaL_typename(L, -1));
    }
}

/* log(level, event [, fields]): a line in the log of the operation that this thread works for, if there is one */
static int l_log(lua_State *L)
{
    static const char *const names[] = { "debug", "info", "warn", "error" };
    const char *level = pdk_io_check_text(L, 1, "log: the level"), *event = pdk_io_check_text(L, 2, "log: the event");
    int at = 0;
    while (at < 4 && strcmp(level, names[at]) != 0)
        at++;
    if (at == 4)
        pdk_io_bad(L, "log: the level must be debug, info, warn or error, not %.40s", level);
    pdk_field fields[LOG_FIELDS];
    size_t n = 0;
    if (!lua_isnoneornil(L, 3) && !lua_istable(L, 3))
        pdk_io_bad(L, "log: the fields must be a table, not %s", luaL_typename(L, 3));
    for (lua_pushnil(L); lua_istable(L, 3) && lua_next(L, 3); lua_pop(L, 1)) {
        if (lua_type(L, -2) != LUA_TSTRING || n == LOG_FIELDS)
            pdk_io_bad(L, "log: the fields must be at most %d, with names", LOG_FIELDS);
        fields[n++] = check_field(L, lua_tostring(L, -2));
    }
    qsort(fields, n, sizeof fields[0], by_key);
    pdk_log_write(pdk_log_current(), (pdk_log_level)at, event, fields, n);
    return 0;
}

/* ---- output --------------------------------------------------------------------------------------------- */

/* output() -> whether somebody wants the output of the command that this thread runs while it runs.
 * output(stream, bytes): a piece of it, in order; stream is 1 or 2. Waits while the one who wants it is slow. */
static int l_output(lua_State *L)
{
    const pdk_output_sink *sink = pdk_output_current();
    if (lua_gettop(L) == 0) {
        lua_pushboolean(L, sink != NULL);
        return 1;
    }
    lua_Integer stream = lua_isinteger(L, 1) ? lua_tointeger(L, 1) : 0;
    if ((stream != 1 && stream != 2) || lua_type(L, 2) != LUA_TSTRING)
        pdk_io_bad(L, "output: 1 or 2 and a string are expected");
    size_t len;
    const char *bytes = lua_tolstring(L, 2, &len); /* stays on this call's stack meanwhile */
    if (sink == NULL || len == 0)
        return 0;
    pdk_script_block(L);
    sink->put(sink->ctx, (int)stream, bytes, len);
    pdk_script_unblock(L);
    return 0;
}

/* ---- descriptors ---------------------------------------------------------------------------------------- */

/* descriptors(n, fn, ...) -> what fn(...) returns; it may open so many at once. Waits its turn first, when there are not so many left
 * for paddock: raises timeout or cancelled when the thread's limit ends that. Requests that fn makes are among them. */
static int l_descriptors(lua_State *L)
{
    lua_Integer n = lua_isinteger(L, 1) ? lua_tointeger(L, 1) : 0;
    if (n < 1 || n > 10000 || !lua_isfunction(L, 2))
        pdk_io_bad(L, "descriptors: a number from 1 to 10000 and a function are expected");
    pdk_held *h = pdk_io_hold(L);
    lua_replace(L, 1);
    pdk_script_block(L);
    int rc = pdk_descriptors_take((int)n, pdk_limit_current(), PDK_NEVER, &h->err);
    pdk_script_unblock(L);
    if (rc < 0)
        return pdk_raise(L, &h->err);
    pdk_descriptors_cover(true);
    rc = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 0);
    pdk_descriptors_cover(false);
    pdk_descriptors_give((int)n);
    return rc == LUA_OK ? lua_gettop(L) - 1 : lua_error(L);
}

/* ---- the module ---------------------------------------------------------------------------------------- */

static const luaL_Reg functions[] = {
    { "now", l_now }, { "wall", l_wall }, { "deadline", l_deadline },   { "sleep", l_sleep },   { "random", l_random },
    { "hex", l_hex }, { "env", l_env },   { "sha256hex", l_sha256hex }, { "base64", l_base64 }, { "log", l_log },
    { "shield", l_shield },
    { "output", l_output },
    { "descriptors", l_descriptors },
    { NULL, NULL },
};

PDK_API int luaopen_paddock_io(lua_State *L)
{
    luaL_checkstack(L, 12, "paddock.io");
    /* Here and not at the first use: running out of memory between the two would leave a metatable without its __gc. */
    luaL_newmetatable(L, HELD);
    lua_pushcfunction(L, held_gc);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 1);
    luaL_newlib(L, functions);
    pdk_iohttp_open(L);
    lua_setfield(L, -2, "http");
    pdk_iojson_open(L);
    lua_setfield(L, -2, "json");
    pdk_iofs_open(L);
    lua_setfield(L, -2, "fs");
    pdk_procio_open(L);
    lua_setfield(L, -2, "proc");
    return 1;
}
