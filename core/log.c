/* log.c -- from a caller to stderr without making the caller wait.
 *
 * A caller copies its record into a ring (some 100 ns); the writer thread turns records into JSON and writes them. The
 * writer is woken only when it sleeps: it lingers for some milliseconds after its last line, so that a busy runtime pays
 * for no wake-ups. The writer itself never trusts stderr: it asks poll first and writes no more than a pipe takes at once,
 * so a reader that has stopped holds up the writer, fills the ring, and costs lines, which are counted.
 *
 * True whenever the lock is free: the ring holds whole records, head - tail bytes of them.
 * Locks: the log's alone; a leaf. Nothing is called under it but memory, except with threads = false, where the line is
 * formatted and written under it.
 */
#include "log.h"

#include "jsontext.h"
#include "quiet.h"
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RING       ((size_t)256 << 10)
#define RECORD     8192 /* bytes of one record in the ring */
#define STRING     2048 /* bytes of one string in it */
#define LINE       (RECORD * 6 + 512)
#define BATCH      ((size_t)32 << 10)
#define LINGER     (20 * 1000 * 1000) /* ns: how late a line may be while the writer is awake */
#define END_WITHIN 0.9                /* s: how long the writer may go on after free was called */

struct pdk_log {
    pdk_clock *clock; /* fixed at birth, as all of these; may be NULL */
    pdk_log_sink sink;
    void *sink_ctx;
    pdk_log_level least;
    bool threads;
    pid_t owner; /* a forked child has no writer thread, and perhaps a lock that nobody will give back */
    pdk_thread writer;
    pdk_mutex lock;
    pdk_cond wake;       /* the writer waits */
    pdk_cond ended;      /* free waits */
    unsigned char *ring; /* lock, as all of these */
    size_t head, tail;   /* bytes ever put in and taken out */
    uint64_t dropped;
    bool asleep, ending, finished, abandoned;
    _Atomic pdk_ns give_up; /* when the writer stops waiting for stderr; PDK_NEVER while the log lives */
};

static _Thread_local pdk_log *current;

pdk_log *pdk_log_current(void)
{
    return current;
}

pdk_log *pdk_log_enter(pdk_log *log)
{
    pdk_log *former = current;
    current = log;
    return former;
}

static const char *level_name(int level)
{
    static const char *const names[] = { "debug", "info", "warn", "error" };
    return names[level < 0 ? 0 : level > 3 ? 3 : level];
}

/* ---- records in the ring: fixed header, then strings and numbers ----------------------------------------- */

typedef struct record_head {
    uint32_t size; /* of all of it */
    uint8_t level, fields;
    pdk_ns wall;
} record_head;

typedef struct cursor { /* over a block of memory; never leaves it */
    unsigned char *p;
    size_t left;
} cursor;

static bool put(cursor *c, const void *data, size_t len)
{
    if (len > c->left)
        return false;
    memcpy(c->p, data, len);
    c->p += len;
    c->left -= len;
    return true;
}

static bool put_str(cursor *c, const char *s)
{
    uint16_t len = (uint16_t)strnlen(s, STRING);
    return c->left >= sizeof len + len && put(c, &len, sizeof len) && put(c, s, len);
}

static void get(cursor *c, void *data, size_t len)
{
    memcpy(data, c->p, len);
    c->p += len;
    c->left -= len;
}

static const char *get_str(cursor *c, size_t *len)
{
    uint16_t n;
    get(c, &n, sizeof n);
    const char *s = (const char *)c->p;
    c->p += n;
    c->left -= n;
    *len = n;
    return s;
}

static bool put_field(cursor *c, const pdk_field *f)
{
    uint8_t type = (uint8_t)f->type;
    cursor before = *c;
    bool ok = put(c, &type, 1) && put_str(c, f->key == NULL ? "" : f->key);
    switch (f->type) {
    case PDK_F_STR: ok = ok && put_str(c, f->str); break;
    case PDK_F_NUM: ok = ok && put(c, &f->num, sizeof f->num); break;
    case PDK_F_INT: ok = ok && put(c, &f->i, sizeof f->i); break;
    }
    if (!ok)
        *c = before;
    return ok;
}

