/* capi.c -- the public C interface (paddock.h), thin over runtime.h: it checks arguments, and it opens runtimes from a
 * configuration in Lua. What needs the inside of a box stands in box.c.
 *
 * A configuration may bring a log function. It lives in the universe, where logging threads may not wait; so lines go
 * through a queue, which a thread of its own empties (threads = true), or else every blocking call that has the runtime.
 * That, and the universe for JSON, is what an `opened` keeps per runtime; they stand on one list. */
#include "capi.h"
#include "events.h"
#include "open.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_NAME = 4096, MAX_HOLDER = 199, MAX_LOG_LINES = 4096 };

typedef struct opened {
    pdk_runtime *rt;     /* fixed */
    pdk_script *script;  /* fixed; a reference */
    pdk_events *lines;   /* fixed; NULL without a log function */
    int log;             /* fixed; the function's reference */
    bool has_thread;     /* fixed */
    pdk_thread thread;
    struct opened *next; /* list_lock */
} opened;

static pdk_mutex list_lock = { PTHREAD_MUTEX_INITIALIZER };
static opened *list;             /* list_lock */
static atomic_int undelivered;   /* how many on it have lines and no thread that hands them over */
static _Atomic(pid_t) list_of;   /* the process that the list is of: in a forked child the lock may be held by nobody */

PDK_API const char *pdk_version(void)
{
    return PDK_VERSION;
}

/* ---- a log function ------------------------------------------------------------------------------------- */

typedef struct log_line {
    int log;
    pdk_view record;
} log_line;

/* stack: raises what the function raises */
static int call_log(lua_State *L, void *arg)
{
    log_line *line = arg;
    pdk_script_push_ref(L, line->log);
    pdk_view_to_lua(L, line->record);
    lua_call(L, 1, 0);
    return 0;
}

static void hand_lines_over(opened *o)
{
    PDK_AUTO_PACK record = PDK_NO_PACK;
    pdk_record_type type;
    while (o->lines != NULL && pdk_events_take(o->lines, &record, &type)) {
        log_line line = { o->log, pdk_view_of(&record) };
        pdk_script_enter(o->script, call_log, &line, NULL); /* a failing log function has nowhere to be reported */
    }
}

static void *log_thread(void *arg)
{
    opened *o = arg;
    while (pdk_events_wait(o->lines, PDK_NEVER))
        hand_lines_over(o);
    return NULL;
}

static opened *opened_of(const pdk_runtime *rt)
{
    if (atomic_load(&list_of) != pdk_process_id())
        return NULL;
    PDK_GUARD(list_lock);
    opened *o = list;
    while (o != NULL && o->rt != rt)
        o = o->next;
    return o;
}

/* After a blocking call of a runtime without threads. */
static void deliver(const pdk_runtime *rt)
{
    if (atomic_load(&undelivered) == 0)
        return;
    opened *o = opened_of(rt);
    if (o != NULL && !o->has_thread)
        hand_lines_over(o);
}

/* ---- opening and ending --------------------------------------------------------------------------------- */

static void opened_free(opened *o)
{
    if (o == NULL)
        return;
    if (o->lines != NULL) {
        pdk_events_stop(o->lines);
        if (o->has_thread)
            pdk_thread_join(&o->thread);
        hand_lines_over(o);
        pdk_events_free(o->lines);
        pdk_script_drop_ref(o->script, o->log);
    }
    pdk_script_release(o->script);
    free(o);
}

