/* events.c -- a bounded ring of packed records.
 *
 * Always true under the lock: `count` records stand from `first` on, and count <= max.
 * Locks: `lock` is a leaf; the wake function is called after it was given back. */
#include "events.h"
#include "sync.h"

#include <stdlib.h>

typedef struct record {
    pdk_pack pack;
    pdk_record_type type;
} record;

struct pdk_events {
    pdk_mutex lock;
    pdk_cond came;
    record *ring;     /* lock; max of them */
    size_t max;       /* fixed at birth */
    size_t first;     /* lock */
    size_t count;     /* lock */
    uint64_t dropped; /* lock */
    bool stopped;     /* lock */
    void (*wake)(void *ctx); /* fixed before the first push */
    void *wake_ctx;
};

pdk_events *pdk_events_new(size_t max)
{
    pdk_events *q = calloc(1, sizeof *q);
    if (q == NULL || (q->ring = calloc(max, sizeof *q->ring)) == NULL) {
        free(q);
        return NULL;
    }
    q->max = max;
    pdk_mutex_init(&q->lock);
    pdk_cond_init(&q->came);
    return q;
}

void pdk_events_free(pdk_events *q)
{
    if (q == NULL)
        return;
    for (size_t i = 0; i < q->count; i++)
        pdk_pack_free(&q->ring[(q->first + i) % q->max].pack);
    free(q->ring);
    pdk_cond_destroy(&q->came);
    pdk_mutex_destroy(&q->lock);
    free(q);
}

void pdk_events_set_wake(pdk_events *q, void (*wake)(void *ctx), void *ctx)
{
    q->wake = wake;
    q->wake_ctx = ctx;
}

static bool put(pdk_events *q, pdk_pack *copy, pdk_record_type type)
{
    PDK_GUARD(q->lock);
    if (q->count == q->max) {
        q->dropped++;
        return false;
    }
    q->ring[(q->first + q->count++) % q->max] = (record){ *copy, type };
    *copy = PDK_NO_PACK;
    pdk_cond_broadcast(&q->came);
    return true;
}

static void push(pdk_events *q, const pdk_pack *r, pdk_record_type type)
{
    PDK_AUTO_PACK copy = PDK_NO_PACK;
    if (!pdk_pack_copy(&copy, pdk_view_of(r))) {
        PDK_GUARD(q->lock);
        q->dropped++;
        return;
    }
    if (put(q, &copy, type) && q->wake != NULL)
        q->wake(q->wake_ctx);
}

void pdk_events_sink_event(void *q, const pdk_pack *r)
{
    push(q, r, PDK_RECORD_EVENT);
}

void pdk_events_sink_log(void *q, const pdk_pack *r)
{
    push(q, r, PDK_RECORD_LOG);
}

bool pdk_events_take(pdk_events *q, pdk_pack *out, pdk_record_type *type)
{
    pdk_pack_free(out);
    PDK_GUARD(q->lock);
    if (q->count == 0)
        return false;
    record *oldest = &q->ring[q->first];
    *out = oldest->pack;
    *type = oldest->type;
    oldest->pack = PDK_NO_PACK;
    q->first = (q->first + 1) % q->max;
    q->count--;
    return true;
}

bool pdk_events_wait(pdk_events *q, int64_t deadline)
{
    PDK_GUARD(q->lock);
    while (q->count == 0 && !q->stopped)
        if (!pdk_cond_wait_until(&q->came, &q->lock, deadline))
            break;
    return q->count > 0;
}

void pdk_events_stop(pdk_events *q)
{
    PDK_GUARD(q->lock);
    q->stopped = true;
    pdk_cond_broadcast(&q->came);
}

size_t pdk_events_count(pdk_events *q)
{
    PDK_GUARD(q->lock);
    return q->count;
}

uint64_t pdk_events_dropped(pdk_events *q)
{
    PDK_GUARD(q->lock);
    return q->dropped;
}
