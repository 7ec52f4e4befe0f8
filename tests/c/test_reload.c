/* Policies from files: folders, policy.require, reload, and many threads that ask meanwhile. */
#include "policy_world.h"

#include <stdatomic.h>
#include <sys/stat.h>

/* ---- folders and reload ---- */

static void write_file(const char *folder, const char *name, const char *text)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    if (!CHECK(f != NULL))
        abort();
    fwrite(text, 1, strlen(text), f);
    fclose(f);
}

static const char *fresh_folder(void)
{
    static char folder[200];
    static int n;
    snprintf(folder, sizeof folder, "%s/%d", test_tmpdir(), ++n);
    CHECK_INT(mkdir(folder, 0700), 0);
    return folder;
}

static world world_in(const char *folder)
{
    world w;
    PDK_AUTO_PACK sources = PDK_NO_PACK;
    pdk_put_cstr(&sources, folder);
    world_open(&w, pdk_view_of(&sources));
    return w;
}

TEST("a folder needs one of the five files, and the others are the built-in ones")
{
    const char *folder = fresh_folder();
    write_file(folder, "notes.txt", "x");
    world w = world_in(folder);
    CHECK(w.p == NULL);
    CHECK_KIND(w.err, PDK_E_INVALID_ARGUMENT);
    CHECK_HAS(w.err.message, "has none of identity.lua");
    world_close(&w);
    write_file(folder, "identity.lua", "#!/usr/bin/lua\nreturn {\n derive = function() return 'mine' end }");
    w = world_in(folder);
    CHECK_KIND(w.err, PDK_OK);
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "mine");
    CHECK_INT(decide(&w, "{}"), 0);
    PDK_AUTO_PACK out = PDK_NO_PACK;
    CHECK_INT(pdk_policies_describe(w.p, &out, &w.err), 0);
    pdk_view k, identity, next;
    size_t cursor = 0;
    int64_t line = 0;
    REQUIRE(pdk_view_next(pdk_view_of(&out), &cursor, &k, &identity) &&
            pdk_view_next(pdk_view_of(&out), &cursor, &k, &next));
    CHECK_HAS(pdk_view_str(pdk_view_get(identity, "path"), NULL), "/identity.lua");
    CHECK(pdk_view_int(pdk_view_get(identity, "line"), &line));
    CHECK_INT(line, 3);
    CHECK_STR(pdk_view_str(pdk_view_get(next, "path"), NULL), "built in");
    world_close(&w);
}

TEST("options that are no policies are refused and named; so are files that are none [B158]")
{
    static const char *const options[][2] = {
        { "5", "option policies must be a folder" },
        { "''", "option policies must be a folder" },
        { "'/nowhere/at/all'", "option policies: cannot open the folder /nowhere/at/all: No such file" },
        { "{ identityy = 'x' }", "option policies.identityy is unknown" },
        { "{ identity = 5 }", "option policies.identity must be a path or" },
        { "{ identity = { name = 'x' } }", "option policies.identity must be a path or" },
        { "{ 'x' }", "option policies must be a folder" },
        { "{ identity = '/nowhere.lua' }", "/nowhere.lua:1: cannot be read: No such file" },
        { "{ identity = '/tmp' }", "/tmp:1: is no regular file" },
        { "{ identity = '/dev/zero' }", "/dev/zero:1: is no regular file" },
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        world w;
        PDK_AUTO_PACK sources = PDK_NO_PACK;
        pack_lua(&sources, options[i][0]);
        world_open(&w, pdk_view_of(&sources));
        CHECK(w.p == NULL);
        CHECK_HAS(w.err.message, options[i][1]);
        world_close(&w);
    }
    const char *folder = fresh_folder();
    char path[300];
    snprintf(path, sizeof path, "%s/identity.lua", folder);
    REQUIRE(mkfifo(path, 0600) == 0);
    double from = test_now();
    world w = world_in(folder);
    CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
    CHECK_HAS(w.err.message, "identity.lua:1: is no regular file");
    CHECK_WITHIN(from, 1);
    world_close(&w);
}

