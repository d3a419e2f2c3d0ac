"""The attack table: small programs that print PWNED when they get what they want.

Each runs in a sandbox, where it must not print that, and as a control in a plain subprocess, where it must: so the snippet
would work if nothing stopped it. `control` is "same" (the same code), "root" (the same, only if the test runs as root), or
other code where the attack would harm the machine. System calls have arguments without effect: `reached` tells whether the
kernel read them, or the sandbox refused the call (EPERM, ENOSYS, EACCES).
"""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.sandbox import SandboxLimits

SMALL = SandboxLimits(memory_mb=128, disk_mb=8, inodes=500, processes=10, files=64, cpu_s=60, output_chars=2000)
PRELUDE = """
import os, sys, ctypes, errno, socket, signal, stat, mmap, resource, threading, time, glob
X86 = os.uname().machine == "x86_64"
libc = ctypes.CDLL(None, use_errno=True)
def won(condition=True):
    if condition:
        print("PWNED", flush=True)
def call(x86, arm, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return 0 if libc.syscall(ctypes.c_long(x86 if X86 else arm), *wide) >= 0 else ctypes.get_errno()
def reached(x86, arm, *arguments):
    won(call(x86, arm, *arguments) not in (errno.EPERM, errno.ENOSYS, errno.EACCES))
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    control: str = "same"
    landlock: bool = True  # False: the call succeeds without effect; another test checks the effect


def _calls(*rows: tuple[str, str, str]) -> list[Attack]:
    return [Attack(name, f"reached({arguments})", control) for name, arguments, control in rows]


FILES = [
    Attack("read a file of the host", 'won("canary" in open(HOST["secret"]).read())'),
    Attack("list a folder of the host", 'won("secret.txt" in os.listdir(HOST["folder"]))'),
    Attack("append to a file of the host", 'open(HOST["secret"], "a").write("x"); won()'),
    Attack("delete a file of the host", 'os.remove(HOST["secret"]); won()'),
    Attack("read through a symbolic link", 'os.symlink(HOST["secret"], "link"); won("canary" in open("link").read())'),
    Attack("hard link a file of the host", 'os.link(HOST["secret"], HOST["secret"] + "2"); won()'),
    Attack("read through /proc/self/root", 'won("canary" in open("/proc/self/root" + HOST["secret"]).read())'),
    Attack("read through another's root",
           'won("canary" in open(f"/proc/{HOST[\'victim\']}/root" + HOST["secret"]).read())', "root"),
    Attack("read through another's cwd", 'won("canary" in open(f"/proc/{HOST[\'victim\']}/cwd/secret.txt").read())'),
    Attack("read the trainer's environment", 'won("canary" in str(os.environ))'),
    Attack("read the environment from /proc", 'won(b"canary" in open("/proc/self/environ", "rb").read())'),
    Attack("read another's environment", 'won(b"canary" in open(f"/proc/{HOST[\'victim\']}/environ", "rb").read())'),
    Attack("read the password hashes", 'won(open("/etc/shadow").read())', "root"),
    Attack("read from inherited descriptors", """
for fd in range(3, 56):
    try:
        won(b"canary" in os.pread(fd, 100, 0))
    except OSError:
        continue"""),
    Attack("write to inherited descriptors", """
for fd in range(3, 300):
    try:
        won(os.fstat(fd).st_ino == HOST["inode"] and os.pwrite(fd, b"x", 0) == 1)
    except OSError:
        continue"""),
    Attack("plant a module in the library", 'open(os.path.dirname(os.__file__) + "/planted.py", "w"); won()',
           'won(os.access(os.path.dirname(os.__file__), os.W_OK))'),
    Attack("change the mode of a library", "os.chmod(os.__file__, os.stat(os.__file__).st_mode); won()", "root"),
    Attack("give a file away", 'open("f", "w"); os.chown("f", 12345, 12345); won()', "root"),
    Attack("make a device node", 'os.mknod("dev", 0o600 | stat.S_IFCHR, os.makedev(1, 3)); won()', "root"),
    Attack("open a terminal multiplexer", 'os.open("/dev/ptmx", os.O_RDWR); won()'),
    Attack("look around in /sys", 'won(os.listdir("/sys/kernel"))'),
    Attack("open a kernel setting for writing", 'open("/proc/sys/kernel/core_pattern", "r+"); won()', "root"),
    Attack("open the kernel's own files", """
for path in ("/proc/sysrq-trigger", "/proc/kmsg", "/proc/kcore"):
    if os.path.exists(path):
        os.open(path, os.O_WRONLY if "sysrq" in path else os.O_RDONLY); won()""", "root"),
    Attack("open a cgroup for writing", """
