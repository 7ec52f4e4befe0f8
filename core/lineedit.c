/* lineedit.c -- reading lines for the REPL: libedit on a terminal, plain lines from a pipe.
 *
 * Why libedit's own interface and not its imitation of readline: the character reader can be replaced (EL_GETCFN), so that
 * waiting gives the Lua mutex up and ends on a signal, without jumping out of a handler.
 *
 * The module (preloaded as `paddock.lineedit`):
 *   readline(prompt [, complete]) -> line | nil, "eof" | "interrupt" | "terminate" | "too long"
 *       complete(text before the cursor) -> text to insert or nil, text to show or nil
 *   remember(line)                adds it to the history, and to its file
 *   history(path)                 reads that file (made with mode 0600); -> true | nil, reason
 *   interactive()                 whether lines come from a terminal
 *
 * One per process, used by the main thread only; `ed` is touched only under the Lua mutex.
 */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <histedit.h>
#include <lauxlib.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

enum { HISTORY_KEPT = 1000, HISTORY_FILE_MAX = 1 << 20, LINE_MAX_BYTES = 1 << 20 };

static struct {
    EditLine *el; /* NULL until the first line from a terminal */
    History *history;
    int history_fd;     /* appended to; -1 = none */
    lua_State *L;       /* during readline: where `complete` (index 2) lives */
    pdk_cli_wake woken; /* why the last read of a character ended */
    char prompt[64];
    char *rest; /* from a pipe: bytes behind the line that was handed out */
    size_t rest_len;
    bool pipe_ended;
} ed = { .history_fd = -1 };

static bool is_interactive(void)
{
    return isatty(0) && isatty(1);
}

/* ---- on a terminal ------------------------------------------------------------------------------------- */

static char *show_prompt(EditLine *el)
{
    (void)el;
    return ed.prompt;
}

/* One character, as libedit wants it: 1, 0 at the end, -1 to give the line up. A byte that is no UTF-8 is taken as it is. */
static int read_character(EditLine *el, wchar_t *out)
{
    (void)el;
    mbstate_t state = { 0 };
    for (int i = 0; i < 8; i++) {
        ed.woken = pdk_cli_wait(ed.L, 0);
        if (ed.woken != PDK_CLI_READY)
            return -1;
        char byte;
        ssize_t n = read(0, &byte, 1);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (n <= 0)
            return 0;
        size_t used = mbrtowc(out, &byte, 1, &state);
        if (used == (size_t)-1) {
            *out = (wchar_t)(unsigned char)byte;
            return 1;
        }
        if (used != (size_t)-2)
            return 1;
    }
    return 0;
}

/* Asks complete(text).  Arguments: the text (light userdata: LineInfo).  stack: +0, raises */
static int ask_completion(lua_State *L)
{
    const LineInfo *line = lua_touserdata(L, 1);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushlstring(L, line->buffer, (size_t)(line->cursor - line->buffer));
    lua_call(L, 1, 2);
    const char *insert = lua_tostring(L, -2), *list = lua_tostring(L, -1);
    if (list != NULL)
        printf("\n%s\n", list);
    fflush(stdout);
    if (insert != NULL && insert[0] != 0)
        el_insertstr(ed.el, insert);
    lua_pushboolean(L, list != NULL);
    lua_pushboolean(L, insert != NULL && insert[0] != 0);
    return 2;
}

static unsigned char complete(EditLine *el, int ch)
{
    (void)ch;
    lua_State *L = ed.L;
    if (lua_type(L, 2) != LUA_TFUNCTION || !lua_checkstack(L, 8))
        return CC_ERROR;
    int top = lua_gettop(L);
    unsigned char answer = CC_ERROR;
    lua_pushvalue(L, 2);
    lua_pushcclosure(L, ask_completion, 1);
    lua_pushlightuserdata(L, (void *)el_line(el));
    if (lua_pcall(L, 1, 2, 0) == LUA_OK) {
        if (lua_toboolean(L, -2))
            answer = CC_REDISPLAY;
        else if (lua_toboolean(L, -1))
            answer = CC_REFRESH;
    }
    lua_settop(L, top);
    return answer;
}

