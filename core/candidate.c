/* candidate.c -- what is thought of a sandbox that might serve an acquire: is it alive, clean, and what does the reuse policy
 * say; and what becomes of it when it may not. No decision here hands anything out: that is acquire.c's last step.
 */
#include "acquire.h"

#include <stdio.h>
#include <string.h>

void pdk_acq_candidate_free(candidate *c)
{
    pdk_pack_free(&c->info);
    pdk_pack_free(&c->capability);
}

found pdk_acq_no_memory(acq *a)
{
    return (found)pdk_fail(a->err, PDK_E_NO_MEMORY, 0, "no memory to acquire %s", a->id);
}

bool pdk_acq_cancelled(acq *a)
{
    if (a->drains || !pdk_acq_gone(a))
        return false;
    pdk_fail(a->err, PDK_E_CANCELLED, 0, "the acquire was cancelled");
    return true;
}

found pdk_acq_deferred(acq *a, const char *reason, const char *why)
{
    pdk_fail_reason(a->err, PDK_E_REPLACEMENT_DEFERRED, reason, "sandbox %s must not be reused and %s; try again later", a->id, why);
    pdk_error_set_id(a->err, a->id);
    return FAILED;
}

found pdk_acq_collision(acq *a)
{
    pdk_fail(a->err, PDK_E_IDENTITY_COLLISION, 0,
             "sandbox id %s belongs to another identity; policies/identity.lua must give each identity an id of its own", a->id);
    pdk_error_set_id(a->err, a->id);
    return FAILED;
}

found pdk_acq_being_destroyed(acq *a)
{
    pdk_fail(a->err, PDK_E_BEING_DESTROYED, 0, "sandbox %s is being torn down; try again", a->id);
    pdk_error_set_id(a->err, a->id);
    return FAILED;
}

/* ---- replacing a candidate ---- */

static bool still_warm(const pdk_entry *e, void *ctx)
{
    (void)ctx;
    return e->state == PDK_WARM;
}

/* A teardown on the way failed: what that means for the acquire. Unknown facts stay the errors that they are. */
found pdk_acq_explain_failure(acq *a)
{
    pdk_error *e = a->err;
    if (e->kind != PDK_E_BACKEND_ERROR)
        return FAILED;
    if (strcmp(e->reason, "still_present") == 0)
        pdk_error_become(e, PDK_E_REPLACEMENT_DEFERRED, "still_present", "sandbox %s cannot be replaced yet; try again later",
                         a->id);
    else if (strcmp(e->stage, "stop") == 0)
        pdk_error_become(e, PDK_E_REPLACEMENT_DEFERRED, "quarantined", "sandbox %s could not be stopped yet; try again later",
                         a->id);
    return FAILED;
}

/* Tears the candidate down so that the acquire can go on: NOTHING, or FAILED with why it cannot be replaced now. */
found pdk_acq_replace(acq *a, const candidate *c, const char *reason, bool dead, const char *holders_reason)
{
    pdk_teardown td = { .id = a->id, .reason = reason, .ignore_holders = dead, .incarnation = c->incarnation,
                        .dirty = c->dirty || c->retry };
    if (pdk_acq_cancelled(a))
        return FAILED;
    a->drains |= a->makes; /* what is stopped in order to be replaced is replaced */
    if (c->incarnation == 0)
        td.info = pdk_view_of(&c->info);
    else if (strcmp(c->source, "warm") == 0)
        td.still = still_warm;
    switch (pdk_fence_teardown(a->rt, &td, a->err)) {
    case PDK_TD_DONE:
    case PDK_TD_REPLACED:
        return NOTHING;
    case PDK_TD_REFUSED:
        if (strcmp(td.why, "taken") == 0 || strcmp(td.why, "gone") == 0)
            return NOTHING;
        if (strcmp(td.why, "holders") == 0)
            return pdk_acq_deferred(a, holders_reason, "others hold it");
        if (strcmp(td.why, "used") == 0 && dead)
            return NOTHING; /* the verdict was about metadata that has been replaced meanwhile (E6) */
        return pdk_acq_deferred(a, "teardown_refused", "its teardown was refused");
    case PDK_TD_ERROR:
        break;
    }
    return pdk_acq_explain_failure(a);
}

/* ---- the reuse policy ---- */

int pdk_ask_reuse(pdk_runtime *rt, const pdk_reuse_facts *f, pdk_verdict *verdict, pdk_error *err)
{
    if (pdk_policy_reuse(rt->policies, f, verdict, err) == 0)
        return 0;
    pdk_error_set_id(err, f->expected_id);
    return -1;
}

static int ask(acq *a, const candidate *c, pdk_verdict *verdict)
{
    pdk_reuse_facts facts = { .source = c->source, .expected_id = a->id, .info = pdk_view_of(&c->info),
                              .requirements = pdk_view_of(&a->requirements), .capability = pdk_view_of(&c->capability),
                              .capability_fresh = c->capability_fresh, .who = &a->who, .holders = c->holders, .idle_seconds = c->idle_seconds };
    return pdk_ask_reuse(a->rt, &facts, verdict, a->err);
}

/* What the deployment can do, for the policy: { unknown = true } when nobody can say. */
static void probe(acq *a, candidate *c, bool bypass)
{
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    pdk_pack_reset(&c->capability);
    if (pdk_probe(a->rt, bypass, &c->capability, &c->capability_fresh, &why) == 0)
        return;
    pdk_emit(a->rt, PDK_WARN, "probe_failed", a->id, NULL, NULL, &why);
    pdk_pack_reset(&c->capability);
    pdk_mark m = pdk_begin_map(&c->capability);
    pdk_kv_bool(&c->capability, &m, "unknown", true);
    pdk_end(&c->capability, &m);
    c->capability_fresh = true; /* there is no better answer to be had now */
}

