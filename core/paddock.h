/* paddock.h -- the public C interface of paddock, a runtime for the life cycle of agent sandboxes.
 *
 * A runtime acquires a sandbox for an identity (user, thread), runs commands in it, parks it warm, hands it
 * out again to the same identity, and tears it down behind a fence.
 *
 * Rules for every function here, unless it says otherwise:
 *   Threads:  a pdk_runtime and a pdk_box may be used from any thread, by several at once.
 *   Strings:  UTF-8 or plain bytes; arguments are read during the call and never kept.
 *   Errors:   a failing function returns -1 or NULL and fills `err` (which may be NULL). It changed nothing,
 *             or its message says what it left. `err` must start as PDK_NO_ERROR, and be given to
 *             pdk_error_clear when it was filled.
 *   Time:     seconds, as double; a duration is measured on the runtime's monotonic clock.
 *   Forks:    after a host's fork, every call in the child fails with PDK_E_CLOSED.
 */
#ifndef PADDOCK_H
#define PADDOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PDK_API __attribute__((visibility("default")))
#else
#define PDK_API
#endif

#define PDK_VERSION "0.1.0"

/* ---- errors ------------------------------------------------------------------------------------------- */

/* The kinds: what a caller does next depends on the kind, and on `reason` where there is one. The name in
 * Lua, JSON and logs is the second word. */
#define PDK_ERROR_KINDS(X)                                                                                   \
    X(INVALID_ARGUMENT, invalid_argument)             /* an option or argument is out of range; names it */  \
    X(IDENTITY_COLLISION, identity_collision)         /* the id is tracked for another identity */           \
    X(BEING_DESTROYED, being_destroyed)               /* a teardown of it is in progress */                  \
    X(REPLACEMENT_DEFERRED, replacement_deferred)     /* must not be reused, cannot be replaced now; retry */ \
    X(QUARANTINED, quarantined)                       /* may no longer be used in this way */                \
    X(OWNERSHIP_UNAVAILABLE, ownership_unavailable)   /* the ownership store could not answer */             \
    X(UNVERIFIED, unverified)                         /* a fact that admission needs is unknown */           \
    X(CAPACITY_EXHAUSTED, capacity_exhausted)         /* a limit on sandboxes is reached */                  \
    X(UNREADY, unready)                               /* created, but not ready within its limit */          \
    X(LOST, lost)                                     /* the sandbox is no longer the caller's */            \
    X(OUTCOME_UNKNOWN, outcome_unknown)               /* it may have happened; it is never replayed */       \
    X(TIMEOUT, timeout)                               /* the operation's own deadline passed */              \
    X(CANCELLED, cancelled)                           /* the caller cancelled it */                          \
    X(CLOSED, closed)                                 /* the runtime or the box is closed */                 \
    X(POLICY_ERROR, policy_error)                     /* a policy failed or answered outside its contract */ \
    X(BACKEND_ERROR, backend_error)                   /* the engine failed; `stage` says in what */          \
    X(SHARED_WORKSPACE_UNSUPPORTED, shared_workspace_unsupported) /* takes no existing workspace */          \
    X(PRESERVATION_UNSUPPORTED, preservation_unsupported) /* keeps nothing of what it ends */                 \
    X(UNSUPPORTED, unsupported)                       /* not possible here or in this place */               \
    X(IO_ERROR, io_error)                             /* local storage failed */                             \
    X(NO_MEMORY, no_memory)                           /* this process has none left */

typedef enum pdk_error_kind {
    PDK_OK = 0,
#define X(C, lua) PDK_E_##C,
    PDK_ERROR_KINDS(X)
#undef X
    PDK_ERROR_KIND_COUNT
} pdk_error_kind;

typedef struct pdk_error pdk_error;
struct pdk_error {
    pdk_error_kind kind;
    char reason[40];        /* a stable code, or empty */
    int sys;                /* errno or CURLcode of the failing line; 0 = none */
    char message[400];      /* one line for a person: the thing, the reason, what to do; never parsed */
    char sandbox_id[64];    /* or empty */
    char stage[24];         /* of a backend_error: create, acquire, discover, stop, ...; or empty */
    int attempt;            /* which attempt failed, from 1; 0 = does not apply */
    pdk_error *cause;       /* owned; NULL at the root */
};
#ifdef __cplusplus
#define PDK_NO_ERROR (pdk_error())
#else
#define PDK_NO_ERROR ((pdk_error){ .kind = PDK_OK })
#endif

