"""What functions of PyTorch do: the one table by which observation and discovery recognise attention and follow it.

A function has many names: `L * c`, `torch.multiply(L, c)`, `L.mul_(c)`, `torch.ops.aten.mul(L, c)`. `name_of` gives the
usual one, resolved by the function itself; the sets below say what functions of that name do to numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# the usual name: others of the same function. Every name stands for its in-place form too, with _ at the end.
ALIASES = {
    "add": "__add__ __radd__ __iadd__",
    "sub": "subtract __sub__ __isub__",
    "rsub": "__rsub__",
    "mul": "multiply __mul__ __rmul__ __imul__",
    "div": "divide true_divide __truediv__ __div__ __itruediv__ __idiv__",
    "rdiv": "__rdiv__ __rtruediv__",
    "neg": "negative __neg__",
    "positive": "__pos__",
    "pow": "float_power __pow__ __ipow__",
    "abs": "absolute __abs__",
    "clamp": "clip",
    "matmul": "__matmul__ bmm mm linalg_matmul",
    "rmatmul": "__rmatmul__",
    "multi_dot": "chain_matmul linalg_multi_dot",
    "vecdot": "linalg_vecdot",
    "cat": "concat concatenate",
    "movedim": "moveaxis",
    "transpose": "swapaxes swapdims",
    "softmax": "_softmax special_softmax",
    "log_softmax": "_log_softmax special_log_softmax",
    "logsumexp": "special_logsumexp",
    "dropout": "native_dropout feature_dropout alpha_dropout",
    "pad": "constant_pad_nd",
}
GETTERS = ("T", "H", "mT", "mH", "real", "imag", "data")  # attributes of a tensor that are tensors of its numbers

SOFTMAXES = frozenset({"softmax", "log_softmax"})
FUSED = "scaled_dot_product_attention"
# the arguments of that function, in its order
FUSED_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
MULTI_HEAD = "multi_head_attention_forward"

PRODUCTS = frozenset("matmul rmatmul multi_dot baddbmm addbmm einsum tensordot inner vecdot bilinear".split())
CHANNELS_SECOND = frozenset("conv1d conv2d conv3d conv_transpose1d conv_transpose2d".split())
MAPS = CHANNELS_SECOND | {"linear", "addmm", "embedding"}
NORMS = frozenset("layer_norm rms_norm group_norm batch_norm instance_norm".split())
ENDS = MAPS | NORMS  # what follows is not a logit any more

# numbers in another place or shape, once, several times or not at all
MOVES = frozenset(
    """view reshape flatten unflatten transpose permute movedim unsqueeze squeeze expand expand_as repeat
    repeat_interleave chunk split split_with_sizes tensor_split unbind __iter__ select narrow __getitem__ cat stack
    view_as reshape_as t roll flip fliplr flipud pad unfold index_select broadcast_to tile ravel adjoint hstack vstack
    view_as_complex view_as_real unsafe_chunk unsafe_split T H mT mH real imag""".split()
)
CASTS = frozenset("to type type_as float double half bfloat16 cfloat cdouble".split())
COPIES = frozenset("contiguous clone detach dropout data copy_ alias positive".split())
KEEPING = MOVES | CASTS | COPIES  # all of these leave numbers as they are
PARTING = frozenset("__getitem__ narrow select unbind chunk split split_with_sizes tensor_split".split())
JOINS = frozenset({"cat", "hstack"})
LARGEST = frozenset({"amax", "max"})
ADDS, MULTIPLIES = frozenset({"add"}), frozenset({"mul"})
# a row is still that row, with other keys hidden
HIDING = CASTS | COPIES | {"masked_fill", "where", "add"}

_HOMES = (torch, Tensor, functional, torch.special, torch.linalg)
_BY_NAME = {name: usual for usual, names in ALIASES.items() for name in names.split()}


def _table() -> dict[Any, str]:
    """The usual name of each function that has several."""
    table: dict[Any, str] = {}
    for usual in {*ALIASES, *SOFTMAXES, *PRODUCTS, *MAPS, *NORMS, *KEEPING, *LARGEST, *HIDING, *_MORE}:
        for name in (usual, *ALIASES.get(usual, "").split()):
            for home in _HOMES:
                for form in (name, f"{name}_"):
                    function = getattr(home, form, None)
                    if callable(function):
                        table.setdefault(function, usual)
    return table | {getattr(Tensor, name).__get__: name for name in GETTERS}


_MORE = "tanh sigmoid exp sum logsumexp softmin normalize maximum minimum nan_to_num scatter".split()
_NAMES = _table()


def name_of(function: Any) -> str:
    """The usual name of a function; its own where it is in no table.

    >>> import operator
    >>> name_of(torch.multiply), name_of(Tensor.mul_), name_of(torch.special.softmax), name_of(Tensor.mT.__get__)
    ('mul', 'mul', 'softmax', 'mT')
    """
    name = _NAMES.get(function)
    if name is None:
        own = str(getattr(function, "__name__", function)).partition(".")[0]  # mul.Tensor of torch.ops.aten
        name = _BY_NAME.get(own, own)
        if isinstance(function, Callable):  # type: ignore[arg-type]
            _NAMES[function] = name
    return name


def fills(name: str) -> bool:
    """Whether values of a function do not depend on the numbers that it is given: zeros_like, new_full."""
    return name.startswith(("new_", "zeros", "ones", "empty", "full", "rand"))


def writes_in_place(function: Any) -> bool:
    """Whether a function writes to its first argument: `L.mul_(c)`, `L *= c`, `L[hidden] = c`."""
    name = str(getattr(function, "__name__", "")).partition(".")[0]
    return name in ASSIGNING or (name.endswith("_") and not name.endswith("__"))


ASSIGNING = frozenset(f"__{name}__" for name in "setitem iadd imul isub itruediv idiv ipow iand ior ixor".split())


def axis_of(args: Sequence[Any], kwargs: Mapping[str, Any], at: int = 1) -> Any:
    """The axis that a call is given: `dim` by name or place."""
    return kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else None))


def fused_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of fused attention by name, those that were given."""
    return {**dict(zip(FUSED_ARGUMENTS, args, strict=False)), **kwargs}
