/* Deadlines of operations, and the end of a runtime with operations under way. */
#include "op_engine.h"

/* ---- a store that can be held ---------------------------------------------------------------------------- */

static atomic_bool store_shut;
static atomic_int store_inside;

static void store_wait(void)
{
    atomic_fetch_add(&store_inside, 1);
    while (atomic_load(&store_shut))
        wait_ms(1);
    atomic_fetch_sub(&store_inside, 1);
}

static int slow_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    store_wait();
    return pdk_lease_take(self, id, floor, token, err);
}
static int slow_claim(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    store_wait();
    return pdk_lease_claim(self, id, floor, token, err);
}
static int slow_claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    store_wait();
    return pdk_lease_claim_for_destroy(self, id, floor, token, err);
}
static int slow_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    return pdk_lease_renew(self, id, out, err);
}
static int slow_release(void *self, const char *id, pdk_error *err)
{
    return pdk_lease_release(self, id, err);
}
static int slow_owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    return pdk_lease_owner_of(self, id, out, err);
}
static void slow_free(void *self)
{
    pdk_lease_free(self);
}

static const pdk_lease_ops slow_store = { .type = "slow", .take = slow_take, .claim = slow_claim,
                                          .claim_for_destroy = slow_claim_for_destroy, .renew = slow_renew, .release = slow_release,
                                          .owner_of = slow_owner_of, .free = slow_free };

static void make_store_slow(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    rt->lease = pdk_lease_new(&slow_store, rt->lease, &err);
    if (rt->lease == NULL)
        abort();
}

/* ---- deadlines ------------------------------------------------------------------------------------------- */

static double acquire_within(pdk_runtime *rt, const char *thread, double timeout, pdk_error_kind want)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    double before = test_now();
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = thread, .timeout = timeout }, &box, &err), want == PDK_OK ? 0 : -1);
    CHECK_KIND(err, want);
    pdk_box_free(box);
    return test_now() - before;
}

TEST("acquire with a limit returns in it whatever hangs, each alone; what has begun is drained, and the next one is served [B201]")
{
    static const char *const hangs[] = { "alive", "discover", "create", "ready", "connect", "store" };
    for (size_t i = 0; i < sizeof hangs / sizeof *hangs; i++) {
        bool store = strcmp(hangs[i], "store") == 0, active = strcmp(hangs[i], "alive") == 0;
        pdk_runtime *rt = gated("");
        pdk_box *before = active ? boxed(rt, "t") : NULL;
        make_store_slow(rt);
        atomic_store(&store_shut, store);
        if (!store)
            gate_close(hangs[i]);
        int came = store ? 0 : gate_came(hangs[i]);
        /* as long as it is held, only the limit can end this */
        double took = acquire_within(rt, "t", 0.2, PDK_E_TIMEOUT);
        if (!CHECK(took >= 0.2))
            fprintf(stderr, "%s: %g s\n", hangs[i], took);
        CHECK_INT(store ? atomic_load(&store_inside) : gate_came(hangs[i]) - came, 1);
        CHECK_INT(pdk_ops_count(rt->ops).running, 1); /* behind it */
        if (store)
            atomic_store(&store_shut, false);
        else
            gate_open(hangs[i]);
        acquire_within(rt, "t", 30, PDK_OK);
        CHECK_INT(gate_came("create"), 1);
        CHECK_INT(held_now(rt), active ? 1 : 0);
        pdk_box_free(before);
        shut(rt);
    }
}

