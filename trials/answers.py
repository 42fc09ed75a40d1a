"""Fixed questions to an engine, and its answers with their probabilities.

Prompts are continued greedily, one after another and all together. Texts are scored token by token.
"""

import math
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trials.served import Engine

TOKENS = 64
WINDOW = 1024  # tokens of a text
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "The three laws of motion are",
    "def quicksort(values):",
    "Water is made of",
    "The fastest land animal is",
    "In 1969, Neil Armstrong",
    "A good recipe for pancakes starts with",
    "The difference between a list and a tuple in Python is",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "Photosynthesis is the process by which",
    "SELECT name FROM users WHERE",
    "The largest planet in the solar system is",
    "To be or not to be,",
    "The stock market fell today because",
    "import numpy as np\n",
    "Roses are red,",
    "The main causes of the First World War were",
    "She opened the door and saw",
)


def make_questions(model: Path) -> dict[str, Any]:
    """Prompts and texts as token ids. The texts are help topics of this Python, which every Python carries."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join(
        topics[name] for name in ("typesseq", "class", "formatstrings", "exceptions", "operator-summary")
    )
    ids = tokenizer.encode(text).ids
    return {
        "text": f"pydoc_data.topics of Python {platform.python_version()}",
        "prompts": [tokenizer.encode(prompt).ids for prompt in PROMPTS],
        "texts": [ids[start : start + WINDOW] for start in (0, WINDOW)],
    }


def continue_prompt(engine: Engine, prompt: list[int]) -> list[dict[str, Any]]:
    """Of each token: its id, its log probability, and those of the likeliest five."""
    body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}
    logprobs = engine.post("/v1/completions", body | {"return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
    steps = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [
        {"token": _id(token), "logprob": logprob, "top": {_id(key): value for key, value in top.items()}}
        for token, logprob, top in steps
    ]


def text_logprobs(engine: Engine, text: list[int]) -> list[float]:
    """The log probability of each token but the first."""
    body = {"model": "m", "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    prompt_logprobs = engine.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for token, entry in zip(text[1:], prompt_logprobs[1:], strict=True)]


def ask(engine: Engine, questions: dict[str, Any]) -> dict[str, Any]:
    """All questions."""
    alone = [continue_prompt(engine, prompt) for prompt in questions["prompts"]]
    with ThreadPoolExecutor(len(questions["prompts"])) as pool:
        together = list(pool.map(lambda prompt: continue_prompt(engine, prompt), questions["prompts"]))
    logprobs = [value for text in questions["texts"] for value in text_logprobs(engine, text)]
    return {
        "alone": alone,
        "together": together,
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "perplexity_tokens": len(logprobs),
    }


def _id(token: str) -> int:
    return int(token.removeprefix("token_id:"))
