"""``import hot_compile.integrations.accelerate``: "hot" is one of accelerate's backends.

accelerate, and Hugging Face's Trainer through it, looks a backend's name up in its enum
``DynamoBackend``, which it offers no way to add to. Importing this adds the member ``HOT`` for this
process; the other members, and what accelerate does with any of them, stay as they are. Then
``TrainingArguments(torch_compile_backend="hot")`` and ``TorchDynamoPlugin(backend="hot")`` work.
"""

from __future__ import annotations

import enum

_NAME = "HOT"  # accelerate looks up names in capitals, and hands them to torch.compile in small


def register() -> None:
    """Add "hot" to accelerate's backends, if it does not know it. Importing this module does so.

    Raises:
        ImportError: accelerate is missing, or has no such enum (any more).
    """
    try:
        from accelerate.utils import DynamoBackend
    except ImportError as error:
        raise ImportError(
            f"could not import accelerate's DynamoBackend ({error}); expected accelerate 1.0 or "
            "newer. Install it (pip install accelerate), or compile the model in place before the "
            'trainer gets it: model.compile(backend="hot").'
        ) from error
    if _NAME not in DynamoBackend.__members__:
        _add(DynamoBackend, _NAME)


def _add(enumeration: type[enum.Enum], name: str) -> None:
    """A new member of an enum of strings whose values are its names.

    The standard library offers no way; these are the four places where it keeps a member.
    """
    member = str.__new__(enumeration, name)  # type: ignore[type-var]
    member._name_ = member._value_ = name  # type: ignore[attr-defined]
    member._sort_order_ = len(enumeration._member_names_)  # type: ignore[attr-defined]
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member  # type: ignore[assignment]
    enumeration._value2member_map_[name] = member  # type: ignore[assignment]
    type.__setattr__(enumeration, name, member)  # the enum's own forbids only to replace members


register()
