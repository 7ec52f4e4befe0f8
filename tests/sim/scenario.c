/* scenario.c -- one schedule: a seed chooses how many runtimes share how many sandboxes, what their clients do, what goes wrong and
 * how threads are switched; then everything is healed, and what is left must be found again, served, and taken down. */
#include "sim.h"

#include "box.h"
#include "open.h"
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REAPED = 80 * TTL }; /* seconds in which everything must go: orphans of one id wait for one another */

inst insts[MAX_INST];
plan P;
bool scenario_over;
static int clients_left, probes_failed;

/* ---- the runtimes: opened once, before the snapshot ---- */

static const char options[] =
    "return { clock = 'monotonic', threads = true, state_dir = '/nowhere', user = 'u', scope = 'sim', replicas = 2,\n"
    "  idle_timeout = 8, reap_interval = 4, ready_timeout = 5, discover_timeout = 3, stop_timeout = 4, command_timeout = "
    "30,\n"
    "  health_ttl = 2, orphan_ttl = 3600, ownership = { type = 'memory', ttl = 10, renew_interval = 3 },\n"
    "  policies = {\n"
    "    identity = { source = 'return { derive = function(ctx) return ctx.thread end }' },\n"
    "    reuse = { source = [[return {\n"
    "      decide = function(ctx)\n"
    "        local want = ctx.requirements.require and ctx.requirements.require.mode\n"
    "        if want == 8 then return 'refuse', 'mode' elseif want == 9 then return 'defer', 'mode' end\n"
    "        if want and want ~= ctx.attestation.mode then return 'replace', 'mode' end\n"
    "        return 'reuse'\n"
    "      end,\n"
    "      idle_timeout = function(ctx) return ctx.info.idle end,\n"
    "      evict = function(candidates) return candidates[1].sandbox_id end,\n"
    "    }]] },\n"
    "  } }\n";

typedef struct making {
    inst *in;
    pdk_iface *out, *remote;
} making;

static int make_backend(lua_State *L, void *arg)
{
    making *m = arg;
    wire_table(L, m->in);
    m->out = pdk_iface_of_script(L, m->in->script, "backend");
    pods_backend(L, m->in);
    m->remote = pdk_iface_of_script(L, m->in->script, "backend");
    return 0;
}

static int collect(lua_State *L, void *arg)
{
    (void)arg;
    lua_gc(L, LUA_GCCOLLECT);
    lua_gc(L, LUA_GCCOLLECT);
    return 0;
}

static void no_log(void *ctx, const pdk_pack *record)
{
    (void)ctx;
    (void)record;
}

static void open_instance(inst *in)
{
    pdk_error err = PDK_NO_ERROR;
    making m = { in, NULL, NULL };
    pdk_setup setup = { 0 };
    in->script = pdk_script_new(&err);
    if (in->script == NULL || pdk_setup_read(in->script, options, "sim.lua", &setup, &err) < 0 ||
        pdk_script_enter(in->script, make_backend, &m, &err) < 0)
        violation("cannot open: %s", err.message);
    /* no directory of its own: what is kept on disk is not what is tried here */
    pdk_pack plain = PDK_NO_PACK;
    pdk_mark map = pdk_begin_map(&plain);
    pdk_view key, value;
    for (size_t at = 0; pdk_view_next(pdk_view_of(&setup.options), &at, &key, &value);)
        if (strcmp(pdk_view_str(key, NULL), "state_dir") != 0)
            pdk_kv_view(&plain, &map, pdk_view_str(key, NULL), value);
    pdk_end(&plain, &map);
    pdk_open_spec spec = { .script = in->script, .options = pdk_view_of(&plain), .backend = m.out, .log_sink = no_log };
    in->rt = pdk_runtime_open(&spec, &err);
    if (in->rt == NULL)
        violation("cannot open: %s", err.message);
    pdk_lease_free(in->rt->lease);
    in->rt->lease = wire_lease(in);
    pdk_journal_free(in->rt->journal);
    in->rt->journal = wire_journal(in);
    files_open(in);
    in->engine = m.out;
    in->remote = m.remote;
    pdk_serial_free(in->rt->serial);
    in->rt->serial = pdk_serial_new("/dev/null", true, &err); /* what is locked in it is in W.turns: see __wrap_pdk_lock_range */
    pdk_pack_free(&plain);
    pdk_setup_clear(in->script, &setup);
    pdk_script_enter(in->script, collect, NULL, &err);
}

