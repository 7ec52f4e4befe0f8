/* test_guest_api.c -- what the guest enforces (token, fence, doom), when it ends by itself, its file calls, and how it takes
 * bad clients. Commands: test_guest.c. */
#include "guest_client.h"

static guest *g(void)
{
    return shared_guest(NULL);
}

static int status_of(const guest *to, const char *method, const char *path, const char *headers, const char *error)
{
    reply r = client_call(to, method, path, headers, "", 0);
    if (error != NULL)
        CHECK_HAS(r.body, error);
    int status = r.status;
    reply_free(&r);
    return status;
}

/* A request with exactly these bytes; the status, 0 when the connection ends without a reply. */
static int raw(const guest *to, const char *bytes, size_t len)
{
    int fd = client_connect(to);
    client_send(fd, bytes, len);
    reply r = client_read(fd);
    int status = r.status;
    reply_free(&r);
    close(fd);
    return status;
}
#define RAW(to, text) raw(to, text, sizeof(text) - 1)

static int fence(guest *to, uint64_t token)
{
    to->token = token;
    return status_of(to, "POST", "/v1/paddock/fence", NULL, NULL);
}

static int doom(guest *to, uint64_t expected, uint64_t token)
{
    char header[80];
    to->token = token;
    snprintf(header, sizeof header, "X-Paddock-Expected: %llu\r\n", (unsigned long long)expected);
    return status_of(to, "POST", "/v1/paddock/doom", header, NULL);
}

/* ---- tokens ---- */

TEST("every call but GET /v1/sandbox wants a token, written strictly")
{
    CHECK_INT(RAW(g(), "GET /v1/sandbox HTTP/1.1\r\n\r\n"), 200);
    CHECK_INT(RAW(g(), "POST /v1/paddock/fence HTTP/1.1\r\nContent-Length: 0\r\n\r\n"), 401);
    CHECK_INT(RAW(g(), "GET /v1/paddock/list?path=/ HTTP/1.1\r\n\r\n"), 401);
    CHECK_INT(RAW(g(), "POST /v1/shell/exec HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"), 401);
    const char *bad[] = {
        "", "-1", "+10", "0x10", "10 1", "ten", "1e3", "18446744073709551616", "99999999999999999999999", "10.0"
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[200];
        int n = snprintf(text, sizeof text, "GET /v1/paddock/list?path=/ HTTP/1.1\r\nX-Paddock-Token: %s\r\n\r\n", bad[i]);
        int status = raw(g(), text, (size_t)n);
        if (!CHECK_INT(status, 400))
            fprintf(stderr, "  of token \"%s\"\n", bad[i]);
    }
    guest other = *g();
    other.token = 9;
    CHECK_INT(status_of(&other, "GET", "/v1/paddock/list?path=/", NULL, "\"token\":\"10\""), 409);
    other.token = UINT64_MAX; /* larger ones pass, and only a fence makes them the limit */
    CHECK_INT(status_of(&other, "GET", "/v1/paddock/list?path=/", NULL, NULL), 200);
    other.token = 10;
    CHECK_INT(status_of(&other, "GET", "/v1/paddock/list?path=/", NULL, NULL), 200);
}

TEST("a fence ends the commands of smaller tokens, background ones too, before it answers")
{
    guest f = { 0 };
    REQUIRE(guest_launch(&f, NULL, NULL));
    guest old = f;
    outcome o = EXEC(&f, .text = "setsid sleep 300@41 & sleep 300@41 & echo hi");
    outcome_free(&o);
    status_of(&f, "POST", "/v1/paddock/sessions/s", NULL, NULL);
    o = EXEC(&f, .text = "A=1; sleep 300@41 &", .session = "s");
    outcome_free(&o);
    size_t len;
    command c = { .text = "echo begun; sleep 300@41", .limit = "100" };
    char *body = command_body(&c, &len);
    int fd = client_connect(&f);
    client_request(fd, &f, "POST", "/v1/paddock/exec", NULL, body, len);
    for (int i = 0; i < 200 && alive_with("sleep 300@41") < 4; i++)
        usleep(10000);
    CHECK_INT(fence(&f, 20), 200);
    CHECK_INT(alive_with("sleep 300@41"), 0);
    reply r = client_read(fd);
    o = outcome_of(&r, 0);
    CHECK_STR(o.name, "cancelled");
    CHECK_STR(o.error, "stale_token");
    CHECK_STR(o.out, "begun\n");
    outcome_free(&o);
    close(fd);
    free(body);
    CHECK_INT(fence(&f, 20), 200); /* again is fine */
    CHECK_INT(fence(&f, 19), 409);
    o = EXEC(&old, .text = "touch stale");
    CHECK_INT(o.status, 409);
    outcome_free(&o);
    f.token = 20;
    o = EXEC(&f, .text = "ls stale 2>/dev/null; echo \"<$A>\"", .session = "s");
    CHECK_STR(o.out, "<>\n");
    CHECK(o.reset);
    outcome_free(&o);
    CHECK_INT(fence(&f, UINT64_MAX), 200);
    CHECK_INT(status_of(&f, "GET", "/v1/paddock/list?path=/", NULL, NULL), 200);
    guest_end(&f);
}

