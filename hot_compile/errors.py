"""One class per thing a user can get wrong; each message says what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HotError(Exception):
    """Base of everything this package raises on purpose."""


class OptionError(HotError, ValueError):
    """An option's name or value is not valid."""

    @classmethod
    def unknown(
        cls, names: Iterable[str], valid: Iterable[str], theirs: Iterable[str] = ()
    ) -> OptionError:
        """Unknown keys, the nearest known ones, and the valid ones listed; not Inductor's many."""
        ours, known = sorted(valid), sorted(theirs)
        meant = {name: _nearest(name, ours) or _nearest(name, known) for name in sorted(names)}
        asked = [
            repr(name) + (f" (did you mean {near!r}?)" if near else "")
            for name, near in meant.items()
        ]
        return cls(
            f"got unknown option(s) {', '.join(asked)} for backend 'hot'; valid ones of ours are "
            f"{', '.join(ours)}, and any key of torch._inductor.config is passed to Inductor. "
            "Correct the spelling or remove the key."
        )

    @classmethod
    def value(cls, name: str, got: object, expected: str) -> OptionError:
        """A known key with a value it cannot take."""
        return cls(f"got {name}={got!r}; expected {expected}. Change the value of {name!r}.")


class OptionWarning(UserWarning):
    """An option is valid, but the model cannot be compiled as it asks."""


class ScriptError(HotError, ValueError):
    """There is no such script or module to run."""


class PassDisabledError(HotError, RuntimeError):
    """A setting would switch Inductor's joint graph passes off, and HOT with them, in silence."""


class BuildError(HotError, RuntimeError):
    """The C++/CUDA runtime could not be built or loaded."""


class ProfileFormatError(HotError, ValueError):
    """A profile read from a file is not one this version understands."""


class ProfileMismatchError(HotError, ValueError):
    """A profile was made of another model, or under another configuration."""


class CalibrationError(HotError, RuntimeError):
    """Calibration saw nothing it could measure."""


def _nearest(name: str, known: list[str]) -> str | None:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return found[0] if found else None
