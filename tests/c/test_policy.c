/* Policies: what an operator's script may do, every way in which a call can go wrong, and what the core makes of it. */
#include "policy_world.h"

#include <locale.h>

/* ---- the defaults ---- */

TEST("the default identity policy gives the vectors of the contract [C1]")
{
    static const char *const vectors[][3] = {
        { "u-1", "t-1", "dcd520660fa816954f7fe6cb0d3b9220" },
        { "alice", "thread-1", "5f520be8674edf7129a342d712c24367" },
        { "a:b", "c", "1c2de18a3ef3c0cdcce3495f7903aff9" },
        { "a", "b:c", "804536b63b049b4dcd2bcfedd2982e9b" },
    };
    world w = world_default();
    for (int round = 0; round < 2; round++) /* asked, then from the cache */
        for (size_t i = 0; i < 4; i++) {
            CHECK_INT(derive(&w, vectors[i][0], vectors[i][1]), 0);
            CHECK_STR(w.id, vectors[i][2]);
        }
    CHECK_INT(pdk_policies_reload(w.p, &w.err), 0);
    CHECK_INT(derive(&w, "u-1", "t-1"), 0);
    CHECK_STR(w.id, vectors[0][2]);
    world_close(&w);
}

TEST("user and thread may hold any bytes and be long, and no two identities meet")
{
    world w = world_default();
    char ids[4][64];
    static char big[4097];
    memset(big, 'x', 4096);
    pdk_identity all[4] = {
        { "a\0b", "c", 3, 1 }, { "a", "\0bc", 1, 3 }, { "\xff\n/../", "", 6, 0 }, { big, big, 4096, 4096 }
    };
    for (int i = 0; i < 4; i++) {
        CHECK_INT(pdk_policy_derive(w.p, &all[i], PDK_NO_VIEW, ids[i], &w.err), 0);
        for (int j = 0; j < i; j++)
            CHECK(strcmp(ids[i], ids[j]) != 0);
    }
    world_close(&w);
}

TEST("ten thousand identities go through the cache, long ones too, and its bytes stay bounded")
{
    world w = world_default();
    char user[32], first[64];
    static char thread[4096];
    memset(thread, 't', sizeof thread);
    CHECK_INT(derive(&w, "user-0", "t"), 0);
    memcpy(first, w.id, sizeof first);
    for (int i = 0; i < 5000; i++) {
        char id[64];
        snprintf(user, sizeof user, "user-%d", i);
        for (size_t n = 512; n <= (i % 64 == 0 ? 4096 : 512); n *= 8) { /* short enough to be kept, and not */
            pdk_identity who = { user, thread, strlen(user), n };
            CHECK_INT(pdk_policy_derive(w.p, &who, PDK_NO_VIEW, id, &w.err), 0);
        }
        CHECK(pdk_policies_remembered(w.p) <= PDK_REMEMBERED_MAX);
    }
    size_t full = pdk_policies_remembered(w.p);
    CHECK(full > 2000 * 512); /* it does keep them */
    for (int i = 0; i < 10000; i++) {
        snprintf(user, sizeof user, "user-%d", i);
        if (derive(&w, user, "t") < 0) {
            CHECK_KIND(w.err, PDK_OK);
            break;
        }
    }
    CHECK(pdk_policies_remembered(w.p) < full); /* a shorter key gives back what the longer one took */
    CHECK_INT(derive(&w, "user-0", "t"), 0);
    CHECK_STR(w.id, first);
    world_close(&w);
}

