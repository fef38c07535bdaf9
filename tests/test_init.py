"""The names that `import bridle` offers."""

import subprocess
import sys


def test_public_names_of_bridle_are_imported_lazily():
    program = (
        "import sys, bridle; assert set(dir(bridle)) == set(bridle.__all__);"
        "assert len([name for name in sys.modules if name.startswith('bridle')]) == 1;"
        "bridle.Task; assert 'bridle.api' not in sys.modules; bridle.Nothing"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.stderr.endswith("AttributeError: module 'bridle' has no attribute 'Nothing'\n")
