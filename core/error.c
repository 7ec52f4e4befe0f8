/* error.c -- errors as values. An error owns its chain of causes; everything else in it is inline, so that making one
 * cannot fail for lack of memory (only a cause can be lost then, and its text is kept in the message). */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const kind_names[PDK_ERROR_KIND_COUNT] = {
    "ok",
#define X(C, lua) #lua,
    PDK_ERROR_KINDS(X)
#undef X
};

const char *pdk_error_kind_name(pdk_error_kind kind)
{
    return (unsigned)kind < PDK_ERROR_KIND_COUNT ? kind_names[kind] : "backend_error";
}

pdk_error_kind pdk_error_kind_of(const char *name)
{
    for (int k = 1; name != NULL && k < PDK_ERROR_KIND_COUNT; k++)
        if (strcmp(kind_names[k], name) == 0)
            return (pdk_error_kind)k;
    return PDK_OK;
}

void pdk_error_clear(pdk_error *err)
{
    if (err == NULL)
        return;
    for (pdk_error *c = err->cause, *next; c != NULL; c = next) {
        next = c->cause;
        free(c);
    }
    *err = PDK_NO_ERROR;
}

static void copy_text(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from == NULL ? "" : from);
}

static void message(pdk_error *err, int sys, const char *fmt, va_list args)
{
    int n = vsnprintf(err->message, sizeof err->message, fmt, args);
    err->sys = sys;
    if (sys != 0 && n >= 0 && (size_t)n < sizeof err->message) {
        char text[128];
        snprintf(err->message + n, sizeof err->message - (size_t)n, ": %s", strerror_r(sys, text, sizeof text));
    }
    for (char *p = err->message; *p != '\0'; p++) /* one line, whatever a script or an engine put in */
        if (*p == '\n' || *p == '\r')
            *p = ' ';
}

int pdk_fail(pdk_error *err, pdk_error_kind kind, int sys, const char *fmt, ...)
{
    if (err == NULL)
        return -1;
    pdk_error fresh = { .kind = kind };
    va_list args;
    va_start(args, fmt);
    message(&fresh, sys, fmt, args);
    va_end(args);
    pdk_error_clear(err);
    *err = fresh;
    return -1;
}

int pdk_fail_reason(pdk_error *err, pdk_error_kind kind, const char *reason, const char *fmt, ...)
{
    if (err == NULL)
        return -1;
    pdk_error fresh = { .kind = kind };
    va_list args;
    va_start(args, fmt);
    message(&fresh, 0, fmt, args);
    va_end(args);
    copy_text(fresh.reason, sizeof fresh.reason, reason);
    pdk_error_clear(err);
    *err = fresh;
    return -1;
}

static void become(pdk_error *err, pdk_error_kind kind, const char *reason, const char *fmt, va_list args)
{
    pdk_error fresh = { .kind = kind };
    message(&fresh, 0, fmt, args);
    copy_text(fresh.reason, sizeof fresh.reason, reason);
    copy_text(fresh.sandbox_id, sizeof fresh.sandbox_id, err->sandbox_id);
    copy_text(fresh.stage, sizeof fresh.stage, err->stage);
    fresh.attempt = err->attempt;
    fresh.sys = err->sys;
    size_t n = strlen(fresh.message);
    if (err->message[0] != '\0' && n + 3 < sizeof fresh.message) {
        fresh.message[n++] = ':';
        fresh.message[n++] = ' ';
        copy_text(fresh.message + n, sizeof fresh.message - n, err->message);
    }
    pdk_error *cause = malloc(sizeof *cause);
    if (cause != NULL) {
        *cause = *err;
        err->cause = NULL;
    }
    pdk_error_clear(err);
    *err = fresh;
    err->cause = cause;
}

int pdk_error_wrap(pdk_error *err, const char *fmt, ...)
{
    if (err == NULL)
        return -1;
    char reason[sizeof err->reason];
    memcpy(reason, err->reason, sizeof reason);
    va_list args;
    va_start(args, fmt);
    become(err, err->kind, reason, fmt, args);
    va_end(args);
    return -1;
}

int pdk_error_become(pdk_error *err, pdk_error_kind kind, const char *reason, const char *fmt, ...)
{
    if (err == NULL)
        return -1;
    va_list args;
    va_start(args, fmt);
    become(err, kind, reason, fmt, args);
    va_end(args);
    return -1;
}

void pdk_error_move(pdk_error *to, pdk_error *from)
{
    if (to == from)
        return;
    if (to == NULL) {
        pdk_error_clear(from);
        return;
    }
    pdk_error_clear(to);
    *to = *from;
    *from = PDK_NO_ERROR;
}

void pdk_error_copy(pdk_error *to, const pdk_error *from)
{
    if (to == NULL || to == from)
        return;
    pdk_error fresh = *from;
    pdk_error **at = &fresh.cause;
    for (const pdk_error *c = from->cause; c != NULL; c = c->cause, at = &(*at)->cause) {
        if ((*at = malloc(sizeof **at)) == NULL)
            break;
        **at = *c;
    }
    *at = NULL;
    pdk_error_clear(to);
    *to = fresh;
}

void pdk_error_set_id(pdk_error *err, const char *sandbox_id)
{
    if (err != NULL && err->kind != PDK_OK && err->sandbox_id[0] == '\0')
        copy_text(err->sandbox_id, sizeof err->sandbox_id, sandbox_id);
}

void pdk_error_set_stage(pdk_error *err, const char *stage)
{
    if (err != NULL && err->kind != PDK_OK && err->stage[0] == '\0')
        copy_text(err->stage, sizeof err->stage, stage);
}