TEST("a token that is overtaken while its body is on the way has no effect")
{
    guest f = { 0 };
    REQUIRE(guest_launch(&f, NULL, NULL));
    char head[300], path[200];
    int put = client_connect(&f), run = client_connect(&f);
    int n = snprintf(head, sizeof head,
                     "PUT /v1/paddock/file?path=%s/late HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: 4\r\n\r\nab",
                     f.work);
    client_send(put, head, (size_t)n);
    static const char command[] =
        "POST /v1/paddock/exec HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: 15\r\n\r\nc\0\0\0\12touch ";
    client_send(run, command, sizeof command - 1);
    usleep(50000);
    CHECK_INT(fence(&f, 11), 200);
    client_send(put, "cd", 2);
    client_send(run, "late", 4);
    reply a = client_read(put), b = client_read(run);
    CHECK_INT(a.status, 409);
    CHECK_INT(b.status, 409);
    CHECK_HAS(a.body, "stale_token");
    snprintf(path, sizeof path, "%s/late", f.work);
    CHECK(access(path, F_OK) != 0);
    DIR *d = opendir(f.work);
    int entries = 0;
    while (readdir(d) != NULL)
        entries++;
    closedir(d);
    CHECK_INT(entries, 2); /* no temporary file either */
    reply_free(&a);
    reply_free(&b);
    close(put);
    close(run);
    guest_end(&f);
}

TEST("doom wants the largest token, refuses everything afterwards, and can be repeated")
{
    guest f = { 0 };
    REQUIRE(guest_launch(&f, NULL, NULL));
    CHECK_INT(fence(&f, 15), 200);
    outcome o = EXEC(&f, .text = "setsid sleep 300@42 & echo hi");
    outcome_free(&o);
    CHECK_INT(doom(&f, 10, 16), 409);
    CHECK_INT(doom(&f, 16, 16), 409);
    CHECK_INT(doom(&f, 15, 14), 409);
    CHECK_INT(status_of(&f, "POST", "/v1/paddock/doom", "X-Paddock-Expected: x\r\n", NULL), 409); /* token 14 */
    f.token = 16;
    CHECK_INT(status_of(&f, "POST", "/v1/paddock/doom", "X-Paddock-Expected: x\r\n", "invalid_token"), 400);
    CHECK_INT(status_of(&f, "POST", "/v1/paddock/doom", NULL, "invalid_token"), 400);
    CHECK_INT(state_number(&f, "doomed"), 0);
    CHECK_INT(doom(&f, 15, 16), 200);
    CHECK_INT(doom(&f, 15, 16), 200);
    CHECK_INT(doom(&f, 15, 17), 409);
    CHECK_INT(state_number(&f, "doomed"), 1);
    CHECK_INT(state_number(&f, "token"), 15);
    CHECK(gone("sleep 300@42"));
    f.token = UINT64_MAX;
    CHECK_INT(status_of(&f, "GET", "/v1/paddock/list?path=/", NULL, "doomed"), 409);
    CHECK_INT(fence(&f, UINT64_MAX), 409);
    o = EXEC(&f, .text = "true");
    CHECK_INT(o.status, 409);
    outcome_free(&o);
    CHECK_INT(status_of(&f, "GET", "/v1/sandbox", NULL, "gen1"), 200);
    guest_end(&f);
}

/* ---- its end ---- */

TEST("it ends when its start pipe ends before the record is said to be durable")
{
    guest f = { 0 };
    int status;
    REQUIRE(guest_launch(&f, NULL, "head -c 1 <&6 >/dev/null; exec \"$0\"")); /* as if the 'g' had never come */
    CHECK(!guest_ended(&f, 0.2, &status));
    close(f.start_pipe);
    f.start_pipe = -1;
    CHECK(guest_ended(&f, 5, &status));
}

