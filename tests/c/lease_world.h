/* lease_world.h -- what test_lease.c is made of: the stores that its suite runs over, the calls in a form that reads well, and
 * for the file store other processes, what they leave when they die, and damage. */
#ifndef LEASE_WORLD_H
#define LEASE_WORLD_H

#include "lease.h"
#include "limit.h"
#include "redis_server.h"
#include "smalldisk.h"
#include "test.h"
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

static char dir[128]; /* the state directory */

static void clean_dir(void)
{
    char path[200];
    snprintf(dir, sizeof dir, "%s/state", test_tmpdir());
    snprintf(path, sizeof path, "%s/leases", dir);
    mkdir(dir, 0700);
    nftw(path, test_remove, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- the calls ---------------------------------------------------------------------------------------------------- */

static int64_t said(int rc, int64_t token, const pdk_error *err)
{
    if (rc < 0)
        fprintf(stderr, "  %s\n", err->message);
    return rc == 1 ? token : rc;
}
/* The token, 0 = refused, -1 = no answer. */
static int64_t take(pdk_lease *l, const char *id, int64_t floor)
{
    int64_t token = 0;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_take(l, id, floor, &token, &err);
    return said(rc, token, &err);
}
static int64_t claim(pdk_lease *l, const char *id, int64_t floor)
{
    int64_t token = 0;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_claim(l, id, floor, &token, &err);
    return said(rc, token, &err);
}
static int64_t destroy(pdk_lease *l, const char *id, int64_t floor)
{
    int64_t token = 0;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_claim_for_destroy(l, id, floor, &token, &err);
    return said(rc, token, &err);
}
static int renew(pdk_lease *l, const char *id)
{
    pdk_renewal answer = PDK_LOST;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_renew(l, id, &answer, &err);
    return rc < 0 ? (int)said(rc, 0, &err) : (int)answer;
}
static int release(pdk_lease *l, const char *id)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_release(l, id, &err);
    return (int)said(rc, 0, &err);
}
/* `owner` NULL = nobody. */
static bool owner_is(pdk_lease *l, const char *id, const char *owner, bool del)
{
    pdk_lease_owner o;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    int rc = pdk_lease_owner_of(l, id, &o, &err);
    said(rc, 0, &err);
    return owner == NULL ? rc == 0 : rc == 1 && strcmp(o.owner, owner) == 0 && o.del == del && o.token > 0;
}

static bool unavailable_once(pdk_lease *l, const char *id)
{
    pdk_lease_owner o;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    return pdk_lease_owner_of(l, id, &o, &err) == -1 && err.kind == PDK_E_OWNERSHIP_UNAVAILABLE && err.message[0] != '\0';
}

/* Every call fails as it must. */
static bool unavailable(pdk_lease *l, const char *id)
{
    int (*const calls[])(pdk_lease *, const char *, int64_t, int64_t *, pdk_error *) = { pdk_lease_take, pdk_lease_claim,
                                                                                         pdk_lease_claim_for_destroy };
    bool ok = unavailable_once(l, id);
    for (int i = 0; i < 3; i++) {
        int64_t token;
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        ok &= calls[i](l, id, 0, &token, &err) == -1 && err.kind == PDK_E_OWNERSHIP_UNAVAILABLE;
    }
    pdk_renewal answer;
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    ok &= pdk_lease_renew(l, id, &answer, &err) == -1 && err.kind == PDK_E_OWNERSHIP_UNAVAILABLE;
    pdk_error_clear(&err);
    return pdk_lease_release(l, id, &err) == -1 && err.kind == PDK_E_OWNERSHIP_UNAVAILABLE && ok;
}

static int64_t started_micros;
__attribute__((constructor)) static void note_start(void)
{
    started_micros = pdk_now_wall() / 1000;
}
static int64_t test_started_micros(void)
{
    return started_micros;
}

/* ---- the stores --------------------------------------------------------------------------------------------------- */

typedef struct world {
    const struct factory *f;
    pdk_clock *clock; /* of a store that does not have a clock of its own */
    pdk_lease *members[4];
    int count, failures;
} world;

typedef struct factory {
    const char *name;
    bool shared;             /* serves several runtimes */
    double ttl;              /* seconds of the leases in the suite */
    bool (*begin)(world *w); /* false: this store cannot be tested here, and said so */
    pdk_lease *(*open)(world *w, const char *runtime);
    void (*pass)(world *w, double seconds); /* lets the store's time pass */
    void (*end)(world *w);
} factory;
#define TTL (w->f->ttl)

static bool manual_begin(world *w)
{
    clean_dir();
    w->clock = pdk_clock_new(PDK_CLOCK_MANUAL, false);
    return true;
}
static void manual_pass(world *w, double seconds)
{
    pdk_clock_advance(w->clock, seconds, 0);
}
static void manual_end(world *w)
{
    pdk_clock_free(w->clock);
}
static pdk_lease *memory_open(world *w, const char *runtime)
{
    return pdk_lease_memory(runtime, TTL, w->clock, NULL);
}
static pdk_lease *file_open(world *w, const char *runtime)
{
    return pdk_lease_file(dir, "", runtime, TTL, w->clock, NULL);
}

/* One server for all tests, emptied for each; its time is the real one. */
static redis_server redis;
static void redis_stop(void)
{
    redis_end(&redis);
}
static bool redis_begin(world *w)
{
    (void)w;
    if (redis.pid == 0 && redis_start(&redis, NULL))
        atexit(redis_stop);
    return CHECK_STR(redis_do(&redis, "FLUSHALL"), "OK");
}
static pdk_lease *redis_open(world *w, const char *runtime)
{
    return pdk_lease_redis(redis.url, "", runtime, TTL, NULL);
}
static void redis_pass(world *w, double seconds)
{
    (void)w;
    usleep((useconds_t)(seconds * 1e6));
}
static void redis_done(world *w)
{
    (void)w;
}

static const factory STORES[] = {
    { "memory", false, 60, manual_begin, memory_open, manual_pass, manual_end },
    { "file", true, 60, manual_begin, file_open, manual_pass, manual_end },
    { "redis", true, 1, redis_begin, redis_open, redis_pass, redis_done },
};

/* Starts with the i-th store, or the next one that can be tested; NULL at the end. */
static world *world_begin(world *w, size_t i)
{
    for (; i < sizeof STORES / sizeof *STORES; i++) {
        *w = (world){ .f = &STORES[i], .failures = test_failures };
        if (STORES[i].begin(w))
            return w;
    }
    return NULL;
}
static world *world_next(world *w)
{
    while (w->count > 0)
        pdk_lease_free(w->members[--w->count]);
    w->f->end(w);
    if (test_failures > w->failures)
        fprintf(stderr, "  (with the store `%s`)\n", w->f->name);
    return world_begin(w, (size_t)(w->f - STORES) + 1);
}
#define EACH_STORE(w) for (world w##_here, *w = world_begin(&w##_here, 0); w != NULL; w = world_next(w))

/* A runtime that uses the store. */
static pdk_lease *member(world *w, const char *runtime)
{
    pdk_lease *l = w->f->open(w, runtime);
    if (l == NULL) {
        fprintf(stderr, "the store %s cannot be opened\n", w->f->name);
        exit(1);
    }
    if (!CHECK_STR(pdk_lease_type(l), w->f->name))
        exit(1);
    return w->members[w->count++] = l;
}
static void pass(world *w, double seconds)
{
    w->f->pass(w, seconds);
}

/* ---- threads ------------------------------------------------------------------------------------------------------ */

static void run_threads(int n, void *(*fn)(void *), void *arg)
{
    pdk_thread threads[8];
    for (int i = 0; i < n; i++)
        CHECK_INT(pdk_thread_start(&threads[i], "test", fn, arg), 0);
    for (int i = 0; i < n; i++)
        pdk_thread_join(&threads[i]);
}

#define THREAD_ROUNDS 300
static int64_t thread_tokens[4 * THREAD_ROUNDS];
static int thread_token_count;

static int by_number(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}
static int equal_tokens(int64_t *tokens, int n)
{
    int equal = 0;
    qsort(tokens, (size_t)n, sizeof *tokens, by_number);
    for (int k = 1; k < n; k++)
        equal += tokens[k] == tokens[k - 1];
    return equal;
}

static void *thread_hammer(void *arg)
{
    pdk_lease *l = arg;
    char own[32];
    snprintf(own, sizeof own, "thread-%llx", (unsigned long long)pdk_thread_self());
    int64_t token = take(l, own, 0), last = 0;
    char often[40];
    snprintf(often, sizeof often, "often-%s", own + 7);
    for (int i = 0; i < THREAD_ROUNDS; i++) {
        int64_t got = take(l, "common", 0);
        CHECK(got > 0 && got >= last);
        last = got;
        CHECK_INT(renew(l, own), PDK_RENEWED);
        CHECK_INT(claim(l, own, 0), token);
        CHECK(owner_is(l, own, "a", false));
        if (i % 16 == 0)
            CHECK_INT(release(l, "common"), 0);
        thread_tokens[__atomic_fetch_add(&thread_token_count, 1, __ATOMIC_SEQ_CST)] = take(l, often, 0);
        CHECK_INT(release(l, often), 0);
    }
    CHECK_INT(release(l, own), 0);
    return NULL;
}
static void *thread_unavailable(void *arg)
{
    CHECK(unavailable_once(arg, "x"));
    return NULL;
}

/* ---- the file store on the real clock ------------------------------------------------------------------------------- */

static pdk_clock *real_clock(void)
{
    static pdk_clock *c;
    return c != NULL ? c : (c = pdk_clock_new(PDK_CLOCK_MONOTONIC, true));
}
static pdk_lease *open_file(const char *runtime, double ttl, pdk_error *err)
{
    return pdk_lease_file(dir, "", runtime, ttl, real_clock(), err);
}
static pdk_lease *file_store(const char *runtime, double ttl)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_lease *l = open_file(runtime, ttl, &err);
    if (l == NULL)
        fprintf(stderr, "  %s\n", err.message);
    return l;
}
static pdk_lease *boot_store(const char *boot, const char *runtime, pdk_clock *clock)
{
    return pdk_lease_file_of_boot(dir, "", boot, runtime, 60, clock, NULL);
}

