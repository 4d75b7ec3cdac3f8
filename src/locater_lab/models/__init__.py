"""The small transformer of our own: importing it registers its family."""

from locater_lab.models.family import FAMILY

__all__ = ["FAMILY"]
