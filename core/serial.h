/* serial.h -- turns: one acquire at a time for one identity, in this process and across processes.
 *
 * In process: a queue per key, first come first served; a key without a holder or waiter has no entry. Across processes: an
 * OFD lock of one byte in the file `turns` of the state directory, at the offset that the first 61 bits of SHA-256(id)
 * give: no file per id to grow or to race on, and the kernel gives it back when a process dies.
 * Threads: any. A waiter takes no worker and can be cancelled by its limit.
 */
#ifndef PDK_SERIAL_H
#define PDK_SERIAL_H

#include "error.h"
#include "limit.h"

typedef struct pdk_serial pdk_serial;

/* `turns_path`: the file, made when missing (0600); NULL = in process only. */
pdk_serial *pdk_serial_new(const char *turns_path, pdk_error *err);
void pdk_serial_free(pdk_serial *s);
/* Waiters end with PDK_E_CLOSED, as does every later wait; who has a turn still leaves cleanly. */
void pdk_serial_close(pdk_serial *s);
/* Closes the file too: when nobody has a turn any longer. */
void pdk_serial_close_file(pdk_serial *s);
/* How many keys have a holder or a waiter. */
size_t pdk_serial_keys(pdk_serial *s);

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

#endif
