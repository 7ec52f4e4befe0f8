/* test_guest.c -- commands of the guest: outcomes, limits, output, input, sessions. */
#include "guest_client.h"

static guest *g(void)
{
    return shared_guest(NULL);
}

static void check_exec(const char *text, const char *out, const char *name, int code)
{
    outcome o = EXEC(g(), .text = text, .limit = "20");
    CHECK_INT(o.status, 200);
    CHECK_STR(o.name, name);
    if (!CHECK_INT(o.exit_code, code))
        fprintf(stderr, "  of %s: %s\n", text, o.err);
    if (out != NULL)
        CHECK_STR(o.out, out);
    outcome_free(&o);
}

TEST("a command's output, error output and status come back apart")
{
    outcome o = EXEC(g(), .text = "echo hi; echo oops >&2; exit 3");
    CHECK_INT(o.status, 200);
    CHECK_STR(o.out, "hi\n");
    CHECK_STR(o.err, "oops\n");
    CHECK_STR(o.name, "completed");
    CHECK_INT(o.exit_code, 3);
    CHECK(!o.truncated && !o.reset && o.duration >= 0 && o.duration < 5);
    outcome_free(&o);
}

TEST("missing commands, directories, true and false have the statuses that shells give [B114]")
{
    check_exec("no-such-command-here", "", "completed", 127);
    check_exec("/tmp", "", "completed", 126);
    check_exec("true", "", "completed", 0);
    check_exec("false", "", "completed", 1);
}

TEST("a command that is ended by a signal is signalled, with 128 and the number")
{
    outcome o = EXEC(g(), .text = "kill -TERM $$");
    CHECK_STR(o.name, "signalled");
    CHECK_INT(o.exit_code, 143);
    CHECK_INT(o.sig, 15);
    outcome_free(&o);
    check_exec("kill -9 $$", "", "signalled", 137);
}

TEST("a command without input reads its end at once [B093]")
{
    outcome o = EXEC(g(), .text = "cat; echo done", .limit = "10");
    CHECK_STR(o.out, "done\n");
    CHECK(o.took < 5);
    outcome_free(&o);
}

TEST("input arrives byte for byte, also when there is more than pipes hold")
{
    size_t n = 3 << 20;
    char *data = malloc(n);
    for (size_t i = 0; i < n; i++)
        data[i] = (char)(i * 7 + i / 251);
    outcome o = EXEC(g(), .text = "cat", .in = data, .in_len = n, .limit = "30");
    CHECK_MEM(o.out, o.out_len, data, n);
    CHECK_INT(o.exit_code, 0);
    outcome_free(&o);
    o = EXEC(g(), .text = "head -c 3; exec <&-; sleep 0.1; echo; echo end", .in = data, .in_len = n, .limit = "30");
    CHECK_STR(o.name, "completed");
    CHECK_MEM(o.out, o.out_len, "\0\7\16\nend\n", 8);
    outcome_free(&o);
    o = EXEC(g(), .text = "wc -c", .in = "", .limit = "30");
    CHECK_INT(atoi(o.out), 0);
    outcome_free(&o);
    free(data);
}

TEST("raw bytes come back as they were, whatever they are [B085]")
{
    outcome o = EXEC(g(), .text = "printf '\\000\\377\\355\\240\\200\\300\\257'; printf '\\376\\000' >&2");
    CHECK_MEM(o.out, o.out_len, "\000\377\355\240\200\300\257", 7);
    CHECK_MEM(o.err, o.err_len, "\376\000", 2);
    CHECK_INT(o.exit_code, 0);
    outcome_free(&o);
}

TEST("a background process that keeps the pipes does not hold the call up, and lives on [B080]")
{
    outcome o = EXEC(g(), .text = "sleep 600@81 & echo hi");
    CHECK_STR(o.out, "hi\n");
    CHECK_STR(o.name, "completed");
    CHECK(o.took < 10);
    outcome_free(&o);
    CHECK_INT(alive_with("sleep 600@81"), 1);
    check_exec("pkill -f 'sleep 600@8[1]'; true", NULL, "completed", 0);
    CHECK(gone("sleep 600@81"));
}

TEST("a background process may write on after its command without blocking or dying [B080]")
{
    outcome o = EXEC(
        g(), .text = "(for i in $(seq 1 40); do head -c 20000 /dev/zero; done; echo ok > wrote; sleep 0.1) & echo hi");
    CHECK(o.out_len >= 3);
    CHECK_STR(o.name, "completed");
    outcome_free(&o);
    check_exec("for i in $(seq 1 100); do [ -f wrote ] && break; sleep 0.05; done; cat wrote", "ok\n", "completed", 0);
}

