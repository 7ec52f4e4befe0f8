/* seccomp.c -- which system calls work in a sandbox.
 *
 * The list is what container engines allow a process without capabilities. Everything else answers EPERM, and a call that
 * is newer than libseccomp answers ENOSYS, so that a C library falls back instead of failing; nothing is killed, since a
 * library that tries a new call first would die at random. clone3 answers ENOSYS because its flags are out of a filter's
 * sight, and clone only works without namespace flags.
 *
 * Commands have the uid of the guest, which is pid 1 of their namespace and what ends them at their limits. So what a
 * process may do to another one of its uid is refused where that is pid 1: limits, priorities and processors. (Signals do
 * not reach it, memory and descriptors are closed to it: it is not dumpable.)
 *
 * The program is made once per process (1 ms) and copied for each sandbox.
 */
#include "fd.h"
#include "procio.h"
#include "sync.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <seccomp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>

static const char *const ALLOWED[] = {
    "accept", "accept4", "access", "alarm", "arch_prctl", "bind", "brk", "capget", "capset", "chdir", "chmod", "chown",
    "clock_getres", "clock_gettime", "clock_nanosleep", "close", "close_range", "connect", "copy_file_range", "creat", "dup",
    "dup2", "dup3", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_ctl_old", "epoll_pwait", "epoll_pwait2",
    "epoll_wait", "epoll_wait_old", "eventfd", "eventfd2", "execve", "execveat", "exit", "exit_group", "faccessat",
    "faccessat2", "fadvise64", "fallocate", "fanotify_mark", "fchdir", "fchmod", "fchmodat", "fchown", "fchownat", "fcntl",
    "fdatasync", "fgetxattr", "flistxattr", "flock", "fork", "fremovexattr", "fsetxattr", "fstat", "fstatfs", "fsync",
    "ftruncate", "futex", "futex_waitv", "futimesat", "getcpu", "getcwd", "getdents", "getdents64", "getegid", "geteuid",
    "getgid", "getgroups", "getitimer", "getpeername", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getrandom",
    "getresgid", "getresuid", "getrlimit", "get_robust_list", "getrusage", "getsid", "getsockname", "getsockopt",
    "get_thread_area", "gettid", "gettimeofday", "getuid", "getxattr", "inotify_add_watch", "inotify_init", "inotify_init1",
    "inotify_rm_watch", "io_cancel", "ioctl", "io_destroy", "io_getevents", "io_pgetevents", "ioprio_get", "ioprio_set",
    "io_setup", "io_submit", "kill", "landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lchown",
    "lgetxattr", "link", "linkat", "listen", "listxattr", "llistxattr", "lremovexattr", "lseek", "lsetxattr", "lstat",
    "madvise", "membarrier", "memfd_create", "memfd_secret", "mincore", "mkdir", "mkdirat", "mknod", "mknodat", "mlock",
    "mlock2", "mlockall", "mmap", "modify_ldt", "mprotect", "mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive",
    "mq_timedsend", "mq_unlink", "mremap", "msgctl", "msgget", "msgrcv", "msgsnd", "msync", "munlock", "munlockall", "munmap",
    "nanosleep", "newfstatat", "open", "openat", "openat2", "pause", "pidfd_open", "pidfd_send_signal", "pipe", "pipe2",
    "pkey_alloc", "pkey_free", "pkey_mprotect", "poll", "ppoll", "prctl", "pread64", "preadv", "preadv2",
    "process_mrelease", "process_vm_readv", "process_vm_writev", "pselect6", "ptrace", "pwrite64", "pwritev", "pwritev2",
    "read", "readahead", "readlink", "readlinkat", "readv", "recvfrom", "recvmmsg", "recvmsg", "remap_file_pages",
    "removexattr", "rename", "renameat", "renameat2", "restart_syscall", "rmdir", "rseq", "rt_sigaction", "rt_sigpending",
    "rt_sigprocmask", "rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo",
    "sched_getaffinity", "sched_getattr", "sched_getparam", "sched_get_priority_max", "sched_get_priority_min",
    "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity", "sched_setattr", "sched_setparam",
    "sched_setscheduler", "sched_yield", "seccomp", "select", "semctl", "semget", "semop", "semtimedop", "sendfile",
    "sendmmsg", "sendmsg", "sendto", "setfsgid", "setfsuid", "setgid", "setgroups", "setitimer", "setpgid", "setpriority",
    "setregid", "setresgid", "setresuid", "setreuid", "setrlimit", "set_robust_list", "setsid", "setsockopt",
    "set_thread_area", "set_tid_address", "setuid", "setxattr", "shmat", "shmctl", "shmdt", "shmget", "shutdown",
    "sigaltstack", "signalfd", "signalfd4", "socketpair", "splice", "stat", "statfs", "statx", "symlink", "symlinkat",
    "sync", "sync_file_range", "syncfs", "sysinfo", "tee", "tgkill", "time", "timer_create", "timer_delete",
    "timer_getoverrun", "timer_gettime", "timer_settime", "timerfd_create", "timerfd_gettime", "timerfd_settime", "times",
    "tkill", "truncate", "umask", "uname", "unlink", "unlinkat", "utime", "utimensat", "utimes", "vfork", "vmsplice",
    "wait4", "waitid", "write", "writev",
};

