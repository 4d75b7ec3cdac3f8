"""Checkpoints that are not on this machine, read by byte ranges: the hub, buckets and plain URLs."""

from locater.checkpoints.remote.expanding import expand
from locater.checkpoints.remote.identities import identity

__all__ = ["expand", "identity"]
