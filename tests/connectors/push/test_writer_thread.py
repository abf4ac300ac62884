"""The writer thread with a NIXL that answers at once and device events that complete late, without an engine."""

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from connectors.push import wire
from connectors.push.blocks.chunks import StepLayers
from connectors.push.metadata import Computed, Finished, PushMetadata
from connectors.wake import MessageEvent

pytestmark = pytest.mark.vllm

DECODE = wire.Endpoint("D", "host", 1)
FORWARD = object()  # a forward pass
AGENT = "D/0"
SOON_S = 5.0  # a turn of the thread takes milliseconds


class LateEvent:
    """A CUDA event that completes when the test says so. Who waits for it waits too long."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait(10)


@pytest.fixture
def nixl(worker: Any) -> Any:
    return worker.nixl_wrapper


@pytest.fixture
def worker() -> Iterator[Any]:
    """A rank of a prefill engine on one GPU, connected to the decode engine, with its writer thread."""
    push = pytest.importorskip("support_push")  # imports vLLM, which takes seconds

    class Nixl(push.FakeNixl):
        """Every WRITE is done as soon as it is posted."""

        def __init__(self) -> None:
            super().__init__()
            self.arrived: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()

        def check_xfer_state(self, handle: int) -> str:
            return "DONE"

        def get_new_notifs(self) -> dict[str, list[bytes]]:
            arrived = []
            while not self.arrived.empty():
                arrived.append(wire.pack(self.arrived.get()))
            return {AGENT: arrived} if arrived else {}

    class Rank(push.FakeWorker):
        def __init__(self) -> None:
            super().__init__(0, 1)
            self.nixl_wrapper = Nixl()
            self._push_writer_wake = MessageEvent(())
            self.steps: list[LateEvent] = []
            self.know("D", 1, [0])

        def device_event(self) -> LateEvent:
            self.steps.append(LateEvent())
            return self.steps[-1]

    rank = Rank()
    rank._submit(functools.partial(rank._outbound.connected, "D", True, (AGENT,)))
    thread = threading.Thread(target=rank._push_writer_loop, daemon=True)
    thread.start()
    yield rank
    for step in rank.steps:
        step.happened.set()
    rank._push_writer_stop.set()
    rank._push_writer_wake.set()
    thread.join(5)


def soon(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {SOON_S} s"
        time.sleep(0.001)


def register(nixl: Any, stream: str) -> None:
    nixl.arrived.put(wire.Register(stream, f"{stream}-decode", DECODE, [[7, 8]], 32, 30.0, epoch=1))


def begin(worker: Any, stream: str) -> None:
    worker._submit(functools.partial(worker._outbound.start, stream, 2, 32))


def step(worker: Any, *computed: Computed) -> None:
    metadata = PushMetadata()
    metadata.computed.extend(computed)
    worker.start_load_kv(metadata)
    worker.on_computed(metadata)


def layers_of(worker: Any, *names: str, transfer: str = "layer", block_bytes: int = 16_000_000) -> None:
    """Each has a region of its own."""
    worker._layers = StepLayers(one_by_one=transfer == "layer")
    worker._layers.know(names, names, block_bytes)
    worker.num_regions = worker._outbound.regions = len(names)
    worker.dst_region_num_blocks = {engine: [100] * len(names) for engine in "PD"}
    worker.region_group_ids = worker.dst_region_group_ids["D"] = [0] * len(names)


def all_of_a(worker: Any, nixl: Any, **how: bool) -> PushMetadata:
    """Of a step that computes the whole of a, which decode has registered."""
    begin(worker, "a")
    register(nixl, "a")
    metadata = PushMetadata()
    computed = metadata.earlier if how else metadata.computed
    computed.append(Computed("a", 0, 0, ((1, 2),), closed=True, **how))
    return metadata


def step_by_layers(worker: Any, nixl: Any, *layers: str) -> None:
    """A step that computes the whole of a, in which these layers report."""
    metadata = all_of_a(worker, nixl)
    worker.start_load_kv(metadata)
    for layer in layers:
        worker.on_layer(layer, metadata, FORWARD)
    worker.on_computed(metadata)
    soon(worker._events.empty, "the news of a step")


def test_a_finished_write_is_told_while_the_next_step_computes(worker: Any, nixl: Any) -> None:
    for stream in "ab":
        begin(worker, stream)
        register(nixl, stream)
    # Asynchronous scheduling: the step that computes b is launched before the one that computes a has ended.
    step(worker, Computed("a", 0, 0, ((1, 2),), closed=True))
    step(worker, Computed("b", 0, 0, ((3, 4),), closed=True))
    worker.steps[0].happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert len(nixl.posted) == 1
    worker.steps[1].happened.set()
    soon(lambda: (AGENT, wire.Landed("b-decode")) in nixl.sent, "the news that b has landed")


def test_registrations_and_withdrawals_are_answered_while_a_step_computes(worker: Any, nixl: Any) -> None:
    begin(worker, "a")
    register(nixl, "a")
    soon(lambda: worker._outbound.engines() == {"D"}, "the registration of a")
    step(worker, Computed("a", 0, 0, ((1, 2),), closed=True))
    soon(worker._events.empty, "the news of a step")
    nixl.arrived.put(wire.Unregister("a", "a-decode", DECODE))
    soon(lambda: (AGENT, wire.Gone("a-decode", "withdrawn by decode")) in nixl.sent, "the answer to a withdrawal")
    worker.steps[0].happened.set()
    begin(worker, "b")
    register(nixl, "b")
    step(worker, Computed("b", 0, 0, ((3, 4),), closed=True))
    worker.steps[1].happened.set()
    soon(lambda: (AGENT, wire.Landed("b-decode")) in nixl.sent, "the news that b has landed")
    assert len(nixl.posted) == 1  # nothing of a was written once decode had its answer


def test_what_comes_while_the_thread_uses_nixl_is_read_before_it_sleeps(
    worker: Any, nixl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX reads whatever is there when a message is sent: no socket tells of it any more."""
    slept: list[float] = []
    came = threading.Event()
    wait, send = worker._push_writer_wake.wait, nixl.send_notif

    def waits(timeout_s: float) -> bool:
        if came.is_set() and not nixl.arrived.empty():
            slept.append(timeout_s)
        return bool(wait(timeout_s))

    def sends(agent: str, **message: bytes) -> None:
        send(agent, **message)
        if (AGENT, wire.Gone("a-decode", "withdrawn by decode")) in nixl.sent and not came.is_set():
            nixl.arrived.put(wire.Unregister("b", "b-decode", DECODE))
            came.set()

    monkeypatch.setattr(worker._push_writer_wake, "wait", waits)
    nixl.send_notif = sends
    nixl.arrived.put(wire.Unregister("a", "a-decode", DECODE))
    worker._push_writer_wake.set()
    soon(lambda: (AGENT, wire.Gone("b-decode", "withdrawn by decode")) in nixl.sent, "the second answer")
    assert all(timeout_s == 0 for timeout_s in slept)


