"""The learner of one rank. Rank 0 has the methods of `types.Learner`; the other ranks run `follow`.

A call on rank 0 sends a command, and every rank runs the same code of `PolicyLearner` on its micro batches. Advantages are
computed on rank 0 and sent.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ...codec import decode, encode
from ...errors import AgentFlyError, ConfigError, RankError
from ...kernels import launching_on
from ...kernels.memory import ROOM
from ...types import Sample, TokenFit
from ..algorithms import Algorithm
from ..experience import Experience
from ..learner import PolicyLearner
from ..model.lora import adapter_weights, is_adapted
from ..model.shard_files import (
    FOLDER,
    STATE,
    Shard,
    ShardFiles,
    collect_shards,
    file_name,
    fill,
    mark,
    sharded,
    write_for_rank_0,
    write_shards,
)
from ..model.sharded import Read, assign, rows_of, shard_of, whole
from ..model.shards import load_plain_weights, meta_copy, whole_weights
from ..model.storage import in_buckets, load_state, save_checkpoint_model
from ..samples import row_of
from ..update.messages import pack_experience, unpack_experience
from .group import RankGroup

log = logging.getLogger(__name__)
Writer = Callable[[Path], None]


class RankLearner(PolicyLearner):
    """A `PolicyLearner` whose parameters, gradients and optimizer state are sharded over the ranks of `ranks`.

    Every rank makes one with the same arguments; the weights are those of rank 0. The module is sharded in place: an engine
    needs its own copy, which `weights` keeps up to date.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str | Algorithm = "grpo",
        *,
        ranks: RankGroup,
        reduce: Literal["float32", "bfloat16"] = "float32",
        timeout_s: float = 600.0,
        reference: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._writing: threading.Thread | None = None
        model = model.to(ranks.device)
        with launching_on(ranks.device):
            ranks.send_weights(*([model] if reference is None else [model, reference.to(ranks.device)]))
        self._meta: Any = meta_copy(model)
        options |= {"group": ranks, "reduce": torch.bfloat16 if reduce == "bfloat16" else torch.float32}
        super().__init__(model, algorithm, reference=reference, device=ranks.device, **options)

    # -- commands ------------------------------------------------------------------------------------------------------------

    def _improve(self, experience: Experience) -> dict[str, float]:
        with self._ranks.leading("update", announces=self._changing is not None):
            self._ranks.broadcast(pack_experience(experience))
            return super()._improve(experience)
        raise AssertionError("unreachable: `leading` raises")

    def _follow_update(self, announces: bool) -> None:
        experience = unpack_experience(self._ranks.broadcast(None), self.device)
        self._changing = (lambda: None) if announces else None
        try:
            super()._improve(experience)
        finally:
            self._changing = None

    def examine(self, samples: Sequence[Sample], drawn: int = 0, numbers: Sequence[float] = ()) -> TokenFit:
        return self._lead(samples, drawn, numbers, self._modules.scorer.temperature)

    def score(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Returns the log-prob of every id from the second on."""
        return self._lead([row_of([(ids[:1], ids[1:], [0.0] * (len(ids) - 1))])], 0, (), temperature).logprobs[0]

    def _lead(self, samples: Sequence[Sample], drawn: int, numbers: Sequence[float], temperature: float) -> TokenFit:
        rows = [(sample.token_ids.tolist(), sample.mask.tolist()) for sample in samples]
        with self._ranks.leading("examine"):
            self._ranks.broadcast(encode([rows, drawn, list(numbers), float(temperature), self._budget.tokens]))
            return self._examine(samples, drawn, numbers, temperature)
        raise AssertionError("unreachable: `leading` raises")

    def _follow_examine(self) -> None:
        rows, drawn, numbers, temperature, self._budget.tokens = decode(self._ranks.broadcast(None))
        nothing: Any = [np.zeros(len(ids)) for ids, _ in rows]
        made = [Sample(ids, mask, none, none, none, none) for (ids, mask), none in zip(rows, nothing, strict=True)]
        self._examine(made, drawn, numbers, temperature)

    def _examine(self, samples: Sequence[Sample], drawn: int, numbers: Sequence[float], temperature: float) -> TokenFit:
        scorer = self._modules.scorer
        former, scorer.temperature = scorer.temperature, temperature
        try:
            return super().examine(samples, drawn, numbers)
        finally:
            scorer.temperature = former

    def weights(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the whole weights in buckets, on rank 0. Each bucket is one command; the other ranks keep nothing of it."""
        for number in range(len(self._buckets)):
            with self._ranks.leading("weights", bucket=number):
                bucket = self._gather_bucket(number)
            yield bucket

    def _follow_weights(self, bucket: int) -> None:
        self._gather_bucket(bucket)

    @cached_property
    def _buckets(self) -> list[list[str]]:
        size = self._modules.dtype.itemsize
        return in_buckets([(name, tensor.numel() * size) for name, tensor in self._plain_names.items()])

    @cached_property
    def _plain_names(self) -> dict[str, Tensor]:
        """Returns the tensors of the model without adapters by name; their data is not there."""
        from ...engines.local.load import merged_weights

        with torch.device("meta"):
            tensors: dict[str, Tensor] = merged_weights(self._meta)
        return tensors

    def _gather_bucket(self, number: int) -> list[tuple[str, Tensor]]:
        weights = whole_weights(self.model, self._buckets[number], self._modules.dtype, self._ranks.leads)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # gathered to the end before it is handed out
        return weights

    # -- checkpoints -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with marks for sharded tensors: `snapshot` writes those."""
        state: dict[str, Any] = mark(super().state_dict())
        return {**state, "ranks": self._ranks.size}

    def _shards(self) -> dict[str, Shard]:
        """Returns a copy of this rank's shards to save: of `state_dict`, and of the trained weights of the policy."""
        policy = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return {path: shard_of(tensor) for path, tensor in sharded({**super().state_dict(), "policy": policy})}

    def snapshot(self, staging: Path) -> Writer:
        """Copy the state of all ranks to memory. Returns a function that writes the checkpoint's files into a folder.

        The other ranks write their shards to the folder `staging` in the meantime, from where the function moves them.
        """
        weights = {name: tensor.to("cpu", copy=True) for bucket in self.weights() for name, tensor in bucket}
        with self._ranks.leading("save", staging=str(staging)):
            adapter = self._gather_adapter()
            shards = self._shards()

        def write(folder: Path) -> None:
            try:
                save_checkpoint_model(self._meta, None, folder, {"model": weights, "adapter": adapter})
                (folder / FOLDER).mkdir()
                write_shards(folder / FOLDER / file_name(0, self._ranks.size), shards)
                collect_shards(staging, folder / FOLDER, self._ranks.size, self._timeout_s)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

        return write

    def _follow_save(self, staging: str) -> None:
        self._gather_adapter()
        shards = self._shards()
        if self._writing is not None:
            self._writing.join()
        work = partial(write_for_rank_0, Path(staging), self._ranks.rank, self._ranks.size, shards)
        self._writing = threading.Thread(target=work, name="agentfly-shards")
        self._writing.start()

    def _gather_adapter(self) -> dict[str, Tensor]:
        if not is_adapted(self.model):
            return {}
        dtype = self._modules.dtype
        return {name: whole(part, dtype).to("cpu", copy=True) for name, part in adapter_weights(self.model).items()}

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        with (
            self._ranks.leading("load", checkpoint=str(checkpoint), version=state["version"], updates=state["updates"]),
            self._ranks.together(),
        ):
            self._load(checkpoint, state)

    def _follow_load(self, checkpoint: str, version: int, updates: int) -> None:
        with self._ranks.together():
            path = Path(checkpoint)
            if not path.is_dir():
                raise ConfigError(f"{path} is not there: the run's folder must be shared by all machines")
            self._load(path, load_state(path / STATE, mapped=True)["learner"] | {"version": version, "updates": updates})

    def _load(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load a checkpoint that any number of ranks has saved."""
        masters: list[tuple[Tensor, Read]] = []
        if state.get("ranks"):
            files = ShardFiles(checkpoint / FOLDER)
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    assign(parameter, partial(files.rows, f"policy/{name}"))
            state = fill(state, lambda path: partial(files.rows, path))
        else:
            load_plain_weights(self.model, checkpoint, self._plain_names)
            masters = self._masters(state)
        self.load_state_dict(state)
        for weight, read in masters:  # after the modules, whose own weights are rounded
            assign(weight, read)

    def _masters(self, state: Mapping[str, Any]) -> list[tuple[Tensor, Read]]:
        """Returns the float32 parameters of the ranks, with the float32 masters of one process for them."""
        critic = self._modules.critic
        owners: list[tuple[str, nn.Module | None]] = [
            ("optimizer", self.model),
            ("critic_optimizer", None if critic is None else critic.backbone),
        ]
        pairs: list[tuple[Tensor, Read]] = []
        for key, module in owners:
            masters = (state[key] or {}).get("masters", [])
            trained = [] if module is None else [p for p in module.parameters() if p.requires_grad]
            if masters and len(masters) != len(trained):
                raise ConfigError(f"the checkpoint has {len(masters)} float32 weights instead of {len(trained)}")
            pairs += [(p, rows_of(master)) for p, master in zip(trained, masters, strict=False)]
        return pairs

    # -- the other ranks -------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Run the commands of rank 0 until it stops. Raises RankError if it is lost, ConfigError if the memory is full."""
        handlers: dict[str, Callable[..., None]] = {
            name: getattr(self, f"_follow_{name}") for name in ("update", "examine", "weights", "save", "load")
        }
        while True:
            name, arguments = self._ranks.receive()
            if name == "stop":
                self._ranks.say_ended()
                break
            try:
                with launching_on(self.device):
                    handlers[name](**arguments)
            except RankError:
                raise
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"rank {self._ranks.rank} ran out of memory during {name!r}: use more ranks, or {ROOM}"
                ) from error
            except AgentFlyError as error:  # all ranks have raised it, and rank 0 reports it
                log.info("rank %d: %s: %s", self._ranks.rank, name, error)
        if self._writing is not None:
            self._writing.join()

    def stop(self) -> None:
        """On rank 0: let the other ranks end."""
        self._ranks.end_ranks()
