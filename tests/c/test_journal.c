/* test_journal.c -- the rules of the journal, one suite over its forms; then what is true of the form on disk alone: that it is
 * there when it says so, crashes, damage, full disks, other processes. */
#include "disk.h"
#include "journal.h"
#include "smalldisk.h"
#include "test.h"
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/sha.h>
#include <sys/mman.h>
#include <sys/syscall.h>

static char dir[128]; /* the state directory */

/* In memory where there is such a place: hundreds of crashes with four syncs each take their time on a disk. */
static char memory_dir[] = "/dev/shm/pdk-test-XXXXXX";
static bool memory_dir_made;

static void memory_dir_end(void)
{
    nftw(memory_dir, test_remove, 16, FTW_DEPTH | FTW_PHYS);
}

static void clean_dir(void)
{
    char path[200];
    if (!memory_dir_made && mkdtemp(memory_dir) != NULL) {
        memory_dir_made = true;
        atexit(memory_dir_end);
    }
    snprintf(dir, sizeof dir, "%s/state", memory_dir_made ? memory_dir : test_tmpdir());
    snprintf(path, sizeof path, "%s/quarantine", dir);
    mkdir(dir, 0700);
    nftw(path, test_remove, 16, FTW_DEPTH | FTW_PHYS);
    remove(path);
}

static pdk_journal *scoped(const char *scope)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_journal *j = pdk_journal_file(dir, scope, &err);
    if (j == NULL)
        fprintf(stderr, "  %s\n", err.message);
    return j;
}
static pdk_journal *open_file(void)
{
    clean_dir();
    return scoped("");
}
static pdk_journal *open_memory(void)
{
    return pdk_journal_memory(NULL);
}
static const struct form {
    const char *name;
    pdk_journal *(*open)(void);
} FORMS[] = { { "memory", open_memory }, { "file", open_file } };

static int said(int rc, const pdk_error *err)
{
    if (rc < 0)
        fprintf(stderr, "  %s\n", err->message);
    return rc;
}
static int record(pdk_journal *j, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_journal_record(j, id, generation, "test", &err);
    return said(rc, &err);
}
static int has(pdk_journal *j, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_journal_has(j, id, generation, &err);
    return said(rc, &err);
}
static int retire(pdk_journal *j, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_journal_retire(j, id, generation, &err);
    return said(rc, &err);
}

/* The call fails with io_error: 'r' record, 'h' has, 't' retire. */
static bool fails(pdk_journal *j, char what, const char *id, const char *generation)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = what == 'r'   ? pdk_journal_record(j, id, generation, "test", &err)
             : what == 'h' ? pdk_journal_has(j, id, generation, &err)
                           : pdk_journal_retire(j, id, generation, &err);
    return CHECK_INT(rc, -1) && CHECK_KIND(err, PDK_E_IO_ERROR) && CHECK(err.message[0] != '\0');
}

static size_t listed(pdk_journal *j, pdk_pack *out)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_pack_reset(out);
    int rc = pdk_journal_list(j, out, &err);
    return said(rc, &err) < 0 ? 999 : pdk_view_count(pdk_view_of(out));
}

/* ---- places on disk ------------------------------------------------------------------------------------------------- */

static void hash(char *out, const char *text, size_t len)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)text, len, digest);
    pdk_hex(out, digest, sizeof digest);
}
/* Of the id's folder, or with `file` of something in it. */
static const char *place(const char *id, const char *file)
{
    static char path[500];
    char text[200] = "", name[65];
    memcpy(text + 1, id, strlen(id)); /* the scope "" and its NUL */
    hash(name, text, strlen(id) + 1);
    snprintf(path, sizeof path, "%s/quarantine/%s%s%s", dir, name, file != NULL ? "/" : "", file != NULL ? file : "");
    return path;
}
static const char *file_of(const char *id, const char *generation)
{
    static char name[65];
    char text[200];
    int len = snprintf(text, sizeof text, "%c%s%c%s", 0, id, 0, generation);
    hash(name, text, (size_t)len);
    return name;
}
static void put_file(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    CHECK(f != NULL && fputs(text, f) >= 0 && fclose(f) == 0);
}
static int mode_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (int)(st.st_mode & 07777) : -1;
}
static bool missing(const char *path)
{
    struct stat st;
    return lstat(path, &st) < 0 && errno == ENOENT;
}

