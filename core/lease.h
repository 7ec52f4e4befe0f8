/* lease.h -- ownership: which runtime is responsible for a sandbox, `own` or `del`, with a TTL and a token.
 *
 * One interface, several stores: `memory` (lease.c; one runtime instance, and it says so), `file` (lease_file.c; the processes
 * of one machine that share a state directory), `redis` (lease_redis.c; several machines) and a table of Lua functions
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
    int (*owner_gone)(void *self, const char *runtime_id, bool del_too, pdk_error *err); /* or NULL */
    int (*close)(void *self, pdk_error *err); /* or NULL */
    void (*free)(void *self);
} pdk_lease_ops;
/* NULL = no memory; `self` is freed then. */
pdk_lease *pdk_lease_new(const pdk_lease_ops *ops, void *self, pdk_error *err);

/* The ttl is in seconds of `clock`. */
pdk_lease *pdk_lease_memory(const char *runtime_id, double ttl, pdk_clock *clock, pdk_error *err);
/* In `state_dir`/leases, for this boot; of one scope, as ids mean different sandboxes on different engines. The ttl is in seconds
 * of the boot clock, which goes on while the machine sleeps, whatever the runtime's clock is; only a manual one is asked itself.
 * It remembers for a day who had a lease last. */
pdk_lease *pdk_lease_file(const char *state_dir, const char *scope, const char *runtime_id, double ttl, pdk_clock *clock,
                          pdk_error *err);
/* The same of a given boot (letters, digits, "-"), as if on another machine: for tests and simulation. */
pdk_lease *pdk_lease_file_of_boot(const char *state_dir, const char *scope, const char *boot, const char *runtime_id, double ttl,
                                  pdk_clock *clock, pdk_error *err);
/* In a redis server (redis_addr.h has the URL's form), which several machines share. The ttl is in seconds of the server's clock.
 * Nothing is connected before the first call; each takes one round trip, and at most PDK_REDIS_WAIT. NULL: invalid_argument. */
pdk_lease *pdk_lease_redis(const char *url, const char *scope, const char *runtime_id, double ttl, pdk_error *err);
/* take(self, id, ctx), claim, claim_for_destroy -> true|false, token;  renew -> "renewed" | "lapsed" | "lost";  release(self,
 * id, ctx);  owner(self, id, ctx) -> { owner, state, token } or nil;  close(self).  ctx = { runtime, ttl, floor }. A store that
 * cannot answer raises: never read as a no. Takes `table`, also on failure. */
pdk_lease *pdk_lease_table(pdk_iface *table, const char *runtime_id, double ttl, pdk_error *err);
void pdk_lease_free(pdk_lease *l);
int pdk_lease_close(pdk_lease *l, pdk_error *err); /* tells the store; once */

/* All answer 1 = yes, 0 = no, -1 = could not answer (ownership_unavailable). *token is set with 1.
 * take: over no lease, an own one, a peer's `own`; not over any `del`. `floor`: the new token is larger than it (a guest has
 * seen it). claim: over no lease or an own `own` one. claim_for_destroy: the same, also over an own `del`; writes `del`.
 * The token is a new one whenever the owner changes. An owner that claims again after a lapse may get its former one, if the store
 * knows that nobody had the id meanwhile; from a new one it learns that this is not known (the store lost its state). */
int pdk_lease_take(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
int pdk_lease_claim(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
int pdk_lease_claim_for_destroy(pdk_lease *l, const char *id, int64_t floor, int64_t *token, pdk_error *err);
/* renewed: it is ours, in either state. lapsed: it ran out, and ours was the last token; or the store knows nothing of the id.
 * lost: somebody else has it, or had it since. */
int pdk_lease_renew(pdk_lease *l, const char *id, pdk_renewal *out, pdk_error *err); /* 0 or -1 */
int pdk_lease_release(pdk_lease *l, const char *id, pdk_error *err);                 /* only an own one; 0 or -1 */
int pdk_lease_owner_of(pdk_lease *l, const char *id, pdk_lease_owner *out, pdk_error *err); /* 1, 0 = nobody, -1 */
/* That runtime has died, says the kernel: its `own` leases end now, before their TTL. Its `del` ones go on, as what it has asked an
 * engine to stop may still be stopping, unless `del_too`. Stores of several machines, where nobody can tell, leave all to the TTL. */
int pdk_lease_owner_gone(pdk_lease *l, const char *runtime_id, bool del_too, pdk_error *err);
const char *pdk_lease_type(const pdk_lease *l);

/* For stores: a token larger than *last (which becomes it), than `floor`, and not below the wall clock in microseconds. -1: the
 * floor is beyond every honest token (a guest's answer must not wear the counter out). */
int pdk_lease_mint(int64_t *last, int64_t floor, int64_t *token, pdk_error *err);

#endif
