/* test_fence.c -- what cannot be set up from outside, since the turn and the reservation forbid it: metadata replaced between
 * a verdict and its teardown, a replacement published while the old generation is being stopped. Also the serializer, the heap
 * of what is due, and the memory store, alone. */
#include "world.h"

#include <fcntl.h>

#define MANUAL "clock = 'manual', threads = false,"

static pdk_runtime *world; /* the runtime of the running test, for its hook */

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
    pdk_runtime *rt = world_open(MANUAL);
    pdk_box *box = world_acquire(rt, "t", "holder");
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
    CHECK_INT(atomic_load(&world_destroys), 0);
    CHECK_INT(atomic_load(&world_closes), 0);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_by_identity(&rt->pool, &(pdk_identity){ "u", "t", 1, 1 });
        REQUIRE(e != NULL);
        CHECK(e->client == client);
        CHECK_STR(e->generation, "newer");
        CHECK(e->reserved == 0);
    }
    pdk_box_free(box);
    world_end(rt);
}

static int publish_replacement(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    pdk_runtime *rt = world;
    if (strcmp(name, "destroy") != 0)
        return 0;
    world_hook = NULL;
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
    return 0;
}

TEST("a destroy that ends does not remove a replacement that was published meanwhile [M13]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    pdk_box *box = world_acquire(rt, "t", NULL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = publish_replacement;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK_INT(atomic_load(&world_destroys), 1);
    CHECK_INT(atomic_load(&world_closes), 0); /* the replacement's client is untouched */
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
        REQUIRE(e != NULL);
        CHECK_STR(e->generation, "replacement");
        CHECK_INT(e->state, PDK_ACTIVE);
        CHECK(e->client != NULL);
        CHECK(e->reserved == 0);
    }
    pdk_box_free(box);
    world_end(rt);
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

static int look_from_another_thread(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    if (strcmp(name, "destroy") != 0)
        return 0;
    pdk_runtime *rt = world;
    pdk_thread t;
    registry_was_free = false;
    CHECK_INT(pdk_thread_start(&t, "looker", take_registry, rt), 0);
    pdk_thread_join(&t);
    return 0;
}

TEST("while a stop is pending the reservation is held and the registry is free [M12]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    pdk_box *box = world_acquire(rt, "t", NULL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world_hook = look_from_another_thread;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    CHECK(registry_was_free);
    pdk_box_free(box);
    world_end(rt);
}

TEST("the test and the reservation are one step, and a second reservation is refused [M14]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    pdk_box *box = world_acquire(rt, "t", NULL);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 77;
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 0);
    CHECK_STR(err.reason, "deferred");
    CHECK_INT(atomic_load(&world_destroys), 0);
    pdk_box *again = NULL;
    pdk_request req = { .thread = "t" };
    CHECK_INT(pdk_acquire(rt, &req, &again, &err), -1); /* an id reserved here is never promoted [E17] */
    CHECK_INT(err.kind, PDK_E_BEING_DESTROYED);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 0;
    }
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    pdk_box_free(box);
    world_end(rt);
}

/* While the reclaim of a warm replacement is under way, its entry is swapped for one whose stop failed. */
static const char *swapped_for;
static int swap_entry(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)detail, (void)seconds;
    if (strcmp(name, "connect") != 0)
        return 0;
    world_hook = NULL;
    PDK_AUTO_PACK info = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&info);
    pdk_kv_cstr(&info, &m, "sandbox_id", id);
    pdk_kv_cstr(&info, &m, "generation", swapped_for);
    pdk_end(&info, &m);
    pdk_runtime *rt = world;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    CHECK(pdk_entry_set_info(&rt->pool, e, pdk_view_of(&info), true));
    pdk_entry_set_retry(&rt->pool, e, true);
    return 0;
}

TEST("an entry swapped while its reclaim publishes stays warm and fenced, whatever its generation [M9]")
{
    static const char *const generations[] = { "the failed one", NULL };
    for (int i = 0; i < 2; i++) {
        pdk_runtime *rt = world = world_open(MANUAL);
        pdk_box *box = world_acquire(rt, "t", "h"), *got = NULL;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_release(box, &err);
        swapped_for = generations[i];
        world_hook = swap_entry;
        pdk_request req = { .thread = "t" };
        CHECK_INT(pdk_acquire(rt, &req, &got, &err), -1);
        CHECK_INT(err.kind, PDK_E_REPLACEMENT_DEFERRED);
        CHECK_INT(pdk_runtime_get(rt, pdk_box_id(box), NULL, &got, NULL), 0);
        CHECK(got == NULL);
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
            REQUIRE(e != NULL);
            CHECK_INT(e->state, PDK_WARM);
            CHECK(e->retry && e->client == NULL && e->reserved == 0 && e->intents == 0);
            pdk_entry_set_retry(&rt->pool, e, false); /* so that the end may stop it */
        }
        pdk_box_free(box);
        world_end(rt);
    }
}

