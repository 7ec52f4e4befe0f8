/* lease_redis.c -- the ownership store of runtimes on several machines: a redis server, 5.0 or later.
 *
 * Keys, all with the deployment's prefix as their hash tag, so that in a cluster they lie in one slot:
 *   {paddock}:lease:<scope>:<id>    "own <token> <runtime>" or "del ..."; lives as long as the lease
 *   {paddock}:last:<scope>:<id>     the same, or "free ..." once released; outlives it, so that an owner that slept learns
 *                                   whether somebody was there meanwhile
 *   {paddock}:counter               the last token, of all scopes; never expires
 *   {paddock}:session:<runtime>     which session of that runtime may act
 *
 * Every decision is one run of a script, which the server runs alone from start to end. It reads and checks all it needs before
 * its first write, as an error later would leave that write behind. Tokens are compared and kept as decimal strings: the script's
 * numbers are doubles.
 *
 * Late scripts. A server that hung runs what it was sent when it wakes up, and the client that sent it has long told its caller
 * that there was no answer. So a script carries two things, and changes nothing unless both hold:
 *   its session   a number that the runtime opened, newer than all before. After a call without an answer the runtime opens a
 *                 new one before it asks anything else, so nothing old can come into force behind its back;
 *   its deadline  in the server's own time: what nobody waits for any longer is not done, also when no new session was opened
 *                 (a runtime that gave up, or died). The server's time is learned anew from each answer, so that two clocks that
 *                 drift apart do not matter; a jump costs one more round trip.
 *
 * Expiry is by the server's clock. If that is set forward, leases end early: a guest refuses the former owner's token then, and
 * where there is no guest the operator must see to it that the clock is slewed, not set. Lost state (no persistence, a failover,
 * eviction under memory pressure) ends leases early as well; tokens go on growing, since none is below the clock. */
#include "lease.h"
#include "redis.h"

#include <inttypes.h>
#include <math.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KEPT_MS    (24 * 3600 * 1000.0)         /* `last` outlives its lease by this, or by ten TTLs */
#define TTL_MAX_MS (10 * 365 * 24 * 3600 * 1e3) /* more than this is "for ever" */
#define SESSION_MS "86400000"                   /* then it is opened anew: runtimes come and go, their keys must go too */
#define TRIES      3                            /* a session can end while it is used */
#define KEY_MAX    512

/* ---- the script ---- */

/* One text for everything that writes; ARGV[1] says what is done.
 *   open                                     KEYS: counter, session.  ARGV: how long the session is known, in ms
 *   take, claim, destroy, renew, release     KEYS: and lease, last.   ARGV: runtime, session, deadline, ttl in ms, how long
 *                                            `last` is kept in ms, floor
 * Answers "<word> <number> <time>". */
