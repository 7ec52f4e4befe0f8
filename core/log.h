/* log.h -- one line per change of state: an event's name, then fields with the keys of the API.
 * Never commands, environment values or file contents.
 *
 * A line is written into a ring and taken out by a writer thread: a caller never waits for stderr. When the ring
 * is full the line is dropped and counted; the count is written with the next line. */
#ifndef PDK_LOG_H
#define PDK_LOG_H

#include "clock.h"
#include "pack.h"

typedef enum pdk_log_level { PDK_DEBUG, PDK_INFO, PDK_WARN, PDK_ERROR } pdk_log_level;
typedef struct pdk_log pdk_log;

typedef struct pdk_field {
    const char *key;
    enum { PDK_F_STR, PDK_F_NUM, PDK_F_INT } type;
    const char *str;
    double num;
    int64_t i;
} pdk_field;
#define PDK_STR(k, v) ((pdk_field){ .key = (k), .type = PDK_F_STR, .str = (v) }) /* NULL = left out */
#define PDK_NUM(k, v) ((pdk_field){ .key = (k), .type = PDK_F_NUM, .num = (v) })
#define PDK_INT(k, v) ((pdk_field){ .key = (k), .type = PDK_F_INT, .i = (v) })

/* Sink: NULL = JSON lines on stderr; else called with each record, packed as a map, on the logging thread (it
 * must only enqueue). `threads` false: stderr is written at once. */
typedef void (*pdk_log_sink)(void *ctx, const pdk_pack *record);
pdk_log *pdk_log_new(pdk_clock *clock, bool threads, pdk_log_level least, pdk_log_sink sink, void *ctx);
void pdk_log_free(pdk_log *log); /* writes what waits (at most 1 s), then ends */

/* The log of the operation that this thread works for, for code that is handed none (io.log of a backend); NULL = none.
 * Entering returns the former one, which must be set again. */
pdk_log *pdk_log_current(void);
pdk_log *pdk_log_enter(pdk_log *log);

/* `log` NULL = no log: nothing happens. Never waits; strings beyond 2 KiB are cut. */
void pdk_log_write(pdk_log *log, pdk_log_level level, const char *event, const pdk_field *fields, size_t n);
#define pdk_log_event(log, level, event, ...)                                                                \
    pdk_log_write((log), (level), (event), (const pdk_field[]){ __VA_ARGS__ },                               \
                  sizeof((const pdk_field[]){ __VA_ARGS__ }) / sizeof(pdk_field))
#endif
