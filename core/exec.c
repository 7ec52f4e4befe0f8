/* exec.c -- commands: which plane and session one runs in, and what its outcome means for the sandbox.
 *
 * A command is sent at most once. When its answer is lost the outcome is `unknown`: said, and fenced. The fences belong to
 * the generation, not to the client: the default shell that may still run such a command is never entered again (J4), and a
 * plane on which a session's creation was lost takes no further one (J7).
 *
 * Fences and scopes are in the entry, under the registry lock; every call of the client is made without it.
 */
#include "box.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const plane_names[PDK_PLANES] = { "shell", "bash" };

typedef struct run { /* one command; on its caller's stack */
    pdk_box *box;
    const pdk_exec_spec *spec;
    pdk_client *client;
    pdk_plane plane;
    char session[48];       /* "" = the plane's default shell */
    bool once;              /* the session is this command's alone: closed after it */
    bool session_new;       /* made by this command */
    pdk_result *out;
    pdk_error *err;
} run;

static void unknown(pdk_result *r, const char *reason)
{
    r->outcome = PDK_UNKNOWN;
    r->exit_code = -1;
    snprintf(r->reason, sizeof r->reason, "%s", reason);
}

/* ---- sessions ---- */

static void random_name(char *to, size_t size, const char *prefix)
{
    unsigned char raw[8];
    pdk_random(raw, sizeof raw);
    int n = snprintf(to, size, "%s-", prefix);
    for (size_t i = 0; i < sizeof raw && n > 0 && (size_t)n + 3 < size; i++, n += 2)
        snprintf(to + n, size - (size_t)n, "%02x", raw[i]);
}

/* Whether a failed creation certainly made nothing (J9). Everything else is ambiguous. */
static bool definite(const pdk_error *e)
{
    static const char *const reasons[] = {
        "connect", "not_sent", "refused", "rejected", "tls", "limit", "not_found", "no_session",
        /* what a guest refuses before it starts anything */
        "process_limit", "no_shell", "exec_failed", "no_memory", "no_descriptors", "no_terminal", "no_space", "session_broken",
        "session_limit", "busy",
    };
    switch (e->kind) {
    case PDK_E_LOST: case PDK_E_INVALID_ARGUMENT: case PDK_E_QUARANTINED: case PDK_E_CAPACITY_EXHAUSTED:
    case PDK_E_UNSUPPORTED: case PDK_E_CLOSED: case PDK_E_BEING_DESTROYED:
        return true;
    case PDK_E_BACKEND_ERROR:
        for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
            if (strcmp(e->reason, reasons[i]) == 0)
                return true;
        return strncmp(e->reason, "http_4", 6) == 0 || strncmp(e->reason, "invalid_", 8) == 0;
    default:
        return false;
    }
}

static double command_limit(const run *r)
{
    return r->spec->timeout > 0 ? r->spec->timeout : r->box->rt->config.command_timeout;
}

/* Both calls are told the command's limit: a session is not worth waiting for much longer than for the command. */
static int session_call(run *r, const char *method, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    pdk_put_cstr(&args, plane_names[r->plane]);
    pdk_put_cstr(&args, r->session);
    pdk_put_num(&args, command_limit(r));
    return pdk_ask(r->box->rt, r->client->object, method, &args, &out, pdk_limit_current(), PDK_E_BACKEND_ERROR, err);
}

static int begin_creation(run *r)
{
    pdk_runtime *rt = r->box->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e == NULL)
        return pdk_fail(r->err, PDK_E_LOST, 0, "sandbox %s was replaced", r->box->id);
    if (e->plane[r->plane].ambiguous) {
        pdk_fail(r->err, PDK_E_QUARANTINED, 0,
                 "sandbox %s takes no further session on its %s plane: the outcome of an earlier creation is unknown", r->box->id,
                 plane_names[r->plane]);
        pdk_error_set_id(r->err, r->box->id);
        return -1;
    }
    e->plane[r->plane].pending++;
    return 0;
}

static void end_creation(run *r, bool ambiguous)
{
    pdk_runtime *rt = r->box->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e == NULL)
        return;
    e->plane[r->plane].pending--;
    e->plane[r->plane].ambiguous |= ambiguous;
}

