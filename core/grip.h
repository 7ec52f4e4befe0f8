/* grip.h -- what the Lua binding holds of a runtime, and how it is let go.
 *
 * A grip is shared by the runtime's userdata, each of its boxes and each call in flight; the runtime is freed with the
 * last of them. Finalizers only queue: what may block is done by a thread of its own (threads = true), else by the next
 * blocking call on that runtime, or when its Lua state closes.
 */
#ifndef PDK_GRIP_H
#define PDK_GRIP_H

#include "call.h"
#include "events.h"
#include "runtime.h"
#include <sys/types.h>

typedef struct pdk_keeper pdk_keeper; /* one per Lua state: what its finalizers have queued */
typedef struct pdk_grip pdk_grip;

typedef struct pdk_lbox { /* one box in Lua; its userdata points here */
    pdk_grip *grip;
    pdk_box *box;          /* NULL until it was acquired */
    bool released;         /* nothing is left to do but freeing memory */
    struct pdk_lbox *next; /* grip's lock, once it is queued */
} pdk_lbox;

struct pdk_grip {
    pdk_runtime *rt;       /* NULL until opened; then fixed */
    pdk_script *script;    /* fixed; a reference */
    pdk_host *host;        /* fixed; a reference; NULL in the universe */
    pdk_events *events;    /* fixed; owned */
    pdk_keeper *keeper;    /* fixed; a reference */
    bool threads;          /* fixed once opened */
    bool listening;        /* Lua of its state only: pdk_runtime_on was called */
    uint64_t told_dropped; /* Lua of its state only */
    pid_t pid;             /* fixed */
    int fd;                /* Lua of its state only: of rt:fd() when it is an epoll of its own; else -1 */
    atomic_int refs;
    atomic_bool delivering;
    atomic_ullong failed_functions; /* event and log functions that raised */
    pdk_mutex lock;
    pdk_lbox *garbage;     /* lock; boxes whose userdata is gone */
    bool reaping;          /* lock; a thread is at work on the garbage */
    bool unwanted;         /* lock; the last reference is gone */
    pdk_grip *next;        /* keeper's lock */
};

/* The keeper of L's state.  Raises on lack of memory */
pdk_keeper *pdk_keeper_of(lua_State *L);
/* Frees the runtimes that finalizers queued for this state. May wait. */
void pdk_keeper_drain(pdk_keeper *k);

pdk_grip *pdk_grip_new(pdk_keeper *k); /* NULL = no memory */
pdk_grip *pdk_grip_ref(pdk_grip *g);
/* Gives a reference back. The last one queues the freeing; `here` = free it now, on this thread, which may wait. */
void pdk_grip_unref(pdk_grip *g, bool here);
/* A descriptor that is readable while rt:dispatch() has something to do; -1 and err. It stays the grip's. */
int pdk_grip_fd(pdk_grip *g, pdk_error *err);
/* Frees the boxes whose userdata are gone. May wait. */
void pdk_grip_sweep(pdk_grip *g);
/* For a finalizer: queues the box, or frees it where nothing can wait. Gives its reference to the grip back. */
void pdk_lbox_forget(pdk_lbox *b);
/* Whether this process is a forked child of the one that opened it: then nothing of it may be touched. */
bool pdk_grip_forked(const pdk_grip *g);

#endif
