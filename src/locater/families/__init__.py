"""Where the heads are: one file and one `Family` record per architecture, and the registry of them."""

from locater.families.record import Block, Family
from locater.families.registry import families, register

__all__ = ["Block", "Family", "families", "register"]
