"""Loads the reference model of the KL term: a teacher, or an earlier checkpoint.

Only the log-probs of the policy's sampled ids are taken from it, so both models must read these ids as the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...engines.local.load import load_model
from ...errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def open_reference(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, max_context: int
) -> PreTrainedModel:
    """Returns a model beside the policy `model`, on its device and in its dtype. Without a tokenizer, none is compared.

    Raises ConfigError if it cannot score the policy's rows of up to `max_context` tokens.
    """
    weight = next(model.parameters())

    def check(vocabulary: PreTrainedTokenizerBase) -> None:
        if tokenizer is not None:
            check_vocabulary(f"loss.reference = {name!r}", vocabulary, tokenizer)

    reference: PreTrainedModel
    reference, vocabulary = load_model(name, device=weight.device, dtype=weight.dtype, max_context=max_context, check=check)
    check(vocabulary)
    ids, wanted = (int(each.config.get_text_config().vocab_size) for each in (reference, model))
    if ids < wanted:
        raise ConfigError(
            f"loss.reference = {name!r} has {ids} token ids, but the policy can sample {wanted}: take a model of its family"
        )
    return reference


def check_vocabulary(what: str, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError unless every token of the policy's tokenizer is the same token in the other one."""
    theirs = tokenizer.get_vocab()
    other = next(((word, number) for word, number in policy.get_vocab().items() if theirs.get(word) != number), None)
    if other is not None:
        raise ConfigError(
            f"{what} has another tokenizer than the policy, whose token {other[1]} is {other[0]!r}: token ids are compared one "
            "by one, so take a model of the same family"
        )
