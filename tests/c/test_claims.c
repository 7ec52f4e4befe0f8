/* Who has a sandbox when many want it, or want it gone, at once: several runtimes with file leases on one engine, whose sandboxes
 * check tokens as a guest does. */
#include "world.h"

/* ---- the engine: sandboxes of this process, behind all runtimes of a test ------------------------------------ */

enum { MOST = 4096 };
typedef struct sandbox {
    char id[64];
    bool running, doomed;
    int64_t token;
    int stops, connects, closes;
    int inside;               /* commands that run in it */
} sandbox;

static pdk_mutex deck_lock = { PTHREAD_MUTEX_INITIALIZER };
static sandbox deck[MOST];    /* deck_lock; by generation */
static int dealt;             /* deck_lock */
static atomic_int twice, stops_of_others;

static sandbox *at(lua_State *L, int index)
{
    lua_Integer n = lua_tointeger(L, index);
    return n >= 1 && n < MOST ? &deck[n] : NULL;
}

static int deck_create(lua_State *L)
{
    PDK_GUARD(deck_lock);
    for (int i = 1; i <= dealt; i++)
        if (deck[i].running && strcmp(deck[i].id, lua_tostring(L, 1)) == 0)
            atomic_fetch_add(&twice, 1); /* two generations of one id */
    sandbox *s = &deck[++dealt];
    *s = (sandbox){ .running = true };
    snprintf(s->id, sizeof s->id, "%s", lua_tostring(L, 1));
    lua_pushinteger(L, dealt);
    return 1;
}

static int deck_find(lua_State *L)
{
    PDK_GUARD(deck_lock);
    for (int i = dealt; i >= 1; i--)
        if (deck[i].running && strcmp(deck[i].id, lua_tostring(L, 1)) == 0) {
            lua_pushinteger(L, i);
            return 1;
        }
    return 0;
}

static int deck_look(lua_State *L) /* running, token */
{
    PDK_GUARD(deck_lock);
    const sandbox *s = at(L, 1);
    lua_pushboolean(L, s != NULL && s->running);
    lua_pushinteger(L, s != NULL ? s->token : 0);
    return 2;
}

static int deck_stop(lua_State *L)
{
    PDK_GUARD(deck_lock);
    sandbox *s = at(L, 1);
    if (s->running && !s->doomed && s->token != 0)
        atomic_fetch_add(&stops_of_others, 1); /* somebody may have it */
    s->stops++;
    s->running = false;
    return 0;
}

/* kind, reason; or nothing */
static int refused(lua_State *L, const sandbox *s, int64_t token)
{
    const char *reason = !s->running ? "connect" : s->doomed ? "doomed" : token < s->token ? "stale_token" : NULL;
    if (reason == NULL)
        return 0;
    lua_pushstring(L, s->running ? "lost" : "backend_error");
    lua_pushstring(L, reason);
    return 2;
}

static int deck_fence(lua_State *L)
{
    PDK_GUARD(deck_lock);
    sandbox *s = at(L, 1);
    int n = refused(L, s, lua_tointeger(L, 2));
    if (n == 0)
        s->token = lua_tointeger(L, 2);
    return n;
}

static int deck_doom(lua_State *L)
{
    PDK_GUARD(deck_lock);
    sandbox *s = at(L, 1);
    int n = s->doomed ? 0 : refused(L, s, INT64_MAX);
    if (n == 0 && !s->doomed && s->token != lua_tointeger(L, 2)) {
        lua_pushstring(L, "lost");
        lua_pushstring(L, "token_mismatch");
        return 2;
    }
    s->doomed |= n == 0;
    return n;
}

static int deck_enter(lua_State *L)
{
    PDK_GUARD(deck_lock);
    sandbox *s = at(L, 1);
    int n = refused(L, s, lua_tointeger(L, 2));
    s->inside += n == 0;
    return n;
}

static int deck_leave(lua_State *L)
{
    PDK_GUARD(deck_lock);
    at(L, 1)->inside--;
    return 0;
}

static int deck_count(lua_State *L)
{
    PDK_GUARD(deck_lock);
    sandbox *s = at(L, 1);
    *(lua_toboolean(L, 2) ? &s->closes : &s->connects) += 1;
    return 0;
}

