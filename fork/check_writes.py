"""List every write to a parameter that loading weights makes past its weight loader.

Read are the model files of a base, none is run. A model loader calls `load_weights` of a module: each of them, and
each function it leads to in any file of the tree, is followed with what its variables can stand for. Listed is what
writes a parameter or a buffer, or a view of one: a method that works in place, an assignment to part of it or to its
`.data`, an `out=`, a parameter that is put in its place. During a layerwise reload these are on the meta device, where
such a write is lost. Not listed: a call of a weight loader and what it does, writes to tensors made on the way.

It does not see: what `process_weights_after_loading` does, kernels that write their arguments without saying so in
their name, a method found only by a computed name.
"""

import argparse
import gc
from collections.abc import Iterable

from fork.bases import Base, Wheel, find_base
from fork.evaluate import Reader, changes, evaluate
from fork.files import wheel_reader
from fork.report import Table, show
from fork.series import Patch, find_patch, load_series, without
from fork.writes.attributes import declared
from fork.writes.dataflow import Flow
from fork.writes.frames import Write
from fork.writes.sources import Sources, module_name

HELP = "list the writes to parameters that go past the weight loader; a report, exit 0"

#: Where models live, and what loads one.
MODELS = ("vllm/models/", "vllm/model_executor/models/")
ROOT = "load_weights"

#: Writes that are listed only where asked for: to the sender's tensor, and by a weight loader that is called by its own
#: name, which need not be the parameter's current one.
MORE = ("sender", "direct-loader")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """The options that choose a tree to look at."""
    parser.add_argument("--base", metavar="NAME", help="the base to look at")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="which wheel of the base; cpu where it has one")
    parser.add_argument("--stock", action="store_true", help="the base as upstream ships it, no patch applied")
    parser.add_argument(
        "--drop", metavar="PATCH", action="append", default=[], help="leave this patch out (repeatable)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser)
    parser.add_argument("--also", choices=MORE, action="append", default=[], help="list this kind too (repeatable)")


def check(paths: Iterable[str], read: Reader) -> list[Write]:
    """Every write, those of `MORE` too, that `load_weights` of the files at `paths` leads to; sorted.

    Raises ForkError for a file that this Python cannot parse.
    """
    # The parsed files are millions of objects that all stay: looking for garbage among them takes most of the time.
    gc.disable()
    try:
        return _check(sorted(paths), read)
    finally:
        gc.enable()


def _check(paths: list[str], read: Reader) -> list[Write]:
    sources = Sources(read)
    flow = Flow(sources, declared(data for path in paths if (data := read(path)) is not None))
    for source in [sources.get(module_name(path)) for path in paths]:
        for cls in source.every_class if source else ():
            if method := sources.method(cls, ROOT):
                flow.root(method, cls)
        if source and (function := source.functions.get(ROOT)):
            flow.root(function, None)
    return sorted(set(flow.writes))


def python_files(base: Base, wheel: Wheel, series: list[Patch], folders: tuple[str, ...]) -> tuple[list[str], Reader]:
    """The paths of the Python files in `folders` of `base`, `series` applied in memory, and what reads any file."""
    pristine = wheel_reader(wheel)
    changed = changes(evaluate(series, base.version, pristine))
    with wheel.open() as archive:
        names = {*archive.namelist(), *changed}
    paths = [name for name in names if name.startswith(folders) and name.endswith(".py")]
    return paths, lambda path: changed[path] if path in changed else pristine(path)


def looked_at(args: argparse.Namespace) -> tuple[Base, Wheel, list[Patch]]:
    """What `add_choice` lets a user choose: the base, its wheel, and the patches applied to it."""
    base, series = find_base(args.base), load_series()
    dropped = {find_patch(series, name).name for name in args.drop}
    return base, base.wheel(args.device), [] if args.stock else without(series, dropped)


def run(args: argparse.Namespace) -> int:
    base, wheel, series = looked_at(args)
    found = check(*python_files(base, wheel, series, MODELS))
    columns = ("file", "line", "function", "parameter", "write")
    rows = [
        dict(zip(columns, (each.file, each.line, each.function, each.parameter, each.how), strict=True))
        for each in found
        if each.how not in MORE or each.how in args.also
    ]
    show(Table(f"writes past the weight loader on {base.name}", rows, columns), args.json)
    return 0
