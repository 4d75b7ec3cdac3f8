"""What the paper says of accuracy and speed, which nothing here can measure: studies e and f.

They stand among its claims so that the count of verdicts shows them as open. Accuracy is that of models trained on
ImageNet and then fine-tuned for 300 epochs with binary attention; speed is that of a kernel for one-bit products.
"""

from __future__ import annotations

from locater_lab.engine.claims import Claim
from locater_lab.engine.reproduction import Study

FINE_TUNED = (
    "ImageNet, ADE20K and the paper's fine-tuning of large trained models, 300 epochs on eight GPUs for its classifiers"
)
KERNEL = (
    "an A100 and a kernel that multiplies bits: the paper's public code has none, and this package computes the products "
    "of signs in floating point"
)

ACCURACY = (
    Claim(
        "e1", "After fine-tuning, binary attention classifies images as well as full precision does, or better",
        "top-1 accuracy on ImageNet less that of full precision, DeiT-T, in points (published: 72.88 against 72.2)", "at least", 0.0,
        where="abstract",
    ),
    Claim(
        "e2", "It segments images as well as full precision does, or better",
        "mean intersection over union on ADE20K less that of full precision, DeiT-T, in points (published: 39.93 against 39.82)",
        "at least", 0.0, where="abstract",
    ),
    Claim(
        "e3", "In diffusion transformers it generates images as well as full precision does, or better",
        "FID on ImageNet less that of full precision, DiT-XL/2 (as a summary has it: 2.19 against 2.27)", "at most", 0.0,
        where="abstract",
    ),
)  # fmt: skip

SPEED = (
    Claim(
        "f1", "Binary attention is more than twice as fast as FlashAttention2",
        "time of FlashAttention2 over that of binary attention, A100", "at least", 2.0, where="abstract",
    ),
)  # fmt: skip

ACCURACY_STUDY = Study("accuracy after fine-tuning", ACCURACY, needs=FINE_TUNED)
SPEED_STUDY = Study("speed", SPEED, needs=KERNEL)
