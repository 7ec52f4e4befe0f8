/* The default instance and implementations behind its interface: CONTRACT, section A, with its races. An implementation here is a
 * `thing` that counts what is done to it; its functions may be told to call the default instance again, or to be slow. */
#include "test.h"
#include "world.h"

#include <sys/wait.h>

typedef struct thing {
    atomic_int resets, shutdowns, releases, acquires;
    atomic_llong detached_at;      /* what the sequence was when its reset or shutdown ran; 0 = not yet */
    void (*on_end)(struct thing *t); /* inside reset and shutdown */
    int fail_shutdown;
    bool alive;
} thing;

static atomic_int things_freed, things_made, things_shut;
static atomic_llong sequence;

static int thing_acquire(void *self, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err)
{
    thing *t = self;
    CHECK(t->alive);
    atomic_fetch_add(&t->acquires, 1);
    if (req->thread != NULL && strcmp(req->thread, "fail") == 0) {
        err->kind = PDK_E_CAPACITY_EXHAUSTED;
        snprintf(err->message, sizeof err->message, "no room");
        return -1;
    }
    if (req->thread != NULL && strcmp(req->thread, "mute") == 0)
        return -1;
    snprintf(id, PDK_ID_SIZE, "id-%s", req->thread != NULL ? req->thread : "none");
    return 0;
}

static int thing_get(void *self, const char *id, void **client, pdk_error *err)
{
    (void)err;
    CHECK(((thing *)self)->alive);
    *client = strncmp(id, "id-", 3) == 0 ? self : NULL;
    return 0;
}

static int thing_release(void *self, const char *id, pdk_error *err)
{
    (void)id, (void)err;
    atomic_fetch_add(&((thing *)self)->releases, 1);
    return 0;
}

static void thing_ends(thing *t)
{
    atomic_store(&t->detached_at, atomic_fetch_add(&sequence, 1) + 1);
    if (t->on_end != NULL)
        t->on_end(t);
}

static void thing_reset(void *self)
{
    thing *t = self;
    atomic_fetch_add(&t->resets, 1);
    thing_ends(t);
}

static int thing_shutdown(void *self, pdk_error *err)
{
    thing *t = self;
    atomic_fetch_add(&t->shutdowns, 1);
    atomic_fetch_add(&things_shut, 1);
    thing_ends(t);
    if (t->fail_shutdown == 0)
        return 0;
    err->kind = PDK_E_BACKEND_ERROR;
    snprintf(err->message, sizeof err->message, "one is left");
    return -1;
}

static void thing_free(void *self)
{
    thing *t = self;
    CHECK(t->alive);
    t->alive = false;
    atomic_fetch_add(&things_freed, 1);
    free(t);
}

static const pdk_impl_ops BARE = { .size = sizeof BARE, .acquire = thing_acquire, .get = thing_get, .release = thing_release,
                                   .free = thing_free };
static const pdk_impl_ops FULL = { .size = sizeof FULL, .acquire = thing_acquire, .get = thing_get, .release = thing_release,
                                   .free = thing_free, .reset = thing_reset, .shutdown = thing_shutdown };

static pdk_impl *new_thing(const pdk_impl_ops *ops, thing **out)
{
    thing *t = calloc(1, sizeof *t);
    t->alive = true;
    atomic_fetch_add(&things_made, 1);
    pdk_impl *impl = pdk_impl_new(ops, t, NULL);
    CHECK(impl != NULL);
    if (out != NULL)
        *out = t;
    return impl;
}

/* Back to how a process begins; all things of the test must be gone. */
static void tidy(void)
{
    pdk_set_constructor(NULL, NULL);
    pdk_set_default(NULL);
    CHECK(pdk_default_peek() == NULL);
    for (double until = test_now() + 20; atomic_load(&things_freed) != atomic_load(&things_made) && test_now() < until;)
        usleep(1000); /* the last reference may go with an operation, on its worker */
    CHECK_INT(atomic_load(&things_freed), atomic_load(&things_made));
}

static atomic_int constructed;
static pdk_impl *construct(void *arg, const void *args, pdk_error *err)
{
    (void)args, (void)err;
    atomic_fetch_add(&constructed, 1);
    return new_thing(arg, NULL);
}

static pdk_impl *construct_nothing(void *arg, const void *args, pdk_error *err)
{
    (void)arg, (void)args;
    if (arg != NULL) {
        err->kind = PDK_E_IO_ERROR;
        snprintf(err->message, sizeof err->message, "no disk");
    }
    return NULL;
}

