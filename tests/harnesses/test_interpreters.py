"""Bundles carry an interpreter that starts."""

import shutil
from pathlib import Path

import pytest

from bridle.errors import HarnessError
from bridle.harnesses.bundles import Builder
from bridle.harnesses.installers import (
    CARRIED,
    LOADER,
    carries,
    carry_libraries,
    carry_node,
    is_binary,
    libraries_of,
)


@pytest.mark.parametrize(
    ("library", "does"),
    [
        ("glibc 2.33", True),
        ("glibc 2.36", True),
        ("glibc 3.0", True),
        ("glibc 2.31", False),
        ("musl 1.2", False),
        (None, False),
    ],
)
def test_only_a_loader_that_can_name_programs_is_carried(library, does):
    assert carries(library) is does


BASH = Path("/bin/bash").resolve()


@pytest.fixture
def bundle(tmp_path):
    """A builder whose bundle holds a program of this machine in place of node."""
    node = tmp_path / "node_modules/node-x/bin/node"
    node.parent.mkdir(parents=True)
    (tmp_path / "node_modules/.bin").mkdir()
    shutil.copy2(BASH, node)
    return Builder(tmp_path, print, "tool 1.0"), node


async def test_a_node_that_starts_by_itself_starts_so_and_from_anywhere(bundle, tmp_path):
    builder, node = bundle
    link = tmp_path / "node_modules/.bin/node"
    await carry_node(builder, node, link)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    said = await Builder(moved, print, "").run(
        (str(moved / "node_modules/.bin/node"), "-c", "readlink /proc/$$/exe; echo $0", "a b")
    )
    assert said.decode().splitlines() == [f"{moved}/node_modules/node-x/bin/node", "a b"]


async def test_a_node_that_lacks_a_library_starts_with_what_is_carried(bundle, tmp_path):
    builder, node = bundle
    text = node.read_bytes()
    wanted = next(name for name in (b"libtinfo.so.6", b"libdl.so.2") if name in text)
    link = tmp_path / "node_modules/.bin/node"
    await carry_node(builder, node, link)
    node.write_bytes(text.replace(wanted, b"libxx" + wanted[5:]))
    strange = "libxx" + wanted[5:].decode()
    with pytest.raises(HarnessError, match=strange):
        await builder.run((str(link), "-c", "true"))
    (tmp_path / CARRIED / wanted.decode()).rename(tmp_path / CARRIED / strange)
    # Bash has no option `--require` and says so: the loader has started it.
    with pytest.raises(HarnessError, match="Shell options"):
        await builder.run((str(link), "-c", "true"))


async def test_the_loader_and_the_libraries_are_copies_of_the_machine_s(bundle, tmp_path):
    builder, node = bundle
    (tmp_path / CARRIED).mkdir()
    await carry_libraries(builder, [node])
    assert is_binary(tmp_path / LOADER)
    carried = {path.name for path in (tmp_path / CARRIED).iterdir()}
    assert {"libc.so.6", "libgcc_s.so.1"} <= carried
    line = ("--library-path", str(tmp_path / CARRIED), str(node), "-c", "echo $(</proc/$$/maps)")
    maps = (await builder.run((str(tmp_path / LOADER), *line))).decode()
    loaded = {word for word in maps.split() if ".so" in word}
    assert loaded
    assert [path for path in loaded if not path.startswith(str(tmp_path))] == []


async def test_where_ldd_has_nothing_to_say_the_bundle_is_refused(bundle, tmp_path):
    builder, _ = bundle
    (tmp_path / CARRIED).mkdir()
    (tmp_path / "text").write_text("no program")
    with pytest.raises(HarnessError, match=r"tool 1\.0: ldd names neither a loader nor"):
        await carry_libraries(builder, [tmp_path / "text"])


def test_libraries_are_told_from_what_only_has_their_name(tmp_path):
    library = tmp_path / "deep/real.so.6"
    library.parent.mkdir()
    shutil.copy2(BASH, library)
    (tmp_path / "script.so").write_text("no library")
    (tmp_path / "folder.so").mkdir()
    (tmp_path / "link.so").symlink_to(library)
    assert libraries_of(tmp_path) == [library]
