"""Text and images to run models on and to train them with."""
