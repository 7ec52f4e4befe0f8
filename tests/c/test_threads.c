/* test_threads.c -- everything at once: threads that acquire, run, release, park, destroy, look and reload over a few identities,
 * on an engine that now and then fails, and a shutdown in the middle of it. Meant for ThreadSanitizer and AddressSanitizer, but
 * what must hold at the end holds in every build. */
#include "world.h"

enum { THREADS = 8, SLOTS = 12, IDENTITIES = 5 };
#define STRESS_SECONDS 2.5

/* The engine keeps count of what it made and of its clients; `tally` is what the test reads at the end. */
static const char engine[] =
    "local io = require 'paddock.io'\n"
    "local live, n, clients = {}, 0, 0\n"
    "tally = { made = 0, gone = 0, connects = 0, closes = 0, twice = 0 }\n"
    "local function some(most) io.sleep(math.random() * most) end\n"
    "local function one_in(k, what) if not calm and math.random(k) == 1 then error(what .. ' failed', 0) end end\n"
    "local function find(id) for _, i in pairs(live) do if i.sandbox_id == id then return i end end end\n"
    "local M = { name = 'stress', capabilities = { fenced = false } }\n"
    "function M.create(_, spec) some(0.005) one_in(40, 'create') n = n + 1\n" /* from here on it cannot fail any more */
    "  local i = { sandbox_id = spec.sandbox_id, generation = 'g' .. n, identity = spec.identity }\n"
    "  live[i.generation] = i tally.made = tally.made + 1 return i end\n"
    "function M.destroy(_, info) some(0.003) one_in(15, 'destroy')\n"
    "  if live[info.generation] then live[info.generation] = nil tally.gone = tally.gone + 1 end some(0.002) end\n"
    "function M.inspect(_, id, info) one_in(80, 'inspect') if info then return live[info.generation] end return find(id) end\n"
    "function M.discover(_, id) some(0.001) return find(id) end\n"
    "function M.alive(_, info) one_in(60, 'alive') return live[info.generation] ~= nil and math.random(30) > 1 end\n"
    "function M.ready() return math.random(40) > 1 end\n"
    "function M.list() local all = {} for _, i in pairs(live) do all[#all + 1] = i end return all end\n"
    "function M.finish() one_in(60, 'finish') end\n"
    "function M.connect() one_in(60, 'connect') local open = true\n"
    "  tally.connects = tally.connects + 1 return {\n"
    "  exec = function(_, req) some(0.004) one_in(50, 'exec')\n"
    "    return { outcome = 'completed', exit_code = 0, stdout = req.command } end,\n"
    "  open_session = function() some(0.002) one_in(30, 'open_session') end,\n"
    "  close_session = function() end,\n"
    "  write = function() some(0.001) end,\n"
    "  read = function() some(0.001) return 'text' end,\n"
    "  close = function() if not open then tally.twice = tally.twice + 1 end open = false\n"
    "    tally.closes = tally.closes + 1 some(0.001) one_in(20, 'close') end } end\n"
    "return M\n";

typedef struct slot { /* a box that several threads use at once */
    pdk_mutex lock;
    pdk_box *box;         /* lock */
    int users;            /* lock */
} slot;

static slot slots[SLOTS];
static pdk_runtime *rt;
static atomic_int acquired, ran, refused, surprises, events_made, events_gone;
static atomic_bool over;

static void listen_in(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    const char *event = pdk_view_str(pdk_view_get(pdk_view_of(record), "event"), NULL);
    if (event != NULL && strcmp(event, "created") == 0)
        atomic_fetch_add(&events_made, 1);
    if (event != NULL && strcmp(event, "destroyed") == 0)
        atomic_fetch_add(&events_gone, 1);
}

/* What a call may answer while others do their worst; anything else is a surprise. */
static void expect_error(const char *what, const pdk_error *err)
{
    static const pdk_error_kind fair[] = { PDK_E_BEING_DESTROYED, PDK_E_REPLACEMENT_DEFERRED, PDK_E_QUARANTINED, PDK_E_LOST,
                                           PDK_E_TIMEOUT, PDK_E_CLOSED, PDK_E_BACKEND_ERROR, PDK_E_UNREADY, PDK_E_UNVERIFIED,
                                           PDK_E_CAPACITY_EXHAUSTED,
                                           PDK_E_INVALID_ARGUMENT /* a holder that is bound to another identity */ };
    if (err->kind == PDK_E_CLOSED && strstr(err->message, "box") == NULL)
        atomic_store(&over, true);
    atomic_fetch_add(&refused, 1);
    for (size_t i = 0; i < sizeof fair / sizeof *fair; i++)
        if (err->kind == fair[i])
            return;
    if (atomic_fetch_add(&surprises, 1) < 5)
        fprintf(stderr, "  %s: %s: %s\n", what, pdk_error_kind_name(err->kind), err->message);
}