/* How many files of leases/ have names that begin like that. */
static int count_files(const char *prefix)
{
    char path[200];
    snprintf(path, sizeof path, "%s/leases", dir);
    DIR *d = opendir(path);
    int n = 0;
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.' && strncmp(e->d_name, prefix, strlen(prefix)) == 0;
    if (d != NULL)
        closedir(d);
    return n;
}
/* The path of the table, of which there is one. */
static void table_path(char *out, size_t size)
{
    snprintf(out, size, "%s/leases", dir);
    DIR *d = opendir(out);
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;)
        if (strncmp(e->d_name, "table.", 6) == 0 && strstr(e->d_name, ".new.") == NULL)
            snprintf(out, size, "%s/leases/%s", dir, e->d_name);
    if (d != NULL)
        closedir(d);
}
static int mode_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? (int)(st.st_mode & 07777) : -1;
}

/* Where the slot of a runtime's lease begins, or -1: 128 bytes, the owner's name in the last 64. */
static int64_t find_owner(const char *image, size_t size, const char *owner)
{
    for (size_t at = 128; at + 128 <= size; at += 128)
        if (strcmp(image + at + 64, owner) == 0)
            return (int64_t)at;
    return -1;
}

/* Overwrites `len` bytes at `at` (-1: flips the bits `byte` in the token of a lease of "a"), or cuts the file there (len -1). */
static void damage(int64_t at, int64_t len, int byte)
{
    char path[400];
    static char image[1 << 20];
    table_path(path, sizeof path);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    ssize_t size = pread(fd, image, sizeof image, 0);
    if (!CHECK(size >= 129 * 128) || (len < 0 && CHECK_INT(ftruncate(fd, at), 0)))
        size = 0;
    if (size > 0 && at < 0) {
        at = find_owner(image, (size_t)size, "a") + 40;
        image[at] ^= (char)byte;
    } else if (size > 0) {
        len = at + len > size ? size - at : len;
        memset(image + at, byte, (size_t)len);
    }
    if (size > 0)
        CHECK(pwrite(fd, image + at, (size_t)len, at) == len);
    close(fd);
}