TEST("the default requirements take from a request what it names, and the rest from the runtime")
{
    world w = world_default();
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(resolve(&w, "{ image = 'x:1', env = { A = '2' }, require = { broker = true } }",
                      "{ image = 'base', environment = { A = '1', B = '1' }, limits = { pids = 64 }, network = 'host' }",
                      &out),
              0);
    CHECK_KIND(w.err, PDK_OK);
    CHECK_STR(field(&out, "image"), "x:1");
    CHECK_STR(field(&out, "network"), "host");
    pdk_view env = pdk_view_get(pdk_view_of(&out), "env");
    CHECK_STR(pdk_view_str(pdk_view_get(env, "A"), NULL), "2");
    CHECK_STR(pdk_view_str(pdk_view_get(env, "B"), NULL), "1");
    int64_t pids = 0;
    CHECK(pdk_view_int(pdk_view_get(pdk_view_get(pdk_view_of(&out), "limits"), "pids"), &pids));
    CHECK_INT(pids, 64);
    CHECK(pdk_view_bool(pdk_view_get(pdk_view_get(pdk_view_of(&out), "require"), "broker"), false));
    size_t before = out.len;
    CHECK_INT(resolve(&w, "{ imagee = 'x:1' }", "{}", &out), -1);
    CHECK_KIND(w.err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(w.err.message, "requirements.imagee is unknown");
    CHECK_INT(out.len, before);
    pdk_pack_reset(&out);
    CHECK_INT(resolve(&w, "nil", "nil", &out), 0);
    CHECK_STR(field(&out, "network"), "none");
    CHECK_STR(field(&out, "image"), "(none)");
    world_close(&w);
}

TEST("the default reuse policy replaces what differs, probes what is unknown, and refuses what nobody vouches for [I1, I13]")
{
    world w = world_default();
    CHECK_INT(decide(&w, "{ source = 'active', requirements = { image = 'a' }, attestation = { image = 'a' } }"), 0);
    CHECK_INT(w.verdict.decision, PDK_REUSE);
    CHECK_STR(w.verdict.code, "");
    CHECK_INT(decide(&w, "{ requirements = { network = 'none' }, attestation = { network = 'open' } }"), 0);
    CHECK_INT(w.verdict.decision, PDK_REPLACE);
    CHECK_STR(w.verdict.code, "network_differs");
    CHECK_INT(decide(&w, "{ requirements = { require = { broker = true } } }"), 0);
    CHECK_INT(w.verdict.decision, PDK_PROBE);
    CHECK_INT(decide(&w, "{ requirements = { require = { broker = true } }, capability = {} }"), 0);
    CHECK_INT(w.verdict.decision, PDK_REFUSE);
    CHECK_STR(w.verdict.code, "unattested");
    CHECK_INT(decide(&w, "{ requirements = { require = { broker = true } }, attestation = { broker = false } }"), 0);
    CHECK_INT(w.verdict.decision, PDK_REPLACE);
    CHECK_INT(decide(&w, "{}"), 0);
    CHECK_INT(w.verdict.decision, PDK_REUSE);
    world_close(&w);
}

TEST("ctx.differs says what is required and not known to hold")
{
    world w = world_with("reuse", "return { decide = function(ctx)\n"
                                  "  local all = {}\n"
                                  "  for key, how in pairs(ctx.differs or {}) do all[#all + 1] = key .. '=' .. how end\n"
                                  "  table.sort(all)\n"
                                  "  return 'reuse', nil, ctx.differs and table.concat(all, ' ') or 'none'\n"
                                  "end }");
    static const char *const cases[][2] = {
        { "{}", "none" },
        { "{ requirements = { image = 'a', network = 'none', require = {} } }", "none" },
        { "{ requirements = { image = 'a', require = { n = 1, t = true } }, attestation = { image = 'a', n = 1.0, t = true "
          "} }",
          "none" },
        { "{ requirements = { image = 'a', network = 'none' }, attestation = { image = 'b', network = 'open' } }",
          "image=differs network=differs" },
        { "{ requirements = { require = { n = 1, m = 2, k = 3 } }, attestation = { n = 2 }, capability = { m = 2 } }",
          "k=unattested n=differs" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_INT(decide(&w, cases[i][0]), 0);
        CHECK_STR(w.verdict.message, cases[i][1]);
    }
    world_close(&w);
}

/* Counts its calls: the count is the label n of its answer. */
#define COUNTING(first, body) "local n = 0 return { " first " resolve = function(ctx) n = n + 1 " body " return { labels = { n = tostring(n) } } end }"

/* The label n that resolve answers for a request over a base. */
static int count_of(world *w, const char *request, const char *base)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    if (!CHECK_INT(resolve(w, request, base, &out), 0))
        return -1;
    return atoi(pdk_view_str(pdk_view_get(pdk_view_get(pdk_view_of(&out), "labels"), "n"), NULL));
}

TEST("an answer of a file that says it is pure is kept, under what its function has looked at and the configured base")
{
    world w = world_with("requirements", COUNTING("pure = true,", "local _ = ctx.request.image"));
    CHECK_INT(count_of(&w, "{ image = 'a' }", "{}"), 1);
    CHECK_INT(count_of(&w, "{ image = 'a' }", "{}"), 1);
    CHECK_INT(count_of(&w, "{ image = 'b' }", "{}"), 2);
    CHECK_INT(count_of(&w, "{ image = 'a' }", "{ network = 'x' }"), 3);
    CHECK_INT(count_of(&w, "{ image = 'a' }", "{}"), 1);
    CHECK_INT(pdk_policies_reload(w.p, &w.err), 0);
    CHECK_INT(count_of(&w, "{ image = 'b' }", "{}"), 1); /* of the new set, whose count has begun anew */
    world_close(&w);
}

TEST("what a function looks at later makes its kept answers more exact; a failure is never kept")
{
    world w = world_with("requirements", COUNTING("pure = true,",
        "if ctx.request.who then local _ = ctx.user end if ctx.request.fail then error('no') end"));
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(count_of(&w, "{}", "{}"), 1);
    CHECK_INT(count_of(&w, "{ who = true }", "{}"), 2); /* from here on user is part of every key */
    CHECK_INT(count_of(&w, "{}", "{}"), 3);
    CHECK_INT(count_of(&w, "{}", "{}"), 3);
    for (int i = 0; i < 2; i++)
        CHECK_INT(resolve(&w, "{ fail = true }", "{}", &out), -1);
    CHECK_INT(count_of(&w, "{ image = 'x' }", "{}"), 6);
    world_close(&w);
}

TEST("nothing is kept of a file that does not say it is pure, of one that looks at the time or at all of ctx, or that logs")
{
    static const char *const texts[] = {
        COUNTING("", ""), COUNTING("pure = false,", ""), COUNTING("pure = true,", "local _ = ctx.now.hour"),
        COUNTING("pure = true,", "for _ in pairs(ctx) do end"), COUNTING("pure = true,", "local _ = next(ctx)"),
        COUNTING("pure = true,", "local _ = ctx.unheard_of"), COUNTING("pure = true,", "policy.log('x')"),
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        world w = world_with("requirements", texts[i]);
        for (int n = 1; n <= 3; n++)
            CHECK_INT(count_of(&w, "{}", "{}"), n);
        world_close(&w);
    }
    world w = world_with("requirements", "return { pure = 'yes', resolve = function() return {} end }");
    CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
    CHECK_HAS(w.err.message, "'pure' must be true or false, not string");
    world_close(&w);
}

/* The code of reuse.decide's answer, which says how often it was called. */
static const char *reuse_code(world *w, const char *info, const char *requirements, const char *capability, int holders)
{
    PDK_AUTO_PACK i = PDK_NO_PACK, r = PDK_NO_PACK, c = PDK_NO_PACK;
    pdk_identity me = who("u", "t");
    pack_lua(&i, info);
    pack_lua(&r, requirements);
    if (capability != NULL)
        pack_lua(&c, capability);
    pdk_reuse_facts facts = { .source = "warm", .expected_id = "x", .info = pdk_view_of(&i), .requirements = pdk_view_of(&r),
                              .capability = pdk_view_of(&c), .who = &me, .holders = holders, .idle_seconds = 1 };
    pdk_error_clear(&w->err);
    CHECK_INT(pdk_policy_reuse(w->p, &facts, &w->verdict, &w->err), 0);
    return w->verdict.code;
}

TEST("a pure decision is kept under what differs, not under all of what is compared, and under each other fact that it looks at")
{
    world w = world_with("reuse", "local n = 0 return { pure = true, decide = function(ctx) n = n + 1 "
                                  "if ctx.differs then return 'replace', tostring(n) end return 'reuse', tostring(n) end }");
    CHECK_STR(reuse_code(&w, "{ sandbox_id = 'x' }", "{ image = 'a' }", NULL, 0), "1");
    CHECK_STR(reuse_code(&w, "{ sandbox_id = 'y', attestation = { image = 'a' } }", "{ image = 'a' }", NULL, 1), "1");
    CHECK_STR(reuse_code(&w, "{ attestation = { image = 'b' } }", "{ image = 'a' }", NULL, 0), "2");
    CHECK_INT(w.verdict.decision, PDK_REPLACE);
    CHECK_STR(reuse_code(&w, "{ attestation = {} }", "{ require = { gpu = true } }", NULL, 0), "3");
    CHECK_STR(reuse_code(&w, "{ attestation = {} }", "{ require = { gpu = true } }", "{ gpu = true }", 0), "1");
    CHECK_INT(w.verdict.decision, PDK_REUSE);
    world_close(&w);
    w = world_with("reuse", "local n = 0 return { pure = true, decide = function(ctx) n = n + 1 "
                            "return ctx.holders > 0 and 'defer' or 'reuse', tostring(n) end }");
    CHECK_STR(reuse_code(&w, "{}", "{}", NULL, 0), "1");
    CHECK_STR(reuse_code(&w, "{}", "{}", NULL, 2), "2");
    CHECK_INT(w.verdict.decision, PDK_DEFER);
    CHECK_STR(reuse_code(&w, "{}", "{}", NULL, 0), "1");
    world_close(&w);
}

TEST("the other defaults: no mounts, the configured idle limit, the oldest goes first, the network is denied")
{
    world w = world_default();
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    PDK_AUTO_PACK list = PDK_NO_PACK;
    PDK_AUTO_PACK mounts = PDK_NO_PACK;
    double seconds = 0;
    char id[64];
    pdk_net_decision net = PDK_NET_ALLOW;
    pack_lua(&ctx, "{ sandbox_id = 's', state = 'warm', host = 'h', port = 1 }");
    pack_lua(&list, "{ { sandbox_id = 'old', idle_seconds = 9 }, { sandbox_id = 'new', idle_seconds = 1 } }");
    CHECK_INT(compose(&w, &mounts), 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&mounts)), 0);
    CHECK(pdk_view_tag(pdk_view_of(&mounts)) == '[');
    CHECK_INT(pdk_policy_idle_timeout(w.p, pdk_view_of(&ctx), &seconds, &w.err), 0);
    CHECK_NUM(seconds, 600, 0);
    CHECK_INT(pdk_policy_evict(w.p, pdk_view_of(&list), id, &w.err), 0);
    CHECK_STR(id, "old");
    CHECK_INT(pdk_policy_network(w.p, pdk_view_of(&ctx), &net, &w.err), 0);
    CHECK_INT(net, PDK_NET_DENY);
    world_close(&w);
}

