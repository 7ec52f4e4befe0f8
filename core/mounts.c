/* mounts.c -- carries out what policies/mounts.lua composed. A policy does no I/O: here sources are checked against the roots
 * that the configuration allows, directories made, modes set.
 *
 * Two passes: every check of every mount first, then the changes, so that a refused mount leaves nothing half-made. Paths are
 * resolved beneath their root by the kernel (openat2), so that no link and no ".." leads out of it.
 */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
}
#define AUTO_FD __attribute__((cleanup(close_fd))) int

typedef struct mount { /* one of the list, while it is checked and made; strings are the view's */
    const char *source, *target;
    char root[4096];        /* the allowed root that it lies in; "" = configured, no root needed */
    const char *below;      /* source relative to root, or "." */
    bool read_only, owner_only, if_exists, leave_out;
    long create;            /* mode, or -1 */
} mount;

static int refuse(pdk_error *err, int sys, const char *source, const char *why)
{
    return pdk_fail(err, PDK_E_POLICY_ERROR, sys, "mounts: source %s %s", source, why);
}

static int beneath(int root, const char *path, int flags)
{
    struct open_how how = { .flags = (unsigned)(flags | O_CLOEXEC), .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS };
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

static bool normal(const char *path)
{
    if (path[0] != '/' || strlen(path) > 4000)
        return false;
    for (const char *p = path; (p = strchr(p, '/')) != NULL;) {
        p++;
        if (strncmp(p, "../", 3) == 0 || strcmp(p, "..") == 0 || strncmp(p, "./", 2) == 0 || strcmp(p, ".") == 0)
            return false;
    }
    return true;
}

/* The longest allowed root that holds the source. */
static int find_root(mount *m, pdk_view roots, pdk_error *err)
{
    size_t cursor = 0, best = 0, n;
    pdk_view key, value;
    while (pdk_view_next(roots, &cursor, &key, &value)) {
        const char *root = pdk_view_str(value, &n);
        if (root == NULL)
            continue;
        while (n > 1 && root[n - 1] == '/')
            n--;
        bool inside = n == 1 || (strncmp(m->source, root, n) == 0 && (m->source[n] == '/' || m->source[n] == '\0'));
        if (inside && n > best && n < sizeof m->root) {
            best = n;
            memcpy(m->root, root, n);
            m->root[n] = '\0';
        }
    }
    if (best == 0)
        return refuse(err, 0, m->source, "is outside the option mount_roots; add its directory there or change the policy");
    m->below = m->source + best;
    while (*m->below == '/')
        m->below++;
    if (*m->below == '\0')
        m->below = ".";
    return 0;
}

static int parse(pdk_view v, mount *m, pdk_error *err)
{
    memset(m, 0, sizeof *m);
    m->source = pdk_info_str(v, "source");
    m->target = pdk_info_str(v, "target");
    m->read_only = pdk_view_bool(pdk_view_get(v, "read_only"), false);
    m->if_exists = pdk_view_bool(pdk_view_get(v, "if_exists"), false);
    m->owner_only = pdk_view_bool(pdk_view_get(v, "owner_only"), false);
    const char *create = pdk_info_str(v, "create");
    m->create = create == NULL ? -1 : strtol(create, NULL, 8);
    if (m->source == NULL || m->target == NULL)
        return pdk_fail(err, PDK_E_POLICY_ERROR, 0, "mounts: a mount needs source and target");
    if (!normal(m->source))
        return refuse(err, 0, m->source, "must be an absolute path without . and .. parts");
    return 0;
}

/* ---- owner_only trees ---- */

typedef int (*visit)(int dir, const char *name, const struct stat *st, const char *source, pdk_error *err);

static int walk(int dir, int depth, visit each, const char *source, pdk_error *err)
{
    if (depth > 64)
        return refuse(err, 0, source, "is nested too deeply for owner_only");
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (d == NULL) {
        if (fd >= 0)
            close(fd);
        return refuse(err, errno, source, "cannot be read");
    }
    int rc = 0;
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        struct stat st;
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (fstatat(dir, e->d_name, &st, AT_SYMLINK_NOFOLLOW) < 0) {
            rc = refuse(err, errno, source, "cannot be read");
            break;
        }
        rc = each(dir, e->d_name, &st, source, err);
        if (rc == 0 && S_ISDIR(st.st_mode)) {
            AUTO_FD sub = openat(dir, e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            rc = sub < 0 ? refuse(err, errno, source, "cannot be read") : walk(sub, depth + 1, each, source, err);
        }
    }
    closedir(d);
    return rc;
}

static int no_links(int dir, const char *name, const struct stat *st, const char *source, pdk_error *err)
{
    (void)dir;
    if (S_ISDIR(st->st_mode) || S_ISREG(st->st_mode))
        return 0;
    return pdk_fail(err, PDK_E_POLICY_ERROR, 0, "mounts: source %s holds %s, which is %s; owner_only takes files and directories only",
                    source, name, S_ISLNK(st->st_mode) ? "a symbolic link" : "no plain file");
}

static int make_private(int dir, const char *name, const struct stat *st, const char *source, pdk_error *err)
{
    mode_t want = S_ISDIR(st->st_mode) ? 0700 : 0600;
    if ((st->st_mode & 07777) == want)
        return 0;
    AUTO_FD fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC); /* never through a link put there since */
    if (fd < 0 || fchmod(fd, want) < 0)
        return refuse(err, errno, source, "cannot be made owner-only");
    return 0;
}

