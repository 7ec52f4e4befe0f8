/* test_guest_aio.c -- the AIO plane of the guest: shell and bash sessions, files, what it says of failures. */
#pragma GCC diagnostic ignored "-Wunused-function" /* the client's exec calls are the other plane's */
#include "guest_client.h"

#include <pthread.h>

static const guest *g(void)
{
    char extra[200]; /* a mount: what links in it lead to outside is out of reach */
    snprintf(extra, sizeof extra, "max_sessions=10\nmount=%s\n", test_tmpdir());
    return shared_guest(extra);
}

/* ---- calls ---- */

typedef struct answer {
    int status;
    json_t *j;   /* the whole body, or NULL when it is no JSON */
} answer;

static answer answer_of(reply *r)
{
    answer a = { r->status, json_loadb(r->body, r->len, JSON_ALLOW_NUL, NULL) };
    reply_free(r);
    return a;
}

/* Sends `body` (taken; NULL = none) and reads the answer. */
static answer call(const guest *on, const char *method, const char *path, json_t *body)
{
    char *text = body != NULL ? json_dumps(body, 0) : strdup("");
    json_decref(body);
    reply r = client_call(on, method, path, "Content-Type: application/json\r\n", text, strlen(text));
    free(text);
    return answer_of(&r);
}

