"""The verdict of a run: in the loop, on the console when it ends or fails, from its log, and on its page."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from locater import Monitor
from locater.runs.record_sinks import read_run
from locater.runs.run_log import holds_run
from locater.runs.verdict import LASTING, LossCourse, RunVerdict, verdict_of, verdict_of_run
from locater.runs.watch_page import LogFollower, watch_page
from tests import ROOT
from tests.conftest import Result
from tests.families.decoders import GROUPED, make

Run = Callable[..., Result]
FALLING = [4.0 - 0.01 * step for step in range(120)]
INTERRUPTED = """
import torch
from locater import Monitor
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
model = Transformer(Shape(vocabulary=16, layers=1, width=8, heads=2, kv_heads=2, hidden=8, length=8)).train()
monitor = Monitor("run.jsonl").attach(model)
for step in range(4):
    if step == 3:
        raise KeyboardInterrupt
    loss = model(torch.arange(8)[None]).logsumexp(-1).mean()
    loss.backward()
    monitor.after_step(loss=loss)
"""


def judged(losses: list[float], warnings: list[dict[str, Any]] | None = None, outputs: int | None = None) -> RunVerdict:
    course = LossCourse()
    course.extend(enumerate(losses, 1))
    return verdict_of(course, warnings or [], outputs, observed=3)


def warned(step: int, layer: int, head: int, flag: str = "exploding", **more: Any) -> dict[str, Any]:
    return {"step": step, "layer": layer, "head": head, "flag": flag, **more}


def test_a_loss_that_falls_is_healthy() -> None:
    verdict = judged(FALLING)
    assert (verdict.state, verdict.heads, verdict.next) == ("healthy", (), "nothing to do")
    assert "no head was warned of in 3 observed steps" in verdict.why


def test_a_rise_that_lasts_is_a_failure_and_a_shorter_one_is_none() -> None:
    best = FALLING[-1]
    assert judged([*FALLING, *[best + 1] * (LASTING - 1)]).state == "healthy"
    risen = judged([*FALLING, *[best + 1] * (LASTING + 5)])
    assert risen.state == "failed"
    assert risen.verdict == "failed: the loss rose since step 123"  # a mean of five is 0.5 above it from the third on
    assert "before step 123: no warning of logits came before it" in risen.next
    assert judged([*FALLING, *[best + 1] * (LASTING + 5), *[best] * 20]).state == "recovered"


@pytest.mark.parametrize(("after", "state"), [([], "failed"), ([2.0] * 40, "recovered")])
def test_a_loss_that_is_not_finite_is_named(after: list[float], state: str) -> None:
    verdict = judged([*FALLING, math.nan, *after])
    assert verdict.state == state
    assert "not finite at step 121" in verdict.why


def test_a_run_without_losses_is_judged_by_its_heads() -> None:
    assert judged([]).state == "too short"
    assert judged([]).why.startswith("no loss was logged")
    assert judged([], [warned(51, 1, 3)]).state == "stressed"
    assert "lowest" not in judged([math.nan] * 3).why


def test_heads_are_named_in_the_order_of_their_warnings() -> None:
    some = [warned(51, 1, 3), warned(101, 0, 2), warned(51, 1, 0, "spread>5", controls=["SigmaReparam()"])]
    verdict = judged(FALLING, some)
    assert (verdict.state, verdict.since, verdict.heads) == ("stressed", 51, ((1, 3), (1, 0), (0, 2)))
    assert verdict.verdict == "3 heads under stress since step 51; the loss has not risen"
    assert "heads 1.3, 1.0 (exploding, spread>5) since step 51, 1 more later" in verdict.why
    assert verdict.next.endswith("train at a lower learning rate, or attach locater.SigmaReparam()")
    assert "attach" not in judged(FALLING, some[:2]).next, "nothing that was not tried on this model"


def test_heads_that_were_warned_of_after_the_rise_are_no_reason_for_it() -> None:
    losses = [*FALLING, *[FALLING[-1] + 1] * (LASTING + 5)]
    assert judged(losses, [warned(51, 1, 3)]).next == "train at a lower learning rate"
    late = judged(losses, [warned(151, 1, 3)])
    assert "since step 151, after the loss" in late.why
    assert late.next.startswith("look at the batches")


def test_warnings_of_something_else_bring_no_advice_about_rates() -> None:
    """Of a condition that a user gave: attention that is too even is no reason to lower the rate."""
    verdict = judged(FALLING, [warned(51, 1, 3, "entropy_ratio>0.9", controls=["SigmaReparam()"])])
    assert verdict.verdict == "1 head warned of since step 51; the loss has not risen"
    assert verdict.next == "look at these heads (locater watch)"
    for flag in ("spread>5", "max_logit > 100", "entropy_ratio<0.1", "locked"):
        assert "rate" in judged(FALLING, [warned(51, 1, 3, flag)]).next


def test_a_run_at_log_v_is_stuck_and_one_that_began_there_is_not() -> None:
    level = math.log(256)
    assert judged([level + 0.01 * (-1) ** step for step in range(60)], outputs=256).state == "stuck"
    assert judged([level + 0.01 * (-1) ** step for step in range(60)], outputs=None).state == "healthy"
    assert judged([level, *[level - 1] * 60], outputs=256).state == "healthy"
    assert judged([level] * 10, outputs=256).state == "too short"


def run_of(path: Path, steps: int, spoil: Any = None, **options: Any) -> Monitor:
    """A small model, trained; `spoil` changes logits."""
    torch.manual_seed(0)
    model = make("Llama", **GROUPED).train()
    monitor = Monitor(path, every=10, **options).attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    rows = torch.arange(8).repeat(2, 1)
    for _ in range(steps):
        logits = model(input_ids=rows).logits
        logits = logits if spoil is None else spoil(logits)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.after_step(loss=loss)
    return monitor


def test_the_log_gives_the_same_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = run_of(tmp_path / "locater.jsonl", 40)
    monitor.detach()
    verdict = monitor.verdict()
    assert verdict.state == "healthy"
    assert verdict_of_run(read_run(tmp_path)) == verdict
    said = capsys.readouterr().err
    assert said.count("Verdict") == 1
    assert f"the log is {tmp_path / 'locater.jsonl'}" in said
    assert all(line in said for line in verdict.lines())


def test_the_outputs_of_the_model_make_log_v(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = run_of(tmp_path / "locater.jsonl", 40, spoil=lambda logits: 0 * logits)
    monitor.detach()
    run = read_run(tmp_path)
    size = make("Llama", **GROUPED).config.vocab_size
    assert [record.get("outputs") for record in run.steps] == [size, None, None, None]
    assert verdict_of_run(run).state == monitor.verdict().state == "stuck"
    assert f"log V = {math.log(size):.4g}" in caplog.text


def test_a_loss_that_is_not_finite_is_told_once_and_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    monitor = run_of(tmp_path / "run.jsonl", 12, spoil=lambda logits: math.nan * logits, warn_on="")
    assert caplog.text.count("failed: the loss is not finite since step 1") == 1
    monitor.detach()
    assert caplog.text.count("Verdict") == 1


def test_a_loop_that_fails_is_told_at_the_end(tmp_path: Path) -> None:
    paths = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=tmp_path, capture_output=True, text=True, env=paths, check=False
    )
    assert "ended by KeyboardInterrupt after step 3" in done.stderr
    assert "the log is run.jsonl" in done.stderr


def test_doctor_reads_a_run(tmp_path: Path, run: Run) -> None:
    run_of(tmp_path / "locater.jsonl", 40, spoil=lambda logits: 0 * logits).detach()
    told = run("doctor", str(tmp_path), "--json", str(tmp_path / "out.json"))
    assert told.status == 1
    assert "Verdict   stuck: nothing was learned in 40 steps" in told.out
    assert json.loads((tmp_path / "out.json").read_text())["state"] == "stuck"
    refused = run("doctor", str(tmp_path / "locater.jsonl"), "--fail-on", "changed")
    assert refused.status == 2


def test_a_folder_with_a_model_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "locater.jsonl").write_text("")
    assert holds_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not holds_run(tmp_path)


def test_the_page_shows_it_and_follows_the_run(tmp_path: Path) -> None:
    log = tmp_path / "locater.jsonl"
    run_of(log, 40).detach()
    whole = log.read_bytes()
    assert '"state":"healthy"' in watch_page(read_run(log)).replace(" ", "")
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:20]))
    follower = LogFollower(log)
    first = follower.answer(0)
    assert first["verdict"]["state"] == "too short"
    log.write_bytes(whole)
    assert follower.answer(first["revision"])["verdict"]["state"] == "healthy"
