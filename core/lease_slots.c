/* lease_slots.c -- see lease_slots.h.
 *
 *   leases/table.<boot>    a head, then slots; found by linear probing from the key's first bytes. Nothing is ever taken out
 *                          of a table: when it gets crowded, a new one without what ended long ago takes its name.
 *   leases/users           each store that is open holds a read lock on the byte of its table
 *
 * Crashes. A process can die at any instruction; the machine's crash ends every lease anyway, since the next boot has a table
 * of its own: so nothing is synced, and what one process has written is what the next one reads, in that order. Every change is
 * one write of 128 aligned bytes, which lie in one page: a kill comes before it or after it. The head, with the token counter,
 * is written before the slot that uses the token: a crash between the two wastes a number. A new table is complete before it
 * gets its name (link, or rename over the old one), and whoever waited for the old one's lock sees that the name has moved on.
 * The counter outlives a boot because a new table starts from the old ones'; if their last writes were lost with the machine,
 * the wall clock, below which no token is minted, is past them.
 *
 * Damage. Each slot, empty ones too, and the head carry a checksum: what a foreign hand, a bad disk or a short write has
 * touched is never read as "free". It is an error, until a store is opened that nobody else has open: then every owner in the
 * table is dead, and a new table replaces it.
 *
 * Locks: byte 0 of the table, an OFD lock that the kernel gives back when its process dies; before it, within the process, `busy`
 * (two threads share one description, which OFD locks cannot tell apart). `lock` guards `busy` and `closed`, for moments only;
 * who is busy owns what is marked "busy". Both waits are bounded: a process that was stopped while it had the lock makes the
 * others fail, not hang.
 */
#include "lease_slots.h"
#include "disk.h"
#include "fd.h"
#include "lease.h"
#include "limit.h"
#include "proc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LOCK_WAIT (5 * PDK_NS_PER_S)
#define SLICE     (20 * 1000 * 1000) /* ns: how late a waiter sees that it was cancelled */
#define WINDOW    16                 /* slots read at once */
#define FEWEST    256u               /* slots of a small table: 32 KiB */
#define STALE     60                 /* seconds after which a table that never got its name is a crash's leftover */
#define MAGIC     "PDKLEAS1"

typedef struct head { /* as on disk: as large as a slot */
    uint64_t check;
    char magic[8];
    uint64_t nonce;   /* of this table: slots of another one do not pass for its own */
    uint64_t slots;   /* a power of two */
    uint64_t used;    /* at least as many are not empty */
    int64_t last;     /* the last token */
    uint64_t time_ns; /* the time namespace whose boot clock the times are of */
    char unused[72];
} head;
_Static_assert(sizeof(pdk_slot) == 128 && sizeof(head) == 128, "a slot is written by one write within one page");

struct pdk_slots {
    char *dir, *name, *path, *users_path; /* fixed at birth, as are the next two */
    uint64_t time_ns;
    int64_t users_byte;
    pdk_mutex lock;
    pdk_cond turn;
    bool busy, closed; /* lock */
    int fd, users;     /* busy; -1 = not open */
    dev_t dev;         /* busy; of fd */
    ino_t ino;
    bool joined;         /* busy; `users` says that we use fd's table */
    head head, head_was; /* busy; to be written, and as it is on disk */
    bool head_dirty;     /* busy */
    int64_t seen;        /* busy; the largest token that this store has ever seen: the file may be lost meanwhile */
    uint64_t at;         /* busy; where find found something */
    pdk_slot was;        /* busy; what it is on disk */
    bool fresh;          /* busy; it is empty */
};

#define NO_ANSWER PDK_E_OWNERSHIP_UNAVAILABLE

static void memory_leave(void *p)
{
    free(*(void **)p);
}
#define AUTO_MEMORY __attribute__((cleanup(memory_leave)))

static int damaged(pdk_slots *s, pdk_error *err)
{
    return pdk_fail(err, NO_ANSWER, 0,
                    "the lease table %s is damaged: stop every runtime of this state directory, and the next "
                    "one to start makes a new table",
                    s->path);
}

/* Not for secrets: it finds damage. Word by word, seeded with the table and the place. */
static uint64_t checksum(const void *record, uint64_t nonce, uint64_t index)
{
    uint64_t words[16], h = nonce ^ (index + 1) * UINT64_C(0x9e3779b97f4a7c15);
    memcpy(words, record, sizeof words);
    for (size_t i = 1; i < 16; i++) { /* the first word is the checksum itself */
        h = (h ^ words[i]) * UINT64_C(0xff51afd7ed558ccd);
        h ^= h >> 29;
    }
    return h;
}