/* ---- the two passes ---- */

static int check(mount *m, pdk_view roots, pdk_error *err)
{
    if (find_root(m, roots, err) < 0)
        return -1;
    AUTO_FD root = open(m->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "mounts: cannot open the mount root %s", m->root);
    AUTO_FD fd = beneath(root, m->below, O_PATH);
    int why = errno;
    if (fd < 0 && why == EXDEV)
        return refuse(err, 0, m->source, "leads out of its mount root through a link");
    if (fd < 0 && why != ENOENT)
        return refuse(err, why, m->source, "cannot be opened");
    if (fd < 0 && m->create < 0 && !m->if_exists)
        return refuse(err, 0, m->source, "does not exist; the policy may set create or if_exists");
    m->leave_out = fd < 0 && m->create < 0;
    if (fd < 0 || !m->owner_only)
        return 0;
    struct stat st;
    if (fstat(fd, &st) < 0 || !S_ISDIR(st.st_mode))
        return refuse(err, 0, m->source, "must be a directory for owner_only");
    AUTO_FD tree = beneath(root, m->below, O_RDONLY | O_DIRECTORY);
    return tree < 0 ? refuse(err, errno, m->source, "cannot be read") : walk(tree, 0, no_links, m->source, err);
}

/* mkdir -p of `below` beneath root; the last directory gets its mode whatever the umask. */
static int make_directories(int root, const mount *m, pdk_error *err)
{
    char path[4096];
    size_t len = strlen(m->below);
    memcpy(path, m->below, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        bool last = path[i] == '\0';
        path[i] = '\0';
        char *slash = strrchr(path, '/');
        if (slash != NULL)
            *slash = '\0';
        AUTO_FD parent = beneath(root, slash != NULL ? path : ".", O_PATH | O_DIRECTORY);
        if (slash != NULL)
            *slash = '/';
        if (parent < 0 || (mkdirat(parent, slash != NULL ? slash + 1 : path, last ? 0700 : 0755) < 0 && errno != EEXIST))
            return refuse(err, errno, m->source, "cannot be made");
        if (!last)
            path[i] = '/';
    }
    struct stat st;
    AUTO_FD made = beneath(root, m->below, O_RDONLY | O_DIRECTORY);
    if (made < 0 || fstat(made, &st) < 0)
        return refuse(err, errno, m->source, "is no directory");
    if ((st.st_mode & 07777) != (mode_t)m->create && fchmod(made, (mode_t)m->create) < 0)
        return refuse(err, errno, m->source, "cannot be given its mode");
    return 0;
}

static int make(const mount *m, pdk_error *err)
{
    if (m->create < 0 && !m->owner_only)
        return 0;
    AUTO_FD root = open(m->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "mounts: cannot open the mount root %s", m->root);
    if (m->create >= 0 && strcmp(m->below, ".") != 0 && make_directories(root, m, err) < 0)
        return -1;
    if (!m->owner_only)
        return 0;
    AUTO_FD tree = beneath(root, m->below, O_RDONLY | O_DIRECTORY);
    if (tree < 0 || fchmod(tree, 0700) < 0)
        return refuse(err, errno, m->source, "cannot be made owner-only");
    return walk(tree, 0, make_private, m->source, err);
}

static void put(pdk_pack *out, pdk_mark *list, const char *source, const char *target, bool read_only)
{
    pdk_mark m = pdk_begin_map(out);
    pdk_kv_cstr(out, &m, "source", source);
    pdk_kv_cstr(out, &m, "target", target);
    pdk_kv_bool(out, &m, "read_only", read_only);
    pdk_end(out, &m);
    list->count++;
}

static bool taken(pdk_view composed, const char *target)
{
    size_t cursor = 0;
    pdk_view key, v;
    while (pdk_view_next(composed, &cursor, &key, &v)) {
        const char *t = pdk_info_str(v, "target");
        if (t != NULL && strcmp(t, target) == 0)
            return true;
    }
    return false;
}

int pdk_mounts_prepare(pdk_view composed, pdk_view extra, pdk_view roots, pdk_pack *out, pdk_error *err)
{
    size_t n = pdk_view_count(composed), cursor = 0, i = 0;
    pdk_view key, v;
    mount *all = calloc(n + 1, sizeof *all);
    if (all == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %zu mounts", n);
    int rc = 0;
    while (rc == 0 && i < n && pdk_view_next(composed, &cursor, &key, &v)) {
        rc = parse(v, &all[i], err);
        if (rc == 0)
            rc = check(&all[i++], roots, err);
    }
    for (size_t k = 0; rc == 0 && k < i; k++)
        if (!all[k].leave_out)
            rc = make(&all[k], err);
    if (rc == 0) {
        pdk_mark list = pdk_begin_list(out);
        for (size_t k = 0; k < i; k++)
            if (!all[k].leave_out)
                put(out, &list, all[k].source, all[k].target, all[k].read_only);
        cursor = 0;
        while (pdk_view_next(extra, &cursor, &key, &v)) { /* the operator's own; the policy's come first and win */
            const char *source = pdk_info_str(v, "source"), *target = pdk_info_str(v, "target");
            if (source != NULL && target != NULL && !taken(composed, target))
                put(out, &list, source, target, pdk_view_bool(pdk_view_get(v, "read_only"), false));
        }
        pdk_end(out, &list);
        if (out->failed)
            rc = pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %zu mounts", n);
    }
    free(all);
    return rc;
}
