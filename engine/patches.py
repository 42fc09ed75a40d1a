"""The patch manifest: code of torch and vLLM that we replace because no extension point reaches it.

Each entry says what it replaces, why, and when to drop it. It holds the checksum of the code that it was written for.
With other code the engine refuses to start.
"""

import copy
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import ipaddress
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from engine import progress


class PatchMismatchError(RuntimeError):
    """The code that a patch replaces differs from the code that it was written for."""


@dataclass(frozen=True)
class Patch:
    """One replacement. `make` takes the original and returns its replacement."""

    target: str  # module:attribute, or module:class.attribute
    distribution: str
    version: str
    fingerprint: str  # sha256 of the original's source text
    make: Callable[[Any], Any]
    reason: str
    drop_when: str

    def apply(self) -> None:
        """Installs the replacement. A second call does nothing.

        Raises:
            PatchMismatchError: another version is installed, or the original's source differs.
        """
        module_name, _, path = self.target.partition(":")
        *owners, attribute = path.split(".")
        owner = functools.reduce(getattr, owners, importlib.import_module(module_name))
        original = getattr(owner, attribute)
        if getattr(original, "voltserve_patch", None) == self.target:
            return
        found = {
            "version": importlib.metadata.version(self.distribution).partition("+")[0],
            "fingerprint": hashlib.sha256(inspect.getsource(original).encode()).hexdigest(),
        }
        for what, got in found.items():
            if got != getattr(self, what):
                raise PatchMismatchError(
                    f"{self.target} of {self.distribution}: expected {what} {getattr(self, what)}, got {got}. It is "
                    f"patched because {self.reason}. Install the locked requirements, or review the patch in "
                    "engine/patches.py against the new code"
                )
        replacement = self.make(original)
        replacement.voltserve_patch = self.target
        setattr(owner, attribute, replacement)


def apply(*, forced: bool = False, over_ray: bool = False, serving: bool = False, in_worker: bool = False) -> None:
    """Applies the manifest. Raises PatchMismatchError before the engine does anything else.

    Args:
        forced: VOLTSERVE_FORCE_VOLTA is set, for trials on other GPUs with other releases. A patch that does not match
            is left out and reported.
        over_ray: Ray starts the workers. Its patches are left out elsewhere, since checking them imports Ray.
        serving: clients' requests arrive in this process.
        in_worker: a worker has imported its model runner. Only the patches for that are applied.
    """
    chosen = IN_WORKERS if in_worker else (*MANIFEST, *(OVER_RAY if over_ray else ()), *(SERVING if serving else ()))
    for patch in chosen:
        try:
            patch.apply()
        except PatchMismatchError as mismatch:
            if not forced:
                raise
            progress.decision(f"patch of {patch.target}", "left out", str(mismatch))


