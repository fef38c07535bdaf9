"""Bridges: trajectories out, into files and trainers.

`examples` is what a session offers, and the files for supervised training and for pairs;
`selection` is what of it is taken. `traces` and `parquet` write files, `parquet` also the one in
which a trainer sends its logprobs back. `base` turns groups of sessions into rows, which the
bridges into trainers bring into their own shapes.
"""
