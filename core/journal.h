/* journal.h -- quarantine: generations that must never serve again, until they are confirmed absent.
 *
 * In memory (this runtime's life only), or a table of Lua functions: record(self, id, generation, why), has(self, id,
 * generation) -> true|false, retire(self, id, generation), with generation nil = unknown. An error is never read as "no record".
 * A record of an unknown generation fences every generation of its id; an unknown generation matches any record of the id.
 * Threads: any. May wait for I/O.
 */
#ifndef PDK_JOURNAL_H
#define PDK_JOURNAL_H

#include "iface.h"

typedef struct pdk_journal pdk_journal;

pdk_journal *pdk_journal_memory(pdk_error *err);
pdk_journal *pdk_journal_table(pdk_iface *table, pdk_error *err); /* takes table */
void pdk_journal_free(pdk_journal *j);
int pdk_journal_record(pdk_journal *j, const char *id, const char *generation, const char *why, pdk_error *err);
int pdk_journal_has(pdk_journal *j, const char *id, const char *generation, pdk_error *err); /* 1, 0, -1 */
int pdk_journal_retire(pdk_journal *j, const char *id, const char *generation, pdk_error *err);

#endif
