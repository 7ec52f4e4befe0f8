/* test_journal_mirror.c -- the journal of machines that share an engine, on real redis servers: what one machine has recorded is
 * there for all, nothing is read as `no record` that is none, and what either side loses the other one heals. */
#include "journal.h"
#include "redis_world.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

static void journal_leave(pdk_journal **j)
{
    pdk_journal_free(*j);
}
#define AUTO_JOURNAL __attribute__((cleanup(journal_leave))) pdk_journal

/* The files of a machine of that name: its own, as each server's world is. */
static pdk_journal *files_of(const redis_server *s, const char *name)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", s->dir, name);
    mkdir(path, 0700);
    return pdk_journal_file(path, "", NULL);
}
static pdk_journal *machine_of(const redis_server *s, const char *name, const char *scope)
{
    pdk_journal *local = files_of(s, name);
    return local == NULL ? NULL : pdk_journal_mirror(local, s->url, scope, NULL);
}
static pdk_journal *machine(const redis_server *s, const char *name)
{
    return machine_of(s, name, "engine");
}

static int said(int rc)
{
    if (rc < 0)
        fprintf(stderr, "  (%s)\n", last_error.message);
    return rc;
}
static int record(pdk_journal *j, const char *id, const char *generation)
{
    pdk_error_clear(&last_error);
    return said(pdk_journal_record(j, id, generation, "a test", &last_error));
}
static int has(pdk_journal *j, const char *id, const char *generation)
{
    pdk_error_clear(&last_error);
    return said(pdk_journal_has(j, id, generation, &last_error));
}
static int retire(pdk_journal *j, const char *id, const char *generation)
{
    pdk_error_clear(&last_error);
    return said(pdk_journal_retire(j, id, generation, &last_error));
}
static int republish(pdk_journal *j)
{
    pdk_error_clear(&last_error);
    return said(pdk_journal_republish(j, &last_error));
}
#define CHECK_STORAGE(call, part) \
    do { \
        CHECK_INT(call, -1); \
        CHECK_KIND(last_error, PDK_E_IO_ERROR); \
        CHECK_HAS(last_error.message, part); \
    } while (0)

/* "id/generation id/generation ", in the order of the list; "!" = it cannot be listed. */
static const char *listed(pdk_journal *j)
{
    static char text[4][8192];
    static int next;
    char *out = text[next++ % 4];
    PDK_AUTO_PACK list = PDK_NO_PACK;
    pdk_view key, one;
    size_t cursor = 0;
    int n = 0;
    pdk_error_clear(&last_error);
    out[0] = '\0';
    if (said(pdk_journal_list(j, &list, &last_error)) < 0)
        return "!";
    while (pdk_view_next(pdk_view_of(&list), &cursor, &key, &one) && n < 8000) {
        const char *id = pdk_view_str(pdk_view_get(one, "sandbox_id"), NULL);
        const char *generation = pdk_view_str(pdk_view_get(one, "generation"), NULL);
        CHECK(pdk_view_str(pdk_view_get(one, "path"), NULL) != NULL);
        CHECK_STR(pdk_view_str(pdk_view_get(one, "why"), NULL), "a test");
        CHECK(pdk_view_bool(pdk_view_get(one, "here"), false));
        n += snprintf(out + n, 8192 - (size_t)n, "%s/%s ", id, generation != NULL ? generation : "?");
    }
    return out;
}

/* ---- the rules, across machines ---------------------------------------------------------------------------------------- */

