"""The proxied routes through a real gateway on loopback, with the fake engine behind it."""

import json
import socket
from typing import Any

import httpx
import pytest
from openai import APIError, NotFoundError, OpenAI

from tests.server.conftest import LIMIT, Served, wait_for
from tests.server.gateway.inprocess import error_of

JSON = {"Content-Type": "application/json"}


@pytest.fixture
def client(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="a-secret", max_retries=0)


def test_completion_chat_and_models_work_with_the_openai_client(served: Served, client: OpenAI) -> None:
    name = str(served.model)
    assert [model.id for model in client.models.list()] == [name]
    completion = client.completions.create(model=name, prompt="你好")
    assert completion.choices[0].text == "字0 字1 字2 "
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 3
    chat = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}])
    assert chat.choices[0].message.content == "字0 字1 字2 "


def test_one_model_is_retrieved_by_its_name(served: Served, client: OpenAI) -> None:
    assert client.models.retrieve(str(served.model)).id == str(served.model)
    with pytest.raises(NotFoundError, match="does not exist; served: "):
        client.models.retrieve("nope")


def test_a_stream_ends_with_one_usage(served: Served, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=str(served.model),
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "字0 字1 字2 "
    assert [chunk.usage is not None for chunk in chunks] == [False, False, False, True]


def test_events_pass_as_they_come(served: Served, client: OpenAI) -> None:
    fake = {"tokens": 2000, "delay": 0.02}
    stream = client.completions.create(model=str(served.model), prompt="Hi", stream=True, extra_body={"fake": fake})
    assert next(iter(stream)).choices[0].text == "字0 "
    assert served.stats()["running"] == 1, "the first event came although the engine has not ended"
    stream.close()


def test_errors_of_the_engine_pass_unchanged(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="The model `other` does not exist"):
        client.completions.create(model="other", prompt="Hi")


def test_path_and_query_reach_the_engine(served: Served) -> None:
    made = served.post("/v1/responses", input="Hi").json()["id"]
    got = httpx.get(f"{served.url}/v1/responses/{made}?include=a&stream=true").json()
    assert (got["id"], got["query"], got["method"]) == (made, "include=a&stream=true", "GET")
    cancelled = httpx.post(f"{served.url}/v1/responses/{made}/cancel").json()
    assert (cancelled["id"], cancelled["method"]) == (made, "POST")
    unknown = httpx.get(f"{served.url}/v1/responses/resp_x")
    assert (unknown.status_code, error_of(unknown)["message"]) == (404, "Response with id 'resp_x' not found.")


def test_credentials_and_hop_by_hop_fields_stay_here(served: Served) -> None:
    headers = {
        "Authorization": "Bearer a-secret",
        "Cookie": "a-secret",
        "Connection": "keep-alive, X-Mine",
        "X-Mine": "a-secret",
        "X-Other": "passes",
        "X-Request-Id": "id-1",
        "TE": "trailers",
    }
    httpx.post(f"{served.url}/v1/completions", json={"model": str(served.model), "prompt": "Hi"}, headers=headers)
    seen = served.stats()["headers"]
    assert "a-secret" not in seen.values()
    assert "te" not in seen
    assert seen["x-other"] == "passes"
    assert seen["x-request-id"] == "id-1"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_the_generation(served: Served, stream: bool) -> None:
    before = served.stats()["aborted"]
    counted = _disconnects(served)
    body = {"model": str(served.model), "prompt": "Hi", "stream": stream, "fake": {"tokens": 3000, "delay": 0.02}}
    with socket.create_connection(served.url.removeprefix("http://").split(":"), LIMIT) as sock:  # type: ignore[arg-type]
        raw = json.dumps(body).encode()
        fields = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{fields}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        wait_for(lambda: served.stats()["running"] == 1, "the generation runs")
    wait_for(lambda: served.stats()["aborted"] == before + 1, "the generation was aborted")
    assert served.stats()["running"] == 0
    wait_for(lambda: _disconnects(served) == counted + 1, "the client that left was counted")


def _disconnects(served: Served) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    name = 'voltserve_client_disconnects_total{route="/v1/completions"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_requests_that_end_are_no_disconnects(served: Served) -> None:
    counted = _disconnects(served)
    for stream in (True, False):
        for _ in range(20):
            assert served.post(stream=stream, fake={"tokens": 1}).status_code == 200
    assert _disconnects(served) == counted


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 1900, "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b"null", "must be a JSON object, not NoneType"),
        (b'"text"', "must be a JSON object, not str"),
    ],
)
def test_a_malformed_body_is_a_400(served: Served, body: bytes, message: str) -> None:
    response = httpx.post(f"{served.url}/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 400
    assert message in error_of(response)["message"]


@pytest.mark.parametrize(
    "headers",
    [
        JSON,
        {"content-type": "Application/JSON;charset=UTF-8"},
        {"content-type": "application/json ; charset=utf-8"},
        {"content-type": "application/vnd.example.v1+json"},
        {**JSON, "content-encoding": "identity"},
    ],
)
def test_json_by_any_of_its_names_is_taken_and_reaches_the_engine_as_json(
    served: Served, headers: dict[str, str]
) -> None:
    body = json.dumps({"model": str(served.model), "prompt": "Hi"}).encode()
    assert httpx.post(f"{served.url}/v1/completions", content=body, headers=headers).status_code == 200
    seen = served.stats()["headers"]
    assert (seen["content-type"], "content-encoding" in seen) == ("application/json", False)


@pytest.mark.parametrize(
    ("headers", "advice"),
    [
        ({}, "there is no Content-Type: send the header `Content-Type: application/json`"),
        ({"content-type": "application/x-www-form-urlencoded"}, "'application/x-www-form-urlencoded': send the header"),
        ({"content-type": "text/plain"}, "send the header `Content-Type: application/json`"),
        ({"content-type": "application/jsonl"}, "send the header"),
        ({"content-type": "multipart/form-data; boundary=x"}, "send the header"),
        ({**JSON, "content-encoding": "gzip"}, "'gzip': send the request body uncompressed"),
        ({**JSON, "content-encoding": "identity, br"}, "send the request body uncompressed"),
    ],
)
def test_a_body_of_another_kind_is_a_415_that_says_what_to_send(
    served: Served, headers: dict[str, str], advice: str
) -> None:
    body = json.dumps({"model": str(served.model), "prompt": "Hi"}).encode()
    response = httpx.post(f"{served.url}/v1/completions", content=body, headers=headers)
    assert response.status_code == 415
    error = error_of(response)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
    assert advice in error["message"]
    assert response.headers.get("accept-encoding" if "content-encoding" in headers else "accept")


def test_an_event_stream_is_neither_kept_nor_collected_on_its_way(served: Served) -> None:
    stream = served.post(stream=True)
    assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert "x-accel-buffering" not in served.post().headers


def test_a_stream_that_the_engine_ends_with_an_error_counts_as_one(served: Served) -> None:
    answer = served.post(stream=True, fake={"tokens": 5, "error_after": 2})
    assert answer.status_code == 200
    events = answer.text.strip().split("\n\n")
    assert json.loads(events[2].removeprefix("data: "))["error"]["message"] == "the cache is full"
    assert events[3:] == ["data: [DONE]"]
    name = 'voltserve_requests_total{method="POST",route="/v1/completions",status="400"}'
    wait_for(lambda: f"{name} 1.0" in httpx.get(f"{served.url}/metrics").text, "it was counted")
    line = next(one for one in served.log.read_text().splitlines() if answer.headers["x-request-id"] in one)
    assert "status=400" in line


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_a_413(served: Served, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 3000}).encode()
    content: Any = iter([body[:1500], body[1500:]]) if chunked else body
    response = httpx.post(f"{served.url}/v1/completions", content=content, headers=JSON)
    assert response.status_code == 413
    assert error_of(response)["code"] == "request_too_large"


