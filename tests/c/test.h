/* test.h -- the harness of the C tests: one file, no library, one binary per test_*.c.
 *
 *     TEST("a holder that is released twice is released once [L2]")
 *     {
 *         CHECK_INT(pdk_release(box, NULL), 0);
 *     }
 *     TEST_MAIN
 *
 * A failing CHECK is printed and counted, and the test goes on, so it may stand in helpers and in threads. REQUIRE also
 * leaves the function it stands in (which returns void). SKIP("reason") ends the test as skipped. Every macro that checks
 * is an expression that says whether it held.
 *
 * The binary takes one optional argument: only tests whose name contains it run. It prints a line per test and
 * "N passed, N failed, N skipped" last; its status is 1 when something failed. Several tests of one binary run one after
 * the other in one process, in the order of the file.
 */
#ifndef PDK_TEST_H
#define PDK_TEST_H

#include <dirent.h>
#include <ftw.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct pdk_test {
    const char *name;
    const char *file;
    int line;
    void (*fn)(void);
    struct pdk_test *next;
} pdk_test;

static pdk_test *test_first, **test_end = &test_first;
static const char *test_running = "(before the first test)";
static int test_failures;           /* of the running test; atomic: threads check too */
static const char *test_skipped;    /* the reason, or NULL */
static char test_dir[64];           /* of test_tmpdir, or empty */

static void test_register(pdk_test *t)
{
    *test_end = t;
    test_end = &t->next;
}

#define TEST_CAT2(a, b) a##b
#define TEST_CAT(a, b) TEST_CAT2(a, b)
#define TEST(name) TEST_AT(name, __COUNTER__)
#define TEST_AT(name, n)                                                                                     \
    static void TEST_CAT(test_fn_, n)(void);                                                                 \
    static pdk_test TEST_CAT(test_, n) = { name, __FILE__, __LINE__, TEST_CAT(test_fn_, n), NULL };          \
    __attribute__((constructor)) static void TEST_CAT(test_register_, n)(void)                               \
    {                                                                                                        \
        test_register(&TEST_CAT(test_, n));                                                                  \
    }                                                                                                        \
    static void TEST_CAT(test_fn_, n)(void)

/* ---- checks ------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 3, 4), unused)) static bool test_fail(const char *file, int line, const char *fmt, ...)
{
    char text[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    __atomic_add_fetch(&test_failures, 1, __ATOMIC_SEQ_CST);
    fprintf(stderr, "  %s:%d: %s\n", file, line, text);
    return false;
}

__attribute__((unused)) static bool test_ok(const char *file, int line, const char *text, bool held)
{
    return held || test_fail(file, line, "%s", text);
}

__attribute__((unused)) static bool test_int(const char *file, int line, const char *text, long long got, long long want)
{
    return got == want || test_fail(file, line, "%s is %lld, not %lld", text, got, want);
}

__attribute__((unused)) static bool test_num(const char *file, int line, const char *text, double got, double want,
                                             double within)
{
    return fabs(got - want) <= within || test_fail(file, line, "%s is %.9g, not %.9g (within %g)", text, got, want, within);
}

__attribute__((unused)) static bool test_str(const char *file, int line, const char *text, const char *got,
                                             const char *want)
{
    bool same = got == want || (got != NULL && want != NULL && strcmp(got, want) == 0);
    return same || test_fail(file, line, "%s is \"%s\", not \"%s\"", text, got ? got : "(null)", want ? want : "(null)");
}

__attribute__((unused)) static bool test_mem(const char *file, int line, const char *text, const void *got, size_t got_len,
                                             const void *want, size_t want_len)
{
    bool same = got_len == want_len && (want_len == 0 || (got != NULL && memcmp(got, want, want_len) == 0));
    return same || test_fail(file, line, "%s (%zu bytes) is not the %zu bytes that were expected", text, got_len, want_len);
}

__attribute__((unused)) static bool test_has(const char *file, int line, const char *text, const char *got,
                                             const char *part)
{
    bool has = got != NULL && strstr(got, part) != NULL;
    return has || test_fail(file, line, "%s is \"%s\", without \"%s\"", text, got ? got : "(null)", part);
}

/* Seconds that a bound of real time may be exceeded by on a machine that has other things to do. */
#define TEST_SLACK 1.8

__attribute__((unused)) static bool test_took(const char *file, int line, double took, double seconds, bool exactly)
{
    bool held = took < seconds + TEST_SLACK && (!exactly || took > seconds - 0.05);
    return held || test_fail(file, line, "it took %.3f s, not %g%s", took, seconds, exactly ? "" : " at most");
}

__attribute__((unused)) static bool test_kind(const char *file, int line, const char *text, bool held, const char *kind,
                                              const char *message, const char *want)
{
    return held || test_fail(file, line, "%s is %s (%s), not %s", text, kind, message, want);
}

