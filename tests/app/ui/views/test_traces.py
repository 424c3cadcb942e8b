"""Traces are saved, opened, compared and exported; other files are refused with a sentence."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from view_page import HEAT, canvas_values

from app.ui.session import saved_traces
from app.ui.views import trace_export
from mlx_llama3.errors import UserError
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.trace.store import Trace, load_trace


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path))
    return tmp_path / "traces"


def small(tokens: int = 4, layers: int = 3, seed: int = 0) -> Trace:
    norms = np.random.default_rng(seed).lognormal(3, 1, (5, layers, tokens)).astype(np.float32)
    return Trace("tiny", np.arange(tokens, dtype=np.int32), ["=1", "<b>", "a\nb", "x"][:tokens], norms)


def test_saved_listed_opened_deleted(folder):
    assert saved_traces.listed() == []
    trace_id = saved_traces.save(small(), "../../My <trace>")
    assert [path.name for path in folder.iterdir()] == [f"{trace_id}.safetensors"]
    assert saved_traces.listed() == [("../../My <trace> (tiny)", trace_id)]
    again = saved_traces.open_trace(trace_id)
    np.testing.assert_array_equal(again.norms, small().norms)
    (folder / ("0" * 16 + ".safetensors")).write_bytes(b"damaged")
    (folder / "notes.safetensors").write_bytes(b"")
    assert len(saved_traces.listed()) == 1
    saved_traces.delete(trace_id)
    assert saved_traces.listed() == []


@pytest.mark.parametrize("trace_id", ["../x", "/etc/passwd", "0123", "", None, 7, "g" * 16, "0" * 16 + "\n"])
def test_what_is_no_id_never_becomes_a_path(folder, trace_id):
    for use in (saved_traces.open_trace, saved_traces.delete, saved_traces.path):
        with pytest.raises(UserError, match="no such trace"):
            use(trace_id)


def test_refused_in_a_sentence(folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="ask something first"):
        saved_traces.save(Trace.empty("tiny", 3), "x")
    with pytest.raises(UserError, match="no such file"):
        saved_traces.open_trace("0" * 16)
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"\x00" * 64)
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        saved_traces.take_in(other, "other")
    small().save(other)
    monkeypatch.setattr("mlx_llama3.system.memory.available_memory", lambda: 100)
    with pytest.raises(UserError, match="memory"):
        saved_traces.take_in(other, "other")
    assert not folder.exists()


def test_csv_and_json_hold_every_norm():
    trace = small()
    rows = list(csv.DictReader(io.StringIO(trace_export.as_csv(trace))))
    assert len(rows) == 4 * 3
    row = rows[2 * 3 + 1]
    assert (row["position"], row["id"], row["token"], row["layer"]) == ("2", "2", "a\nb", "1")
    assert [np.float32(row[point]) for point in POINTS] == trace.norms[:, 1, 2].tolist()
    assert rows[0]["token"] == "'=1"  # not a formula for a spreadsheet
    content = json.loads(trace_export.as_json(trace))
    assert content["tokens"][1] == {"id": 1, "text": "<b>"}
    assert np.array_equal(np.array(content["norms"]["mlp_out"], np.float32), trace.norm("mlp_out"))


@pytest.fixture
def page(view_tab, folder):
    page = view_tab(900, 1300)
    page.wait_for_function(f"({HEAT})('live-heat').heatData.count > 0")
    page.get_by_role("tab", name="Traces").click()
    page.wait_for_selector("#trace-first")
    return page


def choose(page, which: str, name: str) -> None:
    page.locator(f"#trace-{which} input").click()
    page.locator(f"#trace-{which} [role=option]", has_text=name).click()


def test_save_open_compare_export_delete(page, view_server, folder):
    trace = view_server.session.trace
    page.fill("#trace-name textarea, #trace-name input", "mine")
    page.click("#trace-save")
    page.wait_for_function(f"({HEAT})('trace-heat-1') && ({HEAT})('trace-heat-1').heatData.count === 44")
    np.testing.assert_array_equal(canvas_values(page, "trace-heat-1"), trace.norms[[4, 1, 3]])
    [file] = folder.iterdir()
    np.testing.assert_array_equal(load_trace(file).norms, trace.norms)

    other = load_trace(file)
    other.norms = other.norms[..., :40] * 1.5
    other.tokens, other.pieces = other.tokens[:40].copy(), other.pieces[:40]
    other.tokens[39], other.pieces[39] = 5, "other"
    other.save(file.with_name("elsewhere.bin"))
    (folder.parent / "elsewhere.safetensors").write_bytes(file.with_name("elsewhere.bin").read_bytes())
    page.set_input_files("#trace-file input[type=file], input[type=file]", folder.parent / "elsewhere.safetensors")
    page.wait_for_function(f"({HEAT})('trace-heat-1').heatData.count === 40")
    choose(page, "second", "Current conversation")
    page.wait_for_function(f"({HEAT})('trace-difference') && ({HEAT})('trace-difference').heatData.count === 40")
    np.testing.assert_allclose(canvas_values(page, "trace-difference"), 0.5 * trace.norms[[4, 1, 3], :, :40], rtol=1e-5)
    assert "part at position 39: the first has other" in page.inner_text("#trace-said")

    for form in ("csv", "json", "safetensors"):
        with page.expect_download() as download:
            page.click(f"#trace-{form}")
        assert download.value.suggested_filename == f"trace.{form}"
        if form == "json":
            content = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
            assert content["tokens"][39] == {"id": 5, "text": "other"}
    page.click("#trace-delete")
    page.wait_for_function("!document.querySelector('#trace-heat-1 canvas')")
    assert len(saved_traces.listed()) == 1


def test_a_file_that_is_no_trace_is_told(page, folder, tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    page.set_input_files("#trace-file input[type=file], input[type=file]", tmp_path / "bad.safetensors")
    page.wait_for_selector(".toast-body:has-text('cannot be read as safetensors')")


def test_pictures_of_a_comparison_move_together(page, view_server, folder):
    long = Trace("long", np.zeros(300, np.int32), ["x"] * 300, np.ones((5, 30, 300), np.float32))
    saved_traces.save(long, "long")
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("tab", name="Traces").click()
    choose(page, "first", "long (long)")
    choose(page, "second", "long (long)")
    page.wait_for_function(f"({HEAT})('trace-difference') && ({HEAT})('trace-difference').heatData.count === 300")
    page.evaluate("document.querySelector('#trace-heat-1 .heat-scroll').scrollLeft = 600")
    page.wait_for_function("document.querySelector('#trace-difference .heat-scroll').scrollLeft === 600")
    page.wait_for_function("document.querySelector('#trace-heat-2 .heat-scroll').scrollLeft === 600")


def test_traces_of_other_depths_are_not_subtracted(page, folder):
    saved_traces.save(small(), "three layers")
    page.get_by_role("tab", name="Live").click()
    page.get_by_role("tab", name="Traces").click()
    choose(page, "first", "three layers (tiny)")
    page.wait_for_function(f"({HEAT})('trace-heat-1') && ({HEAT})('trace-heat-1').heatData.rows === 3")
    choose(page, "second", "Current conversation")
    page.wait_for_selector(".toast-body:has-text('the traces have 3 and 30 layers')")
