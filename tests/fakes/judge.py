"""Makes the fake engine as strict as the gateway's OpenAPI document: what does not fit it is refused, as vLLM would."""

import json

import jsonschema
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.gateway.openapi import document
from server.gateway.routes import PROXIED
from tests.server.gateway.inprocess import config_of


class Judge:
    """ASGI middleware that reads each proxied route's body and answers 400 where it does not fit its schema."""

    def __init__(self, app: ASGIApp, model: str) -> None:
        self._app = app
        components = document(config_of(), [model])["components"]
        self._judges = {
            route.path: jsonschema.Draft202012Validator(
                {"$ref": f"#/components/schemas/{route.request}", "components": components}
            )
            for route in PROXIED
            if route.has_body
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        judge = self._judges.get(scope.get("path", ""))
        if judge is None:
            await self._app(scope, receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        error = next(judge.iter_errors(json.loads(body)), None)
        if error is not None:
            refusal = {"message": error.message[:300], "type": "BadRequestError", "param": None, "code": 400}
            await JSONResponse({"error": refusal}, 400)(scope, receive, send)
            return
        read = False

        async def receive_again() -> Message:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_again, send)
