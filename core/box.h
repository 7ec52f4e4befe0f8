/* box.h -- one holder's grip on one sandbox; shared by box.c (the grip, files), exec.c (commands) and async.c (both,
 * submitted) only. */
#ifndef PDK_BOX_H
#define PDK_BOX_H

#include "core.h"

struct pdk_box { /* fixed at birth, but for `released` */
    pdk_runtime *rt;
    char id[64];
    char *generation;       /* NULL = the engine has none */
    char *holder;           /* NULL = none */
    char *user, *thread;    /* NULL = unknown */
    size_t user_len, thread_len;
    const char *source;
    int64_t token;
    uint64_t incarnation;
    bool park_on_release;
    atomic_bool released;   /* or a release of it is under way */
    atomic_bool freed;      /* its owner has */
    atomic_int refs;        /* its owner's, and those of operations in flight; the memory goes with the last one */
    char text[];            /* what its strings point to */
};

pdk_box *pdk_box_ref(pdk_box *box);
/* The release itself, for whoever has set `released`. */
int pdk_box_release(pdk_box *box, pdk_error *err);

/* Arguments of file calls. */
int pdk_path_check(const char *path, size_t len, pdk_error *err);
int pdk_size_check(const char *path, size_t path_len, size_t len, pdk_error *err); /* of what is to be written */

/* Begins an operation on the box: *client is a reference, the sandbox cannot be parked or stopped meanwhile.
 * -1: closed (released), lost, being_destroyed. */
int pdk_box_begin(pdk_box *box, pdk_client **client, pdk_error *err);
/* Ends it; parks when the last holder has left meanwhile. */
void pdk_box_end(pdk_box *box, pdk_client *client);
/* The guest says that a newer owner has it, or that it is doomed: this holder's grip is gone. `why`: its error. */
void pdk_box_mark_lost(pdk_box *box, const pdk_error *why);
/* The tracked entry behind the box, or NULL when it is another incarnation by now. */
pdk_entry *pdk_box_entry(pdk_runtime *rt, pdk_box *box) PDK_REQUIRES(rt->pool.registry);

#endif