TEST("after that byte the start pipe may end")
{
    guest f = { 0 };
    REQUIRE(guest_launch(&f, NULL, NULL));
    CHECK_INT(state_number(&f, "token"), 10);
    close(f.start_pipe);
    f.start_pipe = -1;
    int status;
    CHECK(!guest_ended(&f, 0.2, &status));
    guest_end(&f);
}

TEST("it ends when its record is unlinked")
{
    guest f = { 0 };
    int status;
    REQUIRE(guest_launch(&f, NULL, NULL));
    CHECK_INT(state_number(&f, "token"), 10);
    unlink(f.record);
    CHECK(guest_ended(&f, 5, &status));
}

TEST("an orphan ends after its time, with its background processes")
{
    guest f = { 0 };
    int status;
    REQUIRE(guest_launch(&f, "orphan_ttl=1.5\n", NULL)); /* a loaded machine may take a second to get a contact through */
    outcome o = EXEC(&f, .text = "setsid sleep 300@43 & sleep 1.8; echo hi"); /* a running command stops the clock */
    CHECK_STR(o.out, "hi\n");
    outcome_free(&o);
    for (int i = 0; i < 4; i++) { /* contact winds it up */
        CHECK(!guest_ended(&f, 0.5, &status));
        CHECK_INT(status_of(&f, "GET", "/v1/sandbox", NULL, NULL), 200);
    }
    int fd = client_connect(&f);
    client_request(fd, &f, "GET", "/v1/sandbox", NULL, "", 0);
    reply r = client_read(fd);
    reply_free(&r);
    CHECK(!guest_ended(&f, 1.9, &status)); /* an open connection stops it too */
    close(fd);
    double since = test_now();
    while (test_now() < since + 1.1)
        state_number(&f, "token"); /* without a token it is no contact */
    CHECK(guest_ended(&f, 10, &status));
    CHECK(test_now() - since > 1.4 && test_now() - since < 5);
    CHECK(gone("sleep 300@43"));
}

TEST("settings that it does not know, or that are malformed, end the start")
{
    const char *bad[] = { "tokn=5\n",        "token=-5\n", "orphan_ttl=nan\n", "orphan_ttl=5x\n", "workspace=relative\n",
                          "mount=/a/../b\n", "env=1=2\n",  "max_output=1e3\n", "nonsense\n" };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        guest f = { 0 };
        int status = 0;
        REQUIRE(guest_launch(&f, bad[i], "exec \"$0\" 2>/dev/null"));
        if (!CHECK(guest_ended(&f, 5, &status)))
            guest_end(&f);
        CHECK_INT(WEXITSTATUS(status), 70);
        close(f.start_pipe);
    }
}

/* ---- files ---- */

static char *url(const char *route, const char *path, const char *more)
{
    static char text[4][5000];
    static int turn;
    char *to = text[turn = (turn + 1) % 4];
    int n = snprintf(to, 5000, "/v1/paddock/%s?path=", route);
    for (const char *p = path; *p != '\0'; p++)
        n += sprintf(to + n, *p == '/' || (*p >= 'a' && *p <= 'z') ? "%c" : "%%%02X", (unsigned char)*p);
    strcpy(to + n, more);
    return to;
}

static int put(const char *path, const char *more, const void *data, size_t len, const char *error)
{
    reply r = client_call(g(), "PUT", url("file", path, more), NULL, data, len);
    if (error != NULL)
        CHECK_HAS(r.body, error);
    int status = r.status;
    reply_free(&r);
    return status;
}

static char *in_work(const char *name)
{
    static char text[8][5000];
    static int turn;
    char *to = text[turn = (turn + 1) % 8];
    snprintf(to, 5000, "%s/%s", g()->work, name);
    return to;
}

static void check_content(const char *path, const void *want, size_t len)
{
    reply r = client_call(g(), "GET", url("file", path, ""), NULL, "", 0);
    CHECK_INT(r.status, 200);
    CHECK_MEM(r.body, r.len, want, len);
    reply_free(&r);
}

static int entries(const char *dir)
{
    int n = -2;
    DIR *d = opendir(dir);
    while (d != NULL && readdir(d) != NULL)
        n++;
    if (d != NULL)
        closedir(d);
    return n;
}

