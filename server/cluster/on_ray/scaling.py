"""How many replicas a model should have, asked by Serve's controller. Delays and limits are Serve's."""

from typing import Any

LOAD = "load"  # the name of the figure that replicas report: requests that gateways have for them


def by_load(context: Any) -> tuple[float, dict[str, Any]]:
    """As many replicas as all requests fill; as many as there are while none has reported.

    Args:
        context: Serve's AutoscalingContext.
    """
    loads = (context.aggregated_metrics or {}).get(LOAD, {})
    if not loads:
        return float(context.target_num_replicas), {}
    return sum(loads.values()) / context.config.get_target_ongoing_requests(), {}
