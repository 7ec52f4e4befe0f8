/* disk.c -- see disk.h. */
#include "disk.h"
#include "fd.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>

int pdk_dir_own(const char *path, pdk_error_kind kind, pdk_error *err)
{
    if (mkdir(path, 0700) < 0 && errno != EEXIST && errno != EROFS)
        return pdk_fail(err, kind, errno, "cannot make the folder %s", path);
    PDK_AUTO_FD fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0)
        return pdk_fail(err, kind, errno, "cannot use the folder %s", path);
    if (st.st_uid != geteuid())
        return pdk_fail(err, kind, 0, "the folder %s belongs to user %u, not to the one that runs this: chown it", path,
                        (unsigned)st.st_uid);
    /* a umask may have taken bits away, and somebody may have given some */
    if ((st.st_mode & 07777) != 0700 && fchmod(fd, 0700) < 0)
        return pdk_fail(err, kind, errno, "cannot make the folder %s private (mode 0700)", path);
    return pdk_fd_take(&fd);
}

int pdk_pwrite_all(int fd, const void *data, size_t len, int64_t offset)
{
    for (const char *p = data; len > 0;) {
        ssize_t n = pwrite(fd, p, len, offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? ENOSPC : errno;
            return -1;
        }
        p += n;
        len -= (size_t)n;
        offset += n;
    }
    return 0;
}

ptrdiff_t pdk_pread_all(int fd, void *data, size_t len, int64_t offset)
{
    size_t got = 0;
    while (got < len) {
        ssize_t n = pread(fd, (char *)data + got, len - got, offset + (int64_t)got);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        got += (size_t)n;
    }
    return (ptrdiff_t)got;
}

void pdk_hex(char *out, const void *bytes, size_t len)
{
    const unsigned char *p = bytes;
    for (size_t i = 0; i < len; i++) {
        out[2 * i] = "0123456789abcdef"[p[i] >> 4];
        out[2 * i + 1] = "0123456789abcdef"[p[i] & 15];
    }
    out[2 * len] = '\0';
}
