/* core.h -- the inside of a runtime, shared by runtime.c, acquire.c, fence.c, reaper.c, box.c and nobody else. */
#ifndef PDK_CORE_H
#define PDK_CORE_H

#include "journal.h"
#include "lease.h"
#include "log.h"
#include "pool.h"
#include "runtime.h"
#include "serial.h"

typedef struct pdk_config { /* fixed at open; durations in seconds */
    pdk_pack options;       /* all of it, normalized */
    char *state_dir, *data_dir, *user; /* NULL = none */
    char scope[160];
    int64_t workers; /* ceiling of threads for asynchronous operations */
    double idle_timeout, ttl, renew_interval, reap_interval, orphan_ttl, ready_timeout, ready_interval, discover_timeout,
        stop_timeout, command_timeout, health_ttl;
    int64_t replicas, max_sandboxes; /* max_sandboxes < 0 = no cap */
    bool threads;
} pdk_config;

typedef struct pdk_probes { /* probe.c: what the deployment said that it can do */
    pdk_mutex lock;         /* guards the rest */
    pdk_cond ended;         /* a probe is over, however */
    bool in_flight;
    bool known;             /* `answer` is one */
    bool failed;            /* the last probe */
    uint64_t rounds;        /* probes that are over */
    pdk_pack answer;
    pdk_ns good_until, retry_at; /* runtime clock */
} pdk_probes;

typedef struct pdk_sink {
    pdk_event_sink fn;
    void *ctx;
} pdk_sink;

struct pdk_runtime {
    pdk_config config;
    char id[40];            /* of this instance, fixed at birth */
    pid_t pid;              /* that opened it: in a forked child everything answers `closed` */
    pdk_clock *clock;
    pdk_log *log;
    pdk_script *script;
    pdk_policies *policies;
    pdk_iface *backend;
    bool fenced;            /* the backend's sandboxes check tokens themselves */
    bool stops_at_once;     /* a stop that the backend was asked for has acted, or never will, once the asker is dead */
    bool watches;           /* it lives in the universe and has a `watch`, and there are threads */
    atomic_bool watch_ends; /* ends that thread's wait */
    char backend_name[40];
    pdk_pack policy_base;   /* the runtime's own image, environment, limits, network for requirements */
    pdk_lease *lease;
    pdk_journal *journal;
    pdk_serial *serial;
    struct pdk_ops *ops;    /* what was submitted; its own lock */
    pdk_pool pool;          /* its own lock */
    pdk_probes probes;      /* likewise */
    struct acq *making;     /* the registry's: acquires that have their id's turn */
    int record_fd;          /* of state_dir/runtimes/<pid>.<id>.json, locked while we live; -1 */
    char *record_path;

    pdk_mutex lock;         /* guards what follows */
    pdk_cond wake;          /* the background threads, and who waits for calls in flight */
    atomic_bool closing;    /* shutdown has begun: no new calls but shutdown */
    bool closed;            /* shutdown or reset is done */
    bool stop_threads;
    bool shutting;          /* one shutdown at a time */
    bool lease_closed;
    int calls;              /* in flight */
    bool reaper_runs, renewer_runs;       /* not through yet */
    bool reaper_started, renewer_started; /* to be joined */
    bool watcher_runs, watcher_started;   /* likewise, where the backend has a `watch` */
    pdk_thread watcher;
    struct pdk_orphan *orphans;          /* unowned sandboxes seen by reconcile, since when; reconcile's own */
    bool reconciling;                    /* one reconcile at a time */
    pdk_thread reaper, renewer;
    pdk_upkeep upkeep;            /* fixed; for waits, when there are no threads */
    pdk_ns next_reap, next_renew; /* runtime clock; for tick */
    pdk_ns pass_ended, pass_monotonic, pass_boottime; /* when the last pass was over, on three clocks; 0 = none yet */
    pdk_sink sinks[8];
    size_t sink_count;
};

