"""Every way in which reading from elsewhere fails: one line that names the culprit and the way out, and never a wrong
number. What can be repaired (a cut connection, a busy server, an expired address) ends with the right rows.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import locater
from locater.errors import LocaterError
from locater.sources.remote import Traffic, http_client
from locater.sources.remote.address import remote_address
from locater.sources.remote.folders import read_range
from tests import ROOT
from tests.conftest import Result
from tests.processes import hears_interrupts, python
from tests.range_server import Fault, RangeServer, Request
from tests.sources.test_remote_scan import rows, saved

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("kept") / "x", "llama", shards="600KB")


@pytest.fixture
def model(server: RangeServer, kept: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A URL, with short waits between tries."""
    shutil.copytree(kept, server.root / "x")
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    return f"{server.url}/files/x"


def refused(run: Run, source: str, *options: str) -> str:
    """The one line of a scan that is refused."""
    result = run("scan", source, *options)
    assert (result.status, result.out) == (2, ""), result
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("locater")] or _ended()
    return lines[0]


def _ended() -> bool:
    """Whether all threads of a failed scan end by themselves, soon."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(thread.name.startswith("locater") for thread in threading.enumerate()):
            return True
        time.sleep(0.02)
    return False


def is_data(request: Request) -> bool:
    """Whether bytes behind the first request are asked for."""
    return request.range is not None and request.range[0] > 0


REFUSED: dict[str, tuple[Callable[[Request], Fault | None], str]] = {
    "changed": (
        lambda request: Fault(version="2") if is_data(request) else None,
        r"locater: http://.*\.safetensors: changed while it was read: start again",
    ),
    "changed, and the server ignores If-Match": (
        lambda request: Fault(headers={"ETag": '"other"'}) if is_data(request) else None,
        r"\.safetensors: changed while it was read: start again",
    ),
    "no ranges": (
        lambda request: Fault(ranges=False) if request.range else None,
        r"\.safetensors: its server does not send ranges of files: add --download",
    ),
    "no ranges any more": (
        lambda request: Fault(ranges=False) if is_data(request) else None,
        r"\.safetensors: its server does not send ranges of files: add --download",
    ),
    "bytes of another place": (
        lambda request: Fault(shift=8) if is_data(request) else None,
        r"\.safetensors: its server sent bytes from \d+ and not from \d+: refused",
    ),
    "busy": (
        lambda request: Fault(status=503, headers={"Retry-After": "0"}) if is_data(request) else None,
        r"\.safetensors: the server answers 503 Service Unavailable \(5 tries\): try again later",
    ),
    "busy for an hour": (
        lambda request: Fault(status=429, headers={"Retry-After": "3600"}),
        r"the server answers 429 Too Many Requests and asks to wait 3,600 s: try again after that",
    ),
    "always cut": (
        lambda request: Fault(cut=0) if is_data(request) else None,
        r"\.safetensors: the connection is cut \(5 tries\): try again later",
    ),
    "forbidden": (
        lambda request: Fault(status=403) if is_data(request) else None,
        r"\.safetensors: its server refuses access \(403 Forbidden\)",
    ),
    "gone": (
        lambda request: Fault(status=404) if is_data(request) else None,
        r"\.safetensors: no such file there",
    ),
    "shorter": (
        lambda request: Fault(status=416) if is_data(request) else None,
        r"\.safetensors: shorter than it was: changed while it was read",
    ),
    "redirected in a circle": (
        lambda request: Fault(status=302, headers={"Location": request.path}),
        r"more than 5 redirections",
    ),
    "compressed": (
        lambda request: Fault(headers={"Content-Encoding": "gzip"}) if request.range else None,
        r"its server answers 206 with a compressed body, which has no ranges: add --download",
    ),
    "not JSON": (
        lambda request: Fault(status=200, body=b"<html>") if request.path.endswith("config.json") else None,
        r"x/(adapter_)?config\.json: not readable as JSON",
    ),
    "a page in place of weights": (
        lambda request: Fault(status=200, body=b"<html>") if request.range else None,
        r"\.safetensors: not a safetensors file, or truncated in its header \(6 bytes\)",
    ),
    "no weights": (
        lambda request: Fault(status=404) if request.path.endswith((".safetensors", "index.json")) else None,
        r"/files/x: no weights there \(expected model\.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED])
def test_refused_in_one_line(run: Run, server: RangeServer, model: str, name: str) -> None:
    server.fault, expected = REFUSED[name]
    line = refused(run, model)
    assert re.search(expected, line), line


def test_a_truncated_file(run: Run, server: RangeServer, model: str) -> None:
    path = next((server.root / "x").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path.name}: truncated" in refused(run, model)


def test_a_cut_body_is_resumed_where_it_ended(server: RangeServer, model: str, kept: Path) -> None:
    server.fault = lambda request: Fault(cut=1000) if is_data(request) and request.number < 5 else None
    assert rows(model) == rows(kept)
    ranges = [r.range for r in server.requests if is_data(r) and r.range]
    assert any((start + 1000, stop) in ranges for start, stop in ranges), "from the offset, not from the beginning"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_when_it_says(
    server: RangeServer, model: str, kept: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.0)
    seen: dict[tuple[str, tuple[int, int]], list[float]] = {}

    def busy(request: Request) -> Fault | None:
        if not is_data(request) or request.range is None:
            return None
        times = seen.setdefault((request.path, request.range), [])
        times.append(time.monotonic())
        return Fault(status=status, headers={"Retry-After": "0.3"}) if len(times) == 1 else None

    server.fault = busy
    assert rows(model) == rows(kept)
    assert seen
    assert all(len(times) == 2 and times[1] - times[0] >= 0.3 for times in seen.values())


def test_five_tries_and_no_more(server: RangeServer, model: str) -> None:
    server.fault = lambda request: Fault(status=503) if is_data(request) else None
    with pytest.raises(LocaterError, match="5 tries"):
        rows(model)
    counts: dict[Any, int] = {}
    for request in filter(is_data, server.requests):
        counts[request.path, request.range] = counts.get((request.path, request.range), 0) + 1
    assert max(counts.values()) == 5


def test_a_server_that_stalls(
    run: Run, server: RangeServer, model: str, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "READ_SECONDS", 1.0)  # enough for honest answers on a busy machine
    stalled: list[Request] = []

    def stall(request: Request) -> Fault | None:
        if is_data(request) and not stalled:
            stalled.append(request)
            return Fault(stall=3.0)
        return None

    server.fault = stall
    assert rows(model) == rows(kept)
    monkeypatch.setattr(http_client, "READ_SECONDS", 0.2)
    server.fault = lambda request: Fault(stall=0.5) if is_data(request) else None
    assert "does not answer in time (5 tries): try again later" in refused(run, model)


def test_nobody_there(run: Run, server: RangeServer) -> None:
    server.close()
    assert "cannot be reached (Connection refused)" in refused(run, f"{server.url}/files/x")
    assert "cannot be found (is there a network?)" in refused(run, "https://no-such-host.invalid/x")


def test_no_trusted_certificate(run: Run, tmp_path: Path) -> None:
    """A server with a certificate of its own making is not read."""
    import http.server
    import ssl

    made = subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 1 -subj /CN=localhost".split(),
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    running.socket = context.wrap_socket(running.socket, server_side=True)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    try:
        line = refused(run, f"https://127.0.0.1:{running.server_port}/x")
    finally:
        running.shutdown()
        running.server_close()
    assert "the certificate of 127.0.0.1" in line
    assert "is not trusted" in line


@pytest.fixture
def hub_model(hub: RangeServer, kept: Path, monkeypatch: pytest.MonkeyPatch) -> RangeServer:
    shutil.copytree(kept, hub.root / "org" / "model" / "main")
    monkeypatch.setattr(http_client, "FIRST_WAIT", 0.01)
    return hub


def test_an_expired_address_is_asked_for_once_more(hub_model: RangeServer, kept: Path) -> None:
    hub_model.lifetime = 0.5

    def stall(request: Request) -> Fault | None:
        if not request.path.endswith("/config.json") or request.method != "GET":
            return None
        hub_model.lifetime = 3600.0  # of the next addresses: a busy machine may take longer than 0.5 s
        return Fault(stall=0.6)

    hub_model.fault = stall
    assert rows("hf://org/model") == rows(kept)
    heads = [r.path for r in hub_model.requests if r.method == "HEAD" and r.path.endswith(".safetensors")]
    assert len(heads) > len(set(heads)), "addresses did expire"


def test_an_address_that_stays_forbidden(run: Run, hub_model: RangeServer) -> None:
    hub_model.fault = lambda r: Fault(status=403) if r.path.startswith("/cdn/") else None
    assert "its server refuses access (403 Forbidden)" in refused(run, "hf://org/model")
    heads = [r.path for r in hub_model.requests if r.method == "HEAD" and r.path.endswith(".safetensors")]
    assert max(heads.count(path) for path in heads) == 2


def test_another_content_behind_an_expired_address(run: Run, hub_model: RangeServer) -> None:
    """The hub names another content for the same commit: its two parts are not mixed."""
    place = hub_model.root / "org" / "model" / "main"

    def expire(request: Request) -> Fault | None:
        if request.path.startswith("/cdn/") and is_data(request):
            path = place / request.path.rpartition("/")[2]
            path.write_bytes(path.read_bytes()[:-4] + b"1234")
            return Fault(status=403)
        return None

    hub_model.fault = expire
    assert "changed while it was read: start again" in refused(run, "hf://org/model")


def test_a_gated_model(run: Run, hub_model: RangeServer) -> None:
    hub_model.gated["org/model"] = "hf_good"
    line = refused(run, "hf://org/model")
    assert "the hub refuses access: Access to model org/model is restricted. You must have access to it" in line
    assert "log in (hf auth login, or HF_TOKEN)" in line


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf://org/nothing", "hf://org/nothing: no such model on the hub, or it is private: correct the name, or log in"),
        ("org/nothing", "org/nothing: no such file or folder, and no such model on the hub, or it is private"),
        ("hf://org/model@late", "hf://org/model@late: there is no revision 'late' (a branch, a tag or a commit)"),
        ("hf://org/model/inner", "hf://org/model/inner: no weights there (expected model.safetensors"),
        ("hf://org/model/x.safetensors", "hf://org/model/x.safetensors: no such file there"),
        ("hf://org/model/model-00001-of-00004.safetensors", "shards of model.safetensors.index.json: give the folder hf"),
        ("hf://org/model@step*", "hf://org/model@step*: stands for several checkpoints: give one of them"),
        ("ftp://org/model", "ftp://org/model: addresses begin with hf://, s3://, gs://, az:// or https://"),
        ("hf://or@g@/x", "not the name of a model on the hub: write hf://org/model@revision"),
    ],
)  # fmt: skip
def test_names_that_the_hub_does_not_have(run: Run, hub_model: RangeServer, source: str, expected: str) -> None:
    assert expected in refused(run, source)


def test_a_busy_hub(run: Run, hub_model: RangeServer, kept: Path) -> None:
    hub_model.fault = lambda r: Fault(status=429, headers={"Retry-After": "0"}) if r.number < 3 else None
    assert rows("hf://org/model") == rows(kept)
    hub_model.fault = lambda r: Fault(status=503) if r.path.startswith("/api/") else None
    assert "hf://org/model: the hub answers 503 (5 tries): try again later" in refused(run, "hf://org/model")


def test_a_hub_that_stalls(run: Run, hub_model: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from locater.sources.listing import expand_remote as expand
    from locater.sources.remote import hub

    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    hub_model.fault = lambda r: Fault(stall=1.0)
    assert "hf://org/model: the hub cannot be reached (is there a network?)" in refused(run, "hf://org/model")
    with pytest.raises(LocaterError, match="the hub cannot be reached"):
        expand("hf://org/model@*")


def test_offline(run: Run, hub_model: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "the hub did not return it: HF_HUB_OFFLINE is set" in refused(run, "hf://org/model")
    assert not hub_model.requests


def test_missing_packages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert "needs the huggingface_hub package: pip install 'locater[remote]'" in refused(run, "hf://org/model")
    assert "needs the huggingface_hub package: pip install 'locater[remote]'" in refused(run, "org/model")
    assert "needs the obstore package: pip install 'locater[remote]'" in refused(run, "s3://bucket/x")


def test_plain_urls_need_no_package(server: RangeServer, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(kept, server.root / "x")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert rows(f"{server.url}/files/x") == rows(kept)


def test_buckets(run: Run, bucket: Any) -> None:
    bucket.put_object(Bucket="runs", Key="x/README.md", Body="x")
    assert "s3://runs/none: no weights there" in refused(run, "s3://runs/none")
    assert (
        "no weights there (expected model.safetensors, its index or pytorch_model.bin; there is README.md)"
        in refused(run, "s3://runs/x")
    )
    assert "s3://runs/x/y.safetensors: no such file there" in refused(run, "s3://runs/x/y.safetensors")
    assert "s3://nobody/x: there is no bucket nobody" in refused(run, "s3://nobody/x")
    assert "write az://container/path" in refused(run, "az://")


def test_no_credentials(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    from locater.sources.remote import buckets

    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    buckets._store.cache_clear()
    assert "no credentials for the bucket were found: set AZURE_STORAGE_ACCOUNT_NAME" in refused(
        run, "az://container/x"
    )


@pytest.fixture
def object_of(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """An object that obstore reads from the server with faults, as S3 would send it."""
    pytest.importorskip("obstore")
    from locater.sources.remote import buckets
    from locater.sources.remote.folders import ObjectFile

    (server.root / "bucket").mkdir()
    (server.root / "bucket" / "x").write_bytes(bytes(range(250)) * 100)
    settings = {"AWS_ENDPOINT": f"{server.url}/files", "AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    buckets._store.cache_clear()
    address = remote_address("s3://bucket/x")
    assert address is not None
    return lambda: ObjectFile(address, Traffic())


@pytest.mark.parametrize(
    "fault",
    [
        lambda r: Fault(status=503) if r.number < 4 else None,
        lambda r: Fault(cut=300) if r.number == 1 else None,
        lambda r: Fault(stall=0.1),
    ],
)
def test_objects_that_come_in_the_end(server: RangeServer, object_of: Callable[[], Any], fault: Any) -> None:
    server.fault = fault
    file = object_of()
    assert bytes(read_range(file, 100, 2100)) == (bytes(range(250)) * 100)[100:2100]
    assert file.size == 25_000
    assert len(read_range(file, 24_990, 30_000)) == 10, "an object ends where it ends"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (lambda r: Fault(version="2") if r.number > 1 else None, "s3://bucket/x: changed while it was read: start again"),
        (lambda r: Fault(headers={"ETag": '"2"'}) if r.number > 1 else None, "s3://bucket/x: changed while it was read"),
        (lambda r: Fault(ranges=False) if r.number > 1 else None, "s3://bucket/x: .*range"),
        (lambda r: Fault(status=403) if r.number > 1 else None, "s3://bucket/x: the bucket refuses access: set AWS_ACC"),
        (lambda r: Fault(status=404) if r.number > 1 else None, "s3://bucket/x: no such object or bucket"),
    ],
)  # fmt: skip
def test_objects_that_are_refused(server: RangeServer, object_of: Callable[[], Any], fault: Any, expected: str) -> None:
    server.fault = fault
    file = object_of()
    assert bytes(read_range(file, 0, 100)) == bytes(range(100))
    with pytest.raises(LocaterError, match=expected) as error:
        read_range(file, 100, 200)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_an_interrupt_ends_a_stalled_scan(server: RangeServer, kept: Path) -> None:
    """Ctrl-C while threads wait for a server: status 130, at once, and not a word."""
    shutil.copytree(kept, server.root / "x")
    waiting = threading.Event()

    def stall(request: Request) -> Fault | None:
        if not is_data(request):
            return None
        waiting.set()
        return Fault(stall=90.0)

    server.fault = stall
    process = subprocess.Popen(
        [python(), "-m", "locater", "scan", f"{server.url}/files/x"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hears_interrupts,
    )  # fmt: skip
    assert waiting.wait(60)
    time.sleep(0.3)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=80)
    assert (process.returncode, out, err) == (130, "", "")
    assert time.monotonic() - began < 45, "it has not waited for the server"


def test_layers_of_a_failed_read_stay_readable(server: RangeServer, model: str, kept: Path) -> None:
    """A temporary failure while a map is read does not spoil the layer."""
    layer = locater.attention_layers(model)[0]
    server.fault = lambda request: Fault(status=503)
    with pytest.raises(LocaterError, match="5 tries"):
        layer.query.weight()
    server.fault = lambda request: None
    assert layer.query.weight().equal(locater.attention_layers(kept)[0].query.weight())
