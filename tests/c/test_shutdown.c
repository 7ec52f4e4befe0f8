/* test_shutdown.c -- shutdown while a background thread is at work, and the signals that ask for it. */
#include "world.h"

#include <signal.h>
#include <sys/wait.h>

static atomic_bool busy;
static double hang_for;

static int hang_list(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail;
    if (strcmp(name, "list") != 0)
        return 0;
    atomic_store(&busy, true);
    *seconds = hang_for;
    return 1;
}

static atomic_int ended_by_shutdown;
static void count_ended(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_info_str(pdk_view_of(record), "event"), *reason = pdk_info_str(pdk_view_of(record), "reason");
    atomic_fetch_add(&ended_by_shutdown, event != NULL && strcmp(event, "destroyed") == 0 && strcmp(reason, "shutdown") == 0);
}

TEST("an idle checker that does not stop: an error, no teardown begun; the next shutdown ends it all [P6]")
{
    pdk_runtime *rt = world_open("reap_interval = 0.05,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = world_acquire(rt, "t", "h");
    pdk_release(box, &err);
    atomic_store(&ended_by_shutdown, 0);
    CHECK_INT(pdk_runtime_on(rt, count_ended, NULL, &err), 0);
    hang_for = 6;
    atomic_store(&busy, false);
    world_hook = hang_list;
    while (!atomic_load(&busy))
        pdk_sleep_ns(1000 * 1000);
    CHECK_INT(pdk_shutdown(rt, &err), -1);
    CHECK(strstr(err.message, "idle checker") != NULL);
    CHECK_STR(err.stage, "shutdown");
    CHECK_INT(atomic_load(&world_destroys), 0);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        REQUIRE(e != NULL);
        CHECK_INT(e->state, PDK_WARM);
        CHECK(e->has_identity && e->reserved == 0);
    }
    world_hook = NULL;
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    CHECK_INT(atomic_load(&world_destroys), 1);
    CHECK_INT(atomic_load(&ended_by_shutdown), 1);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    CHECK_INT(atomic_load(&world_destroys), 1);
    {
        PDK_GUARD(rt->pool.registry);
        CHECK_INT((int)rt->pool.ids.count, 0);
    }
    pdk_free(rt);
}

static int slow_destroy_of_engine(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail;
    if (strcmp(name, "destroy") != 0)
        return 0;
    atomic_store(&busy, true);
    *seconds = 0.3;
    return 1;
}

static pdk_runtime *destroyer; /* fixed before the thread starts */
static void *destroy_it(void *arg)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = arg;
    CHECK_INT(pdk_destroy(destroyer, pdk_box_id(box), &err), 1);
    return NULL;
}

TEST("what a call in flight is tearing down is left to it: shutdown waits, and stops nothing twice [P1]")
{
    pdk_runtime *rt = destroyer = world_open("reap_interval = 3600,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = world_acquire(rt, "t", NULL);
    pdk_thread t;
    atomic_store(&busy, false);
    world_hook = slow_destroy_of_engine;
    CHECK_INT(pdk_thread_start(&t, "destroy", destroy_it, box), 0);
    while (!atomic_load(&busy))
        pdk_sleep_ns(1000 * 1000);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    pdk_thread_join(&t);
    CHECK_INT(atomic_load(&world_destroys), 1);
    CHECK_INT(atomic_load(&world_closes), 1);
    pdk_box_free(box);
    pdk_free(rt);
}

/* A store whose renewal hangs; all else is the memory store's. */
static pdk_lease *inner;
static atomic_bool renewal_hangs;
static atomic_int store_closes, store_renewals, store_releases;
static double renewal_takes = 6;
static int slow_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    (void)self;
    return pdk_lease_take(inner, id, floor, token, err);
}
static int slow_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    (void)self;
    return pdk_lease_claim_for_destroy(inner, id, floor, token, err);
}
static int slow_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    (void)self;
    if (atomic_load(&renewal_hangs)) {
        atomic_store(&busy, true);
        pdk_sleep_ns(pdk_seconds(renewal_takes));
    }
    atomic_fetch_add(&store_renewals, 1);
    return pdk_lease_renew(inner, id, out, err);
}
static int slow_release(void *self, const char *id, pdk_error *err)
{
    (void)self;
    atomic_fetch_add(&store_releases, 1);
    return pdk_lease_release(inner, id, err);
}
static int slow_owner(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    (void)self;
    return pdk_lease_owner_of(inner, id, out, err);
}
static int slow_close(void *self, pdk_error *err)
{
    (void)self, (void)err;
    atomic_fetch_add(&store_closes, 1);
    return 0;
}
static void slow_free(void *self)
{
    free(self);
    pdk_lease_free(inner);
}
static const pdk_lease_ops slow_ops = { .type = "memory", .take = slow_take, .claim = slow_take, .claim_for_destroy = slow_destroy,
                                        .renew = slow_renew, .release = slow_release, .owner_of = slow_owner, .close = slow_close,
                                        .free = slow_free };

