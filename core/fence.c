/* fence.c -- teardown: the one path by which anything is ever stopped.
 *
 *   reserve    under the registry lock, in one critical section with the caller's "still?" test
 *   claim      the ownership lease, as `del`; refused or unanswered means no
 *   doom       the guest, where there is one; a refusal means that somebody took it: forget it, do not stop it
 *   journal    before the first stop when it is dirty, has failed before, or no guest answered the doom
 *   stop       the exact generation
 *   confirm    that generation's absence: an accepted stop is no absence
 *   finish     the backend cleans up what it left; then the journal record goes
 *   release    forget it (unless a newer generation has the id), the lease, the reservation
 *
 * A step that fails leaves everything before it in place, so that the same call can be made again; a failure is never
 * reported as success. Locks: none held on entry but an identity's turn; the registry only for moments, never across I/O.
 */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HEARTBEAT_WAIT (12 * PDK_NS_PER_S) /* row M15 */

typedef struct victim { /* what one teardown works on; copied under the registry lock, then its own */
    pdk_runtime *rt;
    pdk_teardown *td;
    uint64_t op;
    bool tracked;           /* it is the entry's own sandbox, not a candidate's */
    uint64_t incarnation;   /* of the entry, when tracked */
    pdk_pack info;
    char *generation;       /* NULL = unknown */
    int64_t expected;       /* the largest token that the guest has seen, as far as we know, */
    int64_t attempted;      /* and one of ours that it may have seen since: a fence whose answer was lost */
    int64_t token;          /* of the `del` lease */
    bool failed_before, dirty, journaled, doomed;
    bool claimed;
    bool unanswered;        /* the claim: it may still take effect */
    pdk_ns until;           /* our own deadline for the `del` lease, on the lease clock */
    bool keep_lease;        /* a stop failed and neither record nor doom says so */
    pdk_client *client;     /* detached from the entry: to be closed */
} victim;

static void victim_free(victim *v)
{
    pdk_pack_free(&v->info);
    free(v->generation);
}
#define AUTO_VICTIM __attribute__((cleanup(victim_free))) victim

static bool refuse(pdk_teardown *td, const char *why)
{
    snprintf(td->why, sizeof td->why, "%s", why);
    return false;
}

/* Whether this teardown may begin, as far as this process knows. */
static bool may_reserve(pdk_teardown *td, const pdk_entry *e, bool tracked)
{
    if (e->reserved != 0)
        return refuse(td, "reserved");
    if (e->intents > 0)
        return refuse(td, "used");
    if (td->retire && e->state != PDK_ABSENT)
        return refuse(td, "used");
    if (!td->ignore_holders && pdk_view_bool(pdk_view_get(td->info, "held"), false))
        return refuse(td, "holders"); /* by another process, says the engine: not even a doom may reach it */
    if (!tracked) /* what has been handed out or adopted meanwhile is torn down as what is tracked, or not at all */
        return (e->state != PDK_ACTIVE && e->state != PDK_WARM) || refuse(td, "used");
    if (td->incarnation != 0 && td->incarnation != e->incarnation)
        return refuse(td, "used");
    if (!td->ignore_holders && (e->holder_count > 0 || e->busy > 0))
        return refuse(td, "holders");
    if (td->still != NULL && !td->still(e, td->ctx))
        return refuse(td, "used");
    return true;
}

/* 1 = reserved, 0 = refused, -1 = no memory. */
static int reserve(victim *v, pdk_error *err)
{
    pdk_runtime *rt = v->rt;
    pdk_teardown *td = v->td;
    PDK_GUARD(rt->pool.registry);
    bool given = !pdk_view_is_nil(td->info) || td->retire;
    pdk_entry_lapse(&rt->pool, td->id, pdk_lease_now(rt));
    pdk_entry *e = given ? pdk_pool_entry(&rt->pool, td->id) : pdk_pool_find(&rt->pool, td->id);
    if (e == NULL && given)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to tear %s down", td->id);
    if (e == NULL || (e->state == PDK_ABSENT && !given)) {
        refuse(td, e != NULL && e->reserved != 0 ? "reserved" : "gone");
        return 0;
    }
    v->tracked = !given;
    if (!may_reserve(td, e, v->tracked)) {
        pdk_entry_sweep(&rt->pool, e);
        return 0;
    }
    if (!pdk_pack_copy(&v->info, given ? td->info : e->info)) {
        pdk_entry_sweep(&rt->pool, e);
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to tear %s down", td->id);
    }
    v->generation = pdk_view_dup(pdk_view_get(pdk_view_of(&v->info), "generation"));
    v->expected = pdk_info_token(pdk_view_of(&v->info));
    v->attempted = td->fenced_with;
    v->dirty = td->dirty;
    if (v->tracked) {
        v->incarnation = e->incarnation;
        v->failed_before = e->retry;
        v->journaled = e->journaled;
        v->doomed = e->doomed;
        v->dirty |= pdk_entry_dirty(e);
        v->attempted = e->token;
        if (e->guest_token > v->expected)
            v->expected = e->guest_token;
    }
    v->op = e->reserved = rt->pool.next_op++;
    e->reserved_until = 0;
    return 1;
}

