/* Tables of Lua functions as C handles, in the universe and in a host's own state, and the queue of events. */
#include "test.h"

#include "call.h"
#include "events.h"

#include <lauxlib.h>
#include <lualib.h>

/* ---- help ------------------------------------------------------------------------------------------------ */

static int l_inside(lua_State *L)
{
    lua_pushboolean(L, pdk_inside_callback());
    return 1;
}

static int l_has_deadline(lua_State *L)
{
    lua_pushboolean(L, pdk_limit_current()->deadline != PDK_NEVER);
    return 1;
}

static int l_raise_lost(lua_State *L)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_fail_reason(&err, PDK_E_LOST, "stale", "somebody else has it");
    return pdk_raise(L, &err);
}

static void set_globals(lua_State *L)
{
    lua_register(L, "inside", l_inside);
    lua_register(L, "has_deadline", l_has_deadline);
    lua_register(L, "raise_lost", l_raise_lost);
}

static const char *const TABLE =
    "local class = {}\n"
    "class.__index = class\n"
    "function class:inherited() return self.name end\n"
    "local t = setmetatable({ name = 'engine', capabilities = { mounts = true }, socket = print }, class)\n"
    "t.odd = { f = print }\n"
    "function t:echo(...) return ... end\n"
    "function t:fail(text) error(text, 0) end\n"
    "function t:lost() raise_lost() end\n"
    "function t:inside() return inside() end\n"
    "function t:limited() return has_deadline() end\n"
    "function t:odd_answer() return { f = print } end\n"
    "function t:connect(n) return { double = function(_, x) return x * n end } end\n"
    "function t:nothing() return nil end\n"
    "t.calls = 0\n"
    "function t:count() self.calls = self.calls + 1; return self.calls end\n"
    "return t\n";

typedef struct making {
    pdk_script *s;
    pdk_iface *f;
} making;

static int make_in_universe(lua_State *L, void *arg)
{
    making *m = arg;
    set_globals(L);
    if (luaL_dostring(L, TABLE) != LUA_OK)
        return lua_error(L);
    m->f = pdk_iface_of_script(L, m->s, "backend");
    return 0;
}

static lua_State *new_host(pdk_host **h, pdk_iface **f, bool threads)
{
    lua_State *L = luaL_newstate();
    luaL_openlibs(L);
    set_globals(L);
    *h = pdk_host_new(L, threads);
    pdk_host_push_anchor(L, *h);
    lua_setglobal(L, "anchor");
    if (luaL_dostring(L, TABLE) != LUA_OK)
        return NULL;
    *f = pdk_iface_of_host(L, *h, "backend");
    return L;
}

/* Calls a method with up to one argument; the first result as a string is kept in `answer`. */
static char answer[100];
static int call(pdk_iface *f, const char *method, const char *arg, const pdk_limit *limit, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    PDK_AUTO_PACK results = PDK_NO_PACK;
    if (arg != NULL)
        pdk_put_cstr(&args, arg);
    int rc = pdk_iface_call(f, method, &args, &results, limit, PDK_E_BACKEND_ERROR, err);
    pdk_view v = pdk_view_of(&results);
    double number;
    if (pdk_view_str(v, NULL) != NULL)
        snprintf(answer, sizeof answer, "%s", pdk_view_str(v, NULL));
    else if (pdk_view_num(v, &number))
        snprintf(answer, sizeof answer, "%g", number);
    else
        snprintf(answer, sizeof answer, "%c", pdk_view_tag(v));
    return rc;
}

