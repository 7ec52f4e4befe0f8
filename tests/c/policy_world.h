/* policy_world.h -- what the tests of policies share: one universe with one set of policies, and how to ask it. */
#ifndef POLICY_WORLD_H
#define POLICY_WORLD_H

#include "policy.h"
#include "test.h"

#include <lauxlib.h>
#include <lualib.h>

/* ---- a world: one universe, one set of policies ---- */

typedef struct world {
    pdk_script *script;
    pdk_clock *clock;
    pdk_policies *p;
    pdk_error err; /* of the last call */
    char id[64];
    pdk_verdict verdict;
} world;

/* Packs the value of a Lua expression. */
__attribute__((unused)) static void pack_lua(pdk_pack *out, const char *expression)
{
    lua_State *L = luaL_newstate();
    char code[4096];
    pdk_error err = PDK_NO_ERROR;
    snprintf(code, sizeof code, "return %s", expression);
    if (!CHECK(L != NULL && luaL_dostring(L, code) == 0))
        abort();
    CHECK_INT(pdk_pack_from_lua(L, -1, out, &err), 0);
    lua_close(L);
}

static const char *const config_text = "{ idle_timeout = 600, max_running = 3, names = { 'a', 'b' } }";

__attribute__((unused)) static void world_open(world *w, pdk_view sources)
{
    PDK_AUTO_PACK config = PDK_NO_PACK;
    *w = (world){ .script = pdk_script_new(NULL), .clock = pdk_clock_new(PDK_CLOCK_MANUAL, false) };
    pack_lua(&config, config_text);
    w->p = pdk_policies_new(w->script, w->clock, NULL, sources, pdk_view_of(&config), &w->err);
}

__attribute__((unused)) static world world_default(void)
{
    world w;
    world_open(&w, PDK_NO_VIEW);
    CHECK_KIND(w.err, PDK_OK);
    return w;
}

/* One policy given as text: file "identity" etc. is called bad.lua. */
__attribute__((unused)) static world world_with(const char *file, const char *text)
{
    world w;
    PDK_AUTO_PACK sources = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&sources);
    pdk_put_cstr(&sources, file);
    m.count++;
    pdk_mark inner = pdk_begin_map(&sources);
    pdk_kv_cstr(&sources, &inner, "source", text);
    pdk_kv_cstr(&sources, &inner, "name", "bad.lua");
    pdk_end(&sources, &inner);
    pdk_end(&sources, &m);
    world_open(&w, pdk_view_of(&sources));
    return w;
}

__attribute__((unused)) static void world_close(world *w)
{
    pdk_policies_free(w->p);
    pdk_clock_free(w->clock);
    pdk_script_release(w->script);
    pdk_error_clear(&w->err);
}

__attribute__((unused)) static pdk_identity who(const char *user, const char *thread)
{
    return (pdk_identity){ user, thread, strlen(user), strlen(thread) };
}

__attribute__((unused)) static int derive(world *w, const char *user, const char *thread)
{
    pdk_identity i = who(user, thread);
    pdk_error_clear(&w->err);
    w->id[0] = '\0';
    return pdk_policy_derive(w->p, &i, PDK_NO_VIEW, w->id, &w->err);
}

__attribute__((unused)) static int decide(world *w, const char *ctx)
{
    PDK_AUTO_PACK pack = PDK_NO_PACK;
    pack_lua(&pack, ctx);
    pdk_error_clear(&w->err);
    return pdk_policy_decide(w->p, pdk_view_of(&pack), &w->verdict, &w->err);
}

__attribute__((unused)) static int resolve(world *w, const char *request, const char *base, pdk_pack *out)
{
    PDK_AUTO_PACK r = PDK_NO_PACK;
    PDK_AUTO_PACK b = PDK_NO_PACK;
    pdk_identity i = who("u", "t");
    pack_lua(&r, request);
    pack_lua(&b, base);
    pdk_error_clear(&w->err);
    return pdk_policy_resolve(w->p, &i, pdk_view_of(&r), pdk_view_of(&b), out, &w->err);
}

__attribute__((unused)) static int compose(world *w, pdk_pack *out)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    pack_lua(&ctx, "{ identity = { user = 'u', thread = 't' }, sandbox_id = 's' }");
    pdk_error_clear(&w->err);
    return pdk_policy_compose(w->p, pdk_view_of(&ctx), out, &w->err);
}

__attribute__((unused)) static const char *field(const pdk_pack *p, const char *key)
{
    const char *s = pdk_view_str(pdk_view_get(pdk_view_of(p), key), NULL);
    return s != NULL ? s : "(none)";
}

#endif
