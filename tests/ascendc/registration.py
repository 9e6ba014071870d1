"""The dry run of the Ascend registration, with no CANN present: what has to agree before anything can run on an NPU.

An op is written down in four places that nothing compiles together: ops.yaml, its OpDef (op_host/cann), its kernel's
entry (op_kernel), and what MindSpore registers (ms_flash/backends/ascend_op.py). Between them stand names that CANN's
generator makes, by the rules of its public sources. `check` compares all of them and says in words what disagrees.
"""
from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

from ascend import OP_IMPL, ROOT

from ms_flash import op_table
from ms_flash.backends import ascend_op

SHIM = Path(__file__).with_name("cann")
NEED = {1: "optional", 2: "required"}
DTYPES = {0: "float32", 1: "float16", 3: "int32", 4: "uint8", 9: "int64", 12: "bool", 27: "bfloat16"}
# MindSpore hands a Tensor of lengths over as an array of the host where the aclnn function wants one.
HOST_ARRAYS = ("cu_seqlens_q", "cu_seqlens_k")
NO_TABLE = ("MsFlashMerge",)    # its tiling is the struct alone


def build(op_impl=OP_IMPL):
    """The host sources of the CANN project over the declarations in cann/, as a library."""
    where = Path(os.environ.get("MS_FLASH_TEST_BUILD", ROOT / "build" / "ascendc"))
    where.mkdir(parents=True, exist_ok=True)
    op_impl = Path(op_impl)
    host = op_impl / "ascendc" / "op_host"
    sources = [*sorted((host / "cann").glob("*.cpp")), *sorted(host.glob("*.cpp")),
               *(op_impl / "cpu" / f"{name}.cpp" for name in ("call", "kvcache", "memory", "merge")),
               Path(__file__).with_name("registration.cpp")]
    objects = []
    for source in sources:
        key = hashlib.sha256(b"".join(file.read_bytes() for file in _included(source, (op_impl, SHIM))))
        target = where / f"cann-{source.parent.name}-{source.stem}-{key.hexdigest()[:16]}.o"
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}")
            _run("g++", "-std=gnu++17", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-I", op_impl, "-I",
                 SHIM, "-c", source, "-o", part)
            part.rename(target)
        objects.append(target)
    name = hashlib.sha256(" ".join(str(o) for o in objects).encode()).hexdigest()[:16]
    library = where / f"libcann_host-{name}.so"
    if not library.exists():
        part = library.with_suffix(f".{os.getpid()}")
        _run("g++", "-shared", *objects, "-o", part)
        part.rename(library)
    loaded = ctypes.CDLL(str(library))
    loaded.msf_prototypes.restype = ctypes.c_char_p
    for function in ("workspace", "block_dim", "tiling", "capacity"):
        getattr(loaded, f"msf_{function}").restype = ctypes.c_int64
    return loaded


def _included(source, roots):
    """A source and all that it includes, each once."""
    found = [source]
    for file in found:
        for name in re.findall(r'^#include "(.+?)"', file.read_text(), re.M):
            header = next((root / name for root in roots if (root / name).exists()), None)
            if header is not None and header not in found:
                found.append(header)
    return found


def _run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, " ".join(str(part) for part in command) + "\n" + done.stderr[-8000:]


def prototypes(library) -> dict:
    """What the OpDefs say."""
    return json.loads(library.msf_prototypes())


def camel_case(name: str) -> str:
    """As CANN's generator writes a parameter."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def aclnn_header(op: str, prototype: dict) -> str:
    """The declaration that CANN's generator makes of a prototype."""
    parameters, written = [], {p["name"] for p in prototype["inputs"]} & {p["name"] for p in prototype["outputs"]}
    for p in prototype["inputs"]:
        kind = "const aclIntArray *" if p["value_depend"] else "const aclTensor *"
        end = "Optional" if NEED[p["need"]] == "optional" else ""
        parameters.append(f"aclTensor *{camel_case(p['name'])}Ref" if p["name"] in written
                          else kind + camel_case(p["name"]) + end)
    parameters += ["char *" + camel_case(a["name"]) + ("Optional" if NEED[a["need"]] == "optional" else "")
                   for a in prototype["attrs"]]
    outputs = prototype["outputs"]
    parameters += ["const aclTensor *" + ("out" if len(outputs) == 1 else camel_case(p["name"]) + "Out")
                   for p in outputs if p["name"] not in written]
    parameters += ["uint64_t *workspaceSize", "aclOpExecutor **executor"]
    return (f"__attribute__((visibility(\"default\")))\naclnnStatus {ascend_op.api_name(op)}GetWorkspaceSize(\n    "
            + ",\n    ".join(parameters) + ");\n")


