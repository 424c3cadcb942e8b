"""HTML snippets that panels and views share. All text from users, files and models is escaped."""

from collections.abc import Iterable
from html import escape

_VISIBLE_SPACE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def notice(text: str = "", kind: str = "info") -> str:
    """A one-sentence message. kind: "info", "warning" or "error"; screen readers announce an error at once."""
    role = "alert" if kind == "error" else "status"
    return f'<div class="notice {kind}" role="{role}">{escape(text)}</div>' if text else ""


def progress_bar(text: str, share: float | None) -> str:
    """A progress bar with a sentence; `share` is from 0 to 1, None if unknown."""
    value = "" if share is None else f' value="{min(1.0, max(0.0, share)):.3f}"'
    return f'<div class="progress" role="status"><span>{escape(text)}</span><progress{value}></progress></div>'


def gauge(used: int, capacity: int, speed: float, drafts: str = "") -> str:
    """Tokens per second, with a tooltip about `drafts`, and a meter of the context in use."""
    share = used / capacity if capacity else 0.0
    level = "full" if share > 0.9 else "high" if share > 0.7 else "low"
    speed_text = f'<span title="{escape(drafts)}"><b>{speed:.1f}</b> tokens/s</span>' if speed else ""
    label = f"{used} of {capacity} tokens of context used"
    return (
        f'<div class="gauge {level}" title="{label}">{speed_text}<span><b>{used:,}</b> / {capacity:,} context</span>'
        f'<meter min="0" max="1" value="{share:.4f}" aria-label="{label}"></meter></div>'
    )


def size(nbytes: float) -> str:
    """A number of bytes in GB or MB (10**9, 10**6 bytes)."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def token(piece: str, max_length: int = 14) -> str:
    """A token's text, escaped, with visible white space and unprintable characters, truncated to `max_length`."""
    text = "".join(_VISIBLE_SPACE.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in piece) or "∅"
    text = text if len(text) <= max_length else text[: max_length - 1] + "…"
    return f'<code class="token">{escape(text)}</code>'


def number(value: float) -> str:
    """Four significant digits; very large and very small numbers with an exponent."""
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def percent(share: float) -> str:
    """`12.3 %`; a share that would round to zero is `< 0.1 %`."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def table(head: Iterable[str], rows: Iterable[Iterable[str]], *, css: str = "", label: str = "") -> str:
    """A table whose cells are HTML; a row is a list of cells or a complete `<tr>`."""
    body = "".join(row if isinstance(row, str) else f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return (
        f'<table class="view-table {css}" aria-label="{escape(label)}"><thead><tr>'
        f"{''.join(f'<th>{name}</th>' for name in head)}</tr></thead><tbody>{body}</tbody></table>"
    )


def cell(content: str) -> str:
    """`content` as a table cell, unless it is one already."""
    return content if content.startswith(("<td", "<th")) else f"<td>{content}</td>"


def shaded(content: str, share: float, title: str = "") -> str:
    """A table cell with a stronger background for a larger `share` (0 to 1)."""
    strength = round(100 * min(1.0, max(0.0, share)) ** 0.5 * 0.6)
    style = f"background: color-mix(in oklab, var(--view-shade) {strength}%, transparent)"
    return f'<td style="{style}" title="{escape(title)}">{content}</td>'


def bar_cell(value: float, largest: float, *, signed: bool = False) -> str:
    """A bar whose length is `value` relative to `largest`; a signed one starts in the middle."""
    share = 0.0 if largest <= 0 else min(1.0, abs(value) / largest)
    width = share * (50 if signed else 100)
    left = 50 - width if signed and value < 0 else 50 if signed else 0
    kind = "minus" if value < 0 else "plus"
    return (
        f'<span class="bar {"signed" if signed else ""}"><i class="{kind}" '
        f'style="left:{left:.2f}%;width:{width:.2f}%"></i></span>'
    )


def empty(sentence: str) -> str:
    """A placeholder for a view that has nothing to show."""
    return f'<div class="view-empty">{escape(sentence)}</div>'
