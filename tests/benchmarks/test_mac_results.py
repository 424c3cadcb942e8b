"""Reports as a table."""

import json

from benchmarks.mac_results import main, table

REPORT = {
    "format": "mlx-llama3 report",
    "version": 1,
    "machine": {"chip": "Apple M3", "system": "macOS 15.1", "mlx": "0.32.4"},
    "matrices": [{"verdict": "right"}, {"verdict": "right"}],
    "model": {"n_layers": 16, "dim": 2048, "quantization": {"bits": 4, "mode": "affine"}, "bytes": 7e8},
    "kernels": {"asked": "auto", "a": {"1 row": {"state": "used"}}, "b": {"all rows": {"state": "failed"}}},
    "sections": {
        "kernels": {"a": [{"case": "one token", "right": True}], "b": [{"case": "one token", "right": False}]},
        "step": {"ratio": 0.912},
        "decoding": {
            "decode": {
                "chosen kernels": 200.0,
                "references": 160.0,
                "chosen kernels, live norms": 190.0,
                "chosen kernels, buffer of 8,192 positions": 150.0,
            }
        },
    },
    "mlx-lm": {"readings": {"mlx-lm": [{"decode": 150.4}, {"decode": 148.0}]}},
}


def test_a_row():
    row = table([REPORT]).splitlines()[-1]
    assert row == (
        "| Apple M3 | 15.1, 0.32.4 | 16 x 2048, 4-bit affine, 0.7 GB | right | 1 of 2 | b, one token: wrong | 0.91 "
        "| 200, 160, 150 | 0.95 | 0.75 |"
    )


def test_sections_that_failed():
    failed = REPORT | {
        "sections": {"kernels": {"failed": "SIGABRT: x"}, "decoding": {"failed": "not done"}}, "mlx-lm": None,
    }  # fmt: skip
    row = table([failed]).splitlines()[-1]
    assert "| the process ended: SIGABRT: x | - | not done | - | - |" in row


def test_another_file_is_refused(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([1]))
    assert main([str(path)]) == 2
    assert capsys.readouterr().err == f"error: {path} is not a report of mlx-llama3 doctor --report\n"
