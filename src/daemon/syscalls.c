/* SPDX-License-Identifier: MIT */
/*
 * A filter of system calls, by libseccomp: what is not on the list fails.
 *
 * The kernel raises SIGSYS for it, whose handler says which call it was and lets the call fail with EPERM. So a library's harmless attempt does not take a
 * guest's disk away, and somebody's is seen. The filter does not see what is submitted to io_uring; what the ring takes is restricted by src/rt/ring.c.
 */
#include "daemon/syscalls.h"

#include "util/log.h"

#ifdef HAVE_SECCOMP

#include <errno.h>
#include <linux/audit.h>
#include <netinet/in.h>
#include <sched.h>
#include <seccomp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <ucontext.h>
#include <unistd.h>

#include "util/bytes.h"
#include "util/err.h"

static const char *const allowed[] = {
	/* files that are open, and what Landlock lets be opened */
	"read", "write", "readv", "writev", "pread64", "pwrite64", "preadv", "pwritev", "preadv2", "pwritev2", "lseek", "_llseek", "close", "fsync", "fdatasync",
	"sync_file_range", "fallocate", "ftruncate", "ftruncate64", "fadvise64", "fadvise64_64", "fstat", "fstat64", "newfstatat", "fstatat64", "statx", "stat",
	"lstat", "stat64", "lstat64", "fstatfs", "fstatfs64", "statfs", "statfs64", "access", "faccessat", "faccessat2", "readlink", "readlinkat", "getdents",
	"getdents64", "open", "openat", "unlink", "unlinkat", "fcntl", "fcntl64", "flock", "ioctl", "fgetxattr", "fsetxattr", "fremovexattr", "dup", "dup2", "dup3",
	"pipe2", "io_setup", "io_submit", "io_getevents", "io_pgetevents", "io_cancel", "io_destroy", "io_uring_enter", "io_uring_register", "getcwd",
	/* memory */
	"mmap", "mmap2", "munmap", "mremap", "mprotect", "madvise", "brk", "mlock", "munlock", "mincore", "memfd_create",
	/* threads, time, signals; the process itself */
	"futex", "futex_time64", "set_robust_list", "get_robust_list", "rseq", "membarrier", "set_tid_address", "sched_yield", "sched_getaffinity",
	"sched_getparam", "sched_getscheduler", "exit", "exit_group", "gettid", "getpid", "getppid", "tgkill", "restart_syscall", "nanosleep", "clock_nanosleep",
	"clock_nanosleep_time64", "clock_gettime", "clock_gettime64", "clock_getres", "gettimeofday", "time", "setitimer", "getitimer", "rt_sigaction",
	"rt_sigprocmask", "rt_sigreturn", "rt_sigpending", "sigaltstack", "prctl", "getrandom", "getuid", "geteuid", "getgid", "getegid", "getgroups", "getrusage",
	"sysinfo", "uname", "times", "getrlimit", "prlimit64", "getcpu",
	/* sockets, but none that listens anew */
	"connect", "bind", "accept", "accept4", "sendto", "sendmsg", "sendmmsg", "recvfrom", "recvmsg", "recvmmsg", "shutdown", "getsockopt", "setsockopt",
	"getsockname", "getpeername", "socketpair", "poll", "ppoll", "ppoll_time64", "select", "pselect6", "epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait",
	"epoll_pwait2", "eventfd2", "timerfd_create", "timerfd_settime", "timerfd_gettime",
};

/*
 * What lets a process start a program, look into another one, or change the machine: no library that talks to a cluster needs it. (Keys may be asked for by who gets his
 * credentials from Kerberos.) Refused by an error and not by a signal: a library's threads block SIGSYS, which would then end the process.
 */
static const char *const forbidden_to_all[] = {
	"execve", "execveat", "fork", "vfork", "ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp", "mount", "umount", "umount2", "move_mount",
	"open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr", "pivot_root", "chroot", "setns", "unshare", "swapon", "swapoff", "reboot", "kexec_load",
	"kexec_file_load", "init_module", "finit_module", "delete_module", "bpf", "perf_event_open", "userfaultfd", "acct",
	"quotactl", "quotactl_fd", "settimeofday", "clock_settime", "clock_settime64", "stime", "adjtimex", "clock_adjtime", "clock_adjtime64", "sethostname",
	"setdomainname", "syslog", "vhangup", "iopl", "ioperm", "modify_ldt", "io_uring_setup", "open_by_handle_at", "mknod", "mknodat", "personality",
};

