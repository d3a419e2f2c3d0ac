"""Count the package and print a table of its sizes: `python scripts/house_figures.py [FOLDER]`.

FOLDER is another checkout. The counters are those of tests/house, so a figure here and a limit there mean the same.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONG_FUNCTION = 60


def figures(root: Path) -> dict[str, str]:
    """The rows of the table, for the package in `root`."""
    sys.path.insert(0, str(root))
    from tests.house import reading

    trees = {path: reading.tree_of(path) for path in reading.FILES}
    texts = {path: path.read_text(encoding="utf-8") for path in reading.FILES}
    lengths = sorted(len(text.splitlines()) for text in texts.values())
    code = sum(map(reading.lines_of_code, reading.FILES))
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    spans = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    classes = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    names = [name for tree in trees.values() for name in top_level_names(tree) if not name.startswith("_")]
    shared = {name for name in classes if classes.count(name) > 1}
    folders = [path.parent for path in reading.FILES]
    graph = reading.import_graph()
    tests = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (root / "tests").rglob("*.py"))
    return {
        "files / lines / lines of code": f"{len(lengths)} / {sum(lengths):,} / {code:,}",
        "file median / p90 / longest": f"{statistics.median(lengths):.0f} / {lengths[len(lengths) * 9 // 10]} / {lengths[-1]}",
        f"functions over {LONG_FUNCTION} lines; longest": (
            f"{100 * sum(span > LONG_FUNCTION for span in spans) / len(spans):.1f} %; {max(spans)}"
        ),
        "folders; most modules in one": f"{len(set(folders))}; {max(map(folders.count, set(folders)))}",
        "longest import chain; circles of modules": (f"{len(reading.longest_chain(graph))}; {len(reading.circle_of(graph))}"),
        "public names at the top level": f"{len(names):,}",
        "class names that stand for several classes": str(len(shared)),
        "annotations `Any`": str(sum(len(re.findall(r": Any\b", text)) for text in texts.values())),
        "config keys": str(num_config_keys(root)),
        "lines of tests / lines of the package": f"{tests / sum(lengths):.2f}",
    }


def top_level_names(tree: ast.Module) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return [node.name for node in tree.body if isinstance(node, kinds)]


def num_config_keys(root: Path) -> int:
    page = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    return len(set(re.findall(r"^\| `([\w.]+)`", page, flags=re.MULTILINE)))


def main() -> None:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    if not (root / "tests" / "house" / "reading.py").is_file():
        sys.exit(f"{root} has no tests/house/reading.py: give the folder of a checkout")
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False)
    print(f"| | {found.stdout.strip() or root.name} |\n|---|---|")
    for name, value in figures(root).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
