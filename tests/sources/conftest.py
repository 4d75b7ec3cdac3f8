"""A server for the tests of remote checkpoints, and checkpoints to put there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.range_server import RangeServer, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    root = tmp_path / "served"
    root.mkdir()
    with served(root) as running:
        yield running


@pytest.fixture
def hub(server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    """The real client of the hub, pointed at the server, with an empty cache and no token."""
    constants = pytest.importorskip("huggingface_hub.constants")

    for name, value in {
        "ENDPOINT": server.url,  # as HF_ENDPOINT sets it, and what follows from it
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "no token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    return server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client to fill the bucket `runs` of moto's S3 with, which the real obstore reads."""
    moto = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("obstore")
    from locater.sources.remote import buckets

    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with redirect_stdout(StringIO()):
        running.start()
    host, port = running.get_host_and_port()
    settings = {"AWS_ENDPOINT": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=settings["AWS_ENDPOINT"], region_name="us-east-1")
    urlopen(Request(f"{settings['AWS_ENDPOINT']}/moto-api/reset", method="POST")).close()  # of servers before this one
    client.create_bucket(Bucket="runs")
    buckets._store.cache_clear()
    yield client
    buckets._store.cache_clear()
    running.stop()
