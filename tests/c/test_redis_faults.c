/* test_redis_faults.c -- the `redis` ownership store when answers do not come: a server that hangs, one that comes and goes, one
 * that is none; and many threads at once. */
#include "redis_world.h"

#include <poll.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- no answer ------------------------------------------------------------------------------------------------------- */

TEST("a server that hangs: each call ends within its bound; what it runs when it wakes up changes nothing [O4]")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    CHECK(take(b, "x") > 0);
    CHECK(take(a, "y") > 0);
    const char *before = state_of(&s);
    int64_t failures = 0;
    double longest = 0, begin = test_now();
    kill(s.pid, SIGSTOP);
    CHECK_UNAVAILABLE(take(a, "x"), "does not answer"); /* over a connection that was good */
    CHECK_TOOK(begin, WAIT_S);
    for (double end = test_now() + 4; test_now() < end; usleep(1000)) {
        double start = test_now();
        failures += take(a, "x") == -1 && last_error.kind == PDK_E_OWNERSHIP_UNAVAILABLE;
        longest = test_now() - start > longest ? test_now() - start : longest;
    }
    CHECK(longest < WAIT_S + TEST_SLACK);
    CHECK(failures > 10); /* most of them at once */
    kill(s.pid, SIGCONT);
    REQUIRE(comes_back(b, 5));
    usleep(100000);
    CHECK_STR(owner(b, "x"), "own b");
    CHECK_INT(renew(b, "x"), PDK_RENEWED);
    CHECK_STR(state_of(&s), before);
    REQUIRE(comes_back(a, 5));
    CHECK_INT(renew(a, "y"), PDK_RENEWED);
    CHECK(take(a, "x") > 0);
}

