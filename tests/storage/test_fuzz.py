"""Hostile datasets: random bytes, flipped bits, absurd sizes, paths that lead elsewhere. An error, and bounded memory.

The writer's own bytes are the start; hypothesis damages them. Everything runs below a limit on the address space of a
child process, in which opening a file outside the dataset, or running anything, fails the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import DatasetError, TraceDataset, verify_dataset
from storage.manifest import Manifest
from storage.store import LocalStore
from tests.storage.builders import commit, make_traces

FILES = (
    "_dataset.json",
    "_retention.json",
    "_index.arrow",
    "_annotations/step-000000000/000000000.json",
    "step-000000000/_manifest.json",
    "step-000000000/part-00000.parquet",
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz")
    commit(path, 0)
    dataset = TraceDataset(path)
    dataset.annotate(0, {"run/0/0/0": {"reward": 0.0}})
    dataset.build_index()
    dataset.keep_from(0)
    return path


def readings(root: Path) -> list[Any]:
    """Every way of reading gives the truth or a DatasetError that names a file; verify always returns."""
    results: list[Any] = []
    for read in (
        lambda: list(TraceDataset(root)),
        lambda: [TraceDataset(root)["run/0/2/0"]],
        lambda: TraceDataset(root).to_arrow(columns=["sample_id"])["sample_id"].to_pylist(),
    ):
        try:
            results.append(read())
        except (DatasetError, KeyError) as error:
            assert str(root) in str(error)  # noqa: PT017
    assert isinstance(verify_dataset(root), list)
    return results


def check(root: Path, name: str, data: bytes) -> None:
    path, good = root / name, (root / name).read_bytes()
    try:
        path.write_bytes(data)
        for result in readings(root):
            for item in result:
                if not isinstance(item, str) and name.endswith(".parquet"):
                    expected = make_traces(0)[int(item.sample_id.split("/")[2])]
                    assert item.completion_ids == expected.completion_ids
                    assert (item.routed_experts == expected.routed_experts).all()
    finally:
        path.write_bytes(good)


@FUZZ
@given(name=st.sampled_from(FILES), data=st.binary(max_size=400))
def test_random_bytes(root: Path, name: str, data: bytes) -> None:
    check(root, name, data)


@FUZZ
@given(name=st.sampled_from(FILES), data=st.data())
def test_flipped_and_missing_bytes(root: Path, name: str, data: st.DataObject) -> None:
    bad = bytearray((root / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    check(root, name, bytes(bad[: data.draw(st.integers(0, len(bad)))] if data.draw(st.booleans()) else bad))


@FUZZ
@given(data=st.data())
def test_a_damaged_footer(root: Path, data: st.DataObject) -> None:
    """Sizes, offsets and counts of the Parquet metadata, where a wrong byte can ask for any amount of memory."""
    bad = bytearray((root / FILES[-1]).read_bytes())
    footer = len(bad) - 8 - int.from_bytes(bad[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(footer, len(bad) - 1))] = data.draw(st.sampled_from([0, 0x7F, 0x80, 0xFF, 1]))
    check(root, FILES[-1], bytes(bad))


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A dataset whose step is in the archive layout, and its part."""
    path = tmp_path_factory.mktemp("archived")
    commit(path, 0)
    (pack,) = TraceDataset(path).archive(before=1)
    return path, f"{pack}/part-00000.parquet"


@settings(FUZZ, max_examples=60)
@given(data=st.data())
def test_flipped_and_missing_bytes_of_an_archive(archived: tuple[Path, str], data: st.DataObject) -> None:
    root, part = archived
    bad = bytearray((root / part).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    check(root, part, bytes(bad[: data.draw(st.integers(0, len(bad)))] if data.draw(st.booleans()) else bad))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("../../etc/passwd"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["path", "rows", "x"]), inner),
    max_leaves=6,
)


@FUZZ
@given(field=st.sampled_from(["step", "steps", "samples", "files", "format_version"]), value=JSON)
def test_any_json_in_a_manifest(root: Path, field: str, value: Any) -> None:
    manifest = json.loads((root / FILES[4]).read_text())
    check(root, FILES[4], json.dumps(manifest | {field: value}).encode())


@FUZZ
@given(field=st.sampled_from(["path", "bytes", "sha256", "rows", "sample_ids"]), value=JSON)
def test_any_json_in_an_entry(root: Path, field: str, value: Any) -> None:
    manifest = json.loads((root / FILES[4]).read_text())
    manifest["files"][0][field] = value
    check(root, FILES[4], json.dumps(manifest).encode())


@given(name=st.sampled_from(["../x", "a/../../x", "/etc/passwd", "..", "step-000000000/../../x"]))
def test_no_name_leads_out_of_the_dataset(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    store = LocalStore(Path("/nowhere/traces"))
    for use in (store.read, store.open, store.size, store.names, store.remove):
        with pytest.raises(ValueError, match="leads out of the dataset"):
            use(name)


def test_deep_and_huge_json_is_refused(root: Path) -> None:
    for text in ("[" * 100_000, '{"a":' * 50_000, '{"format_version": "1", "step": 1' + "0" * 5000 + "}"):
        with pytest.raises((ValueError, RecursionError, KeyError)):
            Manifest.from_json(text)
        check(root, FILES[4], text.encode())


LIMITED = """
import resource, sys
from pathlib import Path
import storage, pyarrow.parquet, pyarrow.dataset
from storage import DatasetError, TraceDataset, verify_dataset
root, outside = Path(sys.argv[1]), []
(name,) = root.glob("*-*/part-00000.parquet")
good = name.read_bytes()
footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")

def watch(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "exec", "pickle.find_class") and watching:
        outside.append((event, str(arguments)[:80]))
    if event == "open" and watching and isinstance(arguments[0], str) and not arguments[0].startswith(str(root)):
        outside.append((event, arguments[0]))

watching = False
sys.addaudithook(watch)
list(TraceDataset(root)); verify_dataset(root)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20),) * 2)
watching = True
for position in range(footer, len(good), 7):
    for value in (0xFF, 0x7F):
        bad = bytearray(good)
        bad[position : position + 4] = bytes([value] * 4)
        name.write_bytes(bad)
        try:
            list(TraceDataset(root))
            TraceDataset(root).to_arrow()
        except DatasetError:
            pass
        verify_dataset(root)
watching = False
print(outside)
"""


@pytest.mark.full
@pytest.mark.parametrize("layout", ["rows", "archive"])
def test_absurd_sizes_cost_no_memory_and_nothing_outside_is_opened(tmp_path: Path, layout: str) -> None:
    commit(tmp_path, 0)
    if layout == "archive":
        TraceDataset(tmp_path).archive(before=1)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"}
    out = subprocess.check_output([sys.executable, "-c", LIMITED, str(tmp_path)], text=True, env=environment)
    assert out == "[]\n"
