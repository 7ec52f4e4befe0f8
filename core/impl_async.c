/* impl_async.c -- acquire, skills and network decisions of an implementation, asynchronously (rows A3, R5, S2, S3): the blocking
 * function on a worker, with a copy of its arguments.
 *
 * On whose workers: a runtime's own, so that its pdk_fd and pdk_dispatch tell of the end; of another implementation the process's
 * (pdk_fd and pdk_dispatch with NULL). There the operation has a reference. A runtime needs none, since its end waits for what runs
 * on it; and it may have none, since the last one to go would be a worker that ends what it runs on. */
#include "op.h"
#include "runtime.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct call { /* one allocation; the texts lie behind */
    pdk_impl *impl;   /* a reference, or NULL */
    pdk_runtime *rt;  /* or NULL */
    int (*fn)(struct call *c, pdk_error *err);
    pdk_request req;
    pdk_skills skills;
    const char *id, *request_id;
    pdk_network_decision decision;
    char acquired[PDK_ID_SIZE];
    pdk_network_event *events;
    char text[];
} call;

static int run(void *arg, pdk_error *err)
{
    call *c = arg;
    return c->fn(c, err);
}

static void drop(void *arg)
{
    call *c = arg;
    pdk_impl_unref(c->impl);
    free(c->events);
    free(c);
}

/* ---- copies --------------------------------------------------------------------------------------------- */

typedef struct text { /* one to be kept: where its pointer stands, and how long it is */
    const char **at;
    size_t len;
} text;

static size_t length(const char *s, size_t len)
{
    return s == NULL ? 0 : len > 0 ? len : strlen(s);
}

/* A copy of `model` whose `n` texts (pointers inside `model`) are its own. NULL = no memory. */
static call *copy(const call *model, const text *texts, size_t n, pdk_error *err)
{
    size_t size = 0;
    for (size_t i = 0; i < n; i++)
        size += *texts[i].at != NULL ? texts[i].len + 1 : 0;
    call *c = malloc(sizeof *c + size);
    if (c == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an operation");
        return NULL;
    }
    *c = *model;
    char *to = c->text;
    for (size_t i = 0; i < n; i++) {
        if (*texts[i].at == NULL)
            continue;
        const char **slot = (const char **)(void *)((char *)c + ((const char *)texts[i].at - (const char *)model));
        memcpy(to, *texts[i].at, texts[i].len);
        to[texts[i].len] = '\0';
        *slot = to;
        to += texts[i].len + 1;
    }
    pdk_impl_ref(c->impl);
    return c;
}

static pdk_op *submit(call *model, const text *texts, size_t n, double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    if (!isfinite(timeout) || timeout < 0) {
        pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `timeout` must be positive and finite (0 = none), not %g", timeout);
        return NULL;
    }
    call *c = copy(model, texts, n, err);
    if (c == NULL)
        return NULL;
    pdk_op *op = pdk_op_call(c->rt, PDK_WORK_EXEC, timeout, run, drop, c, callback, ctx, err);
    if (op == NULL)
        drop(c);
    return op;
}

