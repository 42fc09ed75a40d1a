"""Serving as one process: checks before the start, the event loop, the terminal, the end."""
