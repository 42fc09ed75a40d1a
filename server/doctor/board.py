"""Checks of the cards' place in the machine: addresses, slots, NUMA nodes. Pure functions of the readings."""

from collections.abc import Iterator, Sequence

from server.doctor.findings import Finding, Level
from server.doctor.host import Host
from server.doctor.nvml import Gpu, Reading
from server.doctor.pci import LOST, NO_ADDRESSES, Card
from server.units import GIB

ABOVE_4G = 'Turn on "Above 4G Decoding" (or "Large BAR", "64-bit MMIO") in the BIOS, and boot by UEFI, without CSM'


def check_board(
    reading: Reading, cards: Sequence[Card], kernel_log: Sequence[str] | None, host: Host
) -> Iterator[Finding]:
    """Everything, in order. A container sees all cards on the bus, but may have been given a few."""
    yield from _addresses(cards, kernel_log or ())
    yield from _lost(kernel_log or ())
    if not host.container:
        yield from _unseen(reading, cards)
    by_address = {card.address: card for card in cards}
    known = [(gpu, by_address.get(sysfs_address(gpu.pci))) for gpu in reading.gpus]
    for gpu, card in known:
        for finding in (_bar(gpu), _width(gpu, card), _generation(gpu, card)):
            if finding is not None:
                yield finding
    yield from _nodes([(gpu, card) for gpu, card in known if card is not None and card.node is not None], host)


def sysfs_address(pci: str) -> str:
    """NVML's 00000000:1a:00.0 as the kernel has it, 0000:1a:00.0."""
    domain, _, rest = pci.partition(":")
    return f"{domain[-4:]}:{rest}".lower()


def _addresses(cards: Sequence[Card], kernel_log: Sequence[str]) -> Iterator[Finding]:
    for card in cards:
        if card.no_addresses:
            got = "a memory region without a place, so no driver can use the card"
            yield Finding(
                "error", "bar", f"card {card.address}", "all its memory among the PCI addresses", got, ABOVE_4G
            )
    complaint = next((line for line in kernel_log if NO_ADDRESSES.search(line)), "")
    if complaint and not any(card.no_addresses for card in cards):
        expected = "no complaint about PCI addresses"
        yield Finding("warning", "bar", "kernel log", expected, complaint.strip(), f"If a card is missing: {ABOVE_4G}")


def _lost(kernel_log: Sequence[str]) -> Iterator[Finding]:
    lines = [line for line in kernel_log if LOST.search(line)]
    if lines:
        remedy = "Reboot; if it comes again, check power cables, riser and slot, then cooling, then the card"
        yield Finding("error", "lost", "kernel log", "no card lost since boot", lines[-1].strip(), remedy)


def _unseen(reading: Reading, cards: Sequence[Card]) -> Iterator[Finding]:
    ours = [card for card in cards if card.driver in {"", "nvidia", "nouveau"}]  # others are lent to virtual machines
    seen = {sysfs_address(gpu.pci) for gpu in reading.gpus}
    missing = [card.address for card in ours if card.address not in seen]
    if not missing or (reading.problem and not reading.absent):  # check_gpus reports a driver that does not answer
        return
    got = f"{', '.join(missing)} on the bus, but not in the driver"
    remedy = "`sudo dmesg | grep -iE 'nvrm|nouveau'` says why; nouveau must not be loaded"
    level: Level = "error"
    if reading.absent:  # a machine may do without it, whichever card shows its screen
        level, remedy = "warning", "Install driver 535, 550, 570 or 580, and reboot, if they are to serve"
    yield Finding(level, "gpus", "GPUs", f"the {len(ours)} cards on the PCI bus", got, remedy)


def _bar(gpu: Gpu) -> Finding | None:
    """A V100 maps all of its memory; a BIOS without 64-bit addresses leaves it a window of 256 MiB."""
    if gpu.bar1 is None:
        return None
    what, expected, got = f"GPU {gpu.index} BAR1", f"its {gpu.memory_total / GIB:.0f} GiB", f"{gpu.bar1 / GIB:.2f} GiB"
    if gpu.bar1 >= gpu.memory_total * 0.9:
        return Finding("ok", "bar", what, expected, got)
    remedy = f"{ABOVE_4G}: other cards reach only that much of its memory"
    return Finding("warning", "bar", what, expected, got, remedy)


def _width(gpu: Gpu, card: Card | None) -> Finding | None:
    if gpu.pcie_width is None:
        return None
    width, with_slot = gpu.pcie_width
    most = max(with_slot, card.width or 0) if card is not None else with_slot
    what, expected, got = f"GPU {gpu.index} link", f"x{most}", f"x{width}"
    if width >= most:
        return Finding("ok", "pcie", what, expected, got)
    if width < with_slot:
        remedy = "Seat the card anew, or use another slot or riser"
    else:
        remedy = f"The slot has {with_slot} lanes: use another; a BIOS may also share lanes out (bifurcation)"
    return Finding("warning", "pcie", what, expected, got, f"{remedy}; loading and all-reduce slow down with the width")


def _generation(gpu: Gpu, card: Card | None) -> Finding | None:
    """An idle card lowers the generation to save power, so the present one counts only under load."""
    if gpu.pcie_generation is None:
        return None
    now, with_slot = gpu.pcie_generation
    most = max(with_slot, (card.generation if card is not None else None) or 0)
    what, expected = f"GPU {gpu.index} link's generation", f"{most}"
    if with_slot < most:
        remedy = "The slot or the BIOS allows no more: use another slot, or set its link speed to Auto or Gen3"
        return Finding("warning", "pcie", what, expected, f"{with_slot} at most in this slot", remedy)
    if now >= most:
        return Finding("ok", "pcie", what, expected, f"{now}")
    if gpu.busy:
        remedy = "Seat the card anew, or use another slot or riser; power saving (ASPM) can be turned off in the BIOS"
        return Finding("warning", "pcie", what, expected, f"{now} under load", remedy)
    remedy = "Idle cards lower it. Run doctor --quick again while an engine answers: it must be the highest then"
    return Finding("info", "pcie", what, expected, f"{now} now, idle", remedy)


def _nodes(known: Sequence[tuple[Gpu, Card]], host: Host) -> Iterator[Finding]:
    nodes = {card.node for _, card in known}
    where = ", ".join(f"GPU {gpu.index} on node {card.node}" for gpu, card in known)
    if len(nodes) > 1:
        remedy = "All-reduce crosses the link between CPUs. Put cards of one engine into slots of one CPU"
        yield Finding("info", "numa", "NUMA", "GPUs on one node", where, f"{remedy}, or serve one engine a card")
    elif nodes:
        yield Finding("ok", "numa", "NUMA", "GPUs on one node", where)
    for node in sorted(nodes, key=str):
        cores = next(card.cores for _, card in known if card.node == node)
        if cores and not cores & host.affinity:
            of = ", ".join(str(gpu.index) for gpu, card in known if card.node == node)
            got = f"none of node {node}'s, where GPU {of} is"
            remedy = f"Start it on that node: `numactl --cpunodebind={node} --membind={node} voltserve serve …`"
            yield Finding("warning", "numa", "cores of this process", "some near each GPU", got, remedy)
