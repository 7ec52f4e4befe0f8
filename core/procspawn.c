/* procspawn.c -- io.proc's processes: spawning, waiting, signalling by pidfd, and who this process is.
 *
 * What a spawn needs is gathered into one userdata before anything is started, so that a Lua error while reading the
 * caller's table frees it by collection.
 */
#include "fd.h"
#include "proc.h"
#include "procio.h"
#include "script.h"

#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <openssl/sha.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define CHILD_TYPE "paddock.child"
#define MAX_ARGS 256
#define MAX_FDS 64

typedef struct spawn_box { /* a userdata; the strings and descriptors stay alive in the caller's table */
    pdk_spawn spec;
    const char *argv[MAX_ARGS + 1], *env[MAX_ARGS + 1];
    pdk_fd_map fds[MAX_FDS];
    pdk_stage_op stage[PDK_STAGE_MAX];
    pdk_rlimit_set limits;
} spawn_box;

static const struct { const char *name; int resource; } RESOURCES[] = {
    { "core", RLIMIT_CORE }, { "data", RLIMIT_DATA }, { "nproc", RLIMIT_NPROC }, { "nofile", RLIMIT_NOFILE },
};

static void read_strings(lua_State *L, int table, const char *key, const char **out, const char *what)
{
    size_t n = 0;
    if (lua_getfield(L, table, key) != LUA_TNIL) {
        luaL_checktype(L, -1, LUA_TTABLE);
        n = lua_rawlen(L, -1);
        if (n > MAX_ARGS) luaL_error(L, "%s: more than %d entries", what, MAX_ARGS);
        for (size_t i = 0; i < n; i++) {
            lua_rawgeti(L, -1, (lua_Integer)i + 1);
            if (lua_type(L, -1) != LUA_TSTRING) luaL_error(L, "%s[%d] is not a string", what, (int)i + 1);
            out[i] = lua_tostring(L, -1);
            lua_pop(L, 1);
        }
    }
    lua_pop(L, 1);
    out[n] = NULL;
}

static void read_descriptors(lua_State *L, int table, spawn_box *box)
{
    if (lua_getfield(L, table, "fds") != LUA_TNIL) {
        for (lua_pushnil(L); lua_next(L, -2) != 0; lua_pop(L, 1)) {
            if (box->spec.fd_count == MAX_FDS) luaL_error(L, "fds: more than %d", MAX_FDS);
            box->fds[box->spec.fd_count++] = (pdk_fd_map){ pdk_procio_fd(L, lua_gettop(L)), (int)luaL_checkinteger(L, -2) };
        }
    }
    lua_pop(L, 1);
    box->spec.fds = box->fds;
}

static const char *const STAGE_KINDS[] = { "root", "folder", "link", "file", "node", "tmpfs", "pts", "tree", "seal", NULL };

/* A field of the operation at the top of the stack; the table keeps strings alive. */
static const char *op_text(lua_State *L, const char *key, size_t *len)
{
    lua_getfield(L, -1, key);
    if (!lua_isnil(L, -1) && lua_type(L, -1) != LUA_TSTRING) luaL_error(L, "stage: %s is not a string", key);
    const char *text = lua_tolstring(L, -1, len);
    lua_pop(L, 1);
    return text;
}

static unsigned op_number(lua_State *L, const char *key)
{
    lua_getfield(L, -1, key);
    lua_Integer n = luaL_optinteger(L, -1, 0);
    lua_pop(L, 1);
    return (unsigned)n;
}

/* { kind, path =, parent =, name =, text =, fd =, read_only =, mode =, major =, minor = }, as in stage.h */
static void read_op(lua_State *L, pdk_stage_op *op)
{
    luaL_checktype(L, -1, LUA_TTABLE);
    lua_rawgeti(L, -1, 1);
    op->kind = (pdk_stage_kind)luaL_checkoption(L, lua_gettop(L), NULL, STAGE_KINDS);
    lua_pop(L, 1);
    op->path = op_text(L, "path", NULL);
    op->parent = op_text(L, "parent", NULL);
    op->name = op_text(L, "name", NULL);
    op->text = op_text(L, "text", &op->len);
    op->mode = op_number(L, "mode");
    op->major = op_number(L, "major");
    op->minor = op_number(L, "minor");
    lua_getfield(L, -1, "read_only");
    op->read_only = lua_toboolean(L, -1);
    lua_getfield(L, -2, "fd");
    op->fd = lua_isnil(L, -1) ? -1 : pdk_procio_fd(L, lua_gettop(L));
    lua_pop(L, 2);
    bool needs_text = op->kind == PDK_STAGE_ROOT || op->kind == PDK_STAGE_LINK || op->kind == PDK_STAGE_FILE ||
                      op->kind == PDK_STAGE_NODE || op->kind == PDK_STAGE_TMPFS || (op->kind == PDK_STAGE_TREE && op->fd < 0);
    bool is_tree = op->kind == PDK_STAGE_TREE;
    if (op->path == NULL || (needs_text && op->text == NULL) || (is_tree && (op->parent == NULL || op->name == NULL)))
        luaL_error(L, "stage: an operation %s lacks a field", STAGE_KINDS[op->kind]);
}

