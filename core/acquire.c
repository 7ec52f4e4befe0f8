/* acquire.c -- handing a sandbox out: reuse -> reclaim -> lock -> discover -> create -> ready -> register. acquiring.c takes the
 * turns around it.
 *
 * Nothing else hands out. The last step (install) checks, under the registry lock, everything that may have changed while
 * I/O was under way: reservation, identity, generation, epoch, marks.
 *
 * Locks: the identity's turn for the whole of it, the id's turn (also across processes) from discovery on, the registry
 * for moments. Failure paths: every step that has created something takes it back through fence.c before it fails.
 */
#include "acquire.h"

#include <stdio.h>
#include <string.h>

/* What is tracked under the acquire's id, or NULL. */
static pdk_entry *tracked(pdk_runtime *rt, const acq *a) PDK_REQUIRES(rt->pool.registry)
{
    return pdk_pool_find_hashed(&rt->pool, a->id, a->id_hash);
}

/* ---- handing out ---- */

/* A live binding of a holder to another identity's sandbox: it does not move (L12). Also looked at when the sandbox is at hand: the
 * same name may have been bound by another acquire since this one began. */
static bool bound_elsewhere(acq *a, const pdk_holder *h)
{
    if (h == NULL || h->incarnation != h->entry->incarnation || h->entry->state != PDK_ACTIVE ||
        (!a->anonymous && pdk_entry_is(h->entry, &a->who)))
        return false;
    pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "holder %s is bound to sandbox %s of another identity; release it first", a->holder,
             h->entry->id);
    return true;
}

/* Binds the holder and makes the box: all that can fail for lack of memory. */
static found make_box(pdk_runtime *rt, acq *a, pdk_entry *e, const char *source) PDK_REQUIRES(rt->pool.registry)
{
    const char *holder = a->holder[0] != '\0' ? a->holder : NULL;
    pdk_holder *h = holder == NULL ? NULL : pdk_pool_holder(&rt->pool, holder);
    if (bound_elsewhere(a, h))
        return FAILED;
    bool fresh = holder != NULL && h == NULL;
    a->bound_before = h != NULL && h->entry == e && h->incarnation == e->incarnation && h->token == e->token;
    h = holder == NULL ? NULL : pdk_pool_bind(&rt->pool, e, holder);
    if (holder != NULL && h == NULL)
        return pdk_acq_no_memory(a);
    a->box = pdk_box_new(rt, e, holder, source, true);
    if (a->box != NULL)
        return FOUND;
    if (fresh)
        pdk_pool_unbind(&rt->pool, h);
    return pdk_acq_no_memory(a);
}

static void note_use(pdk_runtime *rt, const acq *a, pdk_entry *e) PDK_REQUIRES(rt->pool.registry)
{
    e->park_asked |= a->holder[0] != '\0';
    e->last_used = pdk_clock_now(rt->clock);
    rt->pool.stats.acquires++;
    if (e->heap_at == 0 && rt->config.idle_timeout > 0)
        pdk_pool_set_due(&rt->pool, e, pdk_after(e->last_used, pdk_seconds(rt->config.idle_timeout)));
    pdk_pool_check(&rt->pool);
}

static found hand_out_active(pdk_runtime *rt, acq *a, pdk_entry *e) PDK_REQUIRES(rt->pool.registry)
{
    found ok = make_box(rt, a, e, "active");
    if (ok == FOUND)
        note_use(rt, a, e);
    return ok;
}

static bool lease_good(pdk_runtime *rt, const pdk_entry *e)
{
    pdk_ns margin = pdk_seconds(rt->config.ttl) / 10;
    return e->lease_until > 0 && pdk_lease_now(rt) < e->lease_until - margin;
}

/* Publishes ownership: intent, take, epoch. 1 = ours (*token, *epoch), 0 = a peer is destroying it, -1 = error. On 1 the
 * intent stays until install or withdraw. */
