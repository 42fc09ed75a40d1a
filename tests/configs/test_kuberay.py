"""The manifest for KubeRay: what KubeRay's schema allows, and what `voltserve cluster render` prints."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from server.cluster.file import read_cluster
from server.cluster.layout import serve_config

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parent / "kuberay_rayservice.json").read_text())
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "configs/kuberay/rayservice.yaml").read_text()))
SERVICE = next(document for document in DOCUMENTS if document["kind"] == "RayService")
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
CONTAINERS = {
    container["name"]: container
    for group in (CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"])
    for container in group["template"]["spec"]["containers"]
}


def problems(service: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft7Validator(SCHEMA).iter_errors(service)]


def test_kuberay_s_schema_allows_the_manifest() -> None:
    assert problems(SERVICE) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda spec: spec.update(serveConfigV3=""), "serveConfigV3"),
        (lambda spec: spec["rayClusterConfig"].pop("headGroupSpec"), "headGroupSpec"),
        (lambda spec: spec["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="2"), "'2' is not of type"),
    ],
)
def test_the_schema_finds_what_kuberay_would_refuse(change: Callable[[dict[str, Any]], None], message: str) -> None:
    service = copy.deepcopy(SERVICE)
    change(service["spec"])
    assert message in problems(service)[0]


def test_the_applications_are_those_rendered_from_the_file_beside_them(tmp_path: Path) -> None:
    given = next(document for document in DOCUMENTS if document["kind"] == "ConfigMap")["data"]["cluster.yaml"]
    assert yaml.safe_load(given) == yaml.safe_load((ROOT / "configs/compose/cluster.yaml").read_text())
    path = tmp_path / "cluster.yaml"
    path.write_text(given)
    assert yaml.safe_load(SERVICE["spec"]["serveConfigV2"]) == serve_config(read_cluster(path))


def test_ray_is_the_one_that_is_locked_and_every_container_has_its_image() -> None:
    assert f"ray=={CLUSTER['rayVersion']} " in (ROOT / "requirements/ray.lock").read_text()
    compose = yaml.safe_load((ROOT / "docker-compose.ray.yml").read_text())
    image = compose["services"]["head"]["image"]
    assert {f"${{GPU_RAY_IMAGE:-{container['image']}}}" for container in CONTAINERS.values()} == {image}


def test_the_gateway_shares_the_head_s_sockets_and_is_what_the_service_finds() -> None:
    mounts = [{mount["mountPath"] for mount in CONTAINERS[name]["volumeMounts"]} for name in ("ray-head", "gateway")]
    assert "/tmp/ray" in mounts[0] & mounts[1]  # noqa: S108
    service = next(document for document in DOCUMENTS if document["kind"] == "Service")
    assert CLUSTER["headGroupSpec"]["template"]["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in CONTAINERS["gateway"]["ports"]}


def test_a_replica_s_gpus_are_what_a_worker_has() -> None:
    model = read_cluster(ROOT / "configs/compose/cluster.yaml").models[0]
    group = CLUSTER["workerGroupSpecs"][0]
    gpus = int(CONTAINERS["ray-worker"]["resources"]["limits"]["nvidia.com/gpu"])
    assert (model.gpus, model.replicas) == (gpus, group["replicas"])
