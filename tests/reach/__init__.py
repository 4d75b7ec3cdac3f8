"""Tiny models of every model type that transformers knows, and what Locater makes of them."""
