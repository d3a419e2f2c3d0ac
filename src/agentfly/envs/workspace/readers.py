"""Reads tasks in the formats of others: Harbor and Terminal-Bench folders, and rows in the shape of SWE-bench.

    rows = read_harbor("tasks/")                      one row per folder with a task.toml or task.yaml
    rows = read_swe("verified.jsonl", repos="repos/") rows with repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS

Nothing is pulled and nothing is built: what a task needs and a workspace cannot give is one sentence of a DataError, or, with
`skip=True`, of a warning. The system of a workspace is this machine's, read-only; a Dockerfile may therefore copy files, set
variables and its folder, and name an image, which is not used.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...errors import DataError
from .grade import check_tests
from .trees import check_path, check_source

log = logging.getLogger(__name__)
Row = dict[str, Any]
Item = TypeVar("Item")
PLACES = ("/app", "/testbed", "/workspace", "/work", "/root", "/home", "/")
"""Folders of a Dockerfile that mean the tree of the workspace."""
IGNORED = ("FROM", "LABEL", "MAINTAINER", "ARG", "EXPOSE", "SHELL", "STOPSIGNAL", "HEALTHCHECK", "CMD", "ENTRYPOINT", "USER")
MAX_FILE = 1 << 20


def read_harbor(path: str | Path, *, skip: bool = False) -> list[Row]:
    """Tasks of a folder, or of the folders in it, in the format of Harbor (task.toml) or Terminal-Bench (task.yaml).

    A row has `question`, `files`, `verifier` (the files of tests/) and `tests_limit_s`. It is judged by its own tests/test.sh,
    which writes /logs/verifier/reward.txt or reward.json: what that script lets through is the task's."""
    top = Path(path).expanduser()
    if not top.is_dir():
        raise DataError(f"{top}: no such folder of tasks")
    folders = [top] if _is_task(top) else sorted(folder for folder in top.iterdir() if folder.is_dir() and _is_task(folder))
    if not folders:
        raise DataError(f"{top}: neither it nor a folder in it has a task.toml or a task.yaml")
    return list(_kept(folders, _read_harbor_task, skip))


