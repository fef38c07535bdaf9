"""Bridges: trajectories out, into files and trainers.

`examples` is what a session offers, what of it is taken, and the files for supervised training and
for pairs. `traces` and `parquet` write files, `parquet` also the one in
which a trainer sends its logprobs back. `base` turns groups of sessions into rows, which the
bridges into trainers bring into their own shapes.
"""
