/* clock.h -- the one clock of a runtime: monotonic, boottime or manual. Ages, leases, gaps and limits use it.
 * The wall clock serves records and policies' ctx.now only, and never a duration. */
#ifndef PDK_CLOCK_H
#define PDK_CLOCK_H

#include "sync.h"

typedef enum pdk_clock_type { PDK_CLOCK_MONOTONIC, PDK_CLOCK_BOOTTIME, PDK_CLOCK_MANUAL } pdk_clock_type;

typedef struct pdk_clock pdk_clock;

/* `threads`: with a manual clock, whether a wait waits for pdk_clock_advance (true) or advances it (false).
 * A manual clock starts at 1,000 s and its wall clock at the real one. NULL = no memory. */
pdk_clock *pdk_clock_new(pdk_clock_type type, bool threads);
void pdk_clock_free(pdk_clock *c);
bool pdk_clock_is_manual(const pdk_clock *c);
/* Never goes back. */
pdk_ns pdk_clock_now(pdk_clock *c);
pdk_ns pdk_clock_wall(pdk_clock *c); /* nanoseconds since 1970 */
/* Manual only: moves the clock and, by wall_s, the wall clock (which may go back), and wakes waiters. */
void pdk_clock_advance(pdk_clock *c, double s, double wall_s);
/* Waits on `cond` until signalled or until the clock reads `deadline` (PDK_NEVER = none); false = passed.
 * With a manual clock and no threads, it moves the clock to `deadline` at once and returns false. */
bool pdk_clock_wait(pdk_clock *c, pdk_cond *cond, pdk_mutex *m, pdk_ns deadline) PDK_REQUIRES(*m);

pdk_ns pdk_seconds(double s); /* saturating; NaN and negative = 0, +inf = PDK_NEVER */
double pdk_to_seconds(pdk_ns ns);
pdk_ns pdk_after(pdk_ns now, pdk_ns duration); /* saturating sum */

#endif
