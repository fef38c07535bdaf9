"""Inference engines: who samples. The contract is `base`; every other file is one engine.

An engine is given by a short form (`scripted:FILE`, `embedded:DIR`, `http://...`); see `ENGINES`.
"""
