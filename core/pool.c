/* pool.c -- the registry.
 *
 * Why one file: a state, the list that it stands on, the identity's mapping and the counts must change together; while two
 * files can each do a part of that, every new state is one more chance to forget the other part.
 *
 * True whenever the registry lock is free (pdk_pool_check):
 *   1  an entry is on the LRU exactly when it is WARM
 *   2  a WARM entry has no holder and no client
 *   3  an entry is mapped by identity exactly when it is ACTIVE and its identity is known; one entry per identity
 *   4  the counts agree with the states
 *   5  an ABSENT entry has a reservation or an intent, and nothing else
 */
#include "pool.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static const bool MOVES[PDK_STATES][PDK_STATES] = {
    [PDK_ABSENT] = { [PDK_ACTIVE] = true, [PDK_WARM] = true, [PDK_KEPT] = true },
    [PDK_ACTIVE] = { [PDK_ACTIVE] = true, [PDK_WARM] = true, [PDK_KEPT] = true, [PDK_ABSENT] = true },
    [PDK_WARM]   = { [PDK_ACTIVE] = true, [PDK_KEPT] = true, [PDK_ABSENT] = true },
    [PDK_KEPT]   = { [PDK_ACTIVE] = true, [PDK_WARM] = true, [PDK_KEPT] = true, [PDK_ABSENT] = true },
};

const char *pdk_state_name(pdk_state s)
{
    static const char *const names[PDK_STATES] = { "absent", "active", "warm", "kept" };
    return (unsigned)s < PDK_STATES ? names[s] : "?";
}

/* ---- birth and death ---- */

void pdk_pool_init(pdk_pool *p)
{
    memset(p, 0, sizeof *p);
    pdk_mutex_init(&p->registry);
    pdk_cond_init(&p->changed);
    p->next_incarnation = p->next_op = 1;
}

/* ---- packs that many entries have ---- */

static void requirements_drop(pdk_pool *p, pdk_entry *e)
{
    pdk_shared *shared = e->requirements;
    e->requirements = NULL;
    if (shared == NULL || --shared->refs > 0)
        return;
    pdk_map_remove(&p->shared, &shared->node);
    free(shared);
}

pdk_view pdk_entry_requirements(const pdk_entry *e)
{
    return e->requirements == NULL ? PDK_NO_VIEW : (pdk_view){ e->requirements->bytes, e->requirements->len };
}

bool pdk_entry_set_requirements(pdk_pool *p, pdk_entry *e, pdk_view v)
{
    if (pdk_view_equal(pdk_entry_requirements(e), v))
        return true;
    uint64_t hash = pdk_hash(v.p, v.len);
    pdk_node *n = pdk_map_chain(&p->shared, hash);
    while (n != NULL && !(n->hash == hash && PDK_OF(n, pdk_shared, node)->len == v.len &&
                          memcmp(PDK_OF(n, pdk_shared, node)->bytes, v.p, v.len) == 0))
        n = n->next;
    pdk_shared *shared = n != NULL ? PDK_OF(n, pdk_shared, node) : NULL;
    if (shared == NULL && v.len > 0) {
        shared = malloc(sizeof *shared + v.len);
        if (shared == NULL)
            return false;
        shared->refs = 0;
        shared->len = v.len;
        memcpy(shared->bytes, v.p, v.len);
        if (!pdk_map_insert(&p->shared, &shared->node, hash)) {
            free(shared);
            return false;
        }
    }
    if (shared != NULL)
        shared->refs++;
    requirements_drop(p, e);
    e->requirements = shared;
    return true;
}

/* ---- birth and death ---- */

static void scopes_free(pdk_entry *e)
{
    for (pdk_scope *s = e->scopes, *next; s != NULL; s = next) {
        next = s->next;
        free(s);
    }
    e->scopes = NULL;
}

/* What is known of a generation, but for its metadata: not true of the next one. */
static void planes_clear(pdk_entry *e)
{
    for (int i = 0; i < PDK_PLANES; i++)
        free(e->plane[i].session);
    memset(e->plane, 0, sizeof e->plane);
    scopes_free(e);
}

