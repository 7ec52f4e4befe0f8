/* reconcile.c -- orphans: sandboxes that the engine runs and no runtime owns, since a host crashed or a record was lost.
 *
 * One becomes a warm sandbox here, so that its identity finds it and idleness ends it; if what it attests demands replacement it
 * is destroyed instead. With a store that several processes share it must have been unowned for one full TTL first, in which a
 * crashed owner's lease runs out and a live one renews; a reappearing owner restarts the wait, an unreadable store defers it.
 *
 * The list of what was seen unowned belongs to the one reconcile that runs at a time (`reconciling`, under the life lock).
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define TURN_WAIT 0.1 /* seconds; the next pass tries again */

typedef struct pdk_orphan { /* the reconcile's own */
    struct pdk_orphan *next;
    pdk_ns since;           /* lease clock */
    bool seen;              /* in this pass */
    int64_t token;          /* that its guest had seen then: a larger one = it has had an owner since */
    char *generation;       /* NULL = unknown */
    char id[64];
} pdk_orphan;

static void orphan_free(pdk_orphan *o)
{
    free(o->generation);
    free(o);
}

static bool same(const char *a, const char *b)
{
    return a == NULL ? b == NULL : b != NULL && strcmp(a, b) == 0;
}

static void forget_orphan(pdk_runtime *rt, const char *id, const char *generation)
{
    for (pdk_orphan **at = &rt->orphans; *at != NULL; at = &(*at)->next)
        if (strcmp((*at)->id, id) == 0 && same((*at)->generation, generation)) {
            pdk_orphan *gone = *at;
            *at = gone->next;
            orphan_free(gone);
            return;
        }
}

/* Whether it has been unowned for long enough; remembers it when it has not. */
static bool waited(pdk_runtime *rt, const char *id, const char *generation, int64_t token)
{
    pdk_ns now = pdk_lease_now(rt);
    if (strcmp(pdk_lease_type(rt->lease), "memory") == 0) /* one instance: there is nobody to wait for */
        return true;
    for (pdk_orphan *o = rt->orphans; o != NULL; o = o->next)
        if (strcmp(o->id, id) == 0 && same(o->generation, generation)) {
            o->seen = true;
            if (token != o->token)
                o->since = now;
            o->token = token;
            return now - o->since >= pdk_seconds(rt->config.ttl);
        }
    pdk_orphan *o = calloc(1, sizeof *o);
    if (o == NULL || (generation != NULL && (o->generation = strdup(generation)) == NULL)) {
        free(o);
        return false;
    }
    strncpy(o->id, id, sizeof o->id - 1);
    o->since = now;
    o->token = token;
    o->seen = true;
    o->next = rt->orphans;
    rt->orphans = o;
    return false;
}

/* What was not there in this pass is forgotten: seen again, it waits again. */
static void sweep_orphans(pdk_runtime *rt)
{
    for (pdk_orphan **at = &rt->orphans; *at != NULL;) {
        pdk_orphan *o = *at;
        if (o->seen) {
            o->seen = false;
            at = &o->next;
        } else {
            *at = o->next;
            orphan_free(o);
        }
    }
}

void pdk_reconcile_forget(pdk_runtime *rt)
{
    while (rt->orphans != NULL) {
        pdk_orphan *o = rt->orphans;
        rt->orphans = o->next;
        orphan_free(o);
    }
}

static pdk_identity identity_of(pdk_view info, bool *known)
{
    pdk_view who = pdk_view_get(info, "identity");
    pdk_identity id = { "", "", 0, 0 };
    const char *user = pdk_view_str(pdk_view_get(who, "user"), &id.user_len);
    const char *thread = pdk_view_str(pdk_view_get(who, "thread"), &id.thread_len);
    *known = user != NULL && thread != NULL;
    if (*known) {
        id.user = user;
        id.thread = thread;
    } else {
        id.user_len = id.thread_len = 0;
    }
    return id;
}

/* What the reuse policy says of it: 1 = keep, 0 = replace, -1 = it cannot be told (then it is left alone). */
static int judge(pdk_runtime *rt, pdk_view info, const char *id, pdk_error *err)
{
    PDK_AUTO_PACK requirements = PDK_NO_PACK;
    bool known;
    pdk_verdict verdict;
    pdk_identity who = identity_of(info, &known);
    if (pdk_policy_resolve(rt->policies, &who, PDK_NO_VIEW, pdk_view_of(&rt->policy_base), &requirements, err) < 0)
        return -1;
    pdk_reuse_facts facts = { .source = "discovered", .expected_id = id, .info = info, .requirements = pdk_view_of(&requirements),
                              .who = known ? &who : NULL };
    if (pdk_ask_reuse(rt, &facts, &verdict, err) < 0)
        return -1;
    return verdict.decision != PDK_REPLACE;
}

