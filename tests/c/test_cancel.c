/* test_cancel.c -- acquires that are cancelled: what has started is drained under its turns and fences, nothing new is begun, what
 * it would have handed out is given back. Each test runs in both forms: on a thread that waits, and stepped. */
#include "actors.h"

#define QUIET "reap_interval = 3600,"
#define BOTH  for (int sync = 0; sync <= 1; sync++)

static void open_gate(const char *next)
{
    atomic_store(&gate_at, next);
}

/* An unheld warm sandbox of the identity, or (held) one that `holder` has. */
static void make_one(pdk_runtime *rt, const char *name, const char *holder, bool parked)
{
    actor a = { .rt = rt, .name = name, .holder = holder, .sync = true };
    actor_start(&a);
    actor_join(&a, PDK_OK);
    if (parked)
        CHECK_INT(pdk_release(a.box, NULL), 0);
    if (a.box != NULL)
        pdk_box_drop(a.box);
}

TEST("cancelled inside reuse or reclaim: the next one starts when that has ended, never two at once [F4]")
{
    BOTH for (int warm = 0; warm <= 1; warm++) {
        pdk_runtime *rt = gated_open(QUIET, NULL);
        make_one(rt, "t", "h0", warm);
        open_gate("alive");
        actor first = { .rt = rt, .name = "t", .holder = "h1", .sync = sync }, second = { .rt = rt, .name = "t", .sync = sync };
        actor_start(&first);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&first);
        actor_start(&second);
        pdk_sleep_ns(20 * 1000 * 1000);
        CHECK_INT(calls_of("alive"), 1);
        CHECK_INT(atomic_load(&first.done), 0);
        open_gate(NULL);
        actor_join(&first, PDK_E_CANCELLED);
        actor_join(&second, PDK_OK);
        CHECK_INT(calls_of("alive"), 2);
        CHECK_INT(calls_of("create"), 1);
        CHECK_INT(calls_of("discover"), 1); /* of the first acquire of all */
        if (second.box != NULL)
            CHECK_INT(look_at(rt, pdk_box_id(second.box)).holders, warm ? 0 : 1);
        char bound[64];
        CHECK_INT(pdk_runtime_binding(rt, "h1", bound, NULL), 0);
        actor_clear(&first);
        actor_clear(&second);
        gated_end(rt);
    }
}

