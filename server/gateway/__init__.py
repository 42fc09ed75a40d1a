"""The HTTP face: documented OpenAI routes proxied to the engine, and voltserve's own health, metrics and version."""

from server.gateway.app import Gateway

__all__ = ["Gateway"]