for path in glob.glob("/sys/fs/cgroup/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/cgroup.procs"):
    open(path, "r+"); won(); break""", "root"),
    Attack("open by handle", "reached(304, 265, -1, None, 0)", "root"),
    Attack("set-user-id programs", 'won(b"NoNewPrivs:\\t0" in open("/proc/self/status", "rb").read())'),
]  # fmt: skip

PROCESSES = [
    Attack("signal a process of the host", 'os.kill(HOST["victim"], signal.SIGCONT); won()'),
    Attack("signal all processes", "os.kill(-1, 0); won()", landlock=False),
    Attack("see the host's processes", 'won(str(HOST["victim"]) in os.listdir("/proc"))'),
    Attack("trace a process", 'won(call(101, 117, 0x4206, HOST["victim"], 0, 0) == 0)', "root"),
    Attack("read a process's memory", 'won(call(310, 270, HOST["victim"], None, 0, None, 0, 0) == 0)', "root"),
    Attack("write a process's memory", 'won(call(311, 271, HOST["victim"], None, 0, None, 0, 0) == 0)', "root"),
    Attack("change a process's limits", 'resource.prlimit(HOST["victim"], resource.RLIMIT_NOFILE, (64, 64)); won()'),
    Attack("change a process's priority", 'os.setpriority(os.PRIO_PROCESS, HOST["victim"], 10); won()'),
    Attack("raise the own priority", "os.setpriority(os.PRIO_PROCESS, 0, -5); won()", "root"),
    Attack("raise the own limits", "resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500)); won()"),
    Attack("write core dumps", "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20)); won()"),
    Attack("have capabilities", """
class H(ctypes.Structure): _fields_ = [("v", ctypes.c_uint32), ("p", ctypes.c_int)]
data = (ctypes.c_uint32 * 6)()
call(125, 90, ctypes.byref(H(0x20080522, 0)), data)
won(any(data))""", "root"),
    Attack("fork bomb", """
children = []
try:
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            time.sleep(20); os._exit(0)
        children.append(pid)
    time.sleep(1)
    won()
finally:
    for pid in children:
        os.kill(pid, 9)"""),
    Attack("thread bomb", """
for _ in range(40):
    threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
time.sleep(1)
won()"""),
    Attack("descriptor bomb", "kept = [os.dup(0) for _ in range(100)]; won()"),
    Attack("memory bomb", "kept = bytearray(256 << 20); won()"),
    Attack("memory bomb in shared pages", "kept = mmap.mmap(-1, 256 << 20); won()"),
    Attack("memory bomb in several processes", """
r, w = os.pipe()
for _ in range(4):
    if os.fork() == 0:
        kept = b"x" * (100 << 20); time.sleep(1); os.write(w, b"!"); time.sleep(2); os._exit(0)
os.close(w)
seen = b""
while len(seen) < 4:
    part = os.read(r, 4)
    if not part:
        break
    seen += part
won(len(seen) == 4)
os.killpg(0, signal.SIGKILL)"""),
    Attack("disk bomb", """
for n in range(20):
    with open(f"f{n}", "wb") as file:
        file.write(b"x" * (1 << 20))
time.sleep(1)
won()"""),
    Attack("one large file", 'f = open("big", "wb"); f.truncate(100 << 20); won()'),
    Attack("inode bomb", """
for n in range(600):
    open(f"i{n}", "w").close()
time.sleep(1)
won()"""),
    Attack("memory outside all limits (memfd)", 'os.memfd_create("x"); won()'),
    Attack("memory outside all limits (System V)", """
segment = libc.shmget(0, 4096, 0o600)
won(segment >= 0)
libc.shmctl(segment, 0, None)"""),
    Attack("fill the shared memory folder", """
with open("/dev/shm/agentfly-attack", "wb") as file:
    os.unlink("/dev/shm/agentfly-attack")
    file.write(b"x" * (20 << 20)); file.flush()
