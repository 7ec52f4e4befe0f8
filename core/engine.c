/* engine.c -- the backend's functions as the core calls them: arguments packed, answers checked, errors given a stage.
 * No decision is made here. An answer that is not understood is an error, never "no". */
#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *pdk_info_str(pdk_view info, const char *key)
{
    return pdk_view_str(pdk_view_get(info, key), NULL);
}

int64_t pdk_info_token(pdk_view info)
{
    pdk_view v = pdk_view_get(info, "token");
    int64_t token = 0;
    const char *s = pdk_view_str(v, NULL);
    if (s != NULL) {
        char *end;
        long long n = strtoll(s, &end, 10);
        return *s != '\0' && *end == '\0' && n > 0 ? n : 0;
    }
    return pdk_view_int(v, &token) && token > 0 ? token : 0;
}

size_t pdk_decimal(char to[24], int64_t n)
{
    char digits[24], *at = digits + sizeof digits;
    uint64_t left = n < 0 ? 0 - (uint64_t)n : (uint64_t)n;
    do
        *--at = (char)('0' + left % 10);
    while ((left /= 10) > 0);
    if (n < 0)
        *--at = '-';
    size_t len = (size_t)(digits + sizeof digits - at);
    memcpy(to, at, len);
    to[len] = '\0';
    return len;
}

static int no_memory(pdk_error *err)
{
    return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to call the backend");
}

int pdk_ask(pdk_runtime *rt, pdk_iface *f, const char *method, const pdk_pack *args, pdk_pack *out, const pdk_limit *limit,
            pdk_error_kind otherwise, pdk_error *err)
{
    pdk_limit keeping;
    pdk_log *outer = pdk_log_enter(rt->log);
    int rc = pdk_iface_call(f, method, args, out, pdk_limit_keeping(rt, limit, &keeping), otherwise, err);
    pdk_log_enter(outer);
    return rc;
}

static int call(pdk_runtime *rt, const char *method, const pdk_pack *args, pdk_pack *out, const char *stage, pdk_error *err)
{
    if (args->failed)
        return no_memory(err);
    if (pdk_ask(rt, rt->backend, method, args, out, pdk_limit_current(), PDK_E_BACKEND_ERROR, err) < 0) {
        pdk_error_set_stage(err, stage);
        return -1;
    }
    return 0;
}

static int bad(pdk_runtime *rt, pdk_error *err, const char *stage, const char *what)
{
    pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "backend %s: %s", rt->backend_name, what);
    pdk_error_set_stage(err, stage);
    return -1;
}

/* Metadata must name the sandbox that was asked about: anything else would be handed out under a wrong id. */
static int check_info(pdk_runtime *rt, pdk_view info, const char *id, const char *stage, pdk_error *err)
{
    char text[200];
    const char *got = pdk_info_str(info, "sandbox_id");
    if (pdk_view_tag(info) != '{') {
        snprintf(text, sizeof text, "%s must answer a table", stage);
        return bad(rt, err, stage, text);
    }
    if (got == NULL || strcmp(got, id) != 0) {
        snprintf(text, sizeof text, "%s answered metadata of sandbox %s, asked about %s", stage, got ? got : "(no sandbox_id)", id);
        return bad(rt, err, stage, text);
    }
    pdk_view gen = pdk_view_get(info, "generation");
    size_t len;
    const char *g = pdk_view_str(gen, &len);
    if (!pdk_view_is_nil(gen) && (g == NULL || len == 0 || strlen(g) != len)) {
        snprintf(text, sizeof text, "%s: generation must be a non-empty string or nil", stage);
        return bad(rt, err, stage, text);
    }
    return 0;
}

static int take_info(pdk_runtime *rt, pdk_view info, const char *id, const char *stage, pdk_pack *out, pdk_error *err)
{
    if (check_info(rt, info, id, stage, err) < 0)
        return -1;
    return pdk_pack_copy(out, info) ? 0 : no_memory(err);
}

int pdk_engine_create(pdk_runtime *rt, pdk_view spec, const char *id, pdk_pack *info, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    pdk_put_view(&args, spec);
    if (call(rt, "create", &args, &out, "create", err) < 0)
        return -1;
    return take_info(rt, pdk_view_of(&out), id, "create", info, err);
}

