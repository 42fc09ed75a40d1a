"""Decoding steps: recorded once, fused, replayed, and compared with the model's modules before they serve."""
