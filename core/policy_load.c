/* policy_load.c -- from the option `policies` to a set of functions.
 *
 * Files are read before the Lua mutex is taken, so that a slow disk delays nobody's policy. Then the five files are
 * loaded, each in an environment of its own, beside the set in force; only when all is well is the set swapped. The
 * functions are taken out of the tables at that moment: what a script does to its table later has no effect. */
#include "policy_internal.h"

#include "fd.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST_FILE   ((size_t)1 << 20)
#define MOST_FOLDER ((size_t)16 << 20) /* all texts of a folder together */
#define MOST_FILES  256

const char *const pdk_policy_names[PDK_POLICY_FILES] = { "identity", "requirements", "mounts", "reuse", "network" };
const pdk_hook_info pdk_hook_infos[PDK_HOOKS] = {
    [PDK_HOOK_DERIVE] = { 0, "derive", true },
    [PDK_HOOK_RESOLVE] = { 1, "resolve", true },
    [PDK_HOOK_COMPOSE] = { 2, "compose", true },
    [PDK_HOOK_DECIDE] = { 3, "decide", true },
    [PDK_HOOK_IDLE_TIMEOUT] = { 3, "idle_timeout", false },
    [PDK_HOOK_EVICT] = { 3, "evict", false },
    [PDK_HOOK_NETWORK] = { 4, "decide", true },
};

static const pdk_allowance load_allowance = {
    .units = 5000000,
    .cpu = 50 * PDK_BUDGET_MS,
    .wall = 800000000,
    .memory = 32u << 20,
    .largest = 1u << 20,
};

/* ---- reading ---- */

typedef struct source { /* one of the five, before it is loaded */
    char *path;         /* what errors call it */
    char *text;
    size_t len;
    bool built_in;
    int folder; /* index of the folder beside it, or -1 */
} source;
typedef struct gathered {
    source files[PDK_POLICY_FILES];
    pdk_policy_folder folders[PDK_POLICY_FILES];
} gathered;
#define PDK_AUTO_GATHERED __attribute__((cleanup(gathered_free))) gathered

static void folder_free(pdk_policy_folder *f)
{
    for (size_t i = 0; i < f->count; i++) {
        free(f->texts[i].name);
        free(f->texts[i].path);
        free(f->texts[i].text);
    }
    free(f->texts);
    *f = (pdk_policy_folder){ 0 };
}

static void gathered_free(gathered *g)
{
    for (int i = 0; i < PDK_POLICY_FILES; i++) {
        free(g->files[i].path);
        free(g->files[i].text);
        folder_free(&g->folders[i]);
    }
}

/* The whole of a regular file. NULL: *why says what is wrong (static), and errno is set or 0. */
static char *read_file(const char *path, size_t *len, const char **why)
{
    /* Not blocking, so that a named pipe is looked at and refused, and not waited for. */
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    *why = "cannot be read";
    if (fd < 0 || fstat(fd, &st) != 0)
        return NULL;
    errno = 0;
    if (!S_ISREG(st.st_mode) || (size_t)st.st_size > MOST_FILE) {
        *why = S_ISREG(st.st_mode) ? "is larger than 1 MiB" : "is no regular file";
        return NULL;
    }
    char *text = malloc(MOST_FILE + 1);
    size_t n = 0;
    for (ssize_t got = 1; text != NULL && got != 0 && n <= MOST_FILE;) {
        got = read(fd, text + n, MOST_FILE + 1 - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            free(text);
            return NULL;
        }
        n += (size_t)got;
    }
    if (text == NULL || n > MOST_FILE) {
        *why = text == NULL ? "finds no memory" : "is larger than 1 MiB";
        free(text);
        return NULL;
    }
    *len = n;
    char *fit = realloc(text, n + 1);
    return fit == NULL ? text : fit;
}

static bool ends_with_lua(const char *name)
{
    size_t n = strlen(name);
    return n > 4 && strcmp(name + n - 4, ".lua") == 0;
}

