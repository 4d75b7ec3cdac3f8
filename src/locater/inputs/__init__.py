"""Text, images and batches for probe, explain and observation."""
