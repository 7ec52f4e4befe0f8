/* script.c -- the Lua universe: its allocator, its mutex, and the way in.
 *
 * Why a lua thread per entry: an error outside a protected call is thrown to the handler of the universe's main
 * lua_State, which may be another OS thread's frame. So nothing that can raise, not even making the thread, runs
 * unprotected, and the main lua_State is idle once the universe is built.
 *
 * Whether this OS thread holds the mutex is known by a list of frames that only this thread sees: an entry from inside
 * the universe runs nested, an entry while the mutex is given up takes it anew.
 */
#include "script_internal.h"

#include "limit.h"
#include "output.h"
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STACK_NEEDED ((size_t)256 << 10) /* below the caller of an entry */
#define IDLE_THREADS 64                  /* lua threads kept for later entries */

typedef struct frame { /* one entry of this OS thread, innermost first */
    pdk_script *s;
    bool blocked;           /* the mutex is given up by this entry, */
    lua_State *blocked_for; /* for a C function called from this lua thread */
    struct frame *outer;
} frame;

static _Thread_local frame *frames;

static frame *frame_of(const pdk_script *s)
{
    frame *f = frames;
    while (f != NULL && f->s != s)
        f = f->outer;
    return f;
}

/* ---- memory ---- */

static void *allocate(void *ud, void *block, size_t old_size, size_t size)
{
    pdk_script *s = ud;
    size_t held = block == NULL ? 0 : old_size; /* without a block, old_size is a kind of object */
    size_t bytes = atomic_load_explicit(&s->bytes, memory_order_relaxed);
    if (size == 0) {
        free(block);
        atomic_store_explicit(&s->bytes, bytes - held, memory_order_relaxed);
        return NULL;
    }
    if (s->budget != NULL && size > held && !pdk_budget_allows(s->budget, held, size, bytes - held + size))
        return NULL;
    void *fresh = realloc(block, size);
    if (fresh == NULL && size <= held)
        return block; /* Lua relies on shrinking never to fail */
    if (fresh != NULL)
        atomic_store_explicit(&s->bytes, bytes - held + size, memory_order_relaxed);
    return fresh;
}

size_t pdk_script_memory(pdk_script *s)
{
    return atomic_load_explicit(&s->bytes, memory_order_relaxed);
}

/* ---- birth and end ---- */

static const char universe_key = 0; /* its address is the registry's key for the universe */

pdk_script *pdk_script_of(lua_State *L)
{
    if (!lua_checkstack(L, 1))
        return NULL;
    lua_rawgetp(L, LUA_REGISTRYINDEX, &universe_key);
    pdk_script *s = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return s;
}

static int panic(lua_State *L)
{
    const char *text = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "an error that is no string";
    fprintf(stderr, "paddock: an error outside every protected call: %s\n", text);
    return 0; /* Lua aborts */
}

static int build(lua_State *L)
{
    pdk_script *s = pdk_script_fast(L);
    lua_pushlightuserdata(L, s);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &universe_key);
    pdk_script_open_libs(L);
    s->maker = lua_newthread(L);
    luaL_ref(L, LUA_REGISTRYINDEX); /* for ever */
    return 0;
}

static void close_universe(pdk_script *s)
{
    if (s->main != NULL)
        lua_close(s->main);
    for (pdk_lua_thread *t = s->idle, *next; t != NULL; t = next) {
        next = t->next;
        free(t);
    }
    free(s->dropped);
    pdk_mutex_destroy(&s->lock);
    pdk_mutex_destroy(&s->drop_lock);
    free(s);
}

pdk_script *pdk_script_new(pdk_error *err)
{
    pdk_script *s = calloc(1, sizeof *s);
    if (s == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the Lua universe");
        return NULL;
    }
    atomic_init(&s->refs, 1);
    pdk_mutex_init(&s->lock);
    pdk_mutex_init(&s->drop_lock);
    s->main = lua_newstate(allocate, s);
    if (s->main == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the Lua universe");
        close_universe(s);
        return NULL;
    }
    *(pdk_script **)lua_getextraspace(s->main) = s;
    lua_atpanic(s->main, panic);
    lua_pushcfunction(s->main, build);
    if (lua_pcall(s->main, 0, 0, 0) != LUA_OK) {
        pdk_error_from_lua(s->main, -1, PDK_E_BACKEND_ERROR, err);
        pdk_error_wrap(err, "the Lua universe cannot be built");
        close_universe(s);
        return NULL;
    }
    return s;
}

