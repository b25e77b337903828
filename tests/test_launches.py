"""Launches of Triton kernels by less (hot_compile/launches.py)."""

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.static_triton_launcher import StaticallyLaunchedCudaKernel
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.profiler import ProfilerActivity, profile

from hot_compile import launches
from hot_compile.launches import shorten_launches, shortened

LAUNCHER = """
def launcher(in_ptr0, own, launch, xnumel, XBLOCK, stream):
    runner(-(xnumel // -256), 2, 1, stream, in_ptr0, own, launch, xnumel)
"""
"""Some arguments of a user's kernel are called as things of ours are."""


class OnGPU(Tensor):
    """A tensor that says that it lies on a GPU."""

    is_cuda = True


class Launched(StaticallyLaunchedCudaKernel):
    """Torch's launcher of a kernel that was never compiled; what it gives CUDA is kept."""

    def __init__(self, **changed):
        self.function, self.num_warps, self.shared = 1234, 8, 16
        self.arg_tys, self.has_global_scratch, self.has_profile_scratch = "OOfi", True, True
        self.device_agnostic = self._has_tensordesc = False
        self.global_scratch_size = 0
        self.launched = []
        self.C_impl = SimpleNamespace(_launch_kernel=lambda *given: self.launched.append(given))
        vars(self).update(changed)


def kernel_of(static, **changed):
    """Inductor's kernel as it is after its first launch."""
    scope = {"runner": static.run}
    exec(LAUNCHER, scope)
    launcher = scope["launcher"]
    launcher.store_cubin, launcher.config, launcher.cache_hash = False, SimpleNamespace(), "hash"
    kernel = object.__new__(CachingAutotuner)
    vars(kernel).update(
        launchers=[launcher], inductor_meta={}, triton_meta={}, triton_interpret=False,
        dump_launch_params=False, dump_launch_tensors=False, device_props=SimpleNamespace(type=""),
        _plugins=(), _cached_launcher=None, _cache_eligible=False, _debug_call=None,
    )  # fmt: skip
    vars(kernel).update(changed)
    return kernel


def arguments(count=1000):
    tensors = (torch.randn(8).as_subclass(OnGPU) for _ in range(2))
    return (*tensors, 0.5, count, 256)


def addresses(given):
    """What CUDA is given, with tensors by where they lie."""
    *whole, values, stream = given
    return *whole, tuple(v.data_ptr() if isinstance(v, Tensor) else v for v in values), stream


def test_cuda_is_given_the_same():
    static = Launched()
    run, args = shortened(kernel_of(static), arguments()), arguments(5000)
    assert not static.launched  # nothing is launched to see what would be
    run(*args, stream=7)
    ((function, *_, values, _),) = static.launched
    assert function == 1234
    assert not any(isinstance(value, Tensor) for value in values)
    kernel_of(static).launchers[0](*args, stream=7)
    short, own = static.launched
    assert short == addresses(own)


@pytest.mark.parametrize("scratch", [(False, False), (True, False), (False, True)])
def test_arguments_without_a_use_are_given_as_torch_does(scratch):
    static = Launched(has_global_scratch=scratch[0], has_profile_scratch=scratch[1])
    args = arguments()
    shortened(kernel_of(static), args)(*args, stream=7)
    kernel_of(static).launchers[0](*args, stream=7)
    assert static.launched[0] == addresses(static.launched[1])


def other_launcher(kernel):
    kernel.launchers[0].__globals__["runner"] = lambda *given: None


def no_launch(kernel):
    """Where there is nothing to do."""
    launcher = kernel.launchers[0]
    launcher.__code__ = (lambda a, b, c, d, e, stream: None).__code__


@pytest.mark.parametrize(
    "change",
    [
        lambda k: setattr(k, "triton_interpret", True),
        lambda k: setattr(k, "dump_launch_params", True),
        lambda k: setattr(k, "dump_launch_tensors", True),
        lambda k: setattr(k.launchers[0], "store_cubin", True),
        lambda k: k.inductor_meta.update(coordinate_descent_tuning=True),
        lambda k: k.launchers.append(k.launchers[0]),
        lambda k: k.launchers.clear(),
        other_launcher,
        no_launch,
    ],
)
def test_what_does_more_than_launching_stays_as_it_is(change):
    kernel = kernel_of(Launched())
    change(kernel)
    assert shortened(kernel, arguments()) is None


def test_another_way_of_launching_is_seen():
    class More(Launched):
        def run(self, x, y, z, stream, *args):
            super().run(x, y, z + 1, stream, *args)

    assert shortened(kernel_of(More()), arguments()) is None


