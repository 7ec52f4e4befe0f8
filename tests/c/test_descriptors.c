/* The budget of descriptors: what exceeds it waits its turn, and no class of work takes all of it. */
#include "op_engine.h"

#include "descriptors.h"

static pdk_ns soon(void)
{
    return pdk_now_monotonic() + PDK_NS_PER_S / 50;
}

/* What is taken here is opened, too, as any real taker does: what is open is counted anew ten times a second. */
static int opened[600], n_opened;
static int take(int n, const pdk_limit *limit, pdk_ns deadline, pdk_error *err)
{
    int rc = pdk_descriptors_take(n, limit, deadline, err);
    for (int i = 0; rc == 0 && i < n && n_opened < 600; i++)
        opened[n_opened++] = dup(STDOUT_FILENO);
    return rc;
}

static void give(int n)
{
    for (int i = 0; i < n && n_opened > 0; i++)
        close(opened[--n_opened]);
    pdk_descriptors_give(n);
}

/* So many are left for paddock. */
static int leave_free(int n)
{
    int limit = test_fds() + 64 + n;
    pdk_descriptors_pretend(limit);
    return limit;
}

TEST("what exceeds the budget waits until some are given back, or until its limit or its cancellation ends that")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    leave_free(10);
    CHECK_INT(take(6, &PDK_NO_LIMIT, soon(), &err), 0);
    CHECK_INT(take(6, &PDK_NO_LIMIT, soon(), &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_STR(err.reason, "no_descriptors");
    CHECK_HAS(err.message, "ulimit");
    pdk_limit limit = { .deadline = soon() };
    CHECK_INT(take(6, &limit, PDK_NEVER, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    atomic_bool cancelled = true;
    limit = (pdk_limit){ .deadline = PDK_NEVER, .cancelled = &cancelled };
    CHECK_INT(take(6, &limit, PDK_NEVER, &err), -1);
    CHECK_KIND(err, PDK_E_CANCELLED);
    CHECK_INT(take(4, &PDK_NO_LIMIT, soon(), &err), 0);
    give(6);
    CHECK_INT(take(6, &PDK_NO_LIMIT, soon(), &err), 0);
    give(6);
    give(4);
    CHECK_INT(take(500, &PDK_NO_LIMIT, soon(), &err), 0); /* alone: it would never have its turn */
    give(500);
    CHECK_INT(pdk_descriptors_taken(), 0);
    pdk_descriptors_pretend(0);
}

static int take_all(void *arg, pdk_error *err)
{
    int n = 0;
    (void)arg;
    while (take(1, &PDK_NO_LIMIT, pdk_now_monotonic(), err) == 0)
        n++;
    for (int i = 0; i < n; i++)
        give(1);
    return n;
}

TEST("acquires leave a quarter of it to others, commands an eighth: a hung engine keeps no teardown from its connection")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = gated("");
    int most[PDK_WORK_CLASSES];
    for (int c = 0; c < PDK_WORK_CLASSES; c++) {
        leave_free(80);
        pdk_op *op = pdk_op_call(rt, (pdk_work_class)c, 0, take_all, NULL, NULL, NULL, NULL, &err);
        CHECK_INT(pdk_op_wait(op, 30, &err), 1);
        most[c] = pdk_op_answer(op);
        pdk_op_free(op);
    }
    CHECK(most[PDK_WORK_ACQUIRE] <= 60 && most[PDK_WORK_ACQUIRE] >= 50);
    CHECK(most[PDK_WORK_EXEC] <= 70 && most[PDK_WORK_EXEC] > most[PDK_WORK_ACQUIRE]);
    CHECK(most[PDK_WORK_TEARDOWN] <= 80 && most[PDK_WORK_TEARDOWN] > most[PDK_WORK_EXEC]);
    pdk_descriptors_pretend(0);
    shut(rt);
}

TEST("what is taken within a taker is part of it: it waits for no more while it holds some")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    leave_free(8);
    CHECK_INT(take(8, &PDK_NO_LIMIT, soon(), &err), 0);
    pdk_descriptors_cover(true);
    CHECK_INT(take(3, &PDK_NO_LIMIT, soon(), &err), 0);
    give(3);
    pdk_descriptors_cover(false);
    CHECK_INT(pdk_descriptors_taken(), 8);
    give(8);
    pdk_descriptors_pretend(0);
}

TEST_MAIN
