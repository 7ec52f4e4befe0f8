/* reaper.c -- what happens by itself: idle expiry, eviction for room, lease renewal, adoption of orphans; and the two threads
 * that do it. With threads = false, tick does the same on the caller's thread.
 *
 * The reaper looks at what is due (a heap), not at what is kept. Ages are on the runtime's clock, never on the wall clock.
 */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STOP_WAIT (5 * PDK_NS_PER_S) /* rows P6, P7 */
#define BATCH 64
#define GAP PDK_NS_PER_S /* what may pass unseen between two passes beside their interval */

typedef struct ref { /* an entry as seen at one moment */
    char id[64];
    uint64_t incarnation;
    pdk_state state;
    pdk_ns stamp; /* last_used or parked_at: another one means that it was used meanwhile */
} ref;

bool pdk_stopping(pdk_runtime *rt)
{
    PDK_GUARD(rt->lock);
    return rt->stop_threads;
}

/* ---- idle ---- */

static pdk_ns stamp_of(const pdk_entry *e)
{
    return e->state == PDK_WARM ? e->parked_at : e->last_used;
}

bool pdk_idle(const pdk_entry *e, pdk_ns now)
{
    return (e->state == PDK_WARM || e->state == PDK_ACTIVE) && e->holder_count == 0 && e->busy == 0 && e->idle_limit > 0 &&
           now - stamp_of(e) > pdk_seconds(e->idle_limit);
}

static pdk_idle_facts idle_facts_of(const pdk_entry *e, const pdk_identity *who, pdk_ns now)
{
    return (pdk_idle_facts){ .sandbox_id = e->id, .state = pdk_state_name(e->state), .who = e->has_identity ? who : NULL,
                             .info = e->info, .requirements = pdk_entry_requirements(e),
                             .idle_seconds = pdk_to_seconds(now - stamp_of(e)) };
}

static void set_idle(pdk_runtime *rt, pdk_entry *e, double limit) PDK_REQUIRES(rt->pool.registry)
{
    if (e->state != PDK_WARM && e->state != PDK_ACTIVE)
        return;
    e->idle_limit = limit;
    pdk_pool_set_due(&rt->pool, e, limit > 0 ? pdk_after(stamp_of(e), pdk_seconds(limit)) : PDK_NEVER);
}

void pdk_ask_idle(pdk_runtime *rt, const char *id, uint64_t incarnation)
{
    unsigned char room[1024];
    PDK_AUTO_PACK ctx = PDK_PACK_ON(room);
    double limit = rt->config.idle_timeout;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e == NULL || e->incarnation != incarnation)
            return;
        pdk_identity who = pdk_entry_who(e);
        pdk_idle_facts facts = idle_facts_of(e, &who, pdk_clock_now(rt->clock));
        if (pdk_policy_idle_kept(rt->policies, &facts, &limit)) {
            set_idle(rt, e, limit);
            return;
        }
        pdk_policy_idle_ctx(&facts, &ctx);
    }
    if (ctx.failed)
        return;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (pdk_policy_idle_timeout(rt->policies, pdk_view_of(&ctx), &limit, &err) < 0) {
        /* a policy that fails must not make sandboxes immortal, nor kill them: the configured limit holds */
        pdk_emit(rt, PDK_WARN, "idle_timeout_failed", id, NULL, NULL, &err);
        limit = rt->config.idle_timeout;
    }
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    if (e != NULL && e->incarnation == incarnation)
        set_idle(rt, e, limit);
}

static bool still_idle(const pdk_entry *e, void *ctx)
{
    const ref *r = ctx;
    return e->state == r->state && stamp_of(e) == r->stamp;
}

