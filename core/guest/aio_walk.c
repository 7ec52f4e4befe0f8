/* aio_walk.c -- see aio_walk.h; and the calls that only walk: list, find, glob. */
#include "aio_walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 4000000 /* 4 ms: several slices fit into the second that a doom may take */
#define DEPTH_MAX 64     /* a descriptor each */
#define ENTRIES_MAX 50000

/* ---- patterns ---- */

/* One character against the set behind [; *end = behind its ]. An unclosed set is a plain [. */
static bool in_set(const char *set, char c, const char **end)
{
    const char *p = set;
    bool not = *p == '!' || *p == '^', found = false;
    p += not;
    for (const char *first = p; *p != 0 && (*p != ']' || p == first); p++) {
        if (p[1] == '-' && p[2] != 0 && p[2] != ']') {
            found |= (unsigned char)p[0] <= (unsigned char)c && (unsigned char)c <= (unsigned char)p[2];
            p += 2;
        } else {
            found |= *p == c;
        }
    }
    *end = *p == ']' ? p + 1 : NULL;
    return found != not;
}

/* Whether `p` (not a star) takes the character c; *next = the pattern behind it. */
static bool takes(const char *p, char c, const char **next)
{
    const char *end;
    *next = p + 1;
    if (*p == '?') return true;
    if (*p == '\\' && p[1] != 0) {
        *next = p + 2;
        return p[1] == c;
    }
    if (*p == '[') {
        bool in = in_set(p + 1, c, &end);
        if (end != NULL) {
            *next = end;
            return in;
        }
    }
    return *p == c;
}

static bool glob_part(const char *p, size_t plen, const char *s, size_t slen)
{
    char pattern[256];
    const char *star = NULL, *retry = NULL, *end = s + slen, *next;
    if (plen >= sizeof pattern) return false;
    memcpy(pattern, p, plen);
    pattern[plen] = 0;
    for (p = pattern; s < end;) {
        if (*p == '*') {
            star = ++p;
            retry = s;
        } else if (*p != 0 && takes(p, *s, &next)) {
            p = next;
            s++;
        } else if (star != NULL) { /* let the last star take one more */
            p = star;
            s = ++retry;
        } else {
            return false;
        }
    }
    while (*p == '*') p++;
    return *p == 0;
}

/* Whether `name` fits the shell pattern: * ? [a-z] [!a]; matching takes at most the product of the two lengths. */
static bool glob_name(const char *pattern, const char *name)
{
    return glob_part(pattern, strlen(pattern), name, strlen(name));
}

/* The same for a path; ** stands for any number of directories. Without a slash in it, the pattern is for the last name. */
static bool glob_path(const char *pattern, const char *path)
{
    const char *slash = strrchr(path, '/');
    if (strchr(pattern, '/') == NULL && strcmp(pattern, "**") != 0) return glob_name(pattern, slash ? slash + 1 : path);
    const char *star = NULL, *retry = NULL; /* the last ** and where in the path it ends for now */
    while (*path != 0) {
        size_t p = strcspn(pattern, "/"), s = strcspn(path, "/");
        if (p == 2 && memcmp(pattern, "**", 2) == 0) {
            star = pattern + 2 + (pattern[2] == '/');
            if (*star == 0) return true;
            pattern = star;
            retry = path;
        } else if (glob_part(pattern, p, path, s) && (pattern[p] == 0) == (path[s] == 0)) {
            pattern += p + (pattern[p] == '/');
            path += s + (path[s] == '/');
        } else if (star != NULL && retry[strcspn(retry, "/")] == '/') {
            retry += strcspn(retry, "/") + 1;
            pattern = star;
            path = retry;
        } else {
            return false;
        }
    }
    return *pattern == 0;
}

/* ---- the walk ---- */

typedef struct frame {
    DIR *dir;
    size_t path_len; /* of the directory's path */
} frame;

typedef struct walk {
    guest_req *req;
    aio_walk_spec spec;
    frame frames[DEPTH_MAX];
    int depth;       /* frames in use */
    size_t root_len;
    char path[8192];
    guest_timer slice;
} walk;

static void walk_free(walk *w)
{
    guest_timer_stop(&w->slice);
    while (w->depth > 0) closedir(w->frames[--w->depth].dir);
    free(w);
}

static bool pseudo(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) < 0 || fs.f_type == PROC_SUPER_MAGIC || fs.f_type == SYSFS_MAGIC;
}

