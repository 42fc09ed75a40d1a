"""The image alone: the reference document's `docker run`, without any network but loopback, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.waiting import wait_until

from .conftest import IMAGE, MODEL, SERVED_NAME, START_LIMIT_S, docker, inspect

# As the reference document has them, but for the two cards.
FLAGS = (
    "--model", SERVED_NAME, "--tensor-parallel-size", "1", "--dtype", "float16", "--quantization", "quasarnvfp4",
    "--max-model-len", "8192", "--gpu-memory-utilization", "0.90", "--max-num-seqs", "32", "--enforce-eager",
    "--disable-log-requests",
)  # fmt: skip
MOUNT = f"{MODEL}:{SERVED_NAME}"


@pytest.fixture(scope="module")
def isolated() -> Iterator[str]:
    """A network on which containers reach nothing beyond this machine."""
    name = docker("network", "create", "--internal", "voltserve-test-isolated").stdout.strip()
    yield name
    docker("network", "rm", name)


def test_the_reference_documents_docker_run_serves_without_any_network(isolated: str) -> None:
    run = docker(
        "run", "-d", "--network", isolated, "--shm-size", "16g", "-v", MOUNT, "-p", "8000:8000",
        "-e", "NCCL_P2P_DISABLE=1", "-e", "VOLTSERVE_MAX_BODY_BYTES=1000000", IMAGE, *FLAGS,
    )  # fmt: skip
    container = run.stdout.strip()
    try:

        def healthy() -> bool:
            state = inspect(container)["State"]
            assert state["Status"] == "running", docker("logs", container).stderr
            return bool(state["Health"]["Status"] == "healthy")

        wait_until(healthy, START_LIMIT_S, "healthy")
        address = inspect(container)["NetworkSettings"]["Networks"]
        url = f"http://{next(iter(address.values()))['IPAddress']}:8000"
        assert httpx.get(f"{url}/health").status_code == 200
        body = {"model": SERVED_NAME, "prompt": "请介绍一下巴黎。", "max_tokens": 128, "temperature": 0.7}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=START_LIMIT_S)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"].strip()
        logs = docker("logs", container)
        assert "accepted without effect" in logs.stdout + logs.stderr  # --disable-log-requests
        docker("stop", "--time", "60", container)
        assert inspect(container)["State"]["ExitCode"] == 0
    finally:
        docker("rm", "--force", "--volumes", container, check=False)


def test_all_the_flags_are_understood_for_two_cards_too() -> None:
    flags = ["2" if one == "1" else one for one in FLAGS]
    done = docker("run", "--rm", "-v", MOUNT, "--entrypoint", "voltserve", IMAGE, "explain", *flags)
    assert done.stdout.rstrip().endswith("serve would start.")
    assert "--tensor-parallel-size 2" in done.stdout
    assert "--quantization quasarnvfp4" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model given"),
        (["--model", "/models/none"], "/models/none does not exist"),
        (["--model", "/models"], "config.json is missing"),
        (["--model", SERVED_NAME, "--max-modellen", "1"], "did you mean --max-model-len"),
    ],
)
def test_a_start_that_cannot_work_ends_at_once_with_the_reason(arguments: list[str], message: str) -> None:
    done = docker("run", "--rm", "-v", MOUNT, IMAGE, *arguments, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_it_serves_nothing_it_was_not_given() -> None:
    every = ("/", "-xdev", "-name", "*.safetensors", "-not", "-path", "*/site-packages/*")  # packages have tables
    assert docker("run", "--rm", "--user", "root", "--entrypoint", "find", IMAGE, *every).stdout == ""


@pytest.mark.parametrize("tool", ["gcc", "g++", "cc", "nvcc", "make", "git"])
def test_it_holds_no_compiler(tool: str) -> None:
    assert docker("run", "--rm", "--entrypoint", "which", IMAGE, tool, check=False).returncode == 1


def test_its_labels_say_what_it_is() -> None:
    labels = inspect(IMAGE)["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "voltserve"
    tag = f"voltserve:{labels['org.opencontainers.image.version']}-vllm{labels['voltserve.vllm']}-cpu"
    assert tag == IMAGE
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])
