/* host.c -- the queue of calls into a Lua host's own state.
 *
 * Why: a lua_State belongs to one thread at a time, and only its host knows which. So a thread of paddock that needs a
 * function of the host puts a call into this queue and waits; the host's thread carries it out while it waits inside a
 * paddock call itself, or calls dispatch. With threads = false nobody but the host's thread ever calls.
 *
 * A call is QUEUED (on the list), then RUNNING (off it), then DONE; or it is withdrawn while QUEUED. A running one is
 * never withdrawn: its caller's stack is in use. The lock is held for the list alone, never while Lua runs.
 *
 * Objects are kept in a Lua table (the anchor) that the runtime's userdata refers to, and this struct only weakly: a
 * backend that refers to the runtime which it serves is an ordinary cycle, and can be collected. */
#include "call.h"

#include <lauxlib.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { CALL_QUEUED, CALL_RUNNING, CALL_DONE };
enum { NESTING = 8 };                                   /* of paddock calls inside each other on one host thread */
static const pdk_ns CANCEL_LOOK = PDK_NS_PER_S / 50;    /* how soon a cancelled call is withdrawn */

struct pdk_host {
    pdk_mutex lock;
    pdk_cond work;      /* for the host's thread: a call was queued, a job is done, the hook has something */
    pdk_cond done;      /* for callers */
    atomic_int refs;
    bool threads;       /* fixed at birth */
    pid_t pid;          /* fixed at birth: after a fork the lock may be held by a thread that is not there */
    pdk_call *head, *tail;      /* lock */
    bool closed;                /* lock */
    bool poked;                 /* lock */
    int tables;                 /* lock; objects that are kept */
    int next_key;               /* lock */
    int *dropped;               /* lock; keys to let go */
    size_t dropped_count, dropped_cap;
    uint64_t thread;            /* lock; the thread inside a paddock call, 0 = none */
    lua_State *stack[NESTING];  /* lock; of the calls that thread is in */
    int depth;                  /* lock */
    int fd;                     /* lock; eventfd; -1 = nobody asked for it */
    pdk_host_hook hook;         /* the host's thread only */
    void *hook_ctx;
};

static const char ANCHORS = 0; /* its address: registry key of the weak table lightuserdata(host) -> anchor */

/* [1] the host.  stack: +1 the anchor, raises on lack of memory */
static int make_anchor(lua_State *L)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &ANCHORS) != LUA_TTABLE) {
        lua_pop(L, 1);
        lua_newtable(L);
        lua_createtable(L, 0, 1);
        lua_pushliteral(L, "v");
        lua_setfield(L, -2, "__mode");
        lua_setmetatable(L, -2);
        lua_pushvalue(L, -1);
        lua_rawsetp(L, LUA_REGISTRYINDEX, &ANCHORS);
    }
    lua_newtable(L);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, -3, lua_touserdata(L, 1));
    return 1;
}

pdk_host *pdk_host_new(lua_State *L, bool threads)
{
    pdk_host *h = calloc(1, sizeof *h);
    if (h == NULL)
        return NULL;
    pdk_mutex_init(&h->lock);
    pdk_cond_init(&h->work);
    pdk_cond_init(&h->done);
    atomic_init(&h->refs, 1);
    h->threads = threads;
    h->pid = pdk_process_id();
    h->fd = -1;
    (void)L; /* the anchor is made when it is first pushed */
    return h;
}

pdk_host *pdk_host_retain(pdk_host *h)
{
    atomic_fetch_add(&h->refs, 1);
    return h;
}

void pdk_host_release(pdk_host *h)
{
    if (h == NULL || atomic_fetch_sub(&h->refs, 1) != 1)
        return;
    if (h->pid == pdk_process_id()) {
        pdk_cond_destroy(&h->work);
        pdk_cond_destroy(&h->done);
        pdk_mutex_destroy(&h->lock);
    }
    if (h->fd >= 0)
        close(h->fd);
    free(h->dropped);
    free(h);
}

