/* impl.c -- implementations of a sandbox runtime behind one interface: a host's three functions with defaults for the rest, or
 * paddock's own runtime.
 *
 * Why counted: the default instance can be replaced or detached at any moment, by any thread, while others are inside a call of
 * it. Each of them has a reference, and so has each client that get gave; the last one to go frees it. Nothing else would keep
 * the memory of a detached implementation under the feet of those who still use it.
 *
 * Holders: an implementation that knows none gets them from here. A binding says that somebody has the id in use; a release by id
 * changes nothing meanwhile, and the last one to leave releases it. An implementation with holders of its own (a runtime) keeps
 * them where its reaper sees them.
 *
 * Locks: `lock` guards the holders alone, for moments; an implementation's functions are called without it. */
#include "impl.h"
#include "runtime.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct holding {
    struct holding *next;
    char id[PDK_ID_SIZE];
    char holder[];
} holding;

struct pdk_impl {
    pdk_impl_ops ops;    /* fixed; what is absent is NULL */
    void *self;          /* fixed */
    bool ours;           /* fixed: self is a pdk_runtime */
    atomic_int refs;
    pdk_mutex lock;
    holding *holdings;   /* lock */
};

/* ---- making and ending ---------------------------------------------------------------------------------- */

static pdk_impl *impl_new(const pdk_impl_ops *ops, void *self, bool ours, pdk_error *err)
{
    pdk_impl *impl = calloc(1, sizeof *impl);
    if (impl == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an implementation");
        return NULL;
    }
    memcpy(&impl->ops, ops, ops->size < sizeof impl->ops ? ops->size : sizeof impl->ops);
    impl->self = self;
    impl->ours = ours;
    atomic_init(&impl->refs, 1);
    pdk_mutex_init(&impl->lock);
    return impl;
}

static pdk_impl *refuse(pdk_error *err, const char *what)
{
    pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `ops` %s", what);
    return NULL;
}

PDK_API pdk_impl *pdk_impl_new(const pdk_impl_ops *ops, void *self, pdk_error *err)
{
    if (ops == NULL)
        return refuse(err, "is missing");
    if (ops->size < offsetof(pdk_impl_ops, free))
        return refuse(err, "has no size: set it to sizeof(pdk_impl_ops)");
    if (ops->acquire == NULL || ops->get == NULL || ops->release == NULL)
        return refuse(err, ops->acquire == NULL ? "has no function acquire" : ops->get == NULL ? "has no function get"
                                                                                               : "has no function release");
    pdk_impl *impl = impl_new(ops, self, false, err);
    if (impl == NULL)
        return NULL;
    int own = (impl->ops.retain != NULL) + (impl->ops.leave != NULL) + (impl->ops.binding != NULL) +
              (impl->ops.discard_holders != NULL);
    if (own == 0 || own == 4)
        return impl;
    impl->ops.free = NULL; /* on error `self` stays the caller's */
    pdk_impl_unref(impl);
    return refuse(err, "has some of retain, leave, binding and discard_holders: give all four, or none");
}

PDK_API pdk_impl *pdk_impl_ref(pdk_impl *impl)
{
    if (impl != NULL)
        atomic_fetch_add(&impl->refs, 1);
    return impl;
}

static void drop_holdings(pdk_impl *impl)
{
    holding *h;
    {
        PDK_GUARD(impl->lock);
        h = impl->holdings;
        impl->holdings = NULL;
    }
    while (h != NULL) {
        holding *next = h->next;
        free(h);
        h = next;
    }
}

PDK_API void pdk_impl_unref(pdk_impl *impl)
{
    if (impl == NULL || atomic_fetch_sub(&impl->refs, 1) != 1)
        return;
    drop_holdings(impl);
    if (impl->ops.free != NULL)
        impl->ops.free(impl->self);
    pdk_mutex_destroy(&impl->lock);
    free(impl);
}

/* ---- calls ---------------------------------------------------------------------------------------------- */

/* The end of a call: its error reaches the caller, and one that says nothing is given a kind and a message. */
static int answered(int rc, const char *what, pdk_error *own, pdk_error *err)
{
    if (rc >= 0) {
        pdk_error_clear(own);
        return rc;
    }
    if (own->kind == PDK_OK)
        pdk_fail(own, PDK_E_BACKEND_ERROR, 0, "the implementation's %s failed and did not say why", what);
    pdk_error_move(err, own);
    return -1;
}

