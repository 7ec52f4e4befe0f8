/* output.h -- where the output of the command that this thread runs goes while it runs; for io.output. */
#ifndef PDK_OUTPUT_H
#define PDK_OUTPUT_H

#include <stddef.h>

typedef struct pdk_output_sink { /* its owner's, for as long as it is in force */
    /* stream: 1 or 2. May wait; no lock may be held, and not the Lua mutex. */
    void (*put)(void *ctx, int stream, const void *bytes, size_t len);
    void *ctx;
} pdk_output_sink;

/* NULL = nobody wants it. */
const pdk_output_sink *pdk_output_current(void);
/* Sets it for this thread and returns the former one, which must be set again. */
const pdk_output_sink *pdk_output_enter(const pdk_output_sink *sink);

#endif
