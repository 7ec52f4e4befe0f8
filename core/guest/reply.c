/* reply.c -- answers: complete ones, streamed ones, files; into the connection's output buffer and from there to the client. */
#include "conn.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char *reason_of(int status)
{
    switch (status) {
#define XX(num, name, string) \
    case num: return #string;
        HTTP_STATUS_MAP(XX)
#undef XX
    default: return "Status";
    }
}

static void out_put(guest_conn *c, const void *data, size_t len)
{
    if (c->out_at > 0 && c->out_at + c->out_len + len > c->out_cap) {
        memmove(c->out, c->out + c->out_at, c->out_len);
        c->out_at = 0;
    }
    if (c->out_len + len > c->out_cap) {
        size_t cap = c->out_cap ? c->out_cap : 2048;
        while (cap < c->out_len + len)
            cap *= 2;
        char *grown = realloc(c->out, cap);
        if (grown == NULL) {
            c->broken = true; /* a reply with a hole would be worse than none */
            return;
        }
        c->out = grown;
        c->out_cap = cap;
    }
    if (len > 0)
        memcpy(c->out + c->out_at + c->out_len, data, len);
    c->out_len += len;
}

void guest_conn_out_free(guest_conn *c)
{
    free(c->out);
    c->out = NULL;
    c->out_at = c->out_len = c->out_cap = 0;
}

void guest_conn_continue(guest_conn *c)
{
    static const char line[] = "HTTP/1.1 100 Continue\r\n\r\n";
    out_put(c, line, sizeof line - 1);
    guest_conn_touch(c);
}

static bool http_1_0(const guest_conn *c)
{
    return c->parser.http_major < 1 || (c->parser.http_major == 1 && c->parser.http_minor < 1);
}

static void head_put(guest_conn *c, int status, const char *type, const char *length)
{
    char head[512];
    if (c->expects_100 && c->phase == CONN_BODY)
        c->keep = false; /* it waits for leave to send a body: what comes next could be that or a new request */
    int n = snprintf(head, sizeof head, "HTTP/1.1 %d %s\r\nContent-Type: %.100s\r\n%s%s\r\n", status, reason_of(status),
                     type != NULL ? type : "application/octet-stream", length, c->keep ? "" : "Connection: close\r\n");
    out_put(c, head, (size_t)n);
}

/* The route is done with its request: nothing may call it back. */
static void request_over(guest_conn *c)
{
    c->replied = true;
    c->paused = false;
    c->req.on_close = NULL;
    c->req.on_drain = NULL;
    c->req.on_body = NULL;
    c->req.on_end = NULL;
    guest_conn_touch(c);
}

void guest_reply(guest_req *req, int status, const char *type, const void *body, size_t len)
{
    guest_conn *c = conn_of(req);
    char length[64];
    snprintf(length, sizeof length, "Content-Length: %zu\r\n", len);
    head_put(c, status, type, length);
    if (strcmp(req->method, "HEAD") != 0)
        out_put(c, body, len);
    request_over(c);
}

void guest_reply_json(guest_req *req, int status, json_t *value)
{
    char *text = value != NULL ? json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    static const char failed[] = "{\"error\":\"no_memory\",\"message\":\"cannot make the answer\"}";
    if (text != NULL)
        guest_reply(req, status, "application/json", text, strlen(text));
    else
        guest_reply(req, 500, "application/json", failed, sizeof failed - 1);
    free(text);
    json_decref(value);
}

void guest_reply_fault(guest_req *req, const guest_fault *f)
{
    char message[3 * sizeof f->message]; /* a path in it may be no UTF-8, which JSON must be */
    size_t n = 0;
    for (const char *p = f->message; *p != '\0'; p++)
        message[n++] = (unsigned char)*p >= 32 && (unsigned char)*p < 127 ? *p : '?';
    message[n] = '\0';
    json_t *value = json_pack("{s:s, s:s}", "error", f->code, "message", message);
    if (value != NULL && (strcmp(f->code, "stale_token") == 0 || strcmp(f->code, "token_mismatch") == 0)) {
        char token[24];
        snprintf(token, sizeof token, "%llu", (unsigned long long)guest_token());
        json_object_set_new(value, "token", json_string(token));
    }
    guest_reply_json(req, f->status, value);
}

void guest_reply_file(guest_req *req, int fd, uint64_t size, const char *type)
{
    guest_conn *c = conn_of(req);
    char length[64];
    snprintf(length, sizeof length, "Content-Length: %llu\r\n", (unsigned long long)size);
    head_put(c, 200, type, length);
    c->file = fd;
    c->file_left = size;
    request_over(c);
}

void guest_reply_begin(guest_req *req, int status, const char *type)
{
    guest_conn *c = conn_of(req);
    c->begun = true;
    c->chunked = !http_1_0(c);
    if (!c->chunked)
        c->keep = false; /* the end of such a body is the end of the connection */
    head_put(c, status, type, c->chunked ? "Transfer-Encoding: chunked\r\n" : "");
    guest_conn_touch(c);
}

bool guest_send(guest_req *req, const void *data, size_t len)
{
    guest_conn *c = conn_of(req);
    if (len > 0 && c->chunked) {
        char size[24];
        int n = snprintf(size, sizeof size, "%zx\r\n", len);
        out_put(c, size, (size_t)n);
        out_put(c, data, len);
        out_put(c, "\r\n", 2);
    } else if (len > 0) {
        out_put(c, data, len);
    }
    guest_conn_touch(c);
    c->full = c->out_len > OUT_HIGH;
    return !c->full;
}

void guest_reply_end(guest_req *req)
{
    guest_conn *c = conn_of(req);
    if (c->chunked)
        out_put(c, "0\r\n\r\n", 5);
    request_over(c);
}

/* The next piece of the file into the buffer. A file that has shrunk cannot keep its promised length: cut the connection. */
static void file_fill(guest_conn *c)
{
    char piece[32768];
    size_t want = c->file_left < sizeof piece ? (size_t)c->file_left : sizeof piece;
    ssize_t n = want > 0 ? read(c->file, piece, want) : 0;
    if (n > 0) {
        out_put(c, piece, (size_t)n);
        c->file_left -= (uint64_t)n;
    } else if (want > 0) {
        c->broken = true;
    }
    if (c->file_left == 0 || c->broken) {
        close(c->file);
        c->file = -1;
    }
}

/* What goes without waiting, at most a megabyte a round so that others have their turn. */
void guest_conn_write(guest_conn *c)
{
    for (int turns = 0; turns < 32 && !c->broken; turns++) {
        if (c->full && !c->replied && c->out_len <= OUT_LOW) {
            c->full = false;
            if (c->req.on_drain != NULL)
                c->req.on_drain(&c->req);
        }
        if (c->out_len < 32768 && c->file >= 0)
            file_fill(c);
        if (c->out_len == 0)
            break;
        ssize_t n = send(c->w.fd, c->out + c->out_at, c->out_len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            c->broken = c->broken || (errno != EAGAIN && errno != ENOBUFS);
            break;
        }
        c->out_at += (size_t)n;
        c->out_len -= (size_t)n;
        c->progress = true;
    }
    if (c->out_len == 0)
        guest_conn_out_free(c);
}
