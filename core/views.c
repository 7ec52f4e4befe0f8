/* views.c -- a live runtime explains itself: list, inspect, stats, capabilities, explain. Memory only, but for explain, which
 * asks the policies. */
#include "core.h"

#include <string.h>

static void put_lease(pdk_runtime *rt, const pdk_entry *e, pdk_pack *out, pdk_mark *m)
{
    if (e->lease == PDK_LEASE_NONE)
        return;
    pdk_put_cstr(out, "lease");
    m->count++;
    pdk_mark l = pdk_begin_map(out);
    pdk_kv_cstr(out, &l, "state", e->lease == PDK_LEASE_DEL ? "del" : "own");
    pdk_kv_cstr(out, &l, "owner", rt->id);
    pdk_kv_bool(out, &l, "ours", true);
    pdk_kv_int(out, &l, "token", e->token);
    if (e->lease_until > 1)
        pdk_kv_num(out, &l, "seconds_left", pdk_to_seconds(e->lease_until - pdk_lease_now(rt)));
    pdk_end(out, &l);
}

static void put_planes(const pdk_entry *e, pdk_pack *out, pdk_mark *m)
{
    static const char *const names[PDK_PLANES] = { "shell", "bash" };
    pdk_put_cstr(out, "planes");
    m->count++;
    pdk_mark all = pdk_begin_map(out);
    for (int i = 0; i < PDK_PLANES; i++) {
        pdk_put_cstr(out, names[i]);
        all.count++;
        pdk_mark one = pdk_begin_map(out);
        pdk_kv_bool(out, &one, "default_fenced", e->plane[i].default_fenced);
        pdk_kv_bool(out, &one, "ambiguous", e->plane[i].ambiguous);
        pdk_kv_int(out, &one, "pending", e->plane[i].pending);
        pdk_end(out, &one);
    }
    pdk_end(out, &all);
}

static void put_entry(pdk_runtime *rt, const pdk_entry *e, pdk_pack *out)
{
    pdk_mark m = pdk_begin_map(out);
    pdk_kv_cstr(out, &m, "id", e->id);
    pdk_kv_cstr(out, &m, "state", pdk_state_name(e->state));
    pdk_put_identity(out, &m, e);
    pdk_kv_cstr(out, &m, "generation", e->generation);
    pdk_kv_view(out, &m, "info", pdk_view_of(&e->info));
    pdk_put_cstr(out, "holders");
    m.count++;
    pdk_mark holders = pdk_begin_list(out);
    for (const pdk_holder *h = e->holders; h != NULL; h = h->next, holders.count++)
        pdk_put_cstr(out, h->name);
    pdk_end(out, &holders);
    pdk_kv_bool(out, &m, "reserved", e->reserved != 0);
    pdk_kv_bool(out, &m, "intent", e->intents > 0);
    pdk_kv_int(out, &m, "epoch", (int64_t)e->epoch);
    pdk_kv_bool(out, &m, "journaled", e->journaled);
    pdk_kv_bool(out, &m, "doomed", e->doomed);
    pdk_kv_bool(out, &m, "retry", e->retry);
    pdk_kv_bool(out, &m, "dirty", pdk_entry_dirty(e));
    pdk_kv_int(out, &m, "busy", e->busy);
    pdk_kv_int(out, &m, "token", e->token);
    if (e->last_used > 0)
        pdk_kv_num(out, &m, "last_used", pdk_to_seconds(e->last_used));
    if (e->state == PDK_WARM)
        pdk_kv_num(out, &m, "parked_at", pdk_to_seconds(e->parked_at));
    pdk_ns since = e->state == PDK_WARM ? e->parked_at : e->last_used;
    if (since > 0)
        pdk_kv_num(out, &m, "idle_seconds", pdk_to_seconds(pdk_clock_now(rt->clock) - since));
    if (e->idle_limit >= 0)
        pdk_kv_num(out, &m, "idle_timeout", e->idle_limit);
    put_planes(e, out, &m);
    put_lease(rt, e, out, &m);
    pdk_end(out, &m);
}

static int packed(const pdk_pack *out, pdk_error *err)
{
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer") : 0;
}

int pdk_runtime_list(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_LOOK(rt, err, -1);
    PDK_GUARD(rt->pool.registry);
    pdk_mark list = pdk_begin_list(out);
    for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
        put_entry(rt, PDK_OF(n, pdk_entry, by_id), out);
        list.count++;
    }
    pdk_end(out, &list);
    return packed(out, err);
}

