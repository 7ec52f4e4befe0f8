/* files.c -- a disk, for the core's own journal of files (core/journal_file.c): what the machine's crash keeps of it is the seed's
 * choice.
 *
 * The calls that the core makes of the C library end up here (sim.mk wraps them) where they are about a path under ROOT, or a
 * descriptor from here. Each is a point where fibers change places, may fail, and may be the last thing that its process does. A
 * process that dies leaves all that it has written, as a kernel does. When the machine dies, what was not synced is lost, or is not:
 * of each file's data all, none, a part or a hole; of the names in a folder any of the changes, each by itself, a rename as one.
 * A sync that fails has lost the data for good, and the next one says that all is well.
 *
 * What the journal has answered is kept beside it in W.journal, and compared: a record is certain from the moment its writer is
 * told, until somebody begins to take it back. */
#include "sim.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ROOT "/sim"

enum { INODES = 192, NAMES = 256, CHANGES = 512, FILES = 64, FIRST_FD = 1000, LONGEST = 100 };

typedef struct inode {
    bool used, dir, removed; /* removed: a folder without a name, which somebody has open */
    int parent;
    mode_t mode;
    char *data, *kept; /* as a process sees it; as it is on the disk */
    size_t len, kept_len;
    bool dirty; /* the two differ, and the next sync will see to it */
    bool adrift; /* they differ, as a sync has failed, and no sync will see to it */
} inode;
typedef struct name {
    int dir; /* -1 = this slot is free */
    char text[LONGEST];
    int now, kept; /* inode, or -1; as a process sees it; on the disk */
} name;
typedef struct change { /* of a name, since the last sync of its folder */
    int name, to, group; /* those of one group happen together */
} change;
typedef struct open_file {
    int inode; /* -1 = free */
    int owner;
} open_file;
typedef struct listing { /* what a DIR points to */
    int fd, count, next, fails_at; /* -1 = never */
    struct dirent entry;
    char (*text)[LONGEST];
} listing;

static inode inodes[INODES];
static name names[NAMES];
static change changes[CHANGES];
static open_file files[FILES];
static int change_count, groups;

/* ---- what every call does first ---- */

static int fail_with(int sys)
{
    errno = sys;
    return -1;
}

/* A call begins: others may go on before it takes effect, its process or its machine may die. 0, or what it fails with. */
static int begin(const char *what, int sys)
{
    if (me->held_count > 0)
        violation("%s touches a file (%s) with a mutex locked", me->name, what);
    if (P.insts == 0) /* the runtimes are being opened, and nothing else may have begun */
        return 0;
    point();
    if (chance(1, 8))
        wait_for((pdk_ns)below(20) * MS);
    if (P.healed)
        return 0;
    if (P.crashes > 0 && P.crash_rate != 0 && chance(1, 2 * P.crash_rate)) {
        P.crashes--;
        TRACE("  crash at %s", what); /* draw nothing here: its arguments are for a trace only */
        if (chance(2, 3))
            machine_crash();
        else
            crash(me->in, what);
    }
    bool focus = P.focus >= OP_RECORD && P.focus < OP_KINDS;
    if (sys == 0 || !(focus ? chance(1, 10) : P.fault_rate != 0 && chance(1, P.fault_rate + 10)))
        return 0;
    Z->faults++;
    TRACE("  %s: %s", what, strerror(sys));
    return sys;
}

static bool ours(int fd)
{
    return fd >= FIRST_FD && fd < FIRST_FD + FILES;
}

static int inode_of(int fd)
{
    return files[fd - FIRST_FD].inode;
}

static int give_fd(int node)
{
    for (int i = 0; i < FILES; i++)
        if (files[i].inode < 0) {
            files[i] = (open_file){ node, me->in != NULL ? me->in->index : -1 };
            return FIRST_FD + i;
        }
    violation("more than %d files are open", FILES);
}

/* ---- names ---- */

static int find(int dir, const char *text)
{
    for (int i = 0; i < NAMES; i++)
        if (names[i].dir == dir && strcmp(names[i].text, text) == 0)
            return i;
    return -1;
}

