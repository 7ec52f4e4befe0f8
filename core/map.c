/* map.c -- see map.h. */
#include "map.h"
#include "sync.h"

#include <stdlib.h>
#include <string.h>

static uint64_t secret[2];
static pthread_once_t secret_once = PTHREAD_ONCE_INIT;
static void make_secret(void)
{
    pdk_random(secret, sizeof secret);
}

static inline uint64_t rotl(uint64_t x, int b)
{
    return (x << b) | (x >> (64 - b));
}
static inline void rounds(uint64_t v[4], int n)
{
    while (n-- > 0) {
        v[0] += v[1]; v[1] = rotl(v[1], 13); v[1] ^= v[0]; v[0] = rotl(v[0], 32);
        v[2] += v[3]; v[3] = rotl(v[3], 16); v[3] ^= v[2];
        v[0] += v[3]; v[3] = rotl(v[3], 21); v[3] ^= v[0];
        v[2] += v[1]; v[1] = rotl(v[1], 17); v[1] ^= v[2]; v[2] = rotl(v[2], 32);
    }
}

uint64_t pdk_hash(const void *key, size_t len)
{
    pthread_once(&secret_once, make_secret);
    const unsigned char *p = key;
    uint64_t v[4] = { secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du,
                      secret[0] ^ 0x6c7967656e657261u, secret[1] ^ 0x7465646279746573u };
    uint64_t m, last = (uint64_t)len << 56;
    size_t whole = len & ~(size_t)7;
    for (size_t i = 0; i < whole; i += 8) {
        memcpy(&m, p + i, 8);
        v[3] ^= m;
        rounds(v, 1);
        v[0] ^= m;
    }
    for (size_t i = whole; i < len; i++)
        last |= (uint64_t)p[i] << (8 * (i - whole));
    v[3] ^= last;
    rounds(v, 1);
    v[0] ^= last;
    v[2] ^= 0xff;
    rounds(v, 3);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

static bool resize(pdk_map *m, size_t size)
{
    pdk_node **fresh = calloc(size, sizeof *fresh);
    if (fresh == NULL)
        return false;
    for (size_t i = 0; i < m->size; i++)
        for (pdk_node *n = m->buckets[i], *next; n != NULL; n = next) {
            next = n->next;
            pdk_node **at = &fresh[n->hash & (size - 1)];
            n->next = *at;
            *at = n;
        }
    free(m->buckets);
    m->buckets = fresh;
    m->size = size;
    return true;
}

bool pdk_map_insert(pdk_map *m, pdk_node *n, uint64_t hash)
{
    if (m->count >= m->size && !resize(m, m->size == 0 ? 16 : m->size * 2) && m->size == 0)
        return false;
    pdk_node **at = &m->buckets[hash & (m->size - 1)];
    n->hash = hash;
    n->next = *at;
    *at = n;
    m->count++;
    return true;
}

void pdk_map_remove(pdk_map *m, pdk_node *n)
{
    if (m->size == 0)
        return;
    for (pdk_node **at = &m->buckets[n->hash & (m->size - 1)]; *at != NULL; at = &(*at)->next)
        if (*at == n) {
            *at = n->next;
            n->next = NULL;
            m->count--;
            break;
        }
    if (m->size > 1024 && m->count < m->size / 8) /* a burst of identities must not keep its memory for ever */
        resize(m, m->size / 4);
}

pdk_node *pdk_map_chain(const pdk_map *m, uint64_t hash)
{
    return m->size == 0 ? NULL : m->buckets[hash & (m->size - 1)];
}

pdk_node *pdk_map_each(const pdk_map *m, pdk_node *after)
{
    size_t i = 0;
    if (after != NULL) {
        if (after->next != NULL)
            return after->next;
        i = (after->hash & (m->size - 1)) + 1;
    }
    for (; i < m->size; i++)
        if (m->buckets[i] != NULL)
            return m->buckets[i];
    return NULL;
}

void pdk_map_free(pdk_map *m)
{
    free(m->buckets);
    *m = (pdk_map){ 0 };
}
