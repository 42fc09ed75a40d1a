import site
from pathlib import Path

import pytest
import yaml

from server.diagnosis.catalogue import CATALOGUE, EXIT_CODES, Ending, Fault, diagnose, load_catalogue
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


def test_nothing_in_a_start_that_works_is_an_error() -> None:
    """Recorded from the real engine on a CPU; vLLM's warning about ulimit words an error of the catalogue."""
    lines = (Path(__file__).parent / "normal_start.txt").read_text(encoding="utf-8").splitlines()
    assert any("Too many open files" in line for line in lines)
    assert diagnose(Ending.of("exited with code 1", lines)) is None


@pytest.mark.parametrize(
    "head",
    [
        *("INFO 11-29 20:14:02 [core.py:1] ", "(EngineCore pid=3) WARNING 11-29 20:14:02 [core.py:1] "),
        *("W1201 03:51:18.543000 14545 torch/x.py:118] ", "[rank0]:[W1201 03:51:18.5 x.cpp:1] ", "INFO:     "),
    ],
)
def test_what_is_no_error_by_its_own_words_is_none_for_any_entry(head: str) -> None:
    for path in EXCERPTS:
        ending = read(path)
        harmless = Ending.of("exited with code 1", [head + line for line in ending.lines])
        assert diagnose(harmless) is None, path.stem


@pytest.mark.parametrize("text", ["grammar: {}", "x\n{}", "'{}'", "a (b): {}"])
def test_a_client_s_words_within_an_exception_s_message_make_no_diagnosis(text: str) -> None:
    for path in EXCERPTS:
        faults = [
            Fault(kind, text.format(line)) for line in read(path).lines for kind in ("ValueError", "RuntimeError")
        ]
        found = diagnose(Ending("exited with code 1", (), tuple(faults)))
        assert found is None, f"{path.stem}: {found}"


@pytest.mark.parametrize(
    ("kind", "message", "expected_id"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 MiB", "cuda-out-of-memory"),
        ("torch.AcceleratorError", "CUDA error: an illegal memory access was encountered", "kernel-launch-failed"),
        ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "double-bit-error"),
        ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:1, unhandled system error", "nccl-error"),
        ("RuntimeError", "NCCL error: unhandled system error", "nccl-error"),
        ("OSError", "[Errno 28] No space left on device: '/root/.cache/x'", "disk-full"),
        ("OSError", "[Errno 24] Too many open files", "too-many-files"),
        (
            "RuntimeError",
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
            "host-memory",
        ),
        ("MemoryError", "", "host-memory"),
        ("", "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor.", "rank-died"),
        ("", "the engine died: EngineCore was killed by SIGKILL", "killed-for-memory"),
        ("", "the engine died: EngineCore was killed by SIGSEGV", "crashed"),
        ("", "the engine died: EngineCore exited with 1", "worker-died"),
    ],
)
def test_what_a_process_tells_of_its_end_while_it_serves_is_known(kind: str, message: str, expected_id: str) -> None:
    found = diagnose(Ending("exited with code 1", (), (Fault(kind, message),)))
    assert found is not None
    assert found.id == expected_id
    assert not kind or message not in found.found or not message


def test_only_what_another_start_cannot_mend_is_not_tried_again() -> None:
    lasting = {entry.id for entry in ENTRIES if not entry.retried}
    assert {"damaged-shard", "parser-misfit", "unsupported-architecture", "not-finite", "wrong-engine-flag"} <= lasting
    for entry in ENTRIES:
        assert not entry.retried or entry.kind not in {"configuration", "model"}, entry.id
        assert entry.retried or entry.kind not in {"gpu", "communication", "timeout"}, entry.id


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
