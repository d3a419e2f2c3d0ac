"""Decoding a reply: the text is transformers' own, also where its checks are left out."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import transformers
from tokenizers import decoders

from agentfly.engines.prompt import TokenBytes, _decodes_in_rust, _tables, decode

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


def test_an_added_token_of_any_letters_and_an_unknown_id_are_decoded_as_the_tokenizer_does() -> None:
    tokenizer = copy.deepcopy(byte_tokenizer())
    tokenizer.add_tokens(["世界", "Ġé", "ñ"], special_tokens=True)
    last = len(tokenizer)
    rng = random.Random(1)
    for _ in range(50):
        ids = [rng.choice([rng.randrange(last), last - 1, last - 2, last - 3, last + 50]) for _ in range(20)]
        assert decode(tokenizer, ids) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert isinstance(_tables[tokenizer], TokenBytes)


def test_a_decoder_that_does_more_than_join_bytes_is_asked() -> None:
    strips, replaces = copy.deepcopy(byte_tokenizer()), copy.deepcopy(byte_tokenizer())
    strips.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    replaces.backend_tokenizer.decoder = decoders.Fuse()
    for tokenizer in (strips, replaces):
        ids = [*b" and so on", 257]
        assert decode(tokenizer, ids) == tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
        assert _tables[tokenizer] is None