/* ---- the rules, over every form -------------------------------------------------------------------------------------- */

TEST("a record is of one generation: another one of the same id is not fenced [K5]")
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        pdk_journal *j = FORMS[i].open();
        REQUIRE(j != NULL && CHECK_STR(pdk_journal_type(j), FORMS[i].name));
        CHECK_INT(has(j, "a", "g1"), 0);
        CHECK_INT(has(j, "a", NULL), 0);
        CHECK_INT(record(j, "a", "g1"), 0);
        CHECK_INT(has(j, "a", "g1"), 1);
        CHECK_INT(has(j, "a", "g2"), 0);
        CHECK_INT(has(j, "b", "g1"), 0);
        pdk_journal_free(j);
    }
}

TEST("one of an unknown generation fences them all, and an unknown generation matches any record of the id [K5]")
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        pdk_journal *j = FORMS[i].open();
        REQUIRE(j != NULL);
        CHECK_INT(record(j, "a", NULL), 0);
        CHECK_INT(has(j, "a", "g1"), 1);
        CHECK_INT(has(j, "a", "g2"), 1);
        CHECK_INT(has(j, "a", NULL), 1);
        CHECK_INT(has(j, "b", NULL), 0);
        CHECK_INT(record(j, "b", "g1"), 0);
        CHECK_INT(has(j, "b", NULL), 1);
        pdk_journal_free(j);
    }
}

TEST("retiring a generation leaves every other record; one that was not known takes all of the id [K4 K5]")
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        pdk_journal *j = FORMS[i].open();
        REQUIRE(j != NULL);
        CHECK_INT(retire(j, "a", "g1"), 0); /* nothing there */
        CHECK_INT(retire(j, "a", NULL), 0);
        CHECK_INT(record(j, "a", "g1") + record(j, "a", "g2") + record(j, "a", NULL) + record(j, "b", "g1"), 0);
        CHECK_INT(retire(j, "a", "g1"), 0);
        CHECK_INT(has(j, "a", "g1"), 1); /* by the unknown one */
        CHECK_INT(retire(j, "a", "g3"), 0);
        CHECK_INT(has(j, "a", "g3"), 1);
        CHECK_INT(retire(j, "a", NULL), 0);
        CHECK_INT(has(j, "a", NULL), 0);
        CHECK_INT(has(j, "a", "g2"), 0);
        CHECK_INT(has(j, "b", "g1"), 1);
        CHECK_INT(retire(j, "b", "g1"), 0);
        CHECK_INT(has(j, "b", NULL), 0);
        pdk_journal_free(j);
    }
}

TEST("recording and retiring twice is the same as once [K19]")
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        pdk_journal *j = FORMS[i].open();
        REQUIRE(j != NULL);
        PDK_AUTO_PACK list = PDK_NO_PACK;
        CHECK_INT(record(j, "a", "g1") + record(j, "a", "g1") + record(j, "a", NULL) + record(j, "a", NULL), 0);
        CHECK_INT(listed(j, &list), 2);
        CHECK_INT(retire(j, "a", "g1") + retire(j, "a", "g1"), 0);
        CHECK_INT(listed(j, &list), 1);
        CHECK_INT(retire(j, "a", NULL) + retire(j, "a", NULL), 0);
        CHECK_INT(listed(j, &list), 0);
        pdk_journal_free(j);
    }
}

