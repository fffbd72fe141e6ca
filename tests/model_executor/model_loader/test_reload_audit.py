# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The audit finds every fault that is planted in an update, and names the tensor."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from vllm.model_executor.model_loader.reload import zoo
from vllm.model_executor.model_loader.reload.audit import (
    Difference,
    Held,
    compare,
    digest,
)
from vllm.model_executor.model_loader.reload.audit_run import (
    Seen,
    _replayed,
    largest_difference,
    reason_of,
)
from vllm.model_executor.model_loader.reload.audited_engine import (
    AuditedEngine,
    engine,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="on a GPU, real checkpoints are audited"
)

Weights = Iterable[tuple[str, torch.Tensor]]
#: What happens to the tensors of an update on their way to the model.
OnTheWay = Callable[[Weights], Weights]
#: What happens to a module, and how to undo it.
Afterwards = Callable[[torch.nn.Module, ExitStack], None]

LAYER = "model.layers.1."
ATTENTION = LAYER + "self_attn."


def without(name: str) -> OnTheWay:
    return lambda weights: ((n, t) for n, t in weights if n != name)


def instead(name: str, other: str) -> OnTheWay:
    """`name` arrives twice, and `other` never."""

    def renamed(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        held = dict(weights)
        held[other] = held[name]
        yield from held.items()

    return renamed


def swapped(one: str, other: str) -> OnTheWay:
    names = {one: other, other: one}
    return lambda weights: (
        (name.replace(found, names[found]) if found else name, tensor)
        for name, tensor in weights
        for found in [next((each for each in names if each in name), "")]
    )


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> OnTheWay:
    return lambda weights: (
        (n, change(t.clone()) if n == name else t) for n, t in weights
    )


def heads_swapped(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(0, (4, -1))[[1, 0, 2, 3]].flatten(0, 1)


def one_ulp_more(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(torch.int16).view(-1)
    flat[flat.numel() // 2] += 1
    return tensor


def rebound(attention: torch.nn.Module, undo: ExitStack) -> None:
    old = attention.W_UV
    undo.callback(setattr, attention, "W_UV", old)
    attention.W_UV = torch.nn.Parameter(old.clone(), requires_grad=False)


def kept_in_a_closure(linear: torch.nn.Module, undo: ExitStack) -> None:
    old, weight = linear.cpu_linear, linear.weight + 1
    undo.callback(setattr, linear, "cpu_linear", old)
    linear.cpu_linear = lambda x, _, bias: old(x, weight, bias)


def number(name: str) -> Afterwards:
    def stale(module: torch.nn.Module, undo: ExitStack) -> None:
        undo.callback(setattr, module, name, getattr(module, name))
        setattr(module, name, 0.5)

    return stale


def contents(name: str, row: Any = ...) -> Afterwards:
    def garbage(module: torch.nn.Module, undo: ExitStack) -> None:
        tensor = getattr(module, name).data
        undo.callback(tensor.copy_, tensor.clone())
        tensor[row] = 7

    return garbage


def refresh_dropped(attention: torch.nn.Module, undo: ExitStack) -> None:
    old = attention.W_UK_T.data
    undo.callback(setattr, attention.W_UK_T, "data", old)
    undo.callback(delattr, attention, "process_weights_after_loading")
    attention.W_UK_T.data = old.clone()  # no view of what it is derived from
    attention.process_weights_after_loading = lambda dtype: None


EXPERTS = LAYER + "mlp.experts."
SHARED = LAYER + "mlp.shared_experts."
MLA = ATTENTION + "mla_attn.mla_attn"
ROTARY = "model.layers.0.self_attn.rotary_emb"


@dataclass(frozen=True)
class Fault:
    """What must be found, how and where; what happens to the tensors `on_the_way`, or
    to the module at `path` `before` the update or `afterwards`.
    """

    how: str
    path: str
    on_the_way: OnTheWay | None = None
    before: Afterwards | None = None
    afterwards: Afterwards | None = None

    @property
    def module(self) -> str:
        return self.path.rpartition(".")[0].removesuffix(".cpu_linear")


FAULTS = {
    "one loader call is skipped": Fault(
        "stale", SHARED + "down_proj.weight", without(SHARED + "down_proj.weight")
    ),
    "one is made twice and its neighbour's never": Fault(
        "wrong",
        SHARED + "gate_up_proj.weight",
        instead(SHARED + "gate_proj.weight", SHARED + "up_proj.weight"),
    ),
    "a derived tensor is rebound": Fault("moved", MLA + ".W_UV", afterwards=rebound),
    "a refresh is dropped": Fault("stale", MLA + ".W_UK_T", before=refresh_dropped),
    "two experts are swapped": Fault(
        "wrong",
        EXPERTS + "routed_experts.w13_weight",
        swapped(EXPERTS + "0.", EXPERTS + "1."),
    ),
    "two heads are swapped": Fault(
        "wrong",
        ATTENTION + "q_b_proj.weight",
        changed(ATTENTION + "q_b_proj.weight", heads_swapped),
    ),
    "a square one is transposed": Fault(
        "wrong",
        ATTENTION + "kv_b_proj.weight",
        changed(ATTENTION + "kv_b_proj.weight", lambda t: t.t().contiguous()),
    ),
    "one element is one ulp off": Fault(
        "wrong", "model.norm.weight", changed("model.norm.weight", one_ulp_more)
    ),
    "a closure keeps one": Fault(
        "new", ATTENTION + "o_proj.cpu_linear.weight", afterwards=kept_in_a_closure
    ),
    "a buffer is reset": Fault(
        "wrong", ROTARY + ".cos_sin_cache", afterwards=contents("cos_sin_cache")
    ),
    "a padded row has garbage": Fault(
        "wrong", "lm_head.weight", afterwards=contents("weight", -1)
    ),
    "the host's number of a scale is stale": Fault(
        "wrong", MLA + "._k_scale_float", afterwards=number("_k_scale_float")
    ),
    "the host's tensor of a scale is stale": Fault(
        "wrong", MLA + "._k_scale_cpu", afterwards=contents("_k_scale_cpu")
    ),
}


def held(digest: str = "a", address: int = 1) -> Held:
    return Held("Owner", "parameter", "torch.int8", (1,), (1,), address, digest)


def test_each_way_to_differ_has_a_name() -> None:
    before = {
        "same": held("a"),
        "stale": held("a"),
        "wrong": held("a"),
        "moved": held(),
    }
    fresh = {"same": held("b"), "stale": held("b"), "wrong": held("b")}
    fresh |= {"moved": held("b"), "lost": held()}
    after = {"same": held("b"), "stale": held("a"), "wrong": held("c")}
    after |= {"moved": held("b", address=2), "new": held()}
    assert asdict(compare(before, after, fresh)) == {
        how: (how,) for how in ("stale", "wrong", "moved", "lost", "new")
    }
    assert not compare(before, fresh, fresh)


def test_a_digest_is_of_the_elements_in_order_and_of_every_bit() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, -0.0]])
    assert digest(tensor) == digest(tensor.t().contiguous().t())
    assert digest(tensor) != digest(tensor.t()) != digest(tensor.abs())
    assert digest(torch.tensor(2, dtype=torch.int8)) != digest(torch.tensor(2))
    assert digest(torch.empty(3, device="meta")) == "meta"


@pytest.mark.parametrize(
    ("some", "others", "difference"),
    [
        (((1.0, 2.0),), ((1.0, 2.5),), 0.5),
        (((nan, inf),), ((nan, inf),), 0.0),
        (((nan,),), ((1.0,),), inf),
        (((1.0,),), ((1.0, 1.0),), inf),
        ((), (), 0.0),
        (None, ((1.0,),), None),
    ],
)
def test_outputs_differ_by_their_largest_difference(some, others, difference) -> None:
    assert largest_difference(some, others) == difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not hasattr(AttentionBackendEnum, "CPU_MLA"):
        pytest.skip("this release has no MLA on CPU")
    folder = tmp_path_factory.mktemp("checkpoints")
    recipe = zoo.tiny("DeepseekV2ForCausalLM")
    recipe.write(folder / "A", 1)
    recipe.write(folder / "B", 2)
    return folder


def start(checkpoint: Path) -> AbstractContextManager[AuditedEngine]:
    return engine(checkpoint, num_gpu_blocks_override=32)


@pytest.fixture(scope="module")
def fresh(folder: Path) -> dict[str, Seen]:
    with start(folder / "B") as cold:
        return {"B": Seen.of(cold)}


@pytest.fixture(scope="module")
def warm(
    folder: Path, fresh: dict[str, Seen]
) -> Iterator[tuple[AuditedEngine, torch.nn.Module]]:
    """An engine on A, and its model."""
    with start(folder / "A") as running:
        fresh["A"] = Seen.of(running)
        (model,) = running._call(lambda worker: worker.get_model())
        yield running, model


def updated(warm: AuditedEngine, target: str, fresh: dict[str, Seen]) -> Difference:
    after = Seen.of(warm)
    (difference,) = (
        compare(*held)
        for held in zip(
            fresh["A"].snapshots, after.snapshots, fresh[target].snapshots, strict=True
        )
    )
    return difference


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, folder, fresh, warm) -> None:
    fault, (running, model) = FAULTS[name], warm
    assert not updated(running, "A", fresh)
    with ExitStack() as undo:
        place = model.get_submodule(fault.module)
        if fault.before:
            fault.before(place, undo)
        if fault.on_the_way:
            load, change = model.load_weights, fault.on_the_way
            undo.callback(delattr, model, "load_weights")
            model.load_weights = lambda weights: load(change(weights))
        running.update(folder / "B")
        if fault.afterwards:
            fault.afterwards(place, undo)
        found = updated(running, "B", fresh)
        assert fault.path in getattr(found, fault.how), found
    running.update(folder / "A")


