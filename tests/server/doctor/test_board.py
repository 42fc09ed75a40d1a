"""How cards sit in the machine: invented cards beside the recordings of NVML."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from server.doctor.board import check_board, sysfs_address
from server.doctor.findings import Finding
from server.doctor.pci import Card, read_cards, read_kernel_log

from .test_checks import HOST
from .test_nvml import reading

FIRST, SECOND = (Card(f"0000:{bus}:00.0", "nvidia", False, 16, 3, 0, frozenset(range(4))) for bus in ("1a", "1c"))
INVALID = "NVRM: This PCI I/O region assigned to your NVIDIA device is invalid:"
FELL = "NVRM: Xid (PCI:0000:1a:00): 79, pid=1, GPU has fallen off the bus."


def found(
    *cards: Card, log: tuple[str, ...] | None = None, host: Any = HOST, name: str = "v100x2-pcie", **changes: Any
) -> list[Finding]:
    return list(check_board(reading(name, **changes), cards or (FIRST, SECOND), log, host))


def of(check: str, findings: list[Finding], what: str = "") -> Finding:
    return next(one for one in findings if one.check == check and what in one.what)


def test_the_recordings_cards_are_those_made_here() -> None:
    assert [sysfs_address(gpu.pci) for gpu in reading("v100x2-pcie").gpus] == [FIRST.address, SECOND.address]


@pytest.mark.parametrize("name", ["v100x2-pcie", "v100x2-sxm2"])
def test_a_sound_machine_is_fine(name: str) -> None:
    assert {one.level for one in found(name=name)} == {"ok"}
    assert {one.check for one in found(name=name)} == {"bar", "pcie", "numa"}
    assert {one.level for one in found(FIRST, replace(SECOND, node=None, width=None, generation=None))} == {"ok"}


def test_a_small_window_to_the_memory_asks_for_above_4g_decoding() -> None:
    finding = of("bar", found(nvmlDeviceGetBAR1MemoryInfo={"bar1Total": 2**28}))
    assert (finding.level, finding.expected, finding.got) == ("warning", "its 16 GiB", "0.25 GiB")
    assert "Above 4G Decoding" in finding.remedy


def test_a_card_without_addresses_is_an_error_even_without_a_driver() -> None:
    lost = replace(FIRST, driver="", no_addresses=True)
    findings = found(lost, SECOND, nvmlInit={"error": pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
    assert of("bar", findings).level == "error"
    assert of("bar", findings).what == "card 0000:1a:00.0"
    assert "Above 4G" in of("bar", findings).remedy


@pytest.mark.parametrize(
    "line",
    [
        INVALID,
        "NVRM: BAR1 is 0M @ 0x0 (PCI:0000:1a:00.0)",
        "pci 0000:1a:00.0: BAR 1: no space for [mem size 0x400000000 64bit pref]",
        "pci 0000:1a:00.0: BAR 3 [mem size 0x02000000 64bit pref]: failed to assign",
    ],
)
def test_the_kernel_s_complaint_about_addresses_is_passed_on(line: str) -> None:
    finding = of("bar", found(log=(line,)), "kernel log")
    assert (finding.level, finding.got) == ("warning", line)


def test_a_card_that_was_lost_is_an_error() -> None:
    finding = of("lost", found(log=("other", FELL)))
    assert (finding.level, finding.got) == ("error", FELL)


@pytest.mark.parametrize(
    ("changes", "host", "driver", "level"),
    [
        ({"nvmlDeviceGetCount": 1}, HOST, "", "error"),
        ({"nvmlDeviceGetCount": 1}, HOST, "nvidia", "error"),
        ({"nvmlDeviceGetCount": 1}, HOST, "vfio-pci", "none"),  # a virtual machine's
        ({"nvmlDeviceGetCount": 1}, replace(HOST, container=True), "nvidia", "none"),
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, HOST, "", "warning"),
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}}, HOST, "nouveau", "warning"),
        ({"nvmlInit": {"error": pynvml.NVML_ERROR_UNKNOWN}}, HOST, "nvidia", "none"),  # reported as the driver's
    ],
)
def test_cards_that_the_driver_does_not_have_are_named(
    changes: dict[str, Any], host: Any, driver: str, level: str
) -> None:
    findings = [
        one for one in found(FIRST, replace(SECOND, driver=driver), host=host, **changes) if one.check == "gpus"
    ]
    assert [one.level for one in findings] == ([] if level == "none" else [level])
    assert all(SECOND.address in one.got for one in findings)
    if "nvmlInit" in changes and findings:
        assert "535, 550, 570 or 580" in findings[0].remedy


@pytest.mark.parametrize(
    ("now", "with_slot", "card", "level", "remedy"),
    [
        (16, 16, 16, "ok", ""),
        (4, 16, 16, "warning", "Seat the card anew"),
        (8, 8, 16, "warning", "The slot has 8 lanes"),
        (8, 8, None, "ok", ""),
    ],
)
def test_the_link_s_width_is_held_to_the_card_s(
    now: int, with_slot: int, card: int | None, level: str, remedy: str
) -> None:
    changes: dict[str, Any] = {"nvmlDeviceGetCurrPcieLinkWidth": now, "nvmlDeviceGetMaxPcieLinkWidth": with_slot}
    finding = of("pcie", found(replace(FIRST, width=card), SECOND, **changes), "GPU 0")
    assert (finding.level, finding.got) == (level, f"x{now}")
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("now", "with_slot", "card", "busy", "level", "got"),
    [
        (3, 3, 3, 0, "ok", "3"),
        (1, 3, 3, 0, "info", "1 now, idle"),
        (1, 3, 3, 90, "warning", "1 under load"),
        (1, 2, 3, 0, "warning", "2 at most in this slot"),
        (2, 2, None, 90, "ok", "2"),
    ],
)
def test_an_idle_card_s_generation_is_no_fault_and_a_slot_s_is(
    now: int, with_slot: int, card: int | None, busy: int, level: str, got: str
) -> None:
    findings = found(
        replace(FIRST, generation=card),
        SECOND,
        nvmlDeviceGetCurrPcieLinkGeneration=now,
        nvmlDeviceGetMaxPcieLinkGeneration=with_slot,
        nvmlDeviceGetUtilizationRates={"gpu": busy},
    )
    finding = of("pcie", findings, "generation")
    assert (finding.level, finding.got) == (level, got)
    assert ("while an engine answers" in finding.remedy) == (level == "info")


def test_cards_on_two_nodes_are_told() -> None:
    finding = of("numa", found(FIRST, replace(SECOND, node=1, cores=frozenset({4, 5}))))
    assert (finding.level, finding.got) == ("info", "GPU 0 on node 0, GPU 1 on node 1")


def test_cores_far_from_a_card_are_warned_about() -> None:
    bound = replace(HOST, affinity=frozenset({0, 1}))
    far = replace(SECOND, node=1, cores=frozenset({4, 5}))
    finding = of("numa", found(FIRST, far, host=bound), "cores")
    assert finding.level == "warning"
    assert "node 1's, where GPU 1 is" in finding.got
    assert "numactl --cpunodebind=1" in finding.remedy
    assert not [one for one in found(FIRST, far) if "cores" in one.what]


def make_card(root: Path, address: str, **files: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    given = {
        "vendor": "0x10de",
        "class": "0x030200",
        "numa_node": "1",
        "max_link_width": "16",
        "max_link_speed": "8.0 GT/s PCIe",
        "resource": "0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n"
        "0x0000038000000000 0x00000383ffffffff 0x000000000014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        **files,
    }
    for name, text in given.items():
        (folder / name).write_text(f"{text}\n")


def test_cards_are_read_from_sysfs(tmp_path: Path) -> None:
    make_card(tmp_path, "0000:1b:00.0", numa_node="-1", max_link_width="255", max_link_speed="Unknown")
    make_card(tmp_path, "0000:1a:00.0")
    make_card(tmp_path, "0000:1a:00.1", **{"class": "0x040300"})  # its sound
    make_card(tmp_path, "0000:00:1f.0", vendor="0x8086")
    (tmp_path / "drivers" / "nvidia").mkdir(parents=True)
    (tmp_path / "sys/bus/pci/devices/0000:1a:00.0/driver").symlink_to(tmp_path / "drivers" / "nvidia")
    (tmp_path / "sys/devices/system/node/node1").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("4-6,9\n")
    assert read_cards(tmp_path) == (
        Card("0000:1a:00.0", "nvidia", False, 16, 3, 1, frozenset({4, 5, 6, 9})),
        Card("0000:1b:00.0", "", False, None, None, None, frozenset()),
    )
    assert read_cards(tmp_path / "none") == ()


@pytest.mark.parametrize(
    "line",
    [
        "0x0000000000000000 0x00000003ffffffff 0x000000002014220c",  # unset, by its flag
        "0x0000000000000000 0x00000003ffffffff 0x000000000014220c",
    ],
)
def test_a_region_without_addresses_is_seen(tmp_path: Path, line: str) -> None:
    make_card(tmp_path, "0000:1a:00.0", resource=f"0x00000000a0000000 0x00000000a0ffffff 0x0000000000040200\n{line}")
    assert read_cards(tmp_path)[0].no_addresses


def test_the_kernel_s_log_is_searched(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(f"6,1,0,-;usb 1-1: new device\n3,2,0,-;{INVALID}\n4,3,0,-;{FELL}\n")
    assert read_kernel_log(log) == (INVALID, FELL)
    assert read_kernel_log(tmp_path / "none") is None