/* Adds one file of a folder. -1 = no memory. */
static int add_text(pdk_policy_folder *f, const char *folder, const char *name, size_t *total)
{
    pdk_policy_text *more = realloc(f->texts, (f->count + 1) * sizeof *more);
    if (more == NULL)
        return -1;
    f->texts = more;
    pdk_policy_text *t = &f->texts[f->count++];
    *t = (pdk_policy_text){ .name = strdup(name) };
    if (t->name == NULL || asprintf(&t->path, "%s/%s", folder, name) < 0) {
        t->path = NULL;
        return -1;
    }
    t->text = read_file(t->path, &t->len, &t->why);
    *total += t->len;
    return 0;
}

static int read_folder(const char *folder, pdk_policy_folder *f, pdk_error *err)
{
    DIR *d = opendir(folder);
    size_t total = 0;
    int rc = 0;
    if (d == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, errno, "option policies: cannot open the folder %s", folder);
    for (struct dirent *e; rc == 0 && (e = readdir(d)) != NULL;) {
        if (e->d_name[0] == '.' || !ends_with_lua(e->d_name))
            continue;
        if (f->count >= MOST_FILES || total > MOST_FOLDER)
            rc = pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option policies: the folder %s holds too much (%d files, 16 MiB)",
                          folder, MOST_FILES);
        else if (add_text(f, folder, e->d_name, &total) < 0)
            rc = pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the policies in %s", folder);
    }
    closedir(d);
    return rc;
}

