"""The check-rebinds verb: what it lists of small files, and of real bases, stock and with the series."""

from functools import cache

import pytest
from support import run_fork

from fork import ROOT
from fork.bases import find_base
from fork.check_rebinds import FOLDERS, check
from fork.check_writes import python_files
from fork.errors import ForkError
from fork.rebinds.search import Rebind
from fork.series import load_series

LAYERS = "vllm/model_executor/layers/"
MLA, BACKENDS, MODELS = (
    f"{LAYERS}attention/mla_attention.py",
    "vllm/v1/attention/backends/",
    "vllm/model_executor/models/",
)

#: A layer and what its attention backend and quantization method are made of.
HEAD = """
import functools
import torch
from functools import cached_property, partial
from torch import nn
from vllm.model_executor.utils import replace_parameter

class Kernel:
    def __init__(self, scale):
        self.scale = scale
    def apply(self, x):
        return x * self.scale

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.scratch = torch.empty(4)
        self.derived = None
        self.kernel = None
        self.made = {}
"""

UTILS = "vllm/model_executor/utils.py"
COPIES_IF_ASKED = {UTILS: "def replace_parameter(layer, name, new, prefer_copy=False): pass"}
COPIES = {UTILS: "def replace_parameter(layer, name, new): pass"}


def found(code: str, more: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """Attribute and how of every row for a file of `HEAD` and `code`."""
    tree = COPIES_IF_ASKED | (more or {}) | {f"{LAYERS}layer.py": HEAD + code}
    rows = check([path for path in tree if path != UTILS], {path: text.encode() for path, text in tree.items()}.get)
    return [(each.attribute, each.how) for each in rows]


def layer(hook: str, forward: str = "return x + self.derived") -> str:
    """A layer with a post-load step of one statement, and a forward of one."""
    return f"""
    def process_weights_after_loading(self, dtype):
        {hook}
    def forward(self, x):
        {forward}
"""


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        ("self.derived = self.weight.to(dtype)", "post-load module"),
        ("self.derived, count = self.weight.t().contiguous(), 3", "post-load module"),
        ("setattr(self, 'derived', torch.cat([self.weight, self.weight]))", "post-load module"),
        ("self.derived = torch.ops._C.pack(self.weight)", "post-load module"),
        ("self.derived = nn.Parameter(self.weight * 2)", "post-load module"),
        ("replace_parameter(self, 'derived', self.weight * 2)", "post-load module"),
        ("self.derived = torch.zeros(4)", "post-load module"),
        ("self.derived = float(self.weight)", "post-load host"),
        ("self.derived = self.weight.item()", "post-load host"),
        ("self.derived = [self.weight.float()]", "post-load capture"),
        ("self.derived = Kernel(1.0 / self.weight)", "post-load capture"),
        ("self.derived = partial(torch.matmul, self.weight.float())", "post-load capture"),
        ("packed = self.weight.float(); self.derived = lambda x: x @ packed", "post-load capture"),
    ],
)
def test_a_new_tensor_that_loading_binds_is_listed(hook, how):
    assert found(layer(hook)) == [("derived", how)]


@pytest.mark.parametrize(
    "hook",
    [
        "self.derived = self.weight",
        "self.derived = self.weight.data.t().view(2, 2)",
        "self.derived = Kernel(self.weight)",
        "self.derived.copy_(self.weight.float())",
        "self.weight.data.mul_(2)",
        "replace_parameter(self, 'derived', self.weight * 2, prefer_copy=True)",
        "self.derived = self.weight.shape[0] // 2",
        "self.derived = dtype == torch.float32 and not self.weight",
        "kernel = Kernel(2); kernel.derived = self.weight.float()",
    ],
)
def test_what_binds_no_new_tensor_is_not_listed(hook):
    assert found(layer(hook)) == []


def test_where_replace_parameter_always_copies_it_is_not_listed():
    assert found(layer("replace_parameter(self, 'derived', self.weight * 2)"), COPIES) == []


