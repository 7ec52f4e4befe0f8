/* test_turns.c -- turns that are asked for without a thread that waits: the serializer's queues alone, and acquires in them. */
#include "actors.h"

#include <fcntl.h>

/* ---- the serializer alone ---- */

typedef struct asker {
    pdk_waiter w;
    pdk_turn turn;
    atomic_int called;
} asker;

static void called(void *ctx)
{
    asker *a = ctx;
    atomic_fetch_add(&a->called, 1);
}

static asker new_asker(void)
{
    return (asker){ .w = { .granted = called }, .turn = PDK_NO_TURN };
}

static int ask(pdk_serial *s, asker *a, pdk_error *err)
{
    a->w.ctx = a;
    return pdk_turn_ask(s, "k", 1, &a->w, &a->turn, err);
}

static int ask_id(pdk_serial *s, asker *a, const char *id, pdk_error *err)
{
    a->w.ctx = a;
    return pdk_turn_ask_id(s, id, &a->w, &a->turn, err);
}

static const char *turns_file(void)
{
    static char path[300];
    snprintf(path, sizeof path, "%s/turns", test_tmpdir());
    return path;
}

TEST("a turn that was asked for comes in the order of asking, and to nobody twice [F1, F2]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_serial *s = pdk_serial_new(NULL, true, NULL);
    asker a[5];
    for (int i = 0; i < 5; i++) {
        a[i] = new_asker();
        CHECK_INT(ask(s, &a[i], &err), i == 0 ? 1 : 0);
    }
    CHECK_INT(ask(s, &a[0], &err), 1); /* it is still ours */
    CHECK_INT(ask(s, &a[3], &err), 0); /* it still waits, once */
    CHECK(pdk_turn_withdraw(s, &a[2].w));
    CHECK(!pdk_turn_withdraw(s, &a[2].w));
    CHECK(!pdk_turn_withdraw(s, &a[0].w));
    static const int order[] = { 0, 1, 3, 4 };
    for (int i = 0; i < 4; i++) {
        CHECK_INT(ask(s, &a[order[i]], &err), 1);
        for (int k = i + 1; k < 4; k++)
            CHECK_INT(atomic_load(&a[order[k]].called), 0);
        pdk_turn_leave(&a[order[i]].turn);
    }
    for (int i = 0; i < 5; i++)
        CHECK_INT(atomic_load(&a[i].called), i == 1 || i == 3 || i == 4);
    CHECK_INT(pdk_serial_keys(s), 0);
    pdk_serial_free(s);
}

TEST("closing calls everybody who asked, and they learn that it is closed [F15]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_serial *s = pdk_serial_new(turns_file(), true, NULL), *peer = pdk_serial_new(turns_file(), true, NULL);
    asker has = new_asker(), waits = new_asker(), byte = new_asker(), late = new_asker();
    pdk_turn elsewhere = PDK_NO_TURN;
    CHECK_INT(pdk_turn_enter_id(peer, "x", &elsewhere, &PDK_NO_LIMIT, &err), 0);
    CHECK_INT(ask(s, &has, &err), 1);
    CHECK_INT(ask(s, &waits, &err), 0);
    CHECK_INT(ask_id(s, &byte, "x", &err), 0);
    pdk_serial_close(s);
    wait_until(is_set, &byte.called);
    CHECK_INT(atomic_load(&waits.called), 1);
    CHECK_INT(ask(s, &waits, &err), -1);
    CHECK_KIND(err, PDK_E_CLOSED);
    CHECK_INT(ask_id(s, &byte, "x", &err), -1);
    CHECK_KIND(err, PDK_E_CLOSED);
    CHECK_INT(ask(s, &late, &err), -1);
    CHECK_KIND(err, PDK_E_CLOSED);
    CHECK_INT(ask(s, &has, &err), 1);
    pdk_turn_leave(&has.turn);
    CHECK_INT(pdk_serial_keys(s), 0);
    pdk_turn_leave(&elsewhere);
    pdk_serial_free(s);
    pdk_serial_free(peer);
}