/* Takes up to BATCH entries off the heap that are due now. Those that were used since are put back with their true due time. */
static size_t take_due(pdk_runtime *rt, pdk_ns now, ref *out)
{
    size_t n = 0;
    PDK_GUARD(rt->pool.registry);
    while (n < BATCH && rt->pool.heap_len > 0 && rt->pool.heap[1]->due < now) {
        pdk_entry *e = rt->pool.heap[1];
        pdk_ns again = pdk_after(now, pdk_seconds(rt->config.reap_interval));
        pdk_ns due = e->idle_limit > 0 ? pdk_after(stamp_of(e), pdk_seconds(e->idle_limit)) : 0;
        if (!e->retry && e->state != PDK_KEPT && due >= now) { /* used since it was put there */
            pdk_pool_set_due(&rt->pool, e, due);
            continue;
        }
        pdk_pool_set_due(&rt->pool, e, again); /* if nothing comes of it, it is looked at again */
        pdk_entry_lapse(&rt->pool, e->id, pdk_lease_now(rt)); /* frees only what is on no heap */
        if (e->reserved != 0 || e->holder_count > 0 || e->busy > 0)
            continue;
        ref *r = &out[n++];
        pdk_entry_id(e, r->id);
        r->incarnation = e->incarnation;
        r->state = e->state;
        r->stamp = stamp_of(e);
    }
    return n;
}

static void expire(pdk_runtime *rt, const ref *r)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    ref seen = *r;
    bool retry;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, r->id);
        if (e == NULL || e->incarnation != r->incarnation)
            return;
        retry = e->retry;
    }
    pdk_teardown td = { .id = r->id, .reason = retry ? "retry" : "idle", .incarnation = r->incarnation, .still = still_idle,
                        .ctx = &seen };
    pdk_teardown_result result = pdk_fence_teardown(rt, &td, &err);
    if (result == PDK_TD_DONE) {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.expired++;
    } else if (result == PDK_TD_REPLACED) { /* what failed is gone, and something of another generation has come */
        pdk_fence_forget_replaced(rt, r->id, r->incarnation);
    }
}

/* Asks the policy about one that is due, and says whether it is idle by its answer. */
static bool truly_idle(pdk_runtime *rt, const ref *r, pdk_ns now)
{
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, r->id);
        if (e != NULL && e->incarnation == r->incarnation && e->retry)
            return true;
    }
    pdk_ask_idle(rt, r->id, r->incarnation);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, r->id);
    if (e == NULL || e->incarnation != r->incarnation || !pdk_idle(e, now))
        return false;
    pdk_pool_set_due(&rt->pool, e, pdk_after(now, pdk_seconds(rt->config.reap_interval)));
    return true;
}

static int by_stamp(const void *a, const void *b)
{
    const ref *x = a, *y = b;
    if ((x->state == PDK_ACTIVE) != (y->state == PDK_ACTIVE)) /* row N3: active ones first */
        return x->state == PDK_ACTIVE ? -1 : 1;
    return x->stamp < y->stamp ? -1 : x->stamp > y->stamp;
}

typedef struct pass { /* of the reaper; its threads only read it */
    pdk_runtime *rt;
    const ref *all;
    pdk_ns now;
} pass;

static void reap_nth(void *ctx, size_t i)
{
    const pass *p = ctx;
    if (!pdk_stopping(p->rt) && truly_idle(p->rt, &p->all[i], p->now))
        expire(p->rt, &p->all[i]);
}

int pdk_reap(pdk_runtime *rt, pdk_error *err)
{
    (void)err;
    pdk_ns now = pdk_clock_now(rt->clock);
    ref *all = NULL;
    size_t n = 0, cap = 0;
    for (;;) {
        if (n + BATCH > cap) {
            ref *more = realloc(all, (cap + 4 * BATCH) * sizeof *all);
            if (more == NULL)
                break; /* the rest next time */
            all = more;
            cap += 4 * BATCH;
        }
        size_t took = take_due(rt, now, all + n);
        if (took == 0)
            break;
        n += took;
    }
    if (n > 0)
        qsort(all, n, sizeof *all, by_stamp);
    pass p = { rt, all, now };
    pdk_at_once(rt, n, reap_nth, &p); /* in this order; a slow engine must not hold the last one for as long as all the others take */
    free(all);
    return 0;
}

/* ---- room ---- */

static bool still_warm(const pdk_entry *e, void *ctx)
{
    return e->state == PDK_WARM && still_idle(e, ctx);
}

