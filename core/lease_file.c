/* lease_file.c -- the ownership store of the processes that share a state directory on one machine. What a lease is, and who may
 * have it, is decided here; lease_slots.c keeps it.
 *
 * Each call is one visit of the table: find, decide, perhaps mint, write; some microseconds under the table's lock, and no fsync.
 * A lease that has ended, or was released, stays in the table as the memory of who had the last token, so that an owner that
 * slept learns whether somebody was there meanwhile. Leases end with the boot, as the boot clock does: a crash of the machine
 * took the sandboxes with it, or (containers that start again) left nobody who could speak for them.
 */
#include "fd.h"
#include "lease.h"
#include "lease_slots.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct store { /* fixed at birth */
    char runtime_id[64];
    char *scope;
    double ttl;
    pdk_clock *clock;
    pdk_slots *slots;
} store;

typedef struct visit { /* one stay in the table */
    store *s;
    pdk_ns now;
    pdk_slot slot;
    bool known; /* the id has a slot */
    bool live;  /* and somebody has the lease */
    bool ours;  /* we have it, or had it last */
} visit;

/* Begins a visit. 0, or -1 and nothing to end. The time is read inside, after the wait for the lock. */
static int enter(store *s, const char *id, visit *v, pdk_error *err)
{
    unsigned char key[PDK_SLOT_KEY];
    char name[512];
    int len = snprintf(name, sizeof name, "%s%c%s", s->scope, 0, id);
    if (id[0] == '\0' || len < 0 || (size_t)len >= sizeof name)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "the scope and the sandbox id are too long for a lease");
    if (EVP_Digest(name, (size_t)len, key, NULL, EVP_sha256(), NULL) != 1)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "SHA-256 is not available");
    if (pdk_slots_enter(s->slots, err) < 0)
        return -1;
    v->s = s;
    v->now = pdk_clock_is_manual(s->clock) ? pdk_clock_now(s->clock) : pdk_now_boottime();
    int rc = pdk_slots_find(s->slots, key, &v->slot, err);
    if (rc < 0) {
        pdk_slots_leave(s->slots);
        return -1;
    }
    v->known = rc == 1;
    v->ours = v->known && strcmp(v->slot.owner, s->runtime_id) == 0;
    v->live = v->known && v->slot.state != PDK_SLOT_FREE && v->now < v->slot.until;
    return 0;
}

static int leave(visit *v, int rc)
{
    pdk_slots_leave(v->s->slots);
    return rc;
}

static int write_slot(visit *v, pdk_slot_state state, pdk_ns until, pdk_error *err)
{
    v->slot.state = state;
    v->slot.until = until;
    return pdk_slots_put(v->s->slots, &v->slot, v->now, err);
}

/* The lease becomes ours. The token stays only where no ownership has changed: what we have, or had when it ran out. */
static int seize(visit *v, bool del, int64_t floor, int64_t *token, pdk_error *err)
{
    store *s = v->s;
    bool same = v->ours &&
                (v->live || v->slot.state == (uint32_t)PDK_SLOT_OWN || (v->slot.state == (uint32_t)PDK_SLOT_DEL && del));
    if ((!same || v->slot.token <= floor) && pdk_slots_mint(s->slots, floor, &v->slot.token, err) < 0)
        return -1;
    memset(v->slot.owner, 0, sizeof v->slot.owner);
    memcpy(v->slot.owner, s->runtime_id, strlen(s->runtime_id));
    if (write_slot(v, del ? PDK_SLOT_DEL : PDK_SLOT_OWN, pdk_after(v->now, pdk_seconds(s->ttl)), err) < 0)
        return -1;
    *token = v->slot.token;
    return 1;
}

static int file_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    visit v;
    if (enter(self, id, &v, err) < 0)
        return -1;
    bool refused = v.live && v.slot.state == PDK_SLOT_DEL;
    return leave(&v, refused ? 0 : seize(&v, false, floor, token, err));
}

static int file_claim(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    visit v;
    if (enter(self, id, &v, err) < 0)
        return -1;
    bool refused = v.live && (!v.ours || v.slot.state == PDK_SLOT_DEL);
    return leave(&v, refused ? 0 : seize(&v, false, floor, token, err));
}

