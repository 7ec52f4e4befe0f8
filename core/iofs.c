/* iofs.c -- io.fs: files of the host, for backends.
 *
 * What changes a file never follows a link at the end of its path: unlink, rename, chmod, chown and write_atomic act on the
 * name that was given. A disk may hang, so each call gives the Lua mutex up. A refusal is nil and an io_error that names the
 * path, with the code as its reason ("ENOENT").
 */
#include "iolib.h"

#include "fd.h"
#include "script.h"
#include "sync.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define READ_MAX ((lua_Integer)64 << 20)

/* ---- the work, without Lua ------------------------------------------------------------------------------ */

static int refuse(pdk_error *err, int sys, const char *what, const char *path)
{
    const char *name = strerrorname_np(sys);
    pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot %s %.250s", what, path);
    if (err != NULL)
        snprintf(err->reason, sizeof err->reason, "%s", name == NULL ? "other" : name);
    return -1;
}

/* mkdir, for a folder and all above it, whose modes are the umask's. 1 = made, 0 = it was there, -1 = errno. */
static int make_dirs(char *path, mode_t mode)
{
    struct stat st;
    if (mkdir(path, mode) == 0)
        return 1;
    char *slash = strrchr(path, '/');
    if (errno == ENOENT && slash != NULL && slash != path) {
        *slash = '\0';
        int rc = make_dirs(path, 0777);
        *slash = '/';
        if (rc < 0)
            return -1;
        if (mkdir(path, mode) == 0)
            return 1;
    }
    if (errno != EEXIST || stat(path, &st) < 0)
        return -1;
    errno = ENOTDIR;
    return S_ISDIR(st.st_mode) ? 0 : -1;
}

/* The mode is that of the last folder, whatever the umask; one that was there keeps its own. */
static int make_folder(char *path, mode_t mode, pdk_error *err)
{
    size_t len = strlen(path);
    while (len > 1 && path[len - 1] == '/')
        path[--len] = '\0';
    int rc = make_dirs(path, mode & 0777);
    if (rc < 0)
        return refuse(err, errno, "make the folder", path);
    if (rc == 0)
        return 0;
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 || fchmod(fd, mode) < 0 ? refuse(err, errno, "set the mode of", path) : 1;
}

