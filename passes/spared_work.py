"""Spares Inductor work that changes nothing of the code it writes, and so nothing of what runs."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import sympy
from torch import fx

from hot_compile.runtime.pointwise import taught


def spare_work() -> None:
    """Have Inductor leave out what it does in vain, or again and again (tried on torch 2.11, 2.14).

    What a torch has nowhere, or elsewhere, it goes on doing.
    """
    for spare in _SPARED:
        spare()


_LOCK = threading.Lock()
_compiling = 0


@contextlib.contextmanager
def collected_later() -> Iterator[None]:
    """Python looks for garbage when graphs are compiled, not again and again while they grow.

    A compile makes millions of objects, most of which stay until it is done. Memory of a device
    does not wait for that. Threads may compile at a time: the last one has it go on.
    """
    global _compiling
    with _LOCK:
        later = gc.isenabled() or _compiling > 0
        _compiling += later
        gc.disable()
    try:
        yield
    finally:
        with _LOCK:
            _compiling -= later
            if later and not _compiling:
                if not gc.get_freeze_count():
                    gc.freeze()  # what is there now counts as old, and is not
                    gc.unfreeze()  # looked through right now
                gc.enable()


@taught
def _write_dtype_rules_once() -> None:
    """The table of operators' dtypes is written anew only when rules were added to it."""
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.utils import op_dtype_propagation_rules

    table: Any = DtypePropagationOpsHandler
    write = table.__init__

    @functools.wraps(write)
    def write_once(self: Any) -> None:
        if vars(self).get("rules_written") != len(op_dtype_propagation_rules):
            write(self)
            self.rules_written = len(op_dtype_propagation_rules)

    table.__init__ = write_once


@taught
def _keep_equal_bounds() -> None:
    """Bounds met with equal ones stay; sympy compares the numbers of every constant at length."""
    from torch.utils._sympy.value_ranges import ValueRanges

    ranges: Any = ValueRanges
    meet = ranges.__and__

    @functools.wraps(meet)
    def meet_others(self: Any, other: Any) -> Any:
        return self if self == other else meet(self, other)

    ranges.__and__ = meet_others


@taught
def _walk_loops() -> None:
    """A loop's operations are called one after the other, and nothing else is done for each.

    Inductor has ``fx.Interpreter`` do it, which readies a text for errors and a bar of progress.
    A loop has a hundred operations and is gone through ten times.
    """
    from torch._inductor.loop_body import InterpreterShim
    from torch._inductor.virtualized import V

    shim: Any = InterpreterShim

    @functools.wraps(shim.run)
    def run(self: Any, *args: Any, initial_env: dict[fx.Node, Any] | None = None) -> Any:
        self.env = env = {} if initial_env is None else initial_env
        given = iter(args)
        with V.set_interpreter_handler(self):
            for node in self.graph.nodes:
                if node not in env:
                    self.current_node = node
                    env[node] = _value_of(self, node, env, given)
        return env[node]

    shim.run = run


def _value_of(shim: Any, node: fx.Node, env: dict[fx.Node, Any], given: Any) -> Any:
    if node.op == "placeholder":
        return next(given)
    if node.op == "get_attr":
        return shim.fetch_attr(node.target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    if node.op == "output":
        return args[0]
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_module":
        return shim.fetch_attr(node.target)(*args, **kwargs)
    return getattr(args[0], str(node.target))(*args[1:], **kwargs)


@taught
def _remember_fakes() -> None:
    """Fake values of our operators are remembered by their arguments', as those of torch's are.

    A graph's are found five times or more. None of ours is a view, or depends on data.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode
    validate = mode._validate_cache_key

    @functools.wraps(validate)
    def validate_others(self: Any, func: Any, *args: Any) -> None:
        if getattr(func, "namespace", None) != "hot":
            validate(self, func, *args)

    mode._validate_cache_key = validate_others


@taught
def _keep_linear_indices() -> None:
    """An index without divisions, of whose strides alone Inductor asks, is not simplified."""
    from torch._inductor.codegen.cpp import stride_at_vec_range

    names: Any = sys.modules[stride_at_vec_range.__module__]
    simplify = names.simplify_index_in_vec_range

    @functools.wraps(simplify)
    def simplify_others(index: Any, var: Any, vec_length: int) -> Any:
        return index if _is_linear(index) else simplify(index, var, vec_length)

    names.simplify_index_in_vec_range = simplify_others


def _is_linear(index: Any) -> bool:
    """It is a sum of symbols, each at most times a whole number."""
    for term in sympy.Add.make_args(index):
        factor, rest = term.as_coeff_Mul()
        if not (factor.is_Integer and (rest.is_Symbol or rest == 1)):
            return False
    return True


@taught
def _compile_while_writing() -> None:
    """C++ is compiled from when it is written, as Triton's kernels are, by other processes.

    Inductor begins once the whole graph is written, and waits. Then it finds it begun.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    wrapper: Any = PythonWrapperCodegen
    define = wrapper.define_kernel

    @functools.wraps(define)
    def define_and_compile(self: Any, name: str, body: str, *args: Any, **kwargs: Any) -> None:
        define(self, name, body, *args, **kwargs)
        if body.startswith("async_compile.cpp_pybinding(") and get_compile_threads() > 1:
            eval(body, {"async_compile": AsyncCompile()})

    wrapper.define_kernel = define_and_compile


_SPARED = (
    _write_dtype_rules_once,
    _keep_equal_bounds,
    _walk_loops,
    _remember_fakes,
    _keep_linear_indices,
    _compile_while_writing,
)
