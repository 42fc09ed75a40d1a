"""How ranks meet: their all-reduce, and vLLM's communicator on it."""
