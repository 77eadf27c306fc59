"""The report: complete, JSON, free of private names, and a table with every part."""

from __future__ import annotations

import json

from rich.console import Console

from verl_tool.doctor.gpu_smoke.part import PartResult
from verl_tool.doctor.gpu_smoke.smoke_report import report_json, result_table, write_report

RESULTS = [
    PartResult("device", "passed", "", 3.2, 1 << 30, 2 << 30, {"bf16": {"tflops": 123.456}, "kind": "H"}),
    PartResult("grpo", "failed", "cannot open /home/ada/models/m.bin", 9.0, None, 1 << 20),
    PartResult("sleep", "skipped", "not installed: vllm"),
]


def test_the_file_has_every_part_and_no_path(tmp_path):
    path = tmp_path / "new" / "report.json"
    write_report(report_json({"driver": "580.1"}, "cuda", RESULTS, 12.34), path)
    report = json.loads(path.read_text())
    assert report["counts"] == {"passed": 1, "failed": 1, "skipped": 1}
    assert [part["name"] for part in report["parts"]] == ["device", "grpo", "sleep"]
    assert report["parts"][0]["figures"]["bf16"]["tflops"] == 123.456
    assert report["parts"][0]["peak_device_bytes"] == 1 << 30
    assert "/home" not in path.read_text()
    assert list(path.parent.iterdir()) == [path]


def test_the_table_lists_figures_and_reasons():
    console = Console(width=200, record=True)
    console.print(result_table(RESULTS, "cuda"))
    printed = console.export_text()
    assert "bf16.tflops 123" in printed
    assert "not installed: vllm" in printed
    assert "1.00" in printed