TEST("three functions are an implementation, and all else has defaults [A1, A2, R1, S1]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    thing *t;
    pdk_impl *impl = new_thing(&BARE, &t);
    char id[PDK_ID_SIZE], bound[PDK_ID_SIZE];
    void *client;
    CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "t1" }, id, &err), 0);
    CHECK_STR(id, "id-t1");
    CHECK_INT(pdk_impl_get(impl, id, NULL, &client, &err), 0);
    CHECK(client == t);
    pdk_impl_put(impl, client);
    CHECK_INT(pdk_impl_get(impl, "other", NULL, &client, &err), 0);
    CHECK(client == NULL);
    CHECK_INT(pdk_impl_get(impl, id, &(pdk_request){ .thread = "t1" }, &client, &err), 0);
    CHECK(client == NULL); /* A5: it knows no identities */
    pdk_impl_facts facts = pdk_impl_describe(impl);
    CHECK(!facts.thread_data_mounts && facts.upload_permission_adjustment && !facts.agent_skill_isolation);
    CHECK_STR(facts.network_mode, "open");
    CHECK_NUM(facts.network_grant, 300, 0);
    pdk_network_event *events;
    CHECK_INT(pdk_impl_network_events(impl, id, &events, &err), 0);
    CHECK(events == NULL);
    CHECK_INT(pdk_impl_deny_pending(impl, id, &err), 0);
    CHECK_INT(pdk_impl_decide(impl, id, "r1", PDK_NETWORK_ALLOW, &err), 0);
    CHECK_INT(pdk_impl_sync_skills(impl, &(pdk_skills){ .sandbox_id = id }, &err), 0);
    CHECK_INT(pdk_impl_binding(impl, "nobody", bound, &err), 0);
    pdk_impl_reset(impl);
    CHECK_INT(pdk_impl_shutdown(impl, &err), 0);
    CHECK_INT(pdk_impl_release(impl, id, &err), 0);
    CHECK_INT(t->releases, 1);
    CHECK_KIND(err, PDK_OK);
    CHECK(pdk_impl_runtime(impl) == NULL);
    pdk_impl_unref(impl);
    tidy();
}

TEST("what is missing in an implementation is named, and its errors reach the caller")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char id[PDK_ID_SIZE];
    pdk_impl_ops ops = BARE;
    ops.get = NULL;
    CHECK(pdk_impl_new(&ops, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(err.message, "get");
    ops = BARE;
    ops.size = 0;
    CHECK(pdk_impl_new(&ops, NULL, &err) == NULL);
    CHECK_HAS(err.message, "size");
    ops = BARE;
    ops.leave = (int (*)(void *, const char *, pdk_error *))thing_release;
    CHECK(pdk_impl_new(&ops, NULL, &err) == NULL);
    CHECK_HAS(err.message, "retain");
    pdk_impl *impl = new_thing(&BARE, NULL);
    CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "fail" }, id, &err), -1);
    CHECK_KIND(err, PDK_E_CAPACITY_EXHAUSTED);
    CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "mute" }, id, &err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK_STR(id, "");
    char longer[100];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = longer }, id, &err), 0); /* cut by the thing itself */
    pdk_impl_unref(impl);
    tidy();
}

TEST("holders of an implementation: a release by id changes nothing while one holds, the last to leave releases")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char id[PDK_ID_SIZE];
    thing *t;
    pdk_impl *impl = new_thing(&BARE, &t);
    CHECK_INT(pdk_impl_retain(impl, "id-1", "run", &err), 0);
    CHECK_INT(pdk_impl_retain(impl, "id-1", "run", &err), 0);
    CHECK_INT(pdk_impl_retain(impl, "id-1", "upload", &err), 0);
    CHECK_INT(pdk_impl_retain(impl, "id-2", "run", &err), -1);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    pdk_error_clear(&err);
    CHECK_INT(pdk_impl_binding(impl, "run", id, &err), 1);
    CHECK_STR(id, "id-1");
    CHECK_INT(pdk_impl_release(impl, "id-1", &err), 0);
    CHECK_INT(pdk_impl_leave(impl, "upload", &err), 0);
    CHECK_INT(pdk_impl_leave(impl, "upload", &err), 0);
    CHECK_INT(t->releases, 0);
    CHECK_INT(pdk_impl_leave(impl, "run", &err), 0);
    CHECK_INT(t->releases, 1);
    CHECK_INT(pdk_impl_binding(impl, "run", id, &err), 0);
    pdk_impl_unref(impl);
    tidy();
}

TEST("peeking returns what is installed or nothing, and never makes one [A6]")
{
    constructed = 0;
    setenv("PADDOCK_CONFIG", "/nonexistent/config.lua", 1);
    pdk_set_constructor(construct, (void *)&BARE);
    CHECK(pdk_default_peek() == NULL);
    pdk_impl *impl = new_thing(&BARE, NULL);
    pdk_set_default(impl);
    pdk_impl *seen = pdk_default_peek();
    CHECK(seen == impl);
    pdk_impl_unref(seen);
    pdk_impl_unref(impl);
    CHECK_INT(constructed, 0);
    tidy();
    unsetenv("PADDOCK_CONFIG");
}

TEST("getting an installed one reads no configuration, runs no constructor, looks at no arguments [A7]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    constructed = 0;
    setenv("PADDOCK_CONFIG", "/nonexistent/config.lua", 1);
    pdk_set_constructor(construct, (void *)&BARE);
    pdk_impl *impl = new_thing(&BARE, NULL);
    pdk_set_default(impl);
    pdk_impl *got = pdk_default_with("/nonexistent/other.lua", &err, &err);
    CHECK(got == impl);
    CHECK_KIND(err, PDK_OK);
    pdk_impl_unref(got);
    pdk_impl_unref(impl);
    CHECK_INT(constructed, 0);
    tidy();
    unsetenv("PADDOCK_CONFIG");
}

