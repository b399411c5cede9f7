# Every target sets up what it needs. The first one to run creates $(VENV); later ones install nothing.
PYTHON ?= python3
VENV ?= .venv
# More options for every `pip install`, for example an index that offers a CPU build of PyTorch.
PIP_FLAGS ?=
# Ranks of `make train`, and the flags of examples/pretrain_gpt.py.
NPROC ?= 2
TRAIN_FLAGS ?= --expert-model-parallel-size 2 --device cpu --num-layers 4 --hidden-size 128 --num-attention-heads 4 \
	--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-router-fusion --seq-length 256 \
	--micro-batch-size 4 --train-iters 240 --lr 4e-3 --lr-warmup-iters 20 --save-interval 120 --sample-bytes 240 \
	--save runs/train/checkpoints --output-dir runs/train
# More options for pytest, for example PYTEST_FLAGS="-x -k router".
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PARITY_STAMP := $(VENV)/parity/.installed
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)

.PHONY: help install train test lint format peers test-parity test-slow gpu wheel benchmark-smoke clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## Create the virtual environment and install the project with its tools.

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[plots,test,dev]'
	touch $@

train: $(STAMP) ## Train a small MoE language model on two CPU ranks and show what it did.
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(NPROC) examples/pretrain_gpt.py $(TRAIN_FLAGS)

test: lint ## Check format, lint and types, then run every test that needs no GPU.
	$(PYTEST)

lint: $(STAMP) ## Check format, lint and types.
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(STAMP) ## Format the code and mend what ruff can mend.
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

# megatron-core asks for Python 3.12, Transformer Engine for CUDA and torchtitan for much that its layer does not use, but what
# is compared is plain Python: their wheels are unpacked, not installed. So is Triton, whose interpreter runs on the CPU.
$(PARITY_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[parity]'
	rm -rf $(VENV)/parity && mkdir $(VENV)/parity
	$(BIN)/python -m pip download $(PIP_FLAGS) --no-deps --python-version 3.12 --only-binary=:all: \
		-d $(VENV)/parity megatron-core==0.19.2 transformer-engine==2.20.2 torchtitan==0.3.0 spmd_types==0.2.3
	$(BIN)/python -m zipfile -e $(VENV)/parity/megatron_core-*.whl $(VENV)/parity/megatron_core
	$(BIN)/python -m zipfile -e $(VENV)/parity/transformer_engine-*.whl $(VENV)/parity/transformer_engine
	$(BIN)/python -m zipfile -e $(VENV)/parity/torchtitan-*.whl $(VENV)/parity/torchtitan
	$(BIN)/python -m zipfile -e $(VENV)/parity/spmd_types-*.whl $(VENV)/parity/torchtitan
	$(BIN)/python -m pip download $(PIP_FLAGS) --no-deps -d $(VENV)/parity triton==3.9.0
	$(BIN)/python -m zipfile -e $(VENV)/parity/triton-*.whl $(VENV)/parity/triton
	rm $(VENV)/parity/*.whl
	touch $@

peers: $(PARITY_STAMP) ## Fetch the packages that test-parity and `benchmarks/layer.py --peers` compare with.

test-parity: $(PARITY_STAMP) ## Compare with megatron-core, transformers, torchtitan, torchao, Triton, Transformer Engine.
	$(PYTEST) -m parity tests/parity

test-slow: $(STAMP) ## Run the tests marked slow.
	$(PYTEST) -m "slow and not gpu"

gpu: $(if $(GPU_PYTHON),,$(STAMP)) ## Run the tests and benchmarks that need a CUDA device, and write a report.
	PYTHONPATH=. $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu_report.py

wheel: $(STAMP) ## Build a wheel and use it in a fresh environment with torch and einops alone.
	rm -rf build dist .venv-wheel
	$(BIN)/python -m build --wheel --outdir dist
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt dist/*.whl
	.venv-wheel/bin/python -I tests/wheel_check.py .
	rm -rf build .venv-wheel

benchmark-smoke: $(PARITY_STAMP) ## Run the benchmarks at a tiny size, with every peer.
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/layer.py --tiny --rounds 2 --peers all --breakdown \
		--report --results build/benchmarks
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth.py --tiny --rounds 2 --report --results build/benchmarks
	$(BIN)/python benchmarks/router_fusion.py --tiny
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/compile.py --tiny --backend aot_eager
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/emulation.py --tiny --report --results build/benchmarks
	$(BIN)/python benchmarks/import_time.py --rounds 5 --limit 1.1
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/communication.py --tiny
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/expert_parallel.py --tiny
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quantization.py --tiny
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/quantized_training.py --tiny --output-dir build/quantized

clean: ## Remove what builds and checks left; environments and runs stay.
	rm -rf build dist .venv-wheel *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find moe router dispatchers tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
