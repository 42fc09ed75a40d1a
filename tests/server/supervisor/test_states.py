import itertools

import pytest

from server.supervisor.states import TRANSITIONS, IllegalTransitionError, Progress, State, check_transition

# The table of docs/architecture.md, written out a second time.
ALLOWED = {
    ("starting", "loading"),
    ("starting", "failed"),
    ("loading", "warming"),
    ("loading", "failed"),
    ("warming", "ready"),
    ("warming", "failed"),
    ("ready", "degraded"),
    ("ready", "failed"),
    ("degraded", "ready"),
    ("degraded", "failed"),
    ("failed", "starting"),
    ("stopped", "starting"),
    ("draining", "stopped"),
    *((state.value, "draining") for state in State if state is not State.DRAINING),
}


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_only_the_documented_transitions_are_legal(old: State, new: State) -> None:
    if (old.value, new.value) in ALLOWED:
        check_transition(old, new)
    else:
        with pytest.raises(IllegalTransitionError, match=f"{old.value} -> {new.value}"):
            check_transition(old, new)


def test_every_state_is_in_the_table() -> None:
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize(
    ("progress", "fraction"),
    [
        (Progress("importing"), None),
        (Progress("weights", 0, 0, "bytes"), None),
        (Progress("weights", 1, 4, "bytes"), 0.25),
    ],
)
def test_the_fraction_is_known_only_with_a_total(progress: Progress, fraction: float | None) -> None:
    assert progress.fraction == fraction
