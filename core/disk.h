/* disk.h -- what the stores on disk have in common: folders of this user's alone, and writing all of something.
 * For records that must stay private and must not be half there, whatever the umask, the disk or a crash does. */
#ifndef PDK_DISK_H
#define PDK_DISK_H

#include "error.h"

/* Makes the folder `path` when it is missing (not what lies above it), and makes sure that it is a real folder, this user's,
 * with mode 0700. Returns its descriptor, or -1 with an error of `kind`. */
int pdk_dir_own(const char *path, pdk_error_kind kind, pdk_error *err);
/* All of it, at `offset`. 0, or -1 with errno; a disk that is full in the middle is ENOSPC. */
int pdk_pwrite_all(int fd, const void *data, size_t len, int64_t offset);
/* Up to `len` bytes, fewer only at the end of the file. -1 with errno. */
ptrdiff_t pdk_pread_all(int fd, void *data, size_t len, int64_t offset);
/* `len` bytes as 2 * len lower-case hexadecimal digits and a NUL. */
void pdk_hex(char *out, const void *bytes, size_t len);

#endif