static bool slot_sound(const pdk_slot *slot, uint64_t nonce, uint64_t index)
{
    return slot->check == checksum(slot, nonce, index) && slot->state >= PDK_SLOT_EMPTY && slot->state <= PDK_SLOT_DEL &&
           memchr(slot->owner, 0, sizeof slot->owner) != NULL;
}

static bool head_sound(const head *h)
{
    return memcmp(h->magic, MAGIC, sizeof h->magic) == 0 && h->check == checksum(h, h->nonce, UINT64_MAX) &&
           h->slots >= FEWEST && (h->slots & (h->slots - 1)) == 0 && h->slots <= UINT64_C(1) << 32 && h->last >= 0;
}

static int64_t offset_of(uint64_t index)
{
    return (int64_t)((index + 1) * sizeof(pdk_slot));
}

/* ---- waiting ---- */

static pdk_ns wait_end(void)
{
    pdk_ns own = pdk_now_monotonic() + LOCK_WAIT, outer = pdk_limit_current()->deadline;
    return own < outer ? own : outer;
}

static bool cancelled(void)
{
    return pdk_limit_cancelled(pdk_limit_current());
}

static int waited_out(pdk_slots *s, pdk_error *err)
{
    if (cancelled())
        return pdk_fail(err, NO_ANSWER, 0, "cancelled while waiting for the lease table %s", s->path);
    return pdk_fail(err, NO_ANSWER, 0,
                    "the lease table %s stayed locked by another process: is one that uses this state "
                    "directory stopped?",
                    s->path);
}

/* 0, or -1 at the deadline. No peer can wake us: look again, soon at first. */
static int lock_byte(pdk_slots *s, int fd, short type, int64_t byte, pdk_ns deadline, pdk_error *err)
{
    for (pdk_ns pause = 20 * 1000;; pause = pause < 2000 * 1000 ? pause * 2 : pause) {
        PDK_AUTO_ERROR why = PDK_NO_ERROR;
        int rc = pdk_lock_range(fd, type, byte, 1, &why);
        if (rc == 1)
            return 0;
        if (rc < 0)
            return pdk_fail(err, NO_ANSWER, why.sys, "cannot lock the lease table %s", s->path);
        if (cancelled() || pdk_now_monotonic() >= deadline)
            return waited_out(s, err);
        pdk_sleep_ns(pause);
    }
}

/* ---- making a table ---- */

