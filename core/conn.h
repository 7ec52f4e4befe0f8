/* conn.h -- libcurl handles that keep one connection each, pooled by destination. For http.c and duplex.c alone.
 *
 * A pdk_conn is an easy and a multi handle of their own: never shared, so that no lock is held while one is in use, and
 * closing the one closes exactly its connection. Idle ones wait in a bounded pool; no thread ages them: whoever comes
 * next does.
 */
#ifndef PDK_CONN_H
#define PDK_CONN_H

#include "error.h"
#include "http.h"
#include "sync.h"
#include <curl/curl.h>

#define PDK_CONN_IDLE_MAX 64                  /* of the process; each costs three descriptors (libcurl's wake-up pair) */
#define PDK_CONN_DESCRIPTORS 3                /* of one connection */
#define PDK_CONN_AGE      (30 * PDK_NS_PER_S) /* idle for longer: closed */

typedef struct pdk_conn { /* owned by the pool while idle (the pool's lock), else by whoever took it */
    char *key;            /* where it leads to */
    CURLM *multi;
    CURL *easy;
    pdk_ns idle_since;
    curl_socket_t socket; /* of the connection that libcurl keeps in it between requests, or CURL_SOCKET_BAD; libcurl's */
    bool attached;        /* easy is in multi */
    bool stale;           /* its old connection is not to be used again, but still there */
    bool reused;          /* taken from the pool, and alive at that moment */
} pdk_conn;

/* A connection to `key`: an idle one that has not waited longer than max_idle (0 = a new one) and whose peer has not
 * closed it, or a new one. Sets up libcurl once in the process. NULL: no_memory, or `closed` in a forked child, where
 * nothing of this may be touched. */
pdk_conn *pdk_conn_take(const char *key, pdk_ns max_idle, pdk_error *err);
/* Gives it back. `socket` says whether libcurl still has a connection in it; `keep`, whether that may be used again. */
void pdk_conn_give(pdk_conn *c, bool keep);
void pdk_conn_close_idle(void);
size_t pdk_conn_idle_count(void);

/* Whom a handle believes over TLS, and who it says that it is; the same for every request. The handle keeps copies. */
CURLcode pdk_conn_set_tls(CURL *easy, const pdk_http_request *req);
/* Whether a transfer over TLS failed with this because one side did not take the other for who it must be. `text` is libcurl's error
 * buffer: TLS 1.3 refuses a client only once the client has begun to speak, and libcurl calls that a failed read or write. */
bool pdk_conn_distrusted(CURLcode code, const char *text);

#endif
