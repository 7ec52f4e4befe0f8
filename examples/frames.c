/* frames.c -- a host that may never wait: 500 agents in one loop at 60 frames a second, over an engine that takes 300 ms to make
 * a sandbox and hangs now and then.
 *
 *     frames [CONFIG.lua [SECONDS [AGENTS]]]
 *
 * Each agent, over and over: acquires a sandbox, runs a command in it, gives it back, thinks for a while; every so often it has
 * its sandbox destroyed. All of that is submitted; once a frame pdk_dispatch runs the callbacks of what has ended. The loop first
 * runs without paddock for as long: what is late there is the machine's noise, and is late beside paddock, too.
 * Build: cc frames.c $(pkg-config --cflags --libs paddock)
 */
#define _GNU_SOURCE
#include <paddock.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_AGENTS = 5000, HZ = 60, WORK_US = 2000 }; /* of each frame, the host's own work takes 2 ms */

/* ---- measuring ----------------------------------------------------------------------------------------- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Where this thread's time has gone, in seconds. What is neither on a processor nor in line for one is sleep: a wait. */
typedef struct moment {
    double wall, on_cpu, in_line;
} moment;

static moment where(void)
{
    static int fd = -1; /* of the only thread that asks */
    char text[100] = "";
    struct timespec cpu;
    moment m = { .wall = now() };
    if (fd < 0)
        fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && pread(fd, text, sizeof text - 1, 0) > 0)
        m.in_line = strtod(strchr(text, ' ') != NULL ? strchr(text, ' ') : "0", NULL) / 1e9;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
    m.on_cpu = (double)cpu.tv_sec + (double)cpu.tv_nsec / 1e9;
    return m;
}

static void raise_to(double *most, double value)
{
    if (value > *most) *most = value;
}

typedef struct figures {
    long frames, late;      /* late = the frame's work took longer than a frame lasts */
    double longest;         /* seconds of work in one frame */
    double inside;          /* seconds inside paddock, in sum; and the most in one frame: */
    double most, asleep, on_cpu, in_line;
} figures;

static void show(const char *what, const figures *f)
{
    printf("%-16s %6ld frames, longest %7.2f ms, over budget %ld (%.2f %%)\n", what, f->frames, f->longest * 1e3, f->late,
           f->frames > 0 ? 100.0 * (double)f->late / (double)f->frames : 0);
}

/* ---- agents -------------------------------------------------------------------------------------------- */

typedef enum { THINKING, ACQUIRING, RUNNING, RELEASING, DESTROYING } stage;

typedef struct agent {
    int number, turns;
    stage at;
    long wakes;             /* the frame at which it has thought enough */
    pdk_op *op;             /* what it waits for */
    pdk_box *box;
    size_t seen;            /* bytes of its command's output so far */
} agent;

static pdk_runtime *rt;
static agent agents[MAX_AGENTS];
static int agent_count = 500;
static long frame, turns, timeouts, failures, bytes;
static bool closing; /* what ends now ends with `closed`, and nobody begins anew */

static void think(agent *a)
{
    a->at = THINKING;
    a->wakes = frame + 10 + (a->number * 7 + a->turns * 13) % 90;
}

/* An operation that could not be submitted, or has failed. A time limit is part of the game; anything else is not. */
static void trouble(agent *a, const char *what, pdk_error *err)
{
    if (err->kind == PDK_E_TIMEOUT) {
        timeouts++;
    } else if (closing && err->kind == PDK_E_CLOSED) {
        /* as it should be */
    } else if (failures++ < 10) {
        fprintf(stderr, "agent %d: %s: %s: %s\n", a->number, what, pdk_error_kind_name(err->kind), err->message);
    }
    pdk_error_clear(err);
    pdk_box_free(a->box); /* waits for nothing here: with threads it is given back behind us */
    a->box = NULL;
    think(a);
}

/* The end of every operation: true = it went well. */
static bool ended(agent *a, pdk_op *op, const char *what)
{
    pdk_error err = PDK_NO_ERROR;
    if (pdk_op_poll(op, &err) == 1)
        return true;
    pdk_op_free(op);
    trouble(a, what, &err);
    return false;
}

static void start(agent *a, stage at, pdk_op *op, const char *what, pdk_error *err)
{
    a->op = op;
    a->at = at;
    if (op == NULL)
        trouble(a, what, err);
}

static void on_destroyed(void *ctx, pdk_op *op)
{
    agent *a = ctx;
    if (!ended(a, op, "destroy"))
        return;
    pdk_op_free(op);
    think(a);
}

static void on_released(void *ctx, pdk_op *op)
{
    agent *a = ctx;
    char id[64];
    pdk_error err = PDK_NO_ERROR;
    if (!ended(a, op, "release"))
        return;
    pdk_op_free(op);
    snprintf(id, sizeof id, "%s", pdk_box_id(a->box));
    pdk_box_free(a->box);
    a->box = NULL;
    a->turns++;
    turns++;
    if (a->turns % 4 == 0) /* it wants a fresh one next time */
        start(a, DESTROYING, pdk_destroy_async(rt, id, 10, on_destroyed, a, &err), "destroy", &err);
    else
        think(a);
}

static void on_output(void *ctx, int stream, const void *data, size_t len)
{
    agent *a = ctx;
    (void)stream, (void)data;
    a->seen += len;
    bytes += (long)len;
}