/* What stands at "a.b.0.c". */
static const json_t *at(answer a, const char *path)
{
    const json_t *v = a.j;
    char key[64];
    while (v != NULL && *path != 0) {
        size_t n = strcspn(path, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        v = json_is_array(v) ? json_array_get(v, (size_t)atoi(key)) : json_object_get(v, key);
        path += n + (path[n] == '.');
    }
    return v;
}

static const char *text_at(answer a, const char *path)
{
    const char *s = json_string_value(at(a, path));
    return s != NULL ? s : "(none)";
}

static long long int_at(answer a, const char *path)
{
    const json_t *v = at(a, path);
    return json_is_integer(v) ? (long long)json_integer_value(v) : -12345;
}

static size_t count_at(answer a, const char *path)
{
    return json_array_size(at(a, path));
}

static void done(answer *a)
{
    json_decref(a->j);
    a->j = NULL;
}

static answer shell(const guest *on, const char *id, const char *command)
{
    json_t *body = json_pack("{s:s, s:i}", "command", command, "hard_timeout", 20);
    if (id != NULL) json_object_set_new(body, "id", json_string(id));
    return call(on, "POST", "/v1/shell/exec", body);
}

static answer create(const guest *on, const char *plane, const char *id)
{
    char path[64];
    snprintf(path, sizeof path, "/v1/%s/sessions/create", plane);
    return call(on, "POST", path, json_pack("{s:s}", strcmp(plane, "bash") == 0 ? "session_id" : "id", id));
}

static void session(const guest *on, const char *id)
{
    answer a = create(on, "shell", id);
    CHECK_INT(a.status, 200);
    CHECK_STR(text_at(a, "data.session_id"), id);
    done(&a);
}

/* One command in a session: its output, its exit code, whether the session was a new one. */
static void expect(const guest *on, const char *id, const char *command, const char *out, int code, bool reset)
{
    answer a = shell(on, id, command);
    if (!CHECK_INT(a.status, 200)) fprintf(stderr, "  of %s\n", command);
    if (out != NULL && !CHECK_STR(text_at(a, "data.output"), out)) fprintf(stderr, "  of %s\n", command);
    if (!CHECK_INT(int_at(a, "data.exit_code"), code)) fprintf(stderr, "  of %s\n", command);
    if (!CHECK_INT(json_is_true(at(a, "data.session_reset")), reset)) fprintf(stderr, "  of %s\n", command);
    done(&a);
}

static answer file_call(const char *name, json_t *body)
{
    char path[64];
    snprintf(path, sizeof path, "/v1/file/%s", name);
    return call(g(), "POST", path, body);
}

static const char *in_work(const char *name)
{
    static char paths[4][300];
    static int turn;
    char *path = paths[turn++ % 4];
    snprintf(path, 300, "%s/%s", g()->work, name);
    return path;
}

static void put_file(const char *name, const void *data, size_t len)
{
    FILE *f = fopen(in_work(name), "wb");
    CHECK(f != NULL && fwrite(data, 1, len, f) == len);
    if (f != NULL) fclose(f);
}

/* ---- the frame ---- */

TEST("the sandbox says where its home is, beside its data")
{
    answer a = call(g(), "GET", "/v1/sandbox", NULL);
    CHECK_INT(a.status, 200);
    CHECK(json_is_true(at(a, "success")));
    CHECK(json_is_string(at(a, "data")));
    CHECK_STR(text_at(a, "detail.system.workspace"), g()->work);
    CHECK(json_is_string(at(a, "home_dir")) && json_is_array(at(a, "detail.runtime.python")));
    CHECK_STR(text_at(a, "paddock.generation"), "gen1");
    done(&a);
}

TEST("a missing session has the envelope, a missing route has none")
{
    answer a = shell(g(), "never-made", "true");
    CHECK_INT(a.status, 404);
    CHECK_STR(text_at(a, "message"), "Session not found");
    CHECK(json_is_false(at(a, "success")) && json_is_null(at(a, "data")) && json_is_null(at(a, "hint")));
    done(&a);
    a = call(g(), "POST", "/v1/shell/create_session", json_object());
    CHECK_INT(a.status, 404);
    CHECK_STR(text_at(a, "detail"), "Not Found");
    done(&a);
    a = call(g(), "GET", "/v1/shell/exec", NULL);
    CHECK_INT(a.status, 405);
    done(&a);
}

TEST("a body that is not what the route asks for is refused, and nothing runs")
{
    static const char *const bodies[] = {
        "{", "[]", "7", "\"x\"", "{}", "{\"command\":7}", "{\"command\":null}", "{\"command\":\"a\\u0000b\"}",
        "{\"command\":\"true\",\"hard_timeout\":-1}", "{\"command\":\"true\",\"hard_timeout\":\"1\"}", "\xff\xfe", "{\"command\":\"\xff\"}",
        "{\"command\":\"true\",\"hard_timeout\":1e300}", "{\"command\":\"true\",\"async_mode\":1}", "[[[[[[[[[[[[",
        "{\"command\":\"true\",\"id\":[]}",
    };
    static const char *const routes[] = {
        "/v1/shell/exec", "/v1/bash/exec", "/v1/shell/view", "/v1/shell/wait", "/v1/shell/write", "/v1/shell/kill", "/v1/bash/output",
        "/v1/bash/write", "/v1/bash/kill", "/v1/file/read", "/v1/file/write", "/v1/file/replace", "/v1/file/search", "/v1/file/find",
        "/v1/file/grep", "/v1/file/glob", "/v1/file/list", "/v1/file/upload", "/v1/shell/sessions/update",
    };
    for (size_t r = 0; r < sizeof routes / sizeof *routes; r++)
        for (size_t b = 0; b < sizeof bodies / sizeof *bodies; b++) {
            /* What is wrong only for exec may be a missing field elsewhere, or no matter at all for bash. */
            reply got = client_call(g(), "POST", routes[r], NULL, bodies[b], strlen(bodies[b]));
            bool bash_id = strcmp(routes[r], "/v1/bash/exec") == 0 && strstr(bodies[b], "\"id\"") != NULL;
            if (!CHECK_INT(got.status, bash_id ? 200 : 422)) fprintf(stderr, "  of %s with %s\n", routes[r], bodies[b]);
            reply_free(&got);
        }
    expect(g(), NULL, "echo alive", "alive\n", 0, false);
}

/* ---- shell ---- */

TEST("a session keeps its directory, its variables and its functions")
{
    session(g(), "keeps");
    expect(g(), "keeps", "cd /; export A=1; B='two words'; f() { echo \"f $1\"; }; alias hello='echo hi'", "", 0, false);
    expect(g(), "keeps", "pwd; echo $A; echo \"$B\"; f x; hello", "/\n1\ntwo words\nf x\nhi\n", 0, false);
    expect(g(), "keeps", "cat <<'E'\n'quoted' \"text\" \\ $A\nE", "'quoted' \"text\" \\ $A\n", 0, false);
    expect(g(), "keeps", "(exit 3)", "", 3, false);
    expect(g(), "keeps", "test -t 0 && test -t 1 && test -t 2 && echo terminal", "terminal\n", 0, false);
}

TEST("without an id each command gets a session of its own, and its name")
{
    answer a = shell(g(), NULL, "X=1; echo \"[$X]\"");
    CHECK_INT(a.status, 200);
    CHECK_STR(text_at(a, "data.output"), "[1]\n");
    char id[80];
    snprintf(id, sizeof id, "%s", text_at(a, "data.session_id"));
    done(&a);
    expect(g(), id, "echo \"[$X]\"", "[1]\n", 0, false);
    expect(g(), NULL, "echo \"[$X]\"", "[]\n", 0, false);
}

TEST("commands that end the shell or twist it have the right status, and the next one works [B091 B094]")
{
    static const struct { const char *command, *out; int code; bool ends; } rows[] = {
        { "echo x; exit 0", "x\n", 0, true },   { "exit 3", "", 3, true },           { "exec true", "", 0, true },
        { "kill -9 $$", "", 137, true },        { "set -e; false", "", 1, true },    { "exec >&- 2>&-", "", 0, false },
        { "exec </dev/null", "", 0, false },    { "set -x; true", NULL, 0, false },  { "break; continue", NULL, 0, false },
        { "echo 'open", NULL, 2, false },       { "if", NULL, 2, false },            { "trap 'echo d' DEBUG", NULL, 0, false },
        { "set -u; set -o pipefail", NULL, 0, false }, { "unset PWD PATH HOME", NULL, 0, false },
        { "exec 3>/dev/null 4>&3 9>&3", NULL, 0, false }, { "stty -opost raw 2>/dev/null; true", NULL, 0, false },
        { "IFS=x; PS1=y; BASH_ENV=/nope", NULL, 0, false }, { "cd /; rmdir /nope-at-all", NULL, 1, false },
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        session(g(), "twist");
        expect(g(), "twist", rows[i].command, rows[i].out, rows[i].code, false);
        answer a = shell(g(), "twist", "echo ok");
        CHECK_HAS(text_at(a, "data.output"), "ok\n");
        CHECK_INT(int_at(a, "data.exit_code"), 0);
        if (!CHECK_INT(json_is_true(at(a, "data.session_reset")), rows[i].ends)) fprintf(stderr, "  after %s\n", rows[i].command);
        done(&a);
        a = call(g(), "DELETE", "/v1/shell/sessions/twist", NULL);
        CHECK_INT(a.status, 200);
        done(&a);
    }
}

TEST("a hard timeout ends the command with all its descendants, and says that the session was reset [B096 B079 J3]")
{
    session(g(), "hard");
    expect(g(), "hard", "export A=1; cd /", "", 0, false);
    double since = test_now();
    answer a = call(g(), "POST", "/v1/shell/exec",
                    json_pack("{s:s, s:s, s:f}", "command", "echo part; (setsid sleep 4711 &); sleep 4711 & sleep 4711", "id", "hard",
                              "hard_timeout", 0.5));
    CHECK_INT(a.status, 200);
    CHECK_STR(text_at(a, "data.status"), "hard_timeout");
    CHECK_STR(text_at(a, "data.output"), "part\n");
    CHECK_INT(int_at(a, "data.exit_code"), 124);
    CHECK_HAS(text_at(a, "hint"), "fresh shell");
    CHECK(test_now() - since < 5);
    CHECK_INT(alive_with("sleep 4711"), 0);
    done(&a);
    expect(g(), "hard", "echo \"[$A]\"", "[]\n", 0, true);
    expect(g(), "hard", "echo again", "again\n", 0, false);
}

TEST("a silent command is answered after no_change_timeout, and runs on [J2]")
{
    session(g(), "silent");
    answer a = call(g(), "POST", "/v1/shell/exec",
                    json_pack("{s:s, s:s, s:f}", "command", "echo part; sleep 0.6; echo late > late.txt", "id", "silent",
                              "no_change_timeout", 0.2));
    CHECK_STR(text_at(a, "data.status"), "no_change_timeout");
    CHECK_STR(text_at(a, "data.output"), "part\n");
    CHECK(at(a, "data.exit_code") == NULL);
    done(&a);
    CHECK(access(in_work("late.txt"), F_OK) != 0);
    expect(g(), "silent", "cat late.txt", "late\n", 0, false); /* waits for its turn */
    a = call(g(), "POST", "/v1/shell/exec", json_pack("{s:s, s:s, s:f}", "command", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.1; done",
                                                      "id", "silent", "no_change_timeout", 0.4));
    CHECK_STR(text_at(a, "data.status"), "completed"); /* each line begins the time anew */
    done(&a);
}

static void *one_of_many(void *arg)
{
    char command[80], want[20];
    snprintf(command, sizeof command, "echo %d; sleep 0.02", *(int *)arg);
    snprintf(want, sizeof want, "%d\n", *(int *)arg);
    expect(g(), "many", command, want, 0, false);
    return NULL;
}

TEST("commands that meet in one session run one after the other")
{
    enum { N = 16 };
    pthread_t threads[N];
    int numbers[N];
    session(g(), "many");
    for (int i = 0; i < N; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, one_of_many, &numbers[i]);
    }
    for (int i = 0; i < N; i++) pthread_join(threads[i], NULL);
    expect(g(), "many", "echo fine", "fine\n", 0, false);
}

