"""`Monitor`: one line in an existing training run. Logs what every head does, and warns by name before the loss shows
it.

    trainer = transformers.Trainer(..., callbacks=[locater.Monitor()])         # or lightning.Trainer
    monitor = locater.Monitor("run.jsonl").attach(model)                       # or any loop: monitor.after_step(loss=loss)

Between observed steps nothing is computed and nothing waits for the device; the loss of such a step is written as soon
as it has arrived from there.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from locater.attention.listeners import missed
from locater.errors import LocaterError
from locater.families import attention_layers, effective
from locater.families.folded import FoldedStacks, Spectra, spectra_of
from locater.findings import FLAGS, Condition, explain, key_variance, parse_conditions
from locater.monitor.pending import Pending
from locater.monitor.trainer_events import TrainerEvents
from locater.numerics import finite_or_none
from locater.observing.observation import Choice, Observation
from locater.observing.rows import accumulators, fetched, numbers_of, totals
from locater.observing.site import Site
from locater.observing.tally import StatisticsOptions
from locater.version import __version__

if TYPE_CHECKING:
    from locater.tracking.loggers import Sink

COLUMNS = ("entropy", "entropy_ratio", "max_logit", "sink", "participation", "distance")
SPECTRUM = ("M", "spread")  # of the weights: mean self-logit, and the spread of logits over unit tokens
# from docs/results/early-warning.md: early, and 3 false alarms each in 20 healthy runs
WARN_ON = "nonfinite, exploding, spread>5"
LOG = "locater.jsonl"
logger = logging.getLogger("locater")
Table = dict[tuple[int, int], dict[str, Any]]  # (layer, head): columns
_MEANS = tuple(name for name in COLUMNS if name != "max_logit")


def header(source: str, every: int, layers: list[dict[str, Any]], columns: Iterable[str]) -> dict[str, Any]:
    """The first record of a run."""
    held = {"kind": "run", "schema": 1, "locater": __version__, "source": source, "every": every}
    return {**held, "layers": layers, "columns": list(columns), "time": time.time()}


class Monitor(TrainerEvents):
    """Observe every `every`-th step of a run, write it to sinks, warn once per head and reason.

    `sinks` are paths that end in .jsonl, "tensorboard:FOLDER", "wandb", "trackio", or objects with write() and close();
    without any, `locater.jsonl` in the run's output folder. `layers`, `heads` and `rows` choose a sample as in
    `observe`. `warn_on` are flags and comparisons as for --fail-on, such as "exploding, entropy_ratio<0.1"; `spectrum`
    adds M and the spread of each head's query-key map, from its weights.
    """

    def __init__(
        self,
        *sinks: str | os.PathLike[str] | Sink,
        every: int = 50,
        layers: Choice = None,
        heads: Choice = None,
        rows: int | None = None,
        warn_on: str = WARN_ON,
        spectrum: bool = True,
    ) -> None:
        if every < 1:
            raise LocaterError(f"every={every}: count from 1, which observes each step")
        self.every, self.spectrum = every, spectrum
        self.conditions = (
            parse_conditions(warn_on, {*COLUMNS, *SPECTRUM}, [flag.name for flag in FLAGS], "warn_on")
            if warn_on
            else []
        )
        self.step = 0
        self.warned: set[tuple[int, int, str]] = set()
        self.observation: Observation | None = None
        self._wanted = (StatisticsOptions(rows or 0), layers, heads)
        self._names = sinks
        self._sinks: list[Sink] = []
        self._pending = Pending()
        self._said: set[Any] = set()
        self._columns: tuple[str, ...] = ()
        self._stacks: FoldedStacks | None = None

    # A loop of one's own

    def attach(self, model: nn.Module, folder: str | os.PathLike[str] = ".") -> Self:
        """Begin. The next step is observed; call `after_step` after each, and `detach` at the end."""
        if self.observation is not None:
            raise LocaterError("this monitor is attached already: detach it first, or make another")
        self._said.clear()
        self._pending.clear()
        wanted, layers, heads = self._wanted
        observation = Observation(model, wanted, layers, heads, every=0, lenient=True)
        self._columns = (*COLUMNS, *(SPECTRUM if self.spectrum else ()))
        begin = self._header(observation)
        if is_first_rank():
            self._open_sinks(Path(folder), begin)
        try:
            observation.__enter__()
        except BaseException:
            self._close()
            raise
        self.observation = observation
        self._stacks = None
        if self.spectrum:
            # what cannot be recorded is read layer by layer, and what cannot be read is told then
            with contextlib.suppress(Exception):
                self._stacks = FoldedStacks(model, [site.number for site in observation.sites])
        self._write(begin)
        self._arm()
        return self

    def _open_sinks(self, folder: Path, begin: dict[str, Any]) -> None:
        """A log that was named is continued or refused; without a name one is found that this run can continue, or
        begun.
        """
        from locater.tracking.loggers import JsonlSink, open_sink

        if not self._names:
            # a trainer's folder may come with its first file; what is wrong is said below
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
        try:
            for spec in self._names or (self._default_log(folder, begin),):
                self._sinks.append(open_sink(spec))
                if isinstance(self._sinks[-1], JsonlSink):
                    self._sinks[-1].check(begin)
        except BaseException:
            self._close()
            raise

    def _default_log(self, folder: Path, begin: dict[str, Any]) -> Path:
        """`locater.jsonl`; where that holds a run of another shape, `locater-2.jsonl` and so on."""
        from locater.tracking.loggers import same_shape
        from locater.tracking.run_log import first_run

        taken = ""
        for count in itertools.count(1):
            path = folder / (LOG if count == 1 else f"{Path(LOG).stem}-{count}.jsonl")
            held = first_run(path)
            if held is None or same_shape(held, begin):
                break
            taken = taken or path.name
        if taken:
            self._say(f"{folder / taken} holds a run of another model: this run is written to {path}")
        return path

    def after_step(
        self, loss: Tensor | float | None = None, step: int | None = None, **scalars: Tensor | float
    ) -> list[dict[str, Any]]:
        """Call after each optimizer step. Returns the warnings that are new, which every rank gets."""
        if self.observation is None:
            raise LocaterError("this monitor is not attached: monitor.attach(model) comes first")
        for name, held in {"loss": loss, **scalars}.items():
            if isinstance(held, Tensor) and held.numel() != 1:  # told now, not at the observed step that would read it
                raise LocaterError(
                    f"{name} has shape {list(held.shape)}: give one number per step, such as {name}.mean()"
                )
        observed = self.due
        self.step = self.step + 1 if step is None else step
        found: list[dict[str, Any]] = []
        if observed:
            found = self._observed(loss, scalars)
        elif self._sinks:
            if loss is not None:
                self._pending.add(self.step, loss)
            self._flush()
        self._arm()
        return found

    def detach(self) -> None:
        """End: take the listeners off, write what is left, close the sinks. May be called twice."""
        if self.observation is None:
            return
        try:
            self._flush(wait=True)
            self._write({"kind": "end", "step": self.step, "time": time.time()})
        finally:
            self._close()

    def _arm(self) -> None:
        assert self.observation is not None
        # not by forward: a trainer may call parts of its module only
        self.observation.switch.on = self.step % self.every == 0

    def _close(self) -> None:
        observation, self.observation, self._stacks = self.observation, None, None
        if observation is not None:
            observation.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                self._say(f"{type(sink).__name__}: {error}")
        self._sinks = []

    # Records

    def _header(self, observation: Observation) -> dict[str, Any]:
        layers = [{"layer": s.number, "name": s.name, "heads": s.count, "kind": s.kind} for s in observation.sites]
        return header(type(observation.model).__name__, self.every, layers, self._columns)

    def _observed(self, loss: Any, scalars: dict[str, Any]) -> list[dict[str, Any]]:
        """All is computed before anything is read, so that the device is waited for once."""
        assert self.observation is not None
        self.observation.reduce()
        sites, (spectra, failed) = self.observation.sites, self._spectra()
        given = {name: x for name, x in {"loss": loss, **scalars}.items() if x is not None}
        plain = [name for name, x in given.items() if type(x) in (Tensor, nn.Parameter)]
        of_sites, of_weights = accumulators(sites), [x for part in spectra for x in part.tensors]
        numbers = fetched([*of_sites, *of_weights, *(given[name] for name in plain)])
        self.observation.clear()
        given |= {
            name: number for name, (number,) in zip(plain, numbers[len(of_sites) + len(of_weights) :], strict=True)
        }
        known = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in given.items()}
        self._flush(wait=True)  # the device has been waited for
        table = _table(sites, numbers[: len(of_sites)])
        if missed:
            error = missed.pop()
            self._say(
                f"the run goes on; calls that could not be counted are left out: {type(error).__name__}: {error}",
                about=missed,
            )
        elif not table:
            self._say(f"the model was not in training mode, or {self.observation.nothing()}", about=self.observation)
        if failed is not None and table:
            self.spectrum = False
            self._say(f"the run goes on without M and spread: {type(failed).__name__}: {failed}")
        _add_spectra(table, spectra, numbers[len(of_sites) :])
        held = {
            name: [[table.get((s.number, h), {}).get(name) for h in range(s.count)] for s in sites]
            for name in self._columns
        }
        at = {"kind": "step", "step": self.step, "time": time.time()}
        own = {"loss": known.pop("loss")} if "loss" in known else {}
        self._write({**at, **own, "scalars": known, "heads": held})
        return self._warn(table)

    @torch.no_grad()
    def _spectra(self) -> tuple[list[Spectra], Exception | None]:
        """Of the weights as they are now, or why there are none."""
        assert self.observation is not None
        if not self.spectrum:
            return [], None
        if self._stacks is not None:
            try:
                return self._stacks.spectra(), None
            except Exception:
                self._stacks = None  # and from here on layer by layer
        try:
            # read again: folded gains belong to the weights of this step
            layers = list(attention_layers(self.observation.model))
            return [spectra_of(site.number, effective(layers[site.number])) for site in self.observation.sites], None
        except Exception as error:
            return [], error

    def _warn(self, table: Table) -> list[dict[str, Any]]:
        found = []
        for (layer, head), held in table.items():
            for condition in self.conditions:
                key = (layer, head, condition.text)
                if key not in self.warned and condition.test(held):
                    self.warned.add(key)
                    found.append(self._warning(layer, head, held, condition))
        for record in found:
            self._write(record)
            if is_first_rank():
                logger.warning(record["message"])
        return found

    def _warning(self, layer: int, head: int, held: dict[str, Any], condition: Condition) -> dict[str, Any]:
        assert self.observation is not None
        name = next(site.name for site in self.observation.sites if site.number == layer)
        flag = next((f for f in FLAGS if f.name == condition.text), None)
        column = condition.column or (flag.needs[0] if flag else None)
        value = held.get(column) if column else None
        shown = "" if value is None else f" ({column} {value:.4g})"
        said = f"{flag.name}{shown}: {flag.meaning}. {flag.way_out}" if flag else explain(condition, value)
        message = f"step {self.step}: {name} head {head}: {said}"
        return {
            "kind": "warning", "step": self.step, "time": time.time(), "layer": layer, "head": head, "name": name,
            "flag": condition.text, "value": value, "threshold": condition.bound, "message": message,
        }  # fmt: skip

    def _flush(self, wait: bool = False) -> None:
        """Write the losses of unobserved steps that have arrived from the device; with `wait` all of them."""
        for step, loss in self._pending.take(wait):
            self._write({"kind": "loss", "step": step, "loss": loss})

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            try:
                sink.write(record)
            except Exception as error:  # a full disk or a lost connection; the next record is tried again
                self._say(f"the run goes on without records: {type(sink).__name__}: {error}", about=sink)

    def _say(self, what: str, about: Any = None) -> None:
        """A warning that is no finding, once about each thing: what goes wrong here must not end a training run."""
        key = id(about) if about is not None else what
        if key not in self._said and is_first_rank():
            logger.warning("step %d: %s", self.step, what)
        self._said.add(key)


def _table(sites: Sequence[Site], numbers: Sequence[list[float]]) -> Table:
    """Columns and flags of every head of the sites that were called."""
    found: Table = {}
    for site, total in zip(sites, totals(sites, numbers), strict=True):
        if total.called:
            for head, sums, top in zip(site.heads, total.sums, total.tops, strict=True):
                found[site.number, head] = numbers_of(site.kind, sums, top, _MEANS)
    return found


def _add_spectra(table: Table, spectra: Sequence[Spectra], numbers: Sequence[list[float]]) -> None:
    """M and the spread of logits over unit tokens; `numbers` are those of `Spectra.tensors`, one after another."""
    left = iter(numbers)
    for part in spectra:
        F, term = next(left), next(left)
        trace = None if part.trace is None else next(left)
        count = len(F) // len(part.layers)
        for at, (layer, scale) in enumerate(zip(part.layers, part.scales, strict=True)):
            for head in range(count):
                row = table.get((layer, head))
                if row is not None:
                    i = at * count + head
                    row["spread"] = finite_or_none(math.sqrt(max(0.0, key_variance(scale**2 * F[i], scale * term[i]))))
                    row["M"] = None if trace is None else finite_or_none(scale * trace[i])


def is_first_rank() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
