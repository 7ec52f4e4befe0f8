/* The public C interface: opening from a configuration, arguments, a log function, a forked child. Over a backend that is
 * written in the configuration itself, so that nothing outside is needed. */
#include "test.h"

#include "paddock.h"
#include "runtime.h"

#include <sys/wait.h>

static const char *const CONFIG =
    "local things, n, lines = {}, 0, 0\n"
    "local client = {\n"
    "  exec = function(self, req)\n"
    "    local out = req.command == 'lines' and tostring(lines) or req.command == 'env' and req.env.A or req.stdin or ''\n"
    "    return { outcome = 'completed', exit_code = 0, stdout = out, stderr = '', truncated = false, duration = 0,\n"
    "             session_reset = false }\n"
    "  end,\n"
    "  open_session = function() end, close_session = function() end,\n"
    "  write = function(self, path, bytes) things[path] = bytes return true end,\n"
    "  read = function(self, path) return things[path] end,\n"
    "  list = function() return {} end, fence = function() return true end, doom = function() return true end,\n"
    "  close = function() end,\n"
    "}\n"
    "local function at(id) return things['/box/' .. id] end\n"
    "local backend = {\n"
    "  name = 'text', capabilities = { mounts = true, fenced = true },\n"
    "  create = function(self, spec)\n"
    "    n = n + 1\n"
    "    local info = { sandbox_id = spec.sandbox_id, generation = 'g' .. n, created_at = 0, attestation = {} }\n"
    "    things['/box/' .. spec.sandbox_id] = info\n"
    "    return info\n"
    "  end,\n"
    "  destroy = function(self, info) things['/box/' .. info.sandbox_id] = nil end,\n"
    "  inspect = function(self, id) return at(id) end, discover = function(self, id) return at(id) end,\n"
    "  alive = function() return true end, ready = function() return true end, list = function() return {} end,\n"
    "  finish = function() end, connect = function() return client end,\n"
    "}\n"
    "return { backend = backend, user = 'ambient', threads = %s, state_dir = '%s/%s',\n"
    "         log = function(record) if type(record.event) == 'string' then lines = lines + 1 end end }\n";

static pdk_runtime *open_text(bool threads, const char *dir)
{
    char text[4096];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    snprintf(text, sizeof text, CONFIG, threads ? "true" : "false", test_tmpdir(), dir);
    pdk_runtime *rt = pdk_open_text(text, "test.lua", &err);
    CHECK_KIND(err, PDK_OK);
    return rt;
}

static void close_runtime(pdk_runtime *rt)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_shutdown(rt, &err), 0);
    CHECK_KIND(err, PDK_OK);
    pdk_free(rt);
}

static pdk_box *acquire(pdk_runtime *rt, const char *thread)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_box *box = NULL;
    pdk_request req = { .user = "alice", .thread = thread };
    CHECK_INT(pdk_acquire(rt, &req, &box, &err), 0);
    CHECK_KIND(err, PDK_OK);
    return box;
}

TEST("what a host of the design's calls compiles and links: these types are what it was written against")
{
    pdk_runtime *(*open)(const char *, pdk_error *) = pdk_open;
    int (*acquire)(pdk_runtime *, const pdk_request *, pdk_box **, pdk_error *) = pdk_acquire;
    int (*exec)(pdk_box *, const pdk_command *, pdk_result *, pdk_error *) = pdk_exec;
    int (*release)(pdk_box *, pdk_error *) = pdk_release;
    int (*destroy)(pdk_runtime *, const char *, pdk_error *) = pdk_destroy;
    pdk_op *(*acquire_async)(pdk_runtime *, const pdk_request *, pdk_callback, void *, pdk_error *) = pdk_acquire_async;
    int (*cancel)(pdk_op *) = pdk_cancel;
    int (*fd)(pdk_runtime *) = pdk_fd;
    int (*dispatch)(pdk_runtime *, int) = pdk_dispatch;
    int (*tick)(pdk_runtime *, pdk_error *) = pdk_tick;
    int (*shutdown)(pdk_runtime *, pdk_error *) = pdk_shutdown;
    pdk_impl *(*instance)(pdk_error *) = pdk_default;
    pdk_impl *(*peek)(void) = pdk_default_peek;
    void (*set)(pdk_impl *) = pdk_set_default;
    void (*reset)(void) = pdk_reset_default;
    int (*end)(pdk_error *) = pdk_shutdown_default;
    CHECK(open && acquire && exec && release && destroy && acquire_async && cancel && fd && dispatch && tick && shutdown);
    CHECK(instance && peek && set && reset && end);
}