static void *boot(void *arg)
{
    (void)arg;
    files_format();
    for (int i = 0; i < MAX_INST; i++) {
        insts[i] = (inst){ .index = i, .name = { (char)('A' + i), '\0' }, .active = true };
        me->in = &insts[i];
        open_instance(&insts[i]);
        insts[i].active = false;
    }
    me->in = NULL;
    scenario_over = true;
    return NULL;
}

void scenario_boot(void)
{
    fiber_start(NULL, "boot", boot, NULL);
}

/* ---- locks between processes ---- */

int __wrap_pdk_lock_range(int fd, int type, int64_t offset, int64_t len, pdk_error *err);
int __wrap_pdk_lock_range(int fd, int type, int64_t offset, int64_t len, pdk_error *err)
{
    (void)fd;
    (void)len;
    (void)err;
    int row = P.shared_turns ? 0 : me->in->index, who = 1 + me->in->index, spare = -1;
    for (int i = 0; i < 8; i++) {
        if (W.turns[row][i] == 0)
            spare = i;
        else if (W.turn_offsets[row][i] == offset) {
            if (type == 2 /* F_UNLCK */)
                W.turns[row][i] = 0;
            return type == 2 || W.turns[row][i] == who;
        }
    }
    if (type == 2)
        return 1;
    W.turns[row][spare] = who;
    W.turn_offsets[row][spare] = offset;
    return 1;
}

/* ---- crashes ---- */

void crash(inst *in, const char *why)
{
    (void)why;
    in->dead = true;
    Z->crashes++;
    for (int r = 0; r < MAX_INST; r++)
        for (int i = 0; i < 8; i++)
            if (W.turns[r][i] == 1 + in->index)
                W.turns[r][i] = 0;
    for (int i = 0; i < MAX_FIBERS; i++)
        if (fibers[i].in == in && fibers[i].name[0] == 'c' && fibers[i].state != F_DONE && fibers[i].state != F_FREE)
            clients_left--;
    files_close(in);
    fibers_drop(in);
}

static void activate(inst *in)
{
    in->active = true;
    TRACE("%s starts", in->name);
}

/* ---- clients ---- */

/* Only an acquire asks the store; what a holder that is there already does is told by the guest. */
static void call_begins(bool acquires)
{
    me->call_start = acquires ? now : 0;
    me->created = -1;
}

static void used(int id)
{
    me->in->last_use[id] = now;
}

static pdk_box *acquire(int id, const char *holder, bool no_holder, pdk_error *err)
{
    char thread[2] = { (char)('a' + id), '\0' };
    pdk_box *box = NULL;
    PDK_AUTO_PACK req = PDK_NO_PACK;
    char user = !P.healed && !P.remote && chance(1, 30) ? 'v' : 'u'; /* identity.lua gives both the same ids: they must not meet */
    pdk_acquire_spec spec = {
        .user = &user, .user_len = 1, .thread = thread, .thread_len = 1, .holder = holder, .no_holder = no_holder
    };
    if (P.modes > 1) {
        pdk_mark m = pdk_begin_map(&req);
        pdk_put_cstr(&req, "require");
        m.count++;
        pdk_mark r = pdk_begin_map(&req);
        pdk_kv_int(&req, &r, "mode", chance(1, 10) ? 8 + below(2) : below((uint32_t)P.modes) + 1);
        pdk_end(&req, &r);
        pdk_end(&req, &m);
        spec.requirements = pdk_view_of(&req);
    }
    if (chance(1, 6))
        spec.timeout = 0.2 + below(80) / 10.0;
    TRACE("acquire %s for %c", thread, user);
    call_begins(true);
    box = act_acquire(&spec, id, user, err);
    if (box == NULL) {
        TRACE("acquire %s: %s %s (%s)", thread, pdk_error_kind_name(err->kind), err->reason, err->message);
        if (me->created >= 0 && W.gens[me->created].present && !pod_ends(me->created))
            violation("%s leaves g%d, which its failed acquire has made", me->in->name, me->created);
        return NULL;
    }
    Z->acquired++;
    if (strcmp(pdk_box_id(box), thread) != 0)
        violation("%s gets %s for %s", me->name, pdk_box_id(box), thread);
    int g = generation_number(pdk_box_generation(box));
    if (W.gens[g].user != user)
        violation("%c is given g%d, which was made for %c", user, g, W.gens[g].user);
    TRACE("acquire %s: %s, %s, token %lld", thread, pdk_box_generation(box), pdk_box_source(box),
          (long long)pdk_box_token(box));
    return box;
}

