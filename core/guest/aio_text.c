/* aio_text.c -- see aio.h: envelopes, request fields, UTF-8, kept output. */
#include "aio.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

/* ---- envelopes ---- */

static json_t *envelope(bool success, const char *message, json_t *data, const char *hint)
{
    return json_pack("{s:b, s:o, s:o, s:o}", "success", success, "message", aio_text(message, strlen(message)), "data",
                     data ? data : json_null(), "hint", hint ? json_string(hint) : json_null());
}

void aio_reply_ok(guest_req *req, json_t *data, const char *hint)
{
    guest_reply_json(req, 200, envelope(true, "Operation successful", data, hint));
}

void aio_reply_fail(guest_req *req, int status, const char *message, json_t *data)
{
    guest_reply_json(req, status, envelope(false, message, data, NULL));
}

void aio_reply_invalid(guest_req *req, const char *field, const char *message)
{
    guest_reply_json(req, 422, json_pack("{s:[{s:[s,s], s:s, s:s}]}", "detail", "loc", "body", field, "msg", message, "type",
                                         "value_error"));
}

void aio_reply_no_route(guest_req *req)
{
    guest_reply_json(req, 404, json_pack("{s:s}", "detail", "Not Found"));
}

static bool is_token_fault(const guest_fault *f)
{
    return f->status == 409 && (strcmp(f->code, "stale_token") == 0 || strcmp(f->code, "doomed") == 0);
}

void aio_reply_fault(guest_req *req, const guest_fault *f)
{
    if (is_token_fault(f)) guest_reply_fault(req, f);
    else aio_reply_fail(req, f->status, f->message, NULL);
}

/* Codes of guest.h that this API has another word for. */
static const char *error_type(const char *code)
{
    static const char *const words[][2] = {
        { "is_directory", "invalid_target" }, { "not_a_directory", "invalid_target" },  { "not_a_file", "invalid_target" },
        { "escapes", "permission_denied" },   { "read_only", "read_only_filesystem" },  { "no_space", "no_space_left" },
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strcmp(code, words[i][0]) == 0) return words[i][1];
    return code;
}

void aio_reply_file_fault(guest_req *req, const char *path, const char *operation, const guest_fault *f)
{
    if (is_token_fault(f) || strcmp(f->code, "no_memory") == 0) {
        aio_reply_fault(req, f);
        return;
    }
    json_t *data = json_pack("{s:o, s:s, s:o, s:s, s:b}", "path", aio_text(path, strlen(path)), "operation", operation,
                             "message", aio_text(f->message, strlen(f->message)), "error_type", error_type(f->code),
                             "retryable", 0);
    if (data != NULL && f->sys != 0) {
        json_object_set_new(data, "errno", json_integer(f->sys));
        json_object_set_new(data, "errno_name", json_string(strerrorname_np(f->sys)));
    }
    aio_reply_fail(req, 200, f->message, data);
}

/* ---- request fields ---- */

/* Fills one field; NULL, or what is wrong with the value. */
static const char *fill(const aio_field *field, json_t *v, void *at)
{
    switch (field->kind) {
    case AIO_TEXT:
        if (!json_is_string(v)) return "must be a string";
        if (strlen(json_string_value(v)) != json_string_length(v)) return "must not contain NUL characters";
        *(const char **)at = json_string_value(v);
        return NULL;
    case AIO_BYTES:
        if (!json_is_string(v)) return "must be a string";
        *(json_t **)at = v;
        return NULL;
    case AIO_SECONDS:
        if (!json_is_number(v) || !(json_number_value(v) >= 0) || json_number_value(v) > 1e9)
            return "must be a number of seconds, 0 or more";
        *(double *)at = json_number_value(v);
        return NULL;
    case AIO_BOOL:
        if (!json_is_boolean(v)) return "must be true or false";
        *(bool *)at = json_is_true(v);
        return NULL;
    case AIO_COUNT: {
        double d = json_number_value(v);
        if (!json_is_number(v) || d < 0 || d > 9e15 || d != floor(d)) return "must be a whole number, 0 or more";
        *(int64_t *)at = json_is_integer(v) ? json_integer_value(v) : (int64_t)d;
        return NULL;
    }
    case AIO_LIST:
        if (!json_is_array(v) && !json_is_string(v)) return "must be a list of strings";
        for (size_t i = 0; i < json_array_size(v); i++)
            if (!json_is_string(json_array_get(v, i))) return "must be a list of strings";
        *(json_t **)at = v;
        return NULL;
    case AIO_MAP: {
        const char *key;
        json_t *value;
        if (!json_is_object(v)) return "must be an object of strings";
        json_object_foreach(v, key, value)
            if (!json_is_string(value) || strlen(json_string_value(value)) != json_string_length(value))
                return "must be an object of strings without NUL characters";
        *(json_t **)at = v;
        return NULL;
    }
    }
    return "is of no known kind";
}