TEST("a byte that another process has is waited for without a thread of the caller, and given to one [F2, F9]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_serial *s = pdk_serial_new(turns_file(), true, NULL), *peer = pdk_serial_new(turns_file(), true, NULL);
    asker a[3] = { new_asker(), new_asker(), new_asker() };
    pdk_turn elsewhere = PDK_NO_TURN;
    CHECK_INT(pdk_turn_enter_id(peer, "x", &elsewhere, &PDK_NO_LIMIT, &err), 0);
    for (int i = 0; i < 3; i++)
        CHECK_INT(ask_id(s, &a[i], "x", &err), 0);
    pdk_sleep_ns(30 * 1000 * 1000);
    CHECK_INT(atomic_load(&a[0].called), 0);
    CHECK(pdk_turn_withdraw(s, &a[0].w)); /* the next one looks for the byte itself */
    CHECK_INT(atomic_load(&a[0].called), 0);
    CHECK_INT(atomic_load(&a[1].called), 1);
    CHECK_INT(ask_id(s, &a[1], "x", &err), 0);
    pdk_turn_leave(&elsewhere);
    for (int i = 0; i < 2000 && atomic_load(&a[1].called) < 2; i++)
        pdk_sleep_ns(1000 * 1000);
    CHECK_INT(ask_id(s, &a[1], "x", &err), 1);
    pdk_limit soon = { .deadline = pdk_now_monotonic() + 30 * 1000 * 1000 };
    CHECK_INT(pdk_turn_enter_id(peer, "x", &elsewhere, &soon, &err), -1);
    CHECK_INT(atomic_load(&a[2].called), 0);
    pdk_turn_leave_soon(&a[1].turn);
    wait_until(is_set, &a[2].called);
    CHECK_INT(ask_id(s, &a[2], "x", &err), 1);
    pdk_turn_leave(&a[2].turn);
    CHECK_INT(pdk_turn_enter_id(peer, "x", &elsewhere, &PDK_NO_LIMIT, &err), 0);
    pdk_turn_leave(&elsewhere);
    CHECK_INT(pdk_serial_keys(s), 0);
    pdk_serial_free(s);
    pdk_serial_free(peer);
}

TEST("without threads nobody looks for a byte but who polls [F2]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_serial *s = pdk_serial_new(turns_file(), false, NULL), *peer = pdk_serial_new(turns_file(), false, NULL);
    asker a = new_asker(), b = new_asker();
    pdk_turn elsewhere = PDK_NO_TURN;
    CHECK_INT(pdk_turn_enter_id(peer, "x", &elsewhere, &PDK_NO_LIMIT, &err), 0);
    CHECK_INT(ask_id(s, &a, "x", &err), 0);
    CHECK_INT(ask_id(s, &b, "y", &err), 1);
    CHECK_INT(pdk_serial_poll(s), 1);
    pdk_turn_leave(&elsewhere);
    CHECK_INT(atomic_load(&a.called), 0);
    CHECK_INT(pdk_serial_poll(s), 0);
    CHECK_INT(atomic_load(&a.called), 1);
    CHECK_INT(ask_id(s, &a, "x", &err), 1);
    pdk_turn_leave_soon(&a.turn);
    pdk_turn_leave_soon(&b.turn);
    CHECK_INT(pdk_serial_keys(s), 0);
    pdk_serial_free(s);
    pdk_serial_free(peer);
}

static atomic_bool stop_taking;
static void *take_and_leave(void *arg)
{
    pdk_serial *peer = arg;
    while (!atomic_load(&stop_taking)) {
        pdk_turn turn = PDK_NO_TURN;
        if (CHECK_INT(pdk_turn_enter_id(peer, "x", &turn, &PDK_NO_LIMIT, NULL), 0))
            pdk_turn_leave(&turn);
    }
    return NULL;
}

TEST("whoever withdraws while the byte is being looked for leaves nothing locked [F3, F9]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_serial *s = pdk_serial_new(turns_file(), true, NULL), *peer = pdk_serial_new(turns_file(), true, NULL);
    pdk_thread t;
    int got = 0, withdrew = 0;
    atomic_store(&stop_taking, false);
    CHECK_INT(pdk_thread_start(&t, "peer", take_and_leave, peer), 0);
    for (int i = 0; i < 3000; i++) {
        asker a = new_asker();
        int rc = ask_id(s, &a, "x", &err);
        for (volatile int spin = 0; rc == 0 && spin < i % 50 * 1000; spin++)
            ;
        if (rc == 0 && pdk_turn_withdraw(s, &a.w))
            withdrew++;
        else
            got++;
        CHECK_INT(atomic_load(&a.called), rc == 0 && a.turn.serial != NULL);
        pdk_turn_leave_soon(&a.turn);
    }
    atomic_store(&stop_taking, true);
    pdk_thread_join(&t);
    CHECK(got > 0);
    pdk_turn turn = PDK_NO_TURN;
    pdk_limit soon = { .deadline = pdk_now_monotonic() + 2 * PDK_NS_PER_S };
    CHECK_INT(pdk_turn_enter_id(peer, "x", &turn, &soon, &err), 0);
    pdk_turn_leave(&turn);
    CHECK_INT(pdk_serial_keys(s), 0);
    pdk_serial_free(s);
    pdk_serial_free(peer);
}

/* ---- acquires in it ---- */