#define NUMBERS 1024

/* SIGSYS: async-signal-safe. */
static void forbidden(int sig, siginfo_t *info, void *context)
{
	static volatile uint8_t told[NUMBERS];
	unsigned n = (unsigned)info->si_syscall % NUMBERS, len = 0;
	char text[96] = "weir: sandbox: system call ", digits[12];
	ucontext_t *uc = context;

	if (!told[n]) {
		told[n] = 1;
		len = strlen(text);
		unsigned value = (unsigned)info->si_syscall, k = 0;

		do
			digits[k++] = (char)('0' + value % 10);
		while (value /= 10);
		while (k)
			text[len++] = digits[--k];
		memcpy(text + len, " is refused\n", 12);
		(void)!write(STDERR_FILENO, text, len + 12);
	}
#if defined(__x86_64__)
	uc->uc_mcontext.gregs[REG_RAX] = -EPERM;
#elif defined(__aarch64__)
	uc->uc_mcontext.regs[0] = (unsigned long long)-EPERM;
#endif
}

static int add(scmp_filter_ctx f, const char *name, uint32_t action)
{
	int number = seccomp_syscall_resolve_name(name), ret;

	if (number == __NR_SCMP_ERROR)
		return 0;	/* newer than this libseccomp, or of another architecture */
	ret = seccomp_rule_add(f, action, number, 0);
	return ret == -EDOM || ret == -EACCES ? 0 : ret;	/* pseudo numbers; the default already */
}

static int fill(scmp_filter_ctx f)
{
	static const int families[] = { AF_UNIX, AF_INET, AF_INET6, AF_NETLINK };
	int ret = seccomp_attr_set(f, SCMP_FLTATR_CTL_TSYNC, 1);

	for (size_t i = 0; i < ARRAY_SIZE(allowed) && !ret; i++)
		ret = add(f, allowed[i], SCMP_ACT_ALLOW);
	for (size_t i = 0; i < ARRAY_SIZE(families) && !ret; i++)
		ret = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(socket), 1, SCMP_A0(SCMP_CMP_EQ, families[i]));
	/* Threads, but no processes; the arguments of clone3 cannot be looked at, and without it the C library takes clone. */
	if (!ret)
		ret = seccomp_rule_add(f, SCMP_ACT_ALLOW, SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, CLONE_THREAD));
	if (!ret)
		ret = seccomp_rule_add(f, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
	return ret;
}

int restrict_calls(bool *done, struct err *err)
{
	struct sigaction sa = { .sa_sigaction = forbidden, .sa_flags = SA_SIGINFO };
	scmp_filter_ctx f = seccomp_init(SCMP_ACT_TRAP);
	int ret = f ? fill(f) : -ENOMEM;

	sigaction(SIGSYS, &sa, NULL);
	if (!ret)
		ret = seccomp_load(f);
	seccomp_release(f);
	*done = !ret;
	return ret < 0 ? err_errno(err, ret, "sandbox: seccomp (--no-sandbox does without)") : 0;
}

int forbid_calls(bool *done, struct err *err)
{
	scmp_filter_ctx f = seccomp_init(SCMP_ACT_ALLOW);
	int ret = f ? seccomp_attr_set(f, SCMP_FLTATR_CTL_TSYNC, 1) : -ENOMEM;

	for (size_t i = 0; i < ARRAY_SIZE(forbidden_to_all) && !ret; i++)
		ret = add(f, forbidden_to_all[i], SCMP_ACT_ERRNO(EPERM));
	/* As in fill(): threads are made, processes are not. */
	if (!ret)
		ret = seccomp_rule_add(f, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_THREAD, 0));
	if (!ret)
		ret = seccomp_rule_add(f, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
	if (!ret)
		ret = seccomp_load(f);
	seccomp_release(f);
	*done = !ret;
	return ret < 0 ? err_errno(err, ret, "sandbox: seccomp (--no-sandbox does without)") : 0;
}

#else

int restrict_calls(bool *done, struct err *err)
{
	*done = false;
	log_warn("sandbox: this weir was built without libseccomp, so its system calls are not restricted (--no-sandbox is silent)");
	return 0;
}

int forbid_calls(bool *done, struct err *err)
{
	return restrict_calls(done, err);
}

#endif
