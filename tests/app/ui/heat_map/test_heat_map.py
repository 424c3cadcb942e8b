"""The heat map: the values it is sent, those its canvas holds, and its speed; partly in a browser."""

import base64
import gc
import io
import os

import numpy as np
import pytest
from view_page import HEAT, canvas_values

from app.ui.heat_map import heat_map
from app.ui.heat_map.heat_map import heat_rows, payload, rows_value
from mlx_llama3.trace.store import Trace

POINT_ROWS = (4, 1, 3)  # resid_post, attn_out, mlp_out in model.hooks.norms.POINTS


def grown(tokens: int, layers: int = 3) -> Trace:
    norms = np.random.default_rng(1).lognormal(3, 2, (5, layers, tokens)).astype(np.float32)
    trace = Trace.empty("tiny", layers)
    trace.extend(range(tokens), [f"t{i}" for i in range(tokens)], norms)
    return trace


def decoded(value: dict) -> np.ndarray:
    """`(tokens, points, layers)`."""
    return np.frombuffer(base64.b64decode(value["rows"]), "<f4").reshape(len(value["tokens"]), -1, value["layers"])


def test_a_payload_holds_the_librarys_norms():
    trace = grown(5)
    value = payload(trace, 2)
    assert (value["from"], value["layers"], value["tokens"], value["ids"]) == (2, 3, ["t2", "t3", "t4"], [2, 3, 4])
    np.testing.assert_array_equal(decoded(value), trace.norms[list(POINT_ROWS), :, 2:].transpose(2, 0, 1))
    assert payload(trace, 5)["tokens"] == [] == payload(trace, 99)["tokens"]
    assert payload(trace, 99)["from"] == 5
    assert payload(trace)["trace"] == value["trace"] != payload(grown(5))["trace"]


def test_values_beyond_float16_arrive():
    trace = grown(1)
    trace.norms[:] = 1e6 + 0.5
    assert (decoded(payload(trace)) == np.float32(1e6 + 0.5)).all()


def test_the_canvas_may_ask_for_rows_of_a_trace_that_is_still_there():
    trace = grown(5)
    name = payload(trace)["trace"]
    assert heat_rows({"trace": name, "from": 3})["tokens"] == ["t3", "t4"]
    assert heat_map.find_trace(name) is trace
    for request in ({}, {"trace": None, "from": 0}, {"trace": ["x"], "from": 0}, {"trace": name, "from": "0"}):
        assert heat_rows(request) is None
    del trace
    gc.collect()
    assert heat_rows({"trace": name, "from": 0}) is None and heat_map.find_trace(name) is None


def test_a_new_trace_has_a_new_name_though_memory_is_used_again():
    names = set()
    for _ in range(50):
        names.add(payload(grown(1))["trace"])
    assert len(names) == 50


def test_while_a_trace_grows_only_what_is_whole_is_sent():
    trace = grown(4)
    trace.tokens = np.append(trace.tokens, np.int32(9))  # as `extend` does it, before the norms are there
    trace.pieces = [*trace.pieces, "new"]
    assert payload(trace)["tokens"] == ["t0", "t1", "t2", "t3"] and payload(trace)["ids"] == [0, 1, 2, 3]


@pytest.fixture
def live(view_tab, view_server):
    page = view_tab()
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    return page


def test_the_canvas_holds_what_the_library_measured(live, view_server):
    trace = view_server.session.trace
    np.testing.assert_array_equal(canvas_values(live), trace.norms[list(POINT_ROWS)])
    assert live.evaluate(f"({HEAT})('live-heat').heatData.tokens") == trace.pieces


def test_what_is_drawn_is_a_colour_of_the_scale_and_the_hidden_first_token_is_none(live):
    pixel = """([row, column]) => {
        const canvas = document.querySelector('#live-heat canvas'), ratio = devicePixelRatio;
        const tall = (canvas.height / ratio - 6 - 72) / 30;
        const x = (44 + 12 * (column + 0.5) - document.querySelector('#live-heat .heat-scroll').scrollLeft) * ratio;
        const y = (6 + (29 - row + 0.5) * tall) * ratio;
        return [...canvas.getContext('2d').getImageData(x, y, 1, 1).data];
    }"""
    values = canvas_values(live)[0]
    ramp = heat_map.ramp().astype(int)
    counted = np.log(values[:, 1:])
    for row, column in ((0, 1), (29, 5), (12, 20)):
        level = (np.log(values[row, column]) - counted.min()) / (counted.max() - counted.min())
        drawn = np.array(live.evaluate(pixel, [row, column])[:3])
        assert np.abs(ramp[round(255 * level)] - drawn).max() <= 6, (row, column)
    live.locator("#live-heat .heat-bar input[type=checkbox]").nth(2).uncheck()
    live.wait_for_timeout(200)
    low = live.locator("#live-heat .heat-high").inner_text()
    assert float(low) == pytest.approx(values.max(), rel=1e-3)  # the first token counts now


def test_keys_move_the_selection_and_a_screen_reader_hears_it(live, view_server):
    norms, pieces = view_server.session.trace.norms, view_server.session.trace.pieces
    box = live.locator("#live-heat .heat-scroll")
    box.focus()
    live.wait_for_timeout(300)  # the previous selection is drawn first
    live.keyboard.press("Home")
    live.keyboard.press("ArrowRight")
    live.keyboard.press("ArrowRight")
    for _ in range(31):
        live.keyboard.press("ArrowDown")
    live.keyboard.press("ArrowUp")
    live.wait_for_function(
        "document.querySelector('#live-heat .heat-scroll').ariaLabel.includes('Selected: token 2 ')"
        "&& document.querySelector('#live-heat .heat-scroll').ariaLabel.includes('layer 1;')"
    )
    label = box.get_attribute("aria-label")
    assert label.startswith("Norms while the model speaks: Residual stream, 30 layers by 44 tokens. Selected: token 2")
    assert "layer 1;" in label and f"{norms[4, 1, 2]:.4g}" in label
    live.wait_for_selector("#live-cell .cell-head:has-text('layer 1')")
    assert pieces[2].strip() in live.inner_text("#live-cell .cell-head")
    live.keyboard.press("End")
    live.wait_for_selector(f"#live-cell .cell-head:has-text('token {len(pieces) - 1}')")


