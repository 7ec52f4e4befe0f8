/* workers.c -- see workers.h.
 * Lock: `lock` guards all of it; held for moments, and never while a job runs or a thread is started.
 * A job of class c may start while there is room beside what the other classes run or have reserved:
 *     running[c] + sum over the others of max(running, share) < max
 *
 * Each idle worker waits on a condition of its own, and the one that came last is woken first. Why: a signal to a condition with
 * many waiters may itself wait, until those that were signalled before have run; and the host's frame thread signals. */
#include "workers.h"

#include <stdlib.h>

#define IDLE_END (5 * PDK_NS_PER_S) /* a worker that has waited for so long ends */
#define SHARE    8                  /* of each class, where the ceiling allows it */

typedef struct queue {
    pdk_job *first, *last;
    int length;
} queue;

typedef struct seat { /* of an idle worker; never freed before the workers are, so that it can be signalled without the lock */
    pdk_cond cond;
    bool called;            /* lock; off the list of idle ones */
    struct seat *next, *prev; /* lock; among the idle ones, or the spare ones (next) */
} seat;

struct pdk_workers {
    pdk_mutex lock;
    seat *idlers;    /* lock; idle and not called yet; the last one first */
    seat *spare;     /* lock */
    pdk_cond through;/* a thread has ended */
    int max, share;  /* fixed at birth */
    queue queues[PDK_WORK_CLASSES];    /* lock */
    int running[PDK_WORK_CLASSES];     /* lock */
    int threads;     /* lock; started or being started */
    int idle;        /* lock; of those, waiting */
    int woken;       /* lock; of the idle ones, those that a submission has woken and that have not looked yet */
    uint64_t next_order; /* lock */
    bool ending;     /* lock */
    atomic_bool *starved; /* fixed */
};

pdk_workers *pdk_workers_new(int max, atomic_bool *starved)
{
    pdk_workers *w = calloc(1, sizeof *w);
    if (w == NULL)
        return NULL;
    pdk_mutex_init(&w->lock);
    pdk_cond_init(&w->through);
    w->max = max;
    w->starved = starved;
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

/* ---- idle workers -------------------------------------------------------------------------------------- */

/* A seat for this thread, or NULL = no memory. */
static seat *seat_take(pdk_workers *w) PDK_REQUIRES(w->lock)
{
    seat *s = w->spare;
    if (s != NULL) {
        w->spare = s->next;
        s->next = NULL;
        return s;
    }
    s = calloc(1, sizeof *s);
    if (s != NULL)
        pdk_cond_init(&s->cond);
    return s;
}

static void seat_leave(pdk_workers *w, seat *s) PDK_REQUIRES(w->lock)
{
    *(s->prev != NULL ? &s->prev->next : &w->idlers) = s->next;
    if (s->next != NULL)
        s->next->prev = s->prev;
    s->next = s->prev = NULL;
}

/* The idle worker that is to be signalled, without the lock; NULL = there is none. */
static seat *call_one(pdk_workers *w) PDK_REQUIRES(w->lock)
{
    seat *s = w->idlers;
    if (s == NULL)
        return NULL;
    seat_leave(w, s);
    s->called = true;
    w->woken++;
    return s;
}

/* Waits until it is called, at most until `until`; false = it was not. */
static bool idle_until(pdk_workers *w, pdk_ns until) PDK_REQUIRES(w->lock)
{
    seat *s = seat_take(w);
    if (s == NULL)
        return false;
    s->called = false;
    s->next = w->idlers;
    if (s->next != NULL)
        s->next->prev = s;
    w->idlers = s;
    w->idle++;
    for (bool waits = true; waits && !s->called && !w->ending;)
        waits = pdk_cond_wait_until(&s->cond, &w->lock, until);
    w->idle--;
    bool called = s->called;
    if (called)
        w->woken--;
    else
        seat_leave(w, s);
    s->next = w->spare;
    w->spare = s;
    return called;
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

typedef struct need { /* who is needed: an idle worker, a new thread, or nobody */
    seat *sleeper;
    bool thread;
} need;

/* Who is still needed for what may start now; counts it as woken, or as a thread. */
static need needed(pdk_workers *w) PDK_REQUIRES(w->lock)
{
    need who = { NULL, false };
    if (untaken(w) <= 0 || startable(w) == NULL)
        return who;
    who.sleeper = call_one(w);
    who.thread = who.sleeper == NULL && w->threads < w->max;
    w->threads += who.thread;
    return who;
}

static void *worker_main(void *arg);

/* Not under the lock: where processors are scarce a woken thread runs at once, in this one's place, and would wait for it. */
static int meet(pdk_workers *w, need who)
{
    if (who.sleeper != NULL)
        pdk_cond_signal(&who.sleeper->cond);
    int rc = who.thread ? pdk_thread_start_detached("pdk-worker", worker_main, w) : 0;
    if (rc == 0)
        return 0;
    PDK_GUARD(w->lock);
    w->threads--;
    pdk_cond_broadcast(&w->through);
    atomic_store(w->starved, true);
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
        if ((who.sleeper == NULL && !who.thread) || meet(w, who) != 0)
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
        waits = idle_until(w, until);
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
    need who = { NULL, false };
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

int pdk_workers_retry(pdk_workers *w)
{
    need who;
    atomic_store(w->starved, false);
    {
        PDK_GUARD(w->lock);
        who = needed(w);
    }
    return meet(w, who) == 0 ? 0 : -1;
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
        for (seat *s = w->idlers; s != NULL; s = s->next)
            pdk_cond_signal(&s->cond);
        while (w->threads > 0)
            pdk_cond_wait(&w->through, &w->lock);
    }
    while (pdk_workers_run_one(w)) /* those that no thread could be started for, too */
        ;
    for (seat *s; (s = w->spare) != NULL;) {
        w->spare = s->next;
        pdk_cond_destroy(&s->cond);
        free(s);
    }
    pdk_cond_destroy(&w->through);
    pdk_mutex_destroy(&w->lock);
    free(w);
}
