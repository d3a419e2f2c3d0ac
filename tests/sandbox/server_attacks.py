"""Attacks on what all sessions share: the fork server, the connection to the trainer, and the removal of what sessions leave.

Each runs in one session while another one has state. However the attack ends, the other session must keep its state, new
sessions must start, the trainer must not be busy with it, and nothing of it may be left after the session is closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentfly.sandbox import SandboxLimits

LIMITS = SandboxLimits(memory_mb=128, disk_mb=8, inodes=2000, processes=10, files=128, cpu_s=60, output_chars=2000, grace_s=0.5)
PRELUDE = """
import ctypes, fcntl, mmap, os, signal, socket, stat, struct, sys, threading, time
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
CHANNEL = next(filter(is_socket, range(3, 260)))
def send(data):
    data = memoryview(data)
    while data:
        data = data[os.write(CHANNEL, data):]
def head(number=CELL, flags=0, sizes=(0,) * 8, length=None):
    return struct.pack(">IIB8I", (37 + sum(sizes) if length is None else length) & 0xffffffff, number, flags, *sizes)
def fill(name, megabytes):
    fd = os.open(name, os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(megabytes):
        os.write(fd, b"x" * (1 << 20))
    return fd
def background(work):
    if os.fork() == 0:
        try:
            work()
        finally:
            os._exit(0)
"""


@dataclass(frozen=True)
class Attack:
    name: str
    code: str
    timeout_s: float = 60
    process: bool = True  # False: the tier `process` does not claim to stop it
    ends: bool = False  # whether it must cost the session


WIRE = [
    Attack("eight megabytes of empty lists", """
body = b'{"id": 1, "x": [' + b"[]," * 2_700_000 + b"[]]}"
send(struct.pack(">I", len(body)) + body); time.sleep(60)""", ends=True),
    Attack("a reply of four gigabytes", "send(head(length=0xffffffff) + b'x' * 100_000); time.sleep(60)", ends=True),
    Attack("texts that are too long, lengths that fit",
           "send(head(sizes=(0, 0, 5_000_000, 0, 0, 0, 0, 0)) + b'x' * 5_000_000); time.sleep(60)", ends=True),
    Attack("the largest reply that is accepted, three times", """
largest = head(sizes=(0, 0, 12_600, 12_600, *[1_500_000] * 4)) + b"x" * (25_200 + 6_000_000)
for _ in range(3):
    send(largest)
time.sleep(60)"""),
    Attack("a reply that trickles", """
signal.signal(signal.SIGINT, signal.SIG_IGN)
for byte in head(sizes=(0, 0, 10_000, 0, 0, 0, 0, 0)) + b"x" * 10_000:
    os.write(CHANNEL, bytes([byte])); time.sleep(0.001)
while True: time.sleep(1)""", timeout_s=1, ends=True),
    Attack("a flood of the smallest replies", "while True: send(head() * 500)"),
    Attack("replies when no cell runs", """
def flood():
    while True:
        send(b"\\0" * 65536)
timer = threading.Timer(0.1, flood); timer.daemon = True; timer.start()""", ends=True),
    Attack("half a reply when no cell runs", """
timer = threading.Timer(0.1, send, [head(sizes=(0, 0, 9000, 0, 0, 0, 0, 0))])
timer.daemon = True; timer.start()""", ends=True),
    Attack("half a reply and an exit", "send(head(sizes=(0, 0, 9000, 0, 0, 0, 0, 0)) + b'x'); os._exit(3)", ends=True),
    Attack("a child that keeps the connection open and talks on it", """
def chatter():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        send(b"hello"); time.sleep(0.01)
background(chatter)
os._exit(0)""", ends=True),
    Attack("reading the cells of the trainer", """
thread = threading.Thread(target=lambda: [os.read(CHANNEL, 65536) for _ in range(99)], daemon=True); thread.start()"""),
    Attack("a stopped session", "os.kill(os.getpid(), 19); os.killpg(0, signal.SIGSTOP)\ntime.sleep(60)", timeout_s=1),
]  # fmt: skip

SERVER = [
    Attack("signals to the parent and to all", """
for target in (os.getppid(), -1, 1):
    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):
        try:
            if target > 1 or os.getpid() != 1: os.kill(target, number)
        except OSError: pass""", process=False),
    Attack("a signal by way of a descriptor's owner", """
r, w = socket.socketpair()
for code in (lambda: fcntl.fcntl(r, 10, signal.SIGKILL), lambda: fcntl.fcntl(r, fcntl.F_SETOWN, os.getppid()),
             lambda: fcntl.ioctl(r, 0x8901, struct.pack("i", os.getppid()))):
    try: code()
    except OSError: pass
fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)
w.send(b"x"); time.sleep(0.2)""", process=False),
    Attack("a storm of forks that outlives its leader", """
def storm():
    while True:
        try:
            if os.fork() == 0: continue
        except OSError: continue
        os._exit(0)
try:
    for _ in range(4): background(storm)
finally:
    os._exit(0)""", ends=True),
    Attack("three hundred orphans", """
for _ in range(30):
    def orphans():
        for _ in range(10):
            try:
                if os.fork() == 0: os._exit(0)
            except OSError: pass
    background(orphans)
while True:
    try: os.wait()
    except ChildProcessError: break"""),
    Attack("a daemon that holds the folder", """
