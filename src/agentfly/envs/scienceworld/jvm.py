"""One JVM with many simulators. All calls run one after another in one thread.

Simulators in one JVM share static state of Java: the random stream, the counter of object ids and the list of simplifications.
`SimulatorGlobals` saves and restores them whenever another simulator acts, so an episode does not depend on other simulators;
the single thread is the lock. `-XX:hashCode=2` gives every object the same identity hash; without it the order of things in a
room would change from run to run.

The connection is on loopback and requires a token. A call that takes longer than `CALL_S`, a lost connection or a full heap
ends the JVM; its simulators raise `WorldError` from then on. The JVM ends when this process ends.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ...errors import AgentFlyError, WorldError
from .java import CURE, find_java, find_simulator

log = logging.getLogger(__name__)
T = TypeVar("T")

FLAGS = (
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+UseSerialGC",
    "--add-opens=java.base/java.util=ALL-UNNAMED",  # to read the state of the random stream
)
NAMES = ("teleportAction", "selfWateringFlowerPots", "openContainers", "openDoors", "noElectricalAction")
"""Names of simplifications in Java."""
START_S = 120.0
CALL_S = 300.0
CLOSE_S = 10.0
_MULTIPLIER = 0x5DEECE66D
"""java.util.Random.setSeed XORs the seed with this; XORing it first restores a state as it was read."""
_FATAL = ("OutOfMemoryError", "StackOverflowError", "InternalError")


@dataclass(slots=True)
class SimulatorGlobals:
    """The values of Java's static state that belong to one simulator."""

    seed: int = 0
    count: int = 0
    simplifications: str = ""


