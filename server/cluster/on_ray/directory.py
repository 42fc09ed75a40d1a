"""The deployment that knows where replicas are. Replicas announce themselves; each gateway's watcher reads it."""

import time
from typing import Any

KEPT_FOR = 10.0  # seconds after a replica's last announcement
FAILURE_KEPT_FOR = 600.0  # seconds


class Directory:
    """It may be restarted, perhaps on another machine. Replicas announce themselves again within
    `on_ray.replica.ANNOUNCED` seconds.
    """

    def __init__(self) -> None:
        self._config: dict[str, Any] = {"models": []}
        self._replicas: dict[str, tuple[float, dict[str, Any]]] = {}
        self._failures: dict[str, tuple[float, str]] = {}

    def reconfigure(self, config: dict[str, Any]) -> None:
        """Takes the models (`layout.directory_config`); called by Serve."""
        self._config = config

    def configured(self) -> dict[str, Any]:
        """The models."""
        return self._config

    def announce(self, record: dict[str, Any]) -> None:
        """Takes a replica's address (the fields of `cluster.replica.Address`)."""
        self._replicas[record["id"]] = time.monotonic(), record

    def withdraw(self, replica: str, model: str, failure: str) -> None:
        """Forgets a replica; `failure` says why it ended, where that was not asked for."""
        self._replicas.pop(replica, None)
        if failure:
            self._failures[model] = time.monotonic(), failure

    def look(self) -> dict[str, Any]:
        """Models, replicas, and why a model's last replica failed."""
        now = time.monotonic()
        self._replicas = {name: one for name, one in self._replicas.items() if now - one[0] < KEPT_FOR}
        self._failures = {name: one for name, one in self._failures.items() if now - one[0] < FAILURE_KEPT_FOR}
        return {
            "models": self._config["models"],
            "replicas": [record for _, record in self._replicas.values()],
            "failures": {name: reason for name, (_, reason) in self._failures.items()},
        }
