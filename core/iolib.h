/* iolib.h -- what the parts of `paddock.io` share. */
#ifndef PDK_IOLIB_H
#define PDK_IOLIB_H

#include "error.h"
#include <lua.h>

/* A C resource and an error in Lua's care: whatever is raised while they exist, they are given back. One per call. */
typedef struct pdk_held {
    void *block; /* given to `release` when not NULL */
    void (*release)(void *block);
    pdk_error err;
} pdk_held;

/* Pushes an empty one (+1). Raises on lack of memory. */
pdk_held *pdk_io_hold(lua_State *L);
/* Gives back what it holds, now. */
void pdk_io_release(pdk_held *h);
/* nil and the error (+2), for `return`. */
int pdk_io_failed(lua_State *L, pdk_held *h);

/* Argument checks; they raise. */
const char *pdk_io_check_text(lua_State *L, int index, const char *what); /* a string without NUL */
double pdk_io_check_seconds(lua_State *L, int index, const char *what);   /* 0 or more; inf becomes 0, "no limit" */
void pdk_io_bad(lua_State *L, const char *fmt, ...) __attribute__((format(printf, 2, 3), noreturn));

/* Each pushes its part of the module (+1). */
void pdk_iohttp_open(lua_State *L); /* the function http */
void pdk_iojson_open(lua_State *L);
void pdk_iofs_open(lua_State *L);

#endif