TEST("a set without idle_timeout and evict has the configured limit and the oldest")
{
    world w = world_with("reuse", "return { decide = function() return 'reuse' end }");
    PDK_AUTO_PACK list = PDK_NO_PACK;
    double seconds = 0;
    char id[64];
    pack_lua(&list, "{ { sandbox_id = 'old' }, { sandbox_id = 'new' } }");
    CHECK_INT(pdk_policy_idle_timeout(w.p, PDK_NO_VIEW, &seconds, &w.err), 0);
    CHECK_NUM(seconds, 600, 0);
    CHECK_INT(pdk_policy_evict(w.p, pdk_view_of(&list), id, &w.err), 0);
    CHECK_STR(id, "old");
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(pdk_policies_describe(w.p, &out, &w.err), 0);
    CHECK_INT(pdk_view_count(pdk_view_of(&out)), 5);
    world_close(&w);
}

/* ---- every way a call can go wrong ---- */

static bool over_budget(const pdk_error *err)
{
    return strcmp(err->reason, "instructions") == 0 || strcmp(err->reason, "time") == 0 ||
           strcmp(err->reason, "memory") == 0;
}

typedef struct failing {
    const char *body;    /* of derive, from line 2 on */
    const char *message; /* what the error says */
    const char *reason;
} failing;

static const failing calls[] = {
    { "local x = nil; return x.y", "bad.lua:2: derive: attempt to index a nil value (local 'x')", "raised" },
    { "return ctx.nothing.more", "bad.lua:2: derive: attempt to index a nil value (field 'nothing')", "raised" },
    { "error('plain')", "bad.lua:2: derive: plain", "raised" },
    { "error('without place', 0)", "bad.lua:2: derive: without place", "raised" },
    { "error({ code = 1 })", "bad.lua:2: derive: raised an error that is a table", "raised" },
    { "error()", "bad.lua:2: derive: raised an error that is a nil", "raised" },
    { "error(setmetatable)", "bad.lua:2: derive: raised an error that is a nil", "raised" },
    { "\nassert(false, 'asserted')", "bad.lua:3: derive: asserted", "raised" },
    { "while true do end", "bad.lua:2: derive: ", "budget" },
    { "local function f() return f() end f()", "bad.lua:2: derive: ", "budget" },
    { "local function f() return f() + 1 end f()", "bad.lua:2: derive: ", "budget" },
    { "while true do pcall(function() while true do end end) end", "bad.lua:2: derive: ", "budget" },
    { "while true do xpcall(function() while true do end end, function() while true do end end) end",
      "bad.lua:2: derive: ", "budget" },
    { "pcall(function() while true do end end) return 'survived'", "bad.lua:2: derive: ", "budget" },
    { "local function f() pcall(f) return f() end f() return 'x'", "bad.lua:2: derive: ", NULL },
    { "repeat local ok = pcall(error) until false", "bad.lua:2: derive: ", "budget" },
    { "local t = {} for i = 1, 1e9 do t[i] = { i } end", "bad.lua:2: derive: ", "budget" },
    { "local s = 'x' while true do s = s .. s end", "bad.lua:2: derive: ", "budget" },
    { "return ('x'):rep(1e10)", "bad.lua:2: derive: ", "budget" },
    { "pcall(string.rep, 'x', 1e9) return 'survived'", "bad.lua:2: derive: ", "budget" },
    { "local t = {} while true do pcall(function() t[#t + 1] = ('x'):rep(1000000) .. #t end) end",
      "bad.lua:2: derive: ", NULL },
    { "local t = {} for i = 1, 200 do t[i] = 'x' end while true do local s = table.concat(t, ('y'):rep(1000)) end",
      "bad.lua:2: derive: ", NULL },
    { "return ('a'):rep(30000):find(('a?'):rep(10000) .. 'b')", "derive: pattern too complex", "raised" },
    { "return ('a'):rep(100):find(('a*'):rep(30) .. 'b')", "bad.lua:2: derive: ", "budget" },
    { "return string.find(('a'):rep(100), ('a-'):rep(30) .. 'b')", "bad.lua:2: derive: ", "budget" },
    { "return ('x'):rep(200000):gsub('.-.-.-.-.-y', '')", "bad.lua:2: derive: ", NULL },
    { "for m in ('a'):rep(500):gmatch(('.-'):rep(15) .. 'b') do end", "bad.lua:2: derive: ", "budget" },
    { "return (('x'):rep(100000):gsub('x', function() while true do end end))", "bad.lua:2: derive: ", "budget" },
    { "return ('('):rep(40):find(('('):rep(40))", "derive: too many captures", "raised" },
    { "return ('x'):find('[a')", "bad.lua:2: derive: malformed pattern (missing ']')", "raised" },
    { "table.move({}, 1, 1e9, 2)", "derive: too many items", "raised" },
    { "table.concat({}, '', 1, 1e9)", "derive: too many items", "raised" },
    { "table.unpack({}, 1, 1e8)", "derive: too many items", "raised" },
    { "local t = {} for i = 1, 20000 do t[i] = i end while true do table.insert(t, 1, 0) end",
      "bad.lua:2: derive: ", "budget" },
    { "local t = {} for i = 1, 20000 do t[i] = i % 7 end while true do table.sort(t) end", "bad.lua:2: derive: ", "budget" },
    { "table.sort({ 3, 1, 2 }, function() while true do end end)", "bad.lua:2: derive: ", "budget" },
    { "table.sort({ 1, 'x', {} })", "bad.lua:2: derive: attempt to compare", "raised" },
    { "local s = ('x'):rep(4000000) while true do if s < s .. 'y' then end end", "bad.lua:2: derive: ", NULL },
    { "while true do policy.sha256hex(('x'):rep(100000)) end", "bad.lua:2: derive: ", NULL },
    { "while true do policy.log('line') end", "derive: policy.log: more than 16 lines in one call", "raised" },
    { "while true do pcall(policy.log, 'line') end", "bad.lua:2: derive: ", "budget" },
    { "while true do local n = 0 for _ in pairs(ctx) do n = n + 1 end end", "bad.lua:2: derive: ", "budget" },
    { "left = 'behind' return 'x'", "bad.lua:2: derive: global 'left' is assigned: declare it local", "raised" },
    { "_ENV.left = 'behind' return 'x'", "bad.lua:2: derive: global 'left' is assigned: declare it local", "raised" },
    { "ctx.user = 'mallory' return 'x'", "bad.lua:2: derive: ctx is read-only", "raised" },
    { "return policy.require('x')", "derive: policy.require works while a file is loaded", "raised" },
    { "policy.fail('lost', 'x')", "derive: policy.fail: the kind must be \"invalid_argument\", not \"lost\"", "raised" },
    { "return 5", "bad.lua:1: derive: answered a number; a sandbox id is", "answer" },
    { "return nil", "bad.lua:1: derive: answered nil; a sandbox id is", "answer" },
    { "return", "bad.lua:1: derive: answered nil; a sandbox id is", "answer" },
    { "return ''", "bad.lua:1: derive: answered ''; a sandbox id is", "answer" },
    { "return 'Upper'", "bad.lua:1: derive: answered 'Upper'; a sandbox id is", "answer" },
    { "return 'a/../b'", "bad.lua:1: derive: answered 'a/../b'", "answer" },
    { "return 'a\\0b'", "bad.lua:1: derive: answered 'a'", "answer" },
    { "return ('a'):rep(64)", "bad.lua:1: derive: answered 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'", "answer" },
    { "return ('a'):rep(1000000)", "bad.lua:1: derive: answered 'aaaa", "answer" },
    { "return ctx", "bad.lua:1: derive: answered a ", "answer" },
    { "return function() end", "bad.lua:1: derive: answered a function", "answer" },
};

