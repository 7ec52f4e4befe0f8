/* world.h -- what C tests of a whole runtime share: an engine that is a Lua file in the universe, with a C function `hook` that is
 * called with the name of each method before it does anything, and a runtime opened on it. */
#ifndef PDK_TEST_WORLD_H
#define PDK_TEST_WORLD_H

#include "core.h"
#include "test.h"

#include <lauxlib.h>

static const char world_engine[] =
    "local io = require 'paddock.io'\n"
    "local n, gone, made = 0, {}, {}\n"
    "local M = { name = 'scripted', capabilities = { fenced = false } }\n"
    "local function at(name, id, generation)\n"
    "  while hook do\n"
    "    local what, s = hook(name, id or '', generation or '')\n"
    "    if what ~= 'again' then\n"
    "      if what == 'sleep' then io.sleep(s) elseif what == 'fail' then error(s, 0) end\n"
    "      return what, s end\n"
    "    io.sleep(s) end end\n"
    "local function seen(id, what, n)\n"
    "  if what == 'found' then return { sandbox_id = id, generation = ('x%d'):format(n) } end end\n"
    "function M.create(_, spec) n = n + 1 local g = 'g' .. n at('create', spec.sandbox_id, g)\n"
    "  made[g] = { sandbox_id = spec.sandbox_id, generation = g } return made[g] end\n"
    "function M.destroy(_, info) at('destroy', info.sandbox_id, info.generation) gone[info.generation or '?'] = true end\n"
    "function M.inspect(_, id, info) local found = seen(id, at('inspect', id))\n"
    "  if info == nil then info = found end\n"
    "  if info == nil or gone[info.generation or '?'] then return nil end return info end\n"
    "function M.discover(_, id) return seen(id, at('discover', id)) end\n"
    "function M.alive(_, info) return at('alive', info.sandbox_id) ~= 'no' end\n"
    "function M.ready(_, info, s) return at('ready', info.sandbox_id, ('%g'):format(s)) ~= 'no' end\n"
    "function M.list() local all = {} if at('list') ~= 'found' then return all end\n"
    "  for g, info in pairs(made) do if not gone[g] then all[#all + 1] = info end end return all end\n"
    "function M.finish(_, id) at('finish', id) end\n"
    "function M.connect(_, info) at('connect', info.sandbox_id) return {\n"
    "  exec = function(_, req) at('exec', info.sandbox_id, req.command)\n"
    "    return { outcome = 'completed', exit_code = 0, stdout = req.command } end,\n"
    "  open_session = function(_, plane) at('open_session', info.sandbox_id, plane) end,\n"
    "  close_session = function() end,\n"
    "  close = function() at('close', info.sandbox_id, info.generation) end } end\n"
    "return M\n";

/* Answers WORLD_GO_ON, or one of the others, with its number in *seconds. Called on whatever thread calls the engine, with the Lua mutex held; a test may
 * change it meanwhile, and what it sets before that is seen by the hook. */
enum {
    WORLD_FAIL = -1,
    WORLD_GO_ON = 0,
    WORLD_SLEEP = 1, /* *seconds, then go on */
    WORLD_AGAIN = 2, /* sleep *seconds, then ask again */
    WORLD_FOUND = 3, /* discover, and inspect by id: there is the generation x<*seconds>; list: all that were made and not stopped */
    WORLD_NO = 4     /* alive, ready */
};
typedef int (*world_hook_fn)(const char *name, const char *id, const char *detail, double *seconds);
static _Atomic(world_hook_fn) world_hook;
static atomic_int world_destroys, world_closes, world_lists;

static inline int world_call_hook(lua_State *L)
{
    double seconds = 0;
    const char *name = lua_tostring(L, 1);
    if (strcmp(name, "destroy") == 0)
        atomic_fetch_add(&world_destroys, 1);
    if (strcmp(name, "close") == 0)
        atomic_fetch_add(&world_closes, 1);
    if (strcmp(name, "list") == 0)
        atomic_fetch_add(&world_lists, 1);
    world_hook_fn fn = atomic_load(&world_hook);
    int what = fn == NULL ? 0 : fn(name, lua_tostring(L, 2), lua_tostring(L, 3), &seconds);
    if (what == 0)
        return 0;
    static const char *const words[] = { "", "sleep", "again", "found", "no" };
    lua_pushstring(L, what > 0 ? words[what] : "fail");
    if (what == WORLD_FOUND)
        lua_pushinteger(L, (lua_Integer)seconds);
    else if (what > 0)
        lua_pushnumber(L, seconds);
    else
        lua_pushstring(L, "the engine was told to fail");
    return 2;
}

static inline int world_install(lua_State *L, void *arg)
{
    (void)arg;
    lua_pushcfunction(L, world_call_hook);
    lua_setglobal(L, "hook");
    return 0;
}

/* `more`: further options, as Lua text ending with a comma, or "". Exits when it cannot be opened. */
static inline pdk_runtime *world_open(const char *more)
{
    char path[300], text[4096];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = NULL;
    atomic_store(&world_destroys, 0);
    atomic_store(&world_closes, 0);
    atomic_store(&world_lists, 0);
    snprintf(path, sizeof path, "%s/engine.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL && fputs(world_engine, f) >= 0 && fclose(f) == 0))
        exit(1);
    snprintf(text, sizeof text,
             "return { %s backend = '%s', health_ttl = 0, user = 'u', log = function() end, state_dir = '%s/state', %s }", more,
             path, test_tmpdir(), strstr(more, "ownership") != NULL ? "" : "ownership = { type = 'memory' }");
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    if (!CHECK(rt != NULL)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    CHECK_INT(pdk_script_enter(rt->script, world_install, NULL, &err), 0);
    return rt;
}

static inline pdk_box *world_acquire(pdk_runtime *rt, const char *thread, const char *holder)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    pdk_request req = { .thread = thread, .holder = holder, .no_holder = holder == NULL };
    if (!CHECK_INT(pdk_acquire(rt, &req, &box, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    return box;
}

static inline void world_end(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = NULL;
    if (!CHECK_INT(pdk_shutdown(rt, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    pdk_free(rt);
}

#endif
