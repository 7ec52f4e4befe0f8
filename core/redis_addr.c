/* redis_addr.c -- see redis_addr.h. */
#include "redis_addr.h"
#include "fd.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

/* ---- the URL ---- */

static const char form[] = "redis://[:password@]host[:port][/db] or unix:///path";

static int bad(pdk_error *err, const char *what)
{
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option `ownership.url` %s; it is written %s", what, form);
}

static int hex_of(char c)
{
    static const char digits[] = "0123456789abcdef";
    const char *at = c == '\0' ? NULL : strchr(digits, c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c);
    return at == NULL ? -1 : (int)(at - digits);
}

/* [from, end) without its %-encoding; false: it is too long, or not encoded rightly, or has control characters. */
static bool decode(const char *from, const char *end, char *out, size_t size)
{
    size_t n = 0;
    while (from < end) {
        unsigned char c = (unsigned char)*from++;
        if (c == '%') {
            int high = from < end ? hex_of(from[0]) : -1, low = high >= 0 && from + 1 < end ? hex_of(from[1]) : -1;
            if (low < 0)
                return false;
            c = (unsigned char)(high * 16 + low);
            from += 2;
        }
        if (c < 0x20 || c == 0x7f || n + 1 >= size)
            return false;
        out[n++] = (char)c;
    }
    out[n] = '\0';
    return true;
}

/* Up to `digits` of them and nothing else: the number, or -1. */
static long number_of(const char *from, const char *end, int digits)
{
    long n = 0;
    if (from == end || end - from > digits)
        return -1;
    for (; from < end; from++) {
        if (*from < '0' || *from > '9')
            return -1;
        n = n * 10 + (*from - '0');
    }
    return n;
}

static const char *find(const char *from, const char *end, char c)
{
    const char *at = memchr(from, c, (size_t)(end - from));
    return at != NULL ? at : end;
}

static int parse_user(const char *from, const char *end, pdk_redis_addr *a, pdk_error *err)
{
    const char *colon = find(from, end, ':');
    if (colon == end)
        return bad(err, "has a user without a password (a password alone stands behind a colon)");
    if (!decode(from, colon, a->user, sizeof a->user) || !decode(colon + 1, end, a->password, sizeof a->password))
        return bad(err, "has a user or password that is too long or not %-encoded rightly");
    return a->password[0] == '\0' ? bad(err, "has an empty password") : 0;
}

static int parse_host(const char *from, const char *end, pdk_redis_addr *a, pdk_error *err)
{
    const char *host = from, *host_end = find(from, end, ':'), *port = host_end;
    if (from < end && *from == '[') { /* an IPv6 address */
        host = from + 1;
        host_end = find(host, end, ']');
        if (host_end == end)
            return bad(err, "has a host whose \"[\" is not closed");
        port = host_end + 1;
    }
    if (host == host_end)
        return bad(err, "names no host");
    if (!decode(host, host_end, a->host, sizeof a->host) || strpbrk(a->host, " /@?#") != NULL)
        return bad(err, "has a host that cannot be one");
    long n = port == end ? 6379 : *port == ':' ? number_of(port + 1, end, 5) : -1;
    if (n < 1 || n > 65535)
        return bad(err, "has a port that is no number from 1 to 65535");
    snprintf(a->port, sizeof a->port, "%ld", n);
    return 0;
}

static int parse_query(const char *from, const char *end, pdk_redis_addr *a, pdk_error *err)
{
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    while (from < end) {
        const char *next = find(from, end, '&'), *equals = find(from, next, '=');
        size_t name = (size_t)(equals - from);
        const char *value = equals < next ? equals + 1 : next;
        if (name == 6 && memcmp(from, "prefix", name) == 0) {
            size_t len = (size_t)(next - value);
            if (!decode(value, next, a->prefix, sizeof a->prefix) || len == 0 ||
                a->prefix[strspn(a->prefix, allowed)] != '\0')
                return bad(err, "has a prefix that is not 1 to 63 letters, digits, \".\", \"_\" or \"-\"");
        } else if (name == 2 && memcmp(from, "db", name) == 0) {
            long n = number_of(value, next, 6);
            if (n < 0)
                return bad(err, "has a db that is no number");
            a->db = (int)n;
        } else {
            return bad(err, "has an unknown parameter behind its \"?\" (known: db, prefix)");
        }
        from = next < end ? next + 1 : end;
    }
    return 0;
}

/* What stands before the path is empty by now. */
static int parse_socket(const char *path, const char *end, pdk_redis_addr *a, pdk_error *err)
{
    if (path == end || !decode(path, end, a->path, sizeof a->path))
        return bad(err, "names no socket, or one whose path is longer than 107 bytes");
    snprintf(a->place, sizeof a->place, "%s", a->path);
    return 0;
}

