/* async.c -- what each kind of asynchronous operation does, but for acquire (async_acquire.c); see async.h and op.h.
 *
 * The data of an operation are written by its worker until its end, and by who takes the result, under the operations' lock, after
 * it. What a kind's `drop` touches must not belong to the runtime, which may be gone by then. */
#include "async.h"
#include "box.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *no_memory(pdk_error *err)
{
    pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the operation");
    return NULL;
}

/* Submits; on error the data are dropped. */
static pdk_op *start(pdk_runtime *rt, const pdk_op_kind *kind, void *work, const pdk_op_how *how, pdk_error *err)
{
    if (work == NULL)
        return no_memory(err);
    pdk_op *op = pdk_op_submit(rt->ops, kind, work, how, err);
    if (op == NULL)
        kind->drop(work);
    return op;
}

/* The work of `op` is under its deadline and its cancel flag, for what does not drain itself. */
static pdk_limit limit_of(pdk_op *op)
{
    return (pdk_limit){ .deadline = pdk_op_deadline(op), .cancelled = pdk_op_cancelled(op) };
}

/* ---- exec ---------------------------------------------------------------------------------------------- */

#define ANSWER_GRACE (5 * PDK_NS_PER_S) /* from a command's limit until its answer is given up; as the clients' own */
#define TELL_GRACE   (PDK_NS_PER_S)     /* and until its caller is told, whatever hangs */
#define END_WAIT     (2 * PDK_NS_PER_S) /* for the sandbox to take a cancellation, */
#define END_GRACE    (3 * PDK_NS_PER_S) /* and for the command's own answer after it */
#define END_PAUSE    (20 * 1000 * 1000)

typedef struct exec_work {
    pdk_box *box;           /* a reference */
    pdk_exec_spec spec;     /* its strings lie in `args` */
    pdk_pack args;
    char name[40];
    pdk_output_sink sink;
    pdk_op *op;             /* whose work this is */
    pdk_ns limit;           /* the worker's; the command's own: from then on it ends, and nothing holds its output up */
    bool streamed;          /* the worker's */
    bool taken;             /* the result has been */
    pdk_result out;         /* the worker's, until the end */
    pdk_result late;        /* what its caller is told when the worker is late */
    atomic_bool abort;      /* its I/O is to be given up: nobody can end the command */
    atomic_bool ended;      /* the worker is through */
    pdk_job ender;          /* asks the sandbox to end it */
    atomic_bool ending;
} exec_work;

static void exec_drop(void *work)
{
    exec_work *w = work;
    pdk_box_drop(w->box);
    pdk_pack_free(&w->args);
    pdk_result_free(&w->out);
    pdk_result_free(&w->late);
    free(w);
}

static void exec_output(void *ctx, int stream, const void *bytes, size_t len)
{
    exec_work *w = ctx;
    w->streamed = true;
    pdk_op_output(w->op, stream, bytes, len, w->limit);
}

static int exec_begin(pdk_op *op, void *work, pdk_error *err)
{
    (void)err;
    ((exec_work *)work)->op = op;
    return 1;
}

static int exec_run(pdk_op *op, void *work, pdk_error *err)
{
    exec_work *w = work;
    pdk_ns now = pdk_now_monotonic(), left = pdk_op_deadline(op) - now;
    if (left <= 0)
        return pdk_fail(err, PDK_E_TIMEOUT, 0, "the time limit of the exec passed before it began");
    w->spec.timeout = pdk_to_seconds(left);
    w->spec.cancelled = pdk_op_cancelled(op);
    w->limit = now + left;
    pdk_op_set_deadline(op, w->limit + ANSWER_GRACE + TELL_GRACE);
    if (pdk_op_has_output(op)) {
        w->sink = (pdk_output_sink){ exec_output, w };
        w->spec.output = &w->sink;
    }
    pdk_limit limit = { .deadline = w->limit + ANSWER_GRACE, .cancelled = &w->abort };
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_box_exec(w->box, &w->spec, &w->out, err);
    pdk_limit_enter(outer);
    atomic_store(&w->ended, true);
    if (rc == 0 && !w->streamed) {
        pdk_op_output(op, 1, w->out.out, w->out.out_len, 0);
        pdk_op_output(op, 2, w->out.err, w->out.err_len, 0);
    }
    return rc;
}

