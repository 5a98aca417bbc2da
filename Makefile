# The front door. Each target is one line that calls cargo (or a script); nothing else to learn.
CARGO ?= cargo
QUICK ?= --quick
PYTHON ?= python3
DEMO = "show the ten largest files under src" "replace foo with bar in every rust file" "how much disk space is free" \
       "compress the logs folder into backup.tar.gz" "undo the last commit but keep the changes"

.PHONY: demo small test serve-clients soak fmt lint docs default-model verify-artifacts test-requests mlx test-mlx cuda-kernels test-cuda test-neon test-page templates-peer bench-kernels bench-bake bench-peers bench-serve bench-mlx

demo:            ## Run the built-in default model on a handful of requests (needs Rust alone).
	@$(CARGO) build --release -p loaf-cli --bin loaf && for r in $(DEMO); do echo "\$$ loaf run \"$$r\""; target/release/loaf run "$$r" || exit 1; done

small:           ## target/small/loaf-small, the program of at most 4 MB for `bake executable MODEL -o PROGRAM --runtime`.
	RUSTFLAGS="-C force-unwind-tables=no --cfg loaf_small" $(CARGO) build --profile small -p loaf-cli --bin loaf-small

test:            ## Pass everything: format, lints, documentation, tests, published artifacts.
	$(CARGO) fmt --all --check && $(MAKE) lint docs && $(CARGO) test --workspace && $(MAKE) verify-artifacts test-requests test-mlx test-page

mlx:             ## loaf with the MLX backend, in .mlx/cpu/bin or .mlx/cuda13/bin (MLX_VARIANT=cuda13 for NVIDIA; macOS: .mlx/metal/bin).
	./runtime/mlx/build.sh

test-mlx:        ## The MLX suites alone; says so and passes if MLX cannot be fetched.
	./runtime/mlx/test.sh

cuda-kernels:    ## Compile the CUDA kernels again (NVRTC from PyPI; no toolkit, no card).
	python3 runtime/src/backend/cuda/kernels/build.py

test-cuda:       ## The CUDA suites on a card (and under compute-sanitizer, if it is there).
	./tests/cuda.sh

test-neon:       ## The NEON kernels on emulated CPUs (needs a cross linker and qemu; not part of test).
	./tests/neon.sh

test-page:       ## A report in a browser, light and dark; says so and passes if there is no Chromium.
	$(PYTHON) tests/page.py

templates-peer:  ## Published chat templates beside Jinja (downloads packages that carry them; TEMPLATES="FOLDER --only qwen" and more).
	python3 tests/templates_peer.py $(TEMPLATES)

serve-clients:   ## Real clients, Schemathesis, a browser and a balancer against the server (installs the packages; CLIENTS="--only python").
	$(CARGO) build --release -p loaf-cli -p loaf-bake --bin loaf --bin bake && $(PYTHON) tests/clients/run.py $(CLIENTS)

soak:            ## Two hours of mixed load on the server, which has to end with the memory it began with (SECONDS=120 for less).
	LOAF_SOAK_SECONDS=$(or $(SECONDS),7200) $(CARGO) test -p loaf-tests --test serve_soak -- --nocapture

fmt:             ## Format the code.
	$(CARGO) fmt --all

lint:            ## Lints alone.
	$(CARGO) clippy --workspace --all-targets --quiet -- -D warnings

docs:            ## The crates' documentation, warnings refused.
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --quiet

default-model:   ## From generator to loaf: data, training (one GPU), bake, measurement.
	./artifacts/default/make.sh

bench-kernels:   ## Bytes and operations per second of every kernel, on this machine.
	$(CARGO) run --release --quiet -p loaf-runtime --example kernel_bench

bench-peers:     ## Loaf beside llama.cpp, same weights, in turns (installs it; Linux; PEERS="--only dense" and more).
	python3 bench/peers.py $(PEERS)

bench-serve:     ## loaf serve beside llama.cpp's server, same weights: load and follow-ups (SERVE="--only follow" and more).
	$(PYTHON) bench/serve.py $(SERVE)

bench-mlx:       ## Loaf beside mlx-lm on one GPU, same random 4-bit weights (MLX_PEERS="--only qwen3_0_6b" and more).
	python3 bench/mlx_peers.py $(MLX_PEERS)

verify-artifacts: ## Bake every published artifact again and compare its id with artifacts/lock.toml.
	$(CARGO) run --release --quiet -p loaf-bake -- lock --check

test-requests:   ## The default model's closed test set and judge on themselves (a twelfth; QUICK= for all), and its task files.
	python3 artifacts/default/judge.py --self-test $(QUICK) && cd artifacts/default && python3 check_tasks.py && python3 check_tasks.py --canary

bench-bake:      ## Trace and prove every graph of five published models, their weights absent.
	$(CARGO) run --release --quiet -p loaf-bake -- bench-graphs --quant q4 $(sort $(dir $(wildcard tests/fixtures/configs/*/config.json)))
