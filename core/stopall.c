/* stopall.c -- several sandboxes ended at once, where there may be threads: all that a runtime tracks, for its shutdown, and what is
 * idle, for the reaper.
 *
 * Why at once: some engines end a sandbox gracefully, which takes its time; the last one would wait for all the others, and in a
 * shutdown leases are not renewed any more.
 * Each one goes through fence.c like any other teardown; nothing here decides more than which one is next.
 * Locks: `crew.lock` and `stopping.lock` for moments; never together with the registry, or with each other.
 */
#include "core.h"

#include <stdlib.h>
#include <string.h>

#define STOPS_AT_ONCE 16

typedef struct crew { /* one pdk_at_once, shared by its threads */
    void (*fn)(void *ctx, size_t i);
    void *ctx;
    size_t n;
    pdk_mutex lock;
    size_t next;          /* lock */
} crew;

static void *work(void *arg)
{
    crew *c = arg;
    for (;;) {
        size_t i;
        {
            PDK_GUARD(c->lock);
            if (c->next == c->n)
                return NULL;
            i = c->next++;
        }
        c->fn(c->ctx, i);
    }
}

void pdk_at_once(pdk_runtime *rt, size_t n, void (*fn)(void *ctx, size_t i), void *ctx)
{
    crew c = { .fn = fn, .ctx = ctx, .n = n };
    pdk_thread helpers[STOPS_AT_ONCE - 1];
    size_t started = 0;
    pdk_mutex_init(&c.lock);
    while (rt->config.threads && started + 1 < n && started < STOPS_AT_ONCE - 1 &&
           pdk_thread_start(&helpers[started], "pdk-stop", work, &c) == 0)
        started++;
    work(&c);
    while (started > 0)
        pdk_thread_join(&helpers[--started]);
    pdk_mutex_destroy(&c.lock);
}

typedef struct victims {
    size_t n, cap;
    char (*ids)[64];
} victims;

/* Active ones first, then warm, then those whose stop failed before (P9). */
static victims tracked(pdk_runtime *rt)
{
    static const pdk_state order[] = { PDK_ACTIVE, PDK_WARM, PDK_KEPT };
    victims v = { 0 };
    PDK_GUARD(rt->pool.registry);
    v.cap = rt->pool.ids.count;
    v.ids = calloc(v.cap + 1, sizeof *v.ids);
    for (size_t s = 0; s < 3 && v.ids != NULL; s++)
        for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
            pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
            if (e->state == order[s] && v.n < v.cap)
                pdk_entry_id(e, v.ids[v.n++]);
        }
    return v;
}

/* Whether what stands in the way is a call in flight: it is at work on the sandbox itself. */
static bool refused_for_now(const pdk_teardown *td)
{
    return strcmp(td->why, "reserved") == 0 || strcmp(td->why, "used") == 0;
}

/* True when nothing of it is left that is ours to stop; else why not. */
static bool stop_one(pdk_runtime *rt, const char *id, bool drained, pdk_error *why)
{
    pdk_teardown td = { .id = id, .reason = "shutdown", .ignore_holders = true };
    pdk_teardown_result r = pdk_fence_teardown(rt, &td, why);
    if (r == PDK_TD_DONE || (r == PDK_TD_REFUSED && (strcmp(td.why, "gone") == 0 || strcmp(td.why, "taken") == 0)))
        return true;
    if (r == PDK_TD_REPLACED) { /* of ours nothing is left; what has its id now is not ours */
        pdk_fence_forget_replaced(rt, id, 0);
        return true;
    }
    if (r == PDK_TD_REFUSED && !drained && refused_for_now(&td))
        return true;
    if (r == PDK_TD_REFUSED && strcmp(td.why, "peer") == 0 && pdk_forget_lost(rt, id))
        return true; /* nobody has renewed it since a peer took it, and nobody will: it is the peer's to stop */
    if (r == PDK_TD_REFUSED)
        pdk_fail_reason(why, PDK_E_REPLACEMENT_DEFERRED, "teardown_refused", "the teardown of %s was refused (%s)", id, td.why);
    return false;
}

typedef struct stopping { /* one stop_all, shared by its threads */
    pdk_runtime *rt;
    victims v;
    bool drained;
    pdk_mutex lock;
    size_t left;          /* lock */
    pdk_error *err;       /* lock; the first failure */
} stopping;

static void stop_nth(void *ctx, size_t i)
{
    stopping *s = ctx;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    if (stop_one(s->rt, s->v.ids[i], s->drained, &why))
        return;
    PDK_GUARD(s->lock);
    s->left++;
    if (s->err->kind == PDK_OK)
        pdk_error_move(s->err, &why);
}

size_t pdk_stop_all(pdk_runtime *rt, bool drained, pdk_error *err)
{
    stopping s = { .rt = rt, .v = tracked(rt), .drained = drained, .err = err };
    if (s.v.ids == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to list what is to be stopped");
        return s.v.cap;
    }
    pdk_mutex_init(&s.lock);
    pdk_at_once(rt, s.v.n, stop_nth, &s);
    pdk_mutex_destroy(&s.lock);
    free(s.v.ids);
    return s.left;
}