/* A worker of its own asks: the command's holds on until its answer says that it has ended. */
static void end_command(pdk_job *job)
{
    exec_work *w = PDK_OF(job, exec_work, ender);
    pdk_ns give_up = pdk_now_monotonic() + END_WAIT;
    bool taken = false;
    for (int rc = 0; !taken && rc == 0 && !atomic_load(&w->ended) && pdk_now_monotonic() < give_up;) {
        PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
        pdk_limit limit = { .deadline = give_up };
        const pdk_limit *outer = pdk_limit_enter(&limit);
        rc = pdk_box_exec_cancel(w->box, w->name, &ignored);
        pdk_limit_enter(outer);
        taken = rc == 1;
        if (rc == 0) /* on its way there, or just answered */
            pdk_sleep_ns(END_PAUSE);
    }
    pdk_ns until = pdk_now_monotonic() + END_GRACE;
    while (taken && !atomic_load(&w->ended) && pdk_now_monotonic() < until)
        pdk_sleep_ns(END_PAUSE);
    atomic_store(&w->abort, true); /* when it has not ended by now, its outcome is unknown */
    pdk_op_release(w->op);
}

static void exec_cancelled(pdk_op *op, void *work)
{
    exec_work *w = work;
    if (atomic_exchange(&w->ending, true))
        return;
    pdk_op_retain(op);
    w->ender = (pdk_job){ .run = end_command, .work_class = PDK_WORK_TEARDOWN };
    if (pdk_op_submit_job(op, &w->ender) < 0) {
        atomic_store(&w->abort, true);
        pdk_op_release(op);
    }
}

static int exec_late(pdk_op *op, void *work, pdk_error *err)
{
    exec_work *w = work;
    (void)op, (void)err;
    pdk_box_exec_given_up(w->box, &w->spec, &w->late);
    return 0;
}

static const pdk_op_kind exec_kind = { .name = "exec", .work_class = PDK_WORK_EXEC, .begin = exec_begin, .run = exec_run, .late = exec_late,
                                       .cancelled = exec_cancelled, .drop = exec_drop, .knows_cancel = true };

/* Copies what the command is made of; its strings end with NUL. */
static bool copy_command(exec_work *w, const pdk_exec_spec *s)
{
    pdk_pack *p = &w->args;
    pdk_put_str(p, s->command, s->command_len);
    pdk_put_view(p, s->env);
    pdk_put_cstr(p, s->cwd);
    pdk_put_str(p, s->stdin_data, s->stdin_len);
    pdk_put_cstr(p, s->scope);
    pdk_put_cstr(p, s->session);
    if (p->failed)
        return false;
    pdk_view one[6];
    for (size_t i = 0; i < 6; i++)
        one[i] = pdk_view_nth(p, i);
    w->spec = *s;
    w->spec.command = pdk_view_str(one[0], NULL);
    w->spec.env = one[1];
    w->spec.cwd = pdk_view_str(one[2], NULL);
    w->spec.stdin_data = s->stdin_data == NULL ? NULL : pdk_view_str(one[3], NULL);
    w->spec.scope = pdk_view_str(one[4], NULL);
    w->spec.session = pdk_view_str(one[5], NULL);
    w->spec.name = w->name;
    return true;
}

static void name_command(exec_work *w)
{
    unsigned char raw[12];
    pdk_random(raw, sizeof raw);
    for (size_t i = 0; i < sizeof raw; i++)
        snprintf(w->name + 2 * i, 3, "%02x", raw[i]);
}

pdk_op *pdk_async_exec(pdk_box *box, const pdk_exec_spec *spec, const pdk_op_how *how, pdk_error *err)
{
    if (pdk_exec_check(spec, err) < 0)
        return NULL;
    exec_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return no_memory(err);
    w->box = pdk_box_ref(box);
    name_command(w);
    if (!copy_command(w, spec)) {
        exec_drop(w);
        pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "command and stdin are larger than %u MiB, or there is no memory for them", PDK_PACK_MAX >> 20);
        return NULL;
    }
    pdk_op_how own = *how;
    own.timeout = spec->timeout > 0 ? spec->timeout : box->rt->config.command_timeout;
    return start(box->rt, &exec_kind, w, &own, err);
}

static int exec_take(void *work, bool late, void *to)
{
    exec_work *w = work;
    pdk_result *from = late ? &w->late : &w->out;
    if (w->taken)
        return 0;
    if (from->out == NULL && (from->out = calloc(1, 1)) == NULL)
        return 0;
    if (from->err == NULL && (from->err = calloc(1, 1)) == NULL)
        return 0;
    w->taken = true;
    *(pdk_result *)to = *from;
    *from = (pdk_result){ .exit_code = -1 };
    return 1;
}

