/* Turns and workers of asynchronous operations: what waits takes no worker, nobody is starved, the host's thread does none of the
 * work. */
#include "op_engine.h"

#include "proc.h"

#include <fcntl.h>

static int parked(pdk_runtime *rt)
{
    return pdk_ops_count(rt->ops).parked;
}

TEST("waiting for one's turn takes no worker: with all of them busy, one that waits completes once the holder leaves, and not before [F2, F3]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 2 },");
    pdk_box *other = boxed(rt, "other");
    gate_close("exec");
    gate_close("create");
    pdk_op *holder = acquire_op(rt, "t", NULL, 0);
    pdk_op *busy = pdk_exec_async(other, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    EVENTUALLY(gate_of("create")->inside == 1 && gate_of("exec")->inside == 1); /* both workers */
    pdk_op *waits[10], *leaves[10];
    for (int i = 0; i < 10; i++) {
        waits[i] = acquire_op(rt, "t", NULL, 0);
        leaves[i] = acquire_op(rt, "t", NULL, 0);
    }
    CHECK_INT(parked(rt), 20);
    pdk_ops_counts n = pdk_ops_count(rt->ops);
    CHECK_INT(n.workers.threads, 2);
    CHECK_INT(n.workers.queued, 0);
    for (int i = 0; i < 10; i++) { /* between live ones, and told at once: no worker is needed for that either */
        CHECK_INT(pdk_cancel(leaves[i]), 0);
        CHECK_INT(pdk_op_poll(leaves[i], &err), -1);
        CHECK_KIND(err, PDK_E_CANCELLED);
        pdk_op_free(leaves[i]);
        CHECK_INT(pdk_op_poll(waits[i], &err), 0);
    }
    gate_open("create");
    pdk_box *box = box_of(holder);
    for (int i = 0; i < 10; i++) { /* one worker is busy all the time */
        pdk_box *same = box_of(waits[i]);
        CHECK_STR(pdk_box_id(same), pdk_box_id(box));
        pdk_box_free(same);
    }
    CHECK_INT(gate_came("create"), 2);
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    gate_open("exec");
    CHECK_INT(pdk_op_wait(busy, 30, &err), 1);
    pdk_op_free(busy);
    pdk_box_free(box);
    pdk_box_free(other);
    shut(rt);
}

TEST("two workers, one holder and two waiters of one identity: the holder's remaining work is not starved, all get the same id [F6]")
{
    pdk_runtime *rt = gated("workers = { max = 2 },");
    gate_close("create");
    gate_close("ready");
    pdk_op *ops[3];
    for (int i = 0; i < 3; i++)
        ops[i] = acquire_op(rt, "t", NULL, 0);
    EVENTUALLY(gate_of("create")->inside == 1 && parked(rt) == 2);
    gate_open("create");
    EVENTUALLY(gate_of("ready")->inside == 1);
    CHECK_INT(parked(rt), 2);
    CHECK_INT(pdk_ops_count(rt->ops).running, 1);
    gate_open("ready");
    char id[64] = "";
    for (int i = 0; i < 3; i++) {
        pdk_box *box = box_of(ops[i]);
        if (i == 0)
            snprintf(id, sizeof id, "%s", pdk_box_id(box));
        CHECK_STR(pdk_box_id(box), id);
        pdk_box_free(box);
    }
    CHECK_INT(gate_of("create")->most, 1);
    shut(rt);
}

TEST("the health check, and all else that an asynchronous acquire asks, runs on a worker, never on the host's thread [F7]")
{
    pdk_runtime *rt = gated("");
    pdk_box *first = boxed(rt, "t");
    gate_close("alive");
    pdk_op *op = acquire_op(rt, "t", NULL, 0);
    EVENTUALLY(gate_of("alive")->inside == 1);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_op_poll(op, &err), 0); /* this thread goes on meanwhile */
    CHECK_INT(pdk_dispatch(rt, 10), 0);
    gate_open("alive");
    pdk_box *again = box_of(op);
    static const char *const asked[] = { "alive", "create", "ready", "discover", "connect" };
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        CHECK(gate_came(asked[i]) > 0);
        CHECK(gate_of(asked[i])->thread != pdk_thread_self());
    }
    pdk_box_free(first);
    pdk_box_free(again);
    shut(rt);
}

