"""Capture: append-only facts of model calls, written before a reply leaves, never changed.

`records` says what a fact is, `store` is the contract (and a store in memory), `sqlite` keeps the
facts in one file per node, `formats` is that file's layout and its versions. Trajectories are a
pure function of these facts, so any session can be built again later.
"""
