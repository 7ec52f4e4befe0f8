/* test_redis.c -- the `redis` ownership store against real servers: scripts, sessions, restarts, lost keys, and answers that are
 * errors. Servers that do not answer are in test_redis_faults.c, the rules that all stores keep in test_lease.c. */
#include "redis_world.h"

/* ---- addresses ------------------------------------------------------------------------------------------------------- */

TEST("a redis URL names server, login, database and prefix, or says what is wrong with it and no password")
{
    static const struct {
        const char *url, *place, *user, *password, *prefix, *wrong;
        int db;
    } rows[] = {
        { "redis://localhost", "localhost:6379", "", "", "paddock", NULL, 0 },
        { "redis://10.0.0.1:7000/3", "10.0.0.1:7000", "", "", "paddock", NULL, 3 },
        { "redis://[::1]:7000/", "::1:7000", "", "", "paddock", NULL, 0 },
        { "redis://:s3c%40ret@db.example?prefix=team-a", "db.example:6379", "", "s3c@ret", "team-a", NULL, 0 },
        { "redis://me:p@ss@db.example", "db.example:6379", "me", "p@ss", "paddock", NULL, 0 },
        { "unix:///run/redis.sock", "/run/redis.sock", "", "", "paddock", NULL, 0 },
        { "redis+unix://:pw@/run/a%20b?db=2&prefix=x", "/run/a b", "", "pw", "x", NULL, 2 },
        { NULL, NULL, NULL, NULL, NULL, "is missing", 0 },
        { "", NULL, NULL, NULL, NULL, "is missing", 0 },
        { "localhost:6379", NULL, NULL, NULL, NULL, "no scheme", 0 },
        { "rediss://:s3cret@h", NULL, NULL, NULL, NULL, "TLS", 0 },
        { "http://:s3cret@h", NULL, NULL, NULL, NULL, "scheme", 0 },
        { "redis://", NULL, NULL, NULL, NULL, "names no host", 0 },
        { "redis:///3", NULL, NULL, NULL, NULL, "names no host", 0 },
        { "redis://h:0", NULL, NULL, NULL, NULL, "port", 0 },
        { "redis://h:65536", NULL, NULL, NULL, NULL, "port", 0 },
        { "redis://h:x", NULL, NULL, NULL, NULL, "port", 0 },
        { "redis://[::1", NULL, NULL, NULL, NULL, "not closed", 0 },
        { "redis://[::1]6379", NULL, NULL, NULL, NULL, "port", 0 },
        { "redis://s3cret@h", NULL, NULL, NULL, NULL, "without a password", 0 },
        { "redis://me:@h", NULL, NULL, NULL, NULL, "empty password", 0 },
        { "redis://:s3cret%4@h", NULL, NULL, NULL, NULL, "encoded", 0 },
        { "redis://:s3cret%00@h", NULL, NULL, NULL, NULL, "encoded", 0 },
        { "redis://h/s3cret", NULL, NULL, NULL, NULL, "database", 0 },
        { "redis://h?db=-1", NULL, NULL, NULL, NULL, "db", 0 },
        { "redis://h?prefix=", NULL, NULL, NULL, NULL, "prefix", 0 },
        { "redis://h?prefix=a{b}", NULL, NULL, NULL, NULL, "prefix", 0 },
        { "redis://h?ttl=3", NULL, NULL, NULL, NULL, "unknown parameter", 0 },
        { "redis://h h", NULL, NULL, NULL, NULL, "host", 0 },
        { "unix://run/redis.sock", NULL, NULL, NULL, NULL, "absolute path", 0 },
        { "unix://", NULL, NULL, NULL, NULL, "names no socket", 0 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        pdk_redis_addr a;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        int rc = pdk_redis_addr_parse(rows[i].url, &a, &err);
        if (!CHECK_INT(rc, rows[i].wrong == NULL ? 0 : -1))
            fprintf(stderr, "  %s: %s\n", rows[i].url, err.message);
        if (rc == 0) {
            CHECK_STR(a.place, rows[i].place);
            CHECK_STR(a.user, rows[i].user);
            CHECK_STR(a.password, rows[i].password);
            CHECK_STR(a.prefix, rows[i].prefix);
            CHECK_INT(a.db, rows[i].db);
        } else {
            CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
            CHECK_HAS(err.message, rows[i].wrong);
            CHECK(strstr(err.message, "s3cret") == NULL);
        }
    }
    char longest[600] = "unix:///";
    memset(longest + 8, 'a', 107);
    pdk_redis_addr a;
    CHECK_INT(pdk_redis_addr_parse(longest, &a, NULL), -1);
    longest[8 + 106] = '\0';
    CHECK_INT(pdk_redis_addr_parse(longest, &a, NULL), 0);
}

TEST("a server that is not there is an error within the bound, and then at once; a bad URL is one when the store is opened "
     "[O4]")
{
    static const char *const urls[] = { "unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "redis://localhost:1",
                                        "redis://no-such-host.invalid" };
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK(pdk_lease_redis("redis://", "", "a", 60, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(err.message, "ownership.url");
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        AUTO_LEASE *l = pdk_lease_redis(urls[i], "", "a", 60, NULL);
        double start = test_now();
        CHECK_UNAVAILABLE(take(l, "x"), i == 3 ? "no-such-host" : "cannot connect");
        CHECK_WITHIN(start, 1.5);
        start = test_now();
        CHECK_UNAVAILABLE(take(l, "x"), "tried again");
        CHECK_WITHIN(start, 0.1);
        CHECK_INT(pdk_lease_close(l, &err), 0); /* there is nobody to tell */
    }
}

/* ---- tokens, sessions, scripts ------------------------------------------------------------------------------------- */

TEST("tokens keep all 64 bits on their way through the scripts")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    CHECK(take(a, "x") > INT64_C(1700000000000000));
    CHECK(take(b, "x") > 0);                 /* each has its session by now, which is a number of the counter too */
    int64_t far = INT64_C(9007199254740993); /* a double would make it ...992 */
    CHECK_INT(asked(pdk_lease_take, a, "y", far), far + 1);
    CHECK_INT(take(b, "y"), far + 2);
    CHECK_INT(take(a, "z"), far + 3);
    CHECK_STR(redis_do(&s, "GET {paddock}:counter"), "9007199254740996");
    CHECK_INT(asked(pdk_lease_take, a, "w", INT64_MAX / 2), INT64_MAX / 2 + 1);
    CHECK_UNAVAILABLE(asked(pdk_lease_take, a, "w", INT64_MAX / 2 + 1), "no larger token");
    /* what a worn-out counter would do */
    redis_do(&s, "SET {paddock}:counter 9223372036854775806");
    CHECK_INT(take(a, "last"), INT64_MAX);
    CHECK_UNAVAILABLE(take(a, "one more"), "DAMAGED");
    CHECK_STR(redis_do(&s, "GET {paddock}:counter"), "9223372036854775807");
    CHECK(claim(a, "last") == INT64_MAX);
}

/* The arguments of the next EVALSHA that the server gets, as MONITOR shows them. */
typedef struct recorded {
    char text[2048];
    const char *args[24];
    int n;
} recorded;

static void read_monitor(redisContext *c, recorded *r)
{
    redisReply *reply = NULL;
    r->n = 0;
    while (r->n == 0 && redisGetReply(c, (void **)&reply) == REDIS_OK) {
        if (strstr(reply->str, "\"EVALSHA\"") != NULL) {
            snprintf(r->text, sizeof r->text, "%s", strstr(reply->str, "\"EVALSHA\""));
            for (char *at = strtok(r->text, "\""); at != NULL && r->n < 24; at = strtok(NULL, "\""))
                if (strcmp(at, " ") != 0)
                    r->args[r->n++] = at;
        }
        freeReplyObject(reply);
    }
}

static const char *replay(const redis_server *s, recorded *r, const char *session, const char *deadline)
{
    static char text[200];
    redisContext *c = redis_raw(s);
    const char *args[24];
    memcpy(args, r->args, sizeof args);
    args[9] = session;
    args[10] = deadline;
    redisReply *reply = redisCommandArgv(c, r->n, args, NULL);
    snprintf(text, sizeof text, "%s", reply == NULL ? "(none)" : reply->str);
    text[strcspn(text, " ")] = '\0';
    if (reply != NULL)
        freeReplyObject(reply);
    redisFree(c);
    return text;
}

TEST("a script of an older session, or one whose caller waits no longer, changes nothing [B051]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    CHECK(take(a, "warm up") > 0);
    redisContext *monitor = redis_raw(&s);
    freeReplyObject(redisCommand(monitor, "MONITOR"));
    CHECK(take(a, "x") > 0);
    recorded late = { .n = 0 };
    read_monitor(monitor, &late);
    redisFree(monitor);
    REQUIRE(late.n == 14);
    CHECK_STR(late.args[7], "take");
    CHECK_STR(late.args[8], "a");
    char old[32], now[32];
    snprintf(old, sizeof old, "%s", late.args[9]);
    CHECK(take(b, "x") > 0); /* the peer has it */
    redis_do(&s, "DEL {paddock}:session:a");
    CHECK(take(a, "y") > 0); /* stale: a opens another one by itself */
    snprintf(now, sizeof now, "%s", redis_do(&s, "GET {paddock}:session:a"));
    CHECK(atoll(now) > atoll(old));
    const char *before = state_of(&s);
    CHECK_HAS(before, "own ");
    CHECK_STR(replay(&s, &late, old, "9999999999999999"), "stale");
    CHECK_STR(replay(&s, &late, now, "1700000000000000"), "late");
    CHECK_STR(state_of(&s), before);
    CHECK_STR(replay(&s, &late, now, late.args[10]),
              "yes"); /* in time, and in the session that counts: it would have acted */
    CHECK_STR(owner(b, "x"), "own a");
    CHECK(take(b, "x") > 0);
    before = state_of(&s);
    CHECK_INT(pdk_lease_close(a, NULL), 0); /* ends its session */
    CHECK_STR(replay(&s, &late, now, "9999999999999999"), "stale");
    CHECK_STR(state_of(&s), before);
    CHECK_UNAVAILABLE(take(a, "x"), "closed");
}

TEST("a server that has forgotten the scripts gets them again; a call is one round trip, in some 100 microseconds")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    int64_t token = take(a, "x");
    CHECK(token > 0);
    CHECK_STR(redis_do(&s, "SCRIPT FLUSH"), "OK");
    CHECK_INT(take(a, "x"), token);
    redis_do(&s, "CONFIG RESETSTAT");
    enum { ROUNDS = 2000 };
    double start = test_now();
    for (int i = 0; i < ROUNDS; i++)
        if (take(a, "x") != token)
            CHECK(false);
    double each = (test_now() - start) / ROUNDS * 1e6;
    start = test_now();
    for (int i = 0; i < ROUNDS; i++)
        CHECK_STR(owner(a, "x"), "own a");
    printf("      a take of what is ours: %.1f microseconds; owner: %.1f\n", each, (test_now() - start) / ROUNDS * 1e6);
    CHECK_HAS(redis_do(&s, "INFO commandstats"), "cmdstat_evalsha:calls=2000,");
    CHECK(strstr(redis_do(&s, "INFO commandstats"), "cmdstat_eval:") == NULL);
    CHECK(each < 5000);
}

