"""Text for ``pretrain.py``: sources and documentation that this machine has, as GPT-2's tokens.

    python benchmarks/pretrain_data.py --out tokens

Every file once (by its content), shuffled; one in two hundred is held out. A byte-level BPE of
GPT-2's size is trained on part of it, so that Hugging Face's model needs no change.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

VOCABULARY = 50257
END = "<|endoftext|>"
SOURCES = ".py .pyi .h .hpp .cuh .cpp .cu .c .inl .tcc .js .el .pl .tcl .sh"
SUFFIXES = {*SOURCES.split(), ".md", ".rst", ".txt", ".html"}
SHORTEST, LONGEST = 200, 1 << 20
HELD_OUT = 200
"""One file in so many is for validation."""


def roots() -> list[Path]:
    """Where packages, headers and documentation lie."""
    packages = [Path(p) for p in sys.path if p.endswith("-packages")]
    others = ["/usr/include", "/usr/local/cuda/include", "/usr/share"]
    return [Path(sysconfig.get_path("stdlib")), *packages, *map(Path, others)]


def documents(folders: list[Path]) -> Iterator[str]:
    """Texts of at least 200 bytes and at most a MiB, each content once, by path."""
    seen: set[bytes] = set()
    for path in sorted(p for folder in folders for p in _files(folder)):
        try:
            content = path.read_bytes()
            text = content.decode()
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha1(content).digest()
        if SHORTEST <= len(content) <= LONGEST and digest not in seen:
            seen.add(digest)
            yield text


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names if os.path.splitext(name)[1] in SUFFIXES)


def main(
    out: Annotated[Path, typer.Option(help="folder for train.npy, held_out.npy, tokenizer.json")],
    learn_from: Annotated[int, typer.Option(help="bytes of text that the tokenizer sees")] = 1
    << 26,
    limit: Annotated[int, typer.Option(help="characters at most")] = 1 << 30,
) -> None:
    """Write tokens as 16-bit numbers, documents divided by an end of text."""
    from tokenizers import ByteLevelBPETokenizer

    console = Console(stderr=True)
    texts, size = [], 0
    for text in documents(roots()):
        size += len(text)
        if size > limit:
            break
        texts.append(text)
    random.Random(0).shuffle(texts)
    console.print(f"{len(texts)} documents, {sum(map(len, texts)) / 1e6:.0f} million characters")
    tokenizer = ByteLevelBPETokenizer()
    some = _first(texts, learn_from)
    tokenizer.train_from_iterator(some, VOCABULARY, show_progress=False, special_tokens=[END])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    for name, part in (
        ("held_out", [t for n, t in enumerate(texts) if n % HELD_OUT == 0]),
        ("train", [t for n, t in enumerate(texts) if n % HELD_OUT]),
    ):
        tokens = _encoded(tokenizer, part)
        np.save(out / f"{name}.npy", tokens)
        console.print(f"{name}: {len(tokens) / 1e6:.1f} million tokens")


def _first(texts: list[str], size: int) -> Iterator[str]:
    for text in texts:
        size -= len(text)
        if size < 0:
            return
        yield text


def _encoded(tokenizer: object, texts: list[str], batch: int = 4096) -> np.ndarray:
    """16-bit tokens of all ``texts``, each behind an end of text."""
    parts = []
    for start in range(0, len(texts), batch):
        for found in tokenizer.encode_batch(texts[start : start + batch]):  # type: ignore[attr-defined]
            parts.append(np.array([0, *found.ids], dtype=np.uint16))
    return np.concatenate(parts) if parts else np.zeros(0, np.uint16)


if __name__ == "__main__":
    typer.run(main)
