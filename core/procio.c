/* procio.c -- io.proc's descriptors: opening, reading, locking, memfds, sockets, and small file operations.
 *
 * Each function checks its arguments while it holds nothing, makes the userdata that will own the descriptor, and only then
 * opens it: a Lua error in between finds nothing to leak.
 */
#include "procio.h"
#include "fd.h"
#include "proc.h"
#include "script.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/xattr.h>

#define FD_TYPE "paddock.fd"

static const struct { int sys; const char *name; } CODES[] = {
    { ENOENT, "ENOENT" }, { EEXIST, "EEXIST" }, { EACCES, "EACCES" }, { EPERM, "EPERM" },   { ENOTDIR, "ENOTDIR" },
    { ENOSPC, "ENOSPC" }, { EROFS, "EROFS" },   { EBUSY, "EBUSY" },   { ELOOP, "ELOOP" },   { EISDIR, "EISDIR" },
    { EMFILE, "EMFILE" }, { ESRCH, "ESRCH" },   { EINVAL, "EINVAL" }, { EAGAIN, "EAGAIN" }, { EDQUOT, "EDQUOT" },
    { EIO, "EIO" },       { ENFILE, "ENFILE" }, { ENOTEMPTY, "ENOTEMPTY" }, { ENODEV, "ENODEV" },
};

/* nil, message, code: +3 */
static int refused(lua_State *L, int sys)
{
    const char *code = "other";
    for (size_t i = 0; i < sizeof CODES / sizeof CODES[0]; i++)
        if (CODES[i].sys == sys) code = CODES[i].name;
    lua_pushnil(L);
    lua_pushstring(L, strerrordesc_np(sys));
    lua_pushstring(L, code);
    return 3;
}

static int answered(lua_State *L, int rc, int sys)
{
    if (rc < 0) return refused(L, sys);
    lua_pushboolean(L, true);
    return 1;
}

/* ---- the userdata ------------------------------------------------------------------------------------------ */

int *pdk_procio_push_fd(lua_State *L)
{
    int *fd = lua_newuserdatauv(L, sizeof *fd, 0);
    *fd = -1;
    luaL_setmetatable(L, FD_TYPE);
    return fd;
}

int pdk_procio_fd(lua_State *L, int index)
{
    int *fd = luaL_checkudata(L, index, FD_TYPE);
    luaL_argcheck(L, *fd >= 0, index, "the descriptor is closed");
    return *fd;
}

static int opt_dir(lua_State *L, int index)
{
    return lua_isnoneornil(L, index) ? AT_FDCWD : pdk_procio_fd(L, index);
}

static int fd_close(lua_State *L)
{
    int *fd = luaL_checkudata(L, 1, FD_TYPE);
    if (*fd >= 0) close(pdk_fd_take(fd));
    return 0;
}

static int fd_tostring(lua_State *L)
{
    int *fd = luaL_checkudata(L, 1, FD_TYPE);
    lua_pushfstring(L, *fd >= 0 ? "descriptor %d" : "closed descriptor", *fd);
    return 1;
}

static int fd_is_open(lua_State *L)
{
    lua_pushboolean(L, *(int *)luaL_checkudata(L, 1, FD_TYPE) >= 0);
    return 1;
}

static int fd_no(lua_State *L)
{
    lua_pushinteger(L, pdk_procio_fd(L, 1));
    return 1;
}

static size_t check_size(lua_State *L, int index, lua_Integer max)
{
    lua_Integer n = luaL_checkinteger(L, index);
    luaL_argcheck(L, n >= 0 && n <= max, index, "out of range");
    return (size_t)n;
}

