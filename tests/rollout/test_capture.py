"""Routes from the routers to a request: each step's rows arrive once, as they were, or there is an error."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rollout.capture import RequestRoutes, RoutedExpertsCapturer, RoutedExpertsOutput, RouteSegment, RouteState
from rollout.device import CpuStream, Event
from rollout.model_runner import GenerationBatchResult
from storage import RoutingSpec

SPEC = RoutingSpec.uniform(num_sites=2, num_experts=8, top_k=2)


def rows(count: int, first: int = 0) -> np.ndarray:
    """Recognisable rows `[count, 2, 2]`: row r holds 4r, 4r + 1, 4r + 2, 4r + 3."""
    return np.arange(4 * first, 4 * (first + count), dtype=np.uint8).reshape(count, 2, 2)


@pytest.fixture
def stream():
    stream = CpuStream(num_threads=1)
    yield stream
    stream.close()


def output(count=3, segments=(), host_cache=None, slots=None) -> RoutedExpertsOutput:
    slots = torch.arange(count) if slots is None else torch.tensor(slots)
    return RoutedExpertsOutput(slots, torch.from_numpy(rows(count)), host_cache, segments)


def done() -> Event:
    event = Event()
    event.record(None)
    return event


# --- the life of one step's routes ------------------------------------------------------------------------------


def test_finalize_hands_each_request_its_rows(stream):
    a, b = RequestRoutes(SPEC, 4), RequestRoutes(SPEC, 2)
    b.extend(0, rows(1, first=50))
    out = output(3, [RouteSegment(0, 1, 1, b), RouteSegment(1, 3, 0, a)])
    out.copy_to_cpu(stream, done())
    out.finalize()
    assert out.state is RouteState.FINALIZED
    assert np.array_equal(a.take(), rows(2, first=1))
    assert np.array_equal(b.take(), np.concatenate([rows(1, first=50), rows(1)]))


def test_finalize_also_writes_the_host_cache_by_slot(stream):
    cache = np.full((6, 2, 2), 99, np.uint8)
    out = output(3, host_cache=cache, slots=[4, 0, 2])
    out.copy_to_cpu(stream, done())
    out.finalize()
    assert np.array_equal(cache[[4, 0, 2]], rows(3))
    assert (cache[[1, 3, 5]] == 99).all()


def test_finalizing_twice_is_an_error_and_adds_no_rows(stream):
    routes = RequestRoutes(SPEC, 6)
    out = output(3, [RouteSegment(0, 3, 0, routes)])
    out.copy_to_cpu(stream, done())
    out.finalize()
    with pytest.raises(RuntimeError, match="cannot become finalized: they are finalized, not copied"):
        out.finalize()
    assert len(routes.take()) == 3


def test_finalizing_before_the_copy_was_started_is_an_error():
    with pytest.raises(RuntimeError, match="finalized in state captured before their copy was done"):
        output().finalize()


def test_finalizing_before_the_event_is_an_error_and_works_after_it(stream):
    event, routes = Event(), RequestRoutes(SPEC, 3)
    out = output(3, [RouteSegment(0, 3, 0, routes)])
    out.copy_to_cpu(stream, event)
    with pytest.raises(RuntimeError, match="before their copy was done"):
        out.finalize()
    assert len(routes.take()) == 0
    event.record(None)
    out.finalize()
    assert np.array_equal(routes.take(), rows(3))


def test_copying_twice_is_an_error(stream):
    out = output()
    out.copy_to_cpu(stream, done())
    with pytest.raises(RuntimeError, match="cannot become copied: they are copied, not captured"):
        out.copy_to_cpu(stream, done())


def test_steps_finalized_out_of_order_are_an_error(stream):
    """Positions 0-1 belong to the first step and 2 to the second: the second alone would leave a hole."""
    routes = RequestRoutes(SPEC, 3)
    first, second = output(2, [RouteSegment(0, 2, 0, routes)]), output(1, [RouteSegment(0, 1, 2, routes)])
    for out in (first, second):
        out.copy_to_cpu(stream, done())
    with pytest.raises(RuntimeError, match=r"positions 0\.\.2 are missing or doubled"):
        second.finalize()


def test_a_batch_result_waits_for_its_event_before_it_finalizes(stream):
    """The event is recorded by the stream after the copies, so finalize cannot see a row that is not there."""
    gate, routes = threading.Event(), RequestRoutes(SPEC, 2)
    result = GenerationBatchResult(step=0, batch=[])

    def work():
        gate.wait()
        result.routed_experts_output = output(2, [RouteSegment(0, 2, 0, routes)])
        result.copy_to_cpu(stream)

    stream.launch(work, result.copy_done)
    threading.Timer(0.02, gate.set).start()
    result.finalize()
    assert np.array_equal(routes.take(), rows(2))


def test_a_step_that_failed_raises_its_error_when_finalized(stream):
    result = GenerationBatchResult(step=0, batch=[])

    def work():
        raise RuntimeError("expert 3 is on fire")

    stream.launch(work, result.copy_done)
    with pytest.raises(RuntimeError, match="on fire"):
        result.finalize()


# --- the rows of one request ------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 5), max_size=6), slack=st.integers(0, 3))
def test_chunks_add_up_to_the_whole(lengths, slack):
    routes, whole = RequestRoutes(SPEC, sum(lengths) + slack), rows(sum(lengths))
    at = 0
    for length in lengths:
        routes.extend(at, whole[at : at + length])
        at += length
    assert np.array_equal(routes.take(), whole)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_gap_or_a_repetition_is_an_error(start):
    routes = RequestRoutes(SPEC, 5)
    routes.extend(0, rows(2))
    with pytest.raises(RuntimeError, match=f"positions 2..{start} are missing or doubled"):
        routes.extend(start, rows(1))


def test_more_rows_than_the_request_can_have_is_an_error():
    routes = RequestRoutes(SPEC, 2)
    with pytest.raises(ValueError):
        routes.extend(0, rows(3))
    assert len(routes.take()) == 0


def test_a_sealed_request_ignores_late_rows():
    routes = RequestRoutes(SPEC, 4)
    routes.extend(0, rows(2))
    routes.seal()
    routes.extend(2, rows(1, first=9))
    routes.extend(7, rows(1, first=9))
    assert np.array_equal(routes.take(), rows(2))


def test_rows_of_a_request_are_its_own():
    """A buffer that is written again later changes nothing (sglang#34319)."""
    routes, buffer = RequestRoutes(SPEC, 2), rows(2).copy()
    routes.extend(0, buffer)
    buffer[:] = 77
    assert np.array_equal(routes.take(), rows(2))


def test_a_request_that_ended_early_keeps_no_slack_in_memory():
    routes = RequestRoutes(SPEC, 1000)
    routes.extend(0, rows(2))
    taken = routes.take()
    assert taken.base is None
    assert (taken.shape, taken.dtype) == ((2, 2, 2), np.uint8)


# --- the hooks --------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def capturer(model):
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=16)
    yield capturer
    capturer.close()


