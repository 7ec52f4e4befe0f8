/* aio_session.c -- see aio_session.h. */
#include "aio_session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

aio_session *aio_session_find(const aio_plane *p, const char *id)
{
    aio_session *s = p->first;
    while (s != NULL && strcmp(s->id, id) != 0) s = s->next;
    return s;
}

aio_session *aio_session_need(guest_req *req, const aio_plane *p, const char *id)
{
    aio_session *s = aio_session_find(p, id);
    if (s == NULL) aio_reply_fail(req, 404, "Session not found", NULL);
    return s;
}

static void destroy(aio_session *s)
{
    free(s->id);
    free(s->dir);
    free(s);
}

void aio_session_free(aio_plane *p, aio_session *s)
{
    for (aio_session **link = &p->first; *link != NULL; link = &(*link)->next) {
        if (*link != s) continue;
        *link = s->next;
        break;
    }
    p->end(s);
    destroy(s);
}

static bool make_room(guest_req *req, aio_plane *p, size_t most)
{
    size_t n = 0;
    aio_session *oldest = NULL;
    for (aio_session *s = p->first; s != NULL; s = s->next, n++)
        if (p->idle(s) && (oldest == NULL || s->used_at <= oldest->used_at)) oldest = s;
    if (n < most) return true;
    if (oldest != NULL) {
        aio_session_free(p, oldest);
        return true;
    }
    char message[160];
    snprintf(message, sizeof message,
             "Cannot create %s session: session limit reached and all %zu existing sessions have active commands", p->name, n);
    aio_reply_fail(req, 400, message, NULL);
    return false;
}

aio_session *aio_session_new(guest_req *req, aio_plane *p, size_t most, const char *id, const char *dir)
{
    char fresh[40];
    if (!make_room(req, p, most)) return NULL;
    aio_new_id(fresh);
    aio_session *s = calloc(1, p->size);
    if (s != NULL) {
        s->id = strdup(id ? id : fresh);
        s->dir = strdup(dir ? dir : guest_conf.workspace);
    }
    if (s == NULL || s->id == NULL || s->dir == NULL) {
        if (s != NULL) destroy(s);
        aio_reply_fail(req, 500, "no memory for a session", NULL);
        return NULL;
    }
    s->created = aio_wall();
    aio_session_touch(s);
    s->next = p->first;
    p->first = s;
    return s;
}

void aio_session_touch(aio_session *s)
{
    s->used = aio_wall();
    s->used_at = guest_now();
}

/* Without memory it stays where it is. */
void aio_session_go(aio_session *s, const char *dir)
{
    char *copy = strdup(dir);
    if (copy == NULL) return;
    free(s->dir);
    s->dir = copy;
}

bool aio_session_id_ok(guest_req *req, const char *field, const char *id)
{
    if (id == NULL || (id[0] != 0 && strlen(id) <= 256)) return true;
    aio_reply_invalid(req, field, "must have 1 to 256 characters");
    return false;
}

/* ---- waiters ---- */

static void drop(aio_waiter *w)
{
    for (aio_waiter **link = &w->owner->waiters; *link != NULL; link = &(*link)->next) {
        if (*link != w) continue;
        *link = w->next;
        break;
    }
    guest_timer_stop(&w->limit);
    free(w);
}

void aio_wait_answer(aio_waiter *w)
{
    guest_req *req = w->req;
    json_t *data = w->data(w);
    req->on_close = NULL;
    drop(w);
    aio_reply_ok(req, data, NULL);
}

void aio_wait_answer_all(aio_session *s)
{
    while (s->waiters != NULL) aio_wait_answer(s->waiters);
}

static void on_due(guest_timer *t)
{
    aio_wait_answer(t->ctx);
}

static void on_closed(guest_req *req)
{
    drop(req->ctx);
}

aio_waiter *aio_wait(guest_req *req, aio_session *s, size_t size, json_t *(*data)(const aio_waiter *w))
{
    aio_waiter *w = calloc(1, size);
    if (w == NULL) {
        aio_reply_fail(req, 500, "no memory", NULL);
        return NULL;
    }
    w->next = s->waiters;
    w->owner = s;
    w->req = req;
    w->data = data;
    s->waiters = w;
    req->ctx = w;
    req->on_close = on_closed;
    return w;
}

void aio_wait_limit(aio_waiter *w, double seconds)
{
    guest_timer_in(&w->limit, seconds, on_due, w);
}