won()"""),
]  # fmt: skip

NETWORK = [
    Attack("connect over TCP", 'socket.create_connection(("127.0.0.1", HOST["tcp"]), 5); won()'),
    Attack("send over UDP", 'socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", HOST["tcp"])); won()'),
    Attack("listen on a port", 'socket.create_server(("127.0.0.1", 0)); won()'),
    Attack("connect to a socket file", 'socket.socket(socket.AF_UNIX).connect(HOST["unix"]); won()'),
    Attack("connect to an abstract socket", 'socket.socket(socket.AF_UNIX).connect("\\0" + HOST["abstract"]); won()'),
    Attack("bind an abstract socket", 'socket.socket(socket.AF_UNIX).bind("\\0agentfly-attack"); won()'),
    Attack("send to an abstract socket from a pair", """
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
pair[0].sendto(b"x", "\\0" + HOST["datagram"]); won()"""),
    Attack("talk to the kernel by netlink", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); won()"),
    Attack("raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); won()", "root"),
    Attack("packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); won()", "root"),
    Attack("talk to the hypervisor", "socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); won()"),
]  # fmt: skip

KERNEL = [
    *_calls(
        ("mount", "165, 40, None, None, None, 0, None", "root"),
        ("unmount", '166, 39, ctypes.c_char_p(b"/no/such/place"), 0', "root"),
        ("a new mount tree", "430, 430, None, 0", "root"),
        ("new user namespace", "272, 97, 0x10000000", "same"),
        ("enter a namespace", "308, 268, -1, 0", "same"),
        ("change the root", '161, 51, ctypes.c_char_p(b"/")', "root"),
        ("pivot the root", '155, 41, ctypes.c_char_p(b"/no"), ctypes.c_char_p(b"/no")', "root"),
        ("key rings", "250, 219, 0, -3, 0", "same"),
        ("add a key", "248, 217, None, None, None, 0, 0", "same"),
        ("bpf", "321, 280, 0, None, 0", "root"),
        ("performance events", "298, 241, None, 0, -1, -1, 0", "root"),
        ("io_uring", "425, 425, 1, None", "same"),
        ("user faults", "323, 282, 1 << 30", "same"),
        ("load a kernel", "246, 104, 0, 0, None, 0x7fff0000", "root"),
        ("load a module", "175, 105, None, 0, None", "root"),
        ("remove a module", '176, 106, ctypes.c_char_p(b"no_such"), 0', "root"),
        ("reboot", "169, 142, 0, 0, 0, None", "root"),
        ("set the clock", "227, 112, 0, None", "root"),
        ("set the time of day", "164, 170, ctypes.byref((ctypes.c_long * 2)(-1, -1)), None", "root"),
        ("adjust the clock", "305, 266, 0, None", "root"),
        ("set the host name", "170, 161, ctypes.c_char_p(os.uname().nodename.encode()), len(os.uname().nodename)", "root"),
        ("swap", '167, 224, ctypes.c_char_p(b"/no/such"), 0', "root"),
        ("accounting", '163, 89, ctypes.c_char_p(b"/no/such")', "root"),
        ("read the kernel's log", "103, 116, 10, None, 0", "root"),
        ("personality", "135, 92, 0xffffffff", "same"),
        ("compare kernel objects", "312, 272, os.getpid(), os.getpid(), 1, 0, 0", "same"),
        ("take a descriptor from a process", "438, 438, -1, 0, 0", "same"),
        ("move pages of a process", "279, 239, 0, 0, None, None, None, 0", "same"),
        ("real-time scheduling", "144, 119, 0, 77, None", "same"),
        ("message queues", '240, 180, ctypes.c_char_p(b"no_such"), 0', "same"),
        ("watch the whole file system", "300, 262, 1 << 30, 0", "root"),
        ("asynchronous I/O contexts", "206, 0, 1, ctypes.byref(ctypes.c_ulong(0))", "same"),
        ("end an asynchronous I/O context", "207, 1, 1", "same"),
        ("submit asynchronous I/O", "209, 2, 1, 0, None", "same"),
        ("read asynchronous I/O", "208, 4, 1, 0, 0, None, None", "same"),
        ("event queues", "294, 26, 0", "same"),
        ("watch a file", '254, 27, -1, ctypes.c_char_p(b"."), 2', "same"),
        ("flush the whole machine", "306, 267, -1", "same"),
        ("cached pages of a file", "451, 451, -1, None, None, 0", "won(call(451, 451, -1, None, None, 0) != errno.EPERM)"),
        ("a filter of its own", "317, 277, 99, 0, None", "same"),
    ),
    Attack("lock a file of the machine", """
import fcntl, json
with open(json.__file__) as file:
    if call(73, 32, file.fileno(), 2 | 4) == 0:
        won()
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
won()"""),
    Attack("lease a file of the machine", """
import fcntl, json
with open(json.__file__) as file:
    fcntl.fcntl(file, 1024, 0)
won()"""),
    Attack("watch a folder of the machine", """
import fcntl, json
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open(os.path.dirname(json.__file__), os.O_RDONLY), 1026, 1)
won()"""),
    Attack("drop a file of the machine from its cache", """
import json
with open(json.__file__) as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
won()"""),
    Attack("ask whether a file of the machine is in its cache", """
import json
with open(json.__file__) as file:
    file.read()
    os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
won()"""),
    Attack("take the timers of all processes of a user", """
timer, count = ctypes.c_int(), 0
while count < 2000 and call(222, 107, 1, None, ctypes.byref(timer)) == 0:
    count += 1
won(count == 2000)"""),
    Attack("new user namespace by clone", """
pid = libc.syscall(ctypes.c_long(56 if X86 else 220), ctypes.c_long(0x10000000 | 17), None, None, None, None)
if pid == 0:
    os._exit(0)
won(pid > 0)"""),
]  # fmt: skip

ATTACKS = FILES + PROCESSES + NETWORK + KERNEL