static int publish(acq *a, int64_t floor, int64_t *token, uint64_t *epoch, bool *changed)
{
    pdk_runtime *rt = a->rt;
    pdk_ns before;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_entry(&rt->pool, a->id);
        if (e == NULL)
            return pdk_acq_no_memory(a);
        if (e->reserved != 0) {
            pdk_entry_sweep(&rt->pool, e);
            return pdk_acq_being_destroyed(a);
        }
        e->intents++;
        before = pdk_lease_now(rt);
    }
    int rc = pdk_lease_take(rt->lease, a->id, floor, token, a->err);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a); /* the intent kept it */
    if (rc == 1) {
        *epoch = ++e->epoch;
        e->lease = PDK_LEASE_OWN;
        *changed = *token != e->guest_token; /* not e->token: an acquire that failed after its take has set that, and no more */
        e->token = *token;
        e->lease_until = pdk_after(before, pdk_seconds(rt->config.ttl));
    } else {
        e->intents--;
        pdk_entry_sweep(&rt->pool, e);
    }
    return rc;
}

static void withdraw(acq *a, bool release_lease)
{
    pdk_runtime *rt = a->rt;
    if (release_lease) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_lease_release(rt->lease, a->id, &err) < 0)
            pdk_emit(rt, PDK_WARN, "lease_release_failed", a->id, NULL, "acquire failed", &err);
    }
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a);
    if (e == NULL)
        return;
    if (release_lease) {
        e->lease_until = 0;
        e->lease = PDK_LEASE_NONE;
    }
    e->intents--;
    pdk_entry_sweep(&rt->pool, e);
}

/* May this entry become the candidate's sandbox? FOUND, or why not. */
static found admissible(acq *a, const pdk_entry *e, const candidate *c, uint64_t epoch)
{
    const char *gen = pdk_info_str(pdk_view_of(&c->info), "generation");
    if (atomic_load(&a->rt->closing))
        return (found)pdk_fail(a->err, PDK_E_CLOSED, 0, "the runtime is shutting down");
    if (e->reserved != 0 || atomic_load(&a->unwanted))
        return pdk_acq_being_destroyed(a);
    if (e->has_identity && !a->anonymous && !pdk_entry_is(e, &a->who))
        return pdk_acq_collision(a);
    if (e->epoch != epoch)
        return pdk_acq_deferred(a, "teardown_refused", "another acquire has published it meanwhile");
    if (c->incarnation != 0)
        return e->incarnation == c->incarnation && !e->retry ? FOUND : NOTHING;
    if (e->retry && (gen == NULL || e->generation == NULL || strcmp(gen, e->generation) == 0))
        return pdk_acq_deferred(a, "quarantined", "a stop of it failed, which is repeated within reap_interval");
    return FOUND;
}

/* The one place that hands out anything but an active sandbox. Consumes the intent when it succeeds. */
static found install(acq *a, const candidate *c, pdk_client **client, int64_t token, uint64_t epoch)
{
    pdk_runtime *rt = a->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a);
    found ok = admissible(a, e, c, epoch);
    if (ok != FOUND)
        return ok;
    if (!a->anonymous && !pdk_entry_set_identity(e, &a->who))
        return pdk_acq_no_memory(a);
    if (c->incarnation == 0 && !pdk_entry_set_info(&rt->pool, e, pdk_view_of(&c->info), true))
        return pdk_acq_no_memory(a);
    if (!pdk_entry_set_requirements(&rt->pool, e, pdk_view_of(&a->requirements)))
        return pdk_acq_no_memory(a);
    e->guest_token = token;
    if ((ok = make_box(rt, a, e, c->source)) != FOUND)
        return ok;
    pdk_client *old = e->client; /* none but on a sandbox that was discovered again */
    e->client = *client;
    *client = old;
    pdk_entry_move(&rt->pool, e, PDK_ACTIVE);
    e->intents--;
    pdk_entry_set_retry(&rt->pool, e, false);
    e->health_ok_at = pdk_clock_now(rt->clock);
    if (e->created_at == 0)
        e->created_at = e->health_ok_at;
    note_use(rt, a, e);
    return FOUND;
}

/* The fence was refused or not answered. A doomed guest is remembered, so that no further acquire tries it. */
static found not_fenced(acq *a, const candidate *c)
{
    pdk_runtime *rt = a->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a);
    if (e != NULL && c->incarnation != 0 && e->incarnation == c->incarnation && a->err->kind == PDK_E_LOST &&
        strcmp(a->err->reason, "doomed") == 0)
        pdk_entry_doomed(&rt->pool, e, pdk_clock_now(rt->clock));
    return FAILED;
}

