"""One class per thing a user can get wrong; each message says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable


class HotError(Exception):
    """Base of everything this package raises on purpose."""


class OptionError(HotError, ValueError):
    """An option's name or value is not valid."""

    @classmethod
    def unknown(cls, names: Iterable[str], valid: Iterable[str]) -> OptionError:
        """Unknown keys, with the valid ones listed."""
        return cls(
            f"got unknown option(s) {sorted(names)} for backend 'hot'; valid ones of ours are "
            f"{sorted(valid)}, and any key of torch._inductor.config is passed to Inductor. "
            "Correct the spelling or remove the key."
        )

    @classmethod
    def value(cls, name: str, got: object, expected: str) -> OptionError:
        """A known key with a value it cannot take."""
        return cls(f"got {name}={got!r}; expected {expected}. Change the value of {name!r}.")


class PassDisabledError(HotError, RuntimeError):
    """A setting would switch Inductor's joint graph passes off, and HOT with them, in silence."""


class BuildError(HotError, RuntimeError):
    """The C++/CUDA runtime could not be built or loaded."""


class PlanFormatError(HotError, ValueError):
    """A plan read from JSON is not one this version understands."""


class ProfileFormatError(HotError, ValueError):
    """A profile read from a file is not one this version understands."""


class ProfileMismatchError(HotError, ValueError):
    """A profile was made of another model, or under another configuration."""


class CalibrationError(HotError, RuntimeError):
    """Calibration saw nothing it could measure."""
