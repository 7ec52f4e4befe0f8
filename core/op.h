/* op.h -- asynchronous operations: their states, deadlines, cancellation, callbacks. What each kind of them does is in async.c; the
 * public half is in paddock.h.
 *
 * An operation has two ends, and both come once: its work ends (or never begins), and its caller is told. Told first when its
 * deadline passes while the work runs: the work is drained behind it and its result given back. Otherwise the work ends first.
 *
 *   QUEUED   waits for a worker                  cancel, deadline, close: never runs, told at once
 *   RUNNING  on a worker                         cancel: told when the work has ended; deadline: told at once
 *   PARKED   waits for a turn, without a worker  as QUEUED
 *   ENDED
 */
#ifndef PDK_OP_H
#define PDK_OP_H

#include "limit.h"
#include "workers.h"

typedef struct pdk_ops pdk_ops; /* all operations of one runtime, or of none (pdk_ops_process); counted references */

#define PDK_OP_PARKED (-2)

/* What a kind of operation does. `work` is the operation's own data; functions that may be NULL say so. */
typedef struct pdk_op_kind {
    const char *name;           /* for logs: "acquire" */
    pdk_work_class work_class;
    /* NULL, or: at submission: 1 = it is queued for a worker, 0 = it waits for a pdk_op_grant (which may have come already), -1 and
     * err = it is not submitted. Waits for nothing. */
    int (*begin)(pdk_op *op, void *work, pdk_error *err);
    /* On a worker, without locks: the answer (0 or more), or -1 and err, or PDK_OP_PARKED: pdk_op_grant makes it run again. */
    int (*run)(pdk_op *op, void *work, pdk_error *err);
    /* NULL, or: it waits no longer and will not run: gives back what it has so far; pdk_op_grant is not called any more when this
     * returns. Waits for nothing. */
    void (*withdraw)(void *work);
    /* NULL, or: gives a result that nobody takes back. Without locks; may wait, unless the runtime is closed. */
    void (*undo)(void *work);
    /* NULL = the caller is told `timeout`; or: the deadline has passed while it runs. Answers 0 or more when the caller is told that
     * instead of an error, else -1 and err. Waits for nothing. */
    int (*late)(pdk_op *op, void *work, pdk_error *err);
    /* NULL, or: it runs, and was cancelled or has passed its deadline; pdk_op_cancelled is set already. Waits for nothing. */
    void (*cancelled)(pdk_op *op, void *work);
    void (*drop)(void *work);   /* frees it; waits for nothing */
    bool knows_cancel;          /* its result says itself what a cancellation has come to: what ended well is told as it is */
    bool survives_close;        /* it is taken, and runs, although the runtime closes */
} pdk_op_kind;

typedef struct pdk_op_how {     /* how an operation is asked for */
    double timeout;             /* seconds; 0 = none */
    pdk_callback callback;      /* or NULL */
    pdk_output on_output;       /* or NULL */
    void *ctx;
} pdk_op_how;

/* `rt` NULL = of no runtime. workers 0 = no threads of its own. NULL = no memory. */
pdk_ops *pdk_ops_new(struct pdk_runtime *rt, int workers, pdk_error *err);
/* What waits ends with `closed`, and nothing but survives_close is taken any more. Running ones go on. */
void pdk_ops_close(pdk_ops *ops);
/* Waits for what runs, gives back results that nobody has taken, ends the threads, and drops the runtime's reference. */
void pdk_ops_end(pdk_ops *ops);
/* For runtimes without threads: carries out what is queued now. */
void pdk_ops_run(pdk_ops *ops);
/* As pdk_fd and pdk_dispatch. */
int pdk_ops_fd(pdk_ops *ops, pdk_error *err);
int pdk_ops_dispatch(pdk_ops *ops, int max);
/* The operations of no runtime; made when first asked for, never ended. NULL = no memory. */
pdk_ops *pdk_ops_process(pdk_error *err);

