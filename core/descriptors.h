/* descriptors.h -- how many descriptors paddock may have open in this process: what exceeds the budget waits its turn.
 *
 * The budget is RLIMIT_NOFILE less what is open already and a reserve for the host. Whoever is about to open some takes them first,
 * and gives them back when they are closed again: HTTP requests, and engines that start processes (io.descriptors). Acquires may use
 * three quarters of it, commands seven eighths, all else the whole, so that a hung engine keeps no teardown from its connection.
 * Threads: any. A process's own, as the limit is. */
#ifndef PDK_DESCRIPTORS_H
#define PDK_DESCRIPTORS_H

#include "error.h"
#include "limit.h"

/* Waits until `n` may be opened, within `limit` and `deadline`. 0, or -1: timeout or cancelled by the limit; backend_error with the
 * reason "no_descriptors" when the deadline has passed. More than the whole budget is granted when nothing else is taken. */
int pdk_descriptors_take(int n, const pdk_limit *limit, pdk_ns deadline, pdk_error *err);
void pdk_descriptors_give(int n);
/* From here on, until false, what this thread takes and gives is part of what it has taken already: it waits for no more while it
 * holds some. Nests. */
void pdk_descriptors_cover(bool on);
/* For tests: the limit to count with in place of RLIMIT_NOFILE; 0 = that again. */
void pdk_descriptors_pretend(int limit);
int pdk_descriptors_taken(void);

#endif
