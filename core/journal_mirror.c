/* journal_mirror.c -- the journal of machines that share an engine: the file journal of each, and in redis what all of them must
 * know. Redis may lose everything; the files stand, and each machine publishes its own anew before it reconciles.
 *
 * Keys, beside those of lease_redis.c and with the same hash tag; the scope is that of the leases:
 *   {paddock}:quarantine:<scope>:<id>   a hash, a field for each record: "g<generation>", or "?<time>" of an unknown one; its value
 *                                       is "<time> <why>", the time being what the file says. Never expires
 *   {paddock}:quarantined:<scope>       a sorted set of the ids that have such a hash, for the list alone
 *   {paddock}:retired:<scope>:<id>      a sorted set of fields that were there and were retired, by the server's time
 *
 * Why `retired`: the machine that retires a record is often not the one whose file it came from. That file would be published
 * again, and one of an unknown generation would fence what was made since. So a file whose record was retired is removed instead.
 * Only a retirement that is on record counts; a record that is merely missing has been lost. They are kept for RETIRED_MS: a
 * machine that was away for longer brings back a fence too many, which goes when absence is proven again.
 *
 * No call may come into force when nobody waits for it any longer (lease_redis.c, "late scripts"): a late record of an unknown
 * generation would fence what was made since, a late retirement would take a newer record away. So what writes carries a deadline
 * in the server's time, asked for just before. These calls are rare: two round trips will do. */
#include "journal.h"
#include "redis.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RETIRED_MS     "2592000000" /* 30 days */
#define KEY_MAX        512
#define GENERATION_MAX 4096
#define WHY_MAX        200 /* the file has all of it */
#define PAGE           "100"

/* KEYS of both: quarantine, retired, quarantined.  ARGV: field, or "" for any. */
static const char look[] = "local records, field = KEYS[1], ARGV[1]\n"
                           "if field == '' then return redis.call('HLEN', records) > 0 and 'yes' or 'no' end\n"
                           "if redis.call('HEXISTS', records, field) == 1 then return 'yes' end\n"
                           "for _, one in ipairs(redis.call('HKEYS', records)) do\n"
                           "  if one:sub(1, 1) == '?' then return 'yes' end\n"
                           "end\n"
                           "return 'no'\n";

/* ARGV: record, again or retire; deadline; field, or "" (retire) for all; id; value; how long `retired` is kept, in ms. */
static const char change[] =
    "local what, records, retired, ids = ARGV[1], KEYS[1], KEYS[2], KEYS[3]\n"
    "local deadline, field, id, value, kept = ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])\n"
    "local t = redis.call('TIME')\n"
    "local now = string.format('%d%06d', t[1], t[2])\n"
    "if #now > #deadline or (#now == #deadline and now > deadline) then return 'late' end\n"
    "if what ~= 'retire' then\n"
    "  if what == 'again' and redis.call('ZSCORE', retired, field) then return 'retired' end\n"
    "  redis.call('HSETNX', records, field, value)\n"
    "  redis.call('ZADD', ids, 0, id)\n"
    "  redis.call('ZREM', retired, field)\n"
    "  return 'done'\n"
    "end\n"

    "local ms = tonumber(t[1]) * 1000\n"
    "local gone = field == '' and redis.call('HKEYS', records) or { field }\n"
    "for _, one in ipairs(gone) do\n"
    "  if redis.call('HEXISTS', records, one) == 1 then\n"
    "    redis.call('ZADD', retired, string.format('%.0f', ms), one)\n" /* first: an error after it leaves a fence */
    "    redis.call('PEXPIRE', retired, ARGV[6])\n"
    "    redis.call('HDEL', records, one)\n"
    "  end\n"
    "end\n"
    "redis.call('ZREMRANGEBYSCORE', retired, '-inf', string.format('%.0f', ms - kept))\n"
    "if redis.call('EXISTS', records) == 0 then redis.call('ZREM', ids, id) end\n"
    "return 'done'\n";

typedef struct mirror { /* fixed at birth */
    pdk_journal *local;
    pdk_redis *redis;
    char *scope;
} mirror;

typedef struct keys {
    char records[KEY_MAX], retired[KEY_MAX], ids[KEY_MAX];
} keys;

static void memory_leave(void *p)
{
    free(*(void **)p);
}
#define AUTO_MEMORY __attribute__((cleanup(memory_leave)))

/* ---- one question ---- */

static int fail(mirror *m, const char *what, pdk_error *err)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s %s", pdk_redis_place(m->redis), what);
}