static const char script[] =
    "local what, counter_key, session_key, lease_key, last_key = ARGV[1], KEYS[1], KEYS[2], KEYS[3], KEYS[4]\n"
    "local MOST = '9223372036854775806'\n"
    "local t = redis.call('TIME')\n"
    "local now = string.format('%d%06d', t[1], t[2])\n"
    "local function larger(a, b) return #a > #b or (#a == #b and a > b) end\n"
    "local function damaged(key) return redis.error_reply('DAMAGED key ' .. key .. ' is not what paddock wrote') end\n"
    /* The counter's value, or nil when it is damaged or worn out. */
    "local function last_number()\n"
    "  local n = redis.call('GET', counter_key) or '0'\n"
    "  if (n == '0' or n:find('^[1-9]%d*$')) and not larger(n, MOST) then return n end\n"
    "end\n"
    /* A number larger than `base`, which no number before exceeds, and not below the clock. INCR knows all 64 bits. */
    "local function mint(base)\n"
    "  if larger(now, base) then redis.call('SET', counter_key, now) return now end\n"
    "  redis.call('SET', counter_key, base)\n"
    "  redis.call('INCR', counter_key)\n"
    "  return redis.call('GET', counter_key)\n"
    "end\n"

    "if what == 'open' then\n"
    "  local base = last_number()\n"
    "  if not base then return damaged(counter_key) end\n"
    "  local n = mint(base)\n"
    "  redis.call('SET', session_key, n, 'PX', ARGV[2])\n"
    "  return 'session ' .. n .. ' ' .. now\n"
    "end\n"

    "local me, session, deadline, ttl, kept, floor = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]\n"
    "if redis.call('GET', session_key) ~= session then return 'stale 0 ' .. now end\n"
    "if larger(now, deadline) then return 'late 0 ' .. now end\n"
    "local function read(key)\n"
    "  local text = redis.call('GET', key)\n"
    "  if not text then return true end\n"
    "  local state, token, owner = text:match('^(%l+) ([1-9]%d*) (.+)$')\n"
    "  if (state == 'own' or state == 'del' or state == 'free') and #token <= 19 then\n"
    "    return true, { state = state, token = token, owner = owner, text = text }\n"
    "  end\n"
    "end\n"
    "local sound, lease = read(lease_key)\n"
    "if not sound or (lease and lease.state == 'free') then return damaged(lease_key) end\n"
    "local known, last = read(last_key)\n"
    "if not known then return damaged(last_key) end\n"
    "last = lease or last\n"
    "local ours = last ~= nil and last.owner == me\n"
    "local function write(text)\n"
    "  redis.call('SET', lease_key, text, 'PX', ttl)\n"
    "  redis.call('SET', last_key, text, 'PX', kept)\n"
    "end\n"

    "if what == 'renew' then\n"
    "  if lease and ours then write(lease.text) return 'renewed 0 ' .. now end\n"
    "  return (last and not ours and 'lost 0 ' or 'lapsed 0 ') .. now\n"
    "end\n"
    "if what == 'release' then\n"
    "  if lease and ours then\n"
    "    redis.call('DEL', lease_key)\n"
    "    redis.call('SET', last_key, 'free ' .. lease.token .. ' ' .. me, 'PX', kept)\n"
    "  end\n"
    "  return 'done 0 ' .. now\n"
    "end\n"

    "local refused\n"
    "if what == 'take' then refused = lease and lease.state == 'del'\n"
    "elseif what == 'claim' then refused = lease and (not ours or lease.state == 'del')\n"
    "else refused = lease and not ours end\n"
    "if refused then return 'no 0 ' .. now end\n"
    "local state = what == 'destroy' and 'del' or 'own'\n"
    /* The token stays only where no ownership has changed: what we have, or had when it ran out. */
    "local same = ours and (lease or last.state == 'own' or (last.state == 'del' and state == 'del'))\n"
    "local token = last and last.token or '0'\n"
    "if not same or not larger(token, floor) then\n"
    "  local base = last_number()\n"
    "  if not base then return damaged(counter_key) end\n"
    "  if larger(token, base) then base = token end\n"
    "  if larger(floor, base) then base = floor end\n"
    "  if larger(base, MOST) then return damaged(last_key) end\n"
    "  token = mint(base)\n"
    "end\n"
    "write(state .. ' ' .. token .. ' ' .. me)\n"
    "return 'yes ' .. token .. ' ' .. now\n";

/* ---- the store ---- */

typedef struct store { /* fixed at birth, but for what `lock` guards */
    char runtime_id[64];
    char *scope;
    char ttl_ms[24], kept_ms[24];
    char sha[41]; /* by which the server knows the script */
    pdk_redis *redis;
    pdk_mutex lock;
    pdk_cond opened;
    bool used;       /* lock; a session was opened once */
    bool opening;    /* lock; one call opens a session, others wait for it */
    int64_t session; /* lock; 0 = none is open */
    int64_t ahead;   /* lock; of session != 0: microseconds by which the server's time is ahead of our monotonic one, at least */
} store;

typedef struct answer {
    char word[16];
    int64_t number; /* the token, or the session */
    int64_t time;   /* the server's, in microseconds */
} answer;

typedef struct use { /* one call's use of a session */
    int64_t session, ahead;
} use;

static int64_t micros(void)
{
    return pdk_now_monotonic() / 1000;
}

static int fail(store *s, const char *what, pdk_error *err)
{
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s %s", pdk_redis_place(s->redis), what);
}

/* What redis reported: never a no. */
static int fail_reply(store *s, const char *text, pdk_error *err)
{
    static const struct {
        const char *start, *hint;
    } hints[] = {
        { "MISCONF", "; its disk cannot be written" },
        { "OOM", "; raise its maxmemory" },
        { "READONLY", "; ownership.url must name the primary" },
        { "NOAUTH", "; put the password into ownership.url" },
        { "NOPERM", "; its user needs GET, SET, DEL, INCR, TIME, EVAL and EVALSHA on the keys of the prefix" },
        { "WRONGTYPE", "; something else writes to keys of paddock's prefix" },
        { "DAMAGED", "; something else writes to keys of paddock's prefix" },
    };
    const char *hint = "";
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++)
        if (strncmp(text, hints[i].start, strlen(hints[i].start)) == 0)
            hint = hints[i].hint;
    return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s answered: %.160s%s", pdk_redis_place(s->redis), text,
                    hint);
}

