/* aio_standin.c -- the entry point of the tests' all-in-one image: an AIO server on TCP, as such images have it.
 * The routes are the guest's own, which runs below this program; what is paddock's is hidden: a client needs no token and sees
 * neither /v1/paddock/ nor the guest's state in GET /v1/sandbox, so nothing can mistake the image for one with a guest.
 * Environment: SANDBOX_SRV_PORT (8080), SANDBOX_API_KEY (then asked for, in any of the three ways), MAX_SHELL_SESSIONS,
 * WORKSPACE (/home/gem), STANDIN_DELAY (seconds until it listens). A connection carries one request. */
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HEAD_MAX = 65536, FD_SETTINGS = 3, FD_LISTEN = 4 };

static struct sockaddr_un guest_address; /* abstract: the image may be read-only */
static socklen_t guest_address_len;
static volatile pid_t guest_pid;

static const char *setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value != NULL && *value != '\0' ? value : otherwise;
}

static int die(const char *what)
{
    fprintf(stderr, "aio-standin: %s: %s\n", what, strerror(errno));
    return 1;
}

static bool send_all(int fd, const char *bytes, size_t len)
{
    while (len > 0) {
        ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        bytes += n;
        len -= (size_t)n;
    }
    return true;
}

static void answer(int fd, const char *status, const char *json)
{
    char text[512];
    int n = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n%s",
                     status, strlen(json), json);
    send_all(fd, text, (size_t)n);
}

/* ---- the guest ---- */

static void guest_start(const char *binary)
{
    char settings[2048];
    const char *home = setting("WORKSPACE", "/home/gem");
    int n = snprintf(settings, sizeof settings,
                     "generation=standin%ctoken=0%corphan_ttl=0%cworkspace=%s%chome=%s%cuser=gem%cmax_sessions=%s%cenv=PATH=%s%c", 0, 0,
                     0, home, 0, home, 0, 0, setting("MAX_SHELL_SESSIONS", "10"), 0, setting("PATH", "/bin:/usr/bin"), 0);
    int file = memfd_create("settings", 0);
    int sock = socket(AF_UNIX, SOCK_STREAM, 0);
    if (file < 0 || sock < 0 || write(file, settings, (size_t)n) != n || lseek(file, 0, SEEK_SET) != 0)
        exit(die("settings"));
    guest_address.sun_family = AF_UNIX;
    guest_address_len = sizeof guest_address;
    /* Bound without a name, it gets a free abstract one. */
    if (bind(sock, (struct sockaddr *)&guest_address, sizeof(sa_family_t)) < 0 || listen(sock, 128) < 0 ||
        getsockname(sock, (struct sockaddr *)&guest_address, &guest_address_len) < 0)
        exit(die("the guest's socket"));
    guest_pid = fork();
    if (guest_pid < 0)
        exit(die("fork"));
    if (guest_pid > 0) {
        close(file);
        close(sock);
        return;
    }
    int at[2] = { fcntl(file, F_DUPFD, 100), fcntl(sock, F_DUPFD, 100) };
    dup2(at[0], FD_SETTINGS);
    dup2(at[1], FD_LISTEN);
    for (int fd = FD_LISTEN + 1; fd < 256; fd++)
        close(fd);
    execl(binary, "paddock-guest", (char *)NULL);
    _exit(die(binary));
}

/* ---- a request ---- */

/* The value of a header line that starts with `name` (lower case, with its colon), or NULL. */
static const char *value_of(const char *line, const char *name)
{
    for (; *name != '\0'; name++, line++)
        if (tolower((unsigned char)*line) != *name)
            return NULL;
    return line + strspn(line, " \t");
}

static bool key_matches(const char *text, const char *key)
{
    size_t n = strlen(key);
    return text != NULL && strncmp(text, key, n) == 0 && !isalnum((unsigned char)text[n]);
}

/* Rewrites a request's head (NUL-terminated, without its empty line) for the guest. False: answered and done. */
static bool head_for_guest(int client, char *head, char *out, size_t room)
{
    const char *key = setting("SANDBOX_API_KEY", NULL), *query = strstr(head, "api_key=");
    char *rest = head, *line = strsep(&rest, "\n");
    size_t n = (size_t)snprintf(out, room, "%s\n", line);
    bool allowed = key == NULL || (query != NULL && query < line + strlen(line) && key_matches(query + 8, key));
    const char *path = strchr(line, ' ');
    if (path != NULL && strncmp(path + 1, "/v1/paddock", 11) == 0) {
        answer(client, "404 Not Found", "{\"detail\":\"Not Found\"}");
        return false;
    }
    while ((line = strsep(&rest, "\n")) != NULL) {
        const char *bearer = value_of(line, "authorization: bearer ");
        if (key != NULL && (key_matches(value_of(line, "x-aio-api-key:"), key) || key_matches(bearer, key)))
            allowed = true;
        if (value_of(line, "expect:") != NULL)
            send_all(client, "HTTP/1.1 100 Continue\r\n\r\n", 25);
        else if (value_of(line, "connection:") == NULL && value_of(line, "x-paddock-") == NULL && n < room)
            n += (size_t)snprintf(out + n, room - n, "%s\n", line);
    }
    if (!allowed) {
        answer(client, "401 Unauthorized", "{\"success\":false,\"message\":\"Unauthorized\",\"data\":null,\"hint\":null}");
        return false;
    }
    if (n < room)
        n += (size_t)snprintf(out + n, room - n, "X-Paddock-Token: 0\r\nConnection: close\r\n\r\n");
    return n < room;
}

