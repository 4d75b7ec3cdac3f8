"""Read tensors by name and by rows from a live module or from safetensors, GGUF and pickle files."""
