"""A process that compiles unknown grammars, each in a child where a crash or an endless loop harms no other request.

The API server forks it before the engine. It builds the backends when the first grammar arrives, so later children
start in milliseconds. A child has limits of processor time and memory. It asks vLLM which backend takes the grammar,
compiles it as the engine will, and rehearses some tokens. Then it sends its answer. If it died, the process answers in
its place.

A message is one datagram: the question's number, a newline, JSON.
"""

import faulthandler
import gc
import json
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.structured_output.request import get_structured_output_key

from engine.requests import backends

CPU_SECONDS = 5  # a large schema of tools takes 0.3 s
WALL_SECONDS = 60.0  # where the machine is busy
MEMORY = 2 << 30  # bytes beyond the process's own
NICE = 5  # the engine goes first
STACK = 2 << 20  # bytes, a quarter of an engine thread's
REHEARSED = 24  # tokens
READY = ("xgrammar", "guidance")  # backends that are built once; the others are rarely needed
ANSWER = 2**16  # bytes, more than any answer has
POLL_S = 0.02


@dataclass(frozen=True)
class Verdict:
    """Why a grammar is refused; empty if it is accepted."""

    refused: str


def start(config: VllmConfig) -> socket.socket:
    """Forks the process. Returns a non-blocking socket to it. The process ends when the socket is closed.

    `engine.process` ties the process to this one. Neither has threads here that a fork would lose.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        code = 1
        try:
            ours.close()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            faulthandler.disable()  # a child's crash is an answer and needs no dump
            os.nice(NICE)
            _Server(config, theirs).run()
            code = 0
        finally:
            os._exit(code)
    theirs.close()
    ours.setblocking(False)
    return ours


class _Server:
    """The process: forks a child for each question, and ends those that take too long."""

    def __init__(self, config: VllmConfig, sock: socket.socket) -> None:
        self._config = config
        self._sock = sock
        self._tokenizer: Any = None
        self._made: dict[str, Any] = {}
        self._children: dict[int, tuple[str, float]] = {}  # by process id: its question's number and its deadline

    def run(self) -> None:
        while True:
            self._sock.settimeout(POLL_S if self._children else None)
            try:
                message = self._sock.recv(2**21)
            except TimeoutError:
                message = None
            if message == b"":
                return
            if message:
                number, _, question = message.decode().partition("\n")
                self._build()
                self._fork(number, question)
            self._look_after()

    def _build(self) -> None:
        if self._tokenizer is None:
            self._tokenizer = cached_tokenizer_from_config(model_config=self._config.model_config)
            for name in READY:
                try:
                    self._made[name] = backends.make(name, self._config, self._tokenizer)
                except Exception as error:  # some backends do not support every tokenizer; the child reports it
                    print(f"grammars: no {name} for this tokenizer: {error}", file=sys.stderr)
            gc.freeze()

    def _fork(self, number: str, question: str) -> None:
        child = os.fork()
        if child:
            self._children[child] = (number, time.monotonic() + WALL_SECONDS)
            return
        code = 1
        try:
            self._bound()
            answer = judge(json.loads(question), self._config, self._tokenizer, self._made)
            self._answer(number, answer)
            code = 0
        finally:
            os._exit(code)

    def _bound(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        have = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (have + MEMORY, have + MEMORY))
        Path("/proc/self/oom_score_adj").write_text("1000")

    def _look_after(self) -> None:
        for child, (number, end) in list(self._children.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                done, status = os.waitpid(child, 0)
            if done:
                del self._children[child]
                if status:
                    self._answer(number, Verdict(how_it_ended(os.waitstatus_to_exitcode(status))))

    def _answer(self, number: str, verdict: Verdict) -> None:
        self._sock.setblocking(True)
        self._sock.send(f"{number}\n{json.dumps(verdict.refused[:500])}".encode())


def how_it_ended(code: int) -> str:
    """Why a grammar is refused whose child ended with `code` (minus the signal)."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {CPU_SECONDS} s or {MEMORY >> 30} GiB to compile"
    return "it cannot be compiled: the compiler crashed"


def judge(wanted: dict[str, Any], config: VllmConfig, tokenizer: Any, made: dict[str, Any]) -> Verdict:
    """Compiles and rehearses a grammar, in a thread with a small stack.

    Args:
        wanted: the fields of StructuredOutputsParams.
        config: the engine's.
        tokenizer: the model's.
        made: backends by name; missing ones are built.
    """
    refused = [""]

    def run() -> None:
        try:
            grammar, backend = _compile(wanted, config, tokenizer, made)
            _rehearse(grammar, backend)
        except MemoryError:
            refused[0] = f"it takes more than {MEMORY >> 30} GiB to compile"
        except BaseException as error:  # llguidance's panics are not Exceptions
            refused[0] = str(error) or type(error).__name__

    before = threading.stack_size(STACK)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    threading.stack_size(before)
    return Verdict(refused[0])


def _compile(wanted: dict[str, Any], config: VllmConfig, tokenizer: Any, made: dict[str, Any]) -> tuple[Any, Any]:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**wanted))
    params._validate_structured_outputs(config.model_config, config.structured_outputs_config, tokenizer)
    name = params.structured_outputs._backend
    backend = made.get(name) or backends.make(name, config, tokenizer)
    grammar = backend.compile_grammar(*get_structured_output_key(params.structured_outputs))
    backends.check(grammar)
    return grammar, backend


def _rehearse(grammar: Any, backend: Any) -> None:
    """Advances `grammar` by some allowed tokens. Raises ValueError if it allows no first token."""
    mask = backend.allocate_token_bitmask(1)
    numbers = random.Random(0)  # noqa: S311 - the same tokens each time
    for step in range(REHEARSED):
        grammar.fill_bitmask(mask, 0)
        backends.check(grammar)
        allowed = [index for index, word in enumerate(mask[0].tolist()) if word]
        if not allowed:
            if step == 0:
                raise ValueError("it allows no token")
            return
        word = numbers.choice(allowed)
        bits = [bit for bit in range(32) if mask[0, word].item() >> bit & 1]
        accepted = grammar.accept_tokens("rehearsal", [32 * word + numbers.choice(bits)])
        backends.check(grammar)
        if not accepted or backends.over(grammar):
            return
