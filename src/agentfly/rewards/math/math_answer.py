"""Math equality: is the answer in the prediction the same value as the reference?

Comes in: a prediction, prose and all, and the field `answer` (one or several). Goes out: 1 or 0. The answer is taken from a
JSON object with a key `answer`, else from <answer> tags, else from the last \\boxed{}, else after the last "####" or "answer
is", else it is the whole text, else the last number of the last sentence that names one. A value that the text denies ("not
18", "18 is wrong"), bounds ("at least 18") or offers beside another one ("18 or 19", "18; could also be 25") is no answer. The
problem over again is none either ("37*48" for 1776; see `math_form`).

Scale words count ("18 million", "2 dozen"), 18 cents are 0.18, and units of one dimension are converted; all other units are
not compared ("5 cm" is 5). 50% is 50 and 0.5, because data sets write both. If the row has a `question` that asks in cents,
dozens or thousands, a number in that unit is the number. Only the last 20,000 characters of a prediction are read, in linear
time, and no power is multiplied out beyond a bound. Equations other than "x = ..." are compared side by side, not solved.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ...types import Task
from ..answers import alternatives, read_literal
from ..function import FunctionReward
from .math_compare import boxed_spans, expression_of, is_answer, last_boxed, plain_signs, same_answer
from .math_form import stands_in
from .math_offers import is_another, is_rival, joins_boxes, offers, only_numbers, said_before, second_thoughts
from .math_parse import MAX_LENGTH
from .math_words import SCALES, UNITS, is_significant, plain_numbers, spelled_number

__all__ = ["extract_answer", "last_boxed", "math_equal", "same_answer", "tagged_answer"]

MAX_PREDICTION = 20_000
MAX_JSON = 10_000
MAX_PROSE = 1000  # characters around the last number
AFTER_NUMBER = 300
MAX_RUN = 200
MAX_OFFERS = 8
MAX_NESTING = 4
COPY = 40
"""A reply of more characters that is a part of the question is no answer to it."""

_KEYS = ("answer", "final_answer", "finalanswer", "final answer", "result", "value", "solution", "output")
_FENCE = re.compile(r"```[a-z]{0,10}\s*\n?([^`]{1,10000})```\s*$")
_TAG = re.compile(r"<(?:final_)?answer>", re.I)
_TAG_END = re.compile(r"</(?:final_)?answer>", re.I)
_CUE = re.compile(r"####|\banswer\s{0,3}(?:(?:is|was|equals|(?:would|should|must)\sbe)\b|(?:[A-D\d]\s?)?[:=])", re.I)
_FORMULA = re.compile(r"\$([^$]{1,200})\$|\\\(([^\\$]{1,200})\\\)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s?\{([^{}]*)\}")
_BOLD = re.compile(r"(?<![\w)])(?:\*\*|__)(?=\S)|(?<=\S)(?:\*\*|__)(?![\w(])")
_RUN = re.compile(  # a number or a calculation, with the signs around it
    r"(?:\d[eE][+-]?\d|\\(?:frac|dfrac|tfrac|sqrt|cdot|times|div|pi|left|right|pm|[gl]eq?|neq?|approx)\b|\\[$%]"
    r"|[-+*/^(){}\[\]=%!:$€£¥\d.,'√<>~≠≈]|(?<=[\d=+\-*/^)}%]) (?=[\d=+\-*/^(\\$]))+"
)
_LEAD = re.compile(r"(?:[=:,)\]}!' ]|\.(?!\d))*")
_ARROW = re.compile(r"[=-]>|[→⇒∴]|\\[\[\]()]")
_UNIT_POWER = re.compile(r"(?<=(?<![A-Za-z])[cmk]m)\^\{?[23]\}?|(?<=(?<![A-Za-z])m)\^\{?[23]\}?|(?<=ft|in|yd)\^\{?[23]\}?")
_STRUCK = re.compile(  # what a page does not show, or shows as struck out
    r"~~[^~\n]{1,200}~~|\\(?:sout|[bx]?cancel|phantom)\s?\{[^{}]{0,200}\}|<!--(?:[^-]|-(?!->)){0,300}-->"
    r"|<(?:s|del|strike)>[^<]{0,200}</(?:s|del|strike)>|(?m:^%[^\n]*$)",
    re.I,
)
_TERM = re.compile(r"(?<![A-Za-z])[b-zB-HJ-Z\d)]\s?$")  # a variable or a number, but not the words "a" and "I"
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(*])|\n")
_GAP = 80
_WORD = (
    r"(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]{3,5}teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty(?:-[a-z]+)?)\b"
)
_OFFERS = (
    r"(?:(?<=\bor )|(?<=maybe )|(?<=perhaps )|(?<=possibly )|(?<=unless it is )|(?<=alternatively )|(?<=alternatively: )"
    r"|(?<=otherwise )|(?<=else )|(?<=actually )|(?<=guess: )|(?<=guess is ))"
)
_SPELLED = re.compile(rf"{_OFFERS}{_WORD}|\b{_WORD}(?= or (?:\d|{_WORD}))", re.I)
_NOT = re.compile(
    r"(?:\b(?:(?<!if )not|never|hardly|cannot|neither|nor|except|other than|rather than|instead of|anything but"
    r"|no es|no son|nicht|keine?|n['’]est pas|non è|não é|não|не)\b|不是|n['’]t\b|≠|¬|!=|\\neq?\b)"
    r"[^\w\n]{0,4}(?:(?:be|equals?|to|the|number|value|answer|exactly|actually|really|simply|quite|a|is|it|think|believe|correct|"
    r"right|result|as|that|possibly)[^\w\n]{1,4}){0,6}$",
    re.I,
)
_WRONG = re.compile(
    r"[^\w.\n]{0,4}(?:[a-z]{1,15}[^\w.\n]{1,3}){0,3}?(?:"
    r"(?:is|are|was|be|would be|must be|seems|looks)\s(?:(?:definitely|clearly|also|just)\s)?(?:wrong|incorrect|mistaken|false)"
    r"|(?:is|are|was|seems|looks)\s(?:\w{1,10}\s)?too\s(?:low|high|small|large|big|much|many|little|few)"
    r"|(?:[a-z]{1,15},?\s){0,5}?(?:but|though|although|yet|however),?\s(?:it|that|this)\s(?:is|was|must be|seems)\s"
    r"(?:wrong|incorrect|false)"
    r"|(?:(?:is|are|was)\s(?:definitely\s|clearly\s)?not|isn['’]t|aren['’]t|wasn['’]t|cannot be|can['’]t be|could not be)\s"
    r"(?:the\s|a\s)?(?:\w{1,10}\s)?(?:answer|right|correct|true|it|possible|valid|result)|\((?:wrong|incorrect|false)"
    r")\b",
    re.I,
)
_BOUND = re.compile(
    r"(?:\b(?:at least|at most|(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower) than|over|under|above|below|"
    r"(?<!rounds )(?<!sums )(?<!adds )(?<!comes )up to|almost|nearly|exceeds?|half|twice|double|triple|thrice|"
    r"(?:square |cube )?root of|square of|cube of|reciprocal of|opposite of|negative of|inverse of|factorial of|third of|"
    r"quarter of|percent of|times)\b|[<>≤≥±%]|\\[gl]eq?\b|\\pm\b|% of)"
    r"[^\w\n=]{0,4}(?:(?:or|equal|to|of|the|a)[^\w\n=]{1,4}){0,4}$",
    re.I,
)
_OPEN_END = re.compile(
    r"\+|\s(?:degrees\s)?below\s(?:zero|freezing)\b"
    r"|[^\w.\n]{0,3}(?:[a-z]{1,15}\s){0,2}?(?:or|and)\s(?:more|less|fewer|above|below|over|under|up|higher|lower|greater)\b"
    r"|[^\w.\n]{0,3}(?:(?:is|are) (?:\w{3,7} )?(?:possible|plausible|likely)"
    r"|less likely|in the (?:other|second|last)|\w{3,8} guess)\b",
    re.I,
)
_MINUS = re.compile(r"\b(?:minus|negative)\s$", re.I)
_BARE = re.compile(  # a line that is nothing but a number, also in a list or a table
    r"(?:[-*•|]|\(?[A-Za-z\d]{1,2}[.):])?\s?(?!total|sum|answer|result|final)(?:[A-Za-z]{1,12}\s?\|)?\s?([-+]?\$?\d[\d,.]*)\s?\|?",
    re.I,
)
_SUFFIX = re.compile(r"[ \-]?\\?([A-Za-z]+|[¢%])(?:[ \-]([A-Za-z]+|[¢%]))?")
_LIST = re.compile(r"\s?,\s?")
_MONEY = re.compile(r"\$|\bdollars?\b", re.I)


@FunctionReward
def math_equal(prediction: str, answer: object, question: object = "", task: Task | None = None) -> float:
    """1 if the answer in the prediction and the field `answer` are the same mathematical value."""
    if not question and task is not None:
        question = next((message.content for message in reversed(task.messages) if message.role == "user"), "")
    answers = alternatives(answer)
    if prediction.strip() and prediction.strip() in answers:
        return 1.0
    candidates = find_answers(prediction)
    if not candidates or (
        isinstance(question, str) and len(prediction) > COPY and " ".join(prediction.split()) in " ".join(question.split())
    ):
        return 0.0
    asked = _asked_unit(question, candidates) if isinstance(question, str) else None
    plain = [asked.sub("", one) for one in candidates] if asked else candidates
    return float(any(_agree(some, _reference(one), question) for one in answers for some in {tuple(candidates), tuple(plain)}))


def extract_answer(prediction: str) -> str:
    """The part of a prediction that is its answer; empty if it has none."""
    return " or ".join(find_answers(prediction))


def find_answers(prediction: str, nesting: int = 0) -> list[str]:
    """The answer of a prediction; several if it offers several, none if it denies what it names. Only the end is read: an
    answer comes last, and a ramble must not cost more."""
    prediction = prediction[-MAX_PREDICTION:]
    prediction = prediction if nesting else _STRUCK.sub(" ", prediction)
    if nesting > MAX_NESTING:
        return []
    inner = tagged_answer(prediction) if nesting < 3 else None
    if inner is not None:
        behind = _TAG_END.split(prediction)[1:][-1:]
        return [*find_answers(inner, nesting + 1), *(second_thoughts(_spelled(f" {behind[0]}")) if behind else [])]
    boxed = _boxed_answers(prediction)
    if boxed is not None:
        return boxed
    cue = next(iter(deque(_CUE.finditer(prediction), maxlen=1)), None)
    if cue is not None:
        rest = prediction[cue.end() :].lstrip(" \t\n:=*").partition("\n")[0].strip(" *")
        if rest:
            before = prediction[: cue.start()]
            first = find_answers(before, nesting + 1) if is_another(before, rest) else said_before(before + cue.group())
            return [*first, *_clause_answers(rest), *second_thoughts(_spelled(prediction[cue.end() :].lstrip()))]
    whole = prediction.strip()
    if "\n" not in whole and is_answer(whole):
        return [whole]
    numbers = only_numbers(_tidy(whole)) if len(whole) <= MAX_RUN else []
    return numbers[:MAX_OFFERS] or _prose_answers(whole)


def _agree(found: Sequence[str], reference: str, question: object) -> bool:
    if len(found) == 1:
        return same_answer(found[0], reference, formed=True) and not _copied(found[0], reference, question)
    alike = all(same_answer(one, reference) for one in found)  # a working-out may stand before its result
    alike = alike and any(same_answer(one, reference, formed=True) and not _copied(one, reference, question) for one in found)
    return alike or same_answer(", ".join(found), reference, formed=True)


def _copied(found: str, reference: str, question: Any) -> bool:
    if not isinstance(question, str) or not question:
        return False
    tree, question = expression_of(found), plain_signs(question[:MAX_LENGTH])
    if tree is not None and stands_in(question, tree, expression_of(reference)):
        return True
    found, units = found.strip(" ."), {_unit_of(found), _unit_of(reference)}
    if len(units) < 2 or None in units:
        return False
    return bool(re.search(rf"(?<![\w./]){re.escape(found)}(?!\w)", question))  # asks for the amount in another unit


def _unit_of(text: str) -> str | None:
    return next((word for word in re.findall(r"[a-z]+", text.lower()) if word in UNITS), None)


def _reference(answer: str) -> str:
    boxed = last_boxed(answer)
    return boxed if boxed is not None else answer.rpartition("####")[2]


def _asked_unit(question: str, found: Iterable[str]) -> re.Pattern[str] | None:
    """The scale word or "cents" of the answer, if the question asks in that unit."""
    last = _SENTENCE.split(question.strip()[-MAX_LENGTH:])[-1].lower()
    for word in {word.lower() for text in found for word in re.findall(r"[A-Za-z]{4,}|¢", text[:MAX_LENGTH])}:
        stem = "cent" if word == "¢" else word.removesuffix("s")
        named = re.search(rf"\b{stem}s?\b", last) or (
            stem == "cent" and "cent" in question.lower() and not _MONEY.search(question)
        )
        if (stem in SCALES or stem == "cent") and named:
            return re.compile(rf"\b{stem}s?\b|¢", re.I)
    return None


def tagged_answer(text: str) -> str | None:
    """What a JSON object, or the last pair of <answer> tags, gives as the answer."""
    stripped = text.strip()
    fenced = _FENCE.search(stripped)
    above, _, line = stripped.rpartition("\n")
    for candidate in (stripped, fenced.group(1).strip() if fenced else "", line.strip()):
        if candidate.startswith("{") and candidate.endswith("}") and len(candidate) <= MAX_JSON:
            value = _json_answer(candidate)
            if value is not None:
                above = above.rpartition("\n")[2].strip()
                earlier = _json_answer(above[:MAX_JSON]) if candidate is not stripped and above.startswith("{") else None
                return value if earlier is None else f"{earlier} or {value}"
    starts = list(_TAG.finditer(text))
    if starts:
        rest = text[starts[-1].end() :]
        end = _TAG_END.search(rest)
        before = list(_TAG_END.finditer(text, 0, starts[-1].start()))[-1:]
        if end and before and len(starts) > 1 and joins_boxes(text[before[0].end() : starts[-1].start()]):
            return f"{text[starts[-2].end() : before[0].start()]} or {rest[: end.start()]}"
        return rest[: end.start()] if end else None
    return None


def _json_answer(text: str) -> str | None:
    try:
        value = json.loads(text, parse_int=str, parse_float=str, parse_constant=str, strict=False, object_pairs_hook=_merge)
    except (ValueError, RecursionError):
        value = read_literal(text)
    rivals: list[Any] = []
    for _ in range(3):
        if not isinstance(value, dict):
            break
        fields = {str(key).lower(): item for key, item in value.items()}
        key = next((key for key in _KEYS if key in fields), None)
        if key is None:
            return None
        later = list(fields)[list(fields).index(key) + 1 :]  # "other" before the answer is a step on the way to it
        rivals += [item for name, item in fields.items() if name != key and is_rival(name, item, late=name in later)]
        unit = fields.get("unit", fields.get("units", ""))
        value = fields[key]
        if isinstance(unit, str) and unit and isinstance(value, (str, int, float)):
            value = f"{value} {unit}"
    else:
        return None
    values = value if isinstance(value, list) else [value]
    items = [*values, *(each for each in rivals if not any(same_answer(str(each), str(own)) for own in values))]
    if any(item is None or isinstance(item, (dict, list, bool)) for item in items):
        return None
    return ", ".join(map(str, items))


def _merge(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Keeps all values of a key that stands twice."""
    merged: dict[str, list[Any]] = {}
    for key, value in pairs:
        merged.setdefault(key, []).append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in merged.items()}


