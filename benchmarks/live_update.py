"""Update the weights of a running vLLM and compare it with one freshly started on them: stock and fork.

Writes two tiny GPT-OSS checkpoints A and B. Then, for the untouched base and for the fork: serves A, asks,
updates to B over HTTP, asks again, and asks a server freshly started on B. One server runs at a time.

What is compared. Every prompt is a fixed list of token ids, answered greedily. The server reports the
log-probability of every vocabulary token after each prompt token and after each generated one. Positions
count as far as both servers have read the same tokens: the whole prompt, and the answer up to and including
the first token that differs. `max_abs_logprob_diff` is the largest absolute difference over all of them, in
nats; `tokens_equal` says whether every generated token is the same; `update_seconds` is the wall time of the
update request alone. The prefix cache is off on both sides: stock keeps entries computed with the old weights,
a fault of its own that would hide what this program measures.

Exit status: 0 if the fork is exact and stock is not, 1 if that is not so or a server fails, 2 on bad usage.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks import tiny_gpt_oss
from benchmarks.vllm_server import Server, ServerError, serve
from fork.bases import find_base
from fork.errors import ForkError
from fork.files import alone, stock_tree
from fork.wheel import default_device

VOCABULARY = tiny_gpt_oss.VOCABULARY
GENERATED_TOKENS = 16
SERVE_OPTIONS = (
    *("--served-model-name", "tiny"),
    *("--dtype", "bfloat16"),
    *("--max-model-len", "128"),
    *("--max-logprobs", str(VOCABULARY)),
    *("--gpu-memory-utilization", "0.3"),  # of a CPU's memory, too
    "--enforce-eager",
    "--skip-tokenizer-init",
    "--no-enable-prefix-caching",
)

Row = dict[int, float]


@dataclass(frozen=True)
class Answer:
    """One prompt's greedy answer; a row maps every token of the vocabulary to its log-probability.

    `prompt_rows` are those after each prompt token but the last, `rows` those of each generated token.
    """

    tokens: tuple[int, ...]
    prompt_rows: tuple[Row, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Outcome:
    """One side of the report."""

    max_abs_logprob_diff: float
    tokens_equal: bool
    update_seconds: float

    @property
    def exact(self) -> bool:
        return self.tokens_equal and self.max_abs_logprob_diff == 0.0


class Steps:
    """Shows what is being done: a bar on a terminal, and everywhere one line for each finished step."""

    TOTAL = 13

    def __init__(self, console: Console):
        columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=self.TOTAL)

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        self.bar.update(self.task, description=text)
        start = time.perf_counter()
        yield
        self.bar.console.print(f"{text:<32}{time.perf_counter() - start:7.1f} s", highlight=False)
        self.bar.advance(self.task)


def ask(server: Server) -> list[Answer]:
    """The answers to all prompts, asked one after the other so that no batch changes the arithmetic."""
    return [_ask_one(server, prompt) for prompt in tiny_gpt_oss.prompts()]


def _ask_one(server: Server, prompt: Sequence[int]) -> Answer:
    body = {
        "prompt": list(prompt),
        "max_tokens": GENERATED_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": VOCABULARY,
        "prompt_logprobs": VOCABULARY,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = server.post("/v1/completions", body)["choices"][0]
    answer = Answer(
        tuple(choice["token_ids"]),
        tuple({int(token): entry["logprob"] for token, entry in row.items()} for row in choice["prompt_logprobs"][1:]),
        tuple(
            {int(token.removeprefix("token_id:")): value for token, value in row.items()}
            for row in choice["logprobs"]["top_logprobs"]
        ),
    )
    check(answer, len(prompt), server)
    return answer


def check(answer: Answer, prompt_tokens: int, server: Server) -> None:
    """Raise `ServerError` for a missing position or token and for a NaN: none would show as a difference."""
    got = (len(answer.prompt_rows), len(answer.rows), len(answer.tokens))
    wanted = (prompt_tokens - 1, GENERATED_TOKENS, GENERATED_TOKENS)
    if got != wanted:
        raise ServerError(f"{server.name}: (prompt rows, rows, tokens) must be {wanted}, got {got}; log: {server.log}")
    for row in answer.prompt_rows + answer.rows:
        if row.keys() != set(range(VOCABULARY)) or not all(map(math.isfinite, row.values())):
            raise ServerError(
                f"{server.name}: a row must hold {VOCABULARY} finite log-probabilities, got {len(row)} values "
                f"from {min(row.values())} to {max(row.values())}; log: {server.log}"
            )


def compare(got: Sequence[Answer], wanted: Sequence[Answer]) -> tuple[float, bool]:
    """Largest absolute log-probability difference over positions of equal context, and whether all tokens agree."""
    pairs = list(zip(got, wanted, strict=True))
    differences = (
        abs(row[token] - other[token])
        for one, two in pairs
        for row, other in _rows_of_equal_context(one, two)
        for token in row
    )
    return max(differences), all(one.tokens == two.tokens for one, two in pairs)


def _rows_of_equal_context(one: Answer, two: Answer) -> Iterator[tuple[Row, Row]]:
    yield from zip(one.prompt_rows, two.prompt_rows, strict=True)
    for i, rows in enumerate(zip(one.rows, two.rows, strict=True)):
        yield rows
        if one.tokens[i] != two.tokens[i]:
            return


def update(server: Server, checkpoint: Path) -> float:
    """Load `checkpoint` into the running server; seconds until it answered."""
    start = time.perf_counter()
    server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})
    return time.perf_counter() - start


def measure(side: str, pythonpath: Path | None, work: Path, steps: Steps) -> Outcome:
    """Update a server of `side` from A to B, folders under `work`, and compare it with a fresh one on B."""

    @contextmanager
    def serving(name: str) -> Iterator[Server]:
        arguments = (str(work / name), *SERVE_OPTIONS)
        starting = serve(f"{side} on {name}", arguments, work / f"{side}-{name}.log", pythonpath)
        with ExitStack() as running:
            with steps.step(f"{side}: start on {name}"):
                server = running.enter_context(starting)
            yield server

    with serving("A") as server:
        with steps.step(f"{side}: ask"):
            before = ask(server)
        with steps.step(f"{side}: update to B"):
            seconds = update(server, work / "B")
        with steps.step(f"{side}: ask again"):
            after = ask(server)
    with serving("B") as server, steps.step(f"{side}: ask"):
        fresh = ask(server)
    if compare(before, fresh)[0] == 0.0:
        raise ServerError(f"{side}: A and B answer alike, so an update that does nothing would pass; logs: {work}")
    return Outcome(*compare(after, fresh), seconds)


def write_checkpoints(work: Path) -> None:
    """Write A and B. B is the larger in scale: an expert left at A then stands far outside rounding."""
    tiny_gpt_oss.write(work / "A", seed=1, std=0.05)
    tiny_gpt_oss.write(work / "B", seed=2, std=0.1)


def report(outcomes: dict[str, Outcome], path: Path, console: Console) -> None:
    """Show the table and replace `path` with the same numbers as JSON."""
    title = f"vllm {version('vllm')} and its base, updated from A to B, against a server freshly started on B"
    table = Table(title=title, title_justify="left")
    for column in ("", "largest log-probability difference", "tokens", "update, s"):
        table.add_column(column, justify="left" if column in ("", "tokens") else "right")
    for side, outcome in outcomes.items():
        tokens = "equal" if outcome.tokens_equal else "differ"
        style = "green" if outcome.exact else "red"
        difference = f"{outcome.max_abs_logprob_diff:.6g}"
        table.add_row(side, f"[{style}]{difference}", f"[{style}]{tokens}", f"{outcome.update_seconds:.2f}")
    console.print(table)
    write_json(path, {side: asdict(outcome) for side, outcome in outcomes.items()})


def write_json(path: Path, data: object) -> None:
    """Replace `path` with `data` as JSON, all at once."""
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(draft, path)


def verdict(outcomes: dict[str, Outcome]) -> int:
    """The exit status: 0 if the fork is exact and stock is not; else 1, and a line that says why."""
    if not outcomes["fork"].exact:
        print("the fork differs from a server freshly started on the new weights", file=sys.stderr)
    if outcomes["stock"].exact:
        print("stock does not differ, so nothing is shown: is --stock the untouched base?", file=sys.stderr)
    return 0 if outcomes["fork"].exact and not outcomes["stock"].exact else 1


def run(stock: Path, out: Path) -> int:
    """Measure both sides with all files under `out`; the exit status."""
    work, result = out / "demo", out / "demo.json"
    work.mkdir(parents=True, exist_ok=True)
    console = Console()
    steps = Steps(console)
    with alone(work):
        result.unlink(missing_ok=True)  # a run that fails must not leave the numbers of an earlier one
        with steps.bar:
            with steps.step("write checkpoints A and B"):
                write_checkpoints(work)
            outcomes = {"stock": measure("stock", stock, work, steps), "fork": measure("fork", None, work, steps)}
        report(outcomes, result, console)
    return verdict(outcomes)


def _exit_on(number: int, _frame: object) -> None:
    os.write(2, b"\nstopping the servers\n")
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run; a signal that ends the program stops its servers first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_update", description=str(__doc__).split("\n")[0])
    add = parser.add_argument
    add("--stock", type=Path, help="folder that holds the untouched base; without it one is laid out under build/stock")
    add("--out", type=Path, default="build", help="folder for demo.json, checkpoints and logs (%(default)s)")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if options.stock and not (options.stock / "vllm" / "__init__.py").is_file():
        print(f"--stock {options.stock} holds no vllm package; leave it out to lay out the base", file=sys.stderr)
        return 2
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on)
    try:
        stock = options.stock or stock_tree(find_base(None), default_device())
        return run(stock.resolve(), out)
    except (ServerError, ForkError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