TEST("an answer that waited long enough says running; wait, view, write and kill reach the command")
{
    session(g(), "later");
    answer a = call(g(), "POST", "/v1/shell/exec",
                    json_pack("{s:s, s:s, s:f}", "command", "read x; echo \"got $x\"; sleep 30", "id", "later", "timeout", 0.1));
    CHECK_STR(text_at(a, "data.status"), "running");
    done(&a);
    a = call(g(), "POST", "/v1/shell/write", json_pack("{s:s, s:s, s:b}", "id", "later", "input", "a line", "press_enter", 1));
    CHECK_STR(text_at(a, "data.status"), "running");
    done(&a);
    a = call(g(), "POST", "/v1/shell/wait", json_pack("{s:s, s:f}", "id", "later", "seconds", 0.3));
    CHECK_STR(text_at(a, "data.status"), "running");
    done(&a);
    a = call(g(), "POST", "/v1/shell/view", json_pack("{s:s}", "id", "later"));
    CHECK_HAS(text_at(a, "data.output"), "got a line\n");
    done(&a);
    a = call(g(), "POST", "/v1/shell/kill", json_pack("{s:s}", "id", "later"));
    CHECK_STR(text_at(a, "data.status"), "terminated");
    CHECK_INT(int_at(a, "data.exit_code"), 137);
    done(&a);
    a = call(g(), "POST", "/v1/shell/write", json_pack("{s:s, s:s, s:b}", "id", "later", "input", "x", "press_enter", 1));
    CHECK(json_is_false(at(a, "success")));
    done(&a);
    expect(g(), "later", "echo ok", "ok\n", 0, true);
}

TEST("a missing exec_dir means the session's directory, unless strict")
{
    session(g(), "dirs");
    expect(g(), "dirs", "cd /", "", 0, false);
    answer a = call(g(), "POST", "/v1/shell/exec",
                    json_pack("{s:s, s:s, s:s}", "command", "pwd", "id", "dirs", "exec_dir", "/nope"));
    CHECK_STR(text_at(a, "data.output"), "/\n");
    done(&a);
    a = call(g(), "POST", "/v1/shell/exec",
             json_pack("{s:s, s:s, s:s, s:b}", "command", "pwd", "id", "dirs", "exec_dir", "/nope", "strict", 1));
    CHECK_INT(a.status, 400);
    CHECK(json_is_false(at(a, "success")));
    done(&a);
    a = call(g(), "POST", "/v1/shell/exec",
             json_pack("{s:s, s:s, s:s}", "command", "pwd; (exit 5)", "id", "dirs", "exec_dir", "/usr/lib"));
    CHECK_STR(text_at(a, "data.output"), "/usr/lib\n");
    CHECK_INT(int_at(a, "data.exit_code"), 5);
    done(&a);
    expect(g(), "dirs", "pwd", "/usr/lib\n", 0, false);
}

TEST("the oldest idle session makes room for a new one; when all are busy the answer is 400")
{
    guest own = { 0 };
    char name[8];
    REQUIRE(guest_launch(&own, "max_sessions=3\n", NULL));
    for (int i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "s%d", i);
        session(&own, name);
    }
    answer a = shell(&own, "s0", "true");
    CHECK_INT(a.status, 404);
    done(&a);
    for (int i = 1; i < 4; i++) {
        snprintf(name, sizeof name, "s%d", i);
        a = call(&own, "POST", "/v1/shell/exec", json_pack("{s:s, s:s, s:b}", "command", "sleep 20", "id", name, "async_mode", 1));
        CHECK_STR(text_at(a, "data.status"), "running");
        done(&a);
    }
    a = shell(&own, NULL, "true");
    CHECK_INT(a.status, 400);
    CHECK_STR(text_at(a, "message"), "Cannot create shell session: session limit reached and all 3 existing sessions have active commands");
    done(&a);
    session(&own, "s2"); /* an existing one is no new one */
    a = call(&own, "GET", "/v1/shell/sessions/stats", NULL);
    CHECK_INT(int_at(a, "data.total_sessions"), 3);
    CHECK_INT(int_at(a, "data.max_sessions"), 3);
    done(&a);
    a = call(&own, "GET", "/v1/shell/sessions", NULL);
    CHECK_STR(text_at(a, "data.sessions.s3.current_command"), "sleep 20");
    done(&a);
    a = call(&own, "DELETE", "/v1/shell/sessions", NULL);
    CHECK_INT(a.status, 200);
    done(&a);
    expect(&own, NULL, "echo free", "free\n", 0, false);
    guest_end(&own);
}

