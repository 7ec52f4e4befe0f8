/* signals.h -- the option `signals`: TERM and INT shut the runtimes of this process down, HUP reloads their policies.
 *
 * Handlers are installed with the first runtime that asks for them and go with the last. They write one byte to a pipe; a thread
 * of ours (with threads = false: the next tick) does the work. Whoever handled the signal before is served afterwards: a former
 * handler is called once with it, the default disposition is restored and the signal raised again. A signal that is ignored
 * stays ignored.
 */
#ifndef PDK_SIGNALS_H
#define PDK_SIGNALS_H

#include "runtime.h"

/* A program that has handlers of its own (the CLI) says so once, before it opens a runtime: then nothing is installed. */
void pdk_signals_are_handled(void);
int pdk_signals_add(pdk_runtime *rt, bool threads, pdk_error *err); /* 0 or -1 */
void pdk_signals_remove(pdk_runtime *rt);                          /* not added = nothing */
/* Acts on what has come; never waits for more. For tick. */
void pdk_signals_poll(void);

#endif