PDK_API int pdk_op_result(pdk_op *op, pdk_result *out)
{
    if (out == NULL)
        return 0;
    *out = (pdk_result){ .exit_code = -1 };
    return pdk_op_take(op, &exec_kind, exec_take, out);
}

/* ---- release ------------------------------------------------------------------------------------------- */

typedef struct release_work {
    pdk_runtime *rt;
    pdk_box *box;       /* a reference; or NULL: */
    char *holder;
    pdk_op *op;
    pdk_job job;
} release_work;

static void release_drop(void *work)
{
    release_work *w = work;
    pdk_box_drop(w->box);
    free(w->holder);
    free(w);
}

static int release_begin(pdk_op *op, void *work, pdk_error *err)
{
    (void)err;
    ((release_work *)work)->op = op;
    return 1;
}

static int release_run(pdk_op *op, void *work, pdk_error *err)
{
    release_work *w = work;
    pdk_limit limit = limit_of(op);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = w->box != NULL ? pdk_box_release(w->box, err) : pdk_runtime_release(w->rt, w->holder, err);
    pdk_limit_enter(outer);
    return rc;
}

static void release_after_all(pdk_job *job)
{
    release_work *w = PDK_OF(job, release_work, job);
    PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
    pdk_box_release(w->box, &ignored);
    pdk_op_release(w->op);
}

/* It was cancelled before it began: the box is held on, unless it was freed meanwhile, and nobody else can release it. */
static void release_withdraw(void *work)
{
    release_work *w = work;
    if (w->box == NULL)
        return;
    atomic_store(&w->box->released, false);
    if (!atomic_load(&w->box->freed) || atomic_exchange(&w->box->released, true))
        return;
    w->job = (pdk_job){ .run = release_after_all, .work_class = PDK_WORK_TEARDOWN };
    pdk_op_retain(w->op);
    if (pdk_op_submit_job(w->op, &w->job) < 0) /* the runtime is gone, and its holders with it */
        pdk_op_release(w->op);
}

static const pdk_op_kind release_kind = { .name = "release", .work_class = PDK_WORK_TEARDOWN, .begin = release_begin,
                                          .run = release_run, .withdraw = release_withdraw, .drop = release_drop };

static int nothing_to_do(pdk_op *op, void *work, pdk_error *err)
{
    (void)op, (void)work, (void)err;
    return 0;
}

static const pdk_op_kind released_kind = { .name = "release", .work_class = PDK_WORK_TEARDOWN, .run = nothing_to_do,
                                           .drop = release_drop };

pdk_op *pdk_async_release(pdk_box *box, const pdk_op_how *how, pdk_error *err)
{
    release_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return no_memory(err);
    bool before = atomic_exchange(&box->released, true); /* from here on the box says `closed`, as after pdk_release */
    w->rt = box->rt;
    w->box = pdk_box_ref(box);
    pdk_op *op = start(box->rt, before ? &released_kind : &release_kind, w, how, err);
    if (op == NULL && !before)
        atomic_store(&box->released, false);
    return op;
}

pdk_op *pdk_async_release_holder(pdk_runtime *rt, const char *holder, const pdk_op_how *how, pdk_error *err)
{
    release_work *w = calloc(1, sizeof *w);
    if (w != NULL && (w->holder = strdup(holder)) == NULL) {
        free(w);
        w = NULL;
    }
    if (w == NULL)
        return no_memory(err);
    w->rt = rt;
    return start(rt, &release_kind, w, how, err);
}

/* ---- destroy ------------------------------------------------------------------------------------------- */

typedef struct destroy_work {
    pdk_runtime *rt;
    char id[64];
} destroy_work;

static int destroy_run(pdk_op *op, void *work, pdk_error *err)
{
    destroy_work *w = work;
    pdk_limit limit = limit_of(op); /* of what comes before the fence: a teardown that has begun is drained */
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = pdk_runtime_destroy(w->rt, w->id, err);
    pdk_limit_enter(outer);
    return rc;
}

static const pdk_op_kind destroy_kind = { .name = "destroy", .work_class = PDK_WORK_TEARDOWN, .run = destroy_run, .drop = free };