def daemon():
    for number in range(1, 32):
        if number not in (9, 19): signal.signal(number, signal.SIG_IGN)
    kept = os.open(".", os.O_RDONLY); os.mkdir("held"); os.chdir("held")
    while True:
        try: open("f", "w").close(); os.unlink("f")
        except OSError: pass
background(lambda: background(daemon))
time.sleep(0.2)"""),
    Attack("endless output", "while True: os.write(1, b'x' * 65536); os.write(2, b'y' * 65536)", timeout_s=5),
    Attack("an output file of the largest size with nothing in it", """
for fd in (1, 2, *range(3, 200)):
    try: os.ftruncate(fd, 8 << 20)
    except OSError: pass"""),
    Attack("other files in the place of the outputs", """
zero = os.open("/dev/zero", os.O_RDWR)
for fd in (1, 2, *range(100, 126)):
    try:
        if fd != CHANNEL: os.fstat(fd); os.dup2(zero, fd)
    except OSError: pass"""),
    Attack("all descriptors", """
kept = []
try:
    while True: kept.append(os.pipe())
except OSError: pass
try:
    while True: kept.append(os.dup(0))
except OSError: pass"""),
    Attack("a memory bomb in several processes", """
def hoard():
    kept = bytearray(b"x") * (100 << 20); time.sleep(2)
for _ in range(5): background(hoard)
time.sleep(2)"""),
    Attack("shared memory that is not resident", """
kept = []
for _ in range(5):
    for path in ("", "/dev/zero"):
        fd = os.open(path, os.O_RDWR) if path else -1
        memory = mmap.mmap(fd, 60 << 20)
        memory.write(b"x" * (60 << 20)); memory.madvise(mmap.MADV_DONTNEED); kept.append(memory)
time.sleep(UNCAUGHT_S)
print("PWNED")""", process=False),
]  # fmt: skip

CLEAN_UP = [
    Attack("eighteen hundred nested folders", "for _ in range(1800): os.mkdir('a'); os.chdir('a')"),
    Attack("files in folders beyond PATH_MAX", """
for _ in range(40): os.mkdir("a" * 200); os.chdir("a" * 200)
for n in range(20): os.close(fill(f"f{n}", 2))
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("folders without rights", """
for mode in (0, 0o100, 0o200, 0o300, 0o400, 0o500):
    os.mkdir(f"m{mode}", 0o700); os.mkdir(f"m{mode}/inner", 0o700); open(f"m{mode}/inner/f", "w").close()
    os.mkdir(f"m{mode}/inner/closed", mode)
os.umask(0o777)
os.mkdir("masked"); open("closed", "w").close()
try: [os.chmod(f"m{mode}", mode) for mode in (0, 0o100)]
except OSError: pass"""),
    Attack("files behind a folder that cannot be read", """
os.mkdir("h", 0o300); os.chdir("h")
for n in range(20): os.close(fill(f"f{n}", 2))
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("deleted files that stay open", """
kept = []
for n in range(20):
    kept.append(fill(f"f{n}", 2)); os.unlink(f"f{n}")
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("deleted files that stay mapped", """
libc = ctypes.CDLL(None); libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
for n in range(20):
    fd = fill(f"f{n}", 2); libc.mmap(None, 4096, 1, 2, fd, 0); os.unlink(f"f{n}"); os.close(fd)
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("deleted files inside a socket", """
ours, theirs = socket.socketpair()
for n in range(20):
    fd = fill(f"f{n}", 2); socket.send_fds(ours, [b"x"], [fd]); os.unlink(f"f{n}"); os.close(fd)
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("space without writing", """
for n in range(20):
    fd = os.open(f"f{n}", os.O_CREAT | os.O_RDWR); os.posix_fallocate(fd, 0, 8 << 20); os.close(fd)
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("files that move while they are counted", """
for n in range(20): os.makedirs(f"p/{n}"); os.makedirs(f"q/{n}")
def shuffle():
    while True:
        for n in range(20):
            try: os.rename(f"p/{n}/f", f"q/{n}/f"); os.rename(f"q/{n}/f", f"p/{n}/f")
            except OSError: pass
threading.Thread(target=shuffle, daemon=True).start()
for n in range(20): os.close(fill(f"p/{n}/f", 2))
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
    Attack("hard links", """
open("f", "w").close()
for n in range(1500): os.link("f", f"l{n}")"""),
    Attack("names made for the removal", """
for n in range(300): os.makedirs(f".{n}/.{n}/.0/.1"); open(f".{n}/.0/.2", "w").close()
os.mkdir(b"\\xff\\n -rf *"); os.symlink("/", "root"); os.symlink("..", "up"); os.symlink("loop", "loop"); os.mkfifo("pipe")
os.mkdir(".301"); os.symlink("/", ".301/.302")"""),
    Attack("a folder that grows while it is removed", """
def grow():
    n = 0
    while True:
        n += 1
        try: os.makedirs(f"g{n % 50}/x"); open(f"g{n % 50}/x/f", "w").close()
        except OSError: pass
for _ in range(3): background(grow)
time.sleep(0.1)"""),
    Attack("the own folder replaced by a link to a folder of the host", """
home = os.getcwd()
try:
    os.rename(home, home + "-moved"); os.symlink(HOST, home)
except OSError:
    pass"""),
    Attack("more files than are allowed", """
for n in range(3000): os.symlink("x", f"i{n}")
time.sleep(UNCAUGHT_S)
print("PWNED")"""),
]  # fmt: skip

ATTACKS = WIRE + SERVER + CLEAN_UP
