/* policy.c -- the five policies as C functions: what goes into each question, and what counts as an answer. */
#include "policy_internal.h"

#include <lauxlib.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- what derive answered: kept, since it is pure ---- */

#define CACHE_SETS    1024
#define CACHE_WAYS    4
#define CACHE_KEY_MAX 1024 /* bytes; longer keys are asked anew: a host that sees new identities for ever keeps 4 MiB of them at most */

typedef struct derived { /* all under pdk_derive_cache.lock */
    uint64_t hash, generation;
    unsigned char *key; /* owned; NULL = free */
    size_t key_len;
    char id[64];
} derived;

struct pdk_derive_cache {
    pdk_mutex lock;                        /* never held while another lock is taken */
    derived entry[CACHE_SETS][CACHE_WAYS]; /* lock */
    unsigned char next[CACHE_SETS];        /* lock; which way is replaced next */
    size_t key_bytes;                      /* lock; of all keys */
};

typedef struct derive_key { /* borrowed parts, compared one after the other */
    const void *part[3];
    size_t len[3];
    uint64_t hash;
} derive_key;

static uint64_t mix(uint64_t h, const unsigned char *p, size_t n)
{
    h ^= n * UINT64_C(0x9E3779B97F4A7C15);
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        h = (h ^ w) * UINT64_C(0xBF58476D1CE4E5B9);
        h ^= h >> 29;
    }
    for (; n > 0; p++, n--)
        h = (h ^ *p) * UINT64_C(0x94D049BB133111EB);
    return h ^ (h >> 32);
}

static derive_key key_of(const pdk_identity *who, pdk_view requirements)
{
    derive_key k = { { who->user, who->thread, requirements.p }, { who->user_len, who->thread_len, requirements.len }, 0 };
    for (int i = 0; i < 3; i++)
        k.hash = mix(k.hash + (k.part[i] == NULL), k.part[i], k.part[i] == NULL ? 0 : k.len[i]);
    return k;
}

/* The key's bytes: each part's length (all ones for NULL) before it, so that no two keys are alike. */
static size_t key_size(const derive_key *k)
{
    return 3 * sizeof(size_t) + (k->part[0] ? k->len[0] : 0) + (k->part[1] ? k->len[1] : 0) + (k->part[2] ? k->len[2] : 0);
}

static bool key_equal(const derive_key *k, const unsigned char *at)
{
    for (int i = 0; i < 3; i++) {
        size_t len = k->part[i] == NULL ? SIZE_MAX : k->len[i];
        if (memcmp(at, &len, sizeof len) != 0)
            return false;
        at += sizeof len;
        if (k->part[i] != NULL && len > 0 && memcmp(at, k->part[i], len) != 0)
            return false;
        at += k->part[i] == NULL ? 0 : len;
    }
    return true;
}

static unsigned char *key_copy(const derive_key *k)
{
    unsigned char *copy = malloc(key_size(k)), *at = copy;
    for (int i = 0; copy != NULL && i < 3; i++) {
        size_t len = k->part[i] == NULL ? SIZE_MAX : k->len[i];
        memcpy(at, &len, sizeof len);
        at += sizeof len;
        if (k->part[i] != NULL && len > 0) {
            memcpy(at, k->part[i], len);
            at += len;
        }
    }
    return copy;
}

static bool cache_get(pdk_derive_cache *cache, const derive_key *k, uint64_t generation, char id[64])
{
    PDK_GUARD(cache->lock);
    derived *set = cache->entry[k->hash % CACHE_SETS];
    for (int i = 0; i < CACHE_WAYS; i++)
        if (set[i].key != NULL && set[i].hash == k->hash && set[i].generation == generation &&
            set[i].key_len == key_size(k) && key_equal(k, set[i].key)) {
            memcpy(id, set[i].id, sizeof set[i].id);
            return true;
        }
    return false;
}