def clashes(header: str) -> list[str]:
    """Names that two parameters of a declaration have."""
    names = re.findall(r"(\w+)(?:,|\))", header.split("GetWorkspaceSize(\n")[-1])
    return sorted({name for name in names if names.count(name) > 1})


def kernel_entry(text: str, name: str):
    """Parameters of the kernel `name` in its source, or None."""
    found = re.search(rf'extern "C" __global__ __aicore__ void {name}\((.*?)\)\s*{{', text, re.S)
    return found and [part.split()[-1] for part in found[1].replace("\n", " ").split(",")]


def check(op_impl=OP_IMPL) -> list[str]:
    """What disagrees, in words; empty when all is well."""
    op_impl = Path(op_impl)
    found, wrong = prototypes(build(op_impl)), []
    ops = op_table.table()["backends"]["ascend"]["ops"]
    if sorted(found) != sorted(ops):
        wrong.append(f"ops.yaml lists {sorted(ops)} for ascend, but there are OpDefs of {sorted(found)}")
    cmake = (op_impl / "ascendc" / "CMakeLists.txt").read_text()
    listed = re.search(r"set\(MSF_OPS ([^)]*)\)", cmake)[1].split()
    if listed != ops:
        wrong.append(f"ops.yaml lists {ops} for ascend, but CMakeLists.txt builds {listed}")
    for op in ops:
        if op in found:
            wrong += [f"{op}: {reason}" for reason in (
                *_against_table(op, found[op]), *_against_kernel(op, found[op], op_impl),
                *_against_mindspore(op, found[op]))]
    return wrong


def _against_table(op, prototype):
    inputs, outputs = op_table.slots(op)
    written = [e["name"] for e in ascend_op.entries(op) if e.get("note") == "written"]
    for kind, names in (("inputs", inputs), ("outputs", (*outputs, *written))):
        have = [p["name"] for p in prototype[kind]]
        if have != list(names):
            yield f"the {kind} of the OpDef are {have}, of ops.yaml {list(names)}"
            return
    for entry, p in zip(ascend_op.entries(op), prototype["inputs"]):
        want = "optional" if entry.get("optional") else "required"
        if NEED[p["need"]] != want:
            yield f"'{p['name']}' is {NEED[p['need']]} in the OpDef, {want} in ops.yaml"
        if p["value_depend"] != (p["name"] in HOST_ARRAYS):
            yield f"'{p['name']}' is {'' if p['value_depend'] else 'not '}read by the host in the OpDef"
    for p in prototype["outputs"]:
        if NEED[p["need"]] != "required":
            yield f"the output '{p['name']}' is {NEED[p['need']]} in the OpDef"
    parameters = prototype["inputs"] + prototype["outputs"]
    rows = [(*row, *(row[inputs.index(name)] for name in written)) for row in ascend_op.dtype_rows(op)]
    for i, p in enumerate(parameters):
        have = [DTYPES.get(dtype) for dtype in p["dtypes"]]
        if have != [row[i] for row in rows]:
            yield f"the dtypes of '{p['name']}' are {have} in the OpDef, {[row[i] for row in rows]} by ops.yaml"
        if p["formats"] != len(rows):
            yield f"'{p['name']}' has {p['formats']} formats for {len(rows)} combinations of dtypes"
    # CANN reuses a binary for another combination only if the one that it is to look for exists
    full = list(zip(*(p["dtypes"] for p in parameters)))
    lookup = list(zip(*(p["binary"] or p["dtypes"] for p in parameters)))
    if not set(lookup) <= set(full):
        yield "a combination for looking up binaries is none of the op's"
    if [(a["name"], a["type"], NEED[a["need"]]) for a in prototype["attrs"]] != [("spec", "str", "required")]:
        yield f"the attributes of the OpDef are {prototype['attrs']}, not one string 'spec'"
    if not prototype["functions"]:
        yield "the OpDef lacks inference or tiling"
    if prototype["socs"] != ["ascend910b"]:
        yield f"the OpDef is for {prototype['socs']}"