TEST("a command whose client left before its turn never runs; one that runs is finished")
{
    session(g(), "left");
    int fds[2];
    for (int i = 0; i < 2; i++) {
        char body[120];
        snprintf(body, sizeof body, "{\"id\":\"left\",\"command\":\"%s; echo %d >> left.txt\"}", i == 0 ? "sleep 0.5" : ":", i);
        fds[i] = client_connect(g());
        REQUIRE(fds[i] >= 0 && client_request(fds[i], g(), "POST", "/v1/shell/exec", NULL, body, strlen(body)));
        usleep(100000);
    }
    close(fds[1]);
    close(fds[0]);
    usleep(100000);
    expect(g(), "left", "cat left.txt", "0\n", 0, false);
}

TEST("bytes that are no UTF-8 become U+FFFD in the text, and everything else of the answer is right [B085]")
{
    session(g(), "bytes");
    expect(g(), "bytes", "printf 'a\\377\\355\\240\\200\\300\\257z\\r\\nb\\r'; (exit 4)",
           "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdz\r\nb\r", 4, false);
    answer a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s}", "command", "printf '\\000\\377'; printf '\\303' >&2; exit 4"));
    CHECK_INT(a.status, 200);
    const json_t *out = at(a, "data.stdout");
    CHECK_MEM(json_string_value(out), json_string_length(out), "\0\xef\xbf\xbd", 4);
    CHECK_STR(text_at(a, "data.stderr"), "\xef\xbf\xbd");
    CHECK_INT(int_at(a, "data.exit_code"), 4);
    done(&a);
}

/* ---- bash ---- */

TEST("a bash command is a fresh process with its streams apart; only its directory stays")
{
    answer a = create(g(), "bash", "b");
    CHECK_STR(text_at(a, "data.status"), "ready");
    done(&a);
    a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:s, s:s}", "command", "export A=1; cd /usr; echo out; echo err >&2; exit 3",
                                                     "session_id", "b", "exec_dir", "/tmp"));
    CHECK_STR(text_at(a, "data.stdout"), "out\n");
    CHECK_STR(text_at(a, "data.stderr"), "err\n");
    CHECK_STR(text_at(a, "data.status"), "completed");
    CHECK_INT(int_at(a, "data.exit_code"), 3);
    CHECK_INT(int_at(a, "data.offset"), 4);
    done(&a);
    a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:s}", "command", "pwd; echo \"[$A]\"; cat", "session_id", "b"));
    CHECK_STR(text_at(a, "data.stdout"), "/tmp\n[]\n");
    done(&a);
    a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:s}", "command", "true", "session_id", "never-made"));
    CHECK_INT(a.status, 404);
    CHECK_STR(text_at(a, "message"), "Session not found");
    done(&a);
    a = call(g(), "POST", "/v1/bash/sessions/b/close", NULL);
    CHECK_INT(a.status, 200);
    done(&a);
    a = call(g(), "POST", "/v1/bash/sessions/b/close", NULL);
    CHECK_INT(a.status, 404);
    done(&a);
}

TEST("an environment is for one command, in no command line, and its names are checked [J12]")
{
    answer a = call(g(), "POST", "/v1/bash/exec",
                    json_pack("{s:s, s:{s:s, s:s}}", "command", "printf '%s|' \"$K\" \"$E\"; tr '\\0' ' ' </proc/$$/cmdline | grep -c s[e]cret",
                              "env", "K", "a secret'\"\n", "E", ""));
    CHECK_STR(text_at(a, "data.stdout"), "a secret'\"\n||0\n");
    done(&a);
    static const char *const names[] = { "A=B", "1A", "", "A-B", "A B", "\xc3\xa9" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:{s:s}}", "command", "touch ran.txt", "env", names[i], "v"));
        if (!CHECK_INT(a.status, 422)) fprintf(stderr, "  of %s\n", names[i]);
        done(&a);
    }
    CHECK(access(in_work("ran.txt"), F_OK) != 0);
}

TEST("a bash command at its hard limit is gone with all its descendants [B079]")
{
    answer a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:f}", "command",
                                                            "(setsid sh -c 'sleep 4712; :' &) ; sleep 4712 & wait", "hard_timeout", 0.3));
    CHECK_STR(text_at(a, "data.status"), "timed_out");
    CHECK_INT(alive_with("sleep 4712"), 0);
    done(&a);
}

