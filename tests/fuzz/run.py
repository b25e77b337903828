"""Command line of the fuzzer: many seeds in several processes, resumable, failures as scripts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SLICE = 50
"""The most seeds that a process takes: it starts in ten seconds."""


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line asks for; 1 if anything failed."""
    options = parsed(arguments)
    if options.worker:
        work(options)
        return 0
    results = list(run(options))
    print(summary(results))
    return int(any(r["failures"] for r in results))


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--seeds", default="0:200", help="first:last, the last not taken")
    add("--opinfo", action="store_true", help="seeds are places in the list of all operators")
    add("--options", type=json.loads, help="JSON: these instead of the options drawn")
    add("--lower", action="store_true", help="compile as a user's run does, against Inductor")
    add("--steps", type=int, default=1, help="the last is judged; looks repair those before")
    add("--device", default="cpu", help="where models and operators run")
    add("--jobs", type=int, default=2, help="processes at a time")
    add("--out", type=Path, help="JSON lines, one per seed; seeds that it has are not run again")
    add("--scripts", type=Path, help="folder for a small script per failure")
    add("--shrink", type=int, default=40, help="tries at making a failure small, 0: none")
    add("--timeout", type=float, default=1200, help="seconds for fifty seeds")
    add("--quiet", action="store_true", help="print failures and the summary only")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def seeds_of(text: str) -> list[int]:
    """``"3:7"``, ``"3,5"`` and ``"3:7,9"`` as numbers."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition(":")
        found += range(int(first or 0), int(last)) if last else [int(first)]
    return found


# ---- one process


def work(options: argparse.Namespace) -> None:
    """Examine the seeds one by one; a JSON line on standard output before and after each."""
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    if options.device != "cpu":
        torch.set_default_device(options.device)
    for seed in seeds_of(options.seeds):
        print(json.dumps({"began": seed}), flush=True)
        print(json.dumps(result(seed, options)), flush=True)


def result(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """What came of one seed, JSON-ready."""
    from .cases import Case, draw
    from .oracle import examine
    from .shrink import shrink, write_script

    began = time.process_time()
    case = operator_case(seed) if options.opinfo else draw(seed)
    if case is None:
        return {"seed": seed, "name": "not run in eager mode", "failures": [], "counts": {}}
    if options.options is not None:
        case = dataclasses.replace(case, options=tuple(options.options.items()))
    verdict = examine(case, options.lower, options.steps)
    failures, small, path = verdict.failures, case, None
    if failures and options.shrink:
        kind = kind_of(failures)

        def fails(candidate: Case) -> bool:
            return kind_of(examine(candidate, options.lower, options.steps).failures) == kind

        small = shrink(case, fails, options.shrink)
    if failures and options.scripts:
        found = examine(small, options.lower, options.steps).failures
        path = write_script(small, found or failures, options.lower, options.scripts)
    return {
        "seed": seed,
        "name": case.name,
        "failures": failures,
        "small": small.name if failures else None,
        "script": str(path) if path else None,
        "case": dataclasses.asdict(case) if failures else None,
        "worst": verdict.worst,
        "counts": verdict.counts,
        "seconds": round(time.process_time() - began, 2),
    }


def kind_of(failures: list[str]) -> str | None:
    """What is the same in a failure and in a smaller case of it."""
    if not failures:
        return None
    kinds = ("crash", "warning", "loss", "refused", "not finite")
    return next((kind for kind in kinds if any(kind in f for f in failures)), "error")


def operator_case(place: int) -> Any:
    """A case about the operator at ``place`` in the database: the first sample call that runs."""
    from .cases import NotBuilt, around, build
    from .operators import database, samples

    name = sorted(database())[place]
    chance = random.Random(place)
    places = list(range(len(samples(name))))
    chance.shuffle(places)
    for index in places[:20]:
        case = around(name, index, place, chance)
        options = (("memory_min_bytes", 0), ("min_gain", 0))
        case = dataclasses.replace(case, options=options)
        try:
            build(case)
        except NotBuilt:
            continue
        return case
    return None


# ---- all processes


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results of all seeds, those that ``--out`` holds first."""
    known = read(options.out)
    wanted = seeds_of(options.seeds)
    yield from (known[seed] for seed in wanted if seed in known)
    missing = [seed for seed in wanted if seed not in known]
    for found in workers(missing, options):
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        if found["failures"] or not options.quiet:
            print(line(found), flush=True)
        yield found


