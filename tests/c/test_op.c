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
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    struct pollfd p = { .fd = pdk_fd(rt, &err), .events = POLLIN };
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

TEST_MAIN
