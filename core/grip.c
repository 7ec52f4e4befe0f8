/* grip.c -- letting go of runtimes and boxes without waiting in a finalizer.
 *
 * Lock order: a grip's lock and a keeper's lock are leaves; neither is held while anything is freed.
 *
 * Threads: each one that is through joins the one that was before it, and the closing Lua state the last. So none is still on its
 * way out when the state's end lets the host unload this library, or end the process. */
#include "grip.h"

#include "async.h"

#include <errno.h>
#include <lauxlib.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { MAX_RECORDS = 4096 }; /* events and log lines that wait for a host that does not look */
static const pdk_ns CLOSE_WAIT = 10 * PDK_NS_PER_S; /* how long a closing Lua state waits for what its finalizers queued */

typedef struct worker { /* a thread that sweeps one grip */
    pdk_thread thread;  /* keeper's lock */
    uint64_t self;      /* set by the thread before it is through */
    pdk_grip *grip;     /* fixed */
} worker;

struct pdk_keeper {
    pdk_mutex lock;
    pdk_cond idle;
    worker *ended;      /* lock; through with its work, to be joined */
    atomic_int refs;    /* the state's userdata, and each grip */
    int busy;           /* lock; threads at work for this state */
    pdk_grip *unwanted; /* lock; runtimes without threads, to be freed by the next one who may wait */
};

static const char KEEPER = 0; /* its address: registry key */

bool pdk_grip_forked(const pdk_grip *g)
{
    return g->pid != pdk_process_id();
}

/* ---- keepers ------------------------------------------------------------------------------------------- */

static void worker_join(worker *w)
{
    if (w == NULL)
        return;
    if (w->self != pdk_thread_self())
        pdk_thread_join(&w->thread);
    else
        pdk_thread_detach(&w->thread); /* it closes its own universe: nobody else is left to wait for it */
    free(w);
}

static void keeper_unref(pdk_keeper *k)
{
    if (atomic_fetch_sub(&k->refs, 1) != 1)
        return;
    worker_join(k->ended);
    pdk_cond_destroy(&k->idle);
    pdk_mutex_destroy(&k->lock);
    free(k);
}

static void grip_destroy(pdk_grip *g);

static pdk_grip *next_unwanted(pdk_keeper *k)
{
    PDK_GUARD(k->lock);
    pdk_grip *g = k->unwanted;
    if (g != NULL)
        k->unwanted = g->next;
    return g;
}

void pdk_keeper_drain(pdk_keeper *k)
{
    for (pdk_grip *g; (g = next_unwanted(k)) != NULL;)
        if (!pdk_grip_forked(g))
            grip_destroy(g);
}

typedef struct keeper_box { /* the userdata */
    pdk_keeper *keeper;
    pid_t pid;
} keeper_box;

/* The state closes: every other userdata is finalized already, since this one is older.  stack: never raises */
static int keeper_gc(lua_State *L)
{
    keeper_box *box = lua_touserdata(L, 1);
    pdk_keeper *k = box->keeper;
    box->keeper = NULL;
    if (k == NULL || box->pid != pdk_process_id())
        return 0;
    pdk_keeper_drain(k);
    worker *last;
    {
        PDK_GUARD(k->lock);
        pdk_ns until = pdk_now_monotonic() + CLOSE_WAIT;
        while (k->busy > 0 && pdk_now_monotonic() < until)
            pdk_cond_wait_until(&k->idle, &k->lock, until);
        last = k->ended;
        k->ended = NULL;
    }
    worker_join(last);
    keeper_unref(k);
    return 0;
}

/* The keeper of this process that stands in the registry already, or NULL.  stack: balanced, never raises */
static pdk_keeper *known_keeper(lua_State *L)
{
    pdk_keeper *k = NULL;
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &KEEPER) == LUA_TUSERDATA) {
        keeper_box *box = lua_touserdata(L, -1);
        if (box->pid == pdk_process_id()) /* else the lock of it may be held by a thread that the fork left behind */
            k = box->keeper;
    }
    lua_pop(L, 1);
    return k;
}

pdk_keeper *pdk_keeper_of(lua_State *L)
{
    pdk_keeper *k = known_keeper(L);
    if (k != NULL)
        return k;
    keeper_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (keeper_box){ NULL, pdk_process_id() };
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, keeper_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &KEEPER);
    k = calloc(1, sizeof *k);
    if (k == NULL) {
        lua_pushnil(L);
        lua_rawsetp(L, LUA_REGISTRYINDEX, &KEEPER);
        luaL_error(L, "not enough memory");
        return NULL;
    }
    pdk_mutex_init(&k->lock);
    pdk_cond_init(&k->idle);
    atomic_init(&k->refs, 1);
    box->keeper = k;
    return k;
}

/* ---- grips --------------------------------------------------------------------------------------------- */

pdk_grip *pdk_grip_new(pdk_keeper *k)
{
    pdk_grip *g = calloc(1, sizeof *g);
    if (g == NULL || (g->events = pdk_events_new(MAX_RECORDS)) == NULL) {
        free(g);
        return NULL;
    }
    atomic_init(&g->refs, 1);
    g->pid = pdk_process_id();
    g->fd = -1;
    pdk_mutex_init(&g->lock);
    g->keeper = k;
    atomic_fetch_add(&k->refs, 1);
    return g;
}

pdk_grip *pdk_grip_ref(pdk_grip *g)
{
    atomic_fetch_add(&g->refs, 1);
    return g;
}

