/* holders.c -- who holds a sandbox, and what becomes of it when the last one leaves: it is parked warm, or, when it must not
 * serve again, recycled. Also the calls that answer from memory alone. */
#include "core.h"

#include <stdio.h>
#include <string.h>

void pdk_put_who(pdk_pack *p, pdk_mark *m, const pdk_identity *who)
{
    if (who == NULL)
        return;
    pdk_put_cstr(p, "identity");
    m->count++;
    pdk_mark id = pdk_begin_map(p);
    pdk_kv_str(p, &id, "user", who->user, who->user_len);
    pdk_kv_str(p, &id, "thread", who->thread, who->thread_len);
    pdk_end(p, &id);
}

void pdk_put_identity(pdk_pack *p, pdk_mark *m, const pdk_entry *e)
{
    pdk_identity who = pdk_entry_who(e);
    pdk_put_who(p, m, e->has_identity ? &who : NULL);
}

typedef enum next_step { STAYS, PARKED, RECYCLE } next_step;

/* Decides, before the warm pool, what becomes of an unheld active sandbox (L7). */
static next_step park_now(pdk_runtime *rt, pdk_entry *e, pdk_client **client) PDK_REQUIRES(rt->pool.registry)
{
    if (e->state != PDK_ACTIVE || e->holder_count > 0 || e->busy > 0 || e->reserved != 0 || e->retry)
        return e->state == PDK_ACTIVE && e->holder_count == 0 && e->busy > 0 && pdk_entry_dirty(e) ? RECYCLE : STAYS;
    if (pdk_entry_dirty(e))
        return RECYCLE;
    *client = e->client;
    e->client = NULL;
    e->park_asked = false;
    pdk_entry_move(&rt->pool, e, PDK_WARM);
    e->parked_at = pdk_clock_now(rt->clock);
    pdk_pool_check(&rt->pool);
    return PARKED;
}

static bool still_unheld(const pdk_entry *e, void *ctx)
{
    (void)ctx;
    return e->state == PDK_ACTIVE && e->holder_count == 0 && pdk_entry_dirty(e);
}

static void recycle(pdk_runtime *rt, const char *id, uint64_t incarnation, pdk_error *cancelled)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    /* a command whose session creation hangs may be in flight: it ends with the sandbox */
    pdk_teardown td = { .id = id, .reason = "dirty", .dirty = true, .incarnation = incarnation, .still = still_unheld,
                        .ignore_holders = true };
    if (pdk_fence_teardown(rt, &td, &err) == PDK_TD_ERROR)
        pdk_emit(rt, PDK_ERROR, "recycle_failed", id, NULL, "dirty", &err);
    pdk_note_cancelled(cancelled, &err);
}

void pdk_park_or_recycle(pdk_runtime *rt, const char *id, uint64_t incarnation)
{
    pdk_park_or_recycle_noting(rt, id, incarnation, NULL);
}

void pdk_park_or_recycle_noting(pdk_runtime *rt, const char *id, uint64_t incarnation, pdk_error *cancelled)
{
    PDK_AUTO_TEXT generation = NULL;
    pdk_client *client = NULL;
    next_step next = STAYS;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e != NULL && e->incarnation == incarnation)
            next = park_now(rt, e, &client);
        if (next == PARKED)
            generation = pdk_entry_copy_generation(e);
    }
    if (next == PARKED) {
        pdk_client_close_noting(rt, client, id, "release", cancelled);
        pdk_emit(rt, PDK_INFO, "parked", id, generation, "last release", NULL);
        pdk_ask_idle(rt, id, incarnation);
    } else if (next == RECYCLE) {
        recycle(rt, id, incarnation, cancelled);
    }
}

/* A cancellation reaches the caller once all was tried (Q27, Q28); whatever else goes wrong is logged. */
static int leave_unheld(pdk_runtime *rt, const char *id, uint64_t incarnation, pdk_error *err)
{
    PDK_AUTO_ERROR cancelled = PDK_NO_ERROR;
    pdk_park_or_recycle_noting(rt, id, incarnation, &cancelled);
    if (cancelled.kind == PDK_OK)
        return 0;
    pdk_error_set_id(&cancelled, id);
    pdk_error_move(err, &cancelled);
    return -1;
}