TEST("cancelled while another process has the id's lock: within 0.5 s, nothing stays locked, discover is not called [F9]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, NULL);
        contender peer;
        contender_open(&peer, rt, "t");
        contender_start(&peer);
        wait_until(is_set, &peer.has);
        actor a = { .rt = rt, .name = "t", .sync = sync };
        actor_start(&a);
        pdk_sleep_ns(30 * 1000 * 1000);
        CHECK_INT(atomic_load(&a.done), 0);
        double before = test_now();
        actor_cancel(&a);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_WITHIN(before, 0.5);
        CHECK_INT(calls_of("discover"), 0);
        CHECK_INT(pdk_serial_keys(rt->serial), 0);
        pdk_thread_join(&peer.t);
        pdk_turn_leave(&peer.turn);
        contender_start(&peer); /* it gets the lock anew, at once */
        pdk_thread_join(&peer.t);
        contender_close(&peer);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("another process has the id's lock: the acquire goes on when it lets go [F2]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, NULL);
        contender peer;
        contender_open(&peer, rt, "t");
        contender_start(&peer);
        pdk_thread_join(&peer.t);
        actor a = { .rt = rt, .name = "t", .sync = sync };
        actor_start(&a);
        pdk_sleep_ns(20 * 1000 * 1000);
        CHECK_INT(atomic_load(&a.done), 0);
        contender_close(&peer);
        actor_join(&a, PDK_OK);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("cancelled, also twice, inside discover: the lock is held until that returns, and nothing is created [F10, F12]")
{
    BOTH for (int there = 0; there <= 1; there++) {
        pdk_runtime *rt = gated_open(QUIET, "discover");
        contender peer;
        contender_open(&peer, rt, "t");
        atomic_store(&found_generation, there ? 7 : 0);
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        contender_start(&peer);
        pdk_sleep_ns(20 * 1000 * 1000);
        actor_cancel(&a);
        pdk_sleep_ns(10 * 1000 * 1000);
        CHECK_INT(atomic_load(&peer.has), 0);
        CHECK_INT(atomic_load(&a.done), 0);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        wait_until(is_set, &peer.has);
        pdk_thread_join(&peer.t);
        CHECK_INT(calls_of("create"), 0);
        CHECK_INT(calls_of("destroy"), 0);
        CHECK_INT(look_at(rt, peer.id).state, -1);
        contender_close(&peer);
        actor_clear(&a);
        gated_end(rt);
    }
}

/* Cancelled twice inside `gate`, a step of the sequence that creates; what is left of it, when a contender gets the lock. */
static looks cancelled_in_sequence(const char *gate, const char *holder, int sync)
{
    pdk_runtime *rt = gated_open(QUIET, gate);
    contender peer;
    contender_open(&peer, rt, "t");
    actor a = { .rt = rt, .name = "t", .holder = holder, .sync = sync };
    actor_start(&a);
    wait_until(somebody_in_gate, NULL);
    actor_cancel(&a);
    contender_start(&peer);
    pdk_sleep_ns(10 * 1000 * 1000);
    actor_cancel(&a);
    pdk_sleep_ns(20 * 1000 * 1000);
    CHECK_INT(atomic_load(&peer.has), 0);
    CHECK_INT(atomic_load(&a.done), 0);
    open_gate(NULL);
    actor_join(&a, PDK_E_CANCELLED);
    pdk_thread_join(&peer.t);
    CHECK_INT(calls_of("create"), 1);
    CHECK_INT(calls_of("destroy"), 0);
    CHECK_INT(events_of("drained_work_failed"), 0);
    looks then = peer.then, after = look_at(rt, peer.id);
    CHECK_INT(then.state, after.state);
    CHECK_INT(then.holders, after.holders);
    CHECK(!then.reserved);
    contender_close(&peer);
    actor_clear(&a);
    gated_end(rt);
    return then;
}

TEST("cancelled twice inside create, ready or register: it is registered and given back before the lock is [F11, F12, F14, B049]")
{
    static const char *const gates[] = { "create", "ready", "connect" };
    BOTH for (size_t i = 0; i < 3; i++) {
        looks held = cancelled_in_sequence(gates[i], "h", sync), unheld = cancelled_in_sequence(gates[i], NULL, sync);
        CHECK_INT(held.state, PDK_WARM);
        CHECK_INT(held.holders, 0);
        CHECK_INT(unheld.state, PDK_WARM);
    }
}

static pdk_runtime *bound_by_other; /* fixed while on_event is set */
static void bind_other(const char *event, const char *id)
{
    if (strcmp(event, "acquired") == 0)
        CHECK_INT(pdk_runtime_retain(bound_by_other, id, "other", NULL, true, NULL), 0);
}

TEST("what a cancelled acquire produced stays active when another holder has bound it [F14]")
{
    BOTH {
        pdk_runtime *rt = bound_by_other = gated_open(QUIET, "create");
        char id[64], bound[64];
        id_of(rt, "t", id);
        on_event = bind_other;
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_INT(look_at(rt, id).state, PDK_ACTIVE);
        CHECK_INT(look_at(rt, id).holders, 1);
        CHECK_INT(pdk_runtime_binding(rt, "h", bound, NULL), 0);
        CHECK_INT(pdk_runtime_binding(rt, "other", bound, NULL), 1);
        CHECK_INT(calls_of("destroy"), 0);
        CHECK_INT(pdk_runtime_release(rt, "other", NULL), 0);
        CHECK_INT(look_at(rt, id).state, PDK_WARM);
        actor_clear(&a);
        gated_end(rt);
    }
}

static pdk_runtime *parked_in;
static atomic_int parked_in_turn;
static void look_at_turns(const char *event, const char *id)
{
    (void)id;
    if (strcmp(event, "parked") == 0)
        atomic_store(&parked_in_turn, (int)pdk_serial_keys(parked_in->serial));
}

TEST("a cancelled acquire releases before it gives its turns up, and a holder keeps the binding that it had [F14]")
{
    BOTH {
        pdk_runtime *rt = parked_in = gated_open(QUIET, "create");
        on_event = look_at_turns;
        atomic_store(&parked_in_turn, 0);
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_INT(atomic_load(&parked_in_turn), 2);
        actor_clear(&a);

        make_one(rt, "t", "kept", false);
        open_gate("alive");
        actor again = { .rt = rt, .name = "t", .holder = "fresh", .sync = sync };
        actor_start(&again);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&again);
        open_gate(NULL);
        actor_join(&again, PDK_E_CANCELLED);
        char bound[64];
        CHECK_INT(pdk_runtime_binding(rt, "kept", bound, NULL), 1);
        CHECK_INT(look_at(rt, bound).state, PDK_ACTIVE);
        actor_clear(&again);
        gated_end(rt);
    }
}

static bool never(void *ctx)
{
    (void)ctx;
    return false;
}

static bool always(void *ctx)
{
    (void)ctx;
    return true;
}

TEST("cancelled at the last moment: what is at hand is given back, a binding from before is not; kept is kept [F14]")
{
    pdk_runtime *rt = gated_open(QUIET, NULL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    atomic_bool cancelled = false;
    pdk_acquire_spec spec = { .thread = "t", .thread_len = 1, .holder = "h" };
    pdk_box *box = NULL;
    for (int bound = 0; bound <= 1; bound++) {
        pdk_acquire_calls calls = { .granted = actor_granted, .keep = never };
        if (bound)
            make_one(rt, "t", "h", false);
        pdk_acquiring *a = pdk_acquire_begin(rt, &spec, &cancelled, &calls, &err);
        CHECK_INT(pdk_acquire_ask(a, &err), 1);
        CHECK_INT(pdk_acquire_step(a, &box, &err), -1);
        CHECK_KIND(err, PDK_E_CANCELLED);
        CHECK(box == NULL);
        pdk_acquire_end(a);
        char id[64];
        CHECK_INT(pdk_runtime_binding(rt, "h", id, NULL), bound);
        id_of(rt, "t", id);
        CHECK_INT(look_at(rt, id).state, bound ? PDK_ACTIVE : PDK_WARM);
    }
    pdk_acquire_calls calls = { .granted = actor_granted, .keep = always };
    atomic_store(&cancelled, true); /* asked before it was cancelled, says its owner: the answer counts */
    spec.holder = NULL;
    spec.no_holder = true;
    atomic_store(&cancelled, false);
    pdk_acquiring *a = pdk_acquire_begin(rt, &spec, &cancelled, &calls, &err);
    CHECK_INT(pdk_acquire_ask(a, &err), 1);
    CHECK_INT(pdk_acquire_step(a, &box, &err), 1);
    pdk_acquire_end(a);
    pdk_box_free(box);
    gated_end(rt);
}

TEST("work that fails while it is drained is logged; the answer is `cancelled` with that failure as its cause [F13, B183]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, "create");
        atomic_store(&fails_at, "create");
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK(a.err.cause != NULL && a.err.cause->kind == PDK_E_BACKEND_ERROR);
        CHECK_INT(events_of("drained_work_failed"), 1);
        CHECK_INT(events_of("acquire_failed"), 0);
        CHECK_INT(events_of("acquire_cancelled"), 1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("cancelled, and the rollback's stop fails: `cancelled`, the stop is logged and made again later [B183, B178]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, "create");
        char id[64];
        id_of(rt, "t", id);
        atomic_store(&no_at, "ready");
        atomic_store(&fails_at, "destroy");
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        open_gate("destroy");
        wait_until(somebody_in_gate, NULL);
        while (calls_of("destroy") == 0)
            pdk_sleep_ns(1000 * 1000);
        actor_cancel(&a); /* again, during the delete: it goes on */
        pdk_sleep_ns(10 * 1000 * 1000);
        CHECK_INT(atomic_load(&a.done), 0);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_INT(events_of("rollback_failed"), 1);
        CHECK(look_at(rt, id).retry);
        CHECK_INT(calls_of("destroy"), 1);
        atomic_store(&fails_at, NULL);
        atomic_store(&no_at, NULL);
        actor next = { .rt = rt, .name = "t", .sync = sync };
        actor_start(&next);
        actor_join(&next, PDK_OK);
        CHECK_INT(calls_of("destroy"), 2);
        CHECK_INT(calls_of("create"), 2);
        actor_clear(&a);
        actor_clear(&next);
        gated_end(rt);
    }
}

TEST("cancelled during create and during its delete: the delete ends, nothing is left [B178]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, "create");
        char id[64];
        id_of(rt, "t", id);
        atomic_store(&no_at, "ready");
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a);
        open_gate("destroy");
        while (calls_of("destroy") == 0)
            pdk_sleep_ns(1000 * 1000);
        looks during = look_at(rt, id);
        CHECK(during.reserved && during.del);
        actor_cancel(&a);
        pdk_sleep_ns(10 * 1000 * 1000);
        CHECK_INT(atomic_load(&a.done), 0);
        CHECK(look_at(rt, id).reserved);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_INT(calls_of("destroy"), 1);
        CHECK_INT(look_at(rt, id).state, -1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("a start that fails under the id's lock: one removal, no deadlock, the first failure is told; cancelled too [B035]")
{
    BOTH for (int cancel = 0; cancel <= 2; cancel++) { /* not, inside the start, inside the compensation */
        pdk_runtime *rt = gated_open(QUIET, "ready");
        char id[64];
        id_of(rt, "t", id);
        atomic_store(&no_at, "ready");
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        if (cancel == 1)
            actor_cancel(&a);
        open_gate("destroy");
        while (calls_of("destroy") == 0)
            pdk_sleep_ns(1000 * 1000);
        if (cancel == 2)
            actor_cancel(&a);
        open_gate(NULL);
        actor_join(&a, cancel ? PDK_E_CANCELLED : PDK_E_UNREADY);
        CHECK((cancel ? a.err.cause != NULL && a.err.cause->kind == PDK_E_UNREADY : a.err.cause == NULL));
        CHECK_INT(calls_of("destroy"), 1);
        CHECK_INT(look_at(rt, id).state, -1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("cancelled twice inside the stop or the finish of a replacement: all is held until it has ended [K14, F12]")
{
    static const char *const gates[] = { "destroy", "finish" };
    BOTH for (int g = 0; g < 2; g++) for (int twice = 0; twice <= 1; twice++) {
        pdk_runtime *rt = gated_open(QUIET, gates[g]);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        contender peer;
        contender_open(&peer, rt, "t");
        CHECK_INT(pdk_journal_record(rt->journal, peer.id, "x7", "test", &err), 0);
        atomic_store(&found_generation, 7);
        atomic_store(&fails_at, NULL);
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        contender_start(&peer);
        for (int i = 0; i <= twice; i++) {
            actor_cancel(&a);
            pdk_sleep_ns(10 * 1000 * 1000);
            looks now = look_at(rt, peer.id);
            CHECK(now.reserved && now.del);
            CHECK_INT(atomic_load(&a.done), 0);
            CHECK_INT(atomic_load(&peer.has), 0);
            CHECK_INT(pdk_journal_has(rt->journal, peer.id, "x7", &err), 1);
            pdk_lease_owner owner;
            CHECK_INT(pdk_lease_owner_of(rt->lease, peer.id, &owner, &err), 1);
            CHECK(owner.del && owner.ours);
        }
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        pdk_thread_join(&peer.t);
        CHECK_INT(peer.recorded, 0); /* retired before the lock was given back */
        CHECK_INT(peer.then.state, PDK_WARM);
        CHECK(!peer.then.reserved);
        CHECK_INT(calls_of("destroy"), 1);
        CHECK_INT(calls_of("create"), 1);
        CHECK_INT(look_at(rt, peer.id).holders, 0);
        contender_close(&peer);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("two that want one creation: one cancelled, the other gets it; both cancelled, it is released [B179, B049]")
{
    BOTH for (int who = 1; who <= 3; who++) {
        pdk_runtime *rt = gated_open(QUIET, "create");
        char id[64];
        id_of(rt, "t", id);
        actor a = { .rt = rt, .name = "t", .holder = "a", .sync = sync }, b = { .rt = rt, .name = "t", .holder = "b", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_start(&b);
        pdk_sleep_ns(10 * 1000 * 1000);
        if (who & 1)
            actor_cancel(&a);
        if (who & 2)
            actor_cancel(&b);
        if (who & 2) /* it only waits: its end does not wait for anybody's */
            actor_join(&b, PDK_E_CANCELLED);
        pdk_sleep_ns(10 * 1000 * 1000);
        CHECK_INT(atomic_load(&a.done), 0);
        open_gate(NULL);
        actor_join(&a, who & 1 ? PDK_E_CANCELLED : PDK_OK);
        if (!(who & 2))
            actor_join(&b, PDK_OK);
        CHECK_INT(calls_of("create"), 1);
        CHECK_INT(calls_of("destroy"), 0);
        CHECK_INT(look_at(rt, id).holders, who == 3 ? 0 : 1);
        CHECK_INT(look_at(rt, id).state, who == 3 ? PDK_WARM : PDK_ACTIVE);
        actor_clear(&a);
        actor_clear(&b);
        gated_end(rt);
    }
}

TEST("without threads the lock of another process is looked for by who waits, and by tick [F2, F9]")
{
    for (int ticks = 0; ticks <= 1; ticks++) {
        pdk_runtime *rt = gated_open("threads = false, " QUIET, NULL);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        contender peer;
        contender_open(&peer, rt, "t");
        contender_start(&peer);
        pdk_thread_join(&peer.t);
        pdk_request req = { .thread = "t" };
        pdk_op *op = pdk_acquire_async(rt, &req, NULL, NULL, &err), *gone = pdk_acquire_async(rt, &req, NULL, NULL, &err);
        REQUIRE(op != NULL && gone != NULL);
        CHECK_INT(pdk_op_wait(op, 0.05, &err), 0);
        CHECK_INT(pdk_cancel(gone), 0);
        CHECK_INT(pdk_op_poll(gone, &err), -1);
        CHECK_KIND(err, PDK_E_CANCELLED);
        contender_close(&peer);
        for (int i = 0; ticks && i < 4; i++)
            CHECK_INT(pdk_tick(rt, &err), 0);
        CHECK_INT(ticks ? pdk_op_poll(op, &err) : pdk_op_wait(op, 5, &err), 1);
        pdk_op_free(op);
        pdk_op_free(gone);
        gated_end(rt);
    }
}

static actor *cancelled_one;
static int cancelled_at;
static void cancel_at(const char *name, int nth)
{
    (void)name;
    if (nth == cancelled_at)
        actor_cancel(cancelled_one);
}

TEST("cancelled at each call that an acquire makes: no orphan, no duplicate, nobody holds it [B182]")
{
    BOTH for (int found = 0; found <= 7; found += 7) {
        int reached = 1;
        for (cancelled_at = 1; reached; cancelled_at++) {
            pdk_runtime *rt = gated_open(QUIET, NULL);
            char id[64];
            id_of(rt, "t", id);
            atomic_store(&found_generation, found);
            actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
            cancelled_one = &a;
            on_engine_call = cancel_at;
            actor_start(&a);
            pdk_thread_join(&a.t);
            on_engine_call = NULL;
            reached = atomic_load(&a.cancelled);
            CHECK_INT(a.rc, reached ? -1 : 1);
            CHECK_KIND(a.err, reached ? PDK_E_CANCELLED : PDK_OK);
            CHECK_INT(look_at(rt, id).holders, !reached);
            int made = calls_of("create"), tracked = look_at(rt, id).state != -1;
            CHECK(found || made == tracked);
            CHECK_INT(calls_of("destroy"), 0);
            actor next = { .rt = rt, .name = "t", .holder = "next", .sync = sync };
            actor_start(&next);
            actor_join(&next, PDK_OK);
            CHECK_INT(calls_of("create"), found ? 0 : 1);
            CHECK_INT(calls_of("destroy"), 0);
            actor_clear(&next);
            actor_clear(&a);
            gated_end(rt);
        }
        CHECK_INT(cancelled_at, found ? 5 : 6); /* discover, connect, alive; discover, create, ready, connect */
    }
}

TEST("a holder that another acquire has bound meanwhile does not move to this one's identity [L12]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, "create");
        char first[64], second[64], bound[64];
        id_of(rt, "t", first);
        id_of(rt, "z", second);
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync }, b = { .rt = rt, .name = "z", .holder = "h", .sync = sync };
        actor_start(&a);
        while (calls_of("create") < 1)
            pdk_sleep_ns(1000 * 1000);
        open_gate("ready"); /* the first one is registered last */
        while (calls_of("ready") < 1)
            pdk_sleep_ns(1000 * 1000);
        actor_start(&b);
        while (calls_of("ready") < 2)
            pdk_sleep_ns(1000 * 1000);
        open_gate(NULL);
        pdk_thread_join(&a.t);
        pdk_thread_join(&b.t);
        CHECK_INT((a.rc == 1) + (b.rc == 1), 1);
        CHECK_KIND(a.rc == 1 ? b.err : a.err, PDK_E_INVALID_ARGUMENT);
        CHECK_INT(pdk_runtime_binding(rt, "h", bound, NULL), 1);
        CHECK_STR(bound, a.rc == 1 ? first : second);
        CHECK_INT(look_at(rt, bound).holders, 1);
        CHECK_INT(look_at(rt, a.rc == 1 ? second : first).state, -1); /* taken back */
        actor_clear(&a);
        actor_clear(&b);
        gated_end(rt);
    }
}

/* ---- somebody wants it gone ---- */

typedef struct destroyer {
    pdk_runtime *rt;
    char id[64];
    atomic_int done;
    int rc;
    pdk_thread t;
} destroyer;

static void *destroy_it(void *arg)
{
    destroyer *d = arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    d->rc = pdk_runtime_destroy(d->rt, d->id, &err);
    atomic_store(&d->done, 1);
    return NULL;
}

TEST("destroyed while it is made: the wait for it ends, it is taken back, and no late step brings it back [B034]")
{
    static const char *const gates[] = { "discover", "create", "ready" };
    BOTH for (int g = 0; g < 3; g++) {
        pdk_runtime *rt = gated_open(QUIET, gates[g]);
        destroyer d = { .rt = rt };
        id_of(rt, "t", d.id);
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        pdk_ns before = pdk_now_monotonic();
        CHECK_INT(pdk_thread_start(&d.t, "destroy", destroy_it, &d), 0);
        if (g < 2) { /* the driver is at work: nothing can end that; what it makes is taken back */
            pdk_sleep_ns(20 * 1000 * 1000);
            CHECK_INT(atomic_load(&d.done), 0);
            open_gate(NULL);
        } /* else it never gets ready, with a minute to go */
        actor_join(&a, PDK_E_BEING_DESTROYED);
        pdk_thread_join(&d.t);
        CHECK(pdk_now_monotonic() - before < 20 * PDK_NS_PER_S);
        CHECK_INT(d.rc, 1);
        CHECK_INT(calls_of("create"), g > 0);
        CHECK_INT(calls_of("destroy"), g > 0);
        CHECK_INT(look_at(rt, d.id).state, -1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("shut down while one waits until its sandbox is ready: that wait ends, and it is taken back [B034]")
{
    BOTH {
        pdk_runtime *rt = gated_open(QUIET, "ready");
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        pdk_ns before = pdk_now_monotonic();
        CHECK_INT(pdk_runtime_shutdown(rt, &err), 0);
        CHECK(pdk_now_monotonic() - before < 20 * PDK_NS_PER_S);
        actor_join(&a, PDK_E_CLOSED);
        CHECK_INT(calls_of("destroy"), 1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST("cancelled while its sandbox gets ready: that is waited for a little longer, not for the whole limit [B034, F11]")
{
    BOTH {
        pdk_runtime *rt = gated_open("discover_timeout = 0.2, " QUIET, "ready");
        char id[64];
        id_of(rt, "t", id);
        atomic_store(&no_at, "ready");
        actor a = { .rt = rt, .name = "t", .holder = "h", .sync = sync };
        actor_start(&a);
        wait_until(somebody_in_gate, NULL);
        actor_cancel(&a); /* the engine's sleep ends: it is asked once more */
        pdk_sleep_ns(100 * 1000 * 1000);
        open_gate(NULL);
        actor_join(&a, PDK_E_CANCELLED);
        CHECK_STR(ready_seconds, "0.2");
        CHECK_INT(look_at(rt, id).state, -1);
        CHECK_INT(calls_of("destroy"), 1);
        actor_clear(&a);
        gated_end(rt);
    }
}

TEST_MAIN
