/* policy_internal.h -- what the policy*.c files share.
 *
 *   policy.c         the hooks as C functions: what goes in, what may come out
 *   policy_keep.c    answers that are kept, under the facts that they came from
 *   policy_call.c    one protected, budgeted call, and how its failure becomes an error with file and line
 *   policy_load.c    sources and files -> a set of functions; reload; describe
 *   policy_env.c     the sealed environment
 *   policy_ctx.c     the read-only view that scripts get as ctx, and answers back to packs
 *   policy_answer.c  validation of packed answers
 */
#ifndef PDK_POLICY_INTERNAL_H
#define PDK_POLICY_INTERNAL_H

#include "budget.h"
#include "policy.h"
#include <stdatomic.h>

typedef enum pdk_hook {
    PDK_HOOK_DERIVE,
    PDK_HOOK_RESOLVE,
    PDK_HOOK_COMPOSE,
    PDK_HOOK_DECIDE,
    PDK_HOOK_IDLE_TIMEOUT,
    PDK_HOOK_EVICT,
    PDK_HOOK_NETWORK,
    PDK_HOOKS
} pdk_hook;
#define PDK_POLICY_FILES 5
extern const char *const pdk_policy_names[PDK_POLICY_FILES]; /* "identity", ... */
typedef struct pdk_hook_info {
    int file; /* index in pdk_policy_names */
    const char *function;
    bool required; /* a file without it takes the built-in one; where false, the core has an answer of its own */
} pdk_hook_info;
extern const pdk_hook_info pdk_hook_infos[PDK_HOOKS];

typedef struct pdk_policy_fn { /* guarded by the Lua mutex */
    int ref;                   /* LUA_NOREF = the file has no such function */
    int line;                  /* where it is defined, in `path` */
    char *path;                /* owned; a required file's when the function comes from there */
    bool pure;                 /* its file says so: the same ctx gets the same answer */
    uint32_t fields;           /* of ctx that it has looked at */
    int overruns;              /* in a row */
    pdk_ns closed_until;       /* on the runtime's clock; not called before */
} pdk_policy_fn;

typedef struct pdk_policy_set { /* made and freed by policy_load.c; swapped under the Lua mutex */
    pdk_policy_fn fns[PDK_HOOKS];
    char *paths[PDK_POLICY_FILES]; /* owned; what errors call the file */
    bool built_in[PDK_POLICY_FILES];
    uint64_t generation;
} pdk_policy_set;

/* ---- policy_keep.c: what is known when a hook is asked, and the answers that are kept ---- */

enum { /* fields of any hook's ctx */
    PDK_FACT_USER, PDK_FACT_THREAD, PDK_FACT_IDENTITY, PDK_FACT_REQUEST, PDK_FACT_REQUIREMENTS, PDK_FACT_CAPABILITY,
    PDK_FACT_CAPABILITY_FRESH, PDK_FACT_SOURCE, PDK_FACT_INFO, PDK_FACT_ATTESTATION, PDK_FACT_EXPECTED_ID, PDK_FACT_HOLDERS,
    PDK_FACT_IDLE_SECONDS, PDK_FACT_SANDBOX_ID, PDK_FACT_STATE, PDK_FACT_DIFFERS, PDK_FACT_CONFIG, PDK_FACT_NOW,
    PDK_FACT_NAMES
};
#define PDK_FIELDS_UNKNOWN (UINT32_C(1) << 31) /* in a set of fields: others than those */
#define PDK_FIELDS_ALL     UINT32_MAX
uint32_t pdk_field_of(const char *name, size_t len); /* a set of one */
/* Whether an answer that has looked at these may be kept; those that it is kept under. */
bool pdk_fields_keepable(pdk_hook h, uint32_t *fields);

typedef struct pdk_fact { /* borrows all of it */
    uint8_t name;
    enum { PDK_FACT_VIEW, PDK_FACT_INT, PDK_FACT_NUM, PDK_FACT_BOOL, PDK_FACT_STR, PDK_FACT_WHO } kind;
    union {
        pdk_view view;
        int64_t i;
        double num;
        const pdk_identity *who;
        struct {
            const char *str;
            size_t len;
        };
    };
} pdk_fact;
#define PDK_FACTS_MOST 12
typedef struct pdk_facts { /* each name once */
    int count;
    pdk_view beside; /* what the answer depends on besides, that no script sees */
    pdk_fact fact[PDK_FACTS_MOST];
} pdk_facts;
void pdk_facts_pack(const pdk_facts *f, pdk_pack *out); /* as ctx; nil ones left out */
bool pdk_facts_of(pdk_view ctx, pdk_facts *out);        /* false = it has fields of other names */

typedef struct pdk_learned { /* of a call: by what its answer may be kept */
    bool keep;
    uint64_t generation; /* of the set that answered */
    uint32_t fields;
} pdk_learned;

typedef struct pdk_keep pdk_keep;
pdk_keep *pdk_keep_new(void); /* NULL = no memory */
void pdk_keep_free(pdk_keep *k);
size_t pdk_keep_bytes(pdk_keep *k); /* of all keys and answers */
/* Appends the kept answer, when there is one. Any thread. */
bool pdk_keep_find(pdk_keep *k, pdk_hook h, uint64_t generation, const pdk_facts *f, pdk_pack *out);
void pdk_keep_put(pdk_keep *k, pdk_hook h, const pdk_learned *learned, const pdk_facts *f, const void *answer, size_t len);
/* From now on answers of this hook are looked up by these fields. Under the Lua mutex. */
void pdk_keep_learn(pdk_keep *k, pdk_hook h, uint32_t fields);

