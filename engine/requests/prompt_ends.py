"""Prompts that end inside a character: only generated text is returned."""

from typing import Any

from tokenizers.decoders import DecodeStream

UNFINISHED = "\ufffd"  # a tokenizer's text for bytes that are no whole character
LONGEST = 3  # the most bytes, and so tokens, of an unfinished character


def after_whole_characters(original: Any) -> Any:
    """vLLM's FastIncrementalDetokenizer, corrected: it returns a prompt's text with the first generated token."""

    class FastIncrementalDetokenizer(original):  # type: ignore[misc]
        def __init__(self, tokenizer: Any, request: Any) -> None:
            super().__init__(tokenizer, request)
            prompt = request.prompt_token_ids
            whole = whole_characters(self.tokenizer, prompt)
            if whole is not prompt:
                self.stream = DecodeStream(ids=whole, skip_special_tokens=self.skip_special_tokens)

    return FastIncrementalDetokenizer


def whole_characters(tokenizer: Any, prompt: list[int] | None) -> list[int] | None:
    """The prompt without the tokens of an unfinished character at its end; the same object if there are none."""
    if not prompt or not _ends_inside(tokenizer, prompt):
        return prompt
    for dropped in range(1, min(LONGEST, len(prompt)) + 1):
        if not _ends_inside(tokenizer, prompt[:-dropped]):
            return prompt[:-dropped]
    return []


def _ends_inside(tokenizer: Any, tokens: list[int]) -> bool:
    text: str = tokenizer.decode(tokens[-2 * LONGEST :], skip_special_tokens=False)
    return text.endswith(UNFINISHED)