/* A whole number without sign or leading zeros, and what stands behind it. */
static bool read_number(const char *text, int64_t *out, const char **rest)
{
    int64_t n = 0;
    const char *c = text;
    for (; *c >= '0' && *c <= '9'; c++)
        if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, *c - '0', &n))
            return false;
    *rest = c;
    *out = n;
    return c > text && (*text != '0' || c == text + 1);
}

static bool read_answer(const char *text, answer *a)
{
    size_t n = strcspn(text, " ");
    const char *rest;
    if (n == 0 || n >= sizeof a->word || text[n] != ' ')
        return false;
    memcpy(a->word, text, n);
    a->word[n] = '\0';
    return read_number(text + n + 1, &a->number, &rest) && *rest == ' ' && read_number(rest + 1, &a->time, &rest) &&
           *rest == '\0';
}

/* ---- one run of it ---- */

/* `args`: two places for the command, the number of keys, keys and arguments. Answers 0; or -1, *sent = it may yet run. */
static int run(store *s, pdk_redis_conn *c, const char **args, int n, answer *out, bool *sent, pdk_error *err)
{
    pdk_redis_reply reply;
    *sent = true;
    args[0] = "EVALSHA";
    args[1] = s->sha;
    if (pdk_redis_ask(c, args, n, &reply, err) < 0)
        return -1;
    if (reply.kind == PDK_REDIS_ERROR && strncmp(reply.text, "NOSCRIPT", 8) == 0) { /* a new or a restarted server */
        args[0] = "EVAL";
        args[1] = script;
        if (pdk_redis_ask(c, args, n, &reply, err) < 0)
            return -1;
    }
    *sent = false;
    if (reply.kind == PDK_REDIS_ERROR)
        return fail_reply(s, reply.text, err);
    if (reply.kind != PDK_REDIS_TEXT || !read_answer(reply.text, out))
        return fail(s, "gave an answer that paddock's script does not give", err);
    return 0;
}

/* The name of a key: of the scope and that id, or (id NULL) of the whole deployment; `kind` says of what. */
static int key(store *s, const char *kind, const char *id, char out[KEY_MAX], pdk_error *err)
{
    /* the id is what stands behind the last colon, so two pairs of scope and id never share a key */
    if (id != NULL && (id[0] == '\0' || strchr(id, ':') != NULL))
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "\"%.64s\" cannot be the id of a lease", id);
    int n = id == NULL ? snprintf(out, KEY_MAX, "{%s}:%s", pdk_redis_prefix(s->redis), kind)
                       : snprintf(out, KEY_MAX, "{%s}:%s:%s:%s", pdk_redis_prefix(s->redis), kind, s->scope, id);
    if (n < 0 || n >= KEY_MAX)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "the scope and the sandbox id are too long for a lease");
    return 0;
}

/* ---- sessions ---- */

static int session_key(store *s, char out[KEY_MAX], pdk_error *err)
{
    char kind[80];
    snprintf(kind, sizeof kind, "session:%s", s->runtime_id);
    return key(s, kind, NULL, out, err);
}

/* The session is over for whoever uses it, unless a newer one was opened meanwhile. */
static void end_session(store *s, const use *u)
{
    PDK_GUARD(s->lock);
    if (s->session == u->session)
        s->session = 0;
}

static int open_session(store *s, pdk_redis_conn *c, use *u, pdk_error *err)
{
    char session[KEY_MAX], counter[KEY_MAX];
    if (session_key(s, session, err) < 0 || key(s, "counter", NULL, counter, err) < 0)
        return -1;
    const char *args[] = { NULL, NULL, "2", counter, session, "open", SESSION_MS };
    answer a = { .number = 0 };
    bool sent;
    if (run(s, c, args, 7, &a, &sent, err) < 0)
        return -1;
    if (strcmp(a.word, "session") != 0 || a.number == 0)
        return fail(s, "gave an answer that paddock's script does not give", err);
    u->session = a.number;
    u->ahead = a.time - micros();
    return 0;
}

/* The session to act in, opened if there is none. */
static int use_session(store *s, pdk_redis_conn *c, use *u, pdk_error *err)
{
    {
        PDK_GUARD(s->lock);
        while (s->session == 0 && s->opening)
            if (!pdk_cond_wait_until(&s->opened, &s->lock, pdk_redis_deadline(c)))
                return fail(s, "is slow: no session was opened in time", err);
        *u = (use){ s->session, s->ahead };
        if (s->session != 0)
            return 0;
        s->opening = true;
    }
    int rc = open_session(s, c, u, err);
    PDK_GUARD(s->lock);
    s->opening = false;
    if (rc == 0) {
        s->used = true;
        s->session = u->session;
        s->ahead = u->ahead;
    }
    pdk_cond_broadcast(&s->opened);
    return rc;
}

