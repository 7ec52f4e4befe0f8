/* open.c -- the options on their way into a runtime.
 *
 * Why in Lua: the rules are many and small, and a table of them (lua/paddock/config.lua) is what a person can check. This
 * file only carries packs in and out of the universe. */
#include "open.h"

#include <lauxlib.h>
#include <stdio.h>
#include <string.h>

/* Pushes paddock.config's function of that name.  stack: +1, raises */
static void push_config(lua_State *L, const char *function)
{
    lua_getglobal(L, "require");
    lua_pushliteral(L, "paddock.config");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, function);
    lua_remove(L, -2);
}

/* Packs the value at the top and pops it; raises what packing refuses.  stack: -1 */
static void pack_top(lua_State *L, pdk_pack *out)
{
    pdk_error err = PDK_NO_ERROR;
    if (pdk_pack_from_lua(L, -1, out, &err) < 0)
        pdk_raise(L, &err);
    lua_pop(L, 1);
}

/* ---- plain options ------------------------------------------------------------------------------------- */

typedef struct normalizing {
    pdk_view plain;
    pdk_pack *out;
} normalizing;

/* stack: +0, raises */
static int normalize(lua_State *L, void *arg)
{
    normalizing *n = arg;
    push_config(L, "for_open");
    pdk_view_to_lua(L, n->plain);
    lua_call(L, 1, 1);
    pack_top(L, n->out);
    return 0;
}

int pdk_options_normalize(pdk_script *s, pdk_view plain, pdk_pack *out, pdk_error *err)
{
    normalizing n = { plain, out };
    return pdk_script_enter(s, normalize, &n, err);
}

/* ---- a configuration text ------------------------------------------------------------------------------ */

typedef struct reading {
    pdk_script *script;
    const char *text, *name;
    pdk_setup *out;
} reading;

/* stack: -0, +0, raises; [tables] is the table at the top */
static pdk_iface *take_table(lua_State *L, pdk_script *s, const char *key)
{
    if (lua_getfield(L, -1, key) == LUA_TNIL) {
        lua_pop(L, 1);
        return NULL;
    }
    pdk_iface *f = pdk_iface_of_script(L, s, key);
    if (f == NULL)
        luaL_error(L, "not enough memory");
    return f;
}

/* stack: +0, raises; what it stored in r->out by then is cleared by the caller */
static int read_config(lua_State *L, void *arg)
{
    reading *r = arg;
    push_config(L, "split");
    if (r->text != NULL) {
        push_config(L, "load_text");
        lua_pushstring(L, r->text);
        lua_pushstring(L, r->name != NULL ? r->name : "configuration");
        lua_call(L, 2, 1);
    } else if (r->name != NULL) {
        push_config(L, "load_file");
        lua_pushstring(L, r->name);
        lua_call(L, 1, 1);
    } else {
        lua_newtable(L);
    }
    lua_call(L, 1, 2); /* plain, tables */
    push_config(L, "for_open");
    lua_pushvalue(L, -3);
    lua_call(L, 1, 1);
    pack_top(L, &r->out->options);
    r->out->backend = take_table(L, r->script, "backend");
    r->out->ownership = take_table(L, r->script, "ownership");
    r->out->journal = take_table(L, r->script, "journal");
    if (lua_getfield(L, -1, "log") == LUA_TFUNCTION) {
        r->out->log = pdk_script_ref(L);
        r->out->has_log = true;
    }
    return 0;
}

int pdk_setup_read(pdk_script *s, const char *text, const char *name, pdk_setup *out, pdk_error *err)
{
    reading r = { s, text, name, out };
    return pdk_script_enter(s, read_config, &r, err);
}

void pdk_setup_clear(pdk_script *s, pdk_setup *c)
{
    pdk_pack_free(&c->options);
    pdk_iface_free(c->backend);
    pdk_iface_free(c->ownership);
    pdk_iface_free(c->journal);
    if (c->has_log)
        pdk_script_drop_ref(s, c->log);
    *c = (pdk_setup){ 0 };
}

typedef struct naming {
    const char *file;
    char *out;
    size_t size;
} naming;

/* stack: +0, raises */
static int read_use(lua_State *L, void *arg)
{
    naming *n = arg;
    push_config(L, "use_of_file");
    lua_pushstring(L, n->file);
    lua_call(L, 1, 1);
    const char *use = lua_tostring(L, -1);
    snprintf(n->out, n->size, "%s", use != NULL ? use : "");
    return 0;
}

int pdk_config_use(const char *config_file, char *out, size_t size, pdk_error *err)
{
    naming n = { config_file, out, size };
    out[0] = '\0';
    pdk_script *s = pdk_script_new(err);
    if (s == NULL)
        return -1;
    int rc = pdk_script_enter(s, read_use, &n, err);
    pdk_script_release(s);
    return rc;
}

/* ---- requirements -------------------------------------------------------------------------------------- */

typedef struct decoding {
    const char *json;
    pdk_pack *out;
} decoding;

/* stack: +0, raises */
static int decode(lua_State *L, void *arg)
{
    decoding *d = arg;
    push_config(L, "requirements_from_json");
    lua_pushstring(L, d->json);
    lua_call(L, 1, 1);
    pack_top(L, d->out);
    return 0;
}

int pdk_requirements_from_json(pdk_script *s, const char *json, pdk_pack *out, pdk_error *err)
{
    decoding d = { json, out };
    return pdk_script_enter(s, decode, &d, err);
}