/* The reservation and the lease are given back, in this order: the lease while we still have the reservation, so that no
 * acquire of ours publishes in between. */
static void give_back(victim *v)
{
    pdk_runtime *rt = v->rt;
    bool release = v->claimed && !v->keep_lease, left = false;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, v->td->id);
        pdk_ns deadline = pdk_now_monotonic() + HEARTBEAT_WAIT;
        while (release && e != NULL && e->renewing && pdk_cond_wait_until(&rt->pool.changed, &rt->pool.registry, deadline))
            e = pdk_pool_find(&rt->pool, v->td->id);
        if (release && e != NULL && e->renewing) { /* it releases when it is through */
            e->release_after = left = true;
            release = false;
        }
        if (e != NULL && v->claimed) {
            e->keep_del = v->keep_lease;
            e->lease = v->keep_lease ? PDK_LEASE_DEL : PDK_LEASE_NONE;
            if (!v->keep_lease && (e->state == PDK_ABSENT || e->incarnation == v->incarnation))
                e->lease_until = 0; /* not ours any longer: an acquire takes it anew */
        }
    }
    if (left)
        pdk_emit(rt, PDK_WARN, "lease_release_left", v->td->id, v->generation, "its renewal is still under way and releases it", NULL);
    if (release) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_lease_release(rt->lease, v->td->id, &err) < 0)
            pdk_emit(rt, PDK_WARN, "lease_release_failed", v->td->id, v->generation, v->td->reason, &err);
    }
    bool answered = !v->unanswered;
    if (!answered) { /* an answer that did not come is not a no: what may come into force is taken back, or waited for */
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        answered = pdk_lease_release(rt->lease, v->td->id, &err) == 0;
    }
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, v->td->id);
    if (e != NULL && v->unanswered) /* a release drops whatever lease was ours: the next acquire takes it anew */
        e->lease_until = 0;
    if (left) { /* so is the reservation: an acquire that came in between would lose its lease to that release */
    } else if (e != NULL && e->reserved == v->op && answered) {
        e->reserved = 0;
        pdk_entry_sweep(&rt->pool, e);
    } else if (e != NULL && e->reserved == v->op) {
        e->reserved_until = pdk_after(pdk_lease_now(rt), pdk_seconds(rt->config.ttl));
    }
    pdk_pool_check(&rt->pool);
    pdk_cond_broadcast(&rt->pool.changed);
}

/* Takes our entry out of the registry, unless another generation stands there by now. */
static void forget(victim *v)
{
    PDK_GUARD(v->rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&v->rt->pool, v->td->id);
    if (e == NULL || !v->tracked || e->incarnation != v->incarnation || e->state == PDK_ABSENT)
        return;
    v->client = e->client;
    e->client = NULL;
    pdk_entry_move(&v->rt->pool, e, PDK_ABSENT);
}