/* ---- cold gets -------------------------------------------------------------------------------------------- */

static const void *args_seen;
static void *peek_on_a_thread(void *arg)
{
    (void)arg;
    pdk_impl_unref(pdk_default_peek());
    pdk_set_constructor(NULL, NULL);
    return NULL;
}

/* Another thread gets through meanwhile: the lock is not held here. */
static pdk_impl *construct_and_look(void *arg, const void *args, pdk_error *err)
{
    pdk_thread thread;
    args_seen = args;
    if (CHECK_INT(pdk_thread_start(&thread, "test-peek", peek_on_a_thread, NULL), 0))
        pdk_thread_join(&thread);
    return construct(arg, args, err);
}

static const char *write_config(const char *name, const char *text)
{
    static char path[300];
    snprintf(path, sizeof path, "%s/%s", test_tmpdir(), name);
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
    return path;
}

TEST("a cold get makes what `use` in the configuration names, with the caller's arguments and outside the lock [A8]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    const char *path = write_config("use.lua", "return { use = 'theirs' }");
    constructed = 0;
    CHECK(pdk_default_with(path, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(err.message, "theirs");
    pdk_error_clear(&err);
    CHECK_INT(pdk_add_constructor("theirs", construct_and_look, (void *)&BARE, &err), 0);
    int mine = 0;
    pdk_impl *impl = pdk_default_with(path, &mine, &err);
    CHECK(impl != NULL);
    CHECK_KIND(err, PDK_OK);
    CHECK(args_seen == &mine);
    CHECK_INT(constructed, 1);
    setenv("PADDOCK_CONFIG", path, 1);
    pdk_impl *again = pdk_default(&err);
    CHECK(again == impl);
    CHECK_INT(constructed, 1);
    pdk_impl_unref(again);
    pdk_impl_unref(impl);
    pdk_set_default(NULL);
    impl = pdk_default(&err); /* by the environment's */
    CHECK_INT(constructed, 2);
    pdk_impl_unref(impl);
    unsetenv("PADDOCK_CONFIG");
    CHECK(pdk_open(path, &err) == NULL); /* a runtime that is opened is ours */
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(err.message, "use");
    tidy();
}

TEST("a constructor that makes nothing is an error, and the next get tries again [A8]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_set_constructor(construct_nothing, &err);
    CHECK(pdk_default(&err) == NULL);
    CHECK_KIND(err, PDK_E_IO_ERROR);
    pdk_set_constructor(construct_nothing, NULL);
    CHECK(pdk_default(&err) == NULL);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    pdk_error_clear(&err);
    pdk_set_constructor(construct, (void *)&BARE);
    pdk_impl *impl = pdk_default(&err);
    CHECK(impl != NULL);
    pdk_impl_unref(impl);
    tidy();
}

static pthread_barrier_t both;
static atomic_int raced_count;
static const pdk_impl_ops *race_ops;

static void look_at_default(thing *t)
{
    (void)t;
    pdk_impl *impl = pdk_default_peek(); /* would wait for ever if the lock were held */
    CHECK(impl != NULL);
    pdk_impl_unref(impl);
}

static pdk_impl *construct_together(void *arg, const void *args, pdk_error *err)
{
    (void)arg, (void)args, (void)err;
    thing *t;
    pdk_impl *impl = new_thing(race_ops, &t);
    t->on_end = look_at_default;
    atomic_fetch_add(&raced_count, 1);
    pthread_barrier_wait(&both); /* nobody is installed before both are made */
    return impl;
}

static void *get_default(void *out)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    *(pdk_impl **)out = pdk_default(&err);
    CHECK_KIND(err, PDK_OK);
    return NULL;
}

TEST("two threads race a cold get: one is installed, both get it, the loser is shut down outside the lock [A9]")
{
    const pdk_impl_ops *kinds[] = { &FULL, &BARE }; /* one without a shutdown is dropped silently */
    for (size_t k = 0; k < 2; k++) {
        pdk_impl *got[2] = { NULL, NULL };
        pdk_thread threads[2];
        int freed = atomic_load(&things_freed), shut = atomic_load(&things_shut);
        race_ops = kinds[k];
        raced_count = 0;
        pthread_barrier_init(&both, NULL, 2);
        pdk_set_constructor(construct_together, NULL);
        for (int i = 0; i < 2; i++)
            CHECK_INT(pdk_thread_start(&threads[i], "test-race", get_default, &got[i]), 0);
        for (int i = 0; i < 2; i++)
            pdk_thread_join(&threads[i]);
        CHECK(got[0] != NULL && got[0] == got[1]);
        CHECK_INT(atomic_load(&things_freed) - freed, 1); /* the loser, whose memory is gone */
        CHECK_INT(atomic_load(&things_shut) - shut, k == 0 ? 1 : 0);
        CHECK_INT(atomic_load(&raced_count), 2);
        pdk_impl_unref(got[0]);
        pdk_impl_unref(got[1]);
        pthread_barrier_destroy(&both);
        tidy();
    }
}

static atomic_int loser_shutdowns;
static int count_shutdown(void *self, pdk_error *err)
{
    (void)self, (void)err;
    atomic_fetch_add(&loser_shutdowns, 1);
    return 0;
}

static pdk_impl *construct_shared(void *arg, const void *args, pdk_error *err)
{
    (void)args, (void)err;
    if (atomic_fetch_add(&raced_count, 1) < 2)
        pthread_barrier_wait(&both);
    return pdk_impl_ref(arg);
}

TEST("a constructor that hands both racers the same object has no loser: it is not shut down [A9]")
{
    pdk_impl_ops ops = FULL;
    ops.shutdown = count_shutdown;
    pdk_impl *one = new_thing(&ops, NULL), *got[2] = { NULL, NULL };
    pdk_thread threads[2];
    raced_count = loser_shutdowns = 0;
    pthread_barrier_init(&both, NULL, 2);
    pdk_set_constructor(construct_shared, one);
    for (int i = 0; i < 2; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "test-race", get_default, &got[i]), 0);
    for (int i = 0; i < 2; i++)
        pdk_thread_join(&threads[i]);
    CHECK(got[0] == one && got[1] == one);
    CHECK_INT(loser_shutdowns, 0);
    pdk_impl_unref(got[0]);
    pdk_impl_unref(got[1]);
    pdk_impl_unref(one);
    pthread_barrier_destroy(&both);
    tidy();
}

