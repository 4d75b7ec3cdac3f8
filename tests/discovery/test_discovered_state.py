"""Models that are wrapped, changed by their own pass, random, empty, sharded or quantised: discovery verifies them or
refuses them in one line, and leaves them bit for bit as they were.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import locater
from locater.errors import LocaterError
from tests.families.plain_models import HEADS, SIZE, WIDTH, Maps, Residual, joined, many_heads, noise, split

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
X = {"x": noise(2, 7, WIDTH)}


def block(attend: Callable[[Tensor, Tensor, Tensor], Tensor] = many_heads) -> nn.Module:
    torch.manual_seed(0)
    return Residual(Maps(attend))


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that must stay: tensors, gradients, modes, hooks, random states, the default dtype."""
    tensors = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        lazy, empty = torch.nn.parameter.is_lazy(tensor), tensor.device.type == "meta"
        local = tensor if lazy or empty else getattr(tensor, "_local_tensor", tensor)
        tensors[name] = (id(tensor), None if lazy or empty else (local._version, local.detach().numpy().tobytes()))
    return {
        "tensors": tensors,
        "gradients": {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()},
        "training": [part.training for part in model.modules()],
        "hooks": [
            {name: list(value.values()) for name, value in vars(part).items() if name in HOOKS}
            for part in model.modules()
        ],
        "attributes": [sorted(vars(part)) for part in model.modules()],
        "random": (torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002
        "dtype": torch.get_default_dtype(),
    }


def discovered(model: nn.Module, example: dict[str, Any] | None = X) -> Any:
    """What `discover` finds, or its refusal; the model is compared before and after."""
    before = state(model)
    result: Any = None
    try:
        result = locater.discover(model, example)
    except LocaterError as error:
        result = error
    assert state(model) == before
    assert not isinstance(result, LocaterError) or "\n" not in str(result)
    return result


def verified(model: nn.Module, inner: nn.Module, example: dict[str, Any] | None = X) -> None:
    """The one layer of `model` computes what the block `inner`, of the same weights, computes."""
    (layer,) = discovered(model, example).layers
    x = noise(1, 5, WIDTH, seed=9)
    with torch.no_grad():
        theirs = inner.attention(inner.norm(x))  # type: ignore[operator]
        assert (layer.output(x) - theirs).abs().max() < 1e-5 * theirs.std()
    assert len(locater.scan(model, example=example).rows) == HEADS


# ---- passes that draw, write or fail


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + torch.randn_like(x) + random.random() + np.random.rand())  # noqa: NPY002


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(split, (q, k, v))
    return joined(functional.dropout((q @ k.mT * SIZE**-0.5).softmax(-1), 0.3, training=True) @ v)


def shaken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return many_heads(q + torch.randn_like(q), k, v)


def test_noise_in_the_stream_is_part_of_what_the_maps_read() -> None:
    model = Noisy()
    verified(model, model.inner)


def test_noise_inside_attention_is_named() -> None:
    (layer,) = discovered(block(dropped)).layers
    assert layer.unknown_logits is None
    assert str(layer.unknown_output).endswith("(its forward pass draws random numbers)")
    result = discovered(block(shaken))
    assert not result.layers
    assert all(refusal.reason.endswith("(its forward pass draws random numbers)") for refusal in result.refused)


class Writing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = block(), how

    def forward(self, x: Tensor) -> Tensor:
        part: Any = self.inner.attention.q
        with torch.no_grad():
            if self.how == "in place":
                part.weight.mul_(1.01)
            elif self.how == "data":
                part.weight.data = part.weight.data * 1.01
            else:
                part.weight = nn.Parameter(part.weight * 1.01)
        return self.inner(x)


@pytest.mark.parametrize("how", ["in place", "data", "a new parameter"])
def test_a_pass_that_writes_to_its_weights_is_refused(how: str) -> None:
    assert "changes its own parameter inner.attention.q.weight" in str(discovered(Writing(how)))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        torch.manual_seed(5)
        random.seed(5)
        torch.set_default_dtype(torch.float16)
        raise ValueError("broken here")


def test_everything_is_as_before_after_an_exception_in_the_pass() -> None:
    model = Failing().train()
    model.inner.attention.q.weight.grad = torch.ones(WIDTH, WIDTH)  # type: ignore[union-attr]
    model.inner.register_forward_hook(lambda *_: None)
    assert "ValueError: broken here" in str(discovered(model))
    assert "example=" in str(discovered(model, None))


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = block()

    def forward(self, x: Tensor, condition: dict[str, Tensor]) -> Tensor:
        return self.inner(x + condition["shift"])


def test_inputs_that_nobody_can_guess_are_named() -> None:
    model = Conditioned()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a tensor asked for "shift"
        assert "Give them: example={'x': tensor, 'condition': tensor}" in str(discovered(model, None))
    verified(model, model.inner, {**X, "condition": {"shift": torch.ones(1)}})


# ---- tensors without numbers of their own


class Quantised(nn.Module):
    """A map of integers and one factor for each row."""

    def __init__(self, as_parameter: bool) -> None:
        super().__init__()
        numbers = torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8)
        if as_parameter:
            self.weight = nn.Parameter(numbers, requires_grad=False)
        else:
            self.register_buffer("weight", numbers)
        self.register_buffer("scale", torch.rand(WIDTH, 1) / 127)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x) * self.scale.to(x))  # type: ignore[operator]


@pytest.mark.parametrize("as_parameter", [True, False])
def test_integer_weights_are_refused_by_name(as_parameter: bool) -> None:
    model = block()
    model.attention.k = Quantised(as_parameter)  # type: ignore[union-attr]
    assert "attention.k.weight is stored as torch.int8 (quantised): dequantise" in str(discovered(model))


def test_empty_tensors_are_refused_by_name() -> None:
    assert "norm.weight has no data (meta device)" in str(discovered(block().to("meta")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules are new to PyTorch
        model = nn.Sequential(nn.LazyLinear(WIDTH), block())
    assert "0.weight has no shape yet" in str(discovered(model, {"input": X["x"]}))


# ---- wrappers


def test_compiled_models() -> None:
    whole, place, part = block(), block(), block()
    verified(torch.compile(whole), whole)
    verified(torch.compile(whole), whole, None)
    place.compile()
    verified(place, place)
    inner = part.attention
    part.attention = torch.compile(inner)  # type: ignore[assignment]
    before = state(part)
    (layer,) = locater.discover(part, X).layers
    assert state(part) == before
    assert (layer.name, layer.heads) == ("attention", HEADS)


@pytest.fixture
def group() -> Iterator[Any]:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("PyTorch was built without torch.distributed")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    from torch.distributed.device_mesh import init_device_mesh

    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_models_of_several_processes(group: Any) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    inner = block()
    verified(DistributedDataParallel(inner), inner)
    verified(DistributedDataParallel(inner), inner, None)
    sharded, plain = block(), block()
    fully_shard(sharded.attention, mesh=group)
    fully_shard(sharded, mesh=group)
    verified(sharded, plain)
    cut = block()
    parallelize_module(cut.attention, group, {name: ColwiseParallel() for name in "qkv"})
    verified(cut, plain)


def test_compiled_blocks_of_a_sharded_model(group: Any) -> None:
    """The order of torchtitan: a block is compiled, then sharded; the copy runs it as it is written."""
    from torch.distributed.fsdp import fully_shard

    sharded, plain = block(), block()
    sharded.attention.compile()
    fully_shard(sharded.attention, mesh=group)
    fully_shard(sharded, mesh=group)
    verified(sharded, plain)
