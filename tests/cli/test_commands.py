"""The commands as a user meets them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import nn

from locater import scan
from locater.cli import load_offered_commands
from locater.cli.options import MEANINGS
from locater.cli.shell import MOVED
from locater.findings import FLAGS, flags_of
from tests.conftest import Result
from tests.processes import python

Run = Callable[..., Result]


def test_two_names_of_one_file_are_refused(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    """One of the two outputs would replace the other."""
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    for other in (page, f"{tmp_path}/./page.html", link):
        result = run("scan", saved_llama, "--json", other, "--report", page)
        assert (result.status, result.err) == (2, f"locater: --report {page}: give the page a file of its own\n")
    assert not page.exists()


def test_scan_writes_what_it_prints(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    result = run("scan", saved_llama, "--json", tmp_path / "a.json")
    assert result.status == 0
    assert f"Data written to {tmp_path / 'a.json'}" in result.out
    document = json.loads((tmp_path / "a.json").read_text())
    assert document == json.loads(run("scan", saved_llama, "--json", "-").out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json"]


def test_flagged_heads_come_first(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][8:16] *= 100  # head 1 of the last layer
    (tmp_path / "config.json").write_text((saved_llama / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    result = run("scan", tmp_path, "--fail-on", "sharp")
    assert result.status == 1
    assert result.err.startswith("locater: --fail-on: 1 head is sharp: 2.1 (H ratio 0.0")
    lines = [line.split() for line in result.out.splitlines()]
    first = lines[next(i for i, line in enumerate(lines) if line[:2] == ["layer", "head"]) + 1]
    assert first[:2] == ["2", "1"]
    assert "sharp" in first


def test_what_fails_is_counted_by_condition(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    """A head of NaN is not hidden behind one that is sharp."""
    tensors = load_file(saved_llama / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][8:16] *= 100
    tensors["model.layers.0.self_attn.q_proj.weight"][0, 0] = float("nan")
    (tmp_path / "config.json").write_text((saved_llama / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    result = run("scan", tmp_path, "--fail-on", "sharp, nonfinite")
    assert result.status == 1
    assert re.fullmatch(
        r"locater: --fail-on: 1 head is sharp: 2\.1 \(H ratio 0\.\d+\); 1 head is nonfinite: 0\.0\n", result.err
    )


def test_the_worst_head_is_named_first(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    """Whatever its layer; then others, and how many in all. A comparison says where it holds, and the worst number."""
    tensors = load_file(saved_llama / "model.safetensors")
    for head, factor in ((0, 200), (1, 900), (3, 400)):
        tensors[f"model.layers.{head % 3}.self_attn.q_proj.weight"][8 * head : 8 * head + 8] *= factor
    (tmp_path / "config.json").write_text((saved_llama / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    result = run("scan", tmp_path, "--fail-on", "sharp")
    spreads = {(row.layer, row.head): row.F for row in scan(tmp_path).rows if "sharp" in row.flags}
    order = sorted(spreads, key=lambda place: -spreads[place])
    assert len(order) == 3
    assert order != sorted(order), "the order of layers would name the same head first"
    worst, *others = (f"{layer}.{head}" for layer, head in order)
    assert f"3 heads are sharp, worst {worst} (H ratio 0.00" in result.err
    assert result.err.endswith(f"), then {', '.join(others)}\n")
    result = run("scan", tmp_path, "--fail-on", "spectral_norm>1e-9, M<1e9")
    every = sorted(scan(tmp_path).rows, key=lambda row: -row.spectral_norm)
    named = ", ".join(f"{row.layer}.{row.head}" for row in every[:6])
    assert (
        f"spectral_norm>1e-9 at {named} and {len(every) - 6} more (worst {every[0].spectral_norm:.3g}); " in result.err
    )
    lowest = min(scan(tmp_path).rows, key=lambda row: row.M)
    assert f"is below 1e+09 at {lowest.layer}.{lowest.head}, " in result.err


def test_a_flag_that_is_a_column_now_says_where_it_went(run: Run, saved_llama: Path) -> None:
    for flag, column in (("few-directions", "skew"), ("repels-itself", "M")):
        for command in (("scan", saved_llama), ("compare", saved_llama, saved_llama)):
            result = run(*command, "--fail-on", f"nonfinite, {flag}")
            assert (result.status, len(result.err.splitlines())) == (2, 1)
            assert f"--fail-on {flag}: no longer a flag" in result.err
            assert f"the column {column} of locater scan" in result.err
    assert run("scan", saved_llama, "--fail-on", "skew>1e9, skew<-1e9").status == 0


def test_fail_on_a_bound(run: Run, saved_llama: Path) -> None:
    assert run("scan", saved_llama, "--fail-on", "stable_rank<0").status == 0
    assert run("scan", saved_llama, "--fail-on", "stable_rank>=1, nonfinite").status == 1


def test_a_line_per_layer_when_wide(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 16, 64, batch_first=True), 4)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    out = run("scan", tmp_path, "--heads", 16).out
    assert "medians by layer" in out
    assert "layers.3.self_attn" in out
    assert "every head" not in out


def test_help_names_every_option(run: Run) -> None:
    text = run("scan", "--help").out
    for option in ("--json", "--eigenvalues", "--raw", "--length", "--fail-on", "--query", "--key", "--heads"):
        assert option in text


def test_a_switch_that_is_on_can_be_turned_off(run: Run, tmp_path: Path) -> None:
    tiny = "--layers 1 --width 16 --heads 2 --length 16 --batch 2 --steps 1 --task sort --vocabulary 32 --device cpu".split()
    done = run("train", *tiny, "--no-deterministic", "--out", tmp_path / "run")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["deterministic"] is False


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("scna", "Did you mean 'scan'? (locater --help)"),
        ("scan", "Missing argument 'MODEL' (locater scan --help)"),
        ("scan model --nonsense", "--nonsense (locater scan --help)"),
        ("scan model --length abc", "'--length'"),
        ("train --rate abc", "'--rate'"),
        ("demo extra", "(extra) (locater demo --help)"),
    ],
)
def test_wrong_usage_is_one_line(run: Run, arguments: str, names: str) -> None:
    done = run(*arguments.split())
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("locater: ")
    assert names in done.err.replace("'--nonsense'", "--nonsense")  # some versions of click quote it


def test_version_and_usage(run: Run) -> None:
    from locater import __version__

    assert run("--version").out == f"locater {__version__}\n"
    assert run("scan").status == 2
    assert run("fly").status == 2
    bare = run()
    assert (bare.status, bare.err) == (2, "")
    assert "Usage: locater" in bare.out


def test_the_command_in_a_process_of_its_own(saved_llama: Path) -> None:
    """`python -m locater`: clean JSON on standard output, nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "locater", "scan", str(saved_llama), "--json", "-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["heads"]) == 12


