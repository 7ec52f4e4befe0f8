/* op.c -- the two ends of an operation; see op.h, and op_internal.h for the lock. */
#include "op_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define END_LOOK  (1000 * 1000)      /* ns: how often the end looks whether all has ended */
#define FEED_PAUSE (5 * 1000 * 1000) /* ns between two tries to start a thread that could not be started */
#define TIMER_END (5 * PDK_NS_PER_S) /* a timer with nothing to look at for so long ends */

static _Thread_local int inside; /* how many operations this thread is carrying out, one inside the other */
static _Thread_local pdk_work_class inside_class; /* of the innermost */

bool pdk_op_inside(void)
{
    return inside > 0;
}

pdk_work_class pdk_op_class(void)
{
    return inside > 0 ? inside_class : PDK_WORK_TEARDOWN;
}

/* ---- references ---------------------------------------------------------------------------------------- */

void pdk_ops_unref(pdk_ops *ops)
{
    if (atomic_fetch_sub(&ops->refs, 1) != 1)
        return;
    if (ops->fd >= 0)
        close(ops->fd);
    free(ops->heap);
    pdk_cond_destroy(&ops->timer);
    pdk_mutex_destroy(&ops->lock);
    free(ops);
}

pdk_op *pdk_op_retain(pdk_op *op)
{
    atomic_fetch_add(&op->refs, 1);
    return op;
}

void pdk_op_release(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    {
        PDK_GUARD(op->ops->lock); /* who walks `all` takes references under it */
        if (atomic_fetch_sub(&op->refs, 1) != 1)
            return;
        *(op->prev != NULL ? &op->prev->next : &ops->all) = op->next;
        if (op->next != NULL)
            op->next->prev = op->prev;
    }
    if (!op->refused)
        op->kind->drop(op->work);
    for (pdk_op_chunk *c = op->chunk_first, *next; c != NULL; c = next) {
        next = c->next;
        free(c);
    }
    pdk_error_clear(&op->error);
    pdk_cond_destroy(&op->changed);
    free(op);
    pdk_ops_unref(ops);
}

int pdk_ops_foreign(const pdk_ops *ops, pdk_error *err)
{
    return ops->pid == pdk_process_id()
               ? 0
               : pdk_fail(err, PDK_E_CLOSED, 0, "this operation belongs to the process that forked this one");
}

int pdk_op_submit_job(pdk_op *op, pdk_job *job)
{
    PDK_GUARD(op->ops->lock);
    if (op->ops->ended)
        return -1;
    pdk_workers_submit(op->ops->workers, job, true, NULL); /* it is queued, also when no thread could be started */
    return 0;
}

const char *pdk_op_name(pdk_op *op)
{
    return op->kind->name;
}

/* ---- deadlines: the heap, under the lock --------------------------------------------------------------- */

static void heap_put(pdk_ops *ops, size_t at, pdk_op *op)
{
    ops->heap[at] = op;
    op->heap_at = at + 1;
}

static void heap_settle(pdk_ops *ops, size_t at)
{
    pdk_op *op = ops->heap[at];
    for (size_t up; at > 0 && ops->heap[up = (at - 1) / 2]->deadline > op->deadline; at = up)
        heap_put(ops, at, ops->heap[up]);
    for (size_t down; (down = 2 * at + 1) < ops->heap_len; at = down) {
        if (down + 1 < ops->heap_len && ops->heap[down + 1]->deadline < ops->heap[down]->deadline)
            down++;
        if (ops->heap[down]->deadline >= op->deadline)
            break;
        heap_put(ops, at, ops->heap[down]);
    }
    heap_put(ops, at, op);
}

static void heap_head_changed(pdk_ops *ops)
{
    pdk_ns next = ops->heap_len > 0 ? ops->heap[0]->deadline : PDK_NEVER;
    if (next < atomic_load(&ops->next_due))
        pdk_cond_broadcast(&ops->timer);
    atomic_store(&ops->next_due, next);
}

static void heap_remove(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    if (op->heap_at == 0)
        return;
    size_t at = op->heap_at - 1;
    pdk_op *last = ops->heap[--ops->heap_len];
    op->heap_at = 0;
    if (last != op) {
        heap_put(ops, at, last);
        heap_settle(ops, at);
    }
    heap_head_changed(ops);
}