TEST("a limit counts the time that an operation waits: for its turn, and for a worker; then it never begins [B201]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 1 },");
    pdk_box *box = boxed(rt, "box");
    gate_close("create");
    pdk_op *first = acquire_op(rt, "t", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1);
    acquire_within(rt, "t", 0.05, PDK_E_TIMEOUT);
    acquire_within(rt, "other", 0.05, PDK_E_TIMEOUT);
    pdk_op *op = acquire_op(rt, "other", NULL, 0.05); /* nobody waits for it: the timer ends it */
    EVENTUALLY(pdk_op_poll(op, &err) == -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    pdk_op_free(op);
    op = pdk_exec_async(box, &(pdk_command){ .command = "x", .timeout = 0.05 }, NULL, NULL, NULL, &err);
    CHECK_FAILS(op, PDK_E_TIMEOUT); /* certainly not run */
    pdk_op_free(op);
    op = pdk_destroy_async(rt, pdk_box_id(box), 0.05, NULL, NULL, &err);
    CHECK_FAILS(op, PDK_E_TIMEOUT);
    pdk_op_free(op);
    CHECK_INT(pdk_serial_keys(rt->serial), 2); /* those of "t" and of its id */
    gate_open("create");
    pdk_box_free(box_of(first));
    CHECK_INT(gate_came("create"), 2);
    CHECK_INT(gate_came("exec"), 0);
    pdk_box_free(box);
    shut(rt);
}

TEST("a destroy whose stop hangs: its caller is told at its deadline, the teardown goes on, and says what came of it when asked again")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    pdk_box *box = boxed(rt, "t");
    char id[64];
    snprintf(id, sizeof id, "%s", pdk_box_id(box));
    pdk_box_free(box);
    gate_close("destroy");
    pdk_op *op = pdk_destroy_async(rt, id, 0.05, NULL, NULL, &err);
    CHECK_FAILS(op, PDK_E_TIMEOUT);
    CHECK_INT(gate_of("destroy")->inside, 1); /* drained, not given up */
    pdk_op_free(op);
    op = acquire_op(rt, "t", NULL, 0.05);
    CHECK_INT(pdk_op_wait(op, 30, &err), -1); /* being_destroyed, or timeout: never the dying one */
    pdk_op_free(op);
    gate_open("destroy");
    EVENTUALLY(pdk_ops_count(rt->ops).running == 0);
    op = pdk_destroy_async(rt, id, 30, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(pdk_op_answer(op), 1);
    CHECK_INT(gate_came("destroy"), 1);
    pdk_op_free(op);
    shut(rt);
}

static atomic_int ends;
static void count_end(void *ctx, pdk_op *op)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_op_poll(op, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    (void)ctx;
    atomic_fetch_add(&ends, 1);
    pdk_op_free(op);
}

TEST("a deadline is told by a callback too, without anybody polling for it; many are told in their order")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 1 },");
    gate_close("create");
    pdk_op *first = acquire_op(rt, "t", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1);
    atomic_store(&ends, 0);
    for (int i = 0; i < 300; i++) {
        pdk_request req = { .thread = "t", .timeout = 0.05 + (i * 37 % 100) / 1000.0 };
        CHECK(pdk_acquire_async(rt, &req, count_end, NULL, &err) != NULL);
    }
    EVENTUALLY((pdk_dispatch(rt, 1000), atomic_load(&ends) == 300));
    gate_open("create");
    pdk_box_free(box_of(first));
    shut(rt);
}

TEST("cancelled, and then its deadline passes while it is drained: told then, and not a second time")
{
    pdk_runtime *rt = gated("");
    gate_close("create");
    pdk_op *op = acquire_op(rt, "t", NULL, 0.1);
    EVENTUALLY(gate_of("create")->inside == 1);
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_FAILS(op, PDK_E_TIMEOUT);
    gate_open("create");
    EVENTUALLY(pdk_ops_count(rt->ops).running == 0);
    CHECK_FAILS(op, PDK_E_TIMEOUT);
    CHECK_INT(held_now(rt), 0);
    pdk_op_free(op);
    shut(rt);
}

/* ---- the end --------------------------------------------------------------------------------------------- */