int pdk_engine_destroy(pdk_runtime *rt, pdk_view info, bool full, bool doomed, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    pdk_put_view(&args, info);
    pdk_mark opts = pdk_begin_map(&args);
    pdk_kv_bool(&args, &opts, "full", full);
    if (doomed)
        pdk_kv_bool(&args, &opts, "doomed", true);
    pdk_kv_num(&args, &opts, "timeout", rt->config.stop_timeout);
    pdk_end(&args, &opts);
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), rt->config.stop_timeout);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = call(rt, "destroy", &args, &out, "stop", err);
    pdk_limit_enter(outer);
    return rc;
}

int pdk_engine_inspect(pdk_runtime *rt, const char *id, pdk_view info, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_put_view(&args, info);
    if (call(rt, "inspect", &args, &answer, "inspect", err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&answer);
    if (pdk_view_is_nil(v))
        return 0;
    return take_info(rt, v, id, "inspect", out, err) < 0 ? -1 : 1;
}

int pdk_engine_discover(pdk_runtime *rt, const char *id, pdk_pack *info, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), rt->config.discover_timeout + 1);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = call(rt, "discover", &args, &out, "discover", err);
    pdk_limit_enter(outer);
    if (rc < 0)
        return -1;
    pdk_view v = pdk_view_of(&out);
    if (pdk_view_is_nil(v))
        return 0;
    return take_info(rt, v, id, "discover", info, err) < 0 ? -1 : 1;
}

static int truth(pdk_runtime *rt, const pdk_pack *out, const char *method, pdk_error *err)
{
    char tag = pdk_view_tag(pdk_view_of(out)), text[80];
    if (tag == 't' || tag == 'f')
        return tag == 't';
    snprintf(text, sizeof text, "%s must answer true or false", method);
    return bad(rt, err, method, text);
}

int pdk_engine_alive(pdk_runtime *rt, pdk_view info, int64_t token, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    char text[24];
    pdk_put_view(&args, info);
    pdk_mark opts = pdk_begin_map(&args);
    if (token > 0) {
        pdk_decimal(text, token);
        pdk_kv_cstr(&args, &opts, "token", text);
    }
    pdk_end(&args, &opts);
    return call(rt, "alive", &args, &out, "alive", err) < 0 ? -1 : truth(rt, &out, "alive", err);
}

int pdk_engine_ready(pdk_runtime *rt, pdk_view info, double seconds, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    pdk_put_view(&args, info);
    pdk_put_num(&args, seconds);
    return call(rt, "ready", &args, &out, "ready", err) < 0 ? -1 : truth(rt, &out, "ready", err);
}

