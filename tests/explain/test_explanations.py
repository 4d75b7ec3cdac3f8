"""The signature that methods of this room share: paths() against decompose(), bad input, and what a call leaves behind."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater import Family
from locater.errors import LocaterError
from locater.explain import decompose, operator, paths
from locater.explain.linear_operator import frozen_with_readout
from locater.families import registry
from tests import ROOT, benchmark
from tests.explain.float64 import AllFloat64
from tests.explain.maps_only import FAMILY, MapsOnly
from tests.explain.models import REFUSED, built
from tests.explain.test_operator import close_to, complete, first_input, one
from tests.explain.test_paths import HEADS, LAYERS, TEXT, bert, gpt2, hf, model_of, reference
from tests.parity import tokens
from tests.processes import python

METHODS: dict[str, Callable[..., Any]] = {"operator": operator, "paths": paths}


# paths()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("mlp", ["source", "linear"])
def test_paths_are_those_of_decompose_along_the_target(name: str, mlp: Any) -> None:
    model, batch = first_input(name)
    result = paths(model, batch, (6, 5), mlp=mlp)
    u = model.lm_head.weight[5].detach()  # type: ignore[union-attr, index]
    whole = decompose(model, batch, mlp=mlp)
    sums = whole.by_length()
    assert float(result.scores.sum()) == pytest.approx(float(sums.input.sum(0)[0, 6] @ u), abs=1e-10)
    assert result.offset == pytest.approx(float((sums.constants + sums.mlp).sum(0)[0, 6] @ u), abs=1e-10)
    close_to(result.parts["length"], sums.total[:, 0, 6] @ u)
    heads = [[whole.through(layer, head)[0, 6] @ u for head in range(HEADS)] for layer in range(LAYERS)]
    close_to(result.parts["head"], torch.tensor(heads, dtype=torch.float64))
    assert float(result.parts["length"].sum()) == pytest.approx(result.target.value, abs=1e-10)
    assert not result.scores[7:].any(), "later tokens do not reach this one"
    complete(result)


def test_scores_of_paths_are_those_of_the_enumeration() -> None:
    """Each token alone, along every path, one by one."""
    model, batch = first_input("gpt2")
    made, u = reference("gpt2"), model.lm_head.weight[5].detach()  # type: ignore[union-attr, index]
    want = []
    for token in range(made.start.shape[1]):
        alone = torch.zeros_like(made.start)
        alone[:, token] = made.start[:, token]
        want.append(sum(made.walk(alone, path, 0)[0, -1] @ u for path in made.choices()))
    close_to(paths(model, batch, 5).scores, torch.stack(want).detach())  # type: ignore[arg-type]


def test_paths_through_mlps_have_the_scores_of_the_operator() -> None:
    model, batch = first_input("gpt2")
    result = paths(model, batch, 5, mlp="linear")
    close_to(result.scores, operator(model, batch, 5).scores)
    assert (result.scores - paths(model, batch, 5).scores).abs().max() > 1e-3


@pytest.mark.parametrize("label", ["phi", "dinov2", "locater-sandwich-alone", "bert", "mixtral", "xlnet", "albert"])
@pytest.mark.parametrize("mlp", ["source", "linear"])
def test_paths_of_other_blocks_are_complete(label: str, mlp: Any) -> None:
    model, batch = built(label)
    with AllFloat64():
        result = paths(model, one(batch), mlp=mlp)
        whole, readout = frozen_with_readout(model, one(batch), None, mlp)
    complete(result)
    assert float(result.parts["length"].sum()) + readout.constant == pytest.approx(result.target.value, abs=1e-9)
    through = torch.stack([whole._through(layer)[:, 0] for layer in range(whole.layers)])  # (L, H, T, d)
    close_to(result.parts["head"], torch.einsum("lhtd,td->lh", through, readout.covector))


# Bad input


def unrecorded() -> tuple[nn.Module, Tensor]:
    """A family without a record of its block."""
    locater.register(Family(("no_block",), FAMILY.layers, None, FAMILY.tap))
    model = MapsOnly(2, 8)
    model.config["model_type"] = "no_block"
    return model, torch.arange(5)[None]


BAD: dict[str, tuple[Callable[[], tuple[Any, ...]], str]] = {
    "vocabulary": (lambda: (gpt2(), ids(), 64), r"target=64: the output has entries 0 to 63"),
    "token": (lambda: (gpt2(), ids(), (9, 0)), r"target=\(9, 0\): the output has tokens 0 to 8"),
    "name": (lambda: (gpt2(), ids(), "cat"), r"target='cat': give an entry of the output, or \(token, entry\)"),
    "true": (lambda: (gpt2(), ids(), True), r"target=True: give an entry of the output"),
    "no logits": (lambda: (bert(), ids(), 3), "the model has no logits to choose from; leave the target out"),
    "positions": (
        lambda: (gpt2(), torch.zeros(1, 65, dtype=torch.long)),
        r"the input has 65 tokens and transformer.wpe has 64 positions: shorten it",
    ),
    "two": (lambda: (gpt2(), tokens()), "the batch has 2 inputs: explain one at a time"),
    "ids": (lambda: (gpt2(), ids() + 64), "has token ids from .*, and the vocabulary has 64: check the tokenizer"),
    "axis": (lambda: (gpt2(), ids()[0]), r"input_ids has the shape \(9,\): .* with a batch axis in front"),
    "empty": (lambda: (gpt2(), ids()[:, :0]), r"input_ids has the shape \(1, 0\): give one token or more"),
    "text": (lambda: (gpt2(), "a cat"), "inputs are a str: give token ids as a tensor"),
    "record": (unrecorded, r"model_type 'no_block' is not split into linear steps: .*gradient_input needs no such record"),
    "unknown": (lambda: (nn.Linear(2, 2), torch.zeros(1, 2)), "a model without a model_type is not split"),
    "nan": (lambda: (spoilt(), ids()), r"logit \d+ is nan: there is nothing to explain"),
}  # fmt: skip


def ids() -> Tensor:
    return tokens()["input_ids"][:1]


def spoilt() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan  # type: ignore[index, union-attr]
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_line_and_nothing_is_left_behind(case: str, method: str) -> None:
    make, message = BAD[case]
    try:
        model, *rest = make()
        model.train()
        before = state(model)
        with pytest.raises(LocaterError) as refused:
            METHODS[method](model, *rest)
        assert re.search(message, str(refused.value))
        assert "\n" not in str(refused.value)
        assert state(model) == before
    finally:
        if case == "record":
            registry.BY_TYPE.remove("no_block")


@pytest.mark.parametrize("label", REFUSED)
def test_models_of_two_streams_are_refused(label: str) -> None:
    model, batch = built(label)
    before = state(model)
    with pytest.raises(LocaterError, match=re.escape(REFUSED[label])):
        operator(model, one(batch))
    assert state(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_behind(method: str) -> None:
    model = gpt2()
    model.train()
    model.transformer.h[1].eval()  # type: ignore[index, union-attr]
    model.transformer.wte.weight.requires_grad_(False)  # type: ignore[union-attr]
    before, plain = state(model), model.eval()(ids()).logits.detach()
    model.train()
    model.transformer.h[1].eval()  # type: ignore[index, union-attr]
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():  # type: ignore[operator]
            here = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            scores = METHODS[method](model, ids()).scores
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == here
        assert not scores.requires_grad
    assert state(model) == before
    assert torch.equal(model.eval()(ids()).logits, plain)


@pytest.mark.parametrize("where", ["transformer.h.1.mlp", "transformer.ln_f", "lm_head"])
def test_nothing_is_left_behind_by_a_model_that_fails(where: str) -> None:
    model = gpt2()

    def fail(*args: Any) -> None:
        raise RuntimeError("no")

    handle = model.get_submodule(where).register_forward_hook(fail)
    before = state(model)
    with pytest.raises(LocaterError, match=r"GPT2LMHeadModel: does not run on these inputs \(no\)"):
        operator(model, ids())
    assert state(model) == before
    handle.remove()
    complete_enough(operator(model, ids()))


def complete_enough(result: Any) -> None:
    assert abs(float(result.scores.sum()) + result.offset - result.target.value) < 1e-4


def state(model: nn.Module) -> Any:
    """All that a call could leave on a model: attributes, hooks, modes, gradients."""
    modules = {
        path: (sorted(vars(m)), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), vars(m).get("forward"))
        for path, m in model.named_modules()
    }
    parameters = {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()}
    return modules, parameters, torch.is_grad_enabled()


def test_options_are_checked() -> None:
    for call, message in (
        (lambda: operator(gpt2(), ids(), collapse="mean"), "collapse='mean' is not known: use 'logit', 'input'"),  # type: ignore[arg-type]
        (lambda: operator(gpt2(), ids(), probes=4), "probes=4: a whole number from 0 on, and for collapse='norm' only"),
        (lambda: operator(gpt2(), ids(), collapse="norm", probes=-1), "probes=-1: a whole number from 0 on"),
        (lambda: paths(gpt2(), ids(), mlp="none"), "mlp='none' is not known: use 'source' or 'linear'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(LocaterError, match=message):
            call()


def test_padding_is_no_part_of_the_target() -> None:
    """Left padding does not change the scores of real tokens."""
    model: Any = hf("Llama", "ForCausalLM", **TEXT).double().eval()
    batch = tokens()
    padded = {name: x[1:] for name, x in batch.items()}
    result = operator(model, padded, 5)
    alone = operator(model, {"input_ids": padded["input_ids"][:, 3:]}, 5)
    assert not result.scores[:3].any()
    assert (result.scores[3:] - alone.scores).abs().max() < 1e-6 * alone.scores.abs().max()


# Names and figures


def test_the_page_has_the_table_of_the_benchmark() -> None:
    table = benchmark("explain")["table"]()
    assert table in (ROOT / "docs" / "results" / "kernels.md").read_text(), "python benchmarks/explain.py --table"


def test_names_are_the_functions_after_any_order_of_imports() -> None:
    """In a fresh process, which forgets the room and imports it again in another order; calls are repeated."""
    script = """
