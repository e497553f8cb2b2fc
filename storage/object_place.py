"""A folder that is being written in an object store: its parts lie where they stay, the put of its manifest commits it.

That put may fail without an answer, and may still be carried out later. From the moment in which it is sent, or in
which another writer was handed the parts, they are only deleted when a manifest that does not list them is there.
"""

from __future__ import annotations

import logging
import uuid

from storage.errors import DatasetError, MissingDataError, UnknownCommitError
from storage.manifest import MANIFEST_FILE, Manifest, read_manifest
from storage.object_store import ObjectStore
from storage.part import DigestFile

logger = logging.getLogger(__name__)


class ObjectPlace:
    """See `storage.open_folder.Place`: parts go where they stay, under names that no other writer uses."""

    def __init__(self, store: ObjectStore, target: str) -> None:
        self._store, self._target, self._unique = store, target, uuid.uuid4().hex
        self._parts: list[str] = []
        self._manifest = b""
        self._may_commit = False  # a manifest that lists the parts may appear yet
        self._unanswered = False  # the store failed in the commit; asking it again would only take as long once more

    def new_part(self, index: int) -> tuple[str, DigestFile]:
        """See `Place`."""
        import obstore

        self._parts.append(f"part-{index:05d}-{self._unique}.parquet")
        writer = obstore.open_writer(self._store.client, f"{self._target}/{self._parts[-1]}")
        return self._parts[-1], ObjectFile(writer)

    @property
    def folder(self) -> str:
        """See `Place`."""
        return self._target

    def lend(self) -> None:
        """See `Place`."""
        self._may_commit = True

    def adopt(self, folder: str, name: str, index: int) -> str:
        """See `Place`. It lies where it belongs already, under a name that no other place gives."""
        return name

    def seal(self, manifest: bytes) -> None:
        """See `Place`."""
        self._manifest = manifest

    def publish(self) -> None:
        """See `Place`. UnknownCommitError when the put was neither confirmed nor refused."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        self._may_commit = True
        try:
            self._store.create(f"{self._target}/{MANIFEST_FILE}", self._manifest)
        except FileExistsError:
            if not self._is_committed():  # by a put before it whose answer was lost
                self._may_commit = False
                raise
        except (PermissionDeniedError, UnauthenticatedError):
            self._may_commit = False
            raise
        except self._store.errors as error:
            raise self._unknown(f"its manifest was sent and not answered ({error})") from error

    def settle(self) -> None:
        """See `Place`: a put that has been answered is durable."""

    def remove(self) -> None:
        """See `Place`. Only parts: nobody else has these names. Those of a manifest that is there are committed, by a
        writer that adopted them, or by a put whose answer was lost. A failure is logged, as the store that fails here
        is often the one whose failure ended the step: what stays is litter."""
        if self._unanswered:
            self._leave("they may be committed")
            return
        failures: tuple[type[Exception], ...] = (DatasetError, *self._store.errors)
        try:
            self._remove_uncommitted()
        except failures as error:
            self._leave(f"they could not be removed ({error})")

    def _remove_uncommitted(self) -> None:
        listed = self._listed()
        if listed is None and self._may_commit:
            self._leave("they may be committed yet")
            return
        for name in sorted(set(self._parts) - (listed or set())):
            self._store.remove(f"{self._target}/{name}")

    def _leave(self, why: str) -> None:
        logger.warning(
            "leaving %d parts in %s: %s; repair_dataset() removes what was not committed",
            len(self._parts), self._store.url(self._target), why,
        )  # fmt: skip

    def _listed(self) -> set[str] | None:
        """Parts of the manifest that is there; None when there is none."""
        try:
            return {file.path for file in read_manifest(self._store, self._target).files}
        except MissingDataError:
            return None

    def _is_committed(self) -> bool:
        """Whether the manifest that is there is this one; of a step without samples every writer's is the same."""
        if not Manifest.from_json(self._manifest).files:
            return False
        try:
            return self._store.read(f"{self._target}/{MANIFEST_FILE}") == self._manifest
        except self._store.errors as error:
            raise self._unknown(
                f"a manifest is there, and whether it is this one could not be read ({error})"
            ) from error

    def _unknown(self, why: str) -> UnknownCommitError:
        self._unanswered = True
        return UnknownCommitError(
            f"whether {self._store.url(self._target)} was committed is not known: {why}. Its parts stay, in case it "
            "was. Look whether it is there before you write it again; if it is not, repair_dataset() removes the parts "
            "a day later"
        )

    def release(self) -> None:
        """See `Place`."""


class ObjectFile(DigestFile):
    """A multipart upload. One that is discarded is never completed, so no object appears."""

    def write(self, data: bytes) -> int:
        """See `DigestFile`."""
        return super().write(bytes(data))

    def flush(self) -> None:
        """Parts of an upload are sent when they are full."""

    def sync_and_close(self) -> None:
        """Complete the upload."""
        self._taking = False
        self._file.close()

    def discard(self) -> None:
        """See `DigestFile`."""
        self._taking = False
