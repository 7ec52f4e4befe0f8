/* policy_answer.c -- what resolve and compose may answer. A script is wrong in a field: the message names it. */
#include "policy_internal.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define MOST_MOUNTS 256
#define MOST_PATH   4096
#define MOST_ENV    1024
#define MOST_TEXT   (128 << 10) /* one value of the environment: what the kernel takes */

__attribute__((format(printf, 2, 3))) static int wrong_is(pdk_wrong w, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(w.text, w.size, fmt, args);
    va_end(args);
    return -1;
}

static const char *type_of(pdk_view v)
{
    switch (pdk_view_tag(v)) {
    case 'n': return "nil";
    case 't':
    case 'f': return "a boolean";
    case 'i':
    case 'd': return "a number";
    case 's': return "a string";
    default: return "a table";
    }
}

static bool is_map(pdk_view v) /* an empty table is one, nil is an empty one */
{
    return pdk_view_is_nil(v) || pdk_view_tag(v) == '{';
}

static bool has_nul(const char *s, size_t len)
{
    return memchr(s, '\0', len) != NULL;
}

static bool printable(const char *s, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)s[i] < 0x20 || s[i] == 0x7f)
            return false;
    return true;
}

/* ---- requirements ---- */

/* A short text such as an image's name: nil, or 1 to `most` printable bytes. */
static int check_name(pdk_view v, const char *field, size_t most, pdk_wrong w)
{
    size_t len;
    const char *s = pdk_view_str(v, &len);
    if (pdk_view_is_nil(v))
        return 0;
    if (s == NULL)
        return wrong_is(w, "%s must be a string, not %s", field, type_of(v));
    if (len == 0 || len > most || !printable(s, len))
        return wrong_is(w, "%s must have 1 to %zu bytes, none of them a control character", field, most);
    return 0;
}

/* One pair of env or labels. */
static int check_pair(pdk_view k, pdk_view v, const char *field, pdk_wrong w)
{
    size_t k_len = 0, v_len = 0;
    const char *key = pdk_view_str(k, &k_len), *value = pdk_view_str(v, &v_len);
    if (key == NULL || k_len == 0 || k_len > 255 || has_nul(key, k_len) || memchr(key, '=', k_len) != NULL)
        return wrong_is(w, "a name in %s must be a string of 1 to 255 bytes without '='", field);
    if (value == NULL)
        return wrong_is(w, "%s.%s must be a string, not %s", field, key, type_of(v));
    if (v_len > MOST_TEXT || has_nul(value, v_len))
        return wrong_is(w, "%s.%s is too long or has a NUL in it", field, key);
    return 0;
}

static int check_strings(pdk_view map, const char *field, pdk_wrong w)
{
    size_t cursor = 0;
    pdk_view k, v;
    if (!is_map(map))
        return wrong_is(w, "%s must be a table of name = string, not %s", field,
                        pdk_view_tag(map) == '[' ? "a list" : type_of(map));
    if (pdk_view_count(map) > MOST_ENV)
        return wrong_is(w, "%s has more than %d entries", field, MOST_ENV);
    while (pdk_view_next(map, &cursor, &k, &v))
        if (check_pair(k, v, field, w) < 0)
            return -1;
    return 0;
}