TEST("whatever a policy does wrong is policy_error with file and line within a second, and the universe goes on [I1, B146, "
     "B157, B164]")
{
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        char text[1024];
        snprintf(text, sizeof text, "return { derive = function(ctx)\n%s\nend }", calls[i].body);
        world w = world_with("identity", text);
        if (!CHECK(w.p != NULL)) {
            fprintf(stderr, "  at: %s: %s\n", calls[i].body, w.err.message);
            world_close(&w);
            continue;
        }
        double from = test_now();
        bool held = CHECK_INT(derive(&w, "u", "t"), -1);
        held &= CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
        held &= CHECK_HAS(w.err.message, calls[i].message);
        held &= CHECK_HAS(w.err.message, "bad.lua:");
        if (calls[i].reason != NULL && strcmp(calls[i].reason, "budget") == 0)
            held &= CHECK(over_budget(&w.err)); /* which limit is met first depends on the machine */
        else if (calls[i].reason != NULL)
            held &= CHECK_STR(w.err.reason, calls[i].reason);
        held &= CHECK_WITHIN(from, 1);
        held &= CHECK_STR(w.id, "");
        held &= CHECK_INT(decide(&w, "{}"), 0); /* another file of the same set */
        if (!held)
            fprintf(stderr, "  at: %s (%.0f ms): %s\n", calls[i].body, (test_now() - from) * 1000, w.err.message);
        world_close(&w);
    }
}

static const failing loads[] = {
    { "return {", "bad.lua:1: loading: ", NULL },
    { "local x = = 1", "bad.lua:1: loading: unexpected symbol near '='", NULL },
    { "\n\nsyntax error here", "bad.lua:3: loading: syntax error near 'error'", NULL },
    { "\x1bLua", "bad.lua:1: loading: precompiled Lua is refused", NULL },
    { "while true do end", "bad.lua:1: loading: ", NULL },
    { "local t = {} while true do t[#t + 1] = ('x'):rep(1000) .. #t end", "bad.lua:1: loading: ", NULL },
    { "left = 1 return {}", "bad.lua:1: loading: global 'left' is assigned: declare it local", NULL },
    { "function derive(ctx) return 'x' end return { derive = derive }", "bad.lua:1: loading: global 'derive' is assigned",
      NULL },
    { "return 5", "bad.lua:1: loading: the file must return a table of functions, not number", NULL },
    { "", "bad.lua:1: loading: the file must return a table of functions, not nil", NULL },
    { "return {}", "bad.lua:1: loading: 'derive' must be a function in the table that the file returns, not nil", NULL },
    { "return { derive = 'x' }",
      "bad.lua:1: loading: 'derive' must be a function in the table that the file returns, not string", NULL },
    { "return { derive = function() end,\nderiv = function() end }", "bad.lua:2: loading: 'deriv' is no function", NULL },
    { "error('at load')", "bad.lua:1: loading: at load", NULL },
    { "policy.fail('invalid_argument', 'no request here')", "bad.lua:1: loading: no request here", NULL },
    { "local os = os\nreturn { derive = os.time }", "bad.lua:2: loading: attempt to index a nil value (local 'os')", NULL },
    { "return { other = 5 }", "bad.lua:1: loading: 'derive' must be a function in the table that the file returns, not nil", NULL },
    { "return { derive = load }", "bad.lua:1: loading: 'derive' must be a function", NULL },
    { "policy.require('helper')", "there is no file 'helper.lua' beside this one", NULL },
    { "policy.require('../x')", "'../x' is no name of a file beside this one", NULL },
    { "local x <close> = setmetatable({}, {})", "attempt to call a nil value (global 'setmetatable')", NULL },
};

