"""Starts the engine, watches it, restarts it, stops it. `Supervisor` is the only writer of the engine's state."""

from server.supervisor.on_demand import OnDemandSupervisor
from server.supervisor.states import IllegalTransitionError, Progress, State, Status
from server.supervisor.supervisor import Supervisor

__all__ = ["IllegalTransitionError", "OnDemandSupervisor", "Progress", "State", "Status", "Supervisor"]
