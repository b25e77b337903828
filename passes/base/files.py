"""Small files beside the caches."""

from __future__ import annotations

import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file in one piece, whoever else reads or writes it; its folder is made.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)