def _against_kernel(op, prototype, op_impl):
    name = ascend_op.snake_case(op)
    source = op_impl / "ascendc" / "op_kernel" / f"{name}.cpp"
    if not source.exists():
        yield f"there is no kernel {source.name}"
        return
    text = source.read_text()
    have = kernel_entry(text, name)
    inputs = [p["name"] for p in prototype["inputs"]]
    outputs = [p["name"] + ("_ref" if p["name"] in inputs else "") for p in prototype["outputs"]]
    want = [*inputs, *outputs, "workspace", "tiling"]
    if have != want:
        yield f"the kernel's entry takes {have}, CANN passes {want}"
    registered, read = (re.search(rf"{macro}\((?:msf::)?(\w+)[,)]", text)
                        for macro in ("REGISTER_TILING_DEFAULT", "GET_TILING_DATA_WITH_STRUCT"))
    if not registered or not read or registered[1] != read[1] + ("" if op in NO_TABLE else "Buffer"):
        yield "the kernel does not register its tiling struct with room for the table of work"


def _against_mindspore(op, prototype):
    """MindSpore's own reader of headers and its own writer of callbacks, on the header that CANN would generate."""
    from mindspore.ops.operations._custom_ops_utils import CustomCodeGenerator, CustomInfoGenerator

    info = ascend_op.registration(op)
    for kind in ("inputs", "outputs"):
        have = [p["name"] for p in info[kind]]
        inputs = [p["name"] for p in prototype["inputs"]]   # what is written there is no output of MindSpore's op
        want = [p["name"] for p in prototype[kind] if kind == "inputs" or p["name"] not in inputs]
        if have != want:
            yield f"MindSpore registers the {kind} {have}, the OpDef {want}"
            return
        for registered, p in zip(info[kind], prototype[kind]):
            if registered["paramType"] != NEED[p["need"]]:
                yield f"'{p['name']}' is {registered['paramType']} for MindSpore, {NEED[p['need']]} in the OpDef"
    if [(a["name"], a["type"]) for a in info["attr"]] != [(a["name"], a["type"]) for a in prototype["attrs"]]:
        yield f"MindSpore registers the attributes {info['attr']}, the OpDef {prototype['attrs']}"
    header = aclnn_header(op, prototype)
    if clashes(header):
        yield f"the aclnn function has two parameters called {', '.join(clashes(header))}"
    with tempfile.TemporaryDirectory() as folder:
        include = Path(folder) / "op_api" / "include"
        include.mkdir(parents=True)
        (include / f"aclnn_{ascend_op.snake_case(op)}.h").write_text(header)
        with mock.patch.dict(os.environ, {"ASCEND_CUSTOM_OPP_PATH": folder, "ASCEND_OPP_PATH": folder}):
            read = CustomInfoGenerator(ascend_op.api_name(op)).get_aclnn_api_types()
    if not read:
        yield "MindSpore does not find the aclnn function's header"
        return
    by_info = CustomCodeGenerator().get_api_types_by_reg_info(info)
    want = ["aclIntArray*" if name in HOST_ARRAYS else kind
            for name, kind in zip([p["name"] for p in info["inputs"]], by_info)]
    want += [*by_info[len(want):-2], "uint64_t*", "aclOpExecutor**"]
    if read != want:
        yield f"the aclnn function takes {read}, MindSpore would pass {want}"
    try:
        CustomCodeGenerator().generate_callback_by_types(ascend_op.api_name(op), info, read)
    except RuntimeError as error:
        yield f"MindSpore cannot call the aclnn function: {error}"