/* A complete table with no name but a temporary one: its descriptor, locked, or -1. */
static int write_table(pdk_slots *s, const pdk_slot *keep, size_t count, uint64_t slots, int64_t last, char temp[4300],
                       pdk_error *err)
{
    size_t bytes = (size_t)offset_of(slots);
    AUTO_MEMORY char *image = calloc(1, bytes);
    if (image == NULL)
        return pdk_fail(err, NO_ANSWER, ENOMEM, "cannot make the lease table %s", s->path);
    head *h = (head *)(void *)image;
    pdk_slot *at = (pdk_slot *)(void *)image + 1;
    memcpy(h->magic, MAGIC, sizeof h->magic);
    pdk_random(&h->nonce, sizeof h->nonce);
    h->slots = slots;
    h->used = count;
    h->last = last;
    h->time_ns = s->time_ns;
    h->check = checksum(h, h->nonce, UINT64_MAX);
    for (uint64_t i = 0; i < slots; i++)
        at[i].state = PDK_SLOT_EMPTY;
    for (size_t k = 0; k < count; k++) {
        uint64_t i;
        memcpy(&i, keep[k].key, sizeof i);
        while (at[i & (slots - 1)].state != PDK_SLOT_EMPTY)
            i++;
        at[i & (slots - 1)] = keep[k];
    }
    for (uint64_t i = 0; i < slots; i++)
        at[i].check = checksum(&at[i], h->nonce, i);
    uint64_t name;
    pdk_random(&name, sizeof name);
    snprintf(temp, 4300, "%s.new.%016llx", s->path, (unsigned long long)name);
    PDK_AUTO_FD fd = open(temp, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return pdk_fail(err, NO_ANSWER, errno, "cannot make the lease table %s", s->path);
    if (fchmod(fd, 0600) < 0 || pdk_pwrite_all(fd, image, bytes, 0) < 0) {
        int sys = errno;
        unlink(temp);
        return pdk_fail(err, NO_ANSWER, sys, "cannot write the lease table %s", s->path);
    }
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    if (pdk_lock_range(fd, F_WRLCK, 0, 1, &why) != 1) {
        unlink(temp);
        return pdk_fail(err, NO_ANSWER, why.sys, "this filesystem cannot lock %s: use a local one (option state_dir)",
                        s->path);
    }
    return pdk_fd_take(&fd);
}

static void adopt(pdk_slots *s, int fd)
{
    struct stat st = { 0 };
    fstat(fd, &st);
    s->fd = fd;
    s->joined = false;
    s->dev = st.st_dev;
    s->ino = st.st_ino;
}

/* Unlocks before it closes: a forked child of the host may still have the description. */
static void let_go(pdk_slots *s)
{
    if (s->fd >= 0) {
        pdk_lock_range(s->fd, F_UNLCK, 0, 1, NULL);
        close(s->fd);
    }
    s->fd = -1;
}

/* The table in force becomes this one. */
static int replace_table(pdk_slots *s, const pdk_slot *keep, size_t count, uint64_t slots, int64_t last, pdk_error *err)
{
    char temp[4300];
    int fd = write_table(s, keep, count, slots, last, temp, err);
    if (fd < 0)
        return -1;
    if (rename(temp, s->path) < 0) {
        int sys = errno;
        unlink(temp);
        close(fd);
        return pdk_fail(err, NO_ANSWER, sys, "cannot replace the lease table %s", s->path);
    }
    let_go(s);
    adopt(s, fd);
    return 0;
}

/* The first table, or the first one after somebody has removed all; not open yet. 0 also when another process was quicker. */
static int make_table(pdk_slots *s, pdk_error *err)
{
    char temp[4300];
    int dir = pdk_dir_own(s->dir, NO_ANSWER, err);
    if (dir < 0)
        return -1;
    close(dir);
    int fd = write_table(s, NULL, 0, FEWEST, s->seen, temp, err);
    if (fd < 0)
        return -1;
    bool made = link(temp, s->path) == 0;
    if (!made && (errno == EPERM || errno == EOPNOTSUPP || errno == ENOSYS)) /* no hard links there */
        made = renameat2(AT_FDCWD, temp, AT_FDCWD, s->path, RENAME_NOREPLACE) == 0;
    int sys = errno;
    unlink(temp);
    close(fd); /* it is opened anew, by its name */
    return made || sys == EEXIST || sys == ENOENT ? 0
                                                  : pdk_fail(err, NO_ANSWER, sys, "cannot make the lease table %s", s->path);
}

/* ---- finding the table in force ---- */

/* Says that somebody uses this table; again when the file was removed. Under the table's lock, as is repair. */
static int join_users(pdk_slots *s, pdk_ns deadline, pdk_error *err)
{
    struct stat now, ours;
    if (s->joined)
        return 0;
    s->joined = true;
    if (s->users >= 0 && stat(s->users_path, &now) == 0 && fstat(s->users, &ours) == 0 && now.st_ino == ours.st_ino &&
        now.st_dev == ours.st_dev)
        return 0;
    if (s->users >= 0)
        close(s->users);
    s->users = open(s->users_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    s->joined = s->users >= 0 && fchmod(s->users, 0600) == 0;
    if (!s->joined)
        return pdk_fail(err, NO_ANSWER, errno, "cannot open %s", s->users_path);
    s->joined = lock_byte(s, s->users, F_RDLCK, s->users_byte, deadline, err) == 0;
    return s->joined ? 0 : -1;
}

static int open_table(pdk_slots *s, pdk_error *err)
{
    for (int tries = 0; tries < 8; tries++) {
        int fd = open(s->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY | O_NONBLOCK);
        if (fd >= 0) {
            adopt(s, fd);
            return 0;
        }
        if (errno != ENOENT)
            return pdk_fail(err, NO_ANSWER, errno, "cannot open the lease table %s", s->path);
        if (make_table(s, err) < 0)
            return -1;
    }
    return pdk_fail(err, NO_ANSWER, 0, "the lease table %s is removed again and again", s->path);
}

/* Opens and locks the file that has the table's name at that moment. */
static int lock_table(pdk_slots *s, pdk_ns deadline, pdk_error *err)
{
    for (;;) {
        if (s->fd < 0 && open_table(s, err) < 0)
            return -1;
        if (lock_byte(s, s->fd, F_WRLCK, 0, deadline, err) < 0)
            return -1;
        struct stat st;
        if (stat(s->path, &st) == 0 && st.st_ino == s->ino && st.st_dev == s->dev)
            return 0;
        let_go(s); /* another table has the name by now, or none */
        if (pdk_now_monotonic() >= deadline)
            return waited_out(s, err);
    }
}

static int read_head(pdk_slots *s, pdk_error *err)
{
    ptrdiff_t n = pdk_pread_all(s->fd, &s->head, sizeof s->head, 0);
    s->head_dirty = false;
    if (n < 0)
        return pdk_fail(err, NO_ANSWER, errno, "cannot read the lease table %s", s->path);
    if (n != sizeof s->head || !head_sound(&s->head))
        return damaged(s, err);
    if (s->head.time_ns != s->time_ns)
        return pdk_fail(err, NO_ANSWER, 0,
                        "the lease table %s is of another time namespace: give this runtime a state_dir of its "
                        "own",
                        s->path);
    s->head_was = s->head;
    if (s->head.last > s->seen)
        s->seen = s->head.last;
    return 0;
}

/* ---- enter, leave ---- */

static int turn(pdk_slots *s, pdk_ns deadline, pdk_error *err)
{
    PDK_GUARD(s->lock);
    while (s->busy && !s->closed) {
        pdk_ns now = pdk_now_monotonic();
        if (cancelled() || now >= deadline)
            return waited_out(s, err);
        pdk_cond_wait_until(&s->turn, &s->lock, deadline - now > SLICE ? now + SLICE : deadline);
    }
    if (s->closed)
        return pdk_fail(err, NO_ANSWER, 0, "the ownership store is closed");
    s->busy = true;
    return 0;
}

static void pass_on(pdk_slots *s)
{
    PDK_GUARD(s->lock);
    s->busy = false;
    pdk_cond_broadcast(&s->turn);
}

int pdk_slots_enter(pdk_slots *s, pdk_error *err)
{
    pdk_ns deadline = wait_end();
    if (turn(s, deadline, err) < 0)
        return -1;
    if (lock_table(s, deadline, err) == 0 && read_head(s, err) == 0 && join_users(s, deadline, err) == 0)
        return 0;
    pdk_slots_leave(s);
    return -1;
}

void pdk_slots_leave(pdk_slots *s)
{
    if (s->fd >= 0)
        pdk_lock_range(s->fd, F_UNLCK, 0, 1, NULL);
    pass_on(s);
}

/* ---- slots ---- */

static int read_slots(pdk_slots *s, pdk_slot *out, uint64_t first, size_t n, pdk_error *err)
{
    ptrdiff_t got = pdk_pread_all(s->fd, out, n * sizeof *out, offset_of(first));
    if (got < 0)
        return pdk_fail(err, NO_ANSWER, errno, "cannot read the lease table %s", s->path);
    if ((size_t)got != n * sizeof *out)
        return damaged(s, err);
    for (size_t i = 0; i < n; i++)
        if (!slot_sound(&out[i], s->head.nonce, first + i))
            return damaged(s, err);
    return 0;
}

int pdk_slots_find(pdk_slots *s, const unsigned char key[PDK_SLOT_KEY], pdk_slot *out, pdk_error *err)
{
    uint64_t i, mask = s->head.slots - 1;
    memcpy(&i, key, sizeof i);
    i &= mask;
    for (uint64_t looked = 0; looked < s->head.slots;) {
        pdk_slot window[WINDOW];
        size_t n = s->head.slots - i < WINDOW ? (size_t)(s->head.slots - i) : WINDOW;
        if (read_slots(s, window, i, n, err) < 0)
            return -1;
        for (size_t k = 0; k < n; k++) {
            s->at = i + k;
            s->fresh = window[k].state == PDK_SLOT_EMPTY;
            s->was = *out = window[k];
            if (s->fresh)
                memcpy(out->key, key, PDK_SLOT_KEY);
            if (s->fresh || memcmp(out->key, key, PDK_SLOT_KEY) == 0)
                return !s->fresh;
        }
        looked += n;
        i = (i + n) & mask;
    }
    return damaged(s, err); /* one slot at least is empty in a sound table */
}

int pdk_slots_mint(pdk_slots *s, int64_t floor, int64_t *token, pdk_error *err)
{
    if (pdk_lease_mint(&s->seen, floor, token, err) < 0)
        return -1;
    s->head.last = s->seen;
    s->head_dirty = true;
    return 0;
}

/* A table without what ended long ago, and with room. */
static int rebuild(pdk_slots *s, pdk_ns now, pdk_error *err)
{
    AUTO_MEMORY pdk_slot *all = malloc((size_t)s->head.slots * sizeof *all);
    if (all == NULL)
        return pdk_fail(err, NO_ANSWER, ENOMEM, "cannot make room in the lease table %s", s->path);
    if (read_slots(s, all, 0, (size_t)s->head.slots, err) < 0)
        return -1;
    size_t kept = 0;
    for (uint64_t i = 0; i < s->head.slots; i++)
        if (all[i].state != PDK_SLOT_EMPTY && pdk_after(all[i].until, PDK_SLOT_KEPT) > now)
            all[kept++] = all[i];
    uint64_t slots = FEWEST;
    while (slots < 2 * (uint64_t)kept + 2)
        slots *= 2;
    return replace_table(s, all, kept, slots, s->head.last, err) < 0 ? -1 : read_head(s, err);
}

/* Room for one more slot. A disk that has no room for a larger table is no reason to refuse while this one has some. */
static int make_room(pdk_slots *s, const unsigned char *key, pdk_ns now, pdk_error *err)
{
    if ((s->head.used + 1) * 4 <= s->head.slots * 3)
        return 0;
    pdk_slot found;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    if (rebuild(s, now, &why) == 0) {
        int rc = pdk_slots_find(s, key, &found, err);
        return rc == 1 ? damaged(s, err) : rc; /* it was not in the old one */
    }
    if (s->fd >= 0 && s->head.used + 1 < s->head.slots - s->head.slots / 16)
        return 0;
    pdk_error_move(err, &why);
    return -1;
}

/* A write that ends in the middle leaves damage, which is an error and never "free"; so try to take it back. */
static int write_record(pdk_slots *s, const void *record, const void *former, int64_t offset, pdk_error *err)
{
    if (pdk_pwrite_all(s->fd, record, sizeof(pdk_slot), offset) == 0)
        return 0;
    int sys = errno;
    pdk_pwrite_all(s->fd, former, sizeof(pdk_slot), offset);
    return pdk_fail(err, NO_ANSWER, sys, "cannot write the lease table %s", s->path);
}

int pdk_slots_put(pdk_slots *s, const pdk_slot *slot, pdk_ns now, pdk_error *err)
{
    if (s->fresh) {
        if (make_room(s, slot->key, now, err) < 0)
            return -1;
        s->head.used++;
        s->head_dirty = true;
    }
    if (s->head_dirty) {
        s->head.check = checksum(&s->head, s->head.nonce, UINT64_MAX);
        if (write_record(s, &s->head, &s->head_was, 0, err) < 0)
            return -1;
        s->head_dirty = false;
    }
    pdk_slot whole = *slot;
    whole.check = checksum(&whole, s->head.nonce, s->at);
    return write_record(s, &whole, &s->was, offset_of(s->at), err);
}

/* ---- open, close ---- */

int pdk_slots_end_owner(pdk_slots *s, const char *owner, bool del_too, pdk_ns now, pdk_error *err)
{
    int ended = 0;
    for (uint64_t i = 0; i < s->head.slots; i++) {
        pdk_slot slot;
        if (read_slots(s, &slot, i, 1, err) < 0)
            return -1;
        if (strcmp(slot.owner, owner) != 0 || (slot.state != PDK_SLOT_OWN && !(del_too && slot.state == PDK_SLOT_DEL)))
            continue;
        s->at = i;
        s->was = slot;
        s->fresh = false;
        slot.state = PDK_SLOT_FREE;
        slot.until = slot.until < now ? slot.until : now;
        if (pdk_slots_put(s, &slot, now, err) < 0)
            return -1;
        ended++;
    }
    return ended;
}

static bool sound(pdk_slots *s, pdk_error *err)
{
    if (read_head(s, err) < 0)
        return false;
    AUTO_MEMORY pdk_slot *all = malloc((size_t)s->head.slots * sizeof *all);
    if (all == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to check the lease table %s", s->path);
    return all != NULL && read_slots(s, all, 0, (size_t)s->head.slots, err) == 0;
}

/* The last token of a table, or 0 when nothing believable is there. */
static int64_t last_of(const char *path)
{
    head h;
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || pdk_pread_all(fd, &h, sizeof h, 0) != sizeof h || !head_sound(&h))
        return 0;
    return h.last;
}

static int64_t byte_of(const char *name)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)name, strlen(name), digest);
    uint64_t bits;
    memcpy(&bits, digest, sizeof bits);
    return (int64_t)(bits >> 3);
}