/* An epoll of both: a host's calls and events have a descriptor of their own. */
int pdk_grip_fd(pdk_grip *g, pdk_error *err)
{
    int ops = pdk_async_fd(g->rt, err);
    if (ops < 0 || g->host == NULL || g->fd >= 0)
        return ops < 0 || g->host == NULL ? ops : g->fd;
    int calls = pdk_host_fd(g->host), both = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = { .events = EPOLLIN };
    if (calls < 0 || both < 0 || epoll_ctl(both, EPOLL_CTL_ADD, ops, &event) < 0 ||
        epoll_ctl(both, EPOLL_CTL_ADD, calls, &event) < 0) {
        int why = errno;
        if (both >= 0)
            close(both);
        return pdk_fail(err, PDK_E_IO_ERROR, why, "cannot make the descriptor that tells of finished operations");
    }
    g->fd = both;
    return both;
}

static pdk_lbox *next_garbage(pdk_grip *g)
{
    PDK_GUARD(g->lock);
    pdk_lbox *b = g->garbage;
    if (b != NULL)
        g->garbage = b->next;
    return b;
}

static void lbox_free(pdk_lbox *b)
{
    pdk_box_free(b->box);
    free(b);
}

void pdk_grip_sweep(pdk_grip *g)
{
    for (pdk_lbox *b; (b = next_garbage(g)) != NULL;)
        lbox_free(b);
}

static void grip_destroy(pdk_grip *g)
{
    pdk_grip_sweep(g);
    if (g->rt != NULL)
        pdk_runtime_free(g->rt);
    if (g->fd >= 0)
        close(g->fd);
    pdk_host_release(g->host);
    pdk_events_free(g->events);
    if (g->script != NULL)
        pdk_script_release(g->script);
    pdk_mutex_destroy(&g->lock);
    keeper_unref(g->keeper);
    free(g);
}

/* What a reaper thread does next: sweep again, end, or destroy the grip first. */
static bool reaper_goes_on(pdk_grip *g, bool *destroy)
{
    PDK_GUARD(g->lock);
    if (g->garbage != NULL)
        return true;
    *destroy = g->unwanted;
    g->reaping = false;
    return false;
}

/* The worker is through but for its return. The one before it is the answer, to be joined. */
static worker *worker_ends(pdk_keeper *k, worker *w)
{
    w->self = pdk_thread_self();
    PDK_GUARD(k->lock);
    worker *before = k->ended;
    k->ended = w;
    k->busy--;
    pdk_cond_broadcast(&k->idle);
    return before;
}

static void *reap(void *arg)
{
    worker *w = arg;
    pdk_grip *g = w->grip;
    pdk_keeper *k = g->keeper;
    atomic_fetch_add(&k->refs, 1);
    /* A runtime that lives in the universe may hold the last reference to it, and the universe's end waits for threads
     * like this one: then that reference is given back when this thread no longer counts. */
    pdk_script *script = g->host == NULL ? pdk_script_retain(g->script) : NULL;
    bool destroy = false;
    do
        pdk_grip_sweep(g);
    while (reaper_goes_on(g, &destroy));
    if (destroy)
        grip_destroy(g);
    worker_join(worker_ends(k, w));
    keeper_unref(k);
    if (script != NULL)
        pdk_script_release(script);
    return NULL;
}

/* Starts the thread that sweeps, `reaping` having been set by the caller. */
static bool start_reaper(pdk_grip *g)
{
    pdk_keeper *k = g->keeper; /* the thread may destroy the grip before this function goes on */
    worker *w = calloc(1, sizeof *w);
    bool started = false;
    if (w != NULL) {
        w->grip = g;
        PDK_GUARD(k->lock); /* its thread's end needs the handle that is written here */
        started = pdk_thread_start(&w->thread, "pdk-finalize", reap, w) == 0;
        k->busy += started;
    }
    if (started)
        return true;
    free(w);
    PDK_GUARD(g->lock);
    g->reaping = false;
    return false;
}

static void queue_unwanted(pdk_grip *g)
{
    PDK_GUARD(g->keeper->lock);
    g->next = g->keeper->unwanted;
    g->keeper->unwanted = g;
}

void pdk_grip_unref(pdk_grip *g, bool here)
{
    if (atomic_fetch_sub(&g->refs, 1) != 1 || pdk_grip_forked(g))
        return;
    bool now = here || g->rt == NULL;
    {
        PDK_GUARD(g->lock);
        g->unwanted = true;
        if (g->reaping)
            return; /* that thread destroys it when it is done; from here on nothing of it may be touched */
        g->reaping = !now && g->threads;
    }
    if (now)
        grip_destroy(g);
    else if (!g->threads || !start_reaper(g))
        queue_unwanted(g);
}

static bool queue_garbage(pdk_grip *g, pdk_lbox *b)
{
    PDK_GUARD(g->lock);
    b->next = g->garbage;
    g->garbage = b;
    bool start = g->threads && !g->reaping;
    g->reaping = g->reaping || start;
    return start;
}

void pdk_lbox_forget(pdk_lbox *b)
{
    pdk_grip *g = b->grip;
    if (pdk_grip_forked(g))
        return;
    if (b->box == NULL || b->released || pdk_box_holder(b->box) == NULL) {
        lbox_free(b);
    } else if (queue_garbage(g, b)) {
        start_reaper(g); /* where it cannot be started, the next blocking call sweeps */
    }
    pdk_grip_unref(g, false);
}
