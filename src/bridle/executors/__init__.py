"""Executors: where sessions are computed. `local` is this process; the contract is `base`."""
