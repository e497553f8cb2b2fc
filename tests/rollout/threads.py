"""Which threads a test leaves behind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

OURS = "moe-rollout"


def threads() -> set[threading.Thread]:
    """All but the progress bar's, which tqdm starts once and keeps."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


def ours(among: set[threading.Thread]) -> set[threading.Thread]:
    return {thread for thread in among if thread.name.startswith(OURS)}


@contextlib.contextmanager
def no_thread_left() -> Iterator[None]:
    """No thread is left that was not there before: at once the same ones of ours run, a library's end soon.

    transformers does not wait for the threads that it loads weights with; they may end after a load returns.
    """
    before = threads()
    yield
    after = threads()
    assert ours(after) == ours(before)
    end = time.monotonic() + 60
    for thread in after - before:
        thread.join(max(0.0, end - time.monotonic()))
    assert not {thread for thread in after - before if thread.is_alive()}
