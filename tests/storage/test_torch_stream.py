"""TraceStream: every sample exactly once over ranks and workers, and a resume that continues as if never stopped."""

from __future__ import annotations

import tracemalloc
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from storage import TraceDataset, TraceWriter
from storage.manifest import Manifest, read_manifest
from storage.order import Mixed, ReaderOrder
from tests.storage.builders import SPEC, make_trace, make_traces

COUNTS = (40, 3, 17, 16)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    root = tmp_path_factory.mktemp("stream")
    with TraceWriter(root, SPEC, max_part_bytes=12_000) as writer:
        for step, count in enumerate(COUNTS):
            writer.write([make_trace(step, sample) for sample in range(count)], step=step)
            writer.commit(step)
    return TraceDataset(root)


def ids(traces) -> list[str]:
    return [trace.sample_id for trace in traces]


def one_by_one(traces):
    return traces[0].sample_id


def test_without_a_buffer_it_is_the_order_of_the_dataset(dataset: TraceDataset) -> None:
    assert list(dataset.torch()) == list(dataset)
    assert list(dataset.torch(step=[2, 0])) == list(dataset.iter([2, 0]))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_cover_every_sample_once(dataset: TraceDataset, world_size: int, workers: int) -> None:
    seen: list[str] = []
    for rank in range(world_size):
        stream = dataset.torch(rank=rank, world_size=world_size, shuffle_buffer=8, seed=3)
        loader = DataLoader(stream, batch_size=1, num_workers=workers, collate_fn=one_by_one)
        seen += list(loader)
    assert len(seen) == sum(COUNTS)
    assert sorted(seen) == sorted(ids(dataset))


def test_the_order_is_the_one_written_out_with_numpy(dataset: TraceDataset) -> None:
    all_ids = ids(dataset)
    starts = np.cumsum([0, *COUNTS])
    units = [list(range(a, min(a + 16, e))) for s, e in pairwise(starts) for a in range(s, e, 16)]
    mine = [units[i] for i in np.random.default_rng([3, 0]).permutation(len(units))][1::2]
    queue = [sample for unit in mine for sample in unit]
    rng, expected, held = np.random.default_rng([3, 0, 1]), [], queue[:8]
    for sample in queue[8:]:
        slot = rng.integers(8)
        expected.append(held[slot])
        held[slot] = sample
    expected += [held[slot] for slot in rng.permutation(8)]
    stream = dataset.torch(rank=1, world_size=2, shuffle_buffer=8, seed=3)
    assert ids(stream) == [all_ids[sample] for sample in expected]


def test_epochs_and_seeds_differ_and_repeat(dataset: TraceDataset) -> None:
    stream = dataset.torch(shuffle_buffer=8, seed=1)
    first, second = ids(stream), ids(stream)
    assert first != second
    stream.set_epoch(0)
    assert ids(stream) == first
    assert ids(dataset.torch(shuffle_buffer=8, seed=2)) != first


@pytest.mark.parametrize("taken", [0, 1, 7, 30, 75, 76])
@pytest.mark.parametrize("buffer", [0, 1, 8, 500])
def test_a_resumed_stream_goes_on_where_it_was(dataset: TraceDataset, taken: int, buffer: int) -> None:
    whole = list(dataset.torch(shuffle_buffer=buffer, seed=5))
    stream = dataset.torch(shuffle_buffer=buffer, seed=5)
    iterator = iter(stream)
    begun = [next(iterator) for _ in range(taken)]
    resumed = dataset.torch(shuffle_buffer=buffer, seed=5)
    resumed.load_state_dict(stream.state_dict())
    assert begun + list(resumed) == whole


def test_a_state_of_another_stream_is_refused(dataset: TraceDataset) -> None:
    state = dataset.torch(shuffle_buffer=8).state_dict()
    with pytest.raises(ValueError, match=r"another stream; \(in the state, here\): \{'seed': \(0, 1\)\}"):
        dataset.torch(shuffle_buffer=8, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match=r"'readers': \(1, 2\)"):
        dataset.torch(shuffle_buffer=8, world_size=2).load_state_dict(state)


