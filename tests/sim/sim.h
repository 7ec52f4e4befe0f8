/* sim.h -- seeded schedules: the real core, Lua included, on fibers under a scheduler whose every choice comes from a seed.
 *
 *   arena.c     malloc at a fixed address; the snapshot that each schedule starts from
 *   fibers.c    core/sync.h on fibers: the scheduler, virtual time
 *   world.c     what would be outside: the engine and its guests, the ownership store, the journal
 *   pods.c      a provisioner and its Pods, for the real backend of that name
 *   files.c     a disk under the core's own journal: what the crash of a machine loses of it
 *   wire.c      requests to that world and their answers, as the core sees them: delays, errors, lost answers, crashes
 *   check.c     what must hold, after every step
 *   scenario.c  who does what in one schedule: clients, trouble, recovery
 *   acts.c      calls as operations, on the runtime's own workers; and who cancels them, when
 *   main.c      seeds, workers, the trace
 *   mutants, mutate.lua   faults of the core that the schedules must find
 *
 * Nothing here may depend on anything but the seed: no time, no addresses that the loader chose, no environment.
 */
#ifndef SIM_H
#define SIM_H

#include "core.h"

enum { MAX_INST = 4, MAX_IDS = 3, MAX_GENS = 64, MAX_CLIENTS = 192, MAX_FIBERS = 64, MAX_LATE = 32 };

#define MS  (INT64_C(1000000))
#define SEC (PDK_NS_PER_S)
#define TTL 10 /* seconds; of every ownership lease here */

/* ---- fibers.c ---- */
typedef struct inst inst;
typedef enum fstate { F_FREE, F_READY, F_LOCK, F_COND, F_SLEEP, F_JOIN, F_DONE } fstate;
typedef struct act act;
typedef struct fiber {
    void *sp;
    fstate state;
    bool started, detached, signalled, timed_out;
    int id;
    inst *in; /* NULL = the scenario's own */
    char name[20];
    void *(*fn)(void *);
    void *arg;
    pdk_mutex *mutex;     /* F_LOCK, F_COND */
    pdk_cond *cond;       /* F_COND */
    pdk_ns deadline;      /* F_COND, on the instance's monotonic clock */
    pdk_ns wake;          /* F_SLEEP, world time */
    struct fiber *target; /* F_JOIN */
    pdk_mutex *held[8];
    int held_count;
    uint32_t priority;
    const pdk_teardown *td; /* the teardown that it is in */
    pdk_ns td_since;
    pdk_ns looked_at;  /* when it has asked the engine last what there is */
    bool doom_tried;   /* in it */
    bool doom_refused; /* in it: somebody has taken the sandbox, says its guest */
    int created;       /* generation that the acquire under way has made, and not yet handed out or taken back; -1 */
    bool del_live;     /* its `del` lease was live when its last request was answered */
    pdk_ns call_start; /* world time at which the client's call began */
    act *act;          /* the operation that it works for, or submits; NULL */
    int acquires;      /* the identity whose acquire it carries out, from 1; 0 = none */
    bool asking;       /* a request is under way */
    int posts;         /* sent by the create that it carries out */
    unsigned char tls[256];
} fiber;
extern fiber fibers[MAX_FIBERS];
extern fiber *me;  /* the one that runs; NULL = the driver */
extern pdk_ns now; /* world time */

fiber *fiber_start(inst *in, const char *name, void *(*fn)(void *), void *arg);
void fibers_init(void);
void fibers_drop(const inst *in); /* all of a crashed instance */
void fibers_run(bool *until);     /* until *until, on the driver's stack */
void point(void);                 /* a place where the scheduler may choose another fiber */
void wait_for(pdk_ns duration);   /* of world time */
pdk_ns mono_of(const inst *in);
uint64_t rnd(void);
uint32_t below(uint32_t n); /* 0 .. n-1 */
bool chance(uint32_t num, uint32_t den);
void seed_random(uint64_t seed);

/* ---- world.c ---- */
typedef struct gen { /* one generation of a sandbox in the engine */
    bool present, healthy, ready, doomed, told_dead, self_died;
    int id;
    int mode;  /* what it was created for */
    char user; /* and for whom */
    int64_t token, doom_expected, doom_token;
    pdk_ns fenced_at;
    bool sticky; /* stops are accepted and nothing happens */
    int pod;     /* of a Pod: its state, of pods.c */
    pdk_ns turns_at, asked_at; /* when that state ends by itself; since when a delete is accepted; 0 = never */
    pdk_ns born;
} gen;
typedef struct client {
    int gen;
    int in;
    int64_t token;
    bool own, given; /* given = the core has got it */
    int closed;
} client;
typedef struct lease {
    bool there, del;
    int owner;
    int64_t token;
    pdk_ns until;
    int last_owner; /* who got the last token; -1 = unknown */
    int64_t last_token;
} lease;
typedef struct grant { /* what the store has told, or would have told, an instance */
    bool there, del;
    int64_t token;
    pdk_ns until, since; /* since = without a gap, under this token */
} grant;
typedef struct record {
    bool there, certain; /* not certain: performed, but its answer was lost */
    int id, gen;         /* gen -1 = unknown */
    pdk_ns since;
} record;

