/* core.c -- what the core costs by itself, measured in C over an engine that answers at once (engine.lua).
 *
 *     core [--json] [PART]      only measurements whose name contains PART
 *
 * Each figure is the median of several rounds after one round of warming up; beside it stand the fastest and the slowest
 * round, since the machine's noise is part of the answer. Nothing here passes or fails: the goals are printed for the eye.
 */
#include "core.h"

#include <malloc.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ROUNDS = 11 };

static const char *part = "";
static bool json;
static int printed;
static char folder[64];

/* ---- figures ------------------------------------------------------------------------------------------- */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One line of the answer; `values` are sorted. */
static void report(const char *name, const char *unit, double *values, int n, const char *goal)
{
    qsort(values, (size_t)n, sizeof *values, by_size);
    double median = n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    if (json)
        printf("%s\n  {\"name\":\"%s\",\"unit\":\"%s\",\"median\":%.6g,\"least\":%.6g,\"most\":%.6g,\"rounds\":%d,\"goal\":\"%s\"}",
               printed++ == 0 ? "[" : ",", name, unit, median, values[0], values[n - 1], n, goal);
    else
        printf("%-58s %10.4g %-5s %10.4g .. %-10.4g %s\n", name, median, unit, values[0], values[n - 1], goal);
    fflush(stdout);
}

static bool wanted(const char *name)
{
    return strstr(name, part) != NULL;
}

static double seconds_since(pdk_ns start)
{
    return (double)(pdk_now_monotonic() - start) / PDK_NS_PER_S;
}

static void fail(const char *what, pdk_error *err)
{
    fprintf(stderr, "bench: %s: %s: %s\n", what, pdk_error_kind_name(err->kind), err->message);
    exit(1);
}

/* ---- a runtime ----------------------------------------------------------------------------------------- */

/* `more`: options as Lua text, each with a comma behind it. */
static pdk_runtime *open_runtime(const char *more)
{
    static int count;
    char text[1024];
    pdk_error err = PDK_NO_ERROR;
    const char *engine = getenv("PDK_BENCH_ENGINE");
    snprintf(text, sizeof text,
             "return { %s backend = '%s', user = 'u', replicas = 1000000, ownership = { type = 'memory' }, log = 'off', "
             "state_dir = '%s/%d' }", more, engine != NULL ? engine : "tests/bench/engine.lua", folder, ++count);
    pdk_runtime *rt = pdk_open_text(text, "bench.lua", &err);
    if (rt == NULL)
        fail("open", &err);
    return rt;
}

static pdk_box *acquire_of(pdk_runtime *rt, const pdk_request *request)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    if (pdk_acquire(rt, request, &box, &err) < 0)
        fail("acquire", &err);
    return box;
}

static pdk_box *acquire(pdk_runtime *rt, int number)
{
    char thread[24];
    snprintf(thread, sizeof thread, "t%d", number);
    return acquire_of(rt, &(pdk_request){ .thread = thread });
}

static void close_runtime(pdk_runtime *rt)
{
    pdk_error err = PDK_NO_ERROR;
    if (pdk_shutdown(rt, &err) < 0)
        fail("shutdown", &err);
    pdk_free(rt);
}

/* What malloc has handed out, in bytes, Lua's of this runtime included. */
static double in_use(void)
{
    struct mallinfo2 m = mallinfo2();
    return (double)m.uordblks + (double)m.hblkhd;
}

/* ---- the measurements ---------------------------------------------------------------------------------- */

static void active(const char *name)
{
    enum { CALLS = 50000 };
    pdk_runtime *rt = open_runtime("threads = false, health_ttl = 3600,");
    pdk_box *kept = acquire(rt, 0);
    const pdk_request same = { .thread = "t0", .no_holder = true };
    double values[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        pdk_ns start = pdk_now_monotonic();
        for (int i = 0; i < CALLS; i++)
            pdk_box_free(acquire_of(rt, &same)); /* nothing is released with it */
        if (round >= 0)
            values[round] = seconds_since(start) / CALLS * 1e6;
    }
    report(name, "us", values, ROUNDS, "0.5");
    pdk_box_free(kept);
    close_runtime(rt);
}

/* ---- the same on several threads ---- */

enum { THREADS = 4, THREAD_CALLS = 50000 };

typedef struct lane { /* one thread's */
    pthread_t thread;
    pthread_barrier_t *start;
    pdk_runtime *rt;
    char name[24];
} lane;

static void *run_lane(void *arg)
{
    lane *l = arg;
    const pdk_request same = { .thread = l->name, .no_holder = true };
    pthread_barrier_wait(l->start);
    for (int i = 0; i < THREAD_CALLS; i++)
        pdk_box_free(acquire_of(l->rt, &same));
    return NULL;
}

