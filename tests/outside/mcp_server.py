"""An MCP server for tests: `python mcp_server.py [stdio | PORT] [FOLDER]`. Writes its pid to FOLDER."""

import os
import sys
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("notes")
notes: list[str] = []
EXTRA = os.environ.get("EXTRA_TOOL")


@server.tool()
def add_note(text: str, times: int = 1) -> str:
    """Add a note."""
    notes.extend([text] * times)
    return f"{len(notes)} notes"


@server.tool(name="list-notes")
def list_notes() -> list[str]:
    """List all notes."""
    return notes


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("secret of the server")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    import anyio

    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def die() -> str:
    """End the server."""
    print("the server dies", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
    time.sleep(60)
    return ""


@server.tool()
def picture() -> list:
    """A picture."""
    return ["a picture:", Image(data=b"\x89PNG", format="png")]


@server.tool()
def variables() -> list[str]:
    """The names of the environment variables."""
    return sorted(os.environ)


if EXTRA:

    @server.tool(name=EXTRA)
    def extra() -> str:
        """One more tool."""
        return "more"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        Path(sys.argv[2], str(os.getpid())).touch()
    if sys.argv[1:2] in ([], ["stdio"]):
        server.run("stdio")
    else:
        server.run("streamable-http", port=int(sys.argv[1]))