/* The 32 oldest warm ones that may go, except those that were tried. */
static size_t candidates(pdk_runtime *rt, const char tried[][64], size_t tries, ref *out, pdk_pack *list)
{
    size_t n = 0;
    pdk_ns now = pdk_clock_now(rt->clock);
    PDK_GUARD(rt->pool.registry);
    pdk_mark l = pdk_begin_list(list);
    for (pdk_entry *e = rt->pool.oldest; e != NULL && n < 32; e = e->newer) {
        bool skip = e->reserved != 0 || e->retry || e->intents > 0;
        for (size_t i = 0; i < tries && !skip; i++)
            skip = strcmp(tried[i], e->id) == 0;
        if (skip)
            continue;
        pdk_entry_id(e, out[n].id);
        out[n].incarnation = e->incarnation;
        out[n].state = PDK_WARM;
        out[n++].stamp = e->parked_at;
        pdk_mark m = pdk_begin_map(list);
        pdk_kv_cstr(list, &m, "sandbox_id", e->id);
        pdk_put_identity(list, &m, e);
        pdk_kv_num(list, &m, "idle_seconds", pdk_to_seconds(now - e->parked_at));
        pdk_kv_view(list, &m, "info", e->info);
        pdk_end(list, &m);
        l.count++;
    }
    pdk_end(list, &l);
    return n;
}

/* 1 = one is gone, 0 = nothing can go, -1 = the policy failed. */
static int evict_one(pdk_runtime *rt, pdk_error *err)
{
    char tried[32][64];
    for (size_t tries = 0; tries < 32;) {
        ref c[32];
        PDK_AUTO_PACK list = PDK_NO_PACK;
        char id[64] = "";
        size_t n = candidates(rt, (const char(*)[64])tried, tries, c, &list), i = 0;
        if (n == 0)
            return 0;
        if (pdk_policy_evict(rt->policies, pdk_view_of(&list), id, err) < 0)
            return -1;
        if (id[0] == '\0')
            return 0;
        while (i < n && strcmp(c[i].id, id) != 0)
            i++;
        if (i == n)
            return pdk_fail(err, PDK_E_POLICY_ERROR, 0, "reuse.evict answered %s, which is none of its candidates", id);
        PDK_AUTO_ERROR why = PDK_NO_ERROR;
        pdk_teardown td = { .id = id, .reason = "evicted", .incarnation = c[i].incarnation, .still = still_warm, .ctx = &c[i] };
        if (pdk_fence_teardown(rt, &td, &why) == PDK_TD_DONE) {
            PDK_GUARD(rt->pool.registry);
            rt->pool.stats.evicted++;
            return 1;
        }
        memcpy(tried[tries++], id, sizeof id); /* it cannot be claimed: the next oldest is tried */
    }
    return 0;
}

static size_t in_use(const pdk_pool *p)
{
    return p->count[PDK_ACTIVE] + p->count[PDK_WARM] + p->creating;
}

int pdk_make_room(pdk_runtime *rt, pdk_error *err)
{
    int64_t soft = rt->config.replicas, hard = rt->config.max_sandboxes;
    for (;;) {
        bool over_soft, over_hard, warm;
        {
            PDK_GUARD(rt->pool.registry);
            size_t used = in_use(&rt->pool);
            over_soft = soft >= 0 && used >= (size_t)soft;
            over_hard = hard >= 0 && used + rt->pool.count[PDK_KEPT] >= (size_t)hard;
            warm = rt->pool.count[PDK_WARM] > 0;
            if ((!over_soft && !over_hard) || (over_soft && !over_hard && !warm)) {
                rt->pool.creating++;
                if (!over_soft)
                    return 0;
            }
        }
        if (over_soft && !over_hard && !warm) {
            pdk_emit(rt, PDK_WARN, "over_replicas", NULL, NULL, "nothing warm to evict", NULL);
            return 0;
        }
        int gone = warm ? evict_one(rt, err) : 0;
        if (gone < 0)
            return -1;
        if (gone > 0)
            continue;
        if (over_hard)
            return pdk_fail(err, PDK_E_CAPACITY_EXHAUSTED, 0,
                            "max_sandboxes = %lld is reached and none of them can be evicted; release some, or raise it",
                            (long long)hard);
        pdk_emit(rt, PDK_WARN, "over_replicas", NULL, NULL, "no warm one could be evicted", NULL);
        PDK_GUARD(rt->pool.registry);
        if (hard >= 0 && in_use(&rt->pool) + rt->pool.count[PDK_KEPT] >= (size_t)hard)
            continue;
        rt->pool.creating++;
        return 0;
    }
}

