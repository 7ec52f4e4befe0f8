/* The Lua universe: entries, nesting, the mutex, errors across the border, text chunks only. */
#include "script.h"
#include "test.h"

#include <lauxlib.h>
#include <lualib.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

static pdk_script *new_script(void)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script *s = pdk_script_new(&err);
    if (!CHECK(s != NULL))
        abort();
    CHECK_KIND(err, PDK_OK);
    return s;
}

/* Runs Lua text in the universe; its first result becomes `text`. */
typedef struct snippet {
    const char *code;
    char text[300];
} snippet;

static int run_snippet(lua_State *L, void *arg)
{
    snippet *s = arg;
    if (luaL_loadbufferx(L, s->code, strlen(s->code), "=snippet", "t") != LUA_OK)
        return lua_error(L);
    lua_call(L, 0, 1);
    snprintf(s->text, sizeof s->text, "%s", luaL_tolstring(L, -1, NULL));
    return 0;
}

static const char *eval(pdk_script *s, const char *code)
{
    static _Thread_local snippet one;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    one = (snippet){ .code = code };
    if (pdk_script_enter(s, run_snippet, &one, &err) < 0)
        snprintf(one.text, sizeof one.text, "error: %s", err.message);
    return one.text;
}

TEST("an entry runs Lua, and its errors come out as values")
{
    pdk_script *s = new_script();
    CHECK_STR(eval(s, "return 1 + 1"), "2");
    CHECK_STR(eval(s, "error('no', 0)"), "error: no");
    CHECK_HAS(eval(s, "error({})"), "error: table");
    CHECK_STR(eval(s, "return 3"), "3");
    CHECK(pdk_script_memory(s) > 10000);
    pdk_script_release(s);
}

TEST("an error that is raised with a kind keeps kind, reason, causes and the rest on its way through Lua")
{
    pdk_script *s = new_script();
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    lua_State *host = luaL_newstate(); /* a Lua host's own state */
    REQUIRE(host != NULL);
    CHECK(pdk_script_of(host) == NULL);
    pdk_fail_reason(&err, PDK_E_BACKEND_ERROR, "connect", "the engine is away");
    pdk_error_become(&err, PDK_E_UNREADY, "slow", "not ready");
    pdk_error_set_id(&err, "box-1");
    pdk_error_set_stage(&err, "create");
    err.attempt = 3;
    char whole[400];
    snprintf(whole, sizeof whole, "%s", err.message);
    pdk_error_to_lua(host, &err);
    CHECK_KIND(err, PDK_OK);
    luaL_openlibs(host);
    lua_pushvalue(host, -1);
    lua_setglobal(host, "e");
    CHECK(luaL_dostring(host,
                        "return tostring(e) == e.kind .. ': ' .. e.message and e.kind == 'unready' "
                        "and e.reason == 'slow' and e.sandbox_id == 'box-1' and e.stage == 'create' "
                        "and e.attempt == 3 and e.cause.kind == 'backend_error' and e.cause.reason == 'connect'") == 0);
    CHECK(lua_toboolean(host, -1));
    lua_settop(host, 1);
    pdk_error_from_lua(host, 1, PDK_E_IO_ERROR, &err);
    CHECK_INT(lua_gettop(host), 1);
    CHECK_KIND(err, PDK_E_UNREADY);
    CHECK_STR(err.reason, "slow");
    CHECK_STR(err.message, whole);
    CHECK_STR(err.sandbox_id, "box-1");
    CHECK_STR(err.stage, "create");
    CHECK_INT(err.attempt, 3);
    REQUIRE(err.cause != NULL);
    CHECK_KIND(*err.cause, PDK_E_BACKEND_ERROR);
    CHECK_STR(err.cause->message, "the engine is away");
    CHECK(err.cause->cause == NULL);
    lua_close(host);
    pdk_script_release(s);
}

static int raise_cyclic(lua_State *L, void *arg)
{
    (void)arg;
    pdk_error err = PDK_NO_ERROR;
    pdk_fail(&err, PDK_E_LOST, 0, "gone");
    pdk_error_to_lua(L, &err);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "cause"); /* of itself */
    return lua_error(L);
}
static int raise_hostile(lua_State *L, void *arg)
{
    (void)arg;
    int rc = luaL_dostring(L, "return setmetatable({}, { __tostring = function() error('ha') end })");
    return rc != 0 ? -1 : lua_error(L);
}
static int raise_kind(lua_State *L, void *arg)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_fail(&err, PDK_E_CAPACITY_EXHAUSTED, 0, "%s", (const char *)arg);
    return pdk_raise(L, &err);
}

