"""Shared fixtures: a small saved model to break, and the command line run in this process."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jaxtyping import install_import_hook

# Shapes and types of the pure number modules are checked at run time here; the hook must come before they are imported.
# `make test-gpu BIN=...` runs with the packages of a GPU machine, where beartype may be absent.
if find_spec("beartype") is not None:
    install_import_hook(
        ("locater.spectrum", "locater.measures", "locater.theory", "locater_lab.theory"), "beartype.beartype"
    )

from locater.amx import avoid_broken_amx
from tests import costs, summary
from tests.processes import end_interpreters
from tests.summary import pytest_terminal_summary  # noqa: F401 - a hook by its name

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit what is set here
    summary.avoided = avoid_broken_amx()

# what one test discovers is not kept for another, nor in the home of whoever runs the tests
os.environ["LOCATER_CACHE"] = "off"

# what a test compiles, it compiles itself: a pool of compilers would start beside each of the parallel processes
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

gc.disable()  # until everything is imported, see pytest_collection_finish

# tests run in parallel processes; threads inside tiny operations would only fight over the cores
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", metavar="I/N", help="run the I-th of N parts of the selected tests, for processes side by side"
    )
    parser.addoption("--shuffle", type=int, metavar="SEED", help="files, and tests within a file, in another order")
    parser.addoption("--costs", type=int, metavar="N", help="the N files and tests that take most processor time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(costs)


@pytest.hookimpl(trylast=True)  # after -m has deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        generator, place = random.Random(seed), {}
        for path in sorted({item.path for item in items}):
            place[path] = generator.random()
        generator.shuffle(items)
        items.sort(key=lambda item: place[item.path])
    if part := config.getoption("--part"):
        number, count = map(int, part.split("/"))
        items[:] = items[number - 1 :: count]


def pytest_collection_finish() -> None:
    """What is imported by now stays to the end, so it is not searched for garbage again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# for each kind of device that may come, torch.manual_seed keeps a text of where it was called: half of what a small test costs
seed_torch = torch.default_generator.manual_seed if torch.version.cuda is None else torch.manual_seed


def seed_generators() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries draw from it
    seed_torch(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> None:
    """What tests share is the same whichever of them asks for it first."""
    if fixturedef.scope != "function":
        seed_generators()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers in any order, alone, and in any worker."""
    seed_generators()


def pytest_sessionfinish() -> None:
    end_interpreters()


@dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`run("scan", path)`: the command as the shell would start it, with its exit status and what it printed."""
    from locater.cli import main

    def command(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["locater", *map(str, args)])
        monkeypatch.setenv("COLUMNS", "140")
        status = 0
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        printed = capsys.readouterr()
        return Result(status, printed.out, printed.err)

    return command


@pytest.fixture(scope="session")
def saved_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny grouped-query model on disk; tests copy it before they break it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=64, initializer_range=0.2)).save_pretrained(folder)
    return folder


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test attaches is taken off after it."""
    from locater.control.base import Control

    attached: list[Control] = []
    attach = Control.attach

    def noted(self: Control, model: torch.nn.Module) -> Control:
        attached.append(self)
        return attach(self, model)

    monkeypatch.setattr(Control, "attach", noted)
    yield
    for control in reversed(attached):
        control.detach()


@pytest.fixture(autouse=True)
def _nobody_listens_on() -> Iterator[None]:
    """A test that leaves something attached would change what the tests after it see."""
    from locater.calls import attention_interface

    before = attention_interface._users
    yield
    assert attention_interface._users == before, "something was left attached"
