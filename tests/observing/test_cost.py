"""What an observation costs besides its kernels: operations and launches per layer, the search for layers, waits."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import locater
from locater.calls.call_and_masks import Call
from locater.families.registry import BY_TYPE
from locater.kernels import Terms, dispatch
from locater.observing import accumulate, layers_by_record, observation, observe, row_masks
from locater.observing.row_masks import next_sample
from tests.kernels.test_head_sums import judge, summed
from tests.kernels.test_statistics import inputs, masks
from tests.observing.test_modes import BATCH, llama

CPU = torch.device("cpu")


class Operations(TorchDispatchMode):
    """The operators of PyTorch that are called inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Kernel:
    """Stands for a Triton kernel; counts its launches and computes nothing."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.launches = kernel.arg_names, 0

    def __getitem__(self, grid: Any) -> Callable[..., Kernel]:
        def launch(*args: Any, **kwargs: Any) -> Kernel:
            self.launches += 1
            return self

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The host side of a call on a GPU, without the GPU."""
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    from locater.kernels import triton_kept_kernels, triton_launches, triton_sums

    stand_ins = [Kernel(triton_launches.rows_kernel), Kernel(triton_sums.sums_kernel)]
    monkeypatch.setattr(dispatch, "default_backend", lambda q, terms: "triton")
    monkeypatch.setattr(triton_launches, "rows_kernel", stand_ins[0])
    monkeypatch.setattr(triton_sums, "sums_kernel", stand_ins[1])
    for module in (triton_kept_kernels, triton_launches, triton_sums):
        monkeypatch.setattr(module, "LAUNCHES", {} if module is triton_kept_kernels else triton_kept_kernels.LAUNCHES)
    return stand_ins


def accumulators(heads: int) -> accumulate.Accumulators:
    return accumulate.Accumulators(
        torch.zeros(heads, len(accumulate.COLUMNS), dtype=torch.float64),
        torch.full((heads, 1), -torch.inf),
        torch.zeros(heads, 0, 2, dtype=torch.float64),
        None,
    )


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("terms", [Terms(causal=True), Terms(causal=True, window=9), Terms()])
def test_two_launches_for_a_layer(rows: int, terms: Terms, kernels: list[Kernel]) -> None:
    q, k = inputs(T=50, S=50)
    call, into = Call(q, k, terms, torch.zeros(2, 50, 4, 16)), accumulators(4)
    options = accumulate.StatisticsOptions(rows)
    next_sample(50, 5, CPU)
    for launches in (1, 2):  # the second goes straight to the compiled kernel
        with Operations() as seen:
            accumulate.add_call(call, into, options, own=True, heads=None)
        assert [kernel.launches for kernel in kernels] == [launches, launches]
        assert len(seen.names) <= 1, seen.names  # memory for the numbers of the rows


@pytest.mark.parametrize("name", ["plain", "causal", "window", "causal-window", "sinks"])
def test_sums_of_a_sample_are_those_of_its_rows(name: str) -> None:
    q, k = inputs(T=50, S=50)
    terms = masks(2, 4, 50, 50, "cpu")[name]
    into = accumulators(4)
    row_masks._samples.cache_clear()
    accumulate.add_call(Call(q, k, Terms(**terms)), into, accumulate.StatisticsOptions(7), own=True, heads=None)
    row_masks._samples.cache_clear()
    want, top = summed(q, k, terms, next_sample(50, 7, CPU))
    judge(into.sums, into.maxima, want, top)


