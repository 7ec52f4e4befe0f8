/* bounded.h -- the functions of string, table and utf8 for policies: what they do is charged to the budget, so that
 * none can run on where the instruction hook does not see it. */
#ifndef PDK_BOUNDED_H
#define PDK_BOUNDED_H

#include <lua.h>

/* In a new universe: from here on a method of a string value (("x"):rep) is the bounded one while a policy runs, and
 * Lua's own otherwise. Raises. stack: 0 */
void pdk_bounded_install(lua_State *L);

/* Pushes fresh tables, for one policy's environment: what the script does to them stays with it. Raise. stack: +1 */
void pdk_bounded_string(lua_State *L);
void pdk_bounded_table(lua_State *L);
void pdk_bounded_utf8(lua_State *L);
void pdk_bounded_math(lua_State *L); /* without random: the same question gets the same answer */

typedef struct pdk_bounded_function {
    const char *name;
    lua_CFunction fn; /* gets Lua's own as upvalue 1; NULL = Lua's own as it is */
} pdk_bounded_function;
/* Sets the functions (ended by a NULL name) of a library ("_G", "string", ...) in the table at the top of the stack, made
 * from copies that were taken before any other code ran. Raises. stack: 0 */
void pdk_bounded_fill(lua_State *L, const char *library, const pdk_bounded_function *f);
int pdk_charged(lua_State *L); /* such a fn: charges for all strings among the arguments, then runs Lua's own */

/* pattern.c: string.find, match, gmatch and gsub, charged per step. Each a lua_CFunction. */
int pdk_pattern_find(lua_State *L);
int pdk_pattern_match(lua_State *L);
int pdk_pattern_gmatch(lua_State *L);
int pdk_pattern_gsub(lua_State *L);

#endif
