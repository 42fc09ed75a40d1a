"""One machine without Ray stays as it is: nothing of voltserve loads Ray but what is started as a process for it."""

import subprocess
import sys
from pathlib import Path

import pytest

import server
from server.errors import UserError

EVERYTHING_ELSE = """
import importlib, pkgutil, sys
import server
for module in pkgutil.walk_packages(server.__path__, "server."):
    if not module.name.startswith("server.cluster.on_ray") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted(name for name in sys.modules if name.partition(".")[0] == "ray"))
"""


def test_no_module_but_those_for_ray_loads_it() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING_ELSE], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert list(Path(server.__path__[0], "cluster", "on_ray").glob("*.py")), "the modules left out are there"


def test_without_ray_deploy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from server.cluster import manage
    from server.cluster.deploy import Wanted, deploy

    monkeypatch.setattr("server.cluster.manage.importlib.util.find_spec", lambda _: None)
    (tmp_path / "cluster.yaml").write_text("schema: 1\nmodels: [{name: m, flags: {model: /m}}]")
    for ask in (lambda: deploy(tmp_path / "cluster.yaml", [], Wanted()), lambda: manage.ask("status")):
        with pytest.raises(UserError, match="make setup-ray"):
            ask()
