/* acquiring.c -- an acquire from its request to its result: whose it is, the turns that it waits for, and what becomes of it when
 * it is cancelled. The steps themselves are acquire.c's.
 *
 * The same two phases, look (in the identity's turn) and make (in the id's turn too), run on a caller's thread that waits for its
 * turns, or on whatever thread steps a pdk_acquiring, which takes none while it waits.
 *
 * True of both: a result belongs to the caller or is given back before any turn is; what was drained for one who has gone is
 * logged when it fails, and the answer stays `cancelled`.
 */
#include "acquire.h"
#include "async.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- whose, and for whom ---- */

/* Its texts are set to empty, and not all of their room: this is part of every acquire. */
static void begin(acq *a, pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_error *err)
{
    a->rt = rt;
    a->spec = spec;
    a->err = err;
    a->id_hash = 0;
    a->id[0] = a->holder[0] = '\0';
    a->requirements = PDK_NO_PACK;
    a->box = NULL;
    a->cancelled = NULL;
    a->makes = a->drains = a->bound_before = false;
    atomic_init(&a->unwanted, false);
    a->next = a->previous = NULL;
}

static int effective_identity(acq *a)
{
    const pdk_acquire_spec *s = a->spec;
    pdk_runtime *rt = a->rt;
    a->anonymous = s->thread == NULL;
    a->who = (pdk_identity){ s->user, s->thread, s->user_len, s->thread_len };
    if (s->user == NULL) {
        if (rt->config.user == NULL)
            return pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "user is missing: name one in the call, or set the option user");
        a->who.user = rt->config.user;
        a->who.user_len = strlen(rt->config.user);
    }
    if (a->anonymous) {
        a->who.thread = "";
        a->who.thread_len = 0;
    }
    if (a->who.user_len > 4096)
        return pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "user is %zu bytes long; at most 4096 are taken", a->who.user_len);
    if (a->who.thread_len > 4096)
        return pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "thread is %zu bytes long; at most 4096 are taken", a->who.thread_len);
    if (s->holder != NULL && (s->holder[0] == '\0' || strlen(s->holder) >= sizeof a->holder))
        return pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "holder must have 1 to %zu bytes", sizeof a->holder - 1);
    if (s->no_holder && s->holder != NULL)
        return pdk_fail(a->err, PDK_E_INVALID_ARGUMENT, 0, "holder: a name and no holder cannot be asked for at once");
    return 0;
}

/* "RUNTIME-NUMBER", by hand: this is part of every acquire. */
static void number_holder(acq *a, uint64_t number)
{
    size_t len = strnlen(a->rt->id, 16);
    memcpy(a->holder, a->rt->id, len);
    a->holder[len] = '-';
    pdk_decimal(a->holder + len + 1, (int64_t)number);
}

static void name_holder(acq *a)
{
    static atomic_uint_least64_t next;
    if (a->spec->holder != NULL)
        snprintf(a->holder, sizeof a->holder, "%s", a->spec->holder);
    else if (!a->spec->no_holder)
        number_holder(a, atomic_fetch_add(&next, 1) + 1);
}


static int check_timeout(const pdk_acquire_spec *spec, pdk_error *err)
{
    if (spec->timeout >= 0 && spec->timeout <= 1e9)
        return 0;
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "timeout must be a number of seconds, 0 or more");
}

/* Lengths are part of it: no two identities share one. */
static bool key_of(const acq *a, pdk_pack *key)
{
    pdk_put_str(key, a->who.user, a->who.user_len);
    pdk_put_str(key, a->who.thread, a->who.thread_len);
    return !key->failed;
}

/* ---- the result ---- */

/* What a cancelled acquire was to hand out. A binding that its holder had before is not its own to give up. */
static void give_up(acq *a)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = a->box;
    a->box = NULL;
    if (a->bound_before) {
        pdk_box_drop(box);
        return;
    }
    bool parks = a->holder[0] != '\0' || strcmp(pdk_box_source(box), "active") != 0;
    if (parks && pdk_release(box, &err) < 0 && err.kind != PDK_E_CLOSED) /* at the runtime's end it is the end's work */
        pdk_emit(a->rt, PDK_WARN, "release_failed", a->id, pdk_box_generation(box), "cancelled", &err);
    pdk_box_drop(box);
}