/* false = no memory. */
static bool heap_add(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    if (op->heap_at != 0 || op->deadline == PDK_NEVER || op->no_timer) /* its worker may have been here before who submits it */
        return true;
    if (ops->heap_len == ops->heap_cap) {
        size_t cap = ops->heap_cap == 0 ? 64 : ops->heap_cap * 2;
        pdk_op **more = realloc(ops->heap, cap * sizeof *more);
        if (more == NULL)
            return false;
        ops->heap = more;
        ops->heap_cap = cap;
    }
    heap_put(ops, ops->heap_len++, op);
    heap_settle(ops, op->heap_at - 1);
    heap_head_changed(ops);
    return true;
}

/* ---- the two ends -------------------------------------------------------------------------------------- */

/* Tells the caller; `err` is moved. */
static void tell(pdk_op *op, int answer, pdk_error *err) PDK_REQUIRES(op->ops->lock)
{
    if (atomic_load(&op->told)) {
        pdk_error_clear(err);
        return;
    }
    heap_remove(op);
    op->answer = answer;
    pdk_error_move(&op->error, err);
    atomic_store(&op->told, true);
    pdk_op_list(op);
    pdk_cond_broadcast(&op->changed);
}

static void tell_failure(pdk_op *op, pdk_error_kind kind) PDK_REQUIRES(op->ops->lock)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    const char *what = op->kind->name;
    if (kind == PDK_E_TIMEOUT)
        pdk_fail(&err, kind, 0, "the time limit of the %s has passed", what);
    else if (kind == PDK_E_CLOSED)
        pdk_fail(&err, kind, 0, "the runtime was closed before the %s began", what);
    else
        pdk_fail(&err, PDK_E_CANCELLED, 0, "the %s was cancelled", what);
    tell(op, -1, &err);
}

/* It waits no longer and never runs: what it has so far is given back, then its caller is told, then the work's reference goes. */
static void leave(pdk_op *op)
{
    if (op->kind->withdraw != NULL) /* takes the serializer's lock: not under ours */
        op->kind->withdraw(op->work);
    {
        PDK_GUARD(op->ops->lock);
        op->stage = PDK_OP_ENDED;
        tell_failure(op, op->why);
    }
    pdk_op_release(op);
}

/* Takes one that waits, and is not wanted any more, out. One that has been given to a worker is left to it. */
static void take_out(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    {
        PDK_GUARD(op->ops->lock);
        bool queued = op->stage == PDK_OP_QUEUED && pdk_workers_withdraw(ops->workers, &op->job);
        if (!queued && op->stage != PDK_OP_WAITS)
            return;
        op->stage = PDK_OP_LEAVING;
    }
    leave(op);
}

static void log_drained(pdk_op *op, const pdk_error *why)
{
    pdk_runtime *rt = op->ops->rt; /* there while an operation runs */
    if (rt != NULL && why->kind != PDK_OK && why->kind != PDK_E_CANCELLED && why->kind != PDK_E_TIMEOUT && why->kind != PDK_E_CLOSED)
        pdk_emit(rt, PDK_WARN, "drained_work_failed", why->sandbox_id[0] != '\0' ? why->sandbox_id : NULL, NULL, op->kind->name, why);
}

/* The work has ended with `answer`. */
static void work_ended(pdk_op *op, int answer, pdk_error *err)
{
    {
        PDK_GUARD(op->ops->lock);
        bool ended = op->why != PDK_OK && !op->kept && !(op->kind->knows_cancel && answer >= 0);
        if (!ended && !op->late && !op->freed) {
            op->stage = PDK_OP_ENDED;
            op->has_result = answer >= 0;
            tell(op, answer, err);
            return;
        }
    }
    if (answer >= 0 && op->kind->undo != NULL)
        op->kind->undo(op->work);
    else if (answer < 0) /* it does not replace what the caller is told (B183) */
        log_drained(op, err);
    PDK_GUARD(op->ops->lock);
    op->stage = PDK_OP_ENDED;
    if (!op->late)
        tell_failure(op, op->why != PDK_OK ? op->why : PDK_E_CANCELLED);
}

/* false = it is not wanted any more, and has not begun. */
static bool begin_run(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    if (op->ops->closed && !op->kind->survives_close && op->why == PDK_OK)
        op->why = PDK_E_CLOSED;
    if (op->why != PDK_OK)
        atomic_store(&op->cancelled, true);
    op->stage = op->why == PDK_OK ? PDK_OP_RUNNING : PDK_OP_LEAVING;
    return op->stage == PDK_OP_RUNNING;
}