static int check_limits(pdk_view limits, pdk_wrong w)
{
    size_t cursor = 0;
    pdk_view k, v;
    if (!is_map(limits))
        return wrong_is(w, "limits must be a table { memory =, cpus =, pids = }, not %s", type_of(limits));
    while (pdk_view_next(limits, &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        int64_t n;
        double d;
        if (key != NULL && strcmp(key, "cpus") == 0) {
            if (!pdk_view_num(v, &d) || !(d > 0 && d <= 100000))
                return wrong_is(w, "limits.cpus must be a number of processors, more than 0");
        } else if (key != NULL && (strcmp(key, "memory") == 0 || strcmp(key, "pids") == 0)) {
            if (!pdk_view_int(v, &n) || n <= 0)
                return wrong_is(w, "limits.%s must be a whole number, more than 0", key);
        } else
            return wrong_is(w, "limits.%s is unknown (memory, cpus, pids)", key == NULL ? "[?]" : key);
    }
    return 0;
}

/* The pairs of `over`, then those of `base` that it has not. Writes nothing when there are none. */
static void put_merged(pdk_pack *out, pdk_mark *m, const char *key, pdk_view base, pdk_view over)
{
    size_t cursor = 0, len;
    pdk_view k, v;
    pdk_put_cstr(out, key);
    pdk_mark inner = pdk_begin_map(out);
    while (pdk_view_next(over, &cursor, &k, &v)) {
        pdk_put_view(out, k);
        pdk_put_view(out, v);
        inner.count++;
    }
    cursor = 0;
    while (pdk_view_next(base, &cursor, &k, &v)) {
        const char *name = pdk_view_str(k, &len);
        if (name == NULL || !pdk_view_is_nil(pdk_view_get_n(over, name, len)) || pdk_view_is_nil(v))
            continue;
        pdk_put_view(out, k);
        pdk_put_view(out, v);
        inner.count++;
    }
    pdk_end(out, &inner);
    m->count++;
}

static int check_fields(pdk_view answer, const char *const *known, const char *what, pdk_wrong w)
{
    size_t cursor = 0;
    pdk_view k, v;
    while (pdk_view_next(answer, &cursor, &k, &v)) {
        const char *key = pdk_view_str(k, NULL);
        int i = 0;
        while (known[i] != NULL && (key == NULL || strcmp(known[i], key) != 0))
            i++;
        if (known[i] == NULL)
            return wrong_is(w, "%s has an unknown field '%s'", what, key == NULL ? "?" : key);
    }
    return 0;
}

int pdk_answer_requirements(pdk_view answer, pdk_view base, pdk_pack *out, pdk_wrong w)
{
    static const char *const known[] = { "image", "env", "limits", "network", "labels", "require", "options", "probe", NULL };
    if (pdk_view_tag(answer) != '{')
        return wrong_is(w, "must answer a table { image =, env =, limits =, ... }, not %s",
                        pdk_view_tag(answer) == '[' ? "a list" : type_of(answer));
    pdk_view image = pdk_view_get(answer, "image"), env = pdk_view_get(answer, "env");
    pdk_view limits = pdk_view_get(answer, "limits"), network = pdk_view_get(answer, "network");
    pdk_view labels = pdk_view_get(answer, "labels"), require = pdk_view_get(answer, "require");
    if (check_fields(answer, known, "the answer", w) < 0 || check_name(image, "image", 512, w) < 0 ||
        check_strings(env, "env", w) < 0 || check_limits(limits, w) < 0 || check_name(network, "network", 64, w) < 0 ||
        check_strings(labels, "labels", w) < 0)
        return -1;
    pdk_view own = pdk_view_get(answer, "options"), probe = pdk_view_get(answer, "probe");
    if (!is_map(require) || !is_map(own))
        return wrong_is(w, "%s must be a table of name = value, not %s", is_map(require) ? "options" : "require",
                        type_of(is_map(require) ? own : require));
    if (!pdk_view_is_nil(probe) && pdk_view_tag(probe) != 't' && pdk_view_tag(probe) != 'f')
        return wrong_is(w, "probe must be true or false, not %s", type_of(probe));
    pdk_view base_env = pdk_view_get(base, "env");
    if (pdk_view_is_nil(base_env))
        base_env = pdk_view_get(base, "environment");
    pdk_mark m = pdk_begin_map(out);
    pdk_kv_view(out, &m, "image", pdk_view_is_nil(image) ? pdk_view_get(base, "image") : image);
    put_merged(out, &m, "env", base_env, env);
    put_merged(out, &m, "limits", pdk_view_get(base, "limits"), limits);
    if (pdk_view_is_nil(network))
        network = pdk_view_get(base, "network");
    if (pdk_view_is_nil(network))
        pdk_kv_cstr(out, &m, "network", "none");
    else
        pdk_kv_view(out, &m, "network", network);
    put_merged(out, &m, "labels", pdk_view_get(base, "labels"), labels);
    put_merged(out, &m, "require", PDK_NO_VIEW, require);
    put_merged(out, &m, "options", PDK_NO_VIEW, own);
    if (pdk_view_bool(probe, false))
        pdk_kv_bool(out, &m, "probe", true);
    pdk_end(out, &m);
    return out->failed ? wrong_is(w, "the answer is too large") : 0;
}

/* ---- mounts ---- */

/* An absolute path without empty, "." or ".." parts; "/" itself only when `root`. */
static bool normal_path(const char *s, size_t len, bool root)
{
    if (len == 0 || len > MOST_PATH || s[0] != '/' || has_nul(s, len))
        return false;
    if (len == 1)
        return root;
    for (size_t at = 0; at < len;) {
        size_t part = at + 1, end = part;
        while (end < len && s[end] != '/')
            end++;
        size_t n = end - part;
        if (n == 0 || (n == 1 && s[part] == '.') || (n == 2 && s[part] == '.' && s[part + 1] == '.'))
            return false;
        at = end;
    }
    return true;
}

/* /proc, /sys, /dev and what is below them belong to the sandbox itself. */
static bool forbidden_target(const char *s)
{
    static const char *const kept[] = { "/proc", "/sys", "/dev" };
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        size_t n = strlen(kept[i]);
        if (strncmp(s, kept[i], n) == 0 && (s[n] == '\0' || s[n] == '/'))
            return true;
    }
    return false;
}