/* ---- reset, shutdown, set ----------------------------------------------------------------------------------- */

static void holders_are_gone(thing *t)
{
    (void)t;
    pdk_impl *now = pdk_default_peek();
    CHECK(now == NULL); /* the reference is cleared first */
    pdk_impl_unref(now);
}

static pdk_impl *watched;
static void watched_has_no_holders(thing *t)
{
    char id[PDK_ID_SIZE];
    holders_are_gone(t);
    CHECK_INT(pdk_impl_binding(watched, "run", id, NULL), 0); /* and its holders before its own reset or shutdown */
}

TEST("reset clears the reference, discards the holders, then resets; no shutdown, and the next get makes a new one [A10]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    thing *t;
    pdk_reset_default(); /* with nothing installed: nothing */
    pdk_set_constructor(construct, (void *)&FULL);
    watched = new_thing(&FULL, &t);
    t->on_end = watched_has_no_holders;
    pdk_set_default(watched);
    CHECK_INT(pdk_impl_retain(watched, "id-1", "run", &err), 0);
    pdk_reset_default();
    CHECK_INT(t->resets, 1);
    CHECK_INT(t->shutdowns, 0);
    CHECK_INT(t->releases, 0);
    pdk_impl *next = pdk_default(&err);
    CHECK(next != NULL && next != watched);
    pdk_impl_unref(next);
    pdk_impl_unref(watched);
    watched = new_thing(&BARE, NULL); /* the inherited reset does nothing */
    pdk_set_default(watched);
    pdk_reset_default();
    CHECK(pdk_default_peek() == NULL);
    pdk_impl_unref(watched);
    tidy();
}

TEST("shutdown does the same with its shutdown, and one without is only dropped [A11]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    thing *t;
    CHECK_INT(pdk_shutdown_default(&err), 0);
    watched = new_thing(&FULL, &t);
    t->on_end = watched_has_no_holders;
    pdk_set_default(watched);
    CHECK_INT(pdk_impl_retain(watched, "id-1", "run", &err), 0);
    t->fail_shutdown = 1;
    CHECK_INT(pdk_shutdown_default(&err), -1);
    CHECK_KIND(err, PDK_E_BACKEND_ERROR);
    CHECK(pdk_default_peek() == NULL);
    t->fail_shutdown = 0;
    CHECK_INT(pdk_impl_shutdown(watched, &err), 0); /* who kept it tries again */
    CHECK_INT(t->shutdowns, 2);
    CHECK_INT(t->resets, 0);
    pdk_impl_unref(watched);
    pdk_impl *bare = new_thing(&BARE, NULL);
    pdk_set_default(bare);
    CHECK_INT(pdk_shutdown_default(&err), 0);
    CHECK(pdk_default_peek() == NULL);
    pdk_impl_unref(bare);
    tidy();
}

TEST("set neither resets nor shuts down the former one; its holders go, unless it is the same [A12]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char id[PDK_ID_SIZE];
    thing *t;
    pdk_impl *first = new_thing(&FULL, &t), *second = new_thing(&FULL, NULL);
    pdk_set_default(first);
    CHECK_INT(pdk_impl_retain(first, "id-1", "run", &err), 0);
    pdk_set_default(first);
    CHECK_INT(pdk_impl_binding(first, "run", id, &err), 1);
    pdk_set_default(second);
    CHECK_INT(pdk_impl_binding(first, "run", id, &err), 0);
    CHECK_INT(t->resets + t->shutdowns + t->releases, 0);
    CHECK_INT(pdk_impl_acquire(first, &(pdk_request){ .thread = "t" }, id, &err), 0); /* it goes on for those who have it */
    pdk_impl_unref(first);
    pdk_impl_unref(second);
    tidy();
}

/* ---- calling it from inside -------------------------------------------------------------------------------------- */