TEST("two scopes in one store never mix, nor two prefixes; tokens still come from one counter")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = pdk_lease_redis(s.url, "machine-1:boot-1", "a", 60, NULL),
               *b = pdk_lease_redis(s.url, "machine-2:boot-7", "b", 60, NULL);
    AUTO_LEASE *c = pdk_lease_redis(s.url, "machine-1", "c", 60, NULL), *d = NULL;
    char url[260];
    snprintf(url, sizeof url, "%s?prefix=other", s.url);
    d = pdk_lease_redis(url, "machine-1:boot-1", "d", 60, NULL);
    int64_t first = take(a, "x"), second = destroy(b, "x");
    CHECK(first > 0 && second > first);
    CHECK_STR(owner(a, "x"), "own a");
    CHECK_STR(owner(b, "x"), "del b");
    CHECK_STR(owner(c, "x"), "-");
    CHECK_STR(owner(d, "x"), "-");
    CHECK_UNAVAILABLE(take(c, "boot-1:x"), "cannot be the id");
    CHECK_INT(renew(a, "x"), PDK_RENEWED);
    CHECK_INT(release(b, "x"), 0);
    CHECK_STR(owner(a, "x"), "own a");
    CHECK(take(d, "x") > 0);
    CHECK_STR(owner(a, "x"), "own a");
    pdk_lease_free(d);
    d = NULL;
}