static void say_cancelled(acq *a)
{
    const char *id = a->id[0] != '\0' ? a->id : NULL;
    if (a->err->kind == PDK_OK) {
        pdk_fail(a->err, PDK_E_CANCELLED, 0, "the acquire was cancelled");
    } else if (a->err->kind != PDK_E_CANCELLED) {
        if (a->err->kind != PDK_E_CLOSED) /* that ends it as well, and is no failure */
            pdk_emit(a->rt, PDK_WARN, "drained_work_failed", id, NULL, "cancelled", a->err);
        pdk_error_become(a->err, PDK_E_CANCELLED, NULL, "the acquire was cancelled");
    }
    pdk_emit(a->rt, PDK_INFO, "acquire_cancelled", id, NULL, NULL, NULL);
}

/* While all turns are held. 1 = *out is the caller's, or -1 with what to tell it. */
static int conclude(acq *a, found ok, const pdk_acquire_calls *calls, pdk_box **out, pdk_error *err)
{
    bool asks = ok == FOUND && calls != NULL && calls->keep != NULL;
    bool gone = asks ? !calls->keep(calls->ctx) : pdk_acq_gone(a);
    if (ok == FOUND && !gone) {
        *out = a->box;
        a->box = NULL;
        return 1;
    }
    if (ok == FOUND)
        give_up(a);
    else if (a->err->kind == PDK_OK) /* cannot be: every way out that fails says why */
        pdk_fail(a->err, PDK_E_LOST, 0, "sandbox %s changed hands while it was acquired; try again", a->id);
    if (gone)
        say_cancelled(a);
    else
        pdk_emit(a->rt, PDK_WARN, "acquire_failed", a->id[0] != '\0' ? a->id : NULL, NULL, NULL, a->err);
    pdk_error_move(err, a->err);
    return -1;
}

void pdk_acquire_unwanted(pdk_runtime *rt, const char *id)
{
    PDK_GUARD(rt->pool.registry);
    for (acq *a = rt->making; a != NULL; a = a->next)
        if (id == NULL || strcmp(a->id, id) == 0)
            atomic_store(&a->unwanted, true);
}

/* ---- on a thread that waits ---- */

static int acquire(acq *a, const pdk_limit *waits, pdk_box **out, pdk_error *err)
{
    PDK_AUTO_TURN identity = PDK_NO_TURN, id = PDK_NO_TURN; /* given back in the other order */
    found ok = pdk_acq_bound(a);
    if (ok == NOTHING && !a->anonymous) {
        unsigned char room[256];
        PDK_AUTO_PACK key = PDK_PACK_ON(room);
        if (!key_of(a, &key))
            ok = pdk_acq_no_memory(a);
        else if (pdk_turn_enter(a->rt->serial, key.data, key.len, &identity, waits, a->err) < 0)
            ok = FAILED;
    }
    if (ok == NOTHING)
        ok = pdk_acq_look(a);
    if (ok == NOTHING && !a->anonymous && pdk_turn_enter_id(a->rt->serial, a->id, &id, waits, a->err) < 0)
        ok = FAILED;
    if (ok == NOTHING)
        ok = pdk_acq_make(a);
    return conclude(a, ok, NULL, out, err);
}

/* With a deadline others do the work, and this thread waits no longer than that, whatever hangs (B201); unless it is at somebody
 * else's work already, whose limit holds. */
static bool others_work(pdk_runtime *rt, const pdk_acquire_spec *spec)
{
    const pdk_limit *limit = pdk_limit_current();
    return spec->timeout > 0 && rt->config.threads && !pdk_op_inside() && !pdk_inside_callback() && limit->deadline == PDK_NEVER &&
           !pdk_limit_can_cancel(limit);
}

