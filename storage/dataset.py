"""TraceDataset: read committed steps, checking page checksums and the crc32 of every decoded sample.

Committed steps never change, so reading needs no lock and is safe while writers commit; `refresh()`
shows newer steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.annotations import Annotations, write_annotation
from storage.catalog import Catalog
from storage.compact import archive, compact, remove_superseded
from storage.manifest import read_promises, read_spec
from storage.promises import SlotOrder
from storage.retention import keep_from
from storage.scan import Row, Sources, iter_batches, iter_traces, read_rows, read_sample
from storage.schema import COLUMNS, from_table, trace_schema
from storage.store import Root, is_remote, local_path, open_store
from storage.trace import RoutingSpec, Trace
from storage.verify import verify_dataset

if TYPE_CHECKING:
    from storage.torch_stream import TraceStream

Steps = int | Iterable[int] | None


class TraceDataset:
    """The committed traces under `root`: a directory, or a URL such as `s3://bucket/traces`.

    >>> ds = TraceDataset("traces/")
    >>> len(ds), ds.steps, "run/0/0-0/1" in ds
    (400, [0, 1], True)
    >>> ds["run/0/0-0/1"].routed_experts.shape           # [rows, sites, K], a read-only view
    (11, 8, 2)
    >>> sum(trace.reward for trace in ds.iter(step=1))   # one row group in memory at a time
    37.0
    >>> good = pc.field("reward") > 0.5                  # pyarrow.compute; row groups without any are not read
    >>> [batch.num_rows for batch in ds.scan(columns=["sample_id", "reward"], filter=good)]
    [16, 16, 5]

    It can be pickled, for DataLoader workers that are spawned and for Ray tasks: what arrives shows the same steps. A
    URL goes along without credentials, which the other process takes from its own environment. Local datasets may be
    used after a fork; one in an object store refuses that, as its client would hang.

    Raises:
        FileNotFoundError: when there is no dataset at `root`.
        FormatVersionError: when another release wrote it.
        DamagedDataError: naming the file, here or later, when it is missing, cut short or altered.
    """

    def __init__(self, root: Root) -> None:
        self.root: Any = str(root) if is_remote(root) else local_path(root)
        store = open_store(root)
        self._spec = read_spec(store)
        self._promises = read_promises(store)
        self._sources = Sources(store, self._spec, Catalog(store), Annotations(store))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"root": self.root if isinstance(self.root, str) else self.root.absolute()}

    def refresh(self) -> None:
        """See the steps that were committed, and the annotations that were made, since."""
        self._sources.catalog.refresh()
        self._sources.annotations.refresh()

    @property
    def frozen_recompute(self) -> bool:
        """False when an engine wrote here that recomputes sequences without keeping their routes of sampling time."""
        return self._promises.frozen_recompute

    @property
    def slot_order(self) -> SlotOrder:
        """ "transformers" when the ids of every row come in the order of transformers' router. "differs" when an engine
        wrote here that returns them in another order for some models; "unmeasured" when nobody compared it. Replay and
        counts do not depend on it; `gate_weights` are in the order of the ids."""
        return self._promises.slot_order

    @property
    def spec(self) -> RoutingSpec:
        """The routers whose choices were recorded."""
        return self._spec

    @property
    def steps(self) -> list[int]:
        """Committed steps, ascending."""
        return list(self._sources.catalog.steps)

    def __len__(self) -> int:
        """Number of samples."""
        return self._sources.catalog.num_samples()

    def num_bytes(self) -> int:
        """Bytes of the Parquet files that hold the committed steps, as their manifests say; files are not read."""
        catalog = self._sources.catalog
        return catalog.retry(lambda: sum(f.bytes for name in catalog.folders for f in catalog.manifest(name).files))

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and self._sources.catalog.find(sample_id) is not None

    def __getitem__(self, sample_id: str) -> Trace:
        """The trace of `sample_id`; KeyError when there is none."""
        trace = read_sample(self._sources, sample_id)
        if trace is None:
            raise self._absent(sample_id)
        return trace

    def __iter__(self) -> Iterator[Trace]:
        return self.iter()

    def iter(self, step: Steps = None, *, filter: pc.Expression | None = None) -> Iterator[Trace]:
        """Traces of one step, of several or of all, as written; one row group (at most 16 samples) is in memory.

        >>> [t.sample_id for t in ds.iter(range(2), filter=pc.field("finish_reason") == "stop")]
        ['run/0/0-0/1', 'run/1/4-0/0']
        """
        if filter is None:
            return iter_traces(self._sources, self._chosen(step))
        batches = self.scan(step=step, filter=filter)
        return (trace for batch in batches for trace in from_table(pa.table(batch), check_crc=True))

    def select(self, sample_ids: Iterable[str]) -> Iterator[Trace]:
        """These samples in this order; neighbours of one file are read together, at most 16.

        >>> [t.sample_id for t in ds.select(["run/1/4-0/0", "run/0/0-0/1"])]
        ['run/1/4-0/0', 'run/0/0-0/1']

        Raises:
            KeyError: a sample is not in the dataset.
        """
        return read_rows(self._sources, (self._find(sample_id) for sample_id in sample_ids))

    def scan(
        self, columns: Sequence[str] | None = None, filter: pc.Expression | None = None, step: Steps = None
    ) -> Iterator[pa.RecordBatch]:
        """Record batches of the rows that pass `filter`, a pyarrow expression over `storage.schema.COLUMNS`.

        The filter sees annotated rewards and metadata. Steps, weight versions, rewards, finish reasons, groups and
        sample_ids have statistics: row groups that hold no match are not read. About one row group is in memory.
        """
        if unknown := set(columns or ()) - set(COLUMNS):
            raise ValueError(f"no such columns: {sorted(unknown)}; a trace has {list(COLUMNS)}")
        batches = iter_batches(self._sources, self._chosen(step), COLUMNS if columns is None else columns, filter)
        return (batch for batch in batches if batch.num_rows)

    def to_arrow(
        self, step: Steps = None, columns: Sequence[str] | None = None, filter: pc.Expression | None = None
    ) -> pa.Table:
        """What `scan` gives, as one table.

        >>> ds.to_arrow(step=0, columns=["sample_id", "reward"]).num_rows
        200
        """
        batches = list(self.scan(columns, filter, step))
        schema = trace_schema(self._spec, COLUMNS if columns is None else columns)
        return pa.Table.from_batches([batch.cast(schema) for batch in batches], schema)

    def annotate(self, step: int, samples: Mapping[str, Mapping[str, Any]]) -> None:
        """Add facts to samples of a committed step: `reward` replaces the reward, other keys join the metadata.

        Atomic and durable: readers that open or refresh later see all of it. Committed files stay as they are. Of
        several annotations the later one wins, per sample and key.

        >>> ds.annotate(7, {"run/7/0-0/0": {"reward": 1.0, "judge": "v2"}})

        Raises:
            ValueError: the step is not committed, a sample is not in it, or a value is no JSON; nothing is written.
        """
        (step,) = self._chosen(step)
        if unknown := set(samples) - set(self._sources.catalog.sample_ids(step)):
            raise ValueError(f"step {step} of {self.root} has no samples {sorted(unknown)[:3]} ({len(unknown)} in all)")
        write_annotation(self._sources.store, step, samples)
        self._sources.annotations.refresh()

    def torch(
        self, step: Steps = None, *, rank: int = 0, world_size: int = 1, shuffle_buffer: int = 0, seed: int = 0
    ) -> TraceStream:
        """These traces as a torch IterableDataset: sharded by rank and worker, shuffled, resumable. Imports torch.

        >>> loader = DataLoader(ds.torch(shuffle_buffer=256), batch_size=32, collate_fn=ReplayBatch.collate)
        """
        from storage.torch_stream import TraceStream

        places = {"rank": rank, "world_size": world_size}
        return TraceStream(self._sources, self._chosen(step), shuffle_buffer=shuffle_buffer, seed=seed, **places)

    def compact(self, max_bytes: int = 256 << 20) -> list[str]:
        """Merge many small steps into packs of about `max_bytes`; see `storage.compact.compact`. Steps, samples and
        annotations stay what they are. Other programs find the files with `traces/*-*/*.parquet`."""
        packs = compact(self._sources.store, max_bytes)
        self.refresh()
        return packs

    def archive(self, before: int, max_bytes: int = 256 << 20) -> list[str]:
        """Rewrite the steps below `before` for cold storage, about `max_bytes` to a pack; see `storage.compact`.

        Everything here reads them as before. Other programs find `routed_experts_by_site` instead of `routed_experts`.

        >>> ds.archive(before=100)
        ['pack-000000000-000000099-5c0f5c0f']

        Raises:
            DatasetInUseError: another process or thread compacts or archives this local dataset; it is left to go on.
        """
        packs = archive(self._sources.store, before, max_bytes)
        self.refresh()
        return packs

    def keep_from(self, step: int) -> None:
        """Drop every step below `step` for good: readers lose them at once, then their files are deleted.

        >>> ds.keep_from(100); ds.steps[0]
        100
        """
        keep_from(self._sources.store, step)
        remove_superseded(self._sources.store)
        self.refresh()

    def build_index(self) -> None:
        """Write or renew the index, a cache that saves reading every manifest; a TraceWriter does so when it closes."""
        self._sources.catalog.build_index()

    def verify(self) -> list[str]:
        """Every problem found by `storage.verify.verify_dataset`; empty when the dataset is sound."""
        return verify_dataset(self.root)

    def _find(self, sample_id: str) -> Row:
        found = self._sources.catalog.find(sample_id)
        if found is None:
            raise self._absent(sample_id)
        return Row(*found, sample_id)

    def _absent(self, sample_id: str) -> KeyError:
        return KeyError(f"{sample_id!r} is not among the {len(self)} samples of {self.root}")

    def _chosen(self, step: Steps) -> list[int]:
        if step is None:
            return self.steps
        chosen = [step] if isinstance(step, int) else list(step)
        if absent := [number for number in chosen if number not in self._sources.catalog]:
            raise ValueError(f"step {absent[0]} is not committed in {self.root}; committed: {_short(self.steps)}")
        return chosen


def _short(steps: list[int]) -> str:
    return str(steps) if len(steps) <= 20 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
