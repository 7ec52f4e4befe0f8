/* guest.h -- paddock-guest: pid 1 of a sandbox. One static binary, one thread, one event loop.
 *
 * Descriptors it inherits (process backend): 3 = settings, 4 = listening unix socket, 5 = its record (this open file
 * description holds an OFD write lock on byte 0, which is what proves that it lives), 6 = start pipe (one byte 'g' = the
 * record is durable; end of file before that = exit). All are close-on-exec for commands.
 * As the entry point of a container (`--settings FILE`) it inherits nothing: the settings are that file, which it unlinks, and
 * two more say what to listen on (listen: a path, or a port) and what each request must carry in X-Paddock-Secret (secret; a
 * request without it: 401 {"error":"unauthorized"}, whatever it is).
 * Settings: NUL-separated "key=value": generation, token, orphan_ttl (seconds, 0 = never), workspace, home, max_output,
 * max_sessions, mount (repeated; a target path that bounds file calls).
 *
 * Tokens: every request but GET /v1/sandbox carries X-Paddock-Token (decimal, 64 bits; larger wins and is remembered only
 * by fence). Missing: 401. Smaller than the largest fenced one: 409 {"error":"stale_token","token":"N"}. After doom: 409
 * {"error":"doomed"}. The token is checked when a request arrives and again when it takes effect (spawn, rename).
 *
 * Routes of paddock's own:
 *   GET  /v1/sandbox               AIO's answer plus "paddock": { generation, token (a string), doomed, commands
 *                                  (running ones that somebody waits for), trees (with live processes, background ones
 *                                  included), idle_seconds, oom_kills, version }. No contact without a valid token.
 *   POST /v1/paddock/fence         token in the header; ends commands of smaller tokens, then 200 {"token":"N"}.
 *   POST /v1/paddock/doom          X-Paddock-Expected: the largest token seen must equal it, else 409
 *                                  {"error":"token_mismatch","token":"N"}; then every later request is refused. Repeating the
 *                                  same doom is 200 again.
 *   POST /v1/paddock/exec          body: frames  type (1 byte), length (4, big endian), bytes:  c command, e NAME=value
 *                                  (repeated), d cwd, t time limit in seconds (decimal), m bytes kept per stream, s session,
 *                                  0 (length 0) = the rest of the body is standard input, raw.
 *                                  answer: 200, chunked; frames as docker's: stream (1 stdout, 2 stderr, 3 end), 0, 0, 0, length
 *                                  (4, big endian), bytes. The last frame (3) is JSON { outcome, exit_code, signal, truncated,
 *                                  duration, session_reset, error? }: outcome is completed, signalled, hard_timeout (exit_code 124),
 *                                  oom (137) or cancelled; error says why it was cancelled (stale_token) or that killed
 *                                  processes stayed (leftover_processes). Nothing has run when the status is another: 404
 *                                  no_session, 413 too_large, 422 invalid_argument, invalid_cwd (absolute, and a directory) or
 *                                  no_shell, 503 process_limit, no_memory, no_descriptors or session_broken. When the direct
 *                                  child has ended, what it left in the background lives on (until fence, doom or, in a
 *                                  session, the time limit of a later command). A client that goes away ends its command.
 *                                  X-Paddock-Command: a name of up to 63 bytes (optional), by which it can be cancelled.
 *   POST /v1/paddock/cancel/NAME   ends that command: 200 {"cancelled": whether there is one}; that it has ended is in its own answer
 *                                  (outcome cancelled; 409 cancelled when it had not begun).
 *   POST   /v1/paddock/sessions/ID      makes a shell session (200 also when it exists); ID: 1 to 128 bytes of UTF-8
 *   DELETE /v1/paddock/sessions/ID
 *   PUT  /v1/paddock/file?path=P[&no_overwrite=1]   raw body; atomic (temporary file and rename); parents must exist
 *   GET  /v1/paddock/file?path=P        raw bytes
 *   GET  /v1/paddock/list?path=P        JSON { files: [ { name, path, is_directory, is_link, size, modified_time, mode,
 *                                       encoded? (the path percent-encoded, when it is no UTF-8) } ] }
 *   File errors: 4xx/5xx with {"error": code, "message"}: not_found, permission_denied, already_exists, is_directory,
 *   not_a_directory, not_a_file, escapes (a link or ".." leads out of the mount that the path names), read_only, no_space,
 *   too_large, invalid_path, io_error.
 */

