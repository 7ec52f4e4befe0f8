/* runtime.c -- a runtime's life: open, calls in flight, tick, reload, reset, shutdown; and events.
 *
 * Locks: `lock` guards the life (closing, calls in flight, threads, sinks). It is held for moments, never together with the
 * registry, never across I/O or Lua.
 */
#include "core.h"
#include "http.h"
#include "op.h"
#include "proc.h"
#include "signals.h"

#include <fcntl.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- small things ---- */

pdk_limit pdk_limit_for(const pdk_limit *outer, double timeout)
{
    pdk_limit l = *outer;
    if (timeout > 0) {
        pdk_ns own = pdk_after(pdk_now_monotonic(), pdk_seconds(timeout));
        if (own < l.deadline)
            l.deadline = own;
    }
    return l;
}

pdk_ns pdk_lease_now(pdk_runtime *rt)
{
    return pdk_clock_is_manual(rt->clock) ? pdk_clock_now(rt->clock) : pdk_now_boottime();
}

static int enter(pdk_runtime *rt, bool only_looks, pdk_error *err)
{
    if (rt->pid != pdk_process_id())
        return pdk_fail(err, PDK_E_CLOSED, 0, "this runtime belongs to the process that forked this one");
    PDK_GUARD(rt->lock);
    if (only_looks ? rt->closed : atomic_load(&rt->closing))
        return pdk_fail(err, PDK_E_CLOSED, 0, "the runtime is closed");
    rt->calls++;
    return 0;
}

int pdk_call_enter(pdk_runtime *rt, pdk_error *err)
{
    return enter(rt, false, err);
}

int pdk_look_enter(pdk_runtime *rt, pdk_error *err)
{
    return enter(rt, true, err);
}

void pdk_call_leave(pdk_runtime *rt)
{
    PDK_GUARD(rt->lock);
    if (--rt->calls == 0 && atomic_load(&rt->closing))
        pdk_cond_broadcast(&rt->wake);
}

static void emit(pdk_runtime *rt, pdk_log_level level, const char *event, const char *id, const char *generation,
                 const char *reason, const pdk_error *why, const double *seconds)
{
    const char *message = why != NULL && why->kind != PDK_OK ? why->message : NULL;
    const char *kind = message != NULL ? pdk_error_kind_name(why->kind) : NULL;
    const pdk_field fields[] = { PDK_STR("sandbox_id", id), PDK_STR("generation", generation), PDK_STR("reason", reason),
                                 PDK_STR("error", kind), PDK_STR("message", message),
                                 PDK_NUM("seconds", seconds != NULL ? *seconds : 0) };
    pdk_log_write(rt->log, level, event, fields, sizeof fields / sizeof *fields - (seconds == NULL ? 1 : 0));
    pdk_sink sinks[8];
    size_t n;
    {
        PDK_GUARD(rt->lock);
        n = rt->sink_count;
        memcpy(sinks, rt->sinks, sizeof sinks);
    }
    if (n == 0)
        return;
    PDK_AUTO_PACK record = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&record);
    pdk_kv_cstr(&record, &m, "event", event);
    pdk_kv_cstr(&record, &m, "sandbox_id", id);
    pdk_kv_cstr(&record, &m, "generation", generation);
    pdk_kv_cstr(&record, &m, "reason", reason);
    pdk_kv_cstr(&record, &m, "error", kind);
    pdk_kv_cstr(&record, &m, "message", message);
    if (seconds != NULL)
        pdk_kv_num(&record, &m, "seconds", *seconds);
    pdk_kv_num(&record, &m, "at", pdk_to_seconds(pdk_clock_now(rt->clock)));
    pdk_end(&record, &m);
    for (size_t i = 0; i < n && !record.failed; i++)
        sinks[i].fn(sinks[i].ctx, &record);
}

void pdk_emit(pdk_runtime *rt, pdk_log_level level, const char *event, const char *id, const char *generation,
              const char *reason, const pdk_error *why)
{
    emit(rt, level, event, id, generation, reason, why, NULL);
}

