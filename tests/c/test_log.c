/* test_log.c -- what a log line looks like, and that nobody waits for whoever reads it. */
#include "log.h"

#include "jsontext.h"
#include "test.h"

#include <fcntl.h>
#include <locale.h>
#include <sys/wait.h>

/* stderr is a pipe between begin and end; end restores it and gives what was written. */
static int real_stderr = -1, reading = -1;

static void capture_begin(bool blocked)
{
    int p[2];
    fflush(stderr);
    if (pipe2(p, O_CLOEXEC) != 0)
        abort();
    if (blocked) { /* full from the start */
        char zeros[4096] = { 0 };
        fcntl(p[1], F_SETFL, O_NONBLOCK);
        while (write(p[1], zeros, sizeof zeros) > 0)
            ;
        fcntl(p[1], F_SETFL, 0);
    }
    real_stderr = dup(STDERR_FILENO);
    dup2(p[1], STDERR_FILENO);
    close(p[1]);
    reading = p[0];
}

static char *capture_end(void)
{
    static char text[1 << 20];
    size_t len = 0;
    ssize_t n;
    dup2(real_stderr, STDERR_FILENO);
    close(real_stderr);
    while (len < sizeof text - 1 && (n = read(reading, text + len, sizeof text - 1 - len)) > 0)
        len += (size_t)n;
    close(reading);
    text[len] = '\0';
    return text;
}

TEST("a line is JSON: time, level, event, then the fields in their order")
{
    capture_begin(false);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    pdk_log_event(log, PDK_DEBUG, "below", PDK_INT("n", 1));
    pdk_log_event(log, PDK_INFO, "parked", PDK_STR("sandbox_id", "3f1c"), PDK_STR("left_out", NULL), PDK_NUM("held_ms", 812),
                  PDK_NUM("ratio", 0.1), PDK_INT("token", INT64_MAX), PDK_NUM("none", NAN));
    pdk_log_free(log);
    char *text = capture_end();
    CHECK_INT(strncmp(text, "{\"ts\":\"20", 9), 0);
    CHECK_HAS(text, "Z\",\"level\":\"info\",\"event\":\"parked\",\"sandbox_id\":\"3f1c\",\"held_ms\":812,\"ratio\":0.1,"
                    "\"token\":9223372036854775807,\"none\":null}\n");
    CHECK(strstr(text, "below") == NULL);
}

TEST("a manual clock's wall time is what the line says")
{
    pdk_clock *clock = pdk_clock_new(PDK_CLOCK_MANUAL, false);
    double back = pdk_to_seconds(pdk_clock_wall(clock)) - 86400.0 * 366; /* to the 2nd of January 1971 */
    pdk_clock_advance(clock, 1, -back / 2);
    pdk_clock_advance(clock, 1, -back / 2);
    capture_begin(false);
    pdk_log *log = pdk_log_new(clock, false, PDK_INFO, NULL, NULL);
    pdk_log_event(log, PDK_WARN, "x", PDK_INT("n", 1));
    pdk_log_free(log);
    char *text = capture_end();
    CHECK(strncmp(text, "{\"ts\":\"1971-01-02T00:00:0", 25) == 0 || strncmp(text, "{\"ts\":\"1971-01-01T23:59:5", 25) == 0);
    pdk_clock_free(clock);
}

TEST("quotes, control characters and bytes that are no UTF-8 cannot break a line")
{
    capture_begin(false);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    pdk_log_event(log, PDK_INFO, "x",
                  PDK_STR("s", "a\"b\\c\n\t\x01\x7f d\xff"
                               "e\xc3\xa9\xe2\x82\xac\xed\xa0\x80\xf0\x9f\x90\x8e\xc3"),
                  PDK_STR("k\n", "v"));
    pdk_log_free(log);
    char *text = capture_end();
    CHECK_HAS(text, "\"s\":\"a\\\"b\\\\c\\n\\t\\u0001\\u007f d\xef\xbf\xbd"
                    "e\xc3\xa9\xe2\x82\xac\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                    "\xf0\x9f\x90\x8e\xef\xbf\xbd\",\"k\\n\":\"v\"}\n");
    CHECK(strchr(text, '\n') == text + strlen(text) - 1);
}