static int now_at(int dir, const char *text)
{
    int n = find(dir, text);
    return n < 0 ? -1 : names[n].now;
}

static void forget_names(void)
{
    bool changed[NAMES] = { false };
    for (int i = 0; i < change_count; i++)
        changed[changes[i].name] = true;
    for (int i = 0; i < NAMES; i++)
        if (names[i].now < 0 && names[i].kept < 0 && !changed[i])
            names[i].dir = -1;
}

static void set_name(int dir, const char *text, int to, int group)
{
    int n = find(dir, text);
    for (int again = 0; n < 0 && again < 2; again++) {
        for (n = NAMES - 1; n >= 0 && names[n].dir >= 0;)
            n--;
        if (n < 0)
            forget_names();
    }
    if (n < 0 || change_count == CHANGES || strlen(text) >= LONGEST)
        violation("the disk's table of names is full");
    if (names[n].dir < 0) {
        names[n] = (name){ .dir = dir, .now = -1, .kept = -1 };
        strcpy(names[n].text, text);
    }
    names[n].now = to;
    changes[change_count++] = (change){ n, to, group };
}

static void sync_names(int dir)
{
    int left = 0;
    for (int i = 0; i < NAMES; i++)
        if (names[i].dir == dir)
            names[i].kept = names[i].now;
    for (int i = 0; i < change_count; i++)
        if (names[changes[i].name].dir != dir)
            changes[left++] = changes[i];
    change_count = left;
}

static bool empty(int dir)
{
    for (int i = 0; i < NAMES; i++)
        if (names[i].dir == dir && names[i].now >= 0)
            return false;
    return true;
}

/* ---- inodes ---- */

static int new_inode(bool dir, int parent, mode_t mode)
{
    bool needed[INODES] = { [0] = true };
    for (int i = 0; i < NAMES; i++)
        for (int k = 0; names[i].dir >= 0 && k < 3; k++) {
            int node = k == 0 ? names[i].dir : k == 1 ? names[i].now : names[i].kept;
            if (node >= 0)
                needed[node] = true;
        }
    for (int i = 0; i < change_count; i++)
        if (changes[i].to >= 0)
            needed[changes[i].to] = true;
    for (int i = 0; i < FILES; i++)
        if (files[i].inode >= 0)
            needed[files[i].inode] = true;
    int node = 0;
    while (node < INODES && inodes[node].used && needed[node])
        node++;
    if (node == INODES)
        violation("the disk has no inode left");
    if (mode & 077)
        violation("%s makes a file that others may read (mode %o)", me->name, (unsigned)mode);
    free(inodes[node].data);
    free(inodes[node].kept);
    inodes[node] = (inode){ .used = true, .dir = dir, .parent = parent, .mode = mode };
    return node;
}

static void keep_data(inode *f)
{
    free(f->kept);
    f->kept = malloc(f->len + 1);
    memcpy(f->kept, f->data, f->len);
    f->kept_len = f->len;
    f->dirty = false;
}

/* ---- the machine dies ---- */

static void lose_data(inode *f)
{
    switch (below(5)) {
    case 0: keep_data(f); return;
    case 1: f->len = 0; break;
    case 2: f->len = below((uint32_t)f->len + 1); break;
    case 3: {
        uint32_t from = below((uint32_t)f->len + 1);
        memset(f->data + from, 0, f->len - from);
        break;
    }
    default:
        f->data = realloc(f->data, f->kept_len + 1);
        memcpy(f->data, f->kept != NULL ? f->kept : "", f->kept_len);
        f->len = f->kept_len;
        f->dirty = false;
        return;
    }
    keep_data(f);
}

