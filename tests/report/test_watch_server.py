"""`locater watch` as a server: many clients, slow ones, broken ones; logs that are replaced, grow long, or are none."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from locater import LocaterError
from locater.runs.run_log import RunReader, read_run
from locater.runs.watch_page import THREADS, LogFollower, Server, watch_page
from tests.conftest import Result
from tests.report.test_watch_page import ask, header, step, warning, write


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write(tmp_path / "run.jsonl", header(), step(0), warning(0))
    with Server(tmp_path / "run.jsonl") as opened:
        thread = threading.Thread(target=opened.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield opened
        opened.shutdown()


def connect(server: Server) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)
    client.settimeout(30)
    return client


def get(server: Server, target: str, host: str = "127.0.0.1") -> str:
    """The first line of the answer; empty where the connection was ended without one."""
    with connect(server) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while part := client.recv(65536):
            answer += part
    return answer.partition(b"\r\n")[0].decode()


def test_no_request_of_many_clients_is_lost(server: Server) -> None:
    revision = ask(server, 0)["revision"]
    start = threading.Barrier(200)

    def client(_: int) -> list[str]:
        start.wait(30)
        return [get(server, f"/run.json?after={revision}") for _ in range(5)]

    with ThreadPoolExecutor(200) as pool:
        answers = [line for lines in pool.map(client, range(200)) for line in lines]
    assert answers == ["HTTP/1.0 200 OK"] * 1000


def drip(client: socket.socket, seconds: float) -> None:
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        client.sendall(b"T")
        time.sleep(0.05)


def test_slow_clients_are_ended_and_others_answered(server: Server) -> None:
    server.patience = 0.5
    before = threading.active_count()
    slow = [connect(server) for _ in range(THREADS + 16)]
    try:
        for client in slow:
            client.sendall(b"GET / HT")
        assert get(server, "/run.json") == "HTTP/1.0 200 OK"
        assert threading.active_count() - before <= THREADS
        with pytest.raises(OSError, match=r"."):  # a byte now and then does not keep a connection
            drip(slow[0], 20)
        assert all(client.recv(10) == b"" for client in slow[1:])
    finally:
        for client in slow:
            client.close()
    assert get(server, "/") == "HTTP/1.0 200 OK"


@pytest.mark.parametrize("sent", [b"GET / HT", b""])
def test_an_honest_request_does_not_wait_for_slow_ones(server: Server, sent: bytes) -> None:
    """More clients than are answered at once send a part of a request, or nothing, and have minutes for the rest."""
    server.patience = 300.0
    slow = [connect(server) for _ in range(THREADS + 72)]
    try:
        for client in slow:
            client.sendall(sent)
        began = time.monotonic()
        assert get(server, "/run.json") == "HTTP/1.0 200 OK"
        assert time.monotonic() - began < 30, "under a second on a machine that has nothing else to do"
    finally:
        for client in slow:
            client.close()


def test_a_client_that_does_not_read_is_ended(tmp_path: Path) -> None:
    long = header(1, 1)
    long["layers"][0]["name"] = "x" * 8_000_000  # more than the buffers of a connection hold
    write(tmp_path / "run.jsonl", long)
    with Server(tmp_path / "run.jsonl") as server:
        server.patience = 0.5
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        with connect(server) as deaf:
            deaf.sendall(b"GET /run.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
            deadline = time.monotonic() + 60
            while not server._clients and time.monotonic() < deadline:
                time.sleep(0.01)
            while server._clients and time.monotonic() < deadline:
                time.sleep(0.05)
            assert not server._clients
        server.shutdown()


@pytest.mark.parametrize(
    "target",
    [
        "http://[",
        "/run.json?after=" + "9" * 5000,
        "/run.json?after=-1",
        "/run.json?after=x",
        "/?" + "&".join("a=1" for _ in range(99)),
    ],
)
def test_what_is_no_address_is_answered_in_a_word(
    server: Server, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert get(server, target) == "HTTP/1.0 400 Bad Request"
    assert capfd.readouterr().err == ""


# ---- logs that change ----


def test_a_log_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(time=1.0), step(0), step(10))
    follower = LogFollower(path)
    first = follower.answer(0)
    assert first["steps"] == [0, 10]
    other = write(tmp_path / "other.jsonl", header(time=2.0), *(step(at) for at in range(0, 50, 5)))
    with path.open("r+b") as file:  # the same file, written anew, and longer than before
        file.write(other.read_bytes())
        file.truncate()
    second = follower.answer(first["revision"])
    assert (second["keep"], second["steps"]) == (0, list(range(0, 50, 5)))
    assert second["curves"]["loss"] == [[at, pytest.approx(3 / (1 + at), rel=1e-4)] for at in range(0, 50, 5)]
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"step":45', b'"step":46'))  # as long as before, and another end
    assert follower.answer(second["revision"])["steps"][-1] == 46
    path.write_bytes(b"".join(text.splitlines(keepends=True)[:3]))  # shorter
    assert follower.answer(0)["steps"] == [0, 5]
    path.unlink()
    assert follower.answer(0)["steps"] == [0, 5]  # what was there is still shown
    write(path, header(1, 1), *(step(at, 1, 1) for at in range(80)))
    assert len(follower.answer(0)["layers"]) == 1


def test_a_poll_costs_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run.jsonl", header(), step(0))
    with path.open("a") as file:
        file.writelines(f'{{"kind":"loss","step":{at},"loss":{at % 7}.5}}\n' for at in range(1, 20_001))
    follower = LogFollower(path)
    first = follower.answer(0)
    assert len(first["curves"]["loss"]) < 2_000
    fed: list[int] = []
    feed = RunReader.feed

    def counted(self: RunReader, lines: Any) -> None:
        feed(self, (fed.append(1) or line for line in lines))  # type: ignore[func-returns-value]

    monkeypatch.setattr(RunReader, "feed", counted)
    with monkeypatch.context() as patch:
        patch.setattr(RunReader, "run", lambda self: pytest.fail("nothing is new"))
        assert set(follower.answer(first["revision"])) == {"revision", "age"}
    write(path, {"kind": "loss", "step": 20_001, "loss": 99.0})
    second = follower.answer(first["revision"])
    assert len(fed) == 1
    assert second["curves"]["loss"][-1] == [20_001, 99.0]
    assert second["last"] == 20_001


def held(action: Callable[[], object]) -> int:
    """Bytes that are allocated by Python at the most, beside what was there before."""
    tracemalloc.start()
    try:
        kept = action()
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_log_does_not_fill_the_memory(tmp_path: Path) -> None:
    """What is held grows with what a page draws, and not with the log."""
    path = write(tmp_path / "run.jsonl", header(8, 32))
    line = json.dumps(step(7, 8, 32)).replace('"step": 7', '"step": %d')
    with path.open("a") as file:
        file.writelines(line % at + "\n" for at in range(750))
    size = path.stat().st_size
    assert size > 7_000_000
    assert held(lambda: LogFollower(path, room=5_000).answer(0)) < size / 3
    assert held(lambda: watch_page(read_run(path, stored=True))) < 2 * held(lambda: read_run(path))
    eager, stored = read_run(path), read_run(path, stored=True)
    assert held(lambda: read_run(path, stored=True)) < size / 3 < held(lambda: read_run(path))
    assert watch_page(eager) == watch_page(stored)
    assert eager.to_json() == stored.to_json()


def test_numbers_that_stay_in_the_log_are_those_that_were_seen(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(), step(0), step(10))
    run = read_run(path, stored=True)
    text = path.read_bytes()
    path.write_bytes(text.replace(b'"step":10', b'"step":11').replace(b'"step": 10', b'"step": 11'))
    with pytest.raises(LocaterError, match="changed while it was read: start again"):
        watch_page(run)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locater.runs.run_log.JSON_LIMIT", 100_000)
    path = write(tmp_path / "run.jsonl", header(), step(0))
    with path.open("a") as file:
        file.write("x" * 200_000)
    said = "a line of more than 100,000 bytes, too large for a record of a run"
    with pytest.raises(LocaterError, match=said):
        read_run(path)
    assert said in LogFollower(path).answer(0)["error"]


def test_a_bad_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run.jsonl", header(), step(0), {"kind": "unheard of", "step": 1})
    follower, parsed = LogFollower(path), []
    monkeypatch.setattr("locater.runs.run_log.parse_record", lambda line: parsed.append(line) or json.loads(line))
    for _ in range(3):
        assert "line 3" in follower.answer(0)["error"]
    assert len(parsed) == 3
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    assert follower.answer(0)["steps"] == [0], "a repaired log is re-read"


def test_a_server_keeps_its_log_when_another_comes(tmp_path: Path) -> None:
    write(tmp_path / "locater.jsonl", header(), step(0))
    follower = LogFollower(tmp_path)
    first = follower.answer(0)
    write(tmp_path / "locater-2.jsonl", header(1, 1), step(5, 1, 1))
    write(tmp_path / "locater.jsonl", step(10))
    assert follower.answer(first["revision"])["last"] == 10
    os.utime(tmp_path / "locater-2.jsonl", (2**32, 2**32))
    assert set(follower.answer(follower._revision)) == {"revision", "age"}


def test_curves_that_were_followed_are_those_read_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(), step(0))
    follower = LogFollower(path)
    for at in range(10, 100, 10):
        write(
            path,
            step(at),
            *({"kind": "loss", "step": at + i, "loss": float(i), "scalars": {"grad_norm": 1.0 * i}} for i in (1, 2)),
        )
        found = follower.answer(0)
        if at == 50:
            write(path, header(), step(30))  # resumed from there
    assert found["curves"] == LogFollower(path).answer(0)["curves"]
    assert [point[0] for point in found["curves"]["grad_norm"]][:7] == [0, 10, 11, 12, 20, 21, 22]


# ---- what is no log ----


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"hello", "its first line does not begin with a JSON object"),
        (b"hello\n", "line 1 is not a run record"),
        (b"\x80\x02}q\x00X", "its first line does not begin with a JSON object"),
        (b'{"text": "a corpus"}\n', "comes before any run record: not a run log"),
        (json.dumps({"a": 1}, indent=1).encode(), "line 1 is not a JSON object"),
    ],
)
def test_a_file_that_is_no_log_is_refused_at_once(
    tmp_path: Path, run: Callable[..., Result], content: bytes, what: str
) -> None:
    (tmp_path / "other.jsonl").write_bytes(content)
    result = run("watch", tmp_path / "other.jsonl")
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert what in result.err
    assert str(tmp_path / "other.jsonl") in result.err


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(LocaterError, match="not a regular file"):
        Server(tmp_path / "pipe.jsonl")


def test_what_is_waited_for_is_said(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for change, said in (
        (lambda: None, "does not exist yet"),
        (path.touch, "is empty"),
        (lambda: path.write_text('{"kind":"ru'), "has no whole line yet"),
        (lambda: write(path, header()), ""),
    ):
        change()
        follower = LogFollower(path)
        follower.read_new_lines()
        assert follower.waiting().endswith(said)
        assert bool(follower.waiting()) == bool(said)
    assert LogFollower(tmp_path / "nowhere").waiting() == f"{tmp_path / 'nowhere'} does not exist yet"
