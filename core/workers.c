/* workers.c -- see workers.h.
 * Lock: `lock` guards all of it; held for moments, and never while a job runs or a thread is started.
 * A job of class c may start while there is room beside what the other classes run or have reserved:
 *     running[c] + sum over the others of max(running, share) < max */
#include "workers.h"

#include <stdlib.h>

#define IDLE_END (5 * PDK_NS_PER_S) /* a worker that has waited for so long ends */
#define SHARE    8                  /* of each class, where the ceiling allows it */

typedef struct queue {
    pdk_job *first, *last;
    int length;
} queue;

struct pdk_workers {
    pdk_mutex lock;
    pdk_cond work;   /* something was queued, or `ending` */
    pdk_cond through;/* a thread has ended */
    int max, share;  /* fixed at birth */
    queue queues[PDK_WORK_CLASSES];    /* lock */
    int running[PDK_WORK_CLASSES];     /* lock */
    int threads;     /* lock; started or being started */
    int idle;        /* lock; of those, waiting */
    int woken;       /* lock; of the idle ones, those that a submission has woken and that have not looked yet */
    uint64_t next_order; /* lock */
    bool ending;     /* lock */
};

pdk_workers *pdk_workers_new(int max)
{
    pdk_workers *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    pdk_mutex_init(&w->lock);
    pdk_cond_init(&w->work);
    pdk_cond_init(&w->through);
    w->max = max;
    w->share = max / 8 < SHARE ? max / 8 : SHARE;
    return w;
}

/* ---- queues -------------------------------------------------------------------------------------------- */

static void queue_remove(pdk_workers *w, pdk_job *job) PDK_REQUIRES(w->lock)
{
    queue *q = &w->queues[job->work_class];
    *(job->prev != NULL ? &job->prev->next : &q->first) = job->next;
    *(job->next != NULL ? &job->next->prev : &q->last) = job->prev;
    job->next = job->prev = NULL;
    job->queued = false;
    q->length--;
}

static bool may_start(const pdk_workers *w, pdk_work_class c)
{
    int taken = w->running[c];
    for (int k = 0; k < PDK_WORK_CLASSES; k++)
        if (k != (int)c)
            taken += w->running[k] > w->share ? w->running[k] : w->share;
    return taken < w->max;
}

/* The oldest job that may start now, or NULL. */
static pdk_job *startable(const pdk_workers *w)
{
    pdk_job *best = NULL;
    for (int c = 0; c < PDK_WORK_CLASSES; c++) {
        pdk_job *head = w->queues[c].first;
        if (head != NULL && (best == NULL || head->order < best->order) && may_start(w, (pdk_work_class)c))
            best = head;
    }
    return best;
}

static int all_running(const pdk_workers *w)
{
    int n = 0;
    for (int c = 0; c < PDK_WORK_CLASSES; c++)
        n += w->running[c];
    return n;
}

/* ---- threads ------------------------------------------------------------------------------------------- */

/* How many jobs wait that nobody is about to take: those who were woken, or started, and have not looked yet, will. */
static int untaken(const pdk_workers *w)
{
    int n = all_running(w) - (w->threads - w->idle) - w->woken;
    for (int c = 0; c < PDK_WORK_CLASSES; c++)
        n += w->queues[c].length;
    return n;
}

typedef enum need { NOBODY, SLEEPER, THREAD } need;

/* Who is still needed for what may start now; counts it as woken, or as a thread. */
static need needed(pdk_workers *w) PDK_REQUIRES(w->lock)
{
    if (untaken(w) <= 0 || startable(w) == NULL)
        return NOBODY;
    if (w->idle > w->woken) {
        w->woken++;
        return SLEEPER;
    }
    if (w->threads >= w->max)
        return NOBODY;
    w->threads++;
    return THREAD;
}

static void *worker_main(void *arg);

/* Not under the lock: where processors are scarce a woken thread runs at once, in this one's place, and would wait for it. */
static int meet(pdk_workers *w, need who)
{
    if (who == SLEEPER)
        pdk_cond_signal(&w->work);
    int rc = who == THREAD ? pdk_thread_start_detached("pdk-worker", worker_main, w) : 0;
    if (rc == 0)
        return 0;
    PDK_GUARD(w->lock);
    w->threads--;
    pdk_cond_broadcast(&w->through);
    return rc;
}