def test_a_state_of_a_release_with_another_order_is_refused(dataset: TraceDataset) -> None:
    stream = dataset.torch(shuffle_buffer=8)
    state = stream.state_dict() | {"epoch": 3, "yielded": 5}
    assert state.pop("order") == 2  # the first order had no number
    for old, number in ((state, "None"), (state | {"order": 1}, "1")):
        with pytest.raises(ValueError, match=rf"another order \({number}, here 2\).*set_epoch\(3\) starts that epoch"):
            stream.load_state_dict(old)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"rank": 2, "world_size": 2}, r"rank 2 is not in \[0, 2\)"), ({"shuffle_buffer": -1}, "shuffle_buffer is -1")],
)
def test_arguments_that_make_no_sense(dataset: TraceDataset, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset.torch(**arguments)


def test_annotations_are_joined(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC) as writer:
        writer.write(make_traces(0), step=0)
        writer.commit(0)
    dataset = TraceDataset(tmp_path)
    dataset.annotate(0, {"run/0/2/0": {"reward": 4.0}})
    assert [trace.reward for trace in dataset.torch()] == [None, None, 4.0, None, None]


def order(counts: list[int], **chosen: int | None) -> list[tuple[int, int]]:
    of_reader = ReaderOrder(counts, **{"reader": 0, "readers": 1, "seed": None, "epoch": 0} | chosen)
    return list(of_reader.places(range(len(of_reader))))


def test_the_pieces_by_hand() -> None:
    assert order([20, 0, 3]) == [*((0, number) for number in range(20)), (2, 0), (2, 1), (2, 2)]
    assert order([20, 0, 3], reader=1, readers=2) == [(0, 16), (0, 17), (0, 18), (0, 19)]
    assert order([20, 0, 3], reader=3, readers=4) == order([]) == []
    assert sorted(Mixed(10, 3, np.random.default_rng(0))) == list(range(10))
    assert list(Mixed(5, 1, np.random.default_rng(0))) == [0, 1, 2, 3, 4]
    drawn = Mixed(10, 3, np.random.default_rng(0))
    gone = {next(drawn) for _ in range(4)}
    assert list(drawn.left()) == sorted(set(range(10)) - gone)


def test_the_order_of_ten_million_samples_takes_a_few_bytes_for_sixteen_of_them() -> None:
    tracemalloc.start()
    of_reader = ReaderOrder([1000] * 10_000, reader=3, readers=8, seed=0, epoch=0)
    assert next(of_reader.places([len(of_reader) - 1]))[1] < 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(of_reader) == pytest.approx(10_000_000 / 8, rel=0.01)
    assert peak < 12e6  # the permutation of 630,000 blocks alone is 5 MB


def write_steps(root: Path, samples: int, steps: int = 8) -> None:
    with TraceWriter(root, SPEC) as writer:
        for step in range(steps):
            writer.write(make_traces(step, samples), step=step)
            writer.commit(step)


def test_a_stream_that_jumps_between_many_steps_reads_each_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.catalog.MANIFESTS_IN_MEMORY", 2)
    write_steps(tmp_path, samples=40)
    read: list[str] = []

    def noted(store: Any, folder: str) -> Manifest:
        read.append(folder)
        return read_manifest(store, folder)

    monkeypatch.setattr("storage.catalog.read_manifest", noted)
    stream = TraceDataset(tmp_path).torch(shuffle_buffer=4)
    first, second = ids(stream), ids(stream)
    assert sorted(first) == sorted(second) == sorted(trace.sample_id for s in range(8) for trace in make_traces(s, 40))
    assert sum(a.split("/")[1] != b.split("/")[1] for a, b in pairwise(first)) > 16  # it does jump
    assert sorted(read) == [f"step-{step:09d}" for step in range(8)]


def test_a_step_that_was_dropped_is_named(tmp_path: Path) -> None:
    write_steps(tmp_path, samples=2, steps=3)
    dataset, begun = TraceDataset(tmp_path), TraceDataset(tmp_path)
    stream = dataset.torch()
    reading = iter(begun.torch())
    assert next(reading).sample_id == "run/0/0/0"
    TraceDataset(tmp_path).keep_from(2)
    dataset.refresh()
    with pytest.raises(ValueError, match=f"step 0 of {tmp_path} was dropped while it was read; refresh"):
        list(stream)
    with pytest.raises(ValueError, match=f"step 1 of {tmp_path} was dropped while it was read; refresh"):
        list(reading)


def test_a_stream_keeps_no_more_manifests_than_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.catalog.MANIFESTS_IN_MEMORY", 2)
    write_steps(tmp_path, samples=2)
    read: list[weakref.ref] = []

    def noted(*arguments: Any) -> Manifest:
        manifest = read_manifest(*arguments)
        read.append(weakref.ref(manifest))
        return manifest

    monkeypatch.setattr("storage.catalog.read_manifest", noted)
    alive = []
    for _ in TraceDataset(tmp_path).torch(shuffle_buffer=2):
        alive.append(sum(manifest() is not None for manifest in read))
    assert (len(alive), len(read) >= 8, max(alive) <= 3) == (16, True, True)


def test_a_resumed_stream_goes_on_where_it_was_when_the_dataset_was_compacted(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, SPEC, max_part_bytes=12_000) as writer:
        for step, count in enumerate(COUNTS):
            writer.write([make_trace(step, sample) for sample in range(count)], step=step)
            writer.commit(step)
    whole = list(TraceDataset(tmp_path).torch(shuffle_buffer=8, seed=5))
    stream = TraceDataset(tmp_path).torch(shuffle_buffer=8, seed=5)
    iterator = iter(stream)
    begun = [next(iterator) for _ in range(30)]
    TraceDataset(tmp_path).compact()
    resumed = TraceDataset(tmp_path).torch(shuffle_buffer=8, seed=5)
    resumed.load_state_dict(stream.state_dict())
    assert begun + list(resumed) == begun + list(iterator) == whole
