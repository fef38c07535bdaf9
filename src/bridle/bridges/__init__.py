"""Bridges: trajectories out, into files and trainers.

`examples` is what a session offers, and the file for supervised training; `selection` is what of it
is taken. `pairs`, `atif` and `parquet` write files, and `logprobs` the one in which a trainer sends
its logprobs back. `base` turns groups of sessions into rows, which the bridges into trainers bring
into their own shapes.
"""
