"""The models of the bench, what each was made for, and its loss on a few hundred tokens of that.

Thresholds of verdicts may be chosen on the first three; the next three judge them. Tiny models with drawn numbers stand
for the other families: their loss says nothing, so none is measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.commands.load_model import load_model
from locater.errors import LocaterError, first_line
from locater_lab.studies.flags import CHAINS, RESIDUES, STORIES
from locater_lab.studies.verdicts.checkpoint import Checkpoint, Gradient, generator

TOKENS = 384  # at most, that a loss is measured on
LENGTH = 192  # of a sequence
SMALLEST = 0.05  # nats of change in the loss from which a fault is known to do harm
MASKED = 0.15
TEMPERATURE = (
    0.1  # of the similarities of sentences; at 0.05, as MiniLM was trained, the sound model has a loss of 0.001
)

PROSE = """
The lighthouse at the mouth of the river was built in 1848, after three ships had been lost on the sandbank within a
single winter. Its tower of grey granite is thirty-one metres high and was lit at first by oil lamps behind a lens that
had been ground in Paris. The keeper lived with his family in a low house at the foot of the tower, grew potatoes in a
walled garden and received flour, coal and letters by boat once a month. In 1926 the lamp was converted to electricity,
and since 1974 the light has been controlled from the harbour office, so that nobody lives on the rock any more. The
house is now a small museum, which is open to visitors from May to September. It shows the old lens, the keeper's
journals and a collection of charts on which the changing course of the channel can be followed over two centuries.

