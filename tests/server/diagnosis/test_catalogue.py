import site
from pathlib import Path

import pytest
import yaml

from server.diagnosis.catalogue import CATALOGUE, EXIT_CODES, Ending, diagnose, load_catalogue
from server.errors import ConfigError

EXCERPTS = sorted((Path(__file__).parent / "excerpts").glob("*.txt"))
ENTRIES = load_catalogue()
IDS = [entry.id for entry in ENTRIES]


def read(path: Path) -> Ending:
    """An excerpt: `exit: …`, then the engine's last lines."""
    head, _, lines = path.read_text(encoding="utf-8").partition("\n")
    assert head.startswith("exit: ")
    return Ending.of(head.removeprefix("exit: "), lines.splitlines())


def expected(path: Path) -> str:
    """The id that the excerpt's name starts with: the longest, since one may start with another."""
    return max((name for name in IDS if path.stem == name or path.stem.startswith(f"{name}-")), key=len, default="none")


@pytest.mark.parametrize("path", EXCERPTS, ids=lambda path: path.stem)
def test_an_excerpt_is_diagnosed_as_what_it_is(path: Path) -> None:
    found = diagnose(read(path))
    assert found is not None
    assert found.id == expected(path)
    assert found.found


def test_every_entry_has_an_excerpt() -> None:
    assert {expected(path) for path in EXCERPTS} == set(IDS)


@pytest.mark.parametrize("entry", ENTRIES, ids=IDS)
def test_no_specific_entry_takes_another_s_excerpt(entry: object) -> None:
    """Alone, an entry may match only its own excerpts and those of entries before it, which are asked first."""
    index = IDS.index(entry.id)  # type: ignore[attr-defined]
    taken = {expected(path) for path in EXCERPTS if diagnose(read(path), (ENTRIES[index],))}
    assert not taken & set(IDS[index + 1 :])


@pytest.mark.parametrize(
    ("exit_text", "lines"),
    [
        ("exited with code 1", ["ValueError: something new"]),
        ("exited with code 0", []),
        ("was killed by SIGTERM", ["INFO 11-29 20:13:41 [launcher.py:46] Shutting down"]),
        ("the engine says that its core process died", ["Loading weights took 3.1 seconds"]),
    ],
)
def test_what_is_not_in_the_catalogue_is_not_guessed(exit_text: str, lines: list[str]) -> None:
    assert diagnose(Ending.of(exit_text, lines)) is None


def test_the_head_of_a_log_line_is_not_part_of_it() -> None:
    ending = Ending.of("", ["(EngineCore pid=311) ERROR 11-29 20:14:02 [core.py:1101] MemoryError"])
    assert ending.lines == ("MemoryError",)


@pytest.mark.parametrize(
    ("package_file", "text"),
    [
        pytest.param(item.file, item.text, id=f"{entry.id}-{number}")
        for entry in ENTRIES
        for number, item in enumerate(entry.evidence)
    ],
)
def test_the_installed_packages_word_their_messages_as_the_catalogue_says(package_file: str, text: str) -> None:
    (path,) = [
        Path(folder) / package_file for folder in site.getsitepackages() if (Path(folder) / package_file).is_file()
    ]
    assert text in path.read_text(encoding="utf-8")


def test_the_six_errors_of_the_reference_document_are_there() -> None:
    assert {
        "cuda-out-of-memory",
        "unsupported-quantization",
        "tensor-shape-mismatch",
        "nccl-error",
        "kernel-launch-failed",
        "load-timeout",
    } <= set(IDS)


def test_every_kind_has_an_exit_code_of_its_own() -> None:
    codes = list(EXIT_CODES.values())
    assert len(set(codes)) == len(codes)
    assert not {0, 1, 2} & set(codes)
    assert {entry.kind for entry in ENTRIES} == set(EXIT_CODES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": ["("]}, "is not a pattern"),
        ({"lines": []}, "expected lines or exit, got neither"),
        ({"kind": "weather"}, "kind"),
        ({"remedy": []}, "remedy"),
        ({"pattern": "x"}, "pattern"),
    ],
)
def test_a_wrong_entry_is_refused_by_file_and_key(tmp_path: Path, change: dict[str, object], message: str) -> None:
    entry = {"id": "a", "title": "a", "kind": "engine", "lines": ["x"], "cause": "c", "remedy": ["r"], **change}
    path = tmp_path / "errors.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "errors": [entry]}))
    with pytest.raises(ConfigError, match=message) as error:
        load_catalogue(path)
    assert str(path) in str(error.value)


def test_an_id_stands_once(tmp_path: Path) -> None:
    text = CATALOGUE.read_text(encoding="utf-8")
    path = tmp_path / "errors.yaml"
    path.write_text(text + text[text.index("  - id: worker-died") :])
    with pytest.raises(ConfigError, match="worker-died stands twice"):
        load_catalogue(path)