GATES = {  # commands that find something in the demo: status 1
    "scan": "scan {demo} --fail-on variance>0",
    "compare": "compare {demo} {demo}/twin --fail-on change_M>-1000",
    "probe": "probe {demo} --length 16 --tokens 64 --fail-on entropy>0",
    "fleet": "fleet {demo} --out {tmp}/heads --workers 0 --fail-on variance>0",
}


@pytest.mark.parametrize("command", GATES)
@pytest.mark.parametrize("waits", [False, True])
def test_a_reader_that_has_seen_enough_changes_no_verdict(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, waits: bool
) -> None:
    """`locater compare A B --fail-on fault | head -1` is a gate: its status is that of the whole command, and the files
    are written. The pipe is closed before the command begins, or after the first bytes of more than it can hold.
    """
    words = GATES[command].format(demo=files("locater") / "demo", tmp=tmp_path).split()
    data, page = tmp_path / "data.json", tmp_path / "page.html"
    read, write = os.pipe()
    reader = threading.Thread(target=lambda: (waits and os.read(read, 10), os.close(read)))
    with open(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        reader.start()
        if not waits:
            reader.join()
        result = run(*words, *(["--json", "-"] if waits else ["--json", data, "--report", page]))
        reader.join()
    assert result.status == 1, result.err
    assert "locater: --fail-on: " in result.err.splitlines()[-1]
    assert "Traceback" not in result.err
    if not waits:
        assert json.loads(data.read_text())["schema"]
        assert page.read_text().startswith("<!")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the full disk of Linux, and bash")
def test_the_status_of_a_pipeline_in_a_shell() -> None:
    """Standard output and standard error to a reader that goes after a byte of more than a pipe holds; a full disk, which
    is an error of its own.
    """
    demo = files("locater") / "demo"
    command = f"{python()} -m locater scan {demo} --eigenvalues --json - --fail-on 'variance>0'"
    ends = {"2>&1 | head -c 1": (1, ""), ">/dev/full": (2, "locater: output: No space left on device\n")}
    started = [
        subprocess.Popen(["bash", "-o", "pipefail", "-c", f"{command} {end}"], stdout=-1, stderr=-1, text=True)
        for end in ends
    ]
    for shell, expected in zip(started, ends.values(), strict=True):
        _, err = shell.communicate()
        assert (shell.returncode, err) == expected


def test_streams_that_were_closed_before_the_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """`>&-`, `2>&-`: nothing is said there, and nothing of it goes into the other stream."""
    words = ("scan", files("locater") / "demo", "--json", "-", "--fail-on", "variance>0")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert run(*words).status == 1
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        result = run(*words)
    assert result.status == 1
    assert len(json.loads(result.out)["heads"]) == 24


@pytest.mark.parametrize("command", ["probe", "explain"])
def test_standard_input_that_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    result = run(command, files("locater") / "demo", "--text", "-")
    assert (result.status, result.err) == (2, "locater: standard input: closed; give a file\n")


def test_help_and_import_without_torch_or_any_extra() -> None:
    """Nobody waits for torch or for what only a running command needs to read the help; `import locater` pulls no extra
    and not the libraries of the command line.
    """
    heavy = "torch transformers lightning pandas scipy triton locater.findings locater.report locater.results.scan"
    code = f"""
import sys, locater
print([m for m in '{heavy} rich typer'.split() if m in sys.modules])
sys.argv = ["locater", "--help"]
try:
    from locater.cli import main
    main()
finally:
    print([m for m in '{heavy}'.split() if m in sys.modules])
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert (lines[0], lines[-1]) == ("[]", "[]")
    assert all(any(name in line.split() for line in lines) for name in ("scan", "probe", "train", "reproduce"))


def test_a_run_is_watched_without_torch(tmp_path: Path) -> None:
    log, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    layers = [{"layer": 0, "name": "attention", "heads": 1, "kind": "self"}]
    lines = [
        {"kind": "run", "schema": 1, "source": "Model", "every": 50, "layers": layers, "columns": ["entropy"]},
        {"kind": "step", "step": 1, "loss": 2.0, "scalars": {}, "heads": {"entropy": [[1.5]]}},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = """
import sys
sys.argv = ["locater", "watch", *sys.argv[1:]]
try:
    from locater.cli import main
    main()
finally:
    print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code, log, "--report", page]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (printed[-1], page.is_file()) == ("False", True)


