# SPDX-License-Identifier: Apache-2.0
"""The parked calls by the component's method that they call, and by what can run together."""

from collections.abc import Iterator

from vllm_omni.diffusion.call_queue import CallQueue
from vllm_omni.diffusion.calls import Call, GroupKey


class Group(CallQueue):
    """Calls that can run in one forward.

    Attributes:
        urgency: Its place in the order; None if it has to be found out anew.
    """

    def __init__(self) -> None:
        super().__init__()
        self.urgency: tuple[int, float] | None = None

    def add(self, call: Call) -> None:
        """See `CallQueue`."""
        super().add(call)
        self.urgency = None

    def discard(self, call: Call) -> None:
        """See `CallQueue`."""
        super().discard(call)
        self.urgency = None


class Lane:
    """The parked calls of one method.

    Attributes:
        passed: Forwards of other methods since its own last one, while calls were parked here.
        waited_s: How long those took.
    """

    def __init__(self) -> None:
        self.passed = 0
        self.waited_s = 0.0
        self._groups: dict[GroupKey, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def group(self, call: Call) -> Group:
        """The group of a call that is here."""
        return self._groups[call.group]

    def add(self, call: Call) -> None:
        """Take a call."""
        group = self._groups.get(call.group)
        if group is None:
            group = self._groups[call.group] = Group()
        group.add(call)

    def discard(self, call: Call) -> None:
        """Forget a call that is here."""
        group = self._groups[call.group]
        group.discard(call)
        if not group:
            del self._groups[call.group]
