/* world.c -- what lies outside of a runtime, as it is meant to be: an engine with guests that enforce tokens exactly as
 * core/guest does, an ownership store and a journal that keep the rules of core/lease.h and core/journal.h. The world makes no
 * mistakes; whether a request reaches it, and whether its answer comes back, is decided in wire.c. */
#include "sim.h"

#include <string.h>

world W;

const char *const op_names[OP_KINDS] = {
    "create", "destroy", "inspect", "discover",     "alive",         "ready",  "list",    "finish", "connect",
    "fence",  "doom",    "exec",    "open_session", "close_session", "close",  "take",    "claim",  "claim_for_destroy",
    "renew",  "release", "owner",   "record",       "has",           "retire", "records",
};

static void fail(op *o, pdk_error_kind kind, const char *reason)
{
    o->rc = -1;
    o->error = kind;
    o->reason = reason;
}

/* ---- the engine ---- */

static int newest(int id, bool healthy)
{
    for (int g = W.gen_count - 1; g >= 0; g--)
        if (W.gens[g].present && W.gens[g].id == id && (!healthy || W.gens[g].healthy))
            return g;
    return -1;
}

static void engine_create(op *o)
{
    int old = newest(o->id, false);
    if (P.unique && old >= 0) {
        fail(o, PDK_E_BACKEND_ERROR, "conflict");
        return;
    }
    if (W.gen_count == MAX_GENS) {
        fail(o, PDK_E_CAPACITY_EXHAUSTED, "");
        return;
    }
    o->out_gen = W.gen_count++;
    W.gens[o->out_gen] = (gen){ .present = true,
                                .healthy = true,
                                .ready = P.healed || !chance(1, 12),
                                .id = o->id,
                                .mode = o->mode,
                                .user = o->user,
                                .sticky = !P.healed && chance(1, 25),
                                .born = now };
    o->rc = 1;
}

static void engine_inspect(op *o)
{
    o->out_gen = o->gen >= 0 ? o->gen : newest(o->id, false);
    if (o->gen >= 0 && !W.gens[o->gen].present) /* some engines then say what has the name now */
        o->out_gen = P.other_info ? newest(o->id, false) : -1;
    o->rc = o->out_gen >= 0;
}

static void engine_stop(op *o)
{
    gen *g = &W.gens[o->gen];
    o->rc = 1;
    if (!g->present)
        return;
    check_stop(o, false);
    Z->stops++;
    if (g->sticky)
        g->sticky = false; /* the next one works */
    else
        g->present = false;
}

/* ---- a guest ---- */

static bool reach(op *o, gen **out)
{
    gen *g = *out = &W.gens[W.clients[o->client].gen];
    o->gen = W.clients[o->client].gen;
    if (!g->present || !g->healthy)
        fail(o, PDK_E_BACKEND_ERROR, "connect");
    return g->present && g->healthy;
}

static bool allowed(op *o, const gen *g, int64_t token)
{
    if (!P.fenced)
        return true;
    if (g->doomed)
        fail(o, PDK_E_LOST, "doomed");
    else if (token < g->token)
        fail(o, PDK_E_LOST, "stale_token");
    if (g->doomed || token < g->token)
        Z->refused++;
    return !g->doomed && token >= g->token;
}

static void guest_fence(op *o)
{
    gen *g;
    if (!reach(o, &g) || !allowed(o, g, o->token))
        return;
    if (g->token != o->token)
        g->fenced_at = now;
    g->token = o->token; /* what runs under a smaller one ends before the answer (see wire.c) */
    o->rc = 1;
}

static void guest_doom(op *o)
{
    gen *g;
    if (!reach(o, &g))
        return;
    if (g->doomed && (o->expected != g->doom_expected || o->token != g->doom_token)) {
        fail(o, PDK_E_LOST, "doomed");
        return;
    }
    if (!g->doomed && (o->expected != g->token || o->token < g->token)) {
        fail(o, PDK_E_LOST, "token_mismatch");
        return;
    }
    g->doomed = true;
    g->doom_expected = o->expected;
    g->doom_token = o->token;
    o->rc = 1;
}

static void guest_exec(op *o)
{
    gen *g;
    if (!reach(o, &g) || !allowed(o, g, o->token))
        return;
    if (o->kind == OP_EXEC)
        check_exec(o);
    o->rc = 1;
}

/* ---- the ownership store ---- */

static lease *live(int id)
{
    lease *l = &W.leases[id];
    if (l->there && now >= l->until)
        l->there = false;
    return l;
}

static void granted(op *o, lease *l)
{
    grant *g = &W.grants[o->in][o->id];
    l->until = now + TTL * SEC;
    if (g->token != l->token)
        g->since = now;
    g->there = true;
    g->del = l->del;
    g->token = l->token;
    g->until = l->until;
    o->out_token = l->token;
    o->rc = 1;
}

static void store_set(op *o, bool del)
{
    lease *l = live(o->id);
    bool mine = l->there && l->owner == o->in;
    o->rc = 0;
    if (l->there && ((o->kind == OP_TAKE && l->del) || (o->kind == OP_CLAIM && (!mine || l->del)) ||
                     (o->kind == OP_CLAIM_DESTROY && !mine)))
        return;
    bool again = !l->there && P.regrant && l->last_owner == o->in;
    if ((!mine && !again) || (again ? l->last_token : l->token) <= o->token) {
        int64_t micros = now / 1000 + 1000000, next = W.last_token + 1 > micros ? W.last_token + 1 : micros;
        W.last_token = next > o->token ? next : o->token + 1;
        l->token = W.last_token;
    } else if (again) {
        l->token = l->last_token;
    }
    if (o->kind == OP_CLAIM)
        check_claim(o->in, o->id);
    l->there = true;
    l->del = del;
    l->owner = l->last_owner = o->in;
    l->last_token = l->token;
    granted(o, l);
}