/* What both kinds of iface have to do. */
static void check_iface(pdk_iface *f)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK(pdk_iface_has(f, "echo"));
    CHECK(pdk_iface_has(f, "inherited"));
    CHECK(!pdk_iface_has(f, "name"));
    CHECK(!pdk_iface_has(f, "absent"));
    CHECK_STR(pdk_view_str(pdk_iface_field(f, "name"), NULL), "engine");
    CHECK(pdk_view_bool(pdk_view_get(pdk_iface_field(f, "capabilities"), "mounts"), false));
    CHECK(pdk_view_is_nil(pdk_iface_field(f, "odd")));

    CHECK_INT(call(f, "echo", "hello", NULL, &err), 0);
    CHECK_STR(answer, "hello");
    CHECK_INT(call(f, "inherited", NULL, NULL, &err), 0);
    CHECK_STR(answer, "engine");
    CHECK_INT(call(f, "fail", "no such engine", NULL, &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_STR(err.message, "no such engine");
    CHECK_INT(call(f, "lost", NULL, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_LOST);
    CHECK_STR(err.reason, "stale");
    CHECK_INT(call(f, "absent", NULL, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_HAS(err.message, "absent");
    CHECK_INT(call(f, "odd_answer", NULL, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_HAS(err.message, "odd_answer");
    CHECK_INT(call(f, "fail", "unheard", NULL, NULL), -1);
    pdk_error_clear(&err);

    CHECK_INT(call(f, "inside", NULL, NULL, &err), 0);
    CHECK_STR(answer, "t");
    CHECK(!pdk_inside_callback());
    pdk_limit limit = { .deadline = pdk_now_monotonic() + 5 * PDK_NS_PER_S };
    CHECK_INT(call(f, "limited", NULL, &limit, &err), 0);
    CHECK_STR(answer, "t");
    CHECK(pdk_limit_current()->deadline == PDK_NEVER);
}

static void check_several(pdk_iface *f)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    PDK_AUTO_PACK results = PDK_NO_PACK;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_put_nil(&args);
    pdk_put_int(&args, 7);
    pdk_put_str(&args, "a\0b", 3);
    CHECK_INT(pdk_iface_call(f, "echo", &args, &results, NULL, PDK_E_BACKEND_ERROR, &err), 0);
    CHECK(pdk_view_nth(&results, 0).len == 1);
    int64_t seven = 0;
    CHECK(pdk_view_int(pdk_view_nth(&results, 1), &seven));
    CHECK_INT(seven, 7);
    size_t len = 0;
    const char *s = pdk_view_str(pdk_view_nth(&results, 2), &len);
    CHECK_MEM(s, len, "a\0b", 3);
    CHECK_INT(pdk_view_nth(&results, 3).len, 0);
}

static void check_object(pdk_iface *f)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_iface *object = NULL;
    pdk_put_int(&args, 21);
    CHECK_INT(pdk_iface_make(f, "connect", &args, &object, NULL, PDK_E_BACKEND_ERROR, &err), 0);
    REQUIRE(object != NULL);
    CHECK(!pdk_iface_has(object, "close"));
    PDK_AUTO_PACK two = PDK_NO_PACK;
    PDK_AUTO_PACK results = PDK_NO_PACK;
    pdk_put_int(&two, 2);
    CHECK_INT(pdk_iface_call(object, "double", &two, &results, NULL, PDK_E_BACKEND_ERROR, &err), 0);
    int64_t n = 0;
    CHECK(pdk_view_int(pdk_view_of(&results), &n));
    CHECK_INT(n, 42);
    pdk_iface_free(object);
    CHECK_INT(pdk_iface_make(f, "nothing", NULL, &object, NULL, PDK_E_BACKEND_ERROR, &err), -1);
    CHECK(object == NULL);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
}

/* ---- the universe ---------------------------------------------------------------------------------------- */

TEST("a table in the universe is called, keeps kinds of errors, and gives objects")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script *s = pdk_script_new(&err);
    REQUIRE(s != NULL);
    making m = { s, NULL };
    CHECK_INT(pdk_script_enter(s, make_in_universe, &m, &err), 0);
    REQUIRE(m.f != NULL);
    check_iface(m.f);
    check_several(m.f);
    check_object(m.f);
    pdk_iface_free(m.f);
    pdk_script_release(s);
}

static void *call_often(void *arg)
{
    for (int i = 0; i < 200; i++)
        CHECK_INT(pdk_iface_call(arg, "count", NULL, NULL, NULL, PDK_E_BACKEND_ERROR, NULL), 0);
    return NULL;
}

TEST("threads that call one table in the universe take turns")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script *s = pdk_script_new(&err);
    REQUIRE(s != NULL);
    making m = { s, NULL };
    CHECK_INT(pdk_script_enter(s, make_in_universe, &m, &err), 0);
    pdk_thread t[4];
    for (int i = 0; i < 4; i++)
        CHECK_INT(pdk_thread_start(&t[i], "caller", call_often, m.f), 0);
    for (int i = 0; i < 4; i++)
        pdk_thread_join(&t[i]);
    CHECK_INT(call(m.f, "count", NULL, NULL, &err), 0);
    CHECK_STR(answer, "801");
    pdk_iface_free(m.f);
    pdk_script_release(s);
}

/* ---- a host ---------------------------------------------------------------------------------------------- */

TEST("a host's table is called at once on the host's thread inside a paddock call")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, false);
    REQUIRE(L != NULL && f != NULL);
    int top = lua_gettop(L);
    pdk_host_enter(h, L);
    check_iface(f);
    check_several(f);
    check_object(f);
    pdk_host_leave(h);
    CHECK_INT(lua_gettop(L), top);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

typedef struct caller {
    pdk_iface *f;
    pdk_limit limit;
    int rc;
    pdk_error err;
} caller;

static void *call_once(void *arg)
{
    caller *c = arg;
    c->rc = pdk_iface_call(c->f, "count", NULL, NULL, &c->limit, PDK_E_BACKEND_ERROR, &c->err);
    return NULL;
}

TEST("a call from another thread waits for the host's thread, which takes it in dispatch")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, true);
    REQUIRE(L != NULL && f != NULL);
    caller c = { f, PDK_NO_LIMIT, -1, PDK_NO_ERROR };
    pdk_thread t;
    CHECK_INT(pdk_host_pump(h, L), 0);
    CHECK_INT(pdk_thread_start(&t, "caller", call_once, &c), 0);
    int n = 0;
    for (double until = test_now() + 5; n == 0 && test_now() < until; pdk_sleep_ns(1000000))
        n = pdk_host_pump(h, L);
    pdk_thread_join(&t);
    CHECK_INT(n, 1);
    CHECK_INT(c.rc, 0);
    pdk_error_clear(&c.err);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

