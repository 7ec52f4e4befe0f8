/* explain.c -- what would happen at an identity's next acquire, and why: the policies' answers, and step by step what the core would
 * make of them. Nothing is asked of the engine, and nothing changes.
 *
 * The steps follow acquire.c and candidate.c, which decide; a test compares the two.
 */
#include "core.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct explaining {
    pdk_runtime *rt;
    const pdk_identity *who;
    const char *id;             /* that the policies derive */
    pdk_view requirements;
    pdk_pack *out;              /* the answer, a map under way */
    pdk_mark *m;
    pdk_pack path;              /* its list of steps */
    pdk_mark steps;
} explaining;

typedef struct suspect { /* the sandbox that is looked at: the tracked one, or an invented one */
    pdk_reuse_facts facts;
    pdk_pack info, capability;
    bool tracked, reserved, unclean;
    bool told;              /* the capability was given with the question */
    char id[64];
} suspect;

static const char *const decisions[] = { "reuse", "replace", "refuse", "defer", "probe" };

/* What a policy would answer, or the error that it would raise, under `key`. */
static void put_answer(pdk_pack *out, pdk_mark *m, const char *key, int rc, const pdk_pack *answer, pdk_error *err)
{
    if (rc == 0) {
        pdk_kv_view(out, m, key, pdk_view_of(answer));
        return;
    }
    pdk_put_cstr(out, key);
    m->count++;
    pdk_mark e = pdk_begin_map(out);
    pdk_kv_cstr(out, &e, "error", pdk_error_kind_name(err->kind));
    pdk_kv_cstr(out, &e, "message", err->message);
    pdk_end(out, &e);
    pdk_error_clear(err);
}

/* One step: what is looked at, what it says, and why. */
__attribute__((format(printf, 4, 5))) static void step(explaining *x, const char *what, const char *answer, const char *fmt, ...)
{
    char because[400] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(because, sizeof because, fmt, args);
    va_end(args);
    pdk_mark m = pdk_begin_map(&x->path);
    pdk_kv_cstr(&x->path, &m, "step", what);
    pdk_kv_cstr(&x->path, &m, "answer", answer);
    pdk_kv_cstr(&x->path, &m, "because", because[0] != '\0' ? because : NULL);
    pdk_end(&x->path, &m);
    x->steps.count++;
}

/* "capacity differs, gpu unattested", as ctx.differs would have it. */
static void differences(const suspect *s, char *text, size_t size)
{
    PDK_AUTO_PACK found = PDK_NO_PACK;
    size_t cursor = 0, n = 0;
    pdk_view k, v;
    text[0] = '\0';
    pdk_reuse_differences(s->facts.requirements, pdk_view_get(s->facts.info, "attestation"), s->facts.capability, &found);
    while (pdk_view_next(pdk_view_of(&found), &cursor, &k, &v) && n < size)
        n += (size_t)snprintf(text + n, size - n, "%s%.60s %s", n > 0 ? ", " : "", pdk_view_str(k, NULL), pdk_view_str(v, NULL));
}

/* A probe as the core would make it: from memory if it can; explain itself asks nobody. false = it would be asked of the engine. */
static bool probe(explaining *x, suspect *s)
{
    if (s->told) {
        s->facts.capability_fresh = true;
        step(x, "probe", "as given", "the question says what the deployment can do");
    } else if (s->facts.capability.len == 0 && pdk_probe_peek(x->rt, &s->capability)) {
        step(x, "probe", "from memory", "an answer of the deployment is still good");
    } else {
        step(x, "probe", "the engine is asked", "explain asks no engine: from here on it depends on the answer");
        return false;
    }
    s->facts.capability = pdk_view_of(&s->capability);
    return true;
}

