"""An event stream that begins before its engine does: comments keep it alive while the request waits for a start.

A comment is a line that begins with a colon (WHATWG HTML, 9.2.6, "Interpreting an event stream"); clients ignore it.
Once one was sent the status is 200, so a later error becomes the stream's last event.
"""

from starlette.types import Message, Scope, Send

# Events must reach the client as they arrive. Otherwise nginx buffers a response, and caches keep it.
OF_EVENTS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))


class EarlyStream:
    """The answer to a request for a stream. Comments may precede the answer; `send` then adapts the answer to them.

    Args:
        scope: the request's; `state` gets the `outcome` of an error that came too late to be a status.
        send: the request's.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._begun = False
        self._failed = False

    async def comment(self, text: str) -> None:
        """Sends a comment; before the first, the stream's head."""
        if not self._begun:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *OF_EVENTS]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._begun = True
        line = " ".join(text.split())
        await self._send({"type": "http.response.body", "body": f": {line}\n\n".encode(), "more_body": True})

    async def send(self, message: Message) -> None:
        """Sends a message of the answer. After a comment, the head is dropped and an error's JSON becomes an event."""
        if self._begun and message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._failed = True
                self._scope["state"]["outcome"] = message["status"]
            return
        if self._failed and message.get("body"):
            message = {**message, "body": b"data: %b\n\n" % message["body"]}
        await self._send(message)
