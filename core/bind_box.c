/* bind_box.c -- a box in Lua: commands, files, and giving it back (DESIGN, section 7). */
#include "bind_op.h"

#include <stdlib.h>
#include <string.h>

pdk_lbox *pdk_lbox_push(lua_State *L, pdk_grip *g, int rt_index)
{
    pdk_lbox **at = lua_newuserdatauv(L, sizeof *at, 1);
    *at = NULL;
    luaL_setmetatable(L, PDK_BOX_TYPE);
    lua_pushvalue(L, rt_index);
    lua_setiuservalue(L, -2, 1);
    *at = calloc(1, sizeof **at);
    if (*at == NULL)
        luaL_error(L, "not enough memory");
    (*at)->grip = pdk_grip_ref(g);
    return *at;
}

/* ---- commands ------------------------------------------------------------------------------------------- */

typedef struct running {
    pdk_box *box;
    pdk_exec_spec spec;
    pdk_result *result;
} running;

static void exec_job(void *arg)
{
    pdk_ljob *job = arg;
    running *r = job->arg;
    job->rc = pdk_box_exec(r->box, &r->spec, r->result, &job->err);
}

/* The environment in field env: names and strings without NUL. The values are never shown.  stack: +1, raises */
static pdk_view read_env(lua_State *L, int index, pdk_scratch *scratch)
{
    pdk_view env = pdk_field_plain(L, index, "env", &scratch->pack), key, value;
    size_t cursor = 0, len, value_len;
    if (pdk_view_count(env) == 0)
        return PDK_NO_VIEW;
    while (pdk_view_next(env, &cursor, &key, &value)) {
        const char *name = pdk_view_str(key, &len);
        if (name == NULL || !pdk_env_name_ok(name, len))
            pdk_bad_argument(L, "env", "has the key %.80s, which is no variable name: letters, digits and _",
                             name != NULL ? name : "(no string)");
        const char *text = pdk_view_str(value, &value_len);
        if (text == NULL || memchr(text, '\0', value_len) != NULL)
            pdk_bad_argument(L, "env", "must have a string without NUL bytes as the value of %s", name);
    }
    return env;
}

static void set_text(lua_State *L, const char *key, const char *s, size_t len)
{
    lua_pushlstring(L, s != NULL ? s : "", s != NULL ? len : 0);
    lua_setfield(L, -2, key);
}

static void set_bool(lua_State *L, const char *key, bool b)
{
    lua_pushboolean(L, b);
    lua_setfield(L, -2, key);
}

void pdk_push_result(lua_State *L, const pdk_result *r)
{
    lua_createtable(L, 0, 10);
    set_text(L, "stdout", r->out, r->out_len);
    set_text(L, "stderr", r->err, r->err_len);
    lua_pushinteger(L, r->exit_code);
    lua_setfield(L, -2, "exit_code");
    if (r->signal != 0) {
        lua_pushinteger(L, r->signal);
        lua_setfield(L, -2, "signal");
    }
    set_bool(L, "truncated", r->truncated);
    set_bool(L, "session_reset", r->session_reset);
    lua_pushnumber(L, r->duration);
    lua_setfield(L, -2, "duration");
    set_text(L, "outcome", pdk_outcome_name(r->outcome), strlen(pdk_outcome_name(r->outcome)));
    if (r->reason[0] != '\0')
        set_text(L, "reason", r->reason, strlen(r->reason));
    luaL_setmetatable(L, PDK_RESULT_TYPE);
}

/* The command at index 2 and the options at 3; on_output, if there is one, at index 4, and its index in *output.
 * stack: raises */
