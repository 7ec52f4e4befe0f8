/* Renewals that nobody else makes: without threads whoever waits does what is due, and with them the leases do not wait for guests. */
#include "world.h"

#include "core.h"
#include "fd.h"
#include "http.h"
#include "proc.h"
#include "serial.h"

#include <arpa/inet.h>
#include <sys/socket.h>

/* ---- primitives that wait ---------------------------------------------------------------------------------- */

typedef struct chore { /* is due every 20 ms */
    pdk_ns next;
    int done, nested;
} chore;

static pdk_ns chore_due(void *ctx)
{
    return ((chore *)ctx)->next;
}

static void chore_run(void *ctx)
{
    chore *c = ctx;
    c->done++;
    c->next = pdk_now_monotonic() + PDK_NS_PER_S / 50;
    const pdk_limit *limit = pdk_limit_current(); /* what it waits for itself has no upkeep */
    c->nested += pdk_upkeep_before(limit, PDK_NEVER) != PDK_NEVER;
    CHECK(limit->upkeep != NULL); /* nor is it given another one */
}

static int sleeps(lua_State *L, void *arg)
{
    lua_getglobal(L, "require");
    lua_pushliteral(L, "paddock.io");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "sleep");
    lua_pushnumber(L, *(double *)arg);
    lua_call(L, 1, 0);
    return 0;
}

static void wait_in_sleep(void)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    double seconds = 0.3;
    pdk_script *s = pdk_script_new(&err);
    REQUIRE(s != NULL);
    CHECK_INT(pdk_script_enter(s, sleeps, &seconds, &err), 0);
    pdk_script_release(s);
}

static void wait_for_process(void)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    const char *const argv[] = { "/bin/sleep", "0.3", NULL };
    pdk_run_result r;
    CHECK_INT(pdk_run(&(pdk_spawn){ .argv = argv }, NULL, 0, 1 << 16, 30, &r, &err), 0);
    CHECK_KIND(err, PDK_OK);
    pdk_run_result_free(&r);
}

/* A server that takes a connection and says nothing. */
static void wait_for_answer(void)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof at;
    PDK_AUTO_FD fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(fd >= 0 && bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 1) == 0);
    REQUIRE(getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%d/", ntohs(at.sin_port));
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_http_response r = { 0 };
    pdk_http_failure failure;
    const double seconds = test_valgrind() ? 5 : 0.3; /* to the first connection, valgrind needs some */
    CHECK_INT(pdk_http_do(&(pdk_http_request){ .method = "GET", .url = url, .timeout = seconds }, &r, &failure, &err), -1);
    CHECK_STR(err.reason, "read_timeout");
    pdk_http_response_free(&r);
}

static void wait_for_turn(bool of_process)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char path[200];
    snprintf(path, sizeof path, "%s/turns", test_tmpdir());
    pdk_serial *mine = pdk_serial_new(of_process ? path : NULL, true, NULL);
    pdk_serial *other = of_process ? pdk_serial_new(path, true, NULL) : mine;
    pdk_turn held = PDK_NO_TURN, turn = PDK_NO_TURN;
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), 0.3);
    CHECK_INT(pdk_turn_enter_id(other, "x", &held, &PDK_NO_LIMIT, &err), 0);
    CHECK_INT(pdk_turn_enter_id(mine, "x", &turn, &limit, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    pdk_turn_leave(&held);
    if (of_process)
        pdk_serial_free(other);
    pdk_serial_free(mine);
}

static void wait_for_other_process(void)
{
    wait_for_turn(true);
}

static void wait_for_other_thread(void)
{
    wait_for_turn(false);
}

TEST("whoever waits under a limit with upkeep does what is due meanwhile, once at a time")
{
    static const struct { const char *what; void (*wait)(void); } waits[] = {
        { "sleep", wait_in_sleep },       { "a process", wait_for_process },
        { "an answer", wait_for_answer }, { "a turn of another process", wait_for_other_process },
        { "a turn of another thread", wait_for_other_thread },
    };
    for (size_t i = 0; i < sizeof waits / sizeof *waits; i++) {
        if (waits[i].wait == wait_for_process && test_valgrind()) /* it knows no clone that shares memory */
            continue;
        chore c = { .next = pdk_now_monotonic() + PDK_NS_PER_S / 50 };
        const pdk_upkeep upkeep = { chore_due, chore_run, &c };
        pdk_limit limit = { .deadline = PDK_NEVER, .upkeep = &upkeep };
        const pdk_limit *outer = pdk_limit_enter(&limit);
        double before = test_now();
        waits[i].wait();
        CHECK(test_now() - before >= 0.29);
        pdk_limit_enter(outer);
        if (c.done < 2 || c.nested > 0)
            test_fail(__FILE__, __LINE__, "waiting for %s: done %d times, %d nested", waits[i].what, c.done, c.nested);
    }
}

/* ---- a runtime without threads ------------------------------------------------------------------------------ */

static int slow_destroy(const char *name, const char *id, const char *detail, double *seconds)
{
    (void)id, (void)detail;
    *seconds = 0.5;
    return strcmp(name, "destroy") == 0 || (strcmp(name, "exec") == 0 && strcmp(detail, "long") == 0);
}

static pdk_ns lease_until(pdk_runtime *rt, const char *id)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    return e != NULL ? e->lease_until : 0;
}

TEST("without threads a long command and a long stop renew the leases that are due, their own too [B15]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = world_open("threads = false, ownership = { type = 'memory', ttl = 30, renew_interval = 0.05 },");
    pdk_box *one = world_acquire(rt, "one", "a"), *two = world_acquire(rt, "two", "b");
    char id[64];
    snprintf(id, sizeof id, "%s", pdk_box_id(two));
    atomic_store(&world_hook, slow_destroy);
    pdk_ns before = lease_until(rt, id), start = pdk_now_boottime();
    pdk_result result;
    CHECK_INT(pdk_exec(one, &(pdk_command){ .command = "long" }, &result, &err), 0);
    pdk_result_free(&result);
    pdk_ns after = lease_until(rt, id);
    CHECK(after > before && after >= start + 30 * PDK_NS_PER_S);
    char gone[64];
    snprintf(gone, sizeof gone, "%s", pdk_box_id(one));
    pdk_box_free(one);
    before = lease_until(rt, id);
    CHECK_INT(pdk_destroy(rt, gone, &err), 1);
    CHECK(lease_until(rt, id) > before);
    CHECK_KIND(err, PDK_OK);
    pdk_box_free(two);
    world_end(rt);
}

TEST("an idle timeout of 0 leaves the thread that renews at work [B15]")
{
    pdk_runtime *rt = world_open("idle_timeout = 0, reap_interval = 3600, ownership = { type = 'memory', ttl = 30, renew_interval = 0.02 },");
    pdk_box *box = world_acquire(rt, "t", NULL);
    pdk_ns before = lease_until(rt, pdk_box_id(box));
    for (int i = 0; i < 500 && lease_until(rt, pdk_box_id(box)) == before; i++)
        pdk_sleep_ns(10 * 1000 * 1000);
    CHECK(lease_until(rt, pdk_box_id(box)) > before);
    pdk_box_free(box);
    world_end(rt);
}

TEST_MAIN
