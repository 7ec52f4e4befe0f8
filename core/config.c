/* config.c -- the normalized options as C fields, and the runtime's place on disk.
 * lua/paddock/config.lua has validated them: what is checked here only guards against a binding that did not. */
#include "core.h"
#include "fd.h"
#include "proc.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HALF ".new" /* ends the name of a record that is being made */

static int number(pdk_view options, const char *key, double *out, pdk_error *err)
{
    if (!pdk_view_num(pdk_view_get(options, key), out) || !isfinite(*out) || *out < 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option %s must be a number of seconds", key);
    return 0;
}

static int numbers(pdk_config *c, pdk_view o, pdk_error *err)
{
    const struct { const char *key; double *to; } all[] = {
        { "idle_timeout", &c->idle_timeout },   { "reap_interval", &c->reap_interval },   { "orphan_ttl", &c->orphan_ttl },
        { "ready_timeout", &c->ready_timeout }, { "ready_interval", &c->ready_interval }, { "stop_timeout", &c->stop_timeout },
        { "health_ttl", &c->health_ttl },       { "discover_timeout", &c->discover_timeout },
        { "command_timeout", &c->command_timeout },
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (number(o, all[i].key, all[i].to, err) < 0)
            return -1;
    pdk_view ownership = pdk_view_get(o, "ownership");
    return number(ownership, "ttl", &c->ttl, err) < 0 || number(ownership, "renew_interval", &c->renew_interval, err) < 0 ? -1 : 0;
}

/* What requirements.lua starts from. */
static void put_base(pdk_pack *base, pdk_view o)
{
    pdk_mark m = pdk_begin_map(base);
    pdk_kv_view(base, &m, "image", pdk_view_get(o, "image"));
    pdk_kv_view(base, &m, "env", pdk_view_get(o, "environment"));
    pdk_kv_view(base, &m, "limits", pdk_view_get(o, "limits"));
    pdk_kv_view(base, &m, "network", pdk_view_get(o, "network"));
    pdk_end(base, &m);
}

int pdk_config_read(pdk_config *c, pdk_view options, pdk_pack *policy_base, pdk_error *err)
{
    if (!pdk_pack_copy(&c->options, options))
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the options");
    pdk_view o = pdk_view_of(&c->options);
    if (numbers(c, o, err) < 0)
        return -1;
    c->state_dir = pdk_view_dup(pdk_view_get(o, "state_dir"));
    c->data_dir = pdk_view_dup(pdk_view_get(o, "data_dir"));
    c->user = pdk_view_dup(pdk_view_get(o, "user"));
    const char *scope = pdk_info_str(o, "scope");
    snprintf(c->scope, sizeof c->scope, "%s", scope != NULL ? scope : "");
    if (!pdk_view_int(pdk_view_get(o, "replicas"), &c->replicas))
        c->replicas = 3;
    if (!pdk_view_int(pdk_view_get(o, "max_sandboxes"), &c->max_sandboxes))
        c->max_sandboxes = -1;
    if (!pdk_view_int(pdk_view_get(pdk_view_get(o, "workers"), "max"), &c->workers))
        c->workers = 1024;
    c->threads = pdk_view_bool(pdk_view_get(o, "threads"), true);
    put_base(policy_base, o);
    return policy_base->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the options") : 0;
}

void pdk_config_free(pdk_config *c)
{
    pdk_pack_free(&c->options);
    free(c->state_dir);
    free(c->data_dir);
    free(c->user);
}

static int make_path(const char *path, pdk_error *err)
{
    char part[4096];
    size_t len = strlen(path);
    if (path[0] != '/' || len >= sizeof part)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "state_dir must be an absolute path of at most %zu bytes", sizeof part - 1);
    memcpy(part, path, len + 1);
    for (size_t i = 1; i <= len; i++) {
        if (part[i] != '/' && part[i] != '\0')
            continue;
        char kept = part[i];
        part[i] = '\0';
        int sys = mkdir(part, 0700) < 0 ? errno : 0;
        if (sys != 0 && sys != EEXIST && !(sys == EROFS && access(part, X_OK) == 0))
            return pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot make the state directory %s (option state_dir)", part);
        part[i] = kept;
    }
    struct stat st;
    if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode))
        return pdk_fail(err, PDK_E_IO_ERROR, ENOTDIR, "the state directory %s cannot be used (option state_dir)", path);
    if (st.st_uid != geteuid() || (st.st_mode & 022) != 0)
        return pdk_fail(err, PDK_E_IO_ERROR, 0,
                        "the state directory %s must be this user's and not writable by others: chown and chmod 0700 it", path);
    return 0;
}

