/* procio.h -- io.proc: processes, descriptors, locks and namespaces for backends written in Lua.
 *
 * A descriptor is a userdata that closes itself (fd:close(), <close>, or collection). What may wait gives the Lua mutex up.
 * Functions that the file system may refuse return nil, message, code ("ENOENT"); wrong arguments and lack of memory raise.
 *
 *   open(path, how [, mode [, dir]]) -> fd   how: letters r (read) w (read and write) p (O_PATH) d (a directory) c (create)
 *                                            x (must be new) n (not through a link at the end); dir: start there
 *   pipe() -> read end, write end            memfd(bytes) -> fd          capture(size) -> fd, a memfd that cannot grow
 *   listen(dir, name) -> fd                  a listening unix socket at dir/name, mode 0600, whatever the path's length
 *   names(dir) -> list                       rename(dir, from, to)       unlink(dir, name)       mkdir(dir, name, mode)
 *   put(path, text)                          writes into an existing file (cgroup, /proc) at once
 *   rmdir(path)                              access(path) -> boolean     privileged(path) -> "setuid" or similar, or nil
 *   readlink(path [, dir]) -> target         homes() -> path of the library, path of the program
 *   spawn{ argv, env, cwd, fds = { [number] = fd }, uid, gid, limits = { core = n, ... }, stage = { ... } } -> child   (stage.h)
 *   run{ as spawn; stdin, max, timeout } -> { status, signal, out, err, truncated }, or raises
 *   self() -> { pid, start, uid, gid, boot, machine, pid_ns, time_ns }
 *   start_of(pid) -> start time, state, parent   pidfd(pid, start) -> fd, or nil when that process is gone
 *   kill(pidfd, signal)                      prlimit(pid, { nproc = n, data = n, core = n, nofile = n })
 *   seccomp() -> fd                          sandbox_uid(id) -> an unprivileged uid, always the same for one id
 *   fd: no() close() read(max [, seconds]) write(s) pread(max, at) pwrite(s, at) stat() chown(uid, gid) lock(type, byte)
 *       locked(type, byte) ended(seconds) is_open()           type: "r", "w", "u"
 *   child: pid() wait(seconds) -> whether it has ended    kill()         close()
 */
#ifndef PDK_PROCIO_H
#define PDK_PROCIO_H

#include "error.h"
#include <lua.h>

/* Pushes the table of io.proc (+1). May raise (memory). */
void pdk_procio_open(lua_State *L);

/* Pushes a descriptor userdata (+1) that holds none yet; the caller stores one in it. May raise (memory). */
int *pdk_procio_push_fd(lua_State *L);
/* The open descriptor at `index`; raises when it is something else or closed. */
int pdk_procio_fd(lua_State *L, int index);

/* seccomp.c: a new memfd with the filter program that bubblewrap loads; -1 = io_error. Any thread. */
int pdk_seccomp_fd(pdk_error *err);

/* procspawn.c: the functions about processes, set into the table at the top of the stack. */
void pdk_procio_open_processes(lua_State *L);

#endif