TEST("shutdown: what waits ends with `closed`, what runs is drained, and nothing is left [F15]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 2 },");
    gate_close("create");
    pdk_op *runs = acquire_op(rt, "a", NULL, 0), *too = acquire_op(rt, "b", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 2);
    pdk_op *turn = acquire_op(rt, "a", NULL, 0), *queued = acquire_op(rt, "c", NULL, 0);
    pdk_op *end = pdk_shutdown_async(rt, 0, NULL, NULL, &err); /* queued as well: both workers hang */
    CHECK_INT(pdk_op_wait(end, 0.02, &err), 0);
    gate_open("create");
    CHECK_INT(pdk_op_wait(end, 30, &err), 1);
    CHECK(pdk_op_poll(runs, &err) != 0);
    CHECK(pdk_op_poll(too, &err) != 0);
    CHECK(pdk_op_poll(turn, &err) != 0);
    CHECK(pdk_op_poll(queued, &err) != 0);
    CHECK_INT(held_now(rt), 0);
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    pdk_op_free(runs);
    pdk_op_free(too);
    pdk_op_free(turn);
    pdk_op_free(queued);
    pdk_op_free(end);
    pdk_free(rt);
}

TEST("shutdown closes what waits at once, although what runs hangs")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 8 },");
    gate_close("create");
    pdk_op *runs = acquire_op(rt, "a", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1);
    pdk_op *turn = acquire_op(rt, "a", NULL, 0);
    pdk_op *end = pdk_shutdown_async(rt, 0, NULL, NULL, &err);
    CHECK_FAILS(turn, PDK_E_CLOSED);
    CHECK_INT(pdk_op_poll(runs, &err), 0);
    CHECK(pdk_acquire_async(rt, &(pdk_request){ .thread = "x" }, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_CLOSED);
    gate_open("create");
    CHECK_INT(pdk_op_wait(end, 30, &err), 1);
    pdk_op_free(runs);
    pdk_op_free(turn);
    pdk_op_free(end);
    pdk_free(rt);
}

TEST("each step of a shutdown hangs in turn: it returns at its deadline with what is left, and ends when the step does [B184]")
{
    static const char *const steps[] = { "destroy", "inspect", "finish", "close", "create", "exec" };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_runtime *rt = gated("");
        pdk_box *box = boxed(rt, "t");
        char id[64];
        snprintf(id, sizeof id, "%s", pdk_box_id(box));
        gate_close(steps[i]);
        pdk_op *work = NULL;
        if (strcmp(steps[i], "create") == 0)
            work = acquire_op(rt, "other", NULL, 0);
        if (strcmp(steps[i], "exec") == 0)
            work = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
        EVENTUALLY(work == NULL || gate_of(steps[i])->inside == 1);
        pdk_op *end = pdk_shutdown_async(rt, 0.1, NULL, NULL, &err);
        CHECK_INT(pdk_op_wait(end, 30, &err), -1);
        CHECK_KIND(err, PDK_E_TIMEOUT);
        if (work == NULL)
            CHECK_HAS(err.message, id);
        else
            CHECK_HAS(err.message, "1 call in flight");
        pdk_op_free(end);
        gate_open(steps[i]);
        end = pdk_shutdown_async(rt, 30, NULL, NULL, &err);
        if (!CHECK_INT(pdk_op_wait(end, 40, &err), 1))
            fprintf(stderr, "%s: %s\n", steps[i], err.message);
        pdk_op_free(end);
        pdk_op_free(work);
        pdk_box_free(box);
        pdk_free(rt);
    }
}

TEST("shutdown does not wait for what is merely scheduled: the renewal's and the idle checker's period do not matter [B190]")
{
    pdk_runtime *rt = gated("ownership = { type = 'memory', ttl = 100000, renew_interval = 40000 }, orphan_ttl = 200000,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = boxed(rt, "t");
    pdk_op *op = acquire_op(rt, "t", NULL, 90000); /* a deadline far away, over by now */
    pdk_box_free(box_of(op));
    CHECK_INT(pdk_renew(rt, &err), 0);
    pdk_box_free(box);
    op = pdk_shutdown_async(rt, 20, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    pdk_op_free(op);
    pdk_free(rt);
}

TEST_MAIN
