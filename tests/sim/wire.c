/* wire.c -- requests to the world, and what comes back: after a while, as an error, not at all; and a backend, a store and a
 * journal made of them, as the core knows such things.
 *
 * A request that fails has not been carried out, or has, or will be later: the one who asked cannot tell. Two exceptions, which
 * are rules of the real ones: the store carries nothing out after the asker was told that it failed (a session number sees to
 * that), and a local file journal does not act later. */
#include "sim.h"

#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool of_store(opkind k)
{
    return k >= OP_TAKE && k <= OP_OWNER;
}
static bool of_journal(opkind k)
{
    return k >= OP_RECORD;
}

static const char *describe(const op *o)
{
    static char text[120];
    int n = snprintf(text, sizeof text, "%s", op_names[o->kind]);
    if (o->kind != OP_LIST && o->kind != OP_RECORDS)
        n += snprintf(text + n, sizeof text - (size_t)n, " %c", 'a' + o->id);
    if (o->gen >= 0)
        n += snprintf(text + n, sizeof text - (size_t)n, " g%d", o->gen);
    if (o->kind == OP_DOOM)
        n += snprintf(text + n, sizeof text - (size_t)n, " expected %lld", (long long)o->expected);
    if (o->token != 0)
        snprintf(text + n, sizeof text - (size_t)n, " %s %lld", of_store(o->kind) ? "floor" : "token", (long long)o->token);
    return text;
}

static void trace_answer(const op *o)
{
    if (!Z->trace)
        return;
    if (o->rc < 0)
        trace("  %s: %s %s", describe(o), pdk_error_kind_name(o->error), o->reason);
    else if (o->kind == OP_RENEW)
        trace("  %s: %s", describe(o), o->renewal == PDK_RENEWED ? "renewed" : o->renewal == PDK_LAPSED ? "lapsed" : "lost");
    else if (o->kind >= OP_TAKE && o->kind <= OP_CLAIM_DESTROY && o->rc == 1)
        trace("  %s: yes, token %lld", describe(o), (long long)o->out_token);
    else if (o->kind == OP_OWNER && o->rc == 1)
        trace("  %s: %s%s", describe(o), insts[o->owner].name, o->owner_del ? ", del" : "");
    else if ((o->kind == OP_CREATE || o->kind == OP_INSPECT || o->kind == OP_DISCOVER) && o->rc == 1 && !o->remote)
        trace("  %s: g%d%s%s, token %lld", describe(o), o->out_gen, W.gens[o->out_gen].doomed ? ", doomed" : "",
              W.gens[o->out_gen].ready ? "" : ", not ready", (long long)W.gens[o->out_gen].token);
    else
        trace("  %s: %s", describe(o), o->rc == 1 ? "yes" : "no");
}

static pdk_ns delay(void)
{
    if (!P.healed && P.slow_rate != 0 && chance(1, P.slow_rate))
        return (pdk_ns)(2 + below(2 * TTL)) * SEC;
    return chance(1, 4) ? (pdk_ns)below(P.healed ? 150 : P.fenced ? 1500 : 400) * MS : (pdk_ns)below(20) * MS;
}

static pdk_ns limit_of(const op *o)
{
    pdk_ns at = pdk_limit_current()->deadline;
    if (at != PDK_NEVER && me->in != NULL)
        at -= me->in->mono_off;
    pdk_ns own = o->limit != 0 ? o->limit : now + (of_store(o->kind) ? 5 : 60) * SEC;
    return at < own ? at : own;
}

static void later(const op *o)
{
    if (of_store(o->kind) || of_journal(o->kind) || o->kind == OP_CONNECT || (o->kind == OP_CREATE && !P.unique) ||
        W.late_count == MAX_LATE)
        return;
    W.late[W.late_count].at = now + (pdk_ns)below(P.fenced ? 3 * TTL * 1000 : 400) * MS;
    W.late[W.late_count++].o = *o;
}

/* Waits, at most to the limit; false = the limit has passed, and nobody waits for the answer any longer. */
static bool wait_until_limit(pdk_ns d, pdk_ns limit)
{
    bool over = now + d > limit;
    wait_for(over ? (limit > now ? limit - now : 0) : d);
    return !over;
}