def test_no_fault_is_found_where_none_is(folder, fresh, warm) -> None:
    running, _ = warm
    running.update(folder / "B")
    assert not updated(running, "B", fresh)
    assert largest_difference(running.outputs(), fresh["B"].outputs) == 0.0
    assert largest_difference(running.outputs(), fresh["A"].outputs) > 1.0
    running.update(folder / "A")


def test_a_graph_that_was_recorded_before_an_update_sees_what_moved(
    folder, monkeypatch
) -> None:
    checkpoints = {"A": folder / "A", "B": folder / "B"}
    options = {"num_gpu_blocks_override": 32}
    assert _replayed(checkpoints, ["update"], options) == {"update": 0.0}
    update = AuditedEngine.update

    def moving(running: AuditedEngine, checkpoint: Path) -> None:
        (model,) = running._call(lambda worker: worker.get_model())
        norm = model.get_submodule("model.norm")
        norm.weight.data = norm.weight.data.clone()
        update(running, checkpoint)

    monkeypatch.setattr(AuditedEngine, "update", moving)
    assert _replayed(checkpoints, ["update"], options)["update"] > 0.1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("pass trust_remote_code=True"), "needs remote code"),
        (ModuleNotFoundError("x", name="timm.layers"), "needs a package"),
        (ImportError("it requires the Torchvision library"), "needs a package"),
        (NotImplementedError("no"), "not on this device: NotImplementedError: no"),
        (AttributeError("'_moe_C' object has no attribute 'x'"), "not on this device"),
        (KeyError("w13_weight"), None),
        (AssertionError(), None),
    ],
)
def test_an_error_that_is_no_reason_is_an_error(error, reason) -> None:
    found = reason_of(error)
    assert found is None if reason is None else found.startswith(reason)