TEST("a queued call that nobody takes is withdrawn at its deadline, and never runs later")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, true);
    REQUIRE(L != NULL && f != NULL);
    caller c = { f, { .deadline = pdk_now_monotonic() + PDK_NS_PER_S / 20 }, 0, PDK_NO_ERROR };
    pdk_thread t;
    CHECK_INT(pdk_thread_start(&t, "caller", call_once, &c), 0);
    pdk_thread_join(&t);
    CHECK_INT(c.rc, -1);
    CHECK_KIND(c.err, PDK_E_TIMEOUT);
    pdk_error_clear(&c.err);
    CHECK_INT(pdk_host_pump(h, L), 0);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

TEST("a queued call is withdrawn when its operation is cancelled")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, true);
    REQUIRE(L != NULL && f != NULL);
    atomic_bool cancelled = false;
    caller c = { f, { .deadline = PDK_NEVER, .cancelled = &cancelled }, 0, PDK_NO_ERROR };
    pdk_thread t;
    CHECK_INT(pdk_thread_start(&t, "caller", call_once, &c), 0);
    pdk_sleep_ns(PDK_NS_PER_S / 50);
    atomic_store(&cancelled, true);
    pdk_thread_join(&t);
    CHECK_KIND(c.err, PDK_E_CANCELLED);
    pdk_error_clear(&c.err);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

TEST("closing a host ends the calls that wait for it, and refuses later ones")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, true);
    REQUIRE(L != NULL && f != NULL);
    caller c = { f, PDK_NO_LIMIT, 0, PDK_NO_ERROR };
    pdk_thread t;
    CHECK_INT(pdk_thread_start(&t, "caller", call_once, &c), 0);
    pdk_sleep_ns(PDK_NS_PER_S / 50);
    pdk_host_close(h);
    lua_close(L);
    pdk_thread_join(&t);
    CHECK_KIND(c.err, PDK_E_CLOSED);
    pdk_error_clear(&c.err);
    call_once(&c);
    CHECK_KIND(c.err, PDK_E_CLOSED);
    pdk_error_clear(&c.err);
    pdk_iface_free(f);
    pdk_host_release(h);
}

typedef struct work {
    pdk_iface *f;
    pdk_events *events;
    uint64_t thread;
    int rc;
    int events_taken; /* by the host's thread */
} work;

