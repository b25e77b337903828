"""Processes that need not import torch: a server forks them that has, and never ran autograd."""

import multiprocessing

import torch
from quick import quick_compiling, strict_by_default

PRELOADED = ["hot_compile.testing", "torch._inductor.compile_fx"]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def in_two_processes(function, *args):
    """``function(rank, *args)`` in two of them at once."""
    given = (function, *args)
    torch.multiprocessing.start_processes(_quickly, given, nprocs=2, start_method="forkserver")


def _quickly(rank, function, *args):
    with quick_compiling(), strict_by_default():
        function(rank, *args)