def _boxed_answers(text: str) -> list[str] | None:
    """The content of the last box, and of boxes that "and", "or" or a comma joins to it; None without a box."""
    spans = boxed_spans(text)
    if not spans:
        return None
    last = first = len(spans) - 1
    while first > 0 and spans[first - 1][3] <= spans[first][0] and joins_boxes(text[spans[first - 1][3] : spans[first][0]]):
        first -= 1
    before, after = text[max(0, spans[first][0] - _GAP) : spans[first][0]], text[spans[last][3] : spans[last][3] + _GAP]
    if _NOT.search(before) or _WRONG.match(after):
        return []
    if last - first >= MAX_OFFERS:
        return []
    contents = [text[start:end] if end - start <= MAX_LENGTH else "" for _, start, end, _ in spans[first:]]
    after = after.lstrip(" $")
    contents[-1] += _suffix(after)
    other = _RUN.search(after)
    if other and re.search(r"\d", other.group()) and offers(after[: other.start()]):
        contents.append(other.group().strip(" .,$"))
    return contents + second_thoughts(_spelled(" " + text[spans[last][3] :]))


def _clause_answers(rest: str) -> list[str]:
    """The answers in the clause after "answer is"."""
    clause = _SENTENCE.split(_tidy(rest[:MAX_PROSE]))[0].strip()
    shown = clause.rstrip("!") if re.search(r"\d!+$", clause) else clause
    if is_answer(shown):
        return [shown]
    runs = _runs(clause)
    return _choose(clause, runs, range(len(runs)), lists=True) if runs else [rest]