/* Somebody else may have owned it, and no guest can say what they did: it may be over by now. Under our lease the answer holds. */
static found still_there(acq *a, const candidate *c, int64_t token)
{
    int alive = pdk_engine_alive(a->rt, pdk_view_of(&c->info), token, a->err);
    if (alive == 0)
        pdk_fail(a->err, PDK_E_LOST, 0, "sandbox %s has ended while another runtime owned it; acquire again", a->id);
    return alive == 1 ? FOUND : FAILED;
}

/* Ownership is published: connect, fence, last checks, install. `fenced_with` is set once the guest may know the token. */
static found admit(acq *a, candidate *c, int64_t token, uint64_t epoch, bool changed, int64_t *fenced_with)
{
    pdk_runtime *rt = a->rt;
    pdk_client *client = NULL;
    if (pdk_engine_connect(rt, pdk_view_of(&c->info), token, true, &client, a->err) < 0)
        return FAILED;
    found ok = FOUND;
    if (rt->fenced && token != c->token) {
        *fenced_with = token; /* also when no answer comes: the guest may have seen it */
        if (pdk_client_fence(rt, client, token, a->err) < 0)
            ok = not_fenced(a, c);
    }
    const char *gen = pdk_info_str(pdk_view_of(&c->info), "generation");
    if (ok == FOUND && changed) { /* somebody else may have had it: what did they record? */
        int quarantined = pdk_journal_has(rt->journal, a->id, gen, a->err);
        if (quarantined != 0)
            ok = quarantined < 0 ? FAILED : pdk_acq_deferred(a, "quarantined", "it is quarantined");
    }
    if (ok == FOUND && changed && !rt->fenced && strcmp(c->source, "created") != 0)
        ok = still_there(a, c, token);
    if (ok == FOUND && strcmp(c->source, "discovered") == 0) {
        pdk_verdict verdict;
        if (pdk_acq_decide(a, c, &verdict) < 0)
            ok = FAILED;
        else if (verdict.decision != PDK_REUSE)
            ok = verdict.decision == PDK_REFUSE ? pdk_acq_refused(a, &verdict) : pdk_acq_policy_defers(a, &verdict);
    }
    if (ok == FOUND)
        ok = install(a, c, &client, token, epoch); /* takes it, and leaves what is to be closed instead, if anything */
    pdk_client_close(rt, client, a->id, "acquire");
    return ok;
}

/* Publishes ownership of the candidate and hands it out. NOTHING = a peer is destroying it, or it changed meanwhile. */
static found enlist(acq *a, candidate *c, int64_t *fenced_with)
{
    pdk_runtime *rt = a->rt;
    int64_t token = 0;
    uint64_t epoch = 0;
    bool changed = false;
    if (pdk_acq_cancelled(a))
        return FAILED;
    int rc = publish(a, c->incarnation == 0 ? c->token : 0, &token, &epoch, &changed); /* the floor: only of one just discovered */
    if (rc < 0)
        return FAILED;
    if (rc == 0) { /* dropped here without being stopped: its end is the peer's work */
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = tracked(rt, a);
        if (e != NULL && c->incarnation != 0 && e->incarnation == c->incarnation && e->state == PDK_WARM) {
            pdk_entry_move(&rt->pool, e, PDK_ABSENT);
            pdk_entry_sweep(&rt->pool, e);
        }
        return NOTHING;
    }
    found ok = admit(a, c, token, epoch, changed || c->incarnation == 0, fenced_with);
    if (ok != FOUND)
        withdraw(a, strcmp(c->source, "discovered") == 0); /* a created one's lease goes on until it is rolled back */
    else
        pdk_emit(rt, PDK_INFO, "acquired", a->id, pdk_info_str(pdk_view_of(&c->info), "generation"), c->source, NULL);
    return ok;
}

/* ---- the steps ---- */

/* Between two steps: one who has gone gets nothing begun any more. */
static found next_step(acq *a, found (*step)(acq *a))
{
    return pdk_acq_cancelled(a) ? FAILED : step(a);
}