static void info_free(pdk_entry *e)
{
    free((void *)(uintptr_t)e->info.p);
    e->info = PDK_NO_VIEW;
    e->generation = NULL;
}

static void entry_free(pdk_pool *p, pdk_entry *e)
{
    free(e->user);
    info_free(e);
    requirements_drop(p, e);
    planes_clear(e);
    free(e);
}

void pdk_pool_free(pdk_pool *p)
{
    for (pdk_node *n = pdk_map_each(&p->holders, NULL), *next; n != NULL; n = next) {
        next = pdk_map_each(&p->holders, n);
        free(PDK_OF(n, pdk_holder, by_name));
    }
    for (pdk_node *n = pdk_map_each(&p->ids, NULL), *next; n != NULL; n = next) {
        next = pdk_map_each(&p->ids, n);
        pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
        pdk_client_unref(e->client);
        entry_free(p, e);
    }
    pdk_map_free(&p->holders);
    pdk_map_free(&p->ids);
    pdk_map_free(&p->identities);
    pdk_map_free(&p->shared);
    free(p->heap);
    pdk_cond_destroy(&p->changed);
    pdk_mutex_destroy(&p->registry);
}

pdk_entry *pdk_pool_find(pdk_pool *p, const char *id)
{
    return pdk_pool_find_hashed(p, id, pdk_hash(id, strlen(id)));
}

pdk_entry *pdk_pool_find_hashed(pdk_pool *p, const char *id, uint64_t hash)
{
    for (pdk_node *n = pdk_map_chain(&p->ids, hash); n != NULL; n = n->next) {
        pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
        if (n->hash == hash && strcmp(e->id, id) == 0)
            return e;
    }
    return NULL;
}

pdk_entry *pdk_pool_entry(pdk_pool *p, const char *id)
{
    pdk_entry *e = pdk_pool_find(p, id);
    if (e != NULL)
        return e;
    size_t len = strnlen(id, 63);
    e = calloc(1, sizeof *e + len + 1);
    if (e == NULL)
        return NULL;
    memcpy(e->id, id, len);
    e->due = PDK_NEVER;
    e->idle_limit = -1;
    if (!pdk_map_insert(&p->ids, &e->by_id, pdk_hash(e->id, strlen(e->id)))) {
        free(e);
        return NULL;
    }
    p->count[PDK_ABSENT]++;
    return e;
}

void pdk_entry_id(const pdk_entry *e, char id[64])
{
    size_t len = strlen(e->id);
    memcpy(id, e->id, len + 1);
}

char *pdk_entry_copy_generation(const pdk_entry *e)
{
    return e->generation != NULL ? strdup(e->generation) : NULL;
}

/* ---- identities ---- */

static uint64_t identity_hash(const char *user, size_t user_len, const char *thread, size_t thread_len)
{
    return pdk_hash(user, user_len) * 31 + pdk_hash(thread, thread_len); /* lengths are part of each hash */
}

bool pdk_entry_is(const pdk_entry *e, const pdk_identity *who)
{
    return e->has_identity && e->user_len == who->user_len && e->thread_len == who->thread_len &&
           memcmp(e->user, who->user, who->user_len) == 0 && memcmp(e->user + e->user_len + 1, who->thread, who->thread_len) == 0;
}

pdk_entry *pdk_pool_by_identity(pdk_pool *p, const pdk_identity *who)
{
    uint64_t hash = identity_hash(who->user, who->user_len, who->thread, who->thread_len);
    for (pdk_node *n = pdk_map_chain(&p->identities, hash); n != NULL; n = n->next) {
        pdk_entry *e = PDK_OF(n, pdk_entry, by_identity);
        if (n->hash == hash && pdk_entry_is(e, who))
            return e;
    }
    return NULL;
}

