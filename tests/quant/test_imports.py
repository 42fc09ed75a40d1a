import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "quant.errors",
        "quant.progress",
        "quant.jsonfile",
        "quant.constants",
        "quant.formats.quantize_config",
        "quant.formats.registry",
        "quant.models",
        "quant.inspect",
    ],
)
def test_what_the_gateway_imports_does_not_load_torch(module):
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
