"""Whether a text offers one number beside another: "18 or 25", "18; could also be 25", "Final answer: 18. Final answer: 25"."""

from __future__ import annotations

import re

from .math_compare import is_answer
from .math_parse import MAX_LENGTH

MAX_READ = 20_000
MAX_GAP = 80
_OR = r"(?:or|nor|and/or|xor|ou|o|oder|bzw|oppure|или|eller|lub|veya|atau|nebo|sau|vagy|tai|hoặc|või|ή|أو|या|또는)"
_OFFER = re.compile(
    r"[^\w\n]{0,4}(?:[A-Za-z]{1,15}[^\w\n]{1,3}){0,3}?"
    rf"(?:{_OR}|to|through|vs\.?|versus|minus|plus|times|over|out of|divided by|multiplied by|possibly|maybe|perhaps"
    r"|respectively|unless)\b"
    r"[^\w\n=+*/-]{0,4}(?:(?:maybe|possibly|perhaps|even|about|rather|else|could|might|may|be|the|a|is|it|[a-z]\s?=)[^\w\n]{0,4}){0,3}"
    r"|[^\w\n]{1,3}and[^\w\n]{1,3}|\s?[&|;•∨⊕]{1,2}\s?|\s?\?\s?|\s?—\s?|\s?(?:或者?|または|か|[还還]是)\s?"
    r"|[^\w\n]{0,3}(?:as well as|and also|or,? if [^\d\n]{1,50})[^\w\n]{1,3}"
    r"|\s(?:if|when|unless)\s[^\d\n]{1,50}?(?:[,;]|\b(?:and|or|but|else|otherwise))[^\w\n]{1,3}"  # "2 if n is even, 3 if"
    r"(?:(?:in which case|and|or|else|then|it is|it's)\s){0,2}",
    re.I,
)
_HEDGED = re.compile(  # "possibly 25", "my second guess is 25": another number in the place of an answer
    r"\b(?:(\d[\d,.]*) (?:as|is|being) (?:the|a|my) (?:runner-up|backup|fallback|alternative|second \w+)"
    r"|(?:alternat(?:ive|ively|e)|otherwise|else|failing that|aka|plan b|maybe|perhaps|possibly|(?:not|un)\s?(?:sure|certain)"
    r"|(?:less|least) likely|(?:unless|in which case)(?: (?:it|he|she|they) (?:is|has|had|have|are))?|back-?up|fall-?back"
    r"|(?:also|or) (?:consider|accept|try|take|allow)"
    r"|(?:could|might|may|can)(?: also| well| just as well| equally)? (?:be|equal)|(?:or|else) (?:else|even|it)"
    r"|(?:second|2nd|other|another|next|backup|fallback|alternate|different|my|also) (?:\w+ )?"
    r"(?:guess|answer|choice|option|possibility|candidate|solution|value|bet)s?"
    r"|also (?:possible|plausible|acceptable|valid|works)"
    r"|if (?:not|that|this|it)\b(?: is|'s)?(?: (?:wrong|not|incorrect|false))?)\b"
    r"[^\w\n]{0,4}(?:(?:it|is|it['’]s|was|the|a|be|as|of|about|answer|value|that|might|could|may|also|equal|to|then|try|take|number)"
    r"[^\w\n]{1,4}){0,4}"
    r"(\d[\d,.]*)"
    r"|(?:wait|actually|correction|scratch that|oops|sorry|on second thought|make that|i mean)[^\w\n]{1,4}"
    r"(?:(?:no|actually|it|is|it['’]s|the|answer|should|must|be)[^\w\n]{1,4}){0,5}(\d[\d,.]*)(?!\s?[\w*/+^=-]))",
    re.I,
)
_BESIDE = re.compile(  # right behind an answer, ", 3." or " (3)"; later, "3 is also possible"
    r"(?:^[\s$]*(?:[,;/|([]|[.,]?\s[,;/|([]?(?:or|also|and|it is)\b|,\salso)"
    r"\s?\$?(\d[\d,.]*)(?=[\s$)\].!?]*(?:$|\n|(?<=[.!?])\s+[A-Z\\]))"
    r"|(?<![\d*/+=×^-])\s\$?(\d[\d,.]*)[\s$]{0,2}"
    r"(?:too|(?:is|are|was|would|could|might|may|can|cannot|which|also|works?)\b[^.\d\n]{0,20}\b"
    r"(?:possible|plausible|likely|acceptable|valid|excluded|works?|(?:be|is) (?:right|correct|true)|too))\b)",
    re.I,
)
_NUMBERS = re.compile(  # a text that is little else than numbers: "2 v 3", "one of 2, 3", "(a) 2 (b) 3"
    r"(?:[^=\d]{0,60}(?::|\b(?:of|from|guess(?:es)?|answers?|candidates?|options?|possibilities|solutions?|are)))?[^\w=<>]*"
    r"[-+]?\d[\d,.]*+(?:(?:[^\w=:/+*×^]+|\s+or\s+)[-+]?\d[\d,.]*+)+\W*[^\W\d_]{0,12}\W*"
    r"|[-+]?\d[\d,.]*+[^\w=:\n]*(?!not|or\b|no\b)[^\W\d_]{1,6}(?:\.[a-z]\.)?[^\w=:\n]*[-+]?\d[\d,.]*+\W*[^\W\d_]{0,12}\W*"
)
_LABEL = re.compile(r"\(?\b(?:(?:option|case|guess|choice|candidate|try)\s?[A-D\d]?\s?[:.]|[A-Da-d][).:])\s", re.I)
_AGAIN = re.compile(r"([^\d\n.;,]{2,40}?)[\s:=*]*(-?\$?\d[\d,.]*)[\s*.,;]*(?:or\s)?\1$", re.I)
_NUMBERED = re.compile(r"\b(case|option|answer|guess|choice)\s[A-D\d]\b", re.I)
_ALSO = re.compile(r"(?:also|either|too)\b", re.I)
_RIVAL = re.compile(r"\b(?:second|2nd|other|another|next|backup|fallback|alternate|alternative|possible)\s$", re.I)
_BOX_GAP = re.compile(
    rf"[\s$,\\().;:/|&~?-]{{0,8}}(?:(?:\\text\s?\{{\s?)?(?:{_OR}|and(?: also)?|as well as|also|vs|else|maybe"
    r"|perhaps|possibly|o bien|或者?|または|[还還]是)\s?\}?|q?quad)?[\s$,\\().;:/|&~?-]{0,8}",
    re.I,
)
_RIVAL_KEY = re.compile(
    r"alternat|guess|backup|fallback|answer|maybe|possib|^or$|(?:second|other|next)_?(?:choice|option|value)"
)
_LATE_KEY = re.compile(r"(?:an)?other(?:_?one)?|also|else|second|otherwise|(?:not_?|un)sure|perhaps|2nd|2")


