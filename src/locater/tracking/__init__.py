"""Where the records of a run go, and reading them back."""