static void cache_put(pdk_derive_cache *cache, const derive_key *k, uint64_t generation, const char id[64])
{
    size_t len = key_size(k);
    unsigned char *key = len > CACHE_KEY_MAX ? NULL : key_copy(k);
    if (key == NULL)
        return;
    unsigned char *former;
    {
        PDK_GUARD(cache->lock);
        size_t s = k->hash % CACHE_SETS;
        derived *e = &cache->entry[s][cache->next[s]++ % CACHE_WAYS];
        former = e->key;
        cache->key_bytes += len - (former != NULL ? e->key_len : 0);
        *e = (derived){ .hash = k->hash, .generation = generation, .key = key, .key_len = len };
        memcpy(e->id, id, sizeof e->id);
    }
    free(former);
}

size_t pdk_policies_remembered(pdk_policies *p)
{
    PDK_GUARD(p->cache->lock);
    return p->cache->key_bytes;
}

static void cache_free(pdk_derive_cache *cache)
{
    if (cache == NULL)
        return;
    for (int s = 0; s < CACHE_SETS; s++)
        for (int i = 0; i < CACHE_WAYS; i++)
            free(cache->entry[s][i].key);
    pdk_mutex_destroy(&cache->lock);
    free(cache);
}

/* ---- birth and end ---- */

pdk_policies *pdk_policies_new(pdk_script *s, pdk_clock *clock, pdk_log *log, pdk_view sources, pdk_view config,
                               pdk_error *err)
{
    pdk_policies *p = calloc(1, sizeof *p);
    pdk_derive_cache *cache = calloc(1, sizeof *cache);
    if (p == NULL || cache == NULL || !pdk_pack_copy(&p->sources, sources) || !pdk_pack_copy(&p->config, config)) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the policies");
        if (p != NULL) {
            pdk_pack_free(&p->sources);
            pdk_pack_free(&p->config);
        }
        free(p);
        free(cache);
        return NULL;
    }
    pdk_mutex_init(&cache->lock);
    p->cache = cache;
    p->script = pdk_script_retain(s);
    p->clock = clock;
    p->log = log;
    if (pdk_policies_reload(p, err) == 0)
        return p;
    pdk_policies_free(p);
    return NULL;
}

void pdk_policies_free(pdk_policies *p)
{
    if (p == NULL)
        return;
    pdk_policy_set_free(p->script, p->set);
    cache_free(p->cache);
    pdk_pack_free(&p->sources);
    pdk_pack_free(&p->config);
    pdk_script_release(p->script);
    free(p);
}

uint64_t pdk_policies_generation(pdk_policies *p)
{
    return atomic_load(&p->generation);
}

typedef struct describing {
    pdk_policies *p;
    pdk_pack *out;
} describing;

/* Under the Lua mutex, for the set to stay. */
static int describe(lua_State *L, void *arg)
{
    describing *d = arg;
    const pdk_policy_set *set = d->p->set;
    (void)L;
    pdk_mark list = pdk_begin_list(d->out);
    for (int i = 0; i < PDK_POLICY_FILES; i++, list.count++) {
        int first = 0;
        pdk_mark m = pdk_begin_map(d->out);
        pdk_kv_cstr(d->out, &m, "name", pdk_policy_names[i]);
        pdk_kv_cstr(d->out, &m, "path", set->built_in[i] ? "built in" : set->paths[i]);
        pdk_put_cstr(d->out, "functions");
        m.count++;
        pdk_mark functions = pdk_begin_list(d->out);
        for (int h = 0; h < PDK_HOOKS; h++) {
            if (pdk_hook_infos[h].file != i || set->fns[h].ref == LUA_NOREF)
                continue;
            pdk_put_cstr(d->out, pdk_hook_infos[h].function);
            functions.count++;
            if (first == 0)
                first = set->fns[h].line;
        }
        pdk_end(d->out, &functions);
        pdk_kv_int(d->out, &m, "line", first);
        pdk_end(d->out, &m);
    }
    pdk_end(d->out, &list);
    return 0;
}

int pdk_policies_describe(pdk_policies *p, pdk_pack *out, pdk_error *err)
{
    describing d = { p, out };
    if (pdk_script_enter(p->script, describe, &d, err) < 0)
        return -1;
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to describe the policies") : 0;
}

/* ---- answers ---- */

__attribute__((format(printf, 2, 3))) static void wrong(pdk_policy_call *c, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(c->wrong, sizeof c->wrong, fmt, args);
    va_end(args);
}