int pdk_runtime_inspect(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_pack *out, pdk_error *err)
{
    PDK_LOOK(rt, err, -1);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = id != NULL ? pdk_pool_find(&rt->pool, id) : pdk_pool_by_identity(&rt->pool, who);
    for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); e == NULL && id == NULL && n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
        pdk_entry *other = PDK_OF(n, pdk_entry, by_id); /* a warm one is not mapped by its identity */
        if (pdk_entry_is(other, who))
            e = other;
    }
    if (e == NULL)
        pdk_put_nil(out);
    else
        put_entry(rt, e, out);
    return packed(out, err);
}

int pdk_runtime_stats(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_LOOK(rt, err, -1);
    size_t memory = pdk_script_memory(rt->script), turns = pdk_serial_keys(rt->serial);
    pdk_mark m = pdk_begin_map(out);
    {
        PDK_GUARD(rt->pool.registry);
        const pdk_pool *p = &rt->pool;
        const struct { const char *key; uint64_t n; } all[] = {
            { "active", p->count[PDK_ACTIVE] },   { "warm", p->count[PDK_WARM] },          { "kept", p->count[PDK_KEPT] },
            { "creating", p->creating },          { "holders", p->holders.count },         { "acquires", p->stats.acquires },
            { "from_active", p->stats.active },   { "from_warm", p->stats.warm },          { "from_discovered", p->stats.discovered },
            { "from_created", p->stats.created }, { "destroyed", p->stats.destroyed },     { "stop_failures", p->stats.stop_failures },
            { "evicted", p->stats.evicted },      { "expired", p->stats.expired },         { "lost", p->stats.lost },
        };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            pdk_kv_int(out, &m, all[i].key, (int64_t)all[i].n);
    }
    pdk_kv_int(out, &m, "turns", (int64_t)turns);
    pdk_kv_int(out, &m, "lua_bytes", (int64_t)memory);
    pdk_kv_num(out, &m, "now", pdk_to_seconds(pdk_clock_now(rt->clock)));
    pdk_kv_cstr(out, &m, "runtime_id", rt->id);
    pdk_kv_int(out, &m, "policy_generation", (int64_t)pdk_policies_generation(rt->policies));
    pdk_end(out, &m);
    return packed(out, err);
}

int pdk_runtime_capabilities(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_LOOK(rt, err, -1);
    pdk_view backend = pdk_iface_field(rt->backend, "capabilities"), k, v;
    size_t cursor = 0;
    pdk_mark m = pdk_begin_map(out);
    /* row A2: what a runtime says unless its backend says otherwise */
    const struct { const char *key; bool dflt; } flags[] = { { "thread_data_mounts", false },
                                                             { "upload_permission_adjustment", true },
                                                             { "agent_skill_isolation", false } };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        pdk_kv_bool(out, &m, flags[i].key, pdk_view_bool(pdk_view_get(backend, flags[i].key), flags[i].dflt));
    while (pdk_view_next(backend, &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        bool said = key == NULL;
        for (size_t i = 0; i < sizeof flags / sizeof *flags && !said; i++)
            said = strcmp(key, flags[i].key) == 0;
        if (!said)
            pdk_kv_view(out, &m, key, v);
    }
    pdk_kv_cstr(out, &m, "backend", rt->backend_name);
    pdk_kv_cstr(out, &m, "ownership", pdk_lease_type(rt->lease));
    pdk_end(out, &m);
    return packed(out, err);
}

/* What a policy would answer, or the error that it would raise, under `key`. */
static void put_answer(pdk_pack *out, pdk_mark *m, const char *key, int rc, const pdk_pack *answer, pdk_error *err)
{
    if (rc == 0) {
        pdk_kv_view(out, m, key, pdk_view_of(answer));
        return;
    }
    pdk_put_cstr(out, key);
    m->count++;
    pdk_mark e = pdk_begin_map(out);
    pdk_kv_cstr(out, &e, "error", pdk_error_kind_name(err->kind));
    pdk_kv_cstr(out, &e, "message", err->message);
    pdk_end(out, &e);
    pdk_error_clear(err);
}

static void explain_reuse(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_view requirements, pdk_pack *out, pdk_mark *m)
{
    PDK_AUTO_PACK info = PDK_NO_PACK, none = PDK_NO_PACK;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_verdict v;
    pdk_reuse_facts facts = { .expected_id = id, .requirements = requirements, .who = who };
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e == NULL || (e->state != PDK_ACTIVE && e->state != PDK_WARM) || !pdk_pack_copy(&info, pdk_view_of(&e->info))) {
            pdk_kv_cstr(out, m, "now", "nothing is tracked under this id: it would be discovered or created");
            return;
        }
        pdk_ns since = e->state == PDK_WARM ? e->parked_at : e->last_used;
        facts.source = pdk_state_name(e->state);
        facts.holders = e->holder_count;
        facts.idle_seconds = pdk_to_seconds(pdk_clock_now(rt->clock) - since);
    }
    facts.info = pdk_view_of(&info);
    static const char *const names[] = { "reuse", "replace", "refuse", "defer", "probe" };
    if (pdk_ask_reuse(rt, &facts, &v, &err) < 0) {
        put_answer(out, m, "decision", -1, &none, &err);
        return;
    }
    pdk_kv_cstr(out, m, "decision", names[v.decision]);
    pdk_kv_cstr(out, m, "code", v.code[0] != '\0' ? v.code : NULL);
    pdk_kv_cstr(out, m, "message", v.message[0] != '\0' ? v.message : NULL);
}

