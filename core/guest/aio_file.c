/* aio_file.c -- /v1/file: read, write, replace, download of one file. Paths are files.c's business: it keeps each call
 * beneath the mount that its path names, whatever links say. */
#include "aio.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TEXT_MAX (8u << 20) /* bytes of a file that is handled as text, in memory */

typedef struct args {
    const char *file, *encoding;
    json_t *content, *old, *new;
    bool append, leading, trailing, sudo;
    int64_t start, end;
} args;

/* A NUL-terminated path without "NUL" inside is all that files.c wants. */
static const aio_field READ[] = {
    { "file", AIO_TEXT, true, offsetof(args, file) },
    { "start_line", AIO_COUNT, false, offsetof(args, start) },
    { "end_line", AIO_COUNT, false, offsetof(args, end) },
    { "sudo", AIO_BOOL, false, offsetof(args, sudo) },
    AIO_END,
};

/* The start of line `n` (from 0) at or after p, or end. */
static const char *line_at(const char *p, const char *end, int64_t n)
{
    for (; n > 0 && p < end; n--) {
        const char *nl = memchr(p, '\n', (size_t)(end - p));
        p = nl ? nl + 1 : end;
    }
    return p;
}

void aio_file_read(guest_req *req, const char *id)
{
    args a = { .end = INT64_MAX };
    json_auto_t *body = aio_fields(req, READ, &a);
    guest_fault f = { 0 };
    size_t len;
    struct stat st;
    (void)id;
    if (body == NULL) return;
    char *text = guest_read_all(a.file, TEXT_MAX, &len, &st, &f);
    if (text == NULL) {
        aio_reply_file_fault(req, a.file, "read", &f);
        return;
    }
    const char *end = text + len, *from = line_at(text, end, a.start);
    const char *to = a.end == INT64_MAX ? end : a.end > a.start ? line_at(from, end, a.end - a.start) : from;
    json_int_t lines = 0;
    for (const char *p = text; p < end; lines++) p = line_at(p, end, 1);
    json_t *content = aio_text(from, (size_t)(to - from));
    free(text);
    aio_reply_ok(req, json_pack("{s:o, s:s, s:I}", "content", content, "file", a.file, "line_count", lines), NULL);
}

/* ---- write ---- */

static int base64_digit(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' || c == '-' ? 62 : c == '/' || c == '_' ? 63 : -1;
}

/* Decodes into `out` (at least len bytes). Line breaks are skipped; false = it is no base64. */
static bool base64(const char *s, size_t len, char *out, size_t *out_len)
{
    uint32_t bits = 0;
    size_t digits = 0, pads = 0, n = 0;
    for (size_t i = 0; i < len; i++) {
        if (s[i] == '\n' || s[i] == '\r') continue;
        if (s[i] == '=') {
            pads++;
            continue;
        }
        int d = base64_digit(s[i]);
        if (d < 0 || pads > 0) return false;
        bits = bits << 6 | (uint32_t)d;
        if (++digits % 4 == 0) {
            out[n++] = (char)(bits >> 16);
            out[n++] = (char)(bits >> 8);
            out[n++] = (char)bits;
        }
    }
    if (digits % 4 == 1 || pads > 2 || (pads > 0 && (digits + pads) % 4 != 0)) return false;
    if (digits % 4 == 2) out[n++] = (char)(bits >> 4);
    if (digits % 4 == 3) {
        out[n++] = (char)(bits >> 10);
        out[n++] = (char)(bits >> 2);
    }
    *out_len = n;
    return true;
}

typedef struct piece {
    const char *s;
    size_t len;
} piece;

/* Stores the pieces in order, as one atomic replacement. */
static bool store(const char *path, const piece *pieces, size_t n, uint64_t token, guest_fault *f)
{
    guest_upload *u = guest_upload_open(path, false, f);
    if (u == NULL) return false;
    for (size_t i = 0; i < n; i++) {
        if (pieces[i].len == 0 || guest_upload_write(u, pieces[i].s, pieces[i].len, f) == 0) continue;
        guest_upload_abort(u);
        return false;
    }
    return guest_upload_commit(u, token, f) == 0;
}

static const aio_field WRITE[] = {
    { "file", AIO_TEXT, true, offsetof(args, file) },
    { "content", AIO_BYTES, true, offsetof(args, content) },
    { "encoding", AIO_TEXT, false, offsetof(args, encoding) },
    { "append", AIO_BOOL, false, offsetof(args, append) },
    { "leading_newline", AIO_BOOL, false, offsetof(args, leading) },
    { "trailing_newline", AIO_BOOL, false, offsetof(args, trailing) },
    { "sudo", AIO_BOOL, false, offsetof(args, sudo) },
    AIO_END,
};

/* What is there already, for append: NULL with f->code "not_found" when nothing is. */
static char *former(const char *path, size_t *len, guest_fault *f)
{
    struct stat st;
    *len = 0;
    return guest_read_all(path, (size_t)GUEST_FILE_MAX, len, &st, f);
}

