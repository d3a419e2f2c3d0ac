"""The learner of one rank. Rank 0 has the methods of `types.Learner`; the other ranks run `follow`.

A call on rank 0 sends a command, and every rank runs the same code on its micro batches. Losses, gradients and metrics are
those of one process on the whole batch: weights are divided by the tokens of all ranks and, because FSDP averages gradients, a
loss is multiplied by the number of ranks. Advantages are computed on rank 0 and sent.
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
from ...types import Sample, TokenFit, Trajectory
from ..algorithms import Algorithm, Chains, Credit
from ..batching import MicroBatch, Shape
from ..experience import Experience
from ..learner import Divide, PolicyLearner
from ..metrics import Totals
from ..model.critic import hidden_width
from ..model.logprobs import Scores
from ..model.lora import FOLDER as ADAPTER
from ..model.lora import adapter_weights, adapters, is_adapted
from ..model.shard_files import (
    FOLDER,
    STATE,
    PlainFiles,
    ShardFiles,
    collect_shards,
    file_name,
    fill,
    mark,
    sharded,
    write_for_rank_0,
    write_shards,
)
from ..model.shards import (
    HALF,
    Read,
    ShardedScorer,
    assign,
    free,
    meta_copy,
    send_weights,
    shard_like,
    shard_model,
    shard_of,
    whole,
)
from ..model.storage import in_buckets, load_state, save_checkpoint_model
from ..optim import Optimizer
from ..samples import row_of
from ..update.division import rank_batches
from ..update.messages import pack_credit, pack_experience, unpack_credit, unpack_experience
from ..update.objective import Minibatch
from .group import RankGroup

log = logging.getLogger(__name__)
SHAPES: tuple[Shape, ...] = ("padded", "packed", "shared")
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
        self._ranks, self._size, self._timeout_s = ranks, ranks.size, timeout_s
        self._reduce = torch.bfloat16 if reduce == "bfloat16" else torch.float32
        self._failed: AgentFlyError | None = None
        self._writing: threading.Thread | None = None
        self._later: list[tuple[Any, Read]] = []
        model = model.to(ranks.device)
        with launching_on(ranks.device):
            send_weights([model] if reference is None else [model, reference.to(ranks.device)], ranks)
        self._meta: Any = meta_copy(model)
        super().__init__(model, algorithm, reference=reference, device=ranks.device, **options)

    def _distribute(self) -> None:
        model: Any = self.model
        self._dtype = next(self.model.parameters()).dtype
        self._width = hidden_width(self.model)
        with launching_on(self.device):
            self._shape = SHAPES[self._ranks.least(SHAPES.index(self._shape))]
            packed = self._shape != "padded"
            for scorer in filter(None, (self._scorer, self._reference)):
                if scorer.head is not None:
                    owner: Any = scorer.model
                    scorer.head.backbone.keep_one_tree(owner, owner.base_model_prefix, packed=packed)
            if self._critic is not None:
                self._critic.keep_one_tree(packed=packed)
            shard = partial(shard_model, group=self._ranks, reduce=self._reduce)
            shard(model, dtype=self._dtype)
            self._scorer = ShardedScorer(self._scorer)
            if self._value_head is not None:
                shard(self._value_head, dtype=torch.float32)
            if self._critic is not None:
                shard(self._critic.head, dtype=torch.float32)
                shard(self._critic, dtype=self._dtype)
            if self._reference is not None:
                shard(self._reference.model, dtype=self._dtype)
                self._reference = ShardedScorer(self._reference)

    @property
    def path(self) -> str:
        """How batches are run, and over how many ranks."""
        return f"{self._size} ranks; {super().path}"

    # -- one step ------------------------------------------------------------------------------------------------------------

    def _update(self, groups: Sequence[Sequence[Trajectory]], window: int | None) -> dict[str, float]:
        experience = self._gather(groups, window)
        with self._ranks.leading("update", announces=self._changing is not None):
            self._ranks.broadcast(pack_experience(experience))
            return self._improve(experience)

    def _follow_update(self, announces: bool) -> None:
        experience = unpack_experience(self._ranks.broadcast(None), self.device)
        self._changing = (lambda: None) if announces else None
        try:
            self._improve(experience)
        finally:
            self._changing = None

    def _improve(self, experience: Experience) -> dict[str, float]:
        self._failed = None
        self._budget.plan()
        self._budget.tokens = self._ranks.least(self._budget.tokens)
        self._budget.alone = False
        metrics = super()._improve(experience)
        self._share_notes(experience)
        return metrics

    def _share_notes(self, experience: Experience) -> None:
        """Add up what each rank has noted about its tokens (`Experience.keep`), so that rank 0 can record all of them."""
        none = torch.full_like(experience.sampled, torch.nan)
        used = torch.zeros_like(experience.sampled) if experience.used is None else experience.used.to(experience.sampled.dtype)
        experience.used = self._ranks.sum(used) > 0
        experience.own = self._mean_over_ranks(none if experience.own is None else experience.own)
        experience.last = self._mean_over_ranks(none if experience.last is None else experience.last)
        experience.entropies = self._mean_over_ranks(none if experience.entropies is None else experience.entropies)

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        """The mean over the ranks that know a value; NaN if none does."""
        known = self._ranks.sum((~values.isnan()).to(values.dtype))
        return self._ranks.sum(values.nan_to_num(0.0)) / known

    def _credit(self, chains: Chains) -> Credit:
        data: bytes | None = None
        with self._ranks.together():
            if self._ranks.leads:
                data = pack_credit(super()._credit(chains))
        return unpack_credit(self._ranks.broadcast(data))

    def _batches(self, experience: Experience, rows: Sequence[int]) -> Iterator[MicroBatch]:
        if not rows:
            return iter(())
        place: dict[str, Any] = {"rank": self._ranks.rank, "size": self._size, "width": self._width}
        return rank_batches(experience.rows, rows, self._budget.tokens, self.device, self._shape, **place)

    def _trained_batches(self, experience: Experience, rows: Sequence[int]) -> list[MicroBatch]:
        with self._ranks.together():
            return super()._trained_batches(experience, rows)
        raise AssertionError("unreachable: `together` raises")

    def _scored(
        self, divide: Divide, rows: Sequence[int], score: Callable[[MicroBatch], Tensor]
    ) -> Iterator[tuple[MicroBatch, Tensor]]:
        for batch in divide(rows):
            yield batch, score(batch)

    def _loss(
        self,
        experience: Experience,
        batch: MicroBatch,
        scores: Scores,
        values: Tensor | None,
        minibatch: Minibatch,
        totals: Totals,
        known: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """The loss, or 0 for padding and after an error: the ranks raise it together when all micro batches are run."""
        outputs = [tensor for tensor in (scores.logprobs, scores.entropies, values) if tensor is not None]
        nothing = sum((tensor.sum() * 0.0 for tensor in outputs), torch.zeros((), device=self.device))
        share = 0.0 if known is None else known[1] * minibatch.part
        if not len(batch.tokens):
            if known is None:
                totals.add("train/policy_loss", 0.0, minibatch.part)
            if values is not None:
                totals.add("train/value_loss", 0.0, minibatch.part)
            return nothing + share
        try:
            return super()._loss(experience, batch, scores, values, minibatch, totals, known)
        except AgentFlyError as error:
            self._failed = self._failed or error
            return nothing

    def _gradients(self, *args: Any, **kwargs: Any) -> Tensor:
        found = super()._gradients(*args, **kwargs)
        failed, self._failed = self._failed, None
        try:
            self._ranks.agree(failed)
        except AgentFlyError:
            self._optimizer.zero_grad()
            raise
        return found

    def _backward(self, optimizer: Optimizer, loss: Tensor) -> None:
        optimizer.backward(loss * self._size)

    def _is_divided(self, experience: Experience, micro: Sequence[MicroBatch]) -> bool:
        scope = self._scope(experience) if experience.recomputed is None else self.algorithm.loss_scope
        return scope != "token"

    def _slopes(
        self, experience: Experience, micro: Sequence[MicroBatch], minibatch: Minibatch, totals: Totals
    ) -> tuple[Tensor, Tensor]:
        found = torch.zeros_like(experience.sampled), torch.zeros((), device=self.device)
        try:  # every rank computes all slopes; rank 0 measures
            with torch.enable_grad():
                found = super()._slopes(experience, micro, minibatch, totals if self._ranks.leads else Totals())
        except AgentFlyError as error:
            self._failed = self._failed or error
        return found

    def _present_logprobs(
        self, experience: Experience, micro: Sequence[MicroBatch], minibatch: Minibatch
    ) -> tuple[Tensor, Tensor]:
        tokens, logprobs = super()._present_logprobs(experience, micro, minibatch)
        every, chosen = torch.zeros_like(experience.sampled), torch.zeros_like(experience.sampled)
        every[tokens], chosen[tokens] = logprobs.to(every.dtype), 1.0
        wanted = torch.nonzero(self._ranks.sum(chosen))[:, 0]
        return wanted, self._ranks.sum(every)[wanted]

    def _over_ranks(self, totals: Totals) -> Totals:
        def add_up(values: list[float]) -> list[float]:
            found: list[float] = self._ranks.sum(torch.tensor(values, dtype=torch.float64)).tolist()
            return found

        return totals.summed(add_up)

    def _add_up(self, tensor: Tensor) -> Tensor:
        return self._ranks.sum(tensor)

    def _check_measured(self, *found: Totals) -> None:
        known = Totals()
        for totals in found:
            known.merge(totals)
        measured = self._over_ranks(known).means()
        try:
            with self._ranks.together():
                if self._check is not None:
                    self._check(measured)
        except BaseException:
            self._optimizer.zero_grad()
            raise

    def _announce_change(self) -> None:
        if self._changing is None:
            return
        try:
            with self._ranks.together():
                super()._announce_change()
        except BaseException:
            self._optimizer.zero_grad()
            raise

    def _values_of(self, batch: MicroBatch) -> Tensor:
        values = super()._values_of(batch)
        free(self._critic if self._critic is not None else self._value_head)
        return values

    # -- other commands --------------------------------------------------------------------------------------------------------

    def examine(self, samples: Sequence[Sample], drawn: int = 0) -> TokenFit:
        return self._lead(samples, drawn, self._scorer.temperature)

    def score(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Returns the log-prob of every id from the second on."""
        return self._lead([row_of([(ids[:1], ids[1:], [0.0] * (len(ids) - 1))])], 0, temperature).logprobs[0]

    def _lead(self, samples: Sequence[Sample], drawn: int, temperature: float) -> TokenFit:
        rows = [(sample.token_ids.tolist(), sample.mask.tolist()) for sample in samples]
        with self._ranks.leading("examine"):
            self._ranks.broadcast(encode([rows, drawn, float(temperature), self._budget.tokens]))
            return self._examine(samples, drawn, temperature)
        raise AssertionError("unreachable: `leading` raises")

    def _follow_examine(self) -> None:
        rows, drawn, temperature, self._budget.tokens = decode(self._ranks.broadcast(None))
        nothing: Any = [np.zeros(len(ids)) for ids, _ in rows]
        made = [Sample(ids, mask, none, none, none, none) for (ids, mask), none in zip(rows, nothing, strict=True)]
        self._examine(made, drawn, temperature)

    def _examine(self, samples: Sequence[Sample], drawn: int, temperature: float) -> TokenFit:
        former, self._scorer.temperature = self._scorer.temperature, temperature
        try:
            return super().examine(samples, drawn)
        finally:
            self._scorer.temperature = former

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
        return in_buckets([(name, tensor.numel() * self._dtype.itemsize) for name, tensor in self._plain_names.items()])

    @cached_property
    def _plain_names(self) -> dict[str, Tensor]:
        """Returns the tensors of the model without adapters by name; their data is not there."""
        from ...engines.local.load import merged_weights

        with torch.device("meta"):
            found: dict[str, Tensor] = merged_weights(self._meta)
        return found

    @torch.no_grad()
    def _gather_bucket(self, number: int) -> list[tuple[str, Tensor]]:
        from ...engines.local.load import plain_tensors

        held = {name: (tensor, adapter) for name, tensor, adapter in plain_tensors(self.model)}
        found: list[tuple[str, Tensor]] = []
        for name in self._buckets[number]:
            part, layer = held[name]
            if layer is not None:
                base, a, b = (whole(tensor, self._dtype) for tensor in (layer.frozen, layer.lora_a, layer.lora_b))
                tensor = (base.float() + layer.scale * (b.float() @ a.float())).to(base.dtype)
            else:
                tensor = whole(part, self._dtype if part.dtype == torch.float32 and self._dtype in HALF else None)
            if self._ranks.leads:
                found.append((name, tensor))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # gathered to the end before it is handed out
        return found

    # -- checkpoints -----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state with marks for sharded tensors: `snapshot` writes those."""
        state: dict[str, Any] = mark(super().state_dict())
        return {**state, "ranks": self._size}

    def _tensors(self) -> dict[str, Any]:
        """Returns all sharded tensors to save: those of `state_dict`, and the trained weights of the policy."""
        policy = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        return dict(sharded({**super().state_dict(), "policy": policy}))

    def snapshot(self, staging: Path) -> Writer:
        """Copy the state of all ranks to memory. Returns a function that writes the checkpoint's files into a folder.

        The other ranks write their shards to the folder `staging` in the meantime, from where the function moves them.
        """
        weights = {name: tensor.to("cpu", copy=True) for bucket in self.weights() for name, tensor in bucket}
        with self._ranks.leading("save", staging=str(staging)):
            adapter = self._gather_adapter()
            shards = {path: shard_of(tensor) for path, tensor in self._tensors().items()}

        def write(folder: Path) -> None:
            try:
                save_checkpoint_model(self._meta, None, folder, {"model": weights, "adapter": adapter})
                (folder / FOLDER).mkdir()
                write_shards(folder / FOLDER / file_name(0, self._size), shards)
                collect_shards(staging, folder / FOLDER, self._size, self._timeout_s)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

        return write

    def _follow_save(self, staging: str) -> None:
        self._gather_adapter()
        shards = {path: shard_of(tensor) for path, tensor in self._tensors().items()}
        if self._writing is not None:
            self._writing.join()
        work = partial(write_for_rank_0, Path(staging), self._ranks.rank, self._size, shards)
        self._writing = threading.Thread(target=work, name="agentfly-shards")
        self._writing.start()

    def _gather_adapter(self) -> dict[str, Tensor]:
        if not is_adapted(self.model):
            return {}
        return {name: whole(part, self._dtype).to("cpu", copy=True) for name, part in adapter_weights(self.model).items()}

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        with self._ranks.leading("load", checkpoint=str(checkpoint)), self._ranks.together():
            self._load(checkpoint, state)

    def _follow_load(self, checkpoint: str) -> None:
        with self._ranks.together():
            path = Path(checkpoint)
            if not path.is_dir():
                raise ConfigError(f"{path} is not there: the run's folder must be shared by all machines")
            self._load(path, load_state(path / STATE, mapped=True)["learner"])

    def _load(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load a checkpoint that any number of ranks has saved."""
        if state.get("ranks"):
            files = ShardFiles(checkpoint / FOLDER)
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    assign(parameter, partial(files.rows, f"policy/{name}"))
            state = fill(state, lambda path: partial(files.rows, path))
        else:
            self._load_plain_weights(checkpoint)
            self._load_masters(state)
        self.load_state_dict(state)

    def _load_plain_weights(self, checkpoint: Path) -> None:
        """Load the weights that one process has saved."""
        adapted = is_adapted(self.model)
        files = PlainFiles(checkpoint / ADAPTER if adapted else checkpoint)
        names = {id(p): name for name, p in self.model.named_parameters()}
        tensors: list[tuple[str, Tensor]]
        if adapted:
            tensors = [
                (f"base_model.model.{name}.lora_{part}.weight", matrix)
                for name, module in adapters(self.model)
                for part, matrix in (("A", module.lora_a), ("B", module.lora_b))
            ]
        else:
            tensors = [(names[id(p)], p) for p in self.model.parameters()]
            tensors += [(name, b) for name, b in self.model.named_buffers() if name in self._plain_names]
        for name, tensor in tensors:
            files.check(name, tuple(tensor.shape))
            assign(tensor, partial(files.rows, name))

    def _load_masters(self, state: Mapping[str, Any]) -> None:
        """Take the float32 masters of one process for the float32 parameters of the ranks."""
        owners: list[tuple[str, list[nn.Module]]] = [
            ("optimizer", [self.model]),
            ("critic_optimizer", [] if self._critic is None else [self._critic.backbone]),
        ]
        for key, modules in owners:
            masters = (state[key] or {}).get("masters", [])
            trained = [p for module in modules for p in module.parameters() if p.requires_grad]
            if masters and len(masters) != len(trained):
                raise ConfigError(f"the checkpoint has {len(masters)} float32 weights instead of {len(trained)}")
            self._later += [(p, _rows_of(m)) for p, m in zip(trained, masters, strict=False)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        later, self._later = self._later, []
        super().load_state_dict(state)
        for parameter, read in later:  # after the modules, whose own weights are rounded
            assign(parameter, read)

    def _load_module(self, module: nn.Module, saved: Mapping[str, Any]) -> None:
        held = module.state_dict()
        if set(held) != set(saved):
            raise ConfigError(f"the checkpoint has other tensors: {sorted(set(held) ^ set(saved))[:3]}")
        for name, tensor in held.items():
            assign(tensor, _rows_of(saved[name]))

    def _load_optimizer(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
        adam = dict(saved["adam"])
        parameters = optimizer.adam_parameters
        if set(adam["state"]) - set(range(len(parameters))):
            raise ConfigError("the checkpoint's optimizer has other parameters")
        adam["state"] = {
            number: {
                name: shard_like(parameters[number], _rows_of(value)) if name.startswith("exp_") else value
                for name, value in values.items()
            }
            for number, values in adam["state"].items()
        }
        optimizer.load_state_dict({**saved, "adam": adam, "masters": []})

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


def _rows_of(value: Any) -> Read:
    """Returns a function that gives rows of a saved tensor, which is there or is read when it is needed."""
    if isinstance(value, Tensor):
        return lambda first, last: value[first:last] if value.dim() else value.reshape(1)
    read: Read = value
    return read
