"""A graph cache of one's own for a subprocess, which finds out nothing again of the compiler."""

import os
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

HEADERS = "precompiled_headers"


def own_cache(folder: Path) -> dict[str, str]:
    """The environment in which Inductor's caches lie in ``folder``.

    Precompiled headers are this process's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = Path(cache_dir()) / HEADERS
    shared.mkdir(parents=True, exist_ok=True)
    if not (folder / HEADERS).exists():
        (folder / HEADERS).symlink_to(shared, target_is_directory=True)
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}