void aio_file_write(guest_req *req, const char *id)
{
    args a = { .encoding = "utf-8" };
    json_auto_t *body = aio_fields(req, WRITE, &a);
    guest_fault f = { 0 };
    size_t old_len = 0;
    (void)id;
    if (body == NULL) return;
    piece content = { json_string_value(a.content), json_string_length(a.content) };
    char *decoded = NULL, *old = NULL;
    if (strcmp(a.encoding, "base64") == 0) {
        decoded = malloc(content.len + 1);
        if (decoded == NULL || !base64(content.s, content.len, decoded, &content.len)) {
            free(decoded);
            aio_reply_invalid(req, "content", "is no base64");
            return;
        }
        content.s = decoded;
    } else if (strcmp(a.encoding, "utf-8") != 0 && strcmp(a.encoding, "raw") != 0) {
        aio_reply_invalid(req, "encoding", "must be utf-8, base64 or raw");
        return;
    }
    bool ok = true;
    if (a.append) {
        old = former(a.file, &old_len, &f);
        ok = old != NULL || strcmp(f.code, "not_found") == 0;
    }
    piece pieces[] = { { old, old_len }, { "\n", a.leading }, content, { "\n", a.trailing } };
    size_t written = content.len + a.leading + a.trailing;
    if (ok && store(a.file, pieces, 4, req->token, &f))
        aio_reply_ok(req, json_pack("{s:s, s:I}", "file", a.file, "bytes_written", (json_int_t)written), NULL);
    else
        aio_reply_file_fault(req, a.file, "write", &f);
    free(decoded);
    free(old);
}

/* ---- replace ---- */

static const aio_field REPLACE[] = {
    { "file", AIO_TEXT, true, offsetof(args, file) },
    { "old_str", AIO_BYTES, true, offsetof(args, old) },
    { "new_str", AIO_BYTES, true, offsetof(args, new) },
    { "sudo", AIO_BOOL, false, offsetof(args, sudo) },
    AIO_END,
};

/* `text` with each `old` replaced: a new block, or NULL without memory. *count = how many. */
static char *replaced(const piece *text, const piece *old, const piece *new, size_t *len, json_int_t *count)
{
    const char *p = text->s, *end = text->s + text->len, *hit;
    *count = 0;
    for (const char *q = p; (hit = memmem(q, (size_t)(end - q), old->s, old->len)) != NULL; q = hit + old->len) ++*count;
    size_t size = text->len - (size_t)*count * old->len;
    if (*count > 0 && new->len > (SIZE_MAX / 2 - size) / (size_t)*count) return NULL;
    size += (size_t)*count * new->len;
    char *out = size <= GUEST_FILE_MAX ? malloc(size + 1) : NULL, *w = out;
    if (out == NULL) return NULL;
    while ((hit = memmem(p, (size_t)(end - p), old->s, old->len)) != NULL) {
        w = mempcpy(w, p, (size_t)(hit - p));
        w = mempcpy(w, new->s, new->len);
        p = hit + old->len;
    }
    mempcpy(w, p, (size_t)(end - p));
    *len = size;
    return out;
}

void aio_file_replace(guest_req *req, const char *id)
{
    args a = { 0 };
    json_auto_t *body = aio_fields(req, REPLACE, &a);
    guest_fault f = { 0 };
    struct stat st;
    (void)id;
    if (body == NULL) return;
    piece old = { json_string_value(a.old), json_string_length(a.old) };
    piece new = { json_string_value(a.new), json_string_length(a.new) };
    if (old.len == 0) {
        aio_reply_invalid(req, "old_str", "must not be empty");
        return;
    }
    piece text = { 0 }, result = { 0 };
    json_int_t count = 0;
    char *read = guest_read_all(a.file, TEXT_MAX, &text.len, &st, &f), *made = NULL;
    text.s = read;
    bool ok = read != NULL;
    if (ok && (made = replaced(&text, &old, &new, &result.len, &count)) == NULL) {
        guest_fail(&f, 413, "too_large", 0, "%s would become too large", a.file);
        ok = false;
    }
    result.s = made;
    if (ok && count > 0) ok = store(a.file, &result, 1, req->token, &f);
    free(read);
    free(made);
    if (ok) aio_reply_ok(req, json_pack("{s:s, s:I}", "file", a.file, "replaced_count", count), NULL);
    else aio_reply_file_fault(req, a.file, "replace", &f);
}

/* ---- download ---- */

/* Errors are HTTP errors here. change_policy needs no work: what is sent is the file that was opened, and files are
 * replaced as a whole; one that shrinks meanwhile ends the connection. */
void aio_file_download(guest_req *req, const char *id)
{
    const char *path = guest_query(req, "path"), *policy = guest_query(req, "change_policy");
    guest_fault f = { 0 };
    struct stat st;
    (void)id;
    if (path == NULL) {
        aio_reply_invalid(req, "path", "Field required");
        return;
    }
    if (policy != NULL && strcmp(policy, "ignore") != 0 && strcmp(policy, "abort") != 0) {
        aio_reply_invalid(req, "change_policy", "must be ignore or abort");
        return;
    }
    int fd = guest_open_regular(path, &st, &f);
    if (fd >= 0 && st.st_size > 0) {
        guest_reply_file(req, fd, (uint64_t)st.st_size, "application/octet-stream");
        return;
    }
    if (fd >= 0) { /* empty, or one of /proc, which all say so */
        size_t len;
        close(fd);
        char *text = guest_read_all(path, GUEST_BODY_MAX, &len, &st, &f);
        if (text != NULL) {
            guest_reply(req, 200, "application/octet-stream", text, len);
            free(text);
            return;
        }
    }
    json_t *data = json_pack("{s:o, s:s, s:o}", "path", aio_text(path, strlen(path)), "error_type", f.code, "message",
                             aio_text(f.message, strlen(f.message)));
    aio_reply_fail(req, f.status, f.message, data);
}
