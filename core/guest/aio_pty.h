/* aio_pty.h -- one long-lived shell on a terminal, that runs one command after the other and tells each one's end. */
#ifndef AIO_PTY_H
#define AIO_PTY_H

#include "aio.h"

typedef struct aio_pty aio_pty;

typedef struct aio_pty_owner { /* callbacks; none of them may close the shell, but done and gone */
    void *ctx;
    void (*output)(void *ctx, const char *data, size_t len);
    /* The command has ended and all that it printed was delivered. `cwd` is the shell's directory now. */
    void (*done)(void *ctx, int exit_code, const char *cwd);
    /* The shell is gone, and the aio_pty with it: `exit`, exec, a signal, a kill, a fence, or it never ran (end->failed). */
    void (*gone)(void *ctx, const guest_cmd_end *end);
} aio_pty_owner;

aio_pty *aio_pty_open(const char *cwd, uint64_t token, const aio_pty_owner *owner, guest_fault *f);
/* Runs `text`, in `dir` unless that is NULL (`logical`: links in it stay in $PWD). One at a time. limit: seconds until the
 * whole shell and its descendants are killed; 0 = none. False = no memory. */
bool aio_pty_run(aio_pty *p, const char *text, const char *dir, bool logical, double limit);
guest_cmd *aio_pty_cmd(aio_pty *p); /* to write to it, signal or kill it */
void aio_pty_close(aio_pty *p);     /* kills all of it; no more callbacks. NULL is fine */

#endif