TEST("what one machine has recorded is there for the others, for that generation alone, without expiry [K3 K5 K19]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *other = machine_of(&s, "c", "another engine");
    REQUIRE(a != NULL && b != NULL && other != NULL);
    CHECK_INT(has(b, "x", NULL), 0);
    CHECK_INT(record(a, "x", "g1"), 0);
    CHECK_INT(record(a, "x", "g1"), 0);
    pdk_journal *both[] = { a, b };
    for (int i = 0; i < 2; i++) {
        CHECK_INT(has(both[i], "x", "g1"), 1);
        CHECK_INT(has(both[i], "x", "g2"), 0);
        CHECK_INT(has(both[i], "x", NULL), 1);
        CHECK_INT(has(both[i], "y", "g1"), 0);
        CHECK_STR(listed(both[i]), "x/g1 ");
    }
    CHECK_INT(has(other, "x", NULL), 0);
    CHECK_STR(listed(other), "");
    CHECK_STR(redis_do(&s, "TTL {paddock}:quarantine:engine:x"), "-1");
    CHECK_STR(redis_do(&s, "TTL {paddock}:quarantined:engine"), "-1");
    CHECK_INT(retire(b, "x", "g2"), 0);
    CHECK_INT(has(b, "x", "g1"), 1);
    CHECK_INT(retire(b, "x", "g1"), 0);
    CHECK_INT(has(b, "x", NULL), 0);
    CHECK_STR(redis_do(&s, "EXISTS {paddock}:quarantine:engine:x"), "0");
    CHECK_STR(redis_do(&s, "EXISTS {paddock}:quarantined:engine"), "0");
    CHECK_STR(redis_do(&s, "DBSIZE"), "1"); /* that it was retired, for a while */
    CHECK(atoll(redis_do(&s, "TTL {paddock}:retired:engine:x")) > 29 * 86400);
    CHECK_INT(retire(b, "y", "never recorded"), 0);
    CHECK_STR(redis_do(&s, "DBSIZE"), "1");
}

TEST("one of an unknown generation fences them all on every machine, and retiring what was unknown takes all [K4 K5]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    CHECK_INT(record(a, "x", NULL), 0);
    CHECK_INT(record(b, "x", "g1"), 0);
    CHECK_INT(has(b, "x", "g2"), 1);
    CHECK_INT(has(b, "x", NULL), 1);
    CHECK_INT(retire(b, "x", "g1"), 0);
    CHECK_INT(has(b, "x", "g1"), 1);
    CHECK_STR(listed(b), "x/? ");
    CHECK_STR(listed(a), "x/? ");
    CHECK_INT(record(b, "x", "g3"), 0);
    CHECK_INT(retire(b, "x", NULL), 0);
    CHECK_INT(has(b, "x", NULL), 0);
    CHECK_STR(listed(b), "");
}

TEST("generations of any bytes are told apart on their way through redis; one that is absurdly long is refused [K5]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    static const char *const all[] = { "?", "g", "", " ", "\r\n*3\r\n", "\"'%s\\", "\x01\xff\xfe", "gg" };
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 8; k++)
            CHECK_INT(has(b, "x", all[k]), k < i);
        CHECK_INT(record(a, "x", all[i]), 0);
    }
    CHECK_INT(has(b, "x", "h"), 0);
    for (int i = 0; i < 8; i++)
        CHECK_HAS(listed(b), all[i]);
    for (int i = 0; i < 8; i++) {
        CHECK_INT(retire(b, "x", all[i]), 0);
        CHECK_INT(has(b, "x", all[i]), 0);
        CHECK_INT(has(b, "x", NULL), i < 7);
    }
    char text[5001];
    memset(text, 'g', 5000);
    text[5000] = '\0';
    CHECK_STORAGE(record(a, "x", text), "too long");
    CHECK_INT(has(a, "x", text), 1);
    CHECK_INT(has(b, "x", text), 0);
    CHECK_INT(retire(a, "x", text), 0);
    text[4000] = '\0';
    CHECK_INT(record(a, "x", text), 0);
    CHECK_INT(has(b, "x", text), 1);
    CHECK_STORAGE(record(a, "x:y", "g"), "cannot be the id");
}

TEST("a list has each record once, whoever recorded it, over as many pages as it takes")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *c = machine(&s, "c");
    char id[32];
    for (int i = 0; i < 230; i++) {
        snprintf(id, sizeof id, "id-%d", i);
        CHECK_INT(record(i % 2 == 0 ? a : b, id, i % 3 == 0 ? NULL : "g"), 0);
        if (i % 10 == 0)
            CHECK_INT(record(b, id, i % 3 == 0 ? NULL : "g"), 0);
    }
    pdk_journal *all[] = { a, b, c };
    for (int m = 0; m < 3; m++) {
        PDK_AUTO_PACK list = PDK_NO_PACK;
        CHECK_INT(pdk_journal_list(all[m], &list, NULL), 0);
        /* two machines' records of an unknown generation are two, as they are two events */
        CHECK_INT(pdk_view_count(pdk_view_of(&list)), 230 + 8);
        for (int i = 0; i < 230; i++) {
            snprintf(id, sizeof id, "id-%d", i);
            CHECK_INT(has(all[m], id, NULL), 1);
        }
    }
}

/* ---- no answer is not a no ----------------------------------------------------------------------------------------------- */