/* "C:\\dir", "C:/dir" or "\\\\host\\dir", without "." and ".." parts: a path of the engine's machine. */
static bool windows_path(const char *s, size_t len)
{
    bool drive = len >= 3 && ((s[0] >= 'A' && s[0] <= 'Z') || (s[0] >= 'a' && s[0] <= 'z')) && s[1] == ':' &&
                 (s[2] == '\\' || s[2] == '/');
    if (len > MOST_PATH || has_nul(s, len) || (!drive && strncmp(s, "\\\\", 2) != 0))
        return false;
    for (size_t at = 0; at < len;) {
        size_t n = strcspn(s + at, "\\/");
        if ((n == 1 && s[at] == '.') || (n == 2 && s[at] == '.' && s[at + 1] == '.'))
            return false;
        at += n + 1;
    }
    return true;
}

/* An entry that is no mount, but { exclude = target }. */
static int check_exclude(pdk_view entry, const char *what, pdk_wrong w)
{
    static const char *const known[] = { "exclude", NULL };
    size_t len = 0;
    const char *target = pdk_view_str(pdk_view_get(entry, "exclude"), &len);
    if (check_fields(entry, known, what, w) < 0)
        return -1;
    if (target == NULL || !normal_path(target, len, false))
        return wrong_is(w, "exclude of %s must be an absolute path without '.', '..' or '//', and not /", what);
    return 0;
}

/* Where the source is, and where this machine sees it. */
static int check_source(pdk_view mount, const char *what, pdk_wrong w)
{
    size_t len = 0;
    pdk_view here = pdk_view_get(mount, "here"), group = pdk_view_get(mount, "optional");
    const char *source = pdk_view_str(pdk_view_get(mount, "source"), &len);
    bool engines = !pdk_view_is_nil(here); /* then the source may be of another machine's kind */
    if (source == NULL || !(normal_path(source, len, true) || (engines && windows_path(source, len))))
        return wrong_is(w, "source of %s must be an absolute path without '.', '..' or '//'", what);
    const char *local = pdk_view_str(here, &len);
    if (engines && (local == NULL || !normal_path(local, len, true)))
        return wrong_is(w, "here of %s must be an absolute path without '.', '..' or '//'", what);
    return check_name(group, "optional", 64, w);
}