struct pdk_policies {
    pdk_script *script;       /* retained */
    pdk_clock *clock;         /* borrowed, as is log */
    pdk_log *log;             /* or NULL */
    pdk_pack sources, config; /* fixed at birth */
    pdk_policy_set *set;      /* the Lua mutex: as no policy call gives it up, none is in flight when a set is swapped */
    atomic_uint_least64_t generation; /* of `set`; written under the Lua mutex, read by anyone */
    atomic_uint_least64_t tickets;    /* of reloads, in the order in which they began to read */
    uint64_t loaded_ticket;           /* the Lua mutex; of `set` */
    pdk_keep *keep;                   /* has locks of its own */
};

/* What policy.require finds: the files of one folder, read before the Lua mutex is taken. */
typedef struct pdk_policy_text {
    char *name, *path; /* "identity.lua"; what errors call it */
    char *text;        /* NULL = not readable: */
    const char *why;   /* static */
    size_t len;
} pdk_policy_text;
typedef struct pdk_policy_folder {
    pdk_policy_text *texts;
    size_t count;
} pdk_policy_folder;

typedef struct pdk_policy_call pdk_policy_call;
typedef struct pdk_question { /* one call of a hook, as policy.c asks for it */
    pdk_hook hook;
    pdk_view ctx; /* the packed ctx (a map), or evict's list */
    bool plain;   /* ctx gets no config and no now */
    pdk_learned *learned; /* or NULL: out */
    int results;
    void (*read)(lua_State *L, pdk_policy_call *c, int first); /* takes the results; may raise */
    void (*check)(pdk_policy_call *c);                         /* or NULL; judges what read took, without Lua */
    pdk_pack *answer;                                          /* for read and check */
    void *out;                                                 /* likewise */
} pdk_question;

struct pdk_policy_call {     /* lives on a C stack for one call of a hook, or one load of a file */
    const pdk_question *ask; /* NULL for a load */
    pdk_policies *p;
    pdk_policy_fn *fn; /* of a call */
    const char *what;  /* the function's name, or "loading" */
    const char *path;  /* of the function, or the file that is loaded */
    int line;
    int log_lines;
    bool pure;       /* what it looks at is noted: */
    uint32_t fields; /* of ctx */
    int loaded_ref;                  /* of a load: table of what policy.require has loaded; else LUA_NOREF */
    const pdk_policy_folder *folder; /* of a load: for policy.require */
    pdk_pack now, differs;           /* ctx.now and ctx.differs, made at the first look */
    bool differs_known;
    pdk_budget budget;
    pdk_place place; /* of the error that ended it */
    char wrong[240]; /* set by read or check: what is wrong with the answer */
};

/* ---- policy_call.c ---- */
/* Runs body(L) with the light userdata `c` as its argument, protected, within the budget, in the C locale. Afterwards
 * nothing of it is on L. 0, or -1 and err. */
int pdk_policy_run(lua_State *L, pdk_policy_call *c, lua_CFunction body, const pdk_allowance *allowed, pdk_error *err);
/* Asks the set in force: calls the hook and hands the results to q->read. 1 = done, 0 = the set has no such function,
 * -1 = error. */
int pdk_policy_ask(pdk_policies *p, const pdk_question *q, pdk_error *err);

/* ---- policy_env.c ---- */
/* In a new policies object: metatables. Raises. stack: 0 */
void pdk_policy_env_open(lua_State *L);
/* Whether the error value at index was made by policy.fail; then its message. */
const char *pdk_policy_failure(lua_State *L, int index);
/* Loads and runs a text in a fresh environment. Raises. stack: +1, what it returned */
void pdk_policy_run_text(lua_State *L, const char *path, const char *text, size_t len);

/* ---- policy_ctx.c ---- */
void pdk_policy_ctx_open(lua_State *L);
void pdk_policy_ctx_push(lua_State *L, pdk_policy_call *c); /* the root view. stack: +1, raises */
int pdk_policy_type(lua_State *L); /* type, next, pairs as a policy sees them */
int pdk_policy_next(lua_State *L);
int pdk_policy_pairs(lua_State *L);
/* Packs an answer. 0, or -1 and c->wrong. May raise (the budget); `out` belongs to the caller. stack: 0 */
int pdk_policy_pack_answer(lua_State *L, int index, pdk_policy_call *c, pdk_pack *out);

/* ---- policy_answer.c: packed answers -> normalized packs, or -1 and `wrong` ---- */
typedef struct pdk_wrong { /* where the text about a wrong answer goes */
    char *text;
    size_t size;
} pdk_wrong;
int pdk_answer_requirements(pdk_view answer, pdk_view base, pdk_pack *out, pdk_wrong wrong);
int pdk_answer_mounts(pdk_view answer, pdk_pack *out, pdk_log *log, pdk_wrong wrong);

/* ---- policy_load.c ---- */
void pdk_policy_set_free(pdk_script *s, pdk_policy_set *set);

#endif