TEST("a reuse.lua without decide takes the built-in one, and one that names none of its functions is refused")
{
    world w = world_with("reuse", "return { idle_timeout = function() return 7 end }");
    CHECK_KIND(w.err, PDK_OK);
    double seconds = 0;
    CHECK_INT(pdk_policy_idle_timeout(w.p, PDK_NO_VIEW, &seconds, &w.err), 0);
    CHECK_NUM(seconds, 7, 0);
    CHECK_INT(decide(&w, "{ requirements = { image = 'b' }, attestation = { image = 'a' } }"), 0);
    CHECK_INT(w.verdict.decision, PDK_REPLACE);
    CHECK_STR(w.verdict.code, "image_differs");
    world_close(&w);
    static const char *const bad[][2] = {
        { "return {}", "'decide' must be a function in the table that the file returns, not nil" },
        { "return { idle_timeout = 5 }", "'idle_timeout' must be a function in the table that the file returns, not number" },
        { "return { evict = function() end, decide = 'reuse' }", "'decide' must be a function" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        w = world_with("reuse", bad[i][0]);
        CHECK(w.p == NULL);
        CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
        CHECK_HAS(w.err.message, bad[i][1]);
        world_close(&w);
    }
}

TEST("a file that cannot be loaded is policy_error with file and line, and nothing is left of it [B150]")
{
    for (size_t i = 0; i < sizeof loads / sizeof loads[0]; i++) {
        double from = test_now();
        world w = world_with("identity", loads[i].body);
        bool held = CHECK(w.p == NULL);
        held &= CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
        held &= CHECK_HAS(w.err.message, loads[i].message);
        held &= CHECK_WITHIN(from, 1);
        if (!held)
            fprintf(stderr, "  at: %s: %s\n", loads[i].body, w.err.message);
        world_close(&w);
    }
}

TEST("nothing of the host can be reached from a policy [B151, B154, B156]")
{
    world w = world_with(
        "identity",
        "local hidden = { 'io', 'os', 'debug', 'load', 'loadstring', 'loadfile', 'dofile', 'require', 'package',\n"
        "  'coroutine', 'collectgarbage', 'getmetatable', 'setmetatable', 'rawget', 'rawset', 'rawequal',\n"
        "  'rawlen', 'print', 'warn', '_G', 'paddock', 'cjson' }\n"
        "local seen = {}\n"
        "for _, name in ipairs(hidden) do if _ENV[name] ~= nil then seen[#seen + 1] = name end end\n"
        "if string.dump or (''):rep(0).dump or math.random then seen[#seen + 1] = 'dump' end\n"
        "for k in pairs(_ENV) do seen[#seen + 1] = k end\n"
        "local ok = pcall(function() return (''):dump() end)\n"
        "if ok then seen[#seen + 1] = 'method' end\n"
        "string.rep = 'mine'\n" /* its own copy */
        "local again = ('ab'):rep(2)\n"
        "return { derive = function() return #seen == 0 and again == 'abab' and 'sealed' or 'OPEN ' .. seen[1] end }");
    CHECK_KIND(w.err, PDK_OK);
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "sealed");
    CHECK_INT(decide(&w, "{}"), 0);
    world_close(&w);
}

TEST("string, table and utf8 in a policy do what Lua's own do")
{
    /* Each line is run in a policy and in plain Lua: both must give the same text. */
    static const char *const lines[] = {
        "('hello world'):find('o w')",
        "('hello'):find('l', -2)",
        "('hello'):find('')",
        "('hello'):find('', 10)",
        "('a.b'):find('.', 1, true)",
        "('hello'):match('^(h)(.-)(o)$')",
        "('key = value'):match('^(%w+)%s*=%s*(%w+)$')",
        "('THE (quick) fox'):find('%((%a+)%)')",
        "('f(a(b)c)d'):match('%b()')",
        "('THE (quick) fox'):gsub('%f[%a]%a+', 'W')",
        "('abc'):gsub('', '-')",
        "('hello'):gsub('l', { l = 'L' })",
        "('abc'):gsub('%w', '%0%0', 2)",
        "('abc'):gsub('b', '%%')",
        "('x=1, y=2'):gsub('(%w+)=(%w+)', '%2=%1')",
        "('abc'):gsub('.', function(c) if c == 'b' then return 'B' end end)",
        "('  trim  '):match('^%s*(.-)%s*$') .. '|'",
        "('aaa'):match('()a()')",
        "('[x]'):match('[]x[]+')",
        "('a-b'):match('[a%-]+')",
        "('x^y'):gsub('^x', 'z')",
        "('x'):match('[^%d]')",
        "('2024-01-31'):match('(%d+)-(%d+)-(%d+)')",
        "('aXbX'):gsub('X', '%%1')",
        "('abab'):match('(ab)%1')",
        "('aaa'):match('a-$')",
        "('abc'):match('b?c')",
        "('ac'):match('ab?c')",
        "('é'):upper()",
        "('x'):rep(3, ',')",
        "('x'):rep(0)",
        "('x'):rep(-1)",
        "('abc'):sub(-2)",
        "('abc'):byte(1, -1)",
        "string.char(72, 105)",
        "('%5.2f|%d|%s|%q'):format(3.14159, 42, 'x', 'y')",
        "('abc'):reverse() .. ('aBc'):lower() .. #'abc'",
        "table.concat({ 1, 2, 3 }, '-')",
        "table.concat({ 1, 2, 3 }, '-', 2, 3)",
        "table.unpack({ 1, 2, 3 }, 2)",
        "select('#', table.unpack({}, 1, 3))",
        "#table.pack(1, nil, 3)",
        "select(-1, 1, 2)",
        "utf8.char(228, 8364) .. utf8.len('ä€')",
        "utf8.codepoint('äb', 1, -1)",
        "math.max(1, 5, 3) .. math.type(1) .. math.floor(3.7)",
        "tonumber('0x10') + tonumber('z', 36)",
        "(function() local t = { 5, 2, 8, 1, 9, 3 } table.sort(t) return table.concat(t, ' ') end)()",
        "(function() local t = { 5, 2, 8, 1 } table.sort(t, function(a, b) return a > b end) return table.concat(t, ' ') "
        "end)()",
        "(function() local t = { 'b', 'a', 'c' } table.insert(t, 1, 'z') table.insert(t, 'y') table.remove(t, 2)"
        " return table.concat(t) .. table.remove(t) end)()",
        "(function() local t = table.move({ 1, 2, 3 }, 1, 3, 2) return table.concat(t, ',') end)()",
        "(function() local o = {} for k, v in ('a=1,b=2'):gmatch('(%w)=(%w)') do o[#o + 1] = k .. v end return "
        "table.concat(o) end)()",
        "(function() local o = {} for w in ('one two'):gmatch('%a*') do o[#o + 1] = '<' .. w .. '>' end return "
        "table.concat(o) end)()",
        "(function() local o = {} for a in ('abc'):gmatch('', 2) do o[#o + 1] = #a end return #o end)()",
        "pcall(error, 'x')",
        "select(2, pcall(error))",
        "select('#', pcall(function() return 1, nil, 3 end))",
        "xpcall(function() error('e', 0) end, function(m) return m .. '!' end)",
        "xpcall(function(a) return a end, pcall, 7)",
        "type(next({}))",
        "next({ 'x' })",
        "tostring(nil) .. tostring(1.5) .. tostring(true)",
        "pcall(string.match, 'x', '%')",
        "pcall(string.gsub, 'x', 'x', '%2')",
        "pcall(string.find, 'x', '(')",
        "pcall(string.find, 'x', '%f')",
        "pcall(string.find, 'x', ')')",
    };
    lua_State *plain = luaL_newstate();
    luaL_openlibs(plain);
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        char code[900];
        static const char *const join =
            "(function(...) local n, t = select('#', ...), { ... } for i = 1, n do t[i] = tostring(t[i])"
            " end return table.concat(t, ';') end)";
        snprintf(code, sizeof code, "return %s(%s)", join, lines[i]);
        if (!CHECK(luaL_dostring(plain, code) == 0)) {
            fprintf(stderr, "  at: %s: %s\n", lines[i], lua_tostring(plain, -1));
            continue;
        }
        const char *want = lua_tostring(plain, -1);
        snprintf(code, sizeof code, "return { decide = function() return 'reuse', nil, %s(%s) end }", join, lines[i]);
        world w = world_with("reuse", code);
        decide(&w, "{}");
        if (!CHECK_STR(w.verdict.message, want))
            fprintf(stderr, "  at: %s: %s\n", lines[i], w.err.message);
        world_close(&w);
        lua_settop(plain, 0);
    }
    lua_close(plain);
}

