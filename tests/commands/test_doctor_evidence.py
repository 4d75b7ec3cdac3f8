"""`doctor` names a cause where its evidence tells it from its rivals, finds changes of every tensor, and calls nothing broken
that computes the same. All of the demo, beside itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from locater import doctor
from locater.commands.doctor.other_places import same_numbers
from locater.commands.doctor.pairs import Pair
from locater.commands.doctor.rewritten import Rewrite, RewrittenWeights
from locater.commands.doctor.tensors import Facts
from locater.commands.doctor.undoing import matched_rows
from locater.sources.weights import DictWeights
from tests.commands.planted import (
    DEMO,
    HEADS,
    KEY_HEADS,
    LAYERS,
    MIDDLE,
    SIZE,
    Config,
    Tensors,
    demo,
    low_rank,
    name,
    quantised,
    save,
    save_adapter,
)
from tests.commands.test_doctor import found

EMBED, LAST, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
WRITES = ("o_proj.weight", "down_proj.weight")
READS = {"input_layernorm": ("q", "k", "v"), "post_attention_layernorm": ("gate", "up")}
Plant = Callable[[Tensors, Config], None]


def at(part: str, layer: int = MIDDLE) -> str:
    """`gate` and `norm2` beside the parts that other tests know."""
    more = {"gate": "mlp.gate_proj", "norm2": "post_attention_layernorm"}
    return f"model.layers.{layer}.{more[part]}.weight" if part in more else name(part, layer)


def put(t: Tensors, key: str, numbers: Tensor) -> None:
    t[key] = numbers.to(t[key].dtype).contiguous()


# ---- harmless: each computes the same ----


def neurons_permuted(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        order = torch.randperm(len(t[at("up", layer)]))
        for part in ("gate", "up"):
            t[at(part, layer)] = t[at(part, layer)][order]
        t[at("down", layer)] = t[at("down", layer)][:, order]


def neurons_scaled(t: Tensors, c: Config) -> None:
    factors = torch.linspace(0.5, 8, len(t[at("up")])).log2().round().exp2()
    put(t, at("up"), t[at("up")] * factors[:, None])
    put(t, at("down"), t[at("down")] / factors)


def channels_permuted(t: Tensors, c: Config) -> None:
    order = torch.randperm(c["hidden_size"])
    for key, tensor in t.items():
        t[key] = tensor[order] if tensor.ndim == 1 or key.endswith(WRITES) else tensor[:, order]


def signs_of_channels(t: Tensors, c: Config) -> None:
    signs = (torch.rand(c["hidden_size"]) > 0.5) * 2.0 - 1
    for key, tensor in t.items():
        if tensor.ndim == 2:
            put(t, key, tensor * signs[:, None] if key.endswith(WRITES) else tensor * signs)


def gains_folded(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        for norm, parts in READS.items():
            gain = t[f"model.layers.{layer}.{norm}.weight"]
            for part in parts:
                put(t, at(part, layer), t[at(part, layer)].float() * gain.float())
            t[f"model.layers.{layer}.{norm}.weight"] = torch.ones_like(gain)


def last_gain_folded(t: Tensors, c: Config) -> None:
    t[HEAD] = (t[EMBED].float() * t[LAST].float()).bfloat16()
    t[LAST] = torch.ones_like(t[LAST])
    c["tie_word_embeddings"] = False


def stream_turned(t: Tensors, c: Config) -> None:
    for key in t:
        t[key] = t[key].float()
    gains_folded(t, c)
    t[HEAD] = t[EMBED] * t[LAST]
    t[LAST] = torch.ones_like(t[LAST])
    c["tie_word_embeddings"] = False
    turn = torch.linalg.qr(torch.randn(c["hidden_size"], c["hidden_size"]))[0]
    for key, tensor in t.items():
        if tensor.ndim == 2:
            t[key] = turn.mT @ tensor if key.endswith(WRITES) else tensor @ turn


def difficulty_moved_into_maps(t: Tensors, c: Config) -> None:
    """Gains over some factors, the maps behind them times these, as before a quantisation of activations."""
    gain = t[name("norm")]
    factors = (torch.rand(len(gain)) + 0.5).log2().round().exp2()
    put(t, name("norm"), gain / factors)
    for part in ("q", "k", "v"):
        put(t, name(part), t[name(part)] * factors)


def heads_of_keys_repeated(t: Tensors, c: Config, in_place: bool = True) -> None:
    for layer in range(LAYERS):
        for part in ("k", "v"):
            w, times = t[name(part, layer)].unflatten(0, (KEY_HEADS, SIZE)), HEADS // KEY_HEADS
            many = w.repeat_interleave(times, 0) if in_place else w.repeat(times, 1, 1)
            t[name(part, layer)] = many.flatten(0, 1)
    c["num_key_value_heads"] = HEADS


def biases_of_zero(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        for part in "qkvo":
            t[name(part, layer).replace("weight", "bias")] = torch.zeros(len(t[name(part, layer)]))
    c["attention_bias"] = True


def neurons_permuted_and_trained(t: Tensors, c: Config) -> None:
    neurons_permuted(t, c)
    for key in [key for key in t if t[key].ndim == 2]:
        w = t[key].float()
        put(t, key, w + 0.01 * w.std() * torch.randn(w.shape))


SAME: dict[str, tuple[Plant, set[str]]] = {
    f.__name__: (f, {"equivalent"})
    for f in (
        *(neurons_permuted, neurons_scaled, channels_permuted, signs_of_channels, gains_folded, last_gain_folded),
        *(stream_turned, difficulty_moved_into_maps, heads_of_keys_repeated),
    )
}
SAME["biases_of_zero"] = (biases_of_zero, {"unknown"})
SAME["neurons_permuted_and_trained"] = (neurons_permuted_and_trained, {"equivalent", "fine-tune"})


@pytest.mark.parametrize("label", SAME)
def test_what_computes_the_same_is_no_fault(label: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    change, causes = SAME[label]
    tensors, config = demo()
    change(tensors, config)
    folder = save(tensors, config, tmp_path)
    beside = doctor(folder, DEMO)
    assert {*beside.causes} == causes, found(beside)
    assert not beside.broken
    assert beside.changed == ("fine-tune" in causes)
    assert not doctor(folder).broken


def test_a_fault_in_a_rewritten_model_is_found(tmp_path: Path) -> None:
    """What was rewritten is undone, and does not hide what else was done."""
    torch.manual_seed(0)
    tensors, config = demo()
    neurons_permuted(tensors, config)
    channels_permuted(tensors, config)
    tensors[name("q")][:SIZE] *= 50
    beside = doctor(save(tensors, config, tmp_path), DEMO)
    assert {x.cause for x in beside.findings if x.severity == "fault"} == {"scaled-head"}, found(beside)
    (fault,) = (x for x in beside.findings if x.severity == "fault")
    assert fault.evidence["heads"] == [(MIDDLE, 0)]


# ---- harmful: named, or said to be of no known cause, and never named wrongly ----


def gate_and_up_exchanged(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[at("gate", layer)], t[at("up", layer)] = t[at("up", layer)], t[at("gate", layer)]


def gate_and_up_interleaved(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        both = torch.cat([t[at("gate", layer)], t[at("up", layer)]])
        t[at("gate", layer)], t[at("up", layer)] = both[::2].clone(), both[1::2].clone()


def norms_of_blocks_exchanged(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[at("norm", layer)], t[at("norm2", layer)] = t[at("norm2", layer)], t[at("norm", layer)]


def norms_of_layers_exchanged(t: Tensors, c: Config) -> None:
    t[name("norm", 1)], t[name("norm", 4)] = t[name("norm", 4)], t[name("norm", 1)]


def layers_in_another_order(t: Tensors, c: Config) -> None:
    old, order = dict(t), [0, 3, 1, 4, 2, 5]
    for layer, source in enumerate(order):
        for key in [key for key in t if key.startswith(f"model.layers.{layer}.")]:
            t[key] = old[key.replace(f"layers.{layer}.", f"layers.{source}.")].clone()


def gains_halved(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "layernorm" in key]:
        put(t, key, t[key] / 2)


def last_gain_lost(t: Tensors, c: Config) -> None:
    t[LAST] = torch.ones_like(t[LAST])


def one_gain_of_a_channel(t: Tensors, c: Config) -> None:
    t[name("norm")][7] = 40.0


def one_number_clamped(t: Tensors, c: Config) -> None:
    t[name("up")][3, 5] = 65504.0


def one_number_far_too_large(t: Tensors, c: Config) -> None:
    t[name("up")][3, 5] = 30000.0


def numbers_of_a_place_replaced(t: Tensors, c: Config) -> None:
    t[name("up")][40:48, 16:80] = torch.randn(8, 64).bfloat16() * t[name("up")].float().std()


def bits_read_as_another_type(t: Tensors, c: Config) -> None:
    t[name("up")] = t[name("up")].half().view(torch.bfloat16)


def read_a_place_too_early(t: Tensors, c: Config) -> None:
    for part in ("q", "k", "v", "o", "gate", "up", "down"):
        t[at(part)] = t[at(part)].flatten().roll(1).view(t[at(part)].shape)


def rows_moved(t: Tensors, c: Config) -> None:
    t[name("up")] = t[name("up")].roll(100, 0)


def reshaped_in_place_of_turned(t: Tensors, c: Config) -> None:
    t[name("down")] = t[name("down")].mT.contiguous().view(t[name("down")].shape)


def mlp_drawn(t: Tensors, c: Config) -> None:
    for part in ("gate", "up", "down"):
        put(t, at(part), 0.02 * torch.randn(t[at(part)].shape))


def average_with_another(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        w = t[key].float()
        put(t, key, (w + w.std() * torch.randn(w.shape)) / 2)


def average_of_two_layers(t: Tensors, c: Config) -> None:
    for key in [key for key in t if f"layers.{MIDDLE}." in key]:
        put(t, key, (t[key].float() + t[key.replace(f".{MIDDLE}.", ".4.")].float()) / 2)


def noise(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        w = t[key].float()
        put(t, key, w + 0.2 * w.std() * torch.randn(w.shape))


def clipped(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        w = t[key].float()
        put(t, key, w.clamp(-1.5 * w.std(), 1.5 * w.std()))


def half_of_the_numbers_zero(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        w = t[key].float()
        put(t, key, w * (w.abs() > w.abs().median()))


def mantissas_cut(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        whole = t[key].float()
        put(t, key, (whole.view(torch.int32) & ~((1 << 21) - 1)).view(torch.float32))


def small_numbers_lost(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        put(t, key, (t[key].float() / 16).to(torch.float8_e4m3fn).float() * 16)


def two_bits_everywhere(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        put(t, key, quantised(t[key].float(), 2))


def token_inserted(t: Tensors, c: Config) -> None:
    rows = t[EMBED]
    t[EMBED] = torch.cat([rows[:3], rows[5:6], rows[3:-1]])


def embedding_of_other_channels(t: Tensors, c: Config) -> None:
    t[EMBED] = t[EMBED][:, torch.randperm(c["hidden_size"])]


def half_of_the_tokens_zero(t: Tensors, c: Config) -> None:
    t[EMBED][512:] = 0


def keys_repeated_in_turn(t: Tensors, c: Config) -> None:
    heads_of_keys_repeated(t, c, in_place=False)


def another_epsilon(t: Tensors, c: Config) -> None:
    c["rms_norm_eps"] = 0.1


def another_activation(t: Tensors, c: Config) -> None:
    c["hidden_act"] = "gelu"


def second_half_twice(t: Tensors, c: Config) -> None:
    """The first half of the layers is overwritten by the second, which stays where it is."""
    for key in [key for key in t if ".layers." in key]:
        layer = int(key.split(".")[2])
        if layer < LAYERS // 2:
            t[key] = t[key.replace(f".{layer}.", f".{layer + LAYERS // 2}.", 1)].clone()


def names_of_a_compiled_model(t: Tensors, c: Config) -> None:
    renamed = {f"_orig_mod.{key}": value for key, value in t.items()}
    t.clear()
    t.update(renamed)


def everything_scaled(t: Tensors, c: Config) -> None:
    for key in t:
        t[key] = t[key] * 0.5


def four_bits_read_in_another_order(t: Tensors, c: Config) -> None:
    for key in [key for key in t if "_proj" in key]:
        whole = quantised(t[key].float(), 4)
        put(t, key, whole.view(-1, 8)[:, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(whole.shape))


def trained_too_fast(t: Tensors, c: Config) -> None:
    """Five first steps of Adam, which move each number by about as much, up or down: as even as errors of rounding."""
    for key in [key for key in t if "_proj" in key]:
        steps = torch.randint(-5, 6, t[key].shape).float() * 0.01
        put(t, key, t[key].float() + steps)


WRONG: dict[str, tuple[Plant, str]] = {
    f.__name__: (f, cause)
    for cause, fs in {
        "fused-order": (gate_and_up_exchanged, gate_and_up_interleaved),
        "swapped-layers": (norms_of_layers_exchanged, layers_in_another_order),
        "constant": (last_gain_lost,),
        "overflow": (one_number_clamped,),
        "random-bits": (bits_read_as_another_type,),
        "transposed": (reshaped_in_place_of_turned,),
        "another-model": (mlp_drawn, average_with_another, token_inserted, embedding_of_other_channels),
        "duplicated-layer": (second_half_twice,),
        "missing-layer": (names_of_a_compiled_model,),
        "low-bits": (mantissas_cut, small_numbers_lost, two_bits_everywhere),
        "zero": (half_of_the_tokens_zero,),
        "permuted-heads": (keys_repeated_in_turn,),
        "config": (another_epsilon, another_activation),
        "unknown": (
            *(norms_of_blocks_exchanged, gains_halved, one_gain_of_a_channel, one_number_far_too_large, rows_moved),
            *(numbers_of_a_place_replaced, read_a_place_too_early, average_of_two_layers, noise, clipped),
            *(half_of_the_numbers_zero, trained_too_fast, everything_scaled, four_bits_read_in_another_order),
        ),
    }.items()
    for f in fs
}
ALONE = {  # what the file alone says too
    "last_gain_lost": "constant",
    "one_number_clamped": "overflow",
    "one_number_far_too_large": "unknown",
    "bits_read_as_another_type": "random-bits",
}


@pytest.mark.parametrize("label", WRONG)
def test_a_cause_is_named_where_its_evidence_tells_it(label: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    change, cause = WRONG[label]
    tensors, config = demo()
    change(tensors, config)
    folder = save(tensors, config, tmp_path)
    beside = doctor(folder, DEMO)
    assert {x.cause for x in beside.findings if x.severity == "fault"} == {cause}, found(beside)
    if label in ALONE:
        assert ALONE[label] in doctor(folder).causes


def test_another_formula_of_one_activation_is_no_fault(tmp_path: Path) -> None:
    tensors, config = demo()
    base = save(tensors, {**config, "hidden_act": "gelu"}, tmp_path / "base")
    other = save(tensors, {**config, "hidden_act": "gelu_pytorch_tanh"}, tmp_path / "other")
    beside = doctor(other, base)
    assert [(x.cause, x.severity) for x in beside.findings if x.severity != "note"] == [("config", "change")], found(
        beside
    )


# ---- merging ----


def added(t: Tensors, where: Callable[[str], str], turned: bool = False) -> None:
    for key, (b, a) in low_rank().items():
        delta = (b @ a).mT if turned and b.shape[0] == a.shape[1] else b @ a
        put(t, where(key), t[where(key)].float() + delta)


def test_an_adapter_in_the_wrong_layer_is_not_called_missing(tmp_path: Path) -> None:
    tensors, config = demo()

    def next_layer(key: str) -> str:
        layer = int(key.split(".")[2])
        return key.replace(f"layers.{layer}.", f"layers.{(layer + 1) % LAYERS}.")

    added(tensors, next_layer)
    adapter = save_adapter(low_rank(), tmp_path / "adapter")
    result = doctor(save(tensors, config, tmp_path / "model"), DEMO, str(adapter))
    assert result.broken
    assert result.causes == ["unknown"], found(result)
    assert "adds to other maps" in result.findings[0].words


def test_an_adapter_that_was_turned_is_transposed(tmp_path: Path) -> None:
    tensors, config = demo()
    added(tensors, lambda key: key, turned=True)
    adapter = save_adapter(low_rank(), tmp_path / "adapter")
    result = doctor(save(tensors, config, tmp_path / "model"), DEMO, str(adapter))
    assert {x.cause for x in result.findings if x.severity == "fault"} == {"transposed"}, found(result)


# ---- biases that change nothing, in BERT ----


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors, Config]:
    import json

    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=200, **small))
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.data.normal_(0, 0.1)
        elif "LayerNorm" in key:
            parameter.data.normal_(1, 0.1)
    folder = tmp_path_factory.mktemp("bert")
    model.save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def block(layer: int, part: str) -> str:
    return f"encoder.layer.{layer}.attention.{part}"


def keys_without_biases(t: Tensors) -> None:
    for layer in range(3):
        t[block(layer, "self.key.bias")].zero_()


def biases_of_values_in_outputs(t: Tensors) -> None:
    for layer in range(3):
        values = block(layer, "self.value.bias")
        t[block(layer, "output.dense.bias")] += t[block(layer, "output.dense.weight")] @ t[values]
        t[values].zero_()


def queries_without_biases(t: Tensors) -> None:
    for layer in range(3):
        t[block(layer, "self.query.bias")].zero_()


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (keys_without_biases, "equivalent"),
        (biases_of_values_in_outputs, "equivalent"),
        (queries_without_biases, "lost-biases"),
    ],
)
def test_biases(
    change: Callable[[Tensors], None], cause: str, bert: tuple[Path, Tensors, Config], tmp_path: Path
) -> None:
    """A bias of keys adds the same to all logits of a query; one of values adds the same to all outputs."""
    folder, tensors, config = bert
    tensors = copy.deepcopy(tensors)
    change(tensors)
    result = doctor(save(tensors, config, tmp_path), folder)
    assert result.causes == [cause], found(result)
    assert result.broken == (cause == "lost-biases")


# ---- parts ----


def test_rewritten_weights_are_the_rewritten_tensor() -> None:
    torch.manual_seed(0)
    stored = {"w": torch.randn(6, 4), "g": torch.randn(4)}
    rows, columns, factors, turn = torch.randperm(6), torch.randperm(4), torch.rand(4), torch.randn(6, 6)
    plain = DictWeights(dict(stored), "here")
    first = RewrittenWeights(plain, {"w": Rewrite(rows=rows, columns=columns, column_factors=factors)})
    second = RewrittenWeights(first, {"w": Rewrite(row_turn=turn, row_factors=torch.arange(1.0, 7.0))})
    once = stored["w"][rows][:, columns].double() * factors
    torch.testing.assert_close(first.read("w"), once)
    torch.testing.assert_close(first.read("w", [(1, 3), (4, 5)]), once[[1, 2, 4]])
    twice = torch.arange(1.0, 7.0, dtype=torch.float64)[:, None] * (turn.double() @ once)
    torch.testing.assert_close(second.read("w"), twice)
    torch.testing.assert_close(second.read("w", [(2, 5)]), twice[2:5])
    assert torch.equal(second.read("g"), stored["g"])
    assert (second.stored_dtype("w"), second.stored_dtype("g")) == ("float32", "")


def test_rows_have_partners_only_where_nearly_all_have_one() -> None:
    torch.manual_seed(0)
    base, order = torch.randn(50, 8), torch.randperm(50)
    partner = matched_rows(3 * base[order], base)
    assert partner is not None
    assert torch.equal(order[partner], torch.arange(50))
    assert matched_rows(torch.randn(50, 8), base) is None


def test_the_same_numbers_are_known_in_any_order() -> None:
    facts = Facts("w", (2, 2), "float32", 4, least=-1.0, most=2.0, mean=0.5, rms=1.0)
    other = copy.replace(facts, mean=0.2) if hasattr(copy, "replace") else Facts(**{**vars(facts), "mean": 0.2})
    assert same_numbers(Pair("w", "w", facts=facts, base_facts=Facts(**vars(facts))))
    assert not same_numbers(Pair("w", "w", facts=facts, base_facts=other))