void files_crash(void)
{
    bool keep[CHANGES];
    int most = below(3); /* all of them, none, or any */
    for (int i = 0; i < CHANGES; i++)
        keep[i] = most == 2 ? chance(1, 2) : most == 1;
    for (int i = 0; i < change_count; i++)
        if (keep[changes[i].group % CHANGES])
            names[changes[i].name].kept = changes[i].to;
    change_count = 0;
    for (int i = 0; i < NAMES; i++)
        if (names[i].dir >= 0 && names[i].now != names[i].kept) {
            TRACE("  lost: %s %.12s... in %d", names[i].kept < 0 ? "the name" : "the removal of", names[i].text, names[i].dir);
            names[i].now = names[i].kept;
        }
    for (int i = 0; i < INODES; i++)
        if (inodes[i].used && (inodes[i].dirty || inodes[i].adrift)) {
            lose_data(&inodes[i]);
            inodes[i].adrift = false;
        }
    for (int i = 0; i < INODES; i++)
        inodes[i].removed = false;
    forget_names();
}

void files_close(const inst *in)
{
    for (int i = 0; i < FILES; i++)
        if (files[i].inode >= 0 && files[i].owner == in->index)
            files[i].inode = -1;
}

void files_format(void)
{
    for (int i = 0; i < NAMES; i++)
        names[i].dir = -1;
    for (int i = 0; i < FILES; i++)
        files[i].inode = -1;
    inodes[0] = (inode){ .used = true, .dir = true, .mode = 0700 };
}

/* ---- the calls ---- */

static int open_at(int dir, const char *text, int flags, mode_t mode)
{
    int node = strcmp(text, ".") == 0 ? dir : strcmp(text, "..") == 0 ? inodes[dir].parent : now_at(dir, text);
    if (inodes[dir].removed && node != dir)
        return fail_with(ENOENT);
    if (node >= 0 && (flags & O_EXCL))
        return fail_with(EEXIST);
    if (node < 0 && !(flags & O_CREAT))
        return fail_with(ENOENT);
    if (node >= 0 && (flags & O_DIRECTORY) && !inodes[node].dir)
        return fail_with(ENOTDIR);
    if (node < 0) {
        node = new_inode(false, dir, mode);
        set_name(dir, text, node, groups++);
    }
    return give_fd(node);
}

static int make_folder(int dir, const char *text, mode_t mode)
{
    if (inodes[dir].removed)
        return fail_with(ENOENT);
    if (now_at(dir, text) >= 0)
        return fail_with(EEXIST);
    set_name(dir, text, new_inode(true, dir, mode), groups++);
    return 0;
}

/* The folder of a path under ROOT, and the last name. */
static int above(const char *path, const char **last)
{
    int dir = 0;
    char part[LONGEST];
    for (path += sizeof ROOT - 1; *path == '/'; path++)
        ;
    for (const char *slash; (slash = strchr(path, '/')) != NULL && dir >= 0; path = slash + 1) {
        snprintf(part, sizeof part, "%.*s", (int)(slash - path), path);
        dir = now_at(dir, part);
    }
    *last = *path == '\0' ? "." : path;
    return dir;
}

static bool on_disk(const char *path)
{
    return strncmp(path, ROOT, sizeof ROOT - 1) == 0 && (path[sizeof ROOT - 1] == '/' || path[sizeof ROOT - 1] == '\0');
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    if (!on_disk(path))
        return __real_open(path, flags, mode);
    int sys = begin("open", chance(1, 2) ? EIO : EMFILE);
    const char *last;
    int dir = above(path, &last);
    return sys != 0 ? fail_with(sys) : dir < 0 ? fail_with(ENOENT) : open_at(dir, last, flags, mode);
}

int __real_openat(int at, const char *path, int flags, ...);
int __wrap_openat(int at, const char *path, int flags, ...);
int __wrap_openat(int at, const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    if (!ours(at))
        return __real_openat(at, path, flags, mode);
    int sys = begin("openat", flags & O_CREAT ? ENOSPC : chance(1, 2) ? EIO : EMFILE);
    return sys != 0 ? fail_with(sys) : open_at(inode_of(at), path, flags, mode);
}

