/* box.c -- the grip of one holder on one sandbox: validity, files. Commands are in exec.c. */
#include "box.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void box_destroy(pdk_box *b)
{
    if (atomic_fetch_sub(&b->refs, 1) != 1)
        return;
    free(b); /* its strings lie behind */
}

/* Copies `len` bytes to *at, ends them with a NUL, and goes on behind it. */
static char *keep(char **at, const char *s, size_t len)
{
    char *copy = *at;
    memcpy(copy, s, len);
    copy[len] = '\0';
    *at += len + 1;
    return copy;
}

pdk_box *pdk_box_new(pdk_runtime *rt, const pdk_entry *e, const char *holder, const char *source, bool park_on_release)
{
    size_t generation_len = e->generation != NULL ? strlen(e->generation) : 0, holder_len = holder != NULL ? strlen(holder) : 0;
    size_t identity_len = e->has_identity ? e->user_len + e->thread_len : 0;
    pdk_box *b = malloc(sizeof *b + generation_len + holder_len + identity_len + 4);
    if (b == NULL)
        return NULL;
    *b = (pdk_box){ .rt = rt, .source = source, .token = e->token, .incarnation = e->incarnation,
                    .park_on_release = park_on_release, .user_len = e->user_len, .thread_len = e->thread_len };
    atomic_init(&b->refs, 1);
    pdk_entry_id(e, b->id);
    char *at = b->text;
    if (e->generation != NULL)
        b->generation = keep(&at, e->generation, generation_len);
    if (holder != NULL)
        b->holder = keep(&at, holder, holder_len);
    if (e->has_identity) {
        b->user = keep(&at, e->user, e->user_len);
        b->thread = keep(&at, pdk_entry_who(e).thread, e->thread_len);
    }
    return b;
}

const char *pdk_box_id(const pdk_box *b)
{
    return b->id;
}
const char *pdk_box_generation(const pdk_box *b)
{
    return b->generation;
}
const char *pdk_box_holder(const pdk_box *b)
{
    return b->holder;
}
const char *pdk_box_source(const pdk_box *b)
{
    return b->source;
}
int64_t pdk_box_token(const pdk_box *b)
{
    return b->token;
}

int pdk_release(pdk_box *b, pdk_error *err)
{
    if (b == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "no box was given");
    return atomic_exchange(&b->released, true) ? 0 : pdk_box_release(b, err);
}

int pdk_box_release(pdk_box *b, pdk_error *err)
{
    if (b->holder != NULL) {
        bool ours; /* a later acquire may have bound the same holder to a newer generation: that binding is not ours */
        {
            PDK_GUARD(b->rt->pool.registry);
            pdk_holder *h = pdk_pool_holder(&b->rt->pool, b->holder);
            ours = h != NULL && h->incarnation == b->incarnation;
        }
        return ours ? pdk_runtime_release(b->rt, b->holder, err) : 0;
    }
    return b->park_on_release ? pdk_runtime_park(b->rt, b->id, err) : 0;
}

pdk_box *pdk_box_ref(pdk_box *b)
{
    atomic_fetch_add(&b->refs, 1);
    return b;
}

void pdk_box_drop(pdk_box *b)
{
    if (b != NULL)
        box_destroy(b);
}

void pdk_box_free(pdk_box *b)
{
    if (b == NULL)
        return;
    PDK_AUTO_ERROR err;
    pdk_error_begin(&err);
    atomic_store(&b->freed, true); /* before: a queued release that is cancelled now goes on all the same */
    if (b->holder != NULL && pdk_release(b, &err) < 0 && err.kind != PDK_E_CLOSED)
        pdk_emit(b->rt, PDK_WARN, "release_failed", b->id, b->generation, NULL, &err);
    box_destroy(b);
}

/* ---- operations ---- */

pdk_entry *pdk_box_entry(pdk_runtime *rt, pdk_box *box)
{
    pdk_entry *e = pdk_pool_find(&rt->pool, box->id);
    return e != NULL && e->incarnation == box->incarnation ? e : NULL;
}

static int lost(pdk_box *box, const char *why, pdk_error *err)
{
    pdk_fail(err, PDK_E_LOST, 0, "sandbox %s is no longer this holder's: %s; acquire again", box->id, why);
    pdk_error_set_id(err, box->id);
    return -1;
}

static int check_grip(pdk_runtime *rt, pdk_box *box, pdk_entry *e, pdk_error *err) PDK_REQUIRES(rt->pool.registry)
{
    if (e == NULL || e->state != PDK_ACTIVE || e->retry || e->client == NULL)
        return lost(box, "it was torn down or replaced", err);
    if (e->reserved != 0) {
        pdk_fail(err, PDK_E_BEING_DESTROYED, 0, "sandbox %s is being torn down", box->id);
        pdk_error_set_id(err, box->id);
        return -1;
    }
    if (box->holder != NULL) {
        pdk_holder *h = pdk_pool_holder(&rt->pool, box->holder);
        if (h == NULL || h->entry != e || h->incarnation != box->incarnation)
            return lost(box, "its holder was released", err);
    }
    if (box->token != e->token)
        return lost(box, "its ownership has changed", err);
    if (!rt->fenced && e->lease_until != 0 && pdk_lease_now(rt) >= e->lease_until - pdk_seconds(rt->config.ttl) / 10)
        return lost(box, "its lease ran out before it was renewed", err);
    return 0;
}