static void read_command(lua_State *L, pdk_exec_spec *spec, int *output)
{
    static const char *const keys[] = { "timeout", "env", "cwd", "stdin", "scope", "session", "on_output", NULL };
    luaL_checkstack(L, 30, "exec");
    spec->command = pdk_arg_name(L, 2, "command", PDK_PACK_MAX, &spec->command_len);
    *output = 0;
    if (!pdk_check_keys(L, 3, "options", keys))
        return;
    if (lua_getfield(L, 3, "on_output") != LUA_TNIL) {
        if (!lua_isfunction(L, -1))
            pdk_bad_argument(L, "on_output", "must be a function that takes a stream's name and bytes, not a %s", luaL_typename(L, -1));
        *output = lua_gettop(L);
    }
    spec->timeout = pdk_field_seconds(L, 3, "timeout");
    spec->cwd = pdk_field_name(L, 3, "cwd", PDK_MAX_PATH);
    spec->stdin_data = pdk_field_bytes(L, 3, "stdin", PDK_PACK_MAX, &spec->stdin_len);
    spec->scope = pdk_field_name(L, 3, "scope", PDK_MAX_HOLDER);
    spec->session = pdk_field_name(L, 3, "session", PDK_MAX_HOLDER);
    spec->env = read_env(L, 3, pdk_scratch_new(L));
}

static int submit_exec(lua_State *L, pdk_lbox *b, pdk_call_form form, int callback, int output, const pdk_exec_spec *spec)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_lop *lop = pdk_lop_push(L, b->grip, PDK_LOP_EXEC, form, callback, output);
    pdk_op_how how = pdk_lop_how(lop, 0);
    pdk_op *op = pdk_async_exec(b->box, spec, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* box:exec(command, options) -> result.                                       stack: +1, raises */
static int box_exec(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    lua_settop(L, 3);
    running r = { .box = b->box };
    int output;
    read_command(L, &r.spec, &output);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK)
        return submit_exec(L, b, form, 0, output, &r.spec);
    pdk_lsink *sink = output != 0 ? pdk_lsink_push(L, b->grip, output) : NULL;
    r.spec.output = sink != NULL ? &sink->sink : NULL;
    pdk_scratch *scratch = pdk_scratch_new(L);
    r.result = &scratch->result;
    pdk_ljob job = { .grip = b->grip, .err = PDK_NO_ERROR, .arg = &r };
    pdk_run_blocking(L, &job, exec_job);
    if (sink != NULL)
        pdk_lsink_end(L, sink, r.result);
    pdk_push_result(L, r.result);
    pdk_scratch_clear(scratch);
    return 1;
}

/* box:exec_async(command [, options] [, callback]) -> operation.               stack: +1, raises */
static int box_exec_async(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    int callback = pdk_take_callback(L, 2, 2), output;
    pdk_exec_spec spec = { 0 };
    read_command(L, &spec, &output);
    return submit_exec(L, b, PDK_FORM_ASYNC, callback, output, &spec);
}

static const char *text_field(lua_State *L, const char *key, size_t *len)
{
    lua_pushstring(L, key);
    lua_rawget(L, 1);
    const char *s = lua_type(L, -1) == LUA_TSTRING ? lua_tolstring(L, -1, len) : NULL;
    if (s == NULL)
        *len = 0;
    return s;
}

static int int_field(lua_State *L, const char *key)
{
    lua_pushstring(L, key);
    lua_rawget(L, 1);
    return (int)lua_tointeger(L, -1);
}

/* tostring(result): the text that a model is shown (row J3). Made when asked for, since most callers never do, and it
 * holds both outputs again.                                                   stack: +1, raises */
static int result_tostring(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    pdk_scratch *scratch = pdk_scratch_new(L);
    pdk_result r = { .outcome = PDK_UNKNOWN };
    size_t len;
    r.out = (char *)text_field(L, "stdout", &r.out_len);
    r.err = (char *)text_field(L, "stderr", &r.err_len);
    const char *outcome = text_field(L, "outcome", &len);
    for (int o = PDK_COMPLETED; outcome != NULL && o <= PDK_UNKNOWN; o++)
        if (strcmp(outcome, pdk_outcome_name((pdk_outcome)o)) == 0)
            r.outcome = (pdk_outcome)o;
    const char *reason = text_field(L, "reason", &len);
    if (reason != NULL && len < sizeof r.reason)
        memcpy(r.reason, reason, len + 1);
    r.exit_code = int_field(L, "exit_code");
    r.signal = int_field(L, "signal");
    lua_getfield(L, 1, "truncated");
    r.truncated = lua_toboolean(L, -1);
    lua_getfield(L, 1, "session_reset");
    r.session_reset = lua_toboolean(L, -1);
    scratch->bytes = pdk_result_text(&r, &len);
    if (scratch->bytes == NULL)
        return luaL_error(L, "not enough memory");
    lua_pushlstring(L, scratch->bytes, len);
    pdk_scratch_clear(scratch);
    return 1;
}

