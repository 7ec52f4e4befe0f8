/* actors.h -- acquires that a test drives by hand: each on a thread of its own that either waits for its turns (sync), or asks for
 * them, sleeps until it is called, and steps (what a worker would do); and an engine that stops at a gate of the test's choice. */
#ifndef PDK_TEST_ACTORS_H
#define PDK_TEST_ACTORS_H

#include "journal.h"
#include "world.h"

/* ---- the engine's gate ---- */

static _Atomic(const char *) gate_at;   /* the function that does not go on; NULL = all do */
static _Atomic(const char *) fails_at, no_at; /* the one that fails; that answers false */
static atomic_int found_generation;     /* discover, and inspect by id, find x<n>; 0 = nothing, until it is stopped */
static atomic_int gate_waits;           /* how many are in it now */
static const char *const engine_calls[] = { "create", "destroy", "inspect", "discover", "alive", "ready", "finish", "connect" };
static atomic_int engine_count[8];      /* calls that went through, or are in the gate */
static atomic_int engine_calls_seen;    /* all of them */
static char ready_seconds[16];          /* what the last call of ready was given; read when there is none */
static void (*on_engine_call)(const char *name, int nth); /* fixed while calls are made */

static inline int calls_of(const char *name)
{
    for (size_t i = 0; i < 8; i++)
        if (strcmp(engine_calls[i], name) == 0)
            return atomic_load(&engine_count[i]);
    return -1;
}

static inline bool same(const char *a, const char *b)
{
    return a != NULL && b != NULL && strcmp(a, b) == 0;
}

static inline void count_call(const char *name)
{
    for (size_t i = 0; i < 8; i++)
        if (strcmp(engine_calls[i], name) == 0) {
            atomic_fetch_add(&engine_count[i], 1);
            int nth = atomic_fetch_add(&engine_calls_seen, 1) + 1;
            if (on_engine_call != NULL)
                on_engine_call(name, nth);
        }
}

static inline int gate_hook(const char *name, const char *id, const char *detail, double *seconds)
{
    static _Thread_local char in_gate[16]; /* the call that this thread waits in */
    (void)id;
    bool waited = in_gate[0] != '\0';
    if (strcmp(name, "ready") == 0)
        snprintf(ready_seconds, sizeof ready_seconds, "%s", detail);
    if (strcmp(in_gate, name) != 0)
        count_call(name);
    if (same(name, atomic_load(&gate_at))) {
        if (!waited)
            atomic_fetch_add(&gate_waits, 1);
        snprintf(in_gate, sizeof in_gate, "%s", name);
        *seconds = 0.001;
        return WORLD_AGAIN;
    }
    if (waited)
        atomic_fetch_sub(&gate_waits, 1);
    in_gate[0] = '\0';
    if (same(name, atomic_load(&fails_at)))
        return WORLD_FAIL;
    if (same(name, atomic_load(&no_at)))
        return WORLD_NO;
    *seconds = atomic_load(&found_generation);
    if (strcmp(name, "destroy") == 0 && strncmp(detail, "x", 1) == 0)
        atomic_store(&found_generation, 0);
    return *seconds > 0 && (same(name, "discover") || same(name, "inspect")) ? WORLD_FOUND : WORLD_GO_ON;
}

/* ---- events ---- */

enum { EVENT_KINDS = 32 };
static struct {
    char name[40];
    atomic_int n;
} events[EVENT_KINDS];
static void (*on_event)(const char *event, const char *id); /* fixed while there are any */
static pdk_mutex events_lock;

static inline void note_event(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_info_str(pdk_view_of(record), "event"), *id = pdk_info_str(pdk_view_of(record), "sandbox_id");
    {
        PDK_GUARD(events_lock);
        int i = 0;
        while (i < EVENT_KINDS - 1 && events[i].name[0] != '\0' && strcmp(events[i].name, event) != 0)
            i++;
        snprintf(events[i].name, sizeof events[i].name, "%s", event);
        atomic_fetch_add(&events[i].n, 1);
    }
    if (on_event != NULL)
        on_event(event, id);
}

static inline int events_of(const char *name)
{
    PDK_GUARD(events_lock);
    for (int i = 0; i < EVENT_KINDS; i++)
        if (strcmp(events[i].name, name) == 0)
            return atomic_load(&events[i].n);
    return 0;
}

/* ---- a runtime on it ---- */

/* `gate`: the first one, or NULL. */
static inline pdk_runtime *gated_open(const char *more, const char *gate)
{
    pdk_runtime *rt = world_open(more);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_mutex_init(&events_lock);
    memset(events, 0, sizeof events);
    for (size_t i = 0; i < 8; i++)
        atomic_store(&engine_count[i], 0);
    atomic_store(&engine_calls_seen, 0);
    atomic_store(&gate_waits, 0);
    atomic_store(&fails_at, NULL);
    atomic_store(&no_at, NULL);
    atomic_store(&found_generation, 0);
    atomic_store(&gate_at, gate);
    on_engine_call = NULL;
    on_event = NULL;
    world_hook = gate_hook;
    CHECK_INT(pdk_runtime_on(rt, note_event, NULL, &err), 0);
    return rt;
}

static inline void gated_end(pdk_runtime *rt)
{
    atomic_store(&gate_at, NULL);
    atomic_store(&fails_at, NULL);
    on_engine_call = NULL;
    on_event = NULL;
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    world_end(rt);
}

static inline void wait_until(bool (*ready)(const void *), const void *arg)
{
    for (int i = 0; i < 10000 && !ready(arg); i++)
        pdk_sleep_ns(1000 * 1000);
    CHECK(ready(arg));
}

static inline bool somebody_in_gate(const void *arg)
{
    (void)arg;
    return atomic_load(&gate_waits) > 0;
}

