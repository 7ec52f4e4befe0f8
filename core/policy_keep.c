/* policy_keep.c -- answers of policies that are kept: derive's, and those of a file that says `pure = true`.
 *
 * What a kept answer depends on is found out, not declared: the fields of ctx that the function has looked at. An answer stands
 * under the values of all fields that the hook's function has looked at since it was loaded (at least those that this answer came
 * from); one that has looked at ctx.now, or at a field that nobody knows here, is not kept.
 *
 * True under the lock: an entry without a block is free. A key holds the generation and the fields that it was made of, so that
 * nothing of another set of policies, or made of fewer fields than are looked up, is ever found.
 * Locks: each hook's `lock` guards its entries; a leaf. */
#include "policy_internal.h"

#include <stdlib.h>
#include <string.h>

#define WAYS     4
#define KEY_ROOM 1024 /* bytes of a common key */

typedef struct kept { /* all under pdk_kept_hook.lock */
    uint64_t hash;
    uint32_t key_len, answer_len;
    unsigned char *block; /* owned; the key, then the answer; NULL = free */
} kept;

typedef struct pdk_kept_hook {
    pdk_mutex lock;       /* never held while another lock is taken */
    atomic_uint_least32_t fields; /* that are looked up by; 0 = nothing is kept. Only a guess of what will be found */
    size_t sets;          /* fixed, a power of two */
    kept *entries;        /* lock; sets * WAYS of them */
    unsigned char *next;  /* lock; which way of a set is replaced next */
    size_t bytes;         /* lock; of all blocks */
} pdk_kept_hook;

struct pdk_keep {
    pdk_kept_hook hooks[PDK_HOOKS];
};

static const struct {
    const char *name;
    size_t len;
} names[PDK_FACT_NAMES] = {
#define NAME(which, text) [which] = { text, sizeof text - 1 }
    NAME(PDK_FACT_USER, "user"), NAME(PDK_FACT_THREAD, "thread"), NAME(PDK_FACT_IDENTITY, "identity"),
    NAME(PDK_FACT_REQUEST, "request"), NAME(PDK_FACT_REQUIREMENTS, "requirements"), NAME(PDK_FACT_CAPABILITY, "capability"),
    NAME(PDK_FACT_CAPABILITY_FRESH, "capability_fresh"), NAME(PDK_FACT_SOURCE, "source"), NAME(PDK_FACT_INFO, "info"),
    NAME(PDK_FACT_ATTESTATION, "attestation"), NAME(PDK_FACT_EXPECTED_ID, "expected_id"), NAME(PDK_FACT_HOLDERS, "holders"),
    NAME(PDK_FACT_IDLE_SECONDS, "idle_seconds"), NAME(PDK_FACT_SANDBOX_ID, "sandbox_id"), NAME(PDK_FACT_STATE, "state"),
    NAME(PDK_FACT_DIFFERS, "differs"), NAME(PDK_FACT_CONFIG, "config"), NAME(PDK_FACT_NOW, "now"),
#undef NAME
};

#define FIELD(name)   (UINT32_C(1) << (name))
#define KNOWN         FIELD(PDK_FACT_NAMES) /* set in `fields`: something is kept */
#define NOT_TO_BE_KEPT (FIELD(PDK_FACT_NOW) | PDK_FIELDS_UNKNOWN)

/* How many sets, and the bytes of one key and its answer; what is longer is asked anew. All of it: 4 MiB at most, whatever names
 * callers choose. */
static const struct {
    size_t sets, most;
} sizes[PDK_HOOKS] = {
    [PDK_HOOK_DERIVE] = { 1024, 768 },
    [PDK_HOOK_RESOLVE] = { 16, 5120 },
    [PDK_HOOK_DECIDE] = { 16, 5120 },
    [PDK_HOOK_IDLE_TIMEOUT] = { 16, 5120 },
};
_Static_assert(WAYS * (1024 * 768 + 3 * 16 * 5120) <= PDK_REMEMBERED_MAX, "as policy.h says it");

/* ---- birth and end ---- */

pdk_keep *pdk_keep_new(void)
{
    pdk_keep *k = calloc(1, sizeof *k);
    if (k == NULL)
        return NULL;
    for (int h = 0; h < PDK_HOOKS; h++)
        pdk_mutex_init(&k->hooks[h].lock);
    for (int h = 0; h < PDK_HOOKS; h++) {
        pdk_kept_hook *hook = &k->hooks[h];
        hook->sets = sizes[h].sets;
        if (hook->sets == 0)
            continue;
        hook->entries = calloc(hook->sets * WAYS, sizeof *hook->entries);
        hook->next = calloc(hook->sets, 1);
        if (hook->entries == NULL || hook->next == NULL) {
            pdk_keep_free(k);
            return NULL;
        }
    }
    return k;
}