int pdk_runtime_acquire(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_box **out, pdk_error *err)
{
    if (others_work(rt, spec))
        return pdk_acquire_within(rt, spec, out, err);
    PDK_AUTO_ERROR own; /* the steps look at the error, so there must be one */
    pdk_error_begin(&own);
    *out = NULL;
    PDK_CALL(rt, err, -1);
    acq a;
    begin(&a, rt, spec, &own);
    if (check_timeout(spec, &own) < 0 || effective_identity(&a) < 0) {
        pdk_error_move(err, &own);
        return -1;
    }
    name_holder(&a);
    pdk_limit waits = pdk_limit_for(pdk_limit_current(), spec->timeout), limit = waits, keeping;
    a.cancelled = waits.cancelled;
    limit.cancelled = NULL; /* looked at between steps */
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = acquire(&a, pdk_limit_keeping(rt, &waits, &keeping), out, err);
    pdk_limit_enter(outer);
    pdk_pack_free(&a.requirements);
    return rc < 0 ? -1 : 0;
}

/* ---- on whatever thread steps it ---- */

typedef enum claim { RESTS, STEPPED, ABANDONED } claim;

struct pdk_acquiring {
    acq a;                      /* the stepper's */
    pdk_acquire_spec spec;      /* fixed; its strings lie behind */
    pdk_acquire_calls calls;    /* fixed */
    pdk_waiter waiter;          /* the serializer's while it waits */
    pdk_turn identity, id;      /* likewise; else the stepper's */
    enum { ASKS, LOOKS, MAKES, BOUND } at; /* the stepper's */
    _Atomic(claim) claim;
    pdk_error err;              /* the stepper's */
    char text[];
};

static const char *keep_text(char **at, const char *s, size_t len)
{
    char *copy = *at;
    if (s == NULL)
        return NULL;
    memcpy(copy, s, len);
    copy[len] = '\0';
    *at += len + 1;
    return copy;
}

/* A copy of the request: nothing of the caller's is needed any longer. */
static pdk_acquiring *copy_request(const pdk_acquire_spec *s)
{
    size_t user = s->user != NULL ? s->user_len + 1 : 0, thread = s->thread != NULL ? s->thread_len + 1 : 0;
    size_t holder = s->holder != NULL ? strlen(s->holder) + 1 : 0;
    pdk_acquiring *p = calloc(1, sizeof *p + user + thread + holder + s->requirements.len);
    if (p == NULL)
        return NULL;
    char *at = p->text;
    p->spec = *s;
    p->spec.user = keep_text(&at, s->user, s->user_len);
    p->spec.thread = keep_text(&at, s->thread, s->thread_len);
    p->spec.holder = keep_text(&at, s->holder, holder > 0 ? holder - 1 : 0);
    if (s->requirements.len > 0)
        memcpy(at, s->requirements.p, s->requirements.len);
    p->spec.requirements.p = (unsigned char *)at;
    return p;
}

/* Nothing that is too long is copied at all. */
static int check_request(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_error *err)
{
    acq a = { .rt = rt, .spec = spec, .err = err };
    return check_timeout(spec, err) < 0 ? -1 : effective_identity(&a);
}

pdk_acquiring *pdk_acquire_begin(pdk_runtime *rt, const pdk_acquire_spec *spec, atomic_bool *cancelled,
                                 const pdk_acquire_calls *calls, pdk_error *err)
{
    PDK_CALL(rt, err, NULL);
    if (check_request(rt, spec, err) < 0)
        return NULL;
    pdk_acquiring *p = copy_request(spec);
    if (p == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an acquire");
        return NULL;
    }
    p->a = (acq){ .rt = rt, .spec = &p->spec, .err = &p->err, .cancelled = cancelled };
    p->calls = *calls;
    p->waiter.granted = calls->granted;
    p->waiter.ctx = calls->ctx;
    p->identity = p->id = PDK_NO_TURN;
    effective_identity(&p->a); /* the same answer as before */
    name_holder(&p->a);
    return p;
}

/* 1, 0 = waits, -1. */
static int ask_for_identity(pdk_acquiring *p)
{
    acq *a = &p->a;
    PDK_AUTO_PACK key = PDK_NO_PACK;
    if (a->anonymous)
        return 1;
    if (!key_of(a, &key))
        return pdk_acq_no_memory(a);
    return pdk_turn_ask(a->rt->serial, key.data, key.len, &p->waiter, &p->identity, a->err);
}