/* Asks reuse.decide as acquire does. false = there is no verdict: an error, or a probe that only the engine can answer. */
static bool decide(explaining *x, suspect *s, pdk_verdict *v)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    PDK_AUTO_PACK none = PDK_NO_PACK;
    for (int probes = 0; probes <= 2; probes++) {
        char text[300];
        if (pdk_ask_reuse(x->rt, &s->facts, v, &err) < 0) {
            step(x, "policy", pdk_error_kind_name(err.kind), "%s", err.message);
            put_answer(x->out, x->m, "decision", -1, &none, &err);
            return false;
        }
        differences(s, text, sizeof text);
        step(x, "policy", decisions[v->decision], "%s%s%s%s%s", v->code, v->code[0] != '\0' && v->message[0] != '\0' ? ": " : "", v->message,
             text[0] == '\0' ? "" : v->code[0] != '\0' || v->message[0] != '\0' ? "; compared: " : "compared: ", text);
        if (v->decision != PDK_PROBE)
            return true;
        if (!probe(x, s))
            return true;
    }
    step(x, "policy", "policy_error", "reuse.decide asks for a third probe in one decision");
    return true;
}

/* What the core makes of the verdict. */
static void conclude(explaining *x, const suspect *s, const pdk_verdict *v)
{
    const char *deferred = "replacement_deferred";
    bool created = strcmp(s->facts.source, "created") == 0;
    switch (v->decision) {
    case PDK_REUSE:
        step(x, "then", "handed out", "%s", strcmp(s->facts.source, "active") == 0 ? "it is active"
             : "ownership is published and its guest fenced first; a discovered one is judged once more after that");
        break;
    case PDK_REPLACE:
        if (created)
            step(x, "then", deferred, "incompatible: what was just created is taken down again, and no other is tried");
        else if (s->facts.holders > 0)
            step(x, "then", deferred, "incompatible: %d hold it, and it lives on", s->facts.holders);
        else
            step(x, "then", "torn down", "under both fences; then the acquire goes on, and creates another one");
        break;
    case PDK_REFUSE:
        step(x, "then", "unverified", "%s: the acquire fails, %s", v->code[0] != '\0' ? v->code : "refused",
             created ? "and what was just created is taken down again" : "and the sandbox lives on");
        break;
    case PDK_DEFER:
        step(x, "then", deferred, "%s: the acquire fails, and may be tried again", v->code[0] != '\0' ? v->code : "incompatible");
        break;
    case PDK_PROBE:
        break;
    }
}

/* What comes before the policy is asked. false = that is all there is to say. */
static bool before_policy(explaining *x, const suspect *s)
{
    const char *source = s->facts.source;
    if (s->reserved) {
        step(x, source, "being_destroyed", "a teardown of it is under way");
        return false;
    }
    if (strcmp(s->id, x->id) != 0) {
        if (s->facts.holders > 0)
            step(x, source, "replacement_deferred", "identity_outdated: the policy now expects the id %s, and %d hold %s", x->id,
                 s->facts.holders, s->id);
        else
            step(x, source, "torn down", "identity_outdated: the policy now expects the id %s; then the acquire goes on", x->id);
        return false;
    }
    if (s->unclean) {
        step(x, source, s->facts.holders > 0 ? "replacement_deferred" : "torn down",
             "it is quarantined or a stop of it failed%s", s->facts.holders > 0 ? ", and others hold it" : "; then the acquire goes on");
        return false;
    }
    step(x, source, "looked at", "held by %d, idle for %.0f s%s", s->facts.holders, s->facts.idle_seconds,
         s->tracked && strcmp(source, "active") != 0 ? "; if its engine says that it is dead, it is replaced" : "");
    return true;
}

static void explain_reuse(explaining *x, suspect *s)
{
    pdk_verdict v;
    if (!before_policy(x, s) || !decide(x, s, &v))
        return;
    pdk_kv_cstr(x->out, x->m, "decision", decisions[v.decision]);
    pdk_kv_cstr(x->out, x->m, "code", v.code[0] != '\0' ? v.code : NULL);
    pdk_kv_cstr(x->out, x->m, "message", v.message[0] != '\0' ? v.message : NULL);
    conclude(x, s, &v);
}