static int fail_reply(mirror *m, const pdk_redis_reply *reply, pdk_error *err)
{
    if (reply->kind != PDK_REDIS_ERROR)
        return fail(m, "gave an answer that paddock's script does not give", err);
    const char *hint =
        strncmp(reply->text, "NOPERM", 6) == 0
            ? "; its user needs TIME, EVAL, and the commands of hashes and sorted sets on the keys of the prefix"
            : "";
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s answered: %.160s%s", pdk_redis_place(m->redis),
                    reply->text, hint);
}

/* `id` NULL: only what belongs to no id. */
static int keys_of(mirror *m, const char *id, keys *out, pdk_error *err)
{
    const char *prefix = pdk_redis_prefix(m->redis);
    /* the id is what stands behind the last colon, so two pairs of scope and id never share a key */
    if (id != NULL && (id[0] == '\0' || strchr(id, ':') != NULL))
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "\"%.64s\" cannot be the id of a record in redis", id);
    int n = snprintf(out->records, KEY_MAX, "{%s}:quarantine:%s:%s", prefix, m->scope, id != NULL ? id : "");
    snprintf(out->retired, KEY_MAX, "{%s}:retired:%s:%s", prefix, m->scope, id != NULL ? id : "");
    snprintf(out->ids, KEY_MAX, "{%s}:quarantined:%s", prefix, m->scope);
    if (n < 0 || n + 1 >= KEY_MAX) /* `quarantined` may be one longer */
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0,
                        "the scope and the sandbox id are too long for a record in redis");
    return 0;
}

/* The connection's deadline, in the server's time. It was that or later when the answer came, so this is not after ours. */
static int deadline_there(mirror *m, pdk_redis_conn *c, char out[24], pdk_error *err)
{
    static const char *const args[] = { "TIME" };
    PDK_AUTO_PACK time = PDK_NO_PACK;
    pdk_redis_reply reply;
    size_t cursor = 0;
    pdk_view key, seconds = PDK_NO_VIEW, micros = PDK_NO_VIEW;
    if (pdk_redis_ask_list(c, args, 1, &time, &reply, err) < 0)
        return -1;
    if (reply.kind != PDK_REDIS_STRINGS || !pdk_view_next(pdk_view_of(&time), &cursor, &key, &seconds) ||
        !pdk_view_next(pdk_view_of(&time), &cursor, &key, &micros))
        return fail_reply(m, &reply, err);
    int64_t left = (pdk_redis_deadline(c) - pdk_now_monotonic()) / 1000;
    long long s = atoll(pdk_view_str(seconds, NULL)), us = atoll(pdk_view_str(micros, NULL));
    if (s <= 0 || s > INT32_MAX * 1000LL || us < 0 || us > 999999)
        return fail(m, "does not know what time it is", err);
    snprintf(out, 24, "%lld", s * 1000000 + us + left);
    return 0;
}

/* Runs a script; where its second argument, the deadline, is NULL, it is filled in. */
static int run(mirror *m, const char *script, const char *id, const char *const *argv, int n, pdk_redis_reply *out,
               pdk_error *err)
{
    keys k;
    char deadline[24];
    const char *args[6 + 6] = { "EVAL", script, "3", k.records, k.retired, k.ids };
    if (keys_of(m, id, &k, err) < 0)
        return -1;
    pdk_redis_conn *c = pdk_redis_take(m->redis, err);
    if (c == NULL)
        return -1;
    int rc = 0;
    for (int i = 0; i < n; i++)
        args[6 + i] = argv[i];
    if (n > 1 && argv[1] == NULL) {
        rc = deadline_there(m, c, deadline, err);
        args[7] = deadline;
    }
    if (rc == 0)
        rc = pdk_redis_ask(c, args, 6 + n, out, err);
    pdk_redis_give(m->redis, c);
    if (rc == 0 && out->kind != PDK_REDIS_TEXT)
        return fail_reply(m, out, err);
    return rc == 0 && strcmp(out->text, "late") == 0 ? fail(m, "was too slow, and has changed nothing", err) : rc;
}

/* What a record is called in the hash of its id; `stamp` of one of an unknown generation. NULL = no memory. */
static char *field_of(const char *generation, const char *stamp)
{
    const char *rest = generation != NULL ? generation : stamp;
    char *field = malloc(strlen(rest) + 2);
    if (field != NULL)
        sprintf(field, "%c%s", generation != NULL ? 'g' : '?', rest);
    return field;
}

