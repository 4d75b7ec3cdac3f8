"""From images to batches: a folder of images or an array, at the size and range that a vision model expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.inputs.text import Batch

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif")


def image_batches(model: nn.Module, path: str | Path, count: int = 64, batch: int = 8) -> list[Batch]:
    """Batches of `pixel_values` from a folder of images, one image, or an .npy or .npz array (N, H, W) or (N, H, W, C).

    Images are resized to the size of the model and normalised with the mean and standard deviation in its
    preprocessor_config.json, or with 0.5 and 0.5.
    """
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None) or config
    size, channels = getattr(vision, "image_size", None), getattr(vision, "num_channels", 3)
    if not size:
        raise LocaterError(
            f"{type(model).__name__}: its configuration names no image size, so it does not take images: use --text"
        )
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    images = [
        torch.nn.functional.interpolate(x[None], (height, width), mode="bilinear", antialias=True)[0]
        for x in _read(path, count)
    ]
    pixels = torch.stack(
        [x.mean(0, keepdim=True).expand(channels, -1, -1) if len(x) != channels else x for x in images]
    )
    mean, spread = (torch.tensor(x, dtype=torch.float32).view(1, -1, 1, 1) for x in _mean_and_spread(model))
    return [{"pixel_values": part} for part in ((pixels - mean) / spread).split(batch)]


def shown_pixels(model: nn.Module, pixels: Tensor) -> Tensor:
    """A picture (C, H, W) as it was before it was normalised for the model: (H, W, 3), whole numbers 0 to 255."""
    mean, spread = (torch.tensor(x, dtype=torch.float32).view(-1, 1, 1) for x in _mean_and_spread(model))
    colours = (pixels * spread + mean).clamp(0, 1)
    colours = colours if len(colours) == 3 else colours[:1].expand(3, -1, -1)
    return (colours * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def _read(path: str | Path, count: int) -> list[Tensor]:
    """Images (C, H, W) between 0 and 1."""
    path = Path(path)
    if not path.exists():
        raise LocaterError(f"{path}: no such file or folder")
    if path.suffix in (".npy", ".npz"):
        return _from_array(path, count)
    names = sorted(p for p in path.iterdir() if p.suffix.lower() in PICTURES) if path.is_dir() else [path]
    if not names:
        raise LocaterError(f"{path}: contains no image ({', '.join(PICTURES)})")
    try:
        from PIL import Image
    except ImportError:
        raise LocaterError(
            "reading images needs the pillow package: pip install pillow, or give an .npy array"
        ) from None
    images = []
    for name in names[:count]:
        try:
            with Image.open(name) as image:
                images.append(torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255)
        except OSError as error:
            raise LocaterError(f"{name}: not a readable image ({first_line(error)})") from None
    return images


def _from_array(path: Path, count: int) -> list[Tensor]:
    """Images (C, H, W) of an .npy file, or of an .npz file: its array with `test` in the name, else its first."""
    try:
        array = np.load(path, allow_pickle=False)
        if isinstance(array, np.lib.npyio.NpzFile):
            names = [name for name in array.files if array[name].ndim in (3, 4)]
            if not names:
                raise LocaterError(f"{path}: no array of images in it, only {', '.join(array.files)}")
            array = array[next((name for name in names if "test" in name), names[0])]
    except (OSError, ValueError) as error:
        raise LocaterError(f"{path}: cannot be read as an array ({first_line(error)})") from None
    if array.ndim not in (3, 4) or not array.size:
        raise LocaterError(f"{path}: an array of shape {list(array.shape)}; images are (N, H, W) or (N, H, W, C)")
    images = torch.from_numpy(np.ascontiguousarray(array[:count]))
    scaled = images.float() / 255 if not images.is_floating_point() else images.float()
    if scaled.ndim == 3:
        return list(scaled[:, None])
    return list(scaled if scaled.shape[1] in (1, 3) and scaled.shape[-1] not in (1, 3) else scaled.permute(0, 3, 1, 2))


def _mean_and_spread(model: Any) -> tuple[list[float], list[float]]:
    """The normalisation that the model's preprocessor_config.json states, or 0.5 and 0.5."""
    path = Path(getattr(model, "name_or_path", "") or ".") / "preprocessor_config.json"
    try:
        config = json.loads(path.read_text())
        return config["image_mean"], config["image_std"]
    except (OSError, ValueError, KeyError):
        return [0.5], [0.5]
