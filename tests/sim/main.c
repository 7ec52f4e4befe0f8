/* main.c -- runs schedules: `sim [-n COUNT] [-f FIRST] [-j WORKERS] [-q] [-k] [-d]`, or `sim -s SEED` with every step printed.
 *
 * The runtimes are opened once; each schedule starts from a snapshot of the memory. Workers are processes: what goes wrong in one
 * schedule, a crash included, is told by its parent, which then runs that seed again with the trace. With -k it goes on, and
 * counts what it finds. */
#include "sim.h"

#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

persist *Z;
static jmp_buf back; /* in the driver */

/* ---- what the core and Lua must not ask the machine ---- */

/* The process that replays a schedule is a fork of the one that made its runtimes: nothing may tell the core so. */
int __wrap_madvise(void *at, size_t len, int advice);
int __wrap_madvise(void *at, size_t len, int advice)
{
    (void)at, (void)len, (void)advice;
    return -1;
}

pid_t __wrap_getpid(void);
pid_t __wrap_getpid(void)
{
    return 4242;
}
pid_t pdk_process_id(void)
{
    return __wrap_getpid();
}
time_t __wrap_time(time_t *t);
time_t __wrap_time(time_t *t)
{
    time_t at = (time_t)(pdk_now_wall() / SEC);
    if (t != NULL)
        *t = at;
    return at;
}
clock_t __wrap_clock(void);
clock_t __wrap_clock(void)
{
    return 0;
}
/* Libraries that keep what they allocate for later calls: it must not be the schedule's, which is forgotten. */
unsigned char *__real_SHA256(const unsigned char *data, size_t n, unsigned char *out);
unsigned char *__wrap_SHA256(const unsigned char *data, size_t n, unsigned char *out);
unsigned char *__wrap_SHA256(const unsigned char *data, size_t n, unsigned char *out)
{
    bool outer = in_core;
    in_core = false;
    out = __real_SHA256(data, n, out);
    in_core = outer;
    return out;
}
struct tm *__real_localtime_r(const time_t *t, struct tm *out);
struct tm *__wrap_localtime_r(const time_t *t, struct tm *out);
struct tm *__wrap_localtime_r(const time_t *t, struct tm *out)
{
    bool outer = in_core;
    in_core = false;
    out = __real_localtime_r(t, out);
    in_core = outer;
    return out;
}

/* ---- what the core says, into the trace ---- */

void __wrap_pdk_log_write(pdk_log *log, pdk_log_level level, const char *event, const pdk_field *fields, size_t n);
void __wrap_pdk_log_write(pdk_log *log, pdk_log_level level, const char *event, const pdk_field *fields, size_t n)
{
    (void)log;
    (void)level;
    if (me != NULL)
        act_says(event);
    if (!Z->trace)
        return;
    char text[600];
    int at = snprintf(text, sizeof text, "  - %s", event);
    for (size_t i = 0; i < n && at < (int)sizeof text; i++)
        if (fields[i].type == PDK_F_STR && fields[i].str != NULL)
            at += snprintf(text + at, sizeof text - (size_t)at, " %s=%s", fields[i].key, fields[i].str);
    trace("%s", text);
}

pdk_teardown_result __real_pdk_fence_teardown(pdk_runtime *rt, pdk_teardown *td, pdk_error *err);
pdk_teardown_result __wrap_pdk_fence_teardown(pdk_runtime *rt, pdk_teardown *td, pdk_error *err);
pdk_teardown_result __wrap_pdk_fence_teardown(pdk_runtime *rt, pdk_teardown *td, pdk_error *err)
{
    const pdk_teardown *outer = me->td;
    me->td = td;
    me->td_since = now;
    me->doom_tried = me->doom_refused = false;
    act_tears_down();
    if (generation_number(pdk_info_str(td->info, "generation")) == me->created)
        me->created = -1;
    TRACE("  teardown of %s (%s)", td->id, td->reason);
    pdk_teardown_result r = __real_pdk_fence_teardown(rt, td, err);
    TRACE("  teardown of %s: %s %s", td->id,
          r == PDK_TD_DONE       ? "done"
          : r == PDK_TD_REPLACED ? "replaced"
          : r == PDK_TD_REFUSED  ? "refused"
                                 : "error",
          r == PDK_TD_REFUSED ? td->why : "");
    act_tore_down(td, r);
    me->td = outer;
    return r;
}

void trace(const char *fmt, ...)
{
    bool outer = in_core;
    in_core = false;
    va_list ap;
    printf("%10.4f %-2s %-11s ", (double)now / 1e9, me != NULL && me->in != NULL ? me->in->name : "-",
           me != NULL ? me->name : "world");
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    putchar('\n');
    in_core = outer;
}