/* An answer tells the server's time: it was that or later when the answer arrived, so it is not less ahead. */
static void learn_time(store *s, const use *u, const answer *a)
{
    int64_t ahead = a->time - micros();
    PDK_GUARD(s->lock);
    if (s->session == u->session)
        s->ahead = ahead;
}

/* ---- calls ---- */

static int act_once(store *s, pdk_redis_conn *c, const char *id, const char *what, int64_t floor, answer *out,
                    pdk_error *err)
{
    use u = { 0, 0 };
    char lease[KEY_MAX], last[KEY_MAX], counter[KEY_MAX], session[KEY_MAX];
    if (key(s, "lease", id, lease, err) < 0 || key(s, "last", id, last, err) < 0 ||
        key(s, "counter", NULL, counter, err) < 0 || session_key(s, session, err) < 0 || use_session(s, c, &u, err) < 0)
        return -1;
    char number[24], deadline[24], least[24];
    snprintf(number, sizeof number, "%" PRId64, u.session);
    snprintf(deadline, sizeof deadline, "%" PRId64, pdk_redis_deadline(c) / 1000 + u.ahead);
    snprintf(least, sizeof least, "%" PRId64, floor);
    const char *args[] = { NULL, NULL,          "4",    counter,  session,   lease,      last,
                           what, s->runtime_id, number, deadline, s->ttl_ms, s->kept_ms, least };
    bool sent;
    if (run(s, c, args, sizeof args / sizeof *args, out, &sent, err) < 0) {
        if (sent) /* it may run yet: not in the session that we act in next */
            end_session(s, &u);
        return -1;
    }
    if (strcmp(out->word, "stale") == 0 || strcmp(out->word, "late") == 0) {
        end_session(s, &u);
        return 1;
    }
    learn_time(s, &u, out);
    return 0;
}

static int act(store *s, const char *id, const char *what, int64_t floor, answer *out, pdk_error *err)
{
    if (floor < 0)
        floor = 0;
    if (floor > INT64_MAX / 2) /* beyond every honest token: a guest's answer must not wear the counter out */
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "there is no larger token than %" PRId64, floor);
    pdk_redis_conn *c = pdk_redis_take(s->redis, err);
    if (c == NULL)
        return -1;
    int rc = 1;
    for (int i = 0; rc == 1 && i < TRIES; i++) /* what was refused changed nothing: it is asked again, in a new session */
        rc = act_once(s, c, id, what, floor, out, err);
    if (rc == 1)
        rc = fail(s, "ended every session that was opened: does its clock jump, or does something delete its keys?", err);
    pdk_redis_give(s->redis, c);
    return rc;
}

static int ask(store *s, const char *id, const char *what, int64_t floor, int64_t *token, pdk_error *err)
{
    answer a;
    if (act(s, id, what, floor, &a, err) < 0)
        return -1;
    if (strcmp(a.word, "no") == 0)
        return 0;
    if (strcmp(a.word, "yes") != 0 || a.number <= floor)
        return fail(s, "gave an answer that paddock's script does not give", err);
    *token = a.number;
    return 1;
}

static int redis_take(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, id, "take", floor, token, err);
}
static int redis_claim(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, id, "claim", floor, token, err);
}
static int redis_claim_for_destroy(void *self, const char *id, int64_t floor, int64_t *token, pdk_error *err)
{
    return ask(self, id, "destroy", floor, token, err);
}

static int redis_renew(void *self, const char *id, pdk_renewal *out, pdk_error *err)
{
    static const char *const words[] = { "renewed", "lapsed", "lost" };
    answer a;
    if (act(self, id, "renew", 0, &a, err) < 0)
        return -1;
    for (int i = 0; i < 3; i++)
        if (strcmp(a.word, words[i]) == 0) {
            *out = (pdk_renewal)i;
            return 0;
        }
    return fail(self, "gave an answer that paddock's script does not give", err);
}

static int redis_release(void *self, const char *id, pdk_error *err)
{
    answer a;
    return act(self, id, "release", 0, &a, err);
}

