/* What a runtime still answers while something in it is stuck: a policy that loops, a process that stood still. */
#include "world.h"

#include <signal.h>
#include <sys/wait.h>

/* ---- a policy that loops ---- */

static atomic_bool over;
static atomic_int looped;

static void *ask_for_ever(void *arg)
{
    pdk_runtime *rt = arg;
    while (!atomic_load(&over)) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_box *box = NULL;
        char thread[32];
        snprintf(thread, sizeof thread, "t%d", atomic_fetch_add(&looped, 1));
        pdk_request req = { .thread = thread };
        CHECK_INT(pdk_acquire(rt, &req, &box, &err), -1);
        CHECK_KIND(err, PDK_E_POLICY_ERROR);
    }
    return NULL;
}

/* The longest that one question about the runtime took, in seconds. */
static double slowest_answer(pdk_runtime *rt, double seconds)
{
    double slowest = 0, until = test_now() + seconds;
    for (int i = 0; test_now() < until; i++) {
        PDK_AUTO_PACK out = PDK_NO_PACK;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_identity who = { "u", "held", 1, 4 };
        double before = test_now();
        int rc = i % 4 == 0   ? pdk_runtime_list(rt, &out, &err)
                 : i % 4 == 1 ? pdk_runtime_stats(rt, &out, &err)
                 : i % 4 == 2 ? pdk_runtime_capabilities(rt, &out, &err)
                              : pdk_runtime_inspect(rt, NULL, &who, &out, &err);
        double took = test_now() - before;
        CHECK_INT(rc, 0);
        slowest = took > slowest ? took : slowest;
        pdk_sleep_ns(1000 * 1000);
    }
    return slowest;
}

TEST("while a policy loops on several threads, the runtime's status and its reload come within a second [B167]")
{
    pdk_runtime *rt = world_open(
        "policies = { mounts = { name = 'loop.lua', source = [[ return { compose = function(ctx)\n"
        "  if ctx.identity.thread == 'held' then return {} end\n"
        "  while true do pcall(function() while true do end end) end end } ]] } },");
    pdk_box *box = world_acquire(rt, "held", "h");
    pdk_thread threads[3];
    atomic_store(&over, false);
    for (int i = 0; i < 3; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "asker", ask_for_ever, rt), 0);
    CHECK(slowest_answer(rt, 1.5) < 1 + TEST_SLACK);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    double before = test_now();
    CHECK_INT(pdk_reload(rt, &err), 0); /* of exactly that policy */
    CHECK_WITHIN(before, 1);
    pdk_result result;
    CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "echo", .command_len = 4 }, &result, &err), 0);
    CHECK_STR(result.out, "echo");
    pdk_result_free(&result);
    atomic_store(&over, true);
    for (int i = 0; i < 3; i++)
        pdk_thread_join(&threads[i]);
    CHECK(atomic_load(&looped) > 3); /* each was aborted, and the next one served */
    pdk_box_free(box);
    world_end(rt);
}

/* ---- gaps ---- */

static atomic_int gaps;
static double gap_seconds;
static char gap_reason[40];

static void count_gaps(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_view_str(pdk_view_get(pdk_view_of(record), "event"), NULL);
    if (event == NULL || strcmp(event, "clock_gap") != 0)
        return;
    gap_seconds = 0;
    pdk_view_num(pdk_view_get(pdk_view_of(record), "seconds"), &gap_seconds);
    snprintf(gap_reason, sizeof gap_reason, "%s", pdk_view_str(pdk_view_get(pdk_view_of(record), "reason"), NULL));
    atomic_fetch_add(&gaps, 1);
}

TEST("a pass that comes far too late says once for how long there was none; what is held stays [B073]")
{
    pdk_runtime *rt = world_open("clock = 'manual', threads = false, idle_timeout = 600, reap_interval = 60,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    atomic_store(&gaps, 0);
    CHECK_INT(pdk_runtime_on(rt, count_gaps, NULL, &err), 0);
    pdk_box *box = world_acquire(rt, "held", "h");
    for (int i = 0; i < 5; i++) { /* a host that is late now and then is no gap */
        CHECK_INT(pdk_runtime_advance(rt, i == 3 ? 170 : 60, 0, &err), 0);
        CHECK_INT(pdk_tick(rt, &err), 0);
    }
    CHECK_INT(atomic_load(&gaps), 0);
    CHECK_INT(pdk_runtime_advance(rt, 720, 0, &err), 0);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(atomic_load(&gaps), 1);
    CHECK_NUM(gap_seconds, 720, 1);
    CHECK_STR(gap_reason, "no pass was made in time");
    CHECK_INT(atomic_load(&world_destroys), 0);
    pdk_result result;
    CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "echo", .command_len = 4 }, &result, &err), 0);
    pdk_result_free(&result);
    pdk_box_free(box);
    world_end(rt);
}