static int no_memory(pdk_error *err)
{
    return pdk_fail(err, PDK_E_IO_ERROR, ENOMEM, "the quarantine records in redis cannot be handled");
}

/* `what`: record, or again. 0 = the server has it, 1 (again only) = it was retired. */
static int publish(mirror *m, const char *what, const char *id, const char *generation, const char *stamp, const char *why,
                   pdk_error *err)
{
    char value[WHY_MAX + 64];
    pdk_redis_reply reply;
    AUTO_MEMORY char *field = field_of(generation, stamp);
    if (field == NULL)
        return no_memory(err);
    if (strlen(field) > GENERATION_MAX)
        return pdk_fail(err, PDK_E_IO_ERROR, 0, "the generation of sandbox %s is too long to be recorded in redis", id);
    snprintf(value, sizeof value, "%s %.*s", stamp, WHY_MAX, why);
    const char *argv[] = { what, NULL, field, id, value, RETIRED_MS };
    if (run(m, change, id, argv, 6, &reply, err) < 0)
        return -1;
    if (strcmp(reply.text, "retired") == 0)
        return 1;
    return strcmp(reply.text, "done") == 0 ? 0 : fail_reply(m, &reply, err);
}

/* An error of the server, as one of the journal. */
static int storage_error(pdk_error *own, pdk_error *err, const char *what)
{
    if (own->kind != PDK_E_IO_ERROR)
        pdk_error_become(own, PDK_E_IO_ERROR, NULL, "%s", what);
    pdk_error_move(err, own);
    return -1;
}

/* ---- what the local journal has ---- */

typedef struct local_record { /* borrowed from its list */
    const char *id, *generation, *why, *path;
    char stamp[32];
} local_record;

/* The next one of this scope that can be read; false = there is none. */
static bool local_next(const pdk_pack *list, size_t *cursor, local_record *out)
{
    pdk_view key, one;
    while (pdk_view_next(pdk_view_of(list), cursor, &key, &one)) {
        double at = 0;
        *out = (local_record){ .id = pdk_view_str(pdk_view_get(one, "sandbox_id"), NULL),
                               .generation = pdk_view_str(pdk_view_get(one, "generation"), NULL),
                               .why = pdk_view_str(pdk_view_get(one, "why"), NULL),
                               .path = pdk_view_str(pdk_view_get(one, "path"), NULL) };
        pdk_view_num(pdk_view_get(one, "at"), &at);
        snprintf(out->stamp, sizeof out->stamp, "%.6f", at);
        if (out->id != NULL && out->path != NULL && pdk_view_bool(pdk_view_get(one, "here"), false))
            return true;
    }
    return false;
}

/* When the record of an unknown generation was made, as its file says; "" = there is none by now. */
static int stamp_of(mirror *m, const char *id, char *stamp, size_t size, pdk_error *err)
{
    PDK_AUTO_PACK list = PDK_NO_PACK;
    size_t cursor = 0;
    local_record r;
    stamp[0] = '\0';
    if (pdk_journal_list(m->local, &list, err) < 0)
        return -1;
    while (local_next(&list, &cursor, &r))
        if (r.generation == NULL && strcmp(r.id, id) == 0)
            snprintf(stamp, size, "%s", r.stamp);
    return 0;
}

/* ---- the journal's calls ---- */

static int mirror_record(void *self, const char *id, const char *generation, const char *why, pdk_error *err)
{
    mirror *m = self;
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    char stamp[32];
    if (pdk_journal_record(m->local, id, generation, why, err) < 0)
        return -1;
    snprintf(stamp, sizeof stamp, "%.6f", pdk_to_seconds(pdk_now_wall()));
    if (generation == NULL && stamp_of(m, id, stamp, sizeof stamp, err) < 0)
        return -1;
    if (publish(m, "record", id, generation, stamp, why, &own) == 0)
        return 0;
    return storage_error(&own, err, "other machines cannot be told that it must not be used again");
}

static int mirror_has(void *self, const char *id, const char *generation, pdk_error *err)
{
    mirror *m = self;
    pdk_redis_reply reply;
    int here = pdk_journal_has(m->local, id, generation, err);
    if (here != 0)
        return here;
    AUTO_MEMORY char *field = generation == NULL ? strdup("") : field_of(generation, "");
    if (field == NULL)
        return no_memory(err);
    const char *argv[] = { field };
    if (run(m, look, id, argv, 1, &reply, err) < 0)
        return -1;
    bool yes = strcmp(reply.text, "yes") == 0;
    return yes || strcmp(reply.text, "no") == 0 ? yes : fail_reply(m, &reply, err);
}

