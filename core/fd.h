/* fd.h -- a descriptor that is closed on every way out of its scope. */
#ifndef PDK_FD_H
#define PDK_FD_H

#include <unistd.h>

static inline void pdk_fd_leave(int *fd)
{
    if (*fd >= 0) close(*fd);
}
#define PDK_AUTO_FD __attribute__((cleanup(pdk_fd_leave))) int

/* Moves ownership out of `*fd`, which is -1 then. */
static inline int pdk_fd_take(int *fd)
{
    int taken = *fd;
    *fd = -1;
    return taken;
}

#endif
