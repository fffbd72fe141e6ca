"""The data flow across functions: what load_weights leads to, and the weight loaders where that ends."""

import pytest
from marked import AROUND, HEAD, MODELS, body, marked, rows

from fork.check_writes import MORE

#: What a helper that load_weights calls may be, each a file of its own with `Base` above `Model`.
HELPERS = {
    "method": """
class Model(Base):
    def load_weights(self, weights):
        self.fill(weights)
    def fill(self, weights):
        self.w.zero_()  #! Model.fill: self.w as in-place
""",
    "inherited": """
class Model(Base):
    def load_weights(self, weights):
        self.fill_both(self.w, self.mask)
""",
    "above": """
class Model(Base):
    def load_weights(self, weights):
        return super().load_weights(weights)
    def hook(self):
        self.w.zero_()  #! Model.hook: self.w as in-place
""",
    "not overridden load_weights": """
class Model(Base):
    def hook(self):
        self.w.zero_()  #! Model.hook: self.w as in-place
""",
    "load_weights of another class": """
class Model(nn.Module):
    load_weights = Base.load_weights
    def hook(self):
        self.x.zero_()  #! Model.hook: self.x as in-place
""",
    "static": """
class Model(Base):
    def load_weights(self, weights):
        for name, tensor in weights:
            self.put(self.w, tensor)
    @staticmethod
    def put(target, tensor):
        target[:2].copy_(tensor)  #! Model.put: self.w as in-place
""",
    "class method": """
class Model(Base):
    def load_weights(self, weights):
        Model.put(self.w)
    @classmethod
    def put(cls, target):
        target.zero_()  #! Model.put: self.w as in-place
""",
    "property": """
class Model(Base):
    @property
    def head(self):
        return self.w
    def load_weights(self, weights):
        self.head.zero_()  #! Model.load_weights: self.w as in-place
""",
    "function": """
def put(model, name, tensor):
    if "sink" in name:
        dict(model.named_parameters())[name].copy_(tensor)  #! put: sink as in-place

class Model(Base):
    def load_weights(self, weights):
        for name, tensor in weights:
            put(self, name, tensor)
""",
    "function that is given a looked up parameter": """
def put(target, tensor):
    target.copy_(tensor)  #! put: sink as in-place

class Model(Base):
    def load_weights(self, weights):
        params = dict(self.named_parameters())
        for name, tensor in weights:
            if "sink" in name:
                put(params[name], tensor)
""",
    "imported function": """
class Model(Base):
    def load_weights(self, weights):
        put_all(self)
        base.put_all(self)
""",
    "nested function": """
class Model(Base):
    def load_weights(self, weights):
        def each():
            for name, tensor in weights:
                params[name].copy_(tensor)  #! Model.load_weights.each: name as in-place
                yield name, tensor
        params = dict(self.named_parameters())
        return set(each())
""",
    "lambda": """
class Model(Base):
    def load_weights(self, weights):
        put = lambda tensor: self.w.copy_(tensor)  #! Model.load_weights.<lambda>: self.w as in-place
        for name, tensor in weights:
            put(tensor)
""",
    "partial": """
class Model(Base):
    def load_weights(self, weights):
        put = partial(self.put, self.w)
        put(weights)
    def put(self, target, tensor):
        target.copy_(tensor)  #! Model.put: self.w as in-place
""",
    "passed to a function": """
class Model(Base):
    def load_weights(self, weights):
        return list(map(self.one, weights))
    def one(self, pair):
        name, tensor = pair
        self.w.copy_(tensor)  #! Model.one: self.w as in-place
""",
    "passed to what is not of the tree": """
class Model(Base):
    def load_weights(self, weights):
        torch.vmap(lambda each: self.w.zero_())  #! Model.load_weights.<lambda>: self.w as in-place
""",
    "apply": """
class Model(Base):
    def load_weights(self, weights):
        self.apply(self.start)
    def start(self, module):
        module.weight.zero_()  #! Model.start: module.weight as in-place
""",
    "submodule of a known class": """
class Experts(nn.Module):
    def put(self, tensor):
        self.w13.copy_(tensor)  #! Experts.put: self.w13 as in-place

class Other(nn.Module):
    def put(self, tensor):
        self.other.copy_(tensor)

def build(kind):
    return Experts

class Model(Base):
    def __init__(self, kind):
        self.experts = build(kind)(4)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
    def block(self):
        return Experts()
    def load_weights(self, weights):
        self.experts.put(weights)
        for block in self.blocks:
            block.put(weights)
""",
    "submodule that has the method": """
class Experts(nn.Module):
    def put(self, tensor):
        self.w13.copy_(tensor)  #! Experts.put: self.w13 as in-place

class Model(Base):
    def load_weights(self, weights):
        for module in self.modules():
            put = getattr(module, "put", None)
            if put is not None:
                put(weights)
""",
    "submodule whose class the file defines": """
class Experts(nn.Module):
    def put(self, tensor):
        self.w13.copy_(tensor)  #! Experts.put: self.w13 as in-place

class Model(Base):
    def load_weights(self, weights):
        for module in self.inner.modules():
            module.put(weights)
""",
    "submodule by isinstance": """
class Model(Base):
    def load_weights(self, weights):
        for module in self.modules():
            if not isinstance(module, Part):
                continue
            module.settle()
""",
    "submodule by annotation": """
class Model(Base):
    def load_weights(self, weights):
        for module in self.modules():
            self.each(module)
    def each(self, part: Part):
        part.settle()
""",
    "class made in a function": """
def make(cls):
    class Made(cls):
        def load_weights(self, weights):
            self.w.zero_()  #! make.Made.load_weights: self.w as in-place
    return Made
""",
    "load_weights that is a function": """
def load_weights(model, weights):
    model.head.weight.zero_()  #! load_weights: model.head.weight as in-place
""",
    "helper outside the model files": """
class Model(Base):
    def load_weights(self, weights):
        self.proj.share(self.w)
""",
    "calls itself": """
class Model(Base):
    def load_weights(self, weights):
        self.walk(self.layers)
    def walk(self, modules):
        for module in modules:
            module.bias.zero_()  #! Model.walk: modules[*].bias as in-place
            self.walk(module.inner)
""",
    "machinery": """
class Model(Base):
    def load_weights(self, weights):
        for name, tensor in renamed(weights, self.w):
            self.w.copy_(tensor)  #! Model.load_weights: self.w as in-place
""",
}

