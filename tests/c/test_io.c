/* test_io.c -- paddock.io in the universe: the Lua mutex is free while a call waits, limits end it, and a Lua error leaks
 * nothing wherever it comes from. What a plain state can show is in tests/spec/io_spec.lua. */
#include "http.h"
#include "log.h"
#include "script.h"
#include "test.h"

#include <fcntl.h>
#include <lauxlib.h>
#include <lualib.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- a server: /ok, /chunks (five, 10 ms apart), /slow (answers after 0.3 s), /close -------------------------- */

static char sock_path[108];

static void *serve(void *arg)
{
    int fd = (int)(intptr_t)arg;
    char head[4096];
    size_t len = 0;
    for (;;) {
        ssize_t n = recv(fd, head + len, sizeof head - 1 - len, 0);
        if (n <= 0)
            break;
        len += (size_t)n;
        head[len] = '\0';
        if (strstr(head, "\r\n\r\n") == NULL)
            continue;
        const char *text = "HTTP/1.1 200 OK\r\nX-Two: a\r\nx-two: b\r\nContent-Length: 2\r\n\r\nok";
        if (strstr(head, "/close") != NULL)
            break;
        if (strstr(head, "/slow") != NULL)
            usleep(300000);
        if (strstr(head, "/chunks") != NULL) {
            text = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
            send(fd, text, strlen(text), MSG_NOSIGNAL);
            for (int i = 0; i < 5; i++) {
                usleep(10000);
                send(fd, "4\r\nabcd\r\n", 9, MSG_NOSIGNAL);
            }
            text = "0\r\n\r\n";
        }
        send(fd, text, strlen(text), MSG_NOSIGNAL);
        len = 0;
    }
    close(fd);
    return NULL;
}

static void *accept_all(void *arg)
{
    int fd;
    while ((fd = accept((int)(intptr_t)arg, NULL, NULL)) >= 0) {
        pthread_t t;
        pthread_create(&t, NULL, serve, (void *)(intptr_t)fd);
        pthread_detach(t);
    }
    return NULL;
}

static void start_server(void)
{
    if (sock_path[0] != '\0')
        return;
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    snprintf(sock_path, sizeof sock_path, "%s/s", test_tmpdir());
    strcpy(a.sun_path, sock_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 64) == 0);
    pthread_t t;
    pthread_create(&t, NULL, accept_all, (void *)(intptr_t)fd);
    pthread_detach(t);
}

/* ---- running Lua --------------------------------------------------------------------------------------- */

static pdk_script *universe;

static int run_text(lua_State *L, void *text)
{
    if (luaL_loadstring(L, text) != LUA_OK)
        return lua_error(L);
    lua_pushstring(L, sock_path);
    lua_call(L, 1, 0);
    return 0;
}

/* Runs `text` in the universe; its first argument is the server's socket. */
static pdk_error lua(const char *text)
{
    pdk_error err = PDK_NO_ERROR;
    start_server();
    if (universe == NULL)
        universe = pdk_script_new(&err);
    if (universe != NULL)
        pdk_script_enter(universe, run_text, (void *)text, &err);
    return err;
}

static void *lua_thread(void *text)
{
    PDK_AUTO_ERROR err = lua(text);
    CHECK_KIND(err, PDK_OK);
    return NULL;
}

TEST("a request gives status, body and lower-case headers, joined where one comes twice")
{
    PDK_AUTO_ERROR err = lua(
        "local io, path = require 'paddock.io', ...\n"
        "local r = assert(io.http { url = 'http://x/ok', unix = path, headers = { ['X-A'] = 1 } })\n"
        "assert(r.status == 200 and r.body == 'ok' and r.headers['x-two'] == 'a, b')\n"
        "local r, e = io.http { method = 'POST', url = 'http://x/close', unix = path, body = 'b' }\n"
        "assert(r == nil and e.failure == 'ambiguous' and e.kind == 'backend_error' and e.reason == 'read')\n"
        "assert(tostring(e):find '^backend_error: POST /close on ')");
    CHECK_KIND(err, PDK_OK);
}