/* The number of the open file whose path ends so, or -1. */
static int find_fd(const char *end)
{
    for (int fd = 3; fd < 256; fd++) {
        char link[64], path[512];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, path, sizeof path - 1);
        if (n > 0 && (path[n] = '\0', (size_t)n > strlen(end)) && strcmp(path + n - strlen(end), end) == 0)
            return fd;
    }
    return -1;
}

static atomic_int creates;
static int count_creates(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    atomic_fetch_add(&creates, strcmp(name, "create") == 0);
    return 0;
}

TEST("a lock file that cannot be locked: the error reaches the caller, nothing is created [E9]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    int fd = find_fd("/turns"), read_only = open("/dev/null", O_RDONLY | O_CLOEXEC), kept = dup(fd);
    REQUIRE(fd >= 0 && read_only >= 0 && kept >= 0);
    CHECK(dup2(read_only, fd) == fd); /* a write lock needs a descriptor open for writing */
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    pdk_request req = { .thread = "t" };
    world_hook = count_creates;
    CHECK_INT(pdk_acquire(rt, &req, &box, &err), -1);
    CHECK_INT(err.kind, PDK_E_IO_ERROR);
    CHECK_INT(atomic_load(&creates), 0);
    CHECK_INT((int)pdk_serial_keys(rt->serial), 0);
    CHECK(dup2(kept, fd) == fd);
    close(kept);
    close(read_only);
    CHECK_INT(pdk_acquire(rt, &req, &box, &err), 0);
    pdk_box_free(box);
    world_end(rt);
}

/* ---- a session creation that hangs ---- */

static atomic_bool creation_hangs, creation_ends;
static atomic_int recorded_first;
static int hang_creation(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)detail;
    if (strcmp(name, "destroy") == 0)
        atomic_fetch_add(&recorded_first, pdk_journal_has(world->journal, id, "g1", NULL) == 1);
    if (strcmp(name, "inspect") == 0)
        return WORLD_FAIL; /* whether it has gone cannot be told */
    if (strcmp(name, "open_session") != 0)
        return 0;
    atomic_store(&creation_hangs, true);
    *seconds = 0.002;
    return atomic_load(&creation_ends) ? WORLD_GO_ON : WORLD_AGAIN;
}

static const char *const some_env[] = { "A=1", NULL };
static const char *const *run_env;
static void *run_in_session(void *arg)
{
    pdk_result r;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_command cmd = { .command = "true", .scope = run_env == NULL ? "s" : NULL, .env = run_env };
    if (pdk_exec(arg, &cmd, &r, &err) == 0)
        pdk_result_free(&r);
    return NULL;
}

/* A runtime whose holder `run` waits for its session to be made, on the plane `shell` or `bash`. */
static pdk_box *while_creation_hangs(bool bash, pdk_thread *t)
{
    world = world_open("threads = true, reap_interval = 3600,");
    pdk_box *box = world_acquire(world, "t", "run");
    run_env = bash ? some_env : NULL;
    atomic_store(&creation_hangs, false);
    atomic_store(&creation_ends, false);
    atomic_store(&recorded_first, 0);
    world_hook = hang_creation;
    CHECK_INT(pdk_thread_start(t, "exec", run_in_session, box), 0);
    while (!atomic_load(&creation_hangs))
        pdk_sleep_ns(1000 * 1000);
    PDK_GUARD(world->pool.registry);
    CHECK_INT(pdk_pool_find(&world->pool, pdk_box_id(box))->plane[bash].pending, 1);
    return box;
}