static int file_claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    visit v;
    if (enter(self, id, &v, err) < 0)
        return -1;
    bool refused = v.live && !v.ours;
    return leave(&v, refused ? 0 : seize(&v, true, floor, token, err));
}

static int file_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    store *s = self;
    visit v;
    if (enter(s, id, &v, err) < 0)
        return -1;
    int rc = 0;
    pdk_renewal answer = v.known && !v.ours ? PDK_LOST : PDK_LAPSED;
    if (v.live && v.ours) {
        rc = write_slot(&v, v.slot.state, pdk_after(v.now, pdk_seconds(s->ttl)), err);
        answer = PDK_RENEWED;
    }
    if (rc == 0)
        *out = answer;
    return leave(&v, rc);
}

static int file_release(void *self, const char *id, pdk_error *err)
{
    visit v;
    if (enter(self, id, &v, err) < 0)
        return -1;
    bool have = v.ours && v.slot.state != PDK_SLOT_FREE;
    return leave(&v, have ? write_slot(&v, PDK_SLOT_FREE, v.now, err) : 0);
}

static int file_owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    visit v;
    if (enter(self, id, &v, err) < 0)
        return -1;
    if (v.live) {
        memcpy(out->owner, v.slot.owner, sizeof out->owner);
        out->del = v.slot.state == PDK_SLOT_DEL;
        out->ours = v.ours;
        out->token = v.slot.token;
    }
    return leave(&v, v.live);
}

static int file_owner_gone(void *self, const char *runtime_id, bool del_too, pdk_error *err)
{
    store *s = self;
    if (pdk_slots_enter(s->slots, err) < 0)
        return -1;
    pdk_ns now = pdk_clock_is_manual(s->clock) ? pdk_clock_now(s->clock) : pdk_now_boottime();
    int rc = pdk_slots_end_owner(s->slots, runtime_id, del_too, now, err);
    pdk_slots_leave(s->slots);
    return rc < 0 ? -1 : 0;
}

static int file_close(void *self, pdk_error *err)
{
    (void)err;
    store *s = self;
    pdk_slots_close(s->slots);
    return 0;
}

static void file_free(void *self)
{
    store *s = self;
    pdk_slots_free(s->slots);
    free(s->scope);
    free(s);
}

static const pdk_lease_ops file_ops = {
    .type = "file",
    .take = file_take,
    .claim = file_claim,
    .claim_for_destroy = file_claim_for_destroy,
    .renew = file_renew,
    .release = file_release,
    .owner_of = file_owner_of,
    .owner_gone = file_owner_gone,
    .close = file_close,
    .free = file_free,
};

/* 0 or -1: which boot this is. */
static int read_boot(char *out, size_t size, pdk_error *err)
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, out, size - 1);
    if (n <= 0)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "cannot read which boot this is (%s)", path);
    out[n] = '\0';
    out[strspn(out, "0123456789abcdef-")] = '\0';
    return out[0] != '\0' ? 0 : pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "%s holds no boot id", path);
}

pdk_lease *pdk_lease_file_of_boot(const char *state_dir, const char *scope, const char *boot, const char *runtime_id,
                                  double ttl, pdk_clock *clock, pdk_error *err)
{
    store *s = calloc(1, sizeof *s);
    if (s == NULL || (s->scope = strdup(scope)) == NULL) {
        free(s);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store");
        return NULL;
    }
    snprintf(s->runtime_id, sizeof s->runtime_id, "%s", runtime_id);
    s->ttl = ttl;
    s->clock = clock;
    s->slots = pdk_slots_open(state_dir, boot, pdk_clock_is_manual(clock), err);
    if (s->slots == NULL) {
        file_free(s);
        return NULL;
    }
    return pdk_lease_new(&file_ops, s, err);
}

pdk_lease *pdk_lease_file(const char *state_dir, const char *scope, const char *runtime_id, double ttl, pdk_clock *clock,
                          pdk_error *err)
{
    char boot[64];
    return read_boot(boot, sizeof boot, err) < 0
               ? NULL
               : pdk_lease_file_of_boot(state_dir, scope, boot, runtime_id, ttl, clock, err);
}
