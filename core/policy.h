/* policy.h -- an operator's five policies (identity, requirements, mounts, reuse, network): loading, the sealed
 * environment, budgets, validation of what they answer, atomic reload.
 *
 * Every call runs in the universe under an instruction, a time (10 ms) and a memory budget, never blocks, and never
 * gives the Lua mutex up. Whatever goes wrong is policy_error with file and line; nothing else is affected. A function
 * that overran three times in a row fails closed for a second without being called.
 *
 * A file whose table says `pure = true` gives its word that its functions answer by ctx alone, ctx.now not among it: their answers
 * are kept, each under those fields of ctx that the function has looked at, until the next reload; a hit does not enter Lua.
 *
 * Threads: any. Reload swaps the whole set under a lock of its own; calls in flight end on the set they began with.
 */
#ifndef PDK_POLICY_H
#define PDK_POLICY_H

#include "clock.h"
#include "log.h"
#include "script.h"

typedef struct pdk_policies pdk_policies;

/* Loads a set. `sources`: the packed option `policies`: nil (the defaults built in), a folder's path (files that are
 * missing there are the built-in ones; a folder without any of the five is an error), "builtin:NAME" for a ready-made set, or a map of name -> path or
 * { source =, name = }. `config`: the packed map that is ctx.config. */
pdk_policies *pdk_policies_new(pdk_script *s, pdk_clock *clock, pdk_log *log, pdk_view sources, pdk_view config,
                               pdk_error *err);
void pdk_policies_free(pdk_policies *p);
/* Loads and checks all of it again beside the old set, then swaps, or changes nothing (-1). */
int pdk_policies_reload(pdk_policies *p, pdk_error *err);
uint64_t pdk_policies_generation(pdk_policies *p); /* grows with each reload */
/* For `policy check` and `explain`: appends a list of { name, path or "built in", functions, line } to `out`. */
int pdk_policies_describe(pdk_policies *p, pdk_pack *out, pdk_error *err);

typedef struct pdk_identity { /* borrowed */
    const char *user, *thread;
    size_t user_len, thread_len;
} pdk_identity;

/* identity.derive(ctx{user, thread, config, requirements}). id: 1-63 chars of [a-z0-9-]. Answers are kept per (user,
 * thread, requirements, policy generation) in a bounded cache: a hit does not enter Lua. */
int pdk_policy_derive(pdk_policies *p, const pdk_identity *who, pdk_view requirements, char id[64], pdk_error *err);
/* The bytes of all answers that are kept and of their keys: PDK_REMEMBERED_MAX at most, however many identities there were. */
size_t pdk_policies_remembered(pdk_policies *p);
#define PDK_REMEMBERED_MAX ((size_t)4 << 20)

/* requirements.resolve(ctx{identity{user,thread}, user, thread, request, config, now}) -> validated and packed:
 * { image = string?, env = {string = string}, limits = {memory = bytes?, cpus = number?, pids = int?},
 *   network = string, labels = {string = string}, require = {string = plain}, options = {string = plain}, probe = true? }. `base` has the runtime's own
 * environment, image, limits and network; what resolve leaves nil is taken from it, maps are merged over it. */
int pdk_policy_resolve(pdk_policies *p, const pdk_identity *who, pdk_view request, pdk_view base, pdk_pack *out,
                       pdk_error *err);

/* The same before a create, when the answer had `probe = true`: ctx has `capability` too, what the deployment says that it can do. */
int pdk_policy_resolve_again(pdk_policies *p, const pdk_identity *who, pdk_view request, pdk_view base, pdk_view capability,
                             pdk_pack *out, pdk_error *err);

/* mounts.compose(ctx) -> list of { source, target, read_only, create, if_exists, owner_only }, each field validated;
 * targets absolute and normal, not /, /proc, /sys, /dev nor below the last three; of two on one target the earlier stays
 * (a warning). `ctx`: packed map { identity, sandbox_id, requirements, config added here }. */
int pdk_policy_compose(pdk_policies *p, pdk_view ctx, pdk_pack *out, pdk_error *err);

typedef enum pdk_decision { PDK_REUSE, PDK_REPLACE, PDK_REFUSE, PDK_DEFER, PDK_PROBE } pdk_decision;
typedef struct pdk_verdict {
    pdk_decision decision;
    char code[40];     /* or empty */
    char message[200]; /* or empty */
} pdk_verdict;
/* reuse.decide(ctx); ctx as DESIGN 5 (source, info, attestation, requirements, identity, expected_id, holders,
 * idle_seconds, capability); config and now are added here. */
int pdk_policy_decide(pdk_policies *p, pdk_view ctx, pdk_verdict *out, pdk_error *err);
/* The same from the facts; config, now and differs are added here. Views may be empty. */
typedef struct pdk_reuse_facts {
    const char *source, *expected_id;
    pdk_view info, requirements, capability;
    bool capability_fresh;   /* asked for this very decision, and not taken from memory */
    const pdk_identity *who; /* NULL = unknown */
    int holders;
    double idle_seconds;
} pdk_reuse_facts;
int pdk_policy_reuse(pdk_policies *p, const pdk_reuse_facts *f, pdk_verdict *out, pdk_error *err);
/* ctx.differs of it, for people: nothing is written when there is none. Views may be empty. */
void pdk_reuse_differences(pdk_view requirements, pdk_view attestation, pdk_view capability, pdk_pack *out);
/* reuse.idle_timeout(ctx{sandbox_id, identity, info, requirements, state, idle_seconds, config, now}): seconds; 0 = never. A policy
 * set without the function: config.idle_timeout. */
int pdk_policy_idle_timeout(pdk_policies *p, pdk_view ctx, double *seconds, pdk_error *err);
typedef struct pdk_idle_facts {
    const char *sandbox_id, *state;
    const pdk_identity *who; /* NULL = unknown */
    pdk_view info, requirements;
    double idle_seconds;
} pdk_idle_facts;
/* Whether the answer to these is kept; then that. Asks no script and waits for nothing: the registry
 * may be locked. */
bool pdk_policy_idle_kept(pdk_policies *p, const pdk_idle_facts *f, double *seconds);
/* ctx for them. */
void pdk_policy_idle_ctx(const pdk_idle_facts *f, pdk_pack *ctx);
/* reuse.evict(list of {sandbox_id, identity, idle_seconds, info}) oldest first -> one of their ids; id[0] = 0: none. A set
 * without the function: the first. */
int pdk_policy_evict(pdk_policies *p, pdk_view candidates, char id[64], pdk_error *err);
typedef enum pdk_net_decision { PDK_NET_ALLOW, PDK_NET_DENY, PDK_NET_ASK } pdk_net_decision;
int pdk_policy_network(pdk_policies *p, pdk_view ctx, pdk_net_decision *out, pdk_error *err);

#endif
