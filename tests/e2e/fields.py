"""Each field that the engine takes, with values at, over and under its bounds, and hostile ones.

`taken` must be answered with 200, `refused` with a 4xx. For `odd` values either is right.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.e2e.hostile import SCHEMAS, TEXTS, constraints, formats, messages, nested, raw, tools

MODEL = "models/smollm2-nvfp4"
VOCABULARY = 49152
CONTEXT = 8192

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, EMBEDDINGS = "/v1/responses", "/v1/embeddings"

_HELLO = [{"role": "user", "content": "Hello"}]
ORDINARY: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3},
    CHAT: {"model": MODEL, "messages": _HELLO, "max_tokens": 3},
    RESPONSES: {"model": MODEL, "input": "Hello", "max_output_tokens": 3},
    EMBEDDINGS: {"model": MODEL, "input": "Hello"},
}

NO_JSON = [float("nan"), float("inf"), float("-inf")]
WHOLE = [0, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63) - 1, 10**20, 10**30, -(10**30), raw("1" * 5000)]
REAL = [-0.0, 5e-324, 1e-300, 1e-45, 1e-38, 3.5e38, 1e308, -1e308, raw("1e999"), raw("-1e999"), 10**20, 10**400]
OTHER = [None, True, "", "x", 1.5, [], {}, [None], [{}], nested(60)]


@dataclass(frozen=True)
class Values:
    """What is sent of one field.

    Attributes:
        beside: what else is in the request with each of them.
        about: other fields that a refusal may name, because the value is wrong for what they say.
        long: an answer may rightly take minutes, so the client leaves after a moment.
    """

    taken: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)
    odd: list[Any] = field(default_factory=list)
    beside: dict[str, Any] = field(default_factory=dict)
    about: tuple[str, ...] = ()
    long: bool = False


def whole(taken: list[Any], refused: list[Any], **more: Any) -> Values:
    """An integer."""
    return Values(taken, [*refused, *NO_JSON, 1.5, [], {}, "x"], ["1", *WHOLE, *OTHER], **more)


def number(taken: list[Any], refused: list[Any], **more: Any) -> Values:
    """A number."""
    return Values(taken, [*refused, *NO_JSON, [], {}, "x"], ["1", *REAL, *OTHER], **more)


def flag(**more: Any) -> Values:
    """A truth value."""
    return Values([True, False], [*NO_JSON, 2, [], {}, "x"], [0, 1, "true", *OTHER], **more)


def text(**more: Any) -> Values:
    """A text that only passes through."""
    return Values(more.pop("taken", []), [*NO_JSON, 1, [], {}, True], [*TEXTS, *OTHER], **more)


def anything(*values: Any, **more: Any) -> Values:
    """What has a shape of its own."""
    return Values([], [*NO_JSON], [*values, *OTHER], **more)


# Token ids: the vocabulary's ends, beyond them, and what no machine integer holds.
IDS = [-1, VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**63, 10**20, 10**30, -(2**63) - 1]

_F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_CHOICES = ["none", "auto", "required", _F, {"type": "function", "function": {"name": "g"}}, {"type": "function"}, "x"]
_CHOICES += [{"type": "function", "function": {"name": name}} for name in ("", 5, None)] + [{"type": "allowed_tools"}]

SHARED: dict[str, Values] = {
    "model": Values([None], [*NO_JSON, "nonsense", "", 5, [], {}, "models/../models/smollm2-nvfp4"], [*TEXTS, *OTHER]),
    "temperature": number([0, 5e-324, 1e-300, 1e-45, 1e-9, 0.01, 2], [-5e-324, -1e-9, -1]),
    "top_p": number([1, 1e-9, 5e-324, 1e-45], [0, -1, 1.0001, -5e-324]),
    "top_k": whole([0, -1, 1, VOCABULARY], [-2]),
    "seed": whole([0, -1, 2**63 - 1, -(2**63)], [2**63, 10**20]),
    "stream": Values([True, False], [*NO_JSON, [], {}, "x"], OTHER),
    "user": text(taken=TEXTS),
    "ignore_eos": flag(),
    "include_stop_str_in_output": flag(),
    "skip_special_tokens": flag(),
    "repetition_penalty": number([1e-5, 1, 2], [0, -1, -5e-324]),
    "stop": Values(
        [None, [], "a", ["a"] * 4], [*NO_JSON, [""], 5, [5], {}, [None]], [*TEXTS, TEXTS[1:], ["x"] * 5000, *OTHER]
    ),
    "priority": whole([0], []),
    "cache_salt": Values(["a", "x" * 9000], [*NO_JSON, "", 5, []], [*TEXTS, *OTHER]),
    "request_id": text(),
    "structured_outputs": anything(*constraints()),
    "logit_bias": anything(
        *({str(token): 1 for token in (given,)} for given in IDS),
        *({"5": value} for value in (100, -100, 101, -101, 1e308, raw("1e999"), None, "x", 10**30)),
        *({"x": 1}, {"": 1}, {"5.0": 1}, {" 5 ": 1}, {"٥": 1}, {"0005": 1}, {str(n): -100 for n in range(1000)}, [5]),
    ),
    "vllm_xargs": anything(
        {"a": "b"}, {"": 1}, {"a": {}}, {"a": 10**30}, {"kv_transfer_params": "x"}, {"a": "x" * 9000}
    ),
    "kv_transfer_params": anything({"do_remote_prefill": True}, {"do_remote_decode": True, "remote_port": "x"}),
}
GENERATES: dict[str, Values] = {
    **SHARED,
    "max_tokens": whole([1, None], [-1, CONTEXT + 1, 10**9], long=True),
    "n": whole([1, 2, 16], [0, -1, 10**6], about=("prompt",)),
    "presence_penalty": number([-2, 2, 0], [-2.1, 2.1, 1e9]),
    "frequency_penalty": number([-2, 2, 0], [-2.1, 2.1, -1e9]),
    "min_p": number([0, 1, 5e-324], [-1, 1.1]),
    "length_penalty": number([0, 1, -1], [], beside={"use_beam_search": True, "n": 2}),
    "use_beam_search": flag(beside={"n": 2}, about=("n",)),
    "min_tokens": whole([0, 1, 3], [-1, 4, 10**9], about=("max_tokens",)),
    "stop_token_ids": anything([], [0], [VOCABULARY - 1], *([given] for given in IDS), list(range(3000)), [1.5], ["5"]),
    "allowed_token_ids": anything(
        [], [0], [VOCABULARY - 1], *([given] for given in IDS), [0, -1], list(range(3000)), [0, 0]
    ),
    "spaces_between_special_tokens": flag(),
    "truncate_prompt_tokens": whole([1, -1, CONTEXT - 4], [-2, 10**9, 10**20], about=("prompt", "messages", "input")),
    "prompt_logprobs": whole([0, 1, 5], [-2, 1000, 10**9], about=("logprobs", "stream")),
    "add_special_tokens": flag(),
    "return_tokens_as_token_ids": flag(beside={"logprobs": True}),
    "return_token_ids": flag(),
    "response_format": anything(*formats()),
    "stream_options": anything(
        *({"include_usage": given} for given in (True, False, None, 5, "x", [])),
        *({"continuous_usage_stats": given} for given in (True, "x", None)),
        {"nothing": 1},
        beside={"stream": True},
    ),
    "repetition_detection": anything(
        *({"max_pattern_size": given, "min_count": 2} for given in (0, 1, -1, 2**31, 2**63, 10**20, 1.5, "x")),
        *({"max_pattern_size": 5, "min_count": given} for given in (0, 1, -1, 2, 2**63, 10**20)),
        *({"max_pattern_size": 5, "min_pattern_size": given, "min_count": 2} for given in (0, 5, 6, -1, 10**20)),
        {"nothing": 1},
    ),
}

FIELDS: dict[str, dict[str, Values]] = {
    COMPLETIONS: {
        **GENERATES,
        "prompt": Values(
            ["a", ["a", "b"], [0], [VOCABULARY - 1], [[5], [6, 7]]],
            [
                *NO_JSON,
                "",
                [],
                [[]],
                [-1],
                [VOCABULARY],
                [10**20],
                [10**30],
                [[5], [-1]],
                [[5], [VOCABULARY]],
                ["a", 5],
                5,
                {},
            ],
            [
                *TEXTS,
                *([given] for given in IDS),
                [2**31],
                [5.0],
                nested(900, "[", "]"),
                ["5"],
                [True],
                ["", "a"],
                ["a"] * 70,
                [5] * 9000,
                *OTHER,
            ],
            about=("max_tokens", "prompt_embeds"),
        ),
        "suffix": text(),
        "echo": flag(),
        "logprobs": whole([0, 1, 20], [-2, 21, 1000, 10**9]),
        "prompt_embeds": anything("AAAA", "x", ["AAAA"], "A" * 20_000, beside={"prompt": None}, about=("prompt",)),
    },
    CHAT: {
        **GENERATES,
        "messages": anything(*messages(), about=("max_tokens",)),
        "max_completion_tokens": whole([1, None], [-1, CONTEXT + 1, 10**9], about=("max_tokens",), long=True),
        "logprobs": flag(),
        "top_logprobs": whole([0, 1, 20], [-2, 21, 10**9], beside={"logprobs": True}),
        "bad_words": anything([], [""], ["\0"], ["the"], ["🙂" * 50], [5], TEXTS[1:], ["x"] * 2000),
        "echo": flag(),
        "add_generation_prompt": flag(),
        "continue_final_message": flag(beside={"add_generation_prompt": False}),
        "documents": anything([{}], [{"text": "a"}], [{"text": 5}], [{"a": "b" * 9000}]),
        "chat_template": text(),
        "chat_template_kwargs": anything(
            *(
                {name: given}
                for name in ("tokenize", "chat_template", "messages", "tools", "conversation")
                for given in (5, "x")
            ),
            *({"": 1}, {"padding": True}, {"return_dict": True}, {"add_generation_prompt": "x"}, {"x": nested(60)}),
            *(
                {"max_length": -1},
                {"truncation": True, "max_length": 1},
                {"return_tensors": "pt"},
                {"tokenizer_kwargs": 5},
            ),
        ),
        "tools": anything(*tools()),
        "tool_choice": anything(*_CHOICES, beside={"tools": [_F]}, about=("tools",)),
        "parallel_tool_calls": flag(),
        "reasoning_effort": anything("none", "low", "high", "x", 5),
        "include_reasoning": flag(),
        "thinking_token_budget": whole([], []),
        "media_io_kwargs": anything({"image": {}}, {"x": {"a": 5}}, {"video": {"num_frames": 10**20}}),
        "mm_processor_kwargs": anything({"a": 5}, {"size": -1}),
    },
    RESPONSES: {
        **SHARED,
        "input": Values(
            ["a"],
            [*NO_JSON, 5, {}],
            [
                *TEXTS,
                *([{"role": "user", "content": content}] for content in (*TEXTS, None, 5, [], [{}])),
                *(
                    [{"type": kind}]
                    for kind in ("message", "function_call", "function_call_output", "reasoning", "nonsense")
                ),
                *(
                    [{"type": kind, "id": "a", "status": 5}]
                    for kind in ("item_reference", "mcp_call", "image_generation_call")
                ),
                [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}],
                [{"type": "function_call_output", "call_id": "nowhere", "output": "x"}],
                [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
                [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}],
                [{"role": "nonsense", "content": "a"}],
                *OTHER,
            ],
            about=("max_output_tokens",),
        ),
        "instructions": text(about=("max_output_tokens",)),
        "max_output_tokens": whole([1, 16], [0, -1, CONTEXT + 1, 10**9], long=True),
        "max_tool_calls": whole([], []),
        "previous_response_id": text(),
        "background": Values([False], [*NO_JSON, 2, [], {}, "x"], [True, *OTHER], about=("store",)),
        "store": flag(),
        "include": anything(["nonsense"], ["message.output_text.logprobs"], [5]),
        "metadata": anything({"a": 5}, {"": ""}, {"x" * 9000: "y" * 9000}),
        "prompt": anything({"id": "x"}, {"id": 5}),
        "reasoning": anything({"effort": "low"}, {"effort": "x"}, {"effort": 5}, {"summary": "x"}),
        "service_tier": anything("auto", "flex", "nonsense"),
        "text": anything(
            *({"format": {"type": "json_schema", "name": "n", "schema": schema}} for schema in SCHEMAS),
            *({"format": {"type": given}} for given in ("text", "json_object", "json_schema", "x", 5)),
            *({"format": None}, {"verbosity": "x"}),
        ),
        "tools": anything(
            *([{"type": "function", "name": "f", "parameters": schema}] for schema in SCHEMAS),
            *(
                [{"type": kind}]
                for kind in ("web_search", "mcp", "code_interpreter", "file_search", "nonsense", "local_shell")
            ),
            [{"type": "mcp", "server_label": "a", "server_url": "http://127.0.0.1:1/"}],
            [{"type": "code_interpreter", "container": {"type": "auto"}}],
        ),
        "tool_choice": anything(
            "none", "auto", "required", {"type": "function", "name": "f"}, {"type": "mcp"}, about=("tools",)
        ),
        "top_logprobs": whole([0, 1], [-1, 21, 10**9], beside={"include": ["message.output_text.logprobs"]}),
        "truncation": anything("auto", "disabled", "x"),
        "prompt_cache_key": text(),
        "enable_response_messages": flag(),
        "previous_input_messages": anything([], [{}], [{"role": "user", "content": "x"}], [5]),
        "parallel_tool_calls": flag(),
    },
    EMBEDDINGS: {
        "input": anything(*TEXTS, *([given] for given in IDS), [0], [[0], [1]], ["a"] * 70, [5] * 9000),
        "encoding_format": anything("float", "base64", "bytes", "nonsense", 5),
        "dimensions": whole([], []),
        "model": SHARED["model"],
        "user": SHARED["user"],
        "truncate_prompt_tokens": GENERATES["truncate_prompt_tokens"],
        "messages": anything(*messages(), beside={"input": None}),
        "embed_dtype": anything("float16", "nonsense"),
        "priority": SHARED["priority"],
    },
}