static int missing(pdk_error *err, const char *name)
{
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` is missing", name);
}

PDK_API int pdk_impl_acquire(pdk_impl *impl, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err)
{
    if (impl == NULL || req == NULL || id == NULL)
        return missing(err, impl == NULL ? "impl" : req == NULL ? "req" : "id");
    pdk_error own = PDK_NO_ERROR;
    id[0] = '\0';
    int rc = impl->ops.acquire(impl->self, req, id, &own);
    size_t len = strnlen(id, PDK_ID_SIZE);
    if (rc >= 0 && (len == 0 || len == PDK_ID_SIZE)) {
        pdk_fail(&own, PDK_E_BACKEND_ERROR, 0, "the implementation's acquire must answer an id of 1 to %d bytes", PDK_ID_SIZE - 1);
        rc = -1;
    }
    if (rc < 0)
        id[0] = '\0';
    return answered(rc < 0 ? -1 : 0, "acquire", &own, err);
}

PDK_API int pdk_impl_get(pdk_impl *impl, const char *id, const pdk_request *who, void **client, pdk_error *err)
{
    if (client != NULL)
        *client = NULL;
    if (impl == NULL || id == NULL || client == NULL)
        return missing(err, impl == NULL ? "impl" : id == NULL ? "id" : "client");
    pdk_error own = PDK_NO_ERROR;
    int rc = who == NULL ? impl->ops.get(impl->self, id, client, &own)
             : impl->ops.get_scoped != NULL ? impl->ops.get_scoped(impl->self, id, who, client, &own)
                                            : 0; /* A5: who an id belongs to is not known */
    if (rc < 0)
        *client = NULL;
    if (*client != NULL)
        pdk_impl_ref(impl);
    return answered(rc < 0 ? -1 : 0, "get", &own, err);
}

PDK_API void pdk_impl_put(pdk_impl *impl, void *client)
{
    if (impl == NULL || client == NULL)
        return;
    if (impl->ops.put != NULL)
        impl->ops.put(impl->self, client);
    pdk_impl_unref(impl);
}

PDK_API pdk_impl_facts pdk_impl_describe(pdk_impl *impl)
{
    pdk_impl_facts facts = { .upload_permission_adjustment = true, .network_mode = "open", .network_grant = 300 };
    if (impl != NULL && impl->ops.facts != NULL)
        impl->ops.facts(impl->self, &facts);
    return facts;
}

PDK_API int pdk_impl_sync_skills(pdk_impl *impl, const pdk_skills *skills, pdk_error *err)
{
    if (impl == NULL || skills == NULL)
        return missing(err, impl == NULL ? "impl" : "skills");
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.sync_skills != NULL ? impl->ops.sync_skills(impl->self, skills, &own) : 0;
    return answered(rc < 0 ? -1 : 0, "sync_skills", &own, err);
}

PDK_API int pdk_impl_network_events(pdk_impl *impl, const char *id, pdk_network_event **out, pdk_error *err)
{
    if (out != NULL)
        *out = NULL;
    if (impl == NULL || id == NULL || out == NULL)
        return missing(err, impl == NULL ? "impl" : id == NULL ? "id" : "out");
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.network_events != NULL ? impl->ops.network_events(impl->self, id, out, &own) : 0;
    return answered(rc, "network_events", &own, err);
}

PDK_API int pdk_impl_deny_pending(pdk_impl *impl, const char *id, pdk_error *err)
{
    if (impl == NULL || id == NULL)
        return missing(err, impl == NULL ? "impl" : "id");
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.deny_pending != NULL ? impl->ops.deny_pending(impl->self, id, &own) : 0;
    return answered(rc > 0 ? 1 : rc, "deny_pending", &own, err);
}

PDK_API int pdk_impl_decide(pdk_impl *impl, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err)
{
    if (impl == NULL || id == NULL || request_id == NULL)
        return missing(err, impl == NULL ? "impl" : id == NULL ? "id" : "request_id");
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.decide != NULL ? impl->ops.decide(impl->self, id, request_id, decision, &own) : 0;
    return answered(rc > 0 ? 1 : rc, "decide", &own, err);
}

/* ---- holders -------------------------------------------------------------------------------------------- */

static holding **find_holding(pdk_impl *impl, const char *holder) PDK_REQUIRES(impl->lock)
{
    holding **at = &impl->holdings;
    while (*at != NULL && strcmp((*at)->holder, holder) != 0)
        at = &(*at)->next;
    return at;
}

static bool is_held(pdk_impl *impl, const char *id) PDK_REQUIRES(impl->lock)
{
    for (const holding *h = impl->holdings; h != NULL; h = h->next)
        if (strcmp(h->id, id) == 0)
            return true;
    return false;
}

PDK_API int pdk_impl_release(pdk_impl *impl, const char *id, pdk_error *err)
{
    if (impl == NULL || id == NULL)
        return missing(err, impl == NULL ? "impl" : "id");
    {
        PDK_GUARD(impl->lock);
        if (is_held(impl, id))
            return 0;
    }
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.release(impl->self, id, &own);
    return answered(rc < 0 ? -1 : 0, "release", &own, err);
}

static int retain_here(pdk_impl *impl, const char *id, const char *holder, pdk_error *err)
{
    size_t id_len = strnlen(id, PDK_ID_SIZE), len = strlen(holder);
    if (id_len == 0 || id_len == PDK_ID_SIZE || len == 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` must not be empty%s", len == 0 ? "holder" : "id",
                        id_len == PDK_ID_SIZE ? " or longer than an id" : "");
    PDK_GUARD(impl->lock);
    holding *h = *find_holding(impl, holder);
    if (h != NULL)
        return strcmp(h->id, id) == 0 ? 0 : pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "holder %.100s has sandbox %s and cannot have "
                                                     "another one as well; it must leave first", holder, h->id);
    h = malloc(sizeof *h + len + 1);
    if (h == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a holder");
    memcpy(h->id, id, id_len + 1);
    memcpy(h->holder, holder, len + 1);
    h->next = impl->holdings;
    impl->holdings = h;
    return 0;
}

