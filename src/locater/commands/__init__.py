"""`scan`, `probe`, `compare`, `explanations`, and fleets: from a source to a result."""
