"""The converter's progress bar: percentage, bytes, time left, bytes per second, and tensor i of n."""

from tqdm import tqdm


class ProgressBar(tqdm):
    """A bar on standard error, if that is a terminal and `shown` is set. `update` adds bytes."""

    def __init__(self, nbytes: int, tensors: int, *, shown: bool) -> None:
        disable = None if shown else True
        super().__init__(total=nbytes, unit="B", unit_scale=True, desc="convert", disable=disable, leave=False)
        self._tensors = tensors

    def begin(self, number: int) -> None:
        """Show that tensor `number`, counted from 1, is being written."""
        self.set_postfix_str(f"tensor {number}/{self._tensors}", refresh=False)