TEST("output is read by offset while a command runs, and after it was killed")
{
    answer a = create(g(), "bash", "poll");
    done(&a);
    a = call(g(), "POST", "/v1/bash/exec",
             json_pack("{s:s, s:s, s:b}", "command", "read x; echo \"$x\"; sleep 30", "session_id", "poll", "async_mode", 1));
    CHECK_STR(text_at(a, "data.status"), "running");
    char id[80];
    snprintf(id, sizeof id, "%s", text_at(a, "data.command_id"));
    done(&a);
    a = call(g(), "POST", "/v1/bash/write", json_pack("{s:s, s:s}", "session_id", "poll", "input", "abc\n"));
    CHECK(json_is_true(at(a, "success")));
    done(&a);
    a = call(g(), "POST", "/v1/bash/output", json_pack("{s:s, s:s, s:b}", "session_id", "poll", "command_id", id, "wait", 1));
    CHECK_STR(text_at(a, "data.stdout"), "abc\n");
    CHECK_STR(text_at(a, "data.command.status"), "running");
    CHECK_INT(int_at(a, "data.offset"), 4);
    done(&a);
    a = call(g(), "POST", "/v1/bash/kill", json_pack("{s:s, s:s}", "session_id", "poll", "signal", "SIGKILL"));
    CHECK_INT(a.status, 200);
    done(&a);
    a = call(g(), "POST", "/v1/bash/output", json_pack("{s:s, s:b, s:i}", "session_id", "poll", "wait", 1, "offset", 4));
    CHECK_STR(text_at(a, "data.command.status"), "killed");
    CHECK_STR(text_at(a, "data.stdout"), "");
    done(&a);
    a = call(g(), "POST", "/v1/bash/output", json_pack("{s:s, s:s}", "session_id", "poll", "command_id", "none"));
    CHECK_INT(a.status, 404);
    done(&a);
}

/* A connection on which an output request was sent: its answer comes when there is something new. */
static int output_later(const char *session, const char *id)
{
    int fd = client_connect(g());
    char body[300];
    int n = snprintf(body, sizeof body, "{\"session_id\":\"%s\",\"command_id\":\"%s\",\"wait\":true,\"wait_timeout\":60}", session, id);
    client_request(fd, g(), "POST", "/v1/bash/output", "Content-Type: application/json\r\n", body, (size_t)n);
    return fd;
}

TEST("output of a command that waits for its session's former one is waited for like that of one that runs")
{
    char ids[3][80];
    answer a = create(g(), "bash", "line");
    done(&a);
    static const char *const commands[] = { "read x", "echo second; read x", "echo third" };
    for (int i = 0; i < 3; i++) {
        a = call(g(), "POST", "/v1/bash/exec",
                 json_pack("{s:s, s:s, s:b}", "command", commands[i], "session_id", "line", "async_mode", 1));
        CHECK_STR(text_at(a, "data.status"), "running");
        snprintf(ids[i], sizeof ids[i], "%s", text_at(a, "data.command_id"));
        done(&a);
    }
    int first = output_later("line", ids[0]), second = output_later("line", ids[1]), third = output_later("line", ids[2]);
    a = call(g(), "POST", "/v1/bash/write", json_pack("{s:s, s:s, s:s}", "session_id", "line", "command_id", ids[0], "input", "go\n"));
    CHECK(json_is_true(at(a, "success")));
    done(&a);
    reply r = client_read(first);
    a = answer_of(&r);
    CHECK_STR(text_at(a, "data.command.status"), "completed");
    done(&a);
    r = client_read(second);
    a = answer_of(&r);
    CHECK_STR(text_at(a, "data.stdout"), "second\n");
    CHECK_STR(text_at(a, "data.command.status"), "running");
    done(&a);
    a = call(g(), "POST", "/v1/bash/sessions/line/close", NULL);
    CHECK_INT(a.status, 200);
    done(&a);
    r = client_read(third);
    a = answer_of(&r);
    CHECK_INT(a.status, 200);
    CHECK_STR(text_at(a, "data.command.command_id"), ids[2]);
    CHECK_STR(text_at(a, "data.command.status"), "killed");
    CHECK_STR(text_at(a, "data.stdout"), "");
    done(&a);
    close(first);
    close(second);
    close(third);
}

static long resident_kb(pid_t pid)
{
    char path[64], line[200];
    long kb = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    while (f != NULL && fgets(line, sizeof line, f) != NULL) sscanf(line, "VmHWM: %ld", &kb);
    if (f != NULL) fclose(f);
    return kb;
}

