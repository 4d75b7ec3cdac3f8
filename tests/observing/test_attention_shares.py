"""Shares of attention by group of tokens, and beyond a window: the same as from eager maps, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.errors import LocaterError
from locater.inputs.token_groups import GROUPS, TokenGroups, token_groups
from tests.parity import redraw

EXACT = 1e-9
IMAGE = 60


def text_shape(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**sizes, "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, **more}


def vision_shape(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {**sizes, "image_size": 28, "patch_size": 14, **more}


def llama(**more: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**text_shape(**more)))


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision, text = CLIPVisionConfig(**vision_shape()), LlamaConfig(**text_shape())
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE)
    return LlavaForConditionalGeneration(config)


def paligemma() -> nn.Module:
    from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

    text = GemmaConfig(**text_shape(head_dim=8))
    vision = SiglipVisionConfig(**vision_shape(projection_dim=32))
    config = PaliGemmaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, projection_dim=32)
    return PaliGemmaForConditionalGeneration(config)


def qwen_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = text_shape(rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4})
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "mlp_ratio": 2}
    ends = {"vision_start_token_id": 58, "vision_end_token_id": 59, "video_token_id": 57}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, **ends)
    return Qwen2VLForConditionalGeneration(config)


def drawn(model: nn.Module) -> nn.Module:
    model = model.double().eval()
    with torch.no_grad():
        redraw(model)
    return model


def picture_batch(kind: str) -> dict[str, Tensor]:
    """Two sequences, the second padded on the left, with the picture's tokens in the middle."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 50, (2, 14), generator=generator)
    ids[:, 4:8] = IMAGE
    ids[:, 0] = 1
    mask = torch.ones_like(ids)
    if kind != "qwen":  # its positions are counted from the mask
        mask[1, :2] = 0
        ids[1, :2], ids[1, 2] = 0, 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if kind == "qwen":
        ids[:, 3], ids[:, 8] = 58, 59
        pixels = torch.randn(2 * 16, 3 * 2 * 14 * 14, generator=generator, dtype=torch.float64)
        batch |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
        batch["mm_token_type_ids"] = (ids == IMAGE).long()
    else:
        batch["pixel_values"] = torch.randn(2, 3, 28, 28, generator=generator, dtype=torch.float64)
    return batch


