"""The cards show expressions of the model's source, the arrays' shapes, and statistics of real states."""

import inspect as python
from pathlib import Path

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, tiny_model, write_folder
from view_page import HEAT, click

import mlx_llama3
from app.ui.session.selection import Cell
from app.ui.views.source_cards import CARDS, SourceFile, source
from app.ui.views.tensor_statistics import layer_weights, measure
from mlx_llama3.checkpoint import loading

import mlx.core as mx

ROOT = Path(python.getsourcefile(mlx_llama3)).parents[1]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_expression_stands_in_the_source_at_its_line(card):
    lines = card.find(source())
    assert lines
    for line in lines:
        written = (ROOT / line.file).read_text(encoding="utf-8").splitlines()
        assert line.text.splitlines()[0] in written[line.number - 1]


def test_the_block_is_the_two_lines_of_the_official_code():
    texts = {card.name: [line.text for line in card.find(source())] for card in CARDS}
    assert texts["h"][0].startswith("h = x + self.attention(self.attention_norm(x)")
    assert texts["y"] == ["return h + self.feed_forward(self.ffn_norm(h))"]
    assert texts["swiglu"] == ["swiglu(self.w13, x)", "return gate * mx.sigmoid(gate) * up"]
    assert texts["q"][0] == "q, kv = self.project(x, start_pos, freqs)"
    assert [text.split(" = ")[0] for text in texts["k"]] == ["q, kv", "q, k"]


def test_source_that_has_moved_on_is_said_to_be_so():
    other = SourceFile("class Attention:\n    def __call__(self, x):\n        return x\n")
    with pytest.raises(LookupError, match="Attention.__call__ assigns q"):
        other.assigned("Attention", "__call__", "q")
    with pytest.raises(LookupError, match="calls self.wo"):
        other.call("Attention", "__call__", "wo")
    assert other.returned("Attention", "__call__")[0].number == 3


@pytest.fixture(scope="module")
def measured(view_server):
    session = view_server.session
    return view_server.engine.run(measure, Cell(session, 12, 26))


def test_statistics_are_those_of_the_states(view_server, measured):
    session = view_server.session
    trace = session.trace
    rounding = 1 if mx.default_device() == mx.cpu else 8  # a GPU computes in the 16 bits of the folder
    for card, point in (("x", 0), ("attn_out", 1), ("h", 2), ("mlp_out", 3), ("y", 4)):
        assert measured.statistics[card].norm == pytest.approx(trace.norms[point, 12, 26], rel=1e-3 * rounding), card

    def card_states():
        position = session.look(26)
        block = position.model.layers[12]
        states = {
            "attention_norm": block.attention_norm(position.states["resid_pre"][12]),
            "v": block.attention.wqkv(block.attention_norm(position.states["resid_pre"][12]))[2],
            "z": position.states["z"][12],
            "logits": position.logits,
        }
        # The card's keys are those in the cache.
        states["k"] = position.cache[12].fetch()[0][0, :, 26]
        return {name: np.array(value.astype(mx.float32)).ravel() for name, value in states.items()}

    for name, values in view_server.engine.run(card_states).items():
        statistics = measured.statistics[name]
        assert statistics.mean == pytest.approx(values.mean(), abs=1e-4 * rounding), name
        extremes = values.min(), values.max()
        assert (statistics.low, statistics.high) == pytest.approx(extremes, abs=1e-3 * rounding), name
        assert statistics.counts.sum() == values.size
        np.testing.assert_allclose(statistics.norm, np.linalg.norm(values), rtol=1e-4 * rounding)


def test_every_card_has_the_size_that_its_shape_says(view_server, measured):
    args = view_server.session.opened.model.args
    for card in CARDS:
        axes = [axis for axis in card.shape(args) if isinstance(axis, int)]
        assert measured.statistics[card.name].counts.sum() == np.prod(axes), card.name
    assert 0.2 < measured.active < 0.8 and len(measured.top) == 5


def test_weights_as_they_are_loaded(tmp_path, monkeypatch):
    by_name = layer_weights(tiny_model(tmp_path / "dense"), 1)
    assert by_name["wk"].shape == (32, 64) and by_name["wk"].packed == "rows 64 to 95 of wq|wk|wv"
    assert by_name["w3"].packed == "rows 96 to 191 of w1|w3" and by_name["w2"].shape == (64, 96)
    assert {each.kind for each in by_name.values()} == {"float32, 32 bits"}
    assert by_name["output"].packed == ""
    args = tiny_args(tie_word_embeddings=True)
    write_folder(tmp_path / "q", args, quantized(random_weights(args)), quantization={"bits": 4, "group_size": 32})
    monkeypatch.setattr(loading, "_fits_expanded", lambda *_: False)
    by_name = layer_weights(loading.load_model(tmp_path / "q"), 1)
    assert by_name["wq"].kind == "affine, 4 bits in groups of 32" and by_name["wq"].shape == (64, 64)
    assert by_name["attention_norm"].kind == "float32, 32 bits"
    assert "tied" in by_name["output"].packed


def test_the_diagram_shows_it(view_tab, view_server):
    page = view_tab(900, 1200)
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    click(page, 12, 26)
    page.wait_for_selector("#live-cell .cell-head:has-text('layer 12')")
    page.get_by_role("tab", name="Architecture").click()
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == len(CARDS)
    card = page.locator(".card[data-card='y']")
    assert float(card.locator("[data-figure='norm']").inner_text()) == pytest.approx(
        view_server.session.trace.norms[4, 12, 26], rel=1e-3
    )
    assert card.locator(".shape").inner_text() == "[B, T, 576]"
    number = int(card.locator("li").get_attribute("value"))
    written = (ROOT / "mlx_llama3" / "model" / "transformer.py").read_text(encoding="utf-8").splitlines()
    assert card.locator("li code").inner_text() == written[number - 1].strip()
    assert card.get_attribute("title") == "mlx_llama3/model/transformer.py"
    assert page.locator(".card[data-card='logits'] .shape").inner_text() == "[B, T, 49,152]"
    assert "of 30, independent" in page.inner_text(".block h3")
    # Another layer at the same token.
    page.fill("#architecture-layer input[type=number]", "3")
    page.press("#architecture-layer input[type=number]", "Tab")
    page.wait_for_selector("#architecture-head:has-text('Layer 3, token 26')")
    assert view_server.session.selected == (3, 26)
