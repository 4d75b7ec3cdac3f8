"""Checkpoints that are not on this machine, read by byte ranges: the hub, buckets and plain URLs."""

from locater.sources.remote.http_client import Traffic
from locater.sources.remote.prefetch import session

__all__ = ["Traffic", "session"]
