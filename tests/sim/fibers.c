/* fibers.c -- core/sync.h on fibers: one runs at a time, and the seed says which one goes on at each point where threads could
 * change places. Time is virtual: it passes while everybody waits, and in pauses that the seed chooses.
 *
 * A mutex here is its owner's address in the first bytes of the real one; what waits for it is found by looking at the fibers. */
#include "sim.h"

#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

fiber fibers[MAX_FIBERS];
fiber *me;
pdk_ns now;
static int fiber_count; /* slots that were ever used */
static bool *stop_flag;
static uint64_t state[2], core_state[2]; /* of the scheduler's random numbers; of those that the core asks for */

/* ---- random numbers: xorshift128+ ---- */

static uint64_t next_of(uint64_t s[2])
{
    uint64_t a = s[0], b = s[1];
    s[0] = b;
    a ^= a << 23;
    s[1] = a ^ b ^ (a >> 18) ^ (b >> 5);
    return s[1] + b;
}
uint64_t rnd(void)
{
    return next_of(state);
}
uint32_t below(uint32_t n)
{
    return n <= 1 ? 0 : (uint32_t)((rnd() >> 32) * n >> 32);
}
bool chance(uint32_t num, uint32_t den)
{
    return below(den) < num;
}
static uint64_t mix(uint64_t *x)
{
    uint64_t z = (*x += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
void seed_random(uint64_t seed)
{
    for (int i = 0; i < 2; i++)
        state[i] = mix(&seed);
    for (int i = 0; i < 2; i++)
        core_state[i] = mix(&seed);
}

/* ---- switching ---- */

/* The program's own thread-local variables: each fiber has them to itself. */
static char *tls_at;
static size_t tls_len;
static unsigned char tls_fresh[sizeof fibers[0].tls];

static int find_tls(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    (void)arg;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS) {
            tls_at = info->dlpi_tls_data;
            tls_len = info->dlpi_phdr[i].p_memsz;
        }
    return 1; /* the first one is the program */
}

#ifdef __x86_64__
void sim_switch(void **from, void *to);
__asm__(".text\n.globl sim_switch\n.type sim_switch,@function\nsim_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void *driver_sp;
#else
static ucontext_t driver_context, contexts[MAX_FIBERS];
#endif

static char *stack_of(const fiber *f)
{
    return STACKS_BASE + STACK_BYTES * (size_t)f->id;
}

static void leave(void) /* to the driver */
{
#ifdef __x86_64__
    sim_switch(&me->sp, driver_sp);
#else
    swapcontext(&contexts[me->id], &driver_context);
#endif
}

static void body(void)
{
    fiber *f = me;
    f->fn(f->arg);
    if (f->held_count > 0)
        violation("%s ended with a mutex locked", f->name);
    f->state = f->detached ? F_FREE : F_DONE; /* nobody looks after a detached one */
    for (;;)
        leave();
}

static void prepare(fiber *f)
{
    memcpy(f->tls, tls_fresh, tls_len);
    f->started = true;
#ifdef __x86_64__
    uint64_t *sp = (uint64_t *)(stack_of(f) + STACK_BYTES - 64);
    *--sp = 0; /* where body() would return to, and what keeps the stack aligned */
    *--sp = (uint64_t)(uintptr_t)body;
    for (int i = 0; i < 6; i++)
        *--sp = 0;
    f->sp = sp;
#else
    ucontext_t *c = &contexts[f->id];
    getcontext(c);
    c->uc_stack.ss_sp = stack_of(f);
    c->uc_stack.ss_size = STACK_BYTES;
    c->uc_link = NULL;
    makecontext(c, body, 0);
#endif
}

static void enter(fiber *f)
{
    if (!f->started)
        prepare(f);
    memcpy(tls_at, f->tls, tls_len);
    me = f;
    in_core = true;
#ifdef __x86_64__
    sim_switch(&driver_sp, f->sp);
#else
    swapcontext(&driver_context, &contexts[f->id]);
#endif
    in_core = false;
    memcpy(f->tls, tls_at, tls_len);
    me = NULL;
    Z->switches++;
}

void fibers_init(void)
{
    dl_iterate_phdr(find_tls, NULL);
    if (tls_len > sizeof tls_fresh) {
        fprintf(stderr, "sim: %zu bytes of thread-local variables, room for %zu: enlarge fiber.tls\n", tls_len,
                sizeof tls_fresh);
        exit(2);
    }
    memcpy(tls_fresh, tls_at, tls_len);
}

fiber *fiber_start(inst *in, const char *name, void *(*fn)(void *), void *arg)
{
    int i = 0;
    while (i < fiber_count && fibers[i].state != F_FREE)
        i++;
    if (i == MAX_FIBERS)
        violation("more than %d threads", MAX_FIBERS);
    if (i == fiber_count)
        fiber_count++;
    fiber *f = &fibers[i];
    *f = (fiber){ .state = F_READY, .id = i, .in = in, .fn = fn, .arg = arg, .created = -1, .priority = (uint32_t)rnd() };
    snprintf(f->name, sizeof f->name, "%s", name);
    return f;
}

void fibers_drop(const inst *in)
{
    for (int i = 0; i < fiber_count; i++)
        if (fibers[i].in == in && fibers[i].state != F_FREE)
            fibers[i].state = F_DONE;
    if (me != NULL && me->in == in)
        for (;;)
            leave();
}

/* ---- the scheduler ---- */

static fiber *owner_of(const pdk_mutex *m)
{
    return *(fiber *const *)m;
}

pdk_ns mono_of(const inst *in)
{
    return now + (in == NULL ? 0 : in->mono_off);
}

static bool gone(const fiber *f)
{
    return f->state == F_FREE || f->state == F_DONE || (f->in != NULL && (!f->in->active || f->in->dead));
}

/* When it could go on by the clock alone; PDK_NEVER = not by the clock. */
static pdk_ns wakes(const fiber *f)
{
    pdk_ns at = PDK_NEVER;
    if (f->state == F_SLEEP)
        at = f->wake;
    else if (f->state == F_COND && f->deadline != PDK_NEVER)
        at = f->deadline - (f->in == NULL ? 0 : f->in->mono_off);
    else if (f->state != F_COND && f->state != F_JOIN && f->in != NULL && f->in->paused_until > now)
        at = f->in->paused_until;
    if (at != PDK_NEVER && f->in != NULL && f->in->paused_until > at)
        at = f->in->paused_until;
    return at;
}

static bool runnable(fiber *f)
{
    if (gone(f) || (f->in != NULL && f->in->paused_until > now))
        return false;
    switch (f->state) {
    case F_READY: return true;
    case F_LOCK: return owner_of(f->mutex) == NULL;
    case F_SLEEP: return f->wake <= now;
    case F_JOIN: return f->target->state == F_DONE;
    case F_COND:
        if (f->signalled)
            return owner_of(f->mutex) == NULL;
        if (f->deadline != PDK_NEVER && mono_of(f->in) >= f->deadline) {
            f->timed_out = true;
            return owner_of(f->mutex) == NULL;
        }
        f->timed_out = false;
        return P.spurious && owner_of(f->mutex) == NULL && (P.switch_mode == 4 ? chance(1, 400) : chance(1, 60));
    default: return false;
    }
}

static fiber *choose(void)
{
    fiber *can[MAX_FIBERS];
    uint32_t n = 0;
    for (int i = 0; i < fiber_count; i++)
        if (runnable(&fibers[i]))
            can[n++] = &fibers[i];
    if (n <= 1)
        return n == 0 ? NULL : can[0];
    if (P.switch_mode != 4)
        return can[below(n)];
    fiber *best = can[0];
    for (uint32_t i = 1; i < n; i++)
        if (can[i]->priority > best->priority)
            best = can[i];
    return best;
}

static void let_time_pass(void)
{
    pdk_ns at = late_next();
    for (int i = 0; i < fiber_count; i++)
        if (!gone(&fibers[i]) && wakes(&fibers[i]) < at)
            at = wakes(&fibers[i]);
    if (at == PDK_NEVER)
        violation("deadlock: everybody waits for somebody");
    if (at > now)
        now = at;
    else
        now += 1000; /* what waits for a mutex whose owner sleeps */
}

void fibers_run(bool *until)
{
    stop_flag = until;
    while (!*until) {
        late_run();
        fiber *f = choose();
        if (f == NULL)
            let_time_pass();
        else
            enter(f);
    }
}

/* How a point is passed: in one of five styles, so that both fine and coarse interleavings come up. */
static bool stays(void)
{
    static const uint32_t switch_one_in[] = { 1, 2, 5, 20 };
    if (P.switch_mode < 4)
        return !chance(1, switch_one_in[P.switch_mode]);
    if (chance(1, 150)) /* priorities: now and then the running one becomes the last */
        me->priority = (uint32_t)rnd() >> 8;
    return false;
}

static void trouble(void)
{
    if (P.healed || me->in == NULL)
        return;
    static const int tenths[] = { 4, 9, 11, 13, 25, 40 }; /* of the TTL */
    if (P.pause_rate != 0 && chance(1, P.pause_rate)) {
        pdk_ns d = (pdk_ns)tenths[below(6)] * TTL * SEC / 10;
        bool suspended = chance(1, 4); /* the machine sleeps: its monotonic clock stands still */
        me->in->paused_until = now + d;
        me->in->suspended = suspended;
        if (suspended)
            me->in->mono_off -= d;
        TRACE("%s is %s for %.1f s", me->in->name, suspended ? "suspended with its machine" : "stopped", (double)d / 1e9);
    } else if (P.stall_rate != 0 && chance(1, P.stall_rate)) {
        pdk_ns d = (pdk_ns)tenths[below(6)] * TTL * SEC / 10;
        TRACE("this thread stalls for %.1f s", (double)d / 1e9);
        me->state = F_SLEEP;
        me->wake = now + d;
        leave();
        me->state = F_READY;
    }
}

void point(void)
{
    if (me == NULL || P.insts == 0) /* while the runtimes are opened nobody else runs */
        return;
    now += 1000;
    if (++Z->steps > 400000)
        violation("the schedule does not end");
    check_step();
    trouble();
    if (me->act != NULL)
        act_point();
    if ((me->in == NULL || me->in->paused_until <= now) && stays())
        return;
    leave();
}

void wait_for(pdk_ns duration)
{
    me->wake = now + duration;
    me->state = F_SLEEP;
    leave();
    me->state = F_READY;
}

/* ---- sync.h ---- */

void pdk_mutex_init(pdk_mutex *m)
{
    memset(m, 0, sizeof *m);
}
void pdk_mutex_destroy(pdk_mutex *m)
{
    if (owner_of(m) != NULL)
        violation("a locked mutex is destroyed");
}

static void get(pdk_mutex *m)
{
    *(fiber **)m = me;
    if (me->held_count == 8)
        violation("%s holds more than 8 mutexes", me->name);
    me->held[me->held_count++] = m;
}

void pdk_lock(pdk_mutex *m)
{
    if (me == NULL)
        return;
    if (owner_of(m) == me)
        violation("%s locks a mutex that it holds already", me->name);
    if (me->held_count == 0)
        point();
    while (owner_of(m) != NULL) {
        me->state = F_LOCK;
        me->mutex = m;
        leave();
        me->state = F_READY;
    }
    get(m);
}

static void let_go(pdk_mutex *m)
{
    if (owner_of(m) != me)
        violation("%s unlocks a mutex that it does not hold", me->name);
    *(fiber **)m = NULL;
    for (int i = 0; i < me->held_count; i++)
        if (me->held[i] == m) {
            me->held[i] = me->held[--me->held_count];
            break;
        }
}

void pdk_unlock(pdk_mutex *m)
{
    if (me == NULL)
        return;
    let_go(m);
    if (me->held_count == 0)
        point();
}

void pdk_cond_init(pdk_cond *c)
{
    memset(c, 0, sizeof *c);
}
void pdk_cond_destroy(pdk_cond *c)
{
    for (int i = 0; i < fiber_count; i++)
        if (fibers[i].state == F_COND && fibers[i].cond == c && !gone(&fibers[i]))
            violation("a condition is destroyed while %s waits on it", fibers[i].name);
}

bool pdk_cond_wait_until(pdk_cond *c, pdk_mutex *m, pdk_ns deadline)
{
    let_go(m);
    if (me->held_count > 0)
        violation("%s waits on a condition with another mutex locked", me->name);
    me->cond = c;
    me->mutex = m;
    me->deadline = deadline;
    me->signalled = me->timed_out = false;
    me->state = F_COND;
    leave();
    me->state = F_READY;
    me->cond = NULL;
    get(m);
    return !me->timed_out || me->signalled;
}
void pdk_cond_wait(pdk_cond *c, pdk_mutex *m)
{
    pdk_cond_wait_until(c, m, PDK_NEVER);
}

static void wake_up(pdk_cond *c, bool all)
{
    fiber *waiting[MAX_FIBERS];
    uint32_t n = 0;
    for (int i = 0; i < fiber_count; i++)
        if (fibers[i].state == F_COND && fibers[i].cond == c && !fibers[i].signalled)
            waiting[n++] = &fibers[i];
    if (!all && n > 0)
        waiting[below(n)]->signalled = true;
    for (uint32_t i = 0; all && i < n; i++)
        waiting[i]->signalled = true;
}
void pdk_cond_signal(pdk_cond *c)
{
    wake_up(c, false);
}
void pdk_cond_broadcast(pdk_cond *c)
{
    wake_up(c, true);
}

static fiber **handle(pdk_thread *t)
{
    return (fiber **)(void *)&t->t;
}
int pdk_thread_start(pdk_thread *t, const char *name, void *(*fn)(void *), void *arg)
{
    *handle(t) = fiber_start(me->in, name, fn, arg);
    return 0;
}
int pdk_thread_start_detached(const char *name, void *(*fn)(void *), void *arg)
{
    fiber_start(me->in, name, fn, arg)->detached = true;
    return 0;
}
void pdk_thread_detach(pdk_thread *t)
{
    (*handle(t))->detached = true;
}
void pdk_thread_join(pdk_thread *t)
{
    me->target = *handle(t);
    if (me->held_count > 0)
        violation("%s waits for the end of %s with a mutex locked", me->name, me->target->name);
    me->state = F_JOIN;
    leave();
    me->state = F_READY;
    me->target->state = F_FREE;
}
uint64_t pdk_thread_self(void)
{
    return me == NULL ? 1 : (uint64_t)me->id + 2;
}
size_t pdk_stack_left(void)
{
    uintptr_t at = (uintptr_t)__builtin_frame_address(0), low = (uintptr_t)stack_of(me);
    return at > low ? at - low : 0;
}

/* An instance's clocks start at different hours, so that one that is read for another shows. */
pdk_ns pdk_now_monotonic(void)
{
    return mono_of(me == NULL ? NULL : me->in);
}
pdk_ns pdk_now_boottime(void)
{
    return now + (me == NULL || me->in == NULL ? 0 : me->in->boot_off);
}
pdk_ns pdk_now_wall(void)
{
    return now + (me == NULL || me->in == NULL ? 0 : me->in->wall_off) + INT64_C(1700000000) * SEC;
}
pdk_ns pdk_now_cpu(void)
{
    return 0; /* no policy here overruns by accident */
}
void pdk_sleep_ns(pdk_ns duration)
{
    if (me->held_count > 0)
        violation("%s sleeps with a mutex locked", me->name);
    wait_for(duration);
}
void pdk_random(void *buf, size_t len)
{
    unsigned char *p = buf;
    for (size_t i = 0; i < len; i++)
        p[i] = (unsigned char)next_of(core_state);
}
