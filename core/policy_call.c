/* policy_call.c -- one call into a policy: protected, budgeted, and whatever goes wrong told with file and line. */
#include "policy_internal.h"

#include "script_internal.h"
#include <ctype.h>
#include <lauxlib.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OVERRUNS 3 /* in a row; then the function rests */
#define REST     PDK_NS_PER_S

/* 1,000,000 instructions take some 4 ms here; the time limit is for what instructions do not show. */
static const pdk_allowance call_allowance = {
    .units = 1000000,
    .cpu = 10 * PDK_BUDGET_MS,
    .wall = 500000000,
    .memory = 8u << 20,
    .largest = 1u << 20,
};

/* Keeps the place of an error, which is gone when the stack is unwound. stack of the error: -1, +1 */
static int keep_place(lua_State *L)
{
    pdk_budget *b = pdk_budget_of(L);
    pdk_policy_call *c = b == NULL ? NULL : b->call;
    if (c != NULL && c->place.line == 0)
        pdk_place_of(L, 1, &c->place);
    return 1;
}

/* Policies answer the same whatever locale the host has set: comparing, upper and lower case, decimal points. */
static locale_t c_locale(void)
{
    static _Atomic(locale_t) known;
    locale_t c = atomic_load_explicit(&known, memory_order_relaxed);
    if (c == (locale_t)0) { /* libc has one "C" locale for all: making it twice gives the same, and nothing to free */
        c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
        atomic_store_explicit(&known, c, memory_order_relaxed);
    }
    return c;
}

static const char *position_end(const char *text, int *line)
{
    char *end;
    if (*text != ':' || !isdigit((unsigned char)text[1]))
        return NULL;
    long n = strtol(text + 1, &end, 10);
    if (*end != ':' || n <= 0 || n > 100000000)
        return NULL;
    *line = (int)n;
    return end[1] == ' ' ? end + 2 : end + 1;
}

/* Takes "file:line: " off the front of a message when it is about the same file, and believes its line. */
static const char *strip_position(const char *text, const char *file, int *line)
{
    size_t n = strlen(file);
    if (n == 0 || strncmp(text, file, n) != 0)
        return text;
    const char *rest = position_end(text + n, line);
    return rest == NULL ? text : rest;
}

/* A message about a file that could not be compiled: no function of it runs yet, so only the text has the place. */
static const char *find_position(const char *text, int *line)
{
    for (const char *at = strchr(text, ':'); at != NULL; at = strchr(at + 1, ':')) {
        const char *rest = position_end(at, line);
        if (rest != NULL)
            return rest;
    }
    return text;
}

static int failed(lua_State *L, pdk_policy_call *c, int status, pdk_error *err)
{
    const char *file = c->path, *text;
    int line = c->line;
    pdk_budget *b = &c->budget;
    char buffer[300];
    if (status == LUA_ERRMEM && b->over == PDK_WITHIN)
        b->over = PDK_OVER_MEMORY;
    if (b->over != PDK_WITHIN) {
        const pdk_place *place = b->place.line > 0 ? &b->place : &c->place;
        if (place->line > 0) {
            file = place->source;
            line = place->line;
        }
        static const char *const reasons[] = { "", "instructions", "time", "memory" };
        return pdk_fail_reason(err, PDK_E_POLICY_ERROR, reasons[b->over], "%s:%d: %s: %s", file, line, c->what,
                               pdk_over_text(b));
    }
    text = pdk_policy_failure(L, -1);
    if (text != NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "%s", text);
    if (lua_type(L, -1) == LUA_TSTRING)
        text = lua_tostring(L, -1);
    else {
        snprintf(buffer, sizeof buffer, "raised an error that is a %s", luaL_typename(L, -1));
        text = buffer;
    }
    if (c->place.line > 0) {
        file = c->place.source;
        line = c->place.line;
        text = strip_position(text, c->place.short_source, &line);
    } else
        text = find_position(text, &line);
    return pdk_fail_reason(err, PDK_E_POLICY_ERROR, "raised", "%s:%d: %s: %s", file, line, c->what, text);
}

