"""Fetches the samples of a batch, here or in a worker process, and says what the user's code raised there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from elche_worker.loading import UserCodeRaised, describe_raised

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Broken:
    """In place of a batch: user code raised. Out of a worker process come the words, and not the exception itself."""

    message: str
    traceback: str
    error: Exception | None = None

    def to_error(self) -> Exception:
        """What is raised."""
        return self.error or UserCodeRaised(self.message, self.traceback)

    def __reduce__(self) -> tuple[type["Broken"], tuple[str, str]]:
        return Broken, (self.message, self.traceback)


class Fetch:
    """The user's data set as a `DataLoader` reads it: a list of indices to a list of samples, or to what broke."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, file_name: str) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn or default_collate
        self._file_name = file_name

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[Any] | Broken:
        """The samples; those of a data set that fetches batches itself come at once."""
        index: int | None = None
        try:
            if indices and hasattr(self._dataset, "__getitems__"):
                return list(self._dataset.__getitems__(indices))
            samples = []
            for index in indices:
                samples.append(self._dataset[index])
            return samples
        except Exception as error:
            return self._broken(error, f"at sample {index} of the data set" if index is not None else "")

    def collate(self, samples: list[Any] | Broken) -> Any:
        """A batch of samples; None of no samples."""
        if isinstance(samples, Broken) or not samples:
            return samples or None
        try:
            return self._collate_fn(samples)
        except Exception as error:
            return self._broken(error, "where samples become a batch")

    def _broken(self, error: Exception, where: str) -> Broken:
        if where:
            error.add_note(where)
        raised = describe_raised(error, self._file_name)
        return Broken(str(raised), raised.traceback, error)