/* Takes fd. What cannot be entered is left out. */
static void enter(walk *w, int fd, size_t path_len)
{
    DIR *dir = w->depth < DEPTH_MAX ? fdopendir(fd) : NULL;
    if (dir == NULL) {
        close(fd);
        return;
    }
    w->frames[w->depth].dir = dir;
    w->frames[w->depth++].path_len = path_len;
}

/* The next entry of the deepest directory; false = the walk is over. */
static bool step(walk *w)
{
    if (w->depth == 0) return false;
    frame *f = &w->frames[w->depth - 1];
    struct dirent *d = readdir(f->dir);
    if (d == NULL) {
        closedir(f->dir);
        w->depth--;
        return w->depth > 0;
    }
    if (strcmp(d->d_name, ".") == 0 || strcmp(d->d_name, "..") == 0) return true;
    if (!w->spec.hidden && d->d_name[0] == '.') return true;
    size_t n = strlen(d->d_name);
    if (f->path_len + n + 2 > sizeof w->path) return true;
    char *name = w->path + f->path_len;
    *name++ = '/';
    memcpy(name, d->d_name, n + 1);
    aio_entry e = { .path = w->path, .rel = w->path + w->root_len + 1, .name = name, .dir = dirfd(f->dir), .depth = w->depth };
    if (fstatat(e.dir, name, &e.st, AT_SYMLINK_NOFOLLOW) < 0) return true;
    if (!w->spec.visit(w->spec.ctx, &e)) return false;
    if (!S_ISDIR(e.st.st_mode) || (w->spec.max_depth > 0 && w->depth >= w->spec.max_depth)) return true;
    int fd = openat(e.dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd >= 0 && pseudo(fd)) close(fd);
    else if (fd >= 0) enter(w, fd, f->path_len + 1 + n);
    return true;
}