/* It must not serve again once its holders have left: written down now, so that a crash forgets nothing (L4). */
static void record_uncertain(run *r)
{
    pdk_runtime *rt = r->box->rt;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (pdk_journal_record(rt->journal, r->box->id, r->box->generation, "uncertain", &err) < 0) {
        pdk_emit(rt, PDK_ERROR, "journal_failed", r->box->id, r->box->generation, "uncertain", &err);
        return;
    }
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e != NULL)
        e->journaled = true;
}

/* Makes the session. 0 = made; 1 = its outcome is unknown (the result says so); -1 = certainly not made. */
static int open_session(run *r)
{
    if (begin_creation(r) < 0)
        return -1;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = session_call(r, "open_session", &err);
    if (rc == 0) {
        end_creation(r, false);
        r->session_new = true;
        return 0;
    }
    if (definite(&err)) {
        end_creation(r, false);
        if (err.kind == PDK_E_LOST)
            pdk_box_mark_lost(r->box, &err);
        pdk_error_set_id(&err, r->box->id);
        pdk_error_move(r->err, &err);
        return -1;
    }
    end_creation(r, true);
    record_uncertain(r);
    pdk_emit(r->box->rt, PDK_WARN, "session_creation_unknown", r->box->id, r->box->generation, plane_names[r->plane], &err);
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR; /* best effort; it does not lift the fence (J9) */
    session_call(r, "close_session", &ignored);
    unknown(r->out, "session_creation");
    return 1;
}

static pdk_scope *find_scope(pdk_entry *e, const char *name)
{
    for (pdk_scope *s = e->scopes; s != NULL; s = s->next)
        if (strcmp(s->name, name) == 0)
            return s;
    return NULL;
}

static void drop_scope(pdk_entry *e, const char *name)
{
    for (pdk_scope **at = &e->scopes; *at != NULL; at = &(*at)->next)
        if (strcmp((*at)->name, name) == 0) {
            pdk_scope *gone = *at;
            *at = gone->next;
            free(gone);
            return;
        }
}

/* The session that `name` stands for, made on its first command (J10). Its own name is fixed before the creation is sent, so
 * that a second command meanwhile asks for the same one: creating it is idempotent. `session`: NULL = a fresh name. */
static int kept_session(run *r, const char *name, const char *session)
{
    pdk_runtime *rt = r->box->rt;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_box_entry(rt, r->box);
        if (e == NULL)
            return pdk_fail(r->err, PDK_E_LOST, 0, "sandbox %s was replaced", r->box->id);
        pdk_scope *s = find_scope(e, name);
        if (s == NULL) {
            s = calloc(1, sizeof *s + strlen(name) + 1);
            if (s == NULL)
                return pdk_fail(r->err, PDK_E_NO_MEMORY, 0, "no memory for the scope %s", name);
            memcpy(s->name, name, strlen(name) + 1);
            if (session != NULL)
                snprintf(s->session, sizeof s->session, "%s", session);
            else
                random_name(s->session, sizeof s->session, "scope");
            s->next = e->scopes;
            e->scopes = s;
        }
        memcpy(r->session, s->session, sizeof r->session);
        if (s->ready)
            return 0;
    }
    int rc = open_session(r);
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    pdk_scope *s = e == NULL ? NULL : find_scope(e, name);
    if (s != NULL && rc == 0)
        s->ready = true;
    return rc;
}

static void drop_stand_in(pdk_entry *e, pdk_plane plane)
{
    free(e->plane[plane].session);
    e->plane[plane].session = NULL;
}

/* A session that may still run something of unknown outcome is not used again by its scope. */
static void forget_session(run *r)
{
    pdk_runtime *rt = r->box->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e == NULL)
        return;
    for (pdk_scope **at = &e->scopes; *at != NULL; at = &(*at)->next)
        if (strcmp((*at)->session, r->session) == 0) {
            pdk_scope *gone = *at;
            *at = gone->next;
            free(gone);
            break;
        }
    const char *standing = e->plane[r->plane].session;
    if (standing != NULL && strcmp(standing, r->session) == 0)
        drop_stand_in(e, r->plane);
}

