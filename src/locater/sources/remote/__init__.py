"""Checkpoints that are not on this machine, read by byte ranges: the hub, buckets and plain URLs."""

from locater.sources.remote.expanding import expand
from locater.sources.remote.identities import identity
from locater.sources.remote.session import session
from locater.sources.remote.traffic import Traffic

__all__ = ["Traffic", "expand", "identity", "session"]
