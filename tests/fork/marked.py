"""Small trees of model files whose lines say which rows the check of writes must give for them."""

from fork.check_writes import MORE, check

MODELS = "vllm/model_executor/models/"

#: A model with a parameter, a buffer, a plain tensor and submodules; each case is the end of its load_weights.
HEAD = """
import itertools
import torch
from functools import partial
from torch import Tensor, nn
from vllm.model_executor.layers.linear import Linear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

class Layer(nn.Module):
    def __init__(self, kind: str = "a"):
        self.sinks = nn.Parameter(torch.empty(4))
        self.proj = Linear(4, 4)
        self.kind = kind
    def weight_loader(self, param, tensor):
        param.data.copy_(tensor)

class Model(nn.Module):
    def __init__(self):
        self.w = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.zeros(4))
        self.scratch = torch.zeros(4)
        self.derived: Tensor | None = None
        self.seen = {}
        self.layer = Layer()
        self.layers = nn.ModuleList([Layer(kind) for kind in "ab"])

    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, tensor in weights:
"""

#: Files outside the model folders that the cases import.
AROUND = {
    "vllm/model_executor/layers/linear.py": """
import torch
class Linear(torch.nn.Module):
    def __init__(self, rows, columns):
        self.weight = torch.nn.Parameter(torch.empty(rows, columns))
        self.weight.weight_loader = self.fill
    def fill(self, param, tensor):
        param.data.copy_(tensor)
    def share(self, other):
        self.weight = other.weight  #! Linear.share: self.weight as rebind
""",
    "vllm/model_executor/model_loader/weight_utils.py": """
def default_weight_loader(param, tensor):
    param.data.copy_(tensor)
def renamed(weights, param):
    param.data.zero_()
    for name, tensor in weights:
        yield name, tensor
""",
}

Row = tuple[str, int, str, str, str]


def rows(files: dict[str, str], also: tuple[str, ...] = ()) -> list[Row]:
    """Every row for a tree of `files`, those of the kinds in `also` too."""
    tree = {path: text.encode() for path, text in (AROUND | files).items()}
    found = check([path for path in tree if path.startswith("vllm/model")], tree.get)
    return [
        (each.file, each.line, each.function, each.parameter, each.how)
        for each in found
        if each.how not in MORE or each.how in also
    ]


def marked(files: dict[str, str], function: str = "") -> list[Row]:
    """The rows that the ends of lines ask for: `#! FUNCTION: PARAMETER as KIND; ...`, by default of `function`."""
    found = []
    for path, text in files.items():
        for number, line in enumerate(text.splitlines(), 1):
            here = function
            for mark in line.partition("#! ")[2].split("; ") if "#! " in line else ():
                named, _, kind = mark.rpartition(" as ")
                where, _, parameter = named.rpartition(": ")
                here = where or here
                found.append((path, number, here, parameter, kind))
    return sorted(found)


def body(code: str) -> dict[str, str]:
    """The model with `code` in the loop of its load_weights."""
    return {MODELS + "model.py": HEAD + "\n".join(" " * 12 + line for line in code.splitlines()) + "\n"}