/* ---- files ---------------------------------------------------------------------------------------------- */

typedef struct filing {
    pdk_box *box;
    const char *path;
    size_t path_len;
    const char *data;   /* write */
    char **out;         /* read */
    size_t len;
    bool no_overwrite;
    pdk_pack *list;
} filing;

static void write_job(void *arg)
{
    pdk_ljob *job = arg;
    filing *f = job->arg;
    job->rc = pdk_box_write(f->box, f->path, f->path_len, f->data, f->len, f->no_overwrite, &job->err);
}

static void read_job(void *arg)
{
    pdk_ljob *job = arg;
    filing *f = job->arg;
    job->rc = pdk_box_read(f->box, f->path, f->path_len, f->out, &f->len, &job->err);
}

static void list_job(void *arg)
{
    pdk_ljob *job = arg;
    filing *f = job->arg;
    job->rc = pdk_box_list(f->box, f->path, f->path_len, f->list, &job->err);
}

/* Path at index 2.  stack: raises */
static filing read_path(lua_State *L, pdk_lbox *b)
{
    filing f = { .box = b->box };
    f.path = pdk_arg_name(L, 2, "path", PDK_MAX_PATH, &f.path_len);
    return f;
}

/* Bytes at index 3, options at 4.  stack: raises */
static double read_writing(lua_State *L, filing *f)
{
    static const char *const keys[] = { "no_overwrite", "timeout", NULL };
    if (lua_type(L, 3) != LUA_TSTRING)
        pdk_bad_argument(L, "bytes", "must be a string, not a %s", luaL_typename(L, 3));
    f->data = lua_tolstring(L, 3, &f->len);
    if (!pdk_check_keys(L, 4, "options", keys))
        return 0;
    f->no_overwrite = pdk_field_bool(L, 4, "no_overwrite", false);
    return pdk_field_seconds(L, 4, "timeout");
}

