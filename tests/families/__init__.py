"""Tiny models of every supported family, one list of cases per file."""

from tests.families import decoders, encoders, torch_modules

CASES = [*decoders.CASES, *encoders.CASES, *torch_modules.CASES]