/* Reads only, so it needs no session, and is answered also when the server can write nothing. */
static int redis_owner_of(void *self, const char *id, pdk_lease_owner *out, pdk_error *err)
{
    store *s = self;
    char lease[KEY_MAX];
    pdk_redis_reply reply;
    if (key(s, "lease", id, lease, err) < 0)
        return -1;
    pdk_redis_conn *c = pdk_redis_take(s->redis, err);
    if (c == NULL)
        return -1;
    const char *args[] = { "GET", lease };
    int rc = pdk_redis_ask(c, args, 2, &reply, err);
    pdk_redis_give(s->redis, c);
    if (rc < 0)
        return -1;
    if (reply.kind == PDK_REDIS_ERROR)
        return fail_reply(s, reply.text, err);
    if (reply.kind == PDK_REDIS_NIL)
        return 0;
    const char *rest = reply.text;
    out->del = strncmp(reply.text, "del ", 4) == 0;
    if (reply.kind != PDK_REDIS_TEXT || (!out->del && strncmp(reply.text, "own ", 4) != 0) ||
        !read_number(reply.text + 4, &out->token, &rest) || *rest != ' ' || rest[1] == '\0' ||
        strlen(rest + 1) >= sizeof out->owner)
        return pdk_fail(err, PDK_E_OWNERSHIP_UNAVAILABLE, 0, "redis at %s: key %.100s is not what paddock wrote",
                        pdk_redis_place(s->redis), lease);
    memcpy(out->owner, rest + 1, strlen(rest + 1) + 1);
    out->ours = strcmp(out->owner, s->runtime_id) == 0;
    return 1;
}

/* ---- birth and end ---- */

/* Our last session ends, so that nothing which was sent can still come into force. */
static int end_sessions(store *s, pdk_error *err)
{
    char session[KEY_MAX];
    pdk_redis_reply reply;
    if (session_key(s, session, err) < 0)
        return -1;
    pdk_redis_conn *c = pdk_redis_take(s->redis, err);
    if (c == NULL)
        return -1;
    const char *args[] = { "DEL", session };
    int rc = pdk_redis_ask(c, args, 2, &reply, err);
    pdk_redis_give(s->redis, c);
    return rc == 0 && reply.kind == PDK_REDIS_ERROR ? fail_reply(s, reply.text, err) : rc;
}

static int redis_close(void *self, pdk_error *err)
{
    store *s = self;
    bool used;
    {
        PDK_GUARD(s->lock);
        used = s->used;
    }
    int rc = used ? end_sessions(s, err) : 0;
    pdk_redis_close(s->redis);
    return rc;
}

static void redis_free(void *self)
{
    store *s = self;
    pdk_redis_free(s->redis);
    pdk_cond_destroy(&s->opened);
    pdk_mutex_destroy(&s->lock);
    free(s->scope);
    free(s);
}

static const pdk_lease_ops redis_ops = {
    .type = "redis",
    .take = redis_take,
    .claim = redis_claim,
    .claim_for_destroy = redis_claim_for_destroy,
    .renew = redis_renew,
    .release = redis_release,
    .owner_of = redis_owner_of,
    .close = redis_close,
    .free = redis_free,
};

static bool sha1_hex(const char *text, char out[41])
{
    unsigned char raw[EVP_MAX_MD_SIZE];
    unsigned int n = 0;
    if (EVP_Digest(text, strlen(text), raw, &n, EVP_sha1(), NULL) != 1 || n != 20)
        return false;
    for (unsigned int i = 0; i < n; i++)
        snprintf(out + 2 * i, 3, "%02x", raw[i]);
    return true;
}

pdk_lease *pdk_lease_redis(const char *url, const char *scope, const char *runtime_id, double ttl, pdk_error *err)
{
    store *s = calloc(1, sizeof *s);
    if (s == NULL) {
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store");
        return NULL;
    }
    pdk_mutex_init(&s->lock);
    pdk_cond_init(&s->opened);
    double ms = ttl > 0 ? fmin(ceil(ttl * 1000), TTL_MAX_MS) : 1;
    snprintf(s->ttl_ms, sizeof s->ttl_ms, "%.0f", ms);
    snprintf(s->kept_ms, sizeof s->kept_ms, "%.0f", ms + fmax(KEPT_MS, 10 * ms));
    snprintf(s->runtime_id, sizeof s->runtime_id, "%s", runtime_id);
    bool sound = (s->scope = strdup(scope)) != NULL && sha1_hex(script, s->sha);
    if (!sound)
        pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the ownership store, or no SHA-1");
    if (!sound || (s->redis = pdk_redis_new(url, err)) == NULL) {
        redis_free(s);
        return NULL;
    }
    return pdk_lease_new(&redis_ops, s, err);
}