/* ---- other processes ---------------------------------------------------------------------------------------------- */

struct shared { /* memory that they share with the test */
    int broken, holder, rounds, flag, done;
    int64_t last, got;
    int64_t tokens[8 * 200];
};

static struct shared *shared_new(void)
{
    static struct shared *sh;
    clean_dir();
    if (sh == NULL)
        sh = mmap(NULL, sizeof *sh, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memset(sh, 0, sizeof *sh);
    return sh;
}
#define GET(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define ADD(x) __atomic_add_fetch(&(x), 1, __ATOMIC_SEQ_CST)

static pid_t child(int (*fn)(int i, struct shared *sh), int i, struct shared *sh)
{
    pid_t pid = fork();
    if (pid == 0)
        _exit(fn(i, sh));
    return pid;
}
static int child_status(pid_t pid)
{
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}
static pdk_lease *child_store(int i, double ttl)
{
    char name[16];
    snprintf(name, sizeof name, "child-%d", i);
    pdk_lease *l = file_store(name, ttl);
    if (l == NULL)
        _exit(3);
    return l;
}

static int hammer_claims(int i, struct shared *sh)
{
    pdk_lease *l = child_store(i, 60);
    double end = test_now() + 10;
    for (int won = 0; won < 100 && test_now() < end;) {
        int64_t token = claim(l, "x", 0);
        if (token < 0)
            return 4;
        if (token == 0)
            continue;
        won++;
        ADD(sh->rounds);
        if (__atomic_exchange_n(&sh->holder, i + 1, __ATOMIC_SEQ_CST) != 0 || token <= sh->last)
            ADD(sh->broken);
        sh->last = token;
        if (won % 2 && destroy(l, "x", 0) != token)
            ADD(sh->broken);
        __atomic_store_n(&sh->holder, 0, __ATOMIC_SEQ_CST);
        if (release(l, "x") != 0)
            return 5;
    }
    pdk_lease_free(l);
    return 0;
}

static int hammer_takes(int i, struct shared *sh)
{
    pdk_lease *l = child_store(i, 60);
    int64_t last = 0;
    for (int k = 0; k < 200; k++) {
        int64_t token = take(l, "x", 0);
        if (token < last || token <= 0)
            ADD(sh->broken);
        last = token;
        sh->tokens[ADD(sh->rounds) - 1] = token * 8 + i;
    }
    pdk_lease_free(l);
    return 0;
}

/* How many tokens went to two processes. */
static int shared_tokens(struct shared *sh)
{
    int twice = 0;
    qsort(sh->tokens, (size_t)sh->rounds, sizeof *sh->tokens, by_number);
    for (int k = 1; k < sh->rounds; k++)
        twice += sh->tokens[k] / 8 == sh->tokens[k - 1] / 8 && sh->tokens[k] != sh->tokens[k - 1];
    return twice;
}

/* Takes ever more ids, until it is killed. */
static int hammer_many(int i, struct shared *sh)
{
    pdk_lease *l = child_store(i, 60);
    for (int n = 0;; n++) {
        char id[48];
        snprintf(id, sizeof id, "id-%d-%d-%d", i, (int)getpid(), n);
        int64_t token = take(l, id, 0), common = take(l, "common", 0);
        if (token <= 0 || common <= 0 || claim(l, id, 0) != token || destroy(l, id, 0) != token || release(l, id) != 0)
            ADD(sh->broken);
        ADD(sh->rounds);
    }
    return 0;
}

/* Sleeps (is stopped) past its ttl, with one id that somebody else takes meanwhile and one that nobody takes. */
static int sleeper(int i, struct shared *sh)
{
    pdk_lease *l = child_store(i, 0.3);
    sh->last = take(l, "x", 0);
    int64_t alone = take(l, "alone", 0);
    ADD(sh->rounds);
    while (GET(sh->flag) == 0)
        usleep(1000);
    if (renew(l, "x") != PDK_LOST)
        return 1;
    if (renew(l, "alone") != PDK_LAPSED || claim(l, "alone", 0) != alone || renew(l, "alone") != PDK_RENEWED)
        return 2;
    pdk_lease_free(l);
    return 0;
}

static int hold_lock(int i, struct shared *sh)
{
    (void)i, (void)sh;
    char path[400];
    table_path(path, sizeof path);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    struct flock l = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1 };
    if (fd < 0 || fcntl(fd, F_OFD_SETLK, &l) < 0)
        return 1;
    raise(SIGSTOP);
    return 0;
}
/* A process that stands still and has the table's lock. */
static pid_t locker(void)
{
    int status;
    pid_t pid = child(hold_lock, 0, NULL);
    return waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status) ? pid : -1;
}

