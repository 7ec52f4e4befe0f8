/* test_lease.c -- the rules of ownership, one suite over all stores; then what is true of the `file` store alone: several
 * processes, crashes, damage, boots, full disks.
 *
 * A store is a row of STORES. One that serves a single runtime (not `shared`) is left out where a test needs a peer. */
#include "lease_world.h"

/* ---- the rules, over every store -------------------------------------------------------------------------------- */

TEST("take: over no lease, an own one and a peer's; not over any `del`, one's own included [O1]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        CHECK(take(a, "x", 0) > 0);
        CHECK(take(a, "x", 0) > 0);
        CHECK(owner_is(a, "x", "a", false));
        if (b != NULL) {
            CHECK(take(b, "x", 0) > 0); /* a handover */
            CHECK(owner_is(a, "x", "b", false));
            CHECK(destroy(b, "y", 0) > 0);
            CHECK_INT(take(a, "y", 0), 0);
            CHECK(owner_is(a, "y", "b", true));
        }
        CHECK(destroy(a, "z", 0) > 0);
        CHECK_INT(take(a, "z", 0), 0);
        CHECK(owner_is(a, "z", "a", true));
    }
}

TEST("claim: over no lease or an own one, and never turns `del` back into `own` [O2]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        CHECK(claim(a, "x", 0) > 0);
        CHECK(claim(a, "x", 0) > 0);
        CHECK(destroy(a, "x", 0) > 0);
        CHECK_INT(claim(a, "x", 0), 0);
        CHECK(owner_is(a, "x", "a", true));
        if (b == NULL)
            continue;
        CHECK(take(b, "y", 0) > 0);
        CHECK_INT(claim(a, "y", 0), 0);
        CHECK(destroy(b, "y", 0) > 0);
        CHECK_INT(claim(a, "y", 0), 0);
        CHECK(owner_is(a, "y", "b", true));
    }
}

TEST("claim-for-destroy: writes `del` over no lease or an own one, in either state; never over a peer's [O2]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        CHECK(destroy(a, "x", 0) > 0);
        CHECK(owner_is(a, "x", "a", true));
        CHECK(destroy(a, "x", 0) > 0); /* once more: the heartbeat of a teardown */
        CHECK(take(a, "y", 0) > 0);
        CHECK(destroy(a, "y", 0) > 0);
        CHECK(owner_is(a, "y", "a", true));
        if (b == NULL)
            continue;
        CHECK_INT(destroy(b, "x", 0), 0);
        CHECK(take(b, "z", 0) > 0);
        CHECK_INT(destroy(a, "z", 0), 0);
        CHECK(owner_is(a, "z", "b", false));
    }
}

TEST("renew: renewed while it is ours, in either state; lapsed when it ran out; lost to a peer's `own` or `del` [O3]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        CHECK_INT(renew(a, "never"), PDK_LAPSED);
        CHECK(take(a, "x", 0) > 0);
        CHECK(destroy(a, "d", 0) > 0);
        for (int i = 0; i < 3; i++) { /* 1.8 ttl in all */
            pass(w, 0.6 * TTL);
            CHECK_INT(renew(a, "x"), PDK_RENEWED);
            CHECK_INT(renew(a, "d"), PDK_RENEWED);
        }
        CHECK(owner_is(a, "x", "a", false));
        CHECK(owner_is(a, "d", "a", true));
        pass(w, 1.1 * TTL);
        CHECK(owner_is(a, "x", NULL, false));
        CHECK_INT(renew(a, "x"), PDK_LAPSED);
        CHECK_INT(renew(a, "d"), PDK_LAPSED);
        CHECK(owner_is(a, "x", NULL, false)); /* a lapse is an answer, not a claim */
        if (b == NULL)
            continue;
        CHECK(take(a, "y", 0) > 0);
        CHECK(take(b, "y", 0) > 0);
        CHECK_INT(renew(a, "y"), PDK_LOST);
        CHECK(destroy(b, "y", 0) > 0);
        CHECK_INT(renew(a, "y"), PDK_LOST);
        CHECK_INT(renew(b, "y"), PDK_RENEWED);
    }
}

