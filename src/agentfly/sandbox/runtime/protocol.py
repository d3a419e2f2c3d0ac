"""The commands that the trainer sends to the fork server, and the limits that both ends of a session apply.

A command is one packet: `COMMAND`, its number and the number of the session. NEW carries the session's socket as ancillary
data and, after the packet's head, the name of the tree that a workspace begins with. The fork server answers in JSON:

    {"op": "up", ...facts}                                                 once, when it can fork sessions
    {"op": "down", "error"}                                                once, if this tier does not work here
    {"op": "interrupted", "id"}                                            SIGINT was sent
    {"op": "exit", "id", "code", "cpu_s", "oom", "why", "limit", "error"}  the session was reaped; limit: `types.SandboxLimit`
"""

import struct

NEW, INTERRUPT, SLOW, QUICK, KILL = range(5)
COMMAND = struct.Struct(">BI")
MAX_IMAGE_BYTES = 1_500_000
