# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Audits one pair of checkpoints: every mode of updating against a fresh start."""

import math
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vllm.model_executor.model_loader.reload.audit import (
    Difference,
    Snapshot,
    compare,
)
from vllm.model_executor.model_loader.reload.audited_engine import (
    AuditedEngine,
    Outputs,
    engine,
    loader,
)
from vllm.model_executor.model_loader.reload.recorded_graph import GraphError
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

Verdict = Literal["equal", "unequal", "not-auditable", "error"]

#: The updates of each mode, on an engine that started on A; a number is a seed for
#: garbage in place of every weight.
MODES: dict[str, tuple[str | int, ...]] = {
    "same": ("A",),
    "update": ("B",),
    "back": ("B", "A"),
    "repeat": ("A", "B") * 5,
    "poisoned": (0, "B"),
}


@dataclass(frozen=True)
class Row:
    """What one mode showed.

    `tensors` is how many were compared, over all workers; the others hold paths, as in
    `Difference`. `logits` is the largest absolute difference from the fresh engine's,
    None where the model was not run; `graph` that of replayed from eager steps after
    the update, or why no step was recorded; None where it was not tried.
    """

    architecture: str
    mode: str
    tp: int
    verdict: Verdict
    reason: str = ""
    tensors: int = 0
    stale: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    logits: float | None = None
    graph: float | str | None = None
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Seen:
    """What an engine holds and answers at one time."""

    snapshots: tuple[Snapshot, ...]
    outputs: Outputs | None

    @classmethod
    def of(cls, running: AuditedEngine) -> "Seen":
        # After the answers, since some tensors are made on the first forward.
        outputs = running.outputs()
        return cls(tuple(running.snapshots()), outputs)


def audit(
    name: str, a: Path, b: Path, modes: Sequence[str], backend: str = "", **options: Any
) -> Iterator[Row]:
    """A row for each of `modes`, for an engine that serves `a` and is updated to `b`.

    A model that this device cannot run is loaded and not run; `backend` is then the
    attention backend that it is built with, where this device has none. `options` are
    the engine's.
    """
    blank = Row(name, "", options.get("tensor_parallel_size", 1), "error")
    start: Start = partial(engine, **options)
    not_run = ""
    try:
        fresh_b = _fresh(start, b)
    except Exception as error:
        error = _cause(name, error)
        not_run = reason_of(error) or ""
        try:
            if not not_run.startswith(NOT_HERE):
                raise error
            start = partial(loader, backend=backend, **options)
            fresh_b = _fresh(start, b)
        except Exception as error:
            reason = reason_of(error)
            failed = replace(
                blank,
                verdict="not-auditable" if reason else "error",
                reason=reason or f"a fresh start raised {one_line(error)}",
            )
            yield from (replace(failed, mode=mode) for mode in modes)
            return
    checkpoints = {"A": a, "B": b}
    graphs: dict[str, float | str] = {}
    graphed = [mode for mode in GRAPHED if mode in modes]
    if graphed and not not_run and current_platform.is_cpu():
        graphs = _replayed(checkpoints, graphed, options)
    waiting = list(modes)
    while waiting:
        # One engine goes through the modes until one leaves it other than it should be.
        began = time.monotonic()
        with start(a) as warm:
            fresh = {"A": Seen.of(warm), "B": fresh_b}
            while waiting:
                mode = waiting.pop(0)
                row = _audited(
                    replace(blank, mode=mode), warm, MODES[mode], checkpoints, fresh
                )
                clean = row.verdict == "equal"
                graph = graphs.get(mode)
                if clean and isinstance(graph, float) and graph:
                    row = replace(
                        row,
                        verdict="unequal",
                        reason="a graph recorded before the update answers otherwise",
                    )
                yield replace(
                    row,
                    graph=graph,
                    reason=row.reason or not_run,
                    seconds=round(time.monotonic() - began, 2),
                )
                began = time.monotonic()
                if not clean:
                    break


Start = Callable[[Path], AbstractContextManager[AuditedEngine]]


def _fresh(start: Start, checkpoint: Path) -> Seen:
    with start(checkpoint) as cold:
        return Seen.of(cold)


def _cause(architecture: str, error: Exception) -> Exception:
    """What the registry only logs where the class of a model cannot be imported."""
    if "failed to be inspected" in str(error):
        try:
            ModelRegistry.models[architecture].load_model_cls()
        except Exception as cause:
            return cause
    return error


#: Reasons why a model cannot be audited, or not be run.
NOT_HERE = "not on this device"
REMOTE_CODE = "needs remote code"
PACKAGE = "needs a package that is not installed"

#: What an error says where a kernel is for other devices.
_OF_OTHER_DEVICES = re.compile(
    "CPU|'_(moe_)?C' object has no attribute|no valid sparse MLA|[Tt]riton|"
    "CUDA|cuda|GPU|[Ff]lash[Ii]nfer"
)


