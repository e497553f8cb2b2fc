"""Engines by name: what is refused before anything starts."""

import importlib.util

import pytest

from rollout import RolloutClient
from rollout.tiny_moe import MODEL_PATH


def test_an_unknown_engine_is_named():
    with pytest.raises(ValueError, match="backend is 'tgi', need 'moe-rollout', 'vllm'"):
        RolloutClient.local(MODEL_PATH, backend="tgi")
    with pytest.raises(ValueError, match="backend is 'tgi', need 'vllm' or 'sglang'"):
        RolloutClient.connect("http://x:1", backend="tgi", model=MODEL_PATH)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_sglang_that_is_not_installed_says_how_to_get_it_and_points_to_its_server():
    with pytest.raises(ImportError, match=r"pip install sglang on a GPU machine; or start its server .*connect"):
        RolloutClient.local(MODEL_PATH, backend="sglang")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(ImportError, match=r"tests/engines/make_vllm_env\.sh"):
        RolloutClient.local(MODEL_PATH, backend="vllm")


def test_our_own_engine_by_name_is_the_default_one():
    with RolloutClient.local(MODEL_PATH, backend="moe-rollout") as client:
        assert client.info.capabilities.engine == "moe-rollout"
        assert client.info.capabilities.frozen_recompute