def test_the_thread_goes_on_after_an_event_that_could_not_be_asked(
    worker: Any, nixl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the engine's thread captures a graph: then no other may ask for events."""

    asked: list[LateEvent] = []

    def refused(event: LateEvent) -> bool:
        asked.append(event)
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as capturing:
        capturing.setattr(LateEvent, "query", refused)
        begin(worker, "a")
        register(nixl, "a")
        step(worker, Computed("a", 0, 0, ((1,),), closed=False))
        soon(worker._events.empty, "the news of a step")
        soon(lambda: len(asked) > 2, "some turns")
    step(worker, Computed("a", 0, 1, ((2,),), closed=True))
    for computed in worker.steps:
        computed.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")


def test_a_whole_prompt_waits_for_no_step(worker: Any, nixl: Any) -> None:
    metadata = all_of_a(worker, nixl, whole=True)
    worker.start_load_kv(metadata)  # an earlier step has computed it; an unrelated one is about to run
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    worker.on_computed(metadata)
    assert not worker.steps and len(nixl.posted) == 1


def test_a_whole_prompt_waits_for_the_drafter(worker: Any, nixl: Any) -> None:
    worker.drafts = True
    worker.start_load_kv(all_of_a(worker, nixl, whole=True))
    assert len(worker.steps) == 1 and not nixl.posted
    worker.steps[0].happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")


def test_each_layer_is_written_once_the_device_has_computed_it(worker: Any, nixl: Any) -> None:
    """`kv.transfer: layer`: the hooks of a step come when its layers are queued on the device, long before they run."""
    layers_of(worker, "first", "second")
    step_by_layers(worker, nixl, "first", "second")
    first, second, _ = worker.steps
    soon(worker._events.empty, "the news of a step")
    assert nixl.posted == []
    first.happened.set()
    soon(lambda: len(nixl.posted) == 1, "the WRITE of the first layer")
    assert [ids.tolist() for ids in nixl.posted[0]] == [[1, 2], [7, 8]] and nixl.sent == []
    second.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert [ids.tolist() for ids in nixl.posted[1]] == [[101, 102], [107, 108]]


def written(nixl: Any) -> list[list[int]]:
    """The local descriptors of each WRITE, of which each region has a hundred."""
    return [mine.tolist() for mine, _ in nixl.posted]


def test_a_layer_that_never_reports_is_all_that_is_written_at_the_end(worker: Any, nixl: Any) -> None:
    """A drafter's pass that was left out or replayed as a graph, a cache that no attention layer writes."""
    layers_of(worker, "first", "indexer", "second")
    step_by_layers(worker, nixl, "first", "second")
    for at, event in enumerate(worker.steps):
        event.happened.set()
        soon(lambda at=at: len(nixl.posted) == at + 1, "the WRITE of a layer")  # type: ignore[misc]
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert written(nixl) == [[1, 2], [201, 202], [101, 102]]


def test_a_drafters_layer_is_written_once_however_many_passes_it_makes(worker: Any, nixl: Any) -> None:
    layers_of(worker, "first", "draft")
    step_by_layers(worker, nixl, "first", "draft", "draft", "draft")
    for event in worker.steps:
        event.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert sorted(sum(written(nixl), [])) == [1, 2, 101, 102]


def test_a_step_that_replays_a_graph_is_written_at_its_end(worker: Any, nixl: Any) -> None:
    """No hook of a layer comes."""
    layers_of(worker, "first", "second")
    step_by_layers(worker, nixl)
    (end,) = worker.steps
    end.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert written(nixl) == [[1, 2, 101, 102]]


def test_a_long_chunk_goes_out_in_groups_of_layers_and_a_short_one_at_once(worker: Any, nixl: Any) -> None:
    """`kv.transfer: auto`. The device computes each group long after its hook came."""
    layers_of(worker, *"abcd", transfer="auto")  # 32 MB, or 3.2 ms
    step_by_layers(worker, nixl, *"abcd")
    *groups, _ = worker.steps
    for at, event in enumerate(groups):
        assert len(nixl.posted) == at and nixl.sent == []
        event.happened.set()
        soon(lambda at=at: len(nixl.posted) == at + 1, "the WRITE of a group")  # type: ignore[misc]
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert written(nixl) == [[1, 2, 101, 102], [201, 202], [301, 302]]


def test_a_short_chunk_goes_out_with_its_last_layer(worker: Any, nixl: Any) -> None:
    """`kv.transfer: auto`. What follows in the step, such as sampling, does not hold it up."""
    layers_of(worker, "first", "second", transfer="auto", block_bytes=2000)
    step_by_layers(worker, nixl, "first", "second")
    last_layer, _ = worker.steps
    last_layer.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert written(nixl) == [[1, 2, 101, 102]]


@pytest.mark.parametrize("drafts", [False, True])
def test_kv_goes_out_before_sampling_unless_a_drafter_follows(worker: Any, nixl: Any, drafts: bool) -> None:
    """The second model runner calls a hook between the forward pass and sampling, and starts loads after both."""
    from connectors.push.connector import PushConnector

    connector = object.__new__(PushConnector)
    connector.connector_worker, worker.drafts = worker, drafts
    connector._connector_metadata = all_of_a(worker, nixl)
    connector.finish_forward()
    assert len(worker.steps) == (0 if drafts else 1)
    connector.start_load_kv(None)  # type: ignore[arg-type]
    connector.wait_for_save()
    (computed,) = worker.steps
    computed.happened.set()
    soon(lambda: (AGENT, wire.Landed("a-decode")) in nixl.sent, "the news that a has landed")
    assert written(nixl) == [[1, 2]]


def test_blocks_are_kept_while_write_reads_them(worker: Any, nixl: Any) -> None:
    """Later steps run and end meanwhile: none of them may be given these blocks."""
    nixl.check_xfer_state = lambda handle: "PROC"
    begin(worker, "a")
    register(nixl, "a")
    step(worker, Computed("a", 0, 0, ((1, 2),), closed=True))
    metadata = PushMetadata()
    metadata.finished.append(Finished("a", ok=True, held=True))
    worker.start_load_kv(metadata)
    worker.steps[0].happened.set()
    soon(lambda: len(nixl.posted) == 1, "the WRITE")
    begin(worker, "b")
    step(worker, Computed("b", 0, 0, ((3, 4),), closed=True))
    worker.steps[1].happened.set()
    soon(lambda: worker._events.empty() and not worker._outbound.awaits_device, "the end of a later step")
    assert not worker.get_transfer_results().finished_sending and nixl.sent == []
    nixl.check_xfer_state = lambda handle: "DONE"
    soon(lambda: worker.get_transfer_results().finished_sending == {"a"}, "the release of a's blocks")
    assert (AGENT, wire.Landed("a-decode")) in nixl.sent
