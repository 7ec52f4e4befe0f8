/* The budget of descriptors: what exceeds it waits its turn, and no class of work takes all of it. */
#include "op_engine.h"

#include "descriptors.h"

static pdk_ns soon(void)
{
    return pdk_now_monotonic() + PDK_NS_PER_S / 50;
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
    CHECK_INT(pdk_descriptors_take(6, &PDK_NO_LIMIT, soon(), &err), 0);
    CHECK_INT(pdk_descriptors_take(6, &PDK_NO_LIMIT, soon(), &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_STR(err.reason, "no_descriptors");
    CHECK_HAS(err.message, "ulimit");
    pdk_limit limit = { .deadline = soon() };
    CHECK_INT(pdk_descriptors_take(6, &limit, PDK_NEVER, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    atomic_bool cancelled = true;
    limit = (pdk_limit){ .deadline = PDK_NEVER, .cancelled = &cancelled };
    CHECK_INT(pdk_descriptors_take(6, &limit, PDK_NEVER, &err), -1);
    CHECK_KIND(err, PDK_E_CANCELLED);
    CHECK_INT(pdk_descriptors_take(4, &PDK_NO_LIMIT, soon(), &err), 0);
    pdk_descriptors_give(6);
    CHECK_INT(pdk_descriptors_take(6, &PDK_NO_LIMIT, soon(), &err), 0);
    pdk_descriptors_give(6);
    pdk_descriptors_give(4);
    CHECK_INT(pdk_descriptors_take(500, &PDK_NO_LIMIT, soon(), &err), 0); /* alone: it would never have its turn */
    pdk_descriptors_give(500);
    CHECK_INT(pdk_descriptors_taken(), 0);
    pdk_descriptors_pretend(0);
}

static int take_all(void *arg, pdk_error *err)
{
    int n = 0;
    (void)arg;
    while (pdk_descriptors_take(1, &PDK_NO_LIMIT, pdk_now_monotonic(), err) == 0)
        n++;
    for (int i = 0; i < n; i++)
        pdk_descriptors_give(1);
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
    CHECK_INT(pdk_descriptors_take(8, &PDK_NO_LIMIT, soon(), &err), 0);
    pdk_descriptors_cover(true);
    CHECK_INT(pdk_descriptors_take(3, &PDK_NO_LIMIT, soon(), &err), 0);
    pdk_descriptors_give(3);
    pdk_descriptors_cover(false);
    CHECK_INT(pdk_descriptors_taken(), 8);
    pdk_descriptors_give(8);
    pdk_descriptors_pretend(0);
}

TEST_MAIN
