"""The worker process of the reward `math_verify`: one request per line on stdin, one reply per line on stdout, both JSON.

math-verify computes with SymPy, where a power tower can hold the interpreter or fill the memory. In this process both are
bounded: its parent kills it at a deadline, and its address space is limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys

from math_verify import parse, verify

MAX_MEMORY = 4 * 2**30


def _parse_reference(text: str) -> list[object]:
    """A reference is LaTeX without its delimiters, or a number; math-verify reads LaTeX between delimiters only."""
    return list(parse(text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}", parsing_timeout=None))


def _is_same(prediction: str, answers: list[str]) -> bool:
    predicted = parse(prediction, parsing_timeout=None)
    return any(verify(_parse_reference(answer), predicted, timeout_seconds=None) for answer in answers)


def main() -> None:
    """Answers requests until stdin ends."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not every system can limit an address space
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not look like a reply
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            same = _is_same(request["prediction"], request["answers"])
        except Exception:  # noqa: BLE001 - SymPy raises anything, MemoryError and RecursionError included, for texts like this one
            same = False
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    main()
