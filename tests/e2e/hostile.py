"""Hostile texts, grammars, schemas, messages and tools, as data for tests/e2e/fields.py."""

import json
from typing import Any


def raw(text: str) -> str:
    """Stands for JSON text that Python's encoder would not write."""
    return f"<raw:{text}>"


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    """JSON of that depth."""
    return raw(opening * depth + "1" + closing * depth)


TEXTS = ["", "\0", "\x1b[2J", "\u202e\ufeff", "🙂" * 300, "a" * 2000, "{{7*7}}{% raw %}", "<|im_end|>", "%s%n", "\\"]

REGEXES = [
    *("^(|.*)$", "", "()", "(|a)*", "(a*)*b", "(a+)+$", "[", "(", "a{2,1}", "a{100000}", "(a{1000}){1000}", "a{0}"),
    *("\\p{L}+", "(?=a)b", "(?<!a)b", "\\1", "(a)\\1", "[^\\x00-\\U0010FFFF]", "\\d{999999999999}", "[z-a]", "a**"),
    *(
        "(?i)x",
        "\\",
        "x" * 20_000,
        "(" * 500 + "a" + ")" * 500,
        "|" * 2000,
        "(a|b|c){0,2000}",
        "\ud7ff\U0010ffff",
        "\0",
    ),
    *(
        ".*" * 200,
        "(.|\\n){0,5000}end",
        "$^",
        "\\b\\B",
        "[[:alpha:]]",
        "(?P<a>x)(?P=a)",
        "(?R)",
        "a{,}",
        "a{-1}",
        "\\u12",
    ),
]
GRAMMARS = [
    *(
        "root ::= ",
        "root ::=",
        "",
        "root",
        "root ::= root",
        'root ::= root "a" | "a"',
        'root ::= "a" root',
        'root ::= ""',
    ),
    *(
        "root ::= a",
        "a ::= b\nb ::= a\nroot ::= a",
        'a ::= b "x"\nb ::= a\nroot ::= a',
        'root ::= ("a"*)*',
        "root ::= [z-a]",
    ),
    *(
        'root ::= "a"{100000}',
        'root ::= ("a"{1000}){1000}',
        'root ::= "a"{2,1}',
        'root ::= "',
        "root ::= [",
        "root ::= (",
        "\0",
    ),
    *("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "root ::= " + " | ".join(f'"{n}"' for n in range(3000))),
    *(
        "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "a"\nroot ::= r0',
        'x ::= "a"',
        "root := 'a'",
    ),
    *(
        "start: start",
        'start: "a" start?',
        "start: /(/",
        "?start: x\nx: x",
        'root ::= "a"\nroot ::= "b"',
        'root ::= "\\xZZ"',
    ),
    'root ::= "\\U00110000"',
    "root ::= [^\\x00-\\U0010FFFF]",
    "%ignore /x*/\nstart: " + '"a" ' * 500,
    "root ::= " + "x" * 20_000,
]
SCHEMAS: list[Any] = [
    *(
        {},
        True,
        False,
        [],
        "",
        "{",
        "null",
        "[]",
        '{"type":"object"}',
        {"type": "nonsense"},
        {"type": []},
        {"type": ["null"]},
    ),
    *({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"$ref": "#/nowhere"}, {"$ref": 5}),
    *(
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "file:///etc/passwd"},
        {"allOf": []},
        {"anyOf": []},
        {"not": {}},
        {"enum": []},
    ),
    {"allOf": [{"$ref": "#"}, {"$ref": "#"}]},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"type": "array", "minItems": 100_000},
    {"type": "array", "minItems": 2, "maxItems": 1},
    {"type": "array", "minItems": 10**20},
    {"type": "array", "minItems": -1},
    {"type": "string", "minLength": 10**6},
    {"type": "string", "minLength": 10**20},
    {"type": "string", "maxLength": -1},
    {"type": "string", "pattern": "(a{1000}){1000}"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "^(|.*)$"},
    {"type": "string", "format": "\0"},
    {"type": "integer", "minimum": 10**30},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"type": "number", "minimum": -1e308, "maximum": 1e308},
    {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": 0.5, "exclusiveMaximum": 0.6},
    {"type": "object", "minProperties": 10**20},
    {"type": "object", "required": "a"},
    {"type": "object", "properties": []},
    {"type": "object", "properties": {"": {}, "\0": {}, '"': {}, "🙂": {}}},
    {"type": "object", "patternProperties": {"(": {}}},
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}},
    {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(14)}, "additionalProperties": False},
    {"enum": list(range(5000))},
    {"enum": [10**30, -0.0, None, "\0", {"a": []}]},
    {"const": "x" * 20_000},
    nested(200, '{"type":"array","items":', "}").replace("1", "{}"),
    nested(200, '{"type":"object","properties":{"a":', "}}").replace("1", "{}"),
    nested(200, '{"anyOf":[', "]}").replace("1", "{}"),
]
TAGS: list[Any] = [
    *("", "{", "{}", "[]", "null", '{"type":"structural_tag"}', '{"structures":[],"triggers":[]}'),
    json.dumps({"structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]}),
    json.dumps({"structures": [{"begin": "<a>", "schema": {"$ref": "#"}, "end": "</a>"}], "triggers": ["<b>"]}),
    json.dumps({"structures": [{"begin": "<a>", "schema": {"type": "object"}, "end": "</a>"}], "triggers": ["<a"]}),
    json.dumps({"type": "structural_tag", "format": {"type": "regex", "pattern": "^(|.*)$"}}),
    json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= "}}),
    json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": []}}),
    json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": []}}),
    json.dumps({"type": "structural_tag", "format": {"type": "tag", "begin": 5, "content": {}, "end": None}}),
    json.dumps({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [], "tags": []}}),
    json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"$ref": "#"}}}),
    json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": ""}}),
]