/* ---- death at the n-th system call ---------------------------------------------------------------------------------- */

typedef void step_fn(void *shared);

/* What is there before each step, all of runtime "judge": `kept` and 190 more; `handed` too. Of "child-0": `mine`. */
static int64_t base[191], handed;

static void fill_table(pdk_lease *judge)
{
    char id[32];
    for (int i = 0; i < 191; i++) {
        snprintf(id, sizeof id, "kept-%d", i);
        base[i] = take(judge, id, 0);
    }
}
static int all_kept(pdk_lease *judge)
{
    char id[32];
    pdk_lease_owner o;
    for (int i = 0; i < 191 && base[i] > 0; i++) {
        snprintf(id, sizeof id, "kept-%d", i);
        if (pdk_lease_owner_of(judge, id, &o, NULL) != 1 || o.token != base[i] || !o.ours || o.del)
            return 0;
    }
    return 1;
}

static void step_open(void *shared)
{
    struct shared *sh = shared;
    raise(SIGSTOP);
    pdk_lease *l = child_store(0, 60);
    sh->got = take(l, "x", 0);
    sh->done = 1;
}
static void step_take(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    raise(SIGSTOP);
    sh->got = take(l, "x", 0);
    sh->done = 1;
}
static void step_handover(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    raise(SIGSTOP);
    sh->got = take(l, "handed", 0);
    sh->done = 1;
}
static void step_destroy(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    take(l, "x", 0);
    raise(SIGSTOP);
    sh->got = destroy(l, "x", 0);
    sh->done = 1;
}
static void step_release(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    take(l, "x", 0);
    raise(SIGSTOP);
    release(l, "x");
    sh->done = 1;
}
static void step_renew(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    sh->got = take(l, "x", 0);
    raise(SIGSTOP);
    renew(l, "x");
    sh->done = 1;
}
static void step_grow(void *shared)
{
    struct shared *sh = shared;
    pdk_lease *l = child_store(0, 60);
    raise(SIGSTOP);
    sh->got = take(l, "x", 0);
    sh->done = 1;
}
static void step_boot(void *shared)
{
    struct shared *sh = shared;
    raise(SIGSTOP);
    pdk_lease *l = boot_store("boot-2", "child-0", real_clock());
    sh->got = l == NULL ? -1 : take(l, "x", 0);
    sh->done = 1;
}