TEST("policy.require finds files beside, each policy has its own instance, cycles are refused, other files never run [B151]")
{
    const char *folder = fresh_folder();
    write_file(folder, "helper.lua", "local n = 0 return { count = function() n = n + 1 return n end }");
    write_file(folder, "disabled.lua", "while true do end");
    write_file(folder, "identity.lua",
               "local a, b = policy.require('helper'), policy.require('helper')\n"
               "assert(a == b)\n"
               "return { derive = function() return 'n' .. a.count() end }");
    write_file(folder, "reuse.lua",
               "local h = policy.require 'helper'\n"
               "return { decide = function() return 'reuse', 'n' .. h.count() end }");
    world w = world_in(folder);
    CHECK_KIND(w.err, PDK_OK);
    CHECK_INT(derive(&w, "u", "t1"), 0);
    CHECK_INT(derive(&w, "u", "t2"), 0);
    CHECK_STR(w.id, "n2");
    CHECK_INT(decide(&w, "{}"), 0);
    CHECK_STR(w.verdict.code, "n1");
    write_file(folder, "helper.lua", "return policy.require('other')");
    write_file(folder, "other.lua", "return policy.require('helper')");
    CHECK_INT(pdk_policies_reload(w.p, &w.err), -1);
    CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
    CHECK_HAS(w.err.message, "'helper' is being loaded already (a cycle)");
    write_file(folder, "helper.lua", "\nleft = 1");
    CHECK_INT(pdk_policies_reload(w.p, &w.err), -1);
    CHECK_HAS(w.err.message, "helper.lua:2: loading: global 'left' is assigned");
    CHECK_INT(decide(&w, "{}"), 0);
    CHECK_STR(w.verdict.code, "n2");
    world_close(&w);
}

TEST("reload swaps the whole set or nothing: the last good rules stay, and the next try counts [B161]")
{
    const char *folder = fresh_folder();
    write_file(folder, "identity.lua", "return { derive = function() return 'one' end }");
    write_file(folder, "reuse.lua",
               "local t = { n = 1 }\nreturn { decide = function() t.n = t.n + 1 return 'reuse', 'one-' .. t.n end }");
    world w = world_in(folder);
    uint64_t generation = pdk_policies_generation(w.p);
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "one");
    CHECK_INT(decide(&w, "{}"), 0);
    write_file(folder, "identity.lua", "return { derive = function() return 'two' end }");
    write_file(folder, "reuse.lua", "return { decide = function() return 'reuse', 'two' end");
    CHECK_INT(pdk_policies_reload(w.p, &w.err), -1);
    CHECK_KIND(w.err, PDK_E_POLICY_ERROR);
    CHECK_HAS(w.err.message, "reuse.lua:1: loading: '}' expected");
    CHECK_INT(pdk_policies_generation(w.p), generation);
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "one"); /* from the cache, and asked anew: */
    CHECK_INT(derive(&w, "u", "other"), 0);
    CHECK_STR(w.id, "one");
    CHECK_INT(decide(&w, "{}"), 0);
    CHECK_STR(w.verdict.code, "one-3"); /* also what its functions have closed over */
    write_file(folder, "reuse.lua",
               "local t = { n = 5 }\nreturn { decide = function() t.n = t.n + 1 return 'reuse', 'two-' .. t.n end }");
    CHECK_INT(pdk_policies_reload(w.p, &w.err), 0);
    CHECK_INT(pdk_policies_generation(w.p), generation + 1);
    CHECK_INT(derive(&w, "u", "t"), 0);
    CHECK_STR(w.id, "two");
    CHECK_INT(decide(&w, "{}"), 0);
    CHECK_STR(w.verdict.code, "two-6");
    world_close(&w);
}

TEST("a table that a file returns may change later, or close over what it likes: the set in force does not")
{
    world w = world_with("reuse", "local m = {}\n"
                                  "function m.decide()\n"
                                  "  m.decide = function() return 'defer' end\n"
                                  "  m.idle_timeout = nil\n"
                                  "  return 'reuse'\n"
                                  "end\n"
                                  "function m.idle_timeout() return 7 end\n"
                                  "return m");
    double seconds = 0;
    for (int i = 0; i < 2; i++) {
        CHECK_INT(decide(&w, "{}"), 0);
        CHECK_INT(w.verdict.decision, PDK_REUSE);
        CHECK_INT(pdk_policy_idle_timeout(w.p, PDK_NO_VIEW, &seconds, &w.err), 0);
        CHECK_NUM(seconds, 7, 0);
    }
    world_close(&w);
}

