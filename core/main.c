/* main.c -- the paddock program: builds a universe, runs lua/paddock/cli/main.lua in it, exits with the code that it
 * answers, and turns signals into something that Lua can wait for.
 *
 * Signals. A handler writes the signal's number to a pipe; one thread reads the pipe and decides:
 *   HUP        calls the function that the command gave to native.on_hangup (a reload of the policies)
 *   INT, TERM  set the cancel flag in the main thread's limit, so that whatever it waits for ends with `cancelled`;
 *              the command then cleans up (native.calm) and the program exits with 128 + n.
 *              A second one exits at once: what is left then ends by its orphan clock.
 * INT in the REPL gives up the line that is typed or the expression that runs, and nothing else.
 *
 * Written by handlers and the signal thread: the atomics in `sig`. Everything else there is set before both start.
 */
#include "cli.h"
#include "limit.h"
#include "script.h"
#include "signals.h"

#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <locale.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EXIT_INTERNAL = 70 };
enum { HOOK_EVERY = 1000 }; /* instructions between two looks at the interrupt flag in the REPL */

static struct {
    int pipe[2]; /* handlers write, the signal thread reads */
    int wake;    /* eventfd: readable after each INT and TERM */
    pdk_script *script;
    atomic_bool repl;        /* INT interrupts instead of ending */
    atomic_bool interrupted; /* INT in the REPL, not yet seen */
    atomic_bool cancelled;   /* in the main thread's limit */
    atomic_int ended_by;     /* the first INT or TERM that ends the program; 0 = none */
} sig = { .pipe = { -1, -1 }, .wake = -1 };

static const char HANGUP_KEY = 0; /* its address is the registry key of the function given to on_hangup */

/* ---- signals ------------------------------------------------------------------------------------------ */

static void wake_main(void)
{
    uint64_t one = 1;
    (void)!write(sig.wake, &one, sizeof one);
}

static void on_signal(int number)
{
    int saved = errno;
    unsigned char byte = (unsigned char)number;
    if (number == SIGINT && atomic_load(&sig.repl)) {
        /* Here and not on the thread: what is typed behind a Ctrl-C must not be read before the Ctrl-C is seen. */
        atomic_store(&sig.interrupted, true);
        atomic_store(&sig.cancelled, true);
        wake_main();
    } else {
        (void)!write(sig.pipe[1], &byte, 1); /* a full pipe has enough to say already */
    }
    errno = saved;
}

/* stack: +0, raises what the function raises */
static int call_hangup(lua_State *L, void *arg)
{
    (void)arg;
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &HANGUP_KEY) == LUA_TFUNCTION)
        lua_call(L, 0, 0);
    return 0;
}

static void hangup(void)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    if (pdk_script_enter(sig.script, call_hangup, NULL, &err) < 0)
        fprintf(stderr, "paddock: the policies were not reloaded: %s\n", err.message);
}

static void end_program(int number)
{
    int none = 0;
    if (!atomic_compare_exchange_strong(&sig.ended_by, &none, number))
        _exit(128 + number); /* the second one: somebody does not want to wait for the cleaning up */
    atomic_store(&sig.cancelled, true);
}

static void *signal_thread(void *arg)
{
    (void)arg;
    unsigned char number;
    for (;;) {
        ssize_t n = read(sig.pipe[0], &number, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n != 1 || number == 0) /* 0: main is done */
            return NULL;
        if (number == SIGHUP) {
            hangup();
            continue;
        }
        end_program(number);
        wake_main();
    }
}

