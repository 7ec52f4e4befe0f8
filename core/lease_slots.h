/* lease_slots.h -- the file behind the `file` ownership store: a hash table of leases that the processes of one machine share.
 * What a lease means is lease_file.c's business; here is how one is found, written and never lost.
 *
 * Use: enter; then find, mint, put; then leave. Between enter and leave no other process and no other thread is in the table.
 * Threads: any.  Waits: enter, for at most 5 s and within the thread's limit.  All errors are ownership_unavailable.
 * A forked child must open its own: it shares the locks of its parent's.
 */
#ifndef PDK_LEASE_SLOTS_H
#define PDK_LEASE_SLOTS_H

#include "error.h"
#include "sync.h"

#define PDK_SLOT_KEY  32                         /* bytes: SHA-256 of what the lease is for */
#define PDK_SLOT_KEPT (24 * 3600 * PDK_NS_PER_S) /* how long a lease that has ended is remembered, at least */

typedef enum pdk_slot_state {
    PDK_SLOT_EMPTY = 1,
    PDK_SLOT_FREE,
    PDK_SLOT_OWN,
    PDK_SLOT_DEL
} pdk_slot_state; /* 0 is damage */

typedef struct pdk_slot { /* as on disk, in the machine's byte order: it never leaves the machine */
    uint64_t check;       /* of the rest, the table's nonce and the slot's position */
    unsigned char key[PDK_SLOT_KEY];
    int64_t token;
    pdk_ns until; /* when the lease ends or ended; of FREE: when it was released */
    uint32_t state, unused;
    char owner[64];
} pdk_slot;

typedef struct pdk_slots pdk_slots;

/* Of the boot `boot` (letters, digits, "-"), in `state_dir`/leases. `manual`: of runtimes with a manual clock, whose times mean
 * nothing to others. Makes what is missing; removes what former boots left, and goes on from their last token. */
pdk_slots *pdk_slots_open(const char *state_dir, const char *boot, bool manual, pdk_error *err);
void pdk_slots_close(pdk_slots *s); /* closes the files; what comes later fails */
void pdk_slots_free(pdk_slots *s);

int pdk_slots_enter(pdk_slots *s, pdk_error *err);
void pdk_slots_leave(pdk_slots *s);
/* 1 = *out is the slot of that key; 0 = there is none, and *out is what a new one starts from. -1 = damaged, or unreadable. */
int pdk_slots_find(pdk_slots *s, const unsigned char key[PDK_SLOT_KEY], pdk_slot *out, pdk_error *err);
/* A token larger than every one before and than `floor`. It counts once something is put. */
int pdk_slots_mint(pdk_slots *s, int64_t floor, int64_t *token, pdk_error *err);
/* Writes what was found last. `now`: of the leases' clock, for what may be forgotten when the table is full. */
int pdk_slots_put(pdk_slots *s, const pdk_slot *slot, pdk_ns now, pdk_error *err);
/* Frees every slot of that owner that is in state OWN, or also in state DEL: it ended at `now`. How many, or -1. Only when nobody can
 * be that owner. */
int pdk_slots_end_owner(pdk_slots *s, const char *owner, bool del_too, pdk_ns now, pdk_error *err);

#endif
