"""Whether two builds of the CUDA kernels hold the same sm_70 machine code, byte for byte.

    python -m kernels.tools.same_code BEFORE/libvoltserve_cuda.so build/cuda/libvoltserve_cuda.so

A change that only moves, renames or explains must leave every kernel's instructions as they were. The exit code is 0
where it did, 1 otherwise; each kernel that differs, appeared or vanished is named.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kernels.tools.native import ROOT

# nvcc puts the source file's name and a hash of it into names of internal linkage.
_INTERNAL = re.compile(r"\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}")


def functions(listing: str) -> dict[str, str]:
    """Each kernel's instructions and encodings, by its name, of what `cuobjdump -sass` prints.

    Its columns are as wide as the longest instruction of a file, so the width of spaces is left out.
    """
    found = {}
    for part in listing.split("Function : ")[1:]:
        name, _, body = part.partition("\n")
        lines = body.split("\n\t\t.....", 1)[0].splitlines()
        found[_INTERNAL.sub("INTERNAL", name.strip())] = "\n".join(" ".join(line.split()) for line in lines)
    return found


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """One line per kernel that is not the same in both."""
    lines = [f"{name}: vanished" for name in before if name not in after]
    lines += [f"{name}: new" for name in after if name not in before]
    for name in before:
        if name in after and before[name] != after[name]:
            pairs = zip(before[name].splitlines(), after[name].splitlines(), strict=False)
            first = next(((old, new) for old, new in pairs if old != new), ("", "more or fewer instructions"))
            lines.append(f"{name}: {' '.join(first[0].split())} became {' '.join(first[1].split())}")
    return lines


def disassembled(library: Path, cuda_home: Path) -> dict[str, str]:
    """The sm_70 kernels of a shared library. Raises CalledProcessError where cuobjdump cannot read it."""
    command: list[str | Path] = [cuda_home / "bin" / "cuobjdump", "-sass", "-arch", "sm_70", library]
    return functions(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    fetched = subprocess.run([ROOT / "scripts" / "fetch_nvcc.sh"], check=True, capture_output=True, text=True)
    cuda_home = Path(fetched.stdout.strip())
    before, after = (disassembled(library, cuda_home) for library in (arguments.before, arguments.after))
    if not before:
        print(f"{arguments.before}: expected sm_70 kernels, found none", file=sys.stderr)
        return 1
    found = differences(before, after)
    print(*found, f"{len(before)} kernels, {len(found)} differences", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