static void read_stage(lua_State *L, int table, spawn_box *box)
{
    if (lua_getfield(L, table, "stage") != LUA_TNIL) {
        size_t n = lua_rawlen(L, -1);
        if (n > PDK_STAGE_MAX) luaL_error(L, "stage: more than %d operations", PDK_STAGE_MAX);
        for (size_t i = 0; i < n; i++) {
            lua_rawgeti(L, -1, (lua_Integer)i + 1);
            read_op(L, &box->stage[i]);
            lua_pop(L, 1);
        }
        box->spec.stage_count = n;
    }
    lua_pop(L, 1);
    box->spec.stage = box->spec.stage_count > 0 ? box->stage : NULL;
}

static void read_limits(lua_State *L, int table, pdk_rlimit_set *out)
{
    luaL_checktype(L, table, LUA_TTABLE);
    for (size_t i = 0; i < sizeof RESOURCES / sizeof RESOURCES[0]; i++) {
        if (lua_getfield(L, table, RESOURCES[i].name) != LUA_TNIL) {
            lua_Integer n = luaL_checkinteger(L, -1);
            if (n < 0) luaL_error(L, "limit %s is negative", RESOURCES[i].name);
            out->v[out->n].resource = RESOURCES[i].resource;
            out->v[out->n].soft = out->v[out->n].hard = (uint64_t)n;
            out->n++;
        }
        lua_pop(L, 1);
    }
}

/* Reads the table at index 1 into a box on the stack (+1). */
static spawn_box *read_spawn(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    spawn_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    memset(box, 0, sizeof *box);
    read_strings(L, 1, "argv", box->argv, "argv");
    if (box->argv[0] == NULL) luaL_error(L, "argv is empty");
    read_strings(L, 1, "env", box->env, "env");
    read_descriptors(L, 1, box);
    read_stage(L, 1, box);
    lua_getfield(L, 1, "cwd");
    box->spec.cwd = luaL_optstring(L, -1, NULL);
    lua_getfield(L, 1, "uid");
    lua_getfield(L, 1, "gid");
    if (!lua_isnil(L, -2)) {
        box->spec.drop_ids = true;
        box->spec.uid = (uid_t)luaL_checkinteger(L, -2);
        box->spec.gid = (gid_t)luaL_checkinteger(L, -1);
    }
    if (lua_getfield(L, 1, "limits") != LUA_TNIL) {
        read_limits(L, lua_gettop(L), &box->limits);
        box->spec.limits = &box->limits;
    }
    lua_pop(L, 4);
    box->spec.argv = box->argv;
    box->spec.env = box->env;
    return box;
}

/* ---- children ------------------------------------------------------------------------------------------------ */

static pdk_child *check_child(lua_State *L)
{
    return luaL_checkudata(L, 1, CHILD_TYPE);
}

static int child_close(lua_State *L)
{
    pdk_child_close(check_child(L));
    return 0;
}

static int child_pid(lua_State *L)
{
    lua_pushinteger(L, check_child(L)->pid);
    return 1;
}

static void push_status(lua_State *L, int status)
{
    lua_createtable(L, 0, 4);
    if (WIFEXITED(status)) {
        lua_pushinteger(L, WEXITSTATUS(status));
        lua_setfield(L, -2, "status");
    } else {
        lua_pushinteger(L, WTERMSIG(status));
        lua_setfield(L, -2, "signal");
    }
}

/* child:wait(seconds) -> whether it has ended */
static int child_wait(lua_State *L)
{
    pdk_child *c = check_child(L);
    double seconds = luaL_checknumber(L, 2);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script_block(L);
    int rc = pdk_child_wait(c, seconds, &err);
    pdk_script_unblock(L);
    if (rc < 0) return pdk_raise(L, &err);
    lua_pushboolean(L, rc);
    return 1;
}