/* The kind's name, such as "invalid_argument". Static storage. */
PDK_API const char *pdk_error_kind_name(pdk_error_kind kind);
/* Frees the causes and sets `err` to PDK_NO_ERROR. NULL and PDK_NO_ERROR are fine. */
PDK_API void pdk_error_clear(pdk_error *err);

/* ---- a runtime ---------------------------------------------------------------------------------------- */

typedef struct pdk_runtime pdk_runtime;
typedef struct pdk_box pdk_box; /* one holder's grip on one sandbox */

/* Opens a runtime. `config_file` is a Lua file that returns the table of options that `paddock.open` takes, all
 * of them in the README (NULL: all defaults); relative paths in its `policies` and `backend` count from its own
 * folder. Returns NULL on error: invalid_argument names the option, policy_error the script. Log lines go to
 * stderr, as JSON, from the level of the option `log`, else of the environment's PADDOCK_LOG, else "warn". */
PDK_API pdk_runtime *pdk_open(const char *config_file, pdk_error *err);
/* As pdk_open, from the text of such a file. `name` is what errors call it; relative paths count from the
 * working directory. */
PDK_API pdk_runtime *pdk_open_text(const char *text, const char *name, pdk_error *err);

/* Tears down every tracked sandbox and stops the runtime's threads. 0, or -1 while something could not be
 * stopped: then call it again. Afterwards every call but pdk_free answers PDK_E_CLOSED. Waits: for I/O. */
PDK_API int pdk_shutdown(pdk_runtime *rt, pdk_error *err);
/* Frees the handle, whatever state it is in; sandboxes that were not torn down are left to run. Boxes of it
 * must have been freed, and no other call of it may be in flight. */
PDK_API void pdk_free(pdk_runtime *rt);

/* What is asked for. Zero it, then set fields. */
typedef struct pdk_request {
    const char *user;               /* NULL = the runtime's ambient user (option `user`) */
    size_t user_len;                /* bytes; 0 = strlen(user) */
    const char *thread;             /* NULL = none: a fresh sandbox that nothing can find again */
    size_t thread_len;
    const char *holder;             /* NULL = a fresh holder; else its name: binds or finds that holder */
    bool no_holder;                 /* true = hand out without a holder */
    const char *requirements_json;  /* NULL, or a JSON object for policies/requirements.lua */
    double timeout;                 /* seconds for the whole call, waiting included; 0 = no limit */
} pdk_request;

/* Acquires a sandbox: 0 and *out (the caller's; pdk_release or pdk_box_free), or -1 and *out NULL.
 * Waits: for its identity's turn and for I/O. */
PDK_API int pdk_acquire(pdk_runtime *rt, const pdk_request *req, pdk_box **out, pdk_error *err);

/* Facts of a box. The strings live as long as the box. */
PDK_API const char *pdk_box_id(const pdk_box *box);
PDK_API const char *pdk_box_generation(const pdk_box *box); /* or NULL when the engine has none */
PDK_API const char *pdk_box_holder(const pdk_box *box);     /* or NULL with no_holder */
PDK_API const char *pdk_box_source(const pdk_box *box);     /* "active", "warm", "discovered" or "created" */
PDK_API int64_t pdk_box_token(const pdk_box *box);

/* Releases the box's holder; the last release parks the sandbox: it runs on, warm, until `idle_timeout` or the next
 * acquire. Releasing twice does nothing. The box must
 * still be freed. 0, or -1 (`closed`, after the runtime is gone). */
PDK_API int pdk_release(pdk_box *box, pdk_error *err);
/* Releases if that was not done, and frees. NULL is fine. */
PDK_API void pdk_box_free(pdk_box *box);

/* 1 = confirmed absent (or never there), 0 = deferred: somebody holds it or is at work on it, or another
 * generation has taken its place; -1 = error. `err->reason` says which on 0. Waits: for I/O. */
PDK_API int pdk_destroy(pdk_runtime *rt, const char *sandbox_id, pdk_error *err);

/* Reaps, renews and reconciles what is due; for runtimes with threads = false. Waits: for I/O. */
PDK_API int pdk_tick(pdk_runtime *rt, pdk_error *err);
/* Loads the policies again and swaps all of them at once, or nothing (policy_error). With `signals = true` SIGHUP
 * does it too. */