json_t *aio_fields(guest_req *req, const aio_field *fields, void *out)
{
    json_error_t why;
    json_auto_t *body = NULL;
    if (req->body_len > 0) {
        body = json_loadb(req->body, req->body_len, JSON_ALLOW_NUL, &why);
        if (body == NULL) {
            aio_reply_invalid(req, "body", why.text);
            return NULL;
        }
    } else {
        body = json_object();
    }
    if (!json_is_object(body)) {
        aio_reply_invalid(req, "body", "must be a JSON object");
        return NULL;
    }
    for (const aio_field *f = fields; f->name != NULL; f++) {
        json_t *v = json_object_get(body, f->name);
        bool absent = v == NULL || json_is_null(v);
        const char *wrong = absent ? (f->required ? "Field required" : NULL) : fill(f, v, (char *)out + f->offset);
        if (wrong != NULL) {
            aio_reply_invalid(req, f->name, wrong);
            return NULL;
        }
    }
    return json_incref(body);
}

size_t aio_list_size(const json_t *list)
{
    return json_is_string(list) ? 1 : json_array_size(list);
}

const char *aio_list_at(const json_t *list, size_t i)
{
    return json_string_value(json_is_string(list) ? list : json_array_get(list, i));
}

/* ---- text ---- */

/* How many bytes of s are one valid character (*valid), or one broken piece: a start and what fits after it. */
static size_t utf8_piece(const unsigned char *s, size_t len, bool *valid)
{
    unsigned char c = s[0];
    size_t more = c < 0x80 ? 0 : c >= 0xc2 && c <= 0xdf ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 9;
    *valid = false;
    if (more == 9) return 1;
    for (size_t i = 1; i <= more; i++) {
        unsigned char low = 0x80, high = 0xbf;
        if (i == 1) { /* no overlong forms, no surrogates, nothing above U+10FFFF */
            if (c == 0xe0) low = 0xa0;
            if (c == 0xed) high = 0x9f;
            if (c == 0xf0) low = 0x90;
            if (c == 0xf4) high = 0x8f;
        }
        if (i >= len || s[i] < low || s[i] > high) return i;
    }
    *valid = true;
    return more + 1;
}

json_t *aio_text(const char *s, size_t len)
{
    const unsigned char *p = (const unsigned char *)s;
    size_t broken = 0, grow = 0;
    bool valid;
    for (size_t i = 0, n; i < len; i += n) {
        n = p[i] < 0x80 ? (valid = true, 1) : utf8_piece(p + i, len - i, &valid);
        if (!valid) broken++, grow += n < 3 ? 3 - n : 0;
    }
    if (broken == 0) return json_stringn(s, len);
    char *text = malloc(len + grow + 1), *w = text;
    if (text == NULL) return NULL;
    for (size_t i = 0, n; i < len; i += n) {
        n = utf8_piece(p + i, len - i, &valid);
        memcpy(w, valid ? s + i : "\xef\xbf\xbd", valid ? n : 3);
        w += valid ? n : 3;
    }
    json_t *v = json_stringn(text, (size_t)(w - text));
    free(text);
    return v;
}

