/* serial.c -- see serial.h.
 * Lock: `lock` guards the table of keys and every queue; held for moments only. */
#include "serial.h"
#include "map.h"
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SLICE (20 * 1000 * 1000) /* ns: how late a waiter sees that it was cancelled */

typedef struct waiter { /* on the waiting thread's stack; linked under `lock` */
    struct waiter *next;
    pdk_cond turn;
    bool mine;
} waiter;

typedef struct pdk_turn_key { /* lives as long as somebody has or waits for the turn; lock */
    pdk_node node;
    waiter *first, *last;
    size_t len;
    char key[];
} pdk_turn_key;

struct pdk_serial {
    pdk_mutex lock;
    pdk_map keys;   /* lock */
    bool closed;    /* lock */
    int fd;         /* of the turns file; -1 = none. Changes only when nobody has a turn */
};

pdk_serial *pdk_serial_new(const char *turns_path, pdk_error *err)
{
    pdk_serial *s = calloc(1, sizeof *s);
    if (s == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the serializer");
        return NULL;
    }
    s->fd = -1;
    if (turns_path != NULL && (s->fd = open(turns_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600)) < 0) {
        pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot open the lock file %s", turns_path);
        free(s);
        return NULL;
    }
    pdk_mutex_init(&s->lock);
    return s;
}

void pdk_serial_free(pdk_serial *s)
{
    if (s == NULL)
        return;
    if (s->fd >= 0)
        close(s->fd);
    pdk_map_free(&s->keys);
    pdk_mutex_destroy(&s->lock);
    free(s);
}

void pdk_serial_close(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    s->closed = true;
    for (pdk_node *n = pdk_map_each(&s->keys, NULL); n != NULL; n = pdk_map_each(&s->keys, n))
        for (waiter *w = PDK_OF(n, pdk_turn_key, node)->first; w != NULL; w = w->next)
            pdk_cond_signal(&w->turn);
}

void pdk_serial_close_file(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    if (s->fd >= 0)
        close(s->fd);
    s->fd = -1;
}

size_t pdk_serial_keys(pdk_serial *s)
{
    PDK_GUARD(s->lock);
    return s->keys.count;
}

static pdk_turn_key *find(pdk_serial *s, const void *key, size_t len, uint64_t hash)
{
    for (pdk_node *n = pdk_map_chain(&s->keys, hash); n != NULL; n = n->next) {
        pdk_turn_key *k = PDK_OF(n, pdk_turn_key, node);
        if (n->hash == hash && k->len == len && memcmp(k->key, key, len) == 0)
            return k;
    }
    return NULL;
}

static void unlink_waiter(pdk_turn_key *k, waiter *w)
{
    waiter *before = NULL;
    for (waiter **at = &k->first; *at != NULL; before = *at, at = &(*at)->next)
        if (*at == w) {
            *at = w->next;
            if (k->last == w)
                k->last = before;
            return;
        }
}

/* The turn is free: the first waiter gets it, or the key goes. */
static void pass_on(pdk_serial *s, pdk_turn_key *k) PDK_REQUIRES(s->lock)
{
    waiter *w = k->first;
    if (w == NULL) {
        pdk_map_remove(&s->keys, &k->node);
        free(k);
        return;
    }
    unlink_waiter(k, w);
    w->mine = true;
    pdk_cond_signal(&w->turn);
}

static int ended(const pdk_limit *limit, pdk_error *err)
{
    if (limit->cancelled != NULL && atomic_load(limit->cancelled))
        return pdk_fail(err, PDK_E_CANCELLED, 0, "cancelled while waiting for another acquire of the same identity");
    if (limit->deadline != PDK_NEVER && pdk_now_monotonic() >= limit->deadline)
        return pdk_fail(err, PDK_E_TIMEOUT, 0, "the time limit passed while waiting for another acquire of the same identity");
    return 0;
}

static pdk_ns next_look(const pdk_limit *limit)
{
    pdk_ns slice = limit->cancelled == NULL ? PDK_NEVER : pdk_now_monotonic() + SLICE;
    return slice < limit->deadline ? slice : limit->deadline;
}

int pdk_turn_enter(pdk_serial *s, const void *key, size_t len, pdk_turn *turn, const pdk_limit *limit, pdk_error *err)
{
    uint64_t hash = pdk_hash(key, len);
    PDK_GUARD(s->lock);
    if (s->closed)
        return pdk_fail(err, PDK_E_CLOSED, 0, "the runtime is closed");
    pdk_turn_key *k = find(s, key, len, hash);
    if (k == NULL) {
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
        return 0;
    }
    waiter w = { .next = NULL };
    pdk_cond_init(&w.turn);
    *(k->last != NULL ? &k->last->next : &k->first) = &w;
    k->last = &w;
    int rc = 0;
    while (!w.mine && rc == 0) {
        if (s->closed)
            rc = pdk_fail(err, PDK_E_CLOSED, 0, "the runtime was closed");
        else if ((rc = ended(limit, err)) == 0)
            pdk_cond_wait_until(&w.turn, &s->lock, next_look(limit));
    }
    if (rc < 0 && w.mine) /* it was given to us at the same moment: hand it on */
        pass_on(s, k);
    else if (rc < 0)
        unlink_waiter(k, &w);
    else
        *turn = (pdk_turn){ s, k, -1 };
    pdk_cond_destroy(&w.turn);
    return rc;
}

static int64_t offset_of(const char *id)
{
    unsigned char digest[SHA256_DIGEST_LENGTH];
    SHA256((const unsigned char *)id, strlen(id), digest);
    uint64_t bits = 0;
    for (int i = 0; i < 8; i++)
        bits = bits << 8 | digest[i];
    return (int64_t)(bits >> 3);
}

int pdk_turn_enter_id(pdk_serial *s, const char *id, pdk_turn *turn, const pdk_limit *limit, pdk_error *err)
{
    char key[80] = "id:";
    strncat(key, id, sizeof key - 4);
    if (pdk_turn_enter(s, key, strlen(key), turn, limit, err) < 0)
        return -1;
    if (s->fd < 0)
        return 0;
    int64_t offset = offset_of(id);
    for (pdk_ns pause = 500 * 1000;; pause = pause < SLICE / 2 ? pause * 2 : pause) { /* no peer can wake us: look again */
        int rc = pdk_lock_range(s->fd, F_WRLCK, offset, 1, err);
        if (rc == 1) {
            turn->offset = offset;
            return 0;
        }
        bool closed;
        {
            PDK_GUARD(s->lock);
            closed = s->closed;
        }
        if (rc == 0 && closed)
            rc = pdk_fail(err, PDK_E_CLOSED, 0, "the runtime was closed");
        else if (rc == 0)
            rc = ended(limit, err);
        if (rc < 0) {
            pdk_turn_leave(turn);
            return -1;
        }
        pdk_sleep_ns(pause);
    }
}

void pdk_turn_leave(pdk_turn *turn)
{
    pdk_serial *s = turn->serial;
    if (s == NULL)
        return;
    if (turn->offset >= 0)
        pdk_lock_range(s->fd, F_UNLCK, turn->offset, 1, NULL);
    PDK_GUARD(s->lock);
    pass_on(s, turn->key);
    *turn = PDK_NO_TURN;
}
