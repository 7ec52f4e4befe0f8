/* quiet.h -- calls into foreign code (libcurl, libssl, a write to a pipe) without a signal for the host.
 *
 * Such code may write to a connection that its peer has closed, which raises SIGPIPE and by default ends the process;
 * and it may start threads, which inherit the mask of the thread that starts them and would then take the host's
 * signals. So the calling thread blocks every signal for the length of the call (it must be short: what waits, waits
 * outside), and a SIGPIPE that the call itself raised is taken out again. */
#ifndef PDK_QUIET_H
#define PDK_QUIET_H

#include <signal.h>
#include <stdbool.h>
#include <time.h>

typedef struct pdk_quiet {
    sigset_t former;
    bool pipe_was_pending; /* then it is somebody else's, and stays */
} pdk_quiet;

static inline void pdk_quiet_enter(pdk_quiet *q)
{
    sigset_t all, pending;
    sigpending(&pending);
    q->pipe_was_pending = sigismember(&pending, SIGPIPE) == 1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &q->former);
}

static inline void pdk_quiet_leave(pdk_quiet *q)
{
    sigset_t pending;
    sigpending(&pending);
    if (!q->pipe_was_pending && sigismember(&pending, SIGPIPE) == 1) {
        sigset_t pipe_only;
        sigemptyset(&pipe_only);
        sigaddset(&pipe_only, SIGPIPE);
        sigtimedwait(&pipe_only, NULL, &(struct timespec){ 0 });
    }
    pthread_sigmask(SIG_SETMASK, &q->former, NULL);
}

#endif