/* fd:read(max [, seconds]) -> bytes ("" at the end), or nil when the seconds are over */
static int fd_read(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    size_t max = check_size(L, 2, 1 << 24);
    pdk_ns deadline = pdk_after(pdk_now_monotonic(), lua_isnoneornil(L, 3) ? PDK_NEVER : pdk_seconds(luaL_checknumber(L, 3)));
    luaL_Buffer b;
    char *into = luaL_buffinitsize(L, &b, max);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    struct pollfd p = { .fd = fd, .events = POLLIN };
    pdk_script_block(L);
    int ready = pdk_poll_limited(&p, 1, deadline, &err, "reading");
    ssize_t n = ready > 0 ? read(fd, into, max) : 0;
    int sys = errno;
    pdk_script_unblock(L);
    if (ready < 0) return pdk_raise(L, &err);
    if (ready == 0) return 0;
    if (n < 0) return refused(L, sys);
    luaL_pushresultsize(&b, (size_t)n);
    return 1;
}

static int fd_write(lua_State *L)
{
    size_t len;
    int fd = pdk_procio_fd(L, 1);
    const char *s = luaL_checklstring(L, 2, &len);
    ssize_t n = write(fd, s, len);
    return answered(L, n == (ssize_t)len ? 0 : -1, n < 0 ? errno : ENOSPC);
}

static int fd_pread(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    size_t max = check_size(L, 2, 1 << 24), at = check_size(L, 3, INT64_MAX);
    luaL_Buffer b;
    char *into = luaL_buffinitsize(L, &b, max);
    ssize_t n = pread(fd, into, max, (off_t)at);
    if (n < 0) return refused(L, errno);
    luaL_pushresultsize(&b, (size_t)n);
    return 1;
}

static int fd_pwrite(lua_State *L)
{
    size_t len;
    int fd = pdk_procio_fd(L, 1);
    const char *s = luaL_checklstring(L, 2, &len);
    ssize_t n = pwrite(fd, s, len, (off_t)check_size(L, 3, INT64_MAX));
    return answered(L, n == (ssize_t)len ? 0 : -1, n < 0 ? errno : ENOSPC);
}

static void push_stat(lua_State *L, const struct stat *st)
{
    const char *type = S_ISREG(st->st_mode) ? "file" : S_ISDIR(st->st_mode) ? "directory" : S_ISLNK(st->st_mode) ? "link" :
                       S_ISSOCK(st->st_mode) ? "socket" : "other";
    lua_createtable(L, 0, 8);
    lua_pushstring(L, type);
    lua_setfield(L, -2, "type");
    const struct { const char *key; lua_Integer value; } fields[] = {
        { "mode", st->st_mode & 07777 }, { "uid", st->st_uid }, { "gid", st->st_gid }, { "size", st->st_size },
        { "links", (lua_Integer)st->st_nlink }, { "changed", (lua_Integer)st->st_ctim.tv_sec }, { "dev", (lua_Integer)st->st_dev }, { "ino", (lua_Integer)st->st_ino },
    };
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        lua_pushinteger(L, fields[i].value);
        lua_setfield(L, -2, fields[i].key);
    }
}

static int fd_stat(lua_State *L)
{
    struct stat st;
    if (fstat(pdk_procio_fd(L, 1), &st) < 0) return refused(L, errno);
    push_stat(L, &st);
    return 1;
}

static int fd_chown(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    int rc = fchownat(fd, "", (uid_t)luaL_checkinteger(L, 2), (gid_t)luaL_checkinteger(L, 3), AT_EMPTY_PATH);
    return answered(L, rc, errno);
}

static const char *const LOCK_NAMES[] = { "r", "w", "u", NULL };
static const short LOCK_TYPES[] = { F_RDLCK, F_WRLCK, F_UNLCK };

/* fd:lock(type, byte) -> whether it was taken */
static int fd_lock(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    short type = LOCK_TYPES[luaL_checkoption(L, 2, NULL, LOCK_NAMES)];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lock_range(fd, type, luaL_checkinteger(L, 3), 1, &err);
    if (rc < 0) return pdk_raise(L, &err);
    lua_pushboolean(L, rc);
    return 1;
}