def read_swe(path: str | Path, *, repos: str | Path, skip: bool = False) -> list[Row]:
    """Tasks of a JSONL file in the shape of SWE-bench. `repos` holds a clone of each repository: repos/OWNER__NAME or NAME."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(f"{file}: no such file of tasks")
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{file}: line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"{file}: line {number} is {type(row).__name__} and not an object")
        rows.append((f"{file} line {number}", row, Path(repos).expanduser()))
    return list(_kept(rows, lambda item: swe_row(*item), skip))


def _kept(items: Iterable[Item], read: Callable[[Item], Row], skip: bool) -> Iterator[Row]:
    for item in items:
        try:
            yield read(item)
        except DataError as error:
            if not skip:
                raise
            log.warning("left out: %s", error)


# ---- Harbor ----


def _is_task(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("task.toml", "task.yaml"))


def _read_harbor_task(folder: Path) -> Row:
    if not (folder / "task.toml").is_file():
        raise DataError(f"{folder}: a task.yaml is Terminal-Bench's old format: convert it with `harbor tasks migrate`")
    try:
        about = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{folder / 'task.toml'} is not TOML: {error}") from error
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise DataError(f"{folder}: a task needs {name}")
    environment, verifier = about.get("environment") or {}, about.get("verifier") or {}
    for name, what in (("steps", "several steps"), ("gpus", "GPUs"), ("mcp_servers", "MCP servers"), ("tpu", "TPUs")):
        if about.get(name) or environment.get(name):
            raise DataError(f"{folder}: the task has {what}, and a workspace has none")
    if verifier.get("environment_mode") == "separate":
        raise DataError(f"{folder}: its verifier needs an environment of its own, and a workspace has none")
    if (folder / "environment" / "docker-compose.yaml").is_file():
        raise DataError(f"{folder}: the task needs several containers (docker-compose.yaml), and a workspace is one")
    files, variables = _read_dockerfile(folder / "environment")
    tests = {f"tests/{path}": text for path, text in _texts(folder / "tests").items()}
    row = {
        "question": (folder / "instruction.md").read_text(encoding="utf-8").strip(),
        "files": files, "variables": variables, "verifier": tests,
        "name": str((about.get("task") or {}).get("name") or folder.name),
        "tests_limit_s": min(600.0, float(verifier.get("timeout_sec") or 600)),
    }  # fmt: skip
    check_source(row)
    return row


def _read_dockerfile(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The files and variables that a Dockerfile puts into the tree. Raises DataError for a line that a workspace cannot do."""
    file = folder / "Dockerfile"
    if not file.is_file():
        return {}, {}
    files: dict[str, str] = {}
    variables: dict[str, str] = {}
    workdir = "/"
    text = re.sub(r"\\\n", " ", file.read_text(encoding="utf-8"))
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        word = word.upper()
        if not word or word.startswith("#") or word in IGNORED:
            continue
        if word == "WORKDIR":
            workdir = rest.strip() if rest.strip().startswith("/") else f"{workdir.rstrip('/')}/{rest.strip()}"
        elif word == "ENV":
            parts = shlex.split(rest)
            pairs = [part.split("=", 1) for part in parts] if "=" in (parts or [""])[0] else [[*parts[:1], " ".join(parts[1:])]]
            variables |= {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
        elif word in ("COPY", "ADD"):
            _copy(folder, [part for part in shlex.split(rest) if not part.startswith("--")], workdir, files)
        else:
            raise DataError(f"{file}: a workspace cannot do `{line.strip()[:80]}`: its system is this machine's, read-only")
    return files, variables


def _copy(folder: Path, parts: list[str], workdir: str, files: dict[str, str]) -> None:
    if len(parts) < 2:
        raise DataError(f"{folder}/Dockerfile: COPY needs a source and a target")
    *sources, target = parts
    place = target if target.startswith("/") else f"{workdir.rstrip('/')}/{target}"
    top = next((top for top in (workdir, *PLACES) if f"{place}/".startswith(f"{top.rstrip('/')}/")), "/")
    inner = place[len(top.rstrip("/")) :].strip("/").removeprefix("./").strip(".")
    for source in sources:
        path = (folder / source).resolve()
        if not path.is_relative_to(folder.resolve()) or not path.exists():
            raise DataError(f"{folder}/Dockerfile copies {source!r}, which is not in its folder")
        if path.is_dir():
            files |= {check_path(f"{inner}/{name}".strip("/")): text for name, text in _texts(path).items()}
        else:
            whole = target.endswith("/") or not inner or len(sources) > 1
            files[check_path(f"{inner}/{path.name}".strip("/") if whole else inner)] = _text(path)


def _texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _text(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE:
        raise DataError(f"{path} is larger than {MAX_FILE >> 20} MB: give the task its files as a folder, in the field 'tree'")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is no text: give the task its files as a folder, in the field 'tree'") from None


# ---- SWE-bench ----


def swe_row(where: str, row: Mapping[str, Any], repos: Path) -> Row:
    """One row in the shape of SWE-bench as a task. Raises DataError, whose sentence begins with `where`."""
    for name in ("repo", "base_commit", "problem_statement", "test_patch"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise DataError(f"{where}: the field {name!r} is missing")
    owner = row["repo"].replace("/", "__")
    places = [repos / owner, repos / row["repo"], repos / row["repo"].rpartition("/")[2]]
    clone = next((place for place in places if place.is_dir()), None)
    if clone is None:
        raise DataError(f"{where}: no clone of {row['repo']} in {repos} ({owner} or {places[2].name})")
    names = {key: _names(row.get(key.upper()), f"{where}: {key.upper()}") for key in ("fail_to_pass", "pass_to_pass")}
    if not names["fail_to_pass"]:
        raise DataError(f"{where}: FAIL_TO_PASS names no test")
    made = {
        "question": row["problem_statement"].strip(), "repo": str(clone), "commit": row["base_commit"],
        "tests": patched_files(where, row["test_patch"], clone, row["base_commit"]), **names,
    }  # fmt: skip
    check_tests(made)
    return made


def _names(value: object, where: str) -> list[str]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if not isinstance(value, list | tuple | None) or not all(isinstance(name, str) for name in value or ()):
        raise DataError(f"{where} is not a list of names of tests")
    return list(value or ())


def patched_files(where: str, patch: str, clone: Path, commit: str) -> dict[str, str]:
    """The files of a patch as they are after it: path and text. Raises DataError for a patch that does not fit."""
    from .trees import layer_of, read_file

    layer = layer_of({"repo": str(clone), "commit": commit})
    made: dict[str, str] = {}
    for part in re.split(r"^diff --git .*\n", patch, flags=re.MULTILINE)[1:]:
        new = re.search(r"^\+\+\+ (?:b/)?(.+)$", part, re.MULTILINE)
        if new is None or new[1].strip() == "/dev/null":
            continue
        path = check_path(new[1].strip())
        before = (read_file(layer, path) or b"").decode("utf-8", "replace").splitlines(keepends=True)
        made[path] = "".join(_apply(where, path, before, part))
    if not made:
        raise DataError(f"{where}: the test patch changes no file")
    return made


def _apply(where: str, path: str, before: list[str], part: str) -> list[str]:
    after: list[str] = []
    place = 0
    for hunk in re.split(r"^(?=@@ )", part, flags=re.MULTILINE)[1:]:
        head, *lines = hunk.splitlines(keepends=True)
        start = re.match(r"@@ -(\d+)(?:,(\d+))? ", head)
        if start is None:
            raise DataError(f"{where}: a hunk of {path} has no position")
        begin = max(0, int(start[1]) - (0 if start[2] == "0" else 1))
        after += before[place:begin]
        place = begin
        for line in lines:
            sign, rest = line[:1], line[1:]
            if sign in (" ", "-") or line == "\n":
                if place >= len(before) or before[place].rstrip("\n") != (rest if sign.strip() or sign == " " else line).rstrip(
                    "\n"
                ):
                    raise DataError(f"{where}: the test patch does not fit {path} at line {place + 1}")
                if sign != "-":
                    after.append(before[place])
                place += 1
            elif sign == "+":
                after.append(rest)
            elif sign == "\\" and after:
                after[-1] = after[-1].rstrip("\n")
    return after + before[place:]