void pdk_room_done(pdk_runtime *rt)
{
    PDK_GUARD(rt->pool.registry);
    rt->pool.creating--;
}

/* ---- renewal ---- */

typedef struct leased {
    ref at;
    bool del;
    bool waits;  /* for an unanswered claim to lapse: not renewed, so that it does */
    int64_t token, guest_token;
    uint64_t epoch, op; /* op: the teardown whose `del` it is */
} leased;

static size_t all_leased(pdk_runtime *rt, leased **out)
{
    PDK_GUARD(rt->pool.registry);
    size_t n = 0, room = rt->pool.ids.count;
    *out = calloc(room + 1, sizeof **out);
    if (*out == NULL)
        return 0;
    for (pdk_node *node = pdk_map_each(&rt->pool.ids, NULL); node != NULL && n < room; node = pdk_map_each(&rt->pool.ids, node)) {
        pdk_entry *e = PDK_OF(node, pdk_entry, by_id);
        bool waits = e->reserved_until != 0 && !e->keep_del;
        bool del = e->lease == PDK_LEASE_DEL && (e->keep_del || (e->reserved != 0 && !waits));
        if (!del && !waits && ((e->state != PDK_ACTIVE && e->state != PDK_WARM) || e->token == 0))
            continue;
        leased *l = &(*out)[n++];
        pdk_entry_id(e, l->at.id);
        l->at.incarnation = e->incarnation;
        l->at.state = e->state;
        l->del = del;
        l->waits = waits;
        l->op = e->reserved;
        l->token = e->token;
        l->guest_token = e->guest_token;
        l->epoch = e->epoch;
    }
    return n;
}

/* A peer has it: forgotten here, its client closed, nothing stopped; unless that is no longer what was decided about (O5). */
static void forget_lost(pdk_runtime *rt, const leased *l)
{
    PDK_AUTO_TEXT generation = NULL;
    pdk_client *client = NULL;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
        if (e == NULL || e->incarnation != l->at.incarnation || e->epoch != l->epoch || e->reserved != 0 || e->intents > 0 ||
            e->state == PDK_ABSENT)
            return;
        generation = pdk_entry_copy_generation(e);
        client = e->client;
        e->client = NULL;
        rt->pool.stats.lost++;
        pdk_entry_move(&rt->pool, e, PDK_ABSENT);
        pdk_entry_sweep(&rt->pool, e);
    }
    pdk_client_close(rt, client, l->at.id, "lease lost");
    pdk_emit(rt, PDK_WARN, "lost", l->at.id, generation, "its lease went to a peer", NULL);
}

bool pdk_forget_lost(pdk_runtime *rt, const char *id)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_renewal answer;
    leased l = { 0 };
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e == NULL || (e->state != PDK_ACTIVE && e->state != PDK_WARM))
            return false;
        pdk_entry_id(e, l.at.id);
        l.at.incarnation = e->incarnation;
        l.epoch = e->epoch;
    }
    if (pdk_lease_renew(rt->lease, id, &answer, &err) < 0 || answer != PDK_LOST)
        return false;
    forget_lost(rt, &l);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    return e == NULL || e->state == PDK_ABSENT;
}

static void renewed(pdk_runtime *rt, const leased *l, pdk_ns before)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
    if (e != NULL && e->incarnation == l->at.incarnation && e->epoch == l->epoch && e->lease_until > 1)
        e->lease_until = pdk_after(before, pdk_seconds(rt->config.ttl));
}

