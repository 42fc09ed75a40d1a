import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog

from server.gateway.errors import APIError
from server.gateway.guard import parse_object, text_size
from server.keys import add_key, revoke_key
from tests.server.gateway.inprocess import InProcess, error_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


async def test_a_valid_key_gets_in_and_nothing_else_does(file: Path) -> None:
    key = add_key(file, "ann")
    here = InProcess("--keys-file", str(file))
    assert (await here.ask(key)).status_code == 200
    wrong = ["", "Bearer", "Bearer ", "Bearer nope", f"Basic {key}", key, f"Bearer {key}x", f"Bearer {key[:-1]}"]
    for value in wrong:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/m")):
            reply = await here.client.request(method, path, headers={"authorization": value} if value else {})
            assert (reply.status_code, error_of(reply)["code"]) == (401, "invalid_api_key"), (value, path)
            assert reply.headers["www-authenticate"] == "Bearer"
    assert here.engines[0].fake.stats["finished"] == 1, "a refused request reached the engine"
    listed = await here.client.get("/v1/models", headers={"authorization": f"bearer {key}"})
    assert listed.status_code == 200


async def test_what_probes_and_scrapers_read_needs_no_key(file: Path) -> None:
    add_key(file, "ann")
    here = InProcess("--keys-file", str(file))
    for path in ("/health", "/health/live", "/health/ready", "/metrics", "/version"):
        assert (await here.client.get(path)).status_code == 200, path


async def test_a_revoked_key_is_refused_by_a_running_gateway(file: Path) -> None:
    key = add_key(file, "ann")
    here = InProcess("--keys-file", str(file))
    assert (await here.ask(key)).status_code == 200
    revoke_key(file, "ann")
    assert (await here.ask(key)).status_code == 401


async def test_unusable_keys_refuse_everybody_without_telling_the_path(file: Path) -> None:
    key = add_key(file, "ann")
    here = InProcess("--keys-file", str(file))
    file.chmod(0o644)  # noqa: ASYNC240
    reply = await here.ask(key)
    assert (reply.status_code, error_of(reply)["code"]) == (503, "keys_unusable")
    assert str(file.parent) not in reply.text


async def test_each_key_has_limits_of_its_own_and_serve_s_otherwise(file: Path) -> None:
    one, free = add_key(file, "one", requests_per_minute=1), add_key(file, "free", requests_per_minute=0)
    usual = add_key(file, "usual")
    alone = add_key(file, "alone", requests_per_minute=0, max_concurrent=1)
    here = InProcess("--keys-file", str(file), "--requests-per-minute", "2")

    async def codes(key: str) -> list[int]:
        return [(await here.ask(key)).status_code for _ in range(3)]

    assert await codes(one) == [200, 429, 429]
    assert await codes(usual) == [200, 200, 429]
    assert await codes(free) == [200, 200, 200]
    both = await asyncio.gather(here.ask(alone), here.ask(alone))
    assert sorted(reply.status_code for reply in both) == [200, 429]
    assert all(int(reply.headers["retry-after"]) > 0 for reply in both if reply.status_code == 429)


async def test_the_log_names_the_key_and_never_shows_it(file: Path) -> None:
    key = add_key(file, "ann")
    here = InProcess("--keys-file", str(file))
    with structlog.testing.capture_logs() as logs:
        await here.ask(key)
        await here.ask("vs-wrong-secret")
    assert [line.get("key") for line in logs if line["event"] == "request"] == ["ann", None]
    assert key not in str(logs)
    assert "wrong-secret" not in str(logs)


@pytest.mark.parametrize(
    ("trusted", "proxy", "told_apart"),
    [
        ((), "172.18.0.5", False),
        (("172.16.0.0/12",), "172.18.0.5", True),
        (("10.0.0.7", "172.18.0.5"), "172.18.0.5", True),
        (("172.16.0.0/12",), "192.0.2.9", False),
        (("*",), "192.0.2.9", True),
    ],
)
async def test_clients_of_a_trusted_proxy_are_limited_each_by_itself(
    trusted: tuple[str, ...], proxy: str, told_apart: bool
) -> None:
    flags = ("--forwarded-allow-ips", *trusted) if trusted else ()
    here = InProcess("--requests-per-minute", "1", *flags)
    client = here.connect(proxy)
    content = {"model": "m", "prompt": "Hi"}
    for address, status in (("203.0.113.1", 200), ("203.0.113.2", 200 if told_apart else 429), ("203.0.113.1", 429)):
        with structlog.testing.capture_logs() as logs:
            reply = await client.post("/v1/completions", json=content, headers={"x-forwarded-for": address})
        assert reply.status_code == status
        seen = [line["client"] for line in logs if line["event"] == "request"]
        assert seen == [address if told_apart else proxy]