/* The whole of a regular file. A pipe or a device is refused instead of waited for. */
static int read_file(const char *path, size_t max, char **data, size_t *len, pdk_error *err)
{
    struct stat st;
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        return refuse(err, errno, "read", path);
    if (!S_ISREG(st.st_mode))
        return refuse(err, S_ISDIR(st.st_mode) ? EISDIR : EINVAL, "read (not a regular file)", path);
    size_t cap = 0;
    for (;;) {
        if (*len == cap) { /* a file in /proc says 0 bytes and has some */
            cap = cap > 0 ? cap * 2 : st.st_size > 0 && (size_t)st.st_size < max ? (size_t)st.st_size + 1 : 4096;
            char *grown = realloc(*data, cap);
            if (grown == NULL)
                return refuse(err, ENOMEM, "read", path);
            *data = grown;
        }
        ssize_t n = read(fd, *data + *len, cap - *len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return refuse(err, errno, "read", path);
        if (n == 0)
            return 0;
        *len += (size_t)n;
        if (*len > max)
            return refuse(err, EFBIG, "read", path);
    }
}

static int write_all(int fd, const char *data, size_t len)
{
    while (len > 0) {
        ssize_t n = write(fd, data, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        data += n;
        len -= (size_t)n;
    }
    return 0;
}

static void random_name(char *to, size_t size, const char *prefix)
{
    uint64_t r;
    pdk_random(&r, sizeof r);
    snprintf(to, size, "%s%016llx", prefix, (unsigned long long)r);
}

/* Into a new file beside it, then over it: a reader sees the old content or the new one. */
static int write_atomic(const char *path, const char *data, size_t len, mode_t mode, bool sync, pdk_error *err)
{
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    char dir[PATH_MAX] = ".", temp[40];
    size_t n = slash == NULL ? 0 : slash == path ? 1 : (size_t)(slash - path);
    if (*base == '\0' || strcmp(base, ".") == 0 || strcmp(base, "..") == 0)
        return refuse(err, EISDIR, "write", path);
    if (n >= sizeof dir)
        return refuse(err, ENAMETOOLONG, "write", path);
    if (n > 0) {
        memcpy(dir, path, n);
        dir[n] = '\0';
    }
    PDK_AUTO_FD at = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (at < 0)
        return refuse(err, errno, "write", path);
    random_name(temp, sizeof temp, ".paddock-");
    PDK_AUTO_FD fd = openat(at, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return refuse(err, errno, "write", path);
    if (write_all(fd, data, len) < 0 || fchmod(fd, mode) < 0 || (sync && fsync(fd) < 0) ||
        renameat(at, temp, at, base) < 0) {
        int why = errno;
        unlinkat(at, temp, 0);
        return refuse(err, why, "write", path);
    }
    if (sync && fsync(at) < 0)
        return refuse(err, errno, "sync the folder of", path);
    return 0;
}

typedef struct names {
    char **v;
    size_t n, cap;
} names;

static void names_free(void *block)
{
    names *l = block;
    for (size_t i = 0; i < l->n; i++)
        free(l->v[i]);
    free(l->v);
    free(l);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int names_add(names *l, const char *name)
{
    if (l->n == l->cap) {
        size_t cap = l->cap * 2 + 16;
        char **grown = realloc(l->v, cap * sizeof *grown);
        if (grown == NULL)
            return -1;
        l->v = grown;
        l->cap = cap;
    }
    l->v[l->n] = strdup(name);
    return l->v[l->n] == NULL ? -1 : (l->n++, 0);
}

static int list_dir(const char *path, names *l, pdk_error *err)
{
    DIR *d = opendir(path);
    if (d == NULL)
        return refuse(err, errno, "list", path);
    int why = 0;
    for (;;) {
        errno = 0;
        const struct dirent *e = readdir(d);
        if (e == NULL) {
            why = errno;
            break;
        }
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && names_add(l, e->d_name) < 0) {
            why = ENOMEM;
            break;
        }
    }
    closedir(d);
    if (why != 0)
        return refuse(err, why, "list", path);
    if (l->n > 0)
        qsort(l->v, l->n, sizeof l->v[0], by_name);
    return 0;
}

static int set_mode(const char *path, mode_t mode, pdk_error *err)
{
    struct stat st;
    char by_fd[40];
    PDK_AUTO_FD fd = open(path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) < 0)
        return refuse(err, errno, "set the mode of", path);
    if (S_ISLNK(st.st_mode))
        return refuse(err, ELOOP, "set the mode of the link", path);
    snprintf(by_fd, sizeof by_fd, "/proc/self/fd/%d", fd); /* fchmod takes no O_PATH descriptor */
    return chmod(by_fd, mode) < 0 ? refuse(err, errno, "set the mode of", path) : 0;
}

/* ---- the functions -------------------------------------------------------------------------------------- */

static const char *check_path(lua_State *L, int index, const char *what)
{
    const char *path = pdk_io_check_text(L, index, what);
    if (*path == '\0' || strlen(path) >= PATH_MAX)
        pdk_io_bad(L, "%s must be a path, not empty and shorter than %d bytes", what, PATH_MAX);
    return path;
}

static mode_t check_mode(lua_State *L, int index, mode_t otherwise, const char *what)
{
    if (lua_isnoneornil(L, index))
        return otherwise;
    lua_Integer mode = lua_isinteger(L, index) ? lua_tointeger(L, index) : -1;
    if (mode < 0 || mode > 07777)
        pdk_io_bad(L, "%s: the mode must be an integer from 0 to 4095 (octal 7777)", what);
    return (mode_t)mode;
}

static int done(lua_State *L, pdk_held *h, int rc)
{
    if (rc < 0)
        return pdk_io_failed(L, h);
    lua_pushboolean(L, true);
    return 1;
}

/* mkdir(path [, mode]) -> true, whether it was made. Parents too; the mode (octal 700) is that of the last one. */
static int l_mkdir(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.mkdir: the path");
    mode_t mode = check_mode(L, 2, 0700, "fs.mkdir");
    pdk_held *h = pdk_io_hold(L);
    char *copy = h->block = strdup(path);
    if (copy == NULL)
        return luaL_error(L, "fs.mkdir: not enough memory");
    pdk_script_block(L);
    int rc = make_folder(copy, mode, &h->err);
    pdk_script_unblock(L);
    if (rc < 0)
        return pdk_io_failed(L, h);
    pdk_io_release(h);
    lua_pushboolean(L, true);
    lua_pushboolean(L, rc == 1);
    return 2;
}

/* read(path [, max]) -> bytes. Longer than max (64 MiB) is an error. */
static int l_read(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.read: the path");
    lua_Integer max = luaL_opt(L, lua_tointeger, 2, READ_MAX);
    if (!lua_isnoneornil(L, 2) && (!lua_isinteger(L, 2) || max < 0))
        pdk_io_bad(L, "fs.read: max must be a number of bytes, 0 or more");
    pdk_held *h = pdk_io_hold(L);
    char *data = NULL;
    size_t len = 0;
    pdk_script_block(L);
    int rc = read_file(path, (size_t)max, &data, &len, &h->err);
    pdk_script_unblock(L);
    h->block = data;
    if (rc < 0)
        return pdk_io_failed(L, h);
    lua_pushlstring(L, data, len);
    pdk_io_release(h);
    return 1;
}

/* write_atomic(path, bytes [, mode [, sync]]) -> true. The mode (octal 600) holds whatever the umask. */
static int l_write_atomic(lua_State *L)
{
    size_t len;
    const char *path = check_path(L, 1, "fs.write_atomic: the path");
    if (lua_type(L, 2) != LUA_TSTRING)
        pdk_io_bad(L, "fs.write_atomic: the data must be a string, not %s", luaL_typename(L, 2));
    const char *data = lua_tolstring(L, 2, &len);
    mode_t mode = check_mode(L, 3, 0600, "fs.write_atomic");
    bool sync = lua_toboolean(L, 4);
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = write_atomic(path, data, len, mode, sync, &h->err);
    pdk_script_unblock(L);
    return done(L, h, rc);
}

/* A call of one path that answers 0 or errno's -1. */
static int simple(lua_State *L, int (*fn)(const char *), const char *arg, const char *verb)
{
    const char *path = check_path(L, 1, arg);
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = fn(path) < 0 ? refuse(&h->err, errno, verb, path) : 0;
    pdk_script_unblock(L);
    return done(L, h, rc);
}

static int l_unlink(lua_State *L)
{
    return simple(L, unlink, "fs.unlink: the path", "unlink");
}

static int l_rmdir(lua_State *L)
{
    return simple(L, rmdir, "fs.rmdir: the path", "remove the folder");
}

/* rename(from, to) -> true */
static int l_rename(lua_State *L)
{
    const char *from = check_path(L, 1, "fs.rename: the old path"), *to = check_path(L, 2, "fs.rename: the new path");
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = rename(from, to) < 0 ? refuse(&h->err, errno, "rename", from) : 0;
    pdk_script_unblock(L);
    return done(L, h, rc);
}

/* list(dir) -> sorted names, without . and .. */
static int l_list(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.list: the path");
    pdk_held *h = pdk_io_hold(L);
    names *l = calloc(1, sizeof *l);
    if (l == NULL)
        return luaL_error(L, "fs.list: not enough memory");
    h->block = l;
    h->release = names_free;
    pdk_script_block(L);
    int rc = list_dir(path, l, &h->err);
    pdk_script_unblock(L);
    if (rc < 0)
        return pdk_io_failed(L, h);
    lua_createtable(L, (int)(l->n < 10000 ? l->n : 10000), 0);
    for (size_t i = 0; i < l->n; i++) {
        lua_pushstring(L, l->v[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    pdk_io_release(h);
    return 1;
}

static const char *type_name(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return "file";
    case S_IFDIR: return "directory";
    case S_IFLNK: return "link";
    case S_IFSOCK: return "socket";
    case S_IFIFO: return "pipe";
    case S_IFCHR: return "character device";
    default: return "block device";
    }
}

static void set_integer(lua_State *L, const char *name, lua_Integer i)
{
    lua_pushinteger(L, i);
    lua_setfield(L, -2, name);
}

/* stat(path [, follow]) -> { type, size, mode, uid, gid, mtime, ino, dev, nlink }; a link itself unless `follow` */
static int l_stat(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.stat: the path");
    int flags = lua_toboolean(L, 2) ? 0 : AT_SYMLINK_NOFOLLOW;
    struct stat st;
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = fstatat(AT_FDCWD, path, &st, flags) < 0 ? refuse(&h->err, errno, "look at", path) : 0;
    pdk_script_unblock(L);
    if (rc < 0)
        return pdk_io_failed(L, h);
    lua_createtable(L, 0, 9);
    lua_pushstring(L, type_name(st.st_mode));
    lua_setfield(L, -2, "type");
    lua_pushnumber(L, (double)st.st_mtim.tv_sec + (double)st.st_mtim.tv_nsec / 1e9);
    lua_setfield(L, -2, "mtime");
    set_integer(L, "size", st.st_size);
    set_integer(L, "mode", st.st_mode & 07777);
    set_integer(L, "uid", st.st_uid);
    set_integer(L, "gid", st.st_gid);
    set_integer(L, "ino", (lua_Integer)st.st_ino);
    set_integer(L, "dev", (lua_Integer)st.st_dev);
    set_integer(L, "nlink", (lua_Integer)st.st_nlink);
    return 1;
}

static uid_t check_id(lua_State *L, int index, const char *what)
{
    if (lua_isnoneornil(L, index))
        return (uid_t)-1; /* stays */
    lua_Integer id = lua_isinteger(L, index) ? lua_tointeger(L, index) : -1;
    if (id < 0 || id >= UINT32_MAX)
        pdk_io_bad(L, "fs.chown: the %s must be an integer from 0 to 4294967294, or nil", what);
    return (uid_t)id;
}

/* chown(path, uid, gid) -> true; nil leaves an id as it is; a link is changed itself */
static int l_chown(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.chown: the path");
    uid_t uid = check_id(L, 2, "uid"), gid = check_id(L, 3, "gid");
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = lchown(path, uid, gid) < 0 ? refuse(&h->err, errno, "change the owner of", path) : 0;
    pdk_script_unblock(L);
    return done(L, h, rc);
}

/* chmod(path, mode) -> true; a link is refused */
static int l_chmod(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.chmod: the path");
    if (lua_isnoneornil(L, 2))
        pdk_io_bad(L, "fs.chmod: the mode is missing");
    mode_t mode = check_mode(L, 2, 0, "fs.chmod");
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = set_mode(path, mode, &h->err);
    pdk_script_unblock(L);
    return done(L, h, rc);
}

/* exists(path) -> boolean; a link that leads nowhere exists */
static int l_exists(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.exists: the path");
    struct stat st;
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    int rc = lstat(path, &st), why = errno;
    pdk_script_unblock(L);
    if (rc < 0 && why != ENOENT && why != ENOTDIR) {
        refuse(&h->err, why, "look at", path);
        return pdk_io_failed(L, h);
    }
    lua_pushboolean(L, rc == 0);
    return 1;
}

/* realpath(path) -> the path without links, . and .. */
static int l_realpath(lua_State *L)
{
    const char *path = check_path(L, 1, "fs.realpath: the path");
    pdk_held *h = pdk_io_hold(L);
    pdk_script_block(L);
    char *real = realpath(path, NULL);
    if (real == NULL)
        refuse(&h->err, errno, "resolve", path);
    pdk_script_unblock(L);
    if (real == NULL)
        return pdk_io_failed(L, h);
    h->block = real;
    lua_pushstring(L, real);
    pdk_io_release(h);
    return 1;
}

/* tmpname(dir [, prefix]) -> a path in dir that nobody else will think of; nothing is made */
static int l_tmpname(lua_State *L)
{
    char name[300];
    const char *dir = check_path(L, 1, "fs.tmpname: the folder");
    const char *prefix = lua_isnoneornil(L, 2) ? "paddock-" : pdk_io_check_text(L, 2, "fs.tmpname: the prefix");
    if (strchr(prefix, '/') != NULL || strlen(prefix) > 200)
        pdk_io_bad(L, "fs.tmpname: the prefix must be at most 200 bytes, without a slash");
    random_name(name, sizeof name, prefix);
    lua_pushfstring(L, "%s/%s", dir, name);
    return 1;
}

void pdk_iofs_open(lua_State *L)
{
    static const luaL_Reg functions[] = {
        { "mkdir", l_mkdir },     { "read", l_read },     { "write_atomic", l_write_atomic },
        { "unlink", l_unlink },   { "rmdir", l_rmdir },   { "rename", l_rename },
        { "list", l_list },       { "stat", l_stat },     { "chown", l_chown },
        { "chmod", l_chmod },     { "exists", l_exists }, { "realpath", l_realpath },
        { "tmpname", l_tmpname }, { NULL, NULL },
    };
    luaL_newlib(L, functions);
}
