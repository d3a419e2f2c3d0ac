"""What host, server and sessions say to each other, as numbers: no kernel and no socket in this file."""

from __future__ import annotations

import struct

NEW, INTERRUPT, SLOW, QUICK, KILL = range(5)
COMMAND = struct.Struct(">BI")
"""Host to server: one of the five, and the number of the session."""
CELL = struct.Struct(">II")
"""Host to session: the length of the code that follows, and the number of the cell."""
LENGTH = struct.Struct(">I")
"""Session to host: the length of the JSON that follows."""
CHUNK = 1 << 16
"""Read at once. Buffers from 128 KiB on are mapped and unmapped by every read."""
