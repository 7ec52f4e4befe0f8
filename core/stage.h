/* stage.h -- a root file system that a child of root builds in a mount namespace of its own, before it gives its rights up.
 *
 * Why not leave it to bubblewrap: it reads the whole mount table for each bind (0.07 ms each, half of a sandbox's start),
 * and it runs as the unprivileged user, who may not reach a source below a directory that is closed to it.
 *
 * The tree appears at PDK_STAGE_DIR, in that child and its descendants only.
 */
#ifndef PDK_STAGE_H
#define PDK_STAGE_H

#include <stdbool.h>
#include <stddef.h>

#define PDK_STAGE_DIR "/tmp" /* what the host has there is out of the child's sight */
#define PDK_STAGE_MAX 96     /* operations */

typedef enum pdk_stage_kind {
    PDK_STAGE_ROOT,   /* the first one: a tmpfs with the options in `text` */
    PDK_STAGE_FOLDER, /* mode; one that is there already is fine */
    PDK_STAGE_LINK,   /* to `text` */
    PDK_STAGE_FILE,   /* with `len` bytes of `text`, mode 0644 */
    PDK_STAGE_NODE,   /* a character device like the host's `text`, which has the numbers `major`, `minor` */
    PDK_STAGE_TMPFS,  /* on a folder that is there, with the options in `text` */
    PDK_STAGE_PTS,    /* a devpts of its own on a folder that is there */
    PDK_STAGE_TREE,   /* what `fd` names (or, when that is -1, the host's `text`) with all that is mounted below it */
    PDK_STAGE_SEAL,   /* the mount at this path becomes read-only */
} pdk_stage_kind;

/* Trees come after everything that makes folders. A tree's target is resolved without following links, and is made only
 * in file systems that the stage made itself: nothing of the host is ever created, whatever a source holds. */
typedef struct pdk_stage_op { /* strings are the caller's */
    pdk_stage_kind kind;
    const char *path;   /* begins with PDK_STAGE_DIR */
    const char *parent; /* of a tree: its target's folder below PDK_STAGE_DIR ("." for itself), and the name in it */
    const char *name;
    const char *text;
    size_t len;
    int fd;
    bool read_only;
    unsigned mode, major, minor;
} pdk_stage_op;

/* Runs in a clone that shares the host's memory: raw system calls only. false: *failed says what, errno why. */
bool pdk_stage_run(const pdk_stage_op *ops, size_t n, const char **failed);

#endif