void pdk_keep_free(pdk_keep *k)
{
    if (k == NULL)
        return;
    for (int h = 0; h < PDK_HOOKS; h++) {
        pdk_kept_hook *hook = &k->hooks[h];
        for (size_t i = 0; hook->entries != NULL && i < hook->sets * WAYS; i++)
            free(hook->entries[i].block);
        free(hook->entries);
        free(hook->next);
        pdk_mutex_destroy(&hook->lock);
    }
    free(k);
}

size_t pdk_keep_bytes(pdk_keep *k)
{
    size_t bytes = 0;
    for (int h = 0; h < PDK_HOOKS; h++) {
        PDK_GUARD(k->hooks[h].lock);
        bytes += k->hooks[h].bytes;
    }
    return bytes;
}

/* ---- facts ---- */

uint32_t pdk_field_of(const char *name, size_t len)
{
    for (int i = 0; i < PDK_FACT_NAMES; i++)
        if (names[i].len == len && memcmp(names[i].name, name, len) == 0)
            return FIELD(i);
    return PDK_FIELDS_UNKNOWN;
}

bool pdk_fields_keepable(pdk_hook h, uint32_t *fields)
{
    if (h == PDK_HOOK_DERIVE) /* pure by what it is for: one answer for each question, whatever it looks at */
        *fields = FIELD(PDK_FACT_USER) | FIELD(PDK_FACT_THREAD) | FIELD(PDK_FACT_REQUIREMENTS);
    return (*fields & NOT_TO_BE_KEPT) == 0;
}

static void put_who(pdk_pack *p, const pdk_identity *who)
{
    pdk_mark m = pdk_begin_map(p);
    pdk_kv_str(p, &m, "user", who->user, who->user_len);
    pdk_kv_str(p, &m, "thread", who->thread, who->thread_len);
    pdk_end(p, &m);
}

static bool is_nil(const pdk_fact *f)
{
    switch (f->kind) {
    case PDK_FACT_VIEW: return pdk_view_is_nil(f->view);
    case PDK_FACT_STR: return f->str == NULL;
    case PDK_FACT_WHO: return f->who == NULL;
    default: return false;
    }
}

static void put_value(pdk_pack *p, const pdk_fact *f)
{
    if (is_nil(f)) {
        pdk_put_nil(p);
        return;
    }
    switch (f->kind) {
    case PDK_FACT_VIEW: pdk_put_view(p, f->view); break;
    case PDK_FACT_INT: pdk_put_int(p, f->i); break;
    case PDK_FACT_NUM: pdk_put_num(p, f->num); break;
    case PDK_FACT_BOOL: pdk_put_bool(p, f->i != 0); break;
    case PDK_FACT_STR: pdk_put_str(p, f->str, f->len); break;
    case PDK_FACT_WHO: put_who(p, f->who); break;
    }
}

void pdk_facts_pack(const pdk_facts *f, pdk_pack *out)
{
    pdk_mark m = pdk_begin_map(out);
    for (int i = 0; i < f->count; i++) {
        if (is_nil(&f->fact[i]))
            continue;
        pdk_put_str(out, names[f->fact[i].name].name, names[f->fact[i].name].len);
        put_value(out, &f->fact[i]);
        m.count++;
    }
    pdk_end(out, &m);
}

bool pdk_facts_of(pdk_view ctx, pdk_facts *out)
{
    size_t cursor = 0, len;
    pdk_view k, v;
    out->count = 0;
    while (pdk_view_next(ctx, &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, &len);
        uint32_t field = key == NULL ? PDK_FIELDS_UNKNOWN : pdk_field_of(key, len);
        if (field == PDK_FIELDS_UNKNOWN || out->count == PDK_FACTS_MOST)
            return false;
        out->fact[out->count++] = (pdk_fact){ .name = (uint8_t)__builtin_ctz(field), .kind = PDK_FACT_VIEW, .view = v };
    }
    return true;
}

static pdk_view view_among(const pdk_facts *f, int name)
{
    for (int i = 0; i < f->count; i++)
        if (f->fact[i].name == name && f->fact[i].kind == PDK_FACT_VIEW)
            return f->fact[i].view;
    return PDK_NO_VIEW;
}

/* ---- keys ---- */