static int parse_server(const char *host, const char *host_end, const char *path, const char *end, pdk_redis_addr *a,
                        pdk_error *err)
{
    if (parse_host(host, host_end, a, err) < 0)
        return -1;
    long n = end - path <= 1 ? 0 : number_of(path + 1, end, 6);
    if (n < 0)
        return bad(err, "has a database that is no number");
    a->db = (int)n;
    snprintf(a->place, sizeof a->place, "%s:%s", a->host, a->port);
    return 0;
}

int pdk_redis_addr_parse(const char *url, pdk_redis_addr *a, pdk_error *err)
{
    memset(a, 0, sizeof *a);
    snprintf(a->prefix, sizeof a->prefix, "paddock");
    if (url == NULL || url[0] == '\0')
        return bad(err, "is missing");
    const char *rest = strstr(url, "://"), *end = url + strlen(url);
    if (rest == NULL)
        return bad(err, "has no scheme");
    size_t scheme = (size_t)(rest - url);
    bool tcp = scheme == 5 && memcmp(url, "redis", scheme) == 0;
    bool local = (scheme == 4 && memcmp(url, "unix", scheme) == 0) ||
                 (scheme == 10 && memcmp(url, "redis+unix", scheme) == 0);
    if (scheme == 6 && memcmp(url, "rediss", scheme) == 0)
        return bad(err, "asks for TLS, which this store does not speak: use a tunnel, and name its local end");
    if (!tcp && !local)
        return bad(err, "has a scheme that is none of redis, unix, redis+unix");
    rest += 3;
    const char *query = find(rest, end, '?'), *path = find(rest, query, '/'), *host = rest;
    for (const char *at = rest; at < path; at++)
        if (*at == '@')
            host = at + 1;
    if (host != rest && parse_user(rest, host - 1, a, err) < 0)
        return -1;
    if (local && host != path)
        return bad(err, "must have the absolute path of the socket behind unix://");
    if ((local ? parse_socket(path, query, a, err) : parse_server(host, path, path, query, a, err)) < 0)
        return -1;
    return query < end ? parse_query(query + 1, end, a, err) : 0;
}

/* ---- names ---- */

struct pdk_redis_lookup {    /* freed by whoever lets go of it last */
    char host[256], port[8]; /* fixed at birth */
    pdk_mutex lock;
    pdk_cond done;
    int users;              /* lock */
    bool over;              /* lock */
    int rc;                 /* lock; of getaddrinfo */
    struct addrinfo *found; /* lock until over, then fixed */
};

static int look_up(const char *host, const char *port, int flags, struct addrinfo **out)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV };
    *out = NULL;
    return getaddrinfo(host, port, &hints, out);
}

static void lookup_leave(pdk_redis_lookup *l)
{
    bool last;
    {
        PDK_GUARD(l->lock);
        last = --l->users == 0;
    }
    if (!last)
        return;
    if (l->found != NULL)
        freeaddrinfo(l->found);
    pdk_cond_destroy(&l->done);
    pdk_mutex_destroy(&l->lock);
    free(l);
}

static void *lookup_main(void *arg)
{
    pdk_redis_lookup *l = arg;
    struct addrinfo *found;
    int rc = look_up(l->host, l->port, AI_ADDRCONFIG, &found);
    {
        PDK_GUARD(l->lock);
        l->found = rc == 0 ? found : NULL;
        l->rc = rc;
        l->over = true;
        pdk_cond_broadcast(&l->done);
    }
    lookup_leave(l);
    return NULL;
}

/* A new one, with two users: the thread, and the dialer that has it as `pending`. */
static pdk_redis_lookup *lookup_start(pdk_redis_dialer *d)
{
    pdk_redis_lookup *l = calloc(1, sizeof *l);
    if (l == NULL)
        return NULL;
    memcpy(l->host, d->addr.host, sizeof l->host);
    memcpy(l->port, d->addr.port, sizeof l->port);
    pdk_mutex_init(&l->lock);
    pdk_cond_init(&l->done);
    l->users = 2;
    if (pdk_thread_start_detached("pdk-resolve", lookup_main, l) == 0)
        return l;
    pdk_cond_destroy(&l->done);
    pdk_mutex_destroy(&l->lock);
    free(l);
    return NULL;
}

/* The one under way, or a new one; counted in. NULL = no memory. */
static pdk_redis_lookup *lookup_join(pdk_redis_dialer *d)
{
    PDK_GUARD(d->lock);
    if (d->pending == NULL)
        d->pending = lookup_start(d);
    if (d->pending != NULL) {
        PDK_GUARD(d->pending->lock);
        d->pending->users++;
    }
    return d->pending;
}

static void forget_pending(pdk_redis_dialer *d, pdk_redis_lookup *l)
{
    {
        PDK_GUARD(d->lock);
        if (d->pending != l)
            return;
        d->pending = NULL;
    }
    lookup_leave(l);
}

