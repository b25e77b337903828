"""What waits in host memory: the operators, and that no copy meets another use of its memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hot_compile.errors import OptionError
from hot_compile.runtime import host_copies

hot = torch.ops.hot
CPU = torch.device("cpu")


def test_operators_copy_and_keep_their_contracts():
    x = torch.randn(4, 6)
    parts = [x.t(), x[:, 1], torch.arange(5)]
    kept = hot.to_host(parts, 1)
    coming = hot.fetch(kept, CPU, [])
    back = hot.arrive(coming, kept, CPU, [coming])
    for part, there, again in zip(parts, kept, back, strict=True):
        assert torch.equal(part, there)
        assert torch.equal(part, again)
        assert len({t.untyped_storage().data_ptr() for t in (part, there, again)}) == 3
    assert kept[0].stride() == back[0].stride() == parts[0].stride()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(hot.to_host, (parts, 0), test_utils=checks)
    torch.library.opcheck(hot.fetch, (kept, CPU, []), test_utils=checks)
    torch.library.opcheck(hot.arrive, (coming, kept, CPU, []), test_utils=checks)


@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_coming_arrives(compiled, monkeypatch):
    """It travels with a tensor, through compiled code as well."""
    monkeypatch.setattr(host_copies, "_start", lambda parts, device: Coming(parts))

    def there_and_back(x):
        kept = hot.to_host([x, x + 1], 0)
        coming = hot.fetch(kept, x.device, [])
        return hot.arrive(coming, kept, x.device, [hot.fetch(kept[:1], x.device, [x])])

    x = torch.randn(3, 5)
    torch._dynamo.reset()
    one, two = (torch.compile(there_and_back) if compiled else there_and_back)(x)
    assert torch.equal(one, x * 2)
    assert torch.equal(two, (x + 1) * 2)


class Coming:
    def __init__(self, parts):
        self.parts = parts

    def take(self):
        return [part * 2 for part in self.parts]


# A device of which it is known what is ordered behind what: streams with vector clocks, and an
# allocator that gives memory to its stream again as soon as the host lets go of it.


class Stream:
    device = torch.device("cuda", 0)

    def __init__(self):
        self.clock = {self: 0}

    def work(self):
        self.clock[self] += 1
        return self.clock[self]

    def record_event(self):
        return dict(self.clock)

    def wait_event(self, event):
        for stream, count in event.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


class Memory:
    """A tensor; host memory belongs to no stream, and is given to nobody while copies run."""

    def __init__(self, machine, device, home):
        self.machine, self.device, self.home = machine, device, home
        free = machine.free.setdefault(home, [])
        self.block = free.pop() if free and home else {"uses": [], "content": None}
        weakref.finalize(self, free.append, self.block)

    def use(self, writes):
        stream = self.machine.stream
        for other, count, wrote in self.block["uses"]:
            ordered = stream.clock.get(other, 0) >= count
            assert ordered or not (writes or wrote), "two streams meet in one place"
        self.block["uses"].append((stream, stream.work(), writes))

    def write(self, content):
        self.use(True)
        self.block["content"] = content

    def read(self):
        self.use(False)
        return self.block["content"]

    def copy_(self, other, non_blocking=False):
        self.write(other.read())


class Machine:
    def __init__(self, monkeypatch, hooks=None, capturing=False):
        self.free, self.stream, self.synchronized = {}, Stream(), 0
        self.step, self.inward = self.stream, Stream()
        self.lanes = [Stream() for _ in range(host_copies.LANES)]
        for lane in self.lanes:
            lane.synchronize = self.synchronize
        cuda = SimpleNamespace(
            current_stream=lambda device: self.stream,
            stream=lambda stream: Entered(self, stream),
            is_current_stream_capturing=lambda: capturing,
        )
        autograd = SimpleNamespace(_top_saved_tensors_default_hooks=lambda _: hooks)
        stub = SimpleNamespace(
            cuda=cuda,
            _C=SimpleNamespace(_autograd=autograd),
            empty_like=self.empty_like,
            zeros=torch.zeros,
            uint8=torch.uint8,
        )
        monkeypatch.setattr(host_copies, "torch", stub)
        monkeypatch.setattr(host_copies, "_outward", lambda device, lane: self.lanes[lane])
        monkeypatch.setattr(host_copies, "_inward", lambda device: self.inward)

    def synchronize(self):
        self.synchronized += 1

    def empty_like(self, other, device=None, pin_memory=False):
        device = other.device if device is None else device
        return Memory(self, device, None if device.type == "cpu" else self.stream)

    def made(self, content):
        """What a kernel of the step's writes."""
        memory = Memory(self, Stream.device, self.stream)
        memory.write(content)
        return memory

    def forward(self, count):
        kept = []
        for number in range(count):
            parts = [self.made((number, part)) for part in range(2)]
            kept.append(host_copies._to_host(parts, number % host_copies.LANES))
            for part in parts:
                part.write("used again by Inductor")
            del parts, part
            self.made("another tensor's")
        return kept

    def backward(self, kept, fails_at=None):
        """As ``store`` puts it: the next is fetched before one is waited for."""
        order = list(reversed(kept))
        coming = host_copies._fetch(order[0], Stream.device, [])
        seen = []
        for place, parts in enumerate(order):
            following = order[place + 1 : place + 2]
            ahead = [host_copies._fetch(each, Stream.device, []) for each in following]
            if place == fails_at:
                raise KeyboardInterrupt
            back = host_copies._arrive(coming, parts, Stream.device, ahead)
            seen.append([part.read() for part in back])
            for part in back:
                part.write("used again by Inductor")
            self.made("a gradient")
            coming = ahead[0] if ahead else None
        return seen[::-1]


