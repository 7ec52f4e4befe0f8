/* acquire.h -- one acquire under way; shared by acquire.c (the steps, and the hand-out) and candidate.c (what is thought of a
 * sandbox that might serve) only. */
#ifndef PDK_ACQUIRE_H
#define PDK_ACQUIRE_H

#include "core.h"

typedef enum found { FAILED = -1, NOTHING = 0, FOUND = 1 } found;

typedef struct acq { /* one acquire; on its caller's stack */
    pdk_runtime *rt;
    const pdk_acquire_spec *spec;
    pdk_identity who;
    bool anonymous;            /* no thread: nothing can find it again */
    char id[64];
    char holder[200];          /* "" = none */
    pdk_pack requirements;
    pdk_box *box;              /* the result */
    pdk_error *err;
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

/* ---- candidate.c. Those that answer `found` have filled a->err when they answer FAILED. ---- */
void pdk_acq_candidate_free(candidate *c);
found pdk_acq_no_memory(acq *a);
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