/* The values of personality() that change nothing but how addresses look or what uname says; the last one asks. */
static const unsigned PERSONALITIES[] = { 0x0, 0x8, 0x20000, 0x20008, 0xffffffff };

#define NAMESPACE_FLAGS                                                                                      \
    (CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET)

/* Calls that are refused when that argument, as the kernel reads it (32 bits), has that value. */
static const struct guard { const char *name; unsigned arg; uint32_t value; } GUARDS[] = {
    { "sched_setaffinity", 0, 1 },  { "sched_setattr", 0, 1 },    { "sched_setparam", 0, 1 },
    { "sched_setscheduler", 0, 1 }, { "setpriority", 1, 1 },      { "setpriority", 0, PRIO_USER },
    { "ioprio_set", 1, 1 },         { "ioprio_set", 0, 3 /* IOPRIO_WHO_USER */ },
};
#define GUARD_COUNT (sizeof GUARDS / sizeof GUARDS[0])

static pdk_mutex program_lock = { PTHREAD_MUTEX_INITIALIZER };
static struct sock_filter *program; /* made once; program_lock */
static size_t program_bytes;        /* likewise */

static int allow_some(scmp_filter_ctx ctx)
{
    for (size_t i = 0; i < sizeof ALLOWED / sizeof ALLOWED[0]; i++) {
        int nr = seccomp_syscall_resolve_name(ALLOWED[i]);
        int rc = nr < 0 ? 0 : seccomp_rule_add(ctx, SCMP_ACT_ALLOW, nr, 0); /* negative: not on this architecture */
        if (rc < 0) return rc;
    }
    for (size_t i = 0; i < sizeof PERSONALITIES / sizeof PERSONALITIES[0]; i++) {
        int rc = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(personality), 1, SCMP_A0(SCMP_CMP_EQ, PERSONALITIES[i], 0));
        if (rc < 0) return rc;
    }
    /* Limits of the caller, or a look at somebody's: no filter can tell which other numbers are the caller's own. */
    int rc = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(prlimit64), 1, SCMP_A0_32(SCMP_CMP_EQ, 0u, 0u));
    if (rc == 0) rc = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(prlimit64), 1, SCMP_A2(SCMP_CMP_EQ, 0, 0));
    if (rc == 0) rc = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, NAMESPACE_FLAGS, 0));
    if (rc == 0) rc = seccomp_rule_add(ctx, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
    /* Families that reach past a network namespace (vsock: the hypervisor) or deep into the kernel (the crypto API). */
    static const int families[][2] = { { 0, AF_ALG - 1 }, { AF_ALG + 1, AF_VSOCK - 1 } };
    for (size_t i = 0; rc == 0 && i < 2; i++)
        for (int f = families[i][0]; rc == 0 && f <= families[i][1]; f++)
            rc = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(socket), 1, SCMP_A0_32(SCMP_CMP_EQ, (uint32_t)f, 0));
    return rc;
}

