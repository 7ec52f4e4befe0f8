/* wallclock.c -- preloaded into a process, sets its wall clock apart: by as many nanoseconds as the file SOAK_WALL says, an
 * int64_t that may change at any time. The other clocks stay as they are. (make soak builds it; libfaketime is not needed.) */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset; /* set before main */

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("SOAK_WALL");
    int fd = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = fd >= 0 ? mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    offset = at != MAP_FAILED ? at : NULL;
    if (fd >= 0)
        close(fd);
    unsetenv("LD_PRELOAD"); /* what this process starts has the machine's clock */
}

int clock_gettime(clockid_t id, struct timespec *t)
{
    int rc = (int)syscall(SYS_clock_gettime, id, t);
    if (rc == 0 && offset != NULL && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) {
        int64_t ns = (int64_t)t->tv_sec * 1000000000 + t->tv_nsec + *offset;
        t->tv_sec = ns / 1000000000;
        t->tv_nsec = ns % 1000000000;
    }
    return rc;
}

time_t time(time_t *out)
{
    struct timespec t = { 0 };
    clock_gettime(CLOCK_REALTIME, &t);
    if (out != NULL)
        *out = t.tv_sec;
    return t.tv_sec;
}

int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
    (void)zone;
    struct timespec t = { 0 };
    clock_gettime(CLOCK_REALTIME, &t);
    tv->tv_sec = t.tv_sec;
    tv->tv_usec = t.tv_nsec / 1000;
    return 0;
}
