"""The documentation is true: its snippets run, its tables are what the code says, its links lead somewhere.

The Python blocks of a page run in order, in one namespace and one empty folder with `recipes/` and `examples/` in it; shell
lines run one by one in the same folder, which is that of one process.
Training is cut to miniature size (SMALL); `make` and `pip` lines are checked, not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from agentfly.cli import make_parser
from agentfly.recipes import recipes
from tests.forks import call_in_fork

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "toml", "text"}
SMALL = {
    "train.steps": 1,
    "train.validate_every": 0,
    "rollout.num_tasks": 2,
    "rollout.num_chains": 2,
    "data.train_count": 32,
    "data.validation_count": 4,
}
READ_BY = {
    "eval": {"data.train_count", "data.validation_count"},
    "sft": {"train.steps", "train.validate_every", "rollout.num_tasks", "data.train_count", "data.validation_count"},
}


@dataclass
class Block:
    """A fenced block. `checked`: a text block that must be what the block before it printed."""

    language: str
    text: str
    line: int
    checked: bool = False

    @property
    def file_name(self) -> str | None:
        """`# file: shop.py` as the first line means: this is that file."""
        found = re.match(r"# file: (\S+)\n", self.text)
        return found[1] if found else None


def read_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    inside: Block | None = None
    marked = False
    for number, line in enumerate(text.splitlines(), 1):
        if inside is not None:
            if line == "```":
                blocks.append(inside)
                inside = None
            else:
                inside.text += line + "\n"
        elif line.startswith("```"):
            inside = Block(line[3:].strip(), "", number, marked)
            marked = False
        elif line.strip():
            marked = line.strip() == "<!-- output -->"
    assert inside is None, f"the block at line {inside.line} is not closed"
    return blocks


# ---- running a page --------------------------------------------------------------------------------------------------


@dataclass
class PageRun:
    """Runs the blocks of one page in the current folder; raises on the first that does not hold."""

    name: str
    space: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})
    printed: str = ""

    def __post_init__(self) -> None:
        self.runner = asyncio.Runner()

    def run(self, blocks: list[Block]) -> None:
        with self.runner:
            for block in blocks:
                try:
                    self.run_block(block)
                except BaseException as error:
                    error.add_note(f"in {self.name}, the {block.language} block at line {block.line}")
                    raise

    def run_block(self, block: Block) -> None:
        if block.language == "text":
            if block.checked:
                assert _lines(block.text) == _lines(self.printed), (
                    f"the page says\n{block.text}\nbut this was printed\n{self.printed}"
                )
            return
        if block.file_name:
            Path(block.file_name).write_text(block.text, encoding="utf-8")
            return
        output = io.StringIO()
        try:
            with contextlib.redirect_stdout(output):
                if block.language == "python":
                    self.run_python(block)
                elif block.language == "bash":
                    for line in block.text.replace("\\\n", " ").splitlines():
                        if line.strip():
                            run_line(line.strip())
                elif block.language == "toml":
                    tomllib.loads(block.text)
                else:
                    raise AssertionError(f"blocks are {', '.join(sorted(LANGUAGES))}, not {block.language!r}")
        finally:
            self.printed = output.getvalue()
            sys.stdout.write(self.printed)

    def run_python(self, block: Block) -> None:
        padded = "\n" * block.line + block.text  # so that a traceback names the line of the page
        code = compile(padded, self.name, "exec", flags=PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, self.space)
        if inspect.iscoroutine(result):
            self.runner.run(result)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_line(line: str) -> None:
    """One shell line: our own commands in this process (torch loads once), make and pip looked at, the rest by bash."""
    words = shlex.split(line)
    command, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if command == "make":
        done = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    elif command == "pip":
        check_pip(rest)
    elif command == "pre-commit":
        assert (ROOT / ".pre-commit-config.yaml").is_file()
    elif command == "cd":
        os.chdir(rest[0])
    elif command == "agentfly" and rest[0] in ("fetch", "view"):  # it would download, or serve until it is stopped
        make_parser().parse_args(rest)
    elif command == "agentfly" and rest[0] == "sweep":  # tests/cli/test_sweep.py trains one
        run_agentfly([*rest, "--dry-run"])
    elif command == "agentfly":
        run_agentfly(miniature([match for word in rest for match in (sorted(glob(word)) if "*" in word else [word])]))
    elif command == "python":
        run_script(rest)
    else:
        subprocess.run(["bash", "-c", line], check=True, timeout=300)


def check_pip(words: list[str]) -> None:
    """Every extra that is named exists."""
    assert words[0] == "install", words
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [name for word in words for found in re.findall(r"\[(.+)\]", word) for name in found.split(",")]
    assert wanted or {".", "agentfly"} & set(words), f"pip {' '.join(words)} installs nothing of ours"
    assert set(wanted) <= set(project["optional-dependencies"]), wanted


def miniature(words: list[str]) -> list[str]:
    """The same command with little to do: overrides behind the config file, the newest checkpoint for a named one."""
    words = [_existing_checkpoint(word) for word in words]
    configs = [index for index, word in enumerate(words) if word.endswith(".toml") or word in recipes()]
    if words[0] == "train" and "=" in words[-1] and not configs:  # from keys alone
        configs = [0]
    if words[0] not in ("train", "sft", "eval") or not configs:
        return words
    place = configs[0] + 1
    while place < len(words) and "=" in words[place] and not words[place].startswith("-"):
        place += 1
    small = {key: value for key, value in SMALL.items() if words[0] == "train" or key in READ_BY[words[0]]}
    return [*words[:place], *(f"{key}={value}" for key, value in small.items()), *words[place:]]


def _existing_checkpoint(word: str) -> str:
    found = re.fullmatch(r"(.*?)([\w./-]+/checkpoints)/step-\d+", word)
    if not found:
        return word
    return found[1] + str(max(Path(found[2]).glob("step-*")))


def run_agentfly(words: list[str]) -> None:
    from agentfly.cli import main

    try:
        code = main(words)
    except SystemExit as error:
        code = int(error.code or 0)
    assert code == 0, f"agentfly {' '.join(words)} ended with {code}"


def run_script(words: list[str]) -> None:
    script = Path(words[0])
    if words[0].startswith("docs/"):  # it would write into the project
        assert (ROOT / script).is_file(), f"there is no {script}"
        return
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[:0] = words, [str(script.parent.resolve())]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def shrink_training() -> None:
    """`agentfly.train` and `agentfly.sft` called from Python get the same miniature size."""
    import dataclasses

    import agentfly

    train, sft = agentfly.train, agentfly.sft

    def small_train(agent: Any, data: Any = None, **settings: Any) -> Any:
        return train(agent, data, **({} if data is None else settings | SMALL))

    def small_sft(config: Any, **options: Any) -> Any:
        return sft(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1)), **options)

    vars(agentfly).update(train=small_train, sft=small_sft)


def run_page(page: Path, folder: Path) -> None:
    for name in ("recipes", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    os.chdir(folder)
    sys.path.insert(0, "")
    blocks = read_blocks(page.read_text(encoding="utf-8"))
    if any("train" in block.text or "examples" in block.text for block in blocks if block.language in ("python", "bash")):
        shrink_training()
    PageRun(page.name).run(blocks)


# ---- tests -----------------------------------------------------------------------------------------------------------


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def has_code(page: Path) -> bool:
    return any(block.language != "text" for block in read_blocks(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=page_id)
def test_every_snippet_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    folder, log = tmp_path / "page", tmp_path / "log"
    folder.mkdir()
    assert call_in_fork(run_page, page, folder, log=log, environ=environ, timeout_s=800) == 0, log.read_text()[-8000:]


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- generated" in page.read_text(encoding="utf-8")], ids=page_id)
def test_the_tables_of_a_page_are_what_the_code_says(page: Path, generate: Any) -> None:
    text = page.read_text(encoding="utf-8")
    assert generate.generated(text) == text, "run: python docs/generate.py"


def test_every_config_key_and_metric_is_documented() -> None:
    from agentfly.config import keys
    from agentfly.watch.metrics import METRICS

    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [key for key, *_ in keys() if f"`{key}`" not in configuration] == []
    assert [name for name in METRICS if f"`{name}`" not in metrics] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_named_checkpoints_are_those_that_the_runs_of_the_page_write(page: Path) -> None:
    """The steps of the recipe, or those that a line of the page sets."""
    text = page.read_text(encoding="utf-8")
    recipe = tomllib.loads((ROOT / "recipes" / "quickstart.toml").read_text(encoding="utf-8"))
    written = {recipe["train"]["steps"], *map(int, re.findall(r"train\.steps=(\d+)", text))}
    assert {int(step) for step in re.findall(r"/step-(\d+)", text)} <= written


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in anchors, f"{page.name} links to {target}; {found.name} has {anchors}"


def test_the_readme_has_a_program_by_line_15() -> None:
    first = next(block for block in read_blocks((ROOT / "README.md").read_text(encoding="utf-8")) if block.language == "python")
    assert first.line <= 15
    assert 'ReactAgent("pocket"' in first.text


# ---- the checker itself ----------------------------------------------------------------------------------------------


def test_blocks_are_read_with_their_language_line_and_mark() -> None:
    text = "# T\n```python\nx = 1\n```\n\n<!-- output -->\n```text\n1\n```\nand\n```text\n2\n```\n"
    assert [(b.language, b.line, b.text, b.checked) for b in read_blocks(text)] == [
        ("python", 2, "x = 1\n", False),
        ("text", 7, "1\n", True),
        ("text", 11, "2\n", False),
    ]


def test_blocks_share_a_namespace_and_may_await(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        Block("python", "import asyncio\nasync def f():\n    return 4\n", 1),
        Block("python", "print(await f())\n", 2),
        Block("text", "4\n", 3, checked=True),
    ]
    PageRun("page").run(blocks)
    assert capsys.readouterr().out == "4\n"


@pytest.mark.parametrize(
    "blocks",
    [
        [Block("python", "print(1)", 1), Block("text", "2\n", 2, checked=True)],
        [Block("python", "undefined", 1)],
        [Block("bash", "false", 1)],
        [Block("bash", "make no-such-target", 1)],
        [Block("bash", "pip install 'agentfly[no-such-extra]'", 1)],
        [Block("bash", "agentfly no-such-command", 1)],
        [Block("toml", "a = ", 1)],
        [Block("yaml", "a: 1", 1)],
    ],
    ids=lambda blocks: blocks[-1].text.strip(),
)
def test_a_page_that_is_wrong_is_found(blocks: list[Block]) -> None:
    with pytest.raises((AssertionError, NameError, subprocess.CalledProcessError, tomllib.TOMLDecodeError)):
        PageRun("page").run(blocks)


def test_training_lines_are_made_small_behind_their_config() -> None:
    words = miniature(["train", "a.toml", "algorithm=ppo", "--dry-run"])
    assert words[:3] == ["train", "a.toml", "algorithm=ppo"]
    assert words[-1] == "--dry-run"
    assert "train.steps=1" in words
    assert miniature(["tools", "list"]) == ["tools", "list"]
