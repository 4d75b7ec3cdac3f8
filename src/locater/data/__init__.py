"""Text and images as batches, to run models on and to train them with."""