/* Brackets a public call: -1 and `closed` after shutdown and in a forked child. */
int pdk_call_enter(pdk_runtime *rt, pdk_error *err);
/* The same for calls that only look: also while a shutdown is under way. */
int pdk_look_enter(pdk_runtime *rt, pdk_error *err);
void pdk_call_leave(pdk_runtime *rt);
static inline void pdk_call_leave_auto(pdk_runtime **rt)
{
    if (*rt != NULL)
        pdk_call_leave(*rt);
}
#define PDK_CALL(rt, err, failed) PDK_CALL_BY(pdk_call_enter, rt, err, failed)
#define PDK_LOOK(rt, err, failed) PDK_CALL_BY(pdk_look_enter, rt, err, failed)
#define PDK_CALL_BY(enter, rt, err, failed)                                                                  \
    __attribute__((cleanup(pdk_call_leave_auto))) pdk_runtime *pdk_call_rt = NULL;                           \
    if (enter((rt), (err)) < 0)                                                                              \
        return failed;                                                                                       \
    pdk_call_rt = (rt);                                                                                      \
    (void)pdk_call_rt

/* One event: to the log, and to whoever listens. Strings may be NULL. No lock may be held. */
void pdk_emit(pdk_runtime *rt, pdk_log_level level, const char *event, const char *id, const char *generation,
              const char *reason, const pdk_error *why);

/* The same for an event about a span of time, in a field `seconds`. */
void pdk_emit_seconds(pdk_runtime *rt, pdk_log_level level, const char *event, const char *reason, double seconds);

/* The clock that leases run out on: it counts while the machine sleeps. */
pdk_ns pdk_lease_now(pdk_runtime *rt);

/* `limit`, or where the runtime has no threads and `limit` no upkeep yet: `own`, which is the same and renews what is due while
 * somebody waits under it. */
const pdk_limit *pdk_limit_keeping(pdk_runtime *rt, const pdk_limit *limit, pdk_limit *own);

/* The limit of one operation from now on; timeout 0 = none. */
pdk_limit pdk_limit_for(const pdk_limit *outer, double timeout);

/* ---- engine.c: the backend's functions, with their facts checked ---- */
/* pdk_iface_call with this runtime's log in force. */
int pdk_ask(pdk_runtime *rt, pdk_iface *f, const char *method, const pdk_pack *args, pdk_pack *out, const pdk_limit *limit,
            pdk_error_kind otherwise, pdk_error *err);
int pdk_engine_create(pdk_runtime *rt, pdk_view spec, const char *id, pdk_pack *info, pdk_error *err);
/* doomed: its guest refuses everybody, so that nobody who still has a client of it stands in the way. */
int pdk_engine_destroy(pdk_runtime *rt, pdk_view info, bool full, bool doomed, pdk_error *err);
/* 1 and what is there, 0 = certainly absent, -1 = unknown. info empty = ask by id alone. */
int pdk_engine_inspect(pdk_runtime *rt, const char *id, pdk_view info, pdk_pack *out, pdk_error *err);
int pdk_engine_discover(pdk_runtime *rt, const char *id, pdk_pack *info, pdk_error *err); /* 1, 0, -1 */
int pdk_engine_alive(pdk_runtime *rt, pdk_view info, int64_t token, pdk_error *err);      /* 1, 0, -1 = unknown */
int pdk_engine_ready(pdk_runtime *rt, pdk_view info, double seconds, pdk_error *err);     /* 1, 0 = time over, -1 */
int pdk_engine_list(pdk_runtime *rt, pdk_pack *out, pdk_error *err);
int pdk_engine_finish(pdk_runtime *rt, const char *id, pdk_view info, pdk_error *err);
int pdk_engine_probe(pdk_runtime *rt, pdk_pack *out, pdk_error *err); /* a table; for probe.c */
/* Waits for deaths, for at most that many seconds: a list of { sandbox_id, generation, reason }. */
int pdk_engine_watch(pdk_runtime *rt, double seconds, pdk_pack *out, pdk_error *err);
int pdk_engine_close(pdk_runtime *rt, pdk_error *err); /* the runtime is done with it */
int pdk_engine_connect(pdk_runtime *rt, pdk_view info, int64_t token, bool own, pdk_client **out, pdk_error *err);
/* Closes it if nobody did: once. A failure is a warning that names `what`. Takes over the caller's reference. */
void pdk_client_close(pdk_runtime *rt, pdk_client *c, const char *id, const char *what);
/* The same; that it was cancelled is noted in `cancelled` (or NULL). */
void pdk_client_close_noting(pdk_runtime *rt, pdk_client *c, const char *id, const char *what, pdk_error *cancelled);
/* Steps that are each tried, whatever became of those before: the first cancellation is what their caller is told, and a later one
 * becomes its cause. `later` of another kind, or `first` NULL: nothing. */
