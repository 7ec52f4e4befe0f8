/* bind_managed.c -- skills, network decisions and holders of a runtime in Lua: what the default instance's interface has beside
 * sandboxes (rows R and S). */
#include "bind_op.h"

#include <string.h>

typedef struct syncing {
    const char *id;
    pdk_identity who;
    pdk_view projection;
} syncing;

static void sync_job(void *arg)
{
    pdk_ljob *job = arg;
    syncing *s = job->arg;
    bool scoped = s->who.user != NULL || s->who.thread != NULL;
    job->rc = pdk_runtime_sync_skills(job->grip->rt, s->id, scoped ? &s->who : NULL, s->projection, &job->err);
}

/* Arguments at index 2.  stack: raises */
static syncing read_skills(lua_State *L)
{
    static const char *const keys[] = { "sandbox_id", "user", "thread", "projection", NULL };
    syncing s = { 0 };
    luaL_checkstack(L, 10, "skills");
    if (pdk_check_keys(L, 2, "skills", keys))
        s.id = pdk_field_name(L, 2, "sandbox_id", PDK_MAX_HOLDER);
    if (s.id == NULL)
        pdk_bad_argument(L, "sandbox_id", "is missing");
    s.who = pdk_arg_identity(L, 2);
    pdk_scratch *scratch = pdk_scratch_new(L);
    s.projection = pdk_field_plain(L, 2, "projection", &scratch->pack);
    return s;
}

/* args: user, thread, projection. */
static int sync_work(pdk_lop_work *w, pdk_error *err)
{
    pdk_identity who = { 0 };
    who.user = pdk_view_str(pdk_view_nth(&w->args, 0), &who.user_len);
    who.thread = pdk_view_str(pdk_view_nth(&w->args, 1), &who.thread_len);
    bool scoped = who.user != NULL || who.thread != NULL;
    return pdk_runtime_sync_skills(w->rt, w->id, scoped ? &who : NULL, pdk_view_nth(&w->args, 2), err);
}

/* One that is not given is not an empty one. */
static void put_name(pdk_pack *p, const char *name, size_t len)
{
    if (name != NULL)
        pdk_put_str(p, name, len);
    else
        pdk_put_nil(p);
}

static int submit_sync(lua_State *L, pdk_grip *g, pdk_call_form form, int callback, const syncing *s)
{
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_NOTHING, form, callback, 0);
    pdk_lop_work *w = pdk_lop_work_new(g->rt, sync_work, s->id, NULL);
    if (w != NULL) {
        put_name(&w->args, s->who.user, s->who.user_len);
        put_name(&w->args, s->who.thread, s->who.thread_len);
        pdk_put_view(&w->args, s->projection);
    }
    return pdk_lop_call(L, lop, form, PDK_WORK_EXEC, 0, w);
}

int pdk_rt_sync_skills(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    syncing s = read_skills(L);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK)
        return submit_sync(L, g, form, 0, &s);
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = &s };
    pdk_run_blocking(L, &job, sync_job);
    return 0;
}

int pdk_rt_sync_skills_async(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    int callback = pdk_take_callback(L, 2, 1);
    syncing s = read_skills(L);
    return submit_sync(L, g, PDK_FORM_ASYNC, callback, &s);
}

typedef struct deciding { /* about the network of one sandbox */
    const char *id;
    const char *request_id; /* NULL = all that wait */
    pdk_network_decision decision;
    pdk_pack *out;
} deciding;

static void events_job(void *arg)
{
    pdk_ljob *job = arg;
    deciding *d = job->arg;
    job->rc = pdk_runtime_network_events(job->grip->rt, d->id, d->out, &job->err);
}

static int events_work(pdk_lop_work *w, pdk_error *err)
{
    return pdk_runtime_network_events(w->rt, w->id, &w->out, err);
}

static int submit_events(lua_State *L, pdk_grip *g, pdk_call_form form, int callback)
{
    const char *id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL);
    pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_PACK, form, callback, 0);
    return pdk_lop_call(L, lop, form, PDK_WORK_EXEC, 0, pdk_lop_work_new(g->rt, events_work, id, NULL));
}

int pdk_rt_network_events(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK)
        return submit_events(L, g, form, 0);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) };
    pdk_scratch *scratch = pdk_scratch_new(L);
    d.out = &scratch->pack;
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = &d };
    pdk_run_blocking(L, &job, events_job);
    return pdk_push_answer(L, scratch);
}

int pdk_rt_network_events_async(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    int callback = pdk_take_callback(L, 2, 1);
    return submit_events(L, g, PDK_FORM_ASYNC, callback);
}

static void decide_job(void *arg)
{
    pdk_ljob *job = arg;
    deciding *d = job->arg;
    pdk_runtime *rt = job->grip->rt;
    job->rc = d->request_id == NULL ? pdk_runtime_deny_pending(rt, d->id, &job->err)
                                    : pdk_runtime_decide(rt, d->id, d->request_id, d->decision, &job->err);
}

static int decide_work(pdk_lop_work *w, pdk_error *err)
{
    return w->text == NULL ? pdk_runtime_deny_pending(w->rt, w->id, err)
                           : pdk_runtime_decide(w->rt, w->id, w->text, (pdk_network_decision)w->number, err);
}

static int run_decision(lua_State *L, pdk_grip *g, pdk_call_form form, int callback, deciding *d)
{
    if (form != PDK_FORM_BLOCK) {
        pdk_lop *lop = pdk_lop_push(L, g, PDK_LOP_WHETHER, form, callback, 0);
        pdk_lop_work *w = pdk_lop_work_new(g->rt, decide_work, d->id, d->request_id);
        if (w != NULL)
            w->number = (int)d->decision;
        return pdk_lop_call(L, lop, form, PDK_WORK_EXEC, 0, w);
    }
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR, .arg = d };
    pdk_run_blocking(L, &job, decide_job);
    lua_pushboolean(L, job.rc == 1);
    return 1;
}

int pdk_rt_deny_pending(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 2);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) };
    return run_decision(L, g, pdk_form_here(L, false), 0, &d);
}

int pdk_rt_deny_pending_async(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    int callback = pdk_take_callback(L, 2, 1);
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL) };
    return run_decision(L, g, PDK_FORM_ASYNC, callback, &d);
}

/* id, request_id and decision at indices 2 to 4.  stack: raises */
static deciding read_decision(lua_State *L)
{
    deciding d = { .id = pdk_arg_name(L, 2, "id", PDK_MAX_HOLDER, NULL),
                   .request_id = pdk_arg_name(L, 3, "request_id", PDK_REQUEST_ID_SIZE - 1, NULL) };
    int decision = pdk_network_decision_of(pdk_arg_name(L, 4, "decision", PDK_MAX_HOLDER, NULL));
    if (decision < 0)
        pdk_bad_argument(L, "decision", "must be deny, allow_once or allow");
    d.decision = (pdk_network_decision)decision;
    return d;
}

int pdk_rt_decide(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    lua_settop(L, 4);
    deciding d = read_decision(L);
    return run_decision(L, g, pdk_form_here(L, false), 0, &d);
}

int pdk_rt_decide_async(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    int callback = pdk_take_callback(L, 2, 3);
    deciding d = read_decision(L);
    return run_decision(L, g, PDK_FORM_ASYNC, callback, &d);
}

int pdk_rt_discard_holders(lua_State *L)
{
    pdk_grip *g = pdk_check_runtime(L, 1);
    pdk_ljob job = { .grip = g, .err = PDK_NO_ERROR };
    job.rc = pdk_runtime_discard_holders(g->rt, &job.err);
    pdk_check_rc(L, &job);
    return 0;
}
