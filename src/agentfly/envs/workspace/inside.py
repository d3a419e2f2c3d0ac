"""What the first process of a workspace does for the trainer: runs commands in a shell, reads and writes files.

It runs behind the walls, in a session of the sandbox, and imports the standard library only. `call` is its one entrance: the
trainer sends it as a cell, and the value of the cell is JSON. No line of the agent's code runs in this process.

    trainer -- cell --> this process -- command --> bash (lives as long as it can) --> programs
                        output of bash and of its programs: this process's stdout, which the session returns with the cell
"""

import base64
import fcntl
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
import zlib

MAX_TREE = 16 << 20
MAX_FILES = 20_000
GRACE_S = 1.0
PIECE = 150_000
# A command is read up to its NUL. It runs without the two descriptors, so that no program of it can hold or answer a call.
LOOP = """
while IFS= read -r -d '' -u {commands} __command; do
    eval "$__command" {commands}<&- {answers}>&- </dev/null
    printf '%d\\n' "$?" >&{answers}
done
"""


class Inside:
    """The state of a workspace: its root, its shell and what was asked for in pieces."""

    def __init__(self) -> None:
        self.root = "/workspace" if os.path.isdir("/workspace") else os.path.join(os.getcwd(), "work")
        self.shell: subprocess.Popen[bytes] | None = None
        self.began_ns = 0
        self.held = b""

    # ---- the beginning ----

    def begin(self, packed: str) -> str:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # programs inside may signal the first process
        os.chdir(self.root)
        home = "/tmp" if self.root == "/workspace" else os.path.dirname(self.root)
        os.environ.update(
            HOME=home, TMPDIR=home, PATH=f"{sys.prefix}/bin:{os.environ['PATH']}", PAGER="cat", GIT_PAGER="cat", TERM="dumb",
            GIT_AUTHOR_NAME="agent", GIT_AUTHOR_EMAIL="agent@localhost", GIT_COMMITTER_NAME="agent",
            GIT_COMMITTER_EMAIL="agent@localhost", PIP_NO_INDEX="1", PIP_DISABLE_PIP_VERSION_CHECK="1", SHELL="/bin/bash",
        )  # fmt: skip
        self.write(packed)
        mark = os.path.join(home, ".began")
        with open(mark, "w"):
            self.began_ns = os.stat(mark).st_ctime_ns
        os.unlink(mark)
        return self.root

    def write(self, packed: str) -> str:
        """Writes files of {path: [mode, data]}. A link in the place of a file is replaced."""
        for path, (mode, data) in json.loads(zlib.decompress(base64.b85decode(packed))).items() if packed else ():
            place = os.path.join(self.root, path)
            if data is None:
                if os.path.lexists(place) and not os.path.isdir(place):
                    os.unlink(place)
                continue
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if os.path.islink(place):
                os.unlink(place)
            with open(place, "wb") as file:
                file.write(base64.b85decode(data))
            if mode & 0o100:
                os.chmod(place, 0o755)
        return ""

    # ---- commands ----

    def bash(self, command: str, limit_s: float) -> list[object]:
        """Runs a command in the shell. Returns its exit status and a note on what the caller must know."""
        self.reap()
        note = ""
        if self.shell is None:
            self.start_shell()
        before = self.processes()
        try:
            os.write(self.commands, command.encode("utf-8", "surrogateescape") + b"\0")
        except BrokenPipeError:  # something has killed the shell since the last command
            self.end_shell()
            self.start_shell()
            note = "the shell was gone, so a new one began"
            os.write(self.commands, command.encode("utf-8", "surrogateescape") + b"\0")
        answer = self.answer(limit_s)
        if answer is None:
            self.kill(before)
            answer = self.answer(GRACE_S)
            note = f"stopped after {limit_s:g} s"
            if answer is None:
                self.end_shell()
                return [None, f"{note}; a new shell begins with the next command"]
        if answer == b"":
            status = self.end_shell()
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            return [None if note else status, f"the shell {how}; a new one begins with the next command"]
        return [None if note.startswith("stopped") else int(answer), note]

    def start_shell(self) -> None:
        read_end, self.commands = os.pipe()
        self.answers, write_end = os.pipe()
        get, give = (fcntl.fcntl(fd, fcntl.F_DUPFD, 150) for fd in (read_end, write_end))  # numbers that no program takes
        loop = LOOP.format(commands=get, answers=give)
        self.shell = subprocess.Popen(
            ["/bin/bash", "--noprofile", "--norc", "-c", loop], stdin=subprocess.DEVNULL, stderr=1, pass_fds=(get, give),
            cwd=self.root,
        )  # fmt: skip
        for fd in (get, give, read_end, write_end):  # so that the end of the shell is the end of the pipes
            os.close(fd)

    def end_shell(self) -> int:
        assert self.shell is not None
        self.shell.kill()
        status = self.shell.wait()
        os.close(self.commands)
        os.close(self.answers)
        self.shell = None
        return status

    def answer(self, limit_s: float) -> bytes | None:
        """Returns the line that the shell writes when a command has ended, empty if the shell has, None if it is late."""
        ready = select.poll()
        ready.register(self.answers, select.POLLIN)
        return os.read(self.answers, 64) if ready.poll(max(1, limit_s * 1000)) else None

    def run(self, argv: list[str], given: str, limit_s: float, most: int) -> list[object]:
        """Runs a program beside the shell. Returns its status (None: out of time), and what it wrote: head, tail, length."""
        self.reap()
        before = self.processes()
        data = base64.b85decode(given)
        end = time.monotonic() + limit_s
        output, late = OutputEnds(most), False
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.root,
            start_new_session=self.root == "/workspace", bufsize=0,
        )  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        for stream in (child.stdin, child.stdout):
            os.set_blocking(stream.fileno(), False)
        ready = select.poll()
        ready.register(child.stdout, select.POLLIN)
        if data:
            ready.register(child.stdin, select.POLLOUT)
        else:
            child.stdin.close()
        over = False
        while not over:
            left = end - time.monotonic()
            if left <= 0:
                late = True
                break
            # A process that it left running may keep the pipe open, so its own end counts too.
            over = child.poll() is not None
            for fd, _ in ready.poll(0 if over else min(left, 0.05) * 1000):
                if fd == child.stdout.fileno():
                    while chunk := child.stdout.read(1 << 16):
                        output.add(chunk)
                        if time.monotonic() > end:
                            break
                    if chunk == b"":
                        ready.unregister(fd)
                else:
                    try:
                        data = data[child.stdin.write(data) or 0 :]
                    except OSError:
                        data = b""
                    if not data:
                        ready.unregister(fd)
                        child.stdin.close()
        self.kill(before)
        child.kill()
        status = child.wait()
        child.stdout.close()
        child.stdin.close()
        return [None if late else status, *output.parts()]

    def processes(self) -> set[int]:
        """The processes of the workspace. Empty without a PID namespace: others of the machine would be among them, so what a
        command left running ends with the workspace."""
        if os.getpid() != 1 or not os.path.isdir("/proc/1"):
            return set()
        return {int(name) for name in os.listdir("/proc") if name.isdigit()}

    def kill(self, before: set[int]) -> None:
        """Kills every process that was started since `before`, except the shell."""
        for _ in range(20):
            spared = before | {self.shell.pid} if self.shell else before
            new = self.processes() - spared if before else set()  # empty: not a namespace of this workspace
            for pid in new:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    continue
            if not new:
                return
            self.reap()
            time.sleep(0.002)

    def reap(self) -> None:
        """Reaps orphans: this is the first process of its namespace."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            if self.shell is not None and ended.si_pid == self.shell.pid:
                self.end_shell()
            else:
                os.waitpid(ended.si_pid, os.WNOHANG)

    # ---- files ----

    def read(self, path: str, most: int) -> list[object]:
        """Returns the bytes of a file in base85, and its size. Raises OSError."""
        fd = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(22, "not a regular file")
            return [base64.b85encode(file.read(most)).decode(), os.fstat(fd).st_size]

    def changes(self) -> int | str:
        """Holds {"names": all files, "changed": {path: [mode, data]}} for `piece`. Returns the number of pieces, or why not."""
        names: list[str] = []
        changed: dict[str, list[object]] = {}
        size = 0
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            try:
                entries = sorted(os.scandir(os.path.join(self.root, folder)), key=lambda entry: entry.name)
            except OSError:
                continue  # unreadable, or its path is too long: its files count as missing
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != ".git":
                        waiting.append(path)
                    continue
                names.append(path)
                seen = entry.stat(follow_symlinks=False)
                if len(names) > MAX_FILES:
                    return f"the tree has more than {MAX_FILES:,} files"
                if not stat.S_ISREG(seen.st_mode) or seen.st_ctime_ns < self.began_ns:
                    continue
                size += seen.st_size
                if size > MAX_TREE:
                    return f"the changed files are larger than {MAX_TREE >> 20} MB together"
                try:
                    data, _ = self.read(path, MAX_TREE)
                except OSError:
                    continue
                changed[path] = [seen.st_mode & 0o777, data]
        known = [name for name in names if is_text(name)]
        whole = {"names": known, "changed": {name: value for name, value in changed.items() if is_text(name)}}
        self.held = zlib.compress(json.dumps(whole).encode(), 1)
        return -(-len(self.held) // PIECE)

    def piece(self, number: int) -> str:
        return base64.b85encode(self.held[number * PIECE : (number + 1) * PIECE]).decode()


class OutputEnds:
    """The first and the last `most` bytes of a stream, and its length."""

    def __init__(self, most: int) -> None:
        self.most, self.length = most, 0
        self.head, self.tail = b"", b""

    def add(self, chunk: bytes) -> None:
        self.length += len(chunk)
        room = self.most - len(self.head)
        self.head += chunk[:room]
        self.tail = (self.tail + chunk[room:])[-self.most :] if len(chunk) > room else self.tail

    def parts(self) -> list[object]:
        return [base64.b85encode(self.head).decode(), base64.b85encode(self.tail).decode(), self.length]


def is_text(name: str) -> bool:
    return name.isprintable() and len(name) < 1000


STATE: list[Inside] = []


def call(name: str, *arguments: object) -> str:
    """Runs a method of the workspace. Returns JSON: {"value"}, or {"error"} for an OSError."""
    if not STATE:
        STATE.append(Inside())
    try:
        return json.dumps({"value": getattr(STATE[0], name)(*arguments)})
    except OSError as error:
        return json.dumps({"error": error.strerror or str(error)})
