"""From a PEFT folder to matrices by module name, checked and scaled. Runs on the caller's thread, on the host."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gapless.device.modes import plain_modes
from gapless.errors import AdapterError
from gapless.lora.bank import LoraWeights
from gapless.lora.config import WEIGHTS_FILE, LoraConfig, read_config

PREFIX = "base_model.model."
"""Before the base model's own names."""
_KEY = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


@plain_modes()
def read_adapter(
    path: str | Path, modules: Iterable[str] = (), allow_missing: Sequence[str] = ()
) -> dict[str, LoraWeights]:
    """All matrices of an adapter, by the name of the linear layer; b is multiplied by the scaling, in fp32.

    Args:
        path: of its folder.
        modules: that the base model has. An adapter that was trained on one of them and does not hold it is not whole.
        allow_missing: names or patterns of modules that it may lack.

    Raises:
        AdapterError: the folder cannot be read, or holds what cannot be served; the message names it.
    """
    config = read_config(path)
    folder = Path(path).expanduser()
    halves: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                match = _KEY.fullmatch(key)
                if match is None:
                    raise AdapterError(
                        f"adapter {str(path)!r}: {WEIGHTS_FILE} holds {key!r}; only lora_A and lora_B of linear layers "
                        "can be served"
                    )
                halves.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"adapter {str(path)!r}: {WEIGHTS_FILE} cannot be read: {error}") from error
    lost = [m for m in config.lacks(modules, halves) if not any(fnmatchcase(m, p) for p in allow_missing)]
    if lost and halves:
        raise AdapterError(
            f"adapter {str(path)!r}: {len(lost)} of the modules in its target_modules are missing in {WEIGHTS_FILE}: "
            f"{', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. Save it again, or name them with allow_missing"
        )
    try:
        return {name: _weights(name, pair, config) for name, pair in halves.items()}
    except AdapterError as error:
        raise AdapterError(f"adapter {str(path)!r}: {error}") from None


def _weights(name: str, pair: dict[str, torch.Tensor], config: LoraConfig) -> LoraWeights:
    if len(pair) != 2:
        raise AdapterError(f"{name} has lora_{next(iter(pair))} without the other half")
    a, b = pair["A"].float(), pair["B"].float()
    rank = config.rank_of(name)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise AdapterError(
            f"{name}: A and B have the shapes {tuple(a.shape)} and {tuple(b.shape)}, but the configuration gives it "
            f"rank {rank}: (rank, inputs) and (outputs, rank) are needed"
        )
    b = b * config.scaling_of(name)
    if not (bool(a.isfinite().all()) and bool(b.isfinite().all())):
        raise AdapterError(f"{name}: its weights are not finite")
    return LoraWeights(a, b)
