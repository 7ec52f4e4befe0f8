/* policy.c -- the five policies as C functions: what goes into each question, and what counts as an answer. */
#include "policy_internal.h"

#include <lauxlib.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- birth and end ---- */

size_t pdk_policies_remembered(pdk_policies *p)
{
    return pdk_keep_bytes(p->keep);
}

pdk_policies *pdk_policies_new(pdk_script *s, pdk_clock *clock, pdk_log *log, pdk_view sources, pdk_view config,
                               pdk_error *err)
{
    pdk_policies *p = calloc(1, sizeof *p);
    pdk_keep *keep = pdk_keep_new();
    if (p == NULL || keep == NULL || !pdk_pack_copy(&p->sources, sources) || !pdk_pack_copy(&p->config, config)) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the policies");
        if (p != NULL) {
            pdk_pack_free(&p->sources);
            pdk_pack_free(&p->config);
        }
        free(p);
        pdk_keep_free(keep);
        return NULL;
    }
    p->keep = keep;
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
    pdk_keep_free(p->keep);
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

/* ---- facts ---- */

#define CTX_ROOM 1024 /* bytes of a common ctx */

static void add_view(pdk_facts *f, int name, pdk_view v)
{
    f->fact[f->count++] = (pdk_fact){ .name = (uint8_t)name, .kind = PDK_FACT_VIEW, .view = v };
}
static void add_str(pdk_facts *f, int name, const char *s, size_t len)
{
    f->fact[f->count++] = (pdk_fact){ .name = (uint8_t)name, .kind = PDK_FACT_STR, .str = s, .len = len };
}
static void add_cstr(pdk_facts *f, int name, const char *s)
{
    add_str(f, name, s, s == NULL ? 0 : strlen(s));
}
static void add_number(pdk_facts *f, int name, double d)
{
    f->fact[f->count++] = (pdk_fact){ .name = (uint8_t)name, .kind = PDK_FACT_NUM, .num = d };
}
static void add_who(pdk_facts *f, const pdk_identity *who)
{
    f->fact[f->count++] = (pdk_fact){ .name = PDK_FACT_IDENTITY, .kind = PDK_FACT_WHO, .who = who };
}

/* Packs the facts for a script. */
static int pack_facts(const pdk_facts *f, pdk_pack *ctx, pdk_hook h, pdk_error *err)
{
    pdk_facts_pack(f, ctx);
    return ctx->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask %s.%s", pdk_policy_names[pdk_hook_infos[h].file],
                                  pdk_hook_infos[h].function)
                       : 0;
}

static const unsigned char EMPTY_MAP[] = { '{', 0, 0, 0, 0, 0, 0, 0, 0 };

/* A map that a script may index. */
static pdk_view or_empty(pdk_view v, bool map_only)
{
    bool is = map_only ? pdk_view_tag(v) == '{' : !pdk_view_is_nil(v);
    return is ? v : (pdk_view){ EMPTY_MAP, sizeof EMPTY_MAP };
}

/* ---- identity.derive ---- */