/* Fields that do not fit are left out. Returns the record's size. */
static size_t record_make(unsigned char *to, pdk_ns wall, pdk_log_level level, const char *event, const pdk_field *fields,
                          size_t n)
{
    record_head h = { .level = (uint8_t)level, .wall = wall };
    cursor c = { to + sizeof h, RECORD - sizeof h };
    put_str(&c, event == NULL ? "" : event);
    for (size_t i = 0; i < n && h.fields < 255; i++)
        if ((fields[i].type != PDK_F_STR || fields[i].str != NULL) && put_field(&c, &fields[i]))
            h.fields++;
    h.size = (uint32_t)(RECORD - c.left);
    memcpy(to, &h, sizeof h);
    return h.size;
}

static void ring_put(pdk_log *log, const void *data, size_t len) PDK_REQUIRES(log->lock)
{
    size_t at = log->head % RING, first = len < RING - at ? len : RING - at;
    memcpy(log->ring + at, data, first);
    memcpy(log->ring, (const unsigned char *)data + first, len - first);
    log->head += len;
}

static void ring_peek(const pdk_log *log, void *data, size_t len)
{
    size_t at = log->tail % RING, first = len < RING - at ? len : RING - at;
    memcpy(data, log->ring + at, first);
    memcpy((unsigned char *)data + first, log->ring, len - first);
}

/* ---- a line --------------------------------------------------------------------------------------------- */

typedef struct line {
    char text[LINE]; /* room for every character of a record escaped, so nothing here can overflow */
    size_t len;
} line;

static void add(line *l, const char *s, size_t len)
{
    if (len <= sizeof l->text - l->len) {
        memcpy(l->text + l->len, s, len);
        l->len += len;
    }
}
static void adds(line *l, const char *s)
{
    add(l, s, strlen(s));
}

static void add_quoted(line *l, const char *s, size_t len)
{
    add(l, "\"", 1);
    while (len > 0) {
        size_t used = pdk_json_plain(s, len);
        add(l, s, used);
        if (used == 0) {
            char out[PDK_JSON_CHAR];
            add(l, out, pdk_json_char(s, len, true, out, &used));
        }
        s += used;
        len -= used;
    }
    add(l, "\"", 1);
}

static void time_text(pdk_ns wall, char out[40])
{
    time_t s = (time_t)(wall / PDK_NS_PER_S);
    struct tm tm;
    if (wall < 0 || gmtime_r(&s, &tm) == NULL)
        tm = (struct tm){ .tm_year = 70, .tm_mday = 1 };
    snprintf(out, 40, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", (tm.tm_year + 1900) % 10000, tm.tm_mon + 1, tm.tm_mday,
             tm.tm_hour, tm.tm_min, tm.tm_sec, (int)(wall < 0 ? 0 : wall / 1000000 % 1000));
}

static void add_field(line *l, cursor *c)
{
    uint8_t type;
    size_t len;
    char number[PDK_JSON_NUMBER] = "null";
    get(c, &type, 1);
    const char *key = get_str(c, &len);
    add(l, ",", 1);
    add_quoted(l, key, len);
    add(l, ":", 1);
    if (type == PDK_F_STR) {
        const char *s = get_str(c, &len);
        add_quoted(l, s, len);
        return;
    }
    if (type == PDK_F_NUM) {
        double d;
        get(c, &d, sizeof d);
        if (!pdk_json_number(d, number))
            strcpy(number, "null");
    } else {
        int64_t i;
        get(c, &i, sizeof i);
        snprintf(number, sizeof number, "%lld", (long long)i);
    }
    adds(l, number);
}

static void line_make(line *l, const unsigned char *record, uint64_t dropped)
{
    record_head h;
    char text[64];
    size_t len;
    memcpy(&h, record, sizeof h);
    cursor c = { (unsigned char *)record + sizeof h, h.size - sizeof h };
    l->len = 0;
    time_text(h.wall, text);
    adds(l, "{\"ts\":\"");
    adds(l, text);
    adds(l, "\",\"level\":\"");
    adds(l, level_name(h.level));
    adds(l, "\",\"event\":");
    const char *event = get_str(&c, &len);
    add_quoted(l, event, len);
    for (int i = 0; i < h.fields; i++)
        add_field(l, &c);
    if (dropped > 0) {
        snprintf(text, sizeof text, ",\"dropped\":%llu", (unsigned long long)dropped);
        adds(l, text);
    }
    adds(l, "}\n");
}

