/* redis.h -- requests to one redis server, each answered or given up within a bound.
 *
 * Use: take a connection, ask over it as often as needed, give it back. From take to give at most PDK_REDIS_WAIT passes, less
 * when the thread's limit ends before. At most PDK_REDIS_CONNS are open; who finds all of them busy waits, within the same bound.
 * A connection on which an answer did not come is closed, never read again: a late answer would be taken for the next one's.
 * After a failure the server is left alone for a while, doubling from 50 ms to 2 s, and calls fail at once; then one of them tries.
 * All errors are ownership_unavailable. One that comes after the request was sent means that its outcome is not known.
 * Threads: any; a connection belongs to whoever took it. The lock of the pool is never held while anything waits for the server.
 */
#ifndef PDK_REDIS_H
#define PDK_REDIS_H

#include "error.h"
#include "pack.h"
#include "sync.h"

#define PDK_REDIS_WAIT    (2 * PDK_NS_PER_S)
#define PDK_REDIS_CONNECT (1 * PDK_NS_PER_S) /* of it, for connecting and logging in */
#define PDK_REDIS_CONNS   4
#define PDK_REDIS_LIST    4096      /* strings of one list; a longer one is no answer */
#define PDK_REDIS_LIST_BYTES (1 << 20) /* of all of them, as they are sent */

typedef struct pdk_redis pdk_redis;
typedef struct pdk_redis_conn pdk_redis_conn;

typedef enum pdk_redis_kind { PDK_REDIS_NIL, PDK_REDIS_TEXT, PDK_REDIS_NUMBER, PDK_REDIS_ERROR, PDK_REDIS_STRINGS } pdk_redis_kind;
typedef struct pdk_redis_reply {
    pdk_redis_kind kind;
    long long number; /* of NUMBER */
    char text[300];   /* of TEXT and ERROR; cut to its size */
} pdk_redis_reply;

/* Only parses the URL (redis_addr.h): nothing is connected before the first take. NULL: invalid_argument. */
pdk_redis *pdk_redis_new(const char *url, pdk_error *err);
void pdk_redis_free(pdk_redis *r);  /* no connection is taken then */
void pdk_redis_close(pdk_redis *r); /* closes the connections; takes fail from now on */
const char *pdk_redis_prefix(const pdk_redis *r);
const char *pdk_redis_place(const pdk_redis *r); /* for messages */

pdk_redis_conn *pdk_redis_take(pdk_redis *r, pdk_error *err);
/* Also one that an ask has failed on: it is closed then. NULL is fine. */
void pdk_redis_give(pdk_redis *r, pdk_redis_conn *c);
/* When its bound ends, on the real monotonic clock. */
pdk_ns pdk_redis_deadline(const pdk_redis_conn *c);
/* 0 and the reply (an error that redis reports is a reply), or -1: no answer came. */
int pdk_redis_ask(pdk_redis_conn *c, const char *const *args, int n, pdk_redis_reply *out, pdk_error *err);
/* The same where a list of strings may be the answer: its kind is STRINGS then, and the list is appended to `list`. */
int pdk_redis_ask_list(pdk_redis_conn *c, const char *const *args, int n, pdk_pack *list, pdk_redis_reply *out, pdk_error *err);

#endif
