"""`RunMonitor`: logs every attention head of a training run, and warns by name when one is about to fail.

    monitor = locater.Monitor("run.jsonl").attach(model)    # in any loop: monitor.after_step(loss=loss)

`locater.Monitor` is this, and the callbacks that trainers call (`integrations/monitor_for_trainers.py`).

Between observed steps nothing is computed and nothing waits for the device. The loss of such a step is written as soon
as it has arrived from there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, cast
from weakref import ref

import torch
from torch import Tensor, nn

from locater.discovery.replayed_maps import Spectra
from locater.errors import LocaterError, first_line
from locater.findings import FLAGS, Condition, Remedy, parse_conditions, reasons, remedy_for
from locater.findings.conditions import AT_HOT_RATES, WARN_ON
from locater.observing.accumulate import StatisticsOptions
from locater.observing.layer_choice import Choice
from locater.observing.listening_site import Site
from locater.observing.observation import Observation
from locater.observing.pipeline_stages import PipelineStages
from locater.observing.reduce_ranks import ranks_agree
from locater.observing.seen_heads import accumulators, fetch_numbers
from locater.options import parse_call
from locater.runs.head_table import (
    COLUMNS,
    SPECTRUM,
    DiscoveredSpectra,
    Table,
    WeightSpectra,
    add_spectra,
    discover_layers,
    head_table,
)
from locater.runs.record_sinks import RecordSinks, Sink
from locater.runs.records import Record, end_record, header, loss_record, step_record, warning_record
from locater.runs.verdict import LossCourse, RunVerdict, verdict_of

# Losses on their way from the device to the log: copied without waiting, and read once they have arrived.

SLOTS = 256  # most losses under way at a time


class PendingLosses:
    """A queue of losses in the order of their steps.

    On the CPU each is a number at once. On CUDA a copy to pinned memory runs behind the step, so that a killed run
    loses only what the device had not computed. On other devices a loss stays in the queue until `take(wait=True)`.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Any, torch.cuda.Event | None]] = deque()
        self._slots: Tensor | None = None  # pinned once, since pinning waits for the device
        self._count = 0

    def add(self, step: int, loss: Tensor | float) -> None:
        if not isinstance(loss, Tensor):
            self._queue.append((step, float(loss), None))
            return
        loss = loss.detach()
        if loss.device.type == "cpu":
            self._queue.append((step, float(loss), None))
        elif loss.device.type == "cuda" and type(loss) in (Tensor, nn.Parameter) and len(self._queue) < SLOTS:
            if self._slots is None:
                self._slots = torch.empty(SLOTS, dtype=torch.float64, pin_memory=True)
            copy = self._slots[self._count % SLOTS].copy_(loss.reshape(()), non_blocking=True)
            self._count += 1
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(loss.device))
            self._queue.append((step, copy, arrived))
        else:  # a copy: the loop may write over the tensor before it is read
            self._queue.append((step, loss.clone(), None))

    def take(self, wait: bool = False) -> Iterator[tuple[int, float]]:
        """Steps and losses that have arrived, the earliest first; with `wait` all of them."""
        while self._queue and (wait or _has_arrived(*self._queue[0][1:])):
            step, loss, arrived = self._queue.popleft()
            if arrived is not None:
                arrived.synchronize()
            yield step, float(loss)

    def clear(self) -> None:
        self._queue.clear()


def _has_arrived(loss: Any, copied: torch.cuda.Event | None) -> bool:
    return isinstance(loss, float) if copied is None else copied.query()


# What a monitor says about failing heads: for each step and reason a line that names them, and what helps this model.

NAMED = 12  # heads in a line


def controls_that_fit(model: nn.Module, remedy: Remedy) -> list[str]:
    """The controls of a remedy that could be attached to the model as it is."""
    from locater import control

    fitting = []
    for call in remedy.controls:
        name, options = parse_call(call, "remedy")
        if getattr(control, name)(**options).can_attach(model):
            fitting.append(call)
    return fitting