/* The identity's sandbox here: the active one, also under another id; else what is tracked under the id. 1, 0, -1 = no memory. */
static int find_tracked(explaining *x, suspect *s)
{
    pdk_runtime *rt = x->rt;
    PDK_GUARD(rt->pool.registry);
    pdk_entry *e = pdk_pool_by_identity(&rt->pool, x->who);
    if (e == NULL)
        e = pdk_pool_find(&rt->pool, x->id);
    if (e == NULL || e->state == PDK_ABSENT)
        return 0;
    pdk_ns since = e->state == PDK_WARM ? e->parked_at : e->last_used;
    s->tracked = true;
    s->reserved = e->reserved != 0;
    s->unclean = e->retry || e->state == PDK_KEPT || pdk_entry_dirty(e);
    s->facts.source = pdk_state_name(e->state);
    s->facts.holders = e->holder_count;
    s->facts.idle_seconds = pdk_to_seconds(pdk_clock_now(rt->clock) - since);
    snprintf(s->id, sizeof s->id, "%s", e->id);
    return pdk_pack_copy(&s->info, e->info) ? 1 : -1;
}

/* The sandbox that the question describes. */
static int invent(explaining *x, pdk_view given, suspect *s, pdk_error *err)
{
    static const char *const sources[] = { "active", "warm", "discovered", "created" };
    const char *source = pdk_view_is_nil(pdk_view_get(given, "source")) ? "warm" : pdk_info_str(given, "source");
    int64_t holders = 0;
    s->facts.source = NULL;
    for (size_t i = 0; source != NULL && i < sizeof sources / sizeof *sources; i++)
        if (strcmp(source, sources[i]) == 0)
            s->facts.source = sources[i];
    if (s->facts.source == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "candidate.source must be active, warm, discovered or created");
    if (!pdk_view_is_nil(pdk_view_get(given, "holders")) &&
        (!pdk_view_int(pdk_view_get(given, "holders"), &holders) || holders < 0 || holders > 1000000))
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "candidate.holders must be a whole number, 0 or more");
    s->facts.holders = (int)holders;
    pdk_view_num(pdk_view_get(given, "idle_seconds"), &s->facts.idle_seconds);
    snprintf(s->id, sizeof s->id, "%s", x->id);
    pdk_mark m = pdk_begin_map(&s->info);
    pdk_kv_cstr(&s->info, &m, "sandbox_id", x->id);
    pdk_kv_view(&s->info, &m, "attestation", pdk_view_get(given, "attestation"));
    pdk_end(&s->info, &m);
    pdk_view capability = pdk_view_get(given, "capability");
    s->told = !pdk_view_is_nil(capability);
    if (s->info.failed || (s->told && !pdk_pack_copy(&s->capability, capability)))
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer");
    return 1;
}

/* Nothing tracked: the engine's turn. */
static void explain_absence(explaining *x)
{
    bool asks = pdk_view_bool(pdk_view_get(x->requirements, "probe"), false);
    pdk_kv_cstr(x->out, x->m, "now", "nothing is tracked under this id: it would be discovered or created");
    step(x, "active, warm", "nothing", "this runtime tracks nothing under the id %s", x->id);
    step(x, "discovered", "the engine is asked", "what it finds is judged by the policy, before and after ownership is published");
    if (asks)
        step(x, "probe", "before a create", "the requirements depend on what the deployment can do; unknown is unverified (capability)");
    step(x, "created", "if nothing is found", "what is made is judged too; replace is then a failure of the acquire");
}

static int explain_path(explaining *x, pdk_view candidate, pdk_error *err)
{
    suspect s = { .facts = { .expected_id = x->id, .requirements = x->requirements, .who = x->who } };
    x->steps = pdk_begin_list(&x->path);
    int found = pdk_view_tag(candidate) == '{' ? invent(x, candidate, &s, err) : find_tracked(x, &s);
    s.facts.info = pdk_view_of(&s.info);
    if (found > 0)
        explain_reuse(x, &s);
    else if (found == 0)
        explain_absence(x);
    pdk_pack_free(&s.info);
    pdk_pack_free(&s.capability);
    pdk_end(&x->path, &x->steps);
    if (found < 0)
        return err->kind != PDK_OK ? -1 : pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer");
    pdk_kv_view(x->out, x->m, "path", pdk_view_of(&x->path));
    return 0;
}

