"""What was found out about a tensor, for as long as the same one comes again, unchanged: all layers, directions and
passes ask the same of the sizes of a batch."""

import weakref
from typing import Any

from torch import Tensor


class Remembered:
    """Of one tensor, the last."""

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Tensor], tuple[Any, ...], Any] | None = None

    def get(self, tensor: Tensor, *key: Any) -> Any:
        """What was `put` for the tensor and the key; None if it is another, or was changed since."""
        held = self._held
        if held is None or held[0]() is not tensor or held[1] != (tensor._version, *key):
            return None
        return held[2]

    def put(self, tensor: Tensor, value: Any, *key: Any) -> None:
        if not tensor.is_inference():  # those do not tell when they change
            self._held = weakref.ref(tensor), (tensor._version, *key), value
