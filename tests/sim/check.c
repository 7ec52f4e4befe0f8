/* check.c -- what must hold in every schedule: looked at after each step, and when something is asked of the world. */
#include "sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct seen { /* an entry as the last step left it */
    uint64_t incarnation, epoch;
    int64_t token;
    pdk_state state;
    int holders;
    bool known;
    int64_t handed; /* the token under which it was handed out last */
} seen;
static seen last[MAX_INST][MAX_IDS];

/* The registry of an instance, if nobody is at work on it. */
static bool quiet(const inst *in)
{
    return in->active && !in->dead && !in->closed && *(fiber *const *)(const void *)&in->rt->pool.registry == NULL;
}

pdk_entry *peek(inst *in, int id)
{
    char name[2] = { (char)('a' + id), '\0' };
    return quiet(in) ? pdk_pool_find(&in->rt->pool, name) : NULL;
}

static int gen_of(const pdk_entry *e)
{
    return generation_number(e->generation);
}

static bool journaled(int g)
{
    for (int i = 0; i < W.journal_count; i++)
        if (W.journal[i].there && W.journal[i].id == W.gens[g].id && (W.journal[i].gen < 0 || W.journal[i].gen == g))
            return true;
    return false;
}

/* ---- handing out ---- */

static void check_lease_of(inst *in, int id, const pdk_entry *e)
{
    const lease *l = &W.leases[id];
    const grant *g = &W.grants[in->index][id];
    if (l->there && now < l->until && l->owner == in->index) {
        if (l->del)
            violation("%s hands %c out while its lease says `del`", in->name, 'a' + id);
        if (l->token < e->token) /* a larger one: the renewal has claimed it anew, after a lapse */
            violation("%s hands %c out under token %lld, its lease has %lld", in->name, 'a' + id, (long long)e->token,
                      (long long)l->token);
        return;
    }
    if (W.wiped > g->since)
        return; /* the store has lost it */
    if (!g->there)
        violation("%s hands %c out without a lease", in->name, 'a' + id);
    if (l->last_token > e->token)
        return; /* a handover that came in between: the other's fence comes later, and this one's holders are lost */
    if (now < g->until)
        violation("%s hands %c out although its lease went to somebody else", in->name, 'a' + id);
    if (me->call_start > g->until)
        violation("%s hands %c out on a lease that had run out before the acquire began", in->name, 'a' + id);
}

static void handed_out(inst *in, int id, const pdk_entry *e)
{
    int g = gen_of(e);
    in->last_use[id] = now;
    if (me != NULL && g == me->created) /* it is tracked: no longer its maker's alone */
        me->created = -1;
    TRACE("  * %s hands out %c, g%d, token %lld, %d holders", in->name, 'a' + id, g, (long long)e->token, e->holder_count);
    if (e->reserved != 0)
        violation("%s hands %c out while it is reserved for a teardown", in->name, 'a' + id);
    if (e->retry)
        violation("%s hands %c out although a stop of it has failed", in->name, 'a' + id);
    if (me != NULL && me->in == in && me->call_start != 0 && g >= 0 && W.gens[g].asked_at != 0 &&
        W.gens[g].asked_at < me->call_start && W.leases[id].last_token <= e->token) /* else a handover came in between */
        violation("%s hands out the Pod g%d, whose end was asked for before", in->name, g);
    if (me != NULL && me->in == in)
        act_handed_out();
    if (me == NULL || me->in != in || me->call_start == 0)
        return; /* one more holder of what was handed out before: the guest tells it if that is over */
    check_lease_of(in, id, e);
    if (P.fenced && g >= 0 && W.gens[g].present && W.gens[g].token < e->token)
        violation("%s hands g%d out under token %lld, but its guest was fenced with %lld only", in->name, g,
                  (long long)e->token, (long long)W.gens[g].token);
    for (int i = 0; i < W.journal_count; i++) {
        const record *r = &W.journal[i];
        if (r->there && r->certain && r->id == id && (r->gen < 0 || r->gen == g) && r->since < W.grants[in->index][id].since)
            violation("%s hands g%d out, which is quarantined", in->name, g);
    }
}