TEST("every outcome has a name, and numbers outside have one too")
{
    CHECK_STR(pdk_outcome_name(PDK_COMPLETED), "completed");
    CHECK_STR(pdk_outcome_name(PDK_HARD_TIMEOUT), "hard_timeout");
    CHECK_STR(pdk_outcome_name(PDK_CMD_CANCELLED), "cancelled");
    CHECK_STR(pdk_outcome_name((pdk_outcome)77), "unknown");
    CHECK_STR(pdk_version(), PDK_VERSION);
}

TEST("a configuration that is broken is refused with its name, and nothing is opened")
{
    static const struct { const char *text; pdk_error_kind kind; const char *part; } cases[] = {
        { "return {", PDK_E_INVALID_ARGUMENT, "my.lua" },
        { "error('no')", PDK_E_INVALID_ARGUMENT, "my.lua" },
        { "return 5", PDK_E_INVALID_ARGUMENT, "my.lua" },
        { "return { idle_timout = 5 }", PDK_E_INVALID_ARGUMENT, "idle_timeout" },
        { "return { command_timeout = 0/0 }", PDK_E_INVALID_ARGUMENT, "command_timeout" },
        { "return { backend = {} }", PDK_E_INVALID_ARGUMENT, "backend" },
        { "return { ownership = { type = 'redis' } }", PDK_E_INVALID_ARGUMENT, "ownership.url" },
        { "return { ownership = { type = 'redis', url = 'localhost' } }", PDK_E_INVALID_ARGUMENT, "ownership.url" },
        { "return { user = os.getenv('HOME') }", PDK_E_INVALID_ARGUMENT, "my.lua" },
        { "\033Lua", PDK_E_INVALID_ARGUMENT, "my.lua" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK(pdk_open_text(cases[i].text, "my.lua", &err) == NULL);
        CHECK_KIND(err, cases[i].kind);
        CHECK_HAS(err.message, cases[i].part);
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK(pdk_open("/no/such/file.lua", &err) == NULL);
    CHECK_KIND(err, PDK_E_IO_ERROR);
    CHECK_HAS(err.message, "/no/such/file.lua");
    CHECK(pdk_open_text(NULL, NULL, &err) == NULL);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
}

static void exec_and_check(pdk_box *box, const pdk_command *cmd, const char *out)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_result result;
    CHECK_INT(pdk_exec(box, cmd, &result, &err), 0);
    CHECK_KIND(err, PDK_OK);
    CHECK_INT(result.outcome, PDK_COMPLETED);
    CHECK_STR(result.out, out);
    pdk_result_free(&result);
}

static void use(bool threads, const char *dir)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_runtime *rt = open_text(threads, dir);
    REQUIRE(rt != NULL);
    pdk_box *box = acquire(rt, "t1");
    REQUIRE(box != NULL);
    CHECK_STR(pdk_box_source(box), "created");
    CHECK_STR(pdk_box_generation(box), "g1");
    CHECK(pdk_box_holder(box) != NULL);
    exec_and_check(box, &(pdk_command){ .command = "cat", .stdin_data = "in", .stdin_len = 2 }, "in");
    const char *const env[] = { "A=b=c", NULL };
    exec_and_check(box, &(pdk_command){ .command = "env", .env = env }, "b=c");
    CHECK_INT(pdk_write(box, "/workspace/a", "x\0y", 3, &err), 0);
    char *data;
    size_t len;
    CHECK_INT(pdk_read(box, "/workspace/a", &data, &len, &err), 0);
    CHECK_MEM(data, len, "x\0y", 3);
    free(data);
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 0);
    CHECK_INT(pdk_release(box, &err), 0);
    CHECK_INT(pdk_release(box, &err), 0);
    CHECK_INT(pdk_destroy(rt, pdk_box_id(box), &err), 1);
    pdk_box_free(box);
    CHECK_INT(pdk_tick(rt, &err), 0);
    CHECK_INT(pdk_reload(rt, &err), 0);
    CHECK_KIND(err, PDK_OK);
    close_runtime(rt);
}

TEST("a C host acquires, runs, writes, reads, releases and destroys, with threads and without")
{
    use(false, "plain");
    use(true, "threads");
}

TEST("a log function of the configuration gets the lines, with threads and without")
{
    for (int threads = 0; threads <= 1; threads++) {
        pdk_runtime *rt = open_text(threads, threads ? "log-threads" : "log-plain");
        REQUIRE(rt != NULL);
        pdk_box *box = acquire(rt, "t1");
        REQUIRE(box != NULL);
        bool heard = false;
        for (double until = test_now() + 5; !heard && test_now() < until;) {
            PDK_AUTO_ERROR err = PDK_NO_ERROR;
            pdk_result result;
            CHECK_INT(pdk_exec(box, &(pdk_command){ .command = "lines" }, &result, &err), 0);
            heard = result.out != NULL && strcmp(result.out, "0") != 0;
            pdk_result_free(&result);
        }
        CHECK(heard);
        pdk_box_free(box);
        close_runtime(rt);
    }
}

