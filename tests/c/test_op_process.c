/* Asynchronous commands in real sandboxes of the process backend: output while they run, and cancellation as a fact. */
#include "op_engine.h"

#include "box.h"

static pdk_runtime *processes(void)
{
    char text[1024];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(text, sizeof text, "return { backend = 'process', user = 'u', log = 'off', state_dir = '%s/process' }", test_tmpdir());
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    if (rt == NULL)
        fprintf(stderr, "%s\n", err.message);
    return rt;
}

typedef struct seen {
    atomic_size_t len;
    char text[1 << 16];
    atomic_int calls;
} seen;

static void on_output(void *ctx, int stream, const void *bytes, size_t len)
{
    seen *s = ctx;
    CHECK(stream == 1 || stream == 2);
    size_t at = atomic_load(&s->len);
    if (at + len < sizeof s->text)
        memcpy(s->text + at, bytes, len);
    atomic_store(&s->len, at + len);
}

static void on_end(void *ctx, pdk_op *op)
{
    (void)op;
    atomic_fetch_add(&((seen *)ctx)->calls, 1);
}

static pdk_result exec_now(pdk_box *box, const char *command)
{
    pdk_result r;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (!CHECK_INT(pdk_exec(box, &(pdk_command){ .command = command, .timeout = 20 }, &r, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    return r;
}

static bool can_run(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    bool ok = rt != NULL && pdk_acquire(rt, &(pdk_request){ .thread = "probe" }, &box, &err) == 0;
    pdk_box_free(box);
    return ok;
}

TEST("what a command prints is there while it runs, byte for byte, before its end is told")
{
    pdk_runtime *rt = processes();
    if (!can_run(rt))
        SKIP("no sandboxes can be made here");
    pdk_box *box = boxed(rt, "t");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    static seen s;
    pdk_command cmd = { .command = "echo one; while [ ! -e go ]; do sleep 0.01; done; echo two >&2; exit 3", .timeout = 60 };
    pdk_op *op = pdk_exec_async(box, &cmd, on_output, on_end, &s, &err);
    REQUIRE(op != NULL);
    EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&s.len) == 4));
    CHECK_MEM(s.text, 4, "one\n", 4);
    CHECK_INT(pdk_op_poll(op, &err), 0);
    pdk_result r = exec_now(box, "true"); /* another one runs beside it */
    pdk_result_free(&r);
    CHECK_INT(pdk_write(box, "/workspace/go", "", 0, &err), 0);
    EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&s.calls) == 1));
    CHECK_MEM(s.text, atomic_load(&s.len), "one\ntwo\n", 8);
    CHECK_INT(pdk_op_result(op, &r), 1);
    CHECK_INT(r.outcome, PDK_COMPLETED);
    CHECK_INT(r.exit_code, 3);
    CHECK_STR(r.out, "one\n");
    CHECK_STR(r.err, "two\n");
    pdk_result_free(&r);
    pdk_op_free(op);
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_free(rt);
}

TEST("a command whose host takes no output waits, as in a full pipe, and goes on when it does")
{
    pdk_runtime *rt = processes();
    if (!can_run(rt))
        SKIP("no sandboxes can be made here");
    pdk_box *box = boxed(rt, "t");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    static seen s;
    pdk_command cmd = { .command = "head -c 1000000 /dev/zero; touch through", .timeout = 60 };
    pdk_op *op = pdk_exec_async(box, &cmd, on_output, on_end, &s, &err);
    REQUIRE(op != NULL);
    EVENTUALLY(pdk_ops_count(rt->ops).ready == 1);
    CHECK_INT(pdk_op_poll(op, &err), 0);
    EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&s.calls) == 1));
    CHECK_INT(atomic_load(&s.len), 1000000);
    pdk_result r;
    CHECK_INT(pdk_op_result(op, &r), 1);
    CHECK_INT(r.out_len, 1000000);
    pdk_result_free(&r);
    pdk_op_free(op);
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_free(rt);
}

static pdk_result polled_result(pdk_op *op)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_result r = { .exit_code = -1 };
    EVENTUALLY(pdk_op_poll(op, &err) != 0);
    CHECK_INT(pdk_op_poll(op, &err), 1);
    CHECK_INT(pdk_op_result(op, &r), 1);
    return r;
}

