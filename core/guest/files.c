/* files.c -- paths, and the file calls of paddock's own plane.
 * A path is resolved by the kernel beneath the mount that it names (openat2), so a link that something inside has planted
 * leads nowhere else: not out of a read-only mount into a writable one, and not into another's. "Which mount" is decided on
 * the text of the path; ".." that leaves that mount is `escapes` as a link is. Beneath "/" it stops at the root.
 * Whole files appear at once: a temporary file beside the target, then a rename. */
#include "priv.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINKS_MAX 16
#define LIST_MAX  100000

struct guest_upload {
    int dir, fd;
    bool no_overwrite;
    char name[256], temp[40];
    char *path; /* for messages */
};

/* ---- resolving ---- */

typedef struct place { /* a mount root, and the path beneath it */
    int root;
    bool whole;       /* the root is "/" */
    const char *rest; /* relative; "." = the root itself */
} place;

static int resolve(int dir, const char *path, int flags, mode_t mode, uint64_t how)
{
    struct open_how h = { .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
                          .mode = mode,
                          .resolve = how | RESOLVE_NO_MAGICLINKS };
    long fd = -1;
    for (int tries = 0; tries < 32; tries++) { /* EAGAIN: a rename elsewhere raced with "..", the kernel cannot be sure */
        fd = syscall(SYS_openat2, dir, path, &h, sizeof h);
        if (fd >= 0 || (errno != EAGAIN && errno != EINTR))
            break;
    }
    return (int)fd;
}

/* Finds the mount that `path` names: the longest whose components it begins with. Opens its root. */
static int place_find(const char *path, place *p, guest_fault *f)
{
    size_t len = strlen(path);
    if (path[0] != '/' || len >= PATH_MAX)
        return guest_fail(f, 400, "invalid_path", 0, "a path is absolute and shorter than %d bytes", PATH_MAX);
    const char *root = "/";
    p->rest = path;
    for (char **m = guest_conf.mounts; *m != NULL; m++) {
        const char *at = path, *want = *m;
        while (*want != '\0') { /* component by component: "//a///b" is "/a/b" */
            while (*at == '/')
                at++;
            want++;
            size_t n = strcspn(want, "/");
            if (n == 0 || strncmp(at, want, n) != 0 || (at[n] != '/' && at[n] != '\0'))
                break;
            at += n;
            want += n;
        }
        if (*want == '\0' && strcmp(*m, "/") != 0) {
            root = *m;
            p->rest = at;
            break;
        }
    }
    p->rest += strspn(p->rest, "/");
    if (*p->rest == '\0')
        p->rest = ".";
    p->whole = strcmp(root, "/") == 0;
    p->root = resolve(AT_FDCWD, root, O_PATH | O_DIRECTORY, 0, 0);
    return p->root >= 0 ? 0 : guest_fail_errno(f, errno, "cannot open", root);
}

static int place_open(const place *p, const char *rest, int flags)
{
    return resolve(p->root, rest, flags, 0, p->whole ? RESOLVE_IN_ROOT : RESOLVE_BENEATH);
}

int guest_open(const char *path, int flags, guest_fault *f)
{
    place p;
    if (place_find(path, &p, f) < 0)
        return -1;
    int fd = place_open(&p, p.rest,
                        flags & O_PATH ? flags : flags | O_NONBLOCK); /* O_PATH takes few flags, and never waits */
    int sys = errno;
    close(p.root);
    return fd >= 0 ? fd : guest_fail_errno(f, sys, "cannot open", path);
}

/* Splits `rest` in place: the parent (may be ".") and the last component. */
static char *split_last(char *rest, char name[256])
{
    size_t len = strlen(rest);
    char *slash = strrchr(rest, '/');
    const char *last = slash != NULL ? slash + 1 : rest;
    size_t n = len - (size_t)(last - rest);
    if (n == 0 || n > 255 || strcmp(last, ".") == 0 || strcmp(last, "..") == 0)
        return NULL;
    memcpy(name, last, n + 1);
    if (slash == NULL)
        return strcpy(rest, ".");
    *slash = '\0';
    return rest[0] != '\0' ? rest : strcpy(rest, "/");
}