static void no_answer(op *o, pdk_error_kind kind, const char *reason)
{
    o->rc = -1;
    o->error = of_store(o->kind) ? PDK_E_OWNERSHIP_UNAVAILABLE : of_journal(o->kind) ? PDK_E_IO_ERROR : kind;
    o->reason = reason;
    Z->faults++;
}

static bool faulty(const op *o)
{
    if (P.healed || o->kind == OP_CLOSE)
        return false;
    return (int)o->kind == P.focus ? chance(1, 2) : P.fault_rate != 0 && chance(1, P.fault_rate);
}

static void perhaps_crash(op *o, const char *when)
{
    if (P.healed || P.crashes == 0 || P.crash_rate == 0 || !chance(1, P.crash_rate))
        return;
    P.crashes--;
    TRACE("  crash of %s %s %s", me->in->name, when, describe(o));
    crash(me->in, when);
}

/* A command that is under way: it ends early when its sandbox goes or a newer owner comes. */
static void run_command(op *o)
{
    const gen *g = &W.gens[o->gen];
    for (uint32_t n = below(4); n > 0; n--) {
        wait_for(delay());
        if (!g->present || !g->healthy) {
            no_answer(o, PDK_E_BACKEND_ERROR, "closed");
            return;
        }
        o->killed = P.fenced && (g->doomed || g->token > o->token);
        if (o->killed)
            return;
        if (pdk_limit_cancelled(pdk_limit_current())) {
            no_answer(o, PDK_E_CANCELLED, "cancelled");
            return;
        }
    }
    if (o->kind == OP_EXEC) {
        Z->executed++;
        insts[o->in].last_use[o->id] = now;
    }
}

static void ask_begins(const op *o)
{
    check_io(o);
    TRACE("  %s ...", describe(o));
    act_asks(o);
}

static void ask_ends(const op *o)
{
    trace_answer(o);
    act_asked(o);
    if (me->td != NULL && id_number(me->td->id) >= 0) {
        const lease *l = &W.leases[id_number(me->td->id)];
        me->del_live = l->there && l->owner == o->in && l->del && now < l->until;
    }
    point();
}

void wire_ask(op *o)
{
    pdk_ns limit = limit_of(o);
    ask_begins(o);
    if (o->kind == OP_DESTROY && o->gen >= 0)
        check_stop(o, true);
    perhaps_crash(o, "before");
    if (o->kind == OP_DOOM || (o->kind == OP_CONNECT && !o->own))
        me->doom_tried = true;
    bool fault = faulty(o);
    uint32_t way = fault ? below(4) : 0;
    if (!wait_until_limit(delay(), limit)) {
        if (chance(1, 2))
            later(o);
        no_answer(o, PDK_E_TIMEOUT, "deadline");
    } else if (way == 1 ||
               (way > 1 && o->kind == OP_CREATE && !P.unique)) { /* an engine of this machine undoes what fails */
        no_answer(o, PDK_E_BACKEND_ERROR, o->kind == OP_EXEC || o->kind == OP_OPEN ? "connect" : "refused");
    } else if (way == 2) {
        later(o);
        no_answer(o, PDK_E_BACKEND_ERROR, "reset");
    } else {
        perform(o);
        if (o->kind == OP_INSPECT || o->kind == OP_LIST)
            me->looked_at = now;
        perhaps_crash(o, "after");
        if (o->rc == 1 && (o->kind == OP_EXEC))
            run_command(o);
        bool late = !wait_until_limit(delay(), limit) && (o->kind != OP_CREATE || P.unique);
        if (way == 3 || late) {
            if (o->kind == OP_RECORD && o->rc == 1)
                W.journal[o->client].certain = false;
            no_answer(o, late ? PDK_E_TIMEOUT : PDK_E_BACKEND_ERROR, "lost_answer");
        }
    }
    if (o->kind == OP_FENCE && o->rc == 1) /* from here on it speaks under that token */
        W.clients[o->client].token = o->token;
    if (o->kind == OP_CREATE && o->rc == 1 && (!o->remote || o->status == 201))
        me->created = o->out_gen;
    if (o->kind == OP_CONNECT) /* for another try */
        me->doom_refused = false;
    if (o->kind == OP_DOOM)
        me->doom_refused = o->rc < 0 && o->error == PDK_E_LOST && strcmp(o->reason, "doomed") != 0;
    ask_ends(o);
}