TEST("without the server: no record is complete, none is denied, none is retired; what is on disk still fences [K6 K13 O4]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    CHECK_INT(record(a, "x", "g1"), 0);
    redis_end(&s);
    CHECK_STORAGE(record(a, "y", "g1"), "redis at");
    CHECK_INT(has(a, "y", "g1"), 1); /* the file stands */
    CHECK_INT(has(a, "x", "g1"), 1);
    CHECK_UNAVAILABLE(has(a, "x", "g2"), "redis at");
    CHECK_UNAVAILABLE(has(b, "x", "g1"), "redis at");
    CHECK_UNAVAILABLE(has(b, "x", NULL), "redis at");
    CHECK_STORAGE(retire(a, "x", "g1"), "redis at");
    CHECK_INT(has(a, "x", "g1"), 1);
    CHECK_STORAGE(republish(a), "redis at");
    CHECK_STR(listed(a), "!");
    CHECK_KIND(last_error, PDK_E_IO_ERROR);
    REQUIRE(redis_run(&s, NULL)); /* it has lost everything */
    for (double end = test_now() + 5; test_now() < end && pdk_journal_has(b, "x", "g1", NULL) < 0;)
        usleep(10000);
    CHECK_INT(has(b, "x", "g1"), 0);
    for (double end = test_now() + 5; test_now() < end && pdk_journal_republish(a, NULL) < 0;)
        usleep(10000);
    CHECK_INT(has(b, "x", "g1"), 1);
    CHECK_INT(has(b, "y", "g1"), 1); /* also what it could not be told */
}

TEST("a server that hangs costs a call its bound; what it was sent changes nothing when it wakes up [B051]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *files = files_of(&s, "a");
    CHECK_INT(record(a, "x", "g1"), 0);
    CHECK_INT(record(b, "warm up", "g1"), 0);
    kill(s.pid, SIGSTOP);
    double start = test_now();
    CHECK_UNAVAILABLE(has(b, "x", "g1"), "does not answer");
    CHECK_TOOK(start, WAIT_S);
    start = test_now();
    CHECK_STORAGE(retire(a, "x", "g1"), "does not answer");
    CHECK_STORAGE(record(a, "y", NULL), "redis at");
    CHECK_WITHIN(start, 2 * WAIT_S);
    CHECK_INT(has(files, "x", "g1"), 1);
    kill(s.pid, SIGCONT);
    for (double end = test_now() + 5; test_now() < end && pdk_journal_has(b, "x", "g1", NULL) < 0;)
        usleep(10000);
    CHECK_INT(has(b, "x", "g1"), 1);
    CHECK_INT(has(b, "y", NULL), 0);
    CHECK_STR(redis_do(&s, "EXISTS {paddock}:retired:engine:x"), "0");
}

/* Stands before a server, and keeps back what runs a script for as long as `hold` says. One connection after the other. */
typedef struct gate {
    char path[160], url[200];
    const redis_server *to;
    int listener;
    atomic_bool hold, holds, end;
    pdk_thread thread;
} gate;

static int unix_socket(const char *path, bool listens)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_INT((listens ? bind : connect)(fd, (struct sockaddr *)&a, sizeof a), 0);
    CHECK(!listens || listen(fd, 8) == 0);
    return fd;
}

/* What came from one side goes to the other; false = an end. */
static bool pass_on(gate *g, int from, int to, bool guarded)
{
    char text[8192];
    ssize_t n = read(from, text, sizeof text);
    if (guarded && n > 0 && memmem(text, (size_t)n, "EVAL", 4) != NULL)
        while (atomic_load(&g->hold)) {
            atomic_store(&g->holds, true);
            usleep(1000);
        }
    return n > 0 && send(to, text, (size_t)n, MSG_NOSIGNAL) == n;
}

static void *gate_main(void *arg)
{
    gate *g = arg;
    while (!atomic_load(&g->end)) {
        struct pollfd in[2] = { { g->listener, POLLIN, 0 } };
        if (poll(in, 1, 5) != 1)
            continue;
        in[0].fd = accept4(g->listener, NULL, NULL, SOCK_CLOEXEC);
        in[1] = (struct pollfd){ unix_socket(g->to->path, false), POLLIN, 0 };
        for (bool more = true; more && !atomic_load(&g->end);) {
            poll(in, 2, 5);
            more = (in[0].revents == 0 || pass_on(g, in[0].fd, in[1].fd, true)) &&
                   (in[1].revents == 0 || pass_on(g, in[1].fd, in[0].fd, false));
        }
        usleep(50000); /* the server reads what it was sent, also from who has left */
        close(in[0].fd);
        close(in[1].fd);
    }
    close(g->listener);
    return NULL;
}