static bool signals_start(pdk_thread *thread)
{
    if (pipe2(sig.pipe, O_CLOEXEC) < 0 || (sig.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0 ||
        fcntl(sig.pipe[1], F_SETFL, O_NONBLOCK) < 0 || pdk_thread_start(thread, "pdk-signals", signal_thread, NULL) != 0)
        return false;
    const int numbers[] = { SIGHUP, SIGINT, SIGTERM };
    struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        struct sigaction now;
        /* `nohup paddock ...` and shells that start background jobs ignore signals on purpose */
        if (sigaction(numbers[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN); /* `paddock exec ... | head` must still clean up its sandbox */
    return true;
}

static void signals_stop(pdk_thread *thread)
{
    unsigned char done = 0;
    fcntl(sig.pipe[1], F_SETFL, 0); /* this byte must not be lost to a full pipe */
    while (write(sig.pipe[1], &done, 1) < 0 && errno == EINTR)
        ;
    pdk_thread_join(thread);
}

pdk_cli_wake pdk_cli_wait(lua_State *L, int fd)
{
    struct pollfd fds[2] = { { .fd = fd, .events = POLLIN }, { .fd = sig.wake, .events = POLLIN } };
    for (;;) {
        if (atomic_load(&sig.ended_by) != 0)
            return PDK_CLI_TERMINATE;
        if (atomic_exchange(&sig.interrupted, false)) {
            atomic_store(&sig.cancelled, false);
            return PDK_CLI_INTERRUPT;
        }
        if (poll(fds, 2, 0) == 0) { /* give the mutex up only when there is something to wait for */
            pdk_script_block(L);
            poll(fds, 2, -1);
            pdk_script_unblock(L);
        }
        uint64_t drained;
        if (fds[1].revents != 0)
            (void)!read(sig.wake, &drained, sizeof drained);
        else if (fds[0].revents != 0)
            return PDK_CLI_READY;
    }
}

/* ---- the module paddock.cli.native --------------------------------------------------------------------- */

static void interrupt_hook(lua_State *L, lua_Debug *ar)
{
    (void)ar;
    if (atomic_load(&sig.interrupted) || atomic_load(&sig.ended_by) != 0)
        luaL_error(L, "interrupted");
}

/* watch(on): whether Ctrl-C may interrupt Lua code that runs on this lua thread.      stack: +0, raises */
static int n_watch(lua_State *L)
{
    bool on = lua_toboolean(L, 1);
    lua_sethook(L, on ? interrupt_hook : NULL, on ? LUA_MASKCOUNT : 0, on ? HOOK_EVERY : 0);
    return 0;
}

/* repl(on): INT interrupts instead of ending the program.                             stack: +0, never */
static int n_repl(lua_State *L)
{
    atomic_store(&sig.repl, lua_toboolean(L, 1));
    return 0;
}

/* ended_by() -> the signal that ends the program, or nil.                             stack: +1, never */
static int n_ended_by(lua_State *L)
{
    int number = atomic_load(&sig.ended_by);
    if (number == 0)
        lua_pushnil(L);
    else
        lua_pushinteger(L, number);
    return 1;
}

/* stop([number]): what the main thread waits for ends, as after a Ctrl-C; with a number the program ends by that signal. stack: +0, raises */
static int n_stop(lua_State *L)
{
    int none = 0, number = (int)luaL_optinteger(L, 1, 0);
    atomic_compare_exchange_strong(&sig.ended_by, &none, number);
    atomic_store(&sig.cancelled, true);
    wake_main();
    return 0;
}

/* calm(): an interrupt has had its effect; cleaning up after a signal may wait for I/O.   stack: +0, never */
static int n_calm(lua_State *L)
{
    (void)L;
    atomic_store(&sig.interrupted, false);
    atomic_store(&sig.cancelled, false);
    return 0;
}

/* on_hangup(fn): called, on another thread, for each HUP.                             stack: +0, raises */
static int n_on_hangup(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &HANGUP_KEY);
    return 0;
}

/* isatty(fd) -> boolean.                                                              stack: +1, raises */
static int n_isatty(lua_State *L)
{
    lua_pushboolean(L, isatty((int)luaL_checkinteger(L, 1)));
    return 1;
}

/* write(fd, bytes) -> true, or nil and the reason.                                    stack: +1 or +2, raises */
static int n_write(lua_State *L)
{
    int fd = (int)luaL_checkinteger(L, 1);
    size_t len, done = 0;
    const char *bytes = luaL_checklstring(L, 2, &len); /* stays on this stack while the mutex is given up */
    int failed = 0;
    fflush(stdout); /* what print() wrote comes first */
    pdk_script_block(L);
    while (done < len && failed == 0) {
        ssize_t n = write(fd, bytes + done, len - done);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EAGAIN) { /* a terminal or pipe that somebody else made non-blocking */
            struct pollfd room = { .fd = fd, .events = POLLOUT };
            poll(&room, 1, -1);
        } else if (errno != EINTR) {
            failed = errno;
        }
    }
    pdk_script_unblock(L);
    if (failed != 0) {
        lua_pushnil(L);
        lua_pushstring(L, strerror(failed));
        return 2;
    }
    lua_pushboolean(L, true);
    return 1;
}

/* read_all(fd, max) -> all bytes until the end, or nil and "too large", "interrupted" or the reason.
 * stack: +1 or +2, raises */
static int n_read_all(lua_State *L)
{
    int fd = (int)luaL_checkinteger(L, 1);
    lua_Integer max = luaL_checkinteger(L, 2);
    lua_Integer total = 0;
    luaL_Buffer all;
    luaL_buffinit(L, &all);
    for (;;) {
        if (pdk_cli_wait(L, fd) != PDK_CLI_READY) {
            lua_pushnil(L);
            lua_pushliteral(L, "interrupted");
            return 2;
        }
        ssize_t n = read(fd, luaL_prepbuffsize(&all, 65536), 65536);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (n < 0) {
            int failed = errno;
            lua_pushnil(L);
            lua_pushstring(L, strerror(failed));
            return 2;
        }
        total += n;
        if (total > max) {
            lua_pushnil(L);
            lua_pushliteral(L, "too large");
            return 2;
        }
        if (n == 0)
            break;
        luaL_addsize(&all, (size_t)n);
    }
    luaL_pushresult(&all);
    return 1;
}

/* user() -> the login name, or "uid-N" when the password file has none.               stack: +1, raises */
static int n_user(lua_State *L)
{
    char buffer[4096];
    struct passwd entry, *found = NULL;
    if (getpwuid_r(geteuid(), &entry, buffer, sizeof buffer, &found) == 0 && found != NULL)
        lua_pushstring(L, found->pw_name);
    else
        lua_pushfstring(L, "uid-%d", (int)geteuid());
    return 1;
}

/* The start time of a process in clock ticks since boot, or -1. Field 22 of /proc/PID/stat; the name in field 2 may hold
 * anything, so counting starts behind its last parenthesis. */
static long long start_time(pid_t pid)
{
    char path[40], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return -1;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *at = strrchr(text, ')');
    for (int field = 2; at != NULL && field < 22; field++)
        at = strchr(at + 1, ' ');
    return at == NULL ? -1 : strtoll(at + 1, NULL, 10);
}

/* hangup(pid, start_time) -> true, or nil and the reason. The start time keeps a reused pid from being signalled; the
 * pidfd, opened first, keeps it from being reused between the look and the signal.     stack: +1 or +2, raises */
static int n_hangup(lua_State *L)
{
    pid_t pid = (pid_t)luaL_checkinteger(L, 1);
    long long started = luaL_checkinteger(L, 2);
    int fd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
    const char *failed = NULL;
    if (fd < 0)
        failed = pid > 0 ? strerror(errno) : "not a process id";
    else if (start_time(pid) != started)
        failed = "that process has ended; its number belongs to another one";
    else if (syscall(SYS_pidfd_send_signal, fd, SIGHUP, NULL, 0) < 0)
        failed = strerror(errno);
    if (fd >= 0)
        close(fd);
    if (failed != NULL) {
        lua_pushnil(L);
        lua_pushstring(L, failed);
        return 2;
    }
    lua_pushboolean(L, true);
    return 1;
}

static void set_number(lua_State *L, const char *key, double value)
{
    lua_pushnumber(L, value);
    lua_setfield(L, -2, key);
}

/* statfs(path) -> { magic, free, total (bytes), files_free }, or nil and the reason.  stack: +1 or +2, raises */
static int n_statfs(lua_State *L)
{
    struct statfs facts;
    if (statfs(luaL_checkstring(L, 1), &facts) < 0) {
        int failed = errno;
        lua_pushnil(L);
        lua_pushstring(L, strerror(failed));
        return 2;
    }
    lua_createtable(L, 0, 4);
    lua_pushinteger(L, (lua_Integer)(facts.f_type & 0xffffffff));
    lua_setfield(L, -2, "magic");
    set_number(L, "free", (double)facts.f_bavail * (double)facts.f_bsize);
    set_number(L, "total", (double)facts.f_blocks * (double)facts.f_bsize);
    set_number(L, "files_free", facts.f_files == 0 ? -1 : (double)facts.f_ffree);
    return 1;
}

/* stat(path) -> { mode (the twelve bits), uid, directory }, or nil and the reason.      stack: +1 or +2, raises */
static int n_stat(lua_State *L)
{
    struct stat facts;
    if (stat(luaL_checkstring(L, 1), &facts) < 0) {
        int failed = errno;
        lua_pushnil(L);
        lua_pushstring(L, strerror(failed));
        return 2;
    }
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, facts.st_mode & 07777);
    lua_setfield(L, -2, "mode");
    lua_pushinteger(L, facts.st_uid);
    lua_setfield(L, -2, "uid");
    lua_pushboolean(L, S_ISDIR(facts.st_mode));
    lua_setfield(L, -2, "directory");
    return 1;
}