def test_the_version_and_a_command_of_its_own_without_a_search_for_others(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entry points of all installed packages take longer to read than the rest of `locater --version`."""
    asked: list[str] = []
    monkeypatch.setattr("locater.cli.offered_entries", lambda group: asked.append(group) or {})
    for words in (("--version",), ("--version", "--debug"), ("scan", "--help")):
        assert run(*words).status == 0
    assert asked == []
    run("--help")
    assert asked == ["commands"]


ORDERS = (
    "import locater", "import locater.commands.scanning", "from locater.results.probe import Probe",
    "import locater.cli, locater.commands.comparing",
)  # fmt: skip


@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="each order wants a fresh process, and without fork that is seconds each"
)
def test_names_mean_the_same_after_any_order_of_imports() -> None:
    """`locater.scan` is the function, whatever was imported first: no module bears its name. A child process for each
    order.
    """
    code = f"""
import inspect, os, sys, torch
for order in {ORDERS!r}:
    sys.stdout.flush()
    if not os.fork():
        exec(order)
        import locater
        for twice in range(2):
            kinds = [inspect.isfunction(x) for x in (locater.scan, locater.probe, locater.compare, locater.observe, locater.statistics)]
            import locater.commands.scanning, locater.commands.comparing, locater.commands.probing, locater.observing.observation
        print(order, *kinds, locater.Scan.__name__, set(locater.__all__) <= set(dir(locater)), hasattr(locater, "nothing"), flush=True)
        os._exit(0)
    os.wait()
from locater import *
import locater, locater_lab.train
print(*(type(getattr(locater, name)).__name__ for name in locater.__all__ if name.islower()))
print(locater.explain.decompose.__name__, locater.integrations.hf.attach.__name__, locater_lab.train.load.__name__)
"""
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    *orders, kinds, documented = done.stdout.splitlines()
    assert orders == [f"{order}{' True' * 5} Scan True False" for order in ORDERS], done.stderr
    assert set(kinds.split()) == {"module", "function", "str"}
    assert documented == "decompose attach load"


class Panic(BaseException):
    """What a library outside Python may raise: no Exception."""


@pytest.mark.parametrize("kind", [Panic, RuntimeError, EOFError, KeyError])
@pytest.mark.parametrize("place", ["none", "before", "after"])
def test_an_unexpected_exception_is_a_bug_of_ours(
    run: Run, saved_llama: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], place: str
) -> None:
    """One line and status 2; status 1 means that --fail-on was crossed. The traceback is for --debug, wherever it
    stands.
    """

    def fail(*args: object, **kwargs: object) -> None:
        raise kind("out of\nthe blue")

    monkeypatch.setattr("locater.commands.layer_moments.effective", fail)
    words: list[object] = ["scan", saved_llama]
    result = run(*{"none": words, "before": ["--debug", *words], "after": [*words, "--debug"]}[place])
    assert (result.status, result.out) == (2, "")
    *trace, said = result.err.splitlines()
    assert said.startswith(f"locater: scan: unexpected {kind.__name__}: ")
    assert "a bug in Locater: please report it with what the same command prints with --debug" in said
    assert str(saved_llama) not in said
    assert bool(trace) == (place != "none") == ("Traceback" in result.err)


def test_help_has_examples_and_no_type_beside_a_switch(run: Run) -> None:
    for command in ("scan", "probe", "demo", "compare", "watch", "train", "reproduce"):
        text = run(command, "--help").out
        assert not re.search(r"<(bool|str|int|float|list)", text), command  # words: PATH, N, TEXT
        assert f"locater {command}" in text.partition("Examples:")[2], command
    text = run("--help").out
    assert "<bool>" not in text
    assert "--debug" in text


def every_command() -> dict[str, Any]:
    """Also those whose options are built when they are called."""
    root: Any = typer.main.get_command(load_offered_commands())
    return {name: root.resolve_command(typer.Context(root), [name])[1] for name in root.commands}


def every_option() -> list[tuple[str, Any]]:
    return [(name, x) for name, c in every_command().items() for x in c.params if x.param_type_name == "option"]


HOLES = r"[\s(,:]\.(?![\w.])|\(\)|\[\]|, ,|\bNone\b|  |\b(of|or|and|such as) *\.(?!\w)"


def test_every_option_and_argument_has_help_without_holes(run: Run) -> None:
    """No list without its words (`One of .`), no sentence without its end."""
    for command, made in every_command().items():
        for param in made.params:
            if param.name == "help":
                continue
            assert re.search(r"\.\]?$", param.help), (command, param.opts, param.help)
            assert not re.search(HOLES, param.help), (command, param.opts, param.help)
        shown = " ".join(run(command, "--help").out.replace("│", " ").split())
        assert not re.search(r"One of ?\.|Default ?\.", shown), command


def test_one_name_of_an_option_means_one_thing() -> None:
    """An option that several commands have takes the same kind of value in all of them, and says so in the same words:
    those of the table.
    """
    seen: dict[str, list[tuple[str, Any]]] = {}
    for command, option in every_option():
        for name in option.opts:
            seen.setdefault(name, []).append((command, option))
    shared = {name for name, uses in seen.items() if len(uses) > 1 and name != "--help"}
    assert shared == {*MEANINGS} & {*seen}
    for name in shared:
        metavar, words = MEANINGS[name]
        for command, option in seen[name]:
            assert (option.metavar or "") == metavar, (command, name)
            assert option.help.startswith(words), (command, name, option.help)


@pytest.mark.parametrize(("command", "option"), MOVED)
@pytest.mark.parametrize("glued", [False, True])
def test_an_old_name_of_an_option_names_the_new_one(run: Run, command: str, option: str, glued: bool) -> None:
    """It does nothing else, such as writing a page where a text was meant."""
    result = run(command, *([f"{option}=x"] if glued else [option, "x"]))
    assert (result.status, result.out) == (2, "")
    assert result.err == f"locater: {command} no longer has {option}: {MOVED[command, option]}\n"
    options = {name for other, made in every_option() if other == command for name in made.opts}
    assert option not in options
    given = re.match(r"give (--\S+)", MOVED[command, option])
    assert given is None or given[1] in options


def test_the_options_of_train_stand_in_groups(run: Run) -> None:
    """Every field of a plan is in one group, and with it on the command line."""
    from dataclasses import fields

    from locater_lab.cli.train import PANELS
    from locater_lab.train.plan import Plan

    names = [name for group in PANELS.values() for name in group]
    assert sorted(names) == sorted(field.name for field in fields(Plan))
    text = run("train", "--help").out
    assert all(f"─ {group} ─" in text for group in PANELS)
    assert "Train a small transformer" in text
    words = " ".join(text.replace("│", " ").split())
    assert "One of causal, masked, classify, image, diffusion, sort, copy, ngram." in words
    assert "adamw|muon|sgd" in words


def test_flags_stay_in_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table is for is shown at 40 columns too."""
    from rich.console import Console

    found = scan(str(files("locater") / "demo"))
    flagged = [replace(row, flags=("sharp", "antisymmetric")) for row in found.rows]
    out = io.StringIO()
    replace(found, rows=flagged).show(Console(file=out, width=40))
    rows = [line for line in out.getvalue().splitlines() if line.split()[:1] == ["0"]]
    assert len(rows) == 4
    assert all("sharp" in row for row in rows)


ROWS = {
    "nonfinite": {"finite": False},
    "uniform": {"F": 0.004, "key_bias": 0.05},
    "sharp": {"F": 64.0, "key_bias": 6.3},
    "silent": {"written_share": 0.0},
    "antisymmetric": {"S": -0.6, "F": 1.0},
    "exploding": {"max_logit": 201.0},
    "locked": {"entropy_ratio": 0.09},
    "sink": {"sink": 0.91},
}
JUST_NOT = {
    "nonfinite": {"finite": True},
    "uniform": {"F": 0.006, "key_bias": 0.07},
    "sharp": {"F": 64.0, "key_bias": 6.1},
    "silent": {"written_share": 0.06},
    "antisymmetric": {"S": -0.49, "F": 1.0},
    "exploding": {"max_logit": 199.0},
    "locked": {"entropy_ratio": 0.11},
    "sink": {"sink": 0.89},
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.name)
def test_flags_are_raised_on_their_side_of_the_threshold(flag) -> None:  # type: ignore[no-untyped-def]
    assert flag.name in flags_of(ROWS[flag.name], length=256)
    assert flag.name not in flags_of(JUST_NOT[flag.name], length=256)
    assert flags_of({}, length=256) == ()


def test_interruption_leaves_nothing_behind(
    run: Run, saved_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of a scan, and in the middle of writing: status 130, no traceback, no file and no half of
    one.
    """

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("locater.commands.layer_moments.effective", stop)
        result = run("scan", saved_llama, "--json", tmp_path / "a.json", "--report", tmp_path / "a.html")
    assert result.status == 130
    assert "Traceback" not in result.err
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        result = run("scan", saved_llama, "--report", tmp_path / "a.html")
    assert result.status == 130
    assert list(tmp_path.iterdir()) == []


def test_report_and_compare_from_the_command_line(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    assert run("scan", saved_llama, "--report", tmp_path / "a.html", "--json", tmp_path / "a.json").status == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    result = run("compare", tmp_path / "a.json", saved_llama, "--report", tmp_path / "b.html", "--json", "-")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert document["aligned"]
    assert all(head["difference"]["trace"] == 0 for head in document["heads"])
    assert run("compare", tmp_path / "a.html", saved_llama).status == 2


def test_shards_from_the_command_line(run: Run, saved_llama: Path) -> None:
    found = [json.loads(run("scan", saved_llama, "--shard", f"{i}/2", "--json", "-").out) for i in (1, 2)]
    assert [len(part["heads"]) for part in found] == [4, 8]
    for wrong in ("0/2", "3/2", "2", "a/b"):
        assert run("scan", saved_llama, "--shard", wrong).status == 2
