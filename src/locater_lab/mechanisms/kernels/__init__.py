"""Triton kernels of attention mechanisms, and the operations that wrap them."""