static void do_work(void *arg)
{
    work *w = arg;
    w->thread = pdk_thread_self();
    for (int i = 0; i < 10; i++)
        w->rc |= pdk_iface_call(w->f, "count", NULL, NULL, NULL, PDK_E_BACKEND_ERROR, NULL);
    PDK_AUTO_PACK record = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&record);
    pdk_kv_cstr(&record, &m, "event", "worked");
    pdk_end(&record, &m);
    if (w->events != NULL)
        pdk_events_sink_event(w->events, &record);
}

static bool take_event(lua_State *L, void *arg)
{
    (void)L;
    PDK_AUTO_PACK record = PDK_NO_PACK;
    pdk_record_type type;
    work *w = arg;
    bool took = pdk_events_take(w->events, &record, &type);
    w->events_taken += took;
    return took;
}

TEST("with threads, an operation runs on a worker while the host's thread carries out its calls and events")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, true);
    REQUIRE(L != NULL && f != NULL);
    work w = { .f = f, .events = pdk_events_new(4) };
    pdk_events_set_wake(w.events, pdk_host_wake, h);
    pdk_host_set_hook(h, take_event, &w);
    int top = lua_gettop(L);
    pdk_host_enter(h, L);
    pdk_host_run(h, L, do_work, &w);
    pdk_host_leave(h);
    CHECK(w.thread != pdk_thread_self());
    CHECK_INT(w.rc, 0);
    CHECK_INT(w.events_taken, 1);
    CHECK_INT(lua_gettop(L), top);
    pdk_events_free(w.events);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

TEST("without threads, or without a table, an operation runs on the host's thread")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, false);
    REQUIRE(L != NULL && f != NULL);
    work w = { .f = f };
    pdk_host_enter(h, L);
    pdk_host_run(h, L, do_work, &w);
    pdk_host_leave(h);
    CHECK(w.thread == pdk_thread_self());
    CHECK_INT(w.rc, 0);
    pdk_iface_free(f);
    pdk_host_release(h);
    lua_close(L);
}

TEST("an object that was freed elsewhere is let go by the host's thread")
{
    pdk_host *h;
    pdk_iface *f;
    lua_State *L = new_host(&h, &f, false);
    REQUIRE(L != NULL && f != NULL);
    CHECK_INT(luaL_dostring(L, "n = 0; for _ in pairs(anchor) do n = n + 1 end; return n"), 0);
    CHECK_INT(lua_tointeger(L, -1), 1);
    pdk_iface_free(f);
    CHECK_INT(pdk_host_pump(h, L), 0);
    CHECK_INT(luaL_dostring(L, "return next(anchor)"), 0);
    CHECK(lua_isnil(L, -1));
    pdk_host_release(h);
    lua_close(L);
}

/* ---- events ---------------------------------------------------------------------------------------------- */

TEST("a full queue of events drops the newest and counts it")
{
    pdk_events *q = pdk_events_new(2);
    REQUIRE(q != NULL);
    for (int i = 1; i <= 5; i++) {
        PDK_AUTO_PACK record = PDK_NO_PACK;
        pdk_put_int(&record, i);
        if (i % 2 == 0)
            pdk_events_sink_log(q, &record);
        else
            pdk_events_sink_event(q, &record);
    }
    CHECK_INT(pdk_events_count(q), 2);
    CHECK_INT(pdk_events_dropped(q), 3);
    PDK_AUTO_PACK record = PDK_NO_PACK;
    pdk_record_type type;
    int64_t n = 0;
    for (int64_t i = 1; i <= 2; i++) {
        CHECK(pdk_events_take(q, &record, &type));
        CHECK(pdk_view_int(pdk_view_of(&record), &n));
        CHECK_INT(n, i);
        CHECK_INT(type, i == 1 ? PDK_RECORD_EVENT : PDK_RECORD_LOG);
    }
    CHECK(!pdk_events_take(q, &record, &type));
    CHECK(!pdk_events_wait(q, pdk_now_monotonic()));
    pdk_events_stop(q);
    CHECK(!pdk_events_wait(q, PDK_NEVER));
    pdk_events_free(q);
}

TEST_MAIN
