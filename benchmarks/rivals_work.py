"""What benchmarks/rivals.py times: the same work by Locater and by other tools, each in a process of its own.

    python benchmarks/rivals_work.py WORK TOOL FOLDER      # one line of JSON

Each tool is used as its documentation does. Entropies, eigenvalues and attributions are compared with float64, so that
a tool that is fast is also seen to be right.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rivals_common import (
    BATCH,
    EXPLAINED,
    HEADS,
    KEY_HEADS,
    LAYERS,
    POINTS,
    SHOWN,
    SIZE,
    STEPS,
    TOKENS,
    WIDTH,
    ids,
    load,
    ready,
    time_work,
)
from torch import Tensor


def lens(folder: Path) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    model, tokenizer = load(folder, "eager"), AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers(
        str(folder), hf_model=model, dtype=torch.float32, device="cpu", tokenizer=tokenizer
    )


# ---- weights: from the files on disk to numbers ----


def spectrum_error(traces: dict[tuple[int, int], float], folder: Path, gains: bool = True) -> float:
    """Worst |trace - trace in float64| over the Frobenius norm, of the map with the gains of its norm, or as stored."""
    from safetensors.torch import load_file

    weights, worst = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}, 0.0
    for (layer, head), trace in traces.items():
        path = f"model.layers.{layer}."
        gain = weights[f"{path}input_layernorm.weight"] if gains else 1.0
        W_Q = (weights[f"{path}self_attn.q_proj.weight"] * gain).view(HEADS, SIZE, WIDTH)[head]
        W_K = (weights[f"{path}self_attn.k_proj.weight"] * gain).view(KEY_HEADS, SIZE, WIDTH)[head * KEY_HEADS // HEADS]
        product = W_K @ W_Q.T
        norm = ((W_Q @ W_Q.T) * (W_K @ W_K.T)).sum().sqrt()
        worst = max(worst, abs(trace - float(product.trace())) / float(norm))
    return worst


def weights_locater(folder: Path) -> dict[str, Any]:
    import locater

    scan, cost = time_work(lambda: locater.scan(folder, eigenvalues=True))
    traces = {(row.layer, row.head): sum(re for re, _ in row.eigenvalues) for row in scan.rows}
    return {
        **cost,
        "numbers": f"eigenvalues of {len(scan.rows)} heads, predictions",
        "error": spectrum_error(traces, folder),
    }


def weights_transformer_lens(folder: Path) -> dict[str, Any]:
    values, cost = time_work(lambda: lens(folder).QK.eigenvalues)
    traces = {(i, h): float(values[i, h].sum().real) for i in range(LAYERS) for h in range(HEADS)}
    error = spectrum_error(traces, folder, gains=False)  # it is of the stored maps
    return {
        **cost,
        "numbers": f"eigenvalues of {values.shape[0] * values.shape[1]} heads, without norms",
        "error": error,
    }


def weights_weightwatcher(folder: Path) -> dict[str, Any]:
    import weightwatcher

    def work() -> Any:
        return weightwatcher.WeightWatcher(model=load(folder)).analyze()

    details, cost = time_work(work)
    return {**cost, "numbers": f"power laws of {len(details)} matrices", "error": None}


# ---- the entropy of every head on one text ----


def entropies(maps: Tensor) -> Tensor:
    """(heads,) of maps (heads, T, T): mean over rows, in nats."""
    return torch.special.entr(maps).sum(-1).mean(-1)


def entropy_error(found: Tensor, folder: Path) -> float:
    exact = load(folder, "eager", torch.float64)(ids(TOKENS), output_attentions=True).attentions
    return float((found - torch.cat([entropies(x[0]) for x in exact])).abs().max())


def entropy_plain(folder: Path) -> dict[str, Any]:
    model = ready(folder)
    return {**time_work(lambda: model(ids(TOKENS)))[1], "numbers": "none", "error": None}


def entropy_locater(folder: Path) -> dict[str, Any]:
    import locater

    model = ready(folder)

    def work() -> Any:
        with locater.observe(model) as seen:
            model(ids(TOKENS))
        return seen.rows

    rows, cost = time_work(work)
    found = torch.tensor([row.entropy for row in rows], dtype=torch.float64)
    return {
        **cost,
        "numbers": f"entropy and 8 more numbers of {len(rows)} heads",
        "error": entropy_error(found, folder),
    }


def _of_maps(maps: Callable[[], list[Tensor]], folder: Path) -> dict[str, Any]:
    found, cost = time_work(lambda: torch.cat([entropies(x[0]) for x in maps()]))
    return {**cost, "numbers": f"maps and entropy of {len(found)} heads", "error": entropy_error(found, folder)}


def entropy_maps_by_hand(folder: Path) -> dict[str, Any]:
    model = ready(folder, "eager")
    return _of_maps(lambda: list(model(ids(TOKENS), output_attentions=True).attentions), folder)


def entropy_transformer_lens(folder: Path) -> dict[str, Any]:
    bridge = lens(folder)
    sum(float(x.sum()) for x in bridge.parameters())  # as `ready` does

    def maps() -> list[Tensor]:
        _, cache = bridge.run_with_cache(ids(TOKENS), names_filter=lambda name: name.endswith("hook_pattern"))
        return [cache[f"blocks.{i}.attn.hook_pattern"] for i in range(LAYERS)]

    return _of_maps(maps, folder)


def entropy_nnsight(folder: Path) -> dict[str, Any]:
    import nnsight

    wrapped = nnsight.NNsight(ready(folder, "eager"))

    def maps() -> list[Tensor]:
        with wrapped.trace(ids(TOKENS)):
            kept = nnsight.save([wrapped.model.layers[i].self_attn.output[1] for i in range(LAYERS)])
        return kept  # noqa: RET504 - the block above is not run here, but by nnsight

    return _of_maps(maps, folder)


def entropy_bertviz(folder: Path) -> dict[str, Any]:
    """A page of the maps themselves, of the first tokens: it has no numbers, and the page grows with their square."""
    from bertviz import head_view

    model, text = ready(folder, "eager"), ids(SHOWN)

    def work() -> Any:
        maps = model(text, output_attentions=True).attentions
        return head_view(maps, [chr(x) for x in text[0].tolist()], html_action="return")

    page, cost = time_work(work)
    return {**cost, "numbers": f"a page of {len(page.data) / 1e6:.1f} MB, {SHOWN} tokens", "error": None}


# ---- attributions of the last position's largest logit to the tokens ----


def _by_captum(kind: Callable[[Any], Any], folder: Path, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    model, text = ready(folder), ids(EXPLAINED)
    embedded = model.get_input_embeddings()(text).detach()
    attribution = kind(lambda x: model(inputs_embeds=x).logits[:, -1])

    def work() -> Tensor:
        target = int(model(text).logits[0, -1].argmax())  # Locater chooses it as well
        return attribution.attribute(embedded, target=target, **settings)

    found, cost = time_work(work, runs=1)
    return found.sum(-1)[0].detach(), cost


def _against(theirs: Tensor, scores: Tensor) -> float:
    return float((scores - theirs).abs().max() / theirs.abs().max())


def attributions(tool: str, method: str, folder: Path) -> dict[str, Any]:
    import captum.attr

    import locater

    line = dict(n_steps=POINTS, method="gausslegendre", internal_batch_size=1)

    def by_captum() -> tuple[Tensor, dict[str, float]]:
        if method == "integrated_gradients":
            return _by_captum(captum.attr.IntegratedGradients, folder, **line)
        return _by_captum(captum.attr.InputXGradient, folder)

    if tool == "captum":
        theirs, cost = by_captum()
        return {**cost, "numbers": f"{len(theirs)} tokens", "error": None}
    model, options = ready(folder), {"steps": POINTS} if method == "integrated_gradients" else {}
    function = getattr(locater.explain, method)
    result, cost = time_work(lambda: function(model, {"input_ids": ids(EXPLAINED)}, **options), runs=1)
    scores = torch.as_tensor(result.scores, dtype=torch.float64).flatten()
    same = method in ("integrated_gradients", "gradient_input")
    return {**cost, "numbers": f"{len(scores)} tokens", "error": _against(by_captum()[0], scores) if same else None}


# ---- a training step, with the entropy of every head in every step ----


def _steps(model: Any, before: Callable[[int], Any], after: Callable[[int, Tensor], Any]) -> dict[str, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    text = ids(BATCH[0] * BATCH[1]).view(BATCH)
    count = iter(range(10**6))

    def step() -> None:
        number = next(count)
        before(number)
        loss = model(text, labels=text).loss
        loss.backward()
        after(number, loss)
        optimizer.step()
        optimizer.zero_grad()

    return time_work(step, warm=2, runs=STEPS)[1]


def step_plain(folder: Path) -> dict[str, Any]:
    return {**_steps(ready(folder).train(), lambda n: None, lambda n, loss: None), "numbers": "none", "error": None}


def step_locater(folder: Path, spectrum: bool = True) -> dict[str, Any]:
    import locater

    model, log = ready(folder).train(), folder / f"run-{os.getpid()}.jsonl"
    monitor = locater.Monitor(log, every=1, spectrum=spectrum).attach(model)
    cost = _steps(model, lambda n: None, lambda n, loss: monitor.after_step(loss=loss))
    monitor.detach()
    line = next(x for x in map(json.loads, log.open()) if x["kind"] == "step")
    return {**cost, "numbers": f"{len(line['heads'])} numbers of {LAYERS * HEADS} heads", "error": None}


def step_torch_module_monitor(folder: Path) -> dict[str, Any]:
    """Its function for attention is called from an attention function of ours: it has none for transformers."""
    from torch_module_monitor import ModuleMonitor, monitor_scaled_dot_product_attention
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    monitor = ModuleMonitor(monitor_step_fn=lambda step: True)

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        out = sdpa_attention_forward(module, q, k, v, mask, **options)
        monitor_scaled_dot_product_attention(monitor, module, q, k, v, is_causal=True, enable_gqa=True)
        return out

    AttentionInterface.register("monitored", attention)
    model = ready(folder, "monitored").train()
    monitor.set_module(model)

    def after(step: int, loss: Tensor) -> None:
        monitor.end_step()

    cost = _steps(model, monitor.begin_step, after)
    names = [name for name in monitor.get_step_metrics() if "entropy" in name]
    return {**cost, "numbers": f"{len(names)} entropies", "error": None}


WORK: dict[str, dict[str, Callable[[Path], dict[str, Any]]]] = {
    "weights": {
        "Locater": weights_locater, "TransformerLens": weights_transformer_lens, "WeightWatcher": weights_weightwatcher,
    },
    "entropy": {
        "no measurement": entropy_plain, "Locater": entropy_locater, "maps by hand": entropy_maps_by_hand,
        "TransformerLens": entropy_transformer_lens, "nnsight": entropy_nnsight, "BertViz": entropy_bertviz,
    },
    "attributions": {
        f"{tool}, {method.replace('_', ' ')}": lambda folder, t=tool, m=method: attributions(t, m, folder)
        for tool, method in (("captum", "integrated_gradients"), ("Locater", "integrated_gradients"), ("captum", "gradient_input"),
                             ("Locater", "gradient_input"), ("Locater", "relevance"), ("Locater", "operator"))
    },
    "training step": {
        "no monitor": step_plain, "Locater": step_locater, "Locater, no spectrum": lambda folder: step_locater(folder, False),
        "torch-module-monitor": step_torch_module_monitor,
    },
}  # fmt: skip


if __name__ == "__main__":
    work, tool, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    with torch.set_grad_enabled(work in ("attributions", "training step")):
        print(json.dumps(WORK[work][tool](folder)))
