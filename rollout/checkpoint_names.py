"""Names and shapes of a model's weights as transformers saves them, and the way back into the model.

transformers fuses and renames weights while it loads them (the experts of a layer become one `gate_up_proj`), and
undoes it while it saves. Trainers send either form: `model.state_dict()`, or what a checkpoint holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


class CheckpointNames:
    """Both forms of one model's weights: `own` as in `model.state_dict()`, `saved` as in its checkpoint files.

    >>> names = CheckpointNames(model)  # Qwen3-MoE of 2 layers with 8 experts
    >>> names.own["model.layers.0.mlp.experts.down_proj"].shape
    torch.Size([8, 32, 16])
    >>> names.saved["model.layers.0.mlp.experts.7.down_proj.weight"].shape
    torch.Size([32, 16])

    Both hold meta tensors: shapes and dtypes, no memory. `tied` are names of either form that may be left out, since
    another name stands for the same tensor; `ignored` are patterns of names that the family's own loader passes over.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.own = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
        self.saved = revert_weight_conversion(model, dict(self.own))
        self.tied = frozenset(getattr(model, "all_tied_weights_keys", None) or ())
        self.ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        transforms = getattr(model, "_weight_conversions", None)
        if transforms is None:
            mapping = get_model_conversion_mapping(model, add_legacy=False)
            transforms = [t for t in mapping if not isinstance(t, PrefixChange)]  # as when saving a model never loaded
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Saved tensors under the model's own names, one fused weight at a time: no more is held than that."""
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name in sorted(tensors, key=_by_number):
            groups.setdefault(self._target(name)[0], {})[name] = tensors[name]
        for target, members in groups.items():
            yield from self._convert_group(target, members).items()

    def _convert_group(self, target: str, members: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        transform = None
        for name, tensor in members.items():
            pattern = self._target(name)[1]
            if pattern is None:
                return {target: tensor}
            if transform is None:
                transform = deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
            transform.add_tensor(target, name, pattern, tensor)  # type: ignore[arg-type]
        assert transform is not None
        converted = transform.convert(target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _target(self, name: str) -> tuple[str, str | None]:
        """The own name, and the converter's pattern that matched; None for a weight that is only renamed."""
        prefix = self._model.base_model_prefix
        found = rename_source_key(name, self._renamings, self._converters, prefix, self.own)
        return (name, None) if found[0] not in self.own and name in self.own else found


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Sorts `experts.10` behind `experts.9`: transformers stacks experts in the order in which they come."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