pdk_op *pdk_async_destroy(pdk_runtime *rt, const char *id, const pdk_op_how *how, pdk_error *err)
{
    if (pdk_check_id(id, err) < 0)
        return NULL;
    destroy_work *w = calloc(1, sizeof *w);
    if (w != NULL) {
        w->rt = rt;
        snprintf(w->id, sizeof w->id, "%s", id);
    }
    return start(rt, &destroy_kind, w, how, err);
}

/* ---- shutdown ------------------------------------------------------------------------------------------ */

typedef struct shutdown_work {
    pdk_runtime *rt;
} shutdown_work;

static int shutdown_run(pdk_op *op, void *work, pdk_error *err)
{
    (void)op;
    return pdk_runtime_shutdown(((shutdown_work *)work)->rt, err);
}

static int shutdown_late(pdk_op *op, void *work, pdk_error *err)
{
    char left[300];
    (void)op;
    pdk_runtime_left(((shutdown_work *)work)->rt, left, sizeof left);
    return pdk_fail(err, PDK_E_TIMEOUT, 0, "the time limit of the shutdown has passed; it goes on; left: %s", left);
}

static const pdk_op_kind shutdown_kind = { .name = "shutdown", .work_class = PDK_WORK_TEARDOWN, .run = shutdown_run,
                                           .late = shutdown_late, .drop = free, .survives_close = true };

pdk_op *pdk_async_shutdown(pdk_runtime *rt, const pdk_op_how *how, pdk_error *err)
{
    shutdown_work *w = calloc(1, sizeof *w);
    if (w != NULL)
        w->rt = rt;
    return start(rt, &shutdown_kind, w, how, err);
}

/* ---- files --------------------------------------------------------------------------------------------- */

typedef struct file_work {
    pdk_box *box;       /* a reference */
    char *path;
    size_t path_len;
    char *data;         /* to be written, or what was read */
    size_t len;
    pdk_pack listing;
    bool no_overwrite;
    int (*fn)(struct file_work *w, pdk_error *err);
} file_work;

static void file_drop(void *work)
{
    file_work *w = work;
    pdk_box_drop(w->box);
    pdk_pack_free(&w->listing);
    free(w->path);
    free(w->data);
    free(w);
}

static int file_write(file_work *w, pdk_error *err)
{
    return pdk_box_write(w->box, w->path, w->path_len, w->data, w->len, w->no_overwrite, err);
}

static int file_read(file_work *w, pdk_error *err)
{
    return pdk_box_read(w->box, w->path, w->path_len, &w->data, &w->len, err);
}

static int file_list(file_work *w, pdk_error *err)
{
    return pdk_box_list(w->box, w->path, w->path_len, &w->listing, err);
}

static int file_run(pdk_op *op, void *work, pdk_error *err)
{
    file_work *w = work;
    pdk_limit limit = limit_of(op);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = w->fn(w, err);
    pdk_limit_enter(outer);
    return rc;
}

static const pdk_op_kind write_kind = { .name = "write", .work_class = PDK_WORK_EXEC, .run = file_run, .drop = file_drop };
static const pdk_op_kind read_kind = { .name = "read", .work_class = PDK_WORK_EXEC, .run = file_run, .drop = file_drop };
static const pdk_op_kind list_kind = { .name = "list", .work_class = PDK_WORK_EXEC, .run = file_run, .drop = file_drop };

static char *copy_bytes(const void *bytes, size_t len)
{
    char *copy = malloc(len + 1);
    if (copy != NULL && len > 0)
        memcpy(copy, bytes, len);
    if (copy != NULL)
        copy[len] = '\0';
    return copy;
}

static file_work *file_new(pdk_box *box, const char *path, size_t path_len, int (*fn)(file_work *, pdk_error *), pdk_error *err)
{
    if (pdk_path_check(path, path_len, err) < 0)
        return NULL;
    file_work *w = calloc(1, sizeof *w);
    if (w == NULL || (w->path = copy_bytes(path, path_len)) == NULL) {
        free(w);
        return no_memory(err);
    }
    w->path_len = path_len;
    w->box = pdk_box_ref(box);
    w->fn = fn;
    return w;
}

pdk_op *pdk_async_write(pdk_box *box, const char *path, size_t path_len, const void *data, size_t len, bool no_overwrite,
                        const pdk_op_how *how, pdk_error *err)
{
    file_work *w = pdk_size_check(path, path_len, len, err) < 0 ? NULL : file_new(box, path, path_len, file_write, err);
    if (w == NULL)
        return NULL;
    w->len = len;
    w->no_overwrite = no_overwrite;
    if ((w->data = copy_bytes(data, len)) == NULL) {
        file_drop(w);
        return no_memory(err);
    }
    return start(box->rt, &write_kind, w, how, err);
}

