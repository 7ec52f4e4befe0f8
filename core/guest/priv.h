/* priv.h -- what the guest's own files share among themselves; the AIO plane needs none of it. */
#ifndef PDK_GUEST_PRIV_H
#define PDK_GUEST_PRIV_H

#include "guest.h"

/* ---- loop.c ---- */
int guest_loop_init(void); /* 0 or -1 */
void guest_loop_run(void); /* never returns */
void guest_now_update(void);
void guest_watch_close(guest_watch *w); /* drops the watch and closes its fd; also when fd is -1 */

/* ---- main.c ---- */
void guest_exit(int status) __attribute__((noreturn)); /* ends what runs here first, unless the kernel does (pid 1) */
void guest_contact(void);               /* a valid token was seen, or something that stopped the orphan clock has ended */
void guest_cmds_changed(void);          /* a command's tree is gone: a waiting fence may be answerable */
void guest_route_begin(guest_req *req); /* headers complete: checks the token, picks the route */
void guest_route_end(guest_req *req);   /* body complete and kept: runs the route */

/* ---- container.c: started as a container's entry point ---- */
int guest_container_settings(const char *path, int number, guest_fault *f); /* opens them as that descriptor; 0 or -1 */
int guest_container_hide(const char *path, guest_fault *f); /* once they are read: unlinks what holds a secret */
int guest_container_env(guest_fault *f);                    /* commands get the image's environment too */
int guest_container_listen(int number, guest_fault *f);     /* by the setting `listen` */
bool guest_secret_ok(const char *given); /* X-Paddock-Secret, or NULL; true where none is wanted */

/* ---- http.c ---- */
int guest_http_listen(int fd);      /* 0 or -1 */
void guest_http_flush(void);        /* once per loop round */
unsigned guest_http_contacts(void); /* open connections that have shown a valid token */
void guest_http_mark_contact(guest_req *req);

/* ---- exec.c ---- */
void guest_reap(void);                     /* SIGCHLD: all that ended */
unsigned guest_cmd_foreground(void);       /* commands that stop the orphan clock */
unsigned guest_cmd_trees(void);            /* trees that have a live process, background ones included */
bool guest_cmd_below(uint64_t token);      /* any tree of a smaller token left? */
void guest_cmd_kill_below(uint64_t token); /* fence */
void guest_cmd_kill_all(guest_kill why);   /* doom, exit */
void guest_cmd_kill_wait(double seconds);  /* blocks: kills all trees; only on the way out */
uint64_t guest_oom_kills(void);
bool guest_cmd_killed(const guest_cmd *cmd); /* it is being killed, or dead */

/* ---- keeper.c: the process between the guest and a command ---- */
typedef struct keeper_msg { /* what it writes to its control pipe, each in one write */
    enum { KEEPER_STARTED = 1, KEEPER_FAILED, KEEPER_ENDED } kind;
    int value; /* pid; errno; wait status */
    enum { STAGE_NONE, STAGE_FORK, STAGE_CWD, STAGE_EXEC, STAGE_SETUP } stage;
} keeper_msg;
typedef struct keeper_job {
    int fds[8]; /* become 0, 1, 2, 3, ... of the command */
    int fd_count;
    int control; /* write end */
    bool pty;    /* fds[0] becomes the controlling terminal */
    const char *cwd;
    const char *const *argv;
    char *const *env;
} keeper_job;
pid_t guest_keeper_start(const keeper_job *job); /* -1 with errno */
/* One round of killing: stops, then kills every process whose ancestry reaches one of `keepers` (or the guest without
 * passing any of `all_keepers`, when `strays`). Returns how many were alive. */
int guest_kill_round(const pid_t *keepers, int n, const pid_t *all_keepers, int all_n, bool strays);
/* Kills all of the pid namespace but the guest, keepers too. False: there is nothing else, not even a zombie. Pid 1 only. */
bool guest_kill_everything(void);

/* ---- run.c: POST /v1/paddock/exec ---- */
typedef struct guest_run guest_run;
void guest_run_begin(guest_req *req); /* streams the body */
bool guest_run_cancel(const char *name); /* ends that command; its own answer says so. false = there is none of that name */

struct guest_run {   /* one exec call, from its body's first byte to its reply's end */
    guest_req *req;  /* NULL once the client is gone */
    guest_run *next; /* in a session's queue */
    guest_run *older, *newer; /* of those that have a name */
    char name[64];   /* by which it can be cancelled; "" = none */
    bool cancelled;  /* before it was started */
    char *head;      /* the frames before standard input, collected */
    size_t head_len, head_cap;
    bool in_stdin, body_done, started;
    bool retried; /* its session's shell died before the command began; once is enough */
    char *text, *cwd, *session;
    char **env;
    size_t env_n;
    double limit;
    uint64_t max, kept[2], token;
    bool truncated;
    guest_cmd *cmd;           /* without a session */
    struct guest_session *on; /* with one */
    char *early;              /* standard input that came before the session's turn */
    size_t early_len, early_cap;
};
bool guest_run_output(guest_run *run, int stream, const char *data, size_t len); /* false: full, wait for on_drain */
void guest_run_started(guest_run *run);
void guest_run_finish(guest_run *run, const guest_cmd_end *end, bool session_reset); /* frees run */
void guest_run_fail(guest_run *run, const guest_fault *f);                           /* before its start; frees run */
void guest_run_stdin_room(guest_run *run); /* the taker of standard input can take more */

/* ---- session.c ---- */
void guest_session_route(guest_req *req, const char *id); /* POST, DELETE */
int guest_session_submit(guest_run *run, guest_fault *f); /* queues it in run->session */
void guest_session_cancel(guest_run *run);                /* the client is gone: run is forgotten by the session */
void guest_session_paused(guest_run *run, bool paused);   /* the client reads slowly */
size_t guest_session_stdin(guest_run *run, const char *data, size_t len); /* how much was taken */
void guest_session_stdin_end(guest_run *run);

/* ---- files.c ---- */
void guest_file_put_begin(guest_req *req);
void guest_file_get(guest_req *req);
void guest_file_list(guest_req *req);

#endif
