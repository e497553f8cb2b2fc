"""What the engines that wrote a dataset promise about its routes; what is weaker than our own engine is on record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

SlotOrder: TypeAlias = Literal["transformers", "differs", "unmeasured"]


@dataclass(frozen=True)
class Promises:
    """The defaults are those of this project's engine.

    >>> Promises(frozen_recompute=False, slot_order="differs").fields()
    {'frozen_recompute': False, 'slot_order': 'differs'}

    Attributes:
        frozen_recompute: routes of a sequence that was recomputed are those of sampling time.
        slot_order: the ids of one row come in the order in which transformers' router returns them; "differs" when an
            engine returns the same ids in another order for some models, "unmeasured" when nobody compared it.
    """

    frozen_recompute: bool = True
    slot_order: SlotOrder = "transformers"

    def __post_init__(self) -> None:
        if self.slot_order not in get_args(SlotOrder):
            raise ValueError(f"slot_order is {self.slot_order!r}, need one of {get_args(SlotOrder)}")

    def fields(self) -> dict[str, Any]:
        """Those of `_dataset.json`: only what is weaker than the defaults."""
        own = Promises()
        return {name: value for name, value in vars(self).items() if value != getattr(own, name)}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Promises:
        """From the fields of `_dataset.json`; ValueError for a slot order that does not exist."""
        return cls(
            frozen_recompute=fields.get("frozen_recompute", True) is not False,
            slot_order=fields.get("slot_order", "transformers"),
        )

    def broken_by(self, writer: Promises) -> str | None:
        """What a dataset promises and `writer` does not keep, None when it keeps all."""
        if self.frozen_recompute and not writer.frozen_recompute:
            return "promises routes that survive recomputation (frozen_recompute), and this engine cannot keep that"
        if self.slot_order == "transformers" and writer.slot_order != "transformers":
            return f"promises ids in transformers' order, and this engine's order {_ORDER[writer.slot_order]}"
        return None


_ORDER = {"differs": "differs", "unmeasured": "was never compared"}