static int run(pdk_box *box, const char *scope, pdk_error *err)
{
    pdk_exec_spec spec = { .command = "true", .command_len = 4, .scope = scope };
    pdk_result result;
    TRACE("exec in %s %s", pdk_box_id(box), pdk_box_generation(box));
    call_begins(false);
    int rc = act_exec(box, &spec, &result, err);
    if (rc < 0)
        TRACE("exec: %s (%s)", pdk_error_kind_name(err->kind), err->message);
    else
        TRACE("exec: %s %s", pdk_outcome_name(result.outcome), result.reason);
    int ok = rc == 0 && result.outcome == PDK_COMPLETED;
    if (rc == 0)
        pdk_result_free(&result);
    return ok;
}

static void let_go(pdk_box *box, int id)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    TRACE("release %s %s", pdk_box_id(box), pdk_box_generation(box));
    pdk_entry *e = peek(me->in, id);
    pdk_holder *h = e == NULL || box->holder == NULL ? NULL : pdk_pool_holder(&me->in->rt->pool, box->holder);
    if (h != NULL && h->entry == e && h->incarnation == box->incarnation)
        used(id);
    call_begins(false);
    act_release(box);
    pdk_release(box, &err);
    pdk_box_free(box);
}

static int destroy(int id, pdk_error *err)
{
    char name[2] = { (char)('a' + id), '\0' };
    pdk_entry *e = peek(me->in, id);
    int g = e == NULL || e->state == PDK_ABSENT || e->reserved != 0 ? -1 : generation_number(e->generation);
    TRACE("destroy %s", name);
    call_begins(false);
    int rc = act_destroy(name, err);
    TRACE("destroy %s: %d %s %s", name, rc, err->reason, err->message);
    if (rc == 1 && g >= 0 && W.gens[g].present)
        violation("%s says that %s is destroyed, but g%d runs", me->in->name, name, g);
    return rc;
}

static void client_acts(pdk_box **box, int *id)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char holder[8], name[2] = { (char)('a' + *id), '\0' };
    uint32_t dice = below(20);
    if (*box == NULL || dice >= 18) {
        int target = (int)below((uint32_t)P.ids);
        name[0] = (char)('a' + target);
        if (dice < 2) {
            destroy(target, &err);
        } else if (dice == 2) {
            call_begins(false);
            TRACE("park %s", name);
            pdk_runtime_park(me->in->rt, name, &err);
        } else if (dice == 3) {
            pdk_box *look = NULL;
            call_begins(false);
            if (pdk_runtime_get(me->in->rt, name, NULL, &look, &err) == 0 && look != NULL) {
                run(look, NULL, &err);
                pdk_box_free(look);
            }
        } else if (dice == 4) {
            snprintf(holder, sizeof holder, "h%u", below(3));
            call_begins(false);
            TRACE("retain %s for %s", name, holder);
            pdk_runtime_retain(me->in->rt, name, holder, NULL, chance(1, 2), &err);
            wait_for((pdk_ns)below(3000) * MS);
            TRACE("release %s", holder);
            pdk_runtime_release(me->in->rt, holder, &err);
        } else if (*box == NULL) {
            snprintf(holder, sizeof holder, "h%u", below(3));
            *id = target;
            bool named = chance(1, 4);
            *box = acquire(target, named ? holder : NULL, !named && chance(1, 5), &err);
        }
        return;
    }
    if (dice < 8) {
        run(*box, chance(1, 3) ? "s" : NULL, &err);
    } else if (dice == 8) {
        destroy(*id, &err);
    } else if (dice == 9) { /* a second grip on the same */
        pdk_box *second = acquire(*id, NULL, chance(1, 3), &err);
        if (second != NULL) {
            run(second, NULL, &err);
            let_go(second, *id);
        }
    } else {
        let_go(*box, *id);
        *box = NULL;
    }
}

static void *client_main(void *arg)
{
    (void)arg;
    pdk_box *box = NULL;
    int id = 0;
    wait_for((pdk_ns)below(2000) * MS);
    for (int i = 0; i < P.ops && !P.healed; i++) {
        client_acts(&box, &id);
        if (chance(1, 3))
            wait_for((pdk_ns)below(chance(1, 5) ? 20000 : 1500) * MS);
        else
            point();
    }
    if (box != NULL)
        let_go(box, id);
    clients_left--;
    return NULL;
}

