"""Attention on the paged cache of transformers' continuous batching: one call holds queries of several requests, and
the attention function reads the keys of each from the cache itself.

What is read here of `transformers.generation.continuous_batching` is no public interface: where a version has it
otherwise, the call is refused and not guessed at.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from locater.errors import LocaterError


@dataclass(frozen=True)
class Part:
    """The queries and keys of one request in a call, and whether its first key has left the cache."""

    request: str | int
    queries: slice
    keys: slice
    cut: bool = False


@dataclass
class PagedKeys:
    """What the attention function read from the cache in one call: keys (1, K, S, D) of all requests."""

    cache: Any
    key: Tensor | None = None
    lengths: Tensor | None = None  # (requests + 1,): where the keys of each begin

    def parts(self, module: nn.Module, kw: dict[str, Any]) -> tuple[tuple[Part, ...], int | None]:
        """The requests of the call, and the window of the layer."""
        try:
            return self._parts(module, kw)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise LocaterError(
                f"this version of transformers keeps its paged cache in a way not known here: {error!r}"
            ) from None

    def _parts(self, module: nn.Module, kw: dict[str, Any]) -> tuple[tuple[Part, ...], int | None]:
        starts, positions = kw.get("cu_seq_lens_q"), kw.get("position_ids")
        if self.key is None or self.lengths is None or not isinstance(starts, Tensor):
            raise LocaterError(
                "attention on a paged cache is measured where the keys pass through Python: give generate_batch() a "
                "ContinuousBatchingConfig(use_cuda_graph=False, max_blocks_per_request=0)"
            )
        allocator = self.cache.layer_to_allocator[module.layer_idx]
        window = allocator.sliding_window if allocator.layer_type == "sliding_attention" else None
        queries, keys = starts.tolist(), self.lengths.tolist()
        last = positions.flatten().tolist() if window is not None and isinstance(positions, Tensor) else None
        names = self._requests(allocator, kw["write_index"][allocator.index].tolist(), queries)
        found = []
        for name, a, b, c, d in zip(names, queries, queries[1:], keys, keys[1:], strict=False):
            if b > a:  # the others fill the batch up
                found.append(Part(name, slice(a, b), slice(c, d), last is not None and last[b - 1] >= d - c))
        return tuple(found), window

    def _requests(self, allocator: Any, slots: list[int], starts: list[int]) -> list[str | int]:
        """The names of the requests: of those that own the blocks in which the last new keys are written."""
        owner = {block: name for name, blocks in allocator.block_table.items() for block in blocks}
        stride = allocator.block_physical_stride
        lasts = [slots[end - 1] // stride if 0 < end <= len(slots) else -1 for end in starts[1:]]
        return [owner.get(block, "unknown") for block in lasts]


def paged_cache_of(kw: dict[str, Any]) -> Any:
    """The paged cache that an attention function is called with; None without one."""
    cache = kw.get("cache")
    return cache if type(cache).__name__ == "PagedAttentionCache" else None


@contextmanager
def reading(cache: Any) -> Iterator[PagedKeys]:
    """Inside, what the attention function reads from the cache is kept."""
    seen = PagedKeys(cache)
    update = cache.update

    def keep(*args: Any, **kw: Any) -> Any:
        key, value = update(*args, **kw)
        known = kw.get("kwargs", {})
        if "k_cache" not in known and isinstance(known.get("cu_seq_lens_k"), Tensor):
            seen.key, seen.lengths = key.detach(), known["cu_seq_lens_k"]
        return key, value

    cache.__dict__["update"] = keep
    try:
        yield seen
    finally:
        del cache.__dict__["update"]
