/* op_host.c -- what the host's threads do with operations: poll, wait, take, cancel, and the callbacks; see op.h. */
#include "op_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define OUTPUT_MAX ((size_t)256 << 10) /* of one operation, not taken yet: then its command waits */
#define OUTPUT_MOST ((size_t)64 << 20) /* when it may not wait: what comes then is dropped, as the result's own bound drops it */
#define SLICE      (10 * 1000 * 1000)  /* ns: how often who waits without threads looks again */

/* ---- what waits for dispatch --------------------------------------------------------------------------- */

static bool has_event(const pdk_op *op)
{
    if (op->freed)
        return false;
    return (op->chunk_first != NULL && op->on_output != NULL) || (atomic_load(&op->told) && op->callback != NULL);
}

void pdk_op_list(pdk_op *op) PDK_REQUIRES(op->ops->lock)
{
    pdk_ops *ops = op->ops;
    if (op->listed || op->calling != 0 || ops->ended || !has_event(op))
        return;
    op->listed = true;
    op->ready_next = NULL;
    op->ready_prev = ops->ready_last;
    *(ops->ready_last != NULL ? &ops->ready_last->ready_next : &ops->ready_first) = pdk_op_retain(op);
    ops->ready_last = op;
    static const uint64_t one = 1;
    if (atomic_fetch_add(&ops->ready, 1) == 0 && ops->fd >= 0)
        while (write(ops->fd, &one, sizeof one) < 0 && errno == EINTR)
            ;
}

/* Takes it off the list; its reference is the caller's. */
static void unlist(pdk_op *op)
{
    pdk_ops *ops = op->ops;
    *(op->ready_prev != NULL ? &op->ready_prev->ready_next : &ops->ready_first) = op->ready_next;
    *(op->ready_next != NULL ? &op->ready_next->ready_prev : &ops->ready_last) = op->ready_prev;
    op->listed = false;
    uint64_t count;
    if (atomic_fetch_sub(&ops->ready, 1) == 1 && ops->fd >= 0)
        while (read(ops->fd, &count, sizeof count) < 0 && errno == EINTR)
            ;
}

static _Thread_local int in_callbacks; /* of operations; this thread's, one inside the other */

/* Runs the next callback of an operation that is on no list. `calling` keeps others away meanwhile. */
static bool deliver(pdk_op *op)
{
    pdk_op_chunk *piece = NULL;
    pdk_callback callback = NULL;
    pdk_output on_output;
    {
        PDK_GUARD(op->ops->lock);
        if (op->calling != 0 || !has_event(op))
            return false;
        op->calling = pdk_thread_self();
        on_output = op->on_output;
        if (op->chunk_first != NULL) {
            piece = op->chunk_first;
            op->chunk_first = piece->next;
            if (op->chunk_first == NULL)
                op->chunk_last = NULL;
            op->chunk_bytes -= piece->len;
            pdk_cond_broadcast(&op->changed);
        } else {
            callback = op->callback;
            op->callback = NULL;
        }
    }
    in_callbacks++;
    if (callback != NULL)
        callback(op->ctx, op);
    else if (on_output != NULL)
        on_output(op->ctx, piece->stream, piece->bytes, piece->len);
    in_callbacks--;
    free(piece);
    PDK_GUARD(op->ops->lock);
    op->calling = 0;
    pdk_op_list(op);
    pdk_cond_broadcast(&op->changed);
    return true;
}

/* ---- output -------------------------------------------------------------------------------------------- */

bool pdk_op_has_output(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    return op->on_output != NULL;
}

/* Whether its work has to wait until the host has taken some of its output. */
static bool output_is_full(const pdk_op *op) PDK_REQUIRES(op->ops->lock)
{
    return op->ops->has_threads && !op->ops->closed && op->chunk_bytes >= OUTPUT_MAX && op->why == PDK_OK && !op->late &&
           op->on_output != NULL;
}

