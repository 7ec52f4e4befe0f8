/* acts.c -- calls as operations: submitted to the runtime's own workers, or made under a limit that somebody may cancel; and who
 * cancels them. That is done from outside, after a while, and from inside, at any point where threads could change places: the
 * fiber that carries a call out then does, for a moment, what another thread would.
 *
 * What must hold: a call that was cancelled ends with `cancelled`, whatever became of what was drained; one that was never begun
 * asks for nothing; nothing is begun for one that was cancelled while it discovered; its turns are held until it is drained; no
 * holder is left. */
#include "sim.h"

#include "async.h"
#include "box.h"
#include "op_internal.h"
#include <openssl/sha.h>
#include <stdio.h>
#include <string.h>

enum { MAX_ACTS = 48 };
static act acts[MAX_ACTS];
static uint32_t names;

static act *act_new(int id, int identity)
{
    act *a = acts;
    while (a < acts + MAX_ACTS && (a->used || a->p != NULL || a->cancelling > 0))
        a++;
    if (a == acts + MAX_ACTS)
        violation("more than %d calls", MAX_ACTS);
    *a = (act){ .in = me->in, .id = id, .identity = identity, .used = true, .deaf = true, .began = now };
    snprintf(a->name, sizeof a->name, "x%u", names++);
    if (P.cancel_rate != 0 && !P.healed && chance(1, P.cancel_rate)) {
        a->cuts[0] = 1 + below(chance(1, 2) ? 60 : 400);
        a->cuts[1] = chance(1, 2) ? 1 + below(60) : 0;
    }
    return a;
}

/* Its caller has been told, and lets the handle go: nobody may cancel it any more. */
static void act_over(act *a, pdk_op *op)
{
    a->over = true;
    a->op = NULL;
    pdk_op_free(op);
}

/* ---- cancelling ---- */

static void act_cancel(act *a)
{
    if (a->over || a->deaf || P.healed)
        return;
    if (a->op != NULL) {
        a->cancelling++;
        int rc = pdk_cancel(a->op);
        a->cancelling--;
        TRACE("%s is cancelled%s", a->name, rc == 0 ? "" : ": it is over");
        if (rc == 1)
            return;
    } else if (a->p == NULL) {
        TRACE("%s is cancelled", a->name);
        atomic_store(&a->flag, true);
    } else {
        return;
    }
    Z->cancelled += !a->cancelled;
    a->cancelled = true;
}

/* The fiber that carries it out is at a point where any other thread could come in. */
void act_point(void)
{
    static act *in_it; /* one at a time, for it passes points itself */
    act *a = me->act;
    for (int i = 0; i < 2; i++)
        if (a->cuts[i] > 0) {
            if (--a->cuts[i] == 0 && in_it == NULL && me->held_count == 0) {
                in_it = a;
                me->act = NULL;
                act_cancel(a);
                me->act = a;
                in_it = NULL;
            }
            return;
        }
}

void act_cancel_any(void)
{
    int n = 0, chosen = -1;
    for (int i = 0; i < MAX_ACTS; i++)
        if (acts[i].used && !acts[i].over && !acts[i].in->dead && acts[i].in->paused_until <= now && below((uint32_t)++n) == 0)
            chosen = i;
    if (chosen < 0)
        return;
    me->in = acts[chosen].in; /* one of its threads */
    act_cancel(&acts[chosen]);
    if (chance(1, 4))
        act_cancel(&acts[chosen]);
    me->in = NULL;
}

/* ---- what it may still do ---- */

static bool has_turn(const inst *in, int id)
{
    static int64_t offsets[MAX_IDS];
    int row = P.shared_turns ? 0 : in->index;
    if (offsets[id] == 0) {
        unsigned char digest[SHA256_DIGEST_LENGTH], name = (unsigned char)('a' + id);
        uint64_t bits = 0;
        SHA256(&name, 1, digest);
        for (int i = 0; i < 8; i++)
            bits = bits << 8 | digest[i];
        offsets[id] = (int64_t)(bits >> 3);
    }
    for (int i = 0; i < 8; i++)
        if (W.turns[row][i] == 1 + in->index && W.turn_offsets[row][i] == offsets[id])
            return true;
    return false;
}

