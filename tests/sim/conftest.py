"""Checkpoints and engines that several files of this folder share."""

from __future__ import annotations

from functools import cache

import pytest

from tests.sim.engines import on_sim, tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """`path("qwen3_moe")`: a checkpoint of two layers, saved once."""
    return cache(lambda family: tiny(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def open_on_device(path):
    """`open_on_device(family, **options)`: one engine per arguments; an implicit synchronisation is an error in it."""
    opened = []

    @cache
    def build(family, **options):
        rig = on_sim(path(family), **options)
        opened.append(rig)
        rig.sim.syncs.clear()
        rig.sim.raises = True
        return rig

    yield build
    for rig in opened:
        rig.sim.raises = False
        rig.built.close()