/* `set`: "" = the defaults, or the name of a ready-made set; what that leaves out is the default. */
static int use_built_in(source *to, const char *set, int file, pdk_error *err)
{
    char name[100];
    snprintf(name, sizeof name, "policies/%s%s%s.lua", set, set[0] != '\0' ? "/" : "", pdk_policy_names[file]);
    const pdk_embedded *e = pdk_embedded_find(name);
    if (e == NULL && set[0] != '\0')
        return use_built_in(to, "", file, err);
    if (e == NULL)
        return pdk_fail(err, PDK_E_POLICY_ERROR, 0, "%s:1: is not built into this library", name);
    to->built_in = set[0] == '\0';
    to->folder = -1;
    to->path = strdup(name);
    to->text = malloc(e->len + 1);
    if (to->path == NULL || to->text == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %s", name);
    memcpy(to->text, e->data, e->len);
    to->len = e->len;
    return 0;
}

static int unreadable(const char *path, const char *why, int sys, pdk_error *err)
{
    return pdk_fail_reason(err, PDK_E_POLICY_ERROR, "unreadable", "%s:1: %s%s%s", path, why, sys != 0 ? ": " : "",
                           sys != 0 ? strerror(sys) : "");
}

static int gather_folder(const char *folder, gathered *g, pdk_error *err)
{
    int found = 0;
    if (read_folder(folder, &g->folders[0], err) < 0)
        return -1;
    for (int i = 0; i < PDK_POLICY_FILES; i++) {
        source *to = &g->files[i];
        char name[40];
        snprintf(name, sizeof name, "%s.lua", pdk_policy_names[i]);
        const pdk_policy_text *t = NULL;
        for (size_t k = 0; k < g->folders[0].count; k++)
            if (strcmp(g->folders[0].texts[k].name, name) == 0)
                t = &g->folders[0].texts[k];
        if (t == NULL) {
            if (use_built_in(to, "", i, err) < 0)
                return -1;
            continue;
        }
        found++;
        if (t->text == NULL)
            return unreadable(t->path, t->why, 0, err);
        to->path = strdup(t->path);
        to->text = malloc(t->len + 1);
        if (to->path == NULL || to->text == NULL)
            return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for %s", t->path);
        memcpy(to->text, t->text, t->len);
        to->len = t->len;
        to->folder = 0;
    }
    if (found == 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0,
                        "option policies: the folder %s has none of identity.lua, requirements.lua, mounts.lua, reuse.lua, "
                        "network.lua",
                        folder);
    return 0;
}

/* One entry of the option's table: a path, or { source =, name = }. */
static int gather_one(pdk_view v, int i, gathered *g, pdk_error *err)
{
    source *to = &g->files[i];
    const char *name = pdk_policy_names[i];
    pdk_view text = pdk_view_get(v, "source");
    if (pdk_view_tag(v) == '{' && pdk_view_tag(text) == 's') {
        size_t len;
        const char *given = pdk_view_str(pdk_view_get(v, "name"), NULL);
        pdk_view_str(text, &len);
        if (len > MOST_FILE)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option policies.%s.source is larger than 1 MiB", name);
        if (asprintf(&to->path, "%s%s", given != NULL ? given : name, given != NULL ? "" : ".lua") < 0)
            to->path = NULL;
        to->text = pdk_view_dup(text);
        to->len = len;
        to->folder = -1;
        return to->path != NULL && to->text != NULL ? 0
                                                    : pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for policies.%s", name);
    }
    size_t len = 0;
    const char *path = pdk_view_str(v, &len), *why;
    if (path == NULL || len == 0 || strlen(path) != len)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option policies.%s must be a path or { source =, name = }", name);
    to->path = strdup(path);
    to->text = read_file(path, &to->len, &why);
    if (to->text == NULL)
        return unreadable(path, why, errno, err);
    const char *slash = strrchr(path, '/');
    char *folder = slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
    to->folder = i;
    int rc = folder == NULL || to->path == NULL ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for policies.%s", name)
                                                : read_folder(folder, &g->folders[i], err);
    free(folder);
    return rc;
}

static int gather_table(pdk_view sources, gathered *g, pdk_error *err)
{
    size_t cursor = 0;
    pdk_view k, v;
    while (pdk_view_next(sources, &cursor, &k, &v)) {
        const char *name = pdk_view_str(k, NULL);
        int i = 0;
        while (i < PDK_POLICY_FILES && (name == NULL || strcmp(name, pdk_policy_names[i]) != 0))
            i++;
        if (i == PDK_POLICY_FILES)
            return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0,
                            "option policies.%s is unknown (identity, requirements, mounts, reuse, network)",
                            name == NULL ? "[?]" : name);
        if (!pdk_view_is_nil(v) && gather_one(v, i, g, err) < 0)
            return -1;
    }
    for (int i = 0; i < PDK_POLICY_FILES; i++)
        if (g->files[i].text == NULL && use_built_in(&g->files[i], "", i, err) < 0)
            return -1;
    return 0;
}

/* "builtin:NAME": a ready-made set, as it was built in. */
static int gather_built_in(const char *set, gathered *g, pdk_error *err)
{
    char name[100];
    int known = 0;
    for (int i = 0; i < PDK_POLICY_FILES; i++) {
        snprintf(name, sizeof name, "policies/%s/%s.lua", set, pdk_policy_names[i]);
        known += pdk_embedded_find(name) != NULL;
        if (use_built_in(&g->files[i], set, i, err) < 0)
            return -1;
    }
    return known > 0 && strlen(set) < 40 ? 0 : pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option policies: there is no built-in set %.40s", set);
}

static int gather(pdk_view sources, gathered *g, pdk_error *err)
{
    size_t len;
    const char *folder = pdk_view_str(sources, &len);
    if (folder != NULL && strncmp(folder, "builtin:", 8) == 0 && strlen(folder) == len)
        return gather_built_in(folder + 8, g, err);
    if (folder != NULL && len > 0 && strlen(folder) == len)
        return gather_folder(folder, g, err);
    if (pdk_view_is_nil(sources) || pdk_view_tag(sources) == '{')
        return gather_table(sources, g, err);
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0,
                    "option policies must be a folder's path or a table such as { identity = path }");
}