/* The values of `fields` in their order; one that is not there is nil. */
static void put_fields(pdk_pack *key, const pdk_facts *f, uint32_t fields)
{
    for (; fields != 0; fields &= fields - 1) {
        int name = __builtin_ctz(fields);
        const pdk_fact *at = f->fact, *end = f->fact + f->count;
        while (at < end && at->name != name)
            at++;
        if (at < end)
            put_value(key, at);
        else if (name != PDK_FACT_DIFFERS)
            pdk_put_nil(key);
        else {
            unsigned char room[256];
            PDK_AUTO_PACK differs = PDK_PACK_ON(room);
            pdk_reuse_differences(view_among(f, PDK_FACT_REQUIREMENTS), view_among(f, PDK_FACT_ATTESTATION),
                                  view_among(f, PDK_FACT_CAPABILITY), &differs);
            key->failed |= differs.failed;
            pdk_put_view(key, pdk_view_of(&differs));
        }
    }
}

static bool make_key(pdk_pack *key, uint64_t generation, const pdk_facts *f, uint32_t fields)
{
    fields &= ~(KNOWN | FIELD(PDK_FACT_CONFIG)); /* the configuration is one for all */
    pdk_put_int(key, (int64_t)generation);
    pdk_put_int(key, fields);
    pdk_put_view(key, f->beside);
    put_fields(key, f, fields);
    return !key->failed;
}

static uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_of(const unsigned char *p, size_t n)
{
    uint64_t h = n * UINT64_C(0x9E3779B97F4A7C15), w[2];
    for (; n >= 16; p += 16, n -= 16) {
        memcpy(w, p, 16);
        h = fold(w[0] ^ UINT64_C(0xBF58476D1CE4E5B9), w[1] ^ h);
    }
    w[0] = w[1] = 0;
    memcpy(w, p, n);
    return fold(w[0] ^ UINT64_C(0x94D049BB133111EB), w[1] ^ h ^ UINT64_C(0xD6E8FEB86659FD93));
}

/* ---- looking up and keeping ---- */

bool pdk_keep_find(pdk_keep *k, pdk_hook h, uint64_t generation, const pdk_facts *f, pdk_pack *out)
{
    pdk_kept_hook *hook = &k->hooks[h];
    uint32_t fields = (uint32_t)atomic_load_explicit(&hook->fields, memory_order_relaxed);
    unsigned char room[KEY_ROOM];
    PDK_AUTO_PACK key = PDK_PACK_ON(room);
    if (fields == 0 || !make_key(&key, generation, f, fields))
        return false;
    uint64_t hash = hash_of(key.data, key.len);
    PDK_GUARD(hook->lock);
    const kept *set = &hook->entries[(hash & (hook->sets - 1)) * WAYS];
    for (int i = 0; i < WAYS; i++)
        if (set[i].block != NULL && set[i].hash == hash && set[i].key_len == key.len &&
            memcmp(set[i].block, key.data, key.len) == 0) {
            pdk_put_view(out, (pdk_view){ set[i].block + key.len, set[i].answer_len });
            return !out->failed;
        }
    return false;
}

void pdk_keep_learn(pdk_keep *k, pdk_hook h, uint32_t fields)
{
    if (k->hooks[h].sets > 0)
        atomic_store_explicit(&k->hooks[h].fields, KNOWN | fields, memory_order_relaxed);
}

void pdk_keep_put(pdk_keep *k, pdk_hook h, const pdk_learned *learned, const pdk_facts *f, const void *answer, size_t len)
{
    pdk_kept_hook *hook = &k->hooks[h];
    unsigned char room[KEY_ROOM];
    PDK_AUTO_PACK key = PDK_PACK_ON(room);
    if (!learned->keep || len == 0 || !make_key(&key, learned->generation, f, learned->fields) ||
        key.len + len > sizes[h].most)
        return;
    kept fresh = { hash_of(key.data, key.len), (uint32_t)key.len, (uint32_t)len, malloc(key.len + len) };
    if (fresh.block == NULL)
        return;
    memcpy(fresh.block, key.data, key.len);
    memcpy(fresh.block + key.len, answer, len);
    unsigned char *former;
    {
        PDK_GUARD(hook->lock);
        size_t set = fresh.hash & (hook->sets - 1);
        kept *at = &hook->entries[set * WAYS + hook->next[set]++ % WAYS];
        former = at->block;
        hook->bytes += key.len + len - (former != NULL ? at->key_len + at->answer_len : 0);
        *at = fresh;
    }
    free(former);
}