TEST("ctx looks like a table: fields, length, pairs, ipairs, next, type, concat, and it keeps its order")
{
    world w = world_with(
        "reuse", "return { decide = function(ctx)\n"
                 "  assert(type(ctx) == 'table' and type(ctx.info) == 'table' and type(ctx.holders) == 'number')\n"
                 "  assert(ctx.info.generation == 'g' and ctx.info['nothing'] == nil and ctx[1] == nil)\n"
                 "  assert(ctx.config.idle_timeout == 600 and #ctx.config.names == 2 and ctx.config.names[2] == 'b')\n"
                 "  assert(#ctx.list == 3 and ctx.list[3] == 'z' and ctx.list[1] == 'x' and ctx.list[4] == nil)\n"
                 "  local n = {} for i, v in ipairs(ctx.list) do n[#n + 1] = i .. v end\n"
                 "  assert(table.concat(n) == '1x2y3z' and table.concat(ctx.list) == 'xyz')\n"
                 "  assert(select('#', table.unpack(ctx.list)) == 3)\n"
                 "  local keys = {} for k in pairs(ctx) do keys[k] = true end\n"
                 "  assert(keys.info and keys.list and keys.config and keys.now and keys.holders)\n"
                 "  local count, k = 0, next(ctx) while k ~= nil do count = count + 1 k = next(ctx, k) end\n"
                 "  local other = 0 for _ in pairs(ctx) do other = other + 1 end\n"
                 "  assert(count == other, count .. ' ' .. other)\n"
                 "  assert(next(ctx.empty) == nil and #ctx.empty == 0 and ctx.flag == false and ctx.ratio == 0.5)\n"
                 "  assert(ctx.info == ctx.info and ctx.info ~= ctx.list)\n"
                 "  assert(ctx.now.hour >= 0 and ctx.now.hour < 24 and ctx.now.weekday >= 1 and ctx.now.weekday <= 7)\n"
                 "  assert(ctx.now.unix > 1600000000 and ctx.now.minute < 60)\n"
                 "  assert(not pcall(function() ctx.info.generation = 'h' end) and not pcall(table.sort, ctx.list))\n"
                 "  assert(not pcall(table.insert, ctx.list, 'w') and not pcall(next, ctx, 'nothing'))\n"
                 "  assert(('a-b'):gsub('%a', ctx.map) == 'A-b')\n"
                 "  return 'reuse', 'fine'\n"
                 "end }");
    CHECK_KIND(w.err, PDK_OK);
    CHECK_INT(
        decide(&w,
               "{ info = { generation = 'g' }, holders = 2, list = { 'x', 'y', 'z' }, empty = {}, flag = false, ratio = 0.5,"
               " map = { a = 'A' } }"),
        0);
    CHECK_KIND(w.err, PDK_OK);
    CHECK_STR(w.verdict.code, "fine");
    world_close(&w);
}

TEST("ctx is dead after its call, and nothing of one identity stays behind for another")
{
    world w = world_with("identity", "local kept, inner, iterate\n"
                                     "return { derive = function(ctx)\n"
                                     "  if ctx.user == 'first' then\n"
                                     "    kept, inner, iterate = ctx, ctx.config, pairs(ctx)\n"
                                     "    return 'first'\n"
                                     "  end\n"
                                     "  if ctx.user == 'inner' then return inner.idle_timeout .. '' end\n"
                                     "  if ctx.user == 'length' then return '' .. #kept end\n"
                                     "  if ctx.user == 'iterate' then return iterate() end\n"
                                     "  return kept.user\n"
                                     "end }");
    CHECK_INT(derive(&w, "first", "t"), 0);
    static const char *const users[] = { "second", "inner", "length", "iterate" };
    for (int i = 0; i < 4; i++) {
        CHECK_INT(derive(&w, users[i], "t"), -1);
        CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
        CHECK_HAS(w.err.message, "ctx is dead: it may not be kept after the call");
    }
    world_close(&w);
}

TEST("policy.fail refuses a request with a message of its own, and only as invalid_argument")
{
    world w = world_with("identity", "return { derive = function(ctx)\n"
                                     "  local ok, e = pcall(policy.fail, 'invalid_argument', 'caught')\n"
                                     "  assert(not ok and tostring(e) == 'caught')\n"
                                     "  policy.fail('invalid_argument', 'thread names may not be empty')\n"
                                     "end }");
    CHECK_INT(derive(&w, "u", "t"), -1);
    CHECK_KIND(w.err, PDK_E_INVALID_ARGUMENT);
    CHECK_STR(w.err.message, "thread names may not be empty");
    world_close(&w);
}

