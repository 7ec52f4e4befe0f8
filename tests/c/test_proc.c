/* proc.c and seccomp.c: children that the host does not notice, bounded runs, locks, the filter. */
#include "../../core/fd.h"
#include "../../core/proc.h"
#include "../../core/procio.h"
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static pdk_spawn shell(const char *const *argv)
{
    return (pdk_spawn){ .argv = argv };
}
#define SH(text) ((const char *const[]){ "/bin/sh", "-c", (text), NULL })

static int run_text(const char *const *argv, const char *in, double seconds, pdk_run_result *r, pdk_error *err)
{
    pdk_spawn spec = shell(argv);
    return pdk_run(&spec, in, in != NULL ? strlen(in) : 0, 1 << 20, seconds, r, err);
}

TEST("a run gives back both outputs, the status, and takes input")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_run_result r;
    int before = test_fds();
    REQUIRE(run_text(SH("cat; echo oops >&2; exit 3"), "hello", 10, &r, &err) == 0);
    CHECK_STR(r.out, "hello");
    CHECK_STR(r.err, "oops\n");
    CHECK(WIFEXITED(r.status));
    CHECK_INT(WEXITSTATUS(r.status), 3);
    CHECK(!r.truncated);
    pdk_run_result_free(&r);
    CHECK_INT(test_fds(), before);
}

TEST("a child gets exactly the descriptors that are named, whatever the host has open")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_FD leak = open("/dev/null", O_RDONLY); /* not close-on-exec, as a careless host's */
    PDK_AUTO_FD high = fcntl(leak, F_DUPFD, 300);
    PDK_AUTO_FD mem = memfd_create("x", 0);
    REQUIRE(leak >= 0 && high >= 0 && mem >= 0);
    char text[200]; /* the shell looks into the folder with a descriptor of its own, so each is asked for */
    snprintf(text, sizeof text, "for n in 0 1 2 %d 9 300; do test -e /proc/$$/fd/$n && echo $n; done; true", leak == 9 ? 10 : leak);
    pdk_fd_map fds[] = { { mem, 9 } };
    pdk_spawn spec = { .argv = SH(text), .fds = fds, .fd_count = 1 };
    pdk_run_result r;
    REQUIRE(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err) == 0);
    CHECK_STR(r.out, "0\n1\n2\n9\n");
    pdk_run_result_free(&r);
}

TEST("two descriptors can be swapped on their way into a child")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_FD a = memfd_create("a", MFD_CLOEXEC), b = memfd_create("b", MFD_CLOEXEC);
    REQUIRE(write(a, "A", 1) == 1 && write(b, "B", 1) == 1);
    pdk_fd_map fds[] = { { a, b }, { b, a } };
    char text[200];
    snprintf(text, sizeof text, "cat /proc/self/fd/%d /proc/self/fd/%d", a, b);
    pdk_spawn spec = { .argv = SH(text), .fds = fds, .fd_count = 2 };
    pdk_run_result r;
    REQUIRE(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err) == 0);
    CHECK_STR(r.out, "BA");
    pdk_run_result_free(&r);
}

TEST("a descriptor that is mapped twice is refused before anything starts")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_fd_map fds[] = { { 0, 5 }, { 1, 5 } };
    pdk_spawn spec = { .argv = SH("true"), .fds = fds, .fd_count = 2 };
    pdk_child c;
    CHECK_INT(pdk_spawn_start(&spec, &c, &err), -1);
    CHECK_KIND(err, PDK_E_INVALID_ARGUMENT);
}

TEST("a program that cannot be executed is an error of the start, and leaves nothing")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int before = test_fds();
    const char *const argv[] = { "/no/such/program", NULL };
    pdk_spawn spec = shell(argv);
    pdk_child c;
    CHECK_INT(pdk_spawn_start(&spec, &c, &err), -1);
    CHECK_KIND(err, PDK_E_IO_ERROR);
    CHECK_INT(err.sys, ENOENT);
    CHECK_HAS(err.message, "/no/such/program");
    CHECK_INT(test_fds(), before);
    CHECK_INT(waitpid(-1, NULL, WNOHANG | __WALL), -1);
}

static volatile sig_atomic_t children_seen;
static void on_child(int sig)
{
    (void)sig;
    children_seen++;
}

