"""``torch.compile(model, backend="hot")``: HOT's integer backward pass as a compiler backend.

Nothing of this needs importing to use the backend; these names are for looking inside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accounting import MemoryReport, memory_report
    from .boundaries import checkpoint, compress_boundaries
    from .calibration import calibrate
    from .config import HotConfig, Strategy
    from .inspect import Explanation, explain
    from .observing.certificate import Certificate, certificate
    from .observing.monitor import Monitor
    from .passes.profile.profile import Profile

__version__ = "0.1.0"
__all__ = [
    "Certificate",
    "Explanation",
    "HotConfig",
    "MemoryReport",
    "Monitor",
    "Profile",
    "Strategy",
    "calibrate",
    "certificate",
    "checkpoint",
    "compress_boundaries",
    "explain",
    "memory_report",
]

_HOMES = {
    "checkpoint": "boundaries",
    "compress_boundaries": "boundaries",
    "Certificate": "observing.certificate",
    "certificate": "observing.certificate",
    "Monitor": "observing.monitor",
    "calibrate": "calibration",
    "Profile": "passes.profile.profile",
    "explain": "inspect",
    "Explanation": "inspect",
    "HotConfig": "config",
    "MemoryReport": "accounting",
    "memory_report": "accounting",
    "Strategy": "config",
}


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that ``import hot_compile`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'hot_compile' has no attribute {name!r}; it has {__all__}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    """The public names, loaded or not, beside what the module has."""
    return sorted({*globals(), *__all__})