int pdk_box_begin(pdk_box *box, pdk_client **client, pdk_error *err)
{
    pdk_runtime *rt = box->rt;
    if (atomic_load(&box->released))
        return pdk_fail(err, PDK_E_CLOSED, 0, "the box of %s was released", box->id);
    if (pdk_call_enter(rt, err) < 0)
        return -1;
    int rc;
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_box_entry(rt, box);
        rc = check_grip(rt, box, e, err);
        if (rc == 0) {
            e->busy++;
            e->last_used = pdk_clock_now(rt->clock);
            *client = pdk_client_ref(e->client);
        } else {
            rt->pool.stats.lost++;
        }
    }
    if (rc < 0)
        pdk_call_leave(rt);
    return rc;
}

void pdk_box_end(pdk_box *box, pdk_client *client)
{
    pdk_runtime *rt = box->rt;
    bool park = false;
    pdk_client_unref(client);
    {
        PDK_GUARD(rt->pool.registry);
        pdk_entry *e = pdk_pool_find(&rt->pool, box->id);
        if (e != NULL) {
            e->busy--;
            e->last_used = pdk_clock_now(rt->clock);
            park = e->busy == 0 && e->incarnation == box->incarnation && e->holder_count == 0 && e->park_asked &&
                   e->state == PDK_ACTIVE;
            pdk_entry_sweep(&rt->pool, e);
        }
    }
    if (park) /* its last holder left while this ran */
        pdk_park_or_recycle(rt, box->id, box->incarnation);
    pdk_call_leave(rt);
}

void pdk_box_mark_lost(pdk_box *box, const pdk_error *why)
{
    pdk_runtime *rt = box->rt;
    {
        PDK_GUARD(rt->pool.registry);
        rt->pool.stats.lost++;
        pdk_entry *e = pdk_box_entry(rt, box);
        if (e != NULL)
            e->lease_until = 1; /* the next acquire asks the store again */
        if (e != NULL && strcmp(why->reason, "doomed") == 0 && e->reserved == 0)
            pdk_entry_doomed(&rt->pool, e, pdk_clock_now(rt->clock));
    }
    pdk_emit(rt, PDK_WARN, "lost", box->id, box->generation, NULL, why);
}

/* ---- files ---- */

#define FILE_MAX (PDK_PACK_MAX - (64u << 10)) /* of one call, either way: the path and the rest of a pack are beside it */

int pdk_path_check(const char *path, size_t len, pdk_error *err)
{
    if (path == NULL || len == 0 || path[0] != '/')
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "path must be absolute");
    if (len > 4095)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "path is %zu bytes long; at most 4095 are taken", len);
    return memchr(path, '\0', len) == NULL ? 0 : pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "path holds a NUL byte");
}

int pdk_size_check(const char *path, size_t path_len, size_t len, pdk_error *err)
{
    if (len <= FILE_MAX)
        return 0;
    return pdk_fail_reason(err, PDK_E_INVALID_ARGUMENT, "too_large",
                           "write %.*s: %zu bytes are more than one call takes (%u): write it by parts, or mount its directory",
                           (int)(path_len < 200 ? path_len : 200), path, len, FILE_MAX);
}

static int file_call(pdk_box *box, const char *method, const pdk_pack *args, pdk_pack *out, pdk_error *err)
{
    pdk_client *client = NULL;
    if (args->failed)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the file");
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    if (pdk_box_begin(box, &client, err) < 0)
        return -1;
    int rc = pdk_ask(box->rt, client->object, method, args, out, pdk_limit_current(), PDK_E_BACKEND_ERROR, &own);
    if (rc < 0) {
        pdk_error_set_stage(&own, method);
        pdk_error_set_id(&own, box->id);
        if (own.kind == PDK_E_LOST)
            pdk_box_mark_lost(box, &own);
        pdk_error_move(err, &own);
    }
    pdk_box_end(box, client);
    return rc;
}

int pdk_box_write(pdk_box *box, const char *path, size_t path_len, const void *data, size_t len, bool no_overwrite,
                  pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    if (pdk_path_check(path, path_len, err) < 0 || pdk_size_check(path, path_len, len, err) < 0)
        return -1;
    pdk_put_str(&args, path, path_len);
    pdk_put_str(&args, data, len);
    pdk_mark opts = pdk_begin_map(&args);
    pdk_kv_bool(&args, &opts, "no_overwrite", no_overwrite);
    pdk_end(&args, &opts);
    return file_call(box, "write", &args, &out, err);
}

int pdk_box_read(pdk_box *box, const char *path, size_t path_len, char **data, size_t *len, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, out = PDK_NO_PACK;
    *data = NULL;
    *len = 0;
    if (pdk_path_check(path, path_len, err) < 0)
        return -1;
    pdk_put_str(&args, path, path_len);
    if (file_call(box, "read", &args, &out, err) < 0)
        return -1;
    pdk_view v = pdk_view_of(&out);
    if (pdk_view_str(v, len) == NULL)
        return pdk_fail(err, PDK_E_BACKEND_ERROR, 0, "the client's read gave no bytes for %s", path);
    *data = pdk_view_dup(v);
    return *data != NULL ? 0 : pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the %zu bytes of %s", *len, path);
}

int pdk_box_list(pdk_box *box, const char *path, size_t path_len, pdk_pack *out, pdk_error *err)
{
    PDK_AUTO_PACK args = PDK_NO_PACK, answer = PDK_NO_PACK;
    if (pdk_path_check(path, path_len, err) < 0)
        return -1;
    pdk_put_str(&args, path, path_len);
    if (file_call(box, "list", &args, &answer, err) < 0)
        return -1;
    pdk_put_view(out, pdk_view_of(&answer));
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the listing of %s", path) : 0;
}