TEST("an error value that is a cycle, or fails when it is looked at, becomes an error all the same")
{
    pdk_script *s = new_script();
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_script_enter(s, raise_cyclic, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_LOST);
    CHECK_INT(pdk_script_enter(s, raise_hostile, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_INT(pdk_script_enter(s, raise_kind, "full", &err), -1);
    CHECK_KIND(err, PDK_E_CAPACITY_EXHAUSTED);
    CHECK_STR(err.message, "full");
    CHECK_INT(pdk_script_enter(s, raise_kind, "no error wanted", NULL), -1);
    pdk_script_release(s);
}

TEST("a chunk is text, wherever it enters [B150]")
{
    pdk_script *s = new_script();
    const char *make = "local b = string.dump(function() return 1 end) ";
    char code[300];
    snprintf(code, sizeof code, "%s local f, e = load(b) return tostring(f) .. ' ' .. e", make);
    CHECK_HAS(eval(s, code), "nil attempt to load a binary chunk");
    snprintf(code, sizeof code, "%s local f, e = load(b, 'x', 'b', {}) return tostring(f) .. ' ' .. e", make);
    CHECK_HAS(eval(s, code), "nil attempt to load a binary chunk");
    char path[100], file[400];
    snprintf(path, sizeof path, "%s/binary.lua", test_tmpdir());
    snprintf(file, sizeof file, "%s local f = io.open('%s', 'wb') f:write(b) f:close() return 'ok'", make, path);
    CHECK_STR(eval(s, file), "ok");
    snprintf(file, sizeof file, "local f, e = loadfile('%s') return tostring(f) .. ' ' .. e", path);
    CHECK_HAS(eval(s, file), "nil");
    CHECK_HAS(eval(s, file), "binary chunk");
    snprintf(file, sizeof file, "return select(2, pcall(dofile, '%s'))", path);
    CHECK_HAS(eval(s, file), "binary chunk");
    snprintf(file, sizeof file, "package.path = '%s/?.lua' return select(2, pcall(require, 'binary'))", test_tmpdir());
    CHECK_HAS(eval(s, file), "binary chunk");
    CHECK_STR(eval(s, "return load('return 7')()"), "7");
    CHECK_STR(eval(s, "return load('return x', 'c', 't', { x = 8 })()"), "8");
    CHECK_HAS(eval(s, "return tostring(package.loadlib) .. #package.searchers .. package.cpath"), "nil3");
    pdk_script_release(s);
}

TEST("require finds the files of $PADDOCK_LUA_PATH before those that are built in, and paddock's modules")
{
    char path[120];
    snprintf(path, sizeof path, "%s/paddock", test_tmpdir());
    CHECK_INT(mkdir(path, 0700), 0);
    snprintf(path, sizeof path, "%s/paddock/probe.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    REQUIRE(f != NULL);
    fputs("return 'probed'", f);
    fclose(f);
    setenv("PADDOCK_LUA_PATH", test_tmpdir(), 1);
    pdk_script *s = new_script();
    CHECK_STR(eval(s, "return require 'paddock.probe'"), "probed");
    CHECK_HAS(eval(s, "return require 'paddock.nothing'"), "no file 'lua/paddock/nothing.lua' in the library");
    CHECK_HAS(eval(s, "return require 'paddock...probe'"), "not found");
    CHECK_HAS(eval(s, "return type(require 'cjson') .. type(require 'paddock.io')"), "tabletable");
    pdk_script_release(s);
    unsetenv("PADDOCK_LUA_PATH");
}

TEST("methods of strings are Lua's own outside of policies, and collection stays incremental")
{
    pdk_script *s = new_script();
    CHECK_STR(eval(s, "function string.twice(x) return x .. x end return ('ab'):twice()"), "abab");
    CHECK_STR(eval(s, "return ('x'):rep(3) .. ('abc'):gsub('b', '-')"), "xxxa-c");
    CHECK_HAS(eval(s, "collectgarbage('generational')"), "incrementally");
    CHECK_STR(eval(s, "return collectgarbage('step') ~= nil and type(collectgarbage('count'))"), "number");
    pdk_script_release(s);
}

/* ---- nesting, blocking, threads ---- */

typedef struct deep {
    pdk_script *s;
    int depth;
    int reached;
} deep;

static int go_deeper(lua_State *L, void *arg)
{
    deep *d = arg;
    (void)L;
    d->reached++;
    char stack[16384]; /* so that the thread's stack is used up on the way */
    memset(stack, d->depth, sizeof stack);
    if (d->depth-- == 0)
        return stack[100];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    return pdk_script_enter(d->s, go_deeper, d, &err) + (stack[5] - stack[7]);
}

static void *deep_thread(void *arg)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    deep *d = arg;
    return (void *)(intptr_t)pdk_script_enter(d->s, go_deeper, d, &err);
}

TEST("an entry from inside is nested, however deep, and moves to a thread with more stack when little is left")
{
    pdk_script *s = new_script();
    deep d = { s, 150, 0 }; /* 2.4 MiB of stack, on threads of 1 MiB */
    pdk_thread t;
    REQUIRE(pdk_thread_start(&t, "deep", deep_thread, &d) == 0);
    pdk_thread_join(&t);
    CHECK_INT(d.reached, 151);
    CHECK_STR(eval(s, "return 1"), "1");
    pdk_script_release(s);
}

typedef struct shared {
    pdk_script *s;
    atomic_int inside, most, rounds, blocked;
} shared;

static int one_round(lua_State *L, void *arg)
{
    shared *sh = arg;
    int now = atomic_fetch_add(&sh->inside, 1) + 1;
    if (now > atomic_load(&sh->most))
        atomic_store(&sh->most, now);
    lua_getglobal(L, "count");
    lua_pushinteger(L, lua_tointeger(L, -1) + 1);
    lua_setglobal(L, "count");
    atomic_fetch_sub(&sh->inside, 1);
    pdk_script_block(L);
    atomic_fetch_add(&sh->blocked, 1);
    /* while the mutex is given up, an entry takes it anew */
    CHECK_STR(eval(sh->s, "return 'in between'"), "in between");
    pdk_script_unblock(L);
    int rounds = atomic_fetch_add(&sh->rounds, 1);
    if (rounds % 7 == 0)
        luaL_error(L, "round %d", rounds);
    return 0;
}

static void *many_rounds(void *arg)
{
    shared *sh = arg;
    for (int i = 0; i < 200; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        int rc = pdk_script_enter(sh->s, one_round, sh, &err);
        if (rc < 0)
            CHECK_HAS(err.message, "round ");
    }
    return NULL;
}

TEST("four threads share a universe: one at a time inside, errors stay with their thread")
{
    shared sh = { .s = new_script() };
    CHECK_STR(eval(sh.s, "count = 0"), "nil");
    pdk_thread t[4];
    for (int i = 0; i < 4; i++)
        CHECK_INT(pdk_thread_start(&t[i], "round", many_rounds, &sh), 0);
    for (int i = 0; i < 4; i++)
        pdk_thread_join(&t[i]);
    CHECK_STR(eval(sh.s, "return count"), "800");
    CHECK_INT(atomic_load(&sh.most), 1);
    CHECK_INT(atomic_load(&sh.blocked), 800);
    pdk_script_release(sh.s);
}

static int make_ref(lua_State *L, void *arg)
{
    if (luaL_dostring(L, "weak = weak or setmetatable({}, { __mode = 'v' }) local t = { 'kept' } weak[1] = t return t"))
        return lua_error(L);
    *(int *)arg = pdk_script_ref(L);
    return 0;
}
static int look_at_ref(lua_State *L, void *arg)
{
    pdk_script_push_ref(L, *(int *)arg);
    lua_rawgeti(L, -1, 1);
    CHECK_STR(lua_tostring(L, -1), "kept");
    return 0;
}
typedef struct drop {
    pdk_script *s;
    int ref;
} drop;
static void *drop_it(void *arg)
{
    drop *d = arg;
    pdk_script_drop_ref(d->s, d->ref);
    return NULL;
}

TEST("a reference keeps its value alive until any thread drops it")
{
    drop d = { new_script(), 0 };
    CHECK_INT(pdk_script_enter(d.s, make_ref, &d.ref, NULL), 0);
    CHECK_STR(eval(d.s, "collectgarbage() return weak[1][1]"), "kept");
    CHECK_INT(pdk_script_enter(d.s, look_at_ref, &d.ref, NULL), 0);
    pdk_thread t;
    REQUIRE(pdk_thread_start(&t, "drop", drop_it, &d) == 0);
    pdk_thread_join(&t);
    CHECK_STR(eval(d.s, "collectgarbage() return weak[1]"), "nil");
    pdk_script_drop_ref(d.s, LUA_NOREF);
    pdk_script_release(d.s);
}

static int release_inside(lua_State *L, void *arg)
{
    (void)L;
    pdk_script_release(arg);
    return 0;
}

TEST("the last reference may be dropped from inside, and the universe ends when that entry does")
{
    pdk_script *s = new_script();
    CHECK_INT(pdk_script_enter(s, release_inside, s, NULL), 0);
}

TEST("blocking does nothing in a Lua host's own state")
{
    lua_State *host = luaL_newstate();
    REQUIRE(host != NULL);
    pdk_script_block(host);
    pdk_script_unblock(host);
    lua_close(host);
}

TEST_MAIN
