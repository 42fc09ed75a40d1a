"""The manifest for Kubernetes without Ray: what Kubernetes' schema allows, and what the image and the program are."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from server.config.devices import Device, Devices
from server.config.settings import Settings, load_config
from server.errors import ConfigError
from server.gateway.routes import OWN

ROOT = Path(__file__).parents[2]
DEFINITIONS = json.loads((Path(__file__).parent / "kubernetes.json").read_text())["definitions"]
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "configs/kubernetes/voltserve.yaml").read_text()))
DEPLOYMENT, CLAIM, SERVICE = DOCUMENTS
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PRESET = ("--preset", "v100x2-16g-pcie")
V100 = Device("Tesla V100-PCIE-16GB", "GPU-1", "7.0", 16, nvlink=False)
RAY: list[dict[str, Any]] = list(yaml.safe_load_all((ROOT / "configs/kuberay/rayservice.yaml").read_text()))


def problems(document: dict[str, Any]) -> list[str]:
    schema = {"$ref": f"#/definitions/{document['kind']}", "definitions": DEFINITIONS}
    return [error.message for error in Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_kubernetes_schema_allows_each_document(document: dict[str, Any]) -> None:
    assert problems(document) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pod: pod["containers"][0].update(arg=[]), "'arg' was unexpected"),
        (lambda pod: pod["containers"][0].update(args="--model /m"), "is not of type 'array'"),
        (lambda pod: pod["containers"][0].pop("name"), "'name' is a required property"),
        (lambda pod: pod["containers"][0]["livenessProbe"].update(http={}), "'http' was unexpected"),
        (lambda pod: pod["volumes"][1].update(emptyDir={"size": "1Gi"}), "'size' was unexpected"),
        (lambda pod: pod["securityContext"].update(runAsUser="10001"), "is not of type 'integer'"),
    ],
)
def test_the_schema_finds_what_kubernetes_would_refuse(change: Callable[[dict[str, Any]], None], message: str) -> None:
    wrong = copy.deepcopy(DEPLOYMENT)
    change(wrong["spec"]["template"]["spec"])
    assert message in " ".join(problems(wrong))


def test_its_arguments_and_variables_are_the_program_s() -> None:
    gpus = int(CONTAINER["resources"]["limits"]["nvidia.com/gpu"])
    devices = Devices((V100,) * gpus)
    environ = {one["name"]: one["value"] for one in CONTAINER["env"]}
    # Here vLLM is its build for CPUs, for which another preset would be chosen.
    config = load_config([*CONTAINER["args"], *PRESET], environ, lambda: devices)
    assert config.gpus_needed == gpus
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert any(config.model.startswith(f"{path}/") for path in mounts)
    for suggested in re.findall(
        r"name: (VOLTSERVE_\w+), value: ([\w/.]+)", (ROOT / "configs/kubernetes/voltserve.yaml").read_text()
    ):
        taken = load_config([*CONTAINER["args"], *PRESET], dict([suggested]), lambda: devices)
        assert getattr(taken, suggested[0].removeprefix("VOLTSERVE_").lower()) in (suggested[1], (suggested[1],))
    with pytest.raises(ConfigError):
        load_config([*CONTAINER["args"], "--nonesuch"], environ, lambda: devices)


def test_its_probes_ask_the_gateway_and_only_readiness_depends_on_the_engine() -> None:
    probes = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health/live",
        "liveness": "/health/live",
        "readiness": "/health/ready",
    }
    assert {probe["path"] for probe in probes.values()} <= {route.path for route in OWN}
    (port,) = CONTAINER["ports"]
    assert {probe["port"] for probe in probes.values()} == {port["name"]} == {SERVICE["spec"]["ports"][0]["targetPort"]}
    assert f"\nEXPOSE {port['containerPort']}\n" in DOCKERFILE


def test_it_has_compose_s_image_user_and_times() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert f"${{GPU_IMAGE:-{CONTAINER['image']}}}" == compose["services"]["gpu"]["image"]
    user = POD["securityContext"]["runAsUser"]
    assert set(re.findall(r"\nUSER (\d+)\n", DOCKERFILE)) == {str(user), "0"}
    assert POD["securityContext"]["runAsNonRoot"]
    of = {name: field.default for name, field in Settings.model_fields.items()}
    assert POD["terminationGracePeriodSeconds"] > of["drain_timeout"] + of["stop_timeout"]
    assert DEPLOYMENT["spec"]["progressDeadlineSeconds"] > of["start_timeout"]


def test_the_pod_can_do_no_more_than_serve() -> None:
    limits = CONTAINER["securityContext"]
    assert limits["readOnlyRootFilesystem"]
    assert not limits["allowPrivilegeEscalation"]
    assert limits["capabilities"] == {"drop": ["ALL"]}
    assert not POD["automountServiceAccountToken"]
    places = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    writable = {path for path, mount in places.items() if not mount.get("readOnly")}
    assert writable == {"/tmp", "/var/cache/voltserve", "/keys", "/dev/shm"}  # noqa: S108
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in places.values()} == volumes.keys()
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["keys"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]


def test_a_volume_s_files_stay_their_owner_s_alone() -> None:
    assert POD["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_service_finds_the_pod() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert labels.items() >= SERVICE["spec"]["selector"].items()
    assert labels.items() >= DEPLOYMENT["spec"]["selector"]["matchLabels"].items()


def test_variables_that_kubernetes_makes_of_services_reach_no_pod() -> None:
    """For a Service named voltserve there would be VOLTSERVE_PORT=tcp://…, a setting's name, in every pod."""
    cluster = next(document for document in RAY if document["kind"] == "RayService")["spec"]["rayClusterConfig"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    pods = [POD, *(group["template"]["spec"] for group in groups)]
    assert [pod.get("enableServiceLinks") for pod in pods] == [False] * len(pods)
    with pytest.raises(ConfigError, match="VOLTSERVE_SERVICE_HOST"):
        load_config(CONTAINER["args"], {"VOLTSERVE_SERVICE_HOST": "10.0.0.1"}, lambda: Devices((V100,)))
