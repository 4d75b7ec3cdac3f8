"""A training run: its records and sinks, its log and the page of it, and the monitor that writes and warns."""