int pdk_engine_list(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    if (call(rt, "list", &args, &answer, "list", err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&answer);
    if (pdk_view_tag(v) != '[' && !(pdk_view_tag(v) == '{' && pdk_view_count(v) == 0))
        return bad(rt, err, "list", "list must answer a list of tables");
    return pdk_pack_copy(out, v) ? 0 : no_memory(err);
}

int pdk_engine_finish(pdk_runtime *rt, const char *id, pdk_view info, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    if (!pdk_iface_has(rt->backend, "finish"))
        return 0;
    pdk_put_cstr(&args, id);
    pdk_put_view(&args, info);
    return call(rt, "finish", &args, &out, "finish", err);
}

int pdk_engine_probe(pdk_runtime *rt, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    if (!pdk_iface_has(rt->backend, "probe"))
        return bad(rt, err, "probe", "a policy asks for a probe, but this backend has no probe function");
    pdk_mark opts = pdk_begin_map(&args);
    pdk_kv_bool(&args, &opts, "fresh", true); /* what is kept, is kept here */
    pdk_end(&args, &opts);
    if (call(rt, "probe", &args, &answer, "probe", err) < 0)
        return -1;
    if (pdk_view_tag(pdk_view_of(&answer)) != '{')
        return bad(rt, err, "probe", "probe must answer a table of what the deployment can do");
    return pdk_pack_copy(out, pdk_view_of(&answer)) ? 0 : no_memory(err);
}

int pdk_engine_watch(pdk_runtime *rt, double seconds, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    pdk_put_num(&args, seconds);
    if (call(rt, "watch", &args, &answer, "watch", err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&answer);
    if (pdk_view_tag(v) != '[' && !(pdk_view_tag(v) == '{' && pdk_view_count(v) == 0))
        return bad(rt, err, "watch", "watch must answer a list of tables");
    return pdk_pack_copy(out, v) ? 0 : no_memory(err);
}

int pdk_engine_close(pdk_runtime *rt, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    return pdk_iface_has(rt->backend, "close") ? call(rt, "close", &args, &out, "shutdown", err) : 0;
}

int pdk_engine_connect(pdk_runtime *rt, pdk_view info, int64_t token, bool own, pdk_client **out, pdk_error *err)
{
    unsigned char room[1024];
    PDK_AUTO_PACK args = PDK_PACK_ON(room);
    pdk_iface *object = NULL;
    pdk_limit keeping;
    char text[24];
    pdk_decimal(text, token);
    pdk_put_view(&args, info);
    pdk_mark opts = pdk_begin_map(&args);
    pdk_kv_cstr(&args, &opts, "token", text);
    pdk_kv_num(&args, &opts, "command_timeout", rt->config.command_timeout);
    pdk_kv_bool(&args, &opts, "own", own); /* false = only for a doom: it takes no hold of the sandbox */
    pdk_end(&args, &opts);
    if (args.failed)
        return no_memory(err);
    pdk_log *outer = pdk_log_enter(rt->log);
    int rc = pdk_iface_make(rt->backend, "connect", &args, &object, pdk_limit_keeping(rt, pdk_limit_current(), &keeping),
                            PDK_E_BACKEND_ERROR, err);
    pdk_log_enter(outer);
    if (rc < 0) {
        pdk_error_set_stage(err, "acquire");
        return -1;
    }
    *out = pdk_client_new(object);
    return *out != NULL ? 0 : no_memory(err);
}

void pdk_client_close(pdk_runtime *rt, pdk_client *c, const char *id, const char *what)
{
    pdk_client_close_noting(rt, c, id, what, NULL);
}

void pdk_note_cancelled(pdk_error *first, pdk_error *later)
{
    if (first == NULL || later->kind != PDK_E_CANCELLED)
        return;
    pdk_error **at = &first->cause;
    if (first->kind == PDK_OK) {
        pdk_error_move(first, later);
        return;
    }
    while (*at != NULL)
        at = &(*at)->cause;
    if ((*at = calloc(1, sizeof **at)) != NULL)
        pdk_error_move(*at, later);
}

void pdk_client_close_noting(pdk_runtime *rt, pdk_client *c, const char *id, const char *what, pdk_error *cancelled)
{
    if (c == NULL)
        return;
    if (!atomic_exchange(&c->closed, true) && pdk_iface_has(c->object, "close")) {
        PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (pdk_ask(rt, c->object, "close", &args, &out, pdk_limit_current(), PDK_E_BACKEND_ERROR, &err) < 0)
            pdk_emit(rt, PDK_WARN, "client_close_failed", id, NULL, what, &err);
        pdk_note_cancelled(cancelled, &err);
    }
    pdk_client_unref(c);
}

static int token_call(pdk_runtime *rt, pdk_client *c, const char *method, int64_t expected, int64_t token, double seconds, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    char text[24];
    if (expected >= 0) {
        pdk_decimal(text, expected);
        pdk_put_cstr(&args, text);
    }
    pdk_decimal(text, token);
    pdk_put_cstr(&args, text);
    if (args.failed)
        return no_memory(err);
    pdk_limit limit = pdk_limit_for(pdk_limit_current(), seconds);
    return pdk_ask(rt, c->object, method, &args, &out, &limit, PDK_E_BACKEND_ERROR, err);
}

int pdk_client_fence(pdk_runtime *rt, pdk_client *c, int64_t token, pdk_error *err)
{
    int rc = token_call(rt, c, "fence", -1, token, 10, err);
    if (rc < 0)
        pdk_error_set_stage(err, "acquire");
    return rc;
}

int pdk_client_doom(pdk_runtime *rt, pdk_client *c, int64_t expected, int64_t token, pdk_error *err)
{
    return token_call(rt, c, "doom", expected, token, 1, err);
}
