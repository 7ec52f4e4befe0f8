/* The Lua binding where only C can look: inside the universe, across a fork, and on several threads. */
#include "test.h"

#include "script.h"

#include <lauxlib.h>
#include <lualib.h>
#include <sys/wait.h>

/* ---- the universe ---------------------------------------------------------------------------------------- */

static const char *const IN_UNIVERSE =
    "local dir, threads = ...\n"
    "local paddock, errors = require 'paddock', require 'paddock.errors'\n"
    "local engine = require('paddock.sim').new()\n"
    "local lines, events, inside = 0, 0, nil\n"
    "local rt = paddock.open { backend = engine.backend, state_dir = dir, threads = threads, user = 'u',\n"
    "  log = function() lines = lines + 1 end }\n"
    "local create = engine.backend.create\n"
    "engine.backend.create = function(self, spec)\n"
    "  inside = select(2, pcall(rt.tick, rt))\n"
    "  return create(self, spec)\n"
    "end\n"
    "rt:on('*', function(record) assert(record.event) events = events + 1 end)\n"
    "do\n"
    "  local box <close> = rt:acquire { thread = 't1' }\n"
    "  assert(box.source == 'created')\n"
    "  assert(box:exec('echo hi').stdout == 'hi\\n')\n"
    "  assert(errors.is(inside, 'unsupported'))\n"
    "end\n"
    "assert(rt:acquire({ thread = 't1' }).source == 'warm')\n" /* forgotten: released by its finalizer */
    "collectgarbage() collectgarbage()\n"
    "local ok, err = pcall(rt.acquire, rt, { thread = 5 })\n"
    "assert(not ok and errors.is(err, 'invalid_argument'))\n"
    "rt:dispatch()\n"
    "assert(lines > 0 and events > 0)\n"
    "rt:shutdown()\n"
    "ok, err = pcall(rt.list, rt)\n"
    "assert(not ok and errors.is(err, 'closed'))\n";

typedef struct running {
    const char *text, *dir;
    bool threads;
} running;

static int run_text(lua_State *L, void *arg)
{
    running *r = arg;
    if (luaL_loadstring(L, r->text) != LUA_OK)
        return lua_error(L);
    lua_pushstring(L, r->dir);
    lua_pushboolean(L, r->threads);
    lua_call(L, 2, 0);
    return 0;
}

static const char *folder(const char *name)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", test_tmpdir(), name);
    return path;
}

TEST("inside the universe the same module shares it, with threads and without")
{
    for (int threads = 0; threads <= 1; threads++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_script *s = pdk_script_new(&err);
        REQUIRE(s != NULL);
        running r = { IN_UNIVERSE, folder(threads ? "universe-threads" : "universe-plain"), threads };
        CHECK_INT(pdk_script_enter(s, run_text, &r, &err), 0);
        CHECK_KIND(err, PDK_OK);
        pdk_script_release(s);
    }
}

static const char *const OPEN_SHARED =
    "local dir = ...\n"
    "engine = require('paddock.sim').new()\n"
    "rt = require('paddock').open { backend = engine.backend, state_dir = dir, user = 'u', replicas = 100,\n"
    "  log = function() end }\n"
    "rt:on('*', function() rt:stats() end)\n"
    "turn = 0\n";
static const char *const USE_SHARED =
    "turn = turn + 1\n"
    "local name = 't' .. turn\n"
    "for i = 1, 20 do\n"
    "  local box <close> = rt:acquire { thread = name }\n"
    "  assert(box:exec('echo ' .. name).stdout == name .. '\\n')\n"
    "  rt:acquire { thread = 'shared' }\n"
    "end\n";

typedef struct user {
    pdk_script *s;
    int rc;
} user;

static void *use_shared(void *arg)
{
    user *u = arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    running r = { USE_SHARED, "", true };
    u->rc = pdk_script_enter(u->s, run_text, &r, &err);
    CHECK_KIND(err, PDK_OK);
    return NULL;
}