void act_asks(const op *o)
{
    const act *a = me->act;
    if (me->acquires != 0) {
        if ((o->kind == OP_DISCOVER || o->kind == OP_CREATE || (o->kind == OP_READY && !o->remote)) &&
            !has_turn(me->in, o->id))
            violation("%s asks for %s of %c without its turn", me->name, op_names[o->kind], 'a' + o->id);
        for (int i = 0; i < MAX_FIBERS; i++)
            if (fibers[i].in == me->in && &fibers[i] != me && fibers[i].asking && fibers[i].acquires == me->acquires &&
                fibers[i].state != F_FREE && fibers[i].state != F_DONE)
                violation("%s and %s acquire for one identity at once", me->name, fibers[i].name);
    }
    if (a != NULL && a->over && !a->late)
        violation("%s asks for %s for %s, which is over", me->name, op_names[o->kind], a->name);
    if (a != NULL && a->cut && (o->kind == OP_DISCOVER || o->kind == OP_CREATE || o->kind == OP_TAKE))
        violation("%s asks for %s for %s, which was cancelled before", me->name, op_names[o->kind], a->name);
    me->asking = true;
}

void act_asked(const op *o)
{
    act *a = me->act;
    me->asking = false;
    if (a != NULL && o->kind == OP_DISCOVER && a->cancelled && !a->begun)
        a->cut = true;
}

void act_tears_down(void)
{
    act *a = me->act;
    if (a == NULL || me->acquires == 0)
        return;
    if (a->cut)
        violation("%s begins a teardown for %s, which was cancelled before", me->name, a->name);
    a->begun |= has_turn(me->in, a->id);
}

/* One that was there, not what it has made itself. */
void act_tore_down(const pdk_teardown *td, pdk_teardown_result r)
{
    static const char *const own[] = { "unready", "not_admitted", "not_registered", "unwanted" };
    bool replaces = r == PDK_TD_DONE && (td->retire || !pdk_view_is_nil(td->info));
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        replaces &= strcmp(td->reason, own[i]) != 0;
    if (me->act != NULL && me->acquires != 0 && replaces)
        me->act->owes = true;
}

void act_handed_out(void)
{
    if (me->act != NULL && me->acquires != 0)
        me->act->handed = true;
}

/* What the core logs on behalf of an acquire. */
void act_says(const char *event)
{
    act *a = me->act;
    if (a == NULL || me->acquires == 0)
        return;
    a->failed |= strcmp(event, "acquire_failed") == 0 || strcmp(event, "drained_work_failed") == 0;
    if (strcmp(event, "acquire_failed") == 0 && a->cancelled)
        violation("%s was cancelled, and fails as if it had not been", a->name);
    if (strcmp(event, "acquire_cancelled") == 0 && a->owes && !a->handed && !a->failed &&
        !a->in->closing) /* the end of its runtime ends it, too */
        violation("%s has stopped what it was to replace, and made nothing, since it was cancelled", a->name);
}

/* ---- acquire ---- */

pdk_acquiring *__real_pdk_acquire_begin(pdk_runtime *rt, const pdk_acquire_spec *spec, atomic_bool *cancelled,
                                        const pdk_acquire_calls *calls, pdk_error *err);
pdk_acquiring *__wrap_pdk_acquire_begin(pdk_runtime *rt, const pdk_acquire_spec *spec, atomic_bool *cancelled,
                                        const pdk_acquire_calls *calls, pdk_error *err);
pdk_acquiring *__wrap_pdk_acquire_begin(pdk_runtime *rt, const pdk_acquire_spec *spec, atomic_bool *cancelled,
                                        const pdk_acquire_calls *calls, pdk_error *err)
{
    pdk_acquiring *p = __real_pdk_acquire_begin(rt, spec, cancelled, calls, err);
    if (me->act != NULL)
        me->act->p = p;
    return p;
}

