"""What a graph serves after a weight update: before the fix and after it, beside a fresh engine.

A tiny MLA model (DeepSeek-V2) and a tiny sink model (GPT-OSS), bf16, checkpoints A and B. An engine decodes on A by
graph: a captured CUDA graph, or on a CPU a recorded one, which reads memory in the same way. Its weights are updated to
B, and it answers again, by replaying the graphs of A and eagerly. `before` is the fork with one fault put back: MLA's
derived weights bound anew at each update and FlashInfer's sinks cast once (as before 0.26), or sinks written past their
weight loader (as before 0.33).
`poisoned` discards all weights before the update, as a level-2 sleep does; `kept` leaves their contents, as a level-1
sleep does.

Every answer is compared with those of one engine freshly started on B: the largest absolute difference of a
log-probability in nats, over the whole vocabulary and all positions up to and including the first token that differs;
infinite where one is missing or not finite (`null` in the report). `fresh` is a second such engine: what two starts
differ by. On a CPU all are compared with the eager answers. On a GPU replayed answers are compared with replayed ones,
since a kernel may sum in another order when it is captured: there nothing says that a replay of B is right, only that
it is the replay of a fresh start.
The first token of an answer comes from the prompt's own step, which no graph has; all later ones are replayed, which
each engine counts.

Exit status: 0 if nothing differs after the fix and every replay differs before it, 1 if that is not so or an engine
fails, 2 on bad usage. A model whose fault cannot be shown on the base is left out, with a line that says so.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from rich.console import Console
from rich.table import Table

from benchmarks import tiny_deepseek_v2, tiny_gpt_oss
from benchmarks.live_update import Answer, compare, write_json
from benchmarks.tiny_gpt_oss import VOCABULARY
from benchmarks.vllm_server import environment, process_group
from fork import ROOT, files
from fork.bases import Base, find_base
from fork.errors import ForkError
from fork.evaluate import evaluate
from fork.series import find_patch, load_series
from fork.trial import changed_files
from fork.wheel import default_device

#: Model -> what writes its checkpoints, the patch whose fault is put back, and the attention backend on each device.
#: Left to itself a CPU with AMX takes another backend for MLA, which never reads the derived weights.
MODELS = {
    "mla": (tiny_deepseek_v2.write, "mla-post-load-storage", {"cpu": "CPU_MLA", "cuda": "TRITON_MLA"}),
    "sinks": (tiny_gpt_oss.write, "attention-sink-loader", {"cpu": "CPU_ATTN", "cuda": "TRITON_ATTN"}),
    "flashinfer": (tiny_gpt_oss.write, "flashinfer-sink-refresh", {"cuda": "FLASHINFER"}),
}
#: Row -> the case of its engine, and whether that runs with the fault put back.
ROWS = {
    "before-poisoned": ("poisoned", True),
    "before-kept": ("kept", True),
    "after-poisoned": ("poisoned", False),
    "fresh": ("fresh", False),
}
#: That one engine may take.
SECONDS = 600.0


class EngineError(Exception):
    """An engine process failed; `str()` is one line that names its log."""


@dataclass(frozen=True)
class Row:
    """One case of one model, eager and replayed, against a fresh engine. `None` is no diverging token."""

    model: str
    case: str
    differences: dict[str, float]
    diverging: dict[str, int | None]

    @property
    def tokens_equal(self) -> bool:
        return all(at is None for at in self.diverging.values())

    @property
    def exact(self) -> bool:
        return self.tokens_equal and all(difference == 0.0 for difference in self.differences.values())

    def json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "case": self.case,
            **{
                f"{how}_max_abs_logprob_diff": difference if math.isfinite(difference) else None
                for how, difference in self.differences.items()
            },
            "tokens_equal": self.tokens_equal,
        }


def row(model: str, case: str, answers: dict[str, list[Answer]], reference: dict[str, list[Answer]]) -> Row:
    return Row(
        model,
        case,
        {how: compare(given, reference[how])[0] if whole(given) else math.inf for how, given in answers.items()},
        {how: first_diverging_token(given, reference[how]) for how, given in answers.items()},
    )


def whole(answers: Sequence[Answer]) -> bool:
    """Whether each row has a finite log-probability of every token: without, it could show no difference."""
    rows = [each for answer in answers for each in answer.rows]
    return all(each.keys() == set(range(VOCABULARY)) and all(map(math.isfinite, each.values())) for each in rows)


def first_diverging_token(got: Sequence[Answer], wanted: Sequence[Answer]) -> int | None:
    """The lowest position, counted from 0, at which any answer has another token; None where all tokens agree."""
    found = (
        position
        for one, two in zip(got, wanted, strict=True)
        for position, tokens in enumerate(zip(one.tokens, two.tokens, strict=True))
        if tokens[0] != tokens[1]
    )
    return min(found, default=None)


def faulty_trees(base: Base, device: str) -> dict[str, dict[str, bytes]]:
    """Model -> what differs from `base` with its fault put back; a line for each model that is left out.

    Raises ForkError where none is left.
    """
    found = {}
    for model, (_, patch, backends) in MODELS.items():
        if device not in backends:
            continue
        if backends[device] == "FLASHINFER" and not _flashinfer_takes_sinks(base):
            print(f"{model}: left out, as FlashInfer on {base.name} takes no sinks on this GPU")
        elif (changed := faulty(base, device, patch)) is None:
            print(f"{model}: left out, as {patch} mends nothing on {base.name}")
        else:
            found[model] = changed
    if not found:
        raise ForkError(f"no model shows a fault on {base.name} ({device}); name another base with VLLM_FORK_BASE")
    return found


def faulty(base: Base, device: str, patch: str) -> dict[str, bytes] | None:
    """What the series changes in `base`, with the fault put back that `patch` mends there; None if it mends none."""
    series, read = load_series(), files.wheel_reader(base.wheel(device))
    results = evaluate(series, base.version, read)
    return changed_files(find_patch(series, patch), series, base, results, read, drop=True)


def _flashinfer_takes_sinks(base: Base) -> bool:
    """By what `FlashInferBackend.supports_sink` says: 0.25.1 has sinks in its kernels for SM100 only."""
    from vllm.platforms import current_platform

    return base.version > Version("0.25.1") or bool(current_platform.is_device_capability_family(100))


def measure(
    model: str, changed: dict[str, bytes], work: Path, base: Base, device: str, console: Console
) -> Iterator[Row]:
    """The rows of one model, `changed` in its faulty tree, with checkpoints, trees and logs in the folder `work`."""
    write, _, backends = MODELS[model]
    write(work / "A", 1, 0.05)
    write(work / "B", 2, 0.1)

    def run(name: str, case: str, tree: Path | None) -> dict[str, list[Answer]]:
        with console.status(f"{model}: {name}"):
            return run_engine(work, case, name, backends[device], tree)

    with tempfile.TemporaryDirectory(dir=work) as scratch:
        before = Path(scratch, "tree")
        files.link_tree(files.stock_tree(base, device), before, changed)
        reference = run("reference", "fresh", None)
        if not all(map(whole, reference.values())):
            raise EngineError(f"{model}, reference: a log-probability is missing or not finite; logs: {work}")
        if device == "cpu":
            reference = dict.fromkeys(reference, reference["eager"])
        for name, (case, fault) in ROWS.items():
            yield row(model, name, run(name, case, before if fault else None), reference)


def run_engine(work: Path, case: str, name: str, backend: str, tree: Path | None) -> dict[str, list[Answer]]:
    """The answers of one engine, eager and replayed, on `tree` or on the installed fork; `name` is for its files.

    Raises EngineError if it fails or takes more than `SECONDS`. No process of it is left.
    """
    log, out = work / f"{name}.log", work / f"{name}.json"
    out.unlink(missing_ok=True)
    env = environment(None) | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in (tree, ROOT) if folder),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HAS_FLASHINFER_CUBIN": "1",  # else FlashInfer takes no sinks where its kernels cannot be fetched
        "VLLM_USE_DEEP_GEMM": "0",  # else the fp8 linear is compiled at the first start
    }
    command = [sys.executable, "-m", "benchmarks.graphed_engine", str(work), case]
    command += ["--backend", backend, "--out", str(out)]
    with process_group(command, log, env) as process:
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise EngineError(f"{work.name}, {name}: the engine took more than {SECONDS:.0f} s; log: {log}") from None
    if status or not out.exists():
        raise EngineError(f"{work.name}, {name}: the engine ended with status {status}; log: {log}")
    return {how: [_answer(one) for one in given] for how, given in json.loads(out.read_text()).items()}


def _answer(plain: dict[str, list[object]]) -> Answer:
    rows = tuple({int(token): value for token, value in row.items()} for row in plain["rows"])  # type: ignore[attr-defined]
    return Answer(tuple(plain["tokens"]), (), rows)  # type: ignore[arg-type]


def show(rows: Sequence[Row], console: Console) -> None:
    title = "Updated from A to B, against an engine freshly started on B: log-probability difference in nats"
    table = Table(title=title, title_justify="left")
    for column in ("model", "case", "eager", "diverges", "replayed", "diverges", "tokens"):
        table.add_column(column, justify="left" if column in ("model", "case", "tokens") else "right", no_wrap=True)
    for each in rows:
        cells = []
        for how in ("eager", "replay"):
            at, difference = each.diverging[how], each.differences[how]
            style = "green" if difference == 0.0 and at is None else "red"
            cells += [f"[{style}]{difference:.6g}", "never" if at is None else f"token {at}"]
        table.add_row(each.model, each.case, *cells, "equal" if each.tokens_equal else "differ")
    console.print(table)


def verdict(rows: Sequence[Row], models: Sequence[str]) -> int:
    """0 if every row after the fix is exact and every replay before it is not; else 1, and a line that says which.

    A row that is missing, of any of `models`, makes it 1 too.
    """
    found = {(each.model, each.case): each for each in rows}
    faults = []
    for model in models:
        for case, (_, fault) in ROWS.items():
            each = found.get((model, case))
            if each is None:
                faults.append(f"{model}, {case}: was not measured")
            elif fault and each.differences["replay"] == 0.0:
                faults.append(f"{model}, {case}: the replay does not differ, so nothing is shown")
            elif not fault and not all(map(math.isfinite, each.differences.values())):
                faults.append(f"{model}, {case}: a log-probability is missing or not finite")
            elif not fault and not each.exact:
                faults.append(f"{model}, {case}: differs from a fresh engine")
    for line in faults:
        print(line, file=sys.stderr)
    return int(bool(faults))


def run(out: Path) -> int:
    """Measure every model with all files under `out`; the exit status."""
    work, result, console = out / "graph_ab", out / "graph_ab.json", Console()
    work.mkdir(parents=True, exist_ok=True)
    with files.alone(work):
        result.unlink(missing_ok=True)  # a run that fails must not leave the numbers of an earlier one
        base, device = find_base(None), default_device()
        trees = faulty_trees(base, device)
        rows: list[Row] = []
        for model, changed in trees.items():
            (work / model).mkdir(exist_ok=True)
            rows += measure(model, changed, work / model, base, device, console)
        show(rows, console)
        write_json(result, [each.json() for each in rows])
    return verdict(rows, list(trees))


@contextmanager
def _signals_end_the_block() -> Iterator[None]:
    """A signal that ends the program leaves the block first, as an exception."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a signal that ends the program stops its engine first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_ab", description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, default="build", help="folder for graph_ab.json and logs (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        with _signals_end_the_block():
            return run(options.out.resolve())
    except (EngineError, ForkError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