def _prose_answers(text: str) -> list[str]:
    """The last number of the last sentence that names one and does not deny it; the whole text where no sentence has one."""
    last = re.search(r"\d\D*$", text[-MAX_PREDICTION:])
    end = len(text) if last is None else len(text) - len(last.group()) + AFTER_NUMBER
    near = _tidy(text[max(0, end - MAX_PROSE) : end])
    lines = [_BARE.fullmatch(line.strip()) for line in near.splitlines() if line.strip()]
    bare = [line.group(1).rstrip(".,") for line in itertools.takewhile(bool, reversed(lines)) if line]
    if 1 < len(bare) <= MAX_OFFERS:
        return bare[::-1]
    sentences = [sentence for sentence in _SENTENCE.split(near) if re.search(r"\d", sentence)]
    formulas = _FORMULA.findall(sentences[-1] if sentences else near)
    formula = "".join(formulas[-1]) if formulas else ""
    if _is_formula(formula):
        return [formula.strip()]
    for place, sentence in list(enumerate(sentences))[:-4:-1]:
        runs = _runs(sentence)
        chosen = _choose(sentence, runs, reversed(range(len(runs))))
        if chosen and place and chosen[-1:] == second_thoughts(f" {sentence}"):
            earlier = _runs(sentences[place - 1])
            return [*_choose(sentences[place - 1], earlier, reversed(range(len(earlier)))), *chosen]
        if chosen or not all(_is_denied(sentence, runs, i) for i in range(len(runs))):
            return chosen
    return [] if sentences else [text]