TEST("files go in and come out byte for byte, readable and writable for commands [B019]")
{
    struct stat st;
    size_t n = 5 << 20;
    char *data = malloc(n);
    for (size_t i = 0; i < n; i++)
        data[i] = (char)(i * 31 + i / 4093);
    CHECK_INT(put(in_work("a b+%\xc3\xa9.bin"), "", data, n, NULL), 200);
    check_content(in_work("a b+%\xc3\xa9.bin"), data, n);
    CHECK_INT(put(in_work("empty"), "", "", 0, NULL), 200);
    check_content(in_work("empty"), "", 0);
    stat(in_work("empty"), &st);
    CHECK_INT(st.st_mode & 07777, 0644);
    chmod(in_work("empty"), 0750);
    CHECK_INT(put(in_work("empty"), "", "new", 3, NULL), 200);
    stat(in_work("empty"), &st);
    CHECK_INT(st.st_mode & 07777, 0750); /* a replaced file keeps its mode */
    outcome o = EXEC(g(), .text = "cat empty; echo x >> empty; mv empty moved; cat moved");
    CHECK_STR(o.out, "newnewx\n");
    outcome_free(&o);
    free(data);
    reply r = simple(g(), "GET", url("file", "/proc/self/status", "")); /* size 0 by stat */
    CHECK_INT(r.status, 200);
    CHECK_HAS(r.body, "NoNewPrivs");
    reply_free(&r);
}

