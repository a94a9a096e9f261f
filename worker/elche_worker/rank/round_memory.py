"""Chooses where a rank holds rounds' copies of the model: on its device, if there is room, else in host memory."""

from elche.output import notice
from elche_worker.collectives.averaging import ValuesPlace
from elche_worker.collectives.operations import Collectives
from elche_worker.data.prefetch import DeviceTransfer

LEAST_BATCHES = 2
"""Batches after which training's memory use is known: the first one allocates the optimizer's state."""


class RoundMemory:
    """Chooses once, when the first batches have shown how much memory training needs; until then, host memory is used.
    Results are the same in both places, so each rank may choose for itself.
    """

    def __init__(self, wanted: str, transfer: DeviceTransfer, size_bytes: int) -> None:
        """`wanted`: the setting `memory`. Prefetched batches leave `size_bytes` free until the choice is made."""
        self._transfer = transfer
        self._size_bytes = size_bytes
        self._chosen = {"device": ValuesPlace.DEVICE, "host": ValuesPlace.PINNED}.get(wanted)
        if self._chosen is None:
            transfer.set_aside_bytes = size_bytes

    def place(self, group: Collectives, local_step: int) -> ValuesPlace:
        """The place for the next round's values, in this group and after `local_step` batches."""
        if group.device.type == "cpu":
            return ValuesPlace.DEVICE
        if self._chosen is None and local_step >= LEAST_BATCHES:
            self._transfer.plan()
            if (spare_bytes := self._transfer.spare_bytes) is not None:
                self._chosen = self._choose(spare_bytes)
        return self._chosen or ValuesPlace.PAGEABLE

    def _choose(self, spare_bytes: int) -> ValuesPlace:
        # `plan` has set this to 0 if training leaves less memory, which prefetched batches may then take.
        is_room = self._transfer.set_aside_bytes >= self._size_bytes
        self._transfer.set_aside_bytes = 0
        needed, spare = _gb(self._size_bytes), _gb(max(0, spare_bytes))
        where = "on the device" if is_room else "in host memory"
        notice(f"memory='auto': training leaves {spare} of the device: rounds hold {needed} {where}")
        return ValuesPlace.DEVICE if is_room else ValuesPlace.PINNED


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB"
