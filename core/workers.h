/* workers.h -- the threads that carry out what was submitted to one runtime.
 *
 * There are none until the first submission; they grow with what is queued, up to a ceiling, and one that finds nothing to do
 * for some seconds ends. What is submitted belongs to a class; each class has a share that the others cannot take, so that
 * acquires that hang on a dead engine keep no teardown from running. Within a class: first come, first served.
 * Threads: any.  A submission starts at most one thread; the others are started by workers.
 */
#ifndef PDK_WORKERS_H
#define PDK_WORKERS_H

#include "error.h"
#include "sync.h"

#include <stdatomic.h>

typedef enum pdk_work_class { PDK_WORK_ACQUIRE, PDK_WORK_EXEC, PDK_WORK_TEARDOWN, PDK_WORK_CLASSES } pdk_work_class;

typedef struct pdk_job pdk_job;
struct pdk_job {                /* embedded in its owner; the owner's again once `run` is called or it was withdrawn */
    void (*run)(pdk_job *job);  /* no lock is held */
    pdk_work_class work_class;
    pdk_job *next, *prev;       /* the workers' lock */
    uint64_t order;             /* likewise */
    bool queued;                /* likewise */
};

typedef struct pdk_workers pdk_workers;
/* `max`: ceiling; 0 = no threads: jobs run in pdk_workers_run_one. `starved` is set when a thread that is needed cannot be started:
 * pdk_workers_retry then, now and then. NULL = no memory. */
pdk_workers *pdk_workers_new(int max, atomic_bool *starved);
/* Waits until all that was submitted has run, and all threads are through. Nothing may be submitted meanwhile but by jobs. */
void pdk_workers_free(pdk_workers *w);
/* -1: no thread could be started, and there is none that would take it: it is not queued, or, with `keep`, waits until one can be
 * (pdk_workers_retry). */
int pdk_workers_submit(pdk_workers *w, pdk_job *job, bool keep, pdk_error *err);
/* Starts the thread that could not be started, where one is still needed. 0, or -1: it cannot be started now either. */
int pdk_workers_retry(pdk_workers *w);
/* true = it was still queued, and never runs. */
bool pdk_workers_withdraw(pdk_workers *w, pdk_job *job);
/* Where there are no threads (max = 0, or none could be started): runs the oldest job on the calling thread. false = it did nothing. */
bool pdk_workers_run_one(pdk_workers *w);

typedef struct pdk_worker_counts {
    int threads, running, queued, max;
} pdk_worker_counts;
pdk_worker_counts pdk_workers_count(pdk_workers *w);

#endif