/* child:kill() ends it and what it has started in its session, unless it has ended already: then its number may be another's. */
static int child_kill(lua_State *L)
{
    pdk_child *c = check_child(L);
    struct pollfd p = { .fd = c->pidfd, .events = POLLIN };
    if (c->pidfd >= 0 && poll(&p, 1, 0) == 0) kill(-c->pid, SIGKILL);
    return 0;
}

static const luaL_Reg CHILD_METHODS[] = {
    { "close", child_close }, { "pid", child_pid }, { "wait", child_wait }, { "kill", child_kill }, { NULL, NULL },
};

static int proc_spawn(lua_State *L)
{
    spawn_box *box = read_spawn(L);
    pdk_child *c = lua_newuserdatauv(L, sizeof *c, 0);
    *c = (pdk_child){ .pidfd = -1 };
    luaL_setmetatable(L, CHILD_TYPE);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script_block(L);
    int rc = pdk_spawn_start(&box->spec, c, &err);
    pdk_script_unblock(L);
    return rc < 0 ? pdk_raise(L, &err) : 1;
}

typedef struct run_box { /* a userdata whose collection frees the result */
    pdk_run_result r;
} run_box;

static int run_gc(lua_State *L)
{
    pdk_run_result_free(lua_touserdata(L, 1));
    return 0;
}

static int proc_run(lua_State *L)
{
    spawn_box *box = read_spawn(L);
    lua_getfield(L, 1, "stdin");
    lua_getfield(L, 1, "max");
    lua_getfield(L, 1, "timeout");
    size_t in_len = 0;
    const char *in = luaL_optlstring(L, -3, "", &in_len);
    lua_Integer max = luaL_optinteger(L, -2, 1 << 20);
    double timeout = luaL_optnumber(L, -1, 60);
    luaL_argcheck(L, max >= 0 && max <= 1 << 28, 1, "max is out of range");
    run_box *run = lua_newuserdatauv(L, sizeof *run, 0);
    memset(run, 0, sizeof *run);
    if (luaL_newmetatable(L, "paddock.run")) {
        lua_pushcfunction(L, run_gc);
        lua_setfield(L, -2, "__gc");
    }
    lua_setmetatable(L, -2);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script_block(L);
    int rc = pdk_run(&box->spec, in, in_len, (size_t)max, timeout, &run->r, &err);
    pdk_script_unblock(L);
    if (rc < 0) return pdk_raise(L, &err);
    push_status(L, run->r.status);
    lua_pushlstring(L, run->r.out, run->r.out_len);
    lua_setfield(L, -2, "out");
    lua_pushlstring(L, run->r.err, run->r.err_len);
    lua_setfield(L, -2, "err");
    lua_pushboolean(L, run->r.truncated);
    lua_setfield(L, -2, "truncated");
    return 1;
}

/* nil, message: +2 */
static int refused(lua_State *L, int sys)
{
    lua_pushnil(L);
    lua_pushstring(L, strerrordesc_np(sys));
    return 2;
}

/* ---- other processes ------------------------------------------------------------------------------------------ */

typedef struct process_facts { /* of /proc/PID/stat */
    long long start; /* ticks since boot: with the pid it names one process of this boot */
    char state;
    int parent;
} process_facts;

static bool facts_of(pid_t pid, process_facts *out)
{
    char path[48], text[1024];
    if (pid == 0) snprintf(path, sizeof path, "/proc/self/stat");
    else snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (n <= 0) return false;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name before it may hold anything */
    return at != NULL && sscanf(at + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %lld",
                                &out->state, &out->parent, &out->start) == 3;
}

static pid_t check_pid(lua_State *L, int index)
{
    lua_Integer pid = luaL_checkinteger(L, index);
    luaL_argcheck(L, pid > 0 && pid <= INT32_MAX, index, "not a process id");
    return (pid_t)pid;
}

static int proc_start_of(lua_State *L)
{
    process_facts facts;
    if (!facts_of(check_pid(L, 1), &facts)) return 0;
    lua_pushinteger(L, facts.start);
    lua_pushlstring(L, &facts.state, 1);
    lua_pushinteger(L, facts.parent);
    return 3;
}