def reference(maps: Tensor, labels: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """(H, G, G) sums and (G,) rows, from whole maps (B, H, T, S)."""
    members = nn.functional.one_hot(labels, len(GROUPS)).double()
    of_rows = members * real[..., None]
    return torch.einsum("bhts,btr,bsg->hrg", maps.double(), of_rows, members), of_rows.sum((0, 1))


def eager_maps(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Maps of the text layers, by a softmax in float64: that of transformers is of float32."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    maps: list[Tensor] = []

    def attend(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if mask is None and getattr(module, "is_causal", False):
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
        weights = logits.softmax(-1).nan_to_num()
        if logits.shape[-1] == batch["input_ids"].shape[1]:
            maps.append(weights)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    AttentionInterface.register("plain64", attend)
    AttentionMaskInterface.register("plain64", sdpa_mask)
    model.set_attn_implementation("plain64")  # type: ignore[operator]
    with torch.no_grad():
        model(**batch)
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    return maps


@pytest.mark.parametrize(("kind", "make"), [("llava", llava), ("paligemma", paligemma), ("qwen", qwen_vl)])
def test_shares_of_images_and_text(kind: str, make: Any) -> None:
    torch.manual_seed(0)
    model = drawn(make())
    batch = picture_batch(kind)
    labels = token_groups(model).labels(batch["input_ids"])
    assert {GROUPS[group] for group in labels.unique().tolist()} == {"special", "image", "text"}
    maps = eager_maps(model, batch)
    with locater.observe(model, groups=True) as seen:
        model(**batch)
    rows = [row for row in seen.groups if "vis" not in row.name]
    assert len(rows) == len(seen.groups) == sum(x.shape[1] for x in maps), "towers of pictures have none"
    first = min(row.layer for row in rows)
    for row in rows:
        given, counts = reference(maps[row.layer - first], labels, batch["attention_mask"])
        for group, share in row.shares.items():
            at = GROUPS.index(group)
            assert share == pytest.approx(float(given[row.head, :, at].sum() / counts.sum()), abs=EXACT)
            for asked, shares in row.by_query.items():
                own = GROUPS.index(asked)
                assert shares[group] == pytest.approx(float(given[row.head, own, at] / counts[own]), abs=EXACT)
        assert sum(row.shares.values()) == pytest.approx(1, abs=EXACT)
        assert sum(row.even.values()) == pytest.approx(1, abs=EXACT)


def test_even_weights_are_what_a_head_without_queries_gives() -> None:
    torch.manual_seed(0)
    model = llama().double().eval()
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter.data.zero_()
    ids = torch.randint(2, 60, (3, 12))
    groups = TokenGroups(special=frozenset(range(10)), image=frozenset(range(10, 20)))
    with locater.observe(model, groups=groups) as seen:
        model(input_ids=ids)
    for row in seen.groups:
        assert row.shares == pytest.approx(row.even, abs=EXACT)


def test_weight_beyond_a_window() -> None:
    torch.manual_seed(0)
    model = drawn(llama())
    ids, mask = torch.randint(3, 60, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    maps = eager_maps(model, batch)
    window, sinks = 4, 2
    with locater.observe(model, beyond=(window, sinks)) as seen:
        model(**batch)
    distance = torch.arange(24)[:, None] - torch.arange(24)
    first = torch.tensor([0, 5])
    for row in seen.rows:
        total = 0.0
        for sequence in range(2):
            sink = (torch.arange(24) >= first[sequence]) & (torch.arange(24) < first[sequence] + sinks)
            far = (distance >= window) & ~sink
            total += float((maps[row.layer][sequence, row.head] * far)[first[sequence] :].sum())
        assert row.beyond == pytest.approx(total / (24 + 19), abs=EXACT)
    with locater.observe(model) as plain:
        model(**batch)
    assert all(row.beyond is None for row in plain.rows)
    assert [row.entropy for row in plain.rows] == [row.entropy for row in seen.rows]


def test_several_passes_chosen_heads_and_clear() -> None:
    torch.manual_seed(0)
    model = drawn(llama())
    a, b = torch.randint(3, 60, (1, 12)), torch.randint(3, 60, (1, 12))
    with locater.observe(model, groups=True, beyond=(3, 1)) as whole:
        model(input_ids=torch.cat([a, b]))
    with locater.observe(model, groups=True, beyond=(3, 1), layers=[1], heads=[3, 0]) as some:
        model(input_ids=torch.randint(3, 60, (1, 7)))
        some.clear()
        model(input_ids=a)
        model(input_ids=b)
    expected = {(row.layer, row.head): row for row in whole.groups}
    assert {(row.layer, row.head) for row in some.groups} == {(1, 0), (1, 3)}
    for row in some.groups:
        assert row.shares == pytest.approx(expected[row.layer, row.head].shares, abs=EXACT)
    beyond = {(row.layer, row.head): row.beyond for row in whole.rows}
    assert all(row.beyond == pytest.approx(beyond[row.layer, row.head], abs=EXACT) for row in some.rows)


def test_what_cannot_be_told_is_refused() -> None:
    model = llama().eval()
    with locater.observe(model) as seen:
        model(input_ids=torch.arange(3, 12)[None])
    with pytest.raises(LocaterError, match="groups=True"):
        _ = seen.groups
    with locater.observe(model, groups=True) as seen:
        model(inputs_embeds=torch.randn(1, 5, 32))
    with pytest.raises(LocaterError, match="input_ids"):
        _ = seen.groups
    with pytest.raises(LocaterError, match="window"):
        locater.observe(model, beyond=(0, 4))


# ---- chats

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = (
    "{{ '<s>' }}{% for m in messages %}{% if m['role'] == 'system' %}{{ '[SYS] ' + m['content'] + ' [/SYS]' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{{ '<s>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{{ '<turn>' + m['role'] + '\n' + m['content'] + '</turn>\n' }}{% endfor %}"
)
SAID = [
    {"role": "system", "content": "You are brief and kind."},
    {"role": "user", "content": "Name three rivers of Asia,\n\nplease."},
    {"role": "assistant", "content": "Indus, Mekong, Ob."},
    {"role": "user", "content": "And one of Africa?"},
]


def chat_tokenizer(template: str, style: str) -> Any:
    """Byte pairs as of GPT-2, or words with their spaces in front as of SentencePiece."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    if style == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)])
    names = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, initial_alphabet=alphabet)
    words = [message["content"] for message in SAID] * 5 + ["system user assistant [INST] [/INST] [SYS] <turn> </turn>"]
    tokenizer.train_from_iterator(words, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    return fast


@pytest.mark.parametrize("style", ["bytes", "words"])
@pytest.mark.parametrize(
    ("template", "said"),
    [(CHATML, SAID), (CHATML, SAID[1:]), (BRACKETS, SAID), (BRACKETS, SAID[1:]), (NO_SYSTEM, SAID[1:])],
)
def test_parts_of_a_chat(template: str, said: list[dict[str, str]], style: str) -> None:
    tokenizer = chat_tokenizer(template, style)
    model = llama(vocab_size=512, max_position_embeddings=512).eval()
    batch = locater.chat_batch(model, said, tokenizer)
    ids = batch["input_ids"]
    labels = locater.token_groups(model, tokenizer).labels(ids)[0].tolist()
    named = {"system": "system", "user": "prompt", "assistant": "answer"}
    for group in set(named.values()):
        texts = [message["content"] for message in said if named[message["role"]] == group]
        own = [token for token, label in zip(ids[0].tolist(), labels, strict=True) if GROUPS[label] == group]
        found = "".join("".join(tokenizer.decode([token]).split()) for token in own)
        assert found == "".join("".join(text.split()) for text in texts)
    assert GROUPS[labels[0]] == "special"
    with locater.observe(model, groups=locater.token_groups(model, tokenizer)) as seen:
        model(**batch)
    assert set(seen.groups[0].shares) == {"special", *(named[message["role"]] for message in said)}


def test_text_that_is_no_chat_is_text() -> None:
    tokenizer = chat_tokenizer(CHATML, "bytes")
    groups = token_groups(llama(), tokenizer)
    ids = torch.tensor([tokenizer("Name three rivers.")["input_ids"]])
    assert {GROUPS[group] for group in groups.labels(ids)[0].tolist()} == {"text"}


def test_a_notebook_shows_the_groups() -> None:
    torch.manual_seed(0)
    model = llama().eval()
    with locater.observe(model, groups=TokenGroups(frozenset(range(10)), frozenset(range(10, 20)))) as seen:
        model(input_ids=torch.randint(2, 60, (2, 12)))
    assert "heads that give it most" in seen._repr_html_()


def test_compiled_models_have_the_same_shares() -> None:
    torch.manual_seed(0)
    model = drawn(llama())
    ids = torch.randint(3, 60, (2, 12))
    with locater.observe(model, groups=True, beyond=(3, 1)) as plain:
        model(input_ids=ids)
    compiled = torch.compile(model, backend="eager")
    with locater.observe(compiled, groups=True, beyond=(3, 1)) as seen:  # type: ignore[arg-type]
        compiled(input_ids=ids)
    assert [row.shares for row in seen.groups] == [row.shares for row in plain.groups]
    assert [row.beyond for row in seen.rows] == [row.beyond for row in plain.rows]
