"""Further blocks that settings of a family make, for tests of Surgery and explain: parity has enough cases without them."""

from __future__ import annotations

from dataclasses import replace

from locater_lab.train import Shape
from tests.families.decoders import SHAPE, make
from tests.families.more_decoders import case
from tests.families.own import SIZES, Tiny, ids, tap
from tests.families.vision_and_pairs import VISION, build, pixels, tower
from tests.parity import EPS, Case, decoder_sites, tokens


def own(label: str, **kw: object) -> Case:
    return Case(label, lambda: Tiny(Shape(**SIZES, **kw)), ids, decoder_sites(2), ("sdpa",), tap, spread=1.3)


CASES = [
    case("stablelm-parallel", "StableLm", layer_norm_eps=EPS, use_parallel_residual=True),
    replace(
        case("gpt_neox-sequential", "Llama"),
        build=lambda: make("GPTNeoX", **SHAPE, layer_norm_eps=EPS, use_parallel_residual=False),
        batch=tokens,
    ),
    own("locater-post", norm="post"),
    own("locater-sandwich-alone", norm="sandwich"),
    own("locater-no-mlp", mlp="none"),
    own("locater-fairseq", norm="post", mlp="relu", build="fairseq"),
    own("locater-unnormed", norm="none"),
    Case(
        "siglip-vision-headless",
        lambda: build("SiglipVisionConfig", "SiglipVisionModel", **VISION, vision_use_head=False),
        pixels,
        tower(""),
    ),
]
