"""Loading a base: progress while it lasts, and what was decided afterwards."""

from __future__ import annotations

import logging
from typing import NoReturn

from tqdm.auto import tqdm

from manylora import _core
from manylora.engine_args import Settings

logger = logging.getLogger("manylora")


def load(settings: Settings) -> _core.Engine:
    """Load the base that the settings name and start its engine.

    Raises:
        ModelNotFoundError, ModelError, HubError: the model could not be loaded.

    """
    config = settings.native()
    with _LoadBar(disable=not settings.use_tqdm_on_load) as bar:
        core = _core.Engine(config, bar.update_to)
    info = core.info()
    blocks = f"{info.kv_blocks} KV blocks of {info.block_size} tokens"
    working = f"{_bytes(info.working_bytes)} of working memory"
    if info.device_reason is not None:
        # Where there is a card that is not used, this is worth seeing without asking.
        logger.log(logging.WARNING if info.device_reason in info.notes else logging.INFO, info.device_reason)
    shared = f"{_bytes(info.ledger_bytes)} for {blocks} and for adapters"
    logger.info("%s; %s; %s; max_model_len %s", info.backend, working, shared, info.max_model_len)
    # A lowered context, what dequantizing takes: seen without asking.
    for note in info.notes:
        if note != info.device_reason:
            logger.warning(note)
    return core


class _LoadBar:
    """Progress of loading, in bytes of packed weights."""

    def __init__(self, disable: bool):
        self._disable = disable
        self._bar: tqdm[NoReturn] | None = None

    def __enter__(self) -> _LoadBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update_to(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far loading has come; called by the native side."""
        if self._bar is None:
            self._bar = tqdm(
                desc="Loading model",
                total=total_bytes,
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=self._disable,
                leave=False,
            )
        self._bar.update(done_bytes - self._bar.n)


def _bytes(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
