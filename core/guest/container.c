/* container.c -- the guest as the entry point of a container: `paddock-guest --settings FILE`.
 *
 * Nobody can hand it descriptors there. So it reads its settings from a mounted file, makes its listening socket itself, and asks
 * every caller for a secret, since what it listens on can be reached by others: by what runs inside, and on a published port by
 * all of the host. The file with the secret is unlinked before anything else can run; a container that is started again finds no
 * settings, and ends: its memory of tokens would be lost with the process that had it. */
#include "priv.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define BACKLOG 128

/* Moves `from` to the number `to`. */
static int place(int from, int to, guest_fault *f)
{
    if (from == to)
        return 0;
    int rc = dup2(from, to);
    int sys = errno;
    close(from);
    return rc == to ? 0 : guest_fail(f, 500, "no_descriptors", sys, "cannot place a descriptor: %s", strerror(sys));
}

int guest_container_settings(const char *path, int number, guest_fault *f)
{
    if (syscall(SYS_close_range, 3u, ~0u, 0u) < 0) /* what an engine forgot to close must not pass for ours */
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return guest_fail(f, 500, "invalid_setting", errno, "cannot open the settings %.100s: %s", path,
                          errno == ENOENT ? "they are gone, so this sandbox has run before, and does not run twice" : strerror(errno));
    return place(fd, number, f);
}

int guest_container_hide(const char *path, guest_fault *f)
{
    if (guest_conf.secret == NULL || unlink(path) == 0 || errno == ENOENT)
        return 0;
    return guest_fail(f, 500, "invalid_setting", errno, "cannot remove the settings %.100s, which hold the secret: %s", path,
                      strerror(errno));
}

/* The image's own environment is what its programs were built for (PATH, JAVA_HOME); what the settings say goes before it. */
int guest_container_env(guest_fault *f)
{
    static const char *const own[] = { "HOME=", "USER=", "PWD=", "HOSTNAME=", "TERM=", "container=" };
    size_t n = 0, set = 0;
    while (environ[n] != NULL)
        n++;
    while (guest_conf.env != NULL && guest_conf.env[set] != NULL)
        set++;
    char **all = calloc(n + set + 1, sizeof *all);
    if (all == NULL)
        return guest_fail(f, 500, "no_memory", ENOMEM, "no memory for the environment");
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        bool take = guest_env_name_ok(environ[i]);
        for (size_t k = 0; k < sizeof own / sizeof own[0]; k++)
            take = take && strncmp(environ[i], own[k], strlen(own[k])) != 0;
        if (take)
            all[count++] = environ[i];
    }
    for (size_t i = 0; i < set; i++)
        all[count++] = guest_conf.env[i];
    free(guest_conf.env);
    guest_conf.env = all;
    return 0;
}

/* "8080": every address of the container. */
static int listen_port(const char *text, guest_fault *f)
{
    uint64_t port = 0;
    if (!guest_parse_u64(text, &port) || port < 1 || port > 65535)
        return guest_fail(f, 500, "invalid_setting", 0, "setting listen=%.40s names no port", text);
    int on = 1, off = 0;
    int fd = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in6 six = { .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = in6addr_any };
    struct sockaddr_in four = { .sin_family = AF_INET, .sin_port = htons((uint16_t)port) };
    struct sockaddr *to = (struct sockaddr *)&six;
    socklen_t len = sizeof six;
    if (fd >= 0)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (fd < 0) { /* a kernel or a container without IPv6 */
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        to = (struct sockaddr *)&four;
        len = sizeof four;
    }
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && bind(fd, to, len) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int sys = errno;
    if (fd >= 0)
        close(fd);
    return guest_fail(f, 500, "invalid_setting", sys, "cannot listen on port %s: %s", text, strerror(sys));
}

static int listen_path(const char *path, guest_fault *f)
{
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    if (strlen(path) >= sizeof name.sun_path)
        return guest_fail(f, 500, "invalid_setting", 0, "setting listen=%.100s is too long for a socket", path);
    memcpy(name.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    mode_t mask = umask(0); /* the runtime may be another user of the host; the folder above keeps everybody else out */
    bool good = fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0 && listen(fd, BACKLOG) == 0;
    int sys = errno;
    umask(mask);
    if (good)
        return fd;
    if (fd >= 0)
        close(fd);
    return guest_fail(f, 500, "invalid_setting", sys, "cannot listen on %.100s: %s", path, strerror(sys));
}

int guest_container_listen(int number, guest_fault *f)
{
    const char *where = guest_conf.listen;
    if (where == NULL)
        return guest_fail(f, 500, "invalid_setting", 0, "setting listen is missing: a path, or a port");
    int fd = where[0] == '/' ? listen_path(where, f) : listen_port(where, f);
    return fd < 0 ? -1 : place(fd, number, f);
}

bool guest_secret_ok(const char *given)
{
    const char *secret = guest_conf.secret;
    if (secret == NULL)
        return true;
    size_t len = strlen(secret), n = given != NULL ? strlen(given) : 0;
    unsigned char differs = n != len;
    for (size_t i = 0; i < len; i++) /* all of it, however soon it differs: the time must not say where */
        differs |= (unsigned char)(secret[i] ^ (n > 0 ? given[i % n] : 0));
    return differs == 0;
}
