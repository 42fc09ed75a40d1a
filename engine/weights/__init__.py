"""Loading weights: reports progress, and refuses values that no engine can use."""
