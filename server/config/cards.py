"""Which of the machine's GPUs a preset uses, and how large the smallest of them is."""

from server.config.devices import Devices, cards_for
from server.config.presets import Match, Preset
from server.decisions import Decision


def choose_cards(found: Devices, match: Match, needed: int, *, forced: bool) -> tuple[Devices, tuple[Decision, ...]]:
    """The cards that suit a preset, those that it uses first. A decision gives the reason where cards stay idle.

    Args:
        found: the machine's GPUs.
        match: what the preset is for.
        needed: how many GPUs the engine uses.
        forced: whether cards of other kinds are treated as V100s.
    """
    suited = cards_for(found.gpus, match.capability, match.memory_gib, match.nvlink)
    if forced:
        suited += [device for device in found.gpus if device not in suited]
    enough = [device for device in suited if device.memory_gib == match.memory_gib]
    if len(enough) >= needed or not suited:
        suited = enough or suited
    used = suited[:needed]
    idle = [device for device in found.gpus if device not in used]
    if not idle or len(used) < needed:
        return Devices(tuple(suited), found.reason), ()
    others = ", ".join(f"GPU {device.index} {device}" for device in idle)
    choice = ", ".join(f"GPU {device.index} {device.name}" for device in used)
    kind = f"capability {match.capability} and {match.memory_gib} GiB"
    reason = f"{needed} of {len(found.gpus)}, the first of {kind}; idle: {others}"
    return Devices(tuple(suited), found.reason), (Decision("cards", choice, reason),)


def smallest_card(devices: Devices, preset: Preset, gpus_needed: int) -> float | None:
    """Nominal GiB of the smallest card used, the preset's where the machine has none; None on a preset without GPUs."""
    if preset.match is None:
        return None
    used = [gpu.memory_gib for gpu in devices.gpus[: max(1, gpus_needed)]]
    return min(used) if used else preset.match.memory_gib
