/* lease_table.c -- an ownership store that is a table of Lua functions; see lease.h. It keeps nothing itself. */
#include "lease.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct table { /* fixed at birth */
    char runtime_id[64];
    double ttl;
    pdk_iface *functions;
} table;

static int call(table *t, const char *method, const char *id, int64_t floor, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK;
    pdk_put_cstr(&args, id);
    pdk_mark ctx = pdk_begin_map(&args);
    pdk_kv_cstr(&args, &ctx, "runtime", t->runtime_id);
    pdk_kv_num(&args, &ctx, "ttl", t->ttl);
    pdk_kv_int(&args, &ctx, "floor", floor);
    pdk_end(&args, &ctx);
    if (args.failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory to ask the ownership store");
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    if (pdk_iface_call(t->functions, method, &args, out, pdk_limit_current(), PDK_E_OWNERSHIP_UNAVAILABLE, &own) == 0)
        return 0;
    if (own.kind != PDK_E_OWNERSHIP_UNAVAILABLE)
        pdk_error_become(&own, PDK_E_OWNERSHIP_UNAVAILABLE, NULL, "the ownership store could not answer (%s of %s)", method, id);
    pdk_error_move(err, &own);
    return -1;
}

static int bad_answer(pdk_error *err, const char *method, const char *wanted)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "the ownership store's %s must answer %s", method, wanted);
}

static int ask(table *t, const char *method, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    if (call(t, method, id, floor, &out, err) < 0)
        return -1;
    pdk_view answer = pdk_view_nth(&out, 0);
    if (pdk_view_tag(answer) == 'f')
        return 0;
    if (pdk_view_tag(answer) != 't' || !pdk_view_int(pdk_view_nth(&out, 1), token) || *token <= floor)
        return bad_answer(err, method, "true and an integer token above ctx.floor, or false");
    return 1;
}

static int table_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, "take", id, floor, token, err);
}
static int table_claim(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, "claim", id, floor, token, err);
}
static int table_claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, "claim_for_destroy", id, floor, token, err);
}

static int table_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    static const char *const words[] = { "renewed", "lapsed", "lost" };
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    if (call(self, "renew", id, 0, &answer, err) < 0)
        return -1;
    const char *s = pdk_view_str(pdk_view_of(&answer), NULL);
    for (int i = 0; s != NULL && i < 3; i++)
        if (strcmp(s, words[i]) == 0) {
            *out = (pdk_renewal)i;
            return 0;
        }
    return bad_answer(err, "renew", "\"renewed\", \"lapsed\" or \"lost\"");
}

static int table_release(void *self, const char *id, pdk_error *err)
{
    PDK_AUTO_PACK out = PDK_NO_PACK;
    return call(self, "release", id, 0, &out, err);
}

static int table_owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    table *t = self;
    PDK_AUTO_PACK answer = PDK_NO_PACK;
    if (call(t, "owner", id, 0, &answer, err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&answer);
    if (pdk_view_is_nil(v))
        return 0;
    const char *owner = pdk_view_str(pdk_view_get(v, "owner"), NULL), *state = pdk_view_str(pdk_view_get(v, "state"), NULL);
    if (owner == NULL || state == NULL)
        return bad_answer(err, "owner", "nil or { owner =, state =, token = }");
    snprintf(out->owner, sizeof out->owner, "%s", owner);
    out->del = strcmp(state, "own") != 0;
    out->ours = strcmp(owner, t->runtime_id) == 0;
    if (!pdk_view_int(pdk_view_get(v, "token"), &out->token))
        out->token = 0;
    return 1;
}

static int table_close(void *self, pdk_error *err)
{
    table *t = self;
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    if (!pdk_iface_has(t->functions, "close"))
        return 0;
    return pdk_iface_call(t->functions, "close", &args, &out, pdk_limit_current(), PDK_E_OWNERSHIP_UNAVAILABLE, err);
}

static void table_free(void *self)
{
    table *t = self;
    pdk_iface_free(t->functions);
    free(t);
}

static const pdk_lease_ops table_ops = {
    .type = "table",
    .take = table_take,
    .claim = table_claim,
    .claim_for_destroy = table_claim_for_destroy,
    .renew = table_renew,
    .release = table_release,
    .owner_of = table_owner_of,
    .close = table_close,
    .free = table_free,
};

pdk_lease *pdk_lease_table(pdk_iface *functions, const char *runtime_id, double ttl, pdk_error *err)
{
    table *t = calloc(1, sizeof *t);
    if (t == NULL) {
        pdk_iface_free(functions);
    } else {
        snprintf(t->runtime_id, sizeof t->runtime_id, "%s", runtime_id);
        t->ttl = ttl;
        t->functions = functions;
    }
    return pdk_lease_new(&table_ops, t, err);
}