def warning_line(step: int, condition: Condition, records: Sequence[Record]) -> str:
    """One line for the heads that meet a condition at a step."""
    crossed, meaning = reasons(condition, [record["value"] for record in records])
    heads = [f"{record['layer']}.{record['head']}" for record in records]
    more = f" and {len(heads) - NAMED} more" if len(heads) > NAMED else ""
    return f"step {step}: {crossed} at {', '.join(heads[:NAMED])}{more}: {meaning}"


# The monitor.

logger = logging.getLogger("locater")


class RunMonitor:
    """Observes a run, writes it to sinks and warns about heads; `locater.Monitor` describes the options."""

    def __init__(
        self,
        *sinks: str | os.PathLike[str] | Sink,
        every: int = 50,
        layers: Choice = None,
        heads: Choice = None,
        rows: int | None = None,
        warn_on: str = WARN_ON,
        spectrum: bool = True,
        passes: Literal["loss", "all"] = "loss",
        pipeline: Any = None,
    ) -> None:
        if every < 1:
            raise LocaterError(f"every={every}: count from 1, which observes each step")
        if passes not in ("loss", "all"):
            raise LocaterError(f"passes={passes!r}: choose loss or all")
        flags = [flag.name for flag in FLAGS]
        self.every, self.spectrum, self.passes, self.pipeline = every, spectrum, passes, pipeline
        self.conditions = parse_conditions(warn_on, {*COLUMNS, *SPECTRUM}, flags, "warn_on") if warn_on else []
        self.step = 0
        self.warned: set[tuple[int, int, str]] = set()
        self.observation: Observation | None = None
        self._sample = (StatisticsOptions(rows or 0), layers, heads)
        self._sinks = RecordSinks(sinks, self._report_once)
        self._pending = PendingLosses()
        self._reported: set[Any] = set()
        self._advice: dict[str, str] = {}  # by condition: what helps this model
        self._fitting: list[str] = []  # controls for hot rates that could be attached to this model
        self._reduced = True  # whether the numbers are those of all ranks, so that all ranks give the same warnings
        self._columns: tuple[str, ...] = ()
        self._weights: WeightSpectra | None = None
        self._log_sites: list[Site] = []  # the layers of the log
        self._folder = Path()
        self._course = LossCourse()
        self._warnings: list[Record] = []
        self._observed, self._outputs = 0, cast("int | None", None)
        self._told = ""  # the verdict that the console has
        self._at_exit: Callable[[], None] | None = None

    @property
    def attached(self) -> bool:
        return self.observation is not None

    @property
    def due(self) -> bool:
        """Whether the step that is running is observed."""
        return self.observation is not None and self.observation.switch.on

    def attach(self, model: nn.Module, folder: str | os.PathLike[str] = ".") -> Self:
        """Start. The next step is observed; call `after_step` after each step, and `detach` at the end."""
        if self.observation is not None:
            raise LocaterError("this monitor is already attached: detach it first, or create another")
        self._reported.clear()
        self._advice.clear()
        self._pending.clear()
        self._course, self._warnings, self._told = LossCourse(), [], ""
        self._observed, self._outputs = 0, None
        wanted, layers, heads = self._sample
        loss_only = self.passes == "loss"
        observation = Observation(
            model, wanted, layers, heads, every=0, lenient=True, loss_only=loss_only, pipeline=self.pipeline
        )
        self._columns = (*COLUMNS, *(SPECTRUM if self.spectrum else ()))
        known = observation.by_calls is None  # else layers appear while the model runs, and the log begins then
        begins = known and observation.stages is None  # the layers of other stages come with the first observed step
        self._log_sites, self._folder = list(observation.sites) if begins else [], Path(folder)
        begin = self._open_log(observation) if begins else None
        try:
            observation.__enter__()
        except BaseException:
            self._close()
            raise
        self.observation = observation
        spectra = self.spectrum and known
        observation.switch.keeps_call = self.spectrum and not known
        self._weights = WeightSpectra(model, [site.number for site in observation.sites]) if spectra else None
        if begin is not None:
            self._sinks.write(begin)
        self._observe_if_due()
        self._at_exit = atexit.register(partial(_end_with_process, ref(self)))  # a loop that fails calls nothing
        return self

    def after_step(
        self, loss: Tensor | float | None = None, step: int | None = None, **scalars: Tensor | float
    ) -> list[Record]:
        """Call after each optimizer step. Returns the new warnings, the same on every rank."""
        if self.observation is None:
            raise LocaterError("this monitor is not attached: call monitor.attach(model) first")
        for name, value in {"loss": loss, **scalars}.items():
            if isinstance(value, Tensor) and value.numel() != 1:  # refused now, not at the next observed step
                raise LocaterError(
                    f"{name} has shape {list(value.shape)}: give one number per step, such as {name}.mean()"
                )
        observed = self.due
        self.step = self.step + 1 if step is None else step
        warnings: list[Record] = []
        if observed:
            warnings = self._log_observed_step(loss, scalars)
        elif self._sinks:
            if loss is not None:
                self._pending.add(self.step, loss)
            self._flush()
        self._observe_if_due()
        return warnings

    def detach(self) -> None:
        """Stop: remove the listeners, write what is left, close the sinks. May be called twice."""
        if self.observation is None:
            return
        try:
            self._flush(wait=True)
            self._sinks.write(end_record(self.step))
            self._tell_verdict()
        finally:
            self._close()

    def verdict(self, failure: str = "") -> RunVerdict:
        """What the run looks like so far: healthy, or which heads, since when, what the loss did, and what to try.

        Three lines when it is printed. After `detach` it stays. `failure` names the exception that ended the run.
        """
        return verdict_of(self._course, self._warnings, self._outputs, self._observed, failure)

    def _tell_verdict(self, when: str = "the run has ended", failure: str = "") -> None:
        """Say once on the console how the run ended or that it failed, and where its log is."""
        if not self._course.count and not self._observed:
            return
        verdict = self.verdict(failure)
        if verdict.state == self._told or not is_first_rank():
            return
        self._told = verdict.state
        text = f"{when}{self._sinks.log_hint()}\n{verdict}"
        if verdict.state in ("healthy", "too short"):
            print(f"locater: {text}", file=sys.stderr)
        else:
            logger.warning(text, extra={"about_heads": True})

    def end_run(self, failure: str = "") -> None:
        """Detach after a failure: the log stays as it is, the console says what there is to say."""
        if self.observation is None:
            return
        with contextlib.suppress(Exception):  # where the device failed, losses cannot be read from it
            self._flush(wait=True)
        with contextlib.suppress(Exception):  # nothing here may hide the error that ended the run
            self._tell_verdict(failure=failure)
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of the run needs: the step, and the warnings given so far. The same on every rank."""
        return {"step": self.step, "warned": [list(key) for key in sorted(self.warned)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a checkpoint, without repeating its warnings; before or after `attach`."""
        if state.keys() != {"step", "warned"}:
            held = ", ".join(state) or "nothing"
            raise LocaterError(f"Monitor: this state holds {held}, and step, warned was expected")
        self.step = int(state["step"])
        self.warned = {(int(layer), int(head), str(reason)) for layer, head, reason in state["warned"]}
        if self.observation is not None:
            self._observe_if_due()

    def _observe_if_due(self) -> None:
        """Decide whether the coming step is observed. Per step, since a trainer may call only parts of its module."""
        assert self.observation is not None
        switch = self.observation.switch
        switch.on, switch.counts_pass, switch.left_out = self.step % self.every == 0, None, 0
        switch.call = None  # a batch is not kept alive

    def _close(self) -> None:
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        observation, self.observation, self._weights = self.observation, None, None
        if observation is not None:
            observation.close()
        self._sinks.close()

    def _open_log(self, observation: Observation) -> Record:
        """Open the sinks for the layers of the log. Returns the first record, which is not written yet."""
        layers = [{"layer": s.number, "name": s.name, "heads": s.count, "kind": s.kind} for s in self._log_sites]
        begin = header(type(observation.model).__name__, self.every, layers, self._columns, self.passes)
        if is_first_rank():
            self._sinks.open(self._folder, begin)
        return begin

    def _layers_of_log(self, observation: Observation) -> list[Site]:
        """The layers of the log. Those found by their calls, and those of other stages of a pipeline, are fixed at the
        first observed step that has any.
        """
        if not self._log_sites and observation.sites:
            self._log_sites = list(observation.sites)
            self._sinks.write(self._open_log(observation))
            if observation.by_calls is not None:
                self._discover_maps(observation)
        if observation.by_calls is None:
            return self._log_sites
        for note in observation.notes if self._log_sites else ():
            if self._weights is None or note != observation.by_calls.unknown_maps:
                self._report_once(note)
        later = [site.name for site in observation.sites[len(self._log_sites) :]]
        if later:
            self._report_once(f"layers that first ran after the log had begun are not in it: {later[0]}")
        return self._log_sites

    def _discover_maps(self, observation: Observation) -> None:
        """Discover the query-key maps of layers that were found by their calls, with the batch of their first pass."""
        call, observation.switch.keeps_call = observation.switch.call, False
        if call is None or not self._reduced:
            return
        found, reason, stages = None, "other ranks found other layers", observation.stages
        own = [site for site in self._log_sites if stages is None or stages.is_own(site)]
        try:
            found = discover_layers(own, *call)
        except Exception as error:  # a copy of a foreign model runs, and its errors must not end a training run
            reason = first_line(error)
        # maps that are split over ranks are read by all ranks or by none; stages of a pipeline read their own
        numbers = [] if found is None else [site.number for site in found.sites.values()]
        if (stages is None and not ranks_agree(observation.model, repr(numbers))) or found is None:
            self._report_once(f"the run continues without M and spread: {reason}")
            return
        self._weights = DiscoveredSpectra(found)
        if found.gaps:
            self._report_once(f"M and spread of some layers are not known: {'; '.join(found.gaps[:3])}")

    def _log_observed_step(self, loss: Any, scalars: dict[str, Any]) -> list[Record]:
        """Write the step and its warnings. All is computed before any of it is read: one wait for the device."""
        assert self.observation is not None
        self._reduced = True
        try:
            self.observation.reduce()
        except LocaterError as reason:
            self._reduced = False
            self._report_once(f"the run continues with the numbers of this rank alone: {reason}")
        sites, (spectra, error) = self._layers_of_log(self.observation), self._read_spectra()
        values = {name: x for name, x in {"loss": loss, **scalars}.items() if x is not None}
        plain = [name for name, x in values.items() if type(x) in (Tensor, nn.Parameter)]
        of_sites, of_weights = accumulators(sites), [x for part in spectra for x in part.tensors]
        fetched_numbers = iter(fetch_numbers([*of_sites, *of_weights, *(values[name] for name in plain)]))
        self.observation.clear()
        table = head_table(sites, list(islice(fetched_numbers, len(of_sites))))
        add_spectra(table, spectra, list(islice(fetched_numbers, len(of_weights))))
        if self.observation.stages is not None:
            self._share_between_stages(self.observation.stages, table)
        values |= {name: number for name, (number,) in zip(plain, fetched_numbers, strict=True)}
        numbers = {name: float(x.detach() if isinstance(x, Tensor) else x) for name, x in values.items()}
        self._flush(wait=True)  # this no longer waits for the device
        self._report_gaps(table, error)
        heads = {
            name: [[table.get((site.number, head), {}).get(name) for head in range(site.count)] for site in sites]
            for name in self._columns
        }
        switch = self.observation.switch
        outputs, self._outputs = switch.outputs if self._outputs is None else None, switch.outputs
        self._sinks.write(step_record(self.step, numbers, heads, switch.left_out, outputs))
        self._observed += 1
        warnings = self._warn(table)
        self._follow_loss(self.step, numbers.get("loss"))
        return warnings

    def _share_between_stages(self, stages: PipelineStages, table: Table) -> None:
        """Put together what each stage of a pipeline reads of its own weights, and the outputs of the last."""
        switch = self.observation.switch  # type: ignore[union-attr]
        switch.outputs = stages.share_columns(table, SPECTRUM, switch.outputs)

    def _read_spectra(self) -> tuple[list[Spectra], Exception | None]:
        """The spectra of the current weights, or the error that stopped them from being read."""
        if not self.spectrum or self._weights is None:
            return [], None
        stages, weights = self.observation.stages if self.observation else None, self._weights
        first = 0 if stages is None or type(weights) is not WeightSpectra else stages.first
        try:
            return [replace(part, layers=[first + number for number in part.layers]) for part in weights.read()], None
        except Exception as error:  # reported with the step: it must not end a training run
            return [], error

    def _report_gaps(self, table: Table, error: Exception | None) -> None:
        """Say what is missing from an observed step, and why."""
        assert self.observation is not None
        switch = self.observation.switch
        if switch.missed:
            lost = switch.missed.pop()
            self._report_once(
                f"the run continues; calls that could not be counted are left out: {type(lost).__name__}: {lost}",
                about=switch,
            )
        elif not table and switch.left_out:
            self._report_once(
                f"no pass had gradients, so none is counted ({switch.left_out} without): a loss comes from passes with "
                'gradients; Monitor(passes="all") counts every pass in training mode',
                about="no gradients",
            )
        elif not table:
            reason = f"the model was not in training mode, or {self.observation.why_nothing()}"
            self._report_once(reason, about=self.observation)
        if error is not None and table:
            self.spectrum = False
            self._report_once(f"the run continues without M and spread: {type(error).__name__}: {error}")

    def _warn(self, table: Table) -> list[Record]:
        """Write the new warnings of this step, and log a line for each reason."""
        assert self.observation is not None
        names = {site.number: site.name for site in self._log_sites}
        warnings: list[Record] = []
        for condition in self.conditions:
            new = [
                (*place, row)
                for place, row in table.items()
                if (*place, condition.text) not in self.warned and condition.test(row)
            ]
            if not new:
                continue
            advice = self._advice_for(condition)
            records = [
                warning_record(self.step, layer, head, names[layer], row, condition, advice, self._fitting)
                for layer, head, row in new
            ]
            self.warned |= {(layer, head, condition.text) for layer, head, _ in new}
            for record in records:
                self._sinks.write(record)
            if is_first_rank():
                logger.warning(warning_line(self.step, condition, records), extra={"about_heads": True})
            self._report_once(f"{advice}{self._sinks.log_hint()}", about=advice, about_heads=True)
            warnings += records
        self._warnings += warnings
        return warnings

    def _advice_for(self, condition: Condition) -> str:
        """What to do about a condition, with the controls that fit this model. They are tried on all ranks or on none,
        since reading weights that are split over ranks involves every rank.
        """
        assert self.observation is not None
        if condition.text not in self._advice:
            remedy = remedy_for(condition)
            model = self.observation.model
            fitting = controls_that_fit(model, remedy) if self._reduced else []
            if not self._advice and self._reduced:
                self._fitting = controls_that_fit(model, AT_HOT_RATES)
            self._advice[condition.text] = remedy.words(fitting)
        return self._advice[condition.text]

    def _flush(self, wait: bool = False) -> None:
        """Write the losses of unobserved steps that have arrived from the device; with `wait` all of them."""
        for step, loss in self._pending.take(wait):
            self._sinks.write(loss_record(step, loss))
            self._follow_loss(step, loss)

    def _follow_loss(self, step: int, loss: float | None) -> None:
        """Add a loss to the course of the run. One that is not finite is told when it arrives."""
        if loss is None:
            return
        lost = self._course.lost_at
        self._course.add(step, loss)
        if lost is None and self._course.lost_at is not None:
            self._tell_verdict(f"step {step}")

    def _report_once(self, message: str, about: Any = None, about_heads: bool = False) -> None:
        """Log a problem of the monitor itself once per subject, since it must not end a training run. Messages about
        heads of the model are marked, for log handlers.
        """
        key = message if about is None else about if isinstance(about, str) else id(about)
        if key not in self._reported and is_first_rank():
            logger.warning("step %d: %s", self.step, message, extra={"about_heads": about_heads})
        self._reported.add(key)


def _end_with_process(monitor: ref[RunMonitor]) -> None:
    """Say how a run ended whose loop did not detach its monitor: by an exception, or because the script is over."""
    running = monitor()
    if running is not None and running.attached:
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        running.end_run("" if error is None else type(error).__name__)


def is_first_rank() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
