/* aio_upload.c -- POST /v1/file/upload: a multipart body, streamed.
 *
 * The parts are `file` and `path`, in either order. With the path first, bytes go straight to the temporary file beside
 * their place; with the file first (as the official client sends it), to a nameless file until the path is known.
 * An error is remembered and answered at the end, since the client only listens then.
 */
#include "aio.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <unistd.h>

#define HEAD_MAX 8192 /* bytes of one part's headers */
#define FIELD_MAX 4096

typedef enum state { PREAMBLE, AFTER_MARK, HEAD, DATA, EPILOGUE } state;
typedef enum part { PART_OTHER, PART_FILE, PART_PATH } part;

typedef struct upload {
    guest_req *req;
    state state;
    part part;
    char mark[80];           /* \r\n-- and the boundary */
    size_t mark_len, matched;
    char head[HEAD_MAX];
    size_t head_len;
    char path[FIELD_MAX], filename[256];
    size_t path_len;
    bool has_file;
    guest_upload *to;        /* with the path first */
    int spool;               /* else; -1 = none */
    uint64_t size;
    guest_fault fault;       /* the first error; status 0 = none */
} upload;

static void upload_free(upload *u)
{
    guest_upload_abort(u->to);
    if (u->spool >= 0) close(u->spool);
    free(u);
}

static void wrong(upload *u, const char *why)
{
    if (u->fault.status == 0) guest_fail(&u->fault, 422, "invalid_body", 0, "%s", why);
}

/* ---- where the bytes go ---- */

static void store(upload *u, const char *data, size_t len)
{
    if (u->fault.status != 0 || len == 0) return;
    u->size += len;
    if (u->to != NULL) {
        guest_upload_write(u->to, data, len, &u->fault);
        return;
    }
    while (len > 0) {
        ssize_t n = write(u->spool, data, len);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            guest_fail_errno(&u->fault, errno, "keep the upload", "a temporary file");
            return;
        }
        data += n;
        len -= (size_t)n;
    }
}

static void part_data(upload *u, const char *data, size_t len)
{
    if (u->part == PART_FILE) {
        store(u, data, len);
    } else if (u->part == PART_PATH) {
        if (len >= sizeof u->path - u->path_len || memchr(data, 0, len) != NULL) {
            wrong(u, "path is too long or holds a NUL");
            return;
        }
        memcpy(u->path + u->path_len, data, len);
        u->path_len += len;
    }
}

static void file_begins(upload *u)
{
    if (u->has_file) {
        wrong(u, "one upload carries one file");
        return;
    }
    u->has_file = true;
    if (u->path_len > 0) {
        u->to = guest_upload_open(u->path, false, &u->fault);
        return;
    }
    u->spool = open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (u->spool < 0) u->spool = memfd_create("upload", MFD_CLOEXEC);
    if (u->spool < 0) guest_fail_errno(&u->fault, errno, "keep the upload", "a temporary file");
}

/* ---- the multipart format ---- */

/* The value of name="..." in a Content-Disposition line: false when it is not there or does not fit. */
static bool parameter(const char *line, const char *name, char *out, size_t size)
{
    size_t len = strlen(name);
    for (const char *p = line; (p = strchr(p, ';')) != NULL;) {
        p += 1 + strspn(p + 1, " \t");
        if (strncasecmp(p, name, len) != 0 || p[len] != '=' || p[len + 1] != '"') continue;
        const char *from = p + len + 2, *end = strchr(from, '"');
        if (end == NULL || (size_t)(end - from) >= size) return false;
        memcpy(out, from, (size_t)(end - from));
        out[end - from] = 0;
        return true;
    }
    return false;
}

static void head_complete(upload *u)
{
    char name[64] = "";
    u->part = PART_OTHER;
    for (char *line = u->head; line != NULL && *line != 0;) {
        char *next = strstr(line, "\r\n");
        if (next != NULL) *next = 0;
        if (strncasecmp(line, "Content-Disposition:", 20) == 0) {
            parameter(line, "name", name, sizeof name);
            parameter(line, "filename", u->filename, sizeof u->filename);
        }
        line = next ? next + 2 : NULL;
    }
    if (strcmp(name, "file") == 0) u->part = PART_FILE;
    if (strcmp(name, "path") == 0) u->part = PART_PATH;
    if (u->part == PART_FILE) file_begins(u);
    u->state = DATA;
}

static void head_byte(upload *u, char c)
{
    if (u->head_len + 1 >= sizeof u->head || c == 0) {
        wrong(u, "a part's headers are too long or hold a NUL");
        u->state = EPILOGUE;
        return;
    }
    u->head[u->head_len++] = c;
    u->head[u->head_len] = 0;
    if (u->state == AFTER_MARK) {
        if (u->head_len < 2) return;
        u->state = memcmp(u->head, "\r\n", 2) == 0 ? HEAD : EPILOGUE;
        if (u->state == EPILOGUE && memcmp(u->head, "--", 2) != 0) wrong(u, "something stands behind a boundary");
        u->head_len = 0;
    } else if (u->head_len >= 4 && memcmp(u->head + u->head_len - 4, "\r\n\r\n", 4) == 0) {
        head_complete(u);
    } else if (u->head_len == 2 && memcmp(u->head, "\r\n", 2) == 0) {
        head_complete(u); /* no headers at all */
    }
}

