"""A vLLM and an SGLang server on loopback for tests: a tiny model behind their wires, with weights that can be changed.

It samples for real, so ids and log-probs mean something; `faults` make it misbehave in one way each. Connections are kept, and
a server that stops takes them along. It always stops. Replies end by each server's own rule: SGLang looks at the limit first,
and at no id at all where `ignore_eos` is set.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch


class Served(ThreadingHTTPServer):
    """faults: no_ids, raw_logprobs, deaf (takes weights and ignores them), no_dev_mode, bad_label, unwilling, slow,
    untold (SGLang was started without --context-length), old (SGLang without the pages that say how much it holds)"""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path, faults: tuple[str, ...], port: int, context: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.faults = faults
        self.context = context
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.label = "default"
        self.ends: set[int] = set()  # the model's own end ids
        self.open: set[socket.socket] = set()
        self.lock = threading.Lock()
        self.gate = threading.Event()  # with the fault "slow", replies wait for it
        self.read(folder)

    def read(self, folder: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def server_close(self) -> None:
        super().server_close()
        for connection in list(self.open):
            with contextlib.suppress(OSError):  # the other side was faster
                connection.shutdown(socket.SHUT_RDWR)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @torch.no_grad()
    def draw(self, ids: list[int], temperature: float, count: int, stops: set[int], seed: int | None) -> Any:
        """Sampled ids, their log-probs, and what ended them."""
        generator = torch.Generator().manual_seed(seed or 0)
        sampled: list[int] = []
        logprobs: list[float] = []
        while len(sampled) < count:
            logits = self.model(torch.tensor([ids + sampled])).logits[0, -1].float()
            tempered = torch.log_softmax(logits / (temperature or 1.0), -1)
            token = int(tempered.argmax() if not temperature else torch.multinomial(tempered.exp(), 1, generator=generator))
            told = torch.log_softmax(logits, -1) if "raw_logprobs" in self.faults else tempered
            sampled.append(token)
            logprobs.append(float(told[token]))
            if token in stops:
                return sampled, logprobs, "stop"
        return sampled, logprobs, "length"

    @torch.no_grad()
    def score(self, ids: list[int]) -> list[float]:
        logprobs = torch.log_softmax(self.model(torch.tensor([ids])).logits[0, :-1].float(), -1)
        return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class _Handler(BaseHTTPRequestHandler):
    server: Served
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/v1/models" and "old" not in server.faults:
            self._answer({"data": [{"id": "tiny", "max_model_len": server.context}]})
        elif self.path == "/get_model_info":
            self._answer({"model_path": "tiny"})
        elif self.path == "/get_server_info" and "old" not in server.faults:
            self._answer({"context_length": None if "untold" in server.faults else server.context})
        else:
            self._answer({"error": "no such page"}, 404)

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        server.paths.append(self.path)
        server.headers.append(dict(self.headers))
        server.bodies.append(body)
        if "slow" in server.faults and self.path in ("/v1/completions", "/generate"):
            server.gate.wait(60)
        with server.lock:
            found = {
                "/v1/completions": self._completions,
                "/collective_rpc": self._reload,
                "/reset_prefix_cache": lambda body: {"success": "unwilling" not in server.faults},
                "/generate": self._generate,
                "/update_weights_from_disk": self._update,
            }.get(self.path)
            if found is None or ("no_dev_mode" in server.faults and self.path in ("/collective_rpc", "/reset_prefix_cache")):
                self._answer({"error": "no such page"}, 404)
                return
            answer = found(body)
        self._answer(answer)

    def _completions(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        choice: dict[str, Any] = {"index": 0, "text": "?"}
        if "prompt_logprobs" in body:
            scores = self.server.score(ids)
            pairs = zip(ids[1:], scores, strict=True)
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": score}} for token, score in pairs)]
            return {"choices": [choice]}
        stops = {*body["stop_token_ids"], *(() if body["ignore_eos"] else self.server.ends)}
        sampled, logprobs, finish = self.server.draw(ids, body["temperature"], body["max_tokens"], stops, body.get("seed"))
        choice |= {"finish_reason": finish, "logprobs": {"token_logprobs": logprobs}}
        if "no_ids" not in self.server.faults:
            choice["token_ids"] = sampled
        return {"choices": [choice]}

    def _reload(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["method"] == "reload_weights"
        if "deaf" not in self.server.faults:
            self.server.read(body["kwargs"]["weights_path"])
        return {"results": [None]}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, params = body["input_ids"], body["sampling_params"]
        meta: dict[str, Any] = {"weight_version": "17" if "bad_label" in self.server.faults else self.server.label}
        if body.get("logprob_start_len") == 0:
            scores = [None, *self.server.score(ids)]
            meta["input_token_logprobs"] = [[score, token, None] for score, token in zip(scores, ids, strict=True)]
            return {"text": "?", "meta_info": meta}
        stops = set() if params["ignore_eos"] else {*params["stop_token_ids"], *self.server.ends}
        sampled, logprobs, finish = self.server.draw(
            ids, params["temperature"], params["max_new_tokens"], stops, params.get("sampling_seed")
        )
        if len(sampled) == params["max_new_tokens"]:
            finish = "length"
        meta["finish_reason"] = {"type": finish, **({"matched": sampled[-1]} if finish == "stop" else {})}
        if "no_ids" not in self.server.faults:
            meta["output_token_logprobs"] = [[score, token, None] for score, token in zip(logprobs, sampled, strict=True)]
        return {"text": "?", "meta_info": meta}

    def _update(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["flush_cache"] is True
        if "unwilling" in self.server.faults:
            return {"success": False, "message": "not now"}
        if "deaf" not in self.server.faults:
            self.server.read(body["model_path"])
        self.server.label = body["weight_version"]
        return {"success": True, "message": "done"}

    def _answer(self, answer: Any, status: int = 200) -> None:
        payload = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *args: Any) -> None:
        """Tests need no access log."""


@contextmanager
def served(folder: Path, *faults: str, port: int = 0, context: int = 512) -> Iterator[Served]:
    server = Served(folder, faults, port, context)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
