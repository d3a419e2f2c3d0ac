"""The processes below the trainer: supervisor, fork server and sessions.

They load this folder as `agentfly_sandbox.sandbox.runtime`, without the `agentfly` package, so its files import only
the standard library, each other, and `cells` and `removal` of `interpreter`. The trainer itself imports `protocol` alone.

    supervisor.py        supervisor: namespaces, cgroups, cleaning up
    fork_server.py       fork server: preloads, forks sessions, reaps them
    watchdog.py          watchdog: sums that no kernel limit covers, folders to remove; with usage.py
    isolation.py         what each process does to itself before it runs foreign code; with landlock.py, seccomp.py, cgroup.py
    session_process.py   session: the loop that runs cells
    syscalls.py          the system calls that Python's library lacks
    protocol.py          the commands of the control socket
"""
