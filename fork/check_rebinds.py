"""List tensors that are kept beside the weights, and that an update of the weights may leave behind.

A captured CUDA graph holds the address of each tensor that it reads. A reload puts the parameters and buffers of a
layer back in place, but nothing else: where loading weights binds a new tensor to a plain attribute, to a helper object
or into a closure, a graph goes on reading the old one; what forward computes once from a weight keeps its old values; a
number that was read from a tensor is burnt in. Read are the files of layers, kernels, models and attention backends of
a base, none is run.

HOW is when it is bound and what holds it: `post-load` by what runs after weights are loaded, `lazy-cache` on first use,
`first-forward` by a forward that binds it anew; `module` is an attribute of a module or of the layer that is handed in,
`helper` one of another object, `capture` something that holds the tensor (an object, a container, a closure), `host` a
number. Not listed: what no code but loading reads, parameters of a layer that is handed in, which a reload restores,
names for tensors that are there already, and what is bound once and then copied into.
"""

import argparse
import gc
from collections.abc import Iterable

from fork.bases import Base, Wheel, find_base
from fork.evaluate import Reader, changes, evaluate
from fork.files import wheel_reader
from fork.rebinds.search import Rebind, Search
from fork.report import Table, show
from fork.series import Patch, find_patch, load_series, without

HELP = "list tensors beside the weights that an update may leave behind; a report, exit 0"

#: Where layers, kernels, models and attention backends live.
FOLDERS = (
    "vllm/model_executor/layers/",
    "vllm/model_executor/kernels/",
    "vllm/model_executor/models/",
    "vllm/models/",
    "vllm/v1/attention/",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base to look at")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="which wheel of the base; cpu where it has one")
    parser.add_argument("--stock", action="store_true", help="the base as upstream ships it, no patch applied")
    parser.add_argument(
        "--drop", metavar="PATCH", action="append", default=[], help="leave this patch out (repeatable)"
    )


def check(paths: Iterable[str], read: Reader) -> list[Rebind]:
    """Every tensor that the files at `paths` bind beside the weights; sorted.

    Raises ForkError for a file that this Python cannot parse.
    """
    # As in check-writes: the parsed files all stay, and looking for garbage among them takes most of the time.
    gc.disable()
    try:
        return Search(paths, read).run()
    finally:
        gc.enable()


def layer_files(base: Base, wheel: Wheel, series: list[Patch]) -> tuple[list[str], Reader]:
    """The paths of the files to look at of `base`, `series` applied in memory, and what reads any file of that tree."""
    pristine = wheel_reader(wheel)
    changed = changes(evaluate(series, base.version, pristine))
    with wheel.open() as archive:
        names = {*archive.namelist(), *changed}
    paths = [name for name in names if name.startswith(FOLDERS) and name.endswith(".py")]
    return paths, lambda path: changed[path] if path in changed else pristine(path)


def run(args: argparse.Namespace) -> int:
    base = find_base(args.base)
    series = load_series()
    dropped = {find_patch(series, name).name for name in args.drop}
    found = check(*layer_files(base, base.wheel(args.device), [] if args.stock else without(series, dropped)))
    columns = ("file", "line", "class", "attribute", "how", "value")
    rows = [
        dict(zip(columns, (each.file, each.line, each.owner, each.attribute, each.how, each.value), strict=True))
        for each in found
    ]
    show(Table(f"tensors beside the weights on {base.name}", rows, columns), args.json)
    return 0
