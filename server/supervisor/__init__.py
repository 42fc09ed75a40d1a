"""Starts the engine, watches it, restarts it, stops it. `Supervisor` is the only writer of the engine's state."""

from server.supervisor.states import IllegalTransitionError, Progress, State, Status
from server.supervisor.supervisor import Supervisor

__all__ = ["IllegalTransitionError", "Progress", "State", "Status", "Supervisor"]