static int check_mount(pdk_view mount, size_t i, pdk_wrong w)
{
    static const char *const known[] = { "source", "target", "read_only", "create", "if_exists", "owner_only", "here",
                                         "optional", NULL };
    static const char *const flags[] = { "read_only", "if_exists", "owner_only" };
    char what[32];
    snprintf(what, sizeof what, "mount %zu", i);
    if (pdk_view_tag(mount) != '{')
        return wrong_is(w, "%s must be a table { source =, target =, ... }, not %s", what, type_of(mount));
    if (!pdk_view_is_nil(pdk_view_get(mount, "exclude")))
        return check_exclude(mount, what, w);
    if (check_fields(mount, known, what, w) < 0 || check_source(mount, what, w) < 0)
        return -1;
    size_t len = 0;
    const char *target = pdk_view_str(pdk_view_get(mount, "target"), &len);
    if (target == NULL || !normal_path(target, len, false))
        return wrong_is(w, "target of %s must be an absolute path without '.', '..' or '//', and not /", what);
    if (forbidden_target(target))
        return wrong_is(w, "target of %s, %s: nothing may be mounted at or below /proc, /sys and /dev", what, target);
    for (size_t f = 0; f < sizeof flags / sizeof flags[0]; f++) {
        char tag = pdk_view_tag(pdk_view_get(mount, flags[f]));
        if (tag != 't' && tag != 'f' && tag != 'n')
            return wrong_is(w, "%s of %s must be true or false", flags[f], what);
    }
    pdk_view create = pdk_view_get(mount, "create");
    const char *mode = pdk_view_str(create, &len);
    if (!pdk_view_is_nil(create) &&
        (mode == NULL || len < 3 || len > 4 || strspn(mode, "01234567") != len || (len == 4 && mode[0] != '0')))
        return wrong_is(w, "create of %s must be a mode such as \"0777\"", what);
    return 0;
}

static void put_mount(pdk_pack *out, pdk_view mount)
{
    pdk_mark m = pdk_begin_map(out);
    pdk_view exclude = pdk_view_get(mount, "exclude");
    if (!pdk_view_is_nil(exclude)) {
        pdk_kv_view(out, &m, "exclude", exclude);
        pdk_end(out, &m);
        return;
    }
    pdk_kv_view(out, &m, "source", pdk_view_get(mount, "source"));
    pdk_kv_view(out, &m, "here", pdk_view_get(mount, "here"));
    pdk_kv_view(out, &m, "optional", pdk_view_get(mount, "optional"));
    pdk_kv_view(out, &m, "target", pdk_view_get(mount, "target"));
    pdk_kv_bool(out, &m, "read_only", pdk_view_bool(pdk_view_get(mount, "read_only"), true));
    pdk_kv_view(out, &m, "create", pdk_view_get(mount, "create"));
    pdk_kv_bool(out, &m, "if_exists", pdk_view_bool(pdk_view_get(mount, "if_exists"), false));
    pdk_kv_bool(out, &m, "owner_only", pdk_view_bool(pdk_view_get(mount, "owner_only"), false));
    pdk_end(out, &m);
}

static bool target_taken(pdk_view answer, size_t before, pdk_view target)
{
    size_t cursor = 0;
    pdk_view k, v;
    for (size_t i = 0; !pdk_view_is_nil(target) && i < before && pdk_view_next(answer, &cursor, &k, &v); i++)
        if (pdk_view_equal(pdk_view_get(v, "target"), target))
            return true;
    return false;
}

int pdk_answer_mounts(pdk_view answer, pdk_pack *out, pdk_log *log, pdk_wrong w)
{
    size_t cursor = 0, count = pdk_view_count(answer);
    pdk_view k, v;
    if (pdk_view_tag(answer) != '[' && (pdk_view_tag(answer) != '{' || count > 0))
        return wrong_is(w, "must answer a list of mounts, not %s", count > 0 ? "one mount" : type_of(answer));
    if (count > MOST_MOUNTS)
        return wrong_is(w, "answered more than %d mounts", MOST_MOUNTS);
    pdk_mark m = pdk_begin_list(out);
    for (size_t i = 0; pdk_view_next(answer, &cursor, &k, &v); i++) {
        if (check_mount(v, i + 1, w) < 0)
            return -1;
        pdk_view target = pdk_view_get(v, "target");
        if (target_taken(answer, i, target)) {
            if (log != NULL)
                pdk_log_event(log, PDK_WARN, "mount_dropped", PDK_STR("target", pdk_view_str(target, NULL)),
                              PDK_STR("reason", "an earlier mount has this target"));
            continue;
        }
        put_mount(out, v);
        m.count++;
    }
    pdk_end(out, &m);
    return out->failed ? wrong_is(w, "the answer is too large") : 0;
}
