"""The versions of the package and of its documents. The build reads the first."""

__version__ = "0.1.0"
SCHEMA = 1  # of the JSON documents; increases when a key moves or changes its meaning
PROBE_SCHEMA = 2  # of the document of `locater probe`: 2 since M, F and localization are predicted_M, ...
