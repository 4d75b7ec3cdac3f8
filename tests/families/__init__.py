"""Tiny models of every supported family, one list of cases per file."""

from tests.families import decoders, encoders, more_decoders, more_encoders, own, torch_modules, vision_and_pairs

CASES = [
    *decoders.CASES,
    *encoders.CASES,
    *more_decoders.CASES,
    *more_encoders.CASES,
    *own.CASES,
    *torch_modules.CASES,
    *vision_and_pairs.CASES,
]
