/* serial.c -- see serial.h.
 * Lock: `lock` guards the table of keys, every queue and every waiter in one; held for moments only, never across a call of the
 * kernel about bytes. A waiter's `granted` runs under it. */
#include "serial.h"
#include "map.h"
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLICE     (20 * 1000 * 1000) /* ns: how late a waiter sees that it was cancelled */
#define FIRST_GAP (500 * 1000)       /* ns between two looks for a byte: no peer can wake us. It doubles, up to */
#define LAST_GAP  (SLICE / 2)

typedef struct pdk_turn_key { /* lives as long as somebody has or waits for the turn; lock */
    pdk_node node;
    pdk_waiter *first, *last;      /* who waits for the turn; each on one queue only */
    struct pdk_turn_key *leaving;  /* the next one on the serializer's list */
    int64_t offset;                /* of the id's byte; set by whoever has the turn */
    size_t len;
    char key[];
} pdk_turn_key;

struct pdk_serial {
    pdk_mutex lock;
    pdk_map keys;           /* lock */
    bool closed;            /* lock */
    bool threads;           /* fixed */
    int fd;                 /* of the turns file; -1 = none. Changes only when nobody has a turn and nobody is at work */
    /* bytes that were asked for; lock */
    pdk_waiter *first, *last; /* they have their key's turn */
    size_t count;
    pdk_waiter *looked_for; /* the one whose byte is being looked for, without the lock; NULL also when it has withdrawn */
    pdk_turn_key *leaving;  /* whose byte is to be given back, and then the turn */
    bool at_work;           /* somebody looks, or gives back */
    pdk_cond wake, idle;    /* work has come; nobody is at work */
    bool poller_runs;       /* not through yet */
};

