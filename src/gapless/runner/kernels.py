"""Kernels: the device-specific functions of a step that do not belong to the model. One set for each kind of device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gapless.batch.arena import Arena
from gapless.batch.row_layout import RowLayout
from gapless.batch.row_params import Feature
from gapless.batch.slot_layout import StepInputs
from gapless.runner.masks import MaskInputs, apply_masks
from gapless.runner.prepare import StepIndices, apply_updates, prepare
from gapless.sampling.reference import sample_and_store


class Prepare(Protocol):
    """See `gapless.runner.prepare.prepare`."""

    def __call__(self, step: StepInputs, arena: Arena, layout: RowLayout, out: StepIndices) -> None: ...


class Sample(Protocol):
    """See `gapless.sampling.reference.sample_and_store`."""

    def __call__(
        self,
        logits: torch.Tensor,
        arena: torch.Tensor,
        layout: RowLayout,
        rows: torch.Tensor,
        positions: torch.Tensor,
        sample_flags: torch.Tensor,
        features: Feature,
        out_tokens: torch.Tensor,
        out_records: torch.Tensor | None = None,
        *,
        processed_logprobs: bool = False,
    ) -> None: ...


class Mask(Protocol):
    """See `gapless.runner.masks.apply_masks`."""

    def __call__(self, inputs: MaskInputs, arena: torch.Tensor, layout: RowLayout) -> None: ...


class ApplyUpdates(Protocol):
    """See `gapless.runner.prepare.apply_updates`."""

    def __call__(self, step: StepInputs, arena: Arena) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two ends of a step; what comes between them in a step that awaits masks; and a part of the first by
    itself, for what comes before it in a step with drafts."""

    prepare: Prepare
    sample: Sample
    mask: Mask = apply_masks
    apply_updates: ApplyUpdates = apply_updates


def triton_kernels() -> Kernels:
    """Triton, for a GPU. Imported late: a CPU needs none of it."""
    from gapless.runner import masks_triton, prepare_triton
    from gapless.sampling import triton

    updates = prepare_triton.apply_updates
    return Kernels(prepare_triton.prepare, triton.sample_and_store, masks_triton.apply_masks, updates)


def reference_kernels() -> Kernels:
    """Plain torch, for the CPU."""
    return Kernels(prepare, sample_and_store)
