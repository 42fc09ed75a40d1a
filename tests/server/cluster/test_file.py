from pathlib import Path

import pytest

from server.cluster.file import ClusterFile, read_cluster, replica_arguments, version_of
from server.errors import ConfigError

BOTH = """
schema: 1
models:
  - name: qwen
    flags: {model: /m/qwen, served-model-name: [qwen, big], max-model-len: 4096, max-in-flight: 7}
    replicas: 2
    gpus: 2
  - name: small
    flags: {model: /m/small}
    autoscaling: {max: 4, requests_per_replica: 16}
    resources: {rack-a: 0.5}
    env: {NCCL_DEBUG: INFO}
"""


def load(tmp_path: Path, text: str) -> ClusterFile:
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    return read_cluster(file)


def test_models_with_their_names_and_limits(tmp_path: Path) -> None:
    qwen, small = load(tmp_path, BOTH).models
    assert qwen.served == ("qwen", "big")
    assert small.served == ("/m/small",), "without a name clients use the path"
    assert (qwen.replicas, qwen.gpus, qwen.autoscaling) == (2, 2, None)
    assert small.autoscaling is not None
    assert (small.autoscaling.min, small.autoscaling.max) == (1, 4)
    assert qwen.application == "voltserve-qwen"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 2", "schema: Input should be 1"),
        ("replicas: 2", "replica: 2", "models.0.replica: Extra inputs"),
        ("replicas: 2", "replicas: 0", "models.0.replicas"),
        ("replicas: 2", "replicas: 2\n    autoscaling: {max: 2, requests_per_replica: 1}", "exclude each other"),
        ("{max: 4,", "{min: 5, max: 4,", "max is 4, below min, 5"),
        ("requests_per_replica: 16", "requests_per_replica: 0", "models.1.autoscaling.requests_per_replica"),
        ("name: small", "name: qwen", "two models of one name"),
        ("name: small", "name: Small One", "models.1.name"),
        ("model: /m/small", "served-model-name: [s]", "flags name no model"),
        ("{model: /m/small}", "{model: /m/small, served-model-name: [big]}", "both qwen and small are served as 'big'"),
        ("max-model-len", "max-modle-len", "did you mean max-model-len"),
        ("max-in-flight", "port", "port is the gateway's, for all models; give --port to deploy"),
        ("NCCL_DEBUG", "AWS_SECRET", "the engine gets no 'AWS_SECRET'"),
        ("schema: 1", "schema: 1\nports: [20001, 20000]", "the last, 20000, is below the first"),
        ("schema: 1", "schema: 1\nports: [80, 90]", "ports.0"),
        ("schema: 1", "[", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, BOTH.replace(old, new, 1))
    assert message in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        read_cluster(Path("nowhere.yaml"))


def test_replicas_are_restarted_for_what_they_are_started_from_and_not_for_their_number(tmp_path: Path) -> None:
    def version(text: str) -> str:
        file = load(tmp_path, text)
        return version_of(replica_arguments(file, file.models[0], "engine"))

    before = version(BOTH)
    for same in (("replicas: 2", "replicas: 3"), ("name: small", "name: other"), ("gpus: 2", "gpus: 2\n    surge: no")):
        assert version(BOTH.replace(*same)) == before
    for other in (("/m/qwen", "/m/qwen2"), ("4096", "2048"), ("gpus: 2", "gpus: 2\n    revision: again")):
        assert version(BOTH.replace(*other)) != before
