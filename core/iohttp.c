/* iohttp.c -- io.http: a request table in, a response table out.
 *
 * While the request runs, the Lua mutex is given up, and others may change the tables that were passed. So every string that
 * the request points to is kept on this call's own stack, or in a table that only this call knows. */
#include "http.h"
#include "iolib.h"
#include "script.h"

#include <ctype.h>
#include <lauxlib.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#define ON_BODY 6 /* the stack slot of that function: after the table, method, url, unix and body */

static const char *const keys[] = { "method",          "url",    "unix",  "headers",  "body",    "timeout",
                                    "connect_timeout", "direct", "fresh", "max_body", "on_body", "redirects",
                                    "ca_file",         "cert_file", "key_file", "peer", "input",   "announce", NULL };

static void check_keys(lua_State *L)
{
    if (!lua_istable(L, 1))
        pdk_io_bad(L, "http: a table is expected, not %s", luaL_typename(L, 1));
    for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) {
        int i = 0;
        while (lua_type(L, -2) == LUA_TSTRING && keys[i] != NULL && strcmp(lua_tostring(L, -2), keys[i]) != 0)
            i++;
        if (lua_type(L, -2) != LUA_TSTRING || keys[i] == NULL)
            pdk_io_bad(L, "http: there is no option %.60s",
                       lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : luaL_typename(L, -2));
    }
}

/* Pushes t[key] and leaves it there; NULL when nil. */
static const char *field_text(lua_State *L, const char *key, bool bytes, size_t *len)
{
    char what[40] = "http: ";
    lua_getfield(L, 1, key);
    if (lua_isnil(L, -1))
        return NULL;
    strncat(what, key, sizeof what - 7);
    if (bytes && lua_type(L, -1) == LUA_TSTRING)
        return lua_tolstring(L, -1, len);
    return pdk_io_check_text(L, -1, what);
}

static double field_seconds(lua_State *L, const char *key)
{
    double s = 0;
    char what[40] = "http: ";
    lua_getfield(L, 1, key);
    strncat(what, key, sizeof what - 7);
    if (!lua_isnil(L, -1))
        s = pdk_io_check_seconds(L, -1, what);
    lua_pop(L, 1);
    return s;
}

static bool field_flag(lua_State *L, const char *key)
{
    lua_getfield(L, 1, key);
    if (!lua_isnil(L, -1) && !lua_isboolean(L, -1))
        pdk_io_bad(L, "http: %s must be a boolean, not %s", key, luaL_typename(L, -1));
    bool on = lua_toboolean(L, -1);
    lua_pop(L, 1);
    return on;
}

static size_t field_max(lua_State *L)
{
    lua_getfield(L, 1, "max_body");
    lua_Integer max = lua_isnil(L, -1) ? 0 : lua_isinteger(L, -1) ? lua_tointeger(L, -1) : -1;
    if (max < 0 || (max == 0 && !lua_isnil(L, -1)))
        pdk_io_bad(L, "http: max_body must be a number of bytes, 1 or more");
    lua_pop(L, 1);
    return (size_t)max;
}

static int field_peer(lua_State *L)
{
    lua_getfield(L, 1, "peer");
    lua_Integer pid = lua_isnil(L, -1) ? 0 : lua_isinteger(L, -1) ? lua_tointeger(L, -1) : -1;
    if (pid < 0 || pid > INT_MAX)
        pdk_io_bad(L, "http: peer must be a process's number");
    lua_pop(L, 1);
    return (int)pid;
}

/* Pushes what it takes and leaves it there (+2). */
static void check_certificate(lua_State *L, pdk_http_request *req)
{
    req->cert_file = field_text(L, "cert_file", false, NULL);
    req->key_file = field_text(L, "key_file", false, NULL);
    if ((req->cert_file == NULL) != (req->key_file == NULL))
        pdk_io_bad(L, "http: cert_file and key_file go together");
    if (req->cert_file != NULL && (req->cert_file[0] != '/' || req->key_file[0] != '/'))
        pdk_io_bad(L, "http: cert_file and key_file must be absolute paths");
}

