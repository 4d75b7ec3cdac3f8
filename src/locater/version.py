"""Versions of the package and of its JSON documents; the build reads the first from here."""

__version__ = "0.1.0"
SCHEMA = 1  # of JSON documents; goes up where a key is moved or means something else
PROBE_SCHEMA = 2  # of the document of `locater probe`: 2 since M, F and localization are predicted_M, ...
