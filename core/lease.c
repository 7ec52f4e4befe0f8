/* lease.c -- the memory store and the table store; see lease.h. `lock` guards the memory store's map. */
#include "lease.h"
#include "map.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct record { /* lock; one per id that has a lease */
    pdk_node node;
    bool del;
    int64_t token;
    pdk_ns until;
    char id[64];
} record;

struct pdk_lease {
    char runtime_id[64];   /* fixed at birth, as are ttl, clock and table */
    double ttl;
    pdk_clock *clock;
    pdk_iface *table;      /* NULL = memory */
    pdk_mutex lock;
    pdk_map records;       /* lock */
    int64_t last_token;    /* lock */
};

static pdk_lease *lease_new(const char *runtime_id, double ttl, pdk_error *err)
{
    pdk_lease *l = calloc(1, sizeof *l);
    if (l == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store");
        return NULL;
    }
    snprintf(l->runtime_id, sizeof l->runtime_id, "%s", runtime_id);
    l->ttl = ttl;
    pdk_mutex_init(&l->lock);
    return l;
}

pdk_lease *pdk_lease_memory(const char *runtime_id, double ttl, pdk_clock *clock, pdk_error *err)
{
    pdk_lease *l = lease_new(runtime_id, ttl, err);
    if (l != NULL)
        l->clock = clock;
    return l;
}

pdk_lease *pdk_lease_table(pdk_iface *table, const char *runtime_id, double ttl, pdk_error *err)
{
    pdk_lease *l = lease_new(runtime_id, ttl, err);
    if (l == NULL)
        pdk_iface_free(table);
    else
        l->table = table;
    return l;
}

void pdk_lease_free(pdk_lease *l)
{
    if (l == NULL)
        return;
    for (pdk_node *n = pdk_map_each(&l->records, NULL), *next; n != NULL; n = next) {
        next = pdk_map_each(&l->records, n);
        free(PDK_OF(n, record, node));
    }
    pdk_map_free(&l->records);
    pdk_iface_free(l->table);
    pdk_mutex_destroy(&l->lock);
    free(l);
}

const char *pdk_lease_type(const pdk_lease *l)
{
    return l->table != NULL ? "table" : "memory";
}

/* ---- table ---- */

static int table_call(pdk_lease *l, const char *method, const char *id, int64_t floor, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_mark ctx = pdk_begin_map(&args);
    pdk_kv_cstr(&args, &ctx, "runtime", l->runtime_id);
    pdk_kv_num(&args, &ctx, "ttl", l->ttl);
    pdk_kv_int(&args, &ctx, "floor", floor);
    pdk_end(&args, &ctx);
    if (args.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask the ownership store");
    if (pdk_iface_call(l->table, method, &args, out, pdk_limit_current(), PDK_E_OWNERSHIP_UNAVAILABLE, err) < 0)
        return err != NULL && err->kind == PDK_E_OWNERSHIP_UNAVAILABLE
                   ? -1
                   : pdk_error_become(err, PDK_E_OWNERSHIP_UNAVAILABLE, NULL, "the ownership store could not answer (%s of %s)",
                                      method, id);
    return 0;
}

static int bad_answer(pdk_error *err, const char *method)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0,
                    "the ownership store's %s gave no usable answer; it must answer true and an integer token, or false", method);
}

static int table_ask(pdk_lease *l, const char *method, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    if (table_call(l, method, id, floor, &out, err) < 0)
        return -1;
    pdk_view answer = pdk_view_nth(&out, 0);
    if (pdk_view_tag(answer) == 'f')
        return 0;
    if (pdk_view_tag(answer) != 't' || !pdk_view_int(pdk_view_nth(&out, 1), token) || *token <= floor)
        return bad_answer(err, method);
    return 1;
}

/* ---- memory ---- */

static record *find(pdk_lease *l, const char *id) PDK_REQUIRES(l->lock)
{
    uint64_t hash = pdk_hash(id, strlen(id));
    for (pdk_node *n = pdk_map_chain(&l->records, hash); n != NULL; n = n->next) {
        record *r = PDK_OF(n, record, node);
        if (n->hash == hash && strcmp(r->id, id) == 0)
            return r;
    }
    return NULL;
}

static void drop(pdk_lease *l, record *r) PDK_REQUIRES(l->lock)
{
    pdk_map_remove(&l->records, &r->node);
    free(r);
}

/* A lease that has run out is none. */
static record *live(pdk_lease *l, const char *id) PDK_REQUIRES(l->lock)
{
    record *r = find(l, id);
    if (r != NULL && pdk_clock_now(l->clock) >= r->until) {
        drop(l, r);
        r = NULL;
    }
    return r;
}