static inline bool is_set(const void *arg)
{
    return atomic_load((const atomic_int *)arg) != 0;
}

/* ---- an acquire ---- */

typedef struct actor {
    pdk_runtime *rt;
    const char *name, *holder; /* the identity's thread; holder NULL = none */
    bool sync;
    pdk_acquiring *p;          /* when it is not */
    atomic_bool cancelled;
    atomic_int granted;        /* calls */
    atomic_int done;
    int rc;                    /* of the last step, when done */
    pdk_box *box;
    pdk_error err;
    pdk_thread t;
} actor;

static inline void actor_granted(void *ctx)
{
    actor *a = ctx;
    atomic_fetch_add(&a->granted, 1);
}

static inline pdk_acquire_spec actor_spec(const actor *a)
{
    return (pdk_acquire_spec){ .thread = a->name, .thread_len = strlen(a->name), .holder = a->holder, .no_holder = a->holder == NULL };
}

static inline bool actor_begin(actor *a)
{
    pdk_acquire_spec spec = actor_spec(a);
    pdk_acquire_calls calls = { .granted = actor_granted, .ctx = a };
    a->p = pdk_acquire_begin(a->rt, &spec, &a->cancelled, &calls, &a->err);
    return CHECK(a->p != NULL);
}

static inline int actor_give_up(actor *a)
{
    return pdk_acquire_abandon(a->p) ? pdk_fail(&a->err, PDK_E_CANCELLED, 0, "abandoned") : 0;
}

static inline int actor_async(actor *a)
{
    int seen = 0, rc = pdk_acquire_ask(a->p, &a->err);
    if (rc == 1)
        rc = pdk_acquire_step(a->p, &a->box, &a->err);
    while (rc == 0) {
        while (rc == 0 && atomic_load(&a->granted) == seen) {
            pdk_sleep_ns(500 * 1000);
            if (atomic_load(&a->cancelled))
                rc = actor_give_up(a);
        }
        seen = atomic_load(&a->granted);
        if (rc == 0)
            rc = pdk_acquire_step(a->p, &a->box, &a->err);
    }
    pdk_acquire_end(a->p);
    a->p = NULL;
    return rc;
}

static inline int actor_sync(actor *a)
{
    pdk_acquire_spec spec = actor_spec(a);
    pdk_limit limit = { .deadline = PDK_NEVER, .cancelled = &a->cancelled };
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_runtime_acquire(a->rt, &spec, &a->box, &a->err);
    pdk_limit_enter(outer);
    return rc == 0 ? 1 : -1;
}

static inline void *actor_main(void *arg)
{
    actor *a = arg;
    a->rc = a->sync ? actor_sync(a) : actor_async(a);
    atomic_store(&a->done, 1);
    return NULL;
}

static inline void actor_start(actor *a)
{
    if (a->sync || actor_begin(a))
        CHECK_INT(pdk_thread_start(&a->t, "actor", actor_main, a), 0);
}

static inline void actor_cancel(actor *a)
{
    atomic_store(&a->cancelled, true);
}

/* Waits for its end: `want` is the error's kind; PDK_OK = it got its box. */
static inline void actor_join(actor *a, pdk_error_kind want)
{
    pdk_thread_join(&a->t);
    CHECK_INT(a->rc, want == PDK_OK ? 1 : -1);
    CHECK_KIND(a->err, want);
    CHECK((a->box != NULL) == (want == PDK_OK));
}

static inline void actor_clear(actor *a)
{
    pdk_box_free(a->box);
    pdk_error_clear(&a->err);
}

/* ---- looking ---- */

typedef struct looks { /* of one id, at one moment */
    int state; /* -1 = nothing is known */
    int holders;
    bool reserved, retry;
    bool del;
} looks;

static inline looks look_at(pdk_runtime *rt, const char *id)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    return e == NULL ? (looks){ .state = -1 }
                     : (looks){ e->state, e->holder_count, e->reserved != 0, e->retry, e->lease == PDK_LEASE_DEL };
}

static inline void id_of(pdk_runtime *rt, const char *name, char id[64])
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK none = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&none);
    pdk_end(&none, &m);
    pdk_identity who = { "u", name, 1, strlen(name) };
    CHECK_INT(pdk_policy_derive(rt->policies, &who, pdk_view_of(&none), id, &err), 0);
}

/* ---- another process, which wants the id's turn too ---- */

typedef struct contender {
    pdk_serial *serial;
    pdk_runtime *rt;
    char id[64];
    atomic_int has;
    looks then;    /* what stood in the registry when it got the turn */
    int recorded;  /* and in the journal */
    pdk_thread t;
    pdk_turn turn;
} contender;

static inline void *contend(void *arg)
{
    contender *c = arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_turn_enter_id(c->serial, c->id, &c->turn, &PDK_NO_LIMIT, &err), 0);
    c->then = look_at(c->rt, c->id);
    c->recorded = pdk_journal_has(c->rt->journal, c->id, NULL, &err);
    atomic_store(&c->has, 1);
    return NULL;
}

static inline void contender_open(contender *c, pdk_runtime *rt, const char *name)
{
    char path[300];
    snprintf(path, sizeof path, "%s/state/turns", test_tmpdir());
    *c = (contender){ .rt = rt, .serial = pdk_serial_new(path, true, NULL), .turn = PDK_NO_TURN };
    id_of(rt, name, c->id);
}

static inline void contender_start(contender *c)
{
    CHECK_INT(pdk_thread_start(&c->t, "contender", contend, c), 0);
}

static inline void contender_close(contender *c)
{
    pdk_turn_leave(&c->turn);
    CHECK_INT(pdk_serial_keys(c->serial), 0);
    pdk_serial_free(c->serial);
}

#endif
