"""The monitor in the trainers of TRL: what it logs is of the pass that the loss comes from, and of no other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import Monitor
from locater.observing import observe
from locater.runs.record_sinks import read_run
from tests.families.decoders import GROUPED, make
from tests.parity import redraw

WORDS = [f"w{number}" for number in range(60)]
COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "participation", "distance")


def tokenizer() -> Any:
    """Splits at spaces: 64 tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {word: number for number, word in enumerate(["<unk>", "<pad>", "<s>", "</s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(known, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(seed: int, length: int) -> str:
    drawn = torch.randint(len(WORDS), (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[number] for number in drawn.tolist())


def dataset(*columns: str) -> Any:
    """Eight rows of words; `label` alternates between good and bad."""
    from datasets import Dataset

    lengths = {"prompt": 4, "completion": 5, "chosen": 6, "rejected": 3, "text": 9}
    rows = {
        name: [at % 2 == 0 if name == "label" else text(10 * at + place, lengths[name] + at % 3) for at in range(8)]
        for place, name in enumerate(columns)
    }
    return Dataset.from_dict(rows)


def base() -> Any:
    model = make("Llama", **GROUPED, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    redraw(model, 0.3)
    return model


def adapter() -> dict[str, Any]:
    """A new adapter: its trainer takes the model without it as the reference."""
    import peft

    targets = ["q_proj", "k_proj"]
    return {"peft_config": peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")}


def away_from_its_reference(model: Any) -> None:
    """As after training: another adapter than the one that changes nothing."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(number))


def sft(model: Any, settings: dict[str, Any], **more: Any) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(model, args=SFTConfig(**settings), train_dataset=dataset("text"), **more)


def dpo(model: Any, settings: dict[str, Any], **more: Any) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(model, args=DPOConfig(**settings), train_dataset=dataset("prompt", "chosen", "rejected"), **more)


def grpo(model: Any, settings: dict[str, Any], **more: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(set(words.split()))) for words in completions]

    args = GRPOConfig(**settings, num_generations=2, max_completion_length=5, beta=0.1)
    return GRPOTrainer(model, reward, args=args, train_dataset=dataset("prompt"), **more)


def kto(model: Any, settings: dict[str, Any], **more: Any) -> Any:
    from trl import KTOConfig, KTOTrainer

    return KTOTrainer(model, args=KTOConfig(**settings), train_dataset=dataset("prompt", "completion", "label"), **more)


class LossPasses:
    """The arguments of every pass of a model with gradients, as they were."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._hook = model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            plain = {name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
            self.arguments.append((args, plain))


def check(build: Callable[..., Any], folder: Path, others: int, **more: Any) -> None:
    """The first step in the log of a run has what `observe` sees of its loss passes, and says how many others it had."""
    settings = dict(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, learning_rate=1e-3, bf16=False, **{"gradient_checkpointing": False, **more},
    )  # fmt: skip
    trainer = build(base(), settings, processing_class=tokenizer(), callbacks=[Monitor(every=1)], **adapter())
    away_from_its_reference(trainer.model)
    before = copy.deepcopy(trainer.model).train()
    passes = LossPasses(trainer.model)
    trainer.train()
    with observe(before) as seen:
        for args, kwargs in passes.arguments:
            before(*args, **kwargs)
    (step,) = read_run(folder / "locater.jsonl").steps
    for name in COLUMNS:
        logged = [x for layer in step["heads"][name] for x in layer]
        assert logged == pytest.approx([row[name] for row in seen.rows], abs=1e-6), name
    assert step.get("passes_left_out", 0) == others


def test_dpo_with_an_adapter(tmp_path: Path) -> None:
    """Its reference is a pass of the same model, in training mode."""
    check(dpo, tmp_path, others=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "others"),
    # KTO: its reference twice, and the policy for the KL term; GRPO: five tokens, and its reference
    [(sft, 0), (kto, 3), (grpo, 6)],
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_other_trainers(tmp_path: Path, build: Any, others: int, reentrant: bool | None) -> None:
    kind = {} if reentrant is None else {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    check(build, tmp_path, others, gradient_checkpointing=reentrant is not None, **kind)