static struct sockaddr_un address_of(const char *path)
{
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    memcpy(a.sun_path, path, strlen(path) + 1);
    return a;
}
static int unix_connect(const char *path)
{
    struct sockaddr_un a = address_of(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_INT(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}
static int unix_listen(const char *path)
{
    struct sockaddr_un a = address_of(path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    unlink(path);
    CHECK_INT(bind(fd, (struct sockaddr *)&a, sizeof a), 0);
    CHECK_INT(listen(fd, 16), 0);
    return fd;
}

/* Forwards connections to a server; what goes to the server on the first `held` of them waits. */
typedef struct proxy {
    char path[160], url[200], to[160];
    int listener;
    atomic_int held, seen, count; /* seen: how many it knows to hold */
    atomic_bool end;
    pdk_thread thread;
} proxy;
enum { LINKS = 16 };

static void forward(int from, int to)
{
    char text[8192];
    ssize_t n = read(from, text, sizeof text);
    if (n > 0)
        n = send(to, text, (size_t)n, MSG_NOSIGNAL);
    if (n <= 0) { /* the other side is told, but still may read what it was sent */
        shutdown(from, SHUT_RD);
        shutdown(to, SHUT_WR);
    }
}

static void *proxy_main(void *arg)
{
    proxy *p = arg;
    struct pollfd in[1 + 2 * LINKS]; /* the listener; then, of each link, client and server */
    int n = 0;
    in[0] = (struct pollfd){ p->listener, POLLIN, 0 };
    while (!atomic_load(&p->end)) {
        int held = atomic_load(&p->held);
        atomic_store(&p->seen, held);
        for (int i = 0; i < n; i++)
            in[1 + 2 * i].events = i < held ? 0 : POLLIN;
        poll(in, (nfds_t)(1 + 2 * n), 2);
        for (int i = 0; i < n; i++) {
            if ((in[1 + 2 * i].revents & in[1 + 2 * i].events) != 0)
                forward(in[1 + 2 * i].fd, in[2 + 2 * i].fd);
            if ((in[2 + 2 * i].revents & POLLIN) != 0)
                forward(in[2 + 2 * i].fd, in[1 + 2 * i].fd);
        }
        if (in[0].revents != 0 && n < LINKS) {
            in[1 + 2 * n] = (struct pollfd){ accept4(p->listener, NULL, NULL, SOCK_CLOEXEC), POLLIN, 0 };
            in[2 + 2 * n] = (struct pollfd){ unix_connect(p->to), POLLIN, 0 };
            atomic_store(&p->count, ++n);
        }
    }
    for (int i = 0; i < 1 + 2 * n; i++)
        close(in[i].fd);
    return NULL;
}
static void proxy_start(proxy *p, const redis_server *s)
{
    memset(p, 0, sizeof *p);
    snprintf(p->path, sizeof p->path, "%s/proxy", s->dir);
    snprintf(p->url, sizeof p->url, "unix://%s/proxy", s->dir);
    memcpy(p->to, s->path, sizeof p->to);
    p->listener = unix_listen(p->path);
    CHECK_INT(pdk_thread_start(&p->thread, "proxy", proxy_main, p), 0);
}
static void proxy_end(proxy *p)
{
    atomic_store(&p->end, true);
    pdk_thread_join(&p->thread);
}

TEST("a take that hangs on its way and arrives after its runtime has asked anew takes nothing [B051]")
{
    AUTO_REDIS s;
    proxy p;
    REQUIRE(redis_start(&s, NULL));
    proxy_start(&p, &s);
    AUTO_LEASE *a = pdk_lease_redis(p.url, "machine/boot", "a", 60, NULL), *b = store(&s, "b", 60);
    CHECK(take(a, "warm up") > 0);
    int64_t session = atoll(redis_do(&s, "GET {paddock}:session:a"));
    atomic_store(&p.held, atomic_load(&p.count));
    while (atomic_load(&p.seen) == 0)
        usleep(1000);
    CHECK_UNAVAILABLE(take(a, "x"), "does not answer");
    REQUIRE(comes_back(a, 3)); /* over a new connection */
    CHECK_INT(release(a, "x"), 0);
    CHECK(atoll(redis_do(&s, "GET {paddock}:session:a")) > session);
    CHECK_STR(owner(a, "x"), "-");
    CHECK(take(b, "x") > 0);
    const char *before = state_of(&s);
    atomic_store(&p.held, 0);
    usleep(100000);
    CHECK_STR(state_of(&s), before);
    CHECK_STR(owner(a, "x"), "own b");
    CHECK_INT(renew(a, "warm up"), PDK_RENEWED);
    proxy_end(&p);
}

TEST("an operation whose own time ends sooner fails then, and is not held against the server")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    CHECK(take(a, "x") > 0);
    kill(s.pid, SIGSTOP);
    double start = test_now();
    pdk_limit limit = { .deadline = pdk_now_monotonic() + PDK_NS_PER_S / 5 };
    const pdk_limit *outer = pdk_limit_enter(&limit);
    CHECK_UNAVAILABLE(take(a, "x"), "own time");
    CHECK_TOOK(start, 0.2);
    start = test_now();
    CHECK_UNAVAILABLE(take(a, "x"), "redis at");
    CHECK_WITHIN(start, 0);
    pdk_limit_enter(outer);
    kill(s.pid, SIGCONT);
    CHECK(take(a, "x") > 0); /* no waiting for a next try */
}

typedef struct crowd {
    pdk_lease *lease;
    int expected;    /* of each call: 1 = a token, -1 = no answer */
    atomic_int slow; /* calls without an answer that took more than half of the bound */
} crowd;

static void *one_of_many(void *arg)
{
    crowd *c = arg;
    double start = test_now();
    for (int i = 0; i < (c->expected > 0 ? 50 : 1); i++) {
        int64_t token = take(c->lease, "x");
        CHECK(token == -1 ? c->expected < 0 : c->expected > 0);
    }
    if (c->expected < 0) {
        CHECK_WITHIN(start, WAIT_S);
        atomic_fetch_add(&c->slow, test_now() - start > WAIT_S / 2);
    }
    pdk_error_clear(&last_error);
    return NULL;
}
/* How many of `n` threads had to wait. */
static int crowd_of(int n, pdk_lease *l, int expected)
{
    pdk_thread threads[16];
    crowd c = { .lease = l, .expected = expected };
    for (int i = 0; i < n; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "caller", one_of_many, &c), 0);
    for (int i = 0; i < n; i++)
        pdk_thread_join(&threads[i]);
    return c.slow;
}

TEST(
    "a hung server lets no queue grow: sixteen threads fail within the bound of one call, and then only one at a time waits")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    int fds = test_fds();
    CHECK_INT(crowd_of(16, a, 1), 0);
    CHECK(test_fds() > fds && test_fds() <= fds + PDK_REDIS_CONNS);
    kill(s.pid, SIGSTOP);
    CHECK_UNAVAILABLE(take(a, "x"), "does not answer");
    CHECK_INT(test_fds(), fds); /* with the one that was not answered all were closed */
    kill(s.pid, SIGCONT);
    REQUIRE(comes_back(a, 5));
    CHECK_INT(crowd_of(16, a, 1), 0);
    kill(s.pid, SIGSTOP);
    double start = test_now();
    crowd_of(16, a, -1);
    CHECK_WITHIN(start, WAIT_S);
    CHECK_INT(test_fds(), fds);
    usleep(100000); /* the first pause is over by now */
    CHECK_INT(crowd_of(16, a, -1), 1);
    kill(s.pid, SIGCONT);
    REQUIRE(comes_back(a, 5));
    CHECK_INT(crowd_of(16, a, 1), 0);
}