Photosynthesis is the process by which plants, algae and some bacteria turn the energy of sunlight into chemical energy.
In the leaves of a plant, the green pigment chlorophyll absorbs light, mostly in the red and blue parts of the spectrum.
The absorbed energy is used to split water into hydrogen and oxygen; the oxygen is released into the air, while the
hydrogen is combined with carbon dioxide to build sugars. Almost all life on Earth depends on this process, directly or
indirectly, because animals eat plants or eat other animals that have eaten plants. The rate of photosynthesis depends
on the amount of light, on the temperature and on the concentration of carbon dioxide around the leaf.
"""
REFERENCE = """
The "for" statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or other
iterable object. The expression list is evaluated once; it should yield an iterable object. An iterator is created for
that iterable. The first item provided by the iterator is then assigned to the target list using the standard rules for
assignments, and the suite is executed. This repeats for each item provided by the iterator. When the iterator is
exhausted, the suite in the "else" clause, if present, is executed, and the loop terminates. A "break" statement
executed in the first suite terminates the loop without executing the "else" clause's suite. A "continue" statement
executed in the first suite skips the rest of the suite and continues with the next item, or with the "else" clause if
there is no next item. Return a list of the names in the current local scope. If the object has a method of that name,
the method will be called and must return the list of attributes. The optional argument is a function of one argument
that is used to extract a comparison key from each element. If the argument is not given, the default value is returned
and an exception is raised when the object is not found.
"""
PAIRS = """
How do I reset the password of my account? | I forgot my password and want to set a new one
The cat is sleeping on the sofa | A cat naps on the couch
What is the capital of France? | Paris is the seat of the French government
The train to Berlin was delayed by two hours | Passengers to Berlin waited two hours because their train was late
Plants turn sunlight into chemical energy | Photosynthesis lets leaves make sugar from light
A man is playing the guitar on stage | Someone performs a song with his guitar before an audience
How long should I boil an egg? | Cooking time for eggs in hot water
The company reported higher profits this year | Earnings of the firm rose compared with last year
Heavy rain flooded the streets of the town | After the storm the roads of the village were under water
Which vaccine protects against measles? | Immunisation of children against measles
The lighthouse was built in 1848 on a rock | A tower with a lamp for ships has stood there since the nineteenth century
She is learning to speak Spanish | Her Spanish lessons began last month
Best way to remove red wine from a carpet | Cleaning a wine stain on a rug
The football team won the final match | Our club became champion by beating its rival in the last game
Interest rates were raised by the central bank | Borrowing money became more expensive after the decision on rates
Two dogs run through the snow | A pair of dogs is playing outside in winter
The museum is closed on Mondays | You cannot visit the exhibition at the start of the week
How does a jet engine work? | The principle behind the turbine of an aircraft
He broke his leg while skiing | A skiing accident left him with a fracture
The new phone has a better camera | Photographs taken with the latest smartphone look sharper
"""
Kind = str  # "causal", "masked", "sentences" or ""


@dataclass(frozen=True)
class Model:
    """A model of the bench. `role` is "chosen on", "judged" or "tiny"."""

    name: str
    folder: Path
    role: str
    kind: Kind = ""
    text: str = ""


def trained_models(folders: Path | None) -> list[Model]:
    """The demo, and those of the others that are below `folders`."""
    known = (
        Model("stories260K", Path("stories260K"), "chosen on", "causal", STORIES),
        Model("all-MiniLM-L6-v2", Path("all-minilm-l6-v2"), "chosen on", "sentences", PROSE + STORIES),
        Model("AntiBERTy", Path("antiberty"), "judged", "masked"),
        Model("SmolLM2-135M-Instruct", Path("smollm2-135m-instruct"), "judged", "causal", PROSE),
        Model("Gemma-3-270M", Path("gemma3-270m"), "judged", "causal", PROSE),
    )
    demo = Model("demo", Path(str(files("locater") / "demo")), "chosen on", "causal", REFERENCE)
    if folders is None:
        return [demo]
    there = [(folders / model.folder, model) for model in known]
    found = [Model(m.name, folder, m.role, m.kind, m.text) for folder, m in there if (folder / "config.json").is_file()]
    return [demo, *found]


# ---- the loss ----


def measure_loss(folder: Path, model: Model) -> float | None:
    """Nats per token (of sentences: per pair) of the model in a folder; None where it cannot be run. NaN is a loss."""
    try:
        torch.manual_seed(0)  # what is missing in the file is drawn
        with quiet():
            module = load_model(str(folder))
        with torch.no_grad():
            return float(loss_of(module, model))
    except (LocaterError, IndexError, RuntimeError):
        return None


def load_quietly(folder: Path) -> nn.Module:
    with quiet():
        module: nn.Module = load_model(str(folder))
    return module


@torch.no_grad()
def loss_in_place(module: nn.Module, model: Model, base: Checkpoint, planted: Checkpoint) -> float | None:
    """The loss of a planted model in a module that has the base loaded, and has it again afterwards; None where only
    loading what is planted shows what becomes of it: with other names, shapes or settings.
    """
    parameters, changed = module.state_dict(), planted.changed(base)
    if planted.config != base.config or any(
        name not in parameters or name not in planted.tensors or parameters[name].shape != planted.tensors[name].shape
        for name in changed
    ):
        return None
    try:
        for name in changed:
            parameters[name].copy_(planted.tensors[name])
        return float(loss_of(module, model))
    finally:
        for name in changed:
            parameters[name].copy_(base.tensors[name])


def loss_of(module: nn.Module, model: Model) -> Tensor:
    return LOSSES[model.kind](module, model)


def _causal(module: nn.Module, model: Model) -> Tensor:
    ids = _ids(model)[:TOKENS]
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH) if len(ids) > LENGTH else ids[None]
    start = _start(model.folder)
    if start is not None:
        rows = torch.cat([rows.new_full((len(rows), 1), start), rows[:, :-1]], 1)
    logits = module(input_ids=rows).logits
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), rows[:, 1:].flatten())


def _masked(module: nn.Module, model: Model) -> Tensor:
    """Residues of antibodies, a share of them hidden."""
    place = {word: at for at, word in enumerate(RESIDUES)}
    length = min(map(len, CHAINS))
    ids = torch.tensor([[place["[CLS]"], *(place[x] for x in chain[:length]), place["[SEP]"]] for chain in CHAINS[:4]])
    hidden = torch.rand(ids.shape, generator=generator("masked")) < MASKED
    hidden[:, [0, -1]] = False
    logits = module(input_ids=ids.masked_fill(hidden, place["[MASK]"]), attention_mask=torch.ones_like(ids)).logits
    return functional.cross_entropy(logits[hidden].float(), ids[hidden])


def _sentences(module: nn.Module, model: Model) -> Tensor:
    """Each sentence has to find the other of its pair among those of all pairs, by the cosine of their mean states."""
    tokenizer = _tokenizer(model.folder)
    sentences = [part.strip() for line in PAIRS.strip().splitlines() for part in line.split("|")]
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(sentences)
    ids, seen = (torch.tensor([getattr(x, name) for x in encoded]) for name in ("ids", "attention_mask"))
    states = module(input_ids=ids, attention_mask=seen).last_hidden_state
    means = functional.normalize((states * seen[..., None]).sum(1) / seen.sum(1, keepdim=True), dim=1)
    return functional.cross_entropy(means[::2] @ means[1::2].mT / TEMPERATURE, torch.arange(len(sentences) // 2))


LOSSES: Mapping[Kind, Callable[[nn.Module, Model], Tensor]] = {
    "causal": _causal,
    "masked": _masked,
    "sentences": _sentences,
}
_KEPT: dict[tuple[str, str], Any] = {}


def _tokenizer(folder: Path) -> Any:
    from tokenizers import Tokenizer

    key = (str(folder), "tokenizer")
    if key not in _KEPT:
        _KEPT[key] = Tokenizer.from_file(str(folder / "tokenizer.json"))
        _KEPT[key].no_padding()
        _KEPT[key].no_truncation()
    return _KEPT[key]


def _ids(model: Model) -> Tensor:
    key = (str(model.folder), hashlib.sha256(model.text.encode()).hexdigest())
    if key not in _KEPT:
        text = " ".join(model.text.split())
        _KEPT[key] = torch.tensor(_tokenizer(model.folder).encode(text, add_special_tokens=False).ids)
    return _KEPT[key]


def _start(folder: Path) -> int | None:
    """The token that a sequence begins with, where the model was trained with one."""
    settings = json.loads((folder / "config.json").read_text())
    return settings.get("bos_token_id") if settings.get("model_type") in ("gemma3_text", "llama") else None


def ids_of(model: Model) -> Tensor:
    """Tokens of what the model was made for, as a probe takes them."""
    if model.kind == "masked":
        place = {word: at for at, word in enumerate(RESIDUES)}
        length = min(map(len, CHAINS))
        return torch.tensor([[place["[CLS]"], *(place[x] for x in chain[:length]), place["[SEP]"]] for chain in CHAINS])
    ids = _ids(model)
    return ids[: min(4, len(ids) // 96) * 96].view(-1, 96)


def gradient_of(model: Model, names: list[str]) -> Gradient:
    """The gradient of the loss by stored maps, when it is asked for."""

    def gradient() -> dict[str, Tensor]:
        with quiet():
            module = load_model(str(model.folder))
        parameters = dict(module.named_parameters())
        wanted = {name: parameters[name] for name in names if name in parameters}
        module.requires_grad_(False)
        for parameter in wanted.values():
            parameter.requires_grad_(True)
        found = torch.autograd.grad(loss_of(module, model), list(wanted.values()))
        return dict(zip(wanted, found, strict=True))

    return gradient


@contextmanager
def quiet() -> Iterator[None]:
    """Without what transformers says about weights that are missing: here they are missing on purpose."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)


