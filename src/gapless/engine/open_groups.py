"""OpenGroups: the requests that have not had their last output, by their labels, which need not be unique."""

from __future__ import annotations

import threading

from gapless.text.outputs import RequestGroup


class OpenGroups:
    """See the module. From any thread. ``lock`` is held from a label's entry to the hand-over of its requests, so that
    an abort of the label, which finds it here, comes after them in the inbox."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._groups: dict[str, list[RequestGroup]] = {}

    def add(self, groups: list[RequestGroup]) -> None:
        """For use within ``lock``."""
        for group in groups:
            self._groups.setdefault(group.request_id, []).append(group)

    def find(self, label: str) -> list[RequestGroup]:
        """All with this label."""
        with self.lock:
            return list(self._groups.get(label, ()))

    def forget(self, group: RequestGroup) -> None:
        """It has ended."""
        with self.lock:
            groups = self._groups.get(group.request_id, [])
            if group in groups:
                groups.remove(group)
            if not groups:
                self._groups.pop(group.request_id, None)

    def __contains__(self, label: str) -> bool:
        return label in self._groups

    def __len__(self) -> int:
        return len(self._groups)
