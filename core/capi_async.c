/* capi_async.c -- the asynchronous half of paddock.h, thin over async.h. Operations themselves (poll, wait, cancel, free) are
 * op_host.c's; taking results is where their kinds are. */
#include "async.h"
#include "capi.h"
#include "core.h"

#include <string.h>

PDK_API pdk_op *pdk_acquire_async(pdk_runtime *rt, const pdk_request *req, pdk_callback callback, void *ctx, pdk_error *err)
{
    pdk_acquire_spec spec;
    pdk_op_how how = { .callback = callback, .ctx = ctx };
    return pdk_capi_request(rt, req, &spec, err) < 0 ? NULL : pdk_async_acquire(rt, &spec, req->requirements_json, &how, err);
}

PDK_API pdk_op *pdk_exec_async(pdk_box *box, const pdk_command *cmd, pdk_output on_output, pdk_callback callback, void *ctx,
                               pdk_error *err)
{
    PDK_AUTO_PACK env = PDK_NO_PACK;
    pdk_exec_spec spec;
    pdk_op_how how = { .callback = callback, .on_output = on_output, .ctx = ctx };
    return pdk_capi_command(box, cmd, &spec, &env, err) < 0 ? NULL : pdk_async_exec(box, &spec, &how, err);
}

static bool given(const void *arg, const char *name, pdk_error *err)
{
    if (arg == NULL)
        pdk_capi_missing(err, name);
    return arg != NULL;
}

PDK_API pdk_op *pdk_release_async(pdk_box *box, pdk_callback callback, void *ctx, pdk_error *err)
{
    pdk_op_how how = { .callback = callback, .ctx = ctx };
    return given(box, "box", err) ? pdk_async_release(box, &how, err) : NULL;
}

PDK_API pdk_op *pdk_destroy_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                  pdk_error *err)
{
    pdk_op_how how = { .timeout = timeout, .callback = callback, .ctx = ctx };
    if (!given(rt, "rt", err) || !given(sandbox_id, "sandbox_id", err) || pdk_capi_timeout(timeout, err) < 0)
        return NULL;
    return pdk_async_destroy(rt, sandbox_id, &how, err);
}

PDK_API pdk_op *pdk_shutdown_async(pdk_runtime *rt, double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    pdk_op_how how = { .timeout = timeout, .callback = callback, .ctx = ctx };
    return given(rt, "rt", err) && pdk_capi_timeout(timeout, err) == 0 ? pdk_async_shutdown(rt, &how, err) : NULL;
}

PDK_API pdk_op *pdk_write_async(pdk_box *box, const char *path, const void *data, size_t len, double timeout, pdk_callback callback,
                                void *ctx, pdk_error *err)
{
    pdk_op_how how = { .timeout = timeout, .callback = callback, .ctx = ctx };
    if (!given(box, "box", err) || !given(path, "path", err) || (len > 0 && !given(data, "data", err)) ||
        pdk_capi_timeout(timeout, err) < 0)
        return NULL;
    return pdk_async_write(box, path, strlen(path), data, len, false, &how, err);
}

PDK_API pdk_op *pdk_read_async(pdk_box *box, const char *path, double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    pdk_op_how how = { .timeout = timeout, .callback = callback, .ctx = ctx };
    if (!given(box, "box", err) || !given(path, "path", err) || pdk_capi_timeout(timeout, err) < 0)
        return NULL;
    return pdk_async_read(box, path, strlen(path), &how, err);
}

PDK_API int pdk_fd(pdk_runtime *rt)
{
    return pdk_async_fd(rt, NULL);
}

PDK_API int pdk_dispatch(pdk_runtime *rt, int max)
{
    pdk_ops *ops = rt != NULL ? rt->ops : pdk_ops_process(NULL);
    return ops != NULL ? pdk_ops_dispatch(ops, max) : 0;
}
