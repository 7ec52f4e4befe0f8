/* cli.h -- what main.c and lineedit.c share. Part of the paddock program only, not of libpaddock. */
#ifndef PDK_CLI_H
#define PDK_CLI_H

#include <lua.h>

typedef enum pdk_cli_wake {
    PDK_CLI_READY,     /* the descriptor can be read, or has ended */
    PDK_CLI_INTERRUPT, /* Ctrl-C: the line is given up, the program goes on */
    PDK_CLI_TERMINATE  /* TERM, or a hangup of the terminal: the program ends */
} pdk_cli_wake;

/* Waits until `fd` can be read or a signal came. Gives the Lua mutex up meanwhile, so that the runtime's own threads go
 * on while an operator thinks. An interrupt that is reported is over: later calls may block again.
 * Threads: the main one.  stack: -0, +0, never raises. */
pdk_cli_wake pdk_cli_wait(lua_State *L, int fd);

/* The modules `paddock.lineedit` and `paddock.cli.native`. */
int luaopen_paddock_lineedit(lua_State *L);
int luaopen_paddock_cli_native(lua_State *L);

#endif