TEST("generations of any bytes and lengths are told apart, and listed as they are")
{
    for (size_t i = 0; i < sizeof FORMS / sizeof *FORMS; i++) {
        pdk_journal *j = FORMS[i].open();
        REQUIRE(j != NULL);
        static char longest[20001];
        memset(longest, 'g', sizeof longest - 1);
        const char *const odd[] = { "", "unknown", "a=b\nid=c\r", "%41", "A", "\xff\x01 \x7f", "../../etc/passwd", longest };
        for (size_t k = 0; k < sizeof odd / sizeof *odd; k++) {
            CHECK_INT(has(j, "a", odd[k]), 0);
            CHECK_INT(pdk_journal_record(j, "a", odd[k], "why = %\n\xff", NULL), 0);
            CHECK_INT(has(j, "a", odd[k]), 1);
            PDK_AUTO_PACK list = PDK_NO_PACK;
            CHECK_INT(listed(j, &list), 1);
            size_t cursor = 0;
            pdk_view key, one;
            CHECK(pdk_view_next(pdk_view_of(&list), &cursor, &key, &one));
            CHECK_STR(pdk_view_str(pdk_view_get(one, "sandbox_id"), NULL), "a");
            CHECK_STR(pdk_view_str(pdk_view_get(one, "generation"), NULL), odd[k]);
            CHECK_STR(pdk_view_str(pdk_view_get(one, "why"), NULL), "why = %\n\xff");
            CHECK_INT(retire(j, "a", odd[k]), 0);
            CHECK_INT(has(j, "a", NULL), 0);
        }
        pdk_journal_free(j);
    }
}

/* ---- on disk ------------------------------------------------------------------------------------------------------- */

TEST("file: what one runtime recorded, another one finds, also later [K3 K19]")
{
    pdk_journal *j = open_file(), *peer = scoped("");
    REQUIRE(j != NULL && peer != NULL);
    CHECK_INT(record(j, "a", "g1") + record(j, "b", NULL), 0);
    CHECK_INT(has(peer, "a", "g1"), 1);
    pdk_journal_free(j);
    pdk_journal_free(peer);
    j = scoped("");
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(has(j, "b", "g7"), 1);
    CHECK_INT(retire(j, "a", "g1") + retire(j, "b", NULL), 0);
    CHECK(missing(place("a", NULL)) && missing(place("b", NULL))); /* nothing grows */
    pdk_journal_free(j);
}

TEST("file: one id in two scopes is two records; the list says which is whose [K19]")
{
    clean_dir();
    pdk_journal *one = scoped("engine-1"), *two = scoped("engine-2");
    REQUIRE(one != NULL && two != NULL);
    PDK_AUTO_PACK list = PDK_NO_PACK;
    CHECK_INT(record(one, "a", "g1"), 0);
    CHECK_INT(has(two, "a", "g1"), 0);
    CHECK_INT(retire(two, "a", NULL), 0);
    CHECK_INT(has(one, "a", "g1"), 1);
    CHECK_INT(listed(one, &list), 1);
    pdk_view key, r;
    size_t cursor = 0;
    double at = 0, age = -1;
    CHECK(pdk_view_next(pdk_view_of(&list), &cursor, &key, &r));
    CHECK_STR(pdk_view_str(pdk_view_get(r, "scope"), NULL), "engine-1");
    CHECK_STR(pdk_view_str(pdk_view_get(r, "why"), NULL), "test");
    CHECK(pdk_view_bool(pdk_view_get(r, "here"), false));
    CHECK(pdk_view_num(pdk_view_get(r, "at"), &at) && pdk_view_num(pdk_view_get(r, "age"), &age));
    CHECK_NUM(at, (double)time(NULL), 5);
    CHECK_NUM(age, 0, 5);
    CHECK_INT(strlen(pdk_view_str(pdk_view_get(r, "path"), NULL)), 64 + 1 + 64);
    CHECK_INT(listed(two, &list), 1);
    cursor = 0;
    CHECK(pdk_view_next(pdk_view_of(&list), &cursor, &key, &r) && !pdk_view_bool(pdk_view_get(r, "here"), true));
    pdk_journal_free(one);
    pdk_journal_free(two);
}

