/* test_fence.c -- what cannot be set up from outside, since the turn and the reservation forbid it: metadata replaced between
 * a verdict and its teardown, a replacement published while the old generation is being stopped. Also the serializer, the heap
 * of what is due, and the memory store, alone. */
#include "core.h"
#include "test.h"

#include <lauxlib.h>

static const char engine[] = /* a file, so that it has the universe's globals: `hook` is set by the tests */
    "local n, gone = 0, {}\n"
    "local M = { name = 'scripted', capabilities = { fenced = false } }\n"
    "function M.create(_, spec) n = n + 1 return { sandbox_id = spec.sandbox_id, generation = 'g' .. n } end\n"
    "function M.destroy(_, info) hook(info.generation) gone[info.generation] = true end\n"
    "function M.inspect(_, id, info) if gone[info.generation] then return nil end return info end\n"
    "function M.discover() end\n"
    "function M.alive() return true end\n"
    "function M.ready() return true end\n"
    "function M.connect() return { exec = function() end, close = function() hook('close') end } end\n"
    "return M\n";
static const char config[] =
    "return { backend = '%s/engine.lua', clock = 'manual', threads = false, health_ttl = 0, user = 'u',\n"
    "  log = function() end, state_dir = '%s', ownership = { type = 'memory' } }\n";

static int destroys, closes;
static void (*during_stop)(pdk_runtime *rt);
static pdk_runtime *hooked;

static int hook(lua_State *L)
{
    if (strcmp(lua_tostring(L, 1), "close") == 0) {
        closes++;
        return 0;
    }
    destroys++;
    if (during_stop != NULL)
        during_stop(hooked);
    return 0;
}

static int install_hook(lua_State *L, void *arg)
{
    (void)arg;
    lua_pushcfunction(L, hook);
    lua_setglobal(L, "hook");
    return 0;
}

static pdk_runtime *open_runtime(void)
{
    char text[4096];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(text, sizeof text, "%s/engine.lua", test_tmpdir());
    FILE *f = fopen(text, "w");
    if (!CHECK(f != NULL && fputs(engine, f) >= 0 && fclose(f) == 0))
        exit(1);
    snprintf(text, sizeof text, config, test_tmpdir(), test_tmpdir());
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    if (!CHECK(rt != NULL)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    destroys = closes = 0;
    during_stop = NULL;
    hooked = rt;
    CHECK_INT(pdk_script_enter(rt->script, install_hook, NULL, &err), 0);
    return rt;
}

static pdk_box *acquire(pdk_runtime *rt, const char *thread, bool hold)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    pdk_request req = { .thread = thread, .no_holder = !hold };
    if (!CHECK_INT(pdk_acquire(rt, &req, &box, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    return box;
}

static void end(pdk_runtime *rt, pdk_box *box)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    during_stop = NULL;
    pdk_box_free(box);
    if (!CHECK_INT(pdk_shutdown(rt, &err), 0))
        fprintf(stderr, "%s\n", err.message);
    pdk_free(rt);
}

/* Puts another generation in the place of the tracked one, as a discovery by another path would. */
static void replace_metadata(pdk_runtime *rt, const char *id, const char *generation)
{
    PDK_AUTO_PACK info = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&info);
    pdk_kv_cstr(&info, &m, "sandbox_id", id);
    pdk_kv_cstr(&info, &m, "generation", generation);
    pdk_end(&info, &m);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    CHECK(pdk_entry_set_info(&rt->pool, e, pdk_view_of(&info), true));
}

TEST("a dead verdict about metadata that was replaced meanwhile does nothing [E6]")
{
    pdk_runtime *rt = open_runtime();
    pdk_box *box = acquire(rt, "t", true);
    uint64_t judged;
    pdk_client *client;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        judged = e->incarnation;
        client = e->client;
    }
    replace_metadata(rt, pdk_box_id(box), "newer");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_teardown td = { .id = pdk_box_id(box), .reason = "unhealthy", .ignore_holders = true, .incarnation = judged };
    CHECK_INT(pdk_fence_teardown(rt, &td, &err), PDK_TD_REFUSED);
    CHECK_STR(td.why, "used");
    CHECK_INT(destroys, 0);
    CHECK_INT(closes, 0);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_by_identity(&rt->pool, &(pdk_identity){ "u", "t", 1, 1 });
        REQUIRE(e != NULL);
        CHECK(e->client == client);
        CHECK_STR(e->generation, "newer");
        CHECK(e->reserved == 0);
    }
    end(rt, box);
}