static act *act_of(const pdk_acquiring *p)
{
    for (int i = 0; i < MAX_ACTS && p != NULL; i++)
        if (acts[i].p == p)
            return &acts[i];
    return NULL;
}

void __real_pdk_acquire_end(pdk_acquiring *p);
void __wrap_pdk_acquire_end(pdk_acquiring *p);
void __wrap_pdk_acquire_end(pdk_acquiring *p)
{
    act *a = act_of(p);
    __real_pdk_acquire_end(p);
    if (a != NULL)
        a->p = NULL;
}

int __real_pdk_acquire_step(pdk_acquiring *p, pdk_box **out, pdk_error *err);
int __wrap_pdk_acquire_step(pdk_acquiring *p, pdk_box **out, pdk_error *err);
int __wrap_pdk_acquire_step(pdk_acquiring *p, pdk_box **out, pdk_error *err)
{
    act *a = act_of(p);
    if (a->over && !a->late)
        violation("%s is stepped, but it is over", a->name);
    me->act = a;
    me->acquires = a->identity;
    me->call_start = a->began;
    me->created = -1;
    TRACE("step of %s", a->name);
    int rc = __real_pdk_acquire_step(p, out, err);
    TRACE("step of %s: %d", a->name, rc);
    if (rc < 0 && me->created >= 0 && W.gens[me->created].present && !pod_ends(me->created))
        violation("%s leaves g%d, which its failed acquire has made", me->in->name, me->created);
    me->act = NULL;
    me->acquires = 0;
    me->call_start = 0;
    return rc;
}

/* The holder of an acquire that has come to nothing. */
static void check_holder(const act *a, const pdk_error *err)
{
    inst *in = a->in;
    pdk_entry *e = in->closing ? NULL : peek(in, a->id);
    if (e != NULL && pdk_pool_holder(&in->rt->pool, a->name) != NULL)
        violation("%s came to nothing (%s), but its holder is there", a->name, pdk_error_kind_name(err->kind));
}

static void check_failed(const act *a, const pdk_error *err)
{
    bool told_late = err->kind == PDK_E_TIMEOUT && a->late;
    bool closed = err->kind == PDK_E_CLOSED && a->in->closing; /* that came first */
    if (a->cancelled && err->kind != PDK_E_CANCELLED && !told_late && !closed)
        violation("%s was cancelled and is told %s (%s)", a->name, pdk_error_kind_name(err->kind), err->message);
    if (!a->late)
        check_holder(a, err);
}

static pdk_box *acquire_here(act *a, const pdk_acquire_spec *spec, pdk_error *err)
{
    pdk_box *box = NULL;
    pdk_limit limit = { .deadline = PDK_NEVER, .cancelled = P.cancel_rate != 0 && chance(1, 3) ? &a->flag : NULL };
    a->deaf = limit.cancelled == NULL;
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_runtime_acquire(me->in->rt, spec, &box, err);
    pdk_limit_enter(outer);
    a->late = rc < 0 && err->kind == PDK_E_TIMEOUT; /* with a deadline it is submitted as well */
    a->over = true;
    if (rc < 0 && !a->late)
        check_holder(a, err);
    return box;
}

/* Waits, and may lose patience. Afterwards the handle is gone: 1, or -1; 0 = it was not waited for. */
static int wait_for_op(act *a, pdk_op *op, pdk_error *err)
{
    bool impatient = P.cancel_rate != 0 && !P.healed && chance(1, 6);
    if (impatient && chance(1, 3)) { /* it is let go at once, or soon: what needs no I/O may just be done */
        for (uint32_t n = below(40); n > 0; n--)
            point();
        a->late = pdk_op_poll(op, err) == 0;
        if (a->late)
            return 0;
    }
    int rc = pdk_op_wait(op, impatient ? below(chance(1, 3) ? 40 : 4000) / 1000.0 : -1, err);
    if (rc == 0 && chance(1, 3)) { /* it is let go as it is */
        a->late = true;
        return 0;
    }
    for (int i = 0; rc == 0 && i < 2; i++) {
        act_cancel(a);
        rc = pdk_op_wait(op, i == 0 ? 0.01 : -1, err);
    }
    return rc;
}