#ifndef PDK_GUEST_H
#define PDK_GUEST_H

#include "paddock.h" /* its version, which is the guest's too */

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

/* More settings than the head names, all optional: user (the name in $USER), env (repeated, NAME=value: added to each
 * command's environment), max_connections, memory_events_fd (an inherited descriptor of the cgroup's memory.events or
 * memory.oom_control: the evidence for outcome "oom"). Unknown keys are refused, so that a typo never weakens anything. */

#define GUEST_VERSION       PDK_VERSION
#define GUEST_BODY_MAX      (16u << 20)           /* a body that is kept in memory; larger: 413 */
#define GUEST_FILE_MAX      (UINT64_C(256) << 20) /* a body that is streamed into a file */
#define GUEST_COMMAND_LIMIT 600.0                 /* seconds, of a command that names no limit of its own */

/* ---- faults: why a call is refused. Every fallible call below takes one, fills it and returns -1, NULL or false. ---- */
typedef struct guest_fault {
    int status;        /* HTTP status that fits: 4xx, 5xx */
    int sys;           /* errno, or 0 */
    const char *code;  /* static: not_found, permission_denied, already_exists, is_directory, not_a_directory, escapes,
                          read_only, no_space, invalid_path, io_error, process_limit, invalid_cwd, no_shell, stale_token,
                          doomed, no_memory, ... */
    char message[240]; /* one line for a person */
} guest_fault;
int guest_fail(guest_fault *f, int status, const char *code, int sys, const char *fmt, ...)
    __attribute__((format(printf, 5, 6))); /* always -1 */
/* Code and status by errno: ENOENT = not_found and so on. Always -1. */
int guest_fail_errno(guest_fault *f, int sys, const char *what, const char *path);

/* ---- settings.c: what it was started with; constant after the start ---- */
typedef struct guest_settings {
    char *generation, *workspace, *home, *user;
    char *listen, *secret; /* as a container's entry point: a path or a port; what each request must carry. Or NULL */
    uint64_t token;      /* largest token at the start */
    double orphan_ttl;   /* seconds; 0 = never */
    uint64_t max_output; /* bytes kept per stream of an exec that does not say */
    unsigned max_sessions, max_connections;
    char **mounts;        /* mount roots for file calls; NULL-terminated, longest first, ends with "/" */
    char **env;           /* NAME=value, NULL-terminated */
    int memory_events_fd; /* or -1 */
} guest_settings;
extern guest_settings guest_conf;
int guest_settings_parse(const char *bytes, size_t len, guest_fault *f); /* into guest_conf */
bool guest_env_name_ok(const char *assignment);        /* "NAME=value" with a NAME of [A-Za-z_][A-Za-z0-9_]* */
bool guest_parse_u64(const char *text, uint64_t *out); /* strict: 1 to 20 digits, no sign, no space, no overflow */

/* ---- loop.c: one thread, level-triggered epoll, timers, children ---- */
typedef struct guest_watch guest_watch;
struct guest_watch { /* embedded in its owner; zeroed before the first use */
    int fd;
    uint32_t events; /* of EPOLLIN, EPOLLOUT, EPOLLRDHUP; 0 = registered but silent (errors still come) */
    void (*fn)(guest_watch *w, uint32_t events);
    void *ctx;
    bool armed;
};
int guest_watch_set(guest_watch *w, uint32_t events); /* adds or changes; 0 or -1 (errno) */
void guest_watch_drop(guest_watch *w);                /* before its fd is closed; safe in a callback, also of others */

typedef struct guest_timer guest_timer;
struct guest_timer { /* embedded in its owner; zeroed before the first use */
    int64_t due;     /* CLOCK_BOOTTIME, ns */
    void (*fn)(guest_timer *t);
    void *ctx;
    guest_timer *next, **link; /* link != NULL: armed */
};
void guest_timer_in(guest_timer *t, double seconds, void (*fn)(guest_timer *), void *ctx); /* re-arms; fires once */
void guest_timer_stop(guest_timer *t);                                                     /* also when not armed */
int64_t guest_now(void); /* CLOCK_BOOTTIME, ns; cached per loop round */

