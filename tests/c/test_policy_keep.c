/* test_policy_keep.c -- kept answers of pure policies against the same policies asked each time: random functions, which look at
 * random fields of ctx one after another and stop where a value sends them, are asked random questions. Always the same ones. */
#include "policy_world.h"

static unsigned seed = 1;
static unsigned upto(unsigned n)
{
    seed = seed * 1103515245u + 12345u;
    return (seed >> 12) % n;
}
#define ANY(list) list[upto(sizeof list / sizeof list[0])]

static const char *const looks[] = {
    "ctx.user", "ctx.thread", "ctx.identity and ctx.identity.user", "all(ctx.identity)", "ctx.request and ctx.request.image",
    "all(ctx.request)", "ctx.capability and ctx.capability.gpu", "all(ctx.capability)", "ctx.capability_fresh", "ctx.source",
    "ctx.info and ctx.info.sandbox_id", "all(ctx.info)", "ctx.attestation and ctx.attestation.gpu", "ctx.expected_id", "ctx.holders",
    "ctx.idle_seconds", "ctx.sandbox_id", "ctx.state", "ctx.differs and ctx.differs.image",
    "all(ctx.differs)", "ctx.differs and next(ctx.differs)",
    "ctx.requirements and ctx.requirements.image", "all(ctx.requirements)", "#ctx", "ctx[1]", "#ctx.config.names",
    "select(2, pcall(function() return ctx.holders end))", "tostring(ctx.info == ctx.attestation)", "ctx['user\\0x']",
    "all(ctx)",
};
static const char *const ends[] = { "v == 'a'", "v == nil", "v == 'b'", "v", "v == 1", "#acc % 7 == 3" };
static const char *const users[] = { "a", "b", "c" };
static const char *const maps[] = { "{}", "{ image = 'a' }", "{ image = 'b', env = { A = 'x' } }",
                                    "{ env = { A = 'y' }, require = { gpu = true } }", "{ require = { gpu = { at_least = 2 } } }" };
static const char *const infos[] = { "{}", "{ sandbox_id = 'a' }", "{ sandbox_id = 'b', attestation = { image = 'a', gpu = true } }",
                                     "{ attestation = { image = 'b', gpu = 3 } }" };
static const char *const abilities[] = { "nil", "{}", "{ gpu = true }", "{ gpu = 1 }" };

static void make_body(char *out, size_t size)
{
    size_t n = 0;
    for (unsigned left = 1 + upto(5); left > 0; left--) {
        n += (size_t)snprintf(out + n, size - n, "v = %s acc = acc .. '|' .. tostring(v)\n", ANY(looks));
        if (left > 1 && upto(2) == 0)
            n += (size_t)snprintf(out + n, size - n, "if %s then goto done end\n", ANY(ends));
        if (upto(8) == 0)
            n += (size_t)snprintf(out + n, size - n, "if #acc %% 5 == 2 then error('no') end\n");
    }
}

static const struct {
    const char *file, *function, *answer;
} hooks[] = {
    { "requirements", "resolve", "{ labels = { n = policy.sha256hex(acc) } }" },
    { "reuse", "decide", "'reuse', policy.sha256hex(acc):sub(1, 30)" },
    { "reuse", "idle_timeout", "tonumber(policy.sha256hex(acc):sub(1, 6), 16)" },
};

static world world_of(int hook, bool pure, const char *body)
{
    char text[4096];
    snprintf(text, sizeof text,
             "local function all(t) if type(t) ~= 'table' then return tostring(t) end local list = {} "
             "for k, v in pairs(t) do if k ~= 'now' then list[#list + 1] = k .. '=' .. all(v) end end "
             "table.sort(list) return table.concat(list, ',') end\n"
             "return { pure = %s, %s = function(ctx) local acc, v = ''\n%s ::done:: do return %s end end }",
             pure ? "true" : "false", hooks[hook].function, body, hooks[hook].answer);
    return world_with(hooks[hook].file, text);
}

typedef struct question { /* packs of Lua expressions, and what else a hook is asked by */
    pdk_pack map, info, ability, base;
    pdk_reuse_facts reuse;
    pdk_idle_facts idle;
    pdk_identity who;
} question;

