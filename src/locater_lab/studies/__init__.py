"""Our own questions, in the form of the papers."""