static bool editor_open(void)
{
    if (ed.el != NULL)
        return true;
    ed.el = el_init("paddock", stdin, stdout, stderr);
    if (ed.el == NULL)
        return false;
    if (ed.history == NULL && (ed.history = history_init()) != NULL) {
        HistEvent event;
        history(ed.history, &event, H_SETSIZE, HISTORY_KEPT);
        history(ed.history, &event, H_SETUNIQUE, 1);
    }
    el_set(ed.el, EL_PROMPT, show_prompt);
    el_set(ed.el, EL_EDITOR, "emacs");
    el_set(ed.el, EL_SIGNAL, 0);
    el_set(ed.el, EL_GETCFN, read_character);
    el_set(ed.el, EL_ADDFN, "paddock-complete", "Complete the name before the cursor", complete);
    el_set(ed.el, EL_BIND, "^I", "paddock-complete", NULL);
    el_set(ed.el, EL_BIND, "^R", "em-inc-search-prev", NULL);
    if (ed.history != NULL)
        el_set(ed.el, EL_HIST, history, ed.history);
    el_source(ed.el, NULL); /* the operator's ~/.editrc */
    return true;
}

/* stack: +1 or +2, raises */
static int read_from_terminal(lua_State *L)
{
    if (!editor_open())
        return luaL_error(L, "this terminal cannot be used for editing lines; give the input by a pipe");
    int len = 0;
    ed.L = L;
    ed.woken = PDK_CLI_READY;
    const char *line = el_gets(ed.el, &len);
    ed.L = NULL;
    if (line != NULL && len > 0) {
        lua_pushlstring(L, line, (size_t)len - (line[len - 1] == '\n'));
        return 1;
    }
    putchar('\n'); /* the cursor stands behind what was typed */
    fflush(stdout);
    el_reset(ed.el);
    lua_pushnil(L);
    lua_pushstring(L, ed.woken == PDK_CLI_INTERRUPT ? "interrupt" : ed.woken == PDK_CLI_TERMINATE ? "terminate" : "eof");
    return 2;
}

/* ---- from a pipe --------------------------------------------------------------------------------------- */

/* Appends what can be read to ed.rest. stack: +0, raises */
static pdk_cli_wake fill_rest(lua_State *L)
{
    pdk_cli_wake woken = pdk_cli_wait(L, 0);
    if (woken != PDK_CLI_READY)
        return woken;
    char *grown = realloc(ed.rest, ed.rest_len + 4096);
    if (grown == NULL)
        luaL_error(L, "not enough memory");
    ed.rest = grown;
    ssize_t n = read(0, ed.rest + ed.rest_len, 4096);
    if (n > 0)
        ed.rest_len += (size_t)n;
    else if (n == 0 || (errno != EINTR && errno != EAGAIN))
        ed.pipe_ended = true;
    return PDK_CLI_READY;
}

/* Hands the first `len` bytes of ed.rest out and drops `drop`. stack: +1, raises */
static int take_line(lua_State *L, size_t len, size_t drop)
{
    lua_pushlstring(L, ed.rest, len);
    ed.rest_len -= drop;
    memmove(ed.rest, ed.rest + drop, ed.rest_len);
    return 1;
}

/* stack: +1 or +2, raises */
static int read_from_pipe(lua_State *L)
{
    size_t seen = 0;
    for (;;) {
        char *end = seen < ed.rest_len ? memchr(ed.rest + seen, '\n', ed.rest_len - seen) : NULL;
        if (end != NULL)
            return take_line(L, (size_t)(end - ed.rest), (size_t)(end - ed.rest) + 1);
        seen = ed.rest_len;
        if (ed.pipe_ended && ed.rest_len > 0)
            return take_line(L, ed.rest_len, ed.rest_len);
        const char *why = ed.pipe_ended ? "eof" : NULL;
        if (ed.rest_len > LINE_MAX_BYTES)
            why = "too long";
        if (why == NULL) {
            pdk_cli_wake woken = fill_rest(L);
            if (woken == PDK_CLI_READY)
                continue;
            why = woken == PDK_CLI_INTERRUPT ? "interrupt" : "terminate";
        }
        lua_pushnil(L);
        lua_pushstring(L, why);
        return 2;
    }
}

