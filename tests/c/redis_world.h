/* redis_world.h -- what the tests of the `redis` ownership store share: its calls in a form that reads well. */
#ifndef REDIS_WORLD_H
#define REDIS_WORLD_H

#include "lease.h"
#include "limit.h"
#include "redis.h"
#include "redis_addr.h"
#include "redis_server.h"

#define WAIT_S 2.0 /* PDK_REDIS_WAIT */

static inline void lease_leave(pdk_lease **l)
{
    pdk_lease_free(*l);
}
#define AUTO_LEASE __attribute__((cleanup(lease_leave))) pdk_lease

static inline pdk_lease *store(const redis_server *s, const char *runtime, double ttl)
{
    PDK_AUTO_ERROR err = PDK_NO_ERROR;
    pdk_lease *l = pdk_lease_redis(s->url, "machine/boot", runtime, ttl, &err);
    if (l == NULL)
        fprintf(stderr, "  %s\n", err.message);
    return l;
}

/* The token, 0 = refused, -1 = no answer (said in `last_error`). */
static _Thread_local pdk_error last_error;
typedef int asker(pdk_lease *, const char *, int64_t, int64_t *, pdk_error *);
static inline int64_t asked(asker *fn, pdk_lease *l, const char *id, int64_t floor)
{
    int64_t token = 0;
    pdk_error_clear(&last_error);
    int rc = fn(l, id, floor, &token, &last_error);
    return rc == 1 ? token : rc;
}
#define take(l, id)    asked(pdk_lease_take, l, id, 0)
#define claim(l, id)   asked(pdk_lease_claim, l, id, 0)
#define destroy(l, id) asked(pdk_lease_claim_for_destroy, l, id, 0)

static inline int renew(pdk_lease *l, const char *id)
{
    pdk_renewal out = PDK_LOST;
    pdk_error_clear(&last_error);
    return pdk_lease_renew(l, id, &out, &last_error) < 0 ? -1 : (int)out;
}
static inline int release(pdk_lease *l, const char *id)
{
    pdk_error_clear(&last_error);
    return pdk_lease_release(l, id, &last_error);
}
/* "own a", "del b", "-" = nobody, "?" = no answer */
static inline const char *owner(pdk_lease *l, const char *id)
{
    static _Thread_local char text[80];
    pdk_lease_owner o;
    pdk_error_clear(&last_error);
    int rc = pdk_lease_owner_of(l, id, &o, &last_error);
    if (rc == 1)
        snprintf(text, sizeof text, "%s %s", o.del ? "del" : "own", o.owner);
    else
        snprintf(text, sizeof text, "%s", rc == 0 ? "-" : "?");
    return text;
}
#define CHECK_UNAVAILABLE(call, part) \
    do { \
        CHECK((call) == -1); \
        CHECK_KIND(last_error, PDK_E_OWNERSHIP_UNAVAILABLE); \
        CHECK_HAS(last_error.message, part); \
    } while (0)

/* Asks until the store answers again. */
static inline bool comes_back(pdk_lease *l, double seconds)
{
    for (double end = test_now() + seconds; test_now() < end; usleep(10000))
        if (strcmp(owner(l, "nobody"), "?") != 0)
            return true;
    return false;
}

/* What the store has about "x", as one text. */
static inline const char *state_of(const redis_server *s)
{
    static char text[4][400];
    static int at;
    char *out = text[at++ % 4];
    int n = 0;
    for (int i = 0; i < 2; i++)
        n += snprintf(out + n, 400 - (size_t)n, "%s; ",
                      redis_do(s, "GET {paddock}:%s:machine/boot:x", i == 0 ? "lease" : "last"));
    return out;
}

#endif