/* Makes the queue for the log function of `c`, and its thread. */
static int take_log(opened *o, pdk_setup *c, bool threads, pdk_error *err)
{
    if (!c->has_log)
        return 0;
    o->lines = pdk_events_new(MAX_LOG_LINES);
    if (o->lines == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the log");
    o->log = c->log;
    c->has_log = false;
    if (!threads)
        return 0;
    int sys = pdk_thread_start(&o->thread, "pdk-log-lua", log_thread, o);
    if (sys != 0)
        return pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot start the thread that calls the log function");
    o->has_thread = true;
    return 0;
}

static void remember(opened *o)
{
    if (atomic_load(&list_of) != pdk_process_id() && atomic_load(&list_of) != 0) {
        pdk_mutex_init(&list_lock); /* a forked child, which has one thread, begins anew */
        list = NULL;
        atomic_store(&undelivered, 0);
    }
    atomic_store(&list_of, pdk_process_id());
    PDK_GUARD(list_lock);
    if (o->lines != NULL && !o->has_thread)
        atomic_fetch_add(&undelivered, 1);
    o->next = list;
    list = o;
}

static opened *forget(const pdk_runtime *rt)
{
    if (atomic_load(&list_of) != pdk_process_id())
        return NULL;
    PDK_GUARD(list_lock);
    for (opened **at = &list; *at != NULL; at = &(*at)->next)
        if ((*at)->rt == rt) {
            opened *o = *at;
            *at = o->next;
            if (o->lines != NULL && !o->has_thread)
                atomic_fetch_sub(&undelivered, 1);
            return o;
        }
    return NULL;
}

static int open_with(opened *o, pdk_setup *c, const char *text, const char *name, pdk_error *err)
{
    o->script = pdk_script_new(err);
    if (o->script == NULL || pdk_setup_read(o->script, text, name, c, err) < 0)
        return -1;
    if (take_log(o, c, pdk_view_bool(pdk_view_get(pdk_view_of(&c->options), "threads"), true), err) < 0)
        return -1;
    pdk_open_spec spec = { .script = o->script, .options = pdk_view_of(&c->options), .backend = c->backend,
                           .ownership = c->ownership, .journal = c->journal,
                           .log_sink = o->lines != NULL ? pdk_events_sink_log : NULL, .log_ctx = o->lines };
    c->backend = c->ownership = c->journal = NULL;
    o->rt = pdk_runtime_open(&spec, err);
    return o->rt != NULL ? 0 : -1;
}

static pdk_runtime *open_config(const char *text, const char *name, pdk_error *err)
{
    opened *o = calloc(1, sizeof *o);
    if (o == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for a runtime");
        return NULL;
    }
    pdk_setup c = { 0 };
    int rc = open_with(o, &c, text, name, err);
    if (o->script != NULL)
        pdk_setup_clear(o->script, &c);
    if (rc < 0) {
        if (o->script != NULL)
            opened_free(o);
        else
            free(o);
        return NULL;
    }
    remember(o);
    deliver(o->rt);
    return o->rt;
}

PDK_API pdk_runtime *pdk_open(const char *config_file, pdk_error *err)
{
    return open_config(NULL, config_file, err);
}

PDK_API pdk_runtime *pdk_open_text(const char *text, const char *name, pdk_error *err)
{
    if (text == NULL) {
        pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `text` is missing");
        return NULL;
    }
    return open_config(text, name != NULL ? name : "configuration", err);
}

int pdk_capi_missing(pdk_error *err, const char *name)
{
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` is missing", name);
}

PDK_API int pdk_shutdown(pdk_runtime *rt, pdk_error *err)
{
    if (rt == NULL)
        return pdk_capi_missing(err, "rt");
    int rc = pdk_runtime_shutdown(rt, err);
    deliver(rt);
    return rc;
}

PDK_API void pdk_free(pdk_runtime *rt)
{
    if (rt == NULL)
        return;
    opened *o = forget(rt); /* NULL in a forked child: what the parent's threads held stays as it is */
    pdk_runtime_free(rt);
    opened_free(o);
}

PDK_API int pdk_tick(pdk_runtime *rt, pdk_error *err)
{
    if (rt == NULL)
        return pdk_capi_missing(err, "rt");
    int rc = pdk_runtime_tick(rt, err);
    deliver(rt);
    return rc;
}

PDK_API int pdk_reload(pdk_runtime *rt, pdk_error *err)
{
    if (rt == NULL)
        return pdk_capi_missing(err, "rt");
    int rc = pdk_runtime_reload(rt, err);
    deliver(rt);
    return rc;
}

/* ---- sandboxes ------------------------------------------------------------------------------------------ */

static int check_bytes(const char *name, const char *s, size_t *len, pdk_error *err)
{
    if (s != NULL && *len == 0)
        *len = strnlen(s, MAX_NAME + 1);
    if (s != NULL && *len > MAX_NAME)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` must be at most %d bytes", name, MAX_NAME);
    return 0;
}

int pdk_capi_timeout(double timeout, pdk_error *err)
{
    if (!isfinite(timeout) || timeout < 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0,
                        "argument `timeout` must be positive and finite (0 = the default), not %g", timeout);
    return 0;
}

static int check_text(const char *name, const char *s, size_t most, pdk_error *err)
{
    if (s == NULL)
        return 0;
    size_t len = strnlen(s, most + 1);
    if (len == 0 || len > most)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `%s` must have from 1 to %zu bytes", name, most);
    return 0;
}

static int read_requirements(const pdk_runtime *rt, const char *json, pdk_pack *out, pdk_error *err)
{
    opened *o = opened_of(rt);
    if (o == NULL)
        return pdk_fail(err, PDK_E_UNSUPPORTED, 0, "requirements_json needs a runtime that pdk_open has made");
    return pdk_requirements_from_json(o->script, json, out, err);
}

int pdk_capi_request(pdk_runtime *rt, const pdk_request *req, pdk_acquire_spec *spec, pdk_error *err)
{
    if (rt == NULL || req == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : "req");
    *spec = (pdk_acquire_spec){ .user = req->user, .user_len = req->user_len, .thread = req->thread, .thread_len = req->thread_len,
                                .holder = req->no_holder ? NULL : req->holder, .no_holder = req->no_holder, .timeout = req->timeout };
    if (check_bytes("user", spec->user, &spec->user_len, err) < 0 ||
        check_bytes("thread", spec->thread, &spec->thread_len, err) < 0 ||
        check_text("holder", spec->holder, MAX_HOLDER, err) < 0 || pdk_capi_timeout(req->timeout, err) < 0)
        return -1;
    return 0;
}

PDK_API int pdk_acquire(pdk_runtime *rt, const pdk_request *req, pdk_box **out, pdk_error *err)
{
    PDK_AUTO_PACK requirements = PDK_NO_PACK;
    pdk_acquire_spec spec;
    if (out == NULL)
        return pdk_capi_missing(err, "out");
    *out = NULL;
    if (pdk_capi_request(rt, req, &spec, err) < 0)
        return -1;
    if (req->requirements_json != NULL && read_requirements(rt, req->requirements_json, &requirements, err) < 0)
        return -1;
    spec.requirements = pdk_view_of(&requirements);
    int rc = pdk_runtime_acquire(rt, &spec, out, err);
    deliver(rt);
    return rc;
}

PDK_API int pdk_destroy(pdk_runtime *rt, const char *sandbox_id, pdk_error *err)
{
    if (rt == NULL || sandbox_id == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : "sandbox_id");
    if (check_text("sandbox_id", sandbox_id, MAX_NAME, err) < 0)
        return -1;
    int rc = pdk_runtime_destroy(rt, sandbox_id, err);
    deliver(rt);
    return rc;
}

/* ---- commands and files --------------------------------------------------------------------------------- */

static int read_env(const char *const *env, pdk_pack *out, pdk_error *err)
{
    pdk_mark m = pdk_begin_map(out);
    for (size_t i = 0; env != NULL && env[i] != NULL; i++) {
        const char *equals = strchr(env[i], '=');
        if (equals == NULL || !pdk_env_name_ok(env[i], (size_t)(equals - env[i])))
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `env`: entry %zu is not NAME=value", i);
        pdk_put_str(out, env[i], (size_t)(equals - env[i]));
        pdk_put_cstr(out, equals + 1);
        m.count++;
    }
    pdk_end(out, &m);
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the environment") : 0;
}

int pdk_capi_command(pdk_box *box, const pdk_command *cmd, pdk_exec_spec *spec, pdk_pack *env, pdk_error *err)
{
    if (box == NULL || cmd == NULL || cmd->command == NULL)
        return pdk_capi_missing(err, box == NULL ? "box" : cmd == NULL ? "cmd" : "command");
    if (cmd->stdin_data == NULL && cmd->stdin_len > 0)
        return pdk_capi_missing(err, "stdin_data");
    *spec = (pdk_exec_spec){ .command = cmd->command, .command_len = cmd->command_len, .cwd = cmd->cwd, .stdin_data = cmd->stdin_data,
                             .stdin_len = cmd->stdin_len, .timeout = cmd->timeout, .scope = cmd->scope, .session = cmd->session };
    if (spec->command_len == 0)
        spec->command_len = strlen(cmd->command);
    if (spec->command_len == 0 || memchr(spec->command, '\0', spec->command_len) != NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `command` must not be empty or contain a NUL byte");
    if (pdk_capi_timeout(cmd->timeout, err) < 0 || check_text("cwd", cmd->cwd, MAX_NAME, err) < 0 ||
        check_text("scope", cmd->scope, MAX_HOLDER, err) < 0 || check_text("session", cmd->session, MAX_HOLDER, err) < 0 ||
        read_env(cmd->env, env, err) < 0)
        return -1;
    spec->env = pdk_view_of(env);
    return 0;
}

PDK_API int pdk_exec(pdk_box *box, const pdk_command *cmd, pdk_result *out, pdk_error *err)
{
    PDK_AUTO_PACK env = PDK_NO_PACK;
    pdk_exec_spec spec;
    if (out == NULL)
        return pdk_capi_missing(err, "out");
    *out = (pdk_result){ .exit_code = -1 };
    return pdk_capi_command(box, cmd, &spec, &env, err) < 0 ? -1 : pdk_box_exec(box, &spec, out, err);
}

PDK_API const char *pdk_outcome_name(pdk_outcome outcome)
{
    static const char *const names[] = { "completed", "signalled", "hard_timeout", "oom", "cancelled", "unknown" };
    return (unsigned)outcome <= PDK_UNKNOWN ? names[outcome] : "unknown";
}

PDK_API void pdk_result_free(pdk_result *result)
{
    if (result == NULL)
        return;
    free(result->out);
    free(result->err);
    *result = (pdk_result){ .exit_code = -1 };
}

PDK_API int pdk_write(pdk_box *box, const char *path, const void *data, size_t len, pdk_error *err)
{
    if (box == NULL || path == NULL || (data == NULL && len > 0))
        return pdk_capi_missing(err, box == NULL ? "box" : path == NULL ? "path" : "data");
    if (check_text("path", path, MAX_NAME, err) < 0)
        return -1;
    return pdk_box_write(box, path, strlen(path), data, len, false, err);
}

PDK_API int pdk_read(pdk_box *box, const char *path, char **data, size_t *len, pdk_error *err)
{
    if (box == NULL || path == NULL || data == NULL || len == NULL)
        return pdk_capi_missing(err, box == NULL ? "box" : path == NULL ? "path" : data == NULL ? "data" : "len");
    *data = NULL;
    *len = 0;
    if (check_text("path", path, MAX_NAME, err) < 0)
        return -1;
    return pdk_box_read(box, path, strlen(path), data, len, err);
}

/* ---- skills and network decisions ----------------------------------------------------------------------- */

PDK_API int pdk_sync_skills(pdk_runtime *rt, const pdk_skills *skills, pdk_error *err)
{
    if (rt == NULL || skills == NULL || skills->sandbox_id == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : skills == NULL ? "skills" : "sandbox_id");
    pdk_identity who = { skills->user, skills->thread, skills->user_len, skills->thread_len };
    PDK_AUTO_PACK projection = PDK_NO_PACK;
    if (check_bytes("user", who.user, &who.user_len, err) < 0 || check_bytes("thread", who.thread, &who.thread_len, err) < 0)
        return -1;
    if (skills->projection_json != NULL && read_requirements(rt, skills->projection_json, &projection, err) < 0)
        return pdk_error_wrap(err, "argument `projection_json`");
    int rc = pdk_runtime_sync_skills(rt, skills->sandbox_id, who.user != NULL || who.thread != NULL ? &who : NULL,
                                     pdk_view_of(&projection), err);
    deliver(rt);
    return rc;
}

static void copy_text(char *to, size_t size, pdk_view v)
{
    const char *s = pdk_view_str(v, NULL);
    snprintf(to, size, "%s", s != NULL ? s : "");
}

PDK_API int pdk_network_events(pdk_runtime *rt, const char *sandbox_id, pdk_network_event **out, pdk_error *err)
{
    if (out != NULL)
        *out = NULL;
    if (rt == NULL || sandbox_id == NULL || out == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : sandbox_id == NULL ? "sandbox_id" : "out");
    PDK_AUTO_PACK pack = PDK_NO_PACK;
    int rc = pdk_runtime_network_events(rt, sandbox_id, &pack, err), n = 0;
    deliver(rt);
    pdk_view list = pdk_view_of(&pack), key, event;
    if (rc < 0 || pdk_view_count(list) == 0)
        return rc;
    *out = calloc(pdk_view_count(list), sizeof **out);
    if (*out == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the events of %s", sandbox_id);
    for (size_t cursor = 0; pdk_view_next(list, &cursor, &key, &event); n++) {
        pdk_network_event *e = &(*out)[n];
        int64_t port = 0;
        pdk_view_int(pdk_view_get(event, "port"), &port);
        copy_text(e->request_id, sizeof e->request_id, pdk_view_get(event, "request_id"));
        copy_text(e->host, sizeof e->host, pdk_view_get(event, "host"));
        copy_text(e->method, sizeof e->method, pdk_view_get(event, "method"));
        e->port = (int)port;
    }
    return n;
}

PDK_API int pdk_deny_pending(pdk_runtime *rt, const char *sandbox_id, pdk_error *err)
{
    if (rt == NULL || sandbox_id == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : "sandbox_id");
    int rc = pdk_runtime_deny_pending(rt, sandbox_id, err);
    deliver(rt);
    return rc;
}

PDK_API int pdk_decide(pdk_runtime *rt, const char *sandbox_id, const char *request_id, pdk_network_decision decision,
                       pdk_error *err)
{
    if (rt == NULL || sandbox_id == NULL || request_id == NULL)
        return pdk_capi_missing(err, rt == NULL ? "rt" : sandbox_id == NULL ? "sandbox_id" : "request_id");
    if (check_text("request_id", request_id, PDK_REQUEST_ID_SIZE - 1, err) < 0)
        return -1;
    int rc = pdk_runtime_decide(rt, sandbox_id, request_id, decision, err);
    deliver(rt);
    return rc;
}