static pdk_op *missing(pdk_error *err, const char *name)
{
    pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` is missing", name);
    return NULL;
}

/* ---- acquire -------------------------------------------------------------------------------------------- */

static int acquire(call *c, pdk_error *err)
{
    return pdk_impl_acquire(c->impl, &c->req, c->acquired, err);
}

PDK_API pdk_op *pdk_impl_acquire_async(pdk_impl *impl, const pdk_request *req, pdk_callback callback, void *ctx, pdk_error *err)
{
    if (impl == NULL || req == NULL)
        return missing(err, impl == NULL ? "impl" : "req");
    pdk_runtime *rt = pdk_impl_runtime(impl);
    if (rt != NULL) { /* waits for its turn without a worker */
        pdk_request mine = *req;
        mine.holder = NULL;
        mine.no_holder = true;
        return pdk_acquire_async(rt, &mine, callback, ctx, err);
    }
    call model = { .impl = impl, .fn = acquire, .req = *req };
    pdk_request *r = &model.req;
    const text texts[] = { { &r->user, length(r->user, r->user_len) }, { &r->thread, length(r->thread, r->thread_len) },
                           { &r->holder, length(r->holder, 0) }, { &r->requirements_json, length(r->requirements_json, 0) } };
    return submit(&model, texts, sizeof texts / sizeof *texts, req->timeout, callback, ctx, err);
}

PDK_API int pdk_op_id(pdk_op *op, char id[PDK_ID_SIZE])
{
    if (op == NULL || id == NULL)
        return 0;
    const call *c = pdk_op_arg(op);
    if (c != NULL && c->fn == acquire) {
        memcpy(id, c->acquired, PDK_ID_SIZE);
        return 1;
    }
    pdk_box *box = c == NULL ? pdk_op_box(op) : NULL;
    if (box == NULL)
        return 0;
    snprintf(id, PDK_ID_SIZE, "%s", pdk_box_id(box));
    pdk_box_free(box);
    return 1;
}

/* ---- skills and network decisions ----------------------------------------------------------------------- */

static int sync_skills(call *c, pdk_error *err)
{
    return c->rt != NULL ? pdk_sync_skills(c->rt, &c->skills, err) : pdk_impl_sync_skills(c->impl, &c->skills, err);
}

static int network_events(call *c, pdk_error *err)
{
    return c->rt != NULL ? pdk_network_events(c->rt, c->id, &c->events, err)
                         : pdk_impl_network_events(c->impl, c->id, &c->events, err);
}

static int deny_pending(call *c, pdk_error *err)
{
    return c->rt != NULL ? pdk_deny_pending(c->rt, c->id, err) : pdk_impl_deny_pending(c->impl, c->id, err);
}

static int decide(call *c, pdk_error *err)
{
    return c->rt != NULL ? pdk_decide(c->rt, c->id, c->request_id, c->decision, err)
                         : pdk_impl_decide(c->impl, c->id, c->request_id, c->decision, err);
}

static pdk_op *submit_skills(call model, double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    pdk_skills *s = &model.skills;
    if (s->sandbox_id == NULL)
        return missing(err, "sandbox_id");
    const text texts[] = { { &s->sandbox_id, length(s->sandbox_id, 0) }, { &s->user, length(s->user, s->user_len) },
                           { &s->thread, length(s->thread, s->thread_len) }, { &s->projection_json, length(s->projection_json, 0) } };
    return submit(&model, texts, sizeof texts / sizeof *texts, timeout, callback, ctx, err);
}

static pdk_op *submit_network(call model, double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    if (model.id == NULL || (model.fn == decide && model.request_id == NULL))
        return missing(err, model.id == NULL ? "sandbox_id" : "request_id");
    if (model.fn == decide && (unsigned)model.decision > PDK_NETWORK_ALLOW) {
        pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `decision` must be deny, allow_once or allow");
        return NULL;
    }
    const text texts[] = { { &model.id, length(model.id, 0) }, { &model.request_id, length(model.request_id, 0) } };
    return submit(&model, texts, sizeof texts / sizeof *texts, timeout, callback, ctx, err);
}

/* Of an implementation: on its runtime where there is one. */
static call whose(pdk_impl *impl, int (*fn)(call *c, pdk_error *err))
{
    pdk_runtime *rt = pdk_impl_runtime(impl);
    return (call){ .impl = rt == NULL ? impl : NULL, .rt = rt, .fn = fn };
}

PDK_API pdk_op *pdk_sync_skills_async(pdk_runtime *rt, const pdk_skills *skills, double timeout, pdk_callback callback, void *ctx,
                                      pdk_error *err)
{
    if (rt == NULL || skills == NULL)
        return missing(err, rt == NULL ? "rt" : "skills");
    return submit_skills((call){ .rt = rt, .fn = sync_skills, .skills = *skills }, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_network_events_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                         pdk_error *err)
{
    if (rt == NULL)
        return missing(err, "rt");
    return submit_network((call){ .rt = rt, .fn = network_events, .id = sandbox_id }, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_deny_pending_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                       pdk_error *err)
{
    if (rt == NULL)
        return missing(err, "rt");
    return submit_network((call){ .rt = rt, .fn = deny_pending, .id = sandbox_id }, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_decide_async(pdk_runtime *rt, const char *sandbox_id, const char *request_id, pdk_network_decision decision,
                                 double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    if (rt == NULL)
        return missing(err, "rt");
    return submit_network((call){ .rt = rt, .fn = decide, .id = sandbox_id, .request_id = request_id, .decision = decision }, timeout,
                          callback, ctx, err);
}

PDK_API pdk_op *pdk_impl_sync_skills_async(pdk_impl *impl, const pdk_skills *skills, double timeout, pdk_callback callback,
                                           void *ctx, pdk_error *err)
{
    if (impl == NULL || skills == NULL)
        return missing(err, impl == NULL ? "impl" : "skills");
    call model = whose(impl, sync_skills);
    model.skills = *skills;
    return submit_skills(model, timeout, callback, ctx, err);
}

static pdk_op *submit_impl(pdk_impl *impl, call model, const char *id, double timeout, pdk_callback callback, void *ctx,
                           pdk_error *err)
{
    if (impl == NULL)
        return missing(err, "impl");
    model.id = id;
    return submit_network(model, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_impl_network_events_async(pdk_impl *impl, const char *id, double timeout, pdk_callback callback, void *ctx,
                                              pdk_error *err)
{
    return submit_impl(impl, whose(impl, network_events), id, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_impl_deny_pending_async(pdk_impl *impl, const char *id, double timeout, pdk_callback callback, void *ctx,
                                            pdk_error *err)
{
    return submit_impl(impl, whose(impl, deny_pending), id, timeout, callback, ctx, err);
}

PDK_API pdk_op *pdk_impl_decide_async(pdk_impl *impl, const char *id, const char *request_id, pdk_network_decision decision,
                                      double timeout, pdk_callback callback, void *ctx, pdk_error *err)
{
    call model = whose(impl, decide);
    model.request_id = request_id;
    model.decision = decision;
    return submit_impl(impl, model, id, timeout, callback, ctx, err);
}

PDK_API int pdk_op_events(pdk_op *op, pdk_network_event **out)
{
    if (op == NULL || out == NULL)
        return 0;
    call *c = pdk_op_arg(op);
    *out = NULL;
    if (c == NULL || c->fn != network_events || c->events == NULL)
        return 0;
    *out = c->events;
    c->events = NULL;
    return pdk_op_answer(op);
}