TEST("a waiting acquire takes no thread, and goes on once the one before it has left, not before [F1, F2]")
{
    enum { N = 100 };
    static actor a[N];
    pdk_runtime *rt = gated_open("reap_interval = 3600,", NULL);
    memset(a, 0, sizeof a);
    char id[64] = "";
    for (int i = 0; i < N; i++) {
        a[i] = (actor){ .rt = rt, .name = "t" };
        REQUIRE(actor_begin(&a[i]));
        CHECK_INT(pdk_acquire_ask(a[i].p, &a[i].err), i == 0);
    }
    actor other = { .rt = rt, .name = "other" };
    actor_start(&other); /* another identity is not held up */
    actor_join(&other, PDK_OK);
    for (int i = 0; i < N; i++) { /* one thread does the work of all */
        for (int k = i; k < N; k++)
            CHECK_INT(atomic_load(&a[k].granted), k == i && i > 0);
        CHECK_INT(pdk_acquire_step(a[i].p, &a[i].box, &a[i].err), 1);
        pdk_acquire_end(a[i].p);
        if (i == 0)
            snprintf(id, sizeof id, "%s", pdk_box_id(a[i].box));
        CHECK_STR(pdk_box_id(a[i].box), id);
        CHECK_STR(pdk_box_source(a[i].box), i == 0 ? "created" : "active");
        actor_clear(&a[i]);
    }
    CHECK_INT(calls_of("create"), 2);
    actor_clear(&other);
    gated_end(rt);
}

TEST("a cancelled waiter leaves nothing behind, alone or with a live waiter after it, and never runs [F3, F5]")
{
    for (int live = 0; live <= 1; live++) {
        pdk_runtime *rt = gated_open("reap_interval = 3600,", NULL);
        actor first = { .rt = rt, .name = "t" }, gone = first, after = first;
        REQUIRE(actor_begin(&first) && actor_begin(&gone) && actor_begin(&after));
        CHECK_INT(pdk_acquire_ask(first.p, &first.err), 1);
        CHECK_INT(pdk_acquire_ask(gone.p, &gone.err), 0);
        if (live)
            CHECK_INT(pdk_acquire_ask(after.p, &after.err), 0);
        CHECK(pdk_acquire_abandon(gone.p));
        CHECK(!pdk_acquire_abandon(gone.p)); /* it ends once */
        CHECK_INT(pdk_acquire_step(first.p, &first.box, &first.err), 1);
        CHECK_INT(atomic_load(&gone.granted), 0);
        CHECK_INT(pdk_acquire_step(gone.p, &gone.box, &gone.err), -1);
        CHECK_KIND(gone.err, PDK_E_CANCELLED);
        if (live) {
            CHECK_INT(atomic_load(&after.granted), 1);
            CHECK_INT(pdk_acquire_step(after.p, &after.box, &after.err), 1);
        }
        CHECK_INT(pdk_serial_keys(rt->serial), 0);
        pdk_acquire_end(first.p);
        pdk_acquire_end(gone.p);
        pdk_acquire_end(after.p); /* or it was never asked for */
        CHECK_INT(calls_of("create"), 1);
        actor_clear(&first);
        actor_clear(&gone);
        actor_clear(&after);
        gated_end(rt);
    }
}

TEST("one whose turn has come, cancelled before anybody steps it, never runs and passes the turn on [F5]")
{
    pdk_runtime *rt = gated_open("reap_interval = 3600,", NULL);
    actor first = { .rt = rt, .name = "t" }, queued = first, after = first;
    actor_start(&first);
    actor_join(&first, PDK_OK);
    int before = atomic_load(&engine_calls_seen);
    REQUIRE(actor_begin(&queued) && actor_begin(&after));
    CHECK_INT(pdk_acquire_ask(queued.p, &queued.err), 1);
    CHECK_INT(pdk_acquire_ask(after.p, &after.err), 0);
    actor_cancel(&queued);
    CHECK(pdk_acquire_abandon(queued.p));
    CHECK_INT(atomic_load(&after.granted), 1);
    CHECK_INT(pdk_acquire_step(queued.p, &queued.box, &queued.err), -1);
    CHECK_KIND(queued.err, PDK_E_CANCELLED);
    CHECK_INT(atomic_load(&engine_calls_seen), before); /* zero calls, then and later */
    CHECK(pdk_acquire_abandon(after.p));
    CHECK_INT(atomic_load(&engine_calls_seen), before);
    pdk_acquire_end(queued.p);
    pdk_acquire_end(after.p);
    actor_clear(&first);
    actor_clear(&queued);
    gated_end(rt);
}

TEST("cancelled and stepped all the same: it ends before it begins [F5]")
{
    pdk_runtime *rt = gated_open("reap_interval = 3600,", NULL);
    actor a = { .rt = rt, .name = "t" };
    REQUIRE(actor_begin(&a));
    CHECK_INT(pdk_acquire_ask(a.p, &a.err), 1);
    actor_cancel(&a);
    CHECK_INT(pdk_acquire_step(a.p, &a.box, &a.err), -1);
    CHECK_KIND(a.err, PDK_E_CANCELLED);
    CHECK_INT(atomic_load(&engine_calls_seen), 0);
    pdk_acquire_end(a.p);
    actor_clear(&a);
    gated_end(rt);
}