pdk_script *pdk_script_retain(pdk_script *s)
{
    if (s != NULL)
        atomic_fetch_add(&s->refs, 1);
    return s;
}

void pdk_script_release(pdk_script *s)
{
    if (s == NULL || atomic_fetch_sub(&s->refs, 1) != 1)
        return;
    if (frame_of(s) == NULL) /* else this thread is inside, and its outermost entry closes it */
        close_universe(s);
}

/* ---- references ---- */

int pdk_script_ref(lua_State *L)
{
    return luaL_ref(L, LUA_REGISTRYINDEX);
}

void pdk_script_push_ref(lua_State *L, int ref)
{
    lua_rawgeti(L, LUA_REGISTRYINDEX, ref);
}

void pdk_script_drop_ref(pdk_script *s, int ref)
{
    if (ref == LUA_NOREF || ref == LUA_REFNIL)
        return;
    PDK_GUARD(s->drop_lock);
    if (s->dropped_count == s->dropped_cap) {
        size_t cap = s->dropped_cap == 0 ? 16 : s->dropped_cap * 2;
        int *more = realloc(s->dropped, cap * sizeof *more);
        if (more == NULL)
            return; /* the value stays alive as long as the universe: the lesser evil */
        s->dropped = more;
        s->dropped_cap = cap;
    }
    s->dropped[s->dropped_count++] = ref;
    atomic_store_explicit(&s->any_dropped, true, memory_order_release);
}

/* luaL_unref writes only slots that exist, so it never raises. */
static void give_back_refs(pdk_script *s)
{
    PDK_GUARD(s->drop_lock);
    for (size_t i = 0; i < s->dropped_count; i++)
        luaL_unref(s->maker, LUA_REGISTRYINDEX, s->dropped[i]);
    s->dropped_count = 0;
    atomic_store_explicit(&s->any_dropped, false, memory_order_release);
}

/* ---- entries ---- */

static int make_thread(lua_State *L)
{
    pdk_lua_thread *t = lua_touserdata(L, 1);
    t->L = lua_newthread(L);
    t->ref = luaL_ref(L, LUA_REGISTRYINDEX);
    return 0;
}

static pdk_lua_thread *take_thread(pdk_script *s)
{
    pdk_lua_thread *t = s->idle;
    if (t != NULL) {
        s->idle = t->next;
        s->idle_count--;
        return t;
    }
    t = calloc(1, sizeof *t);
    if (t == NULL)
        return NULL;
    lua_pushcfunction(s->maker, make_thread);
    lua_pushlightuserdata(s->maker, t);
    if (lua_pcall(s->maker, 1, 0, 0) != LUA_OK) {
        lua_settop(s->maker, 0);
        free(t);
        return NULL;
    }
    return t;
}

static void give_back_thread(pdk_script *s, pdk_lua_thread *t)
{
    lua_settop(t->L, 0); /* the protected call has unwound everything else */
    if (s->idle_count < IDLE_THREADS) {
        t->next = s->idle;
        s->idle = t;
        s->idle_count++;
        return;
    }
    luaL_unref(s->maker, LUA_REGISTRYINDEX, t->ref);
    free(t);
}

typedef struct entry {
    pdk_script *s;
    bool bare; /* fn protects itself */
    int (*fn)(lua_State *L, void *arg);
    void *arg;
    pdk_error *err;
    int rc;
    const pdk_limit *limit; /* of the thread that asked */
    const pdk_output_sink *output; /* likewise */
} entry;

static int trampoline(lua_State *L)
{
    entry *e = lua_touserdata(L, 1);
    lua_settop(L, 0);
    e->rc = e->fn(L, e->arg);
    return 0;
}

