"""Names of remote checkpoints: what they say, which sources a pattern stands for, and what tells contents apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from locater.errors import LocaterError
from locater.sources.listing import expand_remote as expand
from locater.sources.listing import remote_identity as identity
from locater.sources.remote.address import remote_address
from tests.range_server import RangeServer


def put(server: RangeServer, folder: str, **files: str) -> Path:
    place = server.root / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (place / name.replace("__", ".")).write_text(text)
    return place


@pytest.mark.parametrize(
    ("text", "root", "path", "revision"),
    [
        ("hf://org/model", "org/model", "", None),
        ("hf://org/model@step1/inner/model.safetensors", "org/model", "inner/model.safetensors", "step1"),
        ("hf://org/model@refs/pr/3/inner", "org/model", "inner", "refs/pr/3"),
        ("hf://org/model@a%2Fb", "org/model", "", "a/b"),
        ("hf://gpt2@main", "gpt2", "", "main"),
        ("s3://bucket/run/step-1/", "bucket", "run/step-1", None),
        ("az://container/run", "container", "run", None),
        ("https://host:81/x/model.safetensors", "https://host:81", "x/model.safetensors", None),
    ],
)
def test_parts_of_a_name(text: str, root: str, path: str, revision: str | None) -> None:
    address = remote_address(text)
    assert address is not None
    assert (address.root, address.path, address.revision) == (root, path, revision)
    assert remote_address(str(address)) == address
    assert remote_address(str(Path(text))) == address, "a Path of it has lost a slash"


def test_a_signature_is_kept_and_not_shown() -> None:
    address = remote_address("https://me:secret@host/x.safetensors?sig=secret")
    assert address is not None
    assert address.url == "https://me:secret@host/x.safetensors?sig=secret"
    assert str(address) == "https://host/x.safetensors"


@pytest.mark.parametrize(
    "text",
    ["hf://", "hf://org/model@", "s3://", "az:///", "gs://a//b", "https://", "hf://a/b@c@d", "https://[::1/x"],
)
def test_names_that_name_nothing(text: str) -> None:
    with pytest.raises(LocaterError, match="write"):
        remote_address(text)


@pytest.mark.parametrize("text", ["org/model", "/tmp/x", "folder", "C:/models/x"])
def test_other_names(text: str) -> None:
    assert remote_address(text) is None
    assert expand(text) == [text]


def test_revisions_of_the_hub(hub: RangeServer) -> None:
    for revision in ("main", "step10", "step9", "step100", "v9", "late%2Fstep1"):
        put(hub, f"org/run/{revision}", config__json="{}")
    assert expand("hf://org/run@step*") == ["hf://org/run@step9", "hf://org/run@step10", "hf://org/run@step100"]
    assert expand("hf://org/run@v?/inner") == ["hf://org/run@v9/inner"], "tags too"
    assert expand("hf://org/run@late%2F*") == ["hf://org/run@late%2Fstep1"]
    assert expand("hf://org/run@step9") == ["hf://org/run@step9"], "not asked for"
    with pytest.raises(LocaterError, match=r"@none\*: no branch or tag matches \(there are 6: "):
        expand("hf://org/run@none*")
    with pytest.raises(LocaterError, match="hf://org/nothing@x\\*: no such model on the hub"):
        expand("hf://org/nothing@x*")
    with pytest.raises(LocaterError, match="only the revision"):
        expand("hf://org/mo*")


def test_a_plain_server_lists_nothing() -> None:
    with pytest.raises(LocaterError, match="does not list"):
        expand("https://host/step-*")


def test_identity_on_the_hub_follows_the_content(hub: RangeServer) -> None:
    for revision, text in (("main", "one"), ("step1", "one"), ("step2", "two")):
        put(hub, f"org/run/{revision}", config__json="{}", model__safetensors=text, README__md=revision)
    first, second, third = (identity(f"hf://org/run@{name}") for name in ("main", "step1", "step2"))
    assert first == second != third, "equal files are equal, whatever the revision and the README"
    assert identity("org/run") == first
    assert not hub.data_requests()
    put(hub, "org/run/main", config__json="{ }")
    assert identity("hf://org/run") != first
    put(hub, "org/empty/main", README__md="nothing")
    with pytest.raises(LocaterError, match="hf://org/empty: no weights there"):
        identity("hf://org/empty")


def test_identity_of_a_plain_url(server: RangeServer) -> None:
    put(server, "a", config__json="{}", model__safetensors="one")
    put(server, "b", config__json="{}", model__safetensors="two")
    a, b, file = (identity(f"{server.url}/files/{x}") for x in ("a", "b", "a/model.safetensors"))
    assert a != b
    assert a == file
    with pytest.raises(LocaterError, match="no weights there"):
        identity(f"{server.url}/files/none")


def test_prefixes_of_a_bucket(bucket: Any) -> None:
    for step, text in ((10, "ten"), (9, "nine"), (100, "ten")):
        bucket.put_object(Bucket="runs", Key=f"run/step-{step}/model.safetensors", Body=text)
        bucket.put_object(Bucket="runs", Key=f"run/step-{step}/config.json", Body="{}")
    bucket.put_object(Bucket="runs", Key="run/single-1.safetensors", Body="x")
    steps = [f"s3://runs/run/step-{n}" for n in (9, 10, 100)]
    assert expand("s3://runs/run/step-*") == steps
    assert expand("s3://runs/r*/step-1*") == steps[1:]
    assert expand("s3://runs/run/*.safetensors") == ["s3://runs/run/single-1.safetensors"]
    with pytest.raises(LocaterError, match="no folder or weights file matches"):
        expand("s3://runs/none/*")
    with pytest.raises(LocaterError, match=r"s3://nobody/x: there is no bucket nobody|s3://nobody/x: no such"):
        expand("s3://nobody/x/*")
    nine, ten, hundred = map(identity, steps)
    assert nine != ten == hundred
    with pytest.raises(LocaterError, match="no weights there"):
        identity("s3://runs/none")
