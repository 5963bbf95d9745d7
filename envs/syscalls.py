"""Which system calls a child may make: what CPython needs to compute, and no more.

Not here: new processes, programs, sockets, signals to others, tracing, mounting, changing owners or limits.
Everything else answers EPERM, so that a program sees an ordinary exception. Compiled once, by the worker.
"""

import errno
import tempfile
from functools import cache

_ALLOWED = """
    read readv pread64 write writev pwrite64 close lseek fstat newfstatat stat lstat statx access faccessat
    faccessat2 open openat readlink readlinkat getdents64 getcwd chdir dup dup2 dup3 fcntl ioctl ftruncate
    fsync unlink unlinkat mkdir mkdirat rmdir rename renameat renameat2 umask statfs fstatfs
    mmap munmap mprotect mremap brk madvise
    rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack setitimer getitimer pause
    getpid gettid getuid geteuid getgid getegid getppid
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getrandom getrusage times
    futex sched_yield sched_getaffinity restart_syscall poll ppoll select pselect6 pipe pipe2
    uname sysinfo exit exit_group
"""


@cache
def allowed_filter() -> bytes:
    """The BPF program. Raises OSError when libseccomp is not on this machine."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise OSError(errno.ENOSYS, f"libseccomp: {error}") from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in _ALLOWED.split():
        if _known(pyseccomp, name):
            rules.add_rule(pyseccomp.ALLOW, name)
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")  # glibc then tries clone, which is refused
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _known(pyseccomp: object, name: str) -> bool:
    """Some calls of x86-64 (`open`, `stat`, `time`) do not exist on arm64."""
    return int(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)) >= 0  # type: ignore[attr-defined]