/* The lease of an active sandbox has run out (a pause, a lost store): take it again before anybody uses it. */
static found republish(acq *a, const candidate *c)
{
    pdk_runtime *rt = a->rt;
    int64_t token = 0;
    uint64_t epoch = 0;
    bool changed = false;
    int rc = publish(a, 0, &token, &epoch, &changed);
    if (rc < 0)
        return FAILED;
    pdk_client *client = NULL;
    bool gone = rc == 0;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = tracked(rt, a);
        if (e == NULL || e->incarnation != c->incarnation)
            client = NULL;
        else if (gone) {
            client = e->client;
            e->client = NULL;
            pdk_entry_move(&rt->pool, e, PDK_ABSENT);
            pdk_entry_sweep(&rt->pool, e);
        } else {
            client = pdk_client_ref(e->client);
        }
    }
    if (gone) {
        pdk_client_close(rt, client, a->id, "lost to a peer");
        return NOTHING;
    }
    found ok = client == NULL ? NOTHING : FOUND;
    if (ok == FOUND) { /* after a lapse the journal is read again */
        int quarantined = pdk_journal_has(rt->journal, a->id, pdk_info_str(pdk_view_of(&c->info), "generation"), a->err);
        if (quarantined != 0)
            ok = quarantined < 0 ? FAILED : pdk_acq_deferred(a, "quarantined", "it is quarantined");
        else if (changed && !rt->fenced)
            ok = still_there(a, c, token);
        else if (changed && pdk_client_fence(rt, client, token, a->err) < 0)
            ok = not_fenced(a, c);
    }
    pdk_client_unref(client);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a);
    e->intents--;
    if (ok != FOUND)
        e->lease_until = 0; /* the next acquire must not take it for good: nobody has read the journal, or fenced the guest */
    else if (e->incarnation == c->incarnation && e->epoch == epoch)
        e->guest_token = token;
    pdk_entry_sweep(&rt->pool, e);
    return ok;
}

/* E7, E8: the identity's active sandbox has another id than the policy now expects. */
static found outdated(acq *a, const candidate *c, const char *old_id)
{
    if (c->holders > 0)
        return pdk_acq_deferred(a, "identity_outdated", "its predecessor under another id is still held");
    char expected[64];
    memcpy(expected, a->id, sizeof expected);
    snprintf(a->id, sizeof a->id, "%s", old_id); /* pdk_acq_replace() works on a->id */
    found ok = pdk_acq_replace(a, c, "identity_outdated", false, "identity_outdated");
    memcpy(a->id, expected, sizeof expected);
    return ok;
}

static found reuse_active(acq *a);
static found reclaim_warm(acq *a);

/* A tracked sandbox could not be taken. `lost`: a peer has fenced it meanwhile; it is the peer's, and the acquire goes on to find
 * it as such. No answer from one whose health was only trusted: it is looked at once more, and now it is asked; so is one that is
 * held and has ended in a peer's hands, as what is dead is replaced whoever holds it. */
static found after_failure(acq *a, const candidate *c)
{
    pdk_runtime *rt = a->rt;
    bool lost = a->err->kind == PDK_E_LOST, again = a->err->kind == PDK_E_BACKEND_ERROR && c->checked, held;
    pdk_client *client = NULL;
    if (!lost && !again)
        return FAILED;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = tracked(rt, a);
        if (e == NULL || e->incarnation != c->incarnation || e->reserved != 0)
            return FAILED;
        e->health_ok_at = 0; /* also where this one fails: the next one must not trust it again */
        held = e->holder_count > 0;
        if (held && (!lost || rt->fenced || !c->checked))
            return FAILED;
        if (lost && !held) {
            client = e->client;
            e->client = NULL;
            rt->pool.stats.lost++;
            pdk_entry_move(&rt->pool, e, PDK_ABSENT);
            pdk_entry_sweep(&rt->pool, e);
        }
    }
    pdk_client_close(rt, client, a->id, "lost to a peer");
    pdk_emit(rt, PDK_WARN, lost && !held ? "lost" : "health_doubted", a->id,
             pdk_info_str(pdk_view_of(&c->info), "generation"), c->source, a->err);
    pdk_error_clear(a->err);
    if (held)
        return next_step(a, reuse_active);
    return again ? next_step(a, reclaim_warm) : NOTHING;
}