TEST("release: drops an own lease in either state, and no other [O3]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        CHECK_INT(release(a, "never"), 0);
        CHECK(take(a, "x", 0) > 0);
        CHECK_INT(release(a, "x"), 0);
        CHECK(owner_is(a, "x", NULL, false));
        CHECK_INT(release(a, "x"), 0);
        CHECK(destroy(a, "x", 0) > 0);
        CHECK_INT(release(a, "x"), 0);
        CHECK(take(a, "x", 0) > 0);
        if (b == NULL)
            continue;
        CHECK_INT(release(b, "x"), 0);
        CHECK(owner_is(b, "x", "a", false));
        CHECK(destroy(a, "x", 0) > 0);
        CHECK_INT(release(b, "x"), 0);
        CHECK(owner_is(b, "x", "a", true));
    }
}

TEST("owner only reads [O3]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a");
        pdk_lease_owner o;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK(owner_is(a, "x", NULL, false));
        int64_t token = take(a, "x", 0);
        pass(w, 0.6 * TTL);
        CHECK_INT(pdk_lease_owner_of(a, "x", &o, &err), 1);
        CHECK(o.ours && !o.del && o.token == token);
        pass(w, 0.6 * TTL);
        CHECK_INT(pdk_lease_owner_of(a, "x", &o, &err), 0); /* the look did not prolong it */
        CHECK(o.owner[0] == '\0' && !o.ours && o.token == 0);
    }
}

TEST("a lease that ran out is none: a peer may claim it, and take over a `del` that nobody keeps alive [O1 O2]")
{
    EACH_STORE(w)
    {
        if (!w->f->shared)
            continue;
        pdk_lease *a = member(w, "a"), *b = member(w, "b");
        CHECK(take(a, "x", 0) > 0);
        CHECK(destroy(a, "y", 0) > 0);
        CHECK(destroy(a, "z", 0) > 0);
        pass(w, 1.1 * TTL);
        CHECK(claim(b, "x", 0) > 0);
        CHECK(take(b, "y", 0) > 0);
        CHECK(destroy(b, "z", 0) > 0);
        CHECK(owner_is(a, "y", "b", false));
    }
}

TEST("a token stays while the owner does, and grows with each change of ownership, of any id")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : NULL;
        int64_t first = take(a, "x", 0);
        CHECK(first >= test_started_micros());
        CHECK_INT(take(a, "x", 0), first);
        CHECK_INT(claim(a, "x", 0), first);
        CHECK_INT(destroy(a, "x", 0), first);
        CHECK_INT(destroy(a, "x", 0), first);
        CHECK_INT(release(a, "x"), 0);
        int64_t second = take(a, "x", 0), other = take(a, "y", 0);
        CHECK(second > first);
        CHECK(other > second); /* one counter for all ids */
        if (b != NULL) {
            int64_t third = take(b, "x", 0), fourth = take(a, "x", 0);
            CHECK(third > other);
            CHECK(fourth > third);
            other = fourth;
        }
        pass(w, 1.1 * TTL);
        CHECK(claim(a, "y", 0) >= second);
        int64_t last = destroy(a, "d", 0);
        pass(w, 1.1 * TTL);
        CHECK(take(a, "d", 0) > last); /* a teardown that was given up, and a new life */
        CHECK(take(a, "z", 0) > other);
    }
}

TEST("a token is larger than the floor, which what holds the lease already may not be")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a");
        int64_t far = take(a, "x", 0) + INT64_C(1000000000000); /* eleven days ahead of the wall clock */
        CHECK(take(a, "y", far) > far);
        CHECK(claim(a, "z", far + 10) > far + 10);
        CHECK(destroy(a, "d", far + 20) > far + 20);
        int64_t held = take(a, "x", far + 30);
        CHECK(held > far + 30);
        CHECK_INT(claim(a, "x", held - 1), held);
        CHECK(destroy(a, "x", held) > held);
        CHECK(take(a, "new", 0) > held); /* the counter went along */
    }
}

TEST("a floor that would wear the counter out is an error and changes nothing [O4]")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a");
        int64_t token = take(a, "x", 0), got = 0;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK_INT(pdk_lease_take(a, "x", INT64_MAX, &got, &err), -1);
        CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
        pdk_error_clear(&err);
        CHECK_INT(pdk_lease_claim(a, "new", INT64_MAX - 1, &got, &err), -1);
        CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
        CHECK(owner_is(a, "new", NULL, false));
        CHECK_INT(take(a, "x", 0), token);
        CHECK(take(a, "y", 0) < token + INT64_C(1000000000));
    }
}

