"""Formats in which the name stands between marks and the arguments are a JSON object after it.

<｜tool▁call▁begin｜>multiply<｜tool▁sep｜>{"a": 12}<｜tool▁call▁end｜>                                        deepseek
<|tool_call_begin|>functions.multiply:0<|tool_call_argument_begin|>{"a": 12}<|tool_call_end|>             kimi
[TOOL_CALLS]multiply[CALL_ID]9Ae3bDc2F[ARGS]{"a": 12}                                                     mistral
<function=multiply>{"a": 12}</function>                                                                   functionary
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...types import ToolCall
from .json_calls import JsonCalls
from .reply import MAX_NAME, CallParser, ReplyReader, broken, call_from_parts, clean_name

REACH = 4 * MAX_NAME


@dataclass(frozen=True, kw_only=True)
class NamedJson(CallParser):
    """An opening mark, a head that matches `head` (with the groups `name` and perhaps `id`), JSON, the closing mark.

    head      matched against the text between the mark and the first "{", at most REACH characters.
    between   text that may stand between the JSON and the closing mark.
    skip      marks around a block of calls.
    shape     how a call looks, for the model.
    lists     after the mark a JSON list of calls may come instead.
    """

    opening: str
    head: re.Pattern[str]
    closing: str = ""
    between: str = ""
    skip: tuple[str, ...] = ()
    shape: str
    lists: bool = False

    def write(self, calls: Sequence[ToolCall]) -> str:
        texts = []
        for index, call in enumerate(calls):
            shape = self.shape.replace('{"argument": value}', "{...}").replace("NAME:0", f"NAME:{index}")
            shape = shape.replace("ID<", f"{call.id or index}<").replace("NAME", call.name)
            texts.append(shape.replace("{...}", json.dumps(call.arguments, ensure_ascii=False)))
        around = self.skip if len(self.skip) == 2 else ("", "")
        return "".join([around[0], *texts, around[1]])

    def read(self, reader: ReplyReader) -> None:
        while reader.seek(self.opening, skip=self.skip):
            if self.lists and self._reads_list(reader):
                continue
            reader.add(self._read(reader))

    def _read(self, reader: ReplyReader) -> ToolCall:
        head = reader.text[reader.pos : reader.pos + REACH].partition(self.opening)[0]
        if self.closing:
            head = head.partition(self.closing)[0]
        head = head.partition("{")[0]
        match = self.head.fullmatch(head)
        reader.pos += len(head)
        if match is None or not reader.at("{"):
            call = broken(match["name"] if match else head.strip().partition("\n")[0], f"write {self.shape}")
            return reader.close(call, self.opening, self.closing) if self.closing else call
        call = call_from_parts(match["name"], reader.take_json(self.closing, self.opening).removesuffix(self.between or "\0"))
        given = clean_name(match.groupdict().get("id") or "")
        if given and not call.error:
            call = replace(call, id=given)
        return reader.close(call, self.opening, self.closing, self.between) if self.closing else call

    def _reads_list(self, reader: ReplyReader) -> bool:
        reader.skip_space()
        if not reader.at("[", "{") or reader.at(self.opening) or self.head.match(reader.text, reader.pos):
            return False
        reader.add(*JsonCalls()._calls(reader.take_json(self.closing, self.opening)))
        return True


@dataclass(frozen=True, kw_only=True)
class Recipients(CallParser):
    """Functionary v3.2: the reply is a sequence of messages to recipients; `all` is the user, every other one is a tool.

        >>>all
        I multiply.>>>multiply
        {"a": 12}

    The prompt ends with the first `>>>`.
    """

    mark: str = ">>>"

    def read(self, reader: ReplyReader) -> None:
        while mark := reader.seek(self.mark, bare=_LETTERS):
            match = _RECIPIENT.match(reader.text, reader.pos)
            called = match is not None and reader.text.startswith("{", match.end())
            if match is None or (mark != self.mark and match[1] != "all" and not called):
                reader.keep(mark if mark == self.mark else "")
                continue
            reader.pos = match.end()
            if called:
                reader.add(call_from_parts(match[1], reader.take_json(self.mark)))
            elif match[1] != "all":
                reader.add(broken(match[1], 'after the name comes a line break and one JSON object: {"argument": value}'))


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_"
_RECIPIENT = re.compile(r"([A-Za-z_][\w.\-]{0,127})\n\s{0,8}")
