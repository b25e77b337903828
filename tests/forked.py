"""Processes that need not import torch: a server forks them that has, and never ran autograd."""

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import torch
from quick import quick_compiling, strict_by_default

PRELOADED = ["hot_compile.testing", "torch._inductor.compile_fx"]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def in_two_processes(function, *args):
    """``function(rank, *args)`` in two of them at once."""
    given = (function, *args)
    torch.multiprocessing.start_processes(_quickly, given, nprocs=2, start_method="forkserver")


def in_a_process(function, *args):
    """What ``function(*args)`` returns, or raises, in one that ends then."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        return pool.submit(_alone, function, *args).result()


def _alone(function, *args):
    gc.disable()
    with quick_compiling(), strict_by_default():
        return function(*args)


def _quickly(rank, function, *args):
    gc.disable()
    with quick_compiling(), strict_by_default():
        function(rank, *args)
