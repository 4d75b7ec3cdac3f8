"""Rows to something a person reads."""
