/* scope.c -- what stores that several runtimes share tell sandboxes of one id apart by. */
#include "core.h"
#include "fd.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* The engine, as the backend itself tells it from others (its field store_scope), or else the backend's name. */
static const char *engine_of(pdk_runtime *rt)
{
    const char *engine = rt->backend != NULL ? pdk_view_str(pdk_iface_field(rt->backend, "store_scope"), NULL) : NULL;
    if (engine != NULL)
        return engine;
    const char *backend = pdk_info_str(pdk_view_of(&rt->config.options), "backend");
    return backend != NULL ? backend : "custom";
}

int pdk_store_scope_of_machine(pdk_runtime *rt, char *out, size_t size, pdk_error *err)
{
    snprintf(out, size, "%s", pdk_store_scope(rt));
    if (rt->config.scope[0] != '\0' || strcmp(engine_of(rt), "process") != 0 || rt->config.state_dir == NULL)
        return 0;
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    char boot[64] = "";
    struct stat dir;
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, boot, sizeof boot - 1);
    boot[strspn(boot, "0123456789abcdef-")] = '\0';
    if (n <= 0 || boot[0] == '\0')
        return pdk_fail(err, PDK_E_IO_ERROR, fd < 0 || n < 0 ? errno : 0, "cannot read which boot this is (%s)", path);
    if (stat(rt->config.state_dir, &dir) < 0)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot look at the state directory %s", rt->config.state_dir);
    /* by its number, not its name: two containers of one machine may have two directories of one name, or one under two */
    snprintf(out, size, "%s/%s/%llx-%llx", engine_of(rt), boot, (unsigned long long)dir.st_dev, (unsigned long long)dir.st_ino);
    return 0;
}

const char *pdk_store_scope(pdk_runtime *rt)
{
    return rt->config.scope[0] != '\0' ? rt->config.scope : engine_of(rt);
}
