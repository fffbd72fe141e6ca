# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether a weight update leaves every tensor as a fresh start on the new weights does.

The oracle is a snapshot: the digest and the place of every tensor that a model reaches
(`inventory`). A warm engine is compared with a cold one by digest, so the two need not
run at the same time, or in the same process; and with itself before the update by
place, since a captured graph reads where the tensor was.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from vllm.model_executor.model_loader.reload.inventory import (
    Entry,
    inventory,
    is_of_requests,
    poison,
)


@dataclass(frozen=True)
class Held:
    """One entry of an inventory at one time: what it is and where it lies. `digest` is
    of its bytes in the order of its elements; None for an opaque one.
    """

    owner: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    address: int
    digest: str | None

    @property
    def place(self) -> tuple[Any, ...]:
        """What a captured graph holds of it."""
        return self.address, self.shape, self.stride, self.dtype


#: By path.
Snapshot = Mapping[str, Held]


def snapshot(model: torch.nn.Module) -> Snapshot:
    """Every tensor of `model` but those of running requests (KV caches)."""
    return {
        path: _held(entry)
        for path, entry in inventory(model).items()
        if not is_of_requests(path)
    }


def _held(entry: Entry) -> Held:
    value = entry.value
    storage = entry.storage
    if storage is not None:
        return Held(
            entry.owner,
            entry.kind,
            str(storage.dtype),
            storage.shape,
            storage.stride,
            storage.address,
            digest(value),
        )
    # A number has no place: nothing but the host reads it.
    known = repr(value) if entry.kind == "number" else None
    return Held(entry.owner, entry.kind, type(value).__name__, (), (), 0, known)


def digest(tensor: torch.Tensor) -> str:
    """A digest of the bytes of `tensor`'s elements, in order; NaNs of other bits
    differ.
    """
    if tensor.is_meta:
        return "meta"
    plain = tensor.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.blake2b(plain.numpy(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Difference:
    """The paths of the tensors for which an update is not a fresh start.

    `stale` still have the old bytes, `wrong` neither the old nor the new ones; `moved`
    lie elsewhere, or otherwise, than before the update; `lost` are only in a fresh
    engine and `new` only in the updated one.
    """

    stale: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any(asdict(self).values())


def compare(before: Snapshot, after: Snapshot, fresh: Snapshot) -> Difference:
    """How an engine that was `before` an update and is `after` it differs from one
    that started `fresh` on the new weights.
    """
    both = [path for path in fresh if path in after]
    unequal = [path for path in both if not _same(after[path], fresh[path])]
    stale = [
        path for path in unequal if path in before and _same(after[path], before[path])
    ]
    return Difference(
        stale=tuple(stale),
        wrong=tuple(path for path in unequal if path not in stale),
        moved=tuple(
            path
            for path in after
            if path in before and after[path].place != before[path].place
        ),
        lost=tuple(path for path in fresh if path not in after),
        new=tuple(path for path in after if path not in fresh),
    )


def _same(one: Held, other: Held) -> bool:
    return all(
        getattr(one, what) == getattr(other, what)
        for what in ("digest", "dtype", "shape")
    )


class AuditWorker:
    """What an audited engine's workers can do besides. It goes in as
    `worker_extension_cls`, and works with the models of each worker.
    """

    model_runner: Any

    def audit_snapshot(self) -> dict[str, dict[str, Any]]:
        """The snapshot of this worker's part of the model, in plain values."""
        return {
            path: asdict(held)
            for path, held in snapshot(self.model_runner.get_model()).items()
        }

    def audit_poison(self, seed: int) -> None:
        """Overwrite all that a level-2 sleep discards."""
        poison(self.model_runner.get_model(), seed)

    def audit_graphs(self, on: bool) -> int:
        """Have steps of one token run by recorded graphs from now on, or no longer; how
        many graphs there are.
        """
        from vllm.model_executor.model_loader.reload.recorded_graph import (
            GraphedForward,
        )

        runner = self.model_runner
        if not isinstance(runner._model_forward, GraphedForward):
            runner._model_forward = GraphedForward(runner._model_forward)
        runner._model_forward.replaying = on
        return len(runner._model_forward.graphs)


def from_plain(plain: Mapping[str, Mapping[str, Any]]) -> Snapshot:
    """A snapshot as `AuditWorker` gives it."""
    return {
        path: Held(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in held.items()
            }
        )
        for path, held in plain.items()
    }
