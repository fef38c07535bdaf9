"""Task sets: where tasks come from.

`jsonl` reads files of tasks, with `swe` for rows in the form of SWE-bench and `harbor` for the
folders and registries of Harbor. `releases` makes tasks from releases of Python packages:
`environments` builds and installs them, and the program `sources` lists and fetches them.
"""