/* ---- failing ---- */

void violation(const char *fmt, ...)
{
    in_core = false;
    va_list ap;
    va_start(ap, fmt);
    if (Z->failure[0] == '\0')
        vsnprintf(Z->failure, sizeof Z->failure, fmt, ap);
    va_end(ap);
    if (Z->trace)
        trace("VIOLATION: %s", Z->failure);
    longjmp(back, 1);
}

void __wrap___assert_fail(const char *what, const char *file, unsigned line, const char *function) __attribute__((noreturn));
void __wrap___assert_fail(const char *what, const char *file, unsigned line, const char *function)
{
    violation("%s:%u: %s: %s does not hold", file, line, function, what);
}

static void on_signal(int sig)
{
    snprintf(Z->failure, sizeof Z->failure, sig == SIGALRM ? "it hangs (in %s)" : "it crashes in %s: signal %d",
             me != NULL ? me->name : "the driver", sig);
    if (Z->trace) {
        printf("VIOLATION: %s\n", Z->failure);
        fflush(stdout);
    }
    _exit(3);
}

static void watch_signals(void)
{
    static char stack[64 << 10];
    sigaltstack(&(stack_t){ .ss_sp = stack, .ss_size = sizeof stack }, NULL);
    struct sigaction sa = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK };
    const int all[] = { SIGSEGV, SIGBUS, SIGABRT, SIGILL, SIGFPE, SIGALRM };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        sigaction(all[i], &sa, NULL);
}

/* ---- schedules ---- */

static bool schedule(uint64_t seed)
{
    persist *own = Z;
    snapshot_restore();
    Z = own;
    Z->seed = seed;
    Z->failure[0] = '\0';
    Z->steps = 0;
    if (setjmp(back) == 0) {
        scenario_begin(seed);
        fibers_run(&scenario_over);
    }
    if (Z->digests) { /* what the schedule was, in one number: its random numbers, its steps, its time */
        printf("seed %" PRIu64 ": %016" PRIx64 "\n", seed, rnd() ^ Z->steps << 40 ^ (uint64_t)now);
        fflush(stdout);
    }
    me = NULL;
    in_core = false;
    Z->all_steps += Z->steps;
    Z->done++;
    return Z->failure[0] == '\0';
}