TEST("an owner that slept is lost, not lapsed, when somebody else had the id since: released, run out, or destroyed")
{
    EACH_STORE(w)
    {
        if (!w->f->shared)
            continue;
        pdk_lease *a = member(w, "a"), *b = member(w, "b");
        const char *const ids[] = { "released", "ran-out", "destroyed", "untouched" };
        for (int i = 0; i < 4; i++)
            CHECK(take(a, ids[i], 0) > 0);
        pass(w, 1.1 * TTL);
        for (int i = 0; i < 3; i++)
            CHECK(take(b, ids[i], 0) > 0);
        CHECK_INT(release(b, "released"), 0);
        CHECK(destroy(b, "destroyed", 0) > 0);
        CHECK_INT(release(b, "destroyed"), 0);
        pass(w, 1.1 * TTL);
        for (int i = 0; i < 3; i++)
            CHECK_INT(renew(a, ids[i]), PDK_LOST);
        CHECK_INT(renew(a, "untouched"), PDK_LAPSED);
        CHECK(claim(a, "untouched", 0) > 0);
        CHECK(claim(a, "released", 0) > 0); /* a new acquire may have it, under a new token */
        CHECK_INT(renew(a, "released"), PDK_RENEWED);
    }
}

TEST("ids of any shape are told apart")
{
    EACH_STORE(w)
    {
        char longest[64], other[64];
        memset(longest, 'a', 63);
        longest[63] = '\0';
        memcpy(other, longest, 64);
        other[62] = 'b';
        const char *const ids[] = { longest, other, "a", "b", "a-b", "0" };
        pdk_lease *a = member(w, "a");
        for (int i = 0; i < 6; i++)
            CHECK(owner_is(a, ids[i], NULL, false) && take(a, ids[i], 0) > 0);
        for (int i = 0; i < 6; i++)
            CHECK_INT(release(a, ids[i]), 0);
    }
}

TEST("a thousand leases stay apart, also while some come and go")
{
    EACH_STORE(w)
    {
        static int64_t tokens[1000];
        pdk_lease *a = member(w, "a"), *b = w->f->shared ? member(w, "b") : a;
        char id[32];
        take(a, "slept", 0);
        take(b, "slept", 0);
        release(b, "slept");
        for (int i = 0; i < 1000; i++) {
            snprintf(id, sizeof id, "id-%d", i);
            if (!CHECK((tokens[i] = take(i % 2 ? a : b, id, 0)) > (i > 0 ? tokens[i - 1] : 0)))
                break;
            if (i % 10 == 9)
                release(i % 2 ? a : b, id);
        }
        for (int i = 0; i < 1000; i++) {
            pdk_lease_owner o;
            snprintf(id, sizeof id, "id-%d", i);
            int rc = pdk_lease_owner_of(a, id, &o, NULL);
            if (!CHECK_INT(rc, i % 10 != 9) || (rc == 1 && !CHECK_INT(o.token, tokens[i])))
                break;
        }
        CHECK_INT(renew(a, "slept"), b != a ? PDK_LOST : PDK_LAPSED); /* still known */
    }
}

TEST("threads of one runtime use one store at once")
{
    EACH_STORE(w)
    {
        pdk_lease *a = member(w, "a");
        thread_token_count = 0;
        run_threads(4, thread_hammer, a);
        CHECK_INT(equal_tokens(thread_tokens, thread_token_count), 0);
    }
}

/* ---- the file store: several processes -------------------------------------------------------------------------- */

TEST("file: eight processes that claim one id exclude each other, and every token is larger than the one before")
{
    struct shared *sh = shared_new();
    pid_t pids[8];
    for (int i = 0; i < 8; i++)
        pids[i] = child(hammer_claims, i, sh);
    for (int i = 0; i < 8; i++)
        CHECK_INT(child_status(pids[i]), 0);
    CHECK_INT(sh->broken, 0);
    CHECK(sh->rounds > 8 * 50);
}

TEST("file: eight processes that take one id from each other see each token once, and only growing ones")
{
    struct shared *sh = shared_new();
    pid_t pids[8];
    for (int i = 0; i < 8; i++)
        pids[i] = child(hammer_takes, i, sh);
    for (int i = 0; i < 8; i++)
        CHECK_INT(child_status(pids[i]), 0);
    CHECK_INT(sh->broken, 0);
    CHECK_INT(sh->rounds, 8 * 200);
    CHECK_INT(shared_tokens(sh), 0);
}

