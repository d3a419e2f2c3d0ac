"""The tokenizer of the pocket models: byte-level BPE trained on the demonstrations, and dialogues as training ids.

Any UTF-8 text round-trips. Digits are single tokens, so that numbers can be copied; names of tools are whole words, so that
they can be copied; the fixed text around them (prompt lines, JSON, short thoughts) may merge across words, which is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat import (
    CODE_FIRST_LINE,
    CODE_HOW,
    IM_END,
    IM_START,
    PAD,
    REACT_FIRST_LINE,
    REACT_HOW,
    extension_text,
    start_text,
    template_text,
)

from agentfly.pocket.demos import Demo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY = 1280
MAX_LENGTH = 1024
SPECIAL = (PAD, IM_START, IM_END)
# Not special: they are part of what the model says or reads and survive decoding.
ADDED = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
    REACT_FIRST_LINE,
    REACT_HOW,
    CODE_FIRST_LINE,
    CODE_HOW,
)

WORD = r"[^\W\d]+"
SPLITS = "|".join(
    (
        r"\d",
        r"```python\nprint\(",
        r"[^\w\s]*\n```(?!\w)",
        r"(?:system|user|assistant)\n(?:Observation:(?: (?=\d))?)?",
        r"Thought: [^\d\n]*",
        r"(?:\nTools:)?\n-(?= )",
        r"\nAction:",
        r"This tool call could not be read: [^\d\n]*",
        r"Bad arguments for(?= )",
        r"\n?Answer:(?: (?=\d))?",
        rf'\nInput: \{{"{WORD}": "?',
        rf', "{WORD}": "?',
        rf"\((?:{WORD}\??: |\):)[^\d\n]*",
        r"You may call these tools:\n",
        r"\nTo call one, reply:\n",
        r'\n\{"name": name, "arguments": arguments\}\n',
        r'\n?\{"name": "',
        rf'", "arguments": \{{"{WORD}": "?',
        r'", "description": "[^\d\n]*',
        r'"?\}+\n?',
        rf" ?{WORD} (?=\d)",
        rf" ?{WORD}",
        r" ?[^\w\s]+ (?=\d)",
        r" ?[^\w\s]+",
        r"\s+",
    )
)


def train_tokenizer(
    texts: Iterable[str], vocabulary: int = VOCABULARY, *, splits: str = SPLITS, added: Sequence[str] = ADDED
) -> Tokenizer:
    """A BPE tokenizer with exactly `vocabulary` entries, or fewer where the texts have no more to merge.

    Nothing merges across the pieces that `splits` cuts a text into; each of `added` is one token wherever it stands.
    """
    import re

    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(splits), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL, *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The trainer does not take added tokens out of the text, the encoder does: cut them out so that both see the same pieces.
    fixed = re.compile("|".join(re.escape(token) for token in (*SPECIAL, *added)))
    tokenizer.train_from_iterator((part for text in texts for part in fixed.split(text) if part), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in added])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """In the form that AutoTokenizer loads, chat template included."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=template_text(),
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    ).save_pretrained(folder)


def demo_pieces(demo: Demo) -> list[tuple[str, str]]:
    """A dialogue as the pieces a rollout tokenises one by one: ("context" | "learn" | "skip", text)."""
    first = next(i for i, message in enumerate(demo.messages) if message["role"] == "assistant")
    pieces = [("context", start_text(demo.messages[:first], demo.schemas))]
    learn = iter(demo.learn)
    for message in demo.messages[first:]:
        if message["role"] == "assistant":
            pieces.append(("learn" if next(learn) else "skip", message["content"] + IM_END))
        else:
            pieces.append(("context", extension_text([message])))
    return pieces


def encode_demo(tokenizer: Any, demo: Demo) -> tuple[list[int], list[int]]:
    """Ids, and a mask that is 1 on the tokens of replies to be learnt, end of turn included."""
    return encode_demos(tokenizer, [demo])[0]


def encode_demos(tokenizer: Any, demos: Sequence[Demo]) -> list[tuple[list[int], list[int]]]:
    """`encode_demo` of many: a piece that comes again, as most do, is encoded once."""
    pieces = [demo_pieces(demo) for demo in demos]
    texts = list(dict.fromkeys(text for each in pieces for _, text in each))
    encoded = {text: one.ids for text, one in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True)}
    rows = []
    for each in pieces:
        ids: list[int] = []
        mask: list[int] = []
        for kind, text in each:
            new = encoded[text]
            ids += new
            mask += [int(kind == "learn")] * len(new)
        rows.append((ids, mask))
    return rows


def corpus(demos: Iterable[Demo]) -> Iterable[str]:
    """What the tokenizer is trained on: the pieces of dialogues."""
    return (text for demo in demos for _, text in demo_pieces(demo))