TEST("a request is copied, and a wrong one is refused before it is")
{
    pdk_runtime *rt = gated_open("reap_interval = 3600,", NULL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_acquire_calls calls = { .granted = actor_granted };
    PDK_AUTO_PACK req = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&req);
    pdk_kv_cstr(&req, &m, "image", "some-image");
    pdk_end(&req, &m);
    char thread[] = "t\0with a nul", user[] = "somebody", holder[] = "the holder";
    pdk_acquire_spec spec = { .user = user, .user_len = sizeof user - 1, .thread = thread, .thread_len = sizeof thread - 1,
                              .holder = holder, .requirements = pdk_view_of(&req) };
    pdk_acquiring *a = pdk_acquire_begin(rt, &spec, NULL, &calls, &err);
    REQUIRE(a != NULL);
    memset(thread, 'x', sizeof thread);
    memset(user, 'x', sizeof user);
    memset(holder, 'x', sizeof holder);
    memset(req.data, 'x', req.len);
    pdk_box *box = NULL;
    CHECK_INT(pdk_acquire_ask(a, &err), 1);
    CHECK_INT(pdk_acquire_step(a, &box, &err), 1);
    REQUIRE(box != NULL);
    CHECK_STR(pdk_box_holder(box), "the holder");
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_by_identity(&rt->pool, &(pdk_identity){ "somebody", "t\0with a nul", 8, 12 });
        REQUIRE(e != NULL);
        CHECK_STR(pdk_info_str(pdk_entry_requirements(e), "image"), "some-image");
    }
    pdk_acquire_end(a);
    spec.holder = "the holder"; /* its live binding is its answer, without a turn and without a wait */
    spec.user = "somebody";
    spec.thread = "t\0with a nul";
    spec.requirements = PDK_NO_VIEW;
    a = pdk_acquire_begin(rt, &spec, NULL, &calls, &err);
    pdk_box *again = NULL;
    CHECK_INT(pdk_acquire_ask(a, &err), 1);
    CHECK_INT(pdk_serial_keys(rt->serial), 0);
    CHECK_INT(pdk_acquire_step(a, &again, &err), 1);
    pdk_acquire_end(a);
    pdk_box_drop(again);
    pdk_box_free(box);
    static const struct { const char *what; pdk_acquire_spec spec; } wrong[] = {
        { "user", { .user = "u", .user_len = 5000, .thread = "t", .thread_len = 1 } },
        { "thread", { .thread = "t", .thread_len = 5000 } },
        { "holder", { .thread = "t", .thread_len = 1, .holder = "" } },
        { "timeout", { .thread = "t", .thread_len = 1, .timeout = -1 } },
        { "holder", { .thread = "t", .thread_len = 1, .holder = "h", .no_holder = true } },
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK(pdk_acquire_begin(rt, &wrong[i].spec, NULL, &calls, &err) == NULL);
        CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
        CHECK_HAS(err.message, wrong[i].what);
    }
    gated_end(rt);
    pdk_acquire_end(NULL);
}

static void *reset_it(void *arg)
{
    CHECK_INT(pdk_runtime_reset(arg, NULL), 0);
    return NULL;
}

TEST("reset ends those that wait with `closed` within 2 s, and a further one at once [F15]")
{
    for (int sync = 0; sync <= 1; sync++) {
        pdk_runtime *rt = gated_open("reap_interval = 3600,", "create");
        actor runs = { .rt = rt, .name = "t", .sync = sync }, waits = runs, late = runs;
        actor_start(&runs);
        wait_until(somebody_in_gate, NULL);
        actor_start(&waits);
        REQUIRE(sync || actor_begin(&late));
        pdk_thread reset;
        double before = test_now();
        CHECK_INT(pdk_thread_start(&reset, "reset", reset_it, rt), 0);
        actor_join(&waits, PDK_E_CLOSED);
        CHECK_WITHIN(before, 2);
        if (!sync) {
            CHECK_INT(pdk_acquire_ask(late.p, &late.err), -1);
            CHECK_KIND(late.err, PDK_E_CLOSED);
            pdk_acquire_end(late.p);
        }
        atomic_store(&gate_at, NULL); /* the one in its critical section still leaves cleanly */
        actor_join(&runs, PDK_E_CLOSED);
        pdk_thread_join(&reset);
        actor_clear(&runs);
        actor_clear(&waits);
        actor_clear(&late);
        CHECK_INT(calls_of("destroy"), 1); /* what it had made is taken back */
        gated_end(rt);
    }
}

TEST_MAIN
