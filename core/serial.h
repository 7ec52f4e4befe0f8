/* serial.h -- turns: one acquire at a time for one identity, in this process and across processes.
 *
 * In process: a queue per key, first come first served; a key without a holder or waiter has no entry. Across processes: an
 * OFD lock of one byte in the file `turns` of the state directory, at the offset that the first 61 bits of SHA-256(id)
 * give: no file per id to grow or to race on, and the kernel gives it back when a process dies.
 *
 * Whoever wants a turn waits on its own thread (pdk_turn_enter), or asks and is called back (pdk_turn_ask); both stand in one
 * queue. No peer can wake a waiter for a byte: while there are any that ask, one thread of the serializer looks for all of them.
 * Threads: any. Lock: one, held for moments, never across the byte's lock or unlock.
 */
#ifndef PDK_SERIAL_H
#define PDK_SERIAL_H

#include "error.h"
#include "limit.h"

typedef struct pdk_serial pdk_serial;

/* `turns_path`: the file, made when missing (0600); NULL = in process only. `threads`: whether it may start its own thread;
 * without, somebody calls pdk_serial_poll. */
pdk_serial *pdk_serial_new(const char *turns_path, bool threads, pdk_error *err);
void pdk_serial_free(pdk_serial *s);
/* Waiters end with PDK_E_CLOSED, as does every later wait; who has a turn still leaves cleanly. */
void pdk_serial_close(pdk_serial *s);
/* Closes the file too: when nobody has a turn any longer. */
void pdk_serial_close_file(pdk_serial *s);
/* How many keys have a holder or a waiter. */
size_t pdk_serial_keys(pdk_serial *s);
/* Looks once for the bytes that waiters ask for, and grants what is free now; for threads = false. Returns how many still wait. */
size_t pdk_serial_poll(pdk_serial *s);

typedef struct pdk_turn { /* owned by the operation that has the turn; pdk_turn_leave gives it back */
    struct pdk_serial *serial;
    struct pdk_turn_key *key;
    int64_t offset;             /* of the byte locked across processes; -1 = none */
} pdk_turn;
#define PDK_NO_TURN ((pdk_turn){ .offset = -1 })
#define PDK_AUTO_TURN __attribute__((cleanup(pdk_turn_leave))) pdk_turn

/* Waits for the key's turn. 0, or -1: timeout or cancelled by the limit, closed, no_memory. */
int pdk_turn_enter(pdk_serial *s, const void *key, size_t len, pdk_turn *turn, const pdk_limit *limit, pdk_error *err);
/* As enter, for a sandbox id, and then the byte across processes. io_error when that cannot be locked. */
int pdk_turn_enter_id(pdk_serial *s, const char *id, pdk_turn *turn, const pdk_limit *limit, pdk_error *err);
void pdk_turn_leave(pdk_turn *turn); /* PDK_NO_TURN is fine */
/* The same for a thread that may not wait for the kernel: a byte is given back by the serializer's thread, and the turn with it. */
void pdk_turn_leave_soon(pdk_turn *turn);

typedef enum pdk_waiting { PDK_W_NOT, PDK_W_QUEUED, PDK_W_BYTE, PDK_W_CALLED } pdk_waiting;
typedef struct pdk_waiter { /* its owner's, zeroed before the first use; must not move while it waits */
    void (*granted)(void *ctx); /* fixed by the owner. Once per wait, under the serializer's lock: it may only enqueue */
    void *ctx;                  /* fixed by the owner */
    struct pdk_waiter *next, *prev; /* the rest: serializer's lock */
    struct pdk_turn_key *key;
    pdk_turn *turn;
    pdk_waiting state;
} pdk_waiter;

/* Asks for the key's turn (`turn` is PDK_NO_TURN before the first time) and never blocks. 1 = it is ours; 0 = queued: `granted` is
 * called once, later, on any thread, when it is ours or when there is nothing to wait for any longer: ask again then, with the
 * same arguments, to learn which; -1 = closed, no_memory. */
int pdk_turn_ask(pdk_serial *s, const void *key, size_t len, pdk_waiter *w, pdk_turn *turn, pdk_error *err);
/* The same for a sandbox id, and then the byte, which may take a wait, and a call of `granted`, of its own: as long as it answers
 * 0, ask again when called. Locks the byte: not for a thread that may not wait for the kernel. */
int pdk_turn_ask_id(pdk_serial *s, const char *id, pdk_waiter *w, pdk_turn *turn, pdk_error *err);
/* Leaves the queue, and gives back what `turn` has so far. true = it waited, and `granted` is never called for that wait; false =
 * it did not wait: it has been called (that call is over), or never asked; `turn` is as it was. Never blocks. */
bool pdk_turn_withdraw(pdk_serial *s, pdk_waiter *w);

#endif
