/* journal.h -- quarantine: generations that must never serve again, until they are confirmed absent.
 *
 * One interface, several forms: in memory (journal.c; this runtime's life only), on disk (journal_file.c; for good, and for all
 * runtimes of a state directory), on disk and in redis (journal_mirror.c; also for the runtimes of other machines) and a table of
 * Lua functions (journal.c; tests):
 * record(self, id, generation, why), has(self, id, generation) -> true|false, retire(self, id, generation), list(self) -> list of
 * { sandbox_id, generation, why }; generation nil = unknown. A form fills a pdk_journal_ops.
 *
 * An error is never read as "no record". A record of an unknown generation fences every generation of its id; an unknown
 * generation matches any record of the id.  Threads: any.  May wait for I/O.
 */
#ifndef PDK_JOURNAL_H
#define PDK_JOURNAL_H

#include "iface.h"

typedef struct pdk_journal pdk_journal;

/* generation NULL = unknown. */
typedef struct pdk_journal_ops {
    const char *type;
    int (*record)(void *self, const char *id, const char *generation, const char *why, pdk_error *err);
    int (*has)(void *self, const char *id, const char *generation, pdk_error *err);
    int (*retire)(void *self, const char *id, const char *generation, pdk_error *err);
    int (*list)(void *self, pdk_pack *out, pdk_error *err); /* appends a list of maps; or NULL */
    int (*republish)(void *self, pdk_error *err);           /* or NULL: there is nowhere to publish */
    void (*close)(void *self); /* or NULL */
    void (*free)(void *self);
} pdk_journal_ops;
pdk_journal *pdk_journal_new(const pdk_journal_ops *ops, void *self, pdk_error *err); /* NULL = no memory; self is freed */

pdk_journal *pdk_journal_memory(pdk_error *err);
/* In `state_dir`/quarantine; of one scope, as ids mean different sandboxes on different engines. Its list has the records of every
 * scope, each { path, sandbox_id, generation, why, scope, here (of this scope), at (seconds since 1970), age (seconds) }; of what
 * cannot be read, { path, here = false, problem }: it fences too. */
pdk_journal *pdk_journal_file(const char *state_dir, const char *scope, pdk_error *err);
/* `local`, a journal on disk, which this takes also when it fails, with its records mirrored into the redis server of `url`
 * (lease.h), for all runtimes of `scope`. A record is told to both, and looked for in both. Without an answer from the server
 * record, retire and list fail with io_error, and has with ownership_unavailable: an acquire that meets a server that is down
 * ends with one error, whether it is a record or a lease that it asks for first. */
pdk_journal *pdk_journal_mirror(pdk_journal *local, const char *url, const char *scope, pdk_error *err);
pdk_journal *pdk_journal_table(pdk_iface *table, pdk_error *err); /* takes table */
void pdk_journal_close(pdk_journal *j); /* gives back what it holds; what asks a store fails from now on */
void pdk_journal_free(pdk_journal *j);
const char *pdk_journal_type(const pdk_journal *j);
int pdk_journal_list(pdk_journal *j, pdk_pack *out, pdk_error *err);
/* Durable when it answers 0; recording twice is one record. */
int pdk_journal_record(pdk_journal *j, const char *id, const char *generation, const char *why, pdk_error *err);
int pdk_journal_has(pdk_journal *j, const char *id, const char *generation, pdk_error *err); /* 1, 0, -1 */
/* Of that generation; an unknown one that was proven absent was all that there was under the id: then all records of it. */
int pdk_journal_retire(pdk_journal *j, const char *id, const char *generation, pdk_error *err);
/* Heals a store that lost its records, from those that this machine has. Before each reconcile. */
int pdk_journal_republish(pdk_journal *j, pdk_error *err);

#endif