def constraints() -> list[Any]:
    """Values of `structured_outputs`: every hostile text in every way to give it."""
    kinds = {"regex": REGEXES, "grammar": GRAMMARS, "json": SCHEMAS, "structural_tag": TAGS}
    made: list[Any] = [{kind: value} for kind, values in kinds.items() for value in (*values, 5, [], None)]
    choices = [
        [],
        [""],
        ["a", "a"],
        ["\0"],
        [5],
        "x",
        ["x" * 20_000],
        ["🙂"],
        [str(n) for n in range(3000)],
        ['"', "\\"],
    ]
    made += [{"choice": value} for value in choices]
    made += [{"json_object": value} for value in (True, False, "x", 5)]
    made += [{"regex": "a", "json": {}}, {"nothing": 1}, {"regex": "a", "whitespace_pattern": "("}]
    made += [{"json": {}, "whitespace_pattern": pattern} for pattern in REGEXES[:6]]
    made += [{"regex": "a", "_backend": backend} for backend in ("xgrammar", "outlines", "nonsense", 5)]
    return made


def formats() -> list[Any]:
    """Values of `response_format`."""
    made: list[Any] = [
        {"type": kind} for kind in ("text", "json_object", "json_schema", "structural_tag", "x", 5, None)
    ]
    made += [{"type": "json_schema", "json_schema": {"name": "n", "schema": schema}} for schema in SCHEMAS]
    made += [
        {"type": "json_schema", "json_schema": given}
        for given in ({}, {"name": 5}, {"name": ""}, [], "x", {"name": "a"})
    ]
    made += [{"type": "json_schema", "json_schema": {"name": "n" * 9000, "schema": {}, "strict": "x"}}]
    made += [json.loads(tag) for tag in TAGS if tag.startswith('{"type"')]
    made += [{"type": "structural_tag", "structures": [], "triggers": []}]
    made += [{"type": "structural_tag", "structures": [{"begin": "", "schema": {}, "end": ""}], "triggers": [""]}]
    return made


def messages() -> list[Any]:
    """Values of `messages`."""
    contents: list[Any] = [
        *(
            *TEXTS,
            None,
            5,
            [],
            [{}],
            [None],
            ["x"],
            [{"type": "text"}],
            [{"type": "text", "text": 5}],
            [{"type": "nonsense"}],
        ),
        *([{"type": "text", "text": "a"}] * 300, {"type": "text", "text": "a"}, [[]], [{"type": []}], [{"text": "a"}]),
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        [{"type": "image_url", "image_url": 5}],
        [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
        [{"type": "video_url", "video_url": {"url": ""}}],
        [{"type": "image_embeds", "image_embeds": "AAAA"}],
        [{"type": "refusal", "refusal": "no"}],
    ]
    roles: list[Any] = [
        "system",
        "developer",
        "assistant",
        "tool",
        "function",
        "nonsense",
        "",
        "\0",
        None,
        5,
        [],
        "x" * 900,
    ]
    calls: list[Any] = [
        *(None, [], {}, "x", [{}], [None], [{"id": "a"}], [{"function": None}], [{"type": "function"}], 5),
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{"}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[1]"}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": None}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 5000}}],
        [{"id": "a", "type": "function", "function": {"name": 5, "arguments": "NaN"}}],
        [{"id": "a", "type": "function", "function": {"arguments": "{}"}}],
        [{"id": "a", "type": "nonsense", "custom": {"name": "x"}}],
    ]
    user = {"role": "user", "content": "Hello"}
    made: list[Any] = [[{"role": "user", "content": content}] for content in contents]
    made += [[{"role": role, "content": "x"}] for role in roles] + [[{"role": role}] for role in roles]
    made += [[user, {"role": "assistant", "content": None, "tool_calls": call}, user] for call in calls]
    made += [[user, {"role": "tool", "content": "x", "tool_call_id": given}] for given in (None, "", 5, [], "nowhere")]
    made += [
        [],
        [{}],
        [None],
        ["x"],
        [[]],
        {},
        [{"content": "x"}],
        [{**user, "name": 5}],
        [{**user, "more": nested(60)}],
        nested(900, "[", "]"),
    ]
    made += [[user] * 100, [{"role": "assistant", "content": "x", "reasoning": given} for given in (5, None, [], "x")]]
    made += [[{"role": "assistant", "content": "x", "refusal": "x", "audio": {"id": 5}, "function_call": {"name": 5}}]]
    return made


def tools() -> list[Any]:
    """Values of chat's `tools`."""
    made: list[Any] = [
        [],
        [None],
        ["x"],
        [{}],
        [{"type": "function"}],
        [{"type": "nonsense"}],
        [{"type": "function", "function": {}}],
    ]
    made += [[{"type": "function", "function": {"name": name}}] for name in (*TEXTS, None, 5, "f")]
    made += [[{"type": "function", "function": {"name": "f", "parameters": schema}}] for schema in SCHEMAS]
    made += [[{"type": "function", "function": {"name": f"f{n}"}} for n in range(300)]]
    made += [[{"type": "function", "function": {"name": "f", "description": text}}] for text in (*TEXTS, 5)]
    made += [[{"type": "function", "function": {"name": "f"}}] * 2, [{"type": "custom", "custom": {"name": "f"}}]]
    return made