static bool renew_begin(pdk_runtime *rt, const leased *l)
{
    PDK_GUARD(rt->pool.registry);
    if (l->waits) {
        pdk_entry_lapse(&rt->pool, l->at.id, pdk_lease_now(rt));
        return false;
    }
    pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
    if (e == NULL || e->incarnation != l->at.incarnation)
        return false;
    if (l->del && (e->lease != PDK_LEASE_DEL || (e->reserved != l->op && !e->keep_del)))
        return false; /* that teardown is giving it back: its `del` must not return under whoever takes the lease now */
    return e->renewing = true;
}

/* Ends it; a teardown that could not wait left the release to us, and its reservation with it. */
static void renew_end(pdk_runtime *rt, const leased *l)
{
    for (bool released = false;; released = true) {
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
            if (e == NULL) /* cannot be: `renewing` keeps it */
                return;
            if (!e->release_after || released) {
                e->renewing = false;
                if (e->release_after)
                    e->reserved = 0;
                e->release_after = false;
                pdk_entry_sweep(&rt->pool, e);
                pdk_cond_broadcast(&rt->pool.changed);
                return;
            }
        }
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_lease_release(rt->lease, l->at.id, &err) < 0)
            pdk_emit(rt, PDK_WARN, "lease_release_failed", l->at.id, NULL, "after its renewal", &err);
    }
}

/* Whether the guest is there and has seen no token but ours: 1, 0, -1 = it cannot be told. A store that has lost its state
 * does not know who was the last owner; the guest does. */
static int token_unseen(pdk_runtime *rt, const leased *l, pdk_error *err)
{
    PDK_AUTO_PACK info = PDK_NO_PACK, now = PDK_NO_PACK;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
        if (e == NULL || e->incarnation != l->at.incarnation || !pdk_pack_copy(&info, e->info))
            return 0;
    }
    int there = pdk_engine_inspect(rt, l->at.id, pdk_view_of(&info), &now, err);
    if (there <= 0)
        return there; /* gone: what has the id now, if anything, is not ours to claim */
    const char *ours = pdk_info_str(pdk_view_of(&info), "generation"), *seen = pdk_info_str(pdk_view_of(&now), "generation");
    if (ours != NULL && seen != NULL && strcmp(ours, seen) != 0)
        return 0;
    return pdk_info_token(pdk_view_of(&now)) <= l->guest_token;
}

/* It ran out, or the store lost it, and the store knows of nobody since: it is claimed again. PDK_LAPSED = no answer, or ours again
 * under a new token, which the next acquire fences the guest with. (Where no guest checks tokens the lease alone decides.) */
static pdk_renewal reclaim(pdk_runtime *rt, const leased *l, pdk_error *err)
{
    bool asks_guest = rt->fenced && !l->del;
    int64_t token = 0;
    int unseen = asks_guest ? token_unseen(rt, l, err) : 1; /* first: a claim would be in the way of whoever it is */
    if (unseen == 0)
        return PDK_LOST;
    int rc = unseen < 0 ? -1
             : l->del   ? pdk_lease_claim_for_destroy(rt->lease, l->at.id, 0, &token, err)
                        : pdk_lease_claim(rt->lease, l->at.id, 0, &token, err);
    if (rc < 0)
        pdk_emit(rt, PDK_WARN, "renewal_failed", l->at.id, NULL, NULL, err);
    if (rc <= 0)
        return rc < 0 ? PDK_LAPSED : PDK_LOST;
    if (token == l->token || !asks_guest)
        return PDK_RENEWED;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, l->at.id);
    if (e != NULL && e->incarnation == l->at.incarnation && e->epoch == l->epoch)
        e->lease_until = 1;
    return PDK_LAPSED;
}