/* Two generations of one id that are handed out, and would both obey. */
static void check_twins(int id)
{
    if (!P.fenced)
        return;
    int found = -1, by = -1;
    for (int i = 0; i < MAX_INST; i++) {
        pdk_entry *e = peek(&insts[i], id);
        int g = e == NULL || e->state != PDK_ACTIVE || e->holder_count == 0 ? -1 : gen_of(e);
        if (g < 0 || !W.gens[g].present || !W.gens[g].healthy ||
            (P.fenced && (W.gens[g].doomed || W.gens[g].token > e->token)))
            continue;
        if (found >= 0 && found != g)
            violation("g%d (by %s) and g%d (by %s) are both handed out for %c", found, insts[by].name, g, insts[i].name,
                      'a' + id);
        found = g;
        by = i;
    }
}

/* What is handed out under a live lease goes by a teardown only. */
static void check_gone(inst *in, int id, const seen *was)
{
    const lease *l = &W.leases[id];
    if (was->known && was->state == PDK_ACTIVE && was->holders > 0 && was->handed == l->token && l->there &&
        now < l->until && l->owner == in->index && !l->del && me != NULL && me->in == in && me->td == NULL && !in->closing)
        violation("%s forgets %c, which it has handed out under a live lease", in->name, 'a' + id);
}

static void look_at(inst *in, int id, pdk_entry *e, seen *was)
{
    bool same = was->known && was->incarnation == e->incarnation;
    if (!same)
        check_gone(in, id, was);
    if (same && e->epoch < was->epoch)
        violation("the epoch of %c in %s goes back", 'a' + id, in->name);
    if (same && e->token < was->token)
        violation("the token of %c in %s goes back from %lld to %lld", 'a' + id, in->name, (long long)was->token,
                  (long long)e->token);
    int64_t handed = same ? was->handed : 0;
    if (e->state == PDK_ACTIVE && (!same || was->state != PDK_ACTIVE || e->holder_count > was->holders)) {
        handed_out(in, id, e);
        check_twins(id);
        if (me != NULL && me->in == in && me->call_start != 0)
            handed = e->token;
    }
    *was = (seen){ e->incarnation, e->epoch, e->token, e->state, e->holder_count, true, handed };
}

void check_step(void)
{
    for (int i = 0; i < MAX_INST; i++) {
        inst *in = &insts[i];
        if (!quiet(in))
            continue;
        bool there[MAX_IDS] = { false };
        const pdk_map *ids = &in->rt->pool.ids;
        for (pdk_node *n = pdk_map_each(ids, NULL); n != NULL; n = pdk_map_each(ids, n)) {
            pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
            int id = id_number(e->id);
            there[id] = true;
            look_at(in, id, e, &last[i][id]);
        }
        for (int id = 0; id < MAX_IDS; id++)
            if (!there[id]) {
                check_gone(in, id, &last[i][id]);
                last[i][id].known = false;
            }
    }
}

/* ---- stopping ---- */

static bool held_by(inst *in, int id, int g)
{
    pdk_entry *e = peek(in, id);
    if (e == NULL || e->state != PDK_ACTIVE || gen_of(e) != g)
        return false;
    for (const pdk_holder *h = e->holders; h != NULL; h = h->next)
        if (h->token == e->token &&
            (!P.fenced || W.gens[g].token >= e->token)) /* one under a superseded token is no holder */
            return true;
    return false;
}

static void check_own_holders(const op *o)
{
    inst *in = &insts[o->in];
    if (in->closing || W.gens[o->gen].told_dead || !held_by(in, o->id, o->gen))
        return;
    violation("%s stops g%d, which its own clients hold", in->name, o->gen);
}