int pdk_policy_run(lua_State *L, pdk_policy_call *c, lua_CFunction body, const pdk_allowance *allowed, pdk_error *err)
{
    int top = lua_gettop(L);
    c->place.line = 0;
    locale_t former = uselocale(c_locale());
    pdk_budget_arm(L, &c->budget, allowed, c);
    lua_pushcfunction(L, keep_place);
    lua_pushcfunction(L, body);
    lua_pushlightuserdata(L, c);
    int status = lua_pcall(L, 1, 0, top + 1);
    pdk_budget_disarm(L);
    uselocale(former);
    int rc = status == LUA_OK ? 0 : failed(L, c, status, err);
    lua_settop(L, top);
    return rc;
}

/* ---- hooks ---- */

static int answer_is_wrong(const pdk_policy_call *c, const char *text, pdk_error *err)
{
    return pdk_fail_reason(err, PDK_E_POLICY_ERROR, "answer", "%s:%d: %s: %s", c->path, c->line, c->what, text);
}

typedef struct hook_entry {
    pdk_policy_call *c;
    pdk_error *err;
} hook_entry;

/* The call itself. stack: -1 (c), raises */
static int hook_body(lua_State *L)
{
    pdk_policy_call *c = lua_touserdata(L, 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, c->fn->ref);
    pdk_policy_ctx_push(L, c);
    lua_call(L, 1, c->ask->results);
    c->ask->read(L, c, 2);
    return 0;
}

static int resting(pdk_policies *p, const pdk_policy_call *c, pdk_error *err)
{
    pdk_policy_fn *fn = c->fn;
    if (fn->overruns < OVERRUNS)
        return 0;
    pdk_ns left = fn->closed_until - pdk_clock_now(p->clock);
    if (left <= 0)
        return 0;
    return pdk_fail_reason(err, PDK_E_POLICY_ERROR, "resting",
                           "%s:%d: %s: overran its budget %d times in a row and is not called for another %.1f s", c->path,
                           c->line, c->what, fn->overruns, pdk_to_seconds(left));
}

/* The call has answered: may that be kept, and by what? A line that it has logged would be missed. */
static void learn(pdk_policies *p, const pdk_policy_call *c)
{
    pdk_learned *l = c->ask->learned;
    uint32_t fields = c->fields;
    bool mute = c->log_lines == 0 || c->ask->hook == PDK_HOOK_DERIVE;
    *l = (pdk_learned){ .keep = c->pure && mute && pdk_fields_keepable(c->ask->hook, &fields), .generation = p->set->generation };
    if (!l->keep)
        return;
    c->fn->fields |= fields;
    l->fields = c->fn->fields;
    pdk_keep_learn(p->keep, c->ask->hook, l->fields);
}

/* Never raises: what may is inside pdk_policy_run. */
static int enter_hook(lua_State *L, void *arg)
{
    hook_entry *e = arg;
    pdk_policy_call *c = e->c;
    pdk_policies *p = c->p;
    c->fn = &p->set->fns[c->ask->hook];
    if (c->fn->ref == LUA_NOREF)
        return 0;
    c->path = c->fn->path;
    c->line = c->fn->line;
    c->pure = c->fn->pure || c->ask->hook == PDK_HOOK_DERIVE;
    if (resting(p, c, e->err) < 0)
        return -1;
    int rc = pdk_policy_run(L, c, hook_body, &call_allowance, e->err);
    if (c->budget.over == PDK_WITHIN)
        c->fn->overruns = 0;
    else if (++c->fn->overruns >= OVERRUNS)
        c->fn->closed_until = pdk_after(pdk_clock_now(p->clock), REST);
    if (rc < 0)
        return -1;
    if (c->wrong[0] == '\0' && c->ask->check != NULL)
        c->ask->check(c);
    if (c->wrong[0] != '\0')
        return answer_is_wrong(c, c->wrong, e->err);
    if (c->ask->learned != NULL)
        learn(p, c);
    return 1;
}

int pdk_policy_ask(pdk_policies *p, const pdk_question *q, pdk_error *err)
{
    pdk_policy_call c; /* 1 KiB, most of it for errors: filled in where it is used */
    c.ask = q;
    c.p = p;
    c.what = pdk_hook_infos[q->hook].function;
    c.loaded_ref = LUA_NOREF;
    c.folder = NULL;
    c.log_lines = 0;
    c.fields = 0;
    c.now = c.differs = PDK_NO_PACK;
    c.differs_known = false;
    c.wrong[0] = '\0';
    hook_entry e = { .c = &c, .err = err };
    int rc = pdk_script_enter_bare(p->script, enter_hook, &e, err);
    pdk_pack_free(&c.now);
    pdk_pack_free(&c.differs);
    return rc;
}