/* The state of the world before a step. */
static int prepare_step(step_fn *fn)
{
    memset(base, 0, sizeof base);
    handed = 0;
    if (fn == step_open)
        return 0;
    pdk_lease *judge = fn == step_boot ? boot_store("boot-1", "judge", real_clock()) : file_store("judge", 60);
    if (judge == NULL)
        return -1;
    if (fn == step_grow)
        fill_table(judge);
    else
        base[0] = take(judge, "kept-0", 0);
    handed = take(judge, "handed", base[0] + INT64_C(1000000000000));
    pdk_lease_free(judge);
    return 0;
}

/* What must hold after it, wherever it was cut off. 0, or the number of what does not. */
static int judge_step(step_fn *fn, struct shared *sh)
{
    pdk_lease_owner o;
    bool boot = fn == step_boot;
    pdk_lease *judge = boot ? boot_store("boot-2", "judge", real_clock()) : file_store("judge", 60);
    if (judge == NULL)
        return 1;
    int bad = 0;
    if (!boot && !all_kept(judge))
        bad = 2;
    int rc = pdk_lease_owner_of(judge, fn == step_handover ? "handed" : "x", &o, NULL);
    bool theirs = rc == 1 && strcmp(o.owner, "child-0") == 0;
    if (rc < 0)
        bad = 3;
    else if (sh->done && fn == step_release ? rc != 0 : sh->done && !theirs)
        bad = 4; /* it was answered, but is not there */
    else if (sh->done && (o.del != (fn == step_destroy) || (fn != step_release && o.token != sh->got)))
        bad = 5;
    else if (!sh->done && fn == step_handover && !theirs && (rc != 1 || o.token != handed))
        bad = 6; /* neither before nor after */
    else if (!sh->done && (fn == step_renew || fn == step_destroy) && !theirs)
        bad = 7;
    int64_t next = take(judge, "next", 0);
    if (next <= handed || next <= sh->got || (rc == 1 && next <= o.token))
        bad = 8;
    if (release(judge, "next") != 0 || owner_is(judge, "next", NULL, false) != true)
        bad = 9;
    pdk_lease_free(judge);
    return bad;
}

#endif
