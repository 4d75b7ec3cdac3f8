"""Text and training used by the demo and the experiments."""