TEST("at its limit everything of a command is dead, also what left its session or forked twice [B079, B081]")
{
    const char *texts[] = {
        "sleep 300@79 & wait", "setsid sleep 300@79 & setsid -f sleep 300@79; sleep 300@79",
        "(setsid sh -c 'sleep 300@79 & sleep 300@79' &) ; (sh -c 'trap \"\" TERM INT HUP; sleep 300@79; sleep 300@79')",
        "while :; do :; done"
    };
    for (int i = 0; i < 4; i++) {
        outcome o = EXEC(g(), .text = texts[i], .limit = "0.3");
        CHECK_STR(o.name, "hard_timeout");
        CHECK_INT(o.exit_code, 124);
        CHECK(o.took > 0.25 && o.took < 10);
        outcome_free(&o);
        CHECK_INT(alive_with("sleep 300@79"), 0);
    }
    CHECK_INT(state_number(g(), "commands"), 0);
}

TEST("what was printed before the limit is kept")
{
    outcome o = EXEC(g(), .text = "echo before; echo too >&2; sleep 60", .limit = "0.2");
    CHECK_STR(o.out, "before\n");
    CHECK_STR(o.err, "too\n");
    CHECK_STR(o.name, "hard_timeout");
    outcome_free(&o);
}

TEST("a fork bomb ends at the limit, and the sandbox goes on [B079]")
{
    guest f = { 0 };
    if (geteuid() != 0)
        SKIP("needs root: the bomb runs as a user who may have 200 processes");
    REQUIRE(guest_launch(&f, "workspace=/tmp\n",
                         "exec setpriv --reuid 61235 --regid 61235 --clear-groups prlimit --nproc=200 \"$0\""));
    chmod(f.sock, 0777);
    const char *bombs[] = { "b() { b | b & }; b; sleep 300@77", "b() { setsid sleep 300@77 & (b &) ; b; }; b 2>/dev/null",
                            "python3 -c 'import os\nwhile True:\n try: os.fork()\n except OSError: pass' 300@77" };
    for (int i = 0; i < 3; i++) {
        outcome o = EXEC(&f, .text = bombs[i], .limit = "0.7");
        CHECK(strcmp(o.name, "hard_timeout") == 0 || strcmp(o.name, "completed") == 0); /* without a python3 */
        if (!CHECK(o.took < 30))
            fprintf(stderr, "  bomb %d took %.1f s\n", i, o.took);
        outcome_free(&o);
        CHECK_INT(alive_with("300@77"), 0);
        o = EXEC(&f, .text = "echo hi", .limit = "10");
        CHECK_STR(o.out, "hi\n");
        outcome_free(&o);
    }
    guest_end(&f);
}

TEST("a command that kills its keeper dies with all it started [B079]")
{
    outcome o = EXEC(g(), .text = "setsid sleep 300@78 & kill -9 $PPID; sleep 300@78", .limit = "20");
    CHECK_STR(o.name, "signalled");
    CHECK(o.took < 5);
    outcome_free(&o);
    CHECK(gone("sleep 300@78"));
    o = EXEC(g(), .text = "kill -STOP $PPID; sleep 300@78", .limit = "0.4");
    CHECK_STR(o.name, "hard_timeout");
    CHECK(o.took < 5);
    outcome_free(&o);
    CHECK(gone("sleep 300@78"));
    check_exec("echo still here", "still here\n", "completed", 0);
}

TEST("two hundred orphans leave no zombie and no tree behind [B110]")
{
    for (int i = 0; i < 200; i++) {
        outcome o = EXEC(g(), .text = "(sleep 0.01 &) ; (setsid true &)");
        if (!CHECK_INT(o.exit_code, 0))
            break;
        outcome_free(&o);
    }
    for (int i = 0; i < 100 && state_number(g(), "trees") > 0; i++)
        usleep(10000);
    CHECK_INT(state_number(g(), "trees"), 0);
    char text[200];
    snprintf(text, sizeof text, "ps -o stat= --ppid %d | grep -c Z", (int)g()->pid);
    FILE *p = popen(text, "r");
    int zombies = -1;
    CHECK_INT(fscanf(p, "%d", &zombies), 1);
    pclose(p);
    CHECK_INT(zombies, 0);
}

