"""A training run, logged and warned of."""
