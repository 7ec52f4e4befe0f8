/* capi.h -- arguments of the public C interface; shared by capi.c and capi_async.c only. */
#ifndef PDK_CAPI_H
#define PDK_CAPI_H

#include "runtime.h"

int pdk_capi_missing(pdk_error *err, const char *name);
int pdk_capi_timeout(double timeout, pdk_error *err);
/* Reads a request, but for requirements_json. */
int pdk_capi_request(pdk_runtime *rt, const pdk_request *req, pdk_acquire_spec *spec, pdk_error *err);
/* Reads a command; `env` is where its environment is kept, as long as `spec` is used. */
int pdk_capi_command(pdk_box *box, const pdk_command *cmd, pdk_exec_spec *spec, pdk_pack *env, pdk_error *err);

#endif