/* ---- writing -------------------------------------------------------------------------------------------- */

/* Whether stderr takes bytes within `ms`; an error counts, as write then says which. */
static bool writable(int ms)
{
    struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };
    return poll(&p, 1, ms) > 0;
}

/* What a pipe that is not full takes without blocking; 0 = not now, -1 = never. */
static ssize_t write_piece(const char *text, size_t len)
{
    ssize_t n = write(STDERR_FILENO, text, len < 4096 ? len : 4096);
    return n < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : n;
}

/* On the writer thread, with no lock. false = stderr is gone or the log is ending. */
static bool write_patiently(pdk_log *log, const char *text, size_t len)
{
    while (len > 0) {
        bool over = pdk_now_monotonic() >= atomic_load(&log->give_up);
        if (!writable(over ? 0 : 50)) {
            if (over)
                return false;
            continue;
        }
        ssize_t n = write_piece(text, len);
        if (n < 0)
            return false;
        text += n;
        len -= (size_t)n;
    }
    return true;
}

/* On the caller's thread. false = it would have had to wait, or stderr is gone; a long line may be cut then. */
static bool write_at_once(const char *text, size_t len)
{
    size_t left = len;
    bool ok = true;
    pdk_quiet q;
    pdk_quiet_enter(&q);
    while (ok && left > 0) {
        ok = writable(left == len ? 0 : 5);
        ssize_t n = ok ? write_piece(text + (len - left), left) : -1;
        ok = n > 0;
        left -= ok ? (size_t)n : 0;
    }
    pdk_quiet_leave(&q);
    return ok;
}

/* Takes whole records out of the ring, up to BATCH bytes, and the count of the dropped. */
static size_t take_batch(pdk_log *log, unsigned char *batch, uint64_t *dropped) PDK_REQUIRES(log->lock)
{
    size_t len = 0;
    while (log->tail != log->head) {
        uint32_t size;
        ring_peek(log, &size, sizeof size);
        if (len + size > BATCH)
            break;
        ring_peek(log, batch + len, size);
        len += size;
        log->tail += size;
    }
    *dropped = log->dropped;
    log->dropped = 0;
    return len;
}

static void write_batch(pdk_log *log, line *l, const unsigned char *batch, size_t len, uint64_t dropped)
{
    for (size_t at = 0; at < len;) {
        uint32_t size;
        memcpy(&size, batch + at, sizeof size);
        line_make(l, batch + at, dropped);
        dropped = write_patiently(log, l->text, l->len) ? 0 : dropped + 1;
        at += size;
    }
    if (dropped > 0) {
        PDK_GUARD(log->lock);
        log->dropped += dropped;
    }
}

/* Waits until there is something to write; false = the log is ending and nothing is left. */
static bool wait_for_records(pdk_log *log) PDK_REQUIRES(log->lock)
{
    pdk_ns until = pdk_after(pdk_now_monotonic(), LINGER);
    while (log->head == log->tail && !log->ending)
        if (!log->asleep)
            log->asleep = !pdk_cond_wait_until(&log->wake, &log->lock, until);
        else
            pdk_cond_wait(&log->wake, &log->lock);
    log->asleep = false;
    return log->head != log->tail;
}

static void log_destroy(pdk_log *log)
{
    pdk_mutex_destroy(&log->lock);
    pdk_cond_destroy(&log->wake);
    pdk_cond_destroy(&log->ended);
    free(log->ring);
    free(log);
}

typedef struct workplace {
    line line;
    unsigned char batch[BATCH];
} workplace;

static void *writer(void *arg)
{
    pdk_log *log = arg;
    workplace *w = malloc(sizeof *w);
    bool more = w != NULL, abandoned = false;
    while (more) {
        uint64_t dropped = 0;
        size_t len = 0;
        {
            PDK_GUARD(log->lock);
            more = wait_for_records(log);
            if (more)
                len = take_batch(log, w->batch, &dropped);
        }
        write_batch(log, &w->line, w->batch, len, dropped);
        more = more && pdk_now_monotonic() < atomic_load(&log->give_up);
    }
    free(w);
    {
        PDK_GUARD(log->lock);
        log->finished = true;
        abandoned = log->abandoned;
        pdk_cond_signal(&log->ended);
    }
    if (abandoned)
        log_destroy(log);
    return NULL;
}

