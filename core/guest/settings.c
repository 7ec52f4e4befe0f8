/* settings.c -- what the guest was started with, and how faults are made.
 * Why strict: a misspelt key or number that was skipped would weaken the sandbox without a word, so both end the start. */
#include "guest.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

guest_settings guest_conf = { .memory_events_fd = -1 };

int guest_fail(guest_fault *f, int status, const char *code, int sys, const char *fmt, ...)
{
    f->status = status;
    f->code = code;
    f->sys = sys;
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(f->message, sizeof f->message, fmt, ap);
    va_end(ap);
    return -1;
}

int guest_fail_errno(guest_fault *f, int sys, const char *what, const char *path)
{
    static const struct {
        int sys, status;
        const char *code;
    } MAP[] = {
        { ENOENT, 404, "not_found" },        { EACCES, 403, "permission_denied" },
        { EPERM, 403, "permission_denied" }, { EEXIST, 409, "already_exists" },
        { EISDIR, 409, "is_directory" },     { ENOTDIR, 409, "not_a_directory" },
        { EXDEV, 403, "escapes" },           { ELOOP, 403, "escapes" },
        { EROFS, 403, "read_only" },         { ENOSPC, 507, "no_space" },
        { EDQUOT, 507, "no_space" },         { ENAMETOOLONG, 400, "invalid_path" },
        { ENOMEM, 503, "no_memory" },        { EMFILE, 503, "no_descriptors" },
        { ENFILE, 503, "no_descriptors" },   { EFBIG, 413, "too_large" },
    };
    for (size_t i = 0; i < sizeof MAP / sizeof MAP[0]; i++)
        if (MAP[i].sys == sys)
            return guest_fail(f, MAP[i].status, MAP[i].code, sys, "%s %.120s: %s", what, path, strerror(sys));
    return guest_fail(f, 500, "io_error", sys, "%s %.120s: %s", what, path, strerror(sys));
}

bool guest_parse_u64(const char *text, uint64_t *out)
{
    size_t n = strlen(text);
    if (n < 1 || n > 20)
        return false;
    uint64_t v = 0;
    for (size_t i = 0; i < n; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        if (__builtin_mul_overflow(v, UINT64_C(10), &v) || __builtin_add_overflow(v, (uint64_t)(text[i] - '0'), &v))
            return false;
    }
    *out = v;
    return true;
}