static found reuse_active(acq *a)
{
    pdk_runtime *rt = a->rt;
    AUTO_CANDIDATE c = { .source = "active" };
    char old_id[64] = "";
    bool good = false;
    if (a->anonymous)
        return NOTHING;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_by_identity(&rt->pool, &a->who);
        if (e == NULL || e->reserved != 0)
            return NOTHING;
        if (!pdk_acq_snapshot(rt, e, &c))
            return pdk_acq_no_memory(a);
        if (strcmp(e->id, a->id) != 0)
            snprintf(old_id, sizeof old_id, "%s", e->id);
        good = lease_good(rt, e);
    }
    if (old_id[0] != '\0')
        return outdated(a, &c, old_id);
    found ok = pdk_acq_examine(a, &c);
    if (ok == FOUND && !good && (ok = republish(a, &c)) == FAILED && a->err->kind == PDK_E_LOST)
        ok = after_failure(a, &c);
    if (ok != FOUND)
        return ok;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = tracked(rt, a);
    if (e == NULL || e->state != PDK_ACTIVE || e->incarnation != c.incarnation || e->reserved != 0 || e->retry ||
        pdk_entry_dirty(e) || e->lease_until == 0) /* also when its lease was given back meanwhile: taken anew in the id's turn */
        return NOTHING;
    if (!c.checked)
        e->health_ok_at = pdk_clock_now(rt->clock);
    rt->pool.stats.active++;
    return hand_out_active(rt, a, e);
}

static found reclaim_warm(acq *a)
{
    pdk_runtime *rt = a->rt;
    AUTO_CANDIDATE c = { .source = "warm" };
    if (a->anonymous)
        return NOTHING;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = tracked(rt, a);
        if (e == NULL || e->state == PDK_ABSENT)
            return NOTHING;
        if (e->has_identity && !pdk_entry_is(e, &a->who))
            return pdk_acq_collision(a);
        if (e->state != PDK_WARM || e->reserved != 0)
            return NOTHING;
        if (e->retry)
            return pdk_acq_deferred(a, "quarantined", "a stop of it failed, which is repeated within reap_interval");
        if (!pdk_acq_snapshot(rt, e, &c))
            return pdk_acq_no_memory(a);
    }
    found ok = pdk_acq_examine(a, &c);
    int64_t fenced_with = 0;
    if (ok == FOUND)
        ok = enlist(a, &c, &fenced_with);
    if (ok == FAILED)
        return after_failure(a, &c);
    if (ok == FOUND) {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.warm++;
    }
    return ok;
}

/* A sandbox whose stop failed, or whose recycling did: once more, inline (K15). M7: if another generation has come, it is
 * that one's turn. Also: nothing goes on while a teardown of the id is under way here. */
static found retry_kept(acq *a)
{
    pdk_runtime *rt = a->rt;
    AUTO_CANDIDATE c = { .source = "kept" };
    bool reserved;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = tracked(rt, a);
        if (e == NULL)
            return NOTHING;
        if (e->has_identity && !a->anonymous && !pdk_entry_is(e, &a->who))
            return pdk_acq_collision(a);
        reserved = e->reserved != 0;
        if (!reserved && (e->state == PDK_ABSENT || !e->retry))
            return NOTHING;
        if (!pdk_acq_snapshot(rt, e, &c))
            return pdk_acq_no_memory(a);
    }
    if (!reserved)
        return pdk_acq_examine(a, &c);
    int quarantined = c.retry || c.dirty ? 1 : pdk_journal_has(rt->journal, a->id, NULL, a->err);
    if (quarantined < 0)
        return FAILED;
    return quarantined ? pdk_acq_deferred(a, "teardown_refused", "another teardown is at work on it") : pdk_acq_being_destroyed(a);
}

/* Records of generations that nothing here tracks and nothing has discovered: proven absent, or stopped, before another one is
 * made under the id. The sandbox may be there without an endpoint. */
static found retire_records(acq *a)
{
    pdk_runtime *rt = a->rt;
    a->drains = true; /* from here on it is one sequence: what has been begun for an id is brought to its end */
    if (a->anonymous)
        return NOTHING;
    for (int round = 0; round < 3; round++) {
        int recorded = pdk_journal_has(rt->journal, a->id, NULL, a->err);
        if (recorded <= 0)
            return recorded < 0 ? FAILED : NOTHING;
        pdk_teardown td = { .id = a->id, .reason = "quarantined", .retire = true, .dirty = true, .full = true };
        pdk_teardown_result r = pdk_fence_teardown(rt, &td, a->err);
        if (r == PDK_TD_ERROR)
            return pdk_acq_explain_failure(a);
        if (r == PDK_TD_REFUSED && strcmp(td.why, "taken") != 0)
            return pdk_acq_deferred(a, "teardown_refused", "its teardown was refused");
    }
    return NOTHING;
}

