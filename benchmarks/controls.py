"""What each control costs: training steps with it over steps without, in turns in one process.

python benchmarks/controls.py              on the CPU, one thread: 4 layers of width 256; writes results/controls-cpu.json
python benchmarks/controls.py --gpu        on a GPU, bfloat16: 12 layers of width 768; writes results/controls-gpu.json
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import command_line, device_and_torch, place, write
from torch import Tensor

from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.train.controls_and_conversion import attach

CONTROLS = {  # name in the table: text of the control
    "none": "",
    "LocAteR, effective": "locater(form=effective)",
    "LocAteR, measured": "locater(form=measured)",
    "QK-clip": "qkclip(limit=20)",
    "sigma-reparam": "sigmareparam",
    "soft-cap": "logitsoftcap(cap=20)",
    "temperature": "temperature",
    "entropy penalty": "entropypenalty(floor=0.3)",
}
QK_NORM = "QK-norm, built in"  # --qk-norm of `locater train`
TURNS = 7


class Steps:
    """A model of its own, trained on the same tokens."""

    def __init__(self, shape: Shape, control: str, batch: Tensor) -> None:
        torch.manual_seed(0)
        self.batch, self.device = batch, batch.device.type
        self.model = Transformer(shape).to(batch.device)
        self.control = attach([control] if control else [], self.model)
        learned = [*self.model.parameters(), *self.control.parameters()]
        self.optimizer = torch.optim.AdamW(learned, 1e-5, fused=self.device == "cuda")

    def step(self) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(self.batch[:, :-1], self.batch[:, 1:])
        (loss + self.control.loss()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.control.after_step()

    def seconds(self, count: int) -> float:
        """Of one step, the mean of several."""
        self._wait()
        began = time.perf_counter()
        for _ in range(count):
            self.step()
        self._wait()
        return (time.perf_counter() - began) / count

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(shape: Shape, device: str, sequences: int, count: int, turns: int = TURNS) -> dict[str, Any]:
    """Ratios of step times, the median of `turns` and the least and largest; every arm has its turn in each round."""
    batch = torch.randint(0, shape.vocabulary, (sequences, shape.length + 1), device=device)
    arms = {name: Steps(shape, text, batch) for name, text in CONTROLS.items()}
    arms[QK_NORM] = Steps(Shape(**{**vars(shape), "qk_norm": True}), "", batch)
    for arm in arms.values():  # allocate
        arm.seconds(2)
    rounds = [{name: arm.seconds(count) for name, arm in arms.items()} for _ in range(turns)]
    ratios = {name: sorted(turn[name] / turn["none"] for turn in rounds) for name in arms if name != "none"}
    return {
        **device_and_torch(device == "cuda"),
        "shape": {name: getattr(shape, name) for name in ("layers", "width", "heads", "length", "vocabulary")},
        "sequences": sequences,
        "step_seconds": statistics.median(turn["none"] for turn in rounds),
        "ratios": {
            name: {"median": statistics.median(values), "least": values[0], "largest": values[-1]}
            for name, values in ratios.items()
        },
    }


def main() -> None:
    args = command_line(__doc__, "controls", ("cpu", "gpu")).parse_args()
    turns = 1 if args.quick else TURNS
    if args.gpu:
        shape = Shape(vocabulary=32768, layers=12, width=768, heads=12, kv_heads=12, hidden=2048, length=1024)
        results = measure(shape, "cuda", 16, 5, turns)
    else:
        torch.set_num_threads(1)
        shape = Shape(vocabulary=4096, layers=4, width=256, heads=4, kv_heads=4, hidden=688, length=256)
        results = measure(shape, "cpu", 4, 1, turns)
    write(results, place(args))


if __name__ == "__main__":
    main()