int pdk_acquire_ask(pdk_acquiring *p, pdk_error *err)
{
    PDK_CALL(p->a.rt, err, -1);
    found bound = pdk_acq_bound(&p->a);
    if (bound == FOUND)
        p->at = BOUND;
    int rc = bound == NOTHING ? ask_for_identity(p) : bound;
    if (rc < 0)
        pdk_error_move(err, &p->err);
    return rc; /* when it waits, another thread may be stepping it by now */
}

/* NOTHING = waits. */
static found advance(pdk_acquiring *p)
{
    acq *a = &p->a;
    if (p->at == BOUND)
        return FOUND;
    if (p->at == ASKS) {
        int rc = ask_for_identity(p);
        if (rc != 1)
            return (found)rc;
        p->at = LOOKS;
    }
    if (p->at == LOOKS) {
        found ok = pdk_acq_cancelled(a) ? FAILED : pdk_acq_bound(a); /* it may have been retained meanwhile */
        if (ok == NOTHING)
            ok = pdk_acq_look(a);
        if (ok != NOTHING)
            return ok;
        p->at = MAKES;
    }
    if (pdk_acq_cancelled(a))
        return FAILED;
    int rc = a->anonymous ? 1 : pdk_turn_ask_id(a->rt->serial, a->id, &p->waiter, &p->id, a->err);
    return rc == 1 ? pdk_acq_make(a) : (found)rc;
}

static void leave_turns(pdk_acquiring *p)
{
    pdk_turn_leave(&p->id);
    pdk_turn_leave(&p->identity);
}

static int step(pdk_acquiring *p, pdk_box **out, pdk_error *err)
{
    acq *a = &p->a;
    const pdk_limit *outer = pdk_limit_enter(&PDK_NO_LIMIT);
    found ok = FAILED;
    bool open = pdk_call_enter(a->rt, a->err) == 0;
    if (open)
        ok = advance(p);
    int rc = 0;
    if (ok != NOTHING) {
        rc = conclude(a, ok, &p->calls, out, err);
        leave_turns(p);
    }
    if (open)
        pdk_call_leave(a->rt);
    pdk_limit_enter(outer);
    return rc;
}

int pdk_acquire_step(pdk_acquiring *p, pdk_box **out, pdk_error *err)
{
    claim rests = RESTS;
    *out = NULL;
    if (!atomic_compare_exchange_strong(&p->claim, &rests, STEPPED))
        return pdk_fail(err, PDK_E_CANCELLED, 0, "the acquire was cancelled");
    int rc = step(p, out, err);
    atomic_store(&p->claim, rc == 0 ? RESTS : ABANDONED);
    if (rc == 0 && pdk_acq_gone(&p->a) && pdk_acquire_abandon(p)) /* cancelled too late for the step to see, too early for abandon */
        return pdk_fail(err, PDK_E_CANCELLED, 0, "the acquire was cancelled");
    return rc;
}

bool pdk_acquire_abandon(pdk_acquiring *p)
{
    claim rests = RESTS;
    if (!atomic_compare_exchange_strong(&p->claim, &rests, ABANDONED))
        return false;
    pdk_turn_withdraw(p->a.rt->serial, &p->waiter);
    pdk_turn_leave_soon(&p->id);
    pdk_turn_leave(&p->identity);
    if (p->a.box != NULL) /* it was bound before */
        pdk_box_drop(p->a.box);
    p->a.box = NULL;
    return true;
}

void pdk_acquire_require(pdk_acquiring *p, pdk_view requirements)
{
    p->spec.requirements = requirements;
}

void pdk_acquire_undo(pdk_acquiring *p, pdk_box *box)
{
    p->a.box = box;
    give_up(&p->a);
}

void pdk_acquire_end(pdk_acquiring *p)
{
    if (p == NULL)
        return;
    pdk_acquire_abandon(p);
    pdk_pack_free(&p->a.requirements);
    pdk_error_clear(&p->err);
    free(p);
}

const char *pdk_acquire_id(const pdk_acquiring *p)
{
    return p->a.id;
}
