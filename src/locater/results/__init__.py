"""What the commands return: scans, probes, comparisons and series of them, explanations, trajectories."""