/* It has asked for a turn and not got it yet. true = it waits; false = it has got it meanwhile. */
static bool park(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    bool waits = !op->granted;
    op->granted = false;
    if (waits)
        op->stage = PDK_OP_WAITS;
    return waits;
}

/* Whether one that waits has been asked to end, or the runtime was closed, while it was on its way there. */
static bool must_leave(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    if (op->stage != PDK_OP_WAITS)
        return false;
    if (op->ops->closed && op->why == PDK_OK)
        op->why = PDK_E_CLOSED;
    return op->why != PDK_OK;
}

static void run_job(pdk_job *job)
{
    PDK_AUTO_UNREF pdk_op *op = pdk_op_retain(PDK_OF(job, pdk_op, job)); /* once it waits, others may run and end it */
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int answer;
    if (!begin_run(op)) {
        leave(op);
        return;
    }
    pdk_work_class outer = inside_class;
    inside_class = op->kind->work_class;
    inside++;
    do
        answer = op->kind->run(op, op->work, &err);
    while (answer == PDK_OP_PARKED && !park(op));
    inside--;
    inside_class = outer;
    if (answer != PDK_OP_PARKED) {
        work_ended(op, answer, &err);
        pdk_op_release(op); /* the work's */
    } else if (must_leave(op)) {
        take_out(op);
    }
}

void pdk_op_undo_job(pdk_job *job)
{
    pdk_op *op = PDK_OF(job, pdk_op, job);
    op->kind->undo(op->work);
    pdk_op_release(op);
}

void pdk_op_grant(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    {
        PDK_GUARD(op->ops->lock);
        if (op->stage != PDK_OP_WAITS) { /* it is on its way there, or being taken out */
            op->granted = true;
            return;
        }
        op->stage = PDK_OP_QUEUED;
    }
    if (pdk_workers_submit(ops->workers, &op->job, true, NULL) == 0) /* may start a thread: not under the lock that dispatch takes */
        return;
    PDK_GUARD(ops->lock); /* the operation itself may be gone by now */
    for (op = ops->all; op != NULL; op = op->next)
        pdk_cond_broadcast(&op->changed); /* who waits tries again to start one */
}

bool pdk_op_keep(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    op->kept = op->why == PDK_OK && !op->late && !op->freed;
    return op->kept;
}

bool pdk_op_ask(pdk_op *op, bool freed)
{
    {
        PDK_GUARD(op->ops->lock);
        if (freed) {
            op->freed = true;
            op->callback = NULL;
            op->on_output = NULL;
            pdk_cond_broadcast(&op->changed);
        }
        if (atomic_load(&op->told) || op->late || op->kept)
            return false;
        if (op->why != PDK_OK) /* the first one is remembered (F12) */
            return true;
        op->why = PDK_E_CANCELLED;
        atomic_store(&op->cancelled, true);
        pdk_cond_broadcast(&op->changed);
    }
    take_out(op);
    bool runs;
    {
        PDK_GUARD(op->ops->lock);
        runs = op->stage == PDK_OP_RUNNING;
    }
    if (runs && op->kind->cancelled != NULL)
        op->kind->cancelled(op, op->work);
    return true;
}

/* ---- deadlines, again ---------------------------------------------------------------------------------- */

