"""Decoder layers in one operation on the real engine: the dequantized twin's greedy tokens."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from engine import environment
from lookalikes.linears import member
from quant.formats import quantize_config
from scripts.gpu_tp2.greedy import PROMPTS, TOKENS, run_jobs

pytestmark = pytest.mark.e2e

GROUP_SIZE = 32
LIMIT_S = 300  # a bound on a hang, not a check of speed
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, rope_scaling=dict(LLAMA3_ROPE)),
    "qwen2": lambda: Qwen2Config(**SIZES),  # biases of q, k and v
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=64),  # norms of each head
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
}


def write_model(directory: Path, config: PretrainedConfig) -> Any:
    """Writes an NVFP4 model of random weights; returns its dequantized twin in float32."""
    torch.manual_seed(0)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored: dict[str, torch.Tensor] = {}
    for index, (name, parameter) in enumerate(twin.named_parameters()):
        if "proj.weight" in name:
            rows, columns = parameter.shape
            made = member(rows, columns, divisor=3000.0 + 700.0 * index, group_size=GROUP_SIZE, seed=index)
            parameter.data = made.weight.float()
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in made.tensors.items()}
            continue
        if parameter.dim() == 1:
            parameter.data = torch.rand_like(parameter) + 0.5
        if name.startswith("lm_head"):
            torch.nn.init.normal_(parameter, std=0.3)  # logits far apart, so that last bits cannot change a choice
        stored[name] = parameter.data
    config.architectures = [type(twin).__name__]
    config.save_pretrained(directory)
    save_file(stored, directory / "model.safetensors")
    quantize_config.write(directory, quantize_config.QuantizeConfig(GROUP_SIZE, "maxabs"))
    return twin


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each model its twin, what the engine answered, and what it decided."""
    folder = tmp_path_factory.mktemp("decoder")
    runtime = Path(tempfile.mkdtemp(prefix="vs-"))  # a path short enough for a socket
    made: dict[str, Any] = {}
    jobs = []
    for name, config in MODELS.items():
        twin = write_model(folder / name, config())
        flags = ["--model", str(folder / name), "--quantization", quantize_config.NAME, "--no-enforce-eager"]
        names = {environment.PROGRESS_SOCKET: str(runtime / name)}
        jobs.append({"flags": flags, "output": str(folder / f"{name}.json"), "environment": names})
        made[name] = {"twin": twin}
    with contextlib.ExitStack() as stack:
        listeners = {name: stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) for name in MODELS}
        for name, listener in listeners.items():
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            listener.bind(str(runtime / name))
            listener.setblocking(False)
        run_jobs(folder, jobs, "nobind", LIMIT_S)
        for name, listener in listeners.items():
            made[name]["answers"] = json.loads((folder / f"{name}.json").read_bytes())
            made[name]["decisions"] = decisions(listener)
    return made


def decisions(listener: socket.socket) -> dict[str, str]:
    choices = {}
    with contextlib.suppress(BlockingIOError):
        while message := json.loads(listener.recv(65536)):
            if message["event"] == "decision":
                choices[message["what"]] = f"{message['choice']}: {message['reason']}"
    return choices


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_and_their_probabilities_are_the_dequantized_twin_s(twins: dict[str, Any], name: str) -> None:
    answers = twins[name]["answers"]
    assert isinstance(answers, list), answers["error"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = answer["tokens"]
        assert len(tokens) == TOKENS
        with torch.inference_mode():
            logits = twins[name]["twin"](torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer["logprobs"]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_known_models_run_in_one_operation(twins: dict[str, Any], name: str) -> None:
    assert twins[name]["decisions"]["decoder layers"].startswith("one operation: ")


def test_another_model_runs_as_before_and_the_reason_is_told(twins: dict[str, Any]) -> None:
    told = twins["mistral"]["decisions"]["decoder layers"]
    assert told.startswith("operation by operation: MistralForCausalLM is none of LlamaForCausalLM, ")
