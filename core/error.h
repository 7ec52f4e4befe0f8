/* error.h -- making errors inside the core. An error is a value; see paddock.h. */
#ifndef PDK_ERROR_H
#define PDK_ERROR_H

#include "paddock.h"

/* Fills `err` (may be NULL) and returns -1, so that failing is one line. `sys` is errno (or 0); its text is
 * appended to the message. A former content of `err` is cleared. */
int pdk_fail(pdk_error *err, pdk_error_kind kind, int sys, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* The same with a stable reason code. */
int pdk_fail_reason(pdk_error *err, pdk_error_kind kind, const char *reason, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Same kind, reason, sandbox, stage; the former error becomes the cause. Returns -1. */
int pdk_error_wrap(pdk_error *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* As wrap, with another kind and reason (reason may be NULL). */
int pdk_error_become(pdk_error *err, pdk_error_kind kind, const char *reason, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
/* Moves `from` to `to`; `from` is PDK_NO_ERROR then. `to` may be NULL (then `from` is cleared). */
void pdk_error_move(pdk_error *to, pdk_error *from);
/* A copy of `from`, causes too (as far as there is memory for them). `to` may be NULL; its former content is cleared. */
void pdk_error_copy(pdk_error *to, const pdk_error *from);
void pdk_error_set_id(pdk_error *err, const char *sandbox_id);
void pdk_error_set_stage(pdk_error *err, const char *stage);
pdk_error_kind pdk_error_kind_of(const char *name); /* PDK_OK when there is no such kind */

/* Empties one that nothing was written to yet: what it says is nothing, the rest of its memory is left as it is. */
static inline void pdk_error_begin(pdk_error *err)
{
    err->kind = PDK_OK;
    err->reason[0] = err->message[0] = err->sandbox_id[0] = err->stage[0] = '\0';
    err->sys = err->attempt = 0;
    err->cause = NULL;
}
/* The end of one: its causes go. */
static inline void pdk_error_end(pdk_error *err)
{
    if (err->cause != NULL)
        pdk_error_clear(err);
}
#define PDK_AUTO_ERROR __attribute__((cleanup(pdk_error_end))) pdk_error

#endif
