/* trace.h -- a child process that dies at its n-th system call, and which calls it makes.
 *
 * Between two system calls nothing changes outside a process: so killing it before and after each one, in turn, is killing it at
 * every instruction, and it is enough to do so where the calls are that change something. */
#ifndef PDK_TEST_TRACE_H
#define PDK_TEST_TRACE_H

#include "test.h"

#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <linux/ptrace.h>

/* A child in which fn(arg) runs up to its raise(SIGSTOP): what is before it is not traced. -1 = tracing is not possible. */
__attribute__((unused)) static pid_t trace_start(void (*fn)(void *), void *arg)
{
    int status;
    if (test_valgrind())
        return -1;
    pid_t pid = fork();
    if (pid == 0) {
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
            _exit(77);
        fn(arg);
        _exit(0);
    }
    if (waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status))
        return -1;
    ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(PTRACE_O_EXITKILL | PTRACE_O_TRACESYSGOOD));
    return pid;
}

/* Calls that change nothing outside the process. An allocator or a sanitizer makes some whenever it likes: counted, they would make
 * the n-th stop another one each time. */
__attribute__((unused)) static bool trace_own(uint64_t nr)
{
    return nr == SYS_mmap || nr == SYS_munmap || nr == SYS_mprotect || nr == SYS_madvise || nr == SYS_mremap || nr == SYS_brk ||
           nr == SYS_futex || nr == SYS_sched_yield || nr == SYS_rt_sigprocmask || nr == SYS_rt_sigaction ||
           nr == SYS_clock_gettime || nr == SYS_getpid || nr == SYS_gettid || nr == SYS_prctl ||
           nr == SYS_nanosleep || nr == SYS_clock_nanosleep || nr == SYS_restart_syscall || nr == SYS_getrandom;
}

/* Goes on to the next stop (each system call is two: before and after). false = it has ended, well or not. */
__attribute__((unused)) static bool trace_step(pid_t pid, int *status)
{
    int sig = 0;
    do {
        if (ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(intptr_t)sig) < 0 || waitpid(pid, status, 0) != pid)
            return false;
        sig = WIFSTOPPED(*status) ? WSTOPSIG(*status) : 0; /* a signal for it is passed on */
    } while (WIFSTOPPED(*status) && sig != (SIGTRAP | 0x80));
    return WIFSTOPPED(*status);
}

/* trace_step, but only to a stop at a call that may change something outside. *nr: of the last call that was entered, kept here. */
__attribute__((unused)) static bool trace_on(pid_t pid, uint64_t *nr, int *status)
{
    do {
        struct ptrace_syscall_info info;
        if (!trace_step(pid, status))
            return false;
        if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, (void *)sizeof info, &info) > 0 && info.op == PTRACE_SYSCALL_INFO_ENTRY)
            *nr = info.entry.nr;
    } while (trace_own(*nr));
    return true;
}

/* Runs fn(arg) after its raise(SIGSTOP) to the n-th stop, and kills it there. 1 = it ended before that, 0 = killed, -1 = tracing
 * is not possible. */
__attribute__((unused)) static int kill_at(void (*fn)(void *), void *arg, int n)
{
    int status = 0;
    uint64_t nr = UINT64_MAX;
    pid_t pid = trace_start(fn, arg);
    if (pid < 0)
        return -1;
    for (; n > 0; n--)
        if (!trace_on(pid, &nr, &status))
            return CHECK_INT(status, 0) ? 1 : -1;
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    return 0;
}

/* The numbers of the system calls that fn(arg) makes after its raise(SIGSTOP); how many, or -1. */
__attribute__((unused)) static int trace_calls(void (*fn)(void *), void *arg, long *calls, int most)
{
    int status = 0, n = 0;
    pid_t pid = trace_start(fn, arg);
    if (pid < 0)
        return -1;
    while (trace_step(pid, &status)) {
        struct ptrace_syscall_info info;
        if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, (void *)sizeof info, &info) > 0 && info.op == PTRACE_SYSCALL_INFO_ENTRY &&
            n < most)
            calls[n++] = (long)info.entry.nr;
    }
    return CHECK_INT(status, 0) ? n : -1;
}

#endif
