"""Bridges: trajectories out, into files and trainers.

`examples` is what a session offers, `selection` what of it is taken; `sft`, `pairs`, `atif` and
`parquet` write files. `base` turns groups of sessions into rows, which the bridges into trainers
bring into their own shapes.
"""
