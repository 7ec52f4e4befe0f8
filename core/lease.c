/* lease.c -- the interface of the ownership stores, and the memory store. `lock` guards the memory store's map. */
#include "lease.h"
#include "map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pdk_lease { /* fixed at birth */
    const pdk_lease_ops *ops;
    void *self;
};

pdk_lease *pdk_lease_new(const pdk_lease_ops *ops, void *self, pdk_error *err)
{
    pdk_lease *l = self == NULL ? NULL : calloc(1, sizeof *l);
    if (l == NULL) {
        if (self != NULL)
            ops->free(self);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store");
        return NULL;
    }
    *l = (pdk_lease){ ops, self };
    return l;
}

void pdk_lease_free(pdk_lease *l)
{
    if (l == NULL)
        return;
    l->ops->free(l->self);
    free(l);
}

const char *pdk_lease_type(const pdk_lease *l)
{
    return l->ops->type;
}
int pdk_lease_take(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->ops->take(l->self, id, floor, token, err);
}
int pdk_lease_claim(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->ops->claim(l->self, id, floor, token, err);
}
int pdk_lease_claim_for_destroy(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->ops->claim_for_destroy(l->self, id, floor, token, err);
}
int pdk_lease_renew(pdk_lease *l, const char *id, pdk_renewal *out, pdk_error *err)
{
    return l->ops->renew(l->self, id, out, err);
}
int pdk_lease_release(pdk_lease *l, const char *id, pdk_error *err)
{
    return l->ops->release(l->self, id, err);
}
int pdk_lease_owner_of(pdk_lease *l, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    memset(out, 0, sizeof *out);
    return l->ops->owner_of(l->self, id, out, err);
}
int pdk_lease_owner_gone(pdk_lease *l, const char *runtime_id, bool del_too, pdk_error *err)
{
    return l->ops->owner_gone != NULL ? l->ops->owner_gone(l->self, runtime_id, del_too, err) : 0;
}
int pdk_lease_close(pdk_lease *l, pdk_error *err)
{
    return l->ops->close != NULL ? l->ops->close(l->self, err) : 0;
}

int pdk_lease_mint(int64_t *last, int64_t floor, int64_t *token, pdk_error *err)
{
    int64_t micros = pdk_now_wall() / 1000, next = *last;
    if (floor > INT64_MAX / 2 || *last == INT64_MAX)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "there is no larger token than %lld", (long long)(floor > *last ? floor : *last));
    next = floor > next ? floor + 1 : next + 1;
    *token = *last = next > micros ? next : micros;
    return 0;
}

/* ---- memory ---- */

typedef struct record { /* lock; one per id that has a lease */
    pdk_node node;
    int64_t token;
    pdk_ns until;
    bool del;
    char id[];
} record;

typedef struct memory {
    char runtime_id[64]; /* fixed at birth, as are ttl and clock */
    double ttl;
    pdk_clock *clock;
    pdk_mutex lock;
    pdk_map records;     /* lock */
    int64_t last_token;  /* lock */
} memory;

static record *find(memory *m, const char *id) PDK_REQUIRES(m->lock)
{
    uint64_t hash = pdk_hash(id, strlen(id));
    for (pdk_node *n = pdk_map_chain(&m->records, hash); n != NULL; n = n->next) {
        record *r = PDK_OF(n, record, node);
        if (n->hash == hash && strcmp(r->id, id) == 0)
            return r;
    }
    return NULL;
}

static void drop(memory *m, record *r) PDK_REQUIRES(m->lock)
{
    pdk_map_remove(&m->records, &r->node);
    free(r);
}

/* A lease that has run out is none. */
static record *live(memory *m, const char *id) PDK_REQUIRES(m->lock)
{
    record *r = find(m, id);
    if (r != NULL && pdk_clock_now(m->clock) >= r->until) {
        drop(m, r);
        r = NULL;
    }
    return r;
}

static int set(memory *m, const char *id, int64_t floor, bool del, int64_t *token, pdk_error *err)
{
    PDK_GUARD(m->lock);
    record *r = live(m, id);
    if (r != NULL && r->del && !del)
        return 0;
    int64_t fresh = 0; /* wanted when it is new, or when somebody has fenced the guest with a larger one */
    if ((r == NULL || r->token <= floor) && pdk_lease_mint(&m->last_token, floor, &fresh, err) < 0)
        return -1;
    if (r == NULL) {
        size_t len = strlen(id);
        r = calloc(1, sizeof *r + len + 1);
        if (r != NULL)
            memcpy(r->id, id, len);
        if (r == NULL || !pdk_map_insert(&m->records, &r->node, pdk_hash(id, len))) {
            free(r);
            return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "no memory for the lease of %s", id);
        }
    }
    if (fresh != 0)
        r->token = fresh;
    r->del = del;
    r->until = pdk_after(pdk_clock_now(m->clock), pdk_seconds(m->ttl));
    *token = r->token;
    return 1;
}

static int memory_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return set(self, id, floor, false, token, err);
}
static int memory_claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return set(self, id, floor, true, token, err);
}

static int memory_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    (void)err;
    memory *m = self;
    PDK_GUARD(m->lock);
    record *r = live(m, id);
    if (r != NULL)
        r->until = pdk_after(pdk_clock_now(m->clock), pdk_seconds(m->ttl));
    *out = r != NULL ? PDK_RENEWED : PDK_LAPSED;
    return 0;
}

static int memory_release(void *self, const char *id, pdk_error *err)
{
    (void)err;
    memory *m = self;
    PDK_GUARD(m->lock);
    record *r = find(m, id);
    if (r != NULL)
        drop(m, r);
    return 0;
}

static int memory_owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    (void)err;
    memory *m = self;
    PDK_GUARD(m->lock);
    record *r = live(m, id);
    if (r == NULL)
        return 0;
    snprintf(out->owner, sizeof out->owner, "%s", m->runtime_id);
    out->del = r->del;
    out->ours = true;
    out->token = r->token;
    return 1;
}

static void memory_free(void *self)
{
    memory *m = self;
    for (pdk_node *n = pdk_map_each(&m->records, NULL), *next; n != NULL; n = next) {
        next = pdk_map_each(&m->records, n);
        free(PDK_OF(n, record, node));
    }
    pdk_map_free(&m->records);
    pdk_mutex_destroy(&m->lock);
    free(m);
}

static const pdk_lease_ops memory_ops = {
    .type = "memory",
    .take = memory_take,
    .claim = memory_take, /* one instance: there is no peer to take it from */
    .claim_for_destroy = memory_claim_for_destroy,
    .renew = memory_renew,
    .release = memory_release,
    .owner_of = memory_owner_of,
    .free = memory_free,
};

pdk_lease *pdk_lease_memory(const char *runtime_id, double ttl, pdk_clock *clock, pdk_error *err)
{
    memory *m = calloc(1, sizeof *m);
    if (m != NULL) {
        snprintf(m->runtime_id, sizeof m->runtime_id, "%s", runtime_id);
        m->ttl = ttl;
        m->clock = clock;
        pdk_mutex_init(&m->lock);
    }
    return pdk_lease_new(&memory_ops, m, err);
}
