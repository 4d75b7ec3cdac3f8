"""What the commands return: scans, probes, comparisons, explanations, fleets."""