TEST("the host's own wait and SIGCHLD see nothing of a child")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    children_seen = 0;
    signal(SIGCHLD, on_child);
    pdk_spawn spec = shell(SH("exit 7"));
    pdk_child c;
    REQUIRE(pdk_spawn_start(&spec, &c, &err) == 0);
    struct pollfd p = { .fd = c.pidfd, .events = POLLIN };
    CHECK_INT(poll(&p, 1, 5000), 1);
    CHECK_INT(waitpid(-1, NULL, WNOHANG), -1);
    CHECK_INT(pdk_child_wait(&c, 5, &err), 1);
    pdk_run_result r;
    REQUIRE(run_text(SH("exit 7"), NULL, 10, &r, &err) == 0);
    CHECK_INT(WEXITSTATUS(r.status), 7);
    pdk_run_result_free(&r);
    CHECK_INT(waitpid(-1, NULL, WNOHANG | __WALL), -1);
    CHECK_INT(children_seen, 0);
    signal(SIGCHLD, SIG_DFL);
    pdk_child_close(&c);
}

/* Whether the process has ended and, if init has not come round to it yet, is no child of ours. */
static bool ended_elsewhere(pid_t pid)
{
    char path[40], text[200] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *f = fopen(path, "r");
    if (f == NULL) return true;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    int parent = 0;
    char state = 0, *at = n > 0 ? strrchr(text, ')') : NULL;
    return at != NULL && sscanf(at + 1, " %c %d", &state, &parent) == 2 && state == 'Z' && parent != getpid();
}

TEST("a child that is closed while it runs goes on, and leaves this process no zombie when it ends")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int before = test_fds();
    pdk_spawn spec = shell(SH("sleep 0.1"));
    pdk_child c;
    REQUIRE(pdk_spawn_start(&spec, &c, &err) == 0);
    pid_t pid = c.pid;
    pdk_child_close(&c);
    CHECK_INT(kill(pid, 0), 0);
    for (int i = 0; i < 100 && !ended_elsewhere(pid); i++) usleep(20 * 1000);
    CHECK(ended_elsewhere(pid));
    CHECK_INT(test_fds(), before);
}

TEST("a child starts with an empty environment, no blocked signals and default dispositions, in a session of its own")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    sigset_t set, old;
    sigfillset(&set);
    pthread_sigmask(SIG_BLOCK, &set, &old);
    signal(SIGUSR1, SIG_IGN);
    setenv("PDK_CANARY", "1", 1);
    pdk_run_result r;
    const char *const argv[] = { "/bin/cat", "/proc/self/status", "/proc/self/environ", NULL };
    REQUIRE(run_text(argv, NULL, 10, &r, &err) == 0);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    signal(SIGUSR1, SIG_DFL);
    CHECK_HAS(r.out, "SigBlk:\t0000000000000000");
    CHECK_HAS(r.out, "SigIgn:\t0000000000000000");
    CHECK(strstr(r.out, "PDK_CANARY") == NULL);
    pdk_run_result_free(&r);
    REQUIRE(run_text(SH("test $(ps -o sid= -p $$) = $$ && echo own"), NULL, 10, &r, &err) == 0);
    CHECK_STR(r.out, "own\n");
    pdk_run_result_free(&r);
    unsetenv("PDK_CANARY");
}

TEST("output beyond the bound is dropped and said, and the child still ends")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_spawn spec = shell(SH("head -c 3000000 /dev/zero; exit 0"));
    pdk_run_result r;
    REQUIRE(pdk_run(&spec, NULL, 0, 1000, 20, &r, &err) == 0);
    CHECK_INT(r.out_len, 1000);
    CHECK(r.truncated);
    CHECK_INT(WEXITSTATUS(r.status), 0);
    pdk_run_result_free(&r);
}

TEST("a run that exceeds its limit is killed and answers timeout")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int before = test_fds();
    pdk_run_result r;
    double start = test_now();
    char text[400];
    snprintf(text, sizeof text, "sleep 30 & echo $! > %s/pid; wait", test_tmpdir());
    CHECK_INT(run_text(SH(text), NULL, 0.3, &r, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    snprintf(text, sizeof text, "%s/pid", test_tmpdir());
    FILE *f = fopen(text, "r");
    int left = 0;
    CHECK(f != NULL && fscanf(f, "%d", &left) == 1);
    if (f != NULL) fclose(f);
    for (int i = 0; i < 100 && !ended_elsewhere(left); i++) usleep(20 * 1000);
    CHECK(ended_elsewhere(left)); /* what it had started went with it */
    CHECK(test_now() - start < 5);
    CHECK_INT(test_fds(), before);
}

TEST("the thread's limit ends a wait: by its deadline, and by its cancel flag")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_run_result r;
    pdk_limit limit = { .deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(0.1)) };
    const pdk_limit *former = pdk_limit_enter(&limit);
    CHECK_INT(run_text(SH("sleep 30"), NULL, 30, &r, &err), -1);
    CHECK_KIND(err, PDK_E_TIMEOUT);
    pdk_error_clear(&err);
    atomic_bool cancelled = true;
    limit = (pdk_limit){ .deadline = PDK_NEVER, .cancelled = &cancelled };
    CHECK_INT(run_text(SH("sleep 30"), NULL, 30, &r, &err), -1);
    CHECK_KIND(err, PDK_E_CANCELLED);
    pdk_limit_enter(former);
}