/* ---- state: tokens, fence, doom (main.c) ---- */
uint64_t guest_token(void); /* the largest fenced token */
bool guest_doomed(void);
/* Whether work under `token` may take effect now; false fills f with stale_token or doomed (409). Call it right before the
 * effect (spawn, rename), also after every wait. */
bool guest_token_allows(uint64_t token, guest_fault *f);
json_t *guest_state_json(void); /* the "paddock" object of GET /v1/sandbox; a new reference */

/* ---- http.c: requests and replies ----
 * A request belongs to its connection and lives until its reply is complete or the client is gone; in that case
 * on_close is called (once, last), and nothing may touch it afterwards. A reply may be made later, from any callback: a
 * route that waits keeps the pointer and sets on_close to forget it. The token was checked on arrival (X-Paddock-Token is
 * in `token`); before each effect check again by guest_token_allows(req->token). */
typedef struct guest_req guest_req;
struct guest_req {
    const char *method; /* "GET", ... */
    const char *path;   /* without the query; percent-decoded, no NUL inside; refused (400) when malformed */
    uint64_t token;     /* 0 on GET /v1/sandbox without one */
    const char *body;   /* complete body, NUL-terminated, never NULL, when the route is called (unless streamed) */
    size_t body_len;

    void *ctx;                        /* the route's own */
    void (*on_close)(guest_req *req); /* the client went away before the reply was complete: free ctx, forget req */
    void (*on_drain)(guest_req *req); /* after guest_send said "full": there is room again */
    /* Streamed body: set both in the begin function, then the body is not kept. `on_body` may call guest_body_pause. */
    void (*on_body)(guest_req *req, const char *data, size_t len);
    void (*on_end)(guest_req *req); /* the body is complete */
    uint64_t body_max;              /* begin may raise it, up to GUEST_FILE_MAX; beyond it: 413. UINT64_MAX = no limit */
};
const char *guest_query(const guest_req *req, const char *name);  /* percent-decoded (+ is a space), or NULL */
const char *guest_header(const guest_req *req, const char *name); /* case-insensitive, or NULL */
void guest_body_pause(guest_req *req, bool paused);

/* Complete replies; each ends the request (req is gone afterwards). */
void guest_reply(guest_req *req, int status, const char *content_type, const void *body, size_t len);
void guest_reply_json(guest_req *req, int status, json_t *value); /* takes the reference; NULL = 500 */
void guest_reply_fault(guest_req *req,
                       const guest_fault *f); /* {"error": code, "message"} and f->status; paddock's routes */
void guest_reply_file(guest_req *req, int fd, uint64_t size, const char *content_type); /* takes fd; streams it */
/* Streamed replies, chunked: begin, send any number of times, end (the request is gone then). guest_send takes all it is
 * given; false means "full": send no more until on_drain. */
void guest_reply_begin(guest_req *req, int status, const char *content_type);
bool guest_send(guest_req *req, const void *data, size_t len);
void guest_reply_end(guest_req *req);

/* ---- aio_*.c: everything below /v1/ but /v1/paddock/; GET /v1/sandbox included (add guest_state_json() as "paddock") ----
 * aio_begin is called when the headers are complete and the token is good: it may set on_body and on_end to stream the
 * body, or reply at once. Otherwise the body is kept and aio_route is called with it. aio_route replies 404 itself. */
void aio_init(void);
void aio_begin(guest_req *req);
void aio_route(guest_req *req);

/* ---- exec.c: commands ----
 * Each runs below a keeper: a small process that is the subreaper of whatever the command starts, so that nothing can
 * leave the command's tree. on_end comes exactly once: when the direct child has ended and its output is read (background
 * processes live on, their output is dropped), or, when it was killed, once no descendant is left. After on_end the owner
 * must not use the pointer. Commands of smaller tokens are killed by a fence, all of them by doom, without the owner. */
