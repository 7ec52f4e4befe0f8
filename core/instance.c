/* instance.c -- the default instance of this process, and what makes it (CONTRACT, rows A6 to A13).
 *
 * One rule carries all of it: `lock` guards the pointer and what makes a new one, for moments; no implementation's code, no
 * constructor and no configuration is ever entered with it held. So those may call anything here, a slow one holds up nobody,
 * and what a getter sees is always a whole instance, with a reference of its own.
 *
 * A constructor that asks for the default instance gets what is installed, or has another one made; where it would go on like
 * that for ever, the innermost get is refused. */
#include "impl.h"
#include "open.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_NESTED = 8, MAX_USE = 100 };

typedef struct maker { /* what option `use` may name */
    struct maker *next;
    pdk_constructor make;
    void *arg;
    char name[];
} maker;

static pdk_mutex lock = { PTHREAD_MUTEX_INITIALIZER };
static pdk_impl *current;           /* lock; a reference */
static pdk_constructor constructor; /* lock */
static void *constructor_arg;       /* lock */
static maker *makers;               /* lock */
static _Atomic(pid_t) lock_of;      /* the process whose lock it is; 0 = nobody has looked yet */
static _Thread_local int nested;    /* constructions under way on this thread */

/* In a forked child the lock may be held by a thread that is not there, and the instance belongs to the parent. */
static void mine(void)
{
    pid_t pid = pdk_process_id(), seen = atomic_load(&lock_of);
    if (seen == pid)
        return;
    if (seen != 0) { /* a child has one thread to begin with */
        pdk_mutex_init(&lock);
        current = NULL;
        nested = 0;
    }
    atomic_store(&lock_of, pid);
}

PDK_API void pdk_set_constructor(pdk_constructor make, void *arg)
{
    mine();
    PDK_GUARD(lock);
    constructor = make;
    constructor_arg = arg;
}

PDK_API int pdk_add_constructor(const char *name, pdk_constructor make, void *arg, pdk_error *err)
{
    size_t len = name == NULL ? 0 : strnlen(name, MAX_USE + 1);
    if (make == NULL)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `make` is missing");
    if (len == 0 || len > MAX_USE || strcmp(name, "paddock") == 0)
        return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "argument `name` must have 1 to %d bytes, and not be paddock", MAX_USE);
    maker *fresh = malloc(sizeof *fresh + len + 1);
    if (fresh == NULL)
        return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for an implementation's name");
    memcpy(fresh->name, name, len + 1);
    fresh->make = make;
    fresh->arg = arg;
    mine();
    PDK_GUARD(lock);
    for (maker *m = makers; m != NULL; m = m->next)
        if (strcmp(m->name, name) == 0) {
            m->make = make;
            m->arg = arg;
            free(fresh);
            return 0;
        }
    fresh->next = makers;
    makers = fresh;
    return 0;
}

/* ---- making one ----------------------------------------------------------------------------------------- */

static int no_such_implementation(const char *use, pdk_error *err)
{
    return pdk_fail(err, PDK_E_INVALID_ARGUMENT, 0, "option `use`: there is no implementation %s; a host adds one with "
                    "pdk_add_constructor", use);
}

/* By the configuration: the implementation that its option `use` names, else a runtime that is opened on it. */
static pdk_impl *make_configured(const char *config_file, const void *args, pdk_error *err)
{
    char use[MAX_USE + 1] = "";
    pdk_constructor make = NULL;
    void *arg = NULL;
    if (config_file == NULL)
        config_file = getenv("PADDOCK_CONFIG");
    if (config_file != NULL && config_file[0] == '\0')
        config_file = NULL;
    if (config_file != NULL && pdk_config_use(config_file, use, sizeof use, err) < 0)
        return NULL;
    if (use[0] == '\0') {
        pdk_runtime *rt = pdk_open(config_file, err);
        pdk_impl *impl = rt == NULL ? NULL : pdk_impl_of(rt, err);
        if (impl == NULL)
            pdk_free(rt);
        return impl;
    }
    {
        PDK_GUARD(lock);
        for (maker *m = makers; m != NULL; m = m->next)
            if (strcmp(m->name, use) == 0) {
                make = m->make;
                arg = m->arg;
            }
    }
    if (make == NULL) {
        no_such_implementation(use, err);
        return NULL;
    }
    return make(arg, args, err);
}

static pdk_impl *make_one(const char *config_file, const void *args, pdk_error *err)
{
    pdk_constructor make;
    void *arg;
    pdk_error own = PDK_NO_ERROR;
    {
        PDK_GUARD(lock);
        make = constructor;
        arg = constructor_arg;
    }
    if (nested == MAX_NESTED) {
        pdk_fail(err, PDK_E_UNSUPPORTED, 0, "what makes the default instance asks for the default instance, again and again");
        return NULL;
    }
    nested++;
    pdk_impl *impl = make != NULL ? make(arg, args, &own) : make_configured(config_file, args, &own);
    nested--;
    if (impl == NULL) {
        if (own.kind == PDK_OK)
            pdk_fail(&own, PDK_E_BACKEND_ERROR, 0, "the constructor of the default instance made none and did not say why");
        pdk_error_move(err, &own);
        return NULL;
    }
    pdk_error_clear(&own);
    return impl;
}

/* ---- the instance --------------------------------------------------------------------------------------- */

PDK_API pdk_impl *pdk_default_peek(void)
{
    mine();
    PDK_GUARD(lock);
    return pdk_impl_ref(current);
}

PDK_API pdk_impl *pdk_default_with(const char *config_file, const void *args, pdk_error *err)
{
    pdk_impl *impl = pdk_default_peek();
    if (impl != NULL)
        return impl;
    pdk_impl *fresh = make_one(config_file, args, err);
    if (fresh == NULL)
        return NULL;
    {
        PDK_GUARD(lock);
        if (current == NULL)
            current = pdk_impl_ref(fresh);
        impl = pdk_impl_ref(current);
    }
    if (impl != fresh && pdk_impl_can_shutdown(fresh)) {
        PDK_AUTO_ERROR ignored = PDK_NO_ERROR; /* nobody has had it: there is nothing to keep, and nobody to tell */
        pdk_impl_shutdown(fresh, &ignored);
    }
    pdk_impl_unref(fresh);
    return impl;
}

PDK_API pdk_impl *pdk_default(pdk_error *err)
{
    return pdk_default_with(NULL, NULL, err);
}

/* Puts `impl` (a reference is taken) in the place of what is there, which is the caller's from here on. */
static pdk_impl *swap(pdk_impl *impl)
{
    mine();
    pdk_impl_ref(impl);
    PDK_GUARD(lock);
    pdk_impl *former = current;
    current = impl;
    return former;
}

PDK_API void pdk_set_default(pdk_impl *impl)
{
    pdk_impl *former = swap(impl);
    if (former != NULL && former != impl)
        pdk_impl_discard_holders(former);
    pdk_impl_unref(former);
}

PDK_API void pdk_reset_default(void)
{
    pdk_impl *former = swap(NULL);
    if (former == NULL)
        return;
    pdk_impl_discard_holders(former);
    pdk_impl_reset(former);
    pdk_impl_unref(former);
}

PDK_API int pdk_shutdown_default(pdk_error *err)
{
    pdk_impl *former = swap(NULL);
    if (former == NULL)
        return 0;
    pdk_impl_discard_holders(former);
    int rc = pdk_impl_shutdown(former, err);
    pdk_impl_unref(former);
    return rc;
}