static void publish_replacement(pdk_runtime *rt)
{
    during_stop = NULL;
    PDK_GUARD(rt->pool.registry);
    pdk_node *n = pdk_map_each(&rt->pool.ids, NULL);
    pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
    PDK_AUTO_PACK info = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&info);
    pdk_kv_cstr(&info, &m, "sandbox_id", e->id);
    pdk_kv_cstr(&info, &m, "generation", "replacement");
    pdk_end(&info, &m);
    CHECK(e->reserved != 0);
    CHECK(pdk_entry_set_info(&rt->pool, e, pdk_view_of(&info), true));
}

TEST("a destroy that ends does not remove a replacement that was published meanwhile [M13]")
{
    pdk_runtime *rt = open_runtime();
    pdk_box *box = acquire(rt, "t", false);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    during_stop = publish_replacement;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK_INT(destroys, 1);
    CHECK_INT(closes, 0); /* the replacement's client is untouched */
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        REQUIRE(e != NULL);
        CHECK_STR(e->generation, "replacement");
        CHECK_INT(e->state, PDK_ACTIVE);
        CHECK(e->client != NULL);
        CHECK(e->reserved == 0);
    }
    end(rt, box);
}

static bool registry_was_free;
static void *take_registry(void *arg)
{
    pdk_runtime *rt = arg;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = PDK_OF(pdk_map_each(&rt->pool.ids, NULL), pdk_entry, by_id);
    registry_was_free = e->reserved != 0 && e->info.len > 0;
    return NULL;
}

static void look_from_another_thread(pdk_runtime *rt)
{
    pdk_thread t;
    registry_was_free = false;
    CHECK_INT(pdk_thread_start(&t, "looker", take_registry, rt), 0);
    pdk_thread_join(&t);
}

TEST("while a stop is pending the reservation is held and the registry is free [M12]")
{
    pdk_runtime *rt = open_runtime();
    pdk_box *box = acquire(rt, "t", false);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    during_stop = look_from_another_thread;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK(registry_was_free);
    end(rt, box);
}

TEST("the test and the reservation are one step, and a second reservation is refused [M14]")
{
    pdk_runtime *rt = open_runtime();
    pdk_box *box = acquire(rt, "t", false);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 77;
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 0);
    CHECK_STR(err.reason, "deferred");
    CHECK_INT(destroys, 0);
    pdk_box *again = NULL;
    pdk_request req = { .thread = "t" };
    CHECK_INT(pdk_acquire(rt, &req, &again, &err), -1); /* an id reserved here is never promoted [E17] */
    CHECK_INT(err.kind, PDK_E_BEING_DESTROYED);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 0;
    }
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    end(rt, box);
}

/* ---- turns ---- */

typedef struct turns {
    pdk_serial *s;
    atomic_int inside, most, done;
    atomic_bool cancelled;
} turns;

static void *take_turns(void *arg)
{
    turns *t = arg;
    for (int i = 0; i < 200; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_turn turn = PDK_NO_TURN;
        if (pdk_turn_enter_id(t->s, "same", &turn, &PDK_NO_LIMIT, &err) < 0)
            continue;
        int now = atomic_fetch_add(&t->inside, 1) + 1;
        if (now > atomic_load(&t->most))
            atomic_store(&t->most, now);
        atomic_fetch_sub(&t->inside, 1);
        pdk_turn_leave(&turn);
        atomic_fetch_add(&t->done, 1);
    }
    return NULL;
}

