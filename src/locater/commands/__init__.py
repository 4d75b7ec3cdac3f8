"""`scan`, `probe`, `compare`: from a source to a result."""