bool pdk_entry_set_identity(pdk_entry *e, const pdk_identity *who)
{
    if (e->has_identity)
        return pdk_entry_is(e, who);
    assert(who->user_len <= UINT16_MAX && who->thread_len <= UINT16_MAX); /* both are limited where they come in */
    char *user = calloc(1, who->user_len + who->thread_len + 2), *thread = user == NULL ? NULL : user + who->user_len + 1;
    if (user == NULL)
        return false;
    if (who->user_len > 0)
        memcpy(user, who->user, who->user_len);
    if (who->thread_len > 0)
        memcpy(thread, who->thread, who->thread_len);
    e->user = user;
    e->user_len = (uint16_t)who->user_len;
    e->thread_len = (uint16_t)who->thread_len;
    e->has_identity = true;
    return true;
}

/* ---- metadata ---- */

bool pdk_entry_set_info(pdk_pool *p, pdk_entry *e, pdk_view info, bool new_incarnation)
{
    pdk_pack copy = PDK_NO_PACK;
    if (!pdk_pack_copy(&copy, info))
        return false;
    const char *generation = pdk_view_str(pdk_view_get(pdk_view_of(&copy), "generation"), NULL);
    bool same = e->generation != NULL && generation != NULL && strcmp(e->generation, generation) == 0;
    if (!same) {
        planes_clear(e);
        pdk_entry_set_retry(p, e, false);
        e->journaled = e->doomed = false;
        e->created_at = 0;
    }
    if (!same || new_incarnation)
        e->incarnation = p->next_incarnation++;
    info_free(e);
    e->info = (pdk_view){ copy.data, copy.len };
    e->generation = generation;
    return true;
}

bool pdk_entry_dirty(const pdk_entry *e)
{
    for (int i = 0; i < PDK_PLANES; i++)
        if (e->plane[i].ambiguous || (e->plane[i].pending > 0 && e->holder_count == 0))
            return true;
    return false;
}

/* ---- the heap of what is due ---- */

static void heap_put(pdk_pool *p, size_t at, pdk_entry *e)
{
    p->heap[at] = e;
    e->heap_at = (uint32_t)at;
}

static void heap_up(pdk_pool *p, size_t at)
{
    pdk_entry *e = p->heap[at];
    for (; at > 1 && p->heap[at / 2]->due > e->due; at /= 2)
        heap_put(p, at, p->heap[at / 2]);
    heap_put(p, at, e);
}

static void heap_down(pdk_pool *p, size_t at)
{
    pdk_entry *e = p->heap[at];
    for (size_t child; (child = at * 2) <= p->heap_len; at = child) {
        if (child < p->heap_len && p->heap[child + 1]->due < p->heap[child]->due)
            child++;
        if (p->heap[child]->due >= e->due)
            break;
        heap_put(p, at, p->heap[child]);
    }
    heap_put(p, at, e);
}

static void heap_remove(pdk_pool *p, pdk_entry *e)
{
    size_t at = e->heap_at;
    pdk_entry *last = p->heap[p->heap_len--];
    e->heap_at = 0;
    if (last != e) {
        heap_put(p, at, last);
        heap_up(p, at);
        heap_down(p, last->heap_at);
    }
    if (p->heap_cap > 1024 && p->heap_len < p->heap_cap / 8) { /* a burst must not keep its memory for ever */
        pdk_entry **heap = realloc(p->heap, p->heap_cap / 4 * sizeof *heap);
        if (heap != NULL) {
            p->heap = heap;
            p->heap_cap /= 4;
        }
    }
}

void pdk_pool_set_due(pdk_pool *p, pdk_entry *e, pdk_ns due)
{
    e->due = due;
    if (due == PDK_NEVER) {
        if (e->heap_at != 0)
            heap_remove(p, e);
        return;
    }
    if (e->heap_at == 0) {
        assert(p->heap_len < UINT32_MAX);
        if (p->heap_len + 1 >= p->heap_cap) {
            size_t cap = p->heap_cap == 0 ? 64 : p->heap_cap * 2;
            pdk_entry **heap = realloc(p->heap, cap * sizeof(*heap));
            if (heap == NULL) { /* it is not reaped by age then; eviction and shutdown still find it */
                e->due = PDK_NEVER;
                return;
            }
            p->heap = heap;
            p->heap_cap = cap;
        }
        heap_put(p, ++p->heap_len, e);
    }
    heap_up(p, e->heap_at);
    heap_down(p, e->heap_at);
}

