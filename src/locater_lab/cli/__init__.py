"""The commands `train` and `reproduce`."""
