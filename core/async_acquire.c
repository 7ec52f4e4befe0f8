/* async_acquire.c -- an acquire as an operation: it asks for its identity's turn when it is submitted, takes a worker only while it
 * has something to do, and none while it waits; see async.h, and acquiring.c for the acquire itself. */
#include "async.h"
#include "core.h"
#include "open.h"

#include <stdlib.h>
#include <string.h>

typedef struct acquire_work {
    pdk_runtime *rt;
    const pdk_acquire_spec *spec;   /* the caller's; at submission only */
    char *json;                     /* requirements that are still to be read, or NULL */
    pdk_pack requirements;          /* of it */
    pdk_acquiring *a;
    pdk_box *box;                   /* the result, until it is taken */
    pdk_op *op;
} acquire_work;

static void granted(void *ctx)
{
    pdk_op_grant(((acquire_work *)ctx)->op);
}

static bool keep(void *ctx)
{
    return pdk_op_keep(((acquire_work *)ctx)->op);
}

static int acquire_begin(pdk_op *op, void *work, pdk_error *err)
{
    acquire_work *w = work;
    pdk_acquire_calls calls = { .granted = granted, .keep = keep, .ctx = w };
    w->op = op;
    w->a = pdk_acquire_begin(w->rt, w->spec, pdk_op_cancelled(op), &calls, err);
    w->spec = NULL;
    if (w->a == NULL)
        return -1;
    return w->json != NULL ? 1 : pdk_acquire_ask(w->a, err);
}

/* Reading it needs Lua, which a submission may not wait for. */
static int read_requirements(acquire_work *w, pdk_error *err)
{
    if (w->json == NULL)
        return 0;
    if (pdk_requirements_from_json(w->rt->script, w->json, &w->requirements, err) < 0)
        return -1;
    pdk_acquire_require(w->a, pdk_view_of(&w->requirements));
    free(w->json);
    w->json = NULL;
    return 0;
}

static int acquire_run(pdk_op *op, void *work, pdk_error *err)
{
    acquire_work *w = work;
    (void)op;
    if (read_requirements(w, err) < 0) {
        pdk_acquire_abandon(w->a);
        return -1;
    }
    int rc = pdk_acquire_step(w->a, &w->box, err);
    return rc == 1 ? 0 : rc == 0 ? PDK_OP_PARKED : -1;
}

static void acquire_withdraw(void *work)
{
    pdk_acquire_abandon(((acquire_work *)work)->a);
}

static void acquire_undo(void *work)
{
    acquire_work *w = work;
    pdk_box *box = w->box;
    w->box = NULL;
    if (box != NULL)
        pdk_acquire_undo(w->a, box);
}

static void acquire_drop(void *work)
{
    acquire_work *w = work;
    pdk_box_drop(w->box);
    pdk_acquire_end(w->a);
    pdk_pack_free(&w->requirements);
    free(w->json);
    free(w);
}

static const pdk_op_kind acquire_kind = { .name = "acquire", .work_class = PDK_WORK_ACQUIRE, .begin = acquire_begin, .run = acquire_run,
                                          .withdraw = acquire_withdraw, .undo = acquire_undo, .drop = acquire_drop };

static acquire_work *acquire_new(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_error *err)
{
    acquire_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an acquire");
    else
        *w = (acquire_work){ .rt = rt, .spec = spec };
    return w;
}

pdk_op *pdk_async_acquire(pdk_runtime *rt, const pdk_acquire_spec *spec, const char *json, const pdk_op_how *how, pdk_error *err)
{
    acquire_work *w = acquire_new(rt, spec, err);
    if (w == NULL)
        return NULL;
    if (json != NULL && (w->json = strdup(json)) == NULL) {
        acquire_drop(w);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the requirements");
        return NULL;
    }
    pdk_op_how own = *how;
    own.timeout = spec->timeout;
    pdk_op *op = pdk_op_submit(rt->ops, &acquire_kind, w, &own, err);
    if (op == NULL)
        acquire_drop(w);
    return op;
}

static int acquire_take(void *work, bool late, void *to)
{
    acquire_work *w = work;
    if (late || w->box == NULL)
        return 0;
    *(pdk_box **)to = w->box;
    w->box = NULL;
    return 1;
}

PDK_API pdk_box *pdk_op_box(pdk_op *op)
{
    pdk_box *box = NULL;
    pdk_op_take(op, &acquire_kind, acquire_take, &box);
    return box;
}

int pdk_acquire_within(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_box **out, pdk_error *err)
{
    acquire_work *w = acquire_new(rt, spec, err);
    *out = NULL;
    return w == NULL ? -1 : pdk_op_do(rt->ops, &acquire_kind, w, spec->timeout, acquire_take, out, err);
}