static int newest_known(void)
{
    int newest = 0;
    for (int nr = 0; nr < 1024; nr++) {
        char *name = seccomp_syscall_resolve_num_arch(SCMP_ARCH_NATIVE, nr);
        if (name != NULL) newest = nr;
        free(name);
    }
    return newest;
}

static uint32_t native_audit_arch(void)
{
#if defined(__x86_64__)
    return AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
    return AUDIT_ARCH_AARCH64;
#elif defined(__riscv)
    return AUDIT_ARCH_RISCV64;
#else
    return seccomp_arch_native(); /* libseccomp's tokens are the kernel's for every other architecture */
#endif
}

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LOW_HALF 0
#else
#define LOW_HALF 4
#endif

#define HEAD_MAX (5 + 5 * GUARD_COUNT)

/* What comes before libseccomp's program: ENOSYS for calls nobody knows, and the guards. Returns its length. */
static size_t head_build(struct sock_filter head[HEAD_MAX])
{
    size_t n = 3;
    head[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, (uint32_t)newest_known(), 0, 1);
    head[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
    for (size_t i = 0; i < GUARD_COUNT; i++) {
        int nr = seccomp_syscall_resolve_name(GUARDS[i].name);
        if (nr < 0) continue; /* not on this architecture */
        uint32_t at = (uint32_t)(offsetof(struct seccomp_data, args) + GUARDS[i].arg * sizeof(uint64_t) + LOW_HALF);
        head[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)nr, 0, 4);
        head[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at);
        head[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, GUARDS[i].value, 0, 1);
        head[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
        head[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    }
    head[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
    head[1] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, native_audit_arch(), 0, (uint8_t)(n - 2));
    head[2] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    return n;
}
_Static_assert(HEAD_MAX < 256, "a jump of a filter goes 255 steps at most");

/* Writes libseccomp's program into a memfd and reads it behind the head. */
static int program_build(scmp_filter_ctx ctx, pdk_error *err)
{
    PDK_AUTO_FD fd = memfd_create("seccomp", MFD_CLOEXEC);
    int rc = fd < 0 ? -errno : seccomp_export_bpf(ctx, fd);
    if (rc < 0) return pdk_fail(err, PDK_E_IO_ERROR, -rc, "cannot make the seccomp filter");
    struct sock_filter head[HEAD_MAX];
    size_t head_bytes = head_build(head) * sizeof head[0];
    struct stat st;
    if (fstat(fd, &st) < 0) return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot read the seccomp filter");
    size_t bytes = head_bytes + (size_t)st.st_size;
    struct sock_filter *made = malloc(bytes);
    if (made == NULL) return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the seccomp filter");
    memcpy(made, head, head_bytes);
    if (pread(fd, (char *)made + head_bytes, (size_t)st.st_size, 0) != st.st_size) {
        free(made);
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot read the seccomp filter");
    }
    program = made;
    program_bytes = bytes;
    return 0;
}

static int program_make(pdk_error *err)
{
    scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    if (ctx == NULL) return pdk_fail(err, PDK_E_NO_MEMORY, 0, "no memory for the seccomp filter");
    /* A binary tree, a few comparisons per call; and another architecture's calls are refused, not killed. */
    int rc = seccomp_attr_set(ctx, SCMP_FLTATR_CTL_OPTIMIZE, 2);
    if (rc == 0) rc = seccomp_attr_set(ctx, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_ERRNO(EPERM));
    if (rc == 0) rc = allow_some(ctx);
    rc = rc < 0 ? pdk_fail(err, PDK_E_IO_ERROR, -rc, "cannot make the seccomp filter") : program_build(ctx, err);
    seccomp_release(ctx);
    return rc;
}

int pdk_seccomp_fd(pdk_error *err)
{
    PDK_GUARD(program_lock);
    if (program == NULL && program_make(err) < 0) return -1;
    PDK_AUTO_FD fd = memfd_create("seccomp", MFD_CLOEXEC);
    if (fd < 0 || pwrite(fd, program, program_bytes, 0) != (ssize_t)program_bytes)
        return pdk_fail(err, PDK_E_IO_ERROR, errno, "cannot copy the seccomp filter");
    return pdk_fd_take(&fd);
}