TEST("file: only its owner may look, whatever the umask [K19]")
{
    mode_t masks[] = { 0, 0777, 022 };
    for (int i = 0; i < 3; i++) {
        clean_dir();
        mode_t old = umask(masks[i]);
        pdk_journal *j = scoped("");
        int rc = j == NULL ? -1 : record(j, "a", "g1");
        umask(old);
        REQUIRE(j != NULL && rc == 0);
        char path[200];
        snprintf(path, sizeof path, "%s/quarantine", dir);
        CHECK_INT(mode_of(path), 0700);
        CHECK_INT(mode_of(place("a", NULL)), 0700);
        CHECK_INT(mode_of(place("a", file_of("a", "g1"))), 0600);
        chmod(path, 0777);
        pdk_journal_free(j);
        pdk_journal_free(scoped(""));
        CHECK_INT(mode_of(path), 0700);
    }
}

TEST("file: a folder that a crash left empty fences every generation, until one that nobody knows is proven absent [K19]")
{
    pdk_journal *j = open_file();
    REQUIRE(j != NULL);
    PDK_AUTO_PACK list = PDK_NO_PACK;
    CHECK_INT(mkdir(place("a", NULL), 0700), 0);
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(has(j, "a", NULL), 1);
    CHECK_INT(listed(j, &list), 1);
    CHECK_INT(retire(j, "a", "g1"), 0);
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(record(j, "a", "g1"), 0); /* a record must not lift what the empty folder was */
    CHECK_INT(retire(j, "a", "g1"), 0);
    CHECK_INT(has(j, "a", "g2"), 1);
    CHECK_INT(retire(j, "a", NULL), 0);
    CHECK_INT(has(j, "a", NULL), 0);
    CHECK(missing(place("a", NULL)));
    pdk_journal_free(j);
}

TEST("file: half a record fences its generation, and goes with it [K19]")
{
    pdk_journal *j = open_file();
    REQUIRE(j != NULL);
    PDK_AUTO_PACK list = PDK_NO_PACK;
    char name[120];
    CHECK_INT(record(j, "a", "g2"), 0);
    snprintf(name, sizeof name, "%s.0123456789abcdef.new", file_of("a", "g1"));
    put_file(place("a", name), "paddock quar");
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(has(j, "a", "g3"), 0);
    CHECK_INT(listed(j, &list), 2);
    CHECK_INT(record(j, "a", "g1"), 0);
    CHECK_INT(retire(j, "a", "g1"), 0);
    CHECK_INT(has(j, "a", "g1"), 0);
    CHECK_INT(has(j, "a", "g2"), 1);
    put_file(place("a", "unknown.0123456789abcdef.new"), "");
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(retire(j, "a", NULL), 0);
    CHECK_INT(has(j, "a", NULL), 0);
    pdk_journal_free(j);
}

/* Each spoils the record of a's g1 in its own way. */
static void spoil_cut(const char *path)
{
    CHECK_INT(truncate(path, 40), 0);
}
static void spoil_empty(const char *path)
{
    CHECK_INT(truncate(path, 0), 0);
}
static void spoil_flip(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    char c = 0;
    CHECK(pread(fd, &c, 1, 30) == 1 && (c ^= 1, pwrite(fd, &c, 1, 30) == 1));
    close(fd);
}
static void spoil_other(const char *path) /* a sound record, but of another generation */
{
    char from[500];
    snprintf(from, sizeof from, "%s", place("a", file_of("a", "g2")));
    unlink(path);
    CHECK_INT(link(from, path), 0);
}
static void spoil_folder(const char *path)
{
    unlink(path);
    CHECK_INT(mkdir(path, 0700), 0);
}
static void spoil_link(const char *path)
{
    unlink(path);
    CHECK_INT(symlink("/dev/null", path), 0);
}
static void spoil_pipe(const char *path)
{
    unlink(path);
    CHECK_INT(mkfifo(path, 0600), 0);
}

