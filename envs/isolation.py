"""The kernel's walls around a child: namespaces, a read-only root, Landlock, seccomp, limits.

Called by the fork server and by its children; decides nothing (the worker chooses the layers in `sandbox`)
and judges nothing. Standard library only: it runs where nothing else can be imported. Linux; numbers of
x86-64 and arm64 where they differ.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable
from pathlib import Path

CHILD_ID = 61_000  # uid and gid of children when the server is root; nobody else on the machine has it
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x0002_0000, 0x0400_0000, 0x0800_0000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x1000_0000, 0x2000_0000, 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
# statvfs flag -> mount flag: a remount inside a user namespace must keep what the mount already has
_KEPT_MOUNT_FLAGS = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_RIGHTS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # how many file rights each Landlock ABI knows
_NUMBERS = {"x86_64": (56, 155), "aarch64": (220, 41)}  # clone, pivot_root
_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespaces(readonly: Iterable[str]) -> None:
    """Moves this process into fresh namespaces whose root holds only `readonly` paths and an empty /tmp.

    Without root a user namespace comes first. Raises OSError where the kernel or a container forbids it; the
    process is then half way and must end.
    """
    root = Path("/proc")  # any folder would do to build on; this one is everywhere, and not needed any more
    uid, gid = os.getuid(), os.getgid()
    if uid != 0:
        _unshare(CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    _unshare(CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", str(root), "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=4k,mode=0755")
    for path in readonly:
        _bind_readonly(Path(path), root)
    (root / "tmp").mkdir(mode=0o755, exist_ok=True)
    os.chdir(root)
    _check(_libc.syscall(_number(1), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")
    _mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def clone_child(namespaces: bool) -> int:
    """Like os.fork(); with `namespaces` the child is process 1 of a fresh pid, mount and ipc namespace."""
    if not namespaces:
        return os.fork()
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | signal.SIGCHLD
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    # PyDLL keeps the interpreter lock over the call, as os.fork does
    pid: int = ctypes.PyDLL(None, use_errno=True).syscall(_number(0), flags, 0, 0, 0, 0)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    api.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, f"clone: {os.strerror(error)}")
    return pid


def furnish_child(hidden: Iterable[str], tmp_bytes: int) -> None:
    """In a child with its own mount namespace: a sized /tmp, and nothing left to see under `hidden`."""
    # /tmp last: a checkout may lie beneath it, and its paths are gone once the empty one is on top.
    for path in hidden:
        _mount("tmpfs", path, "tmpfs", MS_RDONLY | MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=1,mode=0555")
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={tmp_bytes},nr_inodes=256,mode=0777")
    os.chdir("/tmp")


def landlock_abi() -> int:
    """The version of Landlock that this kernel offers; 0 for none."""
    return max(0, int(_libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)))


def landlock(readable: Iterable[str]) -> None:
    """From here on this process may only read beneath `readable`: no writing, TCP (ABI 4), or signals and
    abstract sockets to others (ABI 6). Raises OSError."""
    abi = landlock_abi()
    handled = (1 << _RIGHTS_OF_ABI.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = int(_libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0))
    _check(ruleset, "landlock_create_ruleset")
    for path in readable:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR, beneath)
        _check(_libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"landlock rule for {path}")
        os.close(beneath)
    forbid_new_privileges()
    _check(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def limit(memory_bytes: int, file_bytes: int, files_open: int, cpu_s: int) -> None:
    """Address space, size of a file, open files, processor time; no new processes and no core dumps."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, files_open),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu_s),
    ):
        hard = resource.getrlimit(kind)[1]
        soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # at the hard processor limit the kernel sends SIGKILL, which must mean "killed from outside"
        resource.setrlimit(kind, (soft, hard if kind == resource.RLIMIT_CPU else soft))


def drop_privileges(own_id: bool) -> None:
    """Gives up root (for CHILD_ID if `own_id`), every capability and the way back to them."""
    if own_id and os.getuid() == 0:
        os.setgroups([])
        os.setresgid(CHILD_ID, CHILD_ID, CHILD_ID)
        os.setresuid(CHILD_ID, CHILD_ID, CHILD_ID)
    header = struct.pack("II", 0x2008_0522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, bytes(24)), "capset")
    forbid_new_privileges()


def forbid_new_privileges() -> None:
    _prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")


def die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL, "pdeathsig")


def load_seccomp(program: bytes) -> None:
    """Installs a compiled filter (`syscalls.allowed_filter`) for good. Needs no_new_privs. Raises OSError."""
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _bind_readonly(path: Path, root: Path) -> None:
    target = root / path.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    if path.is_symlink():
        target.symlink_to(os.readlink(path))
        return
    target.mkdir(exist_ok=True, mode=0o755)
    _mount(str(path), str(target), "", MS_BIND)
    present = os.statvfs(target).f_flag
    kept = sum(mount for seen, mount in _KEPT_MOUNT_FLAGS.items() if present & seen)
    _mount("none", str(target), "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    code = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(code, f"mount of {target}")


def _unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def _prctl(option: int, value: int, place: str) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), place)


def _number(which: int) -> int:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"no system call numbers for {platform.machine()}")
    return numbers[which]


def _check(code: int, place: str) -> None:
    if code < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{place}: {os.strerror(error)}")
