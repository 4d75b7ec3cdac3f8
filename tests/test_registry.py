"""The one registry: names, spellings, replacement, files of a folder loaded at once or later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from locater import LocaterError
from locater.registry import Registry


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package of two files, each with an ENTRY."""
    package = tmp_path / "two_files"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("ENTRY = ('one', 'uno')\n")
    (package / "two.py").write_text("ENTRY = ('two', 'due')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("two_files", "two_files.one", "two_files.two"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "two_files"


def test_an_entry_has_one_name_or_several_and_is_listed_once() -> None:
    registry = Registry[str]("family")
    registry.add("the llama family", "llama", "mistral")
    registry.add("the gpt family", "gpt2")
    assert list(registry) == ["llama", "mistral", "gpt2"]
    assert registry.entries() == ("the llama family", "the gpt family")
    assert registry["mistral"] == registry.lookup("mistral") == "the llama family"
    assert "bert" not in registry
    assert registry.get("bert") is None
    assert len(registry) == 3


def test_an_unknown_name_is_refused_in_one_line() -> None:
    registry = Registry[int]("fruit")
    with pytest.raises(LocaterError, match=r"^no fruit 'x': there are none$"):
        registry.lookup("x")
    registry.add(1, "apple")
    registry.add(2, "pear")
    with pytest.raises(LocaterError, match=r"^no fruit 'aple': did you mean 'apple'\? There are apple, pear$"):
        registry.lookup("aple")
    with pytest.raises(LocaterError, match=r"^no fruit 'zebra': there are apple, pear$"):
        registry.lookup("zebra")
    with pytest.raises(KeyError):
        registry["zebra"]


def test_a_name_that_is_taken_is_refused_unless_entries_may_be_replaced() -> None:
    fixed, open_to_all = Registry[int]("fruit"), Registry[int]("fruit", replaceable=True)
    for registry in (fixed, open_to_all):
        registry.add(1, "apple")
    with pytest.raises(LocaterError, match="the fruit 'apple' is already registered: choose another name"):
        fixed.add(2, "pear", "apple")
    assert dict(fixed) == {"apple": 1}, "nothing is taken where one name is refused"
    open_to_all.add(2, "pear", "apple")
    assert dict(open_to_all) == {"apple": 2, "pear": 2}


def test_spellings_of_a_name_are_one() -> None:
    registry = Registry[int]("control", spelling=lambda name: name.replace("_", "").lower())
    registry.add(1, "QKClip")
    assert registry["qk_clip"] == registry["QKCLIP"] == 1
    assert list(registry) == ["qkclip"]


def test_files_are_loaded_at_once(folder: str) -> None:
    registry = Registry[tuple[str, ...]]("number")
    registry.load(folder, ["one", "two"], "ENTRY", names=lambda entry: entry)
    assert list(registry) == ["one", "uno", "two", "due"]
    assert registry["due"] == ("two", "due")


def test_files_are_loaded_when_they_are_used(folder: str) -> None:
    registry = Registry[tuple[str, ...]]("number")
    registry.load_later(folder, ["one", "two"], "ENTRY")
    assert list(registry) == ["one", "two"]
    assert "two" in registry
    assert f"{folder}.one" not in sys.modules
    assert registry["one"] == ("one", "uno")
    assert f"{folder}.two" not in sys.modules
    assert registry.lookup("two") is registry["two"]
