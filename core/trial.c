/* trial.c -- every function of the policies called once about an invented sandbox, for `paddock policy check`: what nobody has
 * asked yet is wrong in front of its author, not of the first user. No sandbox, no registry, no lock. */
#include "core.h"

typedef struct trial {
    pdk_runtime *rt;
    const pdk_identity *who;
    pdk_pack info;
    pdk_view requirements;
    const char *id;
} trial;

static void put_info(const trial *t, pdk_pack *out)
{
    pdk_mark m = pdk_begin_map(out);
    pdk_kv_cstr(out, &m, "sandbox_id", t->id);
    pdk_kv_cstr(out, &m, "generation", "sample");
    pdk_kv_int(out, &m, "created_at", 0);
    pdk_put_cstr(out, "attestation");
    m.count++;
    pdk_mark none = pdk_begin_map(out);
    pdk_end(out, &none);
    pdk_end(out, &m);
}

static int try_decide(const trial *t, pdk_error *err)
{
    static const char *const sources[] = { "warm", "active", "discovered", "created" };
    PDK_AUTO_PACK capability = PDK_NO_PACK;
    pdk_mark none = pdk_begin_map(&capability);
    pdk_end(&capability, &none);
    for (size_t i = 0; i < sizeof sources / sizeof *sources; i++) {
        pdk_reuse_facts facts = { .source = sources[i], .expected_id = t->id, .info = pdk_view_of(&t->info),
                                  .requirements = t->requirements, .who = t->who, .holders = i == 1, .idle_seconds = 60 };
        pdk_verdict v;
        int rc = pdk_ask_reuse(t->rt, &facts, &v, err);
        facts.capability = pdk_view_of(&capability);
        for (int fresh = 0; rc == 0 && v.decision == PDK_PROBE && fresh < 2; fresh++) {
            facts.capability_fresh = fresh == 1;
            rc = pdk_ask_reuse(t->rt, &facts, &v, err);
        }
        if (rc < 0)
            return -1;
    }
    return 0;
}

static void put_idle(const trial *t, pdk_pack *ctx, bool as_candidate)
{
    pdk_mark m = pdk_begin_map(ctx);
    pdk_kv_cstr(ctx, &m, "sandbox_id", t->id);
    pdk_put_who(ctx, &m, t->who);
    pdk_kv_num(ctx, &m, "idle_seconds", 60);
    pdk_kv_view(ctx, &m, "info", pdk_view_of(&t->info));
    if (!as_candidate) {
        pdk_kv_cstr(ctx, &m, "state", "warm");
        pdk_kv_view(ctx, &m, "requirements", t->requirements);
    }
    pdk_end(ctx, &m);
}

static int try_idle(const trial *t, pdk_error *err)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    double seconds = 0;
    put_idle(t, &ctx, false);
    return pdk_policy_idle_timeout(t->rt->policies, pdk_view_of(&ctx), &seconds, err);
}

static int try_evict(const trial *t, pdk_error *err)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    char id[64];
    pdk_mark list = pdk_begin_list(&ctx);
    put_idle(t, &ctx, true);
    list.count++;
    pdk_end(&ctx, &list);
    return pdk_policy_evict(t->rt->policies, pdk_view_of(&ctx), id, err);
}

static int try_network(const trial *t, pdk_error *err)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    pdk_net_decision decision;
    pdk_mark m = pdk_begin_map(&ctx);
    pdk_kv_cstr(&ctx, &m, "host", "example.org");
    pdk_kv_int(&ctx, &m, "port", 443);
    pdk_put_who(&ctx, &m, t->who);
    pdk_put_cstr(&ctx, "grants");
    m.count++;
    pdk_mark none = pdk_begin_list(&ctx);
    pdk_end(&ctx, &none);
    pdk_end(&ctx, &m);
    return pdk_policy_network(t->rt->policies, pdk_view_of(&ctx), &decision, err);
}

int pdk_policies_try(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_view requirements, pdk_error *err)
{
    static int (*const all[])(const trial *, pdk_error *) = { try_decide, try_idle, try_evict, try_network };
    trial t = { .rt = rt, .who = who, .info = PDK_NO_PACK, .requirements = requirements, .id = id };
    int rc = 0;
    put_info(&t, &t.info);
    for (size_t i = 0; rc == 0 && i < sizeof all / sizeof *all; i++)
        rc = all[i](&t, err);
    pdk_pack_free(&t.info);
    return rc;
}
