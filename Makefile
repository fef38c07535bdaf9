# Thin calls of scripts/; each sets up what it needs. `make test ARGS="tests/gateway -x"` passes
# arguments on.
.PHONY: setup test lint demo bench docs long test-harnesses test-vllm test-sglang test-sandbox test-train test-postgres test-ray test-browser test-agents test-tasks test-deploy test-slurm test-pythons dist first-day lock
.NOTPARALLEL:

setup:
	@scripts/setup dev embedded

test lint demo bench docs long test-harnesses test-vllm test-sglang test-sandbox test-train test-postgres test-ray test-browser test-agents test-tasks test-deploy test-slurm test-pythons dist first-day lock:
	@scripts/$@ $(ARGS)
