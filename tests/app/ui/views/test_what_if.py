"""What if: the distributions are those of the plain and the edited model; the chat continues with the edits."""

import numpy as np
import pytest
from view_page import HEAT, QUESTION

from app.ui.views.what_if_effect import compare, read_edits
from mlx_llama3.errors import UserError
from mlx_llama3.model.hooks.edits import Scale, edited

import mlx.core as mx

TOKEN = 40


@pytest.fixture
def own_session(view_server):
    """A session that a test may change, with the same answer as the shared one."""
    shared = view_server.session
    view_server.new_session()
    view_server.say(QUESTION)
    yield view_server.session
    view_server.session = shared


def test_edits_are_read():
    assert read_edits([" 3:mlp=0", "5:head:2=0.5 "]) == [Scale(3, "mlp", 0.0), Scale(5, "head", 0.5, head=2)]
    with pytest.raises(UserError, match="'layer three' is not LAYER:BRANCH=FACTOR"):
        read_edits(["layer three"])


def test_a_change_is_that_of_two_full_passes(view_server):
    session = view_server.session
    edits = [Scale(0, "mlp", 0.5), Scale(7, "head", 0.0, head=3)]
    change = view_server.engine.run(compare, session, TOKEN, edits)
    tokens = session.trace.tokens.tolist()[: TOKEN + 1]

    def full(model):
        logits = np.array(model(mx.array([tokens]))[0, -1].astype(mx.float32), dtype=np.float64)
        shares = np.exp(logits - logits.max())
        return shares / shares.sum()

    p = view_server.engine.run(full, session.opened.model)
    q = view_server.engine.run(full, edited(session.opened.model, edits))
    assert change.kl == pytest.approx((p * np.log(p / q)).sum(), rel=1e-3)
    assert change.moved == pytest.approx(np.abs(p - q).sum() / 2, rel=1e-3)
    assert change.chosen == session.trace.tokens[TOKEN + 1]
    shown = {token: (before, after) for token, _, before, after in change.tokens}
    assert {int(p.argmax()), int(q.argmax()), change.chosen} <= set(shown)
    for token, (before, after) in shown.items():
        assert (before, after) == pytest.approx((p[token], q[token]), rel=2e-3, abs=1e-6)


def test_no_edit_changes_nothing(view_server):
    change = view_server.engine.run(compare, view_server.session, TOKEN, [])
    assert change.kl == pytest.approx(0, abs=1e-9) and change.moved == pytest.approx(0, abs=1e-9)


def open_view(view_tab):
    page = view_tab()
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    page.get_by_role("tab", name="What if").click()
    page.wait_for_selector("#what-if-used .view-note")
    return page


def test_an_edit_changes_the_distribution_and_the_chat(view_tab, view_server, own_session):
    page = open_view(view_tab)
    assert "plain model" in page.inner_text("#what-if-used")
    page.click("#what-if-add")
    page.wait_for_selector("#what-if-edits:has-text('0:mlp=0')")
    page.click("#what-if-compare")
    page.wait_for_selector(".what-if-said")
    last = len(own_session.trace.tokens) - 1
    change = view_server.engine.run(compare, own_session, last, [Scale(0, "mlp", 0.0)])
    assert float(page.inner_text(".what-if-said [data-figure='kl']")) == pytest.approx(change.kl, rel=1e-3)
    assert change.kl > 0.1
    token, _, before, after = change.tokens[0]
    figures = page.locator(f"#what-if-result tr[data-token='{token}'] td.figure").all_inner_texts()
    assert figures == [f"{100 * each:.1f} %" if each >= 0.0005 else "< 0.1 %" for each in (before, after)]

    page.click("#what-if-apply")
    page.wait_for_selector("#what-if-used:has-text('The chat runs under 0:mlp=0')")
    assert own_session.edits == [Scale(0, "mlp", 0.0)]
    view_server.say("And of Spain?", max_tokens=4)
    assert (own_session.trace.norm("mlp_out")[0] == 0).all()
    assert (own_session.trace.norm("mlp_out")[1] > 0).all()
    page.click("#what-if-plain")
    page.wait_for_selector("#what-if-used:has-text('plain model')")
    assert own_session.edits == []


def test_faults_are_sentences(view_tab, view_server, own_session):
    page = open_view(view_tab)
    page.click("#what-if-compare")
    page.wait_for_selector(".toast-body:has-text('There is no edit yet')")
    page.fill("#what-if-layer input", "29")
    page.locator("#what-if-branch input").click()
    page.get_by_role("option", name="One head").click()
    page.wait_for_selector("#what-if-head input")
    page.fill("#what-if-head input", "9")
    page.click("#what-if-add")
    page.wait_for_selector(".toast-body:has-text('head 9: this model has heads 0 to 8')")
    own_session.request = object()
    page.click("#what-if-apply")
    page.wait_for_selector(".toast-body:has-text('still being written')")
    own_session.request = None