@pytest.mark.parametrize(
    "path",
    ["/nope", "/v1", "/v1/models/", "/v1/nope", "/sleep", "/stats", "/docs", "/v1/completions/"],
)
def test_other_routes_do_not_exist(served: Served, path: str) -> None:
    for method in ("GET", "POST"):
        response = httpx.request(method, f"{served.url}{path}")
        if (method, path) == ("POST", "/v1/models/"):
            continue
        assert response.status_code == 404, method
        error_of(response)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/health", {"GET", "HEAD"}),
        ("PUT", "/metrics", {"GET", "HEAD"}),
    ],
)
def test_a_wrong_method_is_a_405_that_names_the_right_ones(
    served: Served, method: str, path: str, allowed: set[str]
) -> None:
    response = httpx.request(method, f"{served.url}{path}")
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed
    error_of(response)


def test_head_and_options_are_answered(served: Served) -> None:
    for path in ("/v1/models", "/health", "/health/live", "/health/ready", "/metrics", "/version"):
        head = httpx.head(f"{served.url}{path}")
        assert (head.status_code, head.content) == (200, b""), path
    options = httpx.options(f"{served.url}/v1/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "POST")
    assert httpx.options(f"{served.url}/nope").status_code == 404


def test_a_request_id_is_kept_or_made(served: Served) -> None:
    kept = httpx.get(f"{served.url}/v1/models", headers={"X-Request-Id": "mine-1"})
    assert kept.headers.get_list("x-request-id") == ["mine-1"]
    made = httpx.get(f"{served.url}/nope", headers={"X-Request-Id": "not valid\tid"})
    assert len(made.headers["x-request-id"]) == 32


def test_the_log_has_a_line_for_each_request_and_no_prompt(served: Served) -> None:
    httpx.post(
        f"{served.url}/v1/completions",
        json={"model": str(served.model), "prompt": "a very private prompt"},
        headers={"X-Request-Id": "to-be-logged"},
    )
    wait_for(lambda: "to-be-logged" in served.log.read_text(), "the access log's line")
    assert "very private" not in served.log.read_text()


def test_many_streams_run_at_the_same_time(served: Served) -> None:
    with httpx.Client(timeout=LIMIT, limits=httpx.Limits(max_connections=None)) as many:
        body = {"model": str(served.model), "prompt": "Hi", "stream": True, "fake": {"tokens": 3000, "delay": 0.05}}
        requests = [many.build_request("POST", f"{served.url}/v1/completions", json=body) for _ in range(100)]
        responses = [many.send(request, stream=True) for request in requests]
        assert served.stats()["running"] == 100
        for response in responses:
            response.close()
    wait_for(lambda: served.stats()["running"] == 0, "every stream was aborted")


def test_openai_errors_are_what_the_client_raises(client: OpenAI) -> None:
    with pytest.raises(APIError):
        client.post("/nope", cast_to=dict[str, Any])