static const char engine[] =
    "local io, errors = require 'paddock.io', require 'paddock.errors'\n"
    "local function check(kind, reason) if kind then errors.raise(kind, reason, { reason = reason }) end end\n"
    "local function g(info) return math.tointeger(tonumber(info.generation:sub(2))) end\n"
    "local function info(id, n) local _, token = deck.look(n) return { sandbox_id = id, generation = 'g' .. n,\n"
    "  token = token > 0 and token or nil } end\n"
    "local M = { name = 'deck', capabilities = { fenced = true } }\n"
    "function M.create(_, spec) io.sleep(0.001) return info(spec.sandbox_id, deck.create(spec.sandbox_id)) end\n"
    "function M.destroy(_, i) io.sleep(0.001) deck.stop(g(i)) end\n"
    "function M.inspect(_, id, i) local n = i and i.generation and g(i) or deck.find(id)\n"
    "  if n and deck.look(n) then return info(id, n) end end\n"
    "function M.discover(_, id) local n = deck.find(id) if n then return info(id, n) end end\n"
    "function M.alive(_, i) return (deck.look(g(i))) end\n"
    "function M.ready() return true end\n"
    "function M.connect(_, i, opts) local n, token, open = g(i), math.tointeger(opts.token), opts.own\n"
    "  if opts.own then deck.count(n, false) end return {\n"
    "  exec = function(_, req) check(deck.enter(n, token)) io.sleep(0.0005) deck.leave(n)\n"
    "    return { outcome = 'completed', exit_code = 0, stdout = req.command } end,\n"
    "  fence = function(_, t) check(deck.fence(n, math.tointeger(t))) token = math.tointeger(t) end,\n"
    "  doom = function(_, e) check(deck.doom(n, math.tointeger(e))) end,\n"
    "  open_session = function() end, close_session = function() end,\n"
    "  close = function() if open then deck.count(n, true) open = false end end } end\n"
    "return M\n";

static int install(lua_State *L, void *arg)
{
    static const luaL_Reg functions[] = {
        { "create", deck_create }, { "find", deck_find }, { "look", deck_look },   { "stop", deck_stop },   { "fence", deck_fence },
        { "doom", deck_doom },     { "enter", deck_enter }, { "leave", deck_leave }, { "count", deck_count }, { NULL, NULL },
    };
    (void)arg;
    luaL_newlib(L, functions);
    lua_setglobal(L, "deck");
    return 0;
}

static pdk_runtime *open_one(const char *state, const char *more)
{
    char path[300], text[2048];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(path, sizeof path, "%s/deck.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(engine, f) >= 0 && fclose(f) == 0);
    snprintf(text, sizeof text, "return { %s backend = '%s', user = 'u', log = 'off', scope = 'deck', state_dir = '%s/%s' }", more, path,
             test_tmpdir(), state);
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    CHECK_KIND(err, PDK_OK);
    if (rt != NULL)
        CHECK_INT(pdk_script_enter(rt->script, install, NULL, &err), 0);
    return rt;
}

static void new_deck(void)
{
    PDK_GUARD(deck_lock);
    memset(deck, 0, sizeof deck);
    dealt = 0;
    atomic_store(&twice, 0);
    atomic_store(&stops_of_others, 0);
}

static int running(void)
{
    PDK_GUARD(deck_lock);
    int n = 0;
    for (int i = 1; i <= dealt; i++)
        n += deck[i].running;
    return n;
}

/* ---- many that want the same ----------------------------------------------------------------------------------- */

typedef struct taker {
    pdk_runtime *rt;
    int identities, rounds;
    pthread_barrier_t *start;
    int had, told;   /* sandboxes that it had and ran something in; that it was told it has no longer */
} taker;

/* What somebody else's taking it at the same moment may make of an acquire. */
static bool fair(pdk_error_kind kind)
{
    return kind == PDK_E_LOST || kind == PDK_E_BEING_DESTROYED || kind == PDK_E_REPLACEMENT_DEFERRED || kind == PDK_E_BACKEND_ERROR;
}

static void *take(void *arg)
{
    taker *t = arg;
    pthread_barrier_wait(t->start);
    for (int round = 0; round < t->rounds; round++)
        for (int i = 0; i < t->identities; i++) {
            PDK_AUTO_ERROR err = PDK_NO_ERROR;
            char thread[16];
            pdk_box *box;
            pdk_result result;
            snprintf(thread, sizeof thread, "t%d", i);
            int rc = pdk_acquire(t->rt, &(pdk_request){ .thread = thread }, &box, &err);
            for (int again = 0; rc < 0 && fair(err.kind) && again < 50; again++) {
                t->told++;
                pdk_error_clear(&err);
                usleep(500);
                rc = pdk_acquire(t->rt, &(pdk_request){ .thread = thread }, &box, &err);
            }
            if (!CHECK_INT(rc, 0)) {
                fprintf(stderr, "%s: %s\n", pdk_error_kind_name(err.kind), err.message);
                continue;
            }
            if (pdk_exec(box, &(pdk_command){ .command = "x" }, &result, &err) == 0)
                t->had++;
            else if (CHECK(err.kind == PDK_E_LOST))
                t->told++;
            pdk_result_free(&result);
            pdk_box_free(box);
        }
    return NULL;
}

static void contend(int identities, int takers, int rounds)
{
    new_deck();
    pdk_runtime *rts[2] = { open_one("claims", "replicas = 1000,"), open_one("claims", "replicas = 1000,") };
    REQUIRE(rts[0] != NULL && rts[1] != NULL);
    for (int i = 0; i < identities; i++) { /* parked by the first */
        char thread[16];
        snprintf(thread, sizeof thread, "t%d", i);
        pdk_box_free(world_acquire(rts[0], thread, "first"));
    }
    CHECK_INT(running(), identities);
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, (unsigned)takers);
    taker t[50];
    pdk_thread threads[50];
    for (int i = 0; i < takers; i++) {
        t[i] = (taker){ .rt = rts[i % 2], .identities = identities, .rounds = rounds, .start = &start };
        CHECK_INT(pdk_thread_start(&threads[i], "taker", take, &t[i]), 0);
    }
    int had = 0, told = 0;
    for (int i = 0; i < takers; i++) {
        pdk_thread_join(&threads[i]);
        had += t[i].had;
        told += t[i].told;
    }
    CHECK_INT(running(), identities); /* each is there once, and none was stopped */
    CHECK_INT(dealt, identities);
    CHECK_INT(atomic_load(&twice), 0);
    CHECK_INT(had + told >= takers, true);
    pthread_barrier_destroy(&start);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    for (int i = 0; i < 2; i++) {
        if (!CHECK_INT(pdk_shutdown(rts[i], &err), 0))
            fprintf(stderr, "%s\n", err.message);
        pdk_free(rts[i]);
    }
    CHECK_INT(running(), 0);
    CHECK_INT(atomic_load(&stops_of_others), 0);
    for (int i = 1; i <= dealt; i++)
        CHECK_INT(deck[i].connects, deck[i].closes);
}