double aio_wall(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

json_t *aio_time(double wall)
{
    struct tm tm;
    char day[32], text[48];
    time_t s = (time_t)wall;
    gmtime_r(&s, &tm);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(text, sizeof text, "%s.%03dZ", day, (int)((wall - (double)s) * 1000) % 1000);
    return json_string(text);
}

void aio_new_id(char id[40])
{
    uint64_t bits[2];
    /* An id only has to differ from the others here; a kernel without entropy yet still gives the clock's digits. */
    if (getrandom(bits, sizeof bits, GRND_NONBLOCK) != (ssize_t)sizeof bits) {
        static uint64_t counter;
        bits[0] = (uint64_t)guest_now();
        bits[1] = ++counter;
    }
    snprintf(id, 40, "%016llx%016llx", (unsigned long long)bits[0], (unsigned long long)bits[1]);
}

/* ---- kept output ---- */

void aio_buf_init(aio_buf *b, size_t limit)
{
    memset(b, 0, sizeof *b);
    b->limit = limit < 4096 ? 4096 : limit;
}

void aio_buf_free(aio_buf *b)
{
    free(b->head);
    free(b->tail);
    b->head = b->tail = NULL;
    b->head_len = b->head_cap = b->tail_len = b->tail_at = 0;
}

static size_t head_add(aio_buf *b, const char *data, size_t len)
{
    size_t half = b->limit / 2, room = half - b->head_len, take = len < room ? len : room;
    if (b->tail_len > 0 || take == 0) return 0;
    if (b->head_len + take > b->head_cap) {
        size_t cap = b->head_cap ? b->head_cap : 4096;
        while (cap < b->head_len + take) cap *= 2;
        char *head = realloc(b->head, cap < half ? cap : half);
        if (head == NULL) return 0;
        b->head = head;
        b->head_cap = cap < half ? cap : half;
    }
    memcpy(b->head + b->head_len, data, take);
    b->head_len += take;
    return take;
}

void aio_buf_add(aio_buf *b, const char *data, size_t len)
{
    size_t half = b->limit / 2;
    b->total += len;
    size_t taken = head_add(b, data, len);
    data += taken;
    len -= taken;
    if (len == 0) return;
    if (b->tail == NULL && (b->tail = malloc(half)) == NULL) return; /* counted in total: it shows as cut out */
    if (len > half) {
        data += len - half;
        len = half;
    }
    size_t at = (b->tail_at + b->tail_len) % half, first = len < half - at ? len : half - at;
    memcpy(b->tail + at, data, first);
    memcpy(b->tail, data + first, len - first);
    b->tail_len += len;
    if (b->tail_len > half) {
        b->tail_at = (b->tail_at + b->tail_len - half) % half;
        b->tail_len = half;
    }
}

/* Copies the kept bytes from `from` on to `to`. *gap = where in `to` bytes are missing, *missing = how many. */
static size_t kept(const aio_buf *b, uint64_t from, char *to, size_t *gap, uint64_t *missing)
{
    size_t half = b->limit / 2, n = 0;
    uint64_t tail_from = b->total - b->tail_len;
    if (from < b->head_len) {
        n = b->head_len - (size_t)from;
        if (n > 0) memcpy(to, b->head + from, n);
    }
    *gap = n;
    uint64_t next = from + n;
    *missing = tail_from > next ? tail_from - next : 0;
    uint64_t start = next > tail_from ? next - tail_from : 0;
    for (size_t i = (size_t)start; start < b->tail_len && i < b->tail_len; i++)
        to[n++] = b->tail[(b->tail_at + i) % half];
    return n;
}

json_t *aio_buf_json(const aio_buf *b, uint64_t from, size_t max)
{
    char notice[96] = "";
    size_t gap;
    uint64_t missing;
    if (from >= b->total) return json_stringn("", 0);
    char *bytes = malloc(b->head_len + b->tail_len + sizeof notice + 1);
    if (bytes == NULL) return NULL;
    size_t n = kept(b, from, bytes, &gap, &missing);
    size_t before = gap, after = n - gap;
    if (max > 0 && n > max) { /* keep the two ends: this plane cuts the middle out */
        size_t first = max / 2, last = max - first;
        if (missing == 0) gap = n / 2, before = gap, after = n - gap;
        if (before < first) last += first - before, first = before;
        if (after < last) first += last - after, last = after;
        while (first > 0 && first < before && ((unsigned char)bytes[first] & 0xc0) == 0x80) first--;
        while (last > 0 && last < after && ((unsigned char)bytes[n - last] & 0xc0) == 0x80) last--;
        missing += before - first + after - last;
        before = first;
        after = last;
    }
    int len = missing ? snprintf(notice, sizeof notice, "\n... [%llu bytes cut out] ...\n", (unsigned long long)missing) : 0;
    memmove(bytes + before + len, bytes + n - after, after);
    memcpy(bytes + before, notice, (size_t)len);
    json_t *v = aio_text(bytes, before + (size_t)len + after);
    free(bytes);
    return v;
}
