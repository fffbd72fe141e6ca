"""Values that rest on each other, also in circles: each is found again for as long as what it asked for grows."""

from collections.abc import Callable, Hashable

from fork.rebinds.values import NOTHING, Value

#: Deeper than this a value waits for its turn.
_DEEP = 50


class Memory:
    """Keeps every value that was found, how to find it, and which others asked for it."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] = {}
        self._compute: dict[Hashable, Callable[[], Value]] = {}
        self._asked_by: dict[Hashable, set[Hashable]] = {}
        self._waiting: dict[Hashable, None] = {}
        self._stack: list[Hashable] = []

    def find(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """What `compute` gives for `key`; where that asks for `key` again it gets what is known so far."""
        if self._stack:
            self._asked_by.setdefault(key, set()).add(self._stack[-1])
        if key not in self._values:
            self._values[key] = NOTHING
            self._compute[key] = compute
            if len(self._stack) < _DEEP:
                self._run(key)
            else:
                self._waiting[key] = None
        while self._waiting and not self._stack:
            self._run(self._waiting.popitem()[0])
        return self._values[key]

    def _run(self, key: Hashable) -> None:
        self._stack.append(key)
        found = self._values[key] | self._compute[key]()
        self._stack.pop()
        if found != self._values[key]:
            self._values[key] = found
            self._waiting |= dict.fromkeys(self._asked_by.get(key, ()))