def test_tensors_elsewhere_are_left_to_torch():
    kernel, (x, *rest) = kernel_of(Launched()), arguments()
    assert shortened(kernel, (x.as_subclass(Tensor), *rest)) is None
    assert shortened(kernel, (None, *rest)) is None


def test_a_tuned_configuration_is_launched_by_less():
    kernel = kernel_of(Launched(), inductor_meta={"coordinate_descent_tuning": True})
    kernel.launchers[0].config.found_by_coordesc = True
    assert shortened(kernel, arguments()) is not None


def test_a_profiler_sees_launches(monkeypatch):
    kernel, args, seen = kernel_of(Launched()), arguments(), []
    run = None
    monkeypatch.setattr(CachingAutotuner, "run", lambda self, *a, stream: seen.append((a, stream)))
    run = shortened(kernel, args)
    run(*args, stream=3)
    assert not seen
    with profile(activities=[ProfilerActivity.CPU]):
        run(*args, stream=3)
    assert len(seen) == 1
    run(*args, stream=3)
    assert len(seen) == 1


@pytest.fixture
def old_torch(monkeypatch):
    """Torch without a short way of its own."""
    monkeypatch.delattr(CachingAutotuner, "_build_fast_launcher", raising=False)


def generated(**values):
    module = ModuleType("generated")
    vars(module).update(call=lambda args: args, **values)
    return module


@pytest.mark.usefixtures("old_torch")
def test_a_step_launches_by_less_from_the_second_time_on(monkeypatch):
    static, first = Launched(), []
    kernel, args = kernel_of(static), arguments()
    monkeypatch.setattr(CachingAutotuner, "run", lambda self, *a, stream: first.append(stream))
    module = generated(triton_poi_0=kernel)
    shorten_launches(module)
    for stream in (3, 4, 5):
        module.triton_poi_0.run(*args, stream=stream)
    assert first == [3]
    assert [given[-1] for given in static.launched] == [4, 5]
    assert module.triton_poi_0.inductor_meta is kernel.inductor_meta


@pytest.mark.usefixtures("old_torch")
def test_arguments_by_name_are_left_to_torch(monkeypatch):
    seen, (*tensors, scale, count, block) = [], arguments()
    monkeypatch.setattr(CachingAutotuner, "run", lambda self, *a, **named: seen.append(named))
    module = generated(triton_poi_0=kernel_of(Launched()))
    shorten_launches(module)
    for stream in (3, 4):
        module.triton_poi_0.run(*tensors, scale, count, XBLOCK=block, stream=stream)
    assert seen == [{"XBLOCK": 256, "stream": 3}, {"XBLOCK": 256, "stream": 4}]


@pytest.mark.usefixtures("old_torch")
def test_only_what_a_step_launches_is_changed():
    kernel = kernel_of(Launched())
    source = ModuleType("kernel's own source")
    source.triton_poi_0 = kernel
    shorten_launches(source)
    assert source.triton_poi_0 is kernel
    other = object()
    module = generated(other=other, text="x")
    shorten_launches(module)
    assert (module.other, module.text) == (other, "x")


def test_a_torch_that_has_a_short_way_is_left_alone(monkeypatch):
    monkeypatch.setattr(CachingAutotuner, "_build_fast_launcher", None, raising=False)
    kernel = kernel_of(Launched())
    module = generated(triton_poi_0=kernel)
    shorten_launches(module)
    assert module.triton_poi_0 is kernel


def trained(compiled, x):
    """A step's gradients, the third one's."""
    model, found = compiled, []
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        found = [p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@torch.backends.cudnn.flags(deterministic=True)
def test_a_gpus_steps_are_the_same():
    if hasattr(CachingAutotuner, "_build_fast_launcher"):
        pytest.skip("this torch has a short way itself")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.GELU(), nn.Conv2d(48, 17, 3), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.LayerNorm(17 * 11 * 11)).cuda()
    x = torch.randn(197, 3, 15, 15, device="cuda")
    options = {"min_gain": 0.0, "accept": "off"}
    before = len(PyCodeCache.modules)
    short = torch.compile(model, backend="hot", options=options)
    found = trained(short, x)
    kernels = [v for m in PyCodeCache.modules[before:] for v in vars(m).values()]
    kernels = [v for v in kernels if isinstance(v, launches._Kernel)]
    assert len(kernels) > 4
    assert all(kernel.run.__code__.co_name == "run" for kernel in kernels)
    assert not any(kernel.run == kernel._kernel.run for kernel in kernels)
    with profile() as seen:
        trained(short, x)
    assert {event.name for event in seen.events()} >= {k.fn.__name__ for k in kernels}
    for kernel in kernels:
        kernel.run = kernel._kernel.run
    own = trained(short, x)
    assert all(torch.equal(one, other) for one, other in zip(found, own, strict=True))