TEST("a change that is held up on its way, after it was told what time it is, changes nothing when it arrives [B051]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    gate g = { .to = &s };
    snprintf(g.path, sizeof g.path, "%s/gate", s.dir);
    snprintf(g.url, sizeof g.url, "unix://%s", g.path);
    g.listener = unix_socket(g.path, true);
    CHECK_INT(pdk_thread_start(&g.thread, "gate", gate_main, &g), 0);
    AUTO_JOURNAL *a = pdk_journal_mirror(files_of(&s, "a"), g.url, "engine", NULL), *b = machine(&s, "b");
    CHECK_INT(record(a, "x", "g1"), 0);
    for (int i = 0; i < 2; i++) {
        int before = atoi(redis_do(&s, "EXISTS {paddock}:quarantine:engine:x"));
        atomic_store(&g.hold, true);
        pdk_limit limit = { .deadline = pdk_now_monotonic() + PDK_NS_PER_S / 5 };
        const pdk_limit *outer = pdk_limit_enter(&limit);
        if (i == 0)
            CHECK_STORAGE(retire(a, "x", NULL), "own time");
        else
            CHECK_STORAGE(record(a, "x", NULL), "own time");
        pdk_limit_enter(outer);
        CHECK(atomic_load(&g.holds));
        atomic_store(&g.holds, false);
        const char *calls = redis_do(&s, "INFO commandstats");
        char former[4096];
        snprintf(former, sizeof former, "%s", strstr(calls, "cmdstat_eval:"));
        atomic_store(&g.hold, false);
        for (double end = test_now() + 5; test_now() < end; usleep(5000)) { /* it does arrive */
            const char *now = strstr(redis_do(&s, "INFO commandstats"), "cmdstat_eval:");
            if (now == NULL || strncmp(former, now, strcspn(now, ",")) != 0)
                break;
        }
        CHECK_INT(atoi(redis_do(&s, "EXISTS {paddock}:quarantine:engine:x")), before);
        CHECK_INT(has(b, "x", "g1"), i == 0);
        CHECK_INT(retire(a, "x", "g1"), 0);
    }
    atomic_store(&g.end, true);
    pdk_thread_join(&g.thread);
}

TEST("what is called off because its time is over in the server's own clock is an error, and changes nothing [B051]")
{
    static const char *const rename[] = { "--rename-command", "TIME", "HIDDEN", NULL };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, rename));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    CHECK_STORAGE(record(a, "x", "g1"), "unknown command");
    CHECK_INT(has(a, "x", "g1"), 1);
    CHECK_INT(has(b, "x", "g1"), 0);
    const pdk_limit over = { .deadline = pdk_now_monotonic() }, *outer = pdk_limit_enter(&over);
    CHECK_UNAVAILABLE(has(b, "x", "g1"), "no time is left");
    pdk_limit_enter(outer);
    CHECK_INT(has(b, "x", "g1"), 0);
}

TEST("foreign values in our keys are errors, never `no record`, and stay as they are [O4]")
{
    static const char *const names[] = { "quarantine:engine:x", "quarantined:engine", "retired:engine:x" };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    for (int i = 0; i < 3; i++) {
        redis_do(&s, "FLUSHALL");
        redis_do(&s, "SET {paddock}:%s foreign", names[i]);
        CHECK_STORAGE(record(a, "x", "g1"), "WRONGTYPE");
        if (i == 0) {
            CHECK_UNAVAILABLE(has(b, "x", "g1"), "WRONGTYPE");
            CHECK_UNAVAILABLE(has(b, "x", NULL), "WRONGTYPE");
        } else {
            CHECK_INT(has(b, "x", "g1"), 1); /* a fence too many rather than one too few */
        }
        if (i == 1)
            CHECK_STR(listed(b), "!");
        CHECK_STORAGE(retire(a, "x", "g1"), "WRONGTYPE");
        CHECK_INT(has(a, "x", "g1"), 1);
        CHECK_STR(redis_do(&s, "GET {paddock}:%s", names[i]), "foreign");
    }
    redis_do(&s, "FLUSHALL");
    redis_do(&s, "ZADD {paddock}:quarantined:engine 0 %0100d", 7);
    CHECK_STR(listed(b), "!");
    CHECK_HAS(last_error.message, "did not write");
}