static int submit_write(lua_State *L, pdk_lbox *b, pdk_call_form form, int callback, const filing *f, double timeout)
{
    pdk_error err = PDK_NO_ERROR;
    pdk_lop *lop = pdk_lop_push(L, b->grip, PDK_LOP_NOTHING, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, timeout);
    pdk_op *op = pdk_async_write(b->box, f->path, f->path_len, f->data, f->len, f->no_overwrite, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* box:write(path, bytes [, { no_overwrite = true, timeout = }]).              stack: +0, raises */
static int box_write(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    lua_settop(L, 4);
    filing f = read_path(L, b);
    double timeout = read_writing(L, &f);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || timeout > 0)
        return submit_write(L, b, form, 0, &f, timeout);
    pdk_ljob job = { .grip = b->grip, .err = PDK_NO_ERROR, .arg = &f };
    pdk_run_blocking(L, &job, write_job);
    return 0;
}

/* box:write_async(path, bytes [, options] [, callback]) -> operation.          stack: +1, raises */
static int box_write_async(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    int callback = pdk_take_callback(L, 2, 3);
    filing f = read_path(L, b);
    double timeout = read_writing(L, &f);
    return submit_write(L, b, PDK_FORM_ASYNC, callback, &f, timeout);
}

typedef pdk_op *(*submit_path)(pdk_box *box, const char *path, size_t path_len, const pdk_op_how *how, pdk_error *err);

/* A read or a list: path at index 2, options at 3.  stack: raises */
static int submit_filing(lua_State *L, pdk_lbox *b, pdk_call_form form, int callback, pdk_lop_type type, submit_path fn)
{
    pdk_error err = PDK_NO_ERROR;
    filing f = read_path(L, b);
    double timeout = pdk_arg_timeout(L, 3);
    pdk_lop *lop = pdk_lop_push(L, b->grip, type, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, timeout);
    pdk_op *op = fn(b->box, f.path, f.path_len, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* box:read(path [, { timeout = }]) -> bytes.                                  stack: +1, raises */
static int box_read(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    lua_settop(L, 3);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || !lua_isnil(L, 3))
        return submit_filing(L, b, form, 0, PDK_LOP_READ, pdk_async_read);
    filing f = read_path(L, b);
    pdk_scratch *scratch = pdk_scratch_new(L);
    f.out = &scratch->bytes;
    pdk_ljob job = { .grip = b->grip, .err = PDK_NO_ERROR, .arg = &f };
    pdk_run_blocking(L, &job, read_job);
    lua_pushlstring(L, scratch->bytes, f.len);
    pdk_scratch_clear(scratch);
    return 1;
}

/* box:read_async(path [, { timeout = }] [, callback]) -> operation.            stack: +1, raises */
static int box_read_async(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    int callback = pdk_take_callback(L, 2, 2);
    return submit_filing(L, b, PDK_FORM_ASYNC, callback, PDK_LOP_READ, pdk_async_read);
}

/* box:list(path [, { timeout = }]) -> list of { name, path, is_directory, size, modified_time, mode }.   stack: +1, raises */
static int box_list(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    lua_settop(L, 3);
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || !lua_isnil(L, 3))
        return submit_filing(L, b, form, 0, PDK_LOP_LIST, pdk_async_list);
    filing f = read_path(L, b);
    pdk_scratch *scratch = pdk_scratch_new(L);
    f.list = &scratch->pack;
    pdk_ljob job = { .grip = b->grip, .err = PDK_NO_ERROR, .arg = &f };
    pdk_run_blocking(L, &job, list_job);
    return pdk_push_answer(L, scratch);
}

/* box:list_async(path [, { timeout = }] [, callback]) -> operation.            stack: +1, raises */
static int box_list_async(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    int callback = pdk_take_callback(L, 2, 2);
    return submit_filing(L, b, PDK_FORM_ASYNC, callback, PDK_LOP_LIST, pdk_async_list);
}

/* ---- giving it back ------------------------------------------------------------------------------------- */

static void release_job(void *arg)
{
    pdk_ljob *job = arg;
    job->rc = pdk_release(job->arg, &job->err);
}

static int submit_release(lua_State *L, pdk_lbox *b, pdk_call_form form, int callback)
{
    pdk_error err = PDK_NO_ERROR;
    double timeout = pdk_arg_timeout(L, 2);
    pdk_lop *lop = pdk_lop_push(L, b->grip, PDK_LOP_RELEASE, form, callback, 0);
    pdk_op_how how = pdk_lop_how(lop, timeout);
    pdk_op *op = pdk_async_release(b->box, &how, &err);
    return pdk_lop_end(L, lop, form, op, &err);
}

/* box:release([{ timeout = }]); twice does nothing more.                      stack: +0, raises */
static int box_release(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    lua_settop(L, 2);
    if (b->released)
        return 0;
    pdk_call_form form = pdk_form_here(L, false);
    if (form != PDK_FORM_BLOCK || !lua_isnil(L, 2))
        return submit_release(L, b, form, 0);
    pdk_ljob job = { .grip = b->grip, .err = PDK_NO_ERROR, .arg = b->box };
    pdk_run_blocking(L, &job, release_job);
    b->released = true;
    return 0;
}

/* box:release_async([{ timeout = }] [, callback]) -> operation.                stack: +1, raises */
static int box_release_async(lua_State *L)
{
    pdk_lbox *b = pdk_check_box(L, 1);
    int callback = pdk_take_callback(L, 2, 1);
    return submit_release(L, b, PDK_FORM_ASYNC, callback);
}

/* What a release by __close has come to: one whose runtime is gone was released with it.  stack: raises */
static int close_ends(lua_State *L, int status, lua_KContext ctx)
{
    (void)ctx;
    if (status == LUA_OK || status == LUA_YIELD)
        return 0;
    if (lua_istable(L, -1)) {
        lua_getfield(L, -1, "kind");
        const char *kind = lua_tostring(L, -1);
        if (kind != NULL && strcmp(kind, "closed") == 0)
            return 0;
        lua_pop(L, 1);
    }
    return lua_error(L);
}

/* __close: as release, but a runtime that is gone has released it already. Where nothing may wait it is handed to who frees boxes
 * behind finalizers: inside a callback, and when a task ends in a way that cannot yield (its coroutine is closed from outside).
 * stack: +0, raises */
static int box_close(lua_State *L)
{
    pdk_lbox **at = luaL_checkudata(L, 1, PDK_BOX_TYPE);
    lua_settop(L, 1);
    if (*at == NULL || (*at)->released || pdk_grip_forked((*at)->grip))
        return 0;
    if (pdk_inside_callback() || (pdk_task_is(L) && !lua_isyieldable(L))) {
        pdk_lbox *b = *at;
        *at = NULL;
        pdk_lbox_forget(b);
        return 0;
    }
    lua_pushcfunction(L, box_release);
    lua_pushvalue(L, 1);
    return close_ends(L, lua_pcallk(L, 1, 0, 0, 0, close_ends), 0);
}

static int box_gc(lua_State *L)
{
    pdk_lbox **at = luaL_checkudata(L, 1, PDK_BOX_TYPE);
    pdk_lbox *b = *at;
    *at = NULL;
    if (b != NULL)
        pdk_lbox_forget(b);
    return 0;
}

/* ---- facts ---------------------------------------------------------------------------------------------- */

static int box_tostring(lua_State *L)
{
    pdk_lbox **at = luaL_checkudata(L, 1, PDK_BOX_TYPE);
    if (*at == NULL || (*at)->box == NULL || pdk_grip_forked((*at)->grip))
        lua_pushliteral(L, "paddock box (none)");
    else
        lua_pushfstring(L, "paddock box %s (%s)", pdk_box_id((*at)->box),
                        (*at)->released ? "released" : pdk_box_source((*at)->box));
    return 1;
}

/* Fields that are not methods. [1] box, [2] key; upvalue 1: the methods.      stack: +1, raises */
static int box_index(lua_State *L)
{
    lua_pushvalue(L, 2);
    if (lua_rawget(L, lua_upvalueindex(1)) != LUA_TNIL)
        return 1;
    const char *key = lua_type(L, 2) == LUA_TSTRING ? lua_tostring(L, 2) : "";
    pdk_lbox *b = pdk_check_box(L, 1);
    if (strcmp(key, "id") == 0)
        lua_pushstring(L, pdk_box_id(b->box));
    else if (strcmp(key, "generation") == 0)
        lua_pushstring(L, pdk_box_generation(b->box));
    else if (strcmp(key, "token") == 0)
        lua_pushinteger(L, pdk_box_token(b->box));
    else if (strcmp(key, "holder") == 0)
        lua_pushstring(L, pdk_box_holder(b->box));
    else if (strcmp(key, "source") == 0)
        lua_pushstring(L, pdk_box_source(b->box));
    else
        lua_pushnil(L);
    return 1;
}

void pdk_bind_box(lua_State *L)
{
    static const luaL_Reg methods[] = {
        { "exec", box_exec },
        { "write", box_write },
        { "read", box_read },
        { "list", box_list },
        { "release", box_release },
        { "exec_async", box_exec_async },
        { "write_async", box_write_async },
        { "read_async", box_read_async },
        { "list_async", box_list_async },
        { "release_async", box_release_async },
        { NULL, NULL },
    };
    static const luaL_Reg meta[] = {
        { "__gc", box_gc }, { "__close", box_close }, { "__tostring", box_tostring }, { NULL, NULL },
    };
    luaL_newmetatable(L, PDK_BOX_TYPE);
    luaL_setfuncs(L, meta, 0);
    luaL_newlib(L, methods);
    lua_pushcclosure(L, box_index, 1);
    lua_setfield(L, -2, "__index");
    lua_pushliteral(L, PDK_BOX_TYPE);
    lua_setfield(L, -2, "__metatable");
    lua_pop(L, 1);
    luaL_newmetatable(L, PDK_RESULT_TYPE);
    lua_pushcfunction(L, result_tostring);
    lua_setfield(L, -2, "__tostring");
    lua_pop(L, 1);
}
