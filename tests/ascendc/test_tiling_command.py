"""``python -m ms_flash tiling``, and what is behind it: presets, and the cycle model's suite of the benchmark."""
from __future__ import annotations

import csv
import json
import re

import ascend
import pytest

from ms_flash import cli, library, tiling
from ms_flash.bench import ascend_model


@pytest.fixture(autouse=True)
def built(monkeypatch):
    """The library of these sources, not the installed one, and no presets."""
    monkeypatch.setenv("MS_FLASH_ASCEND_TWIN_LIB", str(ascend.build()))
    monkeypatch.setenv("MS_FLASH_PRESETS", "")
    yield
    library.configure_twin(soc="910B3", cores=0, effects=1)


def plan(capsys, *arguments):
    assert cli.main(["tiling", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_for_people(capsys):
    assert cli.main(["tiling", "--shape", "1,8,8,4096,4096,128", "--causal", "--dtype", "bf16", "--soc", "910B3"]) == 0
    text = capsys.readouterr().out
    assert "fwd of B=1 N=8 Nk=8 Sq=4096 Sk=4096 D=128 Dv=128, causal, bfloat16, Ascend 910B3" in text
    assert re.search(r"query rows per block +128\n", text) and re.search(r"cores +20\n", text)
    assert float(re.search(r"imbalance .*?([\d.]+)%", text)[1]) <= 5
    assert re.search(r"\| UB +\| S tiles, 2 x float32 +\| +65,536 \| +33.3% \|", text)
    rows = re.findall(r"\| (UB|L1|L0[ABC]) +\| .*? \| +([\d,]+) \| +([\d.]+)% \|", text)
    for memory, size in tiling.MEMORY.items():
        assert sum(int(used.replace(",", "")) for name, used, _ in rows if name == memory) == size
    picture = re.findall(r"^  ([a-z.]{64})$", text, re.M)
    assert len(picture) == 32
    for r, row in enumerate(picture):       # what lies behind the block on the diagonal is skipped
        assert set(row[(r + 1) * 2 + 2:]) <= {"."} and "." not in row[:r * 2]
    assert len(re.findall(r"^  [a-t] +[\d,]+ #+$", text, re.M)) == 20


@pytest.mark.parametrize("op", ["fwd", "bwd", "bias_grad"])
def test_every_unit_has_a_core_and_cores_share_evenly(capsys, op):
    found = plan(capsys, "--shape", "2,8,8,3333,3333,64", "--op", op, "--causal")
    assert set(found["core_of"]) == set(range(20))
    costs = found["cost_per_core"]
    assert found["imbalance"] == pytest.approx(max(costs) * len(costs) / sum(costs) - 1, abs=1e-5)
    assert all(sum(found["buffers"][memory].values()) <= tiling.MEMORY[memory] for memory in found["buffers"])


def test_workspace_is_the_sum_of_its_parts(capsys):
    for arguments in (["--causal"], [], ["--op", "bwd"], ["--window", "100,20"]):
        found = plan(capsys, "--shape", "2,4,2,1000,5000,96,32", *arguments)
        assert sum(found["workspaces"].values()) == found["workspace"]


def test_presets_choose_blocks_and_the_environment_overrides_them(capsys, tmp_path, monkeypatch):
    presets = tmp_path / "presets.yaml"
    presets.write_text("""# the first line that fits counts
- {op: backward, block_m: 256}
- {soc: 910B1, block_m: 96}
- {max_head_dim: 64, min_length: 3000, block_n: 256, depth: 1}   # another comment
- {block_m: 64}
""")
    monkeypatch.setenv("MS_FLASH_PRESETS", str(presets))
    blocks = lambda *a: tuple(plan(capsys, *a)[key] for key in ("block_m", "stack_n", "depth"))
    assert blocks("--shape", "1,4,4,4096,4096,64") == (128, 256, 1)
    assert blocks("--shape", "1,4,4,2048,2048,64") == (64, 512, 2)
    assert blocks("--shape", "1,4,4,4096,4096,128", "--soc", "910B1")[0] == 96
    assert plan(capsys, "--shape", "1,4,4,4096,4096,128", "--op", "bwd")["block_q"] == 256
    monkeypatch.setenv("MS_FLASH_BLOCK_M", "32")
    monkeypatch.setenv("MS_FLASH_BLOCK_N", "128")
    assert blocks("--shape", "1,4,4,2048,2048,64") == (32, 128, 2)
    other = tmp_path / "other.yaml"
    other.write_text("- {depth: 3}\n")
    assert blocks("--shape", "1,4,4,2048,2048,64", "--presets", str(other)) == (32, 128, 3)


@pytest.mark.parametrize(("line", "reason"), [
    ("- {block_m: many}", "line 2 of the presets .* must give 'block_m' a number >= 1, but got 'many'"),
    ("- {blockm: 64}", "line 2 .* has the unknown key 'blockm'"),
    ("- {op: both}", "line 2 .* must name an 'op' of forward, backward, but got 'both'"),
    ("- {dtype: float32}", "line 2 .* must name a 'dtype' of float16, bfloat16"),
    ("- {soc: 910C}", "'soc' must be one of .* but got '910C'"),
    ("- {block_m}", "line 2 .* has 'block_m' without a value"),
    ("block_m: 64", "line 2 .* must be of the form"),
])
def test_wrong_presets_are_named(capsys, tmp_path, line, reason):
    presets = tmp_path / "presets.yaml"
    presets.write_text(f"# first\n{line}\n")
    assert cli.main(["tiling", "--shape", "1,1,1,64,64,64", "--presets", str(presets)]) == 2
    assert re.search(reason, capsys.readouterr().out)


def test_presets_that_are_not_there(capsys):
    assert cli.main(["tiling", "--shape", "1,1,1,64,64,64", "--presets", "/nowhere.yaml"]) == 2
    assert "'/nowhere.yaml', which MS_FLASH_PRESETS names, cannot be read" in capsys.readouterr().out


def test_the_presets_that_come_with_ms_flash_are_right(capsys):
    shipped = str(ascend.ASCENDC / "presets.yaml")
    for d in (64, 128, 256):
        for op in ("fwd", "bwd"):
            plan(capsys, "--shape", f"1,20,20,8192,8192,{d}", "--op", op, "--presets", shipped)


def test_a_head_dim_that_the_kernels_do_not_take(capsys):
    assert cli.main(["tiling", "--shape", "1,1,1,64,64,40"]) == 2
    assert "must be a multiple of 16 from 16 to 256, but got 40" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["1,2,3", "1,1,1,0,1,16", "1,1,1,a,1,16"])
def test_wrong_shapes(capsys, shape):
    with pytest.raises(SystemExit):
        cli.main(["tiling", "--shape", shape])
    assert "must be six or seven positive numbers" in capsys.readouterr().err


# --- bench --suite ascend-model ---

def test_the_model_suite(capsys, tmp_path):
    assert cli.main(["bench", "--suite", "ascend-model", "--shapes", "d128-s1k,decode-s8k", "--out",
                     str(tmp_path)]) == 0
    text = capsys.readouterr().out
    with open(tmp_path / "ascend-model.csv", newline="") as file:
        rows = {(row["shape"], row["direction"], row["causal"]): row for row in csv.DictReader(file)}
    assert set(rows) == {("d128-s1k", direction, causal) for direction in ("fwd", "bwd") for causal in "01"} | {
        ("decode-s8k", "fwd", "0")}
    assert all(row["note"] == "model" for row in rows.values())
    for row in rows.values():
        assert 0 < float(row["of_peak_slow"]) < float(row["of_peak_fast"]) < 100
    full = rows["d128-s1k", "fwd", "0"]
    # read once, written once: Q, K, V and out of 24 heads; K and V once more for every block of queries that sees them
    tensors = 24 * 1024 * 128 * 2
    blocks = 1024 // 128
    exact = 2 * tensors + 2 * tensors * blocks + 3 * 24 * 1024 * 4
    assert float(full["gm_mib"]) == pytest.approx(exact / 2**20, rel=0.01)
    assert float(full["pipelined"]) > 1.1 and float(full["double_buffer"]) > 1
    assert float(rows["d128-s1k", "fwd", "1"]["block_skip"]) > 1.1
    assert "model, not measurement" in text
    assert len(re.findall(r"calibration: tile (?:qk|softmax|pv|rescale), .* published \d+ cycles", text)) == 4


def test_published_figures_stand_beside_the_model(capsys):
    row = {"shape": "d128-s8k", "direction": "fwd", "causal": 0, "head_dim": 128, "q_len": 8192, "of_peak_slow": 40.0,
           "of_peak_fast": 60.0, "bound_by": "fix", "fix": "80..90"}
    lines = list(ascend_model.notes([row]))
    assert any("aclnn 27.5 %, PTO 33.2 %; this kernel by the model: 40.0..60.0 %" in line for line in lines)
    assert any("aim: d128-s8k fwd: 50 % of peak; the model says 40.0..60.0 %, middle 48.0 %: only its fast end reaches "
               "it; busiest is fix" in line for line in lines)


@pytest.mark.parametrize("wrong", [["--dtypes", "float16"], ["--threads", "1"], ["--seconds", "1"],
                                   ["--shapes", "s512"], ["--peers", "torch"]])
def test_what_does_not_belong_to_the_model_suite(capsys, tmp_path, wrong):
    assert cli.main(["bench", "--suite", "ascend-model", "--out", str(tmp_path), *wrong]) == 2