/* ---- history ------------------------------------------------------------------------------------------- */

static void history_add(const char *line)
{
    HistEvent event;
    if (ed.history != NULL && line[0] != 0)
        history(ed.history, &event, H_ENTER, line);
}

/* The last HISTORY_KEPT lines of the file; a file that has grown too large is cut down to them. */
static void history_load(int fd)
{
    struct stat facts;
    if (fstat(fd, &facts) < 0 || facts.st_size <= 0)
        return;
    size_t want = facts.st_size > HISTORY_FILE_MAX ? HISTORY_FILE_MAX : (size_t)facts.st_size;
    char *text = malloc(want + 1);
    if (text == NULL)
        return;
    ssize_t n = pread(fd, text, want, facts.st_size - (off_t)want);
    size_t len = n > 0 ? (size_t)n : 0;
    text[len] = 0;
    char *from = text;
    if (want < (size_t)facts.st_size) { /* the first line is cut, most likely */
        from = memchr(text, '\n', len);
        from = from != NULL ? from + 1 : text + len;
        if (ftruncate(fd, 0) == 0)
            (void)!write(fd, from, len - (size_t)(from - text));
    }
    for (char *line = from, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = 0;
        history_add(line);
    }
    free(text);
}

/* Makes the folders that a path leads through, for their owner alone. What cannot be made shows when the file is opened. */
static void make_folders(const char *path)
{
    char folder[4096];
    for (const char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/'))
        if (snprintf(folder, sizeof folder, "%.*s", (int)(slash - path), path) < (int)sizeof folder)
            (void)!mkdir(folder, 0700);
}

/* stack: +1 or +2, raises */
static int l_history(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    luaL_argcheck(L, path[0] == '/', 1, "an absolute path is needed");
    make_folders(path);
    if (ed.history_fd >= 0)
        close(ed.history_fd);
    ed.history_fd = open(path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
    struct stat facts;
    int failed = ed.history_fd < 0 ? errno : 0;
    if (failed == 0 && (fstat(ed.history_fd, &facts) < 0 || !S_ISREG(facts.st_mode)))
        failed = EINVAL;
    if (failed == 0 && (facts.st_mode & 0077) != 0 && fchmod(ed.history_fd, 0600) < 0)
        failed = errno; /* what was typed may hold secrets */
    if (failed != 0) {
        if (ed.history_fd >= 0)
            close(ed.history_fd);
        ed.history_fd = -1;
        lua_pushnil(L);
        lua_pushstring(L, strerror(failed));
        return 2;
    }
    if (is_interactive() && editor_open())
        history_load(ed.history_fd);
    lua_pushboolean(L, true);
    return 1;
}

/* stack: +0, raises */
static int l_remember(lua_State *L)
{
    size_t len;
    const char *line = luaL_checklstring(L, 1, &len);
    if (len == 0 || strlen(line) != len)
        return 0;
    history_add(line);
    if (ed.history_fd >= 0) {
        lua_pushfstring(L, "%s\n", line); /* one write: two REPLs may share the file */
        (void)!write(ed.history_fd, lua_tostring(L, -1), len + 1);
    }
    return 0;
}

/* ---- the module ---------------------------------------------------------------------------------------- */

/* stack: +1 or +2, raises */
static int l_readline(lua_State *L)
{
    const char *prompt = luaL_checkstring(L, 1);
    snprintf(ed.prompt, sizeof ed.prompt, "%s", prompt);
    lua_settop(L, 2);
    return is_interactive() ? read_from_terminal(L) : read_from_pipe(L);
}

/* stack: +1, raises */
static int l_interactive(lua_State *L)
{
    lua_pushboolean(L, is_interactive());
    return 1;
}

int luaopen_paddock_lineedit(lua_State *L)
{
    static const luaL_Reg functions[] = {
        { "readline", l_readline },
        { "remember", l_remember },
        { "history", l_history },
        { "interactive", l_interactive },
        { NULL, NULL },
    };
    luaL_newlib(L, functions);
    return 1;
}
