"""--task diffusion: noisy images and their targets, fixed noise, a model that learns to denoise, and images drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from locater.commands.scanning import scan
from locater.errors import LocaterError
from locater_lab.models.noise_and_patches import from_patches, noisy_images, sample_images, to_patches
from locater_lab.train import Plan, Result, Shape, Transformer, load
from locater_lab.train import run as train
from locater_lab.train.data import open_data
from tests.conftest import Result as Ran
from tests.lab.train.test_parts import images

CPU = torch.device("cpu")


def plan(folder: Path, **options: Any) -> Plan:
    small = dict(layers=1, width=32, heads=2, batch=20, device="cpu", out=str(folder / "run"))
    file = folder / "x.npz"
    return Plan(task="diffusion", images=str(file if file.exists() else images(file)), **{**small, **options})


def test_a_noisy_image_and_its_velocity_give_back_image_and_noise() -> None:
    rng = np.random.default_rng(0)
    x, e, t = rng.normal(size=(5, 4, 4, 2)), rng.normal(size=(5, 4, 4, 2)), rng.uniform(size=5)
    inputs, v = (y.numpy() for y in noisy_images(torch.tensor(x), torch.tensor(e), torch.tensor(t)))
    turn = np.exp(0.5j * np.pi * t)[:, None, None, None]  # image and noise are two axes, turned by the level
    z, level = inputs[..., :-1], inputs[..., -1]
    assert np.abs((z + 1j * v) * turn - (x + 1j * e)).max() < 1e-12
    assert np.abs(level - t[:, None, None]).max() == 0


def test_held_out_noise_is_that_of_the_image_whatever_the_seed_and_the_batch(tmp_path: Path) -> None:
    def whole(most: int | None = None, **options: Any) -> list[torch.Tensor]:
        pairs = open_data(plan(tmp_path, **options), tmp_path, CPU).windows("report", most)
        return [torch.cat(parts) for parts in zip(*pairs, strict=True)]

    first, other, few = whole(), whole(seed=3, batch=7), whole(most=9)
    for a, b, c in zip(first, other, few, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[:9], c)
    levels = first[0][:, 0, 0, -1].sort().values
    assert float((levels - (torch.arange(200) + 0.5) / 200).abs().max()) < 0.02, "even over all levels"
    assert first[1].shape == (200, 4, 16)


def test_batches_have_noise_of_their_own(tmp_path: Path) -> None:
    data = open_data(plan(tmp_path, batch=90), tmp_path, CPU)
    assert all(torch.equal(a, b) for a, b in zip(data.batch(1), data.batch(1), strict=True))
    (inputs, targets), (again, _) = data.batch(0), data.batch(2)  # two batches are an epoch
    assert not torch.equal(inputs, again)
    z, t = inputs[..., :-1].double(), inputs[:, :1, :1, -1:].double() * math.pi / 2
    v = from_patches(targets, 4, (8, 8, 1)).double()
    image, noise = t.cos() * z - t.sin() * v, t.sin() * z + t.cos() * v
    assert float(((image + 1) * 127.5).frac().mul(2).sub(1).abs().sub(1).abs().max()) < 1e-2, "whole pixels"
    assert abs(float(noise.mean())) < 0.05
    assert float(noise.std()) == pytest.approx(1, abs=0.05)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("diffusion")
    return train(plan(folder, steps=200, batch=60, rate=1e-2, scale=0.1, observe=100, evaluate=0, checkpoint=0))


def test_a_denoiser_learns_and_is_measured(trained: Result, tmp_path: Path) -> None:
    data = open_data(trained.plan, tmp_path, CPU)
    pairs = list(data.windows("report"))
    nothing = torch.cat([targets for _, targets in pairs]).square().mean()
    model = load(trained.model)
    with torch.no_grad():
        error = torch.cat([(model(inputs) - targets).double().square() for inputs, targets in pairs]).mean()
    assert trained.report_loss == pytest.approx(float(error), rel=1e-5)
    assert trained.report_loss < 0.5 * float(nothing)
    assert (trained.accuracy, trained.perplexity, trained.bits_per_byte) == (None, None, None)
    assert trained.report_entropy is not None
    assert trained.measures["row_mass"] == pytest.approx(1)
    assert len(scan(trained.model).rows) == 2
    assert Result.from_dict(trained.to_dict()) == trained


def test_patches_of_drawn_images_are_those_of_the_data(trained: Result) -> None:
    """Dark (30) or bright (180) on average, a standard deviation of 17 around it."""
    drawn = sample_images(load(trained.model), 40, steps=25, seed=1)
    assert (drawn.dtype, drawn.shape) == (torch.uint8, (40, 8, 8, 1))
    patches = to_patches(drawn, 4).double()
    means, bright = patches.mean(-1), patches.mean(-1) > 105
    assert float(((means - torch.where(bright, 180, 30)).abs() < 25).double().mean()) > 0.9
    assert 0.25 < float(bright.double().mean()) < 0.75
    assert 10 < float(patches.std(-1).mean()) < 25
    assert torch.equal(drawn, sample_images(load(trained.model), 40, steps=25, seed=1))


def test_only_a_denoiser_draws_images() -> None:
    shape = Shape(
        vocabulary=3, layers=1, width=16, heads=2, kv_heads=2, hidden=16, length=4, causal=False, image=(8, 8, 1)
    )
    with pytest.raises(LocaterError, match="needs a model of --task diffusion"):
        sample_images(Transformer(shape), 1)
    with pytest.raises(LocaterError, match="steps=0"):
        sample_images(Transformer(replace(shape, vocabulary=16, denoises=True)), 1, steps=0)


def test_every_mechanism_that_is_not_causal_denoises(tmp_path: Path) -> None:
    for attention in ("binary(grid=(2, 2))", "sigmoid", "doubly_normalized"):
        result = train(
            plan(tmp_path, attention=attention, steps=2, observe=0, checkpoint=0, out=str(tmp_path / attention[:4]))
        )
        assert math.isfinite(result.report_loss)
        assert load(result.model).shape.attention == attention


def test_wrong_options_are_refused(tmp_path: Path, run: Callable[..., Ran]) -> None:
    for line, why in (
        (("--task", "diffusion"), "task=diffusion and images=PATH go together"),
        (("--images", "x.npz"), "task=image or diffusion and images=PATH go together"),
        (("--task", "diffusion", "--images", "x.npz", "--corpus", "a"), "learns from images alone"),
        (("--task", "diffusion", "--images", "x.npz", "--length", "64"), "--length does nothing with --task diffusion"),
    ):
        refused = run("train", "--out", tmp_path / "run", *line)
        assert (refused.status, why in refused.err) == (2, True), refused.err
