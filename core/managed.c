/* managed.c -- what only some engines do beside running sandboxes: copying skills in, and holding back what a sandbox wants from
 * the network until somebody decides. An engine that does it has functions for it; without them the defaults of rows S1 and R1
 * hold: nothing to copy, no events, nothing to decide.
 *
 * Which event was shown already is the engine's knowledge, since it outlives this process: network_events claims, and
 * deny_pending denies what was not claimed, each in one step (R2, R3). */
#include "core.h"

#include <stdio.h>
#include <string.h>

static int ask_backend(pdk_runtime *rt, const char *method, const pdk_pack *args, pdk_pack *out, const char *id, pdk_error *err)
{
    if (args->failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to call the backend");
    if (pdk_ask(rt, rt->backend, method, args, out, pdk_limit_current(), PDK_E_BACKEND_ERROR, err) == 0)
        return 0;
    if (err != NULL && err->sandbox_id[0] == '\0')
        pdk_error_set_id(err, id);
    if (err != NULL && err->stage[0] == '\0')
        pdk_error_set_stage(err, method);
    return -1;
}

/* What the engine told of an active sandbox, as the first argument. `who` NULL = whoever's; another's is as unknown as none (A5). */
static int put_info(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_pack *args, pdk_error *err)
{
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_find(&rt->pool, id);
    if (e == NULL || e->state != PDK_ACTIVE || e->retry || e->reserved != 0 || (who != NULL && !pdk_entry_is(e, who))) {
        pdk_fail(err, PDK_E_LOST, 0, "sandbox %s is not active here; acquire it", id);
        pdk_error_set_id(err, id);
        return -1;
    }
    pdk_put_view(args, e->info);
    return 0;
}

int pdk_runtime_sync_skills(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_view projection, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    if (pdk_check_id(id, err) < 0)
        return -1;
    if (!pdk_iface_has(rt->backend, "sync_skills"))
        return 0;
    if (put_info(rt, id, who, &args, err) < 0)
        return -1;
    pdk_mark m = pdk_begin_map(&args);
    if (who != NULL) {
        pdk_kv_str(&args, &m, "user", who->user, who->user_len);
        pdk_kv_str(&args, &m, "thread", who->thread, who->thread_len);
    }
    pdk_kv_view(&args, &m, "projection", projection);
    pdk_end(&args, &m);
    return ask_backend(rt, "sync_skills", &args, &out, id, err);
}

static bool short_text(pdk_view v, size_t size, bool needed)
{
    size_t len;
    const char *s = pdk_view_str(v, &len);
    return s == NULL ? !needed && pdk_view_is_nil(v) : len > 0 && len < size && strlen(s) == len;
}

/* An event that nobody could decide on, or that would be cut, is an error and not left out: it may be denied then, but not lost. */
static bool good_event(pdk_view event)
{
    int64_t port = 0;
    pdk_view_int(pdk_view_get(event, "port"), &port);
    return short_text(pdk_view_get(event, "request_id"), PDK_REQUEST_ID_SIZE, true) &&
           short_text(pdk_view_get(event, "host"), PDK_EVENT_HOST_SIZE, true) && port >= 0 && port <= 65535 &&
           short_text(pdk_view_get(event, "method"), PDK_EVENT_METHOD_SIZE, false);
}

int pdk_runtime_network_events(pdk_runtime *rt, const char *id, pdk_pack *out, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    if (pdk_check_id(id, err) < 0)
        return -1;
    if (pdk_iface_has(rt->backend, "network_events") &&
        (put_info(rt, id, NULL, &args, err) < 0 || ask_backend(rt, "network_events", &args, &answer, id, err) < 0))
        return -1;
    pdk_view list = pdk_view_of(&answer), key, event;
    pdk_mark m = pdk_begin_list(out);
    for (size_t cursor = 0; pdk_view_next(list, &cursor, &key, &event); m.count++) {
        if (!good_event(event))
            return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "backend %s: network_events must answer a list of { request_id =, host =, "
                            "port =, method = }", rt->backend_name);
        pdk_put_view(out, event);
    }
    pdk_end(out, &m);
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the events of %s", id) : 0;
}

/* A function that answers whether it did something. */
static int ask_whether(pdk_runtime *rt, const char *method, const pdk_pack *args, const char *id, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    if (ask_backend(rt, method, args, &out, id, err) < 0)
        return -1;
    char tag = pdk_view_tag(pdk_view_of(&out));
    if (tag == 't' || tag == 'f')
        return tag == 't';
    return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "backend %s: %s must answer true or false", rt->backend_name, method);
}

int pdk_runtime_deny_pending(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_AUTO_PACK args = PDK_NO_PACK;
    if (pdk_check_id(id, err) < 0)
        return -1;
    if (!pdk_iface_has(rt->backend, "deny_pending"))
        return 0;
    return put_info(rt, id, NULL, &args, err) < 0 ? -1 : ask_whether(rt, "deny_pending", &args, id, err);
}

static const char *const DECISIONS[] = { [PDK_NETWORK_DENY] = "deny", [PDK_NETWORK_ALLOW_ONCE] = "allow_once",
                                         [PDK_NETWORK_ALLOW] = "allow" };

int pdk_network_decision_of(const char *name)
{
    for (int d = PDK_NETWORK_DENY; d <= PDK_NETWORK_ALLOW; d++)
        if (strcmp(name, DECISIONS[d]) == 0)
            return d;
    return -1;
}

int pdk_runtime_decide(pdk_runtime *rt, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_AUTO_PACK args = PDK_NO_PACK;
    if (pdk_check_id(id, err) < 0)
        return -1;
    if ((unsigned)decision > PDK_NETWORK_ALLOW)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `decision` must be deny, allow_once or allow");
    if (!pdk_iface_has(rt->backend, "decide"))
        return 0;
    if (put_info(rt, id, NULL, &args, err) < 0)
        return -1;
    pdk_put_cstr(&args, request_id);
    pdk_put_cstr(&args, DECISIONS[decision]);
    return ask_whether(rt, "decide", &args, id, err);
}
