"""Where the file tree of a task comes from, and the folder from which the sandbox takes it.

A task names its tree in one of three ways, or has none:

    files    {"path": "text", ...}: small trees, sent with the task
    tree     a folder, or an archive (.tar, .tar.gz, .tgz, .tar.xz, .zip), on this machine
    repo     a local git repository; `commit` names the commit (by default HEAD). The tree has no history

A folder, archive or commit is unpacked once per process into a store. All workspaces share it as their lowest layer. A tree
holds regular files, folders, and links that stay inside it; anything else is a DataError that names it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath

from ...errors import ConfigError, DataError
from ...sandbox.interpreter.removal import remove_tree

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".zip")
MAX_BYTES = 4 << 30
GIT_S = 120.0
_lock = threading.Lock()
_layers: dict[tuple[str, str, str], str] = {}  # by repo, tree and commit: what was unpacked is not looked at again


@cache
def store() -> str:
    """The folder of this process's trees. It is removed when the process ends."""
    path = tempfile.mkdtemp(prefix="agentfly-trees-")
    os.chmod(path, 0o711)  # sessions of the tier landlock go through it by name
    owner = os.getpid()
    os.mkdir(f"{path}/empty", 0o755)
    Path(path, "empty", "file").write_text("")
    atexit.register(lambda: remove_tree(path) if os.getpid() == owner else None)
    return path


def check_source(fields: Mapping[str, object]) -> None:
    """Raises DataError if the fields name no tree that can be made."""
    named = [name for name in ("files", "tree", "repo") if fields.get(name)]
    if len(named) > 1:
        raise DataError(f"a task has one tree, not both {named[0]!r} and {named[1]!r}")
    if fields.get("commit") and not fields.get("repo"):
        raise DataError("the field 'commit' needs the field 'repo', a local git repository")
    if fields.get("files"):
        small_files(fields["files"])
    for name in named:
        if name != "files" and not os.path.exists(str(fields[name])):
            raise DataError(f"the field {name!r} names {fields[name]}, and there is no such file or folder")
    if (path := str(fields.get("tree") or "")) and os.path.isfile(path) and not path.endswith(ARCHIVES):
        raise DataError(f"{path} is neither a folder nor an archive ({', '.join(ARCHIVES)})")


def small_files(files: object) -> dict[str, bytes]:
    """The files of a task as bytes. Raises DataError for a path that leaves the tree."""
    if not isinstance(files, Mapping):
        raise DataError(f"the field 'files' maps paths to texts, and is not {type(files).__name__}")
    made = {}
    for path, content in files.items():
        if content is None:
            continue  # a table's row with other rows' paths
        made[check_path(path)] = content.encode() if isinstance(content, str) else bytes(content)
    return made


def check_path(path: object) -> str:
    """A path relative to the tree, without "." in it. Raises DataError if it leaves the tree."""
    pure = PurePosixPath(path) if isinstance(path, str) else PurePosixPath()
    if not isinstance(path, str) or pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise DataError(f"the path {path!r} is not a path inside the tree")
    return str(pure)


def layer_of(fields: Mapping[str, object]) -> str:
    """The name of the task's tree in the store, unpacked if it is not there yet; empty for a task without one. Blocks."""
    repo, tree, commit = (str(fields.get(name) or "") for name in ("repo", "tree", "commit"))
    known = _layers.get((repo, tree, commit))
    if known is not None:
        return known
    check_source(fields)
    with _lock:
        if repo:
            sha = _git(repo, "rev-parse", "--verify", f"{commit or 'HEAD'}^{{commit}}").decode().strip()
            layer = _layer(f"git {os.path.realpath(repo)} {sha}", lambda to: _unpack_commit(repo, sha, to))
        elif tree:
            unpack = _copy_folder if os.path.isdir(tree) else _unpack
            layer = _layer(f"tree {os.path.realpath(tree)}", lambda to: unpack(tree, to))
        else:
            layer = ""
        _layers[repo, tree, commit] = layer
    return layer


def names_of(layer: str) -> set[str]:
    """The paths of all files of a tree."""
    top = os.path.join(store(), layer)
    found = set()
    for folder, folders, files in os.walk(top):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found |= {os.path.relpath(os.path.join(folder, name), top) for name in (*files, *links)}
    return found


def read_file(layer: str, path: str) -> bytes | None:
    """A regular file of a tree; None if it has none of this path."""
    place = os.path.join(store(), layer, path)
    if not layer or os.path.islink(place) or not os.path.isfile(place):
        return None
    return Path(place).read_bytes()


def _layer(key: str, unpack: Callable[[str], None]) -> str:
    name = sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]
    place = os.path.join(store(), name)
    if os.path.isdir(place):
        return name
    half = f"{place}.part"
    try:
        os.mkdir(half, 0o755)
        unpack(half)
        _tidy(half)
        os.rename(half, place)
    finally:
        remove_tree(half)
    return name


def _tidy(top: str) -> None:
    """Makes everything readable by all users, removes set-user-id bits, and refuses what a tree cannot hold."""
    size = 0
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            seen = os.lstat(path)
            if stat.S_ISLNK(seen.st_mode):
                target = os.path.normpath(os.path.join(folder, os.readlink(path)))
                if os.path.isabs(os.readlink(path)) or not f"{target}/".startswith(f"{top}/"):
                    os.unlink(path)  # it would lead to a file of the machine, or nowhere
                continue
            if not (stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)):
                raise DataError(f"the tree holds {os.path.relpath(path, top)!r}, which is neither a file, a folder nor a link")
            size += seen.st_size
            if size > MAX_BYTES:
                raise DataError(f"the tree is larger than {MAX_BYTES >> 30} GB")
            os.chmod(path, 0o755 if stat.S_ISDIR(seen.st_mode) or seen.st_mode & 0o100 else 0o644)


def _copy_folder(path: str, to: str) -> None:
    shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".git"))


def _unpack(path: str, to: str) -> None:
    try:
        if path.endswith(".zip"):
            with zipfile.ZipFile(path) as packed:
                for name in packed.namelist():
                    check_path(name)
                packed.extractall(to)
        else:
            with tarfile.open(path) as packed_tar:
                packed_tar.extractall(to, filter=_inside)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise DataError(f"{path} could not be unpacked: {error}") from error


def _inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Leaves out links that leave the tree, as `_tidy` does. Raises TarError for a file that would."""
    try:
        return tarfile.data_filter(member, path)
    except (tarfile.AbsoluteLinkError, tarfile.LinkOutsideDestinationError):
        return None


def _unpack_commit(repo: str, commit: str, to: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(_git(repo, "archive", "--format=tar", commit))
        file.seek(0)
        with tarfile.open(fileobj=file) as packed:
            packed.extractall(to, filter=_inside)


def _git(repo: str, *arguments: str) -> bytes:
    """Runs git on a local repository without its hooks and configuration of the user."""
    quiet = {"PATH": os.environ.get("PATH", os.defpath), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "safe.directory=*", "-C", repo, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, env=quiet, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise ConfigError("a task with the field 'repo' needs git: install it") from None
    except subprocess.TimeoutExpired:
        raise DataError(f"git took longer than {GIT_S:g} s to read {repo}") from None
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason"]
        raise DataError(f"git cannot read {' '.join(arguments[-1:])} of {repo}: {why[-1]}")
    return done.stdout
