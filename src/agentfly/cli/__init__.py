"""The command line: parses arguments, calls the library and prints."""

from .commands import main, make_parser

__all__ = ["main", "make_parser"]
