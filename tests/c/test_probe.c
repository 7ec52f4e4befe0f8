/* test_probe.c -- what a deployment can do is asked by one caller for all, and within a limit. What becomes of the answers in an
 * acquire: tests/spec/reuse_spec.lua. */
#include "world.h"

enum { CALLERS = 8 };

/* `seconds`: how long a probe takes; `answer`: nil = it fails. */
static const char probing_engine[] = "local io = require 'paddock.io'\n"
                                     "asked, seconds, answer = 0, 0, { a = true }\n"
                                     "local M = { name = 'probing', capabilities = { fenced = false } }\n"
                                     "local function nothing() end\n"
                                     "for _, name in ipairs { 'create', 'destroy', 'inspect', 'discover', 'alive', 'ready', 'list',\n"
                                     "  'finish', 'connect' } do M[name] = nothing end\n"
                                     "function M.list() return {} end\n"
                                     "function M.probe(_, opts) assert(opts.fresh) asked = asked + 1\n"
                                     "  if seconds > 0 then io.sleep(seconds) end\n"
                                     "  if not answer then error('no answer', 0) end return answer end\n"
                                     "return M\n";

static pdk_runtime *open_probing(const char *clock)
{
    char path[300], text[1000];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(path, sizeof path, "%s/probing.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL && fputs(probing_engine, f) >= 0 && fclose(f) == 0))
        exit(1);
    snprintf(text, sizeof text, "return { backend = '%s', clock = '%s', log = function() end, state_dir = '%s/state', "
             "ownership = { type = 'memory' } }", path, clock, test_tmpdir());
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    if (!CHECK(rt != NULL)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    return rt;
}

static int run_text(lua_State *L, void *arg)
{
    if (luaL_dostring(L, arg) != LUA_OK)
        return luaL_error(L, "%s", lua_tostring(L, -1));
    return 0;
}

static void say(pdk_runtime *rt, const char *text)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_script_enter(rt->script, run_text, (void *)(uintptr_t)text, &err), 0);
}

static int read_asked(lua_State *L, void *arg)
{
    lua_getglobal(L, "asked");
    *(int *)arg = (int)lua_tointeger(L, -1);
    lua_pop(L, 1);
    return 0;
}

static int asked(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int n = -1;
    CHECK_INT(pdk_script_enter(rt->script, read_asked, &n, &err), 0);
    return n;
}

typedef struct caller {
    pdk_runtime *rt;
    pdk_thread thread;
    bool bypass, fresh, yes;
    int rc;
    double took;
} caller;

static void *call(void *arg)
{
    caller *c = arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK out = PDK_NO_PACK;
    pdk_ns before = pdk_now_monotonic();
    c->rc = pdk_probe(c->rt, c->bypass, &out, &c->fresh, &err);
    c->took = pdk_to_seconds(pdk_now_monotonic() - before);
    c->yes = c->rc == 0 && pdk_view_bool(pdk_view_get(pdk_view_of(&out), "a"), false);
    CHECK((err.kind == PDK_OK) == (c->rc == 0));
    return NULL;
}

static void all_at_once(caller *callers, pdk_runtime *rt, bool bypass)
{
    for (int i = 0; i < CALLERS; i++) {
        callers[i] = (caller){ .rt = rt, .bypass = bypass };
        CHECK_INT(pdk_thread_start(&callers[i].thread, "caller", call, &callers[i]), 0);
    }
    for (int i = 0; i < CALLERS; i++)
        pdk_thread_join(&callers[i].thread);
}

static void end(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_runtime_shutdown(rt, &err), 0);
    pdk_runtime_free(rt);
}

TEST("concurrent callers share one probe and its answer, and then there is nothing to ask for [I8]")
{
    pdk_runtime *rt = open_probing("monotonic");
    caller callers[CALLERS];
    say(rt, "seconds = 0.3");
    all_at_once(callers, rt, false);
    CHECK_INT(asked(rt), 1);
    for (int i = 0; i < CALLERS; i++)
        CHECK(callers[i].rc == 0 && callers[i].yes);
    all_at_once(callers, rt, false);
    CHECK_INT(asked(rt), 1);
    for (int i = 0; i < CALLERS; i++)
        CHECK(callers[i].yes && !callers[i].fresh);
    all_at_once(callers, rt, true); /* past what is kept: one question for all again, at most one for those who came after its end */
    int n = asked(rt);
    CHECK(n >= 2);
    for (int i = 0; i < CALLERS; i++)
        CHECK(callers[i].yes && callers[i].fresh);
    end(rt);
}

TEST("a failure is shared too, is no answer, and nobody asks again at once [I8]")
{
    pdk_runtime *rt = open_probing("monotonic");
    caller callers[CALLERS];
    say(rt, "seconds, answer = 0.2, nil");
    all_at_once(callers, rt, false);
    CHECK_INT(asked(rt), 1);
    for (int i = 0; i < CALLERS; i++)
        CHECK_INT(callers[i].rc, -1);
    say(rt, "seconds, answer = 0, { a = true }");
    caller one = { .rt = rt };
    call(&one);
    CHECK_INT(one.rc, -1);
    CHECK_INT(asked(rt), 1);
    end(rt);
}

TEST("a probe that takes too long is unknown after a second and a half, for those who wait for it as well [I8]")
{
    pdk_runtime *rt = open_probing("monotonic");
    caller callers[CALLERS];
    say(rt, "seconds = 30");
    all_at_once(callers, rt, false);
    CHECK_INT(asked(rt), 1);
    for (int i = 0; i < CALLERS; i++) {
        CHECK_INT(callers[i].rc, -1);
        CHECK(callers[i].took < 15); /* and not the thirty seconds */
    }
    end(rt);
}

TEST("a caller whose own time is over says nothing about the deployment [I8]")
{
    pdk_runtime *rt = open_probing("monotonic");
    say(rt, "seconds = 5");
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), 0.1);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK out = PDK_NO_PACK;
    bool fresh;
    CHECK_INT(pdk_probe(rt, false, &out, &fresh, &err), -1);
    pdk_limit_enter(outer);
    say(rt, "seconds = 0");
    caller next = { .rt = rt };
    call(&next);
    CHECK(next.rc == 0 && next.yes && next.fresh);
    end(rt);
}

TEST_MAIN