void pdk_emit_seconds(pdk_runtime *rt, pdk_log_level level, const char *event, const char *reason, double seconds)
{
    emit(rt, level, event, NULL, NULL, reason, NULL, &seconds);
}

int pdk_runtime_on(pdk_runtime *rt, pdk_event_sink sink, void *ctx, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    PDK_GUARD(rt->lock);
    if (rt->sink_count == sizeof rt->sinks / sizeof *rt->sinks)
        return pdk_fail(err, PDK_E_UNSUPPORTED, 0, "a runtime takes at most %zu event sinks", rt->sink_count);
    rt->sinks[rt->sink_count++] = (pdk_sink){ sink, ctx };
    return 0;
}

/* ---- the backend ---- */

typedef struct load { /* argument of load_backend */
    pdk_runtime *rt;
    const char *name;
    pdk_iface *out;
} load;

/* Where sources may lie, for a backend's own check when it opens them: the roots, and what the operator mounts anyway. */
static void put_roots(pdk_view options, pdk_pack *p, pdk_mark *m)
{
    pdk_view roots = pdk_view_get(options, "mount_roots"), mounts = pdk_view_get(options, "mounts"), k, v;
    if (pdk_view_count(roots) == 0) /* then policies mount nothing */
        return;
    pdk_put_cstr(p, "mount_roots");
    m->count++;
    pdk_mark list = pdk_begin_list(p);
    for (size_t cursor = 0; pdk_view_next(roots, &cursor, &k, &v); list.count++)
        pdk_put_view(p, v);
    for (size_t cursor = 0; pdk_view_next(mounts, &cursor, &k, &v); list.count++)
        pdk_put_view(p, pdk_view_get(v, "source"));
    pdk_end(p, &list);
}

static void push_runtime_facts(lua_State *L, pdk_runtime *rt)
{
    PDK_AUTO_PACK p = PDK_NO_PACK;
    pdk_view o = pdk_view_of(&rt->config.options);
    static const char *const copied[] = { "state_dir", "data_dir", "orphan_ttl", "stop_timeout", "ready_timeout", "ready_interval",
                                          "discover_timeout", "command_timeout", "limits", "image" };
    pdk_mark m = pdk_begin_map(&p);
    for (size_t i = 0; i < sizeof copied / sizeof *copied; i++)
        pdk_kv_view(&p, &m, copied[i], pdk_view_get(o, copied[i]));
    put_roots(o, &p, &m);
    pdk_kv_cstr(&p, &m, "scope", rt->config.scope);
    pdk_kv_view(&p, &m, "ownership_url", pdk_view_get(pdk_view_get(o, "ownership"), "url"));
    pdk_kv_view(&p, &m, "ownership_ttl", pdk_view_get(pdk_view_get(o, "ownership"), "ttl"));
    pdk_kv_cstr(&p, &m, "runtime_id", rt->id);
    pdk_kv_int(&p, &m, "pid", pdk_process_id());
    pdk_kv_cstr(&p, &m, "guest_path", getenv("PADDOCK_GUEST"));
    pdk_end(&p, &m);
    pdk_view_to_lua(L, pdk_view_of(&p)); /* raises on lack of memory only; then the small pack is lost with the process */
}

/* Runs in the universe: a built-in backend's name, or the path of a file; answers a backend table, or { new = }. */
static int load_backend(lua_State *L, void *arg)
{
    load *l = arg;
    bool file = strchr(l->name, '/') != NULL || (strlen(l->name) > 4 && strcmp(l->name + strlen(l->name) - 4, ".lua") == 0);
    if (file) {
        if (luaL_loadfilex(L, l->name, "t") != LUA_OK)
            return lua_error(L);
        lua_call(L, 0, 1);
    } else {
        lua_getglobal(L, "require");
        lua_pushfstring(L, "paddock.backend.%s", l->name);
        lua_call(L, 1, 1);
    }
    if (!lua_istable(L, -1))
        return luaL_error(L, "backend %s must return a table", l->name);
    lua_getfield(L, -1, "new");
    if (lua_isfunction(L, -1)) {
        pdk_view_to_lua(L, pdk_view_get(pdk_view_of(&l->rt->config.options), "backend_options"));
        if (lua_isnil(L, -1)) {
            lua_pop(L, 1);
            lua_newtable(L);
        }
        push_runtime_facts(L, l->rt);
        lua_call(L, 2, 1);
        if (!lua_istable(L, -1))
            return luaL_error(L, "backend %s: new must return a table", l->name);
    } else {
        lua_pop(L, 1);
    }
    lua_pushvalue(L, -1);
    l->out = pdk_iface_of_script(L, l->rt->script, "backend");
    if (l->out == NULL)
        return luaL_error(L, "no memory for backend %s", l->name);
    return 0;
}