static void on_run(void *ctx, pdk_op *op)
{
    agent *a = ctx;
    pdk_error err = PDK_NO_ERROR;
    pdk_result r = { 0 };
    if (!ended(a, op, "exec"))
        return;
    if (pdk_op_result(op, &r) == 1 && r.outcome == PDK_HARD_TIMEOUT)
        timeouts++;
    pdk_result_free(&r);
    pdk_op_free(op);
    start(a, RELEASING, pdk_release_async(a->box, on_released, a, &err), "release", &err);
}

static void on_acquired(void *ctx, pdk_op *op)
{
    agent *a = ctx;
    pdk_error err = PDK_NO_ERROR;
    if (!ended(a, op, "acquire"))
        return;
    a->box = pdk_op_box(op);
    pdk_op_free(op);
    a->seen = 0;
    pdk_command cmd = { .command = "look around and say what you see", .timeout = 1 };
    start(a, RUNNING, pdk_exec_async(a->box, &cmd, on_output, on_run, a, &err), "exec", &err);
}

static void wake(agent *a)
{
    char thread[24];
    pdk_error err = PDK_NO_ERROR;
    snprintf(thread, sizeof thread, "agent-%d", a->number);
    pdk_request req = { .thread = thread, .timeout = 2 };
    start(a, ACQUIRING, pdk_acquire_async(rt, &req, on_acquired, a, &err), "acquire", &err);
}

/* ---- the loop ------------------------------------------------------------------------------------------ */

/* What the host does in a frame beside paddock. */
static void own_work(void)
{
    static volatile double world[256];
    double end = now() + WORK_US / 1e6;
    for (unsigned i = 0; now() < end; i++)
        world[i % 256] = world[(i + 1) % 256] * 0.5 + i;
}

static void paddock_part(figures *f)
{
    moment from = where();
    pdk_dispatch(rt, 1000);
    for (int i = 0; i < agent_count; i++)
        if (agents[i].at == THINKING && agents[i].wakes <= frame && !closing)
            wake(&agents[i]);
    moment to = where();
    double took = to.wall - from.wall, cpu = to.on_cpu - from.on_cpu, line = to.in_line - from.in_line;
    f->inside += took;
    raise_to(&f->most, took);
    raise_to(&f->on_cpu, cpu);
    raise_to(&f->in_line, line);
    raise_to(&f->asleep, took - cpu - line);
}

static figures run(double seconds, bool with_paddock)
{
    figures f = { 0 };
    double begin = now(), next = begin;
    while (now() - begin < seconds) {
        double from = now();
        own_work();
        if (with_paddock)
            paddock_part(&f);
        double took = now() - from;
        f.frames++;
        frame++;
        raise_to(&f.longest, took);
        f.late += took > 1.0 / HZ;
        next += 1.0 / HZ;
        if (next < now()) /* late: frames are dropped, not made up for */
            next = now();
        struct timespec until = { (time_t)next, (long)((next - (double)(time_t)next) * 1e9) };
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
            ;
    }
    return f;
}

/* The end without a wait: submitted, and the frames go on until it is through. */
static bool shut_down(figures *f)
{
    pdk_error err = PDK_NO_ERROR;
    closing = true;
    pdk_op *op = pdk_shutdown_async(rt, 30, NULL, NULL, &err);
    while (op != NULL && pdk_op_poll(op, &err) == 0) {
        figures more = run(1.0 / HZ, true);
        raise_to(&f->most, more.most);
    }
    pdk_dispatch(rt, MAX_AGENTS); /* what it has ended is told, too */
    bool down = op != NULL && err.kind == PDK_OK;
    if (!down)
        fprintf(stderr, "frames: shutdown: %s: %s\n", pdk_error_kind_name(err.kind), err.message);
    pdk_error_clear(&err);
    pdk_op_free(op);
    return down;
}

int main(int argc, char **argv)
{
    double seconds = argc > 2 ? atof(argv[2]) : 10;
    agent_count = argc > 3 ? atoi(argv[3]) : agent_count;
    if (!(seconds > 0) || agent_count < 1 || agent_count > MAX_AGENTS) {
        fprintf(stderr, "usage: frames [CONFIG.lua [SECONDS [AGENTS, 1 to %d]]]\n", MAX_AGENTS);
        return 64;
    }
    pdk_error err = PDK_NO_ERROR;
    rt = pdk_open(argc > 1 ? argv[1] : "examples/config/slow.lua", &err);
    if (rt == NULL) {
        fprintf(stderr, "frames: %s: %s\n", pdk_error_kind_name(err.kind), err.message);
        pdk_error_clear(&err);
        return 1;
    }
    for (int i = 0; i < agent_count; i++)
        agents[i] = (agent){ .number = i + 1, .wakes = i % HZ }; /* they do not all begin at once */

    printf("%d agents at %d Hz, %g s each; the host's own work is %g ms a frame\n", agent_count, HZ, seconds, WORK_US / 1e3);
    figures alone = run(seconds, false);
    show("without paddock", &alone);
    frame = 0;
    figures with = run(seconds, true);
    show("with paddock", &with);
    printf("inside paddock   mean %.3f ms a frame, most %.3f ms; most of it asleep %.3f, working %.3f, waiting for a processor %.3f\n",
           with.inside * 1e3 / (double)with.frames, with.most * 1e3, with.asleep * 1e3, with.on_cpu * 1e3, with.in_line * 1e3);
    printf("the agents       %ld turns, %ld time limits, %ld bytes of output, %ld failures\n", turns, timeouts, bytes, failures);

    bool down = shut_down(&with);
    for (int i = 0; i < agent_count; i++)
        pdk_box_free(agents[i].box);
    pdk_free(rt);
    return down && failures == 0 && turns > 0 ? 0 : 1;
}