TEST("a full server is an error with its own words; what is there is still found [O4]")
{
    static const char *const small[] = { "--maxmemory", "1", NULL };
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    CHECK_INT(record(a, "x", "g1"), 0);
    redis_do(&s, "CONFIG SET maxmemory %s", small[1]);
    CHECK_STORAGE(record(a, "x", "g2"), "OOM");
    CHECK_INT(has(b, "x", "g1"), 1);
    CHECK_INT(has(b, "x", "g2"), 0);
}

/* ---- loss, and who heals it ---------------------------------------------------------------------------------------------- */

TEST("the loss of all keys is healed by each machine's own files; publishing twice changes nothing")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *c = machine(&s, "c");
    CHECK_INT(record(a, "x", "g1"), 0);
    CHECK_INT(record(a, "x", NULL), 0);
    CHECK_INT(record(b, "y", "g2"), 0);
    redis_do(&s, "FLUSHALL");
    CHECK_INT(has(c, "x", NULL), 0); /* until its machine looks */
    CHECK_INT(has(a, "x", "g1"), 1);
    for (int i = 0; i < 3; i++) {
        CHECK_INT(republish(a), 0);
        CHECK_INT(republish(b), 0);
        CHECK_INT(republish(c), 0);
        CHECK_INT(has(c, "x", "g1"), 1);
        CHECK_INT(has(c, "x", "any"), 1);
        CHECK_INT(has(c, "y", "g2"), 1);
        CHECK_INT(has(c, "y", "g1"), 0);
        CHECK_STR(redis_do(&s, "HLEN {paddock}:quarantine:engine:x"), "2");
    }
    redis_do(&s, "DEL {paddock}:quarantined:engine");
    CHECK_INT(republish(a), 0);
    CHECK_INT(strlen(listed(c)), strlen("x/g1 x/? "));
}

TEST("what another machine has retired is not published again: its file goes, in both forms, and nothing else does [K4]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *files = files_of(&s, "a");
    CHECK_INT(record(a, "known", "g1"), 0);
    CHECK_INT(record(a, "known", "g2"), 0);
    CHECK_INT(record(a, "unknown", NULL), 0);
    CHECK_INT(retire(b, "known", "g1"), 0);
    CHECK_INT(retire(b, "unknown", NULL), 0);
    CHECK_INT(has(files, "known", "g1"), 1);
    CHECK_INT(republish(a), 0);
    CHECK_INT(has(b, "known", "g1"), 0);
    CHECK_INT(has(b, "known", "g2"), 1);
    CHECK_INT(has(b, "unknown", "new"), 0);
    CHECK_STR(listed(files), "known/g2 ");
    CHECK_STR(listed(a), "known/g2 ");
}

TEST("a record that was made after a retirement stands, also of an unknown generation, and also when nobody could be told "
     "[K6]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    CHECK_INT(record(a, "x", NULL), 0);
    CHECK_INT(record(a, "y", NULL), 0);
    CHECK_INT(record(a, "z", "g"), 0);
    CHECK_INT(retire(b, "x", NULL), 0);
    CHECK_INT(retire(b, "y", NULL), 0);
    CHECK_INT(retire(b, "z", "g"), 0);
    CHECK_INT(record(a, "x", NULL), 0); /* told */
    CHECK_INT(record(a, "z", "g"), 0);
    const pdk_limit over = { .deadline = pdk_now_monotonic() }, *outer = pdk_limit_enter(&over);
    CHECK_STORAGE(record(a, "y", NULL), "redis at"); /* not told */
    pdk_limit_enter(outer);
    CHECK_INT(republish(a), 0);
    CHECK_INT(has(b, "x", "g"), 1);
    CHECK_INT(has(b, "y", "g"), 1);
    CHECK_INT(has(b, "z", "g"), 1);
}

TEST("a retired one of an unknown generation leaves its file where something else stands beside it: a fence too many [K19]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b"), *files = files_of(&s, "a");
    CHECK_INT(record(a, "x", NULL), 0);
    CHECK_INT(retire(b, "x", NULL), 0);
    CHECK_INT(record(a, "x", "later"), 0);
    CHECK_INT(republish(a), 0);
    CHECK_INT(has(files, "x", "later"), 1);
    CHECK_INT(has(b, "x", "later"), 1);
    CHECK_INT(has(b, "x", "new"), 0); /* not published */
    CHECK_INT(has(a, "x", "new"), 1);
    CHECK_INT(retire(b, "x", "later"), 0);
    CHECK_INT(republish(a), 0); /* the one goes, */
    CHECK_INT(republish(a), 0); /* and then the other */
    CHECK_INT(has(a, "x", "new"), 0);
}