/* The callback: on whatever fiber dispatches. */
static void tell(void *ctx, pdk_op *op)
{
    act *a = ctx;
    if (a->told || !a->used)
        violation("the callback of %s is called %s", a->name, a->told ? "twice" : "although nobody wants it any more");
    a->told = true;
    if ((a->rc = pdk_op_poll(op, &a->err)) == 0)
        violation("%s is told, but it is not over", a->name);
    if (a->rc == 1 && chance(9, 10))
        a->box = pdk_op_box(op);
    a->late |= a->rc < 0 && a->err.kind == PDK_E_TIMEOUT;
    if (chance(1, 2))
        act_over(a, op);
    else
        a->left = op;
    a->done = true;
}

/* As a host's loop does. 0 = it was let go. The handle is gone afterwards. */
static int loop_until_told(act *a, pdk_op *op, pdk_error *err)
{
    bool impatient = P.cancel_rate != 0 && !P.healed && chance(1, 4);
    inst *in = me->in;
    while (!a->done) {
        if (!in->letting_go) {
            in->dispatching++;
            pdk_ops_dispatch(in->rt->ops, 1 + (int)below(3));
            in->dispatching--;
        }
        if (impatient && !a->told && chance(1, 30))
            act_cancel(a);
        if (impatient && !a->told && in->dispatching == 0 && chance(1, 60)) {
            a->late = in->letting_go = true;
            act_over(a, op);
            in->letting_go = false;
            return 0;
        }
        if (!a->done)
            wait_for((pdk_ns)(1 + below(60)) * MS);
    }
    pdk_error_move(err, &a->err);
    if (a->left != NULL)
        act_over(a, op);
    return a->rc;
}

/* An acquire that was submitted has ended, says its callback or the one who has waited. */
static void check_ended(const act *a, const pdk_acquire_spec *spec, int rc, const pdk_error *err)
{
    bool on_time = P.pause_rate == 0 && P.stall_rate == 0 && a->in->paused_until == 0;
    double took = (double)(now - a->began) / 1e9;
    if (rc != 0 && spec->timeout > 0 && on_time && took > spec->timeout + 1)
        violation("%s ends after %.3f s, its limit was %.3f s", a->name, took, spec->timeout);
    if (rc == 1 && a->cancelled)
        violation("%s was cancelled, but it has a result", a->name);
    if (rc < 0)
        check_failed(a, err);
}

static pdk_box *acquire_there(act *a, const pdk_acquire_spec *spec, pdk_error *err)
{
    bool loops = chance(1, 3);
    pdk_op_how how = { .callback = loops ? tell : NULL, .ctx = a };
    pdk_box *box = NULL;
    pdk_op *op = pdk_async_acquire(me->in->rt, spec, NULL, &how, err);
    if (op == NULL)
        return NULL;
    a->op = a->told ? NULL : op;
    a->deaf = false;
    if (loops) {
        int rc = loop_until_told(a, op, err);
        check_ended(a, spec, rc, err);
        return a->box;
    }
    int rc = wait_for_op(a, op, err);
    a->late |= rc < 0 && err->kind == PDK_E_TIMEOUT;
    a->over = true;
    check_ended(a, spec, rc, err);
    if (rc == 1 && chance(9, 10) && (box = pdk_op_box(op)) == NULL)
        violation("%s ended well without a box", a->name);
    act_over(a, op); /* with what was not taken */
    return box;
}

pdk_box *act_acquire(const pdk_acquire_spec *spec, int id, char user, pdk_error *err)
{
    pdk_acquire_spec own = *spec;
    act *a = act_new(id, 1 + 2 * id + (user == 'v'));
    if (own.holder == NULL && !own.no_holder && chance(3, 4))
        own.holder = a->name;
    me->act = a;
    bool there = P.submits && !me->in->closing && chance(3, 4);
    if (!there)
        me->acquires = a->identity;
    TRACE("as %s, %s", a->name, there ? "submitted" : "here");
    pdk_box *box = there ? acquire_there(a, &own, err) : acquire_here(a, &own, err);
    me->act = NULL;
    me->acquires = 0;
    a->used = false;
    return box;
}