class Jvm:
    """A Java process with simulators. The first call starts it."""

    def __init__(self, heap_mb: int) -> None:
        self.heap_mb = heap_mb
        self.users = 0
        self.why = ""
        """Why the JVM ended; empty while it lives."""
        self.process: subprocess.Popen[bytes] | None = None
        self.gateway: Any = None
        self._maker: Any = None
        self._current: SimulatorGlobals | None = None
        self._loaded: str | None = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scienceworld-jvm")
        self._closed = threading.Event()

    def submit(self, function: Callable[[], T], shared: SimulatorGlobals | None = None) -> Future[T]:
        """Run a function in the JVM's thread, with the static state `shared` restored (None: without)."""
        try:
            return self._thread.submit(self._run, function, shared)
        except RuntimeError:
            raise WorldError(self.why or "the JVM of ScienceWorld is closed") from None

    def _run(self, function: Callable[[], T], shared: SimulatorGlobals | None) -> T:
        from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError

        if self.why:
            raise WorldError(self.why)
        try:
            if self.process is None:
                self._start()
            self._change_to(shared)
            return function()
        except AgentFlyError:
            raise
        except Py4JJavaError as error:
            said = str(error.java_exception)
            if any(word in said for word in _FATAL):
                self._die(f"the JVM of ScienceWorld gave up: {said}")
                raise WorldError(self.why) from error
            raise WorldError(f"ScienceWorld failed: {said}") from error
        except (Py4JNetworkError, OSError) as error:
            self._die(f"the JVM of ScienceWorld is gone ({type(error).__name__}: {error})")
            raise WorldError(self.why) from error
        except Py4JError as error:
            self._die(f"the JVM of ScienceWorld cannot be talked to: {error.__cause__ or error}")
            raise WorldError(self.why) from error

    # ---- what simulators share

    def _change_to(self, shared: SimulatorGlobals | None) -> None:
        if self._current is shared:
            return
        if self._current is not None:
            self._current.seed, self._current.count = self._seed.get(self._random), self._ids.count()
        self._current = None
        if shared is not None and shared.count:  # else nothing was loaded yet, and loading sets all of it
            self._random.setSeed(shared.seed ^ _MULTIPLIER)
            self._set_count(shared.count)
            if shared.simplifications != self._loaded:
                self.drop(self._simplifier.parseSimplificationStr(shared.simplifications))
                self._loaded = shared.simplifications
        self._current = shared

    def spare(self, simulator: Any) -> None:
        """Share one task table: every load makes one of ten megabytes, and all are equal."""
        if self._maker is None:
            self._maker = simulator.taskMaker()
        else:
            getattr(simulator, "taskMaker_$eq")(self._maker)

    def loading(self) -> None:
        """Call before a load: if it fails, Java's list of simplifications is unknown."""
        self._loaded = None

    def loaded(self, shared: SimulatorGlobals) -> None:
        """Call after a load: save the static state. The load has resolved "easy" to names that differ by task."""
        used = str(self._simplifier.getSimplificationsUsed())
        shared.simplifications = self._loaded = ",".join(name.strip() for name in used.split(",") if name.strip() in NAMES)
        shared.count = self._ids.count()

    def lines(self, java_list: object) -> list[str]:
        """A Java list of strings as a Python list, in one exchange instead of one per element."""
        text = str(self.gateway.jvm.java.lang.String.join("\n", java_list))
        self.drop(java_list)
        return text.split("\n") if text else []

    def drop(self, java_object: object) -> None:
        """Release an object in Java; with memory management off nothing else does."""
        self.gateway.detach(java_object)

    # ---- life

    def _start(self) -> None:
        from py4j.java_gateway import GatewayParameters, JavaGateway

        jar, bridge = find_simulator()
        options = [f"-Xmx{self.heap_mb}m", *FLAGS, "-classpath", f"{bridge}:{jar}"]
        command = [find_java(), *options, "py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0"]
        with tempfile.TemporaryFile() as errors:
            process = self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=jar.parent,
                start_new_session=True,  # Ctrl-C must not end the JVM before this process has
            )
            assert process.stdout is not None
            late = threading.Timer(START_S, process.kill)
            late.start()
            try:
                port, token = process.stdout.readline().strip(), process.stdout.readline().strip()
            finally:
                late.cancel()
            if not port.isdigit() or not token:
                process.kill()
                process.wait()
                errors.seek(0)
                said = errors.read(2000).decode("utf-8", "replace").strip().splitlines()
                words = said[0] if said else "it said nothing"
                self._die(
                    f"the JVM of ScienceWorld did not start ({command[0]}: {words}); "
                    f"it needs Java 11 or newer and {self.heap_mb} MB: {CURE}"
                )
                raise WorldError(self.why)
        self.gateway = JavaGateway(
            gateway_parameters=GatewayParameters(
                port=int(port),
                auth_token=token.decode(),
                auto_field=False,
                read_timeout=CALL_S,
                enable_memory_management=False,  # `drop` releases objects, in this thread
            )
        )
        java = self.gateway.jvm
        # The simulator prints to a pipe that is not read and would fill up.
        java.java.lang.System.setOut(java.java.io.PrintStream(java.java.io.OutputStream.nullOutputStream()))
        self._random = self._module("scala.util.Random$").self()
        self._seed = java.java.lang.Class.forName("java.util.Random").getDeclaredField("seed")
        self._seed.setAccessible(True)
        self._ids = self._module("util.UniqueIdentifier$")
        self._set_count = getattr(self._ids, "count_$eq")
        self._simplifier = self._module("main.scala.scienceworld.runtime.SimplifierProcessor$")

    def _module(self, name: str) -> Any:
        """A Scala object."""
        return self.gateway.jvm.java.lang.Class.forName(name).getField("MODULE$").get(None)

    def _die(self, why: str) -> None:
        self.why = why
        log.warning("%s", why)
        self._end()

    def _end(self) -> None:
        process = self.process
        if self.gateway is not None:
            self.gateway.close()
        if process is None:
            return
        if self.why:
            process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the process may have closed the pipe
                    pipe.close()
        try:
            process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(CLOSE_S)

    def close(self) -> None:
        """End the JVM, after the running call if there is one. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        if not self.why:
            try:
                self._thread.submit(self._end)
            except RuntimeError:  # the interpreter shuts down and has ended the thread
                self._end()
        self._thread.shutdown(wait=False)

    def join(self, timeout_s: float) -> None:
        """After `close`: wait for the process to end, and kill it after the timeout."""
        process = self.process
        if process is None:
            return
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(CLOSE_S)