TEST("a command whose host never takes its output ends at its own limit, which its outcome says, and no later")
{
    pdk_runtime *rt = processes();
    if (!can_run(rt))
        SKIP("no sandboxes can be made here");
    pdk_box *box = boxed(rt, "t");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    static seen s;
    pdk_op *op = pdk_exec_async(box, &(pdk_command){ .command = "yes", .timeout = 3 }, on_output, on_end, &s, &err);
    REQUIRE(op != NULL);
    pdk_result r = polled_result(op); /* nobody dispatches */
    CHECK_INT(r.outcome, PDK_HARD_TIMEOUT);
    CHECK_INT(r.exit_code, 124);
    CHECK(r.out_len > 0);
    EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&s.calls) == 1));
    CHECK_INT(atomic_load(&s.len), r.out_len); /* and none of it is lost */
    pdk_result_free(&r);
    pdk_op_free(op);
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_free(rt);
}

TEST("a shutdown does not wait for a host that takes no output [B184]")
{
    pdk_runtime *rt = processes();
    if (!can_run(rt))
        SKIP("no sandboxes can be made here");
    pdk_box *box = boxed(rt, "t");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    static seen s;
    pdk_op *op = pdk_exec_async(box, &(pdk_command){ .command = "yes", .timeout = 3600 }, on_output, on_end, &s, &err);
    REQUIRE(op != NULL);
    EVENTUALLY(pdk_ops_count(rt->ops).ready == 1);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_result r = polled_result(op);
    CHECK(r.outcome == PDK_UNKNOWN || r.outcome == PDK_CMD_CANCELLED);
    pdk_result_free(&r);
    pdk_op_free(op);
    pdk_box_free(box);
    pdk_free(rt);
}

#define COUNT "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^47[0-9][0-9]$'"

static void cancel_one(pdk_box *box, pdk_command cmd, const char *what)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    seen *s = calloc(1, sizeof *s);
    REQUIRE(s != NULL);
    cmd.timeout = 60;
    pdk_op *op = pdk_exec_async(box, &cmd, on_output, NULL, s, &err);
    REQUIRE(op != NULL);
    EVENTUALLY((pdk_dispatch(box->rt, 10), atomic_load(&s->len) >= 6));
    pdk_result r;
    for (int i = 0, there = 0; i < 500 && there < 3; i++) {
        r = exec_now(box, COUNT);
        there = atoi(r.out);
        pdk_result_free(&r);
        CHECK(i < 499);
    }
    CHECK_INT(pdk_cancel(op), 0);
    CHECK_INT(pdk_cancel(op), 0); /* again changes nothing */
    if (!CHECK_INT(pdk_op_wait(op, 30, &err), 1))
        fprintf(stderr, "%s: %s\n", what, err.message);
    CHECK_INT(pdk_cancel(op), 1);
    CHECK_INT(pdk_op_result(op, &r), 1);
    if (!CHECK_INT(r.outcome, PDK_CMD_CANCELLED))
        fprintf(stderr, "%s: %s %s\n", what, pdk_outcome_name(r.outcome), r.reason);
    CHECK_STR(r.out, "begun\n");
    pdk_result_free(&r);
    pdk_op_free(op);
    free(s);
    r = exec_now(box, COUNT);
    CHECK_STR(r.out, "0\n"); /* nothing of it is left */
    pdk_result_free(&r);
}

TEST("a running command that is cancelled is ended with all that it started, and its outcome says so; the next one runs as ever [B178]")
{
    pdk_runtime *rt = processes();
    if (!can_run(rt))
        SKIP("no sandboxes can be made here");
    pdk_box *box = boxed(rt, "t");
    static const char *const env[] = { "A=b", NULL };
    const char *const stubborn = "trap '' TERM INT; sleep 4711 & (setsid sleep 4712 &) ; echo begun; sleep 4713; sleep 4714";
    cancel_one(box, (pdk_command){ .command = stubborn }, "default shell");
    cancel_one(box, (pdk_command){ .command = stubborn, .env = env }, "with an environment");
    cancel_one(box, (pdk_command){ .command = stubborn, .scope = "s" }, "in a scope");
    cancel_one(box, (pdk_command){ .command = stubborn, .scope = "s" }, "in that scope again");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_free(rt);
}

int main(int argc, char **argv)
{
    if (test_valgrind()) {
        puts("skip  sandboxes: valgrind knows fork and threads only, not a clone that shares memory");
        puts("0 passed, 0 failed, 1 skipped");
        return 0;
    }
    return test_main(argc, argv);
}
