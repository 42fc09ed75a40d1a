import asyncio

import pytest

from server.diagnosis import Ending, diagnose
from server.supervisor.output import KEPT_LINES, MAX_LINE, EngineOutput, level_of


async def collect(*chunks: bytes) -> tuple[EngineOutput, list[tuple[str, str]]]:
    seen: list[tuple[str, str]] = []
    output = EngineOutput(lambda level, line: seen.append((level, line)))
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    await output.pump(stream)
    return output, seen


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("(APIServer pid=12) INFO 11-29 21:39:27 [api.py:1] x", "info"),
        ("(EngineCore pid=12) (Worker_TP0 pid=3) WARNING 11-29 21:39:27 [api.py:1] x", "warning"),
        ("ERROR 11-29 21:39:27 [core.py:2] ERROR", "error"),
        ("INFO:     Started server process [1]", "info"),
        ("CRITICAL x", "critical"),
        ("a line about ERROR handling", "info"),
        ("INFORMATION", "info"),
    ],
)
def test_a_line_s_level_is_the_one_it_states(line: str, level: str) -> None:
    assert level_of(line) == level


async def test_lines_arrive_whole_whatever_the_chunks() -> None:
    text = "一行\nsecond line\rthird\r\nno end".encode()
    for size in (1, 2, 3, 7, 100):
        chunks = [text[start : start + size] for start in range(0, len(text), size)]
        _, seen = await collect(*chunks)
        assert [line for _, line in seen] == ["一行", "second line", "third", "no end"]


async def test_endless_lines_and_broken_utf8_do_no_harm() -> None:
    output, seen = await collect(b"\xff" * 10 + b"\n", *[b"x" * 5000] * 3)
    assert seen[0][1] == "\N{REPLACEMENT CHARACTER}" * 10
    assert all(len(line) <= MAX_LINE for line in output.lines)


async def test_only_the_last_lines_are_kept() -> None:
    output, _ = await collect("".join(f"line {index}\n" for index in range(200)).encode())
    assert len(output.lines) == KEPT_LINES
    assert output.lines[-1] == "line 199"


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        (
            "(APIServer pid=1) Traceback (most recent call last):\n"
            '(APIServer pid=1)   File "x.py", line 1\n'
            "(APIServer pid=1) ValueError: bad shard\n"
            "(APIServer pid=1) INFO 11-29 21:39:27 [a.py:1] shutting down\n",
            ["ValueError: bad shard"],
        ),
        (
            "(EngineCore pid=1) ERROR 11-29 21:39:27 [core.py:9] torch.OutOfMemoryError: CUDA out of memory\n"
            "RuntimeError: Engine core initialization failed\n"
            "RuntimeError: Engine core initialization failed\n",
            ["torch.OutOfMemoryError: CUDA out of memory", "RuntimeError: Engine core initialization failed"],
        ),
        (
            "!!!!!!! Segfault encountered !!!!!!!\n" + "frame\n" * 100 + "RuntimeError: See root cause above.\n",
            ["!!!!!!! Segfault encountered !!!!!!!", "RuntimeError: See root cause above."],
        ),
        (
            "(APIServer pid=1) the engine died: EngineCore was killed by SIGKILL\nlast\n",
            ["the engine died: EngineCore was killed by SIGKILL"],
        ),
        (
            "(EngineCore pid=1) ERROR 11-29 21:39:27 [m.py:9] Worker proc VllmWorker-1 died unexpectedly, …\n"
            + "frame\n" * 100
            + "RuntimeError: Executor failed.\n",
            ["Worker proc VllmWorker-1 died unexpectedly, …", "RuntimeError: Executor failed."],
        ),
        ("INFO x\nERROR 11-29 21:39:27 [a.py:1] it broke\nINFO y\n", ["ERROR 11-29 21:39:27 [a.py:1] it broke"]),
        ("one\ntwo\nthree\nfour\n", ["two", "three", "four"]),
        ("", []),
    ],
)
async def test_the_last_words_are_exceptions_then_errors_then_the_last_lines(text: str, errors: list[str]) -> None:
    output, _ = await collect(text.encode())
    assert output.errors() == errors


@pytest.mark.parametrize("level", ["DEBUG", "INFO", "WARNING"])
async def test_what_a_line_below_error_says_is_no_last_word(level: str) -> None:
    output, _ = await collect(
        f"{level} 11-29 21:39:27 [a.py:1] OSError: [Errno 24] Too many open files\nend\n".encode()
    )
    assert output.errors() == [f"{level} 11-29 21:39:27 [a.py:1] OSError: [Errno 24] Too many open files", "end"]
    assert not Ending.of("", [line for line in output.evidence if line != "end"]).lines


async def serve(*chunks: bytes) -> EngineOutput:
    """What an engine writes once it serves."""
    output = EngineOutput(lambda *_: None)
    output.serve()
    stream = asyncio.StreamReader()
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    await output.pump(stream)
    return output


WATCHDOG = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"
NATIVE = f"[rank1]:[E1129 20:31:44.102334 ProcessGroupNCCL.cpp:683] [Rank 1] {WATCHDOG}"
ASSERTION = (
    "/build/all_reduce.cuh:93: void report_late(const ReduceArgs &, int): block: [0,0,0], thread: [0,0,0] "
    "Assertion `all-reduce: rank 1 did not answer within the time limit` failed."
)


@pytest.mark.parametrize(("line", "entry"), [(NATIVE, "nccl-timeout"), (ASSERTION, "all-reduce-late")])
async def test_errors_of_native_code_count_while_it_serves(line: str, entry: str) -> None:
    output = await serve(f"{line}\n".encode())
    found = diagnose(Ending.of("was killed by SIGABRT", output.evidence, output.native))
    assert found is not None
    assert found.id == entry
    assert found.found == "native code (its message is in the log)"


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 MiB",
        f"(APIServer pid=1) {NATIVE}",
        f"(APIServer pid=1) x\r{NATIVE}",
        f"(APIServer pid=1) {'x' * 5000}{NATIVE}",
        "(EngineCore pid=1) ERROR 11-29 21:39:27 [dump_input.py:79] CUDA out of memory. Tried to allocate",
        "the engine died: EngineCore was killed by SIGKILL",
    ],
)
@pytest.mark.parametrize("size", [7, 4096, 100_000])
async def test_no_other_line_counts_while_it_serves(line: str, size: int) -> None:
    text = f"{line}\n".encode()
    output = await serve(*(text[start : start + size] for start in range(0, len(text), size)))
    assert (output.evidence, output.native) == ([], ())


async def test_requests_tracebacks_are_no_last_words() -> None:
    output = await serve(
        b"(APIServer pid=1) ValueError: logit_bias: a client's words\n"
        b"(EngineCore pid=2) ERROR 11-29 21:39:27 [core.py:1110] RuntimeError: step failed\n"
    )
    assert output.errors() == ["RuntimeError: step failed"]
