/* pool.h -- the registry: which sandboxes this process knows, and the state of each; and who holds them.
 *
 * Everything here is guarded by `registry`. It is held for a few hundred nanoseconds, never across I/O, never across Lua.
 * Functions marked PDK_REQUIRES expect it held; whoever needs several of them in one critical section (a test and a
 * reservation; a check and a hand-out) takes it once around them.
 *
 * Lock order: an identity's turn (serial.c), then the Lua mutex or the registry; never both of the last two.
 */
#ifndef PDK_POOL_H
#define PDK_POOL_H

#include "iface.h"
#include "map.h"
#include "policy.h"

#include <stdlib.h>

typedef enum pdk_state {
    PDK_ABSENT, /* nothing tracked: the entry carries a reservation or an intent only, and goes with it */
    PDK_ACTIVE, /* handed out, held or not */
    PDK_WARM,   /* parked */
    PDK_KEPT,   /* a stop of it failed: only the metadata is kept, for the retry */
    PDK_STATES
} pdk_state;
const char *pdk_state_name(pdk_state s);

typedef enum pdk_plane { PDK_PLANE_SHELL, PDK_PLANE_BASH, PDK_PLANES } pdk_plane;

/* What happened to the shells of one generation: it outlives clients (rows J4, J6). */
typedef struct pdk_plane_fence {
    bool default_fenced;   /* the default shell may hold a command of unknown outcome: never entered again */
    bool ambiguous;        /* a session's creation is of unknown outcome: no further one; recycle */
    int pending;           /* creations in flight */
    char *session;         /* owned; the explicit session that stands in for a fenced default shell; or NULL */
} pdk_plane_fence;

typedef struct pdk_scope { /* a scope's session in one generation */
    struct pdk_scope *next;
    char session[48];
    bool ready;            /* its creation has been answered */
    char name[];
} pdk_scope;

typedef struct pdk_client { /* one client object of a backend; reference counted by atomic `refs` */
    atomic_int refs;
    atomic_bool closed;
    pdk_iface *object;
} pdk_client;

typedef struct pdk_entry pdk_entry;

typedef struct pdk_holder {
    pdk_node by_name;
    struct pdk_holder *next;    /* of the same sandbox */
    pdk_entry *entry;           /* never NULL while it is in the table */
    uint64_t incarnation;       /* the entry's when it was bound: another one = lost */
    int64_t token;              /* likewise */
    char name[];
} pdk_holder;

typedef enum pdk_entry_lease { PDK_LEASE_NONE, PDK_LEASE_OWN, PDK_LEASE_DEL } pdk_entry_lease;

typedef struct pdk_shared { /* equal packs are kept once (pdk_pool.shared) */
    pdk_node node;
    size_t refs, len;
    unsigned char bytes[];
} pdk_shared;

struct pdk_entry { /* there may be 100,000 of them: what few have lies elsewhere */
    pdk_node by_id;
    union {                     /* no entry stands on both */
        pdk_node by_identity;   /* of the mapped ones */
        struct {
            pdk_entry *older, *newer; /* LRU of the WARM ones */
        };
    };
    uint8_t state;              /* a pdk_state */
    uint8_t lease;              /* a pdk_entry_lease: what we hold, as far as we know */
    bool mapped;                /* stands in by_identity: ACTIVE with a known identity */
    bool has_identity;
    bool renewing;              /* the renewer is at work on its lease */
    bool release_after;         /* ... and shall release it when it is through (M15) */
    bool keep_del;              /* a stop failed and neither record nor doom exists: the `del` lease goes on */
    bool retry;                 /* a stop of this generation failed: fenced, and to be stopped again */
    bool journaled, doomed;     /* of this generation */
    bool park_asked;            /* an ordinary holder has asked; remembered until the last one leaves (L13) */
    bool silent;                /* it did not answer when it was spoken to last (contacted_at) */
    uint16_t user_len, thread_len;
    char *user;                 /* owned; when has_identity: it, a NUL, the thread, a NUL */

    pdk_view info;              /* what the backend told of it; owned, a block as large as it is */
    const char *generation;     /* in info; NULL = unknown */
    pdk_shared *requirements;   /* of the acquire that created it, or that reclaimed it; NULL = unknown */
    uint64_t incarnation;       /* a number of its own for each registration of a generation */
    int64_t token;              /* of our lease; 0 = none */
    int64_t guest_token;        /* the largest that its guest has seen, as far as we know: what a doom is made under.
                                   Where there is no guest: the one that it was handed out under last */
    pdk_ns lease_until;         /* our own deadline for it, on the runtime's clock; 0 = none */
    uint64_t epoch;             /* grows whenever an acquire publishes ownership */
    uint64_t reserved;          /* the operation that is tearing it down; 0 = none */
    pdk_ns reserved_until;      /* 0, or: its claim was never answered, and may take effect until then (lease clock) */

    pdk_client *client;
    pdk_holder *holders;
    int intents;                /* acquires that are publishing its ownership */
    int holder_count;
    int busy;                   /* commands and file calls in flight */
    uint32_t heap_at;           /* its place on the heap, from 1; 0 = none */
    pdk_plane_fence plane[PDK_PLANES];
    pdk_scope *scopes;

    pdk_ns last_used, parked_at, health_ok_at, created_at; /* runtime clock; 0 = never */
    pdk_ns contacted_at;        /* when the renewal spoke to its guest last, while it was warm */
    double idle_limit;          /* seconds, what the policy answered last; 0 = never, negative = not asked yet */
    pdk_ns due;                 /* when the reaper looks at it; PDK_NEVER = it is on no heap */
    char id[];                  /* fixed at birth; at most 63 bytes and the NUL */
};

