#!/usr/bin/env python3
"""Times the README's main job in a fresh clone and writes a result file: set-up, model, cold and warm start to ready.

    scripts/measure_main_job.py docs/results/main-job-DATE.json

Standard library only: it runs before anything is installed. Times are whole commands in seconds, package caches as they
are found ("package_cache" says which); `cold_start` is the first start ever in that clone, `warm_start` the second.
"""

import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_S = 600


def timed(clone: Path, *command: str) -> float:
    """Seconds that `command` took in `clone`."""
    began = time.monotonic()
    subprocess.run(command, cwd=clone, check=True)
    return round(time.monotonic() - began, 1)


def start_to_ready(clone: Path) -> float:
    """Seconds from `make serve` to the first 200 of /health; the service is stopped again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.monotonic()
    server = subprocess.Popen(["make", "serve", f"PORT={port}"], cwd=clone, start_new_session=True)
    try:
        while time.monotonic() - began < LIMIT_S and server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return round(time.monotonic() - began, 1)
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        sys.exit(f"not ready within {LIMIT_S} s (exit code {server.poll()})")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def processor() -> str:
    """The processor's name and the vector extensions that kernels choose by."""
    text = Path("/proc/cpuinfo").read_text()
    name = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "unknown")
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    vectors = [flag for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if flag in flags]
    return ", ".join([name, *vectors])


def main() -> None:
    """Clones, runs, writes."""
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "voltserve"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, check=True, capture_output=True, text=True)
        cache = Path(os.environ.get("UV_CACHE_DIR", Path.home() / ".cache" / "uv"))
        result = {
            "what": "the README's main job in a fresh clone, in seconds",
            "kind": "measured",
            "command": "scripts/measure_main_job.py " + str(out),
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "commit": commit.stdout.strip(),
            "machine": {"cpu": processor(), "cores": os.cpu_count(), "python": platform.python_version()},
            "package_cache": "filled" if cache.is_dir() and any(cache.iterdir()) else "empty",
            "seconds": {
                "setup": timed(clone, "make", "setup"),
                "setup_again": timed(clone, "make", "setup"),
                "model_fetch": timed(clone, "make", "models/smollm2"),
                "quantize": timed(clone, "make", "models/smollm2-nvfp4"),
                "cold_start": start_to_ready(clone),
                "warm_start": start_to_ready(clone),
            },
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["seconds"], indent=2))


if __name__ == "__main__":
    main()
