/* redis_addr.h -- where a redis server is, read from a URL, and a socket that is connected to it in bounded time. For redis.c. */
#ifndef PDK_REDIS_ADDR_H
#define PDK_REDIS_ADDR_H

#include "error.h"
#include "sync.h"

typedef struct pdk_redis_addr { /* fixed once parsed */
    char path[108];             /* of a unix socket; empty = TCP, to: */
    char host[256], port[8];
    char user[128], password[256]; /* empty = none */
    int db;
    char prefix[64]; /* of all keys: one server may serve several deployments */
    char place[400]; /* for messages; without the password */
} pdk_redis_addr;

/* redis://[[user]:password@]host[:port][/db][?prefix=name], unix://[[user]:password@]/path[?db=n&prefix=name], or the same as
 * redis+unix://. Parts may be %-encoded. invalid_argument says what is wrong, and shows no password. */
int pdk_redis_addr_parse(const char *url, pdk_redis_addr *out, pdk_error *err);

/* Names are looked up on a thread of their own, as the system's resolver knows no deadline. One at a time. */
typedef struct pdk_redis_lookup pdk_redis_lookup;
typedef struct pdk_redis_dialer {
    pdk_redis_addr addr; /* fixed at birth */
    pdk_mutex lock;
    pdk_redis_lookup *pending; /* lock; under way, or NULL */
} pdk_redis_dialer;
void pdk_redis_dialer_init(pdk_redis_dialer *d);
void pdk_redis_dialer_clear(pdk_redis_dialer *d); /* a lookup under way goes on by itself */
/* A connected socket, non-blocking and close-on-exec, or -1 (ownership_unavailable). `deadline`: real monotonic clock. */
int pdk_redis_dial(pdk_redis_dialer *d, pdk_ns deadline, pdk_error *err);
/* Waits until `fd` is ready for `events` of poll; false when the deadline has passed. */
bool pdk_redis_wait(int fd, short events, pdk_ns deadline);

#endif