TEST("a detached command is answered at once with its id, and how it ended is told later, also of one that failed at once [B101]")
{
    static const struct { const char *command, *status; int exit; } cases[] = {
        { "true", "completed", 0 },
        { "exit 7", "completed", 7 },
        { "no-such-program-here", "completed", 127 },
        { "sleep 300", "running", 0 },
        { "exec <&- >&- 2>&-; sleep 300", "running", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double before = test_now();
        answer a = call(g(), "POST", "/v1/bash/exec", json_pack("{s:s, s:b}", "command", cases[i].command, "async_mode", 1));
        CHECK(test_now() - before < 5); /* a second where nobody else wants the processor */
        char session_id[100], id[100];
        snprintf(session_id, sizeof session_id, "%s", text_at(a, "data.session_id"));
        snprintf(id, sizeof id, "%s", text_at(a, "data.command_id"));
        CHECK(strcmp(id, "(none)") != 0);
        done(&a);
        bool ends = strcmp(cases[i].status, "completed") == 0;
        /* Beyond all it writes: its end alone is waited for. */
        a = call(g(), "POST", "/v1/bash/output",
                 json_pack("{s:s, s:s, s:i, s:i, s:b, s:f}", "session_id", session_id, "command_id", id, "offset", 1000000,
                           "stderr_offset", 1000000, "wait", ends, "wait_timeout", 60.0));
        CHECK_STR(text_at(a, "data.command.status"), cases[i].status);
        if (ends)
            CHECK_INT(int_at(a, "data.command.exit_code"), cases[i].exit);
        done(&a);
        a = call(g(), "POST", "/v1/bash/kill", json_pack("{s:s, s:s}", "session_id", session_id, "signal", "SIGKILL"));
        done(&a);
    }
}

TEST("a flood of output is bounded in memory, and both planes say that it was cut [B087]")
{
    guest own = { 0 };
    REQUIRE(guest_launch(&own, "max_output=1048576\n", NULL));
    answer a = call(&own, "POST", "/v1/bash/exec",
                    json_pack("{s:s, s:i}", "command", "echo first; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo last",
                              "max_output_length", 0));
    CHECK_INT(int_at(a, "data.exit_code"), 0);
    CHECK_INT(int_at(a, "data.offset"), 100000012);
    CHECK(json_is_true(at(a, "data.truncated")));
    CHECK(strncmp(text_at(a, "data.stdout"), "first\n", 6) == 0);
    const json_t *out = at(a, "data.stdout");
    CHECK_HAS(text_at(a, "data.stdout") + json_string_length(out) - 6, "last\n");
    CHECK(json_string_length(out) < 1100000);
    done(&a);
    a = shell(&own, NULL, "seq 1 100000; echo last");
    CHECK(json_is_true(at(a, "data.truncated")));
    CHECK(json_string_length(at(a, "data.output")) < 31000);
    CHECK_HAS(text_at(a, "data.output"), "cut out");
    CHECK_HAS(text_at(a, "data.output"), "last\n");
    done(&a);
    CHECK(resident_kb(own.pid) < 40000);
    guest_end(&own);
}

/* ---- files ---- */

TEST("files are written, appended to, read by lines and replaced in")
{
    answer a = file_call("write", json_pack("{s:s, s:s}", "file", in_work("t.txt"), "content", "l0\nl1\nl2\n"));
    CHECK(json_is_true(at(a, "success")));
    CHECK_INT(int_at(a, "data.bytes_written"), 9);
    done(&a);
    a = file_call("write", json_pack("{s:s, s:s, s:b, s:b}", "file", in_work("t.txt"), "content", "l3", "append", 1, "trailing_newline", 1));
    done(&a);
    a = file_call("read", json_pack("{s:s}", "file", in_work("t.txt")));
    CHECK_STR(text_at(a, "data.content"), "l0\nl1\nl2\nl3\n");
    done(&a);
    a = file_call("read", json_pack("{s:s, s:i, s:i}", "file", in_work("t.txt"), "start_line", 1, "end_line", 3));
    CHECK_STR(text_at(a, "data.content"), "l1\nl2\n");
    done(&a);
    a = file_call("replace", json_pack("{s:s, s:s, s:s}", "file", in_work("t.txt"), "old_str", "l", "new_str", "line "));
    CHECK_INT(int_at(a, "data.replaced_count"), 4);
    done(&a);
    a = file_call("search", json_pack("{s:s, s:s}", "file", in_work("t.txt"), "regex", "line [12]|\\d{4}"));
    CHECK_INT(count_at(a, "data.matches"), 2);
    CHECK_STR(text_at(a, "data.matches.0"), "line 1");
    CHECK_INT(int_at(a, "data.line_numbers.1"), 3);
    done(&a);
    a = file_call("write", json_pack("{s:s, s:s, s:s}", "file", in_work("b.bin"), "content", "AP8K", "encoding", "base64"));
    CHECK_INT(int_at(a, "data.bytes_written"), 3);
    done(&a);
    char path[400];
    snprintf(path, sizeof path, "/v1/file/download?path=%s&change_policy=abort", in_work("b.bin"));
    reply r = simple(g(), "GET", path);
    CHECK_INT(r.status, 200);
    CHECK_MEM(r.body, r.len, "\0\xff\n", 3);
    reply_free(&r);
}

TEST("a file operation that fails is an answer with the reason; a download that fails is an HTTP error")
{
    static const struct { const char *call, *file, *type; } rows[] = {
        { "read", "nope", "not_found" },        { "write", "nope/x", "not_found" }, { "read", "", "invalid_target" },
        { "replace", "nope", "not_found" },     { "search", "nope", "not_found" },  { "read", "pipe", "invalid_target" },
        { "read", "out", "permission_denied" }, { "write", "out", "permission_denied" }, { "read", "loop", "*" },
    };
    CHECK(symlink("/etc/passwd", in_work("out")) == 0 && symlink("loop", in_work("loop")) == 0);
    CHECK(mkfifo(in_work("pipe"), 0644) == 0);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        answer a = file_call(rows[i].call, json_pack("{s:s, s:s, s:s, s:s, s:s}", "file", in_work(rows[i].file), "content", "x", "old_str",
                                                     "x", "new_str", "y", "regex", "x"));
        CHECK_INT(a.status, 200);
        CHECK(json_is_false(at(a, "success")));
        if (strcmp(rows[i].type, "*") != 0) CHECK_STR(text_at(a, "data.error_type"), rows[i].type);
        CHECK(json_is_string(at(a, "data.message")) && json_is_string(at(a, "data.operation")));
        done(&a);
    }
    answer a = file_call("read", json_pack("{s:s}", "file", "relative"));
    CHECK_STR(text_at(a, "data.error_type"), "invalid_path");
    done(&a);
    char path[400];
    snprintf(path, sizeof path, "/v1/file/download?path=%s", in_work("nope"));
    a = call(g(), "GET", path, NULL);
    CHECK_INT(a.status, 404);
    CHECK_STR(text_at(a, "data.error_type"), "not_found");
    done(&a);
    a = call(g(), "GET", "/v1/file/download", NULL);
    CHECK_INT(a.status, 422);
    done(&a);
}

/* The members of data.files, joined by spaces, each from `skip` bytes on. */
static const char *paths(answer a, size_t skip)
{
    static char text[2000];
    size_t n = 0;
    text[0] = 0;
    for (size_t i = 0; i < count_at(a, "data.files"); i++) {
        const json_t *one = json_array_get(at(a, "data.files"), i);
        const char *path = json_string_value(json_is_string(one) ? one : json_object_get(one, "path"));
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", i ? " " : "", path + skip);
    }
    return text;
}

