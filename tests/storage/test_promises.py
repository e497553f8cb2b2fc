"""What a dataset says of the engines that wrote it: are recomputed rows frozen, and in which order are a row's ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from storage import DamagedDataError, RoutingSpec, SpecMismatchError, TraceDataset, TraceWriter
from storage.promises import Promises

SPEC = RoutingSpec.uniform(num_sites=2, num_experts=8, top_k=2)
VLLM = Promises(frozen_recompute=False, slot_order="differs")


def written(root: Path) -> dict:
    return json.loads((root / "_dataset.json").read_text())


def test_only_what_is_weaker_than_our_own_engine_is_written(tmp_path: Path):
    TraceWriter(tmp_path / "own", SPEC).close()
    TraceWriter(tmp_path / "vllm", SPEC, promises=VLLM).close()
    assert written(tmp_path / "own").keys() == {"format_version", "routing_spec"}
    assert written(tmp_path / "vllm").items() >= {"frozen_recompute": False, "slot_order": "differs"}.items()
    own, vllm = TraceDataset(tmp_path / "own"), TraceDataset(tmp_path / "vllm")
    assert (own.frozen_recompute, own.slot_order) == (True, "transformers")
    assert (vllm.frozen_recompute, vllm.slot_order) == (False, "differs")
    assert "| order of a row's ids | differs |" in (tmp_path / "vllm" / "README.md").read_text()


@pytest.mark.parametrize(
    ("promises", "message"),
    [
        (Promises(frozen_recompute=False), "promises routes that survive recomputation"),
        (
            Promises(slot_order="differs"),
            "ids in transformers' order, and this engine's order differs; write",
        ),
        (Promises(slot_order="unmeasured"), "this engine's order was never compared"),
    ],
)
def test_a_dataset_that_promises_more_than_the_writer_refuses_it_and_one_that_promises_less_does_not(
    tmp_path: Path, promises: Promises, message: str
):
    TraceWriter(tmp_path, SPEC).close()
    with pytest.raises(SpecMismatchError, match=message):
        TraceWriter(tmp_path, SPEC, promises=promises)
    TraceWriter(tmp_path / "weaker", SPEC, promises=VLLM).close()
    TraceWriter(tmp_path / "weaker", SPEC).close()
    assert TraceDataset(tmp_path / "weaker").slot_order == "differs"


def test_an_order_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="slot_order is 'sorted', need one of"):
        Promises(slot_order="sorted")  # type: ignore[arg-type]
    TraceWriter(tmp_path, SPEC).close()
    (tmp_path / "_dataset.json").write_text(json.dumps(written(tmp_path) | {"slot_order": "sorted"}))
    with pytest.raises(DamagedDataError, match=r"_dataset\.json.*slot_order is 'sorted'"):
        TraceDataset(tmp_path)