def _is_formula(text: str) -> bool:
    """Whether a text between dollar signs is mathematics with variables, not the words between two amounts of money."""
    if not re.search(r"[A-Za-z]", text) or text[:1].isspace() != text[-1:].isspace():
        return False
    return not re.search(r"(?<![\\A-Za-z])[A-Za-z]{4}|\s[A-Za-z]{2,}\s", text) and is_answer(text)


def _spelled(text: str) -> str:
    """The text with the numbers in words that it offers as numbers."""
    return _SPELLED.sub(lambda match: spelled_number(match.group()), text)


def _tidy(text: str) -> str:
    text = _spelled(_TEXT.sub(r" \1 ", plain_signs(text)))
    return plain_numbers(_BOLD.sub("", _ARROW.sub(": ", _UNIT_POWER.sub("", text))))


def _runs(text: str) -> list[tuple[int, int]]:
    """Where numbers and calculations stand in a sentence."""
    spans = []
    for match in _RUN.finditer(text):
        result = max(match.start(), text.rfind("=", match.start(), match.end() - 1))
        lead = _LEAD.match(text, result, match.end())
        start = lead.end() if lead else result
        run = text[start : match.end()].rstrip(".,:!=('[{ +*/-^")
        if run.count("(") > run.count(")") and re.match(r"\s[a-z]{3}", text[match.end() : match.end() + 4]):
            run = run.rpartition(" (")[0]  # "18 (9 eggs at 2 dollars)"
        if re.search(r"\d", run):
            spans.append((start, start + len(run)))
    return spans


