/* mounts.c -- carries out what policies/mounts.lua composed, and the option `mounts`. A policy does no I/O: here sources are
 * checked against the roots that the configuration allows, directories made, modes set.
 *
 * Two passes: every check of every mount first, then the changes, so that a refused mount leaves nothing half-made; what the
 * second pass made before it failed is removed again. Paths are resolved beneath their root by the kernel (openat2), so that
 * no link and no ".." leads out of it. The operator's own mounts need no root; a source of theirs is looked at only where a
 * field asks for that, since it may be a path of the engine's machine. A policy's mounts may have a name in common (`optional`):
 * what cannot be done for one of them leaves all of that name out, with a warning, and the rest goes on.
 */
#include "core.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
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
    const char *at;         /* where this machine sees the source: the field `here`, else the source itself */
    const char *group;      /* the field `optional`: what fails leaves all of that name out; NULL = it fails the whole */
    char root[4096];        /* the allowed root that `at` lies in; "/" for a configured one */
    const char *below;      /* `at` relative to root, or "." */
    bool configured;        /* by the option `mounts`: links are the operator's own */
    bool read_only, owner_only, if_exists, leave_out;
    bool failed;            /* its group is left out */
    long create;            /* mode, or -1 */
    size_t made;            /* length of the first part of `below` that was not there and was made; 0 = none */
} mount;

/* The answer of a policy, or an option, that cannot be followed. */
static int refuse(pdk_error *err, int sys, const mount *m, const char *why)
{
    return pdk_fail(err, m->configured ? PDK_E_INVALID_ARGUMENT : PDK_E_POLICY_ERROR, sys, "%smounts: source %s %s",
                    m->configured ? "option " : "", m->at, why);
}

/* The storage failed, or that of another owner is out of reach. */
static int broken(pdk_error *err, int sys, const mount *m, const char *why)
{
    return pdk_fail(err, PDK_E_IO_ERROR, sys, "%smounts: source %s %s", m->configured ? "option " : "", m->at, why);
}