/* Each its own identity; all of them together, a second. */
static void active_on_threads(const char *name)
{
    pdk_runtime *rt = open_runtime("threads = false, health_ttl = 3600,");
    pdk_box *kept[THREADS];
    double values[ROUNDS];
    for (int t = 0; t < THREADS; t++)
        kept[t] = acquire(rt, t);
    for (int round = -1; round < ROUNDS; round++) {
        lane lanes[THREADS];
        pthread_barrier_t start;
        pthread_barrier_init(&start, NULL, THREADS + 1);
        for (int t = 0; t < THREADS; t++) {
            lanes[t] = (lane){ .start = &start, .rt = rt };
            snprintf(lanes[t].name, sizeof lanes[t].name, "t%d", t);
            pthread_create(&lanes[t].thread, NULL, run_lane, &lanes[t]);
        }
        pthread_barrier_wait(&start);
        pdk_ns from = pdk_now_monotonic();
        for (int t = 0; t < THREADS; t++)
            pthread_join(lanes[t].thread, NULL);
        if (round >= 0)
            values[round] = THREADS * THREAD_CALLS / seconds_since(from) / 1e6;
        pthread_barrier_destroy(&start);
    }
    report(name, "M/s", values, ROUNDS, "1");
    for (int t = 0; t < THREADS; t++)
        pdk_box_free(kept[t]);
    close_runtime(rt);
}

static void warm_hit(const char *name, int others)
{
    enum { CALLS = 20000 };
    pdk_runtime *rt = open_runtime("threads = false, health_ttl = 3600,");
    pdk_box **kept = calloc((size_t)others + 1, sizeof(pdk_box *));
    for (int i = 0; i < others; i++)
        kept[i] = acquire(rt, i + 1);
    double values[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        pdk_ns start = pdk_now_monotonic();
        for (int i = 0; i < CALLS; i++)
            pdk_box_free(acquire(rt, 0));
        if (round >= 0)
            values[round] = seconds_since(start) / CALLS * 1e6;
    }
    report(name, "us", values, ROUNDS, "1.5");
    for (int i = 0; i < others; i++)
        pdk_box_free(kept[i]);
    free(kept);
    close_runtime(rt);
}

static void warm_alone(const char *name)
{
    warm_hit(name, 0);
}

static void warm_among(const char *name)
{
    warm_hit(name, 10000);
}

/* One runtime with 100,000 warm sandboxes: a reaper's pass over them, and what each costs in memory. */
static void crowd(const char *name)
{
    enum { MANY = 100000 };
    pdk_runtime *rt = open_runtime("threads = false,");
    pdk_box_free(acquire(rt, MANY));
    double before = in_use();
    for (int i = 0; i < MANY; i++)
        pdk_box_free(acquire(rt, i));
    double each = (in_use() - before) / MANY;
    double values[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        pdk_error err = PDK_NO_ERROR;
        pdk_ns start = pdk_now_monotonic();
        if (pdk_reap(rt, &err) < 0)
            fail("reap", &err);
        if (round >= 0)
            values[round] = seconds_since(start) * 1e6;
    }
    report(name, "us", values, ROUNDS, "10");
    report("  memory of each of them", "bytes", &each, 1, "700");
    pdk_error err = PDK_NO_ERROR;
    pdk_runtime_reset(rt, &err); /* nothing is behind them that a shutdown would have to stop */
    pdk_error_clear(&err);
    pdk_free(rt);
}

/* Identities come and go; what stays in memory after each tenth of them. */
static void passing(const char *name)
{
    const char *given = getenv("PDK_BENCH_IDENTITIES");
    int total = given != NULL ? atoi(given) : 1000000, step = total / 10;
    if (step < 1)
        return;
    pdk_runtime *rt = open_runtime("threads = false,");
    double values[9], first = 0;
    pdk_ns start = pdk_now_monotonic();
    for (int i = 0; i < step * 10; i++) {
        pdk_error err = PDK_NO_ERROR;
        pdk_box *box = acquire(rt, i);
        char id[64];
        snprintf(id, sizeof id, "%s", pdk_box_id(box));
        pdk_box_free(box);
        if (pdk_destroy(rt, id, &err) != 1)
            fail("destroy", &err);
        if (i == step - 1)
            first = in_use();
        else if ((i + 1) % step == 0)
            values[i / step - 1] = in_use() - first;
    }
    double each = seconds_since(start) / (step * 10) * 1e6;
    char text[100];
    snprintf(text, sizeof text, "%s (%d)", name, step * 10);
    report(text, "bytes", values, 9, "0");
    report("  acquire, release and destroy of each of them", "us", &each, 1, "");
    close_runtime(rt);
}

/* ---- asynchronous operations ---- */

static void idle_dispatch(const char *name)
{
    enum { CALLS = 1000000 };
    pdk_runtime *rt = open_runtime("");
    pdk_box_free(acquire(rt, 0));
    double values[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) {
        pdk_ns start = pdk_now_monotonic();
        for (int i = 0; i < CALLS; i++)
            pdk_dispatch(rt, 100);
        if (round >= 0)
            values[round] = seconds_since(start) / CALLS * 1e6;
    }
    report(name, "us", values, ROUNDS, "2");
    close_runtime(rt);
}