/* ---- objects ------------------------------------------------------------------------------------------- */

/* stack: +1 the anchor or nil, never raises */
static void push_anchor(lua_State *L, pdk_host *h)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &ANCHORS) == LUA_TTABLE)
        lua_rawgetp(L, -1, h);
    else
        lua_pushnil(L);
    lua_remove(L, -2);
}

void pdk_host_push_anchor(lua_State *L, pdk_host *h)
{
    push_anchor(L, h);
    if (!lua_isnil(L, -1))
        return;
    lua_pop(L, 1);
    lua_pushcfunction(L, make_anchor);
    lua_pushlightuserdata(L, h);
    lua_call(L, 1, 1);
}

int pdk_host_keep(lua_State *L, pdk_host *h)
{
    pdk_host_push_anchor(L, h);
    lua_insert(L, -2);
    int key;
    {
        PDK_GUARD(h->lock);
        key = ++h->next_key;
        h->tables++;
    }
    lua_rawseti(L, -2, key);
    lua_pop(L, 1);
    return key;
}

void pdk_host_push_kept(lua_State *L, pdk_host *h, int key)
{
    push_anchor(L, h);
    if (lua_istable(L, -1)) {
        lua_rawgeti(L, -1, key);
        lua_remove(L, -2);
    }
}

void pdk_host_drop(pdk_host *h, int key)
{
    if (h->pid != pdk_process_id())
        return;
    PDK_GUARD(h->lock);
    h->tables--;
    if (h->dropped_count == h->dropped_cap) {
        size_t cap = h->dropped_cap == 0 ? 16 : h->dropped_cap * 2;
        int *more = realloc(h->dropped, cap * sizeof *more);
        if (more == NULL)
            return; /* the object stays until the runtime goes */
        h->dropped = more;
        h->dropped_cap = cap;
    }
    h->dropped[h->dropped_count++] = key;
}

/* Lets go of the objects that nobody wants any more.  stack: balanced, never raises */
static void collect_dropped(lua_State *L, pdk_host *h)
{
    push_anchor(L, h);
    for (;;) {
        int key;
        {
            PDK_GUARD(h->lock);
            if (h->dropped_count == 0)
                break;
            key = h->dropped[--h->dropped_count];
        }
        if (lua_istable(L, -1)) {
            lua_pushnil(L);
            lua_rawseti(L, -2, key);
        }
    }
    lua_pop(L, 1);
}

/* ---- calls --------------------------------------------------------------------------------------------- */

/* For a host that waits for its descriptor. */
static void signal_fd(pdk_host *h) PDK_REQUIRES(h->lock)
{
    static const uint64_t one = 1;
    if (h->fd >= 0)
        (void)!write(h->fd, &one, sizeof one); /* full = readable already */
}

static void enqueue(pdk_host *h, pdk_call *call) PDK_REQUIRES(h->lock)
{
    call->state = CALL_QUEUED;
    call->next = NULL;
    *(h->tail != NULL ? &h->tail->next : &h->head) = call;
    h->tail = call;
    signal_fd(h);
    pdk_cond_broadcast(&h->work);
}

static pdk_call *dequeue(pdk_host *h) PDK_REQUIRES(h->lock)
{
    pdk_call *call = h->head;
    if (call != NULL) {
        h->head = call->next;
        if (h->head == NULL)
            h->tail = NULL;
        call->state = CALL_RUNNING;
    }
    return call;
}

static void withdraw(pdk_host *h, pdk_call *call) PDK_REQUIRES(h->lock)
{
    pdk_call *before = NULL;
    for (pdk_call *c = h->head; c != call; c = c->next)
        before = c;
    *(before != NULL ? &before->next : &h->head) = call->next;
    if (h->tail == call)
        h->tail = before;
    call->state = CALL_DONE;
}