import importlib, itertools, pkgutil, sys, torch, locater
from locater_lab.models.transformer import Shape, Transformer
model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16))
names = ["", ".attention_flow", ".path_sums", ".linear_operator"]
for order in [*itertools.permutations(names, 2), names[::-1], ()]:
    for name in [name for name in sys.modules if name.startswith("locater.explain")]:
        del sys.modules[name]
    vars(locater).pop("explain", None)
    for name in order:
        importlib.import_module("locater.explain" + name)
    for _, name in itertools.product(range(2), ("paths", "operator")):
        assert len(getattr(locater.explain, name)(model, torch.arange(4)[None]).scores) == 4
        for part in names:
            importlib.import_module("locater.explain" + part)
assert not {f"locater.explain.{name}" for name in locater.explain.__all__} & {
    f"locater.explain.{module.name}" for module in pkgutil.iter_modules(locater.explain.__path__)
}
print("same")
"""
    run = subprocess.run([python(), "-c", script], capture_output=True, text=True)
    assert run.stdout == "same\n", run.stderr


def test_explanations_of_one_input_say_what_they_are() -> None:
    for (name, method), _ in itertools.product(METHODS.items(), range(2)):
        result = method(model_of("gpt2"), one(tokens()), 5)
        assert result.method == name
        assert result.target.what == "logit 5 at token 8"
        assert "sum to the target" in result.exact
        assert "one forward pass of the model" in result.how
        assert repr(result).startswith(f"<Explanation by {name} of logit 5 at token 8: 9 tokens; largest ")