def reason_of(error: BaseException) -> str | None:
    """Why a model cannot be audited here, from a short closed list; None for an error
    that is none of them.
    """
    text = one_line(error)
    if "trust_remote_code" in text:
        return REMOTE_CODE
    if isinstance(error, ImportError) and error.name:
        package = error.name.partition(".")[0]
        if package != "vllm":
            return f"{PACKAGE}: {package}"
    if named := re.search(r"requires? the (\w+) library|No module named '(\w+)", text):
        return f"{PACKAGE}: {(named[1] or named[2]).lower()}"
    frames = traceback.extract_tb(error.__traceback__)
    of_the_device = isinstance(error, AssertionError) and any(
        "cpu" in Path(frame.filename).name for frame in frames[-1:]
    )
    if (
        isinstance(error, NotImplementedError)
        or of_the_device
        or _OF_OTHER_DEVICES.search(text)
    ):
        return f"{NOT_HERE}: {text}"
    return None


def _audited(
    blank: Row,
    warm: AuditedEngine,
    steps: Sequence[str | int],
    checkpoints: dict[str, Path],
    fresh: dict[str, Seen],
) -> Row:
    """The row of an engine on A for `steps`; brings the engine back to A."""
    target = str(steps[-1])
    try:
        _go(warm, steps, checkpoints)
        after = Seen.of(warm)
    except Exception as error:
        return replace(
            blank, verdict="unequal", reason=f"the update raised {one_line(error)}"
        )
    found = merged(
        compare(*held)
        for held in zip(
            fresh["A"].snapshots,
            after.snapshots,
            fresh[target].snapshots,
            strict=True,
        )
    )
    logits = largest_difference(after.outputs, fresh[target].outputs)
    row = replace(
        blank,
        verdict="unequal" if found or logits else "equal",
        reason=_in_words(found, logits),
        tensors=sum(map(len, fresh[target].snapshots)),
        logits=logits,
        **asdict(found),
    )
    if row.verdict == "equal" and target != "A":
        warm.update(checkpoints["A"])
    return row


def _in_words(found: Difference, logits: float | None) -> str:
    counts = ", ".join(
        f"{len(paths)} {how}" for how, paths in asdict(found).items() if paths
    )
    if counts or not logits:
        return counts
    return "only what the model answers differs: by state that no inventory shows"


def merged(differences: Iterator[Difference]) -> Difference:
    """Those of all workers, whose parts of the model have the same paths."""
    found: dict[str, dict[str, None]] = {}
    for difference in differences:
        for how, paths in asdict(difference).items():
            found.setdefault(how, {}).update(dict.fromkeys(paths))
    return Difference(**{how: tuple(paths) for how, paths in found.items()})


def largest_difference(some: Outputs | None, others: Outputs | None) -> float | None:
    """The largest absolute difference; infinite where one has other numbers of rows or
    a value that the other lacks.
    """
    if some is None or others is None:
        return None
    if [len(row) for row in some] != [len(row) for row in others]:
        return math.inf
    return max(
        (
            _difference(one, other)
            for row, others_row in zip(some, others, strict=True)
            for one, other in zip(row, others_row, strict=True)
        ),
        default=0.0,
    )


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


#: The modes for which a step is also run by graphs that were recorded on A.
GRAPHED = ("update", "poisoned")


def _replayed(
    checkpoints: dict[str, Path], modes: Sequence[str], options: dict[str, Any]
) -> dict[str, float | str]:
    """For each of `modes`, how far steps that run by graphs recorded on A are from the
    same steps run eagerly, after the update; or why none could be recorded.
    """
    found: dict[str, float | str] = {}
    try:
        with engine(checkpoints["A"], graphs=True, **options) as warm:
            warm.graphs(on=True)
            warm.outputs()
            recorded = warm.graphs(on=True)
            for mode in modes:
                _go(warm, MODES[mode], checkpoints)
                by_graph = warm.outputs()
                if warm.graphs(on=False) != recorded or not recorded:
                    raise GraphError(f"{recorded} steps of one token were recorded")
                difference = largest_difference(by_graph, warm.outputs())
                found[mode] = math.inf if difference is None else difference
                _go(warm, ("A",), checkpoints)
                warm.graphs(on=True)
    except Exception as error:
        return dict.fromkeys(modes, f"no graph: {one_line(error)}") | found
    return found


def _go(
    warm: AuditedEngine, steps: Sequence[str | int], checkpoints: dict[str, Path]
) -> None:
    for step in steps:
        if isinstance(step, int):
            warm.poison(step)
        else:
            warm.update(checkpoints[step])


def one_line(error: BaseException) -> str:
    """`error` in one line, with its class."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text else name
