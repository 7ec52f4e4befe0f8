/* stage.c -- building a root file system with the mount calls of Linux 5.12: no path of a source is ever resolved twice, and
 * each mount has its flags before it appears.
 *
 * Sources are cloned before the namespace is left, since a mount of another namespace cannot be cloned, and attached
 * afterwards, since they would appear on the host otherwise. */
#include "stage.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdint.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

/* See proc.c: this memory is shared with the host, a sanitizer's bookkeeping is not. */
#define UNINSTRUMENTED __attribute__((no_sanitize("address", "thread", "undefined"), noinline))

/* By number: glibc 2.36 and the kernel's headers define them in files that exclude each other. */
#define TREE_CLONE      1u
#define MOVE_FROM_EMPTY 0x4u
#define MOVE_TO_EMPTY   0x40u
#define ATTR_RDONLY     0x1u
#define ATTR_NOSUID     0x2u
#define ATTR_NODEV      0x4u
#define RESOLVE_PLAIN   (0x02u | 0x04u | 0x08u) /* no magic links, no links, beneath */
#define OWN_MAX         8

struct attributes { uint64_t set, clear, propagation, userns; }; /* struct mount_attr */
struct how { uint64_t flags, mode, resolve; };                     /* struct open_how */

typedef struct stage {
    int trees[PDK_STAGE_MAX];
    bool folders[PDK_STAGE_MAX]; /* whether the tree's root is one */
    int base;                    /* PDK_STAGE_DIR */
    dev_t own[OWN_MAX];          /* the file systems that were made here */
    size_t own_count;
} stage;

UNINSTRUMENTED static bool fail(const char **failed, const char *what)
{
    *failed = what;
    return false;
}

UNINSTRUMENTED static bool clone_tree(stage *s, size_t i, const pdk_stage_op *op, const char **failed)
{
    unsigned flags = TREE_CLONE | AT_RECURSIVE | O_CLOEXEC;
    long fd = op->fd >= 0 ? syscall(SYS_open_tree, op->fd, "", flags | AT_EMPTY_PATH)
                          : syscall(SYS_open_tree, AT_FDCWD, op->text, flags);
    if (fd < 0) return fail(failed, "clone a mount source");
    struct stat st;
    if (syscall(SYS_newfstatat, fd, "", &st, AT_EMPTY_PATH) < 0) return fail(failed, "look at a mount source");
    struct attributes a = { .set = ATTR_NOSUID | ATTR_NODEV | (op->read_only ? ATTR_RDONLY : 0) };
    if (syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH | AT_RECURSIVE, &a, sizeof a) < 0)
        return fail(failed, "set a mount's flags (Linux 5.12 or newer is needed)");
    s->trees[i] = (int)fd;
    s->folders[i] = S_ISDIR(st.st_mode);
    return true;
}

UNINSTRUMENTED static bool own_file_system(stage *s, const char *path, const char **failed)
{
    struct stat st;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &st, 0) < 0) return fail(failed, "look at a new file system");
    if (s->own_count < OWN_MAX) s->own[s->own_count++] = st.st_dev;
    return true;
}

UNINSTRUMENTED static bool is_own(const stage *s, dev_t dev)
{
    for (size_t i = 0; i < s->own_count; i++)
        if (s->own[i] == dev) return true;
    return false;
}

UNINSTRUMENTED static bool make_file(const pdk_stage_op *op, const char **failed)
{
    long fd = syscall(SYS_openat, AT_FDCWD, op->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0 || syscall(SYS_write, fd, op->text, op->len) != (long)op->len) return fail(failed, "write a file of the sandbox");
    syscall(SYS_close, fd);
    return true;
}

UNINSTRUMENTED static bool make_node(const pdk_stage_op *op, const char **failed)
{
    unsigned long dev = makedev(op->major, op->minor);
    if (syscall(SYS_mknodat, AT_FDCWD, op->path, S_IFCHR | 0666, dev) == 0) return true;
    /* A container's root may not make nodes: the host's is bound then. */
    if (errno != EPERM || syscall(SYS_mknodat, AT_FDCWD, op->path, S_IFREG | 0666, 0) < 0 ||
        syscall(SYS_mount, op->text, op->path, NULL, MS_BIND, NULL) < 0 ||
        syscall(SYS_mount, NULL, op->path, NULL, MS_BIND | MS_REMOUNT | MS_NOSUID | MS_NOEXEC, NULL) < 0)
        return fail(failed, "make a device");
    return true;
}