TEST("file: processes that are killed in the middle harm nobody, also while the table grows")
{
    struct shared *sh = shared_new();
    pid_t pids[3];
    unsigned seed = 7;
    pdk_lease *a = file_store("judge", 60);
    REQUIRE(a != NULL);
    int64_t last = 0;
    for (int i = 0; i < 3; i++)
        pids[i] = child(hammer_many, i, sh);
    for (double end = test_now() + 2.5; test_now() < end;) {
        int i = (int)(rand_r(&seed) % 3);
        usleep(rand_r(&seed) % 8000);
        kill(pids[i], SIGKILL);
        child_status(pids[i]);
        int64_t token = take(a, "judged", 0);
        if (!CHECK(token > last) || !CHECK_INT(release(a, "judged"), 0))
            break;
        last = token;
        pids[i] = child(hammer_many, i, sh);
    }
    for (int i = 0; i < 3; i++) {
        kill(pids[i], SIGKILL);
        child_status(pids[i]);
    }
    CHECK_INT(sh->broken, 0);
    CHECK(sh->rounds > 100);
    pdk_lease_free(a);
}

TEST("file: a process that dies at any system call leaves a table that answers, with what was answered before [O4]")
{
    static const struct {
        const char *name;
        step_fn *fn;
    } steps[] = {
        { "the first open", step_open }, { "a take", step_take },       { "a handover", step_handover },
        { "a destroy", step_destroy },   { "a release", step_release }, { "a renewal", step_renew },
        { "the growth", step_grow },     { "a new boot", step_boot },
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        int n = 1, ended = 0;
        for (; !ended && n < 400; n++) {
            clean_dir();
            struct shared *sh = shared_new();
            int rc = prepare_step(steps[i].fn);
            if (!CHECK_INT(rc, 0))
                break;
            ended = kill_at(steps[i].fn, sh, n);
            if (ended < 0)
                SKIP("this system does not let a process be traced");
            int bad = judge_step(steps[i].fn, sh);
            if (bad != 0) {
                CHECK(!"the table is not what it should be");
                fprintf(stderr, "  killed in %s at stop %d: %d\n", steps[i].name, n, bad);
                break;
            }
        }
        CHECK(ended == 1 && n > 4);
    }
}

TEST("file: a lease is not seen by a later boot, and its token is smaller than every one of that boot")
{
    clean_dir();
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MONOTONIC, true);
    pdk_lease *one = boot_store("boot-1", "a", clock);
    REQUIRE(one != NULL);
    int64_t far = take(one, "x",
                       take(one, "x", 0) + INT64_C(1000000000000)); /* as if the wall clock went back at the reboot */
    CHECK(destroy(one, "d", 0) > far);
    int64_t last = take(one, "y", 0);
    pdk_lease_free(one);
    pdk_lease *two = boot_store("boot-2", "b", clock);
    REQUIRE(two != NULL);
    CHECK(owner_is(two, "x", NULL, false));
    CHECK(take(two, "d", 0) > last);
    CHECK_INT(count_files("table.boot-1"), 0); /* nobody uses it any longer */
    pdk_lease_free(two);
    pdk_clock_free(clock);
}

TEST("file: tables of two boots in use at once stay apart: one directory that two machines see")
{
    clean_dir();
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_BOOTTIME, true);
    pdk_lease *one = boot_store("boot-1", "a", clock), *two = boot_store("boot-2", "b", clock);
    REQUIRE(one != NULL && two != NULL);
    CHECK(take(one, "x", 0) > 0);
    CHECK(take(two, "x", 0) > 0);
    pdk_lease *three = boot_store("boot-2", "c", clock);
    CHECK_INT(renew(one, "x"), PDK_RENEWED);
    CHECK_INT(renew(two, "x"), PDK_RENEWED);
    CHECK(owner_is(three, "x", "b", false));
    pdk_lease_free(one);
    pdk_lease_free(two);
    pdk_lease_free(three);
    pdk_clock_free(clock);
}

