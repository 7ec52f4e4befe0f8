/* async.h -- the operations of a runtime and of its boxes, asynchronously: what the bindings (C API, Lua) call. Each checks its
 * arguments, copies what it needs, and returns; NULL = not submitted, and err. Nothing here waits or calls Lua. How the caller is
 * told is in `how`; its `timeout` is the operation's deadline unless it says otherwise. See paddock.h for what each of them means.
 */
#ifndef PDK_ASYNC_H
#define PDK_ASYNC_H

#include "op.h"
#include "runtime.h"

/* The deadline: spec->timeout; how->timeout is not looked at. `json`: NULL, or the requirements as a JSON object, which is read, by
 * Lua, once it runs. */
pdk_op *pdk_async_acquire(pdk_runtime *rt, const pdk_acquire_spec *spec, const char *json, const pdk_op_how *how, pdk_error *err);
/* The deadline: spec->timeout, 0 = command_timeout; how->timeout is not looked at. */
pdk_op *pdk_async_exec(pdk_box *box, const pdk_exec_spec *spec, const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_release(pdk_box *box, const pdk_op_how *how, pdk_error *err);
/* A holder by its name, as pdk_runtime_release. */
pdk_op *pdk_async_release_holder(pdk_runtime *rt, const char *holder, const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_destroy(pdk_runtime *rt, const char *id, const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_shutdown(pdk_runtime *rt, const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_write(pdk_box *box, const char *path, size_t path_len, const void *data, size_t len, bool no_overwrite,
                        const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_read(pdk_box *box, const char *path, size_t path_len, const pdk_op_how *how, pdk_error *err);
pdk_op *pdk_async_list(pdk_box *box, const char *path, size_t path_len, const pdk_op_how *how, pdk_error *err);

/* How many operations a worker is at work for. */
int pdk_async_running(pdk_runtime *rt);
/* As pdk_fd, with the reason of a failure. `rt` NULL = of no runtime. */
int pdk_async_fd(pdk_runtime *rt, pdk_error *err);

/* Results, beside those of paddock.h. */
int pdk_op_pack(pdk_op *op, pdk_pack *out); /* of a list: 1 and appended, or 0 */

/* Waits for an acquire with a deadline, on whose behalf workers do the work (B201). */
int pdk_acquire_within(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_box **out, pdk_error *err);

#endif