int __real_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_mkdir(const char *path, mode_t mode)
{
    if (!on_disk(path))
        return __real_mkdir(path, mode);
    const char *last;
    int dir = above(path, &last);
    return dir < 0 ? fail_with(ENOENT) : make_folder(dir, last, mode);
}

int __real_mkdirat(int at, const char *path, mode_t mode);
int __wrap_mkdirat(int at, const char *path, mode_t mode);
int __wrap_mkdirat(int at, const char *path, mode_t mode)
{
    if (!ours(at))
        return __real_mkdirat(at, path, mode);
    int sys = begin("mkdirat", ENOSPC);
    return sys != 0 ? fail_with(sys) : make_folder(inode_of(at), path, mode);
}

int __real_unlinkat(int at, const char *path, int flags);
int __wrap_unlinkat(int at, const char *path, int flags);
int __wrap_unlinkat(int at, const char *path, int flags)
{
    if (!ours(at))
        return __real_unlinkat(at, path, flags);
    int sys = begin("unlinkat", EIO), dir = inode_of(at), node = now_at(dir, path);
    if (sys != 0)
        return fail_with(sys);
    if (node < 0)
        return fail_with(ENOENT);
    if (((flags & AT_REMOVEDIR) != 0) != inodes[node].dir)
        return fail_with(inodes[node].dir ? EISDIR : ENOTDIR);
    if (inodes[node].dir && !empty(node))
        return fail_with(ENOTEMPTY);
    inodes[node].removed = inodes[node].dir;
    set_name(dir, path, -1, groups++);
    return 0;
}

int __real_renameat(int from_at, const char *from, int to_at, const char *to);
int __wrap_renameat(int from_at, const char *from, int to_at, const char *to);
int __wrap_renameat(int from_at, const char *from, int to_at, const char *to)
{
    if (!ours(from_at))
        return __real_renameat(from_at, from, to_at, to);
    int sys = begin("renameat", chance(1, 2) ? ENOSPC : EIO), node = now_at(inode_of(from_at), from);
    if (sys != 0)
        return fail_with(sys);
    if (node < 0 || inodes[inode_of(to_at)].removed)
        return fail_with(ENOENT);
    set_name(inode_of(from_at), from, -1, groups);
    set_name(inode_of(to_at), to, node, groups++);
    return 0;
}

static int stat_of(int node, struct stat *st)
{
    *st = (struct stat){ .st_dev = 1, .st_ino = (ino_t)node + 1, .st_uid = geteuid(), .st_nlink = 1 };
    st->st_mode = inodes[node].mode | (inodes[node].dir ? S_IFDIR : S_IFREG);
    st->st_size = (off_t)inodes[node].len;
    return 0;
}

int __real_fstat(int fd, struct stat *st);
int __wrap_fstat(int fd, struct stat *st);
int __wrap_fstat(int fd, struct stat *st)
{
    return ours(fd) ? stat_of(inode_of(fd), st) : __real_fstat(fd, st);
}

int __real_fstatat(int at, const char *path, struct stat *st, int flags);
int __wrap_fstatat(int at, const char *path, struct stat *st, int flags);
int __wrap_fstatat(int at, const char *path, struct stat *st, int flags)
{
    if (!ours(at))
        return __real_fstatat(at, path, st, flags);
    int sys = begin("fstatat", EIO), node = now_at(inode_of(at), path);
    return sys != 0 ? fail_with(sys) : node < 0 ? fail_with(ENOENT) : stat_of(node, st);
}

int __real_fchmod(int fd, mode_t mode);
int __wrap_fchmod(int fd, mode_t mode);
int __wrap_fchmod(int fd, mode_t mode)
{
    if (!ours(fd))
        return __real_fchmod(fd, mode);
    inodes[inode_of(fd)].mode = mode;
    return 0;
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    if (!ours(fd))
        return __real_fsync(fd);
    int sys = begin("fsync", EIO);
    inode *f = &inodes[inode_of(fd)];
    if (sys != 0) {
        f->adrift |= f->dirty;
        f->dirty = false;
        return fail_with(sys);
    }
    if (f->dir)
        sync_names(inode_of(fd));
    else if (f->dirty)
        keep_data(f);
    return 0;
}