/* Looks for the mark in data[i..len) and hands on what stands before it. The mark's only \r is its first byte, so a failed
 * match can begin anew only at the byte that broke it. Returns where it stopped. */
static size_t scan(upload *u, const char *data, size_t i, size_t len)
{
    size_t plain = i;
    for (; i < len; i++) {
        if (data[i] == u->mark[u->matched]) {
            if (u->matched == 0) {
                if (u->state == DATA) part_data(u, data + plain, i - plain);
                plain = i;
            }
            if (++u->matched < u->mark_len) continue;
            u->matched = 0;
            u->state = AFTER_MARK;
            u->head_len = 0;
            return i + 1;
        }
        if (u->matched > 0) { /* the part of it that came in an earlier call is not in `data` */
            if (u->state == DATA) part_data(u, u->mark, u->matched);
            plain = i;
            u->matched = 0;
            i--; /* this byte again, as a first one */
            continue;
        }
        const char *cr = memchr(data + i, '\r', len - i);
        i = (cr ? (size_t)(cr - data) : len) - 1;
    }
    if (u->state == DATA && u->matched == 0) part_data(u, data + plain, len - plain);
    return len;
}

static void on_body(guest_req *req, const char *data, size_t len)
{
    upload *u = req->ctx;
    for (size_t i = 0; i < len && u->state != EPILOGUE;) {
        if (u->state == PREAMBLE || u->state == DATA) i = scan(u, data, i, len);
        else head_byte(u, data[i++]);
    }
}

/* ---- the end ---- */

/* From the nameless file to its place. */
static void copy_spool(upload *u)
{
    char buf[65536];
    ssize_t n = 1;
    u->to = guest_upload_open(u->path, false, &u->fault);
    if (u->to == NULL || lseek(u->spool, 0, SEEK_SET) < 0) return;
    while (u->fault.status == 0 && (n = read(u->spool, buf, sizeof buf)) > 0)
        guest_upload_write(u->to, buf, (size_t)n, &u->fault);
    if (n < 0) guest_fail_errno(&u->fault, errno, "read back", "the upload");
}

static void on_end(guest_req *req)
{
    upload *u = req->ctx;
    req->on_close = NULL;
    if (u->state != EPILOGUE) wrong(u, "the multipart body is cut off");
    if (!u->has_file) wrong(u, "the part `file` is missing");
    if (u->path_len == 0) {
        if (u->filename[0] == 0 || strchr(u->filename, '/') != NULL) wrong(u, "the part `path` is missing");
        int n = snprintf(u->path, sizeof u->path, "%s/%s", guest_conf.workspace, u->filename);
        if (n >= (int)sizeof u->path) wrong(u, "the path is too long");
    }
    if (u->fault.status == 0 && u->to == NULL) copy_spool(u);
    if (u->fault.status == 0) {
        guest_upload *to = u->to;
        u->to = NULL;
        guest_upload_commit(to, req->token, &u->fault);
    }
    if (u->fault.status == 0)
        aio_reply_ok(req, json_pack("{s:o, s:I, s:b}", "file_path", aio_text(u->path, strlen(u->path)), "file_size",
                                    (json_int_t)u->size, "success", 1), NULL);
    else if (strcmp(u->fault.code, "invalid_body") == 0)
        aio_reply_invalid(req, "body", u->fault.message);
    else
        aio_reply_file_fault(req, u->path, "upload", &u->fault);
    upload_free(u);
}

static void on_close(guest_req *req)
{
    upload_free(req->ctx);
}

/* The boundary of a Content-Type; false when there is none, or one longer than the format allows. */
static bool boundary(const char *type, char *out, size_t size)
{
    const char *p = type ? strcasestr(type, "boundary=") : NULL;
    if (p == NULL || strncasecmp(type, "multipart/form-data", 19) != 0) return false;
    p += 9;
    bool quoted = *p == '"';
    p += quoted;
    size_t len = strcspn(p, quoted ? "\"" : "; \t");
    if (len == 0 || len > 70 || len + 5 > size || strcspn(p, "\r\n") < len) return false;
    snprintf(out, size, "\r\n--%.*s", (int)len, p);
    return true;
}

void aio_upload_begin(guest_req *req)
{
    upload *u = calloc(1, sizeof *u);
    if (u == NULL) {
        aio_reply_fail(req, 500, "no memory for an upload", NULL);
        return;
    }
    u->req = req;
    u->spool = -1;
    if (!boundary(guest_header(req, "Content-Type"), u->mark, sizeof u->mark)) {
        free(u);
        aio_reply_invalid(req, "body", "must be multipart/form-data with a boundary of 1 to 70 characters");
        return;
    }
    u->mark_len = strlen(u->mark);
    u->matched = 2; /* the first boundary stands at the very start, without the line break before it */
    req->ctx = u;
    req->on_body = on_body;
    req->on_end = on_end;
    req->on_close = on_close;
    req->body_max = GUEST_FILE_MAX;
}
