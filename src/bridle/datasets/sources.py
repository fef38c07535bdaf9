"""Lists and fetches source distributions, as a program: `python sources.py NAME [FILE FOLDER]`.

It uses pip's own finder and session, so the user's indexes, proxies, certificates and credentials
count. `pip download` cannot be used: it runs the build code of what it fetched, here, with the
user's rights. Nothing of a source distribution is run or unpacked by this program. Prints JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20


def main(name: str, wanted: str = "", folder: str = "") -> dict[str, Any]:
    """List the source distributions of a package; with a file name (`wanted`), download
    that one.
    """
    from pip._internal.commands import create_command
    from pip._internal.network.utils import HEADERS

    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-binary", ":all:", "--pre", "--no-input", name])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)  # noqa: SLF001 - pip-tools does so
        links = {
            found.link.filename: (str(found.version), found.link)
            for found in finder.find_all_candidates(name)
        }
        if not wanted:
            known = [
                {"version": version, "file": file, "yanked": link.is_yanked}
                for file, (version, link) in links.items()
            ]
            return {"sources": known}
        link = links[wanted][1]
        answer = session.get(link.url_without_fragment, headers=HEADERS, stream=True)
        answer.raise_for_status()
        return {"sha256": fetch(answer, link, Path(folder, wanted))}


def fetch(answer: Any, link: Any, target: Path) -> str:  # noqa: ANN401 - pip's own types
    """Write the body of an HTTP response to a file, and return its SHA-256.

    `ValueError` for the wrong content, or too much.
    """
    named = hashlib.new(link.hash_name) if link.hash_name else None
    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(exist_ok=True)
    with target.open("wb") as file:
        for piece in answer.iter_content(1 << 16):
            size += len(piece)
            if size > MOST_BYTES:
                raise ValueError(
                    f"the download {target.name} has more than {MOST_BYTES >> 20} MiB, the limit"
                )
            file.write(piece)
            digest.update(piece)
            if named is not None:
                named.update(piece)
    if named is not None and named.hexdigest() != link.hash:
        raise ValueError(
            f"the download {target.name} has another {link.hash_name} hash than the package index "
            "says"
        )
    return digest.hexdigest()


if __name__ == "__main__":
    # pip prints warnings of its own on stdout.
    said = json.dumps(main(*sys.argv[1:]))
    sys.stdout.write(f"\n{said}\n")