TEST("a client that goes away takes its command with it [B082]")
{
    size_t len;
    command c = { .text = "setsid sleep 300@82 & sleep 300@82", .limit = "100" };
    char *body = command_body(&c, &len);
    int fd = client_connect(g());
    client_request(fd, g(), "POST", "/v1/paddock/exec", NULL, body, len);
    for (int i = 0; i < 200 && alive_with("sleep 300@82") < 2; i++)
        usleep(10000);
    CHECK(alive_with("sleep 300@82") >= 2);
    close(fd);
    CHECK(gone("sleep 300@82"));
    free(body);
}

TEST("a thousand short commands, eight at a time, each have their whole output [B083]")
{
    int failures = 0;
    for (int child = 0; child < 8; child++)
        if (fork() == 0) {
            int bad = 0;
            for (int i = 0; i < 125; i++) {
                char text[64], want[64];
                snprintf(text, sizeof text, "echo line %d %d", child, i);
                snprintf(want, sizeof want, "line %d %d\n", child, i);
                outcome o = EXEC(&shared, .text = text);
                bad += o.status != 200 || strcmp(o.out, want) != 0 || o.exit_code != 0 || strcmp(o.name, "completed") != 0;
                outcome_free(&o);
            }
            _exit(bad > 0);
        }
    for (int i = 0; i < 8; i++) {
        int status;
        wait(&status);
        failures += status != 0;
    }
    CHECK_INT(failures, 0);
}

static long rss_of(pid_t pid)
{
    char path[60];
    long pages = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    FILE *f = fopen(path, "r");
    CHECK(f != NULL && fscanf(f, "%*d %ld", &pages) == 1);
    if (f != NULL)
        fclose(f);
    return pages * 4;
}

TEST("output beyond the bound is dropped and said, and costs no memory [B087]")
{
    outcome o = EXEC(g(), .text = "head -c 5000 /dev/zero; head -c 10 /dev/zero >&2", .max = "1000");
    CHECK_INT(o.out_len, 1000);
    CHECK_INT(o.err_len, 10);
    CHECK(o.truncated);
    CHECK_STR(o.name, "completed");
    outcome_free(&o);
    o = EXEC(g(), .text = "head -c 1000 /dev/zero", .max = "1000");
    CHECK(!o.truncated);
    outcome_free(&o);
    o = EXEC(g(), .text = "head -c 400000000 /dev/zero; echo end >&2", .limit = "60");
    CHECK_INT(o.out_len, 8 << 20);
    CHECK(o.truncated);
    CHECK_STR(o.err, "end\n");
    outcome_free(&o);
    long kb = rss_of(g()->pid);
    if (!CHECK(kb < 6000))
        fprintf(stderr, "  %ld kB\n", kb);
}

TEST("a client that reads slowly holds up its own command only [B088]")
{
    size_t len;
    command c = { .text = "head -c 6000000 /dev/zero; echo end >&2", .limit = "60" };
    char *body = command_body(&c, &len);
    int fd = client_connect(g());
    double since = test_now();
    client_request(fd, g(), "POST", "/v1/paddock/exec", NULL, body, len);
    usleep(200000); /* the flood fills its buffers meanwhile */
    for (int i = 0; i < 20; i++) {
        outcome o = EXEC(g(), .text = "echo quick");
        CHECK_STR(o.out, "quick\n");
        CHECK(o.took < 10);
        outcome_free(&o);
    }
    CHECK(rss_of(g()->pid) < 6000);
    reply r = client_read(fd);
    outcome o = outcome_of(&r, since);
    CHECK_INT(o.out_len, 6000000);
    CHECK_STR(o.err, "end\n");
    outcome_free(&o);
    close(fd);
    free(body);
}

TEST("the environment is small and fresh, and a command's own values are added")
{
    outcome o = EXEC(g(), .text = "env | sort | cut -d= -f1 | tr '\\n' ' '; echo; echo \"$K\"", .env = "K=a b'c\"$x");
    CHECK_STR(o.out, "HOME K LANG PATH PWD SHLVL TERM USER _ \na b'c\"$x\n");
    outcome_free(&o);
    const char *bad[] = { "1A=x", "A-B=x", "=x", "A", "A B=x" };
    for (int i = 0; i < 5; i++) {
        o = EXEC(g(), .text = "true", .env = bad[i]);
        CHECK_INT(o.status, 422);
        CHECK_STR(o.error, "invalid_argument");
        outcome_free(&o);
    }
}