/* A short look at a wrong answer, for the message. */
static const char *shown(lua_State *L, int index, char *buffer, size_t size)
{
    size_t len;
    if (lua_type(L, index) != LUA_TSTRING) {
        snprintf(buffer, size, "%s%s", lua_isnoneornil(L, index) ? "" : "a ", luaL_typename(L, index));
        return buffer;
    }
    const char *s = lua_tolstring(L, index, &len);
    size_t n = snprintf(buffer, size, "'%.30s%s'", s, len > 30 ? "..." : "");
    for (size_t i = 0; i < n && i < size && buffer[i] != '\0'; i++)
        if ((unsigned char)buffer[i] < 0x20 || (unsigned char)buffer[i] >= 0x7f)
            buffer[i] = '?';
    return buffer;
}

static bool id_ok(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!(s[i] >= 'a' && s[i] <= 'z') && !(s[i] >= '0' && s[i] <= '9') && s[i] != '-')
            return false;
    return len >= 1 && len <= 63;
}

static void read_id(lua_State *L, pdk_policy_call *c, int first)
{
    size_t len = 0;
    const char *s = lua_type(L, first) == LUA_TSTRING ? lua_tolstring(L, first, &len) : NULL;
    if (s == NULL || !id_ok(s, len)) {
        char text[48];
        wrong(c, "answered %s; a sandbox id is a string of 1 to 63 characters of a-z, 0-9 and -",
              shown(L, first, text, sizeof text));
        return;
    }
    memcpy(c->ask->out, s, len + 1);
}

static void read_pack(lua_State *L, pdk_policy_call *c, int first)
{
    pdk_policy_pack_answer(L, first, c, c->ask->answer);
}

/* ---- identity.derive ---- */

static void put_identity(pdk_pack *p, pdk_mark *m, const pdk_identity *who)
{
    pdk_kv_str(p, m, "user", who->user, who->user_len);
    pdk_kv_str(p, m, "thread", who->thread, who->thread_len);
}

int pdk_policy_derive(pdk_policies *p, const pdk_identity *who, pdk_view requirements, char id[64], pdk_error *err)
{
    derive_key key = key_of(who, requirements);
    uint64_t generation = atomic_load(&p->generation);
    if (cache_get(p->cache, &key, generation, id))
        return 0;
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&ctx);
    put_identity(&ctx, &m, who);
    pdk_kv_view(&ctx, &m, "requirements", requirements);
    pdk_end(&ctx, &m);
    if (ctx.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask identity.derive");
    char answer[64] = "";
    pdk_question q = { .hook = PDK_HOOK_DERIVE, .ctx = pdk_view_of(&ctx), .results = 1, .read = read_id, .out = answer };
    int rc = pdk_policy_ask(p, &q, err);
    if (rc < 0)
        return -1;
    memcpy(id, answer, sizeof answer);
    /* Kept only if no reload came between: the answer is then certainly that generation's. */
    if (atomic_load(&p->generation) == generation)
        cache_put(p->cache, &key, generation, answer);
    return 0;
}

/* ---- requirements.resolve ---- */

typedef struct resolving {
    pdk_view base;
    pdk_pack *out;
} resolving;

static void check_requirements(pdk_policy_call *c)
{
    resolving *r = c->ask->out;
    pdk_answer_requirements(pdk_view_of(c->ask->answer), r->base, r->out, (pdk_wrong){ c->wrong, sizeof c->wrong });
}

/* Appends to `out` in one piece: on an error nothing of it stays. */
static int finish_pack(pdk_pack *out, size_t before, int rc)
{
    if (rc < 0) {
        out->len = before;
        out->failed = false;
        return -1;
    }
    return 0;
}

int pdk_policy_resolve(pdk_policies *p, const pdk_identity *who, pdk_view request, pdk_view base, pdk_pack *out,
                       pdk_error *err)
{
    return pdk_policy_resolve_again(p, who, request, base, PDK_NO_VIEW, out, err);
}