TEST("a machine that slept is told from a process that stood still [B073]")
{
    pdk_runtime *rt = world_open("threads = false, reap_interval = 60,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    atomic_store(&gaps, 0);
    CHECK_INT(pdk_runtime_on(rt, count_gaps, NULL, &err), 0);
    CHECK_INT(pdk_tick(rt, &err), 0);
    {
        PDK_GUARD(rt->lock); /* as it looks after a sleep: the boot clock went on, the other did not */
        rt->pass_boottime -= 720 * PDK_NS_PER_S;
    }
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(atomic_load(&gaps), 1);
    CHECK_NUM(gap_seconds, 720, 1);
    CHECK_STR(gap_reason, "the machine slept");
    world_end(rt);
}

static int slow_create(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail;
    *seconds = 5;
    return strcmp(name, "create") == 0 ? 1 : 0;
}

static atomic_int turned;
static double waited[2];

static void *wait_for_turn(void *arg)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    double before = test_now();
    pdk_request req = { .thread = "slow", .timeout = 1 };
    CHECK_INT(pdk_acquire(arg, &req, &box, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    waited[atomic_fetch_add(&turned, 1)] = test_now() - before;
    return NULL;
}

static void *take_turn(void *arg)
{
    pdk_box_free(world_acquire(arg, "slow", "a"));
    return NULL;
}

/* In a process of its own, which is stopped for `stopped` seconds as soon as it has written to `ready`. */
static void live_through_a_stop(int ready, double stopped)
{
    pdk_runtime *rt = world_open("reap_interval = 0.4, idle_timeout = 1,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    atomic_store(&gaps, 0);
    CHECK_INT(pdk_runtime_on(rt, count_gaps, NULL, &err), 0);
    pdk_box *box = world_acquire(rt, "held", "h");
    pdk_thread holder, waiters[2];
    world_hook = slow_create;
    CHECK_INT(pdk_thread_start(&holder, "holder", take_turn, rt), 0);
    pdk_sleep_ns(200 * 1000 * 1000);
    for (int i = 0; i < 2; i++)
        CHECK_INT(pdk_thread_start(&waiters[i], "waiter", wait_for_turn, rt), 0);
    pdk_sleep_ns(600 * 1000 * 1000);
    CHECK_INT(atomic_load(&gaps), 0);
    CHECK_INT(write(ready, "x", 1), 1);
    pdk_sleep_ns(100 * 1000 * 1000); /* the stop happens here */
    for (int i = 0; i < 2; i++)
        pdk_thread_join(&waiters[i]); /* they write in the order in which they end */
    for (int i = 0; i < 2; i++) {
        CHECK(waited[i] > 0.9 && waited[i] < stopped + 1.5); /* their deadline passed meanwhile: no further wait */
    }
    pdk_thread_join(&holder);
    CHECK_INT(atomic_load(&gaps), 1);
    CHECK(gap_seconds > 0.9 * stopped && gap_seconds < stopped + 1.5);
    CHECK_STR(gap_reason, "no pass was made in time");
    pdk_result result;
    CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "echo", .command_len = 4 }, &result, &err), 0);
    pdk_result_free(&result);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        CHECK(e != NULL && e->state == PDK_ACTIVE && e->reserved == 0); /* idle beyond its limit, but held */
    }
    pdk_box_free(box);
    world_end(rt);
}

TEST("after a stop of the whole process waiters end at once, one line says so, and what is held lives [B073]")
{
    int ready[2];
    const double stopped = 2.5;
    REQUIRE(pipe(ready) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        test_dir[0] = '\0'; /* a folder of its own */
        live_through_a_stop(ready[1], stopped);
        test_tmpdir_remove();
        _exit(__atomic_load_n(&test_failures, __ATOMIC_SEQ_CST) > 0);
    }
    char x;
    close(ready[1]);
    CHECK_INT(read(ready[0], &x, 1), 1);
    close(ready[0]);
    kill(pid, SIGSTOP);
    pdk_sleep_ns((pdk_ns)(stopped * 1e9));
    kill(pid, SIGCONT);
    int status = -1;
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK_INT(status, 0);
}

TEST_MAIN