/* What a policy answered, but for the values of the environment: they may be secrets, and this is for people and logs. */
static int hide_environment(const pdk_pack *requirements, pdk_pack *out)
{
    size_t cursor = 0;
    pdk_view k, v, name, value;
    pdk_mark m = pdk_begin_map(out);
    while (pdk_view_next(pdk_view_of(requirements), &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        if (key == NULL)
            continue;
        if (strcmp(key, "env") != 0 || pdk_view_tag(v) != '{') {
            pdk_kv_view(out, &m, key, v);
            continue;
        }
        pdk_put_cstr(out, key);
        m.count++;
        pdk_mark env = pdk_begin_map(out);
        for (size_t at = 0; pdk_view_next(v, &at, &name, &value);)
            pdk_kv_cstr(out, &env, pdk_view_str(name, NULL), "(hidden)");
        pdk_end(out, &env);
    }
    pdk_end(out, &m);
    return out->failed ? -1 : 0;
}

int pdk_runtime_explain(pdk_runtime *rt, const pdk_identity *who, pdk_view request, bool trial, pdk_pack *out, pdk_error *err)
{
    PDK_LOOK(rt, err, -1);
    PDK_AUTO_PACK requirements = PDK_NO_PACK, mounts = PDK_NO_PACK, ctx = PDK_NO_PACK, sets = PDK_NO_PACK, shown = PDK_NO_PACK;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    char id[64] = "";
    pdk_mark m = pdk_begin_map(out);
    pdk_put_who(out, &m, who);
    int rc = pdk_policy_resolve(rt->policies, who, request, pdk_view_of(&rt->policy_base), &requirements, &why);
    if (rc == 0 && hide_environment(&requirements, &shown) < 0)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer");
    put_answer(out, &m, "requirements", rc, &shown, &why);
    if (rc == 0 && pdk_policy_derive(rt->policies, who, pdk_view_of(&requirements), id, &why) == 0) {
        pdk_kv_cstr(out, &m, "id", id);
        pdk_mark c = pdk_begin_map(&ctx);
        pdk_put_who(&ctx, &c, who);
        pdk_kv_cstr(&ctx, &c, "sandbox_id", id);
        pdk_kv_view(&ctx, &c, "requirements", pdk_view_of(&requirements));
        pdk_end(&ctx, &c);
        rc = pdk_policy_compose(rt->policies, pdk_view_of(&ctx), &mounts, &why);
        put_answer(out, &m, "mounts", rc, &mounts, &why);
        explain_reuse(rt, id, who, pdk_view_of(&requirements), out, &m);
        if (trial && pdk_policies_try(rt, id, who, pdk_view_of(&requirements), &why) < 0)
            put_answer(out, &m, "trial", -1, &mounts, &why);
    } else if (rc == 0) {
        put_answer(out, &m, "id", -1, &mounts, &why);
    }
    if (pdk_policies_describe(rt->policies, &sets, &why) == 0)
        pdk_kv_view(out, &m, "policies", pdk_view_of(&sets));
    pdk_end(out, &m);
    return packed(out, err);
}
