"""One file a stage: contract and maths first, kernels, then the host wrapper."""