static int reentry;
static pdk_impl *construct_again(void *arg, const void *args, pdk_error *err)
{
    (void)args;
    int how = reentry++;
    if (how == 0 && arg == NULL) { /* get: has another one made and installed */
        pdk_impl *inner = pdk_default(err);
        CHECK(inner != NULL);
        pdk_impl_unref(inner);
    } else if (how == 0) { /* set, reset, shutdown */
        pdk_impl *other = new_thing(&FULL, NULL);
        pdk_set_default(other);
        pdk_reset_default();
        pdk_set_default(other);
        CHECK_INT(pdk_shutdown_default(err), 0);
        pdk_impl_unref(other);
    }
    return new_thing(&FULL, NULL);
}

static pdk_impl *construct_for_ever(void *arg, const void *args, pdk_error *err)
{
    (void)arg, (void)args;
    return pdk_default(err);
}

static void get_set_and_shut(thing *t)
{
    t->on_end = NULL;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_impl *next = pdk_default(&err);
    CHECK(next != NULL);
    pdk_reset_default();
    pdk_set_default(next);
    CHECK_INT(pdk_shutdown_default(&err), 0);
    pdk_impl_unref(next);
}

TEST("constructor, reset and shutdown may call all of it again [A13]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    for (int how = 0; how < 2; how++) {
        reentry = 0;
        pdk_set_constructor(construct_again, how == 0 ? NULL : &err);
        pdk_impl *impl = pdk_default(&err);
        CHECK(impl != NULL);
        pdk_impl *now = pdk_default_peek();
        CHECK(now == impl);
        pdk_impl_unref(now);
        pdk_impl_unref(impl);
        pdk_set_default(NULL);
    }
    pdk_set_constructor(construct_for_ever, NULL);
    CHECK(pdk_default(&err) == NULL);
    CHECK_KIND(err, PDK_E_UNSUPPORTED);
    pdk_error_clear(&err);
    pdk_set_constructor(construct, (void *)&FULL);
    for (int how = 0; how < 2; how++) {
        thing *t;
        pdk_impl *impl = new_thing(&FULL, &t);
        t->on_end = get_set_and_shut;
        pdk_set_default(impl);
        pdk_impl_unref(impl);
        if (how == 0)
            pdk_reset_default();
        else
            CHECK_INT(pdk_shutdown_default(&err), 0);
    }
    tidy();
}

static pthread_barrier_t inside;
static void wait_inside(thing *t)
{
    (void)t;
    pthread_barrier_wait(&inside); /* the test has seen that it is in there */
    pthread_barrier_wait(&inside); /* and lets it go */
}

static pdk_impl *construct_slowly(void *arg, const void *args, pdk_error *err)
{
    wait_inside(NULL);
    return construct(arg, args, err);
}

static void *reset_it(void *arg)
{
    (void)arg;
    pdk_reset_default();
    return NULL;
}

static void *shut_it(void *arg)
{
    (void)arg;
    pdk_shutdown_default(NULL);
    return NULL;
}

TEST("a slow constructor, reset or shutdown holds up no get [A13]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    void *(*const ends[])(void *) = { reset_it, shut_it };
    pdk_thread thread;
    thing *t;
    pthread_barrier_init(&inside, NULL, 2);
    for (size_t i = 0; i < 2; i++) {
        pdk_impl *impl = new_thing(&FULL, &t);
        t->on_end = wait_inside;
        pdk_set_default(impl);
        CHECK_INT(pdk_thread_start(&thread, "test-end", ends[i], NULL), 0);
        pthread_barrier_wait(&inside);
        pdk_set_constructor(construct, (void *)&FULL);
        pdk_impl *next = pdk_default(&err); /* comes back although the other one is still at it */
        CHECK(next != NULL && next != impl);
        pthread_barrier_wait(&inside);
        pdk_thread_join(&thread);
        pdk_impl *now = pdk_default_peek();
        CHECK(now == next); /* the slow one's end took nothing away */
        pdk_impl_unref(now);
        pdk_impl_unref(next);
        pdk_impl_unref(impl);
        pdk_set_default(NULL);
    }
    pdk_impl *slow = NULL, *quick = new_thing(&FULL, NULL);
    pdk_set_constructor(construct_slowly, (void *)&FULL);
    CHECK_INT(pdk_thread_start(&thread, "test-get", get_default, &slow), 0);
    pthread_barrier_wait(&inside);
    pdk_set_default(quick);
    pdk_impl *got = pdk_default(&err);
    CHECK(got == quick);
    pthread_barrier_wait(&inside);
    pdk_thread_join(&thread);
    CHECK(slow == quick); /* what was installed meanwhile won */
    pdk_impl_unref(slow);
    pdk_impl_unref(got);
    pdk_impl_unref(quick);
    pthread_barrier_destroy(&inside);
    tidy();
}

enum { ROUNDS = 3000, GETTERS = 3 };
static atomic_bool stop_getting;

