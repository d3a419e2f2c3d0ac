"""Removes a folder that foreign code has filled: folders nested a hundred thousand deep, beyond PATH_MAX, or without rights.

A folder that is not empty is moved to the top before its content is removed, so neither the depth of the call stack, nor the
length of a path, nor the number of descriptors depends on how deep the folders are:

    top/a/b/c/f     remove the files of `a`; move `b` to top/.0; remove `a`
    top/.0/c/f      the same with top/.0, and so on

Imports the standard library only: the processes of a sandbox load this file without the `agentfly` package.
"""

import contextlib
import itertools
import os
import stat
from collections.abc import Iterator

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> str | None:
    """Removes a folder with all that is in it. Returns None, or why something of it is left. Follows no symbolic link."""
    for left in removal_of(path):
        if left is not None:
            return left
    return None


def removal_of(path: str) -> Iterator[str | None]:
    """Removes a folder step by step: yields None after each step, and once the reason if something of it is left."""
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):  # the code has put a file or a link in its place
            os.unlink(path)
            return
        top = open_folder(path, None)
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path}: {error.strerror}"
        return
    stuck: dict[str, str | None] = {}
    try:
        names = (f".{number}" for number in itertools.count())
        for _ in _empty(top, top, names, stuck):
            yield None
        while waiting := [name for name in os.listdir(top) if name not in stuck]:
            for name in waiting:
                try:
                    folder = open_folder(name, top)
                except OSError as error:
                    stuck[name] = error.strerror
                    continue
                try:
                    for _ in _empty(folder, top, names, stuck):
                        yield None
                finally:
                    os.close(folder)
                try:
                    os.rmdir(name, dir_fd=top)
                except OSError as error:
                    stuck[name] = error.strerror
    except OSError as error:
        stuck["/"] = error.strerror
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        yield f"{path}: {next(iter(stuck.values()), error.strerror)}"


def _empty(folder: int, top: int, names: Iterator[str], stuck: dict[str, str | None]) -> Iterator[None]:
    """Removes the files of a folder, and moves its folders that are not empty to `top`. Yields after each entry."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                elif folder != top:
                    _lift(entry.name, folder, top, names)
            except FileNotFoundError:
                pass
            except OSError as error:
                stuck[entry.name if folder == top else f"/{entry.name}"] = error.strerror
            yield


def _lift(name: str, folder: int, top: int, names: Iterator[str]) -> None:
    """Removes a folder that is empty, and moves any other to `top`."""
    try:
        os.rmdir(name, dir_fd=folder)
        return
    except OSError:
        os.close(open_folder(name, folder))  # only a user who may write to a folder can move it: its entry `..` changes
    free = next(free for free in names if not _exists(free, top))
    os.rename(name, free, src_dir_fd=folder, dst_dir_fd=top)


def _exists(name: str, folder: int) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def open_folder(name: str, folder: int | None) -> int:
    """Opens a folder after giving its owner all rights to it, which the code may have taken away."""
    mode = os.lstat(name, dir_fd=folder).st_mode
    if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:  # chmod follows symbolic links, so it is called for folders only
        with contextlib.suppress(PermissionError):  # another user's folder: root opens it all the same
            os.chmod(name, 0o700, dir_fd=folder)
    return os.open(name, _OPEN, dir_fd=folder)
