"""OpenAI Responses: items to a Call, an Answer to a response or its typed events.

A reply is several items of a history: reasoning, message, calls. Items that follow each other in this order are one message.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import field as empty
from typing import Unpack

from ..types import Message, ToolCall
from .calls import Answer, Call
from .chat import CONSTRAINED, error_body
from .wire import (
    Given,
    Json,
    RequestMarks,
    as_json,
    asked,
    call_of,
    content,
    event,
    field,
    function,
    hint,
    new_id,
    objects,
    opened,
    refuse,
    refuse_others,
    required,
    unique,
)

__all__ = ["ItemHistory", "ResponsesExchange", "error_body"]

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "background": ((False,), "is not supported: wait for the answer, or stream it"),
    "conversation": ((), "is not supported: send the history, or previous_response_id"),
    "prompt": ((), "is not supported: send the text of the prompt"),
    "top_logprobs": ((0,), "is not supported: answers have no log-probs"),
    "max_tool_calls": ((), "is not supported: this server runs no tools"),
    "presence_penalty": ((0,), "must be 0: the model is sampled without penalties"),
    "frequency_penalty": ((0,), "must be 0: the model is sampled without penalties"),
    "truncation": (("disabled",), "must be 'disabled': a history is never cut"),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_STAGES = {"reasoning": 0, "message": 1, "function_call": 2}
_TEXTS: dict[str, tuple[str, Json]] = {
    "message": ("response.output_text", {"logprobs": []}),
    "reasoning": ("response.reasoning_text", {}),
}
_SERVER_SIDE = ("web_search", "web_search_preview")


@dataclass(slots=True)
class ItemHistory:
    """What was said so far: the messages, and the thinking of assistant messages by their index."""

    messages: list[Message] = empty(default_factory=list)
    thinking: dict[int, str] = empty(default_factory=dict)


class ResponsesExchange:
    """A request to /v1/responses. `recall` returns the history up to a response of the same key; None if it is unknown."""

    def __init__(self, body: Given, recall: Callable[[str], ItemHistory | None], **marks: Unpack[RequestMarks]) -> None:
        refuse_others(body, REFUSED)
        self.streams = field(body, "stream", bool, False)
        self.stored = field(body, "store", bool, True)
        if field(field(body, "text", dict, {}), "format", dict, {}).get("type", "text") != "text":
            refuse(f"text.format {CONSTRAINED}")
        self._choice = choice = body.get("tool_choice") or "auto"
        if choice not in ("auto", "none", "required"):
            refuse(f"tool_choice {CONSTRAINED}: send 'auto' or 'none'")
        if choice == "required" or body.get("parallel_tool_calls") is False:
            hint("tool_choice 'required'" if choice == "required" else "parallel_tool_calls false")
        self._wants_encrypted = "reasoning.encrypted_content" in field(body, "include", list, [])
        self._previous = field(body, "previous_response_id", str)
        before = ItemHistory() if self._previous is None else recall(self._previous)
        if before is None:
            refuse(f"there is no response {self._previous[:80]!r} of this key: send the whole history")
        read = _Items(before)
        self._given = {key: body.get(key) for key in ("instructions", "metadata", "temperature", "top_p", "max_output_tokens")}
        given = body.get("input")
        for item in (
            [{"role": "user", "content": given}] if isinstance(given, str) else objects(field(body, "input", list, []), "input")
        ):
            read.add(item)
        self.history = ItemHistory(list(read.messages), dict(read.thinking))
        instructions = field(body, "instructions", str)
        first = [Message("system", instructions)] if instructions else []
        history = opened([*first, *read.messages])
        shift = len(history) - len(read.messages)
        self._tools = field(body, "tools", list, [])
        self._namespaces: dict[str, tuple[str, str]] = {}
        tools = unique(self._functions(self._tools))
        self.call = Call(
            dialect="responses",
            messages=tuple(history),
            tools=() if choice == "none" else tools,
            asked=asked(body, "max_output_tokens", "stop"),
            model=field(body, "model", str, ""),
            thinking={at + shift: said for at, said in read.thinking.items()},
            **marks,
        )
        self.id = new_id("resp")
        self._created = int(time.time())
        self._number = 0
        self._message_id = new_id("msg")
        self._said = ""

    @property
    def quiet(self) -> bytes:
        return self._event("response.in_progress", response=self._response("in_progress", ""))

    def whole(self, answer: Answer, model: str) -> Json:
        return self._finished(answer, model, self._items(answer))

    def opening(self, model: str) -> bytes:
        response = self._response("in_progress", model)
        return self._event("response.created", response=response) + self._event("response.in_progress", response=response)

    def saying(self, text: str, model: str) -> bytes:
        place = {"output_index": 0, "item_id": self._message_id, "content_index": 0}
        delta = self._saying_first(place) if not self._said else b""
        self._said += text
        return delta + self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def events(self, answer: Answer, model: str) -> Iterator[bytes]:
        items = self._items(answer)
        for index, item in enumerate(items):
            place = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "function_call":
                yield self._added(index, {**item, "arguments": ""})
                yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **place, **done)
            else:
                (part,) = item["content"]
                kind, extra = _TEXTS[item["type"]]
                place["content_index"] = 0
                said = self._said if item["type"] == "message" else ""
                if not said:
                    yield self._added(index, {**item, "content": []})
                    yield self._event("response.content_part.added", **place, part={**part, "text": ""})
                yield self._event(f"{kind}.delta", **place, delta=part["text"][len(said) :], **extra)
                yield self._event(f"{kind}.done", **place, text=part["text"], **extra)
                yield self._event("response.content_part.done", **place, part=part)
            yield self._event("response.output_item.done", output_index=index, item=item)
        finished = self._finished(answer, model, items)
        yield self._event(f"response.{finished['status']}", response=finished)

    def failure(self, status: int, sentence: str) -> bytes:
        error = {"code": "server_error" if status >= 500 else "invalid_prompt", "message": sentence}
        return self._event("response.failed", response={**self._response("failed", ""), "error": error})

    def after(self, answer: Answer) -> ItemHistory:
        """The history with the answer, for a request that names this response as its previous one."""
        known = {**self.history.thinking, **({len(self.history.messages): answer.thinking} if answer.thinking else {})}
        return ItemHistory([*self.history.messages, answer.message], known)

    def _saying_first(self, place: Json) -> bytes:
        (item,) = self._items(Answer(message=Message("assistant", "")))
        added = self._added(0, {**item, "content": []})
        return added + self._event("response.content_part.added", **place, part=item["content"][0])

    def _added(self, index: int, item: Json) -> bytes:
        return self._event("response.output_item.added", output_index=index, item={**item, "status": "in_progress"})

    def _items(self, answer: Answer) -> list[Json]:
        items: list[Json] = []
        if answer.thinking:
            item: Json = {"id": new_id("rs"), "type": "reasoning", "summary": [], "status": "completed"}
            item["content"] = [{"type": "reasoning_text", "text": answer.thinking}]
            if self._wants_encrypted:
                item["encrypted_content"] = base64.b64encode(answer.thinking.encode()).decode()
            items.append(item)
        if answer.message.content or not answer.message.tool_calls:
            part = {"type": "output_text", "text": answer.message.content, "annotations": [], "logprobs": []}
            message = {"id": self._message_id, "type": "message", "role": "assistant", "status": "completed", "content": [part]}
            items.append(message)
        return items + [self._call(call) for call in answer.message.tool_calls]

    def _call(self, call: ToolCall) -> Json:
        space, name = self._namespaces.get(call.name, ("", call.name))
        item = {"id": new_id("fc"), "type": "function_call", "status": "completed", "call_id": call.id, "name": name}
        item["arguments"] = as_json(call.arguments)
        return {**item, "namespace": space} if space else item

    def _finished(self, answer: Answer, model: str, items: list[Json]) -> Json:
        cut = answer.finish == "length"
        response = self._response("incomplete" if cut else "completed", model)
        usage = {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        details = {"reason": "max_output_tokens"} if cut else None
        return {**response, "output": items, "usage": usage, "incomplete_details": details}

    def _response(self, status: str, model: str) -> Json:
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "background": False,
            "error": None, "incomplete_details": None, "model": model, "output": [], "parallel_tool_calls": True,
            "previous_response_id": self._previous, "store": self.stored, "text": {"format": {"type": "text"}},
            "tool_choice": self._choice, "tools": self._tools, "truncation": "disabled", "usage": None, **self._given,
        }  # fmt: skip

    def _event(self, kind: str, **values: object) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **values})

    def _functions(self, tools: list[object], space: str = "") -> Iterator[Json]:
        """The functions among the tools, those of namespaces included. A call names its namespace beside its tool."""
        for tool in objects(tools, "tools"):
            kind = tool.get("type")
            if kind == "namespace" and not space:
                yield from self._functions(field(tool, "tools", list, []), required(tool, "name", str))
            elif kind == "function":
                name = required(tool, "name", str)
                shown = f"{space}__{name}" if space else name
                if space:
                    self._namespaces[shown] = (space, name)
                yield function(shown, field(tool, "description", str), field(tool, "parameters", dict))
            elif kind in _SERVER_SIDE:
                hint(f"the tool {kind}, which this server does not have and leaves out of the prompt")
            else:
                refuse(f"a tool of the type {str(kind)[:40]!r} is not supported: tools are functions")


class _Items(ItemHistory):
    """Reads items. `stage` is that of the last item of the reply that is being read; -1 if there is none."""

    def __init__(self, before: ItemHistory) -> None:
        super().__init__(list(before.messages), dict(before.thinking))
        self._stage = -1
        self._thought = ""

    def add(self, item: Given) -> None:
        kind = item.get("type") or "message"
        role = _ROLES.get(required(item, "role", str)) if kind == "message" else None
        if kind == "message" and role is None:
            refuse(f"the role {str(item['role'])[:40]!r} is not one of {', '.join(_ROLES)}")
        if kind in ("reasoning", "function_call") or role == "assistant":
            self._add_reply(kind, item)
            return
        self._stage, self._thought = -1, ""
        if kind == "function_call_output":
            said = content(item.get("output"), "output")
            self.messages.append(Message("tool", said, tool_call_id=required(item, "call_id", str)))
        elif kind == "message":
            self.messages.append(Message(role, content(item.get("content"), "content")))  # type: ignore[arg-type]
        elif kind == "item_reference":
            refuse("item_reference is not supported: send the items, or previous_response_id")
        else:
            refuse(f"an item of the type {str(kind)[:40]!r} is not supported")

    def _add_reply(self, kind: str, item: Given) -> None:
        stage = _STAGES[kind]
        begins = self._stage < 0 or stage < self._stage or (stage == self._stage == 1)
        self._stage = stage
        if kind == "reasoning":
            self._thought = ("" if begins else self._thought) + _thought(item)
            return
        text = content(item.get("content"), "content", "") if kind == "message" else ""
        calls = () if kind == "message" else (self._call(item),)
        last = self.messages[-1] if self.messages else None
        if begins or self._thought or last is None or last.role != "assistant":
            if self._thought:
                self.thinking[len(self.messages)] = self._thought
            self._thought = ""
            self.messages.append(Message("assistant", text, calls))
        else:
            self.messages[-1] = Message("assistant", last.content + text, last.tool_calls + calls)

    def _call(self, item: Given) -> ToolCall:
        name, space = required(item, "name", str), field(item, "namespace", str)
        shown = f"{space}__{name}" if space else name
        return call_of(required(item, "call_id", str), shown, field(item, "arguments", str, ""))


def _thought(item: Given) -> str:
    """The thinking in an item of ours: its content or, from a client that drops the content, what stands for it."""
    shown = content(item.get("content"), "content", "") or content(item.get("summary"), "summary", "")
    hidden = field(item, "encrypted_content", str, "")
    if shown or not hidden:
        return shown
    try:
        return base64.b64decode(hidden, validate=True).decode()
    except ValueError:  # another server's
        return ""