static void renew_one(pdk_runtime *rt, const leased *l)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_renewal answer;
    pdk_ns before = pdk_lease_now(rt);
    if (pdk_lease_renew(rt->lease, l->at.id, &answer, &err) < 0) {
        pdk_emit(rt, PDK_WARN, "renewal_failed", l->at.id, NULL, NULL, &err); /* kept, and tried again */
        return;
    }
    if (answer == PDK_LAPSED)
        answer = reclaim(rt, l, &err);
    if (answer == PDK_RENEWED)
        renewed(rt, l, before);
    else if (answer == PDK_LOST && !l->del)
        forget_lost(rt, l);
}

static int renew_leases(pdk_runtime *rt, pdk_error *err)
{
    leased *all = NULL;
    size_t n = all_leased(rt, &all);
    if (all == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to renew the leases");
    for (size_t i = 0; i < n && !pdk_stopping(rt); i++) {
        if (!renew_begin(rt, &all[i]))
            continue;
        renew_one(rt, &all[i]);
        renew_end(rt, &all[i]);
    }
    free(all);
    return 0;
}

int pdk_renew(pdk_runtime *rt, pdk_error *err)
{
    pdk_ns next = pdk_after(pdk_clock_now(rt->clock), pdk_seconds(rt->config.renew_interval));
    {
        PDK_GUARD(rt->lock);
        rt->next_renew = next; /* counted from here, however long this pass takes */
    }
    if (renew_leases(rt, err) < 0)
        return -1;
    pdk_keep_guests(rt, next);
    return 0;
}

/* ---- without threads ---- */

/* When a renewal is due, for who waits now. A manual clock stands while somebody waits. */
static pdk_ns renewal_due(void *ctx)
{
    pdk_runtime *rt = ctx;
    pdk_ns now = pdk_clock_now(rt->clock);
    PDK_GUARD(rt->lock);
    if (rt->next_renew <= now)
        return pdk_now_monotonic();
    return pdk_clock_is_manual(rt->clock) ? PDK_NEVER : pdk_after(pdk_now_monotonic(), rt->next_renew - now);
}

static void renew_in_wait(void *ctx)
{
    pdk_runtime *rt = ctx;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    {
        pdk_ns now = pdk_clock_now(rt->clock);
        PDK_GUARD(rt->lock);
        if (rt->next_renew > now)
            return; /* another thread's wait was quicker */
        rt->next_renew = pdk_after(now, pdk_seconds(rt->config.renew_interval));
    }
    if (pdk_renew(rt, &err) < 0)
        pdk_emit(rt, PDK_WARN, "renewal_failed", NULL, NULL, NULL, &err);
}

void pdk_upkeep_init(pdk_runtime *rt)
{
    rt->upkeep = (pdk_upkeep){ renewal_due, renew_in_wait, rt };
}

const pdk_limit *pdk_limit_keeping(pdk_runtime *rt, const pdk_limit *limit, pdk_limit *own)
{
    if (rt->config.threads || limit->upkeep != NULL || rt->upkeep.due == NULL)
        return limit;
    *own = *limit;
    own->upkeep = &rt->upkeep;
    return own;
}

/* ---- gaps ---- */

void pdk_pass_begin(pdk_runtime *rt)
{
    pdk_ns slept = 0, elapsed, interval = pdk_seconds(rt->config.reap_interval);
    {
        PDK_GUARD(rt->lock);
        if (rt->pass_ended == 0)
            return;
        elapsed = pdk_clock_now(rt->clock) - rt->pass_ended;
        if (!pdk_clock_is_manual(rt->clock)) /* only the boot clock counts while the machine sleeps */
            slept = pdk_now_boottime() - rt->pass_boottime - (pdk_now_monotonic() - rt->pass_monotonic);
    }
    if (slept > GAP)
        pdk_emit_seconds(rt, PDK_WARN, "clock_gap", "the machine slept", pdk_to_seconds(slept));
    else if (elapsed / 3 > interval && elapsed - interval > GAP)
        pdk_emit_seconds(rt, PDK_WARN, "clock_gap", "no pass was made in time", pdk_to_seconds(elapsed));
}

void pdk_pass_end(pdk_runtime *rt)
{
    PDK_GUARD(rt->lock);
    rt->pass_ended = pdk_clock_now(rt->clock);
    rt->pass_monotonic = pdk_now_monotonic();
    rt->pass_boottime = pdk_now_boottime();
}

/* ---- threads ---- */

static void *reaper_main(void *arg)
{
    pdk_runtime *rt = arg;
    for (;;) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_pass_begin(rt);
        if (pdk_reconcile(rt, &err) < 0)
            pdk_emit(rt, PDK_WARN, "reconcile_failed", NULL, NULL, NULL, &err);
        pdk_reap(rt, &err);
        pdk_pass_end(rt);
        PDK_GUARD(rt->lock);
        pdk_ns next = pdk_after(pdk_clock_now(rt->clock), pdk_seconds(rt->config.reap_interval));
        while (!rt->stop_threads && pdk_clock_now(rt->clock) < next)
            pdk_clock_wait(rt->clock, &rt->wake, &rt->lock, next);
        if (rt->stop_threads)
            break;
    }
    PDK_GUARD(rt->lock);
    rt->reaper_runs = false;
    pdk_cond_broadcast(&rt->wake);
    return NULL;
}

