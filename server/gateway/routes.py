"""The OpenAI routes that are proxied, as data. No other route of the engine is reachable, least of all its admin's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProxiedRoute:
    """One route by Starlette's path template, its label in metrics; `has_body` where a JSON object is required."""

    path: str
    method: str
    has_body: bool


PROXIED = (
    ProxiedRoute("/v1/completions", "POST", has_body=True),
    ProxiedRoute("/v1/chat/completions", "POST", has_body=True),
    ProxiedRoute("/v1/embeddings", "POST", has_body=True),
    ProxiedRoute("/v1/responses", "POST", has_body=True),
    ProxiedRoute("/v1/responses/{response_id}", "GET", has_body=False),
    ProxiedRoute("/v1/responses/{response_id}/cancel", "POST", has_body=False),
)
