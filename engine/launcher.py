"""vLLM's OpenAI API server, assembled from vLLM's own parts.

It differs from `vllm serve` in three ways:

- It reports to the gateway what it is doing.
- `--load-format voltserve`, which reports weight loading, is the default.
- It forks the engine process. vLLM would start a new interpreter, which imports everything again.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.api_server import build_and_serve, setup_server
from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.utils.system_utils import decorate_logs
from vllm.v1.engine.exceptions import EngineDeadError

from engine import faults, gpus, patches, progress
from engine.layers import quantization
from engine.requests import checker, scheduling
from engine.requests.client import IsolatingLLM
from engine.requests.grammar import Grammars
from engine.steps import graph_check
from engine.weights.loader import LOAD_FORMAT

PULSE_INTERVAL = 1.0  # seconds
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
# vLLM asks libiomp for its distributed barrier. With it the process crashes when a thread ends that has run an OpenMP
# region (distributedBarrier::deallocate; seen with a thread pool at load).
CRASHING_BARRIERS = tuple(f"KMP_{kind}_BARRIER_PATTERN" for kind in ("FORKJOIN", "PLAIN", "REDUCTION"))


def run(arguments: list[str]) -> None:
    """Serves until SIGTERM, or until the engine dies. Exits with status 2 if the flags are wrong."""
    args = parse(arguments)
    try:
        patches.apply(forced=gpus.forced(os.environ), serving=True)
        uvloop.run(_serve(args))
    except KeyboardInterrupt:
        return
    except Exception as error:
        faults.report(error)
        raise


def parse(arguments: list[str]) -> Namespace:
    """Parses the flags of `vllm serve`, with our defaults. Exits with status 2 if they are wrong."""
    load_general_plugins()  # the quantization methods and load formats that flags may name
    parser = make_arg_parser(FlexibleArgumentParser(prog="python -m engine"))
    parser.set_defaults(load_format=LOAD_FORMAT)
    if current_platform.is_cuda():
        parser.set_defaults(worker_extension_cls=graph_check.EXTENSION)
    args: Namespace = parser.parse_args(arguments)
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.headless or (args.api_server_count or 1) > 1:
        parser.error("expected one API server in this process, got --headless or --api-server-count")
    if current_platform.is_cuda():
        extension = resolve_obj_by_qualname(args.worker_extension_cls)
        if not issubclass(extension, graph_check.GraphSwitch):
            parser.error(
                f"--worker-extension-cls: expected a subclass of {graph_check.EXTENSION}, which compares "
                f"CUDA graphs and recorded steps with the model's modules, got {args.worker_extension_cls}"
            )
    if (config := quantization.modelopt_config(Path(args.model))) and isinstance(args.hf_overrides, dict):
        args.hf_overrides = {"quantization_config": config} | args.hf_overrides
    validate_parsed_serve_args(args)
    return args


async def _serve(args: Namespace) -> None:
    decorate_logs("APIServer")
    address, sock = setup_server(args, reuse_port=False)
    os.register_at_fork(after_in_child=sock.close)
    # In place until the server is up. vLLM's handler raises KeyboardInterrupt, which its wait for the engine swallows.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    async with _engine(args) as engine:
        children = multiprocessing.active_children()
        watch = asyncio.create_task(_stop_when_dead(engine))
        pulse = asyncio.create_task(_pulse(engine))
        warm = asyncio.create_task(engine.grammars.warm())
        shutdown = await build_and_serve(engine, address, sock, args)
        watch.cancel()
        pulse.cancel()
        warm.cancel()
        exits = [(child.name, child.exitcode) for child in children]
        # Children that are stopped together with this process end with 0, before or after it.
        died = describe_exits(exits) if engine.errored and any(code for _, code in exits) else ""
    try:
        await shutdown
    finally:
        sock.close()
    if died:
        progress.fault("", f"the engine died: {died}")
        sys.exit(f"the engine died: {died}")


async def _stop_when_dead(engine: EngineClient) -> None:
    """Ends the server soon after the engine has died. vLLM itself checks every five seconds, and then exits with 0."""
    while not engine.errored:  # noqa: ASYNC110 - vLLM offers no event to wait for
        await asyncio.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


async def _pulse(engine: EngineClient) -> None:
    """Reports to the gateway each second that the engine process is not stuck.

    The engine process answers between two steps, however many requests wait. While a step hangs it does not answer.
    vLLM's own /health only checks that the process exists.
    """
    with contextlib.suppress(EngineDeadError):
        while True:
            await engine.is_sleeping()
            progress.pulse()
            await asyncio.sleep(PULSE_INTERVAL)


def describe_exits(children: Iterable[tuple[str, int | None]]) -> str:
    """How the engine's processes ended, for people.

    `children`: name and exit code of each. A signal is minus its number; None means that the process still runs.
    """
    ends = []
    for name, code in children:
        if code is not None and code < 0:
            ends.append(f"{name} was killed by {signal.Signals(-code).name}")
        else:
            ends.append(f"{name} still runs" if code is None else f"{name} exited with {code}")
    return "; ".join(ends)


@contextlib.asynccontextmanager
async def _engine(args: Namespace) -> AsyncIterator[IsolatingLLM]:
    """The client of an engine process that is up."""
    progress.phase("configuring")
    asked_for = os.environ.get(START_METHOD)
    inspect_here(args.model)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    # vLLM's CPU platform has just set `spawn`. Forking is safe here: no OpenMP region has run in this process yet.
    # If CUDA is initialized already, vLLM spawns all the same.
    os.environ[START_METHOD] = asked_for or "fork"
    for name in CRASHING_BARRIERS:
        os.environ.pop(name, None)
    reason = f"{START_METHOD} asks for it" if asked_for else "a spawned process would import everything again"
    progress.decision("engine start method", os.environ[START_METHOD], reason)
    scheduling.use(config)
    grammars = Grammars(checker.start(config))
    engine = IsolatingLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=args.enable_log_requests,
        aggregate_engine_logging=args.aggregate_engine_logging,
        disable_log_stats=args.disable_log_stats,
    )
    engine.grammars = grammars
    try:
        await engine.reset_mm_cache()  # frees memory that profiling left behind
        if current_platform.is_cuda():
            progress.settle(await graph_check.check(engine))
        yield engine
    finally:
        engine.shutdown()


def inspect_here(model: str) -> None:
    """Imports the class of the model in directory `model` and registers it with vLLM as already inspected.

    vLLM inspects a model class in a new interpreter, since importing the class may initialize CUDA. That takes about
    ten seconds when a machine first sees the architecture, and the forked engine process needs the class anyway. If
    the import does initialize CUDA, vLLM spawns the engine process, which is slower but just as correct. A model that
    is no local directory is left to vLLM.
    """
    config = Path(model) / "config.json"
    if not config.is_file():
        return
    for architecture in json.loads(config.read_bytes()).get("architectures") or ():
        known = ModelRegistry.models.pop(architecture, None)
        if known is not None:
            ModelRegistry.register_model(architecture, known.load_model_cls())