/* ---- the backend: functions in a universe ---- */

void info_generation(char *to, size_t size, int g)
{
    snprintf(to, size, "g%d", g);
}
int generation_number(const char *s)
{
    return s != NULL && s[0] == 'g' ? atoi(s + 1) : -1;
}
int id_number(const char *s)
{
    return s != NULL && s[0] >= 'a' && s[0] < 'a' + MAX_IDS && s[1] == '\0' ? s[0] - 'a' : -1;
}

static int64_t token_field(lua_State *L, int index)
{
    return lua_isstring(L, index) ? strtoll(lua_tostring(L, index), NULL, 10) : 0;
}

static void push_info(lua_State *L, int g)
{
    const gen *s = &W.gens[g];
    char text[24];
    lua_createtable(L, 0, 6);
    lua_pushlstring(L, (char[]){ (char)('a' + s->id) }, 1);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "sandbox_id");
    lua_createtable(L, 0, 2);
    lua_pushlstring(L, &s->user, 1);
    lua_setfield(L, -2, "user");
    lua_insert(L, -2);
    lua_setfield(L, -2, "thread");
    lua_setfield(L, -2, "identity");
    info_generation(text, sizeof text, g);
    lua_pushstring(L, text);
    lua_setfield(L, -2, "generation");
    if (s->token > 0 && P.fenced) {
        snprintf(text, sizeof text, "%lld", (long long)s->token);
        lua_pushstring(L, text);
        lua_setfield(L, -2, "token");
    }
    if (s->doomed && P.fenced) {
        lua_pushboolean(L, true);
        lua_setfield(L, -2, "doomed");
    }
    lua_pushnumber(L, P.idle_timeout);
    lua_setfield(L, -2, "idle");
    lua_createtable(L, 0, 1);
    lua_pushinteger(L, s->mode);
    lua_setfield(L, -2, "mode");
    lua_setfield(L, -2, "attestation");
}

static int field_gen(lua_State *L, int index)
{
    if (!lua_istable(L, index))
        return -1;
    lua_getfield(L, index, "generation");
    int g = generation_number(lua_tostring(L, -1));
    lua_pop(L, 1);
    return g;
}

static int field_id(lua_State *L, int index)
{
    lua_getfield(L, index, "sandbox_id");
    int id = id_number(lua_tostring(L, -1));
    lua_pop(L, 1);
    return id;
}

static void read_arguments(lua_State *L, op *o)
{
    switch (o->kind) {
    case OP_CREATE:
        o->id = field_id(L, 2);
        lua_getfield(L, 2, "requirements");
        lua_getfield(L, -1, "require");
        lua_getfield(L, -1, "mode");
        o->mode = (int)lua_tointeger(L, -1);
        lua_getfield(L, 2, "identity");
        lua_getfield(L, -1, "user");
        o->user = lua_tostring(L, -1)[0];
        break;
    case OP_INSPECT:
    case OP_FINISH:
        o->id = id_number(lua_tostring(L, 2));
        o->gen = field_gen(L, 3);
        break;
    case OP_DISCOVER: o->id = id_number(lua_tostring(L, 2)); break;
    case OP_DESTROY:
    case OP_ALIVE:
    case OP_READY:
    case OP_CONNECT:
        o->id = field_id(L, 2);
        o->gen = field_gen(L, 2);
        if (o->kind == OP_CONNECT) {
            lua_getfield(L, 3, "token");
            o->token = token_field(L, -1);
            lua_getfield(L, 3, "own");
            o->own = lua_toboolean(L, -1);
        }
        break;
    case OP_FENCE:
    case OP_DOOM:
    case OP_EXEC:
    case OP_OPEN:
    case OP_CLOSE_SESSION:
    case OP_CLOSE:
        lua_getfield(L, 1, "client");
        o->client = (int)lua_tointeger(L, -1);
        o->gen = W.clients[o->client].gen;
        o->id = W.gens[o->gen].id;
        o->token = W.clients[o->client].token;
        if (o->kind == OP_FENCE)
            o->token = token_field(L, 2);
        if (o->kind == OP_DOOM) {
            o->expected = token_field(L, 2);
            o->token = token_field(L, 3);
        }
        break;
    default: break;
    }
    if (o->kind != OP_LIST && (o->id < 0 || o->id >= MAX_IDS))
        violation("%s is asked about an id that no identity has", op_names[o->kind]);
    if ((o->kind == OP_DESTROY || o->kind == OP_ALIVE || o->kind == OP_READY || o->kind == OP_CONNECT) && o->gen < 0)
        violation("%s is asked about no generation", op_names[o->kind]);
}