static int check_backend(pdk_runtime *rt, pdk_error *err)
{
    static const char *const needed[] = { "create", "destroy", "inspect", "discover", "alive", "ready", "connect" };
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!pdk_iface_has(rt->backend, needed[i]))
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "backend: the table has no function %s", needed[i]);
    const char *name = pdk_view_str(pdk_iface_field(rt->backend, "name"), NULL);
    snprintf(rt->backend_name, sizeof rt->backend_name, "%s", name != NULL ? name : "custom");
    rt->fenced = pdk_view_bool(pdk_view_get(pdk_iface_field(rt->backend, "capabilities"), "fenced"), false);
    rt->stops_at_once = pdk_view_bool(pdk_view_get(pdk_iface_field(rt->backend, "capabilities"), "stops_at_once"), false);
    return 0;
}

static int open_backend(pdk_runtime *rt, pdk_error *err)
{
    if (rt->backend == NULL) { /* in the universe; a Lua host's thread must not be kept waiting by a `watch` */
        const char *name = pdk_info_str(pdk_view_of(&rt->config.options), "backend");
        load l = { rt, name != NULL ? name : "process", NULL };
        if (pdk_script_enter(rt->script, load_backend, &l, err) < 0)
            return pdk_error_wrap(err, "backend %s cannot be used", l.name);
        rt->backend = l.out;
        rt->watches = rt->config.threads && pdk_iface_has(rt->backend, "watch");
    }
    return check_backend(rt, err);
}

/* ---- open ---- */

static atomic_int open_runtimes; /* of this process: the last one to go closes the idle connections */

static pdk_clock_type clock_type(pdk_view options)
{
    const char *name = pdk_info_str(options, "clock");
    if (name != NULL && strcmp(name, "boottime") == 0)
        return PDK_CLOCK_BOOTTIME;
    return name != NULL && strcmp(name, "manual") == 0 ? PDK_CLOCK_MANUAL : PDK_CLOCK_MONOTONIC;
}

/* How grave a line on stderr must be; lua/paddock/config.lua has seen to it that `log` is one of these. */
static pdk_log_level least_level(pdk_view options)
{
    static const char *const names[] = { [PDK_DEBUG] = "debug", [PDK_INFO] = "info", [PDK_WARN] = "warn", [PDK_ERROR] = "error", "off" };
    const char *name = pdk_info_str(options, "log");
    size_t level = PDK_DEBUG;
    while (name != NULL && level <= PDK_ERROR && strcmp(name, names[level]) != 0)
        level++;
    return name == NULL ? PDK_INFO : (pdk_log_level)level;
}

static pdk_lease *open_lease(pdk_runtime *rt, pdk_error *err)
{
    pdk_view options = pdk_view_get(pdk_view_of(&rt->config.options), "ownership");
    const char *type = pdk_info_str(options, "type");
    char scope[320];
    if (type != NULL && strcmp(type, "redis") == 0)
        return pdk_store_scope_of_machine(rt, scope, sizeof scope, err) < 0
                   ? NULL
                   : pdk_lease_redis(pdk_info_str(options, "url"), scope, rt->id, rt->config.ttl, err);
    if (rt->config.state_dir == NULL || (type != NULL && strcmp(type, "memory") == 0))
        return pdk_lease_memory(rt->id, rt->config.ttl, rt->clock, err);
    return pdk_lease_file(rt->config.state_dir, pdk_store_scope(rt), rt->id, rt->config.ttl, rt->clock, err);
}