static void *renewer_main(void *arg)
{
    pdk_runtime *rt = arg;
    for (;;) {
        {
            PDK_GUARD(rt->lock);
            while (!rt->stop_threads && pdk_clock_now(rt->clock) < rt->next_renew)
                pdk_clock_wait(rt->clock, &rt->wake, &rt->lock, rt->next_renew);
            if (rt->stop_threads) {
                rt->renewer_runs = false;
                pdk_cond_broadcast(&rt->wake);
                return NULL;
            }
        }
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_renew(rt, &err) < 0)
            pdk_emit(rt, PDK_WARN, "renewal_failed", NULL, NULL, NULL, &err);
    }
}

int pdk_threads_start(pdk_runtime *rt, pdk_error *err)
{
    PDK_GUARD(rt->lock);
    rt->stop_threads = false;
    int rc = 0;
    if (rt->config.reap_interval > 0 && !rt->reaper_runs) {
        rt->reaper_runs = true;
        if ((rc = pdk_thread_start(&rt->reaper, "pdk-reaper", reaper_main, rt)) != 0)
            rt->reaper_runs = false;
        rt->reaper_started = rc == 0;
    }
    if (rc == 0 && !rt->renewer_runs) {
        rt->renewer_runs = true;
        if ((rc = pdk_thread_start(&rt->renewer, "pdk-renewer", renewer_main, rt)) != 0)
            rt->renewer_runs = false;
        rt->renewer_started = rc == 0;
    }
    if (rc == 0)
        rc = pdk_watch_start(rt);
    return rc == 0 ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, rc, "cannot start the runtime's threads");
}

int pdk_threads_stop(pdk_runtime *rt, pdk_error *err)
{
    bool join_reaper = false, join_renewer = false, join_watcher = false;
    pdk_watch_end(rt);
    {
        PDK_GUARD(rt->lock);
        rt->stop_threads = true;
        pdk_cond_broadcast(&rt->wake);
        pdk_ns deadline = pdk_now_monotonic() + STOP_WAIT;
        while ((rt->reaper_runs || rt->renewer_runs || rt->watcher_runs) && pdk_cond_wait_until(&rt->wake, &rt->lock, deadline))
            ;
        if (rt->reaper_runs)
            return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "the idle checker is still at work after 5 s; shut down again");
        if (rt->renewer_runs)
            return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "the lease renewal is still at work after 5 s; shut down again");
        if (rt->watcher_runs)
            return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "the backend still waits for deaths after 5 s; shut down again");
        join_reaper = rt->reaper_started;
        join_renewer = rt->renewer_started;
        join_watcher = rt->watcher_started;
        rt->reaper_started = rt->renewer_started = rt->watcher_started = false;
    }
    if (join_reaper)
        pdk_thread_join(&rt->reaper);
    if (join_renewer)
        pdk_thread_join(&rt->renewer);
    if (join_watcher)
        pdk_thread_join(&rt->watcher);
    return 0;
}
