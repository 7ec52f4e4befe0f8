/* aio_session.h -- what a session of /v1/shell and one of /v1/bash have in common: a name, a directory, when it was used,
 * and the requests that wait for something to happen in it. What runs in it is the plane's own matter. */
#ifndef AIO_SESSION_H
#define AIO_SESSION_H

#include "aio.h"

typedef struct aio_session aio_session;
typedef struct aio_waiter aio_waiter;

struct aio_session {      /* the first member of a plane's own struct */
    aio_session *next;
    char *id, *dir;
    double created, used; /* wall clock, for people */
    int64_t used_at;      /* by the loop's clock, for decisions */
    aio_waiter *waiters;
};

typedef struct aio_plane {
    const char *name;
    size_t size;                         /* of its sessions' struct */
    bool (*idle)(const aio_session *s);  /* whether it may make room for another one */
    void (*end)(aio_session *s);         /* before s is freed: ends what runs, answers who waits, frees what is the plane's */
    aio_session *first;                  /* newest first */
} aio_plane;

aio_session *aio_session_find(const aio_plane *p, const char *id);
/* The session of that id, or NULL after a 404. */
aio_session *aio_session_need(guest_req *req, const aio_plane *p, const char *id);
/* A new one in `dir` (NULL = the workspace), zeroed beyond its base. `id` NULL = a fresh one. When there are `most`, it makes
 * room at the cost of the one that has been idle longest. NULL = the request was answered. */
aio_session *aio_session_new(guest_req *req, aio_plane *p, size_t most, const char *id, const char *dir);
void aio_session_free(aio_plane *p, aio_session *s);
void aio_session_touch(aio_session *s); /* it is used now */
void aio_session_go(aio_session *s, const char *dir);
bool aio_session_id_ok(guest_req *req, const char *field, const char *id); /* NULL is; false = the request was answered */

/* ---- waiters ---- */

struct aio_waiter {       /* the first member of a plane's own struct; freed when it is answered, or its client is gone */
    aio_waiter *next;
    aio_session *owner;
    guest_req *req;
    guest_timer limit;
    json_t *(*data)(const aio_waiter *w); /* what it is answered with */
};
/* A zeroed one of `size` bytes behind `req`; NULL = no memory, and the request was answered. */
aio_waiter *aio_wait(guest_req *req, aio_session *s, size_t size, json_t *(*data)(const aio_waiter *w));
void aio_wait_limit(aio_waiter *w, double seconds); /* it is answered then at the latest */
void aio_wait_answer(aio_waiter *w);
void aio_wait_answer_all(aio_session *s);

#endif
