"""What CPython itself does with the snippets: `exec` in one module namespace, each snippet in a forked child. Run as a script.

In: JSON {name: [cell, ...]} on stdin. Out: JSON {name: [{"stdout", "value", "error"}, ...]}: what a cell printed, the value of
its last expression, the last line of its error. It imports nothing of the project, so both sides can only agree by being right.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
import traceback
import types


def run(cells: list[str]) -> list[dict[str, str | None]]:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    done = []
    for number, cell in enumerate(cells):
        name = f"<reference {number}>"
        linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
        printed, value, error = io.StringIO(), None, None
        with contextlib.redirect_stdout(printed):
            try:
                body = ast.parse(cell, name).body
                compile(cell, name, "exec", dont_inherit=True)
                last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
                exec(compile(ast.Module(body, []), name, "exec", dont_inherit=True), module.__dict__)
                if isinstance(last, ast.Expr):
                    # The compiler flags of the whole cell (from __future__ ...) do not matter to one expression.
                    found = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), module.__dict__)
                    value = None if found is None else repr(found)
            except Exception as raised:
                error = traceback.format_exception_only(raised)[-1].strip()
        done.append({"stdout": printed.getvalue(), "value": value, "error": error})
    return done


def main() -> None:
    results = {}
    for name, cells in json.load(sys.stdin).items():
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with tempfile.TemporaryDirectory() as folder, os.fdopen(writing, "w") as pipe:
                os.chdir(folder)
                json.dump(run(cells), pipe)
                pipe.flush()
                os.chdir("/")
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            results[name] = json.loads(pipe.read())
        os.waitpid(child, 0)
    json.dump(results, sys.stdout)


main()