typedef enum opkind {
    OP_CREATE,
    OP_DESTROY,
    OP_INSPECT,
    OP_DISCOVER,
    OP_ALIVE,
    OP_READY,
    OP_LIST,
    OP_FINISH,
    OP_CONNECT,
    OP_FENCE,
    OP_DOOM,
    OP_EXEC,
    OP_OPEN,
    OP_CLOSE_SESSION,
    OP_CLOSE,
    OP_TAKE,
    OP_CLAIM,
    OP_CLAIM_DESTROY,
    OP_RENEW,
    OP_RELEASE,
    OP_OWNER,
    OP_RECORD,
    OP_HAS,
    OP_RETIRE,
    OP_RECORDS,
    OP_KINDS
} opkind;
extern const char *const op_names[OP_KINDS];
typedef struct op { /* a request and its answer; complete in itself, so that the world may carry it out later */
    opkind kind;
    int in;                    /* who asks */
    int id, gen, mode, client; /* gen -1 = none given */
    char user;
    int64_t token, expected;
    bool covered;   /* a stop: whoever asked held a live `del` lease then */
    bool by_itself; /* a stop that nobody has asked for */
    bool own;
    bool remote, named; /* a request to the provisioner; a delete that says which Pod it means */
    int route;
    pdk_ns limit; /* its own; 0 = the usual one of its kind */
    /* the answer */
    int rc; /* 1, 0, -1 */
    pdk_error_kind error;
    const char *reason;
    int64_t out_token;
    int out_gen;
    pdk_renewal renewal;
    bool owner_del, killed;
    int owner;
    uint64_t seen; /* generations, a bit each */
    int status, pod; /* of HTTP; the state of the Pod that was there */
} op;

typedef struct world {
    gen gens[MAX_GENS];
    int gen_count;
    client clients[MAX_CLIENTS];
    int client_count;
    lease leases[MAX_IDS];
    grant grants[MAX_INST][MAX_IDS];
    int64_t last_token;
    pdk_ns wiped; /* when the store lost its state last; 0 = never */
    record journal[MAX_GENS];
    int journal_count;
    struct {
        pdk_ns at;
        op o;
    } late[MAX_LATE];
    int late_count;
    int turns[MAX_INST][8]; /* same machine: row 0 only. 0 = free, else 1 + fd */
    int64_t turn_offsets[MAX_INST][8];
} world;
extern world W;

void perform(op *o);
void check_retire(const op *o);
pdk_ns late_next(void);
void late_run(void);

/* ---- scenario.c ---- */
struct inst {
    int index;
    char name[2];
    pdk_runtime *rt;
    pdk_script *script;
    pdk_journal *files; /* of the disk */
    pdk_iface *engine, *remote; /* the backends: of wire.c, of pods.c */
    bool active, dead, closing, closed;
    bool suspended; /* with its machine, while it is paused: its monotonic clock stands still */
    pdk_ns paused_until, mono_off, boot_off, wall_off;
    int dispatching;        /* clients that are in pdk_dispatch */
    bool letting_go;        /* one frees a handle whose callback may be due: its host sees to it that nobody dispatches then */
    pdk_ns last_use[MAX_IDS]; /* world time of the last use of an id through this instance */
};
extern inst insts[MAX_INST];
typedef struct plan { /* what the seed has chosen */
    int insts, ids, clients, ops;
    bool shared_turns, unique, other_info, fenced, regrant;
    bool files; /* the journal is on the disk that they share */
    bool remote; /* sandboxes are Pods */
    bool spurious;
    int switch_mode;                 /* 0..3: how eagerly fibers are switched; 4: priorities */
    uint32_t fault_rate;             /* 1 in n requests; 0 = never */
    int focus;                       /* an opkind that fails more often; OP_KINDS = none */
    uint32_t pause_rate, stall_rate; /* 1 in n points; 0 = never */
    uint32_t slow_rate;              /* 1 in n requests takes very long */
    uint32_t crash_rate;             /* 1 in n requests */
    uint32_t cancel_rate;            /* 1 in n calls; 0 = never */
    bool submits;                    /* calls are submitted rather than made */
    int crashes;                     /* left */
    bool healed;                     /* trouble is over */
    double idle_timeout;
    int modes;
    int shutdown_of; /* instance that is shut down on the way; -1 */
    int nemesis;     /* deeds of the trouble maker */
} plan;
extern plan P;
void scenario_boot(void); /* on a fiber: opens the runtimes */
void scenario_begin(uint64_t seed);
extern bool scenario_over;
void crash(inst *in, const char *why);
void machine_crash(void); /* of all of them at once, and of what their disk has not been told to keep */