/* ---- loading ---- */

typedef struct loading {
    pdk_policies *p;
    gathered *g;
    pdk_policy_set *set;
    uint64_t ticket;
    pdk_error *err;
    int file;           /* the one at hand */
    const source *text; /* what it is loaded from */
    int named;          /* how many of the file's functions that text names */
} loading;

void pdk_policy_set_free(pdk_script *s, pdk_policy_set *set)
{
    if (set == NULL)
        return;
    for (int h = 0; h < PDK_HOOKS; h++) {
        pdk_script_drop_ref(s, set->fns[h].ref);
        free(set->fns[h].path);
    }
    for (int i = 0; i < PDK_POLICY_FILES; i++)
        free(set->paths[i]);
    free(set);
}

typedef struct load_call { /* what load_body gets: a call with its loading around it */
    pdk_policy_call call;
    loading *l;
} load_call;

/* Whether the file `file` may have a function of that name. */
static bool known_function(int file, const char *name)
{
    for (int h = 0; h < PDK_HOOKS; h++)
        if (pdk_hook_infos[h].file == file && strcmp(pdk_hook_infos[h].function, name) == 0)
            return true;
    return false;
}

/* A misspelt function would be ignored in silence. The file's table is at `table`. Returns how many of the file's functions
 * it names. */
static int refuse_unknown(lua_State *L, int table, int file, const char *path)
{
    int named = 0;
    for (lua_pushnil(L); lua_next(L, table) != 0; lua_pop(L, 1)) {
        bool known = lua_type(L, -2) == LUA_TSTRING && known_function(file, lua_tostring(L, -2));
        named += known;
        if (!known && lua_type(L, -1) == LUA_TFUNCTION) {
            lua_Debug ar;
            const char *name = lua_type(L, -2) == LUA_TSTRING ? lua_tostring(L, -2) : "[?]";
            lua_getinfo(L, ">S", &ar); /* takes the function */
            luaL_error(L, "%s:%d: '%s' is no function of this policy", path, ar.linedefined > 0 ? ar.linedefined : 1, name);
        }
    }
    return named;
}

/* Takes the function of hook h out of the table at the top of the stack. */
static void take_function(lua_State *L, loading *l, pdk_hook h, const char *path)
{
    pdk_policy_fn *fn = &l->set->fns[h];
    const char *name = pdk_hook_infos[h].function;
    lua_Debug ar;
    if (lua_getfield(L, -1, name) == LUA_TNIL && (l->named > 0 || !pdk_hook_infos[h].required)) {
        lua_pop(L, 1);
        return;
    }
    if (lua_type(L, -1) != LUA_TFUNCTION)
        luaL_error(L, "%s:1: '%s' must be a function in the table that the file returns, not %s", path, name,
                   lua_isnil(L, -1) ? "nil" : luaL_typename(L, -1));
    lua_pushvalue(L, -1);
    lua_getinfo(L, ">S", &ar);
    fn->line = ar.linedefined > 0 ? ar.linedefined : 1;
    fn->path = strdup(ar.source[0] == '@' ? ar.source + 1 : path);
    if (fn->path == NULL)
        luaL_error(L, "%s:1: no memory", path);
    fn->ref = luaL_ref(L, LUA_REGISTRYINDEX);
    fn->pure = lua_getfield(L, -1, "pure") != LUA_TNIL && lua_toboolean(L, -1);
    if (!lua_isnoneornil(L, -1) && !lua_isboolean(L, -1))
        luaL_error(L, "%s:1: 'pure' must be true or false, not %s", path, luaL_typename(L, -1));
    lua_pop(L, 1);
}