TEST("file: a record that cannot be read is an error for its id, never `no record`, and can be recorded anew [K19]")
{
    void (*const spoils[])(const char *) = { spoil_cut,  spoil_empty, spoil_flip,  spoil_other,
                                             spoil_link, spoil_pipe,  spoil_folder };
    for (size_t i = 0; i < sizeof spoils / sizeof *spoils; i++) {
        pdk_journal *j = open_file();
        REQUIRE(j != NULL);
        PDK_AUTO_PACK list = PDK_NO_PACK;
        CHECK_INT(record(j, "a", "g1") + record(j, "a", "g2") + record(j, "b", "g1"), 0);
        char path[500];
        snprintf(path, sizeof path, "%s", place("a", file_of("a", "g1")));
        spoils[i](path);
        fails(j, 'h', "a", "g1");
        fails(j, 'h', "a", "g2");
        fails(j, 'h', "a", "g3");
        fails(j, 'h', "a", NULL);
        CHECK_INT(has(j, "b", "g1"), 1);
        CHECK_INT(listed(j, &list), 3);
        if (spoils[i] == spoil_folder) {
            fails(j, 'r', "a", "g1"); /* not ours to remove */
            fails(j, 't', "a", NULL);
        } else {
            CHECK_INT(record(j, "a", "g1"), 0);
            CHECK_INT(has(j, "a", "g1"), 1);
            spoils[i](path);
            CHECK_INT(retire(j, "a", NULL), 0);
            CHECK_INT(has(j, "a", NULL), 0);
        }
        pdk_journal_free(j);
    }
}

TEST("file: a foreign file, or something else in the place of a folder, is an error [K19]")
{
    pdk_journal *j = open_file();
    REQUIRE(j != NULL);
    CHECK_INT(record(j, "a", "g1"), 0);
    put_file(place("a", "notes.txt"), "?");
    fails(j, 'h', "a", "g1");
    unlink(place("a", "notes.txt"));
    CHECK_INT(has(j, "a", "g1"), 1);
    put_file(place("b", NULL), "?");
    fails(j, 'h', "b", "g1");
    fails(j, 'r', "b", "g1");
    fails(j, 't', "b", NULL);
    CHECK_INT(symlink("/tmp", place("c", NULL)), 0);
    fails(j, 'h', "c", "g1");
    fails(j, 'r', "c", "g1");
    PDK_AUTO_PACK list = PDK_NO_PACK;
    CHECK_INT(listed(j, &list), 3);
    pdk_journal_free(j);
}

TEST("file: without its folder every call is an error, never `no record` [K6 K19]")
{
    for (int i = 0; i < 2; i++) {
        pdk_journal *j = open_file();
        REQUIRE(j != NULL);
        clean_dir();
        char path[200];
        snprintf(path, sizeof path, "%s/quarantine", dir);
        if (i == 1)
            put_file(path, "?");
        PDK_AUTO_PACK list = PDK_NO_PACK;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        fails(j, 'h', "a", "g1");
        fails(j, 'h', "a", NULL);
        fails(j, 'r', "a", "g1");
        fails(j, 't', "a", "g1");
        CHECK_INT(pdk_journal_list(j, &list, &err), -1);
        CHECK_KIND(err, PDK_E_IO_ERROR);
        pdk_error_clear(&err);
        if (i == 1) {
            CHECK(pdk_journal_file(dir, "", &err) == NULL);
            CHECK_KIND(err, PDK_E_IO_ERROR);
        }
        pdk_journal_free(j);
    }
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    CHECK(pdk_journal_file("/nowhere/at/all", "", &err) == NULL);
    CHECK_KIND(err, PDK_E_IO_ERROR);
    clean_dir();
}