PDK_API int pdk_reload(pdk_runtime *rt, pdk_error *err);

/* ---- commands and files ------------------------------------------------------------------------------- */

typedef enum pdk_outcome {
    PDK_COMPLETED,      /* it ended by itself: exit_code */
    PDK_SIGNALLED,      /* a signal ended it: signal */
    PDK_HARD_TIMEOUT,   /* its time limit ended it and all its descendants */
    PDK_OOM,            /* the memory limit ended it */
    PDK_CMD_CANCELLED,  /* cancelled, or ended by a newer owner's fence */
    PDK_UNKNOWN         /* it may have run; it is never replayed; the sandbox is fenced accordingly */
} pdk_outcome;

typedef struct pdk_command {
    const char *command;        /* shell text */
    size_t command_len;         /* bytes; 0 = strlen */
    const char *const *env;     /* "NAME=value", NULL-terminated; NULL = none */
    const char *cwd;            /* NULL = the sandbox's workspace */
    const void *stdin_data;     /* NULL = end of input at once */
    size_t stdin_len;
    double timeout;             /* seconds; 0 = option command_timeout */
    const char *scope;          /* NULL, or a name whose commands share one shell session */
    const char *session;        /* NULL, or a session's own name */
} pdk_command;

typedef struct pdk_result {
    pdk_outcome outcome;
    char reason[24];            /* of PDK_UNKNOWN: "response" or "session_creation"; of PDK_OOM: "sandbox"
                                   when all of it died; else empty */
    int exit_code;              /* 128 + signal when signalled, 124 at the time limit; -1 = unknown */
    int signal;                 /* 0 = none */
    bool truncated;             /* output beyond the bound was dropped */
    bool session_reset;         /* the session this ran in was new although the caller had one before */
    double duration;            /* seconds */
    char *out, *err;            /* raw bytes, a NUL after them; freed by pdk_result_free */
    size_t out_len, err_len;
} pdk_result;

/* Runs a command. 0 when there is a result (also a failing or an ambiguous one), -1 when it was certainly not
 * run (`lost`: the sandbox is no longer this holder's; `quarantined`; `invalid_argument`; ...). Waits: for it. */
PDK_API int pdk_exec(pdk_box *box, const pdk_command *cmd, pdk_result *out, pdk_error *err);
PDK_API const char *pdk_outcome_name(pdk_outcome outcome); /* "completed", "hard_timeout", ... */
PDK_API void pdk_result_free(pdk_result *result);

/* Files by absolute path inside the sandbox. Links that lead out of the sandbox's own root are refused. */
PDK_API int pdk_write(pdk_box *box, const char *path, const void *data, size_t len, pdk_error *err);
/* *data is the caller's (free), with a NUL after *len bytes. */
PDK_API int pdk_read(pdk_box *box, const char *path, char **data, size_t *len, pdk_error *err);

/* ---- asynchronous operations --------------------------------------------------------------------------- */

/* For hosts that may never block: everything above that can wait can also be submitted. What was submitted runs on the
 * runtime's own threads (with threads = false: inside pdk_tick and pdk_op_wait), and its end is polled for, waited for, or
 * told by a callback on the thread that calls pdk_dispatch.
 *
 *   Submission checks its arguments, copies what it needs and returns; NULL = it was not submitted, and `err` says why.
 *   Every operation has a deadline; the time that it waits for its turn or for a thread counts. When it is over the caller is
 *   told `timeout`; what has begun is drained behind it, under its fences, and what it produced is given back.
 *   Submission, poll, cancel, take, free and dispatch wait for nothing: no I/O, no Lua, no lock that is held across either. */
typedef struct pdk_op pdk_op; /* one operation; the handle is the caller's until pdk_op_free */

/* An operation is over: called once, by pdk_dispatch or by pdk_op_wait, on their thread. It may poll, take the result, free the
 * operation, and submit or cancel others. */
typedef void (*pdk_callback)(void *ctx, pdk_op *op);
/* A piece of a running command's output: `stream` is 1 or 2. Called as pdk_callback is, in order, and before it. A command whose
 * host does not take its output waits, as in a full pipe, at most until its time limit. An engine that cannot tell the output
 * before the end gives it as one piece per stream at the end. */
typedef void (*pdk_output)(void *ctx, int stream, const void *bytes, size_t len);

