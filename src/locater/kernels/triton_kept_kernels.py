"""What all launches of the statistics kernels share: arguments, and compiled kernels kept for the next call."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import triton
from torch import Tensor

from locater.kernels.terms import Terms
from locater.kernels.triton_parts import compared_kernel
from locater.torch_private import has_tested_launch, launch_compiled

CACHE = 24 << 20  # bytes of keys that programs running at one time share
# A second launch with the same shapes, strides, alignment and terms goes straight to the compiled kernel: Triton's own
# dispatch costs more host time than 4,096 tokens take on the GPU. How compiled kernels are called is no promise of
# Triton's: this is done for versions in which it was run, and after one launch by either way gave the same numbers.
LAUNCHES: dict[tuple[Any, ...], tuple[Any, tuple[int, int, int], list[Any]]] = {}
KERNELS: dict[tuple[Any, ...], Any] = {}  # the same by what Triton specialises on, for shapes that change at each call
_launches_compared: dict[torch.device, bool] = {}  # whether both ways agreed


def launches_directly(device: torch.device) -> bool:
    """Whether compiled kernels are called directly on this device. Compared once, before the first is kept."""
    if not has_tested_launch(triton.__version__):
        return False
    if device not in _launches_compared:
        if (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        ):  # a graph cannot wait for numbers: asked again later
            return False
        _launches_compared[device] = _launches_agree(device)
    return _launches_compared[device]


def _launches_agree(device: torch.device) -> bool:
    """Whether a kernel gives the same numbers by Triton's dispatch and past it; warns where not."""
    try:
        x = torch.arange(1, 17, dtype=torch.float32, device=device)
        by_dispatch, past_it = torch.full((2, 16), -1.0, device=device)
        given, fixed = (None, 1, 13, 0.5), (16, True)
        kernel = compared_kernel[(1, 1, 1)](x, by_dispatch, *given, SIZE=fixed[0], TWICE=fixed[1])
        launch_compiled(kernel, (1, 1, 1), [x, past_it, *given, *fixed])
        wanted = torch.where(torch.arange(16, device=device) < 13, x, 0.0)
        why = None if torch.equal(by_dispatch, wanted) and torch.equal(past_it, wanted) else "gave other numbers"
    except Exception as error:  # a convention of calls that changed shows in any way
        why = f"failed ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if why is not None:
        warnings.warn(
            f"a compiled kernel of Triton {triton.__version__} {why} when it was called directly: kernels are launched "
            "by Triton's own dispatch, which takes more time of the host and changes no number",
            stacklevel=2,
        )
    return why is None


def tensor_layout(x: Tensor | None) -> tuple[Any, ...] | None:
    """What Triton's dispatch asks of a tensor, besides its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16)


def keep_kernel(
    key: tuple[Any, ...],
    function: Any,
    kernel: Any,
    grid: tuple[int, int, int],
    rest: list[Any],
    before: int,
    fixed: dict[str, Any],
) -> None:
    """Keep a compiled kernel for launches with the same key. `rest` are the arguments after the first `before`, `fixed`
    the compile-time ones."""
    if kernel is None or not launches_directly(next(x for x in key if isinstance(x, torch.device))):
        return
    if len(LAUNCHES) >= 256:
        LAUNCHES.clear()
    names = function.arg_names[before + len(rest) :]
    LAUNCHES[key] = kernel, grid, rest + [fixed[name] for name in names]


def launch(function: Any, grid: tuple[int, int, int], arguments: list[Any], fixed: dict[str, Any]) -> None:
    """Launch a kernel with `arguments` in its order and `fixed` ones by name, past Triton's dispatch where a kernel was
    compiled for such arguments before.
    """
    parameters = getattr(function, "params", ())  # none in the interpreter, which compiles nothing
    kinds = [x if p.is_constexpr else _kind(x) for x, p in zip(arguments, parameters, strict=False)]
    key = (function, arguments[0].device, *kinds, *fixed.values())
    kernel = KERNELS.get(key)
    if kernel is None:
        kernel = function[grid](*arguments, **fixed)
        if kernel is not None and launches_directly(arguments[0].device):
            KERNELS[key] = kernel
    else:
        launch_compiled(kernel, grid, [*arguments, *(fixed[name] for name in function.arg_names[len(arguments) :])])


def _kind(x: Any) -> Any:
    """What Triton recompiles a kernel for: alignment, the number 1, and more than 32 bits."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16
    return (x == 1, x % 16 == 0, x >= 1 << 31) if isinstance(x, int) else None if x is None else float


def launch_arguments(q: Tensor, k: Tensor, terms: Terms) -> tuple[list[Any], dict[str, Any]]:
    """Tensors, strides and sizes; compile-time switches."""
    B, H, T, D = q.shape
    K, S = k.shape[1], k.shape[-2]
    strides = [*q.stride()[:3], *k.stride()[:3]]
    for x in (terms.mask, terms.bias):
        strides += [0, 0, 0] if x is None else [0 if x.shape[axis] == 1 else x.stride(axis) for axis in range(3)]
    together = max(1, min(B * H, CACHE // max(1, S * D * k.element_size())))
    arguments: list[Any] = [terms.documents, terms.padding, terms.mask, terms.bias, terms.alibi, *strides]
    arguments += [H, H // K, B * H, together, T, S, terms.scale_for(D), terms.softcap or 1.0, terms.window or 0]
    flags = {
        "D": D,
        "CAUSAL": terms.causal,
        "WINDOW": terms.window is not None,
        "CAP": terms.softcap is not None,
        "PAD": terms.padding is not None,
        "DOC": terms.documents is not None,
        "MASK": terms.mask is not None,
        "BIAS": terms.bias is not None,
        "ALIBI": terms.alibi is not None,
        # three products of rounded parts: float32 to a few 1e-7
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
    }
    return arguments, flags
