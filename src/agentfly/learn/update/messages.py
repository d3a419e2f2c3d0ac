"""The chains of one step as bytes: what the ranks need of `Experience`, without trajectories. Rank 0 computes the credit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...codec import decode, encode
from ...types import Sample
from ..algorithms import Credit
from ..batching import Rows
from ..experience import Experience

_ARRAYS: dict[str, Any] = {"rewards": np.float64, "owners": np.int64, "lags": np.int64}
_TENSORS: dict[str, Any] = {
    "sampled": np.float32,
    "current": np.bool_,
    "fresh": np.bool_,
    "turn_of": np.int64,
    "group_of": np.int64,
}


def pack_experience(experience: Experience) -> bytes:
    """Returns the bytes that `unpack_experience` reads."""
    samples = experience.samples
    return encode(
        {
            "ids": _line([sample.token_ids for sample in samples], np.int64),
            "mask": _line([sample.mask for sample in samples], np.bool_),
            "lengths": [len(sample.token_ids) for sample in samples],
            "chain_rows": [len(rows) for rows in experience.chain_rows],
            "groups": experience.groups,
            "num_groups": experience.num_groups,
            "num_untrainable": experience.num_untrainable,
            "window": experience.window,
            "trained": None if experience.trained is None else experience.trained.tobytes(),
            "inexact": None if experience.inexact is None else experience.inexact.cpu().numpy().tobytes(),
            **{name: getattr(experience, name).astype(kind).tobytes() for name, kind in _ARRAYS.items()},
            **{name: getattr(experience, name).cpu().numpy().astype(kind).tobytes() for name, kind in _TENSORS.items()},
        }
    )


def unpack_experience(data: bytes, device: torch.device) -> Experience:
    """Returns an experience that trains as the packed one; its trajectories are empty."""
    fields: dict[str, Any] = decode(data)
    edges = np.cumsum([0, *fields["lengths"]])
    ids, mask = _array(fields["ids"], np.int64), _array(fields["mask"], np.bool_)
    samples = []
    for a, b in pairwise(edges):
        nothing = np.zeros(b - a)
        samples.append(Sample(ids[a:b], mask[a:b], nothing, nothing, nothing, np.zeros(b - a)))
    firsts = np.cumsum([0, *fields["chain_rows"]]).tolist()
    arrays: dict[str, Any] = {name: _array(fields[name], kind) for name, kind in _ARRAYS.items()}
    tensors: dict[str, Any] = {name: torch.from_numpy(_array(fields[name], kind)).to(device) for name, kind in _TENSORS.items()}
    inexact = fields["inexact"]
    return Experience(
        samples=samples,
        trajectories=[],
        rows=Rows(samples),
        chain_rows=[range(a, b) for a, b in pairwise(firsts)],
        groups=fields["groups"],
        num_groups=fields["num_groups"],
        num_untrainable=fields["num_untrainable"],
        window=fields["window"],
        trained=None if fields["trained"] is None else _array(fields["trained"], np.bool_),
        inexact=None if inexact is None else torch.from_numpy(_array(inexact, np.bool_)).to(device),
        chain_of=torch.from_numpy(arrays["owners"]).to(device),
        **arrays,
        **tensors,
    )


def pack_credit(credit: Credit) -> bytes:
    """Returns the bytes that `unpack_credit` reads."""
    returns = credit.returns
    return encode(
        {
            "lengths": [len(values) for values in credit.advantages],
            "advantages": _line(credit.advantages, np.float64),
            "returns": None if returns is None else _line(returns, np.float64),
        }
    )


def unpack_credit(data: bytes) -> Credit:
    """Returns the credit that rank 0 has computed."""
    fields: dict[str, Any] = decode(data)
    edges = np.cumsum(fields["lengths"])[:-1]
    parts = {
        name: None if fields[name] is None else np.split(_array(fields[name], np.float64), edges) if fields["lengths"] else []
        for name in ("advantages", "returns")
    }
    return Credit(parts["advantages"] or [], parts["returns"])


def _line(parts: Sequence[Any], kind: type[np.generic]) -> bytes:
    return np.concatenate([np.zeros(0, dtype=kind), *(np.asarray(part, dtype=kind) for part in parts)]).tobytes()


def _array(data: bytes, kind: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(bytearray(data), dtype=kind)
