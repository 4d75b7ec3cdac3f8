"""The laboratory that stands on Locater: attention mechanisms, a small transformer, its trainer, papers and studies."""