static pdk_box *borrow(slot *s)
{
    PDK_GUARD(s->lock);
    if (s->box != NULL)
        s->users++;
    return s->box;
}

static void give_back(slot *s)
{
    PDK_GUARD(s->lock);
    s->users--;
}

/* The box, when nobody else uses it. */
static pdk_box *take_out(slot *s)
{
    PDK_GUARD(s->lock);
    pdk_box *box = s->users == 0 ? s->box : NULL;
    if (box != NULL)
        s->box = NULL;
    return box;
}

static pdk_box *put_in(slot *s, pdk_box *box)
{
    PDK_GUARD(s->lock);
    pdk_box *rest = s->box != NULL ? box : NULL;
    if (rest == NULL)
        s->box = box;
    return rest;
}

static void acquire_some(slot *s, unsigned *seed)
{
    static const char *const threads[IDENTITIES] = { "a", "b", "c", "d", "e" };
    static const char *const holders[] = { "h1", "h2", "h3", NULL, NULL, NULL };
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_request req = { .thread = threads[rand_r(seed) % IDENTITIES], .holder = holders[rand_r(seed) % 6], .timeout = 2 };
    req.no_holder = req.holder == NULL && rand_r(seed) % 4 == 0;
    pdk_box *box = NULL;
    if (pdk_acquire(rt, &req, &box, &err) == 0) {
        atomic_fetch_add(&acquired, 1);
        pdk_box_free(put_in(s, box));
    } else {
        expect_error("acquire", &err);
    }
}

static void use_some(slot *s, unsigned *seed)
{
    static const char *const scopes[] = { NULL, NULL, "x", "y" };
    pdk_box *box = borrow(s);
    if (box == NULL)
        return;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_command cmd = { .command = "true", .scope = scopes[rand_r(seed) % 4] };
    pdk_result r;
    char *text = NULL;
    size_t len;
    int rc;
    switch (rand_r(seed) % 6) {
    case 0: rc = pdk_write(box, "/f", "x", 1, &err); break;
    case 1:
        rc = pdk_read(box, "/f", &text, &len, &err);
        free(text);
        break;
    case 2: rc = pdk_release(box, &err); break;
    default:
        rc = pdk_exec(box, &cmd, &r, &err);
        if (rc == 0)
            pdk_result_free(&r);
    }
    if (rc < 0)
        expect_error("use", &err);
    else
        atomic_fetch_add(&ran, 1);
    give_back(s);
}

/* By the id of a box that may be gone by then. */
static void meddle(slot *s, unsigned *seed)
{
    char id[64] = "none";
    pdk_box *box = borrow(s), *got = NULL;
    if (box != NULL) {
        snprintf(id, sizeof id, "%s", pdk_box_id(box));
        give_back(s);
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK out = PDK_NO_PACK;
    char bound[64];
    int rc = 0;
    switch (rand_r(seed) % 12) {
    case 0:
    case 1: rc = pdk_destroy(rt, id, &err); break;
    case 2: rc = pdk_runtime_get(rt, id, NULL, &got, &err); break;
    case 3: rc = pdk_runtime_inspect(rt, id, NULL, &out, &err); break;
    case 4: rc = pdk_runtime_list(rt, &out, &err); break;
    case 5: rc = pdk_runtime_stats(rt, &out, &err); break;
    case 6: rc = pdk_runtime_park(rt, id, &err); break;
    case 7: rc = pdk_runtime_release(rt, "h1", &err); break;
    case 8: rc = pdk_runtime_retain(rt, id, "h2", NULL, rand_r(seed) % 2 == 0, &err); break;
    case 9: rc = pdk_runtime_binding(rt, "h3", bound, &err); break;
    case 10: rc = pdk_runtime_reconcile(rt, &err); break;
    default: rc = rand_r(seed) % 8 == 0 ? pdk_reload(rt, &err) : pdk_tick(rt, &err); break;
    }
    pdk_box_free(got);
    if (rc < 0)
        expect_error("meddle", &err);
}

static void *work(void *arg)
{
    unsigned seed = *(unsigned *)arg;
    while (!atomic_load(&over)) {
        slot *s = &slots[rand_r(&seed) % SLOTS];
        unsigned what = (unsigned)rand_r(&seed) % 10;
        if (what < 3)
            acquire_some(s, &seed);
        else if (what < 7)
            use_some(s, &seed);
        else if (what < 9)
            meddle(s, &seed);
        else
            pdk_box_free(take_out(s));
    }
    return NULL;
}

static int set_calm(lua_State *L, void *arg)
{
    (void)arg;
    lua_pushboolean(L, true);
    lua_setglobal(L, "calm");
    return 0;
}

typedef struct tally {
    lua_Integer made, gone, connects, closes, twice;
} tally;

static int read_tally(lua_State *L, void *arg)
{
    tally *t = arg;
    const struct { const char *name; lua_Integer *out; } fields[] = {
        { "made", &t->made },     { "gone", &t->gone },   { "connects", &t->connects },
        { "closes", &t->closes }, { "twice", &t->twice },
    };
    lua_getglobal(L, "tally");
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        lua_getfield(L, -1, fields[i].name);
        *fields[i].out = lua_tointeger(L, -1);
        lua_pop(L, 1);
    }
    return 0;
}

