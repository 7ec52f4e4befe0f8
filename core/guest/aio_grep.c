/* aio_grep.c -- /v1/file/grep (a tree of texts) and /v1/file/search (one text), line by line, in slices (aio_walk.h).
 *
 * Expressions are POSIX extended ones with \d, \w, \s, \b and (?:...) added, as clients write them. Back references are
 * refused: they alone make matching exponential, and the guest has one thread.
 */
#include "aio_walk.h"

#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_MAX_BYTES 16384   /* of a line that is matched and shown */
#define FILE_MAX (16u << 20)
#define MATCHES_MAX 10000
#define CONTEXT_MAX 100
#define LINES_AT_ONCE 64       /* between two looks at the clock */

typedef struct args {
    const char *path, *pattern, *size, *type, *file, *regex;
    json_t *include, *exclude;
    bool ignore_case, fixed, multiline, recursive, sudo;
    int64_t before, after, max, offset;
} args;

typedef struct grep {
    args a;
    json_t *body;               /* holds the strings of `a` */
    bool search;                /* one file: its answer has another shape */
    regex_t re;
    bool compiled;
    size_t max_size;
    json_t *matches, *numbers;
    json_int_t files, hit_files, found;
    bool truncated, no_memory, stop;
    /* the text that is being searched */
    char *text, *path;          /* NULL = none */
    size_t len, at;
    json_int_t line;
    bool hit;
} grep;

static void text_drop(grep *g)
{
    free(g->text);
    free(g->path);
    g->text = g->path = NULL;
}

static void grep_free(void *ctx)
{
    grep *g = ctx;
    text_drop(g);
    if (g->compiled) regfree(&g->re);
    json_decref(g->matches);
    json_decref(g->numbers);
    json_decref(g->body);
    free(g);
}

/* ---- expressions ---- */

static char *put(char *w, const char *text)
{
    return stpcpy(w, text);
}

/* The POSIX form of `regex` (or of the fixed text), to be freed; NULL with *why set. */
static char *translate(const char *regex, bool fixed, const char **why)
{
    char *out = malloc(strlen(regex) * 12 + 1), *w = out;
    bool set = false;
    *why = out ? NULL : "no memory";
    for (const char *p = regex; out != NULL && *p != 0; p++) {
        if (fixed) {
            if (strchr(".[]\\()*+?{}|^$", *p) != NULL) *w++ = '\\';
            *w++ = *p;
        } else if (*p == '\\' && p[1] != 0) {
            char c = *++p;
            if (c >= '1' && c <= '9') *why = "back references are not supported";
            if (c == 'd') w = put(w, set ? "0-9" : "[0-9]");
            else if (c == 'D' && !set) w = put(w, "[^0-9]");
            else if (c == 'w' && set) w = put(w, "A-Za-z0-9_");
            else if (c == 's' && set) w = put(w, "[:space:]");
            else if (c == 't') *w++ = '\t';
            else if (set) *w++ = c; /* a backslash is an ordinary character in a POSIX set */
            else *w++ = '\\', *w++ = c;
        } else if (!set && *p == '(' && strncmp(p, "(?:", 3) == 0) {
            *w++ = '(';
            p += 2;
        } else {
            if (*p == '[' && !set) {
                set = true;
                *w++ = *p;
                if (p[1] == '^') *w++ = *++p;
                if (p[1] == ']') *w++ = *++p;
                continue;
            }
            if (*p == ']') set = false;
            *w++ = *p;
        }
    }
    if (out != NULL) *w = 0;
    if (*why == NULL) return out;
    free(out);
    return NULL;
}

