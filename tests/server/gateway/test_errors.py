import json

from server.gateway.errors import APIError


def test_an_error_has_openai_s_form_as_response_and_as_event() -> None:
    error = APIError(503, "engine_not_ready", "加载中", {"Retry-After": "5"})
    expected = {
        "error": {"message": "加载中", "type": "service_unavailable_error", "param": None, "code": "engine_not_ready"}
    }
    response = error.response()
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert json.loads(bytes(response.body)) == expected
    event = error.event()
    assert event.endswith(b"\n\n")
    assert json.loads(event.removeprefix(b"data: ")) == expected