TEST("a function that overran three times in a row rests for a second, and others do not [B163, B164]")
{
    world w = world_with("identity", "local n = 0\n"
                                     "return { derive = function(ctx)\n"
                                     "  n = n + 1\n"
                                     "  while ctx.user ~= 'good' do end\n"
                                     "  return 'call-' .. n\n"
                                     "end }");
    for (int i = 0; i < 3; i++) {
        CHECK_INT(derive(&w, "bad", "t"), -1);
        CHECK(over_budget(&w.err));
    }
    CHECK_INT(derive(&w, "good", "t"), -1);
    CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
    CHECK_STR(w.err.reason, "resting");
    CHECK_HAS(w.err.message, "bad.lua:2: derive: overran its budget 3 times in a row");
    CHECK_INT(decide(&w, "{}"), 0);
    pdk_clock_advance(w.clock, 0.9, 0);
    CHECK_INT(derive(&w, "good", "t"), -1);
    pdk_clock_advance(w.clock, 0.2, 0);
    CHECK_INT(derive(&w, "bad", "t"), -1); /* asked once, and closed again */
    CHECK(over_budget(&w.err));
    CHECK_INT(derive(&w, "good", "t"), -1);
    CHECK_STR(w.err.reason, "resting");
    pdk_clock_advance(w.clock, 1.1, 0);
    CHECK_INT(derive(&w, "good", "t"), 0);
    CHECK_STR(w.id, "call-5");
    CHECK_INT(derive(&w, "bad", "t2"), -1);
    CHECK_INT(derive(&w, "good", "t2"), 0); /* one in a row does not count */
    world_close(&w);
}

/* ---- answers ---- */

static const char *const bad_answers[][3] = {
    { "requirements", "resolve = function() return 5 end",
      "must answer a table { image =, env =, limits =, ... }, not a number" },
    { "requirements", "resolve = function() end", "must answer a table" },
    { "requirements", "resolve = function() return { imagee = 'x' } end", "the answer has an unknown field 'imagee'" },
    { "requirements", "resolve = function() return { image = 5 } end", "image must be a string, not a number" },
    { "requirements", "resolve = function() return { image = 'a\\nb' } end", "image must have 1 to 512 bytes" },
    { "requirements", "resolve = function() return { env = { A = 1 } } end", "env.A must be a string, not a number" },
    { "requirements", "resolve = function() return { env = { ['A=B'] = '1' } } end", "a name in env must be a string" },
    { "requirements", "resolve = function() return { env = { 'A' } } end",
      "env must be a table of name = string, not a list" },
    { "requirements", "resolve = function() return { env = { A = 'x\\0y' } } end", "env.A is too long or has a NUL" },
    { "requirements", "resolve = function() return { env = { A = print } } end", NULL },
    { "requirements", "resolve = function() return { env = { A = pairs } } end", "the answer.env.A is a function" },
    { "requirements", "resolve = function() return { limits = { memory = -1 } } end",
      "limits.memory must be a whole number" },
    { "requirements", "resolve = function() return { limits = { memory = 1.5 } } end",
      "limits.memory must be a whole number" },
    { "requirements", "resolve = function() return { limits = { cpus = 0/0 } } end", "limits.cpus must be a number" },
    { "requirements", "resolve = function() return { limits = { cpus = math.huge } } end", "limits.cpus must be a number" },
    { "requirements", "resolve = function() return { limits = { disk = 1 } } end", "limits.disk is unknown" },
    { "requirements", "resolve = function() return { network = {} } end", "network must be a string, not a table" },
    { "requirements", "resolve = function() return { require = 'x' } end", "require must be a table" },
    { "requirements", "resolve = function() local t = {} t.env = t return t end", "nested too deeply" },
    { "requirements", "resolve = function() return { require = { [1.5] = 1 } } end",
      "the answer.require has a key that is no string" },
    { "requirements",
      "resolve = function() local s, t = ('x'):rep(1000):rep(900), {} for i = 1, 20 do t['k' .. i] = s end"
      " return { labels = t } end",
      "is too large" },
    { "mounts", "compose = function() return { source = '/a', target = '/b' } end",
      "must answer a list of mounts, not one mount" },
    { "mounts", "compose = function() return 'x' end", "must answer a list of mounts, not a string" },
    { "mounts", "compose = function() return { {} } end", "source of mount 1 must be an absolute path" },
    { "mounts", "compose = function() return { { source = 'a', target = '/b' } } end", "source of mount 1 must be" },
    { "mounts", "compose = function() return { { source = '/a/../b', target = '/b' } } end", "source of mount 1 must be" },
    { "mounts", "compose = function() return { { source = '/a', target = '/' } } end", "target of mount 1 must be" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b/' } } end", "target of mount 1 must be" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b\\0c' } } end", "target of mount 1 must be" },
    { "mounts", "compose = function() return { { source = '/a', target = '/proc' } } end",
      "mount 1, /proc: nothing may be mounted" },
    { "mounts", "compose = function() return { { source = '/a', target = '/sys/x' } } end",
      "nothing may be mounted at or below" },
    { "mounts", "compose = function() return { { source = '/a', target = '/dev' } } end", "nothing may be mounted" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b', read_only = 1 } } end",
      "read_only of mount 1 must be true" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b', create = 777 } } end",
      "create of mount 1 must be a mode" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b', create = '0999' } } end",
      "create of mount 1" },
    { "mounts", "compose = function() return { { source = '/a', target = '/b', mode = '0777' } } end",
      "mount 1 has an unknown field 'mode'" },
    { "reuse", "decide = function() return 'maybe' end", "answered 'maybe'; a decision is \"reuse\"" },
    { "reuse", "decide = function() return true end", "answered a boolean; a decision is" },
    { "reuse", "decide = function() return 'refuse', {} end", "answered a table as its code" },
    { "reuse", "decide = function() return 'refuse', ('x'):rep(40) end",
      "as its code; that is nil or a string of at most 39 bytes" },
    { "reuse", "decide = function() return 'refuse', 'x', 5 end", "answered a number as its message" },
    { "reuse", "decide = function() return 'reuse' end, idle_timeout = function() return 'x' end",
      "an idle limit is a number" },
    { "reuse", "decide = function() return 'reuse' end, idle_timeout = function() return 0/0 end",
      "an idle limit is a number" },
    { "reuse", "decide = function() return 'reuse' end, evict = function() return 'other' end",
      "sandbox_id of one of the candidates" },
    { "reuse", "decide = function() return 'reuse' end, evict = function() return 7 end",
      "sandbox_id of one of the candidates" },
    { "network", "decide = function() return nil end", "answered nil; a decision is \"allow\", \"deny\" or \"ask\"" },
};