/* False = the request was answered: the expression is none. */
static bool compile(grep *g, guest_req *req, const char *field, const char *regex)
{
    char message[160];
    const char *why;
    if (strlen(regex) > 4096) {
        aio_reply_invalid(req, field, "is longer than 4096 bytes");
        return false;
    }
    char *posix = translate(regex, g->a.fixed, &why);
    if (posix == NULL) {
        aio_reply_invalid(req, field, why);
        return false;
    }
    int rc = regcomp(&g->re, posix, REG_EXTENDED | REG_NOSUB | (g->a.ignore_case ? REG_ICASE : 0));
    free(posix);
    g->compiled = rc == 0;
    if (rc == 0) return true;
    regerror(rc, &g->re, message, sizeof message);
    aio_reply_invalid(req, field, message);
    return false;
}

/* ---- matching ---- */

static const char *line_end(const char *p, const char *end)
{
    const char *nl = memchr(p, '\n', (size_t)(end - p));
    return nl ? nl : end;
}

static json_t *line_json(const char *from, const char *to)
{
    size_t len = (size_t)(to - from);
    return aio_text(from, len < LINE_MAX_BYTES ? len : LINE_MAX_BYTES);
}

static json_t *lines_before(const grep *g, size_t at)
{
    json_t *lines = json_array();
    const char *text = g->text;
    for (int64_t n = 0; n < g->a.before && at > 0; n++) {
        size_t to = at - 1, from = to; /* text[to] is the line break */
        while (from > 0 && text[from - 1] != '\n') from--;
        json_array_insert_new(lines, 0, line_json(text + from, text + to));
        at = from;
    }
    return lines;
}

static json_t *lines_after(const grep *g, size_t next)
{
    json_t *lines = json_array();
    const char *end = g->text + g->len, *p = g->text + next;
    for (int64_t n = 0; n < g->a.after && p < end; n++) {
        const char *to = line_end(p, end);
        json_array_append_new(lines, line_json(p, to));
        p = to < end ? to + 1 : end;
    }
    return lines;
}

static void add_match(grep *g, size_t from, size_t to)
{
    g->hit = true;
    if (g->found++ < g->a.offset) return;
    if ((int64_t)json_array_size(g->matches) >= g->a.max) {
        g->truncated = g->stop = true;
        return;
    }
    json_t *text = line_json(g->text + from, g->text + to);
    if (g->search) {
        g->no_memory |= json_array_append_new(g->matches, text) < 0 || json_array_append_new(g->numbers, json_integer(g->line)) < 0;
        return;
    }
    json_t *one = json_pack("{s:o, s:I, s:o}", "file", aio_text(g->path, strlen(g->path)), "line_number", g->line,
                            "line_content", text);
    if (one != NULL && g->a.before > 0) json_object_set_new(one, "context_before", lines_before(g, from));
    if (one != NULL && g->a.after > 0) json_object_set_new(one, "context_after", lines_after(g, to + 1 < g->len ? to + 1 : g->len));
    g->no_memory |= json_array_append_new(g->matches, one) < 0;
}

/* Some lines of the text at hand; false = it is done. */
static bool more(void *ctx)
{
    grep *g = ctx;
    for (int n = 0; n < LINES_AT_ONCE && g->text != NULL; n++) {
        if (g->at >= g->len || g->stop || g->no_memory) {
            g->hit_files += g->hit;
            text_drop(g);
            break;
        }
        char *from = g->text + g->at, *to = (char *)(uintptr_t)line_end(from, g->text + g->len);
        char *cut = to - from > LINE_MAX_BYTES ? from + LINE_MAX_BYTES : to, kept = *cut;
        *cut = 0; /* the block ends with a NUL of its own: cut may be that one */
        g->line++;
        bool hit = regexec(&g->re, from, 0, NULL, 0) == 0;
        *cut = kept;
        if (hit) add_match(g, g->at, (size_t)(to - g->text));
        g->at = (size_t)(to - g->text) + 1;
    }
    return g->text != NULL;
}

