"""Attention calls of a running model: which call is attention, how it is heard, how it is changed."""
