"""Decoding a reply: the text is transformers' own, also where its checks are left out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import transformers

from agentfly.engines.prompt import _decodes_in_rust, decode

from .tiny import byte_tokenizer


def own_text(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("cleans", [False, True])
def test_the_text_is_that_of_the_tokenizer(cleans: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = cleans
    rng = random.Random(0)
    assert _decodes_in_rust(type(tokenizer))
    for length in (0, 1, 7, 60):
        ids = [rng.randrange(259) for _ in range(length)]
        assert decode(tokenizer, ids) == own_text(tokenizer, ids)
    words = [*b"well , it is n't .", 257]
    assert decode(tokenizer, words) == "well , it is n't .<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked() -> None:
    class Own(transformers.PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    class Foreign:
        def decode(self, ids: Any, **options: Any) -> str:
            return "foreign"

    assert decode(Own(tokenizer_object=byte_tokenizer().backend_tokenizer), [5]) == "own"
    assert decode(Foreign(), [5]) == "foreign"