def test_hover_shows_the_values(live, view_server):
    box = live.locator("#live-heat canvas").bounding_box()
    live.mouse.move(box["x"] + 44 + 12 * 3.5, box["y"] + 8)
    text = live.locator("#live-heat .heat-tip").inner_text()
    norms = view_server.session.trace.norms[:, 29, 3]
    assert text.startswith(f'token 3 "{view_server.session.trace.pieces[3]}", layer 29')
    assert f"Residual stream: {norms[4]:.4g}" in text
    assert f"MLP update: {norms[3]:.4g}  ({round(100 * norms[3] / norms[4])} % of the stream)" in text


def test_the_picture_is_saved_whole(live):
    from PIL import Image

    with live.expect_download() as download:
        live.get_by_role("button", name="Save the whole picture as PNG").click()
    with open(download.value.path(), "rb") as file:
        picture = Image.open(io.BytesIO(file.read())).convert("RGB")
    assert download.value.suggested_filename == "mlx-llama3-norms.png"
    assert picture.width >= 2 * (44 + 44 * 12) and len(picture.getcolors(1 << 20)) > 100


def test_rows_that_were_missed_are_fetched(view_tab, view_server, monkeypatch):
    """An update that starts after the canvas's last row, as after a merged one or in a tab that was opened late."""
    page = view_tab()
    for name, value in {"begin": 200, "tokens": 20, "late": True}.items():
        monkeypatch.setattr(view_server.source, name, value)
    page.click("#stream")
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count === 220")
    norms = np.random.default_rng(0).lognormal(4, 1, (5, 30, 220)).astype(np.float32)
    np.testing.assert_array_equal(canvas_values(page), norms[list(POINT_ROWS)])


def stream(page, server, begin: int, tokens: int) -> tuple[float, list[int]]:
    """Stream; returns (pictures with new values per second, heap bytes after a collection at four moments)."""
    server.source.begin, server.source.tokens = begin, tokens
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable")
    page.click("#stream")
    heaps, marks = [], []
    for part in range(1, 5):
        until = begin + tokens * part // 4
        page.wait_for_function(f"({HEAT})('live-heat').heatData.count >= {until}", timeout=600_000, polling=100)
        shown, now = page.evaluate(f"[({HEAT})('live-heat').heatData.shown, performance.now()]")
        marks.append((shown, now))
        devtools.send("HeapProfiler.collectGarbage")
        metrics = {each["name"]: each["value"] for each in devtools.send("Performance.getMetrics")["metrics"]}
        heaps.append(int(metrics["JSHeapUsedSize"]))
    (first, start), (last, end) = marks[0], marks[-1]
    return 1000 * (last - first) / (end - start), heaps


@pytest.mark.parametrize(
    ("begin", "tokens"),
    [(3400, 600), pytest.param(0, 4000, marks=pytest.mark.skipif("SOAK" not in os.environ, reason="make soak"))],
)
def test_a_long_fast_stream_is_shown_as_it_comes_and_memory_stays(view_tab, view_server, begin, tokens):
    """100 tokens per second of 30 layers, up to 4,000: at least 10 pictures per second on an idle machine, and a heap
    that does not grow."""
    page = view_tab()
    rate, heaps = stream(page, view_server, begin, tokens)
    print(f"{rate:.1f} pictures a second; heap {[round(each / 1e6, 1) for each in heaps]} MB")
    values = canvas_values(page)
    assert values.shape == (3, 30, 4000)
    norms = np.random.default_rng(0).lognormal(4, 1, (5, 30, begin + tokens)).astype(np.float32)
    np.testing.assert_array_equal(values, norms[list(POINT_ROWS)])
    if "SOAK" in os.environ:  # in a run of all tests the machine is busy
        assert rate >= 10
    assert heaps[-1] - heaps[0] < 8e6
    at_the_end = page.evaluate(
        "(() => { const s = document.querySelector('#live-heat .heat-scroll');"
        "return s.scrollWidth - s.clientWidth - s.scrollLeft; })()"
    )
    assert at_the_end <= 2  # it follows the newest token


def test_who_scrolls_back_is_left_in_peace(view_tab, view_server):
    page = view_tab()
    view_server.source.begin, view_server.source.tokens = 300, 200
    page.click("#stream")
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count >= 320")
    page.evaluate("document.querySelector('#live-heat .heat-scroll').scrollLeft = 100")
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count >= 450")
    assert page.evaluate("document.querySelector('#live-heat .heat-scroll').scrollLeft") == 100
    page.get_by_role("button", name="newest").click()
    page.wait_for_function(
        "(() => { const s = document.querySelector('#live-heat .heat-scroll');"
        "return s.scrollWidth - s.clientWidth - s.scrollLeft <= 2; })()"
    )


def test_rows_value():
    rows = np.arange(12, dtype=np.float64).reshape(2, 2, 3)
    value = rows_value(rows, ["a", "b"], [1, 2], "name", model="m")
    np.testing.assert_array_equal(decoded(value), rows)
    assert (value["layers"], value["trace"], value["from"], value["model"]) == (3, "name", 0, "m")
