from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.rendezvous import rendezvous
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

from engine import patches
from engine.patches import IN_WORKERS, MANIFEST, OVER_RAY, SERVING, Patch, PatchMismatchError, is_loopback


def test_every_entry_fits_what_is_installed_and_says_why() -> None:
    patches.apply(over_ray=True, serving=True)
    patches.apply(over_ray=True, serving=True)  # a second call does nothing
    patches.apply(in_worker=True)
    for patch in (*MANIFEST, *IN_WORKERS, *OVER_RAY, *SERVING):
        assert patch.reason
        assert patch.drop_when


@pytest.fixture
def spare() -> Iterator[Patch]:
    """A patch of a function of this very module, which is put back afterwards."""
    patch = Patch(
        target=f"{__name__}:original",
        distribution="torch",
        version=MANIFEST[0].version,
        fingerprint="unknown",
        make=lambda old: lambda: "new " + old(),
        reason="the test wants it",
        drop_when="never",
    )
    before = globals()["original"]
    yield patch
    globals()["original"] = before


def original() -> str:
    return "old"


def fitting(patch: Patch) -> Patch:
    """The patch with the fingerprint that its refusal names."""
    with pytest.raises(PatchMismatchError) as mismatch:
        patch.apply()
    return dataclasses.replace(patch, fingerprint=str(mismatch.value).split(" got ")[1].split(".")[0])


def test_a_fitting_patch_is_applied_once(spare: Patch) -> None:
    patch = fitting(spare)
    patch.apply()
    patch.apply()
    assert original() == "new old"


@pytest.mark.parametrize(("field", "value"), [("version", "2.9.1"), ("fingerprint", "0" * 64)])
def test_a_mismatch_refuses_and_changes_nothing(spare: Patch, field: str, value: str) -> None:
    changes: dict[str, Any] = {field: value}
    patch = dataclasses.replace(fitting(spare), **changes)
    with pytest.raises(PatchMismatchError, match=rf"{__name__}:original of torch: expected {field} {value}, got "):
        patch.apply()
    assert original() == "old"


def test_sampling_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample.ops import topk_topp_sampler

    patches.apply()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda *_, **__: pytest.fail("compiled"))
    logits = torch.tensor([[0.0, 1000.0, 0.0], [1000.0, 0.0, 0.0]])
    tokens, _ = topk_topp_sampler.TopKTopPSampler().forward_cpu(logits, {}, None, None)
    assert tokens.tolist() == [1, 0]


def test_a_method_of_a_class_can_be_replaced(spare: Patch) -> None:
    patch = fitting(dataclasses.replace(spare, target=f"{__name__}:Owner.method", make=lambda old: lambda self: 2))
    patch.apply()
    assert Owner().method() == 2


class Owner:
    def method(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("answer", "names"),
    [(True, ["127.0.0.1", "127.8.0.1", "::1", "localhost"]), (False, ["192.0.2.2", "::", "0", "example.org"])],
)
def test_loopback_names(answer: bool, names: list[str]) -> None:
    assert [is_loopback(name) for name in names] == [answer] * len(names)


def free_port(family: socket.AddressFamily, host: str) -> int:
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("family", "host", "url"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")],
)
def test_a_rendezvous_at_loopback_listens_on_loopback_only(family: socket.AddressFamily, host: str, url: str) -> None:
    patches.apply()
    port = free_port(family, host)
    store, rank, size = next(rendezvous(f"tcp://{url}:{port}", 0, 1, timeout=timedelta(seconds=20)))
    store.set("key", "value")
    assert (store.get("key"), rank, size) == (b"value", 0, 1)
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in listening if address.port == port] == [host]


def test_other_ranks_and_addresses_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    create = MANIFEST[0].make(lambda *arguments: calls.append(arguments))
    for arguments in (("127.0.0.1", 1, 1, 2, None, True), ("192.0.2.2", 1, 0, 2, None, True)):
        create(*arguments)
    assert calls == [("127.0.0.1", 1, 1, 2, None, True), ("192.0.2.2", 1, 0, 2, None, True)]


def test_a_result_of_ray_s_is_the_engine_s_own() -> None:
    """Arrays that stay in the memory of Ray's channel keep the next result out of it."""
    output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
    output.logprobs = LogprobsLists(*(np.zeros((1, 2)) for _ in range(3)), None)
    replaced = OVER_RAY[0].make(type("Original", (), {"result": lambda self, timeout=None: output}))
    own = replaced().result()
    assert own.req_ids == ["a"]
    assert not np.shares_memory(own.logprobs.logprobs, output.logprobs.logprobs)


def test_a_router_s_bias_stored_beside_its_experts_is_loaded() -> None:
    experts = SimpleNamespace(e_score_correction_bias=torch.nn.Parameter(torch.zeros(3), requires_grad=False))
    seen: list[str] = []

    def of_experts(_experts: object, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        seen.extend(name for name, _ in weights)
        yield "w13_weight"

    load = patches._with_biases_of_routers(of_experts)
    weights = [("0.up_proj.weight", torch.zeros(1)), ("e_score_correction_bias", torch.tensor([1.0, 2.0, 3.0]))]
    assert list(load(experts, weights)) == ["w13_weight"]
    assert seen == ["0.up_proj.weight"]
    assert experts.e_score_correction_bias.tolist() == [1, 2, 3]
