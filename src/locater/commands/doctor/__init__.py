"""`doctor()`: is this checkpoint what I think it is? From its weights alone, each tensor read once."""