TEST("file: the boot clock counts, whatever the runtime's clock is; only a manual one is asked itself")
{
    clean_dir();
    pdk_clock *manual = pdk_clock_new(PDK_CLOCK_MANUAL, false), *real = pdk_clock_new(PDK_CLOCK_MONOTONIC, true);
    pdk_lease *a = pdk_lease_file(dir, "", "a", 0.2, real, NULL), *m = pdk_lease_file(dir, "", "m", 10, manual, NULL);
    REQUIRE(a != NULL && m != NULL);
    CHECK(take(a, "x", 0) > 0);
    CHECK(owner_is(m, "x", NULL, false)); /* manual time means nothing to others: a table of its own */
    CHECK(take(m, "x", 0) > 0);
    CHECK(owner_is(a, "x", "a", false));
    usleep(250 * 1000);
    CHECK(owner_is(a, "x", NULL, false));
    pdk_clock_advance(manual, 9.9, 0);
    CHECK(owner_is(m, "x", "m", false));
    pdk_clock_advance(manual, 0.2, -1e6); /* the wall clock has no say */
    CHECK(owner_is(m, "x", NULL, false));
    pdk_lease_free(a);
    pdk_lease_free(m);
    pdk_clock_free(manual);
    pdk_clock_free(real);
}

TEST("file: one id in two scopes is two leases")
{
    clean_dir();
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MONOTONIC, true);
    pdk_lease *a = pdk_lease_file(dir, "engine-1", "a", 60, clock, NULL),
              *b = pdk_lease_file(dir, "engine-2", "b", 60, clock, NULL);
    REQUIRE(a != NULL && b != NULL);
    int64_t first = take(a, "x", 0);
    CHECK(destroy(b, "x", 0) > first);
    CHECK_INT(renew(a, "x"), PDK_RENEWED);
    CHECK(owner_is(a, "x", "a", false));
    pdk_lease_free(a);
    pdk_lease_free(b);
    pdk_clock_free(clock);
}

/* ---- the file store: what can go wrong -------------------------------------------------------------------------- */

TEST("file: a damaged table is an error for every call, never free, until nobody has it open [O4]")
{
    static const struct {
        const char *what;
        int64_t at, len;
        int byte;
    } damages[] = {
        { "a flipped bit in a slot", -1, 1, 0x10 }, { "a zeroed table", 0, 1 << 20, 0 },  { "a zeroed head", 0, 128, 0 },
        { "zeroed slots", 128, 256 * 128, 0 },      { "a truncated table", 1000, -1, 0 }, { "an empty table", 0, -1, 0 },
    };
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        clean_dir();
        pdk_lease *a = file_store("a", 60), *b = file_store("b", 60);
        REQUIRE(a != NULL && b != NULL);
        CHECK(take(a, "x", 0) > 0);
        damage(damages[i].at, damages[i].len, damages[i].byte);
        if (!CHECK(unavailable(a, "x")) || !CHECK(unavailable(b, "x")))
            fprintf(stderr, "  after %s\n", damages[i].what);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_lease *c = open_file("c", 60, &err);
        CHECK(c == NULL); /* others may have leases there */
        CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
        CHECK_HAS(err.message, "/leases/table.");
        pdk_lease_free(a);
        CHECK(unavailable(b, "x"));
        pdk_lease_free(b);
        c = file_store("c", 60); /* all who had leases are dead */
        REQUIRE(c != NULL);
        CHECK(owner_is(c, "x", NULL, false));
        CHECK(take(c, "x", 0) > 0);
        pdk_lease_free(c);
    }
}

TEST("file: slots of another table, or in another place, do not pass")
{
    clean_dir();
    pdk_lease *a = file_store("a", 60);
    REQUIRE(a != NULL && take(a, "x", 0) > 0);
    char path[400], image[128 * 257], moved[128];
    table_path(path, sizeof path);
    FILE *f = fopen(path, "r+b");
    REQUIRE(f != NULL && fread(image, 1, sizeof image, f) == sizeof image);
    int64_t at = find_owner(image, sizeof image, "a");
    REQUIRE(at > 0);
    memcpy(moved, image + at, 128); /* an empty slot from elsewhere over it: would read as free */
    CHECK(fseek(f, at, SEEK_SET) == 0 && fwrite(image + (at == 128 ? 256 : 128), 1, 128, f) == 128 && fclose(f) == 0);
    CHECK(unavailable(a, "x"));
    pdk_lease_free(a);
}

TEST("file: a table that was removed is made again; the next token is larger, and an owner hears that it lapsed [O3]")
{
    clean_dir();
    pdk_lease *a = file_store("a", 60), *b = file_store("b", 60);
    REQUIRE(a != NULL && b != NULL);
    int64_t last = take(a, "x", take(a, "x", 0) + INT64_C(1000000000000));
    char path[400];
    table_path(path, sizeof path);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(renew(a, "x"), PDK_LAPSED);
    int64_t token = claim(a, "x", 0);
    CHECK(token > last); /* not the former one: so the owner learns that nobody knows who was here meanwhile */
    CHECK_INT(claim(b, "x", 0), 0);
    clean_dir(); /* now all of leases/ */
    CHECK(claim(b, "x", 0) > 0);
    CHECK_INT(renew(a, "x"), PDK_LOST);
    CHECK(take(a, "y", 0) > token);
    pdk_lease_free(a);
    pdk_lease_free(b);
}

