"""Training data that is generated, and tokenizers that only training uses."""