/* Why a call that is still queued must not run any more; PDK_OK = it may. */
static pdk_error_kind refusal(pdk_host *h, const pdk_limit *limit) PDK_REQUIRES(h->lock)
{
    if (h->closed)
        return PDK_E_CLOSED;
    if (pdk_limit_cancelled(limit))
        return PDK_E_CANCELLED;
    return limit->deadline != PDK_NEVER && pdk_now_monotonic() >= limit->deadline ? PDK_E_TIMEOUT : PDK_OK;
}

static void refuse(pdk_call *call, pdk_error_kind kind, bool queued)
{
    call->rc = -1;
    if (kind == PDK_E_CLOSED)
        pdk_fail(call->err, kind, 0, "%s cannot be called: its Lua state or its runtime is closed", call->method);
    else if (kind == PDK_E_CANCELLED)
        pdk_fail(call->err, kind, 0, "%s was cancelled before it was called", call->method);
    else if (!queued)
        pdk_fail(call->err, kind, 0, "the operation's time was over before %s was called", call->method);
    else
        pdk_fail(call->err, kind, 0, "%s was not taken in time: the host's thread neither waited in paddock nor called "
                 "dispatch", call->method);
}

/* Waits until the host's thread has carried it out, or withdraws it. PDK_OK or why it was withdrawn. */
static pdk_error_kind wait_done(pdk_host *h, pdk_call *call, const pdk_limit *limit) PDK_REQUIRES(h->lock)
{
    while (call->state != CALL_DONE) {
        pdk_ns until = PDK_NEVER; /* a running one is drained, whatever its limit says */
        if (call->state == CALL_QUEUED) {
            pdk_error_kind kind = refusal(h, limit);
            if (kind != PDK_OK) {
                withdraw(h, call);
                return kind;
            }
            until = limit->deadline;
            if (pdk_limit_can_cancel(limit) && until > pdk_now_monotonic() + CANCEL_LOOK)
                until = pdk_now_monotonic() + CANCEL_LOOK;
        }
        pdk_cond_wait_until(&h->done, &h->lock, until);
    }
    return PDK_OK;
}

static void perform(lua_State *L, pdk_call *call);

void pdk_host_call(pdk_host *h, pdk_call *call)
{
    if (h->pid != pdk_process_id()) {
        refuse(call, PDK_E_CLOSED, false);
        return;
    }
    const pdk_limit *limit = call->limit != NULL ? call->limit : pdk_limit_current();
    lua_State *L = NULL;
    pdk_error_kind refused;
    bool queued = false;
    {
        PDK_GUARD(h->lock);
        refused = refusal(h, limit);
        if (refused == PDK_OK && h->depth > 0 && h->thread == pdk_thread_self()) {
            L = h->stack[h->depth - 1];
        } else if (refused == PDK_OK) {
            enqueue(h, call);
            queued = true;
            refused = wait_done(h, call, limit);
        }
    }
    if (L != NULL)
        perform(L, call);
    else if (refused != PDK_OK)
        refuse(call, refused, queued);
}

bool pdk_host_do(pdk_host *h, void (*fn)(lua_State *L, void *arg), void *arg)
{
    static const pdk_limit unlimited = { .deadline = PDK_NEVER };
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_call call = { .method = "a callback", .plain = fn, .arg = arg, .limit = &unlimited, .err = &err };
    pdk_host_call(h, &call);
    return call.rc == 0;
}

void pdk_host_close(pdk_host *h)
{
    if (h->pid != pdk_process_id())
        return;
    PDK_GUARD(h->lock);
    h->closed = true;
    pdk_cond_broadcast(&h->done);
    pdk_cond_broadcast(&h->work);
}

/* ---- the host's thread --------------------------------------------------------------------------------- */

void pdk_host_enter(pdk_host *h, lua_State *L)
{
    {
        PDK_GUARD(h->lock);
        h->thread = pdk_thread_self();
        if (h->depth < NESTING)
            h->stack[h->depth++] = L;
    }
    collect_dropped(L, h);
}