ssize_t __real_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at);
ssize_t __wrap_pread(int fd, void *to, size_t n, off_t at)
{
    if (!ours(fd))
        return __real_pread(fd, to, n, at);
    int sys = begin("pread", chance(1, 2) ? EINTR : EIO);
    const inode *f = &inodes[inode_of(fd)];
    size_t left = (size_t)at < f->len ? f->len - (size_t)at : 0;
    n = n < left ? n : left;
    if (sys != 0)
        return fail_with(sys);
    if (n > 1 && !P.healed && chance(1, 20))
        n = 1 + below((uint32_t)n);
    memcpy(to, f->data + at, n);
    return (ssize_t)n;
}

ssize_t __real_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at);
ssize_t __wrap_pwrite(int fd, const void *from, size_t n, off_t at)
{
    if (!ours(fd))
        return __real_pwrite(fd, from, n, at);
    int sys = begin("pwrite", chance(1, 2) ? EINTR : ENOSPC);
    inode *f = &inodes[inode_of(fd)];
    if (sys != 0)
        return fail_with(sys);
    if (n > 1 && !P.healed && chance(1, 4))
        n = 1 + below((uint32_t)n);
    if ((size_t)at + n > f->len) {
        f->data = realloc(f->data, (size_t)at + n + 1);
        if ((size_t)at > f->len)
            memset(f->data + f->len, 0, (size_t)at - f->len);
        f->len = (size_t)at + n;
    }
    memcpy(f->data + at, from, n);
    f->dirty = true;
    return (ssize_t)n;
}

int __real_close(int fd);
int __wrap_close(int fd);
int __wrap_close(int fd) /* the descriptors of the snapshot stay open */
{
    if (ours(fd))
        files[fd - FIRST_FD].inode = -1;
    return 0;
}

DIR *__real_fdopendir(int fd);
DIR *__wrap_fdopendir(int fd);
DIR *__wrap_fdopendir(int fd)
{
    if (!ours(fd))
        return __real_fdopendir(fd);
    listing *l = calloc(1, sizeof *l);
    l->fd = fd;
    l->text = calloc(NAMES, sizeof *l->text);
    for (int i = 0; i < NAMES; i++)
        if (names[i].dir == inode_of(fd) && names[i].now >= 0)
            strcpy(l->text[l->count++], names[i].text);
    return (DIR *)l;
}

struct dirent *__real_readdir(DIR *d);
struct dirent *__wrap_readdir(DIR *d);
struct dirent *__wrap_readdir(DIR *d)
{
    listing *l = (listing *)d;
    if ((char *)d < ARENA_BASE || (char *)d >= ARENA_BASE + ARENA_SIZE)
        return __real_readdir(d);
    if (l->next == 0)
        l->fails_at = begin("readdir", EIO) != 0 ? (int)below((uint32_t)l->count + 1) : -1;
    errno = l->next == l->fails_at ? EIO : 0;
    if (l->next == l->count || errno != 0)
        return NULL;
    strcpy(l->entry.d_name, l->text[l->next++]);
    return &l->entry;
}

int __real_closedir(DIR *d);
int __wrap_closedir(DIR *d);
int __wrap_closedir(DIR *d)
{
    listing *l = (listing *)d;
    if ((char *)d < ARENA_BASE || (char *)d >= ARENA_BASE + ARENA_SIZE)
        return __real_closedir(d);
    __wrap_close(l->fd);
    free(l->text);
    free(l);
    return 0;
}

int __real_EVP_Digest(const void *data, size_t n, unsigned char *out, unsigned *len, const EVP_MD *type, ENGINE *impl);
int __wrap_EVP_Digest(const void *data, size_t n, unsigned char *out, unsigned *len, const EVP_MD *type, ENGINE *impl);
int __wrap_EVP_Digest(const void *data, size_t n, unsigned char *out, unsigned *len, const EVP_MD *type, ENGINE *impl)
{
    bool outer = in_core; /* what the library keeps for later is not the schedule's */
    in_core = false;
    int rc = __real_EVP_Digest(data, n, out, len, type, impl);
    in_core = outer;
    return rc;
}

