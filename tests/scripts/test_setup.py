"""`make setup` up to its first step: which engine, and what becomes of another one. Installs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
V100 = "Tesla V100-SXM2-16GB, 7.0"


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def environment(tmp_path: Path, cards: str | None, *, node: bool = False) -> dict[str, str]:
    """With an nvidia-smi that lists `cards`, or answers nothing; and with /dev/nvidia0 or not."""
    tools, dev = tmp_path / "tools", tmp_path / "dev"
    for made in (tools, dev):
        made.mkdir(exist_ok=True)
    script(tools, "nvidia-smi", "exit 9" if cards is None else f"echo '{cards}'")
    (dev / "nvidia0").touch() if node else (dev / "nvidia0").unlink(missing_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in {"ENGINE", "CUDA_HOME"}}
    return {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "DEV": str(dev)}


@pytest.mark.parametrize(
    ("cards", "node", "engine", "reason"),
    [
        (V100, False, "gpu", "1 × Tesla V100-SXM2-16GB: compute capability 7.0"),
        (f"{V100}\n{V100}", True, "gpu", "2 × Tesla V100"),
        (f"NVIDIA A100, 8.0\n{V100}", True, "gpu", "1 × NVIDIA A100: compute capability 8.0, 1 × Tesla"),
        ("NVIDIA A100, 8.0", True, "cpu", "no Tesla V100.*NVIDIA A100"),
        (None, True, "gpu", "nvidia0 is there"),
        (None, False, "cpu", "no NVIDIA card"),
        ("", False, "cpu", "no NVIDIA card"),
    ],
)
def test_the_cards_choose_the_engine_and_the_reason_names_them(
    tmp_path: Path, cards: str | None, node: bool, engine: str, reason: str
) -> None:
    found = subprocess.run(
        [ROOT / "scripts/find_engine.sh"],
        env=environment(tmp_path, cards, node=node),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert found.split()[0] == engine
    assert re.search(reason, found)


class Clone:
    """A clone whose python and uv only record their arguments."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "clone"
        self.log = tmp_path / "log"
        for folder in ("scripts", "requirements", "kernels"):
            shutil.copytree(ROOT / folder, self.root / folder, ignore=shutil.ignore_patterns("__pycache__", "build"))
        shutil.copy(ROOT / "pyproject.toml", self.root)
        # `python -m venv DIR` makes a folder with the same two fakes; cuda_wheel.sh is asked for a wheel.
        record = f'echo "$(basename "$0") $*" >>{self.log}'
        script(
            tmp_path,
            "python3",
            f'{record}\nif [[ $2 == venv ]]; then rm -rf "${{@: -1}}"; mkdir -p "${{@: -1}}/bin"; '
            f'cp {tmp_path}/python3 "${{@: -1}}/bin/python"; cp {tmp_path}/uv "${{@: -1}}/bin/uv"; fi\n'
            '[[ $1 == --version ]] && echo "Python 3.12.0" || true',
        )
        script(tmp_path, "uv", record)
        script(self.root / "scripts", "cuda_wheel.sh", f'{record}; touch "$2/voltserve_kernels-cuda.whl"')
        self.python = tmp_path / "python3"

    def setup(self, tmp_path: Path, cards: str | None = None, **variables: str) -> tuple[str, list[str]]:
        """What `make setup` says, and what it asked of python and uv."""
        self.log.write_text("")
        done = subprocess.run(
            [self.root / "scripts/setup.sh"],
            env={**environment(tmp_path, cards), "PYTHON": str(self.python), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        self.code = done.returncode
        return done.stdout + done.stderr, self.log.read_text().splitlines()


def locks(asked: list[str]) -> set[str]:
    return set(re.findall(r"requirements/(\w+)\.lock", " ".join(asked)))


def has_gpu_kernels(asked: list[str]) -> bool:
    return any(line.startswith("cuda_wheel.sh") for line in asked)


def test_a_v100_gets_the_gpu_engine_with_our_kernels(tmp_path: Path) -> None:
    said, asked = Clone(tmp_path).setup(tmp_path, V100, WITH_RAY="1")
    assert "the gpu engine (nvidia-smi lists 1 × Tesla V100-SXM2-16GB" in said
    assert {"torch", "engine", "vllm", "dev", "ray"} <= locks(asked)
    assert not [line for line in asked if "+cpu" in line]
    assert any(line.startswith("cuda_wheel.sh") for line in asked)
    assert any(line.endswith("voltserve_kernels-cuda.whl") for line in asked)


def test_a_second_run_installs_nothing(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    clone.setup(tmp_path, V100)
    said, asked = clone.setup(tmp_path, V100)
    assert clone.code == 0
    assert not [line for line in asked if line.startswith("uv") or " venv " in line], said


def test_another_engine_makes_the_environment_anew(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    clone.setup(tmp_path, ENGINE="cpu")
    said, asked = clone.setup(tmp_path, ENGINE="gpu")
    assert ".venv held the cpu engine and is made anew" in said
    assert any("-m venv --clear .venv" in line for line in asked)
    assert has_gpu_kernels(asked)
    said, asked = clone.setup(tmp_path, ENGINE="cpu")
    assert ".venv held the gpu engine and is made anew" in said
    assert {"engine", "vllm", "dev"} <= locks(asked)
    assert not has_gpu_kernels(asked)


def test_another_vllm_makes_the_environment_anew(tmp_path: Path) -> None:
    """Its files would lie beside the former one's, in the same folder."""
    clone = Clone(tmp_path)
    clone.setup(tmp_path)
    with (clone.root / "requirements/vllm.lock").open("a") as lock:
        lock.write("# another\n")
    _, asked = clone.setup(tmp_path)
    assert any("-m venv --clear .venv" in line for line in asked)


def test_an_environment_from_before_engines_could_be_chosen_is_a_cpu_engine_s(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    clone.setup(tmp_path)
    for name in ("engine", "asked"):
        (clone.root / ".venv/.setup" / name).unlink()
    said, asked = clone.setup(tmp_path)
    assert not [line for line in asked if line.startswith("uv")], said
    said, asked = clone.setup(tmp_path, V100)
    assert has_gpu_kernels(asked)


def test_an_engine_asked_for_is_remembered_until_auto(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    clone.setup(tmp_path, V100, ENGINE="cpu")
    said, _ = clone.setup(tmp_path, V100)
    assert "the cpu engine (asked for with ENGINE" in said
    said, _ = clone.setup(tmp_path, V100, ENGINE="auto")
    assert "the gpu engine (nvidia-smi lists" in said


def test_an_unknown_engine_is_refused(tmp_path: Path) -> None:
    clone = Clone(tmp_path)
    said, asked = clone.setup(tmp_path, ENGINE="cuda")
    assert clone.code == 1
    assert "ENGINE: expected gpu, cpu or auto, got 'cuda'" in said
    assert not [line for line in asked if " venv " in line]


def test_the_gpu_engine_s_packages_and_kernels_are_defined_once() -> None:
    """The Dockerfile, set-up and `make kernels-cuda` call the same scripts."""
    files = {name: (ROOT / name).read_text() for name in ("Dockerfile", "Makefile", "scripts/setup.sh")}
    assert all("cuda_wheel.sh" in text for text in files.values())
    assert all("install_engine.sh" in files[name] for name in ("Dockerfile", "scripts/setup.sh"))
    for name, text in files.items():
        commands = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        assert "-r requirements/engine.lock" not in commands, name
        assert "VOLTSERVE_CUDA_OBJECTS" not in commands, name


def test_the_locks_cover_every_python_that_set_up_takes() -> None:
    """uv refuses a lock without a version for an interpreter; only Python 3.10 asks for its own ones."""
    engine, torch, vllm = ((ROOT / f"requirements/{name}.lock").read_text() for name in ("engine", "torch", "vllm"))
    for package in ("exceptiongroup", "tomli"):
        assert re.search(rf"^{package}==\S+ ; python_full_version < '3\.11'", engine, re.MULTILINE), package
    assert re.search(r"^torch==2\.10\.0 ", torch, re.MULTILINE)
    assert re.search(r"^vllm==\S+ ", vllm, re.MULTILINE)


def test_no_package_for_other_gpus_is_locked() -> None:
    """vLLM's metadata asks for kernels of newer GPUs; requirements/overrides.txt leaves them out."""
    engine = (ROOT / "requirements/engine.lock").read_text()
    left_out = re.findall(
        r"^(\S+) ; sys_platform == 'never'", (ROOT / "requirements/overrides.txt").read_text(), re.MULTILINE
    )
    assert left_out
    for package in left_out:
        assert not re.search(rf"^{package}==", engine, re.MULTILINE | re.IGNORECASE), package
    assert not re.search(r"cu13|^torch==|^vllm==", engine, re.MULTILINE)


def test_no_text_promises_an_image_that_nobody_publishes() -> None:
    """Every image of ours is one that scripts/docker_build.sh builds here."""
    texts = [
        ROOT / "README.md",
        ROOT / "README.zh.md",
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("docker-compose*.yml"),
    ]
    texts += [
        path
        for part in ("server", "configs", "engine", "quant")
        for path in (ROOT / part).rglob("*")
        if path.suffix in {".py", ".yaml"}
    ]
    for path in (path for path in texts if path.name != "log.md"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"published image|docker pull|ghcr\.io|quay\.io", text), path
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    images = {name: service["image"] for name, service in compose["services"].items()}
    ours = {name for name, image in images.items() if "voltserve" in image}
    assert all(":-voltserve:" in images[name] for name in ours), images


def fetch_nvcc(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """scripts/fetch_nvcc.sh with an empty cache, and an apt-get that knows no Debian."""
    found = environment(tmp_path, None)
    script(tmp_path / "tools", "apt-get", "exit 0")
    found |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "LOCAL": str(tmp_path / "local"), **variables}
    return subprocess.run([ROOT / "scripts/fetch_nvcc.sh"], env=found, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["cuda", "cuda-12.4"])
def test_a_toolkit_of_the_machine_that_knows_volta_is_taken(tmp_path: Path, name: str) -> None:
    for folder, knows in (("cuda", "compute_75"), ("cuda-13.0", "compute_75"), (name, "compute_70")):
        (tmp_path / "local" / folder / "bin").mkdir(parents=True, exist_ok=True)
        script(tmp_path / "local" / folder / "bin", "nvcc", f"echo {knows}")
    assert fetch_nvcc(tmp_path).stdout.strip() == str(tmp_path / "local" / name)


def test_without_a_debian_mirror_it_is_told_how_to_name_one(tmp_path: Path) -> None:
    done = fetch_nvcc(tmp_path)
    assert done.returncode == 1
    assert "DEBIAN_MIRROR=https://HOST" in done.stderr
    assert "CUDA_HOME" in done.stderr
