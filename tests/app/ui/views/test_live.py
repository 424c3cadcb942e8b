"""The live view: a click selects a cell and shows its numbers; an out-of-range selection is dropped."""

import pytest
from view_page import HEAT, click


@pytest.fixture
def page(view_tab):
    page = view_tab()
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    return page


def test_a_click_tells_the_cell_in_numbers(page, view_server):
    click(page, 7, 26)
    page.wait_for_selector("#live-cell .cell-head:has-text('layer 7')")
    norms = view_server.session.trace.norms[:, 7, 26]
    assert page.inner_text("#live-cell .cell-head") == "·the token 26 (id 260), layer 7"
    assert page.locator("#live-cell .step b").all_inner_texts() == [f"{norm:.4g}" for norm in norms]
    share = page.locator("#live-cell .attn_out small").inner_text()
    assert share == f"{100 * norms[1] / norms[4]:.1f} %"
    assert view_server.session.selected == (7, 26)


def test_a_selection_goes_when_its_token_goes(page, view_server):
    click(page, 3, 40)
    page.wait_for_selector("#live-cell .cell-head:has-text('token 40')")
    trace = view_server.session.trace
    kept = (trace.tokens, trace.pieces, trace.norms)
    try:
        trace.truncate(30)
        page.click("#changed")
        page.wait_for_function(f"({HEAT})('live-heat').heatData.count === 30")
        page.wait_for_selector("#live-cell .view-empty")
        assert view_server.session.selected is None
    finally:
        trace.tokens, trace.pieces, trace.norms = kept
    page.click("#changed")
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count === 44")


def test_text_of_tokens_is_text(view_tab, view_server, monkeypatch):
    """A model's token that is HTML is shown as it is written."""
    trace = view_server.session.trace
    monkeypatch.setattr(trace, "pieces", [*trace.pieces[:20], "<img src=x onerror=alert(1)>", *trace.pieces[21:]])
    page = view_tab()
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    click(page, 3, 20)
    page.wait_for_selector("#live-cell .cell-head:has-text('token 20')")
    assert "<img·src=x·onerror=alert(1)>" in page.inner_text("#live-cell .cell-head")
    assert page.locator("#live-cell img").count() == 0


def test_a_page_opened_again_shows_the_selection(page, view_tab):
    click(page, 9, 33)
    page.wait_for_selector("#live-cell .cell-head:has-text('layer 9')")
    again = view_tab()
    again.wait_for_selector("#live-cell .cell-head:has-text('layer 9')")
    label = again.locator("#live-heat .heat-scroll")
    again.wait_for_function(f"({HEAT})('live-heat').heatData.count === 44")
    again.wait_for_timeout(200)
    assert "Selected: token 33" in label.get_attribute("aria-label")


def test_before_anything_is_said(view_tab, view_server):
    session = view_server.session
    try:
        view_server.new_session()
        page = view_tab()
        assert page.inner_text("#live-heat .heat-empty").startswith("Ask something")
        assert "No cell is selected" in page.inner_text("#live-cell")
    finally:
        view_server.session = session