/* A stop (or what belongs to it) failed: the metadata is kept for the retry and nothing hands it out. */
static void keep_for_retry(victim *v)
{
    pdk_runtime *rt = v->rt;
    if (pdk_view_tag(pdk_view_of(&v->info)) != '{') /* only the journal knows of it, and goes on knowing */
        return;
    bool safe = v->journaled || v->doomed;
    v->keep_lease = !safe;
    PDK_GUARD(rt->pool.registry);
    rt->pool.stats.stop_failures++;
    pdk_entry *e = pdk_pool_find(&rt->pool, v->td->id);
    if (e == NULL || (v->tracked ? e->incarnation != v->incarnation : e->state != PDK_ABSENT))
        return; /* another generation is tracked here by now; the record remembers this one */
    if (!v->tracked) {
        if (!pdk_entry_set_info(&rt->pool, e, pdk_view_of(&v->info), true))
            return;
        e->guest_token = v->expected;
        pdk_entry_move(&rt->pool, e, PDK_KEPT);
        v->tracked = true;
        v->incarnation = e->incarnation;
    } else if (e->state == PDK_ACTIVE && safe) {
        v->client = e->client;
        e->client = NULL;
        pdk_entry_move(&rt->pool, e, PDK_KEPT);
    }
    pdk_entry_set_retry(&rt->pool, e, true);
    e->journaled |= v->journaled;
    e->doomed |= v->doomed;
    pdk_pool_set_due(&rt->pool, e, pdk_after(pdk_clock_now(rt->clock), pdk_seconds(rt->config.reap_interval)));
}

static int record(victim *v, pdk_error *err)
{
    if (v->journaled)
        return 0;
    if (pdk_journal_record(v->rt->journal, v->td->id, v->generation, v->td->reason, err) < 0)
        return -1;
    v->journaled = true;
    return 0;
}

static bool another_generation(const victim *v, pdk_view info)
{
    const char *now = pdk_info_str(info, "generation");
    return v->generation != NULL && now != NULL && strcmp(now, v->generation) != 0;
}

/* What the guest said to a doom under `expected`: 1 = doomed, 0 = it has seen another token, -1 = no answer. */
static int doom_under(victim *v, int64_t expected)
{
    pdk_runtime *rt = v->rt;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_client *c = NULL;
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), 1);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_engine_connect(rt, pdk_view_of(&v->info), v->token, false, &c, &err);
    if (rc == 0)
        rc = pdk_client_doom(rt, c, expected, v->token, &err);
    pdk_limit_enter(outer);
    pdk_client_close(rt, c, v->td->id, "doom");
    if (rc == 0 || (err.kind == PDK_E_LOST && strcmp(err.reason, "doomed") == 0))
        return 1;
    return err.kind == PDK_E_LOST ? 0 : -1;
}

/* 0 = somebody took it. A token of our own that reached it without an answer is nobody else's: tokens are given out once. */
static int doom(victim *v)
{
    int answer = doom_under(v, v->expected);
    return answer == 0 && v->attempted != 0 && v->attempted != v->expected ? doom_under(v, v->attempted) : answer;
}

static pdk_teardown_result failed(victim *v, pdk_error *err)
{
    pdk_error_set_id(err, v->td->id);
    keep_for_retry(v);
    pdk_emit(v->rt, PDK_ERROR, "stop_failed", v->td->id, v->generation, v->td->reason, err);
    return PDK_TD_ERROR;
}

/* Fails before anything was stopped: all stays as it was. */
static pdk_teardown_result not_begun(victim *v, pdk_error *err)
{
    pdk_error_set_id(err, v->td->id);
    pdk_emit(v->rt, PDK_ERROR, "stop_not_begun", v->td->id, v->generation, v->td->reason, err);
    return PDK_TD_ERROR;
}

/* 0 = goes on, else the teardown's result. */
static int look_again(victim *v, bool *absent, pdk_teardown_result *result, pdk_error *err)
{
    PDK_AUTO_PACK now = PDK_NO_PACK;
    int there = pdk_engine_inspect(v->rt, v->td->id, pdk_view_of(&v->info), &now, err);
    if (there < 0) {
        *result = not_begun(v, err);
        return 1;
    }
    if (there == 1 && another_generation(v, pdk_view_of(&now))) {
        *result = PDK_TD_REPLACED;
        return 1;
    }
    *absent = there == 0;
    return 0;
}

static pdk_teardown_result confirm(victim *v, pdk_error *err)
{
    PDK_AUTO_PACK now = PDK_NO_PACK;
    int there = pdk_engine_inspect(v->rt, v->td->id, pdk_view_of(&v->info), &now, err);
    if (there == 1 && !another_generation(v, pdk_view_of(&now))) {
        pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "still_present",
                        "sandbox %s is still there after its stop was accepted; destroy it again", v->td->id);
        pdk_error_set_stage(err, "stop");
        there = -1;
    }
    if (there < 0) {
        PDK_AUTO_ERROR second = PDK_NO_ERROR;
        if (record(v, &second) < 0)
            pdk_emit(v->rt, PDK_ERROR, "journal_failed", v->td->id, v->generation, v->td->reason, &second);
        return failed(v, err);
    }
    return PDK_TD_DONE;
}