/* Stands in for the default shell once that is fenced (J6). */
static int stand_in(run *r)
{
    pdk_runtime *rt = r->box->rt;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_box_entry(rt, r->box);
        if (e == NULL || !e->plane[r->plane].default_fenced)
            return 0;
        const char *standing = e->plane[r->plane].session;
        if (standing != NULL) {
            snprintf(r->session, sizeof r->session, "%s", standing);
            return 0;
        }
    }
    random_name(r->session, sizeof r->session, "main");
    int rc = open_session(r);
    if (rc != 0)
        return rc;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e != NULL) {
        drop_stand_in(e, r->plane);
        e->plane[r->plane].session = strdup(r->session); /* without memory for its name the next command opens another one */
    }
    return 0;
}

static pdk_plane plane_of(const pdk_exec_spec *s)
{
    return pdk_view_count(s->env) > 0 ? PDK_PLANE_BASH : PDK_PLANE_SHELL;
}

/* The name of the session that the caller keeps commands in; false = none. The planes are kept apart (J9). */
static bool kept_name(const pdk_exec_spec *s, char *key, size_t size)
{
    if (s->session == NULL && s->scope == NULL)
        return false;
    snprintf(key, size, "%s %s %s", plane_names[plane_of(s)], s->session != NULL ? "session" : "scope",
             s->session != NULL ? s->session : s->scope);
    return true;
}

/* Chooses plane and session. As open_session. */
static int choose(run *r)
{
    const pdk_exec_spec *s = r->spec;
    bool env = pdk_view_count(s->env) > 0;
    r->plane = plane_of(s);
    char key[160];
    if (kept_name(s, key, sizeof key))
        return kept_session(r, key, s->session);
    if (env) { /* values travel in a structured field, in a session of the command's own (J12) */
        random_name(r->session, sizeof r->session, "env");
        r->once = true;
        return open_session(r);
    }
    return stand_in(r);
}

/* ---- the command ---- */

static int put_request(run *r, pdk_pack *args)
{
    const pdk_exec_spec *s = r->spec;
    pdk_mark m = pdk_begin_map(args);
    pdk_kv_cstr(args, &m, "plane", plane_names[r->plane]);
    pdk_kv_cstr(args, &m, "session", r->session[0] != '\0' ? r->session : NULL);
    pdk_kv_str(args, &m, "command", s->command, s->command_len);
    pdk_kv_view(args, &m, "env", s->env);
    pdk_kv_cstr(args, &m, "cwd", s->cwd);
    pdk_kv_str(args, &m, "stdin", s->stdin_data, s->stdin_len);
    pdk_kv_num(args, &m, "timeout", command_limit(r));
    pdk_kv_cstr(args, &m, "name", s->name);
    pdk_end(args, &m);
    return args->failed ? pdk_fail(r->err, PDK_E_INVALID_ARGUMENT, 0, "command and stdin are larger than %u MiB", PDK_PACK_MAX >> 20)
                        : 0;
}

static bool take_text(pdk_view v, char **to, size_t *len)
{
    const char *s = pdk_view_str(v, len);
    *to = s != NULL ? pdk_view_dup(v) : calloc(1, 1);
    if (s == NULL)
        *len = 0;
    return *to != NULL;
}

/* Reads what the client answered. An answer that is not understood is an unknown outcome: the command was sent; `why` says what is
 * wrong with it, for whoever writes an engine. */