static void start_clients(inst *in)
{
    for (int c = 0; c < P.clients; c++) {
        char name[16];
        snprintf(name, sizeof name, "client%d", c);
        clients_left++;
        fiber_start(in, name, client_main, NULL);
    }
}

/* What their process runtimes do after it is up to the seed: so is whether the sandboxes have survived it, as containers may. */
void machine_crash(void)
{
    inst *mine = NULL, *next = NULL;
    int spare = 0;
    TRACE("the machine crashes");
    files_crash();
    bool survive = chance(1, 2);
    for (int g = 0; g < W.gen_count; g++)
        if (W.gens[g].present && !survive) {
            W.gens[g].present = false;
            W.gens[g].self_died = true;
        }
    for (int i = 0; i < MAX_INST; i++) {
        inst *in = &insts[i];
        if (!in->active)
            spare++, next = in;
        else if (me->in == in)
            mine = in;
        else if (!in->dead && !in->closed)
            crash(in, "with its machine");
    }
    if (spare > 1) { /* one is for the end */
        activate(next);
        start_clients(next);
    }
    if (mine != NULL)
        crash(mine, "with its machine");
}

static void *shutdown_main(void *arg)
{
    inst *in = me->in;
    wait_for((pdk_ns)(intptr_t)arg);
    for (int tries = 0; tries < 60; tries++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        TRACE("shutdown");
        in->closing = true;
        call_begins(false);
        if (act_shutdown(in->rt, &err) == 0) {
            for (int id = 0; id < P.ids; id++) {
                pdk_entry *e = peek(in, id);
                if (e != NULL && e->state != PDK_ABSENT)
                    violation("%s says that it is shut down, but it tracks %c", in->name, 'a' + id);
            }
            TRACE("shut down");
            in->closed = true;
            if (P.healed && chance(1, 16)) { /* clients have ended: it may go */
                TRACE("free");
                pdk_runtime_free(in->rt);
                in->rt = NULL;
            }
            break;
        }
        TRACE("shutdown: %s (%s)", pdk_error_kind_name(err.kind), err.message);
        wait_for(2 * SEC);
    }
    clients_left--;
    return NULL;
}

/* ---- trouble ---- */

static void one_deed(void)
{
    int g = W.gen_count == 0 ? -1 : (int)below((uint32_t)W.gen_count);
    switch (below(P.files ? 10 : 8)) {
    case 0:
        if (g >= 0 && P.remote && chance(1, 2)) {
            pods_trouble(g);
        } else if (g >= 0 && W.gens[g].present) {
            TRACE("g%d dies", g);
            W.gens[g].present = false;
            W.gens[g].self_died = true;
        }
        break;
    case 1:
        if (g >= 0 && W.gens[g].present && P.unique) {
            W.gens[g].healthy = !W.gens[g].healthy;
            TRACE("g%d is %s", g, W.gens[g].healthy ? "well again" : "unwell");
        }
        break;
    case 2: {
        inst *in = &insts[below((uint32_t)P.insts)];
        pdk_ns d = ((pdk_ns)below(7200) - 3600) * SEC;
        TRACE("the wall clock of %s is set by %.0f s", in->name, (double)d / 1e9);
        in->wall_off += d;
        break;
    }
    case 3:
        if (chance(1, 3)) {
            TRACE("the store loses its state");
            W.wiped = now;
            for (int id = 0; id < MAX_IDS; id++)
                W.leases[id] = (lease){ .last_owner = -1 };
            W.last_token = 0;
        }
        break;
    case 4: {
        inst *in = &insts[below((uint32_t)P.insts)];
        if (P.crashes > 0 && in->active && !in->dead && !in->closed) {
            P.crashes--;
            TRACE("crash of %s", in->name);
            crash(in, "by the plan");
        }
        break;
    }
    case 5: {
        inst *in = &insts[below((uint32_t)P.insts)];
        pdk_ns d = (pdk_ns)(1 + below(3 * TTL)) * SEC;
        if (!P.fenced || in->paused_until > now)
            break;
        in->suspended = false;
        in->paused_until = now + d;
        TRACE("%s is stopped for %.1f s", in->name, (double)d / 1e9);
        break;
    }
    case 8:
        if (P.crashes > 0) {
            P.crashes--;
            machine_crash();
        }
        break;
    default:
        if (g >= 0)
            W.gens[g].ready = true;
        break;
    }
}