static pdk_teardown_result stop(victim *v, pdk_error *err)
{
    if (pdk_engine_destroy(v->rt, pdk_view_of(&v->info), v->td->full, v->doomed, err) == 0)
        return confirm(v, err);
    PDK_AUTO_ERROR second = PDK_NO_ERROR;
    if (!v->journaled && record(v, &second) < 0) { /* the caller must know that nothing durable fences it */
        pdk_emit(v->rt, PDK_ERROR, "stop_failed", v->td->id, v->generation, v->td->reason, err);
        pdk_error_move(err, &second);
    }
    return failed(v, err);
}

/* A lease that ran out protects nobody any longer: without a guest that was doomed nothing else would refuse the stop. */
static int check_deadline(victim *v, pdk_error *err)
{
    if (v->doomed || pdk_lease_now(v->rt) < v->until - pdk_seconds(v->rt->config.ttl) / 10)
        return 0;
    return pdk_fail(err, PDK_E_LOST, 0, "the lease of %s ran out before it could be stopped; destroy it again", v->td->id);
}

/* Absent: clean up, retire, forget. */
static pdk_teardown_result finish(victim *v, pdk_error *err)
{
    pdk_runtime *rt = v->rt;
    if (pdk_engine_finish(rt, v->td->id, pdk_view_of(&v->info), err) < 0)
        return failed(v, err);
    /* when the journal alone led here, what was found was all that there is behind the id: all its records are done with, but not
     * those that somebody has made since our lease ran out */
    if (v->td->retire && check_deadline(v, err) < 0)
        return not_begun(v, err);
    if (pdk_journal_retire(rt->journal, v->td->id, v->td->retire ? NULL : v->generation, err) < 0)
        return failed(v, err);
    forget(v);
    {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.destroyed++;
    }
    pdk_emit(rt, PDK_INFO, "destroyed", v->td->id, v->generation, v->td->reason, NULL);
    return PDK_TD_DONE;
}

static pdk_teardown_result taken(victim *v)
{
    forget(v);
    refuse(v->td, "taken");
    pdk_emit(v->rt, PDK_WARN, "taken_by_a_peer", v->td->id, v->generation, v->td->reason, NULL);
    return PDK_TD_REFUSED;
}

/* Drops the records of generations of the id that are gone; what cannot be told stays recorded. */
static int retire_absent(victim *v, pdk_error *err)
{
    pdk_runtime *rt = v->rt;
    PDK_AUTO_PACK list = PDK_NO_PACK;
    pdk_view key, record;
    size_t cursor = 0;
    if (pdk_journal_list(rt->journal, &list, err) < 0)
        return -1;
    while (pdk_view_next(pdk_view_of(&list), &cursor, &key, &record)) {
        const char *id = pdk_info_str(record, "sandbox_id"), *generation = pdk_info_str(record, "generation");
        if (id == NULL || generation == NULL || strcmp(id, v->td->id) != 0 || !pdk_view_bool(pdk_view_get(record, "here"), true))
            continue; /* another sandbox's, also by its scope */
        PDK_AUTO_PACK now = PDK_NO_PACK;
        int there = pdk_engine_inspect(rt, id, record, &now, err);
        const char *seen = there == 1 ? pdk_info_str(pdk_view_of(&now), "generation") : NULL;
        if (there < 0)
            return -1;
        bool gone = there == 0 || (seen != NULL && strcmp(seen, generation) != 0);
        if (gone && pdk_journal_retire(rt->journal, id, generation, err) < 0)
            return -1;
    }
    return 0;
}

/* The journal has records of the id, and nothing else is known: what is there? 0 = goes on (with it, or *absent), -1 = that
 * was all: *result. */
