/* journal_file.c -- the journal on disk: it outlives every process and the machine, and is shared by all runtimes of one state
 * directory.
 *
 *   quarantine/<hash of scope and id>/<hash of scope, id and generation>     one record, a few lines of key=value
 *   quarantine/<hash of scope and id>/unknown                                one of an unknown generation
 *   .../<either>.<random>.new                                                a record that is being written, or was when its
 *                                                                            writer died: it fences what its name says
 *
 * A record is there when `record` answers: written beside, synced, renamed, and both folders synced. Every step of that leaves
 * more of a fence than the step before, and none of them less, wherever a crash cuts it off: an id's folder without any file
 * fences all of the id's generations, since a record of any of them may have been about to stand there.  Taking a record back is
 * the same in reverse: a crash leaves a fence too many, never one too few, and proving absence again removes it.
 *
 * No lock is needed, and none can be left behind: names decide, rename and rmdir are atomic, and a folder that a peer removes at
 * the wrong moment is made again. Nothing is kept in memory, and every call opens the folder anew: if that fails, so does the
 * call. An id without a folder has no record only when the folder of all records is there.
 */
#include "disk.h"
#include "fd.h"
#include "journal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define HASH       64        /* hexadecimal digits of a SHA-256 */
#define UNKNOWN    "unknown" /* the name of a record without a generation */
#define HALF       21        /* bytes of ".<16 digits>.new" */
#define NAME       (HASH + HALF + 1)
#define MAX_RECORD (1 << 20)
#define MAGIC      "paddock quarantine 1\n"
#define SUM        16 /* hexadecimal digits of the checksum in the last line */

typedef struct form { /* fixed at birth */
    char *dir;        /* state_dir/quarantine */
    char *scope;
} form;

typedef struct key { /* what an id and a generation are called on disk */
    char id[HASH + 1], record[HASH + 1];
} key;

typedef enum outcome { FAILED = -1, DONE = 0, AGAIN = 2 } outcome; /* AGAIN: a peer changed the folder under us */

static void memory_leave(void *p)
{
    free(*(void **)p);
}
#define AUTO_MEMORY __attribute__((cleanup(memory_leave)))

static void sha256_hex(char out[HASH + 1], const char *text, size_t len)
{
    unsigned char digest[32] = { 0 };
    EVP_Digest(text, len, digest, NULL, EVP_sha256(), NULL);
    pdk_hex(out, digest, sizeof digest);
}

/* false = no memory. `generation` NULL = unknown. */
static bool key_of(const char *scope, const char *id, const char *generation, key *out)
{
    size_t s = strlen(scope) + 1, i = strlen(id), g = generation != NULL ? strlen(generation) : 0;
    AUTO_MEMORY char *text = malloc(s + i + 1 + g + 1);
    if (text == NULL)
        return false;
    memcpy(text, scope, s);
    memcpy(text + s, id, i + 1);
    sha256_hex(out->id, text, s + i);
    memcpy(text + s + i + 1, generation != NULL ? generation : "", g + 1);
    if (generation != NULL)
        sha256_hex(out->record, text, s + i + 1 + g);
    else
        memcpy(out->record, UNKNOWN, sizeof UNKNOWN);
    return true;
}

static int no_memory(pdk_error *err)
{
    return pdk_fail(err, PDK_E_IO_ERROR, ENOMEM, "the quarantine records cannot be handled");
}

