"""Small pieces of HTML that panels and views share. Text from outside, a model's too, is always escaped."""

from collections.abc import Iterable
from html import escape

_SEEN = {" ": "·", "\n": "⏎", "\t": "⇥"}


def notice(text: str = "", kind: str = "info") -> str:
    """A sentence for where the person looks; `kind` "error" is announced by a screen reader at once."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="notice {kind}" role="{role}">{escape(text)}</div>' if text else ""


def progress_bar(text: str, share: float | None) -> str:
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


def token(piece: str, most: int = 14) -> str:
    """A token's text with its white space and unprintable characters seen, escaped and cut to `most` characters."""
    text = "".join(_SEEN.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in piece) or "∅"
    text = text if len(text) <= most else text[: most - 1] + "…"
    return f'<code class="token">{escape(text)}</code>'


def number(value: float) -> str:
    """Four significant digits; very large and very small numbers with an exponent."""
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def percent(share: float) -> str:
    """`12.3 %`; what is rounded to nothing is said to be below."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, css: str = "", label: str = "") -> str:
    """A table of cells that are HTML; a row may be a ready `<tr>`."""
    body = "".join(row if isinstance(row, str) else f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return (
        f'<table class="view-table {css}" aria-label="{escape(label)}"><thead><tr>'
        f"{''.join(f'<th>{name}</th>' for name in head)}</tr></thead><tbody>{body}</tbody></table>"
    )


def cell(content: str) -> str:
    """A table cell, unless it is one already."""
    return content if content.startswith(("<td", "<th")) else f"<td>{content}</td>"


def shaded(content: str, share: float, title: str = "") -> str:
    """A table cell whose background says how large `share` (0 to 1) is."""
    strength = round(100 * min(1.0, max(0.0, share)) ** 0.5 * 0.6)
    style = f"background: color-mix(in oklab, var(--view-shade) {strength}%, transparent)"
    return f'<td style="{style}" title="{escape(title)}">{content}</td>'


def bar_cell(value: float, most: float, *, signed: bool = False) -> str:
    """A bar of a table as long as `value` beside the largest, `most`; from the middle if signed."""
    share = 0.0 if most <= 0 else min(1.0, abs(value) / most)
    width = share * (50 if signed else 100)
    left = 50 - width if signed and value < 0 else 50 if signed else 0
    kind = "minus" if value < 0 else "plus"
    return (
        f'<span class="bar {"signed" if signed else ""}"><i class="{kind}" '
        f'style="left:{left:.2f}%;width:{width:.2f}%"></i></span>'
    )


def empty(sentence: str) -> str:
    """What stands where there is nothing to show yet."""
    return f'<div class="view-empty">{escape(sentence)}</div>'