/* Puts it into the warm pool. Its lease is taken anew, with a token of its own, when somebody acquires it. */
static bool enter_pool(pdk_runtime *rt, pdk_view info, const char *id, int64_t token, uint64_t *incarnation)
{
    bool known;
    pdk_identity who = identity_of(info, &known);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_entry(&rt->pool, id);
    if (e == NULL)
        return false;
    bool ok = e->state == PDK_ABSENT && e->reserved == 0 && e->intents == 0 && !atomic_load(&rt->closing) &&
              pdk_entry_set_info(&rt->pool, e, info, true) && (!known || pdk_entry_set_identity(e, &who));
    if (ok) {
        pdk_entry_move(&rt->pool, e, PDK_WARM);
        e->parked_at = pdk_clock_now(rt->clock);
        e->lease = PDK_LEASE_OWN;
        e->token = token; /* so that it is renewed; its guest learns of it when somebody acquires it */
        e->guest_token = pdk_info_token(info);
        e->lease_until = 0;
        *incarnation = e->incarnation;
    }
    pdk_entry_sweep(&rt->pool, e);
    return ok;
}

static void adopt(pdk_runtime *rt, pdk_view info, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int64_t token = 0;
    uint64_t incarnation = 0;
    /* A lease does not keep two threads of one instance apart: without the turn an acquire of the id could be half-way, take the
     * same lease, and lose it to our release. Whoever has the turn is at work on it: then there is nothing to adopt. */
    PDK_AUTO_TURN turn = PDK_NO_TURN;
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), TURN_WAIT);
    if (pdk_turn_enter_id(rt->serial, id, &turn, &limit, &err) < 0)
        return;
    {
        PDK_GUARD(rt->pool.registry);
        if (pdk_pool_find(&rt->pool, id) != NULL)
            return;
    }
    int claimed = pdk_lease_claim(rt->lease, id, pdk_info_token(info), &token, &err);
    if (claimed <= 0) {
        if (claimed < 0)
            pdk_emit(rt, PDK_WARN, "adoption_deferred", id, generation, NULL, &err);
        return;
    }
    if (!enter_pool(rt, info, id, token, &incarnation)) {
        if (pdk_lease_release(rt->lease, id, &err) < 0)
            pdk_emit(rt, PDK_WARN, "lease_release_failed", id, generation, "adoption", &err);
        return;
    }
    forget_orphan(rt, id, generation);
    pdk_emit(rt, PDK_INFO, "adopted", id, generation, "no runtime owned it", NULL);
    pdk_ask_idle(rt, id, incarnation);
}

static void remove_orphan(pdk_runtime *rt, pdk_view info, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_teardown td = { .id = id, .reason = "orphan", .info = info, .full = true };
    if (pdk_fence_teardown(rt, &td, &err) == PDK_TD_DONE)
        forget_orphan(rt, id, generation);
}

static void look_at(pdk_runtime *rt, pdk_view info)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    const char *id = pdk_info_str(info, "sandbox_id"), *generation = pdk_info_str(info, "generation");
    size_t len = id == NULL ? 0 : strlen(id);
    if (len < 1 || len > 63 || strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") != len)
        return; /* none that this runtime could ever hand out */
    if (pdk_view_bool(pdk_view_get(info, "owned"), false) || pdk_view_bool(pdk_view_get(info, "held"), false)) {
        forget_orphan(rt, id, generation);
        return;
    }
    {
        PDK_GUARD(rt->pool.registry);
        if (pdk_pool_find(&rt->pool, id) != NULL)
            return;
    }
    pdk_lease_owner owner;
    int owned = pdk_lease_owner_of(rt->lease, id, &owner, &err);
    if (owned != 0) {
        if (owned < 0)
            pdk_emit(rt, PDK_WARN, "adoption_deferred", id, generation, NULL, &err);
        forget_orphan(rt, id, generation); /* an owner, or who knows: it waits anew */
        return;
    }
    if (!waited(rt, id, generation, pdk_info_token(info)))
        return;
    int quarantined = pdk_journal_has(rt->journal, id, generation, &err);
    bool doomed = pdk_view_bool(pdk_view_get(info, "doomed"), false); /* by somebody who crashed: it serves nobody */
    int keep = quarantined != 0 || doomed ? 0 : judge(rt, info, id, &err);
    if (quarantined < 0 || keep < 0)
        pdk_emit(rt, PDK_WARN, "adoption_deferred", id, generation, NULL, &err);
    else if (quarantined == 1 || keep == 0)
        remove_orphan(rt, info, id, generation);
    else
        adopt(rt, info, id, generation);
}

int pdk_reconcile(pdk_runtime *rt, pdk_error *err)
{
    PDK_AUTO_PACK list = PDK_NO_PACK;
    pdk_view key, info;
    PDK_AUTO_ERROR unpublished = PDK_NO_ERROR;
    size_t cursor = 0;
    {
        PDK_GUARD(rt->lock);
        if (rt->reconciling)
            return 0;
        rt->reconciling = true;
    }
    if (pdk_journal_republish(rt->journal, &unpublished) < 0)
        pdk_emit(rt, PDK_WARN, "republish_failed", NULL, NULL, "other machines may not see what is quarantined here", &unpublished);
    int rc = pdk_iface_has(rt->backend, "list") ? pdk_engine_list(rt, &list, err) : 0;
    while (rc == 0 && pdk_view_next(pdk_view_of(&list), &cursor, &key, &info))
        look_at(rt, info);
    if (rc == 0)
        sweep_orphans(rt);
    PDK_GUARD(rt->lock);
    rt->reconciling = false;
    return rc;
}
