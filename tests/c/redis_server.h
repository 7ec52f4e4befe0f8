/* redis_server.h -- a redis-server of a test's own: on a unix socket in a folder of its own, no TCP, ended by its pid. */
#ifndef REDIS_SERVER_H
#define REDIS_SERVER_H

#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

typedef struct redis_server {
    char dir[120], path[160], url[200];
    pid_t pid; /* 0 = none runs */
} redis_server;

/* A connection past the code under test, or NULL. */
static inline redisContext *redis_raw(const redis_server *s)
{
    redisContext *c = redisConnectUnixWithTimeout(s->path, (struct timeval){ .tv_sec = 5 });
    if (c != NULL && c->err == 0) {
        redisSetTimeout(c, (struct timeval){ .tv_sec = 5 });
        return c;
    }
    if (c != NULL)
        redisFree(c);
    return NULL;
}

/* One command past the code under test: its answer as a text, valid until the next one; "(nil)" and "(none)" for those. */
__attribute__((format(printf, 2, 3))) static inline const char *redis_do(const redis_server *s, const char *fmt, ...)
{
    static char text[4096];
    char command[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(command, sizeof command, fmt, ap);
    va_end(ap);
    redisContext *c = redis_raw(s);
    redisReply *r = c == NULL ? NULL : redisCommand(c, command);
    snprintf(text, sizeof text, "(none)");
    if (r != NULL && r->type == REDIS_REPLY_INTEGER)
        snprintf(text, sizeof text, "%lld", r->integer);
    else if (r != NULL)
        snprintf(text, sizeof text, "%s", r->type == REDIS_REPLY_NIL ? "(nil)" : r->str != NULL ? r->str : "(list)");
    if (r != NULL)
        freeReplyObject(r);
    if (c != NULL)
        redisFree(c);
    return text;
}

/* Runs it in `dir`, which stays from one run to the next. `more`: pairs of options, or NULL. */
static inline bool redis_run(redis_server *s, const char *const *more)
{
    const char *args[32] = { "redis-server", "--port", "0",           "--unixsocket", s->path,      "--dir",  s->dir,
                             "--save",       "",       "--daemonize", "no",           "--loglevel", "warning" };
    int n = 13;
    while (more != NULL && *more != NULL && n < 31)
        args[n++] = *more++;
    unlink(s->path);
    s->pid = fork();
    if (s->pid == 0) { /* only what a child of a process with threads may do */
        int null = open("/dev/null", O_RDWR);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        signal(SIGXFSZ, SIG_IGN); /* a file limit is a full disk then, not a death */
        dup2(null, 0);
        dup2(null, 1);
        dup2(null, 2);
        execvp("redis-server", (char **)args);
        _exit(127);
    }
    for (int i = 0; i < 500 && s->pid > 0; i++) {
        usleep(20000);
        const char *said = redis_do(s, "PING");
        if (strcmp(said, "PONG") == 0 || strncmp(said, "NOAUTH", 6) == 0)
            return true;
    }
    fprintf(stderr, "  redis-server does not start\n");
    return false;
}

static inline void redis_end(redis_server *s)
{
    if (s->pid <= 0)
        return;
    kill(s->pid, SIGKILL);
    while (waitpid(s->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    s->pid = 0;
}

/* A new folder, and a server in it. */
static inline bool redis_start(redis_server *s, const char *const *more)
{
    static int number;
    snprintf(s->dir, sizeof s->dir, "%s/redis-%d", test_tmpdir(), number++);
    snprintf(s->path, sizeof s->path, "%s/socket", s->dir);
    snprintf(s->url, sizeof s->url, "unix://%s", s->path);
    s->pid = 0;
    return mkdir(s->dir, 0700) == 0 && redis_run(s, more);
}

static inline void redis_leave(redis_server *s)
{
    redis_end(s);
}
#define AUTO_REDIS __attribute__((cleanup(redis_leave))) redis_server

#endif