pdk_serial *pdk_serial_new(const char *turns_path, bool threads, pdk_error *err)
{
    pdk_serial *s = calloc(1, sizeof *s);
    if (s == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the serializer");
        return NULL;
    }
    s->fd = -1;
    s->threads = threads;
    if (turns_path != NULL && (s->fd = open(turns_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0) {
        pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot open the lock file %s", turns_path);
        free(s);
        return NULL;
    }
    pdk_mutex_init(&s->lock);
    pdk_cond_init(&s->wake);
    pdk_cond_init(&s->idle);
    return s;
}

void pdk_serial_free(pdk_serial *s)
{
    if (s == NULL)
        return;
    pdk_serial_close(s);
    {
        PDK_GUARD(s->lock);
        while (s->poller_runs) /* nobody waits, so nobody makes another one */
            pdk_cond_wait(&s->idle, &s->lock);
    }
    if (s->fd >= 0)
        close(s->fd);
    pdk_map_free(&s->keys);
    pdk_cond_destroy(&s->wake);
    pdk_cond_destroy(&s->idle);
    pdk_mutex_destroy(&s->lock);
    free(s);
}

size_t pdk_serial_keys(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    return s->keys.count;
}

/* ---- queues ---- */

static pdk_turn_key *find(pdk_serial *s, const void *key, size_t len, uint64_t hash)
{
    for (pdk_node *n = pdk_map_chain(&s->keys, hash); n != NULL; n = n->next) {
        pdk_turn_key *k = PDK_OF(n, pdk_turn_key, node);
        if (n->hash == hash && k->len == len && memcmp(k->key, key, len) == 0)
            return k;
    }
    return NULL;
}

static void append(pdk_waiter **first, pdk_waiter **last, pdk_waiter *w, pdk_waiting state)
{
    w->next = NULL;
    w->prev = *last;
    w->state = state;
    *(*last != NULL ? &(*last)->next : first) = w;
    *last = w;
}

static void take_out(pdk_waiter **first, pdk_waiter **last, pdk_waiter *w)
{
    *(w->prev != NULL ? &w->prev->next : first) = w->next;
    *(w->next != NULL ? &w->next->prev : last) = w->prev;
    w->next = w->prev = NULL;
}

/* It waits no longer, and hears of it: it stands on no queue any more. */
static void call(pdk_waiter *w)
{
    w->state = PDK_W_CALLED;
    w->granted(w->ctx);
}

/* The turn is free: the first waiter gets it, or the key goes. */
static void pass_on(pdk_serial *s, pdk_turn_key *k) PDK_REQUIRES(s->lock)
{
    pdk_waiter *w = k->first;
    if (w == NULL) {
        pdk_map_remove(&s->keys, &k->node);
        free(k);
        return;
    }
    take_out(&k->first, &k->last, w);
    *w->turn = (pdk_turn){ s, k, -1 };
    call(w);
}

static int closed(pdk_error *err)
{
    return pdk_fail(err, PDK_E_CLOSED, 0, "the runtime is closed");
}

void pdk_serial_close(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    s->closed = true;
    for (pdk_node *n = pdk_map_each(&s->keys, NULL); n != NULL; n = pdk_map_each(&s->keys, n)) {
        pdk_turn_key *k = PDK_OF(n, pdk_turn_key, node);
        while (k->first != NULL) {
            pdk_waiter *w = k->first;
            take_out(&k->first, &k->last, w);
            call(w);
        }
    }
    while (s->first != NULL) { /* who is being looked for hears of it when that look is over */
        pdk_waiter *w = s->first;
        take_out(&s->first, &s->last, w);
        s->count--;
        call(w);
    }
    pdk_cond_signal(&s->wake);
}

void pdk_serial_close_file(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    while (s->at_work)
        pdk_cond_wait(&s->idle, &s->lock);
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
}

/* ---- a key's turn ---- */

/* 1 = ours, 0 = queued, -1. */
static int ask(pdk_serial *s, const void *key, size_t len, pdk_waiter *w, pdk_turn *turn, pdk_error *err) PDK_REQUIRES(s->lock)
{
    uint64_t hash = pdk_hash(key, len);
    if (s->closed)
        return closed(err);
    if (w->state == PDK_W_QUEUED)
        return 0;
    pdk_turn_key *k = find(s, key, len, hash);
    if (k != NULL) {
        *turn = PDK_NO_TURN;
        w->turn = turn;
        w->key = k;
        append(&k->first, &k->last, w, PDK_W_QUEUED);
        return 0;
    }
    k = calloc(1, sizeof *k + len);
    if (k == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to wait for a turn");
    k->len = len;
    memcpy(k->key, key, len);
    if (!pdk_map_insert(&s->keys, &k->node, hash)) {
        free(k);
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to wait for a turn");
    }
    *turn = (pdk_turn){ s, k, -1 };
    return 1;
}

int pdk_turn_ask(pdk_serial *s, const void *key, size_t len, pdk_waiter *w, pdk_turn *turn, pdk_error *err)
{
    PDK_GUARD(s->lock);
    return w->state != PDK_W_QUEUED && turn->serial != NULL ? 1 : ask(s, key, len, w, turn, err);
}

static int ended(const pdk_limit *limit, pdk_error *err)
{
    if (pdk_limit_cancelled(limit))
        return pdk_fail(err, PDK_E_CANCELLED, 0, "cancelled while waiting for another acquire of the same identity");
    if (limit->deadline != PDK_NEVER && pdk_now_monotonic() >= limit->deadline)
        return pdk_fail(err, PDK_E_TIMEOUT, 0, "the time limit passed while waiting for another acquire of the same identity");
    return 0;
}

static pdk_ns next_look(const pdk_limit *limit)
{
    pdk_ns slice = pdk_limit_can_cancel(limit) ? pdk_now_monotonic() + SLICE : PDK_NEVER;
    return pdk_upkeep_before(limit, slice < limit->deadline ? slice : limit->deadline);
}

static void upkeep(pdk_serial *s, const pdk_limit *limit) PDK_REQUIRES(s->lock)
{
    if (limit->upkeep == NULL)
        return;
    pdk_unlock(&s->lock);
    pdk_upkeep_run(limit);
    pdk_lock(&s->lock);
}

static void wake_thread(void *ctx)
{
    pdk_cond_signal(ctx);
}

int pdk_turn_enter(pdk_serial *s, const void *key, size_t len, pdk_turn *turn, const pdk_limit *limit, pdk_error *err)
{
    pdk_cond mine;
    pdk_waiter w = { .granted = wake_thread, .ctx = &mine };
    PDK_GUARD(s->lock);
    int rc = ask(s, key, len, &w, turn, err);
    if (rc != 0)
        return rc < 0 ? -1 : 0;
    pdk_cond_init(&mine);
    while (w.state == PDK_W_QUEUED && (rc = ended(limit, err)) == 0) {
        pdk_cond_wait_until(&mine, &s->lock, next_look(limit));
        upkeep(s, limit);
    }
    if (rc < 0)
        take_out(&w.key->first, &w.key->last, &w);
    else if (turn->serial == NULL)
        rc = closed(err);
    pdk_cond_destroy(&mine);
    return rc;
}

static void give_byte_back(pdk_serial *s, int64_t offset)
{
    pdk_lock_range(s->fd, F_UNLCK, offset, 1, NULL);
}

void pdk_turn_leave(pdk_turn *turn)
{
    pdk_serial *s = turn->serial;
    if (s == NULL)
        return;
    if (turn->offset >= 0)
        give_byte_back(s, turn->offset);
    PDK_GUARD(s->lock);
    pass_on(s, turn->key);
    *turn = PDK_NO_TURN;
}

/* ---- an id's turn, and its byte ---- */

static int64_t offset_of(const char *id)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)id, strlen(id), digest);
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | digest[i];
    return (int64_t)(bits >> 3);
}

