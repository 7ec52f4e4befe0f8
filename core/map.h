/* map.h -- an intrusive hash table: the nodes live inside what they find. Not locked: its owner's lock guards it.
 * Keys are hashed with a secret of this process, since users choose them. Growing may fail for lack of memory: then the
 * chains get longer, and nothing is lost. */
#ifndef PDK_MAP_H
#define PDK_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct pdk_node {
    struct pdk_node *next;
    uint64_t hash;
} pdk_node;
typedef struct pdk_map {
    pdk_node **buckets;
    size_t size, count; /* size is 0 or a power of two */
} pdk_map;

/* SipHash-1-3 of the bytes with a random key that is made once. */
uint64_t pdk_hash(const void *key, size_t len);
/* false: no memory for the very first buckets; nothing was inserted. */
bool pdk_map_insert(pdk_map *m, pdk_node *n, uint64_t hash);
void pdk_map_remove(pdk_map *m, pdk_node *n);
/* The first node of that hash's chain, then by ->next: compare hash and key. */
pdk_node *pdk_map_chain(const pdk_map *m, uint64_t hash);
/* All nodes in no order: start with NULL. The given node may be removed after the next one was asked for. */
pdk_node *pdk_map_each(const pdk_map *m, pdk_node *after);
void pdk_map_free(pdk_map *m);

#define PDK_OF(node, type, member) ((type *)(void *)((char *)(node) - offsetof(type, member)))

#endif
