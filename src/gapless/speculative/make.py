"""From options to a `Speculation`: which proposer, and the kernels of the device."""

from __future__ import annotations

import functools

from gapless.model.base import CausalModel
from gapless.speculative.base import DraftKernels, MakeProposer, Speculation
from gapless.speculative.draft_model import DraftModelProposer, SampleAndStore
from gapless.speculative.ngram import NgramProposer
from gapless.speculative.steps import accept, expand, place
from gapless.speculative_config import SpeculativeConfig


def make_speculation(
    config: SpeculativeConfig, sample: SampleAndStore, *, on_gpu: bool, draft_model: CausalModel | None = None
) -> Speculation:
    """See the module.

    Args:
        config: of the engine.
        sample: the device's, for drafts that are drawn.
        on_gpu: take the Triton kernels; else plain torch, which runs on a CPU only.
        draft_model: of method ``draft_model``, on the device.
    """
    k = config.num_speculative_tokens
    make: MakeProposer
    if draft_model is not None:
        make = functools.partial(DraftModelProposer, draft_model, sample, k)
    else:
        make = _ngram(config, on_gpu)
    return Speculation(k, _kernels(on_gpu), make)


def _kernels(on_gpu: bool) -> DraftKernels:
    if not on_gpu:
        return DraftKernels(place, expand, accept)
    import gapless.speculative.steps_triton as kernels

    return DraftKernels(kernels.place, kernels.expand, kernels.accept)


def _ngram(config: SpeculativeConfig, on_gpu: bool) -> MakeProposer:
    k, least, most = config.num_speculative_tokens, config.min_ngram, config.max_ngram
    if not on_gpu:
        return lambda device, layout, num_blocks, max_seqs: NgramProposer(k, least, most)
    from gapless.speculative.ngram_triton import TritonNgramProposer

    return lambda device, layout, num_blocks, max_seqs: TritonNgramProposer(k, least, most, device, max_seqs)
