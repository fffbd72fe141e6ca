"""What an expression gives, as far as it matters for tensors that outlive a weight update."""

import ast
from collections.abc import Iterable
from enum import Enum

from fork.writes.sources import Function


class Kind(Enum):
    """One thing that an expression can give; none of them where it gives no tensor."""

    WEIGHT = "weight"  # a parameter that is there already, or a view of it
    OTHER = "other"  # any other tensor that is there already
    MADE = "made"  # a new tensor, made of nothing that a checkpoint holds as far as is known
    DERIVED = "derived"  # a new tensor that was computed from a weight
    PARAMETER = "parameter"  # a new Parameter
    BOX = "box"  # an object, a container or a closure around a tensor that was made
    HOLDER = "holder"  # the same around a derived one
    HOST = "host"  # a number that was read from a tensor

    # That of Enum is written in Python, and sets of these are hashed all the time.
    __hash__ = object.__hash__


Value = frozenset[Kind]

NOTHING: Value = frozenset()
HOLDERS: Value = frozenset({Kind.BOX, Kind.HOLDER})
#: New tensors, and what is around them.
NEW: Value = HOLDERS | {Kind.MADE, Kind.DERIVED, Kind.PARAMETER}
TENSORS: Value = frozenset({Kind.WEIGHT, Kind.OTHER, Kind.MADE, Kind.DERIVED, Kind.PARAMETER})
#: What is computed from one of these keeps something of a weight.
_OF_WEIGHTS: Value = frozenset({Kind.WEIGHT, Kind.DERIVED, Kind.PARAMETER, Kind.HOLDER})


def join(values: Iterable[Value]) -> Value:
    """Any of `values`."""
    return frozenset().union(*values)


def computed(*values: Value) -> Value:
    """A new tensor that is computed from `values`."""
    return frozenset({Kind.DERIVED if join(values) & _OF_WEIGHTS else Kind.MADE})


def held(value: Value) -> Value:
    """Something that holds `value`; what only refers to tensors that are there already holds nothing new."""
    if value & {Kind.DERIVED, Kind.PARAMETER, Kind.HOLDER}:
        return frozenset({Kind.HOLDER})
    return frozenset({Kind.BOX}) if value & NEW else NOTHING


def collected(value: Value) -> Value:
    """A container of `value`."""
    return held(value) | (value & {Kind.WEIGHT, Kind.OTHER})


def element(value: Value) -> Value:
    """One of what `value` holds; of a tensor a view of it."""
    inside = {Kind.HOLDER: Kind.DERIVED, Kind.BOX: Kind.MADE}
    return frozenset(inside.get(kind, kind) for kind in value)


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Attributes and methods that give a view of a tensor.
VIEWS = words(
    "data T mT H mH real imag detach narrow view view_as reshape flatten unflatten ravel squeeze unsqueeze t transpose "
    "adjoint permute movedim swapaxes select diagonal as_strided unfold expand expand_as requires_grad_ unbind chunk "
    "split tensor_split split_with_sizes"
)
#: Methods that only a tensor has, and that give a new one.
TENSOR_ONLY = words(
    "contiguous clone to float half bfloat16 double int long cuda cpu repeat repeat_interleave reciprocal sqrt rsqrt "
    "clamp index_select masked_fill"
)
#: Functions and methods that take no values from the tensors which they are given.
BLANK = words("empty_like zeros_like ones_like full_like rand_like new_empty new_zeros new_ones new_full empty_strided")
#: Methods of a tensor that give a number which its storage does not decide, and attributes that hold none.
PLAIN = words(
    "size dim numel element_size data_ptr stride get_device is_contiguous storage_offset nelement shape dtype device "
    "ndim is_meta nbytes is_cuda is_cpu weight_loader layout itemsize untyped_storage requires_grad"
)
#: Methods that read a tensor into Python.
HOSTS = words("item tolist numpy")

#: What tensors, containers and strings have too: a method of such a name need not be one of the tree.
GENERAL = (
    VIEWS
    | BLANK
    | TENSOR_ONLY
    | PLAIN
    | HOSTS
    | words("append extend update get pop items values keys add copy format join split forward apply load_weights wait")
)

#: What torch has that gives no tensor.
_NO_TENSOR = words(
    "device Size dtype finfo iinfo compile Generator Stream Event is_tensor is_floating_point get_default_dtype "
    "get_default_device no_grad inference_mode is_grad_enabled set_default_dtype manual_seed Module allclose equal "
    "empty_cache current_device get_device_capability synchronize device_count mem_get_info get_world_size get_rank "
    "current_stream is_available get_device_properties is_initialized promote_types can_cast library"
)
_NO_TENSOR_IN = (
    "torch.cuda.",
    "torch.accelerator.",
    "torch.backends.",
    "torch.version.",
    "torch.utils.",
    "torch.jit.",
    "torch.cpu.",
)

_PLAIN_RETURNS = words("bool int str None dtype device Size")


def gives_tensor(name: str) -> bool:
    """Whether a call of the torch function of dotted name `name` gives a tensor."""
    last = name.rsplit(".", 1)[-1]
    module = name.startswith("torch.nn.") and last[:1].isupper()
    return not module and last not in _NO_TENSOR and not name.startswith(_NO_TENSOR_IN)


def returns(function: Function) -> str:
    """`tensor` or `plain` where the annotation of `function` says so, else an empty string."""
    node = None if isinstance(function.node, ast.Lambda) else function.node.returns
    text = ast.unparse(node) if node else ""
    if "Tensor" in text:
        return "tensor"
    return "plain" if text and text.rsplit(".", 1)[-1] in _PLAIN_RETURNS else ""