/* The descriptor is opened first: what its number's start time says afterwards is about the process that it names, if that
 * process still runs when the time has been read. */
static int proc_pidfd(lua_State *L)
{
    pid_t pid = check_pid(L, 1);
    lua_Integer wanted = luaL_checkinteger(L, 2);
    int *fd = pdk_procio_push_fd(L);
    process_facts facts;
    *fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (*fd < 0 && errno != ESRCH) return refused(L, errno);
    if (*fd >= 0 && facts_of(pid, &facts) && facts.start == wanted && syscall(SYS_pidfd_send_signal, *fd, 0, NULL, 0) == 0)
        return 1;
    if (*fd >= 0) close(pdk_fd_take(fd));
    return 0;
}

static int proc_kill(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    int rc = (int)syscall(SYS_pidfd_send_signal, fd, (int)luaL_checkinteger(L, 2), NULL, 0);
    return rc < 0 && errno != ESRCH ? refused(L, errno) : (lua_pushboolean(L, true), 1);
}

static int proc_prlimit(lua_State *L)
{
    pid_t pid = check_pid(L, 1);
    pdk_rlimit_set set = { 0 };
    read_limits(L, 2, &set);
    for (size_t i = 0; i < set.n; i++) {
        struct rlimit r = { set.v[i].soft, set.v[i].hard };
        if (prlimit(pid, (enum __rlimit_resource)set.v[i].resource, &r, NULL) < 0) return refused(L, errno);
    }
    lua_pushboolean(L, true);
    return 1;
}

static int proc_sandbox_uid(lua_State *L)
{
    size_t len;
    const char *id = luaL_checklstring(L, 1, &len);
    unsigned char hash[SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)id, len, hash);
    lua_Integer bits = (lua_Integer)(hash[0] & 0x0f) << 24 | hash[1] << 16 | hash[2] << 8 | hash[3];
    lua_pushinteger(L, 0x40000000 + bits); /* beyond every user that is handed out, below those that overflow an int */
    return 1;
}

/* ---- this process ---------------------------------------------------------------------------------------------- */

static void set_line_of(lua_State *L, const char *key, const char *path)
{
    char text[128];
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text);
    size_t len = n > 0 ? (size_t)n : 0;
    while (len > 0 && (unsigned char)text[len - 1] <= ' ') len--;
    if (fd >= 0) close(pdk_fd_take(&fd));
    lua_pushlstring(L, text, len);
    lua_setfield(L, -2, key);
}

static void set_namespace(lua_State *L, const char *key, const char *path)
{
    struct stat st;
    bool known = stat(path, &st) == 0; /* a kernel without time namespaces has none to tell apart */
    lua_pushinteger(L, known ? (lua_Integer)st.st_ino : 0);
    lua_setfield(L, -2, key);
}

static int proc_self(lua_State *L)
{
    process_facts me = { 0 };
    facts_of(0, &me);
    lua_createtable(L, 0, 8);
    const struct { const char *key; lua_Integer value; } fields[] = {
        { "pid", getpid() }, { "start", me.start }, { "uid", geteuid() }, { "gid", getegid() },
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        lua_pushinteger(L, fields[i].value);
        lua_setfield(L, -2, fields[i].key);
    }
    set_line_of(L, "boot", "/proc/sys/kernel/random/boot_id");
    set_line_of(L, "machine", "/etc/machine-id");
    set_namespace(L, "pid_ns", "/proc/self/ns/pid");
    set_namespace(L, "time_ns", "/proc/self/ns/time");
    return 1;
}

static const luaL_Reg FUNCTIONS[] = {
    { "spawn", proc_spawn },     { "run", proc_run },   { "start_of", proc_start_of },       { "pidfd", proc_pidfd },
    { "kill", proc_kill },       { "self", proc_self }, { "sandbox_uid", proc_sandbox_uid }, { "prlimit", proc_prlimit },
    { NULL, NULL },
};

void pdk_procio_open_processes(lua_State *L)
{
    if (luaL_newmetatable(L, CHILD_TYPE)) {
        luaL_newlib(L, CHILD_METHODS);
        lua_setfield(L, -2, "__index");
        lua_pushcfunction(L, child_close);
        lua_setfield(L, -2, "__gc");
        lua_pushcfunction(L, child_close);
        lua_setfield(L, -2, "__close");
    }
    lua_pop(L, 1);
    luaL_setfuncs(L, FUNCTIONS, 0);
}
