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
names for tensors that are there already, and what is bound once and then written in place. Not seen: attributes bound
by `vars`, `__dict__`, a loop or a `with`, on a class or a module; caches behind `try` or a dictionary's `get`.
"""

import argparse
import gc
from collections.abc import Iterable

from fork.check_writes import add_choice, looked_at, python_files
from fork.evaluate import Reader
from fork.rebinds.search import Rebind, Search
from fork.report import Table, show

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
    add_choice(parser)


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


def run(args: argparse.Namespace) -> int:
    base, wheel, series = looked_at(args)
    found = check(*python_files(base, wheel, series, FOLDERS))
    columns = ("file", "line", "class", "attribute", "how", "value")
    rows = [
        dict(zip(columns, (each.file, each.line, each.owner, each.attribute, each.how, each.value), strict=True))
        for each in found
    ]
    show(Table(f"tensors beside the weights on {base.name}", rows, columns), args.json)
    return 0