TEST("the last release with a creation abandoned recycles, and records first, on either plane [L6]")
{
    for (int bash = 0; bash <= 1; bash++) {
        pdk_thread t;
        pdk_box *box = while_creation_hangs(bash, &t), *got = NULL;
        pdk_runtime *rt = world;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK_INT(pdk_runtime_release(rt, "run", &err), 0);
        CHECK_INT(atomic_load(&world_destroys), 1);
        CHECK_INT(atomic_load(&recorded_first), 1);
        CHECK_INT(pdk_runtime_get(rt, pdk_box_id(box), NULL, &got, NULL), 0);
        CHECK(got == NULL);
        CHECK_INT(pdk_journal_has(rt->journal, pdk_box_id(box), "g1", &err), 1); /* gone it is not until that is proven (K4) */
        {
            PDK_GUARD(rt->pool.registry);
            CHECK_INT((int)rt->pool.count[PDK_WARM], 0);
            CHECK_INT((int)rt->pool.count[PDK_KEPT], 1);
        }
        atomic_store(&creation_ends, true);
        pdk_thread_join(&t);
        world_hook = NULL;
        CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
        CHECK_INT(pdk_journal_has(rt->journal, pdk_box_id(box), NULL, &err), 0);
        {
            PDK_GUARD(rt->pool.registry);
            CHECK_INT((int)rt->pool.ids.count, 0);
        }
        pdk_box_free(box);
        world_end(rt);
    }
}

static pdk_client *client_of(pdk_runtime *rt, const char *id)
{
    PDK_GUARD(rt->pool.registry);
    return pdk_pool_find(&rt->pool, id)->client;
}

TEST("another holder acquires while a creation hangs: the same sandbox and client, nothing recorded; it is parked in the end [L5]")
{
    for (int first = 0; first <= 1; first++) { /* who leaves first */
        pdk_thread t;
        pdk_box *run = while_creation_hangs(false, &t);
        pdk_runtime *rt = world;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_client *before = client_of(rt, pdk_box_id(run));
        pdk_box *upload = world_acquire(rt, "t", "upload");
        CHECK_STR(pdk_box_id(upload), pdk_box_id(run));
        CHECK(client_of(rt, pdk_box_id(run)) == before);
        if (first == 0)
            CHECK_INT(pdk_runtime_release(rt, "upload", &err), 0);
        CHECK_INT(atomic_load(&world_destroys), 0);
        atomic_store(&creation_ends, true);
        pdk_thread_join(&t);
        world_hook = NULL;
        CHECK_INT(pdk_runtime_release(rt, "run", &err), 0);
        if (first == 1)
            CHECK_INT(pdk_runtime_release(rt, "upload", &err), 0);
        CHECK_INT(atomic_load(&world_destroys), 0);
        CHECK_INT(pdk_journal_has(rt->journal, pdk_box_id(run), NULL, &err), 0);
        {
            PDK_GUARD(rt->pool.registry);
            CHECK_INT(pdk_pool_find(&rt->pool, pdk_box_id(run))->state, PDK_WARM);
        }
        pdk_box_free(run);
        pdk_box_free(upload);
        world_end(rt);
    }
}

/* ---- what happens beside a call of the store ---- */

/* The runtime's own store; a hook is called before each claim and renewal, and may set what a renewal answers. */
static void (*at_store)(const char *call, const char *id);
static int renewal_says; /* -1: what the store says */
static int hooked_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return pdk_lease_take(self, id, floor, token, err);
}
static int hooked_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    if (at_store != NULL)
        at_store("claim_for_destroy", id);
    return pdk_lease_claim_for_destroy(self, id, floor, token, err);
}
static int hooked_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    if (at_store != NULL)
        at_store("renew", id);
    if (renewal_says < 0)
        return pdk_lease_renew(self, id, out, err);
    *out = (pdk_renewal)renewal_says;
    return 0;
}
static int hooked_release(void *self, const char *id, pdk_error *err)
{
    return pdk_lease_release(self, id, err);
}
static int hooked_owner(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    return pdk_lease_owner_of(self, id, out, err);
}
static void hooked_free(void *self)
{
    pdk_lease_free(self);
}
static const pdk_lease_ops hooked_ops = { .type = "memory", .take = hooked_take, .claim = hooked_take, .claim_for_destroy = hooked_destroy,
                                          .renew = hooked_renew, .release = hooked_release, .owner_of = hooked_owner, .free = hooked_free };

static pdk_runtime *open_hooked(const char *more, void (*hook)(const char *call, const char *id))
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    world = world_open(more);
    world->lease = pdk_lease_new(&hooked_ops, world->lease, &err); /* nothing is leased yet, so nobody is using it */
    CHECK(world->lease != NULL);
    at_store = hook;
    renewal_says = -1;
    return world;
}