TEST("file: on a full disk a record is an error and leaves no fence; on a read-only one it is still read [K6]")
{
    const char *disk = small_disk();
    if (disk == NULL)
        SKIP("only root can mount a small disk");
    snprintf(dir, sizeof dir, "%s", disk);
    pdk_journal *j = scoped("");
    REQUIRE(j != NULL);
    char filler[200];
    snprintf(filler, sizeof filler, "%s/filler", disk);
    CHECK_INT(record(j, "a", "g1"), 0);
    small_disk_fill(filler);
    fails(j, 'r', "b", "g1");
    fails(j, 'r', "a", "g2");
    CHECK_INT(has(j, "b", "g1"), 0);
    CHECK(missing(place("b", NULL)));
    CHECK_INT(has(j, "a", "g2"), 0);
    CHECK_INT(has(j, "a", "g1"), 1);
    unlink(filler);
    CHECK_INT(record(j, "b", "g1"), 0);
    REQUIRE(small_disk_read_only());
    CHECK_INT(has(j, "b", "g1"), 1);
    CHECK_INT(has(j, "c", "g1"), 0);
    fails(j, 'r', "c", "g1");
    fails(j, 't', "b", "g1");
    CHECK_INT(has(j, "b", "g1"), 1);
    pdk_journal_free(j);
    clean_dir();
}

TEST("file: no descriptor stays open between calls")
{
    int before = test_fds();
    pdk_journal *j = open_file();
    PDK_AUTO_PACK list = PDK_NO_PACK;
    CHECK_INT(record(j, "a", "g1") + record(j, "a", NULL), 0);
    CHECK_INT(has(j, "a", "g1"), 1);
    CHECK_INT(listed(j, &list), 2);
    CHECK_INT(retire(j, "a", NULL), 0);
    CHECK_INT(test_fds(), before);
    pdk_journal_free(j);
}

/* ---- crashes ------------------------------------------------------------------------------------------------------- */

static int *done; /* shared with the child */

static void step_record(void *arg)
{
    (void)arg;
    pdk_journal *j = scoped("");
    raise(SIGSTOP);
    if (record(j, "a", "g1") == 0)
        *done = 1;
}
static void step_retire(void *arg)
{
    pdk_journal *j = scoped("");
    raise(SIGSTOP);
    if (retire(j, "a", arg) == 0)
        *done = 1;
}