static pdk_journal *open_journal(pdk_runtime *rt, pdk_error *err)
{
    pdk_view ownership = pdk_view_get(pdk_view_of(&rt->config.options), "ownership");
    char scope[320];
    pdk_journal *local = pdk_journal_file(rt->config.state_dir, pdk_store_scope(rt), err);
    if (local == NULL || strcmp(pdk_lease_type(rt->lease), "redis") != 0)
        return local;
    if (pdk_store_scope_of_machine(rt, scope, sizeof scope, err) == 0)
        return pdk_journal_mirror(local, pdk_info_str(ownership, "url"), scope, err);
    pdk_journal_free(local);
    return NULL;
}

/* The stores that are tables: ours from here on, also when something fails. */
static int adopt_stores(pdk_runtime *rt, const pdk_open_spec *spec, pdk_error *err)
{
    if (spec->ownership != NULL)
        rt->lease = pdk_lease_table(spec->ownership, rt->id, rt->config.ttl, err);
    if (spec->journal != NULL)
        rt->journal = pdk_journal_table(spec->journal, err);
    bool adopted = (spec->ownership == NULL || rt->lease != NULL) && (spec->journal == NULL || rt->journal != NULL);
    return adopted ? 0 : -1;
}

/* After the backend: it says which engine this is, and by that the stores tell sandboxes of one id apart. */
static int open_stores(pdk_runtime *rt, const pdk_open_spec *spec, pdk_error *err)
{
    const char *journal = pdk_info_str(pdk_view_of(&rt->config.options), "journal");
    bool memory = rt->config.state_dir == NULL || (journal != NULL && strcmp(journal, "memory") == 0);
    if (spec->ownership == NULL)
        rt->lease = open_lease(rt, err);
    if (spec->journal == NULL && rt->lease != NULL)
        rt->journal = memory ? pdk_journal_memory(err) : open_journal(rt, err);
    if (rt->lease == NULL || rt->journal == NULL)
        return -1;
    if (strcmp(pdk_lease_type(rt->lease), "memory") == 0 && pdk_state_dir_shared(rt))
        pdk_emit(rt, PDK_WARN, "ownership_in_memory", NULL, NULL, "another runtime uses this state directory, and leases in memory "
                 "do not keep the two apart: give both ownership = { type = \"file\" }", NULL);
    return 0;
}

static int open_parts(pdk_runtime *rt, const pdk_open_spec *spec, pdk_error *err)
{
    if (adopt_stores(rt, spec, err) < 0 || pdk_state_dir_make(rt, err) < 0)
        return -1;
    pdk_view o = pdk_view_of(&rt->config.options);
    char path[4200];
    if ((rt->ops = pdk_ops_new(rt, rt->config.threads ? (int)rt->config.workers : 0, err)) == NULL)
        return -1;
    snprintf(path, sizeof path, "%s/turns", rt->config.state_dir != NULL ? rt->config.state_dir : "");
    rt->serial = pdk_serial_new(rt->config.state_dir != NULL ? path : NULL, rt->config.threads, err);
    if (rt->serial == NULL)
        return -1;
    rt->policies = pdk_policies_new(rt->script, rt->clock, rt->log, pdk_view_get(o, "policies"), pdk_view_get(o, "policy_config"), err);
    if (rt->policies == NULL || open_backend(rt, err) < 0 || open_stores(rt, spec, err) < 0)
        return -1;
    pdk_state_dir_sweep(rt); /* what a dead runtime's leases still stand for depends on the backend */
    rt->next_renew = pdk_after(pdk_clock_now(rt->clock), pdk_seconds(rt->config.renew_interval));
    pdk_upkeep_init(rt);
    if (pdk_view_bool(pdk_view_get(o, "signals"), false) && pdk_signals_add(rt, rt->config.threads, err) < 0)
        return -1;
    return rt->config.threads ? pdk_threads_start(rt, err) : 0;
}