/* Each takes a callback and its ctx; callback NULL = none: the host polls or waits. */
/* The result: pdk_op_box. The deadline: req->timeout. Waiting for the identity's turn takes no thread. */
PDK_API pdk_op *pdk_acquire_async(pdk_runtime *rt, const pdk_request *req, pdk_callback callback, void *ctx, pdk_error *err);
/* The result: pdk_op_result. cmd->timeout is the deadline: it counts from here, and what is left of it when the command starts
 * is the command's own. Cancelled, a running command is ended; the result then says so (PDK_CMD_CANCELLED) where that is a
 * fact, and PDK_UNKNOWN where nobody can tell. The box may be released or freed meanwhile. on_output NULL = none. */
PDK_API pdk_op *pdk_exec_async(pdk_box *box, const pdk_command *cmd, pdk_output on_output, pdk_callback callback, void *ctx,
                               pdk_error *err);
/* As pdk_release; the box must still be freed, which waits for nothing then, and may happen at once. */
PDK_API pdk_op *pdk_release_async(pdk_box *box, pdk_callback callback, void *ctx, pdk_error *err);
/* The result: pdk_op_answer, as pdk_destroy's. timeout: seconds, 0 = none. */
PDK_API pdk_op *pdk_destroy_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                  pdk_error *err);
/* Operations that wait end with `closed`; what runs is drained. At its deadline the caller is told `timeout` with what is left, and
 * the shutdown goes on behind it. It may be submitted again, as pdk_shutdown may be called again. */
PDK_API pdk_op *pdk_shutdown_async(pdk_runtime *rt, double timeout, pdk_callback callback, void *ctx, pdk_error *err);
/* Files. The bytes are copied at submission; the result of a read: pdk_op_bytes. */
PDK_API pdk_op *pdk_write_async(pdk_box *box, const char *path, const void *data, size_t len, double timeout,
                                pdk_callback callback, void *ctx, pdk_error *err);
PDK_API pdk_op *pdk_read_async(pdk_box *box, const char *path, double timeout, pdk_callback callback, void *ctx, pdk_error *err);

/* 0 = pending, 1 = done well, -1 = failed (`err` gets a copy of why). Any number of times. */
PDK_API int pdk_op_poll(pdk_op *op, pdk_error *err);
/* Waits at most `seconds` (negative = without limit) until it is over, and answers as poll. Runs this operation's own callbacks
 * meanwhile, if no other thread does; with threads = false it runs what was submitted. Not from inside a callback of this
 * operation. */
PDK_API int pdk_op_wait(pdk_op *op, double seconds, pdk_error *err);
/* Take the result of one that is done well; the caller's then, once. pdk_op_box: NULL, and the others 0, when there is none (any
 * more), else 1. */
PDK_API pdk_box *pdk_op_box(pdk_op *op);
PDK_API int pdk_op_result(pdk_op *op, pdk_result *out);
PDK_API int pdk_op_bytes(pdk_op *op, char **data, size_t *len); /* *data: free() */
/* What the blocking form would have returned (0, or 1; -1 = it failed or is not over), e.g. of a destroy: 1 = confirmed absent,
 * 0 = deferred or replaced (pdk_op_poll's err->reason says which). */
PDK_API int pdk_op_answer(pdk_op *op);

/* Asks for its end: 0 = remembered, 1 = it was over already. One that waits (for its turn, or for a thread) never runs and is over
 * at once; one that runs is drained first, and what it produced is given back. It then is over with `cancelled`, whatever became of
 * what was drained. Cancelling again changes nothing. */
PDK_API int pdk_cancel(pdk_op *op);
/* Any time, also inside its callback. One that is not over is cancelled and its callback never called; a result that was not taken
 * is given back (a box is released). When another thread is inside its callback at that moment, this waits until that has returned (but
 * not inside a callback of any operation), so that what the callback uses may be freed next. NULL is fine. The operation may outlive
 * its runtime: then poll answers `closed`. */
PDK_API void pdk_op_free(pdk_op *op);

/* A descriptor that is readable while callbacks wait for pdk_dispatch: for epoll, poll or select. It stays the runtime's; do not read
 * from it. -1: this process has no descriptor left for it, or is the fork of the one that opened the runtime. */
PDK_API int pdk_fd(pdk_runtime *rt);
/* Runs the callbacks of finished operations (and of output that has come) on the calling thread, at most `max` of them (1 or more).
 * Returns how many ran, 0 when none is waiting: that costs one look at a number. Any thread; several may call it at once, but the
 * callbacks of one operation never run at once. */
