/* pods.c -- a provisioner and its Pods, for the real backend (lua/paddock/backend/provisioner.lua) over requests of here.
 *
 * What it answers by a Pod's state is read from the table that the double of the live tests reads too,
 * tests/support/provisioner.answers. A delete is graceful, and one that names a UID is refused when another Pod is there. A request
 * can fail in the ways of wire.c: before it arrives, while it is carried out, as an answer that is lost, or as a 5xx that tells one
 * of these. Commands do not come by here: nothing in a Pod knows tokens, and the client is the one of wire.c. */
#include "sim.h"

#include <lauxlib.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TABLE "tests/support/provisioner.answers"

enum { ABSENT, PENDING, RUNNING, SERVICELESS, TERMINATING, FAILED, STATES };
enum { CREATE, GET, PRESENCE, DELETE, LIST, READY, ROUTES };
static const char *const state_names[STATES] = { "absent", "pending", "running", "serviceless", "terminating", "failed" };
static const char *const said_as[STATES] = { "", "Pending", "Running", "Running", "Terminating", "Failed" };
static const char *const route_names[ROUTES] = { "create", "get", "presence", "delete", "list", "ready" };

static char answers[STATES][READY][16];
static struct {
    char word[16];
    int status;
} statuses[16];

static void bad_table(const char *line)
{
    fprintf(stderr, "sim: %s: cannot be understood: %s\n", TABLE, line);
    exit(2);
}

/* Before the snapshot. */
void pods_read_table(void)
{
    FILE *f = fopen(TABLE, "r");
    char line[200], word[5][16], name[16];
    int status, n = 0, known = 0;
    if (f == NULL)
        bad_table("it is not there (run this in the root of the tree)");
    while (fgets(line, sizeof line, f) != NULL) {
        line[strcspn(line, "#\n")] = '\0';
        if (line[strspn(line, " ")] == '\0')
            continue;
        int s = STATES;
        if (sscanf(line, "state %15s %15s %15s %15s %15s %15s", name, word[0], word[1], word[2], word[3], word[4]) == 6) {
            for (s = 0; s < STATES && strcmp(state_names[s], name) != 0; s++)
                ;
            for (int r = 0; r < READY && s < STATES; r++)
                strcpy(answers[s][r], word[r]);
            known += s < STATES;
        } else if (sscanf(line, "answer %15s %d", name, &status) == 2 && n < 16) {
            strcpy(statuses[n].word, name);
            statuses[n++].status = status;
            s = 0;
        }
        if (s == STATES)
            bad_table(line);
    }
    fclose(f);
    if (known != STATES)
        bad_table("a state is missing");
}

static int status_of(const char *word)
{
    for (int i = 0; i < 16; i++)
        if (strcmp(statuses[i].word, word) == 0)
            return statuses[i].status;
    violation("%s has no status for \"%s\"", TABLE, word);
}

/* ---- Pods ---- */

static int pod_of(int id)
{
    for (int g = W.gen_count - 1; g >= 0; g--)
        if (W.gens[g].present && W.gens[g].id == id)
            return g;
    return -1;
}

static int state_of(int g)
{
    return g < 0 ? ABSENT : W.gens[g].pod;
}

/* A state that ends by itself: the Pod comes up, gets its Service back, is gone. */
pdk_ns pods_next(void)
{
    pdk_ns at = PDK_NEVER;
    for (int g = 0; P.remote && g < W.gen_count; g++)
        if (W.gens[g].present && W.gens[g].turns_at != 0 && W.gens[g].turns_at < at)
            at = W.gens[g].turns_at;
    return at;
}

void pods_pass(void)
{
    for (int g = 0; P.remote && g < W.gen_count; g++) {
        gen *p = &W.gens[g];
        if (!p->present || p->turns_at == 0 || p->turns_at > now)
            continue;
        p->turns_at = 0;
        p->present = p->pod != TERMINATING;
        p->pod = RUNNING;
        TRACE("(the Pod g%d %s)", g, p->present ? "runs" : "is gone");
    }
}

void pods_trouble(int g)
{
    gen *p = &W.gens[g];
    if (!p->present || p->pod != RUNNING)
        return;
    p->pod = chance(1, 3) ? FAILED : chance(1, 2) ? SERVICELESS : TERMINATING;
    p->turns_at = p->pod == FAILED ? 0 : now + (pdk_ns)below(10000) * MS;
    p->self_died |= p->pod != SERVICELESS;
    TRACE("the Pod g%d is %s", g, state_names[p->pod]);
}

void pods_heal(void)
{
    for (int g = 0; g < W.gen_count; g++)
        if (W.gens[g].pod == SERVICELESS)
            W.gens[g].pod = RUNNING;
}

bool pod_ends(int g)
{
    return P.remote && W.gens[g].pod == TERMINATING;
}