def test_samples_are_drawn_one_out_of_each_part_and_from_nobody_elses_numbers() -> None:
    state = torch.random.get_rng_state()
    row_masks._samples.cache_clear()
    drawn = [next_sample(1000, 8, CPU) for _ in range(row_masks.DRAWS)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all((sample // 125).tolist() == list(range(8)) for sample in drawn)
    assert len({tuple(sample.tolist()) for sample in drawn}) == len(drawn)
    places = torch.stack(drawn) % 125
    assert places.min() < 10
    assert places.max() > 115
    assert abs(float(places.double().mean()) - 62) < 6  # 36 / sqrt(512) is 1.6


def search(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that layers are looked for in, from now on."""
    searched: list[nn.Module] = []
    whole = layers_by_record.attention_layers

    def attention_layers(source: nn.Module) -> Any:
        searched.append(source)
        return whole(source)

    monkeypatch.setattr(layers_by_record, "attention_layers", attention_layers)
    return searched


def test_layers_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched, model = search(monkeypatch), llama()
    rows = []
    for _ in range(3):
        with torch.no_grad(), observe(model) as seen:
            model(**BATCH, use_cache=False)
        rows.append(seen.rows)
    assert searched == [model]
    assert rows[0] == rows[1] == rows[2]
    observe(copy.deepcopy(model))
    assert len(searched) == 2


def another_module(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(*reversed(model.model.layers[0].self_attn.q_proj.weight.shape))


def another_class(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.__class__ = type("Another", (type(attention),), {})


def fewer_layers(model: Any) -> None:
    del model.model.layers[-1]


def prune(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight[: len(linear.weight) // 2].detach())


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a bias": another_module,
    "another class": another_class,
    "fewer layers": fewer_layers,
    "a setting of the model": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "a setting of a layer": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.5),
    "fewer key heads": lambda model: prune(model.model.layers[1].self_attn.k_proj),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_changed_model_is_searched_again(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    observe(model)
    searched = search(monkeypatch)
    CHANGES[change](model)
    with suppress(locater.LocaterError):  # a model may no longer be one that can be read
        observe(model)
    assert searched == [model]


def test_a_remembered_model_can_be_freed() -> None:
    model = llama()
    observe(model)
    layer = weakref.ref(model.model.layers[0].self_attn)
    assert model in layers_by_record._cached_forms
    del model
    gc.collect()
    assert layer() is None


def test_a_new_family_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    observe(model)
    searched = search(monkeypatch)
    before = BY_TYPE["llama"]
    try:
        locater.register(before)
        observe(model)
    finally:
        BY_TYPE.add(before, "llama")
    assert searched == [model]


def test_a_block_does_not_wait_for_the_device_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether anything was received is known without its numbers."""
    model, fetches = llama(), []
    fetched = observation.fetch_numbers

    def fetch(tensors: list[Tensor]) -> Any:
        fetches.append(len(tensors))
        return fetched(tensors)

    monkeypatch.setattr(observation, "fetch_numbers", fetch)
    with torch.no_grad(), observe(model):
        model(**BATCH, use_cache=False)
    assert not fetches
    with pytest.raises(locater.LocaterError, match="nothing was observed"), observe(model) as seen:
        seen._counter.passes = 1
    assert fetches  # an address that another observation had says nothing


def test_masks_are_looked_at_once_in_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a pass have the same mask, also where each has its own view of it."""
    model, looks = llama(), []
    placed = row_masks.place_queries

    def look(*args: Any) -> Any:
        looks.append(args)
        return placed(*args)

    monkeypatch.setattr(row_masks, "place_queries", look)
    with torch.no_grad(), observe(model) as seen:
        for passes in (1, 2):
            model(**BATCH, use_cache=False)
            assert len(looks) == passes
    assert len(seen.sites) > 1


def test_a_mask_that_changes_in_place_is_looked_at_again() -> None:
    q = torch.randn(2, 4, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6).clone()
    call = Call(q, q, Terms(mask=mask))
    before = row_masks.counted_rows(call, own=True, again=True)
    assert row_masks.counted_rows(call, own=True, again=True).counted is before.counted
    mask[1, :, :, :2] = False
    after = row_masks.counted_rows(call, own=True, again=True)
    fresh = row_masks.counted_rows(call, own=True)
    assert torch.equal(after.counted, fresh.counted)
    assert torch.equal(after.first, fresh.first)
    assert after.counted[1].tolist() == [False, False, True, True, True, True]
    with torch.inference_mode():
        of_inference = Call(q, q, Terms(mask=mask.clone()))
        assert row_masks._masks_key(of_inference, True) is None  # where changes leave no trace
