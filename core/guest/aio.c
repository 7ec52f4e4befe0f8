/* aio.c -- the AIO plane's front: which route is whose, and GET /v1/sandbox. See aio.h. */
#include "aio.h"

#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#define AIO_VERSION "1.9.4" /* of the API that this plane follows */

typedef struct route {
    const char *method, *path; /* a path that ends with / takes an id behind it; then `tail` follows the id */
    const char *tail;
    aio_handler *fn;
} route;

static void sandbox(guest_req *req, const char *id)
{
    struct utsname u;
    char zone[64] = "UTC";
    (void)id;
    uname(&u);
    ssize_t n = readlink("/etc/localtime", zone, sizeof zone - 1);
    if (n > 0) zone[n] = 0;
    const char *name = strstr(zone, "zoneinfo/");
    const char *home = guest_conf.home, *workspace = guest_conf.workspace;
    json_t *system = json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:[]}", "os", u.sysname, "os_version", u.release, "arch",
                               u.machine, "user", guest_conf.user, "home_dir", home, "workspace", workspace, "timezone",
                               name ? name + 9 : "UTC", "occupied_ports");
    guest_reply_json(req, 200, json_pack("{s:b, s:s, s:s, s:s, s:s, s:s, s:{s:o, s:{s:[], s:[]}, s:[]}, s:o}", "success", 1,
                                         "message", "Operation successful", "data", "paddock sandbox", "home_dir", home,
                                         "workspace", workspace, "version", AIO_VERSION, "detail", "system", system, "runtime",
                                         "python", "nodejs", "utils", "paddock", guest_state_json()));
}

static const route ROUTES[] = {
    { "GET", "/v1/sandbox", NULL, sandbox },
    { "POST", "/v1/shell/exec", NULL, aio_shell_exec },
    { "POST", "/v1/shell/view", NULL, aio_shell_view },
    { "POST", "/v1/shell/wait", NULL, aio_shell_wait },
    { "POST", "/v1/shell/write", NULL, aio_shell_write },
    { "POST", "/v1/shell/kill", NULL, aio_shell_kill },
    { "POST", "/v1/shell/sessions/create", NULL, aio_shell_create },
    { "POST", "/v1/shell/sessions/update", NULL, aio_shell_update },
    { "GET", "/v1/shell/sessions/stats", NULL, aio_shell_stats },
    { "GET", "/v1/shell/sessions", NULL, aio_shell_list },
    { "DELETE", "/v1/shell/sessions", NULL, aio_shell_delete_all },
    { "DELETE", "/v1/shell/sessions/", "", aio_shell_delete },
    { "POST", "/v1/bash/exec", NULL, aio_bash_exec },
    { "POST", "/v1/bash/output", NULL, aio_bash_output },
    { "POST", "/v1/bash/write", NULL, aio_bash_write },
    { "POST", "/v1/bash/kill", NULL, aio_bash_kill },
    { "GET", "/v1/bash/sessions", NULL, aio_bash_list },
    { "POST", "/v1/bash/sessions/create", NULL, aio_bash_create },
    { "POST", "/v1/bash/sessions/", "/close", aio_bash_close },
    { "POST", "/v1/file/read", NULL, aio_file_read },
    { "POST", "/v1/file/write", NULL, aio_file_write },
    { "POST", "/v1/file/replace", NULL, aio_file_replace },
    { "POST", "/v1/file/search", NULL, aio_file_search },
    { "POST", "/v1/file/find", NULL, aio_file_find },
    { "POST", "/v1/file/grep", NULL, aio_file_grep },
    { "POST", "/v1/file/glob", NULL, aio_file_glob },
    { "POST", "/v1/file/list", NULL, aio_file_list },
    { "GET", "/v1/file/download", NULL, aio_file_download },
};

/* Whether `path` is r's; then *id is its variable part (to be freed), or NULL. */
static bool matches(const route *r, const char *path, char **id)
{
    *id = NULL;
    if (r->tail == NULL) return strcmp(path, r->path) == 0;
    size_t head = strlen(r->path), tail = strlen(r->tail), len = strlen(path);
    if (len <= head + tail || strncmp(path, r->path, head) != 0 || strcmp(path + len - tail, r->tail) != 0) return false;
    *id = strndup(path + head, len - head - tail);
    return *id != NULL;
}

void aio_init(void)
{
}

void aio_begin(guest_req *req)
{
    if (strcmp(req->method, "POST") == 0 && strcmp(req->path, "/v1/file/upload") == 0) aio_upload_begin(req);
}

void aio_route(guest_req *req)
{
    bool other_method = false;
    for (size_t i = 0; i < sizeof ROUTES / sizeof *ROUTES; i++) {
        char *id;
        if (!matches(&ROUTES[i], req->path, &id)) continue;
        if (strcmp(req->method, ROUTES[i].method) == 0) {
            ROUTES[i].fn(req, id);
            free(id);
            return;
        }
        free(id);
        other_method = true;
    }
    if (other_method) guest_reply_json(req, 405, json_pack("{s:s}", "detail", "Method Not Allowed"));
    else aio_reply_no_route(req);
}