/* ---- recovery: what must be possible once nothing goes wrong any longer ---- */

static void *probe_main(void *arg)
{
    int id = (int)(intptr_t)arg;
    bool served = false;
    P.modes = 1;
    for (int i = 0; i < 60 && !served; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_box *box = acquire(id, NULL, false, &err);
        if (box != NULL) {
            served = run(box, NULL, &err) == 1;
            let_go(box, id);
        }
        if (!served)
            wait_for(TTL * SEC / 2);
    }
    if (!served)
        probes_failed++;
    clients_left--;
    return NULL;
}

static inst *survivor(void)
{
    for (int i = 0; i < MAX_INST; i++)
        if (insts[i].active && !insts[i].dead && !insts[i].closing)
            return &insts[i];
    for (int i = 0; i < MAX_INST; i++)
        if (!insts[i].active) {
            activate(&insts[i]);
            return &insts[i];
        }
    return NULL;
}

static void wait_for_clients(pdk_ns limit, const char *what)
{
    pdk_ns until = now + limit;
    while (clients_left > 0 && now < until)
        wait_for(500 * MS);
    if (clients_left > 0)
        violation("%d %s do not end within %lld s", clients_left, what, (long long)(limit / SEC));
}

static void heal(void)
{
    TRACE("---- from here on nothing goes wrong");
    P.healed = true;
    for (int i = 0; i < MAX_INST; i++)
        if (insts[i].paused_until > now) {
            if (insts[i].suspended)
                insts[i].mono_off += insts[i].paused_until - now;
            insts[i].paused_until = now;
        }
    pods_heal();
    for (int g = 0; g < W.gen_count; g++) {
        W.gens[g].healthy = W.gens[g].ready = true;
        W.gens[g].sticky = false;
    }
}

static bool anything_runs(void)
{
    for (int g = 0; g < W.gen_count; g++)
        if (W.gens[g].present)
            return true;
    return W.late_count > 0;
}

static void *canceller(void *arg)
{
    (void)arg;
    while (!P.healed) {
        wait_for((pdk_ns)below(chance(1, 2) ? 300 : 3000) * MS);
        act_cancel_any();
    }
    return NULL;
}

static void *director(void *arg)
{
    (void)arg;
    if (P.cancel_rate != 0)
        fiber_start(NULL, "stranger", canceller, NULL); /* not one of the clients, which are told by their c */
    for (int i = 0; i < P.nemesis && clients_left > 0; i++) {
        wait_for((pdk_ns)below(6000) * MS);
        one_deed();
    }
    for (int i = 0; clients_left > 0 && i < 200; i++)
        wait_for(SEC);
    heal();
    wait_for_clients(600 * SEC, "clients");
    inst *in = survivor();
    if (in == NULL)
        violation("no instance is left, the plan must leave one");
    for (int id = 0; id < P.ids; id++) {
        clients_left++;
        fiber_start(in, "c-probe", probe_main, (void *)(intptr_t)id);
    }
    wait_for_clients(60 * TTL * SEC, "acquires");
    if (probes_failed > 0)
        violation("%d of %d identities cannot be served although nothing goes wrong any longer", probes_failed, P.ids);
    for (pdk_ns until = now + REAPED * SEC; anything_runs() && now < until;)
        wait_for(SEC);
    acts_check_end();
    for (int g = 0; g < W.gen_count; g++)
        if (W.gens[g].present)
            TRACE("g%d runs, before the last shutdown", g);
    for (int g = 0; g < W.gen_count && P.idle_timeout > 0; g++)
        if (W.gens[g].present)
            violation("g%d of %c is left: neither reaped nor reconciled in %d s", g, 'a' + W.gens[g].id, REAPED);
    for (int i = 0; i < MAX_INST; i++)
        if (insts[i].active && !insts[i].dead && !insts[i].closing) {
            clients_left++;
            fiber_start(&insts[i], "c-end", shutdown_main, NULL);
        }
    wait_for_clients(600 * SEC, "shutdowns");
    for (int i = 0; i < MAX_INST; i++)
        if (insts[i].active && !insts[i].dead && !insts[i].closed)
            violation("%s cannot be shut down", insts[i].name);
    check_end();
    scenario_over = true;
    return NULL;
}

