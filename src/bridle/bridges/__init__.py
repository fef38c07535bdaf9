"""Bridges: trajectories out, into files and trainers.

`parquet` writes and reads whole runs, `sft` writes accepted trajectories as supervised examples.
"""