static void key_of(const char *id, char key[80])
{
    strcpy(key, "id:");
    strncat(key, id, 80 - 4);
}

int pdk_turn_enter_id(pdk_serial *s, const char *id, pdk_turn *turn, const pdk_limit *limit, pdk_error *err)
{
    char key[80];
    key_of(id, key);
    if (pdk_turn_enter(s, key, strlen(key), turn, limit, err) < 0)
        return -1;
    if (s->fd < 0)
        return 0;
    int64_t offset = offset_of(id);
    for (pdk_ns pause = FIRST_GAP;; pause = pause < LAST_GAP ? pause * 2 : pause) {
        int rc = pdk_lock_range(s->fd, F_WRLCK, offset, 1, err);
        if (rc == 1) {
            turn->offset = offset;
            return 0;
        }
        bool over;
        {
            PDK_GUARD(s->lock);
            over = s->closed;
        }
        if (rc == 0)
            rc = over ? closed(err) : ended(limit, err);
        if (rc < 0) {
            pdk_turn_leave(turn);
            return -1;
        }
        pdk_sleep_ns(pause);
        pdk_upkeep_run(limit);
    }
}

/* Looks for the byte of the first that waits for one. Without the lock meanwhile: if it withdraws, the key's turn is ours to pass
 * on, so that nobody can lock the same byte through the same descriptor before we have given it back. */
static void look_for_first(pdk_serial *s) PDK_REQUIRES(s->lock)
{
    pdk_waiter *w = s->first;
    pdk_turn_key *k = w->key;
    take_out(&s->first, &s->last, w);
    s->count--;
    s->looked_for = w;
    pdk_unlock(&s->lock);
    int rc = pdk_lock_range(s->fd, F_WRLCK, k->offset, 1, NULL);
    pdk_lock(&s->lock);
    if (s->looked_for == NULL) {
        if (rc == 1) {
            pdk_unlock(&s->lock);
            give_byte_back(s, k->offset);
            pdk_lock(&s->lock);
        }
        pass_on(s, k);
        return;
    }
    s->looked_for = NULL;
    if (rc == 0 && !s->closed) {
        append(&s->first, &s->last, w, PDK_W_BYTE);
        s->count++;
        return;
    }
    if (rc == 1)
        w->turn->offset = k->offset;
    call(w); /* an error is found again, and told, when it asks again */
}

/* One look for every byte that is asked for, and what is to be given back. True = there is more to do at once. */
static bool work(pdk_serial *s) PDK_REQUIRES(s->lock)
{
    s->at_work = true;
    while (s->leaving != NULL) {
        pdk_turn_key *k = s->leaving;
        s->leaving = k->leaving;
        pdk_unlock(&s->lock);
        give_byte_back(s, k->offset);
        pdk_lock(&s->lock);
        pass_on(s, k);
    }
    for (size_t n = s->count; n > 0 && s->first != NULL; n--)
        look_for_first(s);
    s->at_work = false;
    pdk_cond_broadcast(&s->idle);
    return s->leaving != NULL;
}