static void *get_and_use(void *arg)
{
    (void)arg;
    while (!atomic_load(&stop_getting)) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        char id[PDK_ID_SIZE];
        void *client;
        long long before = atomic_load(&sequence);
        pdk_impl *impl = pdk_default(&err);
        if (!CHECK(impl != NULL))
            break;
        CHECK_INT(pdk_impl_get(impl, "id-1", NULL, &client, &err), 0);
        long long detached = atomic_load(&((thing *)client)->detached_at);
        if (detached != 0 && detached <= before)
            test_fail(__FILE__, __LINE__, "an instance was handed out after it had been detached");
        CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "t" }, id, &err), 0);
        pdk_impl_unref(impl); /* the client keeps it */
        CHECK(((thing *)client)->alive);
        pdk_impl_put(impl, client);
    }
    return NULL;
}

TEST("gets that race resets, shutdowns and sets return a whole instance, never nothing, and none that was detached before [A13]")
{
    pdk_thread threads[GETTERS];
    stop_getting = false;
    pdk_set_constructor(construct, (void *)&FULL);
    for (int i = 0; i < GETTERS; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "test-get", get_and_use, NULL), 0);
    for (int i = 0; i < ROUNDS; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (i % 3 == 0)
            pdk_reset_default();
        else if (i % 3 == 1)
            CHECK_INT(pdk_shutdown_default(&err), 0);
        else
            pdk_impl_unref(pdk_default(&err));
    }
    atomic_store(&stop_getting, true);
    for (int i = 0; i < GETTERS; i++)
        pdk_thread_join(&threads[i]);
    pdk_reset_default();
    tidy();
}

/* ---- asynchronously ------------------------------------------------------------------------------------------------ */

static pthread_barrier_t at_work;
static atomic_bool hold_work;
static atomic_int works_ended;

static void work_slowly(void)
{
    if (!atomic_load(&hold_work))
        return;
    pthread_barrier_wait(&at_work); /* the test has seen that it runs */
    pthread_barrier_wait(&at_work); /* and lets it go */
    atomic_fetch_add(&works_ended, 1);
}

static int slow_acquire(void *self, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err)
{
    work_slowly();
    return thing_acquire(self, req, id, err);
}

static int slow_sync(void *self, const pdk_skills *skills, pdk_error *err)
{
    (void)self;
    CHECK_STR(skills->projection_json, "{}");
    work_slowly();
    if (strcmp(skills->sandbox_id, "id-bad") != 0)
        return 0;
    err->kind = PDK_E_IO_ERROR;
    snprintf(err->message, sizeof err->message, "cannot copy");
    return -1;
}

static int slow_events(void *self, const char *id, pdk_network_event **out, pdk_error *err)
{
    (void)self, (void)err;
    work_slowly();
    *out = calloc(1, sizeof **out);
    snprintf((*out)->request_id, sizeof (*out)->request_id, "of-%s", id);
    return 1;
}

static int slow_deny(void *self, const char *id, pdk_error *err)
{
    (void)self, (void)id, (void)err;
    work_slowly();
    return 1;
}

static int slow_decide(void *self, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err)
{
    (void)self, (void)id, (void)err;
    work_slowly();
    return decision == PDK_NETWORK_ALLOW && strcmp(request_id, "r1") == 0;
}

static pdk_impl *slow_thing(void)
{
    pdk_impl_ops ops = BARE;
    ops.acquire = slow_acquire;
    ops.sync_skills = slow_sync;
    ops.network_events = slow_events;
    ops.deny_pending = slow_deny;
    ops.decide = slow_decide;
    return new_thing(&ops, NULL);
}

static void told(void *ctx, pdk_op *op)
{
    CHECK(pdk_op_poll(op, NULL) != 0);
    (*(int *)ctx)++;
}

/* The host's loop: it turns while the operation runs, and hears of the end. */
static int turn_until_told(pdk_runtime *rt, int *heard, bool slow)
{
    int turns = 0;
    if (slow)
        pthread_barrier_wait(&at_work);
    for (; turns < 1000; turns++)
        CHECK_INT(pdk_dispatch(rt, 10), 0);
    if (slow)
        pthread_barrier_wait(&at_work);
    for (double until = test_now() + 20; *heard == 0 && test_now() < until;)
        if (pdk_dispatch(rt, 10) == 0)
            usleep(1000);
    return turns;
}