/* fd:locked(type, byte) -> whether another description's lock stands in the way */
static int fd_locked(lua_State *L)
{
    int fd = pdk_procio_fd(L, 1);
    short type = LOCK_TYPES[luaL_checkoption(L, 2, NULL, LOCK_NAMES)];
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lock_test(fd, type, luaL_checkinteger(L, 3), 1, &err);
    if (rc < 0) return pdk_raise(L, &err);
    lua_pushboolean(L, rc);
    return 1;
}

/* fd:ended(seconds) -> whether the process behind this pidfd has ended, with all of its pid namespace when it is pid 1 */
static int fd_ended(lua_State *L)
{
    struct pollfd p = { .fd = pdk_procio_fd(L, 1), .events = POLLIN };
    pdk_ns deadline = pdk_after(pdk_now_monotonic(), pdk_seconds(luaL_checknumber(L, 2)));
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_script_block(L);
    int ready = pdk_poll_limited(&p, 1, deadline, &err, "waiting for a process");
    pdk_script_unblock(L);
    if (ready < 0) return pdk_raise(L, &err);
    lua_pushboolean(L, ready);
    return 1;
}

static const luaL_Reg FD_METHODS[] = {
    { "close", fd_close },   { "no", fd_no },         { "read", fd_read }, { "write", fd_write }, { "pread", fd_pread },
    { "pwrite", fd_pwrite }, { "stat", fd_stat },     { "chown", fd_chown }, { "lock", fd_lock }, { "locked", fd_locked },
    { "ended", fd_ended },   { "is_open", fd_is_open }, { NULL, NULL },
};

/* ---- opening ------------------------------------------------------------------------------------------------ */

static int parse_how(lua_State *L, int index)
{
    int flags = O_CLOEXEC | O_NOCTTY;
    for (const char *how = luaL_checkstring(L, index); *how != 0; how++) {
        switch (*how) {
        case 'r': break;
        case 'w': flags |= O_RDWR; break;
        case 'p': flags |= O_PATH; break;
        case 'd': flags |= O_DIRECTORY; break;
        case 'c': flags |= O_CREAT; break;
        case 'x': flags |= O_EXCL; break;
        case 'n': flags |= O_NOFOLLOW; break;
        default: luaL_argerror(L, index, "letters are r, w, p, d, c, x, n");
        }
    }
    return flags;
}

static int proc_open(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    int flags = parse_how(L, 2);
    mode_t mode = (mode_t)luaL_optinteger(L, 3, 0600);
    int dir = opt_dir(L, 4);
    int *fd = pdk_procio_push_fd(L);
    pdk_script_block(L);
    *fd = openat(dir, path, flags, mode);
    int sys = errno;
    pdk_script_unblock(L);
    return *fd < 0 ? refused(L, sys) : 1;
}

static int proc_pipe(lua_State *L)
{
    int *in = pdk_procio_push_fd(L), *out = pdk_procio_push_fd(L), both[2];
    if (pipe2(both, O_CLOEXEC) < 0) return refused(L, errno);
    *in = both[0];
    *out = both[1];
    return 2;
}

static int proc_memfd(lua_State *L)
{
    size_t len;
    const char *bytes = luaL_checklstring(L, 1, &len);
    int *fd = pdk_procio_push_fd(L);
    *fd = memfd_create("paddock", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || pwrite(*fd, bytes, len, 0) != (ssize_t)len) return refused(L, errno);
    /* The child gets this very description: it must not be able to write into what others may read later. */
    if (fcntl(*fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SHRINK) < 0) return refused(L, errno);
    return 1;
}

/* A place for a few lines of standard error, which nobody has to read while the child runs and which cannot grow. */
static int proc_capture(lua_State *L)
{
    size_t size = check_size(L, 1, 1 << 20);
    int *fd = pdk_procio_push_fd(L);
    *fd = memfd_create("paddock-stderr", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0 || ftruncate(*fd, (off_t)size) < 0 || fcntl(*fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK) < 0)
        return refused(L, errno);
    return 1;
}

