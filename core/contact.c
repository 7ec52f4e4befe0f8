/* contact.c -- speaking to warm guests: one that no runtime speaks to ends itself after orphan_ttl.
 *
 * That may wait, while a lease may not. So guests are spoken to when all leases are renewed, and only until the next renewal is
 * due. One that hangs costs CONTACT_WAIT, and comes last the next time; of the others the one with the oldest contact comes
 * first, so that a pass which did not get round goes on where it was. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define CONTACT_WAIT 2 /* seconds; a guest that is well answers in milliseconds */

typedef struct contact {
    char id[64];
    uint64_t incarnation; /* another one = it was used meanwhile */
    bool silent;
    pdk_ns when;
    int64_t token; /* the largest that the guest has seen of us */
} contact;

static int by_contact(const void *a, const void *b)
{
    const contact *x = a, *y = b;
    if (x->silent != y->silent)
        return x->silent ? 1 : -1;
    return x->when < y->when ? -1 : x->when > y->when;
}

static size_t warm_guests(pdk_runtime *rt, contact **out)
{
    size_t n = 0;
    {
        PDK_GUARD(rt->pool.registry);
        *out = calloc(rt->pool.count[PDK_WARM] + 1, sizeof **out);
        for (pdk_entry *e = rt->pool.oldest; *out != NULL && e != NULL && n < rt->pool.count[PDK_WARM]; e = e->newer) {
            if (e->reserved != 0 || e->retry || e->token == 0)
                continue;
            contact *c = &(*out)[n++];
            pdk_entry_id(e, c->id);
            c->incarnation = e->incarnation;
            c->silent = e->silent && e->contacted_at >= e->parked_at;
            c->when = e->contacted_at > e->parked_at ? e->contacted_at : e->parked_at; /* until then somebody used it */
            c->token = e->guest_token > 0 ? e->guest_token : e->token;
        }
    }
    if (n > 0)
        qsort(*out, n, sizeof **out, by_contact);
    return n;
}

/* 1 and its metadata when it is still that warm one. */
static bool still_parked(pdk_runtime *rt, const contact *c, pdk_pack *info)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, c->id);
    return e != NULL && e->incarnation == c->incarnation && e->state == PDK_WARM && e->reserved == 0 &&
           pdk_pack_copy(info, e->info);
}

static void speak_to(pdk_runtime *rt, const contact *c)
{
    PDK_AUTO_PACK info = PDK_NO_PACK;
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
    if (!still_parked(rt, c, &info))
        return;
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), CONTACT_WAIT);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int alive = pdk_engine_alive(rt, pdk_view_of(&info), c->token, &ignored);
    pdk_limit_enter(outer);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, c->id);
    if (e == NULL || e->incarnation != c->incarnation)
        return;
    e->silent = alive < 0;
    e->contacted_at = pdk_clock_now(rt->clock);
}

void pdk_keep_guests(pdk_runtime *rt, pdk_ns until)
{
    contact *all = NULL;
    size_t n = rt->fenced ? warm_guests(rt, &all) : 0;
    for (size_t i = 0; i < n && !pdk_stopping(rt) && (i == 0 || pdk_clock_now(rt->clock) < until); i++)
        speak_to(rt, &all[i]);
    free(all);
}