void pdk_op_output(pdk_op *op, int stream, const void *bytes, size_t len, pdk_ns until)
{
    pdk_op_chunk *c = len > 0 ? malloc(sizeof *c + len) : NULL;
    if (c == NULL) /* nothing, or no memory: the result has all of it */
        return;
    *c = (pdk_op_chunk){ .stream = stream, .len = len };
    memcpy(c->bytes, bytes, len);
    PDK_GUARD(op->ops->lock);
    for (bool waits = true; waits && output_is_full(op);)
        waits = pdk_cond_wait_until(&op->changed, &op->ops->lock, until);
    if (op->on_output == NULL || atomic_load(&op->told) || op->chunk_bytes >= OUTPUT_MOST) {
        free(c);
        return;
    }
    *(op->chunk_last != NULL ? &op->chunk_last->next : &op->chunk_first) = c;
    op->chunk_last = c;
    op->chunk_bytes += len;
    pdk_op_list(op);
    pdk_cond_broadcast(&op->changed); /* for who waits for it and runs its callbacks meanwhile */
}

/* ---- the handle ---------------------------------------------------------------------------------------- */

PDK_API int pdk_op_poll(pdk_op *op, pdk_error *err)
{
    if (op == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `op` is missing");
    if (pdk_ops_foreign(op->ops, err) < 0)
        return -1;
    if (!atomic_load(&op->told)) {
        pdk_ops_feed(op->ops);
        return 0;
    }
    pdk_error_copy(err, &op->error);
    return op->answer >= 0 ? 1 : -1;
}

PDK_API int pdk_op_answer(pdk_op *op)
{
    return op != NULL && atomic_load(&op->told) ? op->answer : -1;
}

int pdk_op_take(pdk_op *op, const pdk_op_kind *kind, int (*take)(void *work, bool late, void *to), void *to)
{
    if (op == NULL || op->kind != kind || pdk_ops_foreign(op->ops, NULL) < 0)
        return 0;
    PDK_GUARD(op->ops->lock);
    return atomic_load(&op->told) && op->has_result ? take(op->work, op->late, to) : 0;
}

PDK_API int pdk_cancel(pdk_op *op)
{
    if (op == NULL || pdk_ops_foreign(op->ops, NULL) < 0)
        return 1;
    PDK_AUTO_UNREF pdk_op *held = pdk_op_retain(op);
    return pdk_op_ask(held, false) ? 0 : 1;
}

/* Its callback may be under way on another thread: what the callback uses must not be freed under it. Two callbacks that free each
 * other's operations would wait for ever, so inside one nobody waits. */
static void wait_for_callback(pdk_op *op)
{
    PDK_GUARD(op->ops->lock);
    while (in_callbacks == 0 && op->calling != 0)
        pdk_cond_wait(&op->changed, &op->ops->lock);
}

/* Its callbacks are not wanted any more: nobody is to be woken for them. */
static void forget_event(pdk_op *op)
{
    {
        PDK_GUARD(op->ops->lock);
        if (!op->listed)
            return;
        unlist(op);
    }
    pdk_op_release(op); /* the list's */
}

static void let_go(pdk_op *op, bool waits)
{
    if (op == NULL || pdk_ops_foreign(op->ops, NULL) < 0)
        return;
    PDK_AUTO_UNREF pdk_op *held = op; /* the handle's */
    bool ends = pdk_op_ask(held, true);
    forget_event(held);
    if (waits)
        wait_for_callback(held);
    if (ends)
        return;
    bool undo;
    {
        PDK_GUARD(op->ops->lock);
        undo = op->has_result && !op->late && op->kind->undo != NULL && op->stage == PDK_OP_ENDED && !op->ops->ended;
        op->has_result = false;
        if (undo) {
            op->job = (pdk_job){ .run = pdk_op_undo_job, .work_class = PDK_WORK_TEARDOWN };
            pdk_op_retain(op);
            undo = pdk_workers_submit(op->ops->workers, &op->job, false, NULL) < 0;
        }
    }
    if (undo)
        pdk_op_undo_job(&op->job);
}

PDK_API void pdk_op_free(pdk_op *op)
{
    let_go(op, true);
}

void pdk_op_let_go(pdk_op *op)
{
    let_go(op, false);
}

/* One look, under the lock of nobody: what who waits for it does next. */
typedef enum wait_step { WAIT_OVER, WAIT_DELIVER, WAIT_ON } wait_step;

static wait_step look(pdk_op *op) PDK_REQUIRES(op->ops->lock)
{
    if (op->calling == pdk_thread_self()) /* inside its own callback */
        return WAIT_OVER;
    if (op->calling == 0 && has_event(op)) {
        if (op->listed)
            unlist(op);
        else
            pdk_op_retain(op);
        return WAIT_DELIVER;
    }
    return atomic_load(&op->told) && op->calling == 0 ? WAIT_OVER : WAIT_ON;
}

/* Waits for a change, at most until `until`. */
static void wait_change(pdk_op *op, pdk_ns until)
{
    pdk_ops *ops = op->ops;
    if (!ops->has_threads)
        pdk_ops_look(ops);
    if (!ops->has_threads && pdk_workers_run_one(ops->workers)) /* this one does the work, then */
        return;
    pdk_ops_feed(ops);
    PDK_GUARD(op->ops->lock);
    if ((!ops->has_threads || atomic_load(&ops->starved)) && until > pdk_now_monotonic() + SLICE)
        until = pdk_now_monotonic() + SLICE;
    if (look(op) == WAIT_ON)
        pdk_cond_wait_until(&op->changed, &op->ops->lock, until);
}

PDK_API int pdk_op_wait(pdk_op *op, double seconds, pdk_error *err)
{
    if (op == NULL || pdk_ops_foreign(op->ops, NULL) < 0)
        return pdk_op_poll(op, err);
    PDK_AUTO_UNREF pdk_op *held = pdk_op_retain(op); /* its callback may free it */
    pdk_ops *ops = op->ops;
    pdk_ns until = seconds < 0 ? PDK_NEVER : pdk_after(pdk_now_monotonic(), pdk_seconds(seconds));
    for (bool expired = false;;) {
        wait_step step;
        pdk_ns due;
        {
            PDK_GUARD(op->ops->lock);
            step = look(op);
            due = expired || !(op->no_timer || !ops->has_threads) ? PDK_NEVER : op->deadline;
        }
        if (step == WAIT_DELIVER) {
            deliver(held);
            pdk_op_release(held);
            continue;
        }
        pdk_ns now = pdk_now_monotonic();
        if (step == WAIT_ON && now >= due) { /* once: when it has no effect, it is about to be told */
            pdk_op_expire(held);
            expired = true;
        } else if (step == WAIT_OVER || now >= until) {
            return pdk_op_poll(held, err);
        } else {
            wait_change(held, due < until ? due : until);
        }
    }
}

/* ---- all of a runtime's ---- */

int pdk_ops_fd(pdk_ops *ops, pdk_error *err)
{
    if (pdk_ops_foreign(ops, err) < 0)
        return -1;
    PDK_GUARD(ops->lock);
    if (ops->fd < 0) {
        ops->fd = eventfd(atomic_load(&ops->ready) > 0 ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (ops->fd < 0)
            return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot make the descriptor that tells of finished operations");
    }
    return ops->fd;
}

static pdk_op *take_ready(pdk_ops *ops)
{
    PDK_GUARD(ops->lock);
    pdk_op *op = ops->ready_first;
    if (op != NULL)
        unlist(op);
    return op;
}

void pdk_ops_forget_ready(pdk_ops *ops)
{
    for (pdk_op *op; (op = take_ready(ops)) != NULL;)
        pdk_op_release(op);
}

int pdk_ops_dispatch(pdk_ops *ops, int max)
{
    if (!ops->has_threads && pdk_now_monotonic() >= atomic_load(&ops->next_due) && pdk_ops_foreign(ops, NULL) == 0)
        pdk_ops_expire(ops);
    if (atomic_load(&ops->starved) && pdk_ops_foreign(ops, NULL) == 0)
        pdk_ops_feed(ops);
    if (atomic_load(&ops->ready) == 0 || pdk_ops_foreign(ops, NULL) < 0)
        return 0;
    int n = 0;
    atomic_fetch_add(&ops->refs, 1); /* a callback may free the runtime */
    while (n < max) {
        PDK_AUTO_UNREF pdk_op *op = take_ready(ops);
        if (op == NULL)
            break;
        n += deliver(op);
    }
    pdk_ops_unref(ops);
    return n;
}
