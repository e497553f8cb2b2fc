"""Each exchange format against arrays and bytes written out by hand."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from storage import RoutingSpec, Site, Trace
from storage.convert import (
    expert_counts,
    from_nemo_rl,
    from_nemo_rl_string,
    from_verl,
    to_fireworks,
    to_megatron,
    to_nemo_rl,
    to_nemo_rl_string,
    to_prime_rl,
    to_roll,
    to_skyrl,
    to_slime,
    to_verl,
)
from storage.convert_nemo_rl import decode_string
from tests.storage.toy import LONG_IDS, SHORT_IDS, TOY, holed_trace, long_trace, short_trace

DENSE = [0, 0]  # what a dense layer holds on an axis of all layers
WIDE = RoutingSpec.uniform(num_sites=1, num_experts=40_000, top_k=1)
MANY = RoutingSpec.uniform(num_sites=1, num_experts=256, top_k=1)


def all_layers(row: Any) -> list[Any]:
    return [row[0], DENSE, row[1]]


def one_id(spec: RoutingSpec, value: int) -> Trace:
    ids = np.full((1, 1, 1), value, spec.dtype)
    return Trace("one", 0, [1], [2], np.zeros(1), ids, "length")


def test_verl_pads_prompts_left_and_responses_right_and_masks_the_last_token() -> None:
    batch = to_verl([long_trace(), short_trace()], TOY, num_layers=3, pad_token_id=9)
    assert batch["prompts"].tolist() == [[11, 12], [9, 21]]
    assert batch["responses"].tolist() == [[13, 14], [22, 9]]
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14], [9, 21, 22, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 0]]
    assert batch["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 1]]
    assert batch["rollout_log_probs"].tolist() == [[-1, -2], [-1, 0]]
    assert batch["replay_mask"].tolist() == [[True, True, True, False], [False, True, False, False]]
    nothing = [DENSE, DENSE, DENSE]
    assert batch["routed_experts"].dtype == np.int16
    assert batch["routed_experts"].tolist() == [
        [*map(all_layers, LONG_IDS), nothing],
        [nothing, all_layers(SHORT_IDS[0]), nothing, nothing],
    ]


def test_slime_and_roll_hold_t_minus_1_rows_of_int32() -> None:
    array = to_slime(long_trace(), TOY, num_layers=3)
    assert array.dtype == np.int32
    assert array.tolist() == [all_layers(row) for row in LONG_IDS]
    assert to_slime(long_trace(), TOY, num_layers=None).tolist() == LONG_IDS
    both = to_roll([long_trace(), short_trace()], TOY, num_layers=None)
    assert [ids.tolist() for ids in both] == [LONG_IDS, SHORT_IDS]


def test_megatron_gets_one_packed_array_per_router_and_distinct_ids_where_nothing_was_recorded() -> None:
    # tokens 11 12 13 [14] 21 [22] [padding] [padding]: in brackets, ids 0 1, 2 3, 0 1, 2 3 spread over the 4 experts
    first, second = to_megatron([long_trace(), short_trace()], TOY, multiple=4)
    assert first.dtype == np.int64
    assert first.tolist() == [[0, 1], [1, 2], [3, 1], [0, 1], [2, 0], [2, 3], [0, 1], [2, 3]]
    assert second.tolist() == [[2, 3], [3, 0], [0, 2], [0, 1], [1, 3], [2, 3], [0, 1], [2, 3]]
    (only,) = to_megatron([long_trace(), short_trace()], TOY, sites=[1], multiple=4)
    assert only.tolist() == second.tolist()


def test_megatron_uses_the_k_of_each_router() -> None:
    spec = RoutingSpec((Site("a", 0, 4, 2), Site("b", 1, 4, 1)))
    trace = Trace("mixed", 0, [1], [2], np.zeros(1), np.array([[[3, 1], [2, 0]]]), "length")
    assert [ids.tolist() for ids in to_megatron([trace], spec)] == [[[3, 1], [0, 1]], [[2], [0]]]


def test_nemo_rl_marks_missing_rows_with_minus_1() -> None:
    batch = to_nemo_rl([holed_trace(), short_trace()], TOY, pad_token_id=9)
    gone = [[-1, -1], [-1, -1]]
    assert batch["input_ids"].tolist() == [[11, 12, 13, 14], [21, 22, 9, 9]]
    assert batch["input_lengths"].tolist() == [4, 2]
    assert batch["routed_experts"].dtype == np.int8
    assert batch["routed_experts"].tolist() == [[gone, LONG_IDS[1], gone, gone], [SHORT_IDS[0], gone, gone, gone]]
    assert to_nemo_rl([short_trace()], TOY, num_layers=3)["routed_experts"].tolist() == [
        [all_layers(SHORT_IDS[0]), [[-1, -1]] * 3]
    ]


def test_the_string_of_nemo_rl_byte_by_byte() -> None:
    # ids 2 0 1 3, then four times -1
    data = base64.b64encode(bytes([2, 0, 1, 3, 255, 255, 255, 255])).decode()
    assert to_nemo_rl_string(short_trace(), TOY) == f"nrlre1:int8:2x2x2:{data}"
    wide = base64.b64encode(bytes([2, 0, 0, 0, 1, 0, 3, 0] + [255] * 8)).decode()
    assert to_nemo_rl_string(short_trace(), TOY, dtype="int16") == f"nrlre1:int16:2x2x2:{wide}"
    # an envelope in the tests of NVIDIA-NeMo/Gym
    assert decode_string("nrlre1:int16:2x1x2:AAABAAIAAwA=").tolist() == [[[0, 1]], [[2, 3]]]


def test_nemo_rl_takes_the_narrowest_signed_type_of_the_model() -> None:
    assert to_nemo_rl([one_id(MANY, 3)], MANY)["routed_experts"].dtype == np.int16
    assert to_nemo_rl([one_id(WIDE, 3)], WIDE)["routed_experts"].dtype == np.int32


def test_skyrl_pads_left_with_distinct_ids_and_a_mask() -> None:
    batch = to_skyrl([holed_trace(), short_trace()], TOY, num_layers=3, pad_token_id=9)
    dummy = [[0, 1], [0, 1], [0, 1]]
    assert batch["sequences"].tolist() == [[11, 12, 13, 14], [9, 9, 21, 22]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]]
    assert batch["router_padding_mask"].tolist() == [[True, False, True, True], [True, True, False, True]]
    assert batch["rollout_expert_indices"].tolist() == [
        [dummy, all_layers(LONG_IDS[1]), dummy, dummy],
        [dummy, dummy, all_layers(SHORT_IDS[0]), dummy],
    ]


@pytest.mark.parametrize(("experts", "dtype"), [(256, "uint8"), (257, "int16"), (32768, "int16"), (32769, "int32")])
def test_skyrl_takes_its_type_from_the_model_not_from_the_data(experts: int, dtype: str) -> None:
    spec = RoutingSpec.uniform(num_sites=1, num_experts=experts, top_k=1)
    assert to_skyrl([one_id(spec, 0)], spec, num_layers=None)["rollout_expert_indices"].dtype == dtype


def test_prime_rl_is_base64_with_a_start() -> None:
    payload = to_prime_rl(short_trace(), TOY, num_layers=3)
    assert payload == {
        "data": base64.b64encode(bytes([2, 0, 0, 0, 1, 3])).decode(),
        "shape": [1, 3, 2],
        "start": 0,
        "dtype": "uint8",
    }
    late = holed_trace()
    late.route_valid, late.routed_experts = None, np.array(LONG_IDS[1:])
    assert to_prime_rl(late, TOY, num_layers=None)["start"] == 1
    assert to_prime_rl(one_id(WIDE, 258), WIDE, num_layers=None)["data"] == base64.b64encode(bytes([2, 1])).decode()


@pytest.mark.parametrize(
    ("make", "selector", "present", "first", "body"),
    [
        (long_trace, 0, 3, 0, [0, 1, 2, 3, 1, 2, 3, 0, 3, 1, 0, 2]),
        (holed_trace, 2, 1, 1, [0b010, 1, 2, 3, 0]),
    ],
)
def test_the_r3_frame_byte_by_byte(
    make: Callable[[], Trace], selector: int, present: int, first: int, body: list[int]
) -> None:
    frame = base64.b64decode(to_fireworks(make(), TOY))
    marked = int(selector == 2)
    header = b"R3V1" + bytes([1, selector, 1, 0])
    header += b"".join(n.to_bytes(4, "little") for n in (3, present, first, marked))
    header += (4 * present).to_bytes(8, "little")
    assert pa.input_stream(pa.py_buffer(frame), compression="zstd").read() == header + bytes(body)
    assert frame[4] & 0b1110_0000, "the reader needs the content size in the zstd header"


def test_counts_of_recorded_rows_per_window_layer_and_expert() -> None:
    traces = [long_trace(), holed_trace(), short_trace()]  # rows: three, one, one
    # layer 0: 0 1, 1 2, 3 1 | 1 2, 2 0; layer 2: 2 3, 3 0, 0 2 | 3 0, 1 3
    windows = [[[1, 3, 1, 1], [2, 0, 2, 2]], [[1, 1, 2, 0], [1, 1, 0, 2]]]
    assert expert_counts(traces, TOY, window_rows=3).tolist() == windows
    assert expert_counts(traces, TOY).tolist() == [np.sum(windows, axis=0).tolist()]
    assert expert_counts(traces, TOY, num_layers=3)[0, 1].tolist() == [0, 0, 0, 0]
    assert expert_counts([], TOY).tolist() == [[[0] * 4] * 2]


@pytest.mark.parametrize(
    ("export", "words"),
    [
        (lambda: to_verl([holed_trace()], TOY, num_layers=3), "row 0 was not recorded and verl has no mask"),
        (lambda: to_slime(holed_trace(), TOY, num_layers=3), "row 0 was not recorded and slime has no mask"),
        (lambda: to_megatron([holed_trace()], TOY), "row 0 was not recorded and megatron has no mask"),
        (lambda: to_prime_rl(holed_trace(), TOY, num_layers=3), "row 2 was not recorded and prime-rl has no mask"),
        (
            lambda: to_verl([one_id(WIDE, 3)], WIDE, num_layers=1),
            "int16 ids up to 32767, this model has ids up to 39999",
        ),
        (lambda: to_nemo_rl([one_id(MANY, 3)], MANY, dtype="int8"), "int8 ids up to 127, this model has ids up to 255"),
        (lambda: to_nemo_rl_string(short_trace(), TOY, dtype="uint8"), "dtype 'uint8', need one of int8, int16, int32"),
        (lambda: to_slime(short_trace(), TOY, num_layers=2), "num_layers=2, but 'layers.2.gate' is in layer 2"),
        (lambda: to_verl([], TOY, num_layers=3), "empty list of traces"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(export: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        export()


def test_two_routers_in_one_layer_have_no_axis_of_all_layers() -> None:
    spec = RoutingSpec((Site("attention", 0, 4, 2), Site("mlp", 0, 4, 2)))
    with pytest.raises(ValueError, match="share a decoder layer"):
        to_slime(short_trace(), spec, num_layers=1)


def test_a_prompt_only_trace_has_a_row_too_many_for_formats_of_t_minus_1() -> None:
    trace = Trace("prompt", 0, [1, 2], [], np.zeros(0), np.array(LONG_IDS[:2]), "length")
    with pytest.raises(ValueError, match="no completion: T rows"):
        to_slime(trace, TOY, num_layers=3)
    assert from_nemo_rl_string(to_nemo_rl_string(trace, TOY), TOY).ids.tolist() == LONG_IDS[:2]


def test_a_verl_batch_of_another_model_or_with_gaps_is_refused() -> None:
    batch = to_verl([long_trace(), short_trace()], TOY, num_layers=3)
    ids = batch["routed_experts"]

    def broken(*at: int, value: int) -> dict[str, np.ndarray]:
        changed = ids.copy()
        changed[at] = value
        return batch | {"routed_experts": changed}

    for damaged, words in [
        (broken(0, 0, 1, 0, value=1), "layer 1 has ids"),
        (broken(1, 0, 0, 0, value=1), "verl row 1: ids at padding or at the last token"),
        (broken(0, 1, value=0), "verl row 0: row 1 is all zeros"),
        (broken(0, 1, 2, 0, value=4), "site 1"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_verl(damaged, TOY, num_layers=3)


def test_a_nemo_rl_row_that_is_missing_in_part_is_refused() -> None:
    batch = to_nemo_rl([long_trace()], TOY)
    batch["routed_experts"][0, 1, 0, 0] = -1
    with pytest.raises(ValueError, match="NeMo-RL row 0: row 1 is missing in part"):
        from_nemo_rl(batch, TOY)