/* The store has lost the lease under which it is handed out, and by its own clock there was no need to renew it yet: such a lease
 * is given a TTL's time to come back. */
static bool has_lost_it(int i, const pdk_entry *e)
{
    return W.wiped > W.grants[i][id_number(e->id)].since && e->lease_until > now + insts[i].boot_off &&
           W.gens[gen_of(e)].token == e->token;
}

/* What comes before a stop: doom, or a record when the guest did not answer; and it is still tracked meanwhile. */
static void check_order(const op *o, const gen *g)
{
    const char *name = insts[o->in].name;
    const pdk_teardown *td = me->td;
    if (P.fenced && !g->doomed && !me->doom_tried)
        violation("%s asks for the stop of g%d, whose guest was not asked", name, o->gen);
    if (P.fenced && !g->doomed && !journaled(o->gen))
        violation("%s asks for the stop of g%d, which is neither doomed nor recorded", name, o->gen);
    const pdk_entry *e = peek(&insts[o->in], o->id);
    if (td != NULL && pdk_view_is_nil(td->info) && !td->retire && (e == NULL || gen_of(e) != o->gen) && quiet(&insts[o->in]))
        violation("%s asks for the stop of g%d, which it tracks no longer", name, o->gen);
}

void check_stop(op *o, bool issued)
{
    const lease *l = &W.leases[o->id];
    gen *g = &W.gens[o->gen];
    bool live = l->there && now < l->until;
    if (issued) {
        /* what is asked for right after an answer may still be held up on its way: no check in this process can help there */
        o->covered = me->td != NULL && (me->del_live || W.wiped >= me->td_since);
        if (!o->covered && !g->doomed && g->present)
            violation("%s asks for the stop of g%d without a `del` lease, and its guest is not doomed", insts[o->in].name,
                      o->gen);
        if (me->td != NULL && strcmp(me->td->reason, "idle") == 0 && P.idle_timeout > 0 && g->present) {
            pdk_ns idle = now - insts[o->in].last_use[o->id];
            if ((double)idle / 1e9 < P.idle_timeout - 0.1)
                violation("%s stops g%d as idle after %.1f s, its limit is %.1f s", insts[o->in].name, o->gen,
                          (double)idle / 1e9, P.idle_timeout);
        }
        if (g->present)
            check_order(o, g);
        if (me->doom_refused && g->present)
            violation("%s asks for the stop of g%d, whose guest has refused the doom", insts[o->in].name, o->gen);
        if (me->td != NULL && me->td->dirty && g->present && !journaled(o->gen))
            violation("%s asks for the stop of g%d, which is dirty and not recorded", insts[o->in].name, o->gen);
        o->by_itself = me->td != NULL && (strcmp(me->td->reason, "idle") == 0 || strcmp(me->td->reason, "evicted") == 0 ||
                                          strcmp(me->td->reason, "orphan") == 0 || strcmp(me->td->reason, "retry") == 0);
        check_own_holders(o);
        return;
    }
    for (int i = 0; i < MAX_INST; i++) {
        if (i == o->in || !held_by(&insts[i], o->id, o->gen))
            continue;
        const pdk_entry *e = peek(&insts[i], o->id);
        if (o->by_itself && g->doomed && has_lost_it(i, e))
            violation("%s stops g%d by itself, %s holds it and had no time to renew", insts[o->in].name, o->gen,
                      insts[i].name);
        if (!live || l->owner != i || l->del)
            continue;
        if (e->token == l->token && (!o->covered || g->doomed))
            violation("%s stops g%d, which %s holds under a live lease", insts[o->in].name, o->gen, insts[i].name);
    }
}

/* Somebody has fenced it since the running fiber has looked at it, a moment ago. */
static bool just_missed(int g)
{
    return me == NULL || (me->looked_at != 0 && now - me->looked_at < 2 * TTL * SEC && W.gens[g].fenced_at > me->looked_at);
}