static void *poll_bytes(void *arg)
{
    pdk_serial *s = arg;
    PDK_GUARD(s->lock);
    size_t known = 0;
    for (pdk_ns gap = FIRST_GAP; work(s) || s->count > 0; gap = gap < LAST_GAP ? gap * 2 : gap) {
        if (s->count > known) /* somebody has come: it is soon free, or not for long */
            gap = FIRST_GAP;
        known = s->count;
        if (s->leaving == NULL)
            pdk_cond_wait_until(&s->wake, &s->lock, pdk_now_monotonic() + gap);
    }
    s->poller_runs = false;
    pdk_cond_broadcast(&s->idle);
    return NULL;
}

/* Somebody must look at what has been put on a list. */
static int need_work(pdk_serial *s, pdk_error *err) PDK_REQUIRES(s->lock)
{
    if (!s->threads)
        return 0;
    if (s->poller_runs) {
        pdk_cond_signal(&s->wake);
        return 0;
    }
    int sys = pdk_thread_start_detached("turns", poll_bytes, s); /* not joined: its last breath may not be waited for under the lock */
    s->poller_runs = sys == 0;
    return sys == 0 ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, sys, "cannot start the thread that waits for other processes");
}

size_t pdk_serial_poll(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    while (s->at_work)
        pdk_cond_wait(&s->idle, &s->lock);
    while (work(s))
        ;
    return s->count;
}

/* It gets neither: the key's turn goes on. */
static void give_up(pdk_serial *s, pdk_turn *turn) PDK_REQUIRES(s->lock)
{
    pass_on(s, turn->key);
    *turn = PDK_NO_TURN;
}

static int wait_for_byte(pdk_serial *s, pdk_waiter *w, pdk_turn *turn, pdk_error *err)
{
    PDK_GUARD(s->lock);
    if (s->closed) {
        give_up(s, turn);
        return closed(err);
    }
    w->turn = turn;
    w->key = turn->key;
    append(&s->first, &s->last, w, PDK_W_BYTE);
    s->count++;
    if (need_work(s, err) == 0)
        return 0;
    take_out(&s->first, &s->last, w);
    s->count--;
    w->state = PDK_W_NOT;
    give_up(s, turn);
    return -1;
}

int pdk_turn_ask_id(pdk_serial *s, const char *id, pdk_waiter *w, pdk_turn *turn, pdk_error *err)
{
    char key[80];
    key_of(id, key);
    {
        PDK_GUARD(s->lock);
        if (w->state == PDK_W_QUEUED || w->state == PDK_W_BYTE)
            return 0;
        int rc = turn->serial != NULL ? 1 : ask(s, key, strlen(key), w, turn, err);
        if (rc != 1)
            return rc;
        if (s->fd < 0 || turn->offset >= 0)
            return 1;
        if (s->closed) {
            give_up(s, turn);
            return closed(err);
        }
    }
    turn->key->offset = offset_of(id);
    int rc = pdk_lock_range(s->fd, F_WRLCK, turn->key->offset, 1, err);
    if (rc == 1)
        turn->offset = turn->key->offset;
    else if (rc < 0)
        pdk_turn_leave(turn);
    return rc == 0 ? wait_for_byte(s, w, turn, err) : rc;
}

bool pdk_turn_withdraw(pdk_serial *s, pdk_waiter *w)
{
    PDK_GUARD(s->lock);
    if (w->state == PDK_W_QUEUED) {
        take_out(&w->key->first, &w->key->last, w);
    } else if (w->state == PDK_W_BYTE) {
        pdk_turn_key *k = w->key;
        *w->turn = PDK_NO_TURN;
        if (s->looked_for == w) { /* whoever looks passes it on */
            s->looked_for = NULL;
        } else {
            take_out(&s->first, &s->last, w);
            s->count--;
            pass_on(s, k);
        }
    } else {
        return false;
    }
    w->state = PDK_W_NOT;
    return true;
}

void pdk_turn_leave_soon(pdk_turn *turn)
{
    pdk_serial *s = turn->serial;
    if (s == NULL)
        return;
    if (turn->offset >= 0 && s->threads) {
        PDK_GUARD(s->lock);
        turn->key->offset = turn->offset;
        turn->key->leaving = s->leaving;
        s->leaving = turn->key;
        if (need_work(s, NULL) == 0) {
            *turn = PDK_NO_TURN;
            return;
        }
        s->leaving = turn->key->leaving;
    }
    pdk_turn_leave(turn);
}