TEST("another process has the id's lock: taking it, waiting for it and giving it back hold nobody's thread up [F8, F9]")
{
    pdk_runtime *rt = gated("");
    pdk_box *before = boxed(rt, "t"); /* to learn its id, and that its lock is free again */
    char path[4200];
    snprintf(path, sizeof path, "%s/turns", rt->config.state_dir);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int peer = open(path, O_RDWR | O_CLOEXEC);
    CHECK_INT(pdk_lock_range(peer, F_WRLCK, 0, 0, &err), 1); /* all of it: each id's byte */
    CHECK_INT(pdk_destroy(rt, pdk_box_id(before), &err), 0);
    pdk_op *ops[50];
    for (int i = 0; i < 50; i++) {
        char name[16];
        snprintf(name, sizeof name, "other%d", i);
        ops[i] = acquire_op(rt, name, NULL, 0);
    }
    EVENTUALLY(parked(rt) == 50);
    EVENTUALLY(pdk_ops_count(rt->ops).workers.running == 0); /* fifty wait, no worker does */
    CHECK_INT(gate_came("create"), 1);
    for (int i = 0; i < 25; i++) {
        CHECK_INT(pdk_cancel(ops[i]), 0);
        CHECK_INT(pdk_op_poll(ops[i], &err), -1);
        pdk_op_free(ops[i]);
    }
    close(peer); /* it lets go */
    for (int i = 25; i < 50; i++)
        pdk_box_free(box_of(ops[i]));
    CHECK_INT(gate_came("create"), 26);
    EVENTUALLY(pdk_serial_keys(rt->serial) == 0);
    peer = open(path, O_RDWR | O_CLOEXEC);
    EVENTUALLY(pdk_lock_range(peer, F_WRLCK, 0, 0, &err) == 1); /* nothing stays locked */
    close(peer);
    pdk_box_free(before);
    shut(rt);
}

TEST("a hung engine does not eat all workers: each class has a share that the others cannot take")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("workers = { max = 16 },");
    pdk_box *box = boxed(rt, "t"), *idle = boxed(rt, "idle");
    char id[64];
    snprintf(id, sizeof id, "%s", pdk_box_id(idle));
    pdk_box_free(idle);
    gate_close("create");
    pdk_op *ops[40];
    for (int i = 0; i < 40; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        ops[i] = acquire_op(rt, name, NULL, 0);
    }
    EVENTUALLY(gate_of("create")->inside == 12); /* 16 less two shares of 2 */
    pdk_op *exec = pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err);
    pdk_op *destroy = pdk_destroy_async(rt, id, 0, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(exec, 30, &err), 1);
    CHECK_INT(pdk_op_wait(destroy, 30, &err), 1);
    CHECK_INT(pdk_op_answer(destroy), 1);
    CHECK_INT(gate_of("create")->inside, 12);
    CHECK_INT(pdk_ops_count(rt->ops).workers.queued, 28);
    gate_open("create");
    for (int i = 0; i < 40; i++)
        pdk_box_free(box_of(ops[i]));
    CHECK(pdk_ops_count(rt->ops).workers.threads <= 16);
    pdk_op_free(exec);
    pdk_op_free(destroy);
    pdk_box_free(box);
    shut(rt);
}

TEST("a thousand acquires at once over an engine that takes its time: as many at work as there are workers, each told once")
{
    pdk_runtime *rt = gated("workers = { max = 200 },");
    enum { N = 1000 };
    static pdk_op *ops[N];
    gate_close("create");
    for (int i = 0; i < N; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        ops[i] = acquire_op(rt, name, NULL, 0);
    }
    EVENTUALLY(gate_of("create")->inside == 184);
    gate_open("create");
    for (int i = 0; i < N; i++)
        pdk_box_free(box_of(ops[i]));
    CHECK_INT(gate_came("create"), N);
    CHECK_INT(held_now(rt), 0);
    shut(rt);
}

TEST_MAIN