TEST("other threads run Lua while a request, a sleep or a body function waits")
{
    PDK_AUTO_ERROR first = lua("n, stop = 0, false");
    pthread_t t;
    start_server();
    pthread_create(&t, NULL, lua_thread,
                   "local io = require 'paddock.io'; while not stop do n = n + 1; io.sleep(0.001) end");
    PDK_AUTO_ERROR err = lua(
        "local io, path = require 'paddock.io', ...\n"
        "local function others_run(during, wait)\n" /* several turns in one wait; a busy machine may need another try */
        "  for i = 1, 50 do local before = n; wait(); if n - before > 3 then return end end\n"
        "  error('nothing ran while ' .. during)\n"
        "end\n"
        "others_run('http waited', function() assert(io.http { url = 'http://x/slow', unix = path }) end)\n"
        "others_run('sleep waited', function() io.sleep(0.2) end)\n"
        "others_run('the body function slept', function()\n"
        "  assert(io.http { url = 'http://x/chunks', unix = path, on_body = function() io.sleep(0.03) end }) end)\n"
        "stop = true");
    CHECK_KIND(err, PDK_OK);
    PDK_AUTO_ERROR last = lua("stop = true");
    pthread_join(t, NULL);
}

TEST("a body function gets every piece, may stop with false, may ask itself, and its error comes out as it is")
{
    int before = test_fds();
    PDK_AUTO_ERROR err = lua(
        "local io, path = require 'paddock.io', ...\n"
        "local function chunks(f) return io.http { url = 'http://x/chunks', unix = path, on_body = f } end\n"
        "local got = {}\n"
        "local r = assert(chunks(function(s) got[#got + 1] = s end))\n"
        "assert(table.concat(got) == ('abcd'):rep(5) and r.body == '' and r.status == 200)\n"
        "got = {}\n"
        "r = assert(chunks(function(s) got[#got + 1] = s; return #got < 2 end))\n"
        "assert(#table.concat(got) == 8 and r.status == 200)\n"
        "r = assert(chunks(function(s) assert(io.http { url = 'http://x/ok', unix = path }.body == 'ok') end))\n"
        "local mark = {}\n"
        "for i = 1, 20 do\n"
        "  local ok, e = pcall(chunks, function() error(mark) end)\n"
        "  assert(not ok and e == mark)\n"
        "  ok, e = pcall(chunks, function() coroutine.yield() end)\n"
        "  assert(not ok and tostring(e):find 'yield')\n"
        "end\n"
        "local co = coroutine.wrap(function() return chunks(function() end).status end)\n"
        "assert(co() == 200)");
    CHECK_KIND(err, PDK_OK);
    pdk_http_close_idle();
    usleep(50000);
    CHECK(test_fds() <= before + 1);
}

TEST("tables that others change while a request runs do not matter to it")
{
    pthread_t t;
    PDK_AUTO_ERROR first = lua("req, stop = nil, false");
    pthread_create(&t, NULL, lua_thread,
                   "local io = require 'paddock.io'\n"
                   "while not stop do\n"
                   "  if req then req.url = nil; req.unix = nil; req.body = nil; req.headers['X-Long'] = nil; req.headers = "
                   "nil; req = nil end\n"
                   "  collectgarbage(); io.sleep(0.002)\n"
                   "end");
    PDK_AUTO_ERROR err = lua(
        "local io, path = require 'paddock.io', ...\n"
        "for i = 1, 5 do\n"
        "  req = { url = 'http://x/chunks?' .. i, unix = path .. '', method = 'POST', body = ('b'):rep(1000) .. i,\n"
        "          headers = { ['X-Long'] = ('h'):rep(1000) .. i } }\n"
        "  local r = assert(io.http(req))\n"
        "  assert(r.body == ('abcd'):rep(5))\n"
        "end\n"
        "stop = true");
    CHECK_KIND(err, PDK_OK);
    PDK_AUTO_ERROR last = lua("stop = true");
    pthread_join(t, NULL);
}

static void *cancel_soon(void *flag)
{
    usleep(50000);
    atomic_store((atomic_bool *)flag, true);
    return NULL;
}

TEST("the thread's limit ends a sleep and a request, and is what deadline says")
{
    PDK_AUTO_ERROR warm = lua("");
    pdk_limit limit = { .deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(0.2)) };
    const pdk_limit *former = pdk_limit_enter(&limit);
    double before = test_now();
    PDK_AUTO_ERROR err = lua("local io, path = require 'paddock.io', ...\n"
                             "assert(io.deadline() > 0 and io.deadline() <= 0.2)\n"
                             "io.sleep(30)");
    CHECK_KIND(err, PDK_E_TIMEOUT);
    CHECK_TOOK(before, 0.2);
    PDK_AUTO_ERROR late = lua("local io, path = require 'paddock.io', ...\n"
                              "assert(io.deadline() == 0)\n"
                              "local r, e = io.http { url = 'http://x/ok', unix = path }\n"
                              "assert(e.failure == 'not_sent'); error(e)");
    CHECK_KIND(late, PDK_E_TIMEOUT);
    atomic_bool flag = false;
    pdk_limit cancellable = { .deadline = PDK_NEVER, .cancelled = &flag };
    pdk_limit_enter(&cancellable);
    pthread_t t;
    pthread_create(&t, NULL, cancel_soon, &flag);
    before = test_now();
    PDK_AUTO_ERROR cancelled = lua("require 'paddock.io'.sleep(30)");
    CHECK_KIND(cancelled, PDK_E_CANCELLED);
    CHECK_WITHIN(before, 0.1);
    pthread_join(t, NULL);
    pdk_limit_enter(former);
}

