/* runtime.h -- what the bindings (C API, Lua) call. Everything here may be called from any thread; nothing here raises
 * Lua errors; packs are appended to. Every function answers PDK_E_CLOSED after shutdown or in a forked child. */
#ifndef PDK_RUNTIME_H
#define PDK_RUNTIME_H

#include "iface.h"
#include "log.h"
#include "output.h"
#include "policy.h"

typedef struct pdk_open_spec {
    pdk_script *script;       /* retained by the runtime */
    pdk_view options;         /* packed map, already normalized by lua/paddock/config.lua: every option present or nil */
    pdk_iface *backend;       /* owned by the runtime from here on, also on error; NULL = options.backend names a file or a
                                 built-in one */
    pdk_iface *ownership;     /* likewise; NULL = by options.ownership.type */
    pdk_iface *journal;       /* likewise; NULL = in memory (a durable one comes with the file store) */
    pdk_log_sink log_sink;    /* NULL = stderr */
    void *log_ctx;
} pdk_open_spec;
pdk_runtime *pdk_runtime_open(const pdk_open_spec *spec, pdk_error *err);

typedef struct pdk_acquire_spec {
    const char *user;         /* NULL = ambient; bytes, may hold anything */
    size_t user_len;
    const char *thread;       /* NULL = none */
    size_t thread_len;
    const char *holder;       /* NULL = fresh */
    bool no_holder;
    pdk_view requirements;    /* packed map or empty */
    double timeout;           /* 0 = none */
} pdk_acquire_spec;
int pdk_runtime_acquire(pdk_runtime *rt, const pdk_acquire_spec *spec, pdk_box **out, pdk_error *err);

/* Memory only, never blocks. *out = NULL with 0 when not active here, fenced, or another identity's. `who` NULL = unscoped. */
int pdk_runtime_get(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_box **out, pdk_error *err);
/* Binds `holder` to an active sandbox. release_on_last: whether this holder asks for parking. */
int pdk_runtime_retain(pdk_runtime *rt, const char *id, const char *holder, const pdk_identity *who, bool release_on_last,
                       pdk_error *err);
int pdk_runtime_release(pdk_runtime *rt, const char *holder, pdk_error *err); /* unknown holder = 0, nothing done */
/* 1 and the id, or 0. */
int pdk_runtime_binding(pdk_runtime *rt, const char *holder, char id[64], pdk_error *err);
/* Forgets who holds what and releases nothing: those holders' next operation is `lost`, their sandboxes idle from now on. */
int pdk_runtime_discard_holders(pdk_runtime *rt, pdk_error *err);
/* Parks by id; does nothing while held. */
int pdk_runtime_park(pdk_runtime *rt, const char *id, pdk_error *err);
/* 1 = confirmed absent, 0 = not now (err->reason "deferred" or "replaced", kind PDK_OK), -1 = error. */
int pdk_runtime_destroy(pdk_runtime *rt, const char *id, pdk_error *err);

/* records.c: what stores know; these wait for them. */
/* Appends the lease of an id, whoever has it: { state = "own"|"del", owner = a runtime's id, ours, token }, or nil. */
int pdk_runtime_lease(pdk_runtime *rt, const char *id, pdk_pack *out, pdk_error *err);
/* Appends the quarantine records: a list of { sandbox_id, generation, why }. */
int pdk_runtime_quarantine(pdk_runtime *rt, pdk_pack *out, pdk_error *err);
/* 1 = nothing is recorded of that id any longer: what was is proven absent, stopped first where it still ran; 0 = not now (kind
 * PDK_OK, reason "deferred"; or "replaced", as destroy says it), -1 = error. */
int pdk_runtime_retire(pdk_runtime *rt, const char *id, pdk_error *err);

/* managed.c: what an engine does that copies skills in or holds back network requests; of another one the defaults of rows R1
 * and S1. `who` NULL = whoever's. These wait for the engine. */
enum { PDK_REQUEST_ID_SIZE = 64, PDK_EVENT_HOST_SIZE = 256, PDK_EVENT_METHOD_SIZE = 16 }; /* as in pdk_network_event */
int pdk_runtime_sync_skills(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_view projection, pdk_error *err);
/* Appends a list of { request_id, host, port, method }: what nobody was shown yet, oldest first. */
int pdk_runtime_network_events(pdk_runtime *rt, const char *id, pdk_pack *out, pdk_error *err);
int pdk_runtime_deny_pending(pdk_runtime *rt, const char *id, pdk_error *err); /* 1 = denied something, 0 = nothing, -1 */
int pdk_runtime_decide(pdk_runtime *rt, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err);
int pdk_network_decision_of(const char *name); /* "deny", "allow_once", "allow"; -1 = none of them */