static found discover(acq *a)
{
    pdk_runtime *rt = a->rt;
    AUTO_CANDIDATE c = { .source = "discovered", .checked = true };
    if (a->anonymous)
        return NOTHING;
    int rc = pdk_engine_discover(rt, a->id, &c.info, a->err);
    if (rc <= 0)
        return rc < 0 ? FAILED : NOTHING;
    pdk_view info = pdk_view_of(&c.info), who = pdk_view_get(info, "identity");
    c.token = pdk_info_token(info);
    if (pdk_view_tag(who) == '{') { /* the stored identity is compared before anything attaches */
        size_t un = 0, tn = 0;
        const char *u = pdk_view_str(pdk_view_get(who, "user"), &un), *t = pdk_view_str(pdk_view_get(who, "thread"), &tn);
        if (u == NULL || t == NULL || un != a->who.user_len || tn != a->who.thread_len || memcmp(u, a->who.user, un) != 0 ||
            memcmp(t, a->who.thread, tn) != 0)
            return pdk_acq_collision(a);
    }
    const char *gen = pdk_info_str(info, "generation");
    int quarantined = pdk_journal_has(rt->journal, a->id, gen, a->err);
    if (quarantined < 0)
        return FAILED;
    /* Such a one is stopped under both fences, or the acquire is deferred; so is one that somebody has doomed and then left, for
     * beside what is made now nobody would look at it again. */
    c.retry = quarantined == 1 || pdk_view_bool(pdk_view_get(info, "doomed"), false);
    found ok = pdk_acq_examine(a, &c);
    int64_t fenced_with = 0;
    if (ok == FOUND && (ok = enlist(a, &c, &fenced_with)) == NOTHING)
        return pdk_acq_being_destroyed(a); /* by a peer, whose lease would refuse what is created now just as well */
    if (ok == FOUND) {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.discovered++;
    }
    return ok;
}

/* ---- create ---- */

static int build_spec(acq *a, pdk_pack *spec)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK, composed = PDK_NO_PACK, mounts = PDK_NO_PACK;
    pdk_runtime *rt = a->rt;
    pdk_view req = pdk_view_of(&a->requirements), options = pdk_view_of(&rt->config.options);
    pdk_mark m = pdk_begin_map(&ctx);
    pdk_put_who(&ctx, &m, &a->who);
    pdk_kv_cstr(&ctx, &m, "sandbox_id", a->id);
    pdk_kv_view(&ctx, &m, "requirements", req);
    pdk_end(&ctx, &m);
    if (pdk_policy_compose(rt->policies, pdk_view_of(&ctx), &composed, a->err) < 0 ||
        pdk_mounts_prepare(pdk_view_of(&composed), pdk_view_get(options, "mounts"), pdk_view_get(options, "mount_roots"),
                           rt->config.state_dir, rt->log, &mounts, a->err) < 0) {
        pdk_error_set_id(a->err, a->id);
        return -1;
    }
    m = pdk_begin_map(spec);
    pdk_kv_cstr(spec, &m, "sandbox_id", a->id);
    pdk_put_who(spec, &m, &a->who);
    pdk_kv_view(spec, &m, "mounts", pdk_view_of(&mounts));
    static const char *const fields[] = { "env", "limits", "image", "network", "labels" };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        pdk_kv_view(spec, &m, fields[i], pdk_view_get(req, fields[i]));
    pdk_kv_view(spec, &m, "requirements", req);
    pdk_end(spec, &m);
    return spec->failed || ctx.failed ? pdk_acq_no_memory(a) : 0;
}

/* What was created is taken back, under both fences; the first error stays the caller's. */
static found roll_back(acq *a, candidate *c, const char *reason, int64_t fenced_with)
{
    PDK_AUTO_ERROR second = PDK_NO_ERROR;
    pdk_teardown td = { .id = a->id, .reason = reason, .info = pdk_view_of(&c->info), .fenced_with = fenced_with, .full = true };
    pdk_teardown_result r = pdk_fence_teardown(a->rt, &td, &second);
    if (r != PDK_TD_DONE)
        pdk_emit(a->rt, PDK_ERROR, "rollback_failed", a->id, pdk_info_str(td.info, "generation"),
                 r == PDK_TD_REFUSED ? td.why : reason, r == PDK_TD_ERROR ? &second : NULL);
    return FAILED;
}