enum { UNTOUCHED, PUBLISHED, PUBLISHING, TORN_DOWN };
static int touched;
static void touch(const char *call, const char *id)
{
    if (strcmp(call, "renew") != 0)
        return;
    PDK_GUARD(world->pool.registry);
    pdk_entry *e = pdk_pool_find(&world->pool, id);
    e->epoch += touched == PUBLISHED;
    e->intents += touched == PUBLISHING;
    e->reserved = touched == TORN_DOWN ? 77 : 0;
    renewal_says = PDK_LOST;
}

TEST("`lost` drops nothing that an acquire has published or is publishing since, or that a teardown has [O5, B039]")
{
    for (touched = UNTOUCHED; touched <= TORN_DOWN; touched++) {
        pdk_runtime *rt = open_hooked(MANUAL, touch);
        pdk_box *box = world_acquire(rt, "t", "h");
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK_INT(pdk_renew(rt, &err), 0);
        at_store = NULL;
        renewal_says = -1;
        CHECK_INT(atomic_load(&world_destroys), 0);
        CHECK_INT(atomic_load(&world_closes), touched == UNTOUCHED);
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_find(&rt->pool, pdk_box_id(box));
            CHECK((e != NULL && e->state == PDK_ACTIVE && e->client != NULL) == (touched != UNTOUCHED));
            if (e != NULL) {
                e->intents -= touched == PUBLISHING;
                e->reserved = 0;
            }
        }
        pdk_result r;
        CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "true" }, &r, &err), touched == UNTOUCHED ? -1 : 0);
        if (touched != UNTOUCHED)
            pdk_result_free(&r);
        else
            CHECK_INT(err.kind, PDK_E_LOST);
        pdk_box_free(box);
        world_end(rt);
    }
}

static void *reconcile_now(void *arg)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_reconcile(arg, &err), 0);
    return NULL;
}

static int unready_and_listed(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    return strcmp(name, "ready") == 0 ? WORLD_NO : strcmp(name, "list") == 0 ? WORLD_FOUND : WORLD_GO_ON;
}

static int reconciled;
static void reconcile_meanwhile(const char *call, const char *id)
{
    if (strcmp(call, "claim_for_destroy") != 0)
        return;
    pdk_thread t;
    pdk_lease_owner owner;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    at_store = NULL;
    CHECK_INT(pdk_lease_owner_of(world->lease, id, &owner, &err), 0); /* not claimed yet: the reservation alone forbids it */
    CHECK_INT(pdk_thread_start(&t, "reconcile", reconcile_now, world), 0);
    pdk_thread_join(&t);
    PDK_GUARD(world->pool.registry);
    pdk_entry *e = pdk_pool_find(&world->pool, id);
    CHECK(e != NULL && e->state == PDK_ABSENT && e->reserved != 0);
    reconciled++;
}

TEST("a reconciliation between an unready teardown's reservation and its claim does not adopt the container [O10]")
{
    pdk_runtime *rt = open_hooked("threads = true, reap_interval = 3600, ready_timeout = 0.01,", reconcile_meanwhile);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    world_hook = unready_and_listed;
    reconciled = 0;
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &box, &err), -1);
    CHECK_INT(err.kind, PDK_E_UNREADY);
    CHECK_INT(reconciled, 1);
    CHECK_INT(atomic_load(&world_destroys), 1);
    {
        PDK_GUARD(rt->pool.registry);
        CHECK_INT((int)rt->pool.ids.count, 0); /* neither warm nor reserved */
    }
    world_end(rt);
}

/* ---- what is in the way of a destroy ---- */

static atomic_int touching_calls; /* that ask about a sandbox, stop one or make one */
static int count_touching(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail, (void)seconds;
    static const char *const names[] = { "inspect", "destroy", "finish", "create" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        atomic_fetch_add(&touching_calls, strcmp(name, names[i]) == 0);
    return 0;
}

static int nobody_is_waited_for(pdk_runtime *rt, const char *id, const char *why, int (*end)(pdk_runtime *, const char *, pdk_error *))
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = end(rt, id, &err);
    CHECK_INT(err.kind, PDK_OK);
    if (rc == 0) {
        CHECK_STR(err.reason, "deferred");
        CHECK_STR(err.message, why);
    }
    return rc;
}