/* Takes the text, unless it looks binary. */
static void text_begin(grep *g, const char *path, char *text, size_t len)
{
    text_drop(g);
    g->files++;
    if (!g->search && memchr(text, 0, len < 8192 ? len : 8192) != NULL) {
        free(text);
        return;
    }
    g->path = strdup(path);
    g->no_memory |= g->path == NULL;
    g->text = text;
    g->len = len;
    g->at = 0;
    g->line = 0;
    g->hit = false;
}

static void load(grep *g, const aio_entry *e)
{
    int fd = openat(e->dir, e->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat st;
    char *text = NULL;
    size_t len = 0;
    if (fd < 0) return;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (uint64_t)st.st_size <= g->max_size)
        text = malloc((size_t)st.st_size + 1);
    for (ssize_t n = 1; text != NULL && n > 0 && len < (size_t)st.st_size; len += n > 0 ? (size_t)n : 0)
        n = read(fd, text + len, (size_t)st.st_size - len);
    close(fd);
    if (text == NULL) return;
    text[len] = 0;
    text_begin(g, e->path, text, len);
}

static bool visit(void *ctx, const aio_entry *e)
{
    grep *g = ctx;
    if (g->stop || g->no_memory) return false;
    if (!S_ISREG(e->st.st_mode) || e->st.st_size == 0) return true;
    if (g->a.include != NULL && aio_list_size(g->a.include) > 0 && !aio_glob_any(g->a.include, e->rel)) return true;
    if (!aio_glob_any(g->a.exclude, e->rel)) load(g, e);
    return true;
}

/* ---- answers ---- */

static void done(void *ctx, guest_req *req)
{
    grep *g = ctx;
    json_t *data;
    if (g->search)
        data = json_pack("{s:s, s:O, s:O}", "file", g->a.file, "matches", g->matches, "line_numbers", g->numbers);
    else
        data = json_pack("{s:s, s:s, s:O, s:I, s:I, s:I, s:b}", "path", g->a.path, "pattern", g->a.pattern, "matches", g->matches,
                         "match_count", (json_int_t)json_array_size(g->matches), "files_searched", g->files, "files_matched",
                         g->hit_files, "truncated", g->truncated);
    if (g->no_memory) {
        json_decref(data);
        aio_reply_fail(req, 500, "no memory for the matches", NULL);
    } else {
        aio_reply_ok(req, data, NULL);
    }
    grep_free(g);
}

static grep *grep_new(const args *a, json_t *body)
{
    grep *g = calloc(1, sizeof *g);
    if (g == NULL) return NULL;
    g->a = *a;
    g->body = json_incref(body);
    g->matches = json_array();
    g->numbers = json_array();
    if (g->a.max == 0 || g->a.max > MATCHES_MAX) g->a.max = MATCHES_MAX;
    if (g->a.before > CONTEXT_MAX) g->a.before = CONTEXT_MAX;
    if (g->a.after > CONTEXT_MAX) g->a.after = CONTEXT_MAX;
    return g;
}

/* "1M", "500K", "1000": false = it is none of these. */
static bool parse_size(const char *text, size_t *out)
{
    char digits[24];
    uint64_t value, unit;
    size_t n = strspn(text, "0123456789");
    if (n == 0 || n > 12) return false;
    snprintf(digits, sizeof digits, "%.*s", (int)n, text);
    const char *end = text + n;
    unit = *end == 'K' || *end == 'k' ? 1u << 10 : *end == 'M' || *end == 'm' ? 1u << 20 : *end == 'G' || *end == 'g' ? 1u << 30 : 1;
    end += unit > 1;
    end += *end == 'B';
    if (*end != 0 || !guest_parse_u64(digits, &value)) return false;
    *out = value > FILE_MAX / unit ? FILE_MAX : (size_t)(value * unit);
    return true;
}