static pdk_runtime *open_stress(const char *more)
{
    char path[300], text[2048];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(path, sizeof path, "%s/stress.lua", test_tmpdir());
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL && fputs(engine, f) >= 0 && fclose(f) == 0))
        exit(1);
    snprintf(text, sizeof text,
             "return { %s backend = '%s', user = 'u', health_ttl = 0, log = function() end, state_dir = '%s/state', orphan_ttl = 1,"
             " stop_timeout = 5, ready_timeout = 0.05, ready_interval = 0.01 }",
             more, path, test_tmpdir());
    pdk_runtime *opened = pdk_open_text(text, "stress.lua", &err);
    if (!CHECK(opened != NULL)) {
        fprintf(stderr, "%s\n", err.message);
        exit(1);
    }
    return opened;
}

/* Shuts down as often as the engine's whims demand; how often it took. */
static int shut_down_at_last(void)
{
    for (int i = 1; i <= 200; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_shutdown(rt, &err) == 0)
            return i;
        if (i == 20) /* an engine that fails for ever is another test's */
            pdk_script_enter(rt->script, set_calm, NULL, NULL);
        if (i == 200)
            fprintf(stderr, "  shutdown: %s: %s\n", pdk_error_kind_name(err.kind), err.message);
    }
    return -1;
}

static void stress(const char *more)
{
    pdk_thread threads[THREADS];
    unsigned seeds[THREADS];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    rt = open_stress(more);
    atomic_store(&over, false);
    atomic_store(&events_made, 0);
    atomic_store(&events_gone, 0);
    CHECK_INT(pdk_runtime_on(rt, listen_in, NULL, &err), 0);
    for (int i = 0; i < SLOTS; i++)
        pdk_mutex_init(&slots[i].lock);
    for (int i = 0; i < THREADS; i++) {
        seeds[i] = (unsigned)(i + 1) * 7919;
        CHECK_INT(pdk_thread_start(&threads[i], "stress", work, &seeds[i]), 0);
    }
    pdk_sleep_ns((pdk_ns)(STRESS_SECONDS * 1e9));
    CHECK(!atomic_load(&over));
    CHECK(shut_down_at_last() > 0);
    for (int i = 0; i < THREADS; i++)
        pdk_thread_join(&threads[i]);
    for (int i = 0; i < SLOTS; i++) {
        pdk_box_free(slots[i].box);
        slots[i].box = NULL;
        pdk_mutex_destroy(&slots[i].lock);
    }
    {
        PDK_GUARD(rt->pool.registry);
        CHECK_INT((int)rt->pool.ids.count, 0);
        CHECK_INT((int)rt->pool.holders.count, 0);
        CHECK_INT((int)rt->pool.creating, 0);
        pdk_pool_check(&rt->pool);
    }
    CHECK_INT((int)pdk_serial_keys(rt->serial), 0);
    tally t = { 0 };
    CHECK_INT(pdk_script_enter(rt->script, read_tally, &t, &err), 0);
    CHECK(t.made > 0 && t.connects > 0);
    CHECK_INT((int)t.gone, (int)t.made);       /* no container is left */
    CHECK_INT((int)t.closes, (int)t.connects); /* each client was closed, */
    CHECK_INT((int)t.twice, 0);                /* and once */
    CHECK_INT(atomic_load(&events_made), (int)t.made);
    CHECK_INT(atomic_load(&surprises), 0);
    CHECK(atomic_load(&acquired) > 100 && atomic_load(&ran) > 100);
    pdk_free(rt);
}

TEST("threads that do everything at once, and a shutdown in the middle: nothing stays, no client is closed twice [P1, P5]")
{
    stress("reap_interval = 0.02, ownership = { type = 'memory', ttl = 60, renew_interval = 0.02 },");
}

TEST("the same where idle ones expire at once and there is room for three")
{
    stress("reap_interval = 0.02, idle_timeout = 0.01, replicas = 2, max_sandboxes = 3,"
           "ownership = { type = 'memory', ttl = 60, renew_interval = 0.02 },");
}

TEST_MAIN