/* ---- moves ---- */

static void lru_add(pdk_pool *p, pdk_entry *e)
{
    e->newer = NULL;
    e->older = p->newest;
    if (p->newest != NULL)
        p->newest->newer = e;
    else
        p->oldest = e;
    p->newest = e;
}

static void lru_remove(pdk_pool *p, pdk_entry *e)
{
    *(e->older != NULL ? &e->older->newer : &p->oldest) = e->newer;
    *(e->newer != NULL ? &e->newer->older : &p->newest) = e->older;
    e->older = e->newer = NULL;
}

static void set_mapped(pdk_pool *p, pdk_entry *e, bool mapped)
{
    if (mapped == e->mapped)
        return;
    if (!mapped)
        pdk_map_remove(&p->identities, &e->by_identity);
    else if (!pdk_map_insert(&p->identities, &e->by_identity,
                             identity_hash(e->user, e->user_len, pdk_entry_who(e).thread, e->thread_len)))
        return; /* it will be found by its id instead */
    e->mapped = mapped;
}

void pdk_entry_set_retry(pdk_pool *p, pdk_entry *e, bool retry)
{
    if (e->retry)
        p->retries[e->state]--;
    if (retry)
        p->retries[e->state]++;
    e->retry = retry;
}

void pdk_entry_move(pdk_pool *p, pdk_entry *e, pdk_state to)
{
    assert(MOVES[e->state][to]);
    assert(to != PDK_WARM || e->holder_count == 0);
    if (e->state == PDK_WARM)
        lru_remove(p, e);
    set_mapped(p, e, e->mapped && to == PDK_ACTIVE); /* before it is on the LRU, whose links lie where the mapping's do */
    p->count[e->state]--;
    p->retries[e->state] -= e->retry;
    e->state = to;
    p->count[to]++;
    p->retries[to] += e->retry;
    if (to == PDK_WARM)
        lru_add(p, e);
    set_mapped(p, e, to == PDK_ACTIVE && e->has_identity);
    if (to == PDK_ABSENT) {
        pdk_pool_set_due(p, e, PDK_NEVER);
        pdk_pool_drop_holders(p, e);
        planes_clear(e);
        info_free(e);
        requirements_drop(p, e);
        free(e->user);
        e->generation = e->user = NULL;
        e->user_len = e->thread_len = 0;
        pdk_entry_set_retry(p, e, false);
        e->has_identity = e->journaled = e->doomed = e->park_asked = e->keep_del = false;
        e->incarnation = 0;
        e->token = e->guest_token = 0;
        if (e->lease == PDK_LEASE_OWN)
            e->lease = PDK_LEASE_NONE;
        e->lease_until = e->last_used = e->parked_at = e->health_ok_at = e->created_at = 0;
        e->idle_limit = -1;
    }
}

void pdk_entry_sweep(pdk_pool *p, pdk_entry *e)
{
    if (e->state != PDK_ABSENT || e->reserved != 0 || e->intents > 0 || e->renewing || e->busy > 0)
        return;
    assert(e->client == NULL && e->holders == NULL && e->heap_at == 0 && !e->mapped);
    pdk_map_remove(&p->ids, &e->by_id);
    p->count[PDK_ABSENT]--;
    entry_free(p, e);
}

void pdk_entry_doomed(pdk_pool *p, pdk_entry *e, pdk_ns now)
{
    if (e->state == PDK_ABSENT)
        return;
    e->doomed = true;
    pdk_entry_set_retry(p, e, true);
    pdk_pool_set_due(p, e, now);
}

void pdk_entry_lapse(pdk_pool *p, const char *id, pdk_ns now)
{
    pdk_entry *e = pdk_pool_find(p, id);
    if (e == NULL || e->reserved_until == 0 || now < e->reserved_until)
        return;
    e->reserved = 0;
    e->reserved_until = 0;
    e->lease_until = 0; /* whose it is has to be asked anew */
    pdk_entry_sweep(p, e);
    pdk_cond_broadcast(&p->changed);
}

/* ---- holders ---- */

