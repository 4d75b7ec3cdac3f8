"""Text, images and batches for probe, explain and observation; and models to run on them."""