class Entered:
    def __init__(self, machine, stream):
        self.machine, self.stream = machine, stream

    def __enter__(self):
        self.before, self.machine.stream = self.machine.stream, self.stream

    def __exit__(self, *_):
        self.machine.stream = self.before


WHOLE = [[(number, part) for part in range(2)] for number in range(6)]


def test_no_copy_meets_another_use_of_its_memory(monkeypatch):
    machine = Machine(monkeypatch)
    for _ in range(3):
        kept = machine.forward(6)
        assert machine.backward(kept) == WHOLE
        assert machine.backward(kept) == WHOLE, "retain_graph"
        lost = machine.forward(3)  # its loss was dropped
        del lost
    assert not machine.synchronized
    assert len(machine.free[machine.step]) <= 6
    assert max(len(machine.free[lane]) for lane in machine.lanes) == 2, "one tensor's parts"


def test_an_exception_leaves_no_copy_behind(monkeypatch):
    machine = Machine(monkeypatch)
    for place in range(6):
        kept = machine.forward(6)
        with pytest.raises(KeyboardInterrupt):
            machine.backward(kept, fails_at=place)
        gc.collect()
        for _ in range(8):
            machine.made("written where copies were under way")
        assert machine.backward(kept) == WHOLE


def test_graphs_side_by_side_share_the_streams(monkeypatch):
    machine = Machine(monkeypatch)
    other = Stream()
    first = machine.forward(6)
    with Entered(machine, other):
        second = machine.forward(6)
    assert machine.backward(first) == WHOLE
    with Entered(machine, other):
        assert machine.backward(second) == WHOLE
        assert machine.backward(second) == WHOLE


def test_a_step_that_changed_streams_copies_again(monkeypatch):
    machine, other = Machine(monkeypatch), Stream()
    (kept,) = machine.forward(1)
    coming = host_copies._fetch(kept, Stream.device, [])
    with Entered(machine, other):
        back = host_copies._arrive(coming, kept, Stream.device, [])
        assert [part.read() for part in back] == WHOLE[0]
    del coming
    machine.made("where the other copies were under way")


def test_hooks_of_saved_tensors_find_them_on_the_host(monkeypatch):
    machine = Machine(monkeypatch, hooks=(len, len))
    machine.forward(2)
    assert machine.synchronized == 2


def test_a_graph_that_is_captured_says_what_to_do(monkeypatch):
    machine = Machine(monkeypatch, capturing=True)
    with pytest.raises(OptionError, match=r"CUDA graph.*peak_budget.*reduce-overhead"):
        machine.forward(1)


def test_the_simulation_finds_what_is_not_ordered(monkeypatch):
    machine = Machine(monkeypatch)
    memory = machine.made(1)
    with Entered(machine, machine.inward), pytest.raises(AssertionError, match="two streams meet"):
        memory.read()