PDK_API int pdk_dispatch(pdk_runtime *rt, int max);

PDK_API const char *pdk_version(void);

/* ---- skills and network decisions --------------------------------------------------------------------- */

/* One connection that a sandbox wanted and that nobody has decided on. */
typedef struct pdk_network_event {
    char request_id[64];
    char host[256];
    int port;
    char method[16];            /* or empty */
} pdk_network_event;

typedef enum pdk_network_decision {
    PDK_NETWORK_DENY,
    PDK_NETWORK_ALLOW_ONCE,     /* this request */
    PDK_NETWORK_ALLOW,          /* and those like it, for the time of a temporary grant */
} pdk_network_decision;

/* Whose skills go where. Zero it, then set fields. */
typedef struct pdk_skills {
    const char *sandbox_id;
    const char *user;           /* NULL = the runtime's ambient user */
    size_t user_len;            /* bytes; 0 = strlen(user) */
    const char *thread;         /* or NULL */
    size_t thread_len;
    const char *projection_json; /* NULL, or a JSON object: the prepared projection, as the engine wants it */
} pdk_skills;

/* Brings a sandbox's skills up to date. An engine that mounts them has nothing to do: 0. One that copies them in does it
 * now. Waits: for I/O then. */
PDK_API int pdk_sync_skills(pdk_runtime *rt, const pdk_skills *skills, pdk_error *err);
/* Claims what the sandbox asked for and nobody was shown yet, oldest first: each event is given out once. How many, or -1;
 * *out is the caller's (free), NULL when there are none. An engine without managed egress has none. Waits: for I/O. */
PDK_API int pdk_network_events(pdk_runtime *rt, const char *sandbox_id, pdk_network_event **out, pdk_error *err);
/* Denies, in one step, all events of the sandbox that nobody was shown yet: 1; 0 = there is no managed egress, or none waited. */
PDK_API int pdk_deny_pending(pdk_runtime *rt, const char *sandbox_id, pdk_error *err);
/* Decides on one request: 1 = it did, 0 = there is no such request (any more), and nothing has changed. */
PDK_API int pdk_decide(pdk_runtime *rt, const char *sandbox_id, const char *request_id, pdk_network_decision decision,
                       pdk_error *err);

/* The same, submitted: see "asynchronous operations". timeout: seconds, 0 = none. The result of a sync: pdk_op_poll; of the events:
 * pdk_op_events; of a denial or decision: pdk_op_answer. */
PDK_API pdk_op *pdk_sync_skills_async(pdk_runtime *rt, const pdk_skills *skills, double timeout, pdk_callback callback, void *ctx,
                                      pdk_error *err);
PDK_API pdk_op *pdk_network_events_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                         pdk_error *err);
PDK_API pdk_op *pdk_deny_pending_async(pdk_runtime *rt, const char *sandbox_id, double timeout, pdk_callback callback, void *ctx,
                                       pdk_error *err);
PDK_API pdk_op *pdk_decide_async(pdk_runtime *rt, const char *sandbox_id, const char *request_id, pdk_network_decision decision,
                                 double timeout, pdk_callback callback, void *ctx, pdk_error *err);
/* How many events; *out is the caller's (free), once. 0 = none, or not over, or taken already. */
PDK_API int pdk_op_events(pdk_op *op, pdk_network_event **out);

/* ---- implementations: what stands behind the default instance ------------------------------------------- */

/* A pdk_impl is an implementation of a sandbox runtime: paddock's own, or a host's. Who has a reference may use it; the
 * last pdk_impl_unref ends it. So one that was replaced or detached meanwhile stays whole while somebody uses it. */
typedef struct pdk_impl pdk_impl;

/* What an implementation says of itself; the defaults stand beside the fields. */
typedef struct pdk_impl_facts {
    bool thread_data_mounts;           /* false: thread data is visible through mounts */
    bool upload_permission_adjustment; /* true: what is uploaded needs its permissions adjusted */
    bool agent_skill_isolation;        /* false; stays so where a shell can get round the managed path mapping */
    char network_mode[16];             /* "open" */
    double network_grant;              /* 300: how long a temporary grant lasts, in seconds */
} pdk_impl_facts;

