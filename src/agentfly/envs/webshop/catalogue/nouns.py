"""The nouns of a product's name: the part of the score that tells whether a purchase is the right kind of product.

A tagger is a function from a name to its nouns in lower case, in order, with repetitions:

    light   no package: words that are not function words, numbers, measures or likely adjectives and verbs
    hanta   the tagger HanTa (PyPI)                    pip install 'agentfly[webshop]'
    spacy   spaCy with an English model, as the original uses; the model is installed separately
    auto    spacy if a model is installed, else hanta, else light

The score depends on the tagger in a small share of purchases, so a run reports which one it used: `Catalogue.tagger`.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from .... import plugins
from ....errors import ConfigError, MissingExtra
from ...task_sets import read_table

Tagger = Callable[[str], Sequence[str]]
MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")
NAMES = ("light", "hanta", "spacy", "auto")

_WORD = re.compile(r"\w+(?:[-']\w+)*|[^\w\s]")
_CLOSED = frozenset(read_table(__package__, "not_nouns.json"))
# Words of closed classes are listed; open classes are guessed from their endings.
_NOT_NOUN = re.compile(
    r"(?:.{2}(?:able|ible|ful|less|ous|ive|ish|ical|ally|ly|ated|ized|ised|ined|oned|ered|ened|ished|ered|ic|ary|proof|resistant"
    r"|friendly|sided|washed|style))$|.{3}ed$"
)
_MEASURE = re.compile(r"\d")


def light(name: str) -> list[str]:
    """Nouns by simple rules; deterministic and fast."""
    words = (word.lower() for word in _WORD.findall(name))
    return [
        word
        for word in words
        if len(word) > 1
        and word not in _CLOSED
        and not _MEASURE.search(word)
        and not _NOT_NOUN.search(word)
        and word[0].isalpha()
    ]


def given(nouns: Mapping[str, Sequence[str]], otherwise: Tagger = light) -> Callable[[str, str], Sequence[str]]:
    """A lookup of given nouns by product id; other products are tagged by `otherwise`."""
    return lambda asin, title: nouns[asin] if asin in nouns else otherwise(title)


def find_tagger(name: str) -> tuple[str, Tagger]:
    """The tagger of a name, with its resolved name ("auto" resolves to one of the others)."""
    if name not in NAMES:
        raise ConfigError(f"no noun tagger is called {name!r}; there are {', '.join(NAMES)}.")
    if name == "auto":
        name = "spacy" if _spacy_model() else "hanta" if importlib.util.find_spec("HanTa") else "light"
    if name == "light":
        return name, light
    return (f"spacy {_spacy_model()}", _spacy()) if name == "spacy" else (name, _hanta())


def _spacy_model() -> str | None:
    if importlib.util.find_spec("spacy") is None:
        return None
    return next((model for model in MODELS if importlib.util.find_spec(model) is not None), None)


@lru_cache(maxsize=1)
def _spacy() -> Tagger:
    model = _spacy_model()
    if model is None:
        raise MissingExtra(f"the tagger 'spacy' needs spaCy and one of its English models: {', '.join(MODELS)}")
    import spacy

    pipeline = spacy.load(model, disable=["ner", "parser"])

    def tag(name: str) -> list[str]:
        return [token.text.lower() for token in pipeline(name) if token.pos_ in ("NOUN", "PROPN")]

    return tag


@lru_cache(maxsize=1)
def _hanta() -> Tagger:
    try:
        from HanTa import HanoverTagger
    except ModuleNotFoundError as error:
        raise plugins.missing_extra("the noun tagger 'hanta'", "HanTa") from error
    tagger: Any = HanoverTagger.HanoverTagger("morphmodel_en.pgz")

    def tag(name: str) -> list[str]:
        return [word.lower() for word, _, kind in tagger.tag_sent(_WORD.findall(name)) if kind.startswith("N")]

    return tag
