"""What tests look for in folders."""

from pathlib import Path


def names_in(directory: Path) -> list[str]:
    """The names in `directory`, hidden ones too, sorted."""
    return sorted(path.name for path in directory.iterdir())