typedef struct pdk_pool {
    pdk_mutex registry;
    pdk_cond changed;           /* a reservation or a renewal ended; on the real clock */
    pdk_map ids, identities, holders, shared;
    size_t count[PDK_STATES];
    size_t retries[PDK_STATES]; /* of those, the ones whose stop failed: neither in use nor to be had */
    size_t creating;            /* creates in flight, for the caps */
    pdk_entry *oldest, *newest; /* WARM */
    pdk_entry **heap;           /* by due, smallest first; heap[1..heap_len] */
    size_t heap_len, heap_cap;
    uint64_t next_incarnation, next_op;
    struct { uint64_t acquires, active, warm, discovered, created, destroyed, stop_failures, evicted, expired, lost; } stats;
} pdk_pool;

void pdk_pool_init(pdk_pool *p);
void pdk_pool_free(pdk_pool *p); /* frees entries, holders and what they own; clients must be gone */
/* Checks the invariants in builds with PDK_CHECKS (asserts). */
void pdk_pool_check(pdk_pool *p) PDK_REQUIRES(p->registry);

pdk_entry *pdk_pool_find(pdk_pool *p, const char *id) PDK_REQUIRES(p->registry);
pdk_entry *pdk_pool_find_hashed(pdk_pool *p, const char *id, uint64_t hash) PDK_REQUIRES(p->registry); /* its pdk_hash */
/* Finds or makes an ABSENT one. NULL = no memory. */
pdk_entry *pdk_pool_entry(pdk_pool *p, const char *id) PDK_REQUIRES(p->registry);
pdk_entry *pdk_pool_by_identity(pdk_pool *p, const pdk_identity *who) PDK_REQUIRES(p->registry);
/* Its identity, when it is known: borrowed. */
static inline pdk_identity pdk_entry_who(const pdk_entry *e)
{
    return (pdk_identity){ e->user, e->user == NULL ? NULL : e->user + e->user_len + 1, e->user_len, e->thread_len };
}
bool pdk_entry_is(const pdk_entry *e, const pdk_identity *who); /* a known, equal identity */
/* Binds an identity to an entry that has none: false = no memory. */
bool pdk_entry_set_identity(pdk_entry *e, const pdk_identity *who);
/* Replaces the metadata: a new incarnation unless the generation is known and the same; plane fences, retry and journal
 * marks of another generation are dropped. false = no memory, nothing changed. */
bool pdk_entry_set_info(pdk_pool *p, pdk_entry *e, pdk_view info, bool new_incarnation) PDK_REQUIRES(p->registry);

/* What was required of it: empty when unknown. Valid as long as the registry is locked. */
pdk_view pdk_entry_requirements(const pdk_entry *e);
bool pdk_entry_set_requirements(pdk_pool *p, pdk_entry *e, pdk_view requirements) PDK_REQUIRES(p->registry); /* false = no memory */
void pdk_entry_id(const pdk_entry *e, char id[64]); /* a copy of its id */
/* A copy of its generation, for the event that is told once the registry is unlocked; free(). NULL = unknown, or no memory. */
char *pdk_entry_copy_generation(const pdk_entry *e);
static inline void pdk_text_free(char **text) { free(*text); }
#define PDK_AUTO_TEXT __attribute__((cleanup(pdk_text_free))) char *

/* The one place where a state changes; keeps maps, LRU, heap and counts. */
void pdk_entry_move(pdk_pool *p, pdk_entry *e, pdk_state to) PDK_REQUIRES(p->registry);
/* A stop of it failed, and it is fenced and to be stopped again; or not any more. The one place where `retry` changes. */
void pdk_entry_set_retry(pdk_pool *p, pdk_entry *e, bool retry) PDK_REQUIRES(p->registry);
/* Frees an ABSENT entry that nothing needs any longer. */
void pdk_entry_sweep(pdk_pool *p, pdk_entry *e) PDK_REQUIRES(p->registry);
/* Its guest says that it is doomed, although nothing here is tearing it down: a decision that was given up reached it late, or its
 * maker has crashed. It serves nobody any more, and is stopped as one whose stop has failed. `now`: runtime clock. */
void pdk_entry_doomed(pdk_pool *p, pdk_entry *e, pdk_ns now) PDK_REQUIRES(p->registry);
/* Ends a reservation of that id whose claim was never answered and can take effect no longer. `now`: lease clock. May free the
 * entry. */
void pdk_entry_lapse(pdk_pool *p, const char *id, pdk_ns now) PDK_REQUIRES(p->registry);
void pdk_pool_set_due(pdk_pool *p, pdk_entry *e, pdk_ns due) PDK_REQUIRES(p->registry);
/* Whether it must not serve again as it is (J7, L6): an ambiguous creation, or one abandoned with no holder left. */
bool pdk_entry_dirty(const pdk_entry *e);

pdk_holder *pdk_pool_holder(pdk_pool *p, const char *name) PDK_REQUIRES(p->registry);
/* Adds a holder, or binds the one that is there anew. NULL = no memory. */
pdk_holder *pdk_pool_bind(pdk_pool *p, pdk_entry *e, const char *name) PDK_REQUIRES(p->registry);
void pdk_pool_unbind(pdk_pool *p, pdk_holder *h) PDK_REQUIRES(p->registry);
/* All holders of a sandbox that is gone. */
void pdk_pool_drop_holders(pdk_pool *p, pdk_entry *e) PDK_REQUIRES(p->registry);

pdk_client *pdk_client_new(pdk_iface *object); /* takes it, also on failure; NULL = no memory */
pdk_client *pdk_client_ref(pdk_client *c);     /* NULL is fine */
void pdk_client_unref(pdk_client *c);          /* any thread; frees the object with the last one */

#endif