/* ---- the plan ---- */

static void choose_plan(void)
{
    static const uint32_t rates[] = { 0, 0, 60, 25, 10 };
    P = (plan){ .insts = chance(1, 4)   ? 1
                         : chance(2, 3) ? 2
                                        : 3,
                .ids = chance(3, 5)   ? 1
                       : chance(2, 3) ? 2
                                      : 3,
                .clients = 1 + (int)below(3),
                .ops = 2 + (int)below(7),
                .shared_turns = chance(1, 2),
                .unique = chance(2, 3),
                .other_info = chance(1, 3),
                .fenced = true,
                .regrant = chance(1, 2),
                .spurious = chance(1, 2),
                .switch_mode = (int)below(5),
                .fault_rate = rates[below(5)],
                .focus = chance(1, 4) ? (int)below(OP_KINDS) : OP_KINDS,
                .slow_rate = chance(1, 3) ? 30 : 0,
                .crash_rate = chance(1, 3) ? 60 : 0,
                .crashes = chance(1, 2) ? 1 + (int)below(2) : 0,
                .pause_rate = chance(1, 3) ? 300 : 0,
                .stall_rate = chance(1, 4) ? 200 : 0,
                .idle_timeout = 2 + below(14),
                .modes = chance(1, 5) ? 2 : 1,
                .shutdown_of = -1,
                .nemesis = chance(1, 2) ? (int)below(6) : 0 };
    P.unique |= !P.shared_turns; /* runtimes that share no turns share an engine in which a name stands for one thing */
    P.remote = chance(1, 6);
    if (P.remote) {
        P.unique = P.other_info = true;
        P.modes = 1;
    }
    if (P.remote || chance(1, 6)) { /* no guest enforces anything: then nobody may be held up for longer than the leases' margin */
        P.fenced = false;
        P.pause_rate = P.stall_rate = P.slow_rate = 0;
    }
    P.files = P.shared_turns && chance(1, 2);
    if (P.files && P.crashes == 0)
        P.crashes = (int)below(3);
    P.submits = chance(1, 2);
    P.cancel_rate = chance(1, 2) ? 1 + below(4) : 0;
    if (P.insts > 1 && chance(1, 6))
        P.shutdown_of = (int)below((uint32_t)P.insts);
}

void scenario_begin(uint64_t seed)
{
    seed_random(seed);
    choose_plan();
    now = 1000 * SEC;
    W = (world){ 0 };
    for (int id = 0; id < MAX_IDS; id++)
        W.leases[id].last_owner = -1;
    scenario_over = false;
    clients_left = probes_failed = 0;
    TRACE(
        "seed %llu: %d runtimes, %d ids, %d clients each, %d calls each; %s; idle limit %g s; faults 1/%u, focus %s",
        (unsigned long long)seed, P.insts, P.ids, P.clients, P.ops, P.remote ? "Pods" : P.unique ? "unique-name engine" : "many-generations engine",
        P.idle_timeout, P.fault_rate, P.focus == OP_KINDS ? "-" : op_names[P.focus]);
    for (int i = 0; i < MAX_INST; i++) {
        inst *in = &insts[i];
        /* the instances' clocks continue where they were opened */
        in->boot_off = (pdk_ns)below(100000) * SEC;
        in->mono_off = in->boot_off - (pdk_ns)below(1000) * SEC;
        in->wall_off = (pdk_ns)below(7200) * SEC;
        in->rt->fenced = P.fenced;
        in->rt->backend = P.remote ? in->remote : in->engine;
        in->rt->config.health_ttl = chance(1, 2) ? 0 : 2;
        in->rt->config.replicas = 1 + (int)below(3);
        in->rt->config.max_sandboxes = chance(1, 6) ? 2 : -1;
        in->rt->config.reap_interval = 2 + below(5);
        in->rt->config.idle_timeout = P.idle_timeout;
        for (int f = 0; f < MAX_FIBERS; f++)
            if (fibers[f].in == in)
                fibers[f].priority = (uint32_t)rnd();
    }
    for (int i = 0; i < P.insts; i++) {
        activate(&insts[i]);
        start_clients(&insts[i]);
        if (P.shutdown_of == i) {
            clients_left++;
            fiber_start(&insts[i], "c-end", shutdown_main, (void *)(intptr_t)(below(20000) * MS));
        }
    }
    fiber_start(NULL, "director", director, NULL);
}
