"""The process that compiles grammars, forked for real off this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import resource
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams

from engine.requests import checker, grammar
from engine.requests.grammar import Grammars
from lookalikes.random_models import write_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated"),  # vLLM's use of xgrammar
]

SELF_REFERENCE = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TREE = {
    "$defs": {"n": {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
    "$ref": "#/$defs/n",
}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, eos_token="<eos>")
    model = SimpleNamespace(get_vocab_size=lambda: len(tokenizer), tokenizer=tokenizer, is_diffusion=False)
    return SimpleNamespace(
        model_config=model, structured_outputs_config=StructuredOutputsConfig(), speculative_config=None
    )


@contextlib.contextmanager
def started(config: Any) -> Iterator[Grammars]:
    """A process as it is patched by now; it is gone at the end."""
    before = set(psutil.Process().children())
    sock = checker.start(config)
    try:
        yield Grammars(sock)
    finally:
        sock.close()
        for child in set(psutil.Process().children(recursive=True)) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(set(psutil.Process().children()) - before, timeout=30)


@pytest.fixture
def grammars(config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Grammars]:
    monkeypatch.setattr(checker, "cached_tokenizer_from_config", lambda model_config: model_config.tokenizer)
    with started(config) as made:
        yield made


async def verdict(grammars: Grammars, **wanted: Any) -> str:
    try:
        await grammars.check(StructuredOutputsParams(**wanted))
    except VLLMValidationError as refusal:
        assert refusal.parameter == grammar.KINDS[next(iter(wanted))]
        return str(refusal)
    return ""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_grammars_that_can_be_followed_are_let_in_and_the_others_refused(grammars: Grammars) -> None:
    good: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}}}},
        {"json": TREE},
        {"json": '{"enum": ["a", "b"]}'},
        {"regex": "[0-9]{3}"},
        {"regex": "^(|.*)$"},
        {"choice": ["yes", "no"]},
        {"choice": [""]},
        {"grammar": 'root ::= "a" root | "b"'},
        {"grammar": 'root ::= root "a" | "b"'},
        {"grammar": 'start: "yes" | "no"'},
        {"json_object": True},
    ]
    bad: list[dict[str, Any]] = [
        {"json": SELF_REFERENCE},
        {"json": {"$ref": "#/nowhere"}},
        {"json": "{"},
        {"json": DEEP},
        {"json": "[" * 5000},
        {"regex": "("},
        {"regex": "(" * 20_000 + "a" + ")" * 20_000},
        {"regex": "a" * (grammar.MAX_BYTES + 1)},
        {"choice": []},
        {"grammar": "root ::= root"},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"structural_tag": '{"structures":[{"begin":"<a>","schema":{"type":5},"end":"</a>"}],"triggers":["<b"]}'},
    ]

    async def ask() -> None:
        assert [(one, await verdict(grammars, **one)) for one in good] == [(one, "") for one in good]
        assert [one for one in bad if not await verdict(grammars, **one)] == []
        assert await verdict(grammars, choice=["still", "works"]) == ""

    run(ask())


def test_a_crash_and_an_endless_run_are_verdicts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(wanted: dict[str, Any], *_: Any) -> Any:
        if wanted["regex"] == "crash":
            ctypes.string_at(0)
        elif wanted["regex"] == "spin":
            while True:
                pass
        elif wanted["regex"] == "sleep":
            time.sleep(3600)
        elif wanted["regex"] == "memory":
            bytearray(1 << 40)
        raise ValueError("as asked")

    monkeypatch.setattr(checker, "_compile", compile_it)
    monkeypatch.setattr(checker, "CPU_SECONDS", 1)
    monkeypatch.setattr(checker, "WALL_SECONDS", 8.0)
    monkeypatch.setattr(checker, "READY", ())
    monkeypatch.setattr(checker, "cached_tokenizer_from_config", lambda model_config: model_config.tokenizer)

    async def ask(hostile: Grammars) -> None:
        names = ["crash", "spin", "sleep", "memory", "error"]
        crash, spin, sleep, memory, error = await asyncio.gather(*(verdict(hostile, regex=name) for name in names))
        assert "the compiler crashed" in crash
        assert "more than 1 s" in spin
        assert "more than 1 s" in sleep
        assert "2 GiB" in memory
        assert "as asked" in error

    with started(config) as hostile:
        run(ask(hostile))


def test_a_verdict_is_remembered_and_asked_for_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    send = grammars._send

    async def counting(question: bytes) -> str:
        sent.append(question)
        return await send(question)

    monkeypatch.setattr(grammars, "_send", counting)

    async def ask() -> None:
        assert await asyncio.gather(*(verdict(grammars, regex="a+") for _ in range(5))) == [""] * 5
        assert await verdict(grammars, regex="a+") == ""
        refused = [await verdict(grammars, regex="(") for _ in range(2)]
        assert refused[0] == refused[1] != ""

    run(ask())
    assert len(sent) == 2


def test_without_the_process_unknown_grammars_are_refused_and_known_ones_are_not(grammars: Grammars) -> None:
    async def ask() -> None:
        assert await verdict(grammars, regex="a+") == ""
        for process in psutil.Process().children():
            process.kill()
        assert grammar.GONE in await verdict(grammars, regex="b+")
        assert await verdict(grammars, regex="a+") == ""

    run(ask())


def test_more_waiting_grammars_than_allowed_are_refused_at_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "WAITING", 3)

    async def ask() -> None:
        verdicts = await asyncio.gather(*(verdict(grammars, regex=f"a{index}") for index in range(5)))
        assert [("wait to be checked already" in one) for one in verdicts] == [False] * 3 + [True] * 2

    run(ask())


def test_a_child_has_bounds_and_the_memory_killer_takes_it_first(
    config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def compile_it(*_: Any) -> Any:
        score = Path("/proc/self/oom_score_adj").read_text().strip()
        (tmp_path / "bounds").write_text(
            f"{resource.getrlimit(resource.RLIMIT_CPU)[0]} {resource.getrlimit(resource.RLIMIT_CORE)[0]} {score}"
        )
        raise ValueError("done")

    monkeypatch.setattr(checker, "_compile", compile_it)
    monkeypatch.setattr(checker, "READY", ())
    monkeypatch.setattr(checker, "cached_tokenizer_from_config", lambda model_config: model_config.tokenizer)

    async def ask(grammars: Grammars) -> None:
        assert "done" in await verdict(grammars, regex="a")

    with started(config) as grammars:
        run(ask(grammars))
    assert (tmp_path / "bounds").read_text() == f"{checker.CPU_SECONDS} 0 1000"


def test_a_grammar_of_nothing_is_refused() -> None:
    with pytest.raises(VLLMValidationError, match="expected what to keep to") as refused:
        grammar.written(StructuredOutputsParams(json_object=False))
    assert refused.value.parameter == "structured_outputs"