/* The parent of the file that `rest` leads to when links at its end are followed, one by one, each beneath the mount. */
static int parent_find(const place *p, char *rest, const char *path, char name[256], guest_fault *f)
{
    for (int i = 0; i < LINKS_MAX; i++) {
        char target[PATH_MAX];
        char *parent = split_last(rest, name);
        if (parent == NULL)
            return guest_fail(f, 400, "invalid_path", 0, "%.150s does not end in a file's name", path);
        int dir = place_open(p, parent, O_PATH | O_DIRECTORY);
        if (dir < 0)
            return guest_fail_errno(f, errno, "cannot open the directory of", path);
        ssize_t n = readlinkat(dir, name, target, sizeof target);
        if (n < 0)
            return dir; /* no link: this is it, there or not yet */
        close(dir);
        char next[2 * PATH_MAX];
        if (target[0] == '/' && !p->whole)
            return guest_fail_errno(f, EXDEV, "a link leads out of the mount:", path);
        int len = target[0] == '/' ? snprintf(next, sizeof next, "%.*s", (int)n, target)
                                   : snprintf(next, sizeof next, "%s/%.*s", parent, (int)n, target);
        if (n >= PATH_MAX || len >= PATH_MAX)
            return guest_fail_errno(f, ENAMETOOLONG, "cannot follow", path);
        memcpy(rest, next, (size_t)len + 1);
    }
    return guest_fail_errno(f, ELOOP, "too many links:", path);
}

/* A descriptor of the directory that `path` is in, and the last component. */
static int open_parent(const char *path, char name[256], guest_fault *f)
{
    place p;
    if (place_find(path, &p, f) < 0)
        return -1;
    char rest[PATH_MAX];
    snprintf(rest, sizeof rest, "%s", p.rest);
    int dir = parent_find(&p, rest, path, name, f);
    close(p.root);
    return dir;
}

static int refuse_type(const struct stat *st, const char *path, guest_fault *f)
{
    if (S_ISDIR(st->st_mode))
        return guest_fail(f, 409, "is_directory", EISDIR, "%.150s is a directory", path);
    return guest_fail(f, 409, "not_a_file", 0, "%.150s is no regular file", path);
}

/* Looks before it opens: to open a device or a pipe can have effects, or wait. */
int guest_open_regular(const char *path, struct stat *st, guest_fault *f)
{
    int probe = guest_open(path, O_PATH, f);
    if (probe < 0)
        return -1;
    int rc = fstat(probe, st);
    close(probe);
    if (rc < 0)
        return guest_fail_errno(f, errno, "cannot look at", path);
    if (!S_ISREG(st->st_mode))
        return refuse_type(st, path, f);
    int fd = guest_open(path, O_RDONLY | O_NOCTTY, f);
    if (fd < 0)
        return -1;
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode))
        return fd;
    close(fd);
    return refuse_type(st, path, f);
}

char *guest_read_all(const char *path, size_t max, size_t *len, struct stat *st, guest_fault *f)
{
    int fd = guest_open_regular(path, st, f);
    if (fd < 0)
        return NULL;
    size_t cap = st->st_size > 0 && (uint64_t)st->st_size < max ? (size_t)st->st_size + 1 : 4096, n = 0;
    char *text = malloc(cap + 1);
    ssize_t got = -1;
    errno = ENOMEM;
    while (text != NULL && (got = read(fd, text + n, cap - n)) > 0 && (n += (size_t)got) <= max)
        if (n == cap) { /* files of /proc say size 0, others grow meanwhile */
            char *grown = realloc(text, cap * 2 + 1);
            if (grown == NULL) {
                got = -1;
                break;
            }
            text = grown;
            cap *= 2;
        }
    int sys = errno;
    close(fd);
    if (got == 0 && n <= max) {
        text[n] = '\0';
        *len = n;
        return text;
    }
    free(text);
    if (n > max)
        guest_fail(f, 413, "too_large", EFBIG, "%.150s has more than %zu bytes", path, max);
    else
        guest_fail_errno(f, sys, "cannot read", path);
    return NULL;
}

/* ---- writing ---- */

static bool random_bytes(void *out, size_t len)
{
    return getrandom(out, len, 0) == (ssize_t)len;
}

