"""A model under observation: what is heard of its attention, and what is kept of it."""
