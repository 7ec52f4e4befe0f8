/* Asynchronous operations over a scripted engine: how they are told, cancelled, bounded; what waits takes no worker. */
#include "op_engine.h"

#include <poll.h>
#include <sys/wait.h>

/* ---- callbacks ------------------------------------------------------------------------------------------- */

typedef struct told {
    int calls;
    int rc;
    pdk_error_kind kind;
    pdk_box *box;
    pdk_result result;
    char output[64];
    uint64_t thread;
    bool frees;
} told;

static void on_end(void *ctx, pdk_op *op)
{
    told *t = ctx;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    t->calls++;
    t->rc = pdk_op_poll(op, &err);
    t->kind = err.kind;
    t->thread = pdk_thread_self();
    t->box = pdk_op_box(op);
    pdk_op_result(op, &t->result);
    if (t->frees)
        pdk_op_free(op);
}

static void on_output(void *ctx, int stream, const void *bytes, size_t len)
{
    told *t = ctx;
    CHECK_INT(stream, 1);
    CHECK_INT(t->calls, 0); /* output comes before the end */
    strncat(t->output, bytes, len);
}

/* As a host with an event loop does it. */
static void dispatch_until(pdk_runtime *rt, const int *calls, int want)
{
    struct pollfd p = { .fd = pdk_fd(rt), .events = POLLIN };
    CHECK(p.fd >= 0);
    for (int i = 0; i < 3000 && *calls < want; i++)
        if (poll(&p, 1, 10) > 0)
            pdk_dispatch(rt, 10);
    CHECK_INT(*calls, want);
    CHECK_INT(poll(&p, 1, 0), 0); /* nothing is left: not readable */
    CHECK_INT(pdk_dispatch(rt, 10), 0);
}