TEST("file: a process that is stopped while it has the table's lock makes others fail within the limit, not hang [O4]")
{
    clean_dir();
    pdk_lease *a = file_store("a", 60);
    REQUIRE(a != NULL && take(a, "x", 0) > 0);
    pid_t pid = locker();
    REQUIRE(pid > 0);
    pdk_limit limit = { .deadline = pdk_now_monotonic() + 200 * 1000 * 1000 };
    const pdk_limit *outer = pdk_limit_enter(&limit);
    double before = test_now();
    CHECK(unavailable_once(a, "x"));
    CHECK_TOOK(before, 0.2);
    pdk_limit_enter(outer);
    atomic_bool cancel = true;
    limit = (pdk_limit){ .deadline = PDK_NEVER, .cancelled = &cancel };
    pdk_limit_enter(&limit);
    before = test_now();
    CHECK(unavailable_once(a, "x"));
    CHECK_WITHIN(before, 0);
    pdk_limit_enter(outer);
    before = test_now();
    run_threads(4, thread_unavailable, a);
    CHECK_TOOK(before, 5);
    kill(pid, SIGKILL);
    child_status(pid);
    CHECK_INT(renew(a, "x"), PDK_RENEWED); /* the kernel gave the lock back */
    pdk_lease_free(a);
}

TEST("file: a runtime that was stopped past its ttl is lost once another has the id, and lapsed when nobody had it")
{
    clean_dir();
    struct shared *sh = shared_new();
    pid_t pid = child(sleeper, 0, sh);
    while (sh->rounds == 0)
        usleep(1000);
    kill(pid, SIGSTOP);
    usleep(450 * 1000);
    pdk_lease *b = file_store("b", 60);
    REQUIRE(b != NULL);
    CHECK(claim(b, "x", 0) > sh->last);
    CHECK_INT(release(b, "x"), 0);
    sh->flag = 1;
    kill(pid, SIGCONT);
    CHECK_INT(child_status(pid), 0);
    pdk_lease_free(b);
}

TEST("file: an owner that has died leaves its `own` leases at once, its `del` ones to the ttl, and others' alone")
{
    clean_dir();
    pdk_lease *dead = file_store("dead", 60), *a = file_store("a", 60), *b = file_store("b", 60);
    REQUIRE(dead != NULL && a != NULL && b != NULL);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int64_t token = claim(dead, "x", 0);
    CHECK(token > 0 && destroy(dead, "y", 0) > 0 && claim(a, "z", 0) > 0);
    CHECK_INT(claim(b, "x", 0), 0);
    CHECK_INT(pdk_lease_owner_gone(b, "dead", false, &err), 0);
    CHECK(claim(b, "x", 0) > token);
    CHECK_INT(claim(b, "y", 0), 0);
    CHECK_INT(claim(b, "z", 0), 0);
    CHECK_INT(pdk_lease_owner_gone(b, "dead", true, &err), 0); /* where a stop cannot outlive its caller */
    CHECK(claim(b, "y", 0) > token);
    CHECK_INT(claim(b, "z", 0), 0);
    CHECK_INT(renew(dead, "x"), PDK_LOST);
    pdk_lease_free(dead);
    pdk_lease_free(a);
    pdk_lease_free(b);
}

TEST("file: everything is private, whatever the umask")
{
    mode_t masks[] = { 0, 0777, 022 };
    for (int i = 0; i < 3; i++) {
        clean_dir();
        mode_t old = umask(masks[i]);
        pdk_lease *a = file_store("a", 60);
        umask(old);
        REQUIRE(a != NULL && take(a, "x", 0) > 0);
        char path[400];
        table_path(path, sizeof path);
        CHECK_INT(mode_of(path), 0600);
        snprintf(path, sizeof path, "%s/leases", dir);
        CHECK_INT(mode_of(path), 0700);
        snprintf(path, sizeof path, "%s/leases/users", dir);
        CHECK_INT(mode_of(path), 0600);
        pdk_lease_free(a);
    }
}