bool guest_env_name_ok(const char *assignment)
{
    const char *p = assignment;
    if (!(*p == '_' || (*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z')))
        return false;
    while (*p == '_' || (*p >= 'A' && *p <= 'Z') || (*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9'))
        p++;
    return *p == '=';
}

static int list_add(char ***list, const char *value, guest_fault *f)
{
    size_t n = 0;
    while (*list != NULL && (*list)[n] != NULL)
        n++;
    char **grown = realloc(*list, (n + 2) * sizeof *grown);
    if (grown == NULL)
        return guest_fail(f, 500, "no_memory", ENOMEM, "no memory for a setting");
    *list = grown;
    grown[n + 1] = NULL;
    grown[n] = strdup(value);
    return grown[n] != NULL ? 0 : guest_fail(f, 500, "no_memory", ENOMEM, "no memory for a setting");
}

/* "/a/b/" becomes "/a/b"; only absolute paths without "." and ".." components are taken. */
static int path_normal(const char *key, const char *value, char **out, guest_fault *f)
{
    if (value[0] != '/' || strlen(value) > 4000)
        return guest_fail(f, 500, "invalid_setting", 0, "setting %s is not an absolute path", key);
    char *copy = strdup(value);
    if (copy == NULL)
        return guest_fail(f, 500, "no_memory", ENOMEM, "no memory for setting %s", key);
    char *to = copy;
    for (const char *p = value; *p != '\0';) {
        while (*p == '/')
            p++;
        size_t len = strcspn(p, "/");
        if (len == 0)
            break;
        if ((len == 1 && p[0] == '.') || (len == 2 && p[0] == '.' && p[1] == '.')) {
            free(copy);
            return guest_fail(f, 500, "invalid_setting", 0, "setting %s has a dot component", key);
        }
        *to++ = '/';
        memmove(to, p, len);
        to += len;
        p += len;
    }
    if (to == copy)
        *to++ = '/';
    *to = '\0';
    free(*out);
    *out = copy;
    return 0;
}

static int set_number(const char *key, const char *value, uint64_t max, uint64_t *out, guest_fault *f)
{
    if (!guest_parse_u64(value, out) || *out > max)
        return guest_fail(f, 500, "invalid_setting", 0, "setting %s=%.40s is not a number up to %llu", key, value,
                          (unsigned long long)max);
    return 0;
}

static int set_text(char **out, const char *value, guest_fault *f)
{
    free(*out);
    *out = strdup(value);
    return *out != NULL ? 0 : guest_fail(f, 500, "no_memory", ENOMEM, "no memory for a setting");
}

static int set_path(const char *key, const char *value, guest_fault *f)
{
    char *path = NULL;
    if (path_normal(key, value, &path, f) < 0)
        return -1;
    if (strcmp(key, "workspace") == 0) {
        free(guest_conf.workspace);
        guest_conf.workspace = path;
        return 0;
    }
    int rc = list_add(&guest_conf.mounts, path, f);
    free(path);
    return rc;
}

static int set_one(const char *key, const char *value, guest_fault *f)
{
    guest_settings *c = &guest_conf;
    uint64_t n = 0;
    if (strcmp(key, "generation") == 0)
        return set_text(&c->generation, value, f);
    if (strcmp(key, "home") == 0)
        return set_text(&c->home, value, f);
    if (strcmp(key, "user") == 0)
        return set_text(&c->user, value, f);
    if (strcmp(key, "listen") == 0)
        return set_text(&c->listen, value, f);
    if (strcmp(key, "secret") == 0)
        return *value != '\0' ? set_text(&c->secret, value, f) : guest_fail(f, 500, "invalid_setting", 0, "setting secret is empty");
    if (strcmp(key, "workspace") == 0 || strcmp(key, "mount") == 0)
        return set_path(key, value, f);
    if (strcmp(key, "token") == 0)
        return set_number(key, value, UINT64_MAX, &c->token, f);
    if (strcmp(key, "env") == 0) {
        if (!guest_env_name_ok(value))
            return guest_fail(f, 500, "invalid_setting", 0, "setting env=%.40s has no valid name", value);
        return list_add(&c->env, value, f);
    }
    if (strcmp(key, "max_output") == 0)
        return set_number(key, value, UINT64_C(1) << 40, &c->max_output, f);
    int rc = 1;
    if (strcmp(key, "max_sessions") == 0 && (rc = set_number(key, value, 100000, &n, f)) == 0)
        c->max_sessions = (unsigned)n;
    else if (strcmp(key, "max_connections") == 0 && (rc = set_number(key, value, 100000, &n, f)) == 0)
        c->max_connections = (unsigned)n;
    else if (strcmp(key, "memory_events_fd") == 0 && (rc = set_number(key, value, 1000000, &n, f)) == 0)
        c->memory_events_fd = (int)n;
    else if (strcmp(key, "orphan_ttl") == 0) {
        char *end = NULL;
        c->orphan_ttl = strtod(value, &end);
        if (end == value || *end != '\0' || !(c->orphan_ttl >= 0 && c->orphan_ttl <= 1e9))
            return guest_fail(f, 500, "invalid_setting", 0, "setting orphan_ttl=%.40s is not seconds", value);
        rc = 0;
    }
    return rc <= 0 ? rc : guest_fail(f, 500, "invalid_setting", 0, "unknown setting %.60s", key);
}

static int longer_first(const void *a, const void *b)
{
    size_t la = strlen(*(char *const *)a), lb = strlen(*(char *const *)b);
    return la < lb ? 1 : la > lb ? -1 : 0;
}

static int set_defaults(guest_fault *f)
{
    guest_settings *c = &guest_conf;
    if (c->generation == NULL || c->generation[0] == '\0')
        return guest_fail(f, 500, "invalid_setting", 0, "setting generation is missing");
    if (c->workspace == NULL && set_path("workspace", "/workspace", f) < 0)
        return -1;
    if (c->home == NULL && set_text(&c->home, c->workspace, f) < 0)
        return -1;
    if (c->user == NULL && set_text(&c->user, "sandbox", f) < 0)
        return -1;
    if (list_add(&c->mounts, c->workspace, f) < 0 || list_add(&c->mounts, "/tmp", f) < 0)
        return -1;
    if (list_add(&c->mounts, "/", f) < 0)
        return -1;
    size_t n = 0;
    while (c->mounts[n] != NULL)
        n++;
    qsort(c->mounts, n, sizeof c->mounts[0], longer_first);
    return 0;
}

int guest_settings_parse(const char *bytes, size_t len, guest_fault *f)
{
    guest_conf.max_output = 8u << 20;
    guest_conf.max_sessions = 64;
    guest_conf.max_connections = 256;
    for (size_t at = 0; at < len;) {
        size_t n = strnlen(bytes + at, len - at);
        char *entry = strndup(bytes + at, n);
        if (entry == NULL)
            return guest_fail(f, 500, "no_memory", ENOMEM, "no memory for the settings");
        char *eq = strchr(entry, '=');
        int rc = 0;
        if (eq != NULL) {
            *eq = '\0';
            rc = set_one(entry, eq + 1, f);
        } else if (n > 0) {
            rc = guest_fail(f, 500, "invalid_setting", 0, "setting without a value: %.60s", entry);
        }
        free(entry);
        if (rc < 0)
            return -1;
        at += n + 1;
    }
    return set_defaults(f);
}