static int load_body(lua_State *L)
{
    load_call *c = lua_touserdata(L, 1);
    loading *l = c->l;
    const source *f = l->text;
    lua_newtable(L);
    c->call.loaded_ref = luaL_ref(L, LUA_REGISTRYINDEX);
    pdk_policy_run_text(L, f->path, f->text, f->len);
    if (lua_type(L, -1) != LUA_TTABLE)
        luaL_error(L, "%s:1: the file must return a table of functions, not %s", f->path, luaL_typename(L, -1));
    l->named = refuse_unknown(L, lua_gettop(L), l->file, f->path);
    for (int h = 0; h < PDK_HOOKS; h++)
        if (pdk_hook_infos[h].file == l->file && l->set->fns[h].ref == LUA_NOREF)
            take_function(L, l, (pdk_hook)h, f->path);
    return 0;
}

static int load_text(lua_State *L, loading *l, const source *f)
{
    l->text = f;
    load_call c = { .l = l };
    c.call.p = l->p;
    c.call.what = "loading";
    c.call.path = f->path;
    c.call.line = 1;
    c.call.loaded_ref = LUA_NOREF;
    c.call.folder = f->folder < 0 ? NULL : &l->g->folders[f->folder];
    int rc = pdk_policy_run(L, &c.call, load_body, &load_allowance, l->err);
    luaL_unref(L, LUA_REGISTRYINDEX, c.call.loaded_ref);
    if (rc < 0 && l->err != NULL && l->err->kind == PDK_E_INVALID_ARGUMENT) /* policy.fail has no request to refuse here */
        pdk_error_become(l->err, PDK_E_POLICY_ERROR, "raised", "%s:1: loading", f->path);
    return rc;
}

/* The file at hand, and the built-in functions in place of required ones that it leaves out. */
static int load_file(lua_State *L, loading *l)
{
    if (load_text(L, l, &l->g->files[l->file]) < 0)
        return -1;
    for (int h = 0; h < PDK_HOOKS; h++) {
        if (pdk_hook_infos[h].file != l->file || !pdk_hook_infos[h].required || l->set->fns[h].ref != LUA_NOREF)
            continue;
        source own = { 0 };
        int rc = use_built_in(&own, "", l->file, l->err) < 0 || load_text(L, l, &own) < 0 ? -1 : 0;
        free(own.path);
        free(own.text);
        return rc;
    }
    return 0;
}

static int load_and_swap(lua_State *L, void *arg)
{
    loading *l = arg;
    pdk_policies *p = l->p;
    pdk_policy_env_open(L);
    for (l->file = 0; l->file < PDK_POLICY_FILES; l->file++)
        if (load_file(L, l) < 0)
            return -1;
    if (l->ticket < p->loaded_ticket)
        return 0; /* a reload that began to read later was faster: what it has is newer */
    pdk_policy_set *former = p->set;
    l->set->generation = atomic_load(&p->generation) + 1;
    p->set = l->set;
    p->loaded_ticket = l->ticket;
    atomic_store(&p->generation, l->set->generation);
    l->set = former; /* no call is in flight on it: that would hold the Lua mutex */
    return 0;
}

int pdk_policies_reload(pdk_policies *p, pdk_error *err)
{
    PDK_AUTO_GATHERED g = { 0 };
    loading l = { .p = p, .g = &g, .err = err, .ticket = atomic_fetch_add(&p->tickets, 1) + 1 };
    for (int i = 0; i < PDK_POLICY_FILES; i++)
        g.files[i].folder = -1;
    if (gather(pdk_view_of(&p->sources), &g, err) < 0)
        return -1;
    l.set = calloc(1, sizeof *l.set);
    if (l.set == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the policies");
    for (int h = 0; h < PDK_HOOKS; h++)
        l.set->fns[h].ref = LUA_NOREF;
    for (int i = 0; i < PDK_POLICY_FILES; i++) {
        l.set->paths[i] = strdup(g.files[i].path);
        l.set->built_in[i] = g.files[i].built_in;
    }
    int rc = pdk_script_enter(p->script, load_and_swap, &l, err);
    pdk_policy_set_free(p->script, l.set);
    return rc;
}