void pdk_note_cancelled(pdk_error *first, pdk_error *later);
int pdk_client_fence(pdk_runtime *rt, pdk_client *c, int64_t token, pdk_error *err);
int pdk_client_doom(pdk_runtime *rt, pdk_client *c, int64_t expected, int64_t token, pdk_error *err);
size_t pdk_decimal(char to[24], int64_t n); /* its length */
/* Fields of an info. */
const char *pdk_info_str(pdk_view info, const char *key); /* or NULL */
int64_t pdk_info_token(pdk_view info);                    /* 0 = none; accepts a decimal string */

/* ---- fence.c ---- */
typedef enum pdk_teardown_result {
    PDK_TD_ERROR = -1,
    PDK_TD_REFUSED = 0,  /* nothing was stopped: `why` says what stands in the way */
    PDK_TD_REPLACED = 1, /* another generation has taken the id: it was not touched */
    PDK_TD_DONE = 2      /* confirmed absent */
} pdk_teardown_result;
typedef struct pdk_teardown {
    const char *id;
    const char *reason;     /* for events: "destroy", "idle", "evicted", "replaced", ... */
    pdk_view info;          /* of a sandbox that is not tracked; empty = the tracked one */
    bool ignore_holders;    /* it is dead, or the runtime shuts down */
    bool full;              /* helpers too */
    bool retire;            /* nothing is known but that the journal has records of the id: look, and stop what is recorded */
    bool dirty;             /* must not serve again: journal before the stop */
    uint64_t incarnation;   /* 0, or: only this one */
    int64_t fenced_with;    /* with `info`: a token of ours that its guest may have seen since; 0 = none */
    bool (*still)(const pdk_entry *e, void *ctx); /* NULL, or the caller's test, under the registry lock */
    void *ctx;
    char why[40];           /* out, of REFUSED: "holders", "reserved", "used", "peer", "unavailable", "taken";
                               of one that is not tracked also "busy": see pdk_turn_for_teardown */
} pdk_teardown;
/* The one path by which anything is ever stopped. */
pdk_teardown_result pdk_fence_teardown(pdk_runtime *rt, pdk_teardown *td, pdk_error *err);
/* runtime.c: the turn of an id that is not tracked here, so that no acquire of it is half-way, in this process or another, while it
 * is torn down. Who has its lease may be at work on it for as long as an engine takes, or be stopped: that is not waited for, nor
 * is who keeps the turn for longer than stop_timeout. 1 = entered, 0 = not (why[40]: "peer", "busy"), -1 = error. */
int pdk_turn_for_teardown(pdk_runtime *rt, const char *id, pdk_turn *turn, char *why, pdk_error *err);
/* After PDK_TD_REPLACED: what was to be stopped again is gone, and the tracked entry with it. `incarnation` 0 = whichever. */
void pdk_fence_forget_replaced(pdk_runtime *rt, const char *id, uint64_t incarnation);

/* ---- acquire.c: an acquire that takes no thread while it waits ---- */
typedef struct pdk_acquiring pdk_acquiring;
typedef struct pdk_acquire_calls { /* what its owner wants to be asked and told; `ctx` is handed to each */
    /* Its turn has come, or there is nothing to wait for any longer: step it. Once per wait; under the serializer's lock, on any
     * thread: it may only enqueue. */
    void (*granted)(void *ctx);
    /* NULL, or: asked once, when the sandbox is at hand and before any turn is given back. true = from here on it is the caller's
     * and can be cancelled no more; false = it was cancelled: it is released for its holder. No lock is held. */
    bool (*keep)(void *ctx);
    void *ctx;
} pdk_acquire_calls;
/* Checks and copies what is asked for. Never blocks, asks no policy, takes no turn. `spec->timeout` is checked and nothing else:
 * the deadline is its owner's, who cancels. `cancelled` (NULL = cannot be) is looked at between steps and lives as long as this.
 * NULL: invalid_argument, no_memory, closed. */
pdk_acquiring *pdk_acquire_begin(pdk_runtime *rt, const pdk_acquire_spec *spec, atomic_bool *cancelled,
                                 const pdk_acquire_calls *calls, pdk_error *err);
/* Asks for the identity's turn; once, before the first step. 1 = step it, on a thread that may block; 0 = it waits: `granted`
 * will be called, also before this returns; -1 = closed, no_memory. Never blocks. */