void pdk_op_expire(pdk_op *op)
{
    {
        PDK_GUARD(op->ops->lock);
        if (atomic_load(&op->told) || op->late || op->kept)
            return;
        if (op->why == PDK_OK)
            op->why = PDK_E_TIMEOUT;
        atomic_store(&op->cancelled, true);
    }
    take_out(op);
    {
        PDK_GUARD(op->ops->lock);
        if (atomic_load(&op->told) || op->late || op->kept || op->stage != PDK_OP_RUNNING)
            return;
        op->late = true;
        pdk_cond_broadcast(&op->changed); /* a worker that waits to be rid of output */
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int answer = -1;
    if (op->kind->late != NULL)
        answer = op->kind->late(op, op->work, &err);
    else
        pdk_fail(&err, PDK_E_TIMEOUT, 0, "the time limit of the %s has passed; what has begun is brought to its end", op->kind->name);
    if (op->kind->cancelled != NULL)
        op->kind->cancelled(op, op->work);
    PDK_GUARD(op->ops->lock);
    op->has_result = answer >= 0 && !op->freed;
    tell(op, answer, &err);
}

/* Ends what is due; answers when the next one will be. */
pdk_ns pdk_ops_expire(pdk_ops *ops)
{
    for (;;) {
        PDK_AUTO_UNREF pdk_op *op = NULL;
        {
            PDK_GUARD(ops->lock);
            if (ops->heap_len == 0 || ops->heap[0]->deadline > pdk_now_monotonic())
                return ops->heap_len == 0 ? PDK_NEVER : ops->heap[0]->deadline;
            op = pdk_op_retain(ops->heap[0]);
            heap_remove(op);
        }
        pdk_op_expire(op);
    }
}

static void *timer_main(void *arg)
{
    pdk_ops *ops = arg;
    for (bool idle = false;;) {
        pdk_ns next = pdk_ops_expire(ops);
        pdk_ops_feed(ops);
        PDK_GUARD(ops->lock);
        if (ops->ended || (idle && ops->heap_len == 0)) {
            ops->timer_runs = false;
            pdk_cond_broadcast(&ops->timer);
            return NULL;
        }
        next = ops->heap_len > 0 ? ops->heap[0]->deadline : next;
        pdk_ns until = next != PDK_NEVER ? next : pdk_now_monotonic() + TIMER_END;
        idle = !pdk_cond_wait_until(&ops->timer, &ops->lock, until) && next == PDK_NEVER;
    }
}

/* Where it cannot be started, who looks at operations does its work (pdk_ops_feed), until it can be. */
static void start_timer(pdk_ops *ops)
{
    if (pdk_thread_start_detached("pdk-deadlines", timer_main, ops) == 0)
        return;
    PDK_GUARD(ops->lock);
    ops->timer_runs = false;
    pdk_cond_broadcast(&ops->timer);
    atomic_store(&ops->starved, true);
}

/* Whether a timer is to be started now; it is counted as running then. */
static bool timer_is_due(pdk_ops *ops) PDK_REQUIRES(ops->lock)
{
    bool due = ops->heap_len > 0 && ops->has_threads && !ops->timer_runs && !ops->ended;
    ops->timer_runs |= due;
    return due;
}

/* Puts it on the heap; the first one starts the timer. false = no memory. */
static bool watch_deadline(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    bool start;
    {
        PDK_GUARD(ops->lock);
        if (atomic_load(&op->told))
            return true;
        if (!heap_add(op))
            return false;
        start = timer_is_due(ops);
    }
    if (start)
        start_timer(ops);
    return true;
}

void pdk_ops_feed(pdk_ops *ops)
{
    if (!atomic_load(&ops->starved))
        return;
    pdk_ns now = pdk_now_monotonic(), last = atomic_load(&ops->fed);
    if (now - last < FEED_PAUSE || !atomic_compare_exchange_strong(&ops->fed, &last, now))
        return;
    pdk_ops_expire(ops);
    bool start;
    {
        PDK_GUARD(ops->lock);
        if (ops->ended)
            return;
        pdk_workers_retry(ops->workers);
        start = timer_is_due(ops);
    }
    if (start)
        start_timer(ops);
}

pdk_ns pdk_op_deadline(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    return op->deadline;
}

void pdk_op_set_deadline(pdk_op *op, pdk_ns deadline)
{
    {
        PDK_GUARD(op->ops->lock);
        heap_remove(op);
        op->deadline = deadline;
    }
    watch_deadline(op); /* without memory its work is bounded by its own limit alone */
}

/* ---- submission ---------------------------------------------------------------------------------------- */

atomic_bool *pdk_op_cancelled(pdk_op *op)
{
    return &op->cancelled;
}

static pdk_op *op_new(pdk_ops *ops, const pdk_op_kind *kind, void *work, const pdk_op_how *how, pdk_error *err)
{
    pdk_op *op = calloc(1, sizeof *op);
    if (op == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the operation");
        return NULL;
    }
    op->job = (pdk_job){ .run = run_job, .work_class = kind->work_class };
    op->ops = ops;
    op->kind = kind;
    op->work = work;
    op->ctx = how->ctx;
    op->callback = how->callback;
    op->on_output = how->on_output;
    op->deadline = how->timeout > 0 ? pdk_after(pdk_now_monotonic(), pdk_seconds(how->timeout)) : PDK_NEVER;
    atomic_init(&op->refs, 2); /* the handle's and the work's */
    pdk_cond_init(&op->changed);
    atomic_fetch_add(&ops->refs, 1);
    return op;
}

/* For one that was never queued: its work stays its caller's. */
static void op_discard(pdk_op *op)
{
    {
        PDK_GUARD(op->ops->lock);
        op->stage = PDK_OP_ENDED;
        op->refused = true;
    }
    pdk_op_release(op);
    pdk_op_release(op);
}

static int admit(pdk_op *op, pdk_error *err)
{
    pdk_ops *ops = op->ops;
    PDK_GUARD(op->ops->lock);
    op->next = ops->all;
    if (op->next != NULL)
        op->next->prev = op;
    ops->all = op;
    return ops->ended || (ops->closed && !op->kind->survives_close) ? pdk_fail(err, PDK_E_CLOSED, 0, "the runtime is closed") : 0;
}

/* Begins it: queued for a worker, or waiting. */
static int launch(pdk_op *op, pdk_error *err)
{
    int rc = op->kind->begin != NULL ? op->kind->begin(op, op->work, err) : 1;
    if (rc == 0 && park(op)) { /* from here on others may run and end it: the handle's reference keeps it */
        if (must_leave(op))
            take_out(op);
        return 0;
    }
    if (rc < 0)
        return -1;
    {
        PDK_GUARD(op->ops->lock);
        op->stage = PDK_OP_QUEUED;
    }
    return pdk_workers_submit(op->ops->workers, &op->job, false, err);
}

static pdk_op *submit(pdk_ops *ops, const pdk_op_kind *kind, void *work, const pdk_op_how *how, bool no_timer, pdk_error *err)
{
    if (ops == NULL || pdk_ops_foreign(ops, err) < 0) {
        if (ops == NULL)
            pdk_fail(err, PDK_E_CLOSED, 0, "the runtime is closed");
        return NULL;
    }
    pdk_op *op = op_new(ops, kind, work, how, err);
    if (op == NULL)
        return NULL;
    PDK_AUTO_UNREF pdk_op *held = pdk_op_retain(op); /* its callback, on another thread, may free it before this returns */
    op->no_timer = no_timer;
    if (admit(op, err) < 0 || launch(op, err) < 0) {
        op_discard(op);
        return NULL;
    }
    if (!watch_deadline(op)) /* it runs all the same; what bounds it is the limit that its work is under */
        pdk_log_write(pdk_log_current(), PDK_WARN, "no_timer", NULL, 0);
    return op;
}

pdk_op *pdk_op_submit(pdk_ops *ops, const pdk_op_kind *kind, void *work, const pdk_op_how *how, pdk_error *err)
{
    return submit(ops, kind, work, how, false, err);
}

int pdk_op_do(pdk_ops *ops, const pdk_op_kind *kind, void *work, double timeout, int (*take)(void *work, bool late, void *to),
              void *to, pdk_error *err)
{
    pdk_op_how how = { .timeout = timeout };
    pdk_op *op = submit(ops, kind, work, &how, true, err);
    if (op == NULL) {
        kind->drop(work);
        return -1;
    }
    int rc = pdk_op_wait(op, -1, err);
    if (rc > 0) {
        rc = pdk_op_answer(op);
        if (take != NULL)
            pdk_op_take(op, kind, take, to);
    }
    pdk_op_free(op);
    return rc;
}

/* ---- all of them --------------------------------------------------------------------------------------- */

pdk_ops *pdk_ops_new(pdk_runtime *rt, int workers, pdk_error *err)
{
    pdk_ops *ops = calloc(1, sizeof *ops);
    if (ops == NULL || (ops->workers = pdk_workers_new(workers, &ops->starved)) == NULL) {
        free(ops);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for asynchronous operations");
        return NULL;
    }
    pdk_mutex_init(&ops->lock);
    pdk_cond_init(&ops->timer);
    atomic_init(&ops->refs, 1);
    atomic_init(&ops->next_due, PDK_NEVER);
    ops->pid = pdk_process_id();
    ops->has_threads = workers > 0;
    ops->rt = rt;
    ops->fd = -1;
    return ops;
}

/* The operation behind `op` (NULL = the first), with a reference; `op`'s is given back. */
static pdk_op *next_of(pdk_ops *ops, pdk_op *op)
{
    pdk_op *next;
    {
        PDK_GUARD(ops->lock);
        next = op == NULL ? ops->all : op->next;
        if (next != NULL)
            pdk_op_retain(next);
    }
    if (op != NULL)
        pdk_op_release(op);
    return next;
}

void pdk_ops_close(pdk_ops *ops)
{
    if (ops == NULL)
        return;
    {
        PDK_GUARD(ops->lock);
        ops->closed = true;
    }
    for (pdk_op *op = next_of(ops, NULL); op != NULL; op = next_of(ops, op)) {
        bool leaves;
        {
            PDK_GUARD(ops->lock);
            pdk_cond_broadcast(&op->changed); /* a worker that waits to be rid of output */
            leaves = !op->kind->survives_close && op->why == PDK_OK && (op->stage == PDK_OP_WAITS || op->stage == PDK_OP_QUEUED);
            if (leaves) {
                op->why = PDK_E_CLOSED;
                atomic_store(&op->cancelled, true);
            }
        }
        if (leaves)
            take_out(op);
    }
}

/* Whether nothing runs, and nothing is to run, any more: from then on nothing may be submitted. */
static bool end_now(pdk_ops *ops)
{
    PDK_GUARD(ops->lock);
    pdk_worker_counts n = pdk_workers_count(ops->workers);
    bool busy = n.queued + n.running > 0;
    for (const pdk_op *op = ops->all; op != NULL && !busy; op = op->next)
        busy = op->stage != PDK_OP_ENDED;
    ops->ended = !busy;
    return ops->ended;
}

/* A result that nobody has taken: what it holds is the runtime's. */
static void undo_untaken(pdk_op *op)
{
    bool undo;
    {
        PDK_GUARD(op->ops->lock);
        undo = op->has_result && !op->late && op->kind->undo != NULL;
        op->has_result &= !undo;
    }
    if (undo)
        op->kind->undo(op->work);
}

void pdk_ops_end(pdk_ops *ops)
{
    if (ops == NULL || ops->pid != pdk_process_id()) /* a forked child: what its parent's threads held stays as it is */
        return;
    pdk_ops_close(ops);
    while (!end_now(ops))
        if (!pdk_workers_run_one(ops->workers)) /* without threads, this one does it */
            pdk_sleep_ns(END_LOOK);
    pdk_workers_free(ops->workers);
    {
        PDK_GUARD(ops->lock);
        ops->workers = NULL;
        pdk_cond_broadcast(&ops->timer);
        while (ops->timer_runs)
            pdk_cond_wait(&ops->timer, &ops->lock);
    }
    for (pdk_op *op = next_of(ops, NULL); op != NULL; op = next_of(ops, op))
        undo_untaken(op);
    pdk_ops_forget_ready(ops);
    {
        PDK_GUARD(ops->lock);
        ops->rt = NULL;
    }
    pdk_ops_unref(ops);
}

void pdk_ops_look(pdk_ops *ops)
{
    pdk_runtime *rt;
    {
        PDK_GUARD(ops->lock);
        rt = ops->rt;
    }
    if (rt != NULL && rt->serial != NULL)
        pdk_serial_poll(rt->serial); /* takes our lock to grant */
}

void pdk_ops_run(pdk_ops *ops)
{
    pdk_ops_expire(ops);
    pdk_ops_look(ops);
    for (int n = pdk_workers_count(ops->workers).queued; n > 0 && pdk_workers_run_one(ops->workers); n--)
        pdk_ops_expire(ops);
}

pdk_ops_counts pdk_ops_count(pdk_ops *ops)
{
    pdk_ops_counts n = { .ready = atomic_load(&ops->ready) };
    PDK_GUARD(ops->lock);
    for (const pdk_op *op = ops->all; op != NULL; op = op->next) {
        n.queued += op->stage == PDK_OP_QUEUED;
        n.parked += op->stage == PDK_OP_WAITS || op->stage == PDK_OP_LEAVING;
        n.running += op->stage == PDK_OP_RUNNING;
    }
    if (ops->workers != NULL)
        n.workers = pdk_workers_count(ops->workers);
    return n;
}

static pdk_mutex process_lock = { PTHREAD_MUTEX_INITIALIZER };
static pdk_ops *process_ops; /* process_lock */

pdk_ops *pdk_ops_process(pdk_error *err)
{
    PDK_GUARD(process_lock);
    if (process_ops == NULL || process_ops->pid != pdk_process_id()) /* a forked child makes its own */
        process_ops = pdk_ops_new(NULL, 256, err);
    return process_ops;
}