TEST("commands start in the workspace, or where they are told; a missing place is an error")
{
    char want[200];
    snprintf(want, sizeof want, "%s\n", g()->work);
    check_exec("pwd", want, "completed", 0);
    outcome o = EXEC(g(), .text = "pwd", .cwd = "/usr");
    CHECK_STR(o.out, "/usr\n");
    outcome_free(&o);
    const char *bad[] = { "/no/such/place", "relative", "/etc/passwd" };
    for (int i = 0; i < 3; i++) {
        o = EXEC(g(), .text = "pwd", .cwd = bad[i]);
        CHECK_INT(o.status, 422);
        CHECK_STR(o.error, "invalid_cwd");
        outcome_free(&o);
    }
}

TEST("a command has descriptors 0, 1 and 2, default signals, a session of its own and no new privileges")
{
    check_exec("ls /proc/self/fd | tr '\\n' ' '", "0 1 2 3 ", "completed", 0); /* 3 is the directory that ls reads */
    check_exec("grep -E '^(SigBlk|SigIgn|NoNewPrivs)' /proc/self/status | sort | tr -d ' \\t\\n'",
               "NoNewPrivs:1SigBlk:0000000000000000SigIgn:0000000000000000", "completed", 0);
    check_exec("[ $(ps -o sid= -p $$) = $$ ] && echo own", "own\n", "completed", 0);
}

TEST("nothing inside can read the guest's memory or descriptors [B023]")
{
    if (geteuid() != 0)
        SKIP("needs root: it reads as another user");
    char text[300];
    snprintf(text, sizeof text,
             "setpriv --reuid 65534 --regid 65534 --clear-groups sh -c 'cat /proc/%d/environ; ls /proc/%d/fd; "
             "cat /proc/%d/mem' 2>&1 | grep -c -i denied",
             (int)g()->pid, (int)g()->pid, (int)g()->pid);
    check_exec(text, "3\n", "completed", 0);
}

