"""What a plan learns from: text, images, or sequences that are made as they are needed."""

from __future__ import annotations

from pathlib import Path

import torch

from locater_lab.train.batches import Data
from locater_lab.train.diffusion_data import read_noisy_images
from locater_lab.train.generated_data import make_copies, make_ngrams, make_numbers
from locater_lab.train.image_data import read_images
from locater_lab.train.plan import Plan
from locater_lab.train.text_classes import read_classes
from locater_lab.train.text_data import read_text_data


def open_data(plan: Plan, folder: Path, device: torch.device) -> Data:
    """The data of a plan. Nothing is written; a tokenizer that `folder` holds already is used again."""
    if plan.task == "diffusion" and plan.images is not None:
        return read_noisy_images(plan, Path(plan.images), device)
    if plan.images is not None:
        return read_images(plan, Path(plan.images), device)
    if plan.task == "sort":
        return make_numbers(plan, device)
    if plan.task == "copy":
        return make_copies(plan, device)
    if plan.task == "classify":
        return read_classes(plan, folder, device)
    if plan.task == "ngram":
        return make_ngrams(plan, device)
    return read_text_data(plan, folder, device)