static const aio_field GREP[] = {
    { "path", AIO_TEXT, true, offsetof(args, path) },
    { "pattern", AIO_TEXT, true, offsetof(args, pattern) },
    { "include", AIO_LIST, false, offsetof(args, include) },
    { "exclude", AIO_LIST, false, offsetof(args, exclude) },
    { "case_insensitive", AIO_BOOL, false, offsetof(args, ignore_case) },
    { "fixed_strings", AIO_BOOL, false, offsetof(args, fixed) },
    { "context_before", AIO_COUNT, false, offsetof(args, before) },
    { "context_after", AIO_COUNT, false, offsetof(args, after) },
    { "max_results", AIO_COUNT, false, offsetof(args, max) },
    { "max_file_size", AIO_TEXT, false, offsetof(args, size) },
    { "multiline", AIO_BOOL, false, offsetof(args, multiline) },
    { "offset", AIO_COUNT, false, offsetof(args, offset) },
    { "type", AIO_TEXT, false, offsetof(args, type) },
    { "recursive", AIO_BOOL, false, offsetof(args, recursive) },
    AIO_END,
};

void aio_file_grep(guest_req *req, const char *id)
{
    args a = { .max = 500, .size = "1M", .recursive = true };
    json_auto_t *body = aio_fields(req, GREP, &a);
    guest_fault f = { 0 };
    size_t max_size;
    (void)id;
    if (body == NULL) return;
    if (a.multiline || a.type != NULL) {
        aio_reply_invalid(req, a.multiline ? "multiline" : "type", "is not supported here; use include and a pattern for lines");
        return;
    }
    if (!parse_size(a.size, &max_size)) {
        aio_reply_invalid(req, "max_file_size", "must be a size such as 500K or 1M");
        return;
    }
    grep *g = grep_new(&a, body);
    if (g == NULL || !compile(g, req, "pattern", a.pattern)) {
        if (g == NULL) aio_reply_fail(req, 500, "no memory for a search", NULL);
        else grep_free(g);
        return;
    }
    g->max_size = max_size;
    struct stat st;
    int root = guest_open(a.path, O_RDONLY | O_DIRECTORY, &f);
    if (root < 0 && strcmp(f.code, "not_a_directory") == 0) { /* one file will do */
        size_t len;
        char *text = guest_read_all(a.path, max_size, &len, &st, &f);
        if (text != NULL) text_begin(g, a.path, text, len);
        f.status = text == NULL ? f.status : 0;
    }
    if (root < 0 && f.status != 0) {
        aio_reply_file_fault(req, a.path, "grep", &f);
        grep_free(g);
        return;
    }
    aio_walk_spec spec = { .ctx = g, .hidden = true, .max_depth = a.recursive ? 0 : 1, .visit = visit, .more = more, .done = done,
                           .drop = grep_free };
    aio_walk_start(req, a.path, root, &spec);
}

static const aio_field SEARCH[] = {
    { "file", AIO_TEXT, true, offsetof(args, file) },
    { "regex", AIO_TEXT, true, offsetof(args, regex) },
    { "sudo", AIO_BOOL, false, offsetof(args, sudo) },
    AIO_END,
};

void aio_file_search(guest_req *req, const char *id)
{
    args a = { 0 };
    json_auto_t *body = aio_fields(req, SEARCH, &a);
    guest_fault f = { 0 };
    struct stat st;
    size_t len;
    (void)id;
    if (body == NULL) return;
    grep *g = grep_new(&a, body);
    if (g == NULL || !compile(g, req, "regex", a.regex)) {
        if (g == NULL) aio_reply_fail(req, 500, "no memory for a search", NULL);
        else grep_free(g);
        return;
    }
    g->search = true;
    char *text = guest_read_all(a.file, FILE_MAX, &len, &st, &f);
    if (text == NULL) {
        aio_reply_file_fault(req, a.file, "search", &f);
        grep_free(g);
        return;
    }
    text_begin(g, a.file, text, len);
    aio_walk_spec spec = { .ctx = g, .visit = visit, .more = more, .done = done, .drop = grep_free };
    aio_walk_start(req, a.file, -1, &spec);
}