static int proc_listen(lua_State *L)
{
    int dir = pdk_procio_fd(L, 1);
    const char *name = luaL_checkstring(L, 2);
    struct sockaddr_un a = { .sun_family = AF_UNIX };
    /* Through the directory's descriptor, since a state directory's path may be longer than a socket's may be. */
    int len = snprintf(a.sun_path, sizeof a.sun_path, "/proc/self/fd/%d/%s", dir, name);
    luaL_argcheck(L, len < (int)sizeof a.sun_path && strchr(name, '/') == NULL, 2, "not a short file name");
    int *fd = pdk_procio_push_fd(L);
    *fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (*fd < 0 || bind(*fd, (struct sockaddr *)&a, sizeof a) < 0) return refused(L, errno);
    if (fchmodat(dir, name, 0600, 0) < 0 || listen(*fd, 128) < 0) {
        int sys = errno;
        unlinkat(dir, name, 0);
        return refused(L, sys);
    }
    return 1;
}

/* ---- small file operations ----------------------------------------------------------------------------------- */

typedef struct name_list { /* read without the Lua mutex, pushed with it */
    char **v;
    size_t len;
} name_list;

static int names_read(int dir, name_list *out)
{
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* a position of its own */
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (d == NULL) {
        int sys = errno;
        if (fd >= 0) close(fd);
        return sys;
    }
    int sys = 0;
    size_t cap = 0;
    for (;;) {
        errno = 0;
        struct dirent *e = readdir(d);
        if (e == NULL) {
            sys = errno;
            break;
        }
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (out->len == cap) {
            char **grown = realloc(out->v, (cap = cap * 2 + 16) * sizeof *grown);
            if (grown == NULL) {
                sys = ENOMEM;
                break;
            }
            out->v = grown;
        }
        if ((out->v[out->len] = strdup(e->d_name)) == NULL) {
            sys = ENOMEM;
            break;
        }
        out->len++;
    }
    closedir(d);
    return sys;
}