static int run_entry(entry *e)
{
    pdk_lua_thread *t = take_thread(e->s);
    if (t == NULL)
        return pdk_fail(e->err, PDK_E_NO_MEMORY, 0, "no memory for a Lua thread");
    if (e->bare) {
        int rc = e->fn(t->L, e->arg);
        give_back_thread(e->s, t);
        return rc;
    }
    lua_pushcfunction(t->L, trampoline);
    lua_pushlightuserdata(t->L, e);
    int status = lua_pcall(t->L, 1, 0, 0);
    if (status == LUA_ERRMEM)
        e->rc = pdk_fail(e->err, PDK_E_NO_MEMORY, 0, "Lua has no memory left");
    else if (status != LUA_OK) {
        pdk_error_from_lua(t->L, -1, PDK_E_BACKEND_ERROR, e->err);
        e->rc = -1;
    }
    give_back_thread(e->s, t);
    return e->rc < 0 ? -1 : 0;
}

static void leave_mutex(frame *f) PDK_NO_TSA
{
    f->blocked = true;
    pdk_unlock(&f->s->lock);
}

static void take_mutex(frame *f) PDK_NO_TSA
{
    pdk_lock(&f->s->lock);
    f->blocked = false;
}

static int enter_here(entry *e) PDK_NO_TSA
{
    pdk_script *s = e->s;
    frame *outer = frame_of(s);
    bool nested = outer != NULL && !outer->blocked;
    if (!nested)
        pdk_lock(&s->lock);
    frame f = { .s = s, .outer = frames };
    frames = &f;
    if (atomic_load_explicit(&s->any_dropped, memory_order_acquire))
        give_back_refs(s);
    int rc = run_entry(e);
    frames = f.outer;
    if (!nested)
        pdk_unlock(&s->lock);
    if (outer == NULL && atomic_load(&s->refs) == 0)
        close_universe(s); /* the last reference was dropped inside, by this thread */
    return rc;
}

static void *run_elsewhere(void *arg)
{
    entry *e = arg;
    pdk_limit_enter(e->limit);
    pdk_output_enter(e->output);
    e->rc = enter_here(e);
    return NULL;
}

/* The caller's stack is too small for Lua's own limit of nested C calls: the entry runs on a thread that has enough.
 * If the caller is inside the universe, the mutex is given up for the other thread to take. */
static int enter_elsewhere(entry *e)
{
    frame *f = frame_of(e->s);
    bool inside = f != NULL && !f->blocked;
    e->limit = pdk_limit_current();
    e->output = pdk_output_current();
    if (inside)
        leave_mutex(f);
    pdk_thread t;
    int rc = pdk_thread_start(&t, "paddock-lua", run_elsewhere, e);
    if (rc == 0)
        pdk_thread_join(&t);
    else
        e->rc = pdk_fail(e->err, PDK_E_NO_MEMORY, rc, "cannot start a thread for Lua");
    if (inside)
        take_mutex(f);
    return e->rc;
}

int pdk_script_enter(pdk_script *s, int (*fn)(lua_State *L, void *arg), void *arg, pdk_error *err)
{
    entry e = { .s = s, .fn = fn, .arg = arg, .err = err };
    return pdk_stack_left() < STACK_NEEDED ? enter_elsewhere(&e) : enter_here(&e);
}

int pdk_script_enter_bare(pdk_script *s, int (*fn)(lua_State *L, void *arg), void *arg, pdk_error *err)
{
    entry e = { .s = s, .bare = true, .fn = fn, .arg = arg, .err = err };
    return pdk_stack_left() < STACK_NEEDED ? enter_elsewhere(&e) : enter_here(&e);
}

void pdk_script_block(lua_State *L)
{
    pdk_script *s = pdk_script_of(L);
    frame *f = s == NULL ? NULL : frame_of(s);
    if (f == NULL || f->blocked)
        return;
    f->blocked_for = L;
    leave_mutex(f);
}

void pdk_script_unblock(lua_State *L)
{
    for (frame *f = frames; f != NULL; f = f->outer)
        if (f->blocked && f->blocked_for == L) { /* compared only: without the mutex Lua may not be asked anything */
            take_mutex(f);
            f->blocked_for = NULL;
            return;
        }
}