static pdk_runtime *runtime_new(const pdk_open_spec *spec)
{
    pdk_runtime *rt = calloc(1, sizeof *rt);
    unsigned char raw[12];
    if (rt == NULL)
        return NULL;
    atomic_fetch_add(&open_runtimes, 1);
    rt->record_fd = -1;
    rt->pid = pdk_process_id();
    rt->script = pdk_script_retain(spec->script);
    pdk_mutex_init(&rt->lock);
    pdk_cond_init(&rt->wake);
    pdk_pool_init(&rt->pool);
    pdk_probes_init(&rt->probes);
    pdk_random(raw, sizeof raw);
    for (size_t i = 0; i < sizeof raw; i++)
        snprintf(rt->id + 2 * i, 3, "%02x", raw[i]);
    return rt;
}

pdk_runtime *pdk_runtime_open(const pdk_open_spec *spec, pdk_error *err)
{
    pdk_runtime *rt = runtime_new(spec);
    if (rt == NULL) {
        pdk_iface_free(spec->backend);
        pdk_iface_free(spec->ownership);
        pdk_iface_free(spec->journal);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a runtime");
        return NULL;
    }
    rt->backend = spec->backend;
    int rc = pdk_config_read(&rt->config, spec->options, &rt->policy_base, err);
    if (rc == 0) {
        rt->clock = pdk_clock_new(clock_type(pdk_view_of(&rt->config.options)), rt->config.threads);
        pdk_log_level least = spec->log_sink != NULL ? PDK_INFO : least_level(pdk_view_of(&rt->config.options));
        rt->log = rt->clock == NULL ? NULL : pdk_log_new(rt->clock, rt->config.threads, least, spec->log_sink, spec->log_ctx);
        if (rt->clock == NULL || rt->log == NULL)
            rc = pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a runtime");
    }
    if (rc < 0) {
        pdk_iface_free(spec->ownership);
        pdk_iface_free(spec->journal);
    } else {
        rc = open_parts(rt, spec, err);
    }
    if (rc == 0)
        return rt;
    pdk_runtime_free(rt);
    return NULL;
}

/* ---- end ---- */

/* Lets go of everything in the registry without stopping anything: clients closed, leases released. */
static void let_go(pdk_runtime *rt)
{
    for (;;) {
        pdk_client *client = NULL;
        char id[64] = "";
        bool release = true;
        {
            PDK_GUARD(rt->pool.registry);
            for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
                pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
                if (e->state == PDK_ABSENT)
                    continue;
                pdk_entry_id(e, id);
                client = e->client;
                e->client = NULL;
                release = !e->keep_del; /* nothing else fences that one: its lease runs out by itself */
                pdk_entry_move(&rt->pool, e, PDK_ABSENT);
                pdk_entry_sweep(&rt->pool, e);
                break;
            }
        }
        if (id[0] == '\0')
            return;
        pdk_client_close(rt, client, id, "reset");
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (release && rt->lease != NULL && pdk_lease_release(rt->lease, id, &err) < 0)
            pdk_emit(rt, PDK_WARN, "lease_release_failed", id, NULL, "reset", &err);
    }
}

/* One end at a time. 1 = done before, 0 = go on, -1 = error. */
static int end_begin(pdk_runtime *rt, pdk_error *err)
{
    if (rt->pid != pdk_process_id())
        return pdk_fail(err, PDK_E_CLOSED, 0, "this runtime belongs to the process that forked this one");
    {
        PDK_GUARD(rt->lock);
        while (rt->shutting)
            pdk_cond_wait(&rt->wake, &rt->lock);
        if (rt->closed)
            return 1;
        rt->shutting = true;
        atomic_store(&rt->closing, true);
    }
    if (rt->serial != NULL)
        pdk_serial_close(rt->serial);
    pdk_acquire_unwanted(rt, NULL);
    pdk_ops_close(rt->ops);
    return 0;
}