static int field_redirects(lua_State *L)
{
    lua_getfield(L, 1, "redirects");
    lua_Integer n = lua_isnil(L, -1) ? 0 : lua_isinteger(L, -1) ? lua_tointeger(L, -1) : -1;
    if (n < 0 || n > 10)
        pdk_io_bad(L, "http: redirects must be a number from 0 to 10");
    lua_pop(L, 1);
    return (int)n;
}

/* Pushes a table of the lines and a block of pointers to them (+2); NULL = no headers. */
static const char **check_headers(lua_State *L)
{
    lua_newtable(L);
    int lines = lua_gettop(L);
    lua_Integer n = 0;
    lua_getfield(L, 1, "headers");
    int given = lua_gettop(L);
    if (!lua_isnil(L, given) && !lua_istable(L, given))
        pdk_io_bad(L, "http: headers must be a table, not %s", luaL_typename(L, given));
    for (lua_pushnil(L); lua_istable(L, given) && lua_next(L, given); lua_settop(L, given + 1)) {
        if (lua_type(L, -2) != LUA_TSTRING)
            pdk_io_bad(L, "http: headers must have names");
        const char *name = pdk_io_check_text(L, -2, "http: the name of a header");
        if (lua_type(L, -1) != LUA_TNUMBER && lua_type(L, -1) != LUA_TSTRING)
            pdk_io_bad(L, "http: the header %.60s must be a string, not %s", name, luaL_typename(L, -1));
        luaL_tolstring(L, -1, NULL);
        lua_pushfstring(L, "%s: %s", name, pdk_io_check_text(L, -1, "http: a header"));
        lua_rawseti(L, lines, ++n);
    }
    lua_settop(L, given - 1);
    const char **pointers = lua_newuserdatauv(L, sizeof *pointers * ((size_t)n + 1), 0);
    for (lua_Integer i = 0; i < n; i++) {
        lua_rawgeti(L, lines, i + 1);
        pointers[i] = lua_tostring(L, -1); /* the table keeps it */
        lua_pop(L, 1);
    }
    pointers[n] = NULL;
    return pointers;
}

/* ---- on_body: a Lua function inside libcurl ------------------------------------------------------------- */

typedef struct stream {
    lua_State *L;
    const char *data;
    size_t len;
    int error_at; /* stack slot of what it raised; 0 = nothing */
} stream;

static int call_body(lua_State *L) /* (stream, function) */
{
    const stream *s = lua_touserdata(L, 1);
    lua_pushlstring(L, s->data, s->len);
    lua_call(L, 1, 1);
    lua_pushboolean(L, lua_isboolean(L, -1) && !lua_toboolean(L, -1));
    return 1;
}

/* Nothing here may raise: the frames above are libcurl's. What the function raises waits on the stack. */
static bool on_body(void *ctx, const char *data, size_t len)
{
    stream *s = ctx;
    lua_State *L = s->L;
    pdk_script_unblock(L);
    s->data = data;
    s->len = len;
    lua_pushcfunction(L, call_body);
    lua_pushlightuserdata(L, s);
    lua_pushvalue(L, ON_BODY);
    bool go_on = lua_pcall(L, 2, 1, 0) == LUA_OK;
    if (go_on) {
        go_on = !lua_toboolean(L, -1);
        lua_pop(L, 1);
    } else {
        s->error_at = lua_gettop(L);
    }
    pdk_script_block(L);
    return go_on;
}

/* ---- the answer ---------------------------------------------------------------------------------------- */

static void release_response(void *block)
{
    pdk_http_response_free(block);
    free(block);
}

/* One "Name: value" line into the table at the top; a name that comes twice is joined with a comma. */
static void add_header(lua_State *L, const char *line, size_t len)
{
    const char *colon = memchr(line, ':', len);
    if (colon == NULL)
        return;
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    for (const char *p = line; p < colon; p++)
        luaL_addchar(&b, (char)tolower((unsigned char)*p));
    luaL_pushresult(&b);
    const char *value = colon + 1, *end = line + len;
    while (value < end && (*value == ' ' || *value == '\t'))
        value++;
    lua_pushvalue(L, -1);
    lua_rawget(L, -3);
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        lua_pushlstring(L, value, (size_t)(end - value));
    } else {
        lua_pushliteral(L, ", ");
        lua_pushlstring(L, value, (size_t)(end - value));
        lua_concat(L, 3);
    }
    lua_rawset(L, -3);
}

