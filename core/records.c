/* records.c -- what is on record about a sandbox outside this runtime's memory, for operators: who has its lease, and which
 * generations are quarantined; and how a quarantine record is done with. Everything here asks stores and may wait. */
#include "core.h"

#include <stdio.h>
#include <string.h>

int pdk_runtime_lease(pdk_runtime *rt, const char *id, pdk_pack *out, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    pdk_lease_owner owner;
    if (pdk_check_id(id, err) < 0)
        return -1;
    int there = pdk_lease_owner_of(rt->lease, id, &owner, err);
    if (there < 0)
        return -1;
    if (there == 0) {
        pdk_put_nil(out);
    } else {
        pdk_mark m = pdk_begin_map(out);
        pdk_kv_cstr(out, &m, "state", owner.del ? "del" : "own");
        pdk_kv_cstr(out, &m, "owner", owner.owner);
        pdk_kv_bool(out, &m, "ours", owner.ours);
        pdk_kv_int(out, &m, "token", owner.token);
        pdk_end(out, &m);
    }
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer") : 0;
}

int pdk_runtime_quarantine(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    return pdk_journal_list(rt->journal, out, err);
}

/* Whether the quarantined one is what this runtime tracks: then its own retry is what retires the record. */
static bool tracks_it(pdk_runtime *rt, const char *id)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    return e != NULL && e->state != PDK_ABSENT && (e->journaled || e->retry);
}

/* Not in the way of anybody: what another process holds is not even doomed. 1 = held. */
static int held(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_AUTO_PACK info = PDK_NO_PACK;
    int there = pdk_engine_inspect(rt, id, PDK_NO_VIEW, &info, err);
    if (there < 0)
        return -1;
    return there == 1 && pdk_view_bool(pdk_view_get(pdk_view_of(&info), "held"), false);
}

static int deferred(pdk_error *err, const char *why)
{
    if (err != NULL) {
        pdk_error_clear(err);
        snprintf(err->reason, sizeof err->reason, "deferred");
        snprintf(err->message, sizeof err->message, "%s", why);
    }
    return 0;
}

/* As an acquire does on its way (retire_records), under the same turn. */
static int retire(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_AUTO_TURN turn = PDK_NO_TURN;
    char why[40];
    int entered = pdk_turn_for_teardown(rt, id, &turn, why, err);
    if (entered <= 0)
        return entered < 0 ? -1 : deferred(err, why);
    int recorded = pdk_journal_has(rt->journal, id, NULL, err);
    if (recorded <= 0)
        return recorded < 0 ? -1 : 1;
    int busy = held(rt, id, err);
    if (busy != 0)
        return busy < 0 ? -1 : deferred(err, "holders");
    pdk_teardown td = { .id = id, .reason = "quarantined", .retire = true, .dirty = true, .full = true };
    switch (pdk_fence_teardown(rt, &td, err)) {
    case PDK_TD_DONE:
    case PDK_TD_REPLACED: /* what was recorded is proven gone: what is there is another one */
        return 1;
    case PDK_TD_REFUSED:
        return deferred(err, td.why);
    case PDK_TD_ERROR:
        break;
    }
    return -1;
}

int pdk_runtime_retire(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    if (pdk_check_id(id, err) < 0)
        return -1;
    int rc = tracks_it(rt, id) ? pdk_runtime_destroy(rt, id, err) : retire(rt, id, err);
    if (rc < 0)
        pdk_error_set_id(err, id);
    return rc;
}
