"""File system view of a bubblewrap sandbox: a read-only system, little of `/etc`, folders of its
own.

Everything not named here is not there: no `/root`, no other homes, no `/var`, no sockets of the
machine. What is seen of a file is as its owner may see it even where the caller is root, so nothing
secret may be in what is seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from bridle.config import RuntimeSpec
from bridle.runtimes.base import Mount

USER = "agent"
UID = 1000
HOME = f"/home/{USER}"
OWN = ("work", "home", "tmp", "more")
"""Folders of the session below its scratch folder, which it may write to; `more` holds one for
each path of `RuntimeSpec.kwargs["folders"]`."""

MEMORY_FILES = str(256 << 20)
"""Bytes of each of the two folders that lie in memory."""

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "nix")
ETC = (
    *("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "timezone"),
    *("nsswitch.conf", "os-release", "debian_version", "mime.types", "services", "protocols"),
    *("ssl/certs", "ssl/openssl.cnf", "pki/tls/certs", "ca-certificates.conf", "terminfo"),
    *("fonts", "java-17-openjdk", "perl", "python3", "python3.11", "python3.12", "python3.13"),
)
"""What of the machine's `/etc` is seen inside: nothing that is secret or names the machine."""
MASKED = (
    *("interrupts", "kcore", "key-users", "keys", "latency_stats", "sched_debug"),
    *("timer_list", "timer_stats"),
)
"""Files of `/proc` that tell of the whole machine; Docker masks most of them."""
NOT_FROM_IMAGE = frozenset({"proc", "dev", "sys", "run", "tmp", "work", "home", "root", "mnt"})
"""Folders at the top of an image that a sandbox has of its own, or does not get."""

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "TMPDIR": "/tmp",  # noqa: S108 - the sandbox's own
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
    "TERM": "dumb",
}


def make_folders(scratch: Path) -> None:
    """Make the folders that `view` binds, and the small files of `/etc`. `OSError` escapes."""
    for name in (*OWN, "etc", "aside"):
        (scratch / name).mkdir(exist_ok=True)
        (scratch / name).chmod(0o700)
    files = {
        "passwd": f"{USER}:x:{UID}:{UID}:{USER}:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"{USER}:x:{UID}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
        "hostname": "sandbox\n",
    }
    for name, text in files.items():
        (scratch / "etc" / name).write_text(text)
        (scratch / "etc" / name).chmod(0o644)


def view(spec: RuntimeSpec, scratch: Path, mounts: Sequence[Mount], top: str) -> list[str]:
    """The options of `bwrap` for a session; `top` is where its work folder is seen."""
    words = ["--unshare-user", "--unshare-all", "--disable-userns", "--as-pid-1"]
    words += ["--cap-drop", "ALL", "--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"]
    words += ["--die-with-parent", "--new-session", "--clearenv"]
    if spec.network == "open":
        words.append("--share-net")
    if spec.image is None:
        words += [*_bound(Path("/"), SYSTEM), *_etc(scratch / "etc", open_=spec.network == "open")]
    else:
        image = Path(spec.image)
        words += _bound(image, sorted({entry.name for entry in image.iterdir()} - NOT_FROM_IMAGE))
    # Read-only: where the caller is root, the kernel's own switches would be its to turn.
    words += ["--proc", "/proc", "--remount-ro", "/proc"]
    for path in (Path("/proc", name) for name in MASKED):
        words += ["--ro-bind", "/dev/null", str(path)] if path.exists() else []
    words += ["--dev", "/dev", "--size", MEMORY_FILES, "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108 - the sandbox's own
    words += ["--remount-ro", "/dev", "--size", MEMORY_FILES, "--tmpfs", "/run"]
    words += ["--bind", str(scratch / "tmp"), "/tmp"]  # noqa: S108 - the sandbox's own
    words += ["--bind", str(scratch / "home"), HOME, "--bind", str(scratch / "work"), top]
    for number, target in enumerate(spec.kwargs.get("folders", ())):
        folder = scratch / "more" / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        words += ["--bind", str(folder), target]
    for mount in mounts:
        words += ["--ro-bind", str(mount.source), mount.target]
    for source in spec.kwargs.get("binds", ()):
        words += ["--ro-bind", source, source]
    return [*words, "--remount-ro", "/"]


def _bound(root: Path, names: Iterable[str]) -> list[str]:
    """Entries at the top of a root folder, read-only; links stay links."""
    words: list[str] = []
    for name in names:
        entry = root / name
        if entry.is_symlink():
            words += ["--symlink", os.readlink(entry), f"/{name}"]  # noqa: PTH115 - kept as it is
        elif entry.exists():
            words += ["--ro-bind", str(entry), f"/{name}"]
    return words


def _etc(own: Path, *, open_: bool) -> list[str]:
    """The machine's harmless files of `/etc`, and ours."""
    names = (*ETC, "resolv.conf") if open_ else ETC
    words = ["--symlink", "/proc/self/mounts", "/etc/mtab"]
    for name in names:
        if (entry := Path("/etc", name)).exists():
            words += ["--ro-bind", str(entry.resolve()), f"/etc/{name}"]
    for entry in sorted(own.iterdir()):
        words += ["--ro-bind", str(entry), f"/etc/{entry.name}"]
    return words
