/* bind_managed.c -- skills, network decisions and holders of a runtime in Lua: what the default instance's interface has beside
 * sandboxes (rows R and S). */
#include "bind.h"

#include <string.h>

typedef struct syncing {
    const char *id;
    pdk_identity who;
    pdk_view projection;
} syncing;

static void sync_job(void *arg)
{
    pdk_job *job = arg;
    syncing *s = job->arg;
    bool scoped = s->who.user != NULL || s->who.thread != NULL;
    job->rc = pdk_runtime_sync_skills(job->grip->rt, s->id, scoped ? &s->who : NULL, s->projection, &job->err);
}

int pdk_rt_sync_skills(lua_State *L)
{
    static const char *const keys[] = { "sandbox_id", "user", "thread", "projection", NULL };
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    if (!pdk_check_keys(L, 2, "skills", keys))
        return pdk_bad_argument(L, "sandbox_id", "is missing");
    syncing s = { .id = pdk_field_name(L, 2, "sandbox_id", PDK_MAX_HOLDER) };
    if (s.id == NULL)
        return pdk_bad_argument(L, "sandbox_id", "is missing");
    s.who = pdk_arg_identity(L, 2);
    pdk_scratch *scratch = pdk_scratch_new(L);
    s.projection = pdk_field_plain(L, 2, "projection", &scratch->pack);
    pdk_job job = { .grip = g, .err = PDK_NO_ERROR, .arg = &s };
    pdk_run_blocking(L, &job, sync_job);
    return 0;
}

typedef struct deciding { /* about the network of one sandbox */
    const char *id;
    const char *request_id; /* NULL = all that wait */
    pdk_network_decision decision;
    pdk_pack *out;
} deciding;

static void events_job(void *arg)
{
    pdk_job *job = arg;
    deciding *d = job->arg;
    job->rc = pdk_runtime_network_events(job->grip->rt, d->id, d->out, &job->err);
}

int pdk_rt_network_events(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) };
    pdk_scratch *scratch = pdk_scratch_new(L);
    d.out = &scratch->pack;
    pdk_job job = { .grip = g, .err = PDK_NO_ERROR, .arg = &d };
    pdk_run_blocking(L, &job, events_job);
    return pdk_push_answer(L, scratch);
}

static void decide_job(void *arg)
{
    pdk_job *job = arg;
    deciding *d = job->arg;
    pdk_runtime *rt = job->grip->rt;
    job->rc = d->request_id == NULL ? pdk_runtime_deny_pending(rt, d->id, &job->err)
                                    : pdk_runtime_decide(rt, d->id, d->request_id, d->decision, &job->err);
}

static int run_decision(lua_State *L, pdk_grip *g, deciding *d)
{
    pdk_job job = { .grip = g, .err = PDK_NO_ERROR, .arg = d };
    pdk_run_blocking(L, &job, decide_job);
    lua_pushboolean(L, job.rc == 1);
    return 1;
}

int pdk_rt_deny_pending(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) };
    return run_decision(L, g, &d);
}

int pdk_rt_decide(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 4);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL),
                   .request_id = pdk_arg_name(L, 3, "request_id", PDK_REQUEST_ID_SIZE - 1, NULL) };
    int decision = pdk_network_decision_of(pdk_arg_name(L, 4, "decision", PDK_MAX_HOLDER, NULL));
    if (decision < 0)
        return pdk_bad_argument(L, "decision", "must be deny, allow_once or allow");
    d.decision = (pdk_network_decision)decision;
    return run_decision(L, g, &d);
}

int pdk_rt_discard_holders(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    pdk_job job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_discard_holders(g->rt, &job.err);
    pdk_check_rc(L, &job);
    return 0;
}
