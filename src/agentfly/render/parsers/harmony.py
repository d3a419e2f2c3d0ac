"""Formats in which a reply is a sequence of messages, each with a header that names its channel or recipient.

    <|channel|>analysis<|message|>I multiply.<|end|>
    <|start|>assistant to=functions.multiply<|channel|>commentary json<|message|>{"a": 12}<|call|>        gpt-oss

A message to a tool is a call; one in the channel `analysis`, or to `self`, is thinking; every other one is prose. The prompt
ends with `<|start|>assistant`, and the end of the last message is not part of the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .reply import CallParser, ParsedReply, Parser, ReplyReader, broken, call_from_parts
from .strict_json import json_end

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>", START)
MAX_HEADER = 512

_RECIPIENT = re.compile(r"\bto=([^\s<]{1,128})")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,32})")
_PEOPLE = {"user", "all", "assistant"}


def _recipient(header: str) -> str:
    """The tool that a message is addressed to, or "" if it is none."""
    match = _RECIPIENT.search(header)
    return match[1] if match and match[1] != "self" and match[1] not in _PEOPLE else ""


@dataclass(frozen=True, kw_only=True)
class Harmony(CallParser):
    """`inner` reads the calls in the body of a message to a tool; None: the body is the JSON of the arguments."""

    inner: Parser | None = None

    def __call__(self, text: str) -> ParsedReply:
        # The header of each message tells its thinking; marks inside a message are text.
        return replace(self, thinking=(), opened="")._parse(text)

    def _parse(self, text: str) -> ParsedReply:
        return CallParser.__call__(self, text)

    def read(self, reader: ReplyReader) -> None:
        more, complete = True, True
        while more and (at := reader.find(MESSAGE)) >= 0:
            header = reader.text[max(reader.pos, at - MAX_HEADER) : at]
            begin = inside = at + len(MESSAGE)
            if complete and self.inner is None and _recipient(header) and reader.text.startswith("{", begin):
                # An argument may spell out an end mark. A quote that never closes costs one pass over the text, so after the
                # first one a message ends at its next mark.
                stop, complete = json_end(reader.text, begin)
                inside = stop if complete else begin
            end, mark = reader.first(ENDS, inside)
            reader.pos = len(reader.text) if end < 0 else end if mark == START else end + len(mark)
            more = self._read_message(reader, header, reader.text[begin : end if end >= 0 else len(reader.text)])
        if more:
            self._read_rest(reader)

    def _read_message(self, reader: ReplyReader, header: str, body: str) -> bool:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if name := _recipient(header):
            return self._read_call(reader, name.removeprefix("functions."), body)
        to_self = recipient is not None and recipient[1] == "self"
        if not to_self and (channel is None or channel[1] != "analysis"):
            reader.keep(body)
        return True

    def _read_call(self, reader: ReplyReader, name: str, body: str) -> bool:
        if self.inner is not None:
            calls = self.inner(body).calls
            return reader.add(*(calls or (broken(name, "the message to the tool has no call"),)))
        body = body.strip()
        if body.startswith("{") and (end := json_end(body, 0))[1] and body[end[0] :].strip():
            return reader.add(broken(name, "there is other text after its JSON object"))
        return reader.add(call_from_parts(name, body))

    def _read_rest(self, reader: ReplyReader) -> None:
        rest = reader.text[reader.pos :]
        header = rest[-MAX_HEADER:]
        if CHANNEL not in header and START not in header and not _RECIPIENT.match(header.strip()):
            reader.keep(rest)
        elif (match := _RECIPIENT.search(header)) and match[1] not in (*_PEOPLE, "self"):
            reader.add(broken(match[1].removeprefix("functions."), "it is cut off before its arguments"))