static int call(lua_State *L);

static void push_client(lua_State *L, const op *o)
{
    static const opkind methods[] = { OP_FENCE, OP_DOOM, OP_EXEC, OP_OPEN, OP_CLOSE_SESSION, OP_CLOSE };
    W.clients[o->client].given = true;
    lua_createtable(L, 0, 8);
    lua_pushinteger(L, o->client);
    lua_setfield(L, -2, "client");
    for (size_t i = 0; i < sizeof methods / sizeof *methods; i++) {
        lua_pushvalue(L, lua_upvalueindex(1));
        lua_pushinteger(L, methods[i]);
        lua_pushcclosure(L, call, 2);
        lua_setfield(L, -2, op_names[methods[i]]);
    }
}

static int push_answer(lua_State *L, const op *o)
{
    switch (o->kind) {
    case OP_CREATE:
    case OP_INSPECT:
    case OP_DISCOVER:
        if (o->rc == 1)
            push_info(L, o->out_gen);
        else
            lua_pushnil(L);
        return 1;
    case OP_ALIVE:
    case OP_READY: lua_pushboolean(L, o->rc); return 1;
    case OP_LIST:
        lua_newtable(L);
        for (int g = 0, n = 0; g < MAX_GENS; g++)
            if (o->seen >> g & 1) {
                push_info(L, g);
                lua_rawseti(L, -2, ++n);
            }
        return 1;
    case OP_CONNECT: push_client(L, o); return 1;
    case OP_EXEC:
        lua_createtable(L, 0, 4);
        lua_pushstring(L, o->killed ? "cancelled" : "completed");
        lua_setfield(L, -2, "outcome");
        lua_pushinteger(L, o->killed ? 137 : 0);
        lua_setfield(L, -2, "exit_code");
        return 1;
    default: return 0;
    }
}

/* upvalues: the instance's number, the kind of request */
static int call(lua_State *L)
{
    op o = { .kind = (opkind)lua_tointeger(L, lua_upvalueindex(2)),
             .in = (int)lua_tointeger(L, lua_upvalueindex(1)),
             .id = -1,
             .gen = -1,
             .client = -1,
             .out_gen = -1,
             .reason = "" };
    read_arguments(L, &o);
    if (o.kind == OP_CLOSE && ++W.clients[o.client].closed > 1)
        violation("client %d (of g%d) is closed twice", o.client, W.clients[o.client].gen);
    pdk_script_block(L);
    wire_ask(&o);
    pdk_script_unblock(L);
    if (o.rc >= 0)
        return push_answer(L, &o);
    pdk_error err = PDK_NO_ERROR;
    pdk_fail_reason(&err, o.error, o.reason, "%s failed", op_names[o.kind]);
    return pdk_raise(L, &err);
}

/* Pushes the backend's table.  stack: +1 */
void wire_table(lua_State *L, inst *in)
{
    lua_newtable(L);
    for (opkind k = OP_CREATE; k <= OP_CONNECT; k++) {
        lua_pushinteger(L, in->index);
        lua_pushinteger(L, k);
        lua_pushcclosure(L, call, 2);
        lua_setfield(L, -2, op_names[k]);
    }
    lua_pushliteral(L, "simulated");
    lua_setfield(L, -2, "name");
    lua_newtable(L);
    lua_pushboolean(L, true);
    lua_setfield(L, -2, "fenced");
    lua_setfield(L, -2, "capabilities");
}

/* ---- the store: `self` is the instance ---- */

static op store_op(opkind kind, void *self, const char *id)
{
    return (op){
        .kind = kind, .in = ((inst *)self)->index, .id = id_number(id), .gen = -1, .client = -1, .out_gen = -1, .reason = ""
    };
}

static int store_ask(op *o, pdk_error *err)
{
    wire_ask(o);
    if (o->rc >= 0)
        return o->rc;
    return pdk_fail_reason(err, o->error, o->reason, "the store did not answer (%s)", op_names[o->kind]);
}