PDK_API int pdk_impl_retain(pdk_impl *impl, const char *id, const char *holder, pdk_error *err)
{
    if (impl == NULL || id == NULL || holder == NULL)
        return missing(err, impl == NULL ? "impl" : id == NULL ? "id" : "holder");
    if (impl->ops.retain == NULL)
        return retain_here(impl, id, holder, err);
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.retain(impl->self, id, holder, &own);
    return answered(rc < 0 ? -1 : 0, "retain", &own, err);
}

PDK_API int pdk_impl_leave(pdk_impl *impl, const char *holder, pdk_error *err)
{
    if (impl == NULL || holder == NULL)
        return missing(err, impl == NULL ? "impl" : "holder");
    pdk_error own = PDK_NO_ERROR;
    if (impl->ops.leave != NULL) {
        int rc = impl->ops.leave(impl->self, holder, &own);
        return answered(rc < 0 ? -1 : 0, "leave", &own, err);
    }
    holding *h;
    bool last = false;
    {
        PDK_GUARD(impl->lock);
        holding **at = find_holding(impl, holder);
        h = *at;
        if (h != NULL) {
            *at = h->next;
            last = !is_held(impl, h->id);
        }
    }
    int rc = last ? pdk_impl_release(impl, h->id, err) : 0;
    free(h);
    return rc;
}

PDK_API int pdk_impl_binding(pdk_impl *impl, const char *holder, char id[PDK_ID_SIZE], pdk_error *err)
{
    if (impl == NULL || holder == NULL || id == NULL)
        return missing(err, impl == NULL ? "impl" : holder == NULL ? "holder" : "id");
    pdk_error own = PDK_NO_ERROR;
    if (impl->ops.binding != NULL) {
        int rc = impl->ops.binding(impl->self, holder, id, &own);
        return answered(rc > 0 ? 1 : rc, "binding", &own, err);
    }
    PDK_GUARD(impl->lock);
    const holding *h = *find_holding(impl, holder);
    if (h == NULL)
        return 0;
    memcpy(id, h->id, PDK_ID_SIZE);
    return 1;
}

void pdk_impl_discard_holders(pdk_impl *impl)
{
    drop_holdings(impl);
    if (impl->ops.discard_holders != NULL)
        impl->ops.discard_holders(impl->self);
}

/* ---- the end of its work -------------------------------------------------------------------------------- */

bool pdk_impl_can_shutdown(const pdk_impl *impl)
{
    return impl->ops.shutdown != NULL;
}

PDK_API void pdk_impl_reset(pdk_impl *impl)
{
    if (impl != NULL && impl->ops.reset != NULL)
        impl->ops.reset(impl->self);
}

PDK_API int pdk_impl_shutdown(pdk_impl *impl, pdk_error *err)
{
    if (impl == NULL)
        return missing(err, "impl");
    if (impl->ops.shutdown == NULL)
        return 0;
    pdk_error own = PDK_NO_ERROR;
    int rc = impl->ops.shutdown(impl->self, &own);
    return answered(rc < 0 ? -1 : 0, "shutdown", &own, err);
}

/* ---- paddock's own -------------------------------------------------------------------------------------- */

static int our_acquire(void *rt, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err)
{
    pdk_request mine = *req;
    pdk_box *box;
    mine.holder = NULL;
    mine.no_holder = true;
    if (pdk_acquire(rt, &mine, &box, err) < 0)
        return -1;
    snprintf(id, PDK_ID_SIZE, "%s", pdk_box_id(box));
    pdk_box_free(box); /* parks nothing: it has no holder */
    return 0;
}