void pdk_host_leave(pdk_host *h)
{
    PDK_GUARD(h->lock);
    if (h->depth > 0)
        h->depth--;
    if (h->depth == 0)
        h->thread = 0;
}

static void perform(lua_State *L, pdk_call *call)
{
    if (call->plain != NULL)
        call->plain(L, call->arg);
    else
        pdk_call_perform(L, call);
}

static void carry_out(pdk_host *h, lua_State *L, pdk_call *call)
{
    perform(L, call);
    PDK_GUARD(h->lock);
    call->state = CALL_DONE;
    pdk_cond_broadcast(&h->done);
}

static pdk_call *next_call(pdk_host *h)
{
    PDK_GUARD(h->lock);
    return dequeue(h);
}

int pdk_host_fd(pdk_host *h)
{
    PDK_GUARD(h->lock);
    if (h->fd < 0)
        h->fd = eventfd(h->head != NULL || h->poked ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
    return h->fd;
}

/* Before the queue is looked at, so that what comes meanwhile makes it readable again. */
static void reset_fd(pdk_host *h)
{
    PDK_GUARD(h->lock);
    uint64_t count;
    if (h->fd >= 0)
        (void)!read(h->fd, &count, sizeof count);
}

int pdk_host_pump(pdk_host *h, lua_State *L)
{
    if (h->pid != pdk_process_id() || pdk_inside_callback())
        return 0;
    int n = 0;
    reset_fd(h);
    collect_dropped(L, h);
    for (pdk_call *call; (call = next_call(h)) != NULL; n++)
        carry_out(h, L, call);
    return n;
}

void pdk_host_wake(void *host)
{
    pdk_host *h = host;
    PDK_GUARD(h->lock);
    h->poked = true;
    signal_fd(h);
    pdk_cond_broadcast(&h->work);
}

void pdk_host_set_hook(pdk_host *h, pdk_host_hook hook, void *ctx)
{
    h->hook = hook;
    h->hook_ctx = ctx;
}

typedef struct host_job { /* on the stack of pdk_host_run */
    pdk_host *host;
    void (*fn)(void *arg);
    void *arg;
    const pdk_limit *limit;
    bool done;              /* the host's lock */
} host_job;

static void *run_job(void *arg)
{
    host_job *job = arg;
    pdk_limit_enter(job->limit);
    job->fn(job->arg);
    PDK_GUARD(job->host->lock);
    job->done = true;
    pdk_cond_broadcast(&job->host->work);
    return NULL;
}

static bool has_tables(pdk_host *h)
{
    PDK_GUARD(h->lock);
    return h->tables > 0;
}

/* Waits until there is something for the host's thread: a call (then dequeued), a poke, or the end of the job. */
static pdk_call *await_work(pdk_host *h, const host_job *job, bool *done)
{
    PDK_GUARD(h->lock);
    while (h->head == NULL && !h->poked && !job->done)
        pdk_cond_wait(&h->work, &h->lock);
    h->poked = false;
    pdk_call *call = dequeue(h);
    *done = call == NULL && job->done;
    return call;
}

void pdk_host_run(pdk_host *h, lua_State *L, void (*fn)(void *arg), void *arg)
{
    if (!h->threads || !has_tables(h)) {
        fn(arg);
        return;
    }
    host_job job = { .host = h, .fn = fn, .arg = arg, .limit = pdk_limit_current() };
    pdk_thread worker;
    if (pdk_thread_start(&worker, "pdk-host-call", run_job, &job) != 0) {
        fn(arg); /* the bracket of pdk_host_enter makes calls from this very thread work, too */
        return;
    }
    for (bool done = false; !done;) {
        pdk_call *call = await_work(h, &job, &done);
        if (call != NULL)
            carry_out(h, L, call);
        if (h->hook != NULL)
            h->hook(L, h->hook_ctx);
    }
    pdk_thread_join(&worker);
}