static void make_question(question *q)
{
    *q = (question){ .who = who(ANY(users), ANY(users)) };
    pack_lua(&q->map, ANY(maps));
    pack_lua(&q->info, ANY(infos));
    pack_lua(&q->ability, ANY(abilities));
    pack_lua(&q->base, upto(2) ? "{}" : "{ network = 'z' }");
    const pdk_identity *known = upto(4) ? &q->who : NULL;
    pdk_view able = pdk_view_is_nil(pdk_view_of(&q->ability)) ? PDK_NO_VIEW : pdk_view_of(&q->ability);
    q->reuse = (pdk_reuse_facts){ .source = ANY(users), .expected_id = ANY(users), .info = pdk_view_of(&q->info),
                                  .requirements = pdk_view_of(&q->map), .capability = able, .capability_fresh = upto(2),
                                  .who = known, .holders = (int)upto(2), .idle_seconds = upto(2) };
    q->idle = (pdk_idle_facts){ .sandbox_id = ANY(users), .state = upto(2) ? "warm" : "active", .who = known,
                                .info = pdk_view_of(&q->info), .requirements = pdk_view_of(&q->map), .idle_seconds = upto(2) };
}

static void end_question(question *q)
{
    pdk_pack_free(&q->map);
    pdk_pack_free(&q->info);
    pdk_pack_free(&q->ability);
    pdk_pack_free(&q->base);
}

/* The answer as text; "" when the policy failed. */
static void answer_of(world *w, int hook, const question *q, char *text, size_t size)
{
    PDK_AUTO_PACK out = PDK_NO_PACK, ctx = PDK_NO_PACK;
    pdk_verdict verdict;
    double seconds;
    text[0] = '\0';
    pdk_error_clear(&w->err);
    if (hook == 0) {
        pdk_view able = q->reuse.capability;
        if (pdk_policy_resolve_again(w->p, &q->who, pdk_view_of(&q->map), pdk_view_of(&q->base), able, &out, &w->err) == 0)
            snprintf(text, size, "%s %s", pdk_view_str(pdk_view_get(pdk_view_get(pdk_view_of(&out), "labels"), "n"), NULL),
                     field(&out, "network"));
    } else if (hook == 1) {
        if (pdk_policy_reuse(w->p, &q->reuse, &verdict, &w->err) == 0)
            snprintf(text, size, "%d %s %s", verdict.decision, verdict.code, verdict.message);
    } else {
        pdk_policy_idle_ctx(&q->idle, &ctx);
        if (pdk_policy_idle_kept(w->p, &q->idle, &seconds) ||
            pdk_policy_idle_timeout(w->p, pdk_view_of(&ctx), &seconds, &w->err) == 0)
            snprintf(text, size, "%.0f", seconds);
    }
}

TEST("whatever pure functions look at, what is kept of them is what they would answer")
{
    char body[2048], kept[200], asked[200];
    size_t bytes = 0;
    for (int round = 0; round < 120; round++) {
        int hook = round % 3;
        make_body(body, sizeof body);
        world pure = world_of(hook, true, body), plain = world_of(hook, false, body);
        bool same = CHECK_KIND(pure.err, PDK_OK);
        for (int i = 0; i < 60 && same; i++) {
            question q;
            make_question(&q);
            answer_of(&pure, hook, &q, kept, sizeof kept);
            answer_of(&plain, hook, &q, asked, sizeof asked);
            same = CHECK_STR(kept, asked);
            end_question(&q);
            if (i == 40)
                CHECK_INT(pdk_policies_reload(pure.p, &pure.err), 0);
        }
        if (!same)
            fprintf(stderr, "  in round %d of %s:\n%s%s\n", round, hooks[hook].function, pure.err.message, body);
        bytes += pdk_policies_remembered(pure.p);
        CHECK_INT(pdk_policies_remembered(plain.p), 0);
        world_close(&pure);
        world_close(&plain);
    }
    CHECK(bytes > 0);
}

TEST_MAIN