def test_what_only_loading_reads_is_not_listed():
    assert found(layer("self.derived = self.weight.float()", "return x")) == []


ONCE = [
    """
        if self.derived is None:
            self.derived = self.weight.to(dtype)
        else:
            self.derived.copy_(self.weight)
""",
    """
        if self.derived is not None:
            self.derived.copy_(self.weight)
            return
        self.derived = self.weight.to(dtype)
""",
    """
        if self.derived is None:
            self.derived = torch.empty_like(self.weight)
        self.derived.fill_(1.0)
""",
]
ALWAYS = [
    """
        self.derived = torch.empty_like(self.weight)
        self.derived.copy_(self.weight)
""",
    """
        self.derived = self.weight.float()
        if self.kernel:
            self.kernel.derived.copy_(self.weight)
""",
    """
        if self.ready:
            self.derived = torch.empty_like(self.weight)
            self.derived.copy_(self.weight)
""",
]


@pytest.mark.parametrize(("body", "listed"), [*((body, False) for body in ONCE), *((body, True) for body in ALWAYS)])
def test_what_is_bound_once_and_then_written_in_place_is_not_listed(body, listed):
    forward = "    def forward(self, x):\n        return x + self.derived\n"
    assert bool(found(f"\n    def process_weights_after_loading(self, dtype):{body}{forward}")) is listed


def test_parameters_of_the_layer_that_is_handed_in_are_restored_but_its_plain_attributes_are_not():
    assert found("""
class Method:
    def process_weights_after_loading(self, layer):
        layer.packed = nn.Parameter(layer.weight.t().contiguous())
        layer.register_buffer("table", layer.weight.sum())
        replace_parameter(layer, "weight", layer.weight * 2)
        packed = layer.weight.float()
        packed = nn.Parameter(packed)
        setattr(layer, "packed", packed)
        layer.plain = layer.weight.float()
        def transpose(x):
            x.data = x.data.t().contiguous()
        transpose(layer.weight)
        self.own = layer.weight.float()
        self.parameter = nn.Parameter(layer.weight.float())
    def apply(self, layer, x):
        return x + layer.packed + layer.table + layer.plain + self.own + self.parameter
""") == [("plain", "post-load module"), ("own", "post-load helper"), ("parameter", "post-load helper")]


def test_helpers_are_followed_through_methods_overrides_functions_and_objects():
    assert found("""
def fill(target):
    target.one = pack(target.weight)
def pack(weight):
    out = torch.empty(4)
    return torch.ops._C.pack(out, weight)
class Sub(Layer):
    def _more(self):
        self.two = self.weight.float()
class Holder(nn.Module):
    def set(self, value):
        self.three = value
    def forward(self, x):
        return x + self.three
class Model(Layer):
    def __init__(self):
        self.layer = Layer()
        self.holder = Holder()
    def load_weights(self, weights):
        self.layer.post_weight_load()
        self.build(len(weights))
    def build(self, count):
        self.holder.set(self.weight.float())
    def forward(self, x):
        return x + self.one + self.two
Layer.post_weight_load = None
class Base(Layer):
    def process_weights_after_loading(self, dtype):
        fill(self)
        self._more()
    def _more(self):
        pass
class Below(Base):
    def _more(self):
        self.two = self.weight.float()
""") == [("one", "post-load module"), ("three", "post-load module"), ("two", "post-load module")]