/* `closed`: it is done, and what is open outside the memory goes. */
static void end_leave(pdk_runtime *rt, bool closed)
{
    if (closed) {
        pdk_state_dir_leave(rt);
        if (rt->serial != NULL)
            pdk_serial_close_file(rt->serial);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        if (rt->backend != NULL && pdk_engine_close(rt, &err) < 0)
            pdk_emit(rt, PDK_WARN, "backend_close_failed", NULL, NULL, NULL, &err);
    }
    PDK_GUARD(rt->lock);
    rt->shutting = false;
    rt->closed |= closed;
    pdk_cond_broadcast(&rt->wake);
}

/* Until no call is in flight, at most for `seconds`; true when none is. */
static bool drain(pdk_runtime *rt, double seconds)
{
    pdk_ns deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(seconds));
    PDK_GUARD(rt->lock);
    while (rt->calls > 0 && pdk_cond_wait_until(&rt->wake, &rt->lock, deadline))
        ;
    return rt->calls == 0;
}

/* Tells the ownership store; once. */
static void close_stores(pdk_runtime *rt)
{
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    if (!rt->lease_closed && pdk_lease_close(rt->lease, &why) < 0)
        pdk_emit(rt, PDK_WARN, "store_close_failed", NULL, NULL, NULL, &why);
    rt->lease_closed = true;
    pdk_journal_close(rt->journal);
}