/* Tables of other boots, and ones that never got their name: learns the last token, then, with `remove`, removes what nobody
 * uses. `boot` is the length of the name's part that this boot's tables share. */
static void sweep(pdk_slots *s, size_t boot, bool remove)
{
    DIR *dir = opendir(s->dir);
    if (dir == NULL)
        return;
    char path[4300];
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        if (strncmp(e->d_name, "table.", 6) != 0 || strcmp(e->d_name, s->name) == 0)
            continue;
        snprintf(path, sizeof path, "%s/%s", s->dir, e->d_name);
        struct stat st;
        bool half = strstr(e->d_name, ".new.") != NULL;
        int64_t last = half ? 0 : last_of(path);
        if (last > s->seen)
            s->seen = last;
        if (!remove || stat(path, &st) < 0)
            continue;
        if (half ? pdk_now_wall() / PDK_NS_PER_S - st.st_mtime > STALE
                 : strncmp(e->d_name, s->name, boot) != 0 &&
                       pdk_lock_test(s->users, F_WRLCK, byte_of(e->d_name), 1, NULL) == 0)
            unlink(path);
    }
    closedir(dir);
}

/* A damaged table: replaced when nobody else has it open, since all owners in it are dead then. */
static int repair(pdk_slots *s, pdk_error *why, pdk_error *err)
{
    if (pdk_lock_range(s->users, F_WRLCK, s->users_byte, 1, NULL) != 1) {
        pdk_error_move(err, why);
        return -1;
    }
    if (replace_table(s, NULL, 0, FEWEST, s->seen, err) < 0)
        return -1;
    return pdk_lock_range(s->users, F_RDLCK, s->users_byte, 1, err) == 1 ? read_head(s, err) : -1;
}