static void count_end(void *ctx, pdk_op *op)
{
    pdk_error err = PDK_NO_ERROR;
    if (pdk_op_poll(op, &err) != 1)
        fail("acquire", &err);
    pdk_box_free(pdk_op_box(op));
    pdk_op_free(op);
    ++*(int *)ctx;
}

static pdk_op *submit(pdk_runtime *rt, int number, pdk_callback callback, void *ctx)
{
    char thread[24];
    pdk_error err = PDK_NO_ERROR;
    snprintf(thread, sizeof thread, "t%d", number);
    pdk_op *op = pdk_acquire_async(rt, &(pdk_request){ .thread = thread }, callback, ctx, &err);
    if (op == NULL)
        fail("acquire_async", &err);
    return op;
}

/* From the first submission to the last callback, as a frame loop would see it. */
static void concurrent(const char *name)
{
    enum { CREATES = 1000, TIMES = 3 };
    double values[TIMES], submissions[TIMES], slowest[TIMES];
    for (int round = 0; round < TIMES; round++) {
        pdk_runtime *rt = open_runtime("backend_options = { create = 0.3 },");
        int ended = 0;
        pdk_ns start = pdk_now_monotonic(), longest = 0;
        for (int i = 0; i < CREATES; i++) {
            pdk_ns before = pdk_now_monotonic();
            submit(rt, i, count_end, &ended);
            pdk_ns took = pdk_now_monotonic() - before;
            longest = took > longest ? took : longest;
        }
        submissions[round] = seconds_since(start) / CREATES * 1e6;
        slowest[round] = (double)longest / 1e3;
        while (ended < CREATES) {
            pdk_dispatch(rt, 100);
            pdk_sleep_ns(1000000);
        }
        values[round] = seconds_since(start);
        close_runtime(rt);
    }
    report(name, "s", values, TIMES, "1");
    report("  a submission", "us", submissions, TIMES, "");
    report("  the slowest submission of a round", "us", slowest, TIMES, "");
}

/* What waits for its identity's turn takes no thread: all of it is memory of the operation. */
static void waiting(const char *name)
{
    enum { MANY = 10000 };
    pdk_runtime *rt = open_runtime("backend_options = { create = 2 },");
    static pdk_op *ops[MANY];
    int ended = 0;
    submit(rt, 0, count_end, &ended);
    pdk_sleep_ns(PDK_NS_PER_S / 2); /* it is inside create by now, and its worker is there */
    double before = in_use();
    for (int i = 0; i < MANY; i++)
        ops[i] = submit(rt, 0, count_end, &ended);
    pdk_sleep_ns(PDK_NS_PER_S / 2);
    double each = (in_use() - before) / MANY;
    for (int i = 0; i < MANY; i++)
        pdk_op_free(ops[i]);
    while (ended == 0)
        pdk_dispatch(rt, 100);
    report(name, "bytes", &each, 1, "4096");
    double left = (in_use() - before) / MANY;
    report("  left of each after it was cancelled", "bytes", &left, 1, "0");
    close_runtime(rt);
}

/* ---- */

static const struct {
    const char *name;
    void (*fn)(const char *name);
} MEASUREMENTS[] = {
    { "acquire of an active identity, without a holder", active },
    { "acquires of active identities, 4 threads in sum", active_on_threads },
    { "acquire + release, a warm hit", warm_alone },
    { "acquire + release, a warm hit, 10,000 others active", warm_among },
    { "reaper pass over 100,000 warm sandboxes, none due", crowd },
    { "memory that stays after identities have come and gone", passing },
    { "dispatch of an idle runtime", idle_dispatch },
    { "1,000 concurrent creates of 300 ms", concurrent },
    { "memory of an operation that waits for its turn", waiting },
};

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            json = true;
        else
            part = argv[i];
    }
    snprintf(folder, sizeof folder, "%s/pdk-bench.XXXXXX", getenv("TMPDIR") != NULL ? getenv("TMPDIR") : "/tmp");
    if (mkdtemp(folder) == NULL) {
        perror("bench: no temporary folder");
        return 1;
    }
    if (!json)
        printf("%-58s %10s %-5s %10s .. %-10s %s\n", "the core, over an engine that answers at once", "median", "unit", "least", "most",
               "goal");
    for (size_t i = 0; i < sizeof MEASUREMENTS / sizeof MEASUREMENTS[0]; i++)
        if (wanted(MEASUREMENTS[i].name))
            MEASUREMENTS[i].fn(MEASUREMENTS[i].name);
    if (json)
        printf("%s]\n", printed == 0 ? "[" : "\n");
    char command[100];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command) == 0 ? 0 : 1;
}