/* There first: what is left when only half of it is done is a file, which can be published and retired again. */
static int mirror_retire(void *self, const char *id, const char *generation, pdk_error *err)
{
    mirror *m = self;
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    pdk_redis_reply reply;
    AUTO_MEMORY char *field = generation == NULL ? strdup("") : field_of(generation, "");
    if (field == NULL)
        return no_memory(err);
    const char *argv[] = { "retire", NULL, field, id, "", RETIRED_MS };
    int rc = run(m, change, id, argv, 6, &reply, &own);
    if (rc == 0 && strcmp(reply.text, "done") != 0)
        rc = fail_reply(m, &reply, &own);
    if (rc < 0)
        return storage_error(&own, err, "the quarantine record cannot be retired");
    return pdk_journal_retire(m->local, id, generation, err);
}

/* ---- republish ---- */

/* No other file stands in the folder of the id, readable or not. */
static bool alone(const pdk_pack *list, const char *path)
{
    pdk_view key, one;
    size_t cursor = 0, len = strcspn(path, "/");
    int there = 0;
    while (pdk_view_next(pdk_view_of(list), &cursor, &key, &one)) {
        const char *other = pdk_view_str(pdk_view_get(one, "path"), NULL);
        there += other != NULL && strncmp(other, path, len) == 0;
    }
    return there == 1;
}

static int mirror_republish(void *self, pdk_error *err)
{
    mirror *m = self;
    PDK_AUTO_PACK list = PDK_NO_PACK;
    size_t cursor = 0;
    local_record r;
    if (pdk_journal_list(m->local, &list, err) < 0)
        return -1;
    while (local_next(&list, &cursor, &r)) {
        PDK_AUTO_ERROR own = PDK_NO_ERROR;
        int retired = publish(m, "again", r.id, r.generation, r.stamp, r.why != NULL ? r.why : "", &own);
        if (retired < 0)
            return storage_error(&own, err, "the quarantine records cannot be published");
        /* Retiring an unknown one takes all of the id, also what nobody has proven absent: only where it is alone. A record that
         * comes into being just now is told to the server too, so losing its file here opens no gap. */
        if (retired == 1 && (r.generation != NULL || alone(&list, r.path)) &&
            pdk_journal_retire(m->local, r.id, r.generation, err) < 0)
            return -1;
    }
    return 0;
}

/* ---- list ---- */

typedef struct known { /* what the local list has; borrowed from it */
    local_record *v;
    size_t n;
} known;

static void known_free(known *k)
{
    free(k->v);
}
#define AUTO_KNOWN __attribute__((cleanup(known_free))) known

static bool read_known(const pdk_pack *list, known *out)
{
    size_t cursor = 0;
    local_record r;
    out->v = calloc(pdk_view_count(pdk_view_of(list)) + 1, sizeof *out->v);
    while (out->v != NULL && local_next(list, &cursor, &r))
        out->v[out->n++] = r;
    return out->v != NULL;
}

static bool is_known(const known *k, const char *id, const char *field)
{
    for (size_t i = 0; i < k->n; i++) {
        const local_record *r = &k->v[i];
        bool same = field[0] == 'g' ? r->generation != NULL && strcmp(r->generation, field + 1) == 0
                                    : r->generation == NULL && strcmp(r->stamp, field + 1) == 0;
        if (same && strcmp(r->id, id) == 0)
            return true;
    }
    return false;
}

static void list_one(mirror *m, pdk_pack *out, pdk_mark *list, const char *path, const char *id, const char *field,
                     const char *value)
{
    const char *why = strchr(value, ' ');
    double at = strtod(value, NULL), age = pdk_to_seconds(pdk_now_wall()) - at;
    pdk_mark one = pdk_begin_map(out);
    pdk_kv_cstr(out, &one, "path", path);
    pdk_kv_cstr(out, &one, "sandbox_id", id);
    pdk_kv_cstr(out, &one, "generation", field[0] == 'g' ? field + 1 : NULL);
    pdk_kv_cstr(out, &one, "why", why != NULL ? why + 1 : value);
    pdk_kv_cstr(out, &one, "scope", m->scope);
    pdk_kv_bool(out, &one, "here", true);
    pdk_kv_num(out, &one, "at", at);
    pdk_kv_num(out, &one, "age", age > 0 ? age : 0);
    pdk_end(out, &one);
    list->count++;
}