int pdk_policy_derive(pdk_policies *p, const pdk_identity *who, pdk_view requirements, char id[64], pdk_error *err)
{
    unsigned char ctx_room[CTX_ROOM], kept_room[64];
    PDK_AUTO_PACK ctx = PDK_PACK_ON(ctx_room), kept = PDK_PACK_ON(kept_room);
    pdk_facts facts; /* filled in as far as it is used */
    facts.count = 0;
    facts.beside = PDK_NO_VIEW;
    add_str(&facts, PDK_FACT_USER, who->user, who->user_len);
    add_str(&facts, PDK_FACT_THREAD, who->thread, who->thread_len);
    add_view(&facts, PDK_FACT_REQUIREMENTS, requirements);
    if (pdk_keep_find(p->keep, PDK_HOOK_DERIVE, atomic_load(&p->generation), &facts, &kept)) {
        memcpy(id, kept.data, kept.len);
        return 0;
    }
    if (pack_facts(&facts, &ctx, PDK_HOOK_DERIVE, err) < 0)
        return -1;
    char answer[64] = "";
    pdk_learned learned;
    pdk_question q = { .hook = PDK_HOOK_DERIVE, .ctx = pdk_view_of(&ctx), .results = 1, .read = read_id, .out = answer,
                       .learned = &learned };
    if (pdk_policy_ask(p, &q, err) < 0)
        return -1;
    memcpy(id, answer, sizeof answer);
    pdk_keep_put(p->keep, PDK_HOOK_DERIVE, &learned, &facts, answer, strlen(answer) + 1);
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
    unsigned char ctx_room[CTX_ROOM], answer_room[CTX_ROOM];
    PDK_AUTO_PACK ctx = PDK_PACK_ON(ctx_room), answer = PDK_PACK_ON(answer_room);
    pdk_facts facts;
    facts.count = 0;
    facts.beside = base;
    add_str(&facts, PDK_FACT_USER, who->user, who->user_len);
    add_str(&facts, PDK_FACT_THREAD, who->thread, who->thread_len);
    add_who(&facts, who);
    add_view(&facts, PDK_FACT_REQUEST, or_empty(request, false));
    add_view(&facts, PDK_FACT_CAPABILITY, capability);
    if (pdk_keep_find(p->keep, PDK_HOOK_RESOLVE, atomic_load(&p->generation), &facts, out))
        return 0;
    if (pack_facts(&facts, &ctx, PDK_HOOK_RESOLVE, err) < 0)
        return -1;
    size_t before = out->len;
    resolving r = { base, out };
    pdk_learned learned;
    pdk_question q = { .hook = PDK_HOOK_RESOLVE,
                       .ctx = pdk_view_of(&ctx),
                       .results = 1,
                       .read = read_pack,
                       .check = check_requirements,
                       .answer = &answer,
                       .out = &r,
                       .learned = &learned };
    int rc = pdk_policy_ask(p, &q, err);
    if (rc == 1)
        pdk_keep_put(p->keep, PDK_HOOK_RESOLVE, &learned, &facts, out->data + before, out->len - before);
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

static int decide(pdk_policies *p, pdk_view ctx, const pdk_facts *facts, pdk_verdict *out, pdk_error *err)
{
    pdk_learned learned;
    pdk_question q = { .hook = PDK_HOOK_DECIDE, .ctx = ctx, .results = 3, .read = read_verdict, .out = out, .learned = &learned };
    int rc = pdk_policy_ask(p, &q, err);
    if (rc == 1 && facts != NULL && out->message[0] == '\0') /* one word, and perhaps its code, which is what mostly comes */
        pdk_keep_put(p->keep, PDK_HOOK_DECIDE, &learned, facts, out, offsetof(pdk_verdict, message) + 1);
    return rc < 0 ? -1 : 0;
}

int pdk_policy_decide(pdk_policies *p, pdk_view ctx, pdk_verdict *out, pdk_error *err)
{
    return decide(p, ctx, NULL, out, err);
}

int pdk_policy_reuse(pdk_policies *p, const pdk_reuse_facts *f, pdk_verdict *out, pdk_error *err)
{
    unsigned char ctx_room[CTX_ROOM], kept_room[64];
    PDK_AUTO_PACK ctx = PDK_PACK_ON(ctx_room), kept = PDK_PACK_ON(kept_room);
    pdk_facts facts;
    facts.count = 0;
    facts.beside = PDK_NO_VIEW;
    add_cstr(&facts, PDK_FACT_SOURCE, f->source);
    add_view(&facts, PDK_FACT_INFO, f->info);
    add_view(&facts, PDK_FACT_ATTESTATION, or_empty(pdk_view_get(f->info, "attestation"), true)); /* nothing attested is an empty table */
    add_view(&facts, PDK_FACT_REQUIREMENTS, f->requirements);
    add_who(&facts, f->who);
    add_cstr(&facts, PDK_FACT_EXPECTED_ID, f->expected_id);
    facts.fact[facts.count++] = (pdk_fact){ .name = PDK_FACT_HOLDERS, .kind = PDK_FACT_INT, .i = f->holders };
    add_number(&facts, PDK_FACT_IDLE_SECONDS, f->idle_seconds);
    if (f->capability.len > 0) {
        add_view(&facts, PDK_FACT_CAPABILITY, f->capability);
        facts.fact[facts.count++] = (pdk_fact){ .name = PDK_FACT_CAPABILITY_FRESH, .kind = PDK_FACT_BOOL, .i = f->capability_fresh };
    }
    if (pdk_keep_find(p->keep, PDK_HOOK_DECIDE, atomic_load(&p->generation), &facts, &kept)) {
        memcpy(out, kept.data, kept.len);
        return 0;
    }
    if (pack_facts(&facts, &ctx, PDK_HOOK_DECIDE, err) < 0)
        return -1;
    return decide(p, pdk_view_of(&ctx), &facts, out, err);
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
    unsigned char kept_room[16];
    PDK_AUTO_PACK kept = PDK_PACK_ON(kept_room);
    pdk_facts facts;
    facts.beside = PDK_NO_VIEW;
    pdk_learned learned;
    bool known = pdk_facts_of(ctx, &facts);
    if (known && pdk_keep_find(p->keep, PDK_HOOK_IDLE_TIMEOUT, atomic_load(&p->generation), &facts, &kept)) {
        memcpy(seconds, kept.data, sizeof *seconds);
        return 0;
    }
    pdk_question q = { .hook = PDK_HOOK_IDLE_TIMEOUT, .ctx = ctx, .results = 1, .read = read_seconds, .out = seconds,
                       .learned = &learned };
    int rc = pdk_policy_ask(p, &q, err);
    if (rc < 0)
        return -1;
    if (rc == 1 && known)
        pdk_keep_put(p->keep, PDK_HOOK_IDLE_TIMEOUT, &learned, &facts, seconds, sizeof *seconds);
    if (rc == 0) {
        *seconds = 0;
        pdk_view_num(pdk_view_get(pdk_view_of(&p->config), "idle_timeout"), seconds);
    }
    return 0;
}

static void idle_facts(pdk_facts *facts, const pdk_idle_facts *f)
{
    facts->count = 0;
    facts->beside = PDK_NO_VIEW;
    add_cstr(facts, PDK_FACT_SANDBOX_ID, f->sandbox_id);
    add_who(facts, f->who);
    add_cstr(facts, PDK_FACT_STATE, f->state);
    add_number(facts, PDK_FACT_IDLE_SECONDS, f->idle_seconds);
    add_view(facts, PDK_FACT_INFO, f->info);
    add_view(facts, PDK_FACT_REQUIREMENTS, f->requirements);
}

bool pdk_policy_idle_kept(pdk_policies *p, const pdk_idle_facts *f, double *seconds)
{
    unsigned char kept_room[16];
    PDK_AUTO_PACK kept = PDK_PACK_ON(kept_room);
    pdk_facts facts;
    idle_facts(&facts, f);
    if (!pdk_keep_find(p->keep, PDK_HOOK_IDLE_TIMEOUT, atomic_load(&p->generation), &facts, &kept))
        return false;
    memcpy(seconds, kept.data, sizeof *seconds);
    return true;
}

void pdk_policy_idle_ctx(const pdk_idle_facts *f, pdk_pack *ctx)
{
    pdk_facts facts;
    idle_facts(&facts, f);
    pdk_facts_pack(&facts, ctx);
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