TEST("acquire, exec, files, release, destroy and shutdown: each told on the thread that dispatches, none before")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    told a = { 0 }, e = { 0 }, r = { 0 }, d = { .frees = true }, s = { 0 };
    pdk_request req = { .thread = "t" };
    pdk_op *op = pdk_acquire_async(rt, &req, on_end, &a, &err);
    dispatch_until(rt, &a.calls, 1);
    CHECK_INT(a.rc, 1);
    CHECK(a.thread == pdk_thread_self());
    REQUIRE(a.box != NULL);
    CHECK(pdk_op_box(op) == NULL); /* taken */
    pdk_op_free(op);

    pdk_command cmd = { .command = "echo" };
    op = pdk_exec_async(a.box, &cmd, on_output, on_end, &e, &err);
    dispatch_until(rt, &e.calls, 1);
    CHECK_INT(e.rc, 1);
    CHECK_STR(e.output, "begun\necho");
    CHECK_STR(e.result.out, "begun\necho");
    CHECK_INT(e.result.outcome, PDK_COMPLETED);
    pdk_result_free(&e.result);
    pdk_op_free(op);

    op = pdk_read_async(a.box, "/a", 0, NULL, NULL, &err);
    char *data;
    size_t len;
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(pdk_op_bytes(op, &data, &len), 1);
    CHECK_MEM(data, len, "bytes of /a", 11);
    free(data);
    pdk_op_free(op);
    op = pdk_write_async(a.box, "/a", "x", 1, 5, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    pdk_op_free(op);

    char id[64];
    snprintf(id, sizeof id, "%s", pdk_box_id(a.box));
    op = pdk_destroy_async(rt, id, 0, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(pdk_op_answer(op), 0); /* it is held */
    CHECK_STR(err.reason, "deferred");
    pdk_op_free(op);
    op = pdk_release_async(a.box, on_end, &r, &err);
    pdk_box_free(a.box);
    dispatch_until(rt, &r.calls, 1);
    CHECK_INT(r.rc, 1);
    pdk_op_free(op);
    op = pdk_destroy_async(rt, id, 10, on_end, &d, &err);
    dispatch_until(rt, &d.calls, 1);
    CHECK_INT(d.rc, 1);

    op = pdk_shutdown_async(rt, 30, on_end, &s, &err);
    dispatch_until(rt, &s.calls, 1);
    CHECK_INT(s.rc, 1);
    pdk_op_free(op);
    CHECK(pdk_acquire_async(rt, &req, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_CLOSED);
    pdk_free(rt);
}

TEST("arguments are checked at submission, and nothing is submitted")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    pdk_box *box = boxed(rt, "t");
    pdk_request bad = { .thread = "t", .timeout = -1 };
    CHECK(pdk_acquire_async(rt, &bad, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_acquire_async(rt, &(pdk_request){ .holder = "" }, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_exec_async(box, &(pdk_command){ .command = "" }, NULL, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_exec_async(box, &(pdk_command){ .command = "x", .cwd = "relative" }, NULL, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    pdk_command no_stdin = { .command = "x", .stdin_len = 5 };
    pdk_result none;
    CHECK(pdk_exec_async(box, &no_stdin, NULL, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_INT(pdk_exec(box, &no_stdin, &none, &err), -1);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_decide_async(rt, "a", "r", (pdk_network_decision)77, 0, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_destroy_async(rt, "../..", 0, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_read_async(box, "relative", 0, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK(pdk_destroy_async(rt, "a", -2, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_INT(pdk_ops_count(rt->ops).queued, 0);
    CHECK_INT(pdk_op_poll(NULL, &err), -1);
    CHECK_INT(pdk_cancel(NULL), 1);
    pdk_op_free(NULL);
    pdk_box_free(box);
    shut(rt);
}

/* ---- the handle ------------------------------------------------------------------------------------------ */

TEST("a callback may free its operation and submit another; a freed one that is not over is cancelled, and never calls back")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    told kept = { .frees = true }, dropped = { 0 };
    pdk_request req = { .thread = "a" };
    CHECK(pdk_acquire_async(rt, &req, on_end, &kept, &err) != NULL);
    dispatch_until(rt, &kept.calls, 1);
    CHECK(kept.box != NULL);
    pdk_box_free(kept.box);

    gate_close("create");
    req.thread = "b";
    pdk_op *op = pdk_acquire_async(rt, &req, on_end, &dropped, &err);
    EVENTUALLY(gate_of("create")->inside == 1);
    pdk_op_free(op); /* what it makes is given back: parked, since it is whole */
    gate_open("create");
    EVENTUALLY(pdk_ops_count(rt->ops).running == 0);
    CHECK_INT(pdk_dispatch(rt, 10), 0);
    CHECK_INT(dropped.calls, 0);
    CHECK_INT(held_now(rt), 0);
    CHECK_INT(active_now(rt), 0);
    shut(rt);
}

TEST("callbacks of freed operations wake nobody, in whatever order they are freed; the others are told")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    struct pollfd fd = { .fd = pdk_fd(rt), .events = POLLIN };
    pdk_op *ops[7];
    told t = { 0 };
    for (int kept = -1; kept < 7; kept++) { /* -1: none is */
        for (int i = 0; i < 7; i++) {
            ops[i] = pdk_destroy_async(rt, "nobody", 0, on_end, &t, &err);
            REQUIRE(ops[i] != NULL);
            EVENTUALLY(pdk_ops_count(rt->ops).ready == i + 1); /* in this order */
        }
        CHECK_INT(poll(&fd, 1, 0), 1);
        static const int order[] = { 3, 6, 0, 5, 1, 4, 2 };
        for (int i = 0; i < 7; i++)
            if (order[i] != kept)
                pdk_op_free(ops[order[i]]);
        t.calls = 0;
        CHECK_INT(poll(&fd, 1, 0), kept >= 0);
        CHECK_INT(pdk_ops_count(rt->ops).ready, kept >= 0);
        CHECK_INT(pdk_dispatch(rt, 10), kept >= 0);
        CHECK_INT(t.calls, kept >= 0);
        if (kept >= 0)
            pdk_op_free(ops[kept]);
    }
    shut(rt);
}

TEST("a result that is not taken is given back when its operation is freed")
{
    pdk_runtime *rt = gated("");
    pdk_op *op = acquire_op(rt, "a", NULL, 0);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(held_now(rt), 1);
    pdk_op_free(op);
    EVENTUALLY(held_now(rt) == 0 && active_now(rt) == 0);
    /* but not what its holder had before it asked again */
    pdk_box *box = box_of(acquire_op(rt, "a", "h", 0));
    op = acquire_op(rt, "a", "h", 0);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    pdk_op_free(op);
    EVENTUALLY(pdk_ops_count(rt->ops).workers.running == 0 && pdk_ops_count(rt->ops).workers.queued == 0);
    CHECK_INT(held_now(rt), 1);
    pdk_box_free(box);
    shut(rt);
}

TEST("an operation may outlive its runtime: its answer stays, its result does not")
{
    pdk_runtime *rt = gated("");
    pdk_op *good = acquire_op(rt, "a", NULL, 0);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_op_wait(good, 30, &err), 1);
    gate_close("create");
    pdk_op *running = acquire_op(rt, "b", NULL, 0), *waiting = acquire_op(rt, "b", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1);
    gate_open("create");
    pdk_free(rt); /* without a shutdown: waits for what runs */
    CHECK(pdk_op_box(good) == NULL);
    CHECK_INT(pdk_op_poll(running, &err) != 0, 1);
    CHECK_FAILS(waiting, PDK_E_CLOSED);
    CHECK_INT(pdk_cancel(waiting), 1);
    pdk_op_free(good);
    pdk_op_free(running);
    pdk_op_free(waiting);
}

TEST("callbacks that nobody has dispatched before the runtime's end are never called, and nothing of them stays")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    told t = { 0 };
    pdk_op *kept = pdk_acquire_async(rt, &(pdk_request){ .thread = "a" }, on_end, &t, &err);
    pdk_op *freed = pdk_acquire_async(rt, &(pdk_request){ .thread = "b" }, on_end, &t, &err);
    EVENTUALLY(pdk_ops_count(rt->ops).ready == 2);
    pdk_op_free(freed);
    pdk_free(rt);
    CHECK_INT(t.calls, 0);
    CHECK_INT(pdk_op_wait(kept, 0, &err), 1); /* whoever waits is told: that thread is the caller's */
    CHECK_INT(t.calls, 1);
    CHECK(t.box == NULL); /* it was the runtime's */
    pdk_op_free(kept);
}

TEST("in a forked child every entry answers `closed`, and nothing waits for a lock that a thread of the parent held")
{
    pdk_runtime *rt = gated("");
    gate_close("create");
    pdk_op *op = acquire_op(rt, "a", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1);
    pid_t pid = fork();
    if (pid == 0) {
        pdk_error err = PDK_NO_ERROR;
        bool good = pdk_op_poll(op, &err) == -1 && err.kind == PDK_E_CLOSED && pdk_op_wait(op, 1, &err) == -1 &&
                    err.kind == PDK_E_CLOSED && pdk_cancel(op) == 1 && pdk_dispatch(rt, 1) == 0 && pdk_op_box(op) == NULL &&
                    pdk_acquire_async(rt, &(pdk_request){ .thread = "b" }, NULL, NULL, &err) == NULL && err.kind == PDK_E_CLOSED &&
                    pdk_fd(rt) == -1;
        pdk_op_free(op);
        _exit(good ? 0 : 1);
    }
    int status = -1;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
    gate_open("create");
    pdk_box_free(box_of(op));
    shut(rt);
}

/* ---- cancelling ------------------------------------------------------------------------------------------ */

TEST("one that is queued for a worker and cancelled never runs, then or later, and is told at once [F5]")
{
    pdk_runtime *rt = gated("workers = { max = 1 },");
    gate_close("alive");
    pdk_box *a = boxed(rt, "a"), *b = boxed(rt, "b");
    pdk_op *first = acquire_op(rt, "a", NULL, 0); /* has the only worker */
    EVENTUALLY(gate_of("alive")->inside == 1);
    pdk_op *second = acquire_op(rt, "b", NULL, 0); /* has its turn, and no worker */
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_op_poll(second, &err), 0);
    CHECK_INT(pdk_cancel(second), 0);
    CHECK_INT(pdk_op_poll(second, &err), -1);
    CHECK_KIND(err, PDK_E_CANCELLED);
    CHECK_INT(pdk_cancel(second), 1);
    gate_open("alive");
    pdk_box_free(box_of(first));
    CHECK_INT(gate_came("alive"), 1);
    CHECK_INT(pdk_serial_keys(rt->serial), 0); /* it has given its turn back */
    pdk_op_free(second);
    pdk_box_free(a);
    pdk_box_free(b);
    shut(rt);
}

TEST("cancelled while it runs, once or again: told when its work has ended, and what that produced is given back first [F4, F12, B049]")
{
    for (int times = 1; times <= 3; times++) {
        pdk_runtime *rt = gated("");
        gate_close("create");
        pdk_op *op = acquire_op(rt, "a", NULL, 0);
        EVENTUALLY(gate_of("create")->inside == 1);
        for (int i = 0; i < times; i++) {
            CHECK_INT(pdk_cancel(op), 0);
            wait_ms(10);
        }
        pdk_op *next = acquire_op(rt, "a", NULL, 0);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK_INT(pdk_op_wait(op, 0.05, &err), 0);
        CHECK_INT(pdk_op_poll(next, &err), 0); /* its turn has not come: the first one's worker has not ended */
        CHECK_INT(gate_came("create"), 1);
        gate_open("create");
        CHECK_FAILS(op, PDK_E_CANCELLED);
        pdk_box *box = box_of(next);
        CHECK_INT(gate_came("create"), 1); /* it reclaims what the first one has made and given back */
        CHECK_STR(pdk_box_source(box), "warm");
        CHECK_INT(held_now(rt), 1);
        pdk_op_free(op);
        pdk_box_free(box);
        shut(rt);
    }
}

static int failing(void *arg, pdk_error *err)
{
    atomic_int *phase = arg;
    atomic_store(phase, 1);
    while (atomic_load(phase) == 1)
        wait_ms(1);
    atomic_store(phase, 3);
    return pdk_fail(err, PDK_E_IO_ERROR, 0, "it failed late");
}

static int counting(void *arg, pdk_error *err)
{
    (void)err;
    return atomic_fetch_add((atomic_int *)arg, 1) + 40;
}

static atomic_int dropped_args;
static void count_drop(void *arg)
{
    (void)arg;
    atomic_fetch_add(&dropped_args, 1);
}

TEST("any function as an operation: its answer and its error reach the caller; the host's thread goes on [R5, S2]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    atomic_int n = 2;
    atomic_store(&dropped_args, 0);
    pdk_op *op = pdk_op_call(rt, PDK_WORK_EXEC, 0, counting, count_drop, &n, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(pdk_op_answer(op), 42);
    CHECK(pdk_op_arg(op) == &n);
    CHECK_INT(atomic_load(&dropped_args), 0);
    pdk_op_free(op);
    EVENTUALLY(atomic_load(&dropped_args) == 1);

    atomic_int phase = 0;
    op = pdk_op_call(rt, PDK_WORK_EXEC, 0, failing, count_drop, &phase, NULL, NULL, &err);
    EVENTUALLY(atomic_load(&phase) == 1);
    CHECK_INT(pdk_op_poll(op, &err), 0); /* this thread was not held up */
    atomic_store(&phase, 2);
    CHECK_FAILS(op, PDK_E_IO_ERROR);
    CHECK(pdk_op_arg(op) == NULL);
    pdk_op_free(op);
    shut(rt);
}

TEST("cancelled while it runs, once or repeatedly: told when the worker has ended; its late failure is logged and replaces nothing [S3, F12, F13]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    for (int times = 1; times <= 3; times++) {
        atomic_int phase = 0;
        pdk_op *op = pdk_op_call(rt, PDK_WORK_ACQUIRE, 0, failing, NULL, &phase, NULL, NULL, &err);
        EVENTUALLY(atomic_load(&phase) == 1);
        for (int i = 0; i < times; i++)
            CHECK_INT(pdk_cancel(op), 0);
        CHECK_INT(pdk_op_wait(op, 0.02, &err), 0);
        atomic_store(&phase, 2);
        CHECK_FAILS(op, PDK_E_CANCELLED);
        CHECK_INT(atomic_load(&phase), 3);
        pdk_op_free(op);
    }
    shut(rt);
}

TEST("operations of no runtime have workers, a descriptor and a dispatch of their own")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    told t = { 0 };
    atomic_int n = 0;
    pdk_op *op = pdk_op_call(NULL, PDK_WORK_ACQUIRE, 5, counting, NULL, &n, on_end, &t, &err);
    REQUIRE(op != NULL);
    dispatch_until(NULL, &t.calls, 1);
    CHECK_INT(pdk_op_answer(op), 40);
    pdk_op_free(op);
}

TEST("a release that is cancelled in its close: `cancelled` reaches the caller, and what follows the close was done [Q27]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    pdk_box *box = boxed(rt, "a");
    gate_close("close");
    pdk_op *op = pdk_release_async(box, NULL, NULL, &err);
    EVENTUALLY(gate_of("close")->inside == 1);
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_FAILS(op, PDK_E_CANCELLED); /* the close was given up: it is bounded by its caller */
    CHECK_INT(gate_came("close"), 1);
    CHECK_INT(held_now(rt), 0);
    CHECK_INT(active_now(rt), 0); /* it was parked all the same */
    pdk_op_free(op);
    pdk_box_free(box);
    shut(rt);
}

TEST("a close that is cancelled, and a step after it too: the first cancellation is told, the later one is its cause [Q27, Q28]")
{
    for (int both = 0; both < 2; both++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_runtime *rt = gated("");
        pdk_box *box = boxed(rt, "a");
        pdk_error first = PDK_NO_ERROR, later = PDK_NO_ERROR;
        pdk_fail(&first, PDK_E_CANCELLED, 0, "close was cancelled");
        pdk_fail(&later, both ? PDK_E_CANCELLED : PDK_E_IO_ERROR, 0, "pause was cancelled");
        PDK_AUTO_ERROR noted = PDK_NO_ERROR;
        pdk_note_cancelled(&noted, &first);
        pdk_note_cancelled(&noted, &later);
        CHECK_HAS(noted.message, "close");
        CHECK(both ? noted.cause != NULL && strstr(noted.cause->message, "pause") != NULL : noted.cause == NULL);
        pdk_error_clear(&later);
        atomic_store(&gate_of("close")->fails, "cancelled");
        CHECK_INT(pdk_release(box, &err), -1); /* the blocking form */
        CHECK_KIND(err, PDK_E_CANCELLED);
        CHECK_INT(gate_came("close"), 1);
        CHECK_INT(active_now(rt), 0);
        pdk_box_free(box);
        shut(rt);
    }
}

TEST("a queued release that is cancelled leaves the box held, and a box that was freed meanwhile is released after all")
{
    for (int freed = 0; freed < 2; freed++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_runtime *rt = gated("workers = { max = 1 },");
        pdk_box *box = boxed(rt, "a"), *busy = boxed(rt, "b");
        gate_close("exec");
        pdk_op *work = pdk_exec_async(busy, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
        EVENTUALLY(gate_of("exec")->inside == 1);
        pdk_op *op = pdk_release_async(box, NULL, NULL, &err);
        if (freed)
            pdk_box_free(box);
        CHECK_INT(pdk_cancel(op), 0);
        CHECK_FAILS(op, PDK_E_CANCELLED);
        gate_open("exec");
        CHECK_INT(pdk_op_wait(work, 30, &err), 1);
        if (freed) {
            EVENTUALLY(held_now(rt) == 1);
        } else {
            CHECK_INT(held_now(rt), 2);
            pdk_box_free(box);
            CHECK_INT(held_now(rt), 1);
        }
        pdk_op_free(op);
        pdk_op_free(work);
        pdk_box_free(busy);
        shut(rt);
    }
}

/* ---- commands -------------------------------------------------------------------------------------------- */

TEST("a command that is cancelled while it runs is ended, and its own answer says so; queued, it never runs")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 4 },");
    pdk_box *box = boxed(rt, "a");
    gate_close("exec");
    pdk_op *op = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    EVENTUALLY(gate_of("exec")->inside == 1);
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    pdk_result r;
    CHECK_INT(pdk_op_result(op, &r), 1);
    CHECK_INT(r.outcome, PDK_CMD_CANCELLED);
    CHECK_STR(r.out, "begun\n");
    pdk_result_free(&r);
    CHECK_INT(pdk_op_result(op, &r), 0); /* taken */
    pdk_op_free(op);
    CHECK_INT(gate_came("exec"), 1);

    pdk_op *busy[4];
    for (int i = 0; i < 4; i++)
        busy[i] = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    EVENTUALLY(gate_came("exec") == 5);
    op = pdk_exec_async(box, &(pdk_command){ .command = "y" }, NULL, NULL, NULL, &err);
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_FAILS(op, PDK_E_CANCELLED); /* certainly not run: no result */
    CHECK_INT(pdk_op_result(op, &r), 0);
    pdk_op_free(op);
    gate_open("exec");
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pdk_op_wait(busy[i], 30, &err), 1);
        pdk_op_free(busy[i]);
    }
    CHECK_INT(gate_came("exec"), 5);
    pdk_box_free(box);
    shut(rt);
}

TEST("a command that nobody can end and that is cancelled is unknown, and the shell that it ran in is not used again")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    pdk_box *box = boxed(rt, "a");
    gate_close("exec");
    atomic_store(&gate_of("cancel")->fails, "unsupported");
    pdk_op *op = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    EVENTUALLY(gate_of("exec")->inside == 1);
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    pdk_result r;
    CHECK_INT(pdk_op_result(op, &r), 1);
    CHECK_INT(r.outcome, PDK_UNKNOWN);
    pdk_result_free(&r);
    pdk_op_free(op);
    gate_open("exec");
    CHECK_INT(gate_came("open_session"), 0);
    CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "y" }, &r, &err), 0);
    CHECK_INT(gate_came("open_session"), 1); /* a stand-in for the default shell */
    pdk_result_free(&r);
    pdk_box_free(box);
    shut(rt);
}