TEST("one at a time has the turn of an identity, another identity is not held up [F1]")
{
    char path[200];
    snprintf(path, sizeof path, "%s/turns", test_tmpdir());
    turns t = { .s = pdk_serial_new(path, NULL) };
    turns peer = { .s = pdk_serial_new(path, NULL) }; /* as another process: a file description of its own */
    pdk_thread threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "turns", take_turns, i < 3 ? &t : &peer), 0);
    for (int i = 0; i < 4; i++)
        pdk_thread_join(&threads[i]);
    CHECK_INT(atomic_load(&t.most), 1);
    CHECK_INT(atomic_load(&t.done), 600);
    CHECK_INT(atomic_load(&peer.done), 200);
    CHECK_INT((int)pdk_serial_keys(t.s), 0);
    pdk_turn a = PDK_NO_TURN, b = PDK_NO_TURN;
    pdk_limit soon = { pdk_now_monotonic() + 50 * 1000 * 1000, NULL };
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_turn_enter_id(t.s, "a", &a, &soon, &err), 0);
    CHECK_INT(pdk_turn_enter_id(t.s, "b", &b, &soon, &err), 0);
    pdk_turn_leave(&b);
    CHECK_INT(pdk_turn_enter_id(peer.s, "a", &b, &soon, &err), -1); /* held by the other process */
    CHECK_INT(err.kind, PDK_E_TIMEOUT);
    pdk_turn_leave(&a);
    pdk_serial_free(t.s);
    pdk_serial_free(peer.s);
}

static void *wait_for_turn(void *arg)
{
    turns *t = arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_turn turn = PDK_NO_TURN;
    pdk_limit limit = { PDK_NEVER, &t->cancelled };
    if (pdk_turn_enter(t->s, "k", 1, &turn, &limit, &err) < 0)
        atomic_fetch_add(&t->most, err.kind == PDK_E_CANCELLED || err.kind == PDK_E_CLOSED ? 1 : 100);
    else
        atomic_fetch_add(&t->done, 1);
    pdk_turn_leave(&turn);
    return NULL;
}

TEST("a cancelled waiter leaves nothing behind, alone or with a live waiter after it [F3]")
{
    for (int live = 0; live <= 1; live++) {
        turns t = { .s = pdk_serial_new(NULL, NULL) }, after = { .s = t.s };
        pdk_turn held = PDK_NO_TURN;
        pdk_thread one, two;
        CHECK_INT(pdk_turn_enter(t.s, "k", 1, &held, &PDK_NO_LIMIT, NULL), 0);
        CHECK_INT(pdk_thread_start(&one, "one", wait_for_turn, &t), 0);
        pdk_sleep_ns(20 * 1000 * 1000);
        if (live)
            CHECK_INT(pdk_thread_start(&two, "two", wait_for_turn, &after), 0);
        atomic_store(&t.cancelled, true);
        pdk_ns before = pdk_now_monotonic();
        pdk_thread_join(&one);
        CHECK_INT(atomic_load(&t.most), 1);
        pdk_turn_leave(&held);
        if (live) {
            pdk_thread_join(&two);
            CHECK_INT(atomic_load(&after.done), 1);
        }
        CHECK(pdk_now_monotonic() - before < PDK_NS_PER_S);
        CHECK_INT((int)pdk_serial_keys(t.s), 0);
        pdk_serial_free(t.s);
    }
}

TEST("closing the serializer ends its waiters, and later waits [F15]")
{
    turns t = { .s = pdk_serial_new(NULL, NULL) };
    pdk_turn held = PDK_NO_TURN, late = PDK_NO_TURN;
    pdk_thread one;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_turn_enter(t.s, "k", 1, &held, &PDK_NO_LIMIT, NULL), 0);
    CHECK_INT(pdk_thread_start(&one, "one", wait_for_turn, &t), 0);
    pdk_sleep_ns(20 * 1000 * 1000);
    pdk_serial_close(t.s);
    pdk_thread_join(&one);
    CHECK_INT(atomic_load(&t.most), 1);
    CHECK_INT(pdk_turn_enter(t.s, "z", 1, &late, &PDK_NO_LIMIT, &err), -1);
    CHECK_INT(err.kind, PDK_E_CLOSED);
    pdk_turn_leave(&held); /* a section that runs still leaves cleanly */
    CHECK_INT((int)pdk_serial_keys(t.s), 0);
    pdk_serial_free(t.s);
}

/* ---- registry ---- */