pdk_op *pdk_async_read(pdk_box *box, const char *path, size_t path_len, const pdk_op_how *how, pdk_error *err)
{
    file_work *w = file_new(box, path, path_len, file_read, err);
    return w == NULL ? NULL : start(box->rt, &read_kind, w, how, err);
}

pdk_op *pdk_async_list(pdk_box *box, const char *path, size_t path_len, const pdk_op_how *how, pdk_error *err)
{
    file_work *w = file_new(box, path, path_len, file_list, err);
    return w == NULL ? NULL : start(box->rt, &list_kind, w, how, err);
}

typedef struct bytes_to {
    char **data;
    size_t *len;
} bytes_to;

static int read_take(void *work, bool late, void *to)
{
    file_work *w = work;
    bytes_to *out = to;
    if (late || w->data == NULL)
        return 0;
    *out->data = w->data;
    *out->len = w->len;
    w->data = NULL;
    return 1;
}

PDK_API int pdk_op_bytes(pdk_op *op, char **data, size_t *len)
{
    bytes_to out = { data, len };
    if (data == NULL || len == NULL)
        return 0;
    *data = NULL;
    *len = 0;
    return pdk_op_take(op, &read_kind, read_take, &out);
}

static int list_take(void *work, bool late, void *to)
{
    file_work *w = work;
    if (late || w->listing.len == 0)
        return 0;
    pdk_put_view(to, pdk_view_of(&w->listing));
    return 1;
}

int pdk_op_pack(pdk_op *op, pdk_pack *out)
{
    return pdk_op_take(op, &list_kind, list_take, out);
}

/* ---- any function -------------------------------------------------------------------------------------- */

typedef struct call_work {
    pdk_runtime *rt;    /* or NULL */
    int (*fn)(void *arg, pdk_error *err);
    void (*drop)(void *arg);
    void *arg;
} call_work;

static void call_drop(void *work)
{
    call_work *w = work;
    if (w->drop != NULL)
        w->drop(w->arg);
    free(w);
}

static int call_run(pdk_op *op, void *work, pdk_error *err)
{
    call_work *w = work;
    pdk_limit limit = limit_of(op);
    const pdk_limit *outer = pdk_limit_enter(&limit);
    int rc = w->fn(w->arg, err);
    pdk_limit_enter(outer);
    return rc;
}

static const pdk_op_kind call_kinds[PDK_WORK_CLASSES] = {
    { .name = "call", .work_class = PDK_WORK_ACQUIRE, .run = call_run, .drop = call_drop },
    { .name = "call", .work_class = PDK_WORK_EXEC, .run = call_run, .drop = call_drop },
    { .name = "call", .work_class = PDK_WORK_TEARDOWN, .run = call_run, .drop = call_drop },
};

pdk_op *pdk_op_call(pdk_runtime *rt, pdk_work_class work_class, double timeout, int (*fn)(void *arg, pdk_error *err),
                    void (*drop)(void *arg), void *arg, pdk_callback callback, void *ctx, pdk_error *err)
{
    call_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return no_memory(err);
    *w = (call_work){ rt, fn, drop, arg };
    pdk_op_how how = { .timeout = timeout, .callback = callback, .ctx = ctx };
    pdk_ops *ops = rt != NULL ? rt->ops : pdk_ops_process(err);
    pdk_op *op = ops == NULL ? NULL : pdk_op_submit(ops, &call_kinds[work_class], w, &how, err);
    if (op == NULL) {
        w->drop = NULL; /* arg is still the caller's */
        call_drop(w);
    }
    return op;
}

static int arg_take(void *work, bool late, void *to)
{
    *(void **)to = late ? NULL : ((call_work *)work)->arg;
    return 1;
}

void *pdk_op_arg(pdk_op *op)
{
    void *arg = NULL;
    for (int c = 0; c < PDK_WORK_CLASSES && arg == NULL; c++)
        pdk_op_take(op, &call_kinds[c], arg_take, &arg);
    return arg;
}

int pdk_async_running(pdk_runtime *rt)
{
    return pdk_ops_count(rt->ops).running;
}

int pdk_async_fd(pdk_runtime *rt, pdk_error *err)
{
    pdk_ops *ops = rt != NULL ? rt->ops : pdk_ops_process(err);
    return ops != NULL ? pdk_ops_fd(ops, err) : -1;
}