/* ---- lost state ------------------------------------------------------------------------------------------------------ */

TEST("after a restart without persistence: lapsed, and larger tokens; no call fails but those that met it [O3]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    int64_t first = take(a, "x"), second = destroy(b, "y");
    CHECK(first > 0 && second > first);
    redis_end(&s);
    CHECK(renew(a, "x") == -1); /* cannot connect: never "lapsed" */
    REQUIRE(redis_run(&s, NULL));
    REQUIRE(comes_back(a, 5));
    CHECK_INT(renew(a, "x"), PDK_LAPSED);
    CHECK_INT(renew(b, "y"), PDK_LAPSED); /* b has not called meanwhile: its dead connection is no failure */
    CHECK(claim(b, "y") > second);
    CHECK(claim(a, "x") > second);
}

TEST("a server that is told to keep everything does so over a kill [O3]")
{
    static const char *const durable[] = { "--appendonly", "yes", "--appendfsync", "always", NULL };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, durable));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    int64_t first = take(a, "x");
    CHECK(take(a, "z") > 0 && take(b, "z") > 0);
    redis_end(&s);
    REQUIRE(redis_run(&s, durable));
    CHECK_INT(renew(a, "x"), PDK_RENEWED);
    CHECK_INT(claim(a, "x"), first);
    CHECK_INT(renew(a, "z"), PDK_LOST);
    CHECK_INT(claim(a, "z"), 0);
}