/* ---- the others ---- */

int act_destroy(const char *name, pdk_error *err)
{
    if (!P.submits || chance(1, 3))
        return pdk_runtime_destroy(me->in->rt, name, err);
    act *a = act_new(id_number(name), 0);
    pdk_op_how how = { .timeout = chance(1, 3) ? 0.1 + below(60) / 10.0 : 0 };
    pdk_op *op = pdk_async_destroy(me->in->rt, name, &how, err);
    int rc = -1;
    if (op != NULL) {
        a->op = op;
        a->deaf = false;
        rc = wait_for_op(a, op, err);
        rc = rc == 1 ? pdk_op_answer(op) : -1;
        act_over(a, op);
    }
    a->used = false;
    return rc;
}

void act_release(pdk_box *box)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (!P.submits || chance(1, 3))
        return;
    act *a = act_new(id_number(pdk_box_id(box)), 0);
    pdk_op_how how = { .timeout = chance(1, 3) ? 0.1 + below(30) / 10.0 : 0 };
    pdk_op *op = pdk_async_release(box, &how, &err);
    if (op != NULL) {
        a->op = op;
        a->deaf = false;
        int rc = wait_for_op(a, op, &err);
        bool closed = err.kind == PDK_E_CLOSED && a->in->closing;
        if (rc < 0 && a->cancelled && err.kind != PDK_E_CANCELLED && err.kind != PDK_E_TIMEOUT && !closed)
            violation("the release %s was cancelled and is told %s", a->name, pdk_error_kind_name(err.kind));
        act_over(a, op);
    }
    a->used = false;
}

int act_exec(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out, pdk_error *err)
{
    if (!P.submits || chance(1, 3))
        return pdk_box_exec(box, spec, out, err);
    act *a = act_new(id_number(pdk_box_id(box)), 0);
    pdk_op_how how = { 0 };
    pdk_op *op = pdk_async_exec(box, spec, &how, err);
    int rc = -1;
    if (op != NULL) {
        a->op = op;
        a->deaf = false;
        rc = wait_for_op(a, op, err) == 1 && pdk_op_result(op, out) == 1 ? 0 : -1;
        act_over(a, op);
    }
    a->used = false;
    return rc;
}

int act_shutdown(pdk_runtime *rt, pdk_error *err)
{
    if (!P.submits || chance(1, 2))
        return pdk_runtime_shutdown(rt, err);
    pdk_op_how how = { .timeout = chance(1, 2) ? 0.5 + below(100) / 10.0 : 0 };
    pdk_op *op = pdk_async_shutdown(rt, &how, err);
    if (op == NULL)
        return -1;
    int rc = pdk_op_wait(op, -1, err);
    pdk_op_free(op);
    return rc == 1 ? 0 : -1;
}

/* A thread of it stalls, with a sandbox at hand: an acquire that is drained, or an operation (a release, say) whose caller may have
 * been told by its deadline. Without locks: nothing runs now. */
static bool drains(const inst *in)
{
    for (int i = 0; i < MAX_ACTS; i++)
        if (acts[i].p != NULL && acts[i].in == in)
            return true;
    for (const pdk_op *op = in->rt->ops->all; op != NULL; op = op->next)
        if (op->stage != PDK_OP_ENDED)
            return true;
    return false;
}

void acts_check_end(void)
{
    for (int i = 0; i < MAX_INST; i++) {
        inst *in = &insts[i];
        if (!in->active || in->dead || in->closing || in->rt == NULL || drains(in) ||
            *(fiber *const *)(const void *)&in->rt->pool.registry != NULL)
            continue;
        const pdk_map *holders = &in->rt->pool.holders;
        for (pdk_node *n = pdk_map_each(holders, NULL); n != NULL; n = pdk_map_each(holders, n))
            violation("holder %s is left in %s", PDK_OF(n, pdk_holder, by_name)->name, in->name);
    }
}
