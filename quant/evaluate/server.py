"""A model behind a running OpenAI-compatible server, measured through /v1/completions.

vLLM echoes a prompt with the log-probability of each token (`echo`, `logprobs`). Text perplexity and the questions are
measured with these. Two things cannot be measured: the KL divergence, which needs the server's whole distribution, and
token-exact sliding windows, since windows are cut by characters here.
"""

import math
from dataclasses import dataclass, field

import httpx

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.text import TextResult
from quant.jsonfile import field as json_field
from quant.progress import OnProgress, Progress, ignore_progress

# About 512 tokens of English. Windows do not overlap.
WINDOW_CHARACTERS = 2000
_TIMEOUT = 300.0  # seconds for one answer: a busy CPU engine is slow
_REMEDY = "Check the URL, the key (VOLTSERVE_API_KEY) and that the server is ready"


@dataclass(frozen=True)
class ServerModel:
    """`url` without /v1. `name`: the served model's; if empty, the server is asked. `key`: an API key, or empty."""

    url: str
    key: str = field(default="", repr=False)
    name: str = ""

    def connected(self) -> "ServerModel":
        """This model with the name that the server gives it. Raises QuantError when the server does not answer."""
        answer = self._request("GET", "/v1/models", None)
        entries = json_field(answer, "data", list, self.url, _REMEDY)
        names = [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if not names or (self.name and self.name not in names):
            raise QuantError(f"{self.url}: expected the model {self.name or 'any'}, got {', '.join(names)}", _REMEDY)
        return ServerModel(self.url, self.key, self.name or names[0])

    def generate(self, prompt: str, tokens: int) -> str:
        """The greedy continuation of `prompt`, at most `tokens` tokens long."""
        return json_field(self._complete(prompt=prompt, max_tokens=tokens), "text", str, self.url, _REMEDY)

    def score(self, prompt: str, continuation: str) -> float:
        """The log-probability, in nats, that `continuation` adds to `prompt`: that of both, minus that of the prompt.

        Tokens' offsets in the text are not used: they are wrong where a character is more than one token.
        """
        return sum(self._echo(prompt + continuation)) - sum(self._echo(prompt))

    def measure_text(self, text: Text, *, tokens: int, on_progress: OnProgress = ignore_progress) -> TextResult:
        """Perplexity over windows of 2000 characters, until `tokens` tokens are scored or the text ends."""
        total, count, read = 0.0, 0, 0
        while count < tokens and read < len(text.content):
            piece = text.content[read : read + WINDOW_CHARACTERS]
            scores = self._echo(piece)
            total -= sum(scores)
            count += len(scores)
            read += len(piece)
            on_progress(Progress("measuring on text", min(count, tokens), tokens, "tokens"))
        if not count:
            raise QuantError(f"{text.source}: expected text of several tokens, got {text.content!r}", "Name another")
        return TextResult(count, math.exp(total / count), total / math.log(2) / len(text.content[:read].encode()))

    def _echo(self, text: str) -> list[float]:
        """The log-probability of each token of `text`, except the first, which nothing predicts."""
        found = self._complete(prompt=text, max_tokens=0, echo=True, logprobs=0).get("logprobs")
        if not isinstance(found, dict) or not isinstance(found.get("token_logprobs"), list):
            raise QuantError(f"{self.url}: expected echoed log-probabilities, got {found!r}", _REMEDY)
        return [float(score) for score in found["token_logprobs"] if score is not None]

    def _complete(self, **body: object) -> dict[str, object]:
        answer = self._request("POST", "/v1/completions", {"model": self.name, "temperature": 0, **body})
        choices = json_field(answer, "choices", list, self.url, _REMEDY)
        if not choices or not isinstance(choices[0], dict):
            raise QuantError(f"{self.url}: expected a completion, got {choices!r}", _REMEDY)
        return choices[0]

    def _request(self, method: str, path: str, body: dict[str, object] | None) -> dict[str, object]:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            response = httpx.request(method, self.url + path, json=body, headers=headers, timeout=_TIMEOUT)
            response.raise_for_status()
            answer = response.json()
        except httpx.HTTPStatusError as error:
            text = error.response.text[:300]
            raise QuantError(
                f"{self.url}{path}: expected success, got {error.response.status_code}: {text}", _REMEDY
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise QuantError(f"{self.url}{path}: expected an answer, got {error!r}", _REMEDY) from None
        if not isinstance(answer, dict):
            raise QuantError(f"{self.url}{path}: expected a JSON object, got {answer!r}", _REMEDY)
        return answer
