/* arena.c -- memory that is the same in every run: malloc from a fixed address, and a snapshot of all that the core and the
 * schedule can change, so that a schedule begins in microseconds and never sees what another one left behind.
 *
 * The whole program's malloc is here. What the C library or the driver allocates (in_core is false then) goes to the C library's
 * own; what runs on fibers gets from the arena. New memory is filled with a pattern, freed memory with another, so that a read of
 * either is the same in each run, and is likely to be noticed. */
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t m);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t a, size_t n);
extern void __libc_free(void *p);
extern char __data_start, _end;

bool in_core;

enum { CLASSES = 64, HEAD = 16 };
typedef struct block {
    uint32_t class, live;
    uint64_t size; /* asked for */
} block;
static char *top;
static void *free_lists[CLASSES];

/* Classes: 16, 32, 48, 64, then four per doubling. */
static unsigned class_of(size_t n)
{
    if (n <= 64)
        return n == 0 ? 0 : (unsigned)((n - 1) / 16);
    unsigned log = 63 - (unsigned)__builtin_clzll(n - 1);
    return 4 + (log - 6) * 4 + (unsigned)(((n - 1) >> (log - 2)) & 3);
}
static size_t size_of(unsigned class)
{
    if (class < 4)
        return 16 * (class + 1);
    unsigned log = 6 + (class - 4) / 4;
    return ((size_t)1 << log) + ((size_t)((class - 4) % 4 + 1) << (log - 2));
}

static bool ours(const void *p)
{
    return (const char *)p >= ARENA_BASE && (const char *)p < ARENA_BASE + ARENA_SIZE;
}

static void *take(size_t n)
{
    unsigned c = class_of(n);
    size_t room = size_of(c);
    block *b = free_lists[c];
    if (b != NULL) {
        free_lists[c] = *(void **)(b + 1);
    } else {
        if (top + HEAD + room > ARENA_BASE + ARENA_SIZE)
            violation("the arena is full: something allocates without end");
        b = (block *)top;
        top += HEAD + room;
    }
    *b = (block){ c, 0x5349u, n };
    return b + 1;
}

void *malloc(size_t n)
{
    if (!in_core)
        return __libc_malloc(n);
    void *p = take(n);
    memset(p, 0xa5, n);
    return p;
}

void free(void *p)
{
    if (!ours(p)) {
        __libc_free(p);
        return;
    }
    block *b = (block *)p - 1;
    if (b->live != 0x5349u)
        violation("free of %p, which is not allocated", p);
    b->live = 0;
    memset(p, 0xdd, b->size);
    *(void **)p = free_lists[b->class];
    free_lists[b->class] = b;
}

void *calloc(size_t n, size_t m)
{
    if (!in_core)
        return __libc_calloc(n, m);
    if (m != 0 && n > ARENA_SIZE / m)
        return NULL;
    void *p = take(n * m);
    return memset(p, 0, n * m);
}

void *realloc(void *p, size_t n)
{
    if (p == NULL)
        return malloc(n);
    if (!ours(p))
        return __libc_realloc(p, n);
    if (n == 0) {
        free(p);
        return NULL;
    }
    block *b = (block *)p - 1;
    if (b->live != 0x5349u)
        violation("realloc of %p, which is not allocated", p);
    if (class_of(n) == b->class) {
        if (n > b->size)
            memset((char *)p + b->size, 0xa5, n - b->size);
        b->size = n;
        return p;
    }
    bool outer = in_core;
    in_core = true;
    void *q = malloc(n);
    memcpy(q, p, b->size < n ? b->size : n);
    free(p);
    in_core = outer;
    return q;
}

void *memalign(size_t a, size_t n)
{
    return in_core && a <= 16 ? malloc(n) : __libc_memalign(a, n);
}
void *aligned_alloc(size_t a, size_t n)
{
    return memalign(a, n);
}
int posix_memalign(void **p, size_t a, size_t n)
{
    *p = memalign(a, n);
    return *p == NULL ? ENOMEM : 0;
}

/* ---- the snapshot ---- */

static struct {
    char *memory, *data;
    size_t memory_len, data_len;
} * kept; /* outside of what is restored */

static void *map_at(char *at, size_t n)
{
    void *p = mmap(at, n, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at != NULL ? MAP_FIXED_NOREPLACE : 0), -1, 0);
    if (p == MAP_FAILED || (at != NULL && p != at)) {
        fprintf(stderr, "sim: cannot have memory at %p (%s)\n", (void *)at, strerror(errno));
        exit(2);
    }
    return p;
}

void arena_map(void)
{
    map_at(ARENA_BASE, ARENA_SIZE);
    map_at(STACKS_BASE, STACK_BYTES * MAX_FIBERS);
    top = ARENA_BASE;
}

void snapshot_take(void)
{
    kept = map_at(NULL, sizeof *kept);
    kept->memory_len = (size_t)(top - ARENA_BASE);
    kept->data_len = (size_t)(&_end - &__data_start);
    kept->memory = map_at(NULL, kept->memory_len);
    kept->data = map_at(NULL, kept->data_len);
    memcpy(kept->memory, ARENA_BASE, kept->memory_len);
    memcpy(kept->data, &__data_start, kept->data_len);
}

void snapshot_restore(void)
{
    memcpy(ARENA_BASE, kept->memory, kept->memory_len);
    memcpy(&__data_start, kept->data, kept->data_len);
}
