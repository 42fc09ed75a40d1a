import json
from typing import Any

import pytest
import structlog

from server import logs
from server.logs import TextRenderer


def logged(form: str, event: str, **fields: Any) -> str:
    lines: list[str] = []
    logs.configure("info", form, lines.append)
    structlog.get_logger("x").info(event, **fields)
    assert len(lines) == 1
    return lines[0]


def test_a_text_line_is_time_level_event_and_sorted_fields() -> None:
    time, rest = logged("text", "request", status=200, path="/v1", key=None).split(" ", 1)
    assert time.endswith("Z")
    assert rest == "[info    ] request  key=None path=/v1 status=200"


@pytest.mark.parametrize("value", ["two words", "a=b", 'a"b', "it's", "a\nlevel=error", "\x1b[2J x"])
def test_a_field_of_several_words_is_quoted_and_stays_on_the_line(value: str) -> None:
    line = logged("text", "request", path=value)
    assert line.endswith(f"path={value!r}")
    assert line.splitlines() == [line]


@pytest.mark.parametrize(("text", "shown"), [("a\x1b[31mb", r"a\x1b[31mb"), ("a\rb", r"a\rb"), ("字\t🙂", "字\t🙂")])
def test_nothing_logged_acts_on_the_terminal(text: str, shown: str) -> None:
    assert shown in logged("text", text)
    assert shown.replace("\t", "") in logged("text", "event", field=text.replace("\t", ""))


def test_json_lines_hold_the_fields_as_they_are() -> None:
    line = json.loads(logged("json", "request", path="a\nb", status=200))
    assert {name: line[name] for name in ("event", "level", "path", "status")} == {
        "event": "request",
        "level": "info",
        "path": "a\nb",
        "status": 200,
    }


def test_an_exception_follows_its_line() -> None:
    lines: list[str] = []
    logs.configure("info", "text", lines.append)
    try:
        int("shard 5")
    except ValueError:
        structlog.get_logger("x").exception("failed")
    first, *rest = lines[0].splitlines()
    assert first.rstrip().endswith("[error   ] failed")
    assert rest[0].startswith("Traceback")
    assert rest[-1].startswith("ValueError: invalid literal")


def test_levels_are_coloured_on_a_terminal_only() -> None:
    event = {"timestamp": "T", "level": "warning", "event": "x"}
    assert "\033[33mwarning" in TextRenderer(colours=True)(None, "", dict(event))
    assert "\033" not in TextRenderer(colours=False)(None, "", dict(event))