enum { PDK_ID_SIZE = 64 }; /* a sandbox id with its NUL */

/* What a host fills in. `self` is what pdk_impl_new was given; functions are called from any thread, several at once, and
 * without any lock. One that fails answers -1 with `err` filled in (never NULL): kind, message. */
typedef struct pdk_impl_ops {
    size_t size;                       /* sizeof(pdk_impl_ops) */
    /* Needed. acquire: a sandbox's id for the (optional) thread and user of the request. */
    int (*acquire)(void *self, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err);
    /* The client of an id, from memory alone; 0 and *client NULL when there is none. */
    int (*get)(void *self, const char *id, void **client, pdk_error *err);
    int (*release)(void *self, const char *id, pdk_error *err);
    /* The rest may be NULL; the default stands beside each. */
    void (*free)(void *self);                             /* nothing. With the last reference */
    void (*put)(void *self, void *client);                /* nothing. A client that get gave comes back */
    /* No client: who an id belongs to is not known here (fails closed). */
    int (*get_scoped)(void *self, const char *id, const pdk_request *who, void **client, pdk_error *err);
    void (*facts)(void *self, pdk_impl_facts *facts);     /* those above; called with them filled in */
    int (*sync_skills)(void *self, const pdk_skills *skills, pdk_error *err);                          /* 0, does nothing */
    int (*network_events)(void *self, const char *id, pdk_network_event **out, pdk_error *err);        /* 0 */
    int (*deny_pending)(void *self, const char *id, pdk_error *err);                                   /* 0 */
    int (*decide)(void *self, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err); /* 0 */
    void (*reset)(void *self);                            /* nothing: forget everything without stopping it */
    int (*shutdown)(void *self, pdk_error *err);          /* nothing: stop everything */
    /* Holders: who has an id in use; leave of the last one releases the id. All four, or none: then they are kept by paddock. */
    int (*retain)(void *self, const char *id, const char *holder, pdk_error *err);
    int (*leave)(void *self, const char *holder, pdk_error *err);
    int (*binding)(void *self, const char *holder, char id[PDK_ID_SIZE], pdk_error *err); /* 1, or 0 = none */
    void (*discard_holders)(void *self);                  /* forgets all bindings and releases nothing */
} pdk_impl_ops;

/* An implementation of the host's; its first reference is the caller's. invalid_argument names what is missing. On error
 * `self` is not freed. */
PDK_API pdk_impl *pdk_impl_new(const pdk_impl_ops *ops, void *self, pdk_error *err);
/* paddock's own, on a runtime: acquire binds no holder, a client is a pdk_box. Owns the runtime from here on: pdk_free comes
 * with the last reference. */
PDK_API pdk_impl *pdk_impl_of(pdk_runtime *rt, pdk_error *err);
/* The runtime behind paddock's own; NULL of any other. Lives as long as the reference. */
PDK_API pdk_runtime *pdk_impl_runtime(const pdk_impl *impl);
PDK_API pdk_impl *pdk_impl_ref(pdk_impl *impl);  /* the same; NULL is fine */
PDK_API void pdk_impl_unref(pdk_impl *impl);     /* NULL is fine. Waits: for I/O with the last one */

PDK_API int pdk_impl_acquire(pdk_impl *impl, const pdk_request *req, char id[PDK_ID_SIZE], pdk_error *err);
/* `who` NULL = whoever's; else only when the id is theirs. A client keeps its implementation; pdk_impl_put gives it back. */
PDK_API int pdk_impl_get(pdk_impl *impl, const char *id, const pdk_request *who, void **client, pdk_error *err);
PDK_API void pdk_impl_put(pdk_impl *impl, void *client); /* a NULL client is fine */
PDK_API int pdk_impl_release(pdk_impl *impl, const char *id, pdk_error *err); /* changes nothing while the id has holders */
PDK_API pdk_impl_facts pdk_impl_describe(pdk_impl *impl);
PDK_API int pdk_impl_sync_skills(pdk_impl *impl, const pdk_skills *skills, pdk_error *err);
PDK_API int pdk_impl_network_events(pdk_impl *impl, const char *id, pdk_network_event **out, pdk_error *err);
PDK_API int pdk_impl_deny_pending(pdk_impl *impl, const char *id, pdk_error *err);
PDK_API int pdk_impl_decide(pdk_impl *impl, const char *id, const char *request_id, pdk_network_decision decision, pdk_error *err);
/* The same, submitted: the blocking function runs on a worker, of its runtime where it has one, else of the process: then pdk_fd and
 * pdk_dispatch take NULL as the runtime. A cancelled one that runs is drained before its caller is told. The last reference may go
 * with an operation, on whatever thread. */