TEST("bad frames are refused, and nothing is run")
{
    const struct {
        const char *bytes;
        size_t len;
        int status;
    } bad[] = {
        { "", 0, 422 },
        { "x\0\0\0\1a", 6, 422 },
        { "c\0\0\0\5ab", 7, 422 },
        { "c\377\377\377\377", 5, 413 },
        { "c\0\0\0\3a\0b", 8, 422 },
        { "c\0\0\0\4truet\0\0\0\1x", 15, 422 },
        { "c\0\0\0\4truet\0\0\0\2-1", 16, 422 },
        { "c\0\0\0\4truet\0\0\0\3nan", 17, 422 },
        { "c\0\0\0\4truem\0\0\0\2-1", 16, 422 },
        { "c\0\0\0\4truec\0\0\0\4true", 18, 422 },
        { "t\0\0\0\1"
          "50\0\0\0\0",
          11, 422 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        reply r = client_call(g(), "POST", "/v1/paddock/exec", NULL, bad[i].bytes, bad[i].len);
        if (!CHECK_INT(r.status, bad[i].status))
            fprintf(stderr, "  of case %zu: %s\n", i, r.body);
        reply_free(&r);
    }
}

TEST("a command at the process limit is refused as such, not as lack of memory [B112]")
{
    if (geteuid() != 0)
        SKIP("needs root: the limit counts the processes of a user who has no others");
    guest few = { 0 };
    /* RLIMIT_NPROC counts the processes of a user: one that has no others */
    REQUIRE(guest_launch(&few, "workspace=/tmp\n",
                         "exec setpriv --reuid 61236 --regid 61236 --clear-groups prlimit --nproc=12 \"$0\""));
    chmod(few.sock, 0777);
    outcome o = EXEC(&few, .text = "for i in 1 2 3 4 5 6 7 8 9; do sleep 300@12 & done", .limit = "10");
    outcome_free(&o);
    o = EXEC(&few, .text = "echo hi", .limit = "10");
    for (int i = 0; i < 5 && o.status == 200; i++) { /* the shell may have been refused some of the nine */
        outcome_free(&o);
        o = EXEC(&few, .text = "sleep 300@12 & sleep 300@12 &", .limit = "10");
        outcome_free(&o);
        o = EXEC(&few, .text = "echo hi", .limit = "10");
    }
    CHECK_INT(o.status, 503);
    CHECK_STR(o.error, "process_limit");
    outcome_free(&o);
    guest_end(&few);
    CHECK(gone("sleep 300@12"));
}

/* ---- sessions ---- */

static outcome in_session(const char *id, const char *text, const char *limit)
{
    return EXEC(g(), .text = text, .session = id, .limit = limit != NULL ? limit : "20");
}

static void session_open(const char *id)
{
    char path[100];
    snprintf(path, sizeof path, "/v1/paddock/sessions/%s", id);
    reply r = simple(g(), "POST", path);
    CHECK_INT(r.status, 200);
    reply_free(&r);
}

static void check_session(const char *id, const char *text, const char *out, const char *name, int code, bool reset)
{
    outcome o = in_session(id, text, NULL);
    CHECK_INT(o.status, 200);
    if (!CHECK_STR(o.name, name) || !CHECK_INT(o.exit_code, code) || !CHECK_INT(o.reset, reset))
        fprintf(stderr, "  of %s: %s%s\n", text, o.err, o.error ? o.error : "");
    if (out != NULL)
        CHECK_STR(o.out, out);
    outcome_free(&o);
}

TEST("a session keeps directory, variables and functions [B096]")
{
    outcome o = in_session("nobody", "true", NULL);
    CHECK_INT(o.status, 404);
    CHECK_STR(o.error, "no_session");
    outcome_free(&o);
    session_open("a");
    session_open("a");
    check_session("a", "cd /usr; export A=1; f() { echo \"f $1\"; }", "", "completed", 0, false);
    check_session("a", "pwd; echo $A; f x; sh -c 'echo $A'", "/usr\n1\nf x\n1\n", "completed", 0, false);
    check_session("a", "false", "", "completed", 1, false);
    check_session("a", "echo \"it's\"; echo 'a\nb' >&2; printf '%s' '-n'", "it's\n-n", "completed", 0, false);
    check_session("a", "-x", "", "completed", 127, false);
    check_session("a", "if then", NULL, "completed", 2, false);
    check_session("a", "cat; echo end", "end\n", "completed", 0, false);
    check_session("a", "ls /proc/self/fd | tr '\\n' ' '", "0 1 2 3 ", "completed", 0, false);
}

TEST("a session's command has input, a directory and variables of its own")
{
    session_open("in");
    outcome o = EXEC(g(), .text = "cat; echo \"$S\"; pwd", .session = "in", .in = "typed\n", .env = "S=it's secret",
                     .cwd = "/usr");
    CHECK_STR(o.out, "typed\nit's secret\n/usr\n");
    outcome_free(&o);
    check_session("in", "echo \"<$S>\"; cat", "<>\n", "completed", 0, false);
    size_t n = 1 << 20;
    char *data = malloc(n);
    memset(data, 'x', n);
    o = EXEC(g(), .text = "wc -c", .session = "in", .in = data, .in_len = n, .limit = "20");
    CHECK_INT(atoi(o.out), (int)n);
    outcome_free(&o);
    o = EXEC(g(), .text = "true", .session = "in", .in = data, .in_len = n, .limit = "20");
    CHECK_STR(o.name, "completed");
    outcome_free(&o);
    free(data);
    o = EXEC(g(), .text = "pwd", .session = "in", .cwd = "/no/such");
    CHECK_INT(o.status, 422);
    outcome_free(&o);
}

TEST("whatever ends a session's shell has its own status, and the next command works, with the loss said [B091, B094]")
{
    session_open("b");
    check_session("b", "X=1; exit 3", "", "completed", 3, false);
    check_session("b", "echo ok$X", "ok\n", "completed", 0, true);
    check_session("b", "exec true", "", "completed", 0, false);
    check_session("b", "echo ok", "ok\n", "completed", 0, true);
    check_session("b", "echo last; kill -9 $$", "last\n", "signalled", 137, false);
    check_session("b", "echo ok", "ok\n", "completed", 0, true);
    check_session("b", "set -e; false", "", "completed", 1, false);
    check_session("b", "echo ok", "ok\n", "completed", 0, true);
    check_session("b", "exec >&-", "", "completed", 0, false);
    check_session("b", "echo ok", "ok\n", "completed", 0, false);
    check_session("b", "exec 2>/dev/null; exit 0", "", "completed", 0, false);
    check_session("b", "echo ok", "ok\n", "completed", 0, true);
    check_session("b", "echo ok", "ok\n", "completed", 0, false);
}

TEST("a time limit ends a session's shell and all it started; the next command says the session was reset [B096]")
{
    session_open("c");
    check_session("c", "A=1; sleep 300@96 & setsid -f sleep 300@96", "", "completed", 0, false);
    outcome o = in_session("c", "echo begun; sleep 300@96", "0.3");
    CHECK_STR(o.name, "hard_timeout");
    CHECK_INT(o.exit_code, 124);
    CHECK_STR(o.out, "begun\n");
    outcome_free(&o);
    CHECK_INT(alive_with("sleep 300@96"), 0);
    check_session("c", "echo \"<$A>\"", "<>\n", "completed", 0, true);
    check_session("c", "echo again", "again\n", "completed", 0, false);
}

TEST("a background process of a session's earlier command does not write into a later one's output [B080]")
{
    session_open("d");
    check_session("d", "(for i in 1 2 3 4 5 6 7 8; do echo noise; sleep 0.05; done) & echo hi", NULL, "completed", 0, false);
    check_session("d", "sleep 0.2; echo clean", "clean\n", "completed", 0, false);
    outcome o = in_session("d", "sleep 600@83 & echo prompt", NULL);
    CHECK(o.took < 10);
    outcome_free(&o);
    check_session("d", "kill %% %1; wait", NULL, "completed", 0, false);
}

TEST("commands of one session run one after the other")
{
    session_open("e");
    for (int child = 0; child < 6; child++)
        if (fork() == 0) {
            outcome o = in_session("e", "n=$((n+1)); echo in$n >> seq; sleep 0.05; echo out$n >> seq", NULL);
            _exit(strcmp(o.name, "completed") != 0);
        }
    for (int i = 0; i < 6; i++) {
        int status;
        wait(&status);
        CHECK_INT(status, 0);
    }
    check_session("e", "tr '\\n' ' ' < seq", "in1 out1 in2 out2 in3 out3 in4 out4 in5 out5 in6 out6 ", "completed", 0,
                  false);
}

TEST("a deleted session is gone with its shell, and its name can be used again")
{
    session_open("f");
    check_session("f", "A=1; sleep 300@97 &", "", "completed", 0, false);
    reply r = simple(g(), "DELETE", "/v1/paddock/sessions/f");
    CHECK_INT(r.status, 200);
    reply_free(&r);
    CHECK(gone("sleep 300@97"));
    r = simple(g(), "DELETE", "/v1/paddock/sessions/f");
    CHECK_INT(r.status, 404);
    reply_free(&r);
    session_open("f");
    check_session("f", "echo \"<$A>\"", "<>\n", "completed", 0, false);
    session_open("s%201%2F%C3%A9"); /* any text will do */
    check_session("s 1/\xc3\xa9", "echo hi", "hi\n", "completed", 0, false);
    r = simple(g(), "DELETE", "/v1/paddock/sessions/s%201%2F%C3%A9");
    CHECK_INT(r.status, 200);
    reply_free(&r);
    const char *bad[] = { "", "a%0Ab", "a%FFb", "%00" };
    for (int i = 0; i < 4; i++) {
        char path[100];
        snprintf(path, sizeof path, "/v1/paddock/sessions/%s", bad[i]);
        r = simple(g(), "POST", path);
        CHECK(r.status == 422 || r.status == 400);
        reply_free(&r);
    }
}

TEST("in the end nothing is left: no command, no tree, no descriptor")
{
    const char *ids[] = { "a", "in", "b", "c", "d", "e", "f" };
    for (int i = 0; i < 7; i++) {
        char path[100];
        snprintf(path, sizeof path, "/v1/paddock/sessions/%s", ids[i]);
        reply r = simple(g(), "DELETE", path);
        reply_free(&r);
    }
    for (int i = 0; i < 200 && state_number(g(), "trees") > 0; i++)
        usleep(10000);
    CHECK_INT(state_number(g(), "trees"), 0);
    CHECK_INT(state_number(g(), "commands"), 0);
    char text[200];
    int n = -1;
    snprintf(text, sizeof text, "ls /proc/%d/fd | wc -l", (int)g()->pid);
    FILE *p = popen(text, "r");
    CHECK_INT(fscanf(p, "%d", &n), 1);
    pclose(p);
    if (!CHECK(n <= 14))
        fprintf(stderr, "  %d descriptors\n", n);
    guest_end(g());
}

TEST_MAIN