/* ---- without threads ------------------------------------------------------------------------------------- */

TEST("without threads the results are the same: what was submitted runs in tick and in wait, and nowhere else")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("threads = false,");
    told a = { 0 };
    pdk_request req = { .thread = "a" };
    pdk_op *op = pdk_acquire_async(rt, &req, on_end, &a, &err);
    CHECK_INT(gate_came("create"), 0);
    CHECK_INT(pdk_dispatch(rt, 10), 0);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(gate_came("create"), 1);
    CHECK_INT(a.calls, 0);
    CHECK_INT(pdk_dispatch(rt, 10), 1);
    CHECK_INT(a.rc, 1);
    pdk_op_free(op);
    pdk_op *second = acquire_op(rt, "a", NULL, 0), *third = acquire_op(rt, "b", NULL, 0);
    pdk_cancel(third);
    CHECK_FAILS(third, PDK_E_CANCELLED);
    pdk_box_free(box_of(second));
    CHECK_INT(gate_came("create"), 1);
    told e = { 0 };
    op = pdk_exec_async(a.box, &(pdk_command){ .command = "echo" }, on_output, on_end, &e, &err);
    CHECK_INT(pdk_op_wait(op, 30, &err), 1);
    CHECK_INT(e.calls, 1); /* told by the wait */
    CHECK_STR(e.output, "begun\necho");
    pdk_result_free(&e.result);
    pdk_op_free(op);
    pdk_op_free(third);
    op = pdk_acquire_async(rt, &(pdk_request){ .thread = "c", .timeout = 0.001 }, NULL, NULL, &err);
    wait_ms(5);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_FAILS(op, PDK_E_TIMEOUT); /* its time was over before anybody carried it out */
    CHECK_INT(gate_came("create"), 1);
    pdk_op_free(op);
    pdk_box_free(a.box);
    op = pdk_shutdown_async(rt, 0, NULL, NULL, &err);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(pdk_op_poll(op, &err), 1);
    pdk_op_free(op);
    pdk_free(rt);
}

TEST_MAIN
