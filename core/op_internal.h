/* op_internal.h -- operations from the inside; shared by op.c (their two ends), op_host.c (what the host's thread does with them).
 *
 * Lock: `lock` of pdk_ops guards all that is not fixed or atomic, of the operations too. It is held for moments: no I/O but the
 * eventfd's, no Lua, no callback. Order: the serializer's lock, then this one, then the workers'.
 * References to an operation: the handle's, until pdk_op_free; the work's, until it is ENDED; and those of who looks at it. */
#ifndef PDK_OP_INTERNAL_H
#define PDK_OP_INTERNAL_H

#include "core.h"
#include "op.h"

typedef enum pdk_op_stage { /* BEGINS: being submitted; LEAVING: one that waited is being taken out */
    PDK_OP_BEGINS, PDK_OP_QUEUED, PDK_OP_RUNNING, PDK_OP_WAITS, PDK_OP_LEAVING, PDK_OP_ENDED
} pdk_op_stage;

typedef struct pdk_op_chunk {
    struct pdk_op_chunk *next;
    int stream;
    size_t len;
    char bytes[];
} pdk_op_chunk;

struct pdk_ops {
    pdk_mutex lock;
    atomic_int refs;
    pid_t pid;                  /* fixed: in a forked child everything answers `closed` */
    bool has_threads;           /* fixed */
    pdk_runtime *rt;            /* lock; NULL = of none, or freed */
    pdk_workers *workers;       /* until `ended` */
    atomic_bool starved;        /* a worker or the timer is needed and could not be started */
    atomic_int_least64_t fed;   /* when that was tried last */
    pdk_op *all;                /* lock */
    bool closed, ended;         /* lock */
    pdk_op *ready_first, *ready_last; /* lock; those with something for dispatch */
    atomic_int ready;           /* how many; changed under the lock, read without */
    int fd;                     /* lock; -1 = not asked for */
    pdk_op **heap;              /* lock; by deadline, the next first */
    size_t heap_len, heap_cap;  /* lock */
    atomic_int_least64_t next_due; /* of heap[0]; PDK_NEVER; changed under the lock */
    pdk_cond timer;             /* heap[0] has changed, or `ended`; and the timer has ended */
    bool timer_runs;            /* lock */
};

struct pdk_op {
    pdk_job job;
    pdk_ops *ops;               /* fixed; a reference */
    const pdk_op_kind *kind;    /* fixed */
    void *work;                 /* fixed; its content: the kind's */
    void *ctx;                  /* fixed */
    pdk_callback callback;      /* lock; NULL = none, called, or not wanted any more */
    pdk_output on_output;       /* lock */
    atomic_int refs;
    pdk_op *next, *prev;        /* lock; in `all` */
    pdk_op_stage stage;                /* lock */
    bool granted;               /* lock; the turn came before it was WAITS */
    pdk_error_kind why;         /* lock; PDK_OK, or why it is not wanted any more: cancelled, timeout, closed */
    bool kept;                  /* lock; what it produced is its caller's: too late to end it */
    bool late;                  /* lock; its caller is, or is about to be, told by the deadline */
    bool refused;               /* fixed once; it was not submitted, and its work is not its own */
    bool freed;                 /* lock; nobody has the handle */
    bool has_result;            /* lock; the work has ended well and what it produced is there */
    atomic_bool cancelled;
    atomic_bool told;           /* set under the lock, after answer and error */
    int answer;                 /* fixed once told */
    pdk_error error;            /* fixed once told */
    pdk_cond changed;           /* told, output taken, a callback has returned */
    pdk_ns deadline;            /* lock */
    size_t heap_at;             /* lock; index + 1; 0 = not there */
    bool no_timer;              /* fixed: who waits for it looks at the deadline */
    pdk_op *ready_next, *ready_prev; /* lock */
    bool listed;                /* lock; stands on the ready list */
    uint64_t calling;           /* lock; the thread inside one of its callbacks; 0 = none */
    pdk_op_chunk *chunk_first, *chunk_last; /* lock */
    size_t chunk_bytes;         /* lock */
};

static inline void pdk_op_unref_auto(pdk_op **op)
{
    if (*op != NULL)
        pdk_op_release(*op);
}
#define PDK_AUTO_UNREF __attribute__((cleanup(pdk_op_unref_auto), unused))

/* -1 in a process that was forked from the operations' own. */
int pdk_ops_foreign(const pdk_ops *ops, pdk_error *err);
void pdk_ops_unref(pdk_ops *ops);

/* ---- op.c ---- */
/* Asks it to end, or its handle has gone; false = it was over already. */
bool pdk_op_ask(pdk_op *op, bool freed);
/* Its deadline has passed. */
void pdk_op_expire(pdk_op *op);
/* Ends what is due; answers when the next one will be. */
pdk_ns pdk_ops_expire(pdk_ops *ops);
void pdk_op_undo_job(pdk_job *job);
/* Tries again to start what could not be started, and does the timer's work until then; only now and then, whoever asks how often. */
void pdk_ops_feed(pdk_ops *ops);
/* Where there are no threads: looks whether another process has let go of what one that waits wants. */
void pdk_ops_look(pdk_ops *ops);

/* ---- op_host.c ---- */
/* Puts it where dispatch finds it, when it has something for its callbacks. */
void pdk_op_list(pdk_op *op) PDK_REQUIRES(op->ops->lock);
/* Nobody dispatches any more. */
void pdk_ops_forget_ready(pdk_ops *ops);

#endif
