/* views.c -- a live runtime explains itself: list, inspect, stats, capabilities. Memory only. (explain.c asks the policies.) */
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
    pdk_kv_view(out, &m, "info", e->info);
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
        size_t active = p->count[PDK_ACTIVE] - p->retries[PDK_ACTIVE], warm = p->count[PDK_WARM] - p->retries[PDK_WARM];
        /* kept: whatever its state, nobody can have it, and it is to be stopped again */
        size_t kept = p->count[PDK_KEPT] + p->retries[PDK_ACTIVE] + p->retries[PDK_WARM];
        const struct { const char *key; uint64_t n; } all[] = {
            { "active", active },                 { "warm", warm },                        { "kept", kept },
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
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) { /* an option of that name has the last word (B2) */
        bool said = pdk_view_bool(pdk_view_get(backend, flags[i].key), flags[i].dflt);
        pdk_kv_bool(out, &m, flags[i].key, pdk_view_bool(pdk_view_get(pdk_view_of(&rt->config.options), flags[i].key), said));
    }
    /* row R1: likewise, of a network that nobody decides about */
    const char *mode = pdk_view_str(pdk_view_get(backend, "network_mode"), NULL);
    double grant = 300;
    pdk_view_num(pdk_view_get(backend, "network_grant"), &grant);
    pdk_kv_cstr(out, &m, "network_mode", mode != NULL ? mode : "open");
    pdk_kv_num(out, &m, "network_grant", grant);
    while (pdk_view_next(backend, &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        bool said = key == NULL || strcmp(key, "network_mode") == 0 || strcmp(key, "network_grant") == 0;
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