TEST("the loss of all keys: lapsed, a larger token, a new session, and the former owner of a peer's id is not told "
     "\"renewed\"")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    int64_t first = take(a, "x");
    CHECK_STR(redis_do(&s, "FLUSHALL"), "OK");
    CHECK_STR(owner(a, "x"), "-");
    CHECK_INT(renew(a, "x"), PDK_LAPSED);
    int64_t second = claim(a, "x");
    CHECK(second > first);
    CHECK_STR(redis_do(&s, "FLUSHALL"), "OK");
    CHECK(take(b, "x") > second);
    CHECK_INT(renew(a, "x"), PDK_LOST);
    CHECK_INT(release(a, "x"), 0);
    CHECK_STR(owner(a, "x"), "own b");
}

TEST("the loss of the counter alone: tokens still grow for every id that is remembered")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    int64_t far = take(a, "x") + INT64_C(1000000000000); /* ahead of the clock, which would hide it else */
    CHECK_INT(asked(pdk_lease_take, a, "x", far), far + 1);
    CHECK_INT(asked(pdk_lease_take, a, "y", far + 1), far + 2);
    CHECK_INT(release(a, "y"), 0);
    CHECK_STR(redis_do(&s, "DEL {paddock}:counter"), "1");
    CHECK_INT(take(b, "x"), far + 2);
    CHECK_STR(redis_do(&s, "DEL {paddock}:counter"), "1");
    CHECK_INT(take(b, "y"), far + 3);
}

TEST("who had an id last is remembered after its lease: lost to who slept through another's lease, else the former token")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 0.2), *b = store(&s, "b", 0.2);
    int64_t first = take(a, "x"), alone = take(a, "alone");
    usleep(250000);
    CHECK(claim(b, "x") > first);
    CHECK_INT(release(b, "x"), 0);
    CHECK_STR(owner(a, "x"), "-");
    CHECK_INT(renew(a, "x"), PDK_LOST);
    CHECK_INT(renew(a, "alone"), PDK_LAPSED);
    CHECK_INT(claim(a, "alone"), alone);
    CHECK(atoll(redis_do(&s, "PTTL {paddock}:last:machine/boot:x")) > 20 * 3600 * 1000);
    CHECK_STR(redis_do(&s, "PTTL {paddock}:counter"), "-1");
    CHECK(atoll(redis_do(&s, "PTTL {paddock}:session:a")) > 0);
}

/* ---- answers that are errors ----------------------------------------------------------------------------------------- */

static bool set_file_limit(pid_t pid, rlim_t bytes)
{
    struct rlimit r = { bytes, RLIM_INFINITY };
    return prlimit(pid, RLIMIT_FSIZE, &r, NULL) == 0;
}

TEST("a full disk: writes are unavailable, never refused; the owner is still read; with room again all goes on [O4]")
{
    static const char *const durable[] = { "--appendonly", "yes", "--appendfsync", "everysec", NULL };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, durable));
    AUTO_LEASE *a = store(&s, "a", 60), *fresh = store(&s, "fresh", 60);
    int64_t token = take(a, "x");
    CHECK(token > 0);
    REQUIRE(set_file_limit(s.pid, 64));
    bool full = false;
    for (double end = test_now() + 10; !full && test_now() < end;
         usleep(20000)) /* the first write that fails was answered */
        full = take(a, "x") == -1;
    CHECK(full);
    CHECK_KIND(last_error, PDK_E_OWNERSHIP_UNAVAILABLE);
    CHECK_HAS(last_error.message, "disk cannot be written");
    CHECK_UNAVAILABLE(claim(a, "y"), "MISCONF");
    CHECK_UNAVAILABLE(destroy(a, "x"), "MISCONF");
    CHECK_UNAVAILABLE(renew(a, "x"), "MISCONF");
    CHECK_UNAVAILABLE(release(a, "x"), "MISCONF");
    CHECK_STR(owner(a, "x"), "own a");
    CHECK_STR(owner(fresh, "x"), "own a"); /* a new connection, which cannot open a session */
    CHECK_UNAVAILABLE(take(fresh, "x"), "MISCONF");
    REQUIRE(set_file_limit(s.pid, RLIM_INFINITY));
    for (double end = test_now() + 10; full && test_now() < end; usleep(20000))
        full = renew(a, "x") == -1;
    CHECK_INT(renew(a, "x"), PDK_RENEWED);
    CHECK_INT(claim(a, "x"), token);
}