static int64_t clock_ns(void)
{
    struct timespec t; /* not guest_now(), which stands still within a round of the loop */
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void on_slice(guest_timer *t)
{
    walk *w = t->ctx;
    int64_t end = clock_ns() + SLICE_NS;
    bool again = true;
    while (again && clock_ns() < end) again = (w->spec.more != NULL && w->spec.more(w->spec.ctx)) || step(w);
    if (again) {
        guest_timer_in(&w->slice, 1e-6, on_slice, w); /* 0 would be due in this very round */
        return;
    }
    guest_req *req = w->req;
    aio_walk_spec spec = w->spec;
    req->on_close = NULL;
    walk_free(w);
    spec.done(spec.ctx, req);
}

static void on_close(guest_req *req)
{
    walk *w = req->ctx;
    aio_walk_spec spec = w->spec;
    walk_free(w);
    spec.drop(spec.ctx);
}

void aio_walk_start(guest_req *req, const char *path, int root, const aio_walk_spec *spec)
{
    walk *w = calloc(1, sizeof *w);
    size_t len = strlen(path);
    while (len > 0 && path[len - 1] == '/') len--;
    if (w == NULL || len + 1 >= sizeof w->path) {
        free(w);
        if (root >= 0) close(root);
        spec->drop(spec->ctx);
        aio_reply_fail(req, w ? 422 : 500, w ? "the path is too long" : "no memory", NULL);
        return;
    }
    w->req = req;
    w->spec = *spec;
    memcpy(w->path, path, len);
    w->root_len = len;
    req->ctx = w;
    req->on_close = on_close;
    if (root >= 0) enter(w, root, len);
    w->slice.ctx = w;
    on_slice(&w->slice);
}

/* ---- list, find, glob ---- */

typedef struct args {
    const char *path, *pattern, *sort;
    json_t *types, *exclude;
    bool recursive, hidden, size, permissions, desc, files_only, metadata;
    int64_t depth, max;
} args;

typedef struct found {
    char *path;
    size_t name_at; /* the name's place in the path */
    mode_t mode;
    int64_t size;
    struct timespec modified;
} found;

typedef enum kind { LIST, FIND, GLOB } kind;

typedef struct tree { /* one call */
    kind kind;
    args a;
    json_t *body;     /* holds the strings of `a` */
    found *v;
    size_t n, cap;
    bool truncated, no_memory;
} tree;

static void tree_free(void *ctx)
{
    tree *t = ctx;
    for (size_t i = 0; i < t->n; i++) free(t->v[i].path);
    free(t->v);
    json_decref(t->body);
    free(t);
}

bool aio_glob_any(const json_t *globs, const char *path)
{
    for (size_t i = 0; i < aio_list_size(globs); i++)
        if (glob_path(aio_list_at(globs, i), path)) return true;
    return false;
}

static bool has_type(const json_t *types, const char *name)
{
    const char *dot = strrchr(name, '.');
    for (size_t i = 0; dot != NULL && i < aio_list_size(types); i++) {
        const char *type = aio_list_at(types, i);
        if (strcasecmp(type + (type[0] == '.'), dot + 1) == 0) return true;
    }
    return false;
}

static bool wanted(const tree *t, const aio_entry *e)
{
    bool dir = S_ISDIR(e->st.st_mode);
    if (t->kind == LIST) return dir || t->a.types == NULL || has_type(t->a.types, e->name);
    if (t->kind == GLOB && ((t->a.files_only && dir) || aio_glob_any(t->a.exclude, e->rel))) return false;
    return glob_path(t->a.pattern, e->rel);
}

static bool visit(void *ctx, const aio_entry *e)
{
    tree *t = ctx;
    if (!wanted(t, e)) return true;
    if (t->n >= (size_t)t->a.max) {
        t->truncated = true;
        return false;
    }
    if (t->n == t->cap) {
        size_t cap = t->cap ? t->cap * 2 : 64;
        found *v = realloc(t->v, cap * sizeof *v);
        t->no_memory = v == NULL;
        if (v == NULL) return false;
        t->v = v;
        t->cap = cap;
    }
    found *f = &t->v[t->n];
    *f = (found){ strdup(e->path), (size_t)(e->name - e->path), e->st.st_mode, (int64_t)e->st.st_size, e->st.st_mtim };
    t->no_memory = f->path == NULL;
    t->n += f->path != NULL;
    return f->path != NULL;
}

static int compare(const void *pa, const void *pb, void *ctx)
{
    const found *a = pa, *b = pb;
    const args *how = ctx;
    int order = 0;
    if (how->sort != NULL && strcmp(how->sort, "size") == 0) order = (a->size > b->size) - (a->size < b->size);
    if (how->sort != NULL && strncmp(how->sort, "mod", 3) == 0) {
        order = (a->modified.tv_sec > b->modified.tv_sec) - (a->modified.tv_sec < b->modified.tv_sec);
        if (order == 0) order = (a->modified.tv_nsec > b->modified.tv_nsec) - (a->modified.tv_nsec < b->modified.tv_nsec);
    }
    if (order == 0) order = strcmp(a->path, b->path);
    return how->desc ? -order : order;
}

static json_t *found_json(const tree *t, const found *f)
{
    const char *name = f->path + f->name_at;
    json_t *one = json_pack("{s:o, s:o, s:b}", "name", aio_text(name, strlen(name)), "path", aio_text(f->path, strlen(f->path)),
                            "is_directory", S_ISDIR(f->mode));
    if (one == NULL) return NULL;
    if (t->kind == LIST ? t->a.size : t->a.metadata) {
        json_object_set_new(one, "size", json_integer(f->size));
        json_object_set_new(one, "modified_time", aio_time((double)f->modified.tv_sec + (double)f->modified.tv_nsec / 1e9));
    }
    if (t->kind == LIST && t->a.permissions) {
        char mode[8];
        snprintf(mode, sizeof mode, "%04o", (unsigned)(f->mode & 07777));
        json_object_set_new(one, "permissions", json_string(mode));
    }
    const char *dot = strrchr(name, '.');
    if (t->kind == LIST && dot != NULL && dot != name && !S_ISDIR(f->mode))
        json_object_set_new(one, "extension", aio_text(dot, strlen(dot)));
    return one;
}

static void done(void *ctx, guest_req *req)
{
    tree *t = ctx;
    json_int_t dirs = 0;
    qsort_r(t->v, t->n, t->v ? sizeof *t->v : 1, compare, &t->a);
    json_t *files = json_array();
    for (size_t i = 0; i < t->n && !t->no_memory; i++) {
        dirs += S_ISDIR(t->v[i].mode);
        json_t *one = t->kind == FIND ? aio_text(t->v[i].path, strlen(t->v[i].path)) : found_json(t, &t->v[i]);
        t->no_memory = json_array_append_new(files, one) < 0;
    }
    json_t *data = json_pack("{s:o, s:o}", "path", aio_text(t->a.path, strlen(t->a.path)), "files", files);
    json_int_t n = (json_int_t)t->n;
    if (data != NULL && t->kind == LIST) {
        json_object_set_new(data, "total_count", json_integer(n));
        json_object_set_new(data, "directory_count", json_integer(dirs));
        json_object_set_new(data, "file_count", json_integer(n - dirs));
    } else if (data != NULL && t->kind == GLOB) {
        json_object_set_new(data, "pattern", aio_text(t->a.pattern, strlen(t->a.pattern)));
        json_object_set_new(data, "total_count", json_integer(n));
    }
    if (data != NULL && (t->kind == GLOB || t->truncated)) json_object_set_new(data, "truncated", json_boolean(t->truncated));
    if (t->no_memory) {
        json_decref(data);
        aio_reply_fail(req, 500, "no memory for the listing", NULL);
    } else {
        aio_reply_ok(req, data, NULL);
    }
    tree_free(t);
}

static void run(guest_req *req, kind kind, const aio_field *fields, args a)
{
    static const char *const names[] = { "list", "find", "glob" };
    guest_fault f = { 0 };
    json_t *body = aio_fields(req, fields, &a);
    if (body == NULL) return;
    int root = guest_open(a.path, O_RDONLY | O_DIRECTORY, &f);
    tree *t = root >= 0 ? calloc(1, sizeof *t) : NULL;
    if (t == NULL) {
        if (root >= 0) close(root), guest_fail(&f, 503, "no_memory", ENOMEM, "no memory for a listing");
        aio_reply_file_fault(req, a.path, names[kind], &f);
        json_decref(body);
        return;
    }
    if (a.max > ENTRIES_MAX || a.max == 0) a.max = ENTRIES_MAX;
    t->kind = kind;
    t->a = a;
    t->body = body;
    aio_walk_spec spec = {
        .ctx = t, .hidden = a.hidden, .max_depth = a.recursive ? (int)(a.depth < DEPTH_MAX ? a.depth : DEPTH_MAX) : 1,
        .visit = visit, .done = done, .drop = tree_free,
    };
    aio_walk_start(req, a.path, root, &spec);
}

void aio_file_list(guest_req *req, const char *id)
{
    static const aio_field LIST_FIELDS[] = {
        { "path", AIO_TEXT, true, offsetof(args, path) },
        { "recursive", AIO_BOOL, false, offsetof(args, recursive) },
        { "show_hidden", AIO_BOOL, false, offsetof(args, hidden) },
        { "file_types", AIO_LIST, false, offsetof(args, types) },
        { "max_depth", AIO_COUNT, false, offsetof(args, depth) },
        { "include_size", AIO_BOOL, false, offsetof(args, size) },
        { "include_permissions", AIO_BOOL, false, offsetof(args, permissions) },
        { "sort_by", AIO_TEXT, false, offsetof(args, sort) },
        { "sort_desc", AIO_BOOL, false, offsetof(args, desc) },
        AIO_END,
    };
    (void)id;
    run(req, LIST, LIST_FIELDS, (args){ .hidden = true, .size = true });
}

void aio_file_find(guest_req *req, const char *id)
{
    static const aio_field FIND_FIELDS[] = {
        { "path", AIO_TEXT, true, offsetof(args, path) },
        { "glob", AIO_TEXT, true, offsetof(args, pattern) },
        AIO_END,
    };
    (void)id;
    run(req, FIND, FIND_FIELDS, (args){ .hidden = true, .recursive = true });
}

void aio_file_glob(guest_req *req, const char *id)
{
    static const aio_field GLOB_FIELDS[] = {
        { "path", AIO_TEXT, true, offsetof(args, path) },
        { "pattern", AIO_TEXT, true, offsetof(args, pattern) },
        { "exclude", AIO_LIST, false, offsetof(args, exclude) },
        { "include_hidden", AIO_BOOL, false, offsetof(args, hidden) },
        { "files_only", AIO_BOOL, false, offsetof(args, files_only) },
        { "include_metadata", AIO_BOOL, false, offsetof(args, metadata) },
        { "max_results", AIO_COUNT, false, offsetof(args, max) },
        { "sort_by", AIO_TEXT, false, offsetof(args, sort) },
        { "sort_desc", AIO_BOOL, false, offsetof(args, desc) },
        AIO_END,
    };
    (void)id;
    run(req, GLOB, GLOB_FIELDS, (args){ .files_only = true, .metadata = true, .max = 5000, .recursive = true });
}