int pdk_runtime_release(pdk_runtime *rt, const char *holder, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    char id[64];
    uint64_t incarnation;
    bool park;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_holder *h = pdk_pool_holder(&rt->pool, holder);
        if (h == NULL)
            return 0;
        pdk_entry *e = h->entry;
        pdk_entry_id(e, id);
        incarnation = e->incarnation;
        pdk_pool_unbind(&rt->pool, h);
        e->last_used = pdk_clock_now(rt->clock);
        /* one that does not ask for parking never parks alone; but what must not serve again goes at once */
        park = e->holder_count == 0 && (e->park_asked || pdk_entry_dirty(e));
        pdk_pool_check(&rt->pool);
    }
    return park ? leave_unheld(rt, id, incarnation, err) : 0;
}

int pdk_check_id(const char *id, pdk_error *err)
{
    size_t len = id == NULL ? 0 : strlen(id);
    bool good = len >= 1 && len <= 63 && strspn(id, "abcdefghijklmnopqrstuvwxyz0123456789-") == len;
    return good ? 0 : pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "sandbox id must be 1 to 63 characters of a-z, 0-9 and -");
}

int pdk_runtime_park(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    uint64_t incarnation = 0;
    if (pdk_check_id(id, err) < 0)
        return -1;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, id);
        if (e == NULL || e->state != PDK_ACTIVE || e->holder_count > 0)
            return 0;
        incarnation = e->incarnation;
    }
    return leave_unheld(rt, id, incarnation, err);
}

int pdk_runtime_discard_holders(pdk_runtime *rt, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_GUARD(rt->pool.registry);
    for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
        pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
        if (e->holder_count > 0)
            e->last_used = pdk_clock_now(rt->clock); /* from here on it idles */
        pdk_pool_drop_holders(&rt->pool, e);
    }
    pdk_pool_check(&rt->pool);
    return 0;
}

int pdk_runtime_binding(pdk_runtime *rt, const char *holder, char id[64], pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_GUARD(rt->pool.registry);
    pdk_holder *h = pdk_pool_holder(&rt->pool, holder);
    if (h == NULL)
        return 0;
    pdk_entry_id(h->entry, id);
    return 1;
}

static int refuse_retain(pdk_entry *e, const char *id, const pdk_identity *who, pdk_error *err)
{
    if (e == NULL || (e->reserved == 0 && (e->state != PDK_ACTIVE || e->retry)))
        pdk_fail(err, PDK_E_LOST, 0, "sandbox %s is not active here; acquire it", id);
    else if (e->reserved != 0)
        pdk_fail(err, PDK_E_BEING_DESTROYED, 0, "sandbox %s is being torn down", id);
    else if (who != NULL && !pdk_entry_is(e, who))
        pdk_fail(err, PDK_E_LOST, 0, "sandbox %s is not active here; acquire it", id); /* as an unknown id: B216 */
    else
        return 0;
    pdk_error_set_id(err, id);
    return -1;
}

int pdk_runtime_retain(pdk_runtime *rt, const char *id, const char *holder, const pdk_identity *who, bool release_on_last,
                       pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    if (pdk_check_id(id, err) < 0)
        return -1;
    if (holder == NULL || holder[0] == '\0' || strlen(holder) > 199)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "holder must have 1 to 199 bytes");
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    if (refuse_retain(e, id, who, err) < 0)
        return -1;
    pdk_holder *h = pdk_pool_holder(&rt->pool, holder);
    if (h != NULL && h->entry != e)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "holder %s is bound to sandbox %s; release it first", holder, h->entry->id);
    if (pdk_pool_bind(&rt->pool, e, holder) == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the holder %s", holder);
    e->park_asked |= release_on_last;
    e->last_used = pdk_clock_now(rt->clock);
    pdk_pool_check(&rt->pool);
    return 0;
}

int pdk_runtime_get(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_box **out, pdk_error *err)
{
    *out = NULL;
    PDK_CALL(rt, err, -1);
    if (pdk_check_id(id, err) < 0)
        return -1;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    if (e == NULL || e->state != PDK_ACTIVE || e->retry || e->reserved != 0 || (who != NULL && !pdk_entry_is(e, who)))
        return 0;
    *out = pdk_box_new(rt, e, NULL, "active", false);
    if (*out == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a box of %s", id);
    e->last_used = pdk_clock_now(rt->clock);
    return 0;
}
