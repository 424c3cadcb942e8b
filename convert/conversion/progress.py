"""The converter's progress bar: share, bytes, time left, bytes a second, and which tensor of how many."""

from tqdm import tqdm


class ProgressBar(tqdm):
    """A bar on standard error, if that is a terminal and `shown` is set; counts bytes by `update`."""

    def __init__(self, nbytes: int, tensors: int, *, shown: bool) -> None:
        disable = None if shown else True
        super().__init__(total=nbytes, unit="B", unit_scale=True, desc="convert", disable=disable, leave=False)
        self._tensors = tensors

    def begin(self, number: int) -> None:
        """Say that tensor `number`, counted from 1, is being written."""
        self.set_postfix_str(f"tensor {number}/{self._tensors}", refresh=False)