int pdk_acquire_ask(pdk_acquiring *a, pdk_error *err);
/* Does what can be done now; blocks, and calls the engine, stores and policies, under no limit: what has started is drained.
 * 1 = *out is the caller's; -1 = failed, or cancelled: what was left to do for that is done; 0 = waits: step again when `granted`
 * was called, which may be before this has returned. After 1 and -1 all turns are given back. One thread at a time. */
int pdk_acquire_step(pdk_acquiring *a, pdk_box **out, pdk_error *err);
/* Ends one that is not being stepped: it has left every queue and given its turns back, `granted` will not be called any more (a
 * call under way is over), and a later step answers `cancelled` without doing anything. false = it is being stepped, and that step
 * sees `cancelled` when that was set before; or it is over. It ends once: by one true from here, or by one 1 or -1 from a step.
 * Never blocks. */
bool pdk_acquire_abandon(pdk_acquiring *a);
/* Frees it, when no call of it is under way; abandons it first if it is not over. NULL is fine. */
void pdk_acquire_end(pdk_acquiring *a);
/* What is required, in place of what the request said; before the first step. It lives as long as this. */
void pdk_acquire_require(pdk_acquiring *a, pdk_view requirements);
/* Gives back a result that its caller has not taken after all. */
void pdk_acquire_undo(pdk_acquiring *a, pdk_box *box);
const char *pdk_acquire_id(const pdk_acquiring *a); /* of its sandbox; "" as long as the policy was not asked. Its stepper only */
/* Somebody wants the sandbox of that id (NULL = every one) gone: an acquire that is about to create it, or waits until it is
 * ready, gives up and takes back what it has made. Never blocks. */
void pdk_acquire_unwanted(pdk_runtime *rt, const char *id);

/* ---- runtime.c ---- */
/* One line: what a shutdown that goes on has still to do. Waits for nothing. */
void pdk_runtime_left(pdk_runtime *rt, char *text, size_t size);

/* ---- acquire.c / holders.c ---- */
/* Parks or recycles what its last holder has left; never fails, what goes wrong is logged. */
void pdk_park_or_recycle(pdk_runtime *rt, const char *id, uint64_t incarnation);
/* The same; the cancellation of one of its steps is noted in `cancelled` (or NULL), after the others were tried. */
void pdk_park_or_recycle_noting(pdk_runtime *rt, const char *id, uint64_t incarnation, pdk_error *cancelled);
pdk_box *pdk_box_new(pdk_runtime *rt, const pdk_entry *e, const char *holder, const char *source, bool park_on_release)
    PDK_REQUIRES(rt->pool.registry);
void pdk_box_drop(pdk_box *box); /* gives a reference, the owner's or another, back; its holder stays bound. NULL is fine */
void pdk_put_identity(pdk_pack *p, pdk_mark *m, const pdk_entry *e); /* key identity, when known */
void pdk_put_who(pdk_pack *p, pdk_mark *m, const pdk_identity *who); /* likewise; NULL = unknown */

int pdk_check_id(const char *id, pdk_error *err); /* of a caller: invalid_argument unless it can be a sandbox id */

/* reuse.decide, with the id in its error. */
int pdk_ask_reuse(pdk_runtime *rt, const pdk_reuse_facts *facts, pdk_verdict *verdict, pdk_error *err);

/* ---- stopall.c ---- */
/* Calls fn(ctx, i) for each i below n, in this order, and returns when all have returned: up to 16 at once where the runtime has
 * threads, on the caller's and on others that end with it; one after the other where there can be none. */
void pdk_at_once(pdk_runtime *rt, size_t n, void (*fn)(void *ctx, size_t i), void *ctx);
/* Tears down all that is tracked; the first failure is kept in `err`. Returns how many are left. What calls in flight are at work
 * on is left to them, and not counted, unless there are none any more (`drained`). */
size_t pdk_stop_all(pdk_runtime *rt, bool drained, pdk_error *err);

/* ---- probe.c ---- */
void pdk_probes_init(pdk_probes *p);
void pdk_probes_free(pdk_probes *p);
/* What the deployment can do: 0 and a table in `out`, or -1 = unknown. `bypass`: do not take a kept answer. *fresh: it was asked just
 * now, by this caller or by one whom this one waited for. */
