/* Operations where no thread can be started: the limit of the user's processes, or of the container's. */
#include "op_engine.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

static atomic_bool no_threads;

/* In place of the C library's. */
int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*main)(void *), void *arg)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (real == NULL)
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return atomic_load(&no_threads) ? EAGAIN : real(thread, attr, main, arg);
}

TEST("where no thread can be started nothing is submitted, and what was asked for stays as it was")
{
    pdk_runtime *rt = gated("");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL, *none = NULL;
    pdk_request req = { .thread = "t", .timeout = 5 };
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &box, &err), 0); /* on this thread */
    atomic_store(&no_threads, true);
    CHECK(pdk_acquire_async(rt, &req, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_NO_MEMORY);
    CHECK_INT(pdk_acquire(rt, &req, &none, &err), -1);
    CHECK_KIND(err, PDK_E_NO_MEMORY);
    CHECK(pdk_exec_async(box, &(pdk_command){ .command = "x" }, NULL, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_NO_MEMORY);
    CHECK(pdk_release_async(box, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_NO_MEMORY);
    CHECK(pdk_shutdown_async(rt, 1, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_NO_MEMORY);
    CHECK(nothing_under_way(rt));
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    atomic_store(&no_threads, false);
    pdk_result r;
    CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "x" }, &r, &err), 0); /* it is held as before */
    pdk_result_free(&r);
    pdk_box_free(box);
    shut(rt);
}

static void count(void *ctx, pdk_op *op)
{
    (void)op;
    atomic_fetch_add((atomic_int *)ctx, 1);
}

static void *acquire_here(void *rt) /* on this very thread */
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &box, &err), 0);
    pdk_box_free(box);
    return NULL;
}

static void *threads_again(void *arg)
{
    while (!atomic_load(&no_threads))
        wait_ms(1);
    wait_ms(50);
    atomic_store(&no_threads, false);
    return arg;
}

enum { WAITS, POLLS, DISPATCHES };

/* It gets its turn while no thread can be started; when one can be again, its host's next look at it starts one. */
static void granted_without_threads(int host)
{
    pdk_runtime *rt = gated("");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pthread_t holder, later;
    atomic_int told = 0;
    gate_close("create");
    pthread_create(&holder, NULL, acquire_here, rt);
    EVENTUALLY(gate_came("create") == 1);
    pdk_op *op = pdk_acquire_async(rt, &(pdk_request){ .thread = "t" }, host == DISPATCHES ? count : NULL, &told, &err);
    REQUIRE(op != NULL);
    CHECK_INT(pdk_ops_count(rt->ops).parked, 1);
    pthread_create(&later, NULL, threads_again, NULL);
    atomic_store(&no_threads, true);
    gate_open("create");
    if (host == WAITS)
        CHECK_INT(pdk_op_wait(op, 20, &err), 1);
    else if (host == POLLS)
        EVENTUALLY(pdk_op_poll(op, &err) == 1);
    else
        EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&told) == 1));
    pthread_join(holder, NULL);
    pthread_join(later, NULL);
    pdk_op_free(op);
    shut(rt);
}

TEST("one that gets its turn while no thread can be started has one as soon as one can be: waited for, polled, or with a callback [F2]")
{
    for (int host = WAITS; host <= DISPATCHES; host++)
        granted_without_threads(host);
}

TEST("a deadline is kept where the thread that looks at deadlines cannot be started [B201]")
{
    pdk_runtime *rt = gated("");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    gate_close("create");
    pdk_op *hangs = acquire_op(rt, "t", NULL, 0);
    EVENTUALLY(gate_came("create") == 1); /* the only worker */
    atomic_store(&no_threads, true);
    pdk_request req = { .thread = "t", .timeout = 0.1 };
    pdk_op *waits = pdk_acquire_async(rt, &req, NULL, NULL, &err), *polls = pdk_acquire_async(rt, &req, NULL, NULL, &err);
    atomic_int told = 0;
    pdk_op *dispatches = pdk_acquire_async(rt, &req, count, &told, &err);
    REQUIRE(waits != NULL && polls != NULL && dispatches != NULL);
    CHECK_FAILS(waits, PDK_E_TIMEOUT);
    EVENTUALLY(pdk_op_poll(polls, &err) == -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    EVENTUALLY((pdk_dispatch(rt, 10), atomic_load(&told) == 1));
    atomic_store(&no_threads, false);
    pdk_op_free(waits);
    pdk_op_free(polls);
    pdk_op_free(dispatches);
    gate_open("create");
    pdk_box_free(box_of(hangs));
    shut(rt);
}

TEST_MAIN