def _store_on_its_own_address(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True) -> Any:
        if rank != 0 or not is_loopback(hostname):
            return original(hostname, port, rank, world_size, timeout, use_libuv)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported without __all__

        family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
        listener = socket.create_server((hostname, port), family=family)
        return TCPStore(
            host_name=hostname,
            port=port,
            world_size=world_size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            use_libuv=use_libuv,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    return create


def _with_biases_of_routers(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(experts: Any, weights: Iterable[tuple[str, Any]]) -> Iterator[str]:
        def of_experts() -> Iterator[tuple[str, Any]]:
            for name, weight in weights:
                if name == "e_score_correction_bias" and experts.e_score_correction_bias is not None:
                    experts.e_score_correction_bias.data.copy_(weight)
                else:
                    yield name, weight

        yield from original(experts, of_experts())

    return load_weights


def _without_gates_on_cpus(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(config: Any) -> None:
        from vllm.platforms import current_platform

        try:
            original(config)
        except NotImplementedError:  # its last check
            if not current_platform.is_cpu():
                raise

    return check


def _seeded_among_few(original: Callable[..., Any]) -> Callable[..., Any]:
    from engine.cpu import sampling as cpu_sampling

    return cpu_sampling.seeded_among_few(original)


def _by_candidates(original: Callable[..., Any]) -> Callable[..., Any]:
    from engine.cpu import sampling as cpu_sampling

    return cpu_sampling.by_candidates(original)


def _marking_rows(original: Any) -> Any:
    from engine.requests import rows

    return rows.marking(original)


def _feeding_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    from engine.requests import rows

    return rows.feeding_tokens(original)


def _results_of_its_own(original: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    class FutureWrapper(original):  # type: ignore[misc]
        def result(self, timeout: float | None = None) -> Any:
            result = super().result(timeout)
            return copy.deepcopy(result) if isinstance(result, ModelRunnerOutput) else result

    return FutureWrapper


def _with_our_routes(original: Callable[..., Any]) -> Callable[..., Any]:
    from engine.requests import install

    return install.into(original)


def _with_true_reasons(original: Any) -> Any:
    from engine.requests import chat

    return chat.with_true_reasons(original)


def _after_whole_characters(original: Any) -> Any:
    from engine.requests import prompt_ends

    return prompt_ends.after_whole_characters(original)


def _without_amx_kernels(_original: Callable[..., Any]) -> Callable[..., Any]:
    def supported() -> bool:
        return False

    return supported


def _expanded(original: Callable[..., Any]) -> Callable[..., Any]:
    def expand(x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        if x.device.type != "cpu":
            return original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        expanded = x.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)))
        return expanded.masked_fill(expanded == replace_from, replace_to)

    return expand


def is_loopback(hostname: str) -> bool:
    """Whether `hostname` is a loopback address or `localhost`."""
    try:
        return ipaddress.ip_address(hostname).is_loopback
    except ValueError:
        return hostname == "localhost"


MANIFEST = (
    Patch(
        target="torch.distributed.rendezvous:_create_c10d_store",
        distribution="torch",
        version="2.10.0",
        fingerprint="5e4ae7b3a73720833b69a0c76e59d3634b82f2ddf27fce16c355a4aeb12c52f3",
        make=_store_on_its_own_address,
        reason="its store listens on every interface even if the rendezvous address is a loopback one",
        drop_when="torch binds the store of a tcp:// rendezvous to the given host name",
    ),
    Patch(
        target="torch.cpu:_is_amx_tile_supported",
        distribution="torch",
        version="2.10.0",
        fingerprint="116c255fa77e3a783ab06ae3d47355fe4f38b07db6bc6e5f689769131a5ee7cc",
        make=_without_amx_kernels,
        reason="vLLM asks it whether to multiply small 16-bit matrices by its own AMX kernels, which are not installed",
        drop_when="vLLM asks whether its AMX kernels are there",
    ),
    Patch(
        target="vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler.forward_cpu",
        distribution="vllm",
        version="0.28.0",
        fingerprint="4757f56b45dcfa11f824076847d380ca3156f36eee094570902d776db00fcf45",
        make=_seeded_among_few,
        reason="it ignores a request's seed if another request of the step has none; it compiles its draw for seconds "
        "at the first sampled request, or fails without a compiler; and it draws a random number per token",
        drop_when="vLLM's CPU sampler keeps seeds in a mixed batch, compiles nothing, and draws among kept tokens only",
    ),
    Patch(
        target="vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch",
        distribution="vllm",
        version="0.28.0",
        fingerprint="d6bcc4924866e6b9b049a7a908d77a07d396fa38d1bdb5334fc98ac55067365e",
        make=_by_candidates,
        reason="it sorts the vocabulary per token, which costs a small model on a CPU half a step",
        drop_when="vLLM's CPU sampler applies top-p without sorting",
    ),
    Patch(
        target="vllm.v1.sample.sampler:Sampler",
        distribution="vllm",
        version="0.28.0",
        fingerprint="0f1d57192c33e6d3888c7d78883181bf37886abc92803afc1f36a51b5e4b6960",
        make=_marking_rows,
        reason="for a row without a possible token (NaN, or all masked) it returns any, or one that ends the engine",
        drop_when="vLLM fails a request that has no possible token",
    ),
)

# Applied when a worker loads its model, since importing the originals initializes CUDA.
IN_WORKERS = (
    Patch(
        target="vllm.v1.sample.rejection_sampler:expand_batch_to_tokens",
        distribution="vllm",
        version="0.28.0",
        fingerprint="66705fcbad69285d9d91eda5272cea54e4aabf0f58e2db24e5eba1282bf03848",
        make=_expanded,
        reason="on CPUs it returns memory that nobody has written, so drafts are judged at random temperatures: its "
        "kernel writes to a copy of the result in int64",
        drop_when="vLLM's _expand_kernel_impl writes its result back",
    ),
    Patch(
        target="vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.load_weights",
        distribution="vllm",
        version="0.28.0",
        fingerprint="a29076794f527508c4c3b4d87baf5c46f0022d08fca94588dcff0035d3ec56cb",
        make=_with_biases_of_routers,
        reason="it drops the bias by which a router chooses, where a checkpoint stores it beside its experts (Laguna): "
        "tokens then go to other experts, and nothing is said",
        drop_when="vLLM loads mlp.experts.e_score_correction_bias",
    ),
    Patch(
        target="vllm.model_executor.layers.fused_moe.config:FusedMoEConfig.__post_init__",
        distribution="vllm",
        version="0.28.0",
        fingerprint="e09872a10859727b1c473c808b638fdd93962f0e1473fb19b902e8a52a4ec0bb",
        make=_without_gates_on_cpus,
        reason="it refuses experts without a gate (Nemotron-H) on CPUs, where engine/layers/experts.py computes them",
        drop_when="vLLM accepts is_act_and_mul=False on CPUs",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_input_ids",
        distribution="vllm",
        version="0.28.0",
        fingerprint="f95ee3c26112f945067bc31ea0207a9ef8722ed93530746666575054e222ecb9",
        make=_feeding_tokens,
        reason="if steps overlap, it feeds the mark of a row without a token to the embedding, which ends the engine",
        drop_when="vLLM fails a request that has no possible token",
    ),
)

# Only in the process where clients' requests arrive.
SERVING = (
    Patch(
        target="vllm.entrypoints.openai.api_server:build_app",
        distribution="vllm",
        version="0.28.0",
        fingerprint="d295bb8825221fd0214eb7af5cabbbd39051649a06781b3ab9e69902fe757260",
        make=_with_our_routes,
        reason="its routes answer 500 to some invalid requests, and put errors into streams that have begun",
        drop_when="vLLM accepts an application in build_and_serve",
    ),
    Patch(
        target="vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat",
        distribution="vllm",
        version="0.28.0",
        fingerprint="bc6e167e4b0abe5665e06545e5f54c9b2d7e9a62e68ce10db3d54cc577f897f0",
        make=_with_true_reasons,
        reason="a streamed call that max_tokens cuts off ends with the reason tool_calls",
        drop_when="vLLM reports length for a call that max_tokens cuts off, streamed or not",
    ),
    Patch(
        target="vllm.v1.engine.detokenizer:FastIncrementalDetokenizer",
        distribution="vllm",
        version="0.28.0",
        fingerprint="789828f59fe4d0590bef927f7cc0211c7d24508f3d5ae2caded237183a76a2ef",
        make=_after_whole_characters,
        reason="after a prompt that ends inside a character it also returns the prompt's text",
        drop_when="tokenizers' DecodeStream accepts a prompt that ends inside a character",
    ),
)

OVER_RAY = (
    Patch(
        target="vllm.v1.executor.ray_utils:FutureWrapper",
        distribution="vllm",
        version="0.28.0",
        fingerprint="b147e6bd15c1295f2684171bf99b62d7936902fc2e8a86aaf6127d690166e077",
        make=_results_of_its_own,
        reason="its results hold arrays (log probabilities) in the memory that Ray's next result needs, and the engine "
        "keeps them until that result arrives: a request for log probabilities would stop the engine for ever",
        drop_when="vLLM copies the parts of a compiled graph's result that it keeps",
    ),
)