TEST("memory that is used up: unavailable, with what to do [O4]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    CHECK(take(a, "x") > 0);
    CHECK_STR(redis_do(&s, "CONFIG SET maxmemory 1"), "OK");
    CHECK_UNAVAILABLE(take(a, "y"), "maxmemory");
    CHECK_STR(owner(a, "x"), "own a");
    CHECK_STR(redis_do(&s, "CONFIG SET maxmemory 0"), "OK");
    CHECK(take(a, "y") > 0);
}

TEST("foreign values in our keys cannot be understood, and nothing is written over them [O4]")
{
    static const char *const names[] = { "lease:machine/boot:x", "last:machine/boot:x", "counter", "session:a" };
    static const char *const texts[] = { "garbage",  "own 12", "own x b", "own 99999999999999999999 b",
                                         "free 1 b", "-5",     "007",     "1e9" };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    for (size_t k = 0; k < 4; k++) {
        CHECK(take(a, "warm up") > 0);
        redis_do(&s, "DEL {paddock}:%s", names[k]);
        redis_do(&s, "LPUSH {paddock}:%s 1", names[k]);
        CHECK_UNAVAILABLE(take(a, "x"), "WRONGTYPE");
        if (k == 0)
            CHECK_STR(owner(a, "x"), "?");
        CHECK_STR(redis_do(&s, "TYPE {paddock}:%s", names[k]), "list");
        redis_do(&s, "DEL {paddock}:%s", names[k]);
        for (size_t i = 0; k < 3 && i < 8; i++) {
            if ((k == 1 && i == 4) || (k == 2 && i < 5 && i > 0))
                continue; /* that is what `last` may hold */
            redis_do(&s, "SET {paddock}:%s %s", names[k], "value");
            redisContext *c = redis_raw(&s);
            char key[80];
            snprintf(key, sizeof key, "{paddock}:%s", names[k]);
            freeReplyObject(redisCommand(c, "SET %s %s", key, texts[i]));
            redisFree(c);
            CHECK_UNAVAILABLE(take(a, "x"), "DAMAGED");
            if (k == 0) {
                CHECK_STR(owner(a, "x"), "?");
                CHECK_HAS(last_error.message, "not what paddock wrote");
                CHECK_UNAVAILABLE(renew(a, "x"), "DAMAGED");
                CHECK_UNAVAILABLE(release(a, "x"), "DAMAGED");
            }
            CHECK_STR(redis_do(&s, "GET {paddock}:%s", names[k]), texts[i]);
        }
        redis_do(&s, "DEL {paddock}:%s", names[k]);
    }
    CHECK(take(a, "x") > 0);
}

TEST("a password that is missing or wrong, and a database that is not there, are said, without the password [O4]")
{
    static const char *const closed[] = { "--requirepass", "s3cret", NULL };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, closed));
    const struct {
        const char *login, *query, *said;
    } rows[] = {
        { "", "", "put the password into ownership.url" },
        { ":wr0ng@", "", "refused the password" },
        { "nobody:s3cret@", "", "refused the password" },
        { ":s3cret@", "?db=99", "refused the database" },
        { ":s3cret@", "?db=3", NULL },
        { "default:s3cret@", "", NULL },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char url[300];
        snprintf(url, sizeof url, "unix://%s%s%s", rows[i].login, s.path, rows[i].query);
        AUTO_LEASE *a = pdk_lease_redis(url, "", "a", 60, NULL);
        if (rows[i].said == NULL) { /* also after a call whose time was over before it could log in */
            const pdk_limit over = { .deadline = pdk_now_monotonic() }, *outer = pdk_limit_enter(&over);
            CHECK_UNAVAILABLE(take(a, "x"), "no time is left");
            pdk_limit_enter(outer);
            CHECK(take(a, "x") > 0);
            continue;
        }
        CHECK_UNAVAILABLE(take(a, "x"), rows[i].said);
        CHECK(strstr(last_error.message, "s3cret") == NULL && strstr(last_error.message, "wr0ng") == NULL);
        CHECK_STR(owner(a, "x"), "?");
        CHECK(strstr(last_error.message, "s3cret") == NULL && strstr(last_error.message, "wr0ng") == NULL);
    }
}

TEST_MAIN