/* Somebody wants it gone, or the runtime closes: what is being made is not finished. */
static bool unwanted(acq *a)
{
    if (!atomic_load(&a->unwanted))
        return false;
    if (atomic_load(&a->rt->closing))
        pdk_fail(a->err, PDK_E_CLOSED, 0, "the runtime is shutting down");
    else
        pdk_acq_being_destroyed(a);
    return true;
}

/* 1, 0 = time over, -1. The wait ends early when nobody wants the sandbox any more. When only its caller has gone it goes on, but
 * for no longer than a discovered one would be waited for. */
static int wait_ready(acq *a, const candidate *c, double *seconds)
{
    pdk_runtime *rt = a->rt;
    int ready = 0;
    pdk_limit limit = *pdk_limit_current();
    limit.unwanted = &a->unwanted;
    limit.cancelled = a->cancelled;
    const pdk_limit *outer = pdk_limit_enter(&limit);
    bool gone = pdk_acq_gone(a);
    *seconds = rt->config.ready_timeout;
    if (!gone)
        ready = pdk_engine_ready(rt, pdk_view_of(&c->info), *seconds, a->err);
    if (ready <= 0 && (gone || pdk_acq_gone(a)) && !atomic_load(&a->unwanted)) {
        limit.cancelled = NULL;
        pdk_error_clear(a->err);
        if (rt->config.discover_timeout < *seconds)
            *seconds = rt->config.discover_timeout;
        ready = pdk_engine_ready(rt, pdk_view_of(&c->info), *seconds, a->err);
    }
    pdk_limit_enter(outer);
    return ready;
}

static found settle(acq *a, candidate *c)
{
    pdk_runtime *rt = a->rt;
    int64_t fenced_with = 0;
    double seconds = 0;
    if (unwanted(a))
        return roll_back(a, c, "unwanted", 0);
    int ready = wait_ready(a, c, &seconds);
    if (unwanted(a))
        return roll_back(a, c, "unwanted", 0);
    if (ready <= 0) {
        if (ready == 0) {
            pdk_fail(a->err, PDK_E_UNREADY, 0, "sandbox %s was not ready within %g s", a->id, seconds);
            pdk_error_set_stage(a->err, "acquire");
        }
        return roll_back(a, c, "unready", 0);
    }
    pdk_verdict verdict;
    int quarantined = pdk_journal_has(rt->journal, a->id, pdk_info_str(pdk_view_of(&c->info), "generation"), a->err);
    if (quarantined > 0)
        pdk_acq_deferred(a, "quarantined", "the engine answered its creation with a quarantined one");
    if (quarantined != 0 || pdk_acq_decide(a, c, &verdict) < 0)
        return roll_back(a, c, "not_admitted", 0);
    if (verdict.decision != PDK_REUSE) {
        if (verdict.decision == PDK_REFUSE)
            pdk_acq_refused(a, &verdict);
        else if (verdict.decision == PDK_DEFER)
            pdk_acq_policy_defers(a, &verdict);
        else
            pdk_acq_deferred(a, "incompatible", pdk_acq_text_or(verdict.message, "a fresh one does not meet the requirements either"));
        return roll_back(a, c, "not_admitted", 0);
    }
    found ok = enlist(a, c, &fenced_with);
    if (ok == NOTHING)
        pdk_acq_being_destroyed(a);
    return ok == FOUND ? FOUND : roll_back(a, c, "not_registered", fenced_with);
}

/* Made, and the engine itself says that it cannot serve: info.rejected = { reason, message }. It is taken back like what a policy
 * did not admit, and the rejection is what the caller sees, whatever becomes of the clean-up. */
static found rejected(acq *a, candidate *c, pdk_view why)
{
    const char *reason = pdk_info_str(why, "reason"), *message = pdk_info_str(why, "message");
    pdk_fail_reason(a->err, PDK_E_BACKEND_ERROR, reason != NULL ? reason : "rejected", "sandbox %s cannot be used: %s", a->id,
                    message != NULL ? message : "the backend rejects what it made");
    pdk_error_set_stage(a->err, "create");
    return roll_back(a, c, "rejected", 0);
}