TEST("two runtimes reclaim one parked sandbox 50 times at once: one generation, one owner at a time, the others are told [B048, B010]")
{
    contend(1, 50, 2);
}

TEST("two runtimes reclaim 50 parked sandboxes at once: each has one owner, none is made twice or stopped [B048, B010]")
{
    contend(50, 4, 2);
}

/* ---- many that want it gone ------------------------------------------------------------------------------------ */

static pthread_barrier_t together;
static pdk_runtime *victim_of;
static pdk_box *victim;
static char victim_id[64];

static void *vanish(void *arg)
{
    (void)arg;
    pthread_barrier_wait(&together);
    pdk_box_free(victim);
    return NULL;
}

static void *destroy_it(void *arg)
{
    (void)arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pthread_barrier_wait(&together);
    pdk_destroy(victim_of, victim_id, &err);
    return NULL;
}

static void *sweep(void *arg)
{
    (void)arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pthread_barrier_wait(&together);
    pdk_tick(victim_of, &err);
    return NULL;
}

static void *shut(void *arg)
{
    (void)arg;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pthread_barrier_wait(&together);
    CHECK_INT(pdk_shutdown(victim_of, &err), 0);
    return NULL;
}

TEST("its holder vanishes while a destroy, a sweep and a shutdown take it down at once: one stop, one close [B038]")
{
    void *(*const ways[])(void *) = { vanish, destroy_it, sweep, shut };
    enum { WAYS = sizeof ways / sizeof *ways };
    for (int round = 0; round < 30; round++) {
        new_deck();
        victim_of = open_one("vanish", "idle_timeout = 0.001, reap_interval = 0.001,");
        REQUIRE(victim_of != NULL);
        victim = world_acquire(victim_of, "t", round % 2 == 0 ? "h" : NULL);
        REQUIRE(victim != NULL);
        snprintf(victim_id, sizeof victim_id, "%s", pdk_box_id(victim));
        pdk_thread threads[WAYS];
        pthread_barrier_init(&together, NULL, WAYS);
        for (int i = 0; i < WAYS; i++)
            CHECK_INT(pdk_thread_start(&threads[i], "way", ways[i], NULL), 0);
        for (int i = 0; i < WAYS; i++)
            pdk_thread_join(&threads[i]);
        pthread_barrier_destroy(&together);
        pdk_free(victim_of);
        CHECK_INT(running(), 0);
        CHECK_INT(deck[1].stops, 1);
        CHECK_INT(deck[1].connects, deck[1].closes);
        CHECK_INT(atomic_load(&stops_of_others), 0);
    }
}

TEST("a shutdown right after a renewal does not wait for the next one, whatever the period [B190]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    new_deck();
    pdk_runtime *rt = open_one("period", "ownership = { type = 'file', ttl = 3600, renew_interval = 1200 }, reap_interval = 1200,");
    REQUIRE(rt != NULL);
    pdk_box *box = world_acquire(rt, "t", "h");
    CHECK_INT(pdk_renew(rt, &err), 0);
    double before = test_now();
    pdk_box_free(box);
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    CHECK(test_now() - before < 20); /* a hundredth of the period, however slow the machine */
    CHECK_KIND(err, PDK_OK);
    pdk_free(rt);
    CHECK_INT(running(), 0);
}

TEST_MAIN