TEST("an asynchronous acquire runs the blocking one on a worker: the same id or error, the host's loop turns meanwhile [A3]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_impl *impl = slow_thing();
    char id[PDK_ID_SIZE] = "", thread[] = "t1";
    int heard = 0;
    pthread_barrier_init(&at_work, NULL, 2);
    hold_work = true;
    pdk_op *op = pdk_impl_acquire_async(impl, &(pdk_request){ .thread = thread }, told, &heard, &err);
    REQUIRE(op != NULL);
    thread[0] = 'x'; /* it has a copy */
    CHECK_INT(pdk_op_poll(op, &err), 0);
    CHECK_INT(turn_until_told(NULL, &heard, true), 1000);
    CHECK_INT(pdk_op_poll(op, &err), 1);
    CHECK_INT(pdk_op_id(op, id), 1);
    CHECK_STR(id, "id-t1");
    pdk_op_free(op);
    hold_work = false;
    op = pdk_impl_acquire_async(impl, &(pdk_request){ .thread = "fail" }, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 20, &err), -1);
    CHECK_KIND(err, PDK_E_CAPACITY_EXHAUSTED);
    CHECK_INT(pdk_op_id(op, id), 0);
    pdk_op_free(op);
    op = pdk_impl_acquire_async(impl, &(pdk_request){ .thread = "t2" }, NULL, NULL, &err);
    pdk_impl_unref(impl); /* the operation keeps it */
    CHECK_INT(pdk_op_wait(op, 20, &err), 1);
    CHECK_INT(pdk_op_id(op, id), 1);
    CHECK_STR(id, "id-t2");
    pdk_op_free(op);
    CHECK(pdk_impl_acquire_async(NULL, NULL, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    pthread_barrier_destroy(&at_work);
    tidy();
}

TEST("network decisions and skills run on a worker too: their answers, their errors [R5, S2]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_impl *impl = slow_thing();
    pdk_network_event *events = NULL;
    int heard = 0;
    pthread_barrier_init(&at_work, NULL, 2);
    hold_work = true;
    for (int which = 0; which < 4; which++) {
        const pdk_skills skills = { .sandbox_id = "id-1", .user = "u", .thread = "t", .projection_json = "{}" };
        heard = 0;
        pdk_op *op = which == 0   ? pdk_impl_network_events_async(impl, "id-1", 0, told, &heard, &err)
                     : which == 1 ? pdk_impl_deny_pending_async(impl, "id-1", 0, told, &heard, &err)
                     : which == 2 ? pdk_impl_decide_async(impl, "id-1", "r1", PDK_NETWORK_ALLOW, 0, told, &heard, &err)
                                  : pdk_impl_sync_skills_async(impl, &skills, 0, told, &heard, &err);
        REQUIRE(op != NULL);
        CHECK_INT(turn_until_told(NULL, &heard, true), 1000);
        CHECK_INT(pdk_op_poll(op, &err), 1);
        CHECK_INT(pdk_op_answer(op), which < 3);
        CHECK_INT(pdk_op_events(op, &events), which == 0);
        if (which == 0)
            CHECK_STR(events->request_id, "of-id-1");
        free(events);
        pdk_op_free(op);
    }
    hold_work = false;
    pdk_op *op = pdk_impl_sync_skills_async(impl, &(pdk_skills){ .sandbox_id = "id-bad", .projection_json = "{}" }, 0, NULL, NULL, &err);
    CHECK_INT(pdk_op_wait(op, 20, &err), -1);
    CHECK_KIND(err, PDK_E_IO_ERROR);
    pdk_op_free(op);
    CHECK(pdk_impl_decide_async(impl, "id-1", "r1", PDK_NETWORK_DENY, -1, NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    pdk_impl_unref(impl);
    pthread_barrier_destroy(&at_work);
    tidy();
}

TEST("a sync that is cancelled while it runs, once or twice, tells its caller when it has ended; its late failure is not told [S3, F12]")
{
    for (int times = 1; times <= 2; times++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_impl *impl = slow_thing();
        pthread_barrier_init(&at_work, NULL, 2);
        hold_work = true;
        works_ended = 0;
        const pdk_skills skills = { .sandbox_id = times == 1 ? "id-1" : "id-bad", .projection_json = "{}" };
        pdk_op *op = pdk_impl_sync_skills_async(impl, &skills, 0, NULL, NULL, &err);
        REQUIRE(op != NULL);
        pthread_barrier_wait(&at_work);
        for (int i = 0; i < times; i++)
            CHECK_INT(pdk_cancel(op), 0);
        CHECK_INT(pdk_op_wait(op, 0.1, &err), 0); /* still at work */
        CHECK_INT(atomic_load(&works_ended), 0);
        pthread_barrier_wait(&at_work);
        CHECK_INT(pdk_op_wait(op, 20, &err), -1);
        CHECK_KIND(err, PDK_E_CANCELLED);
        CHECK_INT(atomic_load(&works_ended), 1);
        CHECK_INT(pdk_cancel(op), 1);
        pdk_op_free(op);
        pdk_impl_unref(impl);
        hold_work = false;
        pthread_barrier_destroy(&at_work);
    }
    tidy();
}

TEST("a runtime's skills and network decisions as operations, with threads and without: the defaults [R1, R5, S1, S2]")
{
    for (int threads = 0; threads < 2; threads++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        char id[PDK_ID_SIZE];
        pdk_network_event *events;
        pdk_impl *impl = pdk_impl_of(world_open(threads ? "threads = true," : "threads = false,"), &err);
        pdk_runtime *rt = pdk_impl_runtime(impl);
        pdk_op *op = pdk_impl_acquire_async(impl, &(pdk_request){ .thread = "t1" }, NULL, NULL, &err);
        REQUIRE(op != NULL);
        CHECK_INT(pdk_op_wait(op, 20, &err), 1);
        CHECK_INT(pdk_op_id(op, id), 1);
        pdk_op_free(op);
        const pdk_skills skills = { .sandbox_id = id };
        pdk_op *ops[] = { pdk_sync_skills_async(rt, &skills, 5, NULL, NULL, &err),
                          pdk_network_events_async(rt, id, 5, NULL, NULL, &err), pdk_deny_pending_async(rt, id, 5, NULL, NULL, &err),
                          pdk_decide_async(rt, id, "r", PDK_NETWORK_DENY, 5, NULL, NULL, &err),
                          pdk_impl_deny_pending_async(impl, id, 5, NULL, NULL, &err) };
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
            CHECK_INT(pdk_op_wait(ops[i], 20, &err), 1);
            CHECK_INT(pdk_op_answer(ops[i]), 0);
            CHECK_INT(pdk_op_events(ops[i], &events), 0);
            pdk_op_free(ops[i]);
        }
        CHECK_INT(pdk_impl_shutdown(impl, &err), 0);
        CHECK_KIND(err, PDK_OK);
        pdk_impl_unref(impl);
    }
    tidy();
}

/* ---- paddock's own --------------------------------------------------------------------------------------------- */

TEST("a runtime is an implementation: acquire, get, holders, release, and the memory lasts as long as somebody uses it [A1]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char id[PDK_ID_SIZE], bound[PDK_ID_SIZE];
    void *client;
    for (int threads = 0; threads < 2; threads++) {
        pdk_runtime *rt = world_open(threads ? "threads = true," : "threads = false,");
        pdk_impl *impl = pdk_impl_of(rt, &err);
        REQUIRE(impl != NULL);
        CHECK(pdk_impl_runtime(impl) == rt);
        pdk_set_default(impl);
        CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "t1" }, id, &err), 0);
        CHECK_INT(pdk_impl_get(impl, id, &(pdk_request){ .user = "u", .thread = "t1" }, &client, &err), 0);
        REQUIRE(client != NULL);
        pdk_result result;
        CHECK_INT(pdk_exec(client, &(pdk_command){ .command = "hello" }, &result, &err), 0);
        CHECK_STR(result.out, "hello");
        pdk_result_free(&result);
        pdk_impl_put(impl, client);
        CHECK_INT(pdk_impl_get(impl, id, &(pdk_request){ .user = "u", .thread = "t2" }, &client, &err), 0);
        CHECK(client == NULL);
        CHECK_INT(pdk_impl_retain(impl, id, "run", &err), 0);
        CHECK_INT(pdk_impl_binding(impl, "run", bound, &err), 1);
        CHECK_STR(bound, id);
        CHECK_INT(pdk_impl_release(impl, id, &err), 0);
        CHECK_INT(pdk_impl_get(impl, id, NULL, &client, &err), 0);
        CHECK(client != NULL); /* held: not parked */
        pdk_set_default(NULL);
        CHECK_INT(pdk_impl_binding(impl, "run", bound, &err), 0); /* A12 */
        pdk_impl_unref(impl);
        CHECK_INT(pdk_exec(client, &(pdk_command){ .command = "still" }, &result, &err), 0);
        pdk_result_free(&result); /* the client keeps the runtime */
        CHECK_INT(pdk_shutdown(rt, &err), 0);
        CHECK_KIND(err, PDK_OK);
        pdk_impl_put(impl, client);
    }
    tidy();
}