def _is_denied(text: str, runs: Sequence[tuple[int, int]], index: int) -> bool:
    return bool(_NOT.search(_before(text, runs, index)) or _WRONG.match(_after(text, runs, index)))


def _before(text: str, runs: Sequence[tuple[int, int]], index: int) -> str:
    start = runs[index - 1][1] if index else 0
    return text[max(start, runs[index][0] - _GAP) : runs[index][0]]


def _after(text: str, runs: Sequence[tuple[int, int]], index: int) -> str:
    end = runs[index + 1][0] if index + 1 < len(runs) else len(text)
    return text[runs[index][1] : min(end, runs[index][1] + _GAP)]


def _choose(text: str, runs: Sequence[tuple[int, int]], order: Iterable[int], lists: bool = False) -> list[str]:
    """The first run in the order that the text does not deny, with those that it offers beside it."""

    def joined(left: int) -> bool:
        gap = text[runs[left][1] : runs[left + 1][0]]
        return "round" not in gap and (offers(gap) or bool(lists and _LIST.fullmatch(gap)))

    for index in order:
        if _is_denied(text, runs, index):
            continue
        if _BOUND.search(_before(text, runs, index)) or _OPEN_END.match(_after(text, runs, index)):
            return []
        first = last = index
        while first > 0 and joined(first - 1):
            first -= 1
        while last + 1 < len(runs) and joined(last):
            last += 1
        return [_amount(text, runs, i) for i in range(first, last + 1)] if last - first < MAX_OFFERS else []
    return []


def _amount(text: str, runs: Sequence[tuple[int, int]], index: int) -> str:
    """A run with its sign and the word after it that changes its value."""
    start, end = runs[index]
    number = text[start:end] if end - start <= MAX_RUN else ""
    if number[:1] in ("-", "+") and _TERM.search(text[max(0, start - 4) : start]):
        return ""  # the end of an expression with variables
    if number[:1] in ("-", "+") and (number[1:2] == " " or text[start - 1 : start].isalpha()):
        number = number[1:]  # a dash: COVID-19
    if number.count("(") != number.count(")"):
        number = number.strip("()")
    sign = "-" if _MINUS.search(text[max(0, start - 12) : start]) else ""
    return sign + number + _suffix(text[end : end + 40])


def _suffix(after: str) -> str:
    """The words after a number that change its value, with a space before them."""
    match = _SUFFIX.match(after)
    if match is None:
        return ""
    words = [word for word in match.groups() if word and not after.startswith("-", match.end())]
    num_words = max((i + 1 for i, word in enumerate(words) if is_significant(word)), default=0)
    joined = after[:1].isalpha() and not num_words and len(match.group(1)) == 1  # "18x" is no number
    return match.group(1) if joined else "".join(f" {word}" for word in words[:num_words])
