"""Paths: against a plain enumeration that is written from the models' own modules, and against the models' own
outputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain import Paths, decompose
from locater.explain.linear_steps import HeadBranch
from locater.families.registry import BY_TYPE, block_of
from locater.sources.open_source import config_of
from locater_lab.train import Shape, Transformer
from tests import ROOT
from tests.explain.float64 import AllFloat64
from tests.explain.models import BY_LABEL, LABELS, REFUSED, built
from tests.parity import EPS, redraw, tokens

LAYERS, HEADS, WIDTH = 3, 2, 16
SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=24
)
TEXT: dict[str, Any] = dict(SIZES, vocab_size=64, max_position_embeddings=64)
OWN: dict[str, Any] = dict(vocabulary=64, layers=LAYERS, width=WIDTH, heads=HEADS, kv_heads=HEADS, hidden=24, length=9)


def hf(name: str, head: str = "Model", **kw: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    return getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**kw))


def llama() -> nn.Module:
    """With PyTorch's norm: that of transformers rounds to float32 also in a float64 model."""
    model = hf("Llama", "ForCausalLM", **{**TEXT, "num_key_value_heads": 1}, attention_bias=True, rms_norm_eps=EPS)
    for path, module in list(model.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            model.set_submodule(path, nn.RMSNorm(WIDTH, EPS))
    return model


def gpt2(**kw: Any) -> nn.Module:
    shape = dict(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=24,
        vocab_size=64,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hf("GPT2", "LMHeadModel", **shape, layer_norm_epsilon=EPS, **kw)


def bert(**kw: Any) -> nn.Module:
    return hf("Bert", **TEXT, layer_norm_eps=EPS, **kw)


def ids() -> dict[str, Tensor]:
    return {"inputs": tokens()["input_ids"]}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def pictures() -> dict[str, Tensor]:
    return {"inputs": torch.randint(256, (2, 8, 8, 3), generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Family:
    """A tiny model, and where its parts are, for the enumeration."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    block: str = "model.layers.{}"
    final: str | None = "model.norm"
    stream: str = "input_layernorm"  # the norm whose input `AttentionLayer` reads
    post: tuple[str, str] | None = None  # norms after attention and after the MLP
    before_mlp: str | None = "post_attention_layernorm"
    mlp: str = "mlp"
    # of a block and the MLP's input: pre-activation, ratio
    hidden: Callable[[Any, Tensor], tuple[Tensor, Tensor]] | None = None


def gated(block: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    return block.mlp.up_proj(u), nn.functional.silu(block.mlp.gate_proj(u))


def plain(up: str, act: str) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    def hidden(block: Any, u: Tensor) -> tuple[Tensor, Tensor]:
        z = block.get_submodule(up)(u)
        return z, (block.get_submodule(act)(z) if act else nn.functional.gelu(z)) / z

    return hidden


FAMILIES = {
    "own-llama": Family(lambda: Transformer(Shape(**{**OWN, "kv_heads": 1})), ids, hidden=gated),
    "own-masked": Family(
        lambda: Transformer(Shape(**OWN, causal=False, mlp="gelu", positions="learned")),
        ids,
        hidden=plain("mlp.up_proj", ""),
    ),
    "own-image": Family(
        lambda: Transformer(Shape(**{**OWN, "length": 4}, causal=False, positions="learned", image=(8, 8, 3))),
        pictures,
        hidden=gated,
    ),
    "llama": Family(llama, tokens, hidden=gated),
    "gpt2": Family(
        gpt2, tokens, "transformer.h.{}", "transformer.ln_f", "ln_1", None, "ln_2", hidden=plain("mlp.c_fc", "mlp.act")
    ),
    "bert": Family(
        bert,
        tokens,
        "encoder.layer.{}",
        None,
        "",
        ("attention.output.LayerNorm", "output.LayerNorm"),
        None,
        "output.dense",
        plain("intermediate.dense", "intermediate.intermediate_act_fn"),
    ),
    "vit": Family(
        lambda: hf("ViT", **SIZES, layer_norm_eps=EPS, image_size=8, patch_size=4),
        pixels,
        "layers.{}",
        "layernorm",
        "layernorm_before",
        None,
        "layernorm_after",
        hidden=plain("mlp.fc1", "mlp.activation_fn"),
    ),
}


@cache
def model_of(name: str) -> nn.Module:
    model = FAMILIES[name].build().eval()
    model = model.double()
    redraw(model, 0.8)
    return model


@cache
def paths_of(name: str, mlp: Any = "source", final_norm: bool = True) -> Paths:
    return decompose(model_of(name), FAMILIES[name].batch(), mlp=mlp, final_norm=final_norm)


# --- the enumeration
# ----------------------------------------------------------------------------------------------------

Map = Callable[[Tensor], Tensor]
Source = tuple[str, int, int, Tensor]  # origin, step after which it joins, heads passed by then, what joins


@dataclass
class Reference:
    """Steps as plain closures: branches, and the norm that follows. Sources join after the branches and before that
    norm.
    """

    start: Tensor
    output: Tensor  # of the model
    branches: list[list[Map]] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    norms: list[Map] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)

    def walk(self, x: Tensor, path: Sequence[int | None], first: int) -> Tensor:
        for branches, norm, choice in zip(self.branches[first:], self.norms[first:], path, strict=True):
            x = norm(x if choice is None else branches[choice](x))
        return x

    def choices(self, first: int = 0) -> list[tuple[int | None, ...]]:
        return list(product(*([None, *range(len(branches))] for branches in self.branches[first:])))

    def length(self, path: Sequence[int | None], first: int = 0) -> int:
        return sum(choice is not None and counts for choice, counts in zip(path, self.counted[first:], strict=True))

    def by_length(self) -> dict[str, Tensor]:
        found = {
            origin: torch.zeros(LAYERS + 1, *self.start.shape, dtype=torch.float64)
            for origin in ("input", "constants", "mlp")
        }
        for path in self.choices():
            found["input"][self.length(path)] += self.walk(self.start, path, 0)
        for origin, step, passed, x in self.sources:
            x = self.norms[step](x) if step >= 0 else x
            for path in self.choices(step + 1):
                found[origin][passed + self.length(path, step + 1)] += self.walk(x, path, step + 1)
        return found


def captured(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of every module that was given a stream."""
    kept: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
            out = out[0] if isinstance(out, tuple) else out
            if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                kept[path] = (args[0], out)

        return keep

    handles = [module.register_forward_hook(hook(path)) for path, module in model.named_modules()]
    with torch.no_grad():
        model(**batch)
    for handle in handles:
        handle.remove()
    return kept


def frozen(module: Any, x: Tensor) -> tuple[Map, Tensor]:
    """The linear part of a norm at x as a matrix per token, and its shift."""
    d = x.shape[-1]
    layer = isinstance(module, nn.LayerNorm)
    centre = torch.eye(d, dtype=x.dtype) - (1 / d if layer else 0)
    moment = x.var(-1, unbiased=False) if layer else (x**2).mean(-1)
    matrix = torch.einsum("bt,de,e->btde", (moment + module.eps) ** -0.5, centre, module.weight)
    shift = module.bias if layer else torch.zeros(d, dtype=x.dtype)
    return lambda y: torch.einsum("btd,btde->bte", y, matrix), shift


def unchanged(x: Tensor) -> Tensor:
    return x


@torch.no_grad()
def reference(name: str, linear: bool = False) -> Reference:
    family, model = FAMILIES[name], model_of(name)
    batch = family.batch()
    seen = captured(model, batch)
    padding = batch["attention_mask"].bool() if "attention_mask" in batch else None
    blocks = [family.block.format(i) for i in range(LAYERS)]
    end = family.final or blocks[-1]
    made = Reference(seen[blocks[0]][0], seen[end][1])
    for layer, block in zip(attention_layers(model), blocks, strict=True):
        add_attention(made, family, model, seen, layer, block, padding)
        add_mlp(made, family, model, seen, block, linear)
    if family.final:
        add_norm(made, model.get_submodule(family.final), seen[family.final][0])
    return made


def add_attention(
    made: Reference, family: Family, model: Any, seen: Any, layer: Any, block: str, padding: Tensor | None
) -> None:
    if family.post:
        previous = f"encoder.layer.{layer.index - 1}.{family.post[1]}" if layer.index else "embeddings.LayerNorm"
        maps = layer.attention(seen[previous][0], padding=padding)
        before, shift = unchanged, torch.zeros(WIDTH, dtype=torch.float64)
    else:
        x = seen[f"{block}.{family.stream}"][0]
        maps = layer.attention(x, padding=padding)
        before, shift = frozen(model.get_submodule(f"{block}.{family.stream}"), x)
    V, out_map = layer.value.weight(), layer.out.weight()
    bias = torch.zeros(V.shape[0], dtype=V.dtype) if layer.value.bias is None else layer.value.bias
    size = out_map.shape[1] // HEADS
    branches = []
    step = len(made.branches)
    for head in range(HEADS):
        rows = slice(head // layer.group * size, (head // layer.group + 1) * size)
        out = out_map[:, head * size : (head + 1) * size].T
        branches.append(lambda y, A=maps[:, head], V=V[rows], out=out: A @ (before(y) @ V.T @ out))
        constant = (V[rows] @ shift + bias[rows]).expand(*made.start.shape[:2], -1)
        made.sources.append(("constants", step, 1, maps[:, head] @ (constant @ out)))
    if layer.out.bias is not None:
        made.sources.append(("constants", step, 0, layer.out.bias.expand_as(made.start)))
    close(made, family, model, seen, block, 0, branches, True)


def add_mlp(made: Reference, family: Family, model: Any, seen: Any, block: str, linear: bool) -> None:
    step = len(made.branches)
    if not linear:
        made.sources.append(("mlp", step, 0, seen[f"{block}.{family.mlp}"][1]))
        return close(made, family, model, seen, block, 1, [], False)
    part = model.get_submodule(block)
    if family.before_mlp:
        norm = model.get_submodule(f"{block}.{family.before_mlp}")
        stream = seen[f"{block}.{family.before_mlp}"][0]
        before, shift = frozen(norm, stream)
        u = norm(stream)
    else:
        before, shift, u = unchanged, torch.zeros(WIDTH, dtype=torch.float64), seen[f"{block}.intermediate"][0]
    assert family.hidden is not None
    _, ratio = family.hidden(part, u)
    down = model.get_submodule(f"{block}.{block_of(model).down}")
    nothing = torch.zeros_like(u)
    zero = family.hidden(part, nothing)[0]  # the bias

    def raised(y: Tensor) -> Tensor:
        pre = family.hidden(part, y)[0] - zero  # type: ignore[misc]
        return down(pre * ratio) - down(torch.zeros_like(ratio))

    made.sources.append(("constants", step, 0, raised(shift.expand_as(u)) + down(zero * ratio)))
    return close(made, family, model, seen, block, 1, [lambda y: raised(before(y))], False)


def close(
    made: Reference, family: Family, model: Any, seen: Any, block: str, which: int, branches: list[Map], counts: bool
) -> None:
    """A step ends: in a post-norm block with its norm."""
    made.branches.append(branches)
    made.counted.append(counts)
    if not family.post:
        made.norms.append(unchanged)
        return
    path = f"{block}.{family.post[which]}"
    norm, shift = frozen(model.get_submodule(path), seen[path][0])
    made.norms.append(norm)
    made.branches.append([])  # a step of its own, so that the shift joins after the norm
    made.counted.append(False)
    made.norms.append(unchanged)
    made.sources.append(("constants", len(made.branches) - 1, 0, shift.expand_as(made.start)))


def add_norm(made: Reference, module: Any, x: Tensor) -> None:
    norm, shift = frozen(module, x)
    made.branches += [[], []]
    made.counted += [False, False]
    made.norms += [norm, unchanged]
    made.sources.append(("constants", len(made.branches) - 1, 0, shift.expand_as(made.start)))


def close_to(got: Tensor, want: Tensor, rtol: float = 1e-10) -> None:
    assert (got - want).abs().max() <= rtol * want.abs().max().clamp_min(1)


def chosen(made: Reference, path: Sequence[int | None]) -> tuple[int | None, ...]:
    """A path of `Paths`, for the enumeration: it has steps without a choice too."""
    left = iter(path)
    return tuple(next(left) if branches else None for branches in made.branches)


# --- tests
# --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear", [False, True], ids=["source", "linear"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_length_is_the_enumeration(name: str, linear: bool) -> None:
    made = reference(name, linear)
    found = paths_of(name, "linear" if linear else "source").by_length()
    for origin, want in made.by_length().items():
        got = getattr(found, origin)
        assert got.shape == (LAYERS + 1, *made.start.shape)
        close_to(got, want)
    close_to(found.total.sum(0), made.output)
    assert bool((found.mlp == 0).all()) == linear
    assert all(found.input[k].abs().max() > 1e-3 for k in range(LAYERS + 1))


@pytest.mark.parametrize("linear", [False, True], ids=["source", "linear"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_is_the_enumeration(name: str, linear: bool) -> None:
    made, paths = reference(name, linear), paths_of(name, "linear" if linear else "source")
    listed = list(product(*([None, *range(step.branches.count)] for step in paths.steps if step.branches is not None)))
    assert len(listed) == len(made.choices())
    listed = listed[:: max(1, len(listed) // 27)]
    got = paths.contributions(listed)
    for path, field_ in zip(listed, got, strict=True):
        close_to(field_, made.walk(made.start, chosen(made, path), 0))
    close_to(paths.contribution(listed[-1]), got[-1])
    close_to(paths.sum_of([*listed, listed[0]]), got.sum(0) + got[0])


@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("mlp", ["source", "linear"])
@pytest.mark.parametrize("name", FAMILIES)
def test_lengths_sum_to_the_models_output(name: str, mlp: Any, final_norm: bool) -> None:
    family, paths = FAMILIES[name], paths_of(name, mlp, final_norm)
    seen = captured(model_of(name), family.batch())
    last = family.block.format(LAYERS - 1)
    want = seen[family.final or last][1] if final_norm else seen[last][1]
    assert torch.equal(paths.output, want)
    close_to(paths.by_length().total.sum(0), want)
    assert paths.gap < 1e-10


@pytest.mark.parametrize("name", ["own-llama", "gpt2", "bert"])
@pytest.mark.parametrize("linear", [False, True], ids=["source", "linear"])
def test_what_passes_a_head_is_all_paths_through_it(name: str, linear: bool) -> None:
    made, paths = reference(name, linear), paths_of(name, "linear" if linear else "source")
    attention = [step for step, counts in enumerate(made.counted) if counts]
    parts = paths.through_heads()
    y = made.output[paths.real]
    for (layer, step), head in product(enumerate(attention), range(HEADS)):
        want = through_head(made, step, head)
        close_to(paths.through(layer, head), want)
        torch.testing.assert_close(parts.norm[layer, head], want[paths.real].norm() / y.norm())
        torch.testing.assert_close(parts.projection[layer, head], (want[paths.real] * y).sum() / (y * y).sum())
    ranked = parts.ranked()
    assert len(ranked) == LAYERS * HEADS
    assert abs(ranked[0][2]) == pytest.approx(float(parts.projection.abs().max()))
    assert parts.ranked("norm")[0][2] == pytest.approx(float(parts.norm.max()))
    only = torch.zeros_like(paths.real)
    only[0, -1] = True
    last = paths.through(1, 1)[0, -1]
    torch.testing.assert_close(paths.through_heads(only).norm[1, 1], last.norm() / made.output[0, -1].norm())


def through_head(made: Reference, step: int, head: int) -> Tensor:
    """Every path that passes it, from every origin, one by one."""
    total = torch.zeros_like(made.start)
    for path in made.choices():
        if path[step] == head:
            total += made.walk(made.start, path, 0)
    heads_before = 0
    for origin, joins, passed, x in made.sources:
        inside = origin == "constants" and passed == 1 and joins == step
        if inside:
            own, heads_before = heads_before == head, heads_before + 1
        if joins > step or (joins == step and not (inside and own)):
            continue
        x = made.norms[joins](x)
        for path in made.choices(joins + 1):
            if inside or path[step - joins - 1] == head:
                total += made.walk(x, path, joins + 1)
    return total


@pytest.mark.parametrize("mlp", ["source", "linear"])
def test_samples_are_reproducible_and_of_the_asked_length(mlp: Any) -> None:
    paths = paths_of("gpt2", mlp)
    for length in range(LAYERS + 1):
        drawn = paths.sample(length, 50, seed=3)
        assert drawn == paths.sample(length, 50, seed=3)
        assert all(
            sum(c is not None and s.longer for c, s in zip(p, paths.steps, strict=True)) == length for p in drawn
        )
    assert paths.sample(2, 50, seed=3) != paths.sample(2, 50, seed=4)
    close_to(paths.sampled_sum(2, 70, seed=5), paths.contributions(paths.sample(2, 70, seed=5)).sum(0))
    assert sum(paths.count(k) for k in range(LAYERS + 1)) == (1 + HEADS) ** LAYERS * (
        2**LAYERS if mlp == "linear" else 1
    )


@pytest.mark.parametrize("mlp", ["source", "linear"])
@pytest.mark.parametrize("length", range(LAYERS + 1))
def test_samples_are_unbiased(mlp: Any, length: int) -> None:
    paths, n = paths_of("own-llama", mlp), 3000
    count = paths.count(length)
    listed = paths.sample(length, n, seed=length)
    assert len(set(listed)) == count  # few enough that each is drawn
    each = torch.cat([paths.contributions(listed[at : at + 500]) for at in range(0, n, 500)])
    want = paths.by_length().input[length]
    error = count * each.std(0) / n**0.5
    off = (count * each.mean(0) - want) / error.clamp_min(1e-9)
    assert off.square().mean() < 2  # in standard errors; the entries are far from independent
    assert off.abs().max() < 5


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_maps_are_those_of_the_eager_model(name: str) -> None:
    model = {"gpt2": gpt2, "bert": bert}[name](attn_implementation="eager").eval()
    redraw(model, 0.8)
    batch = tokens()
    with torch.no_grad():
        want = model(**batch, output_attentions=True).attentions
    paths = decompose(model, batch)
    for step, maps in zip(paths.steps, want, strict=True):
        assert isinstance(step.branches, HeadBranch)
        got = step.branches.maps.transpose(1, 2)[paths.real]
        assert (got - maps.transpose(1, 2)[paths.real]).abs().max() < 1e-5
    assert paths.gap < 1e-5


@pytest.mark.parametrize(
    ("name", "kw"),
    [
        ("Llama", dict(TEXT, num_key_value_heads=1)),
        ("Mistral", dict(TEXT, num_key_value_heads=1, sliding_window=4)),
        ("Qwen2", dict(TEXT, num_key_value_heads=1)),
        ("Qwen3", dict(TEXT, num_key_value_heads=1, head_dim=8)),
        ("Roberta", TEXT),
        ("XLMRoberta", TEXT),
        ("Camembert", TEXT),
        ("Electra", dict(TEXT, embedding_size=8)),
        ("Bert", dict(TEXT, is_decoder=True)),
    ],
)
@pytest.mark.parametrize("mlp", ["source", "linear"])
def test_relatives(name: str, kw: dict[str, Any], mlp: Any) -> None:
    model = hf(name, **kw).eval()
    redraw(model, 0.8)
    paths = decompose(model, tokens(), mlp=mlp)
    assert paths.gap < 1e-5
    off = (paths.by_length().total.sum(0) - paths.output)[paths.real].abs().max()
    assert off < 1e-5 * paths.output.abs().max()


def test_grouped_values() -> None:
    """Four heads on two sets of values: a head that reads the wrong one does not add up."""
    model = Transformer(Shape(**{**OWN, "heads": 4, "kv_heads": 2, "layers": 2})).double()
    redraw(model, 0.8)
    paths = decompose(model, ids())
    assert paths.gap < 1e-12
    listed = list(product([None, 0, 1, 2, 3], repeat=2))
    for length, want in enumerate(paths.by_length().input):
        close_to(paths.sum_of([path for path in listed if 2 - path.count(None) == length]), want)


@pytest.mark.parametrize("label", LABELS)
def test_paths_of_every_family_sum_to_its_output(label: str) -> None:
    model, batch = built(label)
    ways: list[Any] = ["source", "linear"]
    for mlp in ways:
        with AllFloat64():
            paths = decompose(model, batch, mlp=mlp)
        assert paths.gap < 1e-10
        off = (paths.by_length().total.sum(0) - paths.output)[paths.real]
        assert off.abs().max() < 1e-10 * paths.output[paths.real].abs().max()


@pytest.mark.parametrize("label", ["phi", "gpt_neox", "dinov2", "locater-sandwich-alone"])
def test_every_path_and_every_length_by_listing_them(label: str) -> None:
    """Parallel blocks, and branches with a norm or a scale behind them."""
    paths = decompose(*built(label), mlp="linear")
    heads, steps = paths.heads, paths.steps
    listed = list(product(*([None, *range(step.choices)] for step in steps)))
    lengths = [sum(bool(s.longer) and c in range(heads) for s, c in zip(steps, p, strict=True)) for p in listed]
    for length, want in enumerate(paths.by_length().input):
        these = [path for path, passed in zip(listed, lengths, strict=True) if passed == length]
        assert len(these) == paths.count(length)
        assert set(paths.sample(length, 40)) <= set(these)
        close_to(paths.sum_of(these), want)
    for layer, head in product(range(paths.layers), range(heads)):
        close_to(paths.output - without(paths, layer, head), paths.through(layer, head))


def without(paths: Paths, layer: int, head: int) -> Tensor:
    """The output of a frozen model whose head gives nothing: all that passed it is gone."""
    frozen = list(paths.frozen)
    at = [i for i, step in enumerate(frozen) if step.longer][layer]
    branches: Any = frozen[at].branches
    out = branches.out.clone()
    out[head] = 0
    frozen[at] = replace(frozen[at], branches=replace(branches, out=out))
    return replace(paths, frozen=frozen).by_length().total.sum(0)


@pytest.mark.parametrize("label", REFUSED)
def test_models_that_are_no_single_linear_stack_are_refused(label: str) -> None:
    with pytest.raises(LocaterError, match=re.escape(REFUSED[label])):
        decompose(*built(label))


def test_every_family_with_a_block_is_tested() -> None:
    others = "gpt2 bert vit roberta xlm-roberta camembert locater-masked".split()  # above
    labels = [*LABELS, *REFUSED, *others]
    with_blocks = {model_type for model_type, family in BY_TYPE.items() if family.block is not None}
    assert {config_of(BY_LABEL[label].build())["model_type"] for label in labels} == with_blocks


@pytest.mark.parametrize("label", ["whisper", "bart", "umt5"])
def test_an_encoder_alone_is_one_stack(label: str) -> None:
    model, batch = built(label)
    name = "input_features" if label == "whisper" else "input_ids"
    paths = decompose(model.encoder, {name: batch[name]}, mlp="linear")  # type: ignore[arg-type]
    assert paths.gap < (1e-6 if label == "umt5" else 1e-10)


def test_half_precision_runs_and_is_carried_in_float32() -> None:
    model = Transformer(Shape(**OWN)).bfloat16()
    paths = decompose(model, ids())
    assert paths.output.dtype == torch.float32
    assert paths.gap < 0.02


def test_a_block_without_an_mlp_has_no_such_step() -> None:
    """As in the paper: attention, skip and norm. Then the input and the constants are all there is."""
    model = bert().double().eval()
    redraw(model, 0.8)
    for block in model.encoder.layer:
        block.feed_forward_chunk = unchanged
    paths = decompose(model, tokens(), mlp="linear")
    found = paths.by_length()
    assert len(paths.frozen) == LAYERS
    assert bool((found.mlp == 0).all())
    assert paths.gap < 1e-12
    close_to((found.input + found.constants).sum(0), paths.output)


def test_the_model_is_left_as_it_was() -> None:
    model = gpt2()
    model.train()
    before = {path: set(module.__dict__) for path, module in model.named_modules()}
    decompose(model, tokens())
    assert model.training
    assert {path: set(module.__dict__) for path, module in model.named_modules()} == before


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: decompose(nn.Linear(2, 2), torch.zeros(1, 2)),
            "Linear: a model without a model_type is not split into linear steps: describe its blocks with locater.register",
        ),
        (
            lambda: decompose(BY_LABEL["bloom-slow"].build(), tokens()),
            "BloomForCausalLM: model_type 'bloom' is not split into linear steps: slow_but_exact",
        ),
        (lambda: decompose(gpt2(), tokens(), mlp="none"), "mlp='none' is not known: use 'source' or 'linear'"),  # type: ignore[arg-type]
        (lambda: decompose(gpt2(), {"inputs": torch.zeros(1, 2)}), "GPT2LMHeadModel: does not run on these inputs"),
        (lambda: decompose(strange(), tokens()), "its paths sum to its output only within"),
        (lambda: decompose(unheard(), tokens()), "called 3 times in one run"),
        (lambda: decompose(crossed(), tokens()), "crossattention.self: paths go through one stack"),
        (
            lambda: decompose(odd_mlp(), ids(), mlp="linear"),
            r"layers.0: no mlp.up_proj and mlp.down_proj.* use mlp='source'",
        ),
        (lambda: paths_of("gpt2").contribution((0, 1)), r"path \[0, 1\]: GPT2LMHeadModel has 3 steps"),
        (
            lambda: paths_of("gpt2").contribution((0, None, 2)),
            r"h.2.attn has 2 branches, numbered from 0; None is the skip",
        ),
        (lambda: paths_of("gpt2").sample(4, 1), "length 4: paths of GPT2LMHeadModel have lengths 0 to 3"),
        (lambda: paths_of("gpt2").sample(1, 0), "n=0: sample at least one path"),
        (lambda: paths_of("gpt2").count(-1), "length -1"),
        (lambda: paths_of("gpt2").through(3, 0), "layer 3, head 0: there are 3 layers of 2 heads"),
        (lambda: paths_of("gpt2").through_heads().ranked("size"), "by='size' is not known"),  # type: ignore[arg-type]
    ],
)
def test_errors_are_one_line_that_names_the_culprit(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(LocaterError) as caught:
        act()
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)


def strange() -> nn.Module:
    """A GPT-2 with a part that GPT-2 does not have."""
    model = gpt2()
    for block in model.transformer.h[1:]:
        block.register_forward_hook(lambda module, args, out: 2 * out)
    return model


def unheard() -> nn.Module:
    """A BERT whose MLPs take a few tokens at a time."""
    return bert(chunk_size_feed_forward=3)


def crossed() -> nn.Module:
    return bert(is_decoder=True, add_cross_attention=True)


def odd_mlp() -> nn.Module:
    model = Transformer(Shape(**OWN))
    for block in model.model.layers:
        block.mlp = nn.Linear(WIDTH, WIDTH)  # type: ignore[assignment]
    return model


def test_an_unknown_mlp_is_a_source() -> None:
    assert decompose(odd_mlp(), ids()).gap < 1e-5


def test_the_example_of_the_page_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "explain.md").read_text().partition("## Example\n")[2]
    code, _, rest = text.partition("\nIt prints\n")
    exec(compile(dedent(code), "docs/explain.md", "exec"), {})
    assert capsys.readouterr().out == dedent(re.match(r"(?:\n|    .*\n)+", rest)[0]).strip() + "\n"  # type: ignore[index]
