"""The what-if view: scale or silence a branch or a head, compare the next token, and chat with the edited model."""

from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from app.options.edits import edit_text
from app.ui import html
from app.ui.session.selection import Cell, Selection, call_reporting_errors
from app.ui.session.session import Session
from app.ui.views.what_if_effect import Change, compare, read_edits
from mlx_llama3.model.hooks.edits import Scale, edited

TAB = "What if"
_WHAT = """
An edit multiplies the update of a layer's **attention** or **MLP**, or one attention **head**, by a factor, at every
position: 0 silences it, 1 changes nothing, 2 doubles it. The model itself is never changed; a copy that shares its
weights runs with the edits.

*Compare* runs the conversation up to the selected token (or the last one) with and without the edits and shows what
would come next. *Use in the chat* continues the chat with them: the next answer reads the whole conversation anew,
and all other tabs then inspect the edited model. An edit is written `layer:attention=factor`, `layer:mlp=factor` or
`layer:head:number=factor`.
"""
_BRANCHES = [("Attention", "attention"), ("MLP", "mlp"), ("One head", "head")]
_NO_MODEL = "No model is loaded: choose one at the top and press Load."


def build(selection: Selection) -> None:
    """Create the view in the current tab and connect its events."""
    services = selection.services
    with gr.Row(elem_classes="view-row"):
        layer = gr.Number(0, label="Layer", precision=0, minimum=0, elem_id="what-if-layer", min_width=80)
        branch = gr.Dropdown(_BRANCHES, value="mlp", label="Branch", elem_id="what-if-branch", min_width=110)
        head = gr.Number(0, label="Head", precision=0, minimum=0, elem_id="what-if-head", min_width=80, visible=False)
        factor = gr.Slider(-1, 3, 0, step=0.05, label="Factor", elem_id="what-if-factor", min_width=180)
        add = gr.Button("Add", size="md", elem_id="what-if-add", min_width=70, scale=0)
    edits = gr.Dropdown(
        [],
        value=[],
        label="Edits (remove with ×, or type one: 3:mlp=0)",
        multiselect=True,
        allow_custom_value=True,
        elem_id="what-if-edits",
    )
    with gr.Row(elem_classes="view-row"):
        try_it = gr.Button("Compare", variant="primary", size="md", elem_id="what-if-compare", min_width=110)
        apply = gr.Button("Use in the chat", size="md", elem_id="what-if-apply", min_width=110)
        plain = gr.Button("Back to the plain model", size="md", elem_id="what-if-plain", min_width=110)
    used = gr.HTML(elem_id="what-if-used")
    result = gr.HTML(html.empty("Add an edit, then compare."), elem_id="what-if-result")
    with gr.Accordion("What is this?", open=False):
        gr.Markdown(_WHAT)

    draw, ids = _Draw(selection), services.session_id
    quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "multiple"}
    branch.change(lambda chosen: gr.update(visible=chosen == "head"), branch, head, **quiet)
    add.click(draw.add, [ids, edits, layer, branch, head, factor], edits, **quiet)
    try_it.click(draw.compare, [ids, edits], result, show_progress_on=result)
    applied = [used, services.generation_done]
    apply.click(draw.apply, [ids, edits], applied, **quiet)
    plain.click(draw.plain, [ids], applied, **quiet)
    selection.redraw(TAB, draw.state, [used, layer])


@dataclass(frozen=True)
class _Draw:
    selection: Selection

    def state(self, session: Session | None, cell: Cell | None) -> list[Any]:
        """Show the edits in use; the selected layer becomes the default for the next edit."""
        if session is None:
            return [html.empty(_NO_MODEL), gr.skip()]
        last = session.opened.model.args.n_layers - 1
        return [_used(session), gr.update(maximum=last, value=cell.layer) if cell else gr.update(maximum=last)]

    def add(
        self, session_id: str, edits: list[str], layer: float, branch: str, head: float, factor: float
    ) -> list[str] | Any:
        """Add an edit to the list; it replaces one of the same branch or head."""
        session = self.selection.services.need_session(session_id)
        new = Scale(int(layer), branch, float(factor), int(head) if branch == "head" else None)
        call_reporting_errors(self.selection.services, edited, session.opened.model, [new])
        place = edit_text(new).partition("=")[0]
        others = [text for text in edits or [] if text.partition("=")[0].strip() != place]
        texts = [*others, edit_text(new)]
        return gr.update(choices=texts, value=texts)

    def compare(self, session_id: str, edits: list[str]) -> str:
        """Compare the next token after the selected one with and without the edits."""
        services = self.selection.services
        session = services.need_session(session_id)
        cell = self.selection.find(session_id)
        count = session.trace.norms.shape[-1]
        if not count:
            raise services.error("Nothing was said yet: ask something, then compare.")
        if not edits:
            raise services.error("There is no edit yet: choose a layer and a branch, and press Add.")
        position = cell.position if cell else count - 1
        change = call_reporting_errors(
            services, lambda: services.engine.run(compare, session, position, read_edits(edits))
        )
        return _result(session, change, edits)

    def apply(self, session_id: str, edits: list[str]) -> list[Any]:
        """Continue the chat with the edits."""
        services = self.selection.services
        session = services.need_session(session_id)
        if session.request is not None:
            raise services.error("The answer is still being written: wait for it, or press Esc to stop it.")
        call_reporting_errors(services, lambda: services.engine.run(session.set_edits, read_edits(edits or [])))
        return [_used(session), services.next_change()]

    def plain(self, session_id: str) -> list[Any]:
        """Continue the chat without edits."""
        return self.apply(session_id, [])


def _used(session: Session) -> str:
    if not session.edits:
        return "<div class='view-note'>The chat runs on the plain model.</div>"
    texts = ", ".join(f"<code>{escape(edit_text(edit))}</code>" for edit in session.edits)
    return f"<div class='view-note'><b>The chat runs under {texts}.</b> The next answer shows it.</div>"


def _result(session: Session, change: Change, edits: list[str]) -> str:
    before = max(change.tokens, key=lambda row: row[2])
    after = max(change.tokens, key=lambda row: row[3])
    if before[0] == after[0]:
        what = f"the best next token stays {html.token(before[1], 30)}"
    else:
        what = f"the best next token turns from {html.token(before[1], 30)} to {html.token(after[1], 30)}"
    piece = html.token(session.trace.pieces[change.position], 30)
    rows = []
    for token, text, p, q in change.tokens:
        name = html.token(text, 24) + (" <small>came next</small>" if token == change.chosen else "")
        bars = (
            f'<td class="wide">{html.bar_cell(share, 1.0)}</td><td class="figure">{html.percent(share)}</td>'
            for share in (p, q)
        )
        rows.append(f"<tr data-token='{token}'><td>{name}</td>{''.join(bars)}</tr>")
    table = html.table(["token", "before", "", "after", ""], rows, label="Next tokens before and after")
    return (
        f"<div class='what-if-said'>After token {change.position} {piece} <b>{what}</b>. "
        f"{html.percent(change.moved)} of the probability moves; "
        f"KL divergence <span data-figure='kl'>{html.number(change.kl)}</span> nats.</div>"
        f"<div class='view-scroll'>{table}</div>"
    )
