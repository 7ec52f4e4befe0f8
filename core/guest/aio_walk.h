/* aio_walk.h -- directory trees, a slice of a few milliseconds at a time: the guest has one thread, and no listing may keep
 * a fence waiting. Links are reported, never followed; /proc and /sys are not entered from above. */
#ifndef AIO_WALK_H
#define AIO_WALK_H

#include "aio.h"

typedef struct aio_entry { /* valid during the visit */
    const char *path;      /* absolute */
    const char *rel;       /* below the root of the walk */
    const char *name;
    int dir;               /* descriptor of the directory that it stands in */
    struct stat st;        /* of the entry itself, not of what a link leads to */
    int depth;             /* 1 = directly in the root */
} aio_entry;

typedef struct aio_walk_spec {
    void *ctx;
    int max_depth;                               /* directories deeper than that are not entered; 0 = no limit */
    bool hidden;                                 /* enter and report names that begin with a dot */
    bool (*visit)(void *ctx, const aio_entry *); /* false = enough */
    bool (*more)(void *ctx);                     /* NULL, or a step of work on the last visit: true = again */
    void (*done)(void *ctx, guest_req *req);     /* answer, and free ctx */
    void (*drop)(void *ctx);                     /* the client is gone: free ctx */
} aio_walk_spec;

/* Walks through `root` (a descriptor, taken; -1 = nothing to visit, only `more`) at `path`. */
void aio_walk_start(guest_req *req, const char *path, int root, const aio_walk_spec *spec);
bool aio_glob_any(const json_t *globs, const char *path); /* whether it fits any pattern of an AIO_LIST */

#endif