/* What a policy answered, but for the values of the environment: they may be secrets, and this is for people and logs. */
static int hide_environment(const pdk_pack *requirements, pdk_pack *out)
{
    size_t cursor = 0;
    pdk_view k, v, name, value;
    pdk_mark m = pdk_begin_map(out);
    while (pdk_view_next(pdk_view_of(requirements), &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        if (key == NULL)
            continue;
        if (strcmp(key, "env") != 0 || pdk_view_tag(v) != '{') {
            pdk_kv_view(out, &m, key, v);
            continue;
        }
        pdk_put_cstr(out, key);
        m.count++;
        pdk_mark env = pdk_begin_map(out);
        for (size_t at = 0; pdk_view_next(v, &at, &name, &value);)
            pdk_kv_cstr(out, &env, pdk_view_str(name, NULL), "(hidden)");
        pdk_end(out, &env);
    }
    pdk_end(out, &m);
    return out->failed ? -1 : 0;
}

/* What follows from an id: mounts, the path, and with `trial` the other functions. */
static int explain_id(explaining *x, pdk_view candidate, bool trial, pdk_error *err)
{
    PDK_AUTO_PACK ctx = PDK_NO_PACK, mounts = PDK_NO_PACK;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    pdk_mark c = pdk_begin_map(&ctx);
    pdk_kv_cstr(x->out, x->m, "id", x->id);
    pdk_put_who(&ctx, &c, x->who);
    pdk_kv_cstr(&ctx, &c, "sandbox_id", x->id);
    pdk_kv_view(&ctx, &c, "requirements", x->requirements);
    pdk_end(&ctx, &c);
    int rc = pdk_policy_compose(x->rt->policies, pdk_view_of(&ctx), &mounts, &why);
    put_answer(x->out, x->m, "mounts", rc, &mounts, &why);
    if (explain_path(x, candidate, err) < 0)
        return -1;
    if (trial && pdk_policies_try(x->rt, x->id, x->who, x->requirements, &why) < 0)
        put_answer(x->out, x->m, "trial", -1, &mounts, &why);
    return 0;
}

int pdk_runtime_explain(pdk_runtime *rt, const pdk_explain_spec *spec, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_ERROR own = PDK_NO_ERROR, why = PDK_NO_ERROR;
    PDK_LOOK(rt, err, -1);
    PDK_AUTO_PACK requirements = PDK_NO_PACK, sets = PDK_NO_PACK, shown = PDK_NO_PACK, none = PDK_NO_PACK;
    char id[64] = "";
    pdk_mark m = pdk_begin_map(out);
    pdk_put_who(out, &m, &spec->who);
    int rc = pdk_policy_resolve(rt->policies, &spec->who, spec->requirements, pdk_view_of(&rt->policy_base), &requirements, &why);
    if (rc == 0 && hide_environment(&requirements, &shown) < 0)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer");
    put_answer(out, &m, "requirements", rc, &shown, &why);
    if (rc == 0 && pdk_policy_derive(rt->policies, &spec->who, pdk_view_of(&requirements), id, &why) == 0) {
        explaining x = { .rt = rt, .who = &spec->who, .id = id, .requirements = pdk_view_of(&requirements), .out = out, .m = &m };
        rc = explain_id(&x, spec->candidate, spec->trial, &own);
        pdk_pack_free(&x.path);
        if (rc < 0) {
            pdk_error_move(err, &own);
            return -1;
        }
    } else if (rc == 0) {
        put_answer(out, &m, "id", -1, &none, &why);
    }
    if (pdk_policies_describe(rt->policies, &sets, &why) == 0)
        pdk_kv_view(out, &m, "policies", pdk_view_of(&sets));
    pdk_end(out, &m);
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the answer") : 0;
}