#define CHECK(cond) test_ok(__FILE__, __LINE__, #cond, (cond))
#define CHECK_INT(got, want) test_int(__FILE__, __LINE__, #got, (long long)(got), (long long)(want))
#define CHECK_NUM(got, want, within) test_num(__FILE__, __LINE__, #got, (got), (want), (within))
#define CHECK_STR(got, want) test_str(__FILE__, __LINE__, #got, (got), (want))
#define CHECK_MEM(got, got_len, want, want_len) test_mem(__FILE__, __LINE__, #got, (got), (got_len), (want), (want_len))
#define CHECK_HAS(got, part) test_has(__FILE__, __LINE__, #got, (got), (part))
/* What began at `since` (of test_now) has taken that many seconds: no less, and no more than the machine's other programs or a
 * sanitizer add. What breaks the bound must take longer than TEST_SLACK more, or the check says nothing. */
#define CHECK_TOOK(since, seconds) test_took(__FILE__, __LINE__, test_now() - (since), (seconds), true)
/* The same without the lower bound: it came within that time, or at once. */
#define CHECK_WITHIN(since, seconds) test_took(__FILE__, __LINE__, test_now() - (since), (seconds), false)
/* `err` (a pdk_error, not a pointer) is of that kind, such as PDK_E_LOST; PDK_OK = no error. */
#define CHECK_KIND(err, want)                                                                                \
    test_kind(__FILE__, __LINE__, #err, (err).kind == (want),                                                \
              (err).kind ? pdk_error_kind_name((err).kind) : "no error", (err).message, #want)
#define REQUIRE(cond)                                                                                        \
    do {                                                                                                     \
        if (!CHECK(cond)) return;                                                                            \
    } while (0)
/* Whether valgrind runs this process: many times as slow, without openat2, without clones that share memory, and whoever traces a
 * child sees valgrind's own system calls. */
__attribute__((unused)) static bool test_valgrind(void)
{
    const char *preload = getenv("LD_PRELOAD");
    return preload != NULL && strstr(preload, "vgpreload") != NULL;
}

#define SKIP(reason)                                                                                         \
    do {                                                                                                     \
        test_skipped = (reason);                                                                             \
        return;                                                                                              \
    } while (0)

/* ---- helpers ------------------------------------------------------------------------------------------ */

/* How many descriptors this process has open: the same before and after is "nothing leaked". */
__attribute__((unused)) static int test_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    if (d == NULL) return -1;
    while (readdir(d) != NULL) n++;
    closedir(d);
    return n - 3; /* ".", ".." and d's own */
}

__attribute__((unused)) static double test_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

__attribute__((unused)) static int test_remove(const char *path, const struct stat *s, int type, struct FTW *f)
{
    (void)s, (void)type, (void)f;
    return remove(path);
}

__attribute__((unused)) static void test_tmpdir_remove(void)
{
    if (test_dir[0] != 0) nftw(test_dir, test_remove, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

/* A folder of this process, made at the first call and removed at its end. */
__attribute__((unused)) static const char *test_tmpdir(void)
{
    if (test_dir[0] == 0) {
        snprintf(test_dir, sizeof test_dir, "/tmp/pdk-test-XXXXXX");
        if (mkdtemp(test_dir) == NULL) {
            perror("mkdtemp");
            exit(1);
        }
        atexit(test_tmpdir_remove);
    }
    return test_dir;
}

/* ---- running ------------------------------------------------------------------------------------------ */

static void test_crashed(int sig)
{
    /* Only calls that are allowed in a handler; the default action then ends the process with this signal. */
    static const char head[] = "FAIL  ", tail[] = " (crashed)\n";
    ssize_t r = write(STDOUT_FILENO, head, sizeof head - 1);
    r = r < 0 ? r : write(STDOUT_FILENO, test_running, strlen(test_running));
    r = r < 0 ? r : write(STDOUT_FILENO, tail, sizeof tail - 1);
    (void)r;
    signal(sig, SIG_DFL);
    raise(sig);
}

__attribute__((unused)) static int test_main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : "";
    int passed = 0, failed = 0, skipped = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    signal(SIGSEGV, test_crashed);
    signal(SIGBUS, test_crashed);
    signal(SIGFPE, test_crashed);
#endif
    signal(SIGABRT, test_crashed);
    for (pdk_test *t = test_first; t != NULL; t = t->next) {
        if (strstr(t->name, only) == NULL) continue;
        test_running = t->name;
        test_skipped = NULL;
        __atomic_store_n(&test_failures, 0, __ATOMIC_SEQ_CST);
        double since = test_now();
        t->fn();
        double took = test_now() - since;
        if (__atomic_load_n(&test_failures, __ATOMIC_SEQ_CST) > 0) {
            failed++;
            printf("FAIL  %s (%s:%d)\n", t->name, t->file, t->line);
        } else if (test_skipped != NULL) {
            skipped++;
            printf("skip  %s: %s\n", t->name, test_skipped);
        } else {
            passed++;
            if (took >= 1) /* where a suite's time goes */
                printf("ok    %s (%.1f s)\n", t->name, took);
            else
                printf("ok    %s\n", t->name);
        }
    }
    test_running = "(after the last test)";
    printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
    return failed > 0;
}

#define TEST_MAIN                                                                                            \
    int main(int argc, char **argv)                                                                          \
    {                                                                                                        \
        return test_main(argc, argv);                                                                        \
    }

#endif