static int look_for_recorded(victim *v, bool *absent, pdk_teardown_result *result, pdk_error *err)
{
    pdk_runtime *rt = v->rt;
    int there = pdk_engine_inspect(rt, v->td->id, PDK_NO_VIEW, &v->info, err);
    if (there <= 0) {
        *absent = there == 0;
        *result = PDK_TD_ERROR;
        return there < 0 ? -1 : 0;
    }
    v->generation = pdk_view_dup(pdk_view_get(pdk_view_of(&v->info), "generation"));
    v->expected = pdk_info_token(pdk_view_of(&v->info));
    int recorded = pdk_journal_has(rt->journal, v->td->id, v->generation, err);
    if (recorded == 0) { /* what is there is not what was recorded (K11) */
        *result = retire_absent(v, err) < 0 ? PDK_TD_ERROR : PDK_TD_REPLACED;
        return -1;
    }
    *result = PDK_TD_ERROR; /* and v->journaled stays: whoever recorded it may not have come to its sync, or said which one */
    return recorded < 0 ? -1 : 0;
}

/* Reserved and claimed: journal, doom, stop, confirm, finish. */
static pdk_teardown_result tear_down(victim *v, pdk_error *err)
{
    pdk_runtime *rt = v->rt;
    pdk_teardown_result result;
    bool absent = false;
    if (v->td->retire && look_for_recorded(v, &absent, &result, err) != 0)
        return result;
    if (v->failed_before && look_again(v, &absent, &result, err) != 0)
        return result;
    if (absent)
        return finish(v, err);
    if ((v->dirty || v->failed_before || v->td->retire) && record(v, err) < 0)
        return not_begun(v, err);
    if (rt->fenced && !v->doomed) {
        int answer = doom(v);
        if (answer == 0)
            return taken(v);
        v->doomed = answer == 1;
        if (answer < 0 && (check_deadline(v, err) < 0 || record(v, err) < 0)) /* no guest will refuse: something durable must */
            return not_begun(v, err);
    }
    if (!rt->fenced && !v->journaled) {
        PDK_AUTO_ERROR why = PDK_NO_ERROR;
        if (record(v, &why) < 0) /* it is clean: best effort */
            pdk_emit(rt, PDK_WARN, "journal_failed", v->td->id, v->generation, v->td->reason, &why);
    }
    if (check_deadline(v, err) < 0) /* what is recorded must not serve again, stopped or not */
        return v->journaled ? failed(v, err) : not_begun(v, err);
    result = stop(v, err);
    return result == PDK_TD_DONE ? finish(v, err) : result;
}

pdk_teardown_result pdk_fence_teardown(pdk_runtime *rt, pdk_teardown *td, pdk_error *err)
{
    AUTO_VICTIM v = { .rt = rt, .td = td };
    td->why[0] = '\0';
    int reserved = reserve(&v, err);
    if (reserved <= 0)
        return reserved < 0 ? PDK_TD_ERROR : PDK_TD_REFUSED;
    /* a teardown that has begun is drained, whatever the limit of the call that asked for it */
    pdk_limit limit = pdk_limit_for(&PDK_NO_LIMIT, rt->config.stop_timeout + 60);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    pdk_teardown_result result = PDK_TD_REFUSED;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    v.until = pdk_after(pdk_lease_now(rt), pdk_seconds(rt->config.ttl)); /* counted from before it was asked for */
    int claim = pdk_lease_claim_for_destroy(rt->lease, td->id, v.tracked ? 0 : v.expected, &v.token, &why);
    v.claimed = claim == 1;
    v.unanswered = claim < 0;
    if (claim != 1) {
        refuse(td, claim == 0 ? "peer" : "unavailable");
        pdk_emit(rt, PDK_WARN, "teardown_refused", td->id, v.generation, td->reason, claim < 0 ? &why : NULL);
    } else {
        {
            PDK_GUARD(rt->pool.registry);
            pdk_entry *e = pdk_pool_find(&rt->pool, td->id);
            if (e != NULL)
                e->lease = PDK_LEASE_DEL;
        }
        pdk_emit(rt, PDK_DEBUG, "teardown", td->id, v.generation, td->reason, NULL);
        result = tear_down(&v, err);
    }
    pdk_client_close(rt, v.client, td->id, td->reason);
    give_back(&v);
    pdk_limit_enter(outer);
    return result;
}

void pdk_fence_forget_replaced(pdk_runtime *rt, const char *id, uint64_t incarnation)
{
    pdk_client *client = NULL;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e == NULL || e->reserved != 0 || e->intents > 0 || !e->retry || (incarnation != 0 && e->incarnation != incarnation))
            return;
        client = e->client;
        e->client = NULL;
        pdk_entry_move(&rt->pool, e, PDK_ABSENT);
        pdk_entry_sweep(&rt->pool, e);
    }
    pdk_client_close(rt, client, id, "replaced");
}