static void keep_record(void *ctx, const pdk_pack *record)
{
    pdk_pack_copy(ctx, pdk_view_of(record));
}

TEST("log writes to the log that the thread's operation has")
{
    PDK_AUTO_PACK got = PDK_NO_PACK;
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, keep_record, &got);
    pdk_log *former = pdk_log_enter(log);
    PDK_AUTO_ERROR err = lua("require 'paddock.io'.log('warn', 'engine_slow', { ms = 12, name = 'x', yes = true })");
    pdk_log_enter(former);
    pdk_log_free(log);
    CHECK_KIND(err, PDK_OK);
    pdk_view v = pdk_view_of(&got);
    int64_t ms = 0;
    CHECK_STR(pdk_view_str(pdk_view_get(v, "event"), NULL), "engine_slow");
    CHECK_STR(pdk_view_str(pdk_view_get(v, "level"), NULL), "warn");
    CHECK(pdk_view_int(pdk_view_get(v, "ms"), &ms) && ms == 12);
    CHECK_STR(pdk_view_str(pdk_view_get(v, "yes"), NULL), "true");
}

/* ---- the n-th allocation fails --------------------------------------------------------------------------- */

typedef struct budget {
    long left; /* allocations that still succeed; negative = all */
} budget;

static void *allocate(void *ud, void *block, size_t old_size, size_t size)
{
    budget *b = ud;
    if (size == 0) {
        free(block);
        return NULL;
    }
    if (block == NULL || size > old_size) {
        if (b->left == 0)
            return NULL;
        b->left -= b->left > 0;
    }
    return realloc(block, size);
}

TEST("a Lua error for lack of memory at any point leaks no descriptor and no memory")
{
    static const char *const chunks[] = {
        "local io, path = ...; return io.http { url = 'http://x/ok', unix = path, headers = { A = 'b' } }",
        "local io, path = ...; return io.http { url = 'http://x/ok', unix = path, on_body = function(s) local t = { s .. s "
        "} end }",
        "local io, path = ...; return io.http { url = 'http://x/close', unix = path }",
        "local io = ...; return io.fs.read('/proc/self/status'), io.fs.list('/proc/self'), io.fs.realpath('/proc/self')",
        "local io = ...; return io.fs.read('/no'), io.fs.list('/no'), io.fs.mkdir('/proc/no/such'), io.fs.stat('/no')",
        "local io = ...; return io.json.encode { a = { 1, 2, 'x' }, b = ('y'):rep(2000) }", /* decode is not here: cjson 2.1 leaks its own buffer */
    };
    start_server();
    pdk_http_close_idle();
    for (size_t c = 0; c < sizeof chunks / sizeof chunks[0]; c++) {
        budget b = { -1 };
        lua_State *L = lua_newstate(allocate, &b);
        REQUIRE(L != NULL);
        luaL_openlibs(L);
        luaL_requiref(L, "paddock.io", luaopen_paddock_io, 0);
        CHECK(luaL_dostring(L, "local warm = ('y'):rep(10000)") == LUA_OK); /* Lua's own buffers make a metatable */
        int fds = test_fds(), failures = 0, rc = LUA_ERRMEM;
        for (long n = 0; n < 2000 && rc != LUA_OK; n++) {
            REQUIRE(luaL_loadstring(L, chunks[c]) == LUA_OK);
            lua_pushvalue(L, 1);
            lua_pushstring(L, sock_path);
            b.left = n;
            rc = lua_pcall(L, 2, LUA_MULTRET, 0);
            b.left = -1;
            failures += rc != LUA_OK;
            if (rc == LUA_OK && lua_isnil(L, 2) && c < 2)
                rc = LUA_ERRMEM; /* the error table had no room: not the answer yet */
            lua_settop(L, 1);
        }
        CHECK_INT(rc, LUA_OK);
        CHECK(failures > 3);
        lua_close(L);
        pdk_http_close_idle();
        for (int i = 0; i < 100 && test_fds() > fds; i++)
            usleep(10000); /* the server's ends */
        CHECK(test_fds() <= fds + 1);
    }
}

TEST("everything is given back at the end")
{
    pdk_script_release(universe);
    universe = NULL;
    pdk_http_close_idle();
}

TEST_MAIN