TEST("a child that reads none of its input is no error, and the host gets no SIGPIPE")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char *big = calloc(1, 1 << 20);
    REQUIRE(big != NULL);
    memset(big, 'x', (1 << 20) - 1);
    pdk_run_result r;
    CHECK_INT(run_text(SH("exec 0<&-; sleep 0.1; exit 4"), big, 10, &r, &err), 0);
    CHECK_INT(WEXITSTATUS(r.status), 4);
    pdk_run_result_free(&r);
    free(big);
}

TEST("something that a child leaves behind does not hold a run up")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_run_result r;
    double start = test_now();
    REQUIRE(run_text(SH("sleep 20 & echo done"), NULL, 10, &r, &err) == 0);
    CHECK_STR(r.out, "done\n");
    CHECK(test_now() - start < 10);
    pdk_run_result_free(&r);
}

TEST("resource limits are set before the program starts")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_rlimit_set limits = { 1, { { RLIMIT_NOFILE, 17, 17 } } };
    pdk_spawn spec = { .argv = SH("ulimit -n"), .limits = &limits };
    pdk_run_result r;
    REQUIRE(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err) == 0);
    CHECK_STR(r.out, "17\n");
    pdk_run_result_free(&r);
}

TEST("dropping ids changes the child alone: the host keeps its uid and its core dumps")
{
    if (geteuid() != 0) SKIP("needs root");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int dumpable = prctl(PR_GET_DUMPABLE);
    pdk_spawn spec = { .argv = SH("id -u; id -g; id -G"), .drop_ids = true, .uid = 0x40000001, .gid = 0x40000002 };
    pdk_run_result r;
    REQUIRE(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err) == 0);
    CHECK_STR(r.out, "1073741825\n1073741826\n1073741826\n");
    CHECK_INT(geteuid(), 0);
    CHECK_INT(prctl(PR_GET_DUMPABLE), dumpable);
    pdk_run_result_free(&r);
}

TEST("a staged file is reachable for any uid, below a directory that is closed to it [B016]")
{
    if (geteuid() != 0) SKIP("needs root");
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char closed[300], inner[320], file[340];
    snprintf(closed, sizeof closed, "%s/closed", test_tmpdir());
    snprintf(inner, sizeof inner, "%s/inner", closed);
    snprintf(file, sizeof file, "%s/f", inner);
    REQUIRE(mkdir(closed, 0700) == 0 && mkdir(inner, 0755) == 0);
    PDK_AUTO_FD made = open(file, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    REQUIRE(write(made, "reached\n", 8) == 8);
    PDK_AUTO_FD dir = open(inner, O_PATH | O_CLOEXEC), one = open(file, O_PATH | O_CLOEXEC);
    char escape[340];
    snprintf(escape, sizeof escape, "%s/escape", inner);
    REQUIRE(symlink(closed, escape) == 0);
    pdk_stage_op stage[] = {
        { .kind = PDK_STAGE_ROOT, .text = "mode=755,size=1m" },
        { .kind = PDK_STAGE_FOLDER, .path = PDK_STAGE_DIR "/0", .mode = 0755 },
        { .kind = PDK_STAGE_TREE, .parent = ".", .name = "0", .fd = dir, .read_only = true },
        { .kind = PDK_STAGE_TREE, .parent = ".", .name = "1", .fd = one },
        { .kind = PDK_STAGE_SEAL, .path = PDK_STAGE_DIR },
    };
    pdk_spawn spec = { .argv = SH("cat " PDK_STAGE_DIR "/0/f " PDK_STAGE_DIR "/1; touch " PDK_STAGE_DIR "/0/x " PDK_STAGE_DIR "/x"),
                       .drop_ids = true, .uid = 0x40000001, .gid = 0x40000001, .stage = stage, .stage_count = 5 };
    pdk_run_result r;
    int rc = pdk_run(&spec, NULL, 0, 4096, 10, &r, &err);
    if (rc < 0 && err.sys == EPERM) SKIP("mounts are not allowed here");
    REQUIRE(rc == 0);
    CHECK_STR(r.out, "reached\nreached\n");
    pdk_run_result_free(&r);
    CHECK_INT(access(PDK_STAGE_DIR "/0/f", F_OK), -1); /* nothing of it on the host */
    /* A target that leads through a link of a source is refused, and nothing is made where it leads. */
    stage[3] = (pdk_stage_op){ .kind = PDK_STAGE_TREE, .parent = "0/escape", .name = "made", .fd = one };
    CHECK_INT(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err), -1);
    CHECK_HAS(err.message, "mount target");
    stage[3] = (pdk_stage_op){ .kind = PDK_STAGE_TREE, .parent = "0", .name = "made", .fd = one };
    CHECK_INT(pdk_run(&spec, NULL, 0, 4096, 10, &r, &err), -1);
    char made_path[360];
    snprintf(made_path, sizeof made_path, "%s/made", closed);
    CHECK_INT(access(made_path, F_OK), -1);
    snprintf(made_path, sizeof made_path, "%s/made", inner);
    CHECK_INT(access(made_path, F_OK), -1);
}

