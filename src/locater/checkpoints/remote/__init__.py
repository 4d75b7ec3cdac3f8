"""Checkpoints that are not on this machine, read by byte ranges: the hub, buckets and plain URLs."""

from locater.checkpoints.remote.expanding import expand
from locater.checkpoints.remote.identities import identity
from locater.checkpoints.remote.session import session
from locater.checkpoints.remote.traffic import Traffic

__all__ = ["Traffic", "expand", "identity", "session"]