/* Field 22 of /proc/self/stat: with the pid it names one process for good. */
static unsigned long long start_time(void)
{
    char text[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (n <= 0)
        return 0;
    text[n] = '\0';
    char *p = strrchr(text, ')'); /* the name before it may hold anything */
    for (int field = 2; p != NULL && field < 22; field++)
        p = strchr(p + 1, ' ');
    return p == NULL ? 0 : strtoull(p + 1, NULL, 10);
}

/* Whether the file is there still, under the one name that it has had since it was locked. */
static bool has_name(int fd)
{
    struct stat st;
    return fstat(fd, &st) == 0 && st.st_nlink > 0;
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

/* Takes away the records of runtimes that were killed: their locks are free. Nobody can be them again, so their leases end.
 *
 * A record is locked before it gets its name (make_record), and unlinked only by who has the lock. So a free lock on a file that
 * has its name still is a dead runtime's; a file without a name is one that another sweep has just taken away. */
void pdk_state_dir_sweep(pdk_runtime *rt)
{
    char id[64], folder[4200];
    if (rt->config.state_dir == NULL)
        return;
    snprintf(folder, sizeof folder, "%s/runtimes", rt->config.state_dir);
    DIR *dir = opendir(folder);
    for (struct dirent *one = dir != NULL ? readdir(dir) : NULL; one != NULL; one = readdir(dir)) {
        size_t len = strlen(one->d_name);
        bool half = ends_with(one->d_name, HALF); /* of a start: it stands for no leases */
        if (!half && (!ends_with(one->d_name, ".json") || len - 5 >= sizeof id))
            continue;
        PDK_AUTO_ERROR ignored = PDK_NO_ERROR;
        PDK_AUTO_FD fd = openat(dirfd(dir), one->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        if (fd < 0 || pdk_lock_range(fd, F_WRLCK, 0, 1, &ignored) != 1 || !has_name(fd))
            continue;
        snprintf(id, sizeof id, "%.*s", half ? 0 : (int)(len - 5), one->d_name);
        if (!half && pdk_lease_owner_gone(rt->lease, id, rt->stops_at_once, &ignored) < 0) /* the record goes on saying so */
            pdk_emit(rt, PDK_WARN, "dead_owner_kept", NULL, NULL, id, &ignored);
        else
            unlinkat(dirfd(dir), one->d_name, 0);
    }
    if (dir != NULL)
        closedir(dir);
}

/* Makes the file with that text, locked before anybody can find it under its name: the descriptor, or -1. */
static int make_record(const char *path, const char *text, size_t n, pdk_error *err)
{
    char half[4400];
    for (int tries = 0; tries < 8; tries++) {
        snprintf(half, sizeof half, "%s.%d" HALF, path, tries);
        PDK_AUTO_FD fd = open(half, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        if (fd < 0)
            return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot make the runtime's record %s", half);
        int rc = pdk_lock_range(fd, F_WRLCK, 0, 1, err);
        if (rc < 0)
            return -1;
        if (rc == 0) /* somebody who sweeps came between the file and its lock, and takes it away */
            continue;
        if (write(fd, text, n) != (ssize_t)n) {
            int sys = errno;
            unlink(half);
            return pdk_fail(err, PDK_E_IO_ERROR, sys, "cannot write the runtime's record %s", path);
        }
        if (rename(half, path) == 0)
            return pdk_fd_take(&fd);
        if (errno != ENOENT) /* the same, and it has unlinked it */
            return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot give the runtime's record its name %s", path);
    }
    return pdk_fail(err, PDK_E_IO_ERROR, 0, "cannot keep the runtime's record %s: something keeps removing it", path);
}

/* runtimes/<id>.json: how `paddock policy reload` and `ps` find this runtime. Its lock says that we live. */
static int write_record(pdk_runtime *rt, pdk_error *err)
{
    char text[256];
    int n = snprintf(text, sizeof text, "{\"runtime\":\"%s\",\"pid\":%d,\"start_time\":%llu,\"started_at\":%.3f,\"signals\":%s}\n",
                     rt->id, (int)getpid(), start_time(), pdk_to_seconds(pdk_now_wall()),
                     pdk_view_bool(pdk_view_get(pdk_view_of(&rt->config.options), "signals"), false) ? "true" : "false");
    size_t len = strlen(rt->config.state_dir) + sizeof rt->id + 32;
    rt->record_path = malloc(len);
    if (rt->record_path == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the runtime's record");
    snprintf(rt->record_path, len, "%s/runtimes", rt->config.state_dir);
    if (mkdir(rt->record_path, 0700) < 0 && errno != EEXIST)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot make %s", rt->record_path);
    snprintf(rt->record_path, len, "%s/runtimes/%s.json", rt->config.state_dir, rt->id);
    rt->record_fd = make_record(rt->record_path, text, (size_t)n, err);
    return rt->record_fd < 0 ? -1 : 0;
}

int pdk_state_dir_make(pdk_runtime *rt, pdk_error *err)
{
    if (rt->config.state_dir == NULL)
        return 0;
    if (make_path(rt->config.state_dir, err) < 0)
        return -1;
    PDK_AUTO_ERROR why = PDK_NO_ERROR;
    if (write_record(rt, &why) < 0) { /* it is an index for operators: a full disk must not keep a teardown from running */
        pdk_emit(rt, PDK_WARN, "runtime_record_failed", NULL, NULL, NULL, &why);
        pdk_state_dir_leave(rt);
    }
    return 0;
}

bool pdk_state_dir_shared(pdk_runtime *rt)
{
    char path[4200];
    if (rt->record_path == NULL)
        return false;
    snprintf(path, sizeof path, "%s/runtimes", rt->config.state_dir);
    DIR *all = opendir(path);
    bool found = false;
    for (struct dirent *e; all != NULL && !found && (e = readdir(all)) != NULL;) {
        PDK_AUTO_FD fd = strcmp(e->d_name, strrchr(rt->record_path, '/') + 1) == 0
                             ? -1
                             : openat(dirfd(all), e->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
        found = fd >= 0 && pdk_lock_test(fd, F_WRLCK, 0, 1, NULL) == 1; /* its runtime lives */
    }
    if (all != NULL)
        closedir(all);
    return found;
}

void pdk_state_dir_leave(pdk_runtime *rt)
{
    if (rt->record_fd >= 0) {
        unlink(rt->record_path);
        close(rt->record_fd);
        rt->record_fd = -1;
    }
    free(rt->record_path);
    rt->record_path = NULL;
}