int pdk_runtime_reset(pdk_runtime *rt, pdk_error *err)
{
    int rc = end_begin(rt, err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    rc = pdk_threads_stop(rt, err);
    if (rc == 0 && !drain(rt, 5))
        rc = pdk_fail(err, PDK_E_TIMEOUT, 0, "calls are still in flight after 5 s; reset again when they have ended");
    if (rc == 0) {
        let_go(rt);
        close_stores(rt);
    }
    end_leave(rt, rc == 0);
    return rc;
}

int pdk_runtime_shutdown(pdk_runtime *rt, pdk_error *err)
{
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    int rc = end_begin(rt, err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    rc = pdk_threads_stop(rt, &own);
    if (rc == 0) {
        size_t left = pdk_stop_all(rt, false, &own); /* commands in flight end with their sandboxes */
        if (left == 0 && !drain(rt, rt->config.stop_timeout))
            rc = pdk_fail(&own, PDK_E_BACKEND_ERROR, 0, "calls are still in flight; shut down again when they have ended");
        else if (left == 0)
            left = pdk_stop_all(rt, true, &own); /* what a call in flight has left */
        if (left > 0)
            rc = pdk_error_become(&own, PDK_E_BACKEND_ERROR, NULL, "%zu sandbox%s could not be stopped; shut down again", left,
                                  left == 1 ? "" : "es");
    }
    if (rc == 0 && !rt->lease_closed) {
        close_stores(rt);
        pdk_emit(rt, PDK_INFO, "shut_down", NULL, NULL, NULL, NULL);
    }
    if (rc < 0) {
        snprintf(own.stage, sizeof own.stage, "shutdown");
        pdk_emit(rt, PDK_ERROR, "shutdown_failed", NULL, NULL, NULL, &own);
        pdk_error_move(err, &own);
    }
    end_leave(rt, rc == 0);
    return rc;
}

void pdk_runtime_left(pdk_runtime *rt, char *text, size_t size)
{
    size_t n = 0, at = 0;
    char ids[160] = "";
    {
        PDK_GUARD(rt->pool.registry);
        for (pdk_node *node = pdk_map_each(&rt->pool.ids, NULL); node != NULL; node = pdk_map_each(&rt->pool.ids, node)) {
            pdk_entry *e = PDK_OF(node, pdk_entry, by_id);
            if (e->state == PDK_ABSENT && e->reserved == 0)
                continue;
            if (at < sizeof ids - 70)
                at += (size_t)snprintf(ids + at, sizeof ids - at, "%s%s", n > 0 ? ", " : "", e->id);
            n++;
        }
    }
    PDK_GUARD(rt->lock);
    snprintf(text, size, "%zu sandbox%s%s%s%s, %d call%s in flight%s%s", n, n == 1 ? "" : "es", n > 0 ? " (" : "", ids, n > 0 ? ")" : "",
             rt->calls, rt->calls == 1 ? "" : "s", rt->reaper_runs ? ", the idle checker" : "", rt->renewer_runs ? ", the lease renewal" : "");
}

void pdk_runtime_free(pdk_runtime *rt)
{
    if (rt == NULL)
        return;
    if (rt->pid != pdk_process_id()) { /* in a forked child only descriptors are ours to close; the memory goes with the process */
        if (rt->record_fd >= 0)
            close(rt->record_fd);
        return;
    }
    pdk_signals_remove(rt);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    while (rt->lease != NULL && pdk_runtime_reset(rt, &err) < 0) /* a thread at work cannot be left behind with freed memory */
        pdk_emit(rt, PDK_WARN, "free_waits", NULL, NULL, NULL, &err);
    pdk_ops_end(rt->ops);
    pdk_state_dir_leave(rt);
    pdk_reconcile_forget(rt);
    pdk_pool_free(&rt->pool);
    pdk_probes_free(&rt->probes);
    pdk_iface_free(rt->backend);
    pdk_policies_free(rt->policies);
    pdk_lease_free(rt->lease);
    pdk_journal_free(rt->journal);
    pdk_serial_free(rt->serial);
    pdk_log_free(rt->log);
    pdk_clock_free(rt->clock);
    pdk_config_free(&rt->config);
    pdk_pack_free(&rt->policy_base);
    pdk_script_release(rt->script);
    if (atomic_fetch_sub(&open_runtimes, 1) == 1)
        pdk_http_close_idle();
    pdk_cond_destroy(&rt->wake);
    pdk_mutex_destroy(&rt->lock);
    free(rt);
}

/* ---- what a host calls now and then ---- */

static bool is_closed(pdk_runtime *rt)
{
    PDK_GUARD(rt->lock);
    return rt->closed;
}

int pdk_runtime_tick(pdk_runtime *rt, pdk_error *err)
{
    if (!rt->config.threads && rt->pid == pdk_process_id())
        pdk_signals_poll();
    if (!rt->config.threads && rt->pid == pdk_process_id()) { /* not as part of this call: a shutdown waits until there are none */
        bool was_open = !is_closed(rt);
        pdk_ops_run(rt->ops);
        if (was_open && is_closed(rt)) /* what it ran was a shutdown */
            return 0;
    }
    PDK_CALL(rt, err, -1);
    pdk_ns now = pdk_clock_now(rt->clock);
    bool renew, reconcile;
    {
        PDK_GUARD(rt->lock);
        renew = now >= rt->next_renew;
        reconcile = now >= rt->next_reap && rt->config.reap_interval > 0;
        if (renew)
            rt->next_renew = pdk_after(now, pdk_seconds(rt->config.renew_interval));
        if (reconcile)
            rt->next_reap = pdk_after(now, pdk_seconds(rt->config.reap_interval));
    }
    pdk_pass_begin(rt);
    int rc = renew ? pdk_renew(rt, err) : 0;
    if (rc == 0 && reconcile) {
        PDK_AUTO_ERROR why = PDK_NO_ERROR;
        if (pdk_reconcile(rt, &why) < 0)
            pdk_emit(rt, PDK_WARN, "reconcile_failed", NULL, NULL, NULL, &why);
    }
    if (rc == 0)
        rc = pdk_reap(rt, err);
    pdk_pass_end(rt);
    return rc;
}

int pdk_runtime_reconcile(pdk_runtime *rt, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    return pdk_reconcile(rt, err);
}

int pdk_runtime_reload(pdk_runtime *rt, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    if (pdk_policies_reload(rt->policies, err) < 0) {
        pdk_emit(rt, PDK_ERROR, "reload_failed", NULL, NULL, "the former policies stay in force", err);
        return -1;
    }
    {
        pdk_ns now = pdk_clock_now(rt->clock); /* the new set is asked about each of them at the next pass */
        PDK_GUARD(rt->pool.registry);
        for (pdk_node *n = pdk_map_each(&rt->pool.ids, NULL); n != NULL; n = pdk_map_each(&rt->pool.ids, n)) {
            pdk_entry *e = PDK_OF(n, pdk_entry, by_id);
            if (e->state != PDK_WARM && e->state != PDK_ACTIVE)
                continue;
            e->idle_limit = -1;
            pdk_pool_set_due(&rt->pool, e, now);
        }
    }
    pdk_emit(rt, PDK_INFO, "reloaded", NULL, NULL, NULL, NULL);
    return 0;
}

int pdk_runtime_advance(pdk_runtime *rt, double s, double wall_s, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    if (!pdk_clock_is_manual(rt->clock))
        return pdk_fail(err, PDK_E_UNSUPPORTED, 0, "advance needs the option clock = \"manual\"");
    if (!(s >= 0) || s > 1e9)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "advance takes a number of seconds, 0 or more");
    pdk_clock_advance(rt->clock, s, wall_s);
    return 0;
}

/* ---- destroy ---- */

int pdk_turn_for_teardown(pdk_runtime *rt, const char *id, pdk_turn *turn, char *why, pdk_error *err)
{
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    pdk_lease_owner owner;
    if (pdk_lease_owner_of(rt->lease, id, &owner, &own) == 1 && !owner.ours) { /* no answer: the claim will hear the same */
        strcpy(why, "peer");
        return 0;
    }
    pdk_error_clear(&own);
    const pdk_limit *outer = pdk_limit_current();
    pdk_limit limit = pdk_limit_for(outer, rt->config.stop_timeout);
    if (pdk_turn_enter_id(rt->serial, id, turn, &limit, &own) == 0)
        return 1;
    if (own.kind == PDK_E_TIMEOUT && pdk_now_monotonic() < outer->deadline) {
        strcpy(why, "busy");
        return 0;
    }
    pdk_error_move(err, &own);
    return -1;
}

/* Not tracked here: what the engine knows of the id, if anything. */
static pdk_teardown_result destroy_untracked(pdk_runtime *rt, const char *id, pdk_teardown *td, pdk_error *err)
{
    PDK_AUTO_PACK info = PDK_NO_PACK;
    PDK_AUTO_TURN turn = PDK_NO_TURN;
    pdk_acquire_unwanted(rt, id);
    int entered = pdk_turn_for_teardown(rt, id, &turn, td->why, err);
    if (entered <= 0)
        return entered < 0 ? PDK_TD_ERROR : PDK_TD_REFUSED;
    int there = pdk_engine_inspect(rt, id, PDK_NO_VIEW, &info, err);
    if (there <= 0)
        return there < 0 ? PDK_TD_ERROR : PDK_TD_DONE;
    td->info = pdk_view_of(&info);
    td->full = true;
    pdk_teardown_result r = pdk_fence_teardown(rt, td, err);
    td->info = PDK_NO_VIEW;
    return r;
}

int pdk_runtime_destroy(pdk_runtime *rt, const char *id, pdk_error *err)
{
    PDK_CALL(rt, err, -1);
    if (pdk_check_id(id, err) < 0)
        return -1;
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    pdk_teardown td = { .id = id, .reason = "destroy" };
    pdk_teardown_result r = pdk_fence_teardown(rt, &td, &own);
    if (r == PDK_TD_REFUSED && strcmp(td.why, "gone") == 0)
        r = destroy_untracked(rt, id, &td, &own);
    if (r == PDK_TD_ERROR && own.kind == PDK_E_REPLACEMENT_DEFERRED) /* another process holds it: the engine says so */
        r = PDK_TD_REFUSED;
    if (r == PDK_TD_ERROR) {
        pdk_error_set_id(&own, id);
        pdk_error_move(err, &own);
        return -1;
    }
    if (r == PDK_TD_DONE)
        return 1;
    if (err != NULL) {
        pdk_error_clear(err);
        snprintf(err->reason, sizeof err->reason, "%s", r == PDK_TD_REPLACED ? "replaced" : "deferred");
        snprintf(err->message, sizeof err->message, "%s", own.message[0] != '\0' ? own.message : td.why);
    }
    return 0;
}
