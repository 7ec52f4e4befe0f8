/* lease.h -- ownership: which runtime is responsible for a sandbox, `own` or `del`, with a TTL and a token.
 *
 * One interface, several stores: `memory` (lease.c; one runtime instance, and it says so) and a table of Lua functions
 * (lease_table.c; tests, an operator's own store). A store fills a pdk_lease_ops; everything else goes through the functions
 * below.
 *
 * Tokens are 64-bit, grow with each change of owner, and are at least the store's clock in microseconds, so that a store that
 * lost its state does not mint smaller ones.  Threads: any.  May wait for I/O: no lock but an identity's turn may be held.
 */
#ifndef PDK_LEASE_H
#define PDK_LEASE_H

#include "iface.h"

typedef struct pdk_lease pdk_lease;
typedef enum pdk_renewal { PDK_RENEWED, PDK_LAPSED, PDK_LOST } pdk_renewal;
typedef struct pdk_lease_owner {
    char owner[64];
    bool del;      /* state `del`, else `own` */
    bool ours;
    int64_t token;
} pdk_lease_owner;

/* What a store does; `self` is the store's own. The meaning of each is that of the function of the same name below. */
typedef struct pdk_lease_ops {
    const char *type;
    int (*take)(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err);
    int (*claim)(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err);
    int (*claim_for_destroy)(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err);
    int (*renew)(void *self, const char *id, pdk_renewal *out, pdk_error *err);
    int (*release)(void *self, const char *id, pdk_error *err);
    int (*owner_of)(void *self, const char *id, pdk_lease_owner *out, pdk_error *err);
    int (*close)(void *self, pdk_error *err); /* or NULL */
    void (*free)(void *self);
} pdk_lease_ops;
/* NULL = no memory; `self` is freed then. */
pdk_lease *pdk_lease_new(const pdk_lease_ops *ops, void *self, pdk_error *err);

/* The ttl is in seconds of `clock`. */
pdk_lease *pdk_lease_memory(const char *runtime_id, double ttl, pdk_clock *clock, pdk_error *err);
/* take(self, id, ctx), claim, claim_for_destroy -> true|false, token;  renew -> "renewed" | "lapsed" | "lost";  release(self,
 * id, ctx);  owner(self, id, ctx) -> { owner, state, token } or nil;  close(self).  ctx = { runtime, ttl, floor }. A store that
 * cannot answer raises: never read as a no. Takes `table`, also on failure. */
pdk_lease *pdk_lease_table(pdk_iface *table, const char *runtime_id, double ttl, pdk_error *err);
void pdk_lease_free(pdk_lease *l);
int pdk_lease_close(pdk_lease *l, pdk_error *err); /* tells the store; once */

/* All answer 1 = yes, 0 = no, -1 = could not answer (ownership_unavailable). *token is set with 1.
 * take: over no lease, an own one, a peer's `own`; not over any `del`. `floor`: the new token is larger than it (a guest has
 * seen it). claim: over no lease or an own `own` one. claim_for_destroy: the same, also over an own `del`; writes `del`. */
int pdk_lease_take(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
int pdk_lease_claim(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
int pdk_lease_claim_for_destroy(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
int pdk_lease_renew(pdk_lease *l, const char *id, pdk_renewal *out, pdk_error *err); /* 0 or -1 */
int pdk_lease_release(pdk_lease *l, const char *id, pdk_error *err);                 /* only an own one; 0 or -1 */
int pdk_lease_owner_of(pdk_lease *l, const char *id, pdk_lease_owner *out, pdk_error *err); /* 1, 0 = nobody, -1 */
const char *pdk_lease_type(const pdk_lease *l);

#endif