def test_a_step_that_is_wrapped_around_the_one_of_another_object_is_followed():
    assert found("""
    def _wrap_process_weights_after_loading(self):
        inner = self.kernel.process_weights_after_loading
        def wrapped(layer):
            inner(layer)
            self.derived = layer.weight.float()
        self.kernel.process_weights_after_loading = wrapped
    def forward(self, x):
        return x + self.derived
""") == [("derived", "post-load module")]


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ("if self.derived is None: self.derived = torch.cat([self.weight])", "lazy-cache module"),
        ("if not hasattr(self, 'derived'): self.derived = self.weight.float()", "lazy-cache module"),
        ("if self.derived is None: self.derived = Kernel(self.weight.float())", "lazy-cache capture"),
        ("if 0 not in self.derived: self.derived[0] = self.weight.float()", "lazy-cache capture"),
        ("if not self.done: self.done = True; self.derived = self.weight.float()", "first-forward module"),
    ],
)
def test_what_forward_computes_once_from_a_weight_is_listed(body, how):
    assert found(f"    def forward(self, x):\n        {body}\n        return x + self.derived\n") == [("derived", how)]


def test_a_weight_that_forward_casts_for_good_is_listed():
    assert found("""
class Impl:
    def __init__(self, sinks=None):
        self.sinks = sinks
    def forward(self, x):
        if self.sinks is not None and self.sinks.dtype != torch.float32:
            self.sinks = self.sinks.to(torch.float32)
        return x + self.sinks
class Model(nn.Module):
    def __init__(self):
        self.sinks = nn.Parameter(torch.empty(4))
        self.impl = Impl(self.sinks)
""") == [("sinks", "first-forward helper")]


@pytest.mark.parametrize(
    "body",
    [
        "if self.derived is None: self.derived = torch.empty(4)",
        "if self.derived is None: self.derived = self.weight.new_zeros(4)",
        "if self.derived is None: self.derived = x.float()",
        "self.derived = self.weight.float()",
        "if self.derived is None: self.derived = self.weight",
    ],
)
def test_scratch_space_and_what_every_forward_makes_anew_are_not_listed(body):
    assert found(f"    def forward(self, x: torch.Tensor):\n        {body}\n        return x + self.derived\n") == []


def test_a_cached_property_of_a_weight_is_listed():
    assert found("""
    @cached_property
    def table(self):
        return self.weight.float()
    def forward(self, x):
        return x + self.table
""") == [("table", "lazy-cache module")]


def test_a_number_that_forward_keeps_of_one_that_loading_read_is_listed():
    assert found("""
class Impl:
    scale = None
    def process_weights_after_loading(self, layer):
        layer._scale_float = layer.weight.item()
    def forward(self, layer, x):
        if self.scale is None:
            self.scale = 2.0
            self.scale *= layer._scale_float
        return x * self.scale * layer._scale_float
""") == [("_scale_float", "post-load host"), ("scale", "lazy-cache host")]


def test_values_that_rest_on_each_other_are_found():
    assert found("""
    def process_weights_after_loading(self, dtype):
        one = two = None
        for _ in range(2):
            one, two = two, one
            one = self.weight.float() if one is None else one
        self.derived = two
    def forward(self, x):
        return x + self.derived
""") == [("derived", "post-load module")]


def test_a_file_that_this_python_cannot_read_is_named():
    with pytest.raises(ForkError, match=r"layer.py: line \d+: .*newer Python"):
        found("    def process_weights_after_loading(self weights): pass\n")


# Real bases. Only the files that matter to a claim are looked at, but all of a tree can be reached from them.


@cache
def rows(base: str, device: str, series: bool, *parts: str) -> list[Rebind]:
    chosen = find_base(base)
    paths, read = python_files(chosen, chosen.wheel(device), load_series() if series else [], FOLDERS)
    return check([path for path in paths if any(part in path for part in parts)], read)


#: Files whose names have one of these: attention, what CPUs compute linears with, and what declares weights.
ATTENTION = ("attention/", "models/granite.py", "layers/linear.py", "layers/utils.py", "flashinfer")


def listed(base: str, device: str, series: bool, *parts: str) -> set[tuple[str, str, str]]:
    return {(each.owner, each.attribute, each.how) for each in rows(base, device, series, *(parts or ATTENTION))}