/* Waits for it: 0 and l->found, or -1. */
static int lookup_wait(pdk_redis_dialer *d, pdk_redis_lookup *l, pdk_ns deadline, pdk_error *err)
{
    bool over;
    int rc;
    {
        PDK_GUARD(l->lock);
        while (!l->over && pdk_cond_wait_until(&l->done, &l->lock, deadline))
            ;
        over = l->over;
        rc = l->rc;
    }
    if (!over)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, ETIMEDOUT, "the name %s was not resolved in time", l->host);
    forget_pending(d, l); /* the next connection asks again: addresses change */
    if (rc != 0)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "the name %s has no address (%s)", l->host, gai_strerror(rc));
    return 0;
}

/* ---- connecting ---- */

void pdk_redis_dialer_init(pdk_redis_dialer *d)
{
    pdk_mutex_init(&d->lock);
    d->pending = NULL;
}

void pdk_redis_dialer_clear(pdk_redis_dialer *d)
{
    if (d->pending != NULL)
        lookup_leave(d->pending);
    pdk_mutex_destroy(&d->lock);
}

bool pdk_redis_wait(int fd, short events, pdk_ns deadline)
{
    for (;;) {
        pdk_ns left = deadline - pdk_now_monotonic();
        if (left <= 0)
            return false;
        struct pollfd p = { .fd = fd, .events = events };
        struct timespec t = { .tv_sec = left / PDK_NS_PER_S, .tv_nsec = left % PDK_NS_PER_S };
        int n = ppoll(&p, 1, &t, NULL);
        if (n > 0 || (n < 0 && errno != EINTR)) /* an error shows itself in the call that follows */
            return true;
    }
}

/* 0, or an errno. */
static int connect_within(int fd, const struct sockaddr *to, socklen_t len, pdk_ns deadline)
{
    if (connect(fd, to, len) == 0)
        return 0;
    if (errno != EINPROGRESS && errno != EINTR)
        return errno; /* EAGAIN: the queue of a unix socket is full, nobody accepts */
    if (!pdk_redis_wait(fd, POLLOUT, deadline))
        return ETIMEDOUT;
    int rc = 0;
    socklen_t size = sizeof rc;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &rc, &size) < 0 ? errno : rc;
}

static int give_up(pdk_redis_dialer *d, int sys, pdk_error *err)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, sys, "cannot connect to redis at %s", d->addr.place);
}

static int dial_unix(pdk_redis_dialer *d, pdk_ns deadline, pdk_error *err)
{
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    memcpy(to.sun_path, d->addr.path, strlen(d->addr.path) + 1); /* parse checked that it fits */
    PDK_AUTO_FD fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return give_up(d, errno, err);
    int rc = connect_within(fd, (const struct sockaddr *)&to, sizeof to, deadline);
    return rc != 0 ? give_up(d, rc, err) : pdk_fd_take(&fd);
}

/* A peer that has gone without a word (a power cut, a firewall) is found out while the connection idles. */
static void keep_alive(int fd)
{
    int on = 1, idle = 20, every = 5, times = 3;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
}

/* The first address that answers. Each but the last gets half of what is left, so that a dead one does not use it all up. */
static int dial_list(pdk_redis_dialer *d, const struct addrinfo *list, pdk_ns deadline, pdk_error *err)
{
    int rc = EADDRNOTAVAIL;
    for (const struct addrinfo *a = list; a != NULL; a = a->ai_next) {
        PDK_AUTO_FD fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        pdk_ns now = pdk_now_monotonic();
        if (fd < 0) {
            rc = errno;
            continue;
        }
        rc = connect_within(fd, a->ai_addr, a->ai_addrlen, a->ai_next == NULL ? deadline : now + (deadline - now) / 2);
        if (rc == 0) {
            keep_alive(fd);
            return pdk_fd_take(&fd);
        }
    }
    return give_up(d, rc, err);
}

int pdk_redis_dial(pdk_redis_dialer *d, pdk_ns deadline, pdk_error *err)
{
    if (d->addr.path[0] != '\0')
        return dial_unix(d, deadline, err);
    struct addrinfo *numeric;
    if (look_up(d->addr.host, d->addr.port, AI_NUMERICHOST, &numeric) == 0) {
        int fd = dial_list(d, numeric, deadline, err);
        freeaddrinfo(numeric);
        return fd;
    }
    pdk_redis_lookup *l = lookup_join(d);
    if (l == NULL)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "no memory to look up the name %s", d->addr.host);
    int fd = lookup_wait(d, l, deadline, err);
    if (fd == 0)
        fd = dial_list(d, l->found, deadline, err);
    lookup_leave(l);
    return fd;
}
