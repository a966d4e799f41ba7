"""TransformersModel: an unmodified ``transformers`` causal LM as the engine's `CausalModel`.

The model runs packed: one batch entry, the tokens of all requests one after the other, each with its
position. Two things make that possible without a change to the model's code. Its attention function is ours,
registered under a name of its own in ``AttentionInterface`` and in no mask registry, so that no mask is ever
built. And the step reaches that function as a private keyword argument, which every decoder hands through to
its attention layers. There is no other channel: nothing of a step or an engine is kept in this module, and
engines in several threads do not meet.

A caller's model is never changed: the module tree and the config are copied, parameters and buffers shared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from gapless.attention import reference
from gapless.attention.context import AttentionContext, AttentionParams
from gapless.cache.spec import LayerSpec
from gapless.errors import UnsupportedModelError
from gapless.lora.bank import AdapterBank, Part, Site
from gapless.model import checks
from gapless.model.config_checks import check_config
from gapless.model.embedding import override
from gapless.model.hybrid.layer import HybridLayer, ple_tables
from gapless.model.hybrid.replace import replace_layers
from gapless.model.lora_hooks import attach, token_linears
from gapless.model.products.cpu_linear import quicken
from gapless.model.token_rows import AttentionBackend, PackedStep

ATTENTION_NAME = "gapless"


@dataclass(frozen=True, slots=True)
class _Layer:
    """What our attention function finds on its module: the place in ``kv_caches`` and the constants."""

    index: int
    params: AttentionParams


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    gapless_step: PackedStep | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """What the model calls in place of its own attention. query ``[1, HQ, T, D]`` -> ``[1, T, HQ, D]``."""
    if gapless_step is None:
        raise RuntimeError(f"{type(module).__name__} runs gapless' attention outside of an engine's step")
    layer: _Layer = module._gapless_layer  # type: ignore[assignment]
    context = gapless_step.context.of(layer.index)
    out = gapless_step.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        context.kv_caches[layer.index],
        context,
        layer.params,
        context.scales_of(layer.index),
    )
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


class TransformersModel:
    """Implements `gapless.model.base.CausalModel`; see there for the attributes.

    Args:
        model: a causal LM of ``transformers`` on one device. It is copied, sharing parameters and buffers; a
            change of a weight in place is seen here too.
        attention: runs one layer's attention.
        name: for logs, default the config's name.
        max_model_len: longest context that will be asked for. It matters to RoPE "longrope", whose factors are fixed
            here (see `checks.fix_longrope`), and to sparse attention, which is plain while it can leave nothing out.
        num_drafts: most tokens of a step that may be taken back. Layers with a recurrent state keep one more state.

    Raises:
        UnsupportedModelError: the model holds a part that would be computed wrongly.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: AttentionBackend = reference.attend,
        name: str | None = None,
        max_model_len: int | None = None,
        num_drafts: int = 0,
    ) -> None:
        check_config(model.config)
        self.module = private_copy(model)
        self.config = self.module.config
        self.attention = attention
        self.name = name or str(getattr(model.config, "_name_or_path", "")) or type(model).__name__
        self.device = next(model.parameters()).device
        self.dtype = model.dtype
        self.max_position = checks.fix_longrope(self.module, max_model_len)
        longest = min(max_model_len or self.max_position, self.max_position)
        self.hybrid_layers: list[HybridLayer] = replace_layers(
            self.module, max_model_len=longest, num_drafts=num_drafts
        )
        checks.check_modules(self.module, known=[hybrid.layer for hybrid in self.hybrid_layers])
        self.expert_layers = 0
        self._choose_experts()
        if self.device.type == "cpu":
            quicken(self.module)

        survey = checks.survey(self.module, self.max_position, others=len(self.hybrid_layers))
        self.vocab_size = survey.vocab_size
        specs: list[LayerSpec] = [layer.kv_spec for layer in survey.layers]
        for hybrid in self.hybrid_layers:
            hybrid.places = tuple(range(len(specs), len(specs) + len(hybrid.specs)))
            specs += hybrid.specs
        self.kv_specs: tuple[LayerSpec, ...] = tuple(specs)
        for index, layer in enumerate(survey.layers):
            layer.module._gapless_layer = _Layer(index, layer.params)  # type: ignore[assignment]
        checks.set_attention(self.module, ATTENTION_NAME)

        self._bank: AdapterBank | None = None
        self._hooks: list[Any] = []
        self._tokens: Any = None  # while a step with adapters runs: the slots of its tokens
        self.eos_token_ids = _eos_token_ids(model)
        parameters = {id(parameter): parameter for parameter in model.parameters()}
        self.weight_bytes = sum(p.numel() * p.element_size() for p in parameters.values())

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: AttentionContext,
        logits_index: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `CausalModel`: ids and positions ``[T]``, logits_index ``[S]``, out ``[S, vocab_size]``."""
        if context.row_loras is not None and self._bank is not None:
            self._tokens = self._bank.tokens(context, len(input_ids))
        try:
            # no_grad, not inference_mode, whose tensors a trainer that shares the weights could not use.
            with torch.no_grad():
                output = self.module(
                    **self._inputs(input_ids, context.prompt_embeds),
                    position_ids=positions[None],
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=logits_index,
                    gapless_step=PackedStep(context, self.attention, positions),
                )
        finally:
            self._tokens = None
        out.copy_(output.logits[0])

    def _inputs(self, input_ids: torch.Tensor, overrides: torch.Tensor | None) -> dict[str, torch.Tensor]:
        if overrides is None:
            return {"input_ids": input_ids[None]}
        embedded = self.module.get_input_embeddings()(input_ids.clamp(min=0))
        return {"inputs_embeds": override(embedded, input_ids, overrides)[None]}

    def enable_prompt_embeds(self) -> int:
        """Let requests give embeddings for tokens; the width of one.

        Raises:
            UnsupportedModelError: the model looks at ids elsewhere too.
        """
        checks.refuse_ids_beside_embeddings(self.module, self.name, restore=ATTENTION_NAME)
        width: int = self.module.get_input_embeddings().weight.shape[1]
        return width

    def enable_lora(self, *, slots: int, rank: int, ops: ModuleType) -> AdapterBank:
        """Let requests run with adapters: every linear layer that sees each token once can have one.

        A linear layer has no argument by which a step could reach it. So the slots of a step's tokens stand in this
        object while its forward runs; a model runs one step at a time.

        Args:
            slots: adapters that fit.
            rank: the largest one.
            ops: see `AdapterBank`.
        """
        for handle in self._hooks:
            handle.remove()
        checks.set_attention(self.module, "eager")
        try:
            linears = token_linears(self.module)
        finally:
            checks.set_attention(self.module, ATTENTION_NAME)
        sites = [Site(linear.in_features, (Part(name, linear.out_features),)) for name, linear in linears]
        self._bank = AdapterBank(sites, rank=rank, slots=slots, dtype=self.dtype, ops=ops)
        self._hooks = attach(linears, self._add)
        return self._bank

    def _add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> None:
        if self._tokens is not None and self._bank is not None:
            self._bank.add(index, x, y, self._tokens)

    def _choose_experts(self) -> None:
        """On a GPU, experts run by kernels of this package; those of another kind, in a form that never waits."""
        chooses = getattr(self.module, "_can_set_experts_implementation", None)
        if self.device.type != "cuda" or chooses is None or not chooses():
            return
        from gapless.model.parts import experts, experts_triton

        # The grouped matmul has no fp32 form that a CUDA graph could hold.
        self.module.set_experts_implementation("batched_mm" if self.dtype == torch.float32 else "grouped_mm")
        self.expert_layers = experts.install(self.module, experts_triton.run)


def private_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The module tree and config copied, parameters and buffers shared; in eval mode.

    The parameters are objects of their own over the same storage. So an optimizer is followed, and a caller who
    converts or moves its model does not pull the weights away under a step.
    """
    apart = {id(table.weight) for table in ple_tables(model)}
    devices = {tensor.device for tensor in model.parameters() if id(tensor) not in apart}
    if len(devices) != 1:
        listed = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModelError(
            f"{type(model).__name__} lies on several devices ({listed}); move it to one"
        )
    shared: dict[int, Any] = {id(tensor): _twin(tensor) for tensor in model.parameters()}
    shared.update((id(tensor), tensor) for tensor in model.buffers())
    copied = copy.deepcopy(model, shared)
    return copied.eval()


def _twin(parameter: nn.Parameter) -> nn.Parameter:
    if type(parameter) is not nn.Parameter:
        return parameter
    twin = nn.Parameter(parameter.data, requires_grad=False)
    twin.gapless_source = parameter  # type: ignore[attr-defined]  # who must follow when the storage is merged
    return twin


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """From the generation config, else the config; each holds an int, a list or nothing."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(map(int, ids)) if isinstance(ids, list | tuple) else (int(ids),)
    return ()
