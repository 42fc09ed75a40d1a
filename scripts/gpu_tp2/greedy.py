"""Greedy tokens of several models on the real engine, one forked process each, so that vLLM is imported once.

    python -m scripts.gpu_tp2.greedy JOBS.json     [{"flags": ["--model", DIR, …], "output": FILE}, …]

Each output holds, per prompt, the tokens, the log probability of each, and its lead over the second likeliest. After a
failure it holds "error" instead, with the errors that the engine's processes logged. A job may have "environment", and
flags that overrule those here: scripts/gpu_tp2.sh uses both.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from engine import launcher

PROMPTS = [[5, 17, 99], [200, 3, 3, 3, 45, 46], list(range(60, 90))]
TOKENS = 24
ERRORS = 30  # lines
ROOT = Path(__file__).parents[2]
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_jobs(folder: Path, jobs: list[dict[str, Any]], cores: str, limit: float) -> None:
    """Runs `jobs` on the CPU engine, in a process of their own; what it prints is in `folder`/log.

    Args:
        folder: where the jobs and the log are written.
        jobs: as in the module's text.
        cores: VLLM_CPU_OMP_THREADS_BIND.
        limit: seconds.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs))
    settings = SETTINGS | {"VLLM_CPU_OMP_THREADS_BIND": cores}
    libiomp = Path(sys.prefix) / "lib" / "libiomp5.so"  # what the service runs with on x86
    if libiomp.exists():
        settings["LD_PRELOAD"] = str(libiomp)
    command = [sys.executable, "-m", "scripts.gpu_tp2.greedy", str(folder / "jobs.json")]
    with (folder / "log").open("wb") as log:
        subprocess.run(command, env=os.environ | settings, cwd=ROOT, stdout=log, stderr=log, timeout=limit, check=True)


def generate(flags: list[str]) -> list[dict[str, Any]]:
    """Starts an engine in this process and continues PROMPTS."""
    # Profiling runs a batch of the largest size, for nothing here.
    common = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--skip-tokenizer-init"]
    common += ["--max-num-batched-tokens", "128", "--max-num-seqs", "4"]
    args = launcher.parse([*common, *flags])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.LLM_CLASS)
    # As the launcher does it: vLLM's CPU platform has just set these.
    os.environ[launcher.START_METHOD] = "fork"
    for name in launcher.CRASHING_BARRIERS:
        os.environ.pop(name, None)
    engine = LLMEngine.from_vllm_config(config)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2, detokenize=False)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output.outputs[0]
    engine.engine_core.shutdown()
    return [describe(finished[number]) for number in range(len(PROMPTS))]


def describe(output: Any) -> dict[str, Any]:
    """What the output file holds per prompt."""
    described: dict[str, Any] = {"tokens": list(output.token_ids), "logprobs": [], "leads": []}
    for step, token in zip(output.logprobs, output.token_ids, strict=True):
        own = step[token].logprob
        described["logprobs"].append(own)
        described["leads"].append(own - max(one.logprob for other, one in step.items() if other != token))
    return described


def run(job: dict[str, Any]) -> None:
    """In a process of its own, since an engine leaves groups and threads behind."""
    output, start = Path(job["output"]), os.fstat(1).st_size
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        made = json.loads(output.read_bytes()) if output.exists() else {"error": f"the engine ended with code {code}"}
        if isinstance(made, dict):
            output.write_text(json.dumps({"error": "\n".join([made["error"], *errors_since(start)])}))
        return
    try:
        os.environ.update(job.get("environment", {}))
        result: object = generate(job["flags"])
    except BaseException:
        result = {"error": traceback.format_exc()}
    output.write_text(json.dumps(result))
    os._exit(0)


def errors_since(start: int) -> list[str]:
    """The errors logged since the output, if it is a file, had `start` bytes. A worker's reason is only there."""
    if not stat.S_ISREG(os.fstat(1).st_mode):
        return []
    with Path("/proc/self/fd/1").open("rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").splitlines()
    return [line for line in lines if " ERROR " in line][-ERRORS:]


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_bytes()):
        run(job)