TEST("a lease renewal that does not stop: an error that says so, the store stays open; the next shutdown completes [P7]")
{
    pdk_runtime *rt = world_open("reap_interval = 3600, ownership = { type = 'memory', ttl = 10, renew_interval = 0.05 },");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    inner = rt->lease; /* nothing is leased yet, so nobody is using it */
    rt->lease = pdk_lease_new(&slow_ops, malloc(1), &err);
    REQUIRE(rt->lease != NULL);
    pdk_box *box = world_acquire(rt, "t", "h");
    pdk_release(box, &err);
    atomic_store(&busy, false);
    atomic_store(&renewal_hangs, true);
    while (!atomic_load(&busy))
        pdk_sleep_ns(1000 * 1000);
    CHECK_INT(pdk_shutdown(rt, &err), -1);
    CHECK(strstr(err.message, "lease renewal") != NULL);
    CHECK_INT(atomic_load(&world_destroys), 0);
    CHECK_INT(atomic_load(&store_closes), 0);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        CHECK(e != NULL && e->state == PDK_WARM && e->has_identity && e->reserved == 0);
    }
    atomic_store(&renewal_hangs, false);
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    CHECK_INT(atomic_load(&world_destroys), 1);
    CHECK_INT(atomic_load(&store_closes), 1);
    pdk_free(rt);
}

static int slow_stop(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail;
    *seconds = 0.6;
    return strcmp(name, "destroy") == 0;
}

static atomic_int left_warnings;
static void count_left(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_info_str(pdk_view_of(record), "event");
    atomic_fetch_add(&left_warnings, event != NULL && strcmp(event, "lease_release_left") == 0);
}

/* A runtime with one unheld active sandbox on the slow store. */
static pdk_runtime *with_slow_store(pdk_box **box)
{
    pdk_runtime *rt = world_open("reap_interval = 3600, ownership = { type = 'memory', ttl = 10, renew_interval = 0.05 },");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    inner = rt->lease;
    rt->lease = pdk_lease_new(&slow_ops, malloc(1), &err);
    atomic_store(&renewal_hangs, false);
    *box = world_acquire(rt, "t", NULL);
    CHECK_INT(pdk_runtime_on(rt, count_left, NULL, &err), 0);
    return rt;
}

TEST("the `del` lease is renewed for as long as the stop runs, and released after it [M15]")
{
    pdk_box *box;
    pdk_runtime *rt = with_slow_store(&box);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = slow_stop;
    atomic_store(&store_renewals, 0);
    atomic_store(&store_releases, 0);
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK(atomic_load(&store_renewals) >= 3);
    CHECK_INT(atomic_load(&store_releases), 1);
    pdk_lease_owner owner;
    CHECK_INT(pdk_lease_owner_of(rt->lease, pdk_box_id(box), &owner, &err), 0);
    CHECK_INT(atomic_load(&left_warnings), 0);
    pdk_box_free(box);
    world_end(rt);
}

