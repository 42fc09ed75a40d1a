"""A machine for the commands of a page: bash runs them, with stand-ins for Docker and for what changes the system.

The stand-in for Docker reads docker-compose.yml and .env, maps the containers' folders to folders here, and runs
`voltserve` in this process. `docker compose up` starts the gateway with the fake engine. Commands that take minutes or
need a card (doctor, quantize, eval) are parsed and not run: other tests run them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
import yaml
from typer.testing import CliRunner

from server.cli import app
from tests.quant.checkpoints import write_model

ROOT = Path(__file__).parents[2]
SILENT = ("apt", "reboot", "usermod", "newgrp", "systemctl", "nvidia-ctk", "nvidia-smi", "sleep", "make")
HERE = ("docker", "voltserve", "git", "install")  # answered in this process
PARSED_ONLY = {"doctor", "quantize", "eval"}
_CLIENT = """\
import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["MACHINE"])
command = [os.path.basename(sys.argv[1]), *sys.argv[2:]]
link.sendall(json.dumps(command).encode() + b"\\n" + os.getcwd().encode() + b"\\n")
code, _, text = link.makefile("rb").read().partition(b"\\n")
sys.stdout.buffer.write(text)
sys.exit(int(code))
"""
_INTERPOLATED = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")


class Machine:
    """Folders, stand-ins, and what was run."""

    def __init__(self, folder: Path, hub: str) -> None:
        self.folder = folder
        self.hub = hub  # what the mirror's name leads to
        self.calls: list[list[str]] = []
        self.server: subprocess.Popen[bytes] | None = None
        self.bin = folder / "bin"
        self.bin.mkdir()
        (folder / "client.py").write_text(_CLIENT)
        self._stand_in("sudo", 'exec "$@"')
        self._stand_in(
            "curl", f'exec {_curl()} "${{@//localhost:8000/127.0.0.1:$(cat {folder}/port)}}"', interpreter="bash"
        )
        for name in SILENT:
            self._stand_in(name, "exit 0")
        for name in HERE:
            self._stand_in(name, f'exec {sys.executable} -S -E {folder}/client.py "$0" "$@"')

    def _stand_in(self, name: str, body: str, interpreter: str = "sh") -> None:
        path = self.bin / name
        path.write_text(f"#!/usr/bin/env {interpreter}\n{body}\n")
        path.chmod(0o755)

    def run(self, script: str) -> tuple[int, str]:
        """Bash's exit code and all output of a script, which ends at the first command that fails."""
        environment = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "MACHINE": str(self.folder / "socket"),
            "USER": "me",
        }
        with socket.socket(socket.AF_UNIX) as listener, (self.folder / "output").open("wb") as output:
            listener.bind(environment["MACHINE"])
            listener.listen()
            listener.settimeout(0.05)
            command = ["bash", "-euo", "pipefail", "-c", script]
            with subprocess.Popen(command, cwd=self.folder, env=environment, stdout=output, stderr=output) as bash:
                try:
                    self._answer_until_it_ends(bash, listener)
                finally:
                    bash.kill()  # where a stand-in failed, its next command would wait for ever
        Path(environment["MACHINE"]).unlink()
        return bash.returncode, (self.folder / "output").read_text()

    def _answer_until_it_ends(self, bash: subprocess.Popen[bytes], listener: socket.socket) -> None:
        while bash.poll() is None:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                continue
            with link:
                self._answer(link)

    def close(self) -> None:
        """Ends what serves."""
        if self.server:
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(60)
            self.server = None

    def _answer(self, link: socket.socket) -> None:
        link.settimeout(None)
        with link.makefile("rb") as lines:
            name, *arguments = json.loads(lines.readline())
            there = Path(lines.readline().decode().rstrip("\n"))
        self.calls.append([name, *arguments])
        code, text = getattr(self, f"_{name}")(arguments, there)
        link.sendall(f"{code}\n{text}".encode())

    def _git(self, arguments: Sequence[str], there: Path) -> tuple[int, str]:
        clone = there / arguments[-1]
        for name in ("docker-compose.yml", ".env.example"):
            clone.mkdir(exist_ok=True)
            (clone / name).write_text((ROOT / name).read_text())
        for name in ("scripts/docker_build.sh", ".venv/bin/voltserve"):
            path = clone / name
            path.parent.mkdir(parents=True)
            path.write_text(
                f'#!/bin/sh\nexec {self.bin}/voltserve "$@"\n' if path.name == "voltserve" else "#!/bin/sh\n"
            )
            path.chmod(0o755)
        return 0, ""

    def _install(self, arguments: Sequence[str], there: Path) -> tuple[int, str]:
        (there / arguments[-1]).mkdir(parents=True, exist_ok=True)  # the owner is the container's user there
        return 0, ""

    def _voltserve(
        self, arguments: Sequence[str], there: Path, environ: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        command = arguments[0]
        if list(arguments[:3]) == ["model", "fetch", "smollm2"]:
            write_model(Path(arguments[3]))
            return 0, ""
        if command in PARSED_ONLY or "--as" in arguments:
            group = typer.main.get_group(app)
            with group.make_context("voltserve", [], resilient_parsing=True) as context:
                name, found, rest = group.resolve_command(context, list(arguments))
                assert found is not None
                found.make_context(name, rest, parent=context)
            if command == "quantize" and "--dry-run" not in arguments:
                write_model(there / arguments[2])
            return 0, f"parsed: voltserve {shlex.join(arguments)}\n"
        with _inside(there):  # where bash runs it; relative paths mean nothing else
            result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **(environ or {})})
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    def _docker(self, arguments: Sequence[str], there: Path) -> tuple[int, str]:
        if arguments[0] == "save":
            return 0, "an image"
        if arguments[0] == "run":
            return self._container(list(arguments[1:]), there)
        if arguments[:2] == ["compose", "logs"]:
            return 0, "lines\n"
        variables = read_env((there / ".env").read_text())
        services = yaml.safe_load(_interpolated((there / "docker-compose.yml").read_text(), variables))["services"]
        if arguments[:2] == ["compose", "run"]:
            options, rest = _split(list(arguments[2:]), with_value={"--entrypoint", "-e"})
            service = services[rest[0]]
            entrypoint = options.get("--entrypoint", service.get("entrypoint", [])[-1:])
            assert entrypoint in ("voltserve", ["voltserve"]), entrypoint
            folders = self._folders(service["volumes"], there)
            command = [_mapped(argument, folders) for argument in rest[1:] or service["command"]]
            hub = {"HF_ENDPOINT": self.hub} if "HF_ENDPOINT" in variables else {}
            return self._voltserve(command, there, hub)
        assert list(arguments) == ["compose", "up", "-d"], arguments
        service = services[variables["COMPOSE_PROFILES"].partition(",")[0]]
        folders = self._folders(service["volumes"], there)
        settings = {name: _mapped(value, folders) for name, value in variables.items() if name.startswith("VOLTSERVE_")}
        self._serve([_mapped(argument, folders) for argument in service["command"]], settings)
        return 0, ""

    def _container(self, arguments: list[str], there: Path) -> tuple[int, str]:
        with_value = {"--gpus", "--user", "-v", "--entrypoint", "--shm-size", "-e", "-p"}
        options, (_image, *command) = _split(arguments, with_value=with_value)
        folders = self._folders([options["-v"]] if "-v" in options else [], there)
        mapped = [_mapped(argument, folders) for argument in command]
        if options.get("--entrypoint") == "voltserve":
            return self._voltserve(mapped, there)
        from server.config.settings import load_config

        load_config(mapped)  # `docker run` of the service itself: its flags are flags of serve
        return 0, ""

    def _folders(self, volumes: Sequence[Any], there: Path) -> dict[str, Path]:
        """Container's folders to folders here. A named volume is a folder of this machine."""
        folders = {}
        for volume in volumes:
            if isinstance(volume, str):
                source, target, *_ = volume.split(":")
            else:
                source, target = volume["source"], volume["target"]
            path = there / source if "/" in source else self.folder / "volumes" / source
            path.mkdir(parents=True, exist_ok=True)
            folders[target] = path
        return folders

    def _serve(self, command: Sequence[str], settings: Mapping[str, str]) -> None:
        self.close()
        log = self.folder / "server.log"
        with log.open("wb") as output:
            served = ["--served-model-name", "/models/quasar-nvfp4", "--port", "0"]
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.fakes.serve", *command, *served],
                cwd=ROOT,
                env={**os.environ, **settings},
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 60
        while not (found := re.search(r"listening.*port\W+(\d+)", log.read_text())):
            assert self.server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        (self.folder / "port").write_text(found[1])


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _curl() -> str:
    return subprocess.run(["which", "curl"], capture_output=True, text=True, check=True).stdout.strip()


def _interpolated(text: str, variables: Mapping[str, str]) -> str:
    return _INTERPOLATED.sub(lambda match: variables.get(match[1]) or match[2] or "", text)


def _split(arguments: list[str], with_value: set[str]) -> tuple[dict[str, str], list[str]]:
    """The options before the first argument that is none, and the rest."""
    options = {}
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        options[option] = arguments.pop(0) if option in with_value else ""
    return options, arguments


def _mapped(argument: str, folders: Mapping[str, Path]) -> str:
    """A path in the container as one here."""
    for target, path in folders.items():
        if argument == target or argument.startswith(f"{target}/"):
            return str(path) + argument[len(target) :]
    return argument


def read_env(text: str) -> dict[str, str]:
    """The variables of a `.env` without quotes."""
    return dict(re.findall(r"^([A-Z]\w*)=(.*)$", text, re.MULTILINE))
