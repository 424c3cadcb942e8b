"""The lens view of the clicked cell shows what the library computes."""

import numpy as np
import pytest
from view_page import HEAT, click

from app.ui.session.selection import Cell
from app.ui.views import lens_tables
from app.ui.views.inspection import inspect
from mlx_llama3.trace.attention import attention_from
from mlx_llama3.trace.attribution import attribute, promoted
from mlx_llama3.trace.lens import logit_lens

LAYER, TOKEN = 17, 40  # " France" of the answer; " is" came next


@pytest.fixture(scope="module")
def expected(view_server):
    """(Position, the next token) of the cell, from the library alone."""
    session = view_server.session

    def compute():
        position = session.look(TOKEN)
        target = int(session.trace.tokens[TOKEN + 1])
        return {
            "target": target,
            "lens": logit_lens(position, target, k=3),
            "attention": attention_from(position, LAYER),
            "parts": attribute(position, target),
            "promoted": promoted(position, LAYER, "mlp_out", k=8),
        }

    return view_server.engine.run(compute)


@pytest.fixture
def page(view_tab, view_server):
    page = view_tab(1000, 1000)
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    click(page, LAYER, TOKEN)
    page.wait_for_selector("#live-cell .cell-head:has-text('layer 17')")
    page.get_by_role("tab", name="Lens & attention").click()
    page.wait_for_selector("#lens-table table")
    return page


def test_the_lens_is_the_librarys(page, view_server, expected):
    lens, piece = expected["lens"], view_server.session.piece
    rows = page.locator("#lens-table tbody tr")
    assert rows.count() == 30
    assert rows.nth(0).locator("th").inner_text() == "29"  # the last layer on top
    cells = page.locator(f"#lens-table tr[data-layer='{LAYER}'] td").all_inner_texts()
    for after, start in ((0, 0), (1, 5)):
        texts = [piece(token).replace(" ", "·") for token in lens.ids[LAYER, after].tolist()]
        assert cells[start : start + 3] == texts
        assert int(cells[start + 3].replace(",", "")) == lens.rank[LAYER, after] + 1
        assert float(cells[start + 4]) == pytest.approx(lens.entropy[LAYER, after], abs=0.006)
    title = page.locator(f"#lens-table tr[data-layer='{LAYER}'] td").first.get_attribute("title")
    assert title.endswith(f"{100 * np.exp(lens.logprobs[LAYER, 0, 0]):.1f} %")
    assert page.locator("#lens-table tr.chosen").get_attribute("data-layer") == str(LAYER)
    assert page.inner_text("#lens-head").startswith("Layer 17, token 40 ·France → ·is")


def test_attention_of_every_head(page, expected):
    page.wait_for_function(f"({HEAT})('attention-heat') && ({HEAT})('attention-heat').heatData.count > 0")
    values = page.evaluate(
        f"(() => {{ const d = ({HEAT})('attention-heat').heatData;"
        "return Array.from(d.values.subarray(0, d.size * d.count)); })()"
    )
    np.testing.assert_array_equal(np.array(values, np.float32).reshape(TOKEN + 1, 9).T, expected["attention"])
    box = page.locator("#attention-heat canvas").bounding_box()
    page.mouse.move(box["x"] + 44 + 12 * 2.5, box["y"] + 8)
    tip = page.locator("#attention-heat .heat-tip").inner_text()
    assert tip.splitlines()[0].endswith("head 8") and tip.startswith("key 2 ")


def test_attribution_of_the_next_token(page, expected):
    parts = expected["parts"]
    page.get_by_role("tab", name="Attribution").click()
    row = page.locator(f"#lens-attribution tr[data-layer='{LAYER}'] td.figure")
    assert row.all_inner_texts() == [f"{parts.attention[LAYER]:+.2f}", f"{parts.mlp[LAYER]:+.2f}"]
    assert f"{parts.logit:.2f}" in page.inner_text("#lens-attribution .view-note")
    page.get_by_label("by head").check()
    page.wait_for_function(f"({HEAT})('heads-heat') && ({HEAT})('heads-heat').heatData.count === 9")
    values = page.evaluate(f"Array.from(({HEAT})('heads-heat').heatData.values)")
    np.testing.assert_allclose(np.array(values, np.float32).reshape(9, 30).T, parts.heads, atol=1e-5)


def test_another_token_may_be_asked_about(page, view_server):
    page.locator("#lens-target input").click()
    page.get_by_role("option").nth(1).click()  # the model's second best
    page.wait_for_selector("#lens-head:has-text('which the model is asked about')")
    target = page.inner_text("#lens-head .token >> nth=1")
    session = view_server.session

    def best():
        cell = Cell(session, LAYER, TOKEN)
        return [session.piece(token) for token, _ in inspect(cell).candidates]

    assert target == view_server.engine.run(best)[1].replace(" ", "·")


def test_pin_compare_unpin(page):
    page.get_by_role("button", name="Pin").click()
    page.wait_for_selector("#lens-head .cell-head >> nth=1")
    page.get_by_role("tab", name="Live").click()
    click(page, 5, 30)
    page.wait_for_selector("#live-cell .cell-head:has-text('layer 5')")
    page.get_by_role("tab", name="Lens & attention").click()
    page.wait_for_selector("#lens-head .cell-head:has-text('Layer 5, token 30')")
    heads = page.locator("#lens-head .cell-head").all_inner_texts()
    assert heads[1].startswith("pinned Layer 17, token 40")
    assert [t.get_attribute("data-layer") for t in page.locator("#lens-table tr.chosen").all()] == ["5", "17"]
    page.wait_for_function(f"({HEAT})('pinned-attention-heat').heatData.count === {TOKEN + 1}")
    page.get_by_role("button", name="Unpin").click()
    page.wait_for_function("document.querySelectorAll('#lens-head .cell-head').length === 1")
    assert page.locator("#lens-table table").count() == 1


def test_what_a_branch_promotes(page, view_server, expected):
    ids, values = expected["promoted"]
    page.get_by_role("tab", name="Promoted").click()
    rows = page.locator("#lens-promoted tbody tr")
    first = rows.nth(0).locator("td").all_inner_texts()
    piece = view_server.session.piece
    assert first[2].endswith(f"{values[0]:+.2f}") and piece(int(ids[0])).strip()[:6] in first[2]
    assert first[3].endswith(f"{values[8]:+.2f}")


def test_without_a_selection_it_says_what_to_do(view_tab, view_server):
    view_server.session.selected = None
    page = view_tab()
    page.get_by_role("tab", name="Lens & attention").click()
    page.wait_for_selector("#lens-head .view-empty:has-text('Select a cell in the Live tab')")


def test_tokens_in_tables_are_escaped(view_server):
    session = view_server.session
    inspection = view_server.engine.run(inspect, Cell(session, 3, 20))
    evil = dict.fromkeys(inspection.texts, "<script>x</script>")
    inspection = type(inspection)(**{**inspection.__dict__, "texts": evil, "piece": "<b>", "pieces": ["<i>"] * 21})
    for draw in (lens_tables.heading, lens_tables.lens, lens_tables.promoted):
        assert "<script" not in draw(inspection) and "<b>&" not in draw(inspection).replace("<b><code", "")
    assert "&lt;b&gt;" in lens_tables.heading(inspection)


def test_the_last_token_is_asked_about_the_models_best(view_server):
    session = view_server.session
    last = len(session.trace.tokens) - 1
    inspection = view_server.engine.run(inspect, Cell(session, 29, last))
    assert (
        inspection.chosen is None and inspection.target == inspection.candidates[0][0] == inspection.lens.ids[29, 1, 0]
    )