/* Passes bytes both ways until the guest has ended or the client is gone. With `hide`, the answer is kept to its end first. */
static void relay(int client, int guest, bool hide)
{
    static char buf[65536];
    size_t kept = 0;
    struct pollfd sides[2] = { { .fd = client, .events = POLLIN }, { .fd = guest, .events = POLLIN } };
    for (;;) {
        if (poll(sides, 2, -1) < 0 && errno != EINTR)
            return;
        if (sides[1].revents != 0) {
            ssize_t n = recv(guest, buf + kept, sizeof buf - kept, 0);
            if (n <= 0)
                break;
            if (hide)
                kept += (size_t)n;
            else if (!send_all(client, buf, (size_t)n))
                return;
            continue;
        }
        if (sides[0].revents != 0) {
            char more[16384];
            ssize_t n = recv(client, more, sizeof more, 0);
            if (n <= 0 || !send_all(guest, more, (size_t)n))
                return; /* a client that goes away ends its command */
        }
    }
    char *state = hide ? memmem(buf, kept, "\"paddock\":", 10) : NULL;
    if (state != NULL)
        memcpy(state + 1, "standin", 7); /* as long, so the length stays true */
    send_all(client, buf, kept);
}

static void serve(int client)
{
    static char head[HEAD_MAX + 1], out[HEAD_MAX + 256];
    size_t len = 0;
    char *end = NULL;
    while (end == NULL && len < HEAD_MAX) {
        ssize_t n = recv(client, head + len, HEAD_MAX - len, 0);
        if (n <= 0)
            return;
        len += (size_t)n;
        head[len] = '\0';
        end = strstr(head, "\r\n\r\n");
    }
    if (end == NULL)
        return;
    size_t body = len - (size_t)(end + 4 - head);
    end[1] = '\0'; /* keeps the last line's \r */
    bool hide = strncmp(head, "GET /v1/sandbox", 15) == 0 && (head[15] == ' ' || head[15] == '?');
    if (!head_for_guest(client, head, out, sizeof out))
        return;
    int guest = socket(AF_UNIX, SOCK_STREAM, 0);
    if (guest < 0 || connect(guest, (struct sockaddr *)&guest_address, guest_address_len) < 0) {
        answer(client, "502 Bad Gateway", "{\"detail\":\"the server behind is not there\"}");
        return;
    }
    if (send_all(guest, out, strlen(out)) && send_all(guest, end + 4, body))
        relay(client, guest, hide);
}

/* ---- the program ---- */

static void on_child(int number)
{
    (void)number;
    int saved = errno, status;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
        if (pid == guest_pid)
            _exit(1); /* with its server an all-in-one sandbox has ended */
    errno = saved;
}

static void on_term(int number)
{
    (void)number;
    _exit(0);
}

int main(int argc, char **argv)
{
    sigaction(SIGCHLD, &(struct sigaction){ .sa_handler = on_child, .sa_flags = SA_RESTART }, NULL);
    sigaction(SIGTERM, &(struct sigaction){ .sa_handler = on_term }, NULL); /* pid 1 has no default that ends it */
    guest_start(argc > 1 ? argv[1] : "/usr/local/bin/paddock-guest");
    for (unsigned left = (unsigned)atoi(setting("STANDIN_DELAY", "0")); left > 0;)
        left = sleep(left);
    int sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(setting("SANDBOX_SRV_PORT", "8080"))) };
    if (sock < 0 || setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int)) < 0 ||
        bind(sock, (struct sockaddr *)&at, sizeof at) < 0 || listen(sock, 128) < 0)
        return die("listening");
    for (;;) {
        int client = accept(sock, NULL, NULL);
        if (client < 0 && errno != EINTR && errno != ECONNABORTED)
            return die("accept");
        if (client < 0)
            continue;
        pid_t pid = fork();
        if (pid == 0) {
            close(sock);
            serve(client);
            _exit(0);
        }
        close(client);
    }
}