static void *spawner(void *arg)
{
    int *bad = arg;
    for (int i = 0; i < 25; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_run_result r;
        char text[40], want[40];
        snprintf(text, sizeof text, "echo %d", i);
        snprintf(want, sizeof want, "%d\n", i);
        if (run_text(SH(text), NULL, 20, &r, &err) < 0) ++*bad;
        else {
            if (strcmp(r.out, want) != 0) ++*bad;
            pdk_run_result_free(&r);
        }
    }
    return NULL;
}

TEST("several threads start children at once")
{
    int before = test_fds(), bad[4] = { 0 };
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, spawner, &bad[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(t[i], NULL);
        CHECK_INT(bad[i], 0);
    }
    CHECK_INT(test_fds(), before);
}

TEST("a lock belongs to the opened file: it outlives a close elsewhere and ends with the last copy")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    char path[300];
    snprintf(path, sizeof path, "%s/lock", test_tmpdir());
    int holder = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    PDK_AUTO_FD other = open(path, O_RDWR | O_CLOEXEC);
    CHECK_INT(pdk_lock_range(holder, F_WRLCK, 0, 1, &err), 1);
    CHECK_INT(pdk_lock_range(other, F_WRLCK, 0, 1, &err), 0);
    CHECK_INT(pdk_lock_range(other, F_WRLCK, 1, 1, &err), 1);
    close(open(path, O_RDWR | O_CLOEXEC)); /* a process's own (POSIX) lock would be gone now */
    CHECK_INT(pdk_lock_test(other, F_WRLCK, 0, 1, &err), 1);
    pdk_fd_map fds[] = { { holder, 5 } };
    pdk_spawn spec = { .argv = SH("read x"), .fds = fds, .fd_count = 1 };
    int in[2];
    REQUIRE(pipe2(in, O_CLOEXEC) == 0);
    pdk_fd_map both[] = { fds[0], { in[0], 0 } };
    spec.fds = both, spec.fd_count = 2;
    pdk_child c;
    REQUIRE(pdk_spawn_start(&spec, &c, &err) == 0);
    close(in[0]);
    close(holder);
    CHECK_INT(pdk_lock_test(other, F_WRLCK, 0, 1, &err), 1); /* the child's copy */
    close(in[1]);
    CHECK_INT(pdk_child_wait(&c, 10, &err), 1);
    CHECK_INT(pdk_lock_test(other, F_WRLCK, 0, 1, &err), 0);
}

TEST("the filter refuses and never kills: namespaces, mounts, keys and unknown calls [B099]")
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_FD fd = pdk_seccomp_fd(&err);
    REQUIRE(fd >= 0);
    struct stat st;
    REQUIRE(fstat(fd, &st) == 0);
    CHECK(st.st_size > 0 && st.st_size % 8 == 0);
    struct sock_fprog prog = { .len = (unsigned short)(st.st_size / 8), .filter = malloc((size_t)st.st_size) };
    REQUIRE(prog.filter != NULL && pread(fd, prog.filter, (size_t)st.st_size, 0) == st.st_size);
    pid_t pid = fork();
    if (pid == 0) {
        int bad = 0;
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, 2, &prog) < 0) _exit(99);
        if (unshare(CLONE_NEWUSER) != -1 || errno != EPERM) bad |= 1;
        if (syscall(SYS_mount, "x", "/", "tmpfs", 0, 0) != -1 || errno != EPERM) bad |= 2;
        if (syscall(SYS_keyctl, 0, 0, 0, 0, 0) != -1 || errno != EPERM) bad |= 4;
        if (syscall(900) != -1 || errno != ENOSYS) bad |= 8;
        if (syscall(SYS_clone3, NULL, 0) != -1 || errno != ENOSYS) bad |= 16;
        if (socket(AF_VSOCK, SOCK_STREAM, 0) != -1 || errno != EPERM) bad |= 32;
        int s = socket(AF_UNIX, SOCK_STREAM, 0);
        if (s < 0) bad |= 64;
        _exit(bad);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_INT(WEXITSTATUS(status), 0);
    free(prog.filter);
}

int main(int argc, char **argv)
{
    if (test_valgrind()) {
        puts("skip  children: valgrind knows fork and threads only, not a clone that shares memory");
        puts("0 passed, 0 failed, 1 skipped");
        return 0;
    }
    return test_main(argc, argv);
}