TEST("a renewal that does not end within 12 s: the release of the lease is left to it, with a warning [M15]")
{
    pdk_box *box;
    pdk_runtime *rt = with_slow_store(&box);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = slow_stop;
    renewal_takes = 14;
    atomic_store(&store_releases, 0);
    atomic_store(&left_warnings, 0);
    atomic_store(&busy, false);
    atomic_store(&renewal_hangs, true);
    while (!atomic_load(&busy))
        pdk_sleep_ns(1000 * 1000);
    pdk_ns before = pdk_now_monotonic();
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK(pdk_now_monotonic() - before > 11 * PDK_NS_PER_S);
    CHECK_INT(atomic_load(&store_releases), 0);
    CHECK_INT(atomic_load(&left_warnings), 1);
    atomic_store(&renewal_hangs, false);
    for (int i = 0; i < 600 && atomic_load(&store_releases) == 0; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    CHECK_INT(atomic_load(&store_releases), 1);
    renewal_takes = 6;
    pdk_box_free(box);
    world_end(rt);
}

/* ---- signals: each in a process of its own ---- */

static atomic_int former_calls, former_signal; /* a thread of paddock calls the handler */
static void former_handler(int number)
{
    former_signal = number;
    former_calls++;
}

static int fail_stop(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    return strcmp(name, "destroy") == 0 ? -1 : 0;
}

/* Runs fn in a child; its exit status, or 128 + signal. */
static int in_child(int (*fn)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0)
        _exit(fn());
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

static atomic_int failures_said;
static void count_failures(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_info_str(pdk_view_of(record), "event");
    atomic_fetch_add(&failures_said, event != NULL && strcmp(event, "shutdown_failed") == 0);
}

static int failing_shutdown(void)
{
    signal(SIGTERM, former_handler);
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime_on(rt, count_failures, NULL, &err);
    pdk_box_free(world_acquire(rt, "t", "h"));
    world_hook = fail_stop;
    kill(getpid(), SIGTERM);
    for (int i = 0; i < 300 && former_calls == 0; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    pdk_sleep_ns(50 * 1000 * 1000);
    return former_calls == 1 && former_signal == SIGTERM && atomic_load(&world_destroys) == 1 && failures_said == 1 ? 7 : 8;
}

static int default_disposition(void)
{
    signal(SIGTERM, SIG_DFL);
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    pdk_box_free(world_acquire(rt, "t", "h"));
    kill(getpid(), SIGTERM);
    for (int i = 0; i < 300; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    return 9;
}

static int ignored_signal(void)
{
    signal(SIGINT, SIG_IGN);
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    kill(getpid(), SIGINT);
    pdk_sleep_ns(100 * 1000 * 1000);
    struct sigaction now;
    sigaction(SIGINT, NULL, &now);
    pdk_box *box = world_acquire(rt, "t", "h"); /* still at work */
    bool fine = now.sa_handler == SIG_IGN && box != NULL;
    pdk_box_free(box);
    world_end(rt);
    sigaction(SIGTERM, NULL, &now);
    return fine && now.sa_handler == SIG_DFL ? 7 : 8; /* ours are gone with the last runtime */
}

static int reloads(void)
{
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    uint64_t before = pdk_policies_generation(rt->policies);
    kill(getpid(), SIGHUP);
    for (int i = 0; i < 300 && pdk_policies_generation(rt->policies) == before; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    bool fine = pdk_policies_generation(rt->policies) > before;
    world_end(rt);
    return fine ? 7 : 8;
}

static int without_option(void)
{
    signal(SIGTERM, former_handler);
    pdk_runtime *rt = world_open("reap_interval = 3600,");
    struct sigaction now;
    sigaction(SIGTERM, NULL, &now);
    bool fine = now.sa_handler == former_handler;
    world_end(rt);
    return fine ? 7 : 8;
}

static void former_ends(int number)
{
    _exit(number == SIGTERM ? 7 : 8);
}

/* A child of the host, which gets the signal: its own handler's business, and not the parent's runtime's. */
static int forked(void)
{
    signal(SIGTERM, former_ends);
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    pdk_box *box = world_acquire(rt, "t", "h");
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_tick(rt, &err) == 0 || err.kind != PDK_E_CLOSED)
            _exit(6);
        struct sigaction now;
        sigaction(SIGTERM, NULL, &now);
        if (now.sa_handler != former_ends)
            _exit(8);
        kill(getpid(), SIGTERM);
        _exit(7); /* under ThreadSanitizer, which runs no handlers in such a child */
    }
    bool fine = pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7;
    pdk_sleep_ns(50 * 1000 * 1000);
    fine = fine && atomic_load(&world_destroys) == 0;
    pdk_box_free(box);
    world_end(rt);
    return fine ? 7 : 8;
}

/* Runtimes that come and go while signals arrive: the thread ends each time, and starts again. */
static int comes_and_goes(void)
{
    signal(SIGTERM, former_handler);
    for (int i = 0; i < 20; i++) {
        pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
        if (i % 3 == 0)
            kill(getpid(), SIGTERM);
        world_end(rt);
    }
    pdk_runtime *rt = world_open("signals = true, reap_interval = 3600,");
    kill(getpid(), SIGTERM);
    for (int i = 0; i < 300 && former_calls < 8; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    world_end(rt);
    return former_calls == 8 ? 7 : 8; /* none is lost, none comes twice */
}

TEST("a forked child has no handler of ours, and a signal to it shuts nothing down [P9]")
{
    CHECK_INT(in_child(forked), 7);
}

TEST("runtimes with signals come and go [P9]")
{
    CHECK_INT(in_child(comes_and_goes), 7);
}

TEST("a signal while shutdown fails: the handler from before ours is called once with it [P8]")
{
    CHECK_INT(in_child(failing_shutdown), 7);
}

TEST("a default disposition is restored and the signal raised again, after the shutdown [P9]")
{
    CHECK_INT(in_child(default_disposition), 128 + SIGTERM);
}

TEST("an ignored signal stays ignored, and handlers go with the last runtime [P9]")
{
    CHECK_INT(in_child(ignored_signal), 7);
}

TEST("HUP reloads the policies [P9]")
{
    CHECK_INT(in_child(reloads), 7);
}

TEST("without the option no handler is installed [P9]")
{
    CHECK_INT(in_child(without_option), 7);
}

TEST_MAIN