TEST("an answer outside its contract is policy_error that names file, line, function and field")
{
    for (size_t i = 0; i < sizeof bad_answers / sizeof bad_answers[0]; i++) {
        char text[512];
        PDK_AUTO_PACK out = PDK_NO_PACK;
        PDK_AUTO_PACK list = PDK_NO_PACK;
        snprintf(text, sizeof text, "\nreturn { %s }", bad_answers[i][1]);
        world w = world_with(bad_answers[i][0], text);
        pack_lua(&list, "{ { sandbox_id = 'one' } }");
        int rc = 0;
        char id[64];
        double seconds;
        pdk_net_decision net = PDK_NET_ALLOW;
        if (strcmp(bad_answers[i][0], "requirements") == 0)
            rc = resolve(&w, "nil", "nil", &out);
        else if (strcmp(bad_answers[i][0], "mounts") == 0)
            rc = compose(&w, &out);
        else if (strcmp(bad_answers[i][0], "network") == 0) {
            rc = pdk_policy_network(w.p, PDK_NO_VIEW, &net, &w.err);
            CHECK_INT(net, PDK_NET_DENY);
        } else if (strstr(text, "idle_timeout") != NULL)
            rc = pdk_policy_idle_timeout(w.p, PDK_NO_VIEW, &seconds, &w.err);
        else if (strstr(text, "evict") != NULL)
            rc = pdk_policy_evict(w.p, pdk_view_of(&list), id, &w.err);
        else
            rc = decide(&w, "{}");
        if (test_valgrind() && over_budget(&w.err)) {
            CHECK_INT(rc, -1);
        } else if (bad_answers[i][2] == NULL) {
            CHECK_INT(rc, 0); /* `print` is nil here, and so is the field */
        } else if (!(CHECK_INT(rc, -1) & CHECK_KIND(w.err, PDK_E_POLICY_ERROR) &
                     CHECK_HAS(w.err.message, bad_answers[i][2]) & CHECK_HAS(w.err.message, "bad.lua:2: ") &
                     CHECK_INT(out.len, 0)))
            fprintf(stderr, "  at: %s: %s\n", text, w.err.message);
        world_close(&w);
    }
}

TEST("of two mounts on one target the earlier stays; what is not said has its default [D9]")
{
    world w = world_with("mounts", "return { compose = function(ctx)\n"
                                   "  return { { source = '/srv/a', target = '/a', create = '0777', read_only = false },\n"
                                   "           { source = '/srv/b', target = '/b', if_exists = true, owner_only = true },\n"
                                   "           { source = '/srv/c', target = '/a' } }\n"
                                   "end }");
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(compose(&w, &out), 0);
    pdk_view list = pdk_view_of(&out), k, a, b;
    size_t cursor = 0;
    REQUIRE(pdk_view_count(list) == 2);
    REQUIRE(pdk_view_next(list, &cursor, &k, &a) && pdk_view_next(list, &cursor, &k, &b));
    CHECK_STR(pdk_view_str(pdk_view_get(a, "source"), NULL), "/srv/a");
    CHECK_STR(pdk_view_str(pdk_view_get(a, "create"), NULL), "0777");
    CHECK(!pdk_view_bool(pdk_view_get(a, "read_only"), true));
    CHECK(pdk_view_bool(pdk_view_get(b, "read_only"), false));
    CHECK(pdk_view_bool(pdk_view_get(b, "if_exists"), false) && pdk_view_bool(pdk_view_get(b, "owner_only"), false));
    CHECK(pdk_view_is_nil(pdk_view_get(b, "create")));
    world_close(&w);
}

TEST("lists of 99, 100, 101 and 1000 entries arrive whole and in order, both ways [B160]")
{
    static const int sizes[] = { 99, 100, 101, 1000 };
    for (int i = 0; i < (test_valgrind() ? 3 : 4); i++) {
        world w = world_with("requirements", "return { resolve = function(ctx)\n"
                                             "  local labels, n = {}, 0\n"
                                             "  for i, rule in ipairs(ctx.request.rules) do\n"
                                             "    assert(rule.n == i)\n"
                                             "    labels['rule-' .. i], n = 'n' .. rule.n, n + 1\n"
                                             "  end\n"
                                             "  assert(n == #ctx.request.rules)\n"
                                             "  return { labels = labels }\n"
                                             "end }");
        PDK_AUTO_PACK out = PDK_NO_PACK;
        char request[200];
        snprintf(request, sizeof request,
                 "{ rules = (function() local t = {} for i = 1, %d do t[i] = { n = i } end return t end)() }", sizes[i]);
        CHECK_INT(resolve(&w, request, "nil", &out), 0);
        CHECK_KIND(w.err, PDK_OK);
        pdk_view labels = pdk_view_get(pdk_view_of(&out), "labels");
        CHECK_INT(pdk_view_count(labels), sizes[i]);
        CHECK_STR(pdk_view_str(pdk_view_get(labels, "rule-99"), NULL), "n99");
        world_close(&w);
    }
}

TEST("an answer may hold parts of ctx; idle limits of 0 or less are never, and endless is allowed [N6]")
{
    world w = world_with("requirements", "return { resolve = function(ctx) return { env = ctx.request.env } end }");
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(resolve(&w, "{ env = { A = 'b' } }", "nil", &out), 0);
    CHECK_STR(pdk_view_str(pdk_view_get(pdk_view_get(pdk_view_of(&out), "env"), "A"), NULL), "b");
    world_close(&w);
    double seconds = 5;
    w = world_with("reuse", "return { decide = function() return 'reuse' end, idle_timeout = function() return -3 end }");
    CHECK_INT(pdk_policy_idle_timeout(w.p, PDK_NO_VIEW, &seconds, &w.err), 0);
    CHECK_NUM(seconds, 0, 0);
    world_close(&w);
}

TEST("a policy answers the same whatever locale the host has set")
{
    const char *former = setlocale(LC_ALL, "C.UTF-8");
    if (former == NULL)
        SKIP("no locale C.UTF-8 here");
    world w = world_with("identity",
                         "return { derive = function(ctx) return (('\xC3\x84x'):lower():gsub('[^a-z]', '-')) end }");
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "--x");
    CHECK_STR(setlocale(LC_ALL, NULL), "C.UTF-8");
    setlocale(LC_ALL, "C");
    world_close(&w);
}

TEST_MAIN