/* The policy's word, probes answered: the first from memory when there is an answer, the second asks past it. A third is a fault of
 * the policy. */
int pdk_acq_decide(acq *a, candidate *c, pdk_verdict *verdict)
{
    for (int probes = 0;; probes++) {
        if (ask(a, c, verdict) < 0)
            return -1;
        if (verdict->decision != PDK_PROBE)
            return 0;
        if (probes == 2)
            return pdk_fail(a->err, PDK_E_POLICY_ERROR, 0, "reuse.decide asked for a third probe in one decision about %s", a->id);
        probe(a, c, c->capability.len > 0);
    }
}

int pdk_acq_complete(acq *a)
{
    pdk_runtime *rt = a->rt;
    if (!pdk_view_bool(pdk_view_get(pdk_view_of(&a->requirements), "probe"), false))
        return 0;
    PDK_AUTO_PACK capability = PDK_NO_PACK;
    bool fresh;
    if (pdk_probe(rt, false, &capability, &fresh, a->err) < 0) {
        if (a->err->kind == PDK_E_CANCELLED || a->err->kind == PDK_E_CLOSED || pdk_now_monotonic() >= pdk_limit_current()->deadline)
            return -1; /* the caller's own end, and nothing about the deployment */
        pdk_error_become(a->err, PDK_E_UNVERIFIED, "capability", "sandbox %s is not created, as its requirements depend on it", a->id);
        pdk_error_set_id(a->err, a->id);
        return -1;
    }
    pdk_pack_reset(&a->requirements);
    return pdk_policy_resolve_again(rt->policies, &a->who, a->spec->requirements, pdk_view_of(&rt->policy_base),
                                    pdk_view_of(&capability), &a->requirements, a->err);
}

const char *pdk_acq_text_or(const char *s, const char *otherwise)
{
    return s[0] != '\0' ? s : otherwise;
}

found pdk_acq_refused(acq *a, const pdk_verdict *v)
{
    pdk_fail_reason(a->err, PDK_E_UNVERIFIED, pdk_acq_text_or(v->code, "refused"), "sandbox %s is not handed out: %s", a->id,
                    pdk_acq_text_or(v->message, "the reuse policy refuses it"));
    pdk_error_set_id(a->err, a->id);
    return FAILED;
}

found pdk_acq_policy_defers(acq *a, const pdk_verdict *v)
{
    return pdk_acq_deferred(a, pdk_acq_text_or(v->code, "incompatible"), pdk_acq_text_or(v->message, "the reuse policy defers its replacement"));
}

/* Whether the tracked or discovered candidate may serve: FOUND = yes, NOTHING = it was taken down, FAILED. */
found pdk_acq_examine(acq *a, candidate *c)
{
    if (c->retry || c->dirty) {
        if (c->holders > 0)
            return pdk_acq_deferred(a, "holders", "others hold it");
        return pdk_acq_replace(a, c, "quarantined", false, "holders");
    }
    if (!c->checked) {
        PDK_AUTO_ERROR why = PDK_NO_ERROR;
        int alive = pdk_engine_alive(a->rt, pdk_view_of(&c->info), c->token, &why);
        if (alive == 0)
            return pdk_acq_replace(a, c, "unhealthy", true, "holders");
        if (alive < 0) /* unknown is not dead */
            pdk_emit(a->rt, PDK_WARN, "health_unknown", a->id, pdk_info_str(pdk_view_of(&c->info), "generation"), NULL, &why);
    }
    pdk_verdict verdict;
    if (pdk_acq_decide(a, c, &verdict) < 0)
        return FAILED;
    switch (verdict.decision) {
    case PDK_REUSE:
        return FOUND;
    case PDK_REPLACE:
        pdk_emit(a->rt, PDK_INFO, "replacing", a->id, pdk_info_str(pdk_view_of(&c->info), "generation"),
                 pdk_acq_text_or(verdict.message, verdict.code), NULL);
        if (c->holders > 0)
            return pdk_acq_deferred(a, "incompatible", "others hold it");
        return pdk_acq_replace(a, c, "replaced", false, "incompatible");
    case PDK_DEFER:
        return pdk_acq_policy_defers(a, &verdict);
    default:
        return pdk_acq_refused(a, &verdict);
    }
}

/* ---- copying a tracked sandbox's facts ---- */

bool pdk_acq_snapshot(pdk_runtime *rt, const pdk_entry *e, candidate *c) PDK_REQUIRES(rt->pool.registry)
{
    pdk_ns now = pdk_clock_now(rt->clock);
    pdk_ns since = e->state == PDK_WARM ? e->parked_at : e->last_used;
    c->source = e->state == PDK_WARM ? "warm" : "active";
    c->incarnation = e->incarnation;
    c->token = e->guest_token;
    c->holders = e->holder_count;
    c->idle_seconds = since > 0 ? pdk_to_seconds(now - since) : 0;
    c->dirty = pdk_entry_dirty(e);
    c->retry = e->retry;
    c->checked = rt->config.health_ttl > 0 && e->health_ok_at > 0 &&
                 now - e->health_ok_at <= pdk_seconds(rt->config.health_ttl);
    return pdk_pack_copy(&c->info, e->info);
}
