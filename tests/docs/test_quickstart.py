"""The commands of docs/quickstart.md, in its order, on a machine of stand-ins with a hub of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.hub import Hub, Repository, local_hub
from tests.fakes.machine import Machine
from tests.quant.checkpoints import write_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
NAME = "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4"


def section(number: int) -> str:
    """The commands of a section."""
    text = re.search(rf"^## {number}\. .*?(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert text
    return "".join(re.findall(r"^```\n(.*?)^```", text[0], re.MULTILINE | re.DOTALL))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A hub that has a small model under the large one's name. Its engine answers "Paris"."""
    files = write_model(tmp_path / "on-the-hub")
    config = json.loads((files / "config.json").read_text()) | {"max_position_embeddings": 4096}
    (files / "config.json").write_text(json.dumps(config))
    (files / "fake.json").write_text(json.dumps({"answer": {"word": "Paris"}}))
    with local_hub() as served:
        served.repositories[NAME] = Repository.of(files)
        yield served


@pytest.fixture
def machine(hub: Hub, tmp_path: Path) -> Iterator[Machine]:
    folder = tmp_path / "machine"
    folder.mkdir()
    made = Machine(folder, hub.url)
    yield made
    made.close()


def on(machine: Machine, *numbers: int) -> str:
    """Runs sections. Absolute folders of the page are folders of the machine."""
    script = "".join(map(section, numbers)).replace("/data/", f"{machine.folder}/data/")
    code, output = machine.run(script)
    assert code == 0, output[-5000:]
    return output


def test_from_bare_ubuntu_to_paris(machine: Machine, hub: Hub) -> None:
    output = on(machine, 1, 2, 3, 4, 5)
    model = machine.folder / "data/models/quasar-nvfp4"
    assert (model / "SHA256SUMS").is_file()
    assert "1. hf:QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4: 19.7 GB" in output  # advise
    assert "requests: configs and headers, no weight" in output  # plan
    assert f"hf:{NAME}@{'1' * 40}, 7 files" in output  # fetch
    assert "7 sha256 digests compared" in output  # verify
    assert output.index('"content":"Paris') > output.index("7 sha256 digests")
    assert any(line.startswith("GET /api/models/") for line in hub.requests)


def test_what_follows_the_first_answer(machine: Machine) -> None:
    begin = "REPOSITORY=x; git clone x voltserve; cd voltserve; cp .env.example .env\n"
    (machine.folder / "train.jsonl").write_text('{"text": "a"}\n')
    code, output = machine.run(begin + section(6).replace("docker compose up -d", "true"))
    assert code == 0, output
    assert json.loads((machine.folder / "volumes/keys/keys.json").read_text())
    later = section(8) + "cd ..\n" + section(9).replace("voltserve && cd voltserve", "again && cd again") + "cd ..\n"
    for number in (8, 9, 10):
        assert section(number), number
    write_model(machine.folder / "my-model")
    (machine.folder / "held-out.jsonl").write_text('{"text": "a"}\n')
    code, output = machine.run("cd voltserve; REPOSITORY=x\n" + later + section(10))
    assert code == 0, output
    assert "parsed: voltserve doctor" in output
    assert "parsed: voltserve eval my-model-nvfp4 --source my-model --text held-out.jsonl" in output


def test_every_section_with_commands_is_run() -> None:
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", TEXT, re.MULTILINE)]
    assert [number for number in numbers if section(number)] == [1, 2, 3, 4, 5, 6, 8, 9, 10]
