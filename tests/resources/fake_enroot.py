"""A fake `enroot` command: it parses its options as the real one does and runs the real worker command in its place.

`install(folder)` writes it there. It appends its parsed arguments to `folder/asked`, one JSON line for each container.
"""

from __future__ import annotations

import sys
from pathlib import Path

PROGRAM = """#!{python}
import json, os, sys
words = sys.argv[1:]
assert words.pop(0) == "start", words
asked = {{"mounts": [], "env": {{}}, "rw": False}}
while words[0] != "--":
    word = words.pop(0)
    if word == "--mount":
        asked["mounts"].append(words.pop(0))
    elif word == "--env":
        name, _, value = words.pop(0).partition("=")
        asked["env"][name] = value
    elif word == "--rw":
        asked["rw"] = True
    else:
        sys.exit(f"enroot: unknown option {{word}}")
asked["image"], asked["command"] = words[1], words[2:]
asked["secrets"] = [name for name in os.environ if "KEY" in name]
with open({asked!r}, "a") as file:
    file.write(json.dumps(asked) + chr(10))
if asked["image"] != "python":
    sys.exit(f"[ERROR] No such file or directory: {{asked['image']}}")
command = [{python!r} if word == "python3" else word for word in asked["command"]]
os.execve(command[0], command, {{"PATH": os.environ["PATH"], **asked["env"]}})
"""


def install(folder: Path) -> Path:
    program = folder / "enroot"
    program.write_text(PROGRAM.format(python=sys.executable, asked=str(folder / "asked")))
    program.chmod(0o755)
    return folder / "asked"