/* What stands there now: nothing (0), a file (1, its mode), or what no upload may replace (-1). */
static int target_look(const guest_upload *u, mode_t *mode, guest_fault *f)
{
    struct stat st;
    if (fstatat(u->dir, u->name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : guest_fail_errno(f, errno, "cannot look at", u->path);
    if (u->no_overwrite)
        return guest_fail_errno(f, EEXIST, "will not replace", u->path);
    if (!S_ISREG(st.st_mode))
        return refuse_type(&st, u->path, f);
    if (faccessat(u->dir, u->name, W_OK, AT_EACCESS) < 0) /* a rename would not ask, a shell's > would */
        return guest_fail_errno(f, errno, "cannot write to", u->path);
    *mode = st.st_mode & 0777;
    return 1;
}

static int temp_open(guest_upload *u, guest_fault *f)
{
    mode_t mode = 0644;
    int there = target_look(u, &mode, f);
    uint64_t nonce;
    if (there < 0)
        return -1;
    if (!random_bytes(&nonce, sizeof nonce))
        return guest_fail(f, 500, "io_error", errno, "no random bytes");
    snprintf(u->temp, sizeof u->temp, ".paddock-%016llx.tmp", (unsigned long long)nonce);
    u->fd = openat(u->dir, u->temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, there ? 0600 : 0644);
    if (u->fd < 0)
        return guest_fail_errno(f, errno, "cannot create", u->path);
    if (there && fchmod(u->fd, mode) < 0)
        return guest_fail_errno(f, errno, "cannot set the mode of", u->path);
    return 0;
}

guest_upload *guest_upload_open(const char *path, bool no_overwrite, guest_fault *f)
{
    guest_upload *u = calloc(1, sizeof *u);
    char *copy = strdup(path);
    if (u == NULL || copy == NULL) {
        free(u);
        free(copy);
        guest_fail(f, 503, "no_memory", ENOMEM, "no memory for an upload");
        return NULL;
    }
    *u = (guest_upload){ .dir = -1, .fd = -1, .no_overwrite = no_overwrite, .path = copy };
    u->dir = open_parent(path, u->name, f);
    if (u->dir >= 0 && temp_open(u, f) == 0)
        return u;
    guest_upload_abort(u);
    return NULL;
}

void guest_upload_abort(guest_upload *u)
{
    if (u == NULL)
        return;
    if (u->fd >= 0) {
        close(u->fd);
        unlinkat(u->dir, u->temp, 0);
    }
    if (u->dir >= 0)
        close(u->dir);
    free(u->path);
    free(u);
}

int guest_upload_write(guest_upload *u, const void *data, size_t len, guest_fault *f)
{
    for (const char *p = data; len > 0;) {
        ssize_t n = write(u->fd, p, len);
        if (n < 0 && errno != EINTR)
            return guest_fail_errno(f, errno, "cannot write", u->path);
        p += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

static int publish(const guest_upload *u, guest_fault *f)
{
    if (!u->no_overwrite) {
        if (renameat(u->dir, u->temp, u->dir, u->name) == 0)
            return 0;
        return guest_fail_errno(f, errno, "cannot put in place", u->path);
    }
    if (syscall(SYS_renameat2, u->dir, u->temp, u->dir, u->name, 1u /* RENAME_NOREPLACE */) == 0)
        return 0;
    if (errno == EINVAL || errno == ENOSYS) { /* a file system that cannot: a link does not replace either */
        if (linkat(u->dir, u->temp, u->dir, u->name, 0) == 0)
            return unlinkat(u->dir, u->temp, 0), 0;
    }
    return guest_fail_errno(f, errno, "cannot put in place", u->path);
}

int guest_upload_commit(guest_upload *u, uint64_t token, guest_fault *f)
{
    int rc = guest_token_allows(token, f) ? 0 : -1;
    if (rc == 0)
        rc = publish(u, f);
    if (rc == 0) {
        close(u->fd);
        u->fd = -1; /* nothing to unlink any more */
    }
    guest_upload_abort(u);
    return rc;
}

/* ---- routes ---- */

static const char *path_of(guest_req *req)
{
    const char *path = guest_query(req, "path");
    if (path != NULL && path[0] == '/')
        return path;
    guest_fault f;
    guest_fail(&f, 400, "invalid_path", 0, "the query has no absolute path");
    guest_reply_fault(req, &f);
    return NULL;
}

static void on_put_body(guest_req *req, const char *data, size_t len)
{
    guest_fault f;
    if (guest_upload_write(req->ctx, data, len, &f) == 0)
        return;
    guest_upload_abort(req->ctx);
    guest_reply_fault(req, &f);
}

static void on_put_end(guest_req *req)
{
    guest_fault f;
    if (guest_upload_commit(req->ctx, req->token, &f) < 0)
        guest_reply_fault(req, &f);
    else
        guest_reply_json(req, 200, json_pack("{s:b}", "written", 1));
}

static void on_put_close(guest_req *req)
{
    guest_upload_abort(req->ctx);
}

void guest_file_put_begin(guest_req *req)
{
    guest_fault f;
    const char *path = path_of(req), *keep = guest_query(req, "no_overwrite");
    if (path == NULL)
        return;
    guest_upload *u = guest_upload_open(path, keep != NULL && strcmp(keep, "1") == 0, &f);
    if (u == NULL) {
        guest_reply_fault(req, &f);
        return;
    }
    req->ctx = u;
    req->body_max = GUEST_FILE_MAX;
    req->on_body = on_put_body;
    req->on_end = on_put_end;
    req->on_close = on_put_close;
}

void guest_file_get(guest_req *req)
{
    guest_fault f;
    struct stat st;
    const char *path = path_of(req);
    int fd = path != NULL ? guest_open_regular(path, &st, &f) : -1;
    size_t len = 0;
    if (path == NULL)
        return;
    if (fd >= 0 && st.st_size > 0) {
        guest_reply_file(req, fd, (uint64_t)st.st_size, "application/octet-stream");
        return;
    }
    if (fd >= 0)
        close(fd);
    char *text = fd >= 0 ? guest_read_all(path, GUEST_BODY_MAX, &len, &st, &f) : NULL; /* files of /proc say size 0 */
    if (text != NULL)
        guest_reply(req, 200, "application/octet-stream", text, len);
    else
        guest_reply_fault(req, &f);
    free(text);
}

/* JSON holds UTF-8 only, names hold anything: a name that is none comes with its bytes percent-encoded in `encoded`. */
static void put_name(json_t *entry, const char *key, const char *text)
{
    json_t *value = json_string(text);
    if (value == NULL) {
        char *encoded = malloc(strlen(text) * 3 + 1), *plain = strdup(text), *to = encoded;
        if (encoded != NULL && plain != NULL) {
            for (const char *p = text; *p != '\0'; p++)
                to += (*p & 0x80) || *p == '%' || *p < 32 ? sprintf(to, "%%%02X", (unsigned char)*p) : (*to = *p, 1);
            *to = '\0';
            for (char *p = plain; *p != '\0'; p++)
                *p = *p & 0x80 ? '?' : *p;
            if (strcmp(key, "path") == 0)
                json_object_set_new(entry, "encoded", json_string(encoded));
            value = json_string(plain);
        }
        free(encoded);
        free(plain);
    }
    json_object_set_new(entry, key, value);
}

static json_t *list_entry(int dir, const char *path, const char *name)
{
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return NULL; /* gone meanwhile */
    char mode[8], full[PATH_MAX + 300];
    snprintf(mode, sizeof mode, "%04o", (unsigned)st.st_mode & 07777);
    snprintf(full, sizeof full, "%s%s%s", path, path[strlen(path) - 1] == '/' ? "" : "/", name);
    json_t *entry = json_pack("{s:b, s:b, s:I, s:f, s:s}", "is_directory", S_ISDIR(st.st_mode), "is_link",
                              S_ISLNK(st.st_mode), "size", (json_int_t)st.st_size, "modified_time",
                              (double)st.st_mtim.tv_sec + (double)st.st_mtim.tv_nsec / 1e9, "mode", mode);
    if (entry != NULL) {
        put_name(entry, "name", name);
        put_name(entry, "path", full);
    }
    return entry;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

typedef struct name_list {
    char **v;
    size_t n;
} name_list;

static void names_free(name_list *l)
{
    for (size_t i = 0; i < l->n; i++)
        free(l->v[i]);
    free(l->v);
}

/* The names of a directory, sorted. */
static int names_read(DIR *dir, name_list *l, const char *path, guest_fault *f)
{
    size_t cap = 0;
    for (struct dirent *d; (d = readdir(dir)) != NULL;) {
        if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0)
            continue;
        if (l->n == LIST_MAX)
            return guest_fail(f, 413, "too_large", 0, "%.150s has more than %d entries", path, LIST_MAX);
        if (l->n == cap) {
            cap = cap ? cap * 2 : 64;
            char **grown = realloc(l->v, cap * sizeof *grown);
            if (grown == NULL)
                return guest_fail_errno(f, ENOMEM, "cannot list", path);
            l->v = grown;
        }
        if ((l->v[l->n] = strdup(d->d_name)) == NULL)
            return guest_fail_errno(f, ENOMEM, "cannot list", path);
        l->n++;
    }
    if (l->n > 0)
        qsort(l->v, l->n, sizeof *l->v, by_name);
    return 0;
}

void guest_file_list(guest_req *req)
{
    guest_fault f;
    const char *path = path_of(req);
    if (path == NULL)
        return;
    int fd = guest_open(path, O_RDONLY | O_DIRECTORY, &f);
    DIR *dir = fd >= 0 ? fdopendir(fd) : NULL;
    name_list names = { 0 };
    if (dir == NULL && fd >= 0) {
        guest_fail_errno(&f, errno, "cannot read the directory", path);
        close(fd);
    }
    if (dir == NULL || names_read(dir, &names, path, &f) < 0) {
        guest_reply_fault(req, &f);
    } else {
        json_t *files = json_array();
        for (size_t i = 0; i < names.n; i++) {
            json_t *entry = list_entry(fd, path, names.v[i]);
            if (entry != NULL)
                json_array_append_new(files, entry);
        }
        guest_reply_json(req, 200, json_pack("{s:o}", "files", files));
    }
    names_free(&names);
    if (dir != NULL)
        closedir(dir);
}
