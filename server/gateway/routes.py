"""The gateway's routes as data: those proxied to an engine, and its own. No other route of the engine is reachable,
least of all its admin's.

Schemas below are names in server/static/schemas.yaml. server/gateway/openapi.py makes the OpenAPI document from both.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProxiedRoute:
    """One route by Starlette's path template, which is also its label in metrics.

    Attributes:
        about: what it is for, for people.
        request: schema of the JSON object that is required as the body; empty where no body is read.
        response: schema of the engine's answer.
        streams: whether the answer can be an event stream instead.
    """

    path: str
    method: str
    about: str
    request: str
    response: str
    streams: bool = False

    @property
    def has_body(self) -> bool:
        """Whether a JSON object is required."""
        return bool(self.request)


PROXIED = (
    ProxiedRoute("/v1/completions", "POST", "Continue a text", "CompletionRequest", "Completion", streams=True),
    ProxiedRoute("/v1/chat/completions", "POST", "Answer a chat", "ChatRequest", "ChatCompletion", streams=True),
    ProxiedRoute("/v1/embeddings", "POST", "Embed texts", "EmbeddingRequest", "Embeddings"),
    ProxiedRoute("/v1/responses", "POST", "Make a response", "ResponseRequest", "Response", streams=True),
    ProxiedRoute("/v1/responses/{response_id}", "GET", "Get a response that was kept", "", "Response", streams=True),
    ProxiedRoute("/v1/responses/{response_id}/cancel", "POST", "Cancel a response", "", "Response"),
)


@dataclass(frozen=True)
class OwnRoute:
    """A route that the gateway answers itself, by GET and HEAD.

    Attributes:
        about: what it is for, for people.
        media: the type of its content.
        schema: of its JSON; empty where it has none.
        needs_key: whether it is for holders of a key alone, where keys are needed.
    """

    path: str
    about: str
    media: str = "application/json"
    schema: str = ""
    needs_key: bool = False


OWN = (
    OwnRoute("/v1/models", "List the models", schema="ModelList", needs_key=True),
    OwnRoute("/v1/models/{model}", "Describe a model", schema="Model", needs_key=True),
    OwnRoute(
        "/health", "200 while every model has an engine that is ready or startable, otherwise 503", schema="Health"
    ),
    OwnRoute("/health/ready", "The same as /health", schema="Health"),
    OwnRoute("/health/live", "200 while the gateway runs", schema="Live"),
    OwnRoute("/version", "Versions, preset and model", schema="Version"),
    OwnRoute("/metrics", "The gateway's and the engines' metrics", media="text/plain"),
    OwnRoute("/openapi.json", "This document", schema="Document"),
    OwnRoute("/", "The status page", media="text/html"),
)