TEST("without a constructor a cold get opens a runtime on the configuration; reset lets its sandboxes run on, shutdown stops them [A8, A10, A11]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char text[4096], path[300], engine[300];
    snprintf(engine, sizeof engine, "%s", write_config("engine.lua", world_engine));
    snprintf(text, sizeof text, "return { use = 'paddock', backend = '%s', user = 'u', state_dir = '%s/state', log = 'off',\n"
             " ownership = { type = 'memory' } }", engine, test_tmpdir());
    snprintf(path, sizeof path, "%s", write_config("ours.lua", text));
    for (int shut = 0; shut < 2; shut++) {
        pdk_impl *impl = pdk_default_with(path, NULL, &err);
        CHECK_KIND(err, PDK_OK);
        REQUIRE(impl != NULL && pdk_impl_runtime(impl) != NULL);
        char id[PDK_ID_SIZE];
        CHECK_INT(pdk_script_enter(pdk_impl_runtime(impl)->script, world_install, NULL, &err), 0);
        CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "t1" }, id, &err), 0);
        int before = atomic_load(&world_destroys);
        if (shut)
            CHECK_INT(pdk_shutdown_default(&err), 0);
        else
            pdk_reset_default();
        CHECK_INT(atomic_load(&world_destroys) - before, shut);
        CHECK_INT(pdk_impl_acquire(impl, &(pdk_request){ .thread = "t1" }, id, &err), -1);
        CHECK_KIND(err, PDK_E_CLOSED);
        pdk_error_clear(&err);
        pdk_impl_unref(impl);
    }
    tidy();
}

TEST("a forked child has no default instance, and none of its parent's locks")
{
    pdk_impl *impl = new_thing(&BARE, NULL);
    pdk_set_default(impl);
    pdk_impl_unref(impl);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        if (pdk_default_peek() != NULL)
            _exit(1);
        pdk_set_constructor(construct, (void *)&BARE);
        _exit(pdk_default(NULL) == NULL);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK_INT(status, 0);
    pdk_impl *now = pdk_default_peek();
    CHECK(now == impl);
    pdk_impl_unref(now);
    tidy();
}

TEST_MAIN
