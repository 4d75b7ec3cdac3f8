"""The small transformer of our own."""
