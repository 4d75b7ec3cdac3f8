"""Things by name: attention mechanisms, controls, papers, architectures. One class for all of them.

    MECHANISMS: Registry[Mechanism] = Registry("attention mechanism")
    MECHANISMS.add(softmax, "softmax")
    MECHANISMS.lookup("sofmax")         # LocaterError: no attention mechanism 'sofmax': did you mean 'softmax'? ...

A registry is a read-only mapping from names to entries, in the order in which they were added. An entry may have
several names. Files of a folder are loaded by an explicit list of their names, at once (`load`) or when an entry is
first used (`load_later`). Other packages add entries by entry points, which are imported when their name is looked up:

    [project.entry-points."locater.families"]
    my_model_type = "my_package.models:FAMILY"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

from locater.errors import LocaterError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Entry = TypeVar("Entry")


def _same_name(name: str) -> str:
    return name


@cache
def offered_entries(group: str) -> dict[str, EntryPoint]:
    """Entry points of installed packages in the group `locater.<group>`, by name. None is imported."""
    from importlib.metadata import entry_points  # 30 ms, which only unknown names and lists of all commands need

    return {point.name: point for point in entry_points(group=f"locater.{group}")}


class Registry(Mapping[str, Entry]):
    """Entries of one `kind`, a word or two for messages, by name.

    With `replaceable`, adding a name that is taken replaces the entry; otherwise it is refused. `spelling` maps
    the ways to write a name onto one: `str.lower` makes lookup ignore case. `group` is that of the entry
    points by which other packages add entries: iteration has those that were looked up.

    >>> fruits = Registry[int]("fruit", spelling=str.lower)
    >>> fruits.add(1, "Apple", "pomme")
    1
    >>> fruits.lookup("APPLE"), list(fruits)
    (1, ['apple', 'pomme'])
    >>> fruits.lookup("appel")
    Traceback (most recent call last):
    ...
    locater.errors.LocaterError: no fruit 'appel': did you mean 'apple'? There are apple, pomme
    """

    def __init__(
        self,
        kind: str,
        *,
        replaceable: bool = False,
        spelling: Callable[[str], str] = _same_name,
        group: str | None = None,
    ) -> None:
        self.kind, self.replaceable, self.spelling, self.group = kind, replaceable, spelling, group
        self._entries: dict[str, Entry | _LazyEntry] = {}
        self.changes = 0  # how often a name was added, replaced or removed

    def add(self, entry: Entry, *names: str) -> Entry:
        """Register an entry under one or more names, and return it. All names are checked before any is used."""
        keys = [self.spelling(name) for name in names]
        taken = [key for key in keys if key in self._entries]
        if taken and not self.replaceable:
            raise LocaterError(f"the {self.kind} {taken[0]!r} is already registered: choose another name")
        self._entries.update(dict.fromkeys(keys, entry))
        self.changes += 1
        return entry

    def remove(self, name: str) -> None:
        """Remove a name; it need not exist."""
        self._entries.pop(self.spelling(name), None)
        self.changes += 1

    def load(self, package: str, files: Iterable[str], attribute: str, names: Callable[[Entry], Iterable[str]]) -> None:
        """Import the listed files of a folder and add the `attribute` of each, under the names that `names` gives."""
        for file in files:
            entry: Entry = getattr(import_module(f"{package}.{file}"), attribute)
            self.add(entry, *names(entry))

    def load_later(self, package: str, files: Iterable[str], attribute: str) -> None:
        """The same under the name of the file, with hyphens for underscores. A file is imported when its entry is first
        used.
        """
        for file in files:
            self.add(cast("Entry", _LazyEntry(f"{package}.{file}", attribute)), file.replace("_", "-"))

    def lookup(self, name: str) -> Entry:
        """The entry with this name. An unknown name is refused in one line that lists the known ones."""
        if name in self:
            return self[name]
        names = self.names()
        close = get_close_matches(self.spelling(name), names, n=1)
        there = f"did you mean {close[0]!r}? There are" if close else "there are"
        raise LocaterError(f"no {self.kind} {name!r}: {there} {', '.join(names) or 'none'}")

    def names(self) -> list[str]:
        """Every name, including those of entry points."""
        return list({**self._entries, **self._offered()})

    def entries(self) -> tuple[Entry, ...]:
        """Every entry once, in the order of its first name."""
        return tuple({id(self[name]): self[name] for name in self}.values())

    def __getitem__(self, name: str) -> Entry:
        key = self.spelling(name)
        if key not in self._entries and (point := self._offered().get(key)) is not None:
            self.add(point.load(), key)
        entry = self._entries[key]
        if isinstance(entry, _LazyEntry):
            entry = self._entries[key] = entry.load()
        return entry

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        key = self.spelling(name)
        return key in self._entries or key in self._offered()

    def _offered(self) -> dict[str, EntryPoint]:
        return (
            {}
            if self.group is None
            else {self.spelling(name): point for name, point in offered_entries(self.group).items()}
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _LazyEntry:
    """An entry that is an attribute of a module not yet imported."""

    def __init__(self, module: str, attribute: str) -> None:
        self.module, self.attribute = module, attribute

    def load(self) -> Any:
        return getattr(import_module(self.module), self.attribute)
