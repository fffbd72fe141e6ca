"""What a graph serves after a weight update: before the fix and after it, beside a fresh engine.

A tiny MLA model (DeepSeek-V2) and a tiny sink model (GPT-OSS), bf16, checkpoints A and B. An engine decodes on A by
graph: a captured CUDA graph, or on a CPU a recorded one, which reads memory in the same way. Its weights are updated to
B, and it answers again, by replaying the graphs of A and eagerly. `before` is the fork with one fault put back: MLA's
derived weights bound anew at each update and FlashInfer's sinks cast once (as before 0.26), or sinks written past their
weight loader (as before 0.33).
`poisoned` discards all weights before the update, as a level-2 sleep does; `kept` leaves their contents, as a level-1
sleep does.

Every answer is compared with those of an engine freshly started on B, eager: the largest absolute difference of a
log-probability in nats, over the whole vocabulary and all positions up to and including the first token that differs.
On a GPU replayed answers are compared with replayed ones, since a kernel may sum in another order when it is captured.
The first token of an answer comes from the prompt's own step, which no graph has; all later ones can be replayed.

Exit status: 0 if nothing differs after the fix and every replay differs before it, 1 if that is not so or an engine
fails, 2 on bad usage.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import tiny_deepseek_v2, tiny_gpt_oss
from benchmarks.live_update import Answer, compare, write_json
from benchmarks.vllm_server import environment
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
SECONDS = 600


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
            "eager_max_abs_logprob_diff": self.differences["eager"],
            "replay_max_abs_logprob_diff": self.differences["replay"],
            "tokens_equal": self.tokens_equal,
        }


def row(model: str, case: str, answers: dict[str, list[Answer]], fresh: dict[str, list[Answer]]) -> Row:
    return Row(
        model,
        case,
        {how: compare(given, fresh[how])[0] for how, given in answers.items()},
        {how: first_diverging_token(given, fresh[how]) for how, given in answers.items()},
    )


def first_diverging_token(got: Sequence[Answer], wanted: Sequence[Answer]) -> int | None:
    """The lowest position, counted from 0, at which any answer has another token; None where all tokens agree."""
    found = (
        position
        for one, two in zip(got, wanted, strict=True)
        for position, tokens in enumerate(zip(one.tokens, two.tokens, strict=True))
        if tokens[0] != tokens[1]
    )
    return min(found, default=None)


def measure(model: str, work: Path, base: Base, device: str, console: Console) -> list[Row]:
    """The four rows of one model, with checkpoints, trees and logs in the folder `work`."""
    write, patch, backends = MODELS[model]
    write(work / "A", 1, 0.05)
    write(work / "B", 2, 0.1)

    def run(case: str, tree: Path | None) -> dict[str, list[Answer]]:
        with console.status(f"{model}: {name(case, tree)}"):
            return run_engine(work, case, name(case, tree), backends[device], tree)

    def name(case: str, tree: Path | None) -> str:
        return case if case == "fresh" else f"{'before' if tree else 'after'}-{case}"

    with tempfile.TemporaryDirectory(dir=work) as scratch:
        before = Path(scratch, "tree")
        files.link_tree(files.stock_tree(base, device), before, faulty(base, device, patch))
        found = {name(case, before): run(case, before) for case in ("poisoned", "kept")}
    found |= {name(case, None): run(case, None) for case in ("poisoned", "fresh")}
    fresh = found["fresh"]
    if device == "cpu":
        fresh = dict.fromkeys(fresh, fresh["eager"])
    return [row(model, case, answers, fresh) for case, answers in found.items()]


def faulty(base: Base, device: str, patch: str) -> dict[str, bytes]:
    """What the series changes in `base`, with the fault put back that `patch` mends there."""
    series, read = load_series(), files.wheel_reader(base.wheel(device))
    results = evaluate(series, base.version, read)
    found = changed_files(find_patch(series, patch), series, base, results, read, drop=True)
    if found is None:
        raise ForkError(f"{patch} mends nothing on {base.name}; name another with VLLM_FORK_BASE")
    return found


def run_engine(work: Path, case: str, name: str, backend: str, tree: Path | None) -> dict[str, list[Answer]]:
    """The answers of one engine, eager and replayed, on `tree` or on the installed fork; `name` is for its files."""
    log, out = work / f"{name}.log", work / f"{name}.json"
    out.unlink(missing_ok=True)
    env = environment(tree) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HAS_FLASHINFER_CUBIN": "1",  # else FlashInfer takes no sinks where its kernels cannot be fetched
    }
    command = [sys.executable, "-m", "benchmarks.graphed_engine", str(work), case]
    command += ["--backend", backend, "--out", str(out)]
    with log.open("wb") as stream:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=stream, stderr=stream, timeout=SECONDS)
    if done.returncode or not out.exists():
        raise EngineError(f"{name}: the engine ended with status {done.returncode}; log: {log}")
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


def verdict(rows: Sequence[Row]) -> int:
    """0 if every row after the fix is exact and every replay before it is not; else 1, and a line that says which."""
    status = 0
    for each in rows:
        if each.case.startswith("before") and each.differences["replay"] == 0.0:
            print(f"{each.model}, {each.case}: the replay does not differ, so nothing is shown", file=sys.stderr)
            status = 1
        elif not each.case.startswith("before") and not each.exact:
            print(f"{each.model}, {each.case}: differs from a fresh engine", file=sys.stderr)
            status = 1
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_ab", description=str(__doc__).split("\n")[0])
    parser.add_argument("--out", type=Path, default="build", help="folder for graph_ab.json and logs (%(default)s)")
    options = parser.parse_args(arguments)
    out, console = options.out.resolve(), Console()
    result = out / "graph_ab.json"
    try:
        base, device = find_base(None), default_device()
        rows = []
        for model in (name for name, (_, _, backends) in MODELS.items() if device in backends):
            work = out / "graph_ab" / model
            work.mkdir(parents=True, exist_ok=True)
            with files.alone(work):
                result.unlink(missing_ok=True)
                rows += measure(model, work, base, device, console)
    except (EngineError, ForkError, OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    show(rows, console)
    write_json(result, [each.json() for each in rows])
    return verdict(rows)


if __name__ == "__main__":
    sys.exit(main())