static int names_push(lua_State *L)
{
    name_list *list = lua_touserdata(L, 1);
    lua_createtable(L, (int)list->len, 0);
    for (size_t i = 0; i < list->len; i++) {
        lua_pushstring(L, list->v[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

static int proc_names(lua_State *L)
{
    int dir = pdk_procio_fd(L, 1);
    luaL_checkstack(L, 8, NULL);
    lua_pushcfunction(L, names_push);
    name_list list = { 0 };
    pdk_script_block(L);
    int sys = names_read(dir, &list);
    pdk_script_unblock(L);
    int rc = LUA_OK;
    if (sys == 0) {
        lua_pushlightuserdata(L, &list);
        rc = lua_pcall(L, 1, 1, 0);
    }
    for (size_t i = 0; i < list.len; i++) free(list.v[i]);
    free(list.v);
    if (sys != 0) return refused(L, sys);
    return rc == LUA_OK ? 1 : lua_error(L);
}

static int proc_rename(lua_State *L)
{
    int dir = pdk_procio_fd(L, 1);
    const char *from = luaL_checkstring(L, 2), *to = luaL_checkstring(L, 3);
    int rc = renameat(dir, from, dir, to);
    return answered(L, rc, errno);
}

static int proc_unlink(lua_State *L)
{
    int rc = unlinkat(pdk_procio_fd(L, 1), luaL_checkstring(L, 2), 0);
    return answered(L, rc, errno);
}

static int proc_mkdir(lua_State *L)
{
    int rc = mkdirat(opt_dir(L, 1), luaL_checkstring(L, 2), (mode_t)luaL_checkinteger(L, 3));
    return answered(L, rc, errno);
}

static int proc_rmdir(lua_State *L)
{
    int rc = rmdir(luaL_checkstring(L, 1));
    return answered(L, rc, errno);
}

static int proc_put(lua_State *L)
{
    size_t len;
    const char *path = luaL_checkstring(L, 1), *text = luaL_checklstring(L, 2, &len);
    pdk_script_block(L); /* a move between control groups waits for the kernel, 10 ms and more */
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    int sys = fd < 0 ? errno : 0;
    if (fd >= 0) {
        ssize_t n = write(fd, text, len);
        sys = n < 0 ? errno : n != (ssize_t)len ? EIO : 0;
        close(fd);
    }
    pdk_script_unblock(L);
    return answered(L, sys == 0 ? 0 : -1, sys);
}

static int proc_access(lua_State *L)
{
    static const char *const modes[] = { "exists", "read", "write", "execute", NULL };
    static const int bits[] = { F_OK, R_OK, W_OK, X_OK };
    const char *path = luaL_checkstring(L, 1);
    lua_pushboolean(L, access(path, bits[luaL_checkoption(L, 2, "exists", modes)]) == 0);
    return 1;
}

/* privileged(path) -> "setuid", "setgid" or "file capabilities" when running it gives more rights than the caller has */
static int proc_privileged(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1), *why = NULL;
    struct stat st;
    if (stat(path, &st) < 0) return refused(L, errno);
    if (st.st_mode & S_ISUID) why = "setuid";
    else if ((st.st_mode & S_ISGID) && (st.st_mode & S_IXGRP)) why = "setgid";
    else if (getxattr(path, "security.capability", NULL, 0) > 0) why = "file capabilities";
    lua_pushstring(L, why);
    return 1;
}

/* readlink(path [, dir]) -> where the link leads */
static int proc_readlink(lua_State *L)
{
    char to[4096];
    ssize_t n = readlinkat(opt_dir(L, 2), luaL_checkstring(L, 1), to, sizeof to);
    if (n < 0 || n == sizeof to) return refused(L, n < 0 ? errno : ENAMETOOLONG);
    lua_pushlstring(L, to, (size_t)n);
    return 1;
}

/* homes() -> the files this code runs from: the library (or module), and the program. What is installed with it is near. */
static int proc_homes(lua_State *L)
{
    char exe[4096];
    Dl_info where;
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe);
    lua_pushstring(L, dladdr((void *)(uintptr_t)pdk_procio_open, &where) != 0 ? where.dli_fname : "");
    lua_pushlstring(L, exe, n > 0 ? (size_t)n : 0);
    return 2;
}

static int proc_seccomp(lua_State *L)
{
    int *fd = pdk_procio_push_fd(L);
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    *fd = pdk_seccomp_fd(&err);
    return *fd < 0 ? pdk_raise(L, &err) : 1;
}

static const luaL_Reg FUNCTIONS[] = {
    { "open", proc_open },     { "pipe", proc_pipe },     { "memfd", proc_memfd },   { "capture", proc_capture },
    { "listen", proc_listen }, { "names", proc_names },   { "rename", proc_rename }, { "unlink", proc_unlink },
    { "mkdir", proc_mkdir },   { "rmdir", proc_rmdir },   { "put", proc_put },       { "access", proc_access },
    { "privileged", proc_privileged }, { "seccomp", proc_seccomp }, { "readlink", proc_readlink },
    { "homes", proc_homes },   { NULL, NULL },
};

void pdk_procio_open(lua_State *L)
{
    if (luaL_newmetatable(L, FD_TYPE)) {
        luaL_newlib(L, FD_METHODS);
        lua_setfield(L, -2, "__index");
        lua_pushcfunction(L, fd_close);
        lua_setfield(L, -2, "__gc");
        lua_pushcfunction(L, fd_close);
        lua_setfield(L, -2, "__close");
        lua_pushcfunction(L, fd_tostring);
        lua_setfield(L, -2, "__tostring");
    }
    lua_pop(L, 1);
    luaL_newlib(L, FUNCTIONS);
    pdk_procio_open_processes(L);
}
