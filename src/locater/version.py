"""The version, in one place; the build reads it from here."""

__version__ = "0.1.0"
SCHEMA = 1  # of the JSON documents; goes up where a key is moved or means something else