TEST("impossible arguments are refused with their names, and nothing is made [B5]")
{
    pdk_runtime *rt = open_text(false, "arguments");
    REQUIRE(rt != NULL);
    char huge[5000];
    memset(huge, 'x', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    const struct { pdk_request req; const char *name; } cases[] = {
        { { .user = huge }, "user" },
        { { .thread = "t", .thread_len = 4097 }, "thread" },
        { { .holder = "" }, "holder" },
        { { .holder = huge }, "holder" },
        { { .timeout = -1 }, "timeout" },
        { { .timeout = NAN }, "timeout" },
        { { .timeout = INFINITY }, "timeout" },
        { { .requirements_json = "[1]" }, "requirements_json" },
        { { .requirements_json = "{" }, "requirements_json" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_box *box = (pdk_box *)1;
        CHECK_INT(pdk_acquire(rt, &cases[i].req, &box, &err), -1);
        CHECK(box == NULL);
        CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
        CHECK_HAS(err.message, cases[i].name);
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK_INT(pdk_acquire(NULL, NULL, NULL, &err), -1);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
    CHECK_INT(pdk_destroy(rt, NULL, &err), -1);
    pdk_box *box = acquire(rt, "t1");
    REQUIRE(box != NULL);
    pdk_result result;
    const char *const bad_env[] = { "NO-NAME=1", NULL }, *const no_value[] = { "A", NULL };
    const struct { pdk_command cmd; const char *name; } commands[] = {
        { { .command = NULL }, "command" },          { { .command = "" }, "command" },
        { { .command = "x", .timeout = NAN }, "timeout" }, { { .command = "x", .env = bad_env }, "env" },
        { { .command = "x", .env = no_value }, "env" }, { { .command = "a\0b", .command_len = 3 }, "command" },
        { { .command = "x", .cwd = "" }, "cwd" },
    };
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
        CHECK_INT(pdk_exec(box, &commands[i].cmd, &result, &err), -1);
        CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
        CHECK_HAS(err.message, commands[i].name);
    }
    pdk_box_free(box);
    close_runtime(rt);
}

TEST("requirements given as JSON reach the policies, null being left out")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK out = PDK_NO_PACK;
    pdk_runtime *rt = open_text(false, "requirements");
    REQUIRE(rt != NULL);
    pdk_request req = { .thread = "t1", .requirements_json = "{ \"image\": null, \"network\": \"none\" }" };
    pdk_box *box = NULL;
    CHECK_INT(pdk_acquire(rt, &req, &box, &err), 0);
    CHECK_KIND(err, PDK_OK);
    pdk_box_free(box);
    close_runtime(rt);
}

TEST("after a fork, every call in the child is `closed`, and freeing is harmless")
{
    for (int threads = 0; threads <= 1; threads++) {
        pdk_runtime *rt = open_text(threads, threads ? "fork-threads" : "fork-plain");
        REQUIRE(rt != NULL);
        pdk_box *box = acquire(rt, "t1");
        REQUIRE(box != NULL);
        pid_t pid = fork();
        if (pid == 0) {
            pdk_error err = PDK_NO_ERROR;
            pdk_box *other = NULL;
            pdk_request req = { .thread = "t2" };
            pdk_result result;
            alarm(20);
            int wrong = pdk_acquire(rt, &req, &other, &err) != -1 || err.kind != PDK_E_CLOSED;
            wrong |= (pdk_exec(box, &(pdk_command){ .command = "true" }, &result, &err) != -1 || err.kind != PDK_E_CLOSED) << 1;
            wrong |= (pdk_destroy(rt, "x", &err) != -1 || err.kind != PDK_E_CLOSED) << 2;
            wrong |= (pdk_shutdown(rt, &err) != -1 || err.kind != PDK_E_CLOSED) << 3;
            wrong |= (pdk_tick(rt, &err) != -1 || err.kind != PDK_E_CLOSED) << 4;
            pdk_box_free(box);
            pdk_free(rt);
            _exit(wrong);
        }
        int status = -1;
        waitpid(pid, &status, 0);
        CHECK_INT(status, 0);
        exec_and_check(box, &(pdk_command){ .command = "cat", .stdin_data = "still", .stdin_len = 5 }, "still");
        pdk_box_free(box);
        close_runtime(rt);
    }
}

TEST_MAIN
