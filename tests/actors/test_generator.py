"""The plain Generator, without Ray: what it packs, when it yields, how it stops."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from actors.generator import Generator
from actors.packing import pack
from actors.stored_weights import StoredWeights
from storage.schema import from_table, to_table
from tests.actors.fakes import SPEC, FakeBackend, expected_trace, make_request, make_requests
from tests.actors.waiting import eventually


def started(journal: Path) -> int:
    return len(list(journal.glob("start-*")))


def loaded(**options) -> Generator:
    generator = Generator("model", options, FakeBackend)
    generator.load()
    return generator


def test_every_request_comes_back_once_and_unchanged() -> None:
    requests = make_requests(prompts=5, samples=3)
    traces = {t.sample_id: t for table in loaded().generate(requests) for t in from_table(table)}
    assert len(traces) == 15
    for request in requests:
        assert traces[request.sample_id].completion_ids == expected_trace(request).completion_ids
        assert (traces[request.sample_id].routed_experts == expected_trace(request).routed_experts).all()


def test_what_finished_while_the_consumer_was_away_travels_in_one_table(journal: Path) -> None:
    tables = loaded(journal=str(journal)).generate(make_requests(prompts=20, samples=1))
    first = next(tables)
    assert eventually(lambda: started(journal) == 20)
    time.sleep(0.5)
    later = [table.num_rows for table in tables]  # none when a busy machine finished all before the first look
    assert len(later) <= 1
    assert first.num_rows + sum(later) == 20


def test_a_finished_trace_does_not_wait_for_a_slow_neighbour() -> None:
    requests = [make_request("run/0/0/0"), make_request("run/0/0/1", milliseconds=60_000)]
    begin = time.monotonic()
    tables = loaded().generate(requests)
    assert next(tables)["sample_id"].to_pylist() == ["run/0/0/0"]
    tables.close()
    assert time.monotonic() - begin < 5


def test_a_table_closes_at_the_trace_that_reaches_the_limit(journal: Path) -> None:
    backend = FakeBackend("model", journal=str(journal))
    one = 5 * 2 * 2 + 16 * 6  # 5 rows of 2 sites x 2 one-byte ids, and 6 tokens
    tables = pack(backend.stream(make_requests(prompts=30, samples=1)), SPEC, limit_bytes=3 * one - 50)
    next(tables)
    assert eventually(lambda: started(journal) == 30)
    time.sleep(0.5)
    sizes = [table.num_rows for table in tables]
    assert set(sizes[:-1]) == {3}
    assert 1 <= sizes[-1] <= 3


def test_closing_early_aborts_the_request_that_runs_and_starts_no_other(journal: Path) -> None:
    requests = [make_request("run/0/0/0"), *make_requests(prompts=5, samples=1, step=1, milliseconds=60_000)]
    tables = loaded(journal=str(journal)).generate(requests)
    next(tables)
    assert eventually(lambda: started(journal) == 2)
    tables.close()
    assert eventually(lambda: (journal / "abort-run_1_0_0").exists())
    time.sleep(0.1)
    assert started(journal) == 2


def test_closing_early_leaves_a_stream_of_the_same_samples_alone(journal: Path) -> None:
    requests = [make_request("run/0/0/0"), make_request("run/0/0/1", milliseconds=300)]
    generator = loaded()
    left, kept = generator.generate(requests), generator.generate(requests)
    next(left), next(kept)
    left.close()
    (trace,) = from_table(next(kept))
    assert (trace.sample_id, trace.finish_reason, len(trace.completion_ids)) == ("run/0/0/1", "length", 4)


def test_a_table_is_encoded_once_for_all_its_traces(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counting(traces, spec):
        encoded.append(len(traces))
        return to_table(traces, spec)

    monkeypatch.setattr("actors.packing.to_table", counting)
    tables = loaded(journal=str(journal)).generate(make_requests(prompts=20, samples=1))
    sizes = [next(tables).num_rows]
    assert eventually(lambda: started(journal) == 20)
    time.sleep(0.5)
    sizes += [table.num_rows for table in tables]
    assert encoded == sizes
    assert len(sizes) <= 2
    assert sum(sizes) == 20


def test_stopped_ends_the_stream_while_it_waits(journal: Path) -> None:
    begin = time.monotonic()
    request = make_request("run/0/0/0", milliseconds=60_000)
    generator = loaded(journal=str(journal))
    assert list(generator.generate([request], stopped=lambda: time.monotonic() > begin + 0.2)) == []
    assert eventually(lambda: (journal / "abort-run_0_0_0").exists())


def test_an_error_comes_after_what_finished_before_it() -> None:
    tables = loaded(fail_at="run/0/2/0").generate(make_requests(prompts=3, samples=1))
    ids: list[str] = []
    with pytest.raises(ValueError, match="sample run/0/2/0 hit a bad kernel"):
        ids.extend(sample_id for table in tables for sample_id in table["sample_id"].to_pylist())
    assert ids == ["run/0/0/0", "run/0/1/0"]


def test_new_weights_reach_later_samples_and_a_freshly_loaded_backend() -> None:
    request = make_request("run/0/0/0")
    generator = loaded()
    stored = cast(StoredWeights, SimpleNamespace(tensors=lambda: {"w": 1}))
    generator.stage_weights(stored, 3, force=False, check_finite=False)
    generator.apply_weights("wait", "keep")
    fresh = Generator("model", {}, FakeBackend)
    assert fresh.load(stored, 3).spec == SPEC
    for one in (generator, fresh):
        (trace,) = from_table(next(one.generate([request])))
        assert trace.weight_version == 3
        assert trace.completion_ids == expected_trace(request, version=3).completion_ids


def test_before_load_it_says_so() -> None:
    generator = Generator("some/model", {}, FakeBackend)
    assert generator.health()["loaded"] is False
    with pytest.raises(RuntimeError, match="'some/model' has no model yet: call load"):
        generator.generate([])
