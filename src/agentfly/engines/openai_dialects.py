"""How vLLM's and SGLang's servers sample token ids, score prompts and load new weights.

Every sampling option is sent, also at its default: a server may take other defaults from the model's folder. Answers without
ids, or without one log-prob per id, raise an EngineError.

    vllm     POST /v1/completions (return_token_ids)   POST /collective_rpc reload_weights, /reset_prefix_cache
    sglang   POST /generate                            POST /update_weights_from_disk (flush_cache, weight_version)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from ..errors import ConfigError, EngineError
from ..types import Sampling
from .openai_server import ModelServer, RequestRefused


@dataclass(frozen=True, slots=True)
class Sampled:
    """A sampled reply. `end` is the id that ended it and `label` the version of the weights, if the server reports them."""

    ids: list[int]
    logprobs: list[float]
    stop: Literal["stop", "length"]
    end: int | None = None
    label: str | None = None


class VllmDialect:
    """The API of `vllm serve`."""

    name: ClassVar[str] = "vllm"
    cut_logprobs: ClassVar[bool] = False  # with top_p, top_k or min_p, its log-probs are those of the truncated distribution

    def __init__(self, server: ModelServer, model: str) -> None:
        self._server = server
        self._model = model
        self.url = f"{server.base_url}/completions"

    def body(self, ids: Sequence[int], sampling: Sampling, room: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(ids),
            **_sampling(sampling, stop_ids),
            "max_tokens": room,
            "ignore_eos": True,  # the model's end token is in stop_token_ids
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        return body

    def read(self, answer: Any) -> Sampled:
        with _parsing("completion"):
            choice = answer["choices"][0]
            ids = choice.get("token_ids")
            if ids is None:
                raise NoIds("the server does not return token ids")
            return _sampled(ids, choice["logprobs"]["token_logprobs"], choice.get("finish_reason"))

    def score_body(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}

    def read_scores(self, answer: Any, ids: Sequence[int]) -> list[float]:
        with _parsing("scored prompt"):
            rows = answer["choices"][0]["prompt_logprobs"]
            return [float(row[str(token)]["logprob"]) for row, token in zip(rows[1:], ids[1:], strict=True)]

    def load(self, folder: Path | str, version: int, *, timeout_s: float) -> None:
        """Load the weights of a folder, then empty the prefix cache, which holds keys of the old weights."""
        root = self._server.root
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}, "timeout": timeout_s}
        with _needing(
            "the vLLM server does not take new weights: start it with VLLM_SERVER_DEV_MODE=1 in its environment, reachable "
            "from this machine only"
        ):
            self._server.call("POST", f"{root}/collective_rpc", body, timeout_s=timeout_s)
            answer = self._server.call("POST", f"{root}/reset_prefix_cache", None, timeout_s=timeout_s)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineError("the vLLM server took the new weights but could not empty its cache: does another client use it?")

    def check(self, max_context: int, *, timeout_s: float) -> None:
        """Raise a ConfigError unless the server has the model and its context is long enough."""
        listed = self._server.call("GET", f"{self._server.base_url}/models", timeout_s=timeout_s)
        with _parsing("list of models"):
            lengths = {row["id"]: row.get("max_model_len") for row in listed["data"]}
        if self._model not in lengths:
            names = ", ".join(map(repr, lengths)) or "none"
            raise ConfigError(f"the server has no model {self._model!r} but {names}: set agent.engine.served_model")
        _refuse_longer(max_context, lengths[self._model], "--max-model-len")


class SglangDialect:
    """SGLang's native API."""

    name: ClassVar[str] = "sglang"
    cut_logprobs: ClassVar[bool] = True  # its log-probs are computed before top_p, top_k and min_p apply

    def __init__(self, server: ModelServer, model: str) -> None:
        self._server = server
        self.url = f"{server.root}/generate"

    def body(self, ids: Sequence[int], sampling: Sampling, room: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        params: dict[str, Any] = {
            **_sampling(sampling, stop_ids),
            "max_new_tokens": room,
            "ignore_eos": False,  # true would disable stop_token_ids, too
            "no_stop_trim": True,
        }
        if sampling.stop:
            params["stop"] = list(sampling.stop)
        if sampling.seed is not None:
            params["sampling_seed"] = sampling.seed
        return {"input_ids": list(ids), "sampling_params": params, "return_logprob": True}

    def read(self, answer: Any) -> Sampled:
        with _parsing("generation"):
            meta = answer["meta_info"]
            rows = meta.get("output_token_logprobs")
            if rows is None:
                raise NoIds("the server does not return token ids with their log-probs")
            reason = meta.get("finish_reason") or {}
            if reason.get("type") == "abort":
                raise EngineError(f"the server broke off: {reason.get('message') or 'aborted'}"[:300])
            end, label = reason.get("matched"), meta.get("weight_version")
            drawn = _sampled([row[1] for row in rows], [row[0] for row in rows], reason.get("type"))
            return replace(drawn, end=end if type(end) is int else None, label=None if label is None else str(label))

    def score_body(self, ids: Sequence[int]) -> dict[str, Any]:
        params = {"temperature": 0.0, "max_new_tokens": 1}
        return {"input_ids": list(ids), "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}

    def read_scores(self, answer: Any, ids: Sequence[int]) -> list[float]:
        with _parsing("scored prompt"):
            rows = answer["meta_info"]["input_token_logprobs"]
            if [row[1] for row in rows] != list(ids):
                raise EngineError("the server scored other ids than those sent")
            return [float(row[0]) for row in rows[1:]]

    def load(self, folder: Path | str, version: int, *, timeout_s: float) -> None:
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        url = f"{self._server.root}/update_weights_from_disk"
        with _needing("the server has no /update_weights_from_disk: is it SGLang?"):
            answer = self._server.call("POST", url, body, timeout_s=timeout_s)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            why = answer.get("message") if isinstance(answer, Mapping) else answer
            raise EngineError(f"the SGLang server did not take the new weights: {self._server.client.hide(str(why))[:300]}")

    def check(self, max_context: int, *, timeout_s: float) -> None:
        """Raise an error unless the server is SGLang and its context, as configured or as listed, is long enough."""
        self._server.call("GET", f"{self._server.root}/get_model_info", timeout_s=timeout_s)
        info = self._look(f"{self._server.root}/get_server_info", timeout_s)
        listed = self._look(f"{self._server.base_url}/models", timeout_s)
        with _parsing("description of the server"):
            lengths = [info.get("context_length"), *(row.get("max_model_len") for row in listed.get("data", ()))]
        for length in lengths:
            _refuse_longer(max_context, length, "--context-length")

    def _look(self, url: str, timeout_s: float) -> Any:
        """The answer of an endpoint that not every release of SGLang has; {} if it is missing."""
        try:
            return self._server.call("GET", url, timeout_s=timeout_s)
        except RequestRefused as refused:
            if refused.status in (404, 405):
                return {}
            raise


DIALECTS: dict[str, type[VllmDialect] | type[SglangDialect]] = {"vllm": VllmDialect, "sglang": SglangDialect}


class NoIds(EngineError):
    """The server answers, but without the token ids that training needs."""


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    """Turn lookup errors in an answer of another shape into an EngineError."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise EngineError(f"the server's answer is not a {what}") from error


def _sampling(sampling: Sampling, stop_ids: Sequence[int]) -> dict[str, Any]:
    """The options that both servers call by the same names."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
    }


@contextmanager
def _needing(message: str) -> Iterator[None]:
    """Raise a ConfigError with this message if the server has no such endpoint."""
    try:
        yield
    except RequestRefused as refused:
        if refused.status in (404, 405):
            raise ConfigError(message) from refused
        raise


def _refuse_longer(max_context: int, length: int | None, option: str) -> None:
    if length is not None and length < max_context:
        raise ConfigError(
            f"the server holds {length} tokens and max_context is {max_context}: lower agent.engine.max_context, or start "
            f"the server with {option} {max_context}"
        )


def _sampled(ids: Sequence[Any], logprobs: Sequence[Any], finish: str | None) -> Sampled:
    taken = list(ids)
    if not all(type(token) is int for token in taken):
        raise TypeError("an id is no integer")
    scores = [float(number) for number in logprobs]
    if not taken or len(taken) != len(scores) or not all(math.isfinite(score) and score <= 1e-3 for score in scores):
        raise EngineError(f"the server gave {len(taken)} ids with {len(scores)} log-probs, not one good number for each")
    return Sampled(taken, scores, "length" if finish == "length" else "stop")
