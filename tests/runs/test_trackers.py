"""Records on their way to TensorBoard, W&B, trackio and MLflow: names, pictures, warnings; with the real packages where they are
installed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from locater import LocaterError
from locater.runs.record_sinks import (
    BOTTOM,
    COLOURS,
    LEFT,
    TOP,
    UNKNOWN,
    WIDTH,
    EntropyPictures,
    TensorBoardSink,
    flat_scalars,
    open_sink,
)

RATIOS = [[0.0, 1.0], [0.35, None]]


def header(layers: int = 2, heads: int = 2) -> dict[str, Any]:
    entries = [{"layer": i, "name": f"blocks.{i}.attn", "heads": heads, "kind": "self"} for i in range(layers)]
    columns = ["entropy_ratio", "max_logit"]
    return {"kind": "run", "schema": 1, "locater": "0.1.0", "source": "Tiny", "every": 10, "layers": entries, "columns": columns, "time": 1.0}  # fmt: skip


def step(at: int, ratios: list[list[float | None]] = RATIOS) -> dict[str, Any]:
    heads = {"entropy_ratio": ratios, "max_logit": [[1.0, 3.0], [7.0, -2.0]]}
    return {"kind": "step", "step": at, "time": 1.0, "loss": 2.0, "scalars": {"grad_norm": 1.5}, "heads": heads}


def warning(at: int, head: int = 1) -> dict[str, Any]:
    where = {"layer": 1, "head": head, "name": "blocks.1.attn", "flag": "exploding", "value": 300.0, "threshold": 200.0}
    return {
        "kind": "warning",
        "step": at,
        "time": 1.0,
        **where,
        "message": f"step {at}: blocks.1.attn head {head}: exploding",
    }


END = {"kind": "end", "step": 21, "time": 1.0}
RECORDS = [
    header(),
    step(1),
    step(11),
    warning(11),
    warning(11, head=0),
    {"kind": "loss", "step": 12, "loss": 1.0},
    END,
]


def test_scalars_are_the_worst_head_and_a_mean_of_each_layer() -> None:
    assert flat_scalars(step(5), [3, 12]) == {
        "loss": 2.0,
        "grad_norm": 1.5,
        "attention/entropy_ratio/min": 0.0,
        "attention/max_logit/max": 7.0,
        "layer_entropy_ratio/mean/03": 0.5,
        "layer_entropy_ratio/min/03": 0.0,
        "layer_entropy_ratio/mean/12": 0.35,
        "layer_entropy_ratio/min/12": 0.35,
        "layer_max_logit/mean/03": 2.0,
        "layer_max_logit/max/03": 3.0,
        "layer_max_logit/mean/12": 2.5,
        "layer_max_logit/max/12": 7.0,
    }


def test_what_is_no_number_is_left_out_of_scalars() -> None:
    record = step(5) | {
        "loss": float("inf"),
        "heads": {"M": [[0.25, 0.75]], "max_logit": [[None, None]], "sink": [None]},
    }
    expected = {"grad_norm": 1.5, "layer_M/mean/12": 0.5, "layer_M/min/12": 0.25, "layer_M/max/12": 0.75}
    assert flat_scalars(record, [12]) == expected
    assert flat_scalars({"kind": "loss", "step": 1, "loss": 2.0}, []) == {"loss": 2.0}
    assert flat_scalars(warning(3), [0]) == {"warning/exploding": 300.0}


def test_a_large_model_has_hundreds_of_scalars_not_thousands() -> None:
    columns = ("entropy", "entropy_ratio", "max_logit", "sink", "participation", "distance", "M", "spread")
    record = step(1) | {"heads": {name: [[0.5] * 32] * 32 for name in columns}}
    assert len(flat_scalars(record, list(range(32)))) == 2 + 5 + 32 * (8 + 5 + 2)  # loss, norm; worst heads; layers


def cell(picture: Any, row: int, column: int, rows: int, columns: int) -> tuple[int, ...]:
    height = picture.height - TOP - BOTTOM
    return picture.getpixel((LEFT + int((column + 0.5) * WIDTH / columns), TOP + int((row + 0.5) * height / rows)))


def test_pictures_show_the_numbers() -> None:
    pytest.importorskip("PIL")
    pictures = EntropyPictures(header())
    drawn = pictures.draw(step(1))
    heads = drawn["entropy_by_head"]
    assert cell(heads, 0, 0, 2, 2) == COLOURS[0]
    assert cell(heads, 0, 1, 2, 2) == COLOURS[4]
    assert cell(heads, 1, 0, 2, 2) == COLOURS[2]
    assert cell(heads, 1, 1, 2, 2) == UNKNOWN
    later = pictures.draw(step(11, [[1.0, 1.0], [None, None]]))["entropy_by_layer"]
    assert cell(later, 0, 1, 2, 2) == COLOURS[4]
    assert cell(later, 1, 0, 2, 2) == COLOURS[2], "the mean of the heads that are known"
    assert cell(later, 1, 1, 2, 2) == UNKNOWN


def test_a_long_run_has_few_pictures_and_one_of_its_end() -> None:
    pytest.importorskip("PIL")
    pictures = EntropyPictures(header())
    ratios = [[[1.0 - i / 2000, 0.5], [0.5, 0.5]] for i in range(1000)]
    drawn = [i for i in range(1000) if pictures.draw(step(10 * i + 1, ratios[i]))]
    assert drawn[:4] == [0, 1, 2, 3]
    assert 20 < len(drawn) < 45
    assert set(pictures.draw(END)) == {"entropy_by_layer", "entropy_by_head"}
    assert pictures.draw(END) == {}, "nothing new"
    assert pictures.draw(warning(9991)) == {}
    later = pictures._draw_history()  # 1,000 columns in 600 pixels: the first and the last are about those of the run
    first, last = (cell(later, 0, column, 2, 20) for column in (0, 19))
    assert sum(first) < sum(last), "entropy falls: colours turn bright"


def test_many_layers_stay_within_a_picture() -> None:
    pytest.importorskip("PIL")
    pictures = EntropyPictures(header(layers=126, heads=128))
    drawn = pictures.draw(step(1, [[0.5] * 128] * 126))
    assert all(picture.height < 1000 and picture.width < 800 for picture in drawn.values())


def test_tensorboard_or_what_to_install(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(LocaterError, match="pip install tensorboard"):
            open_sink(f"tensorboard:{tmp_path}")
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    sink = open_sink(f"tensorboard:{tmp_path}")
    assert isinstance(sink, TensorBoardSink)
    for record in RECORDS:
        sink.write(record)
    sink.close()
    log = EventAccumulator(str(tmp_path))
    log.Reload()
    assert [(e.step, e.value) for e in log.Scalars("loss")] == [(1, 2.0), (11, 2.0), (12, 1.0)]
    assert [(e.step, e.value) for e in log.Scalars("layer_max_logit/max/01")] == [(1, 7.0), (11, 7.0)]
    assert sorted(log.Tags()["images"]) == ["attention/entropy_by_head", "attention/entropy_by_layer"]
    assert [e.step for e in log.Images("attention/entropy_by_layer")] == [1, 11]
    assert "warnings/text_summary" in log.Tags()["tensors"]
    layout = layout_pb2.Layout.FromString(log.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    tags = [tag for chart in layout.category[0].chart for tag in chart.multiline.tag]
    assert "layer_entropy_ratio/mean/.*" in tags


def test_trackio_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conflicts with the pillow that the other tests run with, so it is in no extra (docs/log.md)."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    trackio.init(project="locater-test", name="run", embed=False)
    sink = open_sink("trackio")
    for record in RECORDS:
        sink.write(record)
    sink.close()
    trackio.finish()
    rows = SQLiteStorage.get_logs("locater-test", "run")
    losses = [(row["step"], row["locater/loss"]) for row in rows if "locater/loss" in row]
    assert losses == [(1, 2.0), (11, 2.0), (12, 1.0)]
    assert sum("locater/attention/entropy_by_layer" in row for row in rows) == 2
    alerts = SQLiteStorage.get_alerts("locater-test", "run")
    assert [(alert["step"], alert["title"]) for alert in alerts] == [(11, "exploding: blocks.1.attn head 1")]


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No version of its that fits the packages of the other tests is newer than 2022, so it is in no extra."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its other stores need more packages
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    with pytest.raises(LocaterError, match=r"mlflow\.start_run\(\)"):
        open_sink("mlflow")
    with mlflow.start_run() as run:
        sink = open_sink("mlflow")
        for record in [*RECORDS, {**warning(21), "flag": "spread>5"}]:
            sink.write(record)
        sink.close()
    client, name = mlflow.MlflowClient(), run.info.run_id
    losses = [(point.step, point.value) for point in client.get_metric_history(name, "locater/loss")]
    assert losses == [(1, 2.0), (11, 2.0), (12, 1.0)]
    assert client.get_run(name).data.metrics["locater/warning/spread above 5"] == 300.0
    drawn = [file.path for file in client.list_artifacts(name, "locater/attention")]
    assert sum("entropy_by_layer" in path for path in drawn) == 2
    assert mlflow.artifacts.load_text(f"runs:/{name}/locater/warnings.txt").count("exploding") == 3


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_log_to_the_active_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[dict[str, Any]] = []
    module = types.ModuleType(name)
    active = types.SimpleNamespace(define_metric=lambda *a, **k: None)
    vars(module).update(
        run=active,
        log=lambda values, step=None: logged.append({"step": step, **values}),
        alert=lambda **alert: logged.append(alert),
        Image=lambda picture: picture.size,
    )
    monkeypatch.setitem(sys.modules, name, module)
    sink = open_sink(name)
    for record in RECORDS:
        sink.write(record)
    sink.close()
    steps = [row for row in logged if "locater/grad_norm" in row]
    assert [row["locater/step" if name == "wandb" else "step"] for row in steps] == [1, 11]
    assert steps[0]["locater/layer_max_logit/mean/01"] == 2.5
    assert len([row for row in logged if "title" in row]) == (name == "trackio"), "one alert for a flag at a step"
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LocaterError, match=f"pip install {name}"):
        open_sink(name)


def test_trackers_need_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(numbers: object, step: int) -> None:
        raise RuntimeError("Call trackio.init() before trackio.log().")

    for name, content in (("wandb", {"run": None}), ("trackio", {"log": refuse})):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(LocaterError, match=r"wandb\.init\(\)"):
        open_sink("wandb")
    with pytest.raises(LocaterError, match=r"trackio\.init\(\)"):
        open_sink("trackio").write(step(1))