TEST("several threads of the universe use one runtime, and forgotten boxes are given back")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script *s = pdk_script_new(&err);
    REQUIRE(s != NULL);
    running r = { OPEN_SHARED, folder("shared"), true };
    CHECK_INT(pdk_script_enter(s, run_text, &r, &err), 0);
    CHECK_KIND(err, PDK_OK);
    pdk_thread t[4];
    user users[4];
    for (int i = 0; i < 4; i++) {
        users[i] = (user){ s, -1 };
        CHECK_INT(pdk_thread_start(&t[i], "user", use_shared, &users[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pdk_thread_join(&t[i]);
        CHECK_INT(users[i].rc, 0);
    }
    r.text = "collectgarbage() rt:shutdown() for _, row in ipairs(engine.show()) do assert(row.condition == 'gone') end";
    CHECK_INT(pdk_script_enter(s, run_text, &r, &err), 0);
    CHECK_KIND(err, PDK_OK);
    pdk_script_release(s);
}

/* ---- a host in C ------------------------------------------------------------------------------------------ */

/* The library's own Lua files, as a searcher. */
static int search_embedded(lua_State *L)
{
    char path[200];
    size_t n = (size_t)snprintf(path, sizeof path, "lua/%s", lua_tostring(L, 1));
    for (char *c = path; *c != '\0'; c++)
        if (*c == '.')
            *c = '/';
    snprintf(path + n, sizeof path - n, strcmp(path, "lua/paddock") == 0 ? "/init.lua" : ".lua");
    const pdk_embedded *file = pdk_embedded_find(path);
    if (file == NULL)
        return 0;
    return luaL_loadbufferx(L, (const char *)file->data, file->len, path, "t") == LUA_OK ? 1 : lua_error(L);
}

static int prepare(lua_State *L)
{
    luaL_openlibs(L);
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, luaopen_paddock_core);
    lua_setfield(L, -2, "paddock.core");
    lua_getglobal(L, "package");
    lua_getfield(L, -1, "searchers");
    lua_pushcfunction(L, search_embedded);
    lua_rawseti(L, -2, luaL_len(L, -2) + 1);
    return 0;
}

static bool run_host(lua_State *L, const char *text, const char *dir, bool threads)
{
    running r = { text, dir, threads };
    if (luaL_loadstring(L, text) == LUA_OK) {
        lua_pushstring(L, r.dir);
        lua_pushboolean(L, r.threads);
        if (lua_pcall(L, 2, 0, 0) == LUA_OK)
            return true;
    }
    const char *message = luaL_tolstring(L, -1, NULL);
    fprintf(stderr, "  %s\n", message);
    lua_settop(L, 0);
    return false;
}

static lua_State *new_host(void)
{
    lua_State *L = luaL_newstate();
    lua_pushcfunction(L, prepare);
    CHECK_INT(lua_pcall(L, 0, 0, 0), LUA_OK);
    return L;
}

static const char *const OPEN_HOST =
    "local dir, threads = ...\n"
    "engine = require('paddock.sim').new()\n"
    "rt = require('paddock').open { backend = engine.backend, state_dir = dir, threads = threads, log = function() end }\n"
    "rt:on('*', function() end)\n"
    "box = rt:acquire { user = 'u', thread = 't' }\n";
static const char *const IN_CHILD =
    "local errors = require 'paddock.errors'\n"
    "local function closed(fn, ...) local ok, err = pcall(fn, ...) assert(not ok and errors.is(err, 'closed'), err) end\n"
    "closed(rt.acquire, rt, { thread = 'x' })\n"
    "closed(rt.list, rt)\n"
    "closed(rt.dispatch, rt)\n"
    "closed(rt.shutdown, rt)\n"
    "closed(box.exec, box, 'true')\n"
    "closed(box.release, box)\n"
    "assert(#tostring(box) > 0 and #tostring(rt) > 0)\n"
    "do local _b <close> = box end\n"
    "rt, box = nil, nil\n"
    "collectgarbage() collectgarbage()\n";

TEST("after a fork, a Lua host's child finds everything `closed`, and its finalizers do nothing")
{
    for (int threads = 0; threads <= 1; threads++) {
        lua_State *L = new_host();
        REQUIRE(run_host(L, OPEN_HOST, folder(threads ? "fork-threads" : "fork-plain"), threads));
        pid_t pid = fork();
        if (pid == 0) {
            alarm(20);
            bool ok = run_host(L, IN_CHILD, "", threads);
            lua_close(L);
            _exit(ok ? 0 : 1);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        CHECK_INT(status, 0);
        CHECK(run_host(L, "assert(box:exec('echo still').stdout == 'still\\n') box:release() rt:shutdown()", "", threads));
        lua_close(L);
    }
}

TEST("a forked child may open a runtime of its own in the same Lua state")
{
#if defined(__SANITIZE_THREAD__)
    SKIP("ThreadSanitizer allows no threads after a fork");
#endif
    lua_State *L = new_host();
    REQUIRE(run_host(L, OPEN_HOST, folder("fork-parent"), true));
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        bool ok = run_host(L, OPEN_HOST, folder("fork-child"), true) &&
                  run_host(L, "assert(box:exec('echo child').stdout == 'child\\n') rt:shutdown()", "", true);
        lua_close(L);
        _exit(ok ? 0 : 1);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_INT(status, 0);
    CHECK(run_host(L, "rt:shutdown()", "", true));
    lua_close(L);
}

TEST("a host that moves from one of its threads to another may use its runtime on either")
{
    lua_State *L = new_host();
    REQUIRE(run_host(L, OPEN_HOST, folder("moves"), true));
    CHECK(run_host(L, "co = coroutine.wrap(function() assert(box:exec('echo a').stdout == 'a\\n') return true end)", "", true));
    CHECK(run_host(L, "assert(co()) box:release() rt:shutdown()", "", true));
    lua_close(L);
}

TEST_MAIN