/* access(path, "w" or "x") -> whether this process may.                               stack: +1, raises */
static int n_access(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    lua_pushboolean(L, eaccess(path, luaL_checkstring(L, 2)[0] == 'w' ? W_OK : X_OK) == 0);
    return 1;
}

extern char **environ;

/* spawn(argv) -> seconds, status: starts a program with nothing on its standard streams and waits for its end; the least that
 * starting one costs (posix_spawn is a vfork). For `paddock bench`.                    stack: +2, raises */
static int n_spawn(lua_State *L)
{
    enum { MOST = 64 };
    char *argv[MOST + 1] = { NULL };
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    lua_Integer n = luaL_len(L, 1);
    luaL_argcheck(L, n >= 1 && n <= MOST, 1, "1 to 64 words");
    luaL_checkstack(L, MOST + 4, "argv");
    for (lua_Integer i = 0; i < n; i++) {
        lua_rawgeti(L, 1, i + 1);
        argv[i] = (char *)luaL_checkstring(L, -1);
    }
    posix_spawn_file_actions_t files;
    if (posix_spawn_file_actions_init(&files) != 0)
        return luaL_error(L, "not enough memory");
    for (int fd = 0; fd <= 2; fd++)
        posix_spawn_file_actions_addopen(&files, fd, "/dev/null", fd == 0 ? O_RDONLY : O_WRONLY, 0);
    pid_t pid = 0;
    int status = 0;
    pdk_script_block(L);
    pdk_ns start = pdk_now_monotonic();
    int failed = posix_spawn(&pid, argv[0], &files, NULL, argv, environ);
    while (failed == 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    pdk_ns end = pdk_now_monotonic();
    posix_spawn_file_actions_destroy(&files);
    pdk_script_unblock(L);
    if (failed != 0)
        return luaL_error(L, "%s: %s", argv[0], strerror(failed));
    lua_pushnumber(L, (lua_Number)(end - start) / PDK_NS_PER_S);
    lua_pushinteger(L, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    return 2;
}

/* clocks() -> { monotonic, boottime, wall }, seconds, read one right after the other. stack: +1, raises */
static int n_clocks(lua_State *L)
{
    pdk_ns monotonic = pdk_now_monotonic(), boottime = pdk_now_boottime(), wall = pdk_now_wall();
    lua_createtable(L, 0, 3);
    set_number(L, "monotonic", (double)monotonic / 1e9);
    set_number(L, "boottime", (double)boottime / 1e9);
    set_number(L, "wall", (double)wall / 1e9);
    return 1;
}

/* facts() -> { pid, uid, exe }.                                                       stack: +1, raises */
static int n_facts(lua_State *L)
{
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe);
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, getpid());
    lua_setfield(L, -2, "pid");
    lua_pushinteger(L, geteuid());
    lua_setfield(L, -2, "uid");
    if (n > 0) {
        lua_pushlstring(L, exe, (size_t)n);
        lua_setfield(L, -2, "exe");
    }
    return 1;
}