static int push_response(lua_State *L, const pdk_http_response *r)
{
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, r->status);
    lua_setfield(L, -2, "status");
    lua_pushlstring(L, r->body, r->body_len);
    lua_setfield(L, -2, "body");
    lua_newtable(L);
    for (const char *line = r->headers; *line != '\0';) {
        size_t len = strcspn(line, "\n");
        add_header(L, line, len);
        line += len + (line[len] != '\0');
    }
    lua_setfield(L, -2, "headers");
    if (r->peer > 0) {
        lua_pushinteger(L, r->peer);
        lua_setfield(L, -2, "peer");
    }
    return 1;
}

static int push_failure(lua_State *L, pdk_held *h, pdk_http_failure failure)
{
    pdk_io_failed(L, h);
    if (lua_istable(L, -1)) {
        lua_pushstring(L, failure == PDK_HTTP_AMBIGUOUS ? "ambiguous" : "not_sent");
        lua_setfield(L, -2, "failure");
    }
    return 2;
}

/* http{ method, url, unix, headers, body, timeout, connect_timeout, direct, fresh, max_body, on_body, redirects, ca_file, cert_file,
 * key_file, peer, input, announce } -> { status, body, headers, peer } or nil, error with `failure` = "not_sent" or "ambiguous". stack: +1 or +2, raises */
static int l_http(lua_State *L)
{
    pdk_http_request req = { 0 };
    pdk_http_failure failure = PDK_HTTP_NOT_SENT;
    stream body = { .L = L };
    lua_settop(L, 1);
    luaL_checkstack(L, 24, "http");
    check_keys(L);
    req.method = field_text(L, "method", false, NULL);
    req.url = field_text(L, "url", false, NULL);
    req.unix_socket = field_text(L, "unix", false, NULL);
    req.body = field_text(L, "body", true, &req.body_len);
    lua_getfield(L, 1, "on_body");
    if (!lua_isnil(L, ON_BODY) && !lua_isfunction(L, ON_BODY))
        pdk_io_bad(L, "http: on_body must be a function, not %s", luaL_typename(L, ON_BODY));
    req.on_body = lua_isnil(L, ON_BODY) ? NULL : on_body;
    req.on_body_ctx = &body;
    req.headers = check_headers(L);
    req.ca_file = field_text(L, "ca_file", false, NULL);
    if (req.ca_file != NULL && req.ca_file[0] != '/')
        pdk_io_bad(L, "http: ca_file must be an absolute path");
    check_certificate(L, &req);
    req.redirects = field_redirects(L);
    req.peer = field_peer(L);
    req.input = field_text(L, "input", true, &req.input_len);
    req.timeout = field_seconds(L, "timeout");
    req.connect_timeout = field_seconds(L, "connect_timeout");
    req.direct = field_flag(L, "direct");
    req.fresh = field_flag(L, "fresh");
    req.announce = field_flag(L, "announce");
    req.max_body = field_max(L);
    req.method = req.method == NULL ? "GET" : req.method;
    if (req.url == NULL)
        pdk_io_bad(L, "http: url is missing");
    pdk_held *h = pdk_io_hold(L);
    h->release = release_response;
    pdk_http_response *res = h->block = calloc(1, sizeof *res);
    if (res == NULL)
        return luaL_error(L, "http: not enough memory");
    pdk_script_block(L);
    int rc = req.input != NULL ? pdk_http_duplex(&req, res, &failure, &h->err) : pdk_http_do(&req, res, &failure, &h->err);
    pdk_script_unblock(L);
    if (body.error_at != 0) {
        pdk_io_release(h);
        lua_pushvalue(L, body.error_at);
        return lua_error(L);
    }
    if (rc < 0)
        return push_failure(L, h, failure);
    push_response(L, res);
    pdk_io_release(h);
    return 1;
}

void pdk_iohttp_open(lua_State *L)
{
    lua_pushcfunction(L, l_http);
}
