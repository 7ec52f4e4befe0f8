/* smalldisk.h -- a disk of 256 KiB that can be filled, in a mount namespace of the test's own. */
#ifndef PDK_TEST_SMALLDISK_H
#define PDK_TEST_SMALLDISK_H

#include "test.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

static char small_disk_path[128];

__attribute__((unused)) static void small_disk_end(void)
{
    umount2(small_disk_path, MNT_DETACH);
}

/* Its mount point; NULL = cannot be had here. */
__attribute__((unused)) static const char *small_disk(void)
{
    snprintf(small_disk_path, sizeof small_disk_path, "%s/disk", test_tmpdir());
    if (geteuid() != 0 || mkdir(small_disk_path, 0700) < 0 || unshare(CLONE_NEWNS) < 0 ||
        mount("none", "/", "none", MS_REC | MS_PRIVATE, NULL) < 0 ||
        mount("none", small_disk_path, "tmpfs", 0, "size=256k,mode=700") < 0)
        return NULL;
    atexit(small_disk_end);
    return small_disk_path;
}

__attribute__((unused)) static bool small_disk_read_only(void)
{
    return mount("none", small_disk_path, "none", MS_REMOUNT | MS_RDONLY, NULL) == 0;
}

/* Fills it up with a file of that name. */
__attribute__((unused)) static void small_disk_fill(const char *path)
{
    static const char page[4096];
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    while (write(fd, page, sizeof page) > 0)
        ;
    close(fd);
}

#endif