int luaopen_paddock_cli_native(lua_State *L)
{
    static const luaL_Reg functions[] = {
        { "watch", n_watch },         { "repl", n_repl },     { "ended_by", n_ended_by }, { "calm", n_calm }, { "stop", n_stop },
        { "on_hangup", n_on_hangup }, { "isatty", n_isatty }, { "write", n_write },       { "read_all", n_read_all },
        { "user", n_user },           { "hangup", n_hangup }, { "statfs", n_statfs },     { "clocks", n_clocks },
        { "facts", n_facts },         { "stat", n_stat },     { "access", n_access },     { "spawn", n_spawn },
        { NULL, NULL },
    };
    luaL_newlib(L, functions);
    return 1;
}

/* ---- main ---------------------------------------------------------------------------------------------- */

typedef struct cli_call {
    int argc;
    char **argv;
    int code;
} cli_call;

/* stack: +0, raises */
static int run_cli(lua_State *L, void *arg)
{
    cli_call *call = arg;
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_PRELOAD_TABLE);
    lua_pushcfunction(L, luaopen_paddock_lineedit);
    lua_setfield(L, -2, "paddock.lineedit");
    lua_pushcfunction(L, luaopen_paddock_cli_native);
    lua_setfield(L, -2, "paddock.cli.native");
    lua_getglobal(L, "require");
    lua_pushliteral(L, "paddock.cli.main");
    lua_call(L, 1, 1);
    lua_createtable(L, call->argc, 0);
    for (int i = 1; i < call->argc; i++) {
        lua_pushstring(L, call->argv[i]);
        lua_rawseti(L, -2, i);
    }
    lua_call(L, 1, 1);
    call->code = lua_isinteger(L, -1) ? (int)lua_tointeger(L, -1) : EXIT_INTERNAL;
    return 0;
}

