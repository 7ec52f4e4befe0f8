/* op_engine.h -- for tests of asynchronous operations: an engine, a Lua file in the universe, each of whose methods can be held inside
 * (a gate), and counts how often it was entered. Beside world.h, whose hook is called once per call. */
#ifndef PDK_TEST_OP_ENGINE_H
#define PDK_TEST_OP_ENGINE_H

#include "async.h"
#include "core.h"
#include "test.h"

#include <lauxlib.h>

static const char gate_engine[] =
    "local io, errors = require 'paddock.io', require 'paddock.errors'\n"
    "local n, there = 0, {}\n"
    "local M = { name = 'gated', capabilities = { fenced = false } }\n"
    "local function at(name) local fails = gate_enter(name)\n"
    "  while gate_shut(name) do io.sleep(0.002) end\n"
    "  gate_leave(name) if fails then errors.raise(fails, name .. ' was told to fail') end end\n"
    "function M.create(_, spec) at('create') n = n + 1 local info = { sandbox_id = spec.sandbox_id, generation = 'g' .. n }\n"
    "  there[info.generation] = info return info end\n"
    "function M.destroy(_, info) at('destroy') there[info.generation] = nil end\n"
    "function M.inspect(_, id, info) at('inspect') if info and info.generation then return there[info.generation] end\n"
    "  for _, one in pairs(there) do if one.sandbox_id == id then return one end end end\n"
    "function M.discover(_, id) at('discover') for _, one in pairs(there) do if one.sandbox_id == id then return one end end end\n"
    "function M.alive(_, info) at('alive') return there[info.generation] ~= nil end\n"
    "function M.ready() at('ready') return true end\n"
    "function M.list() at('list') return {} end\n"
    "function M.finish() at('finish') end\n"
    "function M.connect() at('connect') local wanted, running = {}, {} return {\n"
    "  exec = function(_, req) running[req.name or ''] = true gate_enter('exec') io.output(1, 'begun\\n')\n"
    "    while gate_shut('exec') and not wanted[req.name or ''] do io.sleep(0.002) end gate_leave('exec')\n"
    "    if wanted[req.name or ''] then return { outcome = 'cancelled', exit_code = 143, stdout = 'begun\\n' } end\n"
    "    io.output(1, req.command) return { outcome = 'completed', exit_code = 0, stdout = 'begun\\n' .. req.command } end,\n"
    "  cancel = function(_, name) at('cancel') if not running[name] then return false end wanted[name] = true return true end,\n"
    "  open_session = function() at('open_session') end, close_session = function() end,\n"
    "  read = function(_, path) at('read') return 'bytes of ' .. path end, write = function() at('write') return true end,\n"
    "  list = function() return { { name = 'a' } } end,\n"
    "  close = function() at('close') end } end\n"
    "return M\n";

typedef struct gate {
    const char *name;
    atomic_bool shut;
    atomic_int came, inside, most; /* entered; now; most at once */
    _Atomic(const char *) fails;   /* NULL, or the kind of error that it raises when it leaves */
    atomic_uint_least64_t thread;  /* that entered last */
} gate;
static gate gates[] = { { .name = "create" },  { .name = "alive" },   { .name = "ready" },        { .name = "discover" },
                        { .name = "exec" },    { .name = "destroy" }, { .name = "close" },        { .name = "inspect" },
                        { .name = "finish" },  { .name = "connect" }, { .name = "list" },         { .name = "cancel" },
                        { .name = "read" },    { .name = "write" },   { .name = "open_session" } };

static inline gate *gate_of(const char *name)
{
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++)
        if (strcmp(gates[i].name, name) == 0)
            return &gates[i];
    abort();
}

static inline int gate_enter(lua_State *L)
{
    gate *g = gate_of(luaL_checkstring(L, 1));
    atomic_fetch_add(&g->came, 1);
    int now = atomic_fetch_add(&g->inside, 1) + 1;
    if (now > atomic_load(&g->most))
        atomic_store(&g->most, now);
    atomic_store(&g->thread, pdk_thread_self());
    lua_pushstring(L, atomic_load(&g->fails));
    return 1;
}

static inline int gate_shut(lua_State *L)
{
    lua_pushboolean(L, atomic_load(&gate_of(luaL_checkstring(L, 1))->shut));
    return 1;
}

static inline int gate_leave(lua_State *L)
{
    atomic_fetch_sub(&gate_of(luaL_checkstring(L, 1))->inside, 1);
    return 0;
}