TEST("who has the turn of an id in another process and keeps it is waited for no longer than a stop may take [B030]")
{
    char path[300], id[] = "made-elsewhere";
    pdk_runtime *rt = world = world_open("threads = true, reap_interval = 3600, stop_timeout = 0.05,");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(path, sizeof path, "%s/state/turns", test_tmpdir());
    pdk_serial *other = pdk_serial_new(path, true, &err); /* as another process: a file description of its own */
    pdk_turn held = PDK_NO_TURN;
    CHECK_INT(pdk_turn_enter_id(other, id, &held, &PDK_NO_LIMIT, &err), 0);
    CHECK_INT(pdk_journal_record(rt->journal, id, NULL, "test", &err), 0);
    atomic_store(&touching_calls, 0);
    world_hook = count_touching;
    CHECK_INT(nobody_is_waited_for(rt, id, "busy", pdk_runtime_destroy), 0);
    CHECK_INT(nobody_is_waited_for(rt, id, "busy", pdk_runtime_retire), 0);
    CHECK_INT(atomic_load(&touching_calls), 0);
    CHECK_INT(pdk_journal_has(rt->journal, id, NULL, &err), 1);
    pdk_turn_leave(&held);
    CHECK_INT(nobody_is_waited_for(rt, id, "", pdk_runtime_retire), 1);
    CHECK_INT(pdk_journal_has(rt->journal, id, NULL, &err), 0);
    CHECK_INT(nobody_is_waited_for(rt, id, "", pdk_runtime_destroy), 1);
    pdk_serial_free(other);
    world_end(rt);
}

/* ---- what is in the way of an acquire ---- */

TEST("what another teardown of this process has reserved is left to it: nothing is asked, stopped or made [K13, K17, K8]")
{
    for (int tracked = 0; tracked <= 1; tracked++) {
        pdk_runtime *rt = world = world_open(MANUAL);
        pdk_box *box = world_acquire(rt, "t", NULL), *again = NULL;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        char id[64];
        snprintf(id, sizeof id, "%s", pdk_box_id(box));
        if (!tracked)
            CHECK_INT(pdk_destroy(rt, id, &err), 1);
        CHECK_INT(pdk_journal_record(rt->journal, id, tracked ? "g1" : NULL, "test", &err), 0);
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_entry(&rt->pool, id);
            e->reserved = 77;
            e->plane[0].ambiguous = tracked;
        }
        atomic_store(&touching_calls, 0);
        int closes = atomic_load(&world_closes);
        world_hook = count_touching;
        CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &again, &err), -1);
        CHECK_INT(err.kind, PDK_E_REPLACEMENT_DEFERRED);
        CHECK_STR(err.reason, "teardown_refused");
        CHECK_INT(atomic_load(&touching_calls), 0);
        CHECK_INT(atomic_load(&world_closes), closes);
        CHECK_INT(pdk_journal_has(rt->journal, id, NULL, &err), 1);
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_find(&rt->pool, id);
            REQUIRE(e != NULL && e->reserved == 77);
            CHECK((e->client != NULL) == tracked);
            e->reserved = 0;
        }
        CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &again, &err), 0);
        CHECK_INT(pdk_journal_has(rt->journal, id, NULL, &err), 0);
        pdk_box_free(again);
        pdk_box_free(box);
        world_end(rt);
    }
}

static pdk_box *had_again;
static void *acquire_again(void *arg)
{
    had_again = world_acquire(arg, "t", "again");
    return NULL;
}

TEST("an active one that is found only in the id's turn, since another thread won, is handed out: none is made [E10]")
{
    char path[300];
    pdk_runtime *rt = world = world_open("threads = true, reap_interval = 3600,");
    pdk_box *box = world_acquire(rt, "t", "h");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(path, sizeof path, "%s/state/turns", test_tmpdir());
    pdk_serial *other = pdk_serial_new(path, true, &err);
    pdk_turn held = PDK_NO_TURN;
    pdk_thread t;
    CHECK_INT(pdk_turn_enter_id(other, pdk_box_id(box), &held, &PDK_NO_LIMIT, &err), 0);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 77; /* so that it is not found at the first look */
    }
    atomic_store(&touching_calls, 0);
    world_hook = count_touching;
    CHECK_INT(pdk_thread_start(&t, "again", acquire_again, rt), 0);
    while (pdk_serial_keys(rt->serial) < 2) /* the identity's turn is its own, and it waits for the id's */
        pdk_sleep_ns(1000 * 1000);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_pool_find(&rt->pool, pdk_box_id(box))->reserved = 0;
    }
    pdk_client *before = client_of(rt, pdk_box_id(box));
    pdk_turn_leave(&held);
    pdk_thread_join(&t);
    REQUIRE(had_again != NULL);
    CHECK_STR(pdk_box_id(had_again), pdk_box_id(box));
    CHECK(client_of(rt, pdk_box_id(box)) == before);
    CHECK_INT(atomic_load(&touching_calls), 0);
    pdk_box_free(had_again);
    pdk_box_free(box);
    pdk_serial_free(other);
    world_end(rt);
}