MLA_16 = {("MLAAttention", each, "post-load module") for each in ("W_UV", "W_UK_T")}
MLA_AITER = {("MLAAttention", each, "post-load module") for each in ("W_K", "W_K_scale", "W_V", "W_V_scale")}
FLASHINFER = {("FlashInferImpl", "sinks", "post-load helper")}
CPU_SINKS = ("CPUAttentionBackendImpl", "sinks", "first-forward helper")
AMX = {("AMXMLAImpl", each, "post-load helper") for each in ("_w_uk_packed", "_w_uv_packed", "_w_scale")}


def test_stock_0_25_binds_the_weights_of_mla_and_the_sinks_of_flashinfer_anew_and_the_series_does_not():
    assert listed("0.25.1", "cuda", False) >= MLA_16 | MLA_AITER | FLASHINFER
    gone = listed("0.25.1", "cuda", False) - listed("0.25.1", "cuda", True)
    assert gone == MLA_16 | MLA_AITER | FLASHINFER
    assert listed("0.25.1", "cuda", True) < listed("0.25.1", "cuda", False)


def test_0_31_binds_the_aiter_weights_and_the_gathered_keys_of_mla_anew():
    found = listed("0.31.0", "cpu", False)
    assert found >= MLA_AITER | {("MLAAttention", "W_UK_T_dcp_qrep", "post-load module")}
    assert not found & (MLA_16 | FLASHINFER)


@pytest.mark.parametrize(("base", "device"), [("0.31.0", "cpu"), ("0.32.0", "cpu"), ("0.33.0", "cuda")])
def test_sinks_that_cpu_attention_casts_and_the_packed_weights_of_amx_are_listed(base, device):
    found = listed(base, device, False)
    assert found >= {CPU_SINKS, ("dispatch_cpu_unquantized_gemm()", "cpu_linear", "post-load capture")} | AMX


def test_the_series_leaves_no_cast_of_the_sinks_on_cpus():
    parts = ("backends/cpu_attn.py", "models/granite.py")
    assert listed("0.32.0", "cpu", False, *parts) - listed("0.32.0", "cpu", True, *parts) == {CPU_SINKS}


def test_b12x_refreshes_its_sinks_in_place_and_two_backends_bind_no_tensor():
    backends = ("backends/b12x.py", "backends/rocm_segmented_attn.py", "backends/composite.py")
    assert not {each.file for each in rows("0.32.0", "cpu", False, *ATTENTION) if each.file.endswith(backends)}


def test_models_that_fuse_weights_after_loading_or_on_first_use_are_listed():
    files = ("layers/linear.py", "qwen3_dflash.py", "openpangu.py", "attention/static_sink", "glm5next/common/kda.py")
    found = {(owner, name, how) for owner, name, how in listed("0.33.0", "cuda", False, *files)}
    assert found >= {
        ("DFlashQwen3Model", "_fused_kv_weight", "post-load module"),
        ("StaticSinkAttention", "sink_key", "post-load module"),
        ("Glm5NextLinearAttention", "_merged_conv_weight", "lazy-cache module"),
    }


def test_the_verb_prints_every_row_sorted_with_file_line_class_attribute_how_and_value():
    done = run_fork(ROOT, "check-rebinds", "--base", "0.25.1", "--json", "--drop", "flashinfer-sink-refresh")
    assert (done.status, done.err) == (0, "")
    assert done.json == sorted(done.json, key=lambda row: (row["file"], row["line"]))
    assert [row for row in done.json if row["class"] == "FlashInferImpl" and row["attribute"] == "sinks"] == [
        {
            "file": f"{BACKENDS}flashinfer.py",
            "line": 1566,
            "class": "FlashInferImpl",
            "attribute": "sinks",
            "how": "post-load helper",
            "value": "self.sinks.to(...)",
        }
    ]
    assert not [row for row in done.json if row["file"] == MLA]


def test_a_patch_that_is_unknown_is_refused(fork):
    fork("check-rebinds", "--drop", "nothing").refuses("unknown patch 'nothing'", status=2)
