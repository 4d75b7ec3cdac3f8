"""`Document`: what every result has. It is written as JSON, and `report/` shows that JSON.

Pages and tables are made from `to_dict()` alone, so a saved file is shown as the result that wrote it.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from locater.errors import LocaterError
from locater.files import write_whole
from locater.version import SCHEMA, __version__

if TYPE_CHECKING:
    import pandas
    import polars
    from rich.console import Console


class Document(ABC):
    """A result with a JSON document."""

    schema: ClassVar[int] = SCHEMA  # of the JSON document; increases when a key moves or changes its meaning

    def header(self) -> dict[str, Any]:
        """The first keys of the document: which schema it has, and which version of Locater wrote it."""
        return {"schema": self.schema, "locater": __version__}

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""

    @abstractmethod
    def records(self) -> Iterable[dict[str, Any]]:
        """One dictionary per head or token, for tables and frames."""

    @abstractmethod
    def page(self) -> str:
        """The HTML page: self-contained, works offline."""

    @abstractmethod
    def show(self, console: Console) -> None:
        """Print tables and sentences in a terminal."""

    def to_json(self) -> str:
        """The JSON document as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the HTML page: self-contained, works offline."""
        write_whole(Path(path), self.page())

    def to_pandas(self) -> pandas.DataFrame:
        """The records as a pandas frame."""
        try:
            import pandas
        except ImportError:
            raise LocaterError("pandas is not installed: pip install pandas") from None
        return pandas.DataFrame([*self.records()])

    def to_polars(self) -> polars.DataFrame:
        """The records as a polars frame."""
        try:
            import polars
        except ImportError:
            raise LocaterError("polars is not installed: pip install polars") from None
        return polars.DataFrame([*self.records()])
