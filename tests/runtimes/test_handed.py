"""Variables that pass by the programs outside."""

import subprocess

from bridle.runtimes.place import PREFIX, TAKE, handed


def test_outside_no_variable_has_its_own_name():
    assert handed({"LD_PRELOAD": "x", "PATH": "y"}) == {
        "BRIDLE_IN_LD_PRELOAD": "x",
        "BRIDLE_IN_PATH": "y",
    }


def test_inside_they_have_their_names_and_values_again():
    given = {"PATH": "/usr/bin:/bin", "A": "a b\nc 'd' $HOME", "EMPTY": ""}
    done = subprocess.run(
        ["/bin/bash", "-c", f"{TAKE} exec env -0"],
        env=handed(given),
        capture_output=True,
        text=True,
        check=True,
    )
    seen = dict(word.split("=", 1) for word in done.stdout.split("\0") if word)
    assert given.items() <= seen.items()
    assert not [name for name in seen if name.startswith((PREFIX, "BRIDLE_"))]
