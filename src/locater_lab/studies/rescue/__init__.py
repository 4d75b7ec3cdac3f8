"""Does acting on the heads that a warning names save a run? docs/results/rescue-plan.md was written before any run."""
