/* http.h -- HTTP requests over TCP, TLS and unix sockets (libcurl). Blocking; bounded by a deadline; cancellable.
 *
 * Connections are kept for reuse in a small pool per process, keyed by where they lead to; descriptors do not grow with
 * the number of requests. No retries, ever: a request that may have been sent is reported as ambiguous.
 * Threads: any.
 */
#ifndef PDK_HTTP_H
#define PDK_HTTP_H

#include "error.h"
#include "limit.h"

typedef struct pdk_http_request {
    const char *method;          /* "GET", ... */
    const char *url;             /* http://host/path, https://...; with unix_socket the host is only a name */
    const char *unix_socket;     /* path, or NULL */
    const char *const *headers;  /* "Name: value", NULL-terminated, or NULL */
    const void *body;
    size_t body_len;
    double timeout;              /* seconds for all of it; 0 = none of its own (the thread's limit still holds) */
    double connect_timeout;      /* seconds; 0 = 5 */
    size_t max_body;             /* bytes of answer that are kept; 0 = 64 MiB; more is an error */
    bool direct;                 /* never through the environment's proxy (also implied for unix sockets, loopback, private,
                                    link-local and single-label hosts) */
    bool fresh;                  /* a connection of its own */
    int redirects;               /* how many a GET or HEAD follows, within one scheme, host and port; one that leads elsewhere is
                                    an error, as headers such as a key were meant for this host. 0, a streamed body, and all
                                    other methods: the redirect is the answer */
    const char *ca_file;         /* PEM file of the authorities that may vouch for a TLS server, absolute; NULL = SSL_CERT_FILE in the
                                    environment, else the system's. Verification itself cannot be switched off */
    const char *cert_file, *key_file; /* PEM files of the client's own certificate and key, for servers that want one; both or neither */
    int peer;                    /* unix sockets: the pid, as this process sees it, that must be listening there; 0 = whoever does. One
                                    that this process cannot see at all is let pass */
    const void *input;           /* pdk_http_duplex: what is sent once the peer has switched protocols, then our direction ends */
    size_t input_len;
    /* NULL, or called with each piece of the body as it comes (then nothing is kept, and max_body does not count); false =
     * stop: the request is over, and was answered. On the calling thread, with no lock held. */
    bool (*on_body)(void *ctx, const char *data, size_t len);
    void *on_body_ctx;
    bool announce;               /* on_body is called with no bytes once, when the head of an answer of status 200 is there: a stream
                                    may stay silent for long */
} pdk_http_request;

typedef struct pdk_http_response { /* freed by pdk_http_response_free */
    int status;
    char *body;                  /* NUL after body_len bytes */
    size_t body_len;
    char *headers;               /* "Name: value\n"... */
    int peer;                    /* of a unix socket: who listened when the connection was made, or 0 = not to be seen from here */
} pdk_http_response;

/* What is known of a failed request: whether the peer can have acted on it. */
typedef enum pdk_http_failure { PDK_HTTP_NONE, PDK_HTTP_NOT_SENT, PDK_HTTP_AMBIGUOUS } pdk_http_failure;

/* 0 whenever there is an answer, whatever its status. -1: backend_error, with reason "connect", "read_timeout", "write",
 * "read", "protocol", "too_large", "redirect", "peer" or "tls"; or timeout / cancelled when the thread's limit ended it. *failure says what is known. */
int pdk_http_do(const pdk_http_request *req, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err);
/* A request that asks its peer to switch to a stream of bytes in both directions (Upgrade), over a connection of its own: `input`
 * goes out, and what comes back until the peer ends it goes to on_body, or is kept as the body. A peer that does not switch
 * (status 101, or 200 without a length) has answered the request: its answer is returned, the input was not sent. Over TLS this
 * direction cannot be ended alone: the peer must know by itself how much comes. Otherwise as pdk_http_do; reason "peer" = somebody
 * else listens. duplex.c */
int pdk_http_duplex(const pdk_http_request *req, pdk_http_response *out, pdk_http_failure *failure, pdk_error *err);
void pdk_http_response_free(pdk_http_response *r);
void pdk_http_close_idle(void); /* closes all pooled connections */

#endif
