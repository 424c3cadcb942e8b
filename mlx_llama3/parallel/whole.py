"""What needs a whole model says so, where only a part of one may be here."""

from typing import Any


def is_part(model: Any) -> bool:
    """Whether `model` is rank 0's part of one that lies on several ranks."""
    return getattr(model, "_leader", None) is not None  # of `leader.LeadTransformer` and `LeadPipeline`


def need_whole(model: Any) -> None:
    """Raise `UserError` if `model` is a part of one: for what looks into single heads, neurons or weights."""
    if is_part(model):
        raise model._leader.world.not_whole()
