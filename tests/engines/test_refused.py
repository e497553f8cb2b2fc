"""What the client offers and a served engine cannot do: an error at the call, and the engine serves on."""

from __future__ import annotations

import pytest

from rollout import SamplingParams

PARAMS = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)


def test_what_would_need_a_hold_on_the_engine_is_refused(connect):
    client = connect()
    for mode in ("keep", "yield"):
        with pytest.raises(ValueError, match=f"pause mode '{mode}': .* takes 'wait' or 'abort'"):
            client.pause(mode)
    with pytest.raises(ValueError, match="cannot sleep through this client"):
        client.sleep()
    with pytest.raises(ValueError, match="cannot sleep through this client"):
        client.wake()
    (trace,) = client.sample([[5, 7]], sampling_params=PARAMS)
    with pytest.raises(ValueError, match=r"resume 0 .*cannot repeat recorded routes: .* cannot be told which"):
        client.sample(resume=[trace], sampling_params=PARAMS.model_copy(update={"max_tokens": 9}))
    with pytest.raises(ValueError, match="a session needs an engine that can repeat recorded routes"):
        client.session()
    with pytest.raises(ValueError, match=r"cannot|repeat|prompt"):
        client.score([trace])
    assert client.sample([[5, 7]], sampling_params=PARAMS)[0].error is None


def test_a_pause_holds_requests_back_until_resume(connect, server):
    client = connect()
    asked = len(server.generated)
    client.pause("wait")
    stream = client.backend.stream(client._requests.check([[5, 7]], 1, PARAMS).requests(0, 0))
    stream._backend.start(stream._pending.popleft(), stream._outbox)
    client.stats()
    assert len(server.generated) == asked
    client.resume()
    assert stream._outbox.get(timeout=20).finish_reason == "length"