static int set(opkind kind, void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    op o = store_op(kind, self, id);
    o.token = floor;
    int rc = store_ask(&o, err);
    if (rc == 1)
        *token = o.out_token;
    return rc;
}
static int take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return set(OP_TAKE, self, id, floor, token, err);
}
static int claim(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return set(OP_CLAIM, self, id, floor, token, err);
}
static int claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return set(OP_CLAIM_DESTROY, self, id, floor, token, err);
}
static int renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    op o = store_op(OP_RENEW, self, id);
    int rc = store_ask(&o, err);
    *out = o.renewal;
    return rc < 0 ? -1 : 0;
}
static int release(void *self, const char *id, pdk_error *err)
{
    op o = store_op(OP_RELEASE, self, id);
    return store_ask(&o, err) < 0 ? -1 : 0;
}
static int owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    op o = store_op(OP_OWNER, self, id);
    int rc = store_ask(&o, err);
    if (rc == 1) {
        snprintf(out->owner, sizeof out->owner, "%s", insts[o.owner].name);
        out->del = o.owner_del;
        out->ours = o.owner == o.in;
        out->token = o.out_token;
    }
    return rc;
}
static void free_nothing(void *self)
{
    (void)self;
}

pdk_lease *wire_lease(inst *in)
{
    static const pdk_lease_ops ops = { .type = "simulated",
                                       .take = take,
                                       .claim = claim,
                                       .claim_for_destroy = claim_for_destroy,
                                       .renew = renew,
                                       .release = release,
                                       .owner_of = owner_of,
                                       .free = free_nothing };
    return pdk_lease_new(&ops, in, NULL);
}

/* ---- the journal ---- */

/* Of files (files.c), or as the rules of journal.h have it. */
static int journal_ask(opkind kind, void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    op o = store_op(kind, self, id);
    int (*const of_files[])(op *, const char *, const char *, pdk_error *) = { files_has, files_retire };
    o.gen = generation_number(generation);
    if (!P.files) {
        wire_ask(&o);
        return o.rc >= 0 ? o.rc : pdk_fail_reason(err, o.error, o.reason, "the journal failed (%s)", op_names[kind]);
    }
    ask_begins(&o);
    int rc = kind == OP_RECORD ? files_record(&o, id, generation, why, err)
                               : of_files[kind - OP_HAS](&o, id, generation, err);
    o.error = err->kind;
    ask_ends(&o);
    return rc;
}
static int record_it(void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    return journal_ask(OP_RECORD, self, id, generation, why, err) < 0 ? -1 : 0;
}
static int has(void *self, const char *id, const char *generation, pdk_error *err)
{
    return journal_ask(OP_HAS, self, id, generation, NULL, err);
}
static int retire(void *self, const char *id, const char *generation, pdk_error *err)
{
    return journal_ask(OP_RETIRE, self, id, generation, NULL, err) < 0 ? -1 : 0;
}

static int list_files(op *o, pdk_pack *out, pdk_error *err)
{
    ask_begins(o);
    int rc = files_list(o, out, err);
    o->error = err->kind;
    ask_ends(o);
    return rc;
}

static int list_records(void *self, pdk_pack *out, pdk_error *err)
{
    op o = store_op(OP_RECORDS, self, "a");
    if (P.files)
        return list_files(&o, out, err);
    wire_ask(&o);
    if (o.rc < 0)
        return pdk_fail_reason(err, o.error, o.reason, "the journal failed (list)");
    pdk_mark list = pdk_begin_list(out);
    for (int i = 0; i < W.journal_count; i++) {
        if (!W.journal[i].there)
            continue;
        char text[12];
        pdk_mark one = pdk_begin_map(out);
        pdk_kv_str(out, &one, "sandbox_id", (char[]){ (char)('a' + W.journal[i].id) }, 1);
        info_generation(text, sizeof text, W.journal[i].gen);
        pdk_kv_cstr(out, &one, "generation", W.journal[i].gen >= 0 ? text : NULL);
        pdk_end(out, &one);
        list.count++;
    }
    pdk_end(out, &list);
    return 0;
}

pdk_journal *wire_journal(inst *in)
{
    static const pdk_journal_ops ops = {
        .type = "simulated", .record = record_it, .has = has, .retire = retire, .list = list_records, .free = free_nothing
    };
    return pdk_journal_new(&ops, in, NULL);
}