TEST("long strings and many fields are cut, never the line's form")
{
    char *big = malloc(100001);
    memset(big, 'x', 100000);
    big[100000] = '\0';
    pdk_field many[300];
    for (int i = 0; i < 300; i++)
        many[i] = i < 3 ? PDK_STR("big", big) : PDK_INT("n", i);
    for (int threads = 0; threads < 2; threads++) {
        capture_begin(false);
        pdk_log *log = pdk_log_new(NULL, threads, PDK_INFO, NULL, NULL);
        pdk_log_write(log, PDK_INFO, big, many, 300);
        pdk_log_free(log);
        char *text = capture_end();
        size_t len = strlen(text);
        CHECK(len > 6000 && len < 12000);
        CHECK_STR(text + len - 2, "}\n");
        CHECK_HAS(text, "\"n\":3");
    }
    free(big);
}

TEST("a full stderr makes no caller wait, lines are counted as dropped, and free ends within a second [B184]")
{
    capture_begin(true);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    double worst = 0, before;
    for (int i = 0; i < 20000; i++) {
        before = test_now();
        pdk_log_event(log, PDK_ERROR, "x", PDK_INT("n", i));
        worst = fmax(worst, test_now() - before);
    }
    before = test_now();
    pdk_log_free(log);
    double took = test_now() - before;
    capture_end();
    CHECK(worst < TEST_SLACK);
    CHECK(took < 1 + TEST_SLACK);
}

TEST("with threads = false a full stderr costs the line and not the time")
{
    capture_begin(true);
    pdk_log *log = pdk_log_new(NULL, false, PDK_INFO, NULL, NULL);
    double before = test_now();
    for (int i = 0; i < 1000; i++)
        pdk_log_event(log, PDK_ERROR, "lost", PDK_INT("n", i));
    double took = test_now() - before;
    char drain[1 << 16];
    ssize_t n = read(reading, drain, sizeof drain);
    pdk_log_event(log, PDK_ERROR, "kept", PDK_INT("n", 1));
    pdk_log_free(log);
    capture_end();
    CHECK(n > 0);
    CHECK(took < TEST_SLACK);
}

TEST("the line after a loss says how many were lost")
{
    capture_begin(true);
    pdk_log *log = pdk_log_new(NULL, false, PDK_INFO, NULL, NULL);
    for (int i = 0; i < 7; i++)
        pdk_log_event(log, PDK_ERROR, "lost", PDK_INT("n", i));
    char drain[1 << 16];
    CHECK(read(reading, drain, sizeof drain) == sizeof drain);
    pdk_log_event(log, PDK_ERROR, "kept", PDK_INT("n", 1));
    pdk_log_event(log, PDK_ERROR, "next", PDK_INT("n", 2));
    pdk_log_free(log);
    char *text = capture_end();
    CHECK_HAS(text, "\"event\":\"kept\",\"n\":1,\"dropped\":7}\n");
    CHECK_HAS(text, "\"event\":\"next\",\"n\":2}\n");
}

TEST("a stderr whose reader is gone ends nothing")
{
    for (int threads = 0; threads < 2; threads++) {
        capture_begin(false);
        close(reading);
        pdk_log *log = pdk_log_new(NULL, threads, PDK_INFO, NULL, NULL);
        for (int i = 0; i < 10; i++)
            pdk_log_event(log, PDK_ERROR, "x", PDK_INT("n", i));
        double before = test_now();
        pdk_log_free(log);
        CHECK(test_now() - before < 0.5);
        reading = open("/dev/null", O_RDONLY | O_CLOEXEC);
        capture_end();
    }
}

static void *many_lines(void *log)
{
    for (int i = 0; i < 500; i++) {
        pdk_log_event(log, PDK_INFO, "many", PDK_INT("n", i), PDK_STR("s", "some text"));
        if (i % 50 == 0)
            usleep(1000);
    }
    return NULL;
}

static void *read_all(void *count)
{
    char c[4096];
    ssize_t n;
    while ((n = read(reading, c, sizeof c)) > 0)
        for (ssize_t i = 0; i < n; i++)
            *(int *)count += c[i] == '\n';
    return NULL;
}

TEST("lines of many threads come out whole, and none is lost while the reader keeps up")
{
    int lines = 0;
    pthread_t t[4], reader;
    capture_begin(false);
    pthread_create(&reader, NULL, read_all, &lines);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    for (int i = 0; i < 4; i++)
        pthread_create(&t[i], NULL, many_lines, log);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    pdk_log_free(log);
    dup2(real_stderr, STDERR_FILENO); /* the pipe ends, and so does the reader */
    pthread_join(reader, NULL);
    capture_end();
    CHECK_INT(lines, 2000);
}

