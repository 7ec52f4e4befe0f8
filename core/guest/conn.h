/* conn.h -- one client connection; http.c reads it, reply.c writes it, nobody else looks inside. */
#ifndef PDK_GUEST_CONN_H
#define PDK_GUEST_CONN_H

#include "priv.h"

#include <http_parser.h>

#define OUT_HIGH (256u << 10) /* of unsent output, from here on guest_send says "full" */
#define OUT_LOW  (64u << 10)  /* and from here on it may go on */

typedef enum conn_phase {
    CONN_IDLE, /* no byte of a request yet */
    CONN_HEAD, /* in its headers */
    CONN_BODY, /* headers complete, route chosen */
    CONN_WAIT  /* body complete; the reply is awaited */
} conn_phase;

typedef struct guest_conn {
    guest_req req; /* first: a request is found in its connection */
    struct guest_conn *next, *next_dirty;
    guest_watch w;
    guest_timer deadline;
    int deadline_kind; /* what the timer stands for; see conn_arm */
    http_parser parser;
    conn_phase phase;
    bool replied;        /* the reply is complete (in `out`, or `file` is being sent) */
    bool begun, chunked; /* a streamed reply */
    bool keep;           /* the connection serves another request afterwards */
    bool broken;         /* the client is gone, or must go */
    bool paused, full, contact, dirty, progress, expects_100, eof;
    uint64_t token; /* the last valid one, when `contact` */
    /* head: the target, then names and values, each with its NUL */
    char *head;
    size_t head_len, head_cap;
    enum { PART_TARGET, PART_NAME, PART_VALUE } last;
    int header_count;
    char *path, *query; /* decoded; query: name, value, name, value ... and an empty name */
    char *body;
    size_t body_cap;
    uint64_t body_seen;
    char *rest; /* read, not parsed: it belongs to what comes later */
    size_t rest_len;
    char *out;
    size_t out_at, out_len, out_cap;
    int file; /* the body of a file reply, or -1 */
    uint64_t file_left;
} guest_conn;

static inline guest_conn *conn_of(guest_req *req)
{
    return (guest_conn *)(void *)req;
}
static inline const guest_conn *conn_of_const(const guest_req *req)
{
    return (const guest_conn *)(const void *)req;
}

void guest_conn_touch(guest_conn *c); /* it has something to write or to end: looked at when the round ends */
void guest_conn_write(guest_conn *c); /* as much as goes now; calls on_drain; sets broken */
void guest_conn_out_free(guest_conn *c);
void guest_conn_continue(guest_conn *c); /* 100 Continue */

#endif