static int make_pod(const op *o)
{
    if (W.gen_count == MAX_GENS)
        return -1;
    bool at_once = chance(1, 3);
    W.gens[W.gen_count] = (gen){ .present = true,
                                 .healthy = true,
                                 .ready = P.healed || !chance(1, 12),
                                 .id = o->id,
                                 .mode = 1,
                                 .user = 'u',
                                 .sticky = !P.healed && chance(1, 25),
                                 .pod = at_once ? RUNNING : PENDING,
                                 .turns_at = at_once ? 0 : now + (pdk_ns)below(2000) * MS,
                                 .born = now };
    return W.gen_count++;
}

static void end_pod(op *o, int g)
{
    gen *p = &W.gens[g];
    int meant = o->gen;
    if (o->in >= 0 && meant != g)
        violation("%s deletes g%d, it meant g%d", insts[o->in].name, g, meant);
    o->gen = g;
    if (p->pod == TERMINATING)
        return;
    check_stop(o, false);
    Z->stops++;
    p->pod = TERMINATING;
    p->asked_at = now;
    p->turns_at = now + (pdk_ns)below(P.healed ? 500 : p->sticky ? 20000 : 2500) * MS + 1;
}

/* As perform, of world.c. */
void pods_perform(op *o)
{
    int g = o->route == READY ? o->gen : pod_of(o->id), state = state_of(g);
    o->rc = 1;
    o->pod = state;
    o->out_gen = g;
    if (o->route == READY) {
        o->status = W.gens[g].present && state == RUNNING && W.gens[g].healthy && W.gens[g].ready ? 200 : 503;
        return;
    }
    if (o->route == LIST) {
        for (int id = 0; id < MAX_IDS; id++)
            if ((g = pod_of(id)) >= 0 && strcmp(answers[state_of(g)][LIST], "yes") == 0)
                o->seen |= (uint64_t)1 << g;
        o->status = 200;
        return;
    }
    for (int k = 0; k < W.gen_count && (o->route == GET || o->route == PRESENCE); k++)
        W.gens[k].told_dead |= W.gens[k].id == o->id && (k != g || state != RUNNING);
    const char *word = answers[state][o->route];
    if (o->route == DELETE && g >= 0 && o->named && o->gen != g)
        word = "superseded";
    if (strcmp(word, "made") == 0) {
        o->out_gen = make_pod(o);
        if (o->out_gen < 0) {
            o->status = 507;
            return;
        }
        o->pod = W.gens[o->out_gen].pod;
    } else if (strcmp(word, "accepted") == 0) {
        end_pod(o, g);
    }
    o->status = status_of(word);
}

/* ---- answers as text ---- */

static int describe_pod(char *to, size_t size, int g, int state)
{
    bool bare = state == PENDING && (g & 1); /* some have no address until they run */
    char url[32] = "";
    if (!bare)
        snprintf(url, sizeof url, "http://pod/%d", g + 1);
    return snprintf(to, size, "{\"sandbox_id\":\"%c\",\"sandbox_url\":\"%s\",\"container_id\":\"g%d\",\"status\":\"%s\"}",
                    'a' + W.gens[g].id, url, g, said_as[state]);
}

static void push_body(lua_State *L, const op *o)
{
    char text[160];
    luaL_Buffer b;
    if (o->route == LIST) {
        bool first = true;
        luaL_buffinit(L, &b);
        luaL_addstring(&b, "{\"sandboxes\":[");
        for (int g = 0; g < MAX_GENS; g++)
            if (o->seen >> g & 1) {
                describe_pod(text, sizeof text, g, W.gens[g].pod);
                luaL_addstring(&b, first ? "" : ",");
                luaL_addstring(&b, text);
                first = false;
            }
        luaL_addstring(&b, "]}");
        luaL_pushresult(&b);
        return;
    }
    if (o->status == 404)
        snprintf(text, sizeof text, "{\"detail\":\"sandbox %c not found\"}", 'a' + o->id);
    else if (o->route == PRESENCE && o->out_gen >= 0)
        snprintf(text, sizeof text, "{\"sandbox_id\":\"%c\",\"present\":true,\"container_id\":\"g%d\"}", 'a' + o->id, o->out_gen);
    else if (o->route == PRESENCE)
        snprintf(text, sizeof text, "{\"sandbox_id\":\"%c\",\"present\":false}", 'a' + o->id);
    else if (o->status < 300 && (o->route == CREATE || o->route == GET))
        describe_pod(text, sizeof text, o->out_gen, o->pod);
    else
        snprintf(text, sizeof text, "{\"detail\":\"%s\"}", o->status < 300 ? "ok" : "no");
    lua_pushstring(L, text);
}

/* ---- requests: http(method, url, generation, seconds) -> status, body; or nil, kind, reason, failure ---- */

