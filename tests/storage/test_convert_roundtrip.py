"""Out and back in: every bit, with and without dense layers, for traces with and without missing rows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from storage import RoutingSpec, Site, Trace
from storage.convert import (
    Routes,
    from_fireworks,
    from_megatron,
    from_nemo_rl,
    from_nemo_rl_string,
    from_prime_rl,
    from_roll,
    from_safetensors,
    from_skyrl,
    from_slime,
    from_verl,
    to_fireworks,
    to_megatron,
    to_nemo_rl,
    to_nemo_rl_string,
    to_prime_rl,
    to_roll,
    to_safetensors,
    to_skyrl,
    to_slime,
    to_verl,
)
from tests.storage.builders import SPEC, make_trace, make_traces
from tests.storage.toy import TOY, long_trace, short_trace

LAYERS = 6
specs = st.builds(
    lambda layers, experts, top_k: RoutingSpec(tuple(Site(f"gate.{i}", i, experts, top_k) for i in sorted(layers))),
    st.sets(st.integers(0, LAYERS - 1), min_size=1, max_size=4),
    st.sampled_from([4, 127, 129, 256, 257, 32768]),
    st.integers(1, 4),
)
num_layers = st.sampled_from([None, LAYERS])


@st.composite
def sets_of_traces(draw: Any, holes: bool) -> tuple[RoutingSpec, list[Trace]]:
    """A spec and one to three traces of it: distinct ids in each row, and with `holes` a late start or missing rows."""
    spec = draw(specs)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3))
    return spec, [_trace(index, spec, rng, *length, holes) for index, length in enumerate(lengths)]


def _trace(index: int, spec: RoutingSpec, rng: np.random.Generator, prompt: int, completion: int, holes: bool) -> Trace:
    rows = prompt + completion - 1
    start = int(rng.integers(0, rows)) if holes else 0
    shape = rows - start, spec.num_sites
    site = spec.sites[0]
    ids = np.array([rng.choice(site.num_experts, site.top_k, replace=False) for _ in range(shape[0] * shape[1])])
    ids = ids.reshape(*shape, site.top_k).astype(spec.dtype)
    if site.top_k == 1:
        ids[ids == 0] = 1
    valid = None
    if holes and rng.random() < 0.5 and len(ids) > 1:
        valid = np.array([True, False, *(rng.random(len(ids) - 2) < 0.5)])
        ids[~valid] = 0
    fields: dict[str, Any] = {"route_start": start, "route_valid": valid, "routed_experts": ids}
    return Trace(f"t{index}", 0, [7] * prompt, [8] * completion, np.zeros(completion), finish_reason="stop", **fields)


def check_same(trace: Trace, routes: Routes) -> None:
    again = Trace(
        trace.sample_id,
        0,
        trace.prompt_ids,
        trace.completion_ids,
        trace.logprobs,
        routes.ids,
        "stop",
        route_start=routes.start,
        route_valid=routes.valid,
    )
    assert again == trace
    assert trace.routed_experts is not None
    assert routes.ids.dtype == trace.routed_experts.dtype


@given(sets_of_traces(holes=False), num_layers)
@settings(max_examples=60, deadline=None)
def test_verl_slime_and_prime_rl_give_back_complete_traces(
    drawn: tuple[RoutingSpec, list[Trace]], layers: int | None
) -> None:
    spec, traces = drawn
    back = from_verl(to_verl(traces, spec, num_layers=layers), spec, num_layers=layers)
    for trace, routes in zip(traces, back, strict=True):
        check_same(trace, routes)
        array = to_slime(trace, spec, num_layers=layers)
        check_same(trace, from_slime(array, spec, num_layers=layers, num_tokens=len(trace.token_ids)))
        check_same(trace, from_prime_rl(to_prime_rl(trace, spec, num_layers=layers), spec, num_layers=layers))


@given(sets_of_traces(holes=True), num_layers)
@settings(max_examples=60, deadline=None)
def test_nemo_rl_and_r3_frames_give_back_traces_with_missing_rows(
    drawn: tuple[RoutingSpec, list[Trace]], layers: int | None
) -> None:
    spec, traces = drawn
    back = from_nemo_rl(to_nemo_rl(traces, spec, num_layers=layers), spec, num_layers=layers)
    for trace, routes in zip(traces, back, strict=True):
        check_same(trace, routes)
        check_same(
            trace, from_nemo_rl_string(to_nemo_rl_string(trace, spec, num_layers=layers), spec, num_layers=layers)
        )
        check_same(trace, from_fireworks(to_fireworks(trace, spec, num_layers=layers), spec, num_layers=layers))


@given(sets_of_traces(holes=False), num_layers)
@settings(max_examples=30, deadline=None)
def test_roll_and_megatron_give_back_complete_traces(
    drawn: tuple[RoutingSpec, list[Trace]], layers: int | None
) -> None:
    spec, traces = drawn
    lengths = [len(trace.token_ids) for trace in traces]
    packed = from_megatron(to_megatron(traces, spec, multiple=8), spec, lengths=lengths)
    listed = from_roll(to_roll(traces, spec, num_layers=layers), spec, num_layers=layers)
    for trace, *both in zip(traces, packed, listed, strict=True):
        for routes in both:
            check_same(trace, routes)


@given(sets_of_traces(holes=True), num_layers)
@settings(max_examples=30, deadline=None)
def test_skyrl_gives_back_traces_with_missing_rows(drawn: tuple[RoutingSpec, list[Trace]], layers: int | None) -> None:
    spec, traces = drawn
    back = from_skyrl(to_skyrl(traces, spec, num_layers=layers), spec, num_layers=layers)
    for trace, routes in zip(traces, back, strict=True):
        check_same(trace, routes)


@given(sets_of_traces(holes=True))
@settings(max_examples=30, deadline=None)
def test_safetensors_give_back_traces_with_missing_rows(drawn: tuple[RoutingSpec, list[Trace]]) -> None:
    spec, traces = drawn
    with tempfile.TemporaryDirectory() as folder:
        to_safetensors(traces, spec, Path(folder) / "t.safetensors")
        assert from_safetensors(Path(folder) / "t.safetensors") == (spec, traces)


def test_safetensors_keep_every_field(tmp_path: Path) -> None:
    full = make_trace(
        reward=0.1,
        text="é",
        metadata={"answer": [1, {"x": None}]},
        sampling_params={"temperature": 0.7},
        stop_reason="\n",
        weight_versions=[(3, 0, 2), (4, 2, 6)],
        group_id="g",
    )
    bare = Trace("bare", 1, [1], [], np.zeros(0), None, "abort")
    to_safetensors([full, bare], SPEC, tmp_path / "t.safetensors")
    assert from_safetensors(tmp_path / "t.safetensors") == (SPEC, [full, bare])
    arrays = load_file(tmp_path / "t.safetensors")
    assert np.array_equal(arrays["0/routed_experts"], full.routed_experts)
    assert "1/routed_experts" not in arrays


def test_a_file_is_not_written_twice_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    to_safetensors(make_traces(0), SPEC, path)
    with pytest.raises(FileExistsError, match=r"t\.safetensors exists"):
        to_safetensors(make_traces(0), SPEC, path)
    save_file({"x": np.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds None, need 'moe-rollout traces 1'"):
        from_safetensors(tmp_path / "other.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["other.safetensors", "t.safetensors"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nrlre2:int8:1x2x2:AAAA", "not 'nrlre1:"),
        ("nrlre1:uint8:1x2x2:AAAA", "not 'nrlre1:"),
        ("nrlre1:int8:1x2x2:AAAA", r"3 bytes for int8 \(1, 2, 2\); was it cut"),
        ("nrlre1:int8:1x2x2:A", "bad base64"),
        ("nrlre1:int8:1x1x4:AAECAw==", "2 sites, 2"),
    ],
)
def test_a_damaged_string_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_nemo_rl_string(text, TOY)


def test_a_damaged_payload_is_refused() -> None:
    good = to_prime_rl(short_trace(), TOY, num_layers=None)
    for change, words in [
        ({"data": good["data"][:4]}, "3 bytes for uint8"),
        ({"dtype": "float32"}, "dtype 'float32'"),
        ({"start": -1}, "start -1"),
        ({"shape": None}, "not a prime-rl payload"),
        ({"data": "BAABAw=="}, "has an id in"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_prime_rl(good | change, TOY, num_layers=None)


def test_a_damaged_frame_is_refused() -> None:
    good = to_fireworks(short_trace(), TOY)
    with pytest.raises(ValueError, match="not an R3/v1 frame"):
        from_fireworks(good[:16], TOY)
    with pytest.raises(ValueError, match="1 rows of 3 x 2 ids"):
        from_fireworks(good, TOY, num_layers=3)


def test_rows_of_minus_1_or_zeros_are_refused_where_no_mask_says_so() -> None:
    for fill, words in [(-1, "row 0 is filled with -1"), (0, "row 0 is all zeros")]:
        with pytest.raises(ValueError, match=words):
            from_slime(np.full((1, 2, 2), fill, np.int32), TOY, num_layers=None)
    with pytest.raises(ValueError, match=r"need \[3, L, K\]"):
        from_slime(np.array([[[0, 1], [2, 3]]]), TOY, num_layers=None, num_tokens=4)


def test_a_skyrl_batch_that_contradicts_itself_is_refused() -> None:
    good = to_skyrl([short_trace(), long_trace()], TOY, num_layers=3)
    changes: list[tuple[str, Any, str]] = [
        ("attention_mask", np.array([[1, 1, 0, 0], [1, 1, 1, 1]]), "skyrl row 0: attention_mask must be ones at the"),
        ("router_padding_mask", np.zeros((2, 4), bool), "layer 1 has ids, but no router"),
        ("attention_mask", np.ones((2, 3)), r"need the same \[B, T\]"),
    ]
    for name, value, words in changes:
        with pytest.raises(ValueError, match=words):
            from_skyrl(good | {name: value}, TOY, num_layers=3)
    moe_only = to_skyrl([short_trace(), long_trace()], TOY, num_layers=None)
    with pytest.raises(ValueError, match="row 0: router_padding_mask says that padding column 0 was recorded"):
        from_skyrl(moe_only | {"router_padding_mask": np.zeros((2, 4), bool)}, TOY, num_layers=None)


def test_megatron_arrays_of_another_model_are_refused() -> None:
    arrays = to_megatron([long_trace()], TOY)
    for given_, lengths, words in [
        (arrays[:1], [4], "megatron has 1 routers, this model 2"),
        (arrays, [5], r"megatron router 0: int64 of shape \(4, 2\), need integers \[5 or more tokens, 2\]"),
        (arrays, [1], "each of 2 tokens or more"),
        ([array + 4 for array in arrays], [4], "megatron sequence 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_megatron(given_, TOY, lengths=lengths)
