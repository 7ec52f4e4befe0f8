/* aio.h -- what the files of the AIO plane share: envelopes, request fields, kept output, ids.
 *
 *   aio.c        routes, GET /v1/sandbox        aio_file.c    read, write, replace, download
 *   aio_text.c   envelopes, fields, output      aio_upload.c  upload (multipart, streamed)
 *   aio_shell.c  /v1/shell routes               aio_walk.c    list, find, glob: directory trees, in slices
 *   aio_pty.c    a session's shell              aio_grep.c    grep, search: texts, in slices
 *   aio_bash.c   /v1/bash                       aio_session.c what the sessions of both planes share
 *
 * Everything runs on the guest's one thread: a call may keep its request and answer later, but it never waits.
 */
#ifndef AIO_H
#define AIO_H

#include "guest.h"

/* ---- envelopes: each ends the request ---- */
void aio_reply_ok(guest_req *req, json_t *data, const char *hint);                 /* takes data */
void aio_reply_fail(guest_req *req, int status, const char *message, json_t *data); /* success: false; takes data */
void aio_reply_invalid(guest_req *req, const char *field, const char *message);    /* 422, without an envelope */
/* A fault of a file operation: 200 with success: false, or its own status for stale_token, doomed and no_memory. */
void aio_reply_file_fault(guest_req *req, const char *path, const char *operation, const guest_fault *f);
/* A fault of anything else: its status, with the envelope (409 as on paddock's own routes). */
void aio_reply_fault(guest_req *req, const guest_fault *f);
void aio_reply_no_route(guest_req *req);

/* ---- request fields ---- */
typedef enum aio_kind {
    AIO_TEXT,    /* const char *: a string without NUL bytes; NULL = left out */
    AIO_BYTES,   /* json_t *: a string that may hold NUL bytes; borrowed */
    AIO_SECONDS, /* double, 0 or more */
    AIO_BOOL,    /* bool */
    AIO_COUNT,   /* int64_t, 0 or more */
    AIO_LIST,    /* json_t *: an array of strings (one string stands for an array of it); borrowed */
    AIO_MAP      /* json_t *: an object of strings; borrowed */
} aio_kind;
typedef struct aio_field {
    const char *name;
    aio_kind kind;
    bool required;
    size_t offset; /* in the struct that is filled; what is left out keeps the value that it had */
} aio_field;
size_t aio_list_size(const json_t *list); /* of an AIO_LIST; NULL has none */
const char *aio_list_at(const json_t *list, size_t i);
#define AIO_END { NULL, AIO_TEXT, false, 0 }
/* The body's object (a new reference: the strings live in it), or NULL: then the request was answered (422). */
json_t *aio_fields(guest_req *req, const aio_field *fields, void *out);

/* ---- text ---- */
/* A JSON string of any bytes: each maximal broken piece of UTF-8 becomes U+FFFD. */
json_t *aio_text(const char *s, size_t len);
json_t *aio_time(double wall); /* "2026-01-31T12:00:00.123Z" */
double aio_wall(void);         /* seconds since the epoch; for records only */
void aio_new_id(char id[40]);

/* ---- output of one stream, bounded: the first half and the last half of `limit` bytes are kept ---- */
typedef struct aio_buf {
    char *head, *tail; /* tail is a ring */
    size_t head_len, head_cap, tail_len, tail_at;
    size_t limit;
    uint64_t total;    /* bytes that came */
} aio_buf;
void aio_buf_init(aio_buf *b, size_t limit);
void aio_buf_free(aio_buf *b);
void aio_buf_add(aio_buf *b, const char *data, size_t len);
/* What is kept from byte `from` on, as JSON; the middle is cut out where it was not kept or exceeds `max` bytes (0 = all). */
json_t *aio_buf_json(const aio_buf *b, uint64_t from, size_t max);

/* ---- routes: /v1/shell/NAME and so on; `id` is the path's variable part, or NULL ---- */
typedef void aio_handler(guest_req *req, const char *id);
aio_handler aio_shell_exec, aio_shell_view, aio_shell_wait, aio_shell_write, aio_shell_kill, aio_shell_create,
    aio_shell_update, aio_shell_list, aio_shell_stats, aio_shell_delete, aio_shell_delete_all;
aio_handler aio_bash_exec, aio_bash_output, aio_bash_write, aio_bash_kill, aio_bash_list, aio_bash_create, aio_bash_close;
aio_handler aio_file_read, aio_file_write, aio_file_replace, aio_file_download, aio_file_search, aio_file_find, aio_file_grep,
    aio_file_glob, aio_file_list;
void aio_upload_begin(guest_req *req);

#endif