static bool found_there;
static int under_both;
static int get_in_the_way(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)detail;
    *seconds = 5;
    PDK_GUARD(world->pool.registry);
    pdk_entry *e = pdk_pool_find(&world->pool, id);
    if (strcmp(name, "connect") == 0 && found_there) /* ownership is published */
        e->reserved = 77;
    else if (strcmp(name, "connect") == 0)
        CHECK(pdk_entry_set_identity(e, &(pdk_identity){ "other", "t", 5, 1 }));
    if (strcmp(name, "destroy") == 0)
        under_both += e->reserved != 0 && e->lease == PDK_LEASE_DEL;
    return strcmp(name, "discover") == 0 && found_there ? WORLD_FOUND : WORLD_GO_ON;
}

TEST("an id that is given to somebody else while ownership is published: what was made is rolled back under both fences [E16]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    found_there = false;
    under_both = 0;
    world_hook = get_in_the_way;
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &box, &err), -1);
    CHECK_INT(err.kind, PDK_E_IDENTITY_COLLISION);
    CHECK_INT(atomic_load(&world_destroys), 1);
    CHECK_INT(under_both, 1);
    CHECK_INT(atomic_load(&world_closes), 1);
    world_end(rt);
}

TEST("a discovered one that is reserved while ownership is published is being destroyed: neither handed out nor stopped [E17]")
{
    pdk_runtime *rt = world = world_open(MANUAL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    found_there = true;
    world_hook = get_in_the_way;
    CHECK_INT(pdk_acquire(rt, &(pdk_request){ .thread = "t" }, &box, &err), -1);
    CHECK_INT(err.kind, PDK_E_BEING_DESTROYED);
    CHECK_INT(atomic_load(&world_destroys), 0);
    CHECK_INT(atomic_load(&world_closes), 1);
    world_hook = NULL;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = PDK_OF(pdk_map_each(&rt->pool.ids, NULL), pdk_entry, by_id);
        CHECK(e->state == PDK_ABSENT && e->reserved == 77 && e->intents == 0);
        e->reserved = 0;
        pdk_entry_sweep(&rt->pool, e);
    }
    world_end(rt);
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
    turns t = { .s = pdk_serial_new(path, true, NULL) };
    turns peer = { .s = pdk_serial_new(path, true, NULL) }; /* as another process: a file description of its own */
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
    pdk_limit soon = { .deadline = pdk_now_monotonic() + 50 * 1000 * 1000 };
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
    pdk_limit limit = { .deadline = PDK_NEVER, .cancelled = &t->cancelled };
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
        turns t = { .s = pdk_serial_new(NULL, true, NULL) }, after = { .s = t.s };
        pdk_turn held = PDK_NO_TURN;
        pdk_thread one, two;
        CHECK_INT(pdk_turn_enter(t.s, "k", 1, &held, &PDK_NO_LIMIT, NULL), 0);
        CHECK_INT(pdk_thread_start(&one, "one", wait_for_turn, &t), 0);
        pdk_sleep_ns(20 * 1000 * 1000);
        if (live)
            CHECK_INT(pdk_thread_start(&two, "two", wait_for_turn, &after), 0);
        atomic_store(&t.cancelled, true);
        double before = test_now();
        pdk_thread_join(&one);
        CHECK_INT(atomic_load(&t.most), 1);
        pdk_turn_leave(&held);
        if (live) {
            pdk_thread_join(&two);
            CHECK_INT(atomic_load(&after.done), 1);
        }
        CHECK_WITHIN(before, 1);
        CHECK_INT((int)pdk_serial_keys(t.s), 0);
        pdk_serial_free(t.s);
    }
}

TEST("closing the serializer ends its waiters, and later waits [F15]")
{
    turns t = { .s = pdk_serial_new(NULL, true, NULL) };
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
            pdk_pool_bind(&p, e, id);
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