int pdk_probe(pdk_runtime *rt, bool bypass, pdk_pack *out, bool *fresh, pdk_error *err);
/* The kept answer, if there is one that is good now; asks nobody. */
bool pdk_probe_peek(pdk_runtime *rt, pdk_pack *out);

/* ---- trial.c ---- */
/* Asks reuse.decide, idle_timeout, evict and network.decide about an invented sandbox; -1 = the first wrong answer. */
int pdk_policies_try(pdk_runtime *rt, const char *id, const pdk_identity *who, pdk_view requirements, pdk_error *err);

/* ---- config.c ---- */
int pdk_config_read(pdk_config *c, pdk_view options, pdk_pack *policy_base, pdk_error *err);
void pdk_config_free(pdk_config *c);
int pdk_state_dir_make(pdk_runtime *rt, pdk_error *err); /* 0700, and this runtime's record in it */
bool pdk_state_dir_shared(pdk_runtime *rt); /* whether another runtime, of any process, has a record there and lives */
void pdk_state_dir_sweep(pdk_runtime *rt); /* what killed runtimes left there; their leases end */
void pdk_state_dir_leave(pdk_runtime *rt);

/* ---- scope.c ---- */
/* Option `scope`, else the engine: two engines have different sandboxes of one id. For stores within a state directory. */
const char *pdk_store_scope(pdk_runtime *rt);
/* The same for a store of many machines: sandboxes that are processes also live in one boot of one machine, and are known through
 * one state directory. For other engines it is `scope` that says which runtimes share one. */
int pdk_store_scope_of_machine(pdk_runtime *rt, char *out, size_t size, pdk_error *err);

/* ---- mounts.c ---- */
/* Carries out what mounts.compose answered, then the option `mounts` (extra): checks roots, makes directories, sets modes,
 * leaves out what is not there, the whole of an optional group of which one failed, and configured mounts where the policy wants
 * none ({ exclude = }); no source may hold the state directory (NULL = none), or lie in it. `out` gets the list for the backend's spec, each target once; what was dropped goes to `log` (or NULL). A
 * failure has made nothing. */
int pdk_mounts_prepare(pdk_view composed, pdk_view extra, pdk_view roots, const char *state_dir, pdk_log *log, pdk_pack *out,
                       pdk_error *err);

/* ---- reaper.c ---- */
int pdk_reap(pdk_runtime *rt, pdk_error *err);      /* one pass */
/* Around a pass, whoever makes it: begin says, by one event clock_gap, that far more time than planned went by since the last
 * end: the machine slept, or this process stood still. */
void pdk_pass_begin(pdk_runtime *rt);
void pdk_pass_end(pdk_runtime *rt);
int pdk_renew(pdk_runtime *rt, pdk_error *err);     /* one pass; says when the next one is due */
bool pdk_stopping(pdk_runtime *rt);                 /* the background threads are to end */
void pdk_keep_guests(pdk_runtime *rt, pdk_ns until); /* contact.c: speaks to warm guests, on the runtime's clock until `until` */
/* Asks the store about a tracked sandbox: true = a peer has taken it, and it was forgotten here; nothing was stopped. */
bool pdk_forget_lost(pdk_runtime *rt, const char *id);
/* reconcile.c: one pass over what the engine runs and nobody owns. */
int pdk_reconcile(pdk_runtime *rt, pdk_error *err);
void pdk_reconcile_forget(pdk_runtime *rt); /* frees what it remembers between passes */
void pdk_upkeep_init(pdk_runtime *rt); /* once its stores are open */
/* watch.c: the thread that hears of deaths. Start: 0 or errno. End only asks it to; pdk_threads_stop waits. */
int pdk_watch_start(pdk_runtime *rt) PDK_REQUIRES(rt->lock);
void pdk_watch_end(pdk_runtime *rt);
int pdk_threads_start(pdk_runtime *rt, pdk_error *err);
int pdk_threads_stop(pdk_runtime *rt, pdk_error *err);
/* Asks the policy when an unheld sandbox has idled for too long, and puts it on the heap. */
void pdk_ask_idle(pdk_runtime *rt, const char *id, uint64_t incarnation);
/* Frees room before a create (rows N4, N5); counts the create in. capacity_exhausted when there is none. */
int pdk_make_room(pdk_runtime *rt, pdk_error *err);
void pdk_room_done(pdk_runtime *rt); /* the create is over, however */
bool pdk_idle(const pdk_entry *e, pdk_ns now); /* beyond its limit, and unheld */

#endif
