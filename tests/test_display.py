"""What values show in a notebook: whole, escaped, within the limit, without a script; and data frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agentfly.display import MAX_BYTES, curve_svg, safe, trajectory_html
from agentfly.errors import MissingExtra
from agentfly.runs import RunReader, RunStore
from agentfly.training import TrainResult
from agentfly.training.evaluation import Evaluation
from agentfly.types import Completion, Message, Outcome, RunResult, Task, ToolCall, ToolResult, Trajectory, Turn

PAYLOADS = [
    "<script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "'><svg onload=alert(1)>",
    "\x1b[2J\x00\x9b",
    "&lt;b&gt; & <b>",
    "\ud800 half",
    "abc\u202egnp.exe",
]


def reply(text: str) -> Completion:
    ids = [*text.encode("utf-8", "replace"), 257]
    return Completion(text=text, token_ids=ids, logprobs=[-0.5] * len(ids), versions=[0] * len(ids))


def chain(text: str = "Answer: 84", *, turns: int = 2, observation: str = "84", **changes: Any) -> Trajectory:
    messages = [Message("system", f"sys {text}"), Message("user", f"12 x 7? {text}")]
    played = []
    for number in range(turns):
        said = f"turn {number} {text}"
        messages += [Message("assistant", said), Message("tool", observation, name=f"multiply{text}")]
        call, result = ToolCall("multiply"), ToolResult(observation=observation)
        played.append(Turn([1], number == 0, reply(said), (call,), (result,), reward=0.5, sampled_s=0.25))
    given = {"outcome": Outcome.FINISHED, "prediction": text, "reward": 1.0, "components": {f"exact{text}": 1.0}, "error": text}
    return Trajectory(f"c1{text}", Task(f"t7{text}", tuple(messages[:2])), 0, messages, played, **(given | changes))


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("br", "img", "polyline"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def finish(self) -> None:
        self.close()
        assert not self._open


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.finish()
    return reader


ALLOWED = {"div", "span", "b", "i", "br", "pre", "details", "summary", "table", "tr", "th", "td", "svg", "polyline", "text"}


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_text_becomes_markup(payload: str) -> None:
    every = [chain(payload), RunResult([chain(payload)] * 2, 2, 1.0), TrainResult(Path(payload.replace("\0", "")), 1)]
    every[2].before = every[2].after = {f"validation/{payload}": 1.0}
    every[2].sample = chain(payload)
    every.append(Evaluation({f"validation/{payload}": 1.0}, [chain(payload)], 1))
    for value in every:
        html = value._repr_html_()
        found = read(html)
        assert set(found.tags) <= ALLOWED
        assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href")]
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
        html.encode("utf-8")


def test_a_chain_has_a_fold_for_each_turn_and_a_colour_for_what_was_sampled() -> None:
    html = chain(turns=3)._repr_html_()
    found = read(html)
    assert found.tags.count("details") == 2 + 3
    assert html.count("rgba(46,160,67,.16)") == 3 + 1  # three replies and the legend
    assert "turn 1 · 18 tokens · multiply" in "".join(found.text)
    failed = chain(outcome=Outcome.WORLD_FAILURE, reward=None)._repr_html_()
    assert "rgba(46,160,67,.16)" not in failed and "cannot be trained on" in failed


def test_the_learners_record_decides_the_colour() -> None:
    one = chain()
    size = len(one.turns[0].completion.token_ids)
    html = trajectory_html(one, [True] * 3 + [False] * (2 * size - 3))
    assert f"3 of {size} tokens trained" in html and f"0 of {size} tokens trained" in html
    assert html.count("rgba(46,160,67,.16)") == html.count("rgba(210,153,34,.14)") == 1 + 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: chain(turns=2000),
        lambda: chain("x" * 20_000, turns=40, observation="é" * 300_000),
        lambda: RunResult([chain(turns=30)] * 3000, 1, 1.0),
        lambda: RunResult([chain("&" * 10_000, turns=30)] * 60, 1, 1.0),
    ],
    ids=["turns", "texts", "chains", "escapes"],
)
def test_a_fragment_stays_within_its_limit_and_says_what_is_left_out(make: Callable[[], Any]) -> None:
    html = make()._repr_html_()
    assert len(html.encode()) <= MAX_BYTES
    assert len(html) > MAX_BYTES / 10
    assert "more" in html
    read(html)


def test_a_notebook_gets_html_and_plain_text() -> None:
    result = RunResult([chain()], 1, 1.0)
    bundle = result._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == repr(result)


def test_the_real_display_of_ipython_shows_it() -> None:
    formatters = pytest.importorskip("IPython.core.formatters", reason="IPython is not installed: pip install ipython")
    data, _ = formatters.DisplayFormatter().format(chain())
    assert set(data) == {"text/plain", "text/html"}


NOTEBOOK = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from agentfly.runs import RunReader
from agentfly.types import RunResult
from tests.test_display import PAYLOADS, chain, make_run
texts = chain(" ".join(PAYLOADS))
"""
CELLS = {
    "a trajectory": "texts",
    "a result": "RunResult([texts, texts], 2, 1.0)",
    "a run": "run = RunReader(make_run(Path({folder!r})))\nrun",
    "several": "display(texts)\nprint('between')\ndisplay(run)",
    "a closed run": "run.close()\nprint(run)",
}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of a notebook that a real kernel has run, by the name of the cell."""
    why = "no notebook to run: pip install nbclient ipykernel"
    nbclient = pytest.importorskip("nbclient", reason=why)
    pytest.importorskip("ipykernel", reason=why)
    from nbformat import v4

    first = NOTEBOOK.format(path=[str(Path(__file__).parents[1]), *sys.path])
    folder = tmp_path_factory.mktemp("notebook")
    codes = [first, *(code.replace("{folder!r}", repr(str(folder))) for code in CELLS.values())]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(code) for code in codes])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return dict(zip(["", *CELLS], (cell.outputs for cell in notebook.cells), strict=True))


def test_a_kernel_shows_a_result_a_trajectory_and_a_run_as_html(executed: dict[str, list[Any]]) -> None:
    assert executed[""] == []
    for name, words in (("a trajectory", "turn 1"), ("a result", "2 chains"), ("a run", "last values")):
        (output,) = executed[name]
        assert output.output_type == "execute_result"
        assert set(output.data) == {"text/plain", "text/html"}
        assert words in " ".join(read(output.data["text/html"]).text)
        assert len(output.data["text/plain"]) < 3000
    assert executed["a trajectory"][0].data["text/html"].count("<details") == 4  # system, user and two turns
    kinds = [output.output_type for output in executed["several"]]
    assert kinds == ["display_data", "stream", "display_data"]
    assert "(closed)" in executed["a closed run"][0].text


def test_no_text_of_a_model_becomes_markup_in_a_notebook(executed: dict[str, list[Any]]) -> None:
    shown = [output.data["text/html"] for outputs in executed.values() for output in outputs if "data" in output]
    assert len(shown) == 5
    for html in shown:
        found = read(html)
        assert set(found.tags) <= ALLOWED
        assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href")]
    assert "<script>alert(1)</script>" in "".join(read(shown[0]).text)  # as text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", "".join(shown))


def test_representations_are_short() -> None:
    result = TrainResult(Path("runs/x"), 20, {"validation/success": 0.4075}, {"validation/success": 0.94})
    assert repr(result) == "<TrainResult runs/x: 20 steps, held-out success 0.407 -> 0.94>"
    assert repr(TrainResult(Path("runs/x"), 3)) == "<TrainResult runs/x: 3 steps>"
    many = Evaluation({"validation/success": 0.5, "validation/pass_at_4": float("nan")}, [chain()] * 8, 4)
    assert repr(many) == "<Evaluation 8 chains, 4 per task: success 0.5, pass_at_4 nan>"
    assert len(repr(chain("x" * 1000))) < 3000


def make_run(folder: Path) -> Path:
    with RunStore(folder / "run.db") as store:
        for step in (1, 2, 3):
            store.add_trajectories(step, "train", [chain(f"<b>{step}</b>")])
            store.add_metrics(step, {"reward/mean": step / 4, "<script>": 1.0})
    return folder


def test_a_run_shows_its_curve_its_last_values_and_a_chain(tmp_path: Path) -> None:
    with RunReader(make_run(tmp_path)) as run:
        html = run._repr_html_()
        found = read(html)
        assert set(found.tags) <= ALLOWED
        assert "polyline" in found.tags
        assert "0.25 → 0.75" in "".join(found.text)
        assert "step 3" in repr(run) and "3 chains" in repr(run)
    assert "closed" in repr(run)  # also in a debugger, after the run was closed


def test_data_frames_have_rows_of_chains_turns_and_steps(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="pandas is not installed: pip install 'agentfly[pandas]'")
    result = RunResult([chain(), chain()], 2, 1.0)
    assert list(result.to_pandas()["reward"]) == [1.0, 1.0]
    assert list(chain(turns=3).to_pandas()["turn"]) == [0, 1, 2]
    assert list(Trajectory("a", Task("b", ())).to_pandas().columns)[:2] == ["turn", "reply"]
    assert len(Evaluation({}, [chain()], 1).to_pandas()) == 1
    trained = TrainResult(Path("x"), 7, history=[{"reward/mean": 0.5}, {"reward/mean": 0.6}])
    assert list(trained.to_pandas()["step"]) == [6, 7]
    with RunReader(make_run(tmp_path)) as run:
        frame = run.to_pandas()
        assert list(frame["step"]) == [1, 2, 3] and list(frame["reward/mean"]) == [0.25, 0.5, 0.75]
        assert list(run.to_pandas("chains")["step"]) == [1, 2, 3]


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[pandas\]'"):
        RunResult([chain()], 1, 1.0).to_pandas()


def test_a_curve_needs_two_points() -> None:
    assert curve_svg([]) == curve_svg([1.0, float("nan")]) == ""
    assert curve_svg([1.0, float("nan"), 1.0]).count(",") == 2


def test_a_long_text_says_how_much_is_missing() -> None:
    assert safe("<" * 10, 4) == "&lt;" * 4 + "<i> ... 6 more characters</i>"
