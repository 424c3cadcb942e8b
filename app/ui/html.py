"""Small pieces of HTML: sentences, gauges and progress bars. Everything from outside is escaped."""

from html import escape


def notice(text: str = "", kind: str = "info") -> str:
    """A sentence for where the person looks; `kind` "error" is announced by a screen reader at once."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="notice {kind}" role="{role}">{escape(text)}</div>' if text else ""


def bar(text: str, share: float | None) -> str:
    """A progress bar with a sentence; `share` is from 0 to 1, None if nobody knows."""
    value = "" if share is None else f' value="{min(1.0, max(0.0, share)):.3f}"'
    return f'<div class="progress" role="status"><span>{escape(text)}</span><progress{value}></progress></div>'


def gauge(used: int, capacity: int, speed: float, drafts: str = "") -> str:
    """Tokens a second, with a word on the `drafts` that made them, and how much of the context is used."""
    share = used / capacity if capacity else 0.0
    level = "full" if share > 0.9 else "high" if share > 0.7 else "low"
    tempo = f'<span title="{escape(drafts)}"><b>{speed:.1f}</b> tokens/s</span>' if speed else ""
    label = f"{used} of {capacity} tokens of context used"
    return (
        f'<div class="gauge {level}" title="{label}">{tempo}<span><b>{used:,}</b> / {capacity:,} context</span>'
        f'<meter min="0" max="1" value="{share:.4f}" aria-label="{label}"></meter></div>'
    )


def size(nbytes: float) -> str:
    """Bytes in GB or MB (10**9, 10**6), as memory and disks are sold."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