/* ---- the journal: the core's own, and what is to be true of its answers ---- */

void files_open(inst *in)
{
    pdk_error err = PDK_NO_ERROR;
    in->files = pdk_journal_file(ROOT, "sim", &err);
    if (in->files == NULL)
        violation("cannot open the journal: %s", err.message);
}

static record *next_match(int *i, int id, int gen)
{
    for (; *i < W.journal_count; ++*i) {
        record *r = &W.journal[*i];
        if (r->there && r->id == id && (r->gen < 0 || gen < 0 || r->gen == gen))
            return &W.journal[(*i)++];
    }
    return NULL;
}

int files_record(op *o, const char *id, const char *generation, const char *why, pdk_error *err)
{
    int rc = pdk_journal_record(insts[o->in].files, id, generation, why, err);
    o->rc = rc < 0 ? rc : 1;
    if (rc < 0)
        return rc;
    perform(o);
    record *r = &W.journal[o->client];
    if (!r->certain)
        *r = (record){ true, true, o->id, o->gen, now };
    if (P.crashes > 0 && !P.healed && chance(1, 10)) { /* now it must be there for good */
        P.crashes--;
        machine_crash();
    }
    return 0;
}

int files_has(op *o, const char *id, const char *generation, pdk_error *err)
{
    pdk_ns since = now;
    uint64_t sure = 0;
    int i = 0;
    for (const record *r; (r = next_match(&i, o->id, o->gen)) != NULL;)
        sure |= (uint64_t)r->certain << (r - W.journal);
    o->rc = pdk_journal_has(insts[o->in].files, id, generation, err);
    i = 0;
    for (const record *r; o->rc == 0 && (r = next_match(&i, o->id, o->gen)) != NULL;)
        if (r->certain && r->since <= since && sure >> (r - W.journal) & 1)
            violation("the journal has lost the record of %c, g%d", 'a' + r->id, r->gen);
    return o->rc;
}

int files_retire(op *o, const char *id, const char *generation, pdk_error *err)
{
    uint64_t had = 0;
    int i = 0;
    check_retire(o);
    for (record *r; (r = next_match(&i, o->id, -1)) != NULL;)
        if (o->gen < 0 || r->gen == o->gen) {
            had |= (uint64_t)1 << (r - W.journal);
            r->certain = false;
        }
    int rc = pdk_journal_retire(insts[o->in].files, id, generation, err);
    o->rc = rc < 0 ? rc : 1;
    for (i = 0; rc == 0 && i < W.journal_count; i++)
        if ((had >> i & 1) && !W.journal[i].certain && W.journal[i].id == o->id)
            W.journal[i].there = false;
    return rc;
}

int files_list(op *o, pdk_pack *out, pdk_error *err)
{
    uint64_t sure = 0, told = 0;
    size_t start = out->len;
    for (int i = 0; i < W.journal_count; i++)
        sure |= (uint64_t)(W.journal[i].there && W.journal[i].certain) << i;
    int rc = pdk_journal_list(insts[o->in].files, out, err);
    o->rc = rc < 0 ? rc : 1;
    if (rc < 0)
        return rc;
    pdk_view all = { out->data + start, out->len - start }, key, one;
    for (size_t at = 0; pdk_view_next(all, &at, &key, &one);)
        for (int i = 0; i < W.journal_count; i++)
            told |= (uint64_t)(id_number(pdk_info_str(one, "sandbox_id")) == W.journal[i].id &&
                               generation_number(pdk_info_str(one, "generation")) == W.journal[i].gen)
                    << i;
    for (int i = 0; i < W.journal_count; i++)
        if ((sure & ~told) >> i & 1 && W.journal[i].there && W.journal[i].certain)
            violation("the journal does not list the record of %c, g%d", 'a' + W.journal[i].id, W.journal[i].gen);
    return 0;
}