BASE = """
import torch
from torch import nn
from vllm.model_executor.layers.linear import Linear

class Part(nn.Module):
    def settle(self):
        self.scale.fill_(1)  #! Part.settle: self.scale as in-place

class Other(nn.Module):
    def settle(self):
        self.other.fill_(1)

def put_all(model):
    model.w.zero_()  #! put_all: model.w as in-place

class Base(nn.Module):
    def __init__(self):
        self.w = nn.Parameter(torch.empty(4))
        self.register_buffer("mask", torch.zeros(4))
        self.proj = Linear(4, 4)
    def load_weights(self, weights):
        self.hook()
    def hook(self):
        pass
    def fill_both(self, *targets):
        for target in targets:
            target.zero_()  #! Base.fill_both: self.mask as in-place; self.w as in-place
"""

TOP = """
import torch
from functools import partial
from torch import nn
from . import base
from .base import Base, Other, Part, put_all
from vllm.model_executor.model_loader.weight_utils import renamed
"""

#: Which of the marked lines of the other files a helper leads to.
LEADS = {
    "inherited": "Base.fill_both",
    "imported function": "put_all",
    "submodule by isinstance": "Part.settle",
    "submodule by annotation": "Part.settle",
    "helper outside the model files": "Linear.share",
}


@pytest.mark.parametrize("case", HELPERS)
def test_every_helper_that_load_weights_leads_to_is_followed(case):
    files = {MODELS + "base.py": BASE, MODELS + "model.py": TOP + HELPERS[case]}
    led = [row for row in marked(AROUND | {MODELS + "base.py": BASE}) if row[2] == LEADS.get(case)]
    assert bool(led) == (case in LEADS)
    assert rows(files) == sorted(marked({MODELS + "model.py": TOP + HELPERS[case]}) + led)


def test_nothing_is_followed_that_load_weights_does_not_lead_to():
    assert rows({MODELS + "base.py": BASE, MODELS + "model.py": TOP + HELPERS["method"].replace("load_w", "w")}) == []


def test_a_method_is_found_in_the_other_files_of_the_same_model():
    files = {
        "vllm/models/one/common.py": """
def settle(model):
    for module in model.modules():
        if callable(fold := getattr(module, "fold", None)):
            fold()
""",
        "vllm/models/one/nvidia/model.py": """
from ..common import settle
class Model:
    def load_weights(self, weights):
        settle(self)
    def fold(self):
        self.gate.weight.mul_(2)  #! Model.fold: self.gate.weight as in-place
""",
        "vllm/models/two/model.py": """
class Other:
    def fold(self):
        self.gate.weight.mul_(2)
""",
    }
    assert rows(files) == marked(files)


@pytest.mark.parametrize(
    "attach",
    [
        "self.w.weight_loader = self.put",
        "self.w.weight_loader = partial(self.put, 0)",
        "self.w.weight_loader = (\n            self.put)",
        "set_weight_attrs(self.w, {'weight_loader': self.put})",
        "setattr(self.w, 'weight_loader', self.put)",
        "self.w = Own(weight_loader=self.put)",
    ],
)
def test_a_function_that_is_attached_as_a_weight_loader_is_one(attach):
    text = f"""
from functools import partial
class Model:
    def __init__(self):
        {attach}
    def put(self, param, tensor):
        param.data.copy_(tensor)
    def load_weights(self, weights):
        self.put(self.w, weights)
"""
    assert rows({MODELS + "model.py": text}) == []
    without = text.replace("self.put)", "None)").replace("self.put\n", "None\n").replace("self.put,", "None,")
    without = without.replace("self.put}", "None}")
    assert [row[2] for row in rows({MODELS + "model.py": without})] == ["Model.put"]


def test_a_loader_called_by_its_own_name_and_a_write_to_what_was_sent_are_listed_where_asked_for():
    code = """default_weight_loader(params[name], tensor)
self.w.weight_loader(self.w, tensor)
tensor.zero_()
tensor[:2].data.mul_(2)
copy = tensor.clone()
getattr(self.w, "weight_loader", default_weight_loader)(self.w, tensor)
self.layer.weight_loader(self.layer, tensor)
self.layer.weight_loader(param=self.w, tensor=tensor)"""
    found = rows(body(code), also=MORE)
    assert [(row[1], *row[3:]) for row in found] == [
        (HEAD.count("\n") + 1, "name", "direct-loader"),
        (HEAD.count("\n") + 3, "tensor", "sender"),
        (HEAD.count("\n") + 4, "tensor[:2].data", "sender"),
        (HEAD.count("\n") + 8, "self.w", "direct-loader"),
    ]
    assert rows(body(code)) == []
