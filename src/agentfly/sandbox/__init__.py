"""A sandbox for Python sessions: `SandboxServer.start()` gives a server, `server.session()` a session, `session.run(code,
timeout_s)` a `CellResult`. One event loop in the trainer drives thousands of sessions.

    trainer                 server.py (SandboxServer), session.py (SandboxSession), shared_server.py
      |  starts             the code of all processes below is in runtime/
      v
    supervisor              not isolated; makes namespaces and cgroups, ends the fork server with the trainer, cleans up
      |  forks
      v
    fork server             process 1 of a PID namespace; has the interpreter and numpy loaded, sees only the system's libraries
      |  forks, once per session
      v
    session                 isolated from the trainer, from the machine and from other sessions; runs cells

Where the kernel does not limit all of memory and disk, a watchdog process beside the fork server does.

    trainer <-- control socket: commands, exits --> fork server        trainer <-- one socket each: cells, replies --> session

What a session says is data to check. How it ended is what the fork server saw of it, and time is the trainer's clock.
"""

from .limits import TIERS, CellResult, SandboxLimits
from .server import SandboxServer
from .session import SandboxSession

__all__ = ["TIERS", "CellResult", "SandboxLimits", "SandboxServer", "SandboxSession"]