TEST("a line is written soon, without another one or a free after it")
{
    capture_begin(false);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    fcntl(reading, F_SETFL, O_NONBLOCK);
    int late = 0;
    for (int i = 0; i < 10; i++) {
        usleep(i * 7000); /* while the writer lingers, and while it sleeps */
        pdk_log_event(log, PDK_INFO, "soon", PDK_INT("n", i));
        double until = test_now() + 0.2;
        char c[4096];
        while (read(reading, c, sizeof c) <= 0 && test_now() < until)
            usleep(1000);
        late += test_now() >= until;
    }
    pdk_log_free(log);
    capture_end();
    CHECK_INT(late, 0);
}

static void keep_record(void *ctx, const pdk_pack *record)
{
    pdk_pack_copy(ctx, pdk_view_of(record));
}

TEST("a sink gets each record as a map, on the caller's thread, and nothing goes to stderr")
{
    PDK_AUTO_PACK got = PDK_NO_PACK;
    capture_begin(false);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, keep_record, &got);
    pdk_log_event(log, PDK_WARN, "parked", PDK_STR("sandbox_id", "3f1c"), PDK_INT("n", 5), PDK_NUM("d", 0.5));
    pdk_log_event(log, PDK_DEBUG, "below", PDK_INT("n", 6));
    pdk_log_free(log);
    CHECK_STR(capture_end(), "");
    pdk_view v = pdk_view_of(&got);
    int64_t n = 0;
    CHECK_STR(pdk_view_str(pdk_view_get(v, "event"), NULL), "parked");
    CHECK_STR(pdk_view_str(pdk_view_get(v, "level"), NULL), "warn");
    CHECK_STR(pdk_view_str(pdk_view_get(v, "sandbox_id"), NULL), "3f1c");
    CHECK(pdk_view_int(pdk_view_get(v, "n"), &n) && n == 5);
    CHECK_HAS(pdk_view_str(pdk_view_get(v, "ts"), NULL), "T");
}

TEST("no log at all is accepted everywhere, and a thread's current log is its own")
{
    pdk_log_event(NULL, PDK_ERROR, "x", PDK_INT("n", 1));
    pdk_log_write(NULL, PDK_ERROR, "x", NULL, 0);
    pdk_log_free(NULL);
    CHECK(pdk_log_current() == NULL);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    CHECK(pdk_log_enter(log) == NULL);
    CHECK(pdk_log_current() == log);
    CHECK(pdk_log_enter(NULL) == log);
    pdk_log_free(log);
}

TEST("in a forked child a log's free returns at once")
{
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        pdk_log_free(log);
        _exit(0);
    }
    int status = 1;
    waitpid(pid, &status, 0);
    CHECK_INT(status, 0);
    pdk_log_free(log);
}

TEST("numbers are the shortest digits that read back, in any locale")
{
    struct {
        double d;
        const char *text;
    } rows[] = { { 0, "0" },
                 { -0.5, "-0.5" },
                 { 0.1, "0.1" },
                 { 1e300, "1e+300" },
                 { 1.0 / 3, "0.3333333333333333" },
                 { 123456789012345678.0, "1.2345678901234568e+17" } };
    const char *names[] = { "C", "de_DE.UTF-8", "fr_FR.UTF-8" };
    for (int l = 0; l < 3; l++) {
        setlocale(LC_NUMERIC, names[l]);
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
            char out[PDK_JSON_NUMBER];
            CHECK(pdk_json_number(rows[i].d, out));
            CHECK_STR(out, rows[i].text);
        }
    }
    setlocale(LC_NUMERIC, "C");
    char out[PDK_JSON_NUMBER];
    CHECK(!pdk_json_number(NAN, out) && !pdk_json_number(INFINITY, out));
}

TEST("logging leaves no descriptor and no thread behind, and costs a caller little")
{
    int before = test_fds();
    for (int i = 0; i < 50; i++)
        pdk_log_free(pdk_log_new(NULL, true, PDK_INFO, NULL, NULL));
    CHECK_INT(test_fds(), before);
    capture_begin(false);
    pthread_t reader;
    int lines = 0;
    pthread_create(&reader, NULL, read_all, &lines);
    pdk_log *log = pdk_log_new(NULL, true, PDK_INFO, NULL, NULL);
    double t = test_now();
    for (int i = 0; i < 20000; i++)
        pdk_log_event(log, PDK_INFO, "parked", PDK_STR("sandbox_id", "0123456789abcdef0123456789abcdef"), PDK_INT("n", i));
    t = test_now() - t;
    pdk_log_free(log);
    dup2(real_stderr, STDERR_FILENO);
    pthread_join(reader, NULL);
    capture_end();
    printf("      %.0f ns a line\n", t / 20000 * 1e9);
    CHECK(lines > 0);
}

TEST_MAIN