int pdk_runtime_tick(pdk_runtime *rt, pdk_error *err);
int pdk_runtime_reconcile(pdk_runtime *rt, pdk_error *err);
int pdk_runtime_reload(pdk_runtime *rt, pdk_error *err);
int pdk_runtime_reset(pdk_runtime *rt, pdk_error *err);
int pdk_runtime_shutdown(pdk_runtime *rt, pdk_error *err);
void pdk_runtime_free(pdk_runtime *rt);
int pdk_runtime_advance(pdk_runtime *rt, double s, double wall_s, pdk_error *err);

/* Packed views for people and programs; memory only, never block (explain calls policies). */
int pdk_runtime_list(pdk_runtime *rt, pdk_pack *out, pdk_error *err);      /* list of records as inspect gives */
int pdk_runtime_stats(pdk_runtime *rt, pdk_pack *out, pdk_error *err);
int pdk_runtime_capabilities(pdk_runtime *rt, pdk_pack *out, pdk_error *err);
/* By id (who NULL) or by identity (id NULL): a record, or nil appended when nothing is known. */
int pdk_runtime_inspect(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_pack *out, pdk_error *err);
/* What would happen at the next acquire: { id, requirements, mounts, path = { { step, answer, because }, ... }, decision, code,
 * message, policies = describe }. Asks the policies; asks no engine, and changes nothing. */
typedef struct pdk_explain_spec {
    pdk_identity who;
    pdk_view requirements;    /* as acquire takes them; packed map or empty */
    pdk_view candidate;       /* empty = what is tracked; else a sandbox to be judged in its place, a map
                                 { source, attestation = {}, holders, idle_seconds, capability = {} } */
    bool trial;               /* the functions that would not be asked now are asked about an invented sandbox;
                                 { trial = { error, message } } says what is wrong with their answers */
} pdk_explain_spec;
int pdk_runtime_explain(pdk_runtime *rt, const pdk_explain_spec *spec, pdk_pack *out, pdk_error *err);

/* Events: `sink` is called with each record (packed map: event, sandbox_id, generation, reason, ...), on whatever thread it
 * happens, outside every lock; it must only enqueue. One sink per call; never removed before the runtime's end. */
typedef void (*pdk_event_sink)(void *ctx, const pdk_pack *record);
int pdk_runtime_on(pdk_runtime *rt, pdk_event_sink sink, void *ctx, pdk_error *err);

/* Boxes (box.c). A box is reference-free: one owner. The strings of pdk_box_* live as long as it. */
typedef struct pdk_exec_spec {
    const char *command;
    size_t command_len;
    pdk_view env;             /* packed map name -> string, or empty */
    const char *cwd;          /* or NULL */
    const char *stdin_data;   /* or NULL */
    size_t stdin_len;
    double timeout;           /* 0 = command_timeout */
    const char *scope, *session; /* or NULL */
    /* for one that can be ended while it runs: */
    const char *name;         /* or NULL; by which pdk_box_exec_cancel finds it */
    atomic_bool *cancelled;   /* or NULL; looked at until it is sent */
    const pdk_output_sink *output; /* or NULL */
} pdk_exec_spec;
bool pdk_env_name_ok(const char *s, size_t len); /* 1 to 255 letters, digits and _, no digit first */
int pdk_exec_check(const pdk_exec_spec *spec, pdk_error *err); /* the arguments alone */
int pdk_box_exec(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out, pdk_error *err);
/* Asks the sandbox to end the command of that name: 1 = it is being ended, and its own answer will say so; 0 = it is not there (yet,
 * or any more); -1 = nobody can be asked. Waits for I/O, by the thread's limit. */
int pdk_box_exec_cancel(pdk_box *box, const char *name, pdk_error *err);
/* Its caller waits for it no longer: what it ran in is fenced as for an unknown outcome, which *out says. Waits for nothing. */
void pdk_box_exec_given_up(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out);
int pdk_box_write(pdk_box *box, const char *path, size_t path_len, const void *data, size_t len, bool no_overwrite,
                  pdk_error *err);
int pdk_box_read(pdk_box *box, const char *path, size_t path_len, char **data, size_t *len, pdk_error *err);
/* Appends a list of { name, path, is_directory, size, modified_time, mode }. */
int pdk_box_list(pdk_box *box, const char *path, size_t path_len, pdk_pack *out, pdk_error *err);
/* The rendered text of a result (J3): malloc'd. */
char *pdk_result_text(const pdk_result *r, size_t *len);

#endif