TEST("file: a place that cannot be used is an error at open")
{
    clean_dir();
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char path[400];
    snprintf(path, sizeof path, "%s/leases", dir);
    close(creat(path, 0600));
    CHECK(open_file("a", 60, &err) == NULL);
    CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
    CHECK_HAS(err.message, path);
    unlink(path);
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MONOTONIC, true);
    CHECK(pdk_lease_file("/nowhere/at/all", "", "a", 60, clock, &err) == NULL);
    CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
    pdk_clock_free(clock);
}

TEST("file: a full or read-only disk is an error, and nothing is half written [O4]")
{
    const char *mount_point = small_disk();
    if (mount_point == NULL)
        SKIP("only root can mount a small disk");
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MONOTONIC, true);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char filler[440], id[32];
    snprintf(filler, sizeof filler, "%s/filler", mount_point);
    small_disk_fill(filler);
    CHECK(pdk_lease_file(mount_point, "", "a", 60, clock, &err) == NULL); /* no room for the table */
    CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
    pdk_error_clear(&err);
    unlink(filler);
    pdk_lease *a = pdk_lease_file(mount_point, "", "a", 60, clock, &err),
              *b = pdk_lease_file(mount_point, "", "b", 60, clock, &err);
    small_disk_fill(filler);
    int taken = 0;
    int64_t last = 0, token;
    for (; a != NULL && b != NULL && taken < 1000; taken++, last = token) {
        snprintf(id, sizeof id, "id-%d", taken);
        if ((token = take(taken % 2 ? a : b, id, 0)) <= last)
            break;
    }
    CHECK(taken > 200 && taken < 256); /* the table fills up, as it cannot grow */
    CHECK_INT(pdk_lease_take(a, id, 0, &token, &err), -1);
    CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
    CHECK(owner_is(a, id, NULL, false));
    CHECK_INT(renew(b, "id-0"), PDK_RENEWED); /* what is there goes on */
    CHECK_INT(claim(a, "id-0", 0), 0);
    CHECK(take(a, "id-0", 0) > last);
    unlink(filler);
    CHECK(take(a, id, 0) > last); /* and grows when there is room */
    CHECK_INT(renew(a, "id-1"), PDK_RENEWED);
    CHECK_INT(renew(b, "id-2"), PDK_RENEWED);
    pdk_lease_free(a);
    pdk_lease_free(b);
    REQUIRE(small_disk_read_only());
    pdk_error_clear(&err);
    CHECK(pdk_lease_file(mount_point, "", "a", 60, clock, &err) == NULL);
    CHECK_KIND(err, PDK_E_OWNERSHIP_UNAVAILABLE);
    pdk_clock_free(clock);
}

TEST("file: what ended long ago makes room; the table does not grow without end, nor does the directory")
{
    clean_dir();
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MANUAL, false);
    pdk_lease *a = pdk_lease_file(dir, "", "a", 60, clock, NULL);
    REQUIRE(a != NULL);
    CHECK(take(a, "old", 0) > 0);
    for (int i = 0; i < 3000; i++) {
        char id[32];
        snprintf(id, sizeof id, "id-%d", i);
        if (!CHECK(take(a, id, 0) > 0) || !CHECK_INT(renew(a, "old"), PDK_RENEWED) ||
            (i % 2 && !CHECK_INT(release(a, id), 0)))
            break;
        pdk_clock_advance(clock, 1800, 0); /* 48 in a day */
        CHECK_INT(renew(a, "old"), PDK_LAPSED);
        CHECK(claim(a, "old", 0) > 0);
    }
    char path[400];
    struct stat st;
    table_path(path, sizeof path);
    CHECK(stat(path, &st) == 0 && st.st_size <= 129 * 256);
    CHECK_INT(count_files(""), 2); /* the table and `users` */
    pdk_lease_free(a);
    pdk_clock_free(clock);
}

TEST("file: closing twice, and calls after it")
{
    clean_dir();
    int before = test_fds();
    pdk_lease *a = file_store("a", 60);
    REQUIRE(a != NULL && take(a, "x", 0) > 0);
    CHECK_INT(pdk_lease_close(a, NULL), 0);
    CHECK_INT(test_fds(), before);
    CHECK_INT(pdk_lease_close(a, NULL), 0);
    CHECK(unavailable(a, "x"));
    pdk_lease_free(a);
}

TEST_MAIN