/* ---- acts.c ---- */
struct act { /* one call that can be cancelled */
    inst *in;
    int id, identity;
    char name[8];          /* the holder's, which nobody else uses */
    pdk_op *op;            /* NULL = it runs on its caller's thread, under a limit with `flag` */
    pdk_acquiring *p;      /* of an acquire that was submitted, until it is freed */
    atomic_bool flag;
    bool used, over;       /* the slot; its caller has been told */
    bool deaf;             /* nobody can cancel it */
    int cancelling;        /* who is about to */
    bool cancelled;        /* and it was to be heeded */
    bool late;             /* its caller is told by the deadline, or has not waited: it may still be drained */
    bool begun;            /* it has begun a teardown while it has the id's turn */
    bool cut;              /* it was cancelled when discover answered, with nothing begun: nothing may be begun any more */
    bool owes;             /* it has stopped what it was to replace */
    bool handed, failed;   /* something was handed out for it; its work has failed */
    bool told, done;       /* its callback has begun; has returned */
    int rc;                /* what that was told */
    pdk_error err;
    pdk_box *box;
    pdk_op *left;          /* the handle, for the caller to free */
    pdk_ns began;
    uint32_t cuts[2];      /* in so many points it is cancelled, and once more; 0 = no more */
};
pdk_box *act_acquire(const pdk_acquire_spec *spec, int id, char user, pdk_error *err);
int act_destroy(const char *name, pdk_error *err); /* as pdk_runtime_destroy */
void act_release(pdk_box *box);
int act_shutdown(pdk_runtime *rt, pdk_error *err);
void act_cancel_any(void);
void act_point(void);               /* of the fiber that runs */
void act_asks(const op *o);         /* a request begins; */
void act_asked(const op *o);        /* its answer is there */
void act_tears_down(void);
void act_tore_down(const pdk_teardown *td, pdk_teardown_result r);
void act_says(const char *event);
void act_handed_out(void);
int act_exec(pdk_box *box, const pdk_exec_spec *spec, pdk_result *out, pdk_error *err); /* as pdk_box_exec */
void acts_check_end(void);          /* nobody waits any more: nothing that was cancelled is held */

/* ---- pods.c ---- */
void pods_read_table(void);
void pods_backend(lua_State *L, inst *in);
void pods_perform(op *o);
pdk_ns pods_next(void); /* when a state ends by itself next */
void pods_pass(void);   /* those whose time has come */
void pods_trouble(int g);
void pods_heal(void);
bool pod_ends(int g);

/* ---- files.c ---- */
void files_format(void);
void files_open(inst *in);
void files_close(const inst *in); /* its process has died */
void files_crash(void);
int files_record(op *o, const char *id, const char *generation, const char *why, pdk_error *err);
int files_has(op *o, const char *id, const char *generation, pdk_error *err);
int files_retire(op *o, const char *id, const char *generation, pdk_error *err);
int files_list(op *o, pdk_pack *out, pdk_error *err);

/* ---- wire.c ---- */
void wire_table(lua_State *L, inst *in);
void wire_ask(op *o);
pdk_lease *wire_lease(inst *in);
pdk_journal *wire_journal(inst *in);
void info_generation(char *to, size_t size, int g);
int generation_number(const char *s);
int id_number(const char *s);

/* ---- check.c ---- */
void violation(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
void check_step(void);
void check_stop(op *o, bool issued); /* when it is asked for, and when it takes effect */
void check_claim(int in, int id);
void check_io(const op *o);
void check_exec(const op *o);
void check_end(void);
pdk_entry *peek(inst *in, int id); /* NULL also while somebody is at work on the registry */

/* ---- main.c ---- */
typedef struct persist { /* what outlives a schedule */
    bool trace;
    uint64_t seed, steps, all_steps, switches;
    uint64_t done, acquired, executed, crashes, faults, stops, refused, cancelled;
    char failure[400];
    bool go_on;   /* collect failures */
    bool digests; /* print what each schedule comes to */
    int kinds;
    struct {
        char what[160];
        uint64_t seed, count;
    } kind[64];
} persist;
extern persist *Z;
void trace(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#define TRACE(...) \
    do { \
        if (Z->trace) \
            trace(__VA_ARGS__); \
    } while (0)

/* ---- arena.c ---- */
#define ARENA_BASE  ((char *)0x300000000000)
#define ARENA_SIZE  ((size_t)64 << 20)
#define STACKS_BASE ((char *)0x310000000000)
#define STACK_BYTES ((size_t)512 << 10)
extern bool in_core; /* allocations belong to the schedule */
void arena_map(void);
void snapshot_take(void);
void snapshot_restore(void);

#endif