static inline int gate_install(lua_State *L, void *arg)
{
    (void)arg;
    lua_register(L, "gate_enter", gate_enter);
    lua_register(L, "gate_shut", gate_shut);
    lua_register(L, "gate_leave", gate_leave);
    return 0;
}

/* `more`: further options as Lua text, ending with a comma, or "". */
static inline pdk_runtime *gated(const char *more)
{
    static atomic_int n;
    char path[300], text[4096];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++) {
        atomic_store(&gates[i].shut, false);
        atomic_store(&gates[i].came, 0);
        atomic_store(&gates[i].inside, 0);
        atomic_store(&gates[i].most, 0);
        atomic_store(&gates[i].fails, NULL);
    }
    snprintf(path, sizeof path, "%s/gated.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL && fputs(gate_engine, f) >= 0 && fclose(f) == 0))
        exit(1);
    snprintf(text, sizeof text,
             "return { %s backend = '%s', health_ttl = 0, user = 'u', log = 'off', replicas = 10000, reap_interval = 100000, "
             "state_dir = '%s/state%d', %s journal = 'memory' }",
             more, path, test_tmpdir(), atomic_fetch_add(&n, 1),
             strstr(more, "ownership") != NULL ? "" : "ownership = { type = 'memory' },");
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    if (!CHECK(rt != NULL)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    CHECK_INT(pdk_script_enter(rt->script, gate_install, NULL, &err), 0);
    return rt;
}

static inline size_t held_now(pdk_runtime *rt)
{
    PDK_GUARD(rt->pool.registry);
    return rt->pool.holders.count;
}

static inline size_t active_now(pdk_runtime *rt)
{
    PDK_GUARD(rt->pool.registry);
    return rt->pool.count[PDK_ACTIVE];
}

static inline void gate_close(const char *name)
{
    atomic_store(&gate_of(name)->shut, true);
}

static inline void gate_open(const char *name)
{
    atomic_store(&gate_of(name)->shut, false);
}

static inline int gate_came(const char *name)
{
    return atomic_load(&gate_of(name)->came);
}

static inline void wait_ms(int ms)
{
    pdk_sleep_ns((pdk_ns)ms * 1000000);
}

/* Waits until cond holds, for as long as a slow machine may take. */
#define EVENTUALLY(cond)                                                                                     \
    do {                                                                                                     \
        for (int i_ = 0; i_ < 20000 && !(cond); i_++)                                                        \
            wait_ms(1);                                                                                      \
        CHECK(cond);                                                                                         \
    } while (0)

static inline pdk_op *acquire_op(pdk_runtime *rt, const char *thread, const char *holder, double timeout)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_request req = { .thread = thread, .holder = holder, .timeout = timeout };
    pdk_op *op = pdk_acquire_async(rt, &req, NULL, NULL, &err);
    if (!CHECK(op != NULL))
        fprintf(stderr, "%s\n", err.message);
    return op;
}

static inline pdk_box *box_of(pdk_op *op)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (!CHECK_INT(pdk_op_wait(op, 30, &err), 1))
        fprintf(stderr, "%s\n", err.message);
    pdk_box *box = pdk_op_box(op);
    CHECK(box != NULL);
    pdk_op_free(op);
    return box;
}

static inline pdk_box *boxed(pdk_runtime *rt, const char *thread)
{
    return box_of(acquire_op(rt, thread, NULL, 0));
}

/* It is over with an error of that kind. */
#define CHECK_FAILS(op, want)                                                                                \
    do {                                                                                                     \
        PDK_AUTO_ERROR err_ = PDK_NO_ERROR;                                                                  \
        CHECK_INT(pdk_op_wait(op, 30, &err_), -1);                                                           \
        CHECK_KIND(err_, want);                                                                              \
    } while (0)

static inline bool nothing_under_way(pdk_runtime *rt)
{
    pdk_ops_counts n = pdk_ops_count(rt->ops);
    return n.queued + n.parked + n.running == 0;
}

static inline void shut(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    for (size_t i = 0; i < sizeof gates / sizeof *gates; i++)
        atomic_store(&gates[i].shut, false);
    if (!CHECK_INT(pdk_shutdown(rt, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    EVENTUALLY(nothing_under_way(rt)); /* what was drained may still be on its last lines */
    CHECK_INT(pdk_ops_count(rt->ops).ready, 0);
    pdk_free(rt);
}

#endif