static void take_result(run *r, pdk_view v, pdk_error *why)
{
    pdk_result *out = r->out;
    int64_t n;
    const char *name = pdk_info_str(v, "outcome");
    int outcome = 0;
    while (outcome < PDK_UNKNOWN && (name == NULL || strcmp(name, pdk_outcome_name((pdk_outcome)outcome)) != 0))
        outcome++;
    out->outcome = (pdk_outcome)outcome;
    if (out->outcome == PDK_UNKNOWN && (name == NULL || strcmp(name, pdk_outcome_name(PDK_UNKNOWN)) != 0))
        pdk_fail(why, PDK_E_OUTCOME_UNKNOWN, 0, "the engine's exec answered the outcome %.40s", name != NULL ? name : "nil");
    out->exit_code = pdk_view_int(pdk_view_get(v, "exit_code"), &n) ? (int)n : -1;
    out->signal = pdk_view_int(pdk_view_get(v, "signal"), &n) ? (int)n : 0;
    if (out->outcome == PDK_SIGNALLED && out->exit_code < 0 && out->signal > 0)
        out->exit_code = 128 + out->signal;
    if (out->outcome == PDK_HARD_TIMEOUT && out->exit_code < 0)
        out->exit_code = 124;
    if (out->outcome == PDK_COMPLETED && out->exit_code < 0) {
        out->outcome = PDK_UNKNOWN;
        pdk_fail(why, PDK_E_OUTCOME_UNKNOWN, 0, "the engine's exec answered `completed` without an exit_code");
    }
    if (out->outcome == PDK_OOM) { /* "sandbox": all of it, not only the command */
        const char *reason = pdk_info_str(v, "reason");
        snprintf(out->reason, sizeof out->reason, "%s", reason != NULL ? reason : "");
    }
    out->truncated = pdk_view_bool(pdk_view_get(v, "truncated"), false);
    out->session_reset = pdk_view_bool(pdk_view_get(v, "session_reset"), false);
    if (!pdk_view_num(pdk_view_get(v, "duration"), &out->duration))
        out->duration = 0;
    if (!take_text(pdk_view_get(v, "stdout"), &out->out, &out->out_len) ||
        !take_text(pdk_view_get(v, "stderr"), &out->err, &out->err_len)) {
        out->truncated = true; /* no memory for what it printed: the outcome is known all the same */
        if (out->out == NULL)
            out->out_len = 0;
        out->err_len = 0;
    }
    if (out->outcome == PDK_UNKNOWN)
        unknown(out, "response");
}

/* What did not answer is not trusted for health_ttl any longer: the next acquire asks (B054). */
static void doubt_health(run *r)
{
    pdk_runtime *rt = r->box->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e != NULL)
        e->health_ok_at = 0;
}

/* Nobody answers there: when the engine says that this generation is gone, the holder has lost it, and is told so. */
static void tell_gone(run *r, pdk_error *err)
{
    pdk_runtime *rt = r->box->rt;
    PDK_AUTO_PACK info = PDK_NO_PACK, now = PDK_NO_PACK;
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
    if (strcmp(err->reason, "connect") != 0)
        return;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_box_entry(rt, r->box);
        if (e != NULL && !pdk_pack_copy(&info, e->info))
            return;
    }
    if (info.len == 0 || pdk_engine_inspect(rt, r->box->id, pdk_view_of(&info), &now, &ignored) == 0)
        pdk_error_become(err, PDK_E_LOST, "gone", "sandbox %s is gone; acquire again", r->box->id);
}

static void fence_session(run *r)
{
    pdk_runtime *rt = r->box->rt;
    if (r->session[0] != '\0') {
        forget_session(r);
        return;
    }
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, r->box);
    if (e != NULL)
        e->plane[r->plane].default_fenced = true;
}

/* The session is not there any more (an image evicts idle ones): the command was certainly not run. */
static bool session_gone(const run *r, const pdk_error *e)
{
    return r->session[0] != '\0' && !r->once && e->kind == PDK_E_BACKEND_ERROR &&
           (strcmp(e->reason, "not_found") == 0 || strcmp(e->reason, "no_session") == 0);
}

/* 0 = there is a result, 1 = its session is gone, -1 = certainly not run. */
static int send_command(run *r)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (put_request(r, &args) < 0)
        return -1;
    if (r->spec->cancelled != NULL && atomic_load(r->spec->cancelled))
        return pdk_fail(r->err, PDK_E_CANCELLED, 0, "the command was cancelled before it was sent");
    pdk_ns before = pdk_now_monotonic();
    const pdk_output_sink *outer = pdk_output_enter(r->spec->output);
    int rc = pdk_ask(r->box->rt, r->client->object, "exec", &args, &answer, pdk_limit_current(), PDK_E_OUTCOME_UNKNOWN, &err);
    pdk_output_enter(outer);
    if (rc < 0 && definite(&err)) {
        if (err.kind == PDK_E_LOST)
            pdk_box_mark_lost(r->box, &err);
        int gone = session_gone(r, &err) ? 1 : -1;
        if (err.kind == PDK_E_BACKEND_ERROR && gone < 0) {
            doubt_health(r);
            tell_gone(r, &err);
        }
        pdk_error_set_id(&err, r->box->id);
        pdk_error_move(r->err, &err);
        return gone;
    }
    if (rc < 0)
        unknown(r->out, "response");
    else
        take_result(r, pdk_view_of(&answer), &err);
    if (r->out->duration <= 0)
        r->out->duration = pdk_to_seconds(pdk_now_monotonic() - before);
    if (r->out->outcome == PDK_UNKNOWN) {
        doubt_health(r);
        fence_session(r);
        pdk_emit(r->box->rt, PDK_WARN, "outcome_unknown", r->box->id, r->box->generation, r->out->reason,
                 err.kind != PDK_OK ? &err : NULL);
    } else if (r->out->outcome == PDK_OOM && r->out->reason[0] != '\0') {
        doubt_health(r);
        pdk_emit(r->box->rt, PDK_WARN, "sandbox_oom", r->box->id, r->box->generation, "its guest fell to the memory limit", NULL);
    }
    return 0;
}

