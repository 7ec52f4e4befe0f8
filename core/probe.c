/* probe.c -- what the deployment behind a backend can do, as its function `probe` says: asked rarely, and by one for all.
 *
 * Why here and not in each backend: the rules are the same for all of them, and a table of functions that lives in a host's
 * state has callers on many threads. A backend is one endpoint with one credential, so there is one answer to keep.
 *
 * An answer that says yes to anything is good for a minute, one that says no for five. A failure is neither: it is "unknown", and
 * only sets the time of the next try. While one caller asks, the others wait for its answer.
 *
 * Locks: `lock` of the probes; never held across the call, nor while another lock is taken.
 */
#include "core.h"

#include <stdio.h>

#define GOOD_YES  60  /* seconds that an answer is kept, when it says yes to anything, */
#define GOOD_NO   300 /* and when it does not */
#define NEXT_TRY  30  /* seconds after a failure */
#define LIMIT     1.5 /* seconds that one probe may take */
#define PATIENCE  2.0 /* that a caller waits for another's */

void pdk_probes_init(pdk_probes *p)
{
    *p = (pdk_probes){ .answer = PDK_NO_PACK };
    pdk_mutex_init(&p->lock);
    pdk_cond_init(&p->ended);
}

void pdk_probes_free(pdk_probes *p)
{
    pdk_pack_free(&p->answer);
    pdk_cond_destroy(&p->ended);
    pdk_mutex_destroy(&p->lock);
}

/* Whether the deployment says yes to anything. */
static bool says_yes(pdk_view answer)
{
    size_t cursor = 0;
    pdk_view k, v;
    while (pdk_view_next(answer, &cursor, &k, &v))
        if (pdk_view_bool(v, false))
            return true;
    return false;
}

static int unknown(pdk_error *err, const char *why)
{
    return pdk_fail_reason(err, PDK_E_BACKEND_ERROR, "capability", "what the deployment can do is unknown: %s", why);
}

static int no_memory(pdk_error *err)
{
    return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for what the deployment can do");
}

/* The kept answer into `out`: 1, or 0 when there is none that is good now, -1 = no memory. */
static int kept(pdk_probes *p, pdk_ns now, pdk_pack *out, pdk_error *err) PDK_REQUIRES(p->lock)
{
    if (!p->known || now >= p->good_until)
        return 0;
    return pdk_pack_copy(out, pdk_view_of(&p->answer)) ? 1 : no_memory(err);
}

/* Another caller's probe is in flight: its answer is ours too. 1, or -1. */
static int share(pdk_probes *p, pdk_ns now, pdk_pack *out, pdk_error *err) PDK_REQUIRES(p->lock)
{
    uint64_t round = p->rounds;
    pdk_ns until = pdk_after(pdk_now_monotonic(), pdk_seconds(PATIENCE));
    if (pdk_limit_current()->deadline < until)
        until = pdk_limit_current()->deadline;
    while (p->rounds == round)
        if (!pdk_cond_wait_until(&p->ended, &p->lock, until))
            break;
    if (p->rounds == round)
        return unknown(err, "another caller's probe takes too long");
    int rc = p->failed ? 0 : kept(p, now, out, err);
    return rc == 0 ? unknown(err, "another caller's probe failed") : rc;
}

/* *told: whether a failure says anything about the deployment, and not only that this caller's own time was over. */
static int ask(pdk_runtime *rt, pdk_pack *out, bool *told, pdk_error *err)
{
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), LIMIT);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_engine_probe(rt, out, err);
    pdk_limit_enter(outer);
    *told = (outer->cancelled == NULL || !atomic_load(outer->cancelled)) && pdk_now_monotonic() < outer->deadline;
    return rc;
}

int pdk_probe(pdk_runtime *rt, bool bypass, pdk_pack *out, bool *fresh, pdk_error *err)
{
    pdk_probes *p = &rt->probes;
    *fresh = false;
    {
        PDK_GUARD(p->lock);
        pdk_ns now = pdk_clock_now(rt->clock);
        int rc = bypass ? 0 : kept(p, now, out, err);
        if (rc != 0)
            return rc < 0 ? -1 : 0;
        if (p->in_flight) {
            *fresh = true;
            return share(p, now, out, err) < 0 ? -1 : 0;
        }
        if (now < p->retry_at)
            return unknown(err, "the last probe failed, and the time of the next has not come");
        p->in_flight = true;
    }
    bool told;
    int rc = ask(rt, out, &told, err);
    PDK_GUARD(p->lock);
    pdk_ns now = pdk_clock_now(rt->clock);
    p->in_flight = false;
    p->rounds++;
    p->failed = rc < 0;
    if (rc < 0) {
        if (told)
            p->retry_at = pdk_after(now, pdk_seconds(NEXT_TRY));
    } else {
        pdk_view answer = pdk_view_of(out);
        p->retry_at = 0;
        p->known = pdk_pack_copy(&p->answer, answer);
        p->good_until = pdk_after(now, pdk_seconds(says_yes(answer) ? GOOD_YES : GOOD_NO));
        p->failed = !p->known;
        *fresh = true;
    }
    pdk_cond_broadcast(&p->ended);
    return rc;
}

bool pdk_probe_peek(pdk_runtime *rt, pdk_pack *out)
{
    PDK_GUARD(rt->probes.lock);
    return kept(&rt->probes, pdk_clock_now(rt->clock), out, NULL) == 1;
}
