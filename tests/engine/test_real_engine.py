"""The real engine, started once through our launcher, on a tiny random Llama whose fused members differ in globals.

Its results are compared with transformers on the dequantized weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine import environment
from lookalikes.linears import member
from lookalikes.random_models import write_tokenizer
from quant.formats import quantize_config

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
GROUP_SIZE = 32
START_LIMIT_S = 300  # a bound on a hang, not a check of speed
PROMPTS = [[5, 17, 99], [200, 3, 3, 3, 45, 46], list(range(60, 90))]


def write_model(directory: Path) -> LlamaForCausalLM:
    """Writes the NVFP4 model, described by quantize_config.json alone; returns its dequantized float32 twin."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    twin = LlamaForCausalLM(config).eval()
    # Logits far apart, so that the last bits of an addition cannot change a greedy choice.
    torch.nn.init.normal_(twin.lm_head.weight, std=0.3)
    stored: dict[str, torch.Tensor] = {}
    for index, (name, parameter) in enumerate(twin.named_parameters()):
        if "proj" in name:
            rows, columns = parameter.shape
            made = member(rows, columns, 3000.0 + 700.0 * index, GROUP_SIZE, seed=index)
            parameter.data = made.weight.float()
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in made.tensors.items()}
        else:
            stored[name] = parameter.data
    config.save_pretrained(directory)
    save_file(stored, directory / "model.safetensors")
    quantize_config.write(directory, quantize_config.QuantizeConfig(GROUP_SIZE, "maxabs"))
    write_tokenizer(directory)
    return twin


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    client: httpx.Client
    http: Path
    log: Path
    twin: LlamaForCausalLM
    datagrams: list[dict[str, Any]] = field(default_factory=list)

    def is_up(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(self.http)) != 0:
                return False
        return self.client.get("/health").status_code == 200

    def processes(self) -> list[psutil.Process]:
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    twin = write_model(folder)
    runtime = Path(tempfile.mkdtemp(prefix="vs-"))  # a path short enough for a socket
    settings = {
        environment.PROGRESS_SOCKET: str(runtime / "progress"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    libiomp = Path(sys.prefix) / "lib" / "libiomp5.so"  # what the service runs with on x86
    if libiomp.exists():
        settings["LD_PRELOAD"] = str(libiomp)
    flags = ["--quantization", "quasarnvfp4", "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    http = runtime / "http"
    command = [sys.executable, "-m", "engine", "--model", str(folder), "--uds", str(http), *flags]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        (folder / "log").open("wb") as log,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(http)), base_url="http://engine") as client,
    ):
        listener.bind(str(runtime / "progress"))
        listener.setblocking(False)
        process = subprocess.Popen(
            command, env=os.environ | settings, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
        )
        made = Engine(process, client, http, folder / "log", twin)
        try:
            end = time.monotonic() + START_LIMIT_S
            while not made.is_up():
                assert process.poll() is None, f"exited with {process.returncode}:\n{made.log.read_text()[-5000:]}"
                assert time.monotonic() < end, f"not up within {START_LIMIT_S} s:\n{made.log.read_text()[-5000:]}"
                with contextlib.suppress(BlockingIOError):
                    while True:
                        made.datagrams.append(json.loads(listener.recv(65536)))
                time.sleep(0.05)
            yield made
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(runtime)


def test_start_up_is_told_phase_by_phase(engine: Engine) -> None:
    phases = [message["phase"] for message in engine.datagrams if message["event"] == "phase"]
    assert phases == ["importing", "configuring", "weights", "warmup"]
    last = [message for message in engine.datagrams if message["event"] == "progress"][-1]
    assert last["done"] == last["total"] == (engine.log.parent / "model.safetensors").stat().st_size
    choices = {message["what"]: message["choice"] for message in engine.datagrams if message["event"] == "decision"}
    assert choices["NVFP4 linear layers"] in ("dense", "kernels")


def test_nothing_listens_beyond_loopback(engine: Engine) -> None:
    listening = {
        connection.laddr.ip
        for process in engine.processes()
        for connection in process.net_connections("inet")
        if connection.status == "LISTEN"
    }
    assert listening <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_tokens_and_their_probabilities_are_the_dense_twins(engine: Engine, prompt: list[int]) -> None:
    body = {"model": str(engine.log.parent), "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    reply = engine.client.post("/v1/completions", json=body | {"logprobs": 0, "return_token_ids": True}, timeout=120)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    tokens = choice["token_ids"]
    with torch.inference_mode():
        logits = engine.twin(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, rtol=0, atol=1e-3)


def test_a_killed_engine_process_ends_the_server_with_the_reason(engine: Engine) -> None:
    (core,) = [process for process in engine.processes() if process.cmdline()[0] == "VLLM::EngineCore"]
    core.send_signal(signal.SIGKILL)
    assert engine.process.wait(timeout=30) == 1
    assert "the engine died: EngineCore was killed by SIGKILL" in engine.log.read_text()