/* ---- lists of redis ------------------------------------------------------------------------------------------------------ */

TEST("a list that redis answers has its bounds: too long, too large, nested, not of strings, or asked for by nobody [O4]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    pdk_redis *r = pdk_redis_new(s.url, NULL);
    static const struct {
        const char *script;
        int strings; /* -1 = no answer */
    } rows[] = {
        { "return {}", 0 },
        { "return {'a', '', 'b'}", 3 },
        { "local t = {} for i = 1, 4096 do t[i] = 'x' end return t", 4096 },
        { "local t = {} for i = 1, 4097 do t[i] = 'x' end return t", -1 },
        { "return {('x'):rep(1000000)}", 1 },
        { "return {('x'):rep(1048576)}", -1 },
        { "return {{'a'}}", -1 },
        { "return {'a', 1}", -1 },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *args[] = { "EVAL", rows[i].script, "0" };
        for (int with = 0; with < 2; with++) {
            pdk_redis_conn *c = NULL;
            for (double end = test_now() + 5; c == NULL && test_now() < end; usleep(10000))
                c = pdk_redis_take(r, NULL); /* after an answer that is none the server is left alone for a moment */
            REQUIRE(c != NULL);
            PDK_AUTO_PACK list = PDK_NO_PACK;
            pdk_redis_reply reply;
            pdk_error_clear(&last_error);
            int rc = with ? pdk_redis_ask_list(c, args, 3, &list, &reply, &last_error)
                          : pdk_redis_ask(c, args, 3, &reply, &last_error);
            if (with && rows[i].strings >= 0) {
                CHECK_INT(rc, 0);
                CHECK_INT(reply.kind, PDK_REDIS_STRINGS);
                CHECK_INT(pdk_view_count(pdk_view_of(&list)), rows[i].strings);
            } else {
                CHECK_UNAVAILABLE(rc, "does not answer as redis does");
            }
            pdk_redis_give(r, c);
        }
    }
    pdk_redis_free(r);
}

/* ---- many at once -------------------------------------------------------------------------------------------------------- */

typedef struct crowd {
    pdk_journal *of[2];
    atomic_int next, wrong;
} crowd;

/* Even ones have the id "x" in common, each with generations of its own; odd ones publish everything all the time. */
static void *one_of_many(void *arg)
{
    crowd *c = arg;
    int me = atomic_fetch_add(&c->next, 1);
    pdk_journal *mine = c->of[me / 2 % 2], *other = c->of[1 - me / 2 % 2];
    for (int i = 0; i < 60; i++) {
        char g[32];
        snprintf(g, sizeof g, "g%d-%d", me, i);
        int wrong = 0;
        if (me % 2 == 1) {
            wrong = pdk_journal_republish(mine, NULL) != 0;
        } else {
            wrong += pdk_journal_record(mine, "x", g, "a test", NULL) != 0;
            wrong += pdk_journal_has(other, "x", g, NULL) != 1;
            wrong += i % 3 != 0 && pdk_journal_retire(other, "x", g, NULL) != 0;
            wrong += pdk_journal_has(other, "x", g, NULL) != (i % 3 == 0);
        }
        atomic_fetch_add(&c->wrong, wrong);
    }
    return NULL;
}

TEST("two machines record, retire and publish from eight threads: each record is there until it is retired, and no longer")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_JOURNAL *a = machine(&s, "a"), *b = machine(&s, "b");
    crowd c = { .of = { a, b } };
    pdk_thread threads[8];
    for (int i = 0; i < 8; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "machine", one_of_many, &c), 0);
    for (int i = 0; i < 8; i++)
        pdk_thread_join(&threads[i]);
    CHECK_INT(c.wrong, 0);
    CHECK_INT(republish(a), 0);
    CHECK_INT(republish(b), 0);
    CHECK_STR(redis_do(&s, "HLEN {paddock}:quarantine:engine:x"), "80");
    CHECK_INT(republish(a), 0);
    PDK_AUTO_PACK list = PDK_NO_PACK;
    CHECK_INT(pdk_journal_list(a, &list, NULL), 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&list)), 80);
}

TEST_MAIN