async def test_pages_of_the_origins_given_may_call_and_no_others() -> None:
    here = InProcess("--cors-origins", "https://app.example", "http://localhost:3000")
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    for origin, allowed in (("https://app.example", True), ("https://evil.example", False), ("null", False)):
        preflight = await here.client.options("/v1/chat/completions", headers={"origin": origin, **asked})
        reply = await here.client.get("/v1/models", headers={"origin": origin})
        for one in (preflight, reply):
            assert one.headers.get("access-control-allow-origin") == (origin if allowed else None)
            assert "access-control-allow-credentials" not in one.headers
        assert (preflight.status_code == 200) is allowed
    granted = preflight = await here.client.options(
        "/v1/chat/completions", headers={"origin": "http://localhost:3000", **asked}
    )
    assert "x-stainless-os" in granted.headers["access-control-allow-headers"]
    assert preflight.headers["x-request-id"]


async def test_a_browser_s_preflight_needs_no_key_and_errors_can_be_read_by_the_page(file: Path) -> None:
    add_key(file, "ann")
    here = InProcess("--keys-file", str(file), "--cors-origins", "https://app.example")
    origin = {"origin": "https://app.example"}
    preflight = await here.client.options("/v1/models", headers={**origin, "access-control-request-method": "GET"})
    assert preflight.status_code == 200
    refused = await here.client.get("/v1/models", headers=origin)
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")


async def test_without_origins_no_page_may_call() -> None:
    here = InProcess()
    reply = await here.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"prompt": "x" * 101}, "prompt_too_long", "prompt"),
        ({"prompt": ["x" * 60, "x" * 60]}, "prompt_too_long", "prompt"),
        ({"prompt": list(range(101))}, "prompt_too_long", "prompt"),
        ({"prompt": [[1] * 60, [2] * 60]}, "prompt_too_long", "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, "prompt_too_long", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 101}]}]},
            "prompt_too_long",
            "messages",
        ),
        ({"input": "x" * 101}, "prompt_too_long", "input"),
        ({"prompt": "x", "n": 5}, "too_many_sequences", "n"),
        ({"prompt": ["x", "y", "z"], "n": 2}, "too_many_sequences", "prompt"),
        ({"prompt": "x", "n": "5"}, "too_many_sequences", "n"),
        ({"prompt": "x", "n": 5.0}, "too_many_sequences", "n"),
        ({"prompt": "x", "n": 10**400}, "too_many_sequences", "n"),
    ],
)
async def test_a_request_too_large_for_the_engine_is_a_400_here(body: dict[str, Any], code: str, param: str) -> None:
    here = InProcess("--max-prompt-chars", "100", "--max-sequences", "4")
    reply = await here.client.post("/v1/completions", json={"model": "m", **body})
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["param"]) == (400, code, param)
    assert here.engines[0].fake.stats["finished"] == 0


async def test_requests_at_the_limits_pass() -> None:
    here = InProcess("--max-prompt-chars", "100", "--max-sequences", "4")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}
    for body in (
        {"prompt": "x" * 100},
        {"prompt": ["x"] * 4},
        {"prompt": list(range(100)), "n": 4},
        {"messages": [{"role": "user", "content": [image]}]},
        {"prompt": "x", "n": None},
    ):
        assert (await here.ask(**body)).status_code == 200, body


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value"),
        (b'{"prompt": "x"', "delimiter"),
        (b"\xff\xfe{\x00}\x00", "utf-8"),
        ("{}".encode("utf-16"), "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "\\uDC00x"}', "surrogate"),
        (b'{"\\ud83d": 1}', "surrogate"),
        (b'{"temperature": NaN}', "NaN is no JSON value"),
        (b'{"temperature": -Infinity}', "-Infinity is no JSON value"),
        (b"[" * 200_000, "nested too deeply|Expecting value"),
        (b'{"n": ' + b"9" * 5000 + b"}", "digits"),
        (b"[]", "must be a JSON object, not list"),
        (b"null", "must be a JSON object, not NoneType"),
    ],
)
def test_what_is_no_json_object_is_a_400_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(APIError, match=reason) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_whole_surrogate_pairs_are_fine() -> None:
    assert parse_object(b'{"prompt": "\\ud83d\\ude00 \\\\ud800"}') == {"prompt": "😀 \\ud800"}


def test_the_depth_of_a_prompt_does_not_matter() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    assert text_size(deep) == 1
    assert json.dumps(text_size({"content": [{"text": "ab"}, {"image_url": "zzz"}]})) == "2"