TEST("a server that comes and goes: at once again, one connection in the end, no descriptor lost")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    int fds = test_fds();
    AUTO_LEASE *a = store(&s, "a", 60);
    for (int i = 0; i < 4; i++) {
        CHECK(take(a, "x") > 0);
        CHECK_INT(test_fds(), fds + 1);
        redis_end(&s);
        if (i % 2 == 0)
            CHECK_UNAVAILABLE(take(a, "x"), "cannot connect");
        CHECK(test_fds() <= fds + 1);
        REQUIRE(redis_run(&s, NULL));
        if (i % 2 == 0)
            REQUIRE(comes_back(a, 3));
    }
    CHECK_INT(pdk_lease_close(a, NULL), 0);
    CHECK_INT(test_fds(), fds);
    CHECK_UNAVAILABLE(take(a, "x"), "closed");
}

/* A server that is none: says `text` to whatever it hears first, and then closes, or not. */
typedef struct fake {
    int listener;
    const char *text;
    bool closes;
    atomic_bool end;
} fake;

static void *fake_main(void *arg)
{
    fake *f = arg;
    int open[64], n = 0;
    while (!atomic_load(&f->end)) {
        struct pollfd p = { f->listener, POLLIN, 0 };
        if (poll(&p, 1, 5) != 1 || n == 64)
            continue;
        int c = accept4(f->listener, NULL, NULL, SOCK_CLOEXEC);
        char heard[4096];
        if (read(c, heard, sizeof heard) > 0)
            send(c, f->text, strlen(f->text), MSG_NOSIGNAL);
        if (f->closes)
            close(c);
        else
            open[n++] = c;
    }
    while (n > 0)
        close(open[--n]);
    close(f->listener);
    return NULL;
}

TEST("what does not answer as redis does is unavailable, within the bound, and uses up no memory [O4]")
{
    static char endless[100001];
    memset(endless, 'x', 100000);
    endless[0] = '+';
    const struct {
        const char *text, *said;
        bool closes;
    } rows[] = {
        { "HTTP/1.1 400 Bad Request\r\n\r\n", "does not answer as redis does", true },
        { "*2147483647\r\n", "does not answer as redis does", false },
        { endless, "does not answer as redis does", false },
        { "$2147483646\r\nx", "closed the connection", true },
        { "$12\r\nyes 1", "closed the connection", true },
        { "", "closed the connection", true },
        { ":1\r\n", "does not give", false },
        { "$-1\r\n", "does not give", false },
        { "+OK\r\n", "does not give", false },
        { "+yes 12 1700000000000000\r\n", "does not give", false },
        { "+session 0 1700000000000000\r\n", "does not give", false },
        { "+session 12 99999999999999999999\r\n", "does not give", false },
        { "-LOADING Redis is loading the dataset in memory\r\n", "LOADING", false },
        { "-\x1b[31mred\r\n", "?[31mred", false },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char path[160], url[200];
        snprintf(path, sizeof path, "%s/fake", test_tmpdir());
        snprintf(url, sizeof url, "unix://%s", path);
        fake f = { unix_listen(path), rows[i].text, rows[i].closes, false };
        pdk_thread t;
        CHECK_INT(pdk_thread_start(&t, "fake", fake_main, &f), 0);
        AUTO_LEASE *a = pdk_lease_redis(url, "", "a", 60, NULL);
        double start = test_now();
        CHECK_UNAVAILABLE(take(a, "x"), rows[i].said);
        CHECK_WITHIN(start, WAIT_S);
        atomic_store(&f.end, true);
        pdk_thread_join(&t);
    }
}

TEST("a server that hangs up after its first word: an error, and no signal for the host")
{
    for (int i = 0; i < 30; i++) {
        char path[160], url[200];
        snprintf(path, sizeof path, "%s/fake", test_tmpdir());
        snprintf(url, sizeof url, "unix://:password@%s?db=1", path);
        fake f = { unix_listen(path), "+OK\r\n", true, false };
        pdk_thread t;
        CHECK_INT(pdk_thread_start(&t, "fake", fake_main, &f), 0);
        AUTO_LEASE *a = pdk_lease_redis(url, "", "a", 60, NULL);
        CHECK_UNAVAILABLE(take(a, "x"), "closed the connection");
        atomic_store(&f.end, true);
        pdk_thread_join(&t);
    }
}