/* The answer to a command must be a list. */
static int ask_list(mirror *m, const char *const *args, int n, pdk_pack *list, pdk_error *err)
{
    pdk_redis_reply reply;
    pdk_redis_conn *c = pdk_redis_take(m->redis, err);
    int rc = c == NULL ? -1 : pdk_redis_ask_list(c, args, n, list, &reply, err);
    pdk_redis_give(m->redis, c);
    return rc == 0 && reply.kind != PDK_REDIS_STRINGS ? fail_reply(m, &reply, err) : rc;
}

static int list_id(mirror *m, const known *k, const char *id, pdk_pack *out, pdk_mark *list, pdk_error *err)
{
    keys of;
    PDK_AUTO_PACK records = PDK_NO_PACK;
    pdk_view key, field, value;
    size_t cursor = 0;
    if (keys_of(m, id, &of, err) < 0)
        return -1;
    const char *args[] = { "HGETALL", of.records };
    if (ask_list(m, args, 2, &records, err) < 0)
        return -1;
    while (pdk_view_next(pdk_view_of(&records), &cursor, &key, &field) &&
           pdk_view_next(pdk_view_of(&records), &cursor, &key, &value)) {
        const char *name = pdk_view_str(field, NULL);
        if (!is_known(k, id, name))
            list_one(m, out, list, of.records, id, name, pdk_view_str(value, NULL));
    }
    return 0;
}

/* What the server has and this machine has not, appended to the open `list`. */
static int list_there(mirror *m, const known *k, pdk_pack *out, pdk_mark *list, pdk_error *err)
{
    keys of;
    char from[80] = "-";
    if (keys_of(m, NULL, &of, err) < 0)
        return -1;
    for (bool more = true; more;) {
        PDK_AUTO_PACK ids = PDK_NO_PACK;
        pdk_view key, id;
        size_t cursor = 0;
        const char *args[] = { "ZRANGEBYLEX", of.ids, from, "+", "LIMIT", "0", PAGE };
        if (ask_list(m, args, 7, &ids, err) < 0)
            return -1;
        more = false;
        while (pdk_view_next(pdk_view_of(&ids), &cursor, &key, &id)) {
            size_t len;
            const char *name = pdk_view_str(id, &len);
            if (len > 63 || strlen(name) != len)
                return fail(m, "has an id among those that are quarantined that paddock did not write", err);
            if (list_id(m, k, name, out, list, err) < 0)
                return -1;
            snprintf(from, sizeof from, "(%s", name); /* the next page starts behind it */
            more = true;
        }
    }
    return 0;
}

static int mirror_list(void *self, pdk_pack *out, pdk_error *err)
{
    mirror *m = self;
    PDK_AUTO_ERROR own = PDK_NO_ERROR;
    PDK_AUTO_PACK here = PDK_NO_PACK;
    AUTO_KNOWN k = { 0 };
    pdk_view key, one;
    size_t cursor = 0;
    if (pdk_journal_list(m->local, &here, err) < 0)
        return -1;
    if (!read_known(&here, &k))
        return no_memory(err);
    pdk_mark list = pdk_begin_list(out);
    for (; pdk_view_next(pdk_view_of(&here), &cursor, &key, &one); list.count++)
        pdk_put_view(out, one);
    int rc = list_there(m, &k, out, &list, &own);
    pdk_end(out, &list);
    if (rc < 0)
        return storage_error(&own, err, "the quarantine records of other machines cannot be listed");
    return out->failed ? pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal's list") : 0;
}

/* ---- birth and end ---- */

static void mirror_close(void *self)
{
    pdk_redis_close(((mirror *)self)->redis);
}

static void mirror_free(void *self)
{
    mirror *m = self;
    pdk_journal_free(m->local);
    pdk_redis_free(m->redis);
    free(m->scope);
    free(m);
}

static const pdk_journal_ops mirror_ops = {
    .type = "redis",
    .record = mirror_record,
    .has = mirror_has,
    .retire = mirror_retire,
    .list = mirror_list,
    .republish = mirror_republish,
    .close = mirror_close,
    .free = mirror_free,
};

pdk_journal *pdk_journal_mirror(pdk_journal *local, const char *url, const char *scope, pdk_error *err)
{
    mirror *m = calloc(1, sizeof *m);
    if (m == NULL) {
        pdk_journal_free(local);
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal");
        return NULL;
    }
    m->local = local;
    if ((m->scope = strdup(scope)) == NULL)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the journal");
    if (m->scope == NULL || (m->redis = pdk_redis_new(url, err)) == NULL) {
        mirror_free(m);
        return NULL;
    }
    return pdk_journal_new(&mirror_ops, m, err);
}