/* An instance is given the id for itself: nobody may hold the sandbox who has had no time to renew what the store has lost. */
void check_claim(int in, int id)
{
    for (int i = 0; i < MAX_INST; i++) {
        const pdk_entry *e = i == in ? NULL : peek(&insts[i], id);
        int g = e == NULL ? -1 : gen_of(e);
        if (g < 0 || !P.fenced || !W.gens[g].present || W.gens[g].doomed || !held_by(&insts[i], id, g))
            continue;
        if (has_lost_it(i, e) && !just_missed(g))
            violation("%s claims %c, %s holds g%d and had no time to renew", insts[in].name, 'a' + id, insts[i].name, g);
    }
}

/* ---- commands and requests ---- */

/* A command takes effect: nobody may have been handed the sandbox under a larger token. */
void check_exec(const op *o)
{
    if (!P.fenced) /* whoever was handed over is told by its own deadline only */
        return;
    for (int i = 0; i < MAX_INST; i++) {
        const pdk_entry *e = peek(&insts[i], o->id);
        if (e != NULL && e->state == PDK_ACTIVE && gen_of(e) == o->gen && last[i][o->id].handed > o->token)
            violation("a command of %s runs in g%d under token %lld, %s has it under %lld", insts[o->in].name, o->gen,
                      (long long)o->token, insts[i].name, (long long)last[i][o->id].handed);
    }
    if (o->kind == OP_EXEC && W.clients[o->client].closed > 0 && !insts[o->in].closing && !W.gens[o->gen].told_dead)
        TRACE("  (a command on a client that is closed)");
}

void check_io(const op *o)
{
    if (me->held_count == 0)
        return;
    const char *what = "a mutex";
    for (int i = 0; i < MAX_INST; i++)
        if (insts[i].rt != NULL && me->held[0] == &insts[i].rt->pool.registry)
            what = "the registry";
        else if (insts[i].rt != NULL && me->held[0] == &insts[i].rt->lock)
            what = "the runtime's life lock";
    violation("%s asks for %s with %s locked", me->name, op_names[o->kind], what);
}

/* ---- the end ---- */

static void check_registry(inst *in)
{
    if (!quiet(in))
        return;
    for (int id = 0; id < P.ids; id++) {
        pdk_entry *e = peek(in, id);
        if (e == NULL)
            continue;
        if (e->reserved != 0)
            violation("%c stays reserved in %s", 'a' + id, in->name);
        if (e->intents != 0)
            violation("%c keeps %d intents in %s", 'a' + id, e->intents, in->name);
        if (e->busy != 0)
            violation("%c stays busy in %s", 'a' + id, in->name);
    }
    if (in->rt->pool.creating != 0)
        violation("%zu creations are still counted in %s", in->rt->pool.creating, in->name);
}

static void check_turns(void)
{
    for (int r = 0; r < MAX_INST; r++)
        for (int i = 0; i < 8; i++)
            if (W.turns[r][i] != 0 && !insts[W.turns[r][i] - 1].dead)
                violation("%s keeps an id's lock", insts[W.turns[r][i] - 1].name);
}

/* Everything has been released, everybody has had the time to reap and reconcile, the runtimes that are left were shut down. */
void check_end(void)
{
    for (int i = 0; i < MAX_INST; i++)
        check_registry(&insts[i]);
    check_turns();
    for (int g = 0; g < W.gen_count; g++)
        if (W.gens[g].present)
            violation("g%d of %c is left running%s", g, 'a' + W.gens[g].id, journaled(g) ? " (quarantined)" : "");
    for (int c = 0; c < W.client_count; c++)
        if (W.clients[c].given && W.clients[c].closed == 0 && !insts[W.clients[c].in].dead)
            violation("client %d of %s (g%d) was never closed", c, insts[W.clients[c].in].name, W.clients[c].gen);
}
