/* proc.h -- starting processes so that the host notices nothing, and proving what became of them.
 *
 * A child is made in such a way that the host's wait() and SIGCHLD see nothing of it, with exactly the descriptors that
 * are named, standard streams from /dev/null unless given, default signal dispositions, an empty signal mask, and a session
 * of its own. One that pdk_spawn_start made is nobody's child afterwards: init reaps it, and its pidfd says when it ended.
 */
#ifndef PDK_PROC_H
#define PDK_PROC_H

#include "error.h"
#include "limit.h"
#include "stage.h"
#include <sys/types.h>

typedef struct pdk_fd_map {
    int from, to; /* descriptor here, number in the child */
} pdk_fd_map;

typedef struct pdk_spawn {
    const char *const *argv;        /* argv[0] is a path (no search); NULL-terminated */
    const char *const *env;         /* NULL = empty environment */
    const char *cwd;                /* NULL = / */
    const pdk_fd_map *fds;          /* besides 0, 1, 2 unless mapped here */
    size_t fd_count;
    bool drop_ids;                  /* setgroups(none), setresgid(gid), setresuid(uid) before exec */
    uid_t uid;
    gid_t gid;
    const struct pdk_rlimit_set *limits; /* or NULL */
    const pdk_stage_op *stage;      /* root only: builds a root file system at PDK_STAGE_DIR before ids are dropped. NULL = none */
    size_t stage_count;
} pdk_spawn;
typedef struct pdk_rlimit_set {
    size_t n;
    struct { int resource; uint64_t soft, hard; } v[8];
} pdk_rlimit_set;

typedef struct pdk_child {
    int pidfd; /* owned: close it with pdk_child_close */
    pid_t pid; /* of the child just cloned; for messages only */
} pdk_child;

/* 0, or -1 with io_error (what failed and where: also a failing exec is reported here, not by exit status 127). */
int pdk_spawn_start(const pdk_spawn *spec, pdk_child *out, pdk_error *err);
/* Waits until it has ended, at most `seconds` and within the thread's limit. 1 = ended, 0 = not yet, -1 = error. */
int pdk_child_wait(pdk_child *c, double seconds, pdk_error *err);
void pdk_child_close(pdk_child *c); /* does not kill */

/* Runs to the end and captures both outputs (each bounded by max bytes, then dropped). Kills it at the limit: `timeout`. */
typedef struct pdk_run_result { int status; char *out, *err; size_t out_len, err_len; bool truncated; } pdk_run_result;
int pdk_run(const pdk_spawn *spec, const void *in, size_t in_len, size_t max, double seconds, pdk_run_result *out,
            pdk_error *err);
void pdk_run_result_free(pdk_run_result *r);

/* poll() until `deadline` (real monotonic clock) and within the thread's limit. 1 = ready, 0 = `deadline` passed, -1 = timeout
 * or cancelled by the thread's limit, or io_error; `what` begins the message. */
struct pollfd;
int pdk_poll_limited(struct pollfd *fds, size_t n, pdk_ns deadline, pdk_error *err, const char *what);

/* Open file description locks of one byte (or more). type F_RDLCK, F_WRLCK or F_UNLCK. 1 = taken, 0 = somebody else has it. */
int pdk_lock_range(int fd, short type, int64_t start, int64_t len, pdk_error *err);
/* Whether anybody else's lock stands in the way: 1 yes, 0 no, -1 error. */
int pdk_lock_test(int fd, short type, int64_t start, int64_t len, pdk_error *err);

#endif
