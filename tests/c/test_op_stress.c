/* Many host threads with one runtime: submitting, cancelling, freeing, dispatching and shutting down at once. What is checked is what
 * must hold however they interleave: each is told once, nothing stays held, no identity's sandbox is made twice at once. */
#include "op_engine.h"

enum { THREADS = 8, ROUNDS = 60, NAMES = 5 };

typedef struct shared {
    pdk_runtime *rt;
    atomic_int submitted, called, freed_early, refused;
    atomic_bool closing, stop;
} shared;

typedef struct actor {
    shared *s;
    pdk_thread t;
    unsigned seed;
} actor;

static unsigned pick(actor *a, unsigned n)
{
    a->seed = a->seed * 1103515245 + 12345;
    return (a->seed >> 16) % n;
}

static void told(void *ctx, pdk_op *op)
{
    shared *s = ctx;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK(pdk_op_poll(op, &err) != 0);
    pdk_box *box = pdk_op_box(op);
    atomic_fetch_add(&s->called, 1);
    pdk_op_free(op);
    pdk_op *release = box != NULL ? pdk_release_async(box, NULL, NULL, &err) : NULL;
    pdk_op_free(release);
    pdk_box_free(box);
}

static void use(actor *a, pdk_box *box)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    shared *s = a->s;
    pdk_op *op = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    if (op == NULL) {
        CHECK_KIND(err, PDK_E_CLOSED);
        return;
    }
    if (pick(a, 3) == 0)
        pdk_cancel(op);
    if (pick(a, 4) != 0) {
        int rc = pdk_op_wait(op, 30, &err);
        CHECK(rc != 0);
        CHECK(rc == 1 || err.kind == PDK_E_CANCELLED || err.kind == PDK_E_CLOSED || err.kind == PDK_E_LOST ||
              err.kind == PDK_E_BEING_DESTROYED || atomic_load(&s->closing));
    }
    pdk_op_free(op);
}

static void one_round(actor *a)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    shared *s = a->s;
    char name[8];
    snprintf(name, sizeof name, "t%u", pick(a, NAMES));
    pdk_request req = { .thread = name, .timeout = pick(a, 4) == 0 ? 0.001 + pick(a, 20) / 1000.0 : 0 };
    unsigned how = pick(a, 8);
    if (how == 0) { /* told by whoever dispatches */
        if (pdk_acquire_async(s->rt, &req, told, s, &err) != NULL)
            atomic_fetch_add(&s->submitted, 1);
        else
            CHECK_KIND(err, PDK_E_CLOSED);
        return;
    }
    if (how == 1) {
        pdk_box *box = NULL;
        if (pdk_acquire(s->rt, &req, &box, &err) == 0)
            use(a, box);
        pdk_box_free(box);
        return;
    }
    pdk_op *op = pdk_acquire_async(s->rt, &req, NULL, NULL, &err);
    if (op == NULL) {
        CHECK_KIND(err, PDK_E_CLOSED);
        return;
    }
    if (how == 2)
        pdk_cancel(op);
    else if (how == 3)
        pdk_op_wait(op, 0.001, &err);
    else if (how > 4)
        CHECK(pdk_op_wait(op, 30, &err) != 0);
    pdk_box *box = pdk_op_box(op);
    pdk_op_free(op);
    if (box != NULL)
        use(a, box);
    if (box != NULL && how == 7) {
        op = pdk_destroy_async(s->rt, pdk_box_id(box), 5, NULL, NULL, &err);
        pdk_op_free(op);
    }
    pdk_box_free(box);
    pdk_dispatch(s->rt, 3);
}

static void *act(void *arg)
{
    actor *a = arg;
    for (int i = 0; i < ROUNDS && !atomic_load(&a->s->stop); i++)
        one_round(a);
    return NULL;
}

static void run(bool ends_early)
{
    pdk_runtime *rt = gated("workers = { max = 12 },");
    shared s = { .rt = rt };
    actor actors[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        actors[i] = (actor){ .s = &s, .seed = i + (ends_early ? 100 : 1) };
        CHECK_INT(pdk_thread_start(&actors[i].t, "actor", act, &actors[i]), 0);
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (ends_early) {
        EVENTUALLY(gate_came("alive") > 50);
        atomic_store(&s.closing, true);
        while (pdk_shutdown(rt, &err) < 0)
            ;
    }
    for (int i = 0; i < THREADS; i++)
        pdk_thread_join(&actors[i].t);
    EVENTUALLY((pdk_dispatch(rt, 100), atomic_load(&s.called) == atomic_load(&s.submitted)));
    EVENTUALLY(nothing_under_way(rt) && pdk_ops_count(rt->ops).workers.queued + pdk_ops_count(rt->ops).workers.running == 0);
    CHECK_INT(held_now(rt), 0);
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    CHECK_INT(pdk_dispatch(rt, 100), 0);
    CHECK(gate_of("create")->most <= NAMES); /* one at a time for one identity */
    shut(rt);
}

TEST("many host threads with one runtime: each operation is told once, and nothing stays held")
{
    int fds = test_fds();
    run(false);
    CHECK_INT(test_fds(), fds);
}

TEST("many host threads, and one that shuts the runtime down under them")
{
    run(true);
}

TEST_MAIN
