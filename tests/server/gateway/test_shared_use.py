"""What a key may use, what it used, and who may know it."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import structlog

from server.keys import add_key, change_key, revoke_key
from server.usage import Counts, UsageFile, usage_path
from tests.server.conftest import Served, make_model, serving, wait_for
from tests.server.gateway.inprocess import Engine, InProcess, error_of

TODAY = datetime.now(timezone.utc).date


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def here(file: Path, *flags: str, **models: tuple[str, ...]) -> InProcess:
    engines = tuple(Engine(name, served) for name, served in models.items())
    return InProcess("--keys-file", str(file), *flags, engines=engines)


async def streamed(gateway: InProcess, key: str, path: str = "/v1/completions", **body: Any) -> str:
    content = {"model": "m", "prompt": "Hi", "messages": [], "stream": True, **body}
    reply = await gateway.client.post(path, json=content, headers={"authorization": f"Bearer {key}"})
    assert reply.status_code == 200
    return reply.text


def lines(logs: list[Any]) -> list[tuple[Any, ...]]:
    fields = ("key", "model", "prompt_tokens", "completion_tokens")
    return [tuple(line[field] for field in fields) for line in logs if line["event"] == "request"]


async def test_the_log_the_metrics_and_the_file_have_each_key_s_tokens(file: Path) -> None:
    ann, bob = add_key(file, "ann"), add_key(file, "bob")
    gateway = here(file, a=("m",), b=("n",))
    with structlog.testing.capture_logs() as logs:
        await gateway.ask(ann, fake={"tokens": 4})
        await streamed(gateway, ann, fake={"tokens": 5})
        await gateway.ask(bob, model="n", prompt=[1, 2, 3])
        await gateway.client.post(
            "/v1/embeddings", json={"model": "n", "input": "x"}, headers={"authorization": f"Bearer {bob}"}
        )
        await gateway.ask(bob, model="nobody's")
    assert lines(logs) == [
        ("ann", "m", 2, 4),
        ("ann", "m", 2, 5),
        ("bob", "n", 3, 3),
        ("bob", "n", 1, 0),
        ("bob", "other", None, None),
    ]
    text = (await gateway.client.get("/metrics")).text
    assert 'voltserve_key_tokens_total{key="ann",kind="prompt",model="m"} 4.0' in text
    assert 'voltserve_key_tokens_total{key="ann",kind="completion",model="m"} 9.0' in text
    assert 'voltserve_key_requests_total{key="bob",model="n"} 2.0' in text
    assert "nobody" not in text
    await gateway.gateway.close()
    rows = UsageFile(usage_path(str(file), "")).since(TODAY())
    assert {(row.key, row.model): row.counts.tokens for row in rows} == {("ann", "m"): 13, ("bob", "n"): 7}


async def test_without_keys_the_model_is_logged_and_nothing_is_changed_or_counted(tmp_path: Path) -> None:
    gateway = InProcess()
    with structlog.testing.capture_logs() as logs:
        await gateway.ask()
        await gateway.ask(model=None)
        await gateway.ask(model="x" * 99)
    assert [(line["model"], line["prompt_tokens"]) for line in logs if line["event"] == "request"] == [
        ("m", None),
        ("m", None),
        ("other", None),
    ]
    assert "voltserve_key_" not in (await gateway.client.get("/metrics")).text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_client_with_a_key_gets_the_stream_that_one_without_gets(
    file: Path, path: str, options: dict[str, Any]
) -> None:
    key = add_key(file, "ann")
    with_keys, without = here(file), InProcess()
    mine, theirs = await streamed(with_keys, key, path, **options), await streamed(without, "", path, **options)

    def told(text: str) -> list[Any]:
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        return [event if event == "[DONE]" else {**json.loads(event), "created": 0} for event in events]

    assert told(mine) == told(theirs)


async def test_a_spent_budget_is_a_429_until_midnight_and_a_restart_does_not_renew_it(file: Path) -> None:
    ann, free = add_key(file, "ann", tokens_per_day=10), add_key(file, "free")
    gateway = here(file)
    assert [(await gateway.ask(ann)).status_code for _ in range(3)] == [200, 200, 429]  # 2 + 3 tokens each
    assert (await gateway.ask(free)).status_code == 200
    await gateway.gateway.close()
    reply = await here(file).ask(ann)
    error = error_of(reply)
    assert (reply.status_code, error["code"], error["type"]) == (429, "token_budget_exceeded", "rate_limit_error")
    assert "10 of its 10 tokens" in error["message"]
    midnight = datetime.combine(TODAY() + timedelta(1), datetime.min.time(), timezone.utc)
    left = (midnight - datetime.now(timezone.utc)).total_seconds()
    assert abs(int(reply.headers["retry-after"]) - left) < 60
    assert (await here(file).client.get("/v1/models", headers={"authorization": f"Bearer {ann}"})).status_code == 200


async def test_an_expired_key_is_a_401_that_says_when(file: Path) -> None:
    old = add_key(file, "old", expires=TODAY() - timedelta(1))
    last_day = add_key(file, "last", expires=TODAY() + timedelta(1))
    gateway = here(file)
    reply = await gateway.ask(old)
    error = error_of(reply)
    assert (reply.status_code, error["code"]) == (401, "api_key_expired")
    assert str(TODAY() - timedelta(1)) in error["message"]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert (await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {old}"})).status_code == 401
    assert (await gateway.ask(last_day)).status_code == 200


async def test_a_key_for_some_models_gets_no_others_and_sees_no_others(file: Path) -> None:
    key = add_key(file, "ann", models=["m"])
    gateway = here(file, a=("m",), b=("n",))
    assert (await gateway.ask(key)).status_code == 200
    for model in ("n", "nobody's", None, 5, ["m"]):
        reply = await gateway.ask(key, model=model)
        error = error_of(reply)
        assert (reply.status_code, error["code"], error["type"]) == (403, "model_not_allowed", "permission_error"), (
            model
        )
        assert "`model` may be: m" in error["message"]
        assert "--models" in error["message"]
    assert gateway.engines[1].fake.stats["finished"] == 0
    listed = await gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert [model["id"] for model in listed.json()["data"]] == ["m"]
    one = await gateway.client.get("/v1/models/n", headers={"authorization": f"Bearer {key}"})
    assert one.status_code == 404


async def test_one_engine_alone_serves_requests_without_a_model_to_keys_that_are_for_it(file: Path) -> None:
    mine, other = add_key(file, "mine", models=["m"]), add_key(file, "other", models=["n"])
    gateway = here(file)
    assert (await gateway.ask(mine, model=None)).status_code == 200
    assert (await gateway.ask(mine, model="")).status_code == 200
    assert (await gateway.ask(other, model=None)).status_code == 403


async def test_each_reading_of_the_file_and_each_key_that_came_or_went_is_in_the_log(file: Path) -> None:
    ann = add_key(file, "ann")
    gateway = here(file)
    bob = add_key(file, "bob")
    revoke_key(file, "ann")
    keys = json.loads(file.read_bytes())  # noqa: ASYNC240
    with structlog.testing.capture_logs() as logs:
        await gateway.ask(bob)
        keys["keys"][0]["tokens_per_day"] = 5
        file.write_text(json.dumps(keys))  # noqa: ASYNC240
        await gateway.ask(bob)
        revoke_key(file, "bob")
        add_key(file, "bob")
        await gateway.ask(bob)
    audit = [
        {name: line[name] for name in line if name not in {"log_level", "event"}} | {"event": line["event"]}
        for line in logs
        if "API key" in line["event"]
    ]
    assert audit == [
        {"event": "API key revoked", "key": "ann"},
        {"event": "API key added", "key": "bob"},
        {"event": "API keys read again", "keys": 1},
        {"event": "API key changed", "key": "bob", "before": {"tokens_per_day": None}, "now": {"tokens_per_day": 5}},
        {"event": "API keys read again", "keys": 1},
        {"event": "API key replaced", "key": "bob"},
        {"event": "API keys read again", "keys": 1},
    ]
    for secret in (ann, bob, *(key["sha256"] for key in keys["keys"])):
        assert secret not in str(logs)


async def test_a_running_gateway_takes_a_key_s_new_limits_at_once(file: Path) -> None:
    key = add_key(file, "ann", models=("n",))
    gateway = here(file)
    assert (await gateway.ask(key)).status_code == 403
    change_key(file, "ann", models=None, tokens_per_day=1)
    assert (await gateway.ask(key)).status_code == 200
    refused = await gateway.ask(key)
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "token_budget_exceeded"
    change_key(file, "ann", tokens_per_day=1000)
    assert (await gateway.ask(key)).status_code == 200
    change_key(file, "ann", expires=TODAY() - timedelta(days=1))
    assert error_of(await gateway.ask(key))["code"] == "api_key_expired"
    change_key(file, "ann", expires=None, requests_per_minute=1)
    codes = [(await gateway.ask(key)).status_code for _ in range(2)]
    assert codes[-1] == 429


@pytest.fixture
def served(tmp_path: Path, file: Path) -> Any:
    make = make_model(tmp_path / "model")
    key = add_key(file, "ann")
    with serving(make, "--keys-file", str(file)) as server:
        server.wait_for_state("ready")
        yield server, key


def test_a_client_that_leaves_pays_for_what_was_made_by_then(served: tuple[Served, str], file: Path) -> None:
    import httpx

    server, key = served
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": str(server.model), "prompt": "Hi", "stream": True, "fake": {"tokens": 1000, "delay": 0.02}}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as reply:
        events = reply.iter_lines()
        seen = [line for line in (next(events) for _ in range(21)) if line]
    assert seen
    with pytest.raises(httpx.ReadTimeout):  # an answer in one piece: its progress is unknown
        httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False}, headers=headers, timeout=0.5)

    def rows() -> list[Counts]:
        found = [row.counts for row in UsageFile(usage_path(str(file), "")).since(TODAY())]
        return found if found and found[0].requests == 2 else []

    (counts,) = wait_for(rows, "the tokens in the file")
    assert (counts.requests, counts.uncounted, counts.prompt) == (2, 1, 2)
    assert len(seen) <= counts.completion < 100
    line = next(line for line in server.log.read_text().splitlines() if "completion_tokens=" in line)
    assert "key=ann" in line
    assert "prompt_tokens=2" in line


def test_what_was_counted_last_is_in_the_file_when_the_server_has_stopped(tmp_path: Path, file: Path) -> None:
    key = add_key(file, "ann")
    with serving(make_model(tmp_path / "model"), "--keys-file", str(file)) as server:
        server.wait_for_state("ready")
        import httpx

        body = {"model": str(server.model), "prompt": "Hi"}
        httpx.post(f"{server.url}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert UsageFile(usage_path(str(file), "")).since(TODAY())[0].counts == Counts(1, 0, 2, 3)