pdk_holder *pdk_pool_holder(pdk_pool *p, const char *name)
{
    uint64_t hash = pdk_hash(name, strlen(name));
    for (pdk_node *n = pdk_map_chain(&p->holders, hash); n != NULL; n = n->next) {
        pdk_holder *h = PDK_OF(n, pdk_holder, by_name);
        if (n->hash == hash && strcmp(h->name, name) == 0)
            return h;
    }
    return NULL;
}

pdk_holder *pdk_pool_bind(pdk_pool *p, pdk_entry *e, const char *name)
{
    pdk_holder *h = pdk_pool_holder(p, name);
    if (h != NULL && h->entry != e) /* its sandbox is gone or another's: the caller has checked that it may move on */
        pdk_pool_unbind(p, h), h = NULL;
    if (h == NULL) {
        size_t len = strlen(name);
        h = calloc(1, sizeof *h + len + 1);
        if (h == NULL)
            return NULL;
        memcpy(h->name, name, len + 1);
        h->entry = e;
        if (!pdk_map_insert(&p->holders, &h->by_name, pdk_hash(name, len))) {
            free(h);
            return NULL;
        }
        h->next = e->holders;
        e->holders = h;
        e->holder_count++;
    }
    h->incarnation = e->incarnation;
    h->token = e->token;
    return h;
}

void pdk_pool_unbind(pdk_pool *p, pdk_holder *h)
{
    pdk_entry *e = h->entry;
    for (pdk_holder **at = &e->holders; *at != NULL; at = &(*at)->next)
        if (*at == h) {
            *at = h->next;
            break;
        }
    e->holder_count--;
    pdk_map_remove(&p->holders, &h->by_name);
    free(h);
}

void pdk_pool_drop_holders(pdk_pool *p, pdk_entry *e)
{
    while (e->holders != NULL)
        pdk_pool_unbind(p, e->holders);
}

/* ---- clients ---- */

pdk_client *pdk_client_new(pdk_iface *object)
{
    pdk_client *c = calloc(1, sizeof *c);
    if (c == NULL) {
        pdk_iface_free(object);
        return NULL;
    }
    atomic_init(&c->refs, 1);
    c->object = object;
    return c;
}
pdk_client *pdk_client_ref(pdk_client *c)
{
    if (c != NULL)
        atomic_fetch_add(&c->refs, 1);
    return c;
}
void pdk_client_unref(pdk_client *c)
{
    if (c != NULL && atomic_fetch_sub(&c->refs, 1) == 1) {
        pdk_iface_free(c->object);
        free(c);
    }
}

/* ---- invariants ---- */

void pdk_pool_check(pdk_pool *p)
{
#ifdef PDK_CHECKS
    size_t count[PDK_STATES] = { 0 }, retries[PDK_STATES] = { 0 }, warm = 0;
    for (pdk_node *n = pdk_map_each(&p->ids, NULL); n != NULL; n = pdk_map_each(&p->ids, n)) {
        pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
        count[e->state]++;
        retries[e->state] += e->retry;
        int holders = 0;
        for (pdk_holder *h = e->holders; h != NULL; h = h->next, holders++)
            assert(h->entry == e);
        assert(holders == e->holder_count);
        assert(e->state != PDK_WARM || (e->holder_count == 0 && e->client == NULL));
        assert(!e->mapped || (e->state == PDK_ACTIVE && e->has_identity));
        assert(e->state != PDK_ABSENT || e->reserved != 0 || e->intents > 0 || e->renewing || e->busy > 0);
        assert(e->heap_at == 0 || p->heap[e->heap_at] == e);
    }
    for (pdk_entry *e = p->oldest; e != NULL; e = e->newer, warm++)
        assert(e->state == PDK_WARM && (e->newer == NULL ? p->newest == e : e->newer->older == e));
    for (size_t i = 2; i <= p->heap_len; i++)
        assert(p->heap[i / 2]->due <= p->heap[i]->due);
    assert(warm == count[PDK_WARM]);
    for (int s = 0; s < PDK_STATES; s++)
        assert(count[s] == p->count[s] && retries[s] == p->retries[s]);
#else
    (void)p;
#endif
}