typedef struct pdk_ops_counts {
    int queued, parked, running; /* work */
    int ready;                   /* operations with callbacks that wait for dispatch */
    pdk_worker_counts workers;
} pdk_ops_counts;
pdk_ops_counts pdk_ops_count(pdk_ops *ops);

/* Submits. On error (NULL) `work` is still the caller's; else the operation's, which drops it. */
pdk_op *pdk_op_submit(pdk_ops *ops, const pdk_op_kind *kind, void *work, const pdk_op_how *how, pdk_error *err);
/* Submits, waits until the caller is told, takes the result, frees: the answer or -1. Takes `work` over also on error. */
int pdk_op_do(pdk_ops *ops, const pdk_op_kind *kind, void *work, double timeout, int (*take)(void *work, bool late, void *to), void *to,
              pdk_error *err);

/* Whether this thread is a worker at work, of any runtime: what it does is not submitted once more. */
bool pdk_op_inside(void);
/* The class of what it does; PDK_WORK_TEARDOWN on a thread that is none. */
pdk_work_class pdk_op_class(void);

/* For kinds. */
atomic_bool *pdk_op_cancelled(pdk_op *op);  /* set by a cancellation and by the deadline */
/* What it has produced is the caller's from here on, and it can be ended no more; false = it is not wanted any more. */
bool pdk_op_keep(pdk_op *op);
void pdk_op_grant(pdk_op *op);              /* a parked one has its turn; any thread, only enqueues; early ones are remembered */
pdk_ns pdk_op_deadline(pdk_op *op);         /* PDK_NEVER = none */
void pdk_op_set_deadline(pdk_op *op, pdk_ns deadline); /* on the real monotonic clock */
/* As pdk_op_free, but does not wait for a callback that is under way: for who hands callbacks on to another thread, which may be the
 * very one that lets go, and keeps what they use itself. */
void pdk_op_let_go(pdk_op *op);
pdk_op *pdk_op_retain(pdk_op *op);
void pdk_op_release(pdk_op *op);
/* Something else to be done for it, in its own time; the caller keeps the operation until then. -1: it cannot be. */
int pdk_op_submit_job(pdk_op *op, pdk_job *job);
/* A piece of output; copied. Waits while too much of it has not been taken: at most until `until`, and no longer when the operation is
 * told or cancelled, or the runtime closes. What comes then is kept without a wait, up to 64 MiB. */
void pdk_op_output(pdk_op *op, int stream, const void *bytes, size_t len, pdk_ns until);
bool pdk_op_has_output(pdk_op *op);         /* whether anybody wants it */
const char *pdk_op_name(pdk_op *op);        /* its kind's: static */
/* Calls take(work, to) under the operations' lock when the operation is of that kind, is over, and has ended well: its answer, or 0.
 * `late`: told at its deadline, with what the kind's `late` has left. */
int pdk_op_take(pdk_op *op, const pdk_op_kind *kind, int (*take)(void *work, bool late, void *to), void *to);

/* ---- any function as an operation ---- */

/* Runs fn(arg) on a worker: its answer (0 or more), or -1 and err. `drop` (or NULL) frees arg when the operation and its handle are
 * done with. `rt` NULL = of no runtime: pdk_dispatch and pdk_fd with NULL. Callbacks and cancellation as with every operation: the
 * caller of a cancelled one is told when fn has returned. fn runs under the operation's limit: pdk_limit_current()->cancelled. */
pdk_op *pdk_op_call(struct pdk_runtime *rt, pdk_work_class work_class, double timeout, int (*fn)(void *arg, pdk_error *err),
                    void (*drop)(void *arg), void *arg, pdk_callback callback, void *ctx, pdk_error *err);
/* arg, once the operation is over and fn has ended well; else NULL. It stays the operation's. */
void *pdk_op_arg(pdk_op *op);

#endif
