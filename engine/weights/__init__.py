"""Loading weights: progress, and values that no engine can use."""
