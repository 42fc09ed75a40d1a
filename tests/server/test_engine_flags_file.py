import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.e2e
def test_the_flags_file_is_what_the_installed_vllm_s_parser_says() -> None:
    command = [sys.executable, "scripts/engine_flags.py", "--check"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr[-2000:]