static found create(acq *a)
{
    pdk_runtime *rt = a->rt;
    AUTO_CANDIDATE c = { .source = "created", .checked = true };
    PDK_AUTO_PACK spec = PDK_NO_PACK;
    if (pdk_acq_complete(a) < 0 || build_spec(a, &spec) < 0 || pdk_make_room(rt, a->err) < 0)
        return FAILED;
    found ok = FAILED;
    if (!unwanted(a) && pdk_engine_create(rt, pdk_view_of(&spec), a->id, &c.info, a->err) == 0) {
        c.token = pdk_info_token(pdk_view_of(&c.info));
        pdk_emit(rt, PDK_INFO, "created", a->id, pdk_info_str(pdk_view_of(&c.info), "generation"), NULL, NULL);
        pdk_view why = pdk_view_get(pdk_view_of(&c.info), "rejected");
        ok = pdk_view_is_nil(why) ? settle(a, &c) : rejected(a, &c, why);
    }
    pdk_error_set_id(a->err, a->id);
    pdk_room_done(rt);
    if (ok == FOUND) {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.created++;
    }
    return ok;
}

/* ---- the whole ---- */

/* Found where a peer takes it over and over at the same moment, it is tried again a few times: one of the two wins. */
static found discover_patiently(acq *a)
{
    found ok = discover(a);
    for (int i = 0; i < 3 && ok == FAILED && a->err->kind == PDK_E_LOST; i++) {
        pdk_error_clear(a->err);
        ok = next_step(a, discover);
    }
    return ok;
}

found pdk_acq_bound(acq *a)
{
    if (a->spec->holder == NULL)
        return NOTHING;
    pdk_runtime *rt = a->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_holder *h = pdk_pool_holder(&rt->pool, a->holder);
    if (bound_elsewhere(a, h))
        return FAILED;
    if (h == NULL || h->incarnation != h->entry->incarnation || h->entry->state != PDK_ACTIVE)
        return NOTHING;
    pdk_entry *e = h->entry;
    if (e->reserved != 0 || e->retry || h->token != e->token || pdk_entry_dirty(e))
        return NOTHING;
    return hand_out_active(rt, a, e);
}

static int ask_identity(acq *a)
{
    pdk_runtime *rt = a->rt;
    if (pdk_policy_resolve(rt->policies, &a->who, a->spec->requirements, pdk_view_of(&rt->policy_base), &a->requirements, a->err) < 0)
        return -1;
    if (!a->anonymous)
        return pdk_policy_derive(rt->policies, &a->who, pdk_view_of(&a->requirements), a->id, a->err);
    unsigned char raw[16];
    pdk_random(raw, sizeof raw);
    for (size_t i = 0; i < sizeof raw; i++)
        snprintf(a->id + 2 * i, 3, "%02x", raw[i]);
    return 0;
}

static int identify(acq *a)
{
    int rc = ask_identity(a);
    a->id_hash = rc == 0 ? pdk_hash(a->id, strlen(a->id)) : 0;
    return rc;
}

static void remember_making(acq *a)
{
    PDK_GUARD(a->rt->pool.registry);
    if (atomic_load(&a->rt->closing)) /* whoever closes has looked through the list before we stood on it */
        atomic_store(&a->unwanted, true);
    a->next = a->rt->making;
    if (a->next != NULL)
        a->next->previous = a;
    a->rt->making = a;
}

static void forget_making(acq **made)
{
    acq *a = *made;
    PDK_GUARD(a->rt->pool.registry);
    *(a->previous != NULL ? &a->previous->next : &a->rt->making) = a->next;
    if (a->next != NULL)
        a->next->previous = a->previous;
}

found pdk_acq_look(acq *a)
{
    if (identify(a) < 0 || pdk_acq_cancelled(a))
        return FAILED;
    {
        PDK_GUARD(a->rt->pool.registry);
        const pdk_entry *e = tracked(a->rt, a);
        if (e != NULL && e->reserved_until != 0)
            pdk_entry_lapse(&a->rt->pool, a->id, pdk_lease_now(a->rt));
    }
    found ok = reuse_active(a);
    return ok == NOTHING ? next_step(a, reclaim_warm) : ok;
}

found pdk_acq_make(acq *a)
{
    __attribute__((cleanup(forget_making))) acq *made = a;
    remember_making(made);
    found ok = a->anonymous ? NOTHING : reuse_active(a);
    if (ok == NOTHING)
        ok = next_step(a, reclaim_warm);
    a->makes = true;
    if (ok == NOTHING)
        ok = next_step(a, retry_kept);
    if (ok == NOTHING)
        ok = next_step(a, discover_patiently);
    if (ok == NOTHING)
        ok = next_step(a, retire_records);
    return ok == NOTHING ? next_step(a, create) : ok;
}