PDK_API pdk_op *pdk_impl_acquire_async(pdk_impl *impl, const pdk_request *req, pdk_callback callback, void *ctx, pdk_error *err);
PDK_API int pdk_op_id(pdk_op *op, char id[PDK_ID_SIZE]); /* of an acquire: 1 and the id, once; 0 = it has none (any more) */
PDK_API pdk_op *pdk_impl_sync_skills_async(pdk_impl *impl, const pdk_skills *skills, double timeout, pdk_callback callback,
                                           void *ctx, pdk_error *err);
PDK_API pdk_op *pdk_impl_network_events_async(pdk_impl *impl, const char *id, double timeout, pdk_callback callback, void *ctx,
                                              pdk_error *err);
PDK_API pdk_op *pdk_impl_deny_pending_async(pdk_impl *impl, const char *id, double timeout, pdk_callback callback, void *ctx,
                                            pdk_error *err);
PDK_API pdk_op *pdk_impl_decide_async(pdk_impl *impl, const char *id, const char *request_id, pdk_network_decision decision,
                                      double timeout, pdk_callback callback, void *ctx, pdk_error *err);
/* Binds `holder` to an id that was acquired; again to the same id changes nothing. */
PDK_API int pdk_impl_retain(pdk_impl *impl, const char *id, const char *holder, pdk_error *err);
PDK_API int pdk_impl_leave(pdk_impl *impl, const char *holder, pdk_error *err); /* the last one of an id releases it; unknown = 0 */
PDK_API int pdk_impl_binding(pdk_impl *impl, const char *holder, char id[PDK_ID_SIZE], pdk_error *err); /* 1, 0 = none, -1 */
/* For one that is no longer the default instance: the default's own shutdown and reset call the same. */
PDK_API void pdk_impl_reset(pdk_impl *impl);
PDK_API int pdk_impl_shutdown(pdk_impl *impl, pdk_error *err);

/* ---- the default instance ------------------------------------------------------------------------------- */

/* One per process, made by the first pdk_default. All of these may be called from any thread, also from inside an
 * implementation's constructor, reset, shutdown and free: the lock of the instance is held for moments only. A forked child
 * has none and may make its own. */

/* Makes an implementation: its reference, or NULL with `err` filled in. `args` is what pdk_default_with was given. */
typedef pdk_impl *(*pdk_constructor)(void *arg, const void *args, pdk_error *err);
/* What makes the instance, instead of what the configuration names; NULL = the configuration again. */
PDK_API void pdk_set_constructor(pdk_constructor make, void *arg);
/* Adds (or replaces) an implementation that option `use` of a configuration may name. "paddock" is ours. */
PDK_API int pdk_add_constructor(const char *name, pdk_constructor make, void *arg, pdk_error *err);

/* The default instance: a reference (pdk_impl_unref), or NULL with `err`. Makes it when there is none: by the constructor,
 * else by the configuration, the file that the environment's PADDOCK_CONFIG names (unset: all defaults). Two threads that
 * make one at once get the same; the other one is shut down. Waits: for the making, never for another thread's. */
PDK_API pdk_impl *pdk_default(pdk_error *err);
/* The same with arguments for the making, which are not looked at when there is one: `config_file` NULL = as above. */
PDK_API pdk_impl *pdk_default_with(const char *config_file, const void *args, pdk_error *err);
PDK_API pdk_impl *pdk_default_peek(void);           /* a reference, or NULL: never makes one */
/* Makes `impl` the default (a reference of its own; NULL = none). The former one goes on for those who have it: it is neither
 * reset nor shut down; its holders are forgotten, unless it is the same one. */
PDK_API void pdk_set_default(pdk_impl *impl);
/* Detaches the instance, then forgets its holders, then resets it. The next pdk_default makes a new one. */
PDK_API void pdk_reset_default(void);
/* The same with its shutdown. -1: something could not be stopped; it is detached all the same, so who may want to try again
 * (pdk_impl_shutdown) takes a reference before. */
PDK_API int pdk_shutdown_default(pdk_error *err);

#ifdef __cplusplus
}
#endif
#endif