static int run_it(run *r)
{
    int rc = choose(r);
    bool chosen = rc == 0, had_session = chosen && !r->session_new && r->session[0] != '\0';
    if (chosen)
        rc = send_command(r);
    if (chosen && rc == 1) { /* once more in a fresh session; that its state is lost is said */
        forget_session(r);
        r->session[0] = '\0';
        rc = had_session ? choose(r) : -1;
        if (rc == 0 && (rc = send_command(r)) == 0)
            r->out->session_reset = true;
        else if (rc == 1 && r->out->outcome != PDK_UNKNOWN)
            rc = -1;
    }
    if (r->once && r->session_new) {
        PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
        if (session_call(r, "close_session", &ignored) < 0)
            pdk_emit(r->box->rt, PDK_DEBUG, "session_close_failed", r->box->id, r->box->generation, plane_names[r->plane], &ignored);
    }
    if (rc >= 0 && r->out->out == NULL)
        r->out->out = calloc(1, 1);
    if (rc >= 0 && r->out->err == NULL)
        r->out->err = calloc(1, 1);
    return rc < 0 ? -1 : 0;
}

/* ---- arguments ---- */

bool pdk_env_name_ok(const char *s, size_t len)
{
    if (len == 0 || len > 255 || isdigit((unsigned char)s[0]))
        return false;
    for (size_t i = 0; i < len; i++)
        if (!(isalnum((unsigned char)s[i]) || s[i] == '_') || (unsigned char)s[i] >= 0x80) /* whatever the host's locale */
            return false;
    return true;
}

static int check_env(pdk_view env, pdk_error *err)
{
    size_t cursor = 0, n;
    pdk_view key, value;
    if (!pdk_view_is_nil(env) && pdk_view_tag(env) != '{')
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "env must be a table of names and strings");
    while (pdk_view_next(env, &cursor, &key, &value)) {
        const char *name = pdk_view_str(key, &n);
        if (name == NULL || !pdk_env_name_ok(name, n))
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "env: %.80s is no variable name (letters, digits and _)", name ? name : "a key");
        const char *text = pdk_view_str(value, &n);
        if (text == NULL || strlen(text) != n)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "env.%.80s must be a string without NUL bytes", name);
    }
    return 0;
}

static int check_label(const char *what, const char *s, size_t most, pdk_error *err)
{
    if (s == NULL)
        return 0;
    size_t len = strlen(s);
    if (len == 0 || len > most)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "%s must have 1 to %zu bytes", what, most);
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)s[i]) && strchr("_.:-", s[i]) == NULL)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "%s may hold letters, digits, '_', '.', ':' and '-' only", what);
    return 0;
}

int pdk_exec_check(const pdk_exec_spec *s, pdk_error *err)
{
    if (s->command == NULL || s->command_len == 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "command must not be empty");
    if (memchr(s->command, '\0', s->command_len) != NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "command holds a NUL byte; pass bytes by stdin or a file");
    if (!isfinite(s->timeout) || s->timeout < 0 || s->timeout > 1e9)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "timeout must be a positive number of seconds");
    if (s->cwd != NULL && (s->cwd[0] != '/' || strlen(s->cwd) > 4095))
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "cwd must be an absolute path");
    if (s->scope != NULL && s->session != NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "scope and session cannot be given at once");
    if (check_label("scope", s->scope, 120, err) < 0 || check_label("session", s->session, 47, err) < 0)
        return -1;
    return check_env(s->env, err);
}

