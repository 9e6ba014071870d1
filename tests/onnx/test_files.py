"""The files that an export writes and reads: what is in them, where weights go, and damaged ones."""

from __future__ import annotations

import getpass
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import onnx
import pytest
import zoo
from ms_flash.onnx_export import verify
from ms_flash.onnx_export.runtime import Runtime

import ms_flash
from ms_flash import export_onnx

ROOT = Path(__file__).resolve().parents[2]


def export(name, path, **options):
    """The net of that name with the same weights each time; returns the certificate."""
    ms.set_seed(3)
    net, inputs, known = zoo.build(name)
    return export_onnx(net, *inputs, file_name=path, **{"verify": False, **known, **options})


def digests(folder):
    """{file name: hash of its content}."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


# ---- what is in a file -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("profile", ["portable", "inlined", "standard"])
@pytest.mark.parametrize("name", ["vit", "flash_everything"])
def test_exported_twice_it_is_the_same_file(name, profile, tmp_path):
    for folder in ("one", "two"):
        export(name, tmp_path / folder / "net.onnx", profile=profile, external_data_threshold=4096)
    assert digests(tmp_path / "one") == digests(tmp_path / "two") != {}


OTHERS = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_files
for name in {names!r}:
    test_files.export(name, Path(name + ".onnx"))
"""


@pytest.mark.slow
def test_another_process_at_another_place_writes_the_same_files(tmp_path):
    """With another order of exports, which moves MindSpore's counters, another seed of hashes, home and time zone."""
    names = list(zoo.NETS)
    for number, order in enumerate((names, names[::-1])):
        folder = tmp_path / f"folder_{number}"
        folder.mkdir()
        environment = {**os.environ, "PYTHONHASHSEED": str(number), "HOME": str(folder), "PYTHONPATH": str(ROOT),
                       "TZ": ("UTC", "Asia/Tokyo")[number]}
        done = subprocess.run([sys.executable, "-c", OTHERS.format(tests=str(Path(__file__).parent), names=order)],
                              cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        for other in folder.iterdir():      # what MindSpore leaves
            if other.is_dir():
                shutil.rmtree(other)
    assert digests(tmp_path / "folder_0") == digests(tmp_path / "folder_1")
    assert len(digests(tmp_path / "folder_0")) >= len(names)


@pytest.mark.parametrize("name", ["llama", "branches", "minilm_pooled"])
def test_nothing_of_the_machine_is_in_the_files(name, tmp_path):
    export(name, tmp_path / "net.onnx", external_data_threshold=4096)
    data = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    machine = (socket.gethostname(), getpass.getuser(), str(tmp_path), str(ROOT), str(Path.home()), sys.prefix)
    # names of one or two letters would be found by chance
    for text in (*(x for x in machine if len(x) > 3), "/home", "/usr", ".py", ".so", "site-packages", "MsFlash", "zoo"):
        assert text.encode() not in data, text
    model = onnx.load(tmp_path / "net.onnx")
    assert (model.producer_name, model.producer_version) == ("ms_flash", ms_flash.__version__)
    assert not model.doc_string and not model.metadata_props and not model.graph.doc_string
    assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


# ---- weights beside the model ----------------------------------------------------------------------------------------
def test_weights_outside(tmp_path):
    certificate = export("llama", tmp_path / "a" / "net.onnx", external_data_threshold=4096, verify=True)
    assert certificate.passed
    assert list(digests(tmp_path / "a")) == ["net.onnx", "net.onnx.data"]
    assert (tmp_path / "a" / "net.onnx").stat().st_size < (tmp_path / "a" / "net.onnx.data").stat().st_size
    shutil.move(tmp_path / "a", tmp_path / "moved")
    ids = zoo.ids(1, 5)
    ms.set_seed(3)
    net, _, _ = zoo.build("llama")
    (got,) = Runtime(tmp_path / "moved" / "net.onnx").run({"ids": ids.asnumpy()})
    assert verify.difference(got, net(ids).asnumpy()) <= 1e-5
    # and back inside: no stale file is left
    export("llama", tmp_path / "moved" / "net.onnx")
    assert list(digests(tmp_path / "moved")) == ["net.onnx"]


def test_model_holds_up_to_the_limit_of_protocol_buffers():
    from ms_flash.onnx_export import model

    assert 2**31 - 2**22 < model.EXTERNAL_BYTES < 2**31


def test_a_failed_export_leaves_what_was_there(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"an earlier one")
    with pytest.raises(ValueError, match="does not compute"):
        export("vit", tmp_path / "net.onnx", verify=True, tolerance=0.0)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    assert (tmp_path / "net.onnx").read_bytes() == b"an earlier one"


# ---- .mindir files ---------------------------------------------------------------------------------------------------
def test_mindir_file(tmp_path):
    net, inputs, _ = zoo.build("vit")
    ms.export(net, *inputs, file_name=str(tmp_path / "net.mindir"), file_format="MINDIR")
    certificate = export_onnx(tmp_path / "net.mindir", file_name=tmp_path / "net.onnx")
    (got,) = Runtime(certificate.path).run({"image": inputs[0].asnumpy()})
    assert verify.difference(got, verify.run_net(net, inputs)[0]) <= 1e-5


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A healthy .mindir file, as bytes."""
    folder = tmp_path_factory.mktemp("mindir")
    net, inputs, _ = zoo.build("branches")
    ms.export(net, *inputs, file_name=str(folder / "good.mindir"), file_format="MINDIR")
    return (folder / "good.mindir").read_bytes()


@pytest.mark.parametrize("damage", ["empty", "text", "cut", "onnx", "missing", "flipped", "folder"])
def test_damaged_or_foreign_file(damage, good, tmp_path):
    file = tmp_path / "net.mindir"
    graph = onnx.helper.make_graph([], "g", [], [])
    content = {"empty": b"", "text": b"# not a model\n" * 9, "cut": good[:len(good) // 2],
               "flipped": good.replace(b"Muls", b"\xff\xfe\xff\xff").replace(b"REF::", b"REF;;"),
               "onnx": onnx.helper.make_model(graph).SerializeToString()}.get(damage)
    if content is not None:
        file.write_bytes(content)
    if damage == "folder":
        file.mkdir()
    with pytest.raises(ValueError, match=r"For 'export_onnx', "):
        export_onnx(file, file_name=tmp_path / "n.onnx", verify=False)
    assert not (tmp_path / "n.onnx").exists()


def damaged(data, rng):
    """`data` with a few bytes changed, left out or repeated."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at, length = int(rng.integers(len(data))), int(rng.integers(1, 40))
        how = rng.integers(4)
        if how == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif how == 1:
            data[at:at + length] = rng.bytes(length)
        elif how == 2:
            del data[at:at + length]
        else:
            data[at:at] = data[at:at + length]
    return bytes(data)


def test_any_damage_is_an_error_that_says_so(good, tmp_path):
    """Most damage breaks the file; what it leaves readable may export, but nothing else happens."""
    rng, refused = np.random.default_rng(), 0
    for number in range(150):
        data = damaged(good, rng)
        (tmp_path / "net.mindir").write_bytes(data)
        try:
            export_onnx(tmp_path / "net.mindir", file_name=tmp_path / "net.onnx", verify=False)
        except ValueError as error:
            assert "For 'export_onnx'" in str(error), (number, data.hex())
            refused += 1
    assert refused >= 50
