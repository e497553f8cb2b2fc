"""What a served model is, read from its config alone: the engine holds the weights."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollout.backend import ModelInfo
from rollout.capabilities import Capabilities
from rollout.loader import eos_token_ids, load_config, load_tokenizer, meta_model
from storage.trace import RoutingSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineModel:
    """The facts of one checkpoint that decoding an engine's replies needs.

    >>> facts = describe_model("path/to/qwen3-moe")
    >>> facts.sites(np.zeros((7, facts.num_layers, facts.spec.top_k), np.int32), "run/0/0-0/0").shape
    (7, 8, 2)

    `model` lies on torch's meta device: names and shapes of the weights, no values. `tokenizer` is None when the
    checkpoint has none.
    """

    path: str
    spec: RoutingSpec
    vocab_size: int
    max_positions: int
    num_layers: int
    model: Any
    tokenizer: Any = None
    eos_token_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False

    @property
    def has_tokenizer(self) -> bool:
        """Whether completions have a text."""
        return self.tokenizer is not None

    def sites(self, layers: np.ndarray, name: str) -> np.ndarray:
        """The MoE sites `[rows, sites, K]` of an engine's `[rows, decoder layers, K]`; dense layers read zero there.

        Raises:
            ValueError: naming the request, when the number of layers or of slots is another model's.
        """
        need = self.num_layers, self.spec.top_k
        if layers.ndim != 3 or layers.shape[1:] != need:
            raise ValueError(f"{name}: routes have shape {layers.shape}, need [rows, {need[0]} layers, {need[1]}]")
        return layers[:, [site.layer for site in self.spec.sites]]

    def check_served(self, path: str | None) -> None:
        """Refuse a server whose own checkpoint can be seen from here and is of another model, or broken.

        A broken one is refused now, because it would be when weights are updated: the engine loads it again then, and
        does not survive that. With `trust_remote_code` its own code is trusted as that of `path` is.

        Raises:
            ValueError: with what differs, or why it cannot be read. A path that is not on this machine says nothing.
        """
        if not path or not (Path(path) / "config.json").is_file() or Path(path).resolve() == Path(self.path).resolve():
            return
        if self.trust_remote_code:
            logger.warning("trust_remote_code=True: the server's model %r may run its own code in this process", path)
        try:
            own, found = self._shape(), _without_tokenizer(path, self.trust_remote_code)._shape()
        except OSError as error:
            raise ValueError(
                f"its checkpoint {path!r} is seen from here too and cannot be read, mend it: {error.__cause__ or error}"
            ) from error
        if wrong := [f"{name} {found[name]}, need {own[name]}" for name in own if found[name] != own[name]]:
            raise ValueError(f"its checkpoint {path!r} is of another model: it has {'; '.join(wrong)}")

    def _shape(self) -> dict[str, Any]:
        return {
            "experts": [site.num_experts for site in self.spec.sites],
            "experts per token": self.spec.top_k,
            "layers": self.num_layers,
            "token ids": self.vocab_size,
        }

    def info(self, limit: int, capabilities: Capabilities) -> ModelInfo:
        """What the client needs to know, of an engine that takes sequences of `limit` tokens."""
        return ModelInfo(
            spec=self.spec,
            vocab_size=self.vocab_size,
            max_sequence_tokens=min(limit, self.max_positions),
            max_sequence_reason="the engine's limit" if limit < self.max_positions else "the model's positions",
            tokenizer_path=self.path if self.has_tokenizer else None,
            captures_routes=True,
            trust_remote_code=self.trust_remote_code,
            not_forced=f"{capabilities.engine} cannot be told which routes to take",
            capabilities=capabilities,
        )


def describe_model(path: str, trust_remote_code: bool = False) -> EngineModel:
    """Read config and tokenizer of a local directory or hub id.

    Raises:
        FileNotFoundError, ValueError: there is no such model, it is dense, or has two routers in one layer, which the
            layer axis of vLLM and SGLang cannot hold.
    """
    return replace(_without_tokenizer(path, trust_remote_code), tokenizer=load_tokenizer(path, trust_remote_code))


def _without_tokenizer(path: str, trust_remote_code: bool) -> EngineModel:
    config = load_config(path, trust_remote_code)
    model = meta_model(path, config, trust_remote_code)
    spec, text = RoutingSpec.from_model(model), config.get_text_config()
    layers = [site.layer for site in spec.sites]
    if len(set(layers)) != len(layers) or len({site.top_k for site in spec.sites}) != 1:
        raise ValueError(f"model {path!r}: vLLM and SGLang record one router per layer with one K, this one has {spec}")
    return EngineModel(
        path=path,
        spec=spec,
        vocab_size=int(text.vocab_size),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 2**31),
        num_layers=int(text.num_hidden_layers),
        model=model,
        eos_token_ids=eos_token_ids(model),
        trust_remote_code=trust_remote_code,
    )
