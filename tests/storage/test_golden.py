"""A dataset as an earlier release wrote it: the files in `golden/` never change, and every release reads these values.

It holds an archive of steps 0 and 1, a pack of steps 2 and 3, step 4 in a folder of its own, annotations, and two-byte
ids of two routers of which the second chooses one expert.
"""

from __future__ import annotations

import shutil
import struct
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from storage import RoutingSpec, Site, Trace, TraceDataset, TraceWriter, verify_dataset

GOLDEN = Path(__file__).parent / "golden"
SPEC = RoutingSpec((Site("layers.0.gate", 0, 300, 2), Site("layers.2.gate", 2, 4, 1)))
IDS = [[[299, 1], [3, 0]], [[256, 0], [2, 0]], [[7, 298], [1, 0]]]


def trace(step: int, sample: int, **fields: Any) -> Trace:
    values: dict[str, Any] = {
        "sample_id": f"run/{step}/0-0/{sample}",
        "step": step,
        "prompt_ids": [5, 151_935],
        "completion_ids": [9 + step, 2],
        "logprobs": [-0.5, -1.25 * (sample + 1)],
        "routed_experts": IDS,
        "finish_reason": "stop",
    }
    return Trace(**values | fields)


FULL = trace(
    4,
    0,
    raw_logprobs=[-0.75, -1.5],
    routed_experts=[IDS[1], [[0, 0], [0, 0]]],
    route_start=1,
    route_valid=[True, False],
    weight_versions=[(3, 0, 2), (4, 2, 3)],
    finish_reason="length",
    stop_reason="</s>",
    seed=11,
    sampling_params={"temperature": 0.5, "max_tokens": 2},
    text="ä\n",
    reward=0.25,
    metadata={"answer": 42},
    top_ids=[[9, 1], [2, 3]],
    top_logprobs=[[-0.5, -np.inf], [-1.25, -2.0]],
    raw_top_logprobs=[[-0.75, -8.0], [-1.5, -3.0]],
    prompt_logprobs=[-4.0],
    raw_prompt_logprobs=[-4.5],
    prompt_top_ids=[[151_935, 0]],
    prompt_top_logprobs=[[-4.0, -5.0]],
    raw_prompt_top_logprobs=[[-4.5, -5.5]],
    model="5c0f5c0f",
    gate_weights=[[[0.75, 0.25], [1.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]],
    seconds=1.5,
)
BARE = trace(4, 1, routed_experts=None, completion_ids=[], logprobs=[], finish_reason="abort", weight_version=4)
WRITTEN = [trace(0, 0), trace(0, 1), trace(1, 0), trace(2, 0, weight_version=2), trace(3, 0), trace(3, 1), FULL, BARE]
FACTS = {2: {"run/2/0-0/0": {"reward": 1.0, "judge": "v2"}}, 4: {"run/4/0-0/1": {"reward": -1.0}}}


def annotated() -> list[Trace]:
    read = list(WRITTEN)
    read[3] = trace(2, 0, weight_version=2, reward=1.0, metadata={"judge": "v2"})
    read[7] = trace(
        4, 1, routed_experts=None, completion_ids=[], logprobs=[], finish_reason="abort", weight_version=4, reward=-1.0
    )
    return read


def write(root: Path) -> None:
    """How it was written."""

    def commit(*steps: int) -> None:
        with TraceWriter(root, SPEC, run={"model": "example"}) as writer:
            for step in steps:
                writer.write([trace for trace in WRITTEN if trace.step == step], step=step)
                writer.commit(step)

    commit(0, 1)
    TraceDataset(root).archive(before=2)
    commit(2, 3)
    TraceDataset(root).compact()
    commit(4)
    for step, facts in FACTS.items():
        TraceDataset(root).annotate(step, facts)
    TraceDataset(root).keep_from(0)


def check(root: Path) -> None:
    dataset = TraceDataset(root)
    assert (dataset.spec, dataset.steps, len(dataset), dataset.verify()) == (SPEC, [0, 1, 2, 3, 4], 8, [])
    assert list(dataset) == annotated()
    assert dataset["run/4/0-0/0"].seconds == 1.5
    assert dataset.to_arrow(columns=["reward"])["reward"].to_pylist() == [None, None, None, 1.0, None, None, 0.25, -1.0]


DIGESTS = {
    "pack-000000000-000000001-10760a25": "b72fc34d164a810f1acbb0435599f19bce46f53e1747576876032fea9dccd970",
    "pack-000000002-000000003-ca09671a": "d7a76562be1f40ae6b82ef3e23682d7621a00536631466a874ce964f6081f0d6",
    "step-000000004": "6fa93b89387e1aa96282a65b72aee382f20d3a2e029048b7a96c0ee034f96688",
}
TOKEN_MAJOR = [b"\x2b\x01\x01\0\x03\0\0\0", b"\0\x01\0\0\x02\0\0\0", b"\x07\0\x2a\x01\x01\0\0\0"]
SITE_MAJOR = [b"\x2b\x01\x01\0\0\x01\0\0\x07\0\x2a\x01", b"\x03\0\0\0\x02\0\0\0\x01\0\0\0"]


def rows(folder: str) -> list[dict[str, Any]]:
    """Of its part, as any program reads it."""
    part = GOLDEN / folder / "part-00000.parquet"
    assert sha256(part.read_bytes()).hexdigest() == DIGESTS[folder]
    return pq.read_table(part).to_pylist()


def test_every_value_is_read(tmp_path: Path) -> None:
    check(GOLDEN)
    copy = shutil.copytree(GOLDEN, tmp_path / "golden")
    with TraceWriter(copy, SPEC) as writer:
        assert writer.next_step() == 5
        writer.write([trace(5, 0)], step=5)
        writer.commit(5)
    assert list(TraceDataset(copy)) == [*annotated(), trace(5, 0)]
    assert verify_dataset(copy) == []


def test_the_bytes_of_its_columns() -> None:
    archive, pack, step = (rows(folder) for folder in DIGESTS)
    assert [row["routed_experts_by_site"] for row in archive] == [SITE_MAJOR] * 3
    assert [row["routed_experts"] for row in pack] == [TOKEN_MAJOR] * 3
    full, bare = step
    assert full["routed_experts"] == [TOKEN_MAJOR[1], bytes(8)]
    # float16 little-endian: 0.75 is 0x3a00, 0.25 is 0x3400, 1.0 is 0x3c00
    assert full["gate_weights"] == [b"\x00\x3a\x00\x34\x00\x3c\x00\x00", bytes(8)]
    assert (full["stop_reason"], full["sampling_params"], full["metadata"]) == (
        '"</s>"', '{"temperature": 0.5, "max_tokens": 2}', '{"answer": 42}'
    )  # fmt: skip
    assert (full["weight_version"], full["weight_versions"]) == (
        4, [{"version": 3, "row_start": 0, "row_end": 2}, {"version": 4, "row_start": 2, "row_end": 3}]
    )  # fmt: skip
    assert (full["top_logprobs"], full["prompt_top_ids"]) == ([-0.5, -np.inf, -1.25, -2.0], [151_935, 0])
    assert (bare["routed_experts"], bare["completion_ids"], bare["reward"]) == (None, [], None)


def test_its_checksums() -> None:
    archive, _, _ = (rows(folder) for folder in DIGESTS)
    ids = [299, 1, 3, 0, 256, 0, 2, 0, 7, 298, 1, 0]
    expected = [
        zlib.crc32(struct.pack("<2i2i2f12H", 5, 151_935, 9 + step, 2, -0.5, last, *ids))
        for step, last in ((0, -1.25), (0, -2.5), (1, -1.25))
    ]
    assert [row["crc32"] for row in archive] == expected == [1088295482, 2740209513, 1784849074]


def test_what_is_written_today_is_read_alike(tmp_path: Path) -> None:
    write(tmp_path)
    check(tmp_path)
    for name in ("_dataset.json", "_retention.json", *(f"_annotations/step-00000000{n}/000000000.json" for n in FACTS)):
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes(), name