@torch.no_grad()
def forward(model, tokens):
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits


def router_outputs(model, tokens) -> np.ndarray:
    """Ids `[T, sites, K]` as each router returns them, seen by other hooks."""
    seen = []
    routers = [layer.mlp.gate for layer in model.model.layers]
    handles = [router.register_forward_hook(lambda _m, _a, out: seen.append(out[2])) for router in routers]
    forward(model, tokens)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).numpy()


def test_capture_equals_what_the_routers_return_and_changes_no_logit(model):
    tokens = [3, 1, 4, 1, 5]
    plain, truth = forward(model, tokens), router_outputs(model, tokens)
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=16)
    capturer.on_forward_begin()
    assert torch.equal(forward(model, tokens), plain)
    captured = capturer.on_forward_end(torch.arange(5)).routed_experts
    assert captured.dtype == torch.uint8
    assert np.array_equal(captured.numpy(), truth)


def test_the_snapshot_is_no_view_of_the_buffer(model, capturer):
    """The next forward writes the same buffer; what was handed out before stays (sglang#34319)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    first = capturer.on_forward_end(torch.arange(3)).routed_experts
    kept = first.clone()
    capturer.on_forward_begin()
    forward(model, [20, 21, 22])
    second = capturer.on_forward_end(torch.arange(3)).routed_experts
    assert not torch.equal(second, kept), "the two prompts must differ for this test to mean anything"
    assert torch.equal(first, kept)
    assert np.array_equal(kept.numpy(), router_outputs(model, [3, 1, 4]))


def test_padding_rows_are_left_out(model, capturer):
    """A batch of two tokens and three of padding gives two rows (sglang#36404)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 0, 0, 0])
    out = capturer.on_forward_end(torch.tensor([7, 8]), num_padding=3)
    assert out.routed_experts.shape == (2, 3, 2)
    assert np.array_equal(out.routed_experts.numpy(), router_outputs(model, [3, 1, 0, 0, 0])[:2])


def test_a_router_that_never_fires_is_an_error_not_a_row_of_zeros(model, capturer):
    """As when a fused kernel routes inside (vllm#44116)."""
    capturer.on_forward_begin()
    for layer in (0, 2):
        model.model.layers[layer].mlp.gate(torch.zeros(3, 16))
    with pytest.raises(RuntimeError, match="routing cannot be recorded"):
        capturer.on_forward_end(torch.arange(3))


def test_a_router_that_fires_twice_is_an_error(model, capturer):
    """As when a draft model or a recomputation runs it again (vllm#48622)."""
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    model.model.layers[1].mlp.gate(torch.zeros(3, 16))
    with pytest.raises(RuntimeError, match=r"\(1, 3\)\], expected each of 3 sites once"):
        capturer.on_forward_end(torch.arange(3))


def test_another_number_of_rows_than_tokens_is_an_error(model, capturer):
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    with pytest.raises(RuntimeError, match="once, in order, with 4 rows"):
        capturer.on_forward_end(torch.arange(4))


def test_more_tokens_than_the_buffer_holds_is_an_error(model, capturer):
    capturer.on_forward_begin()
    with pytest.raises(RuntimeError):
        forward(model, [1] * 17)


def test_a_forward_that_failed_half_way_does_not_spoil_the_next(model, capturer):
    capturer.on_forward_begin()
    model.model.layers[0].mlp.gate(torch.zeros(3, 16))
    capturer.on_forward_begin()
    forward(model, [3, 1, 4])
    assert capturer.on_forward_end(torch.arange(3)).routed_experts.shape == (3, 3, 2)


def test_copying_at_the_end_of_the_forward_is_refused(capturer):
    with pytest.raises(ValueError, match=r"copied by GenerationBatchResult\.copy_to_cpu"):
        capturer.on_forward_end(torch.arange(0), no_copy_to_cpu=False)


def test_close_removes_every_hook(model):
    capturer = RoutedExpertsCapturer(model, RoutingSpec.from_model(model), max_batch_tokens=4)
    capturer.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_more_than_256_experts_are_captured_as_uint16():
    spec = RoutingSpec.uniform(num_sites=1, num_experts=300, top_k=1)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=300,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
        model.model.layers[0].mlp.gate.weight[299] = 1.0
        hidden = torch.ones(2, 8)
        capturer = RoutedExpertsCapturer(model, spec, max_batch_tokens=4)
        capturer.on_forward_begin()
        model.model.layers[0].mlp.gate(hidden)
    routes = capturer.on_forward_end(torch.arange(2)).routed_experts
    assert routes.dtype == torch.uint16
    assert routes.numpy().ravel().tolist() == [299, 299]