static void store_renew(op *o)
{
    lease *l = live(o->id);
    o->rc = 1;
    o->renewal = PDK_LOST;
    if (l->there && l->owner == o->in) {
        granted(o, l);
        o->renewal = PDK_RENEWED;
    } else if (!l->there && (l->last_owner == o->in || l->last_owner < 0)) {
        o->renewal = PDK_LAPSED; /* the last token is ours, or the store has forgotten whose it was */
    }
}

static void store_release(op *o)
{
    lease *l = live(o->id);
    if (l->there && l->owner == o->in)
        l->there = false;
    W.grants[o->in][o->id].there = false;
    o->rc = 1;
}

static void store_owner(op *o)
{
    lease *l = live(o->id);
    o->rc = l->there;
    o->owner = l->owner;
    o->owner_del = l->del;
    o->out_token = l->token;
}

/* ---- the journal ---- */

static void journal_record(op *o)
{
    o->rc = 1;
    for (int i = 0; i < W.journal_count; i++) {
        record *r = &W.journal[i];
        if (r->there && r->id == o->id && r->gen == o->gen) {
            o->client = i;
            return;
        }
    }
    int i = 0;
    while (i < W.journal_count && W.journal[i].there)
        i++;
    if (i == MAX_GENS) {
        fail(o, PDK_E_IO_ERROR, "");
        return;
    }
    W.journal_count += i == W.journal_count;
    W.journal[i] = (record){ true, true, o->id, o->gen, now };
    o->client = i;
}

static void journal_has(op *o)
{
    o->rc = 0;
    for (int i = 0; i < W.journal_count; i++) {
        const record *r = &W.journal[i];
        if (r->there && r->id == o->id && (r->gen < 0 || o->gen < 0 || r->gen == o->gen))
            o->rc = 1;
    }
}

static bool retires(const op *o, const record *r)
{
    return r->there && r->id == o->id && (o->gen < 0 || r->gen == o->gen);
}

void check_retire(const op *o)
{
    for (int i = 0; i < W.journal_count; i++) {
        const record *r = &W.journal[i];
        int g = r->gen;
        if (!retires(o, r) || g < 0 || !W.gens[g].present)
            continue;
        bool held_up = o->gen < 0 && me != NULL && me->td != NULL && me->del_live && r->since >= me->td_since;
        if (!held_up) /* held up since its lease was seen to be good: no check here can help */
            violation("the record of g%d is retired while g%d runs", g, g);
    }
}

static void journal_retire(op *o)
{
    o->rc = 1;
    check_retire(o);
    for (int i = 0; i < W.journal_count; i++)
        if (retires(o, &W.journal[i]))
            W.journal[i].there = false;
}

/* ---- all of it ---- */

void perform(op *o)
{
    o->rc = 0;
    if (o->remote) {
        pods_perform(o);
        return;
    }
    switch (o->kind) {
    case OP_CREATE: engine_create(o); break;
    case OP_DESTROY: engine_stop(o); break;
    case OP_INSPECT: engine_inspect(o); break;
    case OP_DISCOVER:
        o->out_gen = newest(o->id, true);
        o->rc = o->out_gen >= 0;
        break;
    case OP_ALIVE:
        o->rc = W.gens[o->gen].present && W.gens[o->gen].healthy;
        W.gens[o->gen].told_dead |= o->rc == 0;
        break;
    case OP_READY: o->rc = W.gens[o->gen].present && W.gens[o->gen].ready; break;
    case OP_LIST:
        for (int g = 0; g < W.gen_count; g++)
            o->seen |= (uint64_t)W.gens[g].present << g;
        o->rc = 1;
        break;
    case OP_FINISH:
        if (o->gen >= 0 && W.gens[o->gen].present)
            violation("finish of g%d, which runs", o->gen);
        o->rc = 1;
        break;
    case OP_CONNECT:
        if (W.client_count == MAX_CLIENTS)
            violation("more than %d clients", MAX_CLIENTS);
        o->client = W.client_count++;
        W.clients[o->client] = (client){ o->gen, o->in, o->token, o->own, false, 0 };
        o->rc = 1;
        break;
    case OP_FENCE: guest_fence(o); break;
    case OP_DOOM: guest_doom(o); break;
    case OP_EXEC:
    case OP_OPEN:
    case OP_CLOSE_SESSION: guest_exec(o); break;
    case OP_CLOSE: o->rc = 1; break;
    case OP_TAKE:
    case OP_CLAIM: store_set(o, false); break;
    case OP_CLAIM_DESTROY: store_set(o, true); break;
    case OP_RENEW: store_renew(o); break;
    case OP_RELEASE: store_release(o); break;
    case OP_OWNER: store_owner(o); break;
    case OP_RECORD: journal_record(o); break;
    case OP_HAS: journal_has(o); break;
    case OP_RETIRE: journal_retire(o); break;
    case OP_RECORDS: o->rc = 1; break;
    case OP_KINDS: break;
    }
}

/* ---- requests that reach the world although nobody waits for them any longer ---- */

pdk_ns late_next(void)
{
    pdk_ns at = pods_next();
    for (int i = 0; i < W.late_count; i++)
        if (W.late[i].at < at)
            at = W.late[i].at;
    return at;
}

void late_run(void)
{
    pods_pass();
    for (int i = 0; i < W.late_count; i++)
        if (W.late[i].at <= now) {
            op o = W.late[i].o;
            W.late[i] = W.late[--W.late_count];
            TRACE("(only now: %s by %s for %c, g%d)", op_names[o.kind], insts[o.in].name, 'a' + o.id, o.gen);
            perform(&o);
            i--;
        }
}