static int open_root(form *f, pdk_error *err)
{
    int fd = open(f->dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        pdk_fail(err, PDK_E_IO_ERROR, errno, "the quarantine records cannot be reached (%s)", f->dir);
    return fd;
}

/* An id's folder: its descriptor, or -1 with errno. */
static int open_id(int root, const char *name)
{
    return openat(root, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

static int cannot(form *f, const char *what, const char *name, int sys, pdk_error *err)
{
    return pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot %s the quarantine record %s/%s", what, f->dir, name);
}

/* ---- the text of a record ---- */

typedef struct text {
    char *p, *end; /* where the next byte goes; where memory ends */
} text;

static void put(text *t, const char *bytes)
{
    for (; *bytes != '\0' && t->p < t->end; bytes++)
        *t->p++ = *bytes;
}

/* key=value and a line feed; what is not plain, as %XX. */
static void put_line(text *t, const char *name, const char *value)
{
    if (value == NULL)
        return;
    put(t, name);
    put(t, "=");
    for (; *value != '\0'; value++) {
        char plain[] = { *value, 0 }, coded[4];
        snprintf(coded, sizeof coded, "%%%02X", (unsigned char)*value);
        put(t, *value < 0x20 || *value > 0x7e || *value == '%' ? coded : plain);
    }
    put(t, "\n");
}

static char *write_text(form *f, const char *id, const char *generation, const char *why, size_t *len)
{
    size_t room = 3 * (strlen(f->scope) + strlen(id) + (generation != NULL ? strlen(generation) : 0) + strlen(why)) + 256;
    char *bytes = malloc(room), at[40], sum[HASH + 1];
    if (bytes == NULL)
        return NULL;
    text t = { bytes, bytes + room };
    put(&t, MAGIC);
    put_line(&t, "scope", f->scope);
    put_line(&t, "id", id);
    put_line(&t, "generation", generation);
    put_line(&t, "why", why);
    snprintf(at, sizeof at, "%lld.%06d", (long long)(pdk_now_wall() / PDK_NS_PER_S),
             (int)(pdk_now_wall() % PDK_NS_PER_S / 1000));
    put_line(&t, "at", at);
    sha256_hex(sum, bytes, (size_t)(t.p - bytes));
    sum[SUM] = '\0';
    put_line(&t, "sum", sum);
    *len = (size_t)(t.p - bytes);
    return bytes;
}

typedef struct record { /* strings point into `bytes`; NULL = not there */
    char *bytes;
    const char *scope, *id, *generation, *why, *at;
} record;

static void record_free(record *r)
{
    free(r->bytes);
}
#define AUTO_RECORD __attribute__((cleanup(record_free))) record

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* %XX back to bytes, in place. */
static bool decode(char *s)
{
    char *to = s;
    for (; *s != '\0'; s++, to++) {
        *to = *s;
        if (*s != '%')
            continue;
        int high = hex_digit(s[1]), low = high < 0 ? -1 : hex_digit(s[2]);
        if (low < 0 || high * 16 + low == 0)
            return false;
        *to = (char)(high * 16 + low);
        s += 2;
    }
    *to = '\0';
    return true;
}

/* Takes apart what `write_text` has made; false = damaged. */
static bool read_text(record *r, size_t len)
{
    static const size_t head = sizeof MAGIC - 1, tail = sizeof "sum=" - 1 + SUM + 1;
    char sum[HASH + 1];
    if (len < head + tail || memcmp(r->bytes, MAGIC, head) != 0 || memchr(r->bytes, 0, len) != NULL)
        return false;
    sha256_hex(sum, r->bytes, len - tail);
    if (memcmp(r->bytes + len - tail, "sum=", 4) != 0 || memcmp(r->bytes + len - tail + 4, sum, SUM) != 0)
        return false;
    const struct {
        const char *name;
        const char **to;
    } fields[] = {
        { "scope=", &r->scope }, { "id=", &r->id }, { "generation=", &r->generation },
        { "why=", &r->why },     { "at=", &r->at },
    };
    for (char *line = r->bytes + head, *end = r->bytes + len - tail, *next; line < end; line = next) {
        next = memchr(line, '\n', (size_t)(end - line));
        if (next == NULL)
            return false;
        *next++ = '\0';
        for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
            size_t n = strlen(fields[i].name);
            if (strncmp(line, fields[i].name, n) == 0 && decode(line + n))
                *fields[i].to = line + n;
        }
    }
    return r->scope != NULL && r->id != NULL;
}

/* Reads a record and checks that it is the one that its name and its folder's name say. 0; -1 with errno, EBADMSG = damaged. */
static int read_record(int at, const char *folder, const char *name, record *r)
{
    key k;
    PDK_AUTO_FD fd = openat(at, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0)
        return -1;
    errno = EBADMSG;
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_RECORD)
        return -1;
    r->bytes = malloc((size_t)st.st_size + 1);
    if (r->bytes == NULL)
        return -1;
    ptrdiff_t n = pdk_pread_all(fd, r->bytes, (size_t)st.st_size, 0);
    if (n < 0)
        return -1;
    if (n != st.st_size || !read_text(r, (size_t)n) || !key_of(r->scope, r->id, r->generation, &k) ||
        strcmp(k.id, folder) != 0 || strcmp(k.record, name) != 0) {
        errno = EBADMSG;
        return -1;
    }
    return 0;
}

/* ---- the names in a folder ---- */

typedef struct names {
    char (*v)[NAME];
    size_t n;
} names;

static void names_free(names *l)
{
    free(l->v);
}
#define AUTO_NAMES __attribute__((cleanup(names_free))) names

/* All names in the folder `at`. One that is longer than ours can be is cut, and so is foreign too. -1 with errno. */
static int list_names(int at, names *out)
{
    int fd = openat(at, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (d == NULL) {
        int sys = errno;
        if (fd >= 0)
            close(fd);
        errno = sys;
        return -1;
    }
    struct dirent *e;
    size_t room = 0;
    int sys = 0;
    for (errno = 0; (e = readdir(d)) != NULL; errno = 0) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        if (out->n == room) {
            room = room == 0 ? 16 : 2 * room;
            void *more = realloc(out->v, room * sizeof *out->v);
            if (more == NULL)
                break;
            out->v = more;
        }
        snprintf(out->v[out->n++], NAME, "%s", e->d_name);
    }
    sys = errno;
    closedir(d);
    errno = sys;
    return sys != 0 ? -1 : 0;
}

static bool hexadecimal(const char *s, size_t n)
{
    return strspn(s, "0123456789abcdef") >= n;
}

/* How long the part of the name is that says which generation: of a record, or of half a one. 0 = neither. */
static size_t stem(const char *name, bool *half)
{
    size_t n = strncmp(name, UNKNOWN, sizeof UNKNOWN - 1) == 0 ? sizeof UNKNOWN - 1 : hexadecimal(name, HASH) ? HASH : 0;
    *half = n > 0 && name[n] == '.' && hexadecimal(name + n + 1, 16) && strcmp(name + n + 17, ".new") == 0;
    return n > 0 && (*half || name[n] == '\0') ? n : 0;
}

static bool stem_is(const char *name, size_t n, const char *record)
{
    return strlen(record) == n && memcmp(name, record, n) == 0;
}

/* ---- record ---- */

/* A crash has left the id's folder without a file; but give a peer that is about to fill it some time. */
static bool left_empty(int at)
{
    for (int look = 0; look < 3; look++) {
        AUTO_NAMES all = { 0 };
        if (list_names(at, &all) < 0 || all.n > 0)
            return false;
        if (look < 2)
            pdk_sleep_ns(5 * 1000 * 1000);
    }
    return true;
}

/* Writes and syncs the file `half`, and gives it its name. */
static outcome write_file(form *f, int at, const char *half, const char *name, const char *bytes, size_t len, pdk_error *err)
{
    PDK_AUTO_FD fd = openat(at, half, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT)
        return AGAIN;
    if (fd < 0)
        return cannot(f, "make", name, errno, err);
    if (fchmod(fd, 0600) < 0 || pdk_pwrite_all(fd, bytes, len, 0) < 0 || fsync(fd) < 0) {
        int sys = errno;
        unlinkat(at, half, 0);
        return cannot(f, "write", name, sys, err);
    }
    if (renameat(at, half, at, name) == 0)
        return DONE;
    int sys = errno;
    unlinkat(at, half, 0);
    return sys == ENOENT ? AGAIN : cannot(f, "name", name, sys, err); /* ENOENT: retired with all that was there */
}

static outcome add(form *f, int at, const char *id, const char *generation, const char *why, pdk_error *err)
{
    key k;
    size_t len;
    uint64_t random;
    char half[NAME];
    if (!key_of(f->scope, id, generation, &k))
        return no_memory(err);
    AUTO_RECORD former = { 0 };
    /* one of an unknown generation is written anew: it may not be the same event, and a mirror tells them apart by their time */
    PDK_AUTO_FD there =
        generation == NULL ? -1 : openat(at, k.record, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (there >= 0 && read_record(at, k.id, k.record, &former) == 0) /* but whoever wrote it may not have come to its sync */
        return fsync(there) == 0 ? DONE : cannot(f, "sync", k.record, errno, err);
    AUTO_MEMORY char *bytes = write_text(f, id, generation, why, &len);
    if (bytes == NULL)
        return no_memory(err);
    if (len > MAX_RECORD)
        return cannot(f, "write", k.record, EFBIG, err);
    pdk_random(&random, sizeof random);
    snprintf(half, sizeof half, "%s.%016llx.new", k.record, (unsigned long long)random);
    return write_file(f, at, half, k.record, bytes, len, err);
}

static outcome try_record(form *f, int root, const char *id, const char *generation, const char *why, pdk_error *err)
{
    key k;
    if (!key_of(f->scope, id, generation, &k))
        return no_memory(err);
    bool made = mkdirat(root, k.id, 0700) == 0;
    if (!made && errno != EEXIST)
        return cannot(f, "make", k.id, errno, err);
    PDK_AUTO_FD at = open_id(root, k.id);
    if (at < 0)
        return errno == ENOENT ? AGAIN : cannot(f, "open", k.id, errno, err);
    outcome done = made && fchmod(at, 0700) < 0 ? cannot(f, "protect", k.id, errno, err) : DONE;
    if (done == DONE && !made && left_empty(at)) /* the fence that it was must outlast this record */
        done = add(f, at, id, NULL, "a record was begun and a crash cut it off", err);
    if (done == DONE)
        done = add(f, at, id, generation, why, err);
    if (done == DONE && (fsync(at) < 0 || fsync(root) < 0))
        done = cannot(f, "sync", k.id, errno, err);
    if (done != DONE && made)
        unlinkat(root, k.id, AT_REMOVEDIR); /* unless something is in it: the disk was full, and that is no fence */
    return done;
}

static int file_record(void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    form *f = self;
    PDK_AUTO_FD root = open_root(f, err);
    if (root < 0)
        return -1;
    for (int tries = 0; tries < 50; tries++) {
        outcome done = try_record(f, root, id, generation, why, err);
        if (done != AGAIN)
            return done;
    }
    return cannot(f, "keep", id, EAGAIN, err);
}

/* ---- has ---- */

/* What one file of an id's folder says: 1 = it fences `wanted`, 0 = it does not, -1 = error, AGAIN = it is gone by now. */
static int fences(form *f, int at, const char *folder, const char *name, const char *wanted, bool any, pdk_error *err)
{
    bool half;
    size_t n = stem(name, &half);
    AUTO_RECORD content = { 0 };
    if (n == 0)
        return cannot(f, "understand", name, 0, err);
    if (!half && read_record(at, folder, name, &content) < 0)
        return errno == ENOENT ? AGAIN : cannot(f, "read", name, errno, err);
    return any || stem_is(name, n, UNKNOWN) || stem_is(name, n, wanted);
}

/* 1, 0, -1, or AGAIN. All files are looked at: one that cannot be read may be of any generation. */
static int look(form *f, int root, const key *k, bool any, pdk_error *err)
{
    PDK_AUTO_FD at = open_id(root, k->id);
    AUTO_NAMES all = { 0 };
    if (at < 0)
        return errno == ENOENT ? 0 : cannot(f, "open", k->id, errno, err);
    if (list_names(at, &all) < 0)
        return cannot(f, "list", k->id, errno, err);
    int found = 0;
    for (size_t i = 0; i < all.n; i++) {
        int rc = fences(f, at, k->id, all.v[i], k->record, any, err);
        if (rc != 0 && rc != 1)
            return rc;
        found |= rc;
    }
    if (all.n > 0)
        return found;
    struct stat was, is; /* empty: a fence, unless it was being removed just now */
    if (fstat(at, &was) < 0 || fstatat(root, k->id, &is, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : cannot(f, "look at", k->id, errno, err);
    return was.st_ino == is.st_ino && was.st_dev == is.st_dev ? 1 : AGAIN;
}

/* The folder of the records, and the key of what is asked about. -1 = error. */
static int open_for(form *f, const char *id, const char *generation, key *k, pdk_error *err)
{
    return key_of(f->scope, id, generation, k) ? open_root(f, err) : no_memory(err);
}

static int file_has(void *self, const char *id, const char *generation, pdk_error *err)
{
    form *f = self;
    key k;
    PDK_AUTO_FD root = open_for(f, id, generation, &k, err);
    if (root < 0)
        return -1;
    for (int tries = 0; tries < 50; tries++) {
        int rc = look(f, root, &k, generation == NULL, err);
        if (rc != AGAIN)
            return rc;
    }
    return cannot(f, "read", k.id, EAGAIN, err);
}

/* ---- retire ---- */

static int file_retire(void *self, const char *id, const char *generation, pdk_error *err)
{
    form *f = self;
    key k;
    PDK_AUTO_FD root = open_for(f, id, generation, &k, err);
    if (root < 0)
        return -1;
    PDK_AUTO_FD at = open_id(root, k.id);
    AUTO_NAMES all = { 0 };
    if (at < 0)
        return errno == ENOENT ? 0 : cannot(f, "open", k.id, errno, err);
    if (list_names(at, &all) < 0)
        return cannot(f, "list", k.id, errno, err);
    size_t removed = 0;
    for (size_t i = 0; i < all.n; i++) {
        bool half;
        if (generation != NULL && !stem_is(all.v[i], stem(all.v[i], &half), k.record))
            continue;
        if (unlinkat(at, all.v[i], 0) < 0 && errno != ENOENT)
            return cannot(f, "remove", all.v[i], errno, err);
        removed++;
    }
    if (generation != NULL && removed == 0)
        return 0; /* an empty folder is a fence of a generation that nobody knows, not of this one */
    bool gone = unlinkat(root, k.id, AT_REMOVEDIR) == 0 || errno == ENOENT;
    if (!gone && errno != ENOTEMPTY && errno != EEXIST)
        return cannot(f, "remove", k.id, errno, err);
    return fsync(gone ? root : at) < 0 ? cannot(f, "sync", k.id, errno, err) : 0;
}

/* ---- list ---- */

static void list_one(form *f, pdk_pack *out, pdk_mark *list, const char *folder, const char *name, const record *r,
                     const char *problem)
{
    char path[NAME + HASH + 2];
    snprintf(path, sizeof path, "%s%s%s", folder, name != NULL ? "/" : "", name != NULL ? name : "");
    pdk_mark one = pdk_begin_map(out);
    pdk_kv_cstr(out, &one, "path", path);
    pdk_kv_cstr(out, &one, "sandbox_id", r->id);
    pdk_kv_cstr(out, &one, "generation", r->generation);
    pdk_kv_cstr(out, &one, "why", r->why);
    pdk_kv_cstr(out, &one, "scope", r->scope);
    pdk_kv_bool(out, &one, "here", r->scope != NULL && strcmp(r->scope, f->scope) == 0);
    pdk_kv_cstr(out, &one, "problem", problem);
    if (r->at != NULL) {
        double at = strtod(r->at, NULL), age = pdk_to_seconds(pdk_now_wall()) - at;
        pdk_kv_num(out, &one, "at", at);
        pdk_kv_num(out, &one, "age", age > 0 ? age : 0);
    }
    pdk_end(out, &one);
    list->count++;
}

static void list_folder(form *f, int root, const char *folder, pdk_pack *out, pdk_mark *list)
{
    static const record nothing = { 0 };
    PDK_AUTO_FD at = open_id(root, folder);
    AUTO_NAMES all = { 0 };
    if (at < 0 && errno == ENOENT)
        return;
    if (at < 0 || list_names(at, &all) < 0) {
        list_one(f, out, list, folder, NULL, &nothing, "cannot be read");
        return;
    }
    if (all.n == 0)
        list_one(f, out, list, folder, NULL, &nothing, "is empty, as a crash left it: it fences every generation of its id");
    for (size_t i = 0; i < all.n; i++) {
        bool half;
        AUTO_RECORD r = { 0 };
        if (stem(all.v[i], &half) == 0 || half)
            list_one(f, out, list, folder, all.v[i], &nothing, half ? "was cut off by a crash" : "is no record");
        else if (read_record(at, folder, all.v[i], &r) == 0)
            list_one(f, out, list, folder, all.v[i], &r, NULL);
        else if (errno != ENOENT)
            list_one(f, out, list, folder, all.v[i], &nothing, "cannot be read, or is damaged");
    }
}

static int file_list(void *self, pdk_pack *out, pdk_error *err)
{
    form *f = self;
    AUTO_NAMES all = { 0 };
    PDK_AUTO_FD root = open_root(f, err);
    if (root < 0)
        return -1;
    if (list_names(root, &all) < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "the quarantine records cannot be listed (%s)", f->dir);
    pdk_mark list = pdk_begin_list(out);
    for (size_t i = 0; i < all.n; i++)
        list_folder(f, root, all.v[i], out, &list);
    pdk_end(out, &list);
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal's list") : 0;
}

/* ---- open, close ---- */

static void file_free(void *self)
{
    form *f = self;
    free(f->dir);
    free(f->scope);
    free(f);
}

static const pdk_journal_ops file_ops = {
    .type = "file", .record = file_record, .has = file_has, .retire = file_retire, .list = file_list, .free = file_free
};

pdk_journal *pdk_journal_file(const char *state_dir, const char *scope, pdk_error *err)
{
    size_t len = strlen(state_dir) + sizeof "/quarantine";
    form *f = calloc(1, sizeof *f);
    if (f == NULL || (f->dir = malloc(len)) == NULL || (f->scope = strdup(scope)) == NULL) {
        if (f != NULL)
            file_free(f);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal");
        return NULL;
    }
    snprintf(f->dir, len, "%s/quarantine", state_dir);
    PDK_AUTO_FD dir = pdk_dir_own(f->dir, PDK_E_IO_ERROR, err), above = -1;
    int rc = dir < 0 ? -1 : 0;
    if (rc == 0 &&
        ((above = openat(dir, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0 || fsync(dir) < 0 || fsync(above) < 0))
        rc = pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot sync the folder %s", f->dir);
    if (rc == 0)
        return pdk_journal_new(&file_ops, f, err);
    file_free(f);
    return NULL;
}