/* A closed standard descriptor would be given to the next file that is opened, and output written into that file. */
static void keep_standard_descriptors(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
            (void)!open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);
}

int main(int argc, char **argv)
{
    keep_standard_descriptors();
    setlocale(LC_CTYPE, ""); /* the line editor's columns and characters */
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    sig.script = pdk_script_new(&err);
    if (sig.script == NULL) {
        fprintf(stderr, "paddock: cannot start: %s\n", err.message);
        return EXIT_INTERNAL;
    }
    pdk_thread signals;
    pdk_signals_are_handled();
    if (!signals_start(&signals)) {
        fprintf(stderr, "paddock: cannot start: no pipe or thread for signals (%s)\n", strerror(errno));
        return EXIT_INTERNAL;
    }
    const pdk_limit limit = { .deadline = PDK_NEVER, .cancelled = &sig.cancelled };
    const pdk_limit *former = pdk_limit_enter(&limit);
    cli_call call = { .argc = argc, .argv = argv, .code = EXIT_INTERNAL };
    if (pdk_script_enter(sig.script, run_cli, &call, &err) < 0)
        fprintf(stderr, "paddock: internal error: %s\n", err.message);
    pdk_limit_enter(former);
    signals_stop(&signals);
    pdk_script_release(sig.script);
    return call.code;
}
