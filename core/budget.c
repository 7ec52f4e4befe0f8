/* budget.c -- instruction, time and memory limits of a policy call. See budget.h.
 *
 * The processor's clock costs a system call, and a typical call ends within a microsecond: so nothing is read before
 * the first STEP instructions have passed, and then only the cheap clock, until half of the limit is over. */
#include "budget.h"

#include "script_internal.h"
#include <lauxlib.h>
#include <stdio.h>
#include <string.h>

#define STEP        250                /* instructions between two looks; a long one (1 MB compared) takes some 50 us */
#define CLOCK_UNITS 1000               /* units charged by C functions between two readings */
#define CLOCK_BYTES ((size_t)1 << 20)  /* bytes asked for between two readings */
#define GRACE       ((size_t)64 << 10) /* bytes beyond the ceiling, for the error that ends the call */
#define REFUSALS    4                  /* each costs a full collection */

bool pdk_place_of(lua_State *L, int level, pdk_place *out)
{
    lua_Debug ar;
    for (; lua_getstack(L, level, &ar); level++) {
        if (lua_getinfo(L, "Sl", &ar) == 0 || ar.currentline <= 0)
            continue;
        snprintf(out->source, sizeof out->source, "%s", ar.source[0] == '@' ? ar.source + 1 : ar.short_src);
        snprintf(out->short_source, sizeof out->short_source, "%s", ar.short_src);
        out->line = ar.currentline;
        return true;
    }
    return false;
}

const char *pdk_over_text(const pdk_budget *b)
{
    switch (b->over) {
    case PDK_OVER_INSTRUCTIONS: return "ran too many instructions (an endless loop?)";
    case PDK_OVER_TIME: return "took too long (an endless loop?)";
    case PDK_OVER_MEMORY: return "used too much memory";
    case PDK_WITHIN: break;
    }
    return "ended within its budget";
}

static void overrun(pdk_budget *b, pdk_over over)
{
    if (b->over != PDK_WITHIN)
        return;
    b->over = over;
    pdk_place_of(b->L, 0, &b->place); /* allocates nothing: the allocator may be who asks */
}

static void look_at_clock(pdk_budget *b)
{
    pdk_ns now = pdk_now_monotonic(), half = b->allowed->cpu / 2;
    b->until_clock = CLOCK_UNITS;
    b->asked = 0;
    if (b->wall_from == 0) {
        b->wall_from = now;
        return;
    }
    pdk_ns wall = now - b->wall_from;
    if (wall <= half)
        return; /* one thread cannot have used more than what has passed */
    if (b->cpu_from == 0) {
        b->cpu_from = pdk_now_cpu();
        return;
    }
    pdk_ns cpu = pdk_now_cpu() - b->cpu_from;
    if (cpu > half || (wall > b->allowed->wall && cpu > half / 5))
        overrun(b, PDK_OVER_TIME);
}

static int raise_over(lua_State *L, const pdk_budget *b)
{
    lua_pushstring(L, pdk_over_text(b)); /* if there is no memory for it, that error serves as well */
    return lua_error(L);
}

static void on_count(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    pdk_budget *b = pdk_budget_of(L);
    if (b == NULL)
        return;
    if (b->over == PDK_WITHIN) {
        b->units -= STEP;
        if (b->units < 0)
            overrun(b, PDK_OVER_INSTRUCTIONS);
        else
            look_at_clock(b);
    }
    if (b->over != PDK_WITHIN) {
        lua_sethook(L, on_count, LUA_MASKCOUNT, 1); /* whatever the script catches: its next instruction raises again */
        raise_over(L, b);
    }
}

void pdk_budget_arm(lua_State *L, pdk_budget *b, const pdk_allowance *allowed, void *call)
{
    pdk_script *s = pdk_script_fast(L);
    b->allowed = allowed;
    b->L = L;
    b->serial = ++s->armings;
    b->units = allowed->units;
    b->until_clock = CLOCK_UNITS;
    b->wall_from = b->cpu_from = 0;
    b->ceiling = pdk_script_memory(s) + allowed->memory;
    b->asked = b->refused = 0;
    b->refusals = 0;
    b->over = PDK_WITHIN;
    b->place.source[0] = b->place.short_source[0] = '\0';
    b->place.line = 0;
    b->call = call;
    s->budget = b;
    lua_sethook(L, on_count, LUA_MASKCOUNT, STEP);
}

void pdk_budget_disarm(lua_State *L)
{
    lua_sethook(L, NULL, 0, 0);
    pdk_script_fast(L)->budget = NULL;
}

pdk_budget *pdk_budget_of(lua_State *L)
{
    return pdk_script_fast(L)->budget;
}

void pdk_charge(lua_State *L, size_t units)
{
    pdk_budget *b = pdk_budget_of(L);
    if (b == NULL)
        return;
    int64_t n = units > INT32_MAX ? INT32_MAX : (int64_t)units;
    b->units -= n;
    b->until_clock -= n;
    if (b->units < 0)
        overrun(b, PDK_OVER_INSTRUCTIONS);
    else if (b->until_clock <= 0)
        look_at_clock(b);
    if (b->over != PDK_WITHIN)
        raise_over(L, b);
}

void pdk_budget_check(lua_State *L)
{
    pdk_budget *b = pdk_budget_of(L);
    if (b != NULL && b->over != PDK_WITHIN)
        raise_over(L, b);
}

void pdk_budget_too_large(lua_State *L)
{
    pdk_budget *b = pdk_budget_of(L);
    if (b == NULL)
        luaL_error(L, "the result is too large");
    overrun(b, PDK_OVER_MEMORY);
    raise_over(L, b);
}

/* Lua answers a refusal with a full collection and asks once more for the same: only what is refused then is certainly
 * more than the script may have. A script that lives on the edge would collect all the time, hence REFUSALS. */
bool pdk_budget_allows(pdk_budget *b, size_t held, size_t size, size_t total)
{
    b->asked += size;
    if (b->asked > CLOCK_BYTES && b->over == PDK_WITHIN)
        look_at_clock(b);
    /* A block that doubles is no string but a table's array, or Lua's own table of all strings, whose growth is no fault
     * of this script. */
    bool fits = size <= b->allowed->largest || (held > 0 && size == 2 * held);
    if (fits && total <= b->ceiling && b->over == PDK_WITHIN) {
        b->refused = 0;
        return true;
    }
    if (size < 1024 && total <= b->ceiling + GRACE && b->over != PDK_WITHIN)
        return true; /* on the way out */
    if (b->over == PDK_WITHIN && (!fits || b->refused == size || ++b->refusals >= REFUSALS))
        overrun(b, PDK_OVER_MEMORY);
    b->refused = size;
    return false;
}