static int begin(pdk_slots *s, size_t boot, pdk_error *err)
{
    PDK_AUTO_FD dir = pdk_dir_own(s->dir, NO_ANSWER, err);
    pdk_ns deadline = wait_end();
    if (dir < 0 || turn(s, deadline, err) < 0)
        return -1;
    sweep(s, boot, false);
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    int rc = lock_table(s, deadline, err);
    if (rc == 0)
        rc = join_users(s, deadline, err);
    if (rc == 0 && !sound(s, &why))
        rc = repair(s, &why, err);
    if (rc == 0)
        sweep(s, boot, true);
    pdk_slots_leave(s);
    return rc;
}

static char *text(const char *a, const char *b, const char *c)
{
    size_t len = strlen(a) + strlen(b) + strlen(c) + 1;
    char *p = malloc(len);
    if (p != NULL)
        snprintf(p, len, "%s%s%s", a, b, c);
    return p;
}

pdk_slots *pdk_slots_open(const char *state_dir, const char *boot, bool manual, pdk_error *err)
{
    struct stat st;
    pdk_slots *s = calloc(1, sizeof *s);
    if (s != NULL) {
        pdk_mutex_init(&s->lock);
        pdk_cond_init(&s->turn);
        s->fd = s->users = -1;
        s->time_ns = stat("/proc/self/ns/time", &st) == 0 ? st.st_ino : 0;
        s->dir = text(state_dir, "/leases", "");
        s->name = text("table.", boot, manual ? ".manual" : "");
    }
    if (s == NULL || s->dir == NULL || s->name == NULL || (s->path = text(s->dir, "/", s->name)) == NULL ||
        (s->users_path = text(s->dir, "/users", "")) == NULL) {
        pdk_slots_free(s);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store");
        return NULL;
    }
    s->users_byte = byte_of(s->name);
    int rc = strlen(s->path) < 4200
                 ? begin(s, strlen("table.") + strlen(boot), err)
                 : pdk_fail(err, NO_ANSWER, ENAMETOOLONG, "cannot use the state directory %.100s...", state_dir);
    if (rc == 0)
        return s;
    pdk_slots_free(s);
    return NULL;
}

void pdk_slots_close(pdk_slots *s)
{
    {
        PDK_GUARD(s->lock);
        while (s->busy)
            pdk_cond_wait(&s->turn, &s->lock);
        s->closed = true;
        pdk_cond_broadcast(&s->turn);
    }
    let_go(s);
    if (s->users >= 0)
        close(s->users);
    s->users = -1;
}

void pdk_slots_free(pdk_slots *s)
{
    if (s == NULL)
        return;
    pdk_slots_close(s);
    pdk_cond_destroy(&s->turn);
    pdk_mutex_destroy(&s->lock);
    free(s->dir);
    free(s->name);
    free(s->path);
    free(s->users_path);
    free(s);
}
