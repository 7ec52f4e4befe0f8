/* events.h -- a bounded queue of records (events and log lines) on their way to Lua functions.
 *
 * Records are made on any thread, where no Lua may run; they wait here until a thread that may run the functions takes
 * them out. A full queue drops the newest and counts it: a host that never looks must not grow without bound.
 *
 * Threads: any.  Waits: never.
 */
#ifndef PDK_EVENTS_H
#define PDK_EVENTS_H

#include "pack.h"

typedef struct pdk_events pdk_events;

typedef enum pdk_record_type { PDK_RECORD_EVENT, PDK_RECORD_LOG } pdk_record_type;

/* At most `max` records wait. NULL = no memory. */
pdk_events *pdk_events_new(size_t max);
void pdk_events_free(pdk_events *q);

/* Called, on the thread that pushed and outside every lock of this queue, after each push. Set before the first one. */
void pdk_events_set_wake(pdk_events *q, void (*wake)(void *ctx), void *ctx);

/* The sinks of runtime.h and log.h: ctx is the queue. */
void pdk_events_sink_event(void *q, const pdk_pack *record);
void pdk_events_sink_log(void *q, const pdk_pack *record);

/* Takes the oldest into `record` (replaced); false when there is none. */
bool pdk_events_take(pdk_events *q, pdk_pack *record, pdk_record_type *type);
/* Waits for a record, at most until `deadline` on the real monotonic clock; false = none came, or pdk_events_stop. */
bool pdk_events_wait(pdk_events *q, int64_t deadline);
/* Ends every wait, now and later; what waits in the queue can still be taken. */
void pdk_events_stop(pdk_events *q);

size_t pdk_events_count(pdk_events *q);
uint64_t pdk_events_dropped(pdk_events *q);

#endif