def read(path: Path | None) -> dict[int, dict[str, Any]]:
    """Results by seed out of a file of JSON lines, none if there is no file."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    return {entry["seed"]: entry for entry in lines}


def workers(seeds: list[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results as they come from ``options.jobs`` threads, each with one process at a time."""
    slices: queue.SimpleQueue = queue.SimpleQueue()
    size = min(SLICE, -(-len(seeds) // options.jobs)) or 1
    for start in range(0, len(seeds), size):
        slices.put(seeds[start : start + size])
    found: queue.SimpleQueue = queue.SimpleQueue()

    def serve() -> None:
        try:
            while not slices.empty():
                for entry in examined(slices.get(), options):
                    found.put(entry)
        finally:
            found.put(None)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for _ in threads:
        yield from iter(found.get, None)


def examined(seeds: list[int], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Results of a slice; a seed that its process does not survive is a failure, the rest go on."""
    while seeds:
        current = None
        process = started(seeds, options)
        timer = threading.Timer(options.timeout, process.kill)
        timer.start()
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            entry = json.loads(text)
            if "began" in entry:
                current = entry["began"]
            else:
                seeds = seeds[1:]
                yield entry
        errors = process.stderr.read()
        code = process.wait()
        timer.cancel()
        if seeds:
            failure = f"died: the process ended with {code}: {errors[-500:]}"
            seed = seeds[0] if current is None else current
            yield {"seed": seed, "name": "", "failures": [failure], "counts": {}}
            seeds = seeds[1:]


def started(seeds: list[int], options: argparse.Namespace) -> subprocess.Popen:
    """A worker process on ``seeds``."""
    command = [sys.executable, "-m", "tests.fuzz", "--worker", "--shrink", str(options.shrink)]
    command += ["--seeds", ",".join(map(str, seeds)) + ",", "--device", options.device]
    command += ["--lower"] * options.lower + ["--opinfo"] * options.opinfo
    command += ["--steps", str(options.steps)]
    command += ["--options", json.dumps(options.options)] if options.options is not None else []
    command += ["--scripts", str(options.scripts.absolute())] if options.scripts else []
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# ---- what is printed


def line(found: dict[str, Any]) -> str:
    """One seed's result."""
    if not found["failures"]:
        return f"{found['seed']:6d} ok   {found.get('worst', 0):.2f} {found['name'][:150]}"
    where = found.get("script") or found.get("small") or found["name"]
    return "\n       ".join([f"{found['seed']:6d} FAIL {where}", *found["failures"][:6]])


def summary(results: list[dict[str, Any]]) -> str:
    """Counts of all results, and the failures."""
    total: dict[str, Counter[str]] = {}
    for found in results:
        for kind, counter in found["counts"].items():
            plain = {re.sub(r"\d[\d.e+-]*", "N", key): n for key, n in counter.items()}
            total.setdefault(kind, Counter()).update(plain)
    failed = [found for found in results if found["failures"]]
    stored = total.get("stored", Counter())
    layers = total.get("layers", Counter())
    lines = [
        f"{len(results)} tried, {len(failed)} failed",
        f"tensors: {sum(stored.values())}, exact {stored['exact']}, "
        f"otherwise {sum(stored.values()) - stored['exact']}",
        f"layers: {sum(layers.values())}, refused {layers['exact']}",
    ]
    for kind, counter in total.items():
        lines += [f"{kind}:", *table(counter.most_common(25))]
    return "\n".join([*lines, f"failed: {[found['seed'] for found in failed]}"])


def table(rows: Iterable[tuple[str, int]]) -> list[str]:
    """Lines of a count and what was counted."""
    return [f"  {count:8d}  {what[:120]}" for what, count in rows]


if __name__ == "__main__":
    sys.exit(main())