static void start(void)
{
    clearenv();
    setenv("TZ", "UTC", 1);
    tzset();
    static char buffer[1 << 16];
    setvbuf(stdout, buffer, _IOFBF, sizeof buffer);
    Z = mmap(NULL, sizeof *Z, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    arena_map();
    fibers_init();
    watch_signals();
    seed_random(0);
    P = (plan){ 0 };
    if (setjmp(back) == 0) {
        scenario_boot();
        fibers_run(&scenario_over);
    }
    if (Z->failure[0] != '\0') {
        fprintf(stderr, "sim: %s\n", Z->failure);
        exit(2);
    }
    snapshot_take();
}

static void replay(uint64_t seed)
{
    alarm(20);
    Z->trace = true;
    bool ok = schedule(seed);
    printf("seed %" PRIu64 ": %s\n", seed, ok ? "all holds" : Z->failure);
    fflush(stdout);
    _exit(ok ? 0 : 1);
}

typedef struct worker {
    pid_t pid;
    persist *z;
} worker;

/* The failure without its numbers and names: what is the same fault reads the same. */
static void collect(void)
{
    char what[sizeof Z->kind[0].what];
    size_t n = 0;
    for (const char *c = Z->failure; *c != '\0' && n + 1 < sizeof what; c++) {
        bool digit = *c >= '0' && *c <= '9';
        if (!digit || n == 0 || what[n - 1] != '#')
            what[n++] = digit ? '#' : *c;
    }
    what[n] = '\0';
    for (char *c = what; *c != '\0'; c++) /* instances and ids stand alone */
        if ((c == what || c[-1] == ' ' || c[-1] == '(') && (c[1] == ' ' || c[1] == ')' || c[1] == '\0') &&
            ((*c >= 'A' && *c <= 'D') || (*c >= 'b' && *c <= 'c')))
            *c = *c >= 'b' ? 'a' : 'A';
    int k = 0;
    while (k < Z->kinds && strcmp(Z->kind[k].what, what) != 0)
        k++;
    if (k == 64)
        return;
    if (k == Z->kinds) {
        Z->kinds++;
        snprintf(Z->kind[k].what, sizeof Z->kind[k].what, "%s", what);
        Z->kind[k].seed = Z->seed;
    }
    Z->kind[k].count++;
}

static void work(worker *w, uint64_t first, uint64_t count, int offset, int stride)
{
    Z = w->z;
    for (uint64_t i = (uint64_t)offset; i < count; i += (uint64_t)stride) {
        alarm(10);
        if (schedule(first + i))
            continue;
        if (!Z->go_on)
            _exit(1);
        collect();
        Z->failure[0] = '\0';
    }
    _exit(0);
}

static double seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static int report(worker *w, int workers, uint64_t count, double took, bool quiet)
{
    persist sum = { 0 };
    int failed = 0;
    for (int i = 0; i < workers; i++) {
        const persist *z = w[i].z;
        sum.done += z->done;
        sum.all_steps += z->all_steps;
        sum.acquired += z->acquired;
        sum.executed += z->executed;
        sum.crashes += z->crashes;
        sum.faults += z->faults;
        sum.stops += z->stops;
        sum.refused += z->refused;
        sum.cancelled += z->cancelled;
        for (int k = 0; k < z->kinds; k++)
            printf("FAIL  %6" PRIu64 " times, first with seed %" PRIu64 ": %s\n", z->kind[k].count, z->kind[k].seed,
                   z->kind[k].what);
        failed += z->kinds;
        if (z->failure[0] == '\0')
            continue;
        failed++;
        printf("FAIL  seed %" PRIu64 ": %s\n", z->seed, z->failure);
        fflush(stdout);
        if (failed == 1 && !quiet) {
            pid_t pid = fork();
            if (pid == 0)
                replay(z->seed);
            waitpid(pid, NULL, 0);
            printf("again: make sim SEED=%" PRIu64 "\n", z->seed);
        }
    }
    if (!quiet)
        printf("%" PRIu64 " schedules in %.1f s (%.0f a second), %" PRIu64 " steps, %" PRIu64 " acquires, %" PRIu64
               " commands, %" PRIu64 " stops, %" PRIu64 " faults, %" PRIu64 " crashes, %" PRIu64 " stale requests refused, %" PRIu64
               " calls cancelled\n",
               sum.done, took, (double)sum.done / took, sum.all_steps, sum.acquired, sum.executed, sum.stops, sum.faults,
               sum.crashes, sum.refused, sum.cancelled);
    (void)count;
    return failed;
}

int main(int argc, char **argv)
{
    uint64_t count = 100000, first = 1;
    int workers = 2, opt;
    bool quiet = false, go_on = false, digests = false;
    const char *seed = NULL;
    while ((opt = getopt(argc, argv, "n:f:j:s:qkd")) != -1)
        switch (opt) {
        case 'n': count = strtoull(optarg, NULL, 10); break;
        case 'f': first = strtoull(optarg, NULL, 10); break;
        case 'j': workers = atoi(optarg) < 1 ? 1 : atoi(optarg) > 64 ? 64 : atoi(optarg); break;
        case 's': seed = optarg; break;
        case 'q': quiet = true; break;
        case 'k': go_on = true; break;
        case 'd': digests = true; break;
        default: return 64;
        }
    pods_read_table();
    start();
    if (seed != NULL)
        replay(strtoull(seed, NULL, 10));
    worker w[64];
    double began = seconds();
    for (int i = 0; i < workers; i++) {
        w[i].z = mmap(NULL, sizeof *Z, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        w[i].z->go_on = go_on;
        w[i].z->digests = digests;
        fflush(stdout);
        w[i].pid = fork();
        if (w[i].pid == 0)
            work(&w[i], first, count, i, workers);
    }
    int left = workers;
    bool stopping = false;
    while (left > 0) {
        int status;
        pid_t pid = wait(&status);
        for (int i = 0; i < workers; i++)
            if (w[i].pid == pid) {
                left--;
                w[i].pid = -1;
                if (status != 0 && !stopping && w[i].z->failure[0] == '\0')
                    snprintf(w[i].z->failure, sizeof w[i].z->failure, "the worker ended with status %d", status);
                if (w[i].z->failure[0] != '\0' && !stopping) /* one failure is enough: the others end too */
                    for (int k = 0; k < workers; k++)
                        if (w[k].pid > 0)
                            kill(w[k].pid, SIGKILL);
                stopping = w[i].z->failure[0] != '\0' || stopping;
            }
    }
    int failed = report(w, workers, count, seconds() - began, quiet);
    printf("%d passed, %d failed, 0 skipped\n", failed == 0 ? 1 : 0, failed);
    return failed != 0;
}