TEST("what cannot be written or read is refused with its reason")
{
    mkdir(in_work("dir"), 0755);
    mkfifo(in_work("fifo"), 0644);
    CHECK_INT(put(in_work("dir"), "", "x", 1, "is_directory"), 409);
    CHECK_INT(put(in_work("fifo"), "", "x", 1, "not_a_file"), 409);
    CHECK_INT(put("/dev/null", "", "x", 1, "not_a_file"), 409);
    CHECK_INT(put(in_work("no/such/parent"), "", "x", 1, "not_found"), 404);
    CHECK_INT(put(in_work("moved/x"), "", "x", 1, "not_a_directory"), 409);
    CHECK_INT(put(in_work("dir/"), "", "x", 1, "invalid_path"), 400);
    CHECK_INT(put(in_work("dir/.."), "", "x", 1, "invalid_path"), 400);
    CHECK_INT(put("relative", "", "x", 1, "invalid_path"), 400);
    const struct {
        const char *path, *error;
        int status;
    } bad[] = {
        { in_work("dir"), "is_directory", 409 }, { in_work("fifo"), "not_a_file", 409 }, { "/dev/tty", "not_a_file", 409 },
        { in_work("none"), "not_found", 404 },   { "/dev/zero", "not_a_file", 409 },
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        CHECK_INT(status_of(g(), "GET", url("file", bad[i].path, ""), NULL, bad[i].error), bad[i].status);
    CHECK_INT(status_of(g(), "GET", "/v1/paddock/file?path=/a%00b", NULL, NULL), 400);
    CHECK_INT(status_of(g(), "GET", "/v1/paddock/file?path=%2", NULL, NULL), 400);
    CHECK_INT(status_of(g(), "GET", "/v1/paddock/file", NULL, "invalid_path"), 400);
    char longest[4990];
    memset(longest, 'a', sizeof longest - 1);
    longest[0] = '/';
    longest[sizeof longest - 600] = '\0';
    CHECK_INT(put(longest, "", "x", 1, "invalid_path"), 400);
    CHECK_INT(status_of(g(), "GET", url("list", in_work("moved"), ""), NULL, "not_a_directory"), 409);
    CHECK_INT(status_of(g(), "GET", url("list", in_work("none"), ""), NULL, "not_found"), 404);
}

TEST("a link that leads out of its mount is refused by read, write and list, wherever it stands [B012, B023]")
{
    char outside[200], file[300];
    snprintf(outside, sizeof outside, "%s/outside", g()->dir);
    snprintf(file, sizeof file, "%s/secret", outside);
    mkdir(outside, 0777);
    close(open(file, O_CREAT | O_WRONLY, 0666));
    CHECK(symlink(outside, in_work("out")) == 0);
    CHECK(symlink("../outside", in_work("out2")) == 0);
    CHECK(symlink(file, in_work("last")) == 0);
    CHECK(symlink("last", in_work("first")) == 0);
    CHECK(symlink("/proc/self/root", in_work("magic")) == 0);
    const char *paths[] = { "out/secret",      "out2/secret",       "last",
                            "first",           "../outside/secret", "dir/../../outside/secret",
                            "magic/etc/passwd" };
    for (int i = 0; i < 7; i++) {
        CHECK_INT(status_of(g(), "GET", url("file", in_work(paths[i]), ""), NULL, "escapes"), 403);
        CHECK_INT(put(in_work(paths[i]), "", "x", 1, "escapes"), 403);
    }
    CHECK_INT(put(in_work("out/new"), "", "x", 1, "escapes"), 403);
    const char *dirs[] = { "out", "out2", "out/.", "..", "magic" };
    for (int i = 0; i < 5; i++)
        CHECK_INT(status_of(g(), "GET", url("list", in_work(dirs[i]), ""), NULL, "escapes"), 403);
    CHECK_INT(entries(outside), 1);
    struct stat st;
    stat(file, &st);
    CHECK_INT(st.st_size, 0);
}

TEST("a link that stays inside is followed, and stays a link [B019]")
{
    struct stat st;
    CHECK(symlink("dir/target", in_work("inside")) == 0);
    CHECK_INT(put(in_work("inside"), "", "one", 3, NULL), 200); /* a dangling one, too: the target appears */
    check_content(in_work("dir/target"), "one", 3);
    check_content(in_work("dir/../inside"), "one", 3);
    lstat(in_work("inside"), &st);
    CHECK(S_ISLNK(st.st_mode));
    CHECK(symlink("loop", in_work("loop")) == 0);
    CHECK_INT(put(in_work("loop"), "", "x", 1, "escapes"), 403);
}

TEST("of several uploads that must not overwrite exactly one succeeds, and its content stays [B021]")
{
    for (int round = 0; round < 10; round++) {
        char name[20];
        snprintf(name, sizeof name, "once%d", round);
        for (int child = 0; child < 4; child++)
            if (fork() == 0) {
                char text[20];
                memset(text, 'a' + child, sizeof text);
                int status = put(in_work(name), "&no_overwrite=1", text, sizeof text, NULL);
                _exit(status == 200 ? 1 : status == 409 ? 2 : 3);
            }
        int won = 0, lost = 0;
        for (int i = 0; i < 4; i++) {
            int status;
            wait(&status);
            won += WEXITSTATUS(status) == 1;
            lost += WEXITSTATUS(status) == 2;
        }
        CHECK_INT(won, 1);
        CHECK_INT(lost, 3);
    }
    CHECK_INT(put(in_work("once0"), "&no_overwrite=1", "x", 1, "already_exists"), 409);
}

TEST("a full disk is named, and nothing of the upload stays [B197]")
{
    if (access("/dev/full", W_OK) != 0 || geteuid() != 0)
        SKIP("needs root for a small tmpfs");
    mkdir(in_work("small"), 0755);
    char text[300];
    snprintf(text, sizeof text, "mount -t tmpfs -o size=64k none %s 2>/dev/null", in_work("small"));
    if (system(text) != 0)
        SKIP("cannot mount a tmpfs here");
    char *data = calloc(1, 1 << 20);
    CHECK_INT(put(in_work("small/f"), "", data, 1 << 20, "no_space"), 507);
    CHECK_INT(entries(in_work("small")), 0);
    CHECK_INT(put(in_work("small/f"), "", data, 1000, NULL), 200);
    snprintf(text, sizeof text, "umount %s", in_work("small"));
    CHECK_INT(system(text), 0);
    free(data);
}

TEST("an upload that breaks off leaves nothing, and one of any other size than said is no file")
{
    mkdir(in_work("half"), 0755);
    char head[300];
    int fd = client_connect(g());
    int n = snprintf(head, sizeof head, "PUT %s HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: 1000\r\n\r\nhalf",
                     url("file", in_work("half/f"), ""));
    client_send(fd, head, (size_t)n);
    for (int i = 0; i < 100 && entries(in_work("half")) == 0; i++)
        usleep(5000);
    CHECK_INT(entries(in_work("half")), 1);
    close(fd);
    for (int i = 0; i < 100 && entries(in_work("half")) > 0; i++)
        usleep(5000);
    CHECK_INT(entries(in_work("half")), 0);
    n = snprintf(head, sizeof head, "PUT %s HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: 300000000\r\n\r\n",
                 url("file", in_work("half/f"), ""));
    CHECK_INT(raw(g(), head, (size_t)n), 413);
    CHECK_INT(entries(in_work("half")), 0);
}

TEST("a list names kind, size, mode and time of each entry, links as links")
{
    reply r = simple(g(), "GET", url("list", in_work("dir"), ""));
    json_t *j = json_loads(r.body, 0, NULL), *files = json_object_get(j, "files");
    CHECK_INT(json_array_size(files), 1);
    json_t *e = json_array_get(files, 0);
    CHECK_STR(json_string_value(json_object_get(e, "name")), "target");
    CHECK_STR(json_string_value(json_object_get(e, "path")), in_work("dir/target"));
    CHECK_INT(json_integer_value(json_object_get(e, "size")), 3);
    CHECK_STR(json_string_value(json_object_get(e, "mode")), "0644");
    CHECK(json_is_false(json_object_get(e, "is_directory")) && json_is_false(json_object_get(e, "is_link")));
    CHECK(json_number_value(json_object_get(e, "modified_time")) > 1e9);
    json_decref(j);
    reply_free(&r);
    close(open(in_work("dir/b\xff"
                       "d\n"),
               O_CREAT | O_WRONLY, 0644)); /* no UTF-8: still listed, and still reachable */
    r = simple(g(), "GET", url("list", in_work("dir"), ""));
    CHECK_INT(r.status, 200);
    CHECK_HAS(r.body, "b%FFd%0A");
    reply_free(&r);
    check_content(in_work("dir/b\xff"
                          "d\n"),
                  "", 0);
}

/* ---- bad clients ---- */

TEST("garbage, oversized heads and unknown routes are answered, and the guest goes on")
{
    CHECK_INT(RAW(g(), "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 rubbish\r\n\r\n"), 400);
    CHECK_INT(RAW(g(), "GET nowhere HTTP/1.1\r\n\r\n"), 400);
    CHECK_INT(RAW(g(), "GET /%zz HTTP/1.1\r\n\r\n"), 400);
    CHECK_INT(RAW(g(), "GET / HTTP/9.9.9\r\n\r\n"), 400);
    CHECK_INT(RAW(g(), "POST /v1/paddock/exec HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: -5\r\n\r\n"), 400);
    CHECK_INT(RAW(g(), "POST /v1/paddock/exec HTTP/1.1\r\nX-Paddock-Token: 10\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"),
              400);
    CHECK_INT(RAW(g(), "POST /v1/paddock/exec HTTP/1.1\r\nX-Paddock-Token: 10\r\nContent-Length: 1\r\nTransfer-Encoding: "
                       "chunked\r\n\r\n"),
              400);
    size_t n = 200000;
    char *big = malloc(n);
    memset(big, 'a', n);
    memcpy(big, "GET /", 5);
    int status = raw(g(), big, n);
    CHECK(status == 431 || status == 400);
    memcpy(big, "GET / HTTP/1.1\r\nX: ", 19);
    CHECK_INT(raw(g(), big, n), 431);
    size_t at = (size_t)sprintf(big, "GET / HTTP/1.1\r\n");
    for (int i = 0; i < 200; i++)
        at += (size_t)sprintf(big + at, "H%d: v\r\n", i);
    CHECK_INT(raw(g(), big, at), 431);
    free(big);
    CHECK_INT(status_of(g(), "GET", "/v1/paddock/nothing", NULL, "no_route"), 404);
    CHECK_INT(status_of(g(), "PATCH", "/v1/paddock/file?path=/x", NULL, "no_method"), 405);
    CHECK_INT(status_of(g(), "GET", "/v1/paddock/exec", NULL, "no_method"), 405);
    CHECK_INT(status_of(g(), "GET", "/v1/sandbox", "Connection: Upgrade\r\nUpgrade: websocket\r\n", NULL), 200);
    CHECK_INT(state_number(g(), "token"), 10);
}

TEST("requests may come in one piece or byte by byte, one behind the other, with and without chunks")
{
    int fd = client_connect(g());
    static const char two[] = "GET /v1/paddock/list?path=/proc/self/task HTTP/1.1\r\nX-Paddock-Token: 10\r\n\r\n"
                              "GET /v1/nothing HTTP/1.1\r\nX-Paddock-Token: 9\r\n\r\n";
    static const char chunked[] =
        "POST /v1/paddock/exec HTTP/1.1\r\nX-Paddock-Token: 10\r\nTransfer-Encoding: chunked\r\n\r\n"
        "5\r\nc\0\0\0\3\r\n3\r\ncat\r\n6\r\n0\0\0\0\0h\r\n2\r\ni\n\r\n0\r\nTrailer: x\r\n\r\n";
    for (size_t i = 0; i < sizeof chunked - 1; i++)
        client_send(fd, chunked + i, 1);
    reply r = client_read(fd);
    outcome o = outcome_of(&r, 0);
    CHECK_STR(o.out, "hi\n");
    outcome_free(&o);
    client_request(fd, g(), "GET", "/v1/sandbox", NULL, "", 0);
    r = client_read(fd);
    CHECK_INT(r.status, 200);
    CHECK(r.keep);
    reply_free(&r);
    client_send(fd, two, sizeof two - 1);
    char buf[65536];
    size_t n = 0;
    for (ssize_t got = 1; got > 0 && n < sizeof buf - 1; n += (size_t)(got > 0 ? got : 0)) {
        buf[n] = '\0';
        if (strstr(buf, "stale_token") != NULL)
            break;
        got = recv(fd, buf + n, sizeof buf - 1 - n, 0);
    }
    CHECK_HAS(buf, "HTTP/1.1 200 OK");
    CHECK_HAS(buf, "HTTP/1.1 409 Conflict");
    close(fd);
    fd = client_connect(g());
    client_request(fd, g(), "POST", "/v1/paddock/exec", "Expect: 100-continue\r\n", "c\0\0\0\4true", 9);
    recv(fd, buf, 25, MSG_WAITALL);
    CHECK_MEM(buf, 25, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    r = client_read(fd);
    CHECK_INT(r.status, 200);
    reply_free(&r);
    close(fd);
}

TEST("half a request, sent by many, holds nobody up, and the oldest make room")
{
    guest f = { 0 };
    int fds[60];
    REQUIRE(guest_launch(&f, "max_connections=20\n", NULL));
    for (int i = 0; i < 60; i++) {
        fds[i] = client_connect(&f);
        client_send(fds[i], "POST /v1/paddock/exec HT", 24);
    }
    outcome o = EXEC(&f, .text = "echo hi");
    CHECK_STR(o.out, "hi\n");
    CHECK(o.took < 5);
    outcome_free(&o);
    for (int i = 0; i < 60; i++)
        close(fds[i]);
    o = EXEC(&f, .text = "echo hi");
    CHECK_STR(o.out, "hi\n");
    outcome_free(&o);
    guest_end(&f);
}

TEST("random bytes in any shape never end the guest")
{
    unsigned seed = 7;
    static const char *const parts[] = { "GET ",
                                         "POST ",
                                         "PUT ",
                                         "/v1/paddock/exec",
                                         "/v1/paddock/file?path=/tmp/x",
                                         " HTTP/1.1\r\n",
                                         "Content-Length: 5\r\n",
                                         "Transfer-Encoding: chunked\r\n",
                                         "\r\n",
                                         "X-Paddock-Token: 10\r\n",
                                         "c\0\0\0\4",
                                         "0\0\0\0\0",
                                         "true",
                                         "%",
                                         "\xff\xfe",
                                         "5\r\n",
                                         "Expect: 100-continue\r\n" };
    for (int i = 0; i < 400; i++) {
        int fd = client_connect(g());
        REQUIRE(fd >= 0);
        for (int k = 0; k < 12; k++) {
            const char *part = parts[rand_r(&seed) % (sizeof parts / sizeof parts[0])];
            size_t len = part[0] == 'c' || part[0] == '0' ? 5 : strlen(part);
            if (!client_send(fd, part, len))
                break;
        }
        char buf[512];
        if (i % 3 == 0)
            recv(fd, buf, sizeof buf, MSG_DONTWAIT);
        close(fd);
    }
    CHECK_INT(state_number(g(), "token"), 10);
    outcome o = EXEC(g(), .text = "echo hi");
    CHECK_STR(o.out, "hi\n");
    outcome_free(&o);
    guest_end(g());
}

/* ---- as pid 1 of namespaces ---- */

TEST("as pid 1 in bubblewrap it reaps, kills, keeps its pipes' folder clean, and cannot be ended from inside [B110, B197]")
{
    if (system("bwrap --unshare-all --as-pid-1 --ro-bind / / --proc /proc --dev /dev true 2>/dev/null") != 0)
        SKIP("bwrap cannot make namespaces here");
    guest f = { .namespaced = true };
    REQUIRE(guest_launch(&f, NULL, NULL));
    outcome o = EXEC(&f, .text = "kill -TERM 1; kill -INT 1; kill -KILL 1; kill -STOP 1; sleep 0.1; cat /proc/1/comm; "
                                 "cat /proc/1/environ 2>&1 | grep -c -i denied; readlink /proc/1/fd/4 || echo hidden");
    CHECK_STR(o.out, "guest\n1\nhidden\n");
    outcome_free(&o);
    o = EXEC(&f, .text = "for i in 1 2 3 4 5 6 7 8; do (setsid sleep 0.02 &); done; (setsid -f sleep 300); sleep 300",
             .limit = "0.3");
    CHECK_STR(o.name, "hard_timeout");
    outcome_free(&o);
    o = EXEC(&f, .text = "kill -9 -1; sleep 15", .limit = "20"); /* its own keeper, and everybody's */
    CHECK(o.took < 10);
    outcome_free(&o);
    status_of(&f, "POST", "/v1/paddock/sessions/s", NULL, NULL);
    o = EXEC(&f, .text = "rm -rf /tmp/.paddock-*", .session = "s");
    CHECK_INT(o.exit_code, 0);
    outcome_free(&o);
    o = EXEC(&f, .text = "echo ok; cd /; exit 4", .session = "s"); /* it finds a new place for its pipes */
    CHECK_STR(o.out, "ok\n");
    CHECK_INT(o.exit_code, 4);
    outcome_free(&o);
    usleep(100000);
    o = EXEC(&f, .text = "ls -A /tmp; echo /proc/[0-9]* | wc -w"); /* guest, keeper, shell; wc and echo's are forks of it */
    CHECK_HAS(o.out, "guest\nwork\n");
    CHECK(strstr(o.out, ".paddock") == NULL && atoi(o.out + strlen("guest\nwork\n")) <= 5);
    outcome_free(&o);
    CHECK_INT(doom(&f, 10, 11), 200);
    guest_end(&f); /* its record is unlinked: it ends, and with it everything inside */
    REQUIRE(guest_launch(&f, NULL, NULL));
    o = EXEC(&f, .text = "setsid sleep 300@44 & echo hi");
    outcome_free(&o);
    char text[100];
    int pid = 0, status;
    snprintf(text, sizeof text, "pgrep -P %d", (int)f.pid);
    FILE *p = popen(text, "r");
    CHECK_INT(fscanf(p, "%d", &pid), 1);
    pclose(p);
    CHECK_INT(kill(pid, SIGTERM), 0); /* from outside it may */
    CHECK(guest_ended(&f, 5, &status));
    CHECK(gone("sleep 300@44"));
    guest_end(&f);
}

static bool put_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return ok;
}

TEST("a kill for memory is told apart from other kills, by the kernel's count [B098]")
{
    char group[100], path[200];
    snprintf(group, sizeof group, "/sys/fs/cgroup/memory/pdk-test-%d", (int)getpid());
    if (mkdir(group, 0755) != 0)
        SKIP("no cgroup v1 memory controller to write to");
    snprintf(path, sizeof path, "%s/memory.limit_in_bytes", group);
    bool limited = put_text(path, "40000000");
    snprintf(path, sizeof path, "%s/memory.memsw.limit_in_bytes", group);
    put_text(path, "40000000");
    guest f = { 0 };
    snprintf(path, sizeof path, "echo $$ > %s/cgroup.procs && exec \"$0\" 9< %s/memory.oom_control", group, group);
    if (limited && CHECK(guest_launch(&f, "memory_events_fd=9\n", path))) {
        outcome o = EXEC(&f, .text = "head -c 300000000 /dev/zero | tail", .limit = "60");
        CHECK_STR(o.name, "oom");
        CHECK_INT(o.exit_code, 137);
        outcome_free(&o);
        CHECK(state_number(&f, "oom_kills") >= 1);
        o = EXEC(&f, .text = "kill -9 $$", .limit = "60");
        CHECK_STR(o.name, "signalled");
        CHECK_INT(o.exit_code, 137);
        outcome_free(&o);
        guest_end(&f);
    }
    rmdir(group);
    if (!limited)
        SKIP("the memory controller takes no limit here");
}

TEST_MAIN
