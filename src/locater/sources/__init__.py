"""Tensors by name and rows, here and remote: live modules, safetensors, GGUF, pickles, adapters, folders of DCP."""