/* A burst is met by workers that wake or start two more each, not by the host's thread doing so for hundreds. */
static void grow(pdk_workers *w)
{
    for (int i = 0; i < 2; i++) {
        need who;
        {
            PDK_GUARD(w->lock);
            who = needed(w);
        }
        if (who == NOBODY || meet(w, who) != 0)
            return;
    }
}

/* Waits for a job and counts it as running. NULL = this thread is not needed any more: it is counted out. */
static pdk_job *next_job(pdk_workers *w)
{
    PDK_GUARD(w->lock);
    pdk_ns until = pdk_now_monotonic() + IDLE_END;
    for (bool waits = true;;) {
        pdk_job *job = startable(w);
        if (job != NULL) {
            queue_remove(w, job);
            w->running[job->work_class]++;
            return job;
        }
        if (!waits || w->ending)
            break;
        w->idle++;
        waits = pdk_cond_wait_until(&w->work, &w->lock, until);
        w->idle--;
        if (w->woken > 0) /* by whichever of us comes first */
            w->woken--;
    }
    w->threads--;
    pdk_cond_broadcast(&w->through);
    return NULL;
}

/* A job is over: what its share held back may start now. */
static void job_over(pdk_workers *w, pdk_work_class c)
{
    PDK_GUARD(w->lock);
    w->running[c]--; /* this thread looks for one itself, and then for who takes the others */
}

static void *worker_main(void *arg)
{
    pdk_workers *w = arg;
    for (pdk_job *job; (job = next_job(w)) != NULL;) {
        pdk_work_class c = job->work_class;
        grow(w);
        job->run(job);
        job_over(w, c);
    }
    return NULL;
}

/* ---- what others call ---------------------------------------------------------------------------------- */

static void enqueue(pdk_workers *w, pdk_job *job) PDK_REQUIRES(w->lock)
{
    queue *q = &w->queues[job->work_class];
    job->order = w->next_order++;
    job->queued = true;
    job->next = NULL;
    job->prev = q->last;
    *(q->last != NULL ? &q->last->next : &q->first) = job;
    q->last = job;
    q->length++;
}

int pdk_workers_submit(pdk_workers *w, pdk_job *job, bool keep, pdk_error *err)
{
    need who = NOBODY;
    {
        PDK_GUARD(w->lock);
        enqueue(w, job);
        if (w->woken + w->threads - w->idle - all_running(w) == 0) /* else one is on its way, and wakes or starts the others */
            who = needed(w);
    }
    int rc = meet(w, who);
    if (rc == 0)
        return 0;
    PDK_GUARD(w->lock);
    if (w->threads > 0 || !job->queued) /* one that is at work now takes it later */
        return 0;
    if (!keep)
        queue_remove(w, job);
    return pdk_fail(err, PDK_E_NO_MEMORY, rc, "no thread can be started for it");
}

bool pdk_workers_withdraw(pdk_workers *w, pdk_job *job)
{
    PDK_GUARD(w->lock);
    if (!job->queued)
        return false;
    queue_remove(w, job);
    return true;
}

bool pdk_workers_run_one(pdk_workers *w)
{
    pdk_job *job = NULL;
    {
        PDK_GUARD(w->lock);
        for (int c = 0; c < PDK_WORK_CLASSES && w->threads == 0; c++) {
            pdk_job *head = w->queues[c].first;
            if (head != NULL && (job == NULL || head->order < job->order))
                job = head;
        }
        if (job != NULL)
            queue_remove(w, job);
    }
    if (job != NULL)
        job->run(job);
    return job != NULL;
}

pdk_worker_counts pdk_workers_count(pdk_workers *w)
{
    PDK_GUARD(w->lock);
    pdk_worker_counts n = { .threads = w->threads, .running = all_running(w), .max = w->max };
    for (int c = 0; c < PDK_WORK_CLASSES; c++)
        n.queued += w->queues[c].length;
    return n;
}

void pdk_workers_free(pdk_workers *w)
{
    if (w == NULL)
        return;
    {
        PDK_GUARD(w->lock);
        w->ending = true;
        pdk_cond_broadcast(&w->work);
        while (w->threads > 0)
            pdk_cond_wait(&w->through, &w->lock);
    }
    while (pdk_workers_run_one(w)) /* those that no thread could be started for, too */
        ;
    pdk_cond_destroy(&w->work);
    pdk_cond_destroy(&w->through);
    pdk_mutex_destroy(&w->lock);
    free(w);
}
