/* acquire.h -- one acquire under way; shared by acquiring.c (turns, cancellation, the result), acquire.c (the steps, and the
 * hand-out) and candidate.c (what is thought of a sandbox that might serve) only.
 *
 * Cancelling: a step that has started is drained, and `cancelled` is looked at between steps (pdk_acq_cancelled). From the first
 * teardown for a replacement in the id's turn, or the look for records, on (`drains`), all is one sequence that runs to its end;
 * what it has handed out is then given back by acquiring.c, before any turn is. */
#ifndef PDK_ACQUIRE_H
#define PDK_ACQUIRE_H

#include "core.h"

typedef enum found { FAILED = -1, NOTHING = 0, FOUND = 1 } found;

typedef struct acq { /* one acquire; on its caller's stack, or in a pdk_acquiring */
    pdk_runtime *rt;
    const pdk_acquire_spec *spec;
    pdk_identity who;
    bool anonymous;            /* no thread: nothing can find it again */
    char id[64];
    uint64_t id_hash;          /* of it; but while a predecessor under another id is torn down */
    char holder[200];          /* "" = none */
    pdk_pack requirements;
    pdk_box *box;              /* the result */
    pdk_error *err;
    atomic_bool *cancelled;    /* its caller's; or NULL */
    bool makes;                /* it has the id's turn, and found nothing to reuse */
    bool drains;               /* the sequence has begun that runs to its end, cancelled or not */
    bool bound_before;         /* the holder had this very binding already: it is not given up with a cancelled result */
    atomic_bool unwanted;      /* set under the registry lock: somebody waits to destroy what this makes */
    struct acq *next, *previous; /* registry: of rt->making */
} acq;

typedef struct candidate { /* a sandbox under consideration; its facts as copied at one moment */
    const char *source;
    pdk_pack info;
    pdk_pack capability;       /* after a probe; { unknown = true } when it failed */
    bool capability_fresh;     /* and whether it was asked for this acquire */
    uint64_t incarnation;      /* 0 = not tracked */
    int64_t token;             /* that its guest has seen */
    int holders;
    double idle_seconds;
    bool dirty, retry, checked; /* checked = health known to be good recently */
} candidate;

#define AUTO_CANDIDATE __attribute__((cleanup(pdk_acq_candidate_free))) candidate

/* Whether its caller has gone. */
static inline bool pdk_acq_gone(const acq *a)
{
    return a->cancelled != NULL && atomic_load(a->cancelled);
}

/* ---- acquire.c ---- */
/* L12: a holder's live binding is its answer; it does not move to another identity. Memory only. */
found pdk_acq_bound(acq *a);
/* In the identity's turn: asks what is needed and the id, and reuses what this runtime has. NOTHING = none. */
found pdk_acq_look(acq *a);
/* In the id's turn as well: looks again, discovers, creates. Never NOTHING. */
found pdk_acq_make(acq *a);

/* ---- candidate.c. Those that answer `found` have filled a->err when they answer FAILED. ---- */
void pdk_acq_candidate_free(candidate *c);
found pdk_acq_no_memory(acq *a);
/* Between steps: whether it was cancelled and need not go on; fills a->err then. */
bool pdk_acq_cancelled(acq *a);
/* replacement_deferred with the reason: must not be reused and cannot be replaced now. */
found pdk_acq_deferred(acq *a, const char *reason, const char *why);
found pdk_acq_collision(acq *a);
found pdk_acq_being_destroyed(acq *a);
/* A teardown on the way failed: what that means for the acquire. Unknown facts stay the errors that they are. */
found pdk_acq_explain_failure(acq *a);
/* Tears the candidate down so that the acquire can go on: NOTHING, or FAILED with why it cannot be replaced now. */
found pdk_acq_replace(acq *a, const candidate *c, const char *reason, bool dead, const char *holders_reason);
/* The reuse policy's word, probes answered. 0 or -1. */
int pdk_acq_decide(acq *a, candidate *c, pdk_verdict *verdict);
/* Before a create: where the requirements want to know what the deployment can do (their field `probe`), it is asked, and they are
 * resolved again with its answer. 0, or -1: unknown is not a yes, and nothing is created on a guess. */
int pdk_acq_complete(acq *a);
const char *pdk_acq_text_or(const char *s, const char *otherwise);
found pdk_acq_refused(acq *a, const pdk_verdict *v);
found pdk_acq_policy_defers(acq *a, const pdk_verdict *v);
/* Whether the candidate may serve: FOUND = yes, NOTHING = it was taken down, FAILED. */
found pdk_acq_examine(acq *a, candidate *c);
/* Copies a tracked sandbox's facts; false = no memory. */
bool pdk_acq_snapshot(pdk_runtime *rt, const pdk_entry *e, candidate *c) PDK_REQUIRES(rt->pool.registry);

#endif