TEST("the heap gives what is due first, through any changes [N6]")
{
    pdk_pool p;
    pdk_pool_init(&p);
    {
        PDK_GUARD(p.registry);
        unsigned seed = 7;
        for (int i = 0; i < 500; i++) {
            char id[32];
            snprintf(id, sizeof id, "s%d", i % 200);
            pdk_entry *e = pdk_pool_entry(&p, id);
            REQUIRE(e != NULL);
            if (e->state == PDK_ABSENT)
                pdk_entry_move(&p, e, PDK_WARM);
            pdk_pool_set_due(&p, e, i % 7 == 0 ? PDK_NEVER : (pdk_ns)(rand_r(&seed) % 1000));
            pdk_pool_check(&p);
        }
        pdk_ns last = 0;
        while (p.heap_len > 0) {
            pdk_entry *e = p.heap[1];
            CHECK(e->due >= last);
            last = e->due;
            pdk_entry_move(&p, e, PDK_ABSENT);
            pdk_entry_sweep(&p, e);
            pdk_pool_check(&p);
        }
    }
    pdk_pool_free(&p);
}

TEST("a million identities come and go, and leave no entry [N6]")
{
    pdk_pool p;
    pdk_pool_init(&p);
    {
        PDK_GUARD(p.registry);
        for (int i = 0; i < 1000000; i++) {
            char id[32];
            int n = snprintf(id, sizeof id, "s%d", i);
            pdk_entry *e = pdk_pool_entry(&p, id);
            REQUIRE(e != NULL);
            pdk_entry_set_identity(e, &(pdk_identity){ id, "t", (size_t)n, 1 });
            pdk_entry_move(&p, e, PDK_ACTIVE);
            pdk_pool_bind(&p, e, id, true);
            pdk_pool_unbind(&p, e->holders);
            pdk_entry_move(&p, e, PDK_WARM);
            pdk_entry_move(&p, e, PDK_ABSENT);
            pdk_entry_sweep(&p, e);
        }
        CHECK_INT((int)p.ids.count, 0);
        CHECK_INT((int)p.identities.count, 0);
        CHECK(p.ids.size <= 4096);
        pdk_pool_check(&p);
    }
    pdk_pool_free(&p);
}

/* ---- the memory store ---- */

TEST("the memory store: take, claim, del, tokens that only grow, expiry by its clock [O1, O2, O3]")
{
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MANUAL, false);
    pdk_lease *l = pdk_lease_memory("me", 180, clock, NULL);
    int64_t a = 0, b = 0, c = 0;
    pdk_renewal r;
    pdk_lease_owner o;
    CHECK_INT(pdk_lease_owner_of(l, "x", &o, NULL), 0);
    CHECK_INT(pdk_lease_take(l, "x", 0, &a, NULL), 1);
    CHECK_INT(pdk_lease_take(l, "x", 0, &b, NULL), 1);
    CHECK(a == b && a > 0);
    CHECK_INT(pdk_lease_claim_for_destroy(l, "x", 0, &c, NULL), 1);
    CHECK(c == a);
    CHECK_INT(pdk_lease_take(l, "x", 0, &b, NULL), 0);  /* over no `del`, one's own included */
    CHECK_INT(pdk_lease_claim(l, "x", 0, &b, NULL), 0); /* never turns an own `del` back */
    CHECK_INT(pdk_lease_owner_of(l, "x", &o, NULL), 1);
    CHECK(o.del && o.ours && o.token == a);
    CHECK_INT(pdk_lease_renew(l, "x", &r, NULL), 0);
    CHECK_INT(r, PDK_RENEWED);
    CHECK_INT(pdk_lease_release(l, "x", NULL), 0);
    CHECK_INT(pdk_lease_take(l, "x", 0, &b, NULL), 1);
    CHECK(b > a);
    CHECK_INT(pdk_lease_take(l, "x", b + 1000000000, &c, NULL), 1); /* a guest has seen a larger one */
    CHECK(c > b + 1000000000);
    pdk_clock_advance(clock, 181, 0);
    CHECK_INT(pdk_lease_renew(l, "x", &r, NULL), 0);
    CHECK_INT(r, PDK_LAPSED);
    CHECK_INT(pdk_lease_take(l, "x", 0, &a, NULL), 1);
    CHECK(a > c);
    pdk_lease_free(l);
    pdk_clock_free(clock);
}

TEST_MAIN