/* ---- the interface -------------------------------------------------------------------------------------- */

pdk_log *pdk_log_new(pdk_clock *clock, bool threads, pdk_log_level least, pdk_log_sink sink, void *ctx)
{
    pdk_log *log = calloc(1, sizeof *log);
    if (log == NULL)
        return NULL;
    log->clock = clock;
    log->least = least;
    log->sink = sink;
    log->sink_ctx = ctx;
    log->owner = pdk_process_id();
    atomic_init(&log->give_up, PDK_NEVER);
    pdk_mutex_init(&log->lock);
    pdk_cond_init(&log->wake);
    pdk_cond_init(&log->ended);
    if (threads && sink == NULL) {
        log->ring = malloc(RING);
        log->threads = log->ring != NULL && pdk_thread_start(&log->writer, "paddock-log", writer, log) == 0;
    }
    return log;
}

/* A writer that hangs inside write() keeps the log, and frees it if it ever comes back. */
static bool end_writer(pdk_log *log)
{
    pdk_ns until = pdk_after(pdk_now_monotonic(), PDK_NS_PER_S);
    atomic_store(&log->give_up, pdk_after(pdk_now_monotonic(), pdk_seconds(END_WITHIN)));
    PDK_GUARD(log->lock);
    log->ending = true;
    pdk_cond_signal(&log->wake);
    while (!log->finished)
        if (!pdk_cond_wait_until(&log->ended, &log->lock, until) && !log->finished) {
            log->abandoned = true;
            return false;
        }
    return true;
}

void pdk_log_free(pdk_log *log)
{
    if (log == NULL || log->owner != pdk_process_id())
        return;
    if (log->threads) {
        if (!end_writer(log))
            return;
        pdk_thread_join(&log->writer);
    }
    log_destroy(log);
}

static void to_sink(pdk_log *log, pdk_ns wall, pdk_log_level level, const char *event, const pdk_field *fields, size_t n)
{
    PDK_AUTO_PACK record = PDK_NO_PACK;
    char ts[40];
    time_text(wall, ts);
    pdk_mark m = pdk_begin_map(&record);
    pdk_kv_cstr(&record, &m, "ts", ts);
    pdk_kv_cstr(&record, &m, "level", level_name((int)level));
    pdk_kv_cstr(&record, &m, "event", event);
    for (size_t i = 0; i < n; i++) {
        const pdk_field *f = &fields[i];
        switch (f->type) {
        case PDK_F_STR: pdk_kv_cstr(&record, &m, f->key, f->str); break;
        case PDK_F_NUM: pdk_kv_num(&record, &m, f->key, f->num); break;
        case PDK_F_INT: pdk_kv_int(&record, &m, f->key, f->i); break;
        }
    }
    pdk_end(&record, &m);
    if (!record.failed)
        log->sink(log->sink_ctx, &record);
}

static void to_ring(pdk_log *log, const unsigned char *record, size_t size, bool urgent)
{
    PDK_GUARD(log->lock);
    if (log->ending || log->finished || RING - (log->head - log->tail) < size) {
        log->dropped++;
        return;
    }
    ring_put(log, record, size);
    if (log->asleep || urgent) {
        log->asleep = false;
        pdk_cond_signal(&log->wake);
    }
}

static void to_stderr(pdk_log *log, const unsigned char *record)
{
    line *l = malloc(sizeof *l);
    PDK_GUARD(log->lock);
    if (l != NULL)
        line_make(l, record, log->dropped);
    log->dropped = l != NULL && write_at_once(l->text, l->len) ? 0 : log->dropped + 1;
    free(l);
}

void pdk_log_write(pdk_log *log, pdk_log_level level, const char *event, const pdk_field *fields, size_t n)
{
    if (log == NULL || level < log->least)
        return;
    pdk_ns wall = log->clock == NULL ? pdk_now_wall() : pdk_clock_wall(log->clock);
    if (log->sink != NULL) {
        to_sink(log, wall, level, event, fields, n);
        return;
    }
    unsigned char record[RECORD];
    size_t size = record_make(record, wall, level, event, fields, n);
    if (log->threads)
        to_ring(log, record, size, level >= PDK_ERROR);
    else
        to_stderr(log, record);
}