static void read_request(lua_State *L, op *o)
{
    static const opkind kinds[ROUTES] = { OP_CREATE, OP_INSPECT, OP_INSPECT, OP_DESTROY, OP_LIST, OP_READY };
    const char *method = lua_tostring(L, 1), *url = lua_tostring(L, 2), *body = lua_tostring(L, 5);
    char id[8] = "", rest[16] = "";
    int number;
    if (sscanf(url, "http://pod/%d", &number) == 1) {
        o->route = READY;
        o->gen = number - 1;
        o->id = W.gens[o->gen].id;
    } else {
        sscanf(url, "http://provisioner/api/sandboxes/%7[a-z]/%15s", id, rest);
        o->route = strcmp(method, "POST") == 0     ? CREATE
                   : strcmp(method, "DELETE") == 0 ? DELETE
                   : rest[0] != '\0'               ? PRESENCE
                   : id[0] != '\0'                 ? GET
                                                   : LIST;
        const char *named = body == NULL ? NULL : strstr(body, "\"sandbox_id\":\"");
        o->id = named != NULL ? named[14] - 'a' : id_number(id);
    }
    o->kind = kinds[o->route];
    o->named = lua_isstring(L, 3);
    if (o->route == DELETE)
        o->gen = o->named ? generation_number(lua_tostring(L, 3) + 1) : pod_of(o->id);
    if (o->route != LIST && (o->id < 0 || o->id >= MAX_IDS))
        violation("%s %s is about an id that no identity has", method, url);
    o->limit = now + (pdk_ns)(lua_tonumber(L, 4) * 1e9);
}

static int no_response(lua_State *L, const op *o)
{
    bool before = strcmp(o->reason, "refused") == 0, expired = o->error == PDK_E_TIMEOUT;
    bool mine = expired && pdk_limit_current()->deadline > mono_of(me->in);
    if (!expired && chance(1, 2)) { /* somebody in between, or the server itself, says it */
        lua_pushinteger(L, before ? (chance(1, 2) ? 500 : 503) : chance(1, 2) ? 502 : 504);
        lua_pushliteral(L, "{\"detail\":\"later\"}");
        return 2;
    }
    lua_pushnil(L);
    lua_pushstring(L, expired && !mine ? "timeout" : "backend_error");
    lua_pushstring(L, expired ? "timeout" : before ? "connect" : "closed");
    lua_pushstring(L, before ? "not_sent" : "ambiguous");
    return 4;
}

static int l_http(lua_State *L)
{
    op o = { .in = (int)lua_tointeger(L, lua_upvalueindex(1)), .id = -1, .gen = -1, .client = -1, .out_gen = -1, .reason = "" };
    o.remote = true;
    read_request(L, &o);
    if (o.route == CREATE && ++me->posts > 1)
        violation("%s asks for %c twice", me->name, 'a' + o.id);
    pdk_script_block(L);
    wire_ask(&o);
    pdk_script_unblock(L);
    if (o.rc < 0)
        return no_response(L, &o);
    TRACE("  %s: %d %s", route_names[o.route], o.status, o.route == LIST ? "" : state_names[o.pod]);
    lua_pushinteger(L, o.status);
    push_body(L, &o);
    return 2;
}

static int l_create_begins(lua_State *L)
{
    (void)L;
    me->posts = 0;
    return 0;
}

static int l_idle(lua_State *L)
{
    lua_pushnumber(L, P.idle_timeout);
    return 1;
}

static const char glue[] =
    "local http, create_begins, idle, connect = ...\n"
    "local errors, io, provisioner = require 'paddock.errors', require 'paddock.io', require 'paddock.backend.provisioner'\n"
    "io.http = function(req)\n"
    "  local status, a, reason, failure = http(req.method, req.url, req.headers['If-Match'], req.timeout, req.body)\n"
    "  if status then return { status = status, headers = {}, body = a } end\n"
    "  local err = errors.new(a, 'no answer', { reason = reason })\n"
    "  err.failure = failure\n"
    "  return nil, err\n"
    "end\n"
    "local b = provisioner.new({ url = 'http://provisioner', create_timeout = 4, delete_timeout = 3, read_timeout = 2,\n"
    "  gone_timeout = 3 }, { ready_interval = 0.5, discover_timeout = 3 })\n"
    "local create = b.create\n"
    "function b:create(spec)\n"
    "  spec.network, spec.limits = nil, nil\n" /* of another backend's runtime, as these were opened */
    "  create_begins()\n"
    "  return create(self, spec)\n"
    "end\n"
    "function b:connect(info, opts)\n"
    "  if not opts or opts.own ~= false then self:_gate(info) end\n"
    "  return connect(self, info, opts)\n"
    "end\n"
    "local _info = b._info\n"
    "function b:_info(s)\n" /* the schedules' policy reads its idle limit there */
    "  local info = _info(self, s)\n"
    "  info.idle = idle()\n"
    "  return info\n"
    "end\n"
    "return b\n";

/* Pushes the backend.  stack: +1 */
void pods_backend(lua_State *L, inst *in)
{
    if (luaL_loadbuffer(L, glue, sizeof glue - 1, "=pods") != LUA_OK)
        violation("%s", lua_tostring(L, -1));
    lua_pushinteger(L, in->index);
    lua_pushcclosure(L, l_http, 1);
    lua_pushcfunction(L, l_create_begins);
    lua_pushcfunction(L, l_idle);
    wire_table(L, in);
    lua_getfield(L, -1, "connect");
    lua_remove(L, -2);
    lua_call(L, 4, 1);
}