TEST("trees are listed, searched by name and by content; links are reported, not followed")
{
    CHECK(mkdir(in_work("tree"), 0755) == 0 && mkdir(in_work("tree/sub"), 0755) == 0 && mkdir(in_work("tree/.git"), 0755) == 0);
    CHECK(symlink("..", in_work("tree/up")) == 0);
    put_file("tree/a.py", "import os\nx = 1\n", 16);
    put_file("tree/sub/b.py", "a.b(1)\n", 7);
    put_file("tree/sub/c.txt", "import\0binary", 13);
    put_file("tree/.git/d.py", "import re\n", 10);
    const char *root = in_work("tree");
    char top[300];
    snprintf(top, sizeof top, "%s", root);
    size_t skip = strlen(top) + 1;
    answer a = file_call("list", json_pack("{s:s}", "path", top));
    CHECK_STR(paths(a, skip), ".git a.py sub up");
    CHECK_INT(int_at(a, "data.file_count"), 2);
    CHECK_INT(int_at(a, "data.files.1.size"), 16);
    done(&a);
    a = file_call("list", json_pack("{s:s, s:b, s:b, s:s, s:b}", "path", top, "recursive", 1, "show_hidden", 0, "sort_by", "name",
                                    "sort_desc", 1));
    CHECK_STR(paths(a, skip), "up sub/c.txt sub/b.py sub a.py");
    done(&a);
    a = file_call("list", json_pack("{s:s, s:b, s:i}", "path", top, "recursive", 1, "max_depth", 1));
    CHECK_STR(paths(a, skip), ".git a.py sub up");
    done(&a);
    a = file_call("find", json_pack("{s:s, s:s}", "path", top, "glob", "*.py"));
    CHECK_STR(paths(a, skip), ".git/d.py a.py sub/b.py");
    done(&a);
    a = file_call("glob", json_pack("{s:s, s:s, s:[s]}", "path", top, "pattern", "**/[ab].p?", "exclude", "sub/*"));
    CHECK_STR(paths(a, skip), "a.py");
    done(&a);
    a = file_call("glob", json_pack("{s:s, s:s, s:i}", "path", top, "pattern", "**", "max_results", 1));
    CHECK(json_is_true(at(a, "data.truncated")));
    done(&a);
    a = file_call("grep", json_pack("{s:s, s:s, s:[s], s:i}", "path", top, "pattern", "^import\\s", "exclude", ".git/**", "context_after", 1));
    CHECK_INT(int_at(a, "data.match_count"), 1);
    CHECK_STR(text_at(a, "data.matches.0.line_content"), "import os");
    CHECK_STR(text_at(a, "data.matches.0.context_after.0"), "x = 1");
    CHECK_INT(int_at(a, "data.matches.0.line_number"), 1);
    done(&a);
    a = file_call("grep", json_pack("{s:s, s:s, s:b}", "path", top, "pattern", "a.b(1)", "fixed_strings", 1));
    CHECK_INT(int_at(a, "data.match_count"), 1);
    done(&a);
    a = file_call("grep", json_pack("{s:s, s:s}", "path", top, "pattern", "(a)\\1"));
    CHECK_INT(a.status, 422);
    done(&a);
    a = file_call("list", json_pack("{s:s}", "path", in_work("tree/a.py")));
    CHECK_STR(text_at(a, "data.error_type"), "invalid_target");
    done(&a);
}

static answer upload(const char *body, size_t len, const char *type)
{
    char head[200];
    snprintf(head, sizeof head, "Content-Type: %s\r\n", type);
    reply r = client_call(g(), "POST", "/v1/file/upload", head, body, len);
    return answer_of(&r);
}

TEST("an upload is stored byte by byte, whichever part comes first")
{
    static const char data[] = "\0\r\n--BoundarY\r\n\xff\r\n--Boundary";
    for (int path_first = 0; path_first < 2; path_first++) {
        char file[200], path[500], body[1000], name[20];
        snprintf(name, sizeof name, "up%d", path_first);
        int p = snprintf(path, sizeof path, "--BoundaryX\r\nContent-Disposition: form-data; name=\"path\"\r\n\r\n%s\r\n", in_work(name));
        int f = snprintf(file, sizeof file, "--BoundaryX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"blob\"\r\n"
                                            "Content-Type: application/octet-stream\r\n\r\n");
        memcpy(file + f, data, sizeof data);
        memcpy(file + f + sizeof data, "\r\n", 2);
        f += (int)sizeof data + 2;
        memcpy(body, path_first ? path : file, (size_t)(path_first ? p : f));
        memcpy(body + (path_first ? p : f), path_first ? file : path, (size_t)(path_first ? f : p));
        memcpy(body + p + f, "--BoundaryX--\r\n", 15);
        answer a = upload(body, (size_t)(p + f) + 15, "multipart/form-data; boundary=BoundaryX");
        CHECK_INT(a.status, 200);
        CHECK_INT(int_at(a, "data.file_size"), (long long)sizeof data);
        CHECK_STR(text_at(a, "data.file_path"), in_work(name));
        done(&a);
        char got[200];
        FILE *in = fopen(in_work(name), "rb");
        REQUIRE(in != NULL);
        size_t n = fread(got, 1, sizeof got, in);
        fclose(in);
        CHECK_MEM(got, n, data, sizeof data);
    }
}

