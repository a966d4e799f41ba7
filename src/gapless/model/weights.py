"""Weights: the tensors that steps read, by the model's own names, and how new values come into them.

Captured graphs hold addresses. So a value always changes in place: an optimizer that updates the caller's parameters
has done that already, because they share their storage with what runs here (see `gapless.model.adapter`); whatever
lies somewhere else is copied to the address that was there at start. Everything is checked before anything is copied.

Threads: `Weights.prepare` runs on the caller's thread and remembers what its streams have enqueued by then;
`WeightUpdate.apply` runs on the compute stream while no step is in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from gapless.errors import WeightError, did_you_mean
from gapless.model.python_state import Follow, PythonState

Named = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
"""New tensors by name: a state dict, or pairs. Some of the names are enough."""
_FORMS = ": a mapping from names to tensors is needed, or pairs (name, tensor)"


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """New values on their way: ``pairs`` of (what runs, what it becomes), and what the caller's streams do before."""

    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    events: tuple[torch.cuda.Event, ...] = ()
    flags: tuple[Follow, ...] = ()  # Python state that is followed, see `gapless.model.python_state`

    def apply(self) -> None:
        """Copy, behind the caller's work. The current stream is the compute stream."""
        for event in self.events:
            torch.cuda.current_stream().wait_event(event)
        with torch.no_grad():
            for target, source in self.pairs:
                target.copy_(source)
        for module, name, value in self.flags:
            setattr(module, name, value)


class Weights:
    """See the module.

    Args:
        module: what runs, after its layers were merged.
        source: the caller's own module, whose parameters it shares; None if the engine loaded it.
    """

    def __init__(self, module: nn.Module, source: nn.Module | None = None) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(module.state_dict())  # aliases: they keep the addresses
        self._source = source
        self._state = None if source is None else PythonState(source, module)
        self._host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self.device = next(iter(self._tensors.values())).device

    @property
    def owned(self) -> bool:
        """No caller shares these tensors."""
        return self._source is None

    @property
    def asleep(self) -> bool:
        """They lie on the host, and nothing can run."""
        return bool(self._host)

    def prepare(self, given: Named | None = None, *, follow: bool = True) -> WeightUpdate:
        """Check new values. None: those of the caller's module; ``follow`` is as in `PythonState.changes`.

        Raises:
            WeightError: naming the tensor; nothing has changed.
        """
        if self.asleep:
            raise WeightError("the weights are on the host since sleep(level=2): call wake() first")
        pairs = self._of_source() if given is None else self._of(given)
        flags = self._state.changes(follow=follow) if given is None and self._state is not None else []
        return WeightUpdate(tuple(pairs), self._events(source for _, source in pairs), tuple(flags))

    def _of_source(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self._source is None:
            raise WeightError(
                "the engine loaded this model itself, so there is nothing that you could have changed: give "
                "update_weights the new tensors, or make the engine from a model object"
            )
        theirs = self._source.state_dict()
        for name in theirs:
            if name not in self._tensors:
                raise WeightError(
                    f"your model has the tensor {name!r} now, which it did not have when the engine was made. Merge "
                    "adapters into it first, or make a new engine"
                )
        pairs = []
        for name, ours in self._tensors.items():
            tensor = theirs.get(name)
            if tensor is None:
                raise WeightError(f"your model had a tensor {name!r} when the engine was made and has none now")
            self._check(name, tensor)
            if not _same(ours, tensor):
                pairs.append((ours, tensor))
        return pairs

    def _of(self, given: Named) -> list[tuple[torch.Tensor, torch.Tensor]]:
        anything: object = given
        if not isinstance(anything, Iterable):
            hint = ": give its state_dict()" if isinstance(anything, nn.Module) else ""
            raise WeightError(f"weights of type {type(anything).__name__} are not allowed{hint or _FORMS}")
        items = given.items() if isinstance(given, Mapping) else given
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        tied: dict[tuple[int, tuple[int, ...]], tuple[str, torch.Tensor]] = {}
        for item in items:
            if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)):
                raise WeightError(f"weights holds an entry of type {type(item).__name__}{_FORMS}")
            name, tensor = item
            if name not in self._tensors:
                hint = did_you_mean(name, self._tensors)
                raise WeightError(f"the model has no tensor {name!r}.{hint}")
            self._check(name, tensor)
            ours, tensor = self._tensors[name], tensor.detach()
            place = (ours.data_ptr(), tuple(ours.shape))
            other, before = tied.setdefault(place, (name, tensor))
            if before is not tensor and not (_same(before, tensor) or torch.equal(before, tensor)):
                raise WeightError(f"{other!r} and {name!r} are one tensor in this model, and two values are given")
            if not _same(ours, tensor):
                pairs.append((ours, tensor))
        return pairs

    def _check(self, name: str, tensor: object) -> None:
        """Whether ``tensor`` can be copied to where ``name`` lies."""
        if not isinstance(tensor, torch.Tensor):
            raise WeightError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
        ours = self._tensors[name]
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or tensor.layout != torch.strided:
            kind = "meta tensor" if tensor.is_meta else type(tensor).__name__
            raise WeightError(f"{name!r} is a {kind}, whose values are not all here: gather it first")
        if tensor.shape != ours.shape:
            raise WeightError(f"{name!r} has the shape {tuple(tensor.shape)}; the model's has {tuple(ours.shape)}")
        if tensor.dtype != ours.dtype and not (tensor.is_floating_point() and ours.is_floating_point()):
            raise WeightError(f"{name!r} is {tensor.dtype}; the model's is {ours.dtype}")

    def _events(self, sources: Iterable[torch.Tensor]) -> tuple[torch.cuda.Event, ...]:
        devices = {tensor.device for tensor in sources} | {self.device}
        return tuple(torch.cuda.current_stream(d).record_event() for d in devices if d.type == "cuda")

    # ---- sleep ----------------------------------------------------------------------------------------------------

    def to_host(self) -> None:
        """Move the values to the host's memory and free the device's. Every view of them stays, and is empty."""
        if self.asleep or self.device.type == "cpu":
            return
        there = [t.untyped_storage() for t in self._tensors.values() if t.device.type != "cpu"]  # some may be here
        storages = {storage.data_ptr(): storage for storage in there}
        moved = [(storage, _bytes(storage).cpu()) for storage in storages.values()]  # sync-ok: off the step path
        for storage, _ in moved:
            storage.resize_(0)
        self._host = moved

    def to_device(self) -> None:
        """The other way; on an error everything is as before the call."""
        try:
            for storage, host in self._host:
                storage.resize_(host.numel())
                _bytes(storage).copy_(host)
        except BaseException:
            for storage, _ in self._host:
                storage.resize_(0)
            raise
        self._host = []


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same memory, read in the same way."""
    return (
        a.data_ptr() == b.data_ptr()
        and a.device == b.device
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
    )


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