static void share_done(void)
{
    if (done == NULL)
        done = mmap(NULL, sizeof *done, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    *done = 0;
}

TEST("file: a writer that dies at any system call leaves a fence or nothing, ever more of it, and takes none away [K19]")
{
    enum { FRESH, BESIDE, EMPTY, AGAIN, CASES };
    for (int c = FRESH; c < CASES; c++) {
        int ended = 0, n = 1, fenced = 0;
        for (; !ended && n < 400; n++) {
            pdk_journal *j = open_file();
            share_done();
            if (c == BESIDE)
                record(j, "a", "g2");
            else if (c == EMPTY)
                mkdir(place("a", NULL), 0700);
            else if (c == AGAIN)
                record(j, "a", "g1");
            ended = kill_at(step_record, NULL, n);
            if (ended < 0)
                SKIP("this system does not let a process be traced");
            int now = has(j, "a", "g1"), other = has(j, "a", "g2");
            bool good = CHECK(now >= fenced) && CHECK(now == 1 || (!*done && c != AGAIN && c != EMPTY));
            good = good && CHECK_INT(other, c == BESIDE || c == EMPTY ? 1 : c == AGAIN || *done ? 0 : other) && other >= 0;
            good = good && CHECK_INT(record(j, "a", "g1"), 0) &&
                   CHECK_INT(has(j, "a", "g1"), 1); /* the next one tries again */
            good = good && CHECK_INT(retire(j, "a", "g1"), 0);
            good = good && CHECK(c != BESIDE || has(j, "a", "g2") == 1) && CHECK(c != EMPTY || has(j, "a", "g3") == 1);
            good = good && CHECK_INT(retire(j, "a", NULL), 0) && CHECK_INT(has(j, "a", NULL), 0) &&
                   missing(place("a", NULL));
            pdk_journal_free(j);
            if (!good) {
                fprintf(stderr, "  case %d, killed at stop %d: %d %d %d\n", c, n, now, other, *done);
                break;
            }
            fenced = now;
        }
        CHECK(ended == 1 && n > 8);
    }
}

TEST("file: one that dies while it retires leaves what it did not retire [K19]")
{
    static char g1[] = "g1";
    for (int c = 0; c < 3; c++) { /* alone, beside another record, all of the id */
        int ended = 0, n = 1;
        for (; !ended && n < 400; n++) {
            pdk_journal *j = open_file();
            share_done();
            record(j, "a", "g1");
            if (c > 0)
                record(j, "a", "g2");
            ended = kill_at(step_retire, c == 2 ? NULL : g1, n);
            if (ended < 0)
                SKIP("this system does not let a process be traced");
            int now = has(j, "a", "g1"), other = has(j, "a", "g2");
            bool good = CHECK(now >= 0 && other >= 0) && CHECK(!*done || now == 0) && CHECK(c != 1 || other == 1);
            good = good && CHECK_INT(retire(j, "a", NULL), 0) && CHECK_INT(has(j, "a", NULL), 0);
            pdk_journal_free(j);
            if (!good) {
                fprintf(stderr, "  case %d, killed at stop %d: %d %d %d\n", c, n, now, other, *done);
                break;
            }
        }
        CHECK(ended == 1 && n > 8);
    }
}

TEST("file: a record is synced before it gets its name, and both folders after; a retirement syncs its folder [K1 K19]")
{
    long calls[200];
    pdk_journal_free(open_file());
    share_done();
    int count = trace_calls(step_record, NULL, calls, 200);
    if (count < 0)
        SKIP("this system does not let a process be traced");
    char order[200] = "";
    for (int i = 0; i < count; i++) {
        const char *name = calls[i] == SYS_mkdirat                                 ? "make "
                           : calls[i] == SYS_pwrite64                              ? "write "
                           : calls[i] == SYS_fsync                                 ? "sync "
                           : calls[i] == SYS_renameat || calls[i] == SYS_renameat2 ? "rename "
                                                                                   : "";
        strcat(order, name);
    }
    CHECK_STR(order, "make write sync rename sync sync ");
    CHECK_INT(*done, 1);
    order[0] = '\0';
    count = trace_calls(step_retire, NULL, calls, 200);
    for (int i = 0; i < count; i++)
        strcat(order, calls[i] == SYS_unlinkat ? "remove " : calls[i] == SYS_fsync ? "sync " : "");
    CHECK_STR(order, "remove remove sync ");
}

/* ---- several processes ----------------------------------------------------------------------------------------------- */

static int hammer(int i)
{
    char own[16];
    pdk_journal *j = scoped("");
    snprintf(own, sizeof own, "g%d", i);
    for (int k = 0; k < 60; k++) {
        if (record(j, "a", own) != 0 || has(j, "a", own) != 1 || has(j, "a", NULL) != 1)
            return 1;
        if (record(j, "b", "same") != 0 || has(j, "b", "same") < 0)
            return 2;
        if (retire(j, "a", own) != 0 || has(j, "a", own) < 0 || retire(j, "b", k % 2 ? NULL : "same") != 0)
            return 3;
    }
    pdk_journal_free(j);
    return 0;
}

TEST("file: processes that record and retire at once lose nothing and meet no error")
{
    pdk_journal *j = open_file();
    pid_t pids[4];
    CHECK_INT(record(j, "a", "kept"), 0);
    for (int i = 0; i < 4; i++)
        if ((pids[i] = fork()) == 0)
            _exit(hammer(i));
    for (int i = 0; i < 4; i++) {
        int status = -1;
        waitpid(pids[i], &status, 0);
        CHECK_INT(status, 0);
    }
    CHECK_INT(has(j, "a", "kept"), 1);
    CHECK_INT(has(j, "a", "g0"), 0);
    CHECK_INT(retire(j, "a", "kept"), 0);
    CHECK_INT(has(j, "a", NULL), 0);
    CHECK_INT(retire(j, "b", NULL), 0); /* a peer's empty folder may have been taken for a crash's */
    CHECK_INT(has(j, "b", NULL), 0);
    pdk_journal_free(j);
}

TEST_MAIN
