"""Sums between ranks: our all-reduce, and vLLM's communicator that uses it."""
