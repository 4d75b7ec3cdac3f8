"""`AllFloat64`: no step of a model rounds to float32 while it runs.

transformers computes RMSNorm, the softmax of eager attention and routers in float32 whatever the model's precision,
which hides errors below 1e-6. Inside this context a float64 tensor stays in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.models.deberta_v2 import modeling_deberta_v2


class AllFloat64(TorchFunctionMode):
    def __enter__(self) -> AllFloat64:
        # a scripted function, which a mode does not see
        self.patched = patch.object(modeling_deberta_v2, "scaled_size_sqrt", _root_of_size)
        self.patched.start()
        super().__enter__()
        return self

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        self.patched.stop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = (args[0], *(torch.float64 if a is torch.float32 else a for a in args[1:]))
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def _root_of_size(query: Tensor, factor: int) -> Tensor:
    return torch.tensor(float(query.shape[-1] * factor), dtype=torch.float64).sqrt()
