"""The result of a training run, as data that is written to JSON and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from locater.brief import brief
from locater.errors import LocaterError
from locater.files import write_whole
from locater.version import SCHEMA, __version__
from locater_lab.train.plan import Plan


@dataclass(frozen=True)
class Result:
    """The outcome of a run. Losses are those of the final weights, in nats per token (of --task diffusion: squared
    errors): choose settings by `select_loss`,
    publish `report_loss`.
    """

    plan: Plan
    train_loss: float
    select_loss: float
    report_loss: float
    report_entropy: float | None  # of attention, mean over heads, nats
    bits_per_byte: float | None = None  # of text that was learned causally, without unknown words
    accuracy: float | None = None  # of images and texts by class, and of sorted numbers
    conversion: dict[str, Any] | None = None  # --convert: step; report loss and accuracy before and after
    history: tuple[tuple[int, float], ...] = ()  # step and loss on the select split
    parameters: int = 0
    tokens: int = 0  # seen in training
    seconds: float = 0.0  # of training, over all parts of a run that was interrupted
    measures: dict[str, Any] = field(default_factory=dict)  # of maps and residual stream (`train.measured`)
    data: dict[str, Any] = field(default_factory=dict)  # hash of the text, sizes of the splits
    model: str = ""  # folder of the final weights

    __repr__ = brief

    @property
    def perplexity(self) -> float | None:
        """exp of the report loss; None where that is a squared error."""
        return None if self.plan.task == "diffusion" else math.exp(min(self.report_loss, 700.0))

    def to_dict(self) -> dict[str, Any]:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {
            "schema": SCHEMA,
            "locater": __version__,
            "source": self.model,
            **values,
            "plan": self.plan.to_dict(),
            "history": [list(pair) for pair in self.history],
            "perplexity": self.perplexity,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else None,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: Path) -> None:
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        newer = ("measures", "conversion")  # results of earlier versions have none
        values = {item.name: data[item.name] for item in fields(cls) if item.name in data or item.name not in newer}
        history = tuple((step, loss) for step, loss in data["history"])
        return cls(**{**values, "plan": Plan.from_dict(data["plan"]), "history": history})

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise LocaterError(f"{path}: not the result of a run ({error!r}): remove it to train again") from None
