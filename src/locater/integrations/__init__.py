"""Controls in other people's trainers. Thin: what a control does is in `locater.control`."""