static int beneath(const mount *m, int root, const char *path, int flags)
{
    struct open_how how = { .flags = (unsigned)(flags | O_CLOEXEC),
                            .resolve = m->configured ? 0 : RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS };
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* Absolute, and each part a name: not empty, not "." or "..", and short enough to exist. */
static bool normal(const char *path)
{
    if (path[0] != '/' || strlen(path) > 4000)
        return false;
    for (const char *part = path + 1; path[1] != '\0'; part++) {
        size_t n = strcspn(part, "/");
        if (n == 0 || n > NAME_MAX || (part[0] == '.' && (n == 1 || (n == 2 && part[1] == '.'))))
            return false;
        part += n;
        if (*part == '\0')
            break;
    }
    return true;
}

/* "C:\dir", "C:/dir" or "\\host\dir": a path of the engine's machine, where nothing is to be done from here. */
static bool windows_form(const char *path)
{
    bool letter = (path[0] >= 'A' && path[0] <= 'Z') || (path[0] >= 'a' && path[0] <= 'z');
    return (letter && path[1] == ':' && (path[2] == '\\' || path[2] == '/')) || (path[0] == '\\' && path[1] == '\\');
}

/* The longest allowed root that holds the source. */
static int find_root(mount *m, pdk_view roots, pdk_error *err)
{
    size_t cursor = 0, best = 0, n;
    pdk_view key, value;
    while (!m->configured && pdk_view_next(roots, &cursor, &key, &value)) {
        const char *root = pdk_view_str(value, &n);
        if (root == NULL || root[0] != '/')
            continue;
        while (n > 1 && root[n - 1] == '/')
            n--;
        bool inside = n == 1 || (strncmp(m->at, root, n) == 0 && (m->at[n] == '/' || m->at[n] == '\0'));
        if (inside && n > best && n < sizeof m->root) {
            best = n;
            memcpy(m->root, root, n);
            m->root[n] = '\0';
        }
    }
    if (m->configured)
        best = (size_t)snprintf(m->root, sizeof m->root, "/");
    if (best == 0)
        return refuse(err, 0, m, "is outside the option mount_roots; add its directory there or change the policy");
    m->below = m->at + best;
    while (*m->below == '/')
        m->below++;
    if (*m->below == '\0')
        m->below = ".";
    return 0;
}

static int parse(pdk_view v, mount *m, bool configured, pdk_error *err)
{
    memset(m, 0, sizeof *m);
    m->source = pdk_info_str(v, "source");
    m->target = pdk_info_str(v, "target");
    m->at = pdk_info_str(v, "here") != NULL ? pdk_info_str(v, "here") : m->source;
    m->group = configured ? NULL : pdk_info_str(v, "optional");
    m->configured = configured;
    m->read_only = pdk_view_bool(pdk_view_get(v, "read_only"), true);
    m->if_exists = pdk_view_bool(pdk_view_get(v, "if_exists"), false);
    m->owner_only = pdk_view_bool(pdk_view_get(v, "owner_only"), false);
    const char *create = pdk_info_str(v, "create");
    m->create = create == NULL ? -1 : strtol(create, NULL, 8);
    if (m->source == NULL || m->target == NULL)
        return pdk_fail(err, configured ? PDK_E_INVALID_ARGUMENT : PDK_E_POLICY_ERROR, 0,
                        "mounts: a mount needs source and target");
    if (configured && windows_form(m->source)) {
        if (m->if_exists || m->owner_only || m->create >= 0)
            return refuse(err, 0, m, "is a path of another machine: create, if_exists and owner_only cannot be done there");
        return 0;
    }
    if (!normal(m->at))
        return refuse(err, 0, m, "must be an absolute path without empty, \".\" and \"..\" parts");
    return 0;
}

/* ---- owner_only trees ---- */

typedef int (*visit)(int dir, const char *name, const struct stat *st, const mount *m, pdk_error *err);

static int walk(int dir, int depth, visit each, const mount *m, pdk_error *err);

/* What has gone since it was listed is no fault: another sandbox of that user may be at work in the tree. */
static int walk_entry(int dir, const char *name, int depth, visit each, const mount *m, pdk_error *err)
{
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : broken(err, errno, m, "cannot be read");
    if (each(dir, name, &st, m, err) < 0)
        return -1;
    if (!S_ISDIR(st.st_mode))
        return 0;
    AUTO_FD sub = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (sub < 0)
        return errno == ENOENT ? 0 : broken(err, errno, m, "cannot be read");
    return walk(sub, depth + 1, each, m, err);
}

static int walk(int dir, int depth, visit each, const mount *m, pdk_error *err)
{
    if (depth > 64)
        return refuse(err, 0, m, "is nested too deeply for owner_only");
    int fd = openat(dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (d == NULL) {
        int why = errno;
        if (fd >= 0)
            close(fd);
        return why == ENOENT && depth > 0 ? 0 : broken(err, why, m, "cannot be read");
    }
    int rc = 0;
    while (rc == 0) {
        errno = 0;
        struct dirent *e = readdir(d);
        if (e == NULL) {
            if (errno != 0 && errno != ENOENT) /* a list that is cut short could hide a link; ENOENT: removed, so empty */
                rc = broken(err, errno, m, "cannot be read");
            break;
        }
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            rc = walk_entry(dir, e->d_name, depth, each, m, err);
    }
    closedir(d);
    return rc;
}

static int no_links(int dir, const char *name, const struct stat *st, const mount *m, pdk_error *err)
{
    (void)dir;
    if (S_ISDIR(st->st_mode) || S_ISREG(st->st_mode))
        return 0;
    char why[NAME_MAX + 100];
    snprintf(why, sizeof why, "holds %s, which is %s; owner_only takes files and directories only", name,
             S_ISLNK(st->st_mode) ? "a symbolic link" : "no plain file");
    return refuse(err, 0, m, why);
}

/* By a descriptor that needs no right to read, and never through a link that was put there since. */
static int make_private(int dir, const char *name, const struct stat *st, const mount *m, pdk_error *err)
{
    mode_t want = S_ISDIR(st->st_mode) ? 0700 : 0600;
    if ((st->st_mode & 07777) == want)
        return 0;
    AUTO_FD fd = openat(dir, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct stat now;
    if (fd < 0 && errno == ENOENT)
        return 0;
    if (fd < 0 || fstat(fd, &now) < 0)
        return broken(err, errno, m, "cannot be made owner-only");
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if ((now.st_mode & S_IFMT) != (st->st_mode & S_IFMT))
        return no_links(dir, name, &now, m, err) < 0 ? -1 : refuse(err, 0, m, "changes while it is made owner-only");
    return chmod(path, want) < 0 ? broken(err, errno, m, "cannot be made owner-only") : 0;
}

/* ---- the two passes ---- */

/* What stands where a directory is to be made: each part must be missing or a directory, and a link must lead to one. */
static int check_way(const mount *m, int root, pdk_error *err)
{
    char path[4096];
    size_t len = strlen(m->below);
    memcpy(path, m->below, len + 1);
    for (size_t i = 1; i <= len; i++) {
        char c = path[i];
        if (c != '/' && c != '\0')
            continue;
        path[i] = '\0';
        AUTO_FD fd = beneath(m, root, path, O_PATH | O_DIRECTORY);
        if (fd < 0) {
            int why = errno;
            AUTO_FD there = beneath(m, root, path, O_PATH | O_NOFOLLOW);
            if (why != ENOENT || there >= 0)
                return refuse(err, why == ENOENT ? 0 : why, m, why == ENOENT ? "cannot be made: a link on the way leads nowhere"
                                                                             : "cannot be made");
            return 0;
        }
        path[i] = c;
    }
    return 0;
}

static int check_there(const mount *m, int root, int fd, pdk_error *err)
{
    struct stat st;
    if (m->create < 0 && !m->owner_only)
        return 0;
    if (fstat(fd, &st) < 0 || !S_ISDIR(st.st_mode))
        return refuse(err, 0, m, m->owner_only ? "must be a directory for owner_only" : "is no directory, as create wants");
    if (!m->owner_only)
        return 0;
    AUTO_FD tree = beneath(m, root, m->below, O_RDONLY | O_DIRECTORY);
    return tree < 0 ? broken(err, errno, m, "cannot be read") : walk(tree, 0, no_links, m, err);
}

/* The backend opens it, wherever that is. */
static bool left_to_backend(const mount *m)
{
    return m->configured && !m->if_exists && !m->owner_only && m->create < 0;
}

/* A source that the engine sees under another path than we do must lie below an allowed root too. What that path is on the
 * engine's machine cannot be seen from here; where it is something here as well, no link may lead out of the root. */
static int check_engines_path(const mount *m, pdk_view roots, pdk_error *err)
{
    mount seen = *m;
    size_t cursor = 0, n;
    pdk_view key, value;
    seen.at = m->source;
    if (!windows_form(m->source)) {
        if (!normal(m->source))
            return refuse(err, 0, &seen, "must be an absolute path without empty, \".\" and \"..\" parts");
        if (find_root(&seen, roots, err) < 0)
            return -1;
        AUTO_FD root = open(seen.root, O_PATH | O_DIRECTORY | O_CLOEXEC);
        AUTO_FD fd = root < 0 ? -1 : beneath(&seen, root, seen.below, O_PATH);
        return root >= 0 && fd < 0 && errno == EXDEV ? refuse(err, 0, &seen, "leads out of its mount root through a link") : 0;
    }
    while (pdk_view_next(roots, &cursor, &key, &value)) {
        const char *root = pdk_view_str(value, &n);
        while (root != NULL && n > 3 && (root[n - 1] == '\\' || root[n - 1] == '/'))
            n--;
        if (root != NULL && windows_form(root) && strncmp(m->source, root, n) == 0 &&
            (root[n - 1] == '\\' || root[n - 1] == '/' || strchr("\\/", m->source[n]) != NULL)) /* the end of it counts too */
            return 0;
    }
    return refuse(err, 0, &seen, "is outside the option mount_roots; add its directory there or change the policy");
}

/* Which root it lies in. What fails here is the configuration's or the policy's fault, and no matter of one optional folder. */
static int locate(mount *m, pdk_view roots, pdk_error *err)
{
    if (left_to_backend(m))
        return 0;
    if (m->at != m->source && check_engines_path(m, roots, err) < 0)
        return -1;
    return find_root(m, roots, err);
}

static int check(mount *m, pdk_error *err)
{
    if (left_to_backend(m))
        return 0;
    AUTO_FD root = open(m->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0 && errno == ENOENT && m->if_exists && m->create < 0) {
        m->leave_out = true;
        return 0;
    }
    if (root < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "mounts: cannot open the mount root %s", m->root);
    AUTO_FD fd = beneath(m, root, m->below, O_PATH);
    int why = errno;
    if (fd >= 0)
        return check_there(m, root, fd, err);
    if (why == EXDEV)
        return refuse(err, 0, m, "leads out of its mount root through a link (an absolute link counts as one)");
    if (why == ENOTDIR || why == ELOOP)
        return refuse(err, why, m, "cannot be opened");
    if (why != ENOENT)
        return broken(err, why, m, "cannot be opened");
    if (m->create >= 0)
        return check_way(m, root, err);
    m->leave_out = m->if_exists;
    return m->if_exists ? 0 : refuse(err, 0, m, "does not exist; the policy may set create or if_exists");
}

/* Opens the parent of `path` below root, and sets *name to its last part. `path` is unchanged on return. */
static int open_parent(const mount *m, int root, char *path, const char **name)
{
    char *slash = strrchr(path, '/');
    *name = slash == NULL ? path : slash + 1;
    if (slash == NULL)
        return beneath(m, root, ".", O_PATH | O_DIRECTORY);
    *slash = '\0';
    int fd = beneath(m, root, path, O_PATH | O_DIRECTORY);
    *slash = '/';
    return fd;
}

/* mkdir -p of `below` beneath root; the last directory gets its mode whatever the umask. */
static int make_directories(int root, mount *m, pdk_error *err)
{
    char path[4096];
    const char *name;
    size_t len = strlen(m->below);
    memcpy(path, m->below, len + 1);
    for (size_t i = 1; i <= len; i++) {
        char c = path[i];
        if (c != '/' && c != '\0')
            continue;
        path[i] = '\0';
        AUTO_FD parent = open_parent(m, root, path, &name);
        if (parent < 0)
            return broken(err, errno, m, "cannot be made");
        if (mkdirat(parent, name, c == '\0' ? 0700 : 0755) == 0)
            m->made = m->made == 0 ? i : m->made;
        else if (errno != EEXIST)
            return broken(err, errno, m, "cannot be made");
        path[i] = c;
    }
    struct stat st;
    AUTO_FD made = beneath(m, root, m->below, O_RDONLY | O_DIRECTORY);
    if (made < 0 || fstat(made, &st) < 0)
        return broken(err, errno, m, "cannot be made");
    if ((st.st_mode & 07777) != (mode_t)m->create && fchmod(made, (mode_t)m->create) < 0)
        return broken(err, errno, m, "cannot be given its mode");
    return 0;
}

/* Takes back what make_directories made, as far as nobody has put anything into it. */
static void unmake(const mount *m)
{
    char path[4096];
    const char *name;
    if (m->made == 0)
        return;
    AUTO_FD root = open(m->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    memcpy(path, m->below, strlen(m->below) + 1);
    for (size_t len = strlen(path); root >= 0 && len >= m->made; len--) {
        if (m->below[len] != '/' && m->below[len] != '\0')
            continue;
        path[len] = '\0';
        AUTO_FD parent = open_parent(m, root, path, &name);
        if (parent < 0 || unlinkat(parent, name, AT_REMOVEDIR) < 0)
            return;
    }
}

static int make(mount *m, pdk_error *err)
{
    if (m->leave_out || (m->create < 0 && !m->owner_only))
        return 0;
    AUTO_FD root = open(m->root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "mounts: cannot open the mount root %s", m->root);
    if (m->create >= 0 && strcmp(m->below, ".") != 0 && make_directories(root, m, err) < 0)
        return -1;
    if (!m->owner_only)
        return 0;
    AUTO_FD tree = beneath(m, root, m->below, O_RDONLY | O_DIRECTORY);
    if (tree < 0 || fchmod(tree, 0700) < 0)
        return broken(err, errno, m, "cannot be made owner-only");
    return walk(tree, 0, make_private, m, err);
}

/* Of two mounts on one target the earlier stays; the policy's come first. One that was left out takes no target. */
static bool taken(const mount *all, size_t before, pdk_log *log)
{
    for (size_t i = 0; i < before; i++) {
        if (all[i].leave_out || strcmp(all[i].target, all[before].target) != 0)
            continue;
        if (log != NULL)
            pdk_log_event(log, PDK_WARN, "mount_dropped", PDK_STR("target", all[before].target),
                          PDK_STR("reason", "an earlier mount has this target"));
        return true;
    }
    return false;
}

/* One mount of a group failed: all of the group stay out, and what was made for them is taken back. 0, or -1 where there is no
 * group to leave out. */
static int leave_group_out(mount *all, size_t n, const mount *failed, pdk_log *log, pdk_error *err)
{
    if (failed->group == NULL || (err != NULL && err->kind == PDK_E_NO_MEMORY))
        return -1;
    for (size_t i = n; i-- > 0;) {
        if (all[i].group == NULL || strcmp(all[i].group, failed->group) != 0)
            continue;
        unmake(&all[i]);
        all[i].made = 0;
        all[i].leave_out = all[i].failed = true;
    }
    if (log != NULL)
        pdk_log_event(log, PDK_WARN, "mounts_left_out", PDK_STR("group", failed->group), PDK_STR("target", failed->target),
                      PDK_STR("reason", err != NULL ? err->message : "unknown"));
    pdk_error_clear(err);
    return 0;
}

static bool group_is_out(const mount *all, size_t n, const char *group)
{
    for (size_t i = 0; group != NULL && i < n; i++)
        if (all[i].failed && all[i].group != NULL && strcmp(all[i].group, group) == 0)
            return true;
    return false;
}

/* An entry { exclude = target } of the policy's list keeps configured mounts away from there. */
static bool excluded(pdk_view composed, const mount *m, pdk_log *log)
{
    size_t cursor = 0, n;
    pdk_view key, v;
    while (m->configured && pdk_view_next(composed, &cursor, &key, &v)) {
        const char *root = pdk_view_str(pdk_view_get(v, "exclude"), &n);
        if (root == NULL || strncmp(m->target, root, n) != 0 || (m->target[n] != '/' && m->target[n] != '\0'))
            continue;
        if (log != NULL)
            pdk_log_event(log, PDK_WARN, "mount_dropped", PDK_STR("target", m->target),
                          PDK_STR("reason", "the policy keeps configured mounts away from there"));
        return true;
    }
    return false;
}

/* Whether `path` is `folder`, or lies below it. */
static bool within(const char *path, const char *folder)
{
    size_t n = strcmp(folder, "/") == 0 ? 0 : strlen(folder);
    return strncmp(path, folder, n) == 0 && (path[n] == '/' || path[n] == '\0');
}

/* Records, leases, sockets and secrets of all sandboxes are there: none of it may be seen from inside one (K19). */
static int check_apart(const mount *m, const char *state_dir, pdk_error *err)
{
    char state[PATH_MAX], at[PATH_MAX];
    if (state_dir == NULL || realpath(state_dir, state) == NULL)
        return 0;
    if (realpath(m->at, at) == NULL)
        snprintf(at, sizeof at, "%s", m->at);
    return within(state, at) || within(at, state) ? refuse(err, 0, m, "and the state directory (option state_dir) lie one in the other: "
                                                           "what runtimes keep there must stay out of sandboxes")
                                                  : 0;
}

typedef struct rules { /* of one call */
    pdk_view composed, roots;
    const char *state_dir; /* or NULL */
    pdk_log *log;
} rules;

/* Checks one more of a list into all[*n]; -1 = the whole is refused. */
static int check_next(const rules *r, pdk_view v, bool configured, mount *all, size_t *n, pdk_error *err)
{
    mount *m = &all[*n];
    if (!pdk_view_is_nil(pdk_view_get(v, "exclude")))
        return 0;
    if (parse(v, m, configured, err) < 0)
        return -1;
    if (excluded(r->composed, m, r->log) || taken(all, *n, r->log))
        return 0;
    if (locate(m, r->roots, err) < 0 || check_apart(m, r->state_dir, err) < 0)
        return -1;
    m->leave_out = m->failed = group_is_out(all, *n, m->group);
    ++*n;
    return m->leave_out || check(m, err) == 0 ? 0 : leave_group_out(all, *n, m, r->log, err);
}

/* All of both lists, checked; returns how many, or -1. */
static long check_all(const rules *r, pdk_view extra, mount *all, pdk_error *err)
{
    const pdk_view lists[] = { r->composed, extra };
    size_t n = 0;
    for (int l = 0; l < 2; l++) {
        size_t cursor = 0;
        pdk_view key, v;
        while (pdk_view_next(lists[l], &cursor, &key, &v))
            if (check_next(r, v, l == 1, all, &n, err) < 0)
                return -1;
    }
    return (long)n;
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

int pdk_mounts_prepare(pdk_view composed, pdk_view extra, pdk_view roots, const char *state_dir, pdk_log *log, pdk_pack *out,
                       pdk_error *err)
{
    const rules r = { composed, roots, state_dir, log };
    size_t room = pdk_view_count(composed) + pdk_view_count(extra);
    mount *all = calloc(room + 1, sizeof *all);
    if (all == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %zu mounts", room);
    long n = check_all(&r, extra, all, err);
    int rc = n < 0 ? -1 : 0;
    for (long i = 0; rc == 0 && i < n; i++)
        if (make(&all[i], err) < 0)
            rc = leave_group_out(all, (size_t)n, &all[i], log, err);
    for (long i = n; rc < 0 && i-- > 0;)
        unmake(&all[i]);
    if (rc == 0) {
        pdk_mark list = pdk_begin_list(out);
        for (long i = 0; i < n; i++)
            if (!all[i].leave_out)
                put(out, &list, all[i].source, all[i].target, all[i].read_only);
        pdk_end(out, &list);
        if (out->failed)
            rc = pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %zu mounts", room);
    }
    free(all);
    return rc;
}
