"""Judges a task of Harbor's: its tests/test.sh runs in a fresh workspace with what the chain changed, and writes a number.

The script and its files come after the chain's, at /tests. It is the task's own judge in the code's surroundings: what it lets
through is not held back here.
"""

from __future__ import annotations

import json
import math
import sys

from ...errors import WorldError
from .box import Fields, Files, Fresh, Lost
from .grade import GradedTests

SCRIPT = r"""
mkdir -p /tmp/tests /tmp/logs/verifier /tmp/logs/agent /tmp/logs/artifacts
cp -r .verifier/tests/. /tmp/tests/; rm -rf .verifier
bash /tests/test.sh >/tmp/logs/verifier/test-stdout.txt 2>&1 </dev/null
printf '\n%s ' RESULT
"$0" -I -c 'import json, os
place = "/tmp/logs/verifier/reward."
if os.path.exists(place + "json"):
    print(json.dumps(json.load(open(place + "json"))))
elif os.path.exists(place + "txt"):
    print(json.dumps({"reward": float(open(place + "txt").read())}))'
"""


async def judge(fresh: Fresh, fields: Fields, kept: Files, limit_s: float) -> GradedTests:
    """Raises WorldError if the script writes no number: that is no judgement of the chain."""
    variables = "".join(f"export {name}={json.dumps(str(value))}\n" for name, value in (fields.get("variables") or {}).items())
    files = {f".verifier/{path}": str(text).encode() for path, text in fields["verifier"].items()}
    try:
        async with fresh({**kept, **files}) as box:
            status, output = await box.run(["/bin/bash", "-c", variables + SCRIPT, sys.executable], b"", limit_s)
    except (Lost, OSError) as error:
        return GradedTests(0, 1, f"the workspace ended: {error}")
    if status is None:
        return GradedTests(0, 1, "the task's tests did not end in time")
    try:
        found = json.loads(output.decode("utf-8", "replace").rpartition("RESULT ")[2])
        reward = float(found["reward"] if "reward" in found else next(iter(found.values())))
    except (ValueError, TypeError, AttributeError, StopIteration, RecursionError):
        raise WorldError("tests/test.sh wrote no number to /logs/verifier/reward.txt or reward.json") from None
    if not math.isfinite(reward):
        raise WorldError(f"tests/test.sh wrote {reward}, which is no reward")
    return GradedTests(int(reward >= 1.0), 1, share=min(1.0, max(0.0, reward)))