TEST("an upload that is broken or goes to nowhere leaves nothing behind")
{
    static const char cut[] = "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"cut.txt\"\r\n\r\nabc";
    static const char nowhere[] = "--X\r\nContent-Disposition: form-data; name=\"path\"\r\n\r\n/proc/none/x\r\n--X\r\n"
                                  "Content-Disposition: form-data; name=\"file\"\r\n\r\nabc\r\n--X--";
    answer a = upload(cut, sizeof cut - 1, "multipart/form-data; boundary=X");
    CHECK_INT(a.status, 422);
    done(&a);
    CHECK(access(in_work("cut.txt"), F_OK) != 0);
    a = upload(cut, sizeof cut - 1, "text/plain");
    CHECK_INT(a.status, 422);
    done(&a);
    a = upload("", 0, "multipart/form-data; boundary=X");
    CHECK_INT(a.status, 422);
    done(&a);
    a = upload("--X--", 5, "multipart/form-data; boundary=X");
    CHECK_INT(a.status, 422);
    done(&a);
    a = upload(nowhere, sizeof nowhere - 1, "multipart/form-data; boundary=X");
    CHECK_INT(a.status, 200);
    CHECK_STR(text_at(a, "data.error_type"), "not_found");
    done(&a);
}

TEST("files answer at once while a session is stuck after a timed-out command [B095]")
{
    session(g(), "stuck");
    answer a = call(g(), "POST", "/v1/shell/exec",
                    json_pack("{s:s, s:s, s:f}", "command", "trap '' TERM INT HUP; sleep 30", "id", "stuck", "timeout", 0.1));
    CHECK_STR(text_at(a, "data.status"), "running");
    done(&a);
    put_file("beside.txt", "b", 1);
    double since = test_now();
    a = file_call("list", json_pack("{s:s}", "path", g()->work));
    CHECK(json_is_true(at(a, "success")));
    done(&a);
    a = file_call("read", json_pack("{s:s}", "file", in_work("beside.txt")));
    CHECK_STR(text_at(a, "data.content"), "b");
    done(&a);
    expect(g(), NULL, "echo other", "other\n", 0, false);
    CHECK(test_now() - since < 10); /* and not the thirty seconds */
    a = call(g(), "DELETE", "/v1/shell/sessions/stuck", NULL);
    CHECK_INT(a.status, 200);
    done(&a);
}

/* ---- tokens ---- */

TEST("every route but the sandbox's own wants a token; a fence ends the shells of smaller ones; doom ends all")
{
    guest own = { 0 };
    REQUIRE(guest_launch(&own, NULL, NULL));
    session(&own, "s");
    expect(&own, "s", "A=1; sleep 4713 &", NULL, 0, false);
    int fd = client_connect(&own);
    static const char bare[] = "POST /v1/shell/exec HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}";
    client_send(fd, bare, sizeof bare - 1);
    reply r = client_read(fd);
    CHECK_INT(r.status, 401);
    reply_free(&r);
    close(fd);
    guest newer = own;
    newer.token = 20;
    answer a = call(&newer, "POST", "/v1/paddock/fence", NULL);
    CHECK_INT(a.status, 200);
    done(&a);
    CHECK(gone("sleep 4713"));
    static const char *const routes[] = { "/v1/shell/exec", "/v1/bash/exec", "/v1/file/write", "/v1/shell/sessions/create" };
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        a = call(&own, "POST", routes[i], json_pack("{s:s, s:s, s:s}", "command", "true", "file", "/tmp/x", "content", ""));
        CHECK_INT(a.status, 409);
        CHECK_STR(text_at(a, "error"), "stale_token");
        done(&a);
    }
    expect(&newer, "s", "echo \"[$A]\"", "[]\n", 0, true);
    r = client_call(&newer, "POST", "/v1/paddock/doom", "X-Paddock-Expected: 20\r\n", "", 0);
    CHECK_INT(r.status, 200);
    reply_free(&r);
    a = shell(&newer, "s", "true");
    CHECK_INT(a.status, 409);
    CHECK_STR(text_at(a, "error"), "doomed");
    done(&a);
    guest_end(&own);
}

TEST("a command that waited in a queue while somebody fenced does not run")
{
    guest own = { 0 };
    REQUIRE(guest_launch(&own, NULL, NULL));
    session(&own, "s");
    char first[] = "{\"id\":\"s\",\"command\":\"sleep 20\"}", second[] = "{\"id\":\"s\",\"command\":\"touch second.txt\"}";
    int a = client_connect(&own), b = client_connect(&own);
    client_request(a, &own, "POST", "/v1/shell/exec", NULL, first, strlen(first));
    usleep(100000);
    client_request(b, &own, "POST", "/v1/shell/exec", NULL, second, strlen(second));
    usleep(100000);
    guest newer = own;
    newer.token = 20;
    answer f = call(&newer, "POST", "/v1/paddock/fence", NULL);
    CHECK_INT(f.status, 200);
    done(&f);
    reply ra = client_read(a), rb = client_read(b);
    CHECK_HAS(ra.body, "terminated");
    CHECK_INT(rb.status, 409);
    CHECK_HAS(rb.body, "stale_token");
    char path[300];
    snprintf(path, sizeof path, "%s/second.txt", own.work);
    CHECK(access(path, F_OK) != 0);
    reply_free(&ra);
    reply_free(&rb);
    close(a);
    close(b);
    guest_end(&own);
}

TEST("a long search does not keep a fence waiting")
{
    guest own = { 0 };
    REQUIRE(guest_launch(&own, NULL, NULL));
    char body[] = "{\"path\":\"/usr\",\"pattern\":\"(a|b)*q(c|d)*[xyz]{3,9}w$\",\"max_file_size\":\"16M\"}";
    int fd = client_connect(&own);
    client_request(fd, &own, "POST", "/v1/file/grep", NULL, body, strlen(body));
    usleep(50000);
    for (int i = 1; i <= 5; i++) {
        own.token = (uint64_t)(20 + i);
        double since = test_now();
        answer a = call(&own, "POST", "/v1/paddock/fence", NULL);
        CHECK_INT(a.status, 200);
        CHECK_WITHIN(since, 0.5);
        done(&a);
    }
    close(fd); /* the search ends with its client */
    guest_end(&own);
}

TEST("the guest of all these tests ends cleanly")
{
    guest_end(&shared);
}

TEST_MAIN