static int our_get(void *rt, const char *id, void **client, pdk_error *err)
{
    pdk_box *box = NULL;
    int rc = pdk_runtime_get(rt, id, NULL, &box, err);
    *client = box;
    return rc;
}

static int our_get_scoped(void *rt, const char *id, const pdk_request *who, void **client, pdk_error *err)
{
    pdk_box *box = NULL;
    pdk_identity identity = { who->user, who->thread, who->user_len, who->thread_len };
    if (identity.user != NULL && identity.user_len == 0)
        identity.user_len = strlen(identity.user);
    if (identity.thread != NULL && identity.thread_len == 0)
        identity.thread_len = strlen(identity.thread);
    int rc = pdk_runtime_get(rt, id, &identity, &box, err);
    *client = box;
    return rc;
}

static void our_put(void *rt, void *client)
{
    (void)rt;
    pdk_box_free(client);
}

static int our_release(void *rt, const char *id, pdk_error *err)
{
    return pdk_runtime_park(rt, id, err);
}

static int our_retain(void *rt, const char *id, const char *holder, pdk_error *err)
{
    return pdk_runtime_retain(rt, id, holder, NULL, true, err);
}

static int our_leave(void *rt, const char *holder, pdk_error *err)
{
    return pdk_runtime_release(rt, holder, err);
}

static int our_binding(void *rt, const char *holder, char id[PDK_ID_SIZE], pdk_error *err)
{
    return pdk_runtime_binding(rt, holder, id, err);
}

static void our_discard(void *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR; /* closed: then it has no holders */
    pdk_runtime_discard_holders(rt, &err);
}

static void our_facts(void *rt, pdk_impl_facts *facts)
{
    PDK_AUTO_PACK pack = PDK_NO_PACK;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (pdk_runtime_capabilities(rt, &pack, &err) < 0)
        return;
    pdk_view v = pdk_view_of(&pack);
    facts->thread_data_mounts = pdk_view_bool(pdk_view_get(v, "thread_data_mounts"), facts->thread_data_mounts);
    facts->upload_permission_adjustment =
        pdk_view_bool(pdk_view_get(v, "upload_permission_adjustment"), facts->upload_permission_adjustment);
    facts->agent_skill_isolation = pdk_view_bool(pdk_view_get(v, "agent_skill_isolation"), facts->agent_skill_isolation);
    const char *mode = pdk_view_str(pdk_view_get(v, "network_mode"), NULL);
    if (mode != NULL)
        snprintf(facts->network_mode, sizeof facts->network_mode, "%s", mode);
    pdk_view_num(pdk_view_get(v, "network_grant"), &facts->network_grant);
}

static int our_sync_skills(void *rt, const pdk_skills *skills, pdk_error *err)
{
    return pdk_sync_skills(rt, skills, err);
}

static int our_network_events(void *rt, const char *id, pdk_network_event **out, pdk_error *err)
{
    return pdk_network_events(rt, id, out, err);
}

static int our_deny_pending(void *rt, const char *id, pdk_error *err)
{
    return pdk_deny_pending(rt, id, err);
}

static int our_decide(void *rt, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err)
{
    return pdk_decide(rt, id, request_id, decision, err);
}

static void our_reset(void *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR; /* what it could not do yet is done when it is freed, and logged by it */
    pdk_runtime_reset(rt, &err);
}

static int our_shutdown(void *rt, pdk_error *err)
{
    return pdk_shutdown(rt, err);
}

static void our_free(void *rt)
{
    pdk_free(rt);
}

PDK_API pdk_impl *pdk_impl_of(pdk_runtime *rt, pdk_error *err)
{
    static const pdk_impl_ops OURS = {
        .size = sizeof OURS,           .acquire = our_acquire,           .get = our_get,
        .release = our_release,        .free = our_free,                 .put = our_put,
        .get_scoped = our_get_scoped,  .facts = our_facts,               .sync_skills = our_sync_skills,
        .network_events = our_network_events, .deny_pending = our_deny_pending, .decide = our_decide,
        .reset = our_reset,            .shutdown = our_shutdown,         .retain = our_retain,
        .leave = our_leave,            .binding = our_binding,           .discard_holders = our_discard,
    };
    if (rt == NULL) {
        missing(err, "rt");
        return NULL;
    }
    return impl_new(&OURS, rt, true, err);
}

PDK_API pdk_runtime *pdk_impl_runtime(const pdk_impl *impl)
{
    return impl != NULL && impl->ours ? impl->self : NULL;
}