int pdk_box_exec(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out, pdk_error *err)
{
    memset(out, 0, sizeof *out);
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    run r = { .box = box, .spec = spec, .out = out, .err = &own };
    if (pdk_exec_check(spec, err) < 0 || pdk_box_begin(box, &r.client, err) < 0)
        return -1;
    int rc = run_it(&r);
    pdk_box_end(box, r.client);
    if (rc < 0) {
        pdk_result_free(out);
        pdk_error_move(err, &own);
    }
    return rc;
}

/* ---- one that is to be ended while it runs ---- */

int pdk_box_exec_cancel(pdk_box *box, const char *name, pdk_error *err)
{
    pdk_runtime *rt = box->rt;
    pdk_client *client = NULL;
    if (pdk_look_enter(rt, err) < 0)
        return -1;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_box_entry(rt, box);
        if (e != NULL && e->client != NULL)
            client = pdk_client_ref(e->client);
    }
    int rc = -1;
    if (client == NULL) {
        pdk_fail(err, PDK_E_LOST, 0, "sandbox %s was replaced", box->id);
    } else if (!pdk_iface_has(client->object, "cancel")) {
        pdk_fail(err, PDK_E_UNSUPPORTED, 0, "a command of this backend cannot be ended");
    } else {
        PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
        pdk_put_cstr(&args, name);
        rc = pdk_ask(rt, client->object, "cancel", &args, &out, pdk_limit_current(), PDK_E_BACKEND_ERROR, err);
        if (rc == 0)
            rc = pdk_view_bool(pdk_view_of(&out), false) ? 1 : 0;
    }
    if (client != NULL)
        pdk_client_unref(client);
    pdk_call_leave(rt);
    return rc;
}

void pdk_box_exec_given_up(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out)
{
    pdk_runtime *rt = box->rt;
    char key[160];
    memset(out, 0, sizeof *out);
    unknown(out, "response");
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_box_entry(rt, box);
    if (e == NULL)
        return;
    e->health_ok_at = 0;
    if (kept_name(spec, key, sizeof key)) {
        drop_scope(e, key);
    } else if (plane_of(spec) == PDK_PLANE_SHELL) { /* the other plane's sessions are each command's own */
        e->plane[PDK_PLANE_SHELL].default_fenced = true;
        drop_stand_in(e, PDK_PLANE_SHELL);
    }
}

/* The rendered text (J3): what it printed, then what a reader must know of how it ended. */
char *pdk_result_text(const pdk_result *r, size_t *len)
{
    char tail[256] = "";
    size_t n = 0;
#define SAY(...) n += (size_t)snprintf(tail + n, n < sizeof tail ? sizeof tail - n : 0, __VA_ARGS__)
    if (r->truncated)
        SAY("[output truncated]\n");
    if (r->session_reset)
        SAY("[the session was reset: its directory and variables are lost]\n");
    if (r->outcome == PDK_UNKNOWN)
        SAY("Outcome unknown (%s): it may have run; it was not sent again", r->reason);
    else if (r->outcome == PDK_COMPLETED)
        SAY("Exit Code: %d", r->exit_code);
    else
        SAY("[%s%s]\nExit Code: %d", pdk_outcome_name(r->outcome),
            r->outcome == PDK_HARD_TIMEOUT ? ": its time limit ended it and all that it started" : "", r->exit_code);
#undef SAY
    bool nl_out = r->out_len > 0 && r->out[r->out_len - 1] != '\n';
    bool nl_err = r->err_len > 0 && r->err[r->err_len - 1] != '\n';
    char *text = malloc(r->out_len + r->err_len + strlen(tail) + 3);
    if (text == NULL)
        return NULL;
    char *p = text;
    if (r->out_len > 0)
        p = (char *)memcpy(p, r->out, r->out_len) + r->out_len;
    if (nl_out)
        *p++ = '\n';
    if (r->err_len > 0)
        p = (char *)memcpy(p, r->err, r->err_len) + r->err_len;
    if (nl_err)
        *p++ = '\n';
    memcpy(p, tail, strlen(tail) + 1);
    *len = (size_t)(p - text) + strlen(tail);
    return text;
}