typedef struct guest_cmd guest_cmd;
typedef enum guest_kill { GUEST_KILL_NONE, GUEST_KILL_TIMEOUT, GUEST_KILL_FENCED, GUEST_KILL_CANCELLED } guest_kill;
typedef struct guest_cmd_end {
    int exit_code;     /* 128 + signal when signalled; 124 when it was killed at its limit */
    int signal;        /* 0, or the signal that ended the direct child */
    guest_kill killed; /* by us, and why */
    bool oom;          /* the kernel killed for memory (with evidence) */
    bool leftover;     /* a killed process did not go away within 10 s (stuck in the kernel) */
    double duration;   /* seconds */
    bool failed;       /* it never ran: `fault` says why (missing cwd, process limit, exec failed) */
    guest_fault fault;
} guest_cmd_end;
typedef struct guest_cmd_spec {
    const char *text;          /* shell text, run by bash -c or sh -c */
    const char *const *argv;   /* or, when text is NULL: argv[0] is a path; NULL-terminated */
    const char *cwd;           /* NULL = workspace; missing = fault invalid_cwd */
    const char *const *env;    /* NAME=value over the base environment; NULL-terminated, or NULL; names were checked */
    bool want_stdin;           /* else /dev/null */
    bool pty;                  /* one terminal (24 x 80) for 0, 1, 2 instead of pipes: all output is stream 1; input = its keys */
    int extra_fds[4];          /* given to the child as 3, 4, ...; -1 ends. Not closed here. {0} = none */
    bool has_extra_fds;
    double limit; /* seconds; 0 = none: killed with all its descendants */
    uint64_t token;
    bool background; /* does not stop the orphan clock (an idle session's shell) */
    void *ctx;
    void (*on_output)(guest_cmd *cmd, void *ctx, int stream, const char *data, size_t len); /* 1 stdout, 2 stderr */
    void (*on_stdin_room)(guest_cmd *cmd, void *ctx); /* after guest_cmd_write took less than all; may be NULL */
    void (*on_start)(guest_cmd *cmd, void *ctx);      /* the program runs; may be NULL */
    void (*on_end)(guest_cmd *cmd, void *ctx, const guest_cmd_end *end);
} guest_cmd_spec;
guest_cmd *guest_cmd_start(const guest_cmd_spec *spec, guest_fault *f); /* strings are copied or used at once */
void guest_cmd_pause(guest_cmd *cmd, int stream, bool paused);          /* stop reading that stream (back pressure) */
size_t guest_cmd_write(guest_cmd *cmd, const void *data, size_t len);   /* how much was taken: a queue of 64 KiB */
void guest_cmd_close_stdin(guest_cmd *cmd);                             /* after what is queued */
int guest_cmd_signal(guest_cmd *cmd, int sig);        /* to the direct child's process group (pty: the foreground group) */
void guest_cmd_kill(guest_cmd *cmd, guest_kill why);  /* the whole tree; on_end follows */
void guest_cmd_limit(guest_cmd *cmd, double seconds); /* from now; 0 = none */
void guest_cmd_set_background(guest_cmd *cmd, bool background);
void guest_cmd_abandon(guest_cmd *cmd); /* no more callbacks; kills the tree */
const char *guest_shell(void);          /* "/bin/bash", "/bin/sh", or NULL */

/* ---- files.c: paths beneath the mount that they name ----
 * All take absolute paths; a link that leads out of the matched mount is `escapes`, a magic link never works. */
int guest_open(const char *path, int flags, guest_fault *f);             /* fd; O_CLOEXEC and O_NONBLOCK are added; -1 */
int guest_open_regular(const char *path, struct stat *st,
                       guest_fault *f); /* for reading: refuses all but files, never waits */
typedef struct guest_upload guest_upload;
guest_upload *guest_upload_open(const char *path, bool no_overwrite, guest_fault *f); /* a temporary file beside it */
int guest_upload_write(guest_upload *u, const void *data, size_t len, guest_fault *f);
int guest_upload_commit(guest_upload *u, uint64_t token, guest_fault *f); /* checks the token, renames; frees u either way */
void guest_upload_abort(guest_upload *u);                                 /* NULL is fine */
/* All of a file into memory, at most `max` bytes (more: fault too_large); NUL-terminated; the caller frees. */
char *guest_read_all(const char *path, size_t max, size_t *len, struct stat *st, guest_fault *f);

#endif