def offers(gap: str) -> bool:
    """Whether the text between two numbers offers the second one beside the first."""
    return len(gap) <= MAX_GAP and bool(_OFFER.fullmatch(gap) or _HEDGED.search(f"{gap}0"))


def joins_boxes(gap: str) -> bool:
    """Whether the text between two boxes or pairs of tags offers the second one beside the first."""
    return len(gap) <= MAX_GAP and bool(_BOX_GAP.fullmatch(gap) or _HEDGED.search(f"{gap}0"))


def second_thoughts(text: str) -> list[str]:
    """The number that the text behind an answer offers in its place: "Second guess: 25"."""
    first = re.search(r"\d[\d,.]*", text)
    start = 0 if first is None or text[:1] == " " else first.end()
    match = _HEDGED.search(text[:MAX_READ], start) or _BESIDE.search(text[start:MAX_READ])
    return [match.group(match.lastindex or 0).rstrip(".,")] if match else []


def said_before(text: str) -> list[str]:
    """The number of the statement before the words that end a text, if it begins with the same words."""
    again = _AGAIN.search(_NUMBERED.sub(r"\1", text[-200:]))
    return [again.group(2).rstrip(".,")] if again else []


def is_another(before: str, rest: str) -> bool:
    """Whether an answer, between these texts, is said to be another one than that before."""
    return bool(_RIVAL.search(before[-40:]) or (_ALSO.match(rest) and re.search(r"\d", before[-MAX_GAP:])))


def only_numbers(text: str) -> list[str]:
    """The numbers of a text that is little else than several numbers."""
    text = _LABEL.sub("", text)
    return re.findall(r"-?\d[\d,.]*", text) if _NUMBERS.fullmatch(text) else []


def is_rival(name: str, value: object, *, late: bool = False) -> bool:
    """Whether a field beside the answer (`late`: after it) offers another one: a number, not the words of a working-out."""
    text = str(value)[:MAX_LENGTH]
    return bool(
        (_RIVAL_KEY.search(name) or (late and _LATE_KEY.fullmatch(name))) and re.search(r"\d", text) and is_answer(text)
    )
