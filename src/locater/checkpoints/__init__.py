"""Named tensors from anywhere, by name and rows: a live module, safetensors, GGUF, pickles."""