static int memory_set(pdk_lease *l, const char *id, int64_t floor, bool del, bool over_del, int64_t *token, pdk_error *err)
{
    PDK_GUARD(l->lock);
    record *r = live(l, id);
    if (r != NULL && r->del && !over_del)
        return 0;
    if (r == NULL) {
        r = calloc(1, sizeof *r);
        if (r == NULL || (snprintf(r->id, sizeof r->id, "%s", id),
                          !pdk_map_insert(&l->records, &r->node, pdk_hash(id, strlen(id))))) {
            free(r);
            return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "no memory for the lease of %s", id);
        }
    }
    if (r->token <= floor) { /* new, or somebody has fenced the guest with a larger one */
        int64_t micros = pdk_now_wall() / 1000;
        int64_t next = l->last_token + 1 > micros ? l->last_token + 1 : micros;
        l->last_token = r->token = next > floor ? next : floor + 1;
    }
    r->del = del;
    r->until = pdk_after(pdk_clock_now(l->clock), pdk_seconds(l->ttl));
    *token = r->token;
    return 1;
}

int pdk_lease_take(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->table != NULL ? table_ask(l, "take", id, floor, token, err)
                            : memory_set(l, id, floor, false, false, token, err);
}

int pdk_lease_claim(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->table != NULL ? table_ask(l, "claim", id, floor, token, err)
                            : memory_set(l, id, floor, false, false, token, err);
}

int pdk_lease_claim_for_destroy(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return l->table != NULL ? table_ask(l, "claim_for_destroy", id, floor, token, err)
                            : memory_set(l, id, floor, true, true, token, err);
}

int pdk_lease_renew(pdk_lease *l, const char *id, pdk_renewal *out, pdk_error *err)
{
    if (l->table == NULL) {
        PDK_GUARD(l->lock);
        record *r = live(l, id);
        if (r != NULL)
            r->until = pdk_after(pdk_clock_now(l->clock), pdk_seconds(l->ttl));
        *out = r != NULL ? PDK_RENEWED : PDK_LAPSED;
        return 0;
    }
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    if (table_call(l, "renew", id, 0, &answer, err) < 0)
        return -1;
    const char *s = pdk_view_str(pdk_view_nth(&answer, 0), NULL);
    if (s == NULL)
        return bad_answer(err, "renew");
    if (strcmp(s, "renewed") == 0)
        *out = PDK_RENEWED;
    else if (strcmp(s, "lapsed") == 0)
        *out = PDK_LAPSED;
    else if (strcmp(s, "lost") == 0)
        *out = PDK_LOST;
    else
        return bad_answer(err, "renew");
    return 0;
}

int pdk_lease_release(pdk_lease *l, const char *id, pdk_error *err)
{
    if (l->table != NULL) {
        PDK_AUTO_PACK out = PDK_NO_PACK;
        return table_call(l, "release", id, 0, &out, err);
    }
    PDK_GUARD(l->lock);
    record *r = find(l, id);
    if (r != NULL)
        drop(l, r);
    return 0;
}

int pdk_lease_owner_of(pdk_lease *l, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    memset(out, 0, sizeof *out);
    if (l->table == NULL) {
        PDK_GUARD(l->lock);
        record *r = live(l, id);
        if (r == NULL)
            return 0;
        snprintf(out->owner, sizeof out->owner, "%s", l->runtime_id);
        out->del = r->del;
        out->ours = true;
        out->token = r->token;
        return 1;
    }
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    if (table_call(l, "owner", id, 0, &answer, err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&answer);
    if (pdk_view_is_nil(v))
        return 0;
    const char *owner = pdk_view_str(pdk_view_get(v, "owner"), NULL), *state = pdk_view_str(pdk_view_get(v, "state"), NULL);
    if (owner == NULL || state == NULL)
        return bad_answer(err, "owner");
    snprintf(out->owner, sizeof out->owner, "%s", owner);
    out->del = strcmp(state, "own") != 0;
    out->ours = strcmp(owner, l->runtime_id) == 0;
    if (!pdk_view_int(pdk_view_get(v, "token"), &out->token))
        out->token = 0;
    return 1;
}

int pdk_lease_close(pdk_lease *l, pdk_error *err)
{
    if (l->table == NULL || !pdk_iface_has(l->table, "close"))
        return 0;
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    return pdk_iface_call(l->table, "close", &args, &out, pdk_limit_current(), PDK_E_OWNERSHIP_UNAVAILABLE, err);
}
