"""What a replay did: shares of overruled choices, executed experts. Read from the device on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.replay_rows import Rows
from storage.trace import RoutingSpec


@dataclass(frozen=True)
class ReplayReport:
    """What the last replay context did, over all its forwards.

    Attributes:
        sites_used: sites whose forward ran under replay, of `num_sites`.
        rows: tokens forwarded per site, padding too.
        forced_rows: rows that took recorded experts; without padding that was forced for its load.
        native_rows: the other rows.
        missing_share: share of the rows that a full recording has which were absent and kept their native choice;
            padding and the last sampled token of a sequence have none.
        flipped_share: share of forced (token, site) pairs whose live choice is another *set* of experts.
        flipped_per_site: the same by site.
        reordered_share: share with the same set in another order.
        overlap_per_site: share of the forced experts that the live choice has too, mean over rows, by site.
    """

    sites_used: int
    num_sites: int
    rows: int
    forced_rows: int
    native_rows: int
    missing_share: float
    flipped_share: float
    flipped_per_site: list[float]
    reordered_share: float
    overlap_per_site: list[float]


class Balance(NamedTuple):
    """Of one site's last forward.

    Attributes:
        logits: of the router, `[rows, E]`; None when it returns none.
        load: tokens per expert, int64 `[E]`.
        tokens: bool `[rows]`, without padding; None when all are.
        cut: whether reentrant checkpointing ran the router without a graph, in a forward with gradients.
    """

    logits: torch.Tensor | None
    load: torch.Tensor
    tokens: torch.Tensor | None
    cut: bool = False


class ReplayCounts:
    """Per-site counters of one context that stay on the device until they are read."""

    def __init__(self, spec: RoutingSpec, missing: float = 0.0) -> None:
        self._spec = spec
        self._missing = missing
        self.rows = [0] * spec.num_sites
        self._sums: list[torch.Tensor | None] = [None] * spec.num_sites
        self._load: list[torch.Tensor | None] = [None] * spec.num_sites
        self.balance: list[Balance | None] = [None] * spec.num_sites

    @torch.no_grad()
    def add(
        self,
        site: int,
        native: torch.Tensor,
        forced: torch.Tensor,
        rows: Rows,
        logits: torch.Tensor | None,
        cut: bool = False,
    ) -> None:
        """One forward of one router: its live choice and the recorded one, int64 `[rows, K]`; `cut` as in Balance."""
        used = torch.ones(len(forced), dtype=torch.bool, device=forced.device) if rows.counted is None else rows.counted
        flipped = (native.sort(-1).values != forced.sort(-1).values).any(-1)
        reordered = (native != forced).any(-1) & ~flipped
        shared = (native[:, :, None] == forced[:, None, :]).any(-1).sum(-1)
        sums = torch.stack([used.sum(), (flipped & used).sum(), (reordered & used).sum(), (shared * used).sum()])
        self._sums[site] = _plus(self._sums[site], sums)
        executed = forced if rows.forced is None else torch.where(rows.forced[:, None], forced, native)
        load = _load_of(executed, rows.tokens, self._spec.sites[site].num_experts)
        self._load[site] = _plus(self._load[site], load)
        self.balance[site] = Balance(logits, load, rows.tokens, cut)
        self.rows[site] += len(forced)

    def expert_counts(self) -> torch.Tensor:
        """int64 `[sites, E]`: tokens that each expert got, E of the site with most; zeros behind a smaller site's."""
        width = max(site.num_experts for site in self._spec.sites)
        out = torch.zeros(self._spec.num_sites, width, dtype=torch.int64)
        for site, load in enumerate(self._load):
            if load is not None:
                out[site, : len(load)] = load.cpu()
        return out

    def check_all_ran(self) -> None:
        """RuntimeError when not every site ran."""
        unused = [site.name for site, rows in zip(self._spec.sites, self.rows, strict=True) if not rows]
        if len(unused) == len(self.rows):
            raise RuntimeError(
                "nothing was replayed: forward the model that RouterReplay was made of, not a copy of it"
            )
        if unused:
            raise RuntimeError(
                f"replay reached {len(self.rows) - len(unused)} sites but not {unused[:3]}; was the forward cut short?"
            )

    def report(self) -> ReplayReport:
        """Waits for the device."""
        sums = [[0, 0, 0, 0] if s is None else s.tolist() for s in self._sums]
        forced, flipped, reordered, _ = (sum(column) for column in zip(*sums, strict=True))
        forced_rows = max(s[0] for s in sums)
        slots = [s[0] * site.top_k for s, site in zip(sums, self._spec.sites, strict=True)]
        return ReplayReport(
            sites_used=sum(count > 0 for count in self.rows),
            num_sites=len(self.rows),
            rows=max(self.rows),
            forced_rows=forced_rows,
            native_rows=max(self.rows) - forced_rows,
            missing_share=self._missing,
            flipped_share=flipped / forced if forced else 0.0,
            flipped_per_site=[s[1] / s[0] if s[0] else 0.0 for s in sums],
            reordered_share=reordered / forced if forced else 0.0,
            overlap_per_site=[s[3] / n if n else 0.0 for s, n in zip(sums, slots, strict=True)],
        )


def _plus(sum_: torch.Tensor | None, more: torch.Tensor) -> torch.Tensor:
    return more if sum_ is None else sum_ + more


def _load_of(ids: torch.Tensor, tokens: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """int64 `[E]`, without waiting for the device as bincount does."""
    weight = torch.ones_like(ids) if tokens is None else tokens[:, None].to(ids.dtype).expand_as(ids)
    return ids.new_zeros(num_experts).scatter_add_(0, ids.reshape(-1), weight.reshape(-1))


def _checked_logits(name: str, found: Balance) -> torch.Tensor:
    if found.logits is None:
        raise ValueError(f"router {name} returns no logits beside its choice; compute its loss in the model")
    if found.cut:
        raise ValueError(
            f"reentrant checkpointing ran router {name} without a graph, so the loss would have no gradient; use "
            'gradient_checkpointing_enable({"use_reentrant": False})'
        )
    if bool(((found.logits >= 0) & (found.logits <= 1)).all()):
        raise ValueError(
            f"router {name} returns probabilities or scores, not logits, of which another softmax would be taken; "
            "compute its loss in the model"
        )
    return found.logits


def load_balancing_loss(spec: RoutingSpec, balance: list[Balance | None]) -> torch.Tensor:
    """See `RouterReplay.load_balancing_loss`."""
    widths = {site.num_experts for site in spec.sites}
    if len(widths) != 1:
        raise ValueError(f"sites choose among {sorted(widths)} experts; one loss over all is not defined")
    loads, probabilities, rows = [], [], 0
    for site, found in zip(spec.sites, balance, strict=True):
        if found is None:
            raise RuntimeError("no forward was replayed yet")
        logits = _checked_logits(site.name, found)
        probability = logits.float().softmax(-1)
        kept = probability if found.tokens is None else probability[found.tokens]
        loads.append(found.load)
        probabilities.append(kept.sum(0))
        rows += len(kept)
    load, probability = torch.stack(loads).sum(0) / rows, torch.stack(probabilities).sum(0) / rows
    return len(load) * (load * probability).sum()
