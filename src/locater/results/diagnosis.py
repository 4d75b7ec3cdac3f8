"""`Diagnosis`, the result of `doctor()`: what is wrong with a model, or what changed, with the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from locater.findings.causes import Finding
from locater.report.diagnosis import verdict_of
from locater.results.document import Document

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class Diagnosis(Document):
    """`findings` are faults first, then changes, then notes. `tensors` and `heads` have a row each."""

    source: str
    findings: list[Finding]
    tensors: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)  # tensors, of, bytes, seconds
    base: str | None = None
    adapter: str | None = None
    needs: list[str] = field(default_factory=list)  # what could not be told, and what it needs

    def __repr__(self) -> str:
        return f"Diagnosis({self.source!r}, {self.verdict!r})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.diagnosis import diagnosis_in_notebook

        return diagnosis_in_notebook(self.to_dict())

    @property
    def broken(self) -> bool:
        """Whether there is a fault."""
        return any(finding.severity == "fault" for finding in self.findings)

    @property
    def changed(self) -> bool:
        """Whether there is a fault, or something was changed on purpose or for no known cause."""
        return any(finding.severity != "note" for finding in self.findings)

    @property
    def causes(self) -> list[str]:
        """Names of the causes, each once."""
        return list(dict.fromkeys(finding.cause for finding in self.findings))

    @cached_property
    def verdict(self) -> str:
        """One sentence."""
        return verdict_of(self._data())

    def _data(self) -> dict[str, Any]:
        return {
            **self.header(),
            "source": self.source,
            "base": self.base,
            "adapter": self.adapter,
            "broken": self.broken,
            "changed": self.changed,
            "causes": self.causes,
            "findings": [asdict(finding) for finding in self.findings],
            "needs": self.needs,
            "read": self.read,
            "tensors": self.tensors,
            "heads": self.heads,
        }

    def to_dict(self) -> dict[str, Any]:
        data = self._data()
        return {**{key: data[key] for key in ("schema", "locater")}, "verdict": self.verdict, **data}

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per finding."""
        return [_flat(finding) for finding in self.findings]

    def page(self) -> str:
        """The HTML page: findings, layers by kinds of tensors, and heads."""
        from locater.report.diagnosis import diagnosis_page

        return diagnosis_page(self.to_dict())

    def show(self, console: Console) -> None:
        """Print Verdict, Why, Next and Read."""
        from locater.report.diagnosis import print_diagnosis

        print_diagnosis(self.to_dict(), console)


def _flat(finding: Finding) -> dict[str, Any]:
    evidence: Mapping[str, Any] = finding.evidence
    return {name: getattr(finding, name) for name in ("cause", "severity", "where", "words", "next")} | {
        "evidence": dict(evidence)
    }
