"""Run the parts of the test suite one after the other: `make test` and its kin, or `python scripts/run_tests.py [OPTIONS]`.

Every part runs, whatever the part before it said, and the end names what failed with the command that runs it alone.

With `--again`, the failed tests of a part run once more, alone and in their order. A test that then passes is printed as
unsteady and does not fail the run: it belongs in `tests/unsteady.md` until its cause is gone. A test that fails again does.

`--times FILE` writes the seconds that each part, folder, file and slow test took into the section of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The sandbox's tests fill the machine's limits of processes, memory and files on purpose, so they run beside no other test.
SANDBOX = "tests/sandbox"
# More failures than this have a common cause, and running them once more would only take time.
MOST_AGAIN = 40
TITLE = "# Where the time of the tests goes\n\nThe key `TIMES=1` of a command writes its section again."
SLOWEST = 25


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one part of the suite came to: pytest's exit status, and the tests that failed in the first and in the last run."""

    name: str
    status: int
    failed: tuple[str, ...]
    failed_again: tuple[str, ...] | None
    seconds: float
    tests: Counter[str] = field(default_factory=Counter)

    @property
    def files(self) -> Counter[str]:
        """Seconds per file of tests, of one worker."""
        found: Counter[str] = Counter()
        for name, seconds in self.tests.items():
            found[name.partition("::")[0]] += seconds
        return found

    @property
    def unsteady(self) -> tuple[str, ...]:
        if self.failed_again is None:
            return ()
        return tuple(test for test in self.failed if test not in self.failed_again)

    @property
    def lasting(self) -> tuple[str, ...]:
        return self.failed if self.failed_again is None else self.failed_again

    @property
    def good(self) -> bool:
        """Nothing failed for good, and pytest itself got to its end (an interrupted run has a status above 1)."""
        return not self.lasting and (self.status == 0 or (self.status == 1 and bool(self.unsteady)))


def run_pytest(arguments: list[str], cache: Path) -> tuple[int, tuple[str, ...]]:
    """Exit status of pytest, and the tests and fixtures that failed, by node id."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    # Hundreds of processes import the package. Without compiled files each of them takes a second longer.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    status = subprocess.run(command, cwd=ROOT, env=environ, check=False).returncode
    stored = cache / "v" / "cache" / "lastfailed"
    return status, tuple(json.loads(stored.read_text(encoding="utf-8"))) if stored.exists() else ()


def seconds_of_tests(record: Path) -> Counter[str]:
    """Seconds per test function, set-up and tear-down included, of a run that wrote this JUnit record."""
    tests: Counter[str] = Counter()
    if record.exists():
        for case in ET.parse(record).getroot().iter("testcase"):
            parts = (case.get("classname") or "").split(".")
            while parts and not (ROOT / Path(*parts)).with_suffix(".py").exists():  # the last part may be a class
                parts.pop()
            function = (case.get("name") or "").partition("[")[0]
            tests[f"{'/'.join(parts)}.py::{function}"] += float(case.get("time") or 0)
    return tests


def run_part(name: str, arguments: list[str], *, workers: int, again: bool) -> Outcome:
    began = time.monotonic()
    # Files in the order of tests/conftest.py: the longest first, so that the workers end together.
    spread = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers > 1 else []
    with tempfile.TemporaryDirectory() as cache:
        record = Path(cache) / "junit.xml"
        status, failed = run_pytest([*spread, f"--junitxml={record}", *arguments], Path(cache))
        failed_again = None
        if again and status == 1 and 0 < len(failed) <= MOST_AGAIN:
            print(f"\n{len(failed)} failed tests of {name} run once more, alone:", flush=True)
            second, failed_again = run_pytest(["--last-failed", "--last-failed-no-failures=none", *arguments], Path(cache))
            status = max(status, second)
        tests = seconds_of_tests(record)
    return Outcome(name, status, failed, failed_again, time.monotonic() - began, tests)


def write_times(outcomes: list[Outcome], command: str, path: Path) -> None:
    """Write the section of a command, longest first; the sections of other commands stay."""
    tests = sum((each.tests for each in outcomes), Counter[str]())
    files = sum((each.files for each in outcomes), Counter[str]())
    folders: Counter[str] = Counter()
    for name, seconds in files.items():
        folders[str(Path(name).parent)] += seconds
    lines = [f"{command}\n", "| part | seconds from start to end |", "|---|---|"]
    lines += [f"| {each.name} | {each.seconds:.0f} |" for each in outcomes]
    tables = {"folder": folders.most_common(), "file": files.most_common(), "slow test": tests.most_common(SLOWEST)}
    for title, rows in tables.items():
        lines += ["", f"| {title} (2 s or more) | seconds of one worker |", "|---|---|"]
        lines += [f"| {name} | {seconds:.0f} |" for name, seconds in rows if seconds >= 2]
    title, *sections = (path.read_text(encoding="utf-8") if path.exists() else TITLE).rstrip().split("\n\n## ")
    others = [section for section in sections if section.partition("\n")[0] != command]
    path.write_text("\n\n## ".join([title, *sorted([*others, "\n".join(lines)])]) + "\n", encoding="utf-8")


def report(outcomes: list[Outcome]) -> int:
    """Print what every part came to, and return the exit status of the whole."""
    known = (ROOT / "tests" / "unsteady.md").read_text(encoding="utf-8")
    print()
    for outcome in outcomes:
        print(f"{outcome.name}: {'passed' if outcome.good else 'FAILED'} after {outcome.seconds:.0f} s")
        longest = ", ".join(f"{name} {seconds:.0f}" for name, seconds in outcome.files.most_common(8) if seconds >= 1)
        if longest:
            print(f"  longest files, in seconds: {longest}")
        for test in outcome.unsteady:
            print(f"  unsteady: {test}" + ("" if test in known else " (add it to tests/unsteady.md)"))
        for test in outcome.lasting:
            print(f"  failed: {shlex.join([sys.executable, '-m', 'pytest', test])}")
        if not outcome.good and not outcome.lasting:
            print(f"  pytest ended with status {outcome.status}")
    return 0 if all(outcome.good for outcome in outcomes) else 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--again", action="store_true", help="run failed tests once more, alone; what then passes is unsteady")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--fast", action="store_true", help="only the tests that neither train nor run the documentation")
    which.add_argument("--nightly", action="store_true", help="only the tests that `make test` leaves out")
    parser.add_argument("--workers", type=int, default=3, help="processes for the part that may be spread (default: 3)")
    parser.add_argument("--times", type=Path, metavar="FILE", help="write the seconds of each file and of the slowest tests")
    options = parser.parse_args(arguments)
    command, marks = "make test", "not nightly"
    if options.fast:
        command, marks = "make test-fast", "not nightly and not slow"
    elif options.nightly:
        command, marks = "make test-nightly", "nightly"
    parts = {"tests": (["-m", marks, f"--ignore={SANDBOX}"], options.workers), SANDBOX: (["-m", marks, SANDBOX], 1)}
    if options.fast or options.nightly:  # the sandbox's tests are all slow, and all in `make test`
        parts.pop(SANDBOX)
    if options.fast:  # what is slow as a whole is not even imported
        lines = (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
        parts["tests"][0].extend(f"--ignore={line}" for line in lines if line.startswith("tests/") and "::" not in line)
    outcomes = [run_part(name, rest, workers=workers, again=options.again) for name, (rest, workers) in parts.items()]
    if options.times is not None:
        write_times(outcomes, command, options.times)
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