TEST("policies that come and go leave no memory behind [B154]")
{
    world w = world_with("identity", "local big = {} for i = 1, 1000 do big[i] = 'string number ' .. i end\n"
                                     "return { derive = function(ctx) return ctx.user .. #big end }");
    size_t after[3];
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 60; k++)
            CHECK_INT(pdk_policies_reload(w.p, &w.err), 0);
        after[i] = pdk_script_memory(w.script);
    }
    CHECK(after[2] < after[0] * 3 / 2 + 500000);
    CHECK_INT(derive(&w, "u", "t"), 0);
    world_close(&w);
}

/* ---- threads ---- */

typedef struct crowd {
    world *w;
    atomic_bool stop;
    atomic_int asked, failed, mixed;
} crowd;

static void *ask(void *arg)
{
    crowd *c = arg;
    for (int i = 0; !atomic_load(&c->stop) || i < 200; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        char user[32], id[64];
        snprintf(user, sizeof user, "user-%d", i % 50);
        pdk_identity one = who(user, "t");
        pdk_verdict v;
        if (pdk_policy_derive(c->w->p, &one, PDK_NO_VIEW, id, &err) < 0 ||
            pdk_policy_decide(c->w->p, PDK_NO_VIEW, &v, &err) < 0)
            atomic_fetch_add(&c->failed, 1);
        else if (strcmp(id, "old") != 0 && strcmp(id, "new") != 0)
            atomic_fetch_add(&c->mixed, 1);
        atomic_fetch_add(&c->asked, 1);
        if (i > 1000000)
            break;
    }
    return NULL;
}

static void *ask_badly(void *arg)
{
    crowd *c = arg;
    for (int i = 0; i < 20; i++) {
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        pdk_net_decision d;
        CHECK_INT(pdk_policy_network(c->w->p, PDK_NO_VIEW, &d, &err), -1);
        CHECK_KIND(err, PDK_E_POLICY_ERROR);
        CHECK_INT(d, PDK_NET_DENY);
    }
    return NULL;
}

TEST("four threads ask while one reloads and one runs an endless script: every answer is of one set [B155, B156, B163]")
{
    const char *folder = fresh_folder();
    write_file(folder, "identity.lua", "return { derive = function() return 'old' end }");
    write_file(folder, "network.lua", "return { decide = function() while true do end end }");
    world w = world_in(folder);
    REQUIRE(w.p != NULL);
    crowd c = { .w = &w };
    pdk_thread t[5];
    for (int i = 0; i < 4; i++)
        CHECK_INT(pdk_thread_start(&t[i], "ask", ask, &c), 0);
    CHECK_INT(pdk_thread_start(&t[4], "bad", ask_badly, &c), 0);
    for (int i = 0; i < 30; i++) {
        char text[100];
        snprintf(text, sizeof text, "return { derive = function() return '%s' end %s", i % 2 ? "old" : "new",
                 i % 3 ? "}" : "");
        write_file(folder, "identity.lua", text);
        PDK_AUTO_ERROR err = PDK_NO_ERROR;
        CHECK_INT(pdk_policies_reload(w.p, &err), i % 3 ? 0 : -1);
    }
    atomic_store(&c.stop, true);
    for (int i = 0; i < 5; i++)
        pdk_thread_join(&t[i]);
    CHECK(atomic_load(&c.asked) >= 800);
    CHECK_INT(atomic_load(&c.failed), 0);
    CHECK_INT(atomic_load(&c.mixed), 0);
    CHECK_INT(pdk_policies_generation(w.p), 21);
    world_close(&w);
}

TEST("two runtimes share a universe, and the policies of one do not touch the other's")
{
    world w = world_with("identity",
                         "string.format = nil table.concat = nil return { derive = function() return 'one' end }");
    world other = { .script = w.script, .clock = w.clock };
    other.p = pdk_policies_new(w.script, w.clock, NULL, PDK_NO_VIEW, PDK_NO_VIEW, &other.err);
    REQUIRE(other.p != NULL);
    CHECK_INT(derive(&w, "u-1", "t-1"), 0);
    CHECK_STR(w.id, "one");
    CHECK_INT(derive(&other, "u-1", "t-1"), 0);
    CHECK_STR(other.id, "dcd520660fa816954f7fe6cb0d3b9220");
    pdk_policies_free(other.p);
    world_close(&w);
}

TEST_MAIN