# ---- tiny models of every family ----

SHAPE = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, vocab_size=64,
             max_position_embeddings=64)  # fmt: skip
GROUPED = dict(SHAPE, num_key_value_heads=2)
HEADS_OF_8 = dict(GROUPED, head_dim=8)
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
GEMMA = dict(HEADS_OF_8, query_pre_attn_scalar=8, sliding_window=16, layer_types=WINDOWS)
PICTURES = dict(
    hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
)
TINY: dict[str, dict[str, Any]] = {  # settings by model type, one of each family whose heads are rows of tensors
    "bert": SHAPE,
    "bloom": dict(hidden_size=32, n_layer=4, n_head=4, vocab_size=64),
    "cohere": GROUPED,
    "deberta-v2": dict(SHAPE, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    "dinov2": PICTURES,
    "distilbert": dict(dim=32, n_layers=4, n_heads=4, hidden_dim=48, vocab_size=64, max_position_embeddings=64),
    "falcon": dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, new_decoder_architecture=True, num_kv_heads=2),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": dict(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0),
    "gpt_neox": dict(SHAPE, rotary_pct=0.5),
    "gpt_oss": dict(HEADS_OF_8, num_local_experts=2, num_experts_per_tok=1, sliding_window=16),
    "gptj": dict(n_embd=32, n_layer=4, n_head=4, rotary_dim=4, vocab_size=64, n_positions=64),
    "granite": GROUPED,
    "llama": HEADS_OF_8,
    "mistral": HEADS_OF_8,
    "mpnet": SHAPE,
    "olmo2": GROUPED,
    "opt": dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, ffn_dim=48, vocab_size=64, max_position_embeddings=64, word_embed_proj_dim=32),
    "phi": SHAPE,
    "phi3": dict(GROUPED, pad_token_id=0),
    "qwen2": GROUPED,
    "qwen3": HEADS_OF_8,
    "stablelm": GROUPED,
    "starcoder2": GROUPED,
    "t5": dict(d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4, vocab_size=64),
    "vit": PICTURES,
    "xlnet": dict(d_model=32, n_layer=4, n_head=4, d_inner=48, vocab_size=64),
}  # fmt: skip


@torch.no_grad()
def tiny_model(kind: str, folder: Path) -> Model:
    """Write a tiny model of a type: matrices by their inputs, gains about 1 and biases about 0, as training leaves
    them.
    """
    import transformers

    with quiet():
        config = transformers.AutoConfig.for_model(kind, **TINY[kind])
        mapped = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
        build = (
            transformers.AutoModelForCausalLM if type(config) in mapped and kind != "bert" else transformers.AutoModel
        )
        module = build.from_config(config)
        g = generator("tiny", kind)
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            fresh = parameter.float()
            if parameter.ndim >= 2:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(fresh + 0.1 * noise)
        module.save_pretrained(folder)
    return Model(f"tiny {kind}", folder, "tiny")


def readable(folder: Path, name: str) -> tuple[Checkpoint | None, str]:
    """The checkpoint, or why its heads are not known as rows of tensors."""
    try:
        checkpoint = Checkpoint.open(folder, name)
        _ = checkpoint.stack
    except LocaterError as error:
        return None, first_line(error)
    return checkpoint, ""
