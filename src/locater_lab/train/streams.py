"""Text that is seen once: token files, made once from several parts of a corpus, that a run reads as one stream.

`write_stream` tokenizes every part and keeps whole documents out of each source for the select and report splits. It
writes a file of 16-bit tokens for each part and each held-out split of a source, and at last STREAM.tokens.json, which
names them with their counts and hashes. A plan whose corpus is such a file reads the parts, joined in their order, in
rows of its length; a run visits each row at most once, in an order that its seed draws, and is refused where its steps
need more rows than there are. So no token is a target twice, and runs of one seed see the same text in the same order.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.files import write_whole
from locater.inputs.text import read_text
from locater.inputs.tokenizer import PairTokenizer, Tokenizer, make_tokenizer
from locater_lab.train.batches import Batch, draw
from locater_lab.train.plan import Plan
from locater_lab.train.text_data import TextData

SUFFIX = ".tokens.json"  # of a corpus that is a stream
HELD_OUT = ("report", "select")  # in the order in which documents go to them
LARGEST_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Source:
    """Parts of one corpus: files of text, with the characters that separate documents, and how many characters of the
    first part's first documents are held out for each of report and select.
    """

    name: str
    files: tuple[str, ...]
    separator: str
    report: int
    select: int


def write_stream(
    path: Path, sources: Sequence[Source], texts: Path, vocabulary: int, tokenizer: Path, every: int = 1
) -> dict[str, Any]:
    """Tokenize the files of these sources, which are in the folder `texts`, and describe the stream in `path`.

    The tokenizer is read from its file; where there is none it is learned from every `every`-th document that is
    trained on, and written there. What is described already, with files of these hashes, is not made again.
    """
    if path.is_file():
        return check_stream(path)
    parts = {name: pieces for source in sources for name, pieces in _parts(source, texts).items()}
    if not tokenizer.is_file():
        documents = [text for (_, split, _), (held, _) in parts.items() if split == "train" for text in held]
        write_whole(tokenizer, make_tokenizer(vocabulary, documents[::every]).to_json())
    learned = PairTokenizer.from_json(tokenizer.read_text(encoding="utf-8"))
    if learned.size != vocabulary or vocabulary > LARGEST_VOCABULARY:
        raise LocaterError(f"{tokenizer}: has {learned.size} tokens, and {vocabulary} are asked for")
    entries = [_write_part(path, key, joined, learned) for key, (_, joined) in parts.items()]
    document = {
        "vocabulary": vocabulary,
        "tokenizer": {"file": tokenizer.name, "sha256": _digest(tokenizer)},
        "sha256": hashlib.sha256(" ".join(entry["sha256"] for entry in entries).encode()).hexdigest(),
        "parts": entries,
    }
    write_whole(path.with_name(tokenizer.name), tokenizer.read_text(encoding="utf-8"))
    write_whole(path, json.dumps(document, indent=1) + "\n")  # last: what it names is there
    return document


def check_stream(path: Path) -> dict[str, Any]:
    """The description of a stream; refused where one of its files is missing or is not the one that it names."""
    document = read_description(path)
    for entry in (*document["parts"], document["tokenizer"]):
        file = path.with_name(entry["file"])
        if not file.is_file() or _digest(file) != entry["sha256"]:
            raise LocaterError(f"{file}: is missing or changed: remove {path} and make the stream again")
    return document


PACKED = ".xz"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9, "lc": 3, "lp": 1, "pb": 1}]  # for pairs of bytes


def pack_stream(path: Path, folder: Path) -> None:
    """Copy a stream to a folder with its token files compressed: tokens take less than the text that they were."""
    document = check_stream(path)
    folder.mkdir(parents=True, exist_ok=True)
    for entry in (*document["parts"], document["tokenizer"]):
        target = folder / (entry["file"] + PACKED)
        if not target.is_file():
            data = path.with_name(entry["file"]).read_bytes()
            target.write_bytes(lzma.compress(data, format=lzma.FORMAT_XZ, filters=FILTERS))
    write_whole(folder / path.name, path.read_text(encoding="utf-8"))


def unpack_stream(packed: Path, folder: Path) -> dict[str, Any]:
    """The stream that `pack_stream` copied, in a folder as it was; its files are decompressed side by side."""
    document = read_description(packed)
    folder.mkdir(parents=True, exist_ok=True)

    def unpack(entry: Mapping[str, Any]) -> None:
        data = lzma.decompress(packed.with_name(entry["file"] + PACKED).read_bytes())  # releases Python's lock
        (folder / entry["file"]).write_bytes(data)

    with ThreadPoolExecutor() as pool:
        list(pool.map(unpack, (*document["parts"], document["tokenizer"])))
    write_whole(folder / packed.name, packed.read_text(encoding="utf-8"))
    return check_stream(folder / packed.name)


def read_description(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {name: document[name] for name in ("vocabulary", "tokenizer", "sha256", "parts")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LocaterError(f"{path}: not the description of a stream ({error!r})") from None


def _parts(source: Source, texts: Path) -> dict[tuple[str, str, int], tuple[list[str], str]]:
    """Documents of each part and the text that they make, by source, split and number of the file."""
    found: dict[tuple[str, str, int], tuple[list[str], str]] = {}
    for number, file in enumerate(source.files):
        documents = [text for text in read_text(texts / file).split(source.separator) if text.strip()]
        if number == 0:
            for split in HELD_OUT:
                count, size = 0, getattr(source, split)
                while count < len(documents) and sum(map(len, documents[:count])) < size:
                    count += 1
                found[source.name, split, 0] = documents[:count], source.separator.join(documents[:count])
                documents = documents[count:]
        found[source.name, "train", number] = documents, source.separator.join([*documents, ""])
    return found


def _write_part(path: Path, key: tuple[str, str, int], text: str, tokenizer: Tokenizer) -> dict[str, Any]:
    source, split, number = key
    stem = path.name.removesuffix(SUFFIX)
    file = path.with_name(f"{stem}-{source}-{split}-{number}.u16")
    tokens = tokenizer.encode(text).numpy().astype("<u2")
    partial = file.with_suffix(".partial")
    tokens.tofile(partial)
    partial.replace(file)
    return {
        "source": source,
        "split": split,
        "file": file.name,
        "tokens": len(tokens),
        "characters": len(text),
        "bytes": len(text.encode()),
        "sha256": _digest(file),
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- a run's data ----


class SavedTokenizer:
    """A tokenizer that is read from its file only where text is encoded: a run on token files does not need it."""

    def __init__(self, text: str, size: int) -> None:
        self._text, self.size = text, size

    def encode(self, text: str) -> Tensor:
        return PairTokenizer.from_json(self._text).encode(text)

    def to_json(self) -> str:
        return self._text


class StreamData(TextData):
    """A stream in rows, each visited at most once. Splits beside train, select and report: `report NAME` is the part of
    report that comes from the source NAME.
    """

    @property
    def rows(self) -> int:
        """How many rows the training text has. The last target of one is the first input of the next."""
        return (len(self.splits["train"]) - 1) // self.plan.length

    @cached_property
    def order(self) -> Tensor:
        return torch.randperm(self.rows, generator=draw(self.plan.seed, -1))

    def batch(self, index: int) -> Batch:
        size = self.plan.batch
        starts = self.order[index * size : (index + 1) * size, None] * self.plan.length
        return self._pair(self.splits["train"], starts, draw(self.plan.seed, index))


def is_stream(plan: Plan) -> bool:
    return any(name.endswith(SUFFIX) for name in plan.corpus)


def open_stream(plan: Plan, device: torch.device) -> StreamData:
    """The stream that a plan names as its corpus."""
    if len(plan.corpus) != 1 or plan.task not in ("causal", "masked") or plan.bos or plan.words or plan.select:
        raise LocaterError(
            f"corpus={plan.corpus[0]}: a stream of tokens is the only corpus of its plan, for --task causal or masked, "
            "and has its own words and splits: leave out other texts, bos, words, select and report"
        )
    path = Path(plan.corpus[0])
    document = read_description(path)
    if document["vocabulary"] != plan.vocabulary:
        raise LocaterError(f"{path}: has a vocabulary of {document['vocabulary']}: give --vocabulary of this size")
    text = path.with_name(document["tokenizer"]["file"]).read_text(encoding="utf-8")
    splits = _splits(path, document["sha256"], device)
    facts: dict[str, Any] = {
        "text": list(plan.corpus),
        "sha256": document["sha256"],
        "characters": _sums(document["parts"], "characters"),
        "bytes": _sums(document["parts"], "bytes"),
        "tokens": _sums(document["parts"], "tokens"),
        "vocabulary": document["vocabulary"],
    }
    data = StreamData(plan, SavedTokenizer(text, document["vocabulary"]), splits, facts, device)
    needed = plan.steps * plan.accumulate * plan.batch
    if needed > data.rows:
        raise LocaterError(
            f"{path}: {plan.steps} steps read {needed} rows of {plan.length} tokens, and the text has {data.rows}, "
            "each of which is seen once: give fewer --steps, or more parts"
        )
    return data


def sources_of(data: StreamData, split: str = "report") -> list[str]:
    """Names of the sources that a held-out split has, in their order."""
    return [name.removeprefix(f"{split} ") for name in data.splits if name.startswith(f"{split} ")]


@lru_cache(maxsize=1)
def _splits(path: Path, sha256: str, device: torch.device) -> dict[str, Tensor]:
    """Kept for the next run of this process."""
    document = read_description(path)
    kind = torch.int16 if document["vocabulary"] <= 1 << 15 else torch.int32
    found: dict[str, list[Tensor]] = {"train": [], "select": [], "report": []}
    for entry in document["parts"]:
        tokens = np.fromfile(path.with_name(entry["file"]), "<u2")
        if len(tokens) != entry["tokens"]:
            raise LocaterError(f"{entry['file']}: {len(tokens)} tokens, and {path} names {entry['tokens']}")
        held = torch.from_numpy(tokens.astype(np.int32)).to(device, kind)
        found[entry["split"]].append(held)
        if entry["split"] != "train":
            found.setdefault(f"{entry['split']} {entry['source']}", []).append(held)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _sums(parts: Iterable[Mapping[str, Any]], what: str) -> dict[str, int]:
    counts = dict.fromkeys(("train", "select", "report"), 0)
    for entry in parts:
        counts[entry["split"]] += entry[what]
    return counts
