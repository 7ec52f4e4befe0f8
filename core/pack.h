/* pack.h -- plain data (nil, booleans, numbers, strings, tables of them) packed into bytes.
 *
 * Why: data crosses between Lua states that may belong to different threads, waits in queues, and stays in the
 * registry for as long as a sandbox lives. A pack is one block of memory that any thread may read without any
 * lua_State; a Lua table of the same content costs several times as much.
 *
 * Format: a tag byte, then  n f t : nothing;  i d : 8 bytes;  s : length (4 bytes) and bytes;
 *         [ : count (4), length of what follows (4), then values;  { : the same, then key, value pairs.
 *         Host byte order: it never leaves the process. Tables nest at most PDK_PACK_DEPTH deep.
 */
#ifndef PDK_PACK_H
#define PDK_PACK_H

#include "error.h"
#include <lua.h>

#define PDK_PACK_DEPTH 32
#define PDK_PACK_MAX (64u << 20) /* bytes of one pack */

typedef struct pdk_pack { /* owned by whoever declared it; one thread at a time */
    unsigned char *data;
    size_t len, cap;
    bool failed; /* out of memory or too large; all later calls do nothing */
    bool lent;   /* data is its declarer's (PDK_PACK_ON) as long as it is large enough; not freed */
} pdk_pack;
typedef struct pdk_view { /* a borrowed look at one packed value; valid as long as the pack is unchanged */
    const unsigned char *p;
    size_t len;
} pdk_view;

#define PDK_NO_PACK ((pdk_pack){ 0 })
/* Empty, on an array of its declarer's that outlives it: no allocation as long as that is large enough. */
#define PDK_PACK_ON(room) ((pdk_pack){ .data = (room), .cap = sizeof (room), .lent = true })
#define PDK_NO_VIEW ((pdk_view){ 0 })
#define PDK_AUTO_PACK __attribute__((cleanup(pdk_pack_free))) pdk_pack

void pdk_pack_free(pdk_pack *p);
void pdk_pack_reset(pdk_pack *p); /* empty, memory kept */
bool pdk_pack_copy(pdk_pack *to, pdk_view from); /* replaces the content of `to`; false = no memory */

/* Writing. Values are appended; between begin and end of a map, keys and values alternate. */
void pdk_put_nil(pdk_pack *p);
void pdk_put_bool(pdk_pack *p, bool b);
void pdk_put_int(pdk_pack *p, int64_t i);
void pdk_put_num(pdk_pack *p, double d);
void pdk_put_str(pdk_pack *p, const char *s, size_t len);
void pdk_put_cstr(pdk_pack *p, const char *s); /* NULL = nil */
void pdk_put_view(pdk_pack *p, pdk_view v);    /* an empty view = nil */
typedef struct pdk_mark {
    size_t at;
    uint32_t count;
} pdk_mark;
pdk_mark pdk_begin_map(pdk_pack *p);
pdk_mark pdk_begin_list(pdk_pack *p);
void pdk_end(pdk_pack *p, pdk_mark *m); /* m->count = pairs or values; the put_k helpers count */
/* key = value in the open map `m`; nothing is written for a nil value. */
void pdk_kv_str(pdk_pack *p, pdk_mark *m, const char *key, const char *s, size_t len);
void pdk_kv_cstr(pdk_pack *p, pdk_mark *m, const char *key, const char *s);
void pdk_kv_int(pdk_pack *p, pdk_mark *m, const char *key, int64_t i);
void pdk_kv_num(pdk_pack *p, pdk_mark *m, const char *key, double d);
void pdk_kv_bool(pdk_pack *p, pdk_mark *m, const char *key, bool b);
void pdk_kv_view(pdk_pack *p, pdk_mark *m, const char *key, pdk_view v);

/* Reading. */
pdk_view pdk_view_of(const pdk_pack *p);                   /* the first value of the pack */
pdk_view pdk_view_nth(const pdk_pack *p, size_t n);        /* the n-th value, from 0; empty when there is none */
char pdk_view_tag(pdk_view v);                             /* 'n' for an empty view too */
bool pdk_view_is_nil(pdk_view v);
pdk_view pdk_view_get(pdk_view map, const char *key);      /* empty when absent or not a map */
pdk_view pdk_view_get_n(pdk_view map, const char *key, size_t len);
size_t pdk_view_count(pdk_view table);                     /* pairs or values; 0 for anything else */
/* Iterate: start with *cursor = 0. For a list, *key is empty. */
bool pdk_view_next(pdk_view table, size_t *cursor, pdk_view *key, pdk_view *value);
const char *pdk_view_str(pdk_view v, size_t *len);         /* NULL when not a string; NUL-terminated in place */
char *pdk_view_dup(pdk_view v);                            /* malloc'd copy of a string, or NULL */
bool pdk_view_int(pdk_view v, int64_t *out);               /* an integer, or a float with an integral value */
bool pdk_view_num(pdk_view v, double *out);
bool pdk_view_bool(pdk_view v, bool dflt);                 /* dflt unless it is a boolean */
bool pdk_view_equal(pdk_view a, pdk_view b);               /* same bytes */

/* Lua. Functions, userdata and threads are refused (invalid_argument naming the path), as are cycles, depth and
 * size beyond the limits. Never raises: 0 or -1. A table with keys 1..n only is a list; an empty one is a map. */
int pdk_pack_from_lua(lua_State *L, int index, pdk_pack *out, pdk_error *err);
/* Pushes the value (+1). Raises only on lack of memory: call it inside a protected call. */
void pdk_view_to_lua(lua_State *L, pdk_view v);

#endif