/* ---- many at once ---------------------------------------------------------------------------------------------------- */

typedef struct contest {
    pdk_lease *stores[2];
    atomic_int holder, wins, broken, next;
    _Atomic int64_t last;
} contest;

/* Threads of one runtime share its lease, so each runtime's threads take turns; the two runtimes compete for "x". */
static pdk_mutex turns[2] = { { PTHREAD_MUTEX_INITIALIZER }, { PTHREAD_MUTEX_INITIALIZER } };

static void *compete(void *arg)
{
    contest *c = arg;
    int me = atomic_fetch_add(&c->next, 1), side = me % 2;
    pdk_lease *l = c->stores[side];
    char own[32];
    snprintf(own, sizeof own, "own-%d", me);
    int64_t mine = take(l, own);
    for (int won = 0, i = 0; won < 60 && i < 20000; i++) {
        if (i % 8 == 0 && (claim(l, own) != mine || renew(l, own) != PDK_RENEWED))
            atomic_fetch_add(&c->broken, 1);
        PDK_GUARD(turns[side]);
        int64_t token = claim(l, "x");
        if (token <= 0) {
            atomic_fetch_add(&c->broken, token < 0);
            continue;
        }
        won++;
        if (atomic_exchange(&c->holder, me + 1) != 0 || token <= atomic_load(&c->last))
            atomic_fetch_add(&c->broken, 1);
        atomic_store(&c->last, token);
        if (won % 2 == 0 && destroy(l, "x") != token)
            atomic_fetch_add(&c->broken, 1);
        atomic_fetch_add(&c->wins, 1);
        atomic_store(&c->holder, 0);
        if (release(l, "x") != 0)
            atomic_fetch_add(&c->broken, 1);
    }
    pdk_error_clear(&last_error);
    return NULL;
}

TEST("two runtimes compete from eight threads: one holder at a time, tokens that only grow")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60), *b = store(&s, "b", 60);
    contest c = { .stores = { a, b } };
    pdk_thread threads[8];
    for (int i = 0; i < 8; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "rival", compete, &c), 0);
    for (int i = 0; i < 8; i++)
        pdk_thread_join(&threads[i]);
    CHECK_INT(c.broken, 0);
    CHECK_INT(c.wins, 8 * 60);
    CHECK(strstr(redis_do(&s, "INFO clients"), "connected_clients:") != NULL);
}

typedef struct storm {
    pdk_lease *lease;
    atomic_bool end;
    atomic_int answers, errors, wrong;
    _Atomic int64_t last;
} storm;

static void *weather(void *arg)
{
    storm *w = arg;
    char id[32];
    snprintf(id, sizeof id, "id-%llx", (unsigned long long)pdk_thread_self());
    int64_t last = 0;
    while (!atomic_load(&w->end)) {
        int64_t token = take(w->lease, id);
        atomic_fetch_add(token < 0 ? &w->errors : &w->answers, 1);
        if (token == 0 || (token > 0 && token < last) || (token < 0 && last_error.kind != PDK_E_OWNERSHIP_UNAVAILABLE))
            atomic_fetch_add(&w->wrong, 1);
        last = token > 0 ? token : last;
        if (token < 0)
            usleep(1000);
    }
    pdk_error_clear(&last_error);
    return NULL;
}

TEST("sessions, scripts, keys and the server itself vanish under eight threads: errors or right answers, and it recovers")
{
    AUTO_REDIS s;
    REQUIRE(redis_start(&s, NULL));
    AUTO_LEASE *a = store(&s, "a", 60);
    storm w = { .lease = a };
    pdk_thread threads[8];
    for (int i = 0; i < 8; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "caller", weather, &w), 0);
    for (int i = 0; i < 60; i++) {
        usleep(10000);
        if (i % 20 == 19) {
            redis_end(&s);
            REQUIRE(redis_run(&s, NULL));
        } else if (i % 3 == 0) {
            redis_do(&s, "SCRIPT FLUSH");
        } else if (i % 3 == 1) {
            redis_do(&s, "DEL {paddock}:session:a");
        } else {
            redis_do(&s, "FLUSHALL");
        }
    }
    int before = atomic_load(&w.answers);
    for (double end = test_now() + 5; atomic_load(&w.answers) < before + 100 && test_now() < end;)
        usleep(10000);
    CHECK(atomic_load(&w.answers) >= before + 100);
    atomic_store(&w.end, true);
    for (int i = 0; i < 8; i++)
        pdk_thread_join(&threads[i]);
    CHECK_INT(w.wrong, 0);
    CHECK(take(a, "x") > 0);
}

TEST_MAIN
