"""Folders that appear whole or not at all."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_folder(destination: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder beside `destination` and renames it. Raises ValueError when something is there already."""
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ValueError(f"{destination} exists already; remove it or choose another name")
    destination.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        fresh.chmod(0o755)
        fill(fresh)
        fresh.replace(destination)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