int pdk_policy_resolve_again(pdk_policies *p, const pdk_identity *who, pdk_view request, pdk_view base, pdk_view capability,
                             pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK;
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    pdk_mark m = pdk_begin_map(&ctx);
    put_identity(&ctx, &m, who);
    pdk_put_cstr(&ctx, "identity");
    m.count++;
    pdk_mark inner = pdk_begin_map(&ctx);
    put_identity(&ctx, &inner, who);
    pdk_end(&ctx, &inner);
    pdk_put_cstr(&ctx, "request");
    m.count++;
    if (pdk_view_is_nil(request)) {
        pdk_mark none = pdk_begin_map(&ctx);
        pdk_end(&ctx, &none);
    } else
        pdk_put_view(&ctx, request);
    pdk_kv_view(&ctx, &m, "capability", capability);
    pdk_end(&ctx, &m);
    if (ctx.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask requirements.resolve");
    size_t before = out->len;
    resolving r = { base, out };
    pdk_question q = { .hook = PDK_HOOK_RESOLVE,
                       .ctx = pdk_view_of(&ctx),
                       .results = 1,
                       .read = read_pack,
                       .check = check_requirements,
                       .answer = &answer,
                       .out = &r };
    int rc = pdk_policy_ask(p, &q, err);
    return finish_pack(out, before, rc);
}

/* ---- mounts.compose ---- */

static void check_mounts(pdk_policy_call *c)
{
    pdk_answer_mounts(pdk_view_of(c->ask->answer), c->ask->out, c->p->log, (pdk_wrong){ c->wrong, sizeof c->wrong });
}

int pdk_policy_compose(pdk_policies *p, pdk_view ctx, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    size_t before = out->len;
    pdk_question q = { .hook = PDK_HOOK_COMPOSE,
                       .ctx = ctx,
                       .results = 1,
                       .read = read_pack,
                       .check = check_mounts,
                       .answer = &answer,
                       .out = out };
    int rc = pdk_policy_ask(p, &q, err);
    return finish_pack(out, before, rc);
}

/* ---- reuse ---- */

static const char *const decisions[] = {
    [PDK_REUSE] = "reuse", [PDK_REPLACE] = "replace", [PDK_REFUSE] = "refuse", [PDK_DEFER] = "defer", [PDK_PROBE] = "probe",
};
static const char *const net_decisions[] = {
    [PDK_NET_ALLOW] = "allow",
    [PDK_NET_DENY] = "deny",
    [PDK_NET_ASK] = "ask",
};

/* The place of the string at `index` in a list, or -1. */
static int word_at(lua_State *L, int index, const char *const *words, size_t n)
{
    const char *s = lua_type(L, index) == LUA_TSTRING ? lua_tostring(L, index) : NULL;
    for (size_t i = 0; s != NULL && i < n; i++)
        if (strcmp(s, words[i]) == 0)
            return (int)i;
    return -1;
}

/* decide's code and message: nil or a string; false and c->wrong otherwise. */
static bool read_text(lua_State *L, int index, pdk_policy_call *c, const char *name, char *to, size_t size, bool cut)
{
    to[0] = '\0';
    if (lua_isnil(L, index))
        return true;
    size_t len = 0;
    const char *s = lua_type(L, index) == LUA_TSTRING ? lua_tolstring(L, index, &len) : NULL;
    if (s == NULL || (len >= size && !cut)) {
        char text[48];
        wrong(c, "answered %s as its %s; that is nil or a string of at most %zu bytes", shown(L, index, text, sizeof text),
              name, size - 1);
        return false;
    }
    snprintf(to, size, "%s", s);
    for (char *at = to; *at != '\0'; at++)
        if ((unsigned char)*at < 0x20 || *at == 0x7f)
            *at = ' ';
    return true;
}

static void read_verdict(lua_State *L, pdk_policy_call *c, int first)
{
    pdk_verdict *v = c->ask->out;
    int d = word_at(L, first, decisions, sizeof decisions / sizeof decisions[0]);
    if (d < 0) {
        char text[48];
        wrong(c, "answered %s; a decision is \"reuse\", \"replace\", \"refuse\", \"defer\" or \"probe\"",
              shown(L, first, text, sizeof text));
        return;
    }
    v->decision = (pdk_decision)d;
    if (read_text(L, first + 1, c, "code", v->code, sizeof v->code, false))
        read_text(L, first + 2, c, "message", v->message, sizeof v->message, true);
}

int pdk_policy_decide(pdk_policies *p, pdk_view ctx, pdk_verdict *out, pdk_error *err)
{
    pdk_question q = { .hook = PDK_HOOK_DECIDE, .ctx = ctx, .results = 3, .read = read_verdict, .out = out };
    int rc = pdk_policy_ask(p, &q, err);
    return rc < 0 ? -1 : 0;
}

static void read_seconds(lua_State *L, pdk_policy_call *c, int first)
{
    double *out = c->ask->out;
    double d = lua_type(L, first) == LUA_TNUMBER ? lua_tonumber(L, first) : NAN;
    if (isnan(d)) {
        char text[48];
        wrong(c, "answered %s; an idle limit is a number of seconds, 0 = never", shown(L, first, text, sizeof text));
        return;
    }
    *out = d <= 0 ? 0 : d; /* also 0 or less: nothing expires (N6) */
}

int pdk_policy_idle_timeout(pdk_policies *p, pdk_view ctx, double *seconds, pdk_error *err)
{
    pdk_question q = { .hook = PDK_HOOK_IDLE_TIMEOUT, .ctx = ctx, .results = 1, .read = read_seconds, .out = seconds };
    int rc = pdk_policy_ask(p, &q, err);
    if (rc < 0)
        return -1;
    if (rc == 0) {
        *seconds = 0;
        pdk_view_num(pdk_view_get(pdk_view_of(&p->config), "idle_timeout"), seconds);
    }
    return 0;
}

static void read_victim(lua_State *L, pdk_policy_call *c, int first)
{
    size_t cursor = 0, len = 0, n = 0;
    pdk_view k, v;
    char *id = c->ask->out, text[48];
    if (lua_isnil(L, first))
        return;
    const char *s = lua_type(L, first) == LUA_TSTRING ? lua_tolstring(L, first, &len) : NULL;
    while (s != NULL && pdk_view_next(c->ask->ctx, &cursor, &k, &v)) {
        const char *candidate = pdk_view_str(pdk_view_get(v, "sandbox_id"), &n);
        if (candidate != NULL && n == len && n < 64 && memcmp(candidate, s, n) == 0) {
            memcpy(id, candidate, n + 1);
            return;
        }
    }
    wrong(c, "answered %s; it must be the sandbox_id of one of the candidates, or nil", shown(L, first, text, sizeof text));
}

int pdk_policy_evict(pdk_policies *p, pdk_view candidates, char id[64], pdk_error *err)
{
    pdk_question q = {
        .hook = PDK_HOOK_EVICT, .ctx = candidates, .plain = true, .results = 1, .read = read_victim, .out = id
    };
    id[0] = '\0';
    int rc = pdk_policy_ask(p, &q, err);
    if (rc < 0)
        return -1;
    size_t cursor = 0, len = 0;
    pdk_view k, first;
    if (rc == 0 && pdk_view_next(candidates, &cursor, &k, &first)) {
        const char *s = pdk_view_str(pdk_view_get(first, "sandbox_id"), &len);
        if (s != NULL && len < 64)
            memcpy(id, s, len + 1);
    }
    return 0;
}

/* ---- network.decide ---- */

static void read_net(lua_State *L, pdk_policy_call *c, int first)
{
    int d = word_at(L, first, net_decisions, sizeof net_decisions / sizeof net_decisions[0]);
    if (d >= 0) {
        *(pdk_net_decision *)c->ask->out = (pdk_net_decision)d;
        return;
    }
    char text[48];
    wrong(c, "answered %s; a decision is \"allow\", \"deny\" or \"ask\"", shown(L, first, text, sizeof text));
}

int pdk_policy_network(pdk_policies *p, pdk_view ctx, pdk_net_decision *out, pdk_error *err)
{
    pdk_question q = { .hook = PDK_HOOK_NETWORK, .ctx = ctx, .results = 1, .read = read_net, .out = out };
    *out = PDK_NET_DENY;
    int rc = pdk_policy_ask(p, &q, err);
    return rc < 0 ? -1 : 0;
}