UNINSTRUMENTED static bool attach_tree(const stage *s, size_t i, const pdk_stage_op *op, const char **failed)
{
    struct how how = { .flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_PLAIN };
    struct stat st;
    long parent = syscall(SYS_openat2, s->base, op->parent, &how, sizeof how);
    if (parent < 0 || syscall(SYS_newfstatat, parent, "", &st, AT_EMPTY_PATH) < 0)
        return fail(failed, "reach a mount target (links are not followed)");
    if (is_own(s, st.st_dev)) { /* EEXIST is found out by what follows */
        if (s->folders[i]) syscall(SYS_mkdirat, parent, op->name, 0755);
        else syscall(SYS_mknodat, parent, op->name, S_IFREG | 0644, 0);
    }
    how.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC;
    long target = syscall(SYS_openat2, parent, op->name, &how, sizeof how);
    if (target < 0) return fail(failed, "find a mount target (inside another mount it has to be there already)");
    if (syscall(SYS_move_mount, s->trees[i], "", target, "", MOVE_FROM_EMPTY | MOVE_TO_EMPTY) < 0)
        return fail(failed, "mount on a target");
    syscall(SYS_close, target);
    syscall(SYS_close, parent);
    syscall(SYS_close, s->trees[i]);
    return true;
}

UNINSTRUMENTED static bool one(stage *s, size_t i, const pdk_stage_op *op, const char **failed)
{
    struct attributes sealed = { .set = ATTR_RDONLY };
    switch (op->kind) {
    case PDK_STAGE_ROOT:
        if (syscall(SYS_mount, "tmpfs", PDK_STAGE_DIR, "tmpfs", MS_NOSUID | MS_NODEV, op->text) < 0)
            return fail(failed, "mount the sandbox's root");
        s->base = (int)syscall(SYS_openat, AT_FDCWD, PDK_STAGE_DIR, O_PATH | O_DIRECTORY | O_CLOEXEC);
        return s->base >= 0 ? own_file_system(s, PDK_STAGE_DIR, failed) : fail(failed, "open the sandbox's root");
    case PDK_STAGE_FOLDER:
        return syscall(SYS_mkdirat, AT_FDCWD, op->path, op->mode) == 0 || errno == EEXIST || fail(failed, "make a folder");
    case PDK_STAGE_LINK:
        return syscall(SYS_symlinkat, op->text, AT_FDCWD, op->path) == 0 || fail(failed, "make a link");
    case PDK_STAGE_FILE: return make_file(op, failed);
    case PDK_STAGE_NODE: return make_node(op, failed);
    case PDK_STAGE_TMPFS: /* devices only in /dev, which is sealed: op->mode is MS_NODEV or 0 */
        if (syscall(SYS_mount, "tmpfs", op->path, "tmpfs", MS_NOSUID | op->mode, op->text) < 0)
            return fail(failed, "mount a tmpfs");
        return own_file_system(s, op->path, failed);
    case PDK_STAGE_PTS:
        return syscall(SYS_mount, "devpts", op->path, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620") == 0 ||
               fail(failed, "mount a devpts");
    case PDK_STAGE_TREE: return attach_tree(s, i, op, failed);
    case PDK_STAGE_SEAL:
        return syscall(SYS_mount_setattr, AT_FDCWD, op->path, 0, &sealed, sizeof sealed) == 0 || fail(failed, "seal a mount");
    }
    return fail(failed, "understand a stage operation");
}

UNINSTRUMENTED bool pdk_stage_run(const pdk_stage_op *ops, size_t n, const char **failed)
{
    stage s;
    s.base = -1;
    s.own_count = 0;
    for (size_t i = 0; i < n; i++)
        if (ops[i].kind == PDK_STAGE_TREE && !clone_tree(&s, i, &ops[i], failed)) return false;
    if (syscall(SYS_unshare, CLONE_NEWNS) < 0) return fail(failed, "make a mount namespace");
    if (syscall(SYS_mount, "none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return fail(failed, "make mounts private");
    syscall(SYS_umask, 0);
    for (size_t i = 0; i < n; i++)
        if (!one(&s, i, &ops[i], failed)) return false;
    if (s.base >= 0) syscall(SYS_close, s.base);
    return true;
}
